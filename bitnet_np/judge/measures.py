"""Another engine's logits against ours: the measures, the limits, the verdict. A dump with nothing to compare never passes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import ShapeError, shortened
from ..base.validate import array_of, instance, integers
from ..generation.nll import log_probabilities
from ..kernels.float_state import steady
from .detail import BLOCK, Details
from .first_looks import other_shape
from .law.expected import TINY, Array
from .law.noise import FLOAT16_NOISE
from .verdict import Judged, Verdict

_OF_ROOT = 2.0**-11  # by which the root of the final norm may be off, as hardware approximates it
_NOWHERE = 1e-4  # of the NMSE that noise makes at a position
_MANY = 16  # positions, of whose quarters noise is compared
_QUARTERS = 10  # times as much noise in one as in another
_SELDOM = 1e4  # dumps of right engines, of which one has a position farther away
_WIDEST = 0.7  # standard deviation of the logarithms of positions' NMSE; measured up to 0.64
ROUNDING_LIMIT = 1e-4
"""Largest difference, in standard deviations of our logits, that float32 sums in another order explain while every int8
code stays the same. Measured against bitnet.cpp at equal float16 roundings: 6e-7."""

FLIPS_LIMIT = 1e-2
"""Largest normalised mean square error (NMSE) of a position that int8 codes on the other side of a rounding boundary explain, where there
is no model to measure it with. It grows with depth: float16 roundings alone reach 1e-3 in 3 layers and 2e-2 in 30 (honest_engines.py)."""

OUTLIER_LIMIT = 1.0
"""Largest difference of a single logit, in standard deviations and beyond a tenth of its own distance from the mean (roundings grow with
a logit): NMSE over a large vocabulary is blind to a few of them. Measured over 30 layers: float16 everywhere 0.5. Where half of a
position's logits agree ten times better than ROUNDING_LIMIT no code has flipped. There that limit is every logit's, or as large a part of
its distance from the mean."""

SCALE_LIMIT = 2e-2
"""Largest distance from 1 of the best common factor between the two: roundings have no direction. Where their reach is measured, twice
the factor that they make by chance comes on top."""

SYSTEMATIC = 0.01
"""Part of a position's squared error that a factor and a constant leave if they are what is wrong. Roundings leave nearly all of it: they
point in as many directions as the model is wide, or as the head's input has scales if that is quantised."""

DIFFERENT = 0.1
"""Standard deviations from which on two rows of ours count as different: those of a repeated token differ by roundings."""

_ENOUGH = 32  # fewest logits of a position to know a typical error from


@dataclass(frozen=True)
class Reach:
    """How far roundings reach on one model and these tokens, measured (honest_engines.py)."""

    nmse: float  # mean over positions of the run that went farthest
    positions: Array  # [P] farthest of all runs at each of the first P positions
    scale: float = 0.0  # largest distance of the best common factor from 1
    name: str = "float16 rounding"  # what reaches so far, singular
    one_scale: bool = False  # the head's input is quantised, with one scale for all of it: without flips a factor is what roundings change
    choices: Array | None = None  # [P] of a run in which each choice between nearly equal experts falls the other way
    single: float = 0.0  # what any one position may have

    def is_in(self, errors: Array) -> bool:
        """Whether errors [P] have this noise at all positions: a mistake in attention's weights leaves the first one right."""
        few = min(len(errors), len(self.positions))
        return bool((errors[:few] > _NOWHERE * self.positions[:few]).all())

    def is_alike(self, errors: Array) -> bool:
        """Whether errors [P] have this noise in each quarter of many positions alike: a mistake may begin at one of them."""
        few = min(len(errors), len(self.positions))
        if few < _MANY:
            return True
        noise = errors[:few] / np.maximum(self.positions[:few], TINY)
        quarters = [float(np.median(quarter)) for quarter in np.array_split(noise, 4)]
        return max(quarters) <= _QUARTERS * min(quarters)


