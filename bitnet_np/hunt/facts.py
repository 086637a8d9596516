"""What can be said of a case: its facts, statements about them that some cases meet and others do not, and both in words.

A fact is a number, a name or a truth of each call of a sequence: a quantity, or what is derived from two of them (their difference, the
sign of it, a share). A condition speaks of one call: all statements about a call are about the same one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..model.families import FAMILIES
from ..testing.space import CONTEXT, Case, fitted, lengths_of, tokens_of, with_fields

QUANTITIES = {
    "sizes": {
        "width": "the width", "ffn": "the feed-forward width", "kv_heads": "the number of key heads", "heads": "the number of heads",
        "group": "the number of heads that share a key head", "head_dim": "the head width", "rope_width": "the rotated part of a head",
        "vocab": "the vocabulary", "experts": "the number of experts", "threads": "the number of threads", "length": "the prompt's length",
        "calls": "the length of {call}", "keys": "the number of keys of {call}",
    },
    "numbers": {
        "family": "the family", "weights": "the type of the matrices", "table": "the type of the embedding",
        "layers": "the number of layers", "window": "the window", "experts_used": "the number of experts that a token takes",
        "rope_base": "the base of RoPE", "eps": "the norms' epsilon", "batch": "the number of sequences", "row": "the place in the batch",
        "pieces": "the number of calls", "chunk": "the chunk", "prefix": "the reused prefix", "starts": "the first position of {call}",
        "sees": "the number of keys that the last token of {call} sees",
        "windows": "the number of whole windows before the last token of {call}",
    },
    "bounds": {
        "rest": "the number of tokens behind the reused prefix", "longest": "the longest row of a matrix",
        "scores": "the number of heads times the length of {call}",
        "pairs": "the length of {call} times the number of experts that a token takes",
    },
    "least": {"highest": "the highest id of the prompt"},
    "multiples": {"rows": "the row length of {a} matrix"},
}  # fmt: skip
"""In words, by what is said of them (Fact.said): of sizes also that they are powers of 2."""
_WORDS = {name: words for names in QUANTITIES.values() for name, words in names.items()} | {
    "opening": "the length of the first call", "before": "the length of the call before", "q_width": "the width of all heads together",
    "taken": "the chunk", "used": "the number of experts that a token takes", "every": "the rows of a matrix",
}  # fmt: skip
_FAR_FETCHED = {
    "heads": 0.15, "experts_used": 0.1, "row": 0.1, "pieces": 0.3, "rest": 0.6, "rows": 0.15, "longest": 0.3, "highest": 0.45,
    "calls": 0.15, "starts": 0.3, "keys": 0.3, "sees": 0.35, "windows": 0.35, "scores": 0.35, "pairs": 0.2,
}  # fmt: skip
"""A fact that compares two numbers costs nearly what two statements do, so that these are tried against it."""
_DIFFERENCES = {("keys", "window"): 0.2, ("calls", "window"): 0.1, ("starts", "window"): 0.9}
_ORDERS = {
    ("calls", "heads"): 0.3, ("calls", "opening"): 0.6, ("calls", "before"): 0.3, ("calls", "taken"): 0.2, ("threads", "calls"): 0.2,
    ("experts", "pairs"): 0.35, ("threads", "heads"): 0.2, ("threads", "kv_heads"): 0.2, ("threads", "used"): 0.2,
    ("group", "kv_heads"): 0.3, ("q_width", "width"): 0.2,
}  # fmt: skip
_SHARED = {(a, "threads"): 0.15 if a == "calls" else 0.1 for a in ("calls", "heads", "kv_heads", "width", "ffn", "vocab", "every")}


class Fact(NamedTuple):
    """What may be so of a call."""

    cost: float  # how far-fetched a statement about it is
    words: str  # `{}`: what is said of a number or a name; (a|b): a where it is so, b where it is not; `{call}`: "a call", and then "it"
    value: Callable[..., NDArray]  # of Calls, [N]
    said: str = ""
    """Of a number: "numbers" and remainders; "bounds", lower bounds ("least") or "multiples" alone; of two numbers their "order". Of a
    truth "least": nothing is said of calls that do not have it."""


FACTS = {
    name: Fact(_FAR_FETCHED.get(name, 0), f"{words} is {{}}", attrgetter(name), "numbers" if said == "sizes" else said)
    for said, names in QUANTITIES.items()
    for name, words in names.items()
}
FACTS |= {
    "cached": Fact(0.05, "{call} (sees keys of an earlier one|is the first one)", lambda s: s.start > 0, "least"),
    "fresh": Fact(0.2, "{call} is (|not )the first one behind a reused prefix", lambda s: (s.start == s.prefix) & (s.start > 0)),
    "last": Fact(0.2, "{call} is (|not )the last one", lambda s: (s.end == s.length) & ~s.alone),
    "idle": Fact(0.4, "equal shares of {call}, rounded up, leave (a|no) thread idle",
        lambda s: -(-s.calls // s.threads) * (s.threads - 1) >= s.calls, "least"),
    "fewer": Fact(0.4, "equal shares of {call}, rounded up, leave (a|no) thread fewer tokens",
        lambda s: s.calls % -(-s.calls // s.threads) > 0, "least"),
    "repeated": Fact(0.35, "two ids next to each other are (equal|others)", attrgetter("repeated"), "least"),
    "tied": Fact(0, "the head is (the embedding|a matrix apart)", attrgetter("tied")),
    "extras": Fact(0, "the file has (|no )optional tensors (biases, scales, factors of RoPE)", attrgetter("extras")),
    "ragged": Fact(0, "(sequences of a batch differ in length|all sequences are as long)", attrgetter("ragged")),
    "chunked": Fact(-0.05, "the prompt comes in (chunks|one piece)", lambda s: s.chunk < s.length - s.prefix),
    "windowed": Fact(0, "there is (a|no) window", lambda s: s.window > 0),
    "padded": Fact(0.2, "(the sequence is shorter than another one of its batch|no sequence of the batch is longer)",
        lambda s: s.length < s.longest_length),
    "partly": Fact(0.1, "(a part of each head is|whole heads are) rotated", lambda s: (s.rope_width > 0) & (s.rope_width < s.head_dim)),
    "biased": Fact(0.1, "the model has (|no )biases", attrgetter("biased")),
}  # fmt: skip


_DERIVED: tuple[tuple[str, str, Callable[..., NDArray], str, dict], ...] = (
    ("minus", "{} minus {} is {{}}", np.subtract, "bounds", _DIFFERENCES),
    ("order", "{} is {{}} {}", lambda a, b: np.sign(a - b), "order", _ORDERS),
    ("share", "a thread's share of {} is {{}}", np.divide, "multiples", _SHARED),
    ("power", "{} is (|not )a power of 2", lambda a: np.isin(a, [1 << n for n in range(20)]), "",
        {(a,): 0.35 + FACTS[a].cost for a in QUANTITIES["sizes"]}),
)  # fmt: skip
FACTS |= {
    " ".join((kind, *of)): Fact(cost, words.format(*map(_WORDS.get, of)), lambda s, f=f, of=of: f(*(getattr(s, x) for x in of)), said)
    for kind, words, f, said, pairs in _DERIVED
    for of, cost in pairs.items()
}
for n in (4, 8):
    words = f"the keys of {{call}} in {n} equal parts, rounded up, leave (a|no) part empty"
    FACTS[f"empty {n}"] = Fact(0.4, words, lambda s, n=n: -(-s.end // n) * (n - 1) >= s.end, "least")
for n in (8, 16, 32, 64):
    words = f"(an|no) id of the prompt is behind the vocabulary's last whole tile of {n}"
    FACTS[f"crosses {n}"] = Fact(0.3, f"{{call}} crosses (a|no) multiple of {n}", lambda s, n=n: s.start // n < (s.end - 1) // n)
    FACTS[f"tail {n}"] = Fact(0.25, words, lambda s, n=n: s.highest >= s.vocab // n * n, "least")
for token in (0, 1, 2, 3, "the last of the vocabulary"):  # of padding, of the begin and the end of a text, of what is unknown
    words = f"the number of tokens behind the first id {token} is {{}}"
    FACTS[f"behind {token}"] = Fact(0.2, words, lambda s, token=token: s.spread(lambda part: _behind(part, token)), "least")

_ORDER_WORDS = {(1, inf): "above", (0, inf): "at least", (0, 0): "equal to", (-inf, 0): "at most", (-inf, -1): "below"}
_BOUNDS = 6  # at each end, of a number of calls
_STEPS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)


def calls_of(case: Case, length: int) -> list[tuple[int, int]]:
    """The first position of each call of a sequence, and the one behind its last: the prefix and the rest, each in chunks."""
    parts = [(start, end) for start, end in ((0, case.prefix), (case.prefix, length)) if end > start]
    return [(i, min(i + (case.chunk or end), end)) for start, end in parts for i in range(start, end, case.chunk or end)]


class Part(NamedTuple):
    """The calls of one sequence of a case that are behind the reused prefix and begin at `until` or before."""

    case: Case
    row: int = 0
    until: int = CONTEXT
    alone: bool = False  # whether it is a prefix that another call reuses


def prefix_of(case: Case) -> Case:
    """The reused prefix as a case: its calls know nothing of what comes behind them."""
    return fitted(with_fields(case, {"length": case.prefix, "prefix": 0, "ragged": False}))


def parts_of(case: Case, row: int = 0, until: int = CONTEXT) -> tuple[Part, ...]:
    """All calls of a sequence: those of the reused prefix, if there is one, and those behind it."""
    return (*((Part(prefix_of(case), row, alone=True),) if case.prefix else ()), Part(case, row, until))


_SPAN = ("start", "end", "before", "opening", "pieces")


@lru_cache(1 << 13)
def _spans(part: Part) -> NDArray:  # [calls, 5]
    """Begin, end and the length of the call before (NaN: none); of all calls of the sequence the first one's length, and their number."""
    spans = calls_of(part.case, lengths_of(part.case)[part.row])
    before = [np.nan, *(end - start for start, end in spans)]
    some = [(*span, n) for span, n in zip(spans, before, strict=False) if part.case.prefix <= span[0] <= part.until]
    return np.array([(*one, spans[0][1], len(spans)) for one in some], float)


