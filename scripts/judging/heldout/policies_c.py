"""Twenty more honest rounding policies (W01..W20), by a third author: correct engines that only round, as hardware, kernels and libraries
do, in ways that are neither in policies.py nor in policies_b.py.

POLICIES: id -> record as in policies.py. Sizes of blocks are scaled down where the tiny models have fewer numbers than a real block.
"""

import math
from types import SimpleNamespace

import numpy as np
from engine import F32, Num

POLICIES = {}


def policy(id, what, source):
    def add(cls):
        POLICIES[id] = SimpleNamespace(id=id, what=what, source=source, make=cls)
        return cls

    return add


# --- number formats ---------------------------------------------------------------------------------------------------------------------


def bf16(x):  # round to nearest even
    b = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    return ((b + 0x7FFF + ((b >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(F32).reshape(np.shape(x))


def f16(x):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(F32)


def small_float(x, bits, least, most):  # `bits` behind the point, exponents from `least` on, saturated
    a = np.abs(x).astype(np.float64)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(a, 1e-300))), least) - bits)
    return np.clip(np.sign(x) * np.rint(a / step) * step, -most, most).astype(F32)


def e4m3(x):
    return small_float(x, 3, -6, 448)


def e5m2(x):
    return small_float(x, 2, -14, 57344)


def e4m3_fnuz(x):  # AMD's: another bias
    return small_float(x, 3, -7, 240)


def int8(x, axis=-1, round_scale=F32):  # symmetric codes times their scale, one for all numbers along `axis`
    scale = round_scale(np.maximum(np.abs(x).max(axis=axis, keepdims=True), F32(1e-10)) / F32(127))
    return np.clip(np.rint(x / scale), -127, 127) * scale


def by_block(x, size, quantise):  # the last axis in blocks; zeros fill the last one
    m = x.shape[-1]
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], -m % size), F32)], axis=-1)
    return quantise(padded.reshape(*x.shape[:-1], -1, size)).reshape(padded.shape)[..., :m].astype(F32)


def f16_scale(s):
    return np.maximum(f16(s), F32(2**-24))


# --- floating point ---------------------------------------------------------------------------------------------------------------------


@policy(
    "W01",
    "each operation in float64, its result rounded to float32 once",
    "reference engines in double precision whose tensors are float32",
)
class Double(Num):
    def mm(self, x, w):
        return (x.astype(np.float64) @ w.T).astype(F32)

    def qk(self, q, k):
        return (q.astype(np.float64) @ k.swapaxes(1, 2)).astype(F32)

    def pv(self, p, v):
        return (p.astype(np.float64) @ v).astype(F32)

    def exp(self, x):
        return np.exp(x.astype(np.float64)).astype(F32)

    def rsqrt(self, x):
        return (1 / np.sqrt(x.astype(np.float64))).astype(F32)

    def mean(self, x):
        return x.mean(axis=-1, keepdims=True, dtype=np.float64).astype(F32)

    def total(self, x):
        return x.sum(axis=-1, keepdims=True, dtype=np.float64).astype(F32)


@policy(
    "W02",
    "all tensors float32; each product, those of attention too, is one pass over inputs rounded to bfloat16, with float32 sums",
    "XLA on TPUs at default precision; oneDNN and Intel AMX with ONEDNN_DEFAULT_FPMATH_MODE=BF16",
)
class OnePass(Num):
    def mm(self, x, w):
        return bf16(x) @ bf16(w).T

    def qk(self, q, k):
        return bf16(q) @ bf16(k).swapaxes(1, 2)

    def pv(self, p, v):
        return bf16(p) @ bf16(v)


@policy(
    "W03",
    "weights, inputs and outputs of matrices are float16, all else is float32",
    "llama.cpp's CUDA backend by cuBLAS (GemmEx with 16F inputs and output, converted back for the next operation)",
)
class HalfGemm(Num):
    def weight(self, w, name):
        return f16(w)

    def mm(self, x, w):
        return f16(f16(x) @ w.T)


