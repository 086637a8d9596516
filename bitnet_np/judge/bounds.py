"""Tensors against their expected values: the three tests of law/ where a bound is known, mean square errors where none is."""

import numpy as np
from numpy.typing import NDArray

from ..traces.points import Key
from .detail import BLOCK, FAR
from .first_looks import other_shape
from .law.expected import TINY, Array, Expected, U
from .measures import DIFFERENT, Reach, limits
from .report.report import OperationVerdict
from .verdict import Verdict
from .words import parts_of

_FLOAT32, _FLOAT16 = float(np.finfo(np.float32).max), float(np.finfo(np.float16).max)  # their largest numbers
_LARGEST = 2.0**127  # a power of two that float32 has
_MOSTLY = 0.9  # of the rows or columns: where more are wrong, all are
_COMMON = 6  # roundings that all elements of a tensor may share, such as that of a scale
ROUNDING_ACROSS = 1e-9
"""NMSE across several operations in which no code flipped."""


def invalid_tensor(theirs: NDArray, ours: NDArray) -> str:
    """Why a tensor of a dump cannot be judged, or an empty string. `ours` is [T, width]."""
    if theirs.dtype.kind != "f" and not (ours.dtype.kind == theirs.dtype.kind == "i"):
        return f"its dtype is {theirs.dtype}, expected {ours.dtype}"
    if theirs.size != ours.size or theirs.shape[:1] != ours.shape[:1]:
        return f"its shape is {list(theirs.shape)}, expected {list(ours.shape)}{other_shape(theirs, ours)}"
    rows = theirs.reshape(ours.shape)
    bad = ~np.isfinite(rows)
    if bad.any():
        t, i = np.unravel_index(int(bad.argmax()), bad.shape)
        why = f": ours are beyond {_FLOAT16:g}, the largest of float16" if (np.abs(ours[bad]) > _FLOAT16).all() else ""
        return f"it has {rows[t, i]} at position {t}, element {i}; {int(bad.sum())} are not finite{why}"
    if rows.dtype == np.float64 and float(np.abs(rows).max()) > _FLOAT32:
        return f"its largest number is {float(np.abs(rows).max()):.3g}, beyond float32"
    flat, alive = np.ptp(rows, axis=-1) == 0, np.ptp(ours, axis=-1) > 0
    if alive.any() and flat[alive].all():
        first = int(alive.argmax())
        return f"all its numbers at position {first} are {rows[first, 0]}"
    if len(rows) > 1 and (rows == rows[0]).all() and np.abs(ours - ours[0].astype(np.float64)).max() > DIFFERENT * ours.std():
        return "its rows are all the same, ours are not"
    return ""


def invalid_experts(theirs: NDArray, count: int) -> str:
    """Why the numbers of a token's experts, [T, k] of `count`, cannot be judged, or an empty string."""
    for t, row in enumerate(theirs.reshape(len(theirs), -1)):
        if not all(number == int(number) and 0 <= number < count for number in row) or len(set(row.tolist())) < len(row):
            return (
                f"the experts at position {t} are {', '.join(f'{number:g}' for number in row)}, expected different ones of 0 to {count - 1}"
            )
    return ""


def bound_of(expected: Expected, shape: tuple[int, ...], rows: slice = slice(None)) -> tuple[Array, ...]:
    """The bound of each element of some rows, with flips and without, then value, squared roundings and reach, all of one shape."""
    value, worst, square, reach = (np.broadcast_to(np.asarray(x, np.float64), shape)[rows] for x in expected[:4])
    bound = np.minimum(worst, 6 * np.sqrt(square)) + TINY
    return bound + reach, bound, value, square, reach


def noise(expected: Expected) -> float:
    """The NMSE that roundings make, about: a rounding's variance is a third of its largest square."""
    square = np.broadcast_to(np.asarray(expected.square, np.float64), expected.value.shape)
    return float(square.sum()) / 3 / max(dot(expected.value, expected.value), TINY)


