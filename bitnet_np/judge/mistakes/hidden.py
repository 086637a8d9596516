"""Mistakes that are tried where their tensor, or what it is computed from, is not in a dump: through all operations in between.

Where it is, readings see them, and any number in them, in the tensor itself (readings/): faster, and more of them.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...traces.points import Key
from .. import operations as op
from ..graph import EMBEDDING, NORM, operations
from . import caches, gates, norms, products, rope
from .layers import RESIDUALS, embedded
from .mistake import Array, Compute, Computes, Mistake, Site, Values, alike

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


# --- any tensor -----------------------------------------------------------------------------------------------------------------------

_NAMED = (*products.TABLES, *norms.AT, "kqv_out", "ffn_out", "attn_post_norm", "ffn_post_norm")


def _right(site: Site) -> Callable[[Values], Array]:
    return site.of(lambda *inputs: site.operation.evaluate(*inputs).value)


def _changed(change: Callable[[Array], Array]) -> Callable[[Site], Compute]:
    return lambda site: lambda values: change(_right(site)(values))


def _exchanged_halves(x: Array) -> Array:
    return np.roll(x, x.shape[1] // 2, axis=1)


def _by_number(change: Callable[[Array, float], Array], site: Site) -> Callable[[float], Compute]:
    right = _right(site)
    return lambda number: lambda values: change(right(values), number)


def _numbered(id: str, text: str, at: tuple[str, ...], change: Callable[[Array, float], Array], grid: tuple[float, ...] = _GRID) -> Mistake:
    """A change of every number by one that is sought."""
    return Mistake(f"tensor.{id}", text, at, search=partial(_by_number, change), grid=grid, apart=True)


_CLIPPED_AT = ("Qcur", "Kcur", "Vcur", "kqv_out", "ffn_gate", "ffn_up", "ffn_out", *RESIDUALS)
_SIGNED_GRID = (*np.geomspace(-10, -0.01, 5), *np.geomspace(0.01, 10, 5))
_ANY = (
    *alike(
        "tensor",
        _NAMED,
        ("sign", "the sign is flipped", _changed(np.negative)),
        ("row_before", "every row is that of the token before", _changed(lambda x: np.roll(x, 1, axis=0))),
        ("row_behind", "every row is that of the next token", _changed(lambda x: np.roll(x, -1, axis=0))),
        ("halves", "the two halves of each row are exchanged", _changed(_exchanged_halves)),
        ("reversed", "columns are in the opposite order", _changed(lambda x: x[:, ::-1])),
        ("zero", "it is all 0", _changed(lambda x: 0 * x)),
        ("first_row", "every row is that of the first token", _changed(lambda x: np.broadcast_to(x[0], x.shape))),
    ),
    _numbered("factor", "everything is {number:.6g} times what it should be", _NAMED, lambda x, number: number * x),
    _numbered("clipped", "numbers beyond {number:.4g} are clipped", _CLIPPED_AT, lambda x, number: np.clip(x, -number, number)),
    _numbered("constant", "{number:.5g} is added to every number", products.TABLES, lambda x, number: x + number, _SIGNED_GRID),
)


# --- norms ----------------------------------------------------------------------------------------------------------------------------


def _mean(part: slice, times: float = 1.0) -> norms.Norm:
    """The norm with the mean square of a part of the numbers, or with so many times the right one."""
    return lambda x, gain, eps: x / np.sqrt((x[:, part] ** 2).mean(axis=1, keepdims=True) * times + eps) * gain


def _twice(x: Array, gain: Array, eps: float) -> Array:
    return spec.rms_norm(spec.rms_norm(x, gain, eps), gain, eps)


def _of_before(x: Array, gain: Array, eps: float) -> Array:
    return x / np.sqrt(np.roll((x * x).mean(axis=1, keepdims=True), 1, axis=0) + eps) * gain


_OTHER_NORMS: dict[str, norms.Norm] = {
    "the sum of squares is divided by half the width": _mean(slice(None), 2.0),
    "the sum of squares is divided by twice the width": _mean(slice(None), 0.5),
    "the norm is applied twice": _twice,
    "the weight is applied before the norm, and is part of the mean square": lambda x, g, eps: spec.rms_norm(x * g, np.ones(1), eps),
    "numbers are divided by the mean of their magnitudes": lambda x, g, eps: x / (np.abs(x).mean(axis=1, keepdims=True) + eps) * g,
    "numbers are divided by their largest magnitude": lambda x, g, eps: x / (np.abs(x).max(axis=1, keepdims=True) + eps) * g,
    "one mean square serves all tokens": lambda x, g, eps: x / np.sqrt((x * x).mean() + eps) * g,
    "every token has the mean square of the one before": _of_before,
    "the weight is divided by instead of multiplied": lambda x, g, eps: spec.rms_norm(x, 1 / g, eps),
    "the weight is in the opposite order": lambda x, g, eps: spec.rms_norm(x, g[::-1], eps),
    "the variance, without the mean, is taken for the mean square": lambda x, g, eps: x / np.sqrt(x.var(axis=1, keepdims=True) + eps) * g,
}


def _norms(site: Site) -> Computes:
    """RMS norms with a wrong mean, or a weight in the wrong place."""
    if norms.is_layer_norm(site):
        return
    half = norms.gain_of(site).size // 2
    parts = {
        "the mean square is that of the first half of the numbers": _mean(slice(None, half)),
        "the mean square is that of the second half of the numbers": _mean(slice(half, None)),
        "the mean square is that of every second number": _mean(slice(None, None, 2)),
    }
    for words, norm in (parts | _OTHER_NORMS).items():
        yield {"how": words}, norms.by(site, norm)


def _blockwise(site: Site) -> Computes:
    """Norms of groups of numbers, each by itself."""
    gain, eps = norms.gain_of(site), site.config.eps
    if norms.is_layer_norm(site) or site.name in norms.HEAD_NORMS:
        return
    for count in (2, 4, 8, 16):
        if gain.size % count == 0:

            def norm(x: Array, count: int = count) -> Array:
                cut = x.reshape(len(x), count, -1)
                return (cut / np.sqrt((cut * cut).mean(axis=2, keepdims=True) + eps)).reshape(x.shape) * gain

            yield {"n": gain.size // count}, site.of(norm)


def _norm_of_layer(site: Site) -> Computes:
    for n, layer in enumerate(site.model.layers):
        if site.layer is not None and abs(n - site.index) > 1 and not norms.is_layer_norm(site):
            yield {"n": n}, norms.weighted(site, getattr(layer, norms.field_of(site)))


def _of_other_head_norm(site: Site) -> Computes:
    for other in norms.HEAD_NORMS.values():
        weight = getattr(site.layer, other)
        if other != norms.HEAD_NORMS[site.name] and weight is not None and weight.shape == norms.gain_of(site).shape:
            yield {"other": other}, norms.weighted(site, weight)


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


def _epsilon(site: Site) -> Callable[[float], Compute] | None:
    if norms.is_layer_norm(site):
        return None
    gain = norms.gain_of(site)
    return lambda number: norms.of_rows(site, lambda x: spec.rms_norm(x, gain, number))


_NORMS = (
    *alike(
        "norms",
        norms.AT,
        ("how", "it is another norm: {how}", _norms),
        ("blocks", "the norm is taken over each {n} numbers by itself", _blockwise),
        ("of_layer", "the weight of layer {n} is used", _norm_of_layer),
    ),
    Mistake("norms.other_head_norm", "the weight of {other} is used", tuple(norms.HEAD_NORMS), compute=_of_other_head_norm),
    Mistake("norms.after_rope", "the norm of queries and keys comes after RoPE", rope.AT, compute=_normed_late),
    Mistake("norms.epsilon", "epsilon is {number:.4g}", norms.AT, search=_epsilon, grid=tuple(np.geomspace(1e-8, 10, 10))),
)


# --- activations ----------------------------------------------------------------------------------------------------------------------


def _gate(function: Callable[[Array, float], Array], site: Site) -> Callable[[float], Compute] | None:
    """The product of up and a function of the gate, with a number in it."""
    if not site.config.gated:
        return None
    return lambda number: site.of(lambda gate, up: function(gate, number) * up)


def _sigmoid(x: Array, slope: float) -> Array:
    return x / (1 + np.exp(-slope * x))


def _limited(which: str, site: Site) -> Callable[[float], Compute] | None:
    if not site.config.gated:
        return None
    right = site.operation.evaluate

    if which == "gate":
        return lambda limit: site.of(lambda gate, up: right(np.minimum(gate, limit), up).value)
    return lambda limit: site.of(lambda gate, up: right(gate, np.clip(up, -limit, limit)).value)


def _gated(id: str, text: str, search: Callable[[Site], Callable[[float], Compute] | None], grid: tuple[float, ...] = _GRID) -> Mistake:
    return Mistake(f"gates.{id}", text, gates.AT, search=search, grid=grid)


_power = partial(_gate, lambda gate, power: np.maximum(gate, 0) ** power)
_leaky = partial(_gate, lambda gate, slope: np.where(gate > 0, gate, slope * gate))
_GATES = (
    _gated("slope", "gate * sigmoid({number:.4g} gate) * up", partial(_gate, _sigmoid)),
    _gated("power", "relu(gate)^{number:.4g} * up", _power, tuple(np.geomspace(0.25, 6, 15))),
    _gated("leaky", "negative gates are multiplied by {number:.4g}, relu is leaky", _leaky),
    _gated("limit_gate", "gates above {number:.4g} are clipped", partial(_limited, "gate")),
    _gated("limit_up", "numbers of up beyond {number:.4g} are clipped", partial(_limited, "up")),
)


# --- residuals and layers -------------------------------------------------------------------------------------------------------------


def _residuals(site: Site) -> Computes:
    if len(site.operation.inputs) != 2:
        return
    scale = site.config.residual_scale
    for shift, which in ((1, "before"), (-1, "behind")):
        yield {"how": f"the residual is that of the token {which}"}, site.of(lambda h, x, s=shift: np.roll(h, s, axis=0) + x * scale)
        yield {"how": f"the branch is that of the token {which}"}, site.of(lambda h, x, s=shift: h + np.roll(x, s, axis=0) * scale)
    yield {"how": "the branch is added twice"}, site.of(lambda h, x: h + 2 * x * scale)
    if site.name == "l_out":
        attended = Key("attn_o_out", site.index)
        yield {"how": "attention's branch, attn_o_out, is added again"}, lambda values: values[attended] * scale + _right(site)(values)


def _branch(which: int, site: Site) -> Callable[[float], Compute] | None:
    if len(site.operation.inputs) != 2:
        return None
    scale = site.config.residual_scale
    return lambda number: site.of(lambda h, x: h * (number if which == 0 else 1) + x * scale * (number if which == 1 else 1))


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


def _times(id: str, what: str, which: int) -> Mistake:
    """A term of a sum of two that is multiplied by a number."""
    text = f"the {what} is {{number:.5g}} times what it should be"
    return Mistake(f"residuals.{id}", text, RESIDUALS, search=partial(_branch, which), grid=_GRID)


_OTHER_LAYER = "the layer is computed with the weights of layer {n}: layers are exchanged, or one runs twice"
_LAYERS = (
    Mistake("residuals.how", "it is another sum: {how}", RESIDUALS, compute=_residuals),
    _times("factor", "residual", 0),
    _times("branch_factor", "branch", 1),
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
    *_ANY,
    *products.MISTAKES,
)
"""All of them, the cheap ones first: trying them ends where work does."""
