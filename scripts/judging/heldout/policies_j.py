"""Twenty more honest rounding policies (QA01..QA20), by a tenth author: correct engines that only round, each as one kernel, library, server,
phone, NPU or memory with arithmetic does that no earlier file of policies has.

POLICIES: id -> record as in policies.py. Sizes of blocks, tiles and groups are scaled down where the tiny models have fewer numbers than one,
and `what` gives the size that is used here. A range that a tool calibrates on a text is that of all calls so far here. GitHub is named without
its host.
"""

from statistics import NormalDist
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


def bf16(x):
    b = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    return ((b + 0x7FFF + (b >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(F32).reshape(np.shape(x))


def bf16_toward_zero(x):
    return (np.ascontiguousarray(x, F32).view(np.uint32) & np.uint32(0xFFFF0000)).view(F32).reshape(np.shape(x))


def f16(x):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(F32)


def power(x):  # the exponent of the leading bit
    return np.floor(np.log2(np.maximum(np.abs(x).astype(F64), 1e-30)))


def small_float(x, bits, least, most):  # `bits` behind the point, exponents from `least` on, saturated
    step = 2.0 ** (np.maximum(power(x), least) - bits)
    return np.clip(np.sign(x) * np.rint(np.abs(x).astype(F64) / step) * step, -most, most).astype(F32)


def e4m3(x):
    return small_float(x, 3, -6, 448)


def e2m1(x):
    return small_float(x, 1, 0, 6)


def e2m3(x):
    return small_float(x, 3, 0, 7.5)


def largest(x, axis=-1):
    return np.maximum(np.abs(x).max(axis=axis, keepdims=True), F32(1e-10))


def padded(x, size):  # the last axis in blocks; zeros fill the last one
    m = x.shape[-1]
    return np.concatenate([x, np.zeros((*x.shape[:-1], -m % size), F32)], axis=-1).reshape(*x.shape[:-1], -1, size)


def by_block(x, size, quantise):
    return quantise(padded(x, size)).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]].astype(F32)


def integers(x, bits, axis=-1, kind=lambda s: s):  # symmetric; kind: of the scale
    most = F32(2 ** (bits - 1) - 1)
    scale = np.maximum(kind(largest(x, axis) / most), F32(2.0**-24))
    return (np.clip(np.rint(x / scale), -most, most) * scale).astype(F32)


def between(x, bits, kind=lambda s: s):  # between the least and the largest number of a row, which both are levels
    least, most = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    step, least = np.maximum(kind((most - least) / F32(2**bits - 1)), F32(2.0**-24)), kind(least)
    return np.clip(np.rint((x - least) / step), 0, 2**bits - 1) * step + least


def mxint8(b):  # a power of two, and two's complement with 6 bits behind the point
    scale = (2.0 ** power(largest(b))).astype(F32)
    return np.clip(np.rint(b / scale * F32(64)), -127, 127) / F32(64) * scale


def scale_of(engine, n):  # the factor of the scores
    return F32(np.ravel(engine.scale_scores(np.ones((1, 1, 1), F32), n))[0])


def scores(engine, q, k, visible, n):
    return np.where(visible, engine.cap(engine.scale_scores(q @ k.swapaxes(1, 2), n), n), F32(-np.inf))


class Bfloat(Num):
    """What servers keep in bfloat16: weights, inputs and results of products, tensors, the cache and probabilities."""

    def weight(self, w, name):
        return bf16(w)

    def vector(self, x, name):
        return bf16(x)

    def lin_in(self, x, name):
        return bf16(x)

    def mm(self, x, w):
        return bf16(x @ w.T)

    def store(self, x, name):
        return bf16(x)

    def cache(self, x, kind):
        return bf16(x)

    def pv(self, p, v):
        return bf16(p) @ v


class Half(Num):
    """The same in float16."""

    def weight(self, w, name):
        return f16(w)

    def vector(self, x, name):
        return f16(x)

    def lin_in(self, x, name):
        return f16(x)

    def mm(self, x, w):
        return f16(x @ w.T)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)

    def pv(self, p, v):
        return f16(p) @ v


