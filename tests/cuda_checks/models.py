"""Whole models: forwards, caches, decoding by a captured graph, and errors."""

import gc
import threading
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from models import assert_same_bits
from numpy.typing import NDArray

from bitnet_np.batch import Batch, Request, generate_batch
from bitnet_np.cache import KVCache, new_cache
from bitnet_np.dialects import BITNET_CPP
from bitnet_np.errors import CapacityError, MaskError, NonFiniteError, ShapeError, TokenRangeError, UnsupportedError
from bitnet_np.forward_pass import forward, forward_full, prefill
from bitnet_np.generate import generate, stepper
from bitnet_np.gpu import arrays, graph
from bitnet_np.gpu import decoder as decode
from bitnet_np.gpu.backend import Cuda
from bitnet_np.gpu.device import bytes_needed, place
from bitnet_np.gpu.storage import DeviceStorage
from bitnet_np.metrics import Metrics
from bitnet_np.model import Yarn
from bitnet_np.sampling import Sampling
from bitnet_np.testing import random_model
from cuda_checks.common import GPU, check, device, normal, rng, same

SMALLEST = {"width": 8, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 12, "n_layers": 1, "vocab": 5}
LIVELY = SMALLEST | {"context": 12, "tied": False}  # with seed 16 a greedy token is seldom the one before it
YARN = {"yarn": Yarn(4.0, 2, fast=4.0), "rope_magnitude": 1.25}


@check
def whole_forward() -> None:
    on, model = device(), random_model(rng(), **SMALLEST)
    seen: dict[str, NDArray] = {}
    theirs: dict[str, NDArray] = {}
    tokens = rng(1).integers(0, 5, (2, 3))
    ours = forward_full(model, tokens, [3, 1], record=lambda name, n, array: seen.update({name: array.copy()}))
    logits = forward_full(place(model, on), tokens, [3, 1], ops=on, record=lambda name, n, array: theirs.update({name: array.copy()}))
    assert_same_bits(logits, ours)
    assert seen.keys() == theirs.keys()
    for name, array in seen.items():
        np.testing.assert_array_equal(theirs[name], array, err_msg=name)


@check
def cached_forward() -> None:
    on, model = device(), random_model(rng(2), **SMALLEST)
    placed, cache, own = place(model, on), new_cache(model.config, 2, 4, on), KVCache(model.config, 2, 4)
    for tokens, lengths in (([[3, 1], [4, 0]], [2, 1]), ([[2], [0]], [1, 1])):
        assert_same_bits(forward(placed, tokens, cache, lengths, ops=on), forward(model, tokens, own, lengths))
    for theirs, ours in ((cache.k, own.k), (cache.v, own.v)):
        same(on, theirs, ours)
    cache.truncate(0, 1)
    own.truncate(0, 1)
    same(on, cache.k, own.k)


@check
def prefill_in_blocks() -> None:
    """Only the last block has logits: those of the others are not asked for, and nothing on the device stands for them."""
    on, model = device(), random_model(rng(3), **SMALLEST)
    cache, own, tokens = new_cache(model.config, 1, 4, on), KVCache(model.config, 1, 4), [[1, 3, 2]]
    assert_same_bits(prefill(place(model, on), tokens, cache, block=2, ops=on), prefill(model, tokens, own, block=2))
    alike(on, cache, own)


def alike(on: Cuda, theirs: KVCache, ours: KVCache) -> None:
    """Assert that two caches hold the same keys, values and lengths, float16 by its bits."""
    for array, expected in ((theirs.k, ours.k), (theirs.v, ours.v)):
        np.testing.assert_array_equal(on.to_host(array), expected if expected.dtype == np.float32 else expected.view(np.int16))
    np.testing.assert_array_equal(theirs.lengths, ours.lengths)
    assert (theirs.nbytes, theirs.dtype) == (ours.nbytes, ours.dtype)


@check
def forked_and_resized_caches() -> None:
    on, model = device(), random_model(rng(8), **SMALLEST)
    placed = place(model, on)
    for dtype in (np.float32, np.float16):
        cache, own = new_cache(model.config, 2, 4, on, dtype), KVCache(model.config, 2, 4, dtype)
        assert_same_bits(forward(placed, [[1, 2, 3]], cache, ops=on), forward(model, [[1, 2, 3]], own))
        for each in (cache, own):
            each.fork(0, [1], 2)
            each.resize(3, 5)
        alike(on, cache, own)
        assert_same_bits(forward(placed, [[4], [0]], cache, ops=on), forward(model, [[4], [0]], own))
        assert_same_bits(stepper(placed, cache, on)([2, 3, 1]), stepper(model, own)([2, 3, 1]))
        alike(on, cache, own)


