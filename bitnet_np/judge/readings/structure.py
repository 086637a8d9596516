"""The reader of structure: what numbers that are wrong have in common with the right ones, whatever step they are of.

Each law is a few numbers, or an order, that make all wrong numbers of the right ones. A law with as many numbers as it explains says
nothing, so each of its numbers is fitted to several. Every law is checked on all numbers: what it says of them is so.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.errors import listed
from ..evidence import LITTLE, NEAR, SAME, SPARE, explains, matched, nearest_number, rough, sources
from ..law.expression import Array
from ..law.functions import ACTIVATIONS, places_from, starts
from ..words import FEW, digits, least_to_largest, moves_in_words, parts_of, places_of, plain, rules, runs
from .curves import described_function

_LEAST, _RATIOS = 16, 32  # numbers: a law of fewer is chance; and those with a ratio, of which few are different
GROUPS = 3  # factors that are said one by one
_RANK = 4  # the most that is said
_OFFSET, _LARGE = 64, 1 << 18  # numbers that a pointer may be off by; numbers: what tries hundreds of places looks at no more
_WORTH = 0.3  # of the error, left after the first steps of a golden section
_TILES = (2, 4, 8, 16, 32, 64, 128)
_TYPES = {1: "powers of 2", 8: "bfloat16's 8 significant bits", 11: "float16's 11 significant bits"}
_WIDEST = 128  # rows that one matrix may turn
_FEW_SLICES = 1000  # of which one number alone tells which it is


_ROOTS = {1.0: "{}", -1.0: "1 / {}", 2.0: "the square of {}", 0.5: "the root of {}"}
POWERS = _ROOTS | {-power: f"1 / {words}" for power, words in _ROOTS.items() if power > 0}
"""By an exponent: what is said of numbers with it."""


def powered(x: Array, power: float) -> Array:
    """Numbers with an exponent, of the same sign; 0 where they are."""
    return np.sign(x) * np.where(x == 0, 1, np.abs(x)) ** power


class Numbers(NamedTuple):
    """The numbers of a step."""

    theirs: Array
    right: Array  # of the same shape
    axes: tuple[str, ...]  # what each axis counts, singular; the last one is "element" where it is cut into heads or blocks
    noise: float = 0.0  # NMSE of their roundings
    labels: Mapping[str, NDArray[np.intp]] = {}  # whole numbers that say what each one belongs to, of the same shape

    @property
    def same(self) -> float:
        """Relative: two of their factors that are one."""
        return max(SAME, 8 * rough(self.noise))

    def explained(self, computed: Array) -> bool:
        """Whether these are their numbers."""
        return explains(computed, self.theirs, self.right, self.noise)


def structure(numbers: Numbers) -> str | None:
    """What makes all of their numbers of the right ones by few numbers, in words; None if nothing does that is known here."""
    text = _read(numbers, _constant, _moved, _laid_out, _by_few_factors, _shifted, _added, _elsewhere)
    return text or _read(numbers, _few_changes, _turned, _of_rows, _function, _replaced)


def loose_structure(numbers: Numbers) -> str | None:
    """The same where each thing along an axis has a number of its own, or each number a function that has no name."""
    return _read(numbers, _by_factors, _mixed, _unknown_function)


def pointwise(numbers: Numbers) -> str | None:
    """What makes each number of the right one alone."""
    return _read(numbers, partial(_few_changes, is_apart=True), _function)


def _read(numbers: Numbers, *laws: Callable[[Numbers], str | None]) -> str | None:
    if numbers.theirs.size < _LEAST or not np.isfinite(numbers.theirs).all():
        return None
    with np.errstate(all="ignore"):
        return next((text for law in laws if (text := law(numbers)) is not None), None)


def _constant(n: Numbers) -> str | None:
    if np.abs(n.theirs).max() <= max(1e-6, rough(n.noise)) * np.abs(n.right).max():
        return "all numbers are 0"
    number = float(n.theirs.flat[0])
    return f"all numbers are {number:.6g}" if n.explained(np.full(n.theirs.shape, number)) else None


# --- places -----------------------------------------------------------------------------------------------------------------------------


def _moved(n: Numbers) -> str | None:
    """Slices along an axis that are another one's."""
    for axis, what in enumerate(n.axes):
        theirs, right = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (n.theirs, n.right))
        source = _sources(theirs, right, n.same)
        if source is not None and n.explained(np.take(n.right, source, axis)):
            return moves_in_words(source, what)
    return None


