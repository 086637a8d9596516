"""How far roundings reach on the model and tokens at hand, and which known mistakes come closer than they.

Float32 or float16 roundings move int8 codes across a boundary, and every layer amplifies that: by how much depends on the model. So no
limit for logits holds for all models; this one is measured. The model is run again with the roundings that engines do (REACH). A dump
that is farther from ours than they, by the margins of compare.limits, is wrong. One that is nearer can still be wrong in a small way:

* A known mistake (MISTAKES) that comes at least four times nearer to the dump than we do is what happened. Roundings alone cannot make
  one do so: of two runs that differ by roundings only each has errors of its own, so the centre between them, where a mistake that
  removes roundings may lie, is half as far from either as they are from each other.
* The scale of one kind of matrix may be off by any factor. The change that a factor makes is measured by central differences, which do
  not hold our own run's errors; the dump's error is projected on it, position by position. A mean that is many standard errors from 0
  and beyond 1 % of the scale is a wrong scale. That takes eight positions.

Everything runs at the kernels' speed, with one operation or weight replaced. At most 64 tokens of the dump are looked at, except for the
limit of a dump of last positions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..backend import Backend, Wrapped
from ..dialects import DIALECTS, Dialect
from ..errors import NonFiniteError
from ..families import MATRICES, NORMS, QKV
from ..forward_pass import run_whole
from ..kernels import cpu
from ..model import Blocks, Layer, Linear, Model, Ternary
from ..network import Edit, Runtime
from ..rope import rope_frequencies
from ..tokens import check_tokens
from .compare import Judgement, Reach, Verdict, judge, position_nmse, position_scale
from .operations import reads_codes

Floats = NDArray[np.float32]
Run = Callable[["Variant"], Floats]
Progress = Callable[[int, int], None]

_CLOSER = 4  # times nearer than ours, in NMSE: two runs of equal errors have a factor 2 between them and their centre
_STEP = 1.1  # factor of a scale in central differences: large against flips, small against what saturates
_LEAST = 0.01  # part of a scale: float16 and bfloat16 scales are nearer
_POSITIONS = 8  # to know a standard error by


@dataclass(frozen=True)
class Variant:
    """The forward pass with something changed."""

    text: str
    model: Model = field(repr=False)
    dialect: Dialect
    ops: Backend = field(default=cpu, repr=False)
    edit: Edit | None = field(default=None, repr=False)
    weak: bool = False  # before codes flip it changes less than float16 does, and may flip the very codes that roundings flip


def variant_logits(variant: Variant, tokens: ArrayLike, last_only: bool = False) -> Floats:
    """Logits of whole sequences, [B, T] -> [B, T, V], or [B, V] with last_only: see forward_full."""
    runtime = Runtime(variant.model, variant.dialect, variant.ops, variant.edit)
    return run_whole(runtime, check_tokens(variant.model.config, tokens), last_only=last_only)


def judge_logits(
    ours: Floats,
    theirs: ArrayLike,
    base: Variant,
    run: Run,
    search: bool = True,
    progress: Progress = lambda done, total: None,
    numbers: NDArray[np.int64] | None = None,
) -> Judgement:
    """Judge their logits by what roundings and known mistakes make of the model.

    ours, theirs: [..., V]. run: logits of a variant, [P, V], the first P positions of `ours` (laid end to end) or all; ours are
    `run(base)`. search: try the known mistakes too. numbers: see compare.judge. Raises nothing for what the dump holds: see compare.judge.
    """
    found = judge(ours, theirs)
    if found.verdict in (Verdict.SAME_BITS, Verdict.ROUNDING, Verdict.INVALID):
        return found
    honest, mistakes = list(roundings(base)), list(known_mistakes(base)) if search else []
    names = [name for name in _there(base.model, MATRICES) if name != "attn_k"] if search else []  # scales of queries and keys do the same
    scales = [(name, [scaled(base, name, factor) for factor in (1 / _STEP, _STEP)]) for name in names]
    total = len(honest) + len(mistakes) + 2 * len(scales)
    done = 0

    def logits(variant: Variant) -> Floats | None:
        nonlocal done
        done += 1
        progress(done, total)
        try:
            with np.errstate(all="ignore"):
                return run(variant)
        except NonFiniteError:  # a mistake may leave float32's range
            return None

    runs = {variant.text: logits(variant) for variant in honest}
    rows = next(len(x) for x in runs.values() if x is not None)
    a, b = (np.asarray(x).reshape(-1, ours.shape[-1])[:rows] for x in (ours, theirs))
    reach = _reach(a, [x for x in runs.values() if x is not None], base)
    found = judge(ours, theirs, reach, numbers)

    distances = {text: _distances(x, a, b) for text, x in runs.items() if x is not None}
    near = min(distances, key=lambda text: float(distances[text].mean()))
    ours_away = position_nmse(a, b)
    closest = f"closest to {near}" if distances[near].mean() < ours_away.mean() / _CLOSER else None
    best = np.minimum(ours_away, distances[near])
    mistake = None
    for variant in mistakes:
        if variant.weak and found.verdict != Verdict.WRONG:
            continue
        x = logits(variant)
        if x is not None and _explains(away := _distances(x, a, b), best):
            mistake, best = variant.text, away
            if best.mean() < ours_away.mean() / 1e6:
                break
    if mistake is None and closest is None and found.verdict == Verdict.FLIPS and len(a) >= _POSITIONS:
        mistake = _wrong_scale(scales, logits, a, b, reach.nmse)
    progress(total, total)
    if mistake is None:
        return found if closest is None else replace(found, reason=f"{found.reason}; {closest}", explanation=closest)
    return replace(found, verdict=Verdict.WRONG, reason=f"{mistake}; {found.reason}", explanation=mistake)


FLOOR = 2.0**-24
"""Least reach: the NMSE of numbers rounded to float16 once is about a third of 2^-22."""


def _distances(x: Floats, a: NDArray, b: NDArray) -> NDArray[np.float64]:
    """Squared distances of theirs from a variant, in units of our spread, [P]."""
    return position_nmse(x, b) * x.var(axis=1, dtype=np.float64) / a.var(axis=1, dtype=np.float64)


def _explains(away: NDArray[np.float64], others: NDArray[np.float64]) -> bool:
    """Whether a mistake is that much nearer to theirs than what is no mistake: on average, and at most positions."""
    nearer = (away < others / _CLOSER).mean()
    return bool(away.mean() < others.mean() / _CLOSER and nearer >= 0.75)


def one_scale(model: Model, dialect: Dialect) -> bool:
    """Whether the head's input is rounded to codes that share one scale."""
    return dialect.ggml_activations and isinstance(model.head, Blocks) and model.head.type.block >= model.head.shape[1]


