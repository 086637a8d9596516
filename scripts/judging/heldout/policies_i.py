"""Twenty more honest rounding policies (I01..I20), by a ninth author: correct engines that only round, each as one kernel, library, compiler,
phone, NPU or server does that no earlier file of policies has.

POLICIES: id -> record as in policies.py. Sizes of blocks, tiles and groups are scaled down where the tiny models have fewer numbers than one,
and `what` gives the size that is used here. A range that a tool calibrates on a text is that of all calls so far here. GitHub is named without
its host.
"""

import math
from types import SimpleNamespace

import numpy as np
from engine import F32, Num

POLICIES = {}
F64 = np.float64
LAYERS = 3  # of the model these policies are for


def policy(id, what, source):
    def add(cls):
        POLICIES[id] = SimpleNamespace(id=id, what=what, source=source, make=cls)
        return cls

    return add


# --- number formats ---------------------------------------------------------------------------------------------------------------------


def bf16(x):
    b = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    return ((b + 0x7FFF + (b >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(F32).reshape(np.shape(x))


def f16(x):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(F32)


def small_float(x, bits, least, most):  # `bits` behind the point, exponents from `least` on, saturated
    a = np.abs(x).astype(F64)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(a, 1e-300))), least) - bits)
    return np.clip(np.sign(x) * np.rint(a / step) * step, -most, most).astype(F32)


def e4m3(x):
    return small_float(x, 3, -6, 448)


def e2m1(x):
    return small_float(x, 1, 0, 6)


def hif8(x):  # 3 bits behind the point for exponents from -3 to 3, 2 up to 7, 1 up to 15, powers of two down to 2^-22; ties away from zero
    a = np.minimum(np.abs(x).astype(F64), 2.0**15)
    power = np.floor(np.log2(np.maximum(a, 1e-300)))
    far = np.abs(power)
    bits = np.select([far <= 3, far <= 7, far <= 15], [3, 2, 1], 0)
    step = 2.0 ** (np.maximum(power, -22) - bits)
    return (np.sign(x) * np.floor(a / step + 0.5) * step).astype(F32)


def largest(x, axis=-1):
    return np.maximum(np.abs(x).max(axis=axis, keepdims=True), F32(1e-10))


def padded(x, size):  # the last axis in blocks; zeros fill the last one
    m = x.shape[-1]
    return np.concatenate([x, np.zeros((*x.shape[:-1], -m % size), F32)], axis=-1).reshape(*x.shape[:-1], -1, size)


def by_block(x, size, quantise):
    return quantise(padded(x, size)).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]].astype(F32)


def by_square(w, size, quantise):  # the last two axes in squares
    n, m = w.shape[-2:]
    whole = np.zeros((*w.shape[:-2], n + -n % size, m + -m % size), F32)
    whole[..., :n, :m] = w
    rows, columns = whole.shape[-2] // size, whole.shape[-1] // size
    b = whole.reshape(*w.shape[:-2], rows, size, columns, size).swapaxes(-3, -2)
    return quantise(b).swapaxes(-3, -2).reshape(whole.shape)[..., :n, :m].astype(F32)


def integers(x, bits, axis=-1, kind=lambda s: s):  # symmetric; kind: of the scale
    most = F32(2 ** (bits - 1) - 1)
    scale = np.maximum(kind(largest(x, axis) / most), F32(2.0**-24))
    return (np.clip(np.rint(x / scale), -most, most) * scale).astype(F32)


def between(x, bits):  # from the least to the largest number of a row, zero among the levels
    least, most = np.minimum(x.min(axis=-1, keepdims=True), 0), np.maximum(x.max(axis=-1, keepdims=True), 0)
    step = np.maximum((most - least) / F32(2**bits - 1), F32(1e-20))
    zero = np.rint(-least / step)
    return ((np.clip(np.rint(x / step) + zero, 0, 2**bits - 1) - zero) * step).astype(F32)


def q8_0(b):
    return integers(b, 8, kind=f16)


def q4(kind, b):  # 4 bits, zero is code 8; the number of the largest magnitude becomes -8
    scale = kind(np.take_along_axis(b, np.abs(b).argmax(axis=-1)[..., None], axis=-1) / F32(-8))
    scale = np.where(scale == 0, F32(2.0**-24), scale)
    return np.clip(np.rint(b / scale), -8, 7) * scale


def nvfp4(b):  # blocks of 16 numbers
    scale = np.maximum(e4m3(largest(b) / F32(6)), F32(2.0**-9))
    return e2m1(b / scale) * scale


