"""One answer, to the bit: the tests that the project is for.

The reference of every test is one sequence alone, all of it at once, on one thread. Decoding token by token gives the same bits.
So do pieces of any sizes, any batch, any schedule, any KV cache and any number of threads, for every family, dialect and window.
`assert_same_bits` compares float32 bit patterns.
"""

from unittest import mock

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import assert_same_bits, dialects, family_shapes, lengths, padded, random_model, random_tokens, seeds, threads

from bitnet_np.engine import forward_pass, masks, repeats
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.dialects import EXACT
from bitnet_np.engine.forward_pass import compute_logits, forward, forward_full, forward_incremental, prefill

batches = st.lists(lengths, min_size=1, max_size=5)
counts_of_threads = st.sampled_from([1, 1, 1, 2, 3, numba.config.NUMBA_NUM_THREADS])
SEVERAL_BLOCKS = {"width": 256, "ffn": 384, "vocab": 150}  # of rows, each with an owner among the threads


@settings(max_examples=60)
@given(shape=family_shapes(), seed=seeds, length=lengths, dialect=dialects(), patience=st.sampled_from([0, repeats.PATIENCE]))
def test_decoding_token_by_token_equals_the_whole_sequence(shape, seed, length, dialect, patience):
    """By passes of their own, and by those that are recorded and run again."""
    model = random_model(seed, **shape)
    tokens = random_tokens(np.random.default_rng(seed), model, length)
    cache = KVCache(model.config, capacity=length)
    with mock.patch.object(repeats, "PATIENCE", patience):
        decoded = [forward(model, [[token]], cache, dialect=dialect)[0] for token in tokens]
    assert_same_bits(np.concatenate(decoded), forward_full(model, tokens[None], dialect=dialect)[0])


@settings(max_examples=60)
@given(
    shape=family_shapes(),
    seed=seeds,
    batch=batches,
    dialect=dialects(),
    chunk=st.integers(1, 150),
    extra=st.integers(0, 3),
    n_threads=counts_of_threads,
)
@example(shape=SEVERAL_BLOCKS, seed=0, batch=[130, 3, 65], dialect=EXACT, chunk=70, extra=0, n_threads=4)
def test_a_sequence_has_the_same_bits_in_any_batch(shape, seed, batch, dialect, chunk, extra, n_threads):
    """Any companions, itself twice, any padding, at once or in chunks; only the last token, or all."""
    rng = np.random.default_rng(seed)
    model = random_model(seed, **shape)
    sequences = [random_tokens(rng, model, length) for length in batch]
    sequences.append(sequences[rng.integers(len(batch))])
    alone = [forward_full(model, sequence[None], dialect=dialect)[0] for sequence in sequences]
    tokens, counts = padded(rng, sequences, extra)

    with threads(n_threads):
        full = forward_full(model, tokens, counts, dialect=dialect)
        for row, expected in zip(full, alone, strict=True):
            assert_same_bits(row[: len(expected)], expected)
            assert not row[len(expected) :].any()
        assert_same_bits(forward_incremental(model, tokens, counts, chunk=chunk, dialect=dialect), full)

        last = np.array([expected[-1] for expected in alone])
        assert_same_bits(forward_full(model, tokens, counts, last_only=True, dialect=dialect), last)
        assert_same_bits(forward_incremental(model, tokens, counts, chunk=chunk, last_only=True, dialect=dialect), last)