def _reach(a: NDArray, runs: list[Floats], base: Variant) -> Reach:
    nmse = np.array([position_nmse(a, x) for x in runs])
    scale = max(float(np.abs(position_scale(a, x) - 1).max()) for x in runs)
    return Reach(max(float(nmse.mean(axis=1).max()), FLOOR), nmse.max(axis=0), scale, one_scale(base.model, base.dialect))


def _wrong_scale(
    scales: list[tuple[str, list[Variant]]], logits: Callable[[Variant], Floats | None], a: NDArray, b: NDArray, reach: float
) -> str | None:
    """The kind of matrix whose scale is off, if one is. Kinds whose scale a norm cancels change too little to be seen."""
    error = b.astype(np.float64) - a
    found, most = None, 1.0
    for name, variants in scales:
        low, high = (logits(variant) for variant in variants)
        if low is None or high is None:
            continue
        if position_nmse(low, high).mean() / 4 < 2 * reach:
            continue
        change = (high.astype(np.float64) - low) / (2 * np.log(_STEP))  # by the logarithm of the scale
        along, square = (error * change).sum(axis=1), (change**2).sum(axis=1)
        slope = float(along.sum() / max(square.sum(), 1e-300))
        spread = np.sqrt(((along - slope * square) ** 2).sum()) / max(square.sum(), 1e-300)
        sure = abs(slope) / max(_LEAST, (6 + 40 / len(a)) * spread)
        if sure > most:
            found, most = f"the scale of {name} is off, by a factor of about {np.exp(np.clip(slope, -50, 50)):.3g}", sure
    return found


# --- roundings that are no mistake ----------------------------------------------------------------------------------------------------

