"""Mistakes in layers with experts: which are taken, how their results are weighted, and the shared one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine.dialects import Dialect
from ...model.records import Layer, Linear, Model
from ...traces.points import Key
from .. import operations as op
from ..variant import Floats, Variant
from .mistake import Array, Compute, Computes, Engines, Mistake, Site, Values, alike

PRODUCTS = {"ffn_moe_gate": "ffn_gate", "ffn_moe_up": "ffn_up", "ffn_moe_down": "ffn_down"}
"""The tensors of experts' products, and the fields of model.Expert."""
WEIGHTS = ("ffn_moe_weights",)
OUTPUT = ("ffn_moe_out",)


def _has_experts(model: Model, dialect: Dialect) -> bool:
    return model.config.experts > 1


def _normalizes(model: Model, dialect: Dialect) -> bool:
    return model.config.experts_used > 1 and model.config.normalized_experts


def _does_not_normalize(model: Model, dialect: Dialect) -> bool:
    return model.config.experts > model.config.experts_used > 0 and not model.config.normalized_experts


def _has_shared(model: Model, dialect: Dialect) -> bool:
    return model.config.shared_ffn > 0


def _normalized(value: bool) -> tuple:
    """compute and engine of weights that are normalised, or not."""

    def compute(site: Site) -> Compute:
        return site.of(lambda logits, experts: spec.expert_weights(logits, experts.astype(np.intp), value))

    return compute, lambda base: base.with_config(normalized_experts=value)


def _weighted_by(function: Callable[[NDArray], NDArray], normalized: bool | None = None) -> tuple:
    """compute and engine of weights that are another function of the logits than softmax. normalized: None has them as the model has."""

    def weights(logits: NDArray, experts: NDArray, divided: bool) -> NDArray:
        y = function(np.take_along_axis(logits, experts.astype(np.intp), axis=1))
        divided = divided if normalized is None else normalized
        return y / y.sum(axis=1, keepdims=True) if divided else y

    def narrow(logits: Floats, experts: Floats, divided: bool) -> Floats:
        return weights(logits, experts, divided).astype(np.float32)

    return (
        lambda site: site.of(partial(weights, divided=site.config.normalized_experts)),
        lambda base: base.with_operations(expert_weights=narrow),
    )


def _counts(model: Model) -> list[int]:
    """Other numbers of experts that engines take."""
    c = model.config
    return [k for k in dict.fromkeys((1, c.experts_used - 1, c.experts_used + 1, c.experts)) if 0 < k <= c.experts and k != c.experts_used]


def _other_count(site: Site) -> Computes:
    c, n, layer = site.config, site.index, site.layer
    assert layer is not None
    source = site.layer_input if c.parallel_residual else Key("ffn_inp", n)
    source = source if layer.ffn_norm is None else Key("ffn_norm", n)

    def computed(taken: int, values: Values) -> Array:
        x, logits = values[source], values[Key("ffn_moe_logits", n)]
        experts = spec.top_experts(logits, taken)
        gate, up = (_products(site, name, x, experts) for name in ("ffn_gate", "ffn_up"))
        y = _products(site, "ffn_down", spec.ACTIVATIONS[c.activation](gate, up), experts)
        return op.mix(y, spec.expert_weights(logits, experts, c.normalized_experts)).value

    for taken in _counts(site.model):
        yield {"taken": taken, "right": c.experts_used}, partial(computed, taken)


def _products(site: Site, name: str, x: Array, experts: NDArray, order: Sequence[int] | None = None) -> Array:
    """Each slot's product with the matrix `name` of its expert; with an order, of the expert that is in its place there."""
    assert site.layer is not None
    linears: list[Linear] = [getattr(expert, name) for expert in site.layer.experts]
    return op.of_experts(linears if order is None else [linears[e] for e in order], site.dialect, x, experts).value


def _engine_of_other_count(base: Variant) -> Engines:
    for taken in _counts(base.model):
        yield {"taken": taken, "right": base.model.config.experts_used}, base.with_config(experts_used=taken)


