"""Wrong elements of any tensor: the right numbers with a factor, a constant, a limit, on a grid, or in other places."""

import numpy as np

from .search import best_number
from .wrong import Array, Indices, Wrong, numbered, runs

_LEAST = 32  # numbers
_FEW_ROWS = 4  # a number fitted to each column of fewer explains too much
_NARROW = 8  # columns; the same for rows
_TOGETHER = 64  # rows compared at once with all
_FLOAT16 = 65504.0  # its largest number
_SAME = 1e-4  # relative; numbers this close are taken for equal


# --- limits ---------------------------------------------------------------------------------------------------------------------------


def clipped(wrong: Wrong) -> str | None:
    """The smallest and largest numbers, if it is the right tensor clipped to them."""
    low, high = float(wrong.theirs.min()), float(wrong.theirs.max())
    slack = 1e-5 * float(np.abs(wrong.value).max())
    over, under = int((wrong.value > high + slack).sum()), int((wrong.value < low - slack).sum())
    if over + under < 2 or not wrong.accounts(np.clip(wrong.value, low, high)):
        return None
    beyond = [x for x, n in ((low, under), (high, over)) if n]
    if len(beyond) == 1 and abs(beyond[0]) <= slack:
        return f"{'negative' if under else 'positive'} numbers are set to 0"
    float16 = np.isclose(max(high, -low), _FLOAT16, rtol=1e-5)
    why = "float16 has no larger ones" if float16 else "limited, or of a type that has no larger ones"
    if over and under:
        return f"numbers are clipped to {low:.6g}..{high:.6g}: {why}"
    return f"numbers {'above' if over else 'below'} {beyond[0]:.6g} are clipped: {why}"


def soft_capped(wrong: Wrong) -> str | None:
    """The cap, if it is cap * tanh(the right tensor / cap)."""
    if not (np.abs(wrong.theirs) <= np.abs(wrong.value) + 1e-6 * np.abs(wrong.value).max()).all():
        return None
    cap = best_number(wrong, lambda some, cap: cap * np.tanh(some.value / cap))
    return None if cap is None else f"numbers are soft-capped at {cap:.4g}: {cap:.4g} * tanh(x / {cap:.4g})"


def dropped(wrong: Wrong) -> str | None:
    """The part of the numbers that is 0, if the others are right but for a common factor."""
    zero = (wrong.theirs == 0) & (wrong.value != 0)
    rest = ~zero
    if not zero.any() or zero.all():
        return None
    factor = float((wrong.theirs * wrong.value)[rest].sum() / max((wrong.value[rest] ** 2).sum(), 1e-300))
    if not wrong.accounts(np.where(zero, 0, factor * wrong.value)):
        return None
    columns = np.flatnonzero(zero.any(axis=0))
    where = f" ({runs('element', columns)} of each position)" if zero[:, columns].all() else ""
    times = "right" if abs(factor - 1) < _SAME else f"{factor:.5g} times what they should be"
    dropout = ", as dropout does" if not where and abs(factor * (1 - zero.mean()) - 1) < 0.05 and factor > 1 else ""
    return f"{100 * zero.mean():.2g} % of its numbers are 0{where}, the others are {times}{dropout}"


# --- grids ----------------------------------------------------------------------------------------------------------------------------

_FP8 = {4: ("fp8 e4m3", 2.0**-9), 3: ("fp8 e5m2", 2.0**-16)}  # significant bits: the type, and its smallest number
_NEAR = 2e-3  # of a step


def on_a_grid(wrong: Wrong) -> str | None:
    """The grid that its numbers are rounded to: that of a narrow float type, or equal steps for a row, a block or all of it."""
    if wrong.theirs.size < _LEAST or not wrong.theirs.any():
        return None
    for digits in range(2, 8):
        kind, least = _FP8.get(digits, ("", 0.0))
        for smallest in (0.0, least):
            steps = np.maximum(np.exp2(np.frexp(wrong.theirs)[1] - digits), smallest)
            if (np.rint(wrong.theirs / steps) * steps == wrong.theirs).all() and _one_step(wrong, steps):
                return f"its numbers are rounded to {digits} significant bits" + (f", as {kind} has them" if kind else "")
    width = wrong.theirs.shape[1]
    for size, text in ((width, "each row"), *((n, f"each {n} numbers") for n in (256, 128, 64, 32, 16))):
        if width % size == 0 and size >= _NARROW:
            count = _levels(wrong.theirs.reshape(-1, size))
            if count is not None and _one_step(wrong, _steps(wrong.theirs.reshape(-1, size), count).reshape(len(wrong.theirs), -1)):
                return (
                    f"its numbers are rounded to a grid of {count} steps on either side of 0 for {text}, as codes of {_bits(count)} bits do"
                )
    count = _levels(wrong.theirs.reshape(1, -1))
    if count is not None and _one_step(wrong, _steps(wrong.theirs.reshape(1, -1), count)):
        return f"its numbers are rounded to a grid of {count} steps on either side of 0 for all of it, as codes of {_bits(count)} bits do"
    return None


