"""Reports as pictures (extra `plots`): the heat map, or the errors of logits by position."""

from collections.abc import Mapping
from math import ceil, floor
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from ...base.errors import OptionError, shortened
from ...base.extras import extra
from ...base.whole_file import whole_file
from ...traces.points import Key
from ..detail import Detail, Details
from ..verdict import Verdict
from .html import FIRST
from .report import SYMBOLS, Report, layout


def pyplot() -> Any:
    """matplotlib, drawing into files and never a window. Raises UnsupportedError that says how to install it."""
    extra("matplotlib", "plots", "a plot").use("Agg")
    return extra("matplotlib.pyplot", "plots", "a plot")


def check_plot(path: Path) -> None:
    """Check that `save` can write such a file, before anything is computed. Raises UnsupportedError or OptionError."""
    known = pyplot().FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise OptionError(f"{path}: expected a name that ends in one of .{', .'.join(sorted(known))}")


def save(figure: Any, path: Path, text: str = "") -> None:
    """Write a figure to a picture file, with a text above it, of which more than four lines are cut, and close it."""
    lines = wrap(text, int(12.5 * figure.get_figwidth()))  # an inch takes 14 letters of 8 points
    if lines:
        figure.suptitle("\n".join(lines[:4]) + "..." * (len(lines) > 4), fontsize=8)
    try:
        with whole_file(path) as part:
            figure.savefig(part, dpi=150, format=path.suffix[1:].lower())
    finally:
        pyplot().close(figure)


def plot(report: Report, path: Path, details: Details | None = None) -> None:
    """Write the heat map as a picture: each tensor's largest error as a part of its bound, on a logarithmic scale.

    A report on logits alone has no such map: then the error of each position, which `details` hold, is drawn against its limit.
    Raises OptionError if there is nothing to draw.
    """
    logits = details.logits if details is not None else None
    if report.operations:
        bad = {o.key: SYMBOLS[o.verdict] for o in report.operations if o.verdict >= Verdict.WRONG}
        figure = picture_map({o.key: o.bound_ratio or 0.0 for o in report.operations}, "largest error / bound", 1e-4, 1e4, bad)
    elif logits is not None:
        figure = _positions(logits)
    else:
        raise OptionError(f"{path}: nothing to draw, {report.verdict}: {shortened(report.reason)}")
    save(figure, path, report.headline)


def picture_map(values: Mapping[Key, float], label: str, least: float, most: float, signs: Mapping[Key, str] | None = None) -> Any:
    """The figure of a number for each tensor, and of the signs that some have: layers down, operations across, logarithmic colours between
    `least` and `most`. A tensor of the whole model is a column of one colour, before or behind those of the layers.
    """
    from matplotlib.colors import LogNorm

    names, layers = layout(values)
    whole = [key.name for key in values if key.layer is None]
    before, after = ([name for name in whole if (name in FIRST) == first] for first in (True, False))
    columns = [*before, *names, *after]
    cells = [[Key(name, None if name in whole else n) for name in columns] for n in layers or [0]]
    grid = [[max(values[key], least) if key in values else float("nan") for key in row] for row in cells]
    figure, axes = pyplot().subplots(figsize=(max(6.4, 2 + 0.45 * len(columns)), 2.4 + 0.25 * len(layers)), layout="constrained")
    shown = axes.imshow(grid, aspect="auto", cmap="RdYlBu_r", norm=LogNorm(least, most))  # colours that all readers tell apart
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right")
    axes.set_yticks(range(len(layers)), layers)
    axes.set_ylabel("layer" * bool(layers))
    for edge in (len(before), len(before) + len(names)):
        axes.axvline(edge - 0.5, color="white", linewidth=4)
    figure.colorbar(shown, label=label, format="{x:g}")
    for y, row in enumerate(cells):
        for x, key in enumerate(row):
            if signs and key in signs and (key.layer is not None or y == len(cells) // 2):
                axes.text(x, y, signs[key], ha="center", va="center")
    return figure


def _positions(logits: Detail) -> Any:
    """The figure of the logits' RMS error at each position, in units of the limit."""
    figure, axes = pyplot().subplots(figsize=(6.4, 3.6), layout="constrained")
    errors = np.clip(logits.errors, 1e-6, 1e12)
    axes.semilogy(logits.positions, errors, marker="." if len(logits.positions) <= 64 else "", linewidth=1.2)
    low, high = np.log10(errors.min()), np.log10(errors.max())
    axes.set_ylim(10.0 ** min(-1, floor(low)), 10.0 ** max(1, ceil(high)))  # whole powers of ten
    axes.yaxis.set_major_formatter("{x:g}")
    axes.axhline(1.0, color="tab:red", linestyle="--", linewidth=1.0, label="limit")
    axes.set(xlabel="position", ylabel="RMS error of the logits / limit")
    axes.legend(loc="best")
    return figure
