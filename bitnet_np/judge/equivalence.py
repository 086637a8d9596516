"""Differences that change nothing: queries and keys or a token's experts in another order, and all positions later by the same number.

Scores are sums over the elements of a head, so queries and keys may be permuted alike, as between Meta's checkpoints (rotated pairs are
neighbours) and transformers' (they are half a head apart). RoPE's scores depend on differences of positions. The judge finds both in the
first layer, says so, and looks through them: it puts the elements of every layer in our order, and rotates by their positions. A token's
experts are added up, so that any order of them will do; ours is by falling logits.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..model.records import Config, Model, with_rope_of
from ..traces.points import POINTS, SLOTS, TOP_EXPERTS, Key
from .law.functions import Array, pairs

Tensors = Mapping[Key, NDArray]

QUERIES = tuple(point.name for point in POINTS if point.name.startswith("Qcur"))
KEYS = tuple(point.name for point in POINTS if point.name.startswith("Kcur"))
ROTATED = ("Qcur_rope", "Kcur_rope")
_NEAR = 0.1  # of the RMS of an element: what narrow types and flipped codes leave
_STARTS = 4096  # first positions tried at a time, to bound the memory


class Equivalent(NamedTuple):
    """What a dump differs in without being wrong."""

    tensors: dict[Key, NDArray]  # of the dump, with queries and keys in our order
    start: int  # the position of the first token
    notes: tuple[str, ...]  # the differences in words


def look_through(model: Model, ours: Tensors, theirs: dict[Key, NDArray]) -> Equivalent:
    """The differences of a dump that change nothing.

    ours, theirs: tensors [T, width] by name; of ours only the first layer's queries and keys are read.
    """
    tensors, notes = theirs, []
    order = _order(model.config, ours, theirs)
    if order is not None and _is_kept(model, ours, ordered := _in_our_order(model, theirs, order)):
        tensors = ordered
        notes.append("a head's elements are in another order in queries and keys alike: that changes no score, and is looked through")
    sorted_tensors = _with_sorted_experts(model, tensors)
    if sorted_tensors is not tensors:
        tensors = sorted_tensors
        notes.append("a token's experts are not in the order of their logits: that changes no sum but for roundings, and is looked through")
    start = _start(model, tensors)
    if start:
        length = len(tensors[Key("Kcur_rope", 0)])
        notes.append(f"positions are {start} to {start + length - 1}: that changes no score, and is looked through")
    return Equivalent(tensors, start, tuple(notes))


def _in_our_order(model: Model, theirs: Tensors, order: NDArray[np.intp]) -> dict[Key, NDArray]:
    """The tensors with the elements of heads of queries and keys in our order."""
    tensors, back = dict(theirs), np.argsort(order)
    for key in (key for key in theirs if key.name in (*QUERIES, *KEYS)):
        heads = theirs[key].reshape(len(theirs[key]), -1, model.config.head_dim)
        tensors[key] = np.ascontiguousarray(heads[..., back]).reshape(theirs[key].shape)
    return tensors


def _is_kept(model: Model, ours: Tensors, ordered: Tensors) -> bool:
    """Whether rotated queries or keys of the first layer have the same other order as those before: if neither, scores change."""
    both = [key for key in (Key(name, 0) for name in ROTATED) if key in ours and key in ordered]
    kept = [_alike(*(_by_head(model.config, x[key]) for x in (ours, ordered))) for key in both]
    return any(kept) or not both or _start(model, ordered) > 0


def _with_sorted_experts(model: Model, theirs: dict[Key, NDArray]) -> dict[Key, NDArray]:
    """The tensors with each token's experts by falling logits; the same object if they are."""
    tensors = theirs
    for n in range(len(model.layers)):
        chosen, logits = theirs.get(Key(TOP_EXPERTS, n)), theirs.get(Key("ffn_moe_logits", n))
        if chosen is None or logits is None:
            continue
        falling = -np.take_along_axis(logits, chosen.astype(np.intp), axis=1)
        if (np.diff(falling, axis=1) >= 0).all():
            continue
        order = np.argsort(falling, axis=1, kind="stable")
        for key in (Key(name, n) for name in (TOP_EXPERTS, *SLOTS)):
            if key in theirs:
                slots = theirs[key].reshape(*chosen.shape, -1)
                tensors = tensors | {key: np.take_along_axis(slots, order[:, :, None], axis=1).reshape(theirs[key].shape)}
    return tensors


