"""The operations of a forward pass, one by one: what each must give for given inputs, and how far float32 may be from it.

An engine's dump is judged operation by operation: each is evaluated here in float64 from the engine's own inputs, so an early error
neither hides nor fakes a later one.

HOW FAR. The unit of an element is u = 2^-24 times the result of the same operation on absolute values: for a dot product
sum |a_i b_i|. An honest float32 implementation that adds `steps` rounded terms, in any order, stays within

    |error| <= reach of flips + u * unit * min(steps, 6 sqrt(steps))            for each element
    mean of (error / (u * unit))^2 / steps <= 0.4                               over a tensor
    |sum error * value / sum value^2| <= u * common + 4 standard deviations     over a tensor: no common factor

The first is the worst case (Higham, Accuracy and Stability, 3.1) or, for long sums, the probabilistic bound with lambda = 6
(Higham and Mary, SIAM J. Sci. Comput. 41, 2019). The second is the variance test of TOSA's conformance rules for dot products,
which catches small errors that sit everywhere. The third catches small wrong factors: `common` counts the roundings that all
elements of a tensor may share, such as that of a scale. Sums of integers are exact, but engines
that multiply dequantised numbers round there too, so a ternary matmul counts as a dot product.

FLIPS. A code, or a float16, is ambiguous if the number before rounding is nearer to a rounding boundary than float32 can tell;
the reach of flips is what all ambiguous ones together can change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import packing, spec
from .kernels import cpu
from .model import Model, Ternary
from .points import Key
from .transformer import Dialect

Array = NDArray[np.float64]
Floats = NDArray[np.float32]

U = 2.0**-24
"""Half a unit in the last place of float32, relative."""


class Expected(NamedTuple):
    """What an operation must give."""

    value: Array
    unit: Array  # the operation on absolute values, same shape or broadcastable
    steps: float | Array  # rounded terms of a sum
    reach: float | Array = 0.0  # what ambiguous roundings of inputs can change
    common: float = 6.0  # roundings, in units of u, that all elements can share


@dataclass(frozen=True)
class Operation:
    """One tensor of the forward pass, and how it comes from others."""

    key: Key
    inputs: tuple[Key, ...]
    evaluate: Callable[..., Expected] = field(repr=False)  # in float64
    kernel: Callable[..., NDArray] = field(repr=False)  # the same by our kernels, of float32 inputs [T, width] (token ids: integers)


TOKENS = Key("tokens", None)


def operations(model: Model, dialect: Dialect) -> Iterator[Operation]:
    """All operations in the order they run."""
    c = model.config

    def at(layer: int | None, *names: str) -> tuple[Key, ...]:
        return tuple(Key(name, layer) for name in names)

    yield Operation(
        Key("inp_embd", None), (TOKENS,), lambda tokens: embed(model, tokens), lambda tokens: cpu.embed(model.token_embd, tokens)
    )
    h = Key("inp_embd", None)
    for n, w in enumerate(model.layers):

        def linear(name: str, source: str, matrix: Ternary, n: int = n) -> Operation:
            return Operation(Key(name, n), at(n, source), lambda x: ternary_matmul(x, matrix), lambda x: ternary_kernel(x, matrix))

        def norm(name: str, source: Key, gain: NDArray, n: int = n) -> Iterator[Operation]:
            yield Operation(Key(name, n), (source,), lambda x: rms_norm(x, gain, c.eps), lambda x: cpu.rms_norm(x, gain, c.eps))
            yield Operation(Key(name + "_codes", n), at(n, name), codes, lambda x: cpu.quantize(x)[0])
            yield Operation(Key(name + "_scale", n), at(n, name), code_scale, lambda x: cpu.quantize(x)[1])

        yield from norm("attn_norm", h, w.attn_norm)
        for name, matrix in (("Qcur", w.attn_q), ("Kcur", w.attn_k), ("Vcur", w.attn_v)):
            yield linear(name, "attn_norm", matrix)
        for name in ("Qcur", "Kcur"):
            yield Operation(
                Key(name + "_rope", n), at(n, name), lambda x: rope(model, dialect, x), lambda x: rope_kernel(model, dialect, x)
            )
        yield Operation(
            Key("kqv_out", n),
            at(n, "Qcur_rope", "Kcur_rope", "Vcur"),
            lambda q, k, v: attend(model, dialect, q, k, v),
            lambda q, k, v: attend_kernel(model, dialect, q, k, v),
        )
        yield from norm("attn_sub_norm", Key("kqv_out", n), w.attn_sub_norm)
        yield linear("attn_o_out", "attn_sub_norm", w.attn_output)
        yield Operation(Key("ffn_inp", n), (h, Key("attn_o_out", n)), add, np.add)
        yield from norm("ffn_norm", Key("ffn_inp", n), w.ffn_norm)
        yield linear("ffn_gate", "ffn_norm", w.ffn_gate)
        yield linear("ffn_up", "ffn_norm", w.ffn_up)
        yield Operation(Key("ffn_out", n), at(n, "ffn_gate", "ffn_up"), relu2_gate, cpu.relu2_gate)
        yield from norm("ffn_sub_norm", Key("ffn_out", n), w.ffn_sub_norm)
        yield linear("ffn_down", "ffn_sub_norm", w.ffn_down)
        yield Operation(Key("l_out", n), at(n, "ffn_inp", "ffn_down"), add, np.add)
        h = Key("l_out", n)
    yield Operation(
        Key("result_norm", None),
        (h,),
        lambda x: rms_norm(x, model.output_norm, c.eps),
        lambda x: cpu.rms_norm(x, model.output_norm, c.eps),
    )
    table = model.token_embd if model.output is None else model.output
    yield Operation(
        Key("result_output", None),
        (Key("result_norm", None),),
        lambda x: head(model, dialect, x),
        lambda x: cpu.matmul(dialect.rounded(x), table),
    )


# --- each operation by our kernels, on one sequence from position 0 -------------------------------------------------------------------


def ternary_kernel(x: Floats, weights: Ternary) -> Floats:
    return cpu.ternary_matmul(*cpu.quantize(x), weights.codes, weights.scale, weights.shape[0])


def rope_kernel(model: Model, dialect: Dialect, x: Floats) -> Floats:
    rotations = cpu.rotations(dialect.angles(np.arange(len(x)), model.rope_frequency))
    return cpu.rope(x.reshape(len(x), -1, model.config.head_dim), *rotations).reshape(len(x), -1)


def attend_kernel(model: Model, dialect: Dialect, q: Floats, k: Floats, v: Floats) -> Floats:
    heads = [dialect.rounded(x).reshape(len(x), -1, model.config.head_dim) for x in (q, k, v)]
    run = cpu.attend_halves if dialect.halves else cpu.attend
    return run(heads[0], heads[1][None], heads[2][None], np.zeros(len(q), np.int64), np.arange(len(q))).reshape(len(q), -1)


# --- each operation: value, unit, steps -----------------------------------------------------------------------------------------------


def embed(model: Model, tokens: NDArray[np.int64]) -> Expected:
    value = packing.float32(model.token_embd[tokens]).astype(np.float64)
    return Expected(value, np.abs(value), 0)


def rms_norm(x: Array, gain: NDArray[np.float32], eps: float) -> Expected:
    """A sum of D squares under a root (which halves its relative error), then six roundings."""
    value = spec.rms_norm(x, gain.astype(np.float64), eps)
    return Expected(value, np.abs(value), x.shape[1] / 4 + 6, common=6 + x.shape[1] ** 0.5 / 2)


def dense(weights: Ternary) -> NDArray[np.float32]:
    """[N, M] of -1, 0, +1. Products with int8 codes are exact in float32 while M < 131,072."""
    return _kept(weights) if weights.shape[0] * weights.shape[1] <= _SMALL_MATRIX else packing.unpack(weights).astype(np.float32)


_SMALL_MATRIX = 1 << 20


@lru_cache(maxsize=64)
def _kept(weights: Ternary) -> NDArray[np.float32]:
    """Of small models, which are recomputed for each mistake that is tried."""
    matrix = packing.unpack(weights).astype(np.float32)
    matrix.flags.writeable = False
    return matrix


def ambiguous(exact: Array) -> NDArray[np.bool_]:
    """Numbers so near to k + 0.5 that two roundings in float32 decide to which side they go."""
    return np.abs(np.abs(exact - np.floor(exact)) - 0.5) <= 4 * U * np.abs(exact) + 1e-12


def codes(x: Array) -> Expected:
    """The int8 codes of an input: exact, but for ambiguous ones."""
    q, scale = spec.quantize(x)
    return Expected(q, np.zeros_like(q), 0, ambiguous(x * scale).astype(np.float64))


def code_scale(x: Array) -> Expected:
    """Steps per unit, 127 / absmax: one division."""
    scale = spec.quantize(x)[1]
    return Expected(scale, scale, 2)


def ternary_matmul(x: Array, weights: Ternary) -> Expected:
    """From the unquantised input, for codes that are ambiguous."""
    q, scale = spec.quantize(x)
    matrix = dense(weights)
    w_scale = float(weights.scale) / scale
    value = (q.astype(np.float32) @ matrix.T).astype(np.float64) * w_scale
    unit = (np.abs(q).astype(np.float32) @ np.abs(matrix).T).astype(np.float64) * w_scale
    rows, columns = np.nonzero(ambiguous(x * scale))
    reach = np.zeros(value.shape)
    for row, column in zip(rows, columns, strict=True):
        reach[row] += np.abs(matrix[:, column])
    return Expected(value, unit, x.shape[1], reach * w_scale)


def rope(model: Model, dialect: Dialect, x: Array) -> Expected:
    """Two products. In most engines the angle is a float32 too, wrong by a rounding or two of its own size, which all heads share."""
    c = model.config
    t = len(x)
    heads = x.reshape(t, -1, c.head_dim)
    angle = dialect.angles(np.arange(t), model.rope_frequency)[:, None, :]
    half = c.head_dim // 2
    a, b, cos, sin = heads[..., :half], heads[..., half:], np.cos(angle), np.sin(angle)
    value = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(t, -1)
    unit = np.tile((np.abs(a) + np.abs(b)) * (1 + angle), 2).reshape(t, -1)
    return Expected(value, unit, 4)


def half(x: Array) -> Array:
    """Rounded to float16."""
    return x.astype(np.float32).astype(np.float16).astype(np.float64)


def scores(model: Model, q: Array, k: Array) -> tuple[Array, Array]:
    """Scaled scores [H, T, S] of every query with every key, and the same on absolute values."""
    c = model.config
    q, k = q.reshape(len(q), c.heads, c.head_dim), k.reshape(len(k), c.kv_heads, c.head_dim)
    k = np.repeat(k, c.heads // c.kv_heads, axis=1)
    scale = c.head_dim**-0.5
    return np.einsum("thk,shk->hts", q, k) * scale, np.einsum("thk,shk->hts", np.abs(q), np.abs(k)) * scale


def attend(model: Model, dialect: Dialect, q: Array, k: Array, v: Array) -> Expected:
    """A wrong score changes its probability by as much, relatively, and the others through their sum: twice the worst score error.

    With float16 probabilities each is rounded as the engine rounds it, and ambiguous if float32 cannot tell to which side.
    """
    c = model.config
    t = len(q)
    if dialect.halves:
        q, k, v = half(q), half(k), half(v)
    values = np.repeat(v.reshape(t, c.kv_heads, c.head_dim), c.heads // c.kv_heads, axis=1)
    s, s_unit = scores(model, q, k)
    mask = spec.causal_mask(t, t)
    s = s + mask
    largest = s.max(axis=-1, keepdims=True)
    p = np.exp(s - largest)
    p /= p.sum(axis=-1, keepdims=True)
    visible = mask == 0
    wrong_score = np.where(visible, s_unit * min(c.head_dim, 6 * c.head_dim**0.5) + 2 * np.abs(np.where(visible, s - largest, 0)), 0)
    steps = np.maximum(2 * wrong_score.max(axis=-1), 0) + np.minimum(visible.sum(axis=-1), 36) + 8  # [H, T]
    reach: float | Array = 0.0
    if dialect.halves:
        spacing = np.spacing(p.astype(np.float16)).astype(np.float64)
        rounded = half(p)
        doubt = visible & (np.abs(np.abs(p - rounded) - spacing / 2) <= p * U * steps[..., None])
        reach = np.einsum("hts,shk->thk", doubt * spacing, np.abs(values)).reshape(t, -1)
        p = rounded
    value = np.einsum("hts,shk->thk", p, values)
    unit = np.einsum("hts,shk->thk", p, np.abs(values))
    every = np.broadcast_to(steps.T[..., None], value.shape)
    return Expected(value.reshape(t, -1), unit.reshape(t, -1), every.reshape(t, -1), reach)


def add(a: Array, b: Array) -> Expected:
    value = a + b
    return Expected(value, np.abs(value), 1)


def relu2_gate(gate: Array, up: Array) -> Expected:
    value = spec.relu2_gate(gate, up)
    return Expected(value, np.abs(value), 3)


def head(model: Model, dialect: Dialect, x: Array) -> Expected:
    """The output matrix; a float16 one has its input rounded to float16 in a dialect that does so."""
    table = packing.float32(model.token_embd if model.output is None else model.output).astype(np.float64)
    x = half(x) if dialect.halves else x
    return Expected(x @ table.T, np.abs(x) @ np.abs(table).T, x.shape[1])


def resolve(ops: Sequence[Operation], known: Mapping[Key, Array]) -> dict[Key, Array]:
    """Every tensor of the forward pass: those that are known as they are, the others from their inputs."""
    values = dict(known)
    for op in ops:
        if op.key not in values:
            values[op.key] = op.evaluate(*(values[key] for key in op.inputs)).value
    return values
