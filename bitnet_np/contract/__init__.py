"""The law to the bit: every operation of a backend in plain NumPy, with each rounding in its place.

It is a backend like kernels/cpu.py: `forward_full(model, tokens, ops=contract)`. The kernels, and their twins for CUDA, must give its bits.
It is slow, shares no code with them, and imports NumPy and tables alone. Whoever ports the arithmetic to another language ports this file.

THE CONTRACT. Prefill, decode, any batch, any chunks, any number of threads and any processor give the same bits, because:

* Everything is in float32, and rounded after each operation, unless it is said otherwise. Ties round to even. Division and square root are
  IEEE's. Nothing is fused but what is written as `fma`, a * b + c rounded once. Nothing else is reordered or approximated.
* Sums of integers are exact, so their order is free. A ternary product ends in float32 as `sum / scale * weight scale`.
* Every sum of floats has one order that depends on the summed axis alone: 16 lanes, lane = index mod 16, each lane a chain of fused
  multiply-adds that starts at +0, lanes then added by halving (i with i+8, i+4, i+2, i+1). Sums in float64 (the squares and means of
  norms) have 128 lanes, lane = index mod 128, halved likewise (i with i+64, i+32, ... i+1).
* Such a sum is never -0: +0 is added at its end. Lanes become -0 where products underflow. So it does not matter whether a -0 among weights
  or inputs keeps its sign, or whether zeros pad a row.
* Sums over keys go by absolute position in chunks of CHUNK keys from position 0. A chunk has its own maximum m_c, its own sum
  l_c = sum exp(s - m_c) by the lane rule, and its own o_c = sum exp(s - m_c) v as one chain in key order. Chunks are folded in order:
  m' = max(m, m_c), a = exp(m - m'), b = exp(m_c - m'), l' = fma(l, a, l_c * b), o' = fma(o, a, o_c * b). At the end o / l.
* The softmax of a router's logits is summed over experts by their numbers, and the weights of a token's k experts and its k results times
  these weights by falling logits, each product rounded before it is added. Of equal logits the lower number is the larger one.
* exp, tanh and the normal distribution are the polynomials below, by the constants below.
* An all-zero row quantises to zeros. A row with NaN or infinity in it quantises to zeros with scale NaN, so that the NaN reaches the
  logits instead of vanishing. The sign and the payload of a NaN are open.

numbers.py has fused multiply-adds, lanes, exponentials and angles, blocks.py the products with ggml's block types. Arrays are NumPy's and
float32 if their type is not given; engine/backend.py explains the operations, model/records.py the letters of shapes.
"""

from collections.abc import Callable
from functools import partial
from operator import setitem
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..base.errors import CapacityError, NonFiniteError
from ..base.tensor_types import Q8_0, TensorType
from .blocks import Bytes, product_as_llama_cpp, rounded, weights
from .numbers import GELU_CUBIC, GELU_LINEAR, WIDE_LANES, Floats, cos_sin, dot, exp, f32, fma, lane_sum, normal_cdf, tanh

Places = NDArray[np.int64]
Flags = NDArray[np.bool_]
Scalar = np.float32 | None
Record = TypeVar("Record")

device = "cpu"
exact_only = False
splits_rows = True
repeats = False

CHUNK = 64

_SIZE, _OUTPUTS = 1 << 16, 1 << 10  # numbers of a result, and rows of a matrix, that are computed at a time: no array outgrows memory

# --- where arrays are -----------------------------------------------------------------------------------------------------------------


