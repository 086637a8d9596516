"""A small engine: BitNet in float32 NumPy, whose steps can be replaced. It shares nothing with the kernels or the definition.

It may keep its tensors in a narrower type, as eager code on a GPU does, and its KV cache too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from bitnet_np import Model, load
from bitnet_np.files import embedded
from bitnet_np.model import packing, widen
from bitnet_np.model.records import Linear, Ternary
from bitnet_np.traces.points import Key

f32 = np.float32
Floats = NDArray[np.float32]


@dataclass
class Engine:
    """A forward pass that keeps every tensor, in float32 or with other sums. `faults` replace single steps."""

    model: Model
    tokens: NDArray[np.int64]
    faults: Mapping[str, Callable[["Engine", int], Floats]] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None  # the layers with faults; None for all
    dot: Callable[[Floats, Floats], Floats] = lambda x, w: x @ w.T
    in_float16: bool = False
    kept: Callable[[Floats], Floats] = lambda x: x  # the type of all tensors, also between the steps of one operation
    cached: Callable[[Floats], Floats] = lambda x: x  # the type of keys and values in the cache
    t: dict[Key, Floats] = field(default_factory=dict)

    def run(self) -> dict[Key, Floats]:
        self.step("inp_embd", None, lambda: widen.float32(self.model.token_embd)[self.tokens])
        for n in range(len(self.model.layers)):
            self.layer(n)
        self.step("result_norm", None, lambda: self.norm(self.stream(len(self.model.layers)), self.model.output_norm))
        self.step("result_output", None, lambda: self.dot(self.half(self.at("result_norm", None)), self.head()))
        return self.t

    def layer(self, n: int) -> None:
        w: Any = self.model.layers[n]
        h, source = self.stream(n), "kqv_out"
        self.step("attn_norm", n, lambda: self.norm(h, w.attn_norm))
        for name, matrix, gain in (("Qcur", w.attn_q, w.attn_q_norm), ("Kcur", w.attn_k, w.attn_k_norm), ("Vcur", w.attn_v, None)):
            self.step(name, n, partial(self.product, "attn_norm", n, matrix))
            if gain is not None:
                self.step(f"{name}_normed", n, partial(self.head_norm, name, n, gain))
            if name != "Vcur":
                self.step(f"{name}_rope", n, partial(self.turned, name if gain is None else f"{name}_normed", n))
        self.step("kqv_out", n, lambda: self.attend(n))
        if w.attn_sub_norm is not None:
            source = "attn_sub_norm"
            self.step(source, n, lambda: self.norm(self.at("kqv_out", n), w.attn_sub_norm))
        self.step("attn_o_out", n, partial(self.product, source, n, w.attn_output))
        self.step("ffn_inp", n, lambda: h + self.at("attn_o_out", n))
        self.step("ffn_norm", n, lambda: self.norm(self.at("ffn_inp", n), w.ffn_norm))
        branches = self.feed_forward(n, w)
        self.step("l_out", n, lambda: sum((self.at(name, n) for name in branches), self.at("ffn_inp", n)))

    def feed_forward(self, n: int, w: Any) -> tuple[str, ...]:
        """Everything behind a layer's second norm; returns what is added to the residual stream."""
        self.step("ffn_gate", n, partial(self.product, "ffn_norm", n, w.ffn_gate))
        self.step("ffn_up", n, partial(self.product, "ffn_norm", n, w.ffn_up))
        self.step("ffn_out", n, lambda: np.maximum(self.at("ffn_gate", n), 0) ** 2 * self.at("ffn_up", n))
        self.step("ffn_sub_norm", n, lambda: self.norm(self.at("ffn_out", n), w.ffn_sub_norm))
        self.step("ffn_down", n, partial(self.product, "ffn_sub_norm", n, w.ffn_down))
        return ("ffn_down",)

    def product(self, source: str, n: int, linear: Linear) -> Floats:
        return self.linear(self.at(source, n), cast(Ternary, linear.weights))

    def turned(self, source: str, n: int) -> Floats:
        return self.rope(self.at(source, n), np.arange(len(self.tokens)))

    def step(self, name: str, n: int | None, compute: Callable[[], Floats]) -> None:
        faulty = name in self.faults and (self.layers is None or n is None or n in self.layers)
        with np.errstate(all="ignore"):
            value = self.faults[name](self, -1 if n is None else n) if faulty else compute()
        self.t[Key(name, n)] = self.kept(np.asarray(value, f32))

    def at(self, name: str, n: int | None) -> Floats:
        return self.t[Key(name, n)]

    def stream(self, n: int) -> Floats:
        return self.at("l_out", n - 1) if n else self.at("inp_embd", None)

    def half(self, x: Floats) -> Floats:
        return float16(x) if self.in_float16 else x

    def head(self) -> Floats:
        return widen.float32(self.model.head)

    def norm(self, x: Floats, gain: Floats, eps: float | None = None, centre: bool = False) -> Floats:
        x = x - x.mean(axis=1, keepdims=True) if centre else x
        eps = self.model.config.eps if eps is None else eps
        return self.kept(x / np.sqrt((x * x).mean(axis=1, keepdims=True, dtype=f32) + f32(eps))) * self.kept(gain)

    def head_norm(self, source: str, n: int, gain: Floats) -> Floats:
        x = self.at(source, n)
        return self.norm(x.reshape(-1, gain.size), gain).reshape(x.shape)

    def quantized(self, x: Floats) -> tuple[Floats, Floats]:
        scale = self.kept(f32(127) / np.maximum(f32(1e-5), np.abs(x).max(axis=1, keepdims=True)))
        return np.rint(self.kept(x * scale)), scale

    def linear(self, x: Floats, weights: Ternary, matrix: NDArray | None = None) -> Floats:
        q, scale = self.quantized(x)
        dense = packing.unpack(weights) if matrix is None else matrix
        return self.dot(q, dense.astype(f32)) / scale * weights.scale

    def rope(self, x: Floats, position: NDArray, base: float | None = None, pairs: str = "halves", sign: int = 1) -> Floats:
        k = self.model.config.head_dim
        frequency = (base or self.model.config.rope_base) ** (-np.arange(k // 2) / (k // 2))
        if self.in_float16:  # stepped in float32, as ggml does
            steps = np.full((len(position), k // 2), f32(frequency[1]))
            steps[:, 0] = position
            angle = np.multiply.accumulate(steps, axis=1).astype(np.float64)
        else:
            angle = np.multiply.outer(position, frequency)
        cos, sin = (self.kept(turn(sign * angle).astype(f32))[:, None] for turn in (np.cos, np.sin))
        y = x.reshape(len(x), -1, k)
        first, second = (slice(0, k // 2), slice(k // 2, k)) if pairs == "halves" else (slice(0, k, 2), slice(1, k, 2))
        out = np.empty_like(y)
        out[..., first] = self.kept(y[..., first] * cos) - self.kept(y[..., second] * sin)
        out[..., second] = self.kept(y[..., first] * sin) + self.kept(y[..., second] * cos)
        return out.reshape(x.shape)

    def attend(
        self,
        n: int,
        *,
        q: str = "Qcur_rope",
        k: str = "Kcur_rope",
        v: str = "Vcur",
        allowed: Callable[[NDArray, NDArray], NDArray] = lambda i, j: j <= i,
        scale: float | None = None,
        groups: NDArray | None = None,
        extra: tuple[Floats, Floats] | None = None,
    ) -> Floats:
        c = self.model.config
        rows = len(self.tokens)
        queries = self.half(self.at(q, n)).reshape(rows, c.heads, c.head_dim)
        keys, values = (self.cached(self.half(self.at(name, n))).reshape(rows, c.kv_heads, c.head_dim) for name in (k, v))
        mask = allowed(np.arange(rows)[:, None], np.arange(rows))
        if extra is not None:  # foreign keys and values
            keys, values = (
                np.concatenate([more.reshape(-1, c.kv_heads, c.head_dim), x]) for more, x in zip(extra, (keys, values), strict=True)
            )
            mask = np.concatenate([np.ones((rows, len(keys) - rows), bool), mask], axis=1)
        chosen = np.arange(c.heads) // (c.heads // c.kv_heads) if groups is None else groups
        out = np.zeros_like(queries)
        for h in range(c.heads):
            s = self.kept(self.kept(self.dot(queries[:, h], keys[:, chosen[h]])) * f32(c.head_dim**-0.5 if scale is None else scale))
            s = np.where(mask, s, -np.inf)
            p = np.exp(s - s.max(axis=1, keepdims=True))
            p = self.kept(self.half(p / p.sum(axis=1, keepdims=True, dtype=f32)))
            out[:, h] = self.dot(p, values[:, chosen[h]].T.copy())
        return out.reshape(rows, -1)


def float16(x: Floats) -> Floats:
    """x rounded to float16."""
    return x.astype(np.float16).astype(f32)


def bfloat16(x: Floats) -> Floats:
    """x rounded to bfloat16, half to even."""
    bits = x.astype(f32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(f32)


def q8_0(x: Floats) -> Floats:
    """x rounded as a cache of ggml's Q8_0 does: int8 codes, a float16 step for each 32 numbers."""
    blocks = x.reshape(len(x), -1, 32)
    step = np.abs(blocks).max(axis=2, keepdims=True) / f32(127)
    return (np.rint(blocks / np.where(step == 0, f32(1), step)) * float16(step)).reshape(x.shape)


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16 KV cache": {"cached": float16},
    "q8_0 KV cache": {"cached": q8_0},
    "float16": {"kept": float16},
    "bfloat16": {"kept": bfloat16},
}
"""Engines by the types that they keep numbers in."""


def accumulate(chunk: int) -> Callable[[Floats, Floats], Floats]:
    """A dot product that adds float32 partial sums of `chunk` terms one after the other."""

    def dot(x: Floats, w: Floats) -> Floats:
        total = np.zeros((len(x), len(w)), f32)
        for i in range(0, x.shape[1], chunk):
            total += x[:, i : i + chunk] @ w[:, i : i + chunk].T
        return total

    return dot


def precise(x: Floats, w: Floats) -> Floats:
    """A dot product rounded once."""
    return (x.astype(np.float64) @ w.T.astype(np.float64)).astype(f32)


def embedded_model() -> Model:
    with embedded.model_path() as path:
        return load(path)
