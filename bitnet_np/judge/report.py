"""The report on a whole trace, with its tables, its heat map and its plot."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, floor
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from ..base.errors import OptionError, listed, shortened
from ..base.extras import extra
from ..base.whole_file import whole_file
from ..traces.points import Key
from .detail import Detail, Details
from .findings import SYMBOLS, Findings, OperationVerdict, layout
from .html import FIRST, MEANT, fragment, page
from .logits import Judgement
from .verdict import Verdict


@dataclass(frozen=True, repr=False)
class Report(Findings):
    """The judgement of a dump: of its operations, and of its logits as such where it has some."""

    sequences: tuple["Report", ...] = ()

    def __repr__(self) -> str:
        judged = [f"{len(self.operations)} tensors"] if self.operations else []
        judged += ["logits"] if self.logits else []
        return f"Report({self.verdict}: {shortened(self.reason, 200)}{'; ' * bool(judged)}{' and '.join(judged)})"

    @classmethod
    def of_logits(cls, logits: Judgement, notes: tuple[str, ...] = ()) -> "Report":
        """The report on a dump that has logits and nothing else."""
        return cls(logits.verdict, logits.reason, notes=notes, logits=logits)

    @classmethod
    def of_sequences(cls, reports: Sequence["Report"], notes: tuple[str, ...] = ()) -> "Report":
        """The report on several sequences: that on the worst of them, which names it and the others that are not right."""
        worst = max(reports, key=lambda report: report.verdict.rank)
        report = replace(worst, notes=(*worst.notes, *notes), sequences=tuple(reports))
        bad = [b for b, other in enumerate(reports) if other.verdict >= Verdict.WRONG and b != report.sequence]
        also = f"; WRONG or INVALID too: {'sequence' if len(bad) == 1 else 'sequences'} {listed(bad)}" if bad else ""
        return replace(report, reason=f"sequence {report.sequence}: {worst.reason}{also}")

    def with_logits(self, logits: Judgement) -> "Report":
        """The report on operations together with that on logits, which is the reason if they are worse than any operation.

        A wrong operation is the worst: logits that cannot be compared may be what it made of them.
        """
        if self.verdict == Verdict.WRONG or logits.verdict <= self.verdict:
            more = f"; logits alone: {logits.explanation}" if logits.verdict == Verdict.WRONG and logits.explanation else ""
            more = f"; logits: {logits.reason}" if logits.verdict > self.verdict else more
            return replace(self, logits=logits, reason=self.reason + more)
        return replace(self, verdict=logits.verdict, reason=f"logits: {logits.reason}", logits=logits)

    def html(self, details: Details | None = None, about: Mapping[str, str] | None = None) -> str:
        """The report as one HTML document, see html.page."""
        return page(self, details, about)

    def _repr_html_(self) -> str:
        """The headline and the heat map, for notebooks."""
        return fragment(self)

    def as_dict(self) -> dict[str, Any]:
        """The report, for JSON."""

        def plain(o: OperationVerdict) -> dict[str, Any]:
            fields = asdict(o) | {"verdict": o.verdict.name, "across": list(map(str, o.across)), "closer_to_float64": o.closer}
            del fields["key"]
            return {"tensor": o.key.name, "layer": o.key.layer} | fields

        return {
            "verdict": self.verdict.name,
            "meaning": self.verdict.text,
            "reason": self.reason,
            "first_wrong": plain(self.first_wrong) if self.first_wrong else None,
            "causes": {cause: list(places) for cause, places in self.causes.items()},
            "operations": [plain(o) for o in self.operations],
            "missing": list(map(str, self.missing)),
            "notes": list(self.notes),
            "closer_to_float64": self.closer,
            "logits": self.logits.as_dict() if self.logits else None,
            "sequences": [report.as_dict() for report in self.sequences],
        }


CLOSER_HEADER = ("tensor", "tensors", "ours", "theirs", "closer")


def closer_rows(report: Report) -> list[tuple]:
    """A row for each kind of tensor: RMS errors from float64 over all layers, in u = 2^-24 of its RMS, and the side that is closer."""
    rows = []
    for name in dict.fromkeys(o.key.name for o in report.operations if o.closer):
        judged = [o for o in report.operations if o.closer and o.key.name == name]
        ours, theirs = (float(np.sqrt(np.mean([x**2 for x in values]))) for values in zip(*_errors(judged), strict=True))
        closer = OperationVerdict(judged[0].key, Verdict.ROUNDING, ours_rms=ours, theirs_rms=theirs).closer
        rows.append((name, len(judged), ours, theirs, closer))
    return rows


def _errors(operations: Sequence[OperationVerdict]) -> list[tuple[float, float]]:
    return [(o.ours_rms, o.theirs_rms) for o in operations if o.ours_rms is not None and o.theirs_rms is not None]


def next_step(report: Findings) -> str:
    """What to do next about a wrong dump whose cause is not known; empty where it is, or where the reason says it."""
    first, logits = report.first_wrong, report.logits
    known = first is not None and (first.hypothesis or len(first.across) != 1)
    if report.verdict != Verdict.WRONG or known or (logits is not None and logits.explanation):
        return ""
    if first is None:
        names = listed(report.missing, 6) if report.operations and report.missing else "attn_norm to l_out of each layer"
        return f"dump intermediate tensors too, {names}, and the operation at fault can be named"
    if first.worst is None:
        return "dump whole tensors: this format holds a part of each"
    if first.key.name == "kqv_out" and Key("kq", first.key.layer) not in {o.key for o in report.operations}:
        return f"dump kq-{first.key.layer} and kq_soft_max-{first.key.layer} too, which tell scores, softmax and values apart"
    return f"every input of {first.place} is in the dump, so the bug is in this operation; --html shows its worst numbers"


LEGEND = "= same bits   . rounding   ~ flips   n narrower   X WRONG   ! INVALID   (blank: not in the dump)"


def heat_map(report: Report, columns: int | None = None) -> str:
    """The verdicts as a text of layers down and operations across, a sign for each tensor. columns: those of the terminal, if it is one."""
    return "\n".join([*text_map({o.key: SYMBOLS[o.verdict] for o in report.operations}, columns), "", LEGEND])


def text_map(cells: Mapping[Key, str], columns: int | None = None) -> list[str]:
    """Lines with a short text for each tensor: layers down, operations across, then the tensors of the whole model."""
    (names, layers), lines, size = layout(cells), [], max(map(len, cells.values()), default=1)
    whole = [f"{key.name} {cell}" for key, cell in cells.items() if key.layer is None]
    fit = len(names) if columns is None else max(1, (columns - 8) // (size + 1))
    for part in (names[i : i + fit] for i in range(0, len(names), fit or 1)):
        tall = max(map(len, part))
        padded = [name.rjust(tall) for name in part]
        lines += [" " * 9 + " ".join(name[i].rjust(size) for name in padded) for i in range(tall)]
        lines += [f"layer {n:>2} " + " ".join(cells.get(Key(name, n), "").rjust(size) for name in part) for n in layers]
    return [*lines, *(["", "   ".join(whole)] if whole else [])]


def pyplot() -> Any:
    """matplotlib, drawing into files and never a window. Raises UnsupportedError that says how to install it."""
    extra("matplotlib", "plots", "a plot").use("Agg")
    return extra("matplotlib.pyplot", "plots", "a plot")


def check_plot(path: Path) -> None:
    """Check that `save` can write such a file, before anything is computed. Raises UnsupportedError or OptionError."""
    known = pyplot().FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise OptionError(f"{path}: expected a name that ends in one of .{', .'.join(sorted(known))}")


def save(figure: Any, path: Path) -> None:
    """Write a figure to a picture file, and close it."""
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
    if not report.operations and logits is None:
        raise OptionError(f"{path}: nothing to draw, {report.verdict}: {shortened(report.reason)}")
    save(_heat_map(report) if report.operations or logits is None else _positions(report, logits), path)


def _heat_map(report: Report) -> Any:
    """The figure of the heat map, with signs on the tensors that are wrong."""
    figure, cells = picture_map({o.key: o.bound_ratio or 0.0 for o in report.operations}, "largest error / bound", 1e-4, 1e4)
    bad = {o.key: o for o in report.operations if o.verdict >= Verdict.WRONG}
    for y, row in enumerate(cells):
        for x, key in enumerate(row):
            if key in bad and (key.layer is not None or y == len(cells) // 2):
                figure.axes[0].text(x, y, SYMBOLS[bad[key].verdict], ha="center", va="center")
    title(figure, report.said)
    return figure


def picture_map(values: Mapping[Key, float], label: str, least: float, most: float) -> tuple[Any, list[list[Key]]]:
    """The figure of a number for each tensor, and the tensor of each cell: layers down, operations across, logarithmic colours between
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
    return figure, cells