def _bits(count: int) -> int:
    return int(np.ceil(np.log2(2 * count + 1) - 1e-9)) if count & (count + 1) == 0 else int(np.ceil(np.log2(2 * count)))


def _levels(rows: Array) -> int | None:
    """The number of equal steps up to the largest magnitude of each row, if all numbers lie on them: 127 for int8 codes."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    parts = rows[largest[:, 0] > 0] / largest[largest[:, 0] > 0]
    if not parts.size:
        return None
    for count in (1, 3, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512):
        steps = parts * count
        if np.abs(steps - np.rint(steps)).max() < _NEAR:
            return count
    return None


def _steps(rows: Array, count: int) -> Array:
    """The size of a step, for each block of numbers: [T, W] or [R, size]."""
    return np.broadcast_to(np.abs(rows).max(axis=1, keepdims=True) / count, rows.shape)


def _one_step(wrong: Wrong, steps: Array) -> bool:
    """Whether no number is off by more than a step: half of one if rounded, a whole one if truncated."""
    steps = np.broadcast_to(steps, wrong.theirs.shape) if steps.shape[0] != 1 else steps.reshape(wrong.theirs.shape)
    slack = 1e-5 * np.abs(wrong.value).max() + wrong.noise**0.5 * np.abs(wrong.value)
    return bool((np.abs(wrong.theirs - wrong.value) <= 1.001 * steps + slack).all())


# --- factors and constants ------------------------------------------------------------------------------------------------------------


def factors(wrong: Wrong) -> str | None:
    """The rows or columns that are wrong by a factor, and by which."""
    theirs, value = wrong.theirs, wrong.value
    for axis, enough in ((1, value.shape[1] >= _NARROW), (0, len(value) >= _FEW_ROWS)):
        if enough:
            factor = (theirs * value).sum(axis=axis, keepdims=True) / np.maximum((value * value).sum(axis=axis, keepdims=True), 1e-300)
            if wrong.accounts(factor * value):
                return _factor_said(wrong, factor.ravel(), "position" if axis == 1 else "element")
    return None


def _factor_said(wrong: Wrong, factor: Array, what: str) -> str:
    off = np.flatnonzero(np.abs(factor - 1) > _SAME)
    if off.size and np.allclose(factor[off], factor[off[0]], rtol=_SAME):
        rest = "all" if off.size == factor.size else runs(what, off)
        return f"{rest} {'are' if off.size > 1 else 'is'} {factor[off].mean():.5g} times what {_they(off)} should be"
    if what == "element":
        known = _known(wrong, factor)
        if known:
            return known
        return (
            f"each element is wrong by a factor of its own, the same at every position: a scale for each row of weights{_only(off, factor)}"
        )
    return f"each position is wrong by a factor of its own: a scale{_only(off, factor)}"


def _they(off: Indices) -> str:
    return "they" if off.size > 1 else "it"


def _only(off: Indices, factor: Array) -> str:
    return f"; {off.size} of {factor.size} are wrong" if off.size < factor.size else ""


def _known(wrong: Wrong, factor: Array) -> str | None:
    """The vector of the layer by which each row is multiplied or divided once more."""
    for name, vector in _vectors(wrong):
        if np.allclose(factor, vector, rtol=1e-3):
            return f"every position is multiplied by {name}"
        if (vector != 0).all() and np.allclose(factor * vector, 1, rtol=1e-3):
            return f"every position is divided by {name}"
    return None


def _vectors(wrong: Wrong) -> list[tuple[str, Array]]:
    """The layer's vectors, and those of the model, that are as wide as the tensor, by name."""
    width, holder = wrong.theirs.shape[1], wrong.layer or wrong.model
    vectors = []
    for name, entry in vars(holder).items():
        for label, array in (
            (name, entry),
            (f"{name}'s bias", getattr(entry, "bias", None)),
            (f"{name}'s norm", getattr(entry, "norm", None)),
        ):
            if isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.shape == (width,):
                vectors.append((label.replace("_bias", "'s bias") if label == name else label, array.astype(np.float64)))
    return vectors


def constants(wrong: Wrong) -> str | None:
    """The constant that is added: to everything, to some columns, or to each row or column one of its own."""
    away = wrong.theirs - wrong.value
    whole = float(away.mean())
    if wrong.accounts(wrong.value + whole):
        return f"{whole:.5g} is added to every number"
    if len(away) >= _FEW_ROWS:
        column = away.mean(axis=0)
        if wrong.accounts(wrong.value + column):
            return _constant_said(wrong, column)
    if away.shape[1] >= _NARROW and wrong.accounts(wrong.value + away.mean(axis=1, keepdims=True)):
        return "a constant of its own is added to each position"
    return None


