"""Twenty more honest rounding policies (S01..S20), by an eighth author: correct engines that only round, each as one kernel, library, compiler,
phone, NPU or server does that no earlier file of policies has.

POLICIES: id -> record as in policies.py. Sizes of blocks, tiles and groups are scaled down where the tiny models have fewer numbers than one,
and `what` gives the size that is used here. Scales that a tool calibrates on a text are those of the first call here. GitHub is named without
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


def bits_of(x):
    return np.ascontiguousarray(x, F32).view(np.uint32)


def bf16(x):
    b = bits_of(x).astype(np.uint64)
    return ((b + 0x7FFF + (b >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(F32).reshape(np.shape(x))


def f16(x):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(F32)


def tf32(x):  # 10 bits behind the point, ties away from zero
    return ((bits_of(x).astype(np.uint64) + 0x1000) & 0xFFFFE000).astype(np.uint32).view(F32).reshape(np.shape(x))


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


def by_block(x, size, quantise):  # the last axis in blocks; zeros fill the last one
    m = x.shape[-1]
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], -m % size), F32)], axis=-1)
    return quantise(padded.reshape(*x.shape[:-1], -1, size)).reshape(padded.shape)[..., :m].astype(F32)


def integers(x, bits, axis=-1, kind=lambda s: s):  # symmetric; kind: of the scale
    most = F32(2 ** (bits - 1) - 1)
    scale = np.maximum(kind(largest(x, axis) / most), F32(2.0**-24))
    return (np.clip(np.rint(x / scale), -most, most) * scale).astype(F32)


def between(x, bits, axis=-1, kind=lambda s: s):  # from the least to the largest number, zero among the levels
    least, most = np.minimum(x.min(axis=axis, keepdims=True), 0), np.maximum(x.max(axis=axis, keepdims=True), 0)
    step = np.maximum(kind((most - least) / F32(2**bits - 1)), F32(2.0**-24))
    zero = np.rint(-least / step)
    return ((np.clip(np.rint(x / step) + zero, 0, 2**bits - 1) - zero) * step).astype(F32)


def q8_0(b):
    return integers(b, 8, kind=f16)


def nearest(x, levels):  # levels in ascending order
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]


def scale_of(engine, n):  # the factor of the scores
    return F32(np.ravel(engine.scale_scores(np.ones((1, 1, 1), F32), n))[0])


def masked_max(s, visible):
    return np.where(visible, s, F32(-np.inf)).max(axis=-1, keepdims=True)


class Bfloat(Num):
    """What servers keep in bfloat16: weights, inputs and results of products, tensors and the cache."""

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


# --- attention --------------------------------------------------------------------------------------------------------------------------


def key_by_key(q, k, v, s, visible, kind):
    """ggml's attention on CPUs: a running maximum, one key after the other; `kind` rounds the weighted values after each step."""
    top, total = np.full((*q.shape[:2], 1), F32(-np.inf)), np.zeros((*q.shape[:2], 1), F32)
    y = np.zeros((*q.shape[:2], v.shape[-1]), F32)
    for i in range(k.shape[1]):
        seen, x = visible[:, i][None, :, None], s[..., i : i + 1]
        new = np.where(seen, np.maximum(top, x), top)
        grown = new > top
        with np.errstate(invalid="ignore"):
            old, e = np.where(grown, np.exp(top - new), F32(1)), np.where(seen, np.exp(x - new), F32(0))
        y = np.where(grown, kind(y * old), y)
        y = np.where(seen, kind(y + e * v[:, i : i + 1]), y)
        top, total = new, np.where(seen, total * old + e, total)
    return y / total


@policy(
    "S01",
    "attention one key at a time: float16 queries, keys and values, float32 scores and sum of exponentials, weighted values that are rounded to "
    "float16 after each key and each rescaling; all else float32",
    "llama.cpp on CPUs with flash attention and the F16 cache (ggml-org/llama.cpp, ggml/src/ggml-cpu/ops.cpp, "
    "ggml_compute_forward_flash_attn_ext_f16: VKQ16, ggml_vec_mad_f16)",
)
class KeyByKey(Num):
    def cache(self, x, kind):
        return f16(x)

    def attend(self, engine, q, k, v, visible, n):
        s = engine.cap(engine.scale_scores(f16(q) @ k.swapaxes(1, 2), n), n)
        return key_by_key(q, f16(k), f16(v), s, visible, f16)


IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F32)


def iq4_nl(b):  # of 15 scales around that of the largest number the one with the least error
    at = np.abs(b).argmax(axis=-1)[..., None]
    most = np.take_along_axis(b, at, axis=-1)
    most = np.where(most == 0, F32(1e-10), most)
    best, scale = np.full(most.shape, -1.0), np.zeros(most.shape)
    for move in range(-7, 8):
        level = nearest(b * ((IQ4_NL[0] + move) / most), IQ4_NL).astype(F64)
        weight = b.astype(F64) ** 2
        up, down = (weight * level * b).sum(axis=-1, keepdims=True), (weight * level * level).sum(axis=-1, keepdims=True)
        better = up * up > best * down
        best, scale = np.where(better, up * up / down, best), np.where(better, up / down, scale)
    scale = scale.astype(F32)
    scale = np.where(f16(scale) == 0, F32(2.0**-24), scale)
    return nearest(b / scale, IQ4_NL) * f16(scale)


@policy(
    "S02",
    "weights as IQ4_NL (16 uneven levels, the best of 15 scales), embedding and head as Q8_0, inputs of matrices as Q8_0; keys, values and queries "
    "as Q8_0 in blocks of 16, weighted values added in float32, one key at a time",
    "llama.cpp on CPUs: an IQ4_NL file (the type that IQ4_XS falls back to for such rows), -fa on -ctk q8_0 -ctv q8_0 (ggml-org/llama.cpp, "
    "ggml/src/ggml-quants.c, ggml/src/ggml-cpu/ops.cpp: queries take the vec_dot_type of the keys; blocks of 32 there)",
)
class Uneven(Num):
    def weight(self, w, name):
        return by_block(w, 32, iq4_nl if name.startswith("blk.") else q8_0)

    def lin_in(self, x, name):
        return by_block(x, 32, q8_0)

    def cache(self, x, kind):
        return by_block(x, 16, q8_0)

    def attend(self, engine, q, k, v, visible, n):
        s = engine.cap(engine.scale_scores(by_block(q, 16, q8_0) @ k.swapaxes(1, 2), n), n)
        return key_by_key(q, k, v, s, visible, lambda y: y)


def exp_u20(x):  # a polynomial of degree 5
    x = np.maximum(x, F32(-87.3))
    n = np.floor(x * F32(1.44269504) + F32(0.5))
    r = x - n * F32(0.693147182)
    p = F32(0.00828929059)
    for c in (0.0418978221, 0.166676521, 0.499991506, 0.999999701, 1.0):
        p = p * r + F32(c)
    return np.ldexp(p, n.astype(int)).astype(F32)


@policy(
    "S03",
    "bfloat16 tensors; attention in tiles of 16 keys with float32 scores and the exponential of 20 ulp, whose results are bfloat16 where they meet "
    "the values and unrounded in their sum; the norm is rounded in front of its weights",
    "PyTorch's scaled_dot_product_attention on CPUs (pytorch/pytorch, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, "
    "_exp_reduce_sum_fusion_kernel; exp_u20 of vec512; 512 keys to a tile there), Hugging Face's LlamaRMSNorm",
)
class TorchOnCpus(Bfloat):
    def gain(self, y, w):
        return bf16(bf16(y) * w)

    def attend(self, engine, q, k, v, visible, n):
        s = engine.cap(self.qk(bf16(q), k) * scale_of(engine, n), n)
        top, total = np.full((*q.shape[:2], 1), F32(-1e30)), np.zeros((*q.shape[:2], 1), F32)
        y = np.zeros((*q.shape[:2], v.shape[-1]), F32)
        for i in range(0, k.shape[1], 16):
            seen = visible[:, i : i + 16]
            new = np.maximum(top, masked_max(s[..., i : i + 16], seen))
            e, old = np.where(seen, exp_u20(s[..., i : i + 16] - new), F32(0)), np.exp(top - new)
            top, total = new, total * old + e.sum(axis=-1, keepdims=True, dtype=F32)
            y = y * old + bf16(e) @ v[:, i : i + 16]
        return bf16(y / total)


