"""Tables of numbers on the GPU, and products with them in the contract's order: 16 threads are the 16 lanes of one row.

A row of a table is laid out so that each lane finds its next numbers in 16 bytes. Numbers come in blocks of 16 * S (S is 4 for float32, 8
for float16 and bfloat16); number 16 * s + lane of a block is at place S * lane + s. Rows are filled up with zeros to whole blocks.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ..fast.emit import LANES
from .ptx import (
    await_previous,
    bits_float,
    float_zeros,
    for_each,
    half_value,
    half_warp_sum,
    in_turn,
    let_next_begin,
    load_within,
    multiply_rows,
    this_thread,
)
from .target import inlined, kernel

ROWS = 4  # rows of the table that 16 threads multiply at once, so that they read a token's numbers once for all of them
_f = np.float32
_BLOCK_WORDS = 64  # words of a block of numbers: 16 bytes for each of 16 lanes
_KINDS = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16"}


def kind_of(table: NDArray) -> str:
    """ "float32", "float16" or "bfloat16", which is kept as uint16."""
    return _KINDS[table.dtype]


def in_lanes(table: NDArray) -> NDArray[np.uint32]:  # [V, D] -> [V, words of a row]
    """A table of float32, float16 or the bits of bfloat16 in the layout of this file."""
    steps = 16 // table.dtype.itemsize
    rows, width = table.shape
    blocks = -(-width // (LANES * steps))
    out = np.zeros((rows, blocks, LANES, steps), table.dtype)
    for block in range(blocks):  # one at a time: a padded copy of the whole table would take as much memory again
        part = table[:, block * LANES * steps : (block + 1) * LANES * steps]
        padded = np.zeros((rows, LANES * steps), table.dtype)
        padded[:, : part.shape[1]] = part
        out[:, block] = padded.reshape(rows, steps, LANES).swapaxes(1, 2)
    return out.reshape(rows, -1).view(np.uint32)


@inlined
def _number(word, place, kind):
    """A number of a word: its only one, or the low (place 0) or high one of two. The kind is a constant where this is compiled."""
    if kind == "float32":
        return bits_float(np.int32(word))
    bits = np.uint32(np.uint32(word >> np.uint32(16)) if place else np.uint32(word & np.uint32(0xFFFF)))
    if kind == "float16":
        return half_value(bits)
    return bits_float(np.int32(np.uint32(bits << np.uint32(16))))


@cache
def embed(kind: str) -> Any:
    """Rows of a table, by token."""
    steps = 4 if kind == "float32" else 8
    per_word = steps // 4

    @kernel
    def embed(words, tokens, out):  # [V, words], [R] -> [R, D]
        in_turn()
        width = out.shape[1]
        for item in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            r, i = item // width, item % width
            block, step, lane = i // (LANES * steps), i % (LANES * steps) // LANES, i % LANES
            place = step % per_word
            word = words[tokens[r], block * _BLOCK_WORDS + lane * 4 + step // per_word]
            number = _number(word, 0, kind)
            if place:
                number = _number(word, 1, kind)
            out[r, i] = number + _f(0.0)  # as on the CPU, where 1 * x + 0 makes 0 of -0

    return embed


@cache
def matmul(kind: str, tokens: int) -> Any:
    """The product of a table with `tokens` tokens at a time: a row of the grid for each such group of tokens."""
    numbers = LANES * (4 if kind == "float32" else 8)  # of a block
    none, load_rows = float_zeros(ROWS * tokens), load_within(ROWS)
    multiply, multiply_edge = multiply_rows(kind, ROWS, tokens), multiply_rows(kind, ROWS, tokens, edge=True)

    def leave_one(i, sums, out, row, token, rows, present):
        total = half_warp_sum(sums[0])
        here, of = row + i // tokens, token + i % tokens
        if this_thread() % LANES == 0 and here < rows and of < present:
            out[of * rows + here] = total

    leave = for_each(leave_one, [(i,) for i in range(ROWS * tokens)])

    @kernel
    def matmul(words, x, row_words, width, rows, present, out):  # [N * row_words], [R * M] -> [R * N]
        let_next_begin()
        lane, half = this_thread() % LANES, this_thread() // LANES
        row = (cuda.blockIdx.x * (cuda.blockDim.x // LANES) + half) * ROWS
        token = cuda.blockIdx.y * tokens
        place, last = row * row_words + lane * 4, (rows - 1) * row_words + lane * 4
        mine, last_mine = token * width + lane, (present - 1) * width + lane
        sums = none()
        four = load_rows(words, place, row_words, last)
        await_previous()
        for block in range(width // numbers):
            far = min((block + 1) * _BLOCK_WORDS, row_words - _BLOCK_WORDS)
            following = load_rows(words, place + far, row_words, last + far)
            sums = multiply(sums, four, x, mine, width, last_mine, block * numbers, numbers)
            four = following
        left = width % numbers
        if left > 0:
            sums = multiply_edge(sums, four, x, mine, width, last_mine, width - left, left - lane)
        leave(sums, (out, row, token, rows, present))

    return matmul