def across(errors: Array, reach: Reach) -> tuple[float, Reach]:
    """The level of noise that operations have whose result has these errors [P], and how far that reaches. reach: that of float16.

    A position's NMSE is the product of what all layers make of it, so positions are log-normal about their mean: of 40,000 in 196 sequences
    the farthest was 5.3 standard deviations away, as float16's own runs have these. Which position is far differs from run to run.
    """
    times = float(errors.mean()) / reach.nmse
    far = {"nmse": times * reach.nmse, "positions": times * reach.positions, "scale": times**0.5 * reach.scale}
    some = reach.positions[reach.positions > 0]
    if len(some) >= _MANY:
        spread = min(float(np.log(some).std()), _WIDEST)
        far["single"] = times * reach.nmse * np.exp(spread * np.sqrt(2 * np.log(len(errors) * _SELDOM)) - spread**2 / 2)
    return FLOAT16_NOISE * times**0.5, replace(reach, **far)


def limits(reach: Reach | None, positions: int) -> tuple[Array, float]:
    """Largest NMSE at each position, [positions], and on average, that roundings explain.

    Measured on random models of 1 to 30 layers, for engines that round to float16 in other places than the runs of honest_engines.py:
    on average at most 2.0 times those runs, for a single position 10.5 times their mean, but 3.9 times their own error there or 4.6 times
    their mean.
    """
    if reach is None:
        return np.full(positions, FLIPS_LIMIT), FLIPS_LIMIT
    worst = np.full(positions, max(5 * reach.nmse, reach.single))
    few = min(positions, len(reach.positions))
    worst[:few] = np.maximum(worst[:few], 4 * reach.positions[:few])
    most_mean = (2 + 3 / positions**0.5) * reach.nmse
    if reach.choices is None:
        return worst, most_mean
    own = 4 * reach.choices[:few]
    worst[:few] = np.maximum(worst[:few], own)
    return worst, most_mean + float(own.mean())


@dataclass(frozen=True, repr=False)
class Judgement(Judged):
    """The result of a comparison of logits, which is true if it passed. Numbers are None where the dump could not be compared."""

    verdict: Verdict
    reason: str
    positions: int = 0
    max_error: float | None = None  # largest |ours - theirs|
    mean_error: float | None = None
    worst: tuple[int, ...] | None = None  # index of the largest difference
    nmse: float | None = None  # sum (ours - theirs)^2 / sum (ours - mean of ours)^2, of the worst position
    mean_nmse: float | None = None  # its mean over positions
    reach: float | None = None  # the mean NMSE that roundings reach on this model, where it was measured
    scale: float | None = None  # the factor that brings ours closest to theirs, of the position where it is farthest from 1
    kl: float | None = None  # largest KL divergence of theirs from ours, in nats
    top1: float | None = None  # share of positions where both have the same largest logit, ties counted as agreement
    top5: float | None = None  # mean overlap of the five largest
    compared: tuple[int, ...] | None = None  # positions of the sequence that theirs are of, None: all, or those the dump names
    explanation: str | None = None  # the mistake that makes these logits, or the dialect they are closest to

    @property
    def failure(self) -> str:
        """The verdict and its reason."""
        return f"{self.verdict}: {self.reason}"

    def __repr__(self) -> str:
        return f"Judgement({self.verdict}: {shortened(self.reason, 200)}; {self.positions} positions)"

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self) | {"verdict": self.verdict.name, "meaning": self.verdict.text}


class _Numbers(NamedTuple):
    """The measures of each position, [P] each."""

    same_bits: NDArray[np.bool_]
    spread: Array  # standard deviation of ours
    largest: Array  # |ours - theirs|
    where: NDArray[np.intp]  # of the largest
    mean: Array
    typical: Array  # median
    nmse: Array
    scale: Array
    rescaled: Array  # NMSE of theirs from scale * ours
    left: Array  # part of the squared error that a factor and a constant do not explain
    outlier: Array  # largest error as a part of what a single logit may be off
    kl: Array
    top1: NDArray[np.bool_]
    top5: Array


