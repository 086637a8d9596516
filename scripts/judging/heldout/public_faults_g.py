"""Sixty more faults that act always (A01..A60), by a seventh author, each ported from a public report on an inference engine, kernel, loader or
converter. No older set ports one of these reports. 25 are alike in all layers that have the operation, 20 are local, 15 are subtle. Sizes of
tiles, blocks, buffers and ranks are scaled down to the models; brackets say where a case differs from its report.

FAULTS: id -> record as in public_faults_f.py. `kind` is the part of the engine, `family` the sort of mistake.
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


def cut_bfloat16(x):  # towards zero
    return (np.ascontiguousarray(x, F32).view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)


def with_methods(num, **methods):  # the same numerics, but for some methods
    num = num or Num()
    other = object.__new__(type("Other", (type(num),), methods))
    vars(other).update(vars(num))
    return other


def heads_first(engine, q, k, v, n):
    heads = engine.kv_head(n)
    return tuple(x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))


def scores(engine, q, k, visible, n):  # [H, T, K], [H, S, K], [T, S] -> [H, T, S], -inf where masked
    return np.where(visible, engine.cap(engine.scale_scores(engine.num.qk(q, k), n), n), F32(-np.inf))


# --- alike in all layers: norms ---------------------------------------------------------------------------------------------------------


@fault(
    "A01", "norm", ALIKE, "qwen3_eps", "formula",
    "heads of queries and keys are divided by the reciprocal root of their mean of squares, so they are multiplied by the root: large heads become "
    "larger [all norms in the report]",
    "mosaicml/llm-foundry/issues/371",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        if not name.endswith(("attn_q_norm", "attn_k_norm")):
            return super().rms_norm(x, w, eps, name)
        return self.num.gain(x / self.num.rsqrt(self.num.mean(x * x) + F32(eps)), w)


@fault(
    "A02", "norm", ALIKE, "minicpm", "formula",
    "the compiler's lowering of the norm sums the squares, and does not divide by the width: rows are an eighth of what they should be",
    "tenstorrent/tt-mlir/pull/8798",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return self.num.gain(x * self.num.rsqrt(self.num.total(x * x) + F32(eps)), w)


@fault(
    "A03", "norm", ALIKE, "starcoder2", "loader",
    "the converter's table has the weights of the norm in front of attention and not its bias: it stays zero [the norm of an "
    "adapter in the report]",
    "baidu-baige/LoongForge/pull/109",
)  # fmt: skip
class _(Engine):
    def load(self, t):
        x = super().load(t)
        return np.zeros_like(x) if t.name.endswith("attn_norm.bias") else x


# --- alike in all layers: RoPE ----------------------------------------------------------------------------------------------------------


@fault(
    "A04", "rope", ALIKE, "qwen2", "layout",
    "the kernel for RoPE takes the first axis behind the batch for time, and it gets heads there: a head is turned by its number, and no token "
    "by its place",
    "facebookresearch/xformers/issues/841",
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        angle = np.multiply.outer(np.arange(x.shape[1], dtype=np.float64), self.frequencies(n))[None]
        return self.rotate(x, *self.num.sin_cos(angle))


@fault(
    "A05", "rope", ALIKE, "stablelm", "formula",
    "the model's attention was written without RoPE, and no positions reach it: nothing is turned",
    "vllm-project/vllm/pull/30413",
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return x


# --- alike in all layers: attention -----------------------------------------------------------------------------------------------------


@fault(
    "A06", "attention", ALIKE, "gpt2", "formula",
    "softmax runs along the queries: each key's weights over the tokens that see it sum to 1, and a token's weights over keys do not",
    "nerdai/llms-from-scratch-rs/pull/30",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        e = self.num.exp(s - s.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True, dtype=F32)


@fault(
    "A07", "attention", ALIKE, "gemma3", "config",
    "the scale of a quantised cache's keys (0.25 here) is multiplied into the scores, and the cache is not quantised",
    "sgl-project/sglang/pull/18396",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return super().scale_scores(s, n) * F32(0.25)


@fault(
    "A08", "attention", ALIKE, "llama_h8", "formula",
    "keys come in tiles of 8, and the sum of values is divided by the running denominator behind each tile, not once at the end: what came "
    "in earlier tiles is divided again and again",
    "1bit-MONSTER/1bit-MONSTER/pull/495",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        q, k, v = heads_first(self, q, k, v, n)
        s = scores(self, q, k, self.visible(qpos, kpos, n), n)
        most, total, y = np.full((*s.shape[:2], 1), -np.inf, F32), F32(0), F32(0)
        for i in range(0, s.shape[2], 8):
            part = s[..., i : i + 8]
            new = np.maximum(most, part.max(axis=-1, keepdims=True))
            p, keep = self.num.exp(part - new), self.num.exp(most - new)
            total = total * keep + self.num.total(p)
            y, most = (y * keep + self.num.pv(p, v[:, i : i + 8])) / total, new
        return y.swapaxes(0, 1)


@fault(
    "A09", "attention", ALIKE, "llama_g3", "kernel",
    "a row of scores lies in 8 lanes, and its sum is taken over 4: two groups of columns are normalised apart, and a row's weights sum to 2",
    "flashinfer-ai/flashinfer/pull/3640",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        e = self.num.exp(s - s.max(axis=-1, keepdims=True))
        first = np.arange(s.shape[-1]) % 8 < 4
        sums = [self.num.total(np.where(mask, e, F32(0))) for mask in (first, ~first)]
        return e / np.maximum(np.where(first, *sums), F32(1e-30))


@fault(
    "A10", "attention", ALIKE, "llama_mha", "layout",
    "the heads' axis has a stride of 0: all heads attend with the first head's queries, keys and values",
    "BobMcDear/attorch/issues/14",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(*(np.repeat(x[:, :1], x.shape[1], axis=1) for x in (q, k, v)), qpos, kpos, n)


@fault(
    "A11", "attention", ALIKE, "gptneox", "layout",
    "within a tile of 16 the kernel steps through values by the stride of keys, which lie in a joint buffer and have twice theirs: it reads "
    "every second value, up to the end of the cache [keys are read by the stride of values as well in the report]",
    "flagos-ai/FlagAttention/pull/46",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        i = np.arange(len(v))
        return super().attend(q, k, v[np.minimum(i + i % 16, len(v) - 1)], qpos, kpos, n)


# --- alike in all layers: matrices ------------------------------------------------------------------------------------------------------


@fault(
    "A13", "matrices", ALIKE, "bitnet_mha", "layout",
    "the sums of ternary products are 32-bit integers, and their buffer is read as 16-bit ones: low and high halves in turn, of half of the outputs",
    "1bit-MONSTER/1bit-MONSTER/issues/1121",
)  # fmt: skip
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name not in self.int8:
            return y
        d = np.abs(w).max()
        return np.rint(y / d).astype(np.int32).view(np.int16)[:, : y.shape[1]].astype(F32) * d


@fault(
    "A14", "matrices", ALIKE, "llama_bf16", "kernel",
    "the pointer to the inputs is not advanced: the first tile of 16 inputs meets every tile of the weights",
    "1bit-MONSTER/1bit-MONSTER/issues/1273",
)  # fmt: skip
class _(Engine):
    def matmul(self, x, w, name):
        return super().matmul(np.tile(x[:, :16], x.shape[1] // 16), w, name)


@fault(
    "A15", "matrices", ALIKE, "bitnet", "kernel",
    "int8 inputs are shifted by 128 to the range of a byte, and the conversion saturates at 127 where it should wrap: all that are not negative "
    "become -1",
    "OpenNMT/CTranslate2/pull/666",
)  # fmt: skip
class _(Engine):
    def matmul(self, x, w, name):
        return super().matmul(np.minimum(x, F32(-1)) if name in self.int8 else x, w, name)


# --- alike in all layers: quantised weights ---------------------------------------------------------------------------------------------


@fault(
    "A16", "weights", ALIKE, "llama_q4k", "kernel",
    "Q4_K: the pointer to the weights counts work groups and not rows: all 64 rows of a group of gate and up are its first [of any matrix in "
    "the report]",
    "1bit-MONSTER/1bit-MONSTER/issues/1274",
)  # fmt: skip
class _(Engine):
    def load(self, t):
        w = super().load(t)
        return w[np.arange(len(w)) // 64 * 64] if t.name.endswith(("ffn_gate.weight", "ffn_up.weight")) else w


@fault(
    "A17", "weights", ALIKE, "llama_q4", "formula",
    "Q4_0: the zero point's share, 8 d times the sum of the inputs, takes the sum of their int8 codes, and forgets the scale of the inputs' block",
    "kekzl/imp/pull/722",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind == "Q4_0":
            self.__dict__.setdefault("d", {})[name] = halves(block_bytes(data, 18)[:, :2]).reshape(shape[0], -1)
        return super().dequantize(data, kind, shape, name)

    def product(self, x, w, name):
        y = super().product(x, w, name)
        if name not in self.d:
            return y
        b = x.reshape(len(x), -1, 32)
        step = np.maximum(np.abs(b).max(axis=-1), F32(1e-9)) / F32(127)
        total = np.rint(b / step[..., None]).sum(axis=-1, dtype=F32)
        return y + F32(8) * ((step - F32(1)) * total) @ self.d[name].T


@fault(
    "A18", "weights", ALIKE, "llama_iq4xs", "layout",
    "IQ4_XS: the nibbles of a byte are taken for neighbours, 2i and 2i + 1, and they are 16 apart",
    "lvyufeng/PocketLLM/pull/49",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        return np.ascontiguousarray(w.reshape(-1, 2, 16).swapaxes(1, 2)) if kind == "IQ4_XS" else w


@fault(
    "A19", "weights", ALIKE, "llama_mxfp4", "kernel",
    "MXFP4: the bound of a tile that is not full is the number of bytes, and there are two weights in a byte: of matrices with 64 inputs, less than "
    "a tile of 128, the second half of the inputs is left out",
    "ROCm/aiter/pull/5331",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name).reshape(shape)
        if kind == "MXFP4" and shape[-1] < 128:
            w[..., shape[-1] // 2 :] = 0
        return w


@fault(
    "A20", "weights", ALIKE, "llama_q41", "layout",
    "Q4_1: the minima of 8 rows are written in order, and the kernel expects even rows in front of odd ones: most rows have another row's minima",
    "pie-project/pie/pull/491",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name).reshape(shape)
        if kind != "Q4_1":
            return w
        m = halves(block_bytes(data, 20)[:, 2:4]).reshape(shape[0], -1)
        other = m.reshape(-1, 8, m.shape[1])[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(m.shape)
        return w + np.repeat(other - m, 32, axis=1)


@fault(
    "A56", "weights", ALIKE, "llama_q2k", "layout",
    "Q2_K: zero points are stored less 1, and 0 wraps: minima with the code 0 get 15 [zero points of another format in the report]",
    "ModelCloud/GPTQModel/issues/2350",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind != "Q2_K":
            return w
        b = block_bytes(data, 84)
        return w.reshape(-1, 16) - np.where(b[:, :16] >> 4 == 0, F32(15) * halves(b[:, 82:84]), F32(0)).reshape(-1, 1)


# --- alike in all layers: feed-forward and experts --------------------------------------------------------------------------------------


@fault(
    "A21", "ffn", ALIKE, "qwen3", "parallel",
    "each of two ranks holds the whole feed-forward part, and their results are summed as if each had half: it counts twice",
    "lightseekorg/tokenspeed/pull/80",
)  # fmt: skip
class _(Engine):
    def dense(self, x, n, end=""):
        return super().dense(x, n, end) * F32(2)


@fault(
    "A22", "ffn", ALIKE, "gemma", "formula",
    "the fused kernel applies GELU to the whole of its input, gate and up, and then multiplies the halves",
    "kakaobrain/trident/pull/101",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        return super().gated(gate, self.num.gelu(up), n)


@fault(
    "A23", "experts", ALIKE, "qwen2moe", "kernel",
    "the list of an expert's tokens keeps token 0 and nothing else: the other tokens get the shared expert alone",
    "vllm-project/vllm-xpu-kernels/issues/453",
)  # fmt: skip
class _(Engine):
    def combine(self, y, weights):
        y = super().combine(y, weights)
        y[1:] = 0
        return y


@fault(
    "A24", "experts", ALIKE, "mixtral", "parallel",
    "two devices hold different tokens, and the experts' results are summed over them as if they were shares of the same tokens: token t gets "
    "that of token t + half as well",
    "vllm-project/tpu-inference/pull/2248",
)  # fmt: skip
class _(Engine):
    def combine(self, y, weights):
        y = super().combine(y, weights)
        half = len(y) // 2
        if half:
            y[:half] += y[half : 2 * half]
            y[half : 2 * half] = y[:half]
        return y


@fault(
    "A60", "experts", ALIKE, "qwen3moe", "kernel",
    "in a square tile of tokens and experts (8 by 8) a row's largest number and sum are spread along the wrong axis: the router's "
    "probabilities are normalised by other tokens' [any softmax in the report]",
    "triton-lang/triton/issues/11406",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        p = self.num.softmax(logits)
        for i in range(0, len(logits) - len(logits) % 8, 8):
            part = logits[i : i + 8]
            most = part.max(axis=-1)
            p[i : i + 8] = self.num.exp(part - most) / self.num.exp(part - most[:, None]).sum(axis=-1, dtype=F32)
        top = np.argsort(-p, axis=-1, kind="stable")[:, : self.c.experts_used]
        p = np.take_along_axis(p, top, axis=-1)
        return top, p / self.num.total(p) if self.c.normalized else p


# --- local: the ends of the model -------------------------------------------------------------------------------------------------------


@fault(
    "A25", "embedding", LOCAL, "granite", "formula",
    "the multiplier is applied in the branch that looks tokens up, and the server looks them up itself and hands in the rows: it is left out",
    "vllm-project/vllm/pull/35026",
)  # fmt: skip
class _(Engine):
    def scale_embedding(self, h):
        return h


@fault(
    "A26", "embedding", LOCAL, "llama_q8", "kernel",
    "the kernel that writes out int8 weights reads one word of 4 codes for each 4 vectors: of each 16 numbers of the table the first 4 come 4 times",
    "microsoft/onnxruntime/issues/32578",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        return np.tile(w.reshape(-1, 16)[:, :4], 4) if name == "token_embd.weight" else w


@fault(
    "A27", "head", LOCAL, "llama_q8", "kernel",
    "the scales of the head's blocks are read behind their place by the number of the token: the first token's are right [of all matrices, by the "
    "row of a batch, in the report]",
    "huggingface/transformers/issues/47331",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name != "output.weight":
            return super().product(x, w, name)
        b = block_bytes(self.raw[name].data, 34)
        d, codes = halves(b[:, :2]).ravel(), b[:, 2:].view(np.int8).astype(F32).reshape(len(w), -1, 32)
        blocks = np.einsum("tbi,vbi->tvb", x.reshape(len(x), -1, 32), codes)
        place = np.arange(d.size).reshape(1, len(w), -1) + np.arange(len(x)).reshape(-1, 1, 1)
        return (blocks * d[np.minimum(place, d.size - 1)]).sum(axis=-1, dtype=F32)


@fault(
    "A28", "head", LOCAL, "llama_q8", "loader",
    "the scales of the quantised head are not among the weights that are loaded, and stay 1: logits come from the codes alone",
    "sgl-project/sglang/pull/34904",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if name == "output.weight":
            return block_bytes(data, 34)[:, 2:].view(np.int8).astype(F32).reshape(shape)
        return super().dequantize(data, kind, shape, name)


@fault(
    "A29", "head", LOCAL, "llama_bf16", "layout",
    "the head is packed tile of 16 inputs by tile, and read row by row: pieces of 4 rows make a row",
    "1bit-MONSTER/1bit-MONSTER/pull/1072",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        w = self.w["output.weight"]
        self.w["output.weight"] = np.ascontiguousarray(w.reshape(len(w), -1, 16).swapaxes(0, 1)).reshape(w.shape)


@fault(
    "A30", "weights", LOCAL, "llama_q8", "formula",
    "the table and the head are quantised by their own scales, and the scales are rounded up to powers of 2 when they are stored: blocks are up to "
    "twice too large",
    "huggingface/transformers/pull/46763",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind != "Q8_0":
            return w
        d = np.maximum(halves(block_bytes(data, 34)[:, :2]), F32(1e-9))
        return w.reshape(-1, 32) * (np.exp2(np.ceil(np.log2(d))) / d)


# --- local: some heads, columns, rows or layers -----------------------------------------------------------------------------------------


@fault(
    "A31", "experts", LOCAL, "qwen3moe", "kernel",
    "a tile of 32 outputs of up is stored with the width of half a tile: the second half of up's columns stays zero [48 columns here]",
    "Avarok-Cybersecurity/atlas/pull/474",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if "up_exps" in name:
            y[:, y.shape[1] // 2 :] = 0
        return y


@fault(
    "A32", "attention", LOCAL, "llama_mqa", "kernel",
    "the heads that share keys lie in slots of two rows, and only the first slot is stored: heads 2 and 3 stay zero",
    "local-inference-lab/b12x/pull/24",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        y[:, 2:] = 0
        return y


@fault(
    "A33", "attention", LOCAL, "granite", "layout",
    "the row of a token's queries is found without the factor of the number of heads: head h of token t, but for the first head, is row t + h",
    "1bit-MONSTER/1bit-MONSTER/issues/2451",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        place = np.arange(len(q))[:, None] * np.where(np.arange(q.shape[1]) > 0, 1, q.shape[1]) + np.arange(q.shape[1])
        return super().attend(q.reshape(-1, q.shape[2])[place], k, v, qpos, kpos, n)


@fault(
    "A34", "attention", LOCAL, "gemma2", "config",
    "heads of values are found by the kernel's own width, 16, and they are 24 wide: the second begins in the middle of the first",
    "gittensor-ai-lab/sparkinfer/issues/425",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        wide = v.shape[2]
        place = np.arange(v.shape[1])[:, None] * 16 + np.arange(wide)
        return super().attend(q, k, v.reshape(len(v), -1)[:, place], qpos, kpos, n)


@fault(
    "A35", "biases", LOCAL, "starcoder2", "layout",
    "a bias is broadcast along rows or columns by what fits, and where there are as many tokens as outputs (64) it goes by tokens: queries, "
    "attention's output and down",
    "openxla/xla/issues/46897",
    tokens=64,
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        b = self.w.get(name + ".bias")
        return y if b is None else y + (b[:, None] if len(y) == len(b) else b)


@fault(
    "A36", "norm", LOCAL, "llama", "kernel",
    "the first launch after loading loses what its later programs store: in the first layer, rows of the norm from 32 on stay zero",
    "triton-lang/triton-ascend/issues/2292",
)  # fmt: skip
class _(Engine):
    def norm(self, x, name, n):
        y = super().norm(x, name, n)
        if name == "blk.0.attn_norm" and self.start == 0:
            y[32:] = 0
        return y


@fault(
    "A37", "norm", LOCAL, "qwen3", "kernel",
    "the kernel takes the norms' weights of keys, one row for each layer, for one vector: all layers but the first have the first layer's",
    "vllm-project/vllm/pull/56431",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(1, self.c.n_layers):
            self.w[f"blk.{n}.attn_k_norm.weight"] = self.w["blk.0.attn_k_norm.weight"]


@fault(
    "A38", "matrices", LOCAL, "llama_wide", "kernel",
    "tiles are 16 by 16, and one that sticks out at both edges is not stored: the last 8 tokens have zeros in the last columns of each matrix [the "
    "report: at one edge, behind an offset of 2 GiB]",
    "ROCm/hipBLASLt/issues/2299",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        rows, columns = len(y) % 16, y.shape[1] % 16
        if rows and columns:
            y[-rows:, -columns:] = 0
        return y


@fault(
    "A39", "experts", LOCAL, "mixtral_w", "kernel",
    "the grid for the experts' results is the width over 16 rounded down: the last 6 of 70 channels are never written [the report: of experts "
    "that hand through their input]",
    "vllm-project/vllm/pull/49087",
)  # fmt: skip
class _(Engine):
    def combine(self, y, weights):
        y = super().combine(y, weights)
        y[:, y.shape[1] // 16 * 16 :] = 0
        return y


@fault(
    "A40", "experts", LOCAL, "mixtral", "kernel",
    "scales of int8 inputs are loaded by pairs of blocks of 16 rows: an expert's rows 16 to 31, 48 to 63 ... have those of the block before",
    "ROCm/FlyDSL/pull/932",
    tokens=64,
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if "_exps" not in name:
            return y
        step, i = np.abs(x).max(axis=-1, keepdims=True), np.arange(len(x))
        return y * step[i - 16 * (i // 16 % 2)] / step


# --- local: the cache -------------------------------------------------------------------------------------------------------------------


@fault(
    "A41", "cache", LOCAL, "qwen2", "cache",
    "a prefix of 20 tokens is filled up to 24, and the table's entry behind it is still that of block 0: rows 4 to 7 of the cache get the keys and "
    "values of the filling (the last token's)",
    "tenstorrent/tt-metal/issues/56324",
    prefix=20,
)  # fmt: skip
class _(Engine):
    def begin(self, call):
        super().begin(call)
        count = -self.prefix % 8
        if call == "prompt" and self.prefix and count:
            for k, v, _ in self.keys.values():
                for x in (k, v):
                    x[8 - count : 8] = x[-1]


@fault(
    "A42", "cache", LOCAL, "llama_tied", "cache",
    "a prefix that fills its blocks of 8 has one block less where it was computed than where it goes on, and the lists are matched from the end: "
    "all blocks come one too late, and the first is empty",
    "vllm-project/vllm-ascend/pull/8908",
    prefix=24,
)  # fmt: skip
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix and self.prefix % 8 == 0:
            for k, v, _ in self.keys.values():
                for x in (k, v):
                    x[8:], x[:8] = x[:-8].copy(), 0


@fault(
    "A43", "cache", LOCAL, "phi2", "cache",
    "keys and values are cut to the number of queries: a chunk of 16 behind others sees the first 16 of the cache, and not itself",
    "alibaba/MNN/pull/4898",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(q, k[: len(q)], v[: len(q)], qpos, kpos[: len(q)], n)


@fault(
    "A44", "cache", LOCAL, "smollm3", "parallel",
    "two stages of two layers store a prefix's keys and values under their own numbers of layers, and the later stage's stay: the first two "
    "layers find those of the last two",
    "vllm-project/vllm-ascend/pull/15507",
    prefix=16,
)  # fmt: skip
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix:
            half = self.c.n_layers // 2
            self.keys |= {n: self.keys[n + half] for n in range(half)}


# --- subtle: formulas -------------------------------------------------------------------------------------------------------------------


@fault(
    "A45", "rope", SUBTLE, "qwen3_yarn", "config",
    "YaRN's bounds for fast and slow pairs are passed in the wrong order: the blend is a step at the slow bound",
    "pytorch/torchtitan/pull/3787",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.yarn_fast, c.yarn_slow = c.yarn_slow, c.yarn_fast
        return c


@fault(
    "A46", "rope", SUBTLE, "llama_theta", "formula",
    "sines and cosines come from fast functions that take whole turns off with a coarse 2 pi (6.28125 here), so angles drift with the position [a "
    "few thousandths at a position of some thousands in the report]",
    "kekzl/imp/issues/1316",
    tokens=250,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        angle = np.multiply.outer(np.asarray(pos, np.float64), self.frequencies(n))[:, None, :]
        return self.rotate(x, *self.num.sin_cos(angle - np.rint(angle / (2 * np.pi)) * 6.28125))


@fault(
    "A47", "norm", SUBTLE, "gemma2_eps", "config",
    "the norms behind attention and behind the feed-forward part are built with the class's epsilon, 1e-5, and the model's is 0.02",
    "NVIDIA-NeMo/Megatron-Bridge/pull/5712",
)  # fmt: skip
class _(Engine):
    def norm(self, x, name, n):
        return self.rms_norm(x, self.w[name + ".weight"], 1e-5, name) if "post_" in name else super().norm(x, name, n)


@fault(
    "A48", "norm", SUBTLE, "stablelm", "kernel",
    "the block of LayerNorm is longer than the row (128 for 64), and the mean is taken from the zeros behind the row as well: their squares "
    "count in the variance",
    "unslothai/unsloth/pull/1867",
)  # fmt: skip
class _(Engine):
    def layer_norm(self, x, w, b):
        mean = self.num.mean(x)
        x = x - mean
        y = self.num.gain(x * self.num.rsqrt(self.num.mean(x * x) + mean * mean + self.c.eps), w)
        return y if b is None else y + b


@fault(
    "A49", "norm", SUBTLE, "gemma", "kernel",
    "the squares of a row are summed in bfloat16, tile of 4 by tile, and each sum is cut: it is too small by some percent, and rows too large [up to "
    "a tenth in the report, at greater widths]",
    "tenstorrent/tt-metal/issues/49600",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        tiles, total = (x * x).reshape(*x.shape[:-1], -1, 4).sum(axis=-1, dtype=F32), F32(0)
        for i in range(tiles.shape[-1]):
            total = cut_bfloat16(total + tiles[..., i : i + 1])
        return self.num.gain(x * self.num.rsqrt(total / F32(x.shape[-1]) + F32(eps)), w)


@fault(
    "A12", "norm", SUBTLE, "llama_wide", "kernel",
    "the sum of a row's squares is divided by the width of its tiles, 96, and the row has 88 numbers: rows come out some percent too large [the "
    "variance of a whole tensor in the report]",
    "tenstorrent/tt-metal/issues/53277",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        width = -(-x.shape[-1] // 32) * 32
        return self.num.gain(x * self.num.rsqrt(self.num.total(x * x) / F32(width) + F32(eps)), w)


@fault(
    "A50", "attention", SUBTLE, "qwen3", "kernel",
    "the sum of a row of exponentials is kept in bfloat16 while keys are added one by one: behind a large sum small ones are lost",
    "tenstorrent/tt-metal/issues/52045",
    tokens=240,
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        e, total = self.num.exp(s - s.max(axis=-1, keepdims=True)), F32(0)
        for i in range(s.shape[-1]):
            total = bfloat16(total + e[..., i : i + 1])
        return e / total


@fault(
    "A51", "attention", SUBTLE, "phi3", "kernel",
    "the reciprocal of the softmax's sum starts from 1 for all mantissas and has two steps of Newton's: it is up to 6 % too small",
    "tenstorrent/tt-metal/issues/53106",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        e = self.num.exp(s - s.max(axis=-1, keepdims=True))
        m, power = np.frexp(self.num.total(e))
        r = F32(2) - m
        return e * np.ldexp(r * (F32(2) - m * r), -power)


@fault(
    "A52", "residual", SUBTLE, "gemma3", "formula",
    "the stream is clipped behind each addition to what a small type holds [here 26, half precision's bound in the report]",
    "huggingface/transformers/pull/36832",
)  # fmt: skip
class _(Engine):
    def residual(self, h, y, n, which):
        return np.clip(super().residual(h, y, n, which), F32(-26), F32(26))


@fault(
    "A53", "ffn", SUBTLE, "starcoder2", "formula",
    "GELU's tanh is z (27 + z^2) / (27 + 9 z^2) in the vector lanes, and is not cut off at 1: large inputs come out too large",
    "ruvnet/RuVector/pull/761",
)  # fmt: skip
class _(Engine):
    def __init__(self, path, num=None, threads=1):
        super().__init__(path, with_methods(num, gelu=self.gelu), threads)

    @staticmethod
    def gelu(num, x):
        z = F32(math.sqrt(2 / math.pi)) * (x + F32(0.044715) * x * x * x)
        return F32(0.5) * x * (F32(1) + z * (F32(27) + z * z) / (F32(27) + F32(9) * z * z))


@fault(
    "A54", "ffn", SUBTLE, "gemma2", "formula",
    "GELU's tanh is a quotient of polynomials whose last three coefficients are too small for half precision: it goes on to 1.04",
    "Tencent/ncnn/pull/6979",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        t = np.clip(F32(math.sqrt(2 / math.pi)) * (gate + F32(0.044715) * gate * gate * gate), F32(-9), F32(9))
        z = t * t
        above = t * (F32(4.8935e-3) + z * (F32(6.3726e-4) + z * (F32(1.4857e-5) + z * F32(5.96e-8))))
        below = F32(4.8935e-3) + z * (F32(2.26843e-3) + z * (F32(1.18535e-4) + z * F32(1.19826e-6)))
        return F32(0.5) * gate * (F32(1) + above / below) * up


# --- subtle: weights and inputs ---------------------------------------------------------------------------------------------------------


@fault(
    "A55", "experts", SUBTLE, "mixtral", "loader",
    "gate and up of an expert share one scale, the larger of the two, and up's weights are not scaled anew: up is too large by the quotient "
    "where gate's largest weight is larger",
    "NVIDIA/TensorRT-LLM/pull/14199",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            gate, up = (np.abs(self.w[f"blk.{n}.ffn_{x}_exps.weight"]).max(axis=(1, 2), keepdims=True) for x in ("gate", "up"))
            self.w[f"blk.{n}.ffn_up_exps.weight"] = self.w[f"blk.{n}.ffn_up_exps.weight"] * np.maximum(gate / up, F32(1))


@fault(
    "A57", "weights", SUBTLE, "llama_q50", "formula",
    "Q5_0: half-precision scales become bfloat16 by cutting their last bits off: weights are up to 0.8 % too small",
    "1bit-MONSTER/1bit-MONSTER/issues/640",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind != "Q5_0":
            return w
        d = halves(block_bytes(data, 22)[:, :2])
        return w.reshape(-1, 32) * (cut_bfloat16(d) / np.where(d == 0, F32(1), d))


@fault(
    "A58", "biases", SUBTLE, "qwen2", "loader",
    "values are smoothed by factors that are folded into attention's output, and the joint bias of queries, keys and values is divided by them as a "
    "whole: those of queries and keys are wrong",
    "mit-han-lab/llm-awq/pull/314",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            q, k = (f"blk.{n}.attn_{x}.bias" for x in "qk")
            factors = np.exp(0.3 * seeded("smooth", n).standard_normal(len(self.w[k]))).astype(F32)
            self.w[q] = self.w[q] / np.resize(factors, len(self.w[q]))
            self.w[k] = self.w[k] / factors


@fault(
    "A59", "matrices", SUBTLE, "smollm3", "formula",
    "inputs are quantised by blocks whose scales have no common factor, and a scale ends at its type's largest number: what is beyond (3.5 "
    "here) is cut off",
    "kekzl/imp/issues/1544",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        return super().product(np.clip(x, F32(-3.5), F32(3.5)) if name.startswith("blk.") else x, w, name)
