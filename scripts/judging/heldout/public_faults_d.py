"""Sixty more faults that act always (V01..V60), by a fourth author, each ported from a public report on an inference engine, kernel, loader
or converter that no other file here names. Sizes of tiles, blocks, buffers and ranks are scaled down to the models.
Brackets say where a case differs from its report, or where a report names the place of a bug and not what it does.

FAULTS: id -> record as in public_faults_c.py. `reach` is SUBTLE (few elements, few positions or small numbers), LOCAL (to a layer, chunk,
matrix, range of positions, or the ends of the model) or ALIKE (in all layers that have the operation).
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


def blocks(data, size):  # the bytes of a matrix as a copy of its blocks, [blocks, size]
    return np.array(data).view(np.uint8).reshape(-1, size)


def half_floats(b):  # [n, 2] bytes -> [n, 1]
    return np.ascontiguousarray(b).view(np.float16).astype(F32)


def halves_as_pairs(width):  # the order in which the rows of a head turn in halves are those of a head turned in adjacent pairs
    return np.arange(width).reshape(2, -1).T.ravel()


def first_rank(w):  # each of two ranks holds the first one's rows
    half = len(w) // 2
    return np.concatenate([w[:half], w[:half]])


def half_of_inputs(x):  # the products of the other half are missing from the sum
    x = x.copy()
    x[..., x.shape[-1] // 2 :] = 0
    return x


# --- tokens and embedding ---------------------------------------------------------------------------------------------------------------


@fault(
    "V01", "tokens", ALIKE, "llama", "tokens",
    "the chat template writes the first token and the tokenizer adds it again: it comes twice, and the last token no longer fits the buffer",
    "sgl-project/sglang/pull/888",
)  # fmt: skip
class _(Engine):
    def prepare(self, tokens):
        return np.concatenate([tokens[:1], tokens])[: len(tokens)]


@fault(
    "V02", "tokens", LOCAL, "llama", "tokens",
    "a chunk is cut to the room that the cache has left (8 of the second 16 tokens), and the loop goes on by a whole chunk: 8 tokens of the "
    "middle are never fed, the others take their positions",
    "Integral2u/SharpMind/issues/57",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def feed(self, tokens, start, chunk):
        for i in range(0, len(tokens), chunk):
            part = tokens[i : i + chunk]
            fed = part[: chunk // 2] if i == chunk else part
            self.forward(fed, start)
            start += len(fed)
            for rows in self.out.values():
                rows.append(np.zeros((len(part) - len(fed), rows[0].shape[1]), rows[0].dtype))


@fault(
    "V03", "embedding", SUBTLE, "llama", "embedding",
    "each of 4 ranks clears the row of the padding token in its part of the table by the whole table's number (3): rows 27, 51 and 75, other "
    "tokens' rows, are zero too",
    "hpcaitech/ColossalAI/pull/242",
)  # fmt: skip
class _(Engine):
    def rows(self, tokens):
        h = super().rows(tokens).copy()
        h[tokens % (self.c.vocab // 4) == 3] = 0
        return h


@fault(
    "V04", "embedding", LOCAL, "gemma3", "embedding",
    "the embedding is multiplied by the root of the width in the layer of the table and again in the model's forward pass",
    "TensorAuto/OpenTau/pull/179",
)  # fmt: skip
class _(Engine):
    def scale_embedding(self, h):
        return super().scale_embedding(super().scale_embedding(h))


@fault(
    "V05", "embedding", LOCAL, "gpt2", "positions",
    "positions are looked up 2 rows further on, as in OPT's table, whose first two rows are for padding; this table has none "
    "(in the report the offset is missing)",
    "EleutherAI/gpt-neox/pull/650",
)  # fmt: skip
class _(Engine):
    def learned(self, pos):
        return pos + 2


# --- norms ------------------------------------------------------------------------------------------------------------------------------


@fault(
    "V06", "norms", SUBTLE, "qwen3_eps", "RMSNorm of heads",
    "the norms of queries and keys are built without the model's epsilon and take the class's default, 1e-6",
    "huggingface/transformers/pull/44317",
)  # fmt: skip
class _(Engine):
    def qk_norm(self, x, name):
        own, self.c.eps = self.c.eps, F32(1e-6)
        x = super().qk_norm(x, name)
        self.c.eps = own
        return x


@fault(
    "V07", "norms", SUBTLE, "stablelm_eps", "LayerNorm",
    "a parenthesis: the sum of squares is divided by the width plus epsilon, instead of by the width before epsilon is added",
    "xlite-dev/LeetCUDA/pull/317",
)  # fmt: skip
class _(Engine):
    def layer_norm(self, x, w, b):
        x = x - self.num.mean(x)
        y = x * self.num.rsqrt(self.num.total(x * x) / (F32(x.shape[-1]) + self.c.eps)) * w
        return y if b is None else y + b


@fault(
    "V08", "norms", SUBTLE, "stablelm", "LayerNorm",
    "the variance is torch's default estimate, the sum of squares over the width less 1",
    "harvardnlp/annotated-transformer/pull/119",
)  # fmt: skip
class _(Engine):
    def layer_norm(self, x, w, b):
        x = x - self.num.mean(x)
        y = x * self.num.rsqrt(self.num.total(x * x) / F32(x.shape[-1] - 1) + self.c.eps) * w
        return y if b is None else y + b


@fault(
    "V09", "norms", LOCAL, "olmo2", "RMSNorm of keys",
    "the keys' norm is cut by the number of ranks and not by heads: the second rank takes the first one's part of its weights",
    "sgl-project/sglang/pull/20967",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            name = f"blk.{n}.attn_k_norm.weight"
            self.w[name] = first_rank(self.w[name])


@fault(
    "V10", "norms", SUBTLE, "bitnet", "RMSNorm and quantiser",
    "in front of the output and down matrices the int8 quantiser comes before the norm: codes are normed, and the matrix takes the norm's "
    "output unquantised (the report puts the missing norm in front of the quantiser)",
    "huggingface/transformers/pull/38087",
)  # fmt: skip
class _(Engine):
    def sub_norm(self, y, name, n):
        scale = F32(127) / np.maximum(np.abs(y).max(axis=-1, keepdims=True), F32(1e-5))
        return super().sub_norm(np.rint(y * scale) / scale, name, n)

    def product(self, x, w, name):
        return self.matmul(x, w, name) if "attn_output" in name or "ffn_down" in name else super().product(x, w, name)


@fault(
    "V11", "norms", LOCAL, "llama", "final RMSNorm",
    "the final norm's row is split over two vector units, and their partial sums of squares are never put together: each half is normed "
    "by itself",
    "hw-native-sys/pypto/issues/1864",
)  # fmt: skip
class _(Engine):
    def norm(self, x, name, n):
        if name != "output_norm":
            return super().norm(x, name, n)
        w = np.split(self.w["output_norm.weight"], 2)
        return np.concatenate([self.rms_norm(y, v, self.c.eps, name) for y, v in zip(np.split(x, 2, axis=-1), w)], axis=-1)


# --- queries, keys and values -----------------------------------------------------------------------------------------------------------


@fault(
    "V12", "qkv", ALIKE, "gptneox", "fused QKV",
    "the rows of the fused matrix are read as groups of a head's queries, keys and values, and they lie as all queries, all keys, all values "
    "(in the report the other way round)",
    "NVIDIA-NeMo/Megatron-Bridge/pull/1818",
)  # fmt: skip
class _(Engine):
    def split_qkv(self, w):
        c = self.c
        groups = w.reshape(c.kv_heads, -1, c.head_dim, *w.shape[1:])
        return [part.reshape(-1, *w.shape[1:]) for part in (groups[:, :-2], groups[:, -2], groups[:, -1])]


@fault(
    "V13", "qkv", ALIKE, "llama_q8", "scales of rows",
    "the rows of the int8 query and key matrices are put into the order of RoPE's kernel, their scales are not: each row has another row's",
    "vllm-project/vllm/pull/34243",
)  # fmt: skip
class _(Engine):
    def load(self, t):
        w = super().load(t)
        if not t.name.endswith(("attn_q.weight", "attn_k.weight")):
            return w
        scale = np.abs(w).max(axis=1).reshape(-1, self.c.head_dim)
        return w * (scale[:, halves_as_pairs(self.c.head_dim)] / scale).reshape(-1, 1)


@fault(
    "V14", "qkv", ALIKE, "llama", "tensor-parallel shards",
    "the loaders of merged matrices (queries, keys and values; gate and up) take rank 0 as a default: both ranks hold the first half of rows",
    "vllm-project/vllm-gguf-plugin/issues/103",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for name in self.w:
            if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight", "ffn_up.weight")):
                self.w[name] = first_rank(self.w[name])


@fault(
    "V15", "qkv", ALIKE, "qwen2", "QKV biases",
    "RoPE's order of channels is folded into the query and key matrices, and back in the kernel; the biases stay in the old order",
    "vllm-project/vllm/pull/55335",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        if not name.endswith(("attn_q", "attn_k")):
            return super().add_bias(y, name)
        b = self.w[name + ".bias"].reshape(-1, self.c.head_dim)
        return y + b[:, halves_as_pairs(self.c.head_dim)].ravel()


# --- RoPE -------------------------------------------------------------------------------------------------------------------------------


@fault(
    "V16", "rope", SUBTLE, "qwen3_yarn", "YaRN",
    "the final factor of cosines and sines (1.139) goes through YaRN's formula again: 0.1 * 1.139 * ln 4 + 1 = 1.158",
    "NVIDIA/TensorRT-LLM/pull/16379",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_magnitude = 0.1 * c.rope_magnitude * math.log(c.rope_scale) + 1
        return c


@fault(
    "V17", "rope", ALIKE, "phi3_long", "LongRoPE",
    "one table is made of the long list and taken at all lengths; the short list is parsed and never read",
    "lablup/mlxcel/issues/1358",
)  # fmt: skip
class _(Engine):
    def rope_factors(self):
        return self.w["rope_factors_long.weight"]


@fault(
    "V18", "rope", ALIKE, "llama", "Llama 3's scaling",
    "the factors by which Llama 3's scaling divides the frequencies multiply them",
    "InfiniTensor/InfiniCore/pull/1200",
)  # fmt: skip
class _(Engine):
    def rope_factors(self):
        return 1 / super().rope_factors()


@fault(
    "V19", "rope", ALIKE, "gptneox", "RoPE's frequencies",
    "a head is rotated in part, and the exponents of the frequencies are divided by the width of the whole head: 1 and 0.1 for the first two "
    "pairs become 1 and 0.32",
    "huggingface/transformers/pull/48652",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        c = self.c
        return float(c.rope_base) ** (-np.arange(c.rope_width // 2) * 2.0 / c.head_dim)


@fault(
    "V20", "rope", SUBTLE, "llama_long", "RoPE's positions",
    "positions are bfloat16 when they are multiplied by the frequencies: from 257 on, odd ones are rounded to even ones",
    "EleutherAI/gpt-neox/pull/1016",
    tokens=290,
    prefix=248,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        b = np.asarray(pos, F32).view(np.uint32)
        b = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return super().rope(x, b.view(F32), n, which)


@fault(
    "V21", "rope", SUBTLE, "llama", "RoPE of one token",
    "the kernel for a single token walks its axis of positions over the heads: head h turns by the position plus h",
    "elixir-nx/emlx/issues/121",
    tokens=33,
    chunk=16,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        if len(x) > 1:
            return super().rope(x, pos, n, which)
        heads = np.asarray(pos, np.float64)[:, None] + np.arange(x.shape[1])
        return self.rotate(x, *self.num.sin_cos(np.multiply.outer(heads, self.frequencies(n))))


@fault(
    "V22", "rope", LOCAL, "llama", "shifted keys",
    "after two shifts of the cache by 8, cells keep only the last one's difference: keys of the reused prefix are turned 8 positions too far",
    "ggml-org/llama.cpp/issues/3825",
    prefix=16,
)  # fmt: skip
class _(Engine):
    def cache_get(self, n):
        k, v, pos = super().cache_get(n)
        if self.call == "prompt":
            angle = np.multiply.outer(np.where(pos < self.prefix, 8.0, 0.0), self.frequencies(n))[:, None]
            k = self.rotate(k, *self.num.sin_cos(angle))
        return k, v, pos


# --- masks and windows ------------------------------------------------------------------------------------------------------------------


@fault(
    "V23", "mask", ALIKE, "mistral", "window",
    "the window's diagonal has the wrong sign and cuts the causal mask: keys of the past are all seen, and so are those more than a window ahead",
    "huggingface/transformers/pull/41228",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos[None, :]
        return (d >= 0) | (d < -self.c.window)


@fault(
    "V24", "mask", ALIKE, "mistral", "window and ring buffer",
    "a prompt longer than the window is written into the ring of keys as a whole before it attends; later tokens overwrite slots, and the mask "
    "compares positions with numbers of slots",
    "Lightning-AI/litgpt/issues/2182",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        w = self.c.window
        last = np.array([max(range(s, len(k), w)) for s in range(w)])
        self.slots = np.arange(w)
        return super().attend(q, k[last], v[last], qpos, self.slots, n)

    def visible(self, qpos, kpos, n):
        return qpos[:, None] >= kpos[None, :]


@fault(
    "V25", "mask", SUBTLE, "starcoder2_w", "window and ring buffer",
    "a chunk of 20 goes into a ring of 18 rows in parallel: the older of two rows for a slot survives, so that later chunks find positions 0 "
    "and 1 in place of 18 and 19",
    "antirez/ds4/pull/614",
    chunk=20,
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        w, old = self.c.window, self.keys[n]
        if old is not None and len(old[0]) == self.chunk > w and n in self.c.local:
            over = len(old[0]) - w
            self.keys[n] = (*(np.concatenate([x[:w], x[:over]]) for x in old[:2]), old[2])
        super().cache_put(n, k, v, pos)


@fault(
    "V26", "mask", LOCAL, "llama", "causal mask of chunks",
    "the kernel's last key is the query's number in its chunk: later chunks see only the first keys of the cache",
    "gittensor-ai-lab/sparkinfer/issues/3",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return kpos[None, :] <= qpos[:, None] - self.start


@fault(
    "V27", "mask", LOCAL, "gemma3", "window",
    "the window is a property of the whole model: the one layer that sees everything has it too",
    "InternLM/lmdeploy/pull/3772",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos[None, :]
        return (d >= 0) & (d < self.c.window)


@fault(
    "V28", "mask", SUBTLE, "gemma3", "window and ring buffer",
    "once the ring of keys has wrapped, a new chunk is put behind its rows as they lie, and the mask takes them in order of time",
    "ollama/ollama/pull/14912",
    chunk=10,
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        w = self.c.window
        if n in self.c.local and self.start > w:
            time = np.arange(self.start - w, self.start)
            lie = time[np.argsort(time % w)]
            k, v = k.copy(), v.copy()
            k[time], v[time] = k[lie], v[lie]
        return super().attend(q, k, v, qpos, kpos, n)


# --- KV cache ---------------------------------------------------------------------------------------------------------------------------


@fault(
    "V29", "kv cache", SUBTLE, "llama", "scales of values",
    "the values in the cache have a scale for each head, and the kernel reads one scale for all: the second head is scaled by the first one's",
    "sgl-project/sgl-kernel-xpu/pull/252",
)  # fmt: skip
class _(Engine):
    def cache_get(self, n):
        k, v, pos = super().cache_get(n)
        scale = np.abs(v).max(axis=(0, 2))
        return k, v * (scale[0] / scale)[:, None], pos


@fault(
    "V30", "kv cache", ALIKE, "llama_q5k", "scores of few tokens",
    "the kernel for at most 2 tokens steps through a key by threads and through the query by blocks: pairs of the two do not belong together",
    "TheTom/llama-cpp-turboquant/pull/3",
    tokens=24,
    chunk=2,
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        t, h, d = q.shape
        q = q.reshape(t, h, 8, d // 16, 2).swapaxes(2, 3).reshape(t, h, d)
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "V31", "kv cache", SUBTLE, "llama", "rows of the cache",
    "a core that holds blocks of two heads goes on by the chunk's stride: the second head's first 8 rows of each chunk land behind the first "
    "head's, and its own stay zero",
    "tenstorrent/tt-metal/issues/54742",
    chunk=20,
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        k, v = k.copy(), v.copy()
        k[:8, 1:], v[:8, 1:] = 0, 0
        super().cache_put(n, k, v, pos)


@fault(
    "V32", "kv cache", ALIKE, "llama_wide", "rows of the cache",
    "keys are gathered by vectors of 16 numbers, and a row has 100: rows are read from the last multiple of 16 before their start",
    "ROCm/aiter/pull/2954",
)  # fmt: skip
class _(Engine):
    def cache_get(self, n):
        k, v, pos = super().cache_get(n)
        row = k[0].size
        first = np.arange(len(k)) * row // 16 * 16
        return k.reshape(-1)[first[:, None] + np.arange(row)].reshape(k.shape), v, pos


@fault(
    "V33", "kv cache", LOCAL, "llama", "slots of later tokens",
    "after the prompt, the length of the past counts the token that is about to come: tokens have the next position and slot, and the slot "
    "behind the prompt stays empty and is seen",
    "microsoft/onnxruntime-genai/pull/2354",
    chunk=1,
    prefix=32,
)  # fmt: skip
class _(Engine):
    def positions(self, start, count):
        return super().positions(start, count) + (self.call == "prompt")

    def cache_put(self, n, k, v, pos):
        if self.call == "prompt" and pos[0] == self.prefix + 1:
            super().cache_put(n, np.zeros_like(k[:1]), np.zeros_like(v[:1]), pos[:1] - 1)
        super().cache_put(n, k, v, pos)


# --- attention --------------------------------------------------------------------------------------------------------------------------


@fault(
    "V34", "attention", SUBTLE, "llama", "merged parts of the softmax",
    "attention over the cache and over the chunk itself are merged by the logarithms of their sums: these have the base 2, and are taken as "
    "natural ones",
    "sgl-project/sglang/pull/35045",
    chunk=20,
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if not self.start:
            return super().attend(q, k, v, qpos, kpos, n)
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, self.kv_head(n)], v[:, self.kv_head(n)]))
        s = np.where(self.visible(qpos, kpos, n), self.scale_scores(self.num.qk(q, k), n), F32(-np.inf))
        parts, logs = [], []
        for part in (kpos < self.start, kpos >= self.start):
            most = s[..., part].max(axis=-1, keepdims=True)
            e = np.exp(s[..., part] - most)
            total = e.sum(axis=-1, keepdims=True)
            parts.append(e / total @ v[:, part])
            logs.append((most + np.log(total)) / F32(math.log(2)))
        first = F32(1) / (F32(1) + np.exp(logs[1] - logs[0]))
        return (first * parts[0] + (F32(1) - first) * parts[1]).swapaxes(0, 1)


@fault(
    "V35", "attention", ALIKE, "llama_wide", "scores",
    "the kernel takes heads in tiles of 16 numbers, and a head has 20: the last 4 are in no score",
    "mlc-ai/mlc-llm/pull/1889",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        q = q.copy()
        q[..., q.shape[-1] // 16 * 16 :] = 0
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "V36", "attention", ALIKE, "gemma2", "cap of scores",
    "the scores are not capped",
    "ml-explore/mlx-swift-examples/pull/99",
)  # fmt: skip
class _(Engine):
    def cap(self, s, n):
        return s


# --- matrices and shards ----------------------------------------------------------------------------------------------------------------


@fault(
    "V37", "matrices", LOCAL, "llama", "up matrix",
    "the widest product has one block of outputs more than there are cores: its last 16 columns keep what the buffer held, the previous "
    "layer's",
    "tenstorrent/tt-metal/issues/54798",
)  # fmt: skip
class _(Engine):
    def linear(self, x, name, n=None):
        y = super().linear(x, name, n)
        if name.endswith("ffn_up"):
            y[:, -16:] = self.stale if n else 0
            self.stale = super().linear(x, name, n)[:, -16:]
        return y


@fault(
    "V38", "matrices", LOCAL, "gpt2", "bias of a shard",
    "attention's output matrix is cut by inputs over 4 ranks, each adds the whole bias, and the reduction sums four of them",
    "awslabs/slapo/issues/10",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        return y + F32(4) * self.w[name + ".bias"] if name.endswith("attn_output") else super().add_bias(y, name)


@fault(
    "V39", "matrices", LOCAL, "starcoder2", "bias of a product in parts",
    "the longest product is cut along its inputs, and the kernel that adds up its parts leaves out the epilogue: the down matrix has no bias",
    "triton-lang/triton/pull/8252",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        return y if name.endswith("ffn_down") else super().add_bias(y, name)


@fault(
    "V40", "matrices", LOCAL, "smollm3", "layers of a stage",
    "the second stage of a pipeline loads layers by their number in the stage: layers 2 and 3 have the weights of layers 0 and 1",
    "huggingface/transformers/pull/24381",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        self.w |= {name.replace(f"blk.{n}.", f"blk.{n + 2}."): w for name, w in self.w.items() for n in (0, 1) if f"blk.{n}." in name}


@fault(
    "V41", "matrices", LOCAL, "llama", "layers of a stage",
    "the last rank of a pipeline looks up one of its tensors (here the query matrix) by the layer's number in the rank: layer 2 has layer 0's",
    "tenstorrent/tt-metal/issues/54884",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        self.w["blk.2.attn_q.weight"] = self.w["blk.0.attn_q.weight"]


# --- experts ----------------------------------------------------------------------------------------------------------------------------


@fault(
    "V42", "experts", ALIKE, "mixtral", "sum over ranks",
    "experts are cut over 4 ranks, and the fused reduction sums 2 of them: half of the down matrices' products are missing",
    "sgl-project/sglang/pull/32963",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        return super().product(half_of_inputs(x) if "down_exps" in name else x, w, name)


@fault(
    "V43", "experts", ALIKE, "qwen2moe", "shared expert",
    "the shared expert's output is summed over 2 ranks, and summed again with the routed experts': it counts twice",
    "vllm-project/tpu-inference/issues/3537",
)  # fmt: skip
class _(Engine):
    def shared_gate(self, y, x, n):
        return super().shared_gate(F32(2) * y, x, n)


@fault(
    "V44", "experts", ALIKE, "qwen3moe", "router",
    "the chosen experts' probabilities are not divided by their sum",
    "pytorch/torchtitan/issues/1448",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.normalized = False
        return c


@fault(
    "V45", "experts", SUBTLE, "mixtral_w", "weighted sum of experts",
    "the weighted sum goes by vectors of 4, and the width is 70: the last 2 columns are never written",
    "stew675/llama-cpp-rdna-boosts/issues/19",
)  # fmt: skip
class _(Engine):
    def combine(self, y, weights):
        out = super().combine(y, weights)
        out[:, out.shape[1] // 4 * 4 :] = 0
        return out


@fault(
    "V46", "experts", LOCAL, "qwen2moe_s", "SiLU of the shared expert",
    "at one width (here 96, the shared expert's) a work group is no power of two and leaves channels 33 to 92 of SiLU(gate) * up unwritten",
    "vllm-project/vllm-xpu-kernels/issues/454",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        y = super().gated(gate, up, n)
        if y.shape[-1] == 96:
            y[..., 33:93] = 0
        return y


# --- activations ------------------------------------------------------------------------------------------------------------------------


@fault(
    "V47", "activation", ALIKE, "bitnet_mha", "squared ReLU",
    "the gate's activation is SiLU, as in the Llama graph from which this one was made",
    "microsoft/BitNet/issues/588",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        return self.num.silu(gate) * up


@fault(
    "V48", "activation", SUBTLE, "gemma", "GELU",
    "config.json's old key says gelu, and the bridge takes the exact GELU; the model's is the approximation by tanh",
    "NVIDIA-NeMo/Megatron-Bridge/pull/4661",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        erf = np.vectorize(math.erf)(gate * math.sqrt(0.5))
        return (F32(0.5) * gate * (1 + erf)).astype(F32) * up


@fault(
    "V49", "activation", ALIKE, "phi3", "fused gate and up",
    "the number of the slot in the fused matrix is taken after its name was changed and is always 0: up is the gate's half too (in the report for "
    "what LoRA adds)",
    "thinking-machines-lab/tinker-cookbook/pull/459",
)  # fmt: skip
class _(Engine):
    def split_gate_up(self, w):
        gate, _ = super().split_gate_up(w)
        return gate, gate


# --- residual and logits ----------------------------------------------------------------------------------------------------------------


@fault(
    "V50", "residual", LOCAL, "llama", "first residual",
    "the first layer's norm is done in place in front of the layers: attention's branch is added to the normed embedding (the "
    "report: wrong residual with a norm in front of the layers)",
    "alibaba/rtp-llm/pull/426",
)  # fmt: skip
class _(Engine):
    def residual(self, h, y, n, which):
        return super().residual(self.norm(h, "blk.0.attn_norm", 0) if n == 0 and which == "attn" else h, y, n, which)


@fault(
    "V51", "logits", LOCAL, "granite", "scale of logits",
    "the logits are multiplied by their scale, as in Cohere's models, and these divide by it",
    "unslothai/unsloth/pull/1218",
)  # fmt: skip
class _(Engine):
    def scale_logits(self, y):
        return y * F32(self.c.logit_scale)


# --- block types ------------------------------------------------------------------------------------------------------------------------


@fault(
    "V52", "blocks", ALIKE, "llama_q51", "Q5_1",
    "the dot product of a block leaves out the minimum times the sum of the inputs",
    "huggingface/candle/pull/776",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind == "Q5_1":
            data = blocks(data, 24)
            data[:, 2:4] = 0
            data = data.reshape(shape[0], -1)
        return super().dequantize(data, kind, shape, name)


@fault(
    "V53", "blocks", ALIKE, "llama_q4k", "Q4_K",
    "the second 16 numbers of every other sub-block are dropped from the sum that the minimum multiplies: their weights have no minimum",
    "paiml/aprender/issues/3105",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind == "Q4_K":
            b = blocks(data, 144)
            least = half_floats(b[:, 2:4]) * quants.Q4_K.get_scale_min(b[:, 4:16])[1]
            w = w.reshape(-1, 8, 32)
            w[:, ::2, 16:] += least[:, ::2, None]
        return w


@fault(
    "V54", "blocks", LOCAL, "llama_q8", "Q8_0 of the head",
    "the index of a code in the head's row has no term for its group of 32 columns: all groups read the codes of one (4-bit "
    "codes in the report)",
    "1bit-MONSTER/1bit-MONSTER/issues/153",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if name == "output.weight":
            data = blocks(data, 34).reshape(shape[0], -1, 34)
            data[:, 1:, 2:] = data[:, :1, 2:]
            data = data.reshape(shape[0], -1)
        return super().dequantize(data, kind, shape, name)


@fault(
    "V55", "blocks", SUBTLE, "llama_mxfp4", "MXFP4",
    "codes with the exponent 0 are decoded with a hidden bit: zero becomes 0.5 and 0.5 becomes 0.75",
    "tile-ai/tilelang/pull/2709",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind == "MXFP4":
            b = blocks(data, 17)
            codes = np.concatenate([b[:, 1:] & 15, b[:, 1:] >> 4], axis=1)
            more = np.array([1, 0.5, 0, 0, 0, 0, 0, 0, -1, -0.5, 0, 0, 0, 0, 0, 0], F32)  # in halves, as the scale is half of the block's
            w = w.reshape(-1, 32) + more[codes] * quants.MXFP4.e8m0_to_fp32_half(b[:, :1])
        return w


@fault(
    "V56", "blocks", ALIKE, "llama_iq3s", "IQ3_S",
    "the 4-bit scale of sub-block i is looked for in byte i, and two share a byte: from the fifth on it is read from the next block",
    "ggml-org/llama.cpp/pull/15862",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind == "IQ3_S":
            data = blocks(data, 110)
            read = np.concatenate([data[:, 106:], np.roll(data, -1, axis=0)[:, :4]], axis=1)
            data[:, 106:] = (read[:, ::2] & 15) | (read[:, 1::2] & 0xF0)
            data = data.reshape(shape[0], -1)
        return super().dequantize(data, kind, shape, name)


# --- ternary matrices -------------------------------------------------------------------------------------------------------------------


@fault(
    "V57", "ternary", ALIKE, "bitnet", "ternary codes",
    "the kernel unpacks 64 codes from groups of 16 bytes, and they lie as 128 in groups of 32: codes of a row are in another order",
    "microsoft/BitNet/issues/585",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind == "TQ2_0":  # [128s of a block, shifts, 16s, byte] -> [128s, 16s, shifts, byte]
            w = w.reshape(-1, 4, 2, 16).swapaxes(1, 2)
        return w


@fault(
    "V58", "ternary", SUBTLE, "bitnet", "int8 activations",
    "activations are cast to int8 without being rounded: codes are cut toward zero",
    "sgl-project/sglang-jax/pull/1598",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name not in self.int8:
            return super().product(x, w, name)
        scale = F32(127) / np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-5))
        return self.matmul(np.trunc(x * scale), w, name) / scale


@fault(
    "V59", "ternary", SUBTLE, "bitnet", "int8 activations",
    "activations have the fixed step 5 / 127: tokens are coarser than they need be, and what is beyond 5 is cut off",
    "1bit-MONSTER/1bit-MONSTER/issues/672",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name not in self.int8:
            return super().product(x, w, name)
        scale = F32(127 / 5)
        return self.matmul(np.clip(np.rint(x * scale), -127, 127), w, name) / scale


@fault(
    "V60", "ternary", SUBTLE, "bitnet", "int8 activations",
    "the step is the largest number over 127 + 1: the largest positive numbers of a token are always cut off (in the report a weight's)",
    "mlc-ai/mlc-llm/pull/1321",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name not in self.int8:
            return super().product(x, w, name)
        scale = F32(128) / np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-5))
        return self.matmul(np.clip(np.rint(x * scale), -128, 127), w, name) / scale


