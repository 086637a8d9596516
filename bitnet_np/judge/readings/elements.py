"""Wrong elements of any tensor: the right numbers with a factor or a constant, 0 in part, or in other places."""

import numpy as np

from ..edits.orders import orders
from .wrong import Array, Indices, Wrong, numbered, runs

_LEAST = 32  # numbers
_FEW_ROWS = 4  # a number fitted to each column of fewer explains too much
_NARROW = 8  # columns; the same for rows
_TOGETHER = 64  # rows compared at once with all
_SAME = 1e-4  # relative; numbers this close are taken for equal
_MOST_ORDERED = 4096  # columns whose order is sought among the known ones


def partial(wrong: Wrong) -> str | None:
    """The part of the numbers that is one number, such as 0, if the others are right but for a common factor."""
    one = float(np.median(wrong.theirs[wrong.places]))
    same = np.isclose(wrong.theirs, one, rtol=1e-6, atol=0) & (wrong.value != one)
    rest = ~same
    if not same.any() or same.all():
        return None
    factor = float((wrong.theirs * wrong.value)[rest].sum() / max((wrong.value[rest] ** 2).sum(), 1e-300))
    if not wrong.accounts(np.where(same, one, factor * wrong.value)):
        return None
    columns = np.flatnonzero(same.any(axis=0))
    where = f" ({runs('element', columns)} of each position)" if same[:, columns].all() else ""
    times = "right" if abs(factor - 1) < _SAME else f"{factor:.5g} times what they should be"
    dropout = ", as dropout does" if not where and abs(factor * (1 - same.mean()) - 1) < 0.05 and factor > 1 else ""
    return f"{100 * same.mean():.2g} % of its numbers are {one:.5g}{where}, the others are {times}{dropout}"


# --- factors and constants ------------------------------------------------------------------------------------------------------------


def fitted(wrong: Wrong) -> str | None:
    """The factor and the constant of everything, or those factors or constants that each element or each position has."""
    theirs, value = wrong.theirs, wrong.value
    slope, constant = np.polyfit(value.ravel(), theirs.ravel(), 1) if np.ptp(value) > 0 else (0.0, 0.0)
    if theirs.size >= _LEAST and abs(slope) > 1e-6 and wrong.accounts(slope * value + constant):
        return f"everything is {slope:.5g} times what it should be, {'plus' if constant > 0 else 'minus'} {abs(constant):.5g}"
    for axis, what in ((0, "element"), (1, "position")):
        if theirs.shape[axis] >= (_FEW_ROWS, _NARROW)[axis]:
            added = (theirs - value).mean(axis=axis, keepdims=True)
            if wrong.accounts(value + added):
                return _constants_said(wrong, added.ravel(), what)
            factor = (theirs * value).sum(axis=axis, keepdims=True) / np.maximum((value * value).sum(axis=axis, keepdims=True), 1e-300)
            if wrong.accounts(factor * value):
                return _factors_said(wrong, factor.ravel(), what)
    return None


def _constants_said(wrong: Wrong, added: Array, what: str) -> str:
    off = np.flatnonzero(np.abs(added) > _SAME * np.abs(added).max())
    for name, vector in _vectors(wrong) if what == "element" else ():
        for right, verb in ((vector, "added to"), (-vector, "subtracted from, or missing in,")):
            if np.allclose(added, right, rtol=1e-3, atol=_SAME * np.abs(vector).max()):
                return f"{name} is {verb} every position"
    return f"a constant of its own is added to each {what}{': a bias' if what == 'element' else ''}{_only(off, added)}"


def _factors_said(wrong: Wrong, factor: Array, what: str) -> str:
    off = np.flatnonzero(np.abs(factor - 1) > _SAME)
    for name, vector in _vectors(wrong) if what == "element" else ():
        for right, verb in ((vector, "multiplied"), (1 / np.where(vector == 0, np.inf, vector), "divided")):
            if np.allclose(factor, right, rtol=1e-3):
                return f"every position is {verb} by {name}"
    whose = ", the same at every position: a scale for each row of weights" if what == "element" else ": a scale"
    return f"each {what} is wrong by a factor of its own, from {factor.min():.5g} to {factor.max():.5g}{whose}{_only(off, factor)}"


def _only(off: Indices, numbers: Array) -> str:
    return f"; {off.size} of {numbers.size} are wrong" if 0 < off.size < numbers.size else ""


def _vectors(wrong: Wrong) -> list[tuple[str, Array]]:
    """The layer's vectors, and those of the model, that are as wide as the tensor, by name."""
    vectors = []
    for name, entry in vars(wrong.layer or wrong.model).items():
        parts = {name: entry} | {f"{name}'s {part}": getattr(entry, part, None) for part in ("bias", "norm")}
        for label, array in parts.items():
            if isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.shape == wrong.theirs.shape[1:] and array.any():
                vectors.append((label.replace("_bias", "'s bias") if label == name else label, array.astype(np.float64)))
    return vectors


# --- other places ---------------------------------------------------------------------------------------------------------------------


