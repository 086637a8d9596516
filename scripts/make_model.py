"""Write a random model in the exact form of the released BitNet b1.58 2B file: `make_model.py --shape tiny OUT.gguf`.

bitnet_np/testing/released.py says what is in it. The same shape and seed give the same bytes on every machine.
"""

import argparse
import hashlib
import sys
from pathlib import Path

from benchmarks.released import ARCHITECTURES, FOUR_CODES, SHAPES, TINY, released, write_released

from bitnet_np.base.errors import Error
from bitnet_np.cli.progress import bar

__all__ = ["FOUR_CODES", "main"]


def arguments() -> argparse.ArgumentParser:
    """The parser, with one option for each number of a shape."""
    parser = argparse.ArgumentParser(prog="make_model.py", description="Write a random model in the form of the released BitNet 2B file.")
    parser.add_argument("out", metavar="OUT.gguf", type=Path)
    parser.add_argument(
        "--shape", choices=SHAPES, default="tiny", help="the numbers to start from; those of custom are those of tiny (default: tiny)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sha256", action="store_true", help="also print the file's digest")
    numbers = parser.add_argument_group("replace one number of the shape")
    for option, name in zip(
        ("--vocab", "--context", "--width", "--layers", "--ffn", "--heads", "--kv-heads", "--head-dim"), TINY, strict=True
    ):
        numbers.add_argument(option, type=int, dest=name)
    numbers.add_argument("--eps", type=float)
    numbers.add_argument("--rope-base", type=float)
    numbers.add_argument("--activation", choices=ARCHITECTURES)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    replaced = {name: getattr(options, name) for name in (*TINY, "eps", "rope_base", "activation") if getattr(options, name) is not None}
    try:
        write_released(options.out, released(**SHAPES[options.shape] | replaced), options.seed, progress=bar("writing"))
    except (Error, OSError) as error:
        print(f"make_model.py: {error}", file=sys.stderr)
        return 2
    print(f"{options.out} {options.out.stat().st_size} bytes")
    if options.sha256:
        with options.out.open("rb") as file:
            print(f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