# --- weights of few bits ----------------------------------------------------------------------------------------------------------------------


def q4_k(b):  # [..., 4, 16]: scales and minima of 6 bits
    least = np.minimum(b.min(axis=-1, keepdims=True), 0)
    scale = (b.max(axis=-1, keepdims=True) - least) / F32(15)
    d, low = (np.maximum(f16(x.max(axis=-2, keepdims=True) / F32(63)), F32(2.0**-24)) for x in (scale, -least))
    scale, least = np.rint(scale / d) * d, np.rint(-least / low) * low
    return np.clip(np.rint((b + least) / np.maximum(scale, F32(1e-20))), 0, 15) * scale - least


def q6_k(b):  # [..., 4, 16]: signed scales of 8 bits
    at = np.abs(b).argmax(axis=-1)[..., None]
    scale = np.take_along_axis(b, at, axis=-1) / F32(-32)
    d = np.maximum(f16(np.abs(scale).max(axis=-2, keepdims=True) / F32(127)), F32(2.0**-24))
    scale = np.rint(scale / d) * d
    scale = np.where(scale == 0, d, scale)
    return np.clip(np.rint(b / scale), -32, 31) * scale


def q8_k(b):  # the number of the largest magnitude becomes -127
    most = np.take_along_axis(b, np.abs(b).argmax(axis=-1)[..., None], axis=-1)
    scale = np.where(most == 0, F32(1), most / F32(-127))
    return np.minimum(np.rint(b / scale), 127) * scale


@policy(
    "QA01",
    "weights as Q4_K in blocks of 64 (4 times 16), but Q6_K for the head and, in the last layer, for values and down; inputs as Q8_K in blocks of "
    "64; queries, probabilities and the cache float16; all else float32",
    "llama.cpp on CPUs with a Q4_K_M file (ggml-org/llama.cpp, ggml/src/ggml-quants.c and src/llama-quant.cpp: use_more_bits; blocks of 256 there, "
    "in 8 times 32 and 16 times 16; scales by the range here and not by a search)",
)
class KQuants(Num):
    def weight(self, w, name):
        more = name == "output.weight" or name.startswith("blk.2.") and ("attn_v" in name or "ffn_down" in name)

        def block(b):
            parts = b.reshape(*b.shape[:-1], 4, 16)
            return (q6_k(parts) if more else q4_k(parts)).reshape(b.shape)

        return by_block(w, 64, block)

    def lin_in(self, x, name):
        return by_block(x, 64, q8_k)

    def cache(self, x, kind):
        return f16(x)

    def qk(self, q, k):
        return f16(q) @ k.swapaxes(1, 2)

    def pv(self, p, v):
        return f16(p) @ v


@policy(
    "QA02",
    "weights of the layers have 4 bits in groups of 32, a bfloat16 step and a zero point that is a bfloat16 number and no whole one, found in 20 "
    "rounds so that few weights are far off; all else is bfloat16",
    "HQQ (mobiusml/hqq, hqq/core/optimize.py: optimize_weights_proximal with lp_norm 0.7, beta 10, kappa 1.01; groups of 64 there)",
)
class HalfQuadratic(Bfloat):
    def weight(self, w, name):
        def group(b):
            least, most = b.min(axis=-1, keepdims=True), b.max(axis=-1, keepdims=True)
            scale = np.minimum(F32(15) / np.maximum(most - least, F32(1e-8)), F32(2e4))
            zero, beta = -least * scale, 10.0
            for _ in range(20):
                code = np.clip(np.rint(b * scale + zero), 0, 15)
                off = b - (code - zero) / scale
                size = np.maximum(np.abs(off), F32(1e-8))
                off = (np.sign(off) * np.maximum(size - F32(1 / beta) * size ** F32(-0.3), 0)).astype(F32)
                zero, beta = (code - (b - off) * scale).mean(axis=-1, keepdims=True, dtype=F32), beta * 1.01
            code = np.clip(np.rint(b * scale + zero), 0, 15)
            return bf16((code - bf16(zero)) * bf16(F32(1) / scale))

        return by_block(bf16(w), 32, group) if name.startswith("blk.") else bf16(w)


