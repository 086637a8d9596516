"""Single operations: rows and numbers, tables, ternary matrices, attention, caches and masks."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from operation_draws import CASES, Draw

from bitnet_np.engine.masks import Pattern, mask
from bitnet_np.gpu import backend, dispatch
from bitnet_np.gpu.device import open_cuda
from bitnet_np.kernels import cpu
from bitnet_np.kernels.cuda.rows import OF_NUMBERS
from bitnet_np.model import packing
from bitnet_np.testing import selftest
from bitnet_np.testing.models import bfloat16_bits
from cuda_checks.common import GPU, check, normal, odd_rows, rng, same

on = open_cuda()


@np.errstate(all="ignore")
def by_both(name: str, *arguments: Any) -> None:
    """Assert that an operation gives the same bits on the device."""
    sent = [on.upload(x) if isinstance(x, np.ndarray) else x for x in arguments]
    ours, theirs = getattr(cpu, name)(*arguments), getattr(on, name)(*sent)
    same(on, *((sent[0], arguments[0]) if theirs is None else (theirs, ours)))


# --- rows and numbers -----------------------------------------------------------------------------------------------------------------


@check
def quantize() -> None:
    for width in (1, 33, 128, 600):
        x = odd_rows(width)
        (codes, scale), (theirs, their_scale) = cpu.quantize(x), on.quantize(on.upload(x))
        np.testing.assert_array_equal(on.to_host(theirs), codes)
        np.testing.assert_array_equal(on.to_host(theirs.row_sums), codes.sum(axis=1, dtype=np.int32))
        assert not on.to_host(theirs.words).view(np.int8)[:, width:].any()
        same(on, their_scale, scale)


@check
@np.errstate(all="ignore")
def operations() -> None:
    """Those whose arguments may be of any size, with arguments that are drawn, numbers and edges."""
    names = {"rms_norm", "layer_norm", "rope", "rope_adjacent", "embed", "take"} | OF_NUMBERS.keys() & CASES.keys()
    for name, edges, seed in product(sorted(names), (False, True), range(4 if GPU else 2)):
        by_both(name, *CASES[name](Draw(rng(seed), edges)))


@check
def order_of_sums() -> None:
    """Rows that tell orders of sums apart, and squares that are rounded: of the seed's first six rows, three would have another root."""
    for x in (selftest.rows_that_tell_lanes()[0], normal(200 if GPU else 6, 20, seed=829)):
        by_both("rms_norm", x, np.ones(x.shape[1], np.float32), 0.0)


# --- tables and ternary matrices ------------------------------------------------------------------------------------------------------


def tables(n: int, width: int) -> list[NDArray]:
    table = normal(n, width, seed=3)
    table[0, 0], table[-1] = -0.0, 1e-30
    return [table, table.astype(np.float16), bfloat16_bits(table)]


@check
def matmul() -> None:
    for width, presents in ((1, (1,)), (40, (2, 9)), (130, (1,)), *(((2560, (1, 65)),) if GPU else ())):
        for table, present in product(tables(11, width), presents):
            x = normal(present, width, seed=4)
            x[0, 0] = -0.0
            x[1:2] = -1e-30  # times the table's last row, all lanes underflow to -0
            by_both("matmul", x, table)


@check
def ternary_matmul() -> None:
    """Edges on all sides: rows, columns, words of a quad, warps, and tokens, few and many."""
    shapes = [(1, 1, 1), (37, 200, 8), (130, 650, 2), (300, 72, 9), (20, 130, 35), (129, 64, 33)]
    for n, width, present in shapes + [(2560, 6912, tokens) for tokens in (1, 16, 513) if GPU]:
        matrix, x = rng(5).integers(-1, 2, (n, width)), normal(present, width, seed=6)
        matrix[-1] = x[-1] = 1  # the largest sum there can be
        x[0, 0] = 1e30 if present == 9 else x[0, 0]
        weights = packing.pack(matrix.astype(np.int8), 0.37)
        ours = cpu.ternary_matmul(*cpu.quantize(x), weights.codes, weights.scale, n)
        codes = on.quantize(on.upload(x))
        (theirs,) = on.ternary_matmuls(*codes, (on.ternary(weights), weights.scale, n))
        same(on, theirs, ours)


@check
def rows_without_a_scale() -> None:
    """Infinity or NaN in a row makes every number of its product NaN; divisors have any exponent."""
    x = np.concatenate([odd_rows(70), normal(20, 70)])
    x[6:] *= np.exp2(np.linspace(-20, 120, 20)).astype(np.float32)[:, None]
    weights = packing.pack(rng(1).integers(-1, 2, (33, 70)), 1e20)
    theirs = on.ternary_matmul(*on.quantize(on.upload(x)), on.ternary(weights), weights.scale, 33)
    with np.errstate(over="ignore", invalid="ignore"):
        same(on, theirs, cpu.ternary_matmul(*cpu.quantize(x), weights.codes, weights.scale, 33))


