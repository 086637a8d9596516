"""A pass that is recorded and run again gives the bits of the pass itself, and is not used where it could not."""

import copy
import gc
import itertools
import os
import sys
import threading
import weakref
from unittest import mock

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, dialects, family_shapes, random_model, random_tokens, seeds, threads

from bitnet_np.engine import repeats
from bitnet_np.engine.backend import Wrapped
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.dialects import BITNET_CPP, EXACT, LLAMA_CPP
from bitnet_np.engine.forward_pass import forward, forward_full, forward_incremental
from bitnet_np.kernels import cpu, launching
from bitnet_np.kernels.workspace import empty
from bitnet_np.model.families import ARCHITECTURES
from bitnet_np.testing.noise import Noise

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
SHAPE = {"width": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 32}
MODEL = random_model(1, **SHAPE)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Record the first pass of each kind."""
    monkeypatch.setattr(repeats, "PATIENCE", 0)


def used(cache: KVCache) -> list[bool]:
    """Of each kind of pass of a cache, whether a recording is used."""
    return [recording is not None and recording.is_compared for recording, _ in cache.repeats._kept.values()]


def decoded(model, cache, tokens=TOKENS, **options):
    return np.concatenate([forward(model, [[token]], cache, **options)[0] for token in tokens])


@pytest.mark.parametrize("dialect", [EXACT, LLAMA_CPP], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_is_recorded(family, dialect):
    model = random_model(Noise(1), family=family, n_layers=2, vocab=37, weights="Q8_0", width=64, ffn=64, head_dim=32)
    cache = KVCache(model.config, capacity=len(TOKENS))
    assert_same_bits(decoded(model, cache, dialect=dialect), forward_full(model, [TOKENS], dialect=dialect)[0])
    gelu_from_a_table = dialect is LLAMA_CPP and model.config.activation in ("gelu_gate", "gelu_tanh")
    assert any(used(cache)) is not gelu_from_a_table


def test_a_pass_that_numpy_writes_the_cache_of_is_not_recorded():
    cache = KVCache(MODEL.config, capacity=1, dtype=np.float16)
    decoded(MODEL, cache, [1])
    assert [recording for recording, _ in cache.repeats._kept.values()] == [None]


@settings(max_examples=60)
@given(
    shape=family_shapes(),
    seed=seeds,
    dialect=dialects(),
    lengths=st.lists(st.sampled_from([1, 3, 60, 63, 64, 120, 126]), min_size=1, max_size=4),
    half=st.booleans(),
    n_threads=st.sampled_from([1, numba.config.NUMBA_NUM_THREADS]),
)
def test_tokens_of_a_batch_have_the_bits_of_whole_sequences(shape, seed, dialect, lengths, half, n_threads):
    """Past a chunk of keys and a power of two of positions, in any order of slots, in any cache."""
    rng = np.random.default_rng(seed)
    model = random_model(seed, **shape)
    sequences = [random_tokens(rng, model, length + 6) for length in lengths]
    dtype = np.float16 if half else np.float32
    cache, plain = (KVCache(model.config, len(lengths) + 1, max(lengths) + 6, dtype) for _ in range(2))
    slots = rng.permutation(len(lengths) + 1)[: len(lengths)]
    for each in (cache, plain):
        for slot, tokens, length in zip(slots, sequences, lengths, strict=True):
            forward(model, [tokens[:length]], each, slots=[slot], dialect=dialect)
    with threads(n_threads):
        for step in range(6):
            order = rng.permutation(len(lengths))
            tokens = [[sequences[i][lengths[i] + step]] for i in order]
            again = forward(model, tokens, cache, slots=slots[order], dialect=dialect)
            with mock.patch.object(repeats, "PATIENCE", 1 << 60):
                assert_same_bits(again, forward(model, tokens, plain, slots=slots[order], dialect=dialect))
    assert cache.k.tobytes() == plain.k.tobytes()
    assert cache.v.tobytes() == plain.v.tobytes()


def test_a_recording_serves_its_positions_and_the_next_ones_have_another():
    cache = KVCache(MODEL.config, capacity=64)
    decoded(MODEL, cache, TOKENS * 4)
    sizes = [size for _, size in cache.repeats._kept]
    assert sizes == [1, 2, 4, 8, 16, 32]  # powers of two of positions
    assert used(cache) == [False, False, True, True, True, True]  # two passes are needed to record and to compare


def test_a_recording_outlives_other_passes_and_what_they_change():
    cache = KVCache(MODEL.config, 2, 40)
    decoded(MODEL, cache)
    forward(MODEL, [[7, 8, 9]], cache, slots=[1])
    cache.truncate(0, 5)
    assert_same_bits(decoded(MODEL, cache, slots=[0]), forward_full(MODEL, [TOKENS[:5] + TOKENS])[0][5:])
    cache.resize(batch=3, capacity=50)
    assert_same_bits(decoded(MODEL, cache, slots=[2]), forward_full(MODEL, [TOKENS])[0])
    assert_same_bits(decoded(MODEL, cache, slots=[1]), forward_full(MODEL, [[7, 8, 9, *TOKENS]])[0][3:])


def test_two_models_and_two_dialects_may_take_turns_in_a_cache():
    other = random_model(2, **SHAPE)
    cache = KVCache(MODEL.config, 3, len(TOKENS))
    turns = [(MODEL, EXACT), (other, EXACT), (MODEL, BITNET_CPP)]
    logits = [
        [forward(model, [[token]], cache, slots=[slot], dialect=dialect)[0] for slot, (model, dialect) in enumerate(turns)]
        for token in TOKENS
    ]
    for (model, dialect), rows in zip(turns, zip(*logits, strict=True), strict=True):
        assert_same_bits(np.concatenate(rows), forward_full(model, [TOKENS], dialect=dialect)[0])


def test_a_copied_cache_has_its_own_recordings():
    cache = KVCache(MODEL.config, capacity=2 * len(TOKENS))
    decoded(MODEL, cache)
    other = copy.deepcopy(cache)
    assert not used(other)
    again = decoded(MODEL, cache)
    assert_same_bits(decoded(MODEL, other), again)
    assert other.k.tobytes() == cache.k.tobytes()


def test_a_cache_goes_as_soon_as_nobody_has_it():
    gc.disable()
    try:
        cache = KVCache(MODEL.config, capacity=len(TOKENS))
        decoded(MODEL, cache)
        memory = weakref.ref(cache.k)
        del cache
        assert memory() is None
    finally:
        gc.enable()


def test_threads_may_use_one_cache_at_once():
    cache = KVCache(MODEL.config, 4, 40)
    logits = {}

    def work(slot):
        logits[slot] = decoded(MODEL, cache, [slot, *TOKENS * 4], slots=[slot])

    workers = [threading.Thread(target=work, args=(slot,)) for slot in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for slot in range(4):
        assert_same_bits(logits[slot], forward_full(MODEL, [[slot, *TOKENS * 4]])[0])


def test_other_threads_may_keep_recordings_behind_any_call():
    shared, others, before = repeats.Repeats(), itertools.count(), sys.getprofile()

    def other(frame, event, _):
        if event == "c_return" and frame.f_code is repeats.Repeats.run.__code__:
            shared._kept["the other's", next(others)] = None, MODEL

    sys.setprofile(other)
    try:
        for size in range(20):
            assert_same_bits(shared.run(MODEL, "ours", size, np.sqrt, [np.full(3, 4, np.float32)], []), np.full(3, 2, np.float32))
    finally:
        sys.setprofile(before)
    shared.run(MODEL, "ours", 20, np.sqrt, [np.ones(3, np.float32)], [])
    assert len(shared._kept) == repeats._MOST


def test_another_number_of_threads_is_another_kind_of_pass():
    cache = KVCache(MODEL.config, capacity=2 * len(TOKENS))
    with threads(1):
        first = decoded(MODEL, cache)
    with threads(2):
        second = decoded(MODEL, cache)
    assert_same_bits(np.concatenate([first, second]), forward_full(MODEL, [TOKENS + TOKENS])[0])
    assert {kind[1][2] for kind, _ in cache.repeats._kept} == {1, 2}


@pytest.mark.skipif(not hasattr(os, "fork") or numba.config.NUMBA_NUM_THREADS < 2, reason="needs fork and threads")
def test_a_forked_child_runs_recordings_on_one_thread():
    cache = KVCache(MODEL.config, capacity=2 * len(TOKENS))
    with threads(2):
        decoded(MODEL, cache)
        child = os.fork()
        if child == 0:
            expected = forward_full(MODEL, [TOKENS + TOKENS])[0][len(TOKENS) :]
            os._exit(0 if decoded(MODEL, cache).tobytes() == expected.tobytes() else 1)
    assert os.waitpid(child, 0)[1] == 0


# --- what is not recorded -------------------------------------------------------------------------------------------------------------


def _by_numpy(gate, up):
    return np.maximum(gate, 0) ** 2 * up


def _changed_by_numpy(gate, up):
    out = RELU2(gate, up)
    out *= np.float32(1.5)
    return out


def _decided_by_numpy(gate, up):
    return RELU2(gate, up) if cpu.to_host(gate)[0, 0] > 0 else RELU2(up, gate)


RELU2, QUANTIZE_NORMED = cpu.relu2_gate, cpu.quantize_normed


@pytest.mark.parametrize("gate", [_by_numpy, _changed_by_numpy, _decided_by_numpy])
def test_a_pass_with_an_operation_that_is_no_launch_is_not_used(gate, monkeypatch):
    monkeypatch.setattr(cpu, "relu2_gate", gate)
    cache = KVCache(MODEL.config, capacity=len(TOKENS))
    assert_same_bits(decoded(MODEL, cache), forward_incremental(MODEL, [TOKENS], ops=Wrapped(cpu))[0])
    assert not any(used(cache))


@pytest.mark.parametrize("memory", [empty, np.empty], ids=["of the pass", "of NumPy"])
def test_what_the_recorded_token_left_in_memory_hides_nothing(memory, monkeypatch):
    """The same token again, so that the first codes are still right where the launches do not write them."""

    def by_numpy(x, gain, eps):
        codes, scale = QUANTIZE_NORMED(x, gain, eps)
        if gain is not MODEL.layers[0].attn_norm:
            return codes, scale
        out = memory(codes.shape, np.int8)
        out[...] = codes
        return out, scale

    tokens = [3, 3, 3, 3, 7, 8]
    monkeypatch.setattr(cpu, "quantize_normed", by_numpy)
    cache = KVCache(MODEL.config, capacity=8)
    forward(MODEL, [[1, 1]], cache)
    assert_same_bits(decoded(MODEL, cache, tokens), forward_full(MODEL, [[1, 1, *tokens]])[0][2:])
    assert not any(used(cache))


def test_a_write_that_is_no_launch_is_noticed(monkeypatch):
    def write(self, layer, keys, values, slot, position, k, v):
        keys[slot, position], values[slot, position] = k, v

    monkeypatch.setattr(type(cpu.storage()), "write", write)
    cache = KVCache(MODEL.config, capacity=len(TOKENS))
    assert_same_bits(decoded(MODEL, cache), forward_full(MODEL, [TOKENS])[0])
    assert not any(used(cache))


def test_passes_that_are_observed_edited_or_counted_are_not_recorded():
    cache = KVCache(MODEL.config, capacity=2 * len(TOKENS))
    decoded(MODEL, cache, record=lambda name, layer, array: None)
    assert not used(cache)


def test_a_kernel_without_memory_raises_and_the_cache_is_as_before(monkeypatch):
    cache = KVCache(MODEL.config, capacity=2 * len(TOKENS))
    decoded(MODEL, cache)
    cache.truncate(0, 5)
    before = cache.k.copy()
    with monkeypatch.context() as patch:
        patch.setattr(launching, "_run_steps", mock.Mock(side_effect=MemoryError, overloads=()))
        with pytest.raises(MemoryError):
            forward(MODEL, [[3]], cache)
    assert cache.lengths.tolist() == [5]
    assert cache.k.tobytes() == before.tobytes()
    assert_same_bits(decoded(MODEL, cache), forward_full(MODEL, [TOKENS[:5] + TOKENS])[0][5:])
