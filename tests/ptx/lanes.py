"""Instructions that the lanes of a warp run together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .access import At, Step, vector
from .arithmetic import DTYPES, bytes_of
from .memory import Fault
from .source import Number, Operand

if TYPE_CHECKING:
    from .machine import Block

WARP = 32


def _warps(block: Block, at: At) -> int:
    """The number of warps of these threads. Raises Fault unless they are whole warps."""
    threads = block.threads[at].reshape(-1)
    if (
        len(threads) % WARP
        or (threads.reshape(-1, WARP) != threads[::WARP, None] + np.arange(WARP)).any()
        or (threads[::WARP] % WARP).any()
    ):
        raise Fault("not all lanes of a warp come here together")
    return len(threads) // WARP


def _lanes(block: Block, operand: Operand, dtype: np.dtype, at: At) -> NDArray:
    """[warps, lanes]"""
    values = np.broadcast_to(block.get(operand, dtype, at), block.threads[at].shape)
    return values.reshape(_warps(block, at), WARP)


def butterfly(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    result, source, distance, clamp, mask = operands
    if clamp != Number(31) or not isinstance(mask, Number) or mask.value & 0xFFFFFFFF != 0xFFFFFFFF:
        raise ValueError(f"shfl of lanes {mask} up to {clamp}, expected all of them")

    def exchange(block: Block, at: At) -> None:
        values = _lanes(block, source, DTYPES["u32"], at)
        other = np.arange(WARP) ^ np.int64(block.get(distance, DTYPES["u32"], at))
        block.set(result, at, np.ascontiguousarray(values[:, other]).reshape(-1))

    return exchange


def multiply_matrices(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    """mma.m16n8k32, u8 x s8: lane 4 g + t has, of A, rows g and g + 8, columns 4 t.. and 16 + 4 t..; of B, the same rows, column g; of C
    and D, rows g and g + 8, columns 2 t and 2 t + 1."""
    if parts != ["sync", "aligned", "m16n8k32", "row", "col", "s32", "u8", "s8", "s32"]:
        raise ValueError(f"mma.{'.'.join(parts)}")
    results, a, b, c = operands
    assert all(isinstance(each, tuple) for each in operands)

    def multiply(block: Block, at: At) -> None:
        warps = _warps(block, at)

        def quads(registers: Operand, dtype: np.dtype) -> NDArray:
            """[warps, g, t, number of the register]"""
            return np.stack([_lanes(block, each, dtype, at).reshape(warps, 8, 4) for each in vector(registers)], axis=-1)

        rows = bytes_of(quads(a, DTYPES["u32"]), np.uint8)  # [warps, g, t, 4, 4]
        columns = bytes_of(quads(b, DTYPES["u32"]), np.int8)  # [warps, g, t, 2, 4]
        matrix = np.concatenate([rows[:, :, :, [i, i + 2]].transpose(0, 1, 3, 2, 4).reshape(warps, 8, 32) for i in (0, 1)], axis=1)
        other = columns.transpose(0, 1, 3, 2, 4).reshape(warps, 8, 32)  # [warps, n, k]
        products = np.einsum("wmk,wnk->wmn", matrix, other).astype(np.int32)  # [warps, 16, 8]
        split = products.reshape(warps, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(warps, 8, 4, 4)  # [warps, g, t, register]
        total = split + quads(c, DTYPES["s32"])
        for i, result in enumerate(vector(results)):
            block.set(result, at, np.ascontiguousarray(total[..., i]).reshape(-1))

    return multiply
