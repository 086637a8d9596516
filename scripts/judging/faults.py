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
from bitnet_np.traces.points import Key

from .engine import Engine, Floats, embedded_model, f32

LAYER = 1  # the layer of faults in a single layer


@dataclass(frozen=True)
class Fault:
    """One bug, and the place where a judge should see it first."""

    name: str
    blamed: str  # the tensor; "" if the dump as a whole must be refused
    make: Callable[..., tuple[dict[Key, Floats], NDArray[np.int64]]]  # model, tokens [T], fields of the Engine -> its dump, its tokens
    layer: int | None = LAYER
    mistake: str = ""  # the id of the cause that a judge should name; "" if there is nothing to explain


def in_engine(**faults: Callable[[Engine, int], Floats]) -> Callable:
    """A fault that replaces steps of layer LAYER."""
    return lambda model, tokens, **kind: (Engine(model, tokens, faults, (LAYER,), **kind).run(), tokens)


def everywhere(**faults: Callable[[Engine, int], Floats]) -> Callable:
    """A fault that replaces steps of every layer."""
    return lambda model, tokens, **kind: (Engine(model, tokens, faults, **kind).run(), tokens)


def on_dump(change: Callable[[dict[Key, Floats]], object]) -> Callable:
    """A fault that changes the dump of an honest engine."""

    def make(model: Model, tokens: NDArray[np.int64], **kind: Any) -> tuple[dict[Key, Floats], NDArray[np.int64]]:
        engine = Engine(model, tokens, **kind)
        dump = engine.run()
        change(dump)
        return {key: engine.kept(x) if x.dtype == f32 else x for key, x in dump.items()}, tokens

    return make


def _weights(e: Engine, n: int, name: str) -> Ternary:
    return getattr(e.model.layers[n], name).weights


def _misread(e: Engine, n: int) -> Floats:
    """A product with one block of 128 codes read from the next row."""
    matrix = packing.unpack(_weights(e, n, "ffn_gate"))
    matrix[3, :128] = matrix[4, :128]
    return e.linear(e.at("ffn_norm", n), _weights(e, n, "ffn_gate"), matrix)


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


def _leaked(model: Model, tokens: NDArray[np.int64], **kind: Any) -> tuple[dict[Key, Floats], NDArray[np.int64]]:
    other = Engine(model, tokens[::-1][:5].copy(), **kind).run()
    leak: Callable[[Engine, int], Floats] = lambda e, n: e.attend(n, extra=(other[Key("Kcur_rope", n)], other[Key("Vcur", n)]))  # noqa: E731
    return Engine(model, tokens, {"kqv_out": leak}, **kind).run(), tokens


def _double_fed(model: Model, tokens: NDArray[np.int64], **kind: Any) -> tuple[dict[Key, Floats], NDArray[np.int64]]:
    dump = Engine(model, np.append(tokens, tokens[-1]), **kind).run()
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
Step = Callable[[Engine, int], Floats]


def one(name: str, mistake: str, **steps: Step) -> Fault:
    """A fault in steps of layer LAYER, the first of which is blamed."""
    return Fault(name, next(iter(steps)), in_engine(**steps), mistake=mistake)


def all_layers(name: str, mistake: str, layer: int | None, **steps: Step) -> Fault:
    """A fault in steps of every layer, the first of which is blamed in this layer."""
    return Fault(name, next(iter(steps)), everywhere(**steps), layer, mistake)


def faults() -> Iterator[Fault]:
    """All faults."""
    for group in (_norm_faults, _rope_faults, _attention_faults, _matrix_faults, _gate_faults, _layer_faults, _dump_faults):
        yield from group()


def _norm_faults() -> Iterator[Fault]:
    before = {"attn_sub_norm": "kqv_out", "ffn_norm": "ffn_inp", "ffn_sub_norm": "ffn_out"}

    def norm(name: str, gain: str | None, *options: Any, **more: Any) -> Step:
        """The norm of this name with the weight of another, or with none."""

        def step(e: Engine, n: int) -> Floats:
            x = e.at(before[name], n) if name in before else e.stream(n)
            return e.norm(x, np.ones(1, f32) if gain is None else getattr(e.model.layers[n], gain), *options, **more)

        return step

    yield one("attn_sub_norm missing", "norm.missing", attn_sub_norm=lambda e, n: e.at("kqv_out", n))
    yield one("ffn_sub_norm missing", "norm.missing", ffn_sub_norm=lambda e, n: e.at("ffn_out", n))
    yield one("attn_norm without its weight", "norm.weight_missing", attn_norm=norm("attn_norm", None))
    yield one("ffn_norm is a LayerNorm", "norm.mean_subtracted", ffn_norm=norm("ffn_norm", "ffn_norm", centre=True))
    yield one("epsilon 1e-3 in ffn_norm", "norm.epsilon", ffn_norm=norm("ffn_norm", "ffn_norm", 1e-3))
    yield one("epsilon 1e-6 in attn_norm", "norm.epsilon", attn_norm=norm("attn_norm", "attn_norm", 1e-6))
    yield one("attn_norm with ffn_norm's weight", "norm.other_weight", attn_norm=norm("attn_norm", "ffn_norm"))