@policy(
    "S04",
    "all products are of integers: inputs, queries, keys and values uint8 between the least and the largest number of a call, weights int8 by row, "
    "probabilities uint8 in steps of 1/255 after the division by their sum; all else is float32",
    "torchao's static quantisation for X86Inductor with its int8 attention (pytorch/ao, torchao/csrc/cpu/quantized_sdpa.cpp, "
    "qscaled_dot_product)",
)
class AllIntegers(Num):
    def weight(self, w, name):
        return w if name == "token_embd.weight" else integers(w, 8)

    def lin_in(self, x, name):
        return between(x, 8, axis=None)

    def cache(self, x, kind):
        return between(x, 8, axis=None)

    def qk(self, q, k):
        return between(q, 8, axis=None) @ k.swapaxes(1, 2)

    def pv(self, p, v):
        return np.rint(p * F32(255)) / F32(255) @ v


def tiles_of(x, size):  # [H, T, K] in tiles of tokens
    return np.split(x, range(size, x.shape[1], size), axis=1)


@policy(
    "S05",
    "queries less their mean over 16 tokens (whose products with the keys stay float16) and keys less their mean have 4 bits with a scale for 8 "
    "tokens and head; probabilities of the largest score 1 are FP8 times 448, values FP8 by channel, whose sums keep 13 bits behind the point for "
    "each 32 keys; all else is float16",
    "SageAttention2 with INT4 (thu-ml/SageAttention; arXiv 2411.10958: smoothed queries and keys, scales by thread, FP8 products into 22-bit "
    "registers that are added in float32)",
)
class FourBitScores(Half):
    def attend(self, engine, q, k, v, visible, n):
        q, k = f16(q), f16(k - k.mean(axis=1, keepdims=True, dtype=F32))
        middle = f16(np.concatenate([np.zeros_like(x) + x.mean(axis=1, keepdims=True, dtype=F32) for x in tiles_of(q, 16)], axis=1))
        small = [np.concatenate([integers(t, 4, axis=(1, 2)) for t in tiles_of(x, 8)], axis=1) for x in (q - middle, k)]
        s = small[0] @ small[1].swapaxes(1, 2) + middle @ k.swapaxes(1, 2)
        s = engine.cap(engine.scale_scores(s, n), n)
        e = np.where(visible, np.exp(s - masked_max(s, visible)), F32(0)).astype(F32)
        scale = largest(v, 1) / F32(448)
        p, v = e4m3(e * F32(448)) / F32(448), e4m3(v / scale)
        y = 0
        for i in range(0, v.shape[1], 32):
            y = y + cut(p[..., i : i + 32] @ v[:, i : i + 32], 13)
        return f16(y * scale / e.sum(axis=-1, keepdims=True, dtype=F32))


@policy(
    "S06",
    "bfloat16 tensors; queries are multiplied by the scale and rounded, scores, their largest one, the exponentials, their sum and the weighted "
    "values are bfloat16 each, and so is the quotient of the last two",
    "MaxText on TPUs with float32_logits and float32_qk_product off (AI-Hypercomputer/maxtext, src/MaxText/layers/attention_op.py: "
    "apply_attention_dot, local_exps, local_sum)",
)
class BfloatSoftmax(Bfloat):
    def gain(self, y, w):
        return bf16(bf16(y) * w)

    def silu(self, x):
        return bf16(super().silu(x))

    def attend(self, engine, q, k, v, visible, n):
        s = bf16(engine.cap(bf16(bf16(q) * bf16(scale_of(engine, n))) @ k.swapaxes(1, 2), n))
        e = np.where(visible, bf16(np.exp(bf16(s - masked_max(s, visible)))), F32(0)).astype(F32)
        return bf16(bf16(e @ v) / bf16(e.sum(axis=-1, keepdims=True, dtype=F32)))


