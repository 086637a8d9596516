"""`bitnet-np trace`: write every intermediate tensor of one sequence to a file."""

import argparse
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError, ShapeError
from ..base.tables import table
from ..judge.report.pictures import check_plot, pyplot, save
from ..judge.report.text import show_layers
from ..traces.formats import read_any, writer
from ..traces.record import record_trace
from .arguments import dialect_of
from .inputs import opened
from .printing import answer

_MOST_DRAWN = 10**8  # probabilities in one picture


def run(arguments: argparse.Namespace) -> int:
    """Write the file and list its contents; returns the exit code."""
    layers = None if arguments.layers is None else parse_layers(arguments.layers)
    names = None if arguments.names is None else [name.strip() for name in arguments.names.split(",") if name.strip()]
    chosen, _ = writer(arguments.out, arguments.format)
    if arguments.plot is not None:
        check_plot(arguments.plot)
        if not arguments.scores:
            raise OptionError("--plot draws attention probabilities, and only --scores computes them")
    inputs = opened(arguments)
    ids = inputs.token_ids()
    if ids.ndim == 2 and len(ids) != 1:
        raise ShapeError(f"token ids have shape {list(ids.shape)}, expected one sequence")
    config, dialect = inputs.source.config, dialect_of(arguments)
    if arguments.plot is not None and len(layers or range(config.n_layers)) * config.heads * ids.size**2 > _MOST_DRAWN:
        raise OptionError(f"--plot of {config.heads} heads and {ids.size} tokens in every layer is too large: choose fewer --layers")
    how = {"format": chosen, "layers": layers, "names": names, "scores": arguments.scores, "dialect": dialect}
    written = record_trace(inputs.model(), ids, arguments.out, **how)
    if arguments.plot is not None:
        recorded = read_any(arguments.out, chosen).points
        save(attention_maps({key.layer: x for key, x in recorded.items() if key.name == "kq_soft_max"}), arguments.plot)
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


def attention_maps(probabilities: Mapping[int | None, NDArray]) -> Any:
    """The figure of the probabilities [H, T, T] of layers: layers down and heads across, and in each, queries down and keys across."""
    heads, length, _ = next(iter(probabilities.values())).shape
    room = ((0, 0), (0, 1 + length // 16), (0, 1 + length // 16))  # between two maps
    rows = [np.hstack([*np.pad(np.where(x > 0, x, np.nan), room, constant_values=np.nan)]) for x in probabilities.values()]
    inches = min(1.0, 48 / max(heads, len(rows)))  # of one map
    figure, axes = pyplot().subplots(figsize=(2.4 + inches * heads, 1.2 + inches * len(rows)), layout="constrained")
    shown = axes.imshow(np.vstack(rows), vmin=0, vmax=1, interpolation="nearest")
    step = length + room[1][1]
    axes.set_xticks(step * np.arange(heads) + length / 2, range(heads))
    axes.set_yticks(step * np.arange(len(rows)) + length / 2, probabilities)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    figure.colorbar(shown, label="attention probability")
    return figure


def parse_layers(text: str) -> list[int]:
    """The numbers of layers in a text such as 0,3-5."""
    layers: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part, re.ASCII)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise OptionError(f"--layers is {text[:60]!r}, expected numbers and rising ranges such as 0,3-5")
        layers.extend(range(int(span[1]), int(span[2] or span[1]) + 1))
    return layers
