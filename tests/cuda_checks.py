# ruff: noqa: E402
"""Every kernel for the GPU against the CPU's, in Numba's CUDA simulator. test_cuda.py runs it as a process.

The simulator is chosen when Numba is imported, for all of a process. It runs a thread of Python for each of the GPU's, so shapes are small.
With --gpu, what is compiled runs on a GPU, with large shapes too; with --ptx it is interpreted (ptx/), and no GPU is needed.
Other arguments are checks, or groups of them (rows, matrices, attention, models); without any, all are done.
Prints one line of JSON for each check: its name, seconds, and what went wrong.
"""

import os
import sys

GPU, PTX = "--gpu" in sys.argv, "--ptx" in sys.argv
SIMULATED = not (GPU or PTX)
if SIMULATED:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
elif PTX:
    from ptx.driver import install

    install()

import gc
import json
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from models import assert_same_bits
from numpy.typing import NDArray

from bitnet_np import packing, selftest
from bitnet_np.cache import KVCache, new_cache
from bitnet_np.dialects import BITNET_CPP
from bitnet_np.dispatch import Above, make_mask
from bitnet_np.errors import CapacityError, MaskError, NonFiniteError, ShapeError, TokenRangeError, UnsupportedError
from bitnet_np.forward_pass import forward, forward_full, prefill
from bitnet_np.generate import generate, stepper
from bitnet_np.gpu import arrays, graph
from bitnet_np.gpu import decoder as decode
from bitnet_np.gpu.backend import TILES, Cuda
from bitnet_np.gpu.device import bytes_needed, open_cuda, place
from bitnet_np.gpu.storage import DeviceStorage
from bitnet_np.kernels import cpu, masks
from bitnet_np.kernels.cuda import layout, norms, simulated, ternary
from bitnet_np.kernels.cuda.target import PIECE
from bitnet_np.masks import Pattern, mask
from bitnet_np.metrics import Metrics
from bitnet_np.testing import random_model

CHECKS: dict[str, Callable[[], None]] = {}
GROUPS: dict[str, list[str]] = {}


