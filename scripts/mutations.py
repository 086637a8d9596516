"""Does the judge find bugs, and does it leave honest engines alone?

A small engine of its own (float32 NumPy, sharing nothing with the kernels or the definition) is given realistic faults, one at a time,
and its dump is judged: was the fault found, was the right operation of the right layer blamed, was the mistake recognised? Then honest
variants of the engine, which sum in other orders or round to float16 as declared, are judged: every alarm there is false.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bitnet_np import BITNET_CPP, EXACT, Dialect, Model, embedded, forward, load, packing, widen
from bitnet_np.cache import KVCache
from bitnet_np.judge.report import Report
from bitnet_np.judge.trace import judge_trace
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model import Linear, Ternary
from bitnet_np.testing import random_model
from bitnet_np.traces.points import Key, Trace

f32 = np.float32
Floats = NDArray[np.float32]
LAYER = 1  # where a fault is put that sits in one layer


# --- an engine ------------------------------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """A forward pass that keeps every tensor, in float32 or with another way to sum; `faults` replace single steps."""

    model: Model
    tokens: NDArray[np.int64]
    faults: Mapping[str, Callable[["Engine", int], Floats]] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None  # where the faults are; None: everywhere
    dot: Callable[[Floats, Floats], Floats] = lambda x, w: x @ w.T
    halves: bool = False
    t: dict[Key, Floats] = field(default_factory=dict)

    def run(self) -> dict[Key, Floats]:
        self.step("inp_embd", None, lambda: widen.float32(self.model.token_embd)[self.tokens])
        for n in range(len(self.model.layers)):
            self.layer(n)
        self.step("result_norm", None, lambda: self.norm(self.stream(len(self.model.layers)), self.model.output_norm))
        self.step("result_output", None, lambda: self.dot(self.half(self.at("result_norm", None)), self.head()))
        return self.t

    def layer(self, n: int) -> None:
        w, h, position = self.model.layers[n], self.stream(n), np.arange(len(self.tokens))
        assert w.attn_sub_norm is not None
        assert w.ffn_sub_norm is not None
        assert w.ffn_gate is not None
        attn_sub_norm, ffn_sub_norm = w.attn_sub_norm, w.ffn_sub_norm

        def linear(name: str, source: str, matrix: Linear) -> None:
            weights = matrix.weights
            assert isinstance(weights, Ternary)
            self.step(name, n, lambda: self.linear(self.at(source, n), weights))

        self.step("attn_norm", n, lambda: self.norm(h, w.attn_norm))
        linear("Qcur", "attn_norm", w.attn_q)
        linear("Kcur", "attn_norm", w.attn_k)
        linear("Vcur", "attn_norm", w.attn_v)
        self.step("Qcur_rope", n, lambda: self.rope(self.at("Qcur", n), position))
        self.step("Kcur_rope", n, lambda: self.rope(self.at("Kcur", n), position))
        self.step("kqv_out", n, lambda: self.attend(n))
        self.step("attn_sub_norm", n, lambda: self.norm(self.at("kqv_out", n), attn_sub_norm))
        linear("attn_o_out", "attn_sub_norm", w.attn_output)
        self.step("ffn_inp", n, lambda: h + self.at("attn_o_out", n))
        self.step("ffn_norm", n, lambda: self.norm(self.at("ffn_inp", n), w.ffn_norm))
        linear("ffn_gate", "ffn_norm", w.ffn_gate)
        linear("ffn_up", "ffn_norm", w.ffn_up)
        self.step("ffn_out", n, lambda: np.maximum(self.at("ffn_gate", n), 0) ** 2 * self.at("ffn_up", n))
        self.step("ffn_sub_norm", n, lambda: self.norm(self.at("ffn_out", n), ffn_sub_norm))
        linear("ffn_down", "ffn_sub_norm", w.ffn_down)
        self.step("l_out", n, lambda: self.at("ffn_inp", n) + self.at("ffn_down", n))

    def step(self, name: str, n: int | None, compute: Callable[[], Floats]) -> None:
        faulty = name in self.faults and (self.layers is None or n is None or n in self.layers)
        with np.errstate(all="ignore"):
            value = self.faults[name](self, -1 if n is None else n) if faulty else compute()
        self.t[Key(name, n)] = np.asarray(value, f32)

    def at(self, name: str, n: int | None) -> Floats:
        return self.t[Key(name, n)]

    def stream(self, n: int) -> Floats:
        return self.at("l_out", n - 1) if n else self.at("inp_embd", None)

    def half(self, x: Floats) -> Floats:
        return x.astype(np.float16).astype(f32) if self.halves else x

    def head(self) -> Floats:
        return widen.float32(self.model.head)

    def norm(self, x: Floats, gain: Floats, eps: float | None = None, centre: bool = False) -> Floats:
        x = x - x.mean(axis=1, keepdims=True) if centre else x
        eps = self.model.config.eps if eps is None else eps
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True, dtype=f32) + f32(eps)) * gain

    def quantized(self, x: Floats) -> tuple[Floats, Floats]:
        scale = f32(127) / np.maximum(f32(1e-5), np.abs(x).max(axis=1, keepdims=True))
        return np.rint(x * scale), scale

    def linear(self, x: Floats, weights: Ternary, matrix: NDArray | None = None) -> Floats:
        q, scale = self.quantized(x)
        dense = packing.unpack(weights) if matrix is None else matrix
        return self.dot(q, dense.astype(f32)) / scale * weights.scale

    def rope(self, x: Floats, position: NDArray, base: float | None = None, pairs: str = "halves", sign: int = 1) -> Floats:
        k = self.model.config.head_dim
        frequency = (base or self.model.config.rope_base) ** (-np.arange(k // 2) / (k // 2))
        if self.halves:  # stepped in float32, as ggml does
            steps = np.full((len(position), k // 2), f32(frequency[1]))
            steps[:, 0] = position
            angle = np.multiply.accumulate(steps, axis=1).astype(np.float64)
        else:
            angle = np.multiply.outer(position, frequency)
        cos, sin = (turn(sign * angle).astype(f32)[:, None] for turn in (np.cos, np.sin))
        y = x.reshape(len(x), -1, k)
        first, second = (slice(0, k // 2), slice(k // 2, k)) if pairs == "halves" else (slice(0, k, 2), slice(1, k, 2))
        out = np.empty_like(y)
        out[..., first] = y[..., first] * cos - y[..., second] * sin
        out[..., second] = y[..., first] * sin + y[..., second] * cos
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
        keys, values = (self.half(self.at(name, n)).reshape(rows, c.kv_heads, c.head_dim) for name in (k, v))
        mask = allowed(np.arange(rows)[:, None], np.arange(rows))
        if extra is not None:  # keys and values that should not be there
            keys, values = (
                np.concatenate([more.reshape(-1, c.kv_heads, c.head_dim), x]) for more, x in zip(extra, (keys, values), strict=True)
            )
            mask = np.concatenate([np.ones((rows, len(keys) - rows), bool), mask], axis=1)
        chosen = np.arange(c.heads) // (c.heads // c.kv_heads) if groups is None else groups
        out = np.zeros_like(queries)
        for h in range(c.heads):
            s = self.dot(queries[:, h], keys[:, chosen[h]]) * f32(c.head_dim**-0.5 if scale is None else scale)
            s = np.where(mask, s, -np.inf)
            p = np.exp(s - s.max(axis=1, keepdims=True))
            out[:, h] = self.dot(self.half(p / p.sum(axis=1, keepdims=True, dtype=f32)), values[:, chosen[h]].T.copy())
        return out.reshape(rows, -1)


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


# --- faults ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One bug, and where a judge should see it first."""

    name: str
    blamed: str  # tensor; "" where the dump as a whole must be refused
    make: Callable[[Model, NDArray[np.int64]], tuple[dict[Key, Floats], NDArray[np.int64]]]
    layer: int | None = LAYER


