"""Mistakes that the search tries beside the edits of single operations: of tokens, of functions with a number, and of whole layers."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...traces.points import Key
from .. import operations as op
from ..graph import EMBEDDING, NORM, operations
from . import caches, gates, rope
from .layers import embedded
from .mistake import Array, Compute, Computes, Mistake, Site, Values

_GRID = tuple(np.geomspace(0.01, 100, 10))


# --- the embedding --------------------------------------------------------------------------------------------------------------------


def _tokens(site: Site) -> Computes:
    yield {"how": "tokens are in the opposite order"}, embedded(site, lambda ids: ids[::-1])
    for bits in (7, 8, 15, 16):
        if site.config.vocab > 1 << bits:
            yield {"how": f"token ids are kept in {bits} bits"}, embedded(site, lambda ids, n=1 << bits: ids % n)
    for shift in (2, 3, -2, -3):
        yield {"how": f"token ids are off by {shift}"}, embedded(site, lambda ids, s=shift: ids + s)
    for shift, which in ((1, "before"), (-1, "behind")):
        yield {"how": f"every position has the token {which}"}, embedded(site, lambda ids, s=shift: np.roll(ids, s))
    for a in range(min(site.length, 32) - 1):
        yield {"how": f"the tokens of positions {a} and {a + 1} are exchanged"}, embedded(site, partial(_exchanged, a))
        yield {"how": f"position {a} has token 0"}, embedded(site, partial(_replaced, a, None))
        yield {"how": f"position {a + 1} has the token of position {a}"}, embedded(site, partial(_replaced, a + 1, a))


def _exchanged(a: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    ids = ids.copy()
    if a + 1 < len(ids):
        ids[[a, a + 1]] = ids[[a + 1, a]]
    return ids


def _replaced(at: int, source: int | None, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    ids = ids.copy()
    if at < len(ids):
        ids[at] = 0 if source is None else ids[source]
    return ids


def _right(site: Site) -> Callable[[Values], Array]:
    return site.of(lambda *inputs: site.operation.evaluate(*inputs).value)


# --- norms ----------------------------------------------------------------------------------------------------------------------------


def _normed_late(site: Site) -> Computes:
    """Queries and keys that are rotated first and normed then."""
    layer = site.layer
    gain = None if layer is None else layer.attn_q_norm if site.name == "Qcur_rope" else layer.attn_k_norm
    if gain is not None:
        raw = Key(site.name.removesuffix("_rope"), site.index)

        def compute(values: Values) -> Array:
            turned = op.rope(site.model, site.dialect, values[raw]).value
            return (op.rms_norm if site.config.joint_qk_norms else op.head_norm)(turned, gain, site.config.eps).value

        yield {}, compute


_NORMS = (Mistake("norms.after_rope", "the norm of queries and keys comes after RoPE", rope.AT, compute=_normed_late),)


# --- activations ----------------------------------------------------------------------------------------------------------------------


def _gate(function: Callable[[Array, float], Array], site: Site) -> Callable[[float], Compute] | None:
    """The product of up and a function of the gate, with a number in it."""
    if not site.config.gated:
        return None
    return lambda number: site.of(lambda gate, up: function(gate, number) * up)


def _sigmoid(x: Array, slope: float) -> Array:
    return x / (1 + np.exp(-slope * x))


def _gated(id: str, text: str, search: Callable[[Site], Callable[[float], Compute] | None], grid: tuple[float, ...] = _GRID) -> Mistake:
    return Mistake(f"gates.{id}", text, gates.AT, search=search, grid=grid)


_power = partial(_gate, lambda gate, power: np.maximum(gate, 0) ** power)
_leaky = partial(_gate, lambda gate, slope: np.where(gate > 0, gate, slope * gate))
_GATES = (
    _gated("slope", "gate * sigmoid({number:.4g} gate) * up", partial(_gate, _sigmoid)),
    _gated("power", "relu(gate)^{number:.4g} * up", _power, tuple(np.geomspace(0.25, 6, 15))),
    _gated("leaky", "negative gates are multiplied by {number:.4g}, relu is leaky", _leaky),
)


# --- residuals and layers -------------------------------------------------------------------------------------------------------------


def _through(site: Site, n: int, values: Values, source: Key) -> Array:
    """The output of layer n with a tensor as its input."""
    own: dict[Key, Array] = {}
    for operation in operations(site.model, site.dialect):
        if operation.key.layer == n and not operation.key.name.endswith(("_codes", "_scale")):
            inputs = [own[k] if k in own else values[source] for k in operation.inputs]
            own[operation.key] = operation.evaluate(*inputs).value
    return own[Key("l_out", n)]


def _whole_layer(site: Site) -> Computes:
    for n in range(len(site.model.layers)):
        if n != site.index:
            yield {"n": n}, partial(_through, site, n, source=site.layer_input)


def _runs_twice(site: Site) -> Compute:
    return lambda values: _through(site, site.index, {site.operation.key: _right(site)(values)}, site.operation.key)


def _last_twice(site: Site) -> Compute:
    last = len(site.model.layers) - 1
    key = Key("l_out", last)
    return lambda values: site.operation.evaluate(_through(site, last, values, key)).value


_OTHER_LAYER = "the layer is computed with the weights of layer {n}: layers are exchanged, or one runs twice"
_LAYERS = (
    Mistake("layers.other", _OTHER_LAYER, ("l_out",), compute=_whole_layer),
    Mistake("layers.twice", "the layer runs twice", ("l_out",), compute=_runs_twice),
    Mistake("layers.last_twice", "the last layer runs twice", (NORM.name,), compute=_last_twice),
)

MISTAKES: tuple[Mistake, ...] = (
    Mistake("tokens.others", "other rows are embedded: {how}", (EMBEDDING.name,), compute=_tokens),
    *_LAYERS,
    *_NORMS,
    *rope.ACROSS,
    *caches.MISTAKES,
    *_GATES,
)
"""All of them, the cheap ones first: trying them ends where work does."""
