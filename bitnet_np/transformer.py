"""The forward pass: tokens in, logits out, over a backend of kernels (`ops`) that is chosen once, by the caller.

Two paths, which give the same bits:

* `forward_full` takes whole sequences. Each layer's keys and values exist only while that layer runs; all positions go through every
  operation at once, in tiles of several tokens and several queries.
* `forward` continues sequences from a KV cache: any number of new tokens each. Keys and values are written to the cache first and attention
  reads them from there, at positions that depend on what the cache holds. With one new token the matmuls run as matrix-vector products.
  `forward_incremental` calls it chunk by chunk, one token at a time if not told otherwise.

They share the layer's order of operations (`_layer`), because a second copy of it would not be checked by comparing them: spec.py and other
engines' recordings check that. They differ in where keys and values live, in tile shapes, in positions, and in how many rows a kernel sees.

Tokens of all sequences are laid end to end in rows, so padding is never computed and a batch is nothing special to any kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import masks
from .cache import KVCache
from .errors import ContextLimitError, EmptyInputError, NonFiniteError, OptionError, ShapeError, TokenRangeError, UnsupportedError, shown
from .gpu.device import new_cache, on_cpu
from .kernels import blocks, cpu
from .kernels.masks import attend_masked
from .model import Blocks, Config, Layer, Linear, Model, Table, Ternary, Weights
from .model_check import check_model
from .tensor_types import BF16, F16, F32, TERNARY_TYPES
from .validate import instance, integer, integers

Floats = NDArray[np.float32]
Record = Callable[[str, int | None, NDArray], None]
Head = Callable[[Floats], Floats]  # where `ops` has arrays [R, D] -> NumPy's [R, V]
Attend = Callable[[int, Floats, Floats, Floats], Floats]  # layer, [R, H, K], [R, G, K] x 2 -> [R, H, K]

PARALLEL_THRESHOLD = 16
"""Longest sequence that mode "auto" runs incrementally. Both modes give the same bits; from a few tokens on the parallel one is faster."""

BLOCK = 512
"""Tokens of each sequence that `prefill` takes at a time. Larger ones are hardly faster, and take more memory."""

Mode = Literal["parallel", "incremental", "auto"]


@dataclass(frozen=True)
class Dialect:
    """Where another engine rounds and the definition does not.

    `halves`: keys, values, rotated queries, attention probabilities and the head's input are rounded to float16, as with a float16 KV cache
    and output matrix. `stepped_angles`: RoPE's angles are stepped from pair to pair in float32 instead of being worked out one by one.
    bitnet.cpp's decode does both. `ggml_activations`: the input of a matrix is rounded as ggml's CPU backend does for the matrix's type
    (kernels/blocks.py), also where the definition quantises it to int8, and GELU comes from a table of float16. llama.cpp does that, with
    a float32 KV cache and without flash attention, and steps the angles.
    """

    name: str
    halves: bool
    stepped_angles: bool
    ggml_activations: bool = False

    def rounded(self, x: Floats) -> Floats:
        """x as this dialect keeps it."""
        return x.astype(np.float16).astype(np.float32) if self.halves else x

    def seen(self, x: Floats, weights: Table) -> Floats:
        """The input of a matrix as this dialect multiplies it: [R, M] -> [R, M]."""
        if not self.ggml_activations:
            return x
        return blocks.ROUNDINGS[weights.type if isinstance(weights, Blocks) else _TYPES[weights.dtype]](x)

    def matmul(self, x: Floats, table: Table, ops: ModuleType) -> Floats:
        """x times a table: [R, M], [N, M] -> [R, N]."""
        if not isinstance(table, Blocks):
            return ops.matmul(self.seen(x, table), table)
        kernels = _block_kernels(ops)
        multiply = kernels.matmul_as_llama_cpp if self.ggml_activations else kernels.matmul
        return multiply(x, table.data, table.type)

    def gelu_tanh(self, x: Floats, ops: ModuleType) -> Floats:
        """GELU's approximation by tanh; ggml looks it up in a table from float16 to float16, between -10 and 10."""
        if not self.ggml_activations:
            return ops.gelu_tanh(x)
        table = blocks.round_as_f16(ops.gelu_tanh(blocks.round_as_f16(x)))
        return np.where(x >= 10, x, np.where(x <= -10, np.float32(0), table))

    def angles(self, position: NDArray[np.int64], model: Model) -> NDArray[np.float64]:
        """RoPE's angles in radians: [R] -> [R, J]."""
        frequency = model.rope_frequency
        if not self.stepped_angles or not frequency.size:
            return np.multiply.outer(position, frequency)
        c = model.config
        divisors = np.ones(frequency.size, np.float32) if model.rope_factors is None else model.rope_factors
        second = min(1, frequency.size - 1)
        factors = np.full((position.size, frequency.size), np.float32(frequency[second] * divisors[second] * c.rope_scaling))
        factors[:, 0] = position
        angle = np.multiply.accumulate(factors, axis=1) / divisors * np.float32(1 / c.rope_scaling)
        return angle.astype(np.float64)


