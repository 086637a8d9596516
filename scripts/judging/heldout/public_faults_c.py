"""Forty more faults that act always (U01..U40), by a third author, each ported from a public report on an inference engine, kernel, loader
or converter that is in neither public_faults.py nor public_faults_b.py. Sizes of tiles, blocks and ranks are scaled down to the models.

FAULTS: id -> record as in public_faults.py, and `reach`, of SUBTLE (few elements, few positions or small numbers), ALIKE (in all layers,
heads and positions that have the operation) and LOCAL (to a layer, head, chunk, matrix or range of positions).
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


def bf16(x):  # round to nearest even
    b = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    return ((b + 0x7FFF + ((b >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(F32).reshape(np.shape(x))


def by_head(engine, q, k, v, n):  # -> [H, T, K], [H, S, K], [H, S, K]
    heads = engine.kv_head(n)
    return (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))


def zero_rows(x, count):  # x with `count` rows of zeros behind it
    return np.concatenate([x, np.zeros((count, *x.shape[1:]), x.dtype)])


# --- norms ------------------------------------------------------------------------------------------------------------------------------


@fault(
    "U01", "norms", SUBTLE, "llama_wide", "RMSNorm",
    "rows whose width is no multiple of the vector (here 88 and 32): a row's block stores one number too many, so column 0 of the next row "
    "is normalised by the row before it",
    "ROCm/aiter/issues/5044",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        y = super().rms_norm(x, w, eps, name)
        if x.shape[-1] % 32:
            root = self.num.rsqrt(self.num.mean(x * x) + F32(eps))
            y[1:, 0] = x[1:, 0] * root[:-1, 0] * w[0]
        return y


@fault(
    "U02", "norms", ALIKE, "qwen3", "qwen3",
    "the norm of queries and keys reduces over all heads of a token (G*D numbers) instead of over each head",
    "ROCm/hip-ep/pull/937",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        if not name.endswith(("q_norm", "k_norm")):
            return super().rms_norm(x, w, eps, name)
        mean = (x * x).mean(axis=(1, 2), keepdims=True, dtype=F32)
        return x * self.num.rsqrt(mean + F32(eps)) * w


@fault(
    "U03", "norms", ALIKE, "olmo2", "olmo2",
    "tensor parallelism over 2 ranks: the norm over the whole projection of queries and keys takes its mean square from the rank's "
    "own half",
    "ml-explore/mlx-lm/pull/898",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        if not name.endswith(("q_norm", "k_norm")):
            return super().rms_norm(x, w, eps, name)
        norm = super().rms_norm
        halves = zip(np.split(x, 2, axis=-1), np.split(w, 2))
        return np.concatenate([norm(part, gain, eps, name) for part, gain in halves], axis=-1)


@fault(
    "U04", "norms", LOCAL, "llama", "llama",
    "the fused all-reduce and RMSNorm adds a residual; in front of the first norm there is none, and it gets uninitialised memory "
    "(zeros in the first call, the last hidden state of the call before in later ones)",
    "vllm-project/vllm/pull/41972",
    chunk=20,
)  # fmt: skip
class _(Engine):
    def reset(self):
        super().reset()
        self.memory = None

    def rms_norm(self, x, w, eps, name):
        if name == "blk.0.attn_norm" and self.memory is not None:
            return super().rms_norm(x + self.memory, w, eps, name)
        if name == "output_norm":
            self.memory = x
        return super().rms_norm(x, w, eps, name)


# --- attention --------------------------------------------------------------------------------------------------------------------------


@fault(
    "U05", "attention", SUBTLE, "gemma3", "models with windows",
    "the kernel's window_size_left does not count the query's own position, and it gets the whole window: one key too many in local layers",
    "zml/zml/pull/763",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos[None, :]
        return (d >= 0) & (d <= self.c.window) if n in self.c.local else d >= 0


@fault(
    "U06", "attention", ALIKE, "gemma2", "gemma2",
    "the soft cap of the scores is applied behind the mask: masked keys get -cap instead of minus infinity and keep some weight",
    "flashinfer-ai/flashinfer/pull/350",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        seen = self.visible(qpos, kpos, n)
        q, k, v = by_head(self, q, k, v, n)
        s = np.where(seen, self.scale_scores(self.num.qk(q, k), n), F32(-1e30))
        return self.num.pv(self.softmax(self.cap(s, n), n), v).swapaxes(0, 1)


@fault(
    "U07", "attention", ALIKE, "llama", "all",
    "split-KV attention (16 keys a split): the log-sum-exp of a split has its maximum multiplied by the softmax scale once more, so "
    "the splits are combined with wrong weights",
    "HKUSTDial/flash-sparse-attention/pull/106",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        seen = self.visible(qpos, kpos, n)
        q, k, v = by_head(self, q, k, v, n)
        s = np.where(seen, self.scale_scores(self.num.qk(q, k), n), F32(-np.inf))
        sums, outs = [], []
        for a in range(0, s.shape[-1], 16):
            part = s[..., a : a + 16]
            most = np.maximum(part.max(axis=-1, keepdims=True), F32(-1e30))
            e = np.exp(part - most)
            total = e.sum(axis=-1, keepdims=True)
            outs.append(e @ v[:, a : a + 16] / np.maximum(total, F32(1e-30)))
            with np.errstate(divide="ignore"):
                sums.append(most * F32(self.c.attn_scale) + np.log(total))
        weights = np.exp(np.stack(sums) - np.stack(sums).max(axis=0))
        return ((np.stack(outs) * weights).sum(axis=0) / weights.sum(axis=0)).astype(F32).swapaxes(0, 1)


@fault(
    "U08", "attention", ALIKE, "llama", "all",
    "the vector kernel (calls of at most 8 queries) takes keys in blocks of 32 without a bound: rows behind the last key (zeros) "
    "count as keys",
    "pytorch/pytorch/pull/169222",
    chunk=5,
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        extra = -len(k) % 32 if len(q) <= 8 else 0
        return super().attend(q, zero_rows(k, extra), zero_rows(v, extra), qpos, zero_rows(kpos, extra), n)


@fault(
    "U09", "attention", LOCAL, "llama_g3", "grouped queries",
    "query heads are cut into tiles (here 2) that may cross a group's border; the whole tile takes the key-value head of its first "
    "query head",
    "FlashML-org/FreeToken/pull/177",
)  # fmt: skip
class _(Engine):
    def kv_head(self, n):
        return np.arange(self.c.heads) // 2 * 2 // (self.c.heads // self.c.kv_heads)


@fault(
    "U10", "attention", LOCAL, "llama_h8", "grouped queries",
    "block i works on query head (i % group) * group + i / group, right only if the group is as large as the number of key-value "
    "heads: some heads are computed twice, others never (their outputs stay zero)",
    "HazyResearch/HipKittens/pull/22",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        i, group = np.arange(self.c.heads), self.c.heads // self.c.kv_heads
        return np.where(np.isin(i, i % group * group + i // group)[:, None], y, F32(0))


@fault(
    "U11", "attention", SUBTLE, "gemma2", "gemma2",
    "scores are scaled by (width / heads)^-1/2 instead of by the head width's: 1/4 instead of 24^-1/2",
    "ggml-org/llama.cpp/pull/13951",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return s * F32((self.c.width / self.c.heads) ** -0.5)


@fault(
    "U12", "attention", LOCAL, "llama", "all",
    "chunked prefill gives the kernel the length of the whole prompt as the number of keys: the causal mask, aligned at the last key, lets "
    "queries see later tokens of their chunk and slots not yet written (zeros)",
    "GeeeekExplorer/nano-vllm/pull/213",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        extra = self.prompt - len(k)
        self.shift = extra
        kpos = np.arange(self.prompt)
        return super().attend(q, zero_rows(k, extra), zero_rows(v, extra), qpos, kpos, n)

    def visible(self, qpos, kpos, n):
        return super().visible(qpos + self.shift, kpos, n)


@fault(
    "U13", "attention", ALIKE, "llama", "models without sinks",
    "the array of attention sinks is never bound and reads as zeros: every head has a sink of logit 0 in its denominator",
    "vllm-project/vllm-metal/pull/550",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        most = np.maximum(s.max(axis=-1, keepdims=True), F32(0))
        e = self.num.exp(s - most)
        return e / (self.num.total(e) + self.num.exp(-most))


@fault(
    "U14", "attention", LOCAL, "gemma3", "models with windows",
    "local layers keep a ring of 2 windows, and a chunk of 2 windows fills all of it: the first queries of a later chunk have lost "
    "the keys of the chunk before that are in their window",
    "pytorch/executorch/pull/20346",
    tokens=80, chunk=32,
)  # fmt: skip
class _(Engine):
    def cache_get(self, n):
        rows = 2 * self.c.window if n in self.c.local else len(self.keys[n][2])
        return tuple(x[-rows:] for x in self.keys[n])


@fault(
    "U15", "attention", SUBTLE, "qwen2", "paged cache",
    "one copy brings in two blocks of the cache (of 8 tokens), the lower address first: where the later tokens lie lower (here 24..31 "
    "below 16..23), the keys and values of the two blocks are exchanged under the mask",
    "vllm-project/vllm-ascend/pull/14040",
)  # fmt: skip
class _(Engine):
    def cache_get(self, n):
        k, v, pos = self.keys[n]
        order = np.r_[0:16, 24:32, 16:24, 32 : len(pos)] if len(pos) >= 32 else np.arange(len(pos))
        return k[order], v[order], pos


@fault(
    "U16", "attention", LOCAL, "llama", "all",
    "filling the cache is split over 4 cores by blocks of 8 tokens of a head; a core whose run goes on into the next head steps "
    "around in the head where it began: it overwrites that head's first blocks, and the next head's first blocks stay zero",
    "tenstorrent/tt-metal/issues/54413",
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        super().cache_put(n, self.fill(k), self.fill(v), pos)

    def fill(self, x):  # [T, G, K]
        out, blocks, heads = np.zeros_like(x), -(-len(x) // 8), x.shape[1]
        run = -(-blocks * heads // 4)
        for task in range(blocks * heads):
            first = task // run * run
            source, target = 8 * (task % blocks), 8 * ((first % blocks + task - first) % blocks)
            rows = min(8, len(x) - source, len(x) - target)
            out[target : target + rows, first // blocks] = x[source : source + rows, task // blocks]
        return out


@fault(
    "U17", "attention", SUBTLE, "llama", "all",
    "the softmax takes its exponentials from Schraudolph's bit trick (2^fraction as a straight line, errors of some percent); meant "
    "for the rescaling factors, it is used for all scores",
    "tenstorrent/tt-metal/issues/13866",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        x = np.maximum(s - s.max(axis=-1, keepdims=True), F32(-80))
        e = (x * F32(2**23 / math.log(2)) + F32(127 * 2**23 - 486411)).astype(np.int32).view(F32)
        e = np.where(s > -np.inf, e, F32(0))
        return e / self.num.total(e)


# --- positions --------------------------------------------------------------------------------------------------------------------------


@fault(
    "U18", "rope", SUBTLE, "llama_theta", "llama",
    "casting the model to float16 casts the buffer of RoPE's inverse frequencies as well; angles are computed in float32 from the "
    "rounded ones",
    "huggingface/transformers/issues/25681",
    tokens=200,
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        return super().frequencies(n).astype(np.float16).astype(np.float64)


@fault(
    "U19", "rope", ALIKE, "qwen2", "qwen2",
    "positions, frequencies and angles are bfloat16 before sine and cosine are taken: an angle of 100 is off by up to a quarter",
    "huggingface/candle/pull/3520",
    tokens=200,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        angle = bf16(np.multiply.outer(bf16(pos), bf16(self.frequencies(n))))[:, None, :]
        return self.rotate(x, *self.num.sin_cos(angle.astype(np.float64)))


@fault(
    "U20", "rope", ALIKE, "smollm3", "smollm3",
    "the list of layers without RoPE is read as the list of layers with RoPE: three of four layers do not rotate, and the fourth does",
    "huggingface/transformers/issues/43756",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.no_rope = [n for n in range(c.n_layers) if n not in c.no_rope]
        return c


@fault(
    "U21", "rope", ALIKE, "gemma3_lin", "gemma3",
    "the extension of RoPE (linear scaling) is applied in layers with a sliding window as well",
    "allenai/OLMo-core/pull/366",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        f = super().frequencies(n)
        return f / self.c.rope_scale if n in self.c.local else f


@fault(
    "U22", "rope", LOCAL, "llama", "all",
    "chunked prefill adds the offset of a chunk to an index that has advanced by it already: a later chunk is rotated by start + position",
    "mlx-node/mlx-node/pull/33",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos + self.start, n, which)


@fault(
    "U23", "embedding", ALIKE, "gpt2", "gpt2",
    "positions of a left-padded prompt are counted from the padding on (here 3 tokens): every token gets the learned position 3 further on",
    "TransformerLensOrg/TransformerLens/issues/1609",
)  # fmt: skip
class _(Engine):
    def learned(self, pos):
        return pos + 3


# --- feed-forward -----------------------------------------------------------------------------------------------------------------------


@fault(
    "U24", "ffn", SUBTLE, "gemma", "gemma",
    "GELU by the error function where the weights were trained with the tanh approximation",
    "kyutai-labs/pocket-tts/pull/278",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        erf = np.vectorize(math.erf)(gate / math.sqrt(2)).astype(F32)
        return F32(0.5) * gate * (F32(1) + erf) * up


@fault(
    "U25", "ffn", ALIKE, "llama", "llama with biases",
    "a Llama with biases is loaded as a Qwen2, which has biases of q, k and v only: those of the attention output, gate, up and down "
    "are dropped",
    "mlc-ai/mlc-llm/pull/3494",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        return y if name.endswith(("attn_output", "ffn_gate", "ffn_up", "ffn_down")) else super().add_bias(y, name)


@fault(
    "U26", "tensor parallel", ALIKE, "phi3", "fused gate and up",
    "the fused matrix [gate; up] is cut for 2 ranks in one contiguous piece each, and each rank takes its piece for [its gate; its "
    "up]: rank 0 has all of gate, rank 1 all of up",
    "tenstorrent/tt-metal/pull/52818",
)  # fmt: skip
class _(Engine):
    def split_gate_up(self, w):
        a, b, c, d = np.split(w, 4)
        return np.concatenate([a, c]), np.concatenate([b, d])


# --- experts ----------------------------------------------------------------------------------------------------------------------------


@fault(
    "U27", "tensor parallel", ALIKE, "qwen2moe", "qwen2moe",
    "data-parallel attention over 2 ranks: the shared expert's down projection is a partial sum over a rank's half of its inputs, and "
    "nobody adds the other half (the first half of the tokens has rank 0's, the rest rank 1's)",
    "vllm-project/tpu-inference/pull/3435",
)  # fmt: skip
class _(Engine):
    def linear(self, x, name, n=None):
        if name.endswith("down_shexp"):
            x, half = x.copy(), x.shape[1] // 2
            x[: len(x) // 2, half:] = 0
            x[len(x) // 2 :, :half] = 0
        return super().linear(x, name, n)


@fault(
    "U28", "experts", SUBTLE, "qwen3moe", "mixtures of experts",
    "the router's probabilities are rounded to bfloat16 before the best experts are taken: near ties choose another expert",
    "ViperEkura/AstrAI/pull/57",
    tokens=160,
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        p = bf16(self.num.softmax(logits))
        top = np.argsort(-p, axis=-1, kind="stable")[:, : self.c.experts_used]
        p = np.take_along_axis(p, top, axis=-1)
        return top, p / self.num.total(p) if self.c.normalized else p


@fault(
    "U29", "experts", LOCAL, "qwen3moe", "matrices with 16 columns more than a multiple of 32",
    "the matrix kernel takes inputs 32 at a time and does not bound the last 16: it goes on into the next row of inputs and of weights "
    "(here in the experts' down projections, of 48 columns); single rows take another kernel",
    "ml-explore/mlx/pull/3912",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if w.shape[1] % 32 == 16 and len(x) > 1:
            y = y + zero_rows(x[1:, :16], 1) @ zero_rows(w[1:, :16], 1).T
        return y


# --- block formats ----------------------------------------------------------------------------------------------------------------------


class Int8Blocks(Engine):
    """Products of IQ4_NL matrices in integers, as on a CPU: inputs are int8 codes in blocks of 32 with a float16 scale."""

    def load(self, t):
        if t.tensor_type.name == "IQ4_NL":
            shape = [int(n) for n in reversed(t.shape)]
            raw = np.asarray(t.data, np.uint8).reshape(*shape[:-1], -1, 18)
            self.__dict__.setdefault("codes", {})[t.name] = self.decode(raw)
        return super().load(t)

    def decode(self, raw):  # [N, B, 18] -> codes [N, B, 32], scales [N, B]
        scale = np.ascontiguousarray(raw[..., :2]).view(np.float16)[..., 0].astype(F32)
        values = np.array(quants.IQ4_NL.kvalues, np.int64)
        return np.concatenate([values[raw[..., 2:] & 15], values[raw[..., 2:] >> 4]], axis=-1), scale

    def product(self, x, w, name):
        if name not in self.codes:
            return super().product(x, w, name)
        codes, scale = self.codes[name]
        b = x.reshape(len(x), -1, 32)
        step = (np.abs(b).max(axis=-1) / F32(127)).astype(np.float16).astype(F32)
        y = np.rint(b / np.maximum(step, F32(1e-12))[..., None]).clip(-127, 127).astype(np.int64)
        out = np.zeros((len(x), len(codes)), F32)
        for i in range(codes.shape[1]):
            out += self.dot(codes[:, i], y[:, i]).astype(F32) * step[:, i, None] * scale[None, :, i]
        return out

    def dot(self, w, y):  # [N, 32], [T, 32] -> [T, N]
        return y @ w.T


@fault(
    "U30", "block formats", SUBTLE, "llama_iq4nl", "IQ4_NL",
    "AVX2's vpmaddubsw needs unsigned codes, so 128 is added to IQ4_NL's; a sum of two products may then pass 32767, where it saturates",
    "ikawrakow/ik_llama.cpp/pull/427",
)  # fmt: skip
class _(Int8Blocks):
    def dot(self, w, y):
        pairs = ((w + 128)[None] * y[:, None]).reshape(len(y), len(w), 16, 2).sum(axis=-1)
        return pairs.clip(-32768, 32767).sum(axis=-1) - 128 * y.sum(axis=-1)[:, None]


@fault(
    "U31", "block formats", ALIKE, "llama_q41", "formats with minima",
    "a tile of 128 columns spans several groups; scales are loaded for all of them, minima for the first only, and the others use that one",
    "sgl-project/sglang/pull/37759",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind == "Q4_1":
            raw = np.ascontiguousarray(np.asarray(data, np.uint8).reshape(shape[0], -1, 20)[..., 2:4])
            least = raw.view(np.float16)[..., 0].astype(F32)  # [N, blocks]
            first = least[:, np.arange(least.shape[1]) // 4 * 4]
            w = (w.reshape(*least.shape, 32) + (first - least)[..., None]).reshape(shape)
        return w


@fault(
    "U32", "block formats", ALIKE, "llama_mha", "int8 weights",
    "q, k and v are quantised to int8 as one matrix with the largest of all three, and dequantised each with its own largest number",
    "1bit-MONSTER/1bit-MONSTER/pull/33",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            names = [f"blk.{n}.attn_{x}.weight" for x in "qkv"]
            most = max(np.abs(self.w[name]).max() for name in names)
            for name in names:
                w = self.w[name]
                self.w[name] = np.rint(w * (F32(127) / most)) * (np.abs(w).max() / F32(127))


@fault(
    "U33", "block formats", LOCAL, "llama", "int8 cache",
    "a stored prefix keeps the int8 codes of keys and values but not their scales: they are read with the scales of another block of "
    "16 tokens",
    "kekzl/imp/pull/1189",
    tokens=56, prefix=32,
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        (k, a), (v, b) = self.codes(k), self.codes(v)
        if self.call == "prefix":
            self.__dict__.setdefault("restored", {})[n] = k * np.roll(a, 16, axis=0), v * np.roll(b, 16, axis=0), pos
        super().cache_put(n, k * a, v * b, pos)

    def codes(self, x):  # [T, G, K] -> codes, steps [T, G, 1]
        step = np.abs(x).max(axis=-1, keepdims=True) / F32(127)
        return np.rint(x / step), step

    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix:
            self.keys |= self.restored


@fault(
    "U34", "block formats", ALIKE, "llama_mxfp4", "MXFP4 activations",
    "activations as MXFP4: the exponent of a block's scale is taken from largest / 6 instead of from the largest less 2, for many "
    "blocks one too small, and the largest numbers saturate at 6",
    "vllm-project/vllm/pull/43557",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        return super().product(self.narrow(x) if name.startswith("blk.") else x, w, name)

    def narrow(self, x):
        b = x.reshape(*x.shape[:-1], -1, 32)
        most = np.maximum(np.abs(b).max(axis=-1, keepdims=True), F32(1e-20))
        scale = F32(2) ** np.floor(np.log2(most / F32(6)))
        a = np.abs(b) / scale
        step = F32(2) ** (np.floor(np.log2(np.maximum(a, F32(1)))) - 1)
        return (np.sign(b) * np.minimum(np.rint(a / step) * step, F32(6)) * scale).reshape(x.shape).astype(F32)


@fault(
    "U35", "block formats", SUBTLE, "llama_wide", "matrices",
    "the kernel for single rows starts N / tile groups of outputs, rounded down (here tiles of 8): the outputs behind the last whole "
    "tile are never computed and stay zero",
    "ml-explore/mlx/issues/4250",
    tokens=24, chunk=1,
)  # fmt: skip
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if len(x) == 1:
            y[:, len(w) // 8 * 8 :] = 0
        return y


# --- heads, batches, prefixes -----------------------------------------------------------------------------------------------------------


@fault(
    "U36", "tensor parallel", LOCAL, "llama", "grouped queries",
    "a prefix is sent from 4 prefill ranks, which hold each of the 2 key-value heads twice, to a decoder that counts 4 heads: rank "
    "1's copy of head 0 is written as head 1, and ranks 2 and 3 write outside",
    "sgl-project/sglang/pull/19086",
    tokens=44, prefix=20,
)  # fmt: skip
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix:
            self.keys = {n: (k[:, [0, 0]], v[:, [0, 0]], pos) for n, (k, v, pos) in self.keys.items()}


@fault(
    "U37", "head", SUBTLE, "qwen2", "tied heads",
    "a tied head has no weights to load, and its bias is skipped with them: logits are computed without the bias",
    "vllm-project/vllm/pull/46835",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        return y if name == "output" else super().add_bias(y, name)


@fault(
    "U38", "head", LOCAL, "gemma2", "gemma2",
    "the soft cap of the logits is x * tanh(x / cap) instead of cap * tanh(x / cap)",
    "unslothai/unsloth-zoo/pull/593",
)  # fmt: skip
class _(Engine):
    def cap_logits(self, y):
        return y * self.num.tanh(y / F32(self.c.logit_cap))


@fault(
    "U39", "batches", LOCAL, "qwen3", "left-padded batches",
    "prefill masks the padding in front of a prompt (here 4 tokens), but later calls get a mask of ones: they attend to the padding's keys",
    "unslothai/unsloth/issues/1066",
    chunk=20,
)  # fmt: skip
class _(Engine):
    padding = False

    def feed(self, tokens, start, chunk):
        self.padding = True
        self.forward(np.zeros(4, np.int64), 0)
        self.keys = {n: (k, v, pos - 1) for n, (k, v, pos) in self.keys.items()}
        self.padding, self.out = False, {}
        super().feed(tokens, start, chunk)

    def positions(self, start, count):
        return np.zeros(count, np.int64) if self.padding else super().positions(start, count)

    def visible(self, qpos, kpos, n):
        return super().visible(qpos, kpos, n) & (kpos >= 0) if self.start == 0 else super().visible(qpos, kpos, n)


@fault(
    "U40", "prefixes", SUBTLE, "llama", "paged cache",
    "a stored block counts as a hit if its first part matches: a prefix whose last block (here 8 of 32 tokens) differs reuses the other "
    "request's keys and values for it",
    "kvcache-ai/Mooncake/issues/4153",
    tokens=56, prefix=32,
)  # fmt: skip
class _(Engine):
    def feed(self, tokens, start, chunk):
        if self.call == "prefix":
            tokens = tokens.copy()
            tokens[-8:] = 1 + (tokens[-8:] + 16) % (self.c.vocab - 1)
        super().feed(tokens, start, chunk)
