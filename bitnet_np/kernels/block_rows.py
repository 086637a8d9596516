"""What both ways to multiply by ggml's blocks share: a product's arrays, its activations in the plan's order, and unpacked weights."""

from typing import Any, NamedTuple

import numpy as np

from .activations import round_row
from .block_formats import RUN
from .fast.block_bytes import unpack_chunk
from .fast.emit import LANES
from .launching import serial
from .workspace import aligned

SPAN = 1024  # weights of a row that are unpacked at a time: with 32 rows, a first-level cache


class Numbers(NamedTuple):
    """What a kernel knows of a type: block_plans.py."""

    weights: Any  # of a chunk
    blocks: Any  # of a chunk
    units: Any  # of a chunk
    registers: Any  # of a chunk's sums
    runs: Any  # of 16 weights in a unit
    share: Any  # units with a common scale of the activations
    width: Any  # activations to an element of starts
    offset: Any  # of codes


class Rows(NamedTuple):
    """Activations as a product reads them; rows are padded to whole chunks."""

    q: Any  # [R, at least padded] int8, in the plan's order
    starts: Any  # [R, padded / width] int32: sums times -offset; [R, 0] if there is no offset, or nothing to take off
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
def arrange(r, x, order, numbers, rows):
    """Row r of the activations, rounded, in the plan's order, and its sums."""
    size, n = numbers.share * numbers.runs * RUN, x.shape[1] // RUN
    count = x.shape[1] // size
    codes, scale, eights = np.empty(x.shape[1], np.int8), np.empty(count, np.float32), np.empty(count, np.float32)
    round_row(x[r], size, codes, scale, eights)
    q, starts, sums = rows.q[r], rows.starts[r], rows.sums[r]
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
            sums[(first + k) // numbers.runs, (first + k) % numbers.runs] = np.int16(total)
    for i in range(starts.size):
        total = np.int32(0)
        for j in range(numbers.width):
            total += np.int32(q[i * numbers.width + j])
        starts[i] = -numbers.offset * total
    for i in range(rows.scales.shape[1]):
        at = i // numbers.share
        rows.scales[r, i] = scale[at] if at < count else np.float32(0)
        rows.eights[r, i] = eights[at] if at < count else np.float32(0)


@serial
def room_for(chunks, numbers):
    """A strip for so many chunks of 16 rows each."""
    return Strip(
        aligned(chunks * numbers.weights * LANES),
        aligned(chunks * LANES * LANES * 4).view(np.int32),
        aligned(chunks * LANES * LANES * 2).view(np.int32),
        aligned(chunks * numbers.units * 2 * LANES * 4).view(np.float32),
    )


@serial
def unpack(blocks, numbers, r, groups, first, end, strip):
    """Chunks first..end of some groups of rows."""
    n, count = blocks.shape[1], end - first
    for group in range(groups):
        row = min(r + group * LANES, blocks.shape[0] - 1)
        valid = min(LANES, blocks.shape[0] - row)
        for chunk in range(first, end):
            b, i = chunk * numbers.blocks, group * count + chunk - first
            unpack_chunk(blocks, row * n + b, n, valid, min(1, n - 1 - b), strip, i)
