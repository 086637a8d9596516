"""Kernels that take rows one by one, or numbers one by one. Bodies follow kernels/rows.py, whose order is the contract's.

One block owns a row. Its threads bring a piece of it to shared memory; 16 of them are the lanes that sum.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from ..masks import visible_keys
from ..scalar import gelu_tanh as _gelu_tanh_of
from ..scalar import normal_cdf, round_half_even
from ..scalar import silu as _silu_of
from ..simd import LANES
from .target import PIECE, instructions, kernel

bits_float, device, float_bits, fma, fma64, half_bits, plus, times = (
    instructions.bits_float,
    instructions.device,
    instructions.float_bits,
    instructions.fma,
    instructions.fma64,
    instructions.half_bits,
    instructions.plus,
    instructions.times,
)

_f = np.float32
_ONE = np.float64(1.0)
SOURCES = ("row", "sum", "relu2", "silu")  # of what `rms_norm` norms


# --- sums over a row ------------------------------------------------------------------------------------------------------------------


@device
def fold_lanes(sums, first):
    """The sum of 16 lanes by halving, the first of them at `first`; they are used up."""
    for half in (8, 4, 2, 1):
        for i in range(half):
            sums[first + i] = sums[first + i] + sums[first + i + half]
    return sums[first]


@device
def _squares(numbers, n, lane, total):
    """total + the squares of one lane's numbers. Eight are read before the first is needed: only the sums wait for each other."""
    whole = n - n % (8 * LANES)
    for start in range(0, whole, 8 * LANES):
        for step in range(8):
            value = np.float64(numbers[start + step * LANES + lane])
            total = fma64(value, value, total)
    for i in range(whole + lane, n, LANES):
        value = np.float64(numbers[i])
        total = fma64(value, value, total)
    return total


@device
def _factor(total, width, eps):
    """1 / root of the mean of squares, NaN where that left float32's range."""
    mean = _f(total / np.float64(width))
    factor = _f(_f(1.0) / _f(math.sqrt(_f(mean + eps))))
    return _f(np.nan) if mean == np.inf else factor


@device
def _write_codes(row, width, largest, words, row_words, bytes_, r):
    """A row as int8 codes, zeros up to the next 128, and their sum: [R, row_words] words. Returns the scale."""
    absmax = bits_float(largest)
    s = _f(127.0) / (absmax if absmax > _f(1e-5) else _f(1e-5))
    total = np.int32(0)
    for i in range(cuda.threadIdx.x, 4 * (row_words - 4), cuda.blockDim.x):
        code = np.int32(0)
        if i < width and largest < 0x7F800000:
            code = np.int32(round_half_even(times(row[i], s)))
        bytes_[r * 4 * row_words + i] = np.int8(code)
        total = np.int32(total + code)
    cuda.atomic.add(words, r * row_words + row_words - 4, total)  # of integers: the order is free
    return s if largest < 0x7F800000 else _f(np.nan)


@device
def _magnitude(x):
    """|x| as bits: these order like the numbers, and NaN above all of them."""
    return np.int32(float_bits(x) & np.int32(0x7FFFFFFF))


# --- norms and the quantiser ----------------------------------------------------------------------------------------------------------


@kernel
def quantize(x, row_words, words, bytes_, scale):  # [R, M] -> [at least R * row_words] int32, the same as int8, [R]
    r, width = cuda.blockIdx.x, x.shape[1]
    largest = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        largest[0] = 0
        words[r * row_words + row_words - 4] = 0
    cuda.syncthreads()
    mine = np.int32(0)
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        mine = max(mine, _magnitude(x[r, i]))
    cuda.atomic.max(largest, 0, mine)
    cuda.syncthreads()
    s = _write_codes(x[r], width, largest[0], words, row_words, bytes_, r)
    if cuda.threadIdx.x == 0:
        scale[r] = s


@device
def _relu2_gate(gate, up):
    positive = _f(0.0) if gate < _f(0.0) else gate  # NaN stays NaN
    return times(times(positive, positive), up)


@device
def _silu_gate(gate, up):
    return times(_silu_of(gate), up)


@device
def _worked_out(source, a, b):
    """A number of the row: there, or a result of the operation before. The source is a constant where this is compiled."""
    if source == "sum":
        return plus(a, b)
    if source == "relu2":
        return _relu2_gate(a, b)
    if source == "silu":
        return _silu_gate(a, b)
    return a