def _by_head(config: Config, x: NDArray) -> Array:  # [T, width] -> [T, heads, K]
    return x.reshape(len(x), -1, config.head_dim).astype(np.float64)


def _order(config: Config, ours: Tensors, theirs: Tensors) -> NDArray[np.intp] | None:
    """The element of our heads that each element of theirs is, if queries and keys have the same other order."""
    pairs = []
    for names in (KEYS, QUERIES):
        key = next((Key(name, 0) for name in names if Key(name, 0) in theirs and Key(name, 0) in ours), None)
        if key is None:
            return None
        pairs.append((_by_head(config, ours[key]), _by_head(config, theirs[key])))
    (a, b), (q, p) = pairs
    if len(a) * a.shape[1] < 4 or _alike(a, b):
        return None
    columns, others = (x.reshape(-1, config.head_dim) for x in (a, b))
    away = ((columns[:, :, None] - others[:, None, :]) ** 2).sum(axis=0)  # [ours, theirs]
    order = away.argmin(axis=0)
    if len(set(order)) < len(order) or not _alike(a[..., order], b) or not _alike(q[..., order], p):
        return None
    return order


def _alike(a: Array, b: Array) -> bool:
    """Whether each element of a head is the same, but for roundings."""
    return bool((((a - b) ** 2).mean(axis=(0, 1)) <= _NEAR**2 * (a**2).mean(axis=(0, 1))).all())


def complex_pairs(config: Config, x: NDArray) -> NDArray[np.complex128]:
    """The rotated pairs of heads [n, heads * K] as complex numbers, [n, heads, J]: a rotation multiplies them."""
    heads = x.reshape(len(x), -1, config.head_dim).astype(np.float64)
    first, second = (heads[..., places] for places in pairs(config.rope, config.rope_pairs, config.head_dim))
    return first + 1j * second


def in_pairs(config: Config) -> NDArray[np.intp]:
    """The elements of a head, [K]: the first numbers of all rotated pairs, the second ones, and those that are not rotated."""
    return np.concatenate([*pairs(config.rope, config.rope_pairs, config.head_dim), np.arange(2 * config.rope_pairs, config.head_dim)])


def _start(model: Model, theirs: Tensors) -> int:
    """The position of the first token by which queries and keys of the first layer are rotated alike; 0 if they are not."""
    if model.config.rope == "none":
        return 0
    starts = set()
    for names in (QUERIES, KEYS):
        before = next((Key(name, 0) for name in names[1::-1] if Key(name, 0) in theirs), None)
        after = Key(names[2], 0)
        if before is None or after not in theirs:
            return 0
        starts.add(_rotated_from(model, theirs[before], theirs[after]))
    return starts.pop() if len(starts) == 1 else 0


def _rotated_from(model: Model, before: NDArray, after: NDArray) -> int:
    """The position of the first token, if all are rotated by positions in a row; else 0."""
    model = with_rope_of(model, 0)
    c = model.config
    x, y = (complex_pairs(c, a) for a in (before, after))
    frequency = model.rope_frequency.astype(np.float64)
    steps = np.exp(1j * np.multiply.outer(np.arange(len(x)), frequency))

    def fits(start: int) -> bool:
        right = c.rope_magnitude * x * (steps * np.exp(1j * start * frequency))[:, None]
        return bool((np.abs(y - right) ** 2).sum() <= _NEAR**2 / 100 * (np.abs(y) ** 2).sum())

    if fits(0):
        return 0
    turn = (y * x.conj() * steps.conj()[:, None]).sum(axis=(0, 1))  # [J]: what is left of the rotation, alike at all positions
    some = np.split(np.arange(c.context), range(_STARTS, c.context, _STARTS))
    likeness = [(turn * np.exp(-1j * np.multiply.outer(starts, frequency))).sum(axis=1).real for starts in some]
    start = int(np.concatenate(likeness).argmax())
    return start if fits(start) else 0
