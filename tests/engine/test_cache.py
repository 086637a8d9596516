"""KVCache: its size and memory, float16, what it refuses. What it holds after any calls: properties/test_cache_states.py."""

import copy
import pickle

import numpy as np
import pytest
import resident
from forward_paths import MODEL, bytes_of, filled_cache
from models import assert_same_bits, random_model

from bitnet_np.base.errors import CapacityError, NonFiniteError, OptionError, SlotError
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.forward_pass import forward, forward_full
from bitnet_np.kernels.storage import HostStorage

# --- size -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_size_of_a_cache(dtype):
    c, itemsize = MODEL.config, np.dtype(dtype).itemsize
    cache = KVCache(c, 3, 7, dtype)
    assert cache.k.shape == cache.v.shape == (c.n_layers, 3, 7, c.kv_heads, c.head_dim)
    assert cache.k.dtype == cache.v.dtype == cache.dtype == dtype
    assert (cache.batch, cache.capacity, cache.nbytes) == (3, 7, 2 * c.n_layers * 3 * 7 * c.kv_width * itemsize)
    assert repr(cache) == f"<KVCache of {np.dtype(dtype)}: 0, 0, 0 of 7 positions in 3 slots>"
    cache.resize(5, 11)
    assert (cache.batch, cache.capacity, cache.nbytes) == (5, 11, 2 * c.n_layers * 5 * 11 * c.kv_width * itemsize)
    assert cache.dtype == dtype
    default = KVCache(c)
    assert (default.batch, default.capacity, default.dtype) == (1, c.context, np.float32)


@pytest.mark.skipif(not resident.STATM.exists(), reason="Linux tells what is resident")
def test_the_default_capacity_of_an_absurd_context_takes_no_memory():
    model = random_model(0, context=1 << 20)
    forward(model, [[1, 2, 3]], KVCache(model.config, capacity=3))  # compiles
    before = resident.of_process()
    cache = KVCache(model.config)
    assert cache.nbytes > 1 << 27
    forward(model, [[1, 2, 3]], cache)
    cache.clear()
    assert not cache.k[:, 0, :8].any()
    assert resident.of_process() - before < 1 << 24


def test_a_layers_keys_and_values_are_at_its_number():
    cache, seen, batch = KVCache(MODEL.config, 2, 4), {}, [[1, 2], [3, 4]]
    forward(MODEL, batch, cache, record=lambda name, layer, array: seen.update({(name, layer): array.copy()}))
    for name, array in (("Kcur_rope", cache.k), ("Vcur", cache.v)):
        for layer in range(MODEL.config.n_layers):
            assert array[layer, :, :2].tobytes() == seen[name, layer].tobytes()


# --- float16 --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "name"), [((1e6, 1), "key"), ((1, 1e6), "value"), ((np.nan, 1), "key")])
def test_what_float16_cannot_hold_is_an_error(scale, name):
    rng = np.random.default_rng(4)
    cache = KVCache(MODEL.config, 1, 4, np.float16)
    k, v = (factor * rng.uniform(1, 2, (1, MODEL.config.kv_heads, MODEL.config.head_dim)).astype(np.float32) for factor in scale)
    with pytest.raises(NonFiniteError, match=f"a {name} of layer 1 is not a number within float16's range"):
        cache.storage.write(1, cache.k[1], cache.v[1], np.array([0]), np.array([0]), k, v)


