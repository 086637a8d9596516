"""The operations of a forward pass: each recorded tensor, and how it is computed from others."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from numpy.typing import NDArray

from ..engine.dialects import Dialect
from ..model.records import Config, Layer, Linear, Model, with_rope_of
from ..traces import points
from ..traces.points import FIELDS, Key
from . import operations as op
from .expected import Expected, Storage
from .products import code_scale, codes, head, of_experts, product, reads_codes

TOKENS = Key("tokens", None)
EMBEDDING, POSITIONS, SCALED = Key("inp_embd", None), Key("inpL", None), Key("inp_scaled", None)
NORM, LOGITS, POOLED = Key("result_norm", None), Key("result_output", None), Key(points.POOLED, None)
HEAD_NORMS = {point.name: point.weight for point in points.POINTS if point.name.endswith("_normed")}
"""The output tensor of each norm of single heads -> its weight's field in model.Layer."""
OF_EXPERTS = {"ffn_moe_gate": "ffn_gate", "ffn_moe_up": "ffn_up", "ffn_moe_down": "ffn_down"}
"""The tensors of experts' products -> the fields of model.Expert."""


def matrix_of(model: Model, key: Key) -> Linear:
    """The matrix whose product a tensor is, the head's too."""
    if key.layer is None:
        return Linear(model.head, model.output_bias)
    return getattr(model.layers[key.layer], FIELDS[key.name])


@dataclass(frozen=True)
class Place:
    """One tensor of a model in a dialect."""

    model: Model = field(repr=False)
    dialect: Dialect
    key: Key
    length: int = field(default=0, kw_only=True)  # of the sequence, where mistakes at single positions are tried

    @property
    def borders(self) -> Sequence[int]:
        """Positions at which a later chunk may begin, lengths of windows and prefixes; a few where the length is not known."""
        if not self.length:
            return [2, 4, 8, 16, 32, 64]
        return [b for b in (*range(1, 33), 40, 48, 64, 96, 128, 256, 512) if b < self.length]

    @property
    def config(self) -> Config:
        return self.model.config

    @property
    def layer(self) -> Layer | None:
        """Its layer; None outside the layers."""
        return None if self.key.layer is None else self.model.layers[self.key.layer]

    @property
    def linear(self) -> Linear:
        """Its matrix, the head's too."""
        return matrix_of(self.model, self.key)


@dataclass(frozen=True, eq=False)
class Operation(Place):
    """One tensor of the forward pass, and how it is computed from others."""

    inputs: tuple[Key, ...]
    evaluate: Callable[..., Expected] = field(repr=False)  # the inputs in float64 -> the expected tensor; types: float32 by default

    def expected(self, types: Storage, *inputs: NDArray) -> Expected:
        """The expected tensor with the bound of an engine that keeps its numbers in these types."""
        return self.evaluate(*inputs, types=types)


def operations(model: Model, dialect: Dialect, start: int = 0, scores: Collection[int] = ()) -> Iterator[Operation]:
    """All operations of a model in the order they run. start: the position of the first token. scores: the layers with their attention's
    scores and probabilities, behind attention's output, which shows the type of a KV cache.
    """
    one = partial(Operation, model, dialect)
    yield one(EMBEDDING, (TOKENS,), partial(op.embed, model))
    if model.position_embd is not None:
        yield one(POSITIONS, (EMBEDDING,), partial(op.add_positions, model))
    if model.config.embedding_scale != 1:
        source = EMBEDDING if model.position_embd is None else POSITIONS
        yield one(SCALED, (source,), partial(op.scaled_embedding, model.config))
    for n, layer in enumerate(model.layers):
        yield from _Layer(model, dialect, n, start, n in scores).operations(layer)
    last = Key("l_out", len(model.layers) - 1)
    yield one(NORM, (last,), _norm(model.config, model.output_norm, model.output_norm_bias))
    if model.config.pooling != "none":
        yield one(POOLED, (NORM,), partial(op.pool, model.config.pooling))
    yield one(LOGITS, (NORM,), partial(head, model, dialect))