def mxfp(kind, most, b):  # the power of two is rounded up, so that nothing saturates
    scale = 2.0 ** np.ceil(np.log2(largest(b).astype(F64) / most))
    return (kind(b / scale) * scale).astype(F32)


def mxfp4(b):
    return mxfp(e2m1, 6, b)


def mxfp8(b):
    return mxfp(e4m3, 448, b)


def fp8_by(b, axis=-1):  # E4M3 with a scale for each block
    scale = largest(b, axis) / F32(448)
    return e4m3(b / scale) * scale


def scale_of(engine, n):  # the factor of the scores
    return F32(np.ravel(engine.scale_scores(np.ones((1, 1, 1), F32), n))[0])


def exponentials(s, visible):  # of the distance to the largest score
    s = np.where(visible, s, F32(-np.inf))
    return np.exp(s - s.max(axis=-1, keepdims=True)).astype(F32)


def tiles_of(x, size):  # [H, T, K] in tiles of tokens
    return np.split(x, range(size, x.shape[1], size), axis=1)


class Bfloat(Num):
    """What servers keep in bfloat16: weights, inputs and results of products, tensors, the cache and probabilities."""

    name = ""

    def weight(self, w, name):
        return bf16(w)

    def vector(self, x, name):
        return bf16(x)

    def lin_in(self, x, name):
        self.name = name
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
    name = ""

    def weight(self, w, name):
        return f16(w)

    def vector(self, x, name):
        return f16(x)

    def lin_in(self, x, name):
        self.name = name
        return f16(x)

    def mm(self, x, w):
        return f16(x @ w.T)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)

    def pv(self, p, v):
        return f16(p) @ v


class Kept:
    """What a policy keeps of a matrix beside its numbers, by name; mm asks for the rows of one thread after the other."""

    def __init__(self):
        self.kept, self.name, self.row = {}, "", 0

    def keep(self, name, *parts):
        if parts[0].ndim == 2:
            self.kept[name] = parts

    def start(self, name):
        self.name, self.row = name, 0

    def rows(self, w):  # the kept parts of the rows w, or None
        parts = self.kept.get(self.name)
        if parts is None or self.row + len(w) > len(parts[0]):
            return None
        first, self.row = self.row, self.row + len(w)
        if self.row == len(parts[0]):
            self.name = ""
        return tuple(part[first : self.row] for part in parts)


# --- attention --------------------------------------------------------------------------------------------------------------------------


def less_mean(k):  # over all tokens, which softmax does not see
    return k - k.mean(axis=1, keepdims=True, dtype=F32)


def half_registers(engine, q, k, v, visible, n):
    q, k = (np.concatenate([integers(t, 8, axis=(1, 2)) for t in tiles_of(x, 16)], axis=1) for x in (q, k))
    e = exponentials(engine.cap(engine.scale_scores(q @ k.swapaxes(1, 2), n), n), visible)
    scale = largest(v, 1) / F32(2.25)
    p, small, y = e4m3(e * F32(448)), e4m3(v / scale), 0
    for i in range(0, v.shape[1], 64):
        part = f16(p[..., i : i + 32] @ small[:, i : i + 32])
        y = y + f16(part + p[..., i + 32 : i + 64] @ small[:, i + 32 : i + 64])
    return y * scale / F32(448) / e.sum(axis=-1, keepdims=True, dtype=F32)


@policy(
    "I01",
    "attention of the layers between the first and the last in NVFP4 (blocks of 16): queries less their mean over 16 tokens (whose products "
    "with the keys stay bfloat16), keys less their mean, values in blocks of tokens, probabilities of the largest score 1 times 2688, divided "
    "by their unrounded sum; the first and the last layer as in I03; all else is bfloat16",
    "SageAttention3 on Blackwell with SageAttention2++ for the layers at the ends (thu-ml/SageAttention, sageattention3_blackwell: its advice "
    "to use it in some of the layers; arXiv 2505.11594: probabilities in two levels, smoothed queries and keys; 128 tokens to a mean there)",
)
class FourBitAttention(Bfloat):
    def attend(self, engine, q, k, v, visible, n):
        q, k = bf16(q), bf16(less_mean(k))
        if n in (0, LAYERS - 1):
            return bf16(half_registers(engine, q, k, v, visible, n))
        middle = np.concatenate([np.zeros_like(x) + x.mean(axis=1, keepdims=True, dtype=F32) for x in tiles_of(q, 16)], axis=1)
        s = by_block(q - middle, 16, nvfp4) @ by_block(k, 16, nvfp4).swapaxes(1, 2) + bf16(middle) @ k.swapaxes(1, 2)
        e = exponentials(engine.cap(engine.scale_scores(s, n), n), visible)
        p = by_block(e * F32(2688), 16, nvfp4) / F32(2688)
        v = by_block(v.swapaxes(1, 2), 16, nvfp4).swapaxes(1, 2)
        return bf16(p @ v / e.sum(axis=-1, keepdims=True, dtype=F32))


