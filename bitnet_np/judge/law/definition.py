"""The definition as expressions: each operation of spec.py, of the tensors that graph.py says it reads.

place: the tensor that an operation gives. The nodes behind it are the operation's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.dialects import Dialect
from ...model.records import Blocks, Config, Layer, Linear, Model, Ternary, Weights, with_rope_of
from ...traces.points import Key
from . import roundings
from .expression import Array, Matrix, Node, changed, constant, tensor, value_of
from .functions import ACTIVATION_NAMES, GELU_BY_TANH, by_head, by_query, visible_by_query
from .products import linear_of, reads_codes, rows_of

CODED = "the numbers that codes stand for"
HEAD = "the head's matrix"
FACTORS = ("the embedding scale", "the residual scale")
"""The numbers that some engines keep in the type of the activations, as mlx-lm does."""
_POOLS = {"mean": "the mean of all tokens", "cls": "the first token", "last": "the last token"}


@dataclass(frozen=True)
class Place:
    """One tensor of a model in a dialect."""

    model: Model = field(repr=False)
    dialect: Dialect
    key: Key
    length: int = field(default=0, kw_only=True)  # of the sequence, where mistakes at single positions are tried

    @property
    def borders(self) -> Sequence[int]:
        """Positions at which a later chunk may begin, lengths of windows and prefixes; a few where the length is not known."""
        if not self.length:
            return [2, 4, 8, 16, 32, 64]
        return [b for b in (*range(1, 33), 40, 48, 64, 96, 128, 256, 512) if b < self.length]

    @property
    def config(self) -> Config:
        return self.model.config

    @property
    def layer(self) -> Layer | None:
        """Its layer; None outside the layers."""
        return None if self.key.layer is None else self.model.layers[self.key.layer]

    @property
    def linear(self) -> Linear:
        """Its matrix, the head's too."""
        return linear_of(self.model, self.key)


def _wide(array: NDArray) -> Array:
    return array.astype(np.float64)


def _sum(noun: str, *terms: Node) -> Node:
    return Node("sum", terms, noun)


def _product(noun: str, a: Node, b: Node) -> Node:
    return Node("product", (a, b), noun)


def _quotient(noun: str, a: Node, b: Node) -> Node:
    return Node("quotient", (a, b), noun)


# --- around the layers ------------------------------------------------------------------------------------------------------------------


def embedding(place: Place, tokens: Node) -> Node:
    return Node("rows", (constant("the embedding's table", matrix_of(place.model.token_embd)), tokens), "the embedding")


def pooled(place: Place, x: Node) -> Node:
    return Node("pooled", (x,), "the pooled row", _POOLS[place.config.pooling])


def with_positions(place: Place, x: Node) -> Node:
    assert place.model.position_embd is not None
    learned = place.model.position_embd
    table = constant("the table of positions", matrix_of(learned))
    return _sum("the sum", x, Node("rows", (table, Node("positions", noun="positions")), "the rows of positions"))


def scaled(place: Place, x: Node) -> Node:
    return _product("the product", x, constant("the embedding scale", place.config.embedding_scale))


def head(place: Place, x: Node) -> Node:
    c, model = place.config, place.model
    if place.dialect.in_float16:
        x = Node("rounded", (x,), "the head's input", "float16")
    y = _multiplied(place, x, model.head, HEAD)
    if model.output_bias is not None:
        y = _sum("the sum with the bias", y, constant("the head's bias", _wide(model.output_bias)))
    if c.logit_scale != 1:
        y = _quotient("the scaled logits", y, constant("the logit scale", c.logit_scale))
    return capped(y, c.logit_cap, "the logits' cap")


def capped(x: Node, cap: float | None, noun: str) -> Node:
    """Numbers that a cap keeps between -cap and cap, softly; None: as they are."""
    if cap is None:
        return x
    number = constant(noun, cap)
    return _product("the capped numbers", Node("curve", (_quotient("the quotient by the cap", x, number),), f"{noun}ping", "tanh"), number)


# --- norms ------------------------------------------------------------------------------------------------------------------------------


def norm(place: Place, x: Node, gain: NDArray, bias: NDArray | None) -> Node:
    """The family's norm of a layer's input or of a branch."""
    return rms_norm(place, x, gain) if place.config.norm == "rms" else layer_norm(x, gain, bias, place.config.eps)


