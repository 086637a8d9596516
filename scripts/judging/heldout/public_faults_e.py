"""Sixty more faults that act always (X01..X60), by a fifth author, each ported from a public report on an inference engine, kernel, loader
or converter. 23 are alike in all layers that have the operation, 19 are local, 18 are subtle. Sizes of tiles, windows, buffers and
ranks are scaled down to the models; brackets say where a case differs from its report.

FAULTS: id -> record as in public_faults_d.py. `kind` is the part of the engine, `family` the sort of mistake.
"""

import math
from types import SimpleNamespace

import numpy as np
from engine import F32, Engine, quants

FAULTS = {}
GH = "https://github.com/"
SUBTLE, ALIKE, LOCAL = "subtle", "alike", "local"


def fault(id, kind, reach, model, family, cause, source, tokens=40, chunk=None, prefix=0, threads=1):
    def add(cls):
        FAULTS[id] = SimpleNamespace(id=id, kind=kind, model=model, family=family, cause=cause, source=GH + source, engine=cls)
        vars(FAULTS[id]).update(reach=reach, tokens=tokens, chunk=chunk, prefix=prefix, threads=threads)
        return cls

    return add


# --- what several faults need -----------------------------------------------------------------------------------------------------------


def block_bytes(data, size):  # [blocks, size], a copy
    return np.array(data).view(np.uint8).reshape(-1, size)


def halves(b):  # [blocks, 2] bytes -> [blocks, 1]
    return np.ascontiguousarray(b).view(np.float16).astype(F32)


def scales_and_minima(s):  # the 12 bytes of a K-quant's block, [blocks, 12] -> [blocks, 8], [blocks, 8]
    low, high = s[:, :4], s[:, 4:8]
    scale = np.concatenate([low & 63, (s[:, 8:] & 15) | (low >> 6 << 4)], axis=1)
    minimum = np.concatenate([high & 63, (s[:, 8:] >> 4) | (high >> 6 << 4)], axis=1)
    return scale.astype(F32), minimum.astype(F32)


# --- alike in all layers: attention -----------------------------------------------------------------------------------------------------


@fault(
    "X01", "attention", ALIKE, "llama", "formula",
    "the key-value heads are tiled (0, 1, 0, 1), where each serves neighbouring query heads (0, 0, 1, 1)",
    "onnx/onnx/pull/7274",
)  # fmt: skip
class _(Engine):
    def kv_head(self, n):
        return np.arange(self.c.heads) % self.c.kv_heads


