"""Twenty more honest rounding policies (KA01..KA20), by an eleventh author: correct engines that only round, each as one number format, kernel,
compiler, NPU, phone or server does. 5 are mild, 10 medium and 5 coarse (`grade`).

POLICIES: id -> record as in policies.py. Sizes of blocks, tiles and groups are scaled down where the tiny models have fewer numbers than one, and
`what` gives the size that is used here.
"""

from types import SimpleNamespace

import numpy as np
from engine import F32, Num

POLICIES = {}
F64 = np.float64
MILD, MEDIUM, COARSE = "mild", "medium", "coarse"


def policy(id, grade, what, source):
    def add(cls):
        POLICIES[id] = SimpleNamespace(id=id, grade=grade, what=what, source=source, make=cls)
        return cls

    return add


# --- number formats ---------------------------------------------------------------------------------------------------------------------


def bf16(x):
    b = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    return ((b + 0x7FFF + (b >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(F32).reshape(np.shape(x))


def f16(x):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(F32)


def tf32(x):  # ties away from zero, as cvt.rna.tf32
    b = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    return ((b + 0x1000) & 0xFFFFE000).astype(np.uint32).view(F32).reshape(np.shape(x))


def power(x):  # the exponent of the leading bit
    return np.floor(np.log2(np.maximum(np.abs(x).astype(F64), 1e-30)))


def small_float(x, bits, least, most):  # `bits` behind the point, exponents from `least` on, saturated
    unit = 2.0 ** (np.maximum(power(x), least) - bits)
    return np.clip(np.rint(x.astype(F64) / unit) * unit, -most, most).astype(F32)


def posit16(x):  # es = 1: the fraction gets what sign, regime and one bit of the exponent leave
    e = power(x)
    k = np.floor(e / 2)
    regime = np.where(k >= 0, k + 2, 1 - k)
    unit = 2.0 ** (e - np.maximum(16 - 1 - regime - 1, 0))
    return (np.rint(x.astype(F64) / unit) * unit).astype(F32)


def int_codes(x, most, axis=-1):  # symmetric codes and their scale along an axis (None: of the whole tensor)
    scale = np.maximum(np.abs(x).max(axis=axis, keepdims=True), F32(1e-9)) / F32(most)
    return np.clip(np.rint(x / scale), -most - 1, most).astype(F32), scale.astype(F32)


def symmetric(x, most, axis=-1):
    codes, scale = int_codes(x, most, axis)
    return codes * scale


def asymmetric(x, bits, axis=-1):  # codes 0..2^bits - 1 and a zero point that is a code, so that 0 stays 0
    low, high = np.minimum(x.min(axis=axis, keepdims=True), 0), np.maximum(x.max(axis=axis, keepdims=True), 0)
    scale = np.maximum(high - low, F32(1e-9)) / F32(2**bits - 1)
    zero = np.rint(-low / scale)
    return ((np.clip(np.rint(x / scale) + zero, 0, 2**bits - 1) - zero) * scale).astype(F32)


def by_blocks(x, size, f):  # f over blocks of the last axis, which is padded with zeros
    n = x.shape[-1]
    pad = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % size)])
    return f(pad.reshape(*x.shape[:-1], -1, size)).reshape(*x.shape[:-1], -1)[..., :n].astype(F32)


def split_k(x, w, size, each=lambda s: s, total=lambda s: s):  # partial sums of `size` products, rounded, and sums of them, rounded
    y = np.zeros((len(x), len(w)), F32)
    for i in range(0, x.shape[-1], size):
        y = total(y + each(x[:, i : i + size] @ w[:, i : i + size].T))
    return y.astype(F32)


