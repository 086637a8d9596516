"""The forward pass: tokens in, logits out, over a backend that the caller chooses once.

Two paths, which give the same bits:

* `forward_full` takes whole sequences. Each layer's keys and values exist only while that layer runs; all
  positions go through every operation at once, in tiles of several tokens and several queries. If there are
  many, they go through each layer in parts.
* `forward` continues sequences from a KV cache: any number of new tokens each. Keys and values are written to
  the cache first and attention reads them from there, at positions that depend on what the cache holds. With
  one new token the matmuls run as matrix-vector products. `prefill` and `forward_incremental` proceed chunk
  by chunk, and return the last logits or all.

They share network.py's order of operations, because a second copy of it would not be checked by comparing
them. They differ in where keys and values live, in tile shapes, in positions, and in how many rows a kernel
sees.

Tokens of all sequences are laid end to end in rows, so padding is never computed, and no kernel treats a
batch specially. Arguments are checked once in each public function; the functions below take `Tokens` and a
`Runtime`, which are checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import NonFiniteError, ShapeError, UnsupportedError
from ..base.validate import array_of, choice, flag, instance, integer, integers
from ..kernels import cpu
from ..kernels.float_state import steady
from ..model.records import Config, Model, Pooling
from . import mask_checks
from .backend import Array, Backend
from .cache import Attend, Attention, KVCache, new_cache
from .dialects import EXACT, Dialect
from .network import (
    Floats,
    Record,
    Runtime,
    check_finite,
    ignore,
    run_feed_forward,
    run_layer,
    run_layers,
    run_output,
)
from .pooling import pool
from .tokens import Ints, Rows, Tokens, check_context, check_tokens

PARALLEL_THRESHOLD = 16
"""Longest sequence that mode "auto" runs incrementally. Both modes give the same bits; from a few tokens on
the parallel one is faster."""

BLOCK = 512
"""Tokens of each sequence that `prefill` takes at a time. Larger ones are hardly faster,
and take more memory."""

Path = Literal["parallel", "incremental"]
Mode = Literal[Path, "auto"]


def path_of(mode: Mode, length: int, parallel_threshold: int = PARALLEL_THRESHOLD) -> Path:
    """The path that a mode takes for sequences of `length` tokens:
    "auto" is parallel for more than `parallel_threshold`."""
    if mode == "auto":
        return "parallel" if length > parallel_threshold else "incremental"
    return mode


@steady
def forward_full(
    model: Model,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    last_only: bool = False,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
    record: Record = ignore,
    mask: ArrayLike | None = None,
    strict: bool = False,
) -> Floats:
    """Logits of whole sequences, without a KV cache and without a loop over tokens.

    tokens: integers [B, T]. lengths: [B], how many of the T are tokens of each sequence; what follows is
    padding, which may be anything. Returns float32 [B, T, V], zeros where there is padding, or [B, V] of each
    sequence's last token with `last_only`.

    `record(name, layer, array)` is called at the points llama.cpp labels in its graph, with read-only arrays
    whose first axis is the rows: tokens of all sequences end to end. A recorder that keeps an array must copy
    it. `result_embd_pooled`, the pooled output of an embedding model, has a row for each sequence; it needs
    all rows, so there is none with `last_only` or from a KV cache.

    mask: which positions each position sees, instead of itself and those before it (also in layers with a
    window): [T, T] or [1 or B, 1, T, T], bool or additive (masks.py). Padding is never seen. With `strict` no
    position may see a later one. A position that sees nothing gets zeros from attention. A mask equal to the
    model's own rule changes no bit, and costs an array and time.

    Raises ShapeError (MaskError), TokenRangeError, EmptyInputError or ContextLimitError before anything is
    computed, NonFiniteError if the model overflows, UnsupportedError for a mask in a dialect that rounds
    probabilities.
    """
    runtime = _checked(model, dialect, ops, record, last_only=last_only, strict=strict)
    checked = check_tokens(model.config, tokens, lengths)
    attention = _by_mask(runtime, mask, checked, strict)
    return run_whole(runtime, checked, last_only=last_only, attention=attention)


@steady
def forward_layer(
    model: Model,
    layer: int,
    hidden: ArrayLike,
    *,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
    record: Record = ignore,
    mask: ArrayLike | None = None,
    strict: bool = False,
    cache: KVCache | None = None,
) -> Floats:
    """One layer on whole sequences: its input [B, T, D] float32 -> l_out [B, T, D].
    Position t of a sequence is t.

    The same bits as within `forward_full`, where l_out of one layer is the input of the next.
    Arguments as in `forward_full`.

    cache: of this layer alone, `KVCache(replace(model.config, n_layers=1), batch=B)`. Then the T tokens of
    sequence i follow the positions that slot i holds, with the bits and the masks of `forward`; afterwards
    the slots also hold them.

    Raises ShapeError for another shape or dtype, OptionError for a layer that does not exist,
    ContextLimitError, NonFiniteError if the result has NaN or infinity in it, what `forward_full` raises for
    masks, and what `forward` raises for a cache, which then is as it was.
    """
    runtime = _checked(model, dialect, ops, record, strict=strict)
    layer, shape, h = _layer_input(runtime, layer, hidden)
    # they stand for the sequences' lengths: no token is looked up
    tokens = Tokens.whole(np.zeros(shape[:2], np.int64))

    def run(rows: Rows, attend: Attend) -> Floats:
        out = run_layer(runtime, layer, h, runtime.rotations(rows.position), attend)
        return _layer_output(runtime, layer, out).reshape(shape)

    if cache is None:
        return run(*whole_rows(runtime, tokens, _by_mask(runtime, mask, tokens, strict)))
    check_cache(model.config, cache, layers=1)
    slots = np.arange(len(tokens.lengths))
    attention = _by_mask(runtime, mask, tokens, strict, cache, slots)

    def write(start: Ints) -> Floats:
        return run(*_cached_rows(runtime, tokens, cache, slots, start, attention))

    return cache.append(slots, tokens.lengths, write)


@steady
def feed_forward(
    model: Model,
    layer: int,
    hidden: ArrayLike,
    *,
    norm: bool = True,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
    record: Record = ignore,
) -> Floats:
    """The feed-forward branch of one layer, including experts: its input [B, T, D] float32 -> [B, T, D],
    without the residual.

    norm: whether the norm in front of it runs, if the family has one there; realizar's batched prefill leaves
    it out. With it, ffn_inp (the layer's input where branches are parallel) gives the bits of the branch
    within `forward_full`; without it, ffn_norm does.

    Raises ShapeError, OptionError and NonFiniteError as `forward_layer` does.
    """
    runtime = _checked(model, dialect, ops, record, norm=norm)
    layer, shape, h = _layer_input(runtime, layer, hidden)
    return _layer_output(runtime, layer, run_feed_forward(runtime, layer, h, norm)).reshape(shape)


def _layer_input(runtime: Runtime, layer: int, hidden: ArrayLike) -> tuple[int, tuple[int, ...], Array]:
    """The number of a layer, the shape [B, T, D] of its input,
    and a copy of that as rows [R, D] on the device."""
    config = runtime.model.config
    layer, rows = integer("layer", layer, 0, config.n_layers - 1), array_of("hidden", hidden)
    if rows.ndim != 3 or rows.dtype != np.float32 or 0 in rows.shape or rows.shape[2] != config.width:
        given = f"{rows.dtype} {list(rows.shape)}"
        raise ShapeError(f"hidden is {given}, expected float32 [B, T, {config.width}]")
    copied = np.array(rows.reshape(-1, config.width))  # layers may compute in place
    return layer, rows.shape, runtime.ops.upload(copied)


def _layer_output(runtime: Runtime, layer: int, out: Array) -> Floats:
    """Rows [R, D] on the host. Raises NonFiniteError for NaN and infinity."""
    rows = runtime.ops.to_host(out)
    if cpu.has_non_finite(rows):
        raise NonFiniteError(f"the output of layer {layer} has NaN or infinity in it")
    return rows


@steady
def forward(
    model: Model,
    tokens: ArrayLike,
    cache: KVCache,
    lengths: ArrayLike | None = None,
    *,
    slots: ArrayLike | None = None,
    last_only: bool = False,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
    record: Record = ignore,
    mask: ArrayLike | None = None,
    strict: bool = False,
) -> Floats:
    """Logits of the next tokens of sequences whose beginnings are in `cache`: prefill, a chunk of it,
    or decode.

    Arguments and result are those of `forward_full`. Sequence i lives in slot slots[i], by default in slot i,
    and the positions of its new tokens follow those that the slot holds. Afterwards the slots hold the new
    tokens too.

    mask: as in `forward_full`, [T, S] or [1 or B, 1, T, S]: a row for each new token, a column for each
    position from 0 on, S of them, as many as the longest sequence has if all its T tokens are real. A
    position that is not there yet, or is padding, is never seen.

    Raises what `forward_full` raises, UnsupportedError for a mask with a float16 cache, CapacityError when
    the cache is too small, SlotError for a slot that does not exist, is named twice, or that another pass is
    writing to. Whatever is raised, also by `record`, the cache is as it was.
    """
    runtime = _checked(model, dialect, ops, record, last_only=last_only, strict=strict)
    checked = check_tokens(model.config, tokens, lengths)
    chosen = check_slots(slots, checked)
    check_cache(model.config, cache)
    attention = _by_mask(runtime, mask, checked, strict, cache, chosen)
    return run_cached(runtime, checked, cache, chosen, last_only=last_only, attention=attention)


@steady
def prefill(
    model: Model,
    tokens: ArrayLike,
    cache: KVCache,
    lengths: ArrayLike | None = None,
    *,
    block: int = BLOCK,
    slots: ArrayLike | None = None,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
) -> Floats:
    """As `forward` with last_only, at most `block` tokens of each sequence at a time: memory is the cache's
    and O(B * block), not O(B * T).

    The same bits. Raises what `forward` raises, and OptionError for a block below 1; whatever is raised,
    the cache is as it was.
    """
    runtime = _checked(model, dialect, ops)
    checked = check_tokens(model.config, tokens, lengths)
    block = integer("block", block, 1)
    chosen = check_slots(slots, checked)
    check_cache(model.config, cache)
    return run_prefill(runtime, checked, cache, chosen, block=block)


@steady
def forward_incremental(
    model: Model,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    chunk: int = 1,
    last_only: bool = False,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
    record: Record = ignore,
    mask: ArrayLike | None = None,
) -> Floats:
    """Logits of whole sequences by way of a KV cache, `chunk` tokens of each at a time.
    Arguments and result as in `forward_full`.

    With a mask no position may see a later one, whose key is not there yet.

    Raises what `forward` raises, and OptionError for a chunk below 1.
    """
    runtime = _checked(model, dialect, ops, record, last_only=last_only)
    checked = check_tokens(model.config, tokens, lengths)
    chunk = integer("chunk", chunk, 1)
    return run_chunks(runtime, checked, chunk, mask, last_only=last_only)


@steady
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
    ops: Backend = cpu,
    record: Record = ignore,
    mask: ArrayLike | None = None,
    strict: bool = False,
) -> Floats:
    """Logits of whole sequences by the path `mode` names; "auto" is parallel for more than
    `parallel_threshold` tokens. Same bits.

    With a mask (as in `forward_full`), which may let a position see later ones, "auto" is parallel.

    Raises what the path raises, and OptionError for another mode.
    """
    choice("mode", mode, get_args(Mode))
    runtime = _checked(model, dialect, ops, record, last_only=last_only, strict=strict)
    checked = check_tokens(model.config, tokens, lengths)
    threshold = integer("parallel_threshold", parallel_threshold, 0)
    if path_of(mode, checked.ids.shape[1], 0 if mask is not None else threshold) == "parallel":
        attention = _by_mask(runtime, mask, checked, strict)
        return run_whole(runtime, checked, last_only=last_only, attention=attention)
    return run_chunks(runtime, checked, integer("chunk", chunk, 1), mask, last_only=last_only)


# --- passes over checked tokens -----------------------------------------------------------------------------


def run_whole(
    runtime: Runtime,
    tokens: Tokens,
    *,
    last_only: bool = False,
    attention: Attention | None = None,
) -> Floats:
    """`forward_full` for checked tokens. attention: replaces the causal one;
    it gets a layer's keys and values as [B, T, G, K]."""
    rows, attend = whole_rows(runtime, tokens, attention)
    if runtime.model.config.pooling != "none" and runtime.record is not ignore and not last_only:
        record = _with_pooled(runtime.record, runtime.model.config.pooling, rows)
        runtime = replace(runtime, record=record)
    return _logits(runtime, tokens, rows, attend, last_only)


def _with_pooled(record: Record, pooling: Pooling, rows: Rows) -> Record:
    """The observer, which gets the pooled output [B, D] of whole sequences after the final norm."""

    def observe(name: str, layer: int | None, array: NDArray) -> None:
        record(name, layer, array)
        if name == "result_norm":
            pooled = [pool(sequence, pooling) for sequence in np.split(array, rows.last[:-1] + 1)]
            record("result_embd_pooled", None, np.concatenate(pooled))

    return observe


def whole_rows(runtime: Runtime, tokens: Tokens, attention: Attention | None = None) -> tuple[Rows, Attend]:
    """The rows of whole sequences, sequence i in slot i from position 0 on, and attention over them.

    Keys and values are kept of one layer at a time.
    """
    c, batch = runtime.model.config, len(tokens.lengths)
    rows = Rows.of(c, tokens, np.arange(batch), np.zeros(batch, np.int64))
    storage = runtime.ops.storage()
    keys, values = storage.zeros((1, *tokens.ids.shape, c.kv_heads, c.head_dim), np.float32)
    resident, masked = runtime.ops.resident(rows), attention is not None
    return rows, Attend(storage, keys, values, resident, attention or runtime.attention, masked=masked)


def _cached_rows(
    runtime: Runtime,
    tokens: Tokens,
    cache: KVCache,
    slots: Ints,
    start: Ints,
    attention: Attention | None = None,
) -> tuple[Rows, Attend]:
    """The rows of tokens at the positions from start [B] on, and attention over the cache,
    which their keys and values are written to.

    One more token of each sequence, unobserved, may be computed as the one before was.
    """
    ops, rows = runtime.ops, Rows.of(runtime.model.config, tokens, slots, start)
    one_each = rows.last.size == rows.slot.size
    alike = one_each and ops.repeats and attention is None and not runtime.observed
    attend = Attend(
        cache.storage,
        cache.k,
        cache.v,
        ops.resident(rows),
        attention or runtime.attention,
        ops.mark,
        repeats=cache.repeats if alike else None,
        masked=attention is not None,
    )
    return rows, attend


def _logits(
    runtime: Runtime,
    tokens: Tokens,
    rows: Rows,
    attend: Attend,
    last_only: bool = True,
) -> Floats:
    """Logits of the rows of tokens: [B, T, V], or [B, V] of each sequence's last token."""
    h = run_layers(runtime, runtime.rotations(rows.position), attend, last_only=last_only)
    logits = check_finite(runtime.ops.to_host(run_output(runtime, h)), rows, last_only)
    return logits if last_only else rows.padded(logits, tokens.ids.shape)


def run_cached(
    runtime: Runtime,
    tokens: Tokens,
    cache: KVCache,
    slots: Ints,
    *,
    last_only: bool = False,
    attention: Attention | None = None,
) -> Floats:
    """`forward` for checked tokens; the cache and the rows check slots, capacity and the model's context.
    attention: as in `run_whole`."""

    def write(start: Ints) -> Floats:
        rows, attend = _cached_rows(runtime, tokens, cache, slots, start, attention)
        return _logits(runtime, tokens, rows, attend, last_only)

    return cache.append(slots, tokens.lengths, write)


def run_chunks(
    runtime: Runtime,
    tokens: Tokens,
    chunk: int,
    mask: ArrayLike | None = None,
    *,
    last_only: bool = False,
) -> Floats:
    """`forward_incremental` for checked arguments, apart from the mask."""
    config, (batch, length) = runtime.model.config, tokens.ids.shape
    check_context(config, tokens.lengths)
    visible = None if mask is None else mask_checks.check(mask, length, length, batch=batch, strict=True)
    cache = new_cache(config, batch, length, runtime.ops)
    logits = np.zeros((batch, config.vocab) if last_only else (batch, length, config.vocab), np.float32)
    for piece in tokens.blocks(chunk):
        active, attention, at = piece.active, None, slice(piece.begin, piece.end)
        if visible is not None:
            sequences = active if len(visible) > 1 else slice(None)
            rows, start = visible[sequences, :, at, : piece.end], np.full(len(active), piece.begin)
            attention = _masked(runtime, rows, piece.tokens, active, start)
        out = run_cached(runtime, piece.tokens, cache, active, last_only=last_only, attention=attention)
        if last_only:
            logits[active[piece.last]] = out[piece.last]
        else:
            logits[active, at] = out
    return logits


def run_prefill(runtime: Runtime, tokens: Tokens, cache: KVCache, slots: Ints, block: int = BLOCK) -> Floats:
    """`prefill` for checked arguments."""
    if tokens.ids.shape[1] <= block:
        return run_cached(runtime, tokens, cache, slots, last_only=True)

    def write(start: Ints) -> Floats:
        check_context(runtime.model.config, start + tokens.lengths)
        logits = np.empty((len(slots), runtime.model.config.vocab), np.float32)
        for piece in tokens.blocks(block):
            active = piece.active
            begin = start[active] + piece.begin
            rows, attend = _cached_rows(runtime, piece.tokens, cache, slots[active], begin)
            if piece.last.any():
                logits[active[piece.last]] = _logits(runtime, piece.tokens, rows, attend)[piece.last]
            else:  # no sequence ends here: the cache is filled, and no logits are needed
                run_layers(runtime, runtime.rotations(rows.position), attend, last_only=True)
        return logits

    return cache.append(slots, tokens.lengths, write)


# --- checked arguments --------------------------------------------------------------------------------------


def _checked(model: Model, dialect: Dialect, ops: Backend, record: Record = ignore, **flags: bool) -> Runtime:
    """The runtime of a call, checked with the arguments that do not depend on a model."""
    for name, value in flags.items():
        flag(name, value)
    return Runtime(model, dialect, ops, record).checked()


def check_slots(slots: ArrayLike | None, tokens: Tokens) -> Ints:
    """The slot of each sequence [B], by default its number. Raises ShapeError;
    the cache checks that the slots exist."""
    chosen = np.arange(len(tokens.lengths)) if slots is None else integers("slots", slots, 1)
    if chosen.shape != tokens.lengths.shape:
        expected = f"{tokens.lengths.shape}: one for each sequence"
        raise ShapeError(f"slots has shape {chosen.shape}, expected {expected}")
    return chosen


def check_cache(config: Config, cache: KVCache, layers: int | None = None) -> None:
    """Raises OptionError for a value that is no KVCache, ShapeError for a cache of another model's sizes or
    another number of layers."""
    instance("cache", cache, KVCache)
    expected = layers or config.n_layers, config.kv_heads, config.head_dim
    if (shape := cache.k.shape)[0::3] + shape[4:] != expected:
        sizes = "{} layers with {} key heads of {}".format(*expected)
        raise ShapeError(f"the KV cache has shape {shape}, it was made for another model, expected {sizes}")


def _by_mask(
    runtime: Runtime,
    mask: ArrayLike | None,
    tokens: Tokens,
    strict: bool,
    cache: KVCache | None = None,
    slots: Ints | None = None,
) -> Attention | None:
    """Attention by a caller's mask, if there is one: of whole sequences,
    or of the positions that a cache will hold.

    Raises MaskError, UnsupportedError, and what `KVCache.reserve` does.
    """
    if mask is None:
        return None
    batch, length = tokens.ids.shape
    if cache is None or slots is None:
        slots, start = np.arange(batch), np.zeros(batch, np.int64)
    elif cache.dtype == np.float16:
        raise UnsupportedError("the KV cache is float16, which takes no mask, expected float32")
    else:
        start = cache.reserve(slots, tokens.lengths)
    visible = mask_checks.check(mask, length, int(start.max()) + length, batch=batch)
    if strict:
        mask_checks.check_causal(visible, start)
    return _masked(runtime, visible, tokens, slots, start)


def _masked(runtime: Runtime, mask: NDArray, tokens: Tokens, slots: Ints, start: Ints) -> Attention:
    """Attention by a checked mask [1 or B, 1, T, S], without padding:
    of new tokens of sequences that hold start [B] positions.

    Raises UnsupportedError for a dialect that rounds probabilities.
    """
    if runtime.dialect.in_float16:
        raise UnsupportedError(f"the dialect {runtime.dialect.name} has no attention with a mask")
    end = start + tokens.lengths
    additive = mask_checks.as_additive(mask)[:, 0, :, : end.max()]
    if len(additive) > 1 or (end < end.max()).any():  # one for each slot, which hides keys past its end
        hidden = np.arange(end.max()) >= end[:, None, None]
        by_slot = np.full((slots.max() + 1, *additive.shape[1:]), -np.inf, np.float32)
        by_slot[slots] = np.where(hidden, np.float32(-np.inf), additive)
        additive = by_slot
    resident = runtime.ops.upload(additive)  # [1 or slots, T, S]
    begin = np.zeros(slots.max() + 1, np.int64)
    begin[slots] = start
    on_host = isinstance(resident, np.ndarray)
    # a device takes all rows at once
    rows = None if on_host else runtime.ops.upload(np.concatenate([np.arange(n) for n in tokens.lengths]))

    def attend(layer: int, q: Array, keys: Array, values: Array, slot: Array, position: Array) -> Array:
        row = position - begin[slot] if on_host else rows
        # the mask includes the window
        return runtime.ops.attend_masked(q, keys, values, slot, row, resident, *runtime.scoring)

    return attend
