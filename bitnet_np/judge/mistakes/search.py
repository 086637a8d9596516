"""The search for the mistake that explains what comes out of several operations, where no tensor in between is known."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ...base.errors import listed
from ...traces.points import Key
from ..graph import Operation
from .catalogue import Trial, trials
from .mistake import Cause, Compute
from .names import HIDDEN

OVERHEAD = 2 * 10**5
"""Multiply-adds that take as long as what an operation does beside them."""

_ALIKE = 4  # times what the nearest leaves: of two that leave as little, nothing tells which it is
_EXACT = 1e-11  # NMSE that float32 leaves of any
_WORTH = 0.5  # of the error, left after the first steps between two numbers of a grid
_SINGLE = 8  # kinds of edits that are tried in all operations that share a function, before one is in single operations
_DIGITS = 6  # of a number that somebody may have written: it is preferred to one that fits no better
_STEPS = 24  # of a golden section: 1e-5 of an interval of the grid
_FIRST_STEPS = 4
_GOLDEN = (5**0.5 - 1) / 2


class Explanation(NamedTuple):
    """What a mistake leaves of an error."""

    left: float  # NMSE
    fits: bool  # whether that is no more than roundings leave


Explain = Callable[[Trial], Explanation]
Computes = Mapping[Key, Compute]
"""Operations that are computed otherwise."""

_NEARLY = 1e-3  # of the error: what another mistake leaves by chance is far more
_LESS = 0.999  # of what another mistake leaves
_LITTLE = 0.02  # the same of a type of fewer bits, whose roundings fall to other sides here and there; the next types leave far more
_MUCH = 0.1  # of a mistake, where roundings to fewer bits explain the rest


@dataclass
class Nearest:
    """The mistake without a number that leaves least of an error, be it more than roundings leave: an engine may have fewer bits, too."""

    left: float = np.inf  # NMSE
    cause: Cause | None = None
    computes: Computes = field(default_factory=dict, repr=False)

    def offer(self, left: float, cause: Cause, computes: Computes) -> None:
        """Keep a mistake if it leaves less than the others did. Of two that do the same the first one stands."""
        if cause.fault and left < _LESS * self.left:
            self.left, self.cause, self.computes = left, cause, computes

    def of(self, now: float, most: float, left: Callable[[Computes], float], narrower: Iterable[tuple[str, Computes]]) -> Cause | None:
        """The mistake with what explains the rest, if it leaves little of an error of this NMSE.

        most: NMSE that is explained. left: what operations leave that are computed otherwise. narrower: this mistake with fewer bits, too.
        """
        if self.cause is None or self.left > _MUCH * now:
            return None
        rests = [(left(computes), words) for words, computes in narrower]
        least, words = min(rests, default=(np.inf, ""))
        if least <= most:
            return replace(self.cause, text=f"{self.cause.text}; and {words}")
        if self.left > _NEARLY * now:
            return None
        rest = f"what is left of the error, NMSE {self.left:.2g}, is no more than fewer bits leave"
        return replace(self.cause, text=f"{self.cause.text}; {rest}")


def in_types(
    types: Iterable[tuple[tuple[str, str], Computes]], left: Callable[[Computes], float], most: float
) -> tuple[Cause | None, tuple[str, ...]]:
    """The two types of fewer bits that leave least of an error, if that is no more than `most`, an NMSE; and each of them in words."""
    least, words = min(((left(computes), words) for words, computes in types), default=(np.inf, ("", "")))
    return (None, ()) if least > most else (Cause(", and ".join(words), "edit.rounded", fault=False), words)


@dataclass
class Search:
    """The search for hidden mistakes in one dump."""

    length: int  # of the sequence
    work: float  # that may still be done, in multiply-adds; half of it on one tensor, so that later ones are searched too
    left_out: int = 0  # mistakes that were not tried, because of it
    _known: dict[str, float | None] = field(default_factory=dict)  # texts of those that explained a tensor before, and their numbers
    types: set[str] = field(default_factory=set)  # of fewer bits, in words, that explained a tensor before: other operations have them, too

    def cause(
        self,
        span: Sequence[Operation],
        single: bool,
        explain: Explain,
        near: Callable[[Trial], float],
        cost: Callable[[Collection[Key]], float],
        now: float,
        numbered: bool = False,
    ) -> Cause | None:
        """The hidden mistake that leaves least, of those that fit; None if none does. What explained a tensor before is tried first.

        span, single: see catalogue.trials. near: what a trial leaves, about, by which numbers are sought. cost: multiply-adds of a trial
        that changes these tensors. now: NMSE without a mistake. numbered: only those with a number that is sought.
        """
        every, kept = [t for t in self._trials(span, single) if t.grid or not numbered], self.work / 2
        for trial in every:
            if trial.cause.text in self._known or trial.cause.text.endswith(tuple(self.types)):
                number = self._known.get(trial.cause.text)
                before = trial if number is None else trial.with_number(number)
                if explain(before).fits:
                    return before.cause
        fits: list[tuple[float, Trial, Trial]] = []  # what is left, the trial, and that with its number

        def about(trial: Trial) -> float:
            self.work -= cost(trial.computes)
            return near(trial)

        for trial in every:
            if self.work < kept:
                self.left_out += 1
                continue
            number = _nearest(trial, about, now) if trial.grid else None
            if trial.grid and number is None:
                continue
            one = trial if number is None else trial.with_number(number)
            self.work -= cost(one.computes)
            left, explained = explain(one)
            if explained:
                fits.append((left, trial, one))
                if left <= _EXACT or (not one.cause.fault and left <= _LITTLE * now):
                    break
        if not fits:
            return None
        least = min(left for left, *_ in fits)
        trial, found = next((trial, one) for left, trial, one in fits if left <= _ALIKE * least + _EXACT)
        self._known[trial.cause.text] = found.number
        if not found.cause.fault:
            self.types.add(found.cause.text.rsplit(": ", 1)[-1])
        return with_alike(found.cause, least, [(left, one.cause) for left, _, one in fits])

    def _trials(self, span: Sequence[Operation], single: bool) -> list[Trial]:
        """Those of some operations, the likelier first."""
        order = {mistake.id: i for i, mistake in enumerate(HIDDEN)}
        later = {operation.key: len(span) - i for i, operation in enumerate(span)}

        def likely(trial: Trial) -> tuple[int, bool, int]:
            """Likely kinds first, and a function that all operations share before single ones; the last steps before earlier ones."""
            steps = max(later[key] for key in trial.computes) if trial.grid else 0
            return order[trial.cause.id] + (0 if trial.everywhere else _SINGLE), not trial.everywhere, steps

        return sorted(trials(span, single, HIDDEN, self.length), key=likely)

    def notes(self) -> list[str]:
        """What was not tried, in words."""
        more = "--effort 10 tries more of them, and a dump of more tensors needs fewer"
        said = f"{self.left_out} known mistakes were not tried across operations: too much work. {more}"
        return [said] if self.left_out else []


def _nearest(trial: Trial, near: Callable[[Trial], float], now: float) -> float | None:
    """The number of a mistake that leaves least of the error `now`, if it leaves little."""
    number = nearest_number(lambda x: near(trial.with_number(x)), trial.grid, _STEPS, _WORTH * now)
    if number is None:
        return None
    least = near(trial.with_number(number))
    plain = (float(f"{number:.{digits}g}") for digits in range(1, _DIGITS))
    return next((x for x in plain if near(trial.with_number(x)) <= least), number)


def with_alike(cause: Cause, left: float, fits: Sequence[tuple[float, Cause]]) -> Cause:
    """The cause with others in its text that leave as little as it leaves, among NMSEs and causes that fit."""
    others = dict.fromkeys(other.text for error, other in fits if error <= _ALIKE * left + _EXACT and other.fault and other != cause)
    return replace(cause, text=f"{cause.text} ({listed(list(others), 2)} would look the same)") if others else cause


def nearest_number(error: Callable[[float], float], grid: Sequence[float], steps: int, worth: float = np.inf) -> float | None:
    """The number with the least error beside the best one of a grid, by a golden section. None if the first steps of it leave `worth`."""
    with np.errstate(all="ignore"):
        errors = [error(x) for x in grid]
        best = int(np.argmin(errors))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        of_a, of_b = error(a), error(b)
        for step in range(steps):
            if step == _FIRST_STEPS and not min(of_a, of_b, errors[best]) < worth:
                return None
            if of_a < of_b:
                high, b, of_b = b, a, of_a
                a = high - _GOLDEN * (high - low)
                of_a = error(a)
            else:
                low, a, of_a = a, b, of_b
                b = low + _GOLDEN * (high - low)
                of_b = error(b)
        middle = (low + high) / 2
        return float(grid[best]) if errors[best] <= error(middle) else middle