def _rope_faults() -> Iterator[Fault]:
    def rope(name: str, source: str, mistake: str, shift: int = 0, **options: Any) -> Fault:
        return one(name, mistake, **{source + "_rope": lambda e, n: e.rope(e.at(source, n), np.arange(len(e.tokens)) + shift, **options)})

    yield rope("RoPE pairs interleaved (queries)", "Qcur", "rope.pairs", pairs="interleaved")
    yield rope("RoPE pairs interleaved (keys)", "Kcur", "rope.pairs", pairs="interleaved")
    yield rope("query positions too large by one", "Qcur", "rope.positions", shift=1)
    yield rope("key positions too small by one", "Kcur", "rope.positions", shift=-1)
    yield rope("RoPE base 10000", "Qcur", "rope.base", base=10000.0)
    yield rope("RoPE turns the other way", "Kcur", "rope.backwards", sign=-1)
    yield one("keys not rotated", "rope.missing", Kcur_rope=lambda e, n: e.at("Kcur", n))
    restarted = {f"{name}cur_rope": partial(_restarted, name=f"{name}cur") for name in "QK"}
    yield all_layers("RoPE restarts on a filled cache", "edit.positions", 0, **restarted)


def _attention_faults() -> Iterator[Fault]:
    c = embedded_model().config
    by_turn, reverse = np.arange(c.heads) % c.kv_heads, c.kv_heads - 1 - np.arange(c.heads) // (c.heads // c.kv_heads)

    def attend(name: str, mistake: str, **options: Any) -> Fault:
        return one(name, mistake, kqv_out=lambda e, n: e.attend(n, **options))

    yield attend("no mask", "attention.mask", allowed=lambda i, j: j + 0 * i >= 0)
    yield attend("mask off by one, sees the next", "attention.mask", allowed=lambda i, j: j <= i + 1)
    yield attend("mask off by one, blind to itself", "attention.mask", allowed=lambda i, j: (j < i) | (i + j == 0))
    yield attend("window of 8 where there is none", "attention.last_only", allowed=lambda i, j: (j <= i) & (j > i - 8))
    yield attend("KV heads dealt in turn", "attention.heads_in_turn", groups=by_turn)
    yield attend("KV heads in the opposite order", "attention.groups", groups=reverse)
    yield attend("scores not scaled", "attention.unscaled", scale=1.0)
    yield attend("scores divided by K", "attention.divided_by_width", scale=1 / c.head_dim)
    yield attend("keys and values swapped", "attention.keys_values_swapped", k="Vcur", v="Kcur_rope")
    yield one("attention output [K, H] instead of [H, K]", "attention.transposed", kqv_out=_transposed)
    yield Fault(
        "float16 roundings not declared",
        "kqv_out",
        lambda model, tokens, **kind: (Engine(model, tokens, in_float16=True, **kind).run(), tokens),
        0,
        mistake="dialect.float16",
    )
    yield Fault("cache slot leaks another sequence", "kqv_out", _leaked, 0, mistake="read.values")
    yield Fault("last prompt token fed twice", "Qcur_rope", _double_fed, 0, mistake="rope.fed_twice")


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


def _matrix_faults() -> Iterator[Fault]:
    def changed(name: str, tensor: str, mistake: str, change: Callable[[Floats, f32, Floats], Floats]) -> Fault:
        """A fault that changes a product, given the scale of its matrix and those of its activations."""
        matrix, source = _MATRICES[tensor]

        def step(e: Engine, n: int) -> Floats:
            weights, x = _weights(e, n, matrix), e.at(source, n)
            return change(e.linear(x, weights), weights.scale, e.quantized(x)[1])

        return one(name, mistake, **{tensor: step})

    def other(e: Engine, n: int) -> Floats:
        return e.linear(e.at("attn_sub_norm", n), _weights(e, n - 1, "attn_output"))

    yield changed("weight scale missing", "Vcur", "scale.missing", lambda y, scale, _: y / scale)
    yield changed("weight scale inverted", "Qcur", "scale.inverted", lambda y, scale, _: y / scale**2)
    yield changed("activation scale not divided out", "ffn_up", "edit.steps", lambda y, _, scales: y * scales)
    yield one("one activation scale per tensor", "quantiser.per_tensor", ffn_up=_per_tensor)
    yield one("activations not quantised", "quantiser.none", ffn_gate=_unquantized)
    yield one("codes not shifted to -1..1", "codes.unshifted", Kcur=_unshifted)
    yield one("codes truncated, not rounded", "quantiser.truncated", ffn_down=truncated)
    yield one("I2_S read as 64/16", "codes.layout", Qcur=_relaid)
    yield one("one block's codes misread", "", ffn_gate=_misread)  # which is placed, and not explained
    yield one("weight transposed", "weights.transposed", attn_o_out=_transposed_weight)
    yield changed("sign of a matrix flipped", "ffn_down", "any.sign", lambda y, *_: -y)
    yield one("weights of the layer before", "weights.others", attn_o_out=other)
    yield changed("scale off by 1e-4", "Vcur", "any.factor", lambda y, *_: y * f32(1.0001))
    yield changed("a bias where there is none", "Qcur", "edit.values", lambda y, *_: y + f32(0.01))


