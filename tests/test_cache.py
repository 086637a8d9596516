"""KVCache: what it keeps and what it forgets, to the byte. test_forward_pass.py has the forward passes that it cannot hold."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import resident
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, random_model, random_tokens, seeds, shapes

from bitnet_np.cache import KVCache
from bitnet_np.compat import clear_batch, set_batch_size
from bitnet_np.dialects import BITNET_CPP, DIALECTS, EXACT
from bitnet_np.errors import CapacityError, NonFiniteError, OptionError, SlotError
from bitnet_np.forward_pass import forward, forward_full
from bitnet_np.kernels.storage import HostStorage
from bitnet_np.model import frozen

MODEL = random_model(0, width=32, ffn=36, heads=2, kv_heads=1, head_dim=6, vocab=20)


def holding(*lengths, capacity=8, dtype=np.float32):
    """A cache whose slots have these lengths, filled with random numbers."""
    cache = KVCache(MODEL.config, len(lengths), capacity, dtype)
    rng = np.random.default_rng(len(lengths))
    for slot, length in enumerate(lengths):
        for array in (cache.k, cache.v):
            array[:, slot, :length] = rng.standard_normal(array[:, slot, :length].shape)
        cache.lengths[slot] = length
    return cache


def contents(cache):
    """The bytes that each slot holds, after a check that all others are zero."""
    out = []
    for slot, length in enumerate(cache.lengths):
        assert not cache.k[:, slot, length:].any()
        assert not cache.v[:, slot, length:].any()
        out.append((cache.k[:, slot, :length].tobytes(), cache.v[:, slot, :length].tobytes()))
    return out


def prefix(cache, slot, length):
    """The bytes of a slot's first positions."""
    return cache.k[:, slot, :length].tobytes(), cache.v[:, slot, :length].tobytes()


# --- slots ----------------------------------------------------------------------------------------------------------------------------


def test_a_slot_is_cleared_and_no_other_changes():
    for clear in (KVCache.clear, clear_batch):
        cache = holding(3, 8, 5)
        before = contents(cache)
        clear(cache, 1)
        assert cache.lengths.tolist() == [3, 0, 5]
        assert contents(cache) == [before[0], (b"", b""), before[2]]
    cache.clear()
    assert not cache.lengths.any()
    assert not cache.k.any()
    assert not cache.v.any()


def test_a_slot_is_cut_to_a_length_or_by_a_number():
    cache = holding(3, 8, 5)
    before = contents(cache)
    first_six = prefix(cache, 1, 6)
    cache.truncate(1, 6)
    assert contents(cache) == [before[0], first_six, before[2]]
    first_two = prefix(cache, 1, 2)
    cache.rollback(1, 0)
    cache.rollback(1, 4)
    assert cache.lengths.tolist() == [3, 2, 5]
    assert contents(cache) == [before[0], first_two, before[2]]


def test_what_was_rolled_back_leaves_no_trace():
    """Tokens are tried and rolled back. The cache, and the logits that follow, are as if they had never been tried."""
    tokens = random_tokens(np.random.default_rng(1), MODEL, 12)
    straight, tried = KVCache(MODEL.config, 1, 20), KVCache(MODEL.config, 1, 20)
    forward(MODEL, tokens[None, :7], straight)
    forward(MODEL, tokens[None, :7], tried)
    forward(MODEL, [[1, 2, 3, 4]], tried)
    tried.rollback(0, 4)
    assert contents(tried) == contents(straight)
    assert_same_bits(forward(MODEL, tokens[None, 7:], tried), forward(MODEL, tokens[None, 7:], straight))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_fork_goes_on_as_its_source_would(dtype):
    tokens = random_tokens(np.random.default_rng(2), MODEL, 20)
    alone, cache = KVCache(MODEL.config, 1, 20, dtype), KVCache(MODEL.config, 4, 20, dtype)
    forward(MODEL, tokens[None, :9], cache, slots=[2])
    forward(MODEL, [[5]], cache, slots=[1])
    cache.fork(2, [0])
    cache.fork(2, [3], 4)
    assert cache.lengths.tolist() == [9, 1, 9, 4]
    assert contents(cache)[3] == prefix(cache, 2, 4)
    expected = forward(MODEL, tokens[None], alone)[0]
    out = forward(MODEL, [tokens[9:], [*tokens[4:15]]], cache, slots=[0, 3])
    assert_same_bits(out[0], expected[9:])
    assert_same_bits(out[1], expected[4:15])
    assert contents(cache)[0] == contents(alone)[0]
    assert prefix(cache, 2, 9) == prefix(alone, 0, 9)
    cache.fork(2, [])
    assert cache.lengths.tolist() == [20, 1, 9, 15]


