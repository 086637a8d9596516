"""The GPU's layout of ternary matrices and of the codes they multiply. Importing this imports no CUDA.

THE LAYOUT follows the fragments of mma.m16n8k32. A tile is 16 rows by 128 columns, 512 bytes; a lane of a warp finds its 64 weights of it
in 16 bytes, so that a warp reads a tile in one coalesced load. For row group g = lane // 4 and j = lane % 4, byte b of word r holds at
bits 2 p (plane p) the code (0, 1, 2) of

    row g + 8 * (r % 2),   column 64 * (p // 2) + 16 j + 8 * (p % 2) + 4 * (r // 2) + b

so `word r >> 2 p & 0x03030303` is register r of plane p's fragment. Without the shift it is 4^p times that, which fits a byte, and the sums
of a plane can be shifted in the end. An integer sum may take columns in any order: this order lets a lane read its activations in 16 bytes,
too. Rows and columns are filled up to whole tiles with weights of zero (code 1); the tiles of one row of tiles are next to each other.
SPARE tiles of zero words follow: a warp asks for several tiles at once and does not look where its row ends.

Activations are codes [R, row_words] in words: columns up to a multiple of 128, the sum of the row's codes, and three words that keep
16-byte loads aligned. The sum is needed because weights count as 0, 1, 2: a product is (accumulated - sum) / scale * weight scale.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from ...model import Ternary
from ..fast.emit import LANES
from ..launching import launch, parallel, read_only

ROWS, COLUMNS = 16, 128  # rows and columns of a tile
TILE_WORDS = 128
WARPS = 16  # warps at most of a block with several tiles of rows
DEPTH = 10  # tiles of columns at most that a warp has in registers
SPARE = WARPS * DEPTH  # tiles that the warps of a block ask for at once


def tiles_of(shape: tuple[int, int]) -> tuple[int, int]:
    """Tiles of rows and tiles of columns of a matrix [N, M]."""
    return -(-shape[0] // ROWS), -(-shape[1] // COLUMNS)


def n_words(shape: tuple[int, int]) -> int:
    """Words that a matrix [N, M] takes, with its spare tiles."""
    tiles, blocks = tiles_of(shape)
    return (tiles * blocks + SPARE) * TILE_WORDS


def row_words(width: int) -> int:
    """Words of a row of activation codes: `width` bytes up to a multiple of 128, the sum, and 12 bytes more."""
    return -(-width // COLUMNS) * (COLUMNS // 4) + 4


@parallel
def _in_fragments(packed, steps, tiles, blocks, words):
    for tile in prange(tiles):
        for block in range(blocks):
            for lane in range(32):
                g, j = lane // 4, lane % 4
                for r in range(4):
                    word = np.uint32(0)
                    for half in range(2):  # of the tile's columns, p // 2
                        step = block * 8 + half * 4 + j
                        mine = packed[(tile * steps + step) * ROWS + g + r % 2 * 8] if step < steps else np.uint32(0x55555555)
                        for quarter in range(2):  # p % 2
                            codes = (mine >> np.uint32(6 - 4 * quarter - r // 2 * 2)) & np.uint32(0x03030303)
                            word |= codes << np.uint32(4 * half + 2 * quarter)
                    words[((tile * blocks + block) * 32 + lane) * 4 + r] = word


def in_fragments(weights: Ternary) -> NDArray[np.uint32]:
    """A packed matrix [N, M] in the layout of this file: uint32 [n_words]. It has the same two-bit codes in another order."""
    tiles, blocks = tiles_of(weights.shape)
    words = np.empty(n_words(weights.shape), np.uint32)
    words[tiles * blocks * TILE_WORDS :] = 0
    steps = -(-weights.shape[1] // LANES)
    launch(_in_fragments, words.size, read_only(weights.codes.view(np.uint32)), steps, tiles, blocks, words)
    return words
