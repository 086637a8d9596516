"""The entry points of the forward pass, and a small model for them."""

import numpy as np
from models import random_model

from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.forward_pass import compute_logits, forward, forward_full, forward_incremental

MODEL = random_model(0, context=12)
VOCAB = MODEL.config.vocab
TOKENS = np.arange(8).reshape(2, 4)


def through_cache(model, tokens, lengths=None, **options):
    """`forward` through a fresh cache."""
    return forward(model, tokens, KVCache(model.config, batch=4, capacity=20), lengths, **options)


PATHS = [forward_full, through_cache, forward_incremental, compute_logits]


def filled_cache(*counts, capacity=6):
    """A cache whose slots hold that many tokens each."""
    cache = KVCache(MODEL.config, len(counts), capacity)
    for slot, count in enumerate(counts):
        if count:
            forward(MODEL, [[slot + 1] * count], cache, slots=[slot])
    return cache


def bytes_of(cache):
    """All bytes of a cache."""
    return cache.k.tobytes(), cache.v.tobytes(), cache.lengths.tobytes()
