"""Nothing comes from the future, from a neighbour, or from what was forgotten."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, family_shapes, lengths, padded, random_model, random_tokens, seeds

from bitnet_np.cache import KVCache
from bitnet_np.dialects import DIALECTS
from bitnet_np.forward_pass import forward, forward_full, forward_incremental

dialects = st.sampled_from(list(DIALECTS.values()))
paths = st.sampled_from([forward_full, forward_incremental])
batches = st.lists(lengths, min_size=2, max_size=4)


def with_another_token(rng, model, tokens, at):
    changed = tokens.copy()
    changed[at] = (changed[at] + rng.integers(1, model.config.vocab)) % model.config.vocab
    return changed


@settings(max_examples=80)
@given(shape=family_shapes(), seed=seeds, length=lengths, dialect=dialects, path=paths, data=st.data())
def test_a_token_changes_its_own_logits_and_none_before_it(shape, seed, length, dialect, path, data):
    rng = np.random.default_rng(seed)
    model = random_model(seed, **shape)
    tokens = random_tokens(rng, model, length)
    t = data.draw(st.integers(0, length - 1), label="changed position")
    before = path(model, tokens[None], dialect=dialect)[0]
    after = path(model, with_another_token(rng, model, tokens, t)[None], dialect=dialect)[0]
    assert_same_bits(after[:t], before[:t])
    assert (after[t] != before[t]).any()


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("length", [20, 63, 64, 65, 130])
def test_every_token_reaches_the_last_one(length, dialect):
    """The other half of causality: the past is not only allowed to matter, it does, also across the chunks of attention."""
    rng = np.random.default_rng(length)
    model = random_model(length, n_layers=1)
    tokens = random_tokens(rng, model, length)
    variants = np.stack([tokens, *(with_another_token(rng, model, tokens, t) for t in range(length))])
    last = forward_full(model, variants, last_only=True, dialect=dialect)
    assert (last[1:] != last[0]).any(axis=1).all()


@settings(max_examples=80)
@given(shape=family_shapes(), seed=seeds, batch=batches, dialect=dialects, path=paths, data=st.data())
def test_a_sequence_changes_nothing_in_another(shape, seed, batch, dialect, path, data):
    rng = np.random.default_rng(seed)
    model = random_model(seed, **shape)
    tokens, counts = padded(rng, [random_tokens(rng, model, length) for length in batch])
    changed = data.draw(st.integers(0, len(batch) - 1), label="changed sequence")
    others = np.arange(len(batch)) != changed
    before = path(model, tokens, counts, dialect=dialect)
    tokens[changed, : counts[changed]] = with_another_token(rng, model, tokens[changed, : counts[changed]], 0)
    after = path(model, tokens, counts, dialect=dialect)
    assert_same_bits(after[others], before[others])
    assert (after[changed] != before[changed]).any()


def filled(model, sequences, dialect, spare=8):
    """A cache with sequence i in slot i, room for `spare` more positions."""
    cache = KVCache(model.config, len(sequences), max(map(len, sequences)) + spare)
    tokens, counts = padded(np.random.default_rng(0), sequences)
    forward(model, tokens, cache, counts, dialect=dialect)
    return cache


@settings(max_examples=80)
@given(shape=family_shapes(), seed=seeds, batch=batches, dialect=dialects, data=st.data())
def test_going_on_from_a_truncated_cache_equals_never_having_gone_further(shape, seed, batch, dialect, data):
    rng = np.random.default_rng(seed)
    model = random_model(seed, **shape)
    sequences = [random_tokens(rng, model, length) for length in batch]
    slot = data.draw(st.integers(0, len(batch) - 1), label="slot")
    kept = data.draw(st.integers(0, batch[slot]), label="positions kept")
    continuation = random_tokens(rng, model, 1, 5)

    cache = filled(model, sequences, dialect)
    cache.truncate(slot, kept)
    logits = forward(model, continuation, cache, slots=[slot], dialect=dialect)[0]

    alone = np.concatenate([sequences[slot][:kept], continuation[0]])[None]
    assert_same_bits(logits, forward_full(model, alone, dialect=dialect)[0, kept:])
    never = KVCache(model.config, capacity=cache.capacity)
    forward(model, alone, never, dialect=dialect)
    assert_same_bits(cache.k[:, slot], never.k[:, 0])
    assert_same_bits(cache.v[:, slot], never.v[:, 0])
    assert cache.lengths[slot] == kept + 5


@settings(max_examples=50)
@given(shape=family_shapes(), seed=seeds, batch=batches, dialect=dialects, data=st.data())
def test_clearing_a_slot_leaves_every_other_byte(shape, seed, batch, dialect, data):
    rng = np.random.default_rng(seed)
    model = random_model(seed, **shape)
    cache = filled(model, [random_tokens(rng, model, length) for length in batch], dialect)
    slot = data.draw(st.integers(0, len(batch) - 1), label="slot")
    others = np.arange(len(batch)) != slot
    k, v, counts = cache.k.copy(), cache.v.copy(), cache.lengths.copy()

    cache.clear(slot)
    assert_same_bits(cache.k[:, others], k[:, others])
    assert_same_bits(cache.v[:, others], v[:, others])
    np.testing.assert_array_equal(cache.lengths, np.where(others, counts, 0))
    assert not cache.k[:, slot].any()
    assert not cache.v[:, slot].any()

    cache.clear()
    for array in (cache.k, cache.v, cache.lengths):
        assert not array.any()