def _positions(report: Report, logits: Detail) -> Any:
    """The figure of the logits' RMS error at each position, in units of the limit."""
    figure, axes = pyplot().subplots(figsize=(6.4, 3.6), layout="constrained")
    errors = np.clip(logits.errors, 1e-6, 1e12)
    axes.semilogy(logits.positions, errors, marker="." if len(logits.positions) <= 64 else "", linewidth=1.2)
    low, high = np.log10(errors.min()), np.log10(errors.max())
    axes.set_ylim(10.0 ** min(-1, floor(low)), 10.0 ** max(1, ceil(high)))  # whole powers of ten
    axes.yaxis.set_major_formatter("{x:g}")
    axes.axhline(1.0, color="tab:red", linestyle="--", linewidth=1.0, label="limit")
    axes.set_xlabel("position")
    axes.set_ylabel("RMS error of the logits / limit")
    axes.legend(loc="best")
    title(figure, report.said)
    return figure


def title(figure: Any, text: str) -> None:
    """Put a text above a figure, in as many lines as its width takes; of more than four the rest is cut."""
    letters = int(12.5 * figure.get_figwidth())  # an inch takes 14 letters of 8 points
    lines = wrap(text, letters)
    figure.suptitle("\n".join(lines[:4]) + "..." * (len(lines) > 4), fontsize=8)


def table_rows(operations: Sequence[OperationVerdict]) -> list[tuple]:
    """A row for each tensor: place, verdict, largest error, its part of the bound unless that is nearly 0, NMSE, scale, cosine."""
    parts = [None if (o.bound_ratio or 0) > MEANT else o.bound_ratio for o in operations]
    return [(o.place, o.verdict.name, o.max_error, part, o.nmse, o.scale, o.cosine) for o, part in zip(operations, parts, strict=True)]


TABLE_HEADER = ("tensor", "verdict", "max error", "of bound", "NMSE", "scale", "cosine")
