"""The network itself: embedding, layers, head, over checked rows of tokens.

This is the one copy of the layer's order of operations. Every path of forward_pass.py runs it; spec.py and
other engines' recordings check it. What differs between paths comes in as arguments: where keys and values
are (`attend`), and positions (`rows`, `rotations`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ..base.errors import NonFiniteError, OptionError, UnsupportedError, shown
from ..base.tensor_types import TERNARY_TYPES
from ..base.validate import function
from ..kernels import cpu
from ..kernels.attention import most_keys
from ..kernels.numba_threads import get_num_threads
from ..model.checks import check_model
from ..model.records import (
    Activation,
    Blocks,
    Expert,
    Layer,
    Linear,
    Model,
    Table,
    Ternary,
    Weights,
    with_rope_of,
)
from . import cache_types
from .backend import Array, Backend, check_backend
from .cache import ALL, Attend, Part, rows_of
from .dialects import EXACT, Dialect
from .repeats import Repeats
from .tokens import Ints, Rows

Floats = NDArray[np.float32]
Gain = Floats | None
"""Of a norm, or its bias; None where the family has none there."""
Named = tuple[str, Array]
"""A tensor after its name."""
Codes = Callable[[], tuple[Array, Array]]
"""Gives the int8 codes of a tensor, and their scales."""

Record = Callable[[str, int | None, NDArray], None]
"""Observes a tensor: its name, its layer, and the array, read-only, rows first.
An observer that keeps the array must copy it."""

Edit = Callable[[str, int | None, NDArray], NDArray]
"""Returns the tensor that the pass continues with: the array itself, or another of its shape.
Not called for codes and their scales."""

PART_ROWS = 128
"""Rows that go through a layer at a time, whose branches have the widest tensors; of a layer of experts,
those of each expert on average.

