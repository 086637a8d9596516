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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .cache import KVCache
from .errors import ContextLimitError, EmptyInputError, NonFiniteError, OptionError, ShapeError, TokenRangeError
from .kernels import cpu
from .model import Config, Layer, Model, Ternary

Floats = NDArray[np.float32]
Record = Callable[[str, int | None, NDArray], None]
KeysValues = Callable[[int, Floats, Floats], tuple[NDArray, NDArray]]

PARALLEL_THRESHOLD = 16
"""Longest sequence that mode "auto" runs incrementally. Both modes give the same bits; from a few tokens on the parallel one is faster."""

Mode = Literal["parallel", "incremental", "auto"]


@dataclass(frozen=True)
class Dialect:
    """Where another engine rounds and the definition does not.

    `halves`: keys, values, rotated queries, attention probabilities and the head's input are rounded to float16, as with a float16 KV cache
    and output matrix. `stepped_angles`: RoPE's angles are stepped from pair to pair in float32 instead of being worked out one by one.
    bitnet.cpp's decode does both.
    """

    name: str
    halves: bool
    stepped_angles: bool

    def rounded(self, x: Floats) -> Floats:
        """x as this dialect keeps it."""
        return x.astype(np.float16).astype(np.float32) if self.halves else x

    def angles(self, position: NDArray[np.int64], frequency: NDArray[np.float64]) -> NDArray[np.float64]:
        """RoPE's angles in radians: [R], [K/2] -> [R, K/2]."""
        if not self.stepped_angles:
            return np.multiply.outer(position, frequency)
        step = np.float32(frequency[min(1, frequency.size - 1)])
        factors = np.full((position.size, frequency.size), step)
        factors[:, 0] = position
        return np.multiply.accumulate(factors, axis=1).astype(np.float64)


EXACT = Dialect("exact", halves=False, stepped_angles=False)
BITNET_CPP = Dialect("bitnet.cpp", halves=True, stepped_angles=True)
DIALECTS = {dialect.name: dialect for dialect in (EXACT, BITNET_CPP)}