@lru_cache(1 << 13)
def _ids(part: Part) -> NDArray[np.int64]:
    """The ids up to the end of the last call."""
    return tokens_of(part.case)[part.row][: int(_spans(part)[-1, 1])]


def _behind(part: Part, token: int | str) -> int:
    """How many ids there are behind the first one that is this one; -1: there is none."""
    at = np.flatnonzero((ids := _ids(part)) == (token if isinstance(token, int) else part.case.vocab - 1))
    return len(ids) - 1 - int(at[0]) if at.size else -1


_OF_PARTS: dict[str, Callable[[Part], Any]] = {
    "length": lambda part: lengths_of(part.case)[part.row], "row": attrgetter("row"), "alone": attrgetter("alone"),
    "longest_length": attrgetter("case.length"),
    "window": lambda part: part.case.window or np.nan, "chunk": lambda part: part.case.chunk or np.nan,
    "taken": lambda part: part.case.chunk or part.case.length,
    "used": lambda part: part.case.experts_used if part.case.experts else np.nan,
    "highest": lambda part: _ids(part).max(), "repeated": lambda part: bool((np.diff(_ids(part)) == 0).any()),
    "biased": lambda part: bool((t := FAMILIES[part.case.family]).biases or (part.case.extras and t.optional_biases)),
}  # fmt: skip
"""What calls of one sequence have alike, beside the fields of its case. NaN where there is no such thing, as no window."""
_OF_CALLS: dict[str, Callable[["Calls"], NDArray]] = {
    "calls": lambda s: s.end - s.start, "starts": lambda s: s.start, "keys": lambda s: s.end, "sees": lambda s: np.fmin(s.end, s.window),
    "windows": lambda s: (s.end - 1) // s.window, "scores": lambda s: s.calls * s.heads, "pairs": lambda s: s.calls * s.used,
    "heads": lambda s: s.kv_heads * s.group, "q_width": lambda s: s.heads * s.head_dim, "rest": lambda s: s.length - s.prefix,
    "rows": lambda s: np.gcd.reduce([s.width, s.q_width, s.ffn]), "longest": lambda s: np.max([s.width, s.q_width, s.ffn], axis=0),
    "every": lambda s: np.gcd.reduce([s.q_width, s.kv_heads * s.head_dim, s.width, s.ffn, s.vocab]),
}  # fmt: skip


