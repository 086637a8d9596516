"""Sixty more faults that act always (PA01..PA60), by a tenth author, each ported from a public report on an inference engine, kernel, loader,
converter or library. No older set ports one of these reports. 24 are alike in all layers that have the operation, 22 are local, 14 are subtle.
Sizes of tiles, blocks, pages, buffers and ranks are scaled down to the models; brackets say where a case differs from its report.

FAULTS: id -> record as in public_faults_i.py. `kind` is the part of the engine, `family` the sort of mistake.
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


def with_methods(num, **methods):  # the same numerics, but for some methods
    num = num or Num()
    other = object.__new__(type("Other", (type(num),), methods))
    vars(other).update(vars(num))
    return other


def step(x, most):  # the scale of a row of codes up to `most`, for each last axis
    return np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-9)) / F32(most)


def attend_heads(engine, q, k, v, seen, n):  # [T, H, K], [S, H, K], [S, H, K], [T, S] -> [T, H, K]; rows that see nothing are zeros
    empty = ~seen.any(axis=1)
    seen = seen | empty[:, None]
    y = engine.num.attend(engine, *(x.swapaxes(0, 1) for x in (q, k, v)), seen, n).swapaxes(0, 1)
    return np.where(empty[:, None, None], F32(0), y)


def partial(engine, q, k, v, seen, n):  # attention to a part of the keys: [T, H, K], and the logarithms of the sums [T, H, 1]
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
    s = np.where(seen, engine.cap(engine.scale_scores(engine.num.qk(q, k), n), n), F32(-np.inf))
    top = s.max(axis=-1, keepdims=True)
    e = np.exp(s - top)
    total = e.sum(axis=-1, keepdims=True)
    return (engine.num.pv(e, v) / total).swapaxes(0, 1), (top + np.log(total)).swapaxes(0, 1)


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
    "PA01", "rope", ALIKE, "qwen3_yarn", "formula",
    "the pairs that YaRN leaves as they are get the frequencies of the larger base, base * factor^(d / (d - 2)), that another method of scaling "
    "uses",
    "paiml/aprender/pull/2161",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        c, j = self.c, self.c.rope_width // 2
        exponent = -np.arange(j) * 2.0 / c.rope_width
        larger = c.rope_base * c.rope_scale ** (c.rope_width / (c.rope_width - 2))
        own = self.yarn_ramp(j)
        return larger**exponent * own + c.rope_base**exponent / c.rope_scale * (1 - own)


@fault(
    "PA02", "rope", ALIKE, "llama_theta", "config",
    "for a longer context the loader writes a linear scaling of factor 2 over the model's settings, and the block that it writes has no base: "
    "the base falls back to 10000",
    "unslothai/unsloth/pull/7028",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_base, c.rope_scale = 10000.0, 2.0
        return c


@fault(
    "PA03", "rope", ALIKE, "qwen3", "layout",
    "the table of angles repeats each frequency twice, for neighbours, and the rotation takes halves: channel i is turned by the angle of pair "
    "i / 2, and its partner by another",
    "raiyanyahya/how-to-train-your-gpt/pull/7",
)  # fmt: skip
class _(Engine):
    def rotate(self, x, sin, cos):
        j = sin.shape[-1]
        sin, cos = (np.repeat(y, 2, axis=-1) for y in (sin, cos))
        out = x.copy()
        out[..., : 2 * j] = x[..., : 2 * j] * cos + np.concatenate([-x[..., j : 2 * j], x[..., :j]], axis=-1) * sin
        return out


@fault(
    "PA04", "rope", ALIKE, "stablelm", "layout",
    "one of two forward passes turns neighbours, (2i, 2i + 1), where the model's pairs are (i, i + half)",
    "ohdearquant/lattice/issues/392",
)  # fmt: skip
class _(Engine):
    def rotate(self, x, sin, cos):
        j = sin.shape[-1]
        out, a, b = x.copy(), x[..., 0 : 2 * j : 2], x[..., 1 : 2 * j : 2]
        out[..., 0 : 2 * j : 2], out[..., 1 : 2 * j : 2] = a * cos - b * sin, a * sin + b * cos
        return out


@fault(
    "PA05", "rope", ALIKE, "smollm3", "layout",
    "rows of queries and keys come from a file whose pairs are halves of a head, and are not put in the order of neighbours that the kernel of "
    "RoPE expects",
    "ooples/AiDotNet/pull/2074",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for name in [name for name in self.w if ".attn_q." in name or ".attn_k." in name]:
            w = self.w[name]
            heads = w.reshape(-1, self.c.head_dim, *w.shape[1:])
            self.w[name] = np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(w.shape)


@fault(
    "PA06", "rope", ALIKE, "gptneox", "layout",
    "frequencies of a partial rotation are filled up with zeros to the whole head, which is turned by its halves: pairs are (i, i + 8) and not "
    "(i, i + 4)",
    "labscommunity/cascadia/pull/69",
)  # fmt: skip
class _(Engine):
    def rotate(self, x, sin, cos):
        j, half = sin.shape[-1], self.c.head_dim // 2
        out, a, b = x.copy(), x[..., :j], x[..., half : half + j]
        out[..., :j], out[..., half : half + j] = a * cos - b * sin, a * sin + b * cos
        return out


# --- alike in all layers: norms -------------------------------------------------------------------------------------------------------------


@fault(
    "PA07", "norm", ALIKE, "gemma", "loader",
    "on one of two ways to load a model the weights of norms stay as they are in the training's file, less 1, and the kernel multiplies by them",
    "pytorch/executorch/pull/19901",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for name in [name for name in self.w if name.endswith("norm.weight")]:
            self.w[name] = self.w[name] - F32(1)


@fault(
    "PA08", "norm", ALIKE, "llama_tq2", "config",
    "norms in front of attention_output and ffn_down are built for each ternary model, and one without them has its inputs normalised there with "
    "weights of 1",
    "huggingface/transformers/issues/47957",
)  # fmt: skip
class _(Engine):
    def sub_norm(self, y, name, n):
        return y * self.num.rsqrt(self.num.mean(y * y) + self.c.eps)


@fault(
    "PA09", "norm", ALIKE, "gptneox", "formula",
    "a decoder with layer norms is built of RMS norms, taken over from another model: no mean is taken off, and biases are unused",
    "nntile/nntile/pull/375",
)  # fmt: skip
class _(Engine):
    def layer_norm(self, x, w, b):
        return self.num.gain(x * self.num.rsqrt(self.num.mean(x * x) + self.c.eps), w)


# --- alike in all layers: attention and cache -----------------------------------------------------------------------------------------------


@fault(
    "PA10", "attention", ALIKE, "olmo2", "mask",
    "the causal mask is applied where another mask is given, and here there is none: each token sees all tokens of the call",
    "facebookresearch/xformers/issues/103",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return np.ones((len(qpos), len(kpos)), bool)


@fault(
    "PA11", "attention", ALIKE, "llama_g3", "layout",
    "keys and values are addressed by the head of the query and not by the head that its group shares: heads beyond the last one are those of "
    "later tokens",
    "NVIDIA/TensorRT-LLM/pull/6538",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        at = np.arange(len(k))[:, None] * k.shape[1] + np.arange(q.shape[1])
        k, v = (np.concatenate([x.reshape(-1, x.shape[-1]), np.zeros_like(x[: q.shape[1]]).reshape(-1, x.shape[-1])])[at] for x in (k, v))
        return attend_heads(self, q, k, v, self.visible(qpos, kpos, n), n)


@fault(
    "PA12", "attention", ALIKE, "granite", "formula",
    "the model's own factor of scores is multiplied by 1 / sqrt(head size) where it should replace it",
    "chrishayuk/larql/pull/276",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return super().scale_scores(s, n) * F32(self.c.head_dim**-0.5)


@fault(
    "PA13", "attention", ALIKE, "starcoder2", "formula",
    "scores are divided by the root of the model's width, 8, and not by that of a head's, 4",
    "FareedKhan-dev/train-llm-from-scratch/pull/3",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return s * F32(self.c.width**-0.5)


@fault(
    "PA14", "attention", ALIKE, "llama_mha", "kernel",
    "in the softmax each of 8 [32] lanes adds up exponentials less its own maximum, and the lanes' sums are added as if the maxima were one: sums "
    "are too large",
    "KarhouTam/cuda-kernels/issues/3",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        lanes = [s[..., i::8] for i in range(min(8, s.shape[-1]))]
        tops = [np.maximum(x.max(axis=-1, keepdims=True), F32(-1e30)) for x in lanes]
        total = sum(self.num.total(self.num.exp(x - top)) for x, top in zip(lanes, tops))
        return self.num.exp(s - s.max(axis=-1, keepdims=True)) / total


@fault(
    "PA15", "cache", ALIKE, "llama_h8", "formula",
    "the scales of the int8 cache are held above 1, and keys and values are much smaller than 127: they are rounded to whole numbers",
    "lablup/mlxcel/pull/717",
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        super().cache_put(n, *(np.rint(x / np.maximum(step(x, 127), F32(1))) * np.maximum(step(x, 127), F32(1)) for x in (k, v)), pos)


@fault(
    "PA16", "cache", ALIKE, "mistral", "kernel",
    "where queries are in FP8 as the cache is, the kernel casts keys and values and does not multiply them by their scales, 0.5 and 0.25 here [the "
    "rounding is left out]",
    "vllm-project/vllm/pull/42580",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(q, k / F32(0.5), v / F32(0.25), qpos, kpos, n)


# --- alike in all layers: weights, biases, experts ------------------------------------------------------------------------------------------


@fault(
    "PA17", "biases", ALIKE, "qwen2", "formula",
    "the function that multiplies adds the bias, and the layer that calls it adds it again",
    "casper-hansen/AutoAWQ/issues/369",
)  # fmt: skip
class _(Engine):
    def add_bias(self, y, name):
        return super().add_bias(super().add_bias(y, name), name)


@fault(
    "PA18", "weights", ALIKE, "llama_q41", "layout",
    "the kernel adds 1 to zero points, as one format wants it, and this one stores them as they are: all weights are lower by one step [a zero "
    "point here is the minimum over the scale]",
    "vllm-project/vllm/pull/48810",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q4_1", 20

    def unpack(self, data, shape, name):
        b = block_bytes(data, shape, self.size)
        return self.standard(b, shape, name).reshape(*b.shape[:2], 32) - halves(b[..., :2])


@fault(
    "PA19", "weights", ALIKE, "llama_q6k", "layout",
    "low bits of number i are read from byte i / 2 and high bits from byte i / 4, where they lie in planes of 64 and of 32",
    "chrishayuk/larql/pull/207",
)  # fmt: skip
class _(Blocks):
    kind, size = "Q6_K", 210

    def unpack(self, data, shape, name):
        b, i = block_bytes(data, shape, self.size), np.arange(256)
        low = b[..., i // 2] >> (4 * (i % 2)).astype(np.uint8) & 15
        high = b[..., 128 + i // 4] >> (2 * (i % 4)).astype(np.uint8) & 3
        scales = np.ascontiguousarray(b[..., 192:208]).view(np.int8)[..., i // 16].astype(F32)
        return halves(b[..., 208:]) * scales * ((low | high << 4).astype(F32) - F32(32))


@fault(
    "PA20", "weights", ALIKE, "phi3", "layout",
    "the joint matrix is cut into queries, values and keys, in the order of another family, where it has queries, keys and values",
    "onnxruntime/mobius/pull/61",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for name in [name for name in self.w if ".attn_k." in name]:
            other = name.replace("attn_k", "attn_v")
            self.w[name], self.w[other] = self.w[other], self.w[name]


@fault(
    "PA21", "experts", ALIKE, "mixtral", "formula",
    "the weights of the chosen experts are not made to add up to 1",
    "AI-Hypercomputer/maxtext/pull/1026",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.normalized = False
        return c


@fault(
    "PA22", "experts", ALIKE, "qwen2moe_s", "parallel",
    "each of two ranks has the whole shared expert, and the sum over ranks adds it twice",
    "sgl-project/sglang/pull/26845",
)  # fmt: skip
class _(Engine):
    def shared_gate(self, y, x, n):
        return super().shared_gate(y, x, n) * F32(2)


@fault(
    "PA23", "residual", ALIKE, "phi2", "parallel",
    "each of two ranks adds its half of the stream and of attention's bias to its part of the sum, and the kernel halves both twice",
    "deepspeedai/DeepSpeed/pull/2310",
)  # fmt: skip
class _(Engine):
    def residual(self, h, y, n, which):
        if which == "ffn":
            return super().residual(h * F32(0.5), y, n, which)
        return super().residual(h, y - F32(0.5) * self.w[f"blk.{n}.attn_output.bias"], n, which)


@fault(
    "PA24", "matrices", ALIKE, "minicpm", "kernel",
    "inputs are scaled in groups of 32, the height of a weight's block, and the kernel reads scales for groups of 16, its width: a tile gets the "
    "scale of another group, or that of the next token [16 and 32 for 64 and 128; the rounding is left out]",
    "vllm-project/vllm/pull/46593",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name.startswith("blk."):
            groups, tiles = x.shape[-1] // 32, x.shape[-1] // 16
            scale = step(x.reshape(len(x), groups, 32), 127)
            read = np.minimum(np.arange(len(x))[:, None] * groups + np.arange(tiles), scale.size - 1)
            x = (x.reshape(len(x), tiles, 16) / scale.repeat(2, axis=1) * scale.reshape(-1)[read][..., None]).reshape(x.shape)
        return super().product(x, w, name)


# --- local: masks and positions -------------------------------------------------------------------------------------------------------------


@fault(
    "PA25", "attention", LOCAL, "gemma2", "mask",
    "when attention was moved to a common function, the window was not passed on: local layers see all earlier tokens",
    "huggingface/transformers/pull/35691",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return qpos[:, None] >= kpos[None, :]


@fault(
    "PA26", "attention", LOCAL, "qwen2_w", "mask",
    "in windowed layers the mask is cut to the last window's keys of the sequence, for all queries: early ones have lost their keys [those that "
    "have none left get zeros; the report is on Gemma 2]",
    "huggingface/transformers/pull/32522",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        seen, heads = self.visible(qpos, kpos, n), self.kv_head(n)
        if n in self.c.local:
            seen = seen & (kpos > kpos[-1] - self.c.window)
        return attend_heads(self, q, k[:, heads], v[:, heads], seen, n)


@fault(
    "PA27", "attention", LOCAL, "llama_lin", "kernel",
    "attention to the cache and to the call's own keys are merged by a kernel that reads both with the strides of the first, whose heads are "
    "padded to 24 numbers: the second is read from other heads and tokens, and from behind its end (zeros here)",
    "local-inference-lab/vllm/pull/17",
    prefix=16,
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if not self.start:
            return super().attend(q, k, v, qpos, kpos, n)
        seen, heads, old = self.visible(qpos, kpos, n), self.kv_head(n), kpos < self.start
        (a, one), (b, two) = (partial(self, q, k[:, heads], v[:, heads], seen & part, n) for part in (old, ~old))
        at = (np.arange(b.shape[0] * b.shape[1]) * 24)[:, None] + np.arange(b.shape[2])
        b = np.concatenate([b.reshape(-1), np.zeros(b.size, F32)])[at].reshape(b.shape)
        top = np.maximum(one, two)
        one, two = np.exp(one - top), np.exp(two - top)
        return ((a * one + b * two) / (one + two)).astype(F32)


@fault(
    "PA28", "cache", LOCAL, "qwen3", "positions",
    "tokens that the cache of prefixes has are left out of the call, and the kernel for prompts looks at the call's own keys alone and counts "
    "positions from 0",
    "Wenyueh/MinivLLM/pull/98",
    prefix=16,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.asarray(pos) - self.start, n, which)

    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(q, k[-len(q) :], v[-len(q) :], qpos, kpos[-len(q) :], n)


@fault(
    "PA29", "cache", LOCAL, "llama_tied", "cache",
    "the store hands over the keys of the whole prefix, and the engine expects one token less, to compute it itself: the last token of the prefix "
    "is in the cache twice",
    "vllm-project/vllm/issues/52617",
    prefix=12,
)  # fmt: skip
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix:
            self.keys = {n: tuple(np.concatenate([x, x[-1:]]) for x in old) for n, old in self.keys.items()}


@fault(
    "PA30", "cache", LOCAL, "gemma3", "layout",
    "pages of the int8 cache end with padding that the places of scales are computed without: scales of later pages, of 8 tokens here, are those "
    "of tokens that stand 2 places per page before [the rounding is left out]",
    "vllm-project/vllm/issues/49716",
)  # fmt: skip
class _(Engine):
    def cache_get(self, n):
        k, v, pos = super().cache_get(n)
        read = pos - 2 * (pos // 8)
        return *(x / step(x, 127) * step(x, 127)[read] for x in (k, v)), pos


@fault(
    "PA31", "cache", LOCAL, "granite", "cache",
    "room for keys grows while a prompt is read and not afterwards: what is appended beyond the prompt is dropped, and new tokens see the prompt "
    "alone",
    "Pushkinist/rMLX/pull/238",
    tokens=36,
    chunk=1,
    prefix=20,
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        if self.call != "prompt":
            super().cache_put(n, k, v, pos)


@fault(
    "PA32", "cache", LOCAL, "starcoder2_w", "cache",
    "when the cache grows between two calls, the rows of a ring are copied as if row t held position t: what has wrapped lands on positions "
    "outside of the window, and the newest positions are empty",
    "JustVugg/colibri/pull/830",
    prefix=26,
)  # fmt: skip
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix:
            for n in self.c.local:
                k, v, pos = self.keys[n]
                newest = {t % self.c.window: t for t in range(len(pos))}
                rows, held = list(newest), list(newest.values())
                moved = [np.zeros_like(x) for x in (k, v)]
                for new, x in zip(moved, (k, v)):
                    new[rows] = x[held]
                self.keys[n] = *moved, pos


@fault(
    "PA33", "cache", LOCAL, "llama_mqa", "cache",
    "before drafts are verified, the cache on the device is emptied and not rolled back to the last token: each later call of several tokens sees "
    "itself alone",
    "paiml/aprender/pull/2014",
    chunk=8,
)  # fmt: skip
class _(Engine):
    def cache_put(self, n, k, v, pos):
        if self.start and len(pos) > 1:
            self.keys[n] = None
        super().cache_put(n, k, v, pos)


@fault(
    "PA34", "cache", LOCAL, "mistral", "cache",
    "two drafts are stored and taken back at each step, and a ring that has wrapped keeps them where its two oldest tokens were [the drafts are "
    "the last two tokens again]",
    "ml-explore/mlx-swift-lm/pull/584",
    tokens=48,
    chunk=1,
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        oldest = qpos[0] - self.c.window + 1
        if oldest > 0:
            k, v = k.copy(), v.copy()
            for x in (k, v):
                x[oldest : oldest + 2] = x[qpos[0] - 1 : qpos[0] + 1]
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "PA35", "cache", LOCAL, "gemma", "cache",
    "with several drafts at a time, the cache's last entry of a step is computed of a guess and not of the token that was taken in the end [the "
    "entry before stands for it]",
    "vllm-project/vllm/pull/9730",
    chunk=4,
)  # fmt: skip
class _(Engine):
    def forward(self, tokens, start):
        super().forward(tokens, start)
        for n, (k, v, pos) in self.keys.items():
            if len(tokens) > 1:
                self.keys[n] = *(np.concatenate([x[:-1], x[-2:-1]]) for x in (k, v)), pos


@fault(
    "PA36", "ffn", LOCAL, "llama_eps", "positions",
    "the buffer of a layer's inputs has a place for each token of the prompt, and the activation reads it from its beginning in later calls: they "
    "get the first call's gates",
    "nntrainer/nntrainer/issues/3808",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def reset(self):
        super().reset()
        self.first = {}

    def gated(self, gate, up, n=None):
        gate, up = (x[: len(gate)] for x in self.first.setdefault(n, (gate, up)))
        return super().gated(gate, up, n)


@fault(
    "PA37", "rope", LOCAL, "qwen3moe", "positions",
    "the first call counts a token of its own that begins the text, and later ones do not: they are turned by positions one too low",
    "AI-Hypercomputer/JetStream/pull/231",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.asarray(pos) - (self.start > 0), n, which)


# --- local: matrices, tables, experts, the head ---------------------------------------------------------------------------------------------


@fault(
    "PA38", "matrices", LOCAL, "llama_mha", "kernel",
    "scales belong to blocks of 64 inputs, and are applied when a block is complete: the half block at the end of down's 96 inputs is added "
    "without its scales [the rounding is left out]",
    "pytorch/FBGEMM/issues/6159",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y, rest = super().product(x, w, name), x.shape[-1] % 64
        if not name.endswith("ffn_down.weight") or not rest:
            return y
        x, w = x[:, -rest:], w[:, -rest:]
        return y + (x / step(x, 448)) @ (w / step(w, 448)).T - x @ w.T


@fault(
    "PA39", "weights", LOCAL, "qwen3_eps", "layout",
    "the last block of a row is padded in memory, and the kernel finds a row by the number of inputs: each of down's rows, 96 numbers in blocks of "
    "64 [32], begins 32 numbers too early for each row before it",
    "ROCm/hip-ep/pull/588",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            name = f"blk.{n}.ffn_down.weight"
            w = self.w[name]
            self.w[name] = np.pad(w, ((0, 0), (0, -w.shape[1] % 64))).reshape(-1)[: w.size].reshape(w.shape)


@fault(
    "PA40", "embedding", LOCAL, "llama", "layout",
    "the table of embeddings is packed densely in 6 bits, and the function that unpacks a row takes five numbers from each word of 32 bits: from "
    "the sixth on they are wrong, and the last come from the next row",
    "ddalcu/mlx-serve/issues/305",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        w = self.w["token_embd.weight"]
        groups = w.reshape(len(w), -1, 32)
        low = groups.min(axis=-1, keepdims=True)
        scale = (groups.max(axis=-1, keepdims=True) - low) / F32(63)
        codes = np.rint((groups - low) / scale).astype(np.uint8).reshape(w.shape)
        bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :6].reshape(len(w), -1)
        bits = np.concatenate([bits.reshape(-1), np.zeros(64, np.uint8)])
        i = np.arange(w.shape[1])
        at = (np.arange(len(w)) * w.shape[1] * 6)[:, None, None] + (i // 5 * 32 + i % 5 * 6)[:, None] + np.arange(6)
        read = (bits[at].astype(F32) * F32(2) ** np.arange(6, dtype=F32)).sum(axis=-1, dtype=F32)
        self.w["token_embd.weight"] = (read.reshape(groups.shape) * scale + low).reshape(w.shape)


@fault(
    "PA41", "head", LOCAL, "qwen2", "loader",
    "the file has no matrix of the head, the setting that says it shares the table of embeddings is looked for in the wrong place, and the head "
    "stays as it was initialised: random",
    "huggingface/transformers/pull/43429",
)  # fmt: skip
class _(Engine):
    def head(self, x):
        w = np.random.default_rng(0).normal(0, 0.02, self.w["token_embd.weight"].shape).astype(F32)
        return self.cap_logits(self.scale_logits(self.product(x, w, "output.weight")))


@fault(
    "PA42", "head", LOCAL, "granite", "formula",
    "the way that returns logits ends with the head's product, and does not divide by the model's factor as the way that computes a loss does",
    "unslothai/unsloth-zoo/pull/1029",
)  # fmt: skip
class _(Engine):
    def scale_logits(self, y):
        return y


@fault(
    "PA43", "head", LOCAL, "minicpm", "formula",
    "the states in front of the head are divided by the model's factor, and the logits behind it again",
    "unslothai/unsloth/pull/8997",
)  # fmt: skip
class _(Engine):
    def scale_logits(self, y):
        return super().scale_logits(super().scale_logits(y))


@fault(
    "PA44", "cache", LOCAL, "bitnet_mha", "parallel",
    "a prefix comes from ranks that hold one head of the keys each, and the plan takes each rank's share for all heads: the first head arrives, "
    "and the others are zeros",
    "vllm-project/vllm/pull/52516",
    prefix=16,
)  # fmt: skip
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix:
            first = (np.arange(self.c.kv_heads) == 0)[:, None]
            self.keys = {n: (np.where(first, k, F32(0)), np.where(first, v, F32(0)), pos) for n, (k, v, pos) in self.keys.items()}


@fault(
    "PA45", "embedding", LOCAL, "gpt2", "positions",
    "learned positions count the padding in front of a shorter text of the batch, 8 tokens here",
    "facebookresearch/ParlAI/pull/3193",
)  # fmt: skip
class _(Engine):
    def learned(self, pos):
        return pos + 8


@fault(
    "PA46", "experts", LOCAL, "qwen3moe", "parallel",
    "results from two nodes are added by a list that says where each token went, and the list is in the order in which tokens were received: what "
    "a node has computed for a token is added if another token went there",
    "ROCm/mori/pull/546",
)  # fmt: skip
class _(Engine):
    def router(self, logits):
        self.top, weights = super().router(logits)
        return self.top, weights

    def combine(self, y, weights):
        node = self.top // (self.c.experts // 2)
        received = node[np.argsort(self.top[:, 0], kind="stable")]
        return super().combine(y, np.where((node[:, :, None] == received[:, None, :]).any(axis=-1), weights, F32(0)))


# --- subtle: RoPE, norms, the head ----------------------------------------------------------------------------------------------------------


@fault(
    "PA47", "rope", SUBTLE, "qwen3_yarn", "formula",
    "YaRN's magnitude is computed from one of two settings, where it is their ratio: sines and cosines are larger by that factor, 1.14 here",
    "kekzl/imp/pull/880",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_magnitude *= 1 + 0.1 * math.log(c.rope_scale)
        return c


@fault(
    "PA48", "rope", SUBTLE, "phi3_long", "formula",
    "the tables of sines and cosines leave out the magnitude that the scaling asks for [the report is on YaRN]",
    "GaijinEntertainment/daScript/pull/3479",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_magnitude = 1.0
        return c


@fault(
    "PA49", "norm", SUBTLE, "llama_eps", "formula",
    "epsilon is added to the reciprocal of the root, and not under the root",
    "tile-ai/tilelang/pull/1243",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return self.num.gain(x * (self.num.rsqrt(self.num.mean(x * x)) + F32(eps)), w)


@fault(
    "PA50", "norm", SUBTLE, "gpt2", "formula",
    "the deviation is that of a sample: squares are divided by the number of channels less 1",
    "gao-hongnan/omniverse/issues/72",
)  # fmt: skip
class _(Engine):
    def layer_norm(self, x, w, b):
        x = x - self.num.mean(x)
        y = self.num.gain(x * self.num.rsqrt(self.num.mean(x * x) * F32(x.shape[-1] / (x.shape[-1] - 1)) + self.c.eps), w)
        return y if b is None else y + b


@fault(
    "PA51", "head", SUBTLE, "gemma3", "config",
    "the file's cap of logits, 3, is not read for this family, and the default, 30, stays",
    "ggml-org/llama.cpp/pull/21390",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.logit_cap = 30.0
        return c


# --- subtle: attention and cache ------------------------------------------------------------------------------------------------------------


@fault(
    "PA52", "attention", SUBTLE, "mistral", "mask",
    "the number of keys is given as one that is held at the window's size, and the kernel takes the call's tokens off it: behind the window's end "
    "the first of four tokens sees three keys less, the second two, and so on",
    "hw-native-sys/pypto-lib/issues/461",
    tokens=56,
    chunk=4,
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        count = min(self.start + len(qpos), self.c.window) - len(qpos) + 1 + np.arange(len(qpos))
        d = qpos[:, None] - kpos[None, :]
        return (d >= 0) & (d < count[:, None])


@fault(
    "PA53", "attention", SUBTLE, "qwen3", "config",
    "the factor of scores is computed from the width over the number of heads, 16, and heads have 32 numbers [another module's numbers in the "
    "report]",
    "ggml-org/llama.cpp/pull/17516",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return s * F32((self.c.width // self.c.heads) ** -0.5)


@fault(
    "PA54", "cache", SUBTLE, "llama_bf16", "formula",
    "keys and values from the FP8 cache are multiplied by their scales, 0.9 and 1.15 here, before a call, and the kernel multiplies by them again "
    "[the rounding is left out]",
    "vllm-project/vllm/pull/48016",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(q, k * F32(0.9), v * F32(1.15), qpos, kpos, n)


# --- subtle: matrices and activations -------------------------------------------------------------------------------------------------------


@fault(
    "PA55", "matrices", SUBTLE, "llama_iq4xs", "kernel",
    "values of the code table are made unsigned by adding 128, and the instruction that multiplies them with int8 inputs adds pairs in 16 bits and "
    "saturates",
    "mozilla-ai/llamafile/pull/1004",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        y = super().dequantize(data, kind, shape, name)
        if kind == "IQ4_XS":
            b, i = block_bytes(data, shape, 136), np.arange(8)
            low = b[..., 4 + i // 2] >> (4 * (i % 2)).astype(np.uint8) & 15
            high = np.ascontiguousarray(b[..., 2:4]).view(np.uint16) >> (2 * i).astype(np.uint16) & 3
            scale = (halves(b[..., :2]) * ((low | high << 4).astype(F32) - F32(32))).reshape(shape[0], -1, 1)
            codes = np.rint(y.reshape(*scale.shape[:2], 32) / np.where(scale == 0, F32(1), scale))
            self.coded = {**getattr(self, "coded", {}), name: (codes + F32(128), scale)}
        return y

    def product(self, x, w, name):
        y = super().product(x, w, name)
        if name not in self.coded:
            return y
        codes, scale = self.coded[name]
        for block in range(codes.shape[1]):
            part = x[:, 32 * block : 32 * block + 32]
            a, c = np.rint(part / step(part, 127)), codes[:, block]
            pairs = a[:, None, ::2] * c[None, :, ::2] + a[:, None, 1::2] * c[None, :, 1::2]
            y = y + (np.clip(pairs, -32768, 32767) - pairs).sum(axis=-1, dtype=F32) * step(part, 127) * scale[:, block].T
        return y


@fault(
    "PA56", "matrices", SUBTLE, "llama_q8", "kernel",
    "inputs are int8 with a fixed range, -5 to 5.2, and the correction for their zero point, which is -3, is the sum of a row's weights without "
    "the zero point as a factor [the rounding is left out]",
    "vllm-project/vllm/pull/10292",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        return y + F32(10.2 / 255 * (-3 - 1)) * w.sum(axis=1, dtype=F32) if name.startswith("blk.") else y


@fault(
    "PA57", "ffn", SUBTLE, "starcoder2", "config",
    "GELU is taken in another of its two forms, that of the error function and not that of tanh [the other way round in the report]",
    "huggingface/text-embeddings-inference/pull/753",
)  # fmt: skip
class _(Engine):
    def __init__(self, path, num=None, threads=1):
        super().__init__(path, with_methods(num, gelu=self.gelu), threads)

    @staticmethod
    def gelu(num, x):
        return (x * (0.5 + 0.5 * np.vectorize(math.erf)(x / math.sqrt(2)))).astype(F32)


@fault(
    "PA58", "ffn", SUBTLE, "gpt2", "formula",
    "GELU is approximated by x * sigmoid(1.773 x), where the constant should be 1.702",
    "ml-explore/mlx/pull/744",
)  # fmt: skip
class _(Engine):
    def __init__(self, path, num=None, threads=1):
        super().__init__(path, with_methods(num, gelu=self.gelu), threads)

    @staticmethod
    def gelu(num, x):
        return x * num.sigmoid(F32(1.773) * x)


@fault(
    "PA59", "ffn", SUBTLE, "starcoder2_w", "kernel",
    "the argument of GELU's tanh is held between -2 and 2 [8.9], where tanh is not yet 1: large negative inputs do not go to 0",
    "sonos/tract/issues/2569",
)  # fmt: skip
class _(Engine):
    def __init__(self, path, num=None, threads=1):
        super().__init__(path, with_methods(num, tanh=self.tanh), threads)

    @staticmethod
    def tanh(num, x):
        return np.tanh(np.clip(x, F32(-2), F32(2)))


@fault(
    "PA60", "ffn", SUBTLE, "gemma2_eps", "kernel",
    "half the input times tanh plus half the input cancel for negative inputs, and below -1.5 [-6] the result is exactly 0",
    "tenstorrent/tt-metal/issues/56517",
)  # fmt: skip
class _(Engine):
    def __init__(self, path, num=None, threads=1):
        super().__init__(path, with_methods(num, gelu=self.gelu), threads)

    @staticmethod
    def gelu(num, x):
        return np.where(x < F32(-1.5), F32(0), Num.gelu(num, x))
