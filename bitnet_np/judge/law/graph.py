"""The operations of a forward pass: each recorded tensor, and how it is computed from others."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.dialects import Dialect
from ...model.records import Layer, Linear, Model
from ...traces import points
from ...traces.points import Key
from . import definition as of
from . import noise
from . import running_error as law
from .definition import Place
from .expected import WIDE, Expected, Storage
from .expression import Node, tensor
from .precision import ROUNDOFF
from .products import reads_codes

TOKENS = Key("tokens", None)
EMBEDDING, POSITIONS, SCALED = Key("inp_embd", None), Key("inpL", None), Key("inp_scaled", None)
NORM, LOGITS, POOLED = Key("result_norm", None), Key("result_output", None), Key(points.POOLED, None)
HEAD_NORMS = {point.name: point.weight for point in points.POINTS if point.name.endswith("_normed")}
"""The output tensor of each norm of single heads -> its weight's field in records.Layer."""
OF_EXPERTS = {"ffn_moe_gate": "ffn_gate", "ffn_moe_up": "ffn_up", "ffn_moe_down": "ffn_down"}
"""The tensors of experts' products -> the fields of records.Expert."""


@dataclass(frozen=True, eq=False)
class Operation(Place):
    """One tensor of the forward pass, and how it is computed from others."""

    inputs: tuple[Key, ...]
    make: Callable[..., Node] = field(repr=False)  # the place, and its inputs as expressions -> its own
    kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # what those who edit it want to keep with it

    @cached_property
    def tree(self) -> Node:
        """The operation as an expression."""
        return self.make(self, *map(tensor, self.inputs))

    def expected(self, types: Storage, *inputs: NDArray) -> Expected:
        """The expected tensor for these inputs in float64, with the bound of an engine that keeps its numbers in these types."""
        found = law.expected(self.tree, dict(zip(self.inputs, inputs, strict=True)), types)
        level = types.precision.noise
        return found.with_noise(level, self.unit(*inputs)) if level and noise.kind_of(self.key) in noise.OF_SUMS else found

    def unit(self, *inputs: NDArray) -> NDArray:
        """What a relative error of 1 in each step makes of each number, squared: the unit of noise.py."""
        coarse = law.expected(self.tree, dict(zip(self.inputs, inputs, strict=True)), Storage(("bfloat16",) * len(inputs), "bfloat16"))
        return np.broadcast_to(coarse.square / ROUNDOFF["bfloat16"] ** 2, coarse.value.shape)

    def evaluate(self, *inputs: NDArray) -> Expected:
        """The same for an engine of float32."""
        return self.expected(WIDE, *inputs)


def operations(model: Model, dialect: Dialect, start: int = 0, scores: Collection[int] = ()) -> Iterator[Operation]:
    """All operations of a model in the order they run. start: the position of the first token. scores: the layers with their attention's
    scores and probabilities, behind attention's output, which shows the type of a KV cache.
    """
    one = partial(Operation, model, dialect)
    yield one(EMBEDDING, (TOKENS,), of.embedding)
    if model.position_embd is not None:
        yield one(POSITIONS, (EMBEDDING,), of.with_positions)
    if model.config.embedding_scale != 1:
        source = EMBEDDING if model.position_embd is None else POSITIONS
        yield one(SCALED, (source,), of.scaled)
    for n, layer in enumerate(model.layers):
        yield from _Layer(model, dialect, n, start, n in scores).operations(layer)
    last = Key("l_out", len(model.layers) - 1)
    yield one(NORM, (last,), partial(of.norm, gain=model.output_norm, bias=model.output_norm_bias))
    if model.config.pooling != "none":
        yield one(POOLED, (NORM,), of.pooled)
    yield one(LOGITS, (NORM,), of.head)


def layer_input(model: Model, n: int) -> Key:
    """The input tensor of a layer."""
    if n:
        return Key("l_out", n - 1)
    if model.config.embedding_scale != 1:
        return SCALED
    return EMBEDDING if model.position_embd is None else POSITIONS


