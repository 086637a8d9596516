"""Twenty more honest rounding policies (K01..K20), by a fifth author: correct engines that only round, as CPU kernels, GPUs, NPUs and their
compilers do, in ways that no earlier file of policies has.

POLICIES: id -> record as in policies.py. Sizes of blocks, tiles and ranks are scaled down where the tiny models have fewer numbers than one.
"""

import math
from types import SimpleNamespace

import numpy as np
from engine import F32, Num

POLICIES = {}
F64 = np.float64
STREAM = ("inp_embd", "inp_scaled", "ffn_inp", "l_out")


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


def cut(x, bits):  # keeps `bits` behind the point, drops the others
    return (bits_of(x) & np.uint32(0xFFFFFFFF << (23 - bits) & 0xFFFFFFFF)).view(F32).reshape(np.shape(x))


def small_float(x, bits, least, most):  # `bits` behind the point, exponents from `least` on, saturated
    a = np.abs(x).astype(F64)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(a, 1e-300))), least) - bits)
    return np.clip(np.sign(x) * np.rint(a / step) * step, -most, most).astype(F32)


def e4m3(x):
    return small_float(x, 3, -6, 448)


def largest(x, axis=-1):
    return np.maximum(np.abs(x).max(axis=axis, keepdims=True), F32(1e-10))


def exponent(x):  # of the largest number of a block, as a power of two
    return np.exp2(np.floor(np.log2(largest(x)))).astype(F32)


def by_block(x, size, quantise):  # the last axis in blocks; zeros fill the last one
    m = x.shape[-1]
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], -m % size), F32)], axis=-1)
    return quantise(padded.reshape(*x.shape[:-1], -1, size)).reshape(padded.shape)[..., :m].astype(F32)


def int8(x, axis=-1):
    scale = largest(x, axis) / F32(127)
    return np.clip(np.rint(x / scale), -127, 127) * scale


def between(x, levels):  # codes from the least number to the largest, with a float16 step and least number
    least = f16(x.min(axis=-1, keepdims=True))
    step = f16(np.maximum(x.max(axis=-1, keepdims=True) - least, F32(1e-5)) / F32(levels))
    return np.clip(np.rint((x - least) / step), 0, levels) * step + least


def hadamard(n):
    h = np.ones((1, 1), F32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / F32(math.sqrt(n))


# --- CPU kernels ------------------------------------------------------------------------------------------------------------------------


@policy(
    "K01",
    "all float32 in scalar loops: a product is rounded and then added to one running sum, in the order of the inputs; norms and softmax alike",
    "llama2.c (compiled without fast math and without fused multiply-add)",
)
class Scalar(Num):
    def dots(self, x, w):  # [..., T, M], [..., N, M]
        y = np.zeros((*x.shape[:-1], w.shape[-2]), F32)
        for i in range(x.shape[-1]):
            y += x[..., i, None] * w[..., None, :, i]
        return y

    def mm(self, x, w):
        return self.dots(x, w)

    def qk(self, q, k):
        return self.dots(q, k)

    def pv(self, p, v):
        return self.dots(p, v.swapaxes(1, 2))

    def total(self, x):
        return np.add.accumulate(x, axis=-1, dtype=F32)[..., -1:]

    def mean(self, x):
        return self.total(x) / F32(x.shape[-1])


@policy(
    "K02",
    "float16 dot products in 32 lanes: each lane adds every 32nd product by a fused multiply-add in float16; lanes meet in float16 down to 8, "
    "which are added in float32",
    "ggml_vec_dot_f16 on Armv8.2 with float16 arithmetic (inputs of matrices, queries, probabilities and the cache are float16)",
)
class HalfLanes(Num):
    def dots(self, x, w):
        x, w = (np.pad(f16(a), [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % 32)]).astype(F64) for a in (x, w))
        lanes = np.zeros((*x.shape[:-1], w.shape[-2], 32))
        for i in range(0, x.shape[-1], 32):
            lanes = (lanes + x[..., :, None, i : i + 32] * w[..., None, :, i : i + 32]).astype(np.float16).astype(F64)
        lanes = lanes.astype(F32)
        lanes = f16(lanes[..., :16] + lanes[..., 16:])
        return f16(lanes[..., :8] + lanes[..., 8:]).sum(axis=-1, dtype=F32)

    def weight(self, w, name):
        return f16(w)

    def mm(self, x, w):
        return self.dots(x, w)

    def cache(self, x, kind):
        return f16(x)

    def qk(self, q, k):
        return self.dots(q, k)

    def pv(self, p, v):
        return self.dots(p, v.swapaxes(1, 2))


