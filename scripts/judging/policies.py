"""Right engines that round inside operations, as GPUs, phones and libraries of quantised kernels do: one table, and their engine.

A policy says what it does to operands of products, to what attention multiplies, to the cache, to sums, and to functions. Numbers between
operations stay float32, so that nothing in a dump shows the policy but the errors that it makes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np.model import widen
from bitnet_np.model.records import Linear

from .engine import Engine, Floats, bfloat16, f32, float16, q8_0
from .faults import silu

Round = Callable[[Floats], Floats]


def same(x: Floats) -> Floats:
    return x


# --- formats: a grid of elements, a rule of scales, a block -----------------------------------------------------------------------------


def floats(digits: int, least: int, most: float) -> Round:
    """The grid of a float type of so many significant bits, whose smallest normal number is 2^least."""

    def to_grid(x: Floats) -> Floats:
        exponent = np.maximum(np.frexp(x)[1] - 1, least)
        step = np.ldexp(1.0, exponent + 1 - digits)
        return np.clip(np.rint(x / step) * step, -most, most).astype(f32)

    return to_grid


def integers(most: float) -> Round:
    return lambda x: np.clip(np.rint(x), -most, most).astype(f32)


GRIDS: dict[str, tuple[Round, float]] = {
    "e4m3": (floats(4, -6, 448.0), 448.0),
    "e5m2": (floats(3, -14, 57344.0), 57344.0),
    "e2m3": (floats(4, 0, 7.5), 7.5),
    "e3m2": (floats(3, -2, 28.0), 28.0),
    "e2m1": (floats(2, 0, 6.0), 6.0),
    "int8": (integers(127), 127.0),
    "int4": (integers(7), 7.0),
}
"""Grids of elements, and their largest numbers."""


def power_of_two(scale: Floats) -> Floats:
    """E8M0, as MX formats have it."""
    return np.exp2(np.ceil(np.log2(scale))).astype(f32)


def scaled(grid: str, block: int | None = -1, scale: Round = same) -> Round:
    """Numbers in a grid, times a scale of each block: of each row (-1), of the tensor (None), or of so many numbers."""
    to_grid, most = GRIDS[grid]

    def round_(x: Floats) -> Floats:
        x = np.asarray(x, f32)
        blocks = x if block in (-1, None) or x.shape[-1] % block else x.reshape(*x.shape[:-1], -1, block)
        largest = np.abs(blocks).max(axis=None if block is None else -1, keepdims=True)
        step = scale(np.maximum(largest, f32(1e-30)) / f32(most))
        return (to_grid(blocks / step) * step).reshape(x.shape).astype(f32)

    return round_


def affine(bits: int, axis: int | None) -> Round:
    """Unsigned integers with a zero point, of the tensor (None) or along an axis."""

    def round_(x: Floats) -> Floats:
        low, high = (np.minimum(x.min(axis=axis, keepdims=True), 0), np.maximum(x.max(axis=axis, keepdims=True), 0))
        step = np.maximum((high - low) / f32(2**bits - 1), f32(1e-30))
        zero = np.rint(-low / step)
        return ((np.clip(np.rint(x / step) + zero, 0, 2**bits - 1) - zero) * step).astype(f32)

    return round_


def cut(digits: int) -> Round:
    """Numbers cut to so many significant bits."""
    mask = np.uint32((0xFFFFFFFF << (24 - digits)) & 0xFFFFFFFF)
    return lambda x: (np.ascontiguousarray(x, f32).view(np.uint32) & mask).view(f32)


def nearest(digits: int) -> Round:
    return lambda x: np.asarray(floats(digits, -126, 3e38)(x), f32)


def in_two(x: Floats) -> Floats:
    """The sum of two bfloat16."""
    high = bfloat16(x)
    return high + bfloat16(x - high)


def nvfp4(x: Floats) -> Floats:
    """e2m1 in blocks of 16, whose scales are e4m3 in units of one of the tensor."""
    unit = f32(np.abs(x).max() / (448 * 6))
    return scaled("e2m1", 16, lambda s: np.maximum(GRIDS["e4m3"][0](s / unit), f32(2.0**-9)) * unit)(x)


def outliers_apart(x: Floats) -> Floats:
    """int8 rows as LLM.int8 has them: columns with a number above six stay float16."""
    wide = np.abs(x).max(axis=0) > 3  # of random models, whose numbers are smaller
    return np.where(wide, float16(x), scaled("int8")(np.where(wide, 0, x))).astype(f32)


def q8_0_rounded_step(x: Floats) -> Floats:
    """Q8_0 whose codes are of the step in float16, as some engines compute them."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    step = float16(np.abs(blocks).max(axis=-1, keepdims=True) / f32(127))
    return (np.rint(blocks / np.where(step == 0, f32(1), step)) * step).reshape(x.shape).astype(f32)


