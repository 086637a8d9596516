"""Twenty more honest rounding policies (M01..M20), by a seventh author: correct engines that only round, as files of mixed types, caches of
several types, rotations and low-rank corrections, and inference over several devices do, in ways that no earlier file of policies has.

POLICIES: id -> record as in policies.py. Sizes of blocks, tiles and ranks are scaled down where the tiny models have fewer numbers than one.
The models these policies are for have three layers; a rule for layers is applied to those. GitHub is named without its host.
"""

import math
from types import SimpleNamespace

import numpy as np
from engine import F32, Num

POLICIES = {}
F64 = np.float64
LAYERS = 3


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


def e2m1(x):
    return small_float(x, 1, 0, 6)


def largest(x, axis=-1):
    return np.maximum(np.abs(x).max(axis=axis, keepdims=True), F32(1e-10))


def by_block(x, size, quantise):  # the last axis in blocks; zeros fill the last one
    m = x.shape[-1]
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], -m % size), F32)], axis=-1)
    return quantise(padded.reshape(*x.shape[:-1], -1, size)).reshape(padded.shape)[..., :m].astype(F32)


def fp8(x):  # one scale for the whole tensor
    scale = F32(max(float(np.abs(x).max()), 1e-10) / 448)
    return e4m3(x / scale) * scale


def integers(x, bits, axis=-1):  # symmetric, float32 scale
    most = F32(2 ** (bits - 1) - 1)
    scale = largest(x, axis) / most
    return (np.clip(np.rint(x / scale), -most, most) * scale).astype(F32)


def groups(bits):  # symmetric, float16 scale
    def quantise(b):
        most = F32(2 ** (bits - 1) - 1)
        scale = np.maximum(f16(largest(b) / most), F32(2.0**-24))
        return np.clip(np.rint(b / scale), -most, most) * scale

    return quantise


def between(x, bits, axis=-1):  # from the least to the largest number, zero among the levels
    least, most = np.minimum(x.min(axis=axis, keepdims=True), 0), np.maximum(x.max(axis=axis, keepdims=True), 0)
    step = np.maximum(most - least, F32(1e-6)) / F32(2**bits - 1)
    zero = np.rint(-least / step)
    return ((np.clip(np.rint(x / step) + zero, 0, 2**bits - 1) - zero) * step).astype(F32)


def signed(bits):  # ggml's Q4_0 and Q5_0: the number of the largest magnitude takes the code that is least, float16 scale
    def quantise(b):
        half = 2 ** (bits - 1)
        at = np.abs(b).argmax(axis=-1)[..., None]
        scale = f16(np.take_along_axis(b, at, axis=-1) / F32(-half))
        scale = np.where(scale == 0, F32(2.0**-24), scale)
        return (np.clip(np.floor(b / scale + F32(half + 0.5)), 0, 2 * half - 1) - half) * scale

    return quantise


q8_0 = groups(8)


def nvfp4(x):
    whole = F32(max(float(np.abs(x).max()), 1e-10) / (448 * 6))

    def quantise(b):
        scale = np.maximum(e4m3(largest(b) / F32(6) / whole), F32(2.0**-9)) * whole
        return e2m1(b / scale) * scale

    return by_block(x, 16, quantise)


def shared(number, most):  # microscaling: 32 numbers share a power of two (16 of them here), rounded up
    def quantise(b):
        scale = (2.0 ** np.ceil(np.log2(largest(b).astype(F64) / most))).astype(F32)
        return number(b / scale) * scale

    return lambda x: by_block(x, 16, quantise)


mxfp8, mxfp4 = shared(e4m3, 448), shared(e2m1, 6)


def block_float(bits):  # 16 numbers share an exponent and keep a sign and `bits` more
    def quantise(b):
        step = (2.0 ** (np.floor(np.log2(largest(b).astype(F64))) + 1 - bits)).astype(F32)
        return np.clip(np.rint(b / step), -(2**bits) + 1, 2**bits - 1) * step

    return lambda x: by_block(x, 16, quantise)


def hadamard(size):
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return (h / math.sqrt(size)).astype(F32)