@policy(
    "W04",
    "the output of each layer goes to the next device as float16; all else is float32",
    "pipeline stages that send hidden states in half precision (Petals, exo)",
)
class HandedOver(Num):
    def store(self, x, name):
        return f16(x) if name == "l_out" else x


@policy(
    "W05",
    "each float32 row is split into 3 slices of 7 bits with a power of two; products of slices are exact integers, added in float64",
    "Ozaki scheme on int8 tensor cores (ozIMMU, cuBLAS's emulated float32 and float64)",
)
class Ozaki(Num):
    @staticmethod
    def slices(x):  # [n, M] -> scales [n, 1], three times integers [n, M]
        scale = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-30)))
        rest, out = x / scale, []
        for i in (1, 2, 3):
            out.append(np.trunc(rest * 2.0 ** (7 * i)))
            rest = rest - out[-1] * 2.0 ** (-7 * i)
        return scale, out

    def mm(self, x, w):
        (sx, xs), (sw, ws) = self.slices(x.astype(np.float64)), self.slices(w.astype(np.float64))
        pairs = ((i, j) for i in range(3) for j in range(3) if i + j < 3)
        return (sum(xs[i] @ ws[j].T * 2.0 ** (-7 * (i + j + 2)) for i, j in pairs) * sx * sw.T).astype(F32)


@policy(
    "W06",
    "matrices in AMD's FP8 (E4M3 with another bias, at most 240), one scale for a tensor, a power of two, for weights and for a call's "
    "activations; outputs bfloat16",
    "MI300 (float8_e4m3fnuz) with hipBLASLt in vLLM and SGLang",
)
class Fnuz(Num):
    def __init__(self):
        self.layers = False

    @staticmethod
    def scaled(x):
        scale = F32(2.0 ** np.ceil(np.log2(max(np.abs(x).max(), 1e-30) / 240)))
        return e4m3_fnuz(x / scale) * scale

    def weight(self, w, name):
        return self.scaled(w) if name.startswith("blk.") else w

    def lin_in(self, x, name):
        self.layers = name.startswith("blk.")
        return self.scaled(x) if self.layers else x

    def mm(self, x, w):
        return bf16(x @ w.T) if self.layers else x @ w.T


# --- integers ---------------------------------------------------------------------------------------------------------------------------


@policy(
    "W07",
    "inputs of all matrices as int8 codes in blocks of 64 with a float32 step: the number of the largest magnitude becomes -127",
    "ggml's quantize_row_q8_K (there blocks of 256), the partner of K-quants on CPUs",
)
class Q8K(Num):
    def lin_in(self, x, name):
        def quantise(b):
            most = np.take_along_axis(b, np.abs(b).argmax(axis=-1)[..., None], axis=-1)
            inverse = F32(-127) / np.where(most == 0, F32(1), most)
            return np.minimum(np.rint(b * inverse), 127) / inverse

        return by_block(x, 64, quantise)


@policy(
    "W08",
    "weights as int8 codes in blocks of 32 with a float16 scale, made when the model is loaded; activations of matrices float16",
    "weight-only int8: oneDNN and OpenVINO INT8 weight compression, MLX with 8 bits, ggml's load-time Q8_0",
)
class WeightOnly(Num):
    def weight(self, w, name):
        return by_block(w, 32, lambda b: int8(b, round_scale=f16_scale))

    def lin_in(self, x, name):
        return f16(x)


@policy(
    "W09",
    "inputs of matrices and their rows are turned by a Hadamard matrix (of each 32 numbers), then W8A8: a scale for each token and each row",
    "QuaRot and SpinQuant with online rotations",
)
class Rotated(Num):
    def __init__(self):
        h = np.ones((1, 1))
        while len(h) < 32:
            h = np.block([[h, h], [h, -h]])
        self.turn = (h / math.sqrt(32)).astype(F32)

    def turned(self, x):
        m = x.shape[-1]
        return by_block(np.concatenate([x, np.zeros((*x.shape[:-1], -m % 32), F32)], axis=-1), 32, lambda b: b @ self.turn)

    def mm(self, x, w):
        return int8(self.turned(x)) @ int8(self.turned(w)).T