_UNROUNDED = ("inp_embd", "inpL", "ffn_inp", "l_out", "result_output")
"""What engines with float16 tensors keep in float32: the sums that run through all layers, and the logits."""


def roundings(base: Variant) -> Iterator[Variant]:
    """What honest engines do differently: another dialect, float16 numbers after each norm, or after each operation."""
    for dialect in _others(base.dialect):
        yield replace(base, text=f"the dialect {dialect.name} (--as {dialect.name})", dialect=dialect)
    yield replace(base, text="float16 norms", edit=lambda name, n, x: half(x) if "norm" in name else x)
    yield replace(base, text="float16 after each operation", edit=lambda name, n, x: x if name in _UNROUNDED else half(x))


def _others(dialect: Dialect) -> list[Dialect]:
    return [other for other in DIALECTS.values() if other != dialect]


def half(x: Floats) -> Floats:
    """x with float16's 11 significant bits, rounded half up, and float32's range."""
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _with(**operations: Callable[..., Any]) -> Backend:
    """The kernels, some of them replaced."""
    return Wrapped(cpu, **operations)


# --- mistakes -------------------------------------------------------------------------------------------------------------------------


def _every_layer(base: Variant, text: str, change: Callable[[Layer], Layer], weak: bool = False) -> Variant:
    return replace(base, text=text, model=replace(base.model, layers=tuple(map(change, base.model.layers))), weak=weak)


def _there(model: Model, names: tuple[str, ...]) -> list[str]:
    """Those fields of a layer that the model's layers have."""
    return [name for name in names if getattr(model.layers[0], name) is not None]


def _but(record: Any, name: str, value: Any) -> Any:
    """The same record, but for one field."""
    return replace(record, **{name: value})


def _linear(layer: Layer, name: str, change: Callable[[Linear], Linear]) -> Layer:
    return _but(layer, name, change(getattr(layer, name)))


def _cancelled(model: Model) -> list[str]:
    """Matrices whose scale a norm behind them divides out, all but epsilon's share."""
    w = model.layers[0]
    behind: dict[str, NDArray | None] = {"attn_q": w.attn_q_norm, "attn_k": w.attn_k_norm}
    behind["attn_v"] = w.attn_output.norm if w.attn_sub_norm is None else w.attn_sub_norm
    if model.config.gated:
        behind["ffn_up"] = w.ffn_down.norm if w.ffn_sub_norm is None else w.ffn_sub_norm
    if model.config.activation == "relu2":
        behind["ffn_gate"] = behind["ffn_up"]
    return [name for name, norm in behind.items() if norm is not None and getattr(w, name).bias is None]


def _scale(linear: Linear) -> float | None:
    """What products are multiplied by, where a file has such a number for the whole matrix."""
    if linear.scale is not None:
        return float(linear.scale)
    return float(linear.weights.scale) if isinstance(linear.weights, Ternary) else None


def _times(linear: Linear, factor: float) -> Linear:
    return replace(linear, scale=np.float32(factor * (1.0 if linear.scale is None else float(linear.scale))))


def _rescaled(name: str, change: Callable[[float, Layer], float], layer: Layer) -> Layer:
    """The scale s of a matrix becomes change(s, layer)."""
    scale = _scale(getattr(layer, name)) or 1.0
    return _linear(layer, name, lambda linear: _times(linear, change(scale, layer) / scale))


def scaled(base: Variant, name: str, factor: float) -> Variant:
    """The scale of one kind of matrix, times a factor in every layer."""
    return _every_layer(base, f"{name} times {factor}", partial(_linear, name=name, change=lambda linear: _times(linear, factor)))


def quantiser_mistakes(base: Variant) -> Iterator[Variant]:
    """Mistakes in making int8 codes, if the model has any in this dialect. They change as little as roundings do."""
    matrices = _there(base.model, MATRICES)
    if not any(reads_codes(getattr(layer, name), base.dialect) for layer in base.model.layers for name in matrices):
        return

    def ops(text: str, **operations: Callable[..., Any]) -> Variant:
        return replace(base, text=text, ops=_with(**operations))

    yield ops("activations are not quantised to int8", **_unquantized())
    up = np.float32(1 + 2**-20)  # the largest number is 127, but x * (127 / x) may fall short of it
    yield ops("codes are truncated instead of rounded", quantize=_quantizer(lambda x: np.trunc(x * up)))
    yield ops("codes are truncated instead of rounded, some of 127 to 126", quantize=_quantizer(np.trunc))
    yield ops("codes are rounded down", quantize=_quantizer(np.floor))
    for most in (126, 128, 63, 7):
        yield ops(f"activations are scaled to {most} steps instead of 127", quantize=_quantizer(np.rint, most))
    yield ops("one activation scale for the whole tensor instead of one for each token", quantize=_quantizer(np.rint, axis=None))


