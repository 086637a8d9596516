"""Sixty more faults that act always (B01..B60), by an eighth author, each ported from a public report on an inference engine, kernel, loader or
converter. No older set ports one of these reports. 23 are alike in all layers that have the operation, 20 are local, 17 are subtle. Sizes of
tiles, blocks, buffers and ranks are scaled down to the models; brackets say where a case differs from its report.

FAULTS: id -> record as in public_faults_g.py. `kind` is the part of the engine, `family` the sort of mistake.
"""

import math
import zlib
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


# --- what several faults need -----------------------------------------------------------------------------------------------------------


def block_bytes(data, size):  # [blocks, size], a copy
    return np.array(data).view(np.uint8).reshape(-1, size)


def halves(b):  # [blocks, 2] bytes -> [blocks, 1]
    return np.ascontiguousarray(b).view(np.float16).astype(F32)


def seeded(*words):  # numbers that look random, and are the same in every run
    return np.random.default_rng(zlib.crc32(" ".join(map(str, words)).encode()))


def bfloat16(x):  # to the nearest
    u = np.ascontiguousarray(x, F32).view(np.uint32)
    return (u + np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1)) & np.uint32(0xFFFF0000)).view(F32)


def with_methods(num, **methods):  # the same numerics, but for some methods
    num = num or Num()
    other = object.__new__(type("Other", (type(num),), methods))
    vars(other).update(vars(num))
    return other


def heads_first(engine, q, k, v, n):
    heads = engine.kv_head(n)
    return tuple(x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))


def scaled_scores(engine, q, k, n):  # [H, T, K], [H, S, K] -> [H, T, S], not masked
    return engine.cap(engine.scale_scores(engine.num.qk(q, k), n), n)


class Remembers(Engine):
    """Keeps the experts that the router has chosen, for the sum of their results."""

    def router(self, logits):
        self.top, weights = super().router(logits)
        return self.top, weights


# --- alike in all layers: RoPE ----------------------------------------------------------------------------------------------------------


@fault(
    "B01", "rope", ALIKE, "qwen2", "config",
    "a model without a scaling of RoPE falls through to a factor of 2: all positions are doubled",
    "lablup/mlxcel/issues/1324",
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, 2 * np.asarray(pos), n, which)


