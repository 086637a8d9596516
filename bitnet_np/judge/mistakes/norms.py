"""Mistakes in norms."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...dialects import Dialect
from ...families import MATRICES, NORMS
from ...kernels import cpu
from ...model import Model
from ...traces.points import Key
from ..variant import Variant
from .matrices import every
from .mistake import Array, Compute, Mistake, Numbers, Site

Floats = NDArray[np.float32]

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


def gain_of(site: Site) -> Array:
    """The norm's weight in float64."""
    weight = site.model.output_norm if site.layer is None else getattr(site.layer, HEAD_NORMS.get(site.name, site.name))
    return weight.astype(np.float64)


def of_rows(site: Site, norm: Callable[[Array], Array]) -> Compute:
    """The Compute of a norm of rows, or of each head by itself."""
    if site.name not in HEAD_NORMS or site.config.joint_qk_norms:
        return site.of(norm)
    return site.of(lambda x: norm(x.reshape(-1, site.config.head_dim)).reshape(x.shape))


def _plain(gain: Array, eps: float) -> Callable[[Array], Array]:
    return lambda x: spec.rms_norm(x, gain, eps)


def _rms(make: Callable[[Site, Array, float], Callable[[Array], Array]]) -> Callable[[Site], Iterator[tuple[Numbers, Compute]]]:
    """A mistake in RMS norms: make(site, gain, eps) is the norm with it."""

    def compute(site: Site) -> Iterator[tuple[Numbers, Compute]]:
        if not is_layer_norm(site):
            yield {}, of_rows(site, make(site, gain_of(site), site.config.eps))

    return compute


def _layer(make: Callable[[Array, float], Callable[[Array], Array]]) -> Callable[[Site], Iterator[tuple[Numbers, Compute]]]:
    """A mistake in LayerNorms: make(gain, eps) is the norm with it."""

    def compute(site: Site) -> Iterator[tuple[Numbers, Compute]]:
        if is_layer_norm(site):
            yield {}, site.of(make(gain_of(site), site.config.eps))

    return compute


def _has_rms(model: Model, dialect: Dialect) -> bool:
    layer = model.layers[0]
    return model.config.norm == "rms" or layer.attn_sub_norm is not None or layer.ffn_sub_norm is not None


def _has_layer_norm(model: Model, dialect: Dialect) -> bool:
    return model.config.norm == "layer"


def _is_rms(model: Model, dialect: Dialect) -> bool:
    return model.config.norm == "rms"


def _centred(x: NDArray) -> NDArray:
    return x - x.mean(axis=1, keepdims=True)


def _mean_square(x: Array) -> Array:
    return np.mean(x * x, axis=1, keepdims=True)


def _width_less_one(x: Array, gain: Array, eps: float) -> Array:
    mean = _mean_square(x)
    return spec.rms_norm(x, gain, eps) * np.sqrt((mean + eps) / (mean * x.shape[1] / max(1, x.shape[1] - 1) + eps))


def _by_head(x: Array, width: int, eps: float) -> Array:
    heads = x.reshape(len(x), -1, width)
    return (heads / np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + eps)).reshape(x.shape)


# --- one norm -------------------------------------------------------------------------------------------------------------------------