EXACT = Dialect("exact", halves=False, stepped_angles=False)
BITNET_CPP = Dialect("bitnet.cpp", halves=True, stepped_angles=True)
LLAMA_CPP = Dialect("llama.cpp", halves=False, stepped_angles=True, ggml_activations=True)
DIALECTS = {dialect.name: dialect for dialect in (EXACT, BITNET_CPP, LLAMA_CPP)}
_TYPES = {np.dtype(np.float32): F32, np.dtype(np.float16): F16, np.dtype(np.uint16): BF16}


@dataclass(frozen=True)
class Rows:
    """New tokens of some sequences, end to end."""

    tokens: NDArray[np.int64]  # [R]
    sequence: NDArray[np.int64]  # [R] which of the call's sequences the row belongs to
    slot: NDArray[np.int64]  # [R] where that sequence's keys and values are
    position: NDArray[np.int64]  # [R]
    last: NDArray[np.int64]  # [B] the row of each sequence's last token


@dataclass(frozen=True)
class _Mask:
    """What attention adds to its scores."""

    mask: Floats  # [1 or B, T, T]


def ignore(name: str, layer: int | None, array: NDArray) -> None:
    """Record nothing."""


def forward_full(
    model: Model,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    last_only: bool = False,
    dialect: Dialect = EXACT,
    ops: ModuleType = cpu,
    record: Record = ignore,
    mask: ArrayLike | None = None,
    strict: bool = False,
) -> Floats:
    """Logits of whole sequences, without a KV cache and without a loop over tokens.

    tokens: integers [B, T]. lengths: [B], how many of the T are tokens of each sequence; what follows is padding, which may be anything.
    Returns float32 [B, T, V], zeros where there is padding, or [B, V] of each sequence's last token with `last_only`.

    `record(name, layer, array)` is called at the points llama.cpp labels in its graph, with arrays whose first axis is the rows: tokens of
    all sequences end to end. A recorder that keeps an array must copy it; what it writes into one the pass goes on with.

    mask: which positions each position sees, instead of itself and those before it (in layers with a window, too): [T, T] or
    [1 or B, 1, T, T], bool or additive (masks.py). Padding is never seen. With `strict` it must not show a position what comes later. A
    position that sees nothing gets zeros from attention. A mask that says what is the rule anyway changes no bit, and costs an array and
    time.

    Raises ShapeError (MaskError), TokenRangeError, EmptyInputError or ContextLimitError before anything is computed, NonFiniteError if the
    model overflows, UnsupportedError for a mask in a dialect that rounds probabilities.
    """
    check_place(model, dialect, ops)
    ids, counts = check_tokens(model.config, tokens, lengths)
    rows = _rows(model.config, ids, counts, np.arange(len(counts)), np.zeros_like(counts))
    there = ops.resident(rows)

    attention = _attention(dialect, ops) if mask is None else _masked_attention(mask, counts, ids.shape[1], strict, dialect, ops)

    def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        keys, values = (ops.spread(x, there.slot, there.position, ids.shape) for x in (k, v))
        return attention(q, keys, values, there.slot, there.position, model.config.window_of(layer))

    logits = run_layers(model, there, _rotations(model, rows, dialect, ops), attend, last_only, dialect, ops, _seen(record, ops))
    return _shaped(check_finite(ops.to_host(logits), rows, last_only), rows, ids.shape, last_only)