# --- sums and functions -----------------------------------------------------------------------------------------------------------------


def sums_in(kept: Round, chunk: int) -> Callable[[Floats, Floats], Floats]:
    """Products whose sums of `chunk` terms are rounded to a type, and added up in float32."""

    def dot(x: Floats, w: Floats) -> Floats:
        parts = [kept(kept(x[:, i : i + chunk]) @ kept(w[:, i : i + chunk]).T) for i in range(0, x.shape[1], chunk)]
        return np.sum(parts, axis=0, dtype=f32)

    return dot


def running_in(kept: Round, chunk: int) -> Callable[[Floats, Floats], Floats]:
    """Products whose running sum is rounded after every `chunk` terms."""

    def dot(x: Floats, w: Floats) -> Floats:
        total = np.zeros((len(x), len(w)), f32)
        for i in range(0, x.shape[1], chunk):
            total = kept(total + x[:, i : i + chunk] @ w[:, i : i + chunk].T)
        return total

    return dot


def table(function: Callable[[Floats], Floats], low: float, high: float, count: int) -> Round:
    """A function read off a table of so many numbers, with straight lines between them; itself outside."""
    at = np.linspace(low, high, count).astype(f32)
    values = function(at)
    return lambda x: np.where((x > low) & (x < high), np.interp(x, at, values), function(x)).astype(f32)


def exp_by_polynomial(degree: int) -> Round:
    """2^n times a polynomial of the fraction, fitted at Chebyshev's points."""
    points = np.cos(np.pi * (np.arange(64) + 0.5) / 64) / 2 + 0.5
    fit = np.polynomial.Polynomial.fit(points, np.exp2(points), degree)

    def exp(x: Floats) -> Floats:
        y = np.asarray(x, np.float64) * np.log2(np.e)
        whole = np.floor(np.maximum(y, -126))
        return np.where(np.isneginf(x), 0, np.ldexp(fit(np.maximum(y, -126) - whole), whole.astype(int))).astype(f32)

    return exp


def exp_schraudolph(x: Floats) -> Floats:
    """The exponential by one multiplication and the bits of a float, corrected by a polynomial, as kernels for phones have it."""
    y = np.maximum(np.asarray(x, np.float64) * np.log2(np.e), -126)
    whole = np.floor(y)
    f = y - whole
    return np.where(np.isneginf(x), 0, np.exp2(whole) * (1 + f * (0.6565 + f * (0.3435 + 0.0 * f)))).astype(f32)