@policy(
    "QA03",
    "weights of the layers are divided by the largest of 32 and take the nearest of 16 levels of their row, the means of clusters; levels and scales "
    "are bfloat16, and so is all else",
    "any4 (facebookresearch/any4; arXiv 2507.04610: a table of 16 values for each row, groups of 128 there)",
)
class TableByRow(Bfloat):
    def weight(self, w, name):
        w = bf16(w)
        if not name.startswith("blk."):
            return w
        scale = bf16(largest(padded(w, 32)))
        small = padded(w, 32) / scale
        rows = small.reshape(w.shape[0], -1)
        level = np.linspace(rows.min(axis=1), rows.max(axis=1), 16, axis=1).astype(F32)  # [N, 16]
        for _ in range(20):
            nearest = np.abs(rows[..., None] - level[:, None, :]).argmin(axis=-1)
            chosen = nearest[..., None] == np.arange(16)
            count = chosen.sum(axis=1)
            mean = (rows[..., None] * chosen).sum(axis=1, dtype=F32) / np.maximum(count, 1)
            level = np.where(count > 0, mean, level).astype(F32)
        level = bf16(level)
        nearest = np.abs(rows[..., None] - level[:, None, :]).argmin(axis=-1)
        return bf16(np.take_along_axis(level, nearest, axis=1).reshape(small.shape) * scale).reshape(w.shape[0], -1)[:, : w.shape[1]]


def hadamard(size):
    h = np.ones((1, 1), F32)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return (h * np.random.default_rng(2).choice([-1, 1], size) / np.sqrt(size)).astype(F32)


TURN = hadamard(16)
NORMAL = np.array([3**0.5 * NormalDist().inv_cdf((i + 0.5) / 32) for i in range(32)], F32)


def turned(x, by=TURN.T):  # whole blocks of the last axis
    m = x.shape[-1] // 16 * 16
    return np.concatenate([(x[..., :m].reshape(*x.shape[:-1], -1, 16) @ by).reshape(*x.shape[:-1], m), x[..., m:]], axis=-1).astype(F32)


def turned_back(x):
    return turned(x, TURN)


@policy(
    "QA04",
    "weights of the layers are turned on both sides by Hadamard matrices of 16 with random signs, and take 32 levels of a normal distribution with "
    "a scale for each row; inputs are float16 once they are turned, and results in front of being turned back; all else is float16",
    "ExLlamaV3's EXL3 (turboderp-org/exllamav3, as QTIP, arXiv 2406.11235: Hadamard matrices of 128 there, and a trellis of 4 bits whose error is "
    "about that of 5 bits without one)",
)
class BothSides(Half):
    def weight(self, w, name):
        if not name.startswith("blk."):
            return f16(w)
        x = turned(turned(w.astype(F32)).T).T
        scale = f16(np.sqrt((x * x).mean(axis=1, keepdims=True, dtype=F32)))
        return turned_back(turned_back(NORMAL[np.abs(x[..., None] / scale[..., None] - NORMAL).argmin(axis=-1)] * scale).T).T

    def lin_in(self, x, name):
        return turned_back(f16(turned(f16(x)))) if name.startswith("blk.") else f16(x)

    def mm(self, x, w):
        return f16(turned_back(f16(turned(x @ w.T))))


@policy(
    "QA05",
    "weights of the layers are FP8 (E4M3) with a scale for each row and bfloat16 when they meet bfloat16 inputs; keys and values are FP8 with a "
    "scale for each head, from the range of all calls so far; all else is bfloat16",
    "vLLM's FP8 Marlin on GPUs without FP8 (vllm-project/vllm, quantization/utils/marlin_utils_fp8.py) with a cache whose scales are calibrated by "
    "head (vllm-project/compressed-tensors, strategy attn_head)",
)
class WeightsAlone(Bfloat):
    def __init__(self):
        self.most = {}

    def weight(self, w, name):
        w = bf16(w)
        scale = largest(w) / F32(448)
        return bf16(e4m3(w / scale) * scale) if name.startswith("blk.") else w

    def attend(self, engine, q, k, v, visible, n):
        small = []
        for x, kind in ((k, "k"), (v, "v")):
            most = self.most[n, kind] = np.maximum(self.most.get((n, kind), F32(1e-6)), largest(x, (1, 2)))
            small.append(bf16(e4m3(x * (F32(448) / most)) * (most / F32(448))))
        return bf16(super().attend(engine, bf16(q), *small, visible, n))


