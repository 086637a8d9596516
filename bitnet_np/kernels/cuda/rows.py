"""Kernels that take rows or single numbers one by one. They follow kernels/rows.py, whose order is the contract's.

One block owns a row. Its threads, at least WIDE_LANES of them, bring a piece of it to shared memory; WIDE_LANES are the lanes that sum.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ..masks import visible_keys
from ..scalar import WIDE_LANES, normal_cdf, round_half_even
from ..scalar import gelu_tanh as _gelu_tanh_of
from ..scalar import silu as _silu_of
from ..scalar import soft_cap as _soft_cap_of
from .ptx import bits_float, float_bits, fma, fma64, get, half_bits, in_turn, plus, put, this_thread, times, warp_max, warp_sum
from .target import AHEAD, PIECE, WARP, device, inlined, kernel

_f = np.float32
_ONE = np.float64(1.0)
_LEAST = np.int32(-(2**31))
LARGEST, SUM = 0, 1  # places of the results that the threads of a row compute together
_AT_ONCE = AHEAD * WIDE_LANES
GATES = ("relu2", "silu")
SOURCES = ("row", "sum", *GATES)  # the origins of a norm's row: `worked_out`


# --- sums over a row ------------------------------------------------------------------------------------------------------------------


def padded(n: int) -> int:
    """n rounded up to a multiple of the numbers that `add_products` takes at a time."""
    return (n + _AT_ONCE - 1) // _AT_ONCE * _AT_ONCE


_padded = device(padded)


@device
def clear_lanes(lanes):
    if this_thread() < WIDE_LANES:
        put(lanes, this_thread(), 0.0)


@device
def add_products(piece, n, squared, lanes):
    """Adds n numbers, or their squares, to the lanes. Zeros must follow them up to `padded(n)`; they change no sum.

    A thread has one lane to itself, from `clear_lanes` on. AHEAD numbers are read before the first of them is needed.
    """
    lane = this_thread()
    if lane < WIDE_LANES:
        total = get(lanes, lane)
        for start in range(0, n, _AT_ONCE):
            for step in range(AHEAD):
                value = np.float64(get(piece, start + step * WIDE_LANES + lane))
                total = fma64(value, value if squared else _ONE, total)
        put(lanes, lane, total)


@device
def _fold_eight(lanes, first, step):
    """The sum by halving of eight lanes that are `step` apart."""
    a = get(lanes, first) + get(lanes, first + 4 * step)
    b = get(lanes, first + step) + get(lanes, first + 5 * step)
    c = get(lanes, first + 2 * step) + get(lanes, first + 6 * step)
    d = get(lanes, first + 3 * step) + get(lanes, first + 7 * step)
    return (a + c) + (b + d)


@device
def fold_wide_lanes(lanes):
    """The sum of WIDE_LANES lanes by halving, for thread 0; 0 for other threads. The lanes are overwritten. A barrier comes before.

    Thread i of 16 adds the lanes that are i modulo 16 (i with i + 64, i + 32, i + 16); the first adds their sums (8, 4, 2, then 1).
    """
    if this_thread() < 16:
        put(lanes, this_thread(), _fold_eight(lanes, this_thread(), 16))
    cuda.syncthreads()
    return _fold_eight(lanes, 0, 2) + _fold_eight(lanes, 1, 2) if this_thread() == 0 else 0.0


@device
def factor_of(total, width, eps):
    """1 / sqrt(mean of squares + eps); NaN if the mean is beyond float32's range."""
    mean = _f(total / np.float64(width))
    factor = _f(_f(1.0) / _f(math.sqrt(_f(mean + eps))))
    return _f(np.nan) if mean == np.inf else factor


# --- the quantiser --------------------------------------------------------------------------------------------------------------------


@device
def magnitude(x):
    """The bits of |x|, which order like the numbers; NaN comes above all of them."""
    return np.int32(float_bits(x) & np.int32(0x7FFFFFFF))


