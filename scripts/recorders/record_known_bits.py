"""Record the digests that `bitnet-np selftest` checks. Run it only after the tests pass, and only when the contract itself has changed."""

import argparse
import json
from pathlib import Path

import bitnet_np
from bitnet_np.testing import selftest

TARGET = Path(bitnet_np.__file__).parent / "data" / "known_bits.json"


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    known = {name: selftest.digest(*compute()) for name, compute in selftest.cases().items()}
    TARGET.write_text(json.dumps(known, indent=2) + "\n", "utf-8")
    print(f"{len(known)} digests -> {TARGET}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
