"""Dialects: other engines' roundings are where they are said to be."""

import bounds
import numpy as np
from forward_paths import MODEL
from models import assert_same_bits, random_tokens
from recorder import Recorder

from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.dialects import BITNET_CPP, EXACT
from bitnet_np.engine.forward_pass import forward
from bitnet_np.kernels import cpu


def test_dialects_round_where_they_say():
    """In bitnet.cpp's dialect the cache holds float16 numbers and the head reads them. What is recorded is not rounded yet."""
    tokens = random_tokens(np.random.default_rng(0), MODEL, 1, 10)
    for dialect, rounds in ((EXACT, False), (BITNET_CPP, True)):
        cache, seen = KVCache(MODEL.config), Recorder()
        logits = forward(MODEL, tokens, cache, dialect=dialect, record=seen)
        for array in (cache.k, cache.v):
            assert (array == array.astype(np.float16)).all() == rounds
        x = seen["result_norm", None]
        assert (x != x.astype(np.float16)).any()
        assert_same_bits(logits[0], cpu.matmul(x.astype(np.float16).astype(np.float32) if rounds else x, MODEL.token_embd))
    exact, stepped = (dialect.angles(np.arange(300), MODEL) for dialect in (EXACT, BITNET_CPP))
    np.testing.assert_array_equal(exact, np.multiply.outer(np.arange(300), MODEL.rope_frequency))
    np.testing.assert_array_equal(stepped[:, 0], np.arange(300))
    np.testing.assert_allclose(stepped, exact, rtol=MODEL.rope_frequency.size * 2 * bounds.U)
    assert (stepped != exact).mean() > 0.5