def _constant_said(wrong: Wrong, column: Array) -> str:
    off = np.flatnonzero(np.abs(column) > _SAME * max(float(np.abs(column).max()), 1e-300))
    if off.size < column.size and np.allclose(column[off], column[off[0]], rtol=1e-3):
        return f"{column[off].mean():.5g} is added to {runs('element', off)} of each position: a bias"
    for name, vector in _vectors(wrong):
        for sign, verb in ((1, "added to"), (-1, "subtracted from, or missing in,")):
            if vector.any() and np.allclose(sign * column, vector, rtol=1e-3, atol=1e-4 * np.abs(vector).max()):
                return f"{name} is {verb} every position"
    where = "each column" if off.size == column.size else runs("element", off)
    return f"a constant is added to {where}: a bias"


def affine(wrong: Wrong) -> str | None:
    """The factor and the constant, if everything is the right number times one, plus the other."""
    slope, constant = np.polyfit(wrong.value.ravel(), wrong.theirs.ravel(), 1) if np.ptp(wrong.value) > 0 else (0.0, 0.0)
    if wrong.theirs.size < _LEAST or abs(slope) < 1e-6 or not wrong.accounts(slope * wrong.value + constant):
        return None
    return f"everything is {slope:.5g} times what it should be, {'plus' if constant > 0 else 'minus'} {abs(constant):.5g}"


# --- other places ---------------------------------------------------------------------------------------------------------------------


def rows_of_others(wrong: Wrong) -> str | None:
    """The wrong positions that have the right numbers of another position, or of another tensor, where all others are right."""
    if wrong.theirs.shape[1] < _NARROW or len(wrong.theirs) < 2:
        return None
    source = _sources(wrong, wrong.theirs, wrong.value)
    if source is not None:
        return _moved_said(source, "position")
    rows = np.flatnonzero(wrong.places.any(axis=1))
    for key, other in wrong.beside():
        computed = wrong.value.copy()
        computed[rows] = other[rows]
        if wrong.accounts(computed):
            which = "it has" if rows.size == len(wrong.theirs) else f"{runs('position', rows)} {'have' if rows.size > 1 else 'has'}"
            return f"{which} the numbers of {key.place}"
    return None


def columns_of_others(wrong: Wrong) -> str | None:
    """The wrong elements that have the right numbers of another element at every position, or are 0, where all others are right."""
    if len(wrong.theirs) < _FEW_ROWS:
        return None
    value = wrong.value.T
    source = _sources(wrong, wrong.theirs.T, np.concatenate([value, np.zeros((1, value.shape[1]))]))
    if source is None:
        return None
    zero = np.flatnonzero(source == len(value))
    if not zero.size:
        return _moved_said(source, "element")
    source[zero] = zero
    moved = _moved_said(source, "element") if (source != np.arange(len(source))).any() else None
    return moved and f"{moved}, and {runs('element', zero)} {'are' if zero.size > 1 else 'is'} 0"


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


def _moved_said(source: Indices, what: str) -> str | None:
    """Which rows or columns are another one, in words."""
    count = len(source)
    index = np.arange(count)
    shift = source - index
    off = np.flatnonzero(shift)
    wrapped = np.where(shift[off] < 0, shift[off] + count, shift[off])
    if off.size == count and (wrapped == wrapped[0]).all():
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
        order = _order(source)
        if order:
            return order.format(what=what)
    first = ", ".join(f"{what} {i} has those of {source[i]}" for i in off[:3])
    return f"the right numbers in other places: {first}" + (f", and {off.size - 3} more" if off.size > 3 else "")


def _order(source: Indices) -> str | None:
    """A well-known order of rows or columns, in words."""
    count = len(source)
    index = np.arange(count)
    for size in [n for n in range(2, count + 1) if count % n == 0]:
        blocks = index.reshape(-1, size)
        where = "" if size == count else f" in each {size}"
        known = [(f"{{what}}s are in the opposite order{where}", blocks[:, ::-1])]
        if size % 2 == 0 and size > 2:
            both = blocks.reshape(-1, 2, size // 2)
            known += [
                (f"the two halves of the {{what}}s are exchanged{where}", both[:, ::-1]),
                (f"{{what}}s are in the order of pairs (i, i + {size // 2}){where}: interleaved", both.transpose(0, 2, 1)),
                (f"{{what}}s are in the order of even ones, then odd ones{where}", blocks.reshape(-1, size // 2, 2).transpose(0, 2, 1)),
            ]
        if 1 < size < count:
            known += [
                (f"blocks of {size} {{what}}s are in the opposite order", blocks[::-1]),
                (f"{{what}}s are transposed: rows of {size} are read as columns", blocks.T),
            ]
        for text, order in known:
            if (order.ravel() == source).all():
                return text
    return None