@policy(
    "I02",
    "attention as if each token were decoded: float32 scores, float16 probabilities; 8 products with values at a time are rounded to float16 "
    "and added in two lanes of float16, which are added in float32; each 16 keys give a float16 result, and these are merged in float32; all "
    "else is float16",
    "vLLM's PagedAttention V2 (vllm-project/vllm, csrc/attention/attention_kernels.cuh and dtype_float16.cuh: mul and sum of uint4; partitions "
    "of 512 keys there)",
)
class Paged(Half):
    def attend(self, engine, q, k, v, visible, n):
        s = np.where(visible, engine.cap((f16(q) @ k.swapaxes(1, 2)) * scale_of(engine, n), n), F32(-np.inf))
        tops, totals, parts = [], [], []
        for i in range(0, k.shape[1], 16):
            here = s[..., i : i + 16]
            top = np.maximum(here.max(axis=-1, keepdims=True), F32(-1e30))
            e = np.exp(here - top)
            total = e.sum(axis=-1, keepdims=True, dtype=F32)
            p, y = f16(e / (total + F32(1e-6))), 0
            for j in range(0, p.shape[-1], 8):
                products = f16(p[..., j : j + 8, None] * v[:, None, i + j : i + j + 8])
                lanes = []
                for lane in (products[:, :, 0::2], products[:, :, 1::2]):
                    at = np.zeros(products[:, :, 0].shape, F32)
                    for m in range(lane.shape[2]):
                        at = f16(at + lane[:, :, m])
                    lanes.append(at)
                y = y + (lanes[0] + lanes[1])
            tops, totals, parts = [*tops, top], [*totals, total], [*parts, f16(y)]
        top = np.maximum.reduce(tops)
        weights = [total * np.exp(most - top) for most, total in zip(tops, totals)]
        whole = F32(1) / (sum(weights) + F32(1e-6))
        return f16(sum(part * weight * whole for part, weight in zip(parts, weights)))


@policy(
    "I03",
    "queries and keys (less their mean) int8 with a scale for 16 tokens; probabilities of the largest score 1 are FP8 (E4M3) times 448, values "
    "FP8 up to 2.25 by channel; two times 32 of their products are added in float16, and these sums in float32; all else is float16",
    "SageAttention2++ (thu-ml/SageAttention, sageattn_qk_int8_pv_fp8_cuda with pv_accum_dtype fp32+fp16; arXiv 2505.21136)",
)
class HalfRegisters(Half):
    def attend(self, engine, q, k, v, visible, n):
        return f16(half_registers(engine, f16(q), f16(less_mean(k)), v, visible, n))


# --- weights and their partners -----------------------------------------------------------------------------------------------------------


@policy(
    "I04",
    "attention's matrices are int8 by row with inputs of 8 bits and a zero point for the whole tensor, from the range of all calls so far; "
    "gate, up and down int8 by row with a scale for each token, but down is bfloat16 in the first and in the last layer, and so is the head and "
    "all that is written",
    "vLLM and SGLang on Ascend with msModelSlim's mixed W8A8 "
    "(https://gitcode.com/Ascend/msit/blob/master/msmodelslim/test/smoke/configs/w8a8_per_channel_mix.yaml: per_tensor, symmetric False for "
    "self_attn, per_token for mlp; layers of down_proj that are rolled back)",
)
class StaticAndDynamic(Bfloat):
    def __init__(self):
        self.ranges = {}

    def kind(self, name):
        if not name.startswith("blk."):
            return "plain"
        if ".ffn_" not in name:
            return "static"
        return "plain" if "ffn_down" in name and name.split(".")[1] in ("0", str(LAYERS - 1)) else "dynamic"

    def weight(self, w, name):
        return bf16(w) if self.kind(name) == "plain" else integers(bf16(w), 8)

    def lin_in(self, x, name):
        x, kind = bf16(x), self.kind(name)
        if kind != "static":
            return integers(x, 8) if kind == "dynamic" else x
        least, most = self.ranges.get(name, (F32(0), F32(1e-6)))
        least, most = self.ranges[name] = min(least, x.min()), max(most, x.max())
        step = F32((most - least) / 255)
        zero = np.rint(-128 - least / step)
        return ((np.clip(np.rint(x / step) + zero, -128, 127) - zero) * step).astype(F32)