def known_mistakes(base: Variant) -> Iterator[Variant]:
    """Mistakes of a whole engine, those that change little first: large ones show anyway."""
    yield from quantiser_mistakes(base)
    for dialect in _others(base.dialect):
        for mistake in quantiser_mistakes(replace(base, dialect=dialect)):
            yield replace(mistake, text=f"{mistake.text}, in the dialect {dialect.name}")
    for mistakes in (_of_epsilon, _of_scales, _of_weights, _of_norms, _of_activations, _of_positions, _of_attention, _of_layers):
        yield from mistakes(base)


def _of_epsilon(base: Variant) -> Iterator[Variant]:
    model, config = base.model, base.model.config
    for eps in (1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3):
        if not np.isclose(eps, config.eps, rtol=1e-3):
            changed = replace(model, config=replace(config, eps=eps))
            yield replace(base, text=f"epsilon is {eps:g} instead of {config.eps:.3g}", model=changed, weak=True)
    outside = _with(rms_norm=_eps_outside, layer_norm=lambda x, gain, bias, eps: _eps_outside(_centred(x), gain, eps) + bias)
    yield replace(base, text="epsilon is outside the root", ops=outside, weak=True)


def _of_scales(base: Variant) -> Iterator[Variant]:
    matrices = [name for name in _there(base.model, MATRICES) if all(_scale(getattr(w, name)) is not None for w in base.model.layers)]
    cancelled = _cancelled(base.model)
    changes: dict[str, Callable[[float, Layer], float]] = {
        "is missing": lambda s, layer: 1.0,
        "divides instead of multiplying": lambda s, layer: 1 / s,
    }
    for text, change in changes.items():
        for name in matrices:
            yield _every_layer(base, f"the weight scale of {name} {text}", partial(_rescaled, name, change), name in cancelled)
    for group in (QKV, ("ffn_gate", "ffn_up")):  # often one matrix in an engine
        for name in group:
            for other in group:
                if other != name and {name, other} <= set(matrices):
                    borrowed: Callable[[float, Layer], float] = lambda s, layer, other=other: _scale(getattr(layer, other)) or s  # type: ignore[misc]  # noqa: E731
                    text = f"the weight scale of {other} is used for {name}"
                    yield _every_layer(base, text, partial(_rescaled, name, borrowed), name in cancelled)


def _of_weights(base: Variant) -> Iterator[Variant]:
    """Vectors and tables that are left out."""
    model = base.model
    for name in _there(model, (*NORMS, "attn_q_norm", "attn_k_norm")):
        ones: Callable[[Layer], Layer] = lambda w, name=name: _but(w, name, np.ones_like(getattr(w, name)))  # type: ignore[misc]  # noqa: E731
        yield _every_layer(base, f"the weight of {name} is missing", ones)
    yield replace(base, text="the weight of the final norm is missing", model=replace(model, output_norm=np.ones_like(model.output_norm)))
    for name in _there(model, ("attn_norm_bias", "ffn_norm_bias")):
        yield _every_layer(base, f"{name} is missing", partial(_but, name=name, value=None))
    for name in _there(model, MATRICES):
        if getattr(model.layers[0], name).bias is not None:
            yield _every_layer(base, f"the bias of {name} is missing", partial(_linear, name=name, change=partial(replace, bias=None)))
    for name in ("output_norm_bias", "output_bias", "position_embd"):
        if getattr(model, name) is not None:
            yield replace(base, text=f"{name} is missing", model=_but(model, name, None))
    if model.output is not None:
        yield replace(base, text="the head is tied to the embedding, the file has one of its own", model=replace(model, output=None))


