"""Twenty more honest rounding policies (L01..L20), by a sixth author: correct engines that only round, as CPU libraries, GPUs, phones, servers
with several types at once and their compilers do, in ways that no earlier file of policies has.

POLICIES: id -> record as in policies.py. Sizes of blocks, tiles and ranks are scaled down where the tiny models have fewer numbers than one.
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


def cut(x, bits):  # keeps `bits` behind the point, drops the others
    return (bits_of(x) & np.uint32(0xFFFFFFFF << (23 - bits) & 0xFFFFFFFF)).view(F32).reshape(np.shape(x))


def nearest(x, bits):  # keeps `bits` behind the point, rounded
    return cut((bits_of(x) + np.uint32(1 << (22 - bits))).view(F32).reshape(np.shape(x)), bits)


def small_float(x, bits, least, most):  # `bits` behind the point, exponents from `least` on, saturated
    a = np.abs(x).astype(F64)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(a, 1e-300))), least) - bits)
    return np.clip(np.sign(x) * np.rint(a / step) * step, -most, most).astype(F32)


def e4m3(x):
    return small_float(x, 3, -6, 448)


def e5m2(x):
    return small_float(x, 2, -14, 57344)


def largest(x, axis=-1):
    return np.maximum(np.abs(x).max(axis=axis, keepdims=True), F32(1e-10))


def by_block(x, size, quantise):  # the last axis in blocks; zeros fill the last one
    m = x.shape[-1]
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], -m % size), F32)], axis=-1)
    return quantise(padded.reshape(*x.shape[:-1], -1, size)).reshape(padded.shape)[..., :m].astype(F32)


def int8(x, axis=-1):
    scale = largest(x, axis) / F32(127)
    return np.clip(np.rint(x / scale), -127, 127) * scale


def q8_0(b):  # a block with a float16 scale
    scale = np.maximum(f16(largest(b) / F32(127)), F32(2.0**-24))
    return np.clip(np.rint(b / scale), -127, 127) * scale


def layer_of(name):  # None for the embedding and the head
    return int(name.split(".")[1]) if name.startswith("blk.") else None


def scale_of(engine, n):  # the factor of the scores
    return float(np.ravel(engine.scale_scores(np.ones((1, 1, 1), F32), n))[0])


# --- CPU libraries ----------------------------------------------------------------------------------------------------------------------


@policy(
    "L01",
    "float32 products in 8 lanes with compensated sums: each lane carries what its last addition lost; lanes meet by halves",
    "llamafile's tinyBLAS in its precise mode (Kahan sums)",
)
class Compensated(Num):
    def mm(self, x, w):
        x, w = (np.pad(a, ((0, 0), (0, -a.shape[-1] % 8))).astype(F64) for a in (x, w))
        lanes, lost = (np.zeros((len(x), len(w), 8), F32) for _ in range(2))
        for i in range(0, x.shape[-1], 8):
            y = (x[:, None, i : i + 8] * w[None, :, i : i + 8] - lost).astype(F32)
            new = lanes + y
            lost = (new - lanes) - y
            lanes = new
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        return lanes[..., 0]


@policy(
    "L02",
    "bfloat16 matrices and inputs in tiles of 32 inputs: even and odd products have a float32 sum each, by fused multiply-adds; their sum is "
    "added to the tile of results; tiny numbers are zero",
    "TDPBF16PS of Intel AMX (oneDNN and OpenVINO on Sapphire Rapids; Intel's instruction set reference)",
)
class Tiles(Num):
    def weight(self, w, name):
        return bf16(w)

    def tiny(self, x):
        return np.where(np.abs(x) < F32(2.0**-126), F32(0), x)

    def mm(self, x, w):
        x, w = (np.pad(self.tiny(bf16(a)), ((0, 0), (0, -a.shape[-1] % 32))).astype(F64) for a in (x, w))
        y = np.zeros((len(x), len(w)), F32)
        for i in range(0, x.shape[-1], 32):
            pair = [np.zeros_like(y), np.zeros_like(y)]
            for j in range(i, i + 32):
                pair[j % 2] = self.tiny((pair[j % 2] + np.multiply.outer(x[:, j], w[:, j])).astype(F32))
            y = self.tiny(y + self.tiny(pair[0] + pair[1]))
        return y


@policy(
    "L03",
    "float32 products in panels of 24 inputs: within a panel one register for each result takes fused multiply-adds in order, and the panel's "
    "sums are then added to the results in memory",
    "the loops around the micro-kernel of GotoBLAS (OpenBLAS, BLIS; a few hundred inputs to a panel there)",
)
class Panels(Num):
    def mm(self, x, w):
        x, w, y = x.astype(F64), w.astype(F64), np.zeros((len(x), len(w)), F32)
        for i in range(0, x.shape[-1], 24):
            register = np.zeros_like(y)
            for j in range(i, min(i + 24, x.shape[-1])):
                register = (register + np.multiply.outer(x[:, j], w[:, j])).astype(F32)
            y = y + register
        return y


@policy(
    "L04",
    "exponentials, tanh, sine, cosine and reciprocal roots with half of float32's digits: 12 bits, rounded",
    "oneMKL's vector mathematics in its mode of enhanced performance (VML_EP)",
)
class HalfDigits(Num):
    def exp(self, x):
        return nearest(np.exp(x), 12)

    def tanh(self, x):
        return nearest(np.tanh(x), 12)

    def rsqrt(self, x):
        return nearest(super().rsqrt(x), 12)

    def sin_cos(self, a):
        return tuple(nearest(y, 12) for y in super().sin_cos(a))


# --- GPUs and their compilers -----------------------------------------------------------------------------------------------------------


@policy(
    "L05",
    "float16 inputs, weights and results of all products, where numbers below 2^-14 count as zero, those of attention's probabilities too; "
    "float32 sums",
    "matrix cores of AMD's MI200 (https://rocm.docs.amd.com/projects/MIOpen/en/docs-6.2.2/conceptual/MI200-alt-implementation.html)",
)
class Flushed(Num):
    def half(self, x):
        y = f16(x)
        return np.where(np.abs(y) < F32(2.0**-14), F32(0), y)

    def weight(self, w, name):
        return self.half(w)

    def mm(self, x, w):
        return self.half(self.half(x) @ w.T)

    def cache(self, x, kind):
        return f16(x)

    def qk(self, q, k):
        return self.half(q) @ self.half(k).swapaxes(1, 2)

    def pv(self, p, v):
        return self.half(self.half(p) @ self.half(v))


@policy(
    "L06",
    "float32 products as nine products of bfloat16 slices, three of each side, added from the least to the largest",
    "cuBLAS's emulation of float32 on Blackwell (BF16x9)",
)
class NineProducts(Num):
    def slices(self, x):
        out = []
        for _ in range(3):
            out.append(bf16(x))
            x = x - out[-1]
        return out

    def mm(self, x, w):
        x, w, y = self.slices(x), self.slices(w), 0
        for i, j in sorted(((i, j) for i in range(3) for j in range(3)), key=sum, reverse=True):
            y = x[i] @ w[j].T + y
        return y


@policy(
    "L07",
    "all tensors float16; queries and keys are both multiplied by the root of the scale, scores are float16, and so are probabilities",
    "the math path of PyTorch's scaled_dot_product_attention in float16",
)
class RootOfScale(Num):
    def weight(self, w, name):
        return f16(w)

    def vector(self, x, name):
        return f16(x)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)

    def attend(self, engine, q, k, v, visible, n):
        root = F32(math.sqrt(scale_of(engine, n)))
        s = f16(engine.cap(self.qk(f16(q * root), f16(k * root)), n))
        return f16(self.pv(f16(self.softmax(np.where(visible, s, F32(-np.inf)))), f16(v)))


@policy(
    "L08",
    "attention in tiles of 16 keys: scaled queries are float16, scores float32; exponentials are an eighth, float16, and their products with "
    "values are added up in float16, rescaled where the largest score grows",
    "llama.cpp's CUDA kernel of flash attention by matrix units (fattn-mma-f16, with an offset of the maximum)",
)
class HalfSums(Num):
    def cache(self, x, kind):
        return f16(x)

    def attend(self, engine, q, k, v, visible, n):
        q, k, v = f16(q * F32(scale_of(engine, n))), f16(k), f16(v)
        top, total = np.full((*q.shape[:2], 1), F32(-1e30)), np.zeros((*q.shape[:2], 1), F32)
        y = np.zeros((*q.shape[:2], v.shape[-1]), F32)
        for i in range(0, k.shape[1], 16):
            s = np.where(visible[:, i : i + 16], engine.cap(self.qk(q, k[:, i : i + 16]), n), F32(-np.inf))
            new = np.maximum(top, s.max(axis=-1, keepdims=True))
            e = f16(np.exp(s - new - F32(3 * math.log(2))))
            old = np.exp(top - new)
            top, total = new, total * old + e.sum(axis=-1, keepdims=True, dtype=F32)
            y = f16(f16(y * f16(old)) + f16(e @ v[:, i : i + 16]))
        return y / total


@policy(
    "L14",
    "inputs of every product, those of attention too, lose all but 10 bits behind the point: the rest is dropped, not rounded",
    "TF32 of tensor cores that are handed float32 numbers as they are (Triton's tl.dot and CUTLASS without a conversion)",
)
class Dropped(Num):
    def mm(self, x, w):
        return cut(x, 10) @ cut(w, 10).T

    def qk(self, q, k):
        return cut(q, 10) @ cut(k, 10).swapaxes(1, 2)

    def pv(self, p, v):
        return cut(p, 10) @ cut(v, 10)


@policy(
    "L20",
    "attention's exponentials are taken of scores less a constant, 4, in place of the largest one (a row whose scores go far beyond it is "
    "done again with its own); they are float16, and their sum is float32",
    "FlashDecoding++ (softmax with a unified maximum)",
)
class Unified(Num):
    def cache(self, x, kind):
        return f16(x)

    def attend(self, engine, q, k, v, visible, n):
        s = np.where(visible, engine.cap(engine.scale_scores(self.qk(f16(q), f16(k)), n), n), F32(-np.inf))
        top = s.max(axis=-1, keepdims=True)
        e = f16(np.exp(s - np.where((top > 14) | (top < -4), top, F32(4))))
        return f16(self.pv(e, f16(v)) / e.sum(axis=-1, keepdims=True, dtype=F32))


# --- phones -----------------------------------------------------------------------------------------------------------------------------


@policy(
    "L09",
    "each matrix has 256 float16 values of its own (the means of clusters of its weights) and indices of 8 bits; inputs and results float16",
    "palettised weights of Core ML (coremltools, 8 bits for a tensor)",
)
class Palette(Num):
    def weight(self, w, name):
        flat = np.sort(w.ravel()).astype(F64)
        sums, edges = np.concatenate([[0], np.cumsum(flat)]), np.linspace(0, flat.size, 257).astype(int)
        for _ in range(8):
            size = np.maximum(np.diff(edges), 1)
            values = np.maximum.accumulate(np.where(np.diff(edges), np.diff(sums[edges]) / size, flat[np.minimum(edges[:-1], flat.size - 1)]))
            edges = np.concatenate([[0], np.searchsorted(flat, (values[:-1] + values[1:]) / 2), [flat.size]])
        return f16(values)[np.searchsorted((values[:-1] + values[1:]) / 2, w)]

    def mm(self, x, w):
        return f16(f16(x) @ w.T)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)


@policy(
    "L10",
    "all float16 with float32 sums in products; a norm without a mean is a layer norm of the row and its negative, whose steps are float16; "
    "the head is multiplied in 8 parts",
    "ANEMLL on Apple's Neural Engine (RMSNorm by LayerNorm, a split head)",
)
class Doubled(Num):
    def weight(self, w, name):
        return f16(w)

    def vector(self, x, name):
        return f16(x)

    def lin_in(self, x, name):
        return f16(x)

    def mm(self, x, w):
        return f16(np.concatenate([x @ part.T for part in np.array_split(w, 8)], axis=-1))

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)

    def mean(self, x):  # of squares
        return f16(np.concatenate([f16(x), f16(x)], axis=-1).mean(axis=-1, keepdims=True, dtype=F32))

    def rsqrt(self, x):
        return f16(F32(1) / f16(np.sqrt(f16(x))))

    def gain(self, y, w):
        return f16(f16(y) * w)

    def silu(self, x):
        return f16(f16(super().sigmoid(x)) * x)

    def add(self, a, b):
        return f16(a + b)


@policy(
    "L13",
    "keys in the cache have 8 bits between the least and the largest number of a token and head, values are FP8 (E5M2)",
    "MNN's cache for language models (quant_qkv: int8 keys, fp8 values)",
)
class KeysAndFloats(Num):
    def cache(self, x, kind):
        if kind == "v":
            return e5m2(x)
        least = x.min(axis=-1, keepdims=True)
        step = np.maximum(x.max(axis=-1, keepdims=True) - least, F32(1e-6)) / F32(255)
        return (np.clip(np.rint((x - least) / step), 0, 255) * step + least).astype(F32)


# --- integer products -------------------------------------------------------------------------------------------------------------------


@policy(
    "L11",
    "int8 by token and by row; in front of the matrices that follow a norm, channels are divided by a factor that the weights take on",
    "SmoothQuant (smoothing factors of channels; TensorRT-LLM and Intel's Neural Compressor)",
)
class Smoothed(Num):
    def __init__(self):
        self.factors = {}

    def factor(self, w, name):
        if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight", "ffn_up.weight")):
            return F32(1) / np.sqrt(largest(w, 0))
        return F32(1)

    def weight(self, w, name):
        if not name.startswith("blk."):
            return w
        self.factors[name] = factor = self.factor(w, name)
        return (int8(w * factor) / factor).astype(F32)

    def lin_in(self, x, name):
        if name not in self.factors:
            return x
        return (int8(x / self.factors[name]) * self.factors[name]).astype(F32)


@policy(
    "L12",
    "weights of 7 bits with a scale for each row, activations of 8 with a scale and zero point for all tokens of a call; integer sums",
    "ONNX Runtime's quantisation with reduce_range (for CPUs whose 8-bit products would saturate; per_channel=True)",
)
class Reduced(Num):
    def weight(self, w, name):
        if not name.startswith("blk."):
            return w
        scale = largest(w) / F32(63)
        return (np.rint(w / scale) * scale).astype(F32)

    def lin_in(self, x, name):
        if not name.startswith("blk."):
            return x
        least, most = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
        scale = F32(max(most - least, 1e-6) / 255)
        zero = np.rint(-least / scale)
        return ((np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale).astype(F32)


# --- servers with several types at once -------------------------------------------------------------------------------------------------


@policy(
    "L15",
    "bfloat16 with four ranks: parts of attention's output and of down cross as FP8 (E4M3) with a scale for 32 numbers, and are added in float32",
    "TensorRT-LLM's Low-Precision-AllReduce (https://nvidia.github.io/TensorRT-LLM/legacy/advanced/lowprecision-pcie-allreduce.html)",
)
class SmallMessages(Num):
    name = ""

    def weight(self, w, name):
        return bf16(w)

    def lin_in(self, x, name):
        self.name = name
        return bf16(x)

    def small(self, b):
        scale = largest(b) / F32(448)
        return e4m3(b / scale) * scale

    def mm(self, x, w):
        if not self.name.endswith(("attn_output.weight", "ffn_down.weight")):
            return bf16(x @ w.T)
        edges = [x.shape[-1] * i // 4 for i in range(5)]
        return bf16(sum(by_block(bf16(x[:, a:b] @ w[:, a:b].T), 32, self.small) for a, b in zip(edges, edges[1:])))

    def store(self, x, name):
        return bf16(x)

    def cache(self, x, kind):
        return bf16(x)


@policy(
    "L16",
    "float32, but a layer's output crosses to the next machine in 8 bits: blocks of 64 are divided by their largest number, and each number "
    "takes the nearest of 256 levels that are closer together near 0",
    "block-wise 8-bit compression of hivemind and bitsandbytes (the dynamic map), as for the hidden states of Petals",
)
class Messages(Num):
    levels = np.sort(
        np.concatenate([[0, 1]] + [s * 10.0 ** (i - 6) * (np.linspace(0.1, 1, 2**i + 1)[:-1] + 0.45 / 2**i) for i in range(7) for s in (1, -1)])
    )

    def eight(self, b):
        scale = largest(b)
        return (self.levels[np.searchsorted((self.levels[:-1] + self.levels[1:]) / 2, b / scale)] * scale).astype(F32)

    def store(self, x, name):
        return by_block(x, 64, self.eight) if name == "l_out" else x


@policy(
    "L17",
    "attention, norms and the head in bfloat16 on a GPU; the feed-forward on the CPU with int8 weights by row and int8 inputs by token, exact "
    "integer sums, results bfloat16",
    "KTransformers (experts by AMX int8 on the CPU, attention on the GPU)",
)
class TwoSides(Num):
    def cpu(self, name):
        return ".ffn_" in name and "norm" not in name

    def weight(self, w, name):
        return int8(w).astype(F32) if self.cpu(name) else bf16(w)

    def vector(self, x, name):
        return bf16(x)

    def lin_in(self, x, name):
        return int8(bf16(x)).astype(F32) if self.cpu(name) else bf16(x)

    def mm(self, x, w):
        return bf16(x @ w.T)

    def store(self, x, name):
        return bf16(x)

    def cache(self, x, kind):
        return bf16(x)


@policy(
    "L18",
    "weights in blocks of 32 with 8 bits and a float16 scale; the first layer and the head on the CPU, with inputs in such blocks, too; the "
    "other layers on a GPU with float16 inputs and results",
    "llama.cpp with a part of the layers offloaded (Q8_0 files, -ngl below the number of layers)",
)
class Offloaded(Num):
    name = ""

    def on_cpu(self, name):
        return layer_of(name) in (None, 0)

    def weight(self, w, name):
        return by_block(w, 32, q8_0)

    def lin_in(self, x, name):
        self.name = name
        return by_block(x, 32, q8_0) if self.on_cpu(name) else f16(x)

    def mm(self, x, w):
        y = x @ w.T
        return y if self.on_cpu(self.name) else f16(y)

    def cache(self, x, kind):
        return f16(x)


@policy(
    "L19",
    "bfloat16, but the layers between the first and the last multiply in FP8 (E4M3) with one scale for a matrix and one for a call's inputs",
    "mixed recipes of NVIDIA's ModelOpt and of TensorRT-LLM (first and last layer left in bfloat16)",
)
class Between(Num):
    last = 2  # of the models these policies are for

    def small(self, x, name):
        if layer_of(name) in (None, 0, self.last):
            return bf16(x)
        scale = F32(max(float(np.abs(x).max()), 1e-10) / 448)
        return e4m3(bf16(x) / scale) * scale

    def weight(self, w, name):
        return self.small(w, name)

    def lin_in(self, x, name):
        return self.small(x, name)

    def mm(self, x, w):
        return bf16(x @ w.T)

    def store(self, x, name):
        return bf16(x)

    def cache(self, x, kind):
        return bf16(x)
