"""What can be said of a case: its facts, statements about them that some cases meet and others do not, and both in words."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from ..model.families import FAMILIES
from ..testing.space import FIELDS, Case, lengths_of, tokens_of

Facts = Mapping[str, Any]

NOUNS = {
    "family": ("the family", 0.0),
    "weights": ("the type of the matrices", 0.0),
    "table": ("the type of the embedding", 0.0),
    "layers": ("the number of layers", 0.0),
    "width": ("the width", 0.0),
    "ffn": ("the feed-forward width", 0.0),
    "heads": ("the number of heads", 0.15),
    "kv_heads": ("the number of key heads", 0.0),
    "group": ("the number of heads that share a key head", 0.0),
    "head_dim": ("the head width", 0.0),
    "q_width": ("the width of all heads", 0.35),
    "vocab": ("the vocabulary", 0.0),
    "window": ("the window", 0.0),
    "rope_width": ("the rotated part of a head", 0.0),
    "experts": ("the number of experts", 0.0),
    "rope_base": ("the base of RoPE", 0.0),
    "eps": ("the norms' epsilon", 0.0),
    "length": ("the prompt's length", 0.0),
    "row": ("the place in the batch", 0.1),
    "batch": ("the number of sequences", 0.0),
    "chunk": ("the chunk", 0.0),
    "chunks": ("the number of chunks", 0.35),
    "prefix": ("the reused prefix", 0.0),
    "threads": ("the number of threads", 0.0),
    "later": ("the number of tokens behind the prefix", 0.3),
    "last_chunk": ("the last chunk", 0.5),
    "rows": ("the rows of", 0.15),
    "longest": ("rows of", 0.25),
}
"""Facts that are numbers or names, in words, and how far-fetched a statement about them is."""

FLAGS = {
    "tied": ("the head is the embedding", "the head is a matrix apart", 0.0),
    "extras": ("the file has optional tensors (biases, scales, factors of RoPE)", "the file has no optional tensors", 0.0),
    "ragged": ("sequences of a batch differ in length", "all sequences are as long", 0.0),
    "first_id": ("the prompt has the id 0", "the prompt has no id 0", 0.0),
    "last_id": ("the prompt has the last id of the vocabulary", "the prompt has not the last id of the vocabulary", 0.0),
    "alike": ("all ids of the prompt are equal", "the prompt's ids differ", 0.0),
    "chunked": ("the prompt comes in chunks", "the prompt comes in one piece", -0.05),
    "cut": ("the last chunk is not full", "all chunks are full", 0.1),
    "beyond": ("the prompt is longer than the window", "the prompt fits the window", 0.0),
    "padded": ("the sequence is shorter than another one of its batch", "no sequence of the batch is longer", 0.2),
    "shared": ("the threads divide the heads evenly", "the threads do not divide the heads evenly", 0.3),
    "broad": ("the feed-forward is wider than the model", "the feed-forward is not wider than the model", 0.3),
    "biased": ("the model has biases", "the model has no biases", 0.1),
    "cached": ("keys of an earlier call are seen", "all keys are of one call", 0.05),
    "wide": ("the heads together are as wide as the model", "the heads together are not as wide as the model", 0.4),
}
"""Facts that are so or not, both in words, and how far-fetched they are."""

_STEPS = (2, 3, 4, 8, 16, 32, 64, 128, 256)
_SIGNS = {"rows": ("mod", "odd"), "longest": (">=", "<=")}
"""What is said of facts about all matrices: their rows have a greatest common divisor, and a longest one."""


def facts_of(case: Case, row: int = 0) -> Facts:
    """All that a condition may be about, of one sequence of the call."""
    facts = {name: getattr(case, name) for name in FIELDS if name not in ("seed", "tokens")}
    lengths = lengths_of(case)
    length = lengths[row]
    later = length - case.prefix
    chunk = min(case.chunk, later) or later
    inputs = (case.width, case.kv_heads * case.group * case.head_dim, case.ffn)  # the lengths of all matrices' rows
    traits = FAMILIES[case.family]
    return facts | {
        "rows": gcd(*inputs),
        "longest": max(inputs),
        "biased": bool(traits.biases or (case.extras and traits.optional_biases)),
        "cached": later > chunk or case.prefix > 0,
        "heads": case.kv_heads * case.group,
        "q_width": case.kv_heads * case.group * case.head_dim,
        "length": length,
        "row": row,
        "later": later,
        "chunk": case.chunk or None,
        "chunks": -(-later // chunk),
        "last_chunk": (later - 1) % chunk + 1,
        "first_id": case.tokens == "first",
        "last_id": case.tokens == "last",
        # of a few ids all may be equal by chance
        "alike": case.tokens == "alike" or length == 1 or (length <= 8 and len({*tokens_of(case)[row].tolist()}) == 1),
        "chunked": later > chunk,
        "cut": later % chunk > 0,
        "beyond": 0 < case.window < length,
        "padded": length < case.length,
        "shared": case.kv_heads * case.group % case.threads == 0,
        "broad": case.ffn > case.width,
        "wide": case.kv_heads * case.group * case.head_dim == case.width,
        "window": case.window or None,
    }


@dataclass(frozen=True)
class Atom:
    """A statement about one fact of a sequence."""

    fact: str
    sign: str  # "is", "not", ">=", "<=", "mod" (a remainder), "odd" (not a multiple), "power" (of 2, or not)
    value: Any
    step: int = 0
    gap: Any = None  # of ">=" and "<=": the nearest value on the other side that was tried

    def holds(self, facts: Facts) -> bool:
        x = facts[self.fact]
        if self.sign in ("is", "not"):
            return (x == self.value) == (self.sign == "is")
        if x is None:
            return False
        if self.sign in (">=", "<="):
            return x >= self.value if self.sign == ">=" else x <= self.value
        if self.sign == "power":
            return (x & (x - 1) == 0) == self.value
        return (x % self.step == self.value) == (self.sign == "mod")

    @property
    def cost(self) -> float:
        """How far-fetched it is: of statements that fit alike, the cheapest is believed."""
        number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        sign = {"is": 0.1 * number, ">=": 0.05, "<=": 0.1, "not": 0.3}
        return (
            1
            + (NOUNS.get(self.fact) or FLAGS[self.fact])[-1]
            + sign.get(self.sign, 0.25 + 0.1 * (self.step in (2, 3)) + 0.2 * (self.sign == "mod" and self.value > 0))
        )

    def __str__(self) -> str:
        fact, value = self.fact, self.value
        if fact in FLAGS:
            yes, no, _ = FLAGS[fact]
            return yes if value == (self.sign == "is") else no
        noun, _ = NOUNS[fact]
        if fact == "rows":
            return (
                f"{noun} all matrices are multiples of {self.step}"
                if self.sign == "mod"
                else f"{noun} a matrix are no multiple of {self.step}"
            )
        if fact == "longest":
            return f"a matrix has {noun} at least {value}" if self.sign == ">=" else f"all matrices have {noun} at most {value}"
        if value is None:
            present = {"window": ("there is no window", "there is a window"), "chunk": FLAGS["chunked"][1::-1]}[fact]
            return present[self.sign == "not"]
        if self.sign == "mod":
            return f"{noun} is {f'{value} more than ' if value else ''}a multiple of {self.step}"
        if self.sign == "power":
            return f"{noun} is {'a' if value else 'no'} power of 2"
        if self.sign == "odd":
            return f"{noun} is no multiple of {self.step}"
        if fact == "row" and (self.sign, value) in ((">=", 1), ("not", 0)):
            return "the sequence is not the first of its batch"
        if fact == "length" and self.sign in (">=", "<="):
            more = self.sign == ">="
            return f"the prompt is {'longer' if more else 'shorter'} than {value + (-1 if more else 1)} tokens"
        words = {"is": "", "not": "not ", ">=": "at least ", "<=": "at most "}[self.sign]
        gap = f" (right at {self.gap})" if self.gap is not None and not _adjacent(self.value, self.gap) else ""
        return f"{noun} is {words}{value}{gap}"


def _adjacent(a: Any, b: Any) -> bool:
    return isinstance(a, int) and isinstance(b, int) and abs(a - b) <= 1


def atoms_of(failing: Sequence[Facts], passing: Sequence[Facts]) -> list[Atom]:
    """Every statement that all failing cases meet, and some passing case does not."""
    every: list[Atom] = []
    for fact in failing[0]:
        bad, good = [f[fact] for f in failing], [f[fact] for f in passing]
        values = set(bad)
        if len(values) == 1:
            every.append(Atom(fact, "is", bad[0]))
        every += [Atom(fact, "not", x) for x in dict.fromkeys(good) if x not in values]
        if fact in FLAGS or any(isinstance(x, str | bool) for x in values) or None in values:
            continue
        others = [x for x in good if x is not None]
        low, high = min(values), max(values)
        if below := [x for x in others if x < low]:
            every.append(Atom(fact, ">=", low, gap=max(below)))
        if above := [x for x in others if x > high]:
            every.append(Atom(fact, "<=", high, gap=min(above)))
        if isinstance(low, int):
            powers = {x & (x - 1) == 0 for x in values}
            every += [Atom(fact, "power", powers.pop())] if len(powers) == 1 and min(values) > 0 else []
            for step in _STEPS:
                left = {x % step for x in values}
                if left == {0} or (left == {1} and step >= 4):
                    every.append(Atom(fact, "mod", left.pop(), step))
                elif 0 not in left:
                    every.append(Atom(fact, "odd", 0, step))
    return [atom for atom in every if atom.sign in _SIGNS.get(atom.fact, (atom.sign,))]


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
    parts += [plural(c.experts, "expert")] if c.experts else []
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


def table(facts: Sequence[Facts], atoms: Sequence[Atom]) -> np.ndarray:
    """Which statements hold of which cases: [atoms, cases]."""
    return np.array([[atom.holds(f) for f in facts] for atom in atoms], bool).reshape(len(atoms), len(facts))