@settings(max_examples=100)
@given(
    shape=family_shapes(),
    seed=seeds,
    batch=st.lists(lengths | st.sampled_from([190, 260]), min_size=1, max_size=5),
    dialect=dialects(),
    half=st.booleans(),
    window=st.none() | st.sampled_from([1, 3, 64, 65, 100]),
    spare=st.integers(0, 2),
    most=st.sampled_from([5, 63, 64, 65, 129, 260]),
    n_threads=counts_of_threads,
)
@example(shape=SEVERAL_BLOCKS, seed=0, batch=[130, 3, 65], dialect=EXACT, half=False, window=None, spare=1, most=129, n_threads=4)
def test_sequences_may_share_a_cache_on_any_schedule(shape, seed, batch, dialect, half, window, spare, most, n_threads):
    """Each call goes on with some of the sequences, in some order, each by as many tokens as it likes: what a server does all day.

    half: whether the cache is float16; window: of every layer, where it is not the family's.
    """
    rng = np.random.default_rng(seed)
    model = random_model(seed, **shape | ({"window": window, "window_layers": None} if window else {}))
    half = half and dialect.kv == "float32"
    whole = dialect.with_cache("float16") if half else dialect
    sequences = [random_tokens(rng, model, length) for length in batch]
    slots = rng.permutation(len(batch) + spare)[: len(batch)]
    dtype = np.float16 if half else np.float32
    cache = KVCache(model.config, len(batch) + spare, max(batch) + spare, dtype)
    alone = [forward_full(model, sequence[None], dialect=whole)[0] for sequence in sequences]

    done = np.zeros(len(batch), np.int64)
    while (waiting := np.flatnonzero(done < batch)).size:
        chosen = rng.permutation(waiting)[: rng.integers(1, waiting.size + 1)]
        left = np.array(batch)[chosen] - done[chosen]
        steps = np.minimum(rng.choice([most, rng.integers(1, most + 1)], len(chosen)), left)
        pieces = [sequences[i][done[i] : done[i] + n] for i, n in zip(chosen, steps, strict=True)]
        tokens, counts = padded(rng, pieces, rng.integers(0, 2))
        way = {"slots": slots[chosen], "dialect": dialect}
        with threads(n_threads):
            match rng.integers(3):
                case 0:
                    last = prefill(model, tokens, cache, counts, block=int(rng.choice([1, 7, 63, 64, 65, 100])), **way)
                case 1:
                    last = forward(model, tokens, cache, counts, last_only=True, **way)
                case 2:
                    out = forward(model, tokens, cache, counts, **way)
                    last = out[np.arange(len(chosen)), counts - 1]
                    for logits, i, n in zip(out, chosen, steps, strict=True):
                        assert_same_bits(logits[:n], alone[i][done[i] : done[i] + n])
        done[chosen] += steps
        assert_same_bits(last, np.array([alone[i][done[i] - 1] for i in chosen]))
    assert_holds(cache, model, sequences, slots, dialect)


@settings(max_examples=60)
@given(
    shape=family_shapes(),
    seed=seeds,
    voices=st.lists(st.tuples(st.integers(0, 1), dialects()), min_size=1, max_size=3),
    counts=st.lists(st.integers(1, 20), min_size=2, max_size=5),
    first=st.sampled_from([0, 0, 55]),
)
def test_each_slot_may_have_a_model_and_a_dialect_of_its_own(shape, seed, voices, counts, first):
    """Decoded some tokens at a time, slots of one voice (a model and a dialect) together: passes are recorded, and run again."""
    rng, models = np.random.default_rng(seed), [random_model(seed + i, **shape) for i in range(2)]
    sequences = [random_tokens(rng, models[0], first + count) for count in counts]
    cache = KVCache(models[0].config, len(counts), first + max(counts))
    alone, done = [], np.full(len(counts), first)
    for slot, sequence in enumerate(sequences):
        which, dialect = voices[slot % len(voices)]
        alone.append(forward_full(models[which], [sequence], dialect=dialect)[0])
        if first:
            forward(models[which], [sequence[:first]], cache, slots=[slot], dialect=dialect)
    with mock.patch.object(repeats, "PATIENCE", 0):
        while (waiting := np.flatnonzero(done < first + np.array(counts))).size:
            voice = rng.choice(waiting) % len(voices)
            chosen = rng.permutation(waiting[waiting % len(voices) == voice])[: rng.integers(1, 4)]
            which, dialect = voices[voice]
            for _ in range(min(rng.integers(1, 9), *(len(sequences[i]) - done[i] for i in chosen))):
                logits = forward(models[which], [[sequences[i][done[i]]] for i in chosen], cache, slots=chosen, dialect=dialect)
                assert_same_bits(logits[:, 0], np.array([alone[i][done[i]] for i in chosen]))
                done[chosen] += 1


