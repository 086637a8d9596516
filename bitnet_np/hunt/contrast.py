"""The condition of a failure: what all failing runs have and no passing run has, tested by further runs until it stands.

Of the statements that fit all runs the cheapest are kept. The next runs are those on which they disagree most; where they agree, others are
drawn, some that meet the condition and some that just miss it. Each statement is tested by itself: runs that miss this one alone must be
right, or it is dropped, and have several other numbers, or it is too narrow. So is what is not said: of a case that failed, any other
number may be changed.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..testing.space import CONTEXT, Case, fitted, tokens_of
from .facts import Atom, Calls, atoms_of, facts_of, numbers_of
from .shrink import differing

Condition = tuple[Atom, ...]
"""Statements that hold together."""

ENOUGH = 10
"""Runs drawn at random that meet a condition, and as many that do not, with which it stands."""

_EACH = 2  # runs that miss one statement alone, and pass, with which it stands: with as many numbers in place of the one that fails
_SLACK = 0.75  # more cost than the cheapest condition, up to which others are kept
_MOST = 40  # conditions at a time
_STEPS = 4000  # of the search for conditions of one size
_CHEAP = (0.0, 1.8, 2.9)  # cost up to which a condition of fewer statements is not compared with those of one, two, three
_SPARED = 10  # right sequences for each kind of right calls that may meet a condition, where none is without
_UNSEEN = 0.15  # cost of each right run that meets a condition by calls whose logits are not seen
_DECIDED = 0.03  # weight of the conditions that a run could refute, below which they agree on it


def conditions(failing: Calls, passing: Calls, spare: int = 0) -> list[tuple[float, Condition]]:
    """The cheapest conditions that a call of each failing sequence meets and no call that is right, with their costs, cheapest first.

    spare: kinds of right calls that may meet them nevertheless.
    """
    if not passing.facts:
        return [(0.0, ())]
    atoms = sorted(atoms_of(failing, passing), key=lambda atom: atom.cost)
    search = _Search(failing, failing.table(atoms), ~_distinct(passing.table(atoms)), np.array([atom.cost for atom in atoms]))
    for size, cheap in enumerate(_CHEAP, 1):
        search.steps = 0
        search.more(size, spare, (), *(np.ones(x.shape[1], bool) for x in (search.out, search.holds)))
        if search.best <= cheap:
            break
    costs = {tuple(atoms[i] for i in some): cost for some, cost in search.costs.items()}
    kept = [condition for condition in costs if len({(atom.fact, atom.sign) for atom in condition}) == len(condition)]
    cheapest = sorted(kept, key=lambda condition: costs[condition])[:_MOST]
    return [(costs[condition], condition) for condition in cheapest if costs[condition] <= costs[cheapest[0]] + _SLACK]


@dataclass
class _Search:
    """The sets of a few statements that together shut out all calls that are right: one for the call that fewest shut out, and so on."""

    failing: Calls
    holds: NDArray[np.bool_]  # [statements, calls that fail]
    out: NDArray[np.bool_]  # [statements, calls that are right]: whether it shuts one out
    each: NDArray[np.float64]  # the costs of the statements
    costs: dict[tuple[int, ...], float] = field(default_factory=dict)  # of the sets
    best: float = np.inf
    steps: int = 0

    def more(self, size: int, spare: int, chosen: tuple[int, ...], missed: NDArray[np.bool_], met: NDArray[np.bool_]) -> None:
        """Find those of a size. missed: calls that are right and not shut out yet. met: calls that fail and meet the chosen statements."""
        left = np.flatnonzero(missed)
        if not left.size or self.steps > _STEPS:
            return
        self.steps += 1
        outs = self.out[:, left]
        if size == 1:
            last = np.flatnonzero(outs.sum(axis=1) >= left.size - spare)
            for i in last[self._fit(met & self.holds[last])]:
                one = tuple(sorted((*chosen, int(i))))
                self.costs[one] = sum(self.each[[*one]])
                self.best = min(self.best, self.costs[one])
            return
        hardest = outs.sum(axis=0).argmin()
        for i in np.flatnonzero(outs[:, hardest]):
            both = met & self.holds[i]
            if self.each[[*chosen, int(i)]].sum() + (size - 1) * self.each[0] <= self.best + _SLACK and self._fit(both):
                self.more(size - 1, spare, (*chosen, int(i)), missed & ~self.out[i], both)
        if spare:
            missed = missed.copy()
            missed[left[hardest]] = False
            self.more(size, spare - 1, chosen, missed, met)

    def _fit(self, met: NDArray[np.bool_]) -> Any:  # [..., calls] -> [...]
        """Whether a call of each failing sequence is met."""
        return np.all(self.failing.any(met), axis=-1)


def _distinct(holds: NDArray[np.bool_]) -> NDArray[np.bool_]:  # [atoms, N] -> [atoms, fewer]
    """The calls without those that meet the same statements as another."""
    packed = np.unique(np.packbits(holds, axis=0), axis=1)
    return np.unpackbits(packed, axis=0, count=len(holds)).astype(bool)


def meets(condition: Condition, case: Case) -> bool:
    """Whether a call of a sequence of a case meets a condition."""
    return bool(Pool([case]).meets(condition)[0])


class Pool:
    """Cases that may be run, and the calls of their sequences."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self.cases = list(dict.fromkeys(cases))
        rows = [[facts_of(case, row) for row in range(case.batch)] for case in self.cases]
        self.calls = Calls([facts for some in rows for facts in some])
        self.begins = self.calls.begins[np.cumsum([0, *map(len, rows)])[:-1]] if rows else np.zeros(0, int)

    def any(self, holds: NDArray[np.bool_]) -> NDArray[np.bool_]:  # [N] -> [cases]
        return np.logical_or.reduceat(holds, self.begins) if self.cases else holds

    def meets(self, condition: Condition) -> NDArray[np.bool_]:  # [cases]
        return self.any(self.calls.meet(condition))


