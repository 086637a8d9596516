"""Kernels over rows, a block of threads for each, and over single numbers, a thread for each.

They follow kernels/rows.py, whose order is the contract's.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from .. import cpu
from ..rows import OfNumbers
from ..scalar import WIDE_LANES, round_half_even
from .ptx import bits_float, float_bits, fma, fma64, half_bits, number, times
from .target import device, kernel, place, variant

THREADS = WIDE_LANES  # of a block that has a row: each is a lane of its sums in float64
_f = np.float32
_INFINITY = 0x7F800000  # the bits of it

# --- norms ----------------------------------------------------------------------------------------------------------------------------


@device
def _total(lanes, value):
    """The sum of all threads' numbers by halving, for each of them: i with i + 64, i + 32, ... i + 1."""
    thread, distance = cuda.threadIdx.x, WIDE_LANES // 2
    lanes[thread] = value
    cuda.syncthreads()
    while distance > 0:
        if thread < distance:
            lanes[thread] += lanes[thread + distance]
        cuda.syncthreads()
        distance //= 2
    total = lanes[0]
    cuda.syncthreads()  # the next sum overwrites it
    return total


@kernel
def rms_norm(x, gain, eps, out):  # [R, M], [M], ..., [R, M]
    r, width, squares = cuda.blockIdx.x, x.shape[1], np.float64(0.0)
    lanes = cuda.shared.array(WIDE_LANES, np.float64)
    for i in range(cuda.threadIdx.x, width, THREADS):
        value = np.float64(x[r, i])
        squares = fma64(value, value, squares)
    mean = _f(_total(lanes, squares) / np.float64(width))
    factor = _f(_f(1.0) / _f(math.sqrt(_f(mean + eps))))
    if mean == np.inf:  # beyond float32's range
        factor = _f(np.nan)
    for i in range(cuda.threadIdx.x, width, THREADS):
        out[r, i] = times(times(x[r, i], factor), gain[i])


@kernel
def centre(x, out):  # [R, M] -> [R, M]
    """x less its mean, which is in float64, rounded once."""
    r, width, total = cuda.blockIdx.x, x.shape[1], np.float64(0.0)
    lanes = cuda.shared.array(WIDE_LANES, np.float64)
    for i in range(cuda.threadIdx.x, width, THREADS):
        total = fma64(np.float64(x[r, i]), np.float64(1.0), total)
    mean = _total(lanes, total) / np.float64(width)
    for i in range(cuda.threadIdx.x, width, THREADS):
        out[r, i] = _f(np.float64(x[r, i]) - mean)


# --- the quantiser --------------------------------------------------------------------------------------------------------------------


@kernel
def quantize(x, words, row_sums, scale):  # [R, M] -> uint32 [R, words], int32 [R], [R]
    """int8 codes of rows, four to a word and zeros after them; their sums, and their scales: 0 and NaN of a row that is not finite."""
    r, thread, width = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    together = cuda.shared.array(2, np.int32)  # of all threads: the bits of the largest magnitude, which order like numbers; the sum
    if thread < 2:
        together[thread] = 0
    cuda.syncthreads()
    largest, total = np.int32(0), np.int32(0)
    for i in range(thread, width, THREADS):
        largest = max(largest, np.int32(float_bits(x[r, i]) & np.int32(0x7FFFFFFF)))
    cuda.atomic.max(together, 0, largest)
    cuda.syncthreads()
    finite, largest = together[0] < _INFINITY, bits_float(together[0])
    s = _f(127.0) / (largest if largest > _f(1e-5) else _f(1e-5))
    for at in range(thread, words.shape[1], THREADS):
        word = np.uint32(0)
        for j in range(4):
            if finite and 4 * at + j < width:
                code = np.int32(round_half_even(times(x[r, 4 * at + j], s)))
                total = np.int32(total + code)
                word = np.uint32(word | np.uint32(np.uint32(code & 0xFF) << np.uint32(8 * j)))
        words[r, at] = word
    cuda.atomic.add(together, 1, total)
    cuda.syncthreads()
    if thread == 0:
        row_sums[r], scale[r] = together[1], s if finite else _f(np.nan)


