"""The search for the mistake that explains wrong numbers: a tensor, a part of one, or logits.

Known mistakes come first, then what needs no hypothesis, then every other edit of the operations, with numbers where they have some, and at
last two causes at once: a mistake, and fewer bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import thread_time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.errors import listed
from ...base.progress import Progress, silent
from ...traces.points import Key
from ..evidence import LITTLE, nearest_number
from ..hypothesis import Compute, Hypothesis
from ..law.expected import TINY
from ..law.expression import Array
from ..law.graph import Operation
from ..law.noise import UNEVEN
from ..parts import Part
from ..readings.table import LOOSE
from ..words import digits
from .catalogue import CATALOGUE, HIDDEN, OF_HEADS, OF_ROWS, ROWS
from .hypotheses import AND, cached_and_rounded, hypotheses, narrowed

OVERHEAD = 2 * 10**5
"""Multiply-adds that take as long as what an operation does beside them."""
EXACT = 1e-11
"""NMSE that float32 leaves of any mistake."""

_ALIKE = 4  # times what the nearest leaves: of two that leave as little, the first one tried stands
_WORTH = 0.5  # of the error, left after the first steps between two numbers of a grid
_SINGLE = 8  # kinds of edits that are tried in all operations that share a function, before one is in single operations
_DIGITS = 6  # of a number that somebody may have written: it is preferred to one that fits no better
_CHANCE = 5  # digits that wrong numbers have to show beside a fitted one's own: a thousand mistakes are tried, and one in a hundred may fit
_STEPS = 24  # of a golden section: 1e-5 of an interval of the grid
_LESS = 0.999  # of what another mistake leaves
_FORMATS = tuple(mistake for mistake in (*CATALOGUE, *HIDDEN) if not mistake.fault or mistake.id == "edit.fewer_bits")
"""Roundings to fewer bits, of weights too, which are no mistake where all tensors show them."""
_LITTLE = 0.02  # the same of a type of fewer bits, whose roundings fall to other sides here and there; the next types leave far more
_MUCH = 0.1  # of a mistake, where roundings to fewer bits explain the rest


class Explanation(NamedTuple):
    """What a mistake leaves of an error."""

    left: float  # NMSE
    fits: bool  # whether that is no more than roundings leave


@dataclass(kw_only=True)
class Case(ABC):
    """Wrong numbers, and what they are when operations that lead to them are computed otherwise. Subclasses say how that is known."""

    span: Sequence[Operation]  # the operations, the last of which gives the numbers
    value: NDArray  # what they should be, [T, width]
    theirs: NDArray
    now: float  # NMSE without a mistake
    single: bool = True  # whether hidden mistakes are tried in one operation of one layer, too
    exact: float = 0.0  # NMSE that no other known mistake can outdo
    fit: bool = True  # whether numbers are fitted to theirs
    noise: float = 0.0  # NMSE of roundings alone: what leaves no more is not given up for a fitted factor, which takes away roundings too
    level: float = 0.0  # of noise, if all that is wrong is noise, of several operations: a type of fewer bits has to make about as much
    parts: Sequence[Part] = ()  # that hold all wrong numbers
    nearest: Hypothesis | None = None  # what leaves least, be it more than roundings leave
    tried: set[str] = field(default_factory=set)  # texts of known mistakes: what edits the same is not tried again
    refused: frozenset[Key] = frozenset()  # operations of the span in which no mistake alone explains it

    @abstractmethod
    def made(self, hypothesis: Hypothesis) -> NDArray | None:
        """The numbers with a mistake; None if it gives none of this shape."""

    @abstractmethod
    def explained(self, array: NDArray, hypothesis: Hypothesis) -> Explanation:
        """What is left where a mistake gives these numbers."""

    @abstractmethod
    def cost(self, changed: Collection[Key]) -> float:
        """Multiply-adds of a hypothesis that changes these tensors."""

    @cached_property
    def independent(self) -> int:
        """Wrong numbers of which none follows from the others."""
        return self.value.size

    def is_told(self, number: float | None, left: float) -> bool:
        """Whether wrong numbers show a mistake, of which this is left, to more digits than chance does, and than its fitted number has."""
        each = np.log10(self.now / max(left, TINY)) / 2
        own = "" if number is None else f"{number:.{_DIGITS}g}".partition("e")[0].replace(".", "").strip("-0")
        return bool(self.independent * each - min(len(own), each) >= _CHANCE)

    def promising(self, candidates: Iterable[Hypothesis], stop: Callable[[], bool]) -> Iterator[Hypothesis]:
        """Yields mistakes without those that a first look refuses. stop: says when no more are wanted."""
        yield from candidates

    def of_one(self, key: Key, compute: Compute) -> tuple[NDArray, NDArray] | None:
        """One tensor with a mistake in its operation, and the right one; None if that cannot be known."""
        return None

    def is_at_level(self, hypothesis: Hypothesis) -> bool:
        """Whether a type of fewer bits makes about as much noise as there is, by the first operation that has it."""
        key, compute = next(iter(hypothesis.computes.items()))
        if not self.level or (pair := self.of_one(key, compute)) is None or pair[0].shape != pair[1].shape:
            return True
        level = ((pair[0] - pair[1]) ** 2).mean() / max((pair[1] ** 2).mean(), TINY) * len(hypothesis.computes) / len(self.span)
        return bool((self.level / UNEVEN) ** 2 <= level <= (self.level * UNEVEN) ** 2)

    def near(self, hypothesis: Hypothesis) -> float:
        """What it leaves, about: by that numbers are sought."""
        return self.explain(hypothesis).left

    def explain(self, hypothesis: Hypothesis, keep: bool = False) -> Explanation:
        """What a mistake leaves. keep: whether it is kept if it comes closest, in a part too. One whose number was sought, which takes away
        other errors, is kept if it leaves little, and never for a part."""
        self.tried.update([hypothesis.text] * keep)
        array = self.made(hypothesis)
        if array is None:
            return Explanation(np.inf, False)
        found, number = self.explained(array, hypothesis), hypothesis.number
        is_told = self.is_told(number, found.left)
        if keep:
            is_sure = number is None or (is_told and found.left <= _LITTLE * self.now)
            if is_sure and hypothesis.fault and found.left < (np.inf if self.nearest is None else _LESS * self.nearest.left):
                self.nearest = replace(hypothesis, left=found.left)
            # a rounding on purpose is made everywhere, or was not made
            if number is None and hypothesis.fault and not _is_of_rows(hypothesis):
                for part in self.parts:
                    part.compare(hypothesis, array, self.theirs, hypothesis.id in OF_HEADS)
        return found._replace(fits=found.fits and is_told)

    def leaves_noise(self, array: NDArray) -> bool:
        """Whether what numbers with a mistake differ by is like the noise of fewer bits."""
        return False

    @abstractmethod
    def facts(self) -> Hypothesis | None:
        """What the numbers show without a hypothesis."""

    def readings(self) -> Hypothesis | None:
        """What else may be read off the numbers."""
        return None

    def sums(self) -> Hypothesis | None:
        """The law of the sums of rows in an operation that is right but for them."""
        return None

    def within(self, part: Part) -> "Case":
        """The case of one of `parts` alone."""
        raise NotImplementedError

    def with_operations_before(self) -> "Case | None":
        """The case of the operation with those that give its inputs, as if these were not known; None if that cannot be told."""
        return None


def _is_of_rows(cause: Hypothesis) -> bool:
    """Whether it is in all numbers of an operation, or in none."""
    return cause.id in OF_ROWS or cause.text.startswith(("epsilon", "token ids"))


@dataclass
class Search:
    """The search for causes in one dump."""

    work: float  # that hidden mistakes may still do, in multiply-adds; half of it on one tensor, so that later ones are searched too
    budget: float = np.inf  # seconds of this thread, as other programs must not decide what is found; half of what is left on one tensor
    progress: Progress = silent
    left_out: int = 0  # mistakes that were not tried, because of it
    ended: str = ""  # why some were not, in words, if not for the work
    _known: dict[str, float | None] = field(default_factory=dict)  # texts of hidden mistakes that explained a tensor, and their numbers
    _types: set[str] = field(default_factory=set)  # of fewer bits, in words, that explained a tensor: other operations have them, too
    _until: float = np.inf  # the time when the search for the causes of one tensor ends
    _end: float | None = None  # and that of all, from the first on

    def begin(self, share: float = 0.5) -> None:
        """Begin with another tensor, which may take this part of the time that is left."""
        now = thread_time()
        self._end = now + self.budget if self._end is None else self._end
        self._until = now + share * (self._end - now)

    def begin_unlimited(self) -> None:
        """Begin with a tensor whose verdict depends on what is found."""
        self._until = np.inf

    def stop(self) -> None:
        """Let everything that is left be left out: the user wants no more."""
        self.ended, self._end, self._until = "the search for causes was interrupted", -np.inf, -np.inf

    def close(self) -> None:
        """Show that the search is over."""
        if self._end is not None and np.isfinite(self.budget):
            self.progress(int(self.budget) + 1, int(self.budget) + 1)

    def has_ended(self) -> bool:
        """Whether the time for this tensor is over. Shows the seconds that have passed, of all that there are."""
        now = thread_time()
        if over := now >= self._until:
            more = f"--budget {max(10 * self.budget, 20):g} tries more"
            self.ended = self.ended or f"the search for causes ended after its {self.budget:g} s: {more}"
        elif self._end is not None and np.isfinite(self.budget):
            self.progress(int(now - self._end + self.budget), int(self.budget) + 1)
        return over

    def format(self, case: Case) -> Hypothesis | None:
        """The rounding to fewer bits that leaves least, and little."""
        possible = hypotheses(case.span, False, _FORMATS, stop=self.has_ended)
        candidates = (one for one in possible if (one.everywhere or len(case.span) == 1) and case.is_at_level(one))  # one type for all
        best = _best(self._fits(case, candidates, _LITTLE * case.now))
        return best and replace(best, fault=False)

    def _fits(self, case: Case, candidates: Iterable[Hypothesis], enough: float = -1.0, keep: bool = False) -> list[Hypothesis]:
        """Those that explain it, as long as there is time, up to one that leaves no more than `enough`. keep: see Case.explain."""
        fits: list[Hypothesis] = []
        with np.errstate(all="ignore"):
            for one in case.promising(candidates, self.has_ended):
                if self.has_ended():
                    break
                left, explained = case.explain(one, keep)
                fits += [replace(one, left=left)] * explained
                if explained and left <= enough:
                    break
        return fits

    def named(self, case: Case, candidates: Iterable[Hypothesis]) -> Hypothesis | None:
        """The known or fitted mistake that explains them."""
        if self.has_ended():
            return None
        fits = self._fits(case, candidates, case.exact, keep=True)
        with np.errstate(all="ignore"):
            if case.fit and (not fits or _alike(fits)[0].left > case.noise):
                found = ((one, case.explained(array, one)) for one, array in fitted(case.theirs, case.value))
                fits += [replace(one, left=left) for one, (left, is_fit) in found if is_fit]
        if not fits:
            return None
        cause = _alike(fits)[0]
        if cause.id == "any.factor" and cause.left > max(case.noise, EXACT):  # a number inside the operation may leave less
            inside = self.hidden(case, numbered=True)
            cause = inside if inside is not None and _ALIKE * inside.left < cause.left else cause
        elif cause.id == "any.factor" and (law := case.sums()) is not None:
            cause = law
        elif cause.id == "any.factor":  # a step, or a number of the model, says more
            inside = _best(self._fits(case, _with_factor(case, cause.number or 1.0), max(case.noise, EXACT)))
            if inside is not None and inside.left <= _ALIKE * cause.left + EXACT:
                cause = inside if inside.number is None else replace(cause, text=f"{cause.text}, as where {inside.text}")
        return _with_alike(cause, fits) if len(case.span) > 1 and not case.exact else cause

    def unnamed(self, case: Case) -> Hypothesis | None:
        """Any other cause."""
        with np.errstate(all="ignore"):
            if self.has_ended():
                return case.facts()
            cause = case.facts() or self.hidden(case) or self._in_part(case)
            if cause is None:
                self.begin()  # readings have half of the time that is left
                cause = case.readings()
            return (self._before(case) or self.nearly(case) or cause) if cause is None or cause.id in LOOSE else cause

    def _before(self, case: Case) -> Hypothesis | None:
        """The hidden mistake in what this operation alone reads: what the dump has of that is right."""
        cause = self.hidden(earlier) if (earlier := case.with_operations_before()) else None
        return cause and cause.at("it reads other numbers than the dump has: ")

    def hidden(self, case: Case, numbered: bool = False) -> Hypothesis | None:
        """The hidden mistake that leaves least; what explained a tensor before is tried first. numbered: only those with a number."""
        candidates, kept = [one for one in _hidden(case, self.has_ended) if one.grid or not numbered], self.work / 2
        for one in candidates:
            if one.text in self._known or one.text.endswith(tuple(self._types)):
                before = one.with_number(self._known.get(one.text))
                if (found := case.explain(before, keep=True)).fits:
                    return replace(before, left=found.left)
        fits: dict[str, Hypothesis] = {}  # by the text without a number

        def about(one: Hypothesis) -> float:
            self.work -= case.cost(one.computes)
            return np.inf if self.has_ended() else case.near(one)

        for general in case.promising(candidates, self.has_ended):
            if self.has_ended():
                break
            if self.work < kept:
                self.left_out += 1
                continue
            number = _nearest(general, about, case.now) if general.grid else None
            if general.grid and number is None:
                continue
            one = general.with_number(number)
            self.work -= case.cost(one.computes)
            left, explained = case.explain(one, keep=True)
            if explained:
                fits[general.text] = replace(one, left=left)
                if left <= max(EXACT, case.exact) or (not one.fault and left <= _LITTLE * case.now):
                    break
        if not fits:
            return None
        best = _alike([*fits.values()], EXACT)[0]
        self._known |= {text: one.number for text, one in fits.items() if one is best}
        if not best.fault:
            self._types.add(best.text.rsplit(": ", 1)[-1])
        return _with_alike(best, [*fits.values()])

    def _in_part(self, case: Case) -> Hypothesis | None:
        """The mistake that explains all wrong numbers of a tensor whose others are right."""
        hidden = ((part, self.hidden(case.within(part), numbered=True)) for part in case.parts)
        inside = (cause.at(part.where) for part, cause in hidden if cause is not None and not _is_of_rows(cause))
        known = (part.cause for part in case.parts if part.cause is not None and case.within(part).is_told(None, 4 * part.most))
        return next(known, None) or next(inside, None)

    def nearly(self, case: Case) -> Hypothesis | None:
        """The mistake that leaves little of the error, with the rounding to fewer bits that explains the rest; or two such types."""
        if self.has_ended():
            return None
        closest = case.nearest
        more = narrowed(case.span, closest) if closest is not None and closest.left <= _MUCH * case.now else ()
        if (cause := _best(self._fits(case, list(more)))) is not None:
            return cause
        whole = [(replace(one, left=case.explained(array, one).left), array) for one, array in fitted(case.theirs, case.value)]
        if closest is not None and case.is_told(closest.number, closest.left) and (array := case.made(closest)) is not None:
            whole.append((closest, array))
        near, array = min(whole, key=lambda pair: pair[0].left)
        far = min(case.now, 1.0)  # that of numbers which have nothing to do with the right ones
        if near.left <= LITTLE * far or (near.left <= _LITTLE * far and case.leaves_noise(array)):
            return replace(near, text=f"{near.text}; what is left of the error, NMSE {near.left:.2g}, is no more than fewer bits leave")
        cause = _best(self._fits(case, list(cached_and_rounded(case.span))))
        self._types.update(cause.text.split(AND) if cause is not None else ())
        return cause

    def notes(self) -> list[str]:
        """What was not tried, in words."""
        more = f"--budget {max(10 * self.budget, 20):g} tries more of them, and a dump of more tensors needs fewer"
        left_out = f"{self.left_out} known mistakes were not tried across operations: too much work. {more}"
        return [*[left_out] * bool(self.left_out), *[self.ended] * bool(self.ended)]


def fitted(theirs: NDArray, value: NDArray) -> Iterator[tuple[Hypothesis, Array]]:
    """Yields each mistake that any operation can make, with its result [T, width], its number fitted to theirs where it has one."""
    theirs, value = theirs.astype(np.float64), value.astype(np.float64)
    square = max(float((value * value).sum()), 1e-300)
    yield Hypothesis("the sign is flipped", "any.sign"), -value
    ratio = float((theirs * value).sum()) / square
    yield Hypothesis(f"everything is {digits(ratio)} times what it should be", "any.factor", number=ratio), ratio * value
    if len(value) > 2:
        for shift, which in ((1, "previous"), (-1, "next")):
            rows = np.roll(value, shift, axis=0)
            end = 0 if shift == 1 else -1
            rows[end] = theirs[end]
            yield Hypothesis(f"every row is that of the {which} token", "any.moved"), rows


def _hidden(case: Case, stop: Callable[[], bool]) -> list[Hypothesis]:
    """The hidden mistakes of its operations that were not tried by another name, the likelier first."""
    order = {mistake.id: i for i, mistake in enumerate(HIDDEN)}
    later = {site.key: len(case.span) - i for i, site in enumerate(case.span)}

    def likely(one: Hypothesis) -> tuple[int, bool, int]:
        """Likely kinds first, and a function that all operations share before single ones; the last steps before earlier ones."""
        steps = max(later[key] for key in one.computes) if one.grid else 0
        return order[one.id] + (0 if one.everywhere else _SINGLE), not one.everywhere, steps

    possible = hypotheses(case.span, case.single, HIDDEN, stop)
    new = (one for one in possible if one.text not in case.tried and not case.refused.issuperset(one.computes))
    return sorted(new, key=likely)


def _with_factor(case: Case, factor: float) -> Iterator[Hypothesis]:
    """Yields other steps of the last operation, and numbers of the model times what may make a result this factor of what is right."""
    for one in hypotheses(case.span[-1:], case.single, [ROWS["edit.steps"], ROWS["edit.other_function"], ROWS["edit.numbers"]]):
        right = (one.grid[0] * one.grid[-1]) ** 0.5 if one.grid else 1.0  # the middle of its grid
        yield from (one.with_number(right * factor**power) for power in (1, -1)) if one.grid else (one,)


def _alike(fits: Sequence[Hypothesis], least: float = 0.0) -> list[Hypothesis]:
    """Those that leave as little as the nearest, or no more than `least`."""
    most = _ALIKE * min(one.left for one in fits) + least
    return [one for one in fits if one.left <= most]


def _best(fits: Sequence[Hypothesis]) -> Hypothesis | None:
    """The one that leaves least."""
    return min(fits, key=lambda one: one.left, default=None)


def _with_alike(cause: Hypothesis, fits: Sequence[Hypothesis]) -> Hypothesis:
    """The cause with others in its text that leave as little."""
    texts = dict.fromkeys(one.text for one in _alike(fits, EXACT) if one.fault and one.text != cause.text)
    return replace(cause, text=f"{cause.text} ({listed(list(texts), 2)} would look the same)") if texts else cause


def _nearest(general: Hypothesis, near: Callable[[Hypothesis], float], now: float) -> float | None:
    """The number of a mistake that leaves least of the error `now`, if it leaves little."""
    number = nearest_number(lambda x: near(general.with_number(x)), general.grid, _STEPS, _WORTH * now)
    if number is None:
        return None
    least = near(general.with_number(number))
    plain = (float(f"{number:.{digits}g}") for digits in range(1, _DIGITS))
    return next((x for x in plain if near(general.with_number(x)) <= least), number)