def test_a_slot_that_is_not_there_is_an_index_error_too():
    with pytest.raises(IndexError):
        forward(MODEL, [[1]], KVCache(MODEL.config), slots=[1])
    for call in (KVCache.clear, lambda cache, slot: cache.truncate(slot, 0)):
        for slot in (-1, 1):
            with pytest.raises(SlotError, match=f"KV cache: slot {slot} does not exist, there are 1"):
                call(KVCache(MODEL.config), slot)


def test_a_cache_can_be_cut_but_not_grown():
    cache = holding(3)
    before = contents(cache)
    for length in (4, -1):
        with pytest.raises(CapacityError, match=f"KV cache: slot 0 holds 3 positions, cannot be cut to {length}"):
            cache.truncate(0, length)
    cache.truncate(0, 3)
    assert contents(cache) == before


# --- size -----------------------------------------------------------------------------------------------------------------------------


def test_the_size_of_a_cache():
    c = MODEL.config
    cache = KVCache(c, batch=3, capacity=7)
    assert cache.k.shape == cache.v.shape == (c.n_layers, 3, 7, c.kv_heads, c.head_dim)
    assert cache.nbytes == 2 * c.n_layers * 3 * 7 * c.kv_heads * c.head_dim * 4
    assert (cache.batch, cache.capacity) == (3, 7)
    assert KVCache(c).k.shape[1:3] == (1, c.context)
    for name, value in (("batch", 0), ("capacity", 0), ("batch", -1)):
        with pytest.raises(OptionError, match=f"KV cache: {name} is {value}, expected at least 1"):
            KVCache(c, **{name: value})
    for capacity in (2**50, 2**62):
        with pytest.raises(CapacityError, match=f"{2 * 4 * c.n_layers * capacity * c.kv_width:,} bytes for 1 sequences of {capacity} pos"):
            KVCache(c, capacity=capacity)


@pytest.mark.skipif(not resident.STATM.exists(), reason="Linux tells what is resident")
def test_the_default_capacity_of_an_absurd_context_takes_no_memory():
    model = random_model(0, context=1 << 20)
    before = resident.of_process()
    cache = KVCache(model.config)
    assert cache.capacity == 1 << 20
    assert cache.nbytes > 1 << 27
    forward(model, [[1, 2, 3]], cache)
    cache.clear()
    assert not cache.k[:, 0, :8].any()
    assert resident.of_process() - before < 1 << 24


def test_a_cache_that_cannot_be_had_is_an_error():
    config = replace(MODEL.config, context=1 << 20, kv_heads=1, head_dim=1 << 12, heads=1, n_layers=1 << 12)
    with pytest.raises(
        CapacityError, match=r"KV cache: 36,893,488,147,419,103,232 bytes for 262144 sequences of 1048576 positions cannot be had"
    ):
        KVCache(config, 1 << 18)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_cache_grows_and_keeps_what_it_holds(dtype):
    cache = holding(3, 0, 5, dtype=dtype)
    before = contents(cache)
    cache.resize(5, 11)
    assert (cache.batch, cache.capacity, cache.dtype) == (5, 11, dtype)
    assert cache.lengths.tolist() == [3, 0, 5, 0, 0]
    assert contents(cache) == [*before, (b"", b""), (b"", b"")]
    assert cache.nbytes == 2 * MODEL.config.n_layers * 5 * 11 * MODEL.config.kv_width * np.dtype(dtype).itemsize
    forward(MODEL, [[1] * 11], cache, slots=[4])