def online(s, v, size, p_of, out=lambda o: o, exp=np.exp, slack=0.0):
    """Attention over tiles of `size` keys with a running maximum: s [H, T, S], v [H, S, K]. The maximum moves when it grows by more than slack."""
    m = np.full(s.shape[:2] + (1,), -np.inf, F32)
    total, acc = np.zeros_like(m), np.zeros(s.shape[:2] + v.shape[-1:], F32)
    for i in range(0, s.shape[-1], size):
        tile = s[..., i : i + size]
        top = np.maximum(m, tile.max(axis=-1, keepdims=True))
        top = np.where(np.isfinite(m) & (top <= m + F32(slack)), m, top)
        base = np.where(np.isfinite(top), top, F32(0))
        keep = np.where(np.isfinite(m), np.exp(np.where(np.isfinite(m), m, 0) - base), F32(0)).astype(F32)
        e = np.where(np.isfinite(tile), exp(np.where(np.isfinite(tile), tile - base, F32(0)).astype(F32)), F32(0)).astype(F32)
        total = total * keep + e.sum(axis=-1, keepdims=True, dtype=F32)
        acc, m = out(acc * keep + p_of(e) @ v[:, i : i + size]), top
    return (acc / total).astype(F32)


def masked(engine, num, q, k, visible, n):
    return np.where(visible, engine.cap(engine.scale_scores(num.qk(q, k), n), n), F32(-np.inf)).astype(F32)


# --- mild -------------------------------------------------------------------------------------------------------------------------------


@policy(
    "KA01", MILD, "float32 products are three products of bfloat16 halves (high x high, high x low, low x high) with float32 sums, smallest first",
    "JAX, Precision.HIGH and dot algorithm BF16_BF16_F32_X3 (docs.jax.dev/en/latest/jax.lax.html)",
)
class ThreeProducts(Num):
    def mm(self, x, w):
        a, b = bf16(x), bf16(w)
        c, d = bf16(x - a), bf16(w - b)
        return (c @ b.T + a @ d.T) + a @ b.T

    def qk(self, q, k):
        a, b = bf16(q), bf16(k)
        return (bf16(q - a) @ b.swapaxes(1, 2) + a @ bf16(k - b).swapaxes(1, 2)) + a @ b.swapaxes(1, 2)

    def pv(self, p, v):
        a, b = bf16(p), bf16(v)
        return (bf16(p - a) @ b + a @ bf16(v - b)) + a @ b


@policy(
    "KA02", MILD, "square roots' and numbers' reciprocals are the 8-bit estimates of NEON with one step of Newton; sums over rows in four lanes",
    "Arm, FRSQRTE, FRSQRTS, FRECPE and FRECPS (developer.arm.com/documentation/ddi0602)",
)
class Estimates(Num):
    def estimate(self, x):  # an 8-bit estimate of a positive result
        unit = F32(2) ** (power(x) - 8)
        return ((np.floor(x / unit) + 0.5) * unit).astype(F32)

    def rsqrt(self, x):
        y = self.estimate(1 / np.sqrt(x.astype(F64)))
        return y * (F32(3) - x * y * y) * F32(0.5)

    def reciprocal(self, x):
        y = self.estimate(1 / x.astype(F64))
        return y * (F32(2) - x * y)

    def lanes(self, x):
        x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 4)])
        a, b, c, d = np.moveaxis(np.add.accumulate(x.reshape(*x.shape[:-1], -1, 4), axis=-2)[..., -1, :], -1, 0)
        return ((a + c) + (b + d))[..., None].astype(F32)

    def mean(self, x):
        return self.lanes(x) * F32(1 / x.shape[-1])

    def total(self, x):
        return self.lanes(x)

    def softmax(self, s):
        e = self.exp(s - s.max(axis=-1, keepdims=True))
        return e * self.reciprocal(self.total(e))

    def sigmoid(self, x):
        return self.reciprocal(F32(1) + self.exp(np.minimum(-x, F32(80))))


@policy(
    "KA03", MILD, "tensors between operations and weights are posits of 16 bits (es = 1); products are summed exactly, as in a quire",
    "Posit Standard 2022, and SoftPosit's posit16 (posithub.org)",
)
class Posits(Num):
    def weight(self, w, name):
        return posit16(w)

    def store(self, x, name):
        return posit16(x)

    def cache(self, x, kind):
        return posit16(x)

    def mm(self, x, w):
        return (x.astype(F64) @ w.T.astype(F64)).astype(F32)


@policy(
    "KA04", MILD, "the cache's keys are bfloat16 and its values float16, all else float32; each query's keys are taken from the last to the first",
    "llama.cpp, --cache-type-k bf16 --cache-type-v f16 (tools/server/README.md)",
)
class TwoCacheTypes(Num):
    def cache(self, x, kind):
        return bf16(x) if kind == "k" else f16(x)

    def attend(self, engine, q, k, v, visible, n):
        return online(masked(engine, self, q, k, visible, n)[..., ::-1], v[:, ::-1], 1, lambda e: e)