def _orders(model: Model) -> Iterator[tuple[str, list[int]]]:
    """Orders in which engines have put experts: backwards, off by one, and by their numbers as texts (0, 1, 10, 11, 2)."""
    numbers = list(range(model.config.experts))
    orders = {
        "backwards": numbers[::-1],
        "each in the place of the next": numbers[-1:] + numbers[:-1],
        "each in the place of the previous": numbers[1:] + numbers[:1],
        "sorted by their numbers as texts": sorted(numbers, key=str),
    }
    for text, order in orders.items():
        if order != numbers and order not in [earlier for name, earlier in orders.items() if name < text]:
            yield text, order


def _permuted(site: Site) -> Computes:
    for text, order in _orders(site.model):
        yield {"order": text}, site.of(partial(_permuted_products, site, order))


def _permuted_products(site: Site, order: Sequence[int], x: Array, experts: Array) -> Array:
    return _products(site, PRODUCTS[site.name], x, experts, order)


def _engine_of_permuted(base: Variant) -> Engines:
    for text, order in _orders(base.model):

        def permuted(layer: Layer, order: Sequence[int] = order) -> Layer:
            return replace(layer, experts=tuple(layer.experts[e] for e in order))

        yield {"order": text}, base.with_layers(permuted)


def _reduced(how: Callable[..., NDArray]) -> Callable[[Site], Compute]:
    """A mistake in how the results of a token's experts become one."""
    return lambda site: site.of(lambda y, weights: how(y.reshape(*weights.shape, -1), axis=1))


def _without_shared(site: Site) -> Compute:
    c, left = site.config, [key for key in site.operation.inputs if key.name != "ffn_shexp_out"]
    return lambda values: op.add_scaled(c.residual_scale, *(values[key] for key in left)).value


_NOT_DIVIDED = "the weights of a token's experts are not divided by their sum"
_DIVIDED = "the weights of a token's experts are divided by their sum, as by a softmax over their logits alone"
_SIGMOIDS = "the weights are sigmoids of the logits, not their softmax"
_RAW = "the weights are the logits of the router themselves: the softmax is missing"
_UNGATED = "the shared expert is not multiplied by the sigmoid of its gate"
_engine_averaged = partial(Variant.with_operations, mix=lambda y, weights: y.mean(axis=1))
_engine_ungated = partial(Variant.with_operations, sigmoid_gate=lambda x, gate: x)


def _engine_without_shared(base: Variant) -> Variant:
    return base.with_field("ffn_gate_inp_shexp", lambda gain: None)


MISTAKES = (
    Mistake("experts.not_normalised", _NOT_DIVIDED, WEIGHTS, _normalizes, *_normalized(False)),
    Mistake("experts.normalised", _DIVIDED, WEIGHTS, _does_not_normalize, *_normalized(True)),
    Mistake("experts.sigmoid", _SIGMOIDS, WEIGHTS, _has_experts, *_weighted_by(spec.sigmoid)),
    Mistake("experts.raw", _RAW, WEIGHTS, _has_experts, *_weighted_by(lambda logits: logits, normalized=False)),
    Mistake("experts.count", "a token takes {taken} experts, not {right}", OUTPUT, _has_experts, _other_count, _engine_of_other_count),
    Mistake("experts.permuted", "experts are in another order: {order}", tuple(PRODUCTS), _has_experts, _permuted, _engine_of_permuted),
    *alike(
        "experts",
        OUTPUT,
        ("averaged", "the results of experts are averaged, without weights", _reduced(np.mean), _engine_averaged),
        ("unweighted", "the results of experts are added without weights", _reduced(np.sum)),
        when=_has_experts,
    ),
    Mistake("experts.shared_missing", "the shared expert is missing", ("l_out",), _has_shared, _without_shared, _engine_without_shared),
    Mistake("experts.shared_ungated", _UNGATED, ("ffn_shexp_out",), _has_shared, lambda site: site.of(lambda y, x: y), _engine_ungated),
)
