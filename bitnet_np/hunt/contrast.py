"""The condition of a failure: what all failing runs have and no passing run has, tested by further runs until it stands.

Of the statements that fit all runs the cheapest are kept. The next runs are those on which they disagree most; where they agree, others are
drawn, some that meet the condition and some that just miss it. Each statement is tested by itself: runs that miss this one alone must be
right, or it is dropped, and have several other numbers, or it is too narrow. So is what is not said: of a case that failed, any other
number may be changed.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from ..testing.space import CONTEXT, FIELDS, Case, fitted
from .facts import Atom, Facts, atoms_of, facts_of, table

Condition = tuple[Atom, ...]
"""Statements that hold together."""

ENOUGH = 10
"""Runs drawn at random that meet a condition, and as many that do not, with which it stands."""

_EACH = 2  # runs that miss one statement alone, and pass, with which it stands: with as many numbers in place of the one that fails
_SLACK = 0.75  # more cost than the cheapest condition, up to which others are kept
_MOST = 40  # conditions at a time
_DECIDED = 0.03  # weight of the conditions that a run could refute, below which they agree on it


def conditions(failing: Sequence[Facts], passing: Sequence[Facts]) -> list[tuple[float, Condition]]:
    """The cheapest conditions that all failing cases meet and no passing one, with their costs, cheapest first."""
    atoms = sorted(atoms_of(failing, passing), key=lambda atom: atom.cost)
    if not passing:
        return [(0.0, ())]
    out = ~table(passing, atoms)  # the passing cases that each statement shuts out
    useful = [i for i in range(len(atoms)) if out[i].any()]
    found: list[tuple[float, tuple[int, ...]]] = [(atoms[i].cost, (i,)) for i in useful if out[i].all()]
    whole = {i for _, (i,) in found}
    rest = [i for i in useful if i not in whole]
    best = min((cost for cost, _ in found), default=np.inf)
    if best > 1.8:
        for i in rest:
            left = ~out[i]
            some = np.array([j for j in rest if j > i and (atoms[i].fact, atoms[i].sign) != (atoms[j].fact, atoms[j].sign)], int)
            if some.size:
                found += [(atoms[i].cost + atoms[j].cost, (i, j)) for j in some[out[some][:, left].all(axis=1)]]
        best = min((cost for cost, _ in found), default=np.inf)
    if best > 2.9:
        strong = sorted(rest, key=lambda i: (-out[i].sum(), atoms[i].cost))[:60]
        for i, j in combinations(strong, 2):
            left = ~(out[i] | out[j])
            if left.sum() < len(passing):
                some = np.array([k for k in strong if k not in (i, j)], int)
                found += [(sum(atoms[x].cost for x in (i, j, k)), (i, j, int(k))) for k in some[out[some][:, left].all(axis=1)]]
    found.sort(key=lambda item: item[0])
    kept = [(cost, tuple(atoms[i] for i in sorted(which))) for cost, which in found if cost <= found[0][0] + _SLACK]
    return list({condition: (cost, condition) for cost, condition in kept}.values())[:_MOST]


def meets(condition: Condition, case: Case) -> bool:
    """Whether a sequence of a case meets a condition."""
    return any(all(atom.holds(facts) for atom in condition) for facts in every_row(case))


def every_row(case: Case) -> list[Facts]:
    return [facts_of(case, row) for row in range(case.batch)]


def distance(a: Case, b: Case) -> int:
    """Number of fields in which two cases differ."""
    return sum(getattr(a, name) != getattr(b, name) for name in FIELDS if name != "seed")


@dataclass
class Contrast:
    """Cases that fail in one way, all that pass, and what tells them apart.

    Where it is known which sequences of a batch are wrong, the others are right.
    """

    smallest: Case
    failing: list[Case]
    passing: list[Case]
    wrong_rows: Callable[[Case], set[int]]  # of a case that failed; empty where it is not known
    edges: Mapping[str, Sequence[Any]]
    draw: Callable[[], Case]
    rng: random.Random
    agreed: int = 0  # random runs that met the condition and failed, since it last changed
    missed: int = 0  # those that did not meet it and passed
    kept: list[tuple[float, Condition]] = field(default_factory=list)
    good: list[Facts] = field(default_factory=list)  # of sequences that are right
    untestable: set[Atom] = field(default_factory=set)  # statements that no case misses alone

    def __post_init__(self) -> None:
        self.learn()

    @property
    def condition(self) -> Condition | None:
        """The cheapest that fits; None where none of three statements does."""
        return self.kept[0][1] if self.kept else None

    @property
    def stands(self) -> bool:
        if self.condition is None or self.agreed < ENOUGH or self.untested():
            return False
        return self.missed >= ENOUGH or not self.condition

    def untested(self) -> list[Atom]:
        """The statements of the condition that too few right runs miss alone."""
        some = [atom for atom in self.condition or () if atom not in self.untestable]
        return [atom for atom in some if len({*self.right_without(atom)}) < _EACH]

    def right_without(self, atom: Atom) -> list[Any]:
        """What right sequences that miss this statement alone have in place of it."""
        return [facts[atom.fact] for facts in self.good if self.misses_alone(atom, facts)]

    def misses_alone(self, atom: Atom, facts: Facts) -> bool:
        """Whether a sequence meets all of the condition but this statement."""
        return all(other.holds(facts) == (other != atom) for other in self.condition or ())

    def learn(self) -> None:
        before = self.condition
        good = self.good = [facts for case in self.passing for facts in every_row(case)]
        bad: list[tuple[Case, Facts]] = []
        for case in self.failing:
            rows = self.wrong_rows(case)
            bad += [(case, facts) for row, facts in enumerate(every_row(case)) if row in (rows or {0})]
            good += [facts for row, facts in enumerate(every_row(case)) if rows and row not in rows]
        self.kept = conditions([facts for _, facts in bad], good)
        if not self.kept:  # several failures: those near the smallest case
            near = [facts for case, facts in bad if distance(case, self.smallest) <= 2]
            self.kept = conditions(near or [facts_of(self.smallest)], good)
        if self.condition != before:
            self.agreed = self.missed = 0

    def add(self, case: Case, failed: bool) -> None:
        """Take a run into account."""
        before = self.condition
        (self.failing if failed else self.passing).append(case)
        self.learn()
        if self.condition == before and before is not None and meets(before, case) == failed:
            self.agreed += failed
            self.missed += not failed

    def propose(self, count: int) -> list[Case]:
        """The next cases to run; none where nothing is left to try."""
        known = {*self.failing, *self.passing}
        near = [case for case in dict.fromkeys(self.neighbours()) if case not in known]
        chosen = self.doubtful(near, count)
        if not chosen and self.condition is not None:
            chosen = self.alone(near)[:count]
        if not chosen and self.condition is not None:
            want = self.agreed <= self.missed or not self.condition
            for _ in range(count):
                case = self.meeting(known) if want else self.missing(near, known)
                case = case or (self.missing(near, known) if want else self.meeting(known))
                want = not want if self.condition else want
                chosen += [case] if case is not None and case not in chosen else []
        return chosen or near[:count]

    def doubtful(self, near: Sequence[Case], count: int) -> list[Case]:
        """Cases on which the conditions disagree most."""
        if len(self.kept) < 2 or not near:
            return []
        rows = [every_row(case) for case in near]
        facts, ends = [facts for some in rows for facts in some], np.cumsum([0, *map(len, rows)])[:-1]
        weight = np.exp(-4 * np.array([cost - self.kept[0][0] for cost, _ in self.kept]))
        weight /= weight.sum()
        holds = np.array([np.logical_or.reduceat(table(facts, condition).all(axis=0), ends) for _, condition in self.kept])
        chosen: list[Case] = []
        for _ in range(count):
            yes = weight @ holds
            doubt = np.minimum(yes, weight.sum() - yes)
            best = int(doubt.argmax())
            if doubt[best] < _DECIDED or near[best] in chosen:
                break
            chosen.append(near[best])
            same = holds[:, best] == (yes[best] >= weight.sum() / 2)
            weight = np.where(same, weight, weight / 10)  # the second run is to ask something else
        return chosen

    def alone(self, near: Sequence[Case]) -> list[Case]:
        """Cases that miss one statement alone, of each that is to be tested: with a number that no right run has, if there is one."""
        chosen: dict[Case, None] = {}
        known = {*self.failing, *self.passing}
        for atom in self.untested():
            right = self.right_without(atom)
            some = self._without(atom, near, right) or self._without(atom, (case for case in self._drawn() if case not in known), right)
            if not some and len(right) < _EACH:
                some = self._without(atom, near, [])
            if some:
                chosen[self.rng.choice(some)] = None
            else:
                self.untestable.add(atom)
        return list(chosen)

    def _without(self, atom: Atom, cases: Iterable[Case], old: Sequence[Any]) -> list[Case]:
        """Those cases that miss this statement alone, with none of the old values in place of it."""
        rows = ((case, every_row(case)) for case in cases)
        return [case for case, every in rows if all(self.misses_alone(atom, facts) and facts[atom.fact] not in old for facts in every)]

    def neighbours(self) -> Iterator[Case]:
        """Cases that differ from the smallest one, or from another that failed, in one number; and mixtures of one that failed and one that
        passed."""
        others = self.rng.sample(self.failing, min(2, len(self.failing)))
        for origin in dict.fromkeys([self.smallest, *others]):
            for name, values in self.edges.items():
                now = getattr(origin, name)
                more = (
                    [now + 1, now - 1, 2 * now, now + 8, now + 2] if isinstance(now, int) and type(now) is int and len(values) > 3 else []
                )
                for value in (*values, *(x for x in more if x > 0)):
                    if value != now and name != "seed":
                        yield fitted(replace(origin, **{name: value}))
                        if name in ("chunk", "prefix", "window") and origin.length <= value < CONTEXT // 2:
                            yield fitted(replace(origin, **{name: value}, length=2 * value + 3))
        for _ in range(40):
            yield self.mixture(self.rng.choice(self.failing), self.rng.choice(self.passing)) if self.passing else self.draw()

    def mixture(self, a: Case, b: Case) -> Case:
        names = [name for name in self.edges if getattr(a, name) != getattr(b, name) and self.rng.random() < 0.5]
        return fitted(replace(a, **{name: getattr(b, name) for name in names}))

    def meeting(self, known: set[Case]) -> Case | None:
        """A case that meets the condition: one that failed, with another value of a field that the condition does not speak of, or, each
        second time, a random one with some values of one that failed."""
        drawn = self._drawn() if self.agreed % 2 else self._varied()
        return next((c for c in (*drawn, *self._drawn()) if c not in known and meets(self.condition or (), c)), None)

    def _varied(self) -> Iterator[Case]:
        said = {atom.fact for atom in self.condition or ()}
        names = [name for name, values in self.edges.items() if len(values) > 1 and name not in said]
        for name in self.rng.sample(names, len(names)):
            origin = self.rng.choice(self.failing)
            yield fitted(replace(origin, **{name: self.rng.choice(self.edges[name])}))

    def missing(self, near: Sequence[Case], known: set[Case]) -> Case | None:
        """A case that just misses the condition: one number away from one that fails."""
        some = [case for case in near if not meets(self.condition or (), case)]
        some = some or [c for c in self._drawn() if c not in known and not meets(self.condition or (), c)][:1]
        return self.rng.choice(some) if some else None

    def _drawn(self) -> Iterator[Case]:
        for n in range(120):
            case = self.draw()
            yield case
            for _ in range(2 + n // 20):
                yield self.mixture(case, self.rng.choice(self.failing))
