"""RMS norms of rows that fit shared memory: the norm, the codes of the norm, or the ternary product that reads those codes.

A block computes a row. Thread t has the row's numbers 4 t to 4 t + 3, then those 4 * threads further, `ahead` times, each by one load of
16 bytes. The width is compiled in and a multiple of 4; `rows.rms_norm` takes all other rows.

If there is a single row (`normed_product`), every block of the product computes the norm and the codes for itself. That saves a launch and
the wait for weights: a warp asks for its first weights before it waits for the previous kernel. A block has `share` tiles of rows of one
matrix and `warps` warps for each of them; a warp has up to DEPTH tiles of columns in registers at a time.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from .layout import COLUMNS, DEPTH, ROWS, TILE_WORDS, row_words
from .ptx import await_previous, let_next_begin, load4, load_fragments, multiply_tiles, put, put4, this_thread, times, zeros
from .rows import (
    GATES,
    LARGEST,
    SUM,
    WIDE_LANES,
    add_products,
    clear_lanes,
    clear_together,
    code_of,
    factor_of,
    fold_wide_lanes,
    magnitude,
    of_block,
    padded,
    scale_of,
    with_code,
    worked_out,
)
from .target import ALIGNED, WARP, device, inlined, kernel_of
from .ternary import finished, joined, matrix_of, of_all_warps, of_three, rows_before

THREADS = (256, 512, 1024)  # threads that a block of `rms_norm` and of `normed_codes` may have
AHEAD = 5  # loads of 16 bytes at most with which a thread gets its part of the row
WIDEST = 9216  # numbers of a row at most: a block needs some shared memory beside them
_f = np.float32


def _ahead(width: int, threads: int) -> int:
    """The number of fours of a row, with the zeros that follow it, that each thread has."""
    return -(-padded(width) // (4 * threads))


def fits(width: int, threads: int) -> bool:
    """Whether a block of `threads` threads takes rows of this width."""
    return width % 4 == 0 and width <= WIDEST and _ahead(width, threads) <= AHEAD


_SHARED_DEPTH = 5  # tiles of columns of a warp that takes half a processor's registers: with 8 they do not suffice


def _turns(width: int, warps: int, at_once: int) -> tuple[int, int]:
    """(depth, rounds): each of the `warps` warps of a tile of rows has `depth` tiles of columns at a time, `rounds` times."""
    blocks = -(-width // COLUMNS)
    depth = min(DEPTH if at_once == 1 else _SHARED_DEPTH, -(-blocks // warps))
    return depth, -(-blocks // (warps * depth))


def product_fits(width: int, warps: int, slots: int, at_once: int) -> bool:
    """Whether the row and its codes fit the 48 KB of shared memory of a block with `slots` tiles of rows and `warps` warps for each."""
    depth, rounds = _turns(width, warps, at_once)
    besides = 8 * WIDE_LANES + 16 + 4 * warps * slots * ROWS
    return fits(width, WARP * warps * slots) and 4 * padded(width) + rounds * depth * warps * COLUMNS + besides <= 48 << 10


class Row(NamedTuple):
    """The sources of a block's row, as flat arrays."""

    a: Any
    b: Any
    made: Any  # the array for the row if it is computed from a and b
    base: Any  # offset of the row's first number


class Room(NamedTuple):
    """The memory of a block."""

    gains: Any  # of a thread: the gains of its numbers
    piece: Any  # shared: the row, then its norm
    lanes: Any  # shared: the lanes of the sum of squares
    factor: Any  # shared: the number that the row is multiplied by
    together: Any  # shared: the LARGEST magnitude and the SUM of the codes


@cache
def _room_for(width: int, threads: int) -> Any:
    """A function (gain) that makes the Room of a block and loads the gains, which do not depend on the kernel before."""
    ahead, n_padded = _ahead(width, threads), padded(width)
    n_numbers = 4 * ahead

    @inlined
    def room(gain):
        gains = cuda.local.array(n_numbers, np.float32)
        for k in range(ahead):
            four = load4(gain, min(4 * (this_thread() + k * threads), width - 4))
            for j in range(4):
                gains[4 * k + j] = four[j]
        piece = cuda.shared.array(n_padded, np.float32, ALIGNED)
        lanes = cuda.shared.array(WIDE_LANES, np.float64, ALIGNED)
        factor = cuda.shared.array(1, np.float32)
        together = cuda.shared.array(2, np.int32)
        clear_lanes(lanes)
        return Room(gains, piece, lanes, factor, together)

    return room