def operation_of(model: Model, dialect: Dialect, key: Key) -> Operation | None:
    """The operation that gives a tensor; None if the model has none."""
    n = key.layer
    some = operations(model, dialect) if n is None else _Layer(model, dialect, n, 0, scores=True).operations(model.layers[n])
    return next((operation for operation in some if operation.key == key), None)


def evaluated(some: Iterable[Operation], given: Callable[[Key], NDArray]) -> dict[Key, NDArray]:
    """What some operations give, one after another. given: the tensors that none of them gives."""
    own: dict[Key, NDArray] = {}
    for operation in some:
        own[operation.key] = operation.evaluate(*(own[k] if k in own else given(k) for k in operation.inputs)).value
    return own


def layer_input(model: Model, n: int) -> Key:
    """The input tensor of a layer."""
    if n:
        return Key("l_out", n - 1)
    if model.config.embedding_scale != 1:
        return SCALED
    return EMBEDDING if model.position_embd is None else POSITIONS


def _norm(c: Config, gain: NDArray, bias: NDArray | None) -> Callable[..., Expected]:
    """The evaluation of the family's norm."""
    return partial(op.rms_norm, gain=gain, eps=c.eps) if c.norm == "rms" else partial(op.layer_norm, gain=gain, bias=bias, eps=c.eps)


