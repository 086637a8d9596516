"""Fifteen more honest rounding policies (T01..T15), by another author than policies.py's: correct engines that only round, as hardware,
kernels and libraries do.

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


def words(x):
    return np.ascontiguousarray(x, F32).view(np.uint32)


def numbers(bits, like):
    return bits.astype(np.uint32).view(F32).reshape(np.shape(like))


def bf16(x):  # round to nearest even
    b = words(x).astype(np.uint64)
    return numbers((b + 0x7FFF + ((b >> 16) & 1)) & 0xFFFF0000, x)


def bf16_cut(x):  # the low half of the bits is dropped: toward zero
    return numbers(words(x) & np.uint32(0xFFFF0000), x)


def f16(x):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(F32)


def mantissa(x, n):  # n bits behind the point, to nearest
    return numbers((words(x) + np.uint32(1 << (22 - n))) & np.uint32(0xFFFFFFFF ^ ((1 << (23 - n)) - 1)), x)


def to_odd(x):  # float64 -> float32: cut, and the last bit set if anything was lost
    y = x.astype(F32)
    y = np.where(np.abs(y.astype(np.float64)) > np.abs(x), np.nextafter(y, F32(0)), y)
    return np.where(y.astype(np.float64) == x, y, numbers(words(y) | np.uint32(1), y)).astype(F32)


def e4m3(x):
    a = np.abs(x).astype(np.float64)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(a, 1e-300))), -6) - 3)
    return (np.sign(x) * np.minimum(np.rint(a / step) * step, 448.0)).astype(F32)


def largest(x, axis=-1):
    return np.maximum(np.abs(x).max(axis=axis, keepdims=True), F32(1e-12))


def in_blocks(x, size, f):  # f([..., size]) on blocks of the last axis, which is a multiple of size
    return f(x.reshape(*x.shape[:-1], -1, size)).reshape(x.shape).astype(F32)


def in_layers(name):
    return name.startswith("blk.")


# --- policies ---------------------------------------------------------------------------------------------------------------------------


@policy(
    "T01",
    "all tensors and weights float16; products, norms, RoPE and softmax in float32 inside a kernel; the sigmoid of SiLU and its "
    "product half",
    "MLX with a float16 model on Metal (steel GEMM, fast.rms_norm, fast.rope, fast.scaled_dot_product_attention; nn.silu in the "
    "input's type)",
)
class Mlx(Num):
    def weight(self, w, name):
        return f16(w)

    def vector(self, x, name):
        return x if "rope" in name else f16(x)

    def mm(self, x, w):
        return f16(x @ w.T)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)

    def pv(self, p, v):
        return f16(super().pv(p, v))

    def sigmoid(self, x):
        return f16(super().sigmoid(x))

    def silu(self, x):
        return f16(x * self.sigmoid(x))

    def add(self, a, b):
        return f16(a + b)

    def gain(self, y, w):
        return f16(f16(y) * w)


@policy(
    "T02",
    "bfloat16 products cut into 4 parts along their inputs; each part's sum is written to the workspace as bfloat16, and the parts "
    "are added in order",
    "split-K GEMMs with the output's type in the workspace (cuBLAS reduced-precision reductions, allow_bf16_reduced_precision_reduction)",
)
class SplitK(Num):
    def weight(self, w, name):
        return bf16(w)

    def lin_in(self, x, name):
        return bf16(x)

    def mm(self, x, w):
        parts = zip(np.array_split(x, 4, axis=1), np.array_split(w, 4, axis=1))
        return sum((bf16(a @ b.T) for a, b in parts), np.zeros((len(x), len(w)), F32))

    def store(self, x, name):
        return x if name == "result_output" else bf16(x)


@policy(
    "T03",
    "the layers' products in FP8 E4M3: weights with a float32 scale for each square block (32 x 32), activations with one for each "
    "token and 32 numbers; sums go into float32 registers after each block; outputs bfloat16",
    "DeepGEMM, block-scaled FP8 as in DeepSeek-V3 (there 128 x 128 and 1 x 128), vLLM and SGLang",
)
class BlockFp8(Num):
    def weight(self, w, name):
        if not in_layers(name):
            return bf16(w)
        out = np.empty_like(w)
        for i in range(0, w.shape[-2], 32):
            for j in range(0, w.shape[-1], 32):
                block = w[..., i : i + 32, j : j + 32]
                scale = largest(block, (-2, -1)) / F32(448)
                out[..., i : i + 32, j : j + 32] = e4m3(block / scale) * scale
        return out

    def lin_in(self, x, name):
        return in_blocks(x, 32, lambda b: e4m3(b / (largest(b) / F32(448))) * (largest(b) / F32(448))) if in_layers(name) else bf16(x)

    def mm(self, x, w):
        y = np.zeros((len(x), len(w)), F32)
        for k in range(0, x.shape[1], 32):
            y += x[:, k : k + 32] @ w[:, k : k + 32].T
        return y

    def store(self, x, name):
        return x if name == "result_output" else bf16(x)


@policy(
    "T04",
    "activations as asymmetric int8 with a scale and zero point for each token, weights int8 with a scale for each row, exact integer "
    "sums less zero point times the row's sum; all else float32",
    "XNNPACK qd8-f32-qc8w in ExecuTorch and LiteRT (dynamic quantisation)",
)
class Qd8(Num):
    def weight(self, w, name):
        step = largest(w) / F32(127)
        return w if name == "token_embd.weight" else np.rint(w / step) * step

    def lin_in(self, x, name):
        low, high = np.minimum(x.min(axis=-1, keepdims=True), F32(0)), np.maximum(x.max(axis=-1, keepdims=True), F32(0))
        step = np.maximum((high - low) / F32(255), F32(1e-12))
        zero = np.clip(np.rint(F32(-128) - low / step), -128, 127)
        return ((np.clip(np.rint(x / step) + zero, -128, 127) - zero) * step).astype(F32)

    def mm(self, x, w):
        return (x.astype(np.float64) @ w.T.astype(np.float64)).astype(F32)


@policy(
    "T05",
    "bfloat16 inputs; the sum of each two products, and its addition to the accumulator, are rounded to odd; tiny numbers become zero",
    "Arm BFDOT and BFMMLA (Neoverse V1, N2; FEAT_BF16 without EBF16), as in oneDNN with Arm Compute Library and KleidiAI",
)
class Bfmmla(Num):
    def weight(self, w, name):
        return bf16(w)

    def lin_in(self, x, name):
        return bf16(x)

    def mm(self, x, w):
        y, a, b = np.zeros((len(x), len(w))), x.astype(np.float64), w.astype(np.float64)
        for k in range(0, x.shape[1], 2):
            pair = to_odd(a[:, k : k + 2] @ b[:, k : k + 2].T).astype(np.float64)
            y = to_odd(y + pair).astype(np.float64)
        return np.where(np.abs(y) < 2.0**-126, 0, y).astype(F32)


@policy(
    "T06",
    "fast functions: 2^x of x times log2 e, reciprocal for division, tanh with 11 bits, sine and cosine with an absolute error of "
    "2^-21 behind a float32 range reduction, denormal numbers become zero; sums over 32 lanes and then a tree",
    "CUDA with --use_fast_math (ex2.approx.ftz, rcp.approx, tanh.approx.f32, sin.approx)",
)
class FastMath(Num):
    @staticmethod
    def flush(x):
        return np.where(np.abs(x) < F32(2.0**-126), F32(0), x).astype(F32)

    def exp(self, x):
        return self.flush(mantissa(np.exp2(x * F32(math.log2(math.e))), 22))

    def tanh(self, x):
        return mantissa(super().tanh(x), 11)

    def rsqrt(self, x):
        return mantissa(super().rsqrt(x), 22)

    def sin_cos(self, a):
        turns = a.astype(F32) * F32(1 / (2 * math.pi))
        rest = ((turns - np.rint(turns)) * F32(2 * math.pi)).astype(np.float64)
        return tuple((np.rint(f(rest) * 2.0**21) / 2.0**21).astype(F32) for f in (np.sin, np.cos))

    def sigmoid(self, x):
        with np.errstate(over="ignore"):
            return mantissa(F32(1) / (F32(1) + self.exp(-x)), 22)

    def softmax(self, s):
        e = self.exp(s - s.max(axis=-1, keepdims=True))
        return self.flush(e * mantissa(F32(1) / self.total(e), 22))

    def total(self, x):
        width = -(-x.shape[-1] // 32) * 32
        lanes = np.zeros((*x.shape[:-1], width), F32)
        lanes[..., : x.shape[-1]] = x
        y = np.zeros((*x.shape[:-1], 32), F32)
        for part in np.split(lanes, width // 32, axis=-1):
            y = y + part
        while y.shape[-1] > 1:
            half = y.shape[-1] // 2
            y = y[..., :half] + y[..., half:]
        return y

    def mean(self, x):
        return self.total(x) * F32(1 / x.shape[-1])


@policy(
    "T07",
    "tables of sine and cosine in float16, made from float32 angles; all else float32",
    "ONNX Runtime GenAI and TensorRT-LLM (cos_cache and sin_cache in the model's type), with float32 arithmetic around them",
)
class HalfTables(Num):
    def sin_cos(self, a):
        return tuple(f16(f(a.astype(F32))) for f in (np.sin, np.cos))


@policy(
    "T08",
    "the head alone is half precision: its weights, its input and the logits are float16; layers float32",
    "engines with mixed types (lm_head of an ONNX or Core ML export in float16), GPU samplers that take half logits",
)
class HalfHead(Num):
    def weight(self, w, name):
        return f16(w) if name == "output.weight" else w

    def lin_in(self, x, name):
        return f16(x) if name in ("output.weight", "token_embd.weight") else x

    def store(self, x, name):
        return f16(x) if name == "result_output" else x


@policy(
    "T09",
    "keys in the cache are turned by a Hadamard matrix and stored as 6-bit codes with a float16 scale for each 16 numbers, values as "
    "8-bit codes; queries are turned as well (here the keys are turned back instead, which gives the same products)",
    "ik_llama.cpp with -khad -ctk q6_0 -ctv q8_0 (there blocks of 32)",
)
class HadamardCache(Num):
    def cache(self, x, kind):
        if kind == "v":
            return in_blocks(x, 16, lambda b: np.rint(b / f16(largest(b) / F32(127))) * f16(largest(b) / F32(127)))
        turn = np.ones((1, 1), F32)
        while len(turn) < x.shape[-1]:
            turn = np.block([[turn, turn], [turn, -turn]]) * F32(math.sqrt(0.5))
        return (in_blocks(x @ turn, 16, self.q6) @ turn).astype(F32)

    @staticmethod
    def q6(b):
        most = np.take_along_axis(b, np.abs(b).argmax(axis=-1)[..., None], axis=-1)
        step = np.where(most == 0, F32(1), f16(most / F32(-32)))
        return np.clip(np.rint(b / step), -32, 31) * step


@policy(
    "T10",
    "attention over chunks of 16 keys whose state lies in bfloat16 buffers between chunks: scores, maximum, sum, output and rescaling "
    "factors are rounded each time; products inside a chunk have float32 sums",
    "Tenstorrent TT-Metal SDPA (bfloat16 circular buffers, float32 destination registers)",
)
class ChunkedState(Num):
    def attend(self, engine, q, k, v, visible, n):
        q, k, v = bf16(q), bf16(k), bf16(v)
        s = engine.cap(engine.scale_scores(self.qk(q, k), n), n)
        s = np.where(visible, bf16(s), F32(-np.inf))
        most, total, out = (np.full((*s.shape[:2], 1), x, F32) for x in (-1e30, 0, 0))
        for a in range(0, s.shape[-1], 16):
            part = s[..., a : a + 16]
            now = np.maximum(most, part.max(axis=-1, keepdims=True))
            keep, p = bf16(self.exp(most - now)), bf16(self.exp(part - now))
            total = bf16(total * keep + self.total(p))
            out = bf16(out * keep + self.pv(p, v[:, a : a + 16]))
            most = now
        return bf16(out * bf16(F32(1) / total))


@policy(
    "T11",
    "float16 products by one level of Strassen's algorithm (7 products of half the size, Winograd's form); all its sums are float16",
    "MNN on Armv8.2 (StrassenMatmulComputor, precision low)",
)
class Strassen(Num):
    def weight(self, w, name):
        return f16(w)

    def store(self, x, name):
        return f16(x)

    def mm(self, x, w):
        (t, m), n = x.shape, len(w)
        if m % 2:
            return f16(f16(x) @ w.T)
        a = np.zeros((t + t % 2, m), F32)
        b = np.zeros((m, n + n % 2), F32)
        a[:t], b[:, :n] = f16(x), w.T
        (a11, a12), (a21, a22) = (np.split(rows, 2, axis=1) for rows in np.split(a, 2))
        (b11, b12), (b21, b22) = (np.split(rows, 2, axis=1) for rows in np.split(b, 2))
        s1 = f16(a21 + a22)
        s2 = f16(s1 - a11)
        s3, s4 = f16(a11 - a21), f16(a12 - s2)
        t1 = f16(b12 - b11)
        t2 = f16(b22 - t1)
        t3, t4 = f16(b22 - b12), f16(t2 - b21)
        pairs = ((a11, b11), (a12, b21), (s4, b22), (a22, t4), (s1, t1), (s2, t2), (s3, t3))
        p1, p2, p3, p4, p5, p6, p7 = (f16(left @ right) for left, right in pairs)
        u2 = f16(p1 + p6)
        u3 = f16(u2 + p7)
        u4 = f16(u2 + p5)
        y = np.block([[f16(p1 + p2), f16(u4 + p3)], [f16(u3 - p4), f16(u3 + p5)]])
        return y[:t, :n]


@policy(
    "T12",
    "one scale for a whole tensor: activations as uint8 with a zero point for all tokens of a call, weights int8 with one scale for a "
    "matrix; integer sums, all else float32",
    "ONNX Runtime quantize_dynamic (DynamicQuantizeLinear and MatMulInteger, per_channel=False)",
)
class WholeTensor(Num):
    def weight(self, w, name):
        step = largest(w, (-2, -1)) / F32(127)
        return w if name == "token_embd.weight" else np.rint(w / step) * step

    def lin_in(self, x, name):
        low, high = min(x.min(), 0), max(x.max(), 0)
        step = F32(max(high - low, 1e-12) / 255)
        zero = np.clip(np.rint(-low / step), 0, 255)
        return ((np.clip(np.rint(x / step) + zero, 0, 255) - zero) * step).astype(F32)


@policy(
    "T13",
    "bfloat16 by cutting off the low half of a float32: all stored tensors, the cache and the probabilities of attention are rounded "
    "toward zero",
    "Triton's float32 to bfloat16 conversion on AMD GPUs before gfx950, and NPUs that truncate",
)
class Cut(Num):
    def weight(self, w, name):
        return bf16(w)

    def store(self, x, name):
        return x if name == "result_output" else bf16_cut(x)

    def cache(self, x, kind):
        return bf16_cut(x)

    def pv(self, p, v):
        return super().pv(bf16_cut(p), v)


@policy(
    "T14",
    "bfloat16 weights, inputs of products and residual stream; what a kernel's epilogue does (bias, gate, RoPE) sees float32 sums, so "
    "gate, up, queries and branches are never rounded",
    "TensorRT-LLM and FlashInfer with fused epilogues (gated activation in the GEMM, fused add and RMSNorm), bfloat16",
)
class Epilogue(Num):
    def weight(self, w, name):
        return bf16(w)

    def lin_in(self, x, name):
        return bf16(x)

    def store(self, x, name):
        return bf16(x) if name in ("inp_embd", "attn_norm", "ffn_norm", "kqv_out", "ffn_out", "result_norm") else x

    def cache(self, x, kind):
        return bf16(x)

    def add(self, a, b):
        return bf16(a + b)


@policy(
    "T15",
    "MXFP8 products in the layers: E4M3 numbers in blocks of 32 whose scale is a power of two (the exponent of the largest number "
    "less 8, so that the largest may saturate), of weights and activations; head bfloat16",
    "Blackwell and MI350 (OCP microscaling, block-scaled MMA), torchao and TensorRT-LLM",
)
class MxFp8(Num):
    @staticmethod
    def narrow(b):
        scale = F32(2) ** (np.floor(np.log2(largest(b))) - F32(8))
        return e4m3(b / scale) * scale

    def weight(self, w, name):
        return in_blocks(w, 32, self.narrow) if in_layers(name) else bf16(w)

    def lin_in(self, x, name):
        return in_blocks(x, 32, self.narrow) if in_layers(name) else bf16(x)
