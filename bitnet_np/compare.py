"""Verdicts: another engine's logits against ours. Nothing passes for want of something to compare."""

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDING_LIMIT = 1e-4
"""Largest difference, in standard deviations of our logits, that float32 sums in another order explain while every int8
code stays the same. Measured against bitnet.cpp at equal float16 roundings: 6e-7."""

FLIPS_LIMIT = 1e-2
"""Largest normalised mean square error of a position that int8 codes on the other side of a rounding boundary explain.
Measured: float16 in cache and head 4e-4 to 1e-3. Squared ReLU replaced by SiLU 1e-1, RoPE pairs interleaved 3e-1."""

OUTLIER_LIMIT = 1.0
"""Largest difference of a single logit, in standard deviations and beyond a tenth of its own distance from the mean (roundings grow with
a logit): NMSE over a large vocabulary is blind to a few of them. Measured over 30 layers: float16 everywhere 0.5. Where half of a
position's logits agree ten times better than ROUNDING_LIMIT no code has flipped, and that limit is every logit's."""

_ENOUGH = 32  # logits of a position, to know what error is typical

SCALE_LIMIT = 2e-2
"""How far from 1 the best common factor between the two may be: roundings have no direction."""


class Verdict(IntEnum):
    """From best to worst; a whole comparison is as good as its worst position."""

    SAME_BITS = 0
    ROUNDING = 1
    FLIPS = 2
    WRONG = 3
    INVALID = 4

    @property
    def text(self) -> str:
        return _MEANING[self]

    @property
    def exit_code(self) -> int:
        """0 fine, 1 a difference that roundings do not explain, 2 nothing that can be compared."""
        return {Verdict.WRONG: 1, Verdict.INVALID: 2}.get(self, 0)


_MEANING = {
    Verdict.SAME_BITS: "same bits",
    Verdict.ROUNDING: "rounding: float32 sums in another order",
    Verdict.FLIPS: "close: as far as flipped int8 codes or float16 roundings reach",
    Verdict.WRONG: "WRONG: more than roundings explain",
    Verdict.INVALID: "INVALID: cannot be compared",
}


@dataclass(frozen=True)
class Judgement:
    """What a comparison of logits found. Numbers are None where the dump could not be compared."""

    verdict: Verdict
    reason: str
    positions: int = 0
    max_error: float | None = None  # largest |ours - theirs|
    mean_error: float | None = None
    worst: tuple[int, ...] | None = None  # index of the largest difference
    nmse: float | None = None  # sum (ours - theirs)^2 / sum (ours - mean of ours)^2, of the worst position
    scale: float | None = None  # the factor that brings ours closest to theirs, of the position where it is farthest from 1
    kl: float | None = None  # largest KL divergence of theirs from ours, in nats
    top1: float | None = None  # share of positions where both have the same largest logit, ties counted as agreement
    top5: float | None = None  # mean overlap of the five largest

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"verdict": self.verdict.name, "meaning": self.verdict.text}