@dataclass(frozen=True)
class Rows:
    """New tokens of some sequences, end to end."""

    tokens: NDArray[np.int64]  # [R]
    sequence: NDArray[np.int64]  # [R] which of the call's sequences the row belongs to
    slot: NDArray[np.int64]  # [R] where that sequence's keys and values are
    position: NDArray[np.int64]  # [R]
    last: NDArray[np.int64]  # [B] the row of each sequence's last token


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
) -> Floats:
    """Logits of whole sequences, without a KV cache and without a loop over tokens.

    tokens: integers [B, T]. lengths: [B], how many of the T are tokens of each sequence; what follows is padding, which may be anything.
    Returns float32 [B, T, V], zeros where there is padding, or [B, V] of each sequence's last token with `last_only`.

    `record(name, layer, array)` is called at the points llama.cpp labels in its graph, with arrays whose first axis is the rows: tokens of
    all sequences end to end. A recorder that keeps an array must copy it.

    Raises ShapeError, TokenRangeError, EmptyInputError or ContextLimitError before anything is computed, NonFiniteError if the model
    overflows.
    """
    ids, counts = check_tokens(model.config, tokens, lengths)
    rows = _rows(model.config, ids, counts, np.arange(len(counts)), np.zeros_like(counts))

    def keys_values(layer: int, k: Floats, v: Floats) -> tuple[Floats, Floats]:
        whole = np.zeros((2, *ids.shape, *k.shape[1:]), np.float32)
        whole[0, rows.slot, rows.position] = k
        whole[1, rows.slot, rows.position] = v
        return whole[0], whole[1]

    return _shaped(_decoder(model, rows, keys_values, last_only, dialect, ops, record), rows, ids.shape, last_only)


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
) -> Floats:
    """Logits of the next tokens of sequences whose beginnings are in `cache`: prefill, a chunk of it, or decode.

    Arguments and result are those of `forward_full`. Sequence i lives in slot slots[i], by default in slot i, and its new tokens stand at
    positions that go on from what the slot holds. Afterwards the slots hold the new tokens too.

    Raises what `forward_full` raises, CapacityError when the cache is too small, SlotError for a slot that is not there or named twice.
    Whatever is raised, also by `record`, the cache is as it was.
    """
    ids, counts = check_tokens(model.config, tokens, lengths)
    chosen = np.arange(len(counts)) if slots is None else _integers("slots", slots, 1)
    if chosen.shape != counts.shape:
        raise ShapeError(f"slots has shape {chosen.shape}, expected {counts.shape}: one for each sequence")
    if cache.k.shape[0::3] + cache.k.shape[4:] != (model.config.n_layers, model.config.kv_heads, model.config.head_dim):
        raise ShapeError(f"the KV cache has shape {cache.k.shape}, it was made for another model")
    start = cache.reserve(chosen, counts)
    rows = _rows(model.config, ids, counts, chosen, start)

    end = int((start + counts).max())

    def readable(kept: NDArray) -> NDArray:
        """float16 as attention takes it: as its bits, 0.8 times as long for one query as float32; or widened for the plain loops."""
        if kept.dtype == np.float32:
            return kept
        return kept[:, :end].astype(np.float32) if dialect.halves else kept.view(np.int16)

    def keys_values(layer: int, k: Floats, v: Floats) -> tuple[NDArray, NDArray]:
        cache.write(layer, rows.slot, rows.position, k, v)
        return readable(cache.k[layer]), readable(cache.v[layer])

    try:
        logits = _shaped(_decoder(model, rows, keys_values, last_only, dialect, ops, record), rows, ids.shape, last_only)
    except BaseException:
        for slot, length, count in zip(chosen, start, counts, strict=True):
            cache.erase(slot, length, length + count)
        raise
    cache.lengths[chosen] += counts
    return logits


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
    """Logits of whole sequences by way of a KV cache, `chunk` tokens of each at a time. Arguments and result as in `forward_full`."""
    ids, counts = check_tokens(model.config, tokens, lengths)
    _check_context(model.config, counts)
    if chunk < 1:
        raise OptionError(f"chunk is {chunk}, expected at least 1")
    batch, length = ids.shape
    cache = KVCache(model.config, batch, length)
    logits = np.zeros((batch, model.config.vocab) if last_only else (batch, length, model.config.vocab), np.float32)
    for start in range(0, int(counts.max()), chunk):
        active = np.flatnonzero(counts > start)
        part, present = ids[active, start : start + chunk], np.minimum(counts[active] - start, chunk)
        out = forward(model, part, cache, present, slots=active, last_only=last_only, dialect=dialect, ops=ops, record=record)
        if last_only:
            ends = counts[active] <= start + chunk
            logits[active[ends]] = out[ends]
        else:
            logits[active, start : start + chunk] = out
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
) -> Floats:
    """Logits of whole sequences by the path `mode` names; "auto" is parallel for more than `parallel_threshold` tokens. Same bits."""
    if mode not in ("parallel", "incremental", "auto"):
        raise OptionError(f"mode is {mode!r}, expected 'parallel', 'incremental' or 'auto'")
    ids, counts = check_tokens(model.config, tokens, lengths)
    if mode == "parallel" or (mode == "auto" and ids.shape[1] > parallel_threshold):
        return forward_full(model, ids, counts, last_only=last_only, dialect=dialect, ops=ops, record=record)
    return forward_incremental(model, ids, counts, chunk=chunk, last_only=last_only, dialect=dialect, ops=ops, record=record)


