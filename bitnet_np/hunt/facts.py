"""What can be said of a case: its facts, statements about them that some cases meet and others do not, and both in words."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.families import FAMILIES
from ..testing.space import FIELDS, Case, lengths_of, tokens_of

Facts = Mapping[str, tuple[Any, ...]]
"""By name: one value, or those of all calls or matrices; none where there is no such thing, as no window."""

_SPLIT = {
    "heads": "the heads",
    "kv_heads": "the key heads",
    "width": "the width",
    "ffn": "the feed-forward width",
    "vocab": "the vocabulary",
    "rows": "the rows of a matrix",
}
_SHARED = {"heads": "heads", "kv_heads": "key heads", "tokens": "tokens in a call"}

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
    "q_width": (0.35, "the width of all heads is {}", ""),
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
    "chunks": (0.35, "the number of chunks is {}", ""),
    "prefix": (0.0, "the reused prefix is {}", ""),
    "threads": (0.0, "the number of threads is {}", ""),
    "pieces": (0.3, "the number of calls is {}", ""),
    "windows": (0.3, "the number of whole windows before the last token is {}", ""),
    "later": (0.3, "the number of tokens behind the prefix is {}", ""),
    "highest": (0.45, "the highest id of the prompt is {}", ""),
    "calls": (0.15, "the length of {a} call is {}", ""),
    "later_calls": (0.25, "the length of {a} later call is {}", ""),
    "starts": (0.3, "the first position of {a} later call is {}", ""),
    "rows": (0.15, "the row length of {a} matrix is {}", ""),
    "tied": (0.0, "the head is the embedding", "the head is a matrix apart"),
    "extras": (0.0, "the file has optional tensors (biases, scales, factors of RoPE)", "the file has no optional tensors"),
    "ragged": (0.0, "sequences of a batch differ in length", "all sequences are as long"),
    "first_id": (0.0, "the prompt has the id 0", "the prompt has no id 0"),
    "last_id": (0.0, "the prompt has the last id of the vocabulary", "the prompt has not the last id of the vocabulary"),
    "alike": (0.0, "all ids of the prompt are equal", "the prompt's ids differ"),
    "chunked": (-0.05, "the prompt comes in chunks", "the prompt comes in one piece"),
    "cut": (0.1, "the last chunk is not full", "all chunks are full"),
    "windowed": (0.0, "there is a window", "there is no window"),
    "beyond": (0.0, "the prompt is longer than the window", "the prompt fits the window"),
    "overlong": (0.1, "a call is longer than the window", "no call is longer than the window"),
    "padded": (0.2, "the sequence is shorter than another one of its batch", "no sequence of the batch is longer"),
    "broad": (0.3, "the feed-forward is wider than the model", "the feed-forward is not wider than the model"),
    "biased": (0.1, "the model has biases", "the model has no biases"),
    "cached": (0.05, "keys of an earlier call are seen", "all keys are of one call"),
    "wide": (0.4, "the heads together are as wide as the model", "the heads together are not as wide as the model"),
}
"""How far-fetched a statement about each fact is, and its words; of what is so or not, those for yes and for no."""

FACTS |= {
    f"split {x}": (0.3, f"the threads divide {words} evenly", f"the threads do not divide {words} evenly") for x, words in _SPLIT.items()
}
FACTS |= {
    f"more {x}": (0.2, f"there are more threads than {words}", f"there are no more threads than {words}") for x, words in _SHARED.items()
}

_POWERS = [1 << n for n in range(20)]
_MOST = 40  # numbers of which ranges begin
_SETS = ("calls", "later_calls", "starts", "rows")
_STEPS = (2, 3, 4, 8, 16, 32, 64, 128, 256)


def calls_of(case: Case, length: int) -> list[tuple[int, int]]:
    """The first position of each call of a sequence, and the one behind its last: the prefix and the rest, each in chunks."""
    parts = [(start, end) for start, end in ((0, case.prefix), (case.prefix, length)) if end > start]
    return [(i, min(i + (case.chunk or end), end)) for start, end in parts for i in range(start, end, case.chunk or end)]


@lru_cache(1 << 14)
def facts_of(case: Case, row: int = 0) -> Facts:
    """All that a condition may be about, of one sequence of the call."""
    length, heads, traits = lengths_of(case)[row], case.kv_heads * case.group, FAMILIES[case.family]
    ids = tokens_of(case)[row]
    later, q_width, calls = length - case.prefix, heads * case.head_dim, calls_of(case, length)
    chunk = min(case.chunk, later) or later
    facts = {name: getattr(case, name) for name in FIELDS if name not in ("seed", "tokens")} | {
        "heads": heads,
        "q_width": q_width,
        "length": length,
        "row": row,
        "later": later,
        "chunks": -(-later // chunk),
        "pieces": len(calls),
        "biased": bool(traits.biases or (case.extras and traits.optional_biases)),
        "cached": later > chunk or case.prefix > 0,
        "first_id": case.tokens == "first",
        "last_id": case.tokens == "last",
        "highest": int(ids.max()),
        "alike": int(ids.min()) == int(ids.max()),
        "chunked": later > chunk,
        "cut": later % chunk > 0,
        "windowed": case.window > 0,
        "beyond": 0 < case.window < length,
        "overlong": 0 < case.window < max(end - start for start, end in calls),
        "padded": length < case.length,
        "broad": case.ffn > case.width,
        "wide": q_width == case.width,
    }
    rows = gcd(q_width, case.kv_heads * case.head_dim, case.width, case.ffn, case.vocab)
    columns = {"heads": heads, "kv_heads": case.kv_heads, "width": case.width, "ffn": case.ffn, "vocab": case.vocab, "rows": rows}
    facts |= {f"split {x}": n % case.threads == 0 for x, n in columns.items()}
    facts |= {
        f"more {x}": case.threads > n
        for x, n in (("heads", heads), ("kv_heads", case.kv_heads), ("tokens", min(end - start for start, end in calls)))
    }
    several = {
        "calls": {end - start for start, end in calls},
        "later_calls": {end - start for start, end in calls[1:]},
        "starts": {start for start, _ in calls[1:]},
        "rows": {case.width, q_width, case.ffn},
        "window": {case.window} - {0},
        "windows": {(length - 1) // case.window} if case.window else set(),
        "chunk": {case.chunk} - {0},
    }
    return {name: (value,) for name, value in facts.items()} | {name: tuple(sorted(values)) for name, values in several.items()}


@dataclass(frozen=True)
class Atom:
    """A statement about one fact of a sequence: that a value of it lies in a range and leaves a remainder, or that none does."""

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

    def among(self, values: NDArray) -> NDArray[np.bool_]:  # [cases, values of each] -> [cases]
        fits = (values >= self.low) & (values <= self.high)
        if self.step:
            left = np.where(fits, values, 0) % self.step
            fits &= left == self.rest if self.rest is not None else left > 0
        if self.power:
            fits &= np.isin(values, _POWERS)
        return fits.any(axis=1) != self.no

    def holds(self, facts: Facts) -> bool:
        return bool(self.among(_column([facts], self.fact))[0])

    @property
    def single(self) -> bool:
        """Whether it says that there is one number above 1."""
        return type(self.low) is int and 1 < self.low == self.high and not self.no

    def divides(self, values: tuple[Any, ...]) -> bool:
        """Whether these are multiples of its one number."""
        return self.single and all(x > 0 and x % self.low == 0 for x in values)

    @property
    def cost(self) -> float:
        """How far-fetched it is: of statements that fit alike, the cheapest is believed."""
        if self.step or self.power:
            bound = 0.0 if self.low == -inf else 0.1 if self.low == self.step + 1 else 0.3
            form = 0.25 + 0.1 * (self.step in (2, 3) or self.power) + 0.2 * bool(self.rest) + bound
        elif self.low == self.high:
            form = 0.3 if self.no else 0.1 * (not isinstance(self.low, str | bool))
        else:
            form = 0.05 if self.high == inf else 0.1 if self.low == -inf else 0.35
        return 1 + FACTS[self.fact][0] + form

    def __str__(self) -> str:
        _, words, otherwise = FACTS[self.fact]
        if otherwise:
            return words if self.low != self.no else otherwise
        if self.fact == "row" and (self.low, self.no) in ((1, False), (0, True)):
            return "the sequence is not the first of its batch"
        if self.fact == "length" and not self.step and (self.low == -inf) != (self.high == inf):
            return f"the prompt is {f'longer than {self.low - 1}' if self.high == inf else f'shorter than {self.high + 1}'} tokens"
        every = self.no and self.step > 0 and self.rest is None  # none that is no multiple: each is one
        parts = [_range(self.low, self.high)] if (self.low, self.high) != (-inf, inf) else []
        if self.step:
            kind = f"{self.rest} more than a" if self.rest else "a" if every or self.rest == 0 else "no"
            parts.append(f"{kind} multiple of {self.step}")
        parts += ["a power of 2"] * self.power
        not_ = "not " * (self.no and not every and self.fact not in _SETS)
        near = self.gap is None or any(isinstance(x, int) and abs(x - self.gap) <= 1 for x in (self.low, self.high))
        gap = "" if near else f" (right at {self.gap})"
        return words.format(not_ + " and ".join(parts), a="every" if every else "no" if self.no else "a") + gap


def _range(low: Any, high: Any) -> str:
    if low == high:
        return f"{low}"
    return f"at most {high}" if low == -inf else f"at least {low}" if high == inf else f"{low} to {high}"


def _column(facts: Sequence[Facts], name: str) -> NDArray:  # [cases, values of each]: names, or numbers and NaN behind them
    values = [one[name] for one in facts]
    if any(isinstance(x, str) for x in values[0]):
        return np.array(values, object)
    column = np.full((len(values), max(1, *map(len, values))), np.nan)
    for row, some in zip(column, values, strict=True):
        row[: len(some)] = some
    return column


def table(facts: Sequence[Facts], atoms: Sequence[Atom]) -> NDArray[np.bool_]:
    """Which statements hold of which cases: [atoms, cases]."""
    columns = {name: _column(facts, name) for name in {atom.fact for atom in atoms}}
    return np.array([atom.among(columns[atom.fact]) for atom in atoms], bool).reshape(len(atoms), len(facts))


def atoms_of(failing: Sequence[Facts], passing: Sequence[Facts]) -> list[Atom]:
    """Statements that all failing cases meet, of the kinds that some passing case may not meet."""
    return [atom for name in failing[0] for atom in _about(name, _column(failing, name), _column(passing, name))]


def _about(fact: str, bad: NDArray, good: NDArray) -> Iterator[Atom]:
    if bad.dtype == object or FACTS[fact][2]:
        names, others = ([x if bad.dtype == object else bool(x) for x in dict.fromkeys(some.ravel())] for some in (bad, good))
        if len(names) == 1:
            yield Atom(fact, names[0], names[0])
        yield from (Atom(fact, x, x, no=True) for x in others if x not in names)
        return
    values, tried = _numbers(bad), _numbers(good)
    if fact != "highest":  # which has so many values that one is nearly always an exception
        yield from (Atom(fact, x, x, no=True) for x in tried if x not in values)
    if np.isnan(bad).all(axis=1).any():
        return
    if fact != "highest":
        yield from (Atom(fact, x, x) for x in values if (bad == x).any(axis=1).all())
    low, high = np.nanmax(bad, axis=1).min(), np.nanmin(bad, axis=1).max()
    if below := [x for x in tried if x < low]:
        yield Atom(fact, low=_number(low), gap=max(below))
    if above := [x for x in tried if x > high]:
        yield Atom(fact, high=_number(high), gap=min(above))
    if fact == "highest":
        return
    if not (np.mod(values, 1) == 0).all():
        return
    powers = np.isin(bad, _POWERS)
    yield from [Atom(fact, power=True)] * bool(powers.any(axis=1).all()) + [Atom(fact, power=True, no=True)] * (not powers.any())
    for step in _STEPS:
        left = bad % step
        odd = left > 0
        if not odd.any():
            yield Atom(fact, step=step, no=True)
        elif odd.any(axis=1).all():
            yield Atom(fact, step=step)
            yield from [Atom(fact, step=step, rest=1)] * bool(step >= 4 and (left == 1).any(axis=1).all())
            if fact in _SETS and (least := np.where(odd, bad, 0).max(axis=1).min()) > step:
                yield Atom(fact, low=_number(least), step=step)
        if fact in _SETS and odd.any() and (left == 0).any(axis=1).all():
            yield Atom(fact, step=step, rest=0)
    if fact in _SETS:
        ends = {_number(np.where(bad >= x, bad, inf).min(axis=1).max()): x for x in values[:_MOST] if x <= low}
        yield from (Atom(fact, x, end) for end, x in ends.items() if x < end < values[-1])
        yield Atom(fact, low=values[-1] + 1, no=True)


def _numbers(column: NDArray) -> list[Any]:
    return [_number(x) for x in np.unique(column[~np.isnan(column)])]


def _number(x: Any) -> Any:
    return int(x) if x == int(x) else float(x)


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
    elif all(c.chunk and f == c.prefix + c.chunk for c, f in zip(cases, firsts, strict=True)):
        parts.append("from the second chunk on")
    elif all({p for _, p in places} == {c.length - 1} for places, c in zip(bad, cases, strict=True)) and min(c.length for c in cases) > 1:
        parts.append("at the last position alone")
    return ", ".join(parts)