@check
def beyond_float16() -> None:
    on, model = device(), random_model(rng(8), **SMALLEST)
    model = replace(model, layers=tuple(replace(w, attn_norm=w.attn_norm * np.float32(1e6)) for w in model.layers))
    cache = new_cache(model.config, 1, 4, on, np.float16)
    with pytest.raises(NonFiniteError, match="sequence 0, position 0"):
        forward(place(model, on), [[1, 2]], cache, ops=on)
    assert not on.to_host(cache.k).any()


@check
def ring_caches() -> None:
    """Rows that wrap around, a forward that is stopped and undone, and decoding."""
    on, model = device(), random_model(rng(9), **SMALLEST | {"window": 3, "context": 300})
    placed, tokens = place(model, on), [[1, 3, 2, 4]]
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
    alike(on, cache, own)
    assert_same_bits(forward(placed, tokens, cache, ops=on), forward(model, tokens, own))
    alike(on, cache, own)
    assert_same_bits(stepper(placed, cache, on)([3]), stepper(model, own)([3]))
    alike(on, cache, own)


@check
def masked_forward() -> None:
    """A mask of each sequence's own, padding, and a position that sees nothing."""
    on, model = device(), random_model(rng(7), **SMALLEST)
    tokens, mask = [[1, 2, 3], [4, 0, 0]], np.zeros((2, 1, 3, 3), np.bool_)
    mask[0, 0, 0, 2] = mask[0, 0, 2, :2] = mask[1, 0, 0, 0] = True
    ours = forward_full(model, tokens, [3, 1], mask=mask)
    assert_same_bits(forward_full(place(model, on), tokens, [3, 1], mask=mask, ops=on), ours)


@check
def other_families() -> None:
    for family, more in (
        ("llama", {"weights": "float16"} | YARN),
        ("gptneox", {"weights": "bfloat16", "parallel_residual": True}),
        ("gpt2", {}),
        ("granite", {}),
        ("olmo2", {}),
        ("gemma2", {"weights": "ternary"}),
    ):
        on, model = device(), random_model(rng(3), **SMALLEST | {"family": family} | more)
        tokens = rng(1).integers(0, 5, (1, 2))
        assert_same_bits(forward_full(place(model, on), tokens, last_only=True, ops=on), forward_full(model, tokens, last_only=True))


@check
def generation() -> None:
    on, model = device(), random_model(rng(16), **LIVELY)
    for stop in ((), (4,)):
        assert generate(place(model, on), [1, 2], 9, stop=stop, ops=on) == generate(model, [1, 2], 9, stop=stop)


@check
def greedy_steps() -> None:
    """The largest logit of each sequence, and an error where one is not finite, after which the tokens are not in the cache."""
    on, model = device(), random_model(rng(5), **SMALLEST)
    placed, cache, own = place(model, on), new_cache(model.config, 2, 4, on), KVCache(model.config, 2, 4)
    forward(placed, [[1, 2], [3, 0]], cache, ops=on)
    forward(model, [[1, 2], [3, 0]], own)
    steps, ours = decode.GraphDecoder(placed, cache, on, np.arange(2), greedy=True), stepper(model, own)
    tokens = np.array([3, 1])
    np.testing.assert_array_equal(steps.largest(tokens), ours(tokens).argmax(axis=1))
    assert_same_bits(steps(tokens), ours(tokens))  # all logits, by the same graph
    cache.truncate(1, 3)
    on.overwrite(placed.output_norm, np.full(8, np.inf, np.float32))
    steps = decode.GraphDecoder(placed, cache, on, np.arange(1, 2), greedy=True)
    with pytest.raises(NonFiniteError, match="sequence 0, position 3"):
        steps.largest(np.array([1]))
    assert cache.lengths.tolist() == [4, 3]