@policy(
    "S07",
    "float16, with float32 sums in products and in the mean of squares only: scores times their scale, differences to the largest one, exponentials, "
    "quotients and each addition to the softmax's sum are float16, and so is each step of the norm and of the sigmoid",
    "candle on CPUs (huggingface/candle, candle-nn/src/ops.rs: softmax_last_dim with vec_reduce_sum in the tensor's type, rms_norm with a "
    "root in the tensor's type; models that attend in the model's type)",
)
class HalfSteps(Half):
    def sin_cos(self, a):
        return f16(np.sin(a)), f16(np.cos(a))

    def rsqrt(self, x):  # a row is divided by the root, which is float16
        return F32(1) / f16(np.sqrt(x))

    def gain(self, y, w):
        return f16(f16(y) * w)

    def sigmoid(self, x):
        with np.errstate(over="ignore"):
            return f16(F32(1) / f16(F32(1) + f16(np.exp(-x))))

    def silu(self, x):
        with np.errstate(over="ignore"):
            return f16(x / f16(F32(1) + f16(np.exp(-x))))

    def qk(self, q, k):
        return f16(q @ k.swapaxes(1, 2))

    def softmax(self, s):
        e = f16(np.exp(f16(f16(s) - f16(s).max(axis=-1, keepdims=True))))
        total = np.zeros((*s.shape[:-1], 1), F32)
        for i in range(s.shape[-1]):
            total = f16(total + e[..., i : i + 1])
        return f16(e / total)

    def attend(self, engine, q, k, v, visible, n):
        s = engine.cap(f16(engine.scale_scores(self.qk(q, k), n)), n)
        return f16(self.pv(self.softmax(np.where(visible, s, F32(-65504))) * visible, v))


# --- weights when they are loaded, with their partners ------------------------------------------------------------------------------------


@policy(
    "S08",
    "weights in two steps: int8 between -119 and 119 by row, then 4 bits with a whole-numbered scale and zero point for 32 inputs; inputs int8 by "
    "token; keys and values 4 bits with a zero point by token and head; head and all else float16",
    "QServe (mit-han-lab/omniserve, W4A8KV4 by groups; arXiv 2405.04532: progressive quantisation with a protective range; 128 to a group "
    "there)",
)
class Progressive(Half):
    def weight(self, w, name):
        if not name.startswith("blk."):
            return f16(w)
        scale = f16(largest(w) / F32(119))
        whole = np.clip(np.rint(w / scale), -119, 119)

        def group(b):
            step = np.maximum(np.rint((b.max(axis=-1, keepdims=True) - b.min(axis=-1, keepdims=True)) / F32(15)), 1)
            zero = np.clip(np.rint(-b.min(axis=-1, keepdims=True) / step), 0, 15)
            return np.clip((np.clip(np.rint(b / step) + zero, 0, 15) - zero) * step, -128, 127)

        return by_block(whole, 32, group) * scale

    def lin_in(self, x, name):
        return integers(f16(x), 8, kind=f16) if name.startswith("blk.") else f16(x)

    def cache(self, x, kind):
        return between(f16(x), 4, kind=f16)


NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
    + [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
    + [0.7229568362236023, 1.0],
    F32,
)


def dynamic_map():  # 8 bits with sign: a number of leading zeros counts tens, the bits behind it are linear
    levels = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1)
        middle = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        levels += [*middle, *-middle]
    return np.sort(np.array(levels, F32))


@policy(
    "S09",
    "weights of the layers as NF4 (16 levels of a normal distribution) in blocks of 64 whose largest numbers, less their mean, have 8 bits of an "
    "uneven map in blocks of 256; all else, the head and the embedding too, is bfloat16",
    "bitsandbytes 4-bit with double quantisation and bfloat16 as the compute type (bitsandbytes-foundation/bitsandbytes; transformers' "
    "BitsAndBytesConfig)",
)
class DoubleQuantised(Bfloat):
    levels = dynamic_map()

    def weight(self, w, name):
        if not name.startswith("blk."):
            return bf16(w)
        flat = bf16(w).reshape(-1, 64)
        most = largest(flat)
        middle = most.mean(dtype=F32)
        blocks = np.split(most - middle, range(256, len(most), 256))
        coded = np.concatenate([nearest(b / largest(b, None), self.levels) * largest(b, None) for b in blocks])
        return bf16(nearest(flat / most, NF4) * (coded + middle)).reshape(w.shape)