@policy(
    "I05",
    "weights of the layers and of the head have 4 bits in groups of 32; in calls of 4 rows or more, inputs have 8 bits in blocks of 64 with "
    "halves rounded up and a float16 scale, and each 32 products give a float16 number that is added in float16; shorter calls do so with 8 "
    "products of float16 inputs; scaled queries, scores, also in sums of 4 products, and probabilities are float16, as is all else",
    "ONNX Runtime's WebGPU provider (microsoft/onnxruntime, contrib_ops/webgpu/quantization/dp4a_matmul_nbits.cc: pack4x8snorm, SDP8AI that "
    "returns output_element_t; 128 inputs to a block there)",
)
class WebGpu(Half):
    def weight(self, w, name):
        return f16(w) if name == "token_embd.weight" else f16(by_block(f16(w), 32, lambda b: q4(f16, b)))

    def lin_in(self, x, name):
        def packed(b):
            most = largest(b)
            return np.floor(F32(127) * f16(b / most) + F32(0.5)) * f16(most / F32(127))

        return by_block(f16(x), 64, packed) if len(x) >= 4 else f16(x)

    def mm(self, x, w):
        size, y = 32 if len(x) >= 4 else 8, F32(0)
        for i in range(0, x.shape[1], size):
            y = f16(y + f16(x[:, i : i + size] @ w[:, i : i + size].T))
        return y

    def attend(self, engine, q, k, v, visible, n):
        q, s = f16(f16(q) * f16(scale_of(engine, n))), F32(0)
        for i in range(0, q.shape[-1], 4):
            s = f16(s + f16(q[..., i : i + 4] @ k[..., i : i + 4].swapaxes(1, 2)))
        return f16(self.pv(self.softmax(np.where(visible, engine.cap(s, n), F32(-np.inf))), v))

    def silu(self, x):
        return f16(x * f16(self.sigmoid(x)))


@policy(
    "I06",
    "4-bit weights in groups of 32, whose channels were multiplied by a power of the mean magnitude of their inputs (of 11 powers the one with "
    "the least error in the first call, if it has 8 rows), and inputs divided by it; keys and values int8 with one scale for each layer's keys "
    "and values, from the range of all calls so far; all else is float16",
    "TensorRT-LLM with W4A16_AWQ and an INT8 cache (https://nvidia.github.io/TensorRT-LLM/features/quantization.html; "
    "NVIDIA/TensorRT-Model-Optimizer: awq_lite, pre_quant_scale; groups of 128 there)",
)
class Awq(Kept, Half):
    def __init__(self):
        super().__init__()
        self.factors, self.most = {}, {}

    def weight(self, w, name):
        if name.startswith("blk."):
            self.keep(name, f16(w))
        return f16(w)

    def lin_in(self, x, name):
        self.start(name)
        x = f16(x)
        if name not in self.kept:
            return x
        if name not in self.factors:
            w, best = self.kept[name][0], np.inf
            size = np.abs(x).reshape(-1, x.shape[-1]).mean(axis=0, dtype=F32) + F32(1e-4)
            for power in range(11 if len(x) >= 8 else 1):
                s = size ** F32(power / 10)
                s = f16(s / np.sqrt(s.max() * s.min()))
                small = f16(by_block(w * s, 32, lambda b: integers(b, 4, kind=f16))) / s
                error = np.square(x @ (small - w).T).sum()
                if error < best:
                    best, self.factors[name], self.kept[name] = error, s, (small,)
        return f16(x / self.factors[name]) * self.factors[name]

    def mm(self, x, w):
        rows = self.rows(w)
        return f16(x @ (w if rows is None else rows[0]).T)

    def attend(self, engine, q, k, v, visible, n):
        out = []
        for x, kind in ((k, "k"), (v, "v")):
            most = self.most[n, kind] = max(self.most.get((n, kind), F32(1e-6)), np.abs(x).max())
            out.append(f16(np.clip(np.rint(x * (F32(127) / most)), -128, 127) * (most / F32(127))))
        return f16(super().attend(engine, f16(q), *out, visible, n))