def layer_norm(x: Node, gain: NDArray, bias: NDArray | None, eps: float) -> Node:
    """The LayerNorm of rows."""
    centred = Node("difference", (x, Node("reduction", (x,), "the mean", "mean")), "the numbers without their mean")
    y = rms(centred, gain, eps)
    return y if bias is None else _sum("the sum with the bias", y, constant("the norm's bias", _wide(bias)))


def rms_norm(place: Place, x: Node, gain: NDArray, eps: float | None = None) -> Node:
    """The RMS norm of rows. eps: the norm's own, if it has one."""
    return rms(x, gain, eps or place.config.eps, place.model.norm_offset)


NORM_WEIGHT = "the norm's weight"


def rms(x: Node, gain: NDArray, eps: float, offset: float = 0.0) -> Node:
    """The RMS norm of rows. offset: what engines add to the weight that they have, as Gemma's do: that weight is rounded, and the sum."""
    square = _sum("the mean square with epsilon", Node("reduction", (x,), "the mean square", "mean square"), constant("epsilon", eps))
    normed = _quotient("the normed numbers", x, Node("root", (square,), "the root mean square", "root"))
    weight = constant(NORM_WEIGHT, _wide(gain))
    if offset:
        weight = _sum(NORM_WEIGHT, constant("the weight of the file", _wide(gain) - offset), constant("the norm's offset", offset))
    return _product("the weighted numbers", normed, weight)


def _count(place: Place) -> int:
    """The number of heads of queries, or of keys."""
    return place.config.heads if place.key.name.startswith("Q") else place.config.kv_heads