def forward(
    model: Model,
    tokens: ArrayLike,
    cache: KVCache,
    lengths: ArrayLike | None = None,
    *,
    slots: ArrayLike | None = None,
    last_only: bool = False,
    dialect: Dialect = EXACT,
    ops: ModuleType = cpu,
    record: Record = ignore,
    head: Head | None = None,
) -> Floats:
    """Logits of the next tokens of sequences whose beginnings are in `cache`: prefill, a chunk of it, or decode.

    Arguments and result are those of `forward_full`. Sequence i lives in slot slots[i], by default in slot i, and its new tokens stand at
    positions that go on from what the slot holds. Afterwards the slots hold the new tokens too. `head` makes the logits instead of the
    model's output table and bias; it may leave some out, as -infinity (certified.py).

    Raises what `forward_full` raises, CapacityError when the cache is too small, SlotError for a slot that is not there or named
    twice, or that another pass is writing to. Whatever is raised, also by `record`, the cache is as it was.
    """
    check_place(model, dialect, ops)
    ids, counts = check_tokens(model.config, tokens, lengths)
    chosen = _slots(slots, counts)
    instance("cache", cache, KVCache)
    if cache.k.shape[0::3] + cache.k.shape[4:] != (model.config.n_layers, model.config.kv_heads, model.config.head_dim):
        raise ShapeError(f"the KV cache has shape {cache.k.shape}, it was made for another model")
    with cache.writing(chosen):
        start = cache.reserve(chosen, counts)
        rows = _rows(model.config, ids, counts, chosen, start)
        there = ops.resident(rows)

        end, attention = int((start + counts).max()), _attention(dialect, ops)
        pieces = cache.pieces(rows.slot, rows.position)

        def readable(kept: NDArray) -> NDArray:
            """float16 as attention takes it: as its bits, 0.8 times as long for one query as float32; or widened for the plain loops."""
            if kept.dtype in (np.float32, np.int16):  # the latter on a device
                return kept
            return kept[:, :end].astype(np.float32) if dialect.halves else kept.view(np.int16)

        def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
            def attended(q: Floats, k: Floats, v: Floats, slot: NDArray[np.int64], position: NDArray[np.int64]) -> Floats:
                cache.write(layer, slot, position, k, v)
                ops.mark("kv_write", q.shape[0])
                return attention(q, readable(cache.k[layer]), readable(cache.v[layer]), slot, position, model.config.window_of(layer))

            if len(pieces) == 1:
                return attended(q, k, v, there.slot, there.position)
            return cache.by_pieces(pieces, attended, (q, k, v), rows.slot, rows.position)

        saved = cache.save(chosen, counts)
        try:
            logits = run_layers(
                model, there, _rotations(model, rows, dialect, ops), attend, last_only, dialect, ops, _seen(record, ops), head
            )
            logits = check_finite(logits if head else ops.to_host(logits), rows, last_only, head)
        except BaseException:
            cache.restore(saved)
            raise
        cache.advance(chosen, counts)
        return _shaped(logits, rows, ids.shape, last_only)


