"""Mistakes in layers with experts: which are taken, how their results are weighted, and the shared one."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ..graph import OF_EXPERTS, evaluated, operations
from ..variant import Variant
from .edited import named
from .mistake import Array, Computes, Engines, Mistake, Site, Values

WEIGHTS = ("ffn_moe_weights",)
OUTPUT = ("ffn_moe_out",)


def _normalized(base: Variant) -> Variant | None:
    c = base.model.config
    return None if c.normalized_experts or not c.has_choice else base.with_config(normalized_experts=True)


def _without_shared(base: Variant) -> Variant | None:
    return base.with_field("ffn_gate_inp_shexp", lambda gate: None) if base.model.config.shared_ffn else None


def _counted(base: Variant) -> Engines:
    """Other numbers of experts that engines take."""
    c = base.model.config
    for taken in dict.fromkeys((1, c.experts_used - 1, c.experts_used + 1, c.experts)):
        if 0 < taken <= c.experts and taken != c.experts_used:
            yield {"taken": taken, "right": c.experts_used}, base.with_config(experts_used=taken)


def _other_count(site: Site) -> Computes:
    for numbers, engine in _counted(Variant("", site.model, site.dialect)):
        yield numbers, partial(_mixed, engine, site)


def _mixed(engine: Variant, site: Site, values: Values) -> Array:
    """What another engine makes of the experts of a layer and the router's logits."""
    every = (o for o in operations(engine.model, engine.dialect) if o.key.layer == site.index and o.key.name.startswith("ffn_moe_"))
    return evaluated((o for o in every if o.key.name != "ffn_moe_logits"), values.__getitem__)[site.key]


def _orders(base: Variant) -> Iterator[tuple[str, list[int]]]:
    """Orders in which engines have put experts: backwards, off by one, and by their numbers as texts (0, 1, 10, 11, 2)."""
    numbers = list(range(base.model.config.experts))
    yield "backwards", numbers[::-1]
    yield "each in the place of the next", numbers[-1:] + numbers[:-1]
    yield "each in the place of the previous", numbers[1:] + numbers[:1]
    yield "sorted by their numbers as texts", sorted(numbers, key=str)


def _permuted(base: Variant) -> Engines:
    tried: list[list[int]] = [sorted(range(base.model.config.experts))]
    for text, order in _orders(base):
        if order not in tried:
            tried.append(order)
            layers = (replace(layer, experts=tuple(layer.experts[e] for e in order)) for layer in base.model.layers)
            yield {"order": text}, base.with_model(layers=tuple(layers))


_SUM = "left_out: the sum of the token's experts is not divided out"
_PLAIN = "left_out: the largest logit is left out + left_out: the softmax's sum is not divided out"
_NOT_DIVIDED = "the weights of a token's experts are not divided by their sum"
_DIVIDED = "the weights of a token's experts are divided by their sum, as by a softmax over their logits alone"
_UNGATED = "the shared expert is not multiplied by the sigmoid of its gate"
_SIGMOIDS = "the weights are sigmoids of the logits, not their softmax"
_RAW = "the weights are the logits of the router themselves: the softmax is missing"
_UNWEIGHTED = "left_out: the weights of experts are left out"
MISTAKES = (
    *named("experts", WEIGHTS, ("not_normalised", _SUM, _NOT_DIVIDED), likely=True),
    Mistake("experts.normalised", _DIVIDED, WEIGHTS, engine=_normalized),
    *named(
        "experts",
        WEIGHTS,
        ("sigmoid", f"other_function: sigmoid instead of exp + {_PLAIN}", _SIGMOIDS),
        ("raw", f"left_out: exp is left out + {_PLAIN}", _RAW),
        ("raw_undivided", f"left_out: exp is left out + {_PLAIN} + {_SUM}", f"{_RAW}, and their sum is not divided out"),
        likely=True,
    ),
    Mistake("experts.permuted", "experts are in another order: {order}", tuple(OF_EXPERTS), engine=_permuted),
    Mistake("experts.count", "a token takes {taken} experts, not {right}", OUTPUT, compute=_other_count, engine=_counted),
    *named(
        "experts",
        OUTPUT,
        ("averaged", f"{_UNWEIGHTED} + other_function: mean instead of sum", "the results of experts are averaged, without weights"),
        ("unweighted", _UNWEIGHTED, "the results of experts are added without weights"),
        likely=True,
    ),
    Mistake("experts.shared_missing", "the shared expert is missing", ("l_out",), engine=_without_shared),
    *named("experts", ("ffn_shexp_out",), ("shared_ungated", "left_out: the gate is left out", _UNGATED), likely=True),
)