@device
def of_block(value, together, place):
    """The LARGEST or the SUM of the values of all threads, for all of them: integers, whose order is free. together[place] is 0 before."""
    value = warp_sum(value) if place == SUM else warp_max(value)
    if this_thread() % WARP == 0:
        if place == SUM:
            cuda.atomic.add(together, SUM, value)
        else:
            cuda.atomic.max(together, LARGEST, value)
    cuda.syncthreads()
    return together[place]


@device
def clear_together(together):
    """Clears `together`. One thread calls it, with a barrier before all threads call `of_block`."""
    together[LARGEST], together[SUM] = 0, 0


@device
def scale_of(largest):
    """Codes per unit of a row, from the bits of its largest magnitude; NaN if that is infinity or NaN."""
    absmax = bits_float(largest)
    s = _f(127.0) / (absmax if absmax > _f(1e-5) else _f(1e-5))
    return s if largest < 0x7F800000 else _f(np.nan)


@device
def code_of(x, s):
    """The int8 code of a number; zero if the scale is NaN."""
    return np.int32(round_half_even(times(x, s))) if s == s else np.int32(0)


@device
def with_code(word, j, code):
    """A word with a code in byte j, which was zero."""
    return np.uint32(word | np.uint32(np.uint32(code & 0xFF) << np.uint32(8 * j)))


@kernel
def quantize(x, row_words, words, scale):  # [R, M] -> [at least R * row_words] uint32, [R]
    """int8 codes of rows, zeros up to the next multiple of 128, their sum, and their scale."""
    in_turn()
    r, t, width, first = cuda.blockIdx.x, this_thread(), x.shape[1], cuda.blockIdx.x * row_words
    together = cuda.shared.array(2, np.int32)
    if t == 0:
        clear_together(together)
    cuda.syncthreads()
    largest, total = np.int32(0), np.int32(0)
    for i in range(t, width, cuda.blockDim.x):
        largest = max(largest, magnitude(x[r, i]))
    s = scale_of(of_block(largest, together, LARGEST))
    for at in range(t, row_words - 4, cuda.blockDim.x):
        word = np.uint32(0)
        for j in range(4):
            if 4 * at + j < width:
                code = code_of(x[r, 4 * at + j], s)
                total, word = np.int32(total + code), with_code(word, j, code)
        words[first + at] = word
    total = of_block(total, together, SUM)
    if t == 0:
        words[first + row_words - 4], scale[r] = np.uint32(total), s


# --- norms ----------------------------------------------------------------------------------------------------------------------------


@device
def _relu2_gate(gate, up):
    positive = _f(0.0) if gate < _f(0.0) else gate  # NaN stays NaN
    return times(times(positive, positive), up)


@device
def _silu_gate(gate, up):
    return times(_silu_of(gate), up)


@inlined
def worked_out(source, a, b):
    """A number of a row: a itself ("row"), or the result of an operation on a and b. The source is a constant where this is compiled."""
    if source == "sum":
        return plus(a, b)
    if source == "relu2":
        return _relu2_gate(a, b)
    if source == "silu":
        return _silu_gate(a, b)
    return a


@inlined
def bring(source, a, b, r, start, n, piece):
    """Brings numbers start..start + n of row r of the `source` to `piece`, and zeros after them for `add_products`.

    Thread t has numbers t, t + the block's size and so on, here and later: only the sums need numbers of other threads.
    """
    for i in range(this_thread(), _padded(n), cuda.blockDim.x):
        piece[i] = worked_out(source, a[r, start + i], b[r, start + i]) if i < n else _f(0.0)


