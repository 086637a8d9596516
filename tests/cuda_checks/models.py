"""Whole models: forwards, caches, decoding, and errors."""

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from models import assert_same_bits
from numpy.typing import NDArray

from bitnet_np.base.errors import CapacityError, MaskError, NonFiniteError, ShapeError, UnsupportedError
from bitnet_np.engine.cache import KVCache, new_cache
from bitnet_np.engine.dialects import BITNET_CPP
from bitnet_np.engine.forward_pass import forward, forward_full, prefill
from bitnet_np.engine.metrics import Metrics
from bitnet_np.generation.batch import Batch, Request, generate_batch
from bitnet_np.generation.generate import generate
from bitnet_np.generation.sampling import Sampling
from bitnet_np.gpu.device import bytes_needed, open_cuda, place
from bitnet_np.gpu.storage import DeviceStorage
from bitnet_np.kernels import cpu
from bitnet_np.model import packing
from bitnet_np.model.records import Model, Yarn
from bitnet_np.testing.models import random_model
from cuda_checks.common import GPU, check, normal, rng

SMALLEST = {"width": 8, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 12, "n_layers": 1, "vocab": 5}
LIVELY = SMALLEST | {"context": 12, "tied": False}  # with seed 16 a greedy token is seldom the one before it
YARN = {"yarn": Yarn(4.0, 2, fast=4.0), "rope_magnitude": 1.25}
on = open_cuda()


def smallest(seed: int, **more: object) -> tuple[Model, Model]:
    """A random model, and the same one on the device."""
    model = random_model(rng(seed), **SMALLEST | more)
    return model, place(model, on)


def caches(model: Model, batch: int, capacity: int, dtype: type = np.float32) -> tuple[KVCache, KVCache]:
    return new_cache(model.config, batch, capacity, on, dtype), KVCache(model.config, batch, capacity, dtype)


def alike(theirs: KVCache, ours: KVCache) -> None:
    """Assert that two caches hold the same keys, values and lengths, float16 by its bits."""
    for there, here in ((theirs.k, ours.k), (theirs.v, ours.v)):
        np.testing.assert_array_equal(on.to_host(there), here if here.dtype == np.float32 else here.view(np.int16))
    np.testing.assert_array_equal(theirs.lengths, ours.lengths)


def stepper(model: Model, cache: KVCache, ops: Any = cpu) -> Callable[[list[int]], NDArray[np.float32]]:
    """The next token of each sequence -> its logits."""
    return lambda tokens: forward(model, [[token] for token in tokens], cache, last_only=True, ops=ops)


# --- forwards -------------------------------------------------------------------------------------------------------------------------


@check
def whole_forward() -> None:
    """Logits, and every recorded tensor."""
    (model, placed), tokens = smallest(0), rng(1).integers(0, 5, (2, 3))
    seen, theirs = dict[str, NDArray](), dict[str, NDArray]()
    ours = forward_full(model, tokens, [3, 1], record=lambda name, n, array: seen.update({name: array.copy()}))
    logits = forward_full(placed, tokens, [3, 1], ops=on, record=lambda name, n, array: theirs.update({name: array.copy()}))
    assert_same_bits(logits, ours)
    assert seen.keys() == theirs.keys()
    for name, array in seen.items():
        np.testing.assert_array_equal(theirs[name], array, err_msg=name)


@check
def other_families() -> None:
    for family, more in (
        ("llama", {"weights": "float16"} | YARN),
        ("gptneox", {"weights": "bfloat16", "parallel_residual": True}),
        ("gpt2", {}),
        ("granite", {}),
        ("olmo2", {}),
        ("phi2", {}),
        ("gemma3", {"n_layers": 2}),  # local layers take the cosines and sines of their own base
        ("gemma2", {"weights": "ternary"}),
    ):
        (model, placed), tokens = smallest(3, family=family, **more), rng(1).integers(0, 5, (1, 2))
        assert_same_bits(forward_full(placed, tokens, last_only=True, ops=on), forward_full(model, tokens, last_only=True))


