"""Nothing is kept that is not asked for: passes, steps, batches and masks leave memory where it was."""

import gc
import os
import sys
import tracemalloc
from itertools import islice

import numpy as np
import pytest
import resident
from command_line import TINY
from models import random_model, random_tokens

from bitnet_np import Metrics
from bitnet_np.engine import masks
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.forward_pass import forward, forward_full
from bitnet_np.files.load import load
from bitnet_np.generation.batch import Request, generate_batch
from bitnet_np.generation.generate import stream
from bitnet_np.generation.sampling import Sampling
from bitnet_np.kernels import workspace

MODEL = random_model(0, width=256, ffn=256, vocab=64, context=4096)
KILOBYTE, MEGABYTE = 1 << 10, 1 << 20
TOKENS = random_tokens(np.random.default_rng(0), MODEL, 2, 40)


def stateless(step):
    """Work of n equal steps."""

    def work(n):
        for i in range(n):
            step(i)

    return work


def decode_steps(n):
    """In a cache as large as it will be, so that it does not count."""
    cache = KVCache(MODEL.config, 2, 60)
    cache.k.fill(0)
    cache.v.fill(0)
    for _ in range(n):
        if cache.lengths[0] == 60:
            cache.clear()
        forward(MODEL, [[1], [2]], cache)


def measured_passes(n):
    metrics = Metrics()
    for _ in range(n):
        forward_full(MODEL, TOKENS, ops=metrics.ops())


def failed_passes(n):
    cache = KVCache(MODEL.config, 2, 50)

    def fail(name, layer, array):
        if name == "result_norm":
            raise RuntimeError

    for _ in range(n):
        with pytest.raises(RuntimeError):
            forward(MODEL, TOKENS, cache, record=fail)


def requests(n):
    """As a server has them: streams and batches whose readers go away or stay, and changes of a cache that several share."""
    cache = KVCache(MODEL.config, 4, 60)
    for i in range(n):
        if i % 3 == 0:
            reader = stream(MODEL, [1, 2, 3], 20, seed=i, sampling=Sampling(1.0))
            list(islice(reader, i % 4))
        elif i % 3 == 1:
            of_batch = generate_batch(MODEL, [Request(j, [1, 2], 1 + j) for j in range(3)], 2)
            list(islice(of_batch, i % 4))
        else:
            cache.clear()
            cache.resize(4 + i % 2, 50 + i % 7)
            forward(MODEL, TOKENS[:1], cache, slots=[0])
            cache.rollback(0, 1)
            cache.fork(0, [1, 2, 3])
            for slot in range(i % 3):
                forward(MODEL, [[slot]], cache, slots=[slot])


def cached_masks(n):
    cache = masks.MaskCache(nbytes=MEGABYTE // 4)
    for i in range(n):
        cache.get(64 + i % 150, 300)


WORK = {  # with so many steps that one array of a step, kept each time, is more than a megabyte
    "whole passes": (stateless(lambda i: forward_full(MODEL, TOKENS)), 20),
    "masked passes": (stateless(lambda i: forward_full(MODEL, TOKENS, mask=masks.causal(40, 40))), 20),
    "loads": (stateless(lambda i: load(TINY)), 20),
    "decode steps": (decode_steps, 600),
    "measured passes": (measured_passes, 20),
    "failed passes": (failed_passes, 20),
    "requests": (requests, 150),
    "cached masks": (cached_masks, 400),
}


def traced():
    """Bytes of objects, by Python's own count: NumPy's arrays are in it.

    Python's cache of attributes keeps up to 4,096 names, and NumPy looks methods up by a string that is new in each call: some 57 bytes
    for each entry that one falls on, which no leak would hide behind.
    """
    clear = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache  # from 3.13 on, and before
    clear()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("work", [work for work, _ in WORK.values()], ids=WORK)
def test_memory_stays_where_it_was(work):
    """After a first round, which compiles, and fills what is kept on purpose. A leak grows in every round, so the least growth counts:
    Python counts the memory of all threads, such as those that earlier tests have left. tracemalloc makes it three times as slow."""
    workspace.release()  # what earlier tests left would be given back uncounted
    work(20)
    tracemalloc.start()
    try:
        work(10)
        growth = []
        while len(growth) < 3 and min(growth, default=KILOBYTE) >= KILOBYTE:
            before = traced()
            work(35)  # in which one new number in a list, kept in each step, is more than a kilobyte
            growth.append(traced() - before)
        assert min(growth) < KILOBYTE, growth
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("work", "n"), WORK.values(), ids=WORK)
def test_the_process_does_not_grow(work, n):
    """What the system counts, and Python does not see. A leak grows in every round, the allocator in some: the least of three counts."""

    def growth():
        gc.collect()
        before = resident.of_process()
        work(n)
        gc.collect()
        return resident.of_process() - before

    work(n // 4)  # lets the allocator find its size
    assert any(growth() < MEGABYTE for _ in range(3))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_stays_open():
    WORK["loads"][0](1)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    WORK["loads"][0](20)
    assert len(os.listdir("/proc/self/fd")) == before