@policy(
    "S10",
    "all matrices in 8 bits of a switching format: 3 bits behind the point for numbers from 2^-7 on, 2 bits below, least 2^-23; inputs of matrices "
    "bfloat16, all else float32",
    "gemma.cpp (google/gemma.cpp, compression/sfp-inl.h: SfpCodec)",
)
class Switching(Num):
    def weight(self, w, name):
        scale = F32(max(float(np.abs(w).max()) / 1.875, 1))
        a = np.abs(bf16(w / scale)).astype(F64)
        power = np.floor(np.log2(np.maximum(a, 1e-30)))
        wide = (power >= -7) | (a >= 1.9375 * 2.0**-8)
        step = 2.0 ** (power - np.where(wide, 3, 2))
        least = np.where(a < 2.0**-23, 0, np.maximum(np.rint(a / step) * step, 1.25 * 2.0**-23))
        return (np.sign(w) * least).astype(F32) * scale

    def lin_in(self, x, name):
        return bf16(x)


def microexponents(bits):  # 16 numbers share an exponent, two neighbours a further bit of it; sign and `bits` more for each number
    def quantise(b):
        whole = np.floor(np.log2(largest(b).astype(F64)))
        pairs = b.reshape(*b.shape[:-1], 8, 2)
        small = np.abs(pairs).max(axis=-1, keepdims=True) < (2.0**whole)[..., None]
        step = (2.0 ** (whole[..., None] - small + 1 - bits)).astype(F32)
        return (np.clip(np.rint(pairs / step), -(2**bits) + 1, 2**bits - 1) * step).reshape(b.shape)

    return lambda x: by_block(x, 16, quantise)


@policy(
    "S11",
    "16 numbers share an exponent and each two of them one further bit of it; attention's matrices and the head have 7 bits more for each number, "
    "the feed-forward's 4, inputs as well as weights; float32 sums, results bfloat16",
    "MX9 and MX6 (With Shared Microexponents, a Little Shifting Goes a Long Way, arXiv 2302.08007; the data types of Microsoft's Maia 100)",
)
class Microexponents(Bfloat):
    def small(self, x, name):
        return microexponents(4 if ".ffn_" in name else 7)(bf16(x))

    def weight(self, w, name):
        return bf16(w) if name == "token_embd.weight" else self.small(w, name)

    def lin_in(self, x, name):
        return self.small(x, name)


# --- activations --------------------------------------------------------------------------------------------------------------------------


def gaudi(x, part):  # FP8 up to 240; the scale is a power of 16, for a largest number that reaches a part of 240
    power = math.log2(max(float(np.abs(x).max()), 1e-10) / (240 * part))
    scale = F32(2.0 ** min(max(4 * math.ceil(power / 4), -8), 4))
    return small_float(x / scale, 3, -6, 240) * scale


@policy(
    "S12",
    "FP8 (E4M3 up to 240) with scales of 1/256, 1/16, 1 and 16 only, one for a tensor: weights and inputs in the layers, queries, keys, values and "
    "probabilities (times 16); softmax, head and what is written bfloat16",
    "Intel Gaudi 2 with Neural Compressor's maxabs_hw (https://docs.vllm.ai/projects/gaudi/en/0.13.0/api/vllm_gaudi/extension/scales.html: "
    "exponent biases 3, 7, 11, 15; quantised Linear, KVCache, Matmul and Softmax)",
)
class HardwareScales(Bfloat):
    def weight(self, w, name):
        return gaudi(bf16(w), 0.5) if name.startswith("blk.") else bf16(w)

    def lin_in(self, x, name):
        return gaudi(bf16(x), 0.25) if name.startswith("blk.") else bf16(x)

    def cache(self, x, kind):
        return gaudi(bf16(x), 0.25)

    def qk(self, q, k):
        return bf16(gaudi(bf16(q), 0.25) @ k.swapaxes(1, 2))

    def softmax(self, s):
        return bf16(super().softmax(bf16(s)))

    def pv(self, p, v):
        return bf16(small_float(p * F32(16), 3, -6, 240) / F32(16) @ v)


