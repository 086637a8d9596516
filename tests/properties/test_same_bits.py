"""One answer, to the bit: whichever path computes it, in whichever pieces, in whichever company, on however many threads.

`assert_same_bits` compares float32 bit patterns. The reference in every test is one sequence alone, all of it at once, on one thread.
"""

from unittest import mock

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import assert_same_bits, family_shapes, lengths, padded, random_model, random_tokens, seeds, threads

from bitnet_np import forward_pass
from bitnet_np.cache import KVCache
from bitnet_np.dialects import DIALECTS, EXACT
from bitnet_np.forward_pass import compute_logits, forward, forward_full, forward_incremental

dialects = st.sampled_from(list(DIALECTS.values()))
batches = st.lists(lengths, min_size=1, max_size=5)


def in_chunks(model, tokens, sizes, dialect):
    """Logits [T, V] of one sequence taken in pieces of these sizes, one after the other, and the cache it leaves."""
    cache = KVCache(model.config, capacity=len(tokens))
    pieces = np.split(tokens, np.cumsum(sizes)[:-1])
    assert [len(piece) for piece in pieces] == list(sizes)
    return np.concatenate([forward(model, piece[None], cache, dialect=dialect)[0] for piece in pieces]), cache


def assert_same_cache(a, b):
    assert_same_bits(a.k, b.k)
    assert_same_bits(a.v, b.v)
    np.testing.assert_array_equal(a.lengths, b.lengths)


@settings(max_examples=150)
@given(shape=family_shapes(), seed=seeds, length=lengths, dialect=dialects, cuts=st.sets(st.integers(1, 129), max_size=6))
def test_a_sequence_gives_the_same_bits_in_any_chunks(shape, seed, length, dialect, cuts):
    model = random_model(seed, **shape)
    tokens = random_tokens(np.random.default_rng(seed), model, length)
    whole = forward_full(model, tokens[None], dialect=dialect)[0]

    prefilled, cache = in_chunks(model, tokens, [length], dialect)
    assert_same_bits(prefilled, whole)
    edges = [0, *sorted(cut for cut in cuts if cut < length), length]
    chunked, other = in_chunks(model, tokens, np.diff(edges), dialect)
    assert_same_bits(chunked, whole)
    assert_same_cache(other, cache)


@settings(max_examples=60)
@given(shape=family_shapes(), seed=seeds, length=lengths, dialect=dialects)
def test_a_sequence_gives_the_same_bits_token_by_token(shape, seed, length, dialect):
    model = random_model(seed, **shape)
    tokens = random_tokens(np.random.default_rng(seed), model, length)
    whole, cache = in_chunks(model, tokens, [length], dialect)

    stepped, other = in_chunks(model, tokens, [1] * length, dialect)
    assert_same_bits(stepped, whole)
    assert_same_cache(other, cache)
    assert_same_bits(forward_incremental(model, tokens[None], dialect=dialect)[0], whole)


@settings(max_examples=60)
@given(shape=family_shapes(), seed=seeds, batch=batches, dialect=dialects, chunk=st.integers(1, 150), extra=st.integers(0, 3))
def test_a_sequence_gives_the_same_bits_in_any_batch(shape, seed, batch, dialect, chunk, extra):
    """Any companions, itself twice, any padding, whole or in chunks; only the last token, or all."""
    rng = np.random.default_rng(seed)
    model = random_model(seed, **shape)
    sequences = [random_tokens(rng, model, length) for length in batch]
    sequences.append(sequences[rng.integers(len(batch))])
    alone = [forward_full(model, sequence[None], dialect=dialect)[0] for sequence in sequences]
    tokens, counts = padded(rng, sequences, extra)

    full = forward_full(model, tokens, counts, dialect=dialect)
    for row, expected in zip(full, alone, strict=True):
        assert_same_bits(row[: len(expected)], expected)
        assert not row[len(expected) :].any()
    assert_same_bits(forward_incremental(model, tokens, counts, chunk=chunk, dialect=dialect), full)

    last = np.array([expected[-1] for expected in alone])
    assert_same_bits(forward_full(model, tokens, counts, last_only=True, dialect=dialect), last)
    assert_same_bits(forward_incremental(model, tokens, counts, chunk=chunk, last_only=True, dialect=dialect), last)
    cache = KVCache(model.config, len(counts), tokens.shape[1])
    assert_same_bits(forward(model, tokens, cache, counts, last_only=True, dialect=dialect), last)