@cache
def _bring(source: str, width: int, threads: int) -> Any:
    """A function (row, leaves, piece) that brings the row of the `source` to `piece`, and zeros after it.

    It also writes the row to `row.made` if `leaves` is true and the row is computed here.
    """
    ahead, n_padded = _ahead(width, threads), padded(width)
    n_numbers = 4 * ahead

    @device
    def bring(row, leaves, piece):
        numbers = cuda.local.array(n_numbers, np.float32)
        for k in range(ahead):
            at = row.base + min(4 * (this_thread() + k * threads), width - 4)
            first, second = load4(row.a, at), load4(row.b, at)
            for j in range(4):
                numbers[4 * k + j] = worked_out(source, first[j], second[j])
        for k in range(ahead):
            at, i = 4 * (this_thread() + k * threads), 4 * k
            if at < width:
                put4(piece, at, numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3])
                if source != "row" and leaves:
                    put4(row.made, row.base + at, numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3])
            elif at < n_padded:
                put4(piece, at, _f(0.0), _f(0.0), _f(0.0), _f(0.0))

    return bring


@cache
def _norm(source: str, width: int, threads: int) -> Any:
    """A function (row, leaves, eps, room) that leaves the norm of the row in `room.piece`, and returns the scale of its codes."""
    ahead, bring = _ahead(width, threads), _bring(source, width, threads)

    @device
    def scale_numbers(piece, gains, factor):
        """piece = piece * factor * gain. Returns the largest magnitude of this thread's numbers, as bits."""
        largest = np.int32(0)
        for k in range(ahead):
            at = 4 * (this_thread() + k * threads)
            if at < width:
                four = load4(piece, at)
                for j in range(4):
                    value = times(times(four[j], factor), gains[4 * k + j])
                    put(piece, at + j, value)
                    largest = max(largest, magnitude(value))
        return largest

    @device
    def norm(row, leaves, eps, room):
        bring(row, leaves, room.piece)
        cuda.syncthreads()
        add_products(room.piece, width, True, room.lanes)
        cuda.syncthreads()
        total = fold_wide_lanes(room.lanes)
        if this_thread() == 0:
            room.factor[0] = factor_of(total, width, eps)
            clear_together(room.together)
        cuda.syncthreads()
        return scale_of(of_block(scale_numbers(room.piece, room.gains, room.factor[0]), room.together, LARGEST))

    return norm


