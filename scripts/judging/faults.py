"""Realistic bugs, each put alone into the engine or into the dump that it writes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np import Model, packing, widen
from bitnet_np.model import Ternary
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


def _misread(e: Engine, n: int, name: str, source: str) -> Floats:
    """A product with one block of 128 codes read from the next row."""
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


def faults() -> Iterator[Fault]:
    """All faults."""
    for group in (_norm_faults, _rope_faults, _attention_faults, _matrix_faults, _gate_faults, _layer_faults, _dump_faults):
        yield from group()


def _norm_faults() -> Iterator[Fault]:
    norms = {"attn_norm": None, "attn_sub_norm": "kqv_out", "ffn_norm": "ffn_inp", "ffn_sub_norm": "ffn_out"}

    def source(e: Engine, n: int, norm: str) -> Floats:
        before = norms[norm]
        return e.stream(n) if before is None else e.at(before, n)

    def gain(e: Engine, n: int, norm: str) -> Floats:
        return getattr(e.model.layers[n], norm)

    for norm in ("attn_sub_norm", "ffn_sub_norm"):
        yield Fault(f"{norm} missing", norm, in_engine(**{norm: lambda e, n, x=norm: source(e, n, x)}), mistake="norm.missing")
    yield Fault(
        "attn_norm without its weight",
        "attn_norm",
        in_engine(attn_norm=lambda e, n: e.norm(e.stream(n), np.ones(1, f32))),
        mistake="norm.weight_missing",
    )
    yield Fault(
        "ffn_norm is a LayerNorm",
        "ffn_norm",
        in_engine(ffn_norm=lambda e, n: e.norm(e.at("ffn_inp", n), gain(e, n, "ffn_norm"), centre=True)),
        mistake="norm.mean_subtracted",
    )
    yield Fault(
        "epsilon 1e-3 in ffn_norm",
        "ffn_norm",
        in_engine(ffn_norm=lambda e, n: e.norm(e.at("ffn_inp", n), gain(e, n, "ffn_norm"), 1e-3)),
        mistake="norm.epsilon",
    )
    yield Fault(
        "epsilon 1e-6 in attn_norm",
        "attn_norm",
        in_engine(attn_norm=lambda e, n: e.norm(e.stream(n), gain(e, n, "attn_norm"), 1e-6)),
        mistake="norm.epsilon",
    )
    yield Fault(
        "attn_norm with ffn_norm's weight",
        "attn_norm",
        in_engine(attn_norm=lambda e, n: e.norm(e.stream(n), gain(e, n, "ffn_norm"))),
        mistake="norm.other_norm",
    )


def _rope_faults() -> Iterator[Fault]:
    def rope(name: str, **options: object) -> Callable:
        def fault(e: Engine, n: int) -> Floats:
            position = np.arange(len(e.tokens)) + options.get("shift", 0)  # type: ignore[operator]
            rest = {k: v for k, v in options.items() if k != "shift"}
            return e.rope(e.at(name, n), position, **rest)  # type: ignore[arg-type]

        return in_engine(**{name + "_rope": fault})

    yield Fault("RoPE pairs interleaved (queries)", "Qcur_rope", rope("Qcur", pairs="interleaved"), mistake="rope.pairs")
    yield Fault("RoPE pairs interleaved (keys)", "Kcur_rope", rope("Kcur", pairs="interleaved"), mistake="rope.pairs")
    yield Fault("query positions too large by one", "Qcur_rope", rope("Qcur", shift=1), mistake="rope.position_plus_1")
    yield Fault("key positions too small by one", "Kcur_rope", rope("Kcur", shift=-1), mistake="rope.position_minus_1")
    yield Fault("RoPE base 10000", "Qcur_rope", rope("Qcur", base=10000.0), mistake="rope.base")
    yield Fault("RoPE turns the other way", "Kcur_rope", rope("Kcur", sign=-1), mistake="rope.backwards")
    yield Fault("keys not rotated", "Kcur_rope", in_engine(Kcur_rope=lambda e, n: e.at("Kcur", n)), mistake="rope.missing")
    yield Fault(
        "RoPE restarts on a filled cache",
        "Qcur_rope",
        everywhere(Qcur_rope=lambda e, n: _restarted(e, n, "Qcur"), Kcur_rope=lambda e, n: _restarted(e, n, "Kcur")),
        0,
        mistake="read.rotation",
    )


def _attention_faults() -> Iterator[Fault]:
    c = embedded_model().config
    by_turn, reverse = np.arange(c.heads) % c.kv_heads, c.kv_heads - 1 - np.arange(c.heads) // (c.heads // c.kv_heads)
    yield Fault(
        "no mask", "kqv_out", in_engine(kqv_out=lambda e, n: e.attend(n, allowed=lambda i, j: j + 0 * i >= 0)), mistake="attention.no_mask"
    )
    yield Fault(
        "mask off by one, sees the next",
        "kqv_out",
        in_engine(kqv_out=lambda e, n: e.attend(n, allowed=lambda i, j: j <= i + 1)),
        mistake="attention.sees_next",
    )
    yield Fault(
        "mask off by one, blind to itself",
        "kqv_out",
        in_engine(kqv_out=lambda e, n: e.attend(n, allowed=lambda i, j: (j < i) | (i + j == 0))),
        mistake="attention.blind_to_itself",
    )
    yield Fault(
        "window of 8 where there is none",
        "kqv_out",
        in_engine(kqv_out=lambda e, n: e.attend(n, allowed=lambda i, j: (j <= i) & (j > i - 8))),
        mistake="attention.last_only",
    )
    yield Fault(
        "KV heads dealt in turn", "kqv_out", in_engine(kqv_out=lambda e, n: e.attend(n, groups=by_turn)), mistake="attention.heads_in_turn"
    )
    yield Fault(
        "KV heads in the opposite order",
        "kqv_out",
        in_engine(kqv_out=lambda e, n: e.attend(n, groups=reverse)),
        mistake="attention.heads_reversed",
    )
    yield Fault("scores not scaled", "kqv_out", in_engine(kqv_out=lambda e, n: e.attend(n, scale=1.0)), mistake="attention.unscaled")
    yield Fault(
        "scores divided by K",
        "kqv_out",
        in_engine(kqv_out=lambda e, n: e.attend(n, scale=1 / c.head_dim)),
        mistake="attention.divided_by_width",
    )
    yield Fault(
        "keys and values swapped",
        "kqv_out",
        in_engine(kqv_out=lambda e, n: e.attend(n, k="Vcur", v="Kcur_rope")),
        mistake="attention.keys_values_swapped",
    )
    yield Fault(
        "attention output [K, H] instead of [H, K]",
        "kqv_out",
        in_engine(kqv_out=lambda e, n: _transposed(e, n)),
        mistake="attention.transposed",
    )
    yield Fault(
        "float16 roundings not declared",
        "kqv_out",
        lambda model, tokens, **kind: (Engine(model, tokens, halves=True, **kind).run(), tokens),
        0,
        mistake="dialect.float16",
    )
    yield Fault("cache slot leaks another sequence", "kqv_out", _leaked, 0, mistake="read.values")
    yield Fault("last prompt token fed twice", "Qcur_rope", _double_fed, 0, mistake="rope.fed_twice")


def _matrix_faults() -> Iterator[Fault]:
    def matrix(name: str, field_name: str, source_name: str, change: Callable[[Floats, Engine, int], Floats]) -> Callable:
        return in_engine(**{name: lambda e, n: change(e.linear(e.at(source_name, n), _weights(e, n, field_name)), e, n)})

    def scale_of(e: Engine, n: int, name: str) -> f32:
        return _weights(e, n, name).scale

    yield Fault(
        "weight scale missing",
        "Vcur",
        matrix("Vcur", "attn_v", "attn_norm", lambda y, e, n: y / scale_of(e, n, "attn_v")),
        mistake="scale.missing",
    )
    yield Fault(
        "weight scale inverted",
        "Qcur",
        matrix("Qcur", "attn_q", "attn_norm", lambda y, e, n: y / scale_of(e, n, "attn_q") ** 2),
        mistake="scale.inverted",
    )
    yield Fault(
        "activation scale not divided out",
        "ffn_up",
        matrix("ffn_up", "ffn_up", "ffn_norm", lambda y, e, n: y * e.quantized(e.at("ffn_norm", n))[1]),
        mistake="activation_scale.missing",
    )
    yield Fault("one activation scale per tensor", "ffn_up", in_engine(ffn_up=_per_tensor), mistake="quantiser.per_tensor")
    yield Fault("activations not quantised", "ffn_gate", in_engine(ffn_gate=lambda e, n: _unquantized(e, n)), mistake="quantiser.none")
    yield Fault("codes not shifted to -1..1", "Kcur", in_engine(Kcur=lambda e, n: _unshifted(e, n)), mistake="codes.unshifted")
    yield Fault("codes truncated, not rounded", "ffn_down", in_engine(ffn_down=truncated), mistake="quantiser.truncated")
    yield Fault("I2_S read as 64/16", "Qcur", in_engine(Qcur=_relaid), mistake="codes.layout_64_16")
    yield Fault(
        "one block's codes misread",
        "ffn_gate",
        in_engine(ffn_gate=lambda e, n: _misread(e, n, "ffn_gate", "ffn_norm")),
        mistake="read.misread",
    )
    yield Fault(
        "weight transposed", "attn_o_out", in_engine(attn_o_out=lambda e, n: _transposed_weight(e, n)), mistake="weights.transposed"
    )
    yield Fault(
        "sign of a matrix flipped", "ffn_down", matrix("ffn_down", "ffn_down", "ffn_sub_norm", lambda y, e, n: -y), mistake="any.sign"
    )
    yield Fault(
        "weights of the layer before",
        "attn_o_out",
        in_engine(attn_o_out=lambda e, n: e.linear(e.at("attn_sub_norm", n), _weights(e, n - 1, "attn_output"))),
        mistake="weights.other_layer",
    )
    yield Fault("scale off by 1e-4", "Vcur", matrix("Vcur", "attn_v", "attn_norm", lambda y, e, n: y * f32(1.0001)), mistake="any.factor")
    yield Fault(
        "a bias where there is none", "Qcur", matrix("Qcur", "attn_q", "attn_norm", lambda y, e, n: y + f32(0.01)), mistake="read.constants"
    )


def _gate_faults() -> Iterator[Fault]:
    yield Fault(
        "gate and up swapped",
        "ffn_gate",
        in_engine(
            ffn_gate=lambda e, n: e.linear(e.at("ffn_norm", n), _weights(e, n, "ffn_up")),
            ffn_up=lambda e, n: e.linear(e.at("ffn_norm", n), _weights(e, n, "ffn_gate")),
        ),
        mistake="weights.other_matrix",
    )
    yield Fault(
        "SiLU for relu squared",
        "ffn_out",
        in_engine(ffn_out=lambda e, n: silu(e.at("ffn_gate", n)) * e.at("ffn_up", n)),
        mistake="activation.silu",
    )
    yield Fault(
        "SiLU for relu squared, every layer",
        "ffn_out",
        everywhere(ffn_out=lambda e, n: silu(e.at("ffn_gate", n)) * e.at("ffn_up", n)),
        0,
        mistake="activation.silu",
    )
    yield Fault(
        "relu not squared",
        "ffn_out",
        in_engine(ffn_out=lambda e, n: np.maximum(e.at("ffn_gate", n), 0) * e.at("ffn_up", n)),
        mistake="activation.relu",
    )
    yield Fault(
        "up not multiplied in",
        "ffn_out",
        in_engine(ffn_out=lambda e, n: np.maximum(e.at("ffn_gate", n), 0) ** 2),
        mistake="activation.no_up",
    )


def _layer_faults() -> Iterator[Fault]:
    model = embedded_model()
    c, last = model.config, len(model.layers) - 1
    yield Fault("residual missing", "ffn_inp", in_engine(ffn_inp=lambda e, n: e.at("attn_o_out", n)), mistake="residual.missing")
    yield Fault(
        "residual is the normed input",
        "l_out",
        in_engine(l_out=lambda e, n: e.at("ffn_norm", n) + e.at("ffn_down", n)),
        mistake="residual.normed",
    )
    yield Fault(
        "last layer skipped",
        "l_out",
        lambda model, tokens, **kind: (Engine(model, tokens, {"l_out": lambda e, n: e.stream(n)}, (last,), **kind).run(), tokens),
        last,
        mistake="layers.skipped",
    )
    yield Fault(
        "final norm skipped",
        "result_norm",
        everywhere(result_norm=lambda e, n: e.stream(len(e.model.layers))),
        None,
        mistake="norm.missing",
    )
    yield Fault(
        "embedding scaled by sqrt(D)",
        "inp_embd",
        everywhere(inp_embd=lambda e, n: widen.float32(e.model.token_embd)[e.tokens] * f32(c.width**0.5)),
        None,
        mistake="embedding.scaled",
    )
    yield Fault(
        "token ids off by one",
        "inp_embd",
        everywhere(inp_embd=lambda e, n: widen.float32(e.model.token_embd)[(e.tokens + 1) % c.vocab]),
        None,
        mistake="tokens.plus_1",
    )


def _dump_faults() -> Iterator[Fault]:
    c = embedded_model().config
    yield Fault("logits 10 times too large", "result_output", on_dump(_set(LOGITS, lambda x: 10 * x)), None, mistake="any.factor")
    yield Fault(
        "logits stale: those of the token before",
        "result_output",
        on_dump(_set(LOGITS, lambda x: np.concatenate([x[:1], x[:-1]]))),
        None,
        mistake="any.moved",
    )
    yield Fault("logits permuted", "result_output", on_dump(_set(LOGITS, lambda x: np.roll(x, 7, axis=1))), None, mistake="read.other_rows")
    yield Fault("one logit wrong", "result_output", on_dump(_set(LOGITS, lambda x: _one_wrong(x))), None, mistake="read.one_number")
    yield Fault(
        "heads permuted in a dump",
        "kqv_out",
        on_dump(_set(Key("kqv_out", LAYER), lambda x: np.roll(x, c.head_dim, axis=1))),
        mistake="read.moved_heads",
    )
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
