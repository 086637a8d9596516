"""Whole models: forwards, caches, decoding, and errors."""

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from bitnet_np.engine.forward_pass import forward, forward_full, forward_incremental, prefill
from bitnet_np.engine.metrics import Metrics
from bitnet_np.generation.batch import Batch, Request, generate_batch
from bitnet_np.generation.generate import generate
from bitnet_np.generation.sampling import Sampling
from bitnet_np.gpu.device import bytes_needed, open_cuda, place
from bitnet_np.kernels.cuda import rows as row_kernels
from bitnet_np.model import packing
from bitnet_np.model.records import Model, Yarn
from bitnet_np.testing.models import random_model
from cuda_checks.common import GPU, check, rng

SMALLEST = {"width": 8, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 12, "n_layers": 1, "vocab": 5}
LIVELY = SMALLEST | {"context": 12, "tied": False}  # with seed 16 a greedy token is seldom the one before it
YARN = {"yarn": Yarn(4.0, 2, fast=4.0), "rope_magnitude": 1.25}
on = open_cuda()


def smallest(seed: int, **more: object) -> tuple[Model, Model]:
    """A random model, and the same one on the device."""
    model = random_model(rng(seed), **SMALLEST | more)
    return model, place(model, on)


class Caches:
    """A cache on the device and one on the CPU: what is done to both leaves them alike, and gives the same bits."""

    def __init__(self, models: tuple[Model, Model], *how: Any, **more: Any) -> None:
        self.model, self.placed = models
        self.own = KVCache(self.model.config, *how, **more)
        self.theirs = KVCache(self.model.config, *how, **more, storage=on.storage())

    def run(self, tokens: Any, *lengths: Any, by: Callable[..., NDArray] = forward, **how: Any) -> None:
        ours = by(self.model, tokens, self.own, *lengths, **how)
        assert_same_bits(by(self.placed, tokens, self.theirs, *lengths, ops=on, **how), ours)
        self.check_alike()

    def step(self, *tokens: int) -> None:
        self.run([[token] for token in tokens], last_only=True)

    def each(self, name: str, *arguments: Any) -> None:
        for cache in (self.theirs, self.own):
            getattr(cache, name)(*arguments)
        self.check_alike()

    def check_alike(self) -> None:
        """The same keys, values and lengths, float16 by its bits."""
        for there, here in ((self.theirs.k, self.own.k), (self.theirs.v, self.own.v)):
            np.testing.assert_array_equal(on.to_host(there), here if here.dtype == np.float32 else here.view(np.int16))
        np.testing.assert_array_equal(self.theirs.lengths, self.own.lengths)


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
def masked_cache() -> None:
    """New tokens of two sequences behind prompts of other lengths, each by a mask of its own; and whole sequences step by step."""
    both = Caches(smallest(9), 2, 5)
    both.run([[1, 2], [3, 0]], [2, 1], last_only=True)
    mask = rng(2).random((2, 1, 2, 4)) < 0.7
    mask[1, 0, 1] = False  # which sees nothing
    both.run([[1, 2], [4, 0]], [1, 2], mask=mask)
    (model, placed), ids, causal = smallest(9), [[1, 2]], np.tril(np.ones((2, 2), np.bool_))
    assert_same_bits(forward_incremental(placed, ids, mask=causal, ops=on), forward_full(model, ids))


@check
def metered() -> None:
    (model, placed), metrics = smallest(4), Metrics()
    ops = metrics.ops(on, "a test")
    assert generate(placed, [1, 2], 2, ops=ops) == generate(model, [1, 2], 2)
    counted = metrics.as_dict()
    assert {operation["device"] for operation in counted["operations"].values()} == {"cuda"}
    assert counted["operations"]["attend"] | {"device": "cuda", "reason": "a test", "calls": 2} == counted["operations"]["attend"]


# --- caches and decoding ---------------------------------------------------------------------------------------------------------------


@check
def decoding() -> None:
    """Steps behind a ragged prompt, and after some are taken back, copied and resized; a prompt behind them; until the cache is full."""
    for dtype in (np.float32, np.float16):
        both = Caches(smallest(5, **YARN), 2, 6, dtype)
        both.run([[1, 2], [3, 0]], [2, 1])
        both.step(3, 1)
        if dtype == np.float16:  # of which the checks of caches have the rest
            continue
        both.step(0, 4)
        for name, arguments in {"truncate": (0, 3), "clear": (1,), "fork": (0, [1], 1), "resize": (3, 5)}.items():
            both.each(name, *arguments)
        both.step(0, 2, 1)
        both.each("truncate", 0, 2)
        both.run([[1, 3, 2], [4, 0, 0], [2, 2, 0]], [3, 1, 2], by=partial(prefill, block=2))
        with pytest.raises(CapacityError, match="slot 0 holds 5 of 5"):
            both.step(1, 1, 1)


@check
def interrupted() -> None:
    """Ctrl-C in a pass, and again while its keys and values are erased: they stay past the slot's length, where nothing reads them."""
    both, each = Caches(smallest(5), 2, 6), on.each
    both.run([[1, 2], [3, 0]], [2, 1])

    def erase(kernel: Any, *arguments: Any) -> Any:
        if kernel is row_kernels.erase:
            raise KeyboardInterrupt
        return each(kernel, *arguments)

    def interrupt(name: str, layer: int | None, array: NDArray) -> None:
        if name == "l_out":
            raise KeyboardInterrupt

    with mock.patch.object(on, "each", erase), pytest.raises(KeyboardInterrupt):
        forward(both.placed, [[4, 4, 4]], both.theirs, slots=[0], ops=on, record=interrupt)
    assert on.to_host(both.theirs.k)[:, 0, 2:5].all(), "nothing stays"
    assert both.theirs.lengths.tolist() == [2, 1]
    for how in ({}, {"mask": np.ones((1, 4), np.bool_)}):
        ours = forward(both.model, [[3]], both.own, slots=[0], **how)
        assert_same_bits(forward(both.placed, [[3]], both.theirs, slots=[0], ops=on, **how), ours)
    for cache in (both.theirs, both.own):
        cache.resize(2, 7)
    both.check_alike()  # copies have what the slot holds


@check
def beyond_float16() -> None:
    model, _ = smallest(8)
    model = replace(model, layers=tuple(replace(w, attn_norm=w.attn_norm * np.float32(1e6)) for w in model.layers))
    cache = new_cache(model.config, 1, 4, on, np.float16)
    with pytest.raises(NonFiniteError, match="sequence 0, position 0"):
        forward(place(model, on), [[1, 2]], cache, ops=on)
    assert not on.to_host(cache.k).any()


@check
def batches() -> None:
    """Sequences end, also by stop tokens, and others come; greedy or not; and an error of one is its own."""
    model, placed = smallest(16, **LIVELY)
    requests = [Request("a", [1, 2], 4), Request("b", [2], 9, stop={1}), Request("c", [4], 3, Sampling(temperature=1.0))]
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
    found = {name: parts[name](on) for name in ([] if GPU else ["describe", "bits", "speed", "memory", "masks", "crossover"])}
    assert not [name for name, part in found.items() if "problem" in part]
    if not GPU:
        assert min(found["memory"]["peak"].values()) > 0
        assert found["crossover"].keys() == {"ternary", "floats"}


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