def check(group: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def known(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[function.__name__] = function
        GROUPS.setdefault(group, []).append(function.__name__)
        return function

    return known


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return rng(seed).standard_normal(shape).astype(np.float32)


def device() -> Cuda:
    return open_cuda()


def same(on: Cuda, theirs: object, ours: NDArray) -> None:
    assert_same_bits(on.to_host(theirs), ours)


def odd_rows(width: int) -> NDArray[np.float32]:
    """Rows with everything that has a rule: ties of the quantiser, zeros, tiny and huge numbers, infinity, NaN."""
    x = normal(6, width)
    x[1] = 0
    x[2] = np.arange(width) % 255 - 127 + 0.5
    x[2, 0] = 127
    x[3] *= np.float32(1e-30)
    x[4, width // 2] = np.inf
    x[5, -1] = np.nan
    return x


def equal_where_finite(on: Cuda, theirs: object, ours: NDArray) -> None:
    """Bits, but for those of a NaN, which IEEE leaves open."""
    found = on.to_host(theirs)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(ours))
    same_numbers = np.where(np.isnan(ours), np.float32(0), ours)
    assert_same_bits(np.where(np.isnan(found), np.float32(0), found), same_numbers)


# --- rows -----------------------------------------------------------------------------------------------------------------------------


def _quantized_alike(on: Cuda, found: tuple, x: NDArray[np.float32]) -> None:
    codes, scale = cpu.quantize(x)
    np.testing.assert_array_equal(on.to_host(found[0]), codes)
    equal_where_finite(on, found[1], scale)
    there = arrays.now(found[0])
    sums = on.to_host(there.words).view(np.int32).reshape(-1, there.row_words)[: len(x), -4]
    np.testing.assert_array_equal(sums, codes.sum(axis=1, dtype=np.int32))


@check("rows")
def quantize() -> None:
    on = device()
    for width in (1, 33, 128, 300):
        x = odd_rows(width)
        _quantized_alike(on, on.quantize(on.upload(x)), x)


@check("rows")
def rms_norm() -> None:
    on = device()
    for width in (1, 33, 300, PIECE + 70):  # the last is more than fits shared memory at once
        x, gain = odd_rows(width), normal(width, seed=1)
        out = on.rms_norm(on.upload(x), on.upload(gain), 1e-5)
        ours = cpu.rms_norm(x, gain, 1e-5)
        equal_where_finite(on, out, ours)
        _quantized_alike(on, on.quantize(out), ours)


@check("rows")
def norms_of_what_comes_before() -> None:
    """A sum or a gate that nobody has read yet is worked out by the norm that does; and so are its own readers' numbers."""
    on = device()
    for name, width in (
        ("add", 33),
        ("relu2_gate", 300),
        ("silu_gate", 20),
        ("relu2_gate", norms.WIDEST),
        ("silu_gate", norms.WIDEST + 20),
    ):
        a, b, gain = normal(3, width), normal(3, width, seed=1), normal(width, seed=2)
        ours = getattr(cpu, name)(a, b)
        there = getattr(on, name)(on.upload(a), on.upload(b))
        normed = on.rms_norm(there, on.upload(gain), 1e-5)
        same(on, normed, cpu.rms_norm(ours, gain, 1e-5))
        _quantized_alike(on, on.quantize(normed), cpu.rms_norm(ours, gain, 1e-5))
        same(on, there, ours)
        again = on.rms_norm(there, on.upload(gain), 1e-5)
        _quantized_alike(on, on.quantize(again), cpu.rms_norm(ours, gain, 1e-5))
        by_16_bytes = width % 4 == 0 and width <= norms.WIDEST
        assert again.is_open() == by_16_bytes  # codes alone leave no norm
        same(on, again, cpu.rms_norm(ours, gain, 1e-5))
        same(on, on.add(there, there), ours + ours)


@check("rows")
def norms_fold_their_lanes_by_halving() -> None:
    on, (x, _) = device(), selftest.rows_that_tell_lanes()
    gain = np.ones(x.shape[1], np.float32)
    same(on, on.rms_norm(on.upload(x), on.upload(gain), 0.0), cpu.rms_norm(x, gain, 0.0))


@check("rows")
def layer_norm() -> None:
    on = device()
    for width in (1, 33, PIECE + 90):
        x, gain, bias = normal(2, width) + 3, normal(width, seed=1), normal(width, seed=2)
        x[-1, -1] = 1e30 if width == 33 else x[-1, -1]  # its square is not a float32
        x_there, gain_there = on.upload(x), on.upload(gain)
        for b, b_there in ((bias, on.upload(bias)), (None, None)):
            equal_where_finite(on, on.layer_norm(x_there, gain_there, b_there, 1e-5), cpu.layer_norm(x, gain, b, 1e-5))


@check("rows")
def numbers() -> None:
    on = device()
    a, b = odd_rows(20), normal(6, 20, seed=1)
    a[0, :8] = [-0.0, 0.0, 90, -90, -104, 9, -9, 1]
    a_there, b_there = on.upload(a), on.upload(b)
    with np.errstate(all="ignore"):
        for name in ("add", "relu2_gate", "silu_gate"):
            equal_where_finite(on, getattr(on, name)(a_there, b_there), getattr(cpu, name)(a, b))
        for name in ("gelu", "gelu_tanh"):
            equal_where_finite(on, getattr(on, name)(a_there), getattr(cpu, name)(a))
        equal_where_finite(on, on.add_bias(a_there, on.upload(b[0])), cpu.add_bias(a, b[0]))
        equal_where_finite(on, on.scaled(a_there, np.float32(0.3)), cpu.scaled(a, np.float32(0.3)))
    rows = np.array([4, 0, 0])
    same(on, on.take(b_there, on.upload(rows)), cpu.take(b, rows))


@check("rows")
def rope() -> None:
    on = device()
    x, angle = normal(3, 2, 10), rng().uniform(0, 1e5, (3, 4))
    cos, sin = cpu.rotations(angle)
    rotations = on.rotations(angle)
    for name in ("rope", "rope_adjacent"):
        rotated, ours = getattr(on, name)(on.upload(x), *rotations), getattr(cpu, name)(x, cos, sin)
        same(on, rotated, ours)
        same(on, on.add(rotated, rotated), ours + ours)


@check("rows")
def keep_erase_carry() -> None:
    """Keys and values to their places of a ring, of which some are forgotten and some copied."""
    on, slot, position = device(), np.array([0, 2, 2]), np.array([3, 6, 9])
    k, v, angle = normal(3, 2, 6), normal(3, 2, 6, seed=1), rng().uniform(0, 9, (3, 3))
    k[1, 0, 5], v[0, 0, 0], v[2, 1, 1] = 70000, 1e-6, 65519.9
    ours = cpu.rope(k, *cpu.rotations(angle)), v
    for dtype in (np.float32, np.int16):
        kept = [np.zeros((2, 3, 5, 2, 6), dtype) for _ in ours]
        there = [on.upload(array) for array in kept]
        rotated = on.rope(on.upload(k), *on.rotations(angle))
        on.keep(rotated, on.upload(v), on.upload(slot), on.upload(position), *(array[1] for array in there))
        for array, new in zip(kept, ours, strict=True):
            with np.errstate(over="ignore"):
                half = new.astype(np.float16)
            half[~np.isfinite(half)] = np.float16(np.nan)
            array[1, slot, position % 5] = new if dtype == np.float32 else half.view(np.int16)
        for array, theirs in zip(kept, there, strict=True):
            np.testing.assert_array_equal(on.to_host(theirs), array)
    on.carry(there[0], 2, there[1], 1, 6, 10)
    kept[1][:, 1, np.arange(6, 10) % 5] = kept[0][:, 2, np.arange(6, 10) % 5]
    np.testing.assert_array_equal(on.to_host(there[1]), kept[1])
    on.erase(there[1], 2, 4, 7)
    kept[1][:, 2, [4, 0, 1]] = 0
    np.testing.assert_array_equal(on.to_host(there[1]), kept[1])


@check("rows")
def spread() -> None:
    on = device()
    x, slot, position = normal(4, 2, 3), np.array([0, 0, 2, 2]), np.array([0, 1, 0, 4])
    there = on.upload(x), on.upload(slot), on.upload(position)
    same(on, on.spread(*there, (3, 5)), cpu.spread(x, slot, position, (3, 5)))


@check("rows")
def fill_mask() -> None:
    on = device()
    queries, past, keys = np.array([3, 2]), np.array([2, 0]), np.array([5, 2])
    for pattern in ((0, 0, 0, 0), (2, 0, 0, 0), (0, 3, 0, 0), (0, 0, 2, 1)):
        ours, out = np.empty((2, 3, 5), np.float32), on.empty((2, 3, 5))
        masks.fill_mask(ours, 0, queries, past, keys, *pattern)
        on.fill_mask(out, 0, on.upload(queries), on.upload(past), on.upload(keys), *pattern)
        same(on, out, ours)


@check("rows")
def mask_where_the_policy_says() -> None:
    on = device()
    for limit in (0, 100):
        made = make_mask(3, 5, Pattern(window=2), ops=on, policy=Above(("q_len", "k_len"), limit))
        same(on, made, mask(3, 5, Pattern(window=2)))


# --- matrices -------------------------------------------------------------------------------------------------------------------------


def tables(n: int, width: int) -> Iterator[NDArray]:
    table = normal(n, width, seed=3)
    table[0, 0] = -0.0
    yield table
    yield table.astype(np.float16)
    yield (table.view(np.uint32) >> 16).astype(np.uint16)


@check("matrices")
def embed() -> None:
    on, tokens = device(), np.array([6, 0, 0, 3])
    for width in (1, 40, 130):
        for table in tables(7, width):
            same(on, on.embed(on.table(table), on.upload(tokens)), cpu.embed(table, tokens))


@check("matrices")
def matmul() -> None:
    on = device()
    for width, presents in ((1, (1,)), (40, (2, 9)), (130, (1, 3))):
        for table, present in product(tables(6, width), presents):
            x = normal(present, width, seed=4)
            x[0, 0] = -0.0
            same(on, on.matmul(on.upload(x), on.table(table)), cpu.matmul(x, table))


def ternary_alike(on: Cuda, n: int, width: int, present: int) -> None:
    matrix = rng(5).integers(-1, 2, (n, width)).astype(np.int8)
    matrix[-1] = 1
    x = normal(present, width, seed=6)
    x[-1] = 1  # with the row above: the largest sum there can be
    weights = packing.pack(matrix, 0.37)
    ours = cpu.ternary_matmul(*cpu.quantize(x), weights.codes, weights.scale, n)
    same(on, on.ternary_matmul(*on.quantize(on.upload(x)), on.ternary(weights), weights.scale, n), ours)


@check("matrices")
def ternary_layout() -> None:
    """By the formula of layout.py, weight for weight; what fills the tiles up is weights of zero, what follows them is nothing."""
    for n, width in ((1, 1), (16, 128), (37, 200), (300, 1000)):
        matrix = rng().integers(-1, 2, (n, width)).astype(np.int8)
        tiles, blocks = layout.tiles_of(matrix.shape)
        row, column = np.ogrid[: tiles * 16, : blocks * 128]
        g, j, b, r, p = (
            row % 8,
            column % 64 // 16,
            column % 4,
            row % 16 // 8 + column % 8 // 4 * 2,
            column % 128 // 64 * 2 + column % 16 // 8,
        )
        word = ((row // 16 * blocks + column // 128) * 32 + g * 4 + j) * 4 + r
        words = layout.in_fragments(packing.pack(matrix, 1))
        found = (words[word] >> (8 * b + 2 * p).astype(np.uint32) & 3).astype(np.int8) - 1
        np.testing.assert_array_equal(found, np.pad(matrix, ((0, tiles * 16 - n), (0, blocks * 128 - width))))
        assert words.size == layout.n_words(matrix.shape)
        assert not words[tiles * blocks * 128 :].any()


@check("matrices")
def ternary_rows_of_the_largest_sums() -> None:
    """As wide as is allowed, and all numbers as large as they can be: no plane's sum leaves int32."""
    on, width = device(), ternary.WIDEST if GPU else 1 << 12
    x, matrix = np.ones((2, width), np.float32), np.ones((1, width), np.int8)
    weights = packing.pack(matrix, 1)
    for rows in (x[:1], x):
        ours = cpu.ternary_matmul(*cpu.quantize(rows), weights.codes, weights.scale, 1)
        same(on, on.ternary_matmul(*on.quantize(on.upload(rows)), on.ternary(weights), np.float32(1), 1), ours)
    assert 64 * 2 * 127 * (ternary.WIDEST // 4) < 1 << 31
    with pytest.raises(UnsupportedError, match="262,145 columns, on the device expected at most 262,144"):
        on.ternary(packing.pack(np.zeros((1, ternary.WIDEST + 1), np.int8), 1))


@check("matrices")
def ternary_gemv() -> None:
    for n, width in ((1, 1), (37, 200), (17, 1300), *(((2560, 6912), (6912, 2560)) if GPU else ())):  # 1300: more than one go of a warp
        ternary_alike(device(), n, width, 1)


def normed_product(on: Cuda, source: str, width: int, *rows: int, fits: bool = True) -> None:
    """A norm and the products that read it, of one row: together, and each for itself; and what was normed, by the one who comes first."""
    a, b, gain = normal(1, width), normal(1, width, seed=1), normal(width, seed=2)
    x = a if source == "row" else getattr(cpu, source)(a, b)
    packed = [packing.pack(rng(n).integers(-1, 2, (n, width)), 0.3 + i) for i, n in enumerate(rows)]
    ours = cpu.ternary_matmuls(*cpu.quantize(cpu.rms_norm(x, gain, 1e-5)), *((w.codes, w.scale, w.shape[0]) for w in packed))
    there = [(on.ternary(w), w.scale, w.shape[0]) for w in packed]
    x_there = on.upload(a) if source == "row" else getattr(on, source)(on.upload(a), on.upload(b))
    codes = on.quantize(on.rms_norm(x_there, on.upload(gain), 1e-5))
    for _ in range(2):  # what was normed is there the second time
        for theirs, expected in zip(on.ternary_matmuls(*codes, *there), ours, strict=True):
            same(on, theirs, expected)
        assert codes[0].is_open() == (on.fused and fits)
    same(on, x_there, x)
    same(on, codes[1], cpu.quantize(cpu.rms_norm(x, gain, 1e-5))[1])
    for theirs, expected in zip(on.ternary_matmuls(*codes, *there), ours, strict=True):
        same(on, theirs, expected)


@check("matrices")
def normed_products() -> None:
    on = device()
    normed_product(on, "row", 40, 20, 33, 1)
    normed_product(on, "relu2_gate", 420, 17)
    normed_product(on, "silu_gate", 20, 17, 17)
    on.processors = 2 if SIMULATED else 1000  # fewer tiles for a block, more warps for a tile
    normed_product(on, "add", PIECE, 17)
    if not SIMULATED:
        normed_product(on, "silu_gate", 8640, 17, fits=False)  # 16 warps for a tile leave no room for the codes, 8 for each of two do
        on.processors = 1
        normed_product(on, "silu_gate", 8640, 17)
        on.processors = 1000
    normed_product(on, "add", 300, 17)  # a tile of columns past the end, which is the next row's
    on.fused = False
    normed_product(on, "add", 24, 17)
    for matrices in ((3840,), (6912, 6912)) if GPU else ():
        normed_product(device(), "add", 2560, *matrices)
    if GPU:
        normed_product(device(), "relu2_gate", 6912, 2560)


@check("matrices")
def what_comes_after_products() -> None:
    """A sum or a gate of products that nobody has read yet is worked out with them; and so is nothing once somebody has."""
    on, width, n = device(), 40, 37
    x, gain, h = normal(1, width), normal(width, seed=1), normal(1, n, seed=2)
    packed = [packing.pack(rng(seed).integers(-1, 2, (n, width)), 0.3 + i) for i, seed in enumerate((3, 4))]
    there = [(on.ternary(w), w.scale, n) for w in packed]
    gate, up = cpu.ternary_matmuls(*cpu.quantize(cpu.rms_norm(x, gain, 1e-5)), *((w.codes, w.scale, n) for w in packed))

    def products(*which: tuple) -> list:
        return on.ternary_matmuls(*on.quantize(on.rms_norm(on.upload(x), on.upload(gain), 1e-5)), *which)

    for processors, is_read in product((1, 1000), (False, True)):
        on.processors = processors
        (one,), (first, second) = products(there[1]), products(*there)
        if is_read:
            same(on, one, up)
            same(on, first, gate)
        same(on, on.add(on.upload(h), one), h + up)
        for name in ("relu2_gate", "silu_gate"):
            same(on, getattr(on, name)(first, second), getattr(cpu, name)(gate, up))
            same(on, getattr(on, name)(second, first), getattr(cpu, name)(up, gate))
        same(on, on.add(first, second), gate + up)
        same(on, one, up)
        same(on, second, up)


@check("matrices")
def normed_rows_without_a_scale() -> None:
    """Infinity or NaN anywhere leaves no number of the product."""
    on = device()
    weights, gain = packing.pack(rng(1).integers(-1, 2, (17, 40)), 1), normal(40, seed=2)
    for row in range(len(odd_rows(40))):
        x = odd_rows(40)[row : row + 1]
        q = cpu.quantize(cpu.rms_norm(x, gain, 1e-5))
        codes = on.quantize(on.rms_norm(on.upload(x), on.upload(gain), 1e-5))
        found = on.ternary_matmul(*codes, on.ternary(weights), weights.scale, 17)
        equal_where_finite(on, found, cpu.ternary_matmul(*q, weights.codes, weights.scale, 17))


@check("matrices")
def ternary_skinny() -> None:
    for present in (2, 9, 17):
        ternary_alike(device(), 20, 200, present)  # 17: more tokens than it has at once, and too few rows for the tiles of many tokens
    if not SIMULATED:
        ternary_alike(device(), 1, 128 * (layout.WARPS * layout.DEPTH + 1), 2)  # the last go of all warps but for one is past the end


def ternary_together(on: Cuda, present: int, *rows: int) -> None:
    width = 130
    x, packed = normal(present, width), [packing.pack(rng(n).integers(-1, 2, (n, width)), 0.3 + i) for i, n in enumerate(rows)]
    ours = cpu.ternary_matmuls(*cpu.quantize(x), *((w.codes, w.scale, w.shape[0]) for w in packed))
    there = [(on.ternary(w), w.scale, w.shape[0]) for w in packed]
    found = on.ternary_matmuls(*on.quantize(on.upload(x)), *there)
    for theirs, expected in zip(found, ours, strict=True):
        same(on, theirs, expected)


@check("matrices")
def ternary_matrices_together() -> None:
    for present, rows in ((1, (20, 33, 1)), (2, (17, 5)), (17, (20, 40, 33))):
        ternary_together(device(), present, *rows)
    on = device()
    on.tiles = (TILES[-1],)
    ternary_together(on, 18, 70, 33, 40)


def gemm(tile: tuple[int, ...], n: int, width: int, present: int) -> None:
    on = device()
    on.tiles = (tile,)
    ternary_alike(on, n, width, present)


@check("matrices")
def ternary_gemm() -> None:
    gemm(TILES[-1], 40, 520, 35)  # more blocks of columns than are in shared memory at a time; edges on all sides
    gemm(TILES[-1], 70, 100, 17)


@check("matrices")
def ternary_gemm_of_any_shape() -> None:
    for n, width, present in ((2560, 2560, 17), (640, 6912, 128), (6912, 2560, 513)) if GPU else ():
        for tile in TILES:
            gemm(tile, n, width, present)


@check("matrices")
def ternary_gemm_largest() -> None:
    gemm(TILES[0], 64 + 5, 130, 50)


# --- attention ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    slot: NDArray[np.int64]
    position: NDArray[np.int64]


def attention(heads: int, kv_heads: int, width: int, slot: list[int], position: list[int], window: int | None, capacity: int) -> None:
    """As it is, and twice over rotated queries and keys and values in float16: what was worked out before leaves nothing behind."""
    on, n = device(), len(slot)
    q, (k, v) = normal(n, heads, width), (normal(max(slot) + 1, capacity, kv_heads, width, seed=s) for s in (1, 2))
    slots, positions = np.array(slot), np.array(position)
    there = on.resident(Rows(slots, positions))
    ours = cpu.attend(q, k, v, slots, positions, window)
    same(on, on.attend(on.upload(q), on.upload(k), on.upload(v), there.slot, there.position, window), ours)
    angle = rng(7).uniform(0, 9, (n, width // 2 - width // 8))
    bits = [array.astype(np.float16).view(np.int16) for array in (k, v)]
    ours = cpu.attend(cpu.rope_adjacent(q, *cpu.rotations(angle)), *bits, slots, positions, window)
    rotated = on.rope_adjacent(on.upload(q), *on.rotations(angle))
    for _ in range(2):
        same(on, on.attend(rotated, *map(on.upload, bits), there.slot, there.position, window), ours)


@check("attention")
def attend_rows() -> None:
    attention(4, 2, 6, [0, 0, 0, 1, 1], [0, 1, 2, 3, 4], None, 5)  # two runs in one tile
    attention(5, 1, 20, [1, 1], [63, 64], None, 66)  # a group that is more than four queries; across a chunk's edge


@check("attention")
def attend_many() -> None:
    """The largest blocks, of 32 queries, two and a rest; a window; heads as wide as a kernel is for, and such as are read in 16 bytes."""
    attention(8, 2, 16, [0] * 9, list(range(60, 69)), None, 69)
    attention(4, 1, 24, [0] * 11 + [1] * 6, [*range(56, 67), *range(1, 7)], 30, 67)


@check("attention")
def attend_window() -> None:
    attention(2, 2, 4, [0, 0], [68, 69], 3, 70)  # the first chunk is not seen at all
    attention(2, 2, 4, [0, 1], [69, 64], 6, 70)
    attention(2, 1, 8, [0, 0], [2, 3], 1 << 40, 4)


@check("attention")
def attend_chunks() -> None:
    attention(4, 2, 6, [1, 0], [69, 1], None, 70)
    attention(20, 1, 6, [0], [2], None, 3)  # a group larger than a block


@check("attention")
def attend_long() -> None:
    if GPU:
        attention(20, 5, 128, [1] * 300 + [0] * 41, [*range(200, 500), *range(41)], None, 500)
        attention(20, 5, 128, [0, 1, 2], [4000, 63, 2047], None, 4096)
        attention(32, 8, 64, [0] * 200, list(range(200)), 100, 200)


@check("attention")
def attend_wide() -> None:
    attention(1, 1, 130, [0, 0], [0, 1], None, 2)


@check("attention")
def attend_ring() -> None:
    attention(1, 1, 4, [0, 0], [190, 191], 66, 128)  # two chunks of places, of which the first holds the last keys
    attention(2, 1, 4, [0, 1], [190, 130], 60, 128)


def next_attention(
    heads: int, kv_heads: int, width: int, position: list[int], window: int | None, capacity: int, rope: str, *dtypes: type
) -> None:
    """What is kept and what comes out are the bits of `keep` and then `attend`, by themselves and by the CPU."""
    on, n = device(), len(position)
    slots, positions, places = np.arange(n)[::-1].copy(), np.array(position), np.array(position) % capacity
    q, k, v = (normal(n, count, width, seed=seed) for seed, count in ((3, heads), (4, kv_heads), (5, kv_heads)))
    k[0, 0, -1] = v[-1, -1, 0] = 70000  # beyond float16's range
    angles = rng(7).uniform(0, 9, (2, n, width // 2 - width // 8))  # of queries and of keys
    there = on.resident(Rows(slots, positions))

    def turned(ops: Any, x: Any, what: int) -> Any:
        return x if rope == "none" else getattr(ops, rope)(x, *ops.rotations(angles[what]))

    for dtype in dtypes:
        before = [normal(n, capacity, kv_heads, width, seed=seed) for seed in (1, 2)]
        kept = before if dtype == np.float32 else [array.astype(np.float16).view(np.int16) for array in before]
        together, apart = ([on.upload(array) for array in kept] for _ in range(2))
        uploaded = [on.upload(array) for array in (q, k, v)]
        turned_q, turned_k, new_v = turned(on, uploaded[0], 0), turned(on, uploaded[1], 1), uploaded[2]
        found = on.attend_next(turned_q, turned_k, new_v, there.slot, there.position, *together, window)
        on.keep(turned_k, new_v, there.slot, there.position, *apart)
        expected = on.to_host(on.attend(turned_q, *apart, there.slot, there.position, window))
        equal_where_finite(on, found, expected)
        for one, other, old in zip(together, apart, kept, strict=True):
            np.testing.assert_array_equal(on.to_host(one), on.to_host(other))
            assert (on.to_host(one)[slots, places] != old[slots, places]).any(axis=(1, 2)).all()
        ours = cpu.attend(turned(cpu, q, 0), *map(on.to_host, together), slots, positions, window)
        equal_where_finite(on, found, ours)
        assert np.isnan(ours).any() == (dtype == np.int16)


@check("attention")
def attend_next() -> None:
    next_attention(4, 2, 6, [69, 1], None, 70, "rope", np.float32, np.int16)  # two chunks, of which the second has the new key
    next_attention(6, 1, 20, [64], None, 65, "none", np.float32)  # a group that is more than four queries; the new key is a chunk's first
    next_attention(9, 1, 20, [64], None, 65, "none", np.float32)  # a group that two blocks share
    next_attention(2, 1, 4, [190, 63], 60, 128, "rope_adjacent", np.int16)  # a ring, and a chunk's last key


def masked_attention(heads: int, kv_heads: int, width: int, slot: list[int], position: list[int], mask: NDArray, v: NDArray) -> None:
    on, n, t = device(), len(slot), mask.shape[2]
    q, k = normal(n, heads, width), normal(max(slot) + 1, t, kv_heads, width, seed=1)
    slots, positions = np.array(slot), np.array(position)
    there = on.resident(Rows(slots, positions))
    ours = masks.attend_masked(q, k, v, slots, positions, mask)
    equal_where_finite(on, on.attend_masked(*map(on.upload, (q, k, v)), there.slot, there.position, on.upload(mask)), ours)


@check("attention")
def attend_masked() -> None:
    """Biases; a chunk and a row that see nothing; padding; and values that are not finite, which hidden keys keep to themselves."""
    mask = np.where(rng(3).random((2, 67, 67)) < 0.5, normal(2, 67, 67, seed=4), np.float32(-np.inf)).astype(np.float32)
    mask[0, 3], mask[0, 4, :64], mask[1, :, 66:] = -np.inf, -np.inf, -np.inf
    v = normal(2, 67, 1, 4, seed=2)
    masked_attention(2, 1, 4, [0, 0, 1], [3, 4, 66], mask, v)
    v[0, 65, 0, 2] = np.inf
    mask[0, 4, 65] = -np.inf
    masked_attention(2, 1, 4, [0, 0, 1], [3, 4, 1], mask[:1], v)


# --- models ---------------------------------------------------------------------------------------------------------------------------

TINY = {"width": 40, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 36, "n_layers": 1, "vocab": 9}

SMALLEST = {"width": 8, "heads": 2, "kv_heads": 2, "head_dim": 4, "ffn": 12, "n_layers": 1, "vocab": 5}


@check("models")
def whole_forward() -> None:
    on, model = device(), random_model(rng(), **TINY)
    seen: dict[str, NDArray] = {}
    theirs: dict[str, NDArray] = {}
    tokens = rng(1).integers(0, 9, (2, 3))
    ours = forward_full(model, tokens, [3, 1], record=lambda name, n, array: seen.update({name: array.copy()}))
    found = forward_full(place(model, on), tokens, [3, 1], ops=on, record=lambda name, n, array: theirs.update({name: array.copy()}))
    assert_same_bits(found, ours)
    assert seen.keys() == theirs.keys()
    for name, array in seen.items():
        np.testing.assert_array_equal(theirs[name], array, err_msg=name)


@check("models")
def cached_forward() -> None:
    on, model = device(), random_model(rng(2), **TINY | {"heads": 2})
    there, cache, own = place(model, on), new_cache(model.config, 2, 4, on), KVCache(model.config, 2, 4)
    for tokens, lengths in (([[3, 1], [7, 0]], [2, 1]), ([[5], [8]], [1, 1])):
        assert_same_bits(forward(there, tokens, cache, lengths, ops=on), forward(model, tokens, own, lengths))
    for kept, ours in ((cache.k, own.k), (cache.v, own.v)):
        same(on, kept, ours)
    cache.truncate(0, 1)
    own.truncate(0, 1)
    same(on, cache.k, own.k)


@check("models")
def prefill_in_blocks() -> None:
    """Nobody asks for the logits of a block that is not the last: what stands for them is not on the device."""
    on, model = device(), random_model(rng(3), **SMALLEST)
    cache, own, tokens = new_cache(model.config, 1, 4, on), KVCache(model.config, 1, 4), [[1, 3, 2]]
    assert_same_bits(prefill(place(model, on), tokens, cache, block=2, ops=on), prefill(model, tokens, own, block=2))
    alike(on, cache, own)


def alike(on: Cuda, theirs: KVCache, ours: KVCache) -> None:
    """float16 as the same bits."""
    for kept, expected in ((theirs.k, ours.k), (theirs.v, ours.v)):
        np.testing.assert_array_equal(on.to_host(kept), expected if expected.dtype == np.float32 else expected.view(np.int16))
    np.testing.assert_array_equal(theirs.lengths, ours.lengths)
    assert (theirs.nbytes, theirs.dtype) == (ours.nbytes, ours.dtype)


@check("models")
def forked_and_resized_caches() -> None:
    on, model = device(), random_model(rng(8), **SMALLEST)
    there = place(model, on)
    for dtype in (np.float32, np.float16):
        cache, own = new_cache(model.config, 2, 4, on, dtype), KVCache(model.config, 2, 4, dtype)
        assert_same_bits(forward(there, [[1, 2, 3]], cache, ops=on), forward(model, [[1, 2, 3]], own))
        for kept in (cache, own):
            kept.fork(0, [1], 2)
            kept.resize(3, 5)
        alike(on, cache, own)
        assert_same_bits(forward(there, [[4], [0]], cache, ops=on), forward(model, [[4], [0]], own))
        assert_same_bits(stepper(there, cache, on)([2, 3, 1]), stepper(model, own)([2, 3, 1]))
        alike(on, cache, own)


@check("models")
def beyond_float16() -> None:
    on, model = device(), random_model(rng(8), **SMALLEST)
    model = replace(model, layers=tuple(replace(w, attn_norm=w.attn_norm * np.float32(1e6)) for w in model.layers))
    cache = new_cache(model.config, 1, 4, on, np.float16)
    with pytest.raises(NonFiniteError, match="sequence 0, position 0"):
        forward(place(model, on), [[1, 2]], cache, ops=on)
    assert not on.to_host(cache.k).any()


@check("models")
def ring_caches() -> None:
    """Rows that wrap around, what is written over and taken back, and one token after another."""
    on, model = device(), random_model(rng(9), **SMALLEST | {"window": 3, "context": 300})
    there, tokens = place(model, on), [[1, 3, 2, 4]]
    cache, own = KVCache(model.config, 1, 300, ring=True, storage=DeviceStorage(on)), KVCache(model.config, 1, 300, ring=True)
    assert own.k.shape[2] == 128
    own.k[:], own.v[:] = normal(*own.k.shape), normal(*own.k.shape, seed=1)
    cache.k, cache.v = on.upload(own.k), on.upload(own.v)
    cache.lengths[:] = own.lengths[:] = 126

    def stop(name: str, layer: int | None, array: NDArray) -> None:
        if name == "l_out":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forward(there, tokens, cache, ops=on, record=stop)
    alike(on, cache, own)
    assert_same_bits(forward(there, tokens, cache, ops=on), forward(model, tokens, own))
    alike(on, cache, own)
    assert_same_bits(stepper(there, cache, on)([3]), stepper(model, own)([3]))
    alike(on, cache, own)


@check("models")
def masked_forward() -> None:
    """A mask of each sequence's own, padding, and a position that sees nothing."""
    on, model = device(), random_model(rng(7), **SMALLEST)
    tokens, mask = [[1, 2, 3], [4, 0, 0]], np.zeros((2, 1, 3, 3), np.bool_)
    mask[0, 0, 0, 2] = mask[0, 0, 2, :2] = mask[1, 0, 0, 0] = True
    ours = forward_full(model, tokens, [3, 1], mask=mask)
    assert_same_bits(forward_full(place(model, on), tokens, [3, 1], mask=mask, ops=on), ours)


@check("models")
def other_families() -> None:
    for family, more in (("llama", {"weights": "float16"}), ("gptneox", {"weights": "bfloat16", "parallel_residual": True}), ("gpt2", {})):
        on, model = device(), random_model(rng(3), **SMALLEST | {"family": family} | more)
        tokens = rng(1).integers(0, 5, (1, 2))
        assert_same_bits(forward_full(place(model, on), tokens, last_only=True, ops=on), forward_full(model, tokens, last_only=True))


@check("models")
def generation() -> None:
    on, model = device(), random_model(rng(4), **SMALLEST)
    assert generate(place(model, on), [1, 2], 2, ops=on) == generate(model, [1, 2], 2)


@check("models")
def metered() -> None:
    on, model, metrics = device(), random_model(rng(4), **SMALLEST), Metrics()
    ops = metrics.ops(on, "a test")
    assert generate(place(model, on), [1, 2], 2, ops=ops) == generate(model, [1, 2], 2)
    counted = metrics.as_dict()
    assert counted["cpu_dispatches"] == 0
    assert counted["operations"]["attend"] | {"device": "cuda", "reason": "a test", "calls": 1} == counted["operations"]["attend"]


@check("models")
def decoder() -> None:
    on, model = device(), random_model(rng(5), **SMALLEST)
    there, cache, own = place(model, on), new_cache(model.config, 2, 4, on), KVCache(model.config, 2, 4)
    prompt = [[1, 2], [3, 0]], [2, 1]
    assert_same_bits(forward(there, prompt[0], cache, prompt[1], ops=on), forward(model, prompt[0], own, prompt[1]))
    step, ours = stepper(there, cache, on), stepper(model, own)
    assert GPU or decode.GraphDecoder(there, cache, on, np.arange(2)).graph.overlapped == PTX
    same(on, cache.k, own.k)  # getting ready leaves nothing behind
    for tokens in ([3, 1], [0, 4]):
        assert_same_bits(step(tokens), ours(tokens))
        same(on, cache.v, own.v)
    cache.truncate(1, 1)  # and a step after one that was taken back
    own.truncate(1, 1)
    for kept in (cache, own):
        kept.truncate(0, 3)
    assert_same_bits(step([0, 2]), ours([0, 2]))
    for both in (step, ours):
        with pytest.raises(CapacityError, match="slot 0 holds 4 of 4"):
            both([1, 1])
        with pytest.raises(TokenRangeError, match="token 5 at position 0 of sequence 1"):
            both([1, 5])
        with pytest.raises(ShapeError, match="tokens has shape"):
            both([[1, 1]])


@check("models")
def a_decoder_grows() -> None:
    """Where its graph ends comes one of more positions, and of more blocks: also where others filled the cache meanwhile."""
    on, model, captured = device(), random_model(rng(5), **SMALLEST | {"context": 80}), list[int]()
    there, cache, own = place(model, on), new_cache(model.config, 1, 80, on), KVCache(model.config, 1, 80)
    own.k[:], own.v[:] = normal(*own.k.shape), normal(*own.k.shape, seed=1)
    cache.k, cache.v = on.upload(own.k), on.upload(own.v)

    def counted(*arguments: Any) -> graph.Graph:
        captured.append(int(cache.lengths[0]))
        return one(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        one = graph.captured
        patched.setattr(graph, "captured", counted)
        patched.setattr(decode, "_FIRST", 2)
        step, ours = stepper(there, cache, on), stepper(model, own)
        for length in (0, 1, 2, 33, 62, 63, 64, 66):
            cache.lengths[0] = own.lengths[0] = length
            assert_same_bits(step([length % 5]), ours([length % 5]))
    assert captured == [0, 2, 33, 66]  # for 2, 4, 66 and 80 positions
    alike(on, cache, own)


@check("models")
def a_decoder_keeps_what_its_graph_knows_by_address() -> None:
    on, model, alive = device(), random_model(rng(5), **SMALLEST), list[weakref.ref]()
    there, upload = place(model, on), on.upload

    def watched(array: NDArray) -> object:
        found = upload(array)
        alive.append(weakref.ref(found))
        return found

    class Watched(arrays.Arena):
        def __init__(self) -> None:
            super().__init__()
            alive.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(on, "upload", watched)
        patched.setattr(arrays, "Arena", Watched)
        patched.setattr(graph, "captured", lambda *arguments: graph.Graph(lambda: None, False))  # which does not hold `run`, as on a GPU
        step = stepper(there, new_cache(model.config, 1, 4, on), on)
    gc.collect()
    assert step is not None
    assert len(alive) == 1 + 4 + 2  # the arena; tokens, slots, rows, positions; cosines and sines
    assert all(reference() is not None for reference in alive)


@check("models")
def nothing_waits_for_the_garbage_collector() -> None:
    """Memory that is let go is there for what comes next, or a graph could not be captured in the memory of the run before."""
    on, model = device(), random_model(rng(5), **SMALLEST)
    there, cache = place(model, on), new_cache(model.config, 2, 9, on)

    def run() -> None:
        for tokens in ([[1]], [[1, 2]], [[3], [4]]):
            forward(there, tokens, cache, ops=on)

    run()  # what is left of compiling is not meant
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


@check("models")
def launches() -> None:
    """How many a decoded token takes: each costs as much as most of what they do. (A GPU does not tell those of a graph.)"""
    if GPU:
        return
    from numba.cuda.simulator.kernel import FakeCUDAKernel

    on, kernels, layers = device(), Counter[str](), 3
    model = random_model(rng(5), **SMALLEST | {"n_layers": layers})
    step = stepper(place(model, on), new_cache(model.config, 1, 80, on), on)
    where, function = (FakeCUDAKernel, "__call__") if SIMULATED else (install().device, "launch")
    run = getattr(where, function)

    def counted(kernel: Any, *arguments: object) -> None:
        kernels[kernel.fn.__name__ if SIMULATED else kernel.name] += 1
        run(kernel, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(where, function, counted)
        step([1])
    each = {"normed_product_row_of_row", "attend_chunk", "normed_product_sum_of_row", "normed_product_relu2_of_row"}
    once = dict.fromkeys(("take_rotations", "embed", "rms_norm_row", "matmul", "advance"), 1)
    assert kernels == dict.fromkeys(each, layers) | {"normed_product_sum_of_row": 2 * layers} | once
    assert kernels.total() == 5 * layers + 5


@check("models")
def refusals() -> None:
    """What a device cannot do is told by name, and too little memory before anything is sent."""
    on, model = device(), random_model(rng(6), **SMALLEST)
    there = place(model, on)
    with pytest.raises(UnsupportedError, match=r"the dialect is bitnet\.cpp, expected exact on this device"):
        forward_full(there, [[1]], dialect=BITNET_CPP, ops=on)
    with pytest.raises(MaskError, match="later"):
        forward_full(there, [[1, 2]], mask=np.zeros((2, 2), np.float32), strict=True, ops=on)
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


def main(arguments: list[str]) -> None:
    if SIMULATED:
        simulated.use_barriers()
    asked = [argument for argument in arguments if not argument.startswith("--")]
    for name in [name for each in asked for name in GROUPS.get(each, [each])] or CHECKS:
        began, problem = time.perf_counter(), ""
        try:
            CHECKS[name]()
        except Exception:
            problem = traceback.format_exc()
        if PTX:
            problem += "".join(install().problems)
            install().problems.clear()
        print(json.dumps({"check": name, "seconds": round(time.perf_counter() - began, 2), "problem": problem}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
