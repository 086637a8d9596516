"""Tables of numbers, ternary matrices, and products with the norms before them."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from bitnet_np import packing
from bitnet_np.errors import UnsupportedError
from bitnet_np.gpu.backend import GROUPS, TILES, Cuda
from bitnet_np.kernels import cpu
from bitnet_np.kernels.cuda import layout, ternary
from bitnet_np.kernels.cuda.target import PIECE
from cuda_checks.common import GPU, check, device, equal_where_finite, normal, odd_rows, rng, same


def tables(n: int, width: int) -> Iterator[NDArray]:
    table = normal(n, width, seed=3)
    table[0, 0] = -0.0
    yield table
    yield table.astype(np.float16)
    yield (table.view(np.uint32) >> 16).astype(np.uint16)


@check
def embed() -> None:
    on, tokens = device(), np.array([6, 0, 0, 3])
    for width in (1, 40, 130):
        for table in tables(7, width):
            same(on, on.embed(on.table(table), on.upload(tokens)), cpu.embed(table, tokens))


@check
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


@check
def ternary_layout() -> None:
    """Weight for weight by the formula of layout.py: tiles are filled up with weights of zero, and zero words follow them."""
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
        codes = (words[word] >> (8 * b + 2 * p).astype(np.uint32) & 3).astype(np.int8) - 1
        np.testing.assert_array_equal(codes, np.pad(matrix, ((0, tiles * 16 - n), (0, blocks * 128 - width))))
        assert words.size == layout.n_words(matrix.shape)
        assert not words[tiles * blocks * 128 :].any()


@check
def ternary_rows_of_the_largest_sums() -> None:
    """No plane's sum leaves int32 in a matrix as wide as is allowed, with all numbers as large as they can be."""
    on, width = device(), ternary.WIDEST if GPU else 1 << 12
    x, matrix = np.ones((2, width), np.float32), np.ones((1, width), np.int8)
    weights = packing.pack(matrix, 1)
    for rows in (x[:1], x):
        ours = cpu.ternary_matmul(*cpu.quantize(rows), weights.codes, weights.scale, 1)
        same(on, on.ternary_matmul(*on.quantize(on.upload(rows)), on.ternary(weights), np.float32(1), 1), ours)
    assert 64 * 2 * 127 * (ternary.WIDEST // 4) < 1 << 31
    with pytest.raises(UnsupportedError, match="262,145 columns, on the device expected at most 262,144"):
        on.ternary(packing.pack(np.zeros((1, ternary.WIDEST + 1), np.int8), 1))


@check
def ternary_gemv() -> None:
    for n, width in ((1, 1), (37, 200), (17, 1300), (1, 8320), *(((2560, 6912), (6912, 2560)) if GPU else ())):  # 8320: a warp has two goes
        ternary_alike(device(), n, width, 1)


def normed_product(on: Cuda, source: str, width: int, *rows: int, fits: bool = True) -> None:
    """The norm of one row and the products that read it: in one launch, then each for itself. The first reader leaves what is normed."""
    a, b, gain = normal(1, width), normal(1, width, seed=1), normal(width, seed=2)
    x = a if source == "row" else getattr(cpu, source)(a, b)
    packed = [packing.pack(rng(n).integers(-1, 2, (n, width)), 0.3 + i) for i, n in enumerate(rows)]
    ours = cpu.ternary_matmuls(*cpu.quantize(cpu.rms_norm(x, gain, 1e-5)), *((w.codes, w.scale, w.shape[0]) for w in packed))
    uploaded = [(on.ternary(w), w.scale, w.shape[0]) for w in packed]
    x_uploaded = on.upload(a) if source == "row" else getattr(on, source)(on.upload(a), on.upload(b))
    codes = on.quantize(on.rms_norm(x_uploaded, on.upload(gain), 1e-5))
    for _ in range(2):  # the second time, what is normed has been left by the first
        for theirs, expected in zip(on.ternary_matmuls(*codes, *uploaded), ours, strict=True):
            same(on, theirs, expected)
        assert codes[0].is_open() == (on.fused and fits)
    same(on, x_uploaded, x)
    same(on, codes[1], cpu.quantize(cpu.rms_norm(x, gain, 1e-5))[1])
    for theirs, expected in zip(on.ternary_matmuls(*codes, *uploaded), ours, strict=True):
        same(on, theirs, expected)


@check
def normed_products() -> None:
    on = device()
    normed_product(on, "row", 40, 20, 33, 1)
    normed_product(on, "relu2_gate", 420, 17)
    normed_product(on, "silu_gate", 20, 17, 17)
    on.processors = 1000  # fewer tiles for a block, more warps for a tile
    normed_product(on, "add", PIECE, 17)
    normed_product(on, "silu_gate", 8640, 17, fits=False)  # 16 warps for a tile leave no room for the codes, 8 for each of two do
    on.processors = 1
    normed_product(on, "silu_gate", 8640, 17)
    on.at_once = 2
    normed_product(on, "silu_gate", 20, 17, 17)
    normed_product(on, "row", 2000, 80)  # a warp has two turns, which one of a whole processor's registers has not
    on.processors, on.at_once = 1000, 1
    normed_product(on, "add", 300, 17)  # a tile of columns past the end, which is the next row's
    on.fused = False
    normed_product(on, "add", 24, 17)
    for matrices in ((3840,), (6912, 6912)) if GPU else ():
        normed_product(device(), "add", 2560, *matrices)
    if GPU:
        normed_product(device(), "relu2_gate", 6912, 2560)


@check
def what_comes_after_products() -> None:
    """The launch of products works out the sum or the gate that follows, unless somebody has read the products before."""
    on, width, n = device(), 40, 37
    x, gain, h = normal(1, width), normal(width, seed=1), normal(1, n, seed=2)
    packed = [packing.pack(rng(seed).integers(-1, 2, (n, width)), 0.3 + i) for i, seed in enumerate((3, 4))]
    uploaded = [(on.ternary(w), w.scale, n) for w in packed]
    gate, up = cpu.ternary_matmuls(*cpu.quantize(cpu.rms_norm(x, gain, 1e-5)), *((w.codes, w.scale, n) for w in packed))

    def products(*which: tuple) -> list:
        return on.ternary_matmuls(*on.quantize(on.rms_norm(on.upload(x), on.upload(gain), 1e-5)), *which)

    for processors, is_read in product((1, 1000), (False, True)):
        on.processors = processors
        (one,), (first, second) = products(uploaded[1]), products(*uploaded)
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


@check
def normed_rows_without_a_scale() -> None:
    """Infinity or NaN in a row makes every number of its product NaN."""
    on = device()
    weights, gain = packing.pack(rng(1).integers(-1, 2, (17, 40)), 1), normal(40, seed=2)
    for row in range(len(odd_rows(40))):
        x = odd_rows(40)[row : row + 1]
        q = cpu.quantize(cpu.rms_norm(x, gain, 1e-5))
        codes = on.quantize(on.rms_norm(on.upload(x), on.upload(gain), 1e-5))
        product_there = on.ternary_matmul(*codes, on.ternary(weights), weights.scale, 17)
        equal_where_finite(on, product_there, cpu.ternary_matmul(*q, weights.codes, weights.scale, 17))


@check
def ternary_skinny() -> None:
    for present in (2, 9, 17):
        ternary_alike(device(), 20, 200, present)  # 17: more tokens than it has at once, and too few rows for the tiles of many tokens
    for n, processors in ((20, 2), (37, 1)):  # a tile of rows, and three of them, for a block
        ternary_alike(device(processors), n, 200, 3)
    ternary_alike(device(), 1, 128 * (layout.WARPS * layout.DEPTH + 1), 2)  # the last go of all warps but for one is past the end


def ternary_together(on: Cuda, present: int, *rows: int) -> None:
    width = 130
    x, packed = normal(present, width), [packing.pack(rng(n).integers(-1, 2, (n, width)), 0.3 + i) for i, n in enumerate(rows)]
    ours = cpu.ternary_matmuls(*cpu.quantize(x), *((w.codes, w.scale, w.shape[0]) for w in packed))
    uploaded = [(on.ternary(w), w.scale, w.shape[0]) for w in packed]
    products = on.ternary_matmuls(*on.quantize(on.upload(x)), *uploaded)
    for theirs, expected in zip(products, ours, strict=True):
        same(on, theirs, expected)


@check
def ternary_matrices_together() -> None:
    for present, rows in ((1, (20, 33, 1)), (2, (17, 5)), (17, (20, 40, 33))):
        ternary_together(device(), present, *rows)
    on = device()
    on.tiles, on.groups = (TILES[-1],), ()
    ternary_together(on, 18, 70, 33, 40)


def gemm(tile: tuple[int, ...], n: int, width: int, present: int) -> None:
    on = device()
    on.tiles, on.groups = (tile,), ()
    ternary_alike(on, n, width, present)


@check
def ternary_gemm() -> None:
    gemm(TILES[-1], 40, 520, 35)  # more blocks of columns than are in shared memory at a time; edges on all sides
    gemm(TILES[-1], 70, 100, 17)


@check
def ternary_gemm_of_any_shape() -> None:
    for n, width, present in ((2560, 2560, 17), (640, 6912, 128), (6912, 2560, 513)) if GPU else ():
        for tile in TILES:
            gemm(tile, n, width, present)


def by_groups(shape: tuple[int, int], n: int, width: int, present: int) -> None:
    on = device(1)
    if on.groups:  # a device has warpgroups that multiply, or there is nothing to check
        on.groups = (shape,)
        ternary_alike(on, n, width, present)


@check
def ternary_groups() -> None:
    by_groups((2, 64), 40, 520, 35)  # more blocks of columns than are in shared memory at a time; edges on all sides
    by_groups((2, 64), 130, 100, 70)
    by_groups((4, 128), 70, 300, 130)
    for n, width, present in ((2560, 2560, 17), (640, 6912, 128), (6912, 2560, 513)) if GPU else ():
        for shape in GROUPS:
            by_groups(shape, n, width, present)


@check
def quotients() -> None:
    """Scales of rows whose largest number is tiny, huge, or NaN: divisors with any exponent."""
    on = device(1)
    on.groups = on.groups and ((2, 64),)
    x = normal(20, 70)
    x[::2] *= np.exp2(np.linspace(-20, 120, 10)).astype(np.float32)[:, None]
    x[3, 5], x[7, 2], x[9] = np.inf, np.nan, 0
    weights = packing.pack(rng(1).integers(-1, 2, (33, 70)), 1e20)
    theirs = on.ternary_matmul(*on.quantize(on.upload(x)), on.ternary(weights), weights.scale, 33)
    with np.errstate(over="ignore", invalid="ignore"):
        equal_where_finite(on, theirs, cpu.ternary_matmul(*cpu.quantize(x), weights.codes, weights.scale, 33))


@check
def ternary_gemm_largest() -> None:
    gemm(TILES[0], 64 + 5, 130, 50)