def is_alike(case: Case) -> bool:
    """Whether a prompt of several tokens has one id alone."""
    return any(len(ids) > 1 and ids.min() == ids.max() for ids in tokens_of(case))


@dataclass
class Contrast:
    """Cases that fail in one way, all that pass, and what tells them apart.

    Where it is known which sequences of a batch are wrong, the others are right. A right run of equal ids says nothing: attention mixes
    these in vain. Nor do calls of a prefix, whose logits are not seen, where no simple condition fits all runs.
    """

    smallest: Case
    failing: list[Case]
    passing: list[Case]
    wrong_rows: Callable[[Case], dict[int, int]]  # of a case that failed, and the first position that is; empty where it is not known
    edges: Mapping[str, Sequence[Any]]
    draw: Callable[[], Case]
    rng: random.Random
    spare: int = 0  # kinds of right calls that may meet a condition where none is without
    agreed: int = 0  # random runs that met the condition and failed, since it last changed
    missed: int = 0  # those that did not meet it and passed
    kept: list[tuple[float, Condition]] = field(default_factory=list)
    bad: Calls = field(default_factory=lambda: Calls([]))  # those of failing sequences, up to the first wrong position
    good: Calls = field(default_factory=lambda: Calls([]))  # those that are right
    split: bool = False  # whether no condition fits all that failed: it is that of those near the smallest case
    around: dict[Case, list[Case]] = field(default_factory=dict)  # cases that differ from one in a number
    untestable: set[Atom] = field(default_factory=set)  # statements that no case misses alone
    spared: int = 0  # right runs that meet the condition
    varied: bool = False  # whether failing runs that meet the condition differ in whatever else can be changed

    def __post_init__(self) -> None:
        self.learn()

    @property
    def condition(self) -> Condition | None:
        """The cheapest that fits; None where none of three statements does."""
        return self.kept[0][1] if self.kept else None

    @property
    def tested(self) -> bool:
        """Whether nothing is left to ask."""
        if self.condition is None or self.agreed < ENOUGH or not self.varied or self.untested():
            return False
        return self.missed >= ENOUGH or not self.condition

    @property
    def stands(self) -> bool:
        """Whether the condition was tested, and few right runs meet it."""
        return self.tested and _SPARED * self.spared <= len(self.failing)

    def untested(self) -> list[Atom]:
        """The statements of the condition that too few right calls miss alone: where it is one number, a multiple is to be among these."""

        def tested(atom: Atom) -> bool:
            right = {*self.right_without(atom)}
            return len(right) >= _EACH and (not atom.single or any(map(atom.divides, right)))

        return [atom for atom in self.condition or () if atom not in self.untestable and not tested(atom)]

    def right_without(self, atom: Atom) -> list[Any]:
        """What right calls that meet all other statements have in place of this one."""
        return self.good.column(atom.fact)[self.others(atom, self.good)].tolist()

    def others(self, atom: Atom, calls: Calls) -> NDArray[np.bool_]:
        """Which calls meet all of the condition but, maybe, this statement."""
        return calls.meet([other for other in self.condition or () if other != atom])

    def gap(self, atom: Atom) -> Any:
        """The nearest value beyond a bound that is known to be right; None where there is none, or no bound."""
        if (atom.low == -np.inf) == (atom.high == np.inf):
            return None
        values = numbers_of(self.good.column(atom.fact)[self.others(atom, self.good)])
        below, above = [x for x in values if x < atom.low], [x for x in values if x > atom.high]
        return max(below) if below else min(above, default=None)

    def told(self) -> Condition | None:
        """The condition, with the gaps that are left at its bounds."""
        return self.condition and tuple(replace(atom, gap=self.gap(atom)) for atom in self.condition)

    def hides(self, case: Case) -> bool:
        """Whether a mistake may not show in a run, since all ids are equal, as not in the smallest case that fails."""
        return is_alike(case) and not is_alike(self.smallest)

    def learn(self) -> None:
        before, self.spared = self.condition, 0
        wrong = {case: self.wrong_rows(case) for case in self.failing}
        bad = [(case, row, wrong[case].get(row, CONTEXT)) for case in self.failing for row in wrong[case] or [0]]
        good = [(case, row) for case in self.passing for row in range(case.batch) if not self.hides(case)]
        good += [(case, row) for case in self.failing if wrong[case] for row in range(case.batch) if row not in wrong[case]]
        self.good = Calls([facts_of(case, row) for case, row in good])
        self.bad = Calls([facts_of(case, row, until) for case, row, until in bad])
        self.kept = conditions(self.bad, self.good)
        if self.spare and (not self.kept or self.kept[0][0] > _CHEAP[1]):
            sure, passed = Calls([facts_of(case, row, since=case.prefix) for case, row in good]), Pool(self.passing)
            most = min(self.spare, len(good) // _SPARED)
            some = next(filter(None, (conditions(self.bad, sure, spare) for spare in range(most + 1))), [])
            others = [(cost + _UNSEEN * int(passed.meets(one).sum()), one) for cost, one in some]
            others.sort(key=lambda pair: pair[0])
            if others and (not self.kept or others[0][0] + 1 < self.kept[0][0]):
                self.kept, self.spared = others, int(passed.meets(others[0][1]).sum())
        self.split = not self.kept
        for most in (2, 1, 0) if self.split else ():  # several failures: those near the smallest case
            near = [facts_of(case, row, until) for case, row, until in bad if len(differing(case, self.smallest)) <= most]
            self.kept = self.kept or conditions(Calls(near or [facts_of(self.smallest)]), self.good)
        if self.condition != before:
            self.agreed, self.missed, self.varied = 0, 0, False

    def add(self, case: Case, failed: bool) -> None:
        """Take a run into account."""
        before = self.condition
        (self.failing if failed else self.passing).append(case)
        self.learn()
        if self.condition == before and before is not None and meets(before, case) == failed:
            self.agreed += failed
            self.missed += not failed

    # --- the next runs ----------------------------------------------------------------------------------------------------------------

    def propose(self, count: int) -> list[Case]:
        """The next cases to run: those on which the conditions disagree, or else those that test one statement, or else both sides of the
        condition. None where nothing is left to try."""
        known = {*self.failing, *self.passing}
        near = Pool(case for case in self.neighbours() if case not in known and not self.hides(case))
        if self.condition is None or (chosen := self.doubtful(near, count)):
            return near.cases[:count] if self.condition is None else chosen
        drawn = Pool(case for case in self.drawn() if case not in known and not self.hides(case))
        return (self.alone(near, drawn) or self.vary(near) or self.sides(near, drawn, count))[:count]

    def doubtful(self, pool: Pool, count: int) -> list[Case]:
        """Cases on which the conditions disagree most."""
        if len(self.kept) < 2 or not pool.cases:
            return []
        weight = np.exp(-4 * np.array([cost - self.kept[0][0] for cost, _ in self.kept]))
        weight /= weight.sum()
        holds = np.array([pool.meets(condition) for _, condition in self.kept])
        chosen: list[Case] = []
        for _ in range(count):
            yes = weight @ holds
            doubt = np.minimum(yes, weight.sum() - yes)
            best = int(doubt.argmax())
            if doubt[best] < _DECIDED or pool.cases[best] in chosen:
                break
            chosen.append(pool.cases[best])
            same = holds[:, best] == (yes[best] >= weight.sum() / 2)
            weight = np.where(same, weight, weight / 10)  # the second run is to ask something else
        return chosen

    def alone(self, *pools: Pool) -> list[Case]:
        """Cases that miss one statement alone, of each that is to be tested: with a number that no right run has, if there is one, and
        with a multiple of a single number. Then one in the gap at a bound."""
        chosen: dict[Case, None] = {}
        for atom in self.untested():
            right = self.right_without(atom)
            for old, pool in ((right, pools[0]), (right, pools[-1]), (right * (len(right) >= _EACH), pools[0])):
                values = pool.calls.column(atom.fact)
                new, multiple = ~np.isin(values, old), np.array([atom.divides(x) for x in values], bool)
                if some := self.missing(atom, pool, new & multiple) or self.missing(atom, pool, new) * (len({*right}) < _EACH):
                    chosen[self.rng.choice(some)] = None
                    break
            else:
                self.untestable.add(atom)
        return list(chosen) or self.between(*pools)

    def missing(self, atom: Atom, pool: Pool, among: NDArray[np.bool_]) -> list[Case]:  # [N]
        """Cases that miss this statement alone, with one of these calls."""
        asked = pool.any(self.others(atom, pool.calls) & among) & ~pool.meets(self.condition or ())
        return [pool.cases[i] for i in np.flatnonzero(asked)]

    def between(self, *pools: Pool) -> list[Case]:
        """A case in the gap at a bound."""
        for atom, pool in product(self.condition or (), pools):
            if (gap := self.gap(atom)) is not None:
                low, high = sorted((gap, atom.low if gap < atom.low else atom.high))
                values = pool.calls.column(atom.fact)
                if some := self.missing(atom, pool, (low < values) & (values < high)):
                    return [self.rng.choice(some)]
        return []

    def vary(self, near: Pool) -> list[Case]:
        """A case that meets the condition and has another value of a field that all failing runs have alike, or single tokens as calls."""
        failing, meeting = ([case for case in cases if meets(self.condition or (), case)] for cases in (self.failing, near.cases))
        for name in self.edges:
            seen = {getattr(case, name) for case in failing}
            new = [case for case in meeting if getattr(case, name) not in seen]
            if some := [case for case in new if case.chunk == 1] if name == "chunk" else new * (len(seen) == 1 and name != "seed"):
                return [self.rng.choice(some)]
        self.varied = True
        return []

    def sides(self, near: Pool, drawn: Pool, count: int) -> list[Case]:
        """Cases that meet the condition and cases that miss it, in turn: one number away from a case that failed, or drawn. Some of those
        that meet it do so with a number that no failing run had."""
        chosen: list[Case] = []
        inside = not self.condition or self.agreed <= self.missed
        for n in range(count):
            side = inside == (n % 2 == 0 or not self.condition)
            pools = (drawn, near) if side and self.agreed % 2 else (near, drawn)
            for wanted, pool in product((side, not side), pools):
                meeting = pool.meets(self.condition or ())
                new = meeting & self.unseen(pool) if wanted and self.agreed // 2 % 2 else meeting == wanted
                if some := [pool.cases[i] for i in np.flatnonzero(new if new.any() else meeting == wanted)]:
                    chosen.append(self.rng.choice(some))
                    break
        return list(dict.fromkeys(chosen))

    def unseen(self, pool: Pool) -> NDArray[np.bool_]:  # [cases]
        """Which cases meet the condition by a number that no failing run had."""
        new = np.zeros(len(pool.cases), bool)
        met = pool.calls.meet(self.condition or ())
        for atom in self.condition or ():
            new |= pool.any(met & ~np.isin(pool.calls.column(atom.fact), self.bad.column(atom.fact)))
        return new

    def neighbours(self) -> Iterator[Case]:
        """Cases near the smallest one, or another that failed; and mixtures of one that failed and one that passed."""
        for origin in dict.fromkeys([self.smallest, *self.rng.sample(self.failing, min(2, len(self.failing)))]):
            if origin not in self.around:
                self.around[origin] = [*self.changed(origin)]
            yield from self.around[origin]
        for _ in range(40 * bool(self.passing)):
            yield self.mixture(self.rng.choice(self.failing), self.rng.choice(self.passing))

    def changed(self, origin: Case) -> Iterator[Case]:
        """Cases that differ from one in a number, and, where that is of a call, in a length that lets it show."""
        for name, values in self.edges.items():
            now = getattr(origin, name)
            more = [now + 1, now - 1, 2 * now, 3 * now, now + 8, now + 2] if type(now) is int and len(values) > 3 else []
            for value in (*values, *(x for x in more if x > 0)):
                if value != now and name != "seed":
                    yield (case := fitted(replace(origin, **{name: value})))
                    if name in ("chunk", "prefix", "window") and (value != getattr(case, name) or origin.length <= value < CONTEXT // 2):
                        yield fitted(replace(origin, **{name: value}, length=2 * value + 3 + origin.prefix))
                    if name == "prefix":  # of calls as long
                        yield fitted(replace(origin, prefix=value, length=origin.length - now + value))

    def drawn(self) -> Iterator[Case]:
        """Random cases, and mixtures of each with cases that failed."""
        for n in range(60):
            case = self.draw()
            yield case
            for _ in range(2 + n // 10):
                yield self.mixture(case, self.rng.choice(self.failing))

    def mixture(self, a: Case, b: Case) -> Case:
        names = [name for name in self.edges if getattr(a, name) != getattr(b, name) and self.rng.random() < 0.5]
        return fitted(replace(a, **{name: getattr(b, name) for name in names}))