@policy(
    "I07",
    "4-bit weights in groups of 32 (15 steps from the largest magnitude's negative to itself), float16 when they are multiplied; 8 products at "
    "a time are added in two lanes of float16 with fused multiply-adds, whose sum goes into a float32 register; each 32 inputs give a float16 "
    "number that is added to the result in float16 (by atomics); calls of more than 50 rows multiply whole matrices with float32 sums; all "
    "else, the head too, is float16",
    "vLLM's GPTQ kernel from ExLlamaV2 (vllm-project/vllm, csrc/quantization/gptq/q_gemm.cu: dot22_8_f, atomicAdd of half2, MAX_Q_GEMM_ROWS; "
    "128 inputs to a block there; weights to the nearest level here)",
)
class ExLlama(Half):
    def weight(self, w, name):
        def group(b):
            scale = np.maximum(f16(largest(b) * F32(2 / 15)), F32(2.0**-24))
            return f16(np.clip(np.rint(b / scale), -8, 7) * scale)

        return by_block(f16(w), 32, group) if name.startswith("blk.") else f16(w)

    def mm(self, x, w):
        if len(x) > 50 or not self.name.startswith("blk."):
            return f16(x @ w.T)
        a, b, y = padded(x, 32), padded(w, 32), F32(0)  # [T, B, 32], [N, B, 32]
        for i in range(a.shape[1]):
            part = F32(0)
            for j in range(0, 32, 8):
                lanes = [np.zeros((len(x), len(w)), F32)] * 2
                for m in range(8):
                    lanes[m % 2] = f16(lanes[m % 2] + a[:, i, j + m, None] * b[:, i, j + m])
                part = part + (lanes[0] + lanes[1])
            y = f16(y + f16(part))
        return y


@policy(
    "I08",
    "weights, the head's too, have 4 bits between the least and the largest of 32; they are multiplied as bfloat16 numbers, the code less 8 "
    "times a bfloat16 scale plus a bfloat16 middle; sigmoid and gated product are not rounded in between; all else is bfloat16",
    "torchao's int4 weight-only quantisation with tinygemm (pytorch/ao, int4_weight_only; pytorch/pytorch, aten/src/ATen/native/cuda/int4mm.cu: "
    "scale and zero in the floating-point domain)",
)
class TinyGemm(Bfloat):
    def weight(self, w, name):
        if name == "token_embd.weight":
            return bf16(w)

        def group(b):
            least, most = b.min(axis=-1, keepdims=True), b.max(axis=-1, keepdims=True)
            scale = np.maximum(bf16((most - least) / F32(15)), F32(1e-6))
            middle = bf16(least + scale * F32(8))
            return bf16((np.clip(np.rint((b - (middle - scale * F32(8))) / scale), 0, 15) - 8) * scale + middle)

        return by_block(bf16(w), 32, group)


@policy(
    "I09",
    "int8 weights by row without their scale are multiplied by bfloat16 inputs; the result is rounded to bfloat16, multiplied by a bfloat16 "
    "scale, and rounded again; norms are rounded in front of their weights, the sigmoid in front of its product; all else is bfloat16",
    "gpt-fast's int8 weight-only mode without compilation (pytorch-labs/gpt-fast, quantize.py: WeightOnlyInt8Linear, "
    "dynamically_quantize_per_channel with steps of the largest number over 127.5)",
)
class ScaledAfterwards(Kept, Bfloat):
    def weight(self, w, name):
        w = bf16(w)
        if name == "token_embd.weight":
            return w
        scale = np.maximum(bf16(largest(w) / F32(127.5)), F32(2.0**-24))
        self.keep(name, scale)
        return np.clip(np.rint(w / scale), -128, 127) * scale

    def lin_in(self, x, name):
        self.start(name)
        return bf16(x)

    def mm(self, x, w):
        rows = self.rows(w)
        return bf16(x @ w.T) if rows is None else bf16(bf16(x @ (w / rows[0]).T) * rows[0][:, 0])

    def gain(self, y, w):
        return bf16(bf16(y) * w)

    def silu(self, x):
        return bf16(super().silu(x))


