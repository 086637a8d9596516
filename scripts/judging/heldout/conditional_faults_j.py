"""Forty more faults that act under a condition only (SA01..SA40), by an eleventh author: conditions of the length of a call, of where it begins or
ends, of the calls before it, of a prefix, of threads, of shapes, of the tokens themselves and of the type of a matrix. About half are ported from
public reports on inference engines, named in `source` (GitHub, without the host); sizes of tiles, pages, blocks and buffers are scaled down to the
models. Others are plausible. Eight of the reports (SA01, SA02, SA09, SA11, SA14, SA16, SA20, SA29) stand in earlier sets too.

FAULTS: id -> record as in conditional_faults_i.py.
`when` gets the model's configuration, the tokens, the chunk (or None), the prefix and the number of threads.
"""

from types import SimpleNamespace

import numpy as np
from engine import ADJACENT, F32, LAYER_NORM, Engine

FAULTS = {}
OWN = "plausible; no report"


def fault(id, what, source, when, edge, smallest, on, off, tokens=None):
    def add(cls):
        FAULTS[id] = SimpleNamespace(id=id, model=on[0], what=what, when=when, edge=edge, on=on, off=off, tokens=tokens, engine=cls)
        FAULTS[id].smallest, FAULTS[id].source = smallest, source
        return cls

    return add


def spans(t, k, p):  # the calls as (first position, position behind the last): those of the prefix, then those of the rest
    return [(i, min(i + (k or len(t)), hi)) for lo, hi in ((0, p), (p, len(t))) for i in range(lo, hi, k or len(t))]


def lengths(t, k, p):
    return [b - a for a, b in spans(t, k, p)]


def written(t, k, p):  # the lengths of the calls whose rows are in the dump
    return [b - a for a, b in spans(t, k, p) if a >= p]


def ones(t, k, p):  # the positions of calls of one token
    return [a for a, b in spans(t, k, p) if b - a == 1]


