"""Sixty faults that act always, each ported from a public bug report of an inference engine (or of the model code or loader of one).

FAULTS: id -> record with `model` (of models/), `cause` (as the engine's author would say it), `source`, `family`, `kind`, `engine` (the
subclass of Engine that has the fault), and the run that selftest.py tries: `tokens` (their number), `chunk`, `prefix`, `threads`.
"""

from types import SimpleNamespace

import numpy as np
from engine import F32, Engine

FAULTS = {}
GH = "https://github.com/"


def fault(id, kind, model, family, cause, source, tokens=40, chunk=None, prefix=0, threads=1):
    def add(cls):
        FAULTS[id] = SimpleNamespace(id=id, kind=kind, model=model, family=family, cause=cause, source=GH + source, engine=cls)
        vars(FAULTS[id]).update(tokens=tokens, chunk=chunk, prefix=prefix, threads=threads)
        return cls

    return add


# --- norms ------------------------------------------------------------------------------------------------------------------------------


@fault(
    "P01", "norms", "gemma3", "gemma3 from GGUF",
    "Gemma's RMSNorm adds 1 to the weights although a GGUF file has the 1 in them already: every norm multiplies by weight + 1",
    "utensils/mold/issues/1074",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return super().rms_norm(x, w + F32(1), eps, name)


@fault(
    "P02", "norms", "llama", "llama",
    "LayerNorm instead of RMSNorm: the mean of a row is subtracted before it is normalised",
    "ggml-org/llama.cpp/issues/173",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return super().rms_norm(x - self.num.mean(x), w, eps, name)


@fault(
    "P03", "norms", "llama_eps", "llama",
    "epsilon of RMSNorm is hard-coded to 1e-6; the file's (here 0.05) is not read",
    "ggml-org/llama.cpp/issues/2373",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return super().rms_norm(x, w, 1e-6, name)


@fault(
    "P04", "norms", "gemma2", "gemma2",
    "wrong order in the block: the residual is added before the norms behind attention, and the sum goes through pre-FFN norm and then "
    "post-attention norm into the MLP, instead of post-attention norm on the branch alone",
    "google/flax/issues/4567",
)  # fmt: skip
class _(Engine):
    def layer(self, h, n, pos):
        b = f"blk.{n}."
        x = self.put("attn_norm", self.norm(h, b + "attn_norm", n), n)
        h = self.put("ffn_inp", self.residual(h, self.attention(x, n, pos), n, "attn"), n)
        x = self.put("ffn_norm", self.norm(h, b + "ffn_norm", n), n)
        x = self.put("attn_post_norm", self.norm(x, b + "post_attention_norm", n), n)
        f = self.put("ffn_post_norm", self.norm(self.feed_forward(x, n), b + "post_ffw_norm", n), n)
        return self.put("l_out", self.residual(h, f, n, "ffn"), n)


@fault(
    "P05", "norms", "olmo2", "olmo2",
    "pre-norm instead of OLMo 2's norm behind each branch: the norms are applied to the inputs of attention and feed-forward, not to their outputs",
    "EleutherAI/gpt-neox/pull/1408",
)  # fmt: skip
class _(Engine):
    def layer(self, h, n, pos):
        b = f"blk.{n}."
        a = self.attention(self.norm(h, b + "post_attention_norm", n), n, pos)
        h = self.put("ffn_inp", self.residual(h, a, n, "attn"), n)
        f = self.feed_forward(self.norm(h, b + "post_ffw_norm", n), n)
        return self.put("l_out", self.residual(h, f, n, "ffn"), n)


@fault(
    "P06", "norms", "qwen3moe", "qwen3moe",
    "the norms of each query and key head are missing in the forward pass of the models with experts",
    "paiml/aprender/pull/1228",
)  # fmt: skip
class _(Engine):
    def qk_norm(self, x, name):
        return x


@fault(
    "P07", "norms", "qwen3", "qwen3",
    "the norms of query and key heads are applied after RoPE instead of before",
    "meta-pytorch/torchtune/issues/2809",
)  # fmt: skip
class _(Engine):
    def qk_norm(self, x, name):
        return x

    def rope(self, x, pos, n, which="q"):
        y = super().rope(x, pos, n, which)
        name = f"blk.{n}.attn_{which}_norm"
        return self.rms_norm(y, self.w[name + ".weight"], self.c.eps, name)


# --- rotary embedding and positions ------------------------------------------------------------------------------------------------------


@fault(
    "P08", "rope", "qwen3", "qwen3",
    "RoPE is applied twice to queries and keys: once by the model, once inside the attention operator",
    "NVIDIA/TensorRT-LLM/pull/4040",
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(super().rope(x, pos, n, which), pos, n, which)


def rotate_halves(x, sin, cos):
    j = sin.shape[-1]
    out = x.copy()
    a, b = x[..., :j], x[..., j : 2 * j]
    out[..., :j], out[..., j : 2 * j] = a * cos - b * sin, a * sin + b * cos
    return out


@fault(
    "P09", "loading", "llama", "llama from GGUF",
    "rows of Q and K of a llama GGUF file are not un-permuted for an engine that rotates halves: pairs (i, i + half) turn instead of (2i, 2i + 1)",
    "vllm-project/vllm-metal/pull/480",
)  # fmt: skip
class _(Engine):
    def rotate(self, x, sin, cos):
        return rotate_halves(x, sin, cos)


@fault(
    "P10", "loading", "llama", "llama from GGUF, grouped queries",
    "the inverse permutation of K's rows uses the number of query heads instead of the number of key-value heads",
    "huggingface/transformers/pull/31788",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()

        def back(w, heads):  # GGUF's adjacent pairs -> halves
            return np.ascontiguousarray(w.reshape(heads, len(w) // heads // 2, 2, -1).swapaxes(1, 2)).reshape(w.shape)

        for n in range(self.c.n_layers):
            for end in (".weight", ".bias"):
                q, k = f"blk.{n}.attn_q{end}", f"blk.{n}.attn_k{end}"
                if q in self.w:
                    self.w[q] = back(self.w[q], self.c.heads)
                    self.w[k] = back(self.w[k], self.c.heads)  # should be kv_heads

    def rotate(self, x, sin, cos):
        return rotate_halves(x, sin, cos)


@fault(
    "P11", "rope", "phi2", "phi2",
    "RoPE turns adjacent numbers (2i, 2i + 1), where Phi-2 turns halves (i, i + half) of the rotated part",
    "ml-explore/mlx-examples/pull/97",
)  # fmt: skip
class _(Engine):
    def rotate(self, x, sin, cos):
        j, out = sin.shape[-1], x.copy()
        a, b = x[..., 0 : 2 * j : 2], x[..., 1 : 2 * j : 2]
        out[..., 0 : 2 * j : 2], out[..., 1 : 2 * j : 2] = a * cos - b * sin, a * sin + b * cos
        return out


@fault(
    "P12", "rope", "stablelm", "partial rotation",
    "partial RoPE is laid out over the head's width instead of the rotated width: frequencies base^(-2i / head width), pairs (i, i + head width / 2)",
    "pie-project/pie/pull/603",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        return float(self.c.rope_base) ** (-np.arange(self.c.rope_width // 2) * 2.0 / self.c.head_dim)

    def rotate(self, x, sin, cos):
        j, half, out = sin.shape[-1], self.c.head_dim // 2, x.copy()
        a, b = x[..., :j], x[..., half : half + j]
        out[..., :j], out[..., half : half + j] = a * cos - b * sin, a * sin + b * cos
        return out


@fault(
    "P13", "rope", "gptneox", "partial rotation",
    "the share of a head that RoPE turns is ignored: all of the head is rotated",
    "ml-explore/mlx-lm/pull/1698",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_width = c.head_dim
        return c


@fault(
    "P14", "rope", "llama_theta", "llama",
    "RoPE's base is not carried over from the model's settings: the default 10000 is used instead of 500000",
    "lyogavin/airllm/pull/369",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_base = 10000.0
        return c


@fault(
    "P15", "rope", "llama", "llama 3.1",
    "Llama 3's scaling of RoPE's frequencies is read and never applied (the factors in rope_freqs)",
    "lablup/mlxcel/issues/1355",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        self.w.pop("rope_freqs.weight", None)


@fault(
    "P16", "rope", "smollm3", "smollm3",
    "RoPE is applied in every layer, also in each fourth one, which has none",
    "timtoole02/Camelid/pull/535",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.no_rope = []
        return c


@fault(
    "P17", "rope", "gemma3_lin", "gemma3 with scaled RoPE",
    "linear scaling of RoPE is global: it is applied to the layers with a window, too, which are not scaled",
    "antonellof/ferrox/issues/39",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        f = super().frequencies(n)
        return f / self.c.rope_scale if n in self.c.local else f


@fault(
    "P18", "rope", "gemma3_lin", "gemma3 with scaled RoPE",
    "the linear scaling factor of RoPE is parsed and never used: layers without a window see positions 8 times too large",
    "lablup/mlxcel/issues/1340",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_scale = 1.0
        return c


@fault(
    "P19", "tokens", "gpt2", "gpt2",
    "position ids count a padding token in front of the prompt: each token gets the learned position after its own",
    "huggingface/transformers/issues/21080",
)  # fmt: skip
class _(Engine):
    def learned(self, pos):
        return pos + 1


@fault(
    "P20", "tokens", "llama", "any",
    "a beginning-of-sequence token is put in front of the prompt although the ids have theirs: all tokens see one more token, at position 0",
    "abetlen/llama-cpp-python/issues/1501",
)  # fmt: skip
class _(Engine):
    def run(self, tokens, chunk=None, prefix=0):
        bos = self.meta.get("tokenizer.ggml.bos_token_id", 1)
        out = super().run([bos, *tokens], chunk, prefix + 1 if prefix else 0)
        return out if prefix else {name: x[1:] for name, x in out.items()}


# --- masks and windows -------------------------------------------------------------------------------------------------------------------


@fault(
    "P21", "masks", "qwen2", "any",
    "the causal mask is applied only if there is no cache; prefill runs with one, so tokens of a prompt see the later ones",
    "Mikyx-1/TinyLLM/pull/18",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return np.ones((len(qpos), len(kpos)), bool)


@fault(
    "P22", "windows", "mistral", "sliding windows",
    "the window is passed to FlashAttention as (window, 0), whose bounds are inclusive: a token sees itself and `window` tokens before it, one too many",
    "NVIDIA-NeMo/Megatron-Bridge/pull/2656",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos[None, :]
        return (d >= 0) & (d <= self.c.window) if self.c.window and n in self.c.local else d >= 0


@fault(
    "P23", "windows", "gemma2", "gemma2",
    "layers with and without a window are swapped: odd layers have the window, even ones see everything",
    "huggingface/transformers/pull/31775",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.local = [n for n in range(c.n_layers) if n not in c.local]
        return c


@fault(
    "P24", "windows", "gemma3", "gemma3",
    "the mask of the layers with a window is made without the window: they see all tokens before",
    "Blaizzy/mlx-vlm/pull/669",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return qpos[:, None] >= kpos[None, :]


@fault(
    "P25", "windows", "gemma3", "gemma3",
    "the window is set for all layers: the layers that should see everything fall back to the model's window",
    "vllm-project/vllm/pull/21863",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos[None, :]
        return (d >= 0) & (d < self.c.window)


# --- attention and heads -----------------------------------------------------------------------------------------------------------------


@fault(
    "P26", "scalings", "gemma2", "gemma2",
    "scores are scaled by the root of width / heads instead of the root of the head's width (16 instead of 24)",
    "ggml-org/llama.cpp/pull/8444",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return s * F32((self.c.width // self.c.heads) ** -0.5)


@fault(
    "P27", "scalings", "llama_mha", "any",
    "scores are not scaled: the fallback of the attention operator is called with the scale 1 instead of 1 / root of the head's width",
    "mlc-ai/mlc-llm/pull/3426",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return s


@fault(
    "P28", "heads", "llama", "grouped queries",
    "key-value heads are tiled (0, 1, 0, 1) for the query heads instead of repeated (0, 0, 1, 1)",
    "onnx/onnx/pull/7274",
)  # fmt: skip
class _(Engine):
    def kv_head(self, n):
        return np.arange(self.c.heads) % self.c.kv_heads


@fault(
    "P29", "soft caps", "gemma2", "gemma2",
    "the soft cap of attention scores is dropped on the way to the attention kernel",
    "sgl-project/sglang/issues/33915",
)  # fmt: skip
class _(Engine):
    def cap(self, s, n):
        return s


@fault(
    "P30", "soft caps", "gemma2", "gemma2",
    "the soft cap of the logits is not applied",
    "vllm-project/vllm/pull/52173",
)  # fmt: skip
class _(Engine):
    def cap_logits(self, y):
        return y


@fault(
    "P31", "loading", "gptneox", "fused queries, keys and values",
    "the fused matrix [all Q; all K; all V] is read as if each head had its Q, K and V next to each other",
    "NVIDIA-NeMo/RL/pull/2802",
)  # fmt: skip
class _(Engine):
    def split_qkv(self, w):
        by_head = w.reshape(self.c.heads, 3, self.c.head_dim, -1)
        return [np.ascontiguousarray(by_head[:, i]).reshape(len(w) // 3, *w.shape[1:]) for i in range(3)]


# --- activations -------------------------------------------------------------------------------------------------------------------------


@fault(
    "P32", "activations", "gemma3", "gemma3",
    "SiLU is hard-coded as the gate's activation, Gemma's is GELU by tanh",
    "huggingface/candle/issues/3745",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        return self.num.silu(gate) * up


@fault(
    "P33", "activations", "qwen3", "any with SiLU",
    "SiLU's sigmoid is 0.5 + 0.5 tanh(x / 2) with tanh y as y (1 + 0.1834 y^2), clipped to -1..1: it saturates at |x| = 1.74",
    "1bit-MONSTER/1bit-MONSTER/issues/1350",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        y = gate * F32(0.5)
        t = np.clip(y * (F32(1) + F32(0.1834) * y * y), F32(-1), F32(1))
        return gate * (F32(0.5) + F32(0.5) * t) * up


@fault(
    "P34", "activations", "qwen3moe", "experts",
    "the arguments of the experts' SwiGLU are swapped: silu(up) * gate",
    "ml-explore/mlx-lm/pull/767",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        return super().gated(up, gate, n)


# --- experts -----------------------------------------------------------------------------------------------------------------------------


@fault(
    "P35", "experts", "qwen3moe", "qwen3moe",
    "the chosen experts' weights are not divided by their sum: norm_topk_prob falls back to false",
    "leonickson1/Swiftlet/pull/6",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.normalized = False
        return c


@fault(
    "P36", "experts", "qwen2moe", "qwen2moe",
    "the router's softmax runs over the chosen experts' logits only instead of all, so that their weights sum to 1",
    "lablup/mlxcel/pull/391",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        top = np.argsort(-logits, axis=-1, kind="stable")[:, : self.c.experts_used]
        return top, self.num.softmax(np.take_along_axis(logits, top, axis=-1))


@fault(
    "P37", "experts", "qwen2moe", "qwen2moe",
    "without renormalisation the softmax is skipped: experts are weighted by their raw router logits",
    "sgl-project/sglang/pull/35160",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        top = np.argsort(-logits, axis=-1, kind="stable")[:, : self.c.experts_used]
        return top, np.take_along_axis(logits, top, axis=-1)


@fault(
    "P38", "experts", "qwen2moe", "qwen2moe",
    "the shared expert's output is not multiplied by the sigmoid of its gate",
    "vllm-project/vllm-ascend/pull/15953",
)  # fmt: skip
class _(Engine):
    def shared_gate(self, y, x, n):
        return y


@fault(
    "P39", "experts", "mixtral", "mixtral",
    "router weights are applied twice: to the experts' inputs and again to their outputs",
    "vllm-project/vllm/pull/43694",
)  # fmt: skip
class _(Engine):
    def experts(self, x, n):
        c, b, k = self.c, f"blk.{n}.ffn_", self.c.experts_used
        top, weights = self.router(self.put("ffn_moe_logits", self.linear(x, b + "gate_inp", n), n))
        self.put("ffn_moe_topk", top, n), self.put("ffn_moe_weights", weights, n)

        def each(inputs, name):
            w, full = self.w[f"{b}{name}_exps.weight"], f"{b}{name}_exps.weight"
            y = np.zeros((*top.shape, w.shape[1]), F32)
            for e in range(c.experts):
                t, j = np.nonzero(top == e)
                if len(t):
                    y[t, j] = self.product(inputs[t, j], w[e], full)
            return y

        x = np.repeat(x[:, None], k, axis=1) * weights[..., None]
        gate, up = self.put("ffn_moe_gate", each(x, "gate"), n), self.put("ffn_moe_up", each(x, "up"), n)
        y = self.put("ffn_moe_down", each(self.put("ffn_moe_swiglu", self.gated(gate, up, n), n), "down"), n)
        return self.put("ffn_moe_out", self.combine(y, weights), n)


# --- scalings ----------------------------------------------------------------------------------------------------------------------------


@fault(
    "P40", "scalings", "gemma", "gemma",
    "embeddings are not multiplied by the root of the width: the scale inside the embedding module is lost",
    "vllm-project/vllm/pull/48010",
)  # fmt: skip
class _(Engine):
    def scale_embedding(self, h):
        return h


@fault(
    "P41", "scalings", "gemma", "gemma, tied",
    "the embedding's scale is multiplied into the table when it is loaded; the tied head reads the same table, so all logits are scaled, too",
    "mattn/tensai/pull/248",
)  # fmt: skip
class _(Engine):
    def head(self, x):
        return super().head(x) * F32(self.c.embed_scale)


@fault(
    "P42", "scalings", "granite", "granite",
    "the residual multiplier is missing: branches are added unscaled",
    "OpenNMT/CTranslate2/pull/1882",
)  # fmt: skip
class _(Engine):
    def residual(self, h, y, n, which):
        return self.num.add(h, y)


@fault(
    "P43", "scalings", "minicpm", "minicpm",
    "the logits are not divided by MiniCPM's scale (width / base width)",
    "ggml-org/llama.cpp/issues/5276",
)  # fmt: skip
class _(Engine):
    def scale_logits(self, y):
        return y


# --- biases, heads, residuals ------------------------------------------------------------------------------------------------------------


@fault(
    "P44", "biases", "llama", "biases in the feed-forward",
    "fusing gate and up into one matrix drops their biases",
    "NVIDIA/TensorRT-LLM/pull/7449",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        return y if name.endswith(("ffn_gate", "ffn_up")) else super().add_bias(y, name)


@fault(
    "P45", "biases", "qwen2", "qwen2",
    "the biases of queries, keys and values are not loaded",
    "sbryngelson/ANEForge/pull/253",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        return y if name.endswith(("attn_q", "attn_k", "attn_v")) else super().add_bias(y, name)


@fault(
    "P46", "biases", "phi2", "phi2",
    "the head's bias is missing: logits are the product alone",
    "huggingface/transformers/issues/35625",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        return y if name == "output" else super().add_bias(y, name)


@fault(
    "P47", "biases", "starcoder2", "biases of output matrices",
    "with two tensor-parallel ranks each adds the bias of the attention output and of the down projection before the sum: it counts twice",
    "huggingface/text-generation-inference/issues/1036",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        y = super().add_bias(y, name)
        return super().add_bias(y, name) if name.endswith(("attn_output", "ffn_down")) else y


@fault(
    "P48", "heads", "llama", "untied head",
    "the embedding is used as the head although the file has a head of its own (output.weight)",
    "pegainfer-project/pegainfer/pull/544",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.tied = True
        return c


@fault(
    "P49", "residuals", "gptneox", "gptneox with use_parallel_residual false",
    "use_parallel_residual is not looked at: the feed-forward branch takes the layer's input in parallel with attention instead of the sum",
    "deepspeedai/DeepSpeed/pull/2446",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.parallel = True
        return c


# --- quantised blocks and types -----------------------------------------------------------------------------------------------------------


def halves(b):  # two bytes at the end of an axis -> float16 as float32
    return np.ascontiguousarray(b).view(np.float16).astype(F32)


def bit(b, i):
    return (b[..., i // 8] >> (i % 8)) & 1


class Blocks(Engine):
    """A loader with a decoder of its own for the blocks of one type."""

    kind, size = "", 0

    def dequantize(self, data, kind, shape, name):
        if kind != self.kind:
            return super().dequantize(data, kind, shape, name)
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1, self.size)
        return np.asarray(self.decode(raw), F32).reshape(shape)


@fault(
    "P50", "quantised blocks", "llama_q2k", "Q2_K",
    "Q2_K's codes are read in sequence (four neighbours to a byte, sub-block j from byte 4j) instead of in strides of 32: codes get other sub-blocks' scales",
    "paiml/aprender/pull/1924",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q2_K", 84

    def decode(self, b):
        i = np.arange(256)
        q = (b[:, 16 + i // 4] >> (2 * (i % 4)).astype(np.uint8)) & 3
        scales = b[:, i // 16]
        d, low = halves(b[:, 80:82]), halves(b[:, 82:84])
        return d * (scales & 15) * q - low * (scales >> 4)


@fault(
    "P51", "quantised blocks", "llama_q3k", "Q3_K",
    "Q3_K's scales are unpacked as 16 numbers of 4 bits minus 8 from the first 8 bytes instead of 6 bits minus 32 from 12 bytes, and codes and high bits are read in sequence",
    "paiml/aprender/pull/2115",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q3_K", 110

    def decode(self, b):
        i = np.arange(256)
        high = (b[:, i // 8] >> (i % 8).astype(np.uint8)) & 1
        low = (b[:, 32 + i // 4] >> (2 * (i % 4)).astype(np.uint8)) & 3
        q = low.astype(F32) - np.where(high, F32(0), F32(4))
        scale = ((b[:, 96 + i // 32] >> (4 * (i // 16 % 2)).astype(np.uint8)) & 15).astype(F32) - 8
        return halves(b[:, 108:110]) * scale * q


def scales_k4(s):  # [N, 12] -> scales and minima [N, 8] of Q4_K and Q5_K
    sc = np.concatenate([s[:, :4] & 63, (s[:, 8:] & 15) | (s[:, :4] >> 6 << 4)], axis=1)
    mn = np.concatenate([s[:, 4:8] & 63, (s[:, 8:] >> 4) | (s[:, 4:8] >> 6 << 4)], axis=1)
    return sc.astype(F32), mn.astype(F32)


@fault(
    "P52", "quantised blocks", "llama_q4k", "Q4_K",
    "Q4_K's 6-bit scales and minima are read as plain runs of 6 bits, which is right for the first sub-block only; the other 7 get wrong scales",
    "paiml/aprender/pull/2141",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q4_K", 144

    def decode(self, b):
        def run(s):  # 8 fields of 6 bits from the start of s
            fields = [sum(bit(s, 6 * i + j).astype(np.int32) << j for j in range(6)) for i in range(8)]
            return np.stack(fields, axis=1).astype(F32)

        sc, mn = run(b[:, 4:10]), run(b[:, 8:14])
        qs = b[:, 16:].reshape(-1, 4, 1, 32)
        q = np.concatenate([qs & 15, qs >> 4], axis=2).reshape(-1, 8, 32)
        d, low = halves(b[:, 0:2])[:, :, None], halves(b[:, 2:4])[:, :, None]
        return d * sc[..., None] * q - low * mn[..., None]


@fault(
    "P53", "quantised blocks", "llama_q5k", "Q5_K",
    "Q5_K's nibbles and fifth bits are read in sequence (index / 2, index / 8) instead of 32 apart: weights of a block change places",
    "paiml/aprender/pull/2127",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q5_K", 176

    def decode(self, b):
        i = np.arange(256)
        sc, mn = scales_k4(b[:, 4:16])
        low = (b[:, 48 + i // 2] >> (4 * (i % 2)).astype(np.uint8)) & 15
        high = (b[:, 16 + i // 8] >> (i % 8).astype(np.uint8)) & 1
        return halves(b[:, 0:2]) * sc[:, i // 32] * (low + 16.0 * high) - halves(b[:, 2:4]) * mn[:, i // 32]


@fault(
    "P54", "quantised blocks", "llama_q50", "Q5_0",
    "Q5_0's low and high nibbles are written alternately instead of in two halves, and the high bits are taken at 2i and 2i + 1",
    "paiml/aprender/pull/1656",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q5_0", 22

    def decode(self, b):
        i = np.arange(32)
        q = (b[:, 6 + i // 2] >> (4 * (i % 2)).astype(np.uint8)) & 15
        high = (b[:, 2 + i // 8] >> (i % 8).astype(np.uint8)) & 1
        return halves(b[:, 0:2]) * (q + 16.0 * high - 16)


@fault(
    "P55", "quantised blocks", "llama_q41", "Q4_1",
    "the unpacker skips a header of 2 bytes, as Q4_0 has it, where Q4_1 has 4: the minimum's bytes are read as codes, and all codes are shifted by two bytes",
    "ml-explore/mlx/pull/3664",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q4_1", 20

    def decode(self, b):
        qs = b[:, 2:18]
        return halves(b[:, 0:2]) * np.concatenate([qs & 15, qs >> 4], axis=1) + halves(b[:, 2:4])


@fault(
    "P56", "quantised blocks", "llama_q4", "Q4_0",
    "Q4_0's codes are taken for two's complement (0..7, -8..-1) instead of excess 8 (code minus 8)",
    "1bit-MONSTER/1bit-MONSTER/pull/572",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q4_0", 18

    def decode(self, b):
        qs = b[:, 2:].astype(np.int32)
        q = np.concatenate([qs & 15, qs >> 4], axis=1)
        return halves(b[:, 0:2]) * np.where(q >= 8, q - 16, q)


@fault(
    "P57", "quantised blocks", "llama_mxfp4", "MXFP4",
    "MXFP4's nibbles are read in linear order (2i low, 2i + 1 high) instead of split halves (i low, i + 16 high): weights of a block change places",
    "kekzl/imp/pull/567",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        x = super().dequantize(data, kind, shape, name)
        if kind != "MXFP4":
            return x
        return np.ascontiguousarray(x.reshape(-1, 2, 16).swapaxes(1, 2)).reshape(shape)


@fault(
    "P58", "quantised blocks", "llama_tq2", "TQ2_0",
    "TQ2_0 is read as if 4 neighbours shared a byte; it has 4 bit planes of 32 bytes: weights are paired with the wrong activations",
    "ggml-org/llama.cpp/pull/28769",
)  # fmt: skip
class _(Blocks):
    kind, size = "TQ2_0", 66

    def decode(self, b):
        i = np.arange(256)
        q = (b[:, i // 4] >> (2 * (i % 4)).astype(np.uint8)) & 3
        return halves(b[:, 64:66]) * (q.astype(F32) - 1)


@fault(
    "P59", "loading", "llama_q6k", "K-quants",
    "the loader returns from inside the loop over blocks: only the first 256 weights of each quantised tensor are decoded, the rest stays zero",
    "1bit-MONSTER/1bit-MONSTER/pull/488",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        x = super().dequantize(data, kind, shape, name).reshape(-1)
        if kind.endswith("_K"):
            x[256:] = 0
        return x


@fault(
    "P60", "loading", "llama_q8", "quantised blocks",
    "the kernels that decode quantised blocks write half-precision numbers, and the engine reads their bytes as bfloat16",
    "vllm-project/vllm/pull/30090",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        x = super().dequantize(data, kind, shape, name)
        if kind in ("F32", "F16", "BF16"):
            return x
        return (x.astype(np.float16).view(np.uint16).astype(np.uint32) << 16).view(F32)
