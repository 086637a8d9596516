"""Forty more faults that act under a condition only (H01..H40), by a sixth author: half of them with one plain condition, then those with two
conditions at once, then those that change few numbers or change them little. About half are ported from public reports on inference engines,
named in `source` (GitHub, without the host); sizes of tiles, pages and buffers are scaled down to the models. Others are common practice.

FAULTS: id -> record as in conditional_faults_b.py, and `source`.
`when` gets the model's configuration, the tokens, the chunk (or None), the prefix and the number of threads.
"""

from types import SimpleNamespace

import numpy as np
from engine import F32, Engine

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


# --- one plain condition: the length of a call, or where it begins ------------------------------------------------------------------------


@fault(
    "H01",
    "a chunk of a longer prompt attends to the keys of its own tokens only; the path for one token reads the whole cache",
    "kekzl/imp/pull/114",
    lambda c, t, k, p, n: any(a > 0 and b - a >= 2 for a, b in spans(t, k, p)),
    "calls of two or more tokens that do not begin the sequence",
    ("calls", 2),
    ("qwen3", 20, 8, 0, 1),
    ("qwen3", 9, 8, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) > 1:
            k, v, kpos = (x[-len(q) :] for x in (k, v, kpos))
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "H02",
    "once the cache holds a whole tile of 32 keys, the tile with the keys of the call itself is not masked: a token sees those behind it",
    "tenstorrent/tt-metal/issues/48899",
    lambda c, t, k, p, n: any(a >= 32 and b - a >= 2 for a, b in spans(t, k, p)),
    "calls of two or more tokens that begin at position 32 or later (31 is right)",
    ("tokens", 34),
    ("gptneox", 40, None, 32, 1),
    ("gptneox", 40, None, 31, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return seen | (kpos >= self.start) if self.start >= 32 else seen


@fault(
    "H03",
    "the fused kernel writes turned keys to the cache, and leaves the tensor unturned from which the first call attends",
    "kvcache-ai/sglang/pull/66",
    lambda c, t, k, p, n: spans(t, k, p)[0][1] >= 2,
    "a first call of two or more tokens (at position 0 nothing is turned)",
    ("tokens in a call", 2),
    ("qwen3moe", 2, None, 0, 1),
    ("qwen3moe", 5, 1, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        if which == "k":
            self.unturned = x
        return super().rope(x, pos, n, which)

    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(q, self.unturned if self.start == 0 else k, v, qpos, kpos, n)


@fault(
    "H04",
    "the kernel that turns and stores keys copies the part of a head that it turns; the rest of a stored key stays zero, for later calls",
    "sgl-project/sglang/pull/22868",
    lambda c, t, k, p, n: c.rope_width < c.head_dim and any(a > 0 for a, b in spans(t, k, p)),
    "a call that does not begin the sequence, in models that turn a part of each head",
    ("calls", 2),
    ("phi2", 9, 8, 0, 1),
    ("phi2", 8, 8, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        k = k.copy()
        k[: -len(q), :, self.c.rope_width :] = 0
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "H05",
    "calls are padded to a power of two, and at padded lengths from 32 on the last token's logits are read one row too early",
    "vllm-project/tpu-inference/pull/3466 (wrong last logits at the padded shape; the report does not say why)",
    lambda c, t, k, p, n: any(b - a > 16 and (b - a) & (b - a - 1) for a, b in written(t, k, p)),
    "calls of more than 16 tokens whose number is no power of two (17 is wrong, 16 and 32 are right)",
    ("tokens in a call", 17),
    ("granite", 20, None, 0, 1),
    ("granite", 16, None, 0, 1),
)
class _(Engine):
    def head(self, x):
        m = len(x)
        if m > 16 and m & (m - 1):
            x = np.concatenate([x[:-1], x[-2:-1]])
        return super().head(x)


@fault(
    "H06",
    "the inner norm of the attention is launched for a block of 40 rows: the other rows go on as they were",
    "fla-org/flash-linear-attention/issues/906 (a part of the kernel that ends at a fixed number of tokens)",
    lambda c, t, k, p, n: any(m > 40 for m in lengths(t, k, p)),
    "more than 40 tokens in a call (41 is wrong, 40 is right), in models with a norm within the attention",
    ("tokens in a call", 41),
    ("bitnet", 41, None, 0, 1),
    ("bitnet", 40, None, 0, 1),
)
class _(Engine):
    def norm(self, x, name, n):
        y = super().norm(x, name, n)
        if name.endswith("attn_sub_norm"):
            y[40:] = x[40:]
        return y


@fault(
    "H07",
    "the tile for 33 to 48 rows has half of the warps that it needs: of each 32 outputs of attn_output the second 16 are not written",
    "ggml-org/llama.cpp/issues/28637 (warps that do not cover the tile)",
    lambda c, t, k, p, n: any(33 <= m <= 48 for m in lengths(t, k, p)),
    "calls of 33 to 48 tokens (32 and 49 are right)",
    ("tokens in a call", 33),
    ("llama_bf16", 33, None, 0, 1),
    ("llama_bf16", 32, None, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name.endswith("attn_output.weight") and 33 <= len(x) <= 48:
            y[:, np.arange(y.shape[1]) % 32 >= 16] = 0
        return y


@fault(
    "H08",
    "a call is worked off in micro-batches of 16 tokens, and a micro-batch attends before the one in front of it is in the cache",
    "common practice: micro-batches that overlap with each other, and one mask for a call",
    lambda c, t, k, p, n: any(m > 16 for m in lengths(t, k, p)),
    "more than 16 tokens in a call (17 is wrong, 16 is right)",
    ("tokens in a call", 17),
    ("llama", 17, None, 0, 1),
    ("llama", 16, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        batch = lambda pos: (pos - self.start) // 16  # noqa: E731
        return super().visible(qpos, kpos, n) & ((kpos < self.start) | (batch(kpos) == batch(qpos)[:, None]))


@fault(
    "H09",
    "the mask of a call is read from an address that is rounded down to 4 keys: queries miss as many of the newest keys as it is off",
    "common practice: a bias with rows that a vector kernel wants aligned",
    lambda c, t, k, p, n: any(a % 4 and b - a >= 2 for a, b in spans(t, k, p)),
    "calls of two or more tokens that begin at a position that is no multiple of 4",
    ("tokens", 3),
    ("llama_tied", 8, None, 3, 1),
    ("llama_tied", 8, None, 4, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        return super().visible(qpos - self.start % 4 if len(qpos) > 1 else qpos, kpos, n)


@fault(
    "H10",
    "a call that is longer than what the cache holds is taken for a new sequence, and attends to itself only (positions go on)",
    "common practice: prefill and decode told apart by comparing the number of queries with the length of the cache",
    lambda c, t, k, p, n: any(0 < a < b - a for a, b in spans(t, k, p)),
    "a call, not the first one, of more tokens than there were before it (5 behind 4 are wrong, 4 behind 4 are right)",
    ("tokens", 3),
    ("llama_mqa", 9, None, 4, 1),
    ("llama_mqa", 8, None, 4, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) > self.start:
            k, v, kpos = (x[-len(q) :] for x in (k, v, kpos))
        return super().attend(q, k, v, qpos, kpos, n)


# --- one plain condition: threads ---------------------------------------------------------------------------------------------------------


@fault(
    "H11",
    "matrix rows are multiplied two at a time within each thread's share; the last row of an odd share gets the result of the row before it",
    "ggml-org/llama.cpp/pull/10561",
    lambda c, t, k, p, n: n > 1 and any((c.ffn * (i + 1) // n - c.ffn * i // n) % 2 for i in range(n)),
    "a number of threads that gives one of them an odd number of the 152 rows of ffn_up (3 and 5 are wrong, 2 and 4 are right)",
    ("threads", 3),
    ("llama_wide", 3, None, 0, 3),
    ("llama_wide", 3, None, 0, 4),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        for a, b in self.split(len(w)):
            if name.endswith("ffn_up.weight") and self.threads > 1 and (b - a) % 2:
                y[:, b - 1] = y[:, b - 2]
        return y


@fault(
    "H12",
    "rows of values are copied to the cache by threads, as many by each; the rows that are left over are not copied",
    "common practice: rows for a thread by a division that rounds down",
    lambda c, t, k, p, n: n > 1 and any(m % n for m in lengths(t, k, p)),
    "a call whose number of tokens is no multiple of the number of threads",
    ("threads", 2),
    ("stablelm", 5, None, 0, 2),
    ("stablelm", 6, None, 0, 2),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        v = v.copy()
        v[len(v) // self.threads * self.threads :] = 0
        super().cache_put(n, k, v, pos)


@fault(
    "H13",
    "the norm has four slots for the threads' sums of squares: the fifth thread's takes the place of the first one's",
    "common practice: an array for partial sums with a fixed number of places",
    lambda c, t, k, p, n: n > 4,
    "5 threads or more (4 are right)",
    ("threads", 5),
    ("smollm3", 3, None, 0, 5),
    ("smollm3", 3, None, 0, 4),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        slots = {i % 4: (x[:, a:b] ** 2).sum(axis=-1, keepdims=True) for i, (a, b) in enumerate(self.split(x.shape[1]))}
        return x / np.sqrt(sum(slots.values()) / F32(x.shape[1]) + F32(eps)) * w


@fault(
    "H14",
    "each of the ranks adds the residual to its part of the feed-forward's output, and the parts are summed: it counts once for each rank",
    "mirage-project/mirage/pull/722",
    lambda c, t, k, p, n: n > 1,
    "more than one thread (which stands for a rank)",
    ("threads", 2),
    ("gemma", 3, None, 0, 2),
    ("gemma", 3, None, 0, 1),
)
class _(Engine):
    def residual(self, h, y, n, which):
        return super().residual(h * F32(self.threads) if which == "ffn" else h, y, n, which)


# --- one plain condition: positions, a prefix, the number of calls --------------------------------------------------------------------------


@fault(
    "H15",
    "32 threads sum up a row of the softmax, and each of them keeps its last term in place of adding: only the last 32 keys are in the sum",
    "NVIDIA/TensorRT/pull/1096 (wrong sums where rows are longer than the block of threads)",
    lambda c, t, k, p, n: len(t) > 32,
    "more than 32 keys (33 tokens are wrong, 32 right)",
    ("tokens", 33),
    ("starcoder2", 33, None, 0, 1),
    ("starcoder2", 32, None, 0, 1),
)
class _(Engine):
    def softmax(self, s, n):
        p, number = super().softmax(s, n), np.cumsum(~np.isneginf(s), axis=-1)
        return (p / np.where(number > number[..., -1:] - 32, p, 0).sum(axis=-1, keepdims=True)).astype(F32)


@fault(
    "H16",
    "the page table has 3 pages of 16 tokens; a fourth page takes the place of the first, and its keys and values are seen at both",
    "common practice: a table of pages that is used as a ring where the sequence is longer",
    lambda c, t, k, p, n: len(t) > 48,
    "more than 48 tokens (49 are wrong, 48 right)",
    ("tokens", 49),
    ("olmo2", 49, None, 0, 1),
    ("olmo2", 48, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        k, v = k.copy(), v.copy()
        for i in range(48, len(k)):
            k[i % 48], v[i % 48] = k[i], v[i]
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "H17",
    "keys that come back from a stored prefix are turned once more, as if they had been stored in front of RoPE",
    "NeuraLegion/shainet/pull/110 (cached keys turned again in each step)",
    lambda c, t, k, p, n: p >= 2,
    "a prefix of two or more tokens (position 0 is not turned)",
    ("prefix", 2),
    ("starcoder2", 4, None, 2, 1),
    ("starcoder2", 4, None, 1, 1),
)
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix:
            self.keys = {n: (self.rope(k, pos, n, "k"), v, pos) for n, (k, v, pos) in self.keys.items()}


@fault(
    "H18",
    "the cache is compacted in front of the fourth call, and the moves are carried out for the values only: two of them change places",
    "ggml-org/llama.cpp/issues/12253 (a cache that is corrupt behind a defragmentation)",
    lambda c, t, k, p, n: len(spans(t, k, p)) >= 4,
    "four calls or more (3 are right), those of a prefix counted",
    ("calls", 4),
    ("llama_q8", 13, 4, 0, 1),
    ("llama_q8", 12, 4, 0, 1),
)
class _(Engine):
    def forward(self, tokens, start):
        if self.chunk_no == 3:
            self.keys = {n: (k, np.concatenate([v[1::-1], v[2:]]), pos) for n, (k, v, pos) in self.keys.items()}
        super().forward(tokens, start)


@fault(
    "H19",
    "positions are cut out of a table of 48 rows by an operation that moves a slice back until it fits: a continued call gets earlier positions",
    "jax-ml/jax/pull/34257 (the behaviour of dynamic_slice)",
    lambda c, t, k, p, n: any(a > 0 and b > 48 and b - a <= 48 for a, b in spans(t, k, p)),
    "a call of up to 48 tokens, not the first one, that ends beyond position 48, in models with learned positions",
    ("tokens", 49),
    ("gpt2", 49, None, 40, 1),
    ("gpt2", 48, None, 40, 1),
)
class _(Engine):
    def learned(self, pos):
        return pos - max(pos[-1] - 47, 0) if pos[0] > 0 and len(pos) <= 48 else pos


# --- one plain condition: shapes ------------------------------------------------------------------------------------------------------------


@fault(
    "H20",
    "the specialised router for 8 experts of which 3 are used takes the branch that does not divide the weights by their sum",
    "MetaX-MACA/vLLM-metax/issues/270 (a wrong branch for one pair of numbers)",
    lambda c, t, k, p, n: (c.experts, c.experts_used) == (8, 3),
    "exactly 8 experts, of which 3 are used",
    ("experts", 8),
    ("qwen3moe", 3, None, 0, 1),
    ("mixtral", 3, None, 0, 1),
)
class _(Engine):
    def router(self, logits):
        top, weights = super().router(logits)
        if (self.c.experts, self.c.experts_used) == (8, 3):
            weights = np.take_along_axis(self.num.softmax(logits), top, axis=-1)
        return top, weights


# --- two conditions at once -----------------------------------------------------------------------------------------------------------------


@fault(
    "H21",
    "for one token the second residual is added in pieces of 4 columns, as many for each thread; the pieces that are left over stay zero",
    "ikawrakow/ik_llama.cpp/pull/2357",
    lambda c, t, k, p, n: 1 in lengths(t, k, p) and c.width // 4 % n != 0,
    "calls of one token, and a number of threads that does not divide the 16 pieces (3 and 5 are wrong, 2 and 4 are right)",
    ("threads", 3),
    ("minicpm", 4, 3, 0, 3),
    ("minicpm", 4, 3, 0, 4),
)
class _(Engine):
    def residual(self, h, y, n, which):
        out = super().residual(h, y, n, which)
        if which == "ffn" and len(h) == 1:
            out[:, h.shape[1] // 4 // self.threads * self.threads * 4 :] = 0
        return out


@fault(
    "H22",
    "behind 40 keys the decode kernel takes a sparse view that the model does not have: the first 8 keys and the last 16",
    "entrius/gittensor/pull/1764",
    lambda c, t, k, p, n: any(b - a == 1 and b > 40 for a, b in spans(t, k, p)),
    "calls of one token that see more than 40 keys (41 are wrong, 40 right)",
    ("tokens", 41),
    ("llama_theta", 41, None, 40, 1),
    ("llama_theta", 42, None, 40, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return seen & ((kpos < 8) | (kpos > qpos[0] - 16)) if len(qpos) == 1 and qpos[0] >= 40 else seen


@fault(
    "H23",
    "two cores list the tokens of each expert, the second with room for half of the call, rounded down: the last token of an odd call lands "
    "in the list of the next expert, in place of its first choice",
    "tenstorrent/tt-metal/pull/50934 (there only where the list of an expert is full)",
    lambda c, t, k, p, n: bool(c.experts) and any(m % 2 and m >= 3 for m in lengths(t, k, p)),
    "an odd number of tokens in a call, at least 3, in mixtures of experts (its last token)",
    ("tokens in a call", 3),
    ("mixtral", 3, None, 0, 1),
    ("mixtral", 4, None, 0, 1),
)
class _(Engine):
    def router(self, logits):
        top, weights = super().router(logits)
        if len(top) % 2 and len(top) >= 3:
            top[-1, 0] = (top[-1, 0] + 1) % self.c.experts
        return top, weights


@fault(
    "H24",
    "ffn_down takes its inputs in pairs of tiles of 32; with an odd number of tiles the last pair reads on into the next row of inputs and of "
    "weights",
    "NVIDIA/cutlass/issues/3568",
    lambda c, t, k, p, n: c.ffn // 32 % 2 == 1 and any(m >= 2 for m in lengths(t, k, p)),
    "two or more tokens in a call (behind the last row nothing is read), with 96 inputs",
    ("tokens in a call", 2),
    ("qwen2", 2, None, 0, 1),
    ("qwen2", 3, 1, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name.endswith("ffn_down.weight") and x.shape[1] // 32 % 2:
            y[:-1, :-1] += x[1:, :32] @ w[1:, :32].T
        return y


@fault(
    "H25",
    "the seventh layer shares its keys' buffer with the first: for earlier calls it reads the first layer's keys",
    "common practice: buffers of layers that are taken by turns from a pool of six, as many as a pattern of windows has",
    lambda c, t, k, p, n: c.n_layers > 6 and any(a > 0 for a, b in spans(t, k, p)),
    "more than 6 layers, and a call that is not the first one",
    ("calls", 2),
    ("gemma3", 9, 8, 0, 1),
    ("gemma3", 8, 8, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if n >= 6 and len(k) > len(q):
            k = np.concatenate([self.keys[n - 6][0][: -len(q)], k[-len(q) :]])
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "H26",
    "the path for one token adds the shared expert without the sigmoid of its gate",
    "common practice: a separate layer for decoding, written from a model whose shared expert has no gate",
    lambda c, t, k, p, n: c.arch == "qwen2moe" and 1 in lengths(t, k, p),
    "calls of one token, in a model whose shared expert has a gate",
    ("tokens in a call", 1),
    ("qwen2moe_s", 5, 4, 0, 1),
    ("qwen2moe_s", 6, 4, 0, 1),
)
class _(Engine):
    def shared_gate(self, y, x, n):
        return y if len(x) == 1 else super().shared_gate(y, x, n)


@fault(
    "H27",
    "the kernel that verifies two to four drafted tokens caps the scores, and so does the function that it calls",
    "common practice: a cap in the kernel's scaling and again in its epilogue",
    lambda c, t, k, p, n: bool(c.score_cap) and any(2 <= m <= 4 for m in lengths(t, k, p)),
    "calls of 2 to 4 tokens (1 and 5 are right), in a model with capped scores",
    ("tokens in a call", 2),
    ("gemma2", 4, None, 0, 1),
    ("gemma2", 5, None, 0, 1),
)
class _(Engine):
    def cap(self, s, n):
        s = super().cap(s, n)
        return super().cap(s, n) if 2 <= s.shape[1] <= 4 else s


@fault(
    "H28",
    "a single token is looked up by a path that does not multiply the embedding by the root of the width",
    "common practice: a fast path for the lookup of one row",
    lambda c, t, k, p, n: c.embed_scale != 1 and 1 in lengths(t, k, p),
    "calls of one token, in a model that scales its embedding",
    ("tokens in a call", 1),
    ("gemma3", 5, 4, 0, 1),
    ("gemma3", 6, 4, 0, 1),
)
class _(Engine):
    def scale_embedding(self, h):
        return h if len(h) == 1 else super().scale_embedding(h)


@fault(
    "H29",
    "the decode graph runs the feed-forward beside the attention: of one token it gets the layer's input, where it should get the sum",
    "common practice: two graphs for a family with both kinds of residuals, of which one ignores the flag",
    lambda c, t, k, p, n: not c.parallel and 1 in lengths(t, k, p),
    "calls of one token, in a model whose branches come one after the other",
    ("tokens in a call", 1),
    ("gptneox", 5, 4, 0, 1),
    ("gptneox", 6, 4, 0, 1),
)
class _(Engine):
    def layer(self, h, n, pos):
        self.layer_input = h
        return super().layer(h, n, pos)

    def norm(self, x, name, n):
        return super().norm(self.layer_input if name.endswith("ffn_norm") and len(x) == 1 else x, name, n)


@fault(
    "H30",
    "decoding keeps the first key as an attention sink in layers with a window, for a model that has none",
    "common practice: streaming attention that is on by default for caches with a window",
    lambda c, t, k, p, n: bool(c.local) and any(b - a == 1 and a >= c.window for a, b in spans(t, k, p)),
    "calls of one token at position 24 or later, where the window is 24",
    ("tokens", 25),
    ("mistral", 25, 1, 0, 1),
    ("mistral", 24, 1, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return seen | (kpos == 0) if len(qpos) == 1 and n in self.c.local else seen


@fault(
    "H31",
    "the kernel of ternary matrices takes 4 tokens at a time with codes from 0 to 2, and takes the first token's sum of codes off all 4",
    "common practice: unsigned codes whose offset is corrected by the sum of the activations",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "TQ2_0" and any(m >= 4 for m in lengths(t, k, p)),
    "calls of 4 or more tokens (3 are right; rows behind the last 4 are right), and a ternary matrix",
    ("tokens in a call", 4),
    ("bitnet_mha", 4, None, 0, 1),
    ("bitnet_mha", 3, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if name not in self.int8:
            return y
        scale, row = F32(127) / np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-5)), np.arange(len(x))
        sums = np.rint(x * scale).reshape(len(x), -1, 256).sum(axis=-1)
        first = np.where(row < len(x) // 4 * 4, row // 4 * 4, row)
        d = np.ascontiguousarray(np.array(self.raw[name].data).reshape(len(w), -1, 66)[:, :, 64:]).view(np.float16)[:, :, 0]
        return y + (sums - sums[first]) @ d.astype(F32).T / scale


@fault(
    "H32",
    "the fused norm and RoPE for more than 16 tokens loads one vector of weights for both: keys are normalised with the queries' weights",
    "common practice: a fused kernel for queries and keys that gets one pointer to the weights",
    lambda c, t, k, p, n: any(m > 16 for m in lengths(t, k, p)),
    "more than 16 tokens in a call (17 is wrong, 16 is right), in a model that normalises queries and keys",
    ("tokens in a call", 17),
    ("qwen3", 17, None, 0, 1),
    ("qwen3", 16, None, 0, 1),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        if name.endswith("attn_k_norm") and len(x) > 16:
            w = self.w[name.replace("attn_k", "attn_q") + ".weight"]
        return super().rms_norm(x, w, eps, name)


# --- few numbers, or little -----------------------------------------------------------------------------------------------------------------


@fault(
    "H33",
    "angles are reduced by 6.28 in place of twice pi before sine and cosine are looked up",
    "common practice: a range reduction with a constant of few digits",
    lambda c, t, k, p, n: len(t) > 7,
    "position 7 and later ones (8 tokens are wrong, 7 right), where the first pair has gone around once",
    ("tokens", 8),
    ("qwen2", 8, None, 0, 1),
    ("qwen2", 7, None, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        angle = np.multiply.outer(np.asarray(pos, np.float64), self.frequencies(n))[:, None, :]
        return self.rotate(x, *self.num.sin_cos(angle - np.floor(angle / 6.28) * 6.28))


@fault(
    "H34",
    "the window begins at a tile of 4 keys: a query sees up to 3 keys that are older",
    "common practice: a loop over tiles of keys that masks the end and not the beginning",
    lambda c, t, k, p, n: bool(c.local) and len(t) > c.window,
    "more tokens than the window (19 are wrong, 18 right); queries whose window begins within a tile",
    ("tokens", 19),
    ("starcoder2_w", 19, None, 0, 1),
    ("starcoder2_w", 18, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        if n not in self.c.local:
            return super().visible(qpos, kpos, n)
        return (kpos <= qpos[:, None]) & (kpos >= np.maximum(qpos - self.c.window + 1, 0)[:, None] // 4 * 4)


@fault(
    "H35",
    "the fused kernel for one token adds the bias of the queries behind RoPE, so that it is not turned",
    "common practice: a bias in the epilogue of a kernel that turns its result",
    lambda c, t, k, p, n: any(b - a == 1 and a > 0 for a, b in spans(t, k, p)),
    "calls of one token, but at position 0, in models whose queries have a bias",
    ("tokens", 2),
    ("qwen2", 5, 4, 0, 1),
    ("qwen2", 6, 4, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        bias = self.w.get(f"blk.{n}.attn_q.bias")
        if which == "k" or len(x) > 1 or bias is None:
            return super().rope(x, pos, n, which)
        return super().rope(x - bias.reshape(x.shape[1:]), pos, n, which) + bias.reshape(x.shape[1:])


@fault(
    "H36",
    "Q5_0 repacked for 4 and more rows has another loop for the blocks behind the last 4 of a row: it takes the first half's fifth bits twice",
    "ikawrakow/ik_llama.cpp/pull/951",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q5_0" and c.width % 128 != 0 and any(m >= 4 for m in lengths(t, k, p)),
    "calls of 4 or more tokens (3 are right), and matrices of Q5_0 whose rows are no multiple of 128",
    ("tokens in a call", 4),
    ("llama_q50", 4, None, 0, 1),
    ("llama_q50", 3, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if self.c.types[name] == "Q5_0" and len(x) >= 4 and (blocks := w.shape[1] // 32) % 4:

            def change(b):
                rest = b.reshape(-1, blocks, 22)[:, blocks // 4 * 4 :]
                rest[..., 4:6] = rest[..., 2:4]

            w = unpacked(self, name, 22, change)
        return super().product(x, w, name)


@fault(
    "H37",
    "the kernel of Q2_K for one row shifts the bytes of the scales as signed numbers: minima from 8 on become negative, in ffn_down",
    "common practice: nibbles that are taken out of signed bytes",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q2_K" and 1 in lengths(t, k, p),
    "calls of one token, and a matrix of Q2_K",
    ("tokens in a call", 1),
    ("llama_q2k", 1, None, 0, 1),
    ("llama_q2k", 2, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("ffn_down.weight") and self.c.types[name] == "Q2_K" and len(x) == 1:
            b = np.array(self.raw[name].data).reshape(-1, 84)
            least = np.ascontiguousarray(b[:, 82:]).view(np.float16).astype(F32) * F32(16) * (b[:, :16] >= 128)
            w = (w.reshape(-1, 16, 16) + least[:, :, None]).reshape(w.shape)
        return super().product(x, w, name)


@fault(
    "H38",
    "the kernel of Q5_1 for more than 8 rows finds the fifth bits of a block's second half 12 bits on, where they are 16 bits on, in attn_v",
    "common practice: a shift by 12 that should leave the bit at 16, with the bit taken at 1",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q5_1" and any(m > 8 for m in lengths(t, k, p)),
    "calls of more than 8 tokens (9 is wrong, 8 is right), and a matrix of Q5_1",
    ("tokens in a call", 9),
    ("llama_q51", 9, None, 0, 1),
    ("llama_q51", 8, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("attn_v.weight") and self.c.types[name] == "Q5_1" and len(x) > 8:

            def change(b):
                bits = np.ascontiguousarray(b[:, 4:8]).view("<u4")
                b[:, 4:8] = (bits & 0xFFFF | bits << 4 & 0xFFFF0000).view(np.uint8)

            w = unpacked(self, name, 24, change)
        return super().product(x, w, name)


@fault(
    "H39",
    "the kernel of Q3_K for 2 to 4 rows takes the high bits of the last four scales from the place of the four before, in attn_output",
    "common practice: six-bit scales that are put together in a loop with one shift too few",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q3_K" and any(2 <= m <= 4 for m in lengths(t, k, p)),
    "calls of 2 to 4 tokens (1 and 5 are right), and a matrix of Q3_K",
    ("tokens in a call", 2),
    ("llama_q3k", 2, None, 0, 1),
    ("llama_q3k", 5, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("attn_output.weight") and self.c.types[name] == "Q3_K" and 2 <= len(x) <= 4:

            def change(b):
                b[:, 104:108] = b[:, 104:108] & 0x3F | (b[:, 104:108] & 0x30) << 2

            w = unpacked(self, name, 110, change)
        return super().product(x, w, name)


@fault(
    "H40",
    "the kernel of IQ3_S for more than 4 rows takes the low nibble of the last byte of scales for both of its groups, in attn_k",
    "common practice: a matrix kernel beside the one for few rows, with its own unpacking of the scales",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "IQ3_S" and any(m > 4 for m in lengths(t, k, p)),
    "calls of more than 4 tokens (5 is wrong, 4 is right), and a matrix of IQ3_S",
    ("tokens in a call", 5),
    ("llama_iq3s", 5, None, 0, 1),
    ("llama_iq3s", 4, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("attn_k.weight") and self.c.types[name] == "IQ3_S" and len(x) > 4:

            def change(b):
                b[:, 109] = b[:, 109] & 15 | b[:, 109] << 4

            w = unpacked(self, name, 110, change)
        return super().product(x, w, name)
