"""The condition of a failure: what all failing runs have and no passing run has, tested by further runs until it stands.

Of the statements that fit all runs the cheapest are kept. Each next run is an experiment: that one on which what may be so disagrees most.
What may be so are the conditions that are kept; the cheapest of them without one of its statements, or with a wider bound; and with one
more, about what all failing runs have alike. So each statement is there because right runs miss it alone, and a condition stands where
nothing disagrees any more.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..testing.space import CONTEXT, Case, fitted, tokens_of, with_fields
from .draws import Deck
from .facts import Atom, Calls, Part, atoms_of, numbers_of, parts_of
from .shrink import differing

Condition = tuple[Atom, ...]
"""Statements that hold together."""

_EACH = 2  # runs that miss one statement alone, and pass, with which it stands: with as many numbers in place of the one that fails
_SEEN = 3  # values that failing runs have, with which what a condition does not say of those between is believed
_WIDER, _NARROWER = 0.5, 0.05  # weight of a condition without a statement, and of one with one more
_SLACK = 0.75  # more cost than the cheapest condition, up to which others are kept
_MOST = 40  # conditions at a time
_STEPS = 4000  # of the search for conditions of one size
_CHEAP = (0.0, 1.8, 2.9)  # cost up to which a condition of fewer statements is not compared with those of one, two, three
_SPARED = 10  # right sequences for each kind of right calls that may meet a condition, where none is without
_EXCEPT = 1.0  # cost of a condition that calls meet which are seen to be right
_SEEN_COST, _UNSEEN_COST = 0.15, 0.03  # of each right run that meets it, and of each right call of a prefix
_DECIDED = 0.03  # weight of the hypotheses that a run could refute, below which they agree on it


def conditions(failing: Calls, passing: Calls, spare: int = 0) -> list[tuple[float, Condition]]:
    """The cheapest conditions that a call of each failing sequence meets and no call that is right, with their costs, cheapest first.

    spare: kinds of right calls that may meet them nevertheless. The sets of a few statements that together shut out all calls that are
    right are searched for: one for the call that fewest shut out, and so on.
    """
    if not passing.parts:
        return [(0.0, ())]
    atoms = sorted(atoms_of(failing, passing), key=lambda atom: atom.cost)
    each, holds, right = np.array([atom.cost for atom in atoms]), failing.holds(atoms), passing.holds(atoms)
    kinds = {call.tobytes(): n for n, call in enumerate(np.packbits(right, axis=0).T)}  # calls that meet the same statements count once
    out, costs, steps = ~right[:, [*kinds.values()]], dict[tuple[int, ...], float](), 0

    def more(size: int, spare: int, chosen: tuple[int, ...], missed: NDArray[np.bool_], met: NDArray[np.bool_]) -> None:
        """Find those of a size. missed: calls that are right and not shut out yet. met: calls that fail and meet the chosen statements."""
        nonlocal steps
        left = np.flatnonzero(missed)
        if not left.size or steps > _STEPS:
            return
        steps, outs = steps + 1, out[:, left]
        if size == 1:
            last = np.flatnonzero(outs.sum(axis=1) >= left.size - spare)
            some = [tuple(sorted((*chosen, i))) for i in last[np.all(failing.any(met & holds[last]), axis=-1)].tolist()]
            costs.update((one, each[[*one]].sum()) for one in some)
            return
        hardest = outs.sum(axis=0).argmin()
        for i in np.flatnonzero(outs[:, hardest]).tolist():
            least = each[[*chosen, i]].sum() + (size - 1) * each[0]
            if least <= min(costs.values(), default=np.inf) + _SLACK and failing.any(both := met & holds[i]).all():
                more(size - 1, spare, (*chosen, i), missed & ~out[i], both)
        if spare:
            missed = missed.copy()
            missed[left[hardest]] = False
            more(size, spare - 1, chosen, missed, met)

    for size, cheap in enumerate(_CHEAP, 1):
        steps = 0
        more(size, spare, (), *(np.ones(x.shape[1], bool) for x in (out, holds)))
        if min(costs.values(), default=np.inf) <= cheap:
            break
    form = lambda atom: (atom.fact, atom.low == -np.inf, atom.high == np.inf, atom.step > 0, atom.no)  # noqa: E731
    kept = [(cost, tuple(atoms[i] for i in some)) for some, cost in costs.items()]
    kept = [(cost, one) for cost, one in kept if len({*map(form, one)}) == len(one)]  # not two of a form about one fact
    kept = sorted(kept, key=itemgetter(0))[:_MOST]
    return [pair for pair in kept if pair[0] <= kept[0][0] + _SLACK]


def meets(condition: Condition, case: Case, seen: bool = False) -> bool:
    """Whether a call of a sequence of a case meets a condition. seen: one whose logits are seen, as those of a reused prefix are not."""
    return bool(Pool([case], seen).meets(condition)[0])


class Pool(Calls):
    """Cases that may be run, or were, and the calls of their sequences. seen: those alone whose logits are seen."""

    def __init__(self, cases: Iterable[Case], seen: bool = True) -> None:
        self.cases = list(dict.fromkeys(cases))
        parts = [[parts_of(case, row)[-1 if seen else 0 :] for row in range(case.batch)] for case in self.cases]
        super().__init__([sum(rows, ()) for rows in parts])

    def meets(self, condition: Condition) -> NDArray[np.bool_]:  # [cases]
        return self.any(self.meet(condition))


@lru_cache(1 << 13)
def is_alike(case: Case) -> bool:
    """Whether a prompt of several tokens has one id alone."""
    return any(len(ids) > 1 and ids.min() == ids.max() for ids in tokens_of(case))


@dataclass
class Contrast:
    """Cases that fail in one way, all that pass, and what tells them apart.

    Where it is known which sequences of a batch are wrong, the others are right. A right run of equal ids says nothing: attention mixes
    these in vain. Right calls of a prefix, whose logits are not seen, say nothing where a simpler condition fits without them. A right run
    in which some ids come often is run again with others: if that is wrong, the ids hid it.
    """

    smallest: Case
    failing: list[Case]
    passing: list[Case]
    wrong_rows: Callable[[Case], dict[int, int]]  # of a case that failed, and the first position that is; empty where it is not known
    deck: Deck
    spare: int = 0  # kinds of right calls that may meet a condition where none is without
    kept: list[tuple[float, Condition]] = field(default_factory=list)
    split: bool = False  # whether no condition fits all that failed: it is that of those near the smallest case
    unseen: bool = False  # whether calls of a prefix are no evidence against the condition
    spared: int = 0  # right runs that meet the condition
    asked: set[Case] = field(default_factory=set)  # those that failed in another way are in neither list
    twins: dict[Case, Case] = field(default_factory=dict)  # a run with other ids -> the right one that it repeats
    hidden: set[Case] = field(default_factory=set)  # right runs in which the ids hid what is wrong
    settled: bool = False  # whether no run that can be drawn would tell the condition from others

    def __post_init__(self) -> None:
        self.learn()

    @property
    def condition(self) -> Condition | None:
        """The cheapest that fits; None where none of three statements does."""
        return self.kept[0][1] if self.kept else None

    @property
    def stands(self) -> bool:
        """Whether nothing is left to ask, and few right runs meet the condition."""
        return self.settled and _SPARED * self.spared <= len(self.failing)

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
        values = numbers_of(np.array(self.right_without(atom)))
        below, above = [x for x in values if x < atom.low], [x for x in values if x > atom.high]
        return max(below) if below else min(above, default=None)

    def told(self) -> Condition | None:
        """The condition, with the gaps that are left at its bounds."""
        return self.condition and tuple(replace(atom, gap=self.gap(atom)) for atom in self.condition)

    def hides(self, case: Case) -> bool:
        """Whether a mistake may not show in a run, since all ids are equal, as not in the smallest case that fails."""
        return is_alike(case) and not is_alike(self.smallest)

    def sequences(self, case: Case, failed: bool) -> tuple[list[tuple[Part, ...]], list[tuple[Part, ...]]]:
        """Those that are wrong, with their calls up to the first wrong position, and those that are right."""
        wrong = self.wrong_rows(case) if failed else {}
        bad = [parts_of(case, row, wrong.get(row, CONTEXT)) for row in (wrong or [0])] if failed else []
        known = bool(wrong) if failed else not self.hides(case)
        right = [parts_of(case, row) for row in range(case.batch) if known and row not in wrong]
        return bad, [(part,) for parts in right for part in parts]

    def learn(self) -> None:
        """Look for the conditions anew."""
        self.settled, self.unseen, self.spared = False, False, 0
        pairs = [self.sequences(case, failed) for failed, cases in ((True, self.failing), (False, self.passing)) for case in cases]
        self.bad, self.good = (Calls([parts for pair in pairs for parts in pair[i]]) for i in (0, 1))
        self.kept = conditions(self.bad, self.good)
        if not self.kept or self.kept[0][0] > _CHEAP[1]:
            parts = [part for (part,) in self.good.sequences]
            clear, unseen = (
                Calls([(part,) for part in parts if part.alone == alone and part.case not in self.hidden]) for alone in (False, True)
            )
            most = min(self.spare, len(clear.sequences) // _SPARED)
            kinds, some = next(((n, fit) for n in range(most + 1) if (fit := conditions(self.bad, clear, n))), (0, []))
            weighed = [
                (cost + _SEEN_COST * clear.any(clear.meet(one)).sum() + _UNSEEN_COST * unseen.meet(one).sum() + _EXCEPT * (kinds > 0), one)
                for cost, one in some
            ]
            self.unseen = min(weighed, key=itemgetter(0), default=(np.inf,))[0] < min(self.kept, key=itemgetter(0), default=(np.inf,))[0]
            self.kept = sorted([*self.kept, *weighed], key=itemgetter(0))
            self.spared = int(clear.any(clear.meet(self.kept[0][1])).sum()) if self.kept else 0
        self.split = not self.kept
        for most in (2, 1, 0) if self.split else ():  # several failures: those near the smallest case
            near = [parts for parts in self.bad.sequences if len(differing(parts[-1].case, self.smallest)) <= most]
            self.kept = self.kept or conditions(Calls(near or [parts_of(self.smallest)]), self.good)

    def add(self, case: Case, failed: bool) -> None:
        """Take a run into account. Where it contradicts nothing that is believed no condition is looked for: most runs do not."""
        bad, good = self.sequences(case, failed)
        (self.failing if failed else self.passing).append(case)
        if shown := failed and case in self.twins:
            self.hidden.add(self.twins[case])
        if not failed and case.tokens != "inner" and self.kept and meets(self.kept[0][1], case, self.unseen):
            self.twins[replace(case, tokens="inner")] = case
        self.bad, self.good = Calls([*self.bad.sequences, *bad]), Calls([*self.good.sequences, *good])
        new, right = Calls(bad), Calls(good)
        fit = [pair for pair in self.kept if not bad or new.any(new.meet(pair[1])).all()]
        fit = [pair for pair in fit if not good or not right.meet(pair[1]).any()]
        before, self.kept = self.kept, fit
        if not fit or fit[0] != before[0] or (failed and fit != before) or self.unseen or self.split or shown:
            self.learn()

    # --- the next runs ----------------------------------------------------------------------------------------------------------------

    def propose(self, count: int) -> list[Case]:
        """The next cases to run: those on which what may be so disagrees most. None where nothing is left to ask."""
        known = {*self.failing, *self.passing, *self.asked}
        if again := [case for case in self.twins if case not in known][:count]:
            self.asked.update(again)
            return again
        for cases in (self.neighbours, self.drawn, self.drawn, self.drawn):
            new = Pool((case for case in cases() if case not in known and not self.hides(case)), self.unseen)
            if new.cases and (chosen := new.cases[:count] if self.condition is None else self.decisive(new, count)):
                self.asked.update(chosen)
                return chosen
        self.settled = self.condition is not None
        return []

    def decisive(self, pool: Pool, count: int) -> list[Case]:
        """Cases on which the hypotheses disagree most."""
        weights, fails = zip(*self.hypotheses(pool), strict=True)
        weight, holds, chosen = np.array(weights), np.array(fails), list[Case]()
        for _ in range(count):
            yes = weight @ holds
            doubt = np.minimum(yes, weight.sum() - yes)
            best = int(doubt.argmax())
            if doubt[best] < _DECIDED or pool.cases[best] in chosen:
                break
            chosen.append(pool.cases[best])
            weight = np.where(holds[:, best] == (yes[best] >= weight.sum() / 2), weight, weight / 10)  # the second run asks something else
        return chosen

    def hypotheses(self, pool: Pool) -> Iterator[tuple[float, NDArray[np.bool_]]]:
        """What may be so, with its weight, and which cases fail if it is: each condition that fits; the cheapest one without one of its
        statements, or with a wider one; and the cheapest where something is as in all runs that failed."""
        for cost, condition in self.kept:
            yield np.exp(-4 * (cost - self.kept[0][0])), pool.meets(condition)
        condition = self.condition or ()
        met = pool.meets(condition)
        for atom in condition:
            values = pool.column(atom.fact)
            yield _WIDER, met | pool.any(self.others(atom, pool) & self.doubted(atom, values))
            numbers = {*self.bad.column(atom.fact)[self.bad.meet(condition)]}
            yield _NARROWER * (len(numbers) < _SEEN), pool.any(pool.meet(condition) & np.isin(values, [*numbers]))
        failed = Pool(self.failing)
        failing = [case for case, meets_it in zip(failed.cases, failed.meets(condition), strict=True) if meets_it]
        for name in self.deck.edges:
            seen = {getattr(case, name) for case in failing}
            few, step = len(seen) < _SEEN, name == "chunk" and 1 not in seen  # single tokens as calls always
            least, most = min(seen, default=0), max(seen, default=0)
            same = [x in seen if few else least <= x <= most and not (step and x == 1) for x in map(attrgetter(name), pool.cases)]
            yield _NARROWER * (name != "seed") * (1 if few else 0.25), met & same  # beyond what was seen where that is of several at once

    def doubted(self, atom: Atom, values: NDArray) -> NDArray[np.bool_]:  # [N] -> [N]
        """Which values may be wrong as well in place of this statement: until right calls have two of them; then a multiple of its one
        number, or what is between its bound and the nearest one that is right."""
        right, gap = self.right_without(atom), self.gap(atom)
        new = ~np.isin(values, right if len(right) >= _EACH else [])
        if len({*right}) < _EACH:
            return new
        if gap is not None:
            low, high = sorted((gap, atom.low if gap < atom.low else atom.high))
            return new & (low < values) & (values < high)
        return new & [atom.divides(x) and not any(map(atom.divides, right)) for x in values]

    def neighbours(self) -> Iterator[Case]:
        """Cases near the smallest one, or another that failed; and mixtures of one that failed and one that passed."""
        for origin in dict.fromkeys([self.smallest, *self.deck.rng.sample(self.failing, min(2, len(self.failing)))]):
            yield from self.changed(origin)
        for _ in range(40 * bool(self.passing)):
            yield self.mixture(self.deck.rng.choice(self.failing), self.deck.rng.choice(self.passing))

    def changed(self, origin: Case) -> Iterator[Case]:
        """Cases that differ from one in a number, and, where that is of a call, in a length that lets it show."""
        for name, values in self.deck.edges.items():
            now = getattr(origin, name)
            more = [now + 1, now - 1, 2 * now, 3 * now, now + 8, now + 2] if type(now) is int and len(values) > 3 else []
            for value in (*values, *(x for x in more if x > 0)):
                if value != now and name != "seed":
                    yield (case := fitted(with_fields(origin, {name: value})))
                    if name in ("chunk", "prefix", "window") and (value != getattr(case, name) or origin.length <= value < CONTEXT // 2):
                        yield fitted(with_fields(origin, {name: value, "length": 2 * value + 3 + origin.prefix}))
                    if name == "prefix":  # of calls as long
                        yield fitted(with_fields(origin, {"prefix": value, "length": origin.length - now + value}))

    def drawn(self) -> Iterator[Case]:
        """Random cases, and mixtures of each with cases that failed."""
        for n in range(60):
            case = self.deck.draw()
            yield case
            for _ in range(2 + n // 10):
                yield self.mixture(case, self.deck.rng.choice(self.failing))

    def mixture(self, a: Case, b: Case) -> Case:
        names = [name for name in self.deck.edges if getattr(a, name) != getattr(b, name) and self.deck.rng.random() < 0.5]
        return fitted(with_fields(a, {name: getattr(b, name) for name in names}))