def test_a_cache_shrinks_where_nothing_is_lost():
    cache = holding(3, 5, 0)
    before = contents(cache)
    set_batch_size(cache, 2)
    cache.resize(capacity=5)
    assert (cache.batch, cache.capacity) == (2, 5)
    assert contents(cache) == before[:2]


def test_a_slot_in_use_goes_only_by_force():
    cache = holding(3, 5, 1)
    before = contents(cache)
    for shrink, error, message in (
        (lambda force: set_batch_size(cache, 2, force=force), SlotError, "slot 2 holds 1 positions, cannot shrink to 2 slots"),
        (lambda force: cache.resize(capacity=4, force=force), CapacityError, "slot 1 holds 5 positions, cannot shrink to 4"),
    ):
        with pytest.raises(error, match=message):
            shrink(False)
        assert contents(cache) == before[: cache.batch]
        shrink(True)
        before = before[:2]
    assert (cache.batch, cache.capacity, cache.lengths.tolist()) == (2, 4, [3, 4])
    assert contents(cache) == [before[0], prefix(holding(3, 5, 1), 1, 4)]


@settings(max_examples=100)
@given(data=st.data(), dtype=st.sampled_from([np.float32, np.float16]))
def test_whatever_is_done_to_a_cache_every_slot_holds_what_it_should(data, dtype):
    """A list of numbers for each slot says what it should hold. Everything past that must be zero."""
    cache = KVCache(MODEL.config, 3, 6, dtype)
    expected = [[], [], []]
    number = 0
    for _ in range(data.draw(st.integers(1, 12))):
        slot = data.draw(st.integers(0, cache.batch - 1))
        held = expected[slot]
        match data.draw(st.sampled_from(["write", "write", "truncate", "rollback", "clear", "fork", "resize"])):
            case "write" if len(held) < cache.capacity:
                number += 1
                key = np.full((1, MODEL.config.kv_heads, MODEL.config.head_dim), number, np.float32)
                for layer in range(MODEL.config.n_layers):
                    cache.write(layer, np.array([slot]), np.array([len(held)]), key, -key)
                cache.lengths[slot] += 1
                held.append(number)
            case "truncate":
                length = data.draw(st.integers(0, len(held)))
                cache.truncate(slot, length)
                del held[length:]
            case "rollback":
                count = data.draw(st.integers(0, len(held)))
                cache.rollback(slot, count)
                del held[len(held) - count :]
            case "clear":
                cache.clear(slot)
                held.clear()
            case "fork":
                targets = [i for i, other in enumerate(expected) if i != slot and not other]
                cache.fork(slot, targets)
                for i in targets:
                    expected[i] = list(held)
            case "resize":
                batch, capacity = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
                cache.resize(batch, capacity, force=True)
                expected = [each[:capacity] for each in expected[:batch]] + [[] for _ in range(batch - len(expected))]
    assert cache.lengths.tolist() == [len(held) for held in expected]
    for slot, held in enumerate(expected):
        wanted = np.zeros(cache.capacity)
        wanted[: len(held)] = held
        for array, sign in ((cache.k, 1), (cache.v, -1)):
            assert (array[:, slot] == sign * wanted[None, :, None, None]).all()


