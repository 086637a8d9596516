"""Runs the checks, in this process. Prints one line of JSON for each."""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    import cuda_checks

    parser = argparse.ArgumentParser("cuda_checks", description=cuda_checks.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--ptx", action="store_true", help="interpret what the kernels compile to")
    where.add_argument("--gpu", action="store_true", help="run the kernels on a GPU")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"a check, or a group: {', '.join(cuda_checks.MODULES)} (default: all)")
    options = parser.parse_args(argv)
    if options.ptx:  # before anything asks for a GPU
        import_module("ptx.gpu").install()
    for module in cuda_checks.MODULES:
        import_module(f"cuda_checks.{module}")
    from cuda_checks.common import CHECKS, GROUPS

    unknown = [name for name in options.names if name not in {*CHECKS, *GROUPS}]
    if unknown:
        parser.error(f"no check or group is named {unknown[0]!r}, expected some of {', '.join([*GROUPS, *CHECKS])}")
    for name in [name for each in options.names for name in GROUPS.get(each, [each])] or CHECKS:
        start, problem = time.perf_counter(), ""
        try:
            CHECKS[name]()
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps({"check": name, "seconds": round(time.perf_counter() - start, 2), "problem": problem}), flush=True)
    return 0


if __name__ == "__main__":
    gc.set_threshold(100_000, 20, 20)  # as in conftest.py
    sys.path[:1] = [str(TESTS), str(TESTS / "support")]  # instead of this folder, whose modules share names with others
    raise SystemExit(main())
