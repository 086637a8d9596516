"""The operations of a forward pass: each recorded tensor, and how it is computed from others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from numpy.typing import NDArray

from ..dialects import Dialect
from ..model import Config, Layer, Linear, Model
from ..traces.points import Key
from . import narrow
from . import operations as op
from .narrow import Allow, Storage
from .operations import Expected

TOKENS = Key("tokens", None)
EMBEDDING, POSITIONS = Key("inp_embd", None), Key("inpL", None)
NORM, LOGITS = Key("result_norm", None), Key("result_output", None)


FIELDS = {
    "Qcur": "attn_q",
    "Kcur": "attn_k",
    "Vcur": "attn_v",
    "attn_o_out": "attn_output",
    "ffn_gate": "ffn_gate",
    "ffn_up": "ffn_up",
    "ffn_down": "ffn_down",
}
"""The output tensor of each of a layer's matrices -> the matrix's field in model.Layer."""


@dataclass(frozen=True)
class Operation:
    """One tensor of the forward pass, and how it is computed from others."""

    key: Key
    inputs: tuple[Key, ...]
    evaluate: Callable[..., Expected] = field(repr=False)  # the inputs in float64 -> the expected tensor
    allow: Allow = field(default=narrow.result, repr=False)  # what narrow types allow it

    def expected(self, storage: Storage, *inputs: NDArray) -> Expected:
        """The expected tensor with the bound of an engine that keeps its numbers in these types."""
        expected = self.evaluate(*inputs)
        return expected if storage.is_wide else expected._replace(**self.allow(storage, expected, *inputs)._asdict())


def operations(model: Model, dialect: Dialect, start: int = 0) -> Iterator[Operation]:
    """All operations of a model in the order they run. start: the position of the first token."""
    yield Operation(EMBEDDING, (TOKENS,), partial(op.embed, model))
    if model.position_embd is not None:
        yield Operation(POSITIONS, (EMBEDDING,), partial(op.add_positions, model), narrow.add_positions)
    for n, layer in enumerate(model.layers):
        yield from _Layer(model, dialect, n, start).operations(layer)
    last = Key("l_out", len(model.layers) - 1)
    yield Operation(NORM, (last,), _norm(model.config, model.output_norm, model.output_norm_bias), narrow.norm)
    yield Operation(LOGITS, (NORM,), partial(op.head, model, dialect), partial(narrow.head, model=model, dialect=dialect))


def layer_input(model: Model, n: int) -> Key:
    """The input tensor of a layer."""
    if n:
        return Key("l_out", n - 1)
    return EMBEDDING if model.position_embd is None else POSITIONS


def _norm(c: Config, gain: NDArray, bias: NDArray | None) -> Callable[..., Expected]:
    """The evaluation of the family's norm."""
    return lambda x: op.rms_norm(x, gain, c.eps) if c.norm == "rms" else op.layer_norm(x, gain, bias, c.eps)