def layer_of(name):  # None for the embedding and the head
    return int(name.split(".")[1]) if name.startswith("blk.") else None


def more_bits(n):  # the layers that get more bits in llama.cpp's mixes
    return n < LAYERS // 8 or n >= 7 * LAYERS // 8 or (n - LAYERS // 8) % 3 == 2


def scale_of(engine, n):  # the factor of the scores
    return float(np.ravel(engine.scale_scores(np.ones((1, 1, 1), F32), n))[0])


def shares(size, parts):
    edges = [size * i // parts for i in range(parts + 1)]
    return list(zip(edges, edges[1:]))


RANKS = ("attn_output.weight", "ffn_down.weight")  # matrices whose inputs are shared out to ranks


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


# --- types by tensor and by layer ---------------------------------------------------------------------------------------------------------


@policy(
    "M01",
    "weights in groups of 32 with a float16 scale and offset, of 4 bits; values and down have 6 in the layers that get more, and so has "
    "the head; all else is float16 with float32 sums",
    "mlx-lm's recipe mixed_4_6 (ml-explore/mlx-lm, mlx_lm/convert.py; groups of 64 there)",
)
class MixedFourSix(Half):
    def affine(self, bits):
        def quantise(b):
            least, most, n = b.min(axis=-1, keepdims=True), b.max(axis=-1, keepdims=True), F32(2**bits - 1)
            scale = np.maximum((most - least) / n, F32(1e-7))
            side = np.abs(least) > np.abs(most)
            scale, edge = np.where(side, scale, -scale), np.where(side, least, most)
            code = np.rint(edge / scale)
            scale = np.where(code != 0, edge / np.where(code != 0, code, 1), scale)
            offset = np.where(code == 0, F32(0), edge)
            return np.clip(np.rint((b - offset) / scale), 0, n) * f16(scale) + f16(offset)

        return quantise

    def weight(self, w, name):
        n = layer_of(name)
        high = name == "output.weight" or (n is not None and name.endswith(("attn_v.weight", "ffn_down.weight")) and more_bits(n))
        return by_block(w, 32, self.affine(6 if high else 4))


@policy(
    "M02",
    "weights as Q5_0, but Q8_0 for the head and, in the layers that get more, for values and down; inputs of matrices as Q8_0; queries, "
    "probabilities and the cache float16",
    "llama-quantize's Q4_K_M for rows that are no multiple of 256, on CPUs (ggml-org/llama.cpp/pull/3747: the types to fall back to)",
)
class Fallback(Num):
    def weight(self, w, name):
        n = layer_of(name)
        high = name == "output.weight" or (n is not None and name.endswith(("attn_v.weight", "ffn_down.weight")) and more_bits(n))
        return by_block(w, 32, q8_0 if high else signed(5))

    def lin_in(self, x, name):
        return by_block(x, 32, q8_0)

    def cache(self, x, kind):
        return f16(x)

    def qk(self, q, k):
        return f16(q) @ k.swapaxes(1, 2)

    def pv(self, p, v):
        return f16(p) @ v


@policy(
    "M03",
    "the feed-forward multiplies in NVFP4 (inputs, too), attention's matrices and the head in bfloat16; the cache is FP8 (E4M3) with one "
    "scale for keys and one for values",
    "NVIDIA/Model-Optimizer's NVFP4_MLP_ONLY_CFG with FP8_KV_CFG (general/ptq/nvfp4_mlp_only-fp8_kv.yaml)",
)
class FeedForwardOnly(Bfloat):
    def small(self, x, name):
        return nvfp4(bf16(x)) if ".ffn_" in name and "norm" not in name else bf16(x)

    def weight(self, w, name):
        return self.small(w, name)

    def lin_in(self, x, name):
        return self.small(x, name)

    def cache(self, x, kind):
        return fp8(bf16(x))


@policy(
    "M04",
    "the first and the last layer and the head have 8 bits between the least and the largest weight of a row, the layer between has 4 bits "
    "in groups of 32; inputs are 8 bits in groups of 32, keys and values 8 bits by token and head with a zero point",
    "OpenVINO with NNCF's mixed precision (openvinotoolkit/nncf, docs CompressWeights.md: INT4_SYM with the backup INT8_ASYM), a u8 cache "
    "and dynamic quantisation by groups",
)
class Backup(Num):
    def weight(self, w, name):
        return by_block(w, 32, groups(4)) if layer_of(name) == 1 else between(w, 8)

    def lin_in(self, x, name):
        return by_block(x, 32, lambda b: integers(b, 8))

    def cache(self, x, kind):
        return between(x, 8)


@policy(
    "M05",
    "weights of 4 bits whose scale is one for the row times a whole number from 1 to 16 for each 16 inputs, the head 8 bits by row; what "
    "is written has 16 bits between its least and largest number, keys and values 8 bits with one scale for a call",
    "Qualcomm's 16a4w with blocks (LPBQ of AIMET and of ExecuTorch's QNN backend)",
)
class LowPowerBlocks(Num):
    def blocks(self, b):  # [N, B, 16]
        each = largest(b) / F32(7)
        row = each.max(axis=1, keepdims=True)
        scale = np.clip(np.ceil(each / row * F32(16)), 1, 16) * row / F32(16)
        return np.clip(np.rint(b / scale), -8, 7) * scale

    def weight(self, w, name):
        return by_block(w, 16, self.blocks) if name.startswith("blk.") else integers(w, 8)

    def store(self, x, name):
        return between(x, 16, axis=None)

    def cache(self, x, kind):
        return integers(x, 8, axis=None)


@policy(
    "M06",
    "gate and up multiply in MXFP4, the other matrices of the layers in MXFP8, inputs as well as weights, with scales rounded up; the head "
    "and all that is written bfloat16",
    "AutoRound's AutoScheme with the choices MXFP4 and MXFP8 (intel/auto-round, docs/step_by_step.md; auto_round/data_type/mxfp.py, "
    "quant_mx_rceil)",
)
class AutoScheme(Bfloat):
    def small(self, x, name):
        if not name.startswith("blk."):
            return bf16(x)
        return (mxfp4 if name.endswith(("ffn_gate.weight", "ffn_up.weight")) else mxfp8)(bf16(x))

    def weight(self, w, name):
        return self.small(w, name)

    def lin_in(self, x, name):
        return self.small(x, name)


@policy(
    "M07",
    "within each matrix the quarter of the inputs with the largest weights has 6 bits, the others 4, in groups of 16; a scale is a whole "
    "number from 1 to 16, squared, times the group's largest; float16 inputs and results",
    "ExLlamaV2's EXL2 files (turboderp-org/exllamav2; bits by input, scales of 4 bits)",
)
class ByInput(Half):
    def weight(self, w, name):
        order, out = np.argsort(-np.abs(w).max(axis=0), kind="stable"), np.empty_like(w)
        quarter = w.shape[1] // 4 // 16 * 16
        for i in range(0, w.shape[1], 16):
            at, half = order[i : i + 16], F32(32 if i < quarter else 8)
            each = largest(w[:, at]) / (half - 1)
            most = f16(each.max())
            scale = np.clip(np.ceil(np.sqrt(each / most) * 16), 1, 16) ** 2 / F32(256) * most
            out[:, at] = f16(np.clip(np.rint(w[:, at] / scale), -half, half - 1) * scale)
        return out


@policy(
    "M08",
    "gate and up have weights of BFP4 (16 numbers share an exponent and keep 3 bits), the other matrices BFP8; gate, up and their product "
    "are written as BFP8, as is the cache; the multiplier reads 7 bits of an input; all else is bfloat16",
    "Tenstorrent's tt-transformers (tenstorrent/tt-metal, models/tt_transformers/PERF.md: ff1_3 bfp4, ff2 bfp8, wqkv and wo bfp8, kv_cache "
    "bfp8, activation mixed)",
)
class Performance(Bfloat):
    def weight(self, w, name):
        return block_float(3 if name.endswith(("ffn_gate.weight", "ffn_up.weight")) else 7)(bf16(w))

    def lin_in(self, x, name):
        return cut(bf16(x), 6)

    def store(self, x, name):
        return block_float(7)(x) if name in ("ffn_gate", "ffn_up", "ffn_out") else bf16(x)

    def cache(self, x, kind):
        return block_float(7)(x)


# --- rotations, low ranks, weights of few bits --------------------------------------------------------------------------------------------


@policy(
    "M09",
    "weights of the layers have 4 bits in groups of 32, the embedding and the head 8 by row, inputs 8 bits by token with a zero point; in "
    "front of down alone, inputs and weights are turned by a Hadamard matrix",
    "Llama 3.2 SpinQuant in ExecuTorch (pytorch/executorch, examples/models/llama/README.md; turned back here, which gives the same "
    "products)",
)
class TurnedDown(Num):
    turn = hadamard(32)

    def around(self, x, name, quantise):
        if not name.endswith("ffn_down.weight"):
            return quantise(x)
        y = quantise(by_block(x, 32, lambda b: b @ self.turn))
        return by_block(y, 32, lambda b: b @ self.turn.T)

    def weight(self, w, name):
        return self.around(w, name, lambda x: by_block(x, 32, lambda b: integers(b, 4))) if name.startswith("blk.") else integers(w, 8)

    def lin_in(self, x, name):
        return self.around(x, name, lambda y: between(y, 8))


@policy(
    "M10",
    "each matrix of the layers is a bfloat16 product of rank 8 and a rest in NVFP4; an input goes to the rest in NVFP4 and to the two thin "
    "matrices in bfloat16, between which it is bfloat16; the results are added in float32 and written as bfloat16",
    "SVDQuant (nunchaku-ai/nunchaku; https://docs.vllm.ai/projects/vllm-omni/en/latest/user_guide/quantization/svdquant/, rank 32 there)",
)
class LowRank(Bfloat):
    def __init__(self):
        self.parts = {}

    def weight(self, w, name):
        if not name.startswith("blk."):
            return bf16(w)
        u, s, v = np.linalg.svd(w.astype(F64), full_matrices=False)
        up, down = bf16(u[:, :8] * s[:8]), bf16(v[:8])
        self.parts[name] = up, down, nvfp4(w - up @ down)
        return self.parts[name][2] + up @ down

    def mm(self, x, w):
        if self.name not in self.parts:
            return bf16(x @ w.T)
        up, down, rest = self.parts[self.name]
        return bf16(nvfp4(x) @ rest.T + bf16(x @ down.T) @ up.T)


@policy(
    "M11",
    "weights have 4 bits in groups of 32 and are float16 when they are multiplied; inputs are cut in three, and each part adds its float32 "
    "sums to the float16 result of the parts before it, and writes float16",
    "Marlin's kernel for 4-bit weights (IST-DASLab/marlin: the reduction over thread blocks goes through the output)",
)
class Stripes(Half):
    def weight(self, w, name):
        return f16(by_block(w, 32, groups(4))) if name.startswith("blk.") else f16(w)

    def mm(self, x, w):
        y = np.zeros((len(x), len(w)), F32)
        for a, b in shares(x.shape[1], 3):
            y = f16(f16(x[:, a:b]) @ w[:, a:b].T + y)
        return y


@policy(
    "M12",
    "FP8 (E4M3) in the layers with scales that are powers of two, rounded up: one for 32 x 32 weights and one for 32 inputs of a token; "
    "sums float32, results and all else bfloat16",
    "DeepGEMM with UE8M0 scales, as for DeepSeek-V3.1 on Blackwell (deepseek-ai/DeepGEMM; 128 there)",
)
class PowersOfTwo(Bfloat):
    def block(self, b):
        scale = (2.0 ** np.ceil(np.log2(largest(b).astype(F64) / 448))).astype(F32)
        return e4m3(b / scale) * scale

    def weight(self, w, name):
        if not name.startswith("blk."):
            return bf16(w)
        out = np.empty_like(w)
        for i in range(0, w.shape[0], 32):
            for j in range(0, w.shape[1], 32):
                part = w[i : i + 32, j : j + 32]
                out[i : i + 32, j : j + 32] = self.block(part.reshape(1, -1)).reshape(part.shape)
        return out

    def lin_in(self, x, name):
        return by_block(bf16(x), 32, self.block) if name.startswith("blk.") else bf16(x)


# --- caches and attention -----------------------------------------------------------------------------------------------------------------


@policy(
    "M13",
    "the first layer's cache and attention are bfloat16; in the others queries, keys and values are FP8 (E4M3) with one scale each, and "
    "probabilities of the largest score 1 are FP8 times 256, divided by their unrounded sum; all else is bfloat16",
    "vLLM with an FP8 cache that leaves out a layer (--kv-cache-dtype-skip-layers), on FlashAttention-3 "
    "(https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/)",
)
class LayersOfCaches(Bfloat):
    def cache(self, x, kind):
        return bf16(x) if layer_of(self.name) in (None, 0) else fp8(bf16(x))

    def attend(self, engine, q, k, v, visible, n):
        small = (lambda x: bf16(x)) if n == 0 else fp8
        s = engine.cap(engine.scale_scores(self.qk(small(bf16(q)), k), n), n)
        s = np.where(visible, s, F32(-np.inf))
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        p = bf16(e) if n == 0 else e4m3(e * F32(256)) / F32(256)
        return bf16(self.pv(p, v) / e.sum(axis=-1, keepdims=True, dtype=F32))


@policy(
    "M14",
    "keys and values are kept in NVFP4 (E2M1 in blocks of 16 with an E4M3 scale, and one scale for the tensor) and are turned into FP8 in "
    "front of attention, whose queries are FP8, too; all else is bfloat16",
    "TensorRT-LLM's NVFP4 cache on Blackwell (https://nvidia.github.io/TensorRT-LLM/features/quantization.html)",
)
class FourBitCache(Bfloat):
    def cache(self, x, kind):
        return fp8(nvfp4(bf16(x)))

    def qk(self, q, k):
        return fp8(q) @ k.swapaxes(1, 2)

    def pv(self, p, v):
        return bf16(bf16(p) @ v)


@policy(
    "M15",
    "attention over tiles of 16 keys whose scores are sums in float16, 16 products at a time; maximum, scaled difference and 2^x of it are "
    "float16; weighted values and the sum of exponentials have float32 sums; all tensors float16",
    "FlashInfer with allow_fp16_qk_reduction (flashinfer-ai/flashinfer, include/flashinfer/attention/prefill.cuh)",
)
class HalfScores(Half):
    def weight(self, w, name):
        return f16(w)

    def qk(self, q, k):
        s = 0
        for i in range(0, q.shape[-1], 16):
            s = f16(f16(q[..., i : i + 16]) @ f16(k[..., i : i + 16]).swapaxes(1, 2) + s)
        return s

    def attend(self, engine, q, k, v, visible, n):
        s = f16(engine.cap(self.qk(q, k) * F32(scale_of(engine, n)), n)) * F32(math.log2(math.e))
        s = np.where(visible, f16(s), F32(-65504))
        top, total = np.full((*q.shape[:2], 1), F32(-65504)), np.zeros((*q.shape[:2], 1), F32)
        y = np.zeros((*q.shape[:2], v.shape[-1]), F32)
        for i in range(0, k.shape[1], 16):
            part = s[..., i : i + 16]
            new = np.maximum(top, part.max(axis=-1, keepdims=True))
            e = f16(np.exp2(f16(part - new))) * visible[:, i : i + 16]
            old = f16(np.exp2(f16(top - new)))
            top, total = new, total * old + e.sum(axis=-1, keepdims=True, dtype=F32)
            y = y * old + e @ f16(v[:, i : i + 16])
        return f16(y / total)


@policy(
    "M16",
    "all tensors bfloat16; sines and cosines come from a table in bfloat16 that was made from float32 angles; norms and softmax are "
    "float32 inside, the gated product is rounded in between",
    "vLLM in bfloat16 (vllm-project/vllm: cos_sin_cache has the model's type; SiluAndMul rounds the activation)",
)
class TableOfBfloat(Bfloat):
    def sin_cos(self, a):
        a = a.astype(F32)
        return bf16(np.sin(a)), bf16(np.cos(a))

    def silu(self, x):
        return bf16(super().silu(x))


# --- several devices ----------------------------------------------------------------------------------------------------------------------


@policy(
    "M17",
    "four ranks keep a quarter of the tokens each: parts of attention's output and of down go around a ring in bfloat16, so that the order "
    "of a token's sum depends on its rank; normalised tokens are gathered in FP8 with one scale; weights FP8, all else bfloat16",
    "vLLM's compilation passes for sequence parallelism and FP8 (vllm-project/vllm, vllm/compilation: reduce-scatter, norm, quantisation, "
    "all-gather)",
)
class Ring(Bfloat):
    def weight(self, w, name):
        return fp8(bf16(w)) if name.startswith("blk.") else bf16(w)

    def lin_in(self, x, name):
        self.name = name
        return fp8(bf16(x)) if name.startswith("blk.") else bf16(x)

    def mm(self, x, w):
        if not self.name.endswith(RANKS):
            return bf16(x @ w.T)
        parts = [bf16(x[:, a:b] @ w[:, a:b].T) for a, b in shares(x.shape[1], 4)]
        out = np.empty_like(parts[0])
        for rank, (a, b) in enumerate(shares(len(x), 4)):
            y = parts[(rank + 1) % 4][a:b]
            for i in range(2, 5):
                y = bf16(y + parts[(rank + i) % 4][a:b])
            out[a:b] = y
        return out


@policy(
    "M18",
    "float16 weights and cache with a backend for each layer: the first multiplies float16 inputs and writes float16 (CUDA), the second "
    "adds in float16, 16 products at a time (Vulkan), the third and the head have float16 inputs and float32 results (CPU)",
    "llama.cpp with layers split over backends (ggml-org/llama.cpp, --tensor-split and --rpc, matrix cores with float16 accumulators in "
    "Vulkan)",
)
class ThreeBackends(Num):
    name = ""

    def weight(self, w, name):
        return f16(w)

    def lin_in(self, x, name):
        self.name = name
        return f16(x)

    def mm(self, x, w):
        n = layer_of(self.name)
        if n != 1:
            return f16(x @ w.T) if n == 0 else x @ w.T
        y = 0
        for i in range(0, x.shape[1], 16):
            y = f16(f16(x[:, i : i + 16]) @ w[:, i : i + 16].T + y)
        return y

    def cache(self, x, kind):
        return f16(x)


@policy(
    "M19",
    "weights as Q40 (blocks of 32 with 4 bits and a float16 scale), inputs of matrices as Q80; two nodes each have half of the inputs of "
    "attention's output and of down, send their part as Q80, and the parts are added in float32",
    "distributed-llama (b4rtaz/distributed-llama, --buffer-float-type q80 with q40 weights)",
)
class Nodes(Num):
    name = ""

    def weight(self, w, name):
        return w if name == "token_embd.weight" else by_block(w, 32, signed(4))

    def lin_in(self, x, name):
        self.name = name
        return by_block(x, 32, q8_0)

    def mm(self, x, w):
        if not self.name.endswith(RANKS):
            return x @ w.T
        return sum(by_block(x[:, a:b] @ w[:, a:b].T, 32, q8_0) for a, b in shares(x.shape[1], 2))


@policy(
    "M20",
    "float16 with four ranks: parts of attention's output and of down are sent as 6-bit codes with a float16 scale for 32 numbers, are "
    "added in float16, and the sum goes back as such codes",
    "QuickReduce in vLLM on ROCm (vllm-project/vllm, VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT6)",
)
class SixBits(Half):
    def weight(self, w, name):
        return f16(w)

    def mm(self, x, w):
        if not self.name.endswith(RANKS):
            return f16(x @ w.T)
        y = 0
        for a, b in shares(x.shape[1], 4):
            y = f16(by_block(f16(f16(x[:, a:b]) @ w[:, a:b].T), 32, signed(6)) + y)
        return f16(by_block(y, 32, signed(6)))