def in_engine(**faults: Callable[[Engine, int], Floats]) -> Callable:
    """The fault replaces a step of layer LAYER."""
    return lambda model, tokens: (Engine(model, tokens, faults, (LAYER,)).run(), tokens)


def everywhere(**faults: Callable[[Engine, int], Floats]) -> Callable:
    """The fault replaces a step of every layer."""
    return lambda model, tokens: (Engine(model, tokens, faults).run(), tokens)


def on_dump(change: Callable[[dict[Key, Floats]], object]) -> Callable:
    """The fault is in what an honest engine wrote."""

    def make(model: Model, tokens: NDArray[np.int64]) -> tuple[dict[Key, Floats], NDArray[np.int64]]:
        dump = Engine(model, tokens).run()
        change(dump)
        return dump, tokens

    return make


def _weights(e: Engine, n: int, name: str) -> Ternary:
    return getattr(e.model.layers[n], name).weights


def _misread(e: Engine, n: int, name: str, source: str) -> Floats:
    """One block of 128 codes is read from the block after it."""
    matrix = packing.unpack(_weights(e, n, name))
    matrix[3, :128] = matrix[4, :128]
    return e.linear(e.at(source, n), _weights(e, n, name), matrix)


def truncated(e: Engine, n: int) -> Floats:
    x, w = e.at("ffn_sub_norm", n), _weights(e, n, "ffn_down")
    _, scale = e.quantized(x)
    return (np.trunc(x * scale) @ packing.unpack(w).T.astype(f32)) / scale * w.scale


