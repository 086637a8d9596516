"""Realistic bugs, each put alone into the engine or into the dump that it writes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np import Model
from bitnet_np.model import packing, widen
from bitnet_np.model.records import Ternary
from bitnet_np.traces.points import MODEL_NAMES, Key

from .engine import Engine, Floats, embedded_model, f32

LAYER = 1  # the layer of faults in a single layer
LOGITS = Key("result_output", None)
Step = Callable[[Engine, int], Floats]
Dump = dict[Key, Floats]


@dataclass(frozen=True)
class Fault:
    """One bug, and the place where a judge should see it first."""

    name: str
    blamed: str  # the tensor; "" if the dump as a whole must be refused
    make: Callable[..., tuple[Dump, NDArray[np.int64]]]  # model, tokens [T], fields of the Engine -> its dump, its tokens
    layer: int | None = LAYER
    mistake: str = ""  # the id of the cause that a judge should name; "" if there is nothing to explain


def in_engine(
    name: str, mistake: str, layers: tuple[int, ...] | None = (LAYER,), engine: type[Engine] = Engine, /, **steps: Callable[..., Floats]
) -> Fault:
    """A fault that replaces steps of some layers, or of all; the first step is blamed, in the first of the layers."""
    blamed, layer = next(iter(steps)), 0 if layers is None else layers[0]
    make = lambda model, tokens, **kind: (engine(model, tokens, steps, layers, **kind).run(), tokens)  # noqa: E731
    return Fault(name, blamed, make, None if blamed in MODEL_NAMES else layer, mistake)


def in_dump(name: str, mistake: str, key: Key, change: Callable[[Floats], Floats]) -> Fault:
    """A fault that changes a tensor of an honest engine's dump."""

    def make(model: Model, tokens: NDArray[np.int64], **kind: Any) -> tuple[Dump, NDArray[np.int64]]:
        engine = Engine(model, tokens, **kind)
        dump = engine.run()
        dump[key] = np.ascontiguousarray(change(dump[key]))
        return {key: engine.kept(x) if x.dtype == f32 else x for key, x in dump.items()}, tokens

    return Fault(name, key.name if mistake else "", make, key.layer, mistake)


def faults() -> Iterator[Fault]:
    """All faults."""
    for group in (_norm_faults, _rope_faults, _attention_faults, _matrix_faults, _gate_faults, _layer_faults, _dump_faults):
        yield from group()


def _norm_faults() -> Iterator[Fault]:
    before = {"attn_sub_norm": "kqv_out", "ffn_norm": "ffn_inp", "ffn_sub_norm": "ffn_out"}

    def norm(what: str, mistake: str, name: str, gain: str | None, *options: Any, **more: Any) -> Fault:
        """The norm of this name with the weight of another, or with none."""

        def step(e: Engine, n: int) -> Floats:
            x = e.at(before[name], n) if name in before else e.stream(n)
            return e.norm(x, np.ones(1, f32) if gain is None else getattr(e.model.layers[n], gain), *options, **more)

        return in_engine(what, mistake, **{name: step})

    yield in_engine("attn_sub_norm missing", "norm.missing", attn_sub_norm=lambda e, n: e.at("kqv_out", n))
    yield in_engine("ffn_sub_norm missing", "norm.missing", ffn_sub_norm=lambda e, n: e.at("ffn_out", n))
    yield norm("attn_norm without its weight", "norm.weight_missing", "attn_norm", None)
    yield norm("ffn_norm is a LayerNorm", "norm.mean_subtracted", "ffn_norm", "ffn_norm", centre=True)
    yield norm("epsilon 1e-3 in ffn_norm", "norm.epsilon", "ffn_norm", "ffn_norm", 1e-3)
    yield norm("epsilon 1e-6 in attn_norm", "norm.epsilon", "attn_norm", "attn_norm", 1e-6)
    yield norm("attn_norm with ffn_norm's weight", "norm.other_weight", "attn_norm", "ffn_norm")


