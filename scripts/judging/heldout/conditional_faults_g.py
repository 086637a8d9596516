"""Forty more faults that act under a condition only (N01..N40), by a seventh author: first those with one plain condition, then those
with two conditions at once, then those that change few numbers or change them little. Nearly half are ported from public reports on
inference engines, named in `source` (GitHub, without the host); sizes of tiles, lists and buffers are scaled down to the models. Others
are common practice.

FAULTS: id -> record as in conditional_faults_f.py.
`when` gets the model's configuration, the tokens, the chunk (or None), the prefix and the number of threads.
"""

from types import SimpleNamespace

import numpy as np
from engine import ADJACENT, F32, LAYER_NORM, Engine

FAULTS = {}


def fault(id, what, source, when, edge, smallest, on, off, tokens=None):
    def add(cls):
        FAULTS[id] = SimpleNamespace(id=id, model=on[0], what=what, when=when, edge=edge, on=on, off=off, tokens=tokens, engine=cls)
        FAULTS[id].smallest, FAULTS[id].source = smallest, source
        return cls

    return add


def spans(t, k, p):
    """The calls of a run as (first position, position behind the last): those of the prefix and those of the rest."""
    return [(i, min(i + (k or len(t)), hi)) for lo, hi in ((0, p), (p, len(t))) for i in range(lo, hi, k or len(t))]


def written(t, k, p):
    """The calls whose rows are in the dump."""
    return [(a, b) for a, b in spans(t, k, p) if a >= p]


def lengths(t, k, p):
    return [b - a for a, b in spans(t, k, p)]


def unpacked(engine, name, size, change):
    """A matrix as the engine unpacks it when `change` has been at its blocks of `size` bytes."""
    data = np.array(engine.raw[name].data).view(np.uint8)
    change(data.reshape(-1, size))
    return engine.dequantize(data, engine.c.types[name], engine.c.shapes[name], name).reshape(engine.c.shapes[name])


def with_zeros(s, count):
    """The softmax of scores of which `count` more are 0, without the columns of those."""
    s = np.concatenate([s, np.zeros((*s.shape[:-1], count), F32)], axis=-1)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return (e / e.sum(axis=-1, keepdims=True))[..., : s.shape[-1] - count]