class ArrayStorage:
    """Keys and values [L, B, S, G, K] of a KV cache in NumPy's arrays: position p of slot b is at [:, b, p]."""

    most_positions: int | None = None

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[NDArray, NDArray]:
        try:
            return np.zeros(shape, dtype), np.zeros(shape, dtype)
        except (MemoryError, ValueError, OverflowError) as error:
            raise CapacityError(f"KV cache: there is no memory for {shape[1]} sequences of {shape[2]} positions") from error

    @np.errstate(over="ignore")
    def write(self, layer: int, keys: NDArray, values: NDArray, slot: Places, position: Places, k: Floats, v: Floats) -> None:
        """Numbers are rounded to the type of the arrays."""
        for name, out, rows in (("key", keys, k), ("value", values, v)):
            rounded = rows.astype(out.dtype)
            if out.dtype == np.float16 and not np.isfinite(rounded).all():
                raise NonFiniteError(f"KV cache: a {name} of layer {layer} is not a number within float16's range")
            out[slot, position] = rounded

    def readable(self, array: NDArray) -> NDArray:
        return array.view(np.int16) if array.dtype == np.float16 else array

    def erasing(self, array: NDArray, slot: int, start: int, end: int) -> Callable[[], None]:
        return partial(setitem, array, (slice(None), slot, slice(start, end)), 0)

    def carry(self, source: NDArray, slot: int, out: NDArray, target: int, length: int) -> None:
        out[:, target, :length] = source[:, slot, :length]


def storage() -> ArrayStorage:
    return ArrayStorage()


def upload(array: NDArray) -> NDArray:
    return array


def empty(shape: tuple[int, ...]) -> Floats:
    return np.empty(shape, f32)


def resident(record: Record) -> Record:
    return record


def to_host(array: NDArray) -> NDArray:
    return array


def wait() -> None:
    """Every operation is done when it returns."""


def mark(event: str, count: int = 1) -> None:
    """Nothing is counted here."""


# --- tables ---------------------------------------------------------------------------------------------------------------------------


def widened(table: NDArray) -> Floats:
    """float32, float16, or the bits of bfloat16 (uint16) as float32, exactly; but -0 becomes +0."""
    wide = (table.astype(np.uint32) << 16).view(f32) if table.dtype == np.uint16 else table.astype(f32)
    return wide + f32(0)


def embed(table: NDArray, tokens: Places) -> Floats:  # [V, D], [R] -> [R, D]
    return widened(table[tokens])


def embed_blocks(data: Bytes, kind: TensorType, tokens: Places) -> Floats:  # [V, bytes of a row], type, [R] -> [R, D]
    return weights(data[tokens], kind)


def _slices(size: int, step: int) -> list[slice]:
    """All of `size`, at most `step` at a time, but at least one."""
    return [slice(n, min(n + max(1, step), size)) for n in range(0, size, max(1, step))]


