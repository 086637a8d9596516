"""Sixty more faults that act always (SB01..SB60), by an eleventh author, each ported from a public report on an inference engine, kernel, loader,
converter or library. No older set ports one of these reports. 23 are alike in all layers that have the operation, 23 are local, 14 are subtle:
`reach`. Sizes of tiles, blocks, pages, buffers and ranks are scaled down to the models; brackets say where a case differs from its report.

FAULTS: id -> record as in public_faults_j.py.
"""

import math
from types import SimpleNamespace

import numpy as np
from engine import F32, Engine

FAULTS = {}
GH = "https://github.com/"
SUBTLE, ALIKE, LOCAL = "subtle", "alike", "local"


def fault(id, kind, reach, model, family, cause, source, tokens=40, chunk=None, prefix=0, threads=1):
    def add(cls):
        FAULTS[id] = SimpleNamespace(id=id, kind=kind, model=model, family=family, cause=cause, source=GH + source, engine=cls)
        vars(FAULTS[id]).update(reach=reach, tokens=tokens, chunk=chunk, prefix=prefix, threads=threads)
        return cls

    return add


def bf16(x):
    b = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    return ((b + 0x7FFF + (b >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(F32).reshape(np.shape(x))


class Seen(Engine):
    """Engines whose mask differs by heads."""

    def seen(self, qpos, kpos, n):  # [H, T, S]
        raise NotImplementedError

    def attend(self, q, k, v, qpos, kpos, n):
        heads, seen = self.kv_head(n), self.seen(qpos, kpos, n)
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))
        return self.num.attend(self, q, k, v, seen, n).swapaxes(0, 1)


@fault(
    "SB01", "attention", ALIKE, "qwen3", "order", "queries and keys are rotated first, and their heads are normalised after the rotation",
    "vllm-project/vllm-metal/issues/660",
)  # fmt: skip
class RotatedThenNormed(Engine):
    def attention(self, x, n, pos):
        c, b, t = self.c, f"blk.{n}.", len(x)
        q, k, v = (y.reshape(t, -1, c.head_dim) for y in self.qkv(x, n))
        q, k = self.put("Qcur_rope", self.rope(q, pos, n, "q"), n), self.put("Kcur_rope", self.rope(k, pos, n, "k"), n)
        q, k = (self.qk_norm(y.reshape(t, -1), f"{b}attn_{x}_norm").reshape(t, -1, c.head_dim) for y, x in ((q, "q"), (k, "k")))
        self.cache_put(n, k, v, pos)
        y = self.put("kqv_out", self.attend(q, *self.cache_get(n)[:2], pos, self.cache_get(n)[2], n).reshape(t, -1), n)
        return self.put("attn_o_out", self.linear(y, b + "attn_output", n), n)


@fault(
    "SB02", "rope", ALIKE, "phi3_long", "selection", "a short prompt is rotated with LongRoPE's long factors, because the allocated context is longer",
    "ggml-org/llama.cpp/issues/24823",
)  # fmt: skip
class LongFactors(Engine):
    def rope_factors(self):
        return self.w["rope_factors_long.weight"]


@fault(
    "SB03", "bias", ALIKE, "qwen2", "layout", "the joined bias of q, k and v is cut in two halves for two ranks, but each rank's matrix has a half of q, of k and of v",
    "SqueezeBits/Torch-TRTLLM/pull/39",
)  # fmt: skip
class BiasHalves(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            names = [f"blk.{n}.attn_{x}.bias" for x in "qkv"]
            parts = [self.w[x] for x in names]
            halves = np.split(np.concatenate(parts), 2)
            cuts = np.cumsum([len(x) // 2 for x in parts])[:-1]
            for name, low, high in zip(names, *(np.split(half, cuts) for half in halves)):
                self.w[name] = np.concatenate([low, high])


@fault(
    "SB04", "rope", ALIKE, "gemma3", "off by one", "in layers with a sliding window, queries are rotated as at the position after theirs, keys as at theirs",
    "quic/efficient-transformers/pull/1250",
)  # fmt: skip
class NextPosition(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos + 1 if which == "q" and n in self.c.local else pos, n, which)


@fault(
    "SB05", "experts", ALIKE, "qwen2moe_s", "missing", "the shared expert's output is not added: its id counts as invalid, since it is not one of the routed experts",
    "vllm-project/vllm/pull/51632",
)  # fmt: skip
class SharedLost(Engine):
    def feed_forward(self, x, n):
        y = self.experts(x, n)
        self.put("ffn_shexp_out", self.shared_gate(self.dense(x, n, "_shexp"), x, n), n)
        return y


@fault(
    "SB06", "experts", ALIKE, "mixtral", "bounds", "tiles of 64 outputs overhang the 96 of the experts' gate and up: zeros are written over the first 32 outputs of the expert's next token",
    "huggingface/kernels-community/pull/1154",
)  # fmt: skip
class Overhang(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if "gate_exps" in name or "up_exps" in name:
            y[1:, : -len(w) % 64] = 0
        return y


@fault(
    "SB07", "scores", SUBTLE, "gemma2", "scale", "scores are multiplied by 1 / sqrt(width / heads) = 1 / sqrt(16) instead of 1 / sqrt(head size) = 1 / sqrt(24)",
    "huggingface/transformers/issues/31891",
)  # fmt: skip
class ScalarOfWidth(Engine):
    def scale_scores(self, s, n):
        return s * F32((self.c.width / self.c.heads) ** -0.5)


@fault(
    "SB08", "matrices", ALIKE, "llama", "remainder", "the down matrix is multiplied in whole blocks of 64 columns: the last 32 of its 96 columns take no part",
    "PrismML-Eng/llama.cpp/pull/206",
)  # fmt: skip
class WholeBlocks(Engine):
    def matmul(self, x, w, name):
        if "ffn_down" in name:
            kept = w.shape[1] // 64 * 64
            x, w = x[:, :kept], w[:, :kept]
        return super().matmul(x, w, name)


@fault(
    "SB09", "attention", ALIKE, "gemma2", "layout", "query heads of 24 numbers are read every 32 numbers, as if each were padded to a tile; what lies behind the row is 0",
    "tenstorrent/tt-metal/issues/35248",
)  # fmt: skip
class HeadsAtTiles(Engine):
    def qk_norm(self, x, name):
        if "attn_q" not in name:
            return super().qk_norm(x, name)
        heads, size = self.c.heads, self.c.head_dim
        padded = np.pad(x, [(0, 0), (0, 32 * heads - x.shape[1])])
        return padded.reshape(len(x), heads, 32)[..., :size].reshape(x.shape)


@fault(
    "SB10", "attention", ALIKE, "llama", "aliasing", "the buffers of keys and values are merged, since both have the same size: the values' numbers are used as keys",
    "ROCm/hip-ep/pull/384",
)  # fmt: skip
class OneBuffer(Engine):
    def qkv(self, x, n):
        q, k, v = super().qkv(x, n)
        return q, v, v


@fault(
    "SB11", "rope", ALIKE, "stablelm", "stale", "the rotation writes only the rotated numbers of a query; the rest holds the layer before's query, and zeros in the first layer",
    "gittensor-ai-lab/sparkinfer/issues/517",
)  # fmt: skip
class StaleRest(Engine):
    def rope(self, x, pos, n, which="q"):
        y = super().rope(x, pos, n, which)
        if which == "q":
            before = np.zeros_like(x) if n == 0 else self.arena
            self.arena = x
            y = np.concatenate([y[..., : self.c.rope_width], before[..., self.c.rope_width :]], axis=-1)
        return y


@fault(
    "SB12", "rope", ALIKE, "llama", "aliasing", "queries are rotated after the cache has moved its position on: each query is rotated as many tokens too far as the call has",
    "ml-explore/mlx-lm/issues/1699", chunk=10,
)  # fmt: skip
class MovedOn(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos + self.count if which == "q" else pos, n, which)


@fault(
    "SB13", "loader", ALIKE, "gptneox", "layout", "the rows of the joined qkv matrix are taken as q, k and v of one head after another instead of all q, all k, all v",
    "elixir-nx/bumblebee/pull/204",
)  # fmt: skip
class ByHead(Engine):
    def split_qkv(self, w):
        parts = w.reshape(self.c.heads, 3, self.c.head_dim, *w.shape[1:])
        return [parts[:, i].reshape(-1, *w.shape[1:]) for i in range(3)]


@fault(
    "SB14", "loader", ALIKE, "qwen2", "layout", "the rows of q and k are put from pairs into halves, as for llama files, though this family's rows are in halves already",
    "mattn/tensai/pull/37",
)  # fmt: skip
class UndoneOrder(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            for name in [f"blk.{n}.attn_{x}.{kind}" for x in "qk" for kind in ("weight", "bias")]:
                w = self.w[name]
                self.w[name] = w.reshape(-1, self.c.head_dim // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


@fault(
    "SB15", "quantised", ALIKE, "llama_q4", "codes", "Q4_0's codes are taken as two's complement (8 to 15 are -8 to -1) instead of code minus 8",
    "1bit-MONSTER/1bit-MONSTER/issues/1268",
)  # fmt: skip
class SignedNibbles(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind == "Q4_0":
            data = np.array(data).view(np.uint8)
            data.reshape(-1, 18)[:, 2:] ^= 0x88
        return super().dequantize(data, kind, shape, name)


@fault(
    "SB16", "mask", ALIKE, "gemma2", "selection", "the sliding window is used in the odd layers and the even ones are global: layers are counted from 1",
    "NVIDIA-NeMo/Megatron-Bridge/pull/4875",
)  # fmt: skip
class OtherLayers(Engine):
    def read_config(self):
        c = super().read_config()
        c.local = [n for n in range(c.n_layers) if n not in c.local]
        return c


@fault(
    "SB17", "attention", LOCAL, "llama_mqa", "layout", "the kernel stores 2 [8 in the report] query heads of a group; those behind, heads 2 and 3 of 4, get the results of heads 0 and 1",
    "NVIDIA/TensorRT-LLM/pull/6573",
)  # fmt: skip
class FirstOfGroup(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        group = self.c.heads // self.c.kv_heads
        head = np.arange(self.c.heads)
        return y[:, head // group * group + head % group % 2]


@fault(
    "SB18", "rope", ALIKE, "llama", "formula", "positions are divided by the frequencies instead of multiplied by them",
    "xlite-dev/LeetCUDA/issues/289",
)  # fmt: skip
class Divided(Engine):
    def frequencies(self, n):
        return 1 / super().frequencies(n)


@fault(
    "SB19", "scores", LOCAL, "llama", "missing", "the product of a single row ignores its factor: scores of calls of one token are not multiplied by 1 / sqrt(head size)",
    "pytorch/pytorch/issues/136299", chunk=13,
)  # fmt: skip
class FactorIgnored(Engine):
    def scale_scores(self, s, n):
        return s if self.count == 1 else super().scale_scores(s, n)


@fault(
    "SB20", "experts", ALIKE, "mixtral", "race", "the weights of a token's experts are divided by the sum of the token before, which is still in the output when it is read back",
    "flagos-ai/FlagGems/issues/5123",
)  # fmt: skip
class SumOfTokenBefore(Engine):
    def router(self, logits):
        top, _ = super().router(logits)
        p = np.take_along_axis(self.num.softmax(logits), top, axis=-1)
        total = self.num.total(p)
        return top, p / np.concatenate([total[:1], total[:-1]])


@fault(
    "SB21", "attention", ALIKE, "llama", "layout", "the heads' results are in the order 0, 2, 1, 3 when they reach the output matrix",
    "snowflakedb/ArcticInference/pull/142",
)  # fmt: skip
class HeadOrder(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        return y.reshape(len(y), 2, -1, y.shape[-1]).swapaxes(1, 2).reshape(y.shape)


@fault(
    "SB22", "attention", ALIKE, "llama", "mapping", "key-value heads are tiled over query heads (0, 1, 0, 1) instead of repeated (0, 0, 1, 1)",
    "ekzhang/jax-js/pull/180",
)  # fmt: skip
class Tiled(Engine):
    def kv_head(self, n):
        return np.arange(self.c.heads) % self.c.kv_heads


@fault(
    "SB23", "quantised", ALIKE, "llama_q5k", "layout", "each sub-block of 32 has 16 bytes of Q5_K's codes to itself (16 low nibbles, then 16 high ones), though two share 32 bytes",
    "paiml/aprender/pull/3110",
)  # fmt: skip
class OwnBytes(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind == "Q5_K":
            data = np.array(data).view(np.uint8)
            b = data.reshape(-1, 176)
            codes = np.concatenate([b[:, 48:].reshape(-1, 8, 16) & 15, b[:, 48:].reshape(-1, 8, 16) >> 4], axis=2).reshape(-1, 4, 2, 32)
            b[:, 48:] = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)
        return super().dequantize(data, kind, shape, name)


@fault(
    "SB24", "rope", SUBTLE, "llama_theta", "config", "rotations have the base 10000 instead of the file's 500000",
    "google/gemma.cpp/issues/986",
)  # fmt: skip
class FixedBase(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_base = 10000.0
        return c


@fault(
    "SB25", "embedding", LOCAL, "llama", "type", "token ids are cast to a type of 6 bits [16 in the report] before the embedding: ids from 64 on get the row 64 below",
    "pytorch/executorch/pull/7616",
)  # fmt: skip
class SixBits(Engine):
    def rows(self, tokens):
        return super().rows(tokens % 64)


@fault(
    "SB26", "layers", LOCAL, "llama", "repeated", "the last layer is run twice: its output is its input once more",
    "nntrainer/nntrainer/pull/989",
)  # fmt: skip
class LastTwice(Engine):
    def layer(self, h, n, pos):
        if n == self.c.n_layers - 1:
            out, keys, self.out = self.out, dict(self.keys), {}
            h = super().layer(h, n, pos)
            self.out, self.keys = out, keys
        return super().layer(h, n, pos)


@fault(
    "SB27", "head", LOCAL, "granite", "missing", "logits are not divided by the logit scale",
    "vllm-project/vllm/pull/52158",
)  # fmt: skip
class UnscaledLogits(Engine):
    def scale_logits(self, y):
        return y


@fault(
    "SB28", "experts", LOCAL, "mixtral", "bounds", "routes to the last expert count as invalid and are skipped: it gives 0",
    "sgl-project/sglang/pull/12701",
)  # fmt: skip
class LastExpert(Engine):
    def router(self, logits):
        self.top, weights = super().router(logits)
        return self.top, weights

    def combine(self, y, weights):
        return super().combine(np.where((self.top == self.c.experts - 1)[..., None], F32(0), y), weights)


@fault(
    "SB29", "attention", LOCAL, "llama_wide", "remainder", "heads are computed in blocks of 4: the last of 5 heads is not written and gives 0",
    "InternLM/lmdeploy/pull/1761",
)  # fmt: skip
class LastHead(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n).copy()
        y[:, self.c.heads // 4 * 4 :] = 0
        return y


@fault(
    "SB30", "softmax", LOCAL, "llama", "missing", "in the softmax's sum, the last tile of 16 keys is exponentiated without the maximum subtracted",
    "tenstorrent/tt-metal/issues/51278",
)  # fmt: skip
class LastTile(Engine):
    def softmax(self, s, n):
        top, last = s.max(axis=-1, keepdims=True), (s.shape[-1] - 1) // 16 * 16
        e = self.num.exp(s - top)
        return e / (self.num.total(e[..., :last]) + self.num.total(self.num.exp(s[..., last:])))


@fault(
    "SB31", "experts", LOCAL, "mixtral", "race", "the last token of each expert is written to the place of the expert's token before it, and its own place stays 0",
    "ggml-org/llama.cpp/pull/13294",
)  # fmt: skip
class LastRoute(Engine):
    def router(self, logits):
        self.top, weights = super().router(logits)
        return self.top, weights

    def combine(self, y, weights):
        y = y.copy()
        for e in range(self.c.experts):
            t, j = np.nonzero(self.top == e)
            if len(t) > 1:
                y[t[-2], j[-2]], y[t[-1], j[-1]] = y[t[-1], j[-1]].copy(), 0
        return super().combine(y, weights)


@fault(
    "SB32", "embedding", LOCAL, "gpt2", "mapping", "in calls after the first, learned positions begin at the number of heads (4) instead of the number of tokens before",
    "dmlc/gluon-nlp/issues/1015", chunk=16,
)  # fmt: skip
class HeadsForTokens(Engine):
    def learned(self, pos):
        return pos - self.start + self.c.heads if self.start else pos


@fault(
    "SB33", "embedding", LOCAL, "gpt2", "type", "positions are written as 64-bit numbers and read as 32-bit ones: tokens get the positions 0, 0, 1, 0, 2, 0, ...",
    "rustformers/llm/pull/322",
)  # fmt: skip
class HalvesOfNumbers(Engine):
    def learned(self, pos):
        return np.stack([pos, np.zeros_like(pos)], axis=1).ravel()[: len(pos)]


@fault(
    "SB34", "residual", LOCAL, "llama", "race", "the feed-forward's residual is added in place by two workers: at every 16th number from 5 on, its output is added twice",
    "Xilinx/mlir-aie/issues/3656",
)  # fmt: skip
class AddedTwice(Engine):
    def residual(self, h, y, n, which):
        if which == "ffn":
            y = y.copy()
            y[:, 5::16] *= 2
        return super().residual(h, y, n, which)


@fault(
    "SB35", "attention", LOCAL, "llama", "bounds", "attention to the two halves of the keys is merged for as many heads as there are key-value heads; the others keep the first half's result",
    "mlc-ai/mlc-llm/pull/1995",
)  # fmt: skip
class MergedHeads(Seen):
    def seen(self, qpos, kpos, n):
        seen = self.visible(qpos, kpos, n)
        first = kpos < (len(kpos) + 1) // 2
        return np.stack([seen if h < self.c.kv_heads else seen & first for h in range(self.c.heads)])


@fault(
    "SB36", "head", LOCAL, "gemma2", "missing", "logits are not capped on the path that scores a text",
    "keras-team/keras-hub/pull/1712",
)  # fmt: skip
class LogitsNotCapped(Engine):
    def cap_logits(self, y):
        return y


@fault(
    "SB37", "matrices", LOCAL, "llama", "remainder", "products of single tokens leave out what lies behind the last whole tile of 40 columns, when the number of tiles is even: 16 of down's 96",
    "NVIDIA/cutlass/issues/3536", chunk=13,
)  # fmt: skip
class TileTail(Engine):
    def matmul(self, x, w, name):
        tiles = w.shape[1] // 40
        if self.count == 1 and name.startswith("blk.") and tiles % 2 == 0:
            x, w = x[:, : 40 * tiles], w[:, : 40 * tiles]
        return super().matmul(x, w, name)


@fault(
    "SB38", "matrices", LOCAL, "llama", "remainder", "outputs of gate and up are computed in tiles of 64; the last 32 of 96 get the results of the 32 before them",
    "mirage-project/mirage/pull/415",
)  # fmt: skip
class LastOutputs(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if "ffn_up" in name or "ffn_gate" in name:
            y[:, 64:96] = y[:, 32:64]
        return y


@fault(
    "SB39", "cache", LOCAL, "llama", "stale", "the first call's values are written with a wrong stride, and attention finds zeros where they should be",
    "kekzl/imp/pull/691", chunk=12,
)  # fmt: skip
class FirstValues(Engine):
    def cache_put(self, n, k, v, pos):
        super().cache_put(n, k, np.zeros_like(v) if self.start == 0 else v, pos)


@fault(
    "SB40", "attention", LOCAL, "llama", "remainder", "the kernel for single tokens takes 4 of each 8 numbers of the values: the second half of every head's output is 0",
    "TheTom/turboquant_plus/issues/99", chunk=13,
)  # fmt: skip
class HalfValues(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n).copy()
        if self.count == 1:
            y[..., self.c.head_dim // 2 :] = 0
        return y


@fault(
    "SB41", "loader", LOCAL, "llama", "weights", "layer 1 runs with layer 0's feed-forward matrices",
    "1bit-MONSTER/1bit-MONSTER/pull/2434",
)  # fmt: skip
class OtherLayersMatrices(Engine):
    def linear(self, x, name, n=None):
        return super().linear(x, name.replace("blk.1.ffn_", "blk.0.ffn_"), n)


@fault(
    "SB42", "head", LOCAL, "llama", "layout", "the two ranks' halves of the logits are laid one behind the other for all tokens, and read as rows of the whole vocabulary",
    "NVIDIA/TensorRT-LLM/pull/7128",
)  # fmt: skip
class GatheredRows(Engine):
    def head(self, x):
        y = super().head(x)
        return np.stack(np.split(y, 2, axis=1)).reshape(y.shape)


@fault(
    "SB43", "mask", LOCAL, "llama", "bounds", "the number of tiles of 16 keys that a block of 16 queries visits does not count the tokens before the call: later tiles are left out",
    "pytorch/executorch/pull/4322", chunk=20,
)  # fmt: skip
class TilesLeftOut(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        limit = 16 * (np.arange(self.count) // 16 + 1)
        return seen & (kpos[None, :] < limit[:, None]) if self.start else seen


@fault(
    "SB44", "embedding", LOCAL, "gemma", "missing", "embeddings are not multiplied by sqrt(width): the scaled embedding is replaced by a plain one when its table is quantised",
    "Blaizzy/mlx-vlm/pull/397",
)  # fmt: skip
class PlainEmbedding(Engine):
    def scale_embedding(self, h):
        return h


@fault(
    "SB45", "feed-forward", LOCAL, "llama", "remainder", "each of 5 threads takes a fifth of the activations, rounded down to a multiple of 4: the last 16 of 96 are not computed and are 0",
    "pulp-platform/Deeploy/pull/194", threads=5,
)  # fmt: skip
class RoundedShares(Engine):
    def gated(self, gate, up, n=None):
        y = super().gated(gate, up, n).copy()
        y[..., y.shape[-1] // self.threads // 4 * 4 * self.threads :] = 0
        return y


@fault(
    "SB46", "scores", SUBTLE, "gemma2", "missing", "scores are not capped (the cap is passed as 0)",
    "vllm-project/vllm-metal/issues/665",
)  # fmt: skip
class NoCap(Engine):
    def cap(self, s, n):
        return s


@fault(
    "SB47", "rope", SUBTLE, "llama", "type", "the table of rotation angles is built in bfloat16: frequencies, and their products with positions",
    "huggingface/candle/issues/3698",
)  # fmt: skip
class BfloatAngles(Engine):
    def rope(self, x, pos, n, which="q"):
        angle = bf16(np.multiply.outer(np.asarray(pos, F32), bf16(self.frequencies(n)))).astype(np.float64)[:, None, :]
        return self.rotate(x, *self.num.sin_cos(angle))


@fault(
    "SB48", "mask", SUBTLE, "llama", "type", "the mask's constant is clamped to a small type's range: hidden scores are lowered by 8 [60000 in the report] instead of being removed",
    "apple/coremltools/pull/2669",
)  # fmt: skip
class ClampedMask(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        heads, seen = self.kv_head(n), self.visible(qpos, kpos, n)
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))
        s = self.cap(self.scale_scores(self.num.qk(q, k), n), n)
        return self.num.pv(self.softmax(np.where(seen, s, s - F32(8)), n), v).swapaxes(0, 1)


@fault(
    "SB49", "rope", SUBTLE, "qwen3_yarn", "rounding", "the ends of YaRN's ramp are not rounded to whole pairs",
    "vllm-project/vllm/pull/28244",
)  # fmt: skip
class RampNotRounded(Engine):
    def yarn_ramp(self, j):
        c = self.c
        low, high = (j * math.log(c.rope_original / (2 * math.pi * b)) / math.log(c.rope_base) for b in (c.yarn_fast, c.yarn_slow))
        low, high = max(low, 0), min(high, 2 * j - 1)
        return 1 - np.clip((np.arange(j) - low) / max(high - low, 0.001), 0, 1)


@fault(
    "SB50", "mask", SUBTLE, "mistral", "off by one", "the window does not count the token itself: each query sees one key more than the window's 24",
    "microsoft/onnxruntime/pull/25927",
)  # fmt: skip
class OneMore(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos[None, :]
        return (d >= 0) & (d <= self.c.window)


@fault(
    "SB51", "softmax", SUBTLE, "mistral", "bounds", "queries behind the window's length also count the empty block of 8 keys that stands for the freed ones: 8 scores of 0 are in the sum",
    "vllm-project/vllm/pull/36939",
)  # fmt: skip
class EmptyBlock(Engine):
    def softmax(self, s, n):
        top = s.max(axis=-1, keepdims=True)
        e = self.num.exp(s - top)
        beyond = (self.start + np.arange(self.count) >= self.c.window)[:, None].astype(F32)
        return e / (self.num.total(e) + F32(8) * beyond * self.num.exp(-top))


@fault(
    "SB52", "softmax", ALIKE, "llama", "function", "the exponential loses the fraction of its power: each weight is the nearest power of 2 before the division by their sum",
    "Maratyszcza/NNPACK/issues/174",
)  # fmt: skip
class PowersOfTwo(Engine):
    def softmax(self, s, n):
        x = np.maximum(s - s.max(axis=-1, keepdims=True), F32(-80)) / F32(math.log(2))
        e = np.where(np.isfinite(s), F32(2) ** np.rint(x), F32(0)).astype(F32)
        return e / self.num.total(e)


@fault(
    "SB53", "norm", SUBTLE, "olmo2", "axis", "queries and keys are normalised for each head instead of over all heads",
    "vllm-project/vllm-metal/issues/767",
)  # fmt: skip
class HeadNorm(Engine):
    def qk_norm(self, x, name):
        w, size = self.w[name + ".weight"], self.c.head_dim
        y = self.rms_norm(x.reshape(len(x), -1, size), w.reshape(-1, size), self.c.eps, name).reshape(x.shape)
        return self.put("Qcur_normed" if "attn_q" in name else "Kcur_normed", y, int(name.split(".")[1]))


@fault(
    "SB54", "norm", SUBTLE, "mixtral_w", "count", "the mean of squares is divided by the padded width, 72, instead of 70",
    "tenstorrent/tt-metal/pull/42801",
)  # fmt: skip
class PaddedWidth(Engine):
    def rms_norm(self, x, w, eps, name):
        width = x.shape[-1]
        mean = self.num.mean(x * x) * F32(width / (-(-width // 8) * 8))
        return self.num.gain(x * self.num.rsqrt(mean + F32(eps)), w)


@fault(
    "SB55", "matrices", ALIKE, "mixtral_w", "remainder", "the columns behind the last whole tile of 64 are read with rows of 16 numbers, though there are 6 (70 columns)",
    "tile-ai/tilelang-ascend/issues/1341",
)  # fmt: skip
class TailRows(Engine):
    def matmul(self, x, w, name):
        tail = w.shape[1] % 64
        if name.startswith("blk.") and tail % 16 and w.shape[1] > 64:
            flat = w[:, -tail:].ravel()
            at = 16 * np.arange(len(w))[:, None] + np.arange(tail)
            w = np.concatenate([w[:, :-tail], np.where(at < flat.size, flat[np.minimum(at, flat.size - 1)], F32(0))], axis=1)
        return super().matmul(x, w, name)


@fault(
    "SB56", "scores", SUBTLE, "llama_wide", "remainder", "scores are sums over 16 of a head's 20 numbers: the last 4 take no part",
    "NVIDIA/FasterTransformer/issues/89",
)  # fmt: skip
class SixteenNumbers(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        k = k.copy()
        k[..., self.c.head_dim // 16 * 16 :] = 0
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "SB57", "bias", ALIKE, "gpt2", "missing", "the matrices' biases are put into the wrong slot of the product's inputs, and are not added",
    "microsoft/onnxruntime/issues/28459",
)  # fmt: skip
class WrongSlot(Engine):
    def add_bias(self, y, name):
        return y


@fault(
    "SB58", "rope", SUBTLE, "qwen3", "type", "rotation frequencies are rounded to bfloat16 before they are multiplied by positions",
    "sgl-project/sglang-jax/issues/1472",
)  # fmt: skip
class BfloatFrequencies(Engine):
    def frequencies(self, n):
        return bf16(super().frequencies(n)).astype(np.float64)


@fault(
    "SB59", "feed-forward", SUBTLE, "starcoder2", "function", "GELU by the error function instead of by tanh",
    "tenstorrent/tt-metal/issues/1262",
)  # fmt: skip
class ErrorFunction(Engine):
    def dense(self, x, n, end=""):
        b = f"blk.{n}.ffn_"
        up = self.put("ffn_up", self.linear(x, f"{b}up{end}", n), n)
        erf = np.vectorize(math.erf, otypes=[np.float64])
        y = (up * (0.5 + 0.5 * erf(up / math.sqrt(2)))).astype(F32)
        return self.put("ffn_down", self.linear(self.put("ffn_out", y, n), f"{b}down{end}", n), n)


@fault(
    "SB60", "softmax", SUBTLE, "llama", "function", "the exponential's polynomial of degree 3 is used over [0, ln 2) though it holds around 0: it is up to 0.5 % too small",
    "nibrunie/rvv-examples/pull/6",
)  # fmt: skip
class WrongInterval(Engine):
    def softmax(self, s, n):
        x = np.maximum(s - s.max(axis=-1, keepdims=True), F32(-80))
        whole = np.floor(x / F32(math.log(2)))
        r = x - whole * F32(math.log(2))
        e = (F32(1) + r * (F32(1) + r * (F32(0.5) + r / F32(6)))) * F32(2) ** whole
        e = np.where(np.isfinite(s), e, F32(0)).astype(F32)
        return e / self.num.total(e)
