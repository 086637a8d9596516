"""`bitnet-np convert IN OUT.gguf`: write any model that can be loaded as a GGUF file."""

import argparse
from pathlib import Path

from ..errors import OptionError
from ..files.convert import HEADS, TYPES, convert, is_permuted
from ..files.load import model_from, open_model
from . import progress
from .arguments import add_load_arguments, add_model_argument, check_out
from .printing import print_json

SUMMARY = "Write a model as a GGUF file without changing a number, or refuse."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model_argument(parser, metavar="IN")
    parser.add_argument("out", type=Path, metavar="OUT.gguf", help="the file to write")
    parser.add_argument(
        "--type", choices=TYPES, help="type of the layers' matrices (default: unchanged; ternary matrices of a folder become I2_S)"
    )
    parser.add_argument("--head", choices=HEADS, help="type of the embedding and the head (default: unchanged)")
    parser.add_argument("--allow-rounding", action="store_true", help="allow a narrower float type to round numbers")
    parser.add_argument("--force", action="store_true", help="overwrite OUT.gguf")
    add_load_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the file; returns the exit code."""
    out: Path = arguments.out
    check_out("OUT.gguf", out)
    if out.exists() and not arguments.force:
        raise OptionError(f"{out} is there, --force replaces it")
    source = open_model(arguments.model)
    model = model_from(source, progress.bar("reading"), allow_nan=arguments.allow_nan, i2s_layout=arguments.i2s_layout)
    matrix, head = TYPES.get(arguments.type), HEADS.get(arguments.head)
    convert(model, out, source, matrix=matrix, head=head, rounding=arguments.allow_rounding, progress=progress.bar("writing"))
    permuted = is_permuted(model.config)
    facts = {"out": str(out), "bytes": out.stat().st_size, "architecture": model.config.architecture, "permuted": permuted}
    if arguments.json:
        print_json(facts)
        return 0
    print(f"{out}: {facts['bytes']:,} bytes, {model.config.architecture}")
    if permuted:
        print("rows of queries and keys are permuted, as this architecture has them: logits agree to float32 rounding, not to the bit")
    return 0