def _of_norms(base: Variant) -> Iterator[Variant]:
    model = base.model
    for name in _there(model, ("attn_sub_norm", "ffn_sub_norm", "attn_q_norm", "attn_k_norm")):
        yield _every_layer(base, f"{name} is missing", partial(_but, name=name, value=None))
    for name in _there(model, MATRICES):
        if getattr(model.layers[0], name).norm is not None:
            text = f"the norm of {name}'s input is missing"
            yield _every_layer(base, text, partial(_linear, name=name, change=partial(replace, norm=None)))
    if model.config.norm == "rms":
        other = _with(rms_norm=lambda x, gain, eps: cpu.rms_norm(_centred(x), gain, eps))
        yield replace(base, text="norms subtract the mean, as LayerNorm does", ops=other)
    else:
        other = _with(layer_norm=lambda x, gain, bias, eps: cpu.rms_norm(x, gain, eps) + bias)
        yield replace(base, text="norms do not subtract the mean, as RMSNorm", ops=other)


_GATES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "SiLU(gate) * up": lambda gate, up: _silu(gate) * up,
    "GELU(gate) * up": lambda gate, up: cpu.gelu_tanh(gate) * up,
    "relu(gate)^2 * up": cpu.relu2_gate,
    "relu(gate) * up": lambda gate, up: np.maximum(gate, 0) * up,
    "gate^2 * up": lambda gate, up: gate * gate * up,
}
_UNGATED: dict[str, Callable[[Floats], Floats]] = {
    "the exact GELU": cpu.gelu,
    "GELU's approximation by tanh": cpu.gelu_tanh,
    "SiLU": lambda x: _silu(x),
    "relu": lambda x: np.maximum(x, 0),
    "relu^2": lambda x: np.maximum(x, 0) ** 2,
}
_ACTIVATIONS = {  # of a Config: the kernel, and what it is called above
    "relu2": ("relu2_gate", "relu(gate)^2 * up"),
    "silu": ("silu_gate", "SiLU(gate) * up"),
    "gelu": ("gelu", "the exact GELU"),
    "gelu_tanh": ("gelu_tanh", "GELU's approximation by tanh"),
}


def _of_activations(base: Variant) -> Iterator[Variant]:
    name, right = _ACTIVATIONS[base.model.config.activation]
    others: dict[str, Callable[..., Floats]] = dict(_GATES if base.model.config.gated else _UNGATED)
    for text, operation in others.items():
        if text != right:
            yield replace(base, text=f"{text} instead of {right}", ops=_with(**{name: operation}))
    if base.model.config.gated:
        right_kernel = getattr(cpu, name)
        yield replace(base, text="gate and up are swapped", ops=_with(**{name: lambda gate, up: right_kernel(up, gate)}))


def _of_positions(base: Variant) -> Iterator[Variant]:
    model, config = base.model, base.model.config
    if config.rope == "none":
        return

    def turned(text: str, factors: NDArray[np.float32] | None = model.rope_factors, **changes: Any) -> Variant:
        c = replace(config, **changes)
        frequency = rope_frequencies(c.rope_base, 2 * c.rope_pairs, factors, c.rope_scaling)
        return replace(base, text=text, model=replace(model, config=c, rope_frequency=frequency, rope_factors=factors))

    def ops(text: str, change: Callable[..., Floats]) -> Variant:
        return replace(base, text=text, ops=_with(**{name: partial(change, getattr(cpu, name)) for name in ("rope", "rope_adjacent")}))

    if config.rope == "halves":
        yield turned("RoPE's pairs are interleaved (2i, 2i+1) instead of halves (i, i + K/2)", rope="adjacent")
    else:
        yield turned("RoPE's pairs are halves (i, i + K/2) instead of adjacent (2i, 2i+1)", rope="halves")
    yield ops("RoPE is missing", lambda rope, x, cos, sin: x)
    yield ops("RoPE turns the other way", lambda rope, x, cos, sin: rope(x, cos, -sin))
    for rope_base in (1e4, 5e5, 1e6):
        if rope_base != config.rope_base:
            yield turned(f"RoPE's frequency base is {rope_base:g} instead of {config.rope_base:g}", rope_base=rope_base)
    if config.rope_scaling != 1:
        yield turned("RoPE's positions are not scaled", rope_scaling=1.0)
    if model.rope_factors is not None:
        yield turned("the factors of RoPE's frequencies are not applied", factors=None)
    if 2 * config.rope_pairs < config.head_dim:
        yield turned("RoPE turns all of each head, not a part", factors=None, rope_width=None)