@cache
def rms_norm(source: str) -> Any:
    """The norm of the row of a `source`: of a itself ("row"), or of the "sum", "relu2" or "silu" of a and b, which is left in `made`."""
    is_there = source == "row"

    def rms_norm(a, b, made, gain, eps, out):  # [R, M] x 3, [M], ..., [R, M]
        in_turn()
        r, t, width = cuda.blockIdx.x, this_thread(), a.shape[1]
        piece = cuda.shared.array(PIECE, np.float32)
        lanes = cuda.shared.array(WIDE_LANES, np.float64)
        factor = cuda.shared.array(1, np.float32)
        clear_lanes(lanes)
        for start in range(0, width, PIECE):
            n = min(PIECE, width - start)
            bring(source, a, b, r, start, n, piece)
            if not is_there:
                for i in range(t, n, cuda.blockDim.x):
                    made[r, start + i] = piece[i]
            cuda.syncthreads()
            add_products(piece, n, True, lanes)
            cuda.syncthreads()
        total = fold_wide_lanes(lanes)
        if t == 0:
            factor[0] = factor_of(total, width, eps)
        cuda.syncthreads()
        for i in range(t, width, cuda.blockDim.x):
            out[r, i] = times(times(made[r, i], factor[0]), gain[i])

    rms_norm.__name__ = rms_norm.__qualname__ = f"rms_norm_{source}"  # in profiles
    return kernel(rms_norm)


@kernel
def layer_norm(x, gain, bias, eps, out):  # [R, M], [M] x 2, ..., [R, M]
    in_turn()
    r, t, width = cuda.blockIdx.x, this_thread(), x.shape[1]
    piece = cuda.shared.array(PIECE, np.float32)
    lanes = cuda.shared.array(WIDE_LANES, np.float64)
    total_of_row = cuda.shared.array(1, np.float64)
    mean = np.float64(0.0)
    for squared in range(2):  # first the sum of the row, then the sum of squares of the row less its mean
        clear_lanes(lanes)
        for start in range(0, width, PIECE):
            n = min(PIECE, width - start)
            bring("row", x, x, r, start, n, piece)
            if squared:
                for i in range(t, n, cuda.blockDim.x):
                    piece[i] = _f(np.float64(piece[i]) - mean)
            cuda.syncthreads()
            add_products(piece, n, squared, lanes)
            cuda.syncthreads()
        total = fold_wide_lanes(lanes)
        if t == 0:
            total_of_row[0] = total
        cuda.syncthreads()
        if not squared:
            mean = total_of_row[0] / np.float64(width)
    factor = factor_of(total_of_row[0], width, eps)
    for i in range(t, width, cuda.blockDim.x):
        centred = _f(np.float64(x[r, i]) - mean)
        out[r, i] = plus(times(times(centred, factor), gain[i]), bias[i])


# --- numbers one by one ---------------------------------------------------------------------------------------------------------------


def _of_one(name: str, rule: Any) -> Any:
    """A kernel (x, out): out[i] = rule(x[i])."""

    def of_one(x, out):
        in_turn()
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = rule(x[i])

    of_one.__name__ = of_one.__qualname__ = name  # in profiles
    return kernel(of_one)


def _of_two(name: str, rule: Any) -> Any:
    """A kernel (a, b, out): out[i] = rule(a[i], b[i])."""

    def of_two(a, b, out):
        in_turn()
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = rule(a[i], b[i])

    of_two.__name__ = of_two.__qualname__ = name  # in profiles
    return kernel(of_two)


@device
def _gelu_of(x):
    return times(x, normal_cdf(x))


@device
def _gelu_gate(gate, up):
    return times(_gelu_tanh_of(gate), up)


add, relu2_gate, silu_gate = _of_two("add", plus), _of_two("relu2_gate", _relu2_gate), _of_two("silu_gate", _silu_gate)
gelu, gelu_tanh, gelu_gate = _of_one("gelu", _gelu_of), _of_one("gelu_tanh", _gelu_tanh_of), _of_two("gelu_gate", _gelu_gate)


@kernel
def add_bias(x, bias, out):
    in_turn()
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = plus(x[i], bias[i % bias.size])


