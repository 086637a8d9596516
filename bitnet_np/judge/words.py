"""Numbers, places and moves in words: every sentence of the judge says them alike."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.intp]

_MANY = 1 << 12  # things: of more only powers of two are tried in rules
FEW = 4  # columns, or listed numbers


def places_of(numbers: NDArray, count: int, what: str, amount: bool = True) -> str:
    """Some of `count` numbered things: runs of them where these are few, every n-th, or the same ones of each group. amount: whether to say
    how many these are."""
    steps, of = np.diff(numbers), f" of {count}" * amount
    if np.count_nonzero(steps > 1) < 2:
        return runs(what, numbers) + of
    of = f", {numbers.size}{of}" * amount
    if (steps == steps[0]).all():
        ordinal = {2: "second", 3: "third"}.get(int(steps[0]), f"{steps[0]}th")
        return f"every {ordinal} {what} from {what} {numbers[0]}{of}"
    marked = np.isin(np.arange(count), numbers)
    for size in (n for n in range(3, count // 2 + 1) if count % n == 0):
        groups = marked.reshape(-1, size)
        if (groups == groups[0]).all():
            return f"{runs(what, np.flatnonzero(groups[0]))} of each {size}"
    return runs(what, numbers) + of


def parts_of(places: NDArray[np.bool_], mostly: float) -> list[str]:
    """The positions and the elements of a tensor [T, width] where some are wrong. mostly: where more than this part are, all are."""
    texts = []
    for axis, what in ((1, "position"), (0, "element")):
        wrong, count = np.flatnonzero(places.any(axis=axis)), places.shape[1 - axis]
        if 0 < wrong.size < mostly * count:
            texts.append(places_of(wrong, count, what))
    return texts


def runs(what: str, numbers: NDArray) -> str:
    """The noun, and the first runs of the numbers: elements 0 to 7, 12."""
    spans = [f"{piece[0]} to {piece[-1]}" if piece.size > 1 else f"{piece[0]}" for piece in pieces(numbers)]
    more = f" and {len(spans) - FEW} runs more" if len(spans) > FEW else ""
    return f"{what}{'s' * (numbers.size > 1)} {', '.join(spans[:FEW])}{more}"


def pieces(numbers: NDArray) -> list[NDArray]:
    """Ascending numbers, those together that follow each other."""
    return np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)


def runs_and_verb(what: str, numbers: NDArray, verb: str) -> str:
    """The noun, the first runs of the numbers, and the verb: elements 0 to 7 are."""
    return f"{runs(what, numbers)} {verb if numbers.size == 1 else {'is': 'are', 'has': 'have'}[verb]}"


def digits(number: float) -> str:
    """A number of six digits, or of as many as tell it from 1, where it may be a factor."""
    return next((text for n in range(6, 18) if float(text := f"{number:.{n}g}") != 1), "1")


def least_to_largest(numbers: NDArray, count: int = 4) -> str:
    """The least and the largest of some numbers, of so many digits; one of them where they read the same."""
    low, high = f"{numbers.min():.{count}g}", f"{numbers.max():.{count}g}"
    return low if low == high else f"{low} to {high}"


def instead(theirs: float, right: float, least: int = 6) -> str:
    """A number instead of another, of so many digits, or of as many as tell them apart."""
    texts = ((f"{theirs:.{n}g}", f"{right:.{n}g}") for n in range(least, 18))
    return " instead of ".join(next((pair for pair in texts if pair[0] != pair[1]), (repr(float(theirs)), repr(float(right)))))


def plain(number: float, near: float) -> str:
    """The number of fewest digits that is as near: somebody may have written it."""
    texts = (f"{number:.{digits}g}" for digits in range(1, 7))
    return next((f"{float(text):.6g}" for text in texts if abs(float(text) - number) <= near * abs(number)), f"{number:.6g}")


def moves_in_words(source: Indices, what: str, of: str = "the numbers") -> str:
    """Which rows or columns are another one, in words: as a rule if there is one, else by runs of them."""
    count, index = len(source), np.arange(len(source))
    off = np.flatnonzero(source != index)
    shift = source[off] - off
    if off.size == count and source.max() < count and np.unique(shift % count).size == 1:
        by = (int(shift[0]) + count // 2) % count - count // 2
        return f"{what}s are shifted by {abs(by)}: {what} {max(0, -by)} has {of} of {what} {max(0, by)}"
    if off.size == 2 and (np.sort(source) == index).all():
        return f"{what}s {off[0]} and {off[1]} are exchanged"
    if off.size > 1 and np.unique(source[off]).size == 1:
        return f"{places_of(off, count, what, amount=False)} have {of} of {what} {source[off[0]]}"
    for words, rule in rules(count) if off.size > 2 else ():
        if (source == rule).all():
            return f"{what} i has {of} of {words}"
    step, breaks = np.diff(source[off]), [0]  # 1 where a run of them stands elsewhere, 0 where one stands in the place of all
    for k in range(len(step)):
        if off[k + 1] != off[k] + 1 or step[k] not in (0, 1) or (k > breaks[-1] and step[k] != step[k - 1]):
            breaks.append(k + 1)
    moves = np.split(off, breaks[1:])
    for size in (n for n in range(3, count // 2 + 1) if len(moves) > 3 and count % n == 0 and source[:n].max() < n):
        if (source == (source[:size] + np.arange(0, count, size)[:, None]).ravel()).all():
            return f"in each {size} {what}s: {moves_in_words(source[:size], what, of)}"
    if len(moves) > 3 and np.unique(shift).size == 1:
        by = int(shift[0])
        which = {-1: f"the {what} before", 1: f"the next {what}"}.get(by, f"the {what} {abs(by)} {'behind' if by > 0 else 'before'}")
        return f"{places_of(off, count, what, amount=False)} have {of} of {which}"
    for words, rule in rules(count) if len(moves) > 3 else ():
        if (source[off] == rule[off]).all():
            return f"{places_of(off, count, what, amount=False)} have those of {words}, for {what} i"
    first = [f"{runs_and_verb(what, moved, 'has')} {of} of {runs(what, np.unique(source[moved]))}" for moved in moves[:3]]
    if len(moves) > max(3, off.size // 2):
        first = [f"the right numbers in other places: {first[0]}", *first[1:]]
    return ", ".join(first) + (f", and {len(moves) - 3} more" if len(moves) > 3 else "")


def rules(count: int) -> Iterator[tuple[str, Indices]]:
    """Yields the orders of `count` things that an index gives that is computed wrongly, in words."""
    i = np.arange(count)
    yield "i from the end: the order is the opposite", count - 1 - i
    for n in range(2, count) if count <= _MANY else (2**k for k in range(1, count.bit_length())):
        yield from ((f"i % {n}", i % n), (f"i // {n}", i // n), (f"i - i % {n}", i - i % n), (f"{n} * i % {count}", n * i % count))
        yield f"i + i % {n}", np.minimum(i + i % n, count - 1)
        if (i ^ (n // 2)).max() < count:
            yield f"i ^ {n // 2}", i ^ (n // 2)
        if count % n == 0:
            yield f"{n} * (i % {count // n}) + i // {count // n}: rows of {n} are read as columns", i.reshape(-1, n).T.ravel()
