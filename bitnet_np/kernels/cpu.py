"""The kernels for the CPU: arrays and scalars in, arrays out, nothing known of models. The contract is in scalar.py.

Arrays are C-contiguous; offsets given to simd.py's functions count elements from an array's start, whatever its shape.
Kernels have no bounds checks. Everything that could break them (token ids, slots, positions, shapes) is checked at the package's border.
Every output row has one owner, so threads cannot change a bit. Each kernel is a body for some rows (`_..._rows`) inside one `prange`.
"""

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numba import get_num_threads, njit, prange
from numpy.typing import NDArray

from . import simd
from .scalar import CHUNK, cos_sin, exp, normal_cdf, round_half_even, round_to_half
from .scalar import gelu_tanh as _gelu_tanh_of
from .scalar import silu as _silu_of
from .simd import (
    LANES,
    STEP,
    axpy_step,
    axpy_tail,
    dot_step,
    dot_tail,
    float_bits,
    fma,
    join_planes,
    prefetch,
    store_products,
    store_scaled,
    store_sums,
    store_tile,
    ternary_step,
    ternary_step_apart,
    tile_f32,
    tile_f64,
    tile_i32,
)
from .workspace import empty

Floats = NDArray[np.float32]

# IEEE division: Python's would raise on a zero, and test for one at every step
_serial = njit(cache=True, error_model="numpy")
_inlined = njit(cache=True, error_model="numpy", forceinline=True)  # what takes a full tile: as an argument it would go through memory


class _Kernel(NamedTuple):
    """One kernel compiled two ways, which give the same bits."""

    shared: Callable  # its `prange` shared out among threads
    alone: Callable  # all on the calling thread


def _parallel(function: Callable) -> _Kernel:
    alone = FunctionType(function.__code__, function.__globals__, function.__name__ + "_alone")
    alone.__qualname__ = alone.__name__  # by which Numba finds what it compiled on disk; it does not tell options apart
    return _Kernel(njit(cache=True, error_model="numpy", parallel=True)(function), _serial(alone))


# Accumulators that fit the registers: 16 of AVX-512's 32; else the same tile would be spilled to memory at every step.
_WIDE = simd.is_wide()
_ROWS, _TOKENS = (4, 4) if _WIDE else (2, 2)
_GROUPS = 4 if _WIDE else 1  # of 16 weight rows
_VALUE_COLUMNS = 4 if _WIDE else 2
_SPAN = _VALUE_COLUMNS * LANES
_ROW_BLOCK = 32  # weight rows that one step of a parallel loop owns: a tile's activations stay in cache while these pass
_NO_WINDOW = 1 << 62
_AHEAD = 12  # keys that are asked for ahead of time
_STREAM = 1 << 13  # bytes that a single stream of weights is asked for ahead: the processor's own foresight ends with each page of 4 KB
_QUERIES = 32  # that share one reading of the keys and values they see
_LONG = 256  # keys, from which on a row's are shared out when threads have fewer than two heads each
_UNSEEN = np.float32(-1.0)  # marks a query that sees no key of a chunk, where a weight cannot be negative
_SMALL = 1 << 15  # elementary steps below which waking other threads costs more than it saves


_turn = threading.Lock()


def _launch(kernel: _Kernel, work: int, *args: Any) -> None:
    """Run a kernel, on this thread alone when there is little to do: asking for fewer threads takes longer than a small kernel.

    Shared ones go one at a time, whichever Python thread calls: two at once would share the cores anyway, and abort the process where Numba
    has nothing but its workqueue to run threads with.
    """
    if work <= _SMALL:
        kernel.alone(*args)
    else:
        with _turn:
            kernel.shared(*args)


def _weights(array: NDArray) -> NDArray:
    """An array of weights as the kernels take them: read-only, because Numba compiles anew for writable ones.

    Numba has no float16 on the CPU: it gets the bits as int16, which tells them from bfloat16's uint16.
    """
    if array.dtype == np.float16:
        array = array.view(np.int16)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


@_inlined
def _dot_tile(zeros, w, w_start, w_stride, w_valid, x, x_start, x_stride, x_valid, count, rows=1, ahead=0):
    """Dot products of some rows of w with some rows of x over `count` elements, unfinished: 16 lanes each.

    With `ahead`, ask for the elements of w that many places on, for each of `rows`: of several streams at once processors lose track.
    """
    tile = zeros
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        if ahead:
            for row in range(rows):
                prefetch(w, w_start + row * w_stride + i + ahead)
        tile = dot_step(tile, w, w_start + i, w_stride, w_valid, x, x_start + i, x_stride, x_valid, LANES)
    if whole < count:
        tile = dot_tail(tile, w, w_start + whole, w_stride, w_valid, x, x_start + whole, x_stride, x_valid, count - whole)
    return tile


def mark(event: str, count: int = 1) -> None:
    """Told of each "forward", of each "layer", and of the positions of each "kv_write". Nothing is done about it: metrics.py counts."""


# --- checks of weights ----------------------------------------------------------------------------------------------------------------


_PARTS = 64  # of an array that is checked, each by one owner


def _words(array: NDArray) -> NDArray[np.uint64]:
    """The bytes of an array eight at a time, the last ones filled up with zeros: words keep LLVM's loops in vector registers."""
    data = array.reshape(-1).view(np.uint8)
    if data.size % 8:
        data = np.concatenate([data, np.zeros(-data.size % 8, np.uint8)])
    return _weights(data.view(np.uint64))


