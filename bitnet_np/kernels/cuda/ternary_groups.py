"""Products of ternary matrices with many tokens by Hopper's warpgroups (warpgroups.py): what ternary.py's `gemm` does elsewhere."""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from .layout import COLUMNS, ROWS, TILE_WORDS
from .ptx import bits_float, commit_copies, float_bits, for_each, in_turn, load_fragments, put, this_thread, times, wait_copies, zeros
from .quotients import inverse_of, mantissa, power, quotient
from .target import ALIGNED, WARP, device, kernel_of
from .ternary import STAGES, Activations, Results, matrix_of, of_three, rows_before
from .warpgroups import THREADS, copy_word_async, multiply_group, show_to_products


@device
def column_word(chunk, word):
    """The number, among the 32 words of a token's 128 columns, of a word (0 to 3) of a chunk (0 to 7)."""
    return chunk // 4 * 16 + word * 4 + chunk % 4


def _bring_chunks(tokens: int, warps: int) -> Any:
    """A function (shared, x, block, stage, first) that asks for 128 columns of the block's tokens, in core matrices: for zeros where there
    is no token. The lanes of a warp bring a chunk of 8 tokens, a word each, which lie in different banks."""

    @device
    def bring(shared, x, block, stage, first):
        if block < x.blocks:
            lane, warp = this_thread() % WARP, this_thread() // WARP
            for step in range(tokens // warps):
                piece = warp + step * warps
                chunk, token = piece % 8, piece // 8 * 8 + lane // 4
                start = (first + token) * x.stride + block * (COLUMNS // 4) + column_word(chunk, lane % 4)
                size = np.int32(4 if first + token < x.scale.size else 0)
                copy_word_async(shared, stage * (tokens * (COLUMNS // 4)) + (chunk * tokens + token) * 4 + lane % 4, x.codes, start, size)
        commit_copies()

    return bring


@device
def _leave_token(shared, tokens, token, x, at):
    """What turns the sums of a token into results: its row sum, and its scale taken apart."""
    row_sum, scale = np.uint32(0), np.float32(1)
    if at < x.scale.size:
        row_sum, scale = x.codes[at * x.stride + x.blocks * (COLUMNS // 4)], x.scale[at]
    m = mantissa(scale)
    shared[token] = row_sum
    shared[tokens + token] = float_bits(m)
    shared[2 * tokens + token] = float_bits(inverse_of(m))
    shared[3 * tokens + token] = float_bits(power(scale))


def _finish(tokens: int) -> Any:
    """A function (sums, (results, shared, n, first, token, row)) that writes the results of a warp: tokens from `token` of the block on."""

    def finish_token(i, sums, results, shared, n, first, token, row):
        mine = token + i // 2 * 8 + i % 2
        if first + mine < n:
            row_sum, m = np.int32(shared[mine]), bits_float(np.int32(shared[tokens + mine]))
            inverse, scale = bits_float(np.int32(shared[2 * tokens + mine])), bits_float(np.int32(shared[3 * tokens + mine]))
            start = results.start + (first + mine) * results.rows
            for up in range(2):
                here = row + up * 8
                if here >= results.own and here < results.rows:
                    total = np.float32(np.int32(sums[up] - row_sum))
                    put(results.out, start + here, times(quotient(total, m, inverse, scale), results.factor))

    return for_each(finish_token, [(i // 2 * 4 + i % 2, i // 2 * 4 + 2 + i % 2) for i in range(tokens // 4)])


@cache
def gemm(groups: int, tokens: int) -> Any:
    """Many tokens: a block is `groups` warpgroups, each with 64 rows, for the same `tokens` tokens.

    Weights go from memory to registers as they are and are unpacked there. Codes come through shared memory, STAGES blocks of 128 columns
    deep. A warpgroup waits for its products; meanwhile others multiply.
    """
    threads, warps = groups * THREADS, groups * (THREADS // WARP)
    stage_words = tokens * (COLUMNS // 4)
    n_shared = STAGES * stage_words
    none, multiply, load_weights = zeros(tokens // 2), multiply_group(tokens), load_fragments(1, in_global=True)
    bring, wait, finish = _bring_chunks(tokens, warps), wait_copies(STAGES - 2), _finish(tokens)

    def ternary_groups(words, ends, widths, factors, codes, scale, blocks, stride, out):  # as ternary_gemm
        in_turn()
        lane, warp = this_thread() % WARP, this_thread() // WARP
        which, part = matrix_of(cuda.blockIdx.x, ends)
        weights_of, rows, x = of_three(words, which), of_three(widths, which), Activations(codes, scale, stride, blocks)
        shared = cuda.shared.array(n_shared, np.uint32, ALIGNED)
        first, tile = cuda.blockIdx.y * tokens, part * warps + warp
        start = min(tile, (rows + ROWS - 1) // ROWS - 1)  # past the end: the last tile, which another warp has, too
        for stage in range(STAGES - 1):
            bring(shared, x, stage, stage, first)
        sums = none()
        weights = load_weights(weights_of, start * blocks * TILE_WORDS + lane * 4, 0)
        for block in range(blocks):
            wait()
            show_to_products()
            cuda.syncthreads()
            bring(shared, x, block + STAGES - 1, (block + STAGES - 1) % STAGES, first)
            following = min(block + 1, blocks - 1)
            later = load_weights(weights_of, (start * blocks + following) * TILE_WORDS + lane * 4, 0)
            sums = multiply(sums, weights, shared, block % STAGES * stage_words)
            weights = later
        cuda.syncthreads()  # the codes have served
        if this_thread() < tokens:
            _leave_token(shared, tokens, this_thread(), x, first + this_thread())
        cuda.syncthreads()
        results = Results(out, scale.size * rows_before(widths, which), rows, tile * ROWS, of_three(factors, which))
        finish(sums, (results, shared, scale.size, first, lane % 4 * 2, start * ROWS + lane // 4))

    return kernel_of(ternary_groups, threads)