@policy(
    "I10",
    "weights as Q4_1 (blocks of 32 with a float16 step and least number), inputs 8 bits in blocks of 32 with a float16 scale; the least numbers "
    "are multiplied by the float16 sum of the inputs as they were before; embedding and head Q8_0; scaled queries, keys, values and "
    "probabilities float16",
    "llama.cpp's CUDA kernels for Q4_1 (ggml-org/llama.cpp, ggml/src/ggml-cuda/vecdotq.cuh: vec_dot_q4_1_q8_1_impl; quantize.cu: ds of Q8_1 "
    "from unrounded sums)",
)
class WithSums(Kept, Num):
    def weight(self, w, name):
        if not name.startswith("blk."):
            return by_block(w, 32, q8_0)
        b = padded(w, 32)
        least, most = b.min(axis=-1, keepdims=True), b.max(axis=-1, keepdims=True)
        step = (most - least) / F32(15)
        code = np.clip(np.floor((b - least) / np.maximum(step, F32(1e-20)) + F32(0.5)), 0, 15)
        scaled, least = code * f16(step), f16(least)
        self.keep(name, scaled.reshape(*w.shape[:-1], -1)[..., : w.shape[-1]], least[..., 0])
        return (scaled + least).reshape(*w.shape[:-1], -1)[..., : w.shape[-1]]

    def lin_in(self, x, name):
        self.start(name)
        return x

    def mm(self, x, w):
        rows, small = self.rows(w), by_block(x, 32, q8_0)
        if rows is None:
            return small @ w.T
        sums = f16(padded(x, 32).sum(axis=-1, dtype=F32))
        return small @ rows[0].T + sums @ rows[1].T

    def cache(self, x, kind):
        return f16(x)

    def attend(self, engine, q, k, v, visible, n):
        s = engine.cap(f16(q * scale_of(engine, n)) @ k.swapaxes(1, 2), n)
        return f16(self.softmax(np.where(visible, s, F32(-np.inf)))) @ v


@policy(
    "I11",
    "the feed-forward has weights of MXFP4 and inputs of MXFP8 (E4M3, its power of two rounded up), both in blocks of 32; gate, up and their "
    "product are float32 until the product becomes MXFP8; attention, head and all else are bfloat16",
    "FlashInfer's kernels for gpt-oss on Blackwell (flashinfer-ai/flashinfer, trtllm_fp4_block_scale_moe with mxfp8_quantize; "
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8 in vLLM)",
)
class FourAndEight(Bfloat):
    fused = ("ffn_gate", "ffn_up", "ffn_out")

    def weight(self, w, name):
        return by_block(bf16(w), 32, mxfp4) if ".ffn_" in name else bf16(w)

    def lin_in(self, x, name):
        self.name = name
        return by_block(x, 32, mxfp8) if ".ffn_" in name else bf16(x)

    def mm(self, x, w):
        y = x @ w.T
        return y if ".ffn_gate" in self.name or ".ffn_up" in self.name else bf16(y)

    def store(self, x, name):
        return x if name in self.fused else bf16(x)


@policy(
    "I12",
    "the feed-forward has 4-bit weights in groups of 32 with a bfloat16 scale and FP8 inputs (E4M3) with one scale, from the range of all calls "
    "so far; attention's matrices are FP8 with a scale for 32 x 32 weights and one for 32 inputs of a token; head and all else bfloat16",
    "SGLang's W4AFp8 (sgl-project/sglang, python/sglang/srt/layers/quantization/w4afp8.py: int4 experts with static FP8 inputs beside "
    "block-wise FP8 layers, as for DeepSeek-R1; 128 there)",
)
class FourAndFloat(Bfloat):
    def __init__(self):
        self.most = {}

    def weight(self, w, name):
        if ".ffn_" in name:
            return by_block(bf16(w), 32, lambda b: integers(b, 4, kind=bf16))
        return by_square(bf16(w), 32, lambda b: fp8_by(b, (-2, -1))) if name.startswith("blk.") else bf16(w)

    def lin_in(self, x, name):
        x = bf16(x)
        if ".ffn_" not in name:
            return by_block(x, 32, fp8_by) if name.startswith("blk.") else x
        most = self.most[name] = max(self.most.get(name, F32(1e-6)), np.abs(x).max())
        return e4m3(x * (F32(448) / most)) * (most / F32(448))


@policy(
    "I13",
    "FP8 weights (E4M3) with a scale for 32 x 32 of them; denormal ones are read as if they had a leading one and the exponent -7; they are "
    "bfloat16 after their scale, when bfloat16 inputs meet them; head and all else bfloat16, softmax and its sum float32",
    "SGLang on CPUs with AMX (sgl-project/sglang, sgl-kernel/csrc/cpu/vec.h: cvt_e4m3_bf16_intrinsic_no_nan under SGLANG_CPU_FP8_CVT_FTZ; "
    "gemm_fp8.cpp; 128 there)",
)
class OnAmx(Bfloat):
    def weight(self, w, name):
        if not name.startswith("blk."):
            return bf16(w)

        def square(b):
            scale = largest(b, (-2, -1)) / F32(448)
            code = e4m3(b / scale)
            a = np.abs(code)
            small = (a > 0) & (a < F32(2.0**-6))
            return bf16(np.where(small, np.sign(code) * (F32(2.0**-7) + a / F32(2)), code) * scale)

        return by_square(bf16(w), 32, square)