@check
def greedy_steps_ahead() -> None:
    """A step is launched before its tokens are asked for, with a new graph in between, too. One that nobody asks for leaves nothing."""
    on, model = device(), random_model(rng(16), **LIVELY)
    placed, cache, own = place(model, on), new_cache(model.config, 2, 12, on), KVCache(model.config, 2, 12)
    forward(placed, [[1, 2], [3, 0]], cache, [2, 1], ops=on)
    forward(model, [[1, 2], [3, 0]], own, [2, 1])
    norm, infinite, launched = on.to_host(placed.output_norm), set[int](), list[int]()

    def counted(*arguments: Any) -> graph.Graph:
        captured = one(*arguments)

        def launch() -> None:
            on.overwrite(placed.output_norm, np.full(8, np.inf) if len(launched) in infinite else norm)
            launched.append(int(cache.lengths[0]))
            captured.launch()

        return graph.Graph(launch, captured.overlapped)

    def step(tokens: NDArray[np.int64], more: bool = True) -> NDArray[np.int64]:
        chosen = steps.largest(tokens, more)
        np.testing.assert_array_equal(chosen, ours(tokens).argmax(axis=1))
        return chosen

    with pytest.MonkeyPatch.context() as patched:
        one, ours = graph.captured, stepper(model, own)
        patched.setattr(graph, "captured", counted)
        patched.setattr(decode, "_FIRST", 2)
        steps, tokens = decode.GraphDecoder(placed, cache, on, np.arange(2), greedy=True), np.array([3, 1])
        for _ in range(3):
            tokens = step(tokens)
        assert launched == [2, 2, 4, 4]  # the first graph is for 4 positions, so it goes no further ahead
        tokens = step((tokens + 1) % 5)  # others than were launched
        assert len(launched) == 6
        assert_same_bits(steps(tokens), ours(tokens))  # all logits, of a step that was launched
        assert len(launched) == 6
        tokens = step(tokens)
        steps.forget()
        alike(on, cache, own)
        tokens = step(tokens)
        for each in (cache, own):  # the tokens that were launched, at other positions
            each.rollback(0, 2)
            each.rollback(1, 2)
        step(tokens, more=False)
        alike(on, cache, own)
        infinite |= {len(launched), len(launched) + 2}  # a step and, as it gives the same again, its repetition; the step ahead is finite
        with pytest.raises(NonFiniteError, match="sequence 0, position 8"):
            steps.largest(tokens, more=True)
        alike(on, cache, own)


@check
def batches_whose_next_step_is_launched() -> None:
    """Sequences end by stop tokens, which nobody foresees, and others come: what was launched for them changes nothing."""
    on, model = device(), random_model(rng(16), **LIVELY)
    requests = [Request("a", [1, 2], 9), Request("b", [2], 9, stop={4}), Request("c", [4], 6), Request("d", [0, 3], 9, stop={2})]
    for slots in (1, 2):
        ours, theirs = Batch(model, slots), Batch(place(model, on), slots, ops=on)
        for batch in (ours, theirs):
            for request in requests:
                batch.submit(request)
        while not ours.done:
            assert [each.tokens for each in theirs.step()] == [each.tokens for each in ours.step()]
        assert theirs.step() == []
        alike(on, theirs.cache, ours.cache)


