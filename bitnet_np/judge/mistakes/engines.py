"""Whole engines with a mistake: of another model, dialect or quantiser, or fed another prompt."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.dialects import DIALECTS
from ...kernels import cpu
from ..edits.quantisers import Quantizer, unquantised
from ..law.expression import Node, tensor
from ..law.graph import Operation, operations
from ..law.products import reads_codes
from ..variant import Floats, Variant

Numbers = Mapping[str, Any]
"""The values for the braces of a text."""

Engines = Iterator[tuple[Numbers, Variant]]


def in_another(engine: Variant, place: Operation) -> Node:
    """An operation in another engine as an expression; its input as it is where the engine has no such operation.

    Where a token takes another number of experts, all that depends on it is computed in that engine.
    """
    own, n = engine.model.config.experts_used == place.config.experts_used, place.key.layer
    made: dict[tuple, Node] = {}
    for o in operations(engine.model, engine.dialect):
        if o.key.layer == n and (o.key == place.key or (not own and o.key.name.startswith("ffn_moe_") and o.key.name != "ffn_moe_logits")):
            inputs = tuple(made.get(key) or tensor(key) for key in o.inputs)
            made[o.key] = o.make(o, *inputs)
    return made.get(place.key) or tensor(place.inputs[0])


# --- dialects and quantisers ----------------------------------------------------------------------------------------------------------


def other_dialects(field: str, how: Mapping[str, tuple[str, str]], base: Variant) -> Engines:
    """Engines with this setting of another dialect. how: what its text says in each brace if the other setting is False, or True."""
    for dialect in DIALECTS.values():
        value = getattr(dialect, field)
        if value != getattr(base.dialect, field):
            numbers = {"name": dialect.name} | {brace: says[value] for brace, says in how.items()}
            yield numbers, replace(base, dialect=replace(base.dialect, **{field: value}))


def quantising(quantize: Quantizer, base: Variant) -> Engines:
    """The engine with another quantiser, where it has one."""

    def in_bytes(x: Floats) -> tuple[NDArray[np.int8], Floats]:
        codes, scale = quantize(x)
        return codes.astype(np.int8), np.ascontiguousarray(scale[:, 0])

    if any(reads_codes(linear, base.dialect) for linear in base.linears()):
        yield {}, _unquantised(base) if quantize is unquantised else base.with_operations(quantize=in_bytes)


def _unquantised(base: Variant) -> Variant:
    """The engine without quantisation, but for 1 / 254 of the rounding errors: it adds a second int8 product of these."""
    rest: list[tuple[NDArray, NDArray]] = []

    def quantize(x: Floats) -> tuple[NDArray[np.int8], Floats]:
        q, scale = cpu.quantize(x)
        rest[:] = [(q, np.rint((x * scale[:, None] - q) * 254).astype(np.int8))]
        return q, scale

    def ternary_matmul(q: NDArray[np.int8], scale: Floats, *weights: Any) -> Floats:
        (codes, remainder) = rest[0]
        y = cpu.ternary_matmul(q, scale, *weights)
        return y + cpu.ternary_matmul(remainder, scale * np.float32(254), *weights) if codes is q else y

    def ternary_matmuls(q: NDArray[np.int8], scale: Floats, *matrices: Any) -> list[Floats]:
        return [ternary_matmul(q, scale, *weights) for weights in matrices]

    return base.with_operations(quantize=quantize, ternary_matmul=ternary_matmul, ternary_matmuls=ternary_matmuls)


# --- models ---------------------------------------------------------------------------------------------------------------------------


def normalized_experts(base: Variant) -> Engines:
    """Weights of experts that are divided by their sum."""
    c = base.model.config
    if c.has_choice and not c.normalized_experts:
        yield {}, base.with_config(normalized_experts=True)


def other_counts(base: Variant) -> Engines:
    """Other numbers of experts for a token."""
    c = base.model.config
    for taken in dict.fromkeys((1, c.experts_used - 1, c.experts_used + 1, c.experts)):
        if 0 < taken <= c.experts and taken != c.experts_used:
            yield {"taken": taken, "right": c.experts_used}, base.with_config(experts_used=taken)


def permuted_experts(base: Variant) -> Engines:
    """Experts in orders in which engines have put them, such as by their numbers as texts (0, 1, 10, 11, 2)."""
    numbers = list(range(base.model.config.experts))
    orders = {
        "backwards": numbers[::-1],
        "each in the place of the next": numbers[-1:] + numbers[:-1],
        "each in the place of the previous": numbers[1:] + numbers[:1],
        "sorted by their numbers as texts": sorted(numbers, key=str),
    }
    for n, (text, order) in enumerate(orders.items()):
        if order != numbers and order not in list(orders.values())[:n]:
            layers = (replace(layer, experts=tuple(layer.experts[e] for e in order)) for layer in base.model.layers)
            yield {"order": text}, base.with_model(layers=tuple(layers))


def without_shared_expert(base: Variant) -> Engines:
    """No expert that all tokens take."""
    if base.model.config.shared_ffn:
        yield {}, base.with_field("ffn_gate_inp_shexp", lambda gate: None)


def tied(base: Variant) -> Engines:
    """The embedding's table for the head."""
    if base.model.output is not None:
        yield {}, base.with_model(output=None)


def other_branch(base: Variant) -> Engines:
    """The feed-forward behind attention, or beside it."""
    c = base.model.config
    if c.norm == "layer" and not c.shared_norm:
        read = ("the layer's input", "what attention's branch was added to")[:: -1 if c.parallel_residual else 1]
        yield {"read": read[0], "right": read[1]}, base.with_config(parallel_residual=not c.parallel_residual)


# --- prompts --------------------------------------------------------------------------------------------------------------------------


def fed(feed: Callable[[NDArray[np.int64]], NDArray[np.int64]], base: Variant) -> Engines:
    """The engine with other token ids: ids [B, T] -> [B, T'], whose last T rows are theirs."""
    yield {}, replace(base, feed=feed)


def shifted(by: int, base: Variant) -> Engines:
    """The engine with token ids that are too large by a number."""
    yield {}, replace(base, feed=lambda ids: (ids + by) % base.model.config.vocab)
