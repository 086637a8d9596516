"""Edits of a result alone: what was done to the right numbers, whatever operation gives them. No operation is computed again."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ... import spec
from ..edits.expression import Node, constant, tensor, value_of
from ..edits.kinds import Family, families
from ..edits.weights import in_fewer_bits
from ..graph import EMBEDDING, LOGITS, TOKENS
from ..mistakes.search import nearest_number
from .wrong import Array, Wrong

_ENOUGH = 10**5  # elements by which edits are chosen
_STEPS = 44  # of a golden section: 1e-9 of an interval of the grid
_AMOUNTS = tuple(np.geomspace(0.01, 100, 17))


def edited(wrong: Wrong) -> str | None:
    """The edit of the right numbers that gives theirs: a rounding, a limit, a sampler, a number sought where it has one."""
    some, result = wrong.first(max(1, _ENOUGH // wrong.theirs.shape[1])), tensor(wrong.key)

    def computed(part: Wrong, tree: Node) -> Array:
        return value_of(tree, lambda key: part.tensors[TOKENS] if key == TOKENS else part.value, len(part.value))

    def accounts(tree: Node) -> bool:
        return some.accounts(computed(some, tree)) and wrong.accounts(computed(wrong, tree))

    def error(family: Family | None, number: float) -> float:
        tree = result if family is None else family.of(number)
        left = float(((computed(some, tree) - some.theirs) ** 2).sum())
        return left if np.isfinite(left) else np.inf

    with np.errstate(all="ignore"):
        for words, tree in _edits(wrong, result):
            if accounts(tree):
                return words
        for family in _families(wrong, result):
            number = nearest_number(partial(error, family), family.grid, _STEPS, error(None, 0))
            if number is not None and accounts(family.of(number)):
                return family.words.format(number=number)
    return None


def _edits(wrong: Wrong, result: Node) -> Iterator[tuple[str, Node]]:
    for kind in ("e4m3", "e5m2", "int8 with one scale"):
        yield f"its numbers are rounded to {kind}", Node("rounded", (result,), what=kind)
    for words, narrow in in_fewer_bits(wrong.theirs.shape[1]):
        yield f"its numbers are {words}", Node("opaque", (result,), what=narrow)
    yield "negative numbers are set to 0", Node("at least", (result, constant("0", 0.0)))
    if wrong.key == LOGITS:
        largest = Node("reduction", (result,), what="largest number")
        yield (
            "the largest logit of each position is subtracted from all of them, as before a softmax",
            Node("difference", (result, largest)),
        )
        probabilities = Node("opaque", (result,), what=spec.softmax)
        yield "they are probabilities: the softmax of the logits", probabilities
        yield "they are logarithms of probabilities: the log-softmax of the logits", Node("opaque", (probabilities,), what=np.log)


def _families(wrong: Wrong, result: Node) -> Iterator[Family]:
    for kind in ("limits", "caps"):
        yield from families(kind, result)
    if wrong.key == EMBEDDING:
        for words, table in _TABLES.items():
            yield Family(f"{words} of positions are added, times {{number:.4g}}", _AMOUNTS, _with(result, Node("positions"), table))
    if wrong.key == LOGITS and TOKENS in wrong.tensors:
        for words, penalty in _PENALTIES.items():
            for which, whole in (("occurred up to each position", False), ("occur in the sequence", True)):
                said = f"a {words} penalty of {{number:.4g}} is on the logits of tokens that {which}: logits before a sampler are expected"
                yield Family(said, _AMOUNTS, _with(result, tensor(TOKENS), _of_counts(penalty, whole)))


def _with(result: Node, other: Node, function: Callable[[Array, Array, float], Array]) -> Callable[[float], Node]:
    """The expressions of a function of the result, something else and a number."""
    return lambda number: Node("opaque", (result, other), what=lambda x, y: function(x, y, number))


def _sines(x: Array, positions: Array, factor: float) -> Array:
    half = x.shape[1] // 2
    angles = np.multiply.outer(positions, 10000.0 ** (-np.arange(half) / half))
    return x + factor * np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _in_turn(x: Array, positions: Array, factor: float) -> Array:
    turned = _sines(0 * x, positions, factor).reshape(len(x), 2, -1)
    return x + turned.swapaxes(1, 2).reshape(x.shape)


_TABLES = {"sines and cosines": _sines, "sines and cosines in turn": _in_turn}
"""Tables of the first transformers."""
_PENALTIES: dict[str, Callable[[Array, Array, float], Array]] = {
    "repetition": lambda x, count, rate: np.where(count > 0, np.where(x > 0, x / rate, x * rate), x),
    "presence": lambda x, count, amount: x - amount * (count > 0),
    "frequency": lambda x, count, amount: x - amount * count,
}
"""What samplers do to the logits of tokens, by how often these are in the sequence, and a number."""


def _of_counts(penalty: Callable[[Array, Array, float], Array], whole: bool) -> Callable[[Array, Array, float], Array]:
    def changed(x: Array, ids: Array, number: float) -> Array:
        count = np.zeros(x.shape)
        for t, token in enumerate(ids.astype(np.intp)):
            count[0 if whole else t :, token] += 1
        return penalty(x, count, number)

    return changed
