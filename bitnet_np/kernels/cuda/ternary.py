"""Products of ternary matrices with int8 codes, by tensor cores and by byte dot products. layout.py defines the layout of both.

A launch takes three matrices that read the same input; some may have no rows. Each has a part of the grid, which ends before block ends[i].
Their results follow one another.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from .layout import COLUMNS, DEPTH, ROWS, TILE_WORDS
from .ptx import (
    await_previous,
    commit_copies,
    copy_async,
    dot_tiles,
    for_each,
    in_turn,
    let_next_begin,
    load_fragments,
    load_within,
    multiply,
    multiply_tiles,
    put,
    quad_sum,
    this_thread,
    times,
    wait_copies,
    zeros,
)
from .target import ALIGNED, WARP, device, inlined, kernel, kernel_of

STAGES = 3  # blocks of 128 columns of activations in shared memory at a time
WIDEST = 1 << 18  # columns at most: the sum of plane 3 counts 64 times and is an int32


@device
def finished(total, row_sum, scale, factor):
    """The result of a product: (total - row_sum) / scale * factor, in float32."""
    return times(np.float32(np.float32(np.int32(total - row_sum)) / scale), factor)


@device
def matrix_of(block, ends):
    """The matrix whose part of the grid a block is in, and the number of the block in that part."""
    if block < ends[0]:
        return 0, block
    if block < ends[1]:
        return 1, block - ends[0]
    return 2, block - ends[1]


@inlined
def of_three(three, which):
    """three[which]: a tuple of arrays has no index that is not a constant."""
    return three[0] if which == 0 else three[1] if which == 1 else three[2]


@device
def rows_before(widths, which):
    """The number of rows of the matrices before it."""
    return 0 if which == 0 else widths[0] if which == 1 else widths[0] + widths[1]


@device
def joined(ones, fours, sixteens, sixty_fours):
    """The sum of four planes, of which plane p counts 4^p times."""
    return np.int32(np.int32(ones + (fours >> 2)) + np.int32((sixteens >> 4) + (sixty_fours >> 6)))


@device
def of_all_warps(parts, first, warps, step):
    """The sum of the results of `warps` warps in `parts`, `step` apart."""
    total = np.int32(0)
    for other in range(warps):
        total = np.int32(total + parts[first + other * step])
    return total


@cache
def gemv(warps: int, depth: int) -> Any:
    """One token, by byte dot products. A block has 16 rows; its warps share the columns and ask for `depth` tiles at a time."""
    n_parts = warps * ROWS
    none, dot = zeros(8), dot_tiles(depth)
    load_weights, load_codes, step = load_fragments(depth, in_global=True), load_within(depth), warps * TILE_WORDS

    @kernel
    def ternary_gemv(words, ends, widths, factors, codes, scale, blocks, out):
        # ([tiles * blocks * 128] x 3), ..., [row_words], [1] -> [sum of N]
        let_next_begin()
        lane, warp = this_thread() % WARP, this_thread() // WARP
        which, tile = matrix_of(cuda.blockIdx.x, ends)
        mine = of_three(words, which)
        parts = cuda.shared.array(n_parts, np.int32)
        sums = none()
        place, codes_place = tile * blocks * TILE_WORDS + lane * 4, lane % 4 * 4
        last_codes = (blocks - 1) * (COLUMNS // 4)
        weights = load_weights(mine, place + warp * TILE_WORDS, step)
        await_previous()
        for start in range(warp, blocks, warps * depth):
            if start != warp:
                weights = load_weights(mine, place + start * TILE_WORDS, step)
            at = codes_place + start * (COLUMNS // 4)
            low = load_codes(codes, at, warps * (COLUMNS // 4), codes_place + last_codes)
            high = load_codes(codes, at + 16, warps * (COLUMNS // 4), codes_place + last_codes + 16)
            sums = dot(sums, weights, low, high, (blocks - start + warps - 1) // warps)
        upper = quad_sum(joined(sums[0], sums[1], sums[2], sums[3]))
        lower = quad_sum(joined(sums[4], sums[5], sums[6], sums[7]))
        if lane % 4 == 0:
            parts[warp * ROWS + lane // 4] = upper
            parts[warp * ROWS + lane // 4 + 8] = lower
        cuda.syncthreads()
        row = tile * ROWS + this_thread()
        if this_thread() < ROWS and row < of_three(widths, which):
            total = of_all_warps(parts, this_thread(), warps, ROWS)
            row_sum = np.int32(codes[blocks * (COLUMNS // 4)])
            out[rows_before(widths, which) + row] = finished(total, row_sum, scale[0], of_three(factors, which))

    return ternary_gemv


@cache
def skinny(tokens: int, width: int, warps: int, share: int) -> Any:
    """8 * `tokens` tokens at a time by tensor cores, which read their codes straight from the cache.

    A block has `share` tiles of rows of one matrix and `warps` warps for each of them, which share the columns.
    """
    blocks, step, threads = -(-width // COLUMNS), warps * (COLUMNS // 4), WARP * warps * share
    depth = min(DEPTH, -(-blocks // warps))
    rounds, n_sums = -(-blocks // (warps * depth)), 4 * tokens
    n_tile = n_sums * WARP
    n_parts = warps * share * n_tile
    none, multiply_some, load_weights = zeros(4 * n_sums), multiply_tiles(depth, tokens, step), load_fragments(depth, in_global=True)

    def leave_one(i, planes, parts, at):
        put(parts, at + i * WARP, joined(planes[0], planes[1], planes[2], planes[3]))

    leave = for_each(leave_one, [range(i // 4 * 16 + i % 4, i // 4 * 16 + 16, 4) for i in range(n_sums)])

    def ternary_skinny(words, ends, widths, factors, codes, scale, stride, out):
        # as ternary_gemv; codes [R up to a multiple of 8 * tokens, stride], [R] -> [R, N] x 3
        let_next_begin()
        lane, warp = this_thread() % WARP, this_thread() // WARP
        which, part = matrix_of(cuda.blockIdx.x, ends)
        mine, rows, present = of_three(words, which), of_three(widths, which), scale.size
        own, column = part * share, warp % warps
        tile = min(own + warp // warps, (rows - 1) // ROWS)  # past the end: the last one again, whose result is not used
        parts = cuda.shared.array(n_parts, np.int32)
        first, place = cuda.blockIdx.y * (8 * tokens), tile * (blocks * TILE_WORDS) + lane * 4
        sums = none()
        weights = load_weights(mine, place + column * TILE_WORDS, warps * TILE_WORDS)
        await_previous()
        for turn in range(rounds):
            start = column + turn * (warps * depth)
            if turn > 0:
                weights = load_weights(mine, place + start * TILE_WORDS, warps * TILE_WORDS)
            at = (first + lane // 4) * stride + min(start, blocks - 1) * (COLUMNS // 4) + lane % 4 * 4
            left = (blocks - start + warps - 1) // warps
            sums = multiply_some(sums, weights, left, codes, at, 8 * stride)
        leave(sums, (parts, warp * n_tile + lane))
        cuda.syncthreads()
        start = present * rows_before(widths, which)
        for item in range(this_thread(), share * n_tile, threads):
            i, place = item % n_tile // WARP, item % WARP
            row = (own + item // n_tile) * ROWS + place // 4 + i % 4 // 2 * 8
            token = first + i // 4 * 8 + place % 4 * 2 + i % 2
            if row < rows and token < present:
                total = of_all_warps(parts, item // n_tile * warps * n_tile + item % n_tile, warps, n_tile)
                row_sum = np.int32(codes[token * stride + blocks * (COLUMNS // 4)])
                out[start + token * rows + row] = finished(total, row_sum, scale[token], of_three(factors, which))

    return kernel_of(ternary_skinny, threads)


class Activations(NamedTuple):
    """The codes of tokens, in the layout of layout.py."""

    codes: Any  # [R * stride] words
    scale: Any  # [R]
    stride: Any  # words of a token
    blocks: Any  # of 128 columns


class Results(NamedTuple):
    """The place of a block's results, and the factors that make numbers of its sums."""

    out: Any
    start: Any  # of the matrix in `out`
    rows: Any  # of the matrix
    own: Any  # the first row that no other warp has
    factor: Any  # scale of the weights


