"""Ternary matrices on the GPU: their layout there, and products with int8 codes by tensor cores and byte dot products.

THE LAYOUT follows the fragments of mma.m16n8k32. A tile is 16 rows by 128 columns, 512 bytes; a lane of a warp finds its 64 weights of it
in 16 bytes, so that a warp reads a tile in one coalesced load. With row group g = lane // 4 and j = lane % 4, byte b of word 2 h + s holds
at bits 2 p the code (0, 1, 2) of

    row g + 8 * (p % 2),   column 64 h + 16 j + 8 s + 4 * (p // 2) + b

so `word >> 2 p & 0x03030303` is register p of the fragment. An integer sum may take columns in any order: this one lets a lane read its
activations in 16 bytes too. Rows and columns are filled up with weights of zero (code 1) to whole tiles; tiles of a row of tiles are next
to each other.

Activations are codes [R, row_words] in words: columns up to a multiple of 128, then the row's sum and three words to keep 16-byte loads
aligned. Codes count 0, 1, 2, hence the sum: (accumulated - sum) / scale * weight scale.

A launch takes three matrices that read the same input, some of them with no rows: parts of the grid, `ends` says up to which block each.
Their results are one after the other.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from .target import ALIGNED, instructions, kernel

commit_copies, copy_async, device, dot_tiles, load_fragments, load_within, multiply, quad_sum, times, wait_copies, zeros = (
    instructions.commit_copies,
    instructions.copy_async,
    instructions.device,
    instructions.dot_tiles,
    instructions.load_fragments,
    instructions.load_within,
    instructions.multiply,
    instructions.quad_sum,
    instructions.times,
    instructions.wait_copies,
    instructions.zeros,
)

ROWS, COLUMNS = 16, 128  # of a tile
TILE_WORDS = 128
WARP = 32
STAGES = 3  # blocks of 128 columns of activations in shared memory at a time
DEPTH = 4  # tiles that a warp of `gemv` asks for at most before it needs the first


def row_words(width: int) -> int:
    """Words of a row of activation codes: `width` bytes up to a multiple of 128, the sum, and 12 bytes."""
    return -(-width // COLUMNS) * (COLUMNS // 4) + 4


def in_fragments(matrix: NDArray[np.int8]) -> NDArray[np.uint32]:  # [N, M] of -1, 0, +1 -> [tiles of rows * tiles of columns * 128]
    """A ternary matrix in the layout of this file."""
    n, m = matrix.shape
    tiles, blocks = -(-n // ROWS), -(-m // COLUMNS)
    codes = np.ones((tiles * ROWS, blocks * COLUMNS), np.uint8)
    codes[:n, :m] = matrix + 1
    # tile, p % 2, g, block, h, j, s, p // 2, b  ->  tile, block, g, j, h, s, b | p // 2, p % 2
    axes = codes.reshape(tiles, 2, 8, blocks, 2, 4, 2, 2, 4).transpose(0, 3, 2, 5, 4, 6, 8, 7, 1)
    places = np.array([[0, 2], [4, 6]], np.uint8)
    packed = np.bitwise_or.reduce((axes << places).reshape(*axes.shape[:-2], 4), axis=-1)
    return np.ascontiguousarray(packed).view("<u4").reshape(-1)


def from_fragments(words: NDArray[np.uint32], shape: tuple[int, int]) -> NDArray[np.int8]:
    """The inverse of `in_fragments`."""
    n, m = shape
    tiles, blocks = -(-n // ROWS), -(-m // COLUMNS)
    packed = words.view(np.uint8).reshape(tiles, blocks, 8, 4, 2, 2, 4)
    places = np.array([[0, 2], [4, 6]], np.uint8)
    codes = packed[..., None, None] >> places & 3  # tile, block, g, j, h, s, b, p // 2, p % 2
    return codes.transpose(0, 8, 2, 1, 4, 3, 5, 7, 6).reshape(tiles * ROWS, -1)[:n, :m].astype(np.int8) - 1


@device
def _finish(total, row_sum, scale, factor):
    return times(np.float32(np.float32(np.int32(total - row_sum)) / scale), factor)


@device
def _matrix(block, ends):
    """Whose part of the grid a block is in: which of three matrices, and which block of its own."""
    if block < ends[0]:
        return 0, block
    if block < ends[1]:
        return 1, block - ends[0]
    return 2, block - ends[1]


@device
def _of(three, which):
    return three[0] if which == 0 else three[1] if which == 1 else three[2]


@device
def _before(widths, which):
    """How many rows the matrices before have."""
    return 0 if which == 0 else widths[0] if which == 1 else widths[0] + widths[1]


@cache
def gemv(warps: int, depth: int) -> Any:
    """One token, by byte dot products: a block for each 16 rows, whose warps share the columns and ask for `depth` tiles at a time."""
    n_parts = warps * ROWS
    none, dot = zeros(2), dot_tiles(depth)
    load_weights, load_codes = load_within(depth), load_within(depth)

    @kernel
    def ternary_gemv(words, ends, widths, factors, codes, scale, blocks, out):
        # ([tiles * blocks * 128] x 3), ..., [row_words], [1] -> [sum of N]
        lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
        which, tile = _matrix(cuda.blockIdx.x, ends)
        mine = _of(words, which)
        parts = cuda.shared.array(n_parts, np.int32)
        sums = none()
        place, codes_place = tile * blocks * TILE_WORDS + lane * 4, lane % 4 * 4
        last, last_codes = (blocks - 1) * TILE_WORDS, (blocks - 1) * (COLUMNS // 4)
        for start in range(warp, blocks, warps * depth):  # past the end: the last tile again, for nothing
            weights = load_weights(mine, place + start * TILE_WORDS, warps * TILE_WORDS, place + last)
            at = codes_place + start * (COLUMNS // 4)
            low = load_codes(codes, at, warps * (COLUMNS // 4), codes_place + last_codes)
            high = load_codes(codes, at + 16, warps * (COLUMNS // 4), codes_place + last_codes + 16)
            sums = dot(sums, weights, low, high, (blocks - start + warps - 1) // warps)
        upper, lower = quad_sum(sums[0]), quad_sum(sums[1])
        if lane % 4 == 0:
            parts[warp * ROWS + lane // 4] = upper
            parts[warp * ROWS + lane // 4 + 8] = lower
        cuda.syncthreads()
        row = tile * ROWS + cuda.threadIdx.x
        if cuda.threadIdx.x < ROWS and row < _of(widths, which):
            total = np.int32(0)
            for other in range(warps):
                total = np.int32(total + parts[other * ROWS + cuda.threadIdx.x])
            row_sum = np.int32(codes[blocks * (COLUMNS // 4)])
            out[_before(widths, which) + row] = _finish(total, row_sum, scale[0], _of(factors, which))

    return ternary_gemv


@cache
def skinny(tokens: int, warps: int) -> Any:
    """8 * `tokens` tokens at a time by tensor cores: as `gemv`, with the fragments of all tokens read from the cache."""
    n_sums = 4 * tokens
    n_parts = warps * WARP * n_sums
    none, first_half, second_half = zeros(n_sums), multiply(1, tokens, 0), multiply(1, tokens, 1)
    load_codes, load_weights = load_fragments(tokens), load_fragments(1, in_global=True)

    @kernel
    def ternary_skinny(words, ends, widths, factors, codes, scale, blocks, stride, out):
        # as ternary_gemv; codes [R up to a multiple of 8 * tokens, stride], [R] -> [R, N] x 3
        lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
        which, tile = _matrix(cuda.blockIdx.x, ends)
        mine, rows, present = _of(words, which), _of(widths, which), scale.size
        parts = cuda.shared.array(n_parts, np.int32)
        first = cuda.blockIdx.y * (8 * tokens)
        sums = none()
        for block in range(warp, blocks, warps):
            weights = load_weights(mine, ((tile * blocks + block) * WARP + lane) * 4, 0)
            at = (first + lane // 4) * stride + block * (COLUMNS // 4) + lane % 4 * 4
            sums = first_half(sums, weights, load_codes(codes, at, 8 * stride))
            sums = second_half(sums, weights, load_codes(codes, at + 16, 8 * stride))
        for i in range(n_sums):
            parts[(warp * n_sums + i) * WARP + lane] = sums[i]
        cuda.syncthreads()
        start = present * _before(widths, which)
        for item in range(cuda.threadIdx.x, n_sums * WARP, cuda.blockDim.x):
            i, place = item // WARP, item % WARP
            row = tile * ROWS + place // 4 + i % 4 // 2 * 8
            token = first + i // 4 * 8 + place % 4 * 2 + i % 2
            if row < rows and token < present:
                total = np.int32(0)
                for other in range(warps):
                    total = np.int32(total + parts[(other * n_sums + i) * WARP + place])
                row_sum = np.int32(codes[token * stride + blocks * (COLUMNS // 4)])
                out[start + token * rows + row] = _finish(total, row_sum, scale[token], _of(factors, which))

    return ternary_skinny


@cache
def gemm(row_tiles: int, token_tiles: int, warp_rows: int, warp_tokens: int) -> Any:
    """Many tokens by tensor cores, for matrices of at least `row_tiles` tiles of rows.

    A block is warp_rows x warp_tokens warps; a warp has row_tiles * 16 rows and token_tiles * 8 tokens.

    Weights go from memory to registers as they are and are unpacked there, each for all of a warp's tokens. Activations come through shared
    memory, STAGES blocks of 128 columns deep; 64 bytes of one token follow those of another, so that a quad's loads meet all banks.
    """
    n_sums = 4 * row_tiles * token_tiles
    threads = warp_rows * warp_tokens * WARP
    block_rows, block_tokens = warp_rows * row_tiles, warp_tokens * token_tiles * 8
    stage_words = block_tokens * (COLUMNS // 4)
    n_shared = STAGES * stage_words
    none, first_half, second_half = zeros(n_sums), multiply(row_tiles, token_tiles, 0), multiply(row_tiles, token_tiles, 1)
    load_weights, load_codes, wait = load_fragments(row_tiles, in_global=True), load_fragments(token_tiles), wait_copies(STAGES - 2)

    @device
    def bring(shared, codes, block, blocks, stage, first, stride, present):
        """Ask for 128 columns of the block's tokens; of tokens that are not there, for zeros."""
        if block < blocks:
            token, part = cuda.threadIdx.x // 8, cuda.threadIdx.x % 8
            to = stage * stage_words + part // 4 * (block_tokens * 16) + token * 16 + part % 4 * 4
            start = (first + token) * stride + block * (COLUMNS // 4) + part * 4
            for step in range(block_tokens * 8 // threads):
                size = np.int32(16 if first + token + step * (threads // 8) < present else 0)
                copy_async(shared, to + step * (threads * 2), codes, start + step * (threads // 8) * stride, size)
        commit_copies()

    @kernel
    def ternary_gemm(words, ends, widths, factors, codes, scale, blocks, stride, out):  # as ternary_skinny; codes [R * stride]
        lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
        which, part = _matrix(cuda.blockIdx.x, ends)
        mine_words, rows, factor = _of(words, which), _of(widths, which), _of(factors, which)
        tiles, present = (rows + ROWS - 1) // ROWS, scale.size
        shared = cuda.shared.array(n_shared, np.uint32, ALIGNED)
        first = cuda.blockIdx.y * block_tokens
        tile = part * block_rows + warp % warp_rows * row_tiles
        mine = warp // warp_rows * token_tiles * 8
        start, step = min(tile, tiles - row_tiles), blocks * TILE_WORDS  # past the end: the last ones, which others may work on too
        for stage in range(STAGES - 1):
            bring(shared, codes, stage, blocks, stage, first, stride, present)
        sums = none()
        weights = load_weights(mine_words, start * blocks * TILE_WORDS + lane * 4, step)
        for block in range(blocks):
            wait()
            cuda.syncthreads()
            bring(shared, codes, block + STAGES - 1, blocks, (block + STAGES - 1) % STAGES, first, stride, present)
            following = min(block + 1, blocks - 1)
            later = load_weights(mine_words, (start * blocks + following) * TILE_WORDS + lane * 4, step)
            at = block % STAGES * stage_words + (mine + lane // 4) * 16 + lane % 4 * 4
            sums = first_half(sums, weights, load_codes(shared, at, 128))
            sums = second_half(sums, weights, load_codes(shared, at + block_tokens * 16, 128))
            weights = later
        base, place_of = start * ROWS + lane // 4, present * _before(widths, which)
        for place in range(2 * token_tiles):  # token by token, so that few scales wait in registers
            token = first + mine + place // 2 * 8 + lane % 4 * 2 + place % 2
            if token < present:
                row_sum, s = np.int32(codes[token * stride + blocks * (COLUMNS // 4)]), scale[token]
                for up in range(2 * row_tiles):
                    row = base + up * 8
                    if row >= tile * ROWS and row < rows:
                        i = (up // 2 * token_tiles + place // 2) * 4 + up % 2 * 2 + place % 2
                        out[place_of + token * rows + row] = _finish(sums[i], row_sum, s, factor)

    return ternary_gemm