@policy(
    "QA06",
    "the feed-forward has weights in MXFP4 and inputs in MXFP6 (E2M3), both in blocks of 32 whose power of two is that of the largest number "
    "once it is rounded to the format's bits; attention, head and all else bfloat16",
    "AMD Quark's w_mxfp4_a_mxfp6_e2m3 on MI355 with attention left out (https://quark.docs.amd.com, OCP MX with the scale mode even; "
    "vllm-project/vllm, quantization/quark/schemes/quark_ocp_mx.py)",
)
class FourAndSix(Bfloat):
    @staticmethod
    def block(b, kind, bits):
        most = largest(b).astype(F64)
        scale = (2.0 ** (power(most + 2.0 ** (power(most) - bits - 1)) - 2)).astype(F32)
        return kind(b / scale) * scale

    def weight(self, w, name):
        return by_block(bf16(w), 32, lambda b: self.block(b, e2m1, 1)) if ".ffn_" in name else bf16(w)

    def lin_in(self, x, name):
        return by_block(bf16(x), 32, lambda b: self.block(b, e2m3, 3)) if ".ffn_" in name else bf16(x)


@policy(
    "QA07",
    "weights and inputs of the layers but the last in NVFP4 (blocks of 16 with an E4M3 scale, and one scale for the tensor); a block's largest "
    "number becomes 6 or 4, whichever gives the smaller error; the last layer, the head and all else bfloat16",
    "Four Over Six (mit-han-lab/fouroversix; arXiv 2512.02010)",
)
class FourOverSix(Bfloat):
    @staticmethod
    def nvfp4(x):
        whole = F32(np.maximum(np.abs(x).max(), 1e-10) / (6 * 256))

        def block(b):
            tries = []
            for most in (6, 4):
                scale = np.maximum(e4m3(largest(b) / F32(most) / whole), F32(2.0**-9)) * whole
                tries.append(e2m1(b / scale) * scale)
            error = [np.square(y - b).sum(axis=-1, keepdims=True) for y in tries]
            return np.where(error[1] < error[0], tries[1], tries[0])

        return by_block(x, 16, block)

    def weight(self, w, name):
        return self.nvfp4(bf16(w)) if name.startswith(("blk.0.", "blk.1.")) else bf16(w)

    def lin_in(self, x, name):
        return self.nvfp4(bf16(x)) if name.startswith(("blk.0.", "blk.1.")) else bf16(x)


# --- attention and caches ---------------------------------------------------------------------------------------------------------------------