def _bring_codes(block_tokens: int, threads: int) -> Any:
    """A function (shared, x, block, stage, first) that asks for 128 columns of the block's tokens: for zeros where there is no token."""
    stage_words = block_tokens * (COLUMNS // 4)

    @device
    def bring(shared, x, block, stage, first):
        if block < x.blocks:
            token, part = this_thread() // 8, this_thread() % 8
            to = stage * stage_words + part // 4 * (block_tokens * 16) + token * 16 + part % 4 * 4
            start = (first + token) * x.stride + block * (COLUMNS // 4) + part * 4
            for step in range(block_tokens * 8 // threads):
                size = np.int32(16 if first + token + step * (threads // 8) < x.scale.size else 0)
                copy_async(shared, to + step * (threads * 2), x.codes, start + step * (threads // 8) * x.stride, size)
        commit_copies()

    return bring


def _finish(row_tiles: int, token_tiles: int) -> Any:
    """A function (sums, (results, x, first, row)) that writes the results of a warp: tokens from `first` on, rows from `row` on."""

    def finish_row(i, sums, results, at, row, row_sum, scale):
        here = row + i * 8
        if here >= results.own and here < results.rows:
            put(results.out, at + here, finished(sums[0], row_sum, scale, results.factor))

    finish_rows = for_each(finish_row, [(up,) for up in range(2 * row_tiles)])

    def finish_token(i, sums, results, x, first, row):
        """Writes the sums of one token at a time, so that few scales wait in registers."""
        token = first + i // 2 * 8 + i % 2
        if token < x.scale.size:
            row_sum = np.int32(x.codes[token * x.stride + x.blocks * (COLUMNS // 4)])
            finish_rows(sums, (results, results.start + token * results.rows, row, row_sum, x.scale[token]))

    rows = range(2 * row_tiles)
    picks = [[(up // 2 * token_tiles + place // 2) * 4 + up % 2 * 2 + place % 2 for up in rows] for place in range(2 * token_tiles)]
    return for_each(finish_token, picks)


@cache
def gemm(row_tiles: int, token_tiles: int, warp_rows: int, warp_tokens: int) -> Any:
    """Many tokens by tensor cores, for matrices of at least `row_tiles` tiles of rows.

    A block is warp_rows x warp_tokens warps; a warp has row_tiles * 16 rows and token_tiles * 8 tokens.

    Weights go from memory to registers as they are; a warp unpacks them there, once for all of its tokens. Activations come through shared
    memory, STAGES blocks of 128 columns deep; 64 bytes of one token follow 64 bytes of another, so that the loads of a quad use all banks.
    """
    n_sums = 4 * row_tiles * token_tiles
    threads = warp_rows * warp_tokens * WARP
    block_rows, block_tokens = warp_rows * row_tiles, warp_tokens * token_tiles * 8
    stage_words = block_tokens * (COLUMNS // 4)
    n_shared = STAGES * stage_words
    none, first_half, second_half = zeros(n_sums), multiply(row_tiles, token_tiles, 0), multiply(row_tiles, token_tiles, 1)
    load_weights, load_codes, wait = load_fragments(row_tiles, in_global=True), load_fragments(token_tiles), wait_copies(STAGES - 2)
    bring, finish = _bring_codes(block_tokens, threads), _finish(row_tiles, token_tiles)

    @kernel
    def ternary_gemm(words, ends, widths, factors, codes, scale, blocks, stride, out):  # as ternary_skinny; codes [R * stride]
        in_turn()
        lane, warp = this_thread() % WARP, this_thread() // WARP
        which, part = matrix_of(cuda.blockIdx.x, ends)
        weights_of, rows, x = of_three(words, which), of_three(widths, which), Activations(codes, scale, stride, blocks)
        tiles = (rows + ROWS - 1) // ROWS
        shared = cuda.shared.array(n_shared, np.uint32, ALIGNED)
        first = cuda.blockIdx.y * block_tokens
        tile = part * block_rows + warp % warp_rows * row_tiles
        mine = warp // warp_rows * token_tiles * 8
        start, step = min(tile, tiles - row_tiles), blocks * TILE_WORDS  # past the end: the last tiles, which other warps have, too
        for stage in range(STAGES - 1):
            bring(shared, x, stage, stage, first)
        sums = none()
        weights = load_weights(weights_of, start * blocks * TILE_WORDS + lane * 4, step)
        for block in range(blocks):
            wait()
            cuda.syncthreads()
            bring(shared, x, block + STAGES - 1, (block + STAGES - 1) % STAGES, first)
            following = min(block + 1, blocks - 1)
            later = load_weights(weights_of, (start * blocks + following) * TILE_WORDS + lane * 4, step)
            at = block % STAGES * stage_words + (mine + lane // 4) * 16 + lane % 4 * 4
            sums = first_half(sums, weights, load_codes(shared, at, 128))
            sums = second_half(sums, weights, load_codes(shared, at + block_tokens * 16, 128))
            weights = later
        results = Results(out, scale.size * rows_before(widths, which), rows, tile * ROWS, of_three(factors, which))
        finish(sums, (results, x, first + mine + lane % 4 * 2, start * ROWS + lane // 4))

    return ternary_gemm