def _by_outputs(rows: int, outputs: int, product: Callable[[slice], Floats]) -> Floats:  # -> [rows, outputs]
    """A product, some of its outputs at a time: no output depends on another."""
    return np.concatenate([product(some) for some in _slices(outputs, min(_SIZE // rows, _OUTPUTS))], axis=1)


def matmul(x: Floats, table: NDArray) -> Floats:  # [R, M], [N, M] -> [R, N]
    return _by_outputs(len(x), len(table), lambda some: dot(x[:, None], widened(table[some])))


def matmul_blocks(x: Floats, data: Bytes, kind: TensorType) -> Floats:  # [R, M], [N, bytes of a row], type -> [R, N]
    return _by_outputs(len(x), len(data), lambda some: dot(x[:, None], weights(data[some], kind)))


def matmuls_blocks_as_llama_cpp(x: Floats, *matrices: tuple[Bytes, TensorType]) -> list[Floats]:
    # [R, M], ([N, bytes of a row], type) each -> [R, N] each
    def one(data: Bytes, kind: TensorType) -> Floats:
        return _by_outputs(len(x), len(data), lambda some: product_as_llama_cpp(x, data[some], kind))

    return [one(*matrix) for matrix in matrices]


# --- norms and ternary matrices -------------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def rms_norm(x: Floats, gain: Floats, eps: float) -> Floats:  # [R, D], [D] -> [R, D]
    """x * (1 / sqrt(mean(x^2) + eps)) * gain. NaN where the squares leave float32's range."""
    mean = (lane_sum(x.astype(np.float64) ** 2, WIDE_LANES) / x.shape[1]).astype(f32)
    factor = f32(1) / np.sqrt(mean + f32(eps))
    factor = np.where(mean == np.inf, f32(np.nan), factor)
    return x * factor[:, None] * gain


@np.errstate(all="ignore")
def layer_norm(x: Floats, gain: Floats, bias: Floats | None, eps: float) -> Floats:  # [R, D], [D], [D] -> [R, D]
    """x less its mean, in float64 and rounded once, then as `rms_norm`, plus the bias or +0."""
    mean = lane_sum(x.astype(np.float64), WIDE_LANES) / x.shape[1]
    return rms_norm((x - mean[:, None]).astype(f32), gain, eps) + (f32(0) if bias is None else bias)


@np.errstate(all="ignore")
def quantize(x: Floats) -> tuple[NDArray[np.int8], Floats]:  # [R, M] -> int8 [R, M], steps per unit [R]
    """Codes, and 127 / max(1e-5, absmax) of each row; NaN and zeros for a row that is not finite."""
    largest = np.abs(x).max(axis=1)
    scale = np.where(np.isfinite(largest), f32(127) / np.maximum(largest, f32(1e-5)), f32(np.nan))
    codes = np.where(np.isnan(scale)[:, None], f32(0), np.rint(x * scale[:, None]))
    return codes.astype(np.int8), scale


@np.errstate(all="ignore")
def ternary_matmul(q: NDArray[np.int8], scale: Floats, codes: Bytes, w_scale: f32, width: int) -> Floats:
    # int8 [R, M], [R], packed [N, M], float32, N -> [R, N]
    matrix = unpacked(codes, (width, q.shape[1]))

    def product(some: slice) -> Floats:
        total = q.astype(np.float64) @ matrix[some].astype(np.float64).T  # far below 2^53: exact in any order
        return total.astype(np.int64).astype(f32) / scale[:, None] * w_scale

    return _by_outputs(len(q), width, product)


def ternary_matmuls(q: NDArray[np.int8], scale: Floats, *matrices: tuple[Bytes, f32, int]) -> list[Floats]:
    return [ternary_matmul(q, scale, *matrix) for matrix in matrices]


def unpacked(codes: Bytes, shape: tuple[int, int]) -> NDArray[np.int8]:  # packed [N, M] -> [N, M] of -1, 0, +1
    """The matrix behind packed codes, which count 0, 1, 2.

    16 rows lie side by side, and 64 bytes hold 16 columns of them: column c of the 16 is in byte 4 * row + c % 4 at bits 6 - 2 * (c // 4).
    Rows and columns are padded to multiples of 16.
    """
    groups, steps = (-(-size // 16) for size in shape)
    fields = codes.reshape(groups, steps, 16, 1, 4) >> np.array([[6], [4], [2], [0]], np.uint8) & 3  # group, step, row, c // 4, c % 4
    matrix = fields.transpose(0, 2, 1, 3, 4).reshape(16 * groups, 16 * steps)
    return matrix[: shape[0], : shape[1]].astype(np.int8) - np.int8(1)


# --- positions ------------------------------------------------------------------------------------------------------------------------


def rotations(angle: NDArray[np.float64]) -> tuple[Floats, Floats]:  # float64 [R, J] -> cosines and sines [R, J]
    cos, sin = cos_sin(angle)
    return cos.astype(f32), sin.astype(f32)


def rope(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    pairs = cos.shape[1]
    return _rotated(x, cos, sin, slice(0, pairs), slice(pairs, 2 * pairs))


def rope_adjacent(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    pairs = cos.shape[1]
    return _rotated(x, cos, sin, slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))


@np.errstate(all="ignore")
def _rotated(x: Floats, cos: Floats, sin: Floats, first: slice, second: slice) -> Floats:
    """Each pair (a, b) becomes (fma(a, cos, -(b * sin)), fma(a, sin, b * cos)). What is in no pair stays."""
    out, a, b = x.copy(), x[..., first], x[..., second]
    cos, sin = cos[:, None], sin[:, None]
    out[..., first], out[..., second] = fma(a, cos, -(b * sin)), fma(a, sin, b * cos)
    return out


def spread(x: Floats, slot: Places, position: Places, shape: tuple[int, ...]) -> Floats:  # [R, G, K], [R] x 2, (B, T) -> [B, T, G, K]
    out = np.zeros((*shape, *x.shape[1:]), f32)
    out[slot, position] = x
    return out


# --- attention ------------------------------------------------------------------------------------------------------------------------


def attend(
    q: Floats, k: NDArray, v: NDArray, slot: Places, position: Places, window: int | None = None, scale: Scalar = None, cap: Scalar = None
) -> Floats:  # [R, H, K], [B, S, G, K] x 2, [R] x 2 -> [R, H, K]
    """Values of a chunk's keys before the window are multiplied by 0, which makes NaN of infinity there; later ones do not count."""
    return _by_rows(_attended, q, k, v, slot, _causal(position, window), _causal(position, None) == 0, scale, cap)


def attend_float16(
    q: Floats, k: NDArray, v: NDArray, slot: Places, position: Places, window: int | None = None, scale: Scalar = None, cap: Scalar = None
) -> Floats:  # [R, H, K], [B, S, G, K] x 2, [R] x 2 -> [R, H, K]
    """Probabilities normalised and rounded to float16; their sum before, and the sum over values, in float64 and in key order."""
    bias = _causal(position, window)
    return _by_rows(_attended_in_float16, q, k, v, slot, bias, bias == 0, scale, cap)


def attend_masked(
    q: Floats, k: NDArray, v: NDArray, slot: Places, position: Places, mask: Floats, scale: Scalar = None, cap: Scalar = None
) -> Floats:  # [R, H, K], [B, S, G, K] x 2, [R] x 2, [1 or B, T, n] -> [R, H, K]
    """Row r adds mask[slot[r] or 0, position[r]] to its scores. A row that sees no key gives zeros."""
    bias = mask[np.minimum(slot, len(mask) - 1), position]
    return _by_rows(_attended, q, k, v, slot, bias, bias > -np.inf, scale, cap)


def _causal(position: Places, window: int | None) -> Floats:  # [R] -> [R, n]
    """What is added to the scores of keys 0..n: 0 where a row sees the key, -infinity where not."""
    keys, position = np.arange(position.max() + 1), position[:, None]
    seen = (keys <= position) & (keys > (-1 if window is None else position - window))
    return np.where(seen, f32(0), f32(-np.inf))


def _by_rows(attention: Callable[..., Floats], q: Floats, k: NDArray, v: NDArray, slot: Places, *rest: Any) -> Floats:
    """Attention of some rows at a time: no row depends on another. rest: bias and counted [R, n], scale, cap."""
    bias, counted, scale, cap = rest
    scale = f32(1) / np.sqrt(f32(q.shape[2])) if scale is None else scale
    parts = _slices(len(q), _SIZE // (CHUNK * q.shape[1]))
    return np.concatenate([attention(q[some], k, v, slot[some], bias[some], counted[some], scale, cap) for some in parts])


def _kept(array: NDArray, slot: Places, keys: Places, heads: int) -> Floats:  # [B, S, G, K], [R], [n], H -> [R, n, H, K]
    """Keys or values of some positions, in float32 and for each head. int16 stands for float16's bits."""
    rows = array[slot[:, None], keys]
    rows = (rows.view(np.float16) if rows.dtype == np.int16 else rows).astype(f32)
    return np.repeat(rows, heads // array.shape[2], axis=2)


@np.errstate(all="ignore")
def _scores(q: Floats, k: NDArray, slot: Places, keys: Places, bias: Floats, scale: f32, cap: Scalar) -> Floats:
    # [R, H, K], [B, S, G, K], [R], [n], [R, n] -> [R, n, H], -infinity where a key is not seen
    s = dot(q[:, None], _kept(k, slot, keys, q.shape[1])) * scale
    s = soft_cap(s, cap) if cap else s
    return np.where(bias[..., None] > -np.inf, s + bias[..., None], f32(-np.inf))


@np.errstate(all="ignore")
def _attended(q: Floats, k: NDArray, v: NDArray, slot: Places, bias: Floats, counted: Flags, scale: f32, cap: Scalar) -> Floats:
    """Chunk after chunk of keys, folded in order. counted: whose values are multiplied by their weights, which are 0 if not seen."""
    rows, heads, _ = q.shape
    largest, weight, total = np.full((rows, heads), -np.inf, f32), np.zeros((rows, heads), f32), np.zeros(q.shape, f32)
    for some in _slices(bias.shape[1], CHUNK):
        keys, seen = np.arange(bias.shape[1])[some], bias[:, some] > -np.inf
        if not seen.any():
            continue
        s, values = _scores(q, k, slot, keys, bias[:, some], scale, cap), _kept(v, slot, keys, heads)
        m = s.max(axis=1)
        p = np.where(seen[..., None], exp(s - m[:, None]), f32(0))
        part = np.zeros(q.shape, f32)
        for j in range(len(keys)):
            part = np.where(counted[:, keys[j], None, None], fma(p[:, j, :, None], values[:, j], part), part)
        after = np.maximum(largest, m)
        a, b, sees = exp(largest - after), exp(m - after), np.asarray(seen.any(axis=1))[:, None]
        weight = np.where(sees, fma(weight, a, lane_sum(np.moveaxis(p, 1, 2)) * b), weight)
        total = np.where(sees[..., None], fma(total, a[..., None], part * b[..., None]), total)
        largest = np.where(sees, after, largest)
    return np.where(weight[..., None] != 0, total / weight[..., None], f32(0))


@np.errstate(all="ignore")
def _attended_in_float16(q: Floats, k: NDArray, v: NDArray, slot: Places, bias: Floats, counted: Flags, scale: f32, cap: Scalar) -> Floats:
    keys, heads = np.arange(bias.shape[1]), q.shape[1]
    parts = _slices(len(keys), CHUNK)
    s = np.concatenate([_scores(q, k, slot, keys[some], bias[:, some], scale, cap) for some in parts], axis=1)
    p = exp(s - s.max(axis=1, keepdims=True))
    weight, total = np.zeros((len(q), heads)), np.zeros(q.shape)
    for j in keys:
        weight = weight + p[:, j]
    rounded = (p * (f32(1) / weight.astype(f32))[:, None]).astype(np.float16).astype(np.float64)
    for j in keys:
        products = rounded[:, j, :, None] * _kept(v, slot, keys[j : j + 1], heads)[:, 0]
        total = np.where(counted[:, j, None, None], total + products, total)
    return total.astype(f32)


# --- rows -----------------------------------------------------------------------------------------------------------------------------


def add(a: Floats, b: Floats) -> Floats:  # [R, D] x 2 -> [R, D]
    return a + b


def add_bias(x: Floats, bias: Floats) -> Floats:  # [R, N], [N] -> [R, N]
    return x + bias


def scaled(x: Floats, factor: f32) -> Floats:  # [R, N], float32 -> [R, N]
    return x * factor


@np.errstate(all="ignore")
def round_as(x: Floats, kind: str) -> Floats:  # [..., M], a type -> [..., M]
    """The numbers that a type keeps of x. A step of int8 is that of M numbers, one of ggml's blocks that of 32 of them."""
    rows = x.reshape(-1, x.shape[-1])
    kept: Any
    if kind == "float16":
        kept = rows.astype(np.float16).astype(f32)
    elif kind == "bfloat16":
        kept = np.where(np.isnan(rows), rows, (_upper_half(rows.view(np.uint32)) << 16).view(f32))
    elif kind == "int8":
        step = np.abs(rows).max(axis=1, keepdims=True) / f32(127)
        kept = np.rint(rows / np.where(step > 0, step, f32(1))) * step
    elif kind == "q8_0":
        codes, scale, _ = rounded(rows, Q8_0)
        kept = codes * np.repeat(scale, 32, axis=1)
    else:
        kept = _in_q4_0(rows.reshape(-1, 32))
    return kept.reshape(x.shape)


def _upper_half(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The upper 16 bits, rounded half to even by the lower ones."""
    upper, lower = bits >> 16, bits & 0xFFFF
    return upper + ((lower > 0x8000) | ((lower == 0x8000) & (upper & 1 == 1)))


def _in_q4_0(x: Floats) -> Floats:  # [blocks, 32] -> [blocks, 32]
    """Codes -8 to 7, by the exact step that makes the first of the largest -8. Half a step goes up. The step is then rounded to float16."""
    largest = x[np.arange(len(x)), np.abs(x).argmax(axis=1), None]
    step = largest / f32(-8)
    per_unit = np.where(step == 0, f32(0), f32(1) / step)
    codes = np.floor(x * per_unit + f32(8.5)).clip(0, 15) - f32(8)
    return codes * step.astype(np.float16).astype(f32)


def take(x: Floats, rows: Places) -> Floats:  # [R, D], [B] -> [B, D]
    return x[rows]


@np.errstate(all="ignore")
def relu2_gate(gate: Floats, up: Floats) -> Floats:  # [R, F] x 2 -> [R, F]
    positive = np.maximum(gate, f32(0))
    return positive * positive * up


@np.errstate(all="ignore")
def silu_gate(gate: Floats, up: Floats) -> Floats:  # [R, F] x 2 -> [R, F]
    return gate / (f32(1) + exp(-gate)) * up


@np.errstate(all="ignore")
def gelu_gate(gate: Floats, up: Floats) -> Floats:  # [R, F] x 2 -> [R, F]
    return gelu_tanh(gate) * up


@np.errstate(all="ignore")
def gelu(x: Floats) -> Floats:  # [R, F] -> [R, F]
    return x * normal_cdf(x)


@np.errstate(all="ignore")
def gelu_tanh(x: Floats) -> Floats:  # [R, F] -> [R, F]
    """x (1 + tanh(y / 2)) / 2 with y / 2 = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-y): nothing cancels."""
    y = x * fma(x * x, GELU_CUBIC, GELU_LINEAR)
    return x / (f32(1) + exp(-y))


@np.errstate(all="ignore")
def soft_cap(x: Floats, cap: f32) -> Floats:  # [R, V], float32 -> [R, V]
    return cap * tanh(x / cap)


# --- experts --------------------------------------------------------------------------------------------------------------------------


def top_experts(logits: Floats, k: int) -> NDArray[np.int32]:  # [R, E] -> int32 [R, k]
    """The experts with the k largest logits, largest first, lower numbers first among equal ones.

    A logit that is NaN is larger than none. The first expert that is left is taken where no other is larger, so k experts are taken.
    """
    rows, (count, experts) = np.arange(len(logits)), logits.shape
    chosen, taken = np.empty((count, k), np.int32), np.zeros(logits.shape, bool)
    for slot in range(k):
        best = taken.argmin(axis=1)  # the first that is left
        for e in range(experts):
            best = np.where(~taken[:, e] & (logits[:, e] > logits[rows, best]), e, best)
        chosen[:, slot], taken[rows, best] = best, True
    return chosen


@np.errstate(all="ignore")
def expert_weights(logits: Floats, experts: NDArray[np.int32], normalized: bool) -> Floats:  # [R, E], int32 [R, k] -> [R, k]
    """The softmax of all logits at these experts, divided by the sum of these k if `normalized`."""
    p = exp(logits - logits.max(axis=1, keepdims=True))
    weights = np.take_along_axis(p, experts, axis=1) / _sum_in_order(p)
    return weights / _sum_in_order(weights) if normalized else weights


def _sum_in_order(x: Floats) -> Floats:  # [R, n] -> [R, 1]
    total = np.zeros(len(x), f32)
    for i in range(x.shape[1]):
        total = total + x[:, i]
    return total[:, None]


@np.errstate(all="ignore")
def mix(y: Floats, weights: Floats) -> Floats:  # [R, k, D], [R, k] -> [R, D]
    products = y * weights[..., None]
    total = products[:, 0]
    for slot in range(1, y.shape[1]):
        total = total + products[:, slot]
    return total


@np.errstate(all="ignore")
def sigmoid_gate(x: Floats, gate: Floats) -> Floats:  # [R, D], [R, 1] -> [R, D]
    return x * (f32(1) / (f32(1) + exp(-gate)))
