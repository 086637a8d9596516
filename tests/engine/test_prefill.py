"""Prefill block by block: the bits of one shot, memory that does not grow with the prompt, and all or nothing."""

import sys
import tracemalloc
from unittest import mock

import numpy as np
import pytest
from models import assert_same_bits, random_model, random_tokens

from bitnet_np import KVCache, Metrics, Request, forward, forward_full, forward_incremental, generate, generate_batch, prefill
from bitnet_np.base.errors import ContextLimitError
from bitnet_np.engine import forward_pass
from bitnet_np.engine.forward_pass import BLOCK

SMALL = {"width": 20, "ffn": 36, "heads": 2, "kv_heads": 1, "head_dim": 6, "vocab": 30, "context": 4000}
MODEL = random_model(0, **SMALL)


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1])
def test_generation_prefills_so(length):
    """One prompt alone, and among others in a batch."""
    prompt = random_tokens(np.random.default_rng(0), MODEL, length).tolist()
    expected = forward_full(MODEL, [prompt], last_only=True)
    assert generate(MODEL, prompt, 1)[-1] == expected[0].argmax()
    requests = [Request("short", [1, 2], 3), Request("long", prompt, 2), Request("other", [3], 3)]
    alone = [next(generate_batch(MODEL, [request], 1)).tokens for request in requests]
    assert [done.tokens for done in generate_batch(MODEL, requests, 3)] == alone
    assert_same_bits(prefill(MODEL, [prompt], KVCache(MODEL.config)), expected)


def test_a_block_or_chunk_larger_than_any_prompt_is_one_shot():
    """2^63 and more do not fit into NumPy's integers."""
    expected = forward_full(MODEL, [[1, 2, 3]])
    for large in (2**62, 2**63, 2**80):
        assert_same_bits(forward_incremental(MODEL, [[1, 2, 3]], chunk=large), expected)
        assert_same_bits(prefill(MODEL, [[1, 2, 3]], KVCache(MODEL.config), block=large), expected[:, -1])


def test_logits_of_the_last_tokens_only_are_computed():
    """Not of the end of every block."""
    tokens = random_tokens(np.random.default_rng(0), MODEL, 2, 30)
    with mock.patch.object(forward_pass, "run_output", wraps=forward_pass.run_output) as output:
        out = prefill(MODEL, tokens, KVCache(MODEL.config, 2), [30, 29], block=10)
    assert [len(call.args[1]) for call in output.call_args_list] == [2]
    assert_same_bits(out, forward_full(MODEL, tokens, [30, 29], last_only=True))


@pytest.mark.skipif(sys.platform != "linux", reason="NumPy's own count of memory, as elsewhere; one platform is enough")
def test_memory_does_not_grow_with_the_prompt():
    """Beside the cache, which is there before: eight times the prompt takes next to nothing more."""
    peaks = []
    for length in (1024, 1024, 8192):
        model = random_model(0, **SMALL | {"width": 64, "ffn": 256, "context": 8192})
        cache = KVCache(model.config, 1, length)
        cache.k.fill(0)
        cache.v.fill(0)
        tokens = random_tokens(np.random.default_rng(0), model, 1, length)
        tracemalloc.start()
        prefill(model, tokens, cache)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    one_shot = 8192 * 256 * 4
    assert peaks[2] - peaks[1] < one_shot / 10


# --- what cannot be -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 5])
def test_an_error_in_a_later_block_undoes_the_earlier_ones(held):
    cache = KVCache(MODEL.config, 2)
    tokens = random_tokens(np.random.default_rng(0), MODEL, 1, 600)
    for slot in (0, 1):
        forward(MODEL, tokens[:, : held + slot], cache, slots=[slot]) if held + slot else None
    before = cache.k.tobytes(), cache.v.tobytes(), cache.lengths.tobytes()

    with mock.patch.object(forward_pass, "run_output", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        prefill(MODEL, tokens, cache, block=50)
    assert (cache.k.tobytes(), cache.v.tobytes(), cache.lengths.tobytes()) == before
    assert_same_bits(prefill(MODEL, tokens[:, held:], cache, block=50), forward_full(MODEL, tokens, last_only=True))


def test_the_context_is_checked_before_anything_is_computed():
    model, metrics = random_model(0, **SMALL | {"context": 20}), Metrics()
    with pytest.raises(ContextLimitError, match="21 positions, the model's context is 20"):
        prefill(model, [[1] * 21], KVCache(model.config, 1, 30), block=5, ops=metrics.ops())
    assert metrics.forwards == 0
