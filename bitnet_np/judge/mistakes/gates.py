"""Mistakes in the feed-forward's activation."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine.dialects import Dialect
from ...kernels import cpu
from ...model.records import Model
from ..roundings import NARROW
from ..variant import Floats, Variant
from .mistake import Array, Compute, Computes, Engines, Mistake, Site

Round = Callable[[Array], Array]

AT = ("ffn_out", "ffn_moe_swiglu")
RIGHT = {
    "relu2": "relu(gate)^2 * up",
    "silu": "SiLU(gate) * up",
    "gelu_gate": "GELU(gate) * up",
    "gelu": "the exact GELU",
    "gelu_tanh": "GELU's approximation by tanh",
}
"""The function that each Config.activation stands for, in words."""
KERNELS = {"relu2": "relu2_gate", "silu": "silu_gate", "gelu_gate": "gelu_gate", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}


def _gated(model: Model, dialect: Dialect) -> bool:
    return model.config.gated


def _ungated(model: Model, dialect: Dialect) -> bool:
    return not model.config.gated


def _silu(x: Array) -> Array:
    return spec.silu_gate(x, np.ones_like(x))


def _silu32(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def _mistake(
    id: str,
    text: str,
    compute: Callable[..., Array],
    engine: Callable[..., NDArray] | None = None,
    *,
    when: Callable[[Model, Dialect], bool] = _gated,
    of: tuple[str, ...] = tuple(RIGHT),
) -> Mistake:
    """Another function of gate and up, or of up alone: in float64, and in float32 for whole engines. of: the right activations."""

    def at_operation(site: Site) -> Computes:
        if site.config.activation in of:
            yield {"right": RIGHT[site.config.activation]}, site.of(compute)

    def in_engine(base: Variant) -> Engines:
        activation = base.model.config.activation
        if engine is not None and activation in of:
            yield {"right": RIGHT[activation]}, base.with_operations(**{KERNELS[activation]: engine})

    return Mistake("activation." + id, text, AT, when, at_operation, in_engine if engine else None)


def _swapped(site: Site) -> Compute:
    gate = spec.ACTIVATIONS[site.config.activation]
    return site.of(lambda g, u: gate(u, g))


def _narrow(site: Site) -> Computes:
    """The activation, its input, or both in 16 bits, as where an engine reads it off a table."""
    right = spec.ACTIVATIONS[site.config.activation]

    def compute(before: Round, after: Round, gate: Array, up: Array | float = 1.0) -> Array:
        return after(right(before(gate), np.ones_like(gate)) if site.config.gated else right(before(gate))) * up

    same: Round = np.asarray
    for kind in ("float16", "bfloat16"):
        narrow = NARROW[kind]
        for what, before, after in (("input is", narrow, same), ("value is", same, narrow), ("input and value are", narrow, narrow)):
            yield {"kind": kind, "what": what}, site.of(partial(compute, before, after))


def _engine_swapped(base: Variant) -> Variant:
    name = KERNELS[base.model.config.activation]
    right = getattr(cpu, name)
    return base.with_operations(**{name: lambda gate, up: right(up, gate)})


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


def _relu2(x: Array) -> Array:
    return np.maximum(x, 0) ** 2


def _relu_gate(gate: Array, up: Array) -> Array:
    return np.maximum(gate, 0) * up


def _square_gate(gate: Array, up: Array) -> Array:
    return gate * gate * up


_EXACT_GELU = "the exact GELU of the gate instead of its approximation by tanh"
_SWAPPED = "gate and up are swapped"
GATES = (
    _mistake("silu", "SiLU(gate) * up instead of {right}", spec.silu_gate, lambda g, u: _silu32(g) * u, of=("relu2", "gelu_gate")),
    _mistake("relu2", "relu(gate)^2 * up instead of {right}", spec.relu2_gate, cpu.relu2_gate, of=("silu", "gelu_gate")),
    _mistake("gelu_gate", "GELU(gate) * up instead of {right}", spec.gelu_gate, cpu.gelu_gate, of=("relu2", "silu")),
    _mistake("gelu_gate_exact", _EXACT_GELU, lambda g, u: spec.gelu(g) * u, lambda g, u: cpu.gelu(g) * u, of=("gelu_gate",)),
    _mistake("relu", "relu(gate) * up, not squared", _relu_gate, _relu_gate),
    _mistake("square", "gate^2 * up, without relu", _square_gate, _square_gate),
    _mistake("none", "the gate is not activated: gate * up instead of {right}", lambda g, u: g * u),
    _mistake("no_gate", "the gate is missing: up instead of {right}", lambda g, u: u),
    _mistake("sigmoid", "sigmoid(gate) * up instead of {right}", lambda g, u: u / (1 + np.exp(-g))),
    _mistake(
        "quick_gelu", "quick GELU, gate * sigmoid(1.702 gate) * up, instead of {right}", lambda g, u: g / (1 + np.exp(-1.702 * g)) * u
    ),
    Mistake("activation.swapped", _SWAPPED, AT, _gated, _swapped, _engine_swapped),
    _mistake("silu_swapped", f"SiLU(up) * gate: {_SWAPPED}, and SiLU for relu squared", lambda g, u: spec.silu_gate(u, g), of=("relu2",)),
    _mistake(
        "relu2_swapped", f"relu(up)^2 * gate: {_SWAPPED}, and relu squared for SiLU", lambda g, u: spec.relu2_gate(u, g), of=("silu",)
    ),
    _mistake("no_up", "up is not multiplied in", lambda g, u: _relu2(g), of=("relu2",)),
    _mistake("no_up_silu", "up is not multiplied in", lambda g, u: _silu(g), of=("silu",)),
    _mistake("relu_of_product", "relu(gate * up)", lambda g, u: _relu(g * u)),
    _mistake("relu2_of_product", "relu(gate * up)^2", lambda g, u: _relu2(g * u)),
)
UNGATED = (
    _mistake("gelu", "the exact GELU instead of {right}", spec.gelu, cpu.gelu, when=_ungated, of=("gelu_tanh",)),
    _mistake("gelu_tanh", "GELU's approximation by tanh instead of {right}", spec.gelu_tanh, cpu.gelu_tanh, when=_ungated, of=("gelu",)),
    _mistake("silu_ungated", "SiLU instead of {right}", _silu, _silu32, when=_ungated),
    _mistake("relu_ungated", "relu instead of {right}", _relu, _relu, when=_ungated),
    _mistake("relu2_ungated", "relu squared instead of {right}", _relu2, _relu2, when=_ungated),
)
_TABLE = "the activation's {what} rounded to {kind}, as in a table of it"
MISTAKES = (*GATES, *UNGATED, Mistake("activation.narrow", _TABLE, AT, compute=_narrow, fault=False))
