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

Everything runs at the kernels' speed, with one operation replaced. At most 64 tokens of the dump are looked at, except for the limit of a
dump of last positions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .compare import Judgement, Reach, Verdict, judge, position_nmse, position_scale
from .errors import NonFiniteError
from .families import rope_frequencies
from .kernels import cpu
from .model import Layer, Model
from .transformer import DIALECTS, Dialect

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
    ops: ModuleType = field(default=cpu, repr=False)
    weak: bool = False  # before codes flip it changes less than float16 does, and may flip the very codes that roundings flip


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
    scales = [(name, [scaled(base, name, factor) for factor in (1 / _STEP, _STEP)]) for name in SCALED] if search else []
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
    reach = _reach(a, [x for x in runs.values() if x is not None])
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


def _reach(a: NDArray, runs: list[Floats]) -> Reach:
    nmse = np.array([position_nmse(a, x) for x in runs])
    scale = max(float(np.abs(position_scale(a, x) - 1).max()) for x in runs)
    return Reach(max(float(nmse.mean(axis=1).max()), FLOOR), nmse.max(axis=0), scale)


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

_ROUNDED = ("rms_norm", "ternary_matmul", "rope", "attend", "attend_halves", "relu2_gate")


def roundings(base: Variant) -> Iterator[Variant]:
    """What honest engines do differently: another dialect, float16 numbers after each norm, or after each operation."""
    for dialect in DIALECTS.values():
        if dialect != base.dialect:
            yield replace(base, text=f"the dialect {dialect.name}, which can be declared", dialect=dialect)
    for text, names in (("float16 norms", ("rms_norm",)), ("float16 after each operation", _ROUNDED)):
        yield replace(base, text=text, ops=_with(**{name: _after(getattr(cpu, name), half) for name in names}))


def half(x: Floats) -> Floats:
    """x with float16's 11 significant bits, rounded half up, and float32's range."""
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _with(**operations: Callable[..., Any]) -> ModuleType:
    """The kernels, some of them replaced."""
    changed = ModuleType("changed")
    vars(changed).update(vars(cpu) | operations)
    return changed


def _after(operation: Callable[..., Floats], change: Callable[[Floats], Floats]) -> Callable[..., Floats]:
    return lambda *args: change(operation(*args))


# --- mistakes -------------------------------------------------------------------------------------------------------------------------

_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NORMS = ("attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm")
SCALED = tuple(name for name in _MATRICES if name != "attn_k")  # the scales of queries and keys do the same


def _every_layer(base: Variant, text: str, change: Callable[[Layer], Layer], weak: bool = False) -> Variant:
    return replace(base, text=text, model=replace(base.model, layers=tuple(map(change, base.model.layers))), weak=weak)


_CANCELLED = ("attn_v", "ffn_gate", "ffn_up")
"""Matrices whose scale the next sub-norm divides out, all but epsilon's share."""


def _scale(layer: Layer, name: str, change: Callable[[float], float]) -> Layer:
    matrix = getattr(layer, name)
    return replace(layer, **{name: replace(matrix, scale=np.float32(change(float(matrix.scale))))})


def _borrowed(name: str, other: str, layer: Layer) -> Layer:
    return _scale(layer, name, lambda scale: float(getattr(layer, other).scale))


def _without_weight(name: str, layer: Layer) -> Layer:
    return replace(layer, **{name: np.ones_like(getattr(layer, name))})


def scaled(base: Variant, name: str, factor: float) -> Variant:
    """The scale of one kind of matrix, times a factor in every layer."""
    return _every_layer(base, f"{name} times {factor}", lambda layer: _scale(layer, name, lambda scale: scale * factor))


