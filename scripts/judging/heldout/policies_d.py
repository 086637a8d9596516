"""Twenty more honest rounding policies (Y01..Y20), by a fourth author: correct engines that only round, as GPU, NPU and phone kernels,
compilers and libraries do.

POLICIES: id -> record as in policies.py. Sizes of blocks, tiles and splits are scaled down where the tiny models have fewer numbers than one.
"""

import math
from types import SimpleNamespace

import numpy as np
from engine import F32, Num

POLICIES = {}
F64 = np.float64


def policy(id, what, source):
    def add(cls):
        POLICIES[id] = SimpleNamespace(id=id, what=what, source=source, make=cls)
        return cls

    return add


# --- number formats ---------------------------------------------------------------------------------------------------------------------


def bits_of(x):
    return np.ascontiguousarray(x, F32).view(np.uint32)


def bf16(x):
    b = bits_of(x).astype(np.uint64)
    return ((b + 0x7FFF + (b >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(F32).reshape(np.shape(x))


def f16(x):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(F32)


def cut(x, bits):  # keeps `bits` behind the point, truncates the others
    return (bits_of(x) & np.uint32(0xFFFFFFFF << (23 - bits) & 0xFFFFFFFF)).view(F32).reshape(np.shape(x))


def to_bits(x, bits):  # rounds to `bits` behind the point
    m, e = np.frexp(x)
    return np.ldexp(np.rint(m * 2 ** (bits + 1)) / 2 ** (bits + 1), e).astype(F32)


def toward_zero(x):  # float64 -> float32
    y = x.astype(F32)
    return np.where(np.abs(y.astype(F64)) > np.abs(x), np.nextafter(y, F32(0)), y).astype(F32)


def e4m3(x):
    a = np.abs(x).astype(F64)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(a, 1e-300))), -6) - 3)
    return np.clip(np.sign(x) * np.rint(a / step) * step, -448, 448).astype(F32)


def power_of_two(most):  # the least one that is not below
    return np.exp2(np.ceil(np.log2(np.maximum(most, F32(2**-100))))).astype(F32)


def by_block(x, size, quantise, axis=-1):  # zeros fill the last block of the axis
    x = np.moveaxis(x, axis, -1)
    m = x.shape[-1]
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], -m % size), F32)], axis=-1)
    y = quantise(padded.reshape(*x.shape[:-1], -1, size)).reshape(padded.shape)[..., :m]
    return np.moveaxis(y, -1, axis).astype(F32)


def fp8_scaled(x, axis=-1):
    scale = np.maximum(np.abs(x).max(axis=axis, keepdims=True), F32(1e-10)) / F32(448)
    return e4m3(x / scale) * scale


def int8(x, axis=-1):
    scale = f16(np.maximum(np.abs(x).max(axis=axis, keepdims=True), F32(1e-5)) / F32(127))
    return np.clip(np.rint(x / scale), -127, 127) * scale


def fixed(x, bits, axis=None):  # two's complement with a power of two as its scale, rounded half up
    unit = power_of_two(np.abs(x).max(axis=axis, keepdims=True)) / F32(2 ** (bits - 1))
    most = 2 ** (bits - 1)
    return (np.clip(np.floor(x.astype(F64) / unit + 0.5), -most, most - 1) * unit).astype(F32)


def half_tree(x):  # the sum over the last axis by halves, each step in float16
    x = np.concatenate([x, np.zeros((*x.shape[:-1], 2 ** math.ceil(math.log2(x.shape[-1])) - x.shape[-1]), F32)], axis=-1)
    while x.shape[-1] > 1:
        h = x.shape[-1] // 2
        x = f16(x[..., :h] + x[..., h:])
    return x[..., 0]


# --- products ---------------------------------------------------------------------------------------------------------------------------