def rsqrt_of_bits(bits: int, newton: int = 0) -> Round:
    """The inverse root of so many right bits, by a table of the mantissa, with steps of Newton's method."""

    def rsqrt(x: Floats) -> Floats:
        fraction, exponent = np.frexp(np.asarray(x, np.float64))
        odd = exponent % 2
        fraction, exponent = np.where(odd, fraction / 2, fraction), exponent + odd
        steps = 2.0 ** (bits - 1)
        middle = (np.floor(fraction * steps) + 0.5) / steps
        y = f32(1) * np.ldexp(1 / np.sqrt(middle), -(exponent // 2)).astype(f32)
        for _ in range(newton):
            y = y * (f32(1.5) - f32(0.5) * x.astype(f32) * y * y)
        return y

    return rsqrt


def flushed(x: Floats) -> Floats:
    """Subnormal numbers as zero."""
    return np.where(np.abs(x) < np.finfo(f32).tiny, f32(0), x)


# --- the engine -------------------------------------------------------------------------------------------------------------------------


@dataclass
class Dense(Engine):
    """A Llama of float matrices whose operations round. Fields are functions of an array each, the last axis of which is summed over."""

    x: Round = same  # operands of products
    w: Round = same
    head_x: Round | None = None  # those of the head; the same if None
    head_w: Round | None = None
    q: Round = same  # [H, T, K]
    k: Round = same
    p: Round = same  # [H, T, T] what values are multiplied by
    v: Round = same  # [H, K, T]
    by_channel: bool = False  # whether keys are rounded along tokens, as KIVI's
    flash: bool = False  # whether exponentials are rounded for the product with values, and summed unrounded
    block: int = 0  # of keys, whose outputs flash attention rescales
    exp: Round = np.exp
    act: Round = silu
    rsqrt: Round | None = None
    y: Round = same  # results of products

    def norm(self, x: Floats, gain: Floats, eps: float | None = None, centre: bool = False) -> Floats:
        if self.rsqrt is None:
            return super().norm(x, gain, eps, centre)
        square = (x * x).mean(axis=1, keepdims=True, dtype=f32) + f32(self.model.config.eps if eps is None else eps)
        return x * self.rsqrt(square) * gain

    def matrix(self, linear: Linear) -> Floats:
        assert not isinstance(linear.weights, type(None))
        return widen.float32(linear.weights)  # type: ignore[arg-type]

    def product(self, source: str, n: int, linear: Linear) -> Floats:
        return self.times(self.at(source, n), linear)

    def times(self, x: Floats, linear: Linear, matrix: NDArray | None = None) -> Floats:
        """The product with a linear, or with another matrix in its place."""
        y = self.y(self.dot(self.x(x), self.w(self.matrix(linear) if matrix is None else matrix)))
        return y if linear.bias is None else y + linear.bias

    def feed_forward(self, n: int, w: Any) -> tuple[str, ...]:
        self.step("ffn_gate", n, partial(self.product, "ffn_norm", n, w.ffn_gate))
        self.step("ffn_up", n, partial(self.product, "ffn_norm", n, w.ffn_up))
        self.step("ffn_out", n, lambda: self.act(self.at("ffn_gate", n)) * self.at("ffn_up", n))
        self.step("ffn_down", n, partial(self.product, "ffn_out", n, w.ffn_down))
        return ("ffn_down",)

    def rope(self, x: Floats, position: NDArray, base: float | None = None, pairs: str = "", sign: int = 1) -> Floats:
        return super().rope(x, position, base, pairs or {"adjacent": "interleaved"}.get(self.model.config.rope, "halves"), sign)

    def head(self) -> Floats:
        return (self.w if self.head_w is None else self.head_w)(super().head())

    def step(self, name: str, n: int | None, compute: Callable[[], Floats]) -> None:
        bias = self.model.output_bias if name == "result_output" else None
        super().step(name, n, compute if bias is None else lambda: compute() + bias)

    def half(self, x: Floats) -> Floats:  # the head's input
        return (self.x if self.head_x is None else self.head_x)(x)

    def attend(self, n: int, *, q: str = "Qcur_rope", k: str = "Kcur_rope", v: str = "Vcur", allowed: Any = None, **how: Any) -> Floats:
        c, rows = self.model.config, len(self.tokens)
        heads = lambda name, count: self.at(name, n).reshape(rows, count, c.head_dim).swapaxes(0, 1)  # noqa: E731  # [H, T, K]
        groups = how.get("groups")
        groups = np.arange(c.heads) // (c.heads // c.kv_heads) if groups is None else groups
        queries, keys = self.q(heads(q, c.heads)), self.cached(heads(k, c.kv_heads))
        keys = self.k(keys.swapaxes(1, 2)).swapaxes(1, 2) if self.by_channel else self.k(keys)
        values = self.v(self.cached(heads(v, c.kv_heads)).swapaxes(1, 2))  # [G, K, T]
        i, j = np.arange(rows)[:, None], np.arange(rows)
        mask = (j <= i) if allowed is None else allowed(i, j)
        out = np.zeros((rows, c.heads, c.head_dim), f32)
        scale = f32(c.head_dim**-0.5 if how.get("scale") is None else how["scale"])
        for h, g in enumerate(groups):
            s = np.where(mask, self.dot(queries[h], keys[g]) * scale, -np.inf).astype(f32)
            out[:, h] = self.flashed(s, values[g]) if self.block else self.softmaxed(s, values[g])
        return out.reshape(rows, -1)

    def softmaxed(self, s: Floats, values: Floats) -> Floats:
        e = self.exp(s - s.max(axis=1, keepdims=True)).astype(f32)
        total = e.sum(axis=1, keepdims=True, dtype=f32)
        return self.dot(self.p(e), values) / total if self.flash else self.dot(self.p(e / total), values)

    def flashed(self, s: Floats, values: Floats) -> Floats:
        """Flash attention: keys in blocks, with a running largest score."""
        rows = len(s)
        largest, total, out = np.full((rows, 1), -np.inf, f32), np.zeros((rows, 1), f32), np.zeros((rows, len(values)), f32)
        for i in range(0, s.shape[1], self.block):
            part = s[:, i : i + self.block]
            new = np.maximum(largest, part.max(axis=1, keepdims=True))
            e = self.exp(part - new).astype(f32)
            rescale = np.where(np.isneginf(largest), f32(0), self.exp(largest - new)).astype(f32)
            total = total * rescale + e.sum(axis=1, keepdims=True, dtype=f32)
            out = out * rescale + self.dot(self.p(e), values[:, i : i + self.block])
            largest = new
        return out / total


# --- the table --------------------------------------------------------------------------------------------------------------------------

Policy = Mapping[str, Any]


def both(round_: Round, other: Round | None = None) -> dict[str, Any]:
    """Operands of products with matrices."""
    return {"x": round_, "w": round_ if other is None else other}


def everywhere(round_: Round) -> dict[str, Any]:
    """Operands of all products, those of attention too."""
    return {**both(round_), **dict.fromkeys("qkpv", round_)}


def cache(k: Round, v: Round | None = None, **more: Any) -> dict[str, Any]:
    """Keys by head and token; values are [G, K, T]: rounded along the head as the keys are."""
    other = k if v is None else v
    return {"k": k, "v": lambda x: other(x.swapaxes(1, 2)).swapaxes(1, 2), **more}


def mx(grid: str) -> Round:
    return scaled(grid, 32, power_of_two)


TUNED: dict[str, Policy] = {
    "TF32": everywhere(nearest(11)),
    "TF32 in matrices alone": both(nearest(11)),
    "TF32 by truncation": everywhere(cut(11)),
    "bfloat16 operands": everywhere(bfloat16),
    "bfloat16 in matrices alone": both(bfloat16),
    "float16 operands": everywhere(float16),
    "bfloat16 twice": everywhere(in_two),
    "int8 rows": both(scaled("int8")),
    "int8 by tensor": both(scaled("int8", None)),
    "int8 affine inputs": both(affine(8, None), scaled("int8")),
    "LLM.int8": both(outliers_apart, scaled("int8")),
    "e4m3 by tensor": both(scaled("e4m3", None)),
    "e4m3 rows": both(scaled("e4m3")),
    "MXFP8": both(mx("e4m3")),
    "MXFP6": both(mx("e2m3")),
    "MXFP4 weights": {"w": mx("e2m1")},
    "NVFP4 weights": {"w": nvfp4},
    "NVFP4": both(nvfp4),
    "int4 weights in groups": {"w": scaled("int4", 32)},
    "int4 weights, bfloat16 inputs": {"x": bfloat16, "w": scaled("int4", 32)},
    "Q8_0 with its rounded step": both(q8_0_rounded_step),
    "int8 head": {"head_x": scaled("int8"), "head_w": scaled("int8")},
    "flash attention, bfloat16 exponentials": {"p": bfloat16, "flash": True, "block": 8},
    "flash attention, float16 exponentials": {"p": float16, "flash": True, "block": 16},
    "flash attention in bfloat16": {**dict.fromkeys("qkpv", bfloat16), "flash": True, "block": 16},
    "flash attention in e4m3": {**dict.fromkeys("qkpv", scaled("e4m3", None)), "flash": True, "block": 16},
    "SageAttention": {"q": scaled("int8"), "k": scaled("int8"), "p": float16, "v": float16, "flash": True, "block": 16},
    "bfloat16 probabilities": {"p": bfloat16},
    "int4 cache": cache(scaled("int4")),
    "e5m2 cache": cache(GRIDS["e5m2"][0]),
    "e4m3 cache": cache(GRIDS["e4m3"][0]),
    "float16 cache": {"cached": float16},
    "KIVI": cache(affine(2 + 2, -1), affine(4, -1), by_channel=True),
    "float16 sums of 16": {"dot": sums_in(float16, 16)},
    "float16 sums": {"dot": running_in(float16, 16)},
    "SiLU by a table": {"act": table(silu, -8, 8, 257)},
    "SiLU by a fine table": {"act": table(silu, -8, 8, 4097)},
    "exp by a polynomial of degree 3": {"exp": exp_by_polynomial(3), "act": lambda x: x / (1 + exp_by_polynomial(3)(-x))},
    "exp by a polynomial of degree 4": {"exp": exp_by_polynomial(4)},
    "rsqrt of 12 bits": {"rsqrt": rsqrt_of_bits(12)},
    "rsqrt of 12 bits and a Newton step": {"rsqrt": rsqrt_of_bits(12, 1)},
    "subnormals flushed": {"kept": flushed},
    "TF32 operands and a float16 cache": {**both(nearest(11)), "cached": float16},
}
"""Policies that the judge was made with."""
UNSEEN: dict[str, Policy] = {
    "MXINT8": both(scaled("int8", 32, power_of_two)),
    "MXFP6 e3m2": both(mx("e3m2")),
    "MXFP4": both(mx("e2m1")),
    "e5m2 by tensor": both(scaled("e5m2", None), scaled("e4m3", None)),
    "int4 weights, int8 inputs": {"x": scaled("int8"), "w": scaled("int4", 64)},
    "e4m3 in blocks of 128 and e4m3 cache": {**both(scaled("e4m3", 64)), **cache(GRIDS["e4m3"][0])},
    "bfloat16 sums of 32": {"dot": sums_in(bfloat16, 32)},
    "bfloat16 results of products": {"y": bfloat16},
    "float16 probabilities and values": {"p": float16, "v": float16},
    "Q8_0 cache": {"cached": lambda x: q8_0(x.reshape(-1, x.shape[-1])).reshape(x.shape)},
    "int8 cache, int8 rows": {**both(scaled("int8")), **cache(scaled("int8"))},
    "exp of phones": {"exp": exp_schraudolph},
    "SiLU by a polynomial's exp": {"act": lambda x: x / (1 + exp_by_polynomial(5)(-x))},
    "SiLU of bfloat16": {"act": lambda x: bfloat16(silu(bfloat16(x)))},
    "rsqrt of 8 bits and a Newton step": {"rsqrt": rsqrt_of_bits(8, 1)},
    "mantissas cut to 7 bits": everywhere(cut(8)),
}
"""Policies on which the judge is measured, and was not tuned."""