@cache
def rms_norm(source: str) -> Any:
    """The norm of what `source` says: of the "row" a, or of the "sum", "relu2" or "silu" of a and b, which is left in `made`."""
    is_there = source == "row"

    def rms_norm(a, b, made, gain, eps, out, row_words, words, bytes_, scale):  # [R, M] x 3, [M]
        """The norm, and its result quantised: in a ternary model that comes next, and the row is at hand."""
        r, t, width = cuda.blockIdx.x, cuda.threadIdx.x, a.shape[1]
        piece = cuda.shared.array(PIECE, np.float32)
        lanes = cuda.shared.array(LANES, np.float64)
        factor = cuda.shared.array(1, np.float32)
        largest = cuda.shared.array(1, np.int32)
        total, whole = np.float64(0.0), width <= PIECE
        for start in range(0, width, PIECE):
            n = min(PIECE, width - start)
            for i in range(t, n, cuda.blockDim.x):
                value = _worked_out(source, a[r, start + i], b[r, start + i])
                if not is_there:
                    made[r, start + i] = value
                piece[i] = value
            cuda.syncthreads()
            if t < LANES:
                total = _squares(piece, n, t, total)
            cuda.syncthreads()
        if t < LANES:
            lanes[t] = total
        cuda.syncthreads()
        if t == 0:
            fold_lanes(lanes, 0)
            factor[0] = _factor(lanes[0], width, eps)
            largest[0] = 0
            words[r * row_words + row_words - 4] = 0
        cuda.syncthreads()
        mine = np.int32(0)
        for i in range(t, width, cuda.blockDim.x):
            value = piece[i] if whole else made[r, i]
            value = times(times(value, factor[0]), gain[i])
            if whole:
                piece[i] = value
            out[r, i] = value
            mine = max(mine, _magnitude(value))
        cuda.atomic.max(largest, 0, mine)
        cuda.syncthreads()
        if whole:
            s = _write_codes(piece, width, largest[0], words, row_words, bytes_, r)
        else:
            s = _write_codes(out[r], width, largest[0], words, row_words, bytes_, r)
        if t == 0:
            scale[r] = s

    rms_norm.__name__ = rms_norm.__qualname__ = f"rms_norm_{source}"  # in profiles
    return kernel(rms_norm)


@kernel
def layer_norm(x, gain, bias, eps, out):
    r, t, width = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    piece = cuda.shared.array(PIECE, np.float32)
    lanes = cuda.shared.array(LANES, np.float64)
    factor = cuda.shared.array(1, np.float32)
    mean = np.float64(0.0)
    for squares in range(2):  # first the sum of the row, then that of the squares of what is left of it
        total = np.float64(0.0)
        for start in range(0, width, PIECE):
            n = min(PIECE, width - start)
            for i in range(t, n, cuda.blockDim.x):
                piece[i] = _f(np.float64(x[r, start + i]) - mean) if squares else x[r, start + i]
            cuda.syncthreads()
            if t < LANES:
                for i in range(t, n, LANES):
                    value = np.float64(piece[i])
                    total = fma64(value, value if squares else _ONE, total)
            cuda.syncthreads()
        if t < LANES:
            lanes[t] = total
        cuda.syncthreads()
        if t == 0:
            fold_lanes(lanes, 0)
            if squares:
                factor[0] = _factor(lanes[0], width, eps)
        cuda.syncthreads()
        if not squares:
            mean = lanes[0] / np.float64(width)
        cuda.syncthreads()
    for i in range(t, width, cuda.blockDim.x):
        centred = _f(np.float64(x[r, i]) - mean)
        out[r, i] = plus(times(times(centred, factor[0]), gain[i]), bias[i])


# --- numbers one by one ---------------------------------------------------------------------------------------------------------------