@settings(max_examples=40)
@given(
    shape=family_shapes(),
    seed=seeds,
    batch=batches,
    dialect=dialects().filter(lambda dialect: not dialect.in_float16),  # these refuse masks
    shared=st.booleans(),
    causal=st.booleans(),
    chunk=st.integers(1, 150),
)
def test_a_sequence_sees_by_its_mask_alone_in_any_batch(shape, seed, batch, dialect, shared, causal, chunk):
    """Masks of biases, and keys hidden anywhere. shared: one for all sequences. One by which no position sees a later one may also be given
    in pieces, of sequences in any slots of a cache, by the caller and by `forward_incremental`."""
    rng, model = np.random.default_rng(seed), random_model(seed, **shape)
    sequences = [random_tokens(rng, model, length) for length in batch]
    tokens, counts = padded(rng, sequences, rng.integers(0, 3))
    side = tokens.shape[1]
    mask = rng.choice(np.float32([0, 0, 1.5, -np.inf]), (1 if shared else len(batch), 1, side, side))
    if causal:
        mask += masks.causal(side, side)
    own = [mask[i % len(mask), 0, :n, :n] for i, n in enumerate(counts)]
    how = {"dialect": dialect}
    alone = [forward_full(model, [each], mask=seen, **how)[0] for each, seen in zip(sequences, own, strict=True)]
    full = forward_full(model, tokens, counts, mask=mask, **how)
    for row, expected in zip(full, alone, strict=True):
        assert_same_bits(row[: len(expected)], expected)
    assert_same_bits(forward_full(model, tokens, counts, last_only=True, mask=mask, **how), np.array([each[-1] for each in alone]))
    if not causal:
        return
    assert_same_bits(forward_incremental(model, tokens, counts, chunk=chunk, mask=mask, **how), full)

    slots, done = rng.permutation(len(batch) + 1)[: len(batch)], np.zeros(len(batch), np.int64)
    cache = KVCache(model.config, len(batch) + 1, side)
    while (waiting := np.flatnonzero(done < counts)).size:
        chosen = waiting[:1] if shared else rng.permutation(waiting)[: rng.integers(1, waiting.size + 1)]
        steps = np.minimum(rng.integers(1, chunk + 1, chosen.size), counts[chosen] - done[chosen])
        pieces, lengths = padded(rng, [sequences[i][done[i] : done[i] + n] for i, n in zip(chosen, steps, strict=True)])
        rows = np.full((len(chosen), 1, lengths.max(), done[chosen].max() + lengths.max()), -np.inf, np.float32)
        for row, i, n in zip(rows[:, 0], chosen, steps, strict=True):
            row[:n, : done[i] + n] = own[i][done[i] : done[i] + n, : done[i] + n]
        out = forward(model, pieces, cache, lengths, slots=slots[chosen], mask=rows, **how)
        for logits, i, n in zip(out, chosen, steps, strict=True):
            assert_same_bits(logits[:n], alone[i][done[i] : done[i] + n])
        done[chosen] += steps


def assert_holds(cache, model, sequences, slots, dialect):
    """Assert that a cache has the bytes that each sequence leaves alone, and zeros elsewhere."""
    expected = KVCache(model.config, cache.batch, cache.capacity, cache.dtype)
    for sequence, slot in zip(sequences, slots, strict=True):
        forward(model, sequence[None], expected, slots=[slot], last_only=True, dialect=dialect)
    for name in ("k", "v", "lengths"):
        assert getattr(cache, name).tobytes() == getattr(expected, name).tobytes(), name


@pytest.mark.parametrize(("columns", "counts", "full"), [(16, None, False), (17, None, True), (17, [17, 1, 2], True)])
def test_auto_mode_is_parallel_above_the_threshold_and_the_same_bits(columns, counts, full):
    """The threshold counts tokens of the longest sequence. 17 is the first length that is more than the default of 16."""
    model = random_model(2)
    tokens = random_tokens(np.random.default_rng(2), model, 3, columns)
    expected = forward_full(model, tokens, counts)
    for options, parallel in (
        ({}, full),
        ({"mode": "parallel"}, True),
        ({"mode": "incremental"}, False),
        ({"parallel_threshold": 1}, True),
    ):
        with (
            mock.patch.object(forward_pass, "run_whole", wraps=forward_pass.run_whole) as whole,
            mock.patch.object(forward_pass, "run_chunks", wraps=forward_pass.run_chunks) as incremental,
        ):
            assert_same_bits(compute_logits(model, tokens, counts, **options), expected)
        assert (whole.call_count, incremental.call_count) == (int(parallel), int(not parallel))
