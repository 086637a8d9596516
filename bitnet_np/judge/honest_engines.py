"""The reach of roundings on the model and tokens at hand, measured.

Roundings move int8 codes across a boundary, and every layer amplifies that: by how much depends on the model. So no limit for logits holds
for all models; this one is measured. The model is run again with the roundings of honest engines of the same precision, and a dump that is
farther from ours than they are, by the margins of measures.limits, is wrong.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.dialects import DIALECTS, Dialect
from ..model.records import MATRICES, Blocks, Model, Ternary
from ..traces.points import FIELDS, Key
from .law.expected import type_of
from .law.formats import half_steps, rounded
from .law.graph import LOGITS, attended
from .law.precision import FLOAT32, FLOATS, ROUNDOFF, Precision, to_float_type
from .law.products import linear_of, reads_codes, row_blocks
from .law.roundings import to_eleven_bits
from .law.running_error import next_experts
from .measures import Reach, position_nmse, position_scale
from .variant import Floats, Variant

FLOOR = 2.0**-24
"""Least reach: the NMSE of numbers rounded to float16 once is about a third of 2^-22."""

_UNROUNDED = ("inp_embd", "inpL", "ffn_inp", "l_out", "result_output")
"""The tensors that engines with float16 tensors keep in float32: the sums that run through all layers, and the logits."""


def roundings(base: Variant, precision: Precision = FLOAT32) -> Iterator[Variant]:
    """Yields variants as honest as ours: float16 numbers after each norm or each operation, or the roundings of a declared precision."""
    if precision == FLOAT32:
        yield replace(base, text="float16 norms", edit=lambda name, n, x: to_eleven_bits(x) if "norm" in name else x)
        yield replace(
            base,
            text="float16 after each operation",
            edit=lambda name, n, x: x if name in _UNROUNDED or x.dtype != np.float32 else to_eleven_bits(x),
        )
    else:
        yield in_precision(base, precision)


_OPEN = 16
"""Roundings of a router's logits, of the largest one's size, that all layers before it make about."""


def other_choices(base: Variant, precision: Precision = FLOAT32) -> Variant | None:
    """Our engine where the last expert of a token is the next best one, wherever roundings may make that the better; None without experts.

    Which experts a token takes is discrete, as codes are: another choice between nearly equal ones is no fault, and changes much.
    """
    if not base.model.config.has_choice:
        return None
    error = _OPEN * ROUNDOFF["float16" if precision.act == "float32" else precision.act]

    def top_experts(logits: Floats, k: int) -> NDArray[np.int32]:
        return next_experts(logits, k, error * np.abs(logits).max(axis=1)).astype(np.int32)

    return replace(base.with_operations(top_experts=top_experts), text="other choices between nearly equal experts")


def dialects(base: Variant) -> Iterator[Variant]:
    """Yields our engine in the other dialects."""
    for dialect in DIALECTS.values():
        if dialect != base.dialect:
            yield replace(base, text=f"the dialect {dialect.name} (--as {dialect.name})", dialect=dialect)


def in_precision(base: Variant, precision: Precision) -> Variant:
    """Our engine in a precision: recorded tensors, the KV cache and the head in its types, products and attention about as wrong."""
    c = base.model.config
    in_float16 = precision.kv == precision.probs == "float16"  # a dialect rounds both, with the queries, as they are rounded

    def edit(name: str, n: int | None, x: NDArray) -> NDArray:
        if name in FIELDS or name == LOGITS.name:
            w = linear_of(base.model, Key(name, n))
            exact = isinstance(w.weights, Ternary) or type_of(w.weights) == precision.act
            terms = ROUNDOFF[precision.acc] * np.sqrt(w.weights.shape[1])
            x = _on_steps(x, np.sqrt((0.0 if exact else ROUNDOFF[precision.act]) ** 2 + terms**2 + _of_operands(precision) ** 2))
            if n is not None and reads_codes(w, base.dialect) and precision.scale != "float32":  # a random factor of each row
                random = np.random.default_rng(list(name.encode())).uniform(-1, 1, (len(x), 1))
                x = x * (1 + ROUNDOFF[precision.scale] * random).astype(np.float32)
        elif name == "kqv_out":
            probs = 0.0 if in_float16 else ROUNDOFF[precision.probs]
            x = _attended(x, c.heads, ROUNDOFF[precision.attn_acc], probs + _of_operands(precision) + precision.exp)
        elif precision.exp and ("norm" in name or name in ("ffn_out", "Qcur_rope", "Kcur_rope")):
            x = _on_steps(x, precision.exp)
        if precision.act != "float32" and x.dtype == np.float32:
            x = _to_type(x, precision.act)
        if precision.kv != "float32" and not in_float16 and n is not None and name in (attended(base.model, "Kcur", n).name, "Vcur"):
            x = _to_type(x.reshape(-1, c.head_dim), precision.kv).reshape(x.shape)
        return x

    dialect = replace(base.dialect, in_float16=True) if in_float16 else base.dialect
    variant = replace(base, text=f"the precision {precision}", dialect=dialect, edit=edit)
    if precision.head == "float32":
        return variant
    head = np.empty(base.model.head.shape, np.float32)
    for rows, matrix in row_blocks(base.model.head):
        head[rows] = rounded(matrix, precision.head)
    return variant.with_model(output=head)


def engines_of_type(base: Variant, kind: str) -> Iterator[Variant]:
    """Yields our engine with its recorded tensors rounded to a float type: all, or all but the sums that run through the layers; with
    float32 matrices as they are, and rounded."""

    def narrow(x: Any) -> Any:
        return _to_type(x, kind) if isinstance(x, np.ndarray) and x.dtype == np.float32 else x

    engines = [base]
    if any(isinstance(linear.weights, np.ndarray) and linear.weights.dtype == np.float32 for linear in base.linears()):
        converted = base.with_model(output=narrow(base.model.head), token_embd=narrow(base.model.token_embd))
        for name in base.present(MATRICES):
            converted = converted.with_field(name, lambda linear: replace(linear, weights=narrow(linear.weights)))
        engines.append(converted)
    for engine in engines:
        yield replace(engine, edit=lambda name, n, x: narrow(x))
        yield replace(engine, edit=lambda name, n, x: x if name in _UNROUNDED else narrow(x))


def _of_operands(precision: Precision) -> float:
    """The largest error of a product whose operands are rounded, or that has noise, as a part of its RMS, about."""
    if precision.mul == "float32":
        return 3**0.5 * precision.noise
    sample = np.random.default_rng(0).standard_normal((1, 256))
    of_one = half_steps(sample, precision.mul)
    return float(np.hypot(np.sqrt(2 * (of_one**2).mean()), 3**0.5 * precision.noise))


def _on_steps(x: Floats, part: float | NDArray) -> Floats:
    """Numbers [.., width] rounded to steps of twice this part of their RMS.

    So wrong are the results of a product whose weights each have a random error of at most this part of themselves.
    """
    if not np.any(part):
        return x
    size = np.sqrt(np.square(x).mean(axis=-1, keepdims=True)) * np.asarray(2 * part, np.float32)
    step = np.maximum(size, np.float32(1e-30))
    return (np.rint(x / step) * step).astype(np.float32)


def _attended(x: Floats, heads: int, acc: float, probs: float) -> Floats:
    """Attention's output [T, HK] with sums of values, and probabilities, that are rounded by these relative errors.

    Each of n additions rounds the sum so far, so the error of the result grows with the root of n. The sum so far is taken for twice as
    large as the result: that reaches 2 to 7 times as far as the NMSE of llama.cpp's flash attention on 12 random models with 300 tokens.
    """
    if not acc and not probs:
        return x
    additions = np.sqrt(np.arange(1, len(x) + 1, dtype=np.float32))[:, None, None]
    return _on_steps(x.reshape(len(x), heads, -1), acc * additions + np.float32(probs)).reshape(x.shape)


def _to_type(x: NDArray, kind: str) -> Floats:
    """Float32 numbers rounded to any type."""
    return to_float_type(x, kind) if kind in FLOATS else rounded(x.astype(np.float64), kind).astype(np.float32)


def reach_of(ours: NDArray, runs: list[Floats], base: Variant, precision: Precision = FLOAT32, choices: Floats | None = None) -> Reach:
    """The distance of honest engines' runs from ours, and of one of `other_choices`, if there is one: [P, V] each."""
    nmse = np.array([position_nmse(ours, run) for run in runs])
    scale = max(float(np.abs(position_scale(ours, run) - 1).max()) for run in (*runs, *([] if choices is None else [choices])))
    name = "float16 rounding" if precision == FLOAT32 else f"the precision {precision}"
    of_choices = None if choices is None else position_nmse(ours, choices)
    return Reach(max(float(nmse.mean(axis=1).max()), FLOOR), nmse.max(axis=0), scale, name, one_scale(base.model, base.dialect), of_choices)


def one_scale(model: Model, dialect: Dialect) -> bool:
    """Whether the head's input is rounded to codes that share one scale."""
    return dialect.ggml_activations and isinstance(model.head, Blocks) and model.head.type.block >= model.head.shape[1]