# --- what cannot be -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"batch": 0}, OptionError, "batch is 0, expected at least 1"),
        ({"batch": -1}, OptionError, "batch is -1, expected at least 1"),
        ({"capacity": 0}, OptionError, "capacity is 0, expected at least 1"),
        ({"dtype": np.float64}, OptionError, "dtype is float64, expected float32 or float16"),
        ({"capacity": 2**50}, CapacityError, r"[\d,]+ bytes for 1 sequences of 1125899906842624 positions cannot be had"),
        ({"batch": 2**18, "capacity": 2**40}, CapacityError, r".* bytes for 262144 sequences of \d+ positions cannot be had"),
    ],
)
def test_a_cache_that_cannot_be(how, error, message):
    with pytest.raises(error, match=f"KV cache: {message}"):
        KVCache(**{"config": MODEL.config, **how})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: c.clear(3), SlotError, "slot is 3, expected 0 to 2"),
        (lambda c: c.clear(-1), IndexError, "slot is -1, expected 0 to 2"),
        (lambda c: c.truncate(-1, 0), SlotError, "slot is -1, expected 0 to 2"),
        (lambda c: c.truncate(0, 4), CapacityError, "length of slot 0 is 4, expected 0 to 3"),
        (lambda c: c.truncate(0, -1), CapacityError, "length of slot 0 is -1, expected 0 to 3"),
        (lambda c: c.rollback(0, 4), CapacityError, "count of slot 0 is 4, expected 0 to 3"),
        (lambda c: c.rollback(0, -1), CapacityError, "count of slot 0 is -1, expected 0 to 3"),
        (lambda c: c.rollback(3, 0), SlotError, "slot is 3, expected 0 to 2"),
        (lambda c: c.fork(0, [2]), SlotError, "slot 2 holds 5 positions, clear it before it is copied to"),
        (lambda c: c.fork(0, [3]), SlotError, "slot is 3, expected 0 to 2"),
        (lambda c: c.fork(-1, [1]), SlotError, "slot is -1, expected 0 to 2"),
        (lambda c: c.fork(1, [1]), SlotError, r"slots \[1\] name one slot twice, or the source 1"),
        (lambda c: c.fork(0, [1, 1]), SlotError, r"slots \[1, 1\] name one slot twice"),
        (lambda c: c.fork(0, [1], 4), CapacityError, "length of slot 0 is 4, expected 0 to 3"),
        (lambda c: c.fork(0, [1], -1), CapacityError, "length of slot 0 is -1, expected 0 to 3"),
        (lambda c: c.resize(0, force=True), OptionError, "batch is 0"),
        (lambda c: c.resize(capacity=0, force=True), OptionError, "capacity is 0"),
        (lambda c: c.resize(capacity=2**50), CapacityError, "bytes for 3 sequences of"),
        (lambda c: c.resize(2), SlotError, "slot 2 holds 5 positions, cannot shrink to 2 slots"),
        (lambda c: c.resize(capacity=4), CapacityError, "slot 2 holds 5 positions, cannot shrink to 4"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(change, error, message):
    cache = filled_cache(3, 0, 5, capacity=8)
    before = bytes_of(cache)
    with pytest.raises(error, match=message):
        change(cache)
    assert bytes_of(cache) == before
    assert (cache.batch, cache.capacity) == (3, 8)


# --- storage --------------------------------------------------------------------------------------------------------------------------


class SmallStorage(HostStorage):
    most_positions = 8


def test_a_storage_limits_the_positions():
    cache = KVCache(MODEL.config, 1, 8, storage=SmallStorage())
    for make in (lambda: KVCache(MODEL.config, 1, 9, storage=SmallStorage()), lambda: cache.resize(capacity=9)):
        with pytest.raises(CapacityError, match="KV cache: 9 positions, on the device expected at most 8"):
            make()
    assert cache.capacity == 8


# --- one pass at a slot ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "meddle",
    [
        lambda cache: forward(MODEL, [[7]], cache, slots=[1]),
        lambda cache: cache.truncate(1, 0),
        lambda cache: cache.rollback(1, 1),
        lambda cache: cache.clear(),
        lambda cache: cache.fork(1, [0]),
        lambda cache: cache.resize(1, force=True),
        lambda cache: cache.resize(3, 8),
    ],
)
def test_nobody_changes_a_slot_while_a_pass_writes_to_it(meddle):
    """A recorder that forwards into the same slot left a position of zeros in the middle, and one that shrank the cache an IndexError."""
    cache = KVCache(MODEL.config, 2, 8)
    forward(MODEL, [[1, 2]], cache, slots=[1])
    before = bytes_of(cache)
    with pytest.raises(SlotError, match="a forward pass is writing to slot 1, expected it to end first"):
        forward(MODEL, [[3]], cache, slots=[1], record=lambda *point: meddle(cache))
    assert bytes_of(cache) == before
    meddle(cache)  # which may, afterwards


def test_a_cache_can_be_copied():
    cache = KVCache(MODEL.config, 1, 8)
    forward(MODEL, [[1, 2]], cache)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert_same_bits(forward(MODEL, [[3]], other), forward_full(MODEL, [[1, 2, 3]])[:, 2:])
    assert cache.lengths.tolist() == [2]