@policy(
    "K03",
    "bfloat16 matrices and inputs; 16 lanes take pairs of products, the odd one first, each by a fused multiply-add that flushes tiny numbers "
    "to zero; lanes meet by halves",
    "VDPBF16PS of AVX512-BF16 (ggml_vec_dot_bf16, oneDNN)",
)
class PairLanes(Num):
    def weight(self, w, name):
        return bf16(w)

    def mm(self, x, w):
        x, w = (np.pad(bf16(a), ((0, 0), (0, -a.shape[-1] % 32))).astype(F64) for a in (x, w))
        lanes = np.zeros((len(x), len(w), 16))
        for i in range(0, x.shape[-1], 32):
            for j in (i + 1, i):
                lanes = (lanes + x[:, None, j : i + 32 : 2] * w[None, :, j : i + 32 : 2]).astype(F32)
                lanes = np.where(np.abs(lanes) < F32(2.0**-126), F32(0), lanes).astype(F64)
        lanes = lanes.astype(F32)
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        return lanes[..., 0]


@policy(
    "K04",
    "SiLU, GELU and the softmax's exponential come from tables of all float16 numbers: argument and result are float16; all else is float32",
    "ggml before 2024 (ggml_table_silu_f16, ggml_table_gelu_f16, ggml_table_exp_f16)",
)
class HalfTables(Num):
    def softmax(self, s):
        e = f16(np.exp(f16(np.maximum(s - s.max(axis=-1, keepdims=True), F32(-65504)))))
        return (e / e.sum(axis=-1, keepdims=True, dtype=F64)).astype(F32)

    def silu(self, x):
        return f16(super().silu(f16(x)))

    def gelu(self, x):
        return f16(super().gelu(f16(x)))


@policy(
    "K05",
    "each pair's angle is the one before times a float32 constant, in float32 from the position on; squares of the norms are added in float64",
    "ggml's rope on CPUs (theta *= theta_scale) and its ggml_float sums",
)
class AngleChain(Num):
    def sin_cos(self, a):
        moved = a[..., 0] != 0
        if not moved.any() or a.shape[-1] < 2:
            return super().sin_cos(a)
        ratio = a[moved][0, 1] / a[moved][0, 0]
        if np.abs(a[..., 1:] - a[..., :-1] * ratio).max() > 1e-9 * np.abs(a).max():
            return super().sin_cos(a.astype(F32).astype(F64))  # other scalings: one rounding
        angle = a.astype(F32)
        for j in range(1, a.shape[-1]):
            angle[..., j] = angle[..., j - 1] * F32(ratio)
        return np.sin(angle), np.cos(angle)

    def mean(self, x):
        return x.mean(axis=-1, keepdims=True, dtype=F64).astype(F32)


# --- GPUs and servers -------------------------------------------------------------------------------------------------------------------


@policy(
    "K06",
    "calls of more than 8 rows stage inputs and weights as float16 and add in float32; shorter ones multiply float32 inputs; all else float32",
    "llama.cpp's Metal backend (kernel_mul_mm with half tiles beside kernel_mul_mv)",
)
class StagedHalf(Num):
    def mm(self, x, w):
        return f16(x) @ f16(w).T if len(x) > 8 else x @ w.T

    def cache(self, x, kind):
        return f16(x)