@kernel
def add(a, b, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = plus(a[i], b[i])


@kernel
def add_bias(x, bias, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = plus(x[i], bias[i % bias.size])


@kernel
def scaled(x, factor, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = times(x[i], factor)


@kernel
def relu2_gate(gate, up, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = _relu2_gate(gate[i], up[i])


@kernel
def silu_gate(gate, up, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = _silu_gate(gate[i], up[i])


@kernel
def gelu(x, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = times(x[i], normal_cdf(x[i]))


@kernel
def gelu_tanh(x, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = _gelu_tanh_of(x[i])


@kernel
def take(x, rows, out):  # [R, D], [B] -> [B, D]
    width = x.shape[1]
    for i in range(cuda.grid(1), rows.size * width, cuda.gridsize(1)):
        out[i // width, i % width] = x[rows[i // width], i % width]


@kernel
def fill(out, value):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = value


@kernel
def spread(x, slot, position, out):  # [R, G * K], [R], [R] -> [B, S, G * K]
    width = x.shape[1]
    for i in range(cuda.grid(1), x.shape[0] * width, cuda.gridsize(1)):
        r = i // width
        out[slot[r], position[r], i % width] = x[r, i % width]


@device
def rotated(x, cos, sin, pairs, distance, step, r, h, i):
    """Number i of a head after RoPE. Pair j is (step j, step j + distance): step 1 and distance J for halves, 2 and 1 for adjacent ones."""
    if i >= 2 * pairs:
        return x[r, h, i]
    is_second = i >= pairs if step == 1 else i % 2 == 1
    j = (i - distance if is_second else i) >> step - 1  # divided by step
    a, b, c, s = x[r, h, step * j], x[r, h, step * j + distance], cos[r, j], sin[r, j]
    return fma(a, s, times(b, c)) if is_second else fma(a, c, -times(b, s))


@kernel
def rope(x, cos, sin, pairs, distance, step, out):  # [R, H, K], [R, J] x 2 -> [R, H, K]
    heads, width = x.shape[1], x.shape[2]
    for item in range(cuda.grid(1), x.shape[0] * heads * width, cuda.gridsize(1)):
        r, h, i = item // (heads * width), item // width % heads, item % width
        out[r, h, i] = rotated(x, cos, sin, pairs, distance, step, r, h, i)


def as_kept(halves: bool) -> Any:
    """What a cache has for a number: itself, or its bits as float16."""
    return half_bits if halves else np.float32


@cache
def keep(halves: bool) -> Any:
    """Keys, rotated, and values to their places; as bits of float16 where those are asked for."""

    kept = as_kept(halves)

    @kernel
    def keep(k, v, cos, sin, pairs, distance, step, slot, position, k_out, v_out):
        # [R, G, K] x 2, [R, J] x 2, ..., [R] x 2 -> [B, S, G, K] x 2
        heads, width, places = k.shape[1], k.shape[2], k_out.shape[1]
        for item in range(cuda.grid(1), k.shape[0] * heads * width, cuda.gridsize(1)):
            r, h, i = item // (heads * width), item // width % heads, item % width
            place = position[r] % places
            k_out[slot[r], place, h, i] = kept(rotated(k, cos, sin, pairs, distance, step, r, h, i))
            v_out[slot[r], place, h, i] = kept(v[r, h, i])

    return keep


@kernel
def erase(out, slot, start, end):  # [L, B, S, G * K]
    layers, places, width = out.shape[0], out.shape[2], out.shape[3]
    for i in range(cuda.grid(1), layers * (end - start) * width, cuda.gridsize(1)):
        row = i // width
        out[row // (end - start), slot, (start + row % (end - start)) % places, i % width] = 0


@kernel
def carry(source, slot, out, target, start, end):  # [L, B, S, G * K] -> [L, B', S', G * K]
    """Positions start..end of one slot to the same positions of another, which may be of another cache."""
    layers, width = out.shape[0], out.shape[3]
    for i in range(cuda.grid(1), layers * (end - start) * width, cuda.gridsize(1)):
        layer, position = i // width // (end - start), start + i // width % (end - start)
        out[layer, target, position % out.shape[2], i % width] = source[layer, slot, position % source.shape[2], i % width]


@kernel
def take_rotations(all_cos, all_sin, position, cos, sin):  # [P, J] x 2, [R] -> [R, J] x 2
    pairs = cos.shape[1]
    for i in range(cuda.grid(1), position.size * pairs, cuda.gridsize(1)):
        r, j = i // pairs, i % pairs
        cos[r, j], sin[r, j] = all_cos[position[r], j], all_sin[position[r], j]


@kernel
def advance(position, last):  # [B]
    """The next positions, up to the last one there is."""
    i = cuda.grid(1)
    if i < position.size:
        position[i] = min(position[i] + 1, last)


# --- masks ----------------------------------------------------------------------------------------------------------------------------


@kernel
def fill_mask(first, queries, past, keys, window, prefix, block, sinks, seen, hidden, out):  # [B] x 3 -> [B, Q, K]
    rows, columns = out.shape[1], out.shape[2]
    for row in range(cuda.blockIdx.x, out.shape[0] * rows, cuda.gridDim.x):
        b, r = row // rows, row % rows
        a, low, high = 0, 0, 0
        if first + r < queries[b]:
            a, low, high = visible_keys(past[b] + first + r, window, prefix, block, sinks)
        a = min(a, keys[b])  # a prefix may be longer than the sequence; nothing else reaches past its keys
        for i in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            out[b, r, i] = seen if i < a or (low <= i and i < high) else hidden