class Calls:
    """The calls of some sequences, [N] in all: each fact, and what it is of, is a column. A sequence may have two parts."""

    def __init__(self, sequences: Sequence[tuple[Part, ...]]) -> None:
        self.sequences, self.parts = sequences, [part for parts in sequences for part in parts]
        spans = [_spans(part) for part in self.parts]
        self.counts = np.array([len(x) for x in spans], np.int64)
        self.begins = np.cumsum([0, *(sum(len(_spans(part)) for part in parts) for parts in sequences)])[:-1]
        vars(self).update(zip(_SPAN, np.concatenate([np.zeros((0, len(_SPAN))), *spans]).T, strict=True))

    def __getattr__(self, name: str) -> Any:  # [N]
        value = _OF_CALLS[name](self) if name in _OF_CALLS else self.spread(_OF_PARTS.get(name, attrgetter(f"case.{name}")))
        return vars(self).setdefault(name, value)

    def spread(self, value: Callable[[Part], Any]) -> NDArray:  # [N]
        values = [value(part) for part in self.parts]
        kind = (object if isinstance(values[0], str) else None) if values else np.int64
        return np.repeat(np.array(values, kind), self.counts)

    def column(self, name: str) -> NDArray:  # [N]
        """A fact of each call."""
        if name not in vars(self):
            vars(self)[name] = FACTS[name].value(self)
        return vars(self)[name]

    def holds(self, atoms: Sequence["Atom"]) -> NDArray[np.bool_]:  # [atoms, N]
        """Which statements hold of which calls."""
        return np.array([atom.among(self.column(atom.fact)) for atom in atoms], bool).reshape(len(atoms), len(self.start))

    def meet(self, atoms: Sequence["Atom"]) -> NDArray[np.bool_]:  # [N]
        """Which calls all statements hold of."""
        return np.all(self.holds(atoms), axis=0)

    def any(self, holds: NDArray[np.bool_]) -> NDArray[np.bool_]:  # [..., N] -> [..., sequences]
        """Whether something holds of a call of each sequence."""
        return np.logical_or.reduceat(holds, self.begins, axis=-1) if self.parts else holds