@policy(
    "K07",
    "everything that is written is bfloat16 but the stream between layers, which is float32, and so are the sums",
    "residual_in_fp32: mamba-ssm, TensorRT-LLM and servers that keep the residual stream in float32",
)
class FloatStream(Num):
    def weight(self, w, name):
        return bf16(w)

    def vector(self, x, name):
        return bf16(x)

    def lin_in(self, x, name):
        return bf16(x)

    def store(self, x, name):
        return x if name in STREAM else bf16(x)

    def cache(self, x, kind):
        return bf16(x)

    def silu(self, x):
        return bf16(super().silu(x))


@policy(
    "K08",
    "FP8 E4M3 in the layers: a scale for each row of a matrix and one for each token, whole sums in float32, outputs bfloat16; the embedding "
    "and the head are bfloat16",
    "vLLM's FP8_DYNAMIC of llm-compressor (CUTLASS scaled_mm by token and channel)",
)
class TokenChannel8(Num):
    def is_layer(self, name):
        return name.startswith("blk.") and "gate_inp" not in name

    def scaled(self, x):
        scale = largest(x) / F32(448)
        return e4m3(x / scale) * scale

    def weight(self, w, name):
        return self.scaled(w) if self.is_layer(name) else bf16(w)

    def lin_in(self, x, name):
        return self.scaled(bf16(x)) if self.is_layer(name) else bf16(x)

    def mm(self, x, w):
        return bf16(x @ w.T)

    def store(self, x, name):
        return bf16(x)

    def cache(self, x, kind):
        return bf16(x)


@policy(
    "K09",
    "weights of the layers in FP6 (E3M2) with a float16 scale for each row, made when the model is loaded; inputs and outputs float16",
    "FP6-LLM in DeepSpeed and vLLM (deepspeedfp)",
)
class Six(Num):
    def weight(self, w, name):
        if not name.startswith("blk."):
            return f16(w)
        scale = f16(largest(w) / F32(28))
        return small_float(w / scale, 2, -2, 28) * scale

    def lin_in(self, x, name):
        return f16(x)

    def mm(self, x, w):
        return f16(x @ w.T)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)


@policy(
    "K10",
    "float16 with eight ranks: parts of attention's output and of down are float16, are added in float32 by ranks, and rounded once",
    "the one-shot all-reduce of vLLM and TensorRT-LLM (sums in float32 registers)",
)
class OneShot(Num):
    name = ""

    def weight(self, w, name):
        return f16(w)

    def lin_in(self, x, name):
        self.name = name
        return f16(x)

    def mm(self, x, w):
        ranks = 8 if self.name.endswith(("attn_output.weight", "ffn_down.weight")) else 1
        edges = [x.shape[-1] * i // ranks for i in range(ranks + 1)]
        y = np.zeros((len(x), len(w)), F32)
        for a, b in zip(edges, edges[1:]):
            y += f16(x[:, a:b] @ w[:, a:b].T)
        return f16(y)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)


# --- NPUs and phones --------------------------------------------------------------------------------------------------------------------


@policy(
    "K11",
    "weights of the layers in MXFP6 (E2M3, 16 numbers share a power of two), the cache in MXINT8 (16 numbers share one, 6 bits behind the "
    "point); all else is float16 with float32 sums",
    "Qualcomm Cloud AI 100 (mxfp6_matmul and mxint8_kv_cache of efficient-transformers; blocks of 32 there)",
)
class SixAndEight(Num):
    def six(self, b):
        scale = exponent(b) / F32(4)
        return small_float(b / scale, 3, 0, 7.5) * scale

    def eight(self, b):
        scale = exponent(b) / F32(64)
        return np.clip(np.rint(b / scale), -128, 127) * scale

    def weight(self, w, name):
        return by_block(w, 16, self.six) if name.startswith("blk.") else f16(w)

    def lin_in(self, x, name):
        return f16(x)

    def mm(self, x, w):
        return f16(x @ w.T)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return by_block(x, 16, self.eight)