def quantiser_mistakes(base: Variant) -> Iterator[Variant]:
    """Mistakes in making int8 codes. They change as little as roundings do."""

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
    model, config = base.model, base.model.config

    def ops(text: str, **operations: Callable[..., Any]) -> Variant:
        return replace(base, text=text, ops=_with(**operations))

    yield from quantiser_mistakes(base)
    for dialect in DIALECTS.values():
        if dialect != base.dialect:
            for mistake in quantiser_mistakes(replace(base, dialect=dialect)):
                yield replace(mistake, text=f"{mistake.text}, in the dialect {dialect.name}")
    for eps in (1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3):
        if not np.isclose(eps, config.eps, rtol=1e-3):
            changed = replace(model, config=replace(config, eps=eps))
            yield replace(base, text=f"epsilon is {eps:g} instead of {config.eps:.3g}", model=changed, weak=True)
    yield replace(ops("epsilon is outside the root", rms_norm=_eps_outside), weak=True)
    for text, change in (("is missing", lambda s: 1.0), ("divides instead of multiplying", lambda s: 1 / s)):
        for name in _MATRICES:
            changed_layer = partial(_scale, name=name, change=change)
            yield _every_layer(base, f"the weight scale of {name} {text}", changed_layer, name in _CANCELLED)
    for group in (_MATRICES[:3], _MATRICES[4:6]):  # often one matrix in an engine
        for name in group:
            for other in group:
                if other != name:
                    text = f"the weight scale of {other} is used for {name}"
                    yield _every_layer(base, text, partial(_borrowed, name, other), name in _CANCELLED)
    for name in _NORMS:
        yield _every_layer(base, f"the weight of {name} is missing", partial(_without_weight, name))
    yield replace(base, text="the weight of the final norm is missing", model=replace(model, output_norm=np.ones_like(model.output_norm)))
    for name in ("attn_sub_norm", "ffn_sub_norm"):
        gains = {id(getattr(w, name)) for w in model.layers}
        yield ops(f"{name} is missing", rms_norm=lambda x, gain, eps, gains=gains: x if id(gain) in gains else cpu.rms_norm(x, gain, eps))
    yield ops("norms subtract the mean, as LayerNorm does", rms_norm=lambda x, g, eps: cpu.rms_norm(_centred(x), g, eps))
    yield ops("SiLU(gate) * up instead of relu(gate)^2 * up", relu2_gate=lambda g, u: g / (1 + np.exp(-g)) * u)
    yield ops("GELU(gate) * up instead of relu(gate)^2 * up", relu2_gate=_gelu)
    yield ops("relu(gate) * up, not squared", relu2_gate=lambda g, u: np.maximum(g, 0) * u)
    yield ops("gate^2 * up, without relu", relu2_gate=lambda g, u: g * g * u)
    yield ops("gate and up are swapped", relu2_gate=lambda g, u: cpu.relu2_gate(u, g))
    yield ops("RoPE's pairs are interleaved (2i, 2i+1) instead of halves (i, i + K/2)", rope=_interleaved)
    yield ops("RoPE is missing", rope=lambda x, cos, sin: x)
    yield ops("RoPE turns the other way", rope=lambda x, cos, sin: cpu.rope(x, cos, -sin))
    for rope_base in (1e4, 5e5, 1e6):
        if rope_base != config.rope_base:
            text = f"RoPE's frequency base is {rope_base:g} instead of {config.rope_base:g}"
            yield replace(base, text=text, model=replace(model, rope_frequency=rope_frequencies(rope_base, config.head_dim)))
    root = np.float32(config.head_dim**0.5)
    yield ops("scores are not scaled by 1/sqrt(K)", **_attention(lambda attend, q, *rest: attend(q * root, *rest)))
    yield ops("scores are divided by K instead of its root", **_attention(lambda attend, q, *rest: attend(q / root, *rest)))
    if 1 < config.kv_heads < config.heads:
        in_turn = np.argsort(np.arange(config.heads) % config.kv_heads, kind="stable")
        yield ops(
            "key-value heads are dealt out in turn (h % G) instead of in groups",
            **_attention(lambda attend, q, *rest: _reordered(attend, in_turn, q, *rest)),
        )
    if len(model.layers) > 1:
        yield replace(base, text="the last layer is skipped", model=replace(model, layers=model.layers[:-1]))
        yield replace(base, text="the first layer is skipped", model=replace(model, layers=model.layers[1:]))
    if model.output is not None:
        yield replace(base, text="the head is tied to the embedding, the file has one of its own", model=replace(model, output=None))


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

    return {"quantize": quantize, "ternary_matmul": ternary_matmul}


def _eps_outside(x: Floats, gain: Floats, eps: float) -> Floats:
    return x / (np.sqrt(np.mean(x * x, axis=1, keepdims=True)) + np.float32(eps)) * gain


def _centred(x: Floats) -> Floats:
    return x - x.mean(axis=1, keepdims=True)


def _gelu(gate: Floats, up: Floats) -> Floats:
    return np.float32(0.5) * gate * (1 + np.tanh(np.float32((2 / np.pi) ** 0.5) * (gate + np.float32(0.044715) * gate**3))) * up


def _interleaved(x: Floats, cos: Floats, sin: Floats) -> Floats:
    order = np.concatenate([np.arange(0, x.shape[2], 2), np.arange(1, x.shape[2], 2)])
    out = np.empty_like(x)
    out[..., order] = cpu.rope(np.ascontiguousarray(x[..., order]), cos, sin)
    return out


def _attention(change: Callable[..., Floats]) -> dict[str, Callable[..., Floats]]:
    return {name: partial(change, getattr(cpu, name)) for name in ("attend", "attend_halves")}


def _reordered(attend: Callable[..., Floats], order: NDArray[np.intp], q: Floats, *rest: Any) -> Floats:
    out = np.empty_like(q)
    out[:, order] = attend(np.ascontiguousarray(q[:, order]), *rest)
    return out