Fewer take less memory and more launches: by 8, a small model (width 512) takes twice the time.
"""

Rotations = Mapping[bool, tuple[Array, ...]]
"""Cosines and sines of the rows' positions, [R, J] each: of all layers but the local ones (False), and of the
local ones (True), if any."""


def ignore(name: str, layer: int | None, array: NDArray) -> None:
    """Record nothing."""


@dataclass(frozen=True)
class Runtime:
    """A model, the dialect it is computed in, the backend that computes, and who observes:
    all that a pass runs on."""

    model: Model
    dialect: Dialect = EXACT
    ops: Backend = cpu
    record: Record = field(default=ignore, repr=False)
    # for the judge, on the CPU: to see the effect of wrong or rounded tensors
    edit: Edit | None = field(default=None, repr=False)

    def checked(self) -> Runtime:
        """Returns itself. Raises OptionError, ShapeError or UnsupportedError for a dialect,
        model, backend or observer that do not go together.

        The arrays of a model on a device were checked before they went there.
        """
        check_backend("ops", self.ops)
        function("record", self.record)
        if not isinstance(self.dialect, Dialect):
            expected = "a Dialect such as bitnet_np.LLAMA_CPP"
            raise OptionError(f"dialect is {shown(self.dialect)}, expected {expected}")
        if self.ops.device == "cpu":
            check_model(self.model)
        cache_types.check(self.dialect.kv, self.model.config.head_dim)
        if self.ops.exact_only and self.dialect.name != EXACT.name:
            name = self.dialect.name
            raise UnsupportedError(f"the dialect is {name}, expected {EXACT.name} on this device")
        return self

    @property
    def observed(self) -> bool:
        """Whether tensors are passed to an observer or an editor."""
        return self.record is not ignore or self.edit is not None

    def attention(self, layer: int, q: Array, k: Array, v: Array, slot: Array, position: Array) -> Array:
        """Causal attention of a layer, by positions: [R, H, K], [B, S, G, K] x 2, [R] x 2 -> [R, H, K]."""
        attend = self.ops.attend_float16 if self.dialect.in_float16 else self.ops.attend
        window = self.model.config.window_of(layer)
        return attend(q, k, v, slot, position, window, *self.scoring)

    @property
    def scoring(self) -> tuple[np.float32 | None, np.float32 | None]:
        """The factor of q . k, None for 1 / sqrt(K), and the cap of the scores, None without one,
        as kernels take them."""
        c = self.model.config
        scale = None if c.attention_scale is None else np.float32(c.attention_scale)
        return scale, None if c.score_cap is None else np.float32(c.score_cap)

    @np.errstate(over="ignore", invalid="ignore")  # check_finite reports it at the end
    def rotations(self, position: Ints) -> Rotations | None:
        """Cosines and sines for positions [R], of every kind of layer that the model has;
        None for a model without RoPE.

        Each is multiplied by the model's magnitude in float32.
        """
        c = self.model.config
        if c.rope == "none":
            return None
        rotations = {}
        one_of_each = {n in c.local_layers: n for n in range(c.n_layers)}
        for local, n in one_of_each.items():
            like = with_rope_of(self.model, n)
            cos, sin = self.ops.rotations(self.dialect.angles(position, like))
            magnitude = like.config.rope_magnitude
            rotations[local] = _times(magnitude, cos, self.ops), _times(magnitude, sin, self.ops)
        return rotations


@np.errstate(over="ignore", invalid="ignore")  # check_finite reports it at the end
def run_layers(
    runtime: Runtime,
    rotations: Rotations | None,
    attend: Attend,
    *,
    last_only: bool = False,
) -> Array:
    """What the output matrix reads of the rows of a pass: [R, D],
    or [B, D] of each sequence's last row with last_only.

    Arrays are where the backend has them.
    """
    model, ops, rows = runtime.model, runtime.ops, attend.rows
    whole = _Step(runtime, None)
    ops.mark("forward")
    h = whole.note("inp_embd", _embed(model.token_embd, rows.tokens, ops))
    if model.position_embd is not None:
        h = whole.note("inpL", ops.add(h, _embed(model.position_embd, rows.position, ops)))
    if model.config.embedding_scale != 1:
        h = whole.note("inp_scaled", _times(model.config.embedding_scale, h, ops))
    way = _Way.of(whole, len(h), rotations, attend)
    repeats = attend.repeats
    last = rows.last if last_only else None
    h = _hidden(whole, h, way, last) if repeats is None else _repeated(whole, h, way, repeats)
    return runtime.dialect.rounded(h, ops)


@np.errstate(over="ignore", invalid="ignore")
def run_output(runtime: Runtime, h: Array) -> Array:
    """Logits, out of what `run_layers` gives: [R, D] -> [R, V]."""
    model, ops, c = runtime.model, runtime.ops, runtime.model.config
    logits = _table_product(h, model.head, runtime.dialect, ops)
    if model.output_bias is not None:
        logits = ops.add_bias(logits, model.output_bias)
    logits = _times(np.float32(1) / np.float32(c.logit_scale), logits, ops)
    if c.logit_cap is not None:
        logits = ops.soft_cap(logits, np.float32(c.logit_cap))
    return _Step(runtime, None).note("result_output", logits)


def _hidden(whole: _Step, h: Array, way: _Way, last: Array | None = None) -> Array:
    """All layers and the last norm: [R, D] -> [R, D]. last: the rows [B] of the last tokens, if only these
    are asked for: -> [B, D]."""
    model, ops = whole.runtime.model, whole.runtime.ops
    count = model.config.n_layers
    for n in range(count):
        ops.mark("layer")
        h = _layer(replace(whole, layer=n), h, way, last if n == count - 1 else None)
    if last is not None and len(h) > len(last):
        h = ops.take(h, last)
    return whole.norm("result_norm", "", h, model.output_norm, model.output_norm_bias)[1]


def _repeated(whole: _Step, h: Array, way: _Way, repeats: Repeats) -> Array:
    """`_hidden` for one more token of each sequence, by what was recorded of a pass like it."""
    runtime, rows, kinds = whole.runtime, way.attend.rows, tuple(way.rotations or ())

    def hidden(h: Array, slot: Array, position: Array, *turns: Array) -> Array:
        attend = replace(way.attend, rows=replace(rows, slot=slot, position=position))
        pairs = zip(turns[::2], turns[1::2], strict=True)
        rotations = dict(zip(kinds, pairs, strict=True))
        return _hidden(whole, h, replace(way, attend=attend, rotations=rotations or None))

    turns = [turn for kind in kinds for turn in (way.rotations or {})[kind]]
    inputs = h, rows.slot, rows.position, *turns
    keys, values = way.attend.keys, way.attend.values
    kind = runtime.dialect, len(h), get_num_threads(), id(keys), id(values)
    return repeats.run(runtime.model, kind, most_keys(rows.position), hidden, inputs, (keys, values))


@np.errstate(over="ignore", invalid="ignore")
def run_layer(runtime: Runtime, n: int, h: Array, rotations: Rotations | None, attend: Attend) -> Array:
    """Layer n alone: its input [R, D] -> l_out [R, D]."""
    runtime.ops.mark("layer")
    step = _Step(runtime, n)
    return _layer(step, h, _Way.of(step, len(h), rotations, attend))


@np.errstate(over="ignore", invalid="ignore")
def run_feed_forward(runtime: Runtime, n: int, h: Array, norm: bool) -> Array:
    """The feed-forward branch of layer n alone, without the residual: [R, D] -> [R, D]. norm: whether the
    norm in front of it runs."""
    step = _Step(runtime, n)
    w = step.weights if norm else replace(step.weights, attn_norm=None, ffn_norm=None)
    return _feed_forward(step, h, _feed_forward_input(step, w, h))


def check_finite(logits: Floats, rows: Rows, last_only: bool) -> Floats:
    """The logits. Raises NonFiniteError if they are not finite."""
    if cpu.has_non_finite(logits):
        row = int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
        row = int(rows.last[row]) if last_only else row
        where = f"sequence {rows.sequence[row]}, position {rows.position[row]}"
        why = "the model leaves float32's range"
        raise NonFiniteError(f"the logits of {where} have NaN or infinity in them: {why}")
    return logits


# --- a layer ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """The context that the operations of one layer share; with layer None,
    the operations around the layers."""

    runtime: Runtime
    layer: int | None

    @property
    def weights(self) -> Layer:
        """Those of the layer."""
        assert self.layer is not None
        return self.runtime.model.layers[self.layer]

    def note(self, name: str, array: Array) -> Array:
        """Let the editor change a tensor and the observer see it;
        returns the tensor that the pass continues with."""
        if self.runtime.edit is not None:
            array = self.runtime.edit(name, self.layer, array)
        self.see(name, array)
        return array

    def see(self, name: str, array: Array) -> None:
        """Pass a tensor to the observer as a read-only NumPy array,
        copied from the device where it is there."""
        if self.runtime.record is not ignore:
            shown = self.runtime.ops.to_host(array).view()
            shown.flags.writeable = False
            self.runtime.record(name, self.layer, shown)

    def norm(self, name: str, source: str, x: Array, gain: Gain, bias: Gain = None) -> Named:
        """Name and tensor after the family's norm, or those of its input if the family has none there:
        [R, D] -> [R, D]."""
        c = self.runtime.model.config
        if gain is None or c.norm == "rms":
            return self.rms_norm(name, source, x, gain)
        return name, self.note(name, self.runtime.ops.layer_norm(x, gain, bias, c.eps))

    def rms_norm(self, name: str, source: str, x: Array, gain: Gain, eps: float | None = None) -> Named:
        """The same after an RMS norm of rows, or of each D numbers of a row: [..., D] -> [..., D]."""
        if gain is None:
            return source, x
        eps = eps or self.runtime.model.config.eps
        y = self.runtime.ops.rms_norm(x.reshape(-1, gain.size), gain, eps)
        return name, self.note(name, y.reshape(x.shape))

    def added(self, h: Array, branch: Array, in_place: bool) -> Array:
        """The residual stream with the output of a branch. in_place: in the memory of h,
        which the pass alone has."""
        ops = self.runtime.ops
        branch = _times(self.runtime.model.config.residual_scale, branch, ops)
        return np.add(h, branch, out=h) if in_place else ops.add(h, branch)

    def linears(self, source: _Input, /, **outputs: Linear) -> list[Array]:
        """Products of matrices that read the same tensor, by the names of their outputs:
        [R, M] -> [R, N] each."""
        weights = [w.weights for w in outputs.values() if w.norm is None]
        joint = self._joint_products(source, weights) if len(weights) == len(outputs) > 1 else None
        if joint is None:
            return [self._finished(name, w, self._product(name, source, w)) for name, w in outputs.items()]
        pairs = zip(outputs.items(), joint, strict=True)
        return [self._finished(name, w, y) for (name, w), y in pairs]

    def _joint_products(self, source: _Input, weights: Sequence[Weights]) -> list[Array] | None:
        """The products of a tensor with several matrices by one call of the backend;
        None if it has no call for such matrices."""
        ops, dialect = self.runtime.ops, self.runtime.dialect
        ternary = [w for w in weights if _takes_codes(w, dialect)]
        if len(ternary) == len(weights):
            matrices = [(w.codes, w.scale, w.shape[0]) for w in ternary]
            return ops.ternary_matmuls(*source.codes(), *matrices)
        if ternary or not dialect.ggml_activations:
            return None
        blocks = [w for w in map(_stored, weights) if isinstance(w, Blocks)]
        if len(blocks) < len(weights):
            return None
        return ops.matmuls_blocks_as_llama_cpp(source.x, *((w.data, w.type) for w in blocks))

    def _product(self, name: str, source: _Input, w: Linear) -> Array:
        """A tensor times the matrix of w, after the matrix's norm if it has one."""
        if w.norm is not None:
            normed = self.rms_norm(name + "_in", "", source.x, w.norm, w.norm_eps)
            source = _Input(self, *normed)
        x = None if _takes_codes(w.weights, self.runtime.dialect) else source.x
        return _product(x, w.weights, source.codes, self.runtime)

    def _finished(self, name: str, w: Linear, y: Array) -> Array:
        """A product with its scale and bias."""
        return self.note(name, _with_scale_and_bias(w, y, self.runtime.ops))


