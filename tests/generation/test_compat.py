"""Operations under other projects' names: the same results in their layouts."""

import numpy as np
import pytest
from models import assert_same_bits, random_model, random_tokens

from bitnet_np import forward_full
from bitnet_np.base.errors import EmptyInputError, ShapeError, SlotError, TokenRangeError
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.forward_pass import forward
from bitnet_np.generation.compat import clear_batch, forward_batch, forward_packed, set_batch_size

MODEL = random_model(0, width=20, ffn=36, heads=2, kv_heads=1, head_dim=6, vocab=30, context=200)
SEQUENCES = [random_tokens(np.random.default_rng(n), MODEL, n) for n in (3, 70, 1, 12)]


def test_packed_sequences_have_the_bits_of_each_alone():
    cuts = np.cumsum([0, *map(len, SEQUENCES)])
    out = forward_packed(MODEL, np.concatenate(SEQUENCES), cuts)
    assert out.shape == (86, 30)
    for sequence, start, end in zip(SEQUENCES, cuts, cuts[1:], strict=False):
        assert_same_bits(out[start:end], forward_full(MODEL, [sequence])[0])


@pytest.mark.parametrize("cuts", [[], [0], [1, 4], [0, 3], [0, 2, 2, 4], [0, 5, 4], [[0, 4]]])
def test_cumulative_lengths_that_cannot_be(cuts):
    with pytest.raises(ShapeError, match="cu_seqlens"):
        forward_packed(MODEL, [1, 2, 3, 4], np.array(cuts, np.int32))


def test_packed_tokens_are_checked():
    with pytest.raises(TokenRangeError, match="token 30"):
        forward_packed(MODEL, [1, 30], [0, 1, 2])


def test_float64_logits_are_the_float32_ones():
    for sequence, logits in zip(SEQUENCES, forward_batch(MODEL, SEQUENCES), strict=True):
        assert logits.dtype == np.float64
        assert_same_bits(logits.astype(np.float32), forward_full(MODEL, [sequence])[0])
    with pytest.raises(EmptyInputError, match="Empty batch provided"):
        forward_batch(MODEL, [])


def test_a_cache_is_cleared_and_resized_slot_by_slot():
    cache = KVCache(MODEL.config, 3, 8)
    forward(MODEL, [[1, 2]] * 3, cache)
    clear_batch(cache, 1)
    assert cache.lengths.tolist() == [2, 0, 2]
    with pytest.raises(SlotError, match="slot 2 holds 2 positions, cannot shrink to 1 slots"):
        set_batch_size(cache, 1)
    set_batch_size(cache, 1, force=True)
    assert cache.lengths.tolist() == [2]
