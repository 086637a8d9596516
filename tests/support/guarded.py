"""Kernels on arrays that end where a protected page begins: a read or write past the end is a crash. A program, because it may die of it.

python tests/support/guarded.py [ROUNDS]
"""

import ctypes
import mmap
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from unittest import mock

import numpy as np
from block_samples import random_blocks
from numpy.typing import NDArray
from operation_draws import CASES, Draw

from bitnet_np.base.tensor_types import BLOCK_TYPES, Q4_K, TensorType
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.forward_pass import forward, forward_full
from bitnet_np.kernels import cpu, launching, ternary_product, ternary_tiles, workspace
from bitnet_np.kernels.fast import amx
from bitnet_np.kernels.ggml import blocks, products
from bitnet_np.testing.models import random_model

_pages: list[mmap.mmap] = []


def empty(shape: tuple[int, ...] | int, dtype: object = np.float32) -> NDArray:
    """An array of NaNs, or ones in every bit, whose last byte is the last one before a protected page."""
    dtype, shape = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    room = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + mmap.PAGESIZE)
    whole = np.frombuffer(pages, np.uint8)
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.ctypes.data + room), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError("mprotect failed")
    _pages.append(pages)
    whole[:room] = 255
    return whole[room - size : room].view(dtype).reshape(shape)


def guarded(value: object) -> object:
    """A copy of an array, or of each of some, that ends before a protected page; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(map(guarded, value))
    if not isinstance(value, np.ndarray):
        return value
    copy = empty(value.shape, value.dtype)
    copy[...] = value
    return copy


def same(function: object, *arguments: object) -> None:
    """Run a kernel on guarded arrays with guarded results, and compare its bits with those on ordinary ones."""
    expected = function(*arguments)  # type: ignore[operator]
    with ExitStack() as stack:
        for name, module in sys.modules.items():
            if name.startswith("bitnet_np.kernels.") and getattr(module, "empty", None) is workspace.empty and module is not workspace:
                stack.enter_context(mock.patch.object(module, "empty", empty))
        results = function(*map(guarded, arguments))  # type: ignore[operator]
    pairs = zip(results, expected, strict=True) if isinstance(expected, tuple | list) else [(results, expected)]
    for theirs, ours in pairs:
        assert theirs.tobytes() == ours.tobytes(), function


def operations(rng: np.random.Generator, kind: TensorType) -> None:
    """Every operation; ternary products by each way; and those of one type of blocks."""
    for name, case in CASES.items():
        if "blocks" not in name:
            same(getattr(cpu, name), *case(Draw(rng)))
    q, scale, *weights = CASES["ternary_matmul"](Draw(rng))
    for unit, way in ((None, ternary_tiles), (None, ternary_product), (amx.PLAIN, ternary_tiles), (amx.unit(), ternary_tiles)):
        with mock.patch.multiple(amx, unit=lambda unit=unit: unit), mock.patch.object(way, "LEAST", 1):
            same(cpu.ternary_matmul, q, scale, *weights)
    r, n = int(rng.integers(1, 10)), int(rng.integers(1, 80))
    matrix = random_blocks(rng, kind, n, int(rng.integers(1, 6)))
    data, x = matrix.data, rng.standard_normal((r, matrix.shape[1])).astype(np.float32)
    # for several threads they are compiled of one type: what they share out is not the type's
    with mock.patch.object(launching, "SMALL", launching.SMALL if kind is Q4_K else 1 << 60):
        same(products.products, x, (data, data[: n // 2 + 1], data), kind)
        for few in (x, x[:1]):
            same(blocks.matmul, few, data, kind)
    same(blocks.embed, data, kind, rng.integers(0, n, r))


def caches(rng: np.random.Generator) -> None:
    """Chunks through a guarded cache, with a fork on the way: the bits of the whole sequence."""
    heads, window = int(rng.integers(1, 4)), int(rng.integers(1, 40))
    shape = {"width": int(rng.integers(1, 70)), "ffn": int(rng.integers(1, 90)), "head_dim": 2 * int(rng.integers(1, 12)), "vocab": 11}
    model = random_model(rng, heads=heads * int(rng.integers(1, 4)), kv_heads=heads, n_layers=2, window=window, context=300, **shape)
    tokens = rng.integers(0, 11, (1, int(rng.integers(2, 160))))
    for dtype in (np.float32, np.float16):
        cache = KVCache(model.config, 2, 160, dtype)
        cache.k, cache.v = guarded(cache.k), guarded(cache.v)
        cut = int(rng.integers(1, tokens.shape[1]))
        forward(model, tokens[:, :cut], cache, slots=[0])
        cache.fork(0, [1])
        last = forward(model, np.repeat(tokens[:, cut:], 2, axis=0), cache, last_only=True)
        assert last[0].tobytes() == last[1].tobytes()
        if dtype == np.float32:
            assert last[0].tobytes() == forward_full(model, tokens)[0, -1:].tobytes()


def run(rounds: int, kinds: Sequence[TensorType] = BLOCK_TYPES) -> None:
    rng = np.random.default_rng(0)
    for number in range(rounds):
        with mock.patch.object(launching, "SMALL", 0 if number % 2 else 1 << 15):  # shared out among threads, and not
            operations(rng, kinds[number % len(kinds)])
            caches(rng)
        _pages.clear()


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    run(rounds)
    print(f"{rounds} rounds")