@policy(
    "I14",
    "weights int8 by row and inputs int8 by token, in steps of the largest number over 127.5 (so that the last level is cut); keys and values "
    "likewise by token and head; float32 scores and softmax, bfloat16 probabilities; norms are rounded in front of their weights; head and all "
    "else bfloat16",
    "JetStream with MaxText on TPUs, quantization int8 and quantize_kvcache (AI-Hypercomputer/maxtext, inference/kvcache.py: MAX_INT8 = 127.5; "
    "google/aqt: preserve_max_val False)",
)
class Aqt(Bfloat):
    def cut(self, x):
        scale = largest(x) / F32(127.5)
        return np.clip(np.rint(x / scale), -127, 127) * scale

    def weight(self, w, name):
        return self.cut(bf16(w)) if name.startswith("blk.") else bf16(w)

    def lin_in(self, x, name):
        return self.cut(bf16(x)) if name.startswith("blk.") else bf16(x)

    def cache(self, x, kind):
        return bf16(self.cut(bf16(x)))

    def gain(self, y, w):
        return bf16(bf16(y) * w)


@policy(
    "I15",
    "the layers' matrices have 15 levels in groups of 32 with a float16 scale; the division in front of the rounding and all else is float16; "
    "sums of products are float16: 16 at a time, or, for a single row, 8 one after the other in each thread and a tree over the threads",
    "MLC LLM's q4f16_2 (mlc-ai/mlc-llm, python/mlc_llm/quantization/group_quantization.py: max_int_value 7; quantize_embedding and "
    "quantize_final_fc False; apache/tvm's dlight schedules for GEMV and matrix units with float16 results)",
)
class Compiled(Half):
    def weight(self, w, name):
        def group(b):
            scale = np.maximum(f16(largest(b) / F32(7)), F32(2.0**-24))
            return f16((np.clip(np.rint(f16(f16(b / scale) + F32(7))), 0, 14) - 7) * scale)

        return by_block(f16(w), 32, group) if name.startswith("blk.") else f16(w)

    def mm(self, x, w):
        y = F32(0)
        if len(x) > 1:
            for i in range(0, x.shape[1], 16):
                y = f16(y + x[:, i : i + 16] @ w[:, i : i + 16].T)
            return y
        a, b = padded(x, 8), padded(w, 8)
        for i in range(8):
            y = f16(y + a[:, None, :, i] * b[None, :, :, i])  # [1, N, threads]
        while y.shape[-1] > 1:
            if y.shape[-1] % 2:
                y = np.concatenate([y, np.zeros_like(y[..., :1])], axis=-1)
            y = f16(y[..., : y.shape[-1] // 2] + y[..., y.shape[-1] // 2 :])
        return y[..., 0]

    def silu(self, x):
        return f16(x * f16(self.sigmoid(x)))


# --- phones, CPUs and NPUs ----------------------------------------------------------------------------------------------------------------


@policy(
    "I16",
    "all matrices, embedding and head too, have 8 bits by row; inputs are float16 for a single row, but int8 with a float16 scale for each "
    "token in longer calls; all else is float16",
    "Google's ML Drift, the GPU backend of LiteRT (arXiv 2505.00232: the scheme q8, and activations that are quantised in the prefill alone)",
)
class Stages(Half):
    def weight(self, w, name):
        return integers(f16(w), 8)

    def lin_in(self, x, name):
        return integers(f16(x), 8, kind=f16) if len(x) > 1 else f16(x)


@policy(
    "I17",
    "weights as Q8_0 are made int8 by row once more, inputs have 8 bits and a zero point for each token; the cache is float16; in calls of "
    "several rows queries, keys, probabilities and values are rounded to bfloat16 for float32 sums, in single rows to float16; all else is "
    "float32",
    "llama.cpp with KleidiAI on SME2 (ggml-org/llama.cpp, ggml/src/ggml-cpu/kleidiai/kernels.cpp: matmul_clamp_f32_qai8dxp_qsi8cxp for Q8_0, "
    "matmul_clamp_f32_bf16p_bf16p for F16)",
)
class Twice(Num):
    def weight(self, w, name):
        w = by_block(w, 32, q8_0)
        return w if name == "token_embd.weight" else integers(w, 8)

    def lin_in(self, x, name):
        return between(x, 8)

    def cache(self, x, kind):
        return f16(x)

    def qk(self, q, k):
        kind = bf16 if q.shape[1] > 1 else f16
        return kind(q) @ kind(k).swapaxes(1, 2)

    def pv(self, p, v):
        kind = bf16 if p.shape[1] > 1 else f16
        return kind(p) @ kind(v)


@policy(
    "I18",
    "all matrices, embedding and head too, are FP8 with 2 bits behind the point (E5M2) and no scale; the cache is float16; all else is float32",
    "calm (zeux/calm, tools/convert.py: fp8 is torch.float8_e5m2 for each matrix; src/infer.c)",
)
class FiveBitExponents(Num):
    def weight(self, w, name):
        return small_float(w, 2, -14, 57344)

    def cache(self, x, kind):
        return f16(x)


@policy(
    "I19",
    "HiFloat8 for weights and inputs of the layers' matrices, for queries, keys, values and probabilities, without scales: 3 bits behind the "
    "point for exponents from -3 to 3, 2 up to 7 and 1 up to 15 of either sign, ties away from zero; float32 sums, softmax float32, all else "
    "bfloat16",
    "Ascend 950's HiF8 (arXiv 2409.16626; https://gitcode.com/cann/ge/blob/master/base/common/math/hif8_t.cc)",
)
class Tapered(Bfloat):
    def weight(self, w, name):
        return hif8(bf16(w)) if name.startswith("blk.") else bf16(w)

    def lin_in(self, x, name):
        return hif8(bf16(x)) if name.startswith("blk.") else bf16(x)

    def cache(self, x, kind):
        return hif8(bf16(x))

    def qk(self, q, k):
        return hif8(bf16(q)) @ k.swapaxes(1, 2)

    def pv(self, p, v):
        return hif8(p) @ v


def exp_f16(x):  # each step float16: a polynomial of degree 2, nothing below -9.7
    x = np.maximum(x, F32(-20))
    n = np.rint(x * F32(1.4423828125))
    t = f16(f16(x - n * F32(0.693359375)) + n * F32(0.00021231174468994140625))
    p, s = f16(F32(1.013671875) + F32(0.498291015625) * t), np.exp2(n)
    return np.where(x < F32(-9.703125), F32(0), f16(s + p * f16(t * s))).astype(F32)


def running(a, b):  # [..., T, M] @ [..., M, N], one fused multiply-add in float16 after the other
    y = np.zeros((*a.shape[:-1], b.shape[-1]), F32)
    for i in range(a.shape[-1]):
        y = f16(y + a[..., i : i + 1] * b[..., i : i + 1, :])
    return y


@policy(
    "I20",
    "float16 throughout: each product, those of attention too, is added to a float16 sum; exponentials of softmax and sigmoid are a polynomial "
    "of degree 2 whose steps are float16, their sum has 8 lanes of float16; mean of squares, its reciprocal root and the norm's products "
    "float16",
    "XNNPACK with forced float16 in LiteRT (google/XNNPACK, XNN_FLAG_FORCE_FP16_INFERENCE; f16-gemm and "
    "f16-raddstoreexpminusmax-neonfp16arith-rr2-p2, f16-vsigmoid-neonfp16arith-rr2-p2)",
)
class ForcedHalf(Half):
    def mm(self, x, w):
        return running(x, w.T)

    def qk(self, q, k):
        return running(f16(q), f16(k).swapaxes(1, 2))

    def pv(self, p, v):
        return running(p, f16(v))

    def mean(self, x):
        return f16(super().mean(x))

    def rsqrt(self, x):
        return f16(F32(1) / np.sqrt(f16(x)))

    def gain(self, y, w):
        return f16(f16(y) * w)

    def softmax(self, s):
        s = f16(np.where(np.isfinite(s), s, F32(-65504)))
        e = exp_f16(f16(s - s.max(axis=-1, keepdims=True)))
        lanes, total = padded(e, 8), F32(0)
        for i in range(lanes.shape[-2]):
            total = f16(total + lanes[..., i, :])
        while total.shape[-1] > 1:
            total = f16(total[..., : total.shape[-1] // 2] + total[..., total.shape[-1] // 2 :])
        return f16(e * f16(F32(1) / total))

    def sigmoid(self, x):
        e = exp_f16(-np.abs(f16(x)))
        y = f16(e / f16(e + F32(1)))
        return np.where(x > 0, f16(F32(1) - y), y)

    def silu(self, x):
        return f16(f16(x) * self.sigmoid(x))

    def attend(self, engine, q, k, v, visible, n):
        s = engine.cap(self.qk(f16(f16(q) * f16(scale_of(engine, n))), k), n)
        return self.pv(self.softmax(np.where(visible, s, F32(-np.inf))), v)
