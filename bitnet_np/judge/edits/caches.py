"""What attention may read instead of its keys and values, as from a cache."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from ... import contract, spec
from ...engine import cache_types
from ...model.records import Config, with_rope_of
from ...traces.points import Key
from ..law.definition import score_scale
from ..law.expression import Array, Node, changed, mapped, replaced, tensor, tensors, values_of, with_nodes
from ..law.formats import NARROW
from ..law.graph import Operation, attended
from ..law.roundings import to_float16

Edits = Iterator[tuple]

_MOST_ROWS = 8  # that are looked at: a row of one head on the grid is no chance already
_OFF_GRID = 0.02  # steps of float16 from the grid, on average; 0.25 by chance
_TURNS = (1, 2, 3, 4, 8, -1, -2, -3, -4, -8)  # positions


def cached(place: Operation, tree: Node) -> Edits:
    """Keys and values of another layer, or keys of an earlier chunk that are rotated by other positions than theirs."""
    if place.key.name != "kqv_out" or place.key.layer is None:
        return
    k, v = (next(node for node in tensors(tree) if node.what == key) for key in place.inputs[1:])
    for what, some in (("keys and values", (k, v)), ("keys", (k,)), ("values", (v,))):
        for n in range(len(place.model.layers)):
            if n != place.key.layer:
                other = {leaf: tensor(Key("Vcur", n) if leaf is v else attended(place.model, "Kcur", n)) for leaf in some}
                yield f"{what} of layer {n} are read: the cache of another layer", with_nodes(tree, other)
    for border in place.borders if k.what.name.endswith("_rope") else ():
        for n in (n for n in _TURNS if abs(n) <= border):
            turned = replaced(tree, k, changed(k, partial(_turned, place, border, n)))
            words = f"keys before position {border} are rotated by {n} positions more than they should be, for tokens behind it"
            yield words, Node("opaque", (tree, turned), tree.noun, partial(_joined, border))


def _turned(place: Operation, border: int, by: int, k: Array) -> Array:
    angle = by * with_rope_of(place.model, place.key.layer).rope_frequency[None].astype(np.float64)
    heads = k.reshape(len(k), -1, place.config.head_dim)
    return _joined(border, spec.rotate(heads, angle, place.config.rope).reshape(k.shape), k)


def _joined(border: int, before: Array, behind: Array) -> Array:
    return np.concatenate([before[:border], behind[border:]])


def stored(place: Operation, tree: Node) -> Edits:
    """Keys and values in the type of a cache, and queries in the type that ggml multiplies those by."""
    leaves = {node.what: node for node in tensors(tree)}
    if place.key.name != "kqv_out" or any(key not in leaves for key in place.inputs):
        return  # another tensor may stand in the place of one
    q, *kv = (leaves[key] for key in place.inputs)
    for kind, narrow in NARROW.items():
        new = with_nodes(tree, {leaf: changed(leaf, narrow) for leaf in kv})
        yield f"keys and values are rounded, as a cache of {kind} does", new, "cache.narrow", kind
    head_dim, scales = place.config.head_dim, _query_scales(place.config)
    for kind, of_queries in _GGML_QUERIES.items():
        for scale in scales if kind == "bfloat16" or head_dim % cache_types.BLOCK == 0 else ():
            kept = {leaf: changed(leaf, partial(_kept, head_dim, kind, 1.0)) for leaf in kv}
            kept[q] = changed(q, partial(_kept, head_dim, of_queries, scale))
            which = "" if scale == 1 else ", and queries that are scaled already,"
            words = f"keys and values{which} are rounded to {kind}, as in a KV cache of ggml: declare it (--precision kv={kind})"
            yield words, with_nodes(tree, kept), "cache.ggml" if scale == 1 else "cache.ggml_scaled", kind
    for scale in scales[1:] if not place.dialect.in_float16 else ():
        words = "float16 roundings, of queries that are scaled already: declare them (--as llama.cpp-f16kv)"
        yield words, mapped(tree, partial(_in_float16, {q: scale, **dict.fromkeys(kv, 1.0)})), "cache.float16_scaled", "float16"


def _in_float16(scales: Mapping[Node, float], node: Node) -> Node:
    """A step of attention with tensors, scaled before, and probabilities in float16."""
    if node in scales:
        return changed(node, lambda x: to_float16(x * scales[node]) / scales[node])
    return Node("rounded", (node,), node.noun, "float16") if node.noun == "the probabilities" else node


def is_summed_in_float16(place: Operation, inputs: Sequence[Array], theirs: Array) -> bool:
    """Whether attention's output [T, HK] times the sum of the weights lies on float16's grid, as ggml's flash attention leaves it on a CPU.

    Over a float16 cache that adds up the values in float16, and divides by the sum of the weights, in float32, at the end. Only the first
    rows that see more than one key are looked at. The grid shows how the output was summed, not that it is right: the caller checks it
    against the precision's bounds.
    """
    rows, (query, key, _), tree = min(len(theirs), _MOST_ROWS + 1), place.inputs, place.tree
    if rows < 2:
        return False
    values = {key: x[:rows] for key, x in zip(place.inputs, inputs, strict=True)}
    sums = theirs[:rows].reshape(rows, -1, place.config.head_dim)
    q, k = (next(node for node in tensors(tree) if node.what == one) for one in (query, key))
    with np.errstate(all="ignore"):  # numbers beyond float16 are not on the grid
        for scale in _query_scales(place.config):
            steps = values_of(mapped(tree, partial(_in_float16, {q: scale, k: 1.0})), values.__getitem__, rows)
            total = next(x for node, x in steps.items() if node.kind == "softmax sum")  # [H, T, 1]
            x = np.abs(sums[1:] * total.swapaxes(0, 1)[1:])
            grid = x / np.spacing(x.astype(np.float16)).astype(np.float64)
            if np.abs(grid - np.rint(grid)).mean() < _OFF_GRID:
                return True
    return False


_GGML_QUERIES = {"bfloat16": "bfloat16", "q8_0": "q8_0", "q4_0": "q8_0"}
"""The type of a cache in ggml -> the type that it rounds queries to in order to multiply them."""


def _query_scales(config: Config) -> list[float]:
    """The factors of queries before they are rounded: 1, and that of scores.

    Some graphs scale queries before attention does, as llama.cpp's for Gemma and Phi. A power of two changes no rounding.
    """
    return [1.0] + [scale for scale in [score_scale(config)] if math.frexp(scale)[0] != 0.5]


def _kept(head_dim: int, kind: str, scale: float, x: Array) -> Array:
    """Rows of heads [T, HK] as a KV cache of this type gives them back, if they are scaled before."""
    heads = np.ascontiguousarray(x * scale, np.float32).reshape(len(x), -1, head_dim)
    return contract.round_as(heads, kind).reshape(x.shape).astype(np.float64) / scale