def up(a, b):
    return -(-a // b)


# --- one plain condition: the length of a call, or where it begins ------------------------------------------------------------------------


@fault(
    "N01",
    "the kernel for one token turns the first head of the queries and of the keys; the other heads stay as they were",
    "oxiglade/mlx-rs/issues/359",
    lambda c, t, k, p, n: any(b - a == 1 and a > 0 for a, b in spans(t, k, p)),
    "calls of one token, but at position 0 (there nothing is turned)",
    ("tokens", 2),
    ("olmo2", 5, 4, 0, 1),
    ("olmo2", 6, 4, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        y = super().rope(x, pos, n, which)
        return np.concatenate([y[:, :1], x[:, 1:]], axis=1) if len(x) == 1 else y


@fault(
    "N02",
    "the offset of a later chunk is added to the length of the cache, which has grown by the chunks before it: positions count them twice",
    "mlx-node/mlx-node/pull/33",
    lambda c, t, k, p, n: any(a > (p if a >= p else 0) for a, b in spans(t, k, p)),
    "the second and later chunks of a prompt or of a prefix (one chunk behind a prefix is right)",
    ("calls", 2),
    ("llama_tied", 9, 8, 0, 1),
    ("llama_tied", 9, 8, 8, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos + self.start - (self.prefix if self.call == "prompt" else 0), n, which)


@fault(
    "N03",
    "attention for one token splits the keys in four, each a quarter rounded up; a part that is left without keys hands on the logarithm 0 "
    "of its sum, in place of minus infinity",
    "ROCm/aiter/pull/4420 (empty parts that are not guarded)",
    lambda c, t, k, p, n: any(b - a == 1 and up(b, up(b, 4)) < 4 for a, b in spans(t, k, p)),
    "calls of one token that see 1, 2, 3, 5, 6 or 9 keys (4, 7, 8 and all from 10 on are right)",
    ("tokens", 1),
    ("llama_mha", 6, 5, 0, 1),
    ("llama_mha", 8, 7, 0, 1),
)
class _(Engine):
    def softmax(self, s, n):
        m = s.shape[-1]
        return with_zeros(s, 4 - up(m, up(m, 4))) if s.shape[1] == 1 else super().softmax(s, n)


@fault(
    "N04",
    "the cache grows behind 32 tokens, and the zeroing of the new rows comes after the call that needed them: its keys and values there "
    "are gone",
    "kekzl/imp/pull/1709",
    lambda c, t, k, p, n: any(a <= 32 < b < len(t) for a, b in spans(t, k, p)),
    "a call that goes beyond 32 tokens, with another one behind it (which sees the zeros)",
    ("tokens", 34),
    ("minicpm", 34, None, 33, 1),
    ("minicpm", 33, None, 32, 1),
)
class _(Engine):
    def forward(self, tokens, start):
        super().forward(tokens, start)
        if start <= 32 < start + len(tokens):
            for k, v, _ in self.keys.values():
                k[32:], v[32:] = 0, 0


@fault(
    "N05",
    "a last call of fewer than 4 tokens is moved back until it has 4: the tokens in front of it are computed again, and are in the cache "
    "twice",
    "common practice: prompts in chunks of a fixed shape, the last of which is aligned to the end",
    lambda c, t, k, p, n: any(a > 0 and b - a < 4 for a, b in spans(t, k, p)),
    "calls of 1 to 3 tokens that do not begin the sequence (4 are right)",
    ("tokens", 2),
    ("llama_lin", 11, 8, 0, 1),
    ("llama_lin", 12, 8, 0, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        super().cache_put(n, k, v, pos)
        if self.start > 0 and len(k) < 4:
            places = np.unique(self.keys[n][2], return_index=True)[1]  # of the positions from 0 on
            again = places[max(self.start - 4 + len(k), 0) : self.start]
            self.keys[n] = tuple(np.concatenate([x[again], x]) for x in self.keys[n])


@fault(
    "N06",
    "the workspace of ffn_up has as many rows as the first call; the rows of a longer call that do not fit stay zero",
    "common practice: a buffer that is made at the first call and kept",
    lambda c, t, k, p, n: max(lengths(t, k, p)) > lengths(t, k, p)[0],
    "a call of more tokens than the first one (3 behind 2 are wrong, 2 behind 2 are right)",
    ("tokens", 3),
    ("llama_bf16", 5, None, 2, 1),
    ("llama_bf16", 4, None, 2, 1),
)
class _(Engine):
    def forward(self, tokens, start):
        self.room = len(tokens) if self.chunk_no == 0 else self.room
        super().forward(tokens, start)

    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name.endswith("ffn_up.weight"):
            y[self.room :] = 0
        return y


@fault(
    "N07",
    "the order of the query's axes is told by their sizes: with as many tokens as heads, the tokens are taken for heads",
    "common practice: a layout that is guessed from a shape",
    lambda c, t, k, p, n: c.heads in lengths(t, k, p),
    "calls of exactly 4 tokens in a model of 4 heads (3 and 5 are right)",
    ("tokens in a call", 4),
    ("mistral", 4, None, 0, 1),
    ("mistral", 5, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(np.ascontiguousarray(q.swapaxes(0, 1)) if len(q) == self.c.heads else q, k, v, qpos, kpos, n)


@fault(
    "N08",
    "where the keys fill the last tile of 16, the path for whole tiles is taken for it, which has no mask: queries see the tokens behind "
    "them",
    "common practice: a kernel with a special case for lengths that fill their tiles",
    lambda c, t, k, p, n: any(b - a >= 2 and b % 16 == 0 for a, b in spans(t, k, p)),
    "calls of two or more tokens that end at a multiple of 16 (15 and 17 tokens are right)",
    ("tokens", 16),
    ("llama_theta", 16, None, 0, 1),
    ("llama_theta", 17, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        end, seen = self.start + self.count, super().visible(qpos, kpos, n)
        return seen | (kpos >= end - 16) if end % 16 == 0 else seen


@fault(
    "N09",
    "calls of 20 tokens and more run in two halves that overlap; with an odd number the last token of the first half finds the input of "
    "the feed-forward of the next token in its place",
    "common practice: two micro-batches that share a buffer, one of them a row longer than its part",
    lambda c, t, k, p, n: any(m >= 20 and m % 2 for m in lengths(t, k, p)),
    "calls of an odd number of tokens, 21 or more (20 and 22 are right); one row",
    ("tokens in a call", 21),
    ("llama_eps", 21, None, 0, 1),
    ("llama_eps", 22, None, 0, 1),
)
class _(Engine):
    def feed_forward(self, x, n):
        if len(x) >= 20 and len(x) % 2:
            x = x.copy()
            x[len(x) // 2] = x[len(x) // 2 + 1]
        return super().feed_forward(x, n)


# --- one plain condition: threads ---------------------------------------------------------------------------------------------------------


@fault(
    "N10",
    "each of the ranks adds the whole bias of attn_output and of ffn_down to its part, and the parts are summed",
    "huggingface/text-generation-inference/issues/1036",
    lambda c, t, k, p, n: n > 1,
    "more than one thread (which stands for a rank), in models with those biases",
    ("threads", 2),
    ("starcoder2", 3, None, 0, 2),
    ("starcoder2", 3, None, 0, 1),
)
class _(Engine):
    def add_bias(self, y, name):
        for _ in range(self.threads - 1 if name.endswith(("attn_output", "ffn_down")) else 0):
            y = super().add_bias(y, name)
        return super().add_bias(y, name)


@fault(
    "N11",
    "ranks have a share of the vocabulary each; for a token of another rank they look up the first row of their share, and it is not "
    "masked",
    "common practice: a table that is shared out by rows (deepseek-ai/DeepSeek-V3/issues/298 asks for the reason of the mask)",
    lambda c, t, k, p, n: n > 1,
    "more than one thread (which stands for a rank)",
    ("threads", 2),
    ("qwen3moe", 2, None, 0, 2),
    ("qwen3moe", 2, None, 0, 1),
)
class _(Engine):
    def rows(self, tokens):
        table = self.w["token_embd.weight"]
        return sum(table[np.where((tokens >= a) & (tokens < b), tokens, a)] for a, b in self.split(len(table)))


@fault(
    "N12",
    "each rank normalises its share of the tokens in a buffer as long as the largest share, and the buffers are joined with their padding",
    "common practice: an all-gather of shares that differ by one row",
    lambda c, t, k, p, n: n > 1 and any(m % n for m in lengths(t, k, p)),
    "a call whose number of tokens is no multiple of the number of threads (which stand for ranks)",
    ("threads", 2),
    ("gemma", 5, None, 0, 2),
    ("gemma", 4, None, 0, 2),
)
class _(Engine):
    def norm(self, x, name, n):
        y = super().norm(x, name, n)
        if not name.endswith("ffn_norm") or self.threads == 1:
            return y
        room = up(len(x), self.threads)
        return np.concatenate([np.pad(y[a:b], ((0, room - b + a), (0, 0))) for a, b in self.split(len(x))])[: len(x)]


@fault(
    "N13",
    "attn_norm works in place on tiles of rows, one for each thread; the last tile is moved back until it fits, and some rows are "
    "normalised twice",
    "common practice: a clamped last tile, under an operation in place",
    lambda c, t, k, p, n: n > 1 and any(m % up(m, n) for m in lengths(t, k, p)),
    "a call that its tiles (tokens by threads, rounded up) do not divide: 3 tokens by 2 threads are wrong, 4 are right, 2 by 3 are right",
    ("threads", 2),
    ("llama", 3, None, 0, 2),
    ("llama", 4, None, 0, 2),
)
class _(Engine):
    def norm(self, x, name, n):
        y = super().norm(x, name, n)
        tile = up(len(x), self.threads)
        if name.endswith("attn_norm") and self.threads > 1 and len(x) % tile:
            again = slice(len(x) - tile, len(x) // tile * tile)
            y[again] = super().norm(y[again], name, n)
        return y


# --- one plain condition: a prefix, shapes ------------------------------------------------------------------------------------------------


@fault(
    "N14",
    "the kernel of the norm takes a row by groups of 8 lanes; the sums of the groups are read by the lanes of the last group, which are "
    "too few where it is not full",
    "ggml-org/llama.cpp/pull/26708",
    lambda c, t, k, p, n: 0 < c.width % 8 < up(c.width, 8),
    "a width that is no multiple of 8, and whose rest is less than the number of groups (70 is wrong, 64 is right)",
    ("width", 65),
    ("mixtral_w", 3, None, 0, 1),
    ("mixtral", 3, None, 0, 1),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        m = x.shape[-1]
        if not 0 < m % 8 < up(m, 8):
            return super().rms_norm(x, w, eps, name)
        return x / np.sqrt((x[..., : m % 8 * 8] ** 2).sum(axis=-1, keepdims=True) / F32(m) + F32(eps)) * w


@fault(
    "N15",
    "queries of a model with one key-value head are packed head by head, and the mask takes them for packed token by token",
    "common practice: query heads folded into the rows of one matrix",
    lambda c, t, k, p, n: c.kv_heads == 1 and c.heads > 1 and any(m >= 2 for m in lengths(t, k, p)),
    "two or more tokens in a call, in models with one key-value head",
    ("tokens in a call", 2),
    ("llama_mqa", 2, None, 0, 1),
    ("llama_mqa", 3, 1, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if self.c.kv_heads > 1:
            return super().attend(q, k, v, qpos, kpos, n)
        k, v, out = k.swapaxes(0, 1), v.swapaxes(0, 1), np.empty_like(q)
        for head in range(self.c.heads):
            seen = self.visible(qpos[(head * len(q) + np.arange(len(q))) // self.c.heads], kpos, n)
            out[:, head] = self.num.attend(self, q[None, :, head], k, v, seen, n)[0]
        return out


@fault(
    "N16",
    "a stored prefix comes back by pairs of layers: the last layer of an odd number finds zeros in its cache",
    "common practice: a cache that is moved by two layers at once",
    lambda c, t, k, p, n: p > 0 and c.n_layers % 2 == 1,
    "any prefix, in models with an odd number of layers",
    ("prefix", 1),
    ("qwen2", 3, None, 1, 1),
    ("smollm3", 3, None, 1, 1),
)
class _(Engine):
    def begin(self, call):
        super().begin(call)
        last = self.c.n_layers - 1
        if call == "prompt" and self.prefix and last % 2 == 0:
            k, v, pos = self.keys[last]
            self.keys[last] = np.zeros_like(k), np.zeros_like(v), pos


# --- two conditions at once ---------------------------------------------------------------------------------------------------------------


@fault(
    "N17",
    "for up to 5 rows, keys that several query heads share are read without their step from head to head: all heads see the first "
    "key-value head's keys",
    "ml-explore/mlx/issues/3480 (there in a product with quantised keys)",
    lambda c, t, k, p, n: 1 < c.kv_heads < c.heads and any(b - a <= 5 and b >= 2 for a, b in spans(t, k, p)),
    "calls of up to 5 tokens that see two keys or more (6 are right), in models whose heads share keys",
    ("tokens", 2),
    ("llama_g3", 5, None, 0, 1),
    ("llama_g3", 6, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if 1 < self.c.kv_heads < self.c.heads and len(q) <= 5:
            k = np.repeat(k[:, :1], self.c.kv_heads, axis=1)
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "N18",
    "until the cache of a windowed layer is full, its mask is as long as the window: one token attends to the empty slots, keys of zeros",
    "huggingface/transformers/pull/45940",
    lambda c, t, k, p, n: bool(c.local) and any(b - a == 1 and b < c.window for a, b in spans(t, k, p)),
    "calls of one token that see fewer keys than the window has (17 are wrong, 18 right)",
    ("tokens", 1),
    ("starcoder2_w", 17, 16, 0, 1),
    ("starcoder2_w", 18, 17, 0, 1),
)
class _(Engine):
    def softmax(self, s, n):
        if s.shape[1] == 1 and n in self.c.local and s.shape[-1] < self.c.window:
            return with_zeros(s, self.c.window - s.shape[-1])
        return super().softmax(s, n)


@fault(
    "N19",
    "the list of the tokens of each expert, made for more than 8 tokens, keeps the token 0 of the call only: the others get nothing from "
    "experts",
    "vllm-project/vllm-xpu-kernels/issues/453",
    lambda c, t, k, p, n: bool(c.experts) and any(m > 8 for m in lengths(t, k, p)),
    "more than 8 tokens in a call (9 are wrong, 8 right), in mixtures of experts",
    ("tokens in a call", 9),
    ("mixtral", 9, None, 0, 1),
    ("mixtral", 8, None, 0, 1),
)
class _(Engine):
    def combine(self, y, weights):
        out = super().combine(y, weights)
        if len(y) > 8:
            out[1:] = 0
        return out


@fault(
    "N20",
    "key-value heads are replicated where there are more ranks than heads, and a transferred prefix is laid out for one head of each rank: "
    "head i comes from the rank i",
    "sgl-project/sglang/pull/19086",
    lambda c, t, k, p, n: n > c.kv_heads > 1 and p > 0,
    "a prefix, and more threads (which stand for ranks) than key-value heads (3 by 2 heads is wrong, 2 right)",
    ("threads", 3),
    ("qwen3", 4, None, 2, 3),
    ("qwen3", 4, None, 2, 2),
)
class _(Engine):
    def begin(self, call):
        super().begin(call)
        heads = self.c.kv_heads
        if call == "prompt" and self.prefix and self.threads > heads:
            held = np.arange(heads) * heads // self.threads
            self.keys = {n: (k[:, held], v[:, held], pos) for n, (k, v, pos) in self.keys.items()}


@fault(
    "N21",
    "routed experts write over their input, and for more than 8 tokens the shared expert runs behind them, on what they wrote",
    "vllm-project/vllm/pull/28939",
    lambda c, t, k, p, n: "blk.0.ffn_up_shexp.weight" in c.shapes and any(m > 8 for m in lengths(t, k, p)),
    "more than 8 tokens in a call (9 are wrong, 8 right: there the two run on copies), in models with a shared expert",
    ("tokens in a call", 9),
    ("qwen2moe_s", 9, None, 0, 1),
    ("qwen2moe_s", 8, None, 0, 1),
)
class _(Engine):
    def feed_forward(self, x, n):
        if len(x) <= 8 or f"blk.{n}.ffn_up_shexp.weight" not in self.w:
            return super().feed_forward(x, n)
        y = self.experts(x, n)
        return self.num.add(y, self.put("ffn_shexp_out", self.shared_gate(self.dense(y, n, "_shexp"), y, n), n))


@fault(
    "N22",
    "the rows of a norm are read in words of 4 numbers: the sum of squares of a row takes in the first numbers of the next one",
    "ROCm/aiter/issues/5044",
    lambda c, t, k, p, n: c.width % 4 != 0 and any(m >= 2 for m in lengths(t, k, p)),
    "two or more tokens in a call (its last row is right), and a width that is no multiple of 4 (70)",
    ("tokens in a call", 2),
    ("mixtral_w", 2, None, 0, 1),
    ("mixtral_w", 3, 1, 0, 1),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        if x.ndim == 3 or x.shape[1] % 4 == 0:
            return super().rms_norm(x, w, eps, name)
        squares = (x * x).sum(axis=-1, keepdims=True)
        squares[:-1] += (x[1:, : -x.shape[1] % 4] ** 2).sum(axis=-1, keepdims=True)
        return x / np.sqrt(squares / F32(x.shape[1]) + F32(eps)) * w


@fault(
    "N23",
    "the fused kernel for one token turns neighbouring channels, in a family that turns the two halves of a head",
    "ohdearquant/lattice/pull/96 (there in all calls)",
    lambda c, t, k, p, n: c.arch not in ADJACENT and any(b - a == 1 and a > 0 for a, b in spans(t, k, p)),
    "calls of one token, but at position 0, in families that turn halves",
    ("tokens", 2),
    ("qwen3_yarn", 5, 4, 0, 1),
    ("qwen3_yarn", 6, 4, 0, 1),
)
class _(Engine):
    def rotate(self, x, sin, cos):
        if len(x) > 1 or self.c.arch in ADJACENT:
            return super().rotate(x, sin, cos)
        j, out = sin.shape[-1], x.copy()
        a, b = x[..., 0 : 2 * j : 2], x[..., 1 : 2 * j : 2]
        out[..., 0 : 2 * j : 2], out[..., 1 : 2 * j : 2] = a * cos - b * sin, a * sin + b * cos
        return out


@fault(
    "N24",
    "the path that continues a cache masks the scores and caps them then: a masked key has the cap's least score in place of none",
    "onnx/onnx/issues/7865 (there in the definition of an operator)",
    lambda c, t, k, p, n: bool(c.score_cap) and any(a > 0 and b - a >= 2 for a, b in spans(t, k, p)),
    "calls of two or more tokens that do not begin the sequence, in a model with capped scores",
    ("calls", 2),
    ("gemma2", 10, 8, 0, 1),
    ("gemma2", 9, 8, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if not self.c.score_cap or self.start == 0 or len(q) == 1:
            return super().attend(q, k, v, qpos, kpos, n)
        heads = self.kv_head(n)
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))
        s = np.where(self.visible(qpos, kpos, n), self.scale_scores(q @ k.swapaxes(1, 2), n), F32(-1e9))
        return (self.softmax(self.cap(s, n), n) @ v).swapaxes(0, 1)


@fault(
    "N25",
    "the decode kernel scales scores by the root of the head's width, in a model that brings its own factor",
    "common practice: a factor that only one of two kernels takes as an argument",
    lambda c, t, k, p, n: abs(c.attn_scale - c.head_dim**-0.5) > 1e-6 and any(b - a == 1 and a > 0 for a, b in spans(t, k, p)),
    "calls of one token that see two keys or more, in models with a factor for the scores",
    ("tokens", 2),
    ("granite", 5, 4, 0, 1),
    ("granite", 6, 4, 0, 1),
)
class _(Engine):
    def scale_scores(self, s, n):
        return s * F32(self.c.head_dim**-0.5) if s.shape[1] == 1 else super().scale_scores(s, n)


@fault(
    "N26",
    "the head for one token multiplies the logits by the scale that divides them elsewhere",
    "common practice: a scale that one path keeps as its reciprocal",
    lambda c, t, k, p, n: c.logit_scale != 1 and any(b - a == 1 for a, b in written(t, k, p)),
    "calls of one token (their logits), in models that scale logits",
    ("tokens in a call", 1),
    ("minicpm", 5, 4, 0, 1),
    ("minicpm", 6, 4, 0, 1),
)
class _(Engine):
    def scale_logits(self, y):
        return y * F32(self.c.logit_scale) if len(y) == 1 and self.c.logit_scale != 1 else super().scale_logits(y)


@fault(
    "N27",
    "for one token the query heads of a key-value head are padded to a power of two, and the result is read as if there were no padding",
    "FlashML-org/FreeToken/pull/177 (there a last tile of a group that goes on into the next group)",
    lambda c, t, k, p, n: (g := c.heads // c.kv_heads) & (g - 1) != 0 and 1 in lengths(t, k, p),
    "calls of one token, in models with 3 query heads to a key-value head (2 and 4 are right)",
    ("tokens in a call", 1),
    ("llama_g3", 4, 3, 0, 1),
    ("llama_g3", 5, 3, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y, group = super().attend(q, k, v, qpos, kpos, n), self.c.heads // self.c.kv_heads
        if len(q) > 1 or group & (group - 1) == 0:
            return y
        padded = np.zeros((1, self.c.kv_heads, 1 << group.bit_length(), y.shape[-1]), F32)
        padded[:, :, :group] = y.reshape(1, self.c.kv_heads, group, -1)
        return np.ascontiguousarray(padded.reshape(1, -1, y.shape[-1])[:, : self.c.heads])


@fault(
    "N28",
    "calls that are longer than the window take a kernel for global layers, with the base of their RoPE, in the windowed layers as well",
    "common practice: one table of sines for a call, chosen by the first layer's kernel",
    lambda c, t, k, p, n: bool(c.local_base) and any(m > c.window for m in lengths(t, k, p)),
    "more tokens in a call than the window has (17 are wrong, 16 right), in a model with two bases",
    ("tokens in a call", 17),
    ("gemma3", 17, None, 0, 1),
    ("gemma3", 16, None, 0, 1),
)
class _(Engine):
    def frequencies(self, n):
        if self.count <= self.c.window or n not in self.c.local:
            return super().frequencies(n)
        return super().frequencies(next(i for i in range(self.c.n_layers) if i not in self.c.local))


@fault(
    "N29",
    "the tiled kernel of RoPE, for more than 16 tokens, turns the last channels of a head where a part of each head is turned",
    "common practice: a part of a head that is counted from the wrong end, as in families that keep it there",
    lambda c, t, k, p, n: c.rope_width < c.head_dim and any(m > 16 for m in lengths(t, k, p)),
    "more than 16 tokens in a call (17 are wrong, 16 right), in models that turn a part of each head",
    ("tokens in a call", 17),
    ("phi2", 17, None, 0, 1),
    ("phi2", 16, None, 0, 1),
)
class _(Engine):
    def rotate(self, x, sin, cos):
        rest = x.shape[-1] - 2 * sin.shape[-1]
        if len(x) <= 16 or rest == 0:
            return super().rotate(x, sin, cos)
        return np.concatenate([x[..., :rest], super().rotate(x[..., rest:], sin, cos)], axis=-1)


@fault(
    "N30",
    "the last row of an odd call is left to a second pass for the rest, which each thread runs: attn_output's last row counts once for "
    "each",
    "ChenhanYu/hmlp/issues/7 (wrong fringes with more than one thread; the report does not say how)",
    lambda c, t, k, p, n: n > 1 and any(m % 2 and m >= 3 for m in lengths(t, k, p)),
    "more than one thread, and calls of an odd number of tokens, at least 3 (their last row)",
    ("threads", 2),
    ("stablelm", 3, None, 0, 2),
    ("stablelm", 4, None, 0, 2),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name.endswith("attn_output.weight") and len(x) % 2 and len(x) >= 3:
            y[-1] *= self.threads
        return y


# --- few numbers, or little ---------------------------------------------------------------------------------------------------------------


def embedding_conflicts(t):
    held = {}
    return any(held.setdefault(int(x) % 64, int(x)) != x for x in t)


@fault(
    "N31",
    "rows of the embedding are fetched into 64 slots by the id's last 6 bits, and a slot that is taken is not asked for its id",
    "common practice: an embedding in slow memory, with a directly mapped cache in front of it",
    lambda c, t, k, p, n: embedding_conflicts(t),
    "two tokens, of which one is the other plus 64",
    ("tokens", 2),
    ("qwen2", 4, None, 0, 1),
    ("qwen2", 2, None, 0, 1),
    tokens=np.array([6, 9, 70, 11]),
)
class _(Engine):
    def reset(self):
        super().reset()
        self.slots = {}

    def rows(self, tokens):
        return super().rows([self.slots.setdefault(int(x) % 64, int(x)) for x in tokens])


@fault(
    "N32",
    "logits are stored by twos; the number behind an odd row is the first one of the next row, which becomes zero",
    "common practice: vector stores that take no notice of a row's end",
    lambda c, t, k, p, n: c.vocab % 2 == 1 and any(b - a >= 2 for a, b in written(t, k, p)),
    "two or more tokens in a call, and an odd vocabulary (131): the first logit of all rows but the first",
    ("tokens in a call", 2),
    ("llama_wide", 2, None, 0, 1),
    ("llama_wide", 3, 1, 0, 1),
)
class _(Engine):
    def head(self, x):
        y = super().head(x)
        if y.shape[1] % 2:
            y[1:, 0] = 0
        return y


@fault(
    "N33",
    "layer norm for more than 20 rows divides the squares by one less than the width",
    "LBANN/lbann/pull/2024 (there in all calls)",
    lambda c, t, k, p, n: c.arch in LAYER_NORM and any(m > 20 for m in lengths(t, k, p)),
    "more than 20 tokens in a call (21 are wrong, 20 right), in a model with layer norm",
    ("tokens in a call", 21),
    ("gptneox", 21, None, 0, 1),
    ("gptneox", 20, None, 0, 1),
)
class _(Engine):
    def layer_norm(self, x, w, b):
        if len(x) <= 20:
            return super().layer_norm(x, w, b)
        x = x - x.mean(axis=-1, keepdims=True)
        y = x / np.sqrt((x * x).sum(axis=-1, keepdims=True) / F32(x.shape[1] - 1) + self.c.eps) * w
        return y if b is None else y + b


@fault(
    "N34",
    "the fused kernel for calls that continue a cache multiplies queries by the norm's weights when they have been turned",
    "common practice: a norm and RoPE in one kernel, in the wrong order",
    lambda c, t, k, p, n: c.arch.startswith("qwen3") and any(a > 0 and b - a >= 2 for a, b in spans(t, k, p)),
    "calls of two or more tokens that do not begin the sequence, in a model that normalises queries",
    ("calls", 2),
    ("qwen3moe", 10, 8, 0, 1),
    ("qwen3moe", 9, 8, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        w = self.w.get(f"blk.{n}.attn_q_norm.weight")
        if which == "k" or self.start == 0 or len(x) == 1 or w is None:
            return super().rope(x, pos, n, which)
        return super().rope(x / w, pos, n, which) * w


@fault(
    "N35",
    "the router for up to 4 tokens divides the chosen experts' weights by their sum, in a family that does not",
    "HabanaAI/vllm-fork/pull/671 (there in all calls)",
    lambda c, t, k, p, n: bool(c.experts) and not c.normalized and any(m <= 4 for m in lengths(t, k, p)),
    "calls of up to 4 tokens (5 are right), in mixtures whose weights are not divided by their sum",
    ("tokens in a call", 1),
    ("qwen2moe", 4, None, 0, 1),
    ("qwen2moe", 5, None, 0, 1),
)
class _(Engine):
    def router(self, logits):
        top, p = super().router(logits)
        return top, p / p.sum(axis=-1, keepdims=True) if len(p) <= 4 else p


@fault(
    "N36",
    "the int8 scale of a single token is taken from the first 128 inputs; larger ones behind them are clamped",
    "common practice: a maximum over one block of threads, without the second step",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "TQ2_0" and 1 in lengths(t, k, p),
    "calls of one token, and ternary matrices of more than 128 inputs (where the largest is not among the first 128)",
    ("tokens in a call", 1),
    ("bitnet", 1, None, 0, 1),
    ("bitnet", 2, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name not in self.int8 or len(x) > 1:
            return super().product(x, w, name)
        scale = F32(127) / np.maximum(np.abs(x[:, :128]).max(axis=-1, keepdims=True), F32(1e-5))
        return self.matmul(np.clip(np.rint(x * scale), -127, 127), w, name) / scale


@fault(
    "N37",
    "the kernel of Q5_K for one row finds the fifth bits of the last 64 weights of a block where those of the first 64 are, in ffn_up",
    "common practice: a mask that is moved by two bits in a loop, and wraps around",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q5_K" and 1 in lengths(t, k, p),
    "calls of one token, and a matrix of Q5_K",
    ("tokens in a call", 1),
    ("llama_q5k", 1, None, 0, 1),
    ("llama_q5k", 2, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("ffn_up.weight") and self.c.types[name] == "Q5_K" and len(x) == 1:

            def change(b):
                b[:, 16:48] = b[:, 16:48] & 0x3F | (b[:, 16:48] & 3) << 6

            w = unpacked(self, name, 176, change)
        return super().product(x, w, name)


@fault(
    "N38",
    "the kernel of IQ4_XS for more than 8 rows has the high bits of the first six scales of a block only, in attn_v",
    "common practice: a word of high bits that is shifted through a type too narrow for it",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "IQ4_XS" and any(m > 8 for m in lengths(t, k, p)),
    "calls of more than 8 tokens (9 are wrong, 8 right), and a matrix of IQ4_XS",
    ("tokens in a call", 9),
    ("llama_iq4xs", 9, None, 0, 1),
    ("llama_iq4xs", 8, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("attn_v.weight") and self.c.types[name] == "IQ4_XS" and len(x) > 8:

            def change(b):
                b[:, 3] &= 15

            w = unpacked(self, name, 136, change)
        return super().product(x, w, name)


@fault(
    "N39",
    "the kernel of Q4_K for 4 and more rows takes the high bits of the last four scales of a block from those of the minima, in ffn_gate",
    "common practice: six-bit scales and minima that are unpacked side by side, with one index for both",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q4_K" and any(m >= 4 for m in lengths(t, k, p)),
    "calls of 4 or more tokens (3 are right), and a matrix of Q4_K",
    ("tokens in a call", 4),
    ("llama_q4k", 4, None, 0, 1),
    ("llama_q4k", 3, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("ffn_gate.weight") and self.c.types[name] == "Q4_K" and len(x) >= 4:
            b = np.array(self.raw[name].data).view(np.uint8).reshape(-1, 144)
            d = np.ascontiguousarray(b[:, :2]).view(np.float16).astype(F32)
            extra = ((b[:, 8:12] >> 6).astype(F32) - (b[:, 4:8] >> 6)) * 16 * d  # of the scales of the last four sub-blocks
            low = b[:, 16:].reshape(-1, 4, 32)
            codes = np.stack([low & 15, low >> 4], axis=2).reshape(-1, 8, 32)[:, 4:]
            w = w.reshape(-1, 8, 32).copy()
            w[:, 4:] += extra[:, :, None] * codes
            w = w.reshape(self.c.shapes[name])
        return super().product(x, w, name)


@fault(
    "N40",
    "the kernel of Q6_K for more than 4 rows reads the high bits of a block's second half from those of the first, in ffn_down",
    "common practice: a pointer to the high bits that is not moved on between the two halves of a block",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q6_K" and any(m > 4 for m in lengths(t, k, p)),
    "calls of more than 4 tokens (5 are wrong, 4 right), and a matrix of Q6_K",
    ("tokens in a call", 5),
    ("llama_q6k", 5, None, 0, 1),
    ("llama_q6k", 4, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("ffn_down.weight") and self.c.types[name] == "Q6_K" and len(x) > 4:

            def change(b):
                b[:, 160:192] = b[:, 128:160]

            w = unpacked(self, name, 210, change)
        return super().product(x, w, name)