def up(x, size):  # how many blocks
    return -(-x // size)


def edited(engine, name, size, change):  # a matrix unpacked from its blocks of `size` bytes after `change` has been at them
    t = engine.raw[name]
    data = np.array(t.data).view(np.uint8)
    change(data.reshape(engine.c.shapes[name][0], -1, size))
    return engine.dequantize(data, engine.c.types[name], engine.c.shapes[name], name).reshape(engine.c.shapes[name])


def shares(size, n):
    edges = [size * i // n for i in range(n + 1)]
    return [b - a for a, b in zip(edges, edges[1:])]


# --- norms ---------------------------------------------------------------------------------------------------------------------------------


@fault(
    "SA01", "RMS norms sum squares in groups of 8 lanes; each lane of the last group, which is not full, adds up one group's sum, so sums beyond them are lost",
    "ggml-org/llama.cpp/pull/26708",
    lambda c, t, k, p, n: c.arch not in LAYER_NORM and 0 < c.width % 8 < up(c.width, 8),
    "models whose width is no multiple of 8, with fewer numbers in the last group of 8 than there are groups (70)", ("width", 9),
    ("mixtral_w", 7, None, 0, 1), ("llama", 7, None, 0, 1),
)  # fmt: skip
class PartialGroup(Engine):
    def rms_norm(self, x, w, eps, name):
        width = x.shape[-1]
        kept = width % 8 if 0 < width % 8 < up(width, 8) else up(width, 8)
        total = np.square(x[..., : 8 * kept]).sum(axis=-1, keepdims=True, dtype=F32)
        return self.num.gain(x * self.num.rsqrt(total / F32(width) + F32(eps)), w)


@fault(
    "SA14", "RMS norms write whole vectors of 4: the first numbers of the next row are normalised with this row's mean when a row is no multiple of 4",
    "ROCm/aiter/issues/5044",
    lambda c, t, k, p, n: c.arch not in LAYER_NORM and c.width % 4 and max(lengths(t, k, p)) > 1,
    "calls of 2 tokens or more, of models whose width is no multiple of 4 (70)", ("tokens in a call", 2),
    ("mixtral_w", 2, None, 0, 1), ("mixtral_w", 1, None, 0, 1),
)  # fmt: skip
class CrossesRows(Engine):
    def rms_norm(self, x, w, eps, name):
        y = super().rms_norm(x, w, eps, name)
        over = -x.shape[-1] % 4
        if over and x.ndim == 2 and len(x) > 1:
            scale = self.num.rsqrt(self.num.mean(x * x) + F32(eps))
            y[1:, :over] = x[1:, :over] * scale[:-1] * w[:over]
        return y


@fault(
    "SA27", "each thread takes the mean of its share of a row for layer norms, and the shares' means and squares are averaged as if shares were equal",
    OWN,
    lambda c, t, k, p, n: c.arch in LAYER_NORM and c.width % n,
    "numbers of threads that do not divide the width of a model with layer norms (3 and 5 of width 64)", ("threads", 3),
    ("gptneox", 7, None, 0, 3), ("gptneox", 7, None, 0, 4),
)  # fmt: skip
class EqualShares(Engine):
    def averaged(self, x):
        edges = [x.shape[-1] * i // self.threads for i in range(self.threads + 1)]
        parts = [x[..., a:b].mean(axis=-1, keepdims=True, dtype=F32) for a, b in zip(edges, edges[1:])]
        return np.mean(parts, axis=0, dtype=F32)

    def layer_norm(self, x, w, b):
        x = x - self.averaged(x)
        y = self.num.gain(x * self.num.rsqrt(self.averaged(x * x) + self.c.eps), w)
        return y if b is None else y + b


@fault(
    "SA40", "the launch of the norm of queries' and keys' heads covers 64 heads of tokens; those behind stay as they are",
    OWN,
    lambda c, t, k, p, n: c.arch == "qwen3" and max(lengths(t, k, p)) > 64 // c.heads,
    "calls of 17 tokens or more, with 4 heads (keys of 2 heads from 33 on)", ("tokens in a call", 17),
    ("qwen3", 17, None, 0, 1), ("qwen3", 16, None, 0, 1),
)  # fmt: skip
class ShortGrid(Engine):
    def qk_norm(self, x, name):
        w = self.w.get(name + ".weight")
        if w is None:
            return x
        rows = x.reshape(-1, w.size)
        y = self.rms_norm(rows, w, self.c.eps, name)
        y[64:] = rows[64:]
        return self.put("Qcur_normed" if "attn_q" in name else "Kcur_normed", y.reshape(x.shape), int(name.split(".")[1]))


# --- matrices --------------------------------------------------------------------------------------------------------------------------------


@fault(
    "SA02", "the kernel takes rows of a matrix by pairs; a thread whose share of rows is odd computes its last row with the row before",
    "ggml-org/llama.cpp/pull/10561",
    lambda c, t, k, p, n: max(lengths(t, k, p)) > 1 and any(x % 2 for s in matrices(c) for x in shares(s[0], n)),
    "calls of 2 tokens or more, with a number of threads that gives one of them an odd number of rows (3 and 5)", ("threads", 3),
    ("llama", 7, None, 0, 3), ("llama", 7, None, 0, 4),
)  # fmt: skip
class OddShares(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        for a, b in self.split(len(w)):
            if name.startswith("blk.") and len(x) > 1 and (b - a) % 2 and b - a > 1:
                y[..., b - 1] = y[..., b - 2]
        return y


def matrices(c):
    return [s for name, s in c.shapes.items() if name.startswith("blk.") and len(s) == 2 and name.endswith("weight")]


@fault(
    "SA03", "the kernel for one token and a matrix of fewer than 8 rows, the router's, leaves out what is behind the last whole block of 48 columns",
    "ml-explore/mlx/issues/3762",
    lambda c, t, k, p, n: 0 < c.experts < 8 and len(ones(t, k, p)),
    "calls of one token, of models with fewer than 8 experts", ("tokens in a call", 1),
    ("mixtral", 9, 8, 0, 1), ("mixtral", 16, 8, 0, 1),
)  # fmt: skip
class FewRows(Engine):
    def linear(self, x, name, n=None):
        w = self.w[name + ".weight"]
        if name.endswith("gate_inp") and len(w) < 8 and self.count == 1:
            kept = w.shape[1] // 48 * 48
            return self.num.mm(x[:, :kept], w[:, :kept])
        return super().linear(x, name, n)


@fault(
    "SA09", "repacked rows are all codes and then all scales; where a row is no multiple of 128, the scales are written over its last 8 codes",
    "ggml-org/llama.cpp/pull/20527",
    lambda c, t, k, p, n: any(c.types[x] == "Q4_0" and s[-1] % 128 for x, s in c.shapes.items()),
    "Q4_0 matrices whose rows are no multiple of 128", ("columns", 64),
    ("llama_q4", 7, None, 0, 1), ("llama_q41", 7, None, 0, 1),
)  # fmt: skip
class ScalesOverCodes(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind == "Q4_0" and shape[-1] % 128:
            data = np.array(data).view(np.uint8)
            b = data.reshape(shape[0], -1, 18)
            b[:, -1, 14:18] = b[:, :2, :2].reshape(shape[0], 4)
        return super().dequantize(data, kind, shape, name)


@fault(
    "SA13", "the kernel for several tokens takes 16 rows of a matrix at a time; ids behind the last 16 have logits of 0",
    "ikawrakow/ik_llama.cpp/pull/2469",
    lambda c, t, k, p, n: c.vocab % 16 and max(written(t, k, p)) >= 4,
    "calls of 4 tokens or more, of models whose vocabulary is no multiple of 16 (131)", ("tokens in a call", 4),
    ("llama_wide", 4, None, 0, 1), ("llama_wide", 3, None, 0, 1),
)  # fmt: skip
class SixteenRows(Engine):
    def head(self, x):
        y = super().head(x)
        if self.count >= 4:
            y[:, self.c.vocab // 16 * 16 :] = 0
        return y


@fault(
    "SA26", "ternary products take 4 tokens at a time; of 3 that are left, the last has its int8 codes made with the scale of the token before",
    OWN,
    lambda c, t, k, p, n: "TQ2_0" in c.types.values() and any(x % 4 == 3 for x in lengths(t, k, p)),
    "calls of 3, 7, 11, ... tokens, of ternary models", ("tokens in a call", 3),
    ("bitnet", 3, None, 0, 1), ("bitnet", 4, None, 0, 1),
)  # fmt: skip
class ScaleBefore(Engine):
    def product(self, x, w, name):
        if name in self.int8 and x.ndim == 2 and len(x) % 4 == 3:
            scale = F32(127) / np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-5))
            other = scale.copy()
            other[-1] = scale[-2]
            return self.matmul(np.clip(np.rint(x * other), -127, 127), w, name) / scale
        return super().product(x, w, name)


class OtherMatrices(Engine):
    kind, size, change = "", 0, None

    def acts(self):
        raise NotImplementedError

    def matmul(self, x, w, name):
        if self.c.types.get(name) == self.kind and self.acts():
            if not hasattr(self, "others"):
                self.others = {}
            if name not in self.others:
                self.others[name] = edited(self, name, self.size, type(self).change)
            w = self.others[name]
        return super().matmul(x, w, name)


@fault(
    "SA30", "Q5_1 products of one token leave out the minimum of every second block",
    OWN,
    lambda c, t, k, p, n: "Q5_1" in c.types.values() and len(ones(t, k, p)),
    "calls of one token, with Q5_1 matrices", ("tokens in a call", 1),
    ("llama_q51", 9, 8, 0, 1), ("llama_q51", 16, 8, 0, 1),
)  # fmt: skip
class NoMinimum(OtherMatrices):
    kind, size = "Q5_1", 24

    def change(b):
        b[:, 1::2, 2:4] = 0

    def acts(self):
        return self.count == 1


@fault(
    "SA31", "the fused Q4_K product of several tokens takes the scales of sub-blocks 4 to 7 without their two upper bits",
    "paiml/trueno/issues/182",
    lambda c, t, k, p, n: "Q4_K" in c.types.values() and max(lengths(t, k, p)) >= 4,
    "calls of 4 tokens or more, with Q4_K matrices", ("tokens in a call", 4),
    ("llama_q4k", 4, None, 0, 1), ("llama_q4k", 3, None, 0, 1),
)  # fmt: skip
class UpperBits(OtherMatrices):
    kind, size = "Q4_K", 144

    def change(b):
        b[:, :, 4:8] &= 0x3F

    def acts(self):
        return self.count >= 4


@fault(
    "SA33", "products of fewer than 8 tokens are two halves of the columns, and both add the bias",
    OWN,
    lambda c, t, k, p, n: "blk.0.attn_q.bias" in c.shapes and min(lengths(t, k, p)) < 8,
    "calls of fewer than 8 tokens, of models with biases", ("tokens in a call", 1),
    ("qwen2", 7, None, 0, 1), ("qwen2", 8, None, 0, 1),
)  # fmt: skip
class BiasTwice(Engine):
    def add_bias(self, y, name):
        y = super().add_bias(y, name)
        return super().add_bias(y, name) if self.count < 8 else y


@fault(
    "SA34", "the down matrix is split by columns to the threads in equal shares; the columns that are left over take no part",
    OWN,
    lambda c, t, k, p, n: c.ffn % n,
    "numbers of threads that do not divide the width of the feed-forward (5 of 96)", ("threads", 5),
    ("llama", 7, None, 0, 5), ("llama", 7, None, 0, 4),
)  # fmt: skip
class LeftOverColumns(Engine):
    def matmul(self, x, w, name):
        if "ffn_down" in name:
            kept = w.shape[1] // self.threads * self.threads
            x, w = x[:, :kept], w[:, :kept]
        return super().matmul(x, w, name)


# --- experts ---------------------------------------------------------------------------------------------------------------------------------


@fault(
    "SA06", "tokens are sorted to experts in blocks of 16, but there is one count for each expert: rows of later blocks are written over those of the first",
    "trymirai/uzu/pull/715",
    lambda c, t, k, p, n: c.experts and max(lengths(t, k, p)) > 16,
    "calls of 17 tokens or more, of models with experts", ("tokens in a call", 17),
    ("mixtral", 17, None, 0, 1), ("mixtral", 16, None, 0, 1),
)  # fmt: skip
class OneCount(Engine):
    def router(self, logits):
        self.top, weights = super().router(logits)
        return self.top, weights

    def combine(self, y, weights):
        out = y.copy()
        for e in range(self.c.experts):
            routes = np.argwhere(self.top == e)
            first = routes[routes[:, 0] < 16]
            for block in range(1, up(len(y), 16)):
                for (t, j), (to, slot) in zip(routes[routes[:, 0] // 16 == block], first):
                    out[to, slot] = y[t, j]
        return super().combine(out, weights)


@fault(
    "SA24", "when all routes of a call fit in one row of experts, sorting is left out, and a token's weights are taken in reverse order",
    "vllm-project/vllm/pull/55225",
    lambda c, t, k, p, n: c.experts and min(lengths(t, k, p)) * c.experts_used <= c.experts,
    "calls in which tokens times chosen experts are not more than the experts (up to 2 tokens of 2 of 4)", ("tokens in a call", 1),
    ("mixtral", 2, None, 0, 1), ("mixtral", 3, None, 0, 1),
)  # fmt: skip
class Unsorted(Engine):
    def combine(self, y, weights):
        return super().combine(y, weights[:, ::-1] if self.count * self.c.experts_used <= self.c.experts else weights)


@fault(
    "SA12", "calls of few tokens run the shared expert on a second stream, where its gate is not ready: it counts as 1",
    OWN,
    lambda c, t, k, p, n: "blk.0.ffn_up_shexp.weight" in c.shapes and min(lengths(t, k, p)) <= 4,
    "calls of up to 4 tokens, of models with a shared expert", ("tokens in a call", 1),
    ("qwen2moe_s", 4, None, 0, 1), ("qwen2moe_s", 5, None, 0, 1),
)  # fmt: skip
class SecondStream(Engine):
    def shared_gate(self, y, x, n):
        return y if self.count <= 4 else super().shared_gate(y, x, n)


# --- embeddings, positions and rotations -------------------------------------------------------------------------------------------------------


def cached_ids(tokens):  # what a cache of 16 rows gives that compares two bits of a tag
    rows, out = {}, []
    for x in (int(x) for x in tokens):
        if x % 16 not in rows or rows[x % 16] // 16 % 4 != x // 16 % 4:
            rows[x % 16] = x
        out.append(rows[x % 16])
    return np.array(out)


@fault(
    "SA22", "the embedding is split to the threads by equal numbers of ids; ids that are left over get zeros",
    OWN,
    lambda c, t, k, p, n: (np.asarray(t) >= c.vocab // n * n).any(),
    "ids from the largest multiple of the number of threads on (130 with 2, 129 and 130 with 3, 128 to 130 with 4, of 131)", ("threads", 2),
    ("llama_wide", 5, None, 0, 2), ("llama_wide", 5, None, 0, 1), np.array([5, 130, 7, 9, 11]),
)  # fmt: skip
class LeftOverIds(Engine):
    def rows(self, tokens):
        x = super().rows(tokens)
        return np.where((tokens >= self.c.vocab // self.threads * self.threads)[:, None], F32(0), x)


@fault(
    "SA23", "a call keeps 16 rows of the embedding in a cache that compares two bits of the tag: an id gets the row of one 64 below or above",
    OWN,
    lambda c, t, k, p, n: any((cached_ids(t[a:b]) != t[a:b]).any() for a, b in spans(t, k, p)),
    "calls with two ids that differ by 64, and none with the same last 4 bits in between", ("tokens in a call", 2),
    ("llama", 2, None, 0, 1), ("llama", 1, None, 0, 1), np.array([3, 67]),
)  # fmt: skip
class ShortTags(Engine):
    def rows(self, tokens):
        return super().rows(cached_ids(tokens))


@fault(
    "SA25", "learned positions are loaded by pages of 40; those of the second page are taken one row too early",
    OWN,
    lambda c, t, k, p, n: "position_embd.weight" in c.shapes and len(t) > 40,
    "positions from 40 on, of models with learned positions", ("position", 40),
    ("gpt2", 41, None, 0, 1), ("gpt2", 40, None, 0, 1),
)  # fmt: skip
class SecondPage(Engine):
    def learned(self, pos):
        return np.where(pos >= 40, pos - 1, pos)


@fault(
    "SA11", "in prefill by chunks, the offset inside the call is added to a position that has already moved: rotations of a later chunk are too far",
    "mlx-node/mlx-node/pull/33",
    lambda c, t, k, p, n: any(b - a > 1 and a not in (0, p) for a, b in spans(t, k, p)),
    "chunks of 2 tokens or more that are not the first of the prefix or of the rest", ("chunks", 2),
    ("llama", 10, 8, 0, 1), ("llama", 9, 8, 0, 1),
)  # fmt: skip
class CountedTwice(Engine):
    def rope(self, x, pos, n, which="q"):
        begin = 0 if self.call == "prefix" else self.prefix
        return super().rope(x, pos + (self.start - begin) if self.count > 1 else pos, n, which)


@fault(
    "SA21", "when the table of rotations grows beyond 32 positions, local layers' is made anew with the base of the others",
    OWN,
    lambda c, t, k, p, n: c.local_base and len(t) > 32,
    "calls that end behind position 31, in local layers of gemma3", ("position", 32),
    ("gemma3", 33, None, 0, 1), ("gemma3", 32, None, 0, 1),
)  # fmt: skip
class GrownTable(Engine):
    def frequencies(self, n):
        local = self.c.local_base
        if local and self.start + self.count > 32:
            self.c.local_base = None
            f = super().frequencies(n)
            self.c.local_base = local
            return f
        return super().frequencies(n)


@fault(
    "SA32", "the fused kernel for one token pairs a head's first half with its second, not the halves of the part that is turned",
    OWN,
    lambda c, t, k, p, n: c.rope_width < c.head_dim and c.arch not in ADJACENT and any(ones(t, k, p)),
    "calls of one token behind position 0, of models that turn a part of each head", ("tokens in a call", 1),
    ("stablelm", 9, 8, 0, 1), ("stablelm", 16, 8, 0, 1),
)  # fmt: skip
class WholeHalves(Engine):
    def rotate(self, x, sin, cos):
        j, size = sin.shape[-1], x.shape[-1]
        if self.count > 1 or self.c.arch in ADJACENT:
            return super().rotate(x, sin, cos)
        out, a, b = x.copy(), x[..., :j], x[..., size // 2 : size // 2 + j]
        out[..., :j], out[..., size // 2 : size // 2 + j] = a * cos - b * sin, a * sin + b * cos
        return out


@fault(
    "SA35", "a graph is used again when a call has as many tokens as the one before, and its positions for rotations are not set anew",
    OWN,
    lambda c, t, k, p, n: any(a == b > 1 for a, b in zip(lengths(t, k, p), lengths(t, k, p)[1:])),
    "calls of 2 tokens or more that are as long as the call before", ("calls", 2),
    ("llama", 16, 8, 0, 1), ("llama", 15, 8, 0, 1),
)  # fmt: skip
class GraphAgain(Engine):
    def reset(self):
        super().reset()
        self.graph = (0, 0)

    def forward(self, tokens, start):
        if len(tokens) == 1 or len(tokens) != self.graph[0]:
            self.graph = (len(tokens), start)
        super().forward(tokens, start)

    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos - self.start + self.graph[1], n, which)


# --- the cache -------------------------------------------------------------------------------------------------------------------------------


@fault(
    "SA04", "behind a prompt whose last block of 16 is at most half full, the rest of the block is cleared, and its first key with it",
    "vllm-project/vllm/issues/50749",
    lambda c, t, k, p, n: any(b - a > 1 and 1 <= b % 16 <= 8 and b < len(t) for a, b in spans(t, k, p)),
    "calls after a call of 2 tokens or more that ends 1 to 8 tokens into a block of 16", ("tokens in the call before", 2),
    ("llama", 9, 8, 0, 1), ("llama", 13, 12, 0, 1),
)  # fmt: skip
class HalfFullBlock(Engine):
    def forward(self, tokens, start):
        super().forward(tokens, start)
        end = start + len(tokens)
        if len(tokens) > 1 and 1 <= end % 16 <= 8:
            for n, (k, v, pos) in self.keys.items():
                self.keys[n] = (np.where((pos == end - end % 16)[:, None, None], F32(0), k), v, pos)


@fault(
    "SA07", "the cache's heads are read as if they followed each other after as many tokens as are read, but they are as far apart as the buffer is long",
    "ggml-org/llama.cpp/pull/28956",
    lambda c, t, k, p, n: c.kv_heads > 1 and any(b % 32 for _, b in spans(t, k, p)),
    "calls that do not end at a multiple of 32, by which the buffer grows, with two key-value heads or more", ("tokens", 1),
    ("llama", 33, None, 0, 1), ("llama", 32, None, 0, 1),
)  # fmt: skip
class PackedHeads(Engine):
    def packed(self, x):  # [S, G, K]
        count, heads, width = x.shape
        buffer = np.zeros((heads, up(count, 32) * 32, width), F32)
        buffer[:, :count] = x.swapaxes(0, 1)
        return buffer.reshape(-1, width)[: heads * count].reshape(heads, count, width).swapaxes(0, 1)

    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(q, self.packed(k), self.packed(v), qpos, kpos, n)


@fault(
    "SA15", "the rolling buffer of a window is read from the slot behind the last token, which is right only when it is full",
    "huggingface/transformers/pull/47708",
    lambda c, t, k, p, n: c.local and any(0 < a < c.window for a, _ in spans(t, k, p)),
    "calls that begin behind position 0 and before the window's length", ("position of the first token", 1),
    ("mistral", 10, None, 8, 1), ("mistral", 33, None, 32, 1),
)  # fmt: skip
class NotFullBuffer(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        a, window = self.start, self.c.window
        if n in self.c.local and 0 < a < window:
            slots = (a + np.arange(a)) % window
            k, v = (np.concatenate([np.concatenate([x[:a], np.zeros_like(x, shape=(window, *x.shape[1:]))])[slots], x[a:]]) for x in (k, v))
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "SA16", "a rolling buffer that has wrapped is put before the new keys as it lies in memory, and the mask counts its slots as if they were in order",
    "ollama/ollama/pull/14912",
    lambda c, t, k, p, n: c.local and any(a > c.window and a % c.window and b - a > 1 for a, b in spans(t, k, p)),
    "calls of 2 tokens or more that begin behind the window's length, but not at a multiple of it", ("position of the first token", 25),
    ("mistral", 40, None, 32, 1), ("mistral", 33, None, 32, 1),
)  # fmt: skip
class NotInOrder(Engine):
    def visible(self, qpos, kpos, n):
        a, window = self.start, self.c.window
        if window and n in self.c.local and a > window and a % window and self.count > 1:
            kpos = kpos.copy()
            kpos[a - window : a] = a - window + kpos[a - window : a] % window
        return super().visible(qpos, kpos, n)


def repeats(ids):  # blocks of 8 whose sum of ids has been seen, as (block, the block before)
    seen, out = {}, []
    for j in range(len(ids) // 8):
        i = seen.setdefault(int(np.sum(ids[8 * j : 8 * j + 8])) % 16, j)
        out += [(j, i)] if i != j else []
    return out


@fault(
    "SA18", "blocks of 8 tokens are found by a hash of 4 bits and not compared: a block with the hash of an earlier one gets the earlier one's keys and values",
    "openvinotoolkit/openvino.genai/issues/3722",
    lambda c, t, k, p, n: len(repeats(t[: spans(t, k, p)[-1][0]])),
    "a call after two whole blocks of 8 tokens whose sums of ids are equal modulo 16", ("tokens", 17),
    ("llama", 24, None, 16, 1), ("llama", 16, None, 8, 1), np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 1, 30] + [5] * 8),
)  # fmt: skip
class WeakHash(Engine):
    def reset(self):
        super().reset()
        self.ids = []

    def forward(self, tokens, start):
        super().forward(tokens, start)
        self.ids += [int(x) for x in tokens]
        for n, (k, v, pos) in self.keys.items():
            k, v = k.copy(), v.copy()
            for j, i in repeats(self.ids):
                k[8 * j : 8 * j + 8], v[8 * j : 8 * j + 8] = k[8 * i : 8 * i + 8], v[8 * i : 8 * i + 8]
            self.keys[n] = (k, v, pos)


@fault(
    "SA36", "the cache has 48 slots: later tokens are written over the first ones, which are then read with the mask of their old positions",
    OWN,
    lambda c, t, k, p, n: len(t) > 48,
    "calls that end behind position 47", ("position", 48),
    ("llama", 49, None, 0, 1), ("llama", 48, None, 0, 1),
)  # fmt: skip
class FewSlots(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(k) > 48:
            k, v = (np.concatenate([x[48:96], x[len(x) - 48 :]])[: len(x)] for x in (k, v))
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "SA37", "when a prefix leaves one token, the cache is trimmed before it is fed; a window's buffer that is full refuses, and the token before counts twice",
    "raullenchai/Rapid-MLX/pull/1124",
    lambda c, t, k, p, n: c.local and p >= c.window and len(t) - p == 1,
    "one token after a prefix of the window's length or more", ("prefix", 24),
    ("mistral", 33, None, 32, 1), ("mistral", 17, None, 16, 1),
)  # fmt: skip
class TrimRefused(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if n in self.c.local and self.call == "prompt" and self.prefix >= self.c.window and self.prompt - self.prefix == 1:
            at = self.prefix - 1
            k, v, kpos = (np.concatenate([x, x[at : at + 1]]) for x in (k, v, kpos))
        return super().attend(q, k, v, qpos, kpos, n)


# --- attention --------------------------------------------------------------------------------------------------------------------------------


@fault(
    "SA05", "in a call that does not begin at 0, the tile of keys at a block of 16 queries' end is masked for its first block only: later rows see ahead",
    "pytorch/executorch/pull/9105",
    lambda c, t, k, p, n: any(a > 0 and b - a >= 18 for a, b in spans(t, k, p)),
    "calls of 18 tokens or more that begin behind position 0", ("tokens in a call", 18),
    ("llama", 40, 20, 0, 1), ("llama", 37, 20, 0, 1),
)  # fmt: skip
class SeesAhead(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if self.start:
            row = np.arange(self.count)
            last = self.start + np.minimum(16 * (row // 16 + 1), self.count) - 1
            seen = np.where((row >= 16)[:, None], kpos[None, :] <= last[:, None], seen)
        return seen


@fault(
    "SA08", "when heads times tiles of 16 keys reach 4, another kernel takes single tokens; it reads the values of every second tile from the tile before",
    "NVIDIA/TensorRT-LLM/pull/18244",
    lambda c, t, k, p, n: any(a >= 16 and c.kv_heads * up(a + 1, 16) >= 4 for a in ones(t, k, p)),
    "calls of one token with 17 keys or more and two key-value heads (49 with one)", ("position", 16),
    ("llama", 17, None, 16, 1), ("llama", 16, None, 15, 1),
)  # fmt: skip
class TileBefore(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        at = np.arange(len(v))
        if self.count == 1 and self.c.kv_heads * up(len(v), 16) >= 4:
            v = v[at - 16 * (at // 16 % 2)]
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "SA10", "the mask is written with rows as long as there are keys, and read with rows of the next multiple of 8; what is behind its end counts as seen",
    OWN,
    lambda c, t, k, p, n: any(b - a >= 3 and b % 8 for a, b in spans(t, k, p)),
    "calls of 3 tokens or more that do not end at a multiple of 8", ("tokens in a call", 3),
    ("llama", 3, None, 0, 1), ("llama", 2, None, 0, 1),
)  # fmt: skip
class MaskRows(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        rows, cols = seen.shape
        at = np.arange(rows)[:, None] * up(cols, 8) * 8 + np.arange(cols)
        return np.where(at < seen.size, seen.ravel()[np.minimum(at, seen.size - 1)], True)


@fault(
    "SA17", "a prompt that follows a cached prefix does not see the tokens of the prefix's last page of 8, unless it is full",
    "tenstorrent/vllm/issues/415",
    lambda c, t, k, p, n: p % 8 and max(written(t, k, p)) > 1,
    "calls of 2 tokens or more after a prefix that is no multiple of 8", ("prefix", 1),
    ("llama", 24, None, 20, 1), ("llama", 24, None, 16, 1),
)  # fmt: skip
class LastPage(Engine):
    def visible(self, qpos, kpos, n):
        seen, p = super().visible(qpos, kpos, n), self.prefix
        return seen & ~((kpos >= p - p % 8) & (kpos < p))[None, :] if self.call == "prompt" and self.count > 1 else seen


@fault(
    "SA19", "heads are given to threads in turn; with more threads than heads, those left begin again at the first head and add their result to it",
    OWN,
    lambda c, t, k, p, n: n > c.heads,
    "more threads than heads (5 with 4)", ("threads", 5),
    ("llama", 2, None, 0, 5), ("llama", 2, None, 0, 4),
)  # fmt: skip
class BeginAgain(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        times = 1 + (np.arange(self.c.heads) < self.threads - self.c.heads)
        return y * times[:, None].astype(F32)


@fault(
    "SA20", "the graph for one token keeps the number of tiles of 16 keys that it was captured with: later tokens do not see the tiles behind",
    "paiml/aprender/pull/2030",
    lambda c, t, k, p, n: any(up(a + 1, 16) > up(ones(t, k, p)[0] + 1, 16) for a in ones(t, k, p)),
    "calls of one token with more tiles of 16 keys than the first call of one token had", ("position", 16),
    ("llama", 17, 1, 0, 1), ("llama", 16, 1, 0, 1),
)  # fmt: skip
class CapturedTiles(Engine):
    def reset(self):
        super().reset()
        self.tiles = None

    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if self.count == 1:
            self.tiles = self.tiles or up(len(kpos), 16)
            seen = seen & (kpos < 16 * self.tiles)[None, :]
        return seen


@fault(
    "SA28", "keys are split to the threads for the softmax; a thread without keys adds a score of 0 to the sum",
    OWN,
    lambda c, t, k, p, n: any(b < n for _, b in spans(t, k, p)),
    "calls that end with fewer keys than threads", ("threads", 2),
    ("llama", 3, None, 0, 4), ("llama", 4, None, 0, 4),
)  # fmt: skip
class IdleThreads(Engine):
    def softmax(self, s, n):
        top = s.max(axis=-1, keepdims=True)
        e = self.num.exp(s - top)
        return e / (self.num.total(e) + F32(max(self.threads - s.shape[-1], 0)) * self.num.exp(-top))


@fault(
    "SA29", "short calls that verify drafts split their keys; the merge has a stride of 0 between rows, and all of them get the last one's result",
    "vllm-project/flash-attention/pull/176",
    lambda c, t, k, p, n: any(a > 0 and 2 <= b - a <= 4 for a, b in spans(t, k, p)),
    "calls of 2 to 4 tokens that begin behind position 0", ("tokens in a call", 2),
    ("llama", 10, None, 8, 1), ("llama", 13, None, 8, 1),
)  # fmt: skip
class StrideZero(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        return np.repeat(y[-1:], len(y), axis=0) if self.start and 2 <= self.count <= 4 else y


def mask_rows(count, group):  # [T, group]: the row whose mask each query head of a token gets, when rows times heads are packed in tiles of 16
    at = np.arange(count)[:, None] * group + np.arange(group)
    return 16 // group * (at // 16) + at % 16 // group


@fault(
    "SA38", "query heads of a group are packed with tokens in tiles of 16; a tile's first token for the mask is its number times 16 over the group, rounded down",
    "Dao-AILab/flash-attention/pull/2186",
    lambda c, t, k, p, n: any((mask_rows(x, c.heads // c.kv_heads) != np.arange(x)[:, None]).any() for x in lengths(t, k, p)),
    "calls of 7 tokens or more, with 3 query heads for each key-value head", ("tokens in a call", 7),
    ("llama_g3", 7, None, 0, 1), ("llama_g3", 6, None, 0, 1),
)  # fmt: skip
class PackedQueries(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        heads, group = self.kv_head(n), self.c.heads // self.c.kv_heads
        row = mask_rows(len(q), group)[:, np.arange(self.c.heads) % group]  # [T, H]
        seen = self.visible(qpos, kpos, n)[row].swapaxes(0, 1)  # [H, T, S]
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))
        return self.num.attend(self, q, k, v, seen, n).swapaxes(0, 1)


@fault(
    "SA39", "sums of values are written by vectors of 8; the rest of a head is written for the first tile of 4 rows only, and is 0 in the others",
    OWN,
    lambda c, t, k, p, n: c.head_dim % 8 and max(lengths(t, k, p)) > 4,
    "calls of 5 tokens or more, of models whose heads are no multiple of 8 (20)", ("tokens in a call", 5),
    ("llama_wide", 5, None, 0, 1), ("llama_wide", 4, None, 0, 1),
)  # fmt: skip
class FirstTileOnly(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n).copy()
        y[4:, :, self.c.head_dim // 8 * 8 :] = 0
        return y