@policy(
    "KA05", MILD, "attention by tiles of 16 keys: every fourth power of 2 is a polynomial of degree 3 instead of the unit's; the running maximum moves "
    "only when it grows by more than log 256; probabilities and values are tf32",
    "FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute)",
)
class SoftwarePowers(Num):
    def poly(self, x):
        t = x.astype(F32) * F32(1.4426950408889634)
        whole = np.floor(t)
        f = (t - whole).astype(F32)
        p = ((F32(0.077119089663) * f + F32(0.227564394474)) * f + F32(0.695146143436)) * f + F32(1)
        return np.ldexp(p, np.maximum(whole, -126).astype(np.int32))

    def powers(self, x):
        return np.where(np.arange(x.shape[-1]) % 4 == 3, self.poly(x), np.exp(x)).astype(F32)

    def attend(self, engine, q, k, v, visible, n):
        return online(masked(engine, self, q, k, visible, n), tf32(v), 16, tf32, exp=self.powers, slack=5.545)


# --- medium -----------------------------------------------------------------------------------------------------------------------------


class Sixteen(Num):
    """TensorFlow Lite's tables: 512 intervals over a range, linear in between, results in int16."""

    def table(self, f, x, low, high, unit):
        grid = np.rint(f(np.linspace(low, high, 513)) / unit) * unit
        return np.rint(np.interp(np.clip(x, low, high), np.linspace(low, high, 513), grid) / unit).astype(F64) * unit


@policy(
    "KA06", MEDIUM, "activations are int16 with one scale of a whole tensor, weights int8 with one for each row; exp and sigmoid are tables of 513 int16 "
    "numbers with straight lines in between",
    "TensorFlow Lite, 16x8 quantisation (ai.google.dev/edge/litert/models/post_training_integer_quant_16x8) and lut_populate of kernels/internal/common.h",
)
class SixteenByEight(Sixteen):
    def weight(self, w, name):
        return symmetric(w, 127) if "token_embd" not in name else w

    def store(self, x, name):
        return x if name == "result_output" else symmetric(x, 32767, None)

    def cache(self, x, kind):
        return symmetric(x, 32767, None)

    def exp(self, x):
        return np.where(np.isfinite(x), self.table(np.exp, x, -10, 0, 2.0**-15), 0).astype(F32)  # masked scores take no part

    def sigmoid(self, x):
        return self.table(lambda t: 1 / (1 + np.exp(-t)), x, -10, 10, 2.0**-15).astype(F32)


@policy(
    "KA07", MEDIUM, "what is written is bfloat16, rounded up or down by chance in proportion to the distance; products are bfloat16 with float32 sums",
    "AWS Neuron, stochastic rounding of Trainium (NEURON_RT_STOCHASTIC_ROUNDING_EN, awsdocs-neuron.readthedocs-hosted.com)",
)
class ByChance(Num):
    def __init__(self):
        self.rng = np.random.default_rng(1234)

    def round(self, x):
        b = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
        b = (b + self.rng.integers(0, 1 << 16, b.shape, dtype=np.uint64)) & 0xFFFF0000
        return b.astype(np.uint32).view(F32).reshape(np.shape(x))

    def weight(self, w, name):
        return bf16(w)

    def store(self, x, name):
        return self.round(x)

    def cache(self, x, kind):
        return self.round(x)

    def pv(self, p, v):
        return self.round(p) @ v


@policy(
    "KA08", MEDIUM, "exp is Schraudolph's shift with a correction of the fraction by two parabolas, in bfloat16; scores and probabilities are bfloat16",
    "VEXP: a low-cost RISC-V extension for the exponential in bfloat16 (arXiv 2504.11227)",
)
class ShiftedExp(Num):
    def exp(self, x):
        t = np.maximum(x.astype(F64), -80) * np.log2(np.e)
        whole = np.floor(t)
        f = np.floor((t - whole) * 2**15) / 2**15
        low = 0.21875 * f * (f + 3.296875)
        high = 0.4375 * (1 - f) * (f + 2.171875)
        p = np.where(f < 0.5, low, 1 - high)
        return bf16(((1 + np.clip(p, 0, 1)) * 2.0**whole).astype(F32))

    def qk(self, q, k):
        return bf16(bf16(q) @ bf16(k).swapaxes(1, 2))

    def softmax(self, s):
        e = self.exp(bf16(s - s.max(axis=-1, keepdims=True)))
        return bf16(e / self.total(e))

    def pv(self, p, v):
        return bf16(p @ bf16(v))


