"""Mistakes in norms."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine.dialects import Dialect
from ...kernels import cpu
from ...model.families import NORMS
from ...model.records import MATRICES, Model
from ...traces.points import Key
from ..variant import Floats, Variant
from .matrices import every, in_fields
from .mistake import Array, Compute, Computes, Engines, Mistake, Numbers, Site, alike

Norm = Callable[[Array, Array, float], Array]
"""Rows [R, W], the weight [W], epsilon -> rows."""

HEAD_NORMS = {"Qcur_normed": "attn_q_norm", "Kcur_normed": "attn_k_norm"}
"""The output tensor of each norm of single heads -> its weight's field in model.Layer."""
AT = (*NORMS, *HEAD_NORMS, "result_norm")
SUB_NORMS = ("attn_sub_norm", "ffn_sub_norm")
EPSILONS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
EVERY: Numbers = {"where": "in every norm: "}
LAST: Numbers = {"where": "at result_norm: "}


def is_layer_norm(site: Site) -> bool:
    """Whether the norm is a LayerNorm."""
    return site.config.norm == "layer" and site.name not in (*SUB_NORMS, *HEAD_NORMS)


def field_of(site: Site) -> str:
    """The field of model.Layer that has the norm's weight."""
    return HEAD_NORMS.get(site.name, site.name)


def gain_of(site: Site) -> Array:
    """The norm's weight in float64."""
    weight = site.model.output_norm if site.layer is None else getattr(site.layer, field_of(site))
    return weight.astype(np.float64)


def of_rows(site: Site, norm: Callable[[Array], Array]) -> Compute:
    """The Compute of a norm of rows, or of each head by itself."""
    if site.name not in HEAD_NORMS or site.config.joint_qk_norms:
        return site.of(norm)
    return site.of(lambda x: norm(x.reshape(-1, site.config.head_dim)).reshape(x.shape))


def by(site: Site, norm: Norm) -> Compute:
    """Another norm with the site's weight and epsilon."""
    gain = gain_of(site)
    return of_rows(site, lambda x: norm(x, gain, site.config.eps))


def weighted(site: Site, weight: NDArray) -> Compute:
    """The norm with another weight."""
    gain = weight.astype(np.float64)
    return of_rows(site, lambda x: spec.rms_norm(x, gain, site.config.eps))


def _rms(norm: Norm) -> Callable[[Site], Compute | None]:
    """A mistake in RMS norms."""
    return lambda site: None if is_layer_norm(site) else by(site, norm)


def _layer(norm: Norm) -> Callable[[Site], Compute | None]:
    """A mistake in LayerNorms."""
    return lambda site: by(site, norm) if is_layer_norm(site) else None


def _has_rms(model: Model, dialect: Dialect) -> bool:
    layer = model.layers[0]
    return model.config.norm == "rms" or layer.attn_sub_norm is not None or layer.ffn_sub_norm is not None


def _has_layer_norm(model: Model, dialect: Dialect) -> bool:
    return model.config.norm == "layer"


def _is_rms(model: Model, dialect: Dialect) -> bool:
    return model.config.norm == "rms"


def _centred(x: NDArray) -> NDArray:
    return x - x.mean(axis=1, keepdims=True)


def mean_square(x: Array) -> Array:
    """The mean square of each row."""
    return np.mean(x * x, axis=1, keepdims=True)


def _width_less_one(x: Array, gain: Array, eps: float) -> Array:
    mean = mean_square(x)
    return spec.rms_norm(x, gain, eps) * np.sqrt((mean + eps) / (mean * x.shape[1] / max(1, x.shape[1] - 1) + eps))


def _by_head(site: Site) -> Compute:
    def norm(x: Array, gain: Array, eps: float) -> Array:
        heads = x.reshape(len(x), -1, site.config.head_dim)
        return (heads / np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + eps)).reshape(x.shape) * gain

    return by(site, norm)


# --- one norm -------------------------------------------------------------------------------------------------------------------------


def _wrong_epsilons(right: float) -> list[float]:
    return [value for value in EPSILONS if not np.isclose(value, right, rtol=1e-3)]


def _epsilons(site: Site) -> Computes:
    gain, right = gain_of(site), site.config.eps
    for value in () if is_layer_norm(site) else (0.0, *_wrong_epsilons(right)):
        yield {"value": value, "right": right}, of_rows(site, partial(spec.rms_norm, gain=gain, eps=value))


def _other_norm(site: Site) -> Computes:
    for other in () if is_layer_norm(site) or site.layer is None else NORMS:
        weight = getattr(site.layer, other)
        if other != site.name and weight is not None and weight.shape == gain_of(site).shape:
            yield {"other": other}, weighted(site, weight)


def _other_layer(site: Site) -> Computes:
    if not is_layer_norm(site) and site.layer is not None:
        for which, layer in site.neighbours():
            yield {"which": which}, weighted(site, getattr(layer, field_of(site)))


def _layers_weight(site: Site) -> Computes:
    for name in () if is_layer_norm(site) else ("attn_norm", "ffn_norm"):
        if (weight := getattr(site.model.layers[-1], name)) is not None:
            yield {"name": name}, weighted(site, weight)


def _of_tensor(site: Site, source: Key) -> Compute:
    """The norm of another tensor."""
    return lambda values: spec.rms_norm(values[source], gain_of(site), site.config.eps)


def _before_attention(site: Site) -> Compute | None:
    return None if is_layer_norm(site) or site.config.parallel_residual else _of_tensor(site, site.layer_input)


