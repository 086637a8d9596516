"""A ternary product of one token with the norm before it, in one launch: every block works out the norm and the codes for itself.

That is a launch less than with a norm of its own, and no wait for weights: a warp asks for all that it is going to need before it waits for
the kernel before. A block has `share` tiles of rows of one matrix, and as many warps for each of them; a warp has up to `depth` tiles of
columns in registers at a time. With few rows for each processor and many warps for each row, that is all there is.

Thread t has numbers 4 t.. 4 t + 3 of the row, then those 4 * threads further, `ahead` times: it reads and writes them as 16 bytes.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from ..scalar import round_half_even
from .rows import WIDE_LANES, add_products, clear_lanes, factor_of, fold_wide_lanes, magnitude, padded, scale_of, worked_out
from .target import ALIGNED, PIECE, SIMULATED, instructions, kernel_of
from .ternary import COLUMNS, ROWS, TILE_WORDS, WARP, finished, joined, matrix_of, of_three, rows_before

(
    await_previous,
    device,
    let_next_begin,
    load4,
    load_fragments,
    multiply_tiles,
    put,
    times,
    warp_max,
    warp_sum,
    zeros,
) = (
    instructions.await_previous,
    instructions.device,
    instructions.let_next_begin,
    instructions.load4,
    instructions.load_fragments,
    instructions.multiply_tiles,
    instructions.put,
    instructions.times,
    instructions.warp_max,
    instructions.warp_sum,
    instructions.zeros,
)

WARPS = 2 if SIMULATED else 16  # of a block at most
DEPTH = 10  # tiles of columns that a warp has in registers at most
AHEAD = 4  # the most times 16 bytes of the row that a thread has
_f = np.float32


def ahead_of(width: int, threads: int) -> int:
    """How many times 4 numbers each thread has of a row, zeros included that follow it."""
    return -(-padded(width) // (4 * threads))


def is_for(width: int, warps: int) -> bool:
    """Whether blocks of so many warps take rows of this width."""
    return width % 4 == 0 and width <= PIECE and ahead_of(width, WARP * warps) <= AHEAD


@cache
def _steps(source: str, width: int, threads: int) -> Any:
    ahead, there, words = ahead_of(width, threads), padded(width), -(-width // COLUMNS) * (COLUMNS // 4)
    n_numbers = 4 * ahead

    @device
    def load_gains(gain, gains):
        for k in range(ahead):
            four = load4(gain, min(4 * (cuda.threadIdx.x + k * threads), width - 4))
            for j in range(4):
                gains[4 * k + j] = four[j]

    @device
    def bring(a, b, made, piece):
        """piece = the row that `source` says, and zeros. The first block leaves the row in `made`, if it is new."""
        found = cuda.local.array(n_numbers, np.float32)
        for k in range(ahead):
            at = min(4 * (cuda.threadIdx.x + k * threads), width - 4)
            first, second = load4(a, at), load4(b, at)
            for j in range(4):
                found[4 * k + j] = worked_out(source, first[j], second[j])
        for k in range(ahead):
            at = 4 * (cuda.threadIdx.x + k * threads)
            if at < there:
                for j in range(4):
                    put(piece, at + j, found[4 * k + j] if at < width else _f(0.0))
            if source != "row" and at < width and cuda.blockIdx.x == 0:
                for j in range(4):
                    put(made, at + j, found[4 * k + j])

    @device
    def scale_numbers(piece, gains, factor):
        """piece = piece * factor * gain, and the largest magnitude of this thread's, as bits."""
        largest = np.int32(0)
        for k in range(ahead):
            at = 4 * (cuda.threadIdx.x + k * threads)
            if at < width:
                four = load4(piece, at)
                for j in range(4):
                    value = times(times(four[j], factor), gains[4 * k + j])
                    put(piece, at + j, value)
                    largest = max(largest, magnitude(value))
        return largest

    @device
    def write_codes(piece, s, codes):
        """The row as int8 codes, four to a word, and the sum of this thread's; zeros if it has no scale."""
        total = np.int32(0)
        for k in range(ahead):
            at = cuda.threadIdx.x + k * threads
            if at < words:
                four, word = load4(piece, 4 * at), np.uint32(0)
                for j in range(4):
                    code = np.int32(round_half_even(times(four[j], s))) if s == s else np.int32(0)
                    total = np.int32(total + code)
                    word = np.uint32(word | np.uint32(np.uint32(code & 0xFF) << np.uint32(8 * j)))
                put(codes, at, word)
        return total

    return load_gains, bring, scale_numbers, write_codes


