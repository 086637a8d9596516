"""`bitnet-np trace`: write every intermediate tensor of one sequence to a file."""

import argparse
import re

from ..base.errors import OptionError, ShapeError
from ..base.tables import table
from ..judge.report.text import show_layers
from ..traces.formats import writer
from ..traces.record import record_trace
from .arguments import dialect_of
from .inputs import opened
from .printing import answer


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
    points = [{"name": k.name, "layer": k.layer, "shape": shape, "bytes": size} for k, (shape, size) in written.items()]
    facts = {"out": str(arguments.out), "format": chosen, "dialect": dialect.name, "tokens": int(ids.size), "bytes": total}
    rows: dict[tuple[str, tuple[int, ...]], list] = {}  # layers of the same shape in one line
    for key, (shape, size) in written.items():
        row = rows.setdefault((key.name, shape), [[], 0])
        row[0].append(key.layer)
        row[1] += size
    heading = f"{arguments.out}: {chosen}, {len(written)} points of {ids.size} tokens, dialect {dialect.name}\n\n"
    lines = [(name, show_layers(layers), " x ".join(map(str, shape)), size) for (name, shape), (layers, size) in rows.items()]
    listed = table(("name", "layers", "shape", "bytes"), [*lines, ("all", "", "", total)])
    return answer(arguments, facts | {"points": points}, heading + listed)


def parse_layers(text: str) -> list[int]:
    """The numbers of layers in a text such as 0,3-5."""
    layers: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part, re.ASCII)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise OptionError(f"--layers is {text[:60]!r}, expected numbers and rising ranges such as 0,3-5")
        layers.extend(range(int(span[1]), int(span[2] or span[1]) + 1))
    return layers