def norm_of_heads(place: Place, x: Node, gain: NDArray) -> Node:
    """The RMS norm of each head, or of all of them together."""
    if place.config.joint_qk_norms:
        return rms_norm(place, x, gain)
    heads = Node("heads", (x,), x.noun, _count(place) * place.config.head_dim // gain.size)
    return Node("joined", (rms_norm(place, heads, gain),), "the heads")


# --- products ---------------------------------------------------------------------------------------------------------------------------


def matrix_of(weights: Weights) -> Matrix:
    """The matrix [N, M] of weights, without a scale."""
    return Matrix(weights.shape, lambda rows: rows_of(weights, rows), weights=weights)


def codes(place: Place, x: Node) -> Node:
    """The int8 codes of an input."""
    return _codes(x, code_scale(place, x))


def matrix_product(place: Place, x: Node, linear: Linear) -> Node:
    """The product of an input with a matrix of the layers, its scale and its bias."""
    weights, scale = linear.weights, 1.0 if linear.scale is None else float(linear.scale)
    if reads_codes(linear, place.dialect):
        scale *= float(weights.scale) if isinstance(weights, Ternary) else 1.0
        steps = code_scale(place, x)
        numbers = _quotient(CODED, _codes(x, steps), steps)
        y = Node("matmul", (numbers, constant("the matrix", matrix_of(weights))), "the products")
    else:
        y = _multiplied(place, x, weights.blocks if isinstance(weights, Ternary) else weights, "the matrix")
    if scale != 1:
        y = _product("the scaled products", y, constant("the weight scale", scale))
    return y if linear.bias is None else _sum("the sum with the bias", y, constant("the bias", _wide(linear.bias)))


def _multiplied(place: Place, x: Node, table: Any, noun: str) -> Node:
    """The product of x, rounded as in the dialect, with a table."""
    if place.dialect.ggml_activations:
        x = Node("opaque", (x,), "the numbers in blocks", partial(roundings.matrix_input, table=table))
    y = Node("matmul", (x, constant(noun, matrix_of(table))), "the products")
    if place.dialect.ggml_activations and isinstance(table, Blocks) and table.type in roundings.MINIMUM_TYPES:
        sums = Node("opaque", x.inputs, "the rounded sums", roundings.rounded_sums)
        rest = Node("matmul", (sums, constant("the minimums", roundings.minimums(table))), "the products with minimums")
        y = _sum("the products with those of minimums", y, rest)
    return y


def _codes(x: Node, steps: Node) -> Node:
    rounded = Node("rounding", (_product("the numbers in steps", x, steps),), "the rounded numbers", "rounding to the nearest")
    return Node("cut", (rounded, steps.inputs[0]), "the codes")


def code_scale(place: Place, x: Node) -> Node:
    """Steps per unit, 127 / absmax."""
    largest = Node("reduction", (x,), "the largest magnitude", "largest magnitude")
    kept = Node("at least", (largest, constant("the least magnitude", 1e-5)), "the largest magnitude, kept from 0")
    return _quotient("the activation scale", constant("the largest code", 127.0), kept)


# --- attention --------------------------------------------------------------------------------------------------------------------------


def rotation(place: Place, x: Node, start: int = 0) -> Node:
    """RoPE of positions from `start` on."""
    model = with_rope_of(place.model, place.key.layer)
    c = model.config
    exponents = constant("the exponents", -np.arange(c.rope_pairs) / max(c.rope_pairs, 1))
    frequency = Node("power", (constant("the frequency base", c.rope_base), exponents), "the frequencies")
    if model.rope_factors is not None:
        frequency = _quotient("the divided frequencies", frequency, constant("the factors of the frequencies", _wide(model.rope_factors)))
    position = Node("positions", (), "positions", start)
    if c.rope_scaling != 1:
        position = _quotient("the scaled positions", position, constant("the position scale", c.rope_scaling))
    angles = Node("outer", (position, frequency), "the angles")
    if place.dialect.stepped_angles and c.rope_pairs:
        right = value_of(frequency, dict[Key, Array]().__getitem__, 0)
        angles = replace(angles, value=lambda t, f: roundings.stepped_angles(model, t * c.rope_scaling) * (f / right))
    turns = Node("circle", (angles,), "sines and cosines")
    if c.rope_magnitude != 1:
        turns = _product("the scaled sines and cosines", turns, constant("RoPE's magnitude", c.rope_magnitude))
    heads = Node("heads", (x,), x.noun, _count(place))
    cos, sin = (Node("turn", (turns,), noun, i) for i, noun in enumerate(("the cosines", "the sines")))
    first, second = (
        Node("of pairs", (heads,), f"the {noun} of each pair", (c.rope, i, c.rope_pairs)) for i, noun in enumerate(("first", "second"))
    )
    turned = _product("the first times the cosines", first, cos), _product("the second times the sines", second, sin)
    lower = _product("the first times the sines", first, sin), _product("the second times the cosines", second, cos)
    numbers = Node("difference", turned, "the new first of each pair"), _sum("the new second of each pair", *lower)
    return Node("joined", (Node("paired", (heads, *numbers), "the rotated heads", c.rope),), "the heads")


def score_scale(c: Config) -> float:
    """The factor of q . k."""
    return c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale


def _stored(place: Place, x: Node) -> Node:
    return Node("rounded", (x,), x.noun, "float16") if place.dialect.in_float16 else x


def _shared(place: Place, x: Node, noun: str) -> Node:
    """Keys or values by the heads of the queries that read them."""
    heads = Node("heads", (_stored(place, x),), f"the {noun}", place.config.kv_heads)
    return Node("grouped", (heads,), f"the heads of {noun}", place.config.heads)


def _scores(place: Place, q: Node, k: Node) -> Node:
    """The scores [H, T, T] of what a query sees; those of what it does not are minus infinity."""
    c = place.config
    q = Node("heads", (_stored(place, q),), "the queries", c.heads)
    products = Node("scores", (q, _shared(place, k, "keys")), "the products q.k")
    scaled = _product("the scores", products, constant("the score scale", score_scale(c)))
    return _masked(place, capped(scaled, c.score_cap, "the scores' cap"))


def _masked(place: Place, scores: Node) -> Node:
    window = place.config.window_of(place.key.layer)  # type: ignore[arg-type]
    return Node("mask", (scores,), "the masked scores", (window or 0, "", 0))


def _attention_weights(masked: Node) -> Node:
    largest = Node("largest of", (masked,), "the largest score")
    e = Node("exponential", (Node("difference", (masked, largest), "the scores below the largest"),), "the exponentials", "exp")
    return _quotient("the probabilities", e, Node("softmax sum", (e,), "the softmax's sum"))


def attention(place: Place, q: Node, k: Node, v: Node) -> Node:
    p = _stored(place, _attention_weights(_scores(place, q, k)))
    return Node("joined", (Node("weighted", (p, _shared(place, v, "values")), "the sums of values"),), "the heads")


def visible_scores(place: Place, q: Node, k: Node) -> Node:
    """Scores as they are dumped, [T, H * T]: 0 where a query does not see the key."""
    return changed(_scores(place, q, k), visible_by_query)


def visible_weights(place: Place, scores: Node) -> Node:
    """The softmax of dumped scores [T, H * T]."""
    return changed(_attention_weights(_masked(place, Node("opaque", (scores,), "the scores", by_head))), by_query)


# --- the feed-forward -------------------------------------------------------------------------------------------------------------------


def activation(place: Place, gate: Node, up: Node | None = None) -> Node:
    """The activation of the gate, times up; or of up alone, in families without a gate."""
    name = ACTIVATION_NAMES[place.config.activation]
    return gated(name, gate, up, roundings.gelu_of_table if name == GELU_BY_TANH and place.dialect.ggml_activations else None)


def gated(name: str, gate: Node, up: Node | None = None, rounded: Callable[[Array], Array] | None = None) -> Node:
    """A function of the gate, by its name, times up. rounded: how a dialect computes it."""
    y = Node("activation", (gate,), "the activation", name, rounded)
    return y if up is None else _product("the product with up", y, up)


def top_experts(place: Place, logits: Node) -> Node:
    return Node("experts", (logits,), "the token's experts", place.config.experts_used)


def expert_weights(place: Place, logits: Node, chosen: Node) -> Node:
    largest = Node("reduction", (logits,), "the largest logit", "largest number")
    below = Node("difference", (logits, largest), "the logits below the largest")
    e = Node("exponential", (below,), "the exponentials", "exp")
    softmax = _quotient("the probabilities", e, Node("reduction", (e,), "the softmax's sum", "sum"))
    taken = Node("taken", (softmax, chosen), "the probabilities of the token's experts")
    if not place.config.normalized_experts:
        return taken
    return _quotient("the weights", taken, Node("reduction", (taken,), "the sum of the token's experts", "sum"))


_ROWS = Key("rows", None)


def of_experts(place: Place, x: Node, chosen: Node, linears: Sequence[Linear]) -> Node:
    """Each slot's input [T, M], or [T, k*M] where every slot has its own, times the matrix of the slot's expert -> [T, k*N]."""
    return Node(
        "opaque", (Node("linears", (), "the experts' matrices", linears), x, chosen), "the experts' products", partial(_by_expert, place)
    )


def of_experts_edited(place: Place, tree: Node, edit: Callable[[Node], Node]) -> Node:
    """The experts' products with an edit of the product of each of them."""

    def edited(linears: Sequence[Linear], x: Array, experts: Array) -> Array:
        compute = lambda product, some: [value_of(edit(product), some.__getitem__, len(some[_ROWS]))]  # noqa: E731
        made: Array = _by_expert(place, linears, x, experts, compute)[0]
        return made

    return replace(tree, what=edited)


def of_one_expert(place: Place, tree: Node) -> Node | None:
    """The product of the first expert with its tokens; None of what is no product of experts."""
    linears = next((node.what for node in tree.inputs if node.kind == "linears"), None)
    return None if linears is None else matrix_product(place, tensor(_ROWS), linears[0])


def _by_expert(place: Place, linears: Sequence[Linear], x: Array, experts: Array, compute: Callable[..., Any] | None = None) -> Any:
    """compute: an expression and its input -> arrays of the product's shape or less. The product alone, if there is none."""
    flat, rows = experts.astype(np.intp).reshape(-1), x.reshape(-1, linears[0].shape[1])
    made: list[Array] = []
    for expert in np.unique(flat):
        slots = np.flatnonzero(flat == expert)
        some = {_ROWS: rows[slots // (flat.size // len(rows))]}
        tree = matrix_product(place, tensor(_ROWS), linears[expert])
        parts = [value_of(tree, some.__getitem__, len(slots))] if compute is None else compute(tree, some)
        made = made or [np.zeros((flat.size, linears[0].shape[0])) for _ in parts]
        for out, part in zip(made, parts, strict=True):
            out[slots] = part
    every = [out.reshape(len(experts), -1) for out in made]
    return every[0] if compute is None else every


def mixed(place: Place, y: Node, weights: Node) -> Node:
    results, factors = Node("slots", (y, weights), "the results of experts"), Node("column", (weights,), "the weights of experts")
    return Node("total", (_product("the weighted results", results, factors),), "the sum of experts", "sum")


def shared_expert(place: Place, y: Node, x: Node) -> Node:
    assert place.layer is not None
    assert place.layer.ffn_gate_inp_shexp is not None
    dot = Node("dot", (x, constant("the gate's weight", _wide(place.layer.ffn_gate_inp_shexp))), "the gate's product")
    return _product("the gated result", y, Node("sigmoid", (dot,), "the gate", "sigmoid"))


def residual(place: Place, h: Node, *branches: Node) -> Node:
    scale = place.config.residual_scale
    if scale != 1:
        factor = constant("the residual scale", scale)
        branches = tuple(_product(branch.noun, branch, factor) for branch in branches)
    return _sum("the sum", replace(h, noun=f"the residual, {h.noun},"), *branches)
