"""What attention may read instead of its keys and values, as from a cache, and heads that come out in other places."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine import cache_types
from ...model.records import Config, with_rope_of
from ...traces.points import Key
from ..graph import Operation
from ..operations import score_scale
from ..roundings import NARROW
from .expression import Array, Node, nodes, replaced, tensor, with_nodes

Edits = Iterator[tuple[str, Node]]
Leaves = tuple[tuple[str, tuple[Node, ...]], ...]

_TURNS = (1, 2, 3, 4, 8, -1, -2, -3, -4, -8)  # positions
_TILES = (2, 4, 8, 16, 32, 64)  # keys
_FEW_HEADS = 16


def cached(place: Operation, tree: Node) -> Edits:
    """Keys and values of another layer, lost, or cached before they were rotated, of all tokens or for those of a later chunk."""
    if place.key.name != "kqv_out" or place.key.layer is None:
        return
    k, v = (next(node for node, _ in nodes(tree) if node.what == key) for key in place.inputs[1:])
    leaves: Leaves = (("keys and values", (k, v)), ("keys", (k,)), ("values", (v,)))
    for what, some in leaves:
        for n in range(len(place.model.layers)):
            if n != place.key.layer:
                other = {leaf: tensor(Key(leaf.what.name, n)) for leaf in some}
                yield f"{what} of layer {n} are read: the cache of another layer", with_nodes(tree, other)
        for b in place.borders:
            lost = {leaf: _changed(leaf, partial(_lost, b - 1)) for leaf in some}
            yield f"{what} of position {b - 1} are 0: a slot of the cache that was not written", with_nodes(tree, lost)
    for b in place.borders:
        for words, new in _pasts(place, k, v, b):
            yield words, Node("opaque", (tree, with_nodes(tree, new)), tree.noun, partial(_joined, b))


def _pasts(place: Operation, k: Node, v: Node, border: int) -> Iterator[tuple[str, Mapping[Node, Node]]]:
    """Yields what tokens behind a border may read instead of the keys and values before it, in words."""
    lost = {leaf: _changed(leaf, lambda x: np.where(np.arange(len(x))[:, None] < border, 0, x)) for leaf in (k, v)}
    yield f"keys and values before position {border} are 0 for tokens behind it: the cache of a later chunk is empty", lost
    if not k.what.name.endswith("_rope"):
        return
    is_normed = place.layer is not None and place.layer.attn_k_norm is not None
    raw = tensor(Key("Kcur_normed" if is_normed else "Kcur", place.key.layer))
    past = Node("opaque", (k, raw), k.noun, lambda turned, raw: _joined(border, raw, turned))
    yield f"keys before position {border} are not rotated for tokens behind it: they are cached before RoPE", {k: past}
    for n in (n for n in _TURNS if abs(n) <= border):
        turned = {k: _changed(k, partial(_turned, place, border, n))}
        yield f"keys before position {border} are rotated by {n} positions more than they should be, for tokens behind it", turned


def _turned(place: Operation, border: int, by: int, k: Array) -> Array:
    angle = by * with_rope_of(place.model, place.key.layer).rope_frequency[None].astype(np.float64)
    heads = k.reshape(len(k), -1, place.config.head_dim)
    return _joined(border, spec.rotate(heads, angle, place.config.rope).reshape(k.shape), k)


def _joined(border: int, before: Array, behind: Array) -> Array:
    return np.concatenate([before[:border], behind[border:]])


def _lost(position: int, x: Array) -> Array:
    return np.where(np.arange(len(x))[:, None] == position, 0, x)


def _changed(node: Node, change: Callable[[Array], Array]) -> Node:
    return Node("opaque", (node,), node.noun, change)


def outputs(place: Operation, tree: Node) -> Edits:
    """The output of a head in the place of another one's."""
    heads = np.arange(place.config.heads)
    for node in (node for node, _ in nodes(tree) if node.kind == "weighted"):
        for a in range(min(heads.size, _FEW_HEADS)):
            for b in range(min(heads.size, _FEW_HEADS)):
                ways = [(f"the output of head {a} is that of head {b}", np.where(heads == a, b, heads))] if a != b else []
                if a < b:
                    both = np.where(heads == a, b, np.where(heads == b, a, heads))
                    ways.append((f"the outputs of heads {a} and {b} are exchanged", both))
                for words, source in ways:
                    yield words, replaced(tree, node, _changed(node, partial(np.take, indices=source, axis=1)))