# --- numbers one by one ---------------------------------------------------------------------------------------------------------------


def of_one(*numbers):
    """In place of a rule: see `variant`."""


def _each(x, out):
    i = place()
    if i < out.size:
        out[i] = of_one(x[i])


def _each_pair(a, b, out):
    i = place()
    if i < out.size:
        out[i] = of_one(a[i], b[i])


def _each_with(x, number, out):
    i = place()
    if i < out.size:
        out[i] = of_one(x[i], number)


def _each_column(x, row, out):
    i = place()
    if i < out.size:
        out[i] = of_one(x[i], row[i % row.size])


_LOOPS = {loop.__name__: loop for loop in (_each, _each_pair, _each_with, _each_column)}
OF_NUMBERS = {name: variant(_LOOPS[it.loop], name, of_one=it.rule) for name, it in vars(cpu).items() if isinstance(it, OfNumbers)}
"""The kernels of the operations on single numbers, by name, for arrays of one axis. No rule adds to a product, which would be fused."""


@kernel
def take(x, rows, out):  # [R, D], [B] -> [B, D]
    i, width = place(), x.shape[1]
    if i < out.size:
        out[i // width, i % width] = x[rows[i // width], i % width]


@kernel
def fill(out, value):
    i = place()
    if i < out.size:
        out[i] = value


@kernel
def rope(x, cos, sin, distance, step, out):  # [R, H, K], [R, J] x 2 -> [R, H, K]
    """Pair j is numbers step * j and step * j + distance of a head: step 1 and distance J for halves, step 2 and 1 for adjacent ones."""
    item, heads, width, pairs = place(), x.shape[1], x.shape[2], cos.shape[1]
    if item < out.size:
        r, h, i = item // (heads * width), item // width % heads, item % width
        if i >= 2 * pairs:
            out[r, h, i] = x[r, h, i]
        else:
            is_second = i >= pairs if step == 1 else i % 2 == 1
            j = (i - distance if is_second else i) // step
            a, b, c, s = x[r, h, step * j], x[r, h, step * j + distance], cos[r, j], sin[r, j]
            out[r, h, i] = fma(a, s, times(b, c)) if is_second else fma(a, c, -times(b, s))


# --- caches and masks -----------------------------------------------------------------------------------------------------------------


@cache
def keep(float16: bool) -> Any:
    """Writes keys and values to their positions in a cache, as float32 or as the bits of float16."""
    to_kept = half_bits if float16 else number

    @kernel
    def keep(k, v, slot, position, k_out, v_out):  # [R, G, K] x 2, [R] x 2 -> [B, S, G, K] x 2
        item, heads, width = place(), k.shape[1], k.shape[2]
        if item < k.size:
            r, h, i = item // (heads * width), item // width % heads, item % width
            k_out[slot[r], position[r], h, i] = to_kept(k[r, h, i])
            v_out[slot[r], position[r], h, i] = to_kept(v[r, h, i])

    return keep


@kernel
def carry(source, slot, out, target, length):  # [L, B, S, D] -> [L, B', S', D]
    """Copies the first positions of a slot to another, which may be in another cache."""
    i, width = place(), out.shape[3]
    if i < out.shape[0] * length * width:
        layer, position = i // width // length, i // width % length
        out[layer, target, position, i % width] = source[layer, slot, position, i % width]


@kernel
def erase(cache, slot, start, end):  # [L, B, S, D]
    """Sets positions start..end of a slot to 0."""
    i, count, width = place(), end - start, cache.shape[3]
    if i < cache.shape[0] * count * width:
        cache[i // width // count, slot, start + i // width % count, i % width] = 0


@kernel
def fill_mask(past, window, prefix, block, sinks, out):  # -> [Q, K]
    """0 where masks.Pattern lets the query at position past + row see the key, else -infinity."""
    item, columns = place(), out.shape[1]
    if item < out.size:
        position, key = past + item // columns, item % columns
        low = max(0, position + 1 - window) if window else 0
        if block:
            low = max(low, position // block * block)
        seen = (low <= key and key <= position) or key < max(prefix, min(sinks, position + 1))
        out[item // columns, key] = _f(0.0) if seen else _f(-np.inf)
