"""The definition as expressions: each operation of spec.py, of the tensors that graph.py says it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...model.families import NORMS
from ...model.records import Blocks, Linear, Ternary, Weights, with_rope_of
from ...traces.points import FIELDS
from .. import operations as op
from ..graph import EMBEDDING, HEAD_NORMS, LOGITS, NORM, OF_EXPERTS, POOLED, POSITIONS, SCALED, Operation
from ..products import of_experts, reads_codes, rows_of
from ..roundings import MINIMUM_TYPES, matrix_input, minimums, rounded_sums
from .expression import Array, Matrix, Node, changed, constant, tensor

CODED = "the numbers that codes stand for"
_TANH = "GELU's approximation by tanh"
ACTIVATIONS = {"relu2": "relu^2", "silu": "SiLU", "gelu_gate": _TANH, "gelu": "the exact GELU", "gelu_tanh": _TANH}
"""The names of the functions that Config.activation stands for."""
_POOLS = {"mean": "the mean of all tokens", "cls": "the first token", "last": "the last token"}


def expression(place: Operation) -> Node | None:
    """The expression of an operation; None for integers, which have none."""
    name, inputs = place.key.name, [tensor(key) for key in place.inputs]
    if name.endswith("_codes"):
        return _codes(inputs[0], _steps(inputs[0]))
    if name.endswith("_scale"):
        return _steps(inputs[0])
    if name in _WHOLE:
        return _WHOLE[name](place, *inputs)
    if name in FIELDS:
        return matrix_product(place, inputs[0], place.linear)
    if name in (*NORMS, *_POST_NORMS) or name.endswith("_in"):
        return _norm(place, inputs[0])
    if name in HEAD_NORMS:
        return _of_heads(place, inputs[0])
    if name in OF_EXPERTS:
        linears = [getattr(expert, OF_EXPERTS[name]) for expert in place.layer.experts]  # type: ignore[union-attr]
        matrices = Node("linears", (), "the experts' matrices", linears)
        return Node("opaque", (matrices, *inputs), "the experts' products", lambda *x: of_experts(x[0], place.dialect, *x[1:]).value)
    return None


def _wide(array: NDArray) -> Array:
    return array.astype(np.float64)


def _sum(noun: str, *terms: Node) -> Node:
    return Node("sum", terms, noun)


def _product(noun: str, a: Node, b: Node) -> Node:
    return Node("product", (a, b), noun)


def _quotient(noun: str, a: Node, b: Node) -> Node:
    return Node("quotient", (a, b), noun)


# --- around the layers ------------------------------------------------------------------------------------------------------------------


def _positions(place: Operation, x: Node) -> Node:
    assert place.model.position_embd is not None
    learned = place.model.position_embd
    table = constant("the table of positions", _table(learned))
    return _sum("the sum", x, Node("rows", (table, Node("positions", noun="positions")), "the rows of positions"))


def _scaled(place: Operation, x: Node) -> Node:
    return _product("the product", x, constant("the embedding scale", place.config.embedding_scale))


def _head(place: Operation, x: Node) -> Node:
    c, model = place.config, place.model
    if place.dialect.in_float16:
        x = Node("rounded", (x,), "the head's input", "float16")
    y = _multiplied(place, x, model.head, "the head's matrix")
    if model.output_bias is not None:
        y = _sum("the sum with the bias", y, constant("the head's bias", _wide(model.output_bias)))
    if c.logit_scale != 1:
        y = _quotient("the scaled logits", y, constant("the logit scale", c.logit_scale))
    return _capped(y, c.logit_cap, "the logits' cap")


def _capped(x: Node, cap: float | None, noun: str) -> Node:
    if cap is None:
        return x
    number = constant(noun, cap)
    return _product("the capped numbers", Node("curve", (_quotient("the quotient by the cap", x, number),), f"{noun}ping", "tanh"), number)


# --- norms ------------------------------------------------------------------------------------------------------------------------------


def _norm(place: Operation, x: Node) -> Node:
    name, c = place.key.name, place.config
    if name.endswith("_in"):
        linear = getattr(place.layer, FIELDS[name.removesuffix("_in")])
        return rms(x, linear.norm, linear.norm_eps or c.eps)
    gain, bias = gain_of(place), None
    if place.layer is None:
        bias = place.model.output_norm_bias
    elif name in ("attn_norm", "ffn_norm"):
        bias = getattr(place.layer, f"{name}_bias")
    if c.norm == "rms" or name.endswith("sub_norm"):
        return rms(x, gain, c.eps)
    centred = Node("difference", (x, Node("reduction", (x,), "the mean", "mean")), "the numbers without their mean")
    y = rms(centred, gain, c.eps)
    return y if bias is None else _sum("the sum with the bias", y, constant("the norm's bias", _wide(bias)))


def gain_of(place: Operation) -> NDArray:
    """The weight of a norm."""
    name = place.key.name
    if place.layer is None:
        return place.model.output_norm
    return getattr(place.layer, _POST_NORMS.get(name, HEAD_NORMS.get(name, name)))


_POST_NORMS = {"attn_post_norm": "post_attention_norm", "ffn_post_norm": "post_ffw_norm"}


def rms(x: Node, gain: NDArray, eps: float) -> Node:
    """The RMS norm of rows."""
    square = _sum("the mean square with epsilon", Node("reduction", (x,), "the mean square", "mean square"), constant("epsilon", eps))
    normed = _quotient("the normed numbers", x, Node("root", (square,), "the root mean square", "root"))
    return _product("the weighted numbers", normed, constant("the norm's weight", _wide(gain)))


def _count(place: Operation) -> int:
    """The number of heads of queries, or of keys."""
    return place.config.heads if place.key.name.startswith("Q") else place.config.kv_heads


def _of_heads(place: Operation, x: Node) -> Node:
    gain = gain_of(place)
    if place.config.joint_qk_norms:
        return rms(x, gain, place.config.eps)
    heads = Node("heads", (x,), x.noun, _count(place) * place.config.head_dim // gain.size)
    return Node("joined", (rms(heads, gain, place.config.eps),), "the heads")


# --- products ---------------------------------------------------------------------------------------------------------------------------


def _table(weights: Weights) -> Matrix:
    return Matrix(weights.shape, lambda rows: rows_of(weights, rows))


def matrix_of(linear: Linear) -> Matrix:
    """The matrix [N, M] of a linear, without scale and bias."""
    return _table(linear.weights)


def matrix_product(place: Operation, x: Node, linear: Linear) -> Node:
    """The product of an input with a matrix of the layers, its scale and its bias."""
    weights, scale = linear.weights, 1.0 if linear.scale is None else float(linear.scale)
    if reads_codes(linear, place.dialect):
        scale *= float(weights.scale) if isinstance(weights, Ternary) else 1.0
        steps = _steps(x)
        numbers = _quotient(CODED, _codes(x, steps), steps)
        y = Node("matmul", (numbers, constant("the matrix", matrix_of(linear))), "the products")
    else:
        y = _multiplied(place, x, weights.blocks if isinstance(weights, Ternary) else weights, "the matrix")
    if scale != 1:
        y = _product("the scaled products", y, constant("the weight scale", scale))
    return y if linear.bias is None else _sum("the sum with the bias", y, constant("the bias", _wide(linear.bias)))


def _multiplied(place: Operation, x: Node, table: Any, noun: str) -> Node:
    """The product of x, rounded as in the dialect, with a table."""
    if place.dialect.ggml_activations:
        x = Node("opaque", (x,), "the numbers in blocks", partial(matrix_input, table=table))
    y = Node("matmul", (x, constant(noun, _table(table))), "the products")
    if place.dialect.ggml_activations and isinstance(table, Blocks) and table.type in MINIMUM_TYPES:
        sums = Node("opaque", x.inputs, "the rounded sums", rounded_sums)
        rest = Node("matmul", (sums, constant("the minimums", minimums(table))), "the products with minimums")
        y = _sum("the products with those of minimums", y, rest)
    return y


def _codes(x: Node, steps: Node) -> Node:
    rounded = Node("rounding", (_product("the numbers in steps", x, steps),), "the rounded numbers", "rounding to the nearest")
    return Node("cut", (rounded, steps.inputs[0]), "the codes")


def _steps(x: Node) -> Node:
    largest = Node("reduction", (x,), "the largest magnitude", "largest magnitude")
    kept = Node("at least", (largest, constant("the least magnitude", 1e-5)), "the largest magnitude, kept from 0")
    return _quotient("the activation scale", constant("the largest code", 127.0), kept)


# --- attention --------------------------------------------------------------------------------------------------------------------------


def _rotation(place: Operation, x: Node) -> Node:
    model = with_rope_of(place.model, place.key.layer)
    c = model.config
    exponents = constant("the exponents", -np.arange(c.rope_pairs) / max(c.rope_pairs, 1))
    frequency = Node("power", (constant("the frequency base", c.rope_base), exponents), "the frequencies")
    if model.rope_factors is not None:
        frequency = _quotient("the divided frequencies", frequency, constant("the factors of the frequencies", _wide(model.rope_factors)))
    position = Node("positions", noun="positions")
    if c.rope_scaling != 1:
        position = _quotient("the scaled positions", position, constant("the position scale", c.rope_scaling))
    turns = Node("circle", (Node("outer", (position, frequency), "the angles"),), "sines and cosines")
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


def _stored(place: Operation, x: Node) -> Node:
    return Node("rounded", (x,), x.noun, "float16") if place.dialect.in_float16 else x


def _shared(place: Operation, x: Node, noun: str) -> Node:
    """Keys or values by the heads of the queries that read them."""
    heads = Node("heads", (_stored(place, x),), f"the {noun}", place.config.kv_heads)
    return Node("grouped", (heads,), f"the heads of {noun}", place.config.heads)


def _scores(place: Operation, q: Node, k: Node) -> Node:
    """The scores [H, T, T] of what a query sees; those of what it does not are minus infinity."""
    c = place.config
    q = Node("heads", (_stored(place, q),), "the queries", c.heads)
    products = Node("scores", (q, _shared(place, k, "keys")), "the products q.k")
    scaled = _product("the scores", products, constant("the score scale", op.score_scale(c)))
    return _masked(place, _capped(scaled, c.score_cap, "the scores' cap"))


def _masked(place: Operation, scores: Node) -> Node:
    window = place.config.window_of(place.key.layer)  # type: ignore[arg-type]
    return Node("mask", (scores,), "the masked scores", (window or 0, "", 0))


def _attention_weights(masked: Node) -> Node:
    largest = Node("largest of", (masked,), "the largest score")
    e = Node("exponential", (Node("difference", (masked, largest), "the scores below the largest"),), "the exponentials", "exp")
    return _quotient("the probabilities", e, Node("softmax sum", (e,), "the softmax's sum"))


def _attention(place: Operation, q: Node, k: Node, v: Node) -> Node:
    p = _stored(place, _attention_weights(_scores(place, q, k)))
    return Node("joined", (Node("weighted", (p, _shared(place, v, "values")), "the sums of values"),), "the heads")


def _dumped_weights(place: Operation, scores: Node) -> Node:
    return changed(_attention_weights(_masked(place, Node("opaque", (scores,), "the scores", op.by_head))), op.by_query)


# --- the feed-forward -------------------------------------------------------------------------------------------------------------------


def _activation(place: Operation, gate: Node, up: Node | None = None) -> Node:
    y = Node("activation", (gate,), "the activation", ACTIVATIONS[place.config.activation])
    return y if up is None else _product("the product with up", y, up)


def _expert_weights(place: Operation, logits: Node, chosen: Node) -> Node:
    largest = Node("reduction", (logits,), "the largest logit", "largest number")
    below = Node("difference", (logits, largest), "the logits below the largest")
    e = Node("exponential", (below,), "the exponentials", "exp")
    softmax = _quotient("the probabilities", e, Node("reduction", (e,), "the softmax's sum", "sum"))
    taken = Node("taken", (softmax, chosen), "the probabilities of the token's experts")
    if not place.config.normalized_experts:
        return taken
    return _quotient("the weights", taken, Node("reduction", (taken,), "the sum of the token's experts", "sum"))


def _mixed(place: Operation, y: Node, weights: Node) -> Node:
    results, factors = Node("slots", (y, weights), "the results of experts"), Node("column", (weights,), "the weights of experts")
    return Node("total", (_product("the weighted results", results, factors),), "the sum of experts", "sum")


def _shared_expert(place: Operation, y: Node, x: Node) -> Node:
    assert place.layer is not None
    assert place.layer.ffn_gate_inp_shexp is not None
    dot = Node("dot", (x, constant("the gate's weight", _wide(place.layer.ffn_gate_inp_shexp))), "the gate's product")
    return _product("the gated result", y, Node("sigmoid", (dot,), "the gate", "sigmoid"))


def _residual(place: Operation, h: Node, *branches: Node) -> Node:
    scale = place.config.residual_scale
    if scale != 1:
        factor = constant("the residual scale", scale)
        branches = tuple(_product(branch.noun, branch, factor) for branch in branches)
    return _sum("the sum", replace(h, noun=f"the residual, {h.noun},"), *branches)


def _embedding(place: Operation, tokens: Node) -> Node:
    return Node("rows", (constant("the embedding's table", _table(place.model.token_embd)), tokens), "the embedding")


_WHOLE: dict[str, Callable[..., Node]] = {
    EMBEDDING.name: _embedding,
    POSITIONS.name: _positions,
    SCALED.name: _scaled,
    NORM.name: _norm,
    POOLED.name: lambda place, x: Node("pooled", (x,), "the pooled row", _POOLS[place.config.pooling]),
    LOGITS.name: _head,
    "Qcur_rope": _rotation,
    "Kcur_rope": _rotation,
    "kq": lambda place, q, k: changed(_scores(place, q, k), lambda s: op.by_query(np.where(np.isfinite(s), s, 0))),
    "kq_soft_max": _dumped_weights,
    "kqv_out": _attention,
    "ffn_out": _activation,
    "ffn_moe_swiglu": _activation,
    "ffn_moe_weights": _expert_weights,
    "ffn_moe_out": _mixed,
    "ffn_shexp_out": _shared_expert,
    "ffn_inp": _residual,
    "l_out": _residual,
}
"""The expressions of operations that have one way to be computed, by the name of their tensor."""