def before_rotation(w: Layer, name: str) -> str:
    """The tensor of a layer's queries (Qcur) or keys (Kcur) behind the norm of heads, where it has one."""
    return name if getattr(w, f"attn_{name[0].lower()}_norm") is None else f"{name}_normed"


def attended(model: Model, name: str, n: int) -> Key:
    """The tensor of queries (Qcur) or keys (Kcur) that the attention of layer n reads."""
    return Key(f"{name}_rope" if model.config.rotates(n) else before_rotation(model.layers[n], name), n)


@dataclass(frozen=True)
class _Layer:
    model: Model
    dialect: Dialect
    n: int
    start: int
    scores: bool

    def at(self, *names: str) -> tuple[Key, ...]:
        return tuple(Key(name, self.n) for name in names)

    def one(self, name: str, inputs: tuple[Key, ...], make: Callable[..., Node]) -> Operation:
        return Operation(self.model, self.dialect, Key(name, self.n), inputs, make)

    def operations(self, w: Layer) -> Iterator[Operation]:
        c, h = self.model.config, layer_input(self.model, self.n)
        attended = "attn_o_out" if w.post_attention_norm is None else "attn_post_norm"
        fed = ["ffn_down" if w.post_ffw_norm is None else "ffn_post_norm"]
        if w.experts:
            fed = ["ffn_moe_out", "ffn_shexp_out"] if w.ffn_gate_inp_shexp is not None else ["ffn_moe_out"]
        yield from self.attention(w, h)
        yield from self.rms_norm("attn_post_norm", "attn_o_out", w.post_attention_norm)
        if not c.parallel_residual:
            yield self.one("ffn_inp", (h, *self.at(attended)), of.residual)
        yield from self.feed_forward(w, h if c.parallel_residual else Key("ffn_inp", self.n))
        yield from self.rms_norm("ffn_post_norm", "ffn_down", w.post_ffw_norm)
        yield self.one("l_out", (h, *self.at(*fed, attended)) if c.parallel_residual else self.at("ffn_inp", *fed), of.residual)

    def rms_norm(self, name: str, source: str, gain: NDArray | None, make: Callable[..., Node] = of.rms_norm) -> Iterator[Operation]:
        """A norm of all numbers or of each head, where the family has it."""
        if gain is not None:
            yield self.one(name, self.at(source), partial(make, gain=gain))

    def attention(self, w: Layer, h: Key) -> Iterator[Operation]:
        source = h
        if w.attn_norm is not None:
            yield self.one("attn_norm", (h,), partial(of.norm, gain=w.attn_norm, bias=w.attn_norm_bias))
            (source,) = self.at("attn_norm")
        yield from self.linears(source, Qcur=w.attn_q, Kcur=w.attn_k, Vcur=w.attn_v)
        yield from self.rms_norm("Qcur_normed", "Qcur", w.attn_q_norm, of.norm_of_heads)
        yield from self.rms_norm("Kcur_normed", "Kcur", w.attn_k_norm, of.norm_of_heads)
        if self.model.config.rotates(self.n):
            for name in ("Qcur", "Kcur"):
                yield self.one(f"{name}_rope", self.at(before_rotation(w, name)), partial(of.rotation, start=self.start))
        q, k = (attended(self.model, name, self.n) for name in ("Qcur", "Kcur"))
        yield self.one("kqv_out", (q, k, *self.at("Vcur")), of.attention)
        if self.scores:
            yield self.one("kq", (q, k), of.visible_scores)
            yield self.one("kq_soft_max", self.at("kq"), of.visible_weights)
        yield from self.behind_sub_norm("attn_sub_norm", "kqv_out", w.attn_sub_norm, attn_o_out=w.attn_output)

    def feed_forward(self, w: Layer, h: Key) -> Iterator[Operation]:
        source = h
        if w.ffn_norm is not None:
            yield self.one("ffn_norm", (h,), partial(of.norm, gain=w.ffn_norm, bias=w.ffn_norm_bias))
            (source,) = self.at("ffn_norm")
        has_codes = False
        if self.model.config.shared_norm and w.attn_norm is not None:
            (source,) = self.at("attn_norm")
            has_codes = self.quantizes(w.attn_q, w.attn_k, w.attn_v)
        readers = [linear for name, linear in w.linears() if name.startswith(("ffn_gate", "ffn_up"))]
        if self.quantizes(*readers) and not has_codes:
            yield from self.quantized(source)
        if w.experts:
            yield from self.mixture(w, source)
        if w.ffn_up is not None:
            yield from self.dense(w, source)
        if w.ffn_gate_inp_shexp is not None:
            yield self.one("ffn_shexp_out", (*self.at("ffn_down"), source), of.shared_expert)

    def dense(self, w: Layer, source: Key) -> Iterator[Operation]:
        """The feed-forward that every token takes."""
        assert w.ffn_up is not None
        assert w.ffn_down is not None
        for name, linear in (("ffn_gate", w.ffn_gate), ("ffn_up", w.ffn_up)):
            if linear is not None:
                yield from self.linear(name, source, linear)
        yield self.one("ffn_out", self.at("ffn_up") if w.ffn_gate is None else self.at("ffn_gate", "ffn_up"), of.activation)
        yield from self.behind_sub_norm("ffn_sub_norm", "ffn_out", w.ffn_sub_norm, ffn_down=w.ffn_down)

    def mixture(self, w: Layer, source: Key) -> Iterator[Operation]:
        """The experts of each token. What a slot computes depends on the expert that the dump's own router has put there."""
        assert w.ffn_gate_inp is not None
        yield from self.linear("ffn_moe_logits", source, w.ffn_gate_inp)
        logits, chosen = self.at("ffn_moe_logits", "ffn_moe_topk")
        yield self.one(chosen.name, (logits,), of.top_experts)
        yield self.one("ffn_moe_weights", (logits, chosen), of.expert_weights)
        for name, reads in (("gate", source), ("up", source), ("down", self.at("ffn_moe_swiglu")[0])):
            if name == "down":
                yield self.one(reads.name, self.at("ffn_moe_gate", "ffn_moe_up"), of.activation)
            linears = [getattr(expert, f"ffn_{name}") for expert in w.experts]
            yield self.one(f"ffn_moe_{name}", (reads, chosen), partial(of.of_experts, linears=linears))
        yield self.one("ffn_moe_out", self.at("ffn_moe_down", "ffn_moe_weights"), of.mixed)

    def behind_sub_norm(self, name: str, source: str, gain: NDArray | None, **output: Linear) -> Iterator[Operation]:
        """The operations of a branch's last matrix, and of the norm in front of it where the family has one."""
        yield from self.rms_norm(name, source, gain)
        yield from self.linears(Key(source if gain is None else name, self.n), **output)

    def linears(self, source: Key, **outputs: Linear) -> Iterator[Operation]:
        """The operations of matrices that read the same tensor."""
        if self.quantizes(*outputs.values()):
            yield from self.quantized(source)
        for name, w in outputs.items():
            yield from self.linear(name, source, w)

    def linear(self, name: str, source: Key, w: Linear) -> Iterator[Operation]:
        if w.norm is not None:
            inner = Key(name + "_in", self.n)
            yield self.one(inner.name, (source,), partial(of.rms_norm, gain=w.norm, eps=w.norm_eps))
            if reads_codes(w, self.dialect):
                yield from self.quantized(inner)
            source = inner
        yield self.one(name, (source,), partial(of.matrix_product, linear=w))

    def quantizes(self, *readers: Linear) -> bool:
        """Whether some of these matrices take the codes of what they all read."""
        return any(reads_codes(w, self.dialect) and w.norm is None for w in readers)

    def quantized(self, source: Key) -> Iterator[Operation]:
        name = source.name if source.layer == self.n else "attn_inp"
        yield self.one(name + "_codes", (source,), of.codes)
        yield self.one(name + "_scale", (source,), of.code_scale)
