"""Products of warpgroups (wgmma): four warps together, 64 rows of A in their registers, B in shared memory.

They run apart from the threads. Until a thread waits, the registers of its sums hold nothing of use; and products see of shared memory only
what was written before a proxy fence of the writer and a barrier.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .access import At, Step, vector
from .arithmetic import DTYPES, bytes_of
from .memory import Fault
from .source import Number, Operand

if TYPE_CHECKING:
    from .machine import Block

GROUP = 128
_KIND = re.compile(r"m64n(\d+)k32")


@dataclass
class Products:
    """The products of a block that its threads have not waited for: results by the name of their register."""

    fenced: bool = False  # since the last wait: registers written before are in order
    issued: dict[Operand, NDArray] = field(default_factory=dict)
    committed: list[dict[Operand, NDArray]] = field(default_factory=list)

    def latest(self, register: Operand) -> NDArray | None:
        return next((group[register] for group in [self.issued, *reversed(self.committed)] if register in group), None)


def _all(block: Block, at: At) -> int:
    """The number of warpgroups. Raises Fault unless all threads of the block come together, as these kernels do."""
    if len(block.threads[at]) != block.count or block.count % GROUP:
        raise Fault("not all threads of whole warpgroups come here together")
    return block.count // GROUP


def fence(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    def order(block: Block, at: At) -> None:
        _all(block, at)
        block.products.fenced = True

    return order


def show(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    """fence.proxy.async: what these threads have written becomes visible to products."""
    if parts[1:] != ["async", "shared::cta"]:
        raise ValueError(f"fence.{'.'.join(parts)}")
    return lambda block, at: block.shared_watch.show(block.threads[at])


def _chunks(block: Block, matrix: Operand, at: At, tokens: int) -> NDArray[np.int64]:
    """The addresses of 16 bytes each of B, K-major and without swizzle: [warpgroups, tokens, 2]."""
    words = np.broadcast_to(block.get(matrix, DTYPES["u64"], at), block.count).reshape(-1, GROUP)
    if (words != words[:, :1]).any() or (words[:, 0] >> np.uint64(46)).any():
        raise Fault("a warpgroup's threads name different matrices, or one with a swizzle")
    start, leading, stride = ((words[:, 0] >> np.uint64(shift) & np.uint64(0x3FFF)).astype(np.int64) * 16 for shift in (0, 16, 32))
    token, half = np.arange(tokens)[:, None], np.arange(2)
    core = token // 8 * stride[:, None, None] + token % 8 * 16
    return start[:, None, None] + core + half * leading[:, None, None]


def multiply(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    """wgmma.mma_async m64nNk32, u8 x s8. A and D lie as for mma.m16n8k32, 16 rows for each warp; D has N / 8 times 8 columns."""
    shape = _KIND.fullmatch(parts[3])
    if shape is None or parts[:3] != ["mma_async", "sync", "aligned"] or parts[4:] != ["s32", "u8", "s8"]:
        raise ValueError(f"wgmma.{'.'.join(parts)}")
    tokens = int(shape[1])
    sums, rows, matrix, accumulates = operands
    results = vector(sums)
    assert len(results) == tokens // 2

    def run(block: Block, at: At) -> None:
        groups, products = _all(block, at), block.products
        if not products.fenced:
            raise Fault("registers of products are not fenced")
        if not np.all(block.get(accumulates, DTYPES["pred"], at)):
            raise Fault("products that do not accumulate")
        places = _chunks(block, matrix, at, tokens).reshape(-1)
        readers = np.repeat(np.arange(groups) * GROUP, 2 * tokens)
        block.shared_watch.shown(places, 16)
        if block.expected[block.shared_watch.halves(places, 16)].any():
            raise Fault("read while a copy is on its way there")
        block.shared_watch.reads(places, 16, readers)
        loaded = np.stack(block.shared.load(places, 8, 2), axis=-1)
        b = loaded.view(np.int8).reshape(groups, tokens, 32).astype(np.float32)
        quads = np.stack([block.get(each, DTYPES["u32"], at).reshape(groups, 4, 8, 4) for each in vector(rows)], axis=-1)
        bytes_ = bytes_of(quads, np.uint8)  # [groups, warps, g, t, register, byte]
        halves = [bytes_[:, :, :, :, [i, i + 2]].transpose(0, 1, 2, 4, 3, 5).reshape(groups, 4, 8, 32) for i in (0, 1)]
        a = np.concatenate(halves, axis=2).astype(np.float32)  # [groups, warps, 16, 32]
        d = np.matmul(a, b[:, None].transpose(0, 1, 3, 2)).astype(np.int32)  # exact: less than 2^24
        split = d.reshape(groups, 4, 2, 8, tokens // 8, 4, 2).transpose(0, 1, 3, 5, 4, 2, 6).reshape(block.count, tokens // 2)
        for i, result in enumerate(results):
            before = products.latest(result)
            products.issued[result] = (block.get(result, DTYPES["s32"], at) if before is None else before) + split[:, i]
        for result in results:
            block.set(result, at, np.full(block.count, -559038737, np.int32))  # 0xDEADBEEF, until they are waited for

    return run


def commit(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    def close(block: Block, at: At) -> None:
        _all(block, at)
        block.products.committed.append(block.products.issued)
        block.products.issued = {}

    return close


def arrive(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    (pending,) = operands
    assert isinstance(pending, Number)

    def wait(block: Block, at: At) -> None:
        _all(block, at)
        while len(block.products.committed) > pending.value:
            for register, values in block.products.committed.pop(0).items():
                block.set(register, at, values)
        block.products.fenced = False

    return wait