@check
def masked_forward() -> None:
    """A mask of each sequence's own, padding, and a position that sees nothing."""
    (model, placed), tokens, mask = smallest(7), [[1, 2, 3], [4, 0, 0]], np.zeros((2, 1, 3, 3), np.bool_)
    mask[0, 0, 0, 2] = mask[0, 0, 2, :2] = mask[1, 0, 0, 0] = True
    assert_same_bits(forward_full(placed, tokens, [3, 1], mask=mask, ops=on), forward_full(model, tokens, [3, 1], mask=mask))


@check
def metered() -> None:
    (model, placed), metrics = smallest(4), Metrics()
    ops = metrics.ops(on, "a test")
    assert generate(placed, [1, 2], 2, ops=ops) == generate(model, [1, 2], 2)
    counted = metrics.as_dict()
    assert {operation["device"] for operation in counted["operations"].values()} == {"cuda"}
    assert counted["operations"]["attend"] | {"device": "cuda", "reason": "a test", "calls": 2} == counted["operations"]["attend"]


# --- caches ---------------------------------------------------------------------------------------------------------------------------


@check
def cached_forward() -> None:
    model, placed = smallest(2)
    for dtype in (np.float32, np.float16):
        cache, own = caches(model, 2, 4, dtype)
        for tokens, lengths in (([[3, 1], [4, 0]], [2, 1]), ([[2], [0]], [1, 1])):
            assert_same_bits(forward(placed, tokens, cache, lengths, ops=on), forward(model, tokens, own, lengths))
        for each in (cache, own):
            each.truncate(0, 1)
            each.clear(1)
            each.fork(0, [1], 1)
            each.resize(3, 5)
        alike(cache, own)
        assert_same_bits(prefill(placed, [[1, 3, 2]], cache, block=2, ops=on), prefill(model, [[1, 3, 2]], own, block=2))
        assert_same_bits(stepper(placed, cache, on)([2, 3, 1]), stepper(model, own)([2, 3, 1]))
        alike(cache, own)


@check
def beyond_float16() -> None:
    model, _ = smallest(8)
    model = replace(model, layers=tuple(replace(w, attn_norm=w.attn_norm * np.float32(1e6)) for w in model.layers))
    cache, _ = caches(model, 1, 4, np.float16)
    with pytest.raises(NonFiniteError, match="sequence 0, position 0"):
        forward(place(model, on), [[1, 2]], cache, ops=on)
    assert not on.to_host(cache.k).any()


@check
def ring_caches() -> None:
    """Rows that wrap around, a forward that is stopped and undone, and decoding."""
    (model, placed), tokens = smallest(9, window=3, context=300), [[1, 3, 2, 4]]
    cache, own = KVCache(model.config, 1, 300, ring=True, storage=DeviceStorage(on)), KVCache(model.config, 1, 300, ring=True)
    assert own.k.shape[2] == 128
    own.k[:], own.v[:] = normal(*own.k.shape), normal(*own.k.shape, seed=1)
    cache.k, cache.v = on.upload(own.k), on.upload(own.v)
    cache.lengths[:] = own.lengths[:] = 126

    def stop(name: str, layer: int | None, array: NDArray) -> None:
        if name == "l_out":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forward(placed, tokens, cache, ops=on, record=stop)
    alike(cache, own)
    assert_same_bits(forward(placed, tokens, cache, ops=on), forward(model, tokens, own))
    step, ours = stepper(placed, cache, on), stepper(model, own)
    for token in (3, 1, 4):
        assert_same_bits(step([token]), ours([token]))
    alike(cache, own)


# --- decoding -------------------------------------------------------------------------------------------------------------------------


