"""What can be said of a case: its facts, statements about them that some cases meet and others do not, and both in words.

A condition speaks of one call of one sequence: all statements about a call are about the same one.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.families import FAMILIES
from ..testing.space import CONTEXT, FIELDS, Case, lengths_of, tokens_of

Facts = Mapping[str, tuple[Any, ...]]
"""By name, of a sequence: one value, or those of its calls (CALLS); none where there is no such thing, as no window."""

_SPLIT = {
    "heads": "the heads",
    "kv_heads": "the key heads",
    "width": "the width",
    "ffn": "the feed-forward width",
    "vocab": "the vocabulary",
    "rows": "the rows of a matrix",
}
_TILES = (8, 16, 32, 64)

CALLS: dict[str, tuple[float, str, str]] = {
    "calls": (0.15, "the length of {call} is {}", ""),
    "starts": (0.3, "the first position of {call} is {}", ""),
    "keys": (0.3, "the number of keys of {call} is {}", ""),
    "beyond": (0.2, "the number of keys of {call} minus the window is {}", ""),
    "windows": (0.35, "the number of whole windows before the last token of {call} is {}", ""),
    "cached": (0.05, "{call} sees keys of an earlier one", "{call} is the first one"),
    "own": (0.2, "{call} is behind the reused prefix, if there is one", "{call} is one of the reused prefix's"),
    "cut": (0.2, "{call} is shorter than the chunk", "{call} is a whole chunk"),
    "overlong": (0.1, "{call} is longer than the window", "{call} is no longer than the window"),
    "more tokens": (0.2, "there are more threads than tokens in {call}", "there are no more threads than tokens in {call}"),
    "more experts": (0.3, "there are more experts than tokens in {call}", "there are no more experts than tokens in {call}"),
}
"""As FACTS, of a call: `{call}` stands for "a call", and then for "that call"."""

CALLS |= {f"crosses {n}": (0.3, f"{{call}} crosses a multiple of {n}", f"{{call}} crosses no multiple of {n}") for n in _TILES}

FACTS: dict[str, tuple[float, str, str]] = {
    "family": (0.0, "the family is {}", ""),
    "weights": (0.0, "the type of the matrices is {}", ""),
    "table": (0.0, "the type of the embedding is {}", ""),
    "layers": (0.0, "the number of layers is {}", ""),
    "width": (0.0, "the width is {}", ""),
    "ffn": (0.0, "the feed-forward width is {}", ""),
    "heads": (0.15, "the number of heads is {}", ""),
    "kv_heads": (0.0, "the number of key heads is {}", ""),
    "group": (0.0, "the number of heads that share a key head is {}", ""),
    "head_dim": (0.0, "the head width is {}", ""),
    "vocab": (0.0, "the vocabulary is {}", ""),
    "window": (0.0, "the window is {}", ""),
    "rope_width": (0.0, "the rotated part of a head is {}", ""),
    "experts": (0.0, "the number of experts is {}", ""),
    "experts_used": (0.1, "the number of experts that a token takes is {}", ""),
    "rope_base": (0.0, "the base of RoPE is {}", ""),
    "eps": (0.0, "the norms' epsilon is {}", ""),
    "length": (0.0, "the prompt's length is {}", ""),
    "row": (0.1, "the place in the batch is {}", ""),
    "batch": (0.0, "the number of sequences is {}", ""),
    "chunk": (0.0, "the chunk is {}", ""),
    "prefix": (0.0, "the reused prefix is {}", ""),
    "threads": (0.0, "the number of threads is {}", ""),
    "pieces": (0.3, "the number of calls is {}", ""),
    "highest": (0.45, "the highest id of the prompt is {}", ""),
    "rows": (0.15, "the row length of {a} matrix is {}", ""),
    "longest": (0.3, "the longest row of a matrix is {}", ""),
    "tied": (0.0, "the head is the embedding", "the head is a matrix apart"),
    "extras": (0.0, "the file has optional tensors (biases, scales, factors of RoPE)", "the file has no optional tensors"),
    "ragged": (0.0, "sequences of a batch differ in length", "all sequences are as long"),
    "first_id": (0.0, "the prompt has the id 0", "the prompt has no id 0"),
    "last_id": (0.0, "the prompt has the last id of the vocabulary", "the prompt has not the last id of the vocabulary"),
    "alike": (0.0, "all ids of the prompt are equal", "the prompt's ids differ"),
    "chunked": (-0.05, "the prompt comes in chunks", "the prompt comes in one piece"),
    "windowed": (0.0, "there is a window", "there is no window"),
    "padded": (0.2, "the sequence is shorter than another one of its batch", "no sequence of the batch is longer"),
    "partly": (0.1, "a part of each head is rotated", "whole heads are rotated"),
    "biased": (0.1, "the model has biases", "the model has no biases"),
}
"""How far-fetched a statement about each fact is, and its words; of what is so or not, those for yes and for no."""

FACTS |= {
    f"split {x}": (0.3, f"the threads divide {words} evenly", f"the threads do not divide {words} evenly") for x, words in _SPLIT.items()
}
FACTS |= {
    f"more {x}": (0.2, f"there are more threads than {words}", f"there are no more threads than {words}")
    for x, words in (("heads", "heads"), ("kv_heads", "key heads"), ("used", "experts that a token takes"))
}
FACTS |= CALLS

_POWERS = [1 << n for n in range(20)]
_BOUNDS = 6  # at each end, of a number of calls
_STEPS = (2, 3, 4, 8, 16, 32, 64, 128, 256)
_SHAPES = ("width", "ffn", "heads", "kv_heads", "group", "head_dim", "vocab", "rope_width", "experts", "threads")
_ENDS = ("highest", "beyond", "longest")  # facts of which bounds alone are said: another number is nearly always an exception


def calls_of(case: Case, length: int) -> list[tuple[int, int]]:
    """The first position of each call of a sequence, and the one behind its last: the prefix and the rest, each in chunks."""
    parts = [(start, end) for start, end in ((0, case.prefix), (case.prefix, length)) if end > start]
    return [(i, min(i + (case.chunk or end), end)) for start, end in parts for i in range(start, end, case.chunk or end)]


@lru_cache(1 << 12)
def facts_of(case: Case, row: int = 0, until: int = CONTEXT, since: int = 0) -> Facts:
    """All that a condition may be about, of one sequence. Of its calls are those that begin at `since` to `until`."""
    length, heads, traits = lengths_of(case)[row], case.kv_heads * case.group, FAMILIES[case.family]
    ids, calls = tokens_of(case)[row], calls_of(case, length)
    q_width = heads * case.head_dim
    columns = {"heads": heads, "kv_heads": case.kv_heads, "width": case.width, "ffn": case.ffn, "vocab": case.vocab}
    columns["rows"] = gcd(q_width, case.kv_heads * case.head_dim, case.width, case.ffn, case.vocab)
    facts = {name: getattr(case, name) for name in FIELDS if name not in ("seed", "tokens")} | {
        "heads": heads,
        "length": length,
        "row": row,
        "pieces": len(calls),
        "rows": gcd(case.width, q_width, case.ffn),
        "longest": max(case.width, q_width, case.ffn),
        "biased": bool(traits.biases or (case.extras and traits.optional_biases)),
        "first_id": case.tokens == "first",
        "last_id": case.tokens == "last",
        "highest": int(ids.max()),
        "alike": int(ids.min()) == int(ids.max()),
        "chunked": 0 < case.chunk < length - case.prefix,
        "windowed": case.window > 0,
        "padded": length < case.length,
        "partly": 0 < case.rope_width < case.head_dim,
        "more heads": case.threads > heads,
        "more kv_heads": case.threads > case.kv_heads,
        "more used": case.threads > case.experts_used,
    }
    facts |= {f"split {x}": n % case.threads == 0 for x, n in columns.items()}
    several: dict[str, tuple[Any, ...]] = {name: (value,) for name, value in facts.items()}
    several |= {name: (facts[name] or np.nan,) for name in ("window", "chunk")}
    return several | _facts_of_calls(case, [call for call in calls if since <= call[0] <= until])


def _facts_of_calls(case: Case, calls: Sequence[tuple[int, int]]) -> dict[str, tuple[Any, ...]]:
    starts, ends = (tuple(some) for some in zip(*calls, strict=True))
    counts, window = tuple(end - start for start, end in calls), case.window or np.nan
    facts: dict[str, tuple[Any, ...]] = {
        "calls": counts,
        "starts": starts,
        "keys": ends,
        "beyond": tuple(end - window for end in ends),
        "windows": tuple((end - 1) // window for end in ends),
        "cached": tuple(start > 0 for start in starts),
        "own": tuple(start >= case.prefix for start in starts),
        "cut": tuple(count < case.chunk for count in counts),
        "overlong": tuple(count > window for count in counts),
        "more tokens": tuple(case.threads > count for count in counts),
        "more experts": tuple(case.experts > count for count in counts),
    }
    return facts | {f"crosses {n}": tuple(start // n < (end - 1) // n for start, end in calls) for n in _TILES}


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
            kind = object if any(isinstance(some[0], str) for some in values[:1]) else float
            flat = np.array([x for some in values for x in some], kind)
            self._columns[name] = flat if name in CALLS else np.repeat(flat, self.counts)
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
    gap: Any = field(default=None, compare=False)  # the nearest value on the other side of a bound that was tried

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
        return 1 + FACTS[self.fact][0] + form

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
    _, words, otherwise = FACTS[fact]
    first = atoms[0]
    if otherwise:
        return words if first.low else otherwise
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
    if FACTS[fact][2]:
        yield from (Atom(fact, x, x) for x in (False, True))
        return
    if bad.dtype == object:
        names = dict.fromkeys(bad)
        yield from (Atom(fact, x, x) for x in names if len(names) == 1 or fact in CALLS)
        yield from (Atom(fact, x, x, no=True) for x in dict.fromkeys(good) if x not in names)
        return
    values, tried = _numbers(bad), _numbers(good)
    if fact not in (*_ENDS, "rows"):
        yield from (Atom(fact, x, x, no=True) for x in tried if x not in values)
        yield from (Atom(fact, x, x) for x in values)
    if fact != "rows" and not np.isnan(bad).any():
        low, high = np.maximum.reduceat(bad, failing.begins).min(), np.minimum.reduceat(bad, failing.begins).max()
        for x in [x for x in values if x <= low][-_BOUNDS:]:
            if below := [y for y in tried if y < x]:
                yield Atom(fact, low=x, gap=max(below))
        for x in [x for x in values if x >= high][:_BOUNDS]:
            if above := [y for y in tried if y > x]:
                yield Atom(fact, high=x, gap=min(above))
    if fact not in _ENDS and all(isinstance(x, int) for x in values):
        yield from (Atom(fact, power=True, no=no) for no in (False, True) if fact in _SHAPES)
        yield from (Atom(fact, step=step, rest=rest) for step in _STEPS for rest in ((None, 0, 1) if step >= 4 else (None, 0)))


def _numbers(column: NDArray) -> list[Any]:
    return [int(x) if x == int(x) else float(x) for x in np.unique(column[~np.isnan(column)])]


def in_words(case: Case) -> str:
    """A case in words: what makes it other than the plainest, and its sizes."""
    c, plural = case, lambda n, word: f"{n} {word}{'s' * (n != 1)}"
    heads = plural(c.kv_heads * c.group, "head")
    if c.group > 1:
        heads += f" that share {plural(c.kv_heads, 'key head')}"
    parts = [f"{c.family}", plural(c.layers, "layer"), f"width {c.width}", f"{heads} of width {c.head_dim}", f"feed-forward {c.ffn}"]
    parts += [f"vocabulary {c.vocab}", c.weights]
    parts += [f"{c.table} embedding"] if c.table != "float32" else []
    parts += ["tied head"] if c.tied else []
    parts += ["optional tensors"] if c.extras else []
    parts += [f"window {c.window}"] if c.window else []
    parts += [f"{c.rope_width} numbers of a head rotated"] if c.rope_width else []
    parts += [f"{plural(c.experts, 'expert')}, {c.experts_used} of them used"] if c.experts else []
    parts += [f"RoPE base {c.rope_base:g}"] if c.rope_base != Case().rope_base else []
    parts += [f"eps {c.eps:g}"] if c.eps != Case().eps else []
    lengths = lengths_of(c)
    call = (
        plural(c.length, "token")
        if c.batch == 1
        else f"{c.batch} sequences of {', '.join(map(str, lengths))} tokens"
        if c.ragged
        else f"{c.batch} sequences of {plural(c.length, 'token')}"
    )
    call += f" in chunks of {c.chunk}" if c.chunk else " in one prefill"
    call += f" behind a reused prefix of {c.prefix}" if c.prefix else ""
    call += f" on {c.threads} threads" if c.threads > 1 else ""
    call += {"inner": "", "first": ", some ids 0", "last": ", some ids the last", "alike": ", all ids equal"}[c.tokens]
    return ", ".join(parts) + ", " + call


def positions_in_words(bad: Sequence[tuple[tuple[int, int], ...]], cases: Sequence[Case], told: Collection[str]) -> str:
    """Where all failing runs are wrong, in words; empty where they have nothing in common. told: the facts that the condition is about."""
    if not bad or not all(bad):
        return ""
    parts = []
    firsts = [min(p for _, p in places) for places in bad]
    sequences = {b for places in bad for b, _ in places}
    if "row" not in told and all(case.batch > 1 for case in cases) and 0 not in sequences:
        parts.append("in sequences behind the first")
    if len(set(firsts)) == 1 and firsts[0] > 0:
        parts.append(f"at positions from {firsts[0]} on")
    elif all({p for _, p in places} == {c.length - 1} for places, c in zip(bad, cases, strict=True)) and min(c.length for c in cases) > 1:
        parts.append("at the last position alone")
    return ", ".join(parts)