@policy(
    "KA09", MEDIUM, "softmax of powers of 2 against a maximum that is rounded up to a whole number, with tiles of 16: powers from a table of four lines with "
    "15 bits behind the point, the sum with 10 bits behind it, probabilities with 8 bits",
    "Softermax: hardware/software co-design of an efficient softmax (arXiv 2103.09301)",
)
class WholeMaximum(Num):
    def powers(self, t):  # of 2, t <= 0
        whole = np.floor(t)
        f = t - whole
        p = np.interp(f, np.arange(5) / 4, 2.0 ** (np.arange(5) / 4))
        return np.floor(p * 2.0 ** np.maximum(whole, -40) * 2**15 + 0.5) / 2**15

    def softmax(self, s):
        t = np.where(np.isfinite(s), s, -1e4).astype(F64) * np.log2(np.e)
        e = self.powers(np.maximum(t - np.ceil(t.max(axis=-1, keepdims=True)), -60))
        e = np.where(np.isfinite(s), e, 0)
        total = np.rint(e.sum(axis=-1, keepdims=True) * 2**10) / 2**10
        return (np.rint(e / np.maximum(total, 2.0**-10) * 2**8) / 2**8).astype(F32)


@policy(
    "KA10", MEDIUM, "inputs of matrices are int8 with a scale and a zero point for each token, weights int8 with a scale for each row; sums are int32",
    "KleidiAI, kai_matmul_clamp_f32_qai8dxp_qsi8cxp (gitlab.arm.com/kleidi/kleidiai)",
)
class ZeroPoints(Num):
    def weight(self, w, name):
        return symmetric(w, 127)

    def lin_in(self, x, name):
        return asymmetric(x, 8)

    def mm(self, x, w):
        return (x.astype(F64) @ w.T.astype(F64)).astype(F32)


@policy(
    "KA11", MEDIUM, "three devices: layer 0 on a CPU (inputs of matrices int8 in blocks of 32 with float16 scales), layer 1 on a GPU in float16, later "
    "layers and the head on an NPU (int16 for each tensor, weights int8 for each row); what goes from one to the next is float16",
    "heterogeneous execution as in llama.cpp's --n-gpu-layers and HeteroLLM (arXiv 2501.14794)",
)
class ThreeDevices(Num):
    def __init__(self):
        self.layer, self.device = 0, "cpu"

    def place(self, layer):
        self.layer, self.device = layer, ("cpu", "gpu", "npu")[min(layer, 2)]

    def weight(self, w, name):
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 2
        return w if name.startswith("token_embd") else (by_blocks(w, 32, self.q8), f16(w), symmetric(w, 127))[min(layer, 2)]

    def q8(self, x):
        scale = f16(np.abs(x).max(axis=-1, keepdims=True) / F32(127))
        return np.rint(x / np.maximum(scale, F32(1e-7))) * scale

    def store(self, x, name):
        if name == "inp_embd":
            self.place(0)
        y = x if self.device == "cpu" or name == "result_output" else f16(x) if self.device == "gpu" else symmetric(x, 32767)
        if name == "l_out":
            self.place(self.layer + 1)
            y = f16(x)
        return y

    def lin_in(self, x, name):
        return by_blocks(x, 32, self.q8) if self.device == "cpu" else x

    def cache(self, x, kind):
        return f16(x)