# --- float16 --------------------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(shape=shapes(), seed=seeds, length=st.sampled_from([1, 5, 64, 65, 130]), cut=st.integers(1, 129))
def test_float16_is_what_is_stored_and_read_and_nothing_else(shape, seed, length, cut):
    """Any pieces give the same bits, and so does a float32 cache whose numbers are rounded by hand before each write."""
    model = random_model(seed, **shape)
    tokens = random_tokens(np.random.default_rng(seed), model, 1, length)
    half = KVCache(model.config, 2, length, np.float16)
    whole = forward(model, tokens, half, slots=[1])

    class Rounding(KVCache):
        def write(self, layer, slot, position, k, v):
            super().write(layer, slot, position, k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32))

    rounding = Rounding(model.config, 1, length)
    assert_same_bits(forward(model, tokens, rounding), whole)
    for array, wide in ((half.k, rounding.k), (half.v, rounding.v)):
        assert array.dtype == np.float16
        np.testing.assert_array_equal(array[:, 1], wide[:, 0])
        assert not array[:, 0].any()
    pieces = KVCache(model.config, 1, length, np.float16)
    cut = min(cut, length - 1)
    chunked = [forward(model, part, pieces) for part in (tokens[:, :cut], tokens[:, cut:]) if part.size]
    assert_same_bits(np.concatenate(chunked, axis=1), whole)


def test_float16_changes_exact_logits_and_no_others():
    tokens = random_tokens(np.random.default_rng(3), MODEL, 2, 40)
    for dialect in DIALECTS.values():
        cache = KVCache(MODEL.config, 2, 70, np.float16)
        same = np.array_equal(forward(MODEL, tokens, cache, dialect=dialect), forward_full(MODEL, tokens, dialect=dialect))
        assert same == dialect.halves
    assert BITNET_CPP.halves
    assert not EXACT.halves


def test_float16_takes_half_the_memory():
    full, half = (KVCache(MODEL.config, 3, 7, dtype) for dtype in (np.float32, np.float16))
    assert KVCache(MODEL.config).dtype == np.float32
    assert full.nbytes == 2 * half.nbytes == 2 * MODEL.config.n_layers * 3 * 7 * MODEL.config.kv_width * 4


@pytest.mark.parametrize(("scale", "name"), [((1e6, 1), "key"), ((1, 1e6), "value"), ((np.nan, 1), "key")])
def test_what_float16_cannot_hold_is_an_error(scale, name):
    rng = np.random.default_rng(4)
    cache = KVCache(MODEL.config, 1, 4, np.float16)
    k, v = (factor * rng.uniform(1, 2, (1, MODEL.config.kv_heads, MODEL.config.head_dim)).astype(np.float32) for factor in scale)
    with pytest.raises(NonFiniteError, match=f"a {name} of layer 1 is not a number within float16's range"):
        cache.write(1, np.array([0]), np.array([0]), k, v)


def test_a_pass_that_float16_cannot_hold_leaves_the_cache_as_it_was():
    layers = list(MODEL.layers)
    loud = replace(layers[1], attn_v=replace(layers[1].attn_v, scale=np.float32(1e6)))
    model = frozen(replace(MODEL, layers=(layers[0], loud)))
    cache = KVCache(MODEL.config, 2, 6, np.float16)
    forward(MODEL, [[1, 2], [3, 4]], cache)
    before = contents(cache)
    with pytest.raises(NonFiniteError, match="a value of layer 1"):
        forward(model, [[5], [6]], cache)
    assert contents(cache) == before