@policy(
    "W10",
    "columns of the inputs that reach 3 are multiplied in float16, all others as int8 with a scale for each token and each row",
    "LLM.int8() in bitsandbytes (there a threshold of 6)",
)
class Outliers(Num):
    def mm(self, x, w):
        out = np.abs(x).max(axis=tuple(range(x.ndim - 1)), initial=0) >= 3
        y = f16(x[..., out]) @ f16(w[:, out]).T
        return f16(y + int8(np.where(out, F32(0), x)) @ int8(np.where(out, F32(0), w)).T)


@policy(
    "W11",
    "attention output and down projections are summed over 2 ranks: partial sums cross as int8 in blocks of 32 with float16 scales, and so "
    "does the sum",
    "quantised two-step all-reduce: QuickReduce in vLLM on ROCm (INT8), flash communication",
)
class QuantisedReduce(Num):
    def __init__(self):
        self.cut = False

    def lin_in(self, x, name):
        self.cut = "attn_output" in name or "ffn_down" in name
        return x

    @staticmethod
    def sent(y):
        return by_block(y, 32, lambda b: int8(b, round_scale=f16_scale))

    def mm(self, x, w):
        if not self.cut:
            return x @ w.T
        half = x.shape[-1] // 2
        return self.sent(self.sent(x[..., :half] @ w[:, :half].T) + self.sent(x[..., half:] @ w[:, half:].T))


@policy(
    "W12",
    "the embedding and the head as int8 with a scale for each row; the layers float32",
    "8-bit embeddings of ExecuTorch; GGUF files with Q8_0 tables beside float layers",
)
class Tables(Num):
    def weight(self, w, name):
        return w if name.startswith("blk.") else int8(w)


# --- attention and cache ----------------------------------------------------------------------------------------------------------------


@policy(
    "W13",
    "keys and values in the cache as FP8 E5M2 without a scale",
    "kv_cache_dtype fp8_e5m2 in vLLM and SGLang",
)
class CacheE5m2(Num):
    def cache(self, x, kind):
        return e5m2(x)


@policy(
    "W14",
    "cache of int8: keys have a scale for each channel and 16 tokens of a call, values one for each token and head; scales float16",
    "keys by channel, values by token, as in KIVI and KVQuant (there with fewer bits)",
)
class CacheByChannel(Num):
    def cache(self, x, kind):
        if kind == "v":
            return int8(x, round_scale=f16_scale).astype(F32)
        return np.concatenate([int8(x[i : i + 16], axis=0, round_scale=f16_scale) for i in range(0, len(x), 16)]).astype(F32)


@policy(
    "W15",
    "keys less their mean over tokens, queries and keys int8 with a scale for each 16 tokens; probabilities and values float16",
    "SageAttention (smoothed keys, int8 QK, float16 PV)",
)
class Sage(Num):
    @staticmethod
    def blocks(x):
        return np.concatenate([int8(x[:, i : i + 16], axis=(1, 2)) for i in range(0, x.shape[1], 16)], axis=1)

    def qk(self, q, k):
        mean = k.mean(axis=1, keepdims=True, dtype=F32)
        return self.blocks(q) @ self.blocks(k - mean).swapaxes(1, 2) + q @ mean.swapaxes(1, 2)

    def pv(self, p, v):
        return f16(f16(p) @ f16(v))


@policy(
    "W16",
    "queries, keys and values as FP8 E4M3 with a scale for each head, probabilities of the largest score 1 as FP8, divided by their "
    "unrounded sum at the end",
    "FlashAttention-3 with FP8, cuDNN's FP8 attention",
)
class Fp8Attention(Num):
    @staticmethod
    def scaled(x):
        scale = np.maximum(np.abs(x).max(axis=(1, 2), keepdims=True), F32(1e-10)) / F32(448)
        return e4m3(x / scale) * scale

    def attend(self, engine, q, k, v, visible, n):
        s = engine.cap(engine.scale_scores(self.scaled(q) @ self.scaled(k).swapaxes(1, 2), n), n)
        s = np.where(visible, s, F32(-np.inf))
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        return (e4m3(e) @ self.scaled(v)) / self.total(e)