@policy(
    "Y01",
    "GEMM with the inner axis split in four: each part in float16 inputs and float32 sums, its result float16, added to the output by float16 "
    "atomics in an order that depends on the tile",
    "split-K GEMMs that accumulate into a half-precision output",
)
class SplitHalf(Num):
    def weight(self, w, name):
        return f16(w)

    def mm(self, x, w):
        x, m = f16(x), x.shape[-1]
        edges = [m * i // 4 for i in range(5)]
        parts = [f16(x[:, a:b] @ w[:, a:b].T) for a, b in zip(edges, edges[1:])]
        y = np.empty((len(x), len(w)), F32)
        for i in range(0, len(w), 16):
            order = np.roll(np.arange(4), i // 16)
            tile = parts[order[0]][:, i : i + 16]
            for j in order[1:]:
                tile = f16(tile + parts[j][:, i : i + 16])
            y[:, i : i + 16] = tile
        return y


@policy(
    "Y02",
    "the stream between layers is bfloat16, and the add that is fused with it takes both sides as bfloat16; all else is float32",
    "fused residual add and norm kernels of servers",
)
class Stream(Num):
    def store(self, x, name):
        return bf16(x) if name in ("inp_embd", "ffn_inp", "l_out") else x

    def add(self, a, b):
        return bf16(bf16(a) + bf16(b))


@policy(
    "Y03",
    "FP8 (E4M3) with a scale for 16 inputs of a token and one for 16 x 16 weights; within a block, sums keep 13 bits behind the point and are "
    "cut; blocks are added in float32",
    "DeepSeek-V3's FP8 GEMM on Hopper (128 and 128 x 128 there)",
)
class BlockFloat8(Num):
    def weight(self, w, name):
        if w.ndim > 2:
            return np.stack([self.weight(one, name) for one in w])
        rows, columns = (-n % 16 for n in w.shape)
        tiles = np.pad(w, ((0, rows), (0, columns))).reshape((len(w) + rows) // 16, 16, -1, 16)
        return fp8_scaled(tiles, (1, 3)).reshape(len(w) + rows, -1)[: len(w), : w.shape[1]]

    def lin_in(self, x, name):
        return by_block(x, 16, fp8_scaled)

    def mm(self, x, w):
        y = np.zeros((len(x), len(w)), F32)
        for i in range(0, x.shape[-1], 16):
            y += cut(x[:, i : i + 16] @ w[:, i : i + 16].T, 13)
        return y


@policy(
    "Y04",
    "what is written is rounded to bfloat16 at random, up or down by the distance; sums are float32",
    "Trainium's and Graphcore's stochastic rounding",
)
class Stochastic(Num):
    def __init__(self):
        self.rng = np.random.default_rng(11)

    def at_random(self, x):
        noise = self.rng.integers(0, 1 << 16, np.shape(x)).astype(np.uint64)
        return ((bits_of(x).astype(np.uint64) + noise) & 0xFFFF0000).astype(np.uint32).view(F32).reshape(np.shape(x))

    def weight(self, w, name):
        return bf16(w)

    def mm(self, x, w):
        return self.at_random(bf16(x) @ w.T)

    def store(self, x, name):
        return self.at_random(x)

    def cache(self, x, kind):
        return self.at_random(x)

    def add(self, a, b):
        return self.at_random(a + b)


@policy(
    "Y05",
    "products of float32 as sums of int8 slices, 7 bits each and three of them, by rows with a power of two; pairs of slices that count least "
    "are left out",
    "the Ozaki scheme on integer tensor cores",
)
class Slices(Num):
    def slices(self, x):
        scale = power_of_two(np.abs(x).max(axis=-1, keepdims=True)).astype(F64)
        rest, parts = x / scale, []
        for i in (1, 2, 3):
            parts.append(np.rint(rest * 2.0 ** (7 * i)) / 2.0 ** (7 * i))
            rest = rest - parts[-1]
        return scale, parts

    def mm(self, x, w):
        (a, xs), (b, ws) = self.slices(x), self.slices(w)
        y = sum(xs[i] @ ws[j].T for i in range(3) for j in range(3) if i + j <= 2)
        return (y * a * b.T).astype(F32)


@policy(
    "Y06",
    "one level of Strassen's algorithm in float32: seven products of sums of quarters",
    "fast matrix multiplication in libraries and compilers",
)
class Strassen(Num):
    def mm(self, x, w):
        t, m, n = len(x), x.shape[1], len(w)
        a, b = np.pad(x, ((0, t % 2), (0, m % 2))), np.pad(w, ((0, n % 2), (0, m % 2))).T
        (a11, a12), (a21, a22) = (np.split(r, 2, axis=1) for r in np.split(a, 2))
        (b11, b12), (b21, b22) = (np.split(r, 2, axis=1) for r in np.split(b, 2))
        p1, p2, p3 = (a11 + a22) @ (b11 + b22), (a21 + a22) @ b11, a11 @ (b12 - b22)
        p4, p5 = a22 @ (b21 - b11), (a11 + a12) @ b22
        p6, p7 = (a21 - a11) @ (b11 + b12), (a12 - a22) @ (b21 + b22)
        return np.block([[p1 + p4 - p5 + p7, p3 + p5], [p2 + p4, p1 - p2 + p3 + p6]])[:t, :n].astype(F32)


@policy(
    "Y07",
    "bfloat16 inputs; eight products at a time are added exactly to the float32 sum, which is then cut, never rounded up",
    "the accumulators of matrix units",
)
class CutSums(Num):
    def dots(self, x, w):  # [..., T, M], [..., N, M]
        y = np.zeros((*x.shape[:-1], w.shape[-2]), F32)
        x, w = bf16(x).astype(F64), bf16(w).astype(F64)
        for i in range(0, x.shape[-1], 8):
            y = toward_zero(y + x[..., i : i + 8] @ w[..., i : i + 8].swapaxes(-1, -2))
        return y

    def mm(self, x, w):
        return self.dots(x, w)

    def qk(self, q, k):
        return self.dots(q, k)

    def pv(self, p, v):
        return self.dots(p, v.swapaxes(1, 2))


@policy(
    "Y08",
    "MXFP8: E4M3 with a power of two for each 16 numbers, rounded up, of inputs and of weights",
    "the microscaling formats of the OCP (32 numbers there)",
)
class Microscaling(Num):
    def blocks(self, b):
        scale = power_of_two(np.abs(b).max(axis=-1, keepdims=True) / F32(448))
        return e4m3(b / scale) * scale

    def weight(self, w, name):
        return by_block(w, 16, self.blocks)

    def lin_in(self, x, name):
        return by_block(x, 16, self.blocks)


@policy(
    "Y09",
    "block floating point: eight numbers share an exponent and keep 8 bits each with their sign, inputs as well as weights; results bfloat16",
    "AMD's NPU (BFP16)",
)
class SharedExponent(Num):
    def blocks(self, b):
        unit = power_of_two(np.abs(b).max(axis=-1, keepdims=True)) / F32(128)
        return np.clip(np.rint(b / unit), -128, 127) * unit

    def weight(self, w, name):
        return by_block(w, 8, self.blocks)

    def lin_in(self, x, name):
        return by_block(x, 8, self.blocks)

    def mm(self, x, w):
        return bf16(x @ w.T)


@policy(
    "Y10",
    "two ranks: their parts of attention's output and of down are sent as int8 with a float16 scale for 16 numbers, and added in float16",
    "quantised all-reduce (QuickReduce)",
)
class QuantisedReduce(Num):
    name = ""

    def lin_in(self, x, name):
        self.name = name
        return x

    def mm(self, x, w):
        if not self.name.endswith(("attn_output.weight", "ffn_down.weight")):
            return x @ w.T
        half = x.shape[-1] // 2
        first, second = (by_block(x[:, s] @ w[:, s].T, 16, int8) for s in (slice(half), slice(half, None)))
        return f16(f16(first) + f16(second))


# --- phones and NPUs --------------------------------------------------------------------------------------------------------------------


@policy(
    "Y11",
    "fixed point with powers of two: weights int8 by row, inputs and results int16 by tensor, rounded half up; sums are exact, probabilities have "
    "16 bits",
    "integer NPUs with shifts for scales",
)
class FixedPoint(Num):
    def weight(self, w, name):
        return fixed(w, 8, -1)

    def lin_in(self, x, name):
        return fixed(x, 16)

    def mm(self, x, w):
        return (x.astype(F64) @ w.T.astype(F64)).astype(F32)

    def store(self, x, name):
        return fixed(x, 16)

    def cache(self, x, kind):
        return fixed(x, 16)

    def sin_cos(self, a):
        return tuple((np.floor(f(a) * 32767 + 0.5) / 32767).astype(F32) for f in (np.sin, np.cos))

    def softmax(self, s):
        return (np.floor(super().softmax(s).astype(F64) * 65536 + 0.5) / 65536).astype(F32)


@policy(
    "Y12",
    "float16 throughout, products too, and sums as a tree of float16; norms divide squares by the largest one first",
    "the neural engine of a phone",
)
class HalfTree(Num):
    def weight(self, w, name):
        return f16(w)

    def vector(self, x, name):
        return f16(x)

    def mm(self, x, w):
        return half_tree(f16(f16(x)[:, None] * w))

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)

    def qk(self, q, k):
        return half_tree(f16(f16(q)[:, :, None] * f16(k)[:, None]))

    def pv(self, p, v):
        return half_tree(f16(f16(p)[:, :, None] * f16(v).swapaxes(1, 2)[:, None]))

    def mean(self, x):
        most = np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-20))
        return half_tree(f16(x / most))[..., None] / F32(x.shape[-1]) * most

    def total(self, x):
        return half_tree(f16(x))[..., None]

    def exp(self, x):
        return f16(np.exp(f16(x)))

    def add(self, a, b):
        return f16(a + b)