def _gate_faults() -> Iterator[Fault]:
    def of(matrix: str) -> Step:
        return lambda e, n: e.linear(e.at("ffn_norm", n), _weights(e, n, matrix))

    def gated(activation: Callable[[Floats], Floats]) -> Step:
        return lambda e, n: activation(e.at("ffn_gate", n)) * e.at("ffn_up", n)

    yield one("gate and up swapped", "weights.others", ffn_gate=of("ffn_up"), ffn_up=of("ffn_gate"))
    yield one("SiLU for relu squared", "activation.other", ffn_out=gated(silu))
    yield all_layers("SiLU for relu squared, every layer", "activation.other", 0, ffn_out=gated(silu))
    yield one("relu not squared", "activation.other", ffn_out=gated(lambda x: np.maximum(x, 0)))
    yield one("up not multiplied in", "edit.steps", ffn_out=lambda e, n: np.maximum(e.at("ffn_gate", n), 0) ** 2)


def _layer_faults() -> Iterator[Fault]:
    model = embedded_model()
    c, last = model.config, len(model.layers) - 1

    def embedded(e: Engine, tokens: NDArray[np.int64]) -> Floats:
        return widen.float32(e.model.token_embd)[tokens]

    yield one("residual missing", "residual.missing", ffn_inp=lambda e, n: e.at("attn_o_out", n))
    yield one("residual is the normed input", "residual.normed", l_out=lambda e, n: e.at("ffn_norm", n) + e.at("ffn_down", n))
    yield Fault(
        "last layer skipped",
        "l_out",
        lambda model, tokens, **kind: (Engine(model, tokens, {"l_out": lambda e, n: e.stream(n)}, (last,), **kind).run(), tokens),
        last,
        mistake="layers.skipped",
    )
    yield all_layers("final norm skipped", "norm.missing", None, result_norm=lambda e, n: e.stream(len(e.model.layers)))
    scaled: Step = lambda e, n: embedded(e, e.tokens) * f32(c.width**0.5)  # noqa: E731
    yield all_layers("embedding scaled by sqrt(D)", "embedding.scaled", None, inp_embd=scaled)
    yield all_layers("token ids off by one", "tokens.plus_1", None, inp_embd=lambda e, n: embedded(e, (e.tokens + 1) % c.vocab))


def _dump_faults() -> Iterator[Fault]:
    c = embedded_model().config

    def logits(name: str, mistake: str, change: Callable[[Floats], Floats]) -> Fault:
        return Fault(name, "result_output" if mistake else "", on_dump(_set(LOGITS, change)), None, mistake)

    yield logits("logits 10 times too large", "any.factor", lambda x: 10 * x)
    yield logits("logits stale: those of the token before", "any.moved", lambda x: np.concatenate([x[:1], x[:-1]]))
    yield logits("logits permuted", "read.other_rows", lambda x: np.roll(x, 7, axis=1))
    yield logits("one logit wrong", "read.one_number", _one_wrong)
    rolled = on_dump(_set(Key("kqv_out", LAYER), lambda x: np.roll(x, c.head_dim, axis=1)))
    yield Fault("heads permuted in a dump", "kqv_out", rolled, mistake="edit.order")
    yield logits("vocabulary cut short", "", lambda x: x[:, :-8])
    yield Fault("NaN in one tensor", "", on_dump(_set(Key("ffn_out", LAYER), _with_nan)))
    yield logits("all logits zero", "", np.zeros_like)
    yield Fault("constant rows", "", on_dump(_set(Key("l_out", LAYER), np.ones_like)))
    yield logits("every position the same", "", lambda x: np.repeat(x[-1:], len(x), axis=0))
    yield logits("positions missing", "", lambda x: x[:-1])
    yield Fault("empty dump", "", on_dump(lambda dump: dump.clear()), None)
    yield logits("integers for floats", "", lambda x: x.astype(np.int32))


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