@policy(
    "S13",
    "FP8 (E4M3) with a scale for each tensor that is that of the first call ever after; norms, the gated product and attention's output are made "
    "in float32 and written as FP8 at once, never as bfloat16; weights FP8 by tensor, all else bfloat16",
    "vLLM's fusion passes with static FP8 (https://docs.vllm.ai/en/stable/design/fusions/: RMSNorm + quant, SiLU + Mul + quant, attention + "
    "quant)",
)
class FusedQuantisation(Bfloat):
    fused = ("attn_norm", "ffn_norm", "ffn_out", "kqv_out")

    def __init__(self):
        self.scales, self.times = {}, {}

    def weight(self, w, name):
        if not name.startswith("blk."):
            return bf16(w)
        scale = largest(bf16(w), None) / F32(448)
        return e4m3(bf16(w) / scale) * scale

    def lin_in(self, x, name):  # in the layers it is FP8 already
        return x if name.startswith("blk.") else bf16(x)

    def store(self, x, name):
        if name not in self.fused:
            return bf16(x)
        at = name, self.times.setdefault(name, 0) % LAYERS
        self.times[name] += 1
        scale = self.scales.setdefault(at, F32(max(float(np.abs(x).max()), 1e-10) / 448))
        return e4m3(x / scale) * scale

    def pv(self, p, v):
        return bf16(p) @ v


PATTERNS = np.where(np.arange(16) >> np.arange(4)[:, None] & 1, F32(1), F32(-1))  # [4, 16]


@policy(
    "S14",
    "weights as Q4_0 are taken apart bit by bit; the 16 sums and differences of each 4 inputs are a table of int8 numbers with a "
    "float16 scale for 32 inputs, the products are whole sums of its entries; head and all else float32",
    "T-MAC (microsoft/T-MAC, deploy/tuned/kernels.cc: lut_ctor_g4_int8_impl with one scale for act_group_size = 32 inputs and the bias from "
    "unrounded sums)",
)
class LookUp(Num):
    def __init__(self):
        self.codes = {}

    def weight(self, w, name):
        if not name.startswith("blk."):
            return w
        m = w.shape[1]
        b = np.concatenate([w, np.zeros((len(w), -m % 32), F32)], axis=1).reshape(len(w), -1, 32)
        scale = f16(np.take_along_axis(b, np.abs(b).argmax(axis=-1)[..., None], axis=-1) / F32(-8))
        scale = np.where(scale == 0, F32(2.0**-24), scale)
        code = np.clip(np.floor(b / scale + F32(8.5)), 0, 15).astype(int)
        bits = code.reshape(*b.shape[:2], 8, 4, 1) >> np.arange(4) & 1  # [N, B, 8, 4 inputs, 4 bits]
        entry = np.einsum("nbgij,i->nbgj", bits, 2 ** np.arange(4))  # the entry of the table for each bit
        count = np.zeros((*entry.shape[:3], 16), F32)
        for j in range(4):
            np.put_along_axis(count, entry[..., j : j + 1], np.take_along_axis(count, entry[..., j : j + 1], -1) + F32(2.0 ** (j - 1)), -1)
        self.codes[name] = count, scale[..., 0]
        return ((code - 8) * scale).reshape(len(w), -1)[:, :m].astype(F32)

    def lin_in(self, x, name):
        self.name, self.row = name, 0
        return x

    def mm(self, x, w):  # w: the rows of one thread, in their order
        if self.name not in self.codes:
            return x @ w.T
        count, scale = (part[self.row : self.row + len(w)] for part in self.codes[self.name])
        self.row += len(w)
        b = np.concatenate([x, np.zeros((len(x), -x.shape[1] % 32), F32)], axis=1).reshape(len(x), -1, 8, 4)
        table = b @ PATTERNS  # [T, B, 8, 16]
        step = np.maximum(f16(np.abs(table).max(axis=(2, 3), keepdims=True) / F32(127)), F32(2.0**-24))
        whole = np.clip(np.rint(table / step), -127, 127)
        y = 0
        for i in range(table.shape[1]):
            part = whole[:, i].reshape(len(x), -1) @ count[:, i].reshape(len(w), -1).T * step[:, i, :, 0]
            y = y + (part - F32(0.5) * f16(b[:, i].sum(axis=(1, 2), dtype=F32))[:, None]) * scale[:, i]
        return y.astype(F32)