@kernel
def scaled(x, factor, out):
    in_turn()
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = times(x[i], factor)


@kernel
def soft_cap(x, cap, out):
    in_turn()
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = _soft_cap_of(x[i], cap)


@device
def _ordered(x):
    """An integer for each number, in the same order; 0 and -0 have the same."""
    bits = np.int32(float_bits(plus(x, _f(0.0))))
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@kernel
def largest(x, out):  # [R, M] -> [R]
    """The place of the largest number of each row, the first of equal ones; -1 in a row with a number that is not finite.

    A thread looks at AHEAD numbers before it compares the first, past the end at the last one again.
    """
    in_turn()
    r, t, width, threads = cuda.blockIdx.x, this_thread(), x.shape[1], cuda.blockDim.x
    shared = cuda.shared.array(3, np.int32)  # of all threads: the largest number, its first place times -1, the largest magnitude
    if t == 0:
        shared[0], shared[1], shared[2] = _LEAST, _LEAST, 0
    cuda.syncthreads()
    best, place, most = _LEAST, np.int32(0), np.int32(0)
    for start in range(t, width, AHEAD * threads):
        for step in range(AHEAD):
            at = min(start + step * threads, width - 1)
            number = _ordered(x[r, at])
            most = max(most, magnitude(x[r, at]))
            if number > best:
                best, place = number, np.int32(at)
    best_of_warp, most_of_warp = warp_max(best), warp_max(most)
    if t % WARP == 0:
        cuda.atomic.max(shared, 0, best_of_warp)
        cuda.atomic.max(shared, 2, most_of_warp)
    cuda.syncthreads()
    first = warp_max(-place if best == shared[0] else _LEAST)
    if t % WARP == 0:
        cuda.atomic.max(shared, 1, first)
    cuda.syncthreads()
    if t == 0:
        out[r] = -shared[1] if shared[2] < 0x7F800000 else -1


