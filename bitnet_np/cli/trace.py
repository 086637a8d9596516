"""`bitnet-np trace`: write every intermediate tensor of one sequence to a file."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..base.errors import OptionError, ShapeError
from ..traces.formats import writer
from ..traces.record import record_trace
from .arguments import add_computing_arguments, add_format_argument, add_model_and_tokens, dialect_of
from .inputs import opened
from .printing import print_json, table

SUMMARY = "Write every intermediate tensor of a forward pass."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model_and_tokens(parser)
    parser.add_argument(
        "--layers", metavar="0,3-5", help="layers to write (default: all); tensors that belong to no layer are always written"
    )
    parser.add_argument("--names", metavar="A,B", help="tensors to write, such as attn_norm,l_out (default: all but the attention scores)")
    parser.add_argument("--scores", action="store_true", help="also write attention scores and probabilities")
    add_format_argument(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="F", help="file or folder to write")
    add_computing_arguments(parser, device=False)


def run(arguments: argparse.Namespace) -> int:
    """Write the file and list its contents; returns the exit code."""
    layers = None if arguments.layers is None else parse_layers(arguments.layers)
    names = None if arguments.names is None else [name.strip() for name in arguments.names.split(",") if name.strip()]
    chosen, _ = writer(arguments.out, arguments.format)
    inputs = opened(arguments)
    ids = inputs.token_ids()
    if ids.ndim == 2 and len(ids) != 1:
        raise ShapeError(f"token ids have shape {list(ids.shape)}, expected one sequence")
    dialect = dialect_of(arguments)
    how = {"format": chosen, "layers": layers, "names": names, "scores": arguments.scores, "dialect": dialect}
    written = record_trace(inputs.model(), ids, arguments.out, **how)
    total = sum(size for _, size in written.values())
    if arguments.json:
        points = [{"name": k.name, "layer": k.layer, "shape": shape, "bytes": size} for k, (shape, size) in written.items()]
        facts = {"out": str(arguments.out), "format": chosen, "dialect": dialect.name, "tokens": int(ids.size)}
        print_json(facts | {"bytes": total, "points": points})
        return 0
    rows: dict[tuple[str, tuple[int, ...]], list] = {}  # layers of the same shape in one line
    for key, (shape, size) in written.items():
        row = rows.setdefault((key.name, shape), [[], 0])
        row[0].append(key.layer)
        row[1] += size
    print(f"{arguments.out}: {chosen}, {len(written)} points of {ids.size} tokens, dialect {dialect.name}\n")
    lines = [(name, show_layers(layers), " x ".join(map(str, shape)), size) for (name, shape), (layers, size) in rows.items()]
    print(table(("name", "layers", "shape", "bytes"), [*lines, ("all", "", "", total)]))
    return 0


def parse_layers(text: str) -> list[int]:
    """The numbers of layers in a text such as 0,3-5."""
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())) or len(first + last) > 12:
            raise OptionError(f"--layers is {text[:60]!r}, expected numbers and ranges such as 0,3-5")
        start, end = int(first), int(last) if dash else int(first)
        if end < start or end - start > 100_000:
            raise OptionError(f"--layers has the range {part.strip()!r}, expected its end not to be before its start")
        layers.extend(range(start, end + 1))
    return layers


def show_layers(layers: Sequence[int | None]) -> str:
    """Numbers of layers in short form: 0-2, 5."""
    runs: list[list[int]] = []
    for layer in sorted(layer for layer in layers if layer is not None):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"