# --- sums and functions -------------------------------------------------------------------------------------------------------------------


@policy(
    "S15",
    "weights of the layers as Q4_0, float16 when they are multiplied; float16 inputs; one product after the other is added to a float16 sum; head "
    "and cache float16, all else float32",
    "llama.cpp's OpenCL backend for Adreno (ggml-org/llama.cpp, ggml-opencl's kernel_mul_mat_Ab_Bi_8x4 for Q4_0: half8 accumulators over all "
    "inputs)",
)
class Phone(Num):
    name = ""

    def weight(self, w, name):
        if not name.startswith("blk."):
            return f16(w)

        def q4_0(b):
            at = np.abs(b).argmax(axis=-1)[..., None]
            scale = f16(np.take_along_axis(b, at, axis=-1) / F32(-8))
            scale = np.where(scale == 0, F32(2.0**-24), scale)
            return f16((np.clip(np.floor(b / scale + F32(8.5)), 0, 15) - 8) * scale)

        return by_block(w, 32, q4_0)

    def lin_in(self, x, name):
        self.name = name
        return f16(x)

    def mm(self, x, w):
        if not self.name.startswith("blk."):
            return x @ w.T
        y = np.zeros((len(x), len(w)), F32)
        for i in range(x.shape[1]):
            y = f16(y + x[:, i : i + 1] * w[:, i])
        return y

    def cache(self, x, kind):
        return f16(x)


@policy(
    "S16",
    "weights and inputs as Q8_0 blocks; the sigmoid is a quotient of two cubic polynomials times a power of 4, with a reciprocal of Newton steps; "
    "float16 queries, keys, values and probabilities",
    "llama.cpp's Hexagon backend (ggml-org/llama.cpp, ggml/src/ggml-hexagon/htp/hvx-sigmoid.h: hvx_vec_fast_sigmoid_f32)",
)
class Hexagon(Num):
    def weight(self, w, name):
        return w if name == "token_embd.weight" else by_block(w, 32, q8_0)

    def lin_in(self, x, name):
        return by_block(x, 32, q8_0)

    def cache(self, x, kind):
        return f16(x)

    def qk(self, q, k):
        return f16(q) @ k.swapaxes(1, 2)

    def pv(self, p, v):
        return f16(p) @ v

    def sigmoid(self, x):
        half = np.clip(x, -87, 87) * F32(1.442695022) * F32(0.5)
        n = np.trunc(half)
        r = half - n
        even, odd = r * r * F32(0.276281267) + F32(1.442695022), r * F32(0.03138777) * r * r + r
        up = np.ldexp(odd + even, (2 * n).astype(int)).astype(F32)
        down = up - (odd - even)
        y = (np.uint32(0x7EF311C3) - bits_of(down)).view(F32).reshape(np.shape(down))
        for _ in range(3):
            y = y * (F32(2) - down * y)
        return up * y


@policy(
    "S17",
    "float32 products as three of TF32: the large halves, and each large half with the other side's small one, which are added first",
    "CUTLASS's 3xTF32 (NVIDIA/cutlass, examples/27_ampere_3xtf32_fast_accurate_tensorop_gemm: OpMultiplyAddFastF32)",
)
class ThreeTf32(Num):
    def three(self, a, b):
        large, other = tf32(a), tf32(b)
        return tf32(a - large) @ other + large @ tf32(b - other) + large @ other

    def mm(self, x, w):
        return self.three(x, w.T)

    def qk(self, q, k):
        return self.three(q, k.swapaxes(1, 2))

    def pv(self, p, v):
        return self.three(p, v)


