"""Twenty honest rounding policies: correct engines that only round, as real hardware and kernels do.

POLICIES: id -> record with `what` (one line), `source` (hardware or kernel), `make` (gives an engine.Num).
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


def bits(x):
    return np.ascontiguousarray(x, F32).view(np.uint32)


def bf16(x):  # round to nearest even
    b = bits(x).astype(np.uint64)
    return ((b + 0x7FFF + ((b >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(F32).reshape(np.shape(x))


def f16(x):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(F32)


def f16_rtz(x):  # toward zero
    y = f16(x).astype(np.float16)
    over = np.abs(y.astype(F32)) > np.abs(x)
    return np.where(over, np.nextafter(y, np.float16(0)), y).astype(F32)


def keep_bits(x, n, nearest=True):  # n bits of mantissa after the point; to nearest (ties away) or toward zero
    b, drop = bits(x), 23 - n
    b = b + np.uint32(1 << (drop - 1)) if nearest else b
    return (b & np.uint32(0xFFFFFFFF ^ ((1 << drop) - 1))).view(F32).reshape(np.shape(x))


def small_float(x, mantissa, low, top):  # minifloats: `low` is the exponent of the smallest normal number
    a = np.abs(x).astype(np.float64)
    e = np.maximum(np.floor(np.log2(np.maximum(a, 1e-300))), low)
    step = 2.0 ** (e - mantissa)
    return (np.sign(x) * np.minimum(np.rint(a / step) * step, top)).astype(F32)


def e4m3(x):
    return small_float(x, 3, -6, 448.0)


def e2m1(x):
    return small_float(x, 1, 0, 6.0)


def blocks(x, size, f):  # f([..., size]) on blocks of the last axis; a shorter last block is filled up with zeros
    m = x.shape[-1]
    pad = -m % size
    y = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]).reshape(*x.shape[:-1], -1, size)
    return f(y).reshape(*x.shape[:-1], m + pad)[..., :m].astype(F32)


def amax(x):
    return np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-12))


# --- policies -----------------------------------------------------------------------------------------------------------------------


@policy(
    "R01",
    "all tensors and weights bfloat16, products with float32 sums; each elementwise step rounds again; norm rounded before its weight",
    "PyTorch eager / Hugging Face transformers in bfloat16 on CUDA (LlamaRMSNorm casts before the weight; softmax in float32)",
)
class Eager(Num):
    def weight(self, w, name):
        return bf16(w)

    def vector(self, x, name):
        return x if "rope" in name else bf16(x)

    def mm(self, x, w):
        return bf16(bf16(x) @ w.T)

    def store(self, x, name):
        return x if name == "result_output" else bf16(x)

    def qk(self, q, k):
        return bf16(super().qk(q, k))

    def pv(self, p, v):
        return bf16(super().pv(bf16(p), v))

    def silu(self, x):
        return bf16(super().silu(x))

    def gelu(self, x):
        return bf16(super().gelu(x))

    def add(self, a, b):
        return bf16(a + b)

    def gain(self, y, w):
        return bf16(bf16(y) * bf16(w))

    def sin_cos(self, a):
        return tuple(bf16(x) for x in super().sin_cos(a))


@policy(
    "R02",
    "float16 products whose sums are float16 too: partial sums of 8 products are added up in half precision",
    "cuBLAS HGEMM with CUBLAS_COMPUTE_16F, llama.cpp's CUDA default for F16 weights (GGML_CUDA_FORCE_CUBLAS_COMPUTE_16F)",
)
class HalfSums(Num):
    def weight(self, w, name):
        return f16(w)

    def mm(self, x, w):
        x, total = f16(x), np.zeros((len(x), len(w)), F32)
        for i in range(0, x.shape[1], 8):
            total = f16(total + x[:, i : i + 8] @ w[:, i : i + 8].T)
        return total


@policy(
    "R03",
    "inputs of every product rounded to TF32 (10 bits of mantissa, ties away from zero), float32 sums",
    "NVIDIA Ampere and later tensor cores with allow_tf32 (cvt.rna.tf32.f32)",
)
class TF32(Num):
    def mm(self, x, w):
        return keep_bits(x, 10) @ keep_bits(w, 10).T

    def qk(self, q, k):
        return super().qk(keep_bits(q, 10), keep_bits(k, 10))

    def pv(self, p, v):
        return super().pv(keep_bits(p, 10), keep_bits(v, 10))


@policy(
    "R04",
    "weights FP8 E4M3 with a scale for each matrix, activations FP8 with one for each token; sums keep 13 bits, truncated, every 32 products",
    "Hopper FP8 tensor cores (QGMMA accumulates in about 14 bits), as in TensorRT-LLM and vLLM W8A8-FP8",
)
class FP8(Num):
    def weight(self, w, name):
        if "embd" in name or name.startswith("output"):
            return w
        s = F32(np.abs(w).max() / 448)
        return e4m3(w / s) * s

    def lin_in(self, x, name):
        if "embd" in name or name.startswith("output"):
            return x
        s = amax(x) / F32(448)
        return e4m3(x / s) * s

    def mm(self, x, w):
        total = np.zeros((len(x), len(w)), F32)
        for i in range(0, x.shape[1], 32):
            total = keep_bits(total + x[:, i : i + 32] @ w[:, i : i + 32].T, 13, nearest=False)
        return total


@policy(
    "R05",
    "keys and values in the cache as FP8 E4M3 with the scale 1",
    "vLLM --kv-cache-dtype fp8 without calibrated scales",
)
class CacheFP8(Num):
    def cache(self, x, kind):
        return e4m3(x)


@policy(
    "R06",
    "keys and values in the cache as unsigned 4-bit codes with a float16 scale and zero point for each head and token",
    "LMDeploy TurboMind, quant_policy 4 (asymmetric int4 cache by head)",
)
class CacheInt4(Num):
    def cache(self, x, kind):
        low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
        scale, zero = f16(np.maximum(high - low, F32(1e-6)) / 15), f16(low)
        return np.clip(np.rint((x - zero) / scale), 0, 15).astype(F32) * scale + zero


@policy(
    "R07",
    "inputs of all matrices as int8 codes in blocks of 32 with a float16 scale; keys and values float16",
    "llama.cpp's CPU kernels (quantize_row_q8_0, vec_dot_*_q8_0) with the default F16 cache",
)
class Q8Activations(Num):
    def lin_in(self, x, name):
        def f(b):
            d = amax(b) / F32(127)
            return np.sign(b) * np.floor(np.abs(b) / d + F32(0.5)) * f16(d)

        return blocks(x, 32, f)

    def cache(self, x, kind):
        return f16(x)


@policy(
    "R08",
    "W8A8 integers: weights int8 with a scale for each row, activations int8 with a scale for each token, exact int32 sums, output float16",
    "CUTLASS int8 scaled_mm in vLLM (compressed-tensors W8A8), SmoothQuant kernels",
)
class Int8(Num):
    def mm(self, x, w):
        sx, sw = amax(x) / F32(127), amax(w) / F32(127)
        total = np.rint(x / sx) @ np.rint(w / sw).T
        return f16(total * sx * sw.T)


@policy(
    "R09",
    "NVFP4 products in the layers: E2M1 numbers in blocks of 16 with an E4M3 scale and a float32 scale for the tensor, of weights and activations",
    "NVIDIA Blackwell FP4 tensor cores (TensorRT-LLM, FlashInfer mm_fp4)",
)
class NVFP4(Num):
    def codes(self, x):
        top = F32(max(np.abs(x).max(), 1e-12) / (6 * 448))

        def f(b):
            s = np.maximum(e4m3(amax(b) / (6 * top)), F32(2.0**-9)) * top
            return e2m1(b / s) * s

        return blocks(x, 16, f)

    def weight(self, w, name):
        return self.codes(w) if name.startswith("blk.") else w

    def lin_in(self, x, name):
        return self.codes(x) if name.startswith("blk.") and "gate_inp" not in name else x


@policy(
    "R10",
    "fused attention over tiles of 16 keys: running maximum, 2^x of scores times log2 e, probabilities of a tile rounded to bfloat16 unnormalised",
    "FlashAttention-2 in bfloat16 (queries, keys and values bfloat16, float32 running sums)",
)
class Flash(Num):
    tile, log2e = 16, F32(math.log2(math.e))

    def attend(self, engine, q, k, v, visible, n):
        q, k, v = bf16(q), bf16(k), bf16(v)
        top = np.full((*q.shape[:2], 1), -np.inf, F32)
        total, out = np.zeros_like(top), np.zeros((*q.shape[:2], v.shape[2]), F32)
        for i in range(0, k.shape[1], self.tile):
            s = engine.cap(engine.scale_scores(self.qk(q, k[:, i : i + self.tile]), n), n) * self.log2e
            s = np.where(visible[:, i : i + self.tile], s, F32(-np.inf))
            new = np.maximum(top, s.max(axis=-1, keepdims=True))
            base = np.where(np.isfinite(new), new, F32(0))
            p, shrink = np.exp2(s - base), np.exp2(np.where(np.isfinite(top), top, F32(-np.inf)) - base)
            total, out, top = total * shrink + self.total(p), out * shrink + self.pv(bf16(p), v[:, i : i + self.tile]), new
        return bf16(out / total)


@policy(
    "R11",
    "attention of one token at a time with float16 accumulators: scores, the sum of exponentials and the weighted values are half precision",
    "llama.cpp's CUDA fattn-vec-f16 kernel (half2 accumulators, F16 cache)",
)
class HalfAttention(Num):
    def cache(self, x, kind):
        return f16(x)

    def qk(self, q, k):
        q, total = f16(q), 0
        for i in range(0, q.shape[2], 2):
            total = f16(total + q[..., i : i + 2] @ k[..., i : i + 2].swapaxes(1, 2))
        return total

    def softmax(self, s):
        e = f16(np.exp(s - s.max(axis=-1, keepdims=True)))
        total = np.zeros(e.shape[:-1], F32)
        for i in range(e.shape[-1]):
            total = f16(total + e[..., i])
        self.sum = total[..., None]
        return e if e.ndim == 3 else e / self.sum

    def pv(self, p, v):
        out = 0
        for i in range(v.shape[1]):
            out = f16(out + f16(p[..., i, None] * v[:, None, i]))
        return out / self.sum


@policy(
    "R12",
    "exponentials (softmax, SiLU) by splitting off 2^integer and a polynomial of degree 3 for the fraction",
    "FlashAttention-4 on Blackwell (software exp2 on FMA units, Cody-Waite and a cubic polynomial)",
)
class PolyExp(Num):
    def exp(self, x):
        y = np.maximum(x, F32(-87)) * F32(math.log2(math.e))
        n = np.floor(y)
        f = y - n
        p = F32(1.0) + f * (F32(0.695146143436431884765625) + f * (F32(0.227564394474029541015625) + f * F32(0.077119089663028717041015625)))
        return np.where(x < -87, F32(0), np.ldexp(p, n.astype(np.int32))).astype(F32)


@policy(
    "R13",
    "sigmoid, GELU's tanh and exponentials read from tables of 1024 float16 entries with linear interpolation; reciprocal roots by a table of 12 bits and one Newton step",
    "phone NPUs with table-driven vector units (Hexagon HVX vlut, Ethos-U LUT)",
)
class Tables(Num):
    def table(self, f, x, low, high):
        grid = np.linspace(low, high, 1024)
        return np.interp(np.clip(x, low, high), grid, f16(f(grid).astype(F32))).astype(F32)

    def exp(self, x):  # of numbers up to 0: 2^fraction from a table
        y = x * F32(math.log2(math.e))
        n = np.floor(np.maximum(y, -126))
        return np.where(y < -126, F32(0), np.ldexp(self.table(np.exp2, y - n, 0.0, 1.0), n.astype(np.int32))).astype(F32)

    def sigmoid(self, x):
        return self.table(lambda g: 1 / (1 + np.exp(-g)), x, -12.0, 12.0)

    def gelu(self, x):
        y = self.table(np.tanh, F32(math.sqrt(2 / math.pi)) * (x + F32(0.044715) * x * x * x), -6.0, 6.0)
        return F32(0.5) * x * (F32(1) + y)

    def rsqrt(self, x):
        y = keep_bits(F32(1) / np.sqrt(x), 12)
        return y * (F32(1.5) - F32(0.5) * x * y * y)


@policy(
    "R14",
    "tensors float16, converted from float32 toward zero; float32 inside each kernel",
    "Vulkan and OpenCL drivers of phones whose f32 to f16 conversion truncates (llama.cpp Vulkan f16 stores, Adreno, Mali)",
)
class HalfToZero(Num):
    def weight(self, w, name):
        return f16_rtz(w)

    def store(self, x, name):
        return x if name == "result_output" else f16_rtz(x)

    def cache(self, x, kind):
        return f16_rtz(x)


@policy(
    "R15",
    "tensors bfloat16 by stochastic rounding",
    "AWS Trainium and Inferentia 2 (NEURON_RT_STOCHASTIC_ROUNDING_EN), float32 sums",
)
class Stochastic(Num):
    def __init__(self):
        self.rng = np.random.default_rng(20261129)

    def store(self, x, name):
        if name == "result_output":
            return x
        noise = self.rng.integers(0, 1 << 16, np.shape(x), dtype=np.uint32)
        return ((bits(x) + noise.reshape(bits(x).shape)) & np.uint32(0xFFFF0000)).view(F32).reshape(np.shape(x))


@policy(
    "R16",
    "attention output and down projections summed over 4 ranks: each rank's partial sum is rounded to bfloat16, and so is each addition of the ring",
    "tensor parallelism over 4 GPUs with an NCCL bfloat16 all-reduce (vLLM, TensorRT-LLM, TP=4)",
)
class AllReduce(Num):
    def lin_in(self, x, name):
        self.parallel = "attn_output" in name or "ffn_down" in name
        return x

    def mm(self, x, w):
        if not getattr(self, "parallel", False):
            return bf16(x @ w.T)
        cuts = np.array_split(np.arange(x.shape[1]), 4)
        total = None
        for cut in cuts:
            part = bf16(x[:, cut] @ w[:, cut].T)
            total = part if total is None else bf16(total + part)
        return total


@policy(
    "R17",
    "float16 products in groups of 8, aligned to the largest exponent of the group and the accumulator and truncated at 24 bits before they are added",
    "NVIDIA A100 tensor cores (fused additions without normalisation, truncation of aligned significands; Fasi et al. 2021, arXiv 2512.07004)",
)
class Aligned(Num):
    def weight(self, w, name):
        return f16(w)

    def mm(self, x, w):
        x, total = f16(x), np.zeros((len(x), len(w)))
        for i in range(0, x.shape[1], 8):
            terms = np.concatenate([x[:, None, i : i + 8].astype(np.float64) * w[None, :, i : i + 8], total[..., None]], axis=-1)
            top = np.abs(terms).max(axis=-1, keepdims=True)
            unit = 2.0 ** (np.floor(np.log2(np.maximum(top, 1e-300))) - 23)
            total = (np.trunc(terms / unit) * unit).sum(axis=-1).astype(F32).astype(np.float64)
        return total.astype(F32)


@policy(
    "R18",
    "block floating point: 8 numbers share an exponent and have 8-bit mantissas with sign, in weights and activations of every matrix",
    "AMD XDNA 2 NPU (Ryzen AI), BFP16 (bfp16ebs8) matrix units",
)
class BlockFloat(Num):
    def codes(self, x):
        def f(b):
            unit = 2.0 ** (np.floor(np.log2(amax(b))) - 6)
            return np.clip(np.rint(b / unit), -128, 127) * unit

        return blocks(x, 8, f)

    def weight(self, w, name):
        return w if "token_embd" in name else self.codes(w)

    def lin_in(self, x, name):
        return self.codes(x)


@policy(
    "R19",
    "each stored tensor as unsigned 16-bit codes between its smallest and largest number, weights int8 with a scale for each row",
    "Qualcomm Hexagon HTP (QNN, A16W8)",
)
class A16W8(Num):
    def weight(self, w, name):
        if "embd" in name:
            return w
        s = amax(w) / F32(127)
        return np.rint(w / s) * s

    def store(self, x, name):
        if name.startswith(("result_output", "ffn_moe_weights", "ffn_moe_logits")):
            return x
        low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
        step = max(high - low, 1e-12) / 65535
        zero = round(-low / step)
        return ((np.clip(np.rint(x / step) + zero, 0, 65535) - zero) * step).astype(F32)


@policy(
    "R20",
    "float32 products of two bfloat16 pieces each: high*high + high*low + low*high, without low*low",
    "bf16x3 emulation of float32 (Intel oneMKL float_to_bf16x2, XLA BF16_BF16_F32_X3 on TPU)",
)
class Split(Num):
    def mm(self, x, w):
        xh, wh = bf16(x), bf16(w)
        xl, wl = bf16(x - xh), bf16(w - wh)
        return (xh @ wl.T + xl @ wh.T) + xh @ wh.T

    def qk(self, q, k):
        qh, kh = bf16(q), bf16(k)
        return super().qk(bf16(q - qh), kh) + super().qk(qh, bf16(k - kh)) + super().qk(qh, kh)