@policy(
    "Y13",
    "exponentials from a table of 32 powers of two between 1 and 2, in float16, with a line between two; the sigmoid from a table of 256 steps "
    "from -8 to 8, which is 0 and 1 outside",
    "lookup tables of NPUs and DSPs",
)
class Tables(Num):
    def exp(self, x):
        y = np.maximum(x * F32(math.log2(math.e)), F32(-126))
        whole = np.floor(y)
        at = (y - whole) * F32(32)
        i = np.minimum(at.astype(np.int64), 31)
        table = f16(np.exp2(np.arange(33) / 32))
        return np.where(np.isneginf(x), F32(0), np.ldexp(table[i] + (table[i + 1] - table[i]) * (at - i), whole.astype(np.int64))).astype(F32)

    def sigmoid(self, x):
        table = (1 / (1 + np.exp(-np.linspace(-8, 8, 257)))).astype(F32)
        at = np.clip((x + F32(8)) * F32(16), 0, 256)
        i = np.minimum(at.astype(np.int64), 255)
        y = table[i] + (table[i + 1] - table[i]) * (at - i)
        return np.where(x < -8, F32(0), np.where(x > 8, F32(1), y)).astype(F32)


@policy(
    "Y14",
    "reciprocals and reciprocal roots from an estimate of 8 bits and one Newton step",
    "vrecpe and vrsqrte of NEON",
)
class Estimates(Num):
    def reciprocal(self, x):
        y = to_bits(F32(1) / x, 8)
        return y * (F32(2) - x * y)

    def rsqrt(self, x):
        y = to_bits(F32(1) / np.sqrt(x), 8)
        return y * (F32(1.5) - F32(0.5) * x * y * y)

    def softmax(self, s):
        e = self.exp(s - s.max(axis=-1, keepdims=True))
        return e * self.reciprocal(self.total(e))

    def sigmoid(self, x):
        return self.reciprocal(F32(1) + self.exp(np.minimum(-x, F32(80))))