@cache
def normed(source: str, width: int, warps: int, share: int) -> Any:
    """The product of the norm of what `source` says (see `rows.rms_norm`), for widths that are multiples of 4 up to PIECE.

    A block has `share` tiles of rows of one matrix, and `warps` warps for each.
    """
    threads, blocks, step = WARP * warps * share, -(-width // COLUMNS), warps * (COLUMNS // 4)
    depth = min(DEPTH, -(-blocks // warps))
    rounds = -(-blocks // (warps * depth))
    words = blocks * (COLUMNS // 4)
    n_gains, n_numbers, n_words, n_parts = 4 * ahead_of(width, threads), padded(width), rounds * depth * step, warps * share * ROWS
    load_gains, bring, scale_numbers, write_codes = _steps(source, width, threads)
    none, multiply, load_weights = zeros(16), multiply_tiles(depth, 1, step), load_fragments(depth, in_global=True)

    def ternary_normed(a, b, made, gain, eps, words_of, ends, widths, factors, out):
        # [M] x 4, ..., as ternary_gemv -> [sum of N]
        let_next_begin()
        t, lane, warp = cuda.threadIdx.x, cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
        which, part = matrix_of(cuda.blockIdx.x, ends)
        mine, rows, first = of_three(words_of, which), of_three(widths, which), part * share
        column, tile = warp % warps, min(first + warp // warps, (rows - 1) // ROWS)  # past the end: the last one again, for nothing
        place = tile * (blocks * TILE_WORDS) + lane * 4
        weights = load_weights(mine, place + column * TILE_WORDS, warps * TILE_WORDS)
        gains = cuda.local.array(n_gains, np.float32)
        load_gains(gain, gains)
        piece = cuda.shared.array(n_numbers, np.float32, ALIGNED)
        lanes = cuda.shared.array(WIDE_LANES, np.float64, ALIGNED)
        codes = cuda.shared.array(n_words, np.uint32, ALIGNED)
        parts = cuda.shared.array(n_parts, np.int32, ALIGNED)
        factor = cuda.shared.array(1, np.float32)
        found = cuda.shared.array(2, np.int32)  # the largest magnitude, and the sum of the codes
        if t < n_words - words:
            put(codes, words + t, np.uint32(0))  # tiles past the end count nothing
        clear_lanes(lanes, threads)
        await_previous()

        bring(a, b, made, piece)
        cuda.syncthreads()
        add_products(piece, width, True, lanes, threads)
        cuda.syncthreads()
        total = fold_wide_lanes(lanes)
        if t == 0:
            factor[0] = factor_of(total, width, eps)
            found[0], found[1] = 0, 0
        cuda.syncthreads()
        largest = warp_max(scale_numbers(piece, gains, factor[0]))
        if lane == 0:
            cuda.atomic.max(found, 0, largest)
        cuda.syncthreads()
        scale = scale_of(found[0])
        row_sum = warp_sum(write_codes(piece, scale, codes))
        if lane == 0:
            cuda.atomic.add(found, 1, row_sum)  # of integers: the order is free
        cuda.syncthreads()

        sums = none()
        for turn in range(rounds):
            start = column + turn * (warps * depth)
            if turn > 0:
                weights = load_weights(mine, place + start * TILE_WORDS, warps * TILE_WORDS)
            sums = multiply(sums, weights, depth, codes, start * (COLUMNS // 4) + lane % 4 * 4, 0)
        if lane % 4 == 0:  # all of a product's 8 tokens are the one
            parts[warp * ROWS + lane // 4] = joined(sums[0], sums[4], sums[8], sums[12])
            parts[warp * ROWS + lane // 4 + 8] = joined(sums[2], sums[6], sums[10], sums[14])
        cuda.syncthreads()
        row = first * ROWS + t
        if t < share * ROWS and row < rows:
            dot = np.int32(0)
            for other in range(warps):
                dot = np.int32(dot + parts[(t // ROWS * warps + other) * ROWS + t % ROWS])
            out[rows_before(widths, which) + row] = finished(dot, found[1], scale, of_three(factors, which))

    ternary_normed.__name__ = ternary_normed.__qualname__ = f"ternary_normed_{source}"
    return kernel_of(ternary_normed, threads)