def tiles(place: Operation, tree: Node) -> Edits:
    """Flash attention whose sums are not corrected when a later tile of keys has a larger score, or are averaged."""
    for largest in (node for node, _ in nodes(tree) if node.kind == "largest of"):
        for size in _TILES:
            for every, words in ((True, f"between tiles of {size} keys"), (False, f"at key {size}")):
                running = Node("opaque", largest.inputs, largest.noun, partial(_uncorrected, size, every))
                yield f"flash attention: the running maximum is not corrected {words}", replaced(tree, largest, running)
    for total in (node for node, _ in nodes(tree) if node.kind == "softmax sum"):
        for size in _TILES:
            for every, words in ((True, f"tiles of {size} keys"), (False, f"keys before and from {size} on")):
                own = Node("opaque", total.inputs, total.noun, partial(_own_sums, size, every))
                yield f"the results for {words} are averaged, not weighted by their sums of exponentials", replaced(tree, total, own)


def _own_sums(size: int, every: bool, exponentials: Array) -> Array:
    """The sum of the exponentials [H, T, S] of each key's own tile, times the number of tiles that a query sees."""
    tile = np.arange(exponentials.shape[-1]) // size
    starts = np.flatnonzero(np.diff(tile if every else np.minimum(tile, 1), prepend=-1))
    sums = np.add.reduceat(exponentials, starts, axis=-1)
    own = np.repeat(sums, np.diff(starts, append=len(tile)), axis=-1)
    return np.where(own > 0, own * np.count_nonzero(sums, axis=-1, keepdims=True), 1)


def _uncorrected(size: int, every: bool, scores: Array) -> Array:
    """The largest score before the end of each key's tile [H, T, S]; NaN where all keys are in one tile."""
    count = scores.shape[-1]
    if count <= size:
        return np.full_like(scores, np.nan)
    running: NDArray = np.maximum.accumulate(scores, axis=-1)
    tile = np.arange(count) // size
    ends = np.minimum((tile + 1) * size, count) - 1
    used = running[..., ends] if every else np.where(tile == 0, running[..., [size - 1]], running[..., [-1]])
    return np.where(np.isfinite(used), used, 0)


def stored(place: Operation, tree: Node) -> Edits:
    """Keys and values in the type of a cache, and queries in the type that ggml multiplies those by."""
    leaves = {node.what: node for node, _ in nodes(tree) if node.kind == "tensor"}
    if place.key.name != "kqv_out" or any(key not in leaves for key in place.inputs):
        return  # another tensor may stand in the place of one
    q, *kv = (leaves[key] for key in place.inputs)
    for kind, narrow in NARROW.items():
        yield f"keys and values are rounded, as a cache of {kind} does", with_nodes(tree, {leaf: _changed(leaf, narrow) for leaf in kv})
    head_dim = place.config.head_dim
    for kind, of_queries in _GGML_QUERIES.items():
        if kind == "bfloat16" or head_dim % cache_types.BLOCK == 0:
            for scale in query_scales(place.config):
                new = {leaf: _changed(leaf, partial(_kept, head_dim, kind, 1.0)) for leaf in kv}
                new[q] = _changed(q, partial(_kept, head_dim, of_queries, scale))
                which = "" if scale == 1 else ", and queries that are scaled already,"
                yield f"keys and values{which} are rounded to {kind}, as in a KV cache of ggml", with_nodes(tree, new)


_GGML_QUERIES = {"bfloat16": "bfloat16", "q8_0": "q8_0", "q4_0": "q8_0"}
"""The type of a cache in ggml -> the type that it rounds queries to in order to multiply them."""


def query_scales(config: Config) -> Iterator[float]:
    """Yields the factors of queries before they are rounded: 1, and that of scores.

    Some graphs scale queries before attention does, as llama.cpp's for Gemma and Phi. A power of two changes no rounding.
    """
    yield 1.0
    if math.frexp(scale := score_scale(config))[0] != 0.5:
        yield scale


def _kept(head_dim: int, kind: str, scale: float, x: Array) -> Array:
    """Rows of heads [T, HK] as a KV cache of this type gives them back, if they are scaled before."""
    heads = np.ascontiguousarray(x * scale, np.float32).reshape(len(x), -1, head_dim)
    return cache_types.rounded(heads, kind).reshape(x.shape).astype(np.float64) / scale