def _per_tensor(e: Engine, n: int) -> Floats:
    x, w = e.at("ffn_norm", n), _weights(e, n, "ffn_up")
    scale = f32(127) / np.abs(x).max()
    return (np.rint(x * scale) @ packing.unpack(w).T.astype(f32)) / scale * w.scale


def _relaid(e: Engine, n: int) -> Floats:
    w = _weights(e, n, "attn_q")
    codes = packing.to_i2s(w)[: -packing.TRAILER].reshape(-1, 1, 16)
    matrix = (codes >> np.array([6, 4, 2, 0], np.uint8)[:, None] & 3).reshape(w.shape).astype(np.int8) - 1
    return e.linear(e.at("attn_norm", n), w, matrix)


def _leaked(model: Model, tokens: NDArray[np.int64]) -> tuple[dict[Key, Floats], NDArray[np.int64]]:
    other = Engine(model, tokens[::-1][:5].copy()).run()
    leak: Callable[[Engine, int], Floats] = lambda e, n: e.attend(n, extra=(other[Key("Kcur_rope", n)], other[Key("Vcur", n)]))  # noqa: E731
    return Engine(model, tokens, {"kqv_out": leak}).run(), tokens


def _double_fed(model: Model, tokens: NDArray[np.int64]) -> tuple[dict[Key, Floats], NDArray[np.int64]]:
    dump = Engine(model, np.append(tokens, tokens[-1])).run()
    return {key: np.delete(value, len(tokens) - 1, axis=0) for key, value in dump.items()}, tokens


def _restarted(e: Engine, n: int, name: str) -> Floats:
    half = len(e.tokens) // 2 + 1
    return e.rope(e.at(name, n), np.arange(len(e.tokens)) % half)


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def _set(key: Key, change: Callable[[Floats], Floats]) -> Callable[[dict[Key, Floats]], None]:
    def apply(dump: dict[Key, Floats]) -> None:
        dump[key] = np.ascontiguousarray(change(dump[key]))

    return apply


