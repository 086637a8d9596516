"""Sliding windows: layers that see the last tokens only, and a KV cache that holds no more than those."""

import numpy as np
import pytest
from models import random_model

from bitnet_np import KVCache, forward, forward_full
from bitnet_np.base.errors import CapacityError, OptionError
from bitnet_np.kernels.scalar import CHUNK

SMALL = {"width": 20, "ffn": 36, "heads": 2, "kv_heads": 1, "head_dim": 6, "vocab": 30, "context": 2000}
WINDOWS = [1, 2, 5, 63, 64, 65, 66, 128, 129]


def windowed(window, seed=0, **shape):
    return random_model(seed, **SMALL | shape, window=window)


# --- the rule -------------------------------------------------------------------------------------------------------------------------


def test_a_window_reaches_as_far_back_as_the_layers_carry_it():
    """Two layers of 3: position t depends on t - 4 and on, not on t - 5. One layer of 3 below one that sees all: on everything."""
    tokens = np.array([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
    changed = tokens.copy()
    changed[0, 4] = 20
    for layers, reach in ((None, 4), ((0,), 99)):
        model = windowed(3, window_layers=layers)
        differ = (forward_full(model, tokens) != forward_full(model, changed)).any(axis=-1)[0]
        assert differ.tolist() == [4 <= t <= 4 + reach for t in range(11)]


# --- the ring -------------------------------------------------------------------------------------------------------------------------


def ring(model, batch=1, capacity=2000, dtype=np.float32):
    return KVCache(model.config, batch, capacity, dtype, ring=True)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_ring_is_as_small_as_it_says(window):
    model = windowed(window)
    places = ring(model).k.shape[2]
    assert places % CHUNK == 0
    assert window <= places < window + 2 * CHUNK
    assert ring(model).nbytes == 2 * 4 * model.config.n_layers * places * model.config.kv_width
    assert ring(model, capacity=10).k.shape[2] == 10


@pytest.mark.parametrize("change", [{"window": None}, {"window": 4, "window_layers": (0,)}])
def test_a_ring_needs_a_window_in_every_layer(change):
    with pytest.raises(OptionError, match="a ring is for a model with a window in every layer"):
        ring(random_model(0, **SMALL, **change))


@pytest.mark.parametrize("length", [0, 280, 300])
def test_a_part_of_a_ring_is_forked_as_if_the_rest_had_never_been(length):
    """Nothing past its end, whatever the source has in those places."""
    model = windowed(8)
    cache = ring(model, 2, 400)
    forward(model, np.arange(300)[None] % model.config.vocab, cache, slots=[0], last_only=True)
    cache.fork(0, [1], length)
    cache.truncate(0, length)
    np.testing.assert_array_equal(cache.k[:, 1], cache.k[:, 0])
    np.testing.assert_array_equal(cache.v[:, 1], cache.v[:, 0])


def test_a_ring_says_what_it_has_forgotten():
    cache = ring(windowed(64), 2, 400)
    forward(windowed(64), np.ones((1, 300), int), cache, slots=[0])
    cache.fork(0, [1])
    for change in (
        lambda: cache.truncate(0, 200),
        lambda: cache.truncate(1, 200),
        lambda: cache.fork(0, [], 200),
        lambda: cache.resize(capacity=200, force=True),
    ):
        with pytest.raises(
            CapacityError, match=r"slot [01] has forgotten the positions before 172, and after 200 a window of 64 needs them"
        ):
            change()
    assert (cache.capacity, cache.lengths.tolist()) == (400, [300, 300])
