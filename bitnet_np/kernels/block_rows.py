"""What both ways to multiply by ggml's blocks share: the activations in the plan's order, and unpacked weights."""

from typing import Any, NamedTuple

import numpy as np

from .activations import round_row
from .block_formats import RUN
from .fast.block_bytes import Chunk, of_plan, unpack_chunk
from .fast.emit import LANES
from .launching import inlined, serial
from .workspace import aligned

SPAN = 1024  # weights of a row that are unpacked at a time: with 32 rows, a first-level cache


class Rows(NamedTuple):
    """Activations as a product reads them; rows are padded to whole chunks."""

    q: Any  # [R, at least padded] int8, in the plan's order
    sums: Any  # [R, units, runs of a unit] int16
    scales: Any  # [R, units] float32
    eights: Any  # [R, units] float32: sums as Q8_1's, which types with a float minimum read


class Strip(NamedTuple):
    """Unpacked weights of some groups of 16 rows: block_bytes.py's `unpack_chunk`."""

    codes: Any
    scales: Any
    pairs: Any
    floats: Any


@serial
def arrange(r, x, size, order, rows):
    """Row r of the activations, rounded, in the plan's order, and its sums. size: numbers that share a scale. order: runs of a chunk."""
    runs, n, count = rows.sums.shape[2], x.shape[1] // RUN, x.shape[1] // size
    codes, scale, eights = np.empty(x.shape[1], np.int8), np.empty(count, np.float32), np.empty(count, np.float32)
    round_row(x[r], size, codes, scale, eights)
    q, sums = rows.q[r], rows.sums[r]
    for first in range(0, sums.size, order.size):
        for k in range(order.size):
            place, source = (first + k) * RUN, (first + order[k]) * RUN
            total = np.int32(0)
            if first + order[k] < n:
                for i in range(RUN):
                    q[place + i] = codes[source + i]
                    total += np.int32(codes[source + i])
            else:  # the last chunk may be longer than the row
                for i in range(RUN):
                    q[place + i] = 0
            sums[(first + k) // runs, (first + k) % runs] = np.int16(total)
    for i in range(rows.scales.shape[1]):
        at = i * runs * RUN // size
        rows.scales[r, i] = scale[at] if at < count else np.float32(0)
        rows.eights[r, i] = eights[at] if at < count else np.float32(0)


@serial
def room_for(chunks, weights, units):
    """A strip for so many chunks of 16 rows each, which have so many weights and units."""
    return Strip(
        aligned(chunks * weights * LANES),
        aligned(chunks * LANES * LANES * 4).view(np.int32),
        aligned(chunks * LANES * LANES * 2).view(np.int32),
        aligned(chunks * units * 2 * LANES * 4).view(np.float32),
    )


@inlined
def chunk_of(blocks, row, valid, chunk):
    """Number `chunk` of some rows of the matrix, `valid` of which are there."""
    n, first = blocks.shape[1], chunk * of_plan(blocks, "blocks")
    return Chunk(row * n + first, n, valid, min(1, n - 1 - first))


@serial
def unpack(blocks, r, groups, first, end, strip):
    """Chunks first..end of some groups of rows."""
    for group in range(groups):
        row = min(r + group * LANES, blocks.shape[0] - 1)
        for chunk in range(first, end):
            i = group * (end - first) + chunk - first
            unpack_chunk(blocks, chunk_of(blocks, row, min(LANES, blocks.shape[0] - row), chunk), strip, i)