def prefill(
    model: Model,
    tokens: ArrayLike,
    cache: KVCache,
    lengths: ArrayLike | None = None,
    *,
    block: int = BLOCK,
    slots: ArrayLike | None = None,
    dialect: Dialect = EXACT,
    ops: ModuleType = cpu,
    head: Head | None = None,
) -> Floats:
    """As `forward` with last_only, at most `block` tokens of each sequence at a time: memory is the cache's and O(B * block), not O(B * T).

    The same bits. Raises what `forward` raises, and OptionError for a block below 1; whatever is raised, the cache is as it was.
    """
    check_place(model, dialect, ops)
    ids, counts = check_tokens(model.config, tokens, lengths)
    block = integer("block", block, 1)
    chosen = _slots(slots, counts)
    _check_context(model.config, instance("cache", cache, KVCache).reserve(chosen, counts) + counts)
    logits: list[tuple[int, Floats]] = []
    saved = cache.save(chosen, counts)
    try:
        for begin, end, active, present in _in_blocks(counts, block):
            ends = counts[active] <= end
            part, wanted = ids[active, begin:end], head if ends.any() else _no_logits
            out = forward(model, part, cache, present, slots=chosen[active], last_only=True, dialect=dialect, ops=ops, head=wanted)
            logits += zip(active[ends], out[ends], strict=True)
    except BaseException:
        cache.restore(saved)
        raise
    return np.stack([row for _, row in sorted(logits, key=lambda item: item[0])])


def _no_logits(x: Floats) -> Floats:
    """For what nobody asked for."""
    return np.zeros((len(x), 1), np.float32)


def _in_blocks(counts: NDArray[np.int64], block: int) -> Iterator[tuple[int, int, NDArray[np.intp], NDArray[np.int64]]]:
    """Sequences of `counts` tokens, a block of each at a time: its first token and the one behind it, who reaches it, with how many."""
    longest = int(counts.max())
    for begin in range(0, longest, block):
        end = min(begin + block, longest)
        active = np.flatnonzero(counts > begin)
        yield begin, end, active, np.minimum(counts[active], end) - begin


def forward_incremental(
    model: Model,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    chunk: int = 1,
    last_only: bool = False,
    dialect: Dialect = EXACT,
    ops: ModuleType = cpu,
    record: Record = ignore,
) -> Floats:
    """Logits of whole sequences by way of a KV cache, `chunk` tokens of each at a time. Arguments and result as in `forward_full`.

    Raises what `forward` raises, and OptionError for a chunk below 1.
    """
    check_place(model, dialect, ops)
    ids, counts = check_tokens(model.config, tokens, lengths)
    _check_context(model.config, counts)
    chunk = integer("chunk", chunk, 1)
    batch, length = ids.shape
    cache = new_cache(model.config, batch, length, ops)
    logits = np.zeros((batch, model.config.vocab) if last_only else (batch, length, model.config.vocab), np.float32)
    for start, end, active, present in _in_blocks(counts, chunk):
        part = ids[active, start:end]
        out = forward(model, part, cache, present, slots=active, last_only=last_only, dialect=dialect, ops=ops, record=record)
        if last_only:
            ends = counts[active] <= end
            logits[active[ends]] = out[ends]
        else:
            logits[active, start:end] = out
    return logits


def compute_logits(
    model: Model,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    mode: Mode = "auto",
    parallel_threshold: int = PARALLEL_THRESHOLD,
    chunk: int = 1,
    last_only: bool = False,
    dialect: Dialect = EXACT,
    ops: ModuleType = cpu,
    record: Record = ignore,
    mask: ArrayLike | None = None,
    strict: bool = False,
) -> Floats:
    """Logits of whole sequences by the path `mode` names; "auto" is parallel for more than `parallel_threshold` tokens. Same bits.

    A mask (as in `forward_full`) needs the parallel path, because it may show a position what comes later; "auto" takes it then.

    Raises what the path raises, and OptionError for another mode, or a mask in mode "incremental".
    """
    if mode not in ("parallel", "incremental", "auto"):
        raise OptionError(f"mode is {mode!r}, expected 'parallel', 'incremental' or 'auto'")
    if mask is not None and mode == "incremental":
        raise OptionError("mode is 'incremental', which takes no mask; expected 'parallel' or 'auto'")
    check_place(model, dialect, ops)
    ids, counts = check_tokens(model.config, tokens, lengths)
    parallel_threshold = integer("parallel_threshold", parallel_threshold, 0)
    if mode == "parallel" or (mode == "auto" and (ids.shape[1] > parallel_threshold or mask is not None)):
        return forward_full(model, ids, counts, last_only=last_only, dialect=dialect, ops=ops, record=record, mask=mask, strict=strict)
    return forward_incremental(model, ids, counts, chunk=chunk, last_only=last_only, dialect=dialect, ops=ops, record=record)