def pad(sequences: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sequences of any lengths -> tokens [B, T] filled up with zeros, and lengths [B]."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    tokens = np.zeros((len(lengths), lengths.max(initial=0)), np.int64)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = _integers("tokens", sequence, 1) if len(sequence) else ()
    return tokens, lengths


# --- the border: everything a kernel trusts is checked here ---------------------------------------------------------------------------


def _integers(name: str, values: ArrayLike, axes: int) -> NDArray[np.int64]:
    try:
        array = np.asarray(values)
    except ValueError:
        raise ShapeError(f"{name} is ragged, expected {axes} axes; pad it and give the lengths") from None
    if array.ndim != axes:
        raise ShapeError(f"{name} has shape {array.shape}, expected {axes} axes")
    if array.dtype == object and all(isinstance(value, int) for value in array.flat):
        raise TokenRangeError(f"{name} has a value beyond 64 bits")
    if array.size and array.dtype.kind not in "iu":
        raise ShapeError(f"{name} has dtype {array.dtype}, expected integers")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise TokenRangeError(f"{name} has the value {array.max()}, expected less than 2**63")
    return array.astype(np.int64)


def _is_empty(values: ArrayLike) -> bool:
    try:
        return len(values) == 0  # type: ignore[arg-type]
    except TypeError:
        return False


def check_tokens(config: Config, tokens: ArrayLike, lengths: ArrayLike | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens [B, T] and lengths [B] as int64, with every real token an id of the vocabulary."""
    if _is_empty(tokens):
        raise EmptyInputError("Empty batch provided")
    ids = _integers("tokens", tokens, 2)
    batch, length = ids.shape
    if length == 0:
        raise EmptyInputError("Tokens cannot be empty")
    counts = np.full(batch, length) if lengths is None else _integers("lengths", lengths, 1)
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


# --- the model ------------------------------------------------------------------------------------------------------------------------


def _decoder(
    model: Model, rows: Rows, keys_values: KeysValues, last_only: bool, dialect: Dialect, ops: ModuleType, record: Record
) -> Floats:
    """All layers and the head: [R] -> [R, V], or [B, V] with last_only."""
    h = ops.embed(model.token_embd, rows.tokens)
    record("inp_embd", None, h)
    rotations = ops.rotations(dialect.angles(rows.position, model.rope_frequency))
    for n, weights in enumerate(model.layers):
        h = _layer(model.config, weights, n, h, rows, rotations, keys_values, dialect, ops, record)
    if last_only:
        h = h[rows.last]
    x = ops.rms_norm(h, model.output_norm, model.config.eps)
    record("result_norm", None, x)
    logits = ops.matmul(dialect.rounded(x), model.token_embd if model.output is None else model.output)
    record("result_output", None, logits)
    if ops.has_non_finite(logits):
        row = int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
        row = int(rows.last[row]) if last_only else row
        where = f"sequence {rows.sequence[row]}, position {rows.position[row]}"
        raise NonFiniteError(f"the logits of {where} have NaN or infinity in them: the model leaves float32's range")
    return logits


def _layer(
    c: Config,
    w: Layer,
    n: int,
    h: Floats,
    rows: Rows,
    rotations: tuple[Floats, Floats],
    keys_values: KeysValues,
    dialect: Dialect,
    ops: ModuleType,
    record: Record,
) -> Floats:
    """One transformer block: [R, D] -> [R, D]."""

    def note(name: str, array: Floats) -> Floats:
        record(name, n, array)
        return array

    def quantized(name: str, array: Floats) -> tuple[NDArray[np.int8], Floats]:
        codes, scale = ops.quantize(note(name, array))
        record(name + "_codes", n, codes)
        record(name + "_scale", n, scale)
        return codes, scale

    def linear(x: tuple[NDArray[np.int8], Floats], matrix: Ternary) -> Floats:
        return ops.ternary_matmul(*x, matrix.codes, matrix.scale, matrix.shape[0])

    def heads(x: Floats) -> Floats:
        return x.reshape(len(x), -1, c.head_dim)

    q8 = quantized("attn_norm", ops.rms_norm(h, w.attn_norm, c.eps))
    q = heads(note("Qcur", linear(q8, w.attn_q)))
    k = heads(note("Kcur", linear(q8, w.attn_k)))
    v = heads(note("Vcur", linear(q8, w.attn_v)))
    q = note("Qcur_rope", ops.rope(q, *rotations))
    k = note("Kcur_rope", ops.rope(k, *rotations))
    keys, values = keys_values(n, dialect.rounded(k), dialect.rounded(v))
    attend = ops.attend_halves if dialect.halves else ops.attend
    x = attend(dialect.rounded(q), keys, values, rows.slot, rows.position)
    x = note("kqv_out", x.reshape(len(x), -1))
    q8 = quantized("attn_sub_norm", ops.rms_norm(x, w.attn_sub_norm, c.eps))
    h = note("ffn_inp", h + note("attn_o_out", linear(q8, w.attn_output)))

    q8 = quantized("ffn_norm", ops.rms_norm(h, w.ffn_norm, c.eps))
    gate, up = note("ffn_gate", linear(q8, w.ffn_gate)), note("ffn_up", linear(q8, w.ffn_up))
    x = note("ffn_out", ops.relu2_gate(gate, up))
    q8 = quantized("ffn_sub_norm", ops.rms_norm(x, w.ffn_sub_norm, c.eps))
    return note("l_out", h + note("ffn_down", linear(q8, w.ffn_down)))