# --- functions and sums -----------------------------------------------------------------------------------------------------------------


@policy(
    "W17",
    "tanh by a quotient of polynomials of degree 13 and 6 over a clamped argument, the sigmoid as half of tanh(x / 2) plus one half",
    "Eigen's ptanh, as in TensorFlow and ONNX Runtime (MLAS)",
)
class Rational(Num):
    UP = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08, 1.48572235717979e-05,
          6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
    DOWN = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)

    def tanh(self, x):
        x = np.clip(x, F32(-7.90531110763549805), F32(7.90531110763549805))
        up, down = F32(0) * x, F32(0) * x
        for c in self.UP:
            up = up * (x * x) + F32(c)
        for c in self.DOWN:
            down = down * (x * x) + F32(c)
        return x * up / down

    def sigmoid(self, x):
        return F32(0.5) * self.tanh(F32(0.5) * x) + F32(0.5)


@policy(
    "W18",
    "softmax as the exponential of scores less the logarithm of their sum; the sigmoid from 2^-|x log2 e|, by the sign of its argument",
    "attention kernels that keep only the log-sum-exp of a row (FlashAttention's recomputation, tinygrad's log_softmax), two-sided sigmoids",
)
class LogSumExp(Num):
    def softmax(self, s):
        most = s.max(axis=-1, keepdims=True)
        return np.exp(s - (most + np.log(self.total(np.exp(s - most)))))

    def sigmoid(self, x):
        e = np.exp2(-np.abs(x) * F32(math.log2(math.e)))
        return np.where(x >= 0, F32(1), e) / (F32(1) + e)


@policy(
    "W19",
    "sine and cosine from a quarter wave of 512 steps with linear interpolation, of an angle in turns rounded to float32",
    "table-driven trigonometry of NPUs and DSPs",
)
class QuarterWave(Num):
    TABLE = np.sin(np.arange(514) * (math.pi / 1024)).astype(F32)

    def wave(self, turns):
        quarters = (turns - np.floor(turns)) * F32(4)
        quarter = np.minimum(np.floor(quarters), F32(3))
        place = (quarters - quarter) * F32(512)
        place = np.where(quarter % 2 == 1, F32(512) - place, place)
        i = np.minimum(place.astype(int), 511)
        y = self.TABLE[i] + (place - i) * (self.TABLE[i + 1] - self.TABLE[i])
        return np.where(quarter >= 2, -y, y).astype(F32)

    def sin_cos(self, a):
        turns = (a / (2 * math.pi)).astype(F32)
        return self.wave(turns), self.wave(turns + F32(0.25))


@policy(
    "W20",
    "all float32: 32 lanes take every 32nd product of a row, and their sums meet in a butterfly; norms and softmax likewise",
    "matrix-vector kernels of GPUs by warps and shuffles (llama.cpp's mul_mat_vec, TensorRT-LLM's small-batch GEMV)",
)
class Lanes(Num):
    @staticmethod
    def butterfly(a):  # [..., 32] -> [...]
        while a.shape[-1] > 1:
            half = a.shape[-1] // 2
            a = a[..., :half] + a[..., half:]
        return a[..., 0]

    def lanes(self, x):  # [..., M] -> [..., steps, 32]
        x = np.concatenate([x, np.zeros((*x.shape[:-1], -x.shape[-1] % 32), F32)], axis=-1)
        return x.reshape(*x.shape[:-1], -1, 32)

    def mm(self, x, w):
        xs, ws = self.lanes(x), self.lanes(w)
        acc = F32(0)
        for i in range(xs.shape[-2]):
            acc = acc + xs[..., None, i, :] * ws[:, i, :]
        return self.butterfly(acc)

    def total(self, x):
        acc = F32(0)
        for step in np.moveaxis(self.lanes(x), -2, 0):
            acc = acc + step
        return self.butterfly(acc)[..., None]

    def mean(self, x):
        return self.total(x) / F32(x.shape[-1])
