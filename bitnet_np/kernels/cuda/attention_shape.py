"""The shape that an attention kernel is compiled for, the memory of a block, and the records that its functions pass on.

A block has some queries that read the same keys and values. It goes through the keys by chunks of CHUNK.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ..scalar import CHUNK
from .target import ALIGNED, inlined

WIDEST = 256  # head width
FOUR = 4  # queries of a tile, threads that share a tile, lanes of each; numbers of a head that a thread weighs
EIGHT = 8  # queries of a block at most for which a thread holds a number of every value (attention_split.py)
SPAN = CHUNK + 4  # numbers from one row of scores to the next
LARGEST, WEIGHT, OLD, NEW = 0, 1, 2, 3  # the numbers that `Room.state` holds for a query
STATE = 4
UNSEEN = np.float32(-1.0)
"""In place of a weight, which is never negative: the query does not see the key, or no key of the chunk."""

_WIDTHS = (64, 96, 128, WIDEST)  # widths of heads that kernels are compiled for


class Shape(NamedTuple):
    """The shape that a kernel is compiled for."""

    width: int  # of a head, at most
    queries: int  # of a block
    columns: int  # keys of a tile
    part: int  # keys in shared memory at a time: a chunk, or less while the next ones are on their way
    halves: bool  # keys and values are float16, as bits
    vectors: bool  # keys and values are read 16 bytes at a time
    capped: bool = False  # scores are capped

    @property
    def threads(self) -> int:
        """Threads of a block: at least one for each number of a head, in whole warps."""
        return max(128, -(-self.width // 32) * 32)

    @property
    def stride(self) -> int:
        """Numbers from one query or key to the next in shared memory: 8 more than a head, so that neighbours are in different banks."""
        return self.width + 8

    @property
    def buffers(self) -> int:
        """Parts of keys in shared memory."""
        return 1 if self.part == CHUNK else 2

    @property
    def apart(self) -> int:
        """Distance between the queries of one thread when it weighs values."""
        return min(1 << (self.threads // (self.width // FOUR)).bit_length() - 1, self.queries)

    @property
    def own(self) -> int:
        """Queries of one thread when it weighs values."""
        return self.queries // self.apart


def shape_for(width: int, queries: int, halves: bool = False, many: bool = False, capped: bool = False) -> Shape:
    """The kernel for heads of a width up to WIDEST and for so many queries that share keys.

    A block has all of these queries or some of them. With `many` it may have 32, which needs a device kept busy by few blocks.
    """
    rounded = next(size for size in _WIDTHS if width <= size)
    vectors = width % (8 if halves else 4) == 0
    few = FOUR if queries <= FOUR else EIGHT
    if rounded == WIDEST:
        return Shape(rounded, few, 1, 16, halves, vectors, capped)
    if queries <= few:
        return Shape(rounded, few, 2, CHUNK, halves, vectors, capped)
    return Shape(rounded, 32 if many else 16, 4, 16, halves, vectors, capped)


class Cached(NamedTuple):
    """Keys and values in a cache, as flat arrays. Functions take the offset of their first head and position."""

    k: Any
    v: Any
    stride: Any  # numbers from one position to the next
    width: Any  # of a head


class Scoring(NamedTuple):
    """How scores come from products."""

    scale: Any  # multiplies them
    cap: Any  # of scores; not read by kernels of a shape that is not capped


class Run(NamedTuple):
    """The queries of a block: query i is head `head` + i % group of row `row` + i // group."""

    row: Any  # the first row
    rows: Any  # their number
    head: Any  # the first head
    group: Any  # heads of a row
    n: Any  # queries


class Room(NamedTuple):
    """The memory of a block. All arrays are flat, of float32 but for `rows`."""

    queries: Any  # shared: [queries, stride], rotated
    keys: Any  # shared: [buffers, part, stride]
    scores: Any  # shared: [queries, SPAN], of one chunk; then the weights
    state: Any  # shared: [queries, STATE]
    rows: Any  # shared: [queries] int32, the row of the run that a query belongs to
    dots: Any  # of a thread: the lanes of the dot products of its tile; later the weights that it computes


@cache
def room_for(shape: Shape, least: int = 0) -> Callable[[], Room]:
    """A function that makes the Room of a block. `keys` has at least `least` numbers."""
    n_queries, n_scores, n_state = shape.queries, shape.queries * SPAN, shape.queries * STATE
    n_query_words, n_key_words = n_queries * shape.stride, max(shape.buffers * shape.part * shape.stride, least)
    n_dots = FOUR * shape.columns * FOUR

    @inlined
    def room():
        return Room(
            cuda.shared.array(n_query_words, np.float32, ALIGNED),
            cuda.shared.array(n_key_words, np.float32, ALIGNED),
            cuda.shared.array(n_scores, np.float32, ALIGNED),
            cuda.shared.array(n_state, np.float32, ALIGNED),
            cuda.shared.array(n_queries, np.int32, ALIGNED),
            cuda.local.array(n_dots, np.float32),
        )

    return room


def named(function: Callable, shape: Shape) -> Callable:
    """A kernel's function under the name that profiles show: capped scores take several times as long as others."""
    if shape.capped:
        function.__name__ = function.__qualname__ = f"{function.__name__}_capped"
    return function
