"""Forty more faults that act always (Q01..Q40), by another author than public_faults.py's, each ported from a public bug report or review of
an inference engine (or of model code, kernels or loaders), or a typical porting error ("typical: ...", with a related report if there is one).

FAULTS: id -> record as in public_faults.py. The comment in front of each has the NMSE of the logits against the honest engine in the run that
the record names (selftest.measure), and where the fault acts.
"""

import math
from types import SimpleNamespace

import numpy as np
from engine import F32, Engine

FAULTS = {}
GH = "https://github.com/"


def fault(id, kind, model, family, cause, source, tokens=40, chunk=None, prefix=0, threads=1):
    def add(cls):
        where = source if source.startswith("typical") else GH + source
        FAULTS[id] = SimpleNamespace(id=id, kind=kind, model=model, family=family, cause=cause, source=where, engine=cls)
        vars(FAULTS[id]).update(tokens=tokens, chunk=chunk, prefix=prefix, threads=threads)
        return cls

    return add


# --- norms ------------------------------------------------------------------------------------------------------------------------------


# NMSE 1.3e-04, all layers alike, and the last norm
@fault(
    "Q01", "norms", "starcoder2", "LayerNorm",
    "LayerNorm's variance is the unbiased estimate (sum of squares divided by n - 1 instead of n), as torch.var and torch.std give by default",
    "LBANN/lbann/pull/2024",
)  # fmt: skip
class _(Engine):
    def layer_norm(self, x, w, b):
        x, m = x - self.num.mean(x), x.shape[-1]
        y = self.num.gain(x * self.num.rsqrt(self.num.mean(x * x) * F32(m / (m - 1)) + self.c.eps), w)
        return y if b is None else y + b