@policy(
    "KA12", MEDIUM, "bfloat16 engine whose table of cosines and sines is bfloat16, whose norms are computed in float32 and rounded before the weights are "
    "multiplied, and whose attention sums two halves of the keys apart and merges them by the logarithms of their sums",
    "vLLM, cos_sin_cache in the model's type and merge_attn_states (vllm-project/vllm, csrc/)",
)
class BfloatServer(Num):
    def weight(self, w, name):
        return bf16(w)

    def vector(self, x, name):
        return bf16(x)

    def store(self, x, name):
        return bf16(x)

    def cache(self, x, kind):
        return bf16(x)

    def sin_cos(self, a):
        return bf16(np.sin(a).astype(F32)), bf16(np.cos(a).astype(F32))

    def gain(self, y, w):
        return bf16(bf16(y) * w)

    def attend(self, engine, q, k, v, visible, n):
        s, half = masked(engine, self, q, k, visible, n), (v.shape[1] + 1) // 2
        parts = []
        for i in (slice(0, half), slice(half, None)):
            if s[..., i].shape[-1]:
                top = np.maximum(s[..., i].max(axis=-1, keepdims=True), F32(-1e30))
                e = np.exp(s[..., i] - top)
                total = e.sum(axis=-1, keepdims=True, dtype=F32)
                out = bf16(bf16(e) @ v[:, i] / np.maximum(total, F32(1e-30)))
                parts.append((out, top + np.log(np.maximum(total, F32(1e-30)))))
        top = np.max([lse for _, lse in parts], axis=0)
        shares = [np.exp(lse - top) for _, lse in parts]
        return bf16(sum(out * share for (out, _), share in zip(parts, shares)) / sum(shares))