@policy(
    "Y15",
    "RoPE by a counter: angles are turns of 16 bits, and sine and cosine come from a table of a quarter turn in 256 steps with a line between two, "
    "in float16",
    "direct digital synthesis in DSPs",
)
class Counter(Num):
    def sin_cos(self, a):
        turns = np.rint(a / (2 * math.pi) * 65536).astype(np.int64)
        return self.sine(turns), self.sine(turns + 16384)

    def sine(self, turns):
        quarter, inside = turns >> 14 & 3, turns & 16383
        inside = np.where(quarter & 1, 16384 - inside, inside)
        table = np.sin(np.arange(258) * math.pi / 512)
        i, rest = inside >> 6, (inside & 63) / 64
        y = table[i] + (table[i + 1] - table[i]) * rest
        return f16(np.where(quarter >= 2, -y, y))


# --- attention --------------------------------------------------------------------------------------------------------------------------


@policy(
    "Y16",
    "probabilities as the exponential of log-probabilities, which are bfloat16",
    "log-softmax kernels in bfloat16",
)
class LogSoftmax(Num):
    def softmax(self, s):
        most = s.max(axis=-1, keepdims=True)
        logs = bf16(s - most - np.log(self.total(self.exp(s - most))))
        return bf16(self.exp(logs))


