"""What can be said of a case: its facts, statements about them that some cases meet and others do not, and both in words.

A condition speaks of one call of one sequence: all statements about a call are about the same one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from math import gcd, inf
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..model.families import FAMILIES
from ..testing.space import CONTEXT, Case, fitted, lengths_of, tokens_of, with_fields

_TILES = (8, 16, 32, 64)
_LAST = "the last of the vocabulary"
_IDS = (0, 1, 2, 3, _LAST)
"""Ids that may have a meaning: of padding, of the begin and the end of a text, of what is unknown."""


class Fact(NamedTuple):
    """What may be so of a sequence, or of a call."""

    cost: float  # how far-fetched a statement about it is
    words: str  # `{}`: a number or name; (a|b): a where it is so, b where it is not; `{call}`: "a call", and then "it"
    value: Callable[[Any], Any]  # of what `facts_of` knows: a number or name, or whether it is so


CALLS = {
    "calls": Fact(0.15, "the length of {call} is {}", lambda s: s.count),
    "starts": Fact(0.3, "the first position of {call} is {}", lambda s: s.start),
    "keys": Fact(0.3, "the number of keys of {call} is {}", lambda s: s.end),
    "beyond": Fact(0.2, "the number of keys of {call} minus the window is {}", lambda s: s.end - s.window),
    "windows": Fact(0.35, "the number of whole windows before the last token of {call} is {}", lambda s: (s.end - 1) // s.window),
    "overlong": Fact(0.1, "the length of {call} minus the window is {}", lambda s: s.count - s.window),
    "sees": Fact(0.35, "the number of keys that the last token of {call} sees is {}", lambda s: np.fmin(s.end, s.window)),
    "past": Fact(0.9, "the first position of {call} minus the window is {}", lambda s: s.start - s.window),
    "scores": Fact(0.35, "the number of heads times the length of {call} is {}", lambda s: s.count * s.heads),
    "pairs": Fact(0.2, "the length of {call} times the number of experts that a token takes is {}", lambda s: s.count * s.used),
    "cached": Fact(0.05, "{call} (sees keys of an earlier one|is the first one)", lambda s: s.start > 0),
    "fresh": Fact(0.2, "{call} is (|not )the first one behind a reused prefix", lambda s: (s.start == s.prefix) & (s.start > 0)),
    "last": Fact(0.2, "{call} is (|not )the last one", lambda s: (s.end == s.length) & ~s.alone),
    "idle": Fact(0.4, "equal shares of {call}, rounded up, leave (a|no) thread idle", lambda s: s.each * (s.threads - 1) >= s.count),
    "fewer": Fact(0.4, "equal shares of {call}, rounded up, leave (a|no) thread fewer tokens", lambda s: s.count % s.each > 0),
    "share calls": Fact(0.15, "a thread's share of the tokens of {call} is {}", lambda s: s.count / s.threads),
}
"""Facts of a call. One that compares two numbers of it costs nearly what two statements do, so that these are tried against it."""


CALLS |= {
    f"crosses {n}": Fact(0.3, f"{{call}} crosses (a|no) multiple of {n}", partial(lambda n, s: s.start // n < (s.end - 1) // n, n))
    for n in _TILES
}
CALLS |= {
    f"empty {n}": Fact(
        0.4,
        f"the keys of {{call}} in {n} equal parts, rounded up, leave (a|no) part empty",
        partial(lambda n, s: -(-s.end // n) * (n - 1) >= s.end, n),
    )
    for n in (4, 8)
}

ORDERS = {
    "call heads": Fact(0.3, "the length of {call} is {} the number of heads", lambda s: (s.count, s.heads)),
    "call first": Fact(0.6, "the length of {call} is {} that of the first one", lambda s: (s.count, s.opening)),
    "call before": Fact(0.3, "the length of {call} is {} that of the one before", lambda s: (s.count, s.before)),
    "call chunk": Fact(0.2, "the length of {call} is {} the chunk", lambda s: (s.count, s.taken)),
    "threads calls": Fact(0.2, "the number of threads is {} that of the tokens in {call}", lambda s: (s.threads, s.count)),
    "experts pairs": Fact(0.35, "the number of experts is {} that which tokens in {call} take", lambda s: (s.experts, s.used * s.count)),
    "threads heads": Fact(0.2, "the number of threads is {} that of heads", lambda s: (s.threads, s.heads)),
    "threads kv_heads": Fact(0.2, "the number of threads is {} that of key heads", lambda s: (s.threads, s.kv_heads)),
    "threads experts": Fact(0.2, "the number of threads is {} that of experts that a token takes", lambda s: (s.threads, s.used)),
    "group kv_heads": Fact(0.3, "the number of heads that share a key head is {} that of key heads", lambda s: (s.group, s.kv_heads)),
    "heads width": Fact(0.2, "all heads together have a width that is {} the model's", lambda s: (s.q_width, s.width)),
}
"""Two numbers of a sequence or a call: the sign of their difference is said."""
_ORDER_WORDS = {(1, inf): "above", (0, inf): "at least", (-inf, 0): "at most", (-inf, -1): "below"}
CALLS |= {name: fact for name, fact in ORDERS.items() if "{call}" in fact.words}

_NUMBERS = {
    "family": "the family", "weights": "the type of the matrices", "table": "the type of the embedding", "layers": "the number of layers",
    "width": "the width", "ffn": "the feed-forward width", "kv_heads": "the number of key heads", "head_dim": "the head width",
    "group": "the number of heads that share a key head", "vocab": "the vocabulary", "window": "the window",
    "rope_width": "the rotated part of a head", "experts": "the number of experts", "rope_base": "the base of RoPE",
    "eps": "the norms' epsilon", "length": "the prompt's length", "batch": "the number of sequences", "chunk": "the chunk",
    "prefix": "the reused prefix", "threads": "the number of threads",
}  # fmt: skip

FACTS = {name: Fact(0.0, f"{words} is {{}}", attrgetter(name)) for name, words in _NUMBERS.items()}
"""All facts."""

FACTS |= {
    "heads": Fact(0.15, "the number of heads is {}", lambda s: s.heads),
    "experts_used": Fact(0.1, "the number of experts that a token takes is {}", lambda s: s.experts_used),
    "row": Fact(0.1, "the place in the batch is {}", lambda s: s.row),
    "pieces": Fact(0.3, "the number of calls is {}", lambda s: s.pieces),
    "rest": Fact(0.6, "the number of tokens behind the reused prefix is {}", lambda s: s.length - s.prefix),
    "repeated": Fact(0.35, "two ids next to each other are (equal|others)", lambda s: bool((s.ids[1:] == s.ids[:-1]).any())),
    "highest": Fact(0.45, "the highest id of the prompt is {}", lambda s: s.ids.max()),
    "rows": Fact(0.15, "the row length of {a} matrix is {}", lambda s: gcd(s.width, s.q_width, s.ffn)),
    "longest": Fact(0.3, "the longest row of a matrix is {}", lambda s: max(s.width, s.q_width, s.ffn)),
    "tied": Fact(0.0, "the head is (the embedding|a matrix apart)", lambda s: s.tied),
    "extras": Fact(0.0, "the file has (|no )optional tensors (biases, scales, factors of RoPE)", lambda s: s.extras),
    "ragged": Fact(0.0, "(sequences of a batch differ in length|all sequences are as long)", lambda s: s.ragged),
    "chunked": Fact(-0.05, "the prompt comes in (chunks|one piece)", lambda s: s.chunk < s.length - s.prefix),
    "windowed": Fact(0.0, "there is (a|no) window", lambda s: s.window > 0),
    "padded": Fact(0.2, "(the sequence is shorter than another one of its batch|no sequence of the batch is longer)", lambda s: s.padded),
    "partly": Fact(0.1, "(a part of each head is|whole heads are) rotated", lambda s: 0 < s.rope_width < s.head_dim),
    "biased": Fact(0.1, "the model has (|no )biases", lambda s: bool(s.traits.biases or (s.extras and s.traits.optional_biases))),
}

_SHARED = _NUMBERS | {"heads": "the heads", "kv_heads": "the key heads", "every": "the rows of a matrix"}
FACTS |= {
    f"share {x}": Fact(0.1, f"a thread's share of {_SHARED[x]} is {{}}", partial(lambda x, s: getattr(s, x) / s.threads, x))
    for x in ("heads", "kv_heads", "width", "ffn", "vocab", "every")
}
_TAIL = "(an|no) id of the prompt is behind the vocabulary's last whole tile of"
FACTS |= {f"tail {n}": Fact(0.25, f"{_TAIL} {n}", partial(lambda n, s: s.ids.max() >= s.vocab // n * n, n)) for n in _TILES}
_BEHIND = "the number of tokens behind the first id"
FACTS |= {f"behind {n}": Fact(0.2, f"{_BEHIND} {n} is {{}}", partial(lambda n, s: s.behind(n), n)) for n in _IDS}
FACTS |= ORDERS | CALLS

_POWERS = [1 << n for n in range(20)]
_BOUNDS = 6  # at each end, of a number of calls
_STEPS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
_SIZES = ("width", "ffn", "heads", "kv_heads", "group", "head_dim", "vocab", "rope_width", "experts", "threads", "length", "calls", "keys")
"""Facts that may be said to be a power of 2."""
_LOWS = ("cached", "highest", "repeated", *(name for name in FACTS if name.startswith(("tail", "behind", "empty", "idle", "fewer"))))
"""What an id does, or an earlier call: nothing is said of prompts that do not have it."""
_ENDS = ("beyond", "past", "overlong", "scores", "pairs", "rest", "longest", *_LOWS)
"""Facts of which bounds alone are said: other numbers are nearly always exceptions."""
_MULTIPLES = ("rows", *(name for name in FACTS if name.startswith("share")))
"""Facts of which multiples alone are said."""


def calls_of(case: Case, length: int) -> list[tuple[int, int]]:
    """The first position of each call of a sequence, and the one behind its last: the prefix and the rest, each in chunks."""
    parts = [(start, end) for start, end in ((0, case.prefix), (case.prefix, length)) if end > start]
    return [(i, min(i + (case.chunk or end), end)) for start, end in parts for i in range(start, end, case.chunk or end)]


class Facts(SimpleNamespace):
    """What is so of one sequence of a case: by name a value, or one of each of its calls (CALLS). It is NaN where there is no such thing,
    as no window. Only what is asked for is computed.

    Of its calls are those behind the reused prefix that begin at `until` or before, of its ids those up to the end of these.
    alone: whether it is a prefix that another call reuses.
    """

    def __init__(self, case: Case, row: int = 0, until: int = CONTEXT, alone: bool = False) -> None:
        vars(self).update(vars(case), case=case, row=row, alone=np.bool_(alone), known={})  # a hunt weighs thousands of cases
        self.length = lengths_of(case)[row]
        self.window, self.chunk, self.used = case.window or np.nan, case.chunk or np.nan, case.experts_used if case.experts else np.nan
        self.starts, self.ends = np.array(calls_of(case, self.length), np.int64).T
        self.pieces, self.opening = len(self.starts), self.ends[0]
        self.among = slice(*self.starts.searchsorted((case.prefix, until + 1)))
        self.start, self.end = self.starts[self.among], self.ends[self.among]
        self.count = self.end - self.start
        self.each = -(-self.count // self.threads)

    traits = property(lambda self: FAMILIES[self.family])
    heads = property(lambda self: self.kv_heads * self.group)
    padded = property(lambda self: self.length < self.case.length)
    q_width = property(lambda self: self.heads * self.head_dim)
    taken = property(lambda self: self.case.chunk or self.case.length)
    before = property(lambda self: np.concatenate([[np.nan], (self.ends - self.starts)[:-1]])[self.among])
    every = property(lambda self: gcd(self.q_width, self.kv_heads * self.head_dim, self.width, self.ffn, self.vocab))

    def __getitem__(self, name: str) -> Any:
        if name not in self.known:
            value = FACTS[name].value(self)
            self.known[name] = np.sign(np.subtract(*value)) if name in ORDERS else value
        return self.known[name]

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        return tokens_of(self.case)[self.row][: self.end[-1]]

    def behind(self, n: int | str) -> int:
        at = np.flatnonzero(self.ids == (self.vocab - 1 if n == _LAST else n))
        return len(self.ids) - 1 - int(at[0]) if at.size else -1


facts_of = lru_cache(1 << 13)(Facts)


def prefix_of(case: Case) -> Case:
    """The reused prefix as a case: its calls know nothing of what comes behind them."""
    return fitted(with_fields(case, {"length": case.prefix, "prefix": 0, "ragged": False}))


def parts_of(case: Case, row: int = 0, until: int = CONTEXT) -> tuple[Facts, ...]:
    """All calls of a sequence: those of the reused prefix, if there is one, and those behind it."""
    prefix = (facts_of(prefix_of(case), row, alone=True),) if case.prefix else ()
    return (*prefix, facts_of(case, row, until))


class Calls:
    """The calls of some sequences, [N] in all, and what is so of each. A sequence may have two parts."""

    def __init__(self, sequences: Sequence[tuple[Facts, ...]]) -> None:
        self.sequences, self.facts = sequences, [one for parts in sequences for one in parts]
        self.counts = np.array([len(one.start) for one in self.facts], np.int64)
        sizes = [sum(len(one.start) for one in parts) for parts in sequences]
        self.begins = np.cumsum([0, *sizes], dtype=np.int64)[:-1]
        self._columns: dict[str, NDArray] = {}

    def column(self, name: str) -> NDArray:  # [N]
        """A fact of each call."""
        if name not in self._columns:
            values = [one[name] for one in self.facts]
            if name in CALLS:
                self._columns[name] = np.concatenate([np.zeros(0), *values])
            else:
                kind = object if values and isinstance(values[0], str) else float
                self._columns[name] = np.repeat(np.array(values, kind), self.counts)
        return self._columns[name]

    def table(self, atoms: Sequence["Atom"]) -> NDArray[np.bool_]:  # [atoms, N]
        """Which statements hold of which calls."""
        return np.array([atom.among(self.column(atom.fact)) for atom in atoms], bool).reshape(len(atoms), sum(self.counts))

    def meet(self, atoms: Sequence["Atom"]) -> NDArray[np.bool_]:  # [N]
        """Which calls all statements hold of."""
        return np.all(self.table(atoms), axis=0)

    def any(self, holds: NDArray[np.bool_]) -> NDArray[np.bool_]:  # [..., N] -> [..., sequences]
        """Whether something holds of a call of each sequence."""
        return np.logical_or.reduceat(holds, self.begins, axis=-1) if self.facts else holds


@dataclass(frozen=True)
class Atom:
    """A statement about one fact of a call: that its value lies in a range, leaves a remainder, is a power of 2, or is not a value."""

    fact: str
    low: Any = -inf
    high: Any = inf
    step: int = 0
    rest: int | None = None  # the remainder; None: any but 0
    most: int = 0  # the largest remainder, where it is a range
    no: bool = False
    power: bool = False  # whether the value is a power of 2
    gap: Any = field(default=None, compare=False)  # the nearest value beyond a bound that right calls have, which meet all other statements

    def among(self, values: NDArray) -> NDArray[np.bool_]:  # [N] -> [N]
        """Whether it holds of each value."""
        if self.step:
            left = np.mod(values, self.step)
            return left > 0 if self.rest is None else (left >= self.rest) & (left <= max(self.rest, self.most))
        if self.power:
            return np.isin(values, _POWERS) != self.no
        return ((values >= self.low) & (values <= self.high)) != self.no

    def divides(self, value: Any) -> bool:
        """Whether it says that there is one number above 1, and this is a multiple of it."""
        return type(self.low) is int and 1 < self.low == self.high and not self.no and value > 0 and value % self.low == 0

    @property
    def cost(self) -> float:
        """How far-fetched it is: of statements that fit alike, the cheapest is believed."""
        if self.step or self.power:
            form = 0.25 + 0.1 * (self.step in (2, 3) or self.power) + 0.2 * bool(self.rest) + 0.1 * bool(self.most)
        elif self.low == self.high:
            form = 0.3 if self.no else 0.25 * (self.low is False) if isinstance(self.low, str | bool) else 0.1
        else:
            form = 0.05 if self.high == inf else 0.1
        return 1 + FACTS[self.fact].cost + form

    def predicate(self) -> str:
        """What it says of the number or the name."""
        if self.fact in ORDERS:
            words = _ORDER_WORDS.get((self.low, self.high), "equal to")
        elif self.step:
            rest = f"{self.rest} to {self.most}" if self.most else self.rest
            words = f"{rest} more than a" if rest else "no" if rest is None else "a"
            words += f" multiple of {self.step}" if self.step > 1 else " whole number"
        elif self.power:
            words = "a power of 2"
        else:
            near = self.gap is None or any(isinstance(x, int) and abs(x - self.gap) <= 1 for x in (self.low, self.high))
            words = _range(self.low, self.high) + ("" if near else f" (right at {self.gap})")
        return "not " * self.no + words

    def __str__(self) -> str:
        return in_statements([self])


def in_statements(condition: Sequence[Atom]) -> str:
    """A condition in words. Statements about one fact are said together, and those about a call last, of which the second says "it"."""
    facts = sorted(dict.fromkeys(atom.fact for atom in condition), key=lambda fact: [*CALLS].index(fact) if fact in CALLS else -1)
    parts = [_statement(fact, [atom for atom in condition if atom.fact == fact]) for fact in facts]
    about = [n for n, part in enumerate(parts) if "{call}" in part]
    for n in about[1:]:
        parts[n] = re.sub(r"^the ([^{]*) of \{call\}", r"its \1", parts[n]).replace("{call}", "it")
    return " and ".join(parts).replace("{call}", "a call")


def _statement(fact: str, atoms: Sequence[Atom]) -> str:
    words, first = FACTS[fact].words, atoms[0]
    if "{}" not in words:
        return re.sub(r"\(([^()|]*)\|([^()|]*)\)", r"\1" if first.low else r"\2", words)
    if fact.startswith("behind") and first.low == 0:
        return f"the prompt has the id {fact.removeprefix('behind ')}"
    if fact == "row" and (first.low, first.no) in ((1, False), (0, True)):
        return "the sequence is not the first of its batch"
    if fact == "length" and len(atoms) == 1 and not first.step and (first.low == -inf) != (first.high == inf):
        gap = first.predicate().partition(" (")[2]
        side = f"longer than {first.low - 1}" if first.high == inf else f"shorter than {first.high + 1}"
        return f"the prompt is {side} tokens{gap and f' ({gap}'}"
    ranges = [atom for atom in atoms if (atom.low == -inf) != (atom.high == inf)]
    if len(ranges) == 2:
        low, high = max(atom.low for atom in ranges), min(atom.high for atom in ranges)
        atoms = [Atom(fact, low, high), *(atom for atom in atoms if atom not in ranges)]
    every = fact == "rows" and first.rest == 0
    return words.replace("{a}", "every" if every else "a").replace("{}", " and ".join(atom.predicate() for atom in atoms))


def _range(low: Any, high: Any) -> str:
    if low == high:
        return f"{low}"
    return f"at most {high}" if low == -inf else f"at least {low}" if high == inf else f"{low} to {high}"


def atoms_of(failing: Calls, passing: Calls) -> list[Atom]:
    """Statements that hold of a call of each failing sequence, of the kinds that may not hold of a call that is right."""
    atoms = [atom for name in FACTS for atom in _about(name, failing, passing.column(name))]
    fits = np.all(failing.any(failing.table(atoms)), axis=1)
    return [atom for atom, fit in zip(atoms, fits, strict=True) if fit]


def _about(fact: str, failing: Calls, good: NDArray) -> Iterator[Atom]:
    bad = failing.column(fact)
    if "{}" not in FACTS[fact].words:
        yield from (Atom(fact, x, x) for x in (False, True) if x or fact not in _LOWS)
        return
    if bad.dtype == object:
        names = dict.fromkeys(bad)
        yield from (Atom(fact, x, x) for x in names if len(names) == 1 or fact in CALLS)
        yield from (Atom(fact, x, x, no=True) for x in dict.fromkeys(good) if x not in names)
        return
    if fact in ORDERS:
        yield from (Atom(fact, low, high) for low, high in ((1, inf), (0, inf), (0, 0), (-inf, 0), (-inf, -1)))
        yield Atom(fact, 0, 0, no=True)
        return
    values, tried = numbers_of(bad), numbers_of(good)
    if fact not in (*_ENDS, *_MULTIPLES):
        yield from (Atom(fact, x, x, no=True) for x in tried if x not in values)
        yield from (Atom(fact, x, x) for x in values)
    if fact not in _MULTIPLES and not np.isnan(bad).any():
        low, high = np.maximum.reduceat(bad, failing.begins).min(), np.minimum.reduceat(bad, failing.begins).max()
        yield from (Atom(fact, low=x) for x in [x for x in values if x <= low][: -_BOUNDS - 1 : -1])
        yield from (Atom(fact, high=x) for x in [x for x in values if x >= high and fact not in _LOWS][:_BOUNDS])
    if fact in _ENDS or not (fact in _MULTIPLES or all(isinstance(x, int) for x in values)):
        return
    yield from (Atom(fact, power=True, no=no) for no in (False, True) if fact in _SIZES)
    yield from (Atom(fact, step=step, rest=rest) for step in _STEPS for rest in (None, 0))
    for step in () if fact in _MULTIPLES else _STEPS[3:]:
        left = np.mod(bad, step)
        most = np.minimum.reduceat(np.where(left > 0, left, inf), failing.begins).max()  # the nearest above a multiple, of each
        yield Atom(fact, step=step, rest=1)
        yield Atom(fact, step=step, rest=step // 2, most=step - 1)  # an odd number of whole tiles of half a step
        if 1 < most < step - 1:
            yield Atom(fact, step=step, rest=1, most=int(most))


def numbers_of(column: NDArray) -> list[Any]:
    """The different numbers of a fact, in order."""
    return [int(x) if x == int(x) else float(x) for x in np.unique(column[~np.isnan(column)])]