@policy(
    "KA13", MEDIUM, "all tensors float16 in shaders: products of four numbers are one float16 dot, which is added in float16 to one of eight threads' sums, "
    "and these are added as a tree; norms and softmax in float32",
    "WebLLM and ONNX Runtime's WebGPU kernels with shader-f16 (mlc-ai/web-llm, microsoft/onnxruntime js/web)",
)
class Shaders(Num):
    def weight(self, w, name):
        return f16(w)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)

    def mm(self, x, w):
        sums = np.zeros((8, len(x), len(w)), F32)
        for i, at in enumerate(range(0, x.shape[-1], 4)):
            sums[i % 8] = f16(sums[i % 8] + f16(f16(x[:, at : at + 4]) @ w[:, at : at + 4].T))
        while len(sums) > 1:
            sums = f16(sums[: len(sums) // 2] + sums[len(sums) // 2 :])
        return sums[0]


@policy(
    "KA14", MEDIUM, "float16 tensors; dots of 16 products are exact and added in float16 partial sums; the norm's mean is a float16 sum of such dots of a row "
    "divided by 8 beforehand",
    "Graphcore Poplar, partialsType half and the AMP unit (docs.graphcore.ai, poplibs matmul options)",
)
class HalfPartials(Num):
    def weight(self, w, name):
        return f16(w)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):
        return f16(x)

    def mm(self, x, w):
        return split_k(f16(x), w, 16, f16, f16)

    def mean(self, x):
        total = np.zeros(x.shape[:-1] + (1,), F32)
        for i in range(0, x.shape[-1], 16):
            total = f16(total + f16(x[..., i : i + 16].sum(axis=-1, keepdims=True, dtype=F32) / F32(64)))
        return total * F32(64 / x.shape[-1])


@policy(
    "KA15", MEDIUM, "bfloat16 engine that verifies drafts: the last four rows of a call go through the kernels of one token (products in four parts, each "
    "rounded to bfloat16 before they are added), the rows before through those of prompts (float32 sums)",
    "speculative verification by decode kernels, as in TensorRT-LLM's XQA and vLLM's speculative decoding",
)
class Verified(Num):
    def weight(self, w, name):
        return bf16(w)

    def store(self, x, name):
        return x if name == "result_output" else bf16(x)

    def cache(self, x, kind):
        return bf16(x)

    def mm(self, x, w):
        x = bf16(x)
        late = max(len(x) - 4, 0)
        return np.concatenate([x[:late] @ w.T, split_k(x[late:], w, -(-x.shape[-1] // 4), bf16)])

    def pv(self, p, v):
        p, late = p.copy(), max(p.shape[1] - 4, 0)
        p[:, :late] = bf16(p[:, :late])
        return np.concatenate([p[:, :late] @ v, bf16(bf16(p[:, late:, ::2] @ v[:, ::2]) + bf16(p[:, late:, 1::2] @ v[:, 1::2]))], axis=1)


# --- coarse -----------------------------------------------------------------------------------------------------------------------------


@policy(
    "KA16", COARSE, "queries, keys and values are float8 (e4m3) with one scale of each head, probabilities float8 without a scale in tiles of 16 keys",
    "FlashAttention-3 with FP8 (Dao-AILab/flash-attention, hopper/), without incoherent processing",
)
class EightBitAttention(Num):
    def e4m3(self, x):
        return small_float(x, 3, -6, 448)

    def scaled(self, x):  # [H, S, K]
        d = np.maximum(np.abs(x).max(axis=(1, 2), keepdims=True), F32(1e-9)) / F32(448)
        return self.e4m3(x / d) * d

    def attend(self, engine, q, k, v, visible, n):
        q, k, v = self.scaled(q), self.scaled(k), self.scaled(v)
        return bf16(online(masked(engine, self, q, k, visible, n), v, 16, self.e4m3))


@policy(
    "KA17", COARSE, "blocks of 16 numbers share an exponent and have 7 bits each, in weights and in all tensors; sums of 32 products are added in bfloat16",
    "Tenstorrent, bfloat8_b with fp32_dest_acc_en=False (docs.tenstorrent.com, ttnn data types)",
)
class SharedExponents(Num):
    def bfp8(self, x):
        def block(b):
            unit = 2.0 ** (power(np.abs(b).max(axis=-1, keepdims=True)) - 6)
            return np.clip(np.rint(b / unit), -127, 127) * unit

        return by_blocks(x, 16, block)

    def weight(self, w, name):
        return self.bfp8(w)

    def store(self, x, name):
        return x if name == "result_output" else self.bfp8(x)

    def cache(self, x, kind):
        return self.bfp8(x)

    def mm(self, x, w):
        return split_k(x, w, 32, bf16, bf16)


@policy(
    "KA18", COARSE, "inputs and weights of matrices are float8 (e4m3 that saturates at 240) with one scale of the whole tensor, a power of 16; sums are "
    "float32, tensors bfloat16",
    "Intel Gaudi 2, FP8 with hardware-aligned scales (docs.habana.ai, Run Inference Using FP8)",
)
class AlignedScales(Num):
    def float8(self, x):
        scale = 16.0 ** np.ceil(np.log2(max(float(np.abs(x).max()), 1e-12) / 240) / 4)
        return (small_float((x / scale).astype(F32), 3, -7, 240) * scale).astype(F32)

    def weight(self, w, name):
        return bf16(w) if "token_embd" in name or name == "output.weight" else self.float8(w)

    def lin_in(self, x, name):
        return x if name in ("output.weight", "token_embd.weight") else self.float8(x)

    def store(self, x, name):
        return bf16(x)

    def cache(self, x, kind):
        return bf16(x)


@policy(
    "KA19", COARSE, "the cache's keys are int8 for each channel over groups of 8 tokens, its values codes of 4 bits with a scale and a zero of each head and "
    "token; a last group that is not full stays float16; all else is float16",
    "KIVI: tuning-free asymmetric quantisation of the KV cache (arXiv 2402.02750), with keys of 8 bits",
)
class ChannelKeys(Num):
    def weight(self, w, name):
        return f16(w)

    def store(self, x, name):
        return f16(x)

    def cache(self, x, kind):  # [T, G, K]
        out, full = f16(x), len(x) // 8 * 8
        for i in range(0, full, 8):
            part = x[i : i + 8]
            out[i : i + 8] = symmetric(part, 127, 0) if kind == "k" else asymmetric(part, 4)
        return out


@policy(
    "KA20", COARSE, "weights and inputs of matrices are signs and logarithms to the base 2^(1/16) in 8 bits, below the largest number of a row; products add "
    "logarithms and are summed in float32",
    "LNS-Madam: low-precision training in logarithmic number system (arXiv 2106.13914), with 16 steps to a power of two",
)
class Logarithms(Num):
    def logs(self, x):
        top = np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-9)).astype(F64)
        code = np.rint(16 * np.log2(np.maximum(np.abs(x), 1e-30) / top))
        return np.where(code < -127, 0, np.sign(x) * top * 2.0 ** (np.maximum(code, -127) / 16)).astype(F32)

    def weight(self, w, name):
        return w if "token_embd" in name else self.logs(w)

    def lin_in(self, x, name):
        return self.logs(x)