def _last_layer_skipped(site: Site) -> Compute | None:
    last = len(site.model.layers) - 2
    return None if is_layer_norm(site) else _of_tensor(site, Key("inp_embd", None) if last < 0 else Key("l_out", last))


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def _engine_epsilons(base: Variant) -> Engines:
    right = base.model.config.eps
    for value in _wrong_epsilons(right):
        yield {"value": value, "right": right}, replace(base.with_config(eps=value), weak=True)


def _eps_outside(x: Floats, gain: Floats, eps: float) -> Floats:
    return x / (np.sqrt(np.mean(x * x, axis=1, keepdims=True)) + np.float32(eps)) * gain


def _engine_eps_outside(base: Variant) -> Variant:
    def layer_norm(x: Floats, gain: Floats, bias: Floats, eps: float) -> Floats:
        return _eps_outside(_centred(x), gain, eps) + bias

    return replace(base.with_operations(rms_norm=_eps_outside, layer_norm=layer_norm), weak=True)


def _engine_weights(base: Variant) -> Engines:
    yield from in_fields(base, (*NORMS, *HEAD_NORMS.values()), np.ones_like)
    yield LAST, base.with_model(output_norm=np.ones_like(base.model.output_norm))


def _engine_biases(base: Variant) -> Engines:
    for name in base.present(("attn_norm_bias", "ffn_norm_bias")):
        yield every(name.removesuffix("_bias")), base.with_field(name, lambda bias: None)
    if base.model.output_norm_bias is not None:
        yield LAST, base.with_model(output_norm_bias=None)


def _engine_missing(base: Variant) -> Engines:
    yield from in_fields(base, (*SUB_NORMS, *HEAD_NORMS.values()), lambda gain: None)
    for name in base.present(MATRICES):
        if getattr(base.model.layers[0], name).norm is not None:
            yield {"where": f"at the norm inside {name} of every layer: "}, base.with_field(name, lambda linear: replace(linear, norm=None))


def _engine_centred(base: Variant) -> Engines:
    if base.model.config.norm == "rms":
        yield EVERY, base.with_operations(rms_norm=lambda x, gain, eps: cpu.rms_norm(_centred(x), gain, eps))


def _engine_not_centred(base: Variant) -> Engines:
    if base.model.config.norm == "layer":
        yield EVERY, base.with_operations(layer_norm=lambda x, gain, bias, eps: cpu.rms_norm(x, gain, eps) + bias)


_outside = _rms(lambda x, gain, eps: x / (np.sqrt(mean_square(x)) + eps) * gain)
_unweighted = _rms(lambda x, gain, eps: spec.rms_norm(x, np.ones(1), eps))
_unbiased = _layer(lambda x, gain, eps: spec.layer_norm(x, gain, 0.0, eps))
_not_centred = _layer(spec.rms_norm)
_centred_too = _rms(lambda x, gain, eps: spec.rms_norm(_centred(x), gain, eps))

EPSILON = alike(
    "norm",
    AT,
    ("epsilon", "epsilon is {value:g} instead of {right:.3g}", _epsilons, _engine_epsilons),
    ("epsilon_outside", "epsilon is outside the root", _outside, _engine_eps_outside),
)
WEIGHTS = (
    Mistake("norm.weight_missing", "the norm's weight is missing", AT, compute=_unweighted, engine=_engine_weights),
    Mistake("norm.bias_missing", "the norm's bias is missing", AT, _has_layer_norm, _unbiased, _engine_biases),
)
_UNCHANGED = "the norm is missing: its input comes out unchanged"
MISSING = (
    Mistake("norm.missing", _UNCHANGED, AT, compute=lambda site: site.of(lambda x: x), engine=_engine_missing),
    Mistake(
        "norm.mean_not_subtracted", "the mean is not subtracted, as in RMSNorm", AT, _has_layer_norm, _not_centred, _engine_not_centred
    ),
    Mistake("norm.mean_subtracted", "the mean is subtracted, as in LayerNorm", AT, _has_rms, _centred_too, _engine_centred),
)
_OF_NUMBERS: dict[tuple[str, str], Norm] = {
    ("weight_alone", "the norm is missing, only its weight is applied"): lambda x, gain, eps: x * gain,
    ("weight_plus_one", "1 is added to the norm's weight"): lambda x, gain, eps: spec.rms_norm(x, 1 + gain, eps),
    ("weight_twice", "the norm's weight is applied twice"): lambda x, gain, eps: spec.rms_norm(x, gain * gain, eps),
    ("sum_not_mean", "the sum of squares is not divided by the width"): (
        lambda x, gain, eps: x / np.sqrt(np.sum(x * x, axis=1, keepdims=True) + eps) * gain
    ),
    ("width_less_one", "the sum of squares is divided by the width less one"): _width_less_one,
    ("no_root", "the norm divides by the mean square, without the root"): lambda x, gain, eps: x / (mean_square(x) + eps) * gain,
}
OTHERS = (
    *alike("norm", AT, *((*named, _rms(norm)) for named, norm in _OF_NUMBERS.items()), when=_has_rms),
    Mistake("norm.by_head", "the norm is taken for each head by itself", ("attn_sub_norm",), compute=_by_head),
    Mistake("norm.other_norm", "the weight of {other} is used", AT, _has_rms, _other_norm),
    Mistake("norm.other_layer", "the weight of the {which} layer is used", AT, _has_rms, _other_layer),
    Mistake("norm.before_attention", "its input is the layer's, not the sum with attention", ("ffn_norm",), _is_rms, _before_attention),
    Mistake("norm.layers_weight", "the weight of the last layer's {name} is used", ("result_norm",), _is_rms, _layers_weight),
    Mistake("layers.last_skipped_in_norm", "the last layer is skipped", ("result_norm",), _is_rms, _last_layer_skipped),
)