@policy(
    "S18",
    "bfloat16; scores are multiplied by the bfloat16 number 1.4453125 for log2 e, exponentials and the reciprocal of their sum are bfloat16; the "
    "sigmoid is (tanh(x / 2) + 1) / 2 with a bfloat16 tanh and sum; the reciprocal root of a norm is bfloat16",
    "AMD's kernels for XDNA 2 (Xilinx/mlir-aie, aie_kernels/aie2p/softmax.cc, silu.cc and rms_norm.cc)",
)
class Engines(Bfloat):
    def rsqrt(self, x):
        return bf16(super().rsqrt(x))

    def gain(self, y, w):
        return bf16(bf16(y) * w)

    def sigmoid(self, x):
        return bf16(bf16(bf16(np.tanh(bf16(x) * F32(0.5))) + F32(1)) * F32(0.5))

    def silu(self, x):
        return bf16(bf16(x) * self.sigmoid(x))

    def qk(self, q, k):
        return bf16(bf16(q) @ k.swapaxes(1, 2))

    def softmax(self, s):
        s = bf16(s) * F32(1.4453125)
        e = bf16(np.exp2(s - bf16(s.max(axis=-1, keepdims=True))))
        return bf16(e * bf16(F32(1) / e.sum(axis=-1, keepdims=True, dtype=F32)))

    def sin_cos(self, a):
        return bf16(np.sin(a)), bf16(np.cos(a))


# --- caches -------------------------------------------------------------------------------------------------------------------------------


def affine(bits):  # MLX: the end with the larger magnitude is hit exactly; scale and offset float16
    def quantise(b):
        least, most = b.min(axis=-1, keepdims=True), b.max(axis=-1, keepdims=True)
        low = np.abs(least) > np.abs(most)
        scale = np.maximum((most - least) / F32(2**bits - 1), F32(1e-7)) * np.where(low, F32(1), F32(-1))
        edge = np.where(low, least, most)
        q = np.rint(edge / scale)
        scale, offset = f16(np.where(q == 0, scale, edge / np.where(q == 0, 1, q))), f16(np.where(q == 0, F32(0), edge))
        scale = np.where(scale == 0, F32(2.0**-24), scale)
        return np.clip(np.rint((b - offset) / scale), 0, 2**bits - 1) * scale + offset

    return lambda x: by_block(x, 16, quantise)


@policy(
    "S19",
    "float16 with float32 sums; keys and values have 4 bits in groups of 16 with a float16 scale and an offset that is the end of larger magnitude; "
    "queries are multiplied by the scale first, scores are float16, softmax is float32 inside",
    "mlx-lm with kv_bits 4 (ml-explore/mlx-lm, models/base.py: quantized_scaled_dot_product_attention; ml-explore/mlx, quantized.h: "
    "affine_quantize; groups of 64 there)",
)
class QuantisedMlx(Half):
    def cache(self, x, kind):
        return affine(4)(f16(x))

    def silu(self, x):
        return f16(x * f16(self.sigmoid(x)))

    def attend(self, engine, q, k, v, visible, n):
        s = f16(engine.cap(f16(f16(q) * f16(scale_of(engine, n))) @ k.swapaxes(1, 2), n))
        return f16(self.pv(f16(self.softmax(np.where(visible, s, F32(-np.inf)))), v))


@policy(
    "S20",
    "keys are kept in front of RoPE, 4 bits by channel between the least and the largest number of 16 tokens with a zero point, and are turned when "
    "they are read; values 4 bits by token and head; the first token's key and value stay float16; all else is float16",
    "KVQuant (SqueezeAILab/KVQuant; arXiv 2401.18079: keys by channel in front of RoPE, values by token, the first token kept; all tokens "
    "calibrate a channel there)",
)
class BeforeRope(Half):
    def keys(self, k, first):  # [H, S, K]
        parts = np.split(k[:, first:], range(16, k.shape[1] - first, 16), axis=1)
        return np.concatenate([k[:, :first], *(between(x, 4, axis=1, kind=f16) for x in parts if x.size)], axis=1)

    def attend(self, engine, q, k, v, visible, n):
        v = np.concatenate([v[:, :1], between(v[:, 1:], 4, kind=f16)], axis=1)
        if hasattr(engine, "rope"):
            pos = engine.cache_get(n)[2]
            back = engine.rope(k.swapaxes(0, 1), -np.asarray(pos), n, "k").swapaxes(0, 1)
            k = f16(engine.rope(self.keys(f16(back), 1).swapaxes(0, 1), pos, n, "k").swapaxes(0, 1))
        else:
            k = self.keys(k, 1)
        return f16(super().attend(engine, f16(q), k, v, visible, n))