@kernel
def take(x, rows, out):  # [R, D], [B] -> [B, D]
    in_turn()
    width = x.shape[1]
    for i in range(cuda.grid(1), rows.size * width, cuda.gridsize(1)):
        out[i // width, i % width] = x[rows[i // width], i % width]


@kernel
def fill(out, value):
    in_turn()
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = value


@kernel
def spread(x, slot, position, out):  # [R, G * K], [R], [R] -> [B, S, G * K]
    in_turn()
    width = x.shape[1]
    for i in range(cuda.grid(1), x.shape[0] * width, cuda.gridsize(1)):
        r = i // width
        out[slot[r], position[r], i % width] = x[r, i % width]


class Heads(NamedTuple):
    """Queries or keys that RoPE rotates where they are read.

    Pair j is numbers step * j and step * j + distance of a head: step 1 and distance J for halves, step 2 and distance 1 for adjacent ones.
    """

    x: Any  # [R, H, K]
    cos: Any  # [R, J]
    sin: Any  # [R, J]
    pairs: Any  # J, or 0 if nothing is rotated
    distance: Any
    step: Any


@device
def rotated(heads, r, h, i):
    """Number i of head h of row r after RoPE."""
    if i >= 2 * heads.pairs:
        return heads.x[r, h, i]
    is_second = i >= heads.pairs if heads.step == 1 else i % 2 == 1
    j = (i - heads.distance if is_second else i) >> heads.step - 1  # divided by step
    a, b = heads.x[r, h, heads.step * j], heads.x[r, h, heads.step * j + heads.distance]
    c, s = heads.cos[r, j], heads.sin[r, j]
    return fma(a, s, times(b, c)) if is_second else fma(a, c, -times(b, s))


@kernel
def rope(x, cos, sin, pairs, distance, step, out):  # [R, H, K], [R, J] x 2 -> [R, H, K]
    in_turn()
    heads, width = x.shape[1], x.shape[2]
    for item in range(cuda.grid(1), x.shape[0] * heads * width, cuda.gridsize(1)):
        r, h, i = item // (heads * width), item // width % heads, item % width
        out[r, h, i] = rotated(Heads(x, cos, sin, pairs, distance, step), r, h, i)


def as_kept(halves: bool) -> Any:
    """A function from a float32 to its form in a cache: the number itself, or its bits as float16."""
    return half_bits if halves else np.float32


@cache
def keep(halves: bool) -> Any:
    """Writes rotated keys and values to their places in a cache, as float32 or as the bits of float16 (`halves`)."""

    to_kept = as_kept(halves)

    @kernel
    def keep(k, v, cos, sin, pairs, distance, step, slot, position, k_out, v_out):
        # [R, G, K] x 2, [R, J] x 2, ..., [R] x 2 -> [B, S, G, K] x 2
        in_turn()
        heads, width, places = k.shape[1], k.shape[2], k_out.shape[1]
        for item in range(cuda.grid(1), k.shape[0] * heads * width, cuda.gridsize(1)):
            r, h, i = item // (heads * width), item // width % heads, item % width
            place = position[r] % places
            k_out[slot[r], place, h, i] = to_kept(rotated(Heads(k, cos, sin, pairs, distance, step), r, h, i))
            v_out[slot[r], place, h, i] = to_kept(v[r, h, i])

    return keep


@kernel
def erase(out, slot, start, end):  # [L, B, S, G * K]
    in_turn()
    layers, places, width = out.shape[0], out.shape[2], out.shape[3]
    for i in range(cuda.grid(1), layers * (end - start) * width, cuda.gridsize(1)):
        row = i // width
        out[row // (end - start), slot, (start + row % (end - start)) % places, i % width] = 0


@kernel
def carry(source, slot, out, target, start, end):  # [L, B, S, G * K] -> [L, B', S', G * K]
    """Copies positions start..end of one slot to the same positions of another slot, which may be in another cache."""
    in_turn()
    layers, width = out.shape[0], out.shape[3]
    for i in range(cuda.grid(1), layers * (end - start) * width, cuda.gridsize(1)):
        layer, position = i // width // (end - start), start + i // width % (end - start)
        out[layer, target, position % out.shape[2], i % width] = source[layer, slot, position % source.shape[2], i % width]


@kernel
def take_rotations(all_cos, all_sin, position, cos, sin):  # [P, J] x 2, [R] -> [R, J] x 2
    in_turn()
    pairs = cos.shape[1]
    for i in range(cuda.grid(1), position.size * pairs, cuda.gridsize(1)):
        r, j = i // pairs, i % pairs
        cos[r, j], sin[r, j] = all_cos[position[r], j], all_sin[position[r], j]


@kernel
def advance(position, last, chosen, tokens):  # [B], ..., [B] x 2
    """Moves positions on by one, up to the last one there is, and makes the chosen tokens the next ones (0 where none could be chosen)."""
    in_turn()
    i = cuda.grid(1)
    if i < position.size:
        position[i] = min(position[i] + 1, last)
        tokens[i] = max(chosen[i], 0)


# --- masks ----------------------------------------------------------------------------------------------------------------------------


@kernel
def fill_mask(first, queries, past, keys, window, prefix, block, sinks, seen, hidden, out):  # [B] x 3 -> [B, Q, K]
    in_turn()
    rows, columns = out.shape[1], out.shape[2]
    for row in range(cuda.blockIdx.x, out.shape[0] * rows, cuda.gridDim.x):
        b, r = row // rows, row % rows
        a, low, high = 0, 0, 0
        if first + r < queries[b]:
            a, low, high = visible_keys(past[b] + first + r, window, prefix, block, sinks)
        a = min(a, keys[b])  # a prefix may be longer than the sequence; nothing else reaches past its keys
        for i in range(this_thread(), columns, cuda.blockDim.x):
            out[b, r, i] = seen if i < a or (low <= i and i < high) else hidden