def within(expected: Expected, theirs: Array) -> tuple[Verdict, str, float]:
    """Verdict, reason, and the largest error as a part of its bound, by the three tests of law/running_error.py."""
    ratio, farthest, worst, flipped = 0.0, 0.0, "", 0
    count, squares, along, size, spread = 0, 0.0, 0.0, 0.0, 0.0
    step = max(1, BLOCK // theirs.shape[1])  # rows at a time: logits are large, and a dozen arrays of their shape larger
    for begin in range(0, len(theirs), step):
        most, bound, value, square, reach = bound_of(expected, theirs.shape, slice(begin, begin + step))
        off = theirs[begin : begin + step] - value
        error = np.abs(off)
        share = error / most
        ratio = max(ratio, float(share.max()))
        rank = np.minimum(share, FAR) + np.where(share > FAR, error, 0)
        if rank.max() > farthest:
            t, i = np.unravel_index(int(rank.argmax()), rank.shape)
            farthest = float(rank[t, i])
            near = f" +- {most[t, i]:.2g}" if most[t, i] > TINY else " exactly"
            worst = f"{theirs[begin + t, i]:.6g} at position {begin + t}, element {i}, expected {value[t, i]:.6g}{near}"
        flipped += int((error > bound).any(axis=1).sum())
        firm = (reach == 0) & (square > TINY**2)  # smaller ones may be flushed to zero
        off, value, square = off[firm], value[firm], square[firm]
        count += off.size
        with np.errstate(over="ignore"):  # numbers near float32's largest, for which no factor is reported
            squares += float((off**2 / square).sum())
            along += float((off * value).sum())
            size += float((value**2).sum())
            spread += float((square / 3 * value**2).sum())
    if ratio > 1:
        most, _, value, *_ = bound_of(expected, theirs.shape)
        where = parts_of(np.abs(theirs - value) > most, _MOSTLY)  # a few columns hint at misread rows of weights, late positions at a cache
        return Verdict.WRONG, worst + (f"; wrong only at {', '.join(where)}" if where else ""), ratio
    if count:
        variance = squares / count
        if variance > 0.4 * (1 + 4 * np.sqrt(2 * expected.shared / count)):
            return Verdict.WRONG, f"errors are small but everywhere: variance {variance:.2g} of the bound's, expected at most 0.4", ratio
        if size > 0:
            slope = along / size
            if abs(slope) > _COMMON * U + 4 * np.sqrt(spread * expected.shared) / size:
                return Verdict.WRONG, f"everything is {1 + slope:.9g} times what it should be", ratio
    if flipped:
        return Verdict.FLIPS, f"{flipped} positions have roundings on the other side of a boundary", ratio
    return Verdict.ROUNDING, "", ratio


def position_errors(value: Array, theirs: Array, least: float = 0.0) -> Array:
    """NMSE of each position, [T, width] -> [T]. Sums of squares count as `least` at least."""
    return ((theirs - value) ** 2).sum(axis=1) / np.maximum((value**2).sum(axis=1), max(least, TINY))


def close(value: Array, theirs: Array, reach: Reach | None = None, least: float = 0.0) -> tuple[Verdict, str, float]:
    """Verdict, reason and part of the limit where no bound is known, as across operations: by NMSE and the reach of roundings."""
    nmse = position_errors(value, theirs, least)
    if nmse.max() <= ROUNDING_ACROSS:
        return Verdict.ROUNDING, "", float(np.sqrt(nmse.max() / ROUNDING_ACROSS))
    most, most_mean = limits(reach, len(nmse))
    worst = int((nmse / most).argmax())
    ratio = float(np.sqrt(max(nmse[worst] / most[worst], nmse.mean() / most_mean)))
    if nmse[worst] > most[worst]:
        return Verdict.WRONG, f"NMSE {nmse[worst]:.2g} at position {worst}, flipped codes and float16 reach {most[worst]:.2g}", ratio
    if nmse.mean() > most_mean:
        return Verdict.WRONG, f"NMSE {nmse.mean():.2g} on average over positions, flipped codes and float16 reach {most_mean:.2g}", ratio
    return Verdict.FLIPS, "", ratio


def relative_error(value: Array, theirs: Array) -> float:
    return float(((theirs - value) ** 2).sum() / max((theirs**2).sum(), TINY))


def dot(a: Array, b: Array) -> float:
    """The sum of products of two arrays [n, m], without an array of them."""
    return float(np.einsum("ij,ij->", a, b))


def statistics(
    key: Key, verdict: Verdict, reason: str, across: tuple[Key, ...], ratio: float, value: Array, theirs: Array
) -> OperationVerdict:
    error = np.abs(theirs - value)
    along, square = dot(value, theirs), dot(value, value)
    norms = float(np.sqrt(square * dot(theirs, theirs)))
    return OperationVerdict(
        key,
        verdict,
        reason,
        across,
        max_error=float(error.max()),
        bound_ratio=ratio,
        nmse=dot(error, error) / square if square else None,
        scale=along / square if square else None,
        cosine=along / norms if norms else None,
        ulps=float(error.max() / np.spacing(np.float32(min(np.abs(value).max(), _LARGEST)))),
        worst=tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape)),
    )