@_parallel
def _code_three(words, found):
    for part in prange(found.size):
        both = np.uint64(0)
        mine = words[part * words.size // found.size : (part + 1) * words.size // found.size]
        for i in range(mine.size):  # from 0: Numba must allow for negative indices otherwise, and LLVM then stays scalar
            both |= mine[i] & (mine[i] >> np.uint64(1))
        found[part] = both & np.uint64(0x5555555555555555)


def has_code_three(codes: NDArray[np.uint8]) -> bool:
    """Whether any two-bit code is 3, which no writer of I2_S produces (bitnet.cpp would count it as +2)."""
    found = np.zeros(_PARTS, np.uint64)
    _launch(_code_three, codes.size, _words(codes), found)
    return bool(found.any())


@_parallel
def _all_ones(words, exponent, one, found):
    for part in prange(found.size):
        carried = np.uint64(0)
        mine = words[part * words.size // found.size : (part + 1) * words.size // found.size]
        for i in range(mine.size):  # from 0: Numba must allow for negative indices otherwise, and LLVM then stays scalar
            carried |= (mine[i] & exponent) + one
        found[part] = carried & ~exponent


# dtype -> the bits of its exponent in each number of a word, and the lowest of them; added, an exponent of ones runs over
_EXPONENTS = {
    np.dtype(np.float32): (0x7F8000007F800000, 0x0080000000800000),
    np.dtype(np.float16): (0x7C007C007C007C00, 0x0400040004000400),
    np.dtype(np.uint16): (0x7F807F807F807F80, 0x0080008000800080),
}


def has_non_finite(table: NDArray) -> bool:
    """Whether a float32 or float16 array, or one of bfloat16 bits (uint16), has NaN or infinity: an exponent of ones only."""
    found = np.zeros(_PARTS, np.uint64)
    exponent, one = (np.uint64(bits) for bits in _EXPONENTS[table.dtype])
    _launch(_all_ones, table.size, _words(table), exponent, one, found)
    return bool(found.any())


# --- embedding ------------------------------------------------------------------------------------------------------------------------


@_serial
def _widen_row(row, out):
    """A row of float32, float16 or bfloat16 bits as float32. 1 * x + 0 is x, but for the sign of a zero."""
    one = np.ones(1, np.float32)
    width = out.size
    for i in range(0, width - width % LANES, LANES):
        store_tile(axpy_step(tile_f32(1, 1), one, 0, 0, 1, row, i, LANES), out, i, LANES)
    if width % LANES:
        rest = np.empty(LANES, np.float32)
        start = width - width % LANES
        store_tile(axpy_tail(tile_f32(1, 1), one, 0, 0, 1, row, start, width - start), rest, 0, LANES)
        for i in range(start, width):
            out[i] = rest[i - start]


@_parallel
def _embed(table, tokens, out):
    for r in prange(tokens.size):
        _widen_row(table[tokens[r]], out[r])


def embed(table: NDArray, tokens: NDArray[np.int64]) -> Floats:  # [V, D], [R] -> [R, D]
    out = empty((tokens.size, table.shape[1]))
    _launch(_embed, out.size, _weights(table), tokens, out)
    return out


# --- norms ----------------------------------------------------------------------------------------------------------------------------


@_serial
def _sum_of_squares(x, sums):
    """sum x[i]^2 in 16 lanes of float64."""
    store_sums(_dot_tile(tile_f64(1, 1), x, 0, 0, 1, x, 0, 0, 1, x.size), sums)
    return sums[0]


@_parallel
def _rms_norm(x, gain, eps, out):
    for r in prange(x.shape[0]):
        row = x[r]
        mean = np.float32(_sum_of_squares(row, np.empty(LANES, np.float64)) / row.size)
        factor = np.float32(1.0) / np.sqrt(mean + eps)
        if mean == np.inf:  # the squares left float32's range: say so, instead of giving zeros
            factor = np.float32(np.nan)
        for i in range(row.size):
            out[r, i] = np.float32(row[i] * factor) * gain[i]


def rms_norm(x: Floats, gain: Floats, eps: float) -> Floats:  # [R, D], [D] -> [R, D]
    """x / sqrt(mean(x^2) + eps) * gain: the mean from float64, then ggml's steps in float32: 1 / root, times x, times gain."""
    out = empty(x.shape)
    _launch(_rms_norm, x.size, x, _weights(gain), np.float32(eps), out)
    return out


# --- ternary matmul -------------------------------------------------------------------------------------------------------------------


@_parallel
def _quantize(x, codes, scale):
    for r in prange(x.shape[0]):
        row = x[r]
        largest = np.int32(0)  # of |x|, as bits: these order like the numbers, and NaN above all of them
        for i in range(row.size):
            largest = max(largest, np.int32(float_bits(row[i]) & 0x7FFFFFFF))
        if largest >= 0x7F800000:
            scale[r] = np.nan
            for i in range(row.size):
                codes[r, i] = 0
        else:
            absmax = simd.bits_float(largest)
            s = np.float32(127.0) / max(absmax, np.float32(1e-5))
            scale[r] = s
            for i in range(row.size):
                codes[r, i] = np.int8(round_half_even(np.float32(row[i] * s)))


def quantize(x: Floats) -> tuple[NDArray[np.int8], Floats]:  # [R, M] -> [R, M] int8, [R] steps per unit
    """One scale per row, 127 / max(1e-5, absmax): the b1.58 papers' per-token absmax quantiser."""
    codes, scale = empty(x.shape, np.int8), empty(x.shape[:1])
    _launch(_quantize, x.size, x, codes, scale)
    return codes, scale


@_serial
def _row_sums(q, sums):
    for r in range(q.shape[0]):
        row, total = q[r], np.int32(0)
        for i in range(row.size):
            total = np.int32(total + row[i])
        sums[r] = total


@_inlined
def _store_ternary(tile, groups, tokens, first, token, sums, scale, factor, edge, out, start, width):
    """A finished tile to its place in the matrix [tokens, width] at `start`, by way of `edge` where it does not lie wholly inside."""
    column = first * LANES
    columns, rows = min(groups * LANES, width - column), min(tokens, scale.size - _TOKENS - token)
    if columns == groups * LANES and rows == tokens:
        store_scaled(tile, sums, scale, token, factor, out, start + token * width + column, width)
    else:
        store_scaled(tile, sums, scale, token, factor, edge, 0, groups * LANES)
        for j in range(rows):
            for i in range(columns):
                out[start + (token + j) * width + column + i] = edge[j * groups * LANES + i]


@_inlined
def _ternary_tile(zeros, groups, tokens, codes, begin, steps, first, end, q, token, sums, scale, factor, edge, out, place, width):
    """The tile of output that begins at group `first` of 16 columns and at `token`; groups end at `end`, their codes begin at `begin`."""
    n, present = min(groups, end - first), min(tokens, q.shape[0] - token)
    tile = zeros
    start, x = begin + first * steps * STEP, token * q.shape[1]
    for _ in range(steps):
        if token == 0:  # the groups that come next: several streams at once are more than the processor foresees
            for group in range(groups):
                prefetch(codes, start + (groups + group) * steps * STEP)
        tile = ternary_step(tile, codes, start, steps * STEP, n, q, x, q.shape[1], present)
        start += STEP
        x += LANES
    _store_ternary(tile, groups, tokens, first, token, sums, scale, factor, edge, out, place, width)


@_inlined
def _ternary_tile_apart(zeros, tokens, codes, begin, steps, first, q, sums, scale, factor, edge, out, place, width):
    """As `_ternary_tile` for one group and a call of one or two tokens: the weights are one stream of memory, read once and in order."""
    tile = zeros
    start, x = begin + first * steps * STEP, 0
    for _ in range(steps):
        prefetch(codes, start + _STREAM)
        tile = ternary_step_apart(tile, codes, start, 0, 1, q, x, q.shape[1], tokens)
        start += STEP
        x += LANES
    _store_ternary(join_planes(tile), 1, tokens, first, 0, sums, scale, factor, edge, out, place, width)


@_serial
def _block_of(widths, size, block):
    """Of three matrices cut into blocks of `size` columns: whose a block is, which of its blocks, how many columns others before have."""
    first, second = -(-widths[0] // size), -(-widths[1] // size)
    if block < first:
        return 0, block, 0
    if block < first + second:
        return 1, block - first, widths[0]
    return 2, block - first - second, widths[0] + widths[1]


@_parallel
def _ternary_matmul(codes, second, third, widths, factors, steps, q, scale, out):
    start = np.int64(codes.ctypes.data)
    begins = np.int64(0), np.int64(second.ctypes.data) - start, np.int64(third.ctypes.data) - start  # of three arrays, as if they were one
    n = q.shape[0]
    size = LANES if n <= 2 else _GROUPS * LANES
    blocks = -(-widths[0] // size) - (-widths[1] // size) - (-widths[2] // size)
    padded, sums = np.empty(n + _TOKENS, np.float32), np.empty(n + _TOKENS, np.int32)
    for i in range(padded.size):  # a tile reads the scales and sums of all its tokens, whether they are there or not
        padded[i], sums[i] = scale[min(i, n - 1)], 0
    _row_sums(q, sums)
    for item in prange(blocks):
        m, block, before = _block_of(widths, size, np.int64(item))
        begin, factor, place, width = begins[m], factors[m], n * before, widths[m]
        edge = np.empty(_TOKENS * _GROUPS * LANES, np.float32)
        if n == 1:
            _ternary_tile_apart(tile_i32(4, 1), 1, codes, begin, steps, block, q, sums, padded, factor, edge, out, place, width)
        elif n == 2:
            _ternary_tile_apart(tile_i32(4, 2), 2, codes, begin, steps, block, q, sums, padded, factor, edge, out, place, width)
        else:
            groups = -(-width // LANES)
            for token in range(0, n, _TOKENS):
                _ternary_tile(
                    tile_i32(_GROUPS, _TOKENS),
                    _GROUPS,
                    _TOKENS,
                    codes,
                    begin,
                    steps,
                    block * _GROUPS,
                    groups,
                    q,
                    token,
                    sums,
                    padded,
                    factor,
                    edge,
                    out,
                    place,
                    width,
                )


def ternary_matmuls(q: NDArray[np.int8], scale: Floats, *matrices: tuple[NDArray[np.uint8], np.float32, int]) -> list[Floats]:
    # [R, M] int8, [R], (packed [N, M] (packing.py), scale, N) each -> [R, N] each
    """Up to three matrices that read the same input: integers exactly, then float32, (accumulated - row sum) / scale * the weights' scale.

    Codes count 0, 1, 2, hence the row sum. Together, because threads that start and wait for each other cost as much as a small matrix.
    """
    rows, m = q.shape
    steps = -(-m // LANES)
    if m % LANES:
        q = np.concatenate([q, np.zeros((rows, steps * LANES - m), np.int8)], axis=1)
    absent = matrices[0][0], np.float32(0), 0
    (a, f, i), (b, g, j), (c, h, k) = (*matrices, absent, absent)[:3]
    out = empty((rows * (i + j + k),))
    work = out.size * q.shape[1] // 64
    _launch(_ternary_matmul, work, _weights(a), _weights(b), _weights(c), (i, j, k), (f, g, h), steps, q, scale, out)
    ends = 0, rows * i, rows * (i + j), rows * (i + j + k)
    return [out[ends[n] : ends[n + 1]].reshape(rows, matrix[2]) for n, matrix in enumerate(matrices)]


def ternary_matmul(q: NDArray[np.int8], scale: Floats, codes: NDArray[np.uint8], w_scale: np.float32, width: int) -> Floats:
    # [R, M] int8, [R], packed [N, M], N -> [R, N]
    """`ternary_matmuls` for one matrix."""
    return ternary_matmuls(q, scale, (codes, w_scale, width))[0]


# --- float matmul ---------------------------------------------------------------------------------------------------------------------


@_serial
def _matmul_tiles(zeros, rows, tokens, w, first, end, x, out):
    """Output columns first..end for all rows of x, in tiles of the shape of `zeros`, which is rows x tokens."""
    totals = np.empty(LANES, np.float32)
    width = x.shape[1]
    for n in range(first, end, rows):
        valid = min(rows, end - n)
        for t in range(0, x.shape[0], tokens):
            present = min(tokens, x.shape[0] - t)
            ahead = 0 if t else rows * width if rows > 1 else _STREAM // w.itemsize  # the rows that come next
            store_sums(_dot_tile(zeros, w, n * width, width, valid, x, t * width, width, present, width, rows, ahead), totals)
            for j in range(present):
                for i in range(valid):
                    out[t + j, n + i] = totals[i * tokens + j]


@_parallel
def _matmul(w, x, out):
    for block in prange((w.shape[0] + _ROW_BLOCK - 1) // _ROW_BLOCK):
        first = block * _ROW_BLOCK
        end = min(first + _ROW_BLOCK, w.shape[0])
        if x.shape[0] == 1:
            _matmul_tiles(tile_f32(1, 1), 1, 1, w, first, end, x, out)
        else:
            _matmul_tiles(tile_f32(_ROWS, _TOKENS), _ROWS, _TOKENS, w, first, end, x, out)


def matmul(x: Floats, weights: NDArray) -> Floats:  # [R, M], [N, M] float32, float16 or bfloat16 bits -> [R, N]
    """Contract-order dot products.

    For few rows of x, one row of weights is read after the other, so that memory is one stream in order: with one row of x, 28 GB/s of
    30 that plain reads reach on one Zen 4 core; four weight rows at a time, which share the loads of x, reach 17.
    """
    out = empty((x.shape[0], weights.shape[0]))
    _launch(_matmul, x.shape[0] * weights.size // 8, _weights(weights), x, out)
    return out


# --- positions ------------------------------------------------------------------------------------------------------------------------


@_parallel
def _rotations(angle, cos, sin):
    for r in prange(angle.shape[0]):
        for i in range(angle.shape[1]):
            c, s = cos_sin(angle[r, i])
            cos[r, i], sin[r, i] = c, s


def rotations(angle: NDArray[np.float64]) -> tuple[Floats, Floats]:  # [R, J] radians -> 2 x [R, J]
    """Cosines and sines, worked out in float64 and rounded once to float32."""
    cos, sin = np.empty(angle.shape, np.float32), np.empty(angle.shape, np.float32)
    _launch(_rotations, 16 * cos.size, angle, cos, sin)
    return cos, sin


@_inlined
def _rotate(x, cos, sin, step, out):
    """The heads [H, K] of one row, by J pairs: (i, i + J) with step 1, (2i, 2i + 1) with step 2. What follows the pairs stays."""
    pairs = cos.size
    distance = pairs if step == 1 else 1  # said here, LLVM knows that it is not negative: told by the caller, it took 4 times as long
    for h in range(x.shape[0]):
        for i in range(pairs):
            a, b, c, s = x[h, i * step], x[h, i * step + distance], cos[i], sin[i]
            out[h, i * step] = fma(a, c, -np.float32(b * s))
            out[h, i * step + distance] = fma(a, s, np.float32(b * c))
        for i in range(x.shape[1] - 2 * pairs):
            out[h, 2 * pairs + i] = x[h, 2 * pairs + i]


@_parallel
def _rope(x, cos, sin, out):
    for r in prange(x.shape[0]):
        _rotate(x[r], cos[r], sin[r], 1, out[r])


def rope(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    """Rotate the pairs (i, i + J), as GPT-NeoX does: fma(a, cos, -(b * sin)), fma(a, sin, b * cos). What follows them stays."""
    out = empty(x.shape)
    _launch(_rope, x.size, x, cos, sin, out)
    return out


# --- attention ------------------------------------------------------------------------------------------------------------------------


@_serial
def _ask_for(rows, start, stride, width, count):
    """Prefetch the first `width` elements of `count` rows: pieces that lie apart, of which the processor foresees no more than one."""
    for row in range(count):
        for i in range(0, width, LANES):
            prefetch(rows, start + row * stride + i)


@_serial
def _chunk_scores(queries, width, keys, values, key_start, key_stride, n_keys, scale, scores):
    """scores[i, j] = query i . key j * scale, for the keys of one chunk. Queries, and keys past the last, are padded to whole tiles.

    Few queries wait for memory: keys are asked for ahead of time, and values, which come next.
    """
    few = queries.shape[0] <= _TOKENS
    for j in range(0, n_keys, _ROWS):
        n_j, start = min(_ROWS, n_keys - j), key_start + j * key_stride
        if few:
            _ask_for(keys, start + _AHEAD * key_stride, key_stride, width, n_j)
            _ask_for(values, start, key_stride, width, n_j)
        for i in range(0, queries.shape[0], _TOKENS):
            tile = _dot_tile(tile_f32(_ROWS, _TOKENS), keys, start, key_stride, n_j, queries, i * width, width, _TOKENS, width)
            store_products(tile, scale, scores, i * CHUNK + j, CHUNK)


@_serial
def _largest_score(scores, low, high, lanes):
    """The largest of scores[low:high], and -infinity elsewhere. Its order is free; sixteen at a time keeps it in vector registers."""
    for i in range(LANES):
        lanes[i] = -np.inf
    for j in range(0, CHUNK, LANES):
        for i in range(LANES):
            score = scores[j + i] if low <= j + i < high else np.float32(-np.inf)
            scores[j + i] = score
            lanes[i] = score if score > lanes[i] else lanes[i]
    largest = lanes[0]
    for i in range(LANES):
        largest = lanes[i] if lanes[i] > largest else largest
    return largest


@_serial
def _fold_lanes(lanes):
    """The sum of 16 lanes by the lane rule; they are used up."""
    half = LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@_serial
def _exponentials(scores, largest, lanes):
    """scores -> exp(score - largest), which makes 0 of -infinity; their sum by the lane rule."""
    for i in range(LANES):
        lanes[i] = 0
    for j in range(0, CHUNK, LANES):
        for i in range(LANES):
            e = exp(np.float32(scores[j + i] - largest))
            scores[j + i] = e
            lanes[i] += e
    return _fold_lanes(lanes)


@_serial
def _chunk_values(p, n_keys, values, value_start, value_stride, width, out):
    """out[i] = sum over keys of p[i, j] * value j, one chain per element in key order. Rows of `out` are padded to whole tiles."""
    for i in range(0, p.shape[0], _TOKENS):
        n_i = min(_TOKENS, p.shape[0] - i)
        for d in range(0, width, _SPAN):
            tile = tile_f32(_TOKENS, _VALUE_COLUMNS)
            start = value_start + d
            if width - d >= _SPAN:
                for j in range(n_keys):
                    tile = axpy_step(tile, p, i * CHUNK + j, CHUNK, n_i, values, start + j * value_stride, _SPAN)
            else:
                for j in range(n_keys):
                    tile = axpy_tail(tile, p, i * CHUNK + j, CHUNK, n_i, values, start + j * value_stride, width - d)
            store_tile(tile, out, i * out.shape[1] + d, out.shape[1])


@_serial
def _visible(position, window, first_key):
    """Which keys of the chunk that begins at first_key a query at `position` sees: low..high. A window counts the query itself."""
    low = max(0, position - window + 1 - first_key)
    high = min(CHUNK, position + 1 - first_key)
    return low, high


@_serial
def _first_chunk(position, window):
    """The first of which a query at `position` sees a key."""
    return max(0, position - window + 1) // CHUNK


@_serial
def _tile_queries(q, first, end, g, group):
    """The queries of rows first..end that read key-value head g, padded to whole tiles: number i is head g * group + i % group of row
    first + i // group."""
    width = q.shape[2]
    n = (end - first) * group
    queries = np.zeros((-(-n // _TOKENS) * _TOKENS, width), np.float32)
    for i in range(n):
        for d in range(width):
            queries[i, d] = q[first + i // group, g * group + i % group, d]
    return queries


@_serial
def _part_like(queries):
    """For `_chunk_values`: its rows are padded to whole tiles."""
    return np.empty((queries.shape[0], -(-queries.shape[1] // _SPAN) * _SPAN), np.float32)


@_serial
def _attend_chunk(queries, k, v, start, stride, n_keys, position, first, group, key, window, scale, scores, lanes, largest, weight, part):
    """What queries get from the chunk of keys that begins with number `key`, at `start` of k and v: the largest score of those they see,
    their weight or _UNSEEN, and their part of the values."""
    width = queries.shape[1]
    _chunk_scores(queries, width, k, v, start, stride, n_keys, scale, scores)
    for i in range(weight.size):
        low, high = _visible(position[first + i // group], window, key)
        largest[i] = _largest_score(scores[i], low, high, lanes)
        here = _exponentials(scores[i], largest[i], lanes)
        weight[i] = here if high > low else _UNSEEN
    _chunk_values(scores, n_keys, v, start, stride, width, part)


@_serial
def _fold(largest_here, weight_here, part, largest, weight, total):
    """Fold what queries get from one more chunk into what they have."""
    for i in range(weight.size):
        if weight_here[i] != _UNSEEN:  # adding +0 instead would turn a -0 around
            after = max(largest[i], largest_here[i])
            old, new = exp(np.float32(largest[i] - after)), exp(np.float32(largest_here[i] - after))
            weight[i] = fma(weight[i], old, np.float32(weight_here[i] * new))
            largest[i] = after
            for d in range(total.shape[1]):
                total[i, d] = fma(total[i, d], old, np.float32(part[i, d] * new))


@_serial
def _store_attended(total, weight, first, g, group, out):
    """What has been folded, divided by its weight. A query that saw nothing has none: its weights' largest is 1 otherwise.

    Returns whether there is NaN in it.
    """
    nan = np.int32(0)
    for i in range(total.shape[0]):
        for d in range(total.shape[1]):
            attended = total[i, d] / weight[i] if weight[i] != 0 else np.float32(0.0)
            out[first + i // group, g * group + i % group, d] = attended
            nan |= np.int32(attended != attended)
    return nan != 0


@_serial
def _attend_together(q, k, v, slot, position, first, end, g, scale, window, out):
    """Rows first..end, which are consecutive positions of one sequence, against key-value head g of that sequence.

    Position p is in place p % S of k and v. S is more than every position, or a multiple of CHUNK (a ring): no chunk is torn apart.
    Returns whether there is NaN in the result: a later position's values, times the 0 of a row that does not see them, are in it too.
    """
    width = q.shape[2]
    group = q.shape[1] // k.shape[2]
    stride = k.shape[2] * width
    base = slot[first] * k.shape[1] * stride + g * width

    n, queries = (end - first) * group, _tile_queries(q, first, end, g, group)
    part = _part_like(queries)
    scores, lanes = np.zeros((queries.shape[0], CHUNK), np.float32), np.empty(LANES, np.float32)
    largest_here, weight_here = np.empty(n, np.float32), np.empty(n, np.float32)
    largest, weight, total = np.full(n, -np.inf, np.float32), np.zeros(n, np.float32), np.zeros((n, width), np.float32)
    for chunk in range(_first_chunk(position[first], window), position[end - 1] // CHUNK + 1):
        key = chunk * CHUNK
        n_keys = min(CHUNK, position[end - 1] + 1 - key)
        start = base + key % k.shape[1] * stride
        here = largest_here, weight_here, part
        _attend_chunk(queries, k, v, start, stride, n_keys, position, first, group, key, window, scale, scores, lanes, *here)
        _fold(largest_here, weight_here, part, largest, weight, total)
    return _store_attended(total, weight, first, g, group, out)


@_serial
def _attend_tile(q, k, v, slot, position, first, end, g, scale, window, out):
    """As `_attend_together`, but a later position's NaN or infinity reaches no row: if there is any, each row is taken by itself."""
    if _attend_together(q, k, v, slot, position, first, end, g, scale, window, out):
        for r in range(end - first):
            _attend_together(q, k, v, slot, position, first + r, first + r + 1, g, scale, window, out)


@_parallel
def _attend(q, k, v, slot, position, tiles, scale, window, out):
    n = (tiles.size - 1) * k.shape[2]
    for item in prange(n):
        mirrored = n - 1 - item // 2 if item % 2 else item // 2  # late rows see more keys: give each thread early and late ones
        t, g = mirrored // k.shape[2], mirrored % k.shape[2]
        _attend_tile(q, k, v, slot, position, tiles[t], tiles[t + 1], g, scale, window, out)


@_parallel
def _attend_split(q, k, v, slot, position, scale, window, largest, weight, part, out):
    """As `_attend`, for rows that stand alone: cut between chunks of keys, so that threads share out a single row."""
    rows, heads, group = q.shape[0], k.shape[2], q.shape[1] // k.shape[2]
    width, chunks = q.shape[2], largest.shape[1]
    for item in prange(rows * chunks * heads):
        r, chunk, g = item // (chunks * heads), item // heads % chunks, item % heads
        key = (_first_chunk(position[r], window) + np.int64(chunk)) * CHUNK
        n_keys = min(CHUNK, position[r] + 1 - key)
        if n_keys > 0:
            queries = _tile_queries(q, r, r + 1, g, group)
            scores, lanes = np.zeros((queries.shape[0], CHUNK), np.float32), np.empty(LANES, np.float32)
            start = ((slot[r] * k.shape[1] + key % k.shape[1]) * heads + g) * width
            here = largest[r, chunk, g], weight[r, chunk, g], part[r, chunk, g]
            _attend_chunk(queries, k, v, start, heads * width, n_keys, position, r, group, key, window, scale, scores, lanes, *here)
    for item in prange(rows * heads):
        r, g = item // heads, item % heads
        folded = np.full(group, -np.inf, np.float32), np.zeros(group, np.float32), np.zeros((group, width), np.float32)
        for chunk in range(position[r] // CHUNK - _first_chunk(position[r], window) + 1):
            _fold(largest[r, chunk, g], weight[r, chunk, g], part[r, chunk, g], *folded)
        _store_attended(folded[2], folded[1], r, g, group, out)


@_serial
def _query_tiles(slot, position, limit):
    """Where to cut the rows so that each piece is at most `limit` consecutive positions of one sequence: first rows, and the end."""
    cuts = np.empty(slot.size + 1, np.int64)
    n = 0
    for r in range(slot.size):
        if r == 0 or slot[r] != slot[r - 1] or position[r] != position[r - 1] + 1 or r - cuts[n - 1] == limit:
            cuts[n] = r
            n += 1
    cuts[n] = slot.size
    return cuts[: n + 1].copy()


def query_tiles(slot: NDArray[np.int64], position: NDArray[np.int64], group: int) -> NDArray[np.int64]:
    """Rows whose queries, `group` of each, share one reading of their keys and values: the first of each tile, and the end."""
    return _query_tiles(slot, position, max(1, _QUERIES // group))


def attend(q: Floats, k: Floats, v: Floats, slot: NDArray[np.int64], position: NDArray[np.int64], window: int | None = None) -> Floats:
    # [R, H, K], [B, S, G, K] x 2, [R], [R] -> [R, H, K]
    """Row r attends to keys 0..position[r] of sequence slot[r], or to the last `window` of them; scale 1/sqrt(K).

    There is no mask array and no [T, S] buffer. Position p is in place p % S: with a window k and v may be rings of S positions, S a
    multiple of CHUNK, which hold all chunks that a call's rows see.
    """
    out = empty(q.shape)
    heads, group = k.shape[2], q.shape[1] // k.shape[2]
    tiles = query_tiles(slot, position, group)
    window = window or _NO_WINDOW
    work = _attention_work(q, position, window)
    alone = tiles.size == len(q) + 1 and len(q) * heads < 2 * get_num_threads()
    if alone and (longest := min(int(position.max()) + 1, window)) >= _LONG:
        chunks = longest // CHUNK + 2  # a window touches one more than it fills
        part = empty((len(q), chunks, heads, -(-group // _TOKENS) * _TOKENS, -(-q.shape[2] // _SPAN) * _SPAN))
        sums = empty((2, len(q), chunks, heads, group))
        _launch(_attend_split, work, q, k, v, slot, position, _scale(q), window, *sums, part, out)
    else:
        _launch(_attend, work, q, k, v, slot, position, tiles, _scale(q), window, out)
    return out


def _attention_work(q: Floats, position: NDArray[np.int64], window: int) -> int:
    return int(np.minimum(position + 1, window).sum()) * q.shape[1] * q.shape[2] // 8


def _scale(q: Floats) -> np.float32:
    return np.float32(1.0) / np.sqrt(np.float32(q.shape[2]))


@_parallel
def _attend_halves(q, k, v, slot, position, scale, window, out):
    heads, width, places = q.shape[1], q.shape[2], k.shape[1]
    stride = k.shape[2] * width
    for item in prange(q.shape[0] * heads):
        r, h = item // heads, item % heads
        g = h // (heads // k.shape[2])
        first = max(0, position[r] - window + 1)
        n = position[r] + 1 - first
        p, sums, total = np.empty(n, np.float32), np.empty(LANES, np.float32), np.empty(width, np.float64)
        largest = np.float32(-np.inf)
        for j in range(n):
            key = (slot[r] * places + (first + j) % places) * stride + g * width
            store_sums(_dot_tile(tile_f32(1, 1), k, key, 0, 1, q, (r * heads + h) * width, 0, 1, width), sums)
            p[j] = sums[0] * scale
            largest = max(largest, p[j])
        weight = 0.0
        for j in range(n):
            p[j] = exp(np.float32(p[j] - largest))
            weight += p[j]
        factor = np.float32(1.0) / np.float32(weight)
        for d in range(width):
            total[d] = 0
        for j in range(n):
            half = np.float64(round_to_half(np.float32(p[j] * factor)))
            row = v[slot[r], (first + j) % places, g]
            for d in range(width):
                total[d] += half * row[d]
        for d in range(width):
            out[r, h, d] = total[d]


def attend_halves(
    q: Floats, k: Floats, v: Floats, slot: NDArray[np.int64], position: NDArray[np.int64], window: int | None = None
) -> Floats:
    # [R, H, K], [B, S, G, K] x 2, [R], [R] -> [R, H, K]
    """`attend` for an engine that rounds probabilities to float16 before it sums the values: plain loops, and sums in float64.

    With q, k and v rounded too, no rounding but float16's shows in the result, whatever order the engine sums in.
    """
    out = empty(q.shape)
    window = window or _NO_WINDOW
    _launch(_attend_halves, _attention_work(q, position, window), q, k, v, slot, position, _scale(q), window, out)
    return out


# --- residuals ------------------------------------------------------------------------------------------------------------------------


@_parallel
def _add(a, b, out):
    for r in prange(a.shape[0]):
        for i in range(a.shape[1]):
            out[r, i] = a[r, i] + b[r, i]


def add(a: Floats, b: Floats) -> Floats:  # [R, D], [R, D] -> [R, D]
    out = empty(a.shape)
    _launch(_add, a.size, a, b, out)
    return out


def add_bias(x: Floats, bias: Floats) -> Floats:  # [R, N], [N] -> [R, N]
    return x + bias


def scaled(x: Floats, factor: np.float32) -> Floats:  # [R, N] -> [R, N]
    return x * factor


# --- rows -----------------------------------------------------------------------------------------------------------------------------


def take(x: Floats, rows: NDArray[np.int64]) -> Floats:  # [R, D], [B] -> [B, D]
    return x[rows]


def spread(x: Floats, slot: NDArray[np.int64], position: NDArray[np.int64], shape: tuple[int, ...]) -> Floats:
    # [R, G, K], [R], [R], (B, T) -> [B, T, G, K]
    """Keys or values of whole sequences as a cache would hold them: zeros where no row goes."""
    out = np.zeros((*shape, *x.shape[1:]), np.float32)
    out[slot, position] = x
    return out


def resident(record: Any) -> Any:
    """A record with its arrays where the kernels of this backend read them."""
    return record


def to_host(array: Floats) -> Floats:
    """A result as a NumPy array."""
    return array


# --- gates ----------------------------------------------------------------------------------------------------------------------------


@_parallel
def _relu2_gate(gate, up, out):
    for r in prange(gate.shape[0]):
        for i in range(gate.shape[1]):
            x = gate[r, i]
            positive = np.float32(0.0) if x < 0 else x  # NaN stays NaN
            out[r, i] = np.float32(positive * positive) * up[r, i]


def relu2_gate(gate: Floats, up: Floats) -> Floats:  # [R, F], [R, F] -> [R, F]
    """max(gate, 0)^2 * up."""
    out = empty(gate.shape)
    _launch(_relu2_gate, gate.size, gate, up, out)
    return out


# --- sampling -------------------------------------------------------------------------------------------------------------------------


@_parallel
def _exponential(x, out):
    for i in prange(x.size):
        out[i] = exp(x[i])


def exponential(x: Floats) -> Floats:  # [V] -> [V]
    """e^x, the contract's."""
    out = empty(x.shape)
    _launch(_exponential, 16 * x.size, x, out)
    return out


# --- other families -------------------------------------------------------------------------------------------------------------------


@_parallel
def _layer_norm(x, ones, gain, bias, eps, out):
    for r in prange(x.shape[0]):
        row, centred, sums = x[r], out[r], np.empty(LANES, np.float64)
        store_sums(_dot_tile(tile_f64(1, 1), row, 0, 0, 1, ones, 0, 0, 1, row.size), sums)
        mean = sums[0] / row.size
        for i in range(row.size):
            centred[i] = np.float32(row[i] - mean)
        variance = np.float32(_sum_of_squares(centred, sums) / row.size)
        factor = np.float32(1.0) / np.sqrt(variance + eps)
        if variance == np.inf:  # as in _rms_norm
            factor = np.float32(np.nan)
        for i in range(row.size):
            centred[i] = np.float32(np.float32(centred[i] * factor) * gain[i]) + bias[i]


def layer_norm(x: Floats, gain: Floats, bias: Floats | None, eps: float) -> Floats:  # [R, D], [D], [D] -> [R, D]
    """(x - mean) / sqrt(variance + eps) * gain + bias.

    The mean in float64; the difference rounded to float32, its squares summed in float64; then in float32: 1 / root, times the difference,
    times gain, plus bias; no bias is one of zeros.
    """
    bias = np.zeros(x.shape[1], np.float32) if bias is None else bias
    out = empty(x.shape)
    _launch(_layer_norm, x.size, x, np.ones(x.shape[1], np.float32), _weights(gain), _weights(bias), np.float32(eps), out)
    return out


@_parallel
def _rope_adjacent(x, cos, sin, out):
    for r in prange(x.shape[0]):
        _rotate(x[r], cos[r], sin[r], 2, out[r])


def rope_adjacent(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    """`rope` for the pairs (2i, 2i + 1)."""
    out = empty(x.shape)
    _launch(_rope_adjacent, x.size, x, cos, sin, out)
    return out


@_parallel
def _silu_gate(gate, up, out):
    for r in prange(gate.shape[0]):
        for i in range(gate.shape[1]):
            out[r, i] = _silu_of(gate[r, i]) * up[r, i]


def silu_gate(gate: Floats, up: Floats) -> Floats:  # [R, F], [R, F] -> [R, F]
    """gate / (1 + e^-gate) * up."""
    out = empty(gate.shape)
    _launch(_silu_gate, 16 * gate.size, gate, up, out)
    return out


@_parallel
def _gelu(x, out):
    for r in prange(x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] = x[r, i] * normal_cdf(x[r, i])


def gelu(x: Floats) -> Floats:  # [R, F] -> [R, F]
    """The exact GELU: x times the normal distribution's value at x."""
    out = empty(x.shape)
    _launch(_gelu, 32 * x.size, x, out)
    return out


@_parallel
def _gelu_tanh(x, out):
    for r in prange(x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] = _gelu_tanh_of(x[r, i])


def gelu_tanh(x: Floats) -> Floats:  # [R, F] -> [R, F]
    """The GELU's approximation by a tanh."""
    out = empty(x.shape)
    _launch(_gelu_tanh, 16 * x.size, x, out)
    return out