@policy(
    "K12",
    "weights uint8 with a scale and zero point for each row, inputs int8 with a float16 scale for each token and 32 numbers; results float16",
    "OpenVINO on Intel's GPUs (INT8_ASYM weights, dynamic quantisation by groups)",
)
class RowsAndGroups(Num):
    def weight(self, w, name):
        least, most = np.minimum(w.min(axis=-1, keepdims=True), 0), np.maximum(w.max(axis=-1, keepdims=True), 0)
        scale = f16(np.maximum(most - least, F32(1e-6)) / F32(255))
        zero = np.rint(-least / scale)
        return (np.clip(np.rint(w / scale) + zero, 0, 255) - zero) * scale

    def group(self, b):
        scale = f16(np.maximum(largest(b), F32(1e-4)) / F32(127))
        return np.clip(np.rint(b / scale), -128, 127) * scale

    def lin_in(self, x, name):
        return by_block(x, 32, self.group)

    def mm(self, x, w):
        return f16(x @ w.T)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)


@policy(
    "K13",
    "weights int8 with a float32 scale for 16 inputs of a row, activations int8 with one for each token; integers are added within a group, "
    "groups in float32; results float16",
    "W8A8 by groups on phones and boards (RKLLM's w8a8_g128)",
)
class GroupedIntegers(Num):
    def weight(self, w, name):
        return by_block(w, 16, int8)

    def lin_in(self, x, name):
        return int8(x)

    def mm(self, x, w):
        y = np.zeros((len(x), len(w)), F32)
        for i in range(0, x.shape[-1], 16):
            y += (x[:, i : i + 16].astype(F64) @ w[:, i : i + 16].T.astype(F64)).astype(F32)
        return f16(y)


@policy(
    "K14",
    "float16 inputs; a dot product is exact and rounded once, to float32; what is written is float16",
    "Groq's TruePoint (float16 in, sums of 100 bits)",
)
class OnceRounded(Num):
    def dots(self, x, w):
        return (f16(x).astype(F64) @ f16(w).astype(F64)).astype(F32)

    def mm(self, x, w):
        return self.dots(x, w.T)

    def qk(self, q, k):
        return self.dots(q, k.swapaxes(1, 2))

    def pv(self, p, v):
        return self.dots(p, v)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)


@policy(
    "K15",
    "DLFloat16 (6 bits of exponent, 9 behind the point, no denormal numbers, halves rounded up) for all that is read or written; float32 sums "
    "in chunks of 16",
    "IBM's AIU (vLLM on Spyre)",
)
class DeepLearningFloat(Num):
    def dl(self, x):
        m, e = np.frexp(x)
        y = np.ldexp(np.sign(m) * np.floor(np.abs(m) * 1024 + 0.5) / 1024, e)
        return np.where(np.abs(y) < 2.0**-31, 0, y).astype(F32)

    def weight(self, w, name):
        return self.dl(w)

    def vector(self, x, name):
        return self.dl(x)

    def mm(self, x, w):
        x, y = self.dl(x), np.zeros((len(x), len(w)), F32)
        for i in range(0, x.shape[-1], 16):
            y += x[:, i : i + 16] @ w[:, i : i + 16].T
        return self.dl(y)

    def store(self, x, name):
        return self.dl(x)

    def cache(self, x, kind):
        return self.dl(x)

    def softmax(self, s):
        return self.dl(super().softmax(s))

    def add(self, a, b):
        return self.dl(a + b)


@policy(
    "K16",
    "weights as BFP8 (16 numbers share an exponent, with sign and 7 bits), activations bfloat16 of which the multiplier reads 7 bits, the last "
    "one dropped; float32 sums, results bfloat16",
    "Tenstorrent (bfloat8_b weights, HiFi2 with float32 accumulation in tt-transformers)",
)
class TwoPhases(Num):
    def shared(self, b):
        unit = exponent(b) / F32(64)
        return np.clip(np.rint(b / unit), -127, 127) * unit

    def weight(self, w, name):
        return by_block(w, 16, self.shared) if name.startswith("blk.") else bf16(w)

    def mm(self, x, w):
        return bf16(cut(bf16(x), 6) @ w.T)

    def store(self, x, name):
        return bf16(x)

    def cache(self, x, kind):
        return bf16(x)


# --- attention --------------------------------------------------------------------------------------------------------------------------