@policy(
    "QA08",
    "four ranks hold a quarter of the keys each; each quarter gives a bfloat16 result and a float32 logarithm of its sum, and they are merged in "
    "float32, one after the other, by the sigmoid of the logarithms' difference; all else is bfloat16",
    "ring attention (zhuzilin/ring-flash-attention, ring_flash_attn/utils.py: _update_out_and_lse)",
)
class Ring(Bfloat):
    def attend(self, engine, q, k, v, visible, n):
        s, out, at = scores(engine, bf16(q), k, visible, n), F32(0), F32(-1e30)
        size = -(-k.shape[1] // 4)
        for i in range(0, k.shape[1], size):
            part = s[..., i : i + size]
            top = np.maximum(part.max(axis=-1, keepdims=True), F32(-1e30))
            e = np.exp(part - top)
            total = e.sum(axis=-1, keepdims=True, dtype=F32)
            y = bf16(bf16(e) @ v[:, i : i + size] / np.maximum(total, F32(1e-30)))
            here = np.where(total > 0, top + np.log(np.maximum(total, F32(1e-30))), F32(-1e30)).astype(F32)
            share = F32(1) / (F32(1) + np.exp(np.clip(at - here, -80, 80), dtype=F32))
            new = out - share * (out - y)
            out = np.where(total > 0, new, out).astype(F32)
            at = np.where(total > 0, np.logaddexp(at, here), at).astype(F32)
        return bf16(out)


@policy(
    "QA09",
    "attention in tiles of 16 keys by powers of two; exponentials lose the bits behind bfloat16's, toward zero, where they meet the values, but not "
    "in their sum, and the result loses them likewise; all else is bfloat16 to the nearest",
    "AITER's assembly kernels for MI300 with how_v3_bf16_cvt at its value for rounding toward zero (ROCm/aiter, aiter/ops/mha.py)",
)
class TowardZero(Bfloat):
    def attend(self, engine, q, k, v, visible, n):
        s = scores(engine, bf16(q), k, visible, n) * F32(1.4426950408889634)
        top, total, y = F32(-1e30), F32(0), F32(0)
        for i in range(0, k.shape[1], 16):
            part = s[..., i : i + 16]
            new = np.maximum(top, part.max(axis=-1, keepdims=True))
            e, old = np.exp2(part - new).astype(F32), np.exp2(np.maximum(top - new, F32(-120))).astype(F32)
            total = total * old + e.sum(axis=-1, keepdims=True, dtype=F32)
            y = y * old + bf16_toward_zero(e) @ v[:, i : i + 16]
            top = new
        return bf16_toward_zero(y / total)


def q5_1(b):
    return between(b, 5, kind=f16)


@policy(
    "QA10",
    "keys and values as Q5_1 and queries as 8 bits, all in blocks of 16; a key's least number is multiplied by the unrounded sum of the query's "
    "block, and values are float16 when they are added in float32; matrices have float16 weights and inputs, all else is float32",
    "llama.cpp's CUDA kernel for flash attention with -ctk q5_1 -ctv q5_1 (ggml-org/llama.cpp, ggml/src/ggml-cuda/fattn-common.cuh: "
    "vec_dot_fattn_vec_KQ_q5_1, dequantize_V_q5_1; blocks of 32 there)",
)
class FiveBitCache(Num):
    def weight(self, w, name):
        return f16(w)

    def lin_in(self, x, name):
        return f16(x)

    def attend(self, engine, q, k, v, visible, n):
        q, blocks = q * scale_of(engine, n), padded(k, 16)
        least = f16(blocks.min(axis=-1, keepdims=True))
        codes = (q5_1(blocks) - least).reshape(*k.shape[:-1], -1)[..., : k.shape[-1]]
        sums = padded(q, 16).sum(axis=-1, dtype=F32)
        s = by_block(q, 16, lambda b: integers(b, 8)) @ codes.swapaxes(1, 2) + sums @ least[..., 0].swapaxes(1, 2)
        p = self.softmax(np.where(visible, engine.cap(s, n), F32(-np.inf)))
        return p @ f16(by_block(v, 16, q5_1))


@policy(
    "QA11",
    "weights of the layers have 4 bits between the least and the largest of 32 outputs (for each input), keys and values 4 bits between those of a "
    "token and head; steps and least numbers are float16, and so is all else",
    "FlexGen (FMInference/FlexLLMGen, flexllmgen/compression.py: CompressionConfig with 4 bits, group_dim 0 for weights and 2 for the cache; 64 "
    "there)",
)
class Compressed(Half):
    def weight(self, w, name):
        return f16(by_block(f16(w).T, 32, lambda b: between(b, 4, kind=f16)).T) if name.startswith("blk.") else f16(w)

    def cache(self, x, kind):
        return f16(between(f16(x), 4, kind=f16))


# --- CPUs and GPUs of PCs ---------------------------------------------------------------------------------------------------------------


@policy(
    "QA12",
    "weights of the layers and of the head have 4 bits and a zero point of 4 bits in blocks of 32, inputs 8 bits in blocks of 32; scales are "
    "float32, and so is all else",
    "ONNX Runtime on CPUs, MatMulNBits with accuracy_level 4 (microsoft/onnxruntime, onnxruntime/core/mlas/lib/qnbitgemm.h: SQNBIT_CompInt8)",
)
class Mlas(Num):
    def weight(self, w, name):
        if name == "token_embd.weight":
            return w

        def block(b):
            least, most = np.minimum(b.min(axis=-1, keepdims=True), 0), np.maximum(b.max(axis=-1, keepdims=True), 0)
            step = np.maximum((most - least) / F32(15), F32(1e-20))
            zero = np.clip(np.rint(-least / step), 0, 15)
            return (np.clip(np.rint(b / step) + zero, 0, 15) - zero) * step

        return by_block(w, 32, block)

    def lin_in(self, x, name):
        return by_block(x, 32, lambda b: integers(b, 8))


@policy(
    "QA13",
    "float16 weights; calls of more than 8 rows have float16 inputs and add 16 products at a time to a float16 sum, shorter ones float32 inputs and "
    "sums; scaled queries, keys, values and probabilities are float16, and so is the running sum of weighted values in tiles of 16 keys; all else is "
    "float32",
    "llama.cpp's Vulkan backend with cooperative matrices (ggml-org/llama.cpp, ggml/src/ggml-vulkan/vulkan-shaders/mul_mm.comp with f16acc, "
    "mul_mat_vec.comp up to mul_mat_vec_max_cols, flash_attn_cm1.comp with float16 accumulators)",
)
class CooperativeMatrices(Num):
    def weight(self, w, name):
        return f16(w)

    def mm(self, x, w):
        if len(x) <= 8:
            return x @ w.T
        x, y = f16(x), F32(0)
        for i in range(0, x.shape[1], 16):
            y = f16(y + x[:, i : i + 16] @ w[:, i : i + 16].T)
        return y

    def cache(self, x, kind):
        return f16(x)

    def attend(self, engine, q, k, v, visible, n):
        s = np.where(visible, engine.cap(f16(q * scale_of(engine, n)) @ k.swapaxes(1, 2), n), F32(-np.inf))
        top, total, y = F32(-1e30), F32(0), F32(0)
        for i in range(0, k.shape[1], 16):
            part = s[..., i : i + 16]
            new = np.maximum(top, part.max(axis=-1, keepdims=True))
            e, old = np.exp(part - new), np.exp(np.maximum(top - new, F32(-80)))
            total = total * old + e.sum(axis=-1, keepdims=True, dtype=F32)
            y = f16(f16(y * f16(old)) + f16(e) @ v[:, i : i + 16])
            top = new
        return (y / total).astype(F32)


@policy(
    "QA14",
    "all matrices, the embedding too, and inputs are int8 in groups of 32 with float32 scales; whole sums of a group are multiplied by both "
    "scales and added in float32, in the order of the groups; all else is float32",
    "llama2.c's int8 version (karpathy/llama2.c, runq.c: quantize and matmul with GS; groups of 64 there)",
)
class Groups(Num):
    def weight(self, w, name):
        return by_block(w, 32, lambda b: integers(b, 8))

    def lin_in(self, x, name):
        return by_block(x, 32, lambda b: integers(b, 8))

    def mm(self, x, w):
        y = F32(0)
        for i in range(0, x.shape[1], 32):
            y = y + x[:, i : i + 32] @ w[:, i : i + 32].T
        return y


# --- NPUs, phones and memories with arithmetic ----------------------------------------------------------------------------------------------


@policy(
    "QA15",
    "MXINT8 (32 numbers share a power of two and have 6 bits behind the point) for weights and inputs in the layers, for queries and keys along a "
    "head, and for probabilities and values along the keys; float32 sums, all that is written and the head bfloat16",
    "d-Matrix Corsair's block floating point and the OCP's MXINT8 (d-matrix-ai/dmx-compressor; OCP Microscaling Formats 1.0)",
)
class SharedExponents(Bfloat):
    def weight(self, w, name):
        return by_block(bf16(w), 32, mxint8) if name.startswith("blk.") else bf16(w)

    def lin_in(self, x, name):
        return by_block(bf16(x), 32, mxint8) if name.startswith("blk.") else bf16(x)

    def qk(self, q, k):
        return by_block(bf16(q), 32, mxint8) @ by_block(bf16(k), 32, mxint8).swapaxes(1, 2)

    def pv(self, p, v):
        return by_block(p, 32, mxint8) @ by_block(bf16(v).swapaxes(1, 2), 32, mxint8).swapaxes(1, 2)


@policy(
    "QA16",
    "weights int8 by row and inputs int8 by token; the sum of each 32 products leaves its array through a converter of 10 bits, whose range is "
    "that of the array's sums in the call; these are added in float32 and written as float16; attention, norms and the head are float16",
    "compute in memory with converters (arXiv 2305.10459, IBM's analog in-memory cores; IBM/aihwkit: out_bound and out_res of forward passes; "
    "512 rows and 8 to 10 bits there)",
)
class Converters(Half):
    name = ""

    def weight(self, w, name):
        return integers(f16(w), 8) if name.startswith("blk.") else f16(w)

    def lin_in(self, x, name):
        self.name = name
        return integers(f16(x), 8) if name.startswith("blk.") else f16(x)

    def mm(self, x, w):
        if not self.name.startswith("blk."):
            return f16(x @ w.T)
        y = F32(0)
        for i in range(0, x.shape[1], 32):
            part = x[:, i : i + 32] @ w[:, i : i + 32].T
            step = F32(np.maximum(np.abs(part).max(), 1e-10) / 511)
            y = y + np.rint(part / step) * step
        return f16(y)


@policy(
    "QA17",
    "bfloat16 products, those of attention too: 16 at a time are added as a tree in float32, and their sum to a bfloat16 register; the sigmoid "
    "is a line between two of 256 bfloat16 values from -8 to 8; norms and softmax are float32 inside, and all that is written is bfloat16",
    "SK hynix GDDR6-AiM (ISSCC 2022, paper 11.1, a 1ynm 1.25 V 8Gb 16Gb/s/pin GDDR6-based accelerator-in-memory: 16 bfloat16 multipliers to a "
    "bank, an adder tree, an accumulator, and activation functions by tables with interpolation)",
)
class InMemory(Bfloat):
    @staticmethod
    def added(a, b):  # [..., T, M] @ [..., M, N]
        y = F32(0)
        for i in range(0, a.shape[-1], 16):
            y = bf16(y + a[..., i : i + 16] @ b[..., i : i + 16, :])
        return y

    def mm(self, x, w):
        return self.added(x, w.T)

    def qk(self, q, k):
        return self.added(bf16(q), bf16(k).swapaxes(1, 2))

    def pv(self, p, v):
        return self.added(bf16(p), bf16(v))

    def sigmoid(self, x):
        table = bf16(1 / (1 + np.exp(-np.linspace(-8, 8, 256))))
        at = np.clip((x.astype(F64) + 8) * 255 / 16, 0, 255)
        low = np.minimum(at.astype(int), 254)
        return np.where(x < -8, F32(0), np.where(x > 8, F32(1), bf16(table[low] + (at - low) * (table[low + 1] - table[low])))).astype(F32)


def whole_exp(x):  # a polynomial of degree 2 between two powers of two
    x = np.maximum(x, F32(-40))
    z = np.floor(-x / F32(np.log(2)))
    p = x + z * F32(np.log(2))
    return (F32(0.3585) * (p + F32(1.353)) ** 2 + F32(0.344)) * np.exp2(-z).astype(F32)


@policy(
    "QA18",
    "whole numbers throughout: weights 8 bits by row, inputs of matrices, keys and values 8 bits by token; exponentials are a polynomial of degree 2 "
    "times a power of two, probabilities are cut to 10 bits, and roots are cut to whole numbers of 1/1024; what is written has 16 bits by token",
    "I-BERT's integer-only arithmetic (kssteven418/I-BERT, quant_modules.py: IntSoftmax, IntLayerNorm; arXiv 2101.01321), for language models "
    "with SiLU as in I-LLM (arXiv 2405.17849)",
)
class WholeNumbers(Num):
    def weight(self, w, name):
        return integers(w, 8)

    def lin_in(self, x, name):
        return integers(x, 8)

    def store(self, x, name):
        return integers(x, 16)

    def cache(self, x, kind):
        return integers(x, 8)

    def exp(self, x):
        return whole_exp(x)

    def sigmoid(self, x):
        e = whole_exp(-np.abs(x))
        return (np.where(x > 0, F32(1), e) / (F32(1) + e)).astype(F32)

    def rsqrt(self, x):
        return (F32(1024) / np.maximum(np.floor(np.sqrt(x) * F32(1024)), F32(1))).astype(F32)

    def softmax(self, s):
        e = np.where(np.isfinite(s), whole_exp(s - s.max(axis=-1, keepdims=True)), F32(0))
        return (np.floor(e / e.sum(axis=-1, keepdims=True, dtype=F32) * F32(1024)) / F32(1024)).astype(F32)


@policy(
    "QA19",
    "weights int8 by row; all that is written, inputs of matrices, keys and values have 16 bits by tensor; exponentials are a line between two "
    "of 513 values from -10 to 0, the sigmoid one between two of 256 from 0 to 10.7, in 15 and 16 bits; probabilities have 15 bits",
    "LiteRT's 16x8 quantisation (tensorflow/tensorflow, lite/kernels/internal/reference/softmax.h: SoftmaxInt16 with gen_lut of 513 entries, "
    "logistic.h: sigmoid_table_uint16)",
)
class SixteenByEight(Num):
    @staticmethod
    def whole(x):
        step = F32(np.maximum(np.abs(x).max(), 1e-10) / 32767)
        return np.rint(x / step) * step

    @staticmethod
    def line(x, first, last, table, most):
        at = np.clip((x.astype(F64) - first) / (last - first) * (len(table) - 1), 0, len(table) - 1)
        low = np.minimum(at.astype(int), len(table) - 2)
        return (np.rint(table[low] + (at - low) * (table[low + 1] - table[low])) / most).astype(F32)

    def weight(self, w, name):
        return integers(w, 8)

    def lin_in(self, x, name):
        return self.whole(x)

    def store(self, x, name):
        return self.whole(x)

    def cache(self, x, kind):
        return self.whole(x)

    def exp(self, x):
        return self.line(np.maximum(x, F32(-11)), -10, 0, np.rint(np.exp(np.linspace(-10, 0, 513)) * 32767), 32767)

    def sigmoid(self, x):
        y = self.line(np.abs(x), 0, 10.7, np.rint(65535 / (1 + np.exp(-np.linspace(0, 10.7, 256)))), 65535)
        return np.where(x < 0, F32(1) - y, y)

    def softmax(self, s):
        e = np.where(np.isfinite(s), self.exp(s - s.max(axis=-1, keepdims=True)), F32(0))
        return (np.rint(e / e.sum(axis=-1, keepdims=True, dtype=F32) * F32(32768)) / F32(32768)).astype(F32)


@policy(
    "QA20",
    "weights int8 by row; inputs int8 with one scale, that of 2.5 times the root of their mean square over all calls so far; what is beyond "
    "that is cut off, multiplied in float32 by the same weights, and added; attention, norms, embedding and head float32, the cache float16",
    "llm.npu (UbiquitousLearning/mllm; arXiv 2407.05858: static int8 on the NPU and shadow outliers on the CPU)",
)
class ShadowOutliers(Num):
    def __init__(self):
        self.seen = {}

    def weight(self, w, name):
        return integers(w, 8) if name.startswith("blk.") else w

    def lin_in(self, x, name):
        if not name.startswith("blk."):
            return x
        squares, count = self.seen.get(name, (0.0, 0))
        squares, count = self.seen[name] = squares + float(np.square(x, dtype=F64).sum()), count + x.size
        most = F32(2.5 * max(squares / count, 1e-12) ** 0.5)
        near = np.clip(x, -most, most)
        return (np.rint(near * (F32(127) / most)) * (most / F32(127)) + (x - near)).astype(F32)

    def cache(self, x, kind):
        return f16(x)