def _of_attention(base: Variant) -> Iterator[Variant]:
    config = base.model.config

    def ops(text: str, change: Callable[..., Floats]) -> Variant:
        return replace(base, text=text, ops=_with(**{name: partial(change, getattr(cpu, name)) for name in ("attend", "attend_halves")}))

    root = np.float32(config.head_dim**0.5)
    yield ops("scores are not scaled by 1/sqrt(K)", lambda attend, q, *rest: attend(q * root, *rest))
    yield ops("scores are divided by K instead of its root", lambda attend, q, *rest: attend(q / root, *rest))
    if config.window is not None:
        yield replace(base, text="the window is missing", model=_but(base.model, "config", replace(config, window=None)))
    if 1 < config.kv_heads < config.heads:
        in_turn = np.argsort(np.arange(config.heads) % config.kv_heads, kind="stable")
        text = "key-value heads are dealt out in turn (h % G) instead of in groups"
        yield ops(text, lambda attend, q, *rest: _reordered(attend, in_turn, q, *rest))


def _of_layers(base: Variant) -> Iterator[Variant]:
    model, config = base.model, base.model.config
    if len(model.layers) > 1:
        for text, first in (("the last layer is skipped", 0), ("the first layer is skipped", 1)):
            left = range(first, first + len(model.layers) - 1)
            windows = None if config.window_layers is None else tuple(n - first for n in config.window_layers if n in left)
            fewer = replace(config, n_layers=len(left), window_layers=windows)
            yield replace(base, text=text, model=replace(model, config=fewer, layers=tuple(model.layers[n] for n in left)))
    if config.norm == "layer":
        read = ("the layer's input", "what attention's branch was added to")
        text = "the feed-forward reads {} instead of {}".format(*(read[::-1] if config.parallel_residual else read))
        yield replace(base, text=text, model=replace(model, config=replace(config, parallel_residual=not config.parallel_residual)))


def _quantizer(rounded: Callable[[Floats], Floats], most: int = 127, axis: int | None = 1) -> Callable[[Floats], tuple[NDArray, Floats]]:
    def quantize(x: Floats) -> tuple[NDArray[np.int8], Floats]:
        largest = np.maximum(np.abs(x).max(axis=axis, keepdims=True), np.float32(1e-5))
        scale = np.broadcast_to(np.float32(most) / largest, (len(x), 1))
        return np.clip(rounded(x * scale), -128, 127).astype(np.int8), np.ascontiguousarray(scale[:, 0])

    return quantize


def _unquantized() -> dict[str, Callable[..., Any]]:
    """A second int8 product of what rounding took away leaves 1 / 254 of it."""
    rest: list[tuple[NDArray, NDArray]] = []

    def quantize(x: Floats) -> tuple[NDArray[np.int8], Floats]:
        q, scale = cpu.quantize(x)
        rest[:] = [(q, np.rint((x * scale[:, None] - q) * 254).astype(np.int8))]
        return q, scale

    def ternary_matmul(q: NDArray[np.int8], scale: Floats, *weights: Any) -> Floats:
        (of, remainder) = rest[0]
        y = cpu.ternary_matmul(q, scale, *weights)
        return y + cpu.ternary_matmul(remainder, scale * np.float32(254), *weights) if of is q else y

    def ternary_matmuls(q: NDArray[np.int8], scale: Floats, *matrices: Any) -> list[Floats]:
        return [ternary_matmul(q, scale, *weights) for weights in matrices]

    return {"quantize": quantize, "ternary_matmul": ternary_matmul, "ternary_matmuls": ternary_matmuls}


def _eps_outside(x: Floats, gain: Floats, eps: float) -> Floats:
    return x / (np.sqrt(np.mean(x * x, axis=1, keepdims=True)) + np.float32(eps)) * gain


def _centred(x: Floats) -> Floats:
    return x - x.mean(axis=1, keepdims=True)


def _silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def _reordered(attend: Callable[..., Floats], order: NDArray[np.intp], q: Floats, *rest: Any) -> Floats:
    out = np.empty_like(q)
    out[:, order] = attend(np.ascontiguousarray(q[:, order]), *rest)
    return out
