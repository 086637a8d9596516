"""What can be said of a case: its facts, statements about them that some cases meet and others do not, and both in words.

A condition speaks of one call of one sequence: all statements about a call are about the same one.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd, inf
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..model.families import FAMILIES
from ..testing.space import CONTEXT, Case, lengths_of, tokens_of

Facts = Mapping[str, Any]
"""By name, of a sequence: a value, or one of each of its calls (CALLS). It is NaN where there is no such thing, as no window."""

_TILES = (8, 16, 32, 64)
_LAST = "the last of the vocabulary"
_IDS = (0, 1, 2, 3, _LAST)
"""Ids that may have a meaning: of padding, of the begin and the end of a text, of what is unknown."""


class Fact(NamedTuple):
    """What may be so of a sequence, or of a call."""

    cost: float  # how far-fetched a statement about it is
    words: str  # `{}`: a number or name; (a|b): a where it is so, b where it is not; `{call}`: "a call", and then "it"
    value: Callable[[Any], Any]  # of what `facts_of` knows

    @property
    def is_so(self) -> bool:
        """Whether it is so or not, and no number or name."""
        return "{}" not in self.words

    def said(self, so: bool) -> str:
        return re.sub(r"\(([^()|]*)\|([^()|]*)\)", r"\1" if so else r"\2", self.words)


CALLS = {
    "calls": Fact(0.15, "the length of {call} is {}", lambda s: s.count),
    "starts": Fact(0.3, "the first position of {call} is {}", lambda s: s.start),
    "keys": Fact(0.3, "the number of keys of {call} is {}", lambda s: s.end),
    "beyond": Fact(0.2, "the number of keys of {call} minus the window is {}", lambda s: s.end - s.window),
    "windows": Fact(0.35, "the number of whole windows before the last token of {call} is {}", lambda s: (s.end - 1) // s.window),
    "overlong": Fact(0.1, "the length of {call} minus the window is {}", lambda s: s.count - s.window),
    "unheld": Fact(0.9, "(no|a) window holds all keys of {call}", lambda s: ~(s.end <= s.window)),
    "past": Fact(0.9, "the first position of {call} minus the window is {}", lambda s: s.start - s.window),
    "longer": Fact(0.6, "{call} is (|not )longer than the first one", lambda s: s.count > s.opening),
    "scores": Fact(0.35, "the number of heads times the length of {call} is {}", lambda s: s.count * s.heads),
    "pairs": Fact(0.2, "the length of {call} times the number of experts that a token takes is {}", lambda s: s.count * s.used),
    "cached": Fact(0.05, "{call} (sees keys of an earlier one|is the first one)", lambda s: s.start > 0),
    "own": Fact(0.2, "{call} is (behind the reused prefix, if there is one|one of the reused prefix's)", lambda s: s.start >= s.prefix),
    "fresh": Fact(0.2, "{call} is (|not )the first one behind a reused prefix", lambda s: (s.start == s.prefix) & (s.start > 0)),
    "cut": Fact(0.2, "{call} is (shorter than the chunk|a whole chunk)", lambda s: s.count < s.taken),
    "more tokens": Fact(0.2, "there are (|no )more threads than tokens in {call}", lambda s: s.threads > s.count),
    "split tokens": Fact(0.35, "the threads (|do not )divide the tokens of {call} evenly", lambda s: s.count % s.threads == 0),
    "more experts": Fact(0.3, "there are (|no )more experts than tokens in {call}", lambda s: s.experts > s.count),
    "more pairs": Fact(0.35, "there are (|no )more experts than all tokens of {call} take", lambda s: s.experts > s.count * s.used),
}
"""Facts of a call. One that compares two numbers of it costs nearly what two statements do, so that these are tried against it."""


def _at(value: Callable[[Any, Any], Any], x: Any) -> Callable[[Any], Any]:
    return lambda s: value(s, x)


CALLS |= {
    f"crosses {n}": Fact(0.3, f"{{call}} crosses (a|no) multiple of {n}", _at(lambda s, n: s.start // n < (s.end - 1) // n, n))
    for n in _TILES
}

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
    "square": Fact(0.2, "all heads together are (|not )as wide as the model", lambda s: s.q_width == s.width),
    "biased": Fact(0.1, "the model has (|no )biases", lambda s: bool(s.traits.biases or (s.extras and s.traits.optional_biases))),
}

_SHARED = {"heads": "heads", "kv_heads": "key heads", "experts_used": "experts that a token takes"}
_DIVIDED = _NUMBERS | {"heads": "the heads", "kv_heads": "the key heads", "every": "the rows of a matrix"}
FACTS |= {
    f"more {x}": Fact(0.2, f"there are (|no )more threads than {words}", _at(lambda s, x: s.threads > getattr(s, x), x))
    for x, words in _SHARED.items()
}
FACTS |= {
    f"split {x}": Fact(0.3, f"the threads (|do not )divide {_DIVIDED[x]} evenly", _at(lambda s, x: getattr(s, x) % s.threads == 0, x))
    for x in ("heads", "kv_heads", "width", "ffn", "vocab", "every")
}
_TAIL = "(an|no) id of the prompt is behind the vocabulary's last whole tile of"
FACTS |= {f"tail {n}": Fact(0.25, f"{_TAIL} {n}", _at(lambda s, n: s.ids.max() >= s.vocab // n * n, n)) for n in _TILES}
_BEHIND = "the number of tokens behind the first id"
FACTS |= {f"behind {n}": Fact(0.2, f"{_BEHIND} {n} is {{}}", _at(lambda s, n: s.behind(s.vocab - 1 if n is _LAST else n), n)) for n in _IDS}
FACTS |= CALLS

_POWERS = [1 << n for n in range(20)]
_BOUNDS = 6  # at each end, of a number of calls
_STEPS = (2, 3, 4, 8, 16, 32, 64, 128, 256)
_SHAPES = ("width", "ffn", "heads", "kv_heads", "group", "head_dim", "vocab", "rope_width", "experts", "threads")
_LOWS = ("highest", "repeated", *(name for name in FACTS if name.startswith(("tail", "behind"))))
"""What an id does: nothing is said of prompts that do not have it."""
_ENDS = ("beyond", "past", "overlong", "scores", "pairs", "rest", "longest", *_LOWS)
"""Facts of which bounds alone are said: other numbers are nearly always exceptions."""


def calls_of(case: Case, length: int) -> list[tuple[int, int]]:
    """The first position of each call of a sequence, and the one behind its last: the prefix and the rest, each in chunks."""
    parts = [(start, end) for start, end in ((0, case.prefix), (case.prefix, length)) if end > start]
    return [(i, min(i + (case.chunk or end), end)) for start, end in parts for i in range(start, end, case.chunk or end)]


@lru_cache(1 << 12)
def facts_of(case: Case, row: int = 0, until: int = CONTEXT, since: int = 0) -> Facts:
    """All that a condition may be about, of one sequence. Of its calls are those that begin at `since` to `until`, of its ids those up to
    the end of these."""
    s = SimpleNamespace(**vars(case), row=row, traits=FAMILIES[case.family], heads=case.kv_heads * case.group)
    s.length, s.ids, s.padded = lengths_of(case)[row], tokens_of(case)[row], lengths_of(case)[row] < case.length
    s.q_width, s.taken = s.heads * s.head_dim, case.chunk or case.length
    s.every = gcd(s.q_width, s.kv_heads * s.head_dim, s.width, s.ffn, s.vocab)
    s.window, s.chunk, s.used = case.window or np.nan, case.chunk or np.nan, s.experts_used if s.experts else np.nan
    s.behind = lambda n: len(s.ids) - 1 - int((s.ids == n).argmax()) if n in s.ids else -1
    calls = calls_of(case, s.length)
    s.pieces, s.opening = len(calls), calls[0][1]
    s.start, s.end = np.array([call for call in calls if since <= call[0] <= until], np.int64).T
    s.count, s.ids = s.end - s.start, s.ids[: s.end[-1]]
    return {name: fact.value(s) for name, fact in FACTS.items()}


class Calls:
    """The calls of some sequences, [N] in all, and what is so of each."""

    def __init__(self, facts: Sequence[Facts]) -> None:
        self.facts = facts
        self.counts = [len(one["calls"]) for one in facts]
        self.begins = np.cumsum([0, *self.counts])[:-1]
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
    no: bool = False
    power: bool = False  # whether the value is a power of 2
    gap: Any = field(default=None, compare=False)  # the nearest value beyond a bound that right calls have, which meet all other statements

    @property
    def sign(self) -> tuple[Any, ...]:
        """Its form: conditions do not have two of a form about one fact."""
        return self.low == self.high, self.low == -inf, self.high == inf, self.step > 0, self.no, self.power

    def among(self, values: NDArray) -> NDArray[np.bool_]:  # [N] -> [N]
        """Whether it holds of each value."""
        if self.step:
            left = np.mod(values, self.step)
            return left == self.rest if self.rest is not None else left > 0
        if self.power:
            return np.isin(values, _POWERS) != self.no
        return ((values >= self.low) & (values <= self.high)) != self.no

    @property
    def single(self) -> bool:
        """Whether it says that there is one number above 1."""
        return type(self.low) is int and 1 < self.low == self.high and not self.no

    def divides(self, value: Any) -> bool:
        """Whether this is a multiple of its one number."""
        return self.single and value > 0 and value % self.low == 0

    @property
    def cost(self) -> float:
        """How far-fetched it is: of statements that fit alike, the cheapest is believed."""
        if self.step or self.power:
            form = 0.25 + 0.1 * (self.step in (2, 3) or self.power) + 0.2 * bool(self.rest)
        elif self.low == self.high:
            form = 0.3 if self.no else 0.1 * (not isinstance(self.low, str | bool))
        else:
            form = 0.05 if self.high == inf else 0.1
        return 1 + FACTS[self.fact].cost + form

    def predicate(self) -> str:
        """What it says of the number or the name."""
        if self.step:
            words = f"{self.rest} more than a" if self.rest else "no" if self.rest is None else "a"
            words += f" multiple of {self.step}"
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
    if FACTS[fact].is_so:
        return FACTS[fact].said(bool(first.low))
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
    if FACTS[fact].is_so:
        yield from (Atom(fact, x, x) for x in (False, True) if x or fact not in _LOWS)
        return
    if bad.dtype == object:
        names = dict.fromkeys(bad)
        yield from (Atom(fact, x, x) for x in names if len(names) == 1 or fact in CALLS)
        yield from (Atom(fact, x, x, no=True) for x in dict.fromkeys(good) if x not in names)
        return
    values, tried = numbers_of(bad), numbers_of(good)
    if fact not in (*_ENDS, "rows"):
        yield from (Atom(fact, x, x, no=True) for x in tried if x not in values)
        yield from (Atom(fact, x, x) for x in values)
    if fact != "rows" and not np.isnan(bad).any():
        low, high = np.maximum.reduceat(bad, failing.begins).min(), np.minimum.reduceat(bad, failing.begins).max()
        for x in [x for x in values if x <= low][: -_BOUNDS - 1 : -1]:
            if tried and tried[0] < x:
                yield Atom(fact, low=x)
        for x in [x for x in values if x >= high and fact not in _LOWS][:_BOUNDS]:
            if tried and tried[-1] > x:
                yield Atom(fact, high=x)
    if fact not in _ENDS and all(isinstance(x, int) for x in values):
        yield from (Atom(fact, power=True, no=no) for no in (False, True) if fact in _SHAPES)
        yield from (Atom(fact, step=step, rest=rest) for step in _STEPS for rest in ((None, 0, 1) if step >= 4 else (None, 0)))


def numbers_of(column: NDArray) -> list[Any]:
    """The different numbers of a fact, in order."""
    return [int(x) if x == int(x) else float(x) for x in np.unique(column[~np.isnan(column)])]


def in_words(case: Case) -> str:
    """A case in words: what makes it other than the plainest, and its sizes."""
    c, plain, plural = case, Case(), lambda n, word: f"{n} {word}{'s' * (n != 1)}"
    heads, lengths = plural(c.kv_heads * c.group, "head"), ", ".join(map(str, lengths_of(c)))
    heads += f" that share {plural(c.kv_heads, 'key head')}" * (c.group > 1)
    sizes = f"{c.family}, {plural(c.layers, 'layer')}, width {c.width}, {heads} of width {c.head_dim}, feed-forward {c.ffn}"
    traits = {
        f"{c.table} embedding": c.table != plain.table,
        "tied head": c.tied,
        "optional tensors": c.extras,
        f"window {c.window}": c.window,
        f"{c.rope_width} numbers of a head rotated": c.rope_width,
        f"{plural(c.experts, 'expert')}, {c.experts_used} of them used": c.experts,
        f"RoPE base {c.rope_base:g}": c.rope_base != plain.rope_base,
        f"eps {c.eps:g}": c.eps != plain.eps,
    }
    call = f"{lengths} tokens" if c.ragged else plural(c.length, "token")
    call = f"{c.batch} sequences of " * (c.batch > 1) + call + (f" in chunks of {c.chunk}" if c.chunk else " in one prefill")
    call += f" behind a reused prefix of {c.prefix}" * (c.prefix > 0) + f" on {c.threads} threads" * (c.threads > 1)
    call += {"first": ", some ids 0", "last": ", some ids the last", "low": ", some ids below 4", "alike": ", all ids equal"}.get(
        c.tokens, ""
    )
    return ", ".join([f"{sizes}, vocabulary {c.vocab}, {c.weights}", *(words for words, so in traits.items() if so), call])