def _with_nan(x: Floats) -> Floats:
    x = x.copy()
    x[len(x) // 2, 3] = np.nan
    return x


LOGITS = Key("result_output", None)


def faults() -> Iterator[Fault]:
    """All of them."""
    norms = {"attn_norm": None, "attn_sub_norm": "kqv_out", "ffn_norm": "ffn_inp", "ffn_sub_norm": "ffn_out"}

    def source(e: Engine, n: int, norm: str) -> Floats:
        before = norms[norm]
        return e.stream(n) if before is None else e.at(before, n)

    def gain(e: Engine, n: int, norm: str) -> Floats:
        return getattr(e.model.layers[n], norm)

    for norm in ("attn_sub_norm", "ffn_sub_norm"):
        yield Fault(f"{norm} missing", norm, in_engine(**{norm: lambda e, n, x=norm: source(e, n, x)}))
    yield Fault("attn_norm without its weight", "attn_norm", in_engine(attn_norm=lambda e, n: e.norm(e.stream(n), np.ones(1, f32))))
    yield Fault(
        "ffn_norm is a LayerNorm",
        "ffn_norm",
        in_engine(ffn_norm=lambda e, n: e.norm(e.at("ffn_inp", n), gain(e, n, "ffn_norm"), centre=True)),
    )
    yield Fault(
        "epsilon 1e-3 in ffn_norm", "ffn_norm", in_engine(ffn_norm=lambda e, n: e.norm(e.at("ffn_inp", n), gain(e, n, "ffn_norm"), 1e-3))
    )
    yield Fault(
        "epsilon 1e-6 in attn_norm", "attn_norm", in_engine(attn_norm=lambda e, n: e.norm(e.stream(n), gain(e, n, "attn_norm"), 1e-6))
    )
    yield Fault(
        "attn_norm with ffn_norm's weight", "attn_norm", in_engine(attn_norm=lambda e, n: e.norm(e.stream(n), gain(e, n, "ffn_norm")))
    )

    def rope(name: str, **options: object) -> Callable:
        def fault(e: Engine, n: int) -> Floats:
            position = np.arange(len(e.tokens)) + options.get("shift", 0)  # type: ignore[operator]
            rest = {k: v for k, v in options.items() if k != "shift"}
            return e.rope(e.at(name, n), position, **rest)  # type: ignore[arg-type]

        return in_engine(**{name + "_rope": fault})

    yield Fault("RoPE pairs interleaved (queries)", "Qcur_rope", rope("Qcur", pairs="interleaved"))
    yield Fault("RoPE pairs interleaved (keys)", "Kcur_rope", rope("Kcur", pairs="interleaved"))
    yield Fault("query positions too large by one", "Qcur_rope", rope("Qcur", shift=1))
    yield Fault("key positions too small by one", "Kcur_rope", rope("Kcur", shift=-1))
    yield Fault("RoPE base 10000", "Qcur_rope", rope("Qcur", base=10000.0))
    yield Fault("RoPE turns the other way", "Kcur_rope", rope("Kcur", sign=-1))
    yield Fault("keys not rotated", "Kcur_rope", in_engine(Kcur_rope=lambda e, n: e.at("Kcur", n)))
    yield Fault(
        "RoPE restarts on a filled cache",
        "Qcur_rope",
        everywhere(Qcur_rope=lambda e, n: _restarted(e, n, "Qcur"), Kcur_rope=lambda e, n: _restarted(e, n, "Kcur")),
        0,
    )

    model = embedded_model()
    c, last = model.config, len(model.layers) - 1
    by_turn, reverse = np.arange(c.heads) % c.kv_heads, c.kv_heads - 1 - np.arange(c.heads) // (c.heads // c.kv_heads)
    yield Fault("no mask", "kqv_out", in_engine(kqv_out=lambda e, n: e.attend(n, allowed=lambda i, j: j + 0 * i >= 0)))
    yield Fault("mask off by one, sees the next", "kqv_out", in_engine(kqv_out=lambda e, n: e.attend(n, allowed=lambda i, j: j <= i + 1)))
    yield Fault(
        "mask off by one, blind to itself",
        "kqv_out",
        in_engine(kqv_out=lambda e, n: e.attend(n, allowed=lambda i, j: (j < i) | (i + j == 0))),
    )
    yield Fault(
        "window of 8 where there is none",
        "kqv_out",
        in_engine(kqv_out=lambda e, n: e.attend(n, allowed=lambda i, j: (j <= i) & (j > i - 8))),
    )
    yield Fault("KV heads dealt in turn", "kqv_out", in_engine(kqv_out=lambda e, n: e.attend(n, groups=by_turn)))
    yield Fault("KV heads in the opposite order", "kqv_out", in_engine(kqv_out=lambda e, n: e.attend(n, groups=reverse)))
    yield Fault("scores not scaled", "kqv_out", in_engine(kqv_out=lambda e, n: e.attend(n, scale=1.0)))
    yield Fault("scores divided by K", "kqv_out", in_engine(kqv_out=lambda e, n: e.attend(n, scale=1 / c.head_dim)))
    yield Fault("keys and values swapped", "kqv_out", in_engine(kqv_out=lambda e, n: e.attend(n, k="Vcur", v="Kcur_rope")))
    yield Fault("attention output [K, H] instead of [H, K]", "kqv_out", in_engine(kqv_out=lambda e, n: _transposed(e, n)))
    yield Fault("float16 roundings not declared", "kqv_out", lambda model, tokens: (Engine(model, tokens, halves=True).run(), tokens), 0)
    yield Fault("cache slot leaks another sequence", "kqv_out", _leaked, 0)
    yield Fault("last prompt token fed twice", "Qcur_rope", _double_fed, 0)

    def matrix(name: str, field_name: str, source_name: str, change: Callable[[Floats, Engine, int], Floats]) -> Callable:
        return in_engine(**{name: lambda e, n: change(e.linear(e.at(source_name, n), _weights(e, n, field_name)), e, n)})

    def scale_of(e: Engine, n: int, name: str) -> f32:
        return _weights(e, n, name).scale

    yield Fault("weight scale missing", "Vcur", matrix("Vcur", "attn_v", "attn_norm", lambda y, e, n: y / scale_of(e, n, "attn_v")))
    yield Fault("weight scale inverted", "Qcur", matrix("Qcur", "attn_q", "attn_norm", lambda y, e, n: y / scale_of(e, n, "attn_q") ** 2))
    yield Fault(
        "activation scale not divided out",
        "ffn_up",
        matrix("ffn_up", "ffn_up", "ffn_norm", lambda y, e, n: y * e.quantized(e.at("ffn_norm", n))[1]),
    )
    yield Fault("one activation scale per tensor", "ffn_up", in_engine(ffn_up=_per_tensor))
    yield Fault("activations not quantised", "ffn_gate", in_engine(ffn_gate=lambda e, n: _unquantized(e, n)))
    yield Fault("codes not shifted to -1..1", "Kcur", in_engine(Kcur=lambda e, n: _unshifted(e, n)))
    yield Fault("codes truncated, not rounded", "ffn_down", in_engine(ffn_down=truncated))
    yield Fault("I2_S read as 64/16", "Qcur", in_engine(Qcur=_relaid))
    yield Fault("one block's codes misread", "ffn_gate", in_engine(ffn_gate=lambda e, n: _misread(e, n, "ffn_gate", "ffn_norm")))
    yield Fault("weight transposed", "attn_o_out", in_engine(attn_o_out=lambda e, n: _transposed_weight(e, n)))
    yield Fault("sign of a matrix flipped", "ffn_down", matrix("ffn_down", "ffn_down", "ffn_sub_norm", lambda y, e, n: -y))
    yield Fault(
        "weights of the layer before",
        "attn_o_out",
        in_engine(attn_o_out=lambda e, n: e.linear(e.at("attn_sub_norm", n), _weights(e, n - 1, "attn_output"))),
    )
    yield Fault("scale off by 1e-4", "Vcur", matrix("Vcur", "attn_v", "attn_norm", lambda y, e, n: y * f32(1.0001)))
    yield Fault("a bias where there is none", "Qcur", matrix("Qcur", "attn_q", "attn_norm", lambda y, e, n: y + f32(0.01)))
    yield Fault(
        "gate and up swapped",
        "ffn_gate",
        in_engine(
            ffn_gate=lambda e, n: e.linear(e.at("ffn_norm", n), _weights(e, n, "ffn_up")),
            ffn_up=lambda e, n: e.linear(e.at("ffn_norm", n), _weights(e, n, "ffn_gate")),
        ),
    )
    yield Fault("SiLU for relu squared", "ffn_out", in_engine(ffn_out=lambda e, n: silu(e.at("ffn_gate", n)) * e.at("ffn_up", n)))
    yield Fault(
        "SiLU for relu squared, every layer", "ffn_out", everywhere(ffn_out=lambda e, n: silu(e.at("ffn_gate", n)) * e.at("ffn_up", n)), 0
    )
    yield Fault("relu not squared", "ffn_out", in_engine(ffn_out=lambda e, n: np.maximum(e.at("ffn_gate", n), 0) * e.at("ffn_up", n)))
    yield Fault("up not multiplied in", "ffn_out", in_engine(ffn_out=lambda e, n: np.maximum(e.at("ffn_gate", n), 0) ** 2))
    yield Fault("residual missing", "ffn_inp", in_engine(ffn_inp=lambda e, n: e.at("attn_o_out", n)))
    yield Fault("residual is the normed input", "l_out", in_engine(l_out=lambda e, n: e.at("ffn_norm", n) + e.at("ffn_down", n)))
    yield Fault(
        "last layer skipped",
        "l_out",
        lambda model, tokens: (Engine(model, tokens, {"l_out": lambda e, n: e.stream(n)}, (last,)).run(), tokens),
        last,
    )
    yield Fault("final norm skipped", "result_norm", everywhere(result_norm=lambda e, n: e.stream(len(e.model.layers))), None)
    yield Fault(
        "embedding scaled by sqrt(D)",
        "inp_embd",
        everywhere(inp_embd=lambda e, n: widen.float32(e.model.token_embd)[e.tokens] * f32(c.width**0.5)),
        None,
    )
    yield Fault(
        "token ids off by one",
        "inp_embd",
        everywhere(inp_embd=lambda e, n: widen.float32(e.model.token_embd)[(e.tokens + 1) % c.vocab]),
        None,
    )

    yield Fault("logits 10 times too large", "result_output", on_dump(_set(LOGITS, lambda x: 10 * x)), None)
    yield Fault(
        "logits stale: those of the token before", "result_output", on_dump(_set(LOGITS, lambda x: np.concatenate([x[:1], x[:-1]]))), None
    )
    yield Fault("logits permuted", "result_output", on_dump(_set(LOGITS, lambda x: np.roll(x, 7, axis=1))), None)
    yield Fault("one logit wrong", "result_output", on_dump(_set(LOGITS, lambda x: _one_wrong(x))), None)
    yield Fault("heads permuted in a dump", "kqv_out", on_dump(_set(Key("kqv_out", LAYER), lambda x: np.roll(x, c.head_dim, axis=1))))
    yield Fault("vocabulary cut short", "", on_dump(_set(LOGITS, lambda x: x[:, :-8])), None)
    yield Fault("NaN in one tensor", "", on_dump(_set(Key("ffn_out", LAYER), _with_nan)))
    yield Fault("all logits zero", "", on_dump(_set(LOGITS, np.zeros_like)), None)
    yield Fault("constant rows", "", on_dump(_set(Key("l_out", LAYER), np.ones_like)))
    yield Fault("every position the same", "", on_dump(_set(LOGITS, lambda x: np.repeat(x[-1:], len(x), axis=0))), None)
    yield Fault("positions missing", "", on_dump(_set(LOGITS, lambda x: x[:-1])), None)
    yield Fault("empty dump", "", on_dump(lambda dump: dump.clear()), None)
    yield Fault("integers for floats", "", on_dump(_set(LOGITS, lambda x: x.astype(np.int32))), None)


def _one_wrong(x: Floats) -> Floats:
    x = x.copy()
    x[len(x) // 2, 5] += f32(0.01)
    return x


def _transposed(e: Engine, n: int) -> Floats:
    c = e.model.config
    return e.attend(n).reshape(-1, c.heads, c.head_dim).transpose(0, 2, 1).reshape(len(e.tokens), -1)


def _transposed_weight(e: Engine, n: int) -> Floats:
    w = _weights(e, n, "attn_output")
    return e.linear(e.at("attn_sub_norm", n), w, packing.unpack(w).T)


def _unquantized(e: Engine, n: int) -> Floats:
    w = _weights(e, n, "ffn_gate")
    return e.at("ffn_norm", n) @ packing.unpack(w).T.astype(f32) * w.scale


def _unshifted(e: Engine, n: int) -> Floats:
    w = _weights(e, n, "attn_k")
    return e.linear(e.at("attn_norm", n), w, packing.unpack(w) + 1)


def embedded_model() -> Model:
    with embedded.model_path() as path:
        return load(path)


# --- honest runs ----------------------------------------------------------------------------------------------------------------------


def honest(model: Model, tokens: NDArray[np.int64]) -> Iterator[tuple[str, dict[Key, Floats], Dialect]]:
    """Dumps that are right, each made in another way, with the dialect they declare."""
    for halves, dialect in ((False, EXACT), (True, BITNET_CPP)):
        ways: dict[str, Callable[[Floats, Floats], Floats]] = {
            "float32 BLAS": lambda x, w: x @ w.T,
            "rounded once": precise,
            "one term at a time": accumulate(1),
            "sums of 8": accumulate(8),
        }
        for name, dot in ways.items():
            yield f"{dialect.name}, {name}", Engine(model, tokens, dot=dot, halves=halves).run(), dialect
        for chunk in (1, 5):
            yield f"{dialect.name}, kernels in chunks of {chunk}", _kernels(model, tokens, chunk, dialect), dialect


def _kernels(model: Model, tokens: NDArray[np.int64], chunk: int, dialect: Dialect) -> dict[Key, Floats]:
    pieces: dict[Key, list[Floats]] = {}
    cache = KVCache(model.config, 1, len(tokens))
    for i in range(0, len(tokens), chunk):
        record = lambda name, layer, array: pieces.setdefault(Key(name, layer), []).append(array.reshape(len(array), -1).copy())  # noqa: E731
        forward(model, tokens[None, i : i + chunk], cache, dialect=dialect, record=record)
    return {key: np.concatenate(value) for key, value in pieces.items() if not key.name.endswith(("_codes", "_scale"))}


# --- report ---------------------------------------------------------------------------------------------------------------------------


def judged(model: Model, dump: dict[Key, Floats], tokens: NDArray[np.int64], dialect: Dialect, only: tuple[str, ...] = ()) -> Report:
    points = {key: value for key, value in dump.items() if not only or key.name in only}
    return judge_trace(model, Trace(points=points, tokens=None, origin="dump"), tokens, dialect)


def row(fault: Fault, report: Report) -> dict[str, object]:
    found = report.verdict in (Verdict.WRONG, Verdict.INVALID)
    blamed = report.first_wrong
    if fault.blamed:
        right = (
            blamed is not None and report.verdict == Verdict.WRONG and (blamed.key.name, blamed.key.layer) == (fault.blamed, fault.layer)
        )
    else:
        right = report.verdict == Verdict.INVALID
    return {
        "fault": fault.name,
        "verdict": report.verdict.name,
        "blamed": blamed.place if blamed else "the dump",
        "says": (blamed.hypothesis or blamed.reason) if blamed else report.reason,
        "explained": blamed is None or blamed.hypothesis is not None or report.verdict == Verdict.INVALID,
        "found": found,
        "right": right,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="the whole table (default: the summary and what went wrong)")
    parser.add_argument("--honest", type=int, default=200, metavar="N", help="at least so many honest runs (default 200)")
    parser.add_argument("--only", default="", metavar="l_out,...", help="judge dumps that have these tensors only")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    quiet = not sys.stderr.isatty()
    model, tokens = embedded_model(), embedded.recording()["tokens_T17"].astype(np.int64)
    only = tuple(filter(None, arguments.only.split(",")))
    rows = []
    for fault in tqdm(list(faults()), desc="faults", disable=quiet):
        dump, ids = fault.make(model, tokens)
        rows.append(row(fault, judged(model, dump, ids, EXACT, only)))
    alarms, runs = [], 0
    with tqdm(total=arguments.honest, desc="honest runs", disable=quiet) as progress:
        for seed in range(1 + arguments.honest // 12):
            fresh = random_model(seed, table=("float32", "float16", "bfloat16")[seed % 3], tied=seed % 2 == 0)
            ids = np.random.default_rng(seed).integers(0, fresh.config.vocab, 3 + 2 * seed)
            for name, dump, dialect in honest(fresh, ids):
                report = judged(fresh, dump, ids, dialect, only)
                runs += 1
                progress.update()
                if report.verdict > Verdict.FLIPS:
                    alarms.append(f"seed {seed}, {name}: {report.reason}")
    found, right = sum(bool(r["found"]) for r in rows), sum(bool(r["right"]) for r in rows)
    recognised = sum(bool(r["explained"]) for r in rows)
    if arguments.json:
        print(json.dumps({"faults": rows, "honest_runs": runs, "false_alarms": alarms}, indent=2))
    else:
        shown = rows if arguments.report else [r for r in rows if not (r["found"] and r["right"])]
        if shown:
            print("| fault | verdict | blamed | it says |\n|---|---|---|---|")
        for r in shown:
            mark = "" if r["right"] else " (WRONG PLACE)" if r["found"] else " (MISSED)"
            print(f"| {r['fault']} | {r['verdict']} | {r['blamed']}{mark} | {r['says']} |")
        print(f"\n{len(rows)} faults: {found} found, {right} blamed at the right operation and layer, {recognised} explained")
        print(f"{runs} honest runs: {len(alarms)} false alarms", *alarms, sep="\n")
    return 0 if found == len(rows) and not alarms else 1


if __name__ == "__main__":
    raise SystemExit(main())