def _epsilons(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if is_layer_norm(site):
        return
    gain, right = gain_of(site), site.config.eps
    for value in (0.0, *EPSILONS):
        if not np.isclose(value, right, rtol=1e-3):
            yield {"value": value, "right": right}, of_rows(site, _plain(gain, value))


def _other_norm(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if is_layer_norm(site) or site.layer is None:
        return
    gain = gain_of(site)
    for other in NORMS:
        weight = getattr(site.layer, other)
        if other != site.name and weight is not None and weight.shape == gain.shape:
            yield {"other": other}, weighted(site, weight)


def weighted(site: Site, weight: NDArray) -> Compute:
    """The norm with another weight."""
    return of_rows(site, _plain(weight.astype(np.float64), site.config.eps))


def _other_layer(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if not is_layer_norm(site) and site.layer is not None:
        for which, layer in site.neighbours():
            yield {"which": which}, weighted(site, getattr(layer, HEAD_NORMS.get(site.name, site.name)))


def _layers_weight(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if not is_layer_norm(site):
        for name in ("attn_norm", "ffn_norm"):
            if (weight := getattr(site.model.layers[-1], name)) is not None:
                yield {"name": name}, weighted(site, weight)


def _before_attention(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if not is_layer_norm(site) and not site.config.parallel_residual:
        yield {}, lambda values: spec.rms_norm(values[site.layer_input], gain_of(site), site.config.eps)


def _last_layer_skipped(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if not is_layer_norm(site):
        last = len(site.model.layers) - 2
        before = Key("inp_embd", None) if last < 0 else Key("l_out", last)
        yield {}, lambda values: spec.rms_norm(values[before], gain_of(site), site.config.eps)


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def _engine_epsilons(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    right = base.model.config.eps
    for value in EPSILONS:
        if not np.isclose(value, right, rtol=1e-3):
            yield {"value": value, "right": right}, replace(base.with_config(eps=value), weak=True)


def _eps_outside(x: Floats, gain: Floats, eps: float) -> Floats:
    return x / (np.sqrt(np.mean(x * x, axis=1, keepdims=True)) + np.float32(eps)) * gain


def _engine_eps_outside(base: Variant) -> Variant:
    def layer_norm(x: Floats, gain: Floats, bias: Floats, eps: float) -> Floats:
        return _eps_outside(_centred(x), gain, eps) + bias

    return replace(base.with_operations(rms_norm=_eps_outside, layer_norm=layer_norm), weak=True)


def _engine_weights(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    for name in base.present((*NORMS, "attn_q_norm", "attn_k_norm")):
        yield every(name), base.with_field(name, np.ones_like)
    yield LAST, base.with_model(output_norm=np.ones_like(base.model.output_norm))


def _engine_biases(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    for name in base.present(("attn_norm_bias", "ffn_norm_bias")):
        yield every(name.removesuffix("_bias")), base.with_field(name, lambda bias: None)
    if base.model.output_norm_bias is not None:
        yield LAST, base.with_model(output_norm_bias=None)


def _engine_missing(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    for name in base.present((*SUB_NORMS, "attn_q_norm", "attn_k_norm")):
        yield every(name), base.with_field(name, lambda gain: None)
    for name in base.present(MATRICES):
        if getattr(base.model.layers[0], name).norm is not None:
            yield {"where": f"at the norm inside {name} of every layer: "}, base.with_field(name, lambda linear: replace(linear, norm=None))


def _engine_centred(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    if base.model.config.norm == "rms":
        yield EVERY, base.with_operations(rms_norm=lambda x, gain, eps: cpu.rms_norm(_centred(x), gain, eps))


def _engine_not_centred(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    if base.model.config.norm == "layer":
        yield EVERY, base.with_operations(layer_norm=lambda x, gain, bias, eps: cpu.rms_norm(x, gain, eps) + bias)


EPSILON = (
    Mistake("norm.epsilon", "epsilon is {value:g} instead of {right:.3g}", AT, compute=_epsilons, engine=_engine_epsilons),
    Mistake(
        "norm.epsilon_outside",
        "epsilon is outside the root",
        AT,
        compute=_rms(lambda site, gain, eps: lambda x: x / (np.sqrt(_mean_square(x)) + eps) * gain),
        engine=_engine_eps_outside,
    ),
)
WEIGHTS = (
    Mistake(
        "norm.weight_missing",
        "the norm's weight is missing",
        AT,
        compute=_rms(lambda site, gain, eps: lambda x: spec.rms_norm(x, np.ones(1), eps)),
        engine=_engine_weights,
    ),
    Mistake(
        "norm.bias_missing",
        "the norm's bias is missing",
        AT,
        _has_layer_norm,
        _layer(lambda gain, eps: lambda x: spec.layer_norm(x, gain, 0.0, eps)),
        _engine_biases,
    ),
)
MISSING = (
    Mistake(
        "norm.missing",
        "the norm is missing: its input comes out unchanged",
        AT,
        compute=lambda site: site.of(lambda x: x),
        engine=_engine_missing,
    ),
    Mistake(
        "norm.mean_not_subtracted",
        "the mean is not subtracted, as in RMSNorm",
        AT,
        _has_layer_norm,
        _layer(lambda gain, eps: lambda x: spec.rms_norm(x, gain, eps)),
        _engine_not_centred,
    ),
    Mistake(
        "norm.mean_subtracted",
        "the mean is subtracted, as in LayerNorm",
        AT,
        _has_rms,
        _rms(lambda site, gain, eps: lambda x: spec.rms_norm(_centred(x), gain, eps)),
        _engine_centred,
    ),
)
OTHERS = (
    Mistake(
        "norm.weight_alone",
        "the norm is missing, only its weight is applied",
        AT,
        _has_rms,
        _rms(lambda site, gain, eps: lambda x: x * gain),
    ),
    Mistake(
        "norm.weight_plus_one",
        "1 is added to the norm's weight",
        AT,
        _has_rms,
        _rms(lambda site, gain, eps: lambda x: spec.rms_norm(x, 1 + gain, eps)),
    ),
    Mistake(
        "norm.weight_twice",
        "the norm's weight is applied twice",
        AT,
        _has_rms,
        _rms(lambda site, gain, eps: lambda x: spec.rms_norm(x, gain * gain, eps)),
    ),
    Mistake(
        "norm.sum_not_mean",
        "the sum of squares is not divided by the width",
        AT,
        _has_rms,
        _rms(lambda site, gain, eps: lambda x: x / np.sqrt(np.sum(x * x, axis=1, keepdims=True) + eps) * gain),
    ),
    Mistake(
        "norm.width_less_one",
        "the sum of squares is divided by the width less one",
        AT,
        _has_rms,
        _rms(lambda site, gain, eps: lambda x: _width_less_one(x, gain, eps)),
    ),
    Mistake(
        "norm.no_root",
        "the norm divides by the mean square, without the root",
        AT,
        _has_rms,
        _rms(lambda site, gain, eps: lambda x: x / (_mean_square(x) + eps) * gain),
    ),
    Mistake(
        "norm.by_head",
        "the norm is taken for each head by itself",
        ("attn_sub_norm",),
        compute=_rms(lambda site, gain, eps: lambda x: _by_head(x, site.config.head_dim, eps) * gain),
    ),
    Mistake("norm.other_norm", "the weight of {other} is used", AT, _has_rms, _other_norm),
    Mistake("norm.other_layer", "the weight of the {which} layer is used", AT, _has_rms, _other_layer),
    Mistake("norm.before_attention", "its input is the layer's, not the sum with attention", ("ffn_norm",), _is_rms, _before_attention),
    Mistake("norm.layers_weight", "the weight of the last layer's {name} is used", ("result_norm",), _is_rms, _layers_weight),
    Mistake("layers.last_skipped_in_norm", "the last layer is skipped", ("result_norm",), _is_rms, _last_layer_skipped),
)