def pad(sequences: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sequences of any lengths -> tokens int64 [B, T] filled up with zeros, and lengths [B].

    Raises ShapeError or TokenRangeError for what are no integers of 64 bits; which ids there are a model says (check_tokens).
    """
    try:
        rows = [integers("tokens", sequence, 1, TokenRangeError) for sequence in sequences]
    except TypeError:  # no iterable
        raise ShapeError(f"tokens are {shown(sequences)}, expected sequences of integers") from None
    lengths = np.array([len(row) for row in rows], np.int64)
    tokens = np.zeros((len(lengths), lengths.max(initial=0)), np.int64)
    for row, found in zip(tokens, rows, strict=True):
        row[: len(found)] = found
    return tokens, lengths


# --- the border: everything a kernel trusts is checked here ---------------------------------------------------------------------------


def check_place(model: Model, dialect: Dialect, ops: ModuleType) -> None:
    """What a pass is of. The arrays of a model on a device were checked before they went there (device.py)."""
    instance("dialect", dialect, Dialect)
    if on_cpu(ops):
        check_model(model)


def _slots(slots: ArrayLike | None, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    chosen = np.arange(len(counts)) if slots is None else integers("slots", slots, 1)
    if chosen.shape != counts.shape:
        raise ShapeError(f"slots has shape {chosen.shape}, expected {counts.shape}: one for each sequence")
    return chosen


def _is_empty(values: ArrayLike) -> bool:
    try:
        return len(values) == 0  # type: ignore[arg-type]
    except TypeError:
        return False


def check_tokens(config: Config, tokens: ArrayLike, lengths: ArrayLike | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens [B, T] and lengths [B] as int64, with every real token an id of the vocabulary.

    Raises EmptyInputError, ShapeError or TokenRangeError.
    """
    if _is_empty(tokens):
        raise EmptyInputError("Empty batch provided")
    ids = integers("tokens", tokens, 2, TokenRangeError)
    batch, length = ids.shape
    if length == 0:
        raise EmptyInputError("Tokens cannot be empty")
    counts = np.full(batch, length) if lengths is None else integers("lengths", lengths, 1)
    if counts.shape != (batch,):
        raise ShapeError(f"lengths has shape {counts.shape}, expected ({batch},): one for each sequence")
    for i, count in enumerate(counts):
        if count < 1:
            raise EmptyInputError(f"Tokens cannot be empty: sequence {i} of the batch has length {count}")
        if count > length:
            raise ShapeError(f"lengths[{i}] is {count}, but tokens has shape {ids.shape}")
    wrong = ((ids < 0) | (ids >= config.vocab)) & (np.arange(length) < counts[:, None])
    if wrong.any():
        b, t = np.argwhere(wrong)[0]
        raise TokenRangeError(f"token {ids[b, t]} at position {t} of sequence {b} is not an id of the vocabulary, 0..{config.vocab - 1}")
    return ids, counts


def _check_context(config: Config, end: NDArray[np.int64]) -> None:
    if end.max() > config.context:
        i = int(end.argmax())
        raise ContextLimitError(f"sequence {i} would have {end[i]} positions, the model's context is {config.context}")


def _rows(config: Config, ids: NDArray[np.int64], counts: NDArray[np.int64], slots: NDArray[np.int64], start: NDArray[np.int64]) -> Rows:
    _check_context(config, start + counts)
    sequence = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return Rows(ids[sequence, offset], sequence, slots[sequence], start[sequence] + offset, counts.cumsum() - 1)


def _shaped(logits: Floats, rows: Rows, shape: tuple[int, ...], last_only: bool) -> Floats:
    """Logits by row -> [B, T, V] with zeros for padding."""
    if last_only:
        return logits
    if len(rows.tokens) == shape[0] * shape[1]:
        return logits.reshape(*shape, -1)
    out = np.zeros((*shape, logits.shape[1]), np.float32)
    column = np.arange(len(rows.sequence)) - np.concatenate([[0], rows.last + 1])[rows.sequence]
    out[rows.sequence, column] = logits
    return out


# --- attention ------------------------------------------------------------------------------------------------------------------------


def _attention(dialect: Dialect, ops: ModuleType) -> Callable[..., Floats]:
    """Causal attention as the dialect rounds it. A backend may say which dialects it has; kernels/cpu.py has them all."""
    known = getattr(ops, "dialects", None)
    if known is not None and dialect.name not in known:
        raise UnsupportedError(f"the dialect is {dialect.name}, expected {' or '.join(known)} on this device")
    return ops.attend_halves if dialect.halves else ops.attend


def _masked_attention(
    mask: ArrayLike, counts: NDArray[np.int64], length: int, strict: bool, dialect: Dialect, ops: ModuleType
) -> Callable[..., Floats]:
    """Attention that sees what a caller's mask says, and no padding."""
    if dialect.halves:
        raise UnsupportedError(f"the dialect {dialect.name} has no attention with a mask")
    additive = masks.as_additive(masks.check(mask, length, length, batch=len(counts), strict=strict))[:, 0]
    if (counts < length).any():
        additive = np.where(np.arange(length) < counts[:, None, None], additive, np.float32(-np.inf))
    there = ops.resident(_Mask(additive)).mask

    def attend(q: Floats, k: Floats, v: Floats, slot: NDArray[np.int64], position: NDArray[np.int64], window: int | None) -> Floats:
        return getattr(ops, "attend_masked", attend_masked)(q, k, v, slot, position, there)  # the mask stands for the window, too

    return attend


# --- the model ------------------------------------------------------------------------------------------------------------------------


def _seen(record: Record, ops: ModuleType) -> Record:
    """A recorder of what `ops` computes: it gets NumPy's arrays, copies of those that are elsewhere."""
    return record if record is ignore else lambda name, layer, array: record(name, layer, ops.to_host(array))


def _rotations(model: Model, rows: Rows, dialect: Dialect, ops: ModuleType) -> tuple[Floats, Floats] | None:
    """Cosines and sines of the rows' positions, [R, J] each; None for a model without RoPE."""
    return ops.rotations(dialect.angles(rows.position, model)) if model.config.rope != "none" else None


@np.errstate(over="ignore", invalid="ignore")  # told at the end, as an error
def run_layers(
    model: Model,
    rows: Rows,
    rotations: tuple[Floats, Floats] | None,
    attend: Attend,
    last_only: bool,
    dialect: Dialect,
    ops: ModuleType,
    record: Record,
    head: Head | None = None,
) -> Floats:
    """All layers and the head: [R] -> [R, V], or [B, V] with last_only. Arrays are where `ops` has them, tokens and logits too."""
    c = model.config
    ops.mark("forward")
    h = _embed(model.token_embd, rows.tokens, ops)
    record("inp_embd", None, h)
    if model.position_embd is not None:
        h = ops.add(h, _embed(model.position_embd, rows.position, ops))
        record("inpL", None, h)
    for n, weights in enumerate(model.layers):
        h = _layer(c, weights, n, h, rotations, attend, dialect, ops, record)
    if last_only:
        h = ops.take(h, rows.last)
    x = _norm(c, h, model.output_norm, model.output_norm_bias, ops)
    record("result_norm", None, x)
    x = dialect.rounded(x)
    if head is not None:
        logits = head(dialect.seen(x, model.head))
    else:
        logits = _product(x, model.head, None, dialect, ops)
        logits = logits if model.output_bias is None else ops.add_bias(logits, model.output_bias)
    record("result_output", None, logits)
    return logits


def check_finite(logits: Floats, rows: Rows, last_only: bool, head: Head | None = None) -> Floats:
    """The logits, if all are finite numbers, else NonFiniteError; a head that leaves some out has -infinity there, not for the largest."""
    largest = logits if head is None else logits.max(axis=1)
    if cpu.has_non_finite(largest):
        row = int(np.flatnonzero(~np.isfinite(largest.reshape(len(logits), -1)).all(axis=1))[0])
        row = int(rows.last[row]) if last_only else row
        where = f"sequence {rows.sequence[row]}, position {rows.position[row]}"
        raise NonFiniteError(f"the logits of {where} have NaN or infinity in them: the model leaves float32's range")
    return logits


class Codes:
    """A tensor as int8 codes and steps per unit, one for each row: worked out once, when the first matrix that needs them asks."""

    def __init__(self, name: str, n: int, x: Floats, ops: ModuleType, record: Record) -> None:
        self._of = name, n, x, ops, record
        self._found: tuple[NDArray[np.int8], Floats] | None = None

    def __call__(self) -> tuple[NDArray[np.int8], Floats]:
        if self._found is None:
            name, n, x, ops, record = self._of
            self._found = codes, scale = ops.quantize(x)
            record(name + "_codes", n, codes)
            record(name + "_scale", n, scale)
        return self._found


def _embed(table: Table, rows: NDArray[np.int64], ops: ModuleType) -> Floats:
    return _block_kernels(ops).embed(table.data, table.type, rows) if isinstance(table, Blocks) else ops.embed(table, rows)


def _block_kernels(ops: ModuleType) -> ModuleType:
    """Those of the backend, or the CPU's where it has none."""
    return getattr(ops, "blocks", blocks)


def _norm(c: Config, x: Floats, gain: Floats, bias: Floats | None, ops: ModuleType) -> Floats:
    """The family's norm: [R, D] -> [R, D]."""
    if c.norm == "rms":
        return ops.rms_norm(x, gain, c.eps)
    return ops.layer_norm(x, gain, bias, c.eps)


def _takes_codes(weights: Weights, dialect: Dialect) -> TypeGuard[Ternary]:
    """Whether the codes of x are what these weights multiply, and not x as ggml rounds it."""
    return isinstance(weights, Ternary) and (not dialect.ggml_activations or weights.blocks is None)


def _product(x: Floats, weights: Weights, codes: Codes | None, dialect: Dialect, ops: ModuleType) -> Floats:
    """x times a matrix: [R, M] -> [R, N]. Ternary weights of a layer take the codes of x instead. A head has no codes."""
    if _takes_codes(weights, dialect):
        assert codes is not None, "a head is never ternary"
        return ops.ternary_matmul(*codes(), weights.codes, weights.scale, weights.shape[0])
    if isinstance(weights, Ternary):
        assert weights.blocks is not None, "or it would take codes"
        weights = weights.blocks
    if isinstance(weights, Blocks) and weights.type in TERNARY_TYPES and codes is not None and not dialect.ggml_activations:
        q, scale = codes()
        return _block_kernels(ops).matmul(q.astype(np.float32), weights.data, weights.type) / scale[:, None]
    return dialect.matmul(x, weights, ops)


def _layer(
    c: Config,
    w: Layer,
    n: int,
    h: Floats,
    rotations: tuple[Floats, Floats] | None,
    attend: Attend,
    dialect: Dialect,
    ops: ModuleType,
    record: Record,
) -> Floats:
    """One transformer block: [R, D] -> [R, D]."""

    def note(name: str, array: Floats) -> Floats:
        record(name, n, array)
        return array

    def linears(source: str, x: Floats, **outputs: Linear) -> list[Floats]:
        """Matrices that read the same input, by the names of what they give."""
        shared = Codes(source, n, x, ops, record)

        def product(name: str, w: Linear) -> Floats:
            if w.norm is None:
                return _product(x, w.weights, shared, dialect, ops)
            own = note(name + "_in", ops.rms_norm(x, w.norm, w.norm_eps or c.eps))
            return _product(own, w.weights, Codes(name + "_in", n, own, ops, record), dialect, ops)

        def finish(name: str, w: Linear, y: Floats) -> Floats:
            y = y if w.scale is None else ops.scaled(y, w.scale)
            return note(name, y if w.bias is None else ops.add_bias(y, w.bias))

        together = [w.weights for w in outputs.values() if w.norm is None and _takes_codes(w.weights, dialect)]
        if len(together) == len(outputs) > 1:
            matrices = ((weights.codes, weights.scale, weights.shape[0]) for weights in together)
            found = zip(outputs.items(), ops.ternary_matmuls(*shared(), *matrices), strict=True)
            return [finish(name, w, y) for (name, w), y in found]
        return [finish(name, w, product(name, w)) for name, w in outputs.items()]

    def heads(x: Floats) -> Floats:
        return x.reshape(len(x), -1, c.head_dim)

    def head_norm(name: str, x: Floats, gain: Floats | None) -> Floats:
        if gain is None:
            return x
        return note(name, ops.rms_norm(x.reshape(-1, c.head_dim), gain, c.eps).reshape(x.shape))

    ops.mark("layer")
    x = note("attn_norm", _norm(c, h, w.attn_norm, w.attn_norm_bias, ops))
    q, k, v = map(heads, linears("attn_norm", x, Qcur=w.attn_q, Kcur=w.attn_k, Vcur=w.attn_v))
    q, k = head_norm("Qcur_normed", q, w.attn_q_norm), head_norm("Kcur_normed", k, w.attn_k_norm)
    if rotations is not None:
        rope = ops.rope if c.rope == "halves" else ops.rope_adjacent
        q, k = note("Qcur_rope", rope(q, *rotations)), note("Kcur_rope", rope(k, *rotations))
    x, source = attend(n, dialect.rounded(q), dialect.rounded(k), dialect.rounded(v)), "kqv_out"
    x = note(source, x.reshape(len(x), -1))
    if w.attn_sub_norm is not None:
        x, source = note("attn_sub_norm", ops.rms_norm(x, w.attn_sub_norm, c.eps)), "attn_sub_norm"
    (attended,) = linears(source, x, attn_o_out=w.attn_output)
    if not c.parallel_residual:
        h = note("ffn_inp", ops.add(h, attended))

    x = note("ffn_norm", _norm(c, h, w.ffn_norm, w.ffn_norm_bias, ops))
    if w.ffn_gate is None:
        (up,) = linears("ffn_norm", x, ffn_up=w.ffn_up)
        x = ops.gelu(up) if c.activation == "gelu" else dialect.gelu_tanh(up, ops)
    else:
        gate, up = linears("ffn_norm", x, ffn_gate=w.ffn_gate, ffn_up=w.ffn_up)
        x = ops.relu2_gate(gate, up) if c.activation == "relu2" else ops.silu_gate(gate, up)
    x, source = note("ffn_out", x), "ffn_out"
    if w.ffn_sub_norm is not None:
        x, source = note("ffn_sub_norm", ops.rms_norm(x, w.ffn_sub_norm, c.eps)), "ffn_sub_norm"
    h = ops.add(h, linears(source, x, ffn_down=w.ffn_down)[0])
    return note("l_out", ops.add(h, attended) if c.parallel_residual else h)
