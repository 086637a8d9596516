"""Ternary matrices that read the same input, and their products with the norm of one row.

Such products are launched at first use: with the norm before them, and with the sum or the gate after them.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..kernels.cuda import layout, norms, rows
from ..kernels.cuda.target import WARP
from .arrays import Deferred, DeviceArray, now, view


class Three(NamedTuple):
    """Up to three matrices that read the same input; missing ones have no rows."""

    words: tuple[DeviceArray, ...]
    factors: tuple[np.float32, ...]
    widths: tuple[int, ...]  # rows
    tiles: tuple[int, ...]  # of 16 rows

    def ends(self, share: int) -> tuple[int, ...]:
        """The block after the last one of each matrix, where a block has `share` tiles of rows."""
        return tuple(accumulate(-(-each // share) for each in self.tiles))


def three_of(matrices: tuple[tuple[DeviceArray, np.float32, int], ...]) -> Three:
    words, factors, widths = zip(*matrices, *[(matrices[0][0], 0, 0)] * (3 - len(matrices)), strict=True)
    return Three(words, tuple(map(np.float32, factors)), widths, tuple(-(-width // layout.ROWS) for width in widths))


def apart(together: DeviceArray, n: int, widths: tuple[int, ...]) -> list[DeviceArray]:
    """The results of several matrices, which lie one after the other: [n, width] each."""
    starts = accumulate((n * width for width in widths), initial=0)
    return [together.part(start, (n, width)) for start, width in zip(starts, widths, strict=False)]


class OneRow:
    """Products of the norm of one row, computed by one launch when the first is read, or with the operation that reads them."""

    def __init__(self, on: Any, norm: Deferred, three: Three) -> None:
        self._on, self._three, self._shape, self._inputs = on, three, norm.shape, norm.inputs
        self._products: list[DeviceArray] = []

    def results(self, count: int) -> list[Deferred]:
        """The first `count` products. They refer to this object and not the reverse: their memory is free as soon as nothing reads them."""
        return [Deferred("product", (self, i), (1, self._three.widths[i]), lambda it: self._result(it.inputs[1])) for i in range(count)]

    def _result(self, i: int) -> DeviceArray:
        if not self._products:
            self._products = apart(self.launched("row").reshape(-1), 1, self._three.widths)
        return self._products[i]

    def is_for(self, after: str, a: Any = None) -> bool:
        """Whether one launch can compute the products of this norm with the operation `after` them ("row": none).

        A sum reads the only product and `a`; a gate reads both products, of which `a` must be the first.
        """
        if self._products or self._shape[0] > 1 or self._block(after) is None:
            return False
        count = sum(width > 0 for width in self._three.widths)
        if after not in rows.GATES:
            return after == "row" or count == 1
        return count == 2 and isinstance(a, Deferred) and a.inputs == (self, 0)

    def _block(self, after: str) -> tuple[int, int, int] | None:
        """Tiles of one matrix in a block, warps for each tile, and threads; None if such a block has no room for the row."""
        matrices, tiles = (2, self._three.tiles[0]) if after in rows.GATES else (1, sum(self._three.tiles))
        share = min(layout.WARPS // matrices, -(-tiles // self._on.processors))
        warps = layout.WARPS // (matrices * share)
        threads = WARP * warps * matrices * share
        return (share, warps, threads) if norms.product_fits(self._shape[1], warps, matrices * share, self._on.at_once) else None

    def launched(self, after: str, other: Any = None) -> DeviceArray:
        """The result [1, N] of the launch: all products one after another, or the sum of one with the other array, or the gate of two."""
        on, three, (x, gain, eps), block = self._on, self._three, self._inputs, self._block(after)
        assert block is not None, "is_for has said so"
        other = view(now(other) if after == "sum" else on.nothing, np.float32)
        (share, warps, threads), (source, *row) = block, on.normed(x)
        ends, is_pair = three.ends(share), after in rows.GATES
        out = on.empty((1, three.widths[0] if is_pair else sum(three.widths)))
        kernel = norms.normed_product(source, self._shape[1], warps, share, after, on.at_once)
        blocks = ends[0] if is_pair else ends[-1]
        flat = (view(array, np.float32) for array in row)
        matrices = three.words, ends, three.widths, three.factors
        on.run(kernel, blocks, threads, *flat, gain, eps, *matrices, other, view(out, np.float32))
        return out