# --- attention ------------------------------------------------------------------------------------------------------------------------


def attention(heads: int, kv_heads: int, width: int, slot: list[int], position: list[int], *how: Any, halves: bool = False) -> None:
    """how: window, scale and cap."""
    shape = max(slot) + 1, max(position) + 1, kv_heads, width
    q, (k, v) = normal(len(slot), heads, width), (normal(*shape, seed=seed) for seed in (1, 2))
    if halves:
        k, v = (array.astype(np.float16).view(np.int16) for array in (k, v))
    by_both("attend", q, k, v, np.array(slot), np.array(position), *how)


@check
def attend() -> None:
    attention(4, 2, 6, [0, 0, 0, 1, 1], [0, 1, 2, 3, 4])
    attention(5, 1, 20, [1, 1, 0], [63, 64, 130], halves=True)  # across the edges of chunks
    attention(2, 2, 4, [0, 0], [68, 197], 3)  # chunks that are not seen at all
    attention(2, 1, 8, [0, 0], [2, 3], 1 << 40)
    attention(2, 1, 4, [0, 1, 0], [190, 130, 191], 60)
    attention(2, 1, 130, [0], [65])  # heads wider than a block has threads
    attention(4, 2, 6, [1, 0], [69, 1], 66, np.float32(0.3), np.float32(2))  # another scale, and capped
    if GPU:
        attention(20, 5, 128, [1] * 300 + [0] * 41, [*range(200, 500), *range(41)])
        attention(20, 5, 128, [0, 1, 2], [4000, 63, 2047], halves=True)
        attention(32, 8, 64, [0] * 200, list(range(200)), 100)


@check
def attention_of_some_rows_at_a_time() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend, "_PARTS", 2 * 4 * 2 * 8 * 4)  # two rows
        attention(4, 2, 6, [0] * 5, list(range(64, 69)))


@check
def attend_masked() -> None:
    """Biases; a chunk and a row that see nothing; padding; values that are not finite, which hidden keys keep to themselves; a cap."""
    biases = np.where(rng(3).random((2, 67, 67)) < 0.5, normal(2, 67, 67, seed=4), np.float32(-np.inf)).astype(np.float32)
    biases[0, 3], biases[0, 4, :64], biases[1, :, 66:] = -np.inf, -np.inf, -np.inf
    q, k, v = normal(3, 2, 4), normal(2, 67, 1, 4, seed=1), normal(2, 67, 1, 4, seed=2)
    infinite, hidden = v.copy(), biases[:1].copy()
    infinite[0, 65, 0, 2], hidden[0, 4, 65] = np.inf, -np.inf
    for slot, position, values, bias, scores in (
        ([0, 0, 1], [3, 4, 66], v, biases, ()),
        ([0, 0, 1], [3, 4, 1], infinite, hidden, ()),
        ([0, 0, 1], [3, 4, 1], v, hidden, (np.float32(0.3), np.float32(2))),
    ):
        by_both("attend_masked", q, k, values, np.array(slot), np.array(position), bias, *scores)


# --- caches and masks -----------------------------------------------------------------------------------------------------------------


@check
def keep_erase_carry() -> None:
    """Keys and values to their positions; some positions copied, some erased. models.py has numbers beyond float16."""
    slot, position, new = np.array([0, 2, 2]), np.array([3, 4, 0]), normal(2, 3, 2, 6)
    new[0, 0, 0, 0], new[1, 2, 1, 1] = 1e-6, 65519.9  # below float16's normal numbers, and its largest
    for dtype in (np.float32, np.float16):
        found = []
        for ops in (cpu, on):
            storage = ops.storage()
            k, v = storage.zeros((2, 3, 5, 2, 6), dtype)
            storage.write(1, k[1], v[1], *map(ops.upload, (slot, position, *new)))
            storage.carry(k, 2, v, 1, 4)
            storage.erasing(v, 2, 3, 5)()
            found.append([ops.to_host(each) for each in (k, v)])
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_array_equal(theirs, ours.view(theirs.dtype))


@check
def fill_mask() -> None:
    for most in (0, 100):  # filled there, or sent
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(dispatch, "MOST_SENT", most)
            for pattern in (Pattern(), Pattern(window=2), Pattern(prefix=3), Pattern(block=2, sinks=1), Pattern(3, 2, 4, 1)):
                same(on, dispatch.make_mask(3, 9, pattern, past=4, ops=on), mask(3, 9, pattern, past=4))