class _Input:
    """A tensor that matrices read, and its int8 codes and steps per unit, one for each row: computed once,
    when the first needs them."""

    def __init__(self, step: _Step, name: str, x: Array, *norm: Any) -> None:
        """norm: gain and epsilon of an RMS norm of x that is still to be taken, on the CPU."""
        self._step, self._name, self._x, self._norm = step, name, x, norm
        self._codes: tuple[Array, Array] | None = None

    @classmethod
    def normed(cls, step: _Step, name: str, source: str, x: Array, *norm: Gain) -> _Input:
        """x after a norm, whose gain and bias follow. Where nobody observes it,
        it is normed when it is needed, by one kernel with the quantiser if its codes are."""
        c = step.runtime.model.config
        if step.runtime.ops is cpu and c.norm == "rms" and norm[0] is not None and not step.runtime.observed:
            return cls(step, name, x, norm[0], c.eps)
        return cls(step, *step.norm(name, source, x, *norm))

    @property
    def x(self) -> Array:
        if self._norm:
            self._x, self._norm = cpu.rms_norm(self._x, *self._norm), ()
        return self._x

    def codes(self) -> tuple[Array, Array]:
        if self._codes is None:
            quantize = cpu.quantize_normed if self._norm else self._step.runtime.ops.quantize
            self._codes = codes, scale = quantize(self._x, *self._norm)
            self._step.see(self._name + "_codes", codes)
            self._step.see(self._name + "_scale", scale)
        return self._codes