@check
def batches() -> None:
    """A batch whose sequences have stayed the same is decoded by a graph, until one ends; greedy or not, and where one is not finite."""
    on, model, steps = device(), random_model(rng(5), **SMALLEST), list[str]()

    class Counted(decode.GraphDecoder):
        def __call__(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
            steps.append("all")
            return super().__call__(tokens)

        def largest(self, tokens: NDArray[np.int64], more: bool = False) -> NDArray[np.int64]:
            steps.append("largest")
            return super().largest(tokens, more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decode, "GraphDecoder", Counted)
        placed = place(model, on)
        for sampling, way in ((Sampling(), "largest"), (Sampling(temperature=1.0), "all")):
            requests = [Request("a", [1, 2], 4, sampling), Request("b", [3], 5), Request("c", [0, 4, 1], 1)]
            ours, theirs = generate_batch(model, requests, 2), generate_batch(placed, requests, 2, ops=on)
            assert [each.tokens for each in theirs] == [each.tokens for each in ours]
            assert steps == [way] * 2
            steps.clear()
        on.overwrite(placed.output_norm, np.full(8, np.inf, np.float32))
        batch = Batch(placed, 1, ops=on)
        batch.submit(Request("a", [1], 3))
        batch._steady.decoder([0])  # as if it had run before
        (completion,) = batch.step()
        assert steps == ["largest"]
        assert "NaN or infinity" in completion.error


@check
def metered() -> None:
    on, model, metrics = device(), random_model(rng(4), **SMALLEST), Metrics()
    ops = metrics.ops(on, "a test")
    assert generate(place(model, on), [1, 2], 2, ops=ops) == generate(model, [1, 2], 2)
    counted = metrics.as_dict()
    assert counted["cpu_dispatches"] == 0
    assert counted["operations"]["attend"] | {"device": "cuda", "reason": "a test", "calls": 1} == counted["operations"]["attend"]


@check
def decoder() -> None:
    on, model = device(), random_model(rng(5), **SMALLEST | YARN)
    placed, cache, own = place(model, on), new_cache(model.config, 2, 4, on), KVCache(model.config, 2, 4)
    prompt = [[1, 2], [3, 0]], [2, 1]
    assert_same_bits(forward(placed, prompt[0], cache, prompt[1], ops=on), forward(model, prompt[0], own, prompt[1]))
    step, ours = stepper(placed, cache, on), stepper(model, own)
    assert GPU or decode.GraphDecoder(placed, cache, on, np.arange(2)).graph.overlapped
    same(on, cache.k, own.k)  # capturing leaves nothing in the cache
    for tokens in ([3, 1], [0, 4]):
        assert_same_bits(step(tokens), ours(tokens))
        same(on, cache.v, own.v)
    cache.truncate(1, 1)  # and a step after one that was taken back
    own.truncate(1, 1)
    for each in (cache, own):
        each.truncate(0, 3)
    assert_same_bits(step([0, 2]), ours([0, 2]))
    for both in (step, ours):
        with pytest.raises(CapacityError, match="slot 0 holds 4 of 4"):
            both([1, 1])
        with pytest.raises(TokenRangeError, match="token 5 at position 0 of sequence 1"):
            both([1, 5])
        with pytest.raises(ShapeError, match="tokens has shape"):
            both([[1, 1]])


@check
def a_decoder_of_local_layers() -> None:
    """Layers take the cosines and sines of their own base."""
    on, model = device(), random_model(rng(5), **SMALLEST | {"family": "gemma3", "n_layers": 2})
    cache, own = new_cache(model.config, 1, 4, on), KVCache(model.config, 1, 4)
    step, ours = stepper(place(model, on), cache, on), stepper(model, own)
    for token in (3, 1):
        assert_same_bits(step([token]), ours([token]))


@check
def another_thread() -> None:
    """Threads share a model and its kernels; one that has never asked for the device's context gets it."""
    on, model = device(), random_model(rng(4), **SMALLEST)
    placed, cache, results = place(model, on), new_cache(model.config, 1, 4, on), list[NDArray]()
    step, again = stepper(placed, cache, on), partial(forward_full, placed, [[1, 2]], ops=on)
    expected = again()
    runs = (lambda: results.append(step([3])), lambda: results.append(again()))
    for run in runs:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert_same_bits(results[0][0], forward_full(model, [[3]])[0, 0])
    assert_same_bits(results[1], expected)


@check
def a_decoder_grows() -> None:
    """After the last position of its graph, a decoder captures another for more positions: also if others filled the cache meanwhile."""
    on, model, captured = device(), random_model(rng(5), **SMALLEST | {"context": 80}), list[int]()
    placed, cache, own = place(model, on), new_cache(model.config, 1, 80, on), KVCache(model.config, 1, 80)
    own.k[:], own.v[:] = normal(*own.k.shape), normal(*own.k.shape, seed=1)
    cache.k, cache.v = on.upload(own.k), on.upload(own.v)

    def counted(*arguments: Any) -> graph.Graph:
        captured.append(int(cache.lengths[0]))
        return one(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        one = graph.captured
        patched.setattr(graph, "captured", counted)
        patched.setattr(decode, "_FIRST", 2)
        step, ours = stepper(placed, cache, on), stepper(model, own)
        for length in (0, 1, 2, 33, 62, 63, 64, 66):
            cache.lengths[0] = own.lengths[0] = length
            assert_same_bits(step([length % 5]), ours([length % 5]))
    assert captured == [0, 2, 33, 66]  # for 2, 4, 66 and 80 positions
    alike(on, cache, own)


@check
def a_decoder_keeps_what_its_graph_knows_by_address() -> None:
    on, model, alive = device(), random_model(rng(5), **SMALLEST), list[weakref.ref]()
    placed, upload = place(model, on), on.upload

    def watched(array: NDArray) -> object:
        uploaded = upload(array)
        alive.append(weakref.ref(uploaded))
        return uploaded

    class Watched(arrays.Arena):
        def __init__(self) -> None:
            super().__init__()
            alive.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(on, "upload", watched)
        patched.setattr(arrays, "Arena", Watched)
        patched.setattr(
            graph, "captured", lambda *arguments: graph.Graph(lambda: None, False)
        )  # which does not hold `run`: nor does a real graph
        step = stepper(placed, new_cache(model.config, 1, 4, on), on)
    gc.collect()
    assert step is not None
    assert len(alive) == 1 + 4 + 2  # the arena; tokens, slots, rows, positions; cosines and sines
    assert all(reference() is not None for reference in alive)


@check
def nothing_waits_for_the_garbage_collector() -> None:
    """Memory is free as soon as nothing holds it. Otherwise a graph could not be captured in the memory of the run before."""
    on, model = device(), random_model(rng(5), **SMALLEST)
    placed, cache = place(model, on), new_cache(model.config, 2, 9, on)

    def run() -> None:
        for tokens in ([[1]], [[1, 2]], [[3], [4]]):
            forward(placed, tokens, cache, ops=on)

    run()  # compiling leaves garbage of its own
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        run()
        gc.collect()
        left = [item for item in gc.garbage if type(item).__module__.startswith(("bitnet_np", "numba.cuda"))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not left


@check
def memory_of_garbage_is_used_again() -> None:
    """The garbage collector may be the one that gives memory back, after an error whose traceback refers to arrays."""
    on = device()
    addresses = set()
    for _ in range(2):
        cycle: list[Any] = [on.empty((1000,))]
        cycle.append(cycle)
        addresses.add(cycle[0].address)
        del cycle
        gc.collect()
    again = on.upload(normal(1000)), on.empty((1000,))
    assert addresses == {again[1].address}


@check
def launches() -> None:
    """Counts the launches of a decoded token: each costs as much time as most of their work. (A GPU does not tell those of a graph.)"""
    if GPU:
        return
    on, kernels, layers = device(), Counter[str](), 3
    model = random_model(rng(5), **SMALLEST | {"n_layers": layers})
    step = stepper(place(model, on), new_cache(model.config, 1, 80, on), on)
    interpreter = import_module("ptx.driver").install().device
    run = interpreter.launch

    def counted(kernel: Any, *arguments: object) -> None:
        kernels[kernel.name] += 1
        run(kernel, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "launch", counted)
        step([1])
    each = {"normed_product_row_of_row", "attend_chunk", "normed_product_sum_of_row", "normed_product_relu2_of_row"}
    once = dict.fromkeys(("take_rotations", "embed", "rms_norm_row", "matmul", "advance"), 1)
    assert kernels == dict.fromkeys(each, layers) | {"normed_product_sum_of_row": 2 * layers} | once
    assert kernels.total() == 5 * layers + 5


@check
def refusals() -> None:
    """Errors name what a device cannot do; too little memory is refused before anything is sent."""
    on, model = device(), random_model(rng(6), **SMALLEST)
    placed = place(model, on)
    with pytest.raises(UnsupportedError, match=r"the dialect is bitnet\.cpp, expected exact on this device"):
        forward_full(placed, [[1]], dialect=BITNET_CPP, ops=on)
    with pytest.raises(MaskError, match="later"):
        forward_full(placed, [[1, 2]], mask=np.zeros((2, 2), np.float32), strict=True, ops=on)
    with pytest.raises(ShapeError, match="upload the model"):
        forward_full(model, [[1]], ops=on)
    with pytest.raises(ShapeError, match="expected the device's layout, uint32"):
        on.ternary_matmul(*on.quantize(on.zeros((1, 8))), model.layers[0].attn_q.weights.codes, np.float32(1), 8)
    with pytest.raises(UnsupportedError, match="heads are 258 wide, on the device expected at most 256"):
        on.attend(*(on.zeros((1, *shape)) for shape in ((1, 258), (1, 1, 258), (1, 1, 258))), on.upload(np.zeros(1, np.int64)), None)
    blocks = random_model(rng(6), **SMALLEST | {"family": "llama", "weights": "TQ2_0", "width": 256, "ffn": 256, "head_dim": 128})
    with pytest.raises(UnsupportedError, match="layer 0: attn_q is TQ2_0 with a scale for each block"):
        place(blocks, on)
    with pytest.raises(UnsupportedError, match="heads are 258 wide, on the device expected at most 256"):
        place(random_model(rng(6), **SMALLEST | {"head_dim": 258}), on)
    with pytest.raises(CapacityError, match="4,194,241 positions, on the device expected at most 4,194,240"):
        new_cache(model.config, 1, 65535 * 64 + 1, on)
    on.free_bytes = lambda: 1 << 20
    with pytest.raises(CapacityError, match=rf"the weights take {bytes_needed(model):,} bytes on the device .* it has 1,048,576 free"):
        place(model, on)
    with pytest.raises(CapacityError, match=r"KV cache: .* the device has 1,048,576 free"):
        new_cache(model.config, 9, 1 << 20, on)