@dataclass(frozen=True)
class _Layer:
    model: Model
    dialect: Dialect
    n: int
    start: int

    def at(self, *names: str) -> tuple[Key, ...]:
        return tuple(Key(name, self.n) for name in names)

    def one(self, name: str, inputs: tuple[Key, ...], evaluate: Callable[..., Expected], allow: Allow) -> Operation:
        return Operation(Key(name, self.n), inputs, evaluate, allow)

    def operations(self, w: Layer) -> Iterator[Operation]:
        c, h = self.model.config, layer_input(self.model, self.n)
        yield from self.attention(w, h)
        if not c.parallel_residual:
            yield self.one("ffn_inp", (h, *self.at("attn_o_out")), op.add, narrow.add)
        yield from self.feed_forward(w, h if c.parallel_residual else Key("ffn_inp", self.n))
        terms = (h, *self.at("ffn_down", "attn_o_out")) if c.parallel_residual else self.at("ffn_inp", "ffn_down")
        yield self.one("l_out", terms, op.add, narrow.add)

    def attention(self, w: Layer, h: Key) -> Iterator[Operation]:
        model, dialect, c, n = self.model, self.dialect, self.model.config, self.n
        yield self.one("attn_norm", (h,), _norm(c, w.attn_norm, w.attn_norm_bias), narrow.norm)
        yield from self.linears("attn_norm", Qcur=w.attn_q, Kcur=w.attn_k, Vcur=w.attn_v)
        q, k = "Qcur", "Kcur"
        if w.attn_q_norm is not None:
            yield self.head_norm("Qcur_normed", q, w.attn_q_norm)
            q = "Qcur_normed"
        if w.attn_k_norm is not None:
            yield self.head_norm("Kcur_normed", k, w.attn_k_norm)
            k = "Kcur_normed"
        if c.rope != "none":
            for name, source in (("Qcur_rope", q), ("Kcur_rope", k)):
                yield self.one(name, self.at(source), partial(op.rope, model, dialect, start=self.start), partial(narrow.rope, model=model))
            q, k = "Qcur_rope", "Kcur_rope"
        allow = partial(narrow.attend, model=model, layer=n)
        yield self.one("kqv_out", self.at(q, k, "Vcur"), partial(op.attend, model, dialect, n), allow)
        yield from self.behind_sub_norm("attn_sub_norm", "kqv_out", w.attn_sub_norm, attn_o_out=w.attn_output)

    def feed_forward(self, w: Layer, h: Key) -> Iterator[Operation]:
        activation = self.model.config.activation
        yield self.one("ffn_norm", (h,), _norm(self.model.config, w.ffn_norm, w.ffn_norm_bias), narrow.norm)
        if w.ffn_gate is None:
            yield from self.linears("ffn_norm", ffn_up=w.ffn_up)
            gelu = op.gelu if activation == "gelu" else partial(op.gelu_tanh, dialect=self.dialect)
            yield self.one("ffn_out", self.at("ffn_up"), gelu, narrow.activation)
        else:
            yield from self.linears("ffn_norm", ffn_gate=w.ffn_gate, ffn_up=w.ffn_up)
            gate = op.relu2_gate if activation == "relu2" else op.silu_gate
            yield self.one("ffn_out", self.at("ffn_gate", "ffn_up"), gate, narrow.gate)
        yield from self.behind_sub_norm("ffn_sub_norm", "ffn_out", w.ffn_sub_norm, ffn_down=w.ffn_down)

    def behind_sub_norm(self, name: str, source: str, gain: NDArray | None, **output: Linear) -> Iterator[Operation]:
        """The operations of a branch's last matrix, and of the norm in front of it where the family has one."""
        if gain is not None:
            yield self.one(name, self.at(source), lambda x: op.rms_norm(x, gain, self.model.config.eps), narrow.norm)
            source = name
        yield from self.linears(source, **output)

    def head_norm(self, name: str, source: str, gain: NDArray) -> Operation:
        return self.one(name, self.at(source), lambda x: op.head_norm(x, gain, self.model.config.eps), narrow.norm)

    def linears(self, source: str, **outputs: Linear) -> Iterator[Operation]:
        """The operations of matrices that read the same tensor."""
        if any(op.reads_codes(w, self.dialect) and w.norm is None for w in outputs.values()):
            yield from self.quantized(source)
        for name, w in outputs.items():
            yield from self.linear(name, source, w)

    def linear(self, name: str, source: str, w: Linear) -> Iterator[Operation]:
        if w.norm is not None:
            inner, gain, eps = name + "_in", w.norm, w.norm_eps or self.model.config.eps
            yield self.one(inner, self.at(source), lambda x: op.rms_norm(x, gain, eps), narrow.norm)
            if op.reads_codes(w, self.dialect):
                yield from self.quantized(inner)
            source = inner
        yield self.one(
            name, self.at(source), lambda x: op.product(x, w, self.dialect), partial(narrow.product, linear=w, dialect=self.dialect)
        )

    def quantized(self, name: str) -> Iterator[Operation]:
        yield self.one(name + "_codes", self.at(name), op.codes, narrow.codes)
        yield self.one(name + "_scale", self.at(name), op.code_scale, narrow.code_scale)
