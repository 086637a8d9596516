"""The report on a dump: the verdict on each tensor, all of them as one record, its tables and its heat map as text."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...base.errors import listed, shortened
from ...traces.points import GRADIENTS, LAYER_NAMES, Key
from ..detail import Details
from ..hypothesis import Hypothesis
from ..law.precision import Precision
from ..measures import Judgement
from ..verdict import Judged, Verdict

SYMBOLS = {Verdict.SAME_BITS: "=", Verdict.ROUNDING: ".", Verdict.FLIPS: "~", Verdict.NARROW: "n", Verdict.WRONG: "X", Verdict.INVALID: "!"}
LEGEND = "= same bits   . rounding   ~ flips   n narrower   X WRONG   ! INVALID   (blank: not in the dump)"
MEANT = 1e10
"""A larger part of a bound says that the bound is nearly 0, not how large the error is."""


@dataclass(frozen=True, repr=False)
class OperationVerdict:
    """The verdict on one tensor of the dump."""

    key: Key
    verdict: Verdict
    reason: str = ""
    across: tuple[Key, ...] = ()  # operations judged together, when inputs are not in the dump; the tensor's own is the last
    max_error: float | None = None
    bound_ratio: float | None = None  # largest error as a part of its bound: above 1 it is outside
    nmse: float | None = None
    scale: float | None = None  # best common factor
    cosine: float | None = None
    ulps: float | None = None  # largest error in units of the last place of the largest value
    worst: tuple[int, ...] | None = None
    ours_rms: float | None = None  # RMS error of our kernel on their own inputs, in u = 2^-24 of the RMS of what float64 gives
    theirs_rms: float | None = None  # theirs, in the same unit; both only where the operation's inputs are in the dump
    hypothesis: str | None = None  # what the operation did instead, if recognised
    mistake: str | None = None  # its id in the catalogue of mistakes, or "read...." for what was read off the numbers
    tried: bool = True  # whether known mistakes were tried on it: across many operations of a large model that is too much work

    def __repr__(self) -> str:
        said = self.hypothesis or self.reason
        return f"OperationVerdict({self.place}: {self.verdict}{', ' * bool(said)}{shortened(said)})"

    def explained(self, cause: Hypothesis | None) -> "OperationVerdict":
        """The same verdict with what the operation did instead."""
        return self if cause is None else replace(self, hypothesis=cause.text, mistake=cause.id)

    @property
    def of_bound(self) -> float | None:
        """`bound_ratio`; None where the bound is nearly 0."""
        return None if (self.bound_ratio or 0) > MEANT else self.bound_ratio

    @property
    def closer(self) -> str | None:
        """The side that is closer to float64: "ours", "theirs", or "alike" within 5 %; None where it is not known."""
        return None if self.ours_rms is None or self.theirs_rms is None else _closer(self.ours_rms, self.theirs_rms)

    @property
    def place(self) -> str:
        return self.key.place

    @property
    def passed(self) -> bool:
        """Whether the tensor is correct. There is no truth of this record: `first_wrong` is None or one of them."""
        return self.verdict.passed


def _closer(ours: float, theirs: float) -> str:
    if abs(ours - theirs) <= 0.05 * max(ours, theirs):
        return "alike"
    return "ours" if ours < theirs else "theirs"


@dataclass(frozen=True, repr=False)
class Report(Judged):
    """The judgement of a dump: of its operations, and of its logits as such where it has some. It is true if it passed."""

    verdict: Verdict
    reason: str
    operations: tuple[OperationVerdict, ...] = ()
    first_wrong: OperationVerdict | None = None
    missing: tuple[Key, ...] = ()  # tensors of the forward pass that the dump does not have
    notes: tuple[str, ...] = ()  # assumptions made, and work left out
    logits: Judgement | None = None
    precision: Precision | None = None  # the types that operations were judged in; None: float32, and nothing was declared
    sequences: tuple["Report", ...] = ()  # of several sequences, the report on each; the rest is on one of them, `sequence`
    not_understood: tuple[str, ...] = ()  # labels of the dump that stand for no tensor

    @property
    def failure(self) -> str:
        """The verdict, the place, the cause and the next step."""
        step = next_step(self)
        return self.headline + f"; next: {step}" * bool(step)

    def __repr__(self) -> str:
        judged = [f"{len(self.operations)} tensors"] if self.operations else []
        judged += ["logits"] if self.logits is not None else []
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

    @property
    def headline(self) -> str:
        """The verdict and its reason."""
        return self.reason if self.reason.startswith(str(self.verdict)) else f"{self.verdict}: {self.reason}"

    @property
    def sequence(self) -> int | None:
        """The first of the worst of several sequences; None where the dump has one."""
        return max(range(len(self.sequences)), key=lambda b: self.sequences[b].verdict.rank, default=None)

    @property
    def causes(self) -> dict[str, tuple[str, ...]]:
        """Each distinct cause of wrong tensors, and their places."""
        return causes(o for o in self.operations if o.verdict == Verdict.WRONG)

    @property
    def closer(self) -> dict[str, int]:
        """Number of tensors by the side that is closer to float64."""
        return {side: sum(o.closer == side for o in self.operations) for side in ("ours", "theirs", "alike")}

    def html(self, details: Details | None = None, about: Mapping[str, str] | None = None) -> str:
        """The report as one HTML document, see html.page."""
        from .html import page

        return page(self, details, about)

    def _repr_html_(self) -> str:
        """The headline and the heat map, for notebooks."""
        from .html import fragment

        return fragment(self)

    def as_dict(self) -> dict[str, Any]:
        """The report, for JSON."""

        def plain(o: OperationVerdict) -> dict[str, Any]:
            fields = asdict(o) | {"verdict": o.verdict.name, "across": list(map(str, o.across)), "closer_to_float64": o.closer}
            del fields["key"]
            return {"tensor": o.key.name, "layer": o.key.layer} | fields

        return {
            "passed": self.passed,
            "verdict": self.verdict.name,
            "meaning": self.verdict.text,
            "reason": self.reason,
            "first_wrong": plain(self.first_wrong) if self.first_wrong else None,
            "causes": {cause: list(places) for cause, places in self.causes.items()},
            "operations": [plain(o) for o in self.operations],
            "missing": list(map(str, self.missing)),
            "notes": list(self.notes),
            "not_understood": list(self.not_understood),
            "closer_to_float64": self.closer,
            "logits": self.logits.as_dict() if self.logits is not None else None,
            "sequences": [report.as_dict() for report in self.sequences],
        }


def causes(operations: Iterable[OperationVerdict]) -> dict[str, tuple[str, ...]]:
    """Each distinct cause of some tensors, and their places."""
    places: dict[str, tuple[str, ...]] = {}
    for o in operations:
        if o.hypothesis:
            places[o.hypothesis] = (*places.get(o.hypothesis, ()), o.place)
    return places


def next_step(report: Report) -> str:
    """What to do next about a wrong dump whose cause is not known: one tensor to dump, which halves what may be wrong. Empty where it is
    known."""
    first, logits = report.first_wrong, report.logits
    known = first is not None and (first.hypothesis or not first.across)
    if report.verdict != Verdict.WRONG or known or (logits is not None and logits.explanation):
        return ""
    if first is None and not (report.operations and report.missing):
        return "dump l_out of the middle layer too: it tells which half of the layers is wrong"
    if first is None:
        right = max(o.key.layer or 0 for o in report.operations)
        behind = [key for key in report.missing if (key.layer or 0) >= right]
        return f"dump {_middle(behind or report.missing)} too: it tells which half of what the dump does not show is wrong"
    if len(first.across) > 1:
        return f"dump {_middle(first.across[:-1])} too: it tells which half of the {len(first.across)} operations is wrong"
    if first.worst is None:
        return "dump whole tensors: this format holds a part of each"
    if first.key.name == "kqv_out" and Key("kq", first.key.layer) not in {o.key for o in report.operations}:
        return f"dump kq-{first.key.layer} and kq_soft_max-{first.key.layer} too, which tell scores, softmax and values apart"
    return f"every input of {first.place} is in the dump, so the bug is in this operation; --html shows its worst numbers"


def _middle(keys: Sequence[Key]) -> Key:
    """The tensor in the middle, in the order they are computed: the output of a layer where there are some, and no codes or scales."""
    outputs = [key for key in keys if key.name == "l_out"]
    floats = [key for key in keys if not key.name.endswith(("_codes", "_scale"))]
    some = outputs or floats or keys
    return some[(len(some) - 1) // 2]


# --- tables ---------------------------------------------------------------------------------------------------------------------------

TABLE_HEADER = ("tensor", "verdict", "max error", "of bound", "NMSE", "scale", "cosine")
CLOSER_HEADER = ("tensor", "tensors", "ours", "theirs", "closer")


def table_rows(operations: Sequence[OperationVerdict]) -> list[tuple]:
    """A row for each tensor: place, verdict, largest error, its part of the bound unless that is nearly 0, NMSE, scale, cosine."""
    return [(o.place, o.verdict.name, o.max_error, o.of_bound, o.nmse, o.scale, o.cosine) for o in operations]


def closer_rows(report: Report) -> list[tuple]:
    """A row for each kind of tensor: RMS errors from float64 over all layers, in u = 2^-24 of its RMS, and the side that is closer."""
    errors: dict[str, list[tuple[float | None, float | None]]] = {}
    for o in report.operations:
        if o.closer:
            errors.setdefault(o.key.name, []).append((o.ours_rms, o.theirs_rms))
    means = {name: np.sqrt(np.square(np.array(both, float)).mean(axis=0)).tolist() for name, both in errors.items()}
    return [(name, len(errors[name]), *both, _closer(*both)) for name, both in means.items()]


def closer_summary(report: Report) -> str:
    """A line that says which side is closer to float64; empty where it is not known."""
    ours, theirs, alike = report.closer.values()
    if not ours + theirs + alike:
        return ""
    return f"closer to float64, on their own inputs: ours in {ours} tensors, theirs in {theirs}, alike in {alike}"


def layout(tensors: Iterable[Key]) -> tuple[list[str], list[int]]:
    """The columns and the rows of a heat map: names of tensors of layers, in the order they are computed, and numbers of layers."""
    keys = {(key.name, key.layer) for key in tensors if key.layer is not None}
    names = {name for name, _ in keys}
    return [name for name in (*LAYER_NAMES, *GRADIENTS) if name in names], sorted({n for _, n in keys})


def heat_map(report: Report, columns: int | None = None, layers: Collection[int] | None = None) -> str:
    """The verdicts as a text of layers down and operations across, a sign for each tensor. columns: those of the terminal, if it is one.
    layers: those that are shown; None: all."""
    shown = {o.key: SYMBOLS[o.verdict] for o in report.operations if layers is None or o.key.layer is None or o.key.layer in layers}
    return "\n".join([*text_map(shown, columns), "", LEGEND])


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