@cache
def _write_codes(width: int, threads: int) -> Any:
    """A function (room, s, codes, first) that writes the norm as int8 codes, four to a word; zeros if the scale s is NaN.

    It returns the sum of the codes, to all threads.
    """
    ahead, words = _ahead(width, threads), -(-width // COLUMNS) * (COLUMNS // 4)

    @device
    def write_codes(room, s, codes, first):
        total = np.int32(0)
        for k in range(ahead):
            at = this_thread() + k * threads
            if at < words:
                four, word = load4(room.piece, 4 * at), np.uint32(0)
                for j in range(4):
                    code = code_of(four[j], s)
                    total, word = np.int32(total + code), with_code(word, j, code)
                put(codes, first + at, word)
        return of_block(total, room.together, SUM)

    return write_codes


@cache
def rms_norm(source: str, width: int, threads: int) -> Any:
    """The norm of the row of the `source` (see `rows.rms_norm`)."""
    ahead, new_room, norm = _ahead(width, threads), _room_for(width, threads), _norm(source, width, threads)

    def rms_norm(a, b, made, gain, eps, out):  # [R * M] x 3, [M], ..., [R * M]
        let_next_begin()
        base = cuda.blockIdx.x * width
        room = new_room(gain)
        await_previous()
        norm(Row(a, b, made, base), True, eps, room)
        for k in range(ahead):
            at = 4 * (this_thread() + k * threads)
            if at < width:
                four = load4(room.piece, at)
                put4(out, base + at, four[0], four[1], four[2], four[3])

    rms_norm.__name__ = rms_norm.__qualname__ = f"rms_norm_{source}"  # in profiles
    return kernel_of(rms_norm, threads)


@cache
def normed_codes(source: str, width: int, threads: int) -> Any:
    """The codes of the norm, and their scale. The norm itself is not written."""
    stride = row_words(width)
    new_room, norm, write_codes = _room_for(width, threads), _norm(source, width, threads), _write_codes(width, threads)

    def normed_codes(a, b, made, gain, eps, codes, scale):  # [R * M] x 3, [M], ..., [R * stride], [R]
        let_next_begin()
        r = cuda.blockIdx.x
        room = new_room(gain)
        await_previous()
        s = norm(Row(a, b, made, r * width), True, eps, room)
        total = write_codes(room, s, codes, r * stride)
        if this_thread() == 0:
            put(codes, r * stride + stride - 4, np.uint32(total))
            scale[r] = s

    normed_codes.__name__ = normed_codes.__qualname__ = f"normed_codes_{source}"  # in profiles
    return kernel_of(normed_codes, threads)


@cache
def normed_product(source: str, width: int, warps: int, share: int, after: str, at_once: int = 1) -> Any:
    """The product of the norm of one row with up to three matrices, and the operation `after` it.

    `source` and `after` are names of `rows.worked_out`. After it comes nothing ("row"), the "sum" with another row, or a gate ("relu2",
    "silu") of the products of the first two matrices, of which a block has the same tiles. at_once: blocks that a processor has registers
    for, at least. With two, a launch can begin beside the one before it; then a warp has fewer weights in registers.
    """
    is_pair = after in GATES
    slots = 2 * share if is_pair else share  # tiles of a block
    threads, blocks, step = WARP * warps * slots, -(-width // COLUMNS), warps * (COLUMNS // 4)
    (depth, rounds), words = _turns(width, warps, at_once), blocks * (COLUMNS // 4)
    n_words, n_parts = rounds * depth * step, warps * slots * ROWS
    new_room, norm, write_codes = _room_for(width, threads), _norm(source, width, threads), _write_codes(width, threads)
    none, multiply, load_weights = zeros(16), multiply_tiles(depth, 1, step), load_fragments(depth, in_global=True)

    @device
    def total_of(parts, slot, i):
        return of_all_warps(parts, slot * (warps * ROWS) + i, warps, ROWS)

    def normed_product(a, b, made, gain, eps, words_of, ends, widths, factors, other, out):
        # [M] x 4, ..., as ternary_gemv -> [sum of N], or of a pair [N]
        let_next_begin()
        t, lane, warp = this_thread(), this_thread() % WARP, this_thread() // WARP
        slot, column = warp // warps, warp % warps
        which, part = (slot // share, cuda.blockIdx.x) if is_pair else matrix_of(cuda.blockIdx.x, ends)
        mine, rows, first = of_three(words_of, which), of_three(widths, which), part * share
        tile = min(first + slot % share, (rows - 1) // ROWS)  # past the end, the last one again, whose result is not used
        place = tile * (blocks * TILE_WORDS) + lane * 4
        weights = load_weights(mine, place + column * TILE_WORDS, warps * TILE_WORDS)
        room = new_room(gain)
        codes = cuda.shared.array(n_words, np.uint32, ALIGNED)
        parts = cuda.shared.array(n_parts, np.int32, ALIGNED)
        if t < n_words - words:
            put(codes, words + t, np.uint32(0))  # codes of tiles past the end
        await_previous()
        s = norm(Row(a, b, made, 0), cuda.blockIdx.x == 0, eps, room)
        row_sum = write_codes(room, s, codes, 0)
        sums = none()
        for turn in range(rounds):
            start = column + turn * (warps * depth)
            if turn > 0:
                weights = load_weights(mine, place + start * TILE_WORDS, warps * TILE_WORDS)
            sums = multiply(sums, weights, depth, codes, start * (COLUMNS // 4) + lane % 4 * 4, 0)
        if lane % 4 == 0:  # the 8 tokens of a product are all the same one
            parts[warp * ROWS + lane // 4] = joined(sums[0], sums[4], sums[8], sums[12])
            parts[warp * ROWS + lane // 4 + 8] = joined(sums[2], sums[6], sums[10], sums[14])
        cuda.syncthreads()
        row = first * ROWS + t
        if t < share * ROWS and row < rows:
            value = finished(total_of(parts, t // ROWS, t % ROWS), row_sum, s, of_three(factors, 0 if is_pair else which))
            if is_pair:
                up = finished(total_of(parts, share + t // ROWS, t % ROWS), row_sum, s, factors[1])
                value = worked_out(after, value, up)
            elif after == "sum":
                value = worked_out(after, other[row], value)
            out[row if is_pair else rows_before(widths, which) + row] = value

    normed_product.__name__ = normed_product.__qualname__ = f"normed_product_{after}_of_{source}"
    return kernel_of(normed_product, threads, at_once)