@steady
def judge(
    ours: NDArray[np.float32],
    theirs: ArrayLike,
    reach: Reach | None = None,
    numbers: NDArray[np.int64] | None = None,
    details: Details | None = None,
) -> Judgement:
    """Compare their logits with ours, without a model: both [..., V], finite, ours taken as true.

    `bitnet_np.check` judges by a model: it measures how far roundings reach on it and tries known mistakes, as the command does.

    reach: how far roundings reach on this model and these tokens, see honest_engines.py; without it the limit is FLIPS_LIMIT.
    numbers: [P], the positions of the rows of [P, V], to name them by. details: what collects the worst numbers and errors by position.
    """
    ours, other = array_of("ours", ours), array_of("theirs", theirs)
    for name, value, kind in (("reach", reach, Reach), ("details", details, Details)):
        if value is not None:
            instance(name, value, kind)
    if numbers is not None and integers("numbers", numbers, 1).size != math.prod(ours.shape[:-1]):
        raise ShapeError(f"numbers has shape {np.shape(numbers)}, expected one for each row of logits {list(ours.shape)}")
    problem = invalid(ours, other)
    if problem is not None:
        return Judgement(Verdict.INVALID, problem)
    vocab, rows = ours.shape[-1], ours.shape[:-1]
    worst, mean = limits(reach, ours.size // vocab)
    if details is not None:
        details.of_logits(ours, other, worst, numbers)
    single = OUTLIER_LIMIT * max(1.0, (float(worst.max()) / FLIPS_LIMIT) ** 0.5)
    n = _Numbers(*map(np.concatenate, zip(*(_numbers(a, b, single) for a, b in _blocks(ours, other)), strict=True)))

    def place(row: int | np.intp) -> str:
        return str(numbers[row]) if numbers is not None else _place(row, rows)

    if n.same_bits.all():
        verdict, reason = Verdict.SAME_BITS, f"all {ours.size:,} logits have the same bits"
    elif not (n.largest > ROUNDING_LIMIT * n.spread).any():
        verdict, reason = Verdict.ROUNDING, f"no logit differs by more than {ROUNDING_LIMIT:g} standard deviations"
    else:
        verdict, reason = _beyond_rounding(n, reach, worst, mean, vocab, place)
    largest, off = int(n.largest.argmax()), int(np.abs(n.scale - 1).argmax())
    return Judgement(
        verdict,
        reason,
        positions=len(n.nmse),
        max_error=float(n.largest.max()),
        mean_error=float(n.mean.mean()),
        worst=(*(int(i) for i in np.unravel_index(largest, rows)), int(n.where[largest])),
        nmse=float(n.nmse.max()),
        mean_nmse=float(n.nmse.mean()),
        reach=None if reach is None else reach.nmse,
        scale=float(n.scale[off]),
        kl=float(n.kl.max()),
        top1=float(n.top1.mean()),
        top5=float(n.top5.mean()),
    )


def _beyond_rounding(
    n: _Numbers, reach: Reach | None, worst: Array, mean: float, vocab: int, place: Callable[[int | np.intp], str]
) -> tuple[Verdict, str]:
    """WRONG or FLIPS, and why, of logits that differ by more than float32 sums in another order. worst, mean: see `limits`."""
    reached = f"{'rounding' if reach is None else reach.name} alone reaches"
    off = int(np.abs(n.scale - 1).argmax())
    factor = abs(n.scale[off] - 1) > SCALE_LIMIT + (2 * reach.scale if reach is not None else 0)
    excess = n.nmse / worst
    over, outlier, high = int(excess.argmax()), int(n.outlier.argmax()), int(n.nmse.argmax())
    if factor and excess[over] > 1 and (n.rescaled <= worst).all():
        return Verdict.WRONG, f"logits are {n.scale[off]:.4g} times ours at position {place(off)}, and correct otherwise"
    if excess[over] > 1:
        return Verdict.WRONG, f"NMSE is {n.nmse[over]:.2g} at position {place(over)}; {reached} {worst[over]:.2g}"
    if n.nmse.mean() > mean:
        return Verdict.WRONG, f"NMSE is {n.nmse.mean():.2g} on average over positions; {reached} {mean:.2g}"
    if factor:
        return Verdict.WRONG, f"logits are {n.scale[off]:.4g} times ours at position {place(off)}"
    if vocab >= _ENOUGH and n.outlier[outlier] > 1:
        what = f"logit {n.where[outlier]} of position {place(outlier)} is off by {n.largest[outlier]:.3g}"
        return Verdict.WRONG, f"{what}, and half of all logits there by less than {n.typical[outlier]:.2g}"
    if vocab >= _ENOUGH and not (reach is not None and reach.one_scale):
        root = (np.abs(n.scale - 1) < _OF_ROOT) & (n.rescaled < SYSTEMATIC * n.nmse)
        fitted = np.flatnonzero((n.largest > ROUNDING_LIMIT * n.spread) & (n.left < SYSTEMATIC) & ~root)
        if fitted.size:
            return Verdict.WRONG, f"only a factor and a constant are wrong at position {place(fitted[0])}: no rounding does that"
    return Verdict.FLIPS, f"worst NMSE {n.nmse[high]:.2g}; {reached} {worst[high]:.2g}; scales agree"


def position_scale(ours: NDArray, theirs: NDArray) -> Array:
    """The factor that brings ours closest to theirs at each position: [..., V] twice -> [P]."""
    return _by_position(_scale, ours, theirs)


def position_nmse(ours: NDArray, theirs: NDArray) -> Array:
    """NMSE of each position: [..., V] twice -> [P]."""
    return _by_position(_nmse, ours, theirs)


def _by_position(measure: Callable[[Array, Array], Array], ours: NDArray, theirs: NDArray) -> Array:
    return np.concatenate([measure(a.astype(np.float64), b.astype(np.float64)) for a, b in _blocks(ours, theirs)])


def _scale(a: Array, b: Array) -> Array:
    return _ratio(((a - a.mean(axis=1, keepdims=True)) * b).mean(axis=1), a.var(axis=1), otherwise=1.0)


def _nmse(a: Array, b: Array) -> Array:
    return _ratio(((a - b) ** 2).mean(axis=1), a.var(axis=1))


def _blocks(ours: NDArray, theirs: NDArray) -> Iterator[tuple[NDArray, NDArray]]:
    """Yields some positions of both at a time, [P, V] each."""
    a, b = (x.reshape(-1, x.shape[-1]) for x in (ours, theirs))
    step = max(1, BLOCK // a.shape[1])
    for i in range(0, len(a), step):
        yield a[i : i + step], b[i : i + step]


def same_bits(a: NDArray, b: NDArray) -> bool:
    """Whether two arrays of one shape have the same dtype and the same bytes. Contiguous arrays are not copied."""
    first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).data for x in (a, b))
    return a.dtype == b.dtype and first == second