def rows_of_others(wrong: Wrong) -> str | None:
    """The wrong positions that have the right numbers of another position, or of another tensor, where all others are right."""
    if wrong.theirs.shape[1] < _NARROW or len(wrong.theirs) < 2:
        return None
    source = _sources(wrong, wrong.theirs, wrong.value)
    if source is not None:
        return moved_said(source, "position")
    rows = np.flatnonzero(wrong.places.any(axis=1))
    for key, other in wrong.beside() if not wrong.is_nearly_right else ():
        computed = wrong.value.copy()
        computed[rows] = other[rows]
        if wrong.accounts(computed):
            which = "it has" if rows.size == len(wrong.theirs) else f"{runs('position', rows)} {'have' if rows.size > 1 else 'has'}"
            return f"{which} the numbers of {key.place}"
    return None


def columns_of_others(wrong: Wrong) -> str | None:
    """The wrong elements that have the right numbers of another element at every wrong position, or are 0, where all others are right."""
    rows = np.flatnonzero(wrong.places.any(axis=1))
    where = f"at {runs('position', rows)}: " if rows.size < len(wrong.theirs) else ""
    wrong = wrong.rows(rows)
    if len(wrong.theirs) < _FEW_ROWS:
        return None
    value = wrong.value.T
    source = _sources(wrong, wrong.theirs.T, np.concatenate([value, np.zeros((1, value.shape[1]))]))
    if source is None:
        return None
    zero = np.flatnonzero(source == len(value))
    source[zero] = zero
    moved = moved_said(source, "element") if (source != np.arange(len(source))).any() else None
    if not zero.size or not moved:
        return moved and where + moved
    return f"{where}{moved}, and {runs('element', zero)} {'are' if zero.size > 1 else 'is'} 0"


def other_stride(wrong: Wrong) -> str | None:
    """How far apart the rows begin, where they are right but not as far apart as they are wide: they were padded, or overlap."""
    tokens, width = wrong.theirs.shape
    if tokens < 2 or width < _NARROW:
        return None
    flat = wrong.theirs.ravel()
    second = wrong.value[1]
    slack = _SAME * float(np.abs(second).max())
    for stride in np.flatnonzero(np.abs(flat - second[0]) <= slack):
        shown = min(width, int(stride), flat.size - int(stride))  # numbers of the second row that the third does not overwrite
        if stride in (0, width) or shown < _NARROW or not np.allclose(flat[stride : stride + shown], second[:shown], rtol=0, atol=slack):
            continue
        begins = np.arange(0, flat.size, stride)[:tokens]
        laid = np.full(flat.size + width, np.nan)
        for token, begin in enumerate(begins):
            laid[begin : begin + width] = wrong.value[token]
        computed = np.where(np.isnan(laid[: flat.size]), flat, laid[: flat.size]).reshape(wrong.theirs.shape)
        if wrong.accounts(computed):
            return f"rows begin {stride} numbers apart, not {width}"
    return None


def _sources(wrong: Wrong, theirs: Array, value: Array) -> Indices | None:
    """The row of `value` that each row of `theirs` is, if each is one; rows that are right are their own."""
    places = wrong.places if theirs is wrong.theirs else wrong.places.T
    off = np.flatnonzero(places.any(axis=1))
    source, squares = np.arange(len(theirs)), (value * value).sum(axis=1)
    for begin in range(0, off.size, _TOGETHER):
        some = off[begin : begin + _TOGETHER]
        source[some] = (squares - 2 * theirs[some] @ value.T).argmin(axis=1)
        if not np.allclose(value[source[some]], theirs[some], rtol=1e-2, atol=1e-2 * np.abs(value).max()):
            return None
    computed = value[source]
    if not wrong.accounts(computed if theirs is wrong.theirs else computed.T):
        return None
    return None if (source == np.arange(len(source))).all() else source


def moved_said(source: Indices, what: str) -> str | None:
    """Which rows or columns are another one, in words."""
    count = len(source)
    index = np.arange(count)
    shift = source - index
    off = np.flatnonzero(shift)
    wrapped = np.where(shift[off] < 0, shift[off] + count, shift[off])
    if off.size == count and source.max() < count and (wrapped == wrapped[0]).all():
        by = int(wrapped[0])
        if 2 * by == count:
            return f"the two halves of the {what}s are exchanged"
        by = by if by < count / 2 else by - count
        return f"{what}s are shifted by {abs(by)}: {what} {max(0, -by)} has the numbers of {what} {max(0, by)}"
    if (shift[off] == shift[off[0]]).all():
        verb = "have" if off.size > 1 else "has"
        return f"{runs(what, off)} {verb} the numbers of {runs(what, source[off])}"
    if np.unique(source[off]).size == 1:
        return f"{runs(what, off)} have the numbers of {what} {source[off[0]]}"
    if (np.sort(source) == index).all():
        if off.size == 2:
            return f"{numbered(what, off)} are exchanged"
        sizes = [n for n in range(2, count + 1) if count % n == 0] if count <= _MOST_ORDERED else ()
        for words, order in orders(count, sizes, f"{what}s"):
            if (order == source).all():
                return words
    first = ", ".join(f"{what} {i} has those of {source[i]}" for i in off[:3])
    return f"the right numbers in other places: {first}" + (f", and {off.size - 3} more" if off.size > 3 else "")