@dataclass(frozen=True)
class _Layer:
    model: Model
    dialect: Dialect
    n: int
    start: int
    scores: bool

    def at(self, *names: str) -> tuple[Key, ...]:
        return tuple(Key(name, self.n) for name in names)

    def one(self, name: str, inputs: tuple[Key, ...], evaluate: Callable[..., Expected]) -> Operation:
        return Operation(self.model, self.dialect, Key(name, self.n), inputs, evaluate)

    def operations(self, w: Layer) -> Iterator[Operation]:
        c, h = self.model.config, layer_input(self.model, self.n)
        add = partial(op.add, factor=c.residual_scale)
        attended = "attn_o_out" if w.post_attention_norm is None else "attn_post_norm"
        fed = ["ffn_down" if w.post_ffw_norm is None else "ffn_post_norm"]
        if w.experts:
            fed = ["ffn_moe_out", "ffn_shexp_out"] if w.ffn_gate_inp_shexp is not None else ["ffn_moe_out"]
        yield from self.attention(w, h)
        yield from self.rms_norm("attn_post_norm", "attn_o_out", w.post_attention_norm)
        if not c.parallel_residual:
            yield self.one("ffn_inp", (h, *self.at(attended)), add)
        yield from self.feed_forward(w, h if c.parallel_residual else Key("ffn_inp", self.n))
        yield from self.rms_norm("ffn_post_norm", "ffn_down", w.post_ffw_norm)
        yield self.one("l_out", (h, *self.at(*fed, attended)) if c.parallel_residual else self.at("ffn_inp", *fed), add)

    def rms_norm(self, name: str, source: str, gain: NDArray | None) -> Iterator[Operation]:
        """A norm of all numbers or of each head, where the family has it."""
        if gain is not None:
            yield self.one(name, self.at(source), partial(op.rms_norm, gain=gain, eps=self.model.config.eps))

    def attention(self, w: Layer, h: Key) -> Iterator[Operation]:
        model, dialect, c, n = self.model, self.dialect, self.model.config, self.n
        source = h
        if w.attn_norm is not None:
            yield self.one("attn_norm", (h,), _norm(c, w.attn_norm, w.attn_norm_bias))
            (source,) = self.at("attn_norm")
        yield from self.linears(source, Qcur=w.attn_q, Kcur=w.attn_k, Vcur=w.attn_v)
        q, k = "Qcur", "Kcur"
        yield from self.rms_norm("Qcur_normed", q, w.attn_q_norm)
        yield from self.rms_norm("Kcur_normed", k, w.attn_k_norm)
        q, k = (name if gain is None else name + "_normed" for name, gain in ((q, w.attn_q_norm), (k, w.attn_k_norm)))
        if c.rotates(n):
            for name, before in (("Qcur_rope", q), ("Kcur_rope", k)):
                yield self.one(name, self.at(before), partial(op.rope, with_rope_of(model, n), dialect, start=self.start))
            q, k = "Qcur_rope", "Kcur_rope"
        yield self.one("kqv_out", self.at(q, k, "Vcur"), partial(op.attend, model, dialect, n))
        if self.scores:
            yield self.one("kq", self.at(q, k), partial(op.visible_scores, model, dialect, n))
            yield self.one("kq_soft_max", self.at("kq"), partial(op.probabilities, model, n))
        yield from self.behind_sub_norm("attn_sub_norm", "kqv_out", w.attn_sub_norm, attn_o_out=w.attn_output)

    def feed_forward(self, w: Layer, h: Key) -> Iterator[Operation]:
        source = h
        if w.ffn_norm is not None:
            yield self.one("ffn_norm", (h,), _norm(self.model.config, w.ffn_norm, w.ffn_norm_bias))
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
            yield self.one("ffn_shexp_out", (*self.at("ffn_down"), source), partial(op.shared_expert, w.ffn_gate_inp_shexp))

    def dense(self, w: Layer, source: Key) -> Iterator[Operation]:
        """The feed-forward that every token takes."""
        assert w.ffn_up is not None
        assert w.ffn_down is not None
        for name, linear in (("ffn_gate", w.ffn_gate), ("ffn_up", w.ffn_up)):
            if linear is not None:
                yield from self.linear(name, source, linear)
        yield self.one("ffn_out", self.at("ffn_up") if w.ffn_gate is None else self.at("ffn_gate", "ffn_up"), self.activation())
        yield from self.behind_sub_norm("ffn_sub_norm", "ffn_out", w.ffn_sub_norm, ffn_down=w.ffn_down)

    def activation(self) -> Callable[..., Expected]:
        """The evaluation of the activation, gated or not."""
        activations: dict[str, Callable[..., Expected]] = {
            "relu2": op.relu2_gate,
            "silu": op.silu_gate,
            "gelu_gate": partial(op.gelu_gate, dialect=self.dialect),
            "gelu": op.gelu,
        }
        return activations.get(self.model.config.activation, partial(op.gelu_tanh, dialect=self.dialect))

    def mixture(self, w: Layer, source: Key) -> Iterator[Operation]:
        """The experts of each token. What a slot computes depends on the expert that the dump's own router has put there."""
        c = self.model.config
        assert w.ffn_gate_inp is not None
        yield from self.linear("ffn_moe_logits", source, w.ffn_gate_inp)
        logits, chosen = self.at("ffn_moe_logits", "ffn_moe_topk")
        yield self.one(chosen.name, (logits,), partial(op.top_experts, c.experts_used))
        yield self.one("ffn_moe_weights", (logits, chosen), partial(op.expert_weights, c.normalized_experts))
        for name, reads in (("gate", source), ("up", source), ("down", self.at("ffn_moe_swiglu")[0])):
            if name == "down":
                yield self.one(reads.name, self.at("ffn_moe_gate", "ffn_moe_up"), self.activation())
            linears = [getattr(expert, f"ffn_{name}") for expert in w.experts]
            yield self.one(f"ffn_moe_{name}", (reads, chosen), partial(of_experts, linears, self.dialect))
        yield self.one("ffn_moe_out", self.at("ffn_moe_down", "ffn_moe_weights"), op.mix)

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
            yield self.one(inner.name, (source,), partial(op.rms_norm, gain=w.norm, eps=w.norm_eps or self.model.config.eps))
            if reads_codes(w, self.dialect):
                yield from self.quantized(inner)
            source = inner
        yield self.one(name, (source,), partial(product, linear=w, dialect=self.dialect))

    def quantizes(self, *readers: Linear) -> bool:
        """Whether some of these matrices take the codes of what they all read."""
        return any(reads_codes(w, self.dialect) and w.norm is None for w in readers)

    def quantized(self, source: Key) -> Iterator[Operation]:
        name = source.name if source.layer == self.n else "attn_inp"
        yield self.one(name + "_codes", (source,), codes)
        yield self.one(name + "_scale", (source,), code_scale)