@fault(
    "B02", "rope", ALIKE, "qwen3", "config",
    "RoPE is set up for the width over the number of heads, 16, and heads have 32 numbers: frequencies fall twice as fast, and the second half "
    "of a head is not turned",
    "huggingface/transformers/pull/32495",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_width = c.width // c.heads
        return c


@fault(
    "B03", "rope", ALIKE, "llama_lin", "config",
    "the factor of RoPE's scaling is not passed to the model and stays at its default of 8, where the file has 4",
    "swiss-ai/Megatron-LM/pull/80",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_scale = 8.0
        return c


@fault(
    "B04", "rope", ALIKE, "llama", "layout",
    "the tensor of factors that should divide RoPE's frequencies is bound as the table of frequencies: a position is multiplied by the factors "
    "alone",
    "mudler/vllm.cpp/issues/3086",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        return np.asarray(self.rope_factors(), np.float64)


@fault(
    "B05", "rope", ALIKE, "qwen3_yarn", "formula",
    "YaRN is done by dividing positions, and by stopping at the last trained one: all pairs are slowed by the factor, and not the slow ones alone",
    "rasbt/LLMs-from-scratch/pull/940",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        c = self.c
        return float(c.rope_base) ** (-np.arange(c.rope_width // 2) * 2.0 / c.rope_width)

    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.minimum(np.asarray(pos) / self.c.rope_scale, self.c.rope_original - 1), n, which)


# --- alike in all layers: norms ---------------------------------------------------------------------------------------------------------


@fault(
    "B06", "norm", ALIKE, "olmo2", "formula",
    "the weights of the norms of queries and keys are loaded, and nothing multiplies by them",
    "lucidrains/x-transformers/issues/352",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return super().rms_norm(x, np.ones_like(w) if name.endswith(("attn_q_norm", "attn_k_norm")) else w, eps, name)


@fault(
    "B07", "norm", ALIKE, "gptneox", "formula",
    "the graph has RMSNorm in place of LayerNorm: the mean is not subtracted, and no bias is added",
    "nntile/nntile/pull/374",
)  # fmt: skip
class _(Engine):
    def layer_norm(self, x, w, b):
        return self.rms_norm(x, w, self.c.eps, "")


# --- alike in all layers: attention and the stream --------------------------------------------------------------------------------------


@fault(
    "B08", "attention", ALIKE, "phi2", "formula",
    "scores are divided by the root of the number of heads, where it should be the root of a head's width",
    "tenstorrent/tt-metal/pull/56789",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return s * F32(self.c.heads**-0.5)


@fault(
    "B10", "residual", ALIKE, "bitnet", "formula",
    "what attention returns is assigned to the name of its input, and is then added to itself: the stream is lost",
    "kyegomez/BitNet/issues/32",
)  # fmt: skip
class _(Engine):
    def residual(self, h, y, n, which):
        return super().residual(y, y, n, which) if which == "attn" else super().residual(h, y, n, which)


@fault(
    "B21", "residual", ALIKE, "llama_g3", "parallel",
    "two devices each hold half of down's inputs, and each adds the stream before their results are summed: it counts twice",
    "deepspeedai/DeepSpeed/pull/2834",
)  # fmt: skip
class _(Engine):
    def residual(self, h, y, n, which):
        y = super().residual(h, y, n, which)
        return self.num.add(h, y) if which == "ffn" else y


@fault(
    "B22", "cache", ALIKE, "llama_h8", "layout",
    "the cache's values have a scale for each head of each token, which are written in squares of four by four with rows and columns exchanged, and "
    "read in order [blocks of 16 numbers of a head in the report]",
    "vllm-project/vllm/pull/50085",
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        scale = np.maximum(np.abs(v).max(axis=-1), F32(1e-9))  # [T, G], and there are four heads of values
        other, whole = scale.copy(), len(v) // 4 * 4
        other[:whole] = scale[:whole].reshape(-1, 4, 4).swapaxes(1, 2).reshape(whole, 4)
        super().cache_put(n, k, v * (other / scale)[..., None], pos)


# --- alike in all layers: matrices and biases -------------------------------------------------------------------------------------------


@fault(
    "B09", "ternary", ALIKE, "bitnet_mha", "kernel",
    "on processors without AVX2 the kernel for ternary matrices has an empty body: products are what the buffer held (zero here)",
    "microsoft/BitNet/issues/547",
)  # fmt: skip
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        return np.zeros_like(y) if name in self.int8 else y


@fault(
    "B11", "weights", ALIKE, "gpt2", "loader",
    "the converter cuts the third part out of the joint matrix for keys, as for values: keys have the rows and the bias of values",
    "huggingface/transformers/pull/40257",
)  # fmt: skip
class _(Engine):
    def split_qkv(self, w):
        q, _, v = super().split_qkv(w)
        return q, v.copy(), v


@fault(
    "B12", "weights", ALIKE, "gptneox", "layout",
    "the pointer to the rows of keys and values in the joint matrix advances by numbers, as many as there are rows, and not by rows: keys have the "
    "rows of queries from the second on, and values those from the third on",
    "1bit-MONSTER/1bit-MONSTER/pull/2479",
)  # fmt: skip
class _(Engine):
    def split_qkv(self, w):
        parts = super().split_qkv(w)
        if w.ndim == 1:
            return parts
        starts = np.cumsum([0] + [len(part) for part in parts])
        return [w.reshape(-1)[i : i + part.size].reshape(part.shape).copy() for i, part in zip(starts, parts)]


@fault(
    "B13", "matrices", ALIKE, "stablelm", "kernel",
    "the accumulator is cleared within the loop over inputs: a product is that of its last 16 inputs",
    "tile-ai/tilelang/issues/2627",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        last = np.arange(x.shape[-1]) >= x.shape[-1] - 16
        return super().product(np.where(last, x, F32(0)) if name.startswith("blk.") else x, w, name)


@fault(
    "B14", "matrices", ALIKE, "llama_mha", "parallel",
    "attention's output is a copy on each of two ranks, which hold half of the heads, and their results are not summed: the second half of the "
    "heads has no part in it",
    "FlashML-org/FreeToken/pull/429",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        first = np.arange(x.shape[-1]) < x.shape[-1] // 2
        return super().product(np.where(first, x, F32(0)) if "attn_output" in name else x, w, name)


@fault(
    "B15", "biases", ALIKE, "starcoder2", "formula",
    "a bias is added to the integers of a product before they are multiplied by the scales of inputs and weights: it comes out as nearly nothing "
    "[of experts in FP8 in the report]",
    "vllm-project/vllm/pull/31676",
)  # fmt: skip
class _(Engine):
    def linear(self, x, name, n=None):
        w, b = self.w[name + ".weight"], self.w.get(name + ".bias")
        y = self.product(x, w, name + ".weight")
        return y if b is None else y + b * (np.abs(x).max(axis=-1, keepdims=True) / F32(127)) * (np.abs(w).max(axis=-1) / F32(127))


# --- alike in all layers: quantised weights ---------------------------------------------------------------------------------------------


@fault(
    "B16", "weights", ALIKE, "llama_q6k", "kernel",
    "Q6_K: the scales of the groups are signed, and the kernel reads them as unsigned: those below zero become large [group scales of 16 bits in "
    "the report]",
    "vllm-project/vllm/pull/48926",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind != "Q6_K":
            return w
        scale = block_bytes(data, 210)[:, 192:208].view(np.int8).astype(F32).reshape(-1, 1)
        return w.reshape(-1, 16) * np.where(scale < 0, (scale + F32(256)) / np.minimum(scale, F32(-1)), F32(1))


@fault(
    "B17", "weights", ALIKE, "llama_mxfp4", "formula",
    "MXFP4: the byte of a block's scale is multiplied as a number, and it is an exponent [MXFP8 in the report]",
    "jundot/omlx/pull/2159",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind != "MXFP4":
            return w
        e = block_bytes(data, 17)[:, :1].astype(F32)
        return w.reshape(-1, 32) * (e * np.exp2(F32(127) - e))


@fault(
    "B18", "weights", ALIKE, "llama_q41", "formula",
    "Q4_1: 8 steps are subtracted from the offsets of gate and up, for codes that a former kernel had centred: all their weights are 8 steps too low",
    "mit-han-lab/llm-awq/pull/321",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind != "Q4_1" or not name.endswith(("ffn_gate.weight", "ffn_up.weight")):
            return w
        return w.reshape(-1, 32) - F32(8) * halves(block_bytes(data, 20)[:, :2])


@fault(
    "B23", "weights", ALIKE, "llama_q51", "loader",
    "Q5_1: codes without a sign are packed anew by a packer for signed ones, which cuts them off at half of their range: the upper 16 levels become "
    "one",
    "intel/auto-round/pull/2273",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind != "Q5_1":
            return w
        b = block_bytes(data, 24)
        d, m = halves(b[:, :2]), halves(b[:, 2:4])
        return np.minimum(w.reshape(-1, 32), m + F32(15) * d)


# --- alike in all layers: experts -------------------------------------------------------------------------------------------------------


@fault(
    "B19", "experts", ALIKE, "mixtral", "formula",
    "an expert's results are written over what the experts before it gave to the same tokens: of a token's two experts the one with the higher "
    "number counts",
    "AviSoori1x/makeMoE/issues/2",
)  # fmt: skip
class _(Remembers):
    def combine(self, y, weights):
        last = self.top == self.top.max(axis=1, keepdims=True)
        return super().combine(y, np.where(last, weights, F32(0)))


@fault(
    "B20", "experts", ALIKE, "qwen3moe", "layout",
    "an expert's weight is looked up by the expert's number, and not by its place among the chosen: it lies behind the row, and is another token's",
    "NVIDIA/Model-Optimizer/pull/1885",
)  # fmt: skip
class _(Remembers):
    def combine(self, y, weights):
        place = np.arange(len(weights))[:, None] * weights.shape[1] + self.top
        return super().combine(y, weights.reshape(-1)[np.minimum(place, weights.size - 1)])


# --- local: the ends of the model -------------------------------------------------------------------------------------------------------


@fault(
    "B33", "embedding", LOCAL, "phi3", "kernel",
    "the kernel that looks tokens up has one block of 48 threads [256], and no loop: the other channels of the embedding stay zero",
    "1bit-MONSTER/1bit-MONSTER/pull/1725",
)  # fmt: skip
class _(Engine):
    def rows(self, tokens):
        y = super().rows(tokens).copy()
        y[:, 48:] = 0
        return y


@fault(
    "B40", "embedding", LOCAL, "gemma", "config",
    "the embedding's scale is written into the code as the root of 3072, one model's width, and this model has another",
    "huggingface/optimum-nvidia/pull/85",
)  # fmt: skip
class _(Engine):
    def scale_embedding(self, h):
        return h * F32(math.sqrt(3072))


@fault(
    "B28", "head", LOCAL, "llama_theta", "formula",
    "logits of a head that is not tied to the embedding are divided by the root of the width, which is meant for tied heads [T5 in the report]",
    "ml-explore/mlx-examples/pull/591",
)  # fmt: skip
class _(Engine):
    def scale_logits(self, y):
        return super().scale_logits(y) * F32(self.c.width**-0.5)


@fault(
    "B32", "head", LOCAL, "stablelm", "parallel",
    "each of two ranks computes its part of the vocabulary with the loop for four: the second half of each part is never written (zero)",
    "hw-native-sys/pypto-lib/pull/437",
)  # fmt: skip
class _(Engine):
    def head(self, x):
        y = super().head(x)
        part = y.shape[1] // 2
        for i in (0, part):
            y[:, i + part // 2 : i + part] = 0
        return y


# --- local: some heads, channels, tokens, experts or layers -----------------------------------------------------------------------------


@fault(
    "B29", "rope", LOCAL, "llama", "kernel",
    "RoPE is launched on a flat grid, and a block stands for a head: the first head is turned, and the others of queries and keys stay zero",
    "paiml/aprender/pull/2079",
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        y = super().rope(x, pos, n, which)
        y[:, 1:] = 0
        return y


@fault(
    "B31", "attention", LOCAL, "llama_h8", "layout",
    "a head's number is divided by the number of key-value heads, and not by the size of a group: with 8 heads and 4 groups of 2, most heads read "
    "another group, and the last two groups are never read",
    "PSAL-POSTECH/ONNXim/pull/34",
)  # fmt: skip
class _(Engine):
    def kv_head(self, n):
        return np.arange(self.c.heads) // self.c.kv_heads


@fault(
    "B37", "attention", LOCAL, "llama_wide", "layout",
    "keys are split in two, and the logarithms of the sums are written with a stride of whole tiles of 16 tokens and read with that of the tokens: "
    "all heads but the first mix the two parts by other rows' sums",
    "Dao-AILab/flash-attention/pull/2388",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        q, k, v = heads_first(self, q, k, v, n)
        s = np.where(self.visible(qpos, kpos, n), scaled_scores(self, q, k, n), F32(-np.inf))
        heads, rows, half = *s.shape[:2], s.shape[2] // 2
        sums, parts = [], []
        for part in (slice(0, half), slice(half, None)):
            most = np.maximum(s[..., part].max(axis=-1, keepdims=True, initial=-np.inf), F32(-1e30))
            e = self.num.exp(s[..., part] - most)
            total = self.num.total(e)
            parts.append(self.num.pv(e / np.maximum(total, F32(1e-30)), v[:, part]))
            written = np.zeros((heads, -(-rows // 16) * 16), F32)
            with np.errstate(divide="ignore"):
                written[:, :rows] = (most + np.log(total))[..., 0]
            sums.append(written.reshape(-1)[: heads * rows].reshape(heads, rows, 1))
        weights = [self.num.exp(x - np.maximum(*sums)) for x in sums]
        return (sum(w * y for w, y in zip(weights, parts)) / sum(weights)).astype(F32).swapaxes(0, 1)


@fault(
    "B38", "matrices", LOCAL, "gemma", "kernel",
    "the request to clear the accumulator is ignored: each tile of 16 tokens of attention's output has the tile before added to it",
    "tile-ai/tilelang/issues/2617",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if "attn_output" in name:
            for i in range(16, len(y), 16):
                y[i : i + 16] += y[i - 16 : i][: len(y) - i]
        return y


@fault(
    "B24", "ffn", LOCAL, "llama_q4", "kernel",
    "64 threads [256] compute SiLU(gate) * up, each for one channel, where they should go on in a loop: channels from 64 on keep gate as it was",
    "1bit-MONSTER/1bit-MONSTER/issues/562",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        y = super().gated(gate, up, n)
        y[..., 64:] = gate[..., 64:]
        return y


@fault(
    "B43", "residual", LOCAL, "granite", "kernel",
    "the grid for adding the feed-forward part has as many tiles of 16 tokens as fit: the last 8 of 40 tokens keep the stream as it was before",
    "hw-native-sys/pypto-lib/pull/1014",
)  # fmt: skip
class _(Engine):
    def residual(self, h, y, n, which):
        y = super().residual(h, y, n, which)
        whole = len(y) // 16 * 16
        if which == "ffn":
            y[whole:] = h[whole:]
        return y


@fault(
    "B30", "experts", LOCAL, "qwen3moe", "kernel",
    "each of 6 threads [256] proposes one expert: experts 6 and 7 are never chosen, however large their logits",
    "kekzl/imp/pull/2056",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        p = self.num.softmax(logits)
        top = np.argsort(-logits[:, :6], axis=-1, kind="stable")[:, : self.c.experts_used]
        p = np.take_along_axis(p, top, axis=-1)
        return top, p / self.num.total(p) if self.c.normalized else p


@fault(
    "B36", "experts", LOCAL, "qwen2moe", "parallel",
    "ranks with two experts each look for the experts' numbers among all, and their lists count from 0: what experts 2 to 5 should do is left out",
    "vllm-project/vllm-gaudi/pull/1796",
)  # fmt: skip
class _(Remembers):
    def combine(self, y, weights):
        return super().combine(y, np.where(self.top < 2, weights, F32(0)))


@fault(
    "B35", "experts", LOCAL, "mixtral", "parallel",
    "two ranks quantise their tokens with a scale each, and the experts read one scale for all: the second half of the tokens comes in too large or "
    "too small by the quotient",
    "vllm-project/vllm/pull/54683",
)  # fmt: skip
class _(Engine):
    def experts(self, x, n):
        self.right, half = x, len(x) // 2
        x = x.copy()
        if half:
            x[half:] *= np.abs(x[:half]).max() / np.abs(x[half:]).max()
        return super().experts(x, n)

    def linear(self, x, name, n=None):
        return super().linear(self.right if name.endswith("gate_inp") else x, name, n)


@fault(
    "B39", "attention", LOCAL, "gemma3", "config",
    "layers are counted from 0 where the pattern counts from 1: the first and the seventh layer see everything, and the sixth has the window",
    "Lightning-AI/litgpt/pull/1972",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.local = [n for n in range(c.n_layers) if n % 6]
        return c


# --- local: the cache, chunks and prefixes ----------------------------------------------------------------------------------------------


@fault(
    "B25", "cache", LOCAL, "minicpm", "cache",
    "the table of a later chunk's blocks is cut to the length of the chunk from its beginning on: the chunk's keys and values are written over those "
    "of the first chunk, and its own blocks stay empty",
    "tenstorrent/tt-metal/pull/55630",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        later, rows = self.keys[n] is not None, len(k)
        super().cache_put(n, k, v, pos)
        if later:
            for x in self.keys[n][:2]:
                x[:rows], x[-rows:] = x[-rows:].copy(), 0


@fault(
    "B26", "attention", LOCAL, "gemma3", "mask",
    "the part of the mask that stands for the cache is filled with what hides a key: tokens of a later chunk see their chunk alone",
    "huggingface/candle/issues/3299",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return super().visible(qpos, kpos, n) & (kpos >= self.start)


@fault(
    "B27", "rope", LOCAL, "mistral", "positions",
    "the cache is written anew from the rows it keeps, and their number is taken for the next position: once the window has dropped rows, tokens "
    "are turned by positions that are too small [caches that drop other rows in the report]",
    "rajveer43/VeloxQuant-MLX/issues/389",
    tokens=56, chunk=8,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.asarray(pos) - max(self.start - self.c.window, 0), n, which)


@fault(
    "B34", "rope", LOCAL, "qwen3", "positions",
    "the keys and values of a stored prefix are put back, and the count of its tokens is not: the tokens behind it are turned by positions from 0 on",
    "vllm-project/vllm-metal/pull/144",
    prefix=16,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.asarray(pos) - (self.prefix if self.call == "prompt" else 0), n, which)


class Stale(Engine):
    """Feeds 8 tokens of another conversation behind the prefix, which should be taken back before the prompt comes."""

    late = 0

    def begin(self, call):
        super().begin(call)
        self.late = 0
        if call == "prompt" and self.prefix:
            self.feed(seeded("other conversation").integers(1, self.c.vocab, 8), self.prefix, None)
            self.out, self.late = {}, 8
            self.take_back()

    def take_back(self):
        pass


@fault(
    "B41", "cache", LOCAL, "gemma2", "cache",
    "a cache from the conversation before is cut to the common beginning by its step of growth, and not by its length, and so it is not cut: the "
    "other conversation's tokens stay, and new ones come behind them at later positions",
    "nicedreamzapp/claude-code-local/pull/47",
    prefix=16,
)  # fmt: skip
class _(Stale):
    def positions(self, start, count):
        return super().positions(start + self.late, count)


@fault(
    "B42", "cache", LOCAL, "qwen2_w", "cache",
    "tokens are taken back from the caches of layers without a window, and those with one cannot do it: they keep the eight tokens, and go on "
    "behind them",
    "ml-explore/mlx-lm/issues/1494",
    prefix=20,
)  # fmt: skip
class _(Stale):
    def take_back(self):
        for n, rows in self.keys.items():
            if n not in self.c.local:
                self.keys[n] = tuple(x[: self.prefix] for x in rows)

    def attention(self, x, n, pos):
        return super().attention(x, n, pos + self.late if n in self.c.local else pos)


# --- subtle: norms ----------------------------------------------------------------------------------------------------------------------


@fault(
    "B44", "norm", SUBTLE, "stablelm_eps", "config",
    "the epsilon of all LayerNorms is 1e-5, as the code has it, and the file's (0.02 here) is not read",
    "nomic-ai/gpt4all/pull/1946",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.eps = F32(1e-5)
        return c


@fault(
    "B45", "norm", SUBTLE, "stablelm_eps", "formula",
    "LayerNorm divides by the root of the variance plus epsilon, where epsilon belongs under the root",
    "tracel-ai/burn/issues/2185",
)  # fmt: skip
class _(Engine):
    def layer_norm(self, x, w, b):
        x = x - self.num.mean(x)
        y = self.num.gain(x / (np.sqrt(self.num.mean(x * x)) + self.c.eps), w)
        return y if b is None else y + b


@fault(
    "B55", "norm", SUBTLE, "mixtral_w", "kernel",
    "the loop for the rest of a row, behind vectors of 4, adds the numbers and not their squares: the last 2 of 70 channels",
    "ggml-org/llama.cpp/pull/28027",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        whole = x.shape[-1] // 4 * 4
        total = self.num.total(np.concatenate([x[..., :whole] ** 2, x[..., whole:]], axis=-1))
        return self.num.gain(x * self.num.rsqrt(total / F32(x.shape[-1]) + F32(eps)), w)


# --- subtle: RoPE -----------------------------------------------------------------------------------------------------------------------


@fault(
    "B48", "rope", SUBTLE, "qwen3_yarn", "config",
    "YaRN's borders are computed from the length after the extension (256), and should be from the length before it (64)",
    "NVIDIA-NeMo/Speech/issues/14686",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_original = c.context
        return c


@fault(
    "B52", "rope", SUBTLE, "qwen3_yarn", "formula",
    "YaRN's magnitude is computed as 1 + 0.07 ln(factor), from another model's copy of the formula, which has 0.1",
    "vllm-project/vllm/pull/56446",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_magnitude *= (1 + 0.07 * math.log(c.rope_scale)) / (1 + 0.1 * math.log(c.rope_scale))
        return c


@fault(
    "B56", "rope", SUBTLE, "smollm3", "formula",
    "RoPE's frequencies are cast to bfloat16 before they are multiplied by the positions, so that angles drift with the position",
    "sgl-project/sglang-jax/pull/1473",
    tokens=240,
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        return bfloat16(super().frequencies(n)).astype(np.float64)


@fault(
    "B59", "rope", SUBTLE, "phi3_long", "formula",
    "LongRoPE's angles are computed in half precision: at a position of 60 they are off by up to about a sixtieth",
    "openvinotoolkit/openvino/pull/29556",
    tokens=60,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        angle = np.multiply.outer(np.asarray(pos, np.float16), self.frequencies(n).astype(np.float16)).astype(np.float64)[:, None, :]
        sin, cos = self.num.sin_cos(angle)
        return self.rotate(x, sin * F32(self.c.rope_magnitude), cos * F32(self.c.rope_magnitude))


# --- subtle: attention ------------------------------------------------------------------------------------------------------------------


@fault(
    "B50", "attention", SUBTLE, "olmo2", "mask",
    "the mask adds a number that is not low enough (-6 here, -10000 in the report): later tokens keep a small weight",
    "huggingface/transformers/pull/17306",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        q, k, v = heads_first(self, q, k, v, n)
        s = scaled_scores(self, q, k, n) + np.where(self.visible(qpos, kpos, n), F32(0), F32(-6))
        return self.num.pv(self.softmax(s, n), v).swapaxes(0, 1)


@fault(
    "B60", "attention", SUBTLE, "llama_iq3s", "kernel",
    "exponentials are cast to FP8 in front of the product with values, where those below its least number become 0 (an eighth here, 2^-9 in the "
    "report), and the denominator still counts them",
    "ROCm/FlyDSL/pull/1020",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        e = self.num.exp(s - s.max(axis=-1, keepdims=True))
        return np.where(e < F32(0.125), F32(0), e) / self.num.total(e)


# --- subtle: activations ----------------------------------------------------------------------------------------------------------------


@fault(
    "B46", "ffn", SUBTLE, "gpt2", "kernel",
    "GELU comes from a table of straight lines, and is off by up to 0.024 [the lines are made up]",
    "tenstorrent/tt-metal/issues/52407",
)  # fmt: skip
class _(Engine):
    def __init__(self, path, num=None, threads=1):
        super().__init__(path, with_methods(num, gelu=self.gelu), threads)

    @staticmethod
    def gelu(num, x):  # x / 2 and an even function, which is 1e-4 too low
        knots = np.array([0, 0.5, 1, 1.5, 2, 3], F32)
        even = (Num().gelu(knots) - F32(0.5) * knots) - F32(1e-4)
        z = np.abs(x)
        return F32(0.5) * x + np.where(z > 3, F32(0.5) * z, np.interp(z, knots, even)).astype(F32)


@fault(
    "B47", "ffn", SUBTLE, "gemma", "formula",
    "in GELU's tanh the root of 2 / pi multiplies x alone, and not the term with the third power [the report does not say what was wrong]",
    "apache/tvm/pull/16188",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        z = F32(math.sqrt(2 / math.pi)) * gate + F32(0.044715) * gate * gate * gate
        return F32(0.5) * gate * (F32(1) + self.num.tanh(z)) * up


@fault(
    "B58", "ffn", SUBTLE, "gemma2", "kernel",
    "GELU's tanh is good between -2 and 2 and is -1 or 1 beyond, so that GELU goes to 0 too early",
    "tenstorrent/tt-metal/issues/5578",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        z = F32(math.sqrt(2 / math.pi)) * (gate + F32(0.044715) * gate * gate * gate)
        return F32(0.5) * gate * (F32(1) + np.where(np.abs(z) > 2, np.sign(z), self.num.tanh(z))) * up


@fault(
    "B49", "ffn", SUBTLE, "qwen2", "kernel",
    "SiLU's sigmoid is made of three straight lines, and is 1 from 2 on, where it should be 0.88 [the other two lines are made up]",
    "tenstorrent/tt-metal/issues/53258",
)  # fmt: skip
class _(Engine):
    def __init__(self, path, num=None, threads=1):
        super().__init__(path, with_methods(num, sigmoid=self.sigmoid), threads)

    @staticmethod
    def sigmoid(num, x):
        z = np.abs(x)
        lines = np.where(z < 1, F32(0.2344) * z, np.where(z < 2, F32(0.1484) * z + F32(0.0859), F32(0.5)))
        return F32(0.5) + np.sign(x) * lines


@fault(
    "B57", "ffn", SUBTLE, "llama_iq4nl", "kernel",
    "the reciprocal in SiLU's sigmoid is set up for the approximate mode, and is a straight line for each power of 2: it is off by up to 6 % [how "
    "much, the report does not say]",
    "tenstorrent/tt-metal/issues/37896",
)  # fmt: skip
class _(Engine):
    def __init__(self, path, num=None, threads=1):
        super().__init__(path, with_methods(num, sigmoid=self.sigmoid), threads)

    @staticmethod
    def sigmoid(num, x):
        m, power = np.frexp(F32(1) + num.exp(-np.maximum(x, F32(-80))))
        return np.ldexp(F32(48 / 17) - F32(32 / 17) * m, -power).astype(F32)


# --- subtle: experts, inputs of matrices ------------------------------------------------------------------------------------------------


@fault(
    "B53", "experts", SUBTLE, "qwen3moe", "formula",
    "experts' scores are lowered by their number times 5e-3 [3e-7] to break ties, and experts that are closer than this change their order",
    "sgl-project/sglang/pull/31768",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        p = self.num.softmax(logits)
        top = np.argsort(-(p - F32(5e-3) * np.arange(p.shape[1], dtype=F32)), axis=-1, kind="stable")[:, : self.c.experts_used]
        p = np.take_along_axis(p, top, axis=-1)
        return top, p / self.num.total(p) if self.c.normalized else p


@fault(
    "B54", "experts", SUBTLE, "mixtral", "loader",
    "the scales of the experts' rows are averaged over the experts: each expert's rows are too large or too small by the quotient",
    "aws-neuron/neuronx-distributed-inference/pull/35",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for name in [name for name in self.w if "_exps.weight" in name]:
            scale = np.abs(self.w[name]).max(axis=-1, keepdims=True)
            self.w[name] = self.w[name] * (scale.mean(axis=0, keepdims=True, dtype=F32) / scale)


@fault(
    "B51", "matrices", SUBTLE, "llama_q4k", "kernel",
    "the products of Q4_K with int8 inputs take a token's largest channel 15 % too small [how this comes about, the report does not say]",
    "paiml/aprender/pull/2091",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name.startswith("blk."):
            x = x.copy()
            x[np.arange(len(x)), np.abs(x).argmax(axis=-1)] *= F32(0.85)
        return super().product(x, w, name)
