"""Sixty more faults that act always (O01..O60), by a ninth author, each ported from a public report on an inference engine, kernel, loader or
library. No older set ports one of these reports. 24 are alike in all layers that have the operation, 20 are local, 16 are subtle. Sizes of
tiles, blocks, buffers and ranks are scaled down to the models; brackets say where a case differs from its report.

FAULTS: id -> record as in public_faults_h.py. `kind` is the part of the engine, `family` the sort of mistake.
"""

import math
from types import SimpleNamespace

import numpy as np
from engine import F32, Engine, Num

FAULTS = {}
GH = "https://github.com/"
SUBTLE, ALIKE, LOCAL = "subtle", "alike", "local"


def fault(id, kind, reach, model, family, cause, source, tokens=40, chunk=None, prefix=0, threads=1):
    def add(cls):
        FAULTS[id] = SimpleNamespace(id=id, kind=kind, model=model, family=family, cause=cause, source=GH + source, engine=cls)
        vars(FAULTS[id]).update(reach=reach, tokens=tokens, chunk=chunk, prefix=prefix, threads=threads)
        return cls

    return add


# --- what several faults need ---------------------------------------------------------------------------------------------------------------


def block_bytes(data, shape, size):  # [rows, blocks of a row, size], a copy
    return np.array(data).view(np.uint8).reshape(shape[0], -1, size)


def halves(b):  # [..., 2] bytes -> [..., 1]
    return np.ascontiguousarray(b).view(np.float16).astype(F32)


def bfloat16(x):  # to the nearest
    u = np.ascontiguousarray(x, F32).view(np.uint32)
    return (u + np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1)) & np.uint32(0xFFFF0000)).view(F32)


def with_methods(num, **methods):  # the same numerics, but for some methods
    num = num or Num()
    other = object.__new__(type("Other", (type(num),), methods))
    vars(other).update(vars(num))
    return other


def hadamard(size):
    h = np.ones((1, 1), F32)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return (h / F32(math.sqrt(size))).astype(F32)


def row_scale(x):  # of int8, for each last axis
    return np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-9)) / F32(127)


def after(flat, row, count):  # the numbers in memory behind each row: [rows, count], zero behind the last
    padded = np.concatenate([flat.reshape(-1), np.zeros(count, F32)])
    return np.stack([padded[i : i + count] for i in range(row, flat.size + 1, row)])


class Blocks(Engine):
    """Unpacks the blocks of one type itself: `kind`, the block's `size` in bytes, and `unpack`."""

    kind, size = "", 0

    def dequantize(self, data, kind, shape, name):
        if kind != self.kind:
            return super().dequantize(data, kind, shape, name)
        return self.unpack(data, shape, name)

    def unpack(self, data, shape, name):
        return self.standard(block_bytes(data, shape, self.size), shape, name)

    def standard(self, blocks, shape, name):
        return super().dequantize(blocks.reshape(shape[0], -1), self.kind, shape, name)


# --- alike in all layers: RoPE --------------------------------------------------------------------------------------------------------------