@settings(max_examples=60)
@given(shape=family_shapes(), seed=seeds, batch=batches, dialect=dialects, most=st.integers(1, 70), spare=st.integers(0, 2))
def test_sequences_may_share_a_cache_on_any_schedule(shape, seed, batch, dialect, most, spare):
    """Each call goes on with some of the sequences, in some order, each by as many tokens as it likes: what a server does all day."""
    rng = np.random.default_rng(seed)
    model = random_model(seed, **shape)
    sequences = [random_tokens(rng, model, length) for length in batch]
    slots = rng.permutation(len(batch) + spare)[: len(batch)]
    cache = KVCache(model.config, len(batch) + spare, max(batch) + spare)
    alone = [in_chunks(model, sequence, [len(sequence)], dialect) for sequence in sequences]

    done = np.zeros(len(batch), np.int64)
    while (waiting := np.flatnonzero(done < batch)).size:
        chosen = rng.permutation(waiting)[: rng.integers(1, waiting.size + 1)]
        steps = [int(rng.integers(1, min(most, batch[i] - done[i]) + 1)) for i in chosen]
        tokens, counts = padded(rng, [sequences[i][done[i] : done[i] + n] for i, n in zip(chosen, steps, strict=True)])
        out = forward(model, tokens, cache, counts, slots=slots[chosen], dialect=dialect)
        for logits, i, n in zip(out, chosen, steps, strict=True):
            assert_same_bits(logits[:n], alone[i][0][done[i] : done[i] + n])
            done[i] += n
    for (_, expected), slot, length in zip(alone, slots, batch, strict=True):
        for kept, reference in ((cache.k, expected.k), (cache.v, expected.v)):
            assert_same_bits(kept[:, slot, :length], reference[:, 0])
            assert not kept[:, slot, length:].any()
        assert cache.lengths[slot] == length
    assert not cache.k[:, np.setdiff1d(np.arange(cache.batch), slots)].any()


@settings(max_examples=20)
@given(shape=family_shapes(), seed=seeds, batch=batches, dialect=dialects)
@example(shape={"width": 256, "ffn": 384, "vocab": 150}, seed=0, batch=[130, 3, 65], dialect=EXACT)  # several blocks of rows
def test_threads_do_not_change_a_bit(shape, seed, batch, dialect):
    rng = np.random.default_rng(seed)
    model = random_model(seed, **shape)
    tokens, counts = padded(rng, [random_tokens(rng, model, length) for length in batch])

    def everything():
        cache = KVCache(model.config, len(counts), tokens.shape[1])
        prefilled = forward(model, tokens, cache, counts, dialect=dialect)
        assert_same_bits(forward_full(model, tokens, counts, dialect=dialect), prefilled)
        return [prefilled, cache.k, cache.v, forward_incremental(model, tokens[:, :3], np.minimum(counts, 3), dialect=dialect)]

    assert numba.get_num_threads() == 1
    expected = everything()
    for n in {2, 3, numba.config.NUMBA_NUM_THREADS}:
        with threads(n):
            for a, b in zip(everything(), expected, strict=True):
                assert_same_bits(a, b)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("length", [4, 5, 6])
def test_auto_mode_is_parallel_above_the_threshold_and_the_same_bits(length, dialect):
    model = random_model(1)
    tokens = random_tokens(np.random.default_rng(1), model, 2, length)
    expected = forward_full(model, tokens, dialect=dialect)
    with (
        mock.patch.object(forward_pass, "run_whole", wraps=forward_pass.run_whole) as parallel,
        mock.patch.object(forward_pass, "_run_incremental", wraps=forward_pass._run_incremental) as incremental,
    ):
        for mode, full in (("parallel", True), ("incremental", False), ("auto", length > 5)):
            parallel.reset_mock()
            incremental.reset_mock()
            assert_same_bits(compute_logits(model, tokens, mode=mode, parallel_threshold=5, dialect=dialect), expected)
            assert (parallel.call_count, incremental.call_count) == (int(full), int(not full))


def test_the_threshold_counts_tokens_of_the_longest_sequence():
    """17 is the first length that is more than the default of 16."""
    model = random_model(2)
    tokens = random_tokens(np.random.default_rng(2), model, 3, 17)
    for columns, counts, calls in ((16, None, 0), (17, None, 1), (17, [17, 1, 2], 1)):
        with mock.patch.object(forward_pass, "run_whole", wraps=forward_pass.run_whole) as parallel:
            out = compute_logits(model, tokens[:, :columns], counts)
        assert parallel.call_count == calls
        assert_same_bits(out, forward_full(model, tokens[:, :columns], counts))