def judge(ours: NDArray[np.float32], theirs: ArrayLike) -> Judgement:
    """Compare their logits with ours: both [..., V], finite, ours taken as true."""
    other = np.asarray(theirs)
    problem = _invalid(ours, other)
    if problem:
        return Judgement(Verdict.INVALID, problem)
    shape = ours.shape
    a, b = (x.reshape(-1, shape[-1]).astype(np.float64) for x in (ours, other))
    error = np.abs(a - b)
    spread = a.std(axis=1)
    nmse = _ratio((error**2).mean(axis=1), spread**2)
    centred = a - a.mean(axis=1, keepdims=True)
    scale = _ratio((centred * b).mean(axis=1), spread**2, otherwise=1.0)
    alone = np.median(error, axis=1) <= ROUNDING_LIMIT / 10 * spread
    allowed = np.where(alone[:, None], ROUNDING_LIMIT * spread[:, None], OUTLIER_LIMIT * spread[:, None] + np.abs(centred) / 10)
    outlier = (error / np.maximum(allowed, 1e-300)).max(axis=1)
    top1 = ((a == a.max(axis=1, keepdims=True)) & (b == b.max(axis=1, keepdims=True))).any(axis=1)
    overlap = [np.isin(x, y).mean() for x, y in zip(_largest(a), _largest(b), strict=True)]
    largest = int(error.argmax())
    off = int(np.abs(scale - 1).argmax())

    def place(row: Any) -> str:
        return _index(np.unravel_index(int(row), shape[:-1]))

    if ours.dtype == other.dtype and ours.tobytes() == np.ascontiguousarray(other).tobytes():
        verdict, reason = Verdict.SAME_BITS, f"all {ours.size:,} logits have the same bits"
    elif (error.max(axis=1) <= ROUNDING_LIMIT * spread).all():
        verdict, reason = Verdict.ROUNDING, f"no logit differs by more than {ROUNDING_LIMIT:g} standard deviations"
    elif (
        abs(scale[off] - 1) > SCALE_LIMIT
        and nmse.max() > FLIPS_LIMIT
        and _ratio(((scale[:, None] * a - b) ** 2).mean(axis=1), b.var(axis=1)).max() <= FLIPS_LIMIT
    ):
        verdict, reason = Verdict.WRONG, f"logits are {scale[off]:.4g} times ours at position {place(off)}, and right but for that"
    elif nmse.max() > FLIPS_LIMIT:
        verdict, reason = Verdict.WRONG, f"NMSE is {nmse.max():.2g} at position {place(nmse.argmax())}, roundings reach {FLIPS_LIMIT:g}"
    elif abs(scale[off] - 1) > SCALE_LIMIT:
        verdict, reason = Verdict.WRONG, f"logits are {scale[off]:.4g} times ours at position {place(off)}"
    elif outlier.max() > 1 and shape[-1] >= _ENOUGH:
        row = int(outlier.argmax())
        worst = f"logit {int(error[row].argmax())} of position {place(row)} is off by {error[row].max():.3g}"
        verdict, reason = Verdict.WRONG, f"{worst}, half of the others by less than {np.median(error[row]):.2g}"
    else:
        verdict, reason = Verdict.FLIPS, f"NMSE of no position exceeds {FLIPS_LIMIT:g}, and scales agree"
    return Judgement(
        verdict,
        reason,
        positions=len(a),
        max_error=float(error.max()),
        mean_error=float(error.mean()),
        worst=tuple(int(i) for i in np.unravel_index(largest, shape)),
        nmse=float(nmse.max()),
        scale=float(scale[off]),
        kl=float(_kl(a, b).max()),
        top1=float(top1.mean()),
        top5=float(np.mean(overlap)),
    )


def _ratio(a: NDArray[np.float64], b: NDArray[np.float64], otherwise: float = 1e300) -> NDArray[np.float64]:
    """a / b; where both are 0 nothing is wrong, where b alone is, `otherwise`."""
    return np.divide(a, b, out=np.where(a == 0, 0.0 if otherwise > 1 else otherwise, otherwise), where=b != 0)


def _index(index: tuple) -> str:
    return ", ".join(str(int(i)) for i in index) or "0"


def _largest(x: NDArray[np.float64]) -> NDArray[np.intp]:
    return np.argsort(-x, axis=1, kind="stable")[:, :5]


def _kl(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Row by row sum p log(p / q) of the softmaxes p of a and q of b."""
    p, q = (x - x.max(axis=1, keepdims=True) for x in (a, b))
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    return np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0)


def _invalid(ours: NDArray[np.float32], theirs: NDArray) -> str:
    """Why a dump says nothing about the model, or an empty string."""
    if not np.isfinite(ours).all():
        return "our own logits have NaN or infinity in them"
    if theirs.dtype.kind != "f":
        return f"their dtype is {theirs.dtype}, expected a float type"
    if theirs.shape != ours.shape:
        return f"their shape is {list(theirs.shape)}, expected {list(ours.shape)}"
    if theirs.size == 0:
        return "there are no logits"
    if not np.isfinite(theirs).all():
        index = np.argwhere(~np.isfinite(theirs))[0]
        count = int((~np.isfinite(theirs)).sum())
        return f"their logit at {_index(tuple(index))} is {theirs[tuple(index)]}; {count} in all are not finite"
    if np.abs(theirs).max() > np.finfo(np.float32).max:
        return f"their largest logit is {np.abs(theirs).max():.3g}, beyond float32"
    rows, true = (x.reshape(-1, x.shape[-1]) for x in (theirs, ours))
    flat = np.flatnonzero((rows == rows[:, :1]).all(axis=1))
    if rows.shape[1] > 1 and flat.size:
        return f"their logits of position {flat[0]} are all {rows[flat[0], 0]}"
    for i in range(1, len(rows)):
        if (rows[i] == rows[i - 1]).all() and np.abs(true[i] - true[i - 1]).max() > ROUNDING_LIMIT * true[i].std():
            return f"their logits of positions {i - 1} and {i} are the same numbers, ours are not"
    return ""