@dataclass(frozen=True)
class _Way:
    """How rows go through layers: what their attention needs,
    and the parts in which they go through each layer."""

    attend: Attend
    rotations: Rotations | None
    splits: bool  # whether rows may be split, and what a layer makes of them takes their place
    parts: Sequence[Part]

    @classmethod
    def of(cls, step: _Step, rows: int, rotations: Rotations | None, attend: Attend) -> _Way:
        """All rows in one part where tensors are observed, a pass may be recorded, a mask may show later
        rows, or a backend splits none."""
        c = step.runtime.model.config
        splits = rows > 1 and step.runtime.ops.splits_rows and not (step.runtime.observed or attend.repeats)
        size = PART_ROWS * max(1, c.experts // max(1, c.experts_used))
        if not splits or attend.masked or rows <= size:
            return cls(attend, rotations, splits, (ALL,))
        parts = tuple(slice(start, start + size) for start in range(0, rows, size))
        return cls(attend, rotations, splits, parts)


def _layer(step: _Step, h: Array, way: _Way, last: Array | None = None) -> Array:
    """One transformer block: [R, D] -> [R, D], one part of the rows after another,
    as no row attends to later ones.

    last: the rows [B] that are needed after it. If rows may be split and these are few,
    only theirs are computed: [B, D].
    """
    if not way.splits:
        return _block(step, h, way)
    if last is not None and 4 * len(last) <= len(h):  # of more, keys and values apart take longer
        for part in way.parts:
            _attend(step, _attention_input(step, step.weights, h[part]), way, part, queries=False, keys=True)
        return _block(step, step.runtime.ops.take(h, last), way, last, keys=False)
    for part in way.parts:
        h[part] = _block(step, h[part], way, part)
    return h


def _block(step: _Step, h: Array, way: _Way, part: Part = ALL, *, keys: bool = True) -> Array:
    """The block for some rows, in the memory of h where rows may be split.
    keys: whether theirs are still to be written."""
    c = step.runtime.model.config
    if c.parallel_residual:
        read = _attention_input(step, step.weights, h) if c.shared_norm else None
        attended = _attention(step, h, way, part, keys=keys, read=read)
        h = step.added(h, _feed_forward(step, h, read), way.splits)
        return step.note("l_out", step.added(h, attended, way.splits))
    h = step.note("ffn_inp", step.added(h, _attention(step, h, way, part, keys=keys), way.splits))
    return step.note("l_out", step.added(h, _feed_forward(step, h), way.splits))


def _attention_input(step: _Step, w: Layer, h: Array) -> _Input:
    """What attention's matrices read: [R, D], after the norm before them."""
    return _Input.normed(step, "attn_norm", "attn_inp", h, w.attn_norm, w.attn_norm_bias)


def _feed_forward_input(step: _Step, w: Layer, h: Array) -> _Input:
    """The same of the feed-forward's matrices."""
    if step.runtime.model.config.shared_norm:
        return _attention_input(step, w, h)
    return _Input.normed(step, "ffn_norm", "ffn_inp", h, w.ffn_norm, w.ffn_norm_bias)


def _attention(step: _Step, h: Array, way: _Way, part: Part, keys: bool, read: _Input | None = None) -> Array:
    """The attention branch of some rows: [R, D] -> [R, D], without the residual.

    keys: whether theirs are still to be written. read: what its matrices read, if that is known.
    """
    w = step.weights
    x = _attend(step, read or _attention_input(step, w, h), way, part, keys=keys)
    x = step.note("kqv_out", x.reshape(len(x), -1))
    source = _Input.normed(step, "attn_sub_norm", "kqv_out", x, w.attn_sub_norm)
    (x,) = step.linears(source, attn_o_out=w.attn_output)
    return step.norm("attn_post_norm", "attn_o_out", x, w.post_attention_norm)[1]


def _attend(step: _Step, source: _Input, way: _Way, part: Part, *, queries: bool = True, keys: bool) -> Array:
    """Write the keys and values of some rows, and attend by their queries, as far as each is asked for:
    [R, D] -> [R, H, K]."""
    runtime, w = step.runtime, step.weights
    c, dialect, ops = runtime.model.config, runtime.dialect, runtime.ops
    assert step.layer is not None
    asked = {"Qcur": w.attn_q} if queries else {}
    if keys:
        asked |= {"Kcur": w.attn_k, "Vcur": w.attn_v}
    products = step.linears(source, **asked)
    del source  # and its memory, where nothing else reads it
    heads = {name: y.reshape(len(y), -1, c.head_dim) for name, y in zip(asked, products, strict=True)}
    del products
    gains = {"Qcur": w.attn_q_norm, "Kcur": w.attn_k_norm}
    turned = [name for name in gains if name in heads]
    for name in turned:  # the norm of each head, or of all together, if the family has one
        heads[name] = step.rms_norm(f"{name}_normed", "", heads[name], gains[name])[1]
    if way.rotations is not None and c.rotates(step.layer):
        rope = ops.rope if c.rope == "halves" else ops.rope_adjacent
        turn = [rows_of(numbers, part) for numbers in way.rotations[step.layer in c.local_layers]]
        for name in turned:
            heads[name] = step.note(f"{name}_rope", rope(heads[name], *turn))
    rounding = {"Qcur": dialect.rounded, "Kcur": dialect.cached, "Vcur": dialect.cached}
    q, k, v = (rounded(heads[name], ops) if name in heads else None for name, rounded in rounding.items())
    return way.attend(step.layer, q, k, v, part)


def _feed_forward(step: _Step, h: Array, read: _Input | None = None) -> Array:
    """The feed-forward branch: [R, D] -> [R, D], without the residual. read: what its matrices read,
    if that is known."""
    w = step.weights
    if not w.experts:
        y = _down(step, _activated(step, read or _feed_forward_input(step, w, h)))
        return step.norm("ffn_post_norm", "ffn_down", y, w.post_ffw_norm)[1]
    source = read or _feed_forward_input(step, w, h)
    y = _mixture(step, source)
    if w.ffn_gate_inp_shexp is not None:
        y = step.runtime.ops.add(y, _shared_expert(step, source))
    return y


def _activated(step: _Step, source: _Input) -> Array:
    """The feed-forward's hidden numbers: [R, D] -> [R, F]."""
    w, activation, ops = step.weights, step.runtime.model.config.activation, step.runtime.ops
    assert w.ffn_up is not None
    if w.ffn_gate is None:
        (up,) = step.linears(source, ffn_up=w.ffn_up)
        if activation == "gelu":
            return ops.gelu(up)
        return _gelu_tanh(up, step.runtime.dialect, ops)
    gate, up = step.linears(source, ffn_gate=w.ffn_gate, ffn_up=w.ffn_up)
    del source  # and its memory, where nothing else reads it
    return _gated(activation, gate, up, step.runtime.dialect, ops)


def _down(step: _Step, x: Array) -> Array:
    """What the feed-forward's last matrix makes of its hidden numbers: [R, F] -> [R, D]."""
    w = step.weights
    assert w.ffn_down is not None
    x = step.note("ffn_out", x)
    source = _Input.normed(step, "ffn_sub_norm", "ffn_out", x, w.ffn_sub_norm)
    del x  # and its memory
    return step.linears(source, ffn_down=w.ffn_down)[0]


# --- experts ------------------------------------------------------------------------------------------------


def _mixture(step: _Step, source: _Input) -> Array:
    """The weighted sum of each token's experts: [R, D] -> [R, D].

    A slot is one of a token's experts: in tensors [R, k, F],
    slot s of row r belongs to expert number experts[r, s].
    """
    c, ops, w = step.runtime.model.config, step.runtime.ops, step.weights
    assert w.ffn_gate_inp is not None
    (logits,) = step.linears(source, ffn_moe_logits=w.ffn_gate_inp)
    experts = step.note("ffn_moe_topk", ops.top_experts(logits, c.experts_used))
    weights = step.note("ffn_moe_weights", ops.expert_weights(logits, experts, c.normalized_experts))
    if len(source.x) == 1 and ops.repeats and not step.runtime.observed:
        return _mixture_of_row(step, source.x, experts, weights)
    taken = _Slots(step.runtime, experts, w.experts)
    gate = step.note("ffn_moe_gate", taken.products(source.x, source.codes, "ffn_gate"))
    up = step.note("ffn_moe_up", taken.products(source.x, source.codes, "ffn_up"))
    flat = (-1, gate.shape[2])
    hidden = _gated(c.activation, gate.reshape(flat), up.reshape(flat), step.runtime.dialect, ops)
    hidden = step.note("ffn_moe_swiglu", hidden.reshape(gate.shape)).reshape(flat)
    y = step.note("ffn_moe_down", taken.products(hidden, lambda: ops.quantize(hidden), "ffn_down"))
    return step.note("ffn_moe_out", ops.mix(y, weights))


def _mixture_of_row(step: _Step, x: Array, experts: Array, weights: Array) -> Array:
    """The weighted sum of the experts of one token, as launches that can be recorded:
    [1, D], [1, k] x 2 -> [1, D]."""
    out, count = cpu.empty(x.shape), len(step.weights.experts)
    for slot in range(experts.shape[1]):
        cpu.choose(experts[0, slot : slot + 1], count, partial(_mix_in, step, x, weights, slot, out))
    return out


def _mix_in(step: _Step, x: Array, weights: Array, slot: int, out: Array, number: int) -> None:
    """Add what one expert makes of a token to the weighted sum of the slots before."""
    c, expert = step.runtime.model.config, step.weights.experts[number]
    gate, up = step.linears(_Input(step, "", x), gate=expert.ffn_gate, up=expert.ffn_up)
    hidden = _gated(c.activation, gate, up, step.runtime.dialect, step.runtime.ops)
    (y,) = step.linears(_Input(step, "", hidden), down=expert.ffn_down)
    cpu.mix_in(y, weights, slot, out)


def _shared_expert(step: _Step, source: _Input) -> Array:
    """The expert that every token takes, times the sigmoid of its gate: [R, D] -> [R, D]."""
    ops, gate = step.runtime.ops, step.weights.ffn_gate_inp_shexp
    assert gate is not None
    y = _down(step, _activated(step, source))
    score = ops.matmul(source.x, gate[None])
    return step.note("ffn_shexp_out", ops.sigmoid_gate(y, score))


class _Slots:
    """The slots of all rows, grouped by expert: an expert's matrices are read once for all rows that take it.

    A row's product has the same bits in whatever group it is computed.
    """

    def __init__(self, runtime: Runtime, experts: NDArray[np.int32], weights: Sequence[Expert]) -> None:
        self._runtime, self._shape, self._weights = runtime, experts.shape, weights
        flat = runtime.ops.to_host(experts).reshape(-1)
        order = np.argsort(flat, kind="stable")
        taken, starts = np.unique(flat[order], return_index=True)
        self._groups = list(zip(taken.tolist(), np.split(order, starts[1:]), strict=True))

    def products(self, x: Array, codes: Codes, name: str) -> Array:
        """Each slot's input times the matrix `name` of its expert: [R, M], the rows of tokens, or [R*k, M],
        of slots -> [R, k, N]."""
        runtime, count = self._runtime, self._shape[0] * self._shape[1]
        slots_per_row, width = count // len(x), getattr(self._weights[0], name).shape[0]
        out = runtime.ops.empty((count, width))
        for expert, slots in self._groups:
            w = getattr(self._weights[expert], name)
            rows = slots // slots_per_row
            y = _product(x[rows], w.weights, partial(_taken, codes, rows), runtime)
            out[slots] = _with_scale_and_bias(w, y, runtime.ops)
        return out.reshape(*self._shape, -1)


# --- operations whose form depends on the weights' type or on the dialect -----------------------------------


def _times(factor: float | np.float32, x: Array, ops: Backend) -> Array:
    """x times a number of the model's, x itself for 1."""
    return x if factor == 1 else ops.scaled(x, np.float32(factor))


def _embed(table: Table, rows: Array, ops: Backend) -> Array:
    if isinstance(table, Blocks):
        return ops.embed_blocks(table.data, table.type, rows)
    return ops.embed(table, rows)


def _takes_codes(weights: Weights, dialect: Dialect) -> TypeGuard[Ternary]:
    """Whether these weights multiply the int8 codes of x, and not x as ggml rounds it."""
    return isinstance(weights, Ternary) and (not dialect.ggml_activations or weights.blocks is None)


def _stored(weights: Weights) -> Table:
    """Weights that do not take codes: ternary ones as the blocks that they come from,
    all others as they are."""
    if not isinstance(weights, Ternary):
        return weights
    assert weights.blocks is not None, "or it would take codes"
    return weights.blocks


def _taken(codes: Codes, rows: NDArray[np.intp]) -> tuple[Array, Array]:
    """The codes of some rows, and their scales."""
    q, scale = codes()
    return q[rows], scale[rows]


def _with_scale_and_bias(w: Linear, y: Array, ops: Backend) -> Array:
    """A product with the scale and the bias of its linear."""
    if w.scale is not None:
        y = ops.scaled(y, w.scale)
    return y if w.bias is None else ops.add_bias(y, w.bias)


def _product(x: Array, weights: Weights, codes: Codes, runtime: Runtime) -> Array:
    """x times a layer's matrix: [R, M] -> [R, N]. Ternary weights take the codes of x instead."""
    dialect, ops = runtime.dialect, runtime.ops
    if _takes_codes(weights, dialect):
        return ops.ternary_matmul(*codes(), weights.codes, weights.scale, weights.shape[0])
    weights = _stored(weights)
    if isinstance(weights, Blocks) and weights.type in TERNARY_TYPES and not dialect.ggml_activations:
        q, scale = codes()
        y = ops.matmul_blocks(q.astype(np.float32), weights.data, weights.type)
        return y / scale[:, None]
    return _table_product(x, weights, dialect, ops)


def _table_product(x: Array, table: Table, dialect: Dialect, ops: Backend) -> Array:
    """x, rounded as in the dialect, times a table: [R, M], [N, M] -> [R, N]."""
    if not isinstance(table, Blocks):
        return ops.matmul(dialect.matrix_input(x, table, ops), table)
    if dialect.ggml_activations:
        return ops.matmuls_blocks_as_llama_cpp(x, (table.data, table.type))[0]
    return ops.matmul_blocks(x, table.data, table.type)


def _gelu_tanh(x: Array, dialect: Dialect, ops: Backend) -> Array:
    """GELU's approximation by tanh; ggml looks it up in a table from float16 to float16,
    between -10 and 10."""
    if not dialect.ggml_activations:
        return ops.gelu_tanh(x)
    half = ops.round_as(x, "float16")
    inside = ops.round_as(ops.gelu_tanh(half), "float16")
    above_least = np.where(x <= -10, np.float32(0), inside)
    return np.where(x >= 10, x, above_least)


def _gated(activation: Activation, gate: Array, up: Array, dialect: Dialect, ops: Backend) -> Array:
    """The activation of the gate, times up."""
    if activation == "relu2":
        return ops.relu2_gate(gate, up)
    if activation == "silu":
        return ops.silu_gate(gate, up)
    if dialect.ggml_activations:
        return _gelu_tanh(gate, dialect, ops) * up
    return ops.gelu_gate(gate, up)