def _elsewhere(n: Numbers) -> str | None:
    """Single numbers that are another one's."""
    begin = np.arange(n.right.size).reshape(n.right.shape) // n.right.shape[-1] * n.right.shape[-1]
    for what, label in n.labels.items():
        if n.explained(n.right.ravel()[(begin + label).clip(max=n.right.size - 1)]):
            return f"the number of each {what} is taken for the place, from the start of each row, of what belongs to it"
    source = _sources(n.theirs.reshape(-1, 1), n.right.reshape(-1, 1), n.same)
    if source is None or not n.explained(n.right.ravel()[source].reshape(n.right.shape)):
        return None

    off, last = np.flatnonzero(source != np.arange(source.size)), n.right.shape[-1]
    if off.size > 2 * SPARE and len(np.unique(source[off])) <= 2:  # limits, which right numbers happen to have
        return None
    ends = np.flatnonzero((np.diff(source[off]) != 0) | (off[1:] // last != off[:-1] // last)) + 1

    def place(some: NDArray[np.intp]) -> str:
        lead = np.unravel_index(some[0] // last, n.right.shape[:-1]) if n.right.ndim > 1 else ()
        return ", ".join((*(f"{axis} {at}" for axis, at in zip(n.axes[:-1], lead, strict=True)), runs(n.axes[-1], some % last)))

    moves = [f"{place(some)} {'has' if some.size == 1 else 'have'} that of {place(source[some[:1]])}" for some in np.split(off, ends)]
    return f"numbers of other places: {'; '.join(moves[:FEW])}" + (f"; and {len(moves) - FEW} more" if len(moves) > FEW else "")


def _sources(theirs: Array, right: Array, same: float) -> NDArray[np.intp] | None:
    """The slice of the right ones [n, m] that each of theirs is. Slices of few numbers are only told where they are few, and several
    wrong."""
    is_wide = right.shape[1] >= SPARE
    near = (10 * same if is_wide else same if right.shape[1] > 1 else same / 10) * float(np.abs(right).max())
    source, off = np.arange(len(right)), np.flatnonzero((np.abs(theirs - right) > near).any(axis=1))
    if not off.size or len(right) < 2 or not (is_wide or (off.size >= SPARE and len(right) <= _FEW_SLICES)):
        return None
    found = sources(right, theirs[off], near)
    if found is None:
        return None
    shifts, often = np.unique(found - off, return_counts=True)  # some slices may be alike: one shift, or a rule, says more than several
    shifted = np.clip(np.arange(len(right)) + shifts[often.argmax()], 0, len(right) - 1)
    ruled = (rule[off] for rule in (shifted, *(rule for _, rule in rules(len(right)))) if _is_near(right[rule[off]], theirs[off], near))
    source[off] = next(ruled, found)
    return source


def _is_near(right: Array, theirs: Array, near: float) -> bool:
    """Whether slices are these, by the first of them to begin with."""
    return bool((np.abs(right[0] - theirs[0]) <= near).all() and (np.abs(right - theirs) <= near).all())


def _laid_out(n: Numbers) -> str | None:
    """Axes that are taken for each other, or tiles of one axis."""
    shape, few = n.right.shape, np.linspace(0, n.right.size - 1, _RATIOS).astype(np.intp)
    cuts = [(shape, n.axes), *((cut, names) for axis in range(len(shape)) for cut, names in _in_tiles(shape, n.axes, axis))]
    for cut, names in cuts:
        for order in permutations(range(len(cut))):
            at = np.unravel_index(few, [cut[i] for i in order])
            source = np.ravel_multi_index([at[order.index(i)] for i in range(len(cut))], cut)
            if not np.allclose(n.theirs.ravel()[few], n.right.ravel()[source], rtol=1e-3, atol=n.same * np.abs(n.right).max()):
                continue
            if n.explained(n.right.reshape(cut).transpose(order).reshape(shape)):
                return f"numbers are laid out as [{', '.join(names[i] for i in order)}], and read as [{', '.join(names)}]"
    return None


def _in_tiles(shape: tuple[int, ...], axes: tuple[str, ...], axis: int) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Yields the shape, and what its axes count, with one of them cut into tiles, or into the shares of 2 to 8 ranks."""
    sizes = dict.fromkeys((*_TILES, *(shape[axis] // n for n in (8, 4, 3, 2) if shape[axis] % n == 0)))
    for size in (size for size in sizes if 1 < size < shape[axis] and shape[axis] % size == 0):
        names = f"tile of {size} {axes[axis]}s", f"{axes[axis]} of it"
        yield (*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :]), (*axes[:axis], *names, *axes[axis + 1 :])


def _added(n: Numbers) -> str | None:
    """Slices along an axis that are sums of several, or that others are added to: how often each is summed is solved for."""
    for axis, what in enumerate(n.axes):
        theirs, right = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (n.theirs, n.right))
        if not 1 < len(right) <= right.shape[1] - SPARE or right.shape[1] > _LARGE:
            continue
        often = np.rint(theirs @ np.linalg.pinv(right))
        if not n.explained(np.moveaxis((often @ right).reshape(np.moveaxis(n.right, axis, 0).shape), 0, axis)):
            continue
        more = often - np.eye(len(often))
        off, source = np.flatnonzero(more.any(axis=1)), np.arange(len(often))
        if (more[off].sum(axis=1) == 1).all() and (np.abs(more[off]).sum(axis=1) == 1).all():
            source[off] = more[off].argmax(axis=1)
            return f"to each {what} another one is added: {moves_in_words(source, what)}"
        apart = np.arange(len(often))[:, None] - np.arange(len(often))
        for tile in range(1, len(often)):
            if (often == (apart >= 0) * (apart % tile == 0)).all():
                which = f"all up to it that are a multiple of {tile} before it" if tile > 1 else "all up to it"
                return f"each {what} is the sum of {which}: sums run on, and are not cleared"
        of = [f"{what} {i} is the sum of {runs(what, np.flatnonzero(often[i]))}" for i in off if set(often[i]) <= {0, 1}]
        if len(of) == off.size:
            return f"slices are added up: {'; '.join(of[:FEW])}" + (f"; and {len(of) - FEW} more" if len(of) > FEW else "")
    return None


def _shifted(n: Numbers) -> str | None:
    """Numbers that are read a little beyond their place, or rows that are read from other distances than they have."""
    size, width = n.right.size, n.right.shape[-1]
    if size > _LARGE:
        return None
    flat, theirs = n.right.ravel(), n.theirs.ravel()
    for words, start in starts("row", (k for d in range(1, _OFFSET + 1) for k in (d, -d))):
        source = places_from(start, size // width, width)
        inside = (source >= 0) & (source < size)
        few = np.flatnonzero(inside)[:: max(1, size // _RATIOS)]  # which refuse most
        if inside.mean() <= 0.5 or not np.allclose(theirs[few], flat[source[few]], rtol=1e-3):
            continue
        if n.explained(np.where(inside, flat[source.clip(0, size - 1)], theirs).reshape(n.right.shape)):
            return words
    return None


# --- factors and constants --------------------------------------------------------------------------------------------------------------


def _views(n: Numbers) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yields the axes along which a factor or a constant may differ, with what they count."""
    every = range(len(n.axes))
    yield (), "number"
    yield from (((i,), n.axes[i]) for i in every if n.axes[i] != "element")
    yield from (((i,), n.axes[i]) for i in every if n.axes[i] == "element")
    for i in every:
        for j in range(i + 1, len(n.axes)):
            if len(n.axes) > 2:
                yield (i, j), f"{n.axes[j]} of each {n.axes[i]}"


class Fit(NamedTuple):
    """Factors, or constants, that make all of their numbers."""

    numbers: Array  # of each thing, [1.., n, ..1]
    is_factor: bool
    what: str  # is counted
    is_single: bool  # whether it is one axis

    def made(self, right: Array, numbers: Array) -> Array:
        return numbers * right if self.is_factor else right + numbers

    def off(self, same: float) -> NDArray[np.intp]:
        """Where factors are not 1, or constants not 0."""
        x = self.numbers.ravel()
        return np.flatnonzero(np.abs(x - 1) > same if self.is_factor else np.abs(x) > same * np.abs(x).max())


def fitted(n: Numbers) -> Iterator[Fit]:
    for axes, what in _views(n):
        rest = tuple(i for i in range(n.right.ndim) if i not in axes)
        if np.prod([n.right.shape[i] for i in rest]) < SPARE:
            continue
        square = (n.right**2).sum(axis=rest, keepdims=True)
        factor = np.where(square > 0, (n.theirs * n.right).sum(axis=rest, keepdims=True) / square, 1)
        for numbers, is_factor in ((factor, True), ((n.theirs - n.right).mean(axis=rest, keepdims=True), False)):
            fit = Fit(numbers, is_factor, what, len(axes) < 2)
            if n.explained(fit.made(n.right, numbers)):
                yield fit


def _by_few_factors(n: Numbers) -> str | None:
    """A factor, or a constant, of which few are different."""
    for fit in fitted(n):
        numbers, few = fit.numbers.ravel(), np.full(fit.numbers.size, float(fit.is_factor))
        groups = _groups(numbers, fit.off(n.same), n.same)
        if not fit.is_single or len(groups) > GROUPS:
            continue
        for some in groups:
            few[some] = numbers[some].mean()
        if n.explained(fit.made(n.right, few.reshape(fit.numbers.shape))):
            which = [("all numbers" if few.size == 1 else runs(fit.what, some), some, float(few[some[0]])) for some in groups]
            if fit.is_factor:
                return listed([f"{words} {'is' if some.size == 1 < few.size else 'are'} {times(x)}" for words, some, x in which])
            return listed([f"{digits(x)} is added to {words}" for words, _, x in which])
    return None


def _by_factors(n: Numbers) -> str | None:
    """A factor, or a constant, of each thing along an axis."""
    for fit in fitted(n):
        numbers, off = fit.numbers.ravel(), fit.off(n.same)
        which = "" if off.size == numbers.size or not fit.is_single else f", at {places_of(off, numbers.size, fit.what)}"
        how = f"each {fit.what} is multiplied by a number of its own" if fit.is_factor else f"a number is added to each {fit.what}"
        return f"{how}, {least_to_largest(numbers[off])}{which}"
    return None


def times(factor: float) -> str:
    """What numbers are that have a factor."""
    if abs(factor) < SAME:
        return "0"
    return "of the other sign" if abs(factor + 1) < SAME else f"{digits(factor)} times what is right"


def _groups(numbers: Array, some: NDArray[np.intp], near: float) -> list[NDArray[np.intp]]:
    """Some of the numbers, those together that are the same."""
    groups, least = list[NDArray[np.intp]](), LITTLE * np.abs(numbers).max(initial=0) + 1e-300
    while some.size and len(groups) <= GROUPS:
        same = np.abs(numbers[some] - numbers[some[0]]) <= 10 * near * max(least, abs(numbers[some[0]]))
        groups.append(some[same])
        some = some[~same]
    return groups


def _few_changes(n: Numbers, is_apart: bool = False) -> str | None:
    """Numbers all over that have one of few factors, or of few constants added: 0 and another one, as dropout leaves them, the other sign,
    a penalty, or what wraps around; and what tells them apart: their place, label, value or magnitude.
    is_apart: whether something has to."""
    most = np.abs(n.right).max()
    error = np.where(np.abs(n.theirs - n.right) <= n.same * most, 0, n.theirs - n.right)
    ratio = np.where((n.right == 0) | (np.abs(n.theirs) <= 1e-6 * most), 0, n.theirs / n.right)
    for change, none, is_seen in ((ratio, 1.0, np.abs(n.right) > 1e-3 * most), (error, 0.0, np.ones(n.right.shape, bool))):
        seen = change[is_seen]
        groups = sorted(_groups(seen, np.arange(seen.size), n.same), key=lambda some: float(seen[some].mean()))
        if seen.size < _RATIOS or not 1 < len(groups) <= GROUPS or min(map(len, groups)) < SPARE:
            continue
        values = np.array([seen[some].mean() for some in groups])
        nearest = np.abs(change[..., None] - values).argmin(axis=-1)
        if not n.explained(values[nearest] * n.right if none else n.right + values[nearest]):
            continue
        off = [i for i, x in enumerate(values.tolist()) if abs(x - none) > SAME]
        wheres = [_where(n, nearest == i, is_seen) for i in off]
        if len(off) < len(groups) and None not in wheres:
            how = [times(values[i]) if none else f"{digits(values[i])} more than what is right" for i in off]
            is_wrap = len(off) == 2 and not none and bool(abs(values[off].sum()) < NEAR * np.ptp(values))
            texts = [f"those {where} are {what}" for where, what in zip(wheres, how, strict=True)]
            return f"{listed(texts)}{', as where codes wrap around' * is_wrap}"
        if not none or is_apart:
            continue
        parts, where = [some.size / seen.size for some in groups], ""
        if n.right.ndim == 2 and len(groups) == 2:
            where = " and ".join(parts_of(error != 0, 1.0))
        each = [
            f"{100 * part:.{2 if part < 0.995 else 4}g} % are {'right' if abs(x - 1) < SAME else times(float(x))}"
            for x, part in zip(values, parts, strict=True)
        ]
        is_dropout = len(groups) == 2 and abs(values[0]) < SAME < values[1] - 1 and abs(values[1] * parts[1] - 1) < 0.05
        return f"of the numbers {listed(each)}{', as dropout leaves them' if is_dropout else where and f': the wrong ones are at {where}'}"
    return None


def _where(n: Numbers, some: NDArray[np.bool_], among: NDArray[np.bool_]) -> str | None:
    """What some numbers have and no others among these do: a label, or a right value, or its magnitude, beyond a border."""
    inside, outside = some & among, ~some & among
    for what, label in n.labels.items():
        if not np.intersect1d(label[inside], label[outside]).size:
            return f"of {runs(what, np.unique(label[inside]))} of each row"
    borders = (beyond(n.right, inside, outside), beyond(np.abs(n.right), inside, outside))
    return borders[0] or (borders[1] and f"of a magnitude {borders[1]}")


def beyond(x: Array, inside: NDArray[np.bool_], outside: NDArray[np.bool_]) -> str | None:
    """The border that some of these numbers are beyond and others are not, in words; None if there is none."""
    for which, sign in (("above", 1), ("below", -1)):
        least, most = float((sign * x)[inside].min()), float((sign * x)[outside].max(initial=-np.inf))
        if least > most > -np.inf:
            border = sign * (least + most) / 2
            return f"{which} {plain(border, max((least - most) / 2 / max(abs(border), 1e-300), SAME))}"
    return None


def _replaced(n: Numbers) -> str | None:
    """One number in the place of many, all others right."""
    wrong = np.abs(n.theirs - n.right) > n.same * np.abs(n.right).max()
    if wrong.sum() < SPARE:
        return None
    number = float(np.median(n.theirs[wrong]))
    is_it = np.abs(n.theirs - number) <= 1e-6 * abs(number)
    if not n.explained(np.where(is_it, number, n.right)):
        return None
    kept = np.where(is_it, np.inf, n.right).min(axis=-1) >= np.where(is_it & wrong, n.right, -np.inf).max(axis=-1)
    filtered = ": the smaller ones of each row, as a filter of logits leaves them" if kept.all() else ""
    return f"{100 * is_it.mean():.2g} % of the numbers are {number:.6g}, and the others are right{filtered}"


# --- functions --------------------------------------------------------------------------------------------------------------------------


def _turned(n: Numbers) -> str | None:
    """The orthogonal matrix that each row is multiplied by, as of a rotation that is not taken back."""
    if (matrix := _matrix(n)) is None:
        return None
    size, square, near = len(matrix), matrix.T @ matrix, LITTLE + 8 * rough(n.noise)
    scale = float(np.trace(square)) / size
    if np.abs(square - scale * np.eye(size)).max() > near * scale:
        return None
    which = "a Hadamard matrix" if np.ptp(np.abs(matrix)) <= near * scale**0.5 else "an orthogonal matrix"
    return f"each {n.axes[-2]} is turned by {which}, and not turned back"


def _mixed(n: Numbers) -> str | None:
    """Heads that are all multiplied by one matrix."""
    is_of_heads = len(n.axes) > 2 and n.axes[-2] == "head" and n.right.shape[-2] > 1
    return "each head is multiplied by one matrix" if is_of_heads and _matrix(n) is not None else None


def _matrix(n: Numbers) -> Array | None:
    """The matrix that makes all rows of the right ones."""
    size = n.right.shape[-1]
    right, theirs = (x.reshape(-1, size) for x in (n.right, n.theirs))
    if not 1 < size <= _WIDEST or len(right) < 2 * size:
        return None
    matrix: Array = np.linalg.lstsq(right, theirs, rcond=1e-9)[0].astype(np.float64)
    return matrix if n.explained((right @ matrix).reshape(n.right.shape)) else None


def _of_rows(n: Numbers) -> str | None:
    """A function of each row."""
    x = n.right
    largest = x.max(axis=-1, keepdims=True)
    e = np.exp(x - largest)
    total = e.sum(axis=-1, keepdims=True)
    for words, computed in (
        ("they are the softmax of each row", e / total),
        ("they are the logarithms of each row's softmax", x - largest - np.log(total)),
        ("the largest number of each row is subtracted", x - largest),
        ("the mean of each row is subtracted", x - x.mean(axis=-1, keepdims=True)),
        ("each row is divided by its sum", x / x.sum(axis=-1, keepdims=True)),
        ("each row is divided by its largest magnitude", x / np.abs(x).max(axis=-1, keepdims=True)),
    ):
        if n.explained(computed):
            return words
    return None


def _function(n: Numbers) -> str | None:
    """A function of each right number by itself."""
    x, y = n.right, n.theirs
    low, high = float(y.min()), float(y.max())
    slack = n.same / 10 * float(np.abs(y).max())
    under, over = (x < low - slack).sum(), (x > high + slack).sum()
    if under + over > 1 and n.explained(np.clip(x, low, high)):
        if under and over:
            return f"numbers are clipped to {low:.6g} and {high:.6g}"
        return f"numbers {'above' if over else 'below'} {(high if over else low):.6g} are clipped to it"
    caps = (np.geomspace(0.05, 10, 65) * np.abs(x).max()).tolist()
    cap = nearest_number(lambda cap: float(((cap * np.tanh(x / cap) - y) ** 2).sum()), caps, worth=_WORTH * float(((x - y) ** 2).sum()))
    if cap is not None and n.explained(cap * np.tanh(x / cap)):
        return f"numbers are soft-capped at {plain(cap, n.same / 4)}"
    for power, words in POWERS.items():
        if power != 1 and n.explained(powered(x, power)):
            return f"they are {words.format('what is right')}"
    made = {name: function(x) for name, function in ACTIVATIONS.items() if name != "nothing"}
    name = min(made, key=lambda name: float(np.nan_to_num(np.square(made[name] - y).sum(), nan=np.inf)))
    if n.explained(made[name]):
        return f"{name} of them stands there"
    for bits in range(1, 12):  # on a coarser grid
        step = 2.0 ** (np.floor(np.log2(np.where(x == 0, 1, np.abs(x)))) + 1 - bits)
        for how, rule in (("rounded", np.rint), ("cut", np.trunc), ("rounded up", lambda x: np.sign(x) * np.ceil(np.abs(x)))):
            if n.explained(rule(x / step) * step):
                return f"numbers are {how} to {_TYPES.get(bits, f'{bits} significant bits')}"
    return None


def _unknown_function(n: Numbers) -> str | None:
    return described_function(n.right.ravel(), n.theirs.ravel(), n.right.ravel(), "what is right")


# --- rank -------------------------------------------------------------------------------------------------------------------------------


def rank(error: Array, noise: float) -> int | None:
    """The rank of an error that is the sum of few products of a column and a row."""
    if min(error.shape) < 4 * _RANK or error.size > _LARGE:
        return None
    size = np.linalg.svd(error, compute_uv=False)
    left = np.cumsum(size[::-1] ** 2)[::-1]
    return next((r for r in range(1, _RANK + 1) if left[r] <= matched(noise) * left[0]), None)