@policy(
    "Y17",
    "the cache in int8: keys by channel, with a scale for 32 tokens, values by token and head with the least number and a step",
    "caches quantised as in KIVI, with 8 bits",
)
class ChannelCache(Num):
    def cache(self, x, kind):
        if kind == "k":
            return by_block(x, 32, int8, axis=0)
        least = f16(x.min(axis=-1, keepdims=True))
        step = f16(np.maximum(x.max(axis=-1, keepdims=True) - least, F32(1e-5)) / F32(255))
        return np.clip(np.rint((x - least) / step), 0, 255) * step + least


@policy(
    "Y18",
    "the cache has keys of 8 bits by token and head, and values of 4 bits with the least number and a step for 8 channels",
    "caches of mixed widths (q8_0 keys, q4_1 values)",
)
class MixedCache(Num):
    def cache(self, x, kind):
        return int8(x) if kind == "k" else by_block(x, 8, self.four_bits)

    def four_bits(self, b):
        least = f16(b.min(axis=-1, keepdims=True))
        step = f16(np.maximum(b.max(axis=-1, keepdims=True) - least, F32(1e-5)) / F32(15))
        return np.clip(np.rint((b - least) / step), 0, 15) * step + least


@policy(
    "Y19",
    "attention in blocks of 16 keys: exponentials by a polynomial of degree 3, probabilities bfloat16, and the sums are rescaled only where the "
    "largest score has grown by more than a factor of 256",
    "FlashAttention-4",
)
class LazyRescale(Num):
    def exp(self, x):
        y = np.maximum(x * F32(math.log2(math.e)), F32(-126))
        whole = np.floor(y)
        f = y - whole
        p = F32(1) + f * (F32(0.695146143) + f * (F32(0.227564394) + f * F32(0.077119090)))
        return np.where(np.isneginf(x), F32(0), np.ldexp(p, whole.astype(np.int64))).astype(F32)

    def attend(self, engine, q, k, v, visible, n):
        s = engine.cap(engine.scale_scores(self.qk(bf16(q), bf16(k)), n), n)
        s = np.where(visible, s, F32(-np.inf))
        most = np.full((*s.shape[:2], 1), F32(-np.inf))
        y, total = np.zeros((*s.shape[:2], v.shape[-1]), F32), np.zeros_like(most)
        for i in range(0, s.shape[-1], 16):
            part = s[..., i : i + 16]
            top = np.maximum(most, part.max(axis=-1, keepdims=True))
            with np.errstate(invalid="ignore"):
                grown = np.isneginf(most) | (top - most > F32(math.log(256)))
                new = np.where(grown, top, most)
                factor = np.where(np.isneginf(most) | (new == most), np.where(np.isneginf(most), F32(0), F32(1)), self.exp(most - new))
                p = np.where(np.isneginf(part), F32(0), self.exp(part - new))
            y = y * factor + bf16(p) @ bf16(v[:, i : i + 16])
            total, most = total * factor + p.sum(axis=-1, keepdims=True, dtype=F32), new
        return y / total


@policy(
    "Y20",
    "attention with values in FP8 by head, and with probabilities in FP8 before they are divided by their float32 sum; queries and keys bfloat16",
    "FlashAttention-3 in FP8",
)
class Float8Attention(Num):
    def attend(self, engine, q, k, v, visible, n):
        s = engine.cap(engine.scale_scores(self.qk(bf16(q), bf16(k)), n), n)
        s = np.where(visible, s, F32(-np.inf))
        e = self.exp(s - s.max(axis=-1, keepdims=True))
        return self.pv(e4m3(e * F32(256)) / F32(256), fp8_scaled(v, (1, 2))) / self.total(e)