def _numbers(ours: NDArray, theirs: NDArray, single: float) -> _Numbers:
    """The measures of logits [P, V]. single: how many standard deviations a single logit may be off."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    error = b - a
    size = np.abs(error)
    spread = a.std(axis=1)
    centred = a - a.mean(axis=1, keepdims=True)
    scale = _ratio((centred * b).mean(axis=1), spread**2, otherwise=1.0)
    typical = np.median(size, axis=1)
    alone = typical <= ROUNDING_LIMIT / 10 * spread
    far = np.maximum(spread[:, None], np.abs(centred))
    allowed = np.where(alone[:, None], ROUNDING_LIMIT * far, single * spread[:, None] + np.abs(centred) / 10)
    square = (error**2).mean(axis=1)
    fit = error - error.mean(axis=1, keepdims=True) - (scale - 1)[:, None] * centred
    equal = [same_bits(x, y) for x, y in zip(ours, theirs, strict=True)]
    return _Numbers(
        same_bits=np.array(equal),
        spread=spread,
        largest=size.max(axis=1),
        where=size.argmax(axis=1),
        mean=size.mean(axis=1),
        typical=typical,
        nmse=_ratio(square, spread**2),
        scale=scale,
        rescaled=_ratio(((scale[:, None] * a - b) ** 2).mean(axis=1), b.var(axis=1)),
        left=_ratio((fit**2).mean(axis=1), square, otherwise=1.0),
        outlier=(size / np.maximum(allowed, 1e-300)).max(axis=1),
        kl=kl_divergence(a, b),
        top1=((a == a.max(axis=1, keepdims=True)) & (b == b.max(axis=1, keepdims=True))).any(axis=1),
        top5=np.array([np.isin(_largest(x), _largest(y)).mean() for x, y in zip(a, b, strict=True)]),
    )


def _ratio(a: Array, b: Array, otherwise: float = 1e300) -> Array:
    """a / b; `otherwise` where b alone is 0, and the ratio of no error where both are."""
    return np.divide(a, b, out=np.where(a == 0, 0.0 if otherwise > 1 else otherwise, otherwise), where=b != 0)


def _place(row: int | np.intp, rows: tuple[int, ...]) -> str:
    """The position of a row of logits [*rows, V] laid end to end, and its sequence if there are several."""
    index = [str(int(i)) for i in np.unravel_index(int(row), rows)]
    return f"{index[1]} of sequence {index[0]}" if len(index) == 2 else ", ".join(index) or "0"


def _largest(x: Array) -> NDArray[np.intp]:
    """Indices of the five largest of [V]; of equal ones, the lowest."""
    if x.size <= 5:
        return np.arange(x.size)
    high = np.flatnonzero(x >= np.partition(x, -5)[-5])
    return high[np.argsort(-x[high], kind="stable")][:5]


def kl_divergence(a: Array, b: Array) -> Array:  # [P, V], [P, V] -> [P]
    """Row by row sum p log(p / q), in nats, of the softmaxes p of a and q of b."""
    p, q = log_probabilities(a), log_probabilities(b)
    return np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0)


def invalid(ours: NDArray[np.float32], theirs: NDArray) -> str | None:
    """The reason why logits cannot be compared; None if they can."""
    if ours.dtype.kind != "f":
        return f"our dtype is {ours.dtype}, expected a float type"
    if theirs.dtype.kind != "f":
        return f"their dtype is {theirs.dtype}, expected a float type"
    if theirs.shape != ours.shape:
        return f"their shape is {list(theirs.shape)}, expected {list(ours.shape)}{other_shape(theirs, ours)}"
    if theirs.size == 0:
        return "there are no logits"
    if not np.isfinite(ours).all():
        return "our own logits have NaN or infinity in them"
    finite = np.isfinite(theirs)
    if not finite.all():
        first = tuple(int(n) for n in np.unravel_index(int(finite.argmin()), finite.shape))
        filtered = bool((theirs[~finite] == -np.inf).all())
        hint = ", each -inf, as a sampler leaves them: dump the logits before it" if filtered else ""
        at = f"position {first[1]} of sequence {first[0]}, number {first[2]}," if len(first) == 3 else ", ".join(map(str, first))
        return f"their logit at {at} is {theirs[first]}; {np.count_nonzero(~finite)} in all are not finite{hint}"
    rows, true = theirs.reshape(-1, theirs.shape[-1]), ours.reshape(-1, ours.shape[-1])
    largest = max(float(np.abs(row).max()) for row in rows)
    if largest > float(np.finfo(np.float32).max):
        return f"their largest logit is {largest:.3g}, beyond float32"
    for r, row in enumerate(rows):
        if row.size > 1 and (row == row[0]).all():
            return f"their logits of position {_place(r, ours.shape[:-1])} are all {row[0]}"
    for r in range(1, len(rows)):
        if (rows[r] == rows[r - 1]).all() and np.abs(true[r] - true[r - 1]).max() > DIFFERENT * true[r].std():
            before_and_now = " and ".join(_place(n, ours.shape[:-1]) for n in (r - 1, r))
            return f"their logits of positions {before_and_now} are the same numbers, ours are not"
    return None