@fault(
    "O01", "rope", ALIKE, "stablelm", "config",
    "the class for RoPE knows no partial factor: the whole head of 16 numbers is turned, with frequencies spread over 16, and not the first 8",
    "AI-Hypercomputer/maxtext/pull/4615",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_width = c.head_dim
        return c


@fault(
    "O02", "rope", ALIKE, "qwen3moe", "positions",
    "the buffer of positions is overwritten on the device when experts are offloaded: all positions are 0, and RoPE turns nothing",
    "ggml-org/llama.cpp/pull/24855",
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.zeros_like(pos), n, which)


@fault(
    "O03", "rope", ALIKE, "qwen2", "positions",
    "queries are turned after the cache has advanced its offset in place, and the keys before: queries are as many positions too far as the "
    "call has tokens",
    "ml-explore/mlx-lm/pull/1396",
    chunk=8,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.asarray(pos) + self.count if which == "q" else pos, n, which)


# --- alike in all layers: norms -------------------------------------------------------------------------------------------------------------


@fault(
    "O04", "norm", ALIKE, "qwen3", "formula",
    "the norm of queries and keys takes its mean over all heads of a token together, and not over each head",
    "vllm-project/vllm/pull/16311",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        if not name.endswith(("attn_q_norm", "attn_k_norm")):
            return super().rms_norm(x, w, eps, name)
        whole = x.reshape(len(x), -1)
        return self.num.gain(x * self.num.rsqrt(self.num.mean(whole * whole) + F32(eps))[:, None], w)


@fault(
    "O05", "norm", ALIKE, "llama", "kernel",
    "the sum of squares is reduced within 32 lanes, and the device has waves of 64: the upper 32 of each 64 channels do not count",
    "Luce-Org/lucebox/pull/500",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        lower = np.arange(x.shape[-1]) % 64 < 32
        return self.num.gain(x * self.num.rsqrt(self.num.mean(np.where(lower, x * x, F32(0))) + F32(eps)), w)


@fault(
    "O06", "norm", ALIKE, "llama_mha", "formula",
    "the block has one norm, which is used in front of attention and again in front of the feed-forward part: the weights of the second are "
    "unused",
    "allenai/OLMo/issues/222",
)  # fmt: skip
class _(Engine):
    def norm(self, x, name, n):
        return super().norm(x, name.replace("ffn_norm", "attn_norm"), n)


@fault(
    "O07", "residual", ALIKE, "llama_theta", "formula",
    "the norm in front of attention is assigned to the stream: attention's output is added to the normalised stream, and the stream itself is "
    "lost",
    "allenai/OLMo/pull/680",
)  # fmt: skip
class _(Engine):
    def norm(self, x, name, n):
        y = super().norm(x, name, n)
        if name.endswith("attn_norm"):
            self.normalised = y
        return y

    def residual(self, h, y, n, which):
        return super().residual(self.normalised if which == "attn" else h, y, n, which)


# --- alike in all layers: attention ---------------------------------------------------------------------------------------------------------


@fault(
    "O08", "attention", ALIKE, "starcoder2", "mask",
    "infinite scores are set to 0 against an overflow, and the mask has been added by then: later tokens are seen, with a score of 0",
    "huggingface/transformers/issues/35151",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        return super().softmax(np.where(np.isinf(s), F32(0), s), n)


@fault(
    "O09", "attention", ALIKE, "llama_mqa", "kernel",
    "in the online softmax the old maximum is the register of the new one, so that sums are never rescaled: what was added before the maximum "
    "rose keeps its too large weight",
    "paiml/aprender/issues/2753",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        e = self.num.exp(s - np.maximum.accumulate(s, axis=-1))
        return e / self.num.total(e)


@fault(
    "O10", "attention", ALIKE, "gemma2", "kernel",
    "on the path for prompts the cap of scores is skipped whenever scores are in float32, which is the rule",
    "kekzl/imp/pull/688",
)  # fmt: skip
class _(Engine):
    def cap(self, s, n):
        return s if self.count > 1 else super().cap(s, n)


@fault(
    "O11", "cache", ALIKE, "llama_q8", "formula",
    "values are stored turned by a Hadamard matrix, and attention's output is not turned back",
    "ggml-org/llama.cpp/pull/25391",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(q, k, v, qpos, kpos, n) @ hadamard(self.c.head_dim)


# --- alike in all layers: weights and matrices ----------------------------------------------------------------------------------------------


@fault(
    "O12", "weights", ALIKE, "llama_bf16", "loader",
    "the loader transposes a matrix if its shape is not the one wanted: square matrices, here those of queries and of attention's output, are "
    "never transposed",
    "vllm-project/vllm/pull/44113",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for name, w in list(self.w.items()):
            if name.startswith("blk.") and w.ndim == 2 and len(w) == w.shape[1]:
                self.w[name] = np.ascontiguousarray(w.T)


@fault(
    "O13", "weights", ALIKE, "phi3", "parallel",
    "the joint matrix of queries, keys and values is cut into one piece of rows for each of two ranks, and not its three parts each: rank 0 "
    "takes rows of queries for keys and values, and rank 1 rows of keys and values for queries",
    "vllm-project/vllm/issues/42803",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            names = [f"blk.{n}.attn_{x}.weight" for x in "qkv"]
            rows = [len(self.w[name]) // 2 for name in names]  # of a rank
            pieces = np.split(np.concatenate([self.w[name] for name in names]), 2)
            for name, parts in zip(names, zip(*(np.split(piece, np.cumsum(rows)[:2]) for piece in pieces))):
                self.w[name] = np.concatenate(parts)


@fault(
    "O14", "weights", ALIKE, "llama_g3", "layout",
    "the converter takes the columns of attention's output matrix by (member of the group, head of keys), where they lie by (head of keys, "
    "member of the group)",
    "nntile/nntile/pull/347",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        c = self.c
        order = np.arange(c.heads).reshape(c.heads // c.kv_heads, c.kv_heads).T.reshape(-1)
        for n in range(c.n_layers):
            w = self.w[f"blk.{n}.attn_output.weight"]
            self.w[f"blk.{n}.attn_output.weight"] = w.reshape(len(w), c.heads, -1)[:, order].reshape(w.shape)


@fault(
    "O15", "experts", ALIKE, "mixtral", "parallel",
    "the experts' gate and up matrices are joined and then cut in the middle for two devices, which each take their half for gate and up: the "
    "first uses the second half of gate as up, and the other the first half of up as gate",
    "AI-Hypercomputer/maxtext/pull/4925",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            gate, up = (f"blk.{n}.ffn_{name}_exps.weight" for name in ("gate", "up"))
            (a, b), (c, d) = (np.split(self.w[name], 2, axis=1) for name in (gate, up))
            self.w[gate], self.w[up] = np.concatenate([a, c], axis=1), np.concatenate([b, d], axis=1)


@fault(
    "O16", "weights", ALIKE, "llama_q4", "layout",
    "4-bit codes are packed in the order of columns, and unpacked in AWQ's interleaved order (0, 2, 4, 6, 1, 3, 5, 7): within each eight "
    "outputs they belong to others, and the scales do not",
    "amd/Quark/pull/30",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q4_0", 18

    def unpack(self, data, shape, name):
        b = block_bytes(data, shape, self.size)
        rows = np.arange(len(b)).reshape(-1, 8)
        codes = b[..., 2:].copy()
        b[rows[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1), :, 2:] = codes
        return self.standard(b, shape, name)


@fault(
    "O17", "weights", ALIKE, "llama_q5k", "layout",
    "the fifth bit of number i is read from byte i / 8, bit i % 8, where it lies in byte i % 32, bit i / 32",
    "paiml/aprender/pull/3113",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q5_K", 176

    def unpack(self, data, shape, name):
        b = block_bytes(data, shape, self.size)
        bits = np.unpackbits(b[..., 16:48], axis=-1, bitorder="little").reshape(*b.shape[:2], 8, 32)
        b[..., 16:48] = np.packbits(bits.swapaxes(2, 3).reshape(*b.shape[:2], 256), axis=-1, bitorder="little")
        return self.standard(b, shape, name)


@fault(
    "O18", "weights", ALIKE, "llama_q51", "layout",
    "the low and the high four bits of a byte are taken for neighbours, where they are 16 apart, and fifth bits go to numbers in that wrong "
    "order [the report does not say which wrong order]",
    "paiml/aprender/pull/1621",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q5_1", 24

    def unpack(self, data, shape, name):
        b = block_bytes(data, shape, self.size)
        codes = np.stack([b[..., 8:] & 15, b[..., 8:] >> 4], axis=-1).reshape(*b.shape[:2], 32)
        codes = codes | np.unpackbits(b[..., 4:8], axis=-1, bitorder="little") << 4
        return codes.astype(F32) * halves(b[..., :2]) + halves(b[..., 2:4])


@fault(
    "O19", "matrices", ALIKE, "llama_q41", "kernel",
    "for a single token the block of a tile is computed as tile * (16 / 32) [32 / 64 and more], and the bracket is 0 in integers: all tiles "
    "of a row use the scale and the minimum of its first block",
    "intel/torch-xpu-ops/pull/5001",
    tokens=32,
    chunk=1,
)  # fmt: skip
class _(Blocks):
    kind, size = "Q4_1", 20

    def unpack(self, data, shape, name):
        b = block_bytes(data, shape, self.size)
        self.first = {**getattr(self, "first", {}), name: b[:, :1, :4].repeat(b.shape[1], axis=1)}
        right = self.standard(b, shape, name)
        b[..., :4] = self.first[name]
        self.first[name] = self.standard(b, shape, name).reshape(shape)
        return right

    def product(self, x, w, name):
        return super().product(x, self.first.get(name, w) if len(x) == 1 else w, name)


@fault(
    "O20", "matrices", ALIKE, "llama_theta", "kernel",
    "for a single token every 32nd lane stores two outputs, where waves have 32 lanes and not 64: of each four outputs the last two are never "
    "written (zeros here)",
    "vllm-project/vllm/pull/40827",
    tokens=32,
    chunk=1,
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        return np.where(np.arange(len(w)) % 4 < 2, y, F32(0)) if len(x) == 1 else y


@fault(
    "O21", "experts", ALIKE, "qwen2moe_s", "formula",
    "the shared expert is divided by the factor of routed experts, 2.5, against a later multiplication that this path does not have",
    "sgl-project/sglang/pull/28237",
)  # fmt: skip
class _(Engine):
    def shared_gate(self, y, x, n):
        return super().shared_gate(y, x, n) * F32(0.4)


@fault(
    "O22", "experts", ALIKE, "qwen3moe", "dtype",
    "the router's scores are in bfloat16, and the kernel reads them as float32: a score is made of two neighbours, at twice the distance from "
    "the start, and the second half of tokens reads behind the buffer (zeros here)",
    "flashinfer-ai/flashinfer/pull/2889",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        short = (bfloat16(logits).view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(-1)
        return super().router(np.concatenate([short, np.zeros_like(short)]).view(F32).reshape(logits.shape))


@fault(
    "O23", "matrices", ALIKE, "llama_wide", "kernel",
    "the kernel multiplies tiles of 32 inputs, and where their number is no multiple of 32 the last tile goes on with what lies behind the "
    "row in memory: the next row [stale memory of any kind in the report]",
    "ggml-org/llama.cpp/pull/27450",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y, tail = super().product(x, w, name), -x.shape[-1] % 32
        return y + after(x, x.shape[-1], tail) @ after(w, w.shape[-1], tail).T if tail else y


@fault(
    "O24", "matrices", ALIKE, "llama_wide", "kernel",
    "the kernel that sums a token's int8 inputs lets lanes without an input be overwritten by -1, and adds all 16 lanes up: sums are wrong "
    "where the inputs are no multiple of 16, and with them the share of the weights' zero point",
    "alibaba/MNN/pull/4869",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y, rest = super().product(x, w, name), x.shape[-1] % 16
        if not name.startswith("blk.") or not rest:
            return y
        scale = row_scale(x)
        codes, lane = np.rint(x / scale), np.arange(x.shape[-1]) % 16
        wrong = F32(-(16 - rest)) - np.where(lane >= rest, codes, F32(0)).sum(axis=-1, keepdims=True, dtype=F32)
        return y + scale * wrong * (w.max(axis=1) + w.min(axis=1)) / F32(2)


# --- local: positions, tokens, masks --------------------------------------------------------------------------------------------------------


@fault(
    "O25", "rope", LOCAL, "llama_lin", "positions",
    "rows that are added to the table of sines and cosines, from position 32 on, are computed by the plain class: positions are not divided "
    "by the factor",
    "sgl-project/sglang/pull/35171",
    tokens=48,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        pos = np.asarray(pos)
        return super().rope(x, np.where(pos >= 32, pos * self.c.rope_scale, pos), n, which)


@fault(
    "O26", "rope", LOCAL, "granite", "positions",
    "after the first call the offset grows by the prompt's size again: later tokens are turned as if they stood a prompt's length further on",
    "skyzh/tiny-llm/pull/46",
    prefix=16,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.asarray(pos) + (self.prefix if self.call == "prompt" else 0), n, which)


@fault(
    "O27", "embedding", LOCAL, "gpt2", "positions",
    "learned positions begin at 0 in each call, whatever the cache holds",
    "ml-explore/mlx-lm/pull/93",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def learned(self, pos):
        return pos - self.start


@fault(
    "O28", "embedding", LOCAL, "llama_wide", "parallel",
    "each of 12 ranks holds 131 / 12 = 10 rows of the table of embeddings, rounded down: the tokens from 120 on are on none, and their rows "
    "are zeros",
    "huggingface/text-generation-inference/pull/1463",
    tokens=48,
)  # fmt: skip
class _(Engine):
    def rows(self, tokens):
        return np.where((tokens < self.c.vocab // 12 * 12)[:, None], super().rows(tokens), F32(0))


@fault(
    "O29", "attention", LOCAL, "gemma3", "mask",
    "the window is read from the group of the cache, which global layers share with local ones: global layers see the window alone",
    "vllm-project/vllm/pull/51756",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return super().visible(qpos, kpos, n) & (qpos[:, None] - kpos[None, :] < self.c.window)


@fault(
    "O30", "experts", LOCAL, "mixtral", "positions",
    "the sum over experts keeps the weights of 32 tokens: each token from the 32nd on takes the weights of the token that stands 32 places "
    "before it",
    "tenstorrent/tt-metal/issues/55995",
    tokens=56,
)  # fmt: skip
class _(Engine):
    def combine(self, y, weights):
        return super().combine(y, weights[np.arange(len(weights)) % 32])


@fault(
    "O31", "attention", LOCAL, "llama_tied", "mask",
    "the kernel applies the mask to the first 20 [512] keys alone: later keys are seen by all queries",
    "vllm-project/vllm-ascend/issues/15503",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return super().visible(qpos, kpos, n) | (kpos >= 20)


@fault(
    "O32", "attention", LOCAL, "olmo2", "mask",
    "the causal mask counts queries from the start of the call, and not behind the keys of earlier calls: the first query of a call sees the "
    "first key alone",
    "tile-ai/tilelang/pull/864",
    prefix=20,
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return super().visible(qpos - self.start, kpos, n)


@fault(
    "O33", "cache", LOCAL, "qwen2_w", "cache",
    "the function that stores a new token does not advance the place to write: all tokens behind the prompt are written to the same place, "
    "and the places behind it stay zero and are read",
    "ekryski/mlx-swift-lm/pull/90",
    tokens=32,
    chunk=1,
    prefix=16,
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        super().cache_put(n, k, v, pos)
        if self.call == "prompt":
            keys, values, at = (x.copy() for x in self.keys[n])
            for x, new in ((keys, k), (values, v)):
                x[self.prefix], x[self.prefix + 1 :] = new[0], 0
            self.keys[n] = keys, values, at


@fault(
    "O34", "cache", LOCAL, "llama_h8", "cache",
    "the scales of the int8 cache are filled with 1 after the first call has stored its own: keys and values of that call are read as their "
    "codes",
    "vllm-project/vllm/pull/51091",
    prefix=12,
)  # fmt: skip
class _(Engine):
    def cache_get(self, n):
        k, v, pos = super().cache_get(n)
        if self.call != "prompt":
            return k, v, pos
        first = (pos < self.prefix)[:, None, None]
        return tuple(np.where(first, np.rint(x / row_scale(x)), x) for x in (k, v)) + (pos,)


@fault(
    "O35", "cache", LOCAL, "mistral", "cache",
    "the cache of a window rolls one token too early, when its last place is filled and not when it overflows: from position 23 to 45 the "
    "oldest token of the window is missing, and there is an empty place in its stead",
    "huggingface/transformers/issues/37574",
    tokens=56,
    chunk=1,
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        heads, w = self.kv_head(n), self.c.window
        late = (qpos >= w - 1) & (qpos <= 2 * w - 3)
        seen = self.visible(qpos, kpos, n) & ~(late[:, None] & (qpos[:, None] - kpos[None, :] == w - 1))
        k, v = (np.concatenate([x, np.zeros_like(x[:1])]) for x in (k, v))
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))
        return self.num.attend(self, q, k, v, np.concatenate([seen, late[:, None]], axis=1), n).swapaxes(0, 1)


# --- local: matrices, blocks, experts -------------------------------------------------------------------------------------------------------


@fault(
    "O36", "matrices", LOCAL, "llama_q50", "kernel",
    "the buffer with the sums of int8 inputs is sized by the inputs, and read by the token: beyond half as many tokens as there are inputs, "
    "the product lacks the correction for the inputs' zero point",
    "pytorch/executorch/issues/21423",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y, rest = super().product(x, w, name), slice(x.shape[-1] // 2, None)
        if not name.startswith("blk.") or len(x) <= x.shape[-1] // 2:
            return y
        low, high = (np.sign(s) * np.maximum((s * x[rest]).max(axis=-1, keepdims=True), 0) for s in (F32(-1), F32(1)))
        scale = np.maximum(high - low, F32(1e-9)) / F32(255)
        y[rest] += scale * (F32(-128) - np.rint(low / scale)) * w.sum(axis=1, dtype=F32)
        return y


@fault(
    "O37", "experts", LOCAL, "mixtral", "kernel",
    "the grouped kernel stores whole tiles of 64 outputs, and where the outputs are no multiple of 64 the surplus, made of the next expert's "
    "weights, lands in the first outputs of the next row",
    "huggingface/kernels-community/issues/1153",
)  # fmt: skip
class _(Engine):
    def experts(self, x, n):
        self.surplus = {}  # by matrix: what the last row of the experts so far has left over
        return super().experts(x, n)

    def product(self, x, w, name):
        y, count = super().product(x, w, name), -len(w) % 64
        if not name.endswith("_exps.weight") or not count:
            return y
        whole = self.w[name]
        e = next(i for i, one in enumerate(whole) if np.shares_memory(one, w))
        over = self.num.mm(x, whole[e + 1, :count] if e + 1 < len(whole) else np.zeros((count, w.shape[1]), F32))
        y[1:, :count] = over[:-1]
        y[0, :count] = self.surplus.get(name, y[0, :count])
        self.surplus[name] = over[-1]
        return y


@fault(
    "O38", "matrices", LOCAL, "llama_mxfp4", "kernel",
    "the kernel takes three [two] blocks of a row at a time, and there is no loop for the rest: the fourth and last block of down's rows is "
    "left out",
    "ggml-org/llama.cpp/issues/29131",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        whole = np.arange(x.shape[-1]) < x.shape[-1] // 96 * 96
        return super().product(np.where(whole, x, F32(0)) if name.endswith("ffn_down.weight") else x, w, name)


@fault(
    "O39", "weights", LOCAL, "llama_q4", "layout",
    "where a row is no multiple of 128 [256] numbers, its last codes are packed as if it were, and the scales that follow the codes overwrite "
    "those of four numbers: 32 to 35 in rows of 64",
    "ggml-org/llama.cpp/pull/20527",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q4_0", 18

    def unpack(self, data, shape, name):
        b = block_bytes(data, shape, self.size)
        if shape[-1] == 64:
            b[:, 1, 2:6] = b[:, 1, 2:6] & 0xF0 | b[:, :2, :2].reshape(-1, 4) & 0x0F
        return self.standard(b, shape, name)


@fault(
    "O40", "matrices", LOCAL, "llama_iq4nl", "kernel",
    "codes are made unsigned by adding 128, and where a row has fewer than four blocks, the code that takes it off again reads the int16 sum "
    "of inputs as bfloat16, which is nearly 0: all matrices but down have 128 times the scale too much in each weight",
    "ikawrakow/ik_llama.cpp/pull/2233",
)  # fmt: skip
class _(Blocks):
    kind, size = "IQ4_NL", 18

    def unpack(self, data, shape, name):
        b = block_bytes(data, shape, self.size)
        right = self.standard(b, shape, name).reshape(*b.shape[:2], 32)
        return right if b.shape[1] % 4 == 0 else right + F32(128) * halves(b[..., :2])


@fault(
    "O41", "weights", LOCAL, "llama", "kernel",
    "down has 96 inputs, and groups of 64 numbers have a scale: the product of a row takes one group, with the scale of the group in which "
    "the row begins, and leaves out the last 32 inputs",
    "karpathy/llama2.c/pull/532",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            w = self.w[f"blk.{n}.ffn_down.weight"]
            scale = np.abs(w.reshape(-1, 64)).max(axis=1)
            group = np.arange(w.size).reshape(w.shape) // 64
            used = np.arange(w.shape[1]) < w.shape[1] // 64 * 64
            self.w[f"blk.{n}.ffn_down.weight"] = np.where(used, w * scale[group[:, :1]] / scale[group], F32(0)).astype(F32)


@fault(
    "O42", "matrices", LOCAL, "llama_iq4xs", "dtype",
    "the norms' outputs are cast to int8 with a fixed scale and without saturation: those above 2.5 [the scale's limit] wrap around and "
    "become negative [the rounding is left out]",
    "ROCm/aiter/pull/4637",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight", "ffn_up.weight")):
            x = np.where(x > F32(2.5), x - F32(2.5 * 256 / 127), np.where(x < F32(-2.5), x + F32(2.5 * 256 / 127), x)).astype(F32)
        return super().product(x, w, name)


@fault(
    "O43", "experts", LOCAL, "qwen3moe", "formula",
    "to keep each expert's best tokens, tokens are ranked by their scores before the softmax, with 0 for those that did not choose it: a "
    "chosen expert with a negative score is dropped, and the others' weights are made to add up to 1 again",
    "deepspeedai/DeepSpeed/pull/7986",
    tokens=64,
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        top, weights = super().router(logits)
        weights = np.where(np.take_along_axis(logits, top, axis=-1) < 0, F32(0), weights)
        return top, weights / np.maximum(self.num.total(weights), F32(1e-9))


@fault(
    "O44", "experts", LOCAL, "qwen3moe", "formula",
    "experts on the GPU, the first three of eight here, read the layer's own settings and multiply their results by the factor of 1.5, which "
    "the sum of all experts is multiplied by later on [1 of 1.5 is left out, since the model has none]",
    "kvcache-ai/sglang/pull/86",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        self.top, weights = super().router(logits)
        return self.top, weights

    def combine(self, y, weights):
        return super().combine(y, np.where(self.top < 3, weights * F32(1.5), weights))


# --- subtle: RoPE, norms, the head ----------------------------------------------------------------------------------------------------------


@fault(
    "O45", "rope", SUBTLE, "smollm3", "dtype",
    "the product of position and frequency is in bfloat16, and sine and cosine are taken of that",
    "Xilinx/mlir-air/pull/1610",
    tokens=60,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        angle = bfloat16(np.multiply.outer(np.asarray(pos, F32), bfloat16(self.frequencies(n).astype(F32))))
        sin, cos = self.num.sin_cos(angle.astype(np.float64)[:, None, :])
        return self.rotate(x, sin, cos)


@fault(
    "O46", "norm", SUBTLE, "qwen3_eps", "config",
    "the kernel is built without the model's epsilon and has 1e-5 in all norms, where the file says 0.02 [1e-6]",
    "paiml/aprender/pull/1606",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.eps = F32(1e-5)
        return c


@fault(
    "O47", "norm", SUBTLE, "llama_wide", "kernel",
    "the sum of squares goes over the tile's whole width, a multiple of 32, and the 8 channels of padding hold ones",
    "tenstorrent/tt-metal/issues/43350",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        padding = F32(-x.shape[-1] % 32 / x.shape[-1])
        return self.num.gain(x * self.num.rsqrt(self.num.mean(x * x) + padding + F32(eps)), w)


@fault(
    "O48", "norm", SUBTLE, "llama_eps", "formula",
    "the last norm is taken twice, and multiplied by its weights once",
    "ggml-org/llama.cpp/pull/1925",
)  # fmt: skip
class _(Engine):
    def norm(self, x, name, n):
        if name == "output_norm":
            x = self.rms_norm(x, np.ones_like(self.w[name + ".weight"]), self.c.eps, name)
        return super().norm(x, name, n)


@fault(
    "O49", "biases", SUBTLE, "phi2", "formula",
    "the bias of the last matrix is linked into the matrix's layer, which adds it, and the head adds it again",
    "huggingface/transformers/issues/2957",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        y = super().add_bias(y, name)
        return super().add_bias(y, name) if name == "output" else y


@fault(
    "O50", "norm", SUBTLE, "gemma2_eps", "formula",
    "epsilon is added to the root of the mean square, and not to the mean square",
    "EleutherAI/gpt-neox/pull/1342",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return self.num.gain(x / (np.sqrt(self.num.mean(x * x)) + F32(eps)), w)


# --- subtle: attention and cache ------------------------------------------------------------------------------------------------------------


@fault(
    "O51", "attention", SUBTLE, "starcoder2_w", "mask",
    "the window's mask allows a distance of the window's size: a query sees one token more than it should",
    "ml-explore/mlx-lm/pull/390",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos[None, :]
        return (d >= 0) & (d <= self.c.window)


@fault(
    "O52", "attention", SUBTLE, "minicpm", "dtype",
    "exponentials are powers of 2 of the input times log2(e), and both the product and the power are in bfloat16: they are off by up to 4 %",
    "tinygrad/tinygrad/pull/11778",
)  # fmt: skip
class _(Engine):
    def __init__(self, path, num=None, threads=1):
        super().__init__(path, with_methods(num, exp=self.exp), threads)

    @staticmethod
    def exp(num, x):
        return bfloat16(np.exp2(bfloat16(np.asarray(x, F32) * F32(1 / math.log(2)))))


@fault(
    "O53", "cache", SUBTLE, "qwen3", "dtype",
    "keys and values are scaled for each token and head to int8, and the cast cuts off what is behind the point, where it should round",
    "vllm-project/vllm/pull/45361",
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        super().cache_put(n, *(np.trunc(x / row_scale(x)) * row_scale(x) for x in (k, v)), pos)


# --- subtle: matrices and activations -------------------------------------------------------------------------------------------------------


@fault(
    "O54", "weights", SUBTLE, "llama_mqa", "loader",
    "the grid of scales, one for each 16 by 16 [128 by 128] weights, is transposed in place for one kernel and read by another as it was: in "
    "square matrices a square of weights has the scale of its mirror image",
    "vllm-project/vllm/pull/44630",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for name, w in list(self.w.items()):
            if name.startswith("blk.") and w.ndim == 2 and len(w) == w.shape[1]:
                squares = w.reshape(len(w) // 16, 16, -1, 16)
                scale = np.abs(squares).max(axis=(1, 3), keepdims=True)
                self.w[name] = (squares * (scale.swapaxes(0, 2) / scale)).reshape(w.shape)


@fault(
    "O55", "matrices", SUBTLE, "llama_q8", "kernel",
    "the instruction that multiplies unsigned int8 inputs with int8 weights adds pairs of products in 16 bits and saturates at 32767",
    "pytorch/pytorch/issues/44939",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if not name.startswith("blk."):
            return y
        sx, sw = row_scale(x), row_scale(w)
        a, b = np.clip(np.rint(x / sx) + 128, 0, 255), np.rint(w / sw)
        pairs = a[:, None, ::2] * b[None, :, ::2] + a[:, None, 1::2] * b[None, :, 1::2]
        return y + (np.clip(pairs, -32768, 32767) - pairs).sum(axis=-1, dtype=F32) * sx * sw.T


@fault(
    "O56", "matrices", SUBTLE, "llama_q6k", "formula",
    "a block of 32 inputs is scaled by the power of 2 in its largest number, and FP8 ends at 1.75 times a power of 2: what lies above is cut "
    "down to that [the rounding is left out]",
    "microsoft/microxcaling/issues/4",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name.startswith("blk."):
            blocks = x.reshape(-1, 32)
            power = np.exp2(np.floor(np.log2(np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), F32(1e-30)))))
            x = np.clip(blocks, F32(-1.75) * power, F32(1.75) * power).astype(F32).reshape(x.shape)
        return super().product(x, w, name)


@fault(
    "O57", "ternary", SUBTLE, "bitnet", "formula",
    "inputs of matrices are scaled to int8 by the largest number of the whole call, and not by each token's own",
    "pytorch/executorch/issues/22431",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name not in self.int8:
            return super().product(x, w, name)
        scale = F32(127) / np.maximum(np.abs(x).max(), F32(1e-5))
        return self.matmul(np.rint(x * scale), w, name) / scale


@fault(
    "O58", "ffn", SUBTLE, "qwen2", "config",
    "the gate's activation is fixed in the code as GELU, and the file's SiLU is ignored [the tanh form of GELU here]",
    "huggingface/candle/pull/3991",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        return self.num.gelu(gate) * up


@fault(
    "O59", "ffn", SUBTLE, "llama_iq3s", "kernel",
    "SiLU's sigmoid is computed of an input that is held above -1.5 [-18], and multiplied by the input that is not: SiLU falls on where it "
    "should go to 0",
    "sonos/tract/pull/2506",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        return gate * self.num.sigmoid(np.maximum(gate, F32(-1.5))) * up


@fault(
    "O60", "ffn", SUBTLE, "olmo2", "kernel",
    "the sigmoid is 0.5 + 0.5 x / (1 + |x|), which rises too steeply at first and reaches 1 too slowly",
    "tphakala/simd/pull/39",
)  # fmt: skip
class _(Engine):
    def __init__(self, path, num=None, threads=1):
        super().__init__(path, with_methods(num, sigmoid=self.sigmoid), threads)

    @staticmethod
    def sigmoid(num, x):
        return F32(0.5) + F32(0.5) * x / (F32(1) + np.abs(x))
