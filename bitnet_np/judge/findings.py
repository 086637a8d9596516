"""What the judge finds in a dump: the verdict on each tensor, and all of them as one record."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..base.errors import shortened
from ..traces.points import GRADIENTS, LAYER_NAMES, Key
from .logits import Judgement
from .mistakes.mistake import Cause
from .precision import Precision
from .verdict import Verdict

SYMBOLS = {Verdict.SAME_BITS: "=", Verdict.ROUNDING: ".", Verdict.FLIPS: "~", Verdict.NARROW: "n", Verdict.WRONG: "X", Verdict.INVALID: "!"}


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

    def explained(self, cause: Cause | None) -> "OperationVerdict":
        """The same verdict with what the operation did instead."""
        return self if cause is None else replace(self, hypothesis=cause.text, mistake=cause.id)

    @property
    def closer(self) -> str | None:
        """The side that is closer to float64: "ours", "theirs", or "alike" within 5 %; None where it is not known."""
        if self.ours_rms is None or self.theirs_rms is None:
            return None
        if abs(self.ours_rms - self.theirs_rms) <= 0.05 * max(self.ours_rms, self.theirs_rms):
            return "alike"
        return "ours" if self.ours_rms < self.theirs_rms else "theirs"

    @property
    def place(self) -> str:
        return self.key.place


@dataclass(frozen=True, repr=False)
class Findings:
    """The judgement of a dump: of its operations, and of its logits as such where it has some."""

    verdict: Verdict
    reason: str
    operations: tuple[OperationVerdict, ...] = ()
    first_wrong: OperationVerdict | None = None
    missing: tuple[Key, ...] = ()  # tensors of the forward pass that the dump does not have
    notes: tuple[str, ...] = ()  # assumptions made, and work left out
    logits: Judgement | None = None
    precision: Precision | None = None  # the types that operations were judged in; None: float32, and nothing was declared
    sequences: tuple["Findings", ...] = ()  # of several sequences, the report on each; the rest is on one of them, `sequence`

    @property
    def said(self) -> str:
        """The verdict and its reason."""
        return self.reason if self.reason.startswith(str(self.verdict)) else f"{self.verdict}: {self.reason}"

    @property
    def sequence(self) -> int | None:
        """The first of the worst of several sequences; None where the dump has one."""
        return max(range(len(self.sequences)), key=lambda b: self.sequences[b].verdict.rank, default=None)

    @property
    def causes(self) -> dict[str, tuple[str, ...]]:
        """Each distinct cause of wrong tensors, and their places."""
        return causes([o for o in self.operations if o.verdict == Verdict.WRONG])

    @property
    def closer(self) -> dict[str, int]:
        """Number of tensors by the side that is closer to float64."""
        return {side: sum(o.closer == side for o in self.operations) for side in ("ours", "theirs", "alike")}


def layout(tensors: Iterable[Key]) -> tuple[list[str], list[int]]:
    """The columns and the rows of a heat map: names of tensors of layers, in the order they are computed, and numbers of layers."""
    keys = {(key.name, key.layer) for key in tensors if key.layer is not None}
    names = {name for name, _ in keys}
    return [name for name in (*LAYER_NAMES, *GRADIENTS) if name in names], sorted({n for _, n in keys})


def causes(operations: Iterable[OperationVerdict]) -> dict[str, tuple[str, ...]]:
    """Each distinct cause of some tensors, and their places."""
    places: dict[str, tuple[str, ...]] = {}
    for o in operations:
        if o.hypothesis:
            places[o.hypothesis] = (*places.get(o.hypothesis, ()), o.place)
    return places


def closer_summary(report: Findings) -> str:
    """A line that says which side is closer to float64; empty where it is not known."""
    count = report.closer
    if not any(count.values()):
        return ""
    return (
        f"closer to float64, on their own inputs: ours in {count['ours']} tensors, theirs in {count['theirs']}, alike in {count['alike']}"
    )