def _rope_faults() -> Iterator[Fault]:
    def rope(what: str, source: str, mistake: str, shift: int = 0, **options: Any) -> Fault:
        step: Step = lambda e, n: e.rope(e.at(source, n), np.arange(len(e.tokens)) + shift, **options)  # noqa: E731
        return in_engine(what, mistake, **{source + "_rope": step})

    def restarted(e: Engine, n: int, name: str) -> Floats:
        return e.rope(e.at(name, n), np.arange(len(e.tokens)) % (len(e.tokens) // 2 + 1))

    yield rope("RoPE pairs interleaved (queries)", "Qcur", "rope.pairs", pairs="interleaved")
    yield rope("RoPE pairs interleaved (keys)", "Kcur", "rope.pairs", pairs="interleaved")
    yield rope("query positions too large by one", "Qcur", "rope.positions", shift=1)
    yield rope("key positions too small by one", "Kcur", "rope.positions", shift=-1)
    yield rope("RoPE base 10000", "Qcur", "rope.base", base=10000.0)
    yield rope("RoPE turns the other way", "Kcur", "rope.backwards", sign=-1)
    yield in_engine("keys not rotated", "rope.missing", Kcur_rope=lambda e, n: e.at("Kcur", n))
    steps = {f"{name}_rope": partial(restarted, name=name) for name in ("Qcur", "Kcur")}
    yield in_engine("RoPE restarts on a filled cache", "edit.positions", None, **steps)


def _attention_faults() -> Iterator[Fault]:
    c = embedded_model().config
    by_turn, reverse = np.arange(c.heads) % c.kv_heads, c.kv_heads - 1 - np.arange(c.heads) // (c.heads // c.kv_heads)

    def attend(what: str, mistake: str, **options: Any) -> Fault:
        return in_engine(what, mistake, kqv_out=lambda e, n: e.attend(n, **options))

    def transposed(e: Engine, n: int) -> Floats:
        return e.attend(n).reshape(-1, c.heads, c.head_dim).transpose(0, 2, 1).reshape(len(e.tokens), -1)

    def leaked(model: Model, tokens: NDArray[np.int64], **kind: Any) -> tuple[Dump, NDArray[np.int64]]:
        other = Engine(model, tokens[::-1][:5].copy(), **kind).run()
        leak: Step = lambda e, n: e.attend(n, extra=(other[Key("Kcur_rope", n)], other[Key("Vcur", n)]))  # noqa: E731
        return Engine(model, tokens, {"kqv_out": leak}, **kind).run(), tokens

    def double_fed(model: Model, tokens: NDArray[np.int64], **kind: Any) -> tuple[Dump, NDArray[np.int64]]:
        dump = Engine(model, np.append(tokens, tokens[-1]), **kind).run()
        return {key: np.delete(value, len(tokens) - 1, axis=0) for key, value in dump.items()}, tokens

    yield attend("no mask", "attention.mask", allowed=lambda i, j: j + 0 * i >= 0)
    yield attend("mask off by one, sees the next", "attention.mask", allowed=lambda i, j: j <= i + 1)
    yield attend("mask off by one, blind to itself", "attention.mask", allowed=lambda i, j: (j < i) | (i + j == 0))
    yield attend("window of 8 where there is none", "attention.last_only", allowed=lambda i, j: (j <= i) & (j > i - 8))
    yield attend("KV heads dealt in turn", "attention.heads_in_turn", groups=by_turn)
    yield attend("KV heads in the opposite order", "attention.groups", groups=reverse)
    yield attend("scores not scaled", "attention.unscaled", scale=1.0)
    yield attend("scores divided by K", "attention.divided_by_width", scale=1 / c.head_dim)
    yield attend("keys and values swapped", "attention.keys_values_swapped", k="Vcur", v="Kcur_rope")
    yield in_engine("attention output [K, H] instead of [H, K]", "attention.transposed", kqv_out=transposed)
    halves = lambda model, tokens, **kind: (Engine(model, tokens, in_float16=True, **kind).run(), tokens)  # noqa: E731
    yield Fault("float16 roundings not declared", "kqv_out", halves, 0, "dialect.float16")
    yield Fault("cache slot leaks another sequence", "kqv_out", leaked, 0, "read.values")
    yield Fault("last prompt token fed twice", "Qcur_rope", double_fed, 0, "rope.fed_twice")


_MATRICES = {
    "Qcur": ("attn_q", "attn_norm"),
    "Kcur": ("attn_k", "attn_norm"),
    "Vcur": ("attn_v", "attn_norm"),
    "attn_o_out": ("attn_output", "attn_sub_norm"),
    "ffn_gate": ("ffn_gate", "ffn_norm"),
    "ffn_up": ("ffn_up", "ffn_norm"),
    "ffn_down": ("ffn_down", "ffn_sub_norm"),
}
"""Product -> its matrix, and its input."""


def _read(e: Engine, n: int, tensor: str) -> tuple[Ternary, Floats]:
    """The matrix of a product, and its input."""
    name, source = _MATRICES[tensor]
    return getattr(e.model.layers[n], name).weights, e.at(source, n)


def truncated(e: Engine, n: int) -> Floats:
    w, x = _read(e, n, "ffn_down")
    _, scale = e.quantized(x)
    return (np.trunc(x * scale) @ packing.unpack(w).T.astype(f32)) / scale * w.scale


def _matrix_faults() -> Iterator[Fault]:
    def changed(what: str, tensor: str, mistake: str, change: Callable[[Floats, f32, Floats], Floats]) -> Fault:
        """A fault that changes a product, given the scale of its matrix and those of its activations."""

        def step(e: Engine, n: int) -> Floats:
            w, x = _read(e, n, tensor)
            return change(e.linear(x, w), w.scale, e.quantized(x)[1])

        return in_engine(what, mistake, **{tensor: step})

    def misread(what: str, tensor: str, mistake: str, matrix: Callable[[Ternary], NDArray]) -> Fault:
        """A fault that reads other weights -1, 0, 1."""

        def step(e: Engine, n: int) -> Floats:
            w, x = _read(e, n, tensor)
            return e.linear(x, w, matrix(w))

        return in_engine(what, mistake, **{tensor: step})

    def per_tensor(e: Engine, n: int) -> Floats:
        w, x = _read(e, n, "ffn_up")
        scale = f32(127) / np.abs(x).max()
        return (np.rint(x * scale) @ packing.unpack(w).T.astype(f32)) / scale * w.scale

    def unquantized(e: Engine, n: int) -> Floats:
        w, x = _read(e, n, "ffn_gate")
        return x @ packing.unpack(w).T.astype(f32) * w.scale

    def relaid(w: Ternary) -> NDArray:
        codes = packing.to_i2s(w)[: -packing.TRAILER].reshape(-1, 1, 16)
        return (codes >> np.array([6, 4, 2, 0], np.uint8)[:, None] & 3).reshape(w.shape).astype(np.int8) - 1

    def of_next_row(w: Ternary) -> NDArray:
        matrix = packing.unpack(w)
        matrix[3, :128] = matrix[4, :128]
        return matrix

    other: Step = lambda e, n: e.linear(_read(e, n, "attn_o_out")[1], _read(e, n - 1, "attn_o_out")[0])  # noqa: E731
    yield changed("weight scale missing", "Vcur", "scale.missing", lambda y, scale, _: y / scale)
    yield changed("weight scale inverted", "Qcur", "scale.inverted", lambda y, scale, _: y / scale**2)
    yield changed("activation scale not divided out", "ffn_up", "edit.steps", lambda y, _, scales: y * scales)
    yield in_engine("one activation scale per tensor", "quantiser.per_tensor", ffn_up=per_tensor)
    yield in_engine("activations not quantised", "quantiser.none", ffn_gate=unquantized)
    yield misread("codes not shifted to -1..1", "Kcur", "codes.unshifted", lambda w: packing.unpack(w) + 1)
    yield in_engine("codes truncated, not rounded", "quantiser.truncated", ffn_down=truncated)
    yield misread("I2_S read as 64/16", "Qcur", "codes.layout", relaid)
    yield misread("one block's codes misread", "ffn_gate", "", of_next_row)  # which is no known mistake
    yield misread("weight transposed", "attn_o_out", "weights.transposed", lambda w: packing.unpack(w).T)
    yield changed("sign of a matrix flipped", "ffn_down", "any.sign", lambda y, *_: -y)
    yield in_engine("weights of the layer before", "weights.others", attn_o_out=other)
    yield changed("scale off by 1e-4", "Vcur", "any.factor", lambda y, *_: y * f32(1.0001))
    yield changed("a bias where there is none", "Qcur", "edit.values", lambda y, *_: y + f32(0.01))


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def _gate_faults() -> Iterator[Fault]:
    def of(tensor: str) -> Step:
        return lambda e, n: e.linear(*_read(e, n, tensor)[::-1])

    def gated(activation: Callable[[Floats], Floats]) -> Step:
        return lambda e, n: activation(e.at("ffn_gate", n)) * e.at("ffn_up", n)

    yield in_engine("gate and up swapped", "weights.others", ffn_gate=of("ffn_up"), ffn_up=of("ffn_gate"))
    yield in_engine("SiLU for relu squared", "activation.other", ffn_out=gated(silu))
    yield in_engine("SiLU for relu squared, every layer", "activation.other", None, ffn_out=gated(silu))
    yield in_engine("relu not squared", "activation.other", ffn_out=gated(lambda x: np.maximum(x, 0)))
    yield in_engine("up not multiplied in", "edit.steps", ffn_out=lambda e, n: np.maximum(e.at("ffn_gate", n), 0) ** 2)


def _layer_faults() -> Iterator[Fault]:
    model = embedded_model()
    c, last = model.config, len(model.layers) - 1

    def embedded(e: Engine, tokens: NDArray[np.int64]) -> Floats:
        return widen.float32(e.model.token_embd)[tokens]

    yield in_engine("residual missing", "residual.missing", ffn_inp=lambda e, n: e.at("attn_o_out", n))
    yield in_engine("residual is the normed input", "residual.normed", l_out=lambda e, n: e.at("ffn_norm", n) + e.at("ffn_down", n))
    yield in_engine("last layer skipped", "layers.skipped", (last,), l_out=lambda e, n: e.stream(n))
    yield in_engine("final norm skipped", "norm.missing", None, result_norm=lambda e, n: e.stream(len(e.model.layers)))
    scaled: Step = lambda e, n: embedded(e, e.tokens) * f32(c.width**0.5)  # noqa: E731
    yield in_engine("embedding scaled by sqrt(D)", "embedding.scaled", None, inp_embd=scaled)
    yield in_engine("token ids off by one", "tokens.plus_1", None, inp_embd=lambda e, n: embedded(e, (e.tokens + 1) % c.vocab))


def _dump_faults() -> Iterator[Fault]:
    c = embedded_model().config

    def logits(what: str, mistake: str, change: Callable[[Floats], Floats]) -> Fault:
        return in_dump(what, mistake, LOGITS, change)

    def one_wrong(x: Floats) -> Floats:
        x = x.copy()
        x[len(x) // 2, 5] += f32(0.01)
        return x

    def with_nan(x: Floats) -> Floats:
        x = x.copy()
        x[len(x) // 2, 3] = np.nan
        return x

    yield logits("logits 10 times too large", "any.factor", lambda x: 10 * x)
    yield logits("logits stale: those of the token before", "any.moved", lambda x: np.concatenate([x[:1], x[:-1]]))
    yield logits("logits permuted", "read.other_rows", lambda x: np.roll(x, 7, axis=1))
    yield logits("one logit wrong", "read.one_number", one_wrong)
    yield in_dump("heads permuted in a dump", "edit.order", Key("kqv_out", LAYER), lambda x: np.roll(x, c.head_dim, axis=1))
    yield logits("vocabulary cut short", "", lambda x: x[:, :-8])
    yield in_dump("NaN in one tensor", "", Key("ffn_out", LAYER), with_nan)
    yield logits("all logits zero", "", np.zeros_like)
    yield in_dump("constant rows", "", Key("l_out", LAYER), np.ones_like)
    yield logits("every position the same", "", lambda x: np.repeat(x[-1:], len(x), axis=0))
    yield logits("positions missing", "", lambda x: x[:-1])
    yield Fault("empty dump", "", lambda model, tokens, **kind: ({}, tokens), None)
    yield logits("integers for floats", "", lambda x: x.astype(np.int32))