@dataclass(frozen=True)
class Atom:
    """A statement about one fact of a call: that its value, or what a step leaves of it, lies in a range, or does not."""

    fact: str
    low: Any = -inf
    high: Any = inf
    step: int = 0
    no: bool = False
    gap: Any = field(default=None, compare=False)  # the nearest value beyond a bound that right calls have, which meet all other statements

    def among(self, values: NDArray) -> NDArray[np.bool_]:  # [N] -> [N]
        """Whether it holds of each value."""
        if self.step:
            values = np.mod(values, self.step)
            return (values > 0) if self.no else (values >= self.low) & (values <= self.high)  # NaN is no number
        return ((values >= self.low) & (values <= self.high)) != self.no

    def divides(self, value: Any) -> bool:
        """Whether it says that there is one number above 1, and this is a multiple of it."""
        return not (self.step or self.no) and type(self.low) is int and 1 < self.low == self.high and value > 0 and value % self.low == 0

    @property
    def cost(self) -> float:
        """How far-fetched it is: of statements that fit alike, the cheapest is believed."""
        if self.step:
            form = 0.25 + 0.1 * (self.step in (2, 3)) + 0.2 * (self.high > 0) + 0.1 * (self.low < self.high)
        elif self.low == self.high:
            form = 0.3 if self.no else 0.25 * (self.low is False) if isinstance(self.low, str | bool) else 0.1
        else:
            form = 0.05 if self.high == inf else 0.1
        return 1 + FACTS[self.fact].cost + form

    def predicate(self) -> str:
        """What it says of the number or the name."""
        if self.step:
            rest = f"{_range(self.low, self.high)} more than " * (self.high > 0)
            return f"{rest}{'no' if self.no else 'a'} " + (f"multiple of {self.step}" if self.step > 1 else "whole number")
        if FACTS[self.fact].said == "order":
            words = _ORDER_WORDS[self.low, self.high]
        else:
            near = self.gap is None or any(isinstance(x, int) and abs(x - self.gap) <= 1 for x in (self.low, self.high))
            words = _range(self.low, self.high) + ("" if near else f" (right at {self.gap})")
        return "not " * self.no + words

    def __str__(self) -> str:
        return in_statements([self])