# NMSE 2.2e-04, all layers alike, and the last norm
@fault(
    "Q08", "norms", "gpt2", "LayerNorm",
    "the LayerNorm kernel's block (128) is wider than a row (64): the numbers beyond the row are loaded as 0, become -mean when the mean is "
    "subtracted, and are counted in the variance",
    "triton-lang/triton/issues/9838",
)  # fmt: skip
class _(Engine):
    def layer_norm(self, x, w, b):
        m, block = x.shape[-1], -(-x.shape[-1] // 128) * 128
        mean = self.num.mean(x)
        x = x - mean
        variance = self.num.mean(x * x) + mean * mean * F32((block - m) / m)
        y = self.num.gain(x * self.num.rsqrt(variance + self.c.eps), w)
        return y if b is None else y + b


# NMSE 1.4e-03, all layers alike, and the last norm
@fault(
    "Q02", "norms", "llama_eps", "RMSNorm",
    "RMSNorm adds epsilon outside the root: x / (rms + eps) instead of x / sqrt(mean of squares + eps) (eps is 0.05 here)",
    "allenai/OLMo/issues/281",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return self.num.gain(x / (np.sqrt(self.num.mean(x * x)) + F32(eps)), w)


# NMSE 2.6e-03, all layers alike, and the last norm
@fault(
    "Q03", "norms", "qwen3", "RMSNorm",
    "the reciprocal root in RMSNorm is the raw estimate (bit trick 0x5f3759df) without the Newton step behind it: up to 3.4 % too large or small",
    "Tencent/ncnn/pull/6903",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        v = np.ascontiguousarray(self.num.mean(x * x) + F32(eps), F32)
        r = (np.int32(0x5F3759DF) - (v.view(np.int32) >> 1)).view(F32)
        return self.num.gain(x * r, w)


# NMSE 3.1e-02, all layers alike
@fault(
    "Q04", "norms", "olmo2", "olmo2",
    "the norm of queries and keys takes the mean of squares of each head alone; OLMo 2's runs over all heads of a token together",
    "EleutherAI/gpt-neox/pull/1424",
)  # fmt: skip
class _(Engine):
    def qk_norm(self, x, name):
        w, k = self.w[name + ".weight"].reshape(-1, self.c.head_dim), self.c.head_dim
        y = self.rms_norm(x.reshape(len(x), -1, k), w, self.c.eps, name).reshape(x.shape)
        return self.put("Qcur_normed" if "attn_q" in name else "Kcur_normed", y, int(name.split(".")[1]))


# NMSE 7.4e-03, all layers alike, and the last norm
@fault(
    "Q05", "norms", "llama_wide", "RMSNorm",
    "RMSNorm divides the sum of squares by a constant of the kernel, the width rounded up to the tile (96), not by the model's width (88)",
    "hw-native-sys/pypto-lib/pull/127",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        m = x.shape[-1]
        padded = -(-m // 32) * 32
        return self.num.gain(x * self.num.rsqrt(self.num.total(x * x) * F32(1 / padded) + F32(eps)), w)


# NMSE 1.6e-02, all layers alike, and the last norm
@fault(
    "Q07", "norms", "llama_wide", "RMSNorm",
    "the vectorised sum of squares (16 lanes, 4 accumulators) adds the tail with a zeroing predicate to the fourth accumulator, whose lanes "
    "beyond the tail are set to zero: numbers 56 to 63 of a row are missing in RMSNorm's sum",
    "RedisAI/VectorSimilarity/pull/1028",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        m, lanes = x.shape[-1], 16
        full, tail = m // lanes, m % lanes
        keep = np.ones(m, F32)
        if tail:
            for v in range(3, full, 4):
                keep[v * lanes + tail : (v + 1) * lanes] = 0
        return self.num.gain(x * self.num.rsqrt(self.num.mean(x * x * keep) + F32(eps)), w)


# --- activations and exponentials ----------------------------------------------------------------------------------------------------------


class Act(Engine):
    """An engine with an activation of its own, behind `act`."""

    def gated(self, gate, up, n=None):
        return self.act(gate) * up

    def dense(self, x, n, end=""):
        b = f"blk.{n}.ffn_"
        if f"{b}gate{end}.weight" in self.w:
            return super().dense(x, n, end)
        y = self.act(self.put("ffn_up", self.linear(x, f"{b}up{end}", n), n))
        return self.put("ffn_down", self.linear(self.put("ffn_out", y, n), f"{b}down{end}", n), n)


# NMSE 5.2e-02, all layers alike
@fault(
    "Q09", "activations", "gpt2", "GELU",
    "the two coefficients of GELU by tanh are swapped: tanh(0.044715 x (1 + 0.79788 x^2)) instead of tanh(0.79788 x (1 + 0.044715 x^2))",
    "huggingface/transformers/pull/11514",
)  # fmt: skip
class _(Act):
    def act(self, x):
        return F32(0.5) * x * (F32(1) + self.num.tanh(x * F32(0.044715) * (F32(1) + F32(0.7978845608) * x * x)))


# NMSE 1.8e-04, all layers alike
@fault(
    "Q10", "activations", "starcoder2", "GELU",
    "the cubic term of GELU by tanh is missing: 0.5 x (1 + tanh(0.79788 x))",
    "typical: the term 0.044715 x^3 lost when GELU is rewritten by hand; cf. https://github.com/hendrycks/GELUs/issues/1",
)  # fmt: skip
class _(Act):
    def act(self, x):
        return F32(0.5) * x * (F32(1) + self.num.tanh(F32(math.sqrt(2 / math.pi)) * x))


# NMSE 1.9e-02, all layers alike
@fault(
    "Q11", "activations", "qwen2", "SwiGLU",
    "the SwiGLU kernel has GPT-OSS's constant built in: gate * sigmoid(1.702 gate) where the model has alpha = 1 (SiLU)",
    "tenstorrent/tt-metal/pull/43152",
)  # fmt: skip
class _(Act):
    def act(self, x):
        return x * self.num.sigmoid(F32(1.702) * x)


# NMSE 4.9e-03, all layers alike
@fault(
    "Q12", "activations", "llama_mha", "SwiGLU",
    "hard swish, x * clip(x + 3, 0, 6) / 6, instead of SiLU",
    "typical: 'swish' mapped to the mobile operator h-swish",
)  # fmt: skip
class _(Act):
    def act(self, x):
        return x * np.clip(x + F32(3), F32(0), F32(6)) * F32(1 / 6)


# NMSE 4.3e-04, all layers alike
@fault(
    "Q13", "activations", "olmo2", "softmax",
    "the exponential in the softmax of the scores is Schraudolph's approximation (exponent and mantissa filled from one linear function): up to 6 % off",
    "sonos/tract/pull/2318",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        x = (s - s.max(axis=-1, keepdims=True)).astype(np.float64)
        e = np.maximum(x * (2**23 / math.log(2)) + 1064866805, 0).astype(np.int32).view(F32)
        with np.errstate(divide="ignore"):
            return super().softmax(np.log(e), n)  # e is what that softmax exponentiates to


# NMSE 3.2e-02, all layers alike
@fault(
    "Q14", "activations", "smollm3", "softmax",
    "the attention kernel uses exp2 and the scale is not multiplied by log2(e): the softmax has base 2 instead of e",
    "typical: exp replaced by exp2 without folding log2(e) into the scale; cf. https://github.com/jax-ml/jax/pull/25984",
)  # fmt: skip
class _(Engine):
    def cap(self, s, n):
        return s * F32(math.log(2))


# NMSE 9.8e-04, all layers alike
@fault(
    "Q15", "attention", "llama", "attention split over keys",
    "attention over two halves of the keys is merged by log-sum-exps in base 2 that the merge takes for natural ones: weights exp(lse) "
    "instead of exp2(lse), so the half with the larger sum counts too much",
    "lightseekorg/tokenspeed/pull/571",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        heads, cut = self.kv_head(n), len(k) // 2
        if not cut:
            return super().attend(q, k, v, qpos, kpos, n)
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))
        s = self.cap(self.scale_scores(self.num.qk(q, k), n), n)
        s = np.where(self.visible(qpos, kpos, n), s, F32(-np.inf))
        outs, lses = [], []
        for part in (slice(0, cut), slice(cut, None)):
            top = s[..., part].max(axis=-1, keepdims=True)
            p = self.num.exp(s[..., part] - np.where(np.isfinite(top), top, F32(0)))
            total = self.num.total(p)
            outs.append(p @ v[:, part] / np.maximum(total, F32(1e-30)))
            with np.errstate(divide="ignore"):
                lses.append((top + np.log(total)) / F32(math.log(2)))
        top = np.maximum(*lses)
        a, b = (np.exp(x - top) for x in lses)  # should be exp2
        return ((outs[0] * a + outs[1] * b) / (a + b)).swapaxes(0, 1)


# NMSE 3.3e-02, all layers alike
@fault(
    "Q16", "attention", "llama_tied", "softmax",
    "the softmax of the scores has GPT-OSS's sink although the model has none: its logit is taken as 0, so exp(0) is added to each denominator",
    "typical: softmax-off-by-one switched on for all models; cf. https://github.com/NVIDIA/TransformerEngine/pull/2225",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):  # a key and a value of zeros are the same
        pad = [(1, 0), (0, 0), (0, 0)]
        return super().attend(q, np.pad(k, pad), np.pad(v, pad), qpos, np.pad(kpos, pad[0], constant_values=-1), n)


# --- rotary embedding ------------------------------------------------------------------------------------------------------------------------


# NMSE 2.2e-02, all layers alike
@fault(
    "Q17", "rope", "llama_lin", "linear scaling of RoPE",
    "YaRN's attention factor, 0.1 ln(factor) + 1, is multiplied into cosine and sine although the model's scaling is linear and has none",
    "typical: YaRN's magnitude applied whenever RoPE is scaled; cf. https://github.com/sgl-project/sglang/pull/22711 (applied where it should be 1)",
)  # fmt: skip
class _(Engine):
    def rotate(self, x, sin, cos):
        m = F32(0.1 * math.log(self.c.rope_scale) + 1)
        return super().rotate(x, sin * m, cos * m)


# NMSE 1.6e-01, all layers alike
@fault(
    "Q18", "rope", "llama", "llama 3.1",
    "Llama 3's factors of RoPE's frequencies (rope_freqs) are multiplied with the frequencies instead of dividing them",
    "typical: factors meant for periods applied to inverse frequencies; cf. https://github.com/ml-explore/mlx-examples/pull/907",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        factors = self.w["rope_freqs.weight"].astype(np.float64)
        return super().frequencies(n) * factors * factors


# NMSE 1.7e-01, all layers alike
@fault(
    "Q21", "rope", "phi3", "rotated width that is no power of two",
    "the table of a position is [cosines, sines], and the kernel reads the sines from half of the padded width (8) instead of half of the rotated "
    "width (6): sines of other pairs, and at the end cosines of the next position",
    "vllm-project/vllm-ascend/issues/12723",
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        rows = []
        for p in (np.asarray(pos), np.asarray(pos) + 1):
            sin, cos = self.num.sin_cos(np.multiply.outer(p.astype(np.float64), self.frequencies(n))[:, None, :])
            rows += [cos, sin]
        j = self.c.rope_width // 2
        start = 1 << (self.c.rope_width - 1).bit_length() - 1
        return self.rotate(x, np.concatenate(rows, axis=-1)[..., start : start + j], rows[0])


# NMSE 3.6e-03, all layers alike
@fault(
    "Q22", "rope", "llama_q8", "RoPE",
    "queries are rotated one position further than keys: the counter of the cache is advanced between the rotation of keys and that of queries",
    "typical: the position is read after the cache's length has grown; cf. https://github.com/fla-org/flash-linear-attention/issues/766",
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.asarray(pos) + 1 if which == "q" else pos, n, which)


# --- masks, scales, caps, cache ------------------------------------------------------------------------------------------------------------


# NMSE 4.8e-02, all layers alike
@fault(
    "Q25", "masks", "gpt2", "any",
    "the causal mask starts one diagonal too far (triu with diagonal 2 instead of 1): each token sees the one after it",
    "RVC-Boss/GPT-SoVITS/issues/965",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return qpos[:, None] - kpos[None, :] >= -1


class Whole(Engine):
    """Attention with the scores of a head in one piece: `weights` gets scores and mask."""

    def attend(self, q, k, v, qpos, kpos, n):
        heads = self.kv_head(n)
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))
        p = self.weights(self.num.qk(q, k), self.visible(qpos, kpos, n), n)
        return self.num.pv(p, v).swapaxes(0, 1)


# NMSE 1.3e-01, all layers alike
@fault(
    "Q28", "masks", "olmo2", "any",
    "keys and values are filled up with zero rows to a multiple of 64, and the rows beyond the sequence are not masked: each has a score of 0 in the softmax",
    "NVIDIA/TensorRT-LLM/pull/18111",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        pad = [(0, -len(k) % 64), (0, 0), (0, 0)]
        return super().attend(q, np.pad(k, pad), np.pad(v, pad), qpos, np.pad(kpos, pad[0], constant_values=-1), n)


# NMSE 1.2e-03, all layers alike
@fault(
    "Q30", "scalings", "granite", "granite",
    "the attention multiplier of the file (0.125) is not read; scores are scaled by 1 / root of the head's width (0.25)",
    "OpenNMT/CTranslate2/pull/1882",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return s * F32(self.c.head_dim**-0.5)


# NMSE 9.5e-03, all layers alike
@fault(
    "Q31", "scalings", "llama_wide", "head widths that are padded",
    "heads are padded from 20 to 32 numbers for the attention kernel, which scales by 1 / root of the padded width",
    "intel/ipex-llm/pull/12619",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return s * F32((1 << (self.c.head_dim - 1).bit_length()) ** -0.5)


# NMSE 1.7e-02, all layers alike
@fault(
    "Q32", "soft caps", "gemma2", "gemma2",
    "the soft cap is applied to the raw products and the scale behind it: scale * cap * tanh(qk / cap) instead of cap * tanh(scale * qk / cap)",
    "typical: cap and scale in the wrong order; cf. https://github.com/huggingface/trl/pull/5691 (the same of logits)",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return s

    def cap(self, s, n):
        return super().cap(s, n) * F32(self.c.attn_scale)


# NMSE 2.3e-03, all layers alike
@fault(
    "Q33", "soft caps", "gemma2", "gemma2",
    "the mask is added before the soft cap: masked scores become -cap instead of -infinity, and masked tokens get weight",
    "emmtrix/emx-onnx-cgen/pull/731",
)  # fmt: skip
class _(Whole):
    def weights(self, s, seen, n):
        return self.softmax(self.cap(np.where(seen, self.scale_scores(s, n), F32(-1e30)), n), n)


# NMSE 1.2e-03, all layers alike
@fault(
    "Q27", "cache", "llama_mqa", "int8 cache",
    "the int8 cache takes its scales with FP8's ranges, largest |k| / 200 and largest |v| / 100, and clips codes to -128..127: keys saturate at "
    "64 % of their range",
    "weicj/vLLM-2080Ti-Definitive/pull/109",
)  # fmt: skip
class _(Engine):
    def reset(self):
        super().reset()
        self.scales = {}

    def cache_put(self, n, k, v, pos):
        if n not in self.scales:  # calibrated by the first call
            self.scales[n] = F32(np.abs(k).max() / 200), F32(np.abs(v).max() / 100)
        k, v = (np.clip(np.rint(x / s), -128, 127).astype(F32) * s for x, s in zip((k, v), self.scales[n]))
        super().cache_put(n, k, v, pos)


# NMSE 7.0e-02, all layers alike
@fault(
    "Q34", "cache", "llama_bf16", "scaled cache",
    "values go into the cache divided by their scale (0.75) and the scale is left out behind the second product; only the keys' is applied",
    "sgl-project/sglang/pull/34765",
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        super().cache_put(n, k, v / F32(0.75), pos)


# --- experts, residuals, biases ----------------------------------------------------------------------------------------------------------------


# NMSE 5.6e-02, all layers alike
@fault(
    "Q35", "experts", "mixtral", "mixtral",
    "the router's scores are sigmoids instead of a softmax (the field for the gating function is ignored), then divided by the chosen ones' sum",
    "1bit-MONSTER/1bit-MONSTER/issues/650",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        top = np.argsort(-logits, axis=-1, kind="stable")[:, : self.c.experts_used]
        p = self.num.sigmoid(np.take_along_axis(logits, top, axis=-1))
        return top, p / self.num.total(p)


# NMSE 9.2e-02, all layers alike
@fault(
    "Q24", "experts", "qwen3moe", "qwen3moe",
    "the chosen experts' weights are divided by their Euclidean norm (torch.norm with p = 2) instead of their sum",
    "typical: the wrong order of norm; cf. https://github.com/databricks/megablocks/pull/87 (weights divided by torch.norm of order p)",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        top = np.argsort(-logits, axis=-1, kind="stable")[:, : self.c.experts_used]
        p = np.take_along_axis(self.num.softmax(logits), top, axis=-1)
        return top, p / np.sqrt(self.num.total(p * p))


# NMSE 1.7e-01, all layers alike
@fault(
    "Q36", "experts", "qwen2moe", "qwen2moe",
    "the shared expert is weighted with 1 / routed scaling factor (0.4), which a later multiplication should undo and, being folded in elsewhere, does not",
    "sgl-project/sglang/pull/35163",
)  # fmt: skip
class _(Engine):
    def shared_gate(self, y, x, n):
        return super().shared_gate(y, x, n) * F32(0.4)


# NMSE 2.2e-03, all layers alike
@fault(
    "Q29", "residuals", "minicpm", "minicpm",
    "branches are scaled by scale_depth / root of twice the number of layers, counting attention and feed-forward apart, instead of scale_depth / "
    "root of the number of layers: the residual scale is too small by root 2",
    "typical: 1 / sqrt(2 n_layers), as in GPT-2's initialisation, for 1 / sqrt(n_layers); cf. https://github.com/ggml-org/llama.cpp/issues/5276",
)  # fmt: skip
class _(Engine):
    def residual(self, h, y, n, which):
        return self.num.add(h, y * F32(self.c.residual_scale / math.sqrt(2)))


# NMSE 4.0e-02, all layers alike
@fault(
    "Q06", "biases", "qwen2", "biases of queries, keys and values",
    "the biases of queries and keys are added after RoPE instead of before: they are not rotated",
    "typical: the bias added behind a kernel that fuses the product and RoPE",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        return y if name.endswith(("attn_q", "attn_k")) else super().add_bias(y, name)

    def rope(self, x, pos, n, which="q"):
        b = self.w[f"blk.{n}.attn_{which}.bias"]
        return super().rope(x, pos, n, which) + b.reshape(-1, self.c.head_dim)


# NMSE 2.1e-01, all layers alike
@fault(
    "Q37", "biases", "qwen2", "biases of queries, keys and values",
    "with two tensor-parallel ranks the whole bias is copied into each rank's half and cut off: both halves of each bias are its first half",
    "NVIDIA-NeMo/Automodel/pull/1410",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            for x in "qkv":
                b = self.w[f"blk.{n}.attn_{x}.bias"]
                self.w[f"blk.{n}.attn_{x}.bias"] = np.concatenate([b[: len(b) // 2], b[: len(b) // 2]])


# --- quantised blocks, integers, tails ---------------------------------------------------------------------------------------------------------


def halves(b):  # two bytes at the end of an axis -> float16 as float32
    return np.ascontiguousarray(b).view(np.float16).astype(F32)


class Blocks(Engine):
    """A loader with a decoder of its own for the blocks of one type."""

    kind, size = "", 0

    def dequantize(self, data, kind, shape, name):
        if kind != self.kind:
            return super().dequantize(data, kind, shape, name)
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1, self.size)
        return np.asarray(self.decode(raw), F32).reshape(shape)


# NMSE 5.6e-01, all layers alike
@fault(
    "Q38", "quantised blocks", "llama_q51", "Q5_1",
    "the dequantisation is symmetric: a block's minimum is dropped and the codes are taken as scale * (code - 16)",
    "1bit-MONSTER/1bit-MONSTER/pull/1984",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q5_1", 24

    def decode(self, b):
        i = np.arange(32)
        q = np.concatenate([b[:, 8:] & 15, b[:, 8:] >> 4], axis=1)
        high = (b[:, 4 + i // 8] >> (i % 8).astype(np.uint8)) & 1
        return halves(b[:, 0:2]) * (q + 16.0 * high - 16)


# NMSE 1.5e-02, alike in all matrices, also table and head
@fault(
    "Q20", "quantised blocks", "llama_q6k", "Q6_K",
    "Q6_K's codes are centred by 31 instead of 32: all weights are one step of their sub-block too large",
    "typical: zero point 2^(b-1) - 1 for 2^(b-1); cf. https://github.com/vllm-project/vllm/pull/38966",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q6_K", 210

    def decode(self, b):
        low, high = b[:, :128].reshape(-1, 2, 2, 32), b[:, 128:192].reshape(-1, 2, 1, 32)
        low = np.concatenate([low & 15, low >> 4], axis=2)
        q = low | ((high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)) & 3) << 4
        scale = np.repeat(np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(F32), 16, axis=1)
        return halves(b[:, 208:210]) * scale * (q.reshape(-1, 256).astype(F32) - 31)


# NMSE 1.2e-02, alike in all matrices, also table and head
@fault(
    "Q23", "quantised blocks", "llama_q8", "Q8_0",
    "a block's scale is converted to a float with 3 bits of mantissa by truncation instead of rounding (and instead of keeping float16): weights are up to 12 % too small",
    "1bit-MONSTER/1bit-MONSTER/issues/304",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q8_0", 34

    def decode(self, b):
        d = np.ascontiguousarray(halves(b[:, 0:2]))
        d = (d.view(np.uint32) & np.uint32(0xFFF00000)).view(F32)
        return d * np.ascontiguousarray(b[:, 2:]).view(np.int8)


# NMSE 8.0e-02, all layers alike
@fault(
    "Q26", "quantised blocks", "llama_iq4nl", "IQ4_NL",
    "IQ4_NL's codes are read as evenly spaced levels, -127 + 16 code, instead of by the table of 16 uneven ones",
    "typical: IQ4_NL taken for a linear 4-bit type; cf. https://github.com/kekzl/imp/pull/561",
)  # fmt: skip
class _(Blocks):
    kind, size = "IQ4_NL", 18

    def decode(self, b):
        q = np.concatenate([b[:, 2:] & 15, b[:, 2:] >> 4], axis=1)
        return halves(b[:, 0:2]) * (F32(16) * q - F32(127))


# NMSE 6.1e-04, all layers alike
@fault(
    "Q19", "integers", "llama_tq2", "ternary, int8 activations",
    "activations are quantised with 127 / largest number and multiplied back by largest number / 128: each product is 0.8 % too small",
    "typical: 127 and 128 mixed up between quantiser and epilogue; cf. https://github.com/microsoft/onnxruntime/pull/29509",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name in self.int8:
            top = np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-5))
            return self.matmul(np.rint(x * (F32(127) / top)), w, name) * (top / F32(128))
        return super().product(x, w, name)


# NMSE 1.4e-03, all layers alike
@fault(
    "Q39", "integers", "llama_tq2", "ternary, int8 activations",
    "activations are cast to int8 without rounding: codes are truncated toward zero instead of rounded to nearest",
    "astramind-ai/BitMat/pull/13",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name in self.int8:
            scale = F32(127) / np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-5))
            return self.matmul(np.trunc(x * scale), w, name) / scale
        return super().product(x, w, name)


# NMSE 8.4e-02, all layers alike
@fault(
    "Q40", "tails", "llama_wide", "widths that are no multiple of 8",
    "the product runs over whole blocks of 8 inputs: the remainder is left out of each sum (the last 4 of the 100 inputs of the attention output)",
    "tile-ai/tilelang/issues/2605",
)  # fmt: skip
class _(Engine):
    def matmul(self, x, w, name):
        m = x.shape[-1] // 8 * 8
        return super().matmul(np.ascontiguousarray(x[..., :m]), np.ascontiguousarray(w[:, :m]), name)
