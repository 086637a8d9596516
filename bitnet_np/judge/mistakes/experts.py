"""Mistakes in layers with experts: which are taken, how their results are weighted, and the shared one."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine.dialects import Dialect
from ...model.records import Linear, Model
from ...traces.points import Key
from .. import operations as op
from ..graph import OF_EXPERTS
from .edited import named
from .mistake import Array, Compute, Computes, Mistake, Site, Values, alike

WEIGHTS = ("ffn_moe_weights",)
OUTPUT = ("ffn_moe_out",)


def _does_not_normalize(model: Model, dialect: Dialect) -> bool:
    return model.config.experts > model.config.experts_used > 0 and not model.config.normalized_experts


def _has_shared(model: Model, dialect: Dialect) -> bool:
    return model.config.shared_ffn > 0


def _normalized(site: Site) -> Compute:
    """Weights that are divided by their sum."""
    return site.of(lambda logits, experts: spec.expert_weights(logits, experts.astype(np.intp), True))


def _weighted_by(function: Callable[[NDArray], NDArray], normalized: bool | None = None) -> Callable[[Site], Compute]:
    """Weights that are another function of the logits than softmax. normalized: None has them as the model has."""

    def weights(logits: NDArray, experts: NDArray, divided: bool) -> NDArray:
        y = function(np.take_along_axis(logits, experts.astype(np.intp), axis=1))
        return y / y.sum(axis=1, keepdims=True) if divided else y

    return lambda site: site.of(partial(weights, divided=site.config.normalized_experts if normalized is None else normalized))


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
    return _products(site, OF_EXPERTS[site.name], x, experts, order)


def _reduced(how: Callable[..., NDArray]) -> Callable[[Site], Compute]:
    """A mistake in how the results of a token's experts become one."""
    return lambda site: site.of(lambda y, weights: how(y.reshape(*weights.shape, -1), axis=1))


def _without_shared(site: Site) -> Compute:
    c, left = site.config, [key for key in site.operation.inputs if key.name != "ffn_shexp_out"]
    return lambda values: op.add_scaled(c.residual_scale, *(values[key] for key in left)).value


_NOT_DIVIDED = "the weights of a token's experts are not divided by their sum"
_DIVIDED = "the weights of a token's experts are divided by their sum, as by a softmax over their logits alone"
_UNGATED = "the shared expert is not multiplied by the sigmoid of its gate"
_RAW = "the weights are the logits of the router themselves: the softmax is missing"
_ORDER = "experts are in another order: {order}"
MISTAKES = (
    *named("experts", WEIGHTS, ("not_normalised", "left_out: the sum of the token's experts is not divided out", _NOT_DIVIDED, "")),
    Mistake("experts.normalised", _DIVIDED, WEIGHTS, _does_not_normalize, _normalized, everywhere=""),
    *alike(
        "experts",
        WEIGHTS,
        ("sigmoid", "the weights are sigmoids of the logits, not their softmax", _weighted_by(spec.sigmoid)),
        ("raw", _RAW, _weighted_by(lambda logits: logits, normalized=False)),
        everywhere="",
    ),
    Mistake("experts.permuted", _ORDER, tuple(OF_EXPERTS), compute=_permuted, everywhere=""),
    *alike(
        "experts",
        OUTPUT,
        ("count", "a token takes {taken} experts, not {right}", _other_count),
        ("averaged", "the results of experts are averaged, without weights", _reduced(np.mean)),
        ("unweighted", "the results of experts are added without weights", _reduced(np.sum)),
        everywhere="",
    ),
    Mistake("experts.shared_missing", "the shared expert is missing", ("l_out",), _has_shared, _without_shared, everywhere=""),
    *named("experts", ("ffn_shexp_out",), ("shared_ungated", "left_out: the gate is left out", _UNGATED, "")),
)