# --- what cannot be -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: clear_batch(c, 3), SlotError, "slot 3 does not exist, there are 3"),
        (lambda c: clear_batch(c, -1), SlotError, "slot -1 does not exist"),
        (lambda c: c.rollback(0, 4), CapacityError, "slot 0 holds 3 positions, cannot go back by 4"),
        (lambda c: c.rollback(0, -1), CapacityError, "cannot go back by -1"),
        (lambda c: c.rollback(3, 0), SlotError, "slot 3 does not exist"),
        (lambda c: c.fork(0, [2]), SlotError, "slot 2 holds 5 positions, clear it before it is copied to"),
        (lambda c: c.fork(0, [3]), SlotError, "slot 3 does not exist"),
        (lambda c: c.fork(-1, [1]), SlotError, "slot -1 does not exist"),
        (lambda c: c.fork(1, [1]), SlotError, r"slots \[1\] name one slot twice, or the source 1"),
        (lambda c: c.fork(0, [1, 1]), SlotError, r"slots \[1, 1\] name one slot twice"),
        (lambda c: c.fork(0, [1], 4), CapacityError, "slot 0 holds 3 positions, 4 cannot be copied"),
        (lambda c: c.fork(0, [1], -1), CapacityError, "-1 cannot be copied"),
        (lambda c: c.resize(0, force=True), OptionError, "batch is 0"),
        (lambda c: c.resize(capacity=0, force=True), OptionError, "capacity is 0"),
        (lambda c: c.resize(capacity=2**50), CapacityError, "bytes for 3 sequences of"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(change, error, message):
    cache = holding(3, 0, 5)
    before = contents(cache)
    with pytest.raises(error, match=message):
        change(cache)
    assert contents(cache) == before
    assert (cache.batch, cache.capacity) == (3, 8)


def test_there_are_two_dtypes():
    with pytest.raises(OptionError, match="KV cache: dtype is float64, expected float32 or float16"):
        KVCache(MODEL.config, dtype=np.float64)


# --- storage --------------------------------------------------------------------------------------------------------------------------


class CountedStorage(HostStorage):
    """NumPy's arrays, for 8 positions at most; `calls` are the names of what was asked of it."""

    most_positions = 8

    def __init__(self):
        self.calls = set()

    def __getattribute__(self, name):
        if name in ("zeros", "write", "readable", "erase", "carry", "held"):
            self.calls.add(name)
        return super().__getattribute__(name)


def test_a_cache_leaves_its_memory_to_the_storage():
    storage = CountedStorage()
    cache = KVCache(MODEL.config, 2, 8, storage=storage)
    for change, calls in (
        (lambda: forward(MODEL, [[1, 2, 3]], cache, slots=[0]), {"write", "readable"}),
        (lambda: cache.fork(0, [1]), {"carry"}),
        (lambda: cache.rollback(1, 1), {"erase"}),
        (lambda: cache.resize(3), {"zeros", "carry"}),
    ):
        storage.calls.clear()
        change()
        assert storage.calls == calls


def test_a_storage_limits_the_positions():
    cache = KVCache(MODEL.config, 1, 8, storage=CountedStorage())
    for make in (lambda: KVCache(MODEL.config, 1, 9, storage=CountedStorage()), lambda: cache.resize(capacity=9)):
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
    before = cache.k.tobytes(), cache.v.tobytes(), cache.lengths.tolist()
    with pytest.raises(SlotError, match="a forward pass is writing to slot 1, expected it to end first"):
        forward(MODEL, [[3]], cache, slots=[1], record=lambda *point: meddle(cache))
    assert (cache.k.tobytes(), cache.v.tobytes(), cache.lengths.tolist()) == before
    meddle(cache)  # which may, afterwards


def test_other_slots_may_be_written_to_meanwhile():
    cache, alone = KVCache(MODEL.config, 2, 8), KVCache(MODEL.config, 1, 8)
    logits = []

    def record(name, layer, array):
        if name == "attn_norm":
            logits.append(forward(MODEL, [[7]], cache, slots=[1]))

    mine = forward(MODEL, [[3]], cache, slots=[0], record=record)
    assert_same_bits(mine, forward(MODEL, [[3]], KVCache(MODEL.config)))
    for one in logits:
        assert_same_bits(one, forward(MODEL, [[7]], alone))


def test_a_cache_can_be_copied():
    cache = KVCache(MODEL.config, 1, 8)
    forward(MODEL, [[1, 2]], cache)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert_same_bits(forward(MODEL, [[3]], other), forward_full(MODEL, [[1, 2, 3]])[:, 2:])
    assert cache.lengths.tolist() == [2]