@fault(
    "X02", "attention", ALIKE, "llama_g3", "kernel",
    "blocks are numbered for groups as many as they are wide: with 2 groups of 3 heads, nobody computes heads 2 and 5 (they stay zero)",
    "HazyResearch/HipKittens/pull/22",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y, group = super().attend(q, k, v, qpos, kpos, n), self.c.heads // self.c.kv_heads
        b = np.arange(self.c.heads)
        done = np.isin(b, b % group * group + b // group)
        return y * done[:, None].astype(F32)


@fault(
    "X03", "attention", ALIKE, "gemma", "kernel",
    "scores are sums over the first half of a head's channels: the kernel has the width of another model built in",
    "triton-lang/triton/issues/621",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        q = q.copy()
        q[..., q.shape[-1] // 2 :] = 0
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "X04", "attention", ALIKE, "llama_wide", "kernel",
    "the rest of a dot product (4 of 20 channels) is added to an accumulator of 8 lanes by an instruction that clears the lanes without a "
    "channel: the first vector's products 4 to 7 are lost",
    "NVIDIA/NeMo-Speech.cpp/pull/33",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        q = q.copy()
        q[..., 4:8] = 0
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "X05", "attention", ALIKE, "granite", "formula",
    "the attention multiplier scales what attention returns; the scores get the usual root of the head's width",
    "OpenNMT/CTranslate2/pull/1882",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return s * F32(self.c.head_dim**-0.5)

    def linear(self, x, name, n=None):
        y = super().linear(x, name, n)
        return y * F32(self.c.attn_scale) if name.endswith("attn_output") else y


@fault(
    "X06", "attention", ALIKE, "qwen3", "formula",
    "queries and keys are normalised after RoPE, so that a pair's two weights scale it in turned directions",
    "karpathy/nanochat/issues/743",
)  # fmt: skip
class _(Engine):
    def attention(self, x, n, pos):
        c, b, t = self.c, f"blk.{n}.", len(x)
        q, k, v = (y.reshape(t, -1, c.head_dim) for y in self.qkv(x, n))
        q, k = self.put("Qcur_rope", self.rope(q, pos, n, "q"), n), self.put("Kcur_rope", self.rope(k, pos, n, "k"), n)
        q, k = self.qk_norm(q, b + "attn_q_norm"), self.qk_norm(k, b + "attn_k_norm")
        self.cache_put(n, k, v, pos)
        y = self.put("kqv_out", self.attend(q, *self.cache_get(n)[:2], pos, self.cache_get(n)[2], n).reshape(t, -1), n)
        return self.put("attn_o_out", self.linear(y, b + "attn_output", n), n)


@fault(
    "X07", "weights", ALIKE, "gpt2", "layout",
    "the joint matrix of queries, keys and values is taken apart as two ranks would hold it: (q, k, v) of the first heads, "
    "then of the others [the report names the place]",
    "alibaba/ChatLearn/pull/277",
)  # fmt: skip
class _(Engine):
    def split_qkv(self, w):
        parts = w.reshape(2, 3, -1, *w.shape[1:])
        return [np.concatenate(list(parts[:, i])) for i in range(3)]


@fault(
    "X08", "rope", ALIKE, "stablelm", "formula",
    "partial RoPE counts by the head's width: the frequencies fall half as fast, and channel i is paired with i + width / 2",
    "pie-project/pie/issues/602",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        return float(self.c.rope_base) ** (-np.arange(self.c.rope_width // 2) * 2.0 / self.c.head_dim)

    def rotate(self, x, sin, cos):
        j, half = sin.shape[-1], x.shape[-1] // 2
        a, b, out = x[..., :j], x[..., half : half + j], x.copy()
        out[..., :j], out[..., half : half + j] = a * cos - b * sin, a * sin + b * cos
        return out


# --- alike in all layers: feed-forward, residuals, norms --------------------------------------------------------------------------------


@fault(
    "X09", "residual", ALIKE, "gptneox", "config",
    "the flag for parallel residuals is not read: the feed-forward part gets the layer's input, where it should get attention's sum "
    "[only recorded tensors in the report]",
    "TransformerLensOrg/TransformerLens/issues/1644",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.parallel = True
        return c


@fault(
    "X10", "norm", ALIKE, "starcoder2", "loader",
    "one norm is loaded for both halves of a layer: attention's weights and bias serve the feed-forward part "
    "[the report tells models with one norm from those with two]",
    "antonellof/ferrox/pull/233",
)  # fmt: skip
class _(Engine):
    def norm(self, x, name, n):
        return super().norm(x, name.replace("ffn_norm", "attn_norm"), n)


@fault(
    "X11", "norm", ALIKE, "gemma", "loader",
    "the weights of all norms get 1 added when they are loaded, though the file has it already",
    "ggml-org/llama.cpp/issues/23758",
)  # fmt: skip
class _(Engine):
    def load(self, t):
        return super().load(t) + F32(1) if t.name.endswith("norm.weight") else super().load(t)


@fault(
    "X12", "norm", ALIKE, "mixtral_w", "kernel",
    "the lanes of the last, partial group read the sums of the groups, 6 lanes for 9 groups of 8: squares from the 49th on are left out",
    "ggml-org/llama.cpp/pull/26708",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        groups, lanes = -(-x.shape[-1] // 8), x.shape[-1] % 8 or 8
        read = x[..., : 8 * min(groups, lanes)]
        return x / np.sqrt((read * read).sum(axis=-1, keepdims=True, dtype=F32) / F32(x.shape[-1]) + F32(eps)) * w


@fault(
    "X13", "ffn", ALIKE, "llama_mha", "loader",
    "the loader fills matrices in the order in which the graph makes them: gate and up are exchanged",
    "nntrainer/nntrainer/pull/4194",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            for end in (".weight", ".bias"):
                a, b = f"blk.{n}.ffn_gate{end}", f"blk.{n}.ffn_up{end}"
                if a in self.w:
                    self.w[a], self.w[b] = self.w[b], self.w[a]


@fault(
    "X14", "residual", ALIKE, "minicpm", "config",
    "the factor of the residual branches is 1.4 / sqrt(40), that of one model, whatever the file says [the report gives the formula]",
    "ggml-org/llama.cpp/issues/5276",
)  # fmt: skip
class _(Engine):
    def residual(self, h, y, n, which):
        return self.num.add(h, y * F32(1.4 / math.sqrt(40)))


@fault(
    "X15", "parallel", ALIKE, "starcoder2", "parallel",
    "each of two ranks adds the bias before the sum over ranks: biases of attention's output and of down count twice",
    "huggingface/text-generation-inference/issues/1036",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        y = super().add_bias(y, name)
        return super().add_bias(y, name) if name.endswith(("attn_output", "ffn_down")) else y


# --- alike in all layers: experts, quantised weights ------------------------------------------------------------------------------------


@fault(
    "X16", "experts", ALIKE, "qwen2moe", "formula",
    "the softmax is inside the branch that renormalises: without renormalisation the experts' weights are the router's logits",
    "sgl-project/sglang/pull/35160",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        top, _ = super().router(logits)
        return top, np.take_along_axis(logits, top, axis=-1)


@fault(
    "X17", "experts", ALIKE, "mixtral", "formula",
    "the router's weights scale the experts' inputs, and not their outputs",
    "labmlai/annotated_deep_learning_paper_implementations/issues/95",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        top, self.given = super().router(logits)
        return top, self.given

    def product(self, x, w, name):
        if "_exps" in name and "down" not in name:
            x = x * self.scale_of(name, len(x))
        return super().product(x, w, name)

    def experts(self, x, n):
        self.seen = {}
        return super().experts(x, n)

    def put(self, name, x, n=None):
        if name == "ffn_moe_topk":
            self.top = x
        return super().put(name, x, n)

    def scale_of(self, name, count):  # the pairs of the next expert that has any
        e = self.seen.get(name, 0)
        while not (self.top == e).any():
            e += 1
        self.seen[name] = e + 1
        return self.given[np.nonzero(self.top == e)][:, None]

    def combine(self, y, weights):
        return super().combine(y, np.ones_like(weights))


@fault(
    "X18", "experts", ALIKE, "qwen2moe_s", "formula",
    "the shared expert's sigmoid gate is loaded and not used",
    "NousResearch/torchtitan/pull/36",
)  # fmt: skip
class _(Engine):
    def shared_gate(self, y, x, n):
        return y


@fault(
    "X19", "weights", ALIKE, "llama_q5k", "layout",
    "Q5_K: the nibbles and the fifth bits are read in sequence, where the high nibble of a byte belongs 32 numbers behind the low one",
    "paiml/aprender/pull/2127",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind != "Q5_K":
            return super().dequantize(data, kind, shape, name)
        b, i = block_bytes(data, 176), np.arange(256)
        scale, minimum = scales_and_minima(b[:, 4:16])
        code = (b[:, 48 + i // 2] >> (i % 2 * 4).astype(np.uint8) & 15) + 16 * (b[:, 16 + i // 8] >> (i % 8).astype(np.uint8) & 1)
        return (halves(b[:, :2]) * scale)[:, i // 32] * code - (halves(b[:, 2:4]) * minimum)[:, i // 32]


@fault(
    "X20", "weights", ALIKE, "bitnet", "formula",
    "ternary weights are divided by their scale",
    "microsoft/BitNet/pull/616",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        return np.divide(1, w, out=np.zeros_like(w), where=w != 0) if kind == "TQ2_0" else w


# --- local: layers ----------------------------------------------------------------------------------------------------------------------


@fault(
    "X21", "parallel", LOCAL, "llama", "parallel",
    "two stages take half of the layers each, rounded down: the third of three layers is never run",
    "pytorch/torchtitan/pull/963",
)  # fmt: skip
class _(Engine):
    def layer(self, h, n, pos):
        return super().layer(h, n, pos) if n < self.c.n_layers // 2 * 2 else h


@fault(
    "X22", "parallel", LOCAL, "llama_theta", "parallel",
    "the second stage (from layer 2 on) receives the last feed-forward output without the residual that should be added to it "
    "[the report shows the two tensors at a stage's end]",
    "PrimeIntellect-ai/prime-rl/pull/354",
)  # fmt: skip
class _(Engine):
    def feed_forward(self, x, n):
        self.sent = super().feed_forward(x, n)
        return self.sent

    def layer(self, h, n, pos):
        return super().layer(self.sent if n == 2 else h, n, pos)


@fault(
    "X23", "attention", LOCAL, "qwen2_w", "config",
    "the number of layers without a window is read as the number of those with one: layer 0 gets the window, layers 1 and 2 attend to all",
    "huggingface/transformers/issues/35896",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.local = [n for n in range(c.n_layers) if n not in c.local]
        return c


@fault(
    "X24", "rope", LOCAL, "smollm3", "config",
    "RoPE turns every layer, and so the fourth, which should have none",
    "timtoole02/Camelid/pull/535",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.no_rope = []
        return c


@fault(
    "X25", "rope", LOCAL, "gemma3_lin", "config",
    "the linear scaling of positions is not applied to the layer with global attention",
    "Blaizzy/mlx-vlm/pull/1709",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        return super().frequencies(n) * (1 if n in self.c.local else self.c.rope_scale)


# --- local: heads and matrices ----------------------------------------------------------------------------------------------------------


@fault(
    "X26", "attention", LOCAL, "llama_g3", "kernel",
    "tiles of two heads take the key-value head of their first: head 3 of 6 reads group 0, and belongs to group 1",
    "FlashML-org/FreeToken/pull/177",
)  # fmt: skip
class _(Engine):
    def kv_head(self, n):
        return super().kv_head(n)[np.arange(self.c.heads) // 2 * 2]


@fault(
    "X27", "weights", LOCAL, "llama_mxfp4", "layout",
    "MXFP4: from the 32nd row on, scales are found by a padded stride: rows of down have the scales of others",
    "ROCm/aiter/pull/2900",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind == "MXFP4" and name.endswith("ffn_down.weight"):
            b = block_bytes(data, 17).reshape(shape[0], -1, 17)
            rows = np.arange(shape[0])
            b[32:, :, 0] = b[rows * 2 % shape[0], :, 0][32:]
            data = b.reshape(shape[0], -1)
        return super().dequantize(data, kind, shape, name)


@fault(
    "X28", "weights", LOCAL, "llama_q8", "layout",
    "the head's codes are indexed without their group: each group of 32 has the last group's codes, with its own scale",
    "1bit-MONSTER/1bit-MONSTER/issues/153",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if name == "output.weight":
            b = block_bytes(data, 34).reshape(shape[0], -1, 34)
            b[:, :, 2:] = b[:, -1:, 2:]
            data = b.reshape(shape[0], -1)
        return super().dequantize(data, kind, shape, name)


# --- local: the ends of the model -------------------------------------------------------------------------------------------------------


@fault(
    "X29", "tokens", LOCAL, "qwen3", "tokens",
    "the last token of a prompt is fed as the token of padding, 0",
    "willccbb/mlx_parallm/issues/18",
)  # fmt: skip
class _(Engine):
    def prepare(self, tokens):
        return np.concatenate([tokens[:-1], [0]])


@fault(
    "X30", "norm", LOCAL, "gpt2", "formula",
    "the flag for a bias goes to the place of the epsilon in the last norm: it is 1",
    "vithursant/nanoGPT_mlx/issues/1",
)  # fmt: skip
class _(Engine):
    def norm(self, x, name, n):
        kept, self.c.eps = self.c.eps, F32(1) if name == "output_norm" else self.c.eps
        y = super().norm(x, name, n)
        self.c.eps = kept
        return y


@fault(
    "X31", "norm", SUBTLE, "stablelm_eps", "formula",
    "the kernel of the last norm has an epsilon of 1e-5 built in [all norms in the report]",
    "amd/IRON/pull/139",
)  # fmt: skip
class _(Engine):
    def norm(self, x, name, n):
        kept, self.c.eps = self.c.eps, F32(1e-5) if name == "output_norm" else self.c.eps
        y = super().norm(x, name, n)
        self.c.eps = kept
        return y


@fault(
    "X32", "head", LOCAL, "granite", "formula",
    "logits are multiplied by their scale, as in another model, where this one divides",
    "unslothai/unsloth/pull/1218",
)  # fmt: skip
class _(Engine):
    def scale_logits(self, y):
        return y * F32(self.c.logit_scale)


@fault(
    "X33", "head", LOCAL, "phi2", "loader",
    "the head's bias has no place in the engine: it is not added",
    "antonellof/ferrox/pull/237",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        return y if name == "output" else super().add_bias(y, name)


@fault(
    "X34", "head", LOCAL, "llama", "kernel",
    "the grid of the head's kernel is the vocabulary over 64, rounded down: logits from 64 on are never written (zero)",
    "ml-explore/mlx/issues/4250",
)  # fmt: skip
class _(Engine):
    def head(self, x):
        y = super().head(x)
        y[:, y.shape[1] // 64 * 64 :] = 0
        return y


@fault(
    "X35", "head", LOCAL, "qwen2", "cache",
    "the prompt was seen before as the beginning of a longer one: its last logits are not computed, and an older row's are given",
    "ggml-org/llama.cpp/issues/1585",
)  # fmt: skip
class _(Engine):
    def head(self, x):
        y = super().head(x)
        y[-1] = y[-2]
        return y


# --- local: positions and chunks --------------------------------------------------------------------------------------------------------


@fault(
    "X36", "attention", LOCAL, "mistral", "mask",
    "keys of the same call are seen without a window; only those of the cache are cut",
    "apache/tvm/pull/18630",
    chunk=32,
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos
        return (d >= 0) & ((d < self.c.window) | (kpos >= self.start))


@fault(
    "X37", "attention", LOCAL, "olmo2", "mask",
    "the causal mask of a later chunk is aligned with the first key, where it should end at the last",
    "microsoft/onnxruntime/pull/27992",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return kpos <= qpos[:, None] - self.start


@fault(
    "X38", "attention", LOCAL, "starcoder2", "kernel",
    "the grid has one tile of 32 queries, whatever the length: attention's rows from 32 on stay zero",
    "Comfy-Org/comfy-kitchen/pull/111",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        y[32:] = 0
        return y


@fault(
    "X39", "rope", LOCAL, "llama_mqa", "positions",
    "layer 0 adds a call's tokens to the count before the other layers read it: their positions are too large by the call's length",
    "fla-org/flash-linear-attention/issues/766",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos + len(pos) if n else pos, n, which)


@fault(
    "X40", "rope", LOCAL, "phi3_long", "positions",
    "from position 20 on keys and queries are turned by the long factors, while the cache keeps keys that were turned by the short ones "
    "[the model's context allows the short ones throughout]",
    "huggingface/transformers/pull/33129",
    chunk=20,
)  # fmt: skip
class _(Engine):
    def rope_factors(self):
        return self.w["rope_factors_long.weight" if self.start >= 20 else "rope_factors_short.weight"]


# --- small differences everywhere -------------------------------------------------------------------------------------------------------


@fault(
    "X41", "ffn", SUBTLE, "gemma", "formula",
    "the exact GELU, where the model has the approximation with tanh",
    "NVIDIA-NeMo/Megatron-Bridge/pull/4661",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        return F32(0.5) * gate * (1 + np.vectorize(math.erf, otypes=[F32])(gate / F32(math.sqrt(2)))) * up


@fault(
    "X42", "ffn", SUBTLE, "llama_h8", "formula",
    "SiLU's sigmoid comes from a cubic for tanh that is cut off at 1: it saturates too early",
    "1bit-MONSTER/1bit-MONSTER/issues/1350",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        y = gate * F32(0.5)
        return gate * (F32(0.5) + F32(0.5) * np.clip(y * (1 + F32(0.1834) * y * y), -1, 1)) * up


@fault(
    "X43", "attention", SUBTLE, "gemma2", "formula",
    "the cap of the scores is not passed to the kernel that is built: scores have none",
    "sgl-project/sglang/issues/33915",
)  # fmt: skip
class _(Engine):
    def cap(self, s, n):
        return s


@fault(
    "X44", "attention", SUBTLE, "gemma2", "formula",
    "the cap is applied to scores that are scaled for powers of 2 already, so that it begins at a lower score [missing at all in the report]",
    "sgl-project/sgl-kernel-xpu/pull/491",
)  # fmt: skip
class _(Engine):
    def cap(self, s, n):
        return super().cap(s * F32(math.log2(math.e)), n) * F32(math.log(2))


@fault(
    "X45", "rope", SUBTLE, "qwen3_yarn", "formula",
    "YaRN's magnitude, final as it is, goes through 0.1 * m * log(factor) + 1 once more: sine and cosine are 2% too large",
    "NVIDIA/TensorRT-LLM/pull/16379",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_magnitude = 0.1 * c.rope_magnitude * math.log(c.rope_scale) + 1
        return c


@fault(
    "X46", "rope", ALIKE, "phi2", "formula",
    "the frequencies of partial RoPE are those of the whole head, of which the first are used",
    "huggingface/transformers/pull/48652",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        return float(self.c.rope_base) ** (-np.arange(self.c.rope_width // 2) * 2.0 / self.c.head_dim)


@fault(
    "X47", "norm", SUBTLE, "qwen3_eps", "formula",
    "rows are divided by their largest number before the norm, and the epsilon is added as it is: it counts for its square more",
    "apple/coremltools/pull/2822",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return super().rms_norm(x / np.abs(x).max(axis=-1, keepdims=True), w, eps, name)


@fault(
    "X48", "norm", SUBTLE, "olmo2", "formula",
    "an epsilon below 1e-4 is raised to 1e-4, which half precision can hold",
    "nntrainer/nntrainer/pull/4318",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return super().rms_norm(x, w, max(eps, F32(1e-4)), name)


@fault(
    "X49", "norm", ALIKE, "olmo2", "formula",
    "queries and keys are normalised head by head, where the norm spans all heads",
    "vllm-project/vllm-metal/pull/692",
)  # fmt: skip
class _(Engine):
    def qk_norm(self, x, name):
        w, width, n = self.w[name + ".weight"], self.c.head_dim, int(name.split(".")[1])
        parts = [self.rms_norm(x[:, i : i + width], w[i : i + width], self.c.eps, name) for i in range(0, w.size, width)]
        return self.put("Qcur_normed" if "attn_q" in name else "Kcur_normed", np.concatenate(parts, axis=-1), n)


@fault(
    "X50", "attention", SUBTLE, "starcoder2_w", "mask",
    "the window is passed to a kernel that counts the query apart: it holds one key more",
    "NVIDIA-NeMo/Megatron-Bridge/pull/2656",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos
        return (d >= 0) & (d <= self.c.window)


# --- few numbers, or few positions ------------------------------------------------------------------------------------------------------


@fault(
    "X51", "weights", SUBTLE, "llama_iq3s", "layout",
    "IQ3_S: in the table of the grid, 150 of the largest entries are 62 / 60 too large",
    "vllm-project/vllm-gguf-plugin/pull/136",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind != "IQ3_S":
            return super().dequantize(data, kind, shape, name)
        quants.IQ3_S.init_grid()
        kept = quants.IQ3_S.grid
        wrong = kept.astype(F32).copy()
        wrong.reshape(-1)[np.nonzero(wrong.reshape(-1) == wrong.max())[0][:150]] *= F32(62 / 60)
        quants.IQ3_S.grid = wrong
        try:
            return super().dequantize(data, kind, shape, name)
        finally:
            quants.IQ3_S.grid = kept


@fault(
    "X52", "weights", ALIKE, "llama_q4k", "layout",
    "Q4_K: the minima of the last four groups of a block lose their two high bits [scales and minima of all groups but the first in the report]",
    "paiml/aprender/pull/2141",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        y = super().dequantize(data, kind, shape, name)
        if kind != "Q4_K":
            return y
        b = block_bytes(data, 144)
        lost = (b[:, 8:12] >> 6 << 4).astype(F32) * halves(b[:, 2:4])
        y = y.reshape(-1, 8, 32)
        y[:, 4:] += lost[..., None]
        return y.reshape(shape)


@fault(
    "X53", "norm", SUBTLE, "gpt2", "kernel",
    "the rest of a row (16 of 64 numbers, behind vectors of 24) goes through a kernel that only divides: the mean is not subtracted there",
    "antgroup/vsag/pull/1926",
)  # fmt: skip
class _(Engine):
    def layer_norm(self, x, w, b):
        y = super().layer_norm(x, w, b)
        rest = x.shape[-1] // 24 * 24
        mean = x.mean(axis=-1, keepdims=True, dtype=F32)
        spread = np.sqrt(((x - mean) ** 2).mean(axis=-1, keepdims=True, dtype=F32) + self.c.eps)
        y[:, rest:] += mean / spread * w[rest:]
        return y


@fault(
    "X54", "attention", SUBTLE, "llama_wide", "kernel",
    "the matrix-vector kernel writes rows by eights: the last 4 of the 100 rows of queries, keys and values stay zero",
    "ml-explore/mlx/pull/677",
)  # fmt: skip
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")):
            y[:, len(w) // 8 * 8 :] = 0
        return y


@fault(
    "X55", "parallel", SUBTLE, "qwen2", "parallel",
    "a rank with two key-value heads takes one head's width of their biases: the second head has none",
    "XPU-Forces/mojo_opset/pull/233",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        if not name.endswith(("attn_k", "attn_v")):
            return super().add_bias(y, name)
        bias = self.w[name + ".bias"].copy()
        bias[self.c.head_dim :] = 0
        return y + bias


@fault(
    "X56", "experts", SUBTLE, "mixtral", "kernel",
    "a race in the choice of experts: every 16th token gets the third best expert in place of the second [any token in the report]",
    "intel/torch-xpu-ops/pull/4312",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        swapped = logits.copy()
        order = np.argsort(-logits, axis=-1, kind="stable")
        for t in range(15, len(logits), 16):
            second, third = order[t, 1:3]
            swapped[t, [second, third]] = logits[t, [third, second]]
        return super().router(swapped)


@fault(
    "X57", "attention", SUBTLE, "qwen3moe", "kernel",
    "the last block of keys is filled up with zeros that are not masked: its queries count 3 keys of score 0 in their sums",
    "flashinfer-ai/flashinfer/pull/5090",
    tokens=37,
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        p, filled = super().softmax(s, n), -s.shape[-1] % 8
        most = s.max(axis=-1, keepdims=True)
        total = np.exp(s - most).sum(axis=-1, keepdims=True, dtype=F32)
        rows = np.arange(s.shape[1])[:, None] >= s.shape[1] // 8 * 8
        return np.where(rows, p * total / (total + F32(filled) * np.exp(-most)), p)


@fault(
    "X58", "rope", SUBTLE, "llama_long", "positions",
    "positions are held in bfloat16: from 256 on only every second one exists",
    "Lightning-AI/litgpt/issues/1031",
    tokens=280,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        step = 2.0 ** (np.floor(np.log2(np.maximum(pos, 1))) - 7)
        return super().rope(x, np.where(pos < 256, pos, np.rint(pos / step) * step), n, which)


@fault(
    "X59", "attention", SUBTLE, "llama_long", "kernel",
    "the reduction over partitions of 16 keys has room for 16 of them: keys from 256 on are not seen",
    "ROCm/vllm/pull/22",
    tokens=270,
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return super().visible(qpos, kpos, n) & (kpos < 256)


@fault(
    "X60", "cache", SUBTLE, "llama", "cache",
    "the first token's key, which has the largest channels in a trained model, is cut at 0.7 of its largest channel in each head "
    "[8-bit keys in the report, which names the first tokens]",
    "Blaizzy/mlx-vlm/issues/2162",
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        most = F32(0.7) * np.abs(k).max(axis=-1, keepdims=True)
        super().cache_put(n, np.where((pos == 0)[:, None, None], np.clip(k, -most, most), k), v, pos)
