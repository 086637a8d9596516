"""Tables of numbers on the GPU, and products with them in the contract's order: 16 threads are the 16 lanes of one row.

A table's rows are laid out so that each lane finds its next numbers in 16 bytes: numbers come in blocks of 16 * S (S = 4 of float32, 8 of
float16 or bfloat16), number 16 s + lane of a block at place S lane + s. Rows are filled up with zeros to whole blocks.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ..simd import LANES
from .target import instructions, kernel

bits_float, device, fma, half_value, half_warp_sum, load4 = (
    instructions.bits_float,
    instructions.device,
    instructions.fma,
    instructions.half_value,
    instructions.half_warp_sum,
    instructions.load4,
)

ROWS = 4  # of the table that 16 threads work on at once: each reads a token's numbers once for all of them
_f = np.float32
_BLOCK_WORDS = 64  # of a block of numbers: 16 lanes with 16 bytes each
_KINDS = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16"}


def kind_of(table: NDArray) -> str:
    return _KINDS[table.dtype]


def in_lanes(table: NDArray) -> NDArray[np.uint32]:  # [V, D] -> [V, words of a row]
    """A table of float32, float16 or bfloat16 bits in the layout of this file."""
    steps = 16 // table.dtype.itemsize
    rows, width = table.shape
    blocks = -(-width // (LANES * steps))
    out = np.zeros((rows, blocks, LANES, steps), table.dtype)
    for block in range(blocks):  # one at a time, for the memory that a padded copy would take
        part = table[:, block * LANES * steps : (block + 1) * LANES * steps]
        padded = np.zeros((rows, LANES * steps), table.dtype)
        padded[:, : part.shape[1]] = part
        out[:, block] = padded.reshape(rows, steps, LANES).swapaxes(1, 2)
    return out.reshape(rows, -1).view(np.uint32)


@device
def _number(word, place, kind):
    """A number of a word: the only one, the low one or the high one. The kind is a constant where this is compiled."""
    if kind == "float32":
        return bits_float(np.int32(word))
    bits = np.uint32(np.uint32(word >> np.uint32(16)) if place else np.uint32(word & np.uint32(0xFFFF)))
    if kind == "float16":
        return half_value(bits)
    return bits_float(np.int32(np.uint32(bits << np.uint32(16))))


@cache
def embed(kind: str) -> Any:
    steps = 4 if kind == "float32" else 8
    per_word = steps // 4

    @kernel
    def embed(words, tokens, out):  # [V, words], [R] -> [R, D]
        width = out.shape[1]
        for item in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            r, i = item // width, item % width
            block, step, lane = i // (LANES * steps), i % (LANES * steps) // LANES, i % LANES
            place = step % per_word
            word = words[tokens[r], block * _BLOCK_WORDS + lane * 4 + step // per_word]
            number = _number(word, 0, kind)
            if place:
                number = _number(word, 1, kind)
            out[r, i] = number + _f(0.0)  # as on the CPU, where 1 * x + 0 turns -0 around

    return embed


@cache
def matmul(kind: str, tokens: int) -> Any:
    """The product for `tokens` tokens at a time, a row of the grid for each such group."""
    steps = 4 if kind == "float32" else 8
    per_word = steps // 4
    n_sums, n_numbers = ROWS * tokens, ROWS * steps

    @kernel
    def matmul(words, x, row_words, width, rows, present, out):  # [N * row_words], [R * M] -> [R * N]
        lane, half = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        first = (cuda.blockIdx.x * (cuda.blockDim.x // LANES) + half) * ROWS
        token = cuda.blockIdx.y * tokens
        sums = cuda.local.array(n_sums, np.float32)
        numbers = cuda.local.array(n_numbers, np.float32)
        for i in range(n_sums):
            sums[i] = _f(0.0)
        for block in range(row_words // _BLOCK_WORDS):
            for row in range(ROWS):
                start = min(first + row, rows - 1) * row_words + block * _BLOCK_WORDS + lane * 4
                four = load4(words, start)
                for i in range(4):
                    for place in range(per_word):
                        numbers[row * steps + i * per_word + place] = _number(four[i], place, kind)
            for step in range(steps):
                begin = block * LANES * steps + step * LANES
                if begin < width:  # no step past the end: adding +0 turns a -0 around
                    i = begin + lane
                    for t in range(tokens):
                        value = _f(0.0)
                        if i < width:
                            value = x[min(token + t, present - 1) * width + i]
                        for row in range(ROWS):
                            sums[row * tokens + t] = fma(numbers[row * steps + step], value, sums[row * tokens + t])
        for row in range(ROWS):
            for t in range(tokens):
                total = half_warp_sum(sums[row * tokens + t])
                if lane == 0 and first + row < rows and token + t < present:
                    out[(token + t) * rows + first + row] = total

    return matmul