def in_statements(condition: Sequence[Atom]) -> str:
    """A condition in words. Statements about one fact are said together, and those about a call last, of which the second says "it"."""
    names = [*FACTS]
    facts = sorted(
        dict.fromkeys(atom.fact for atom in condition), key=lambda fact: names.index(fact) if "{call}" in FACTS[fact].words else -1
    )
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
    ranges = [atom for atom in atoms if (atom.low == -inf) != (atom.high == inf)]
    if fact == "length" and len(atoms) == len(ranges) == 1:
        gap = first.predicate().partition(" (")[2]
        side = f"longer than {first.low - 1}" if first.high == inf else f"shorter than {first.high + 1}"
        return f"the prompt is {side} tokens{gap and f' ({gap}'}"
    if len(ranges) == 2:
        low, high = max(atom.low for atom in ranges), min(atom.high for atom in ranges)
        atoms = [Atom(fact, low, high), *(atom for atom in atoms if atom not in ranges)]
    words = words.replace("{a}", "a" if first.no else "every")
    return words.replace("{}", " and ".join(atom.predicate() for atom in atoms))


def _range(low: Any, high: Any) -> str:
    if low == high:
        return f"{low}"
    return f"at most {high}" if low == -inf else f"at least {low}" if high == inf else f"{low} to {high}"


def atoms_of(failing: Calls, passing: Calls) -> list[Atom]:
    """Statements that hold of a call of each failing sequence, of the kinds that may not hold of a call that is right."""
    atoms = [atom for name in FACTS for atom in _about(name, failing, passing.column(name))]
    fits = np.all(failing.any(failing.holds(atoms)), axis=1)
    return [atom for atom, fit in zip(atoms, fits, strict=True) if fit]


def _about(fact: str, failing: Calls, good: NDArray) -> Iterator[Atom]:
    bad, said = failing.column(fact), FACTS[fact].said
    if "{}" not in FACTS[fact].words:
        yield from (Atom(fact, x, x) for x in (False, True) if x or said != "least")
        return
    if bad.dtype == object:
        names = dict.fromkeys(bad)
        yield from (Atom(fact, x, x) for x in names if len(names) == 1)
        yield from (Atom(fact, x, x, no=True) for x in dict.fromkeys(good) if x not in names)
        return
    if said == "order":
        yield from (Atom(fact, *bounds) for bounds in _ORDER_WORDS)
        yield Atom(fact, 0, 0, no=True)
        return
    values, every = numbers_of(bad), said == "numbers"
    if every:
        yield from (Atom(fact, x, x, no=True) for x in numbers_of(good) if x not in values)
        yield from (Atom(fact, x, x) for x in values)
    if said != "multiples" and not np.isnan(bad).any():
        low, high = np.maximum.reduceat(bad, failing.begins).min(), np.minimum.reduceat(bad, failing.begins).max()
        yield from (Atom(fact, low=x) for x in [x for x in values if x <= low][: -_BOUNDS - 1 : -1])
        yield from (Atom(fact, high=x) for x in [x for x in values if x >= high and said != "least"][:_BOUNDS])
    if said == "multiples" or (every and all(isinstance(x, int) for x in values)):
        yield from (Atom(fact, 0, 0, step, no) for step in _STEPS for no in (True, False))
        for step in _STEPS[3:] if every else ():
            left = np.mod(bad, step)
            most = int(np.minimum.reduceat(np.where(left > 0, left, step), failing.begins).max())  # the nearest above a multiple, of each
            ends = {1, most} if most < step - 1 else {1}
            yield from (Atom(fact, 1, end, step) for end in sorted(ends))
            yield Atom(fact, step // 2, step - 1, step)  # an odd number of whole tiles of half a step


def numbers_of(column: NDArray) -> list[Any]:
    """The different numbers of a fact, in order."""
    return [int(x) if x == int(x) else float(x) for x in np.unique(column[~np.isnan(column)])]