@check
def decoding() -> None:
    """Also after a step was taken back, and after the cache has been resized."""
    model, placed = smallest(5, **YARN)
    cache, own = caches(model, 2, 6)
    assert_same_bits(forward(placed, [[1, 2], [3, 0]], cache, [2, 1], ops=on), forward(model, [[1, 2], [3, 0]], own, [2, 1]))
    step, ours = stepper(placed, cache, on), stepper(model, own)
    for tokens in ([3, 1], [0, 4], [2, 2]):
        assert_same_bits(step(tokens), ours(tokens))
        alike(cache, own)
    for each in (cache, own):
        each.truncate(0, 3)
        each.truncate(1, 1)
    assert_same_bits(step([0, 2]), ours([0, 2]))
    for each in (cache, own):
        each.resize(2, 5)
    assert_same_bits(step([0, 2]), ours([0, 2]))
    alike(cache, own)
    for both in (step, ours):
        with pytest.raises(CapacityError, match="slot 0 holds 5 of 5"):
            both([1, 1])


@check
def batches() -> None:
    """Sequences end, also by stop tokens, and others come; greedy or not; and an error of one is its own."""
    model, placed = smallest(16, **LIVELY)
    requests = [Request("a", [1, 2], 9), Request("b", [2], 9, stop={4}), Request("c", [4], 6, Sampling(temperature=1.0))]
    assert [each.tokens for each in generate_batch(placed, requests, 2, ops=on)] == [
        each.tokens for each in generate_batch(model, requests, 2)
    ]
    batch = Batch(placed, 1, ops=on)
    batch.submit(Request("a", [1], 5))
    for _ in range(3):
        assert batch.step() == []
    norm = on.to_host(placed.output_norm)
    placed.output_norm.copy_to_device(np.full(8, np.inf, np.float32), stream=on.stream)
    (completion,) = batch.step()
    placed.output_norm.copy_to_device(norm, stream=on.stream)
    assert "NaN or infinity" in completion.error
    assert len(completion.tokens) == 3


@check
def parts_of_the_script() -> None:
    """Those of scripts/gpu_check.py that run kernels, here where these are compiled. On a GPU the script itself is run."""
    with mock.patch.object(sys, "argv", ["gpu_check.py", "--interpret"]):
        parts = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "gpu_check.py"))["PARTS"]
    for name in [] if GPU else ["describe", "bits", "speed"]:
        assert "problem" not in parts[name](on), name


# --- refusals -------------------------------------------------------------------------------------------------------------------------


@check
def refusals() -> None:
    """Errors name what a device cannot do; too little memory is refused before anything is sent."""
    model, placed = smallest(6)
    with pytest.raises(UnsupportedError, match=r"the dialect is bitnet\.cpp, expected exact on this device"):
        forward_full(placed, [[1]], dialect=BITNET_CPP, ops=on)
    with pytest.raises(MaskError, match="later"):
        forward_full(placed, [[1, 2]], mask=np.zeros((2, 2), np.float32), strict=True, ops=on)
    with pytest.raises(ShapeError, match="upload the model"):
        forward_full(model, [[1]], ops=on)
    with pytest.raises(ShapeError, match="expected the device's, uint32"):
        on.ternary_matmul(*on.quantize(on.zeros((1, 8))), packing.pack(np.zeros((8, 8)), 1).codes, np.float32(1), 8)
    more = {"family": "llama", "weights": "TQ2_0", "width": 256, "ffn": 256, "head_dim": 128}
    with pytest.raises(UnsupportedError, match="layer 0: attn_q is TQ2_0 with a scale for each block"):
        smallest(6, **more)
    with pytest.raises(CapacityError, match="4,194,241 positions, on the device expected at most 4,194,240"):
        new_cache(model.config, 1, 65535 * 64 + 1, on)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(on, "free_bytes", lambda: 1 << 20)
        with pytest.raises(CapacityError, match=rf"the weights take {bytes_needed(model):,} bytes on the device .* it has 1,048,576 free"):
            place(model, on)
        with pytest.raises(CapacityError, match=r"KV cache: .* the device has 1,048,576 free"):
            new_cache(model.config, 9, 1 << 20, on)
    with pytest.raises(CapacityError, match=r"the device has no .* bytes left"):
        on.empty((1 << 40,))