@policy(
    "K17",
    "attention whose matrix unit hands float16 scores to a float16 softmax: distance to the largest score and exponential are float16, their "
    "sum is float32, the quotient float16; all tensors float16",
    "Ascend's fused attention in its high-performance mode (inner_precise = 1)",
)
class HalfSoftmax(Num):
    def weight(self, w, name):
        return f16(w)

    def lin_in(self, x, name):
        return f16(x)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)

    def attend(self, engine, q, k, v, visible, n):
        s = np.where(visible, f16(engine.cap(engine.scale_scores(self.qk(f16(q), f16(k)), n), n)), F32(-65504))
        e = np.where(visible, f16(np.exp(f16(s - s.max(axis=-1, keepdims=True)))), F32(0))
        return f16(self.pv(f16(e / e.sum(axis=-1, keepdims=True, dtype=F32)), f16(v)))


@policy(
    "K18",
    "attention in two runs, over the first half of the keys and over the rest: each writes a bfloat16 output and a float32 log-sum-exp, and "
    "they are merged to bfloat16",
    "merge_attn_states in vLLM and FlashInfer (cascade attention, shared prefixes, context parallelism)",
)
class Merged(Num):
    def cache(self, x, kind):
        return bf16(x)

    def attend(self, engine, q, k, v, visible, n):
        s = engine.cap(engine.scale_scores(self.qk(bf16(q), bf16(k)), n), n)
        s, half, parts = np.where(visible, s, F32(-np.inf)), s.shape[-1] // 2, []
        for keys in (slice(half), slice(half, None)):
            if s[..., keys].shape[-1]:
                top = np.maximum(s[..., keys].max(axis=-1, keepdims=True), F32(-1e30))
                e = np.exp(s[..., keys] - top)
                total = np.maximum(e.sum(axis=-1, keepdims=True, dtype=F32), F32(1e-30))
                parts.append((bf16(bf16(e) @ bf16(v[:, keys]) / total), top + np.log(total)))
        most = np.maximum.reduce([lse for _, lse in parts])
        weights = [np.exp(lse - most) for _, lse in parts]
        return bf16(sum(y * (w / sum(weights)) for (y, _), w in zip(parts, weights)))


@policy(
    "K19",
    "queries and keys (less their mean over tokens) as int8 with a scale for each token; probabilities of the largest score 1 as FP8 times "
    "448, values as FP8 with a scale for each channel",
    "SageAttention2 (int8 QK, FP8 PV)",
)
class Sage2(Num):
    def cache(self, x, kind):
        return f16(x)

    def attend(self, engine, q, k, v, visible, n):
        mean = k.mean(axis=1, keepdims=True)
        s = self.qk(int8(q), int8(k - mean)) + self.qk(q, mean)  # the mean's share is the same for all keys of a query
        s = np.where(visible, engine.cap(engine.scale_scores(s, n), n), F32(-np.inf))
        e = self.exp(s - s.max(axis=-1, keepdims=True))
        scale = largest(v, 1) / F32(448)
        return self.pv(e4m3(e * F32(448)) / F32(448), e4m3(v / scale) * scale) / self.total(e)


@policy(
    "K20",
    "keys in the cache are turned by a Hadamard matrix and stored by their length and 4 bits for each number (the best 16 levels of a normal "
    "distribution), made as long as before; values have 4 bits between their least and largest number (by token and head)",
    "TurboQuant in vLLM (turboquant_4bit_nc)",
)
class Turbo(Num):
    half = np.array([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326], F32)
    levels = np.concatenate([-half[::-1], half])

    def cache(self, x, kind):
        if kind == "v":
            return between(x, 15)
        width = x.shape[-1]
        turn = hadamard(width) if width & (width - 1) == 0 else np.eye(width, dtype=F32)
        length = f16(np.sqrt((x * x).sum(axis=-1, keepdims=True)))
        unit = x / np.maximum(length, F32(1e-6)) @ turn * F32(math.sqrt(width))
        found = self.levels[np.abs(unit[..., None] - self.levels).argmin(axis=-1)]
        found = found / np.sqrt((found * found).sum(axis=-1, keepdims=True)) * length
        return (found @ turn.T).astype(F32)
