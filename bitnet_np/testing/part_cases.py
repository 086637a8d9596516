"""Products and attention in parts, for the self-test: any number of rows and of outputs has the bits that it has in the whole.

Which kernel computes a product, and in what tiles, depends on these numbers and on the processor. Here every number up to ROWS and COLUMNS
has its turn. These are beyond the borders of every processor's kernels, so no border is listed, and the known bits are those of the whole.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import BLOCK_TYPES, TensorType
from ..engine.backend import Backend
from ..kernels import cpu
from ..model import packing
from .models import random_table
from .noise import Noise, noise

ROWS, COLUMNS = 137, 101
"""Numbers of rows and of outputs, more than the largest tile or threshold and its tail."""

Case = Callable[[], tuple[NDArray, ...]]


def _with_wrong_parts(
    ops: Backend, compute: Callable[..., NDArray], parts: Iterable[tuple[slice, ...]], *whole: slice
) -> tuple[NDArray, ...]:
    """The whole result, and each part that has other bits alone: none, if all is well. Backends without tiles compute the whole."""
    result = compute(*whole)
    if ops is not cpu:
        return (result,)
    pairs = [(compute(*part), result[part]) for part in parts]
    return result, *(alone for alone, within in pairs if alone.tobytes() != within.tobytes())


def _product(ops: Backend, product: Callable[[slice, slice], NDArray], rows: int) -> tuple[NDArray, ...]:
    """A product [rows, COLUMNS]: each number of rows, with numbers of outputs that take turns, and one and two rows with each."""
    sizes = [(n, 1 + n * 37 % COLUMNS) for n in range(1, rows + 1)] + [(n, m) for n in (1, 2) for m in range(1, COLUMNS + 1)]
    return _with_wrong_parts(ops, product, [(slice(n), slice(m)) for n, m in sizes], slice(rows), slice(COLUMNS))


def _floats(ops: Backend, table: NDArray) -> tuple[NDArray, ...]:
    x = noise(70, ROWS, table.shape[1])
    return _product(ops, lambda rows, columns: ops.matmul(x[rows], table[columns]), ROWS)


def _ternary(ops: Backend, width: int) -> tuple[NDArray, ...]:
    q, scale = ops.quantize(3 * noise(71, ROWS, width))
    weights = packing.pack(np.rint(noise(72, COLUMNS, width)).astype(np.int8), 0.37)
    return _product(ops, lambda r, c: ops.ternary_matmul(q[r], scale[r], weights.codes, weights.scale, c.stop), ROWS)


def _blocks(ops: Backend, kind: TensorType) -> tuple[NDArray, ...]:
    """Of fewer rows, but more columns than are unpacked at a time: what numbers of rows decide depends on no type."""
    x, data = noise(73, 20, 1280), random_table(Noise(3), kind.name, COLUMNS, 1280).data
    products = _product(ops, lambda rows, columns: ops.matmul_blocks(x[rows], data[columns], kind), len(x))
    return *products, *_product(ops, lambda r, c: ops.matmuls_blocks_as_llama_cpp(x[r], (data[c], kind))[0], len(x))


def _attention(ops: Backend, name: str, *options: object) -> tuple[NDArray, ...]:
    """Each number of rows from the first on, each up to the last, and each row alone."""
    q, k, v = 4 * noise(74, ROWS, 6, 20), *noise(75, 2, 2, ROWS, 2, 20)
    slot, position = np.ones(ROWS, np.int64), np.arange(ROWS)

    def attended(rows: slice) -> NDArray:
        return getattr(ops, name)(q[rows], k, v, slot[rows], position[rows], *options)

    ends = [(first, end) for n in range(ROWS) for first, end in ((0, n + 1), (n, ROWS), (n, n + 1))]
    return _with_wrong_parts(ops, attended, [(slice(*each),) for each in ends], slice(None))


def _mixture(ops: Backend) -> tuple[NDArray, ...]:
    """The weighted sums of three experts at once; and slot by slot, if these have other bits."""
    y, weights = noise(79, 3, ROWS, COLUMNS), noise(80, ROWS, 3)
    whole = ops.mix(np.ascontiguousarray(y.swapaxes(0, 1)), weights)
    by_slots = np.empty_like(whole)
    for slot in range(3):
        cpu.mix_in(y[slot], weights, slot, by_slots)
    return (whole, by_slots) if ops is cpu and by_slots.tobytes() != whole.tobytes() else (whole,)


def part_cases(ops: Backend, tables: dict[str, NDArray]) -> dict[str, Case]:
    """The cases by name. tables: some of COLUMNS rows, by the type of their numbers."""
    mask = np.where(noise(77, 2, ROWS, ROWS) < -0.3, np.float32(-np.inf), noise(78, 2, ROWS, ROWS))
    named = {f"parts, {name}": partial(_floats, ops, table) for name, table in tables.items()}
    named |= {f"parts, ternary, {width} columns": partial(_ternary, ops, width) for width in (600, 6144)}
    named |= {f"parts, {kind.name}": partial(_blocks, ops, kind) for kind in BLOCK_TYPES}
    named["parts, mix"] = partial(_mixture, ops)
    attention: dict[str, tuple] = {"attend": (), "attend, window": (70, np.float32(0.3), np.float32(2)), "attend_masked": (mask,)}
    return named | {f"parts, {name}": partial(_attention, ops, name.split(",")[0], *options) for name, options in attention.items()}
