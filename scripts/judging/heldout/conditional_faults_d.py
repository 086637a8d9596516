"""Forty more faults that act under a condition only (F01..F40), by a fourth author: half of them with one plain condition, then those with
two conditions at once, then those that change few numbers or change them little. Most are ported from public reports on inference engines,
named in `source` (GitHub, without the host); sizes of tiles, windows and buffers are scaled down to the models. Others are common practice.

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


# --- one plain condition: the length of a call ------------------------------------------------------------------------------------------


@fault(
    "F01",
    "the vector kernel for small batches does not step its output by the batch: of attn_output only the first row is written",
    "ml-explore/mlx/pull/1758",
    lambda c, t, k, p, n: any(2 <= m <= 5 for m in lengths(t, k, p)),
    "calls of 2 to 5 tokens (1 and 6 are right)",
    ("tokens in a call", 2),
    ("qwen3", 2, None, 0, 1),
    ("qwen3", 1, None, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name.endswith("attn_output.weight") and 2 <= len(x) <= 5:
            y[1:] = 0
        return y


@fault(
    "F02",
    "a call is cut into blocks of 32 tokens, and each block but the first reads the tokens of the block before it",
    "tinygrad/tinygrad/pull/15182",
    lambda c, t, k, p, n: any(b - a > 32 and (t[a + 32 : b] != t[a : b - 32]).any() for a, b in spans(t, k, p)),
    "more than 32 tokens in a call (33 is wrong, 32 is right), and tokens that differ at that distance",
    ("tokens in a call", 33),
    ("llama_tied", 33, None, 0, 1),
    ("llama_tied", 32, None, 0, 1),
)
class _(Engine):
    def rows(self, tokens):
        if len(tokens) > 32:
            tokens = np.concatenate([tokens[:32], tokens[:-32]])
        return super().rows(tokens)


@fault(
    "F03",
    "attention under a sliding window computes as many rows as the window is long: the other rows of a call stay zero",
    "nntrainer/nntrainer/pull/3989",
    lambda c, t, k, p, n: bool(c.local) and any(m > c.window for m in lengths(t, k, p)),
    "more tokens in a call than the window (17 is wrong, 16 is right)",
    ("tokens in a call", 17),
    ("gemma3", 17, None, 0, 1),
    ("gemma3", 16, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        if n in self.c.local:
            y[self.c.window :] = 0
        return y


@fault(
    "F04",
    "the rows for each expert are estimated as tokens * used / experts, rounded down; where that is 0 the experts are not launched",
    "linkedin/Liger-Kernel/pull/1368",
    lambda c, t, k, p, n: c.experts and any(m * c.experts_used < c.experts for m in lengths(t, k, p)),
    "calls of 1 or 2 tokens (6 experts, 2 of them used; 3 is right)",
    ("tokens in a call", 1),
    ("qwen2moe", 2, None, 0, 1),
    ("qwen2moe", 3, None, 0, 1),
)
class _(Engine):
    def combine(self, y, weights):
        return super().combine(y, weights) * F32(len(y) * self.c.experts_used >= self.c.experts)


@fault(
    "F05",
    "rows that do not fill a tile of 4 go to another kernel, which has the two middle rows of each 4 interleaved weight rows of ffn_up exchanged",
    "common practice: weights repacked for 4 rows at a time, with a second kernel for the rest",
    lambda c, t, k, p, n: c.types["blk.0.ffn_up.weight"] == "Q4_0" and any(m % 4 for m in lengths(t, k, p)),
    "calls whose length is no multiple of 4 (5 is wrong, 4 is right)",
    ("tokens in a call", 1),
    ("llama_q4", 5, None, 0, 1),
    ("llama_q4", 4, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if name.endswith("ffn_up.weight") and self.c.types[name] == "Q4_0":
            rest = y[len(x) // 4 * 4 :]
            rest[:, 1::4], rest[:, 2::4] = rest[:, 2::4].copy(), rest[:, 1::4].copy()
        return y


@fault(
    "F06",
    "the int8 kernel takes 8 tokens at a time; for the queries, later blocks use the scales of the first 8 tokens",
    "microsoft/BitNet/issues/600 (a kernel whose fallback disagrees with the packing; here with its scales)",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "TQ2_0" and any(m > 8 for m in lengths(t, k, p)),
    "more than 8 tokens in a call (9 is wrong, 8 is right)",
    ("tokens in a call", 9),
    ("bitnet_mha", 9, None, 0, 1),
    ("bitnet_mha", 8, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if name in self.int8 and name.endswith("attn_q.weight") and len(x) > 8:
            most = np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-5))
            y = y / most * most[np.arange(len(x)) % 8]
        return y


@fault(
    "F07",
    "the GEMM for few rows splits the sum in two and adds the bias to both parts: the biases of query, key and value count twice",
    "common practice: split-K, with the bias in the epilogue of each part",
    lambda c, t, k, p, n: "blk.0.attn_q.bias" in c.shapes and any(m <= 4 for m in lengths(t, k, p)),
    "calls of at most 4 tokens (5 is right)",
    ("tokens in a call", 1),
    ("qwen2", 4, None, 0, 1),
    ("qwen2", 5, None, 0, 1),
)
class _(Engine):
    def add_bias(self, y, name):
        y = super().add_bias(y, name)
        return super().add_bias(y, name) if len(y) <= 4 and name.endswith(("attn_q", "attn_k", "attn_v")) else y


# --- one plain condition: threads -------------------------------------------------------------------------------------------------------


@fault(
    "F08",
    "threads form a grid of two columns; with an odd number the last thread's rows of ffn_gate are those of the thread before it",
    "openvinotoolkit/mlas/pull/10",
    lambda c, t, k, p, n: n > 1 and n % 2 == 1,
    "3, 5, ... threads (1, 2 and 4 are right)",
    ("threads", 3),
    ("granite", 7, None, 0, 3),
    ("granite", 7, None, 0, 2),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name.endswith("ffn_gate.weight") and self.threads > 1 and self.threads % 2:
            a, b = self.split(len(w))[-1]
            y[:, a:b] = y[:, 2 * a - b : a]
        return y


@fault(
    "F09",
    "each thread takes heads // threads heads of the attention; nobody takes those that remain",
    "ikawrakow/ik_llama.cpp/pull/337 (where the strange number of heads only stopped the run)",
    lambda c, t, k, p, n: n < c.heads and c.heads % n != 0,
    "fewer threads than heads, and no divisor of their number (6 heads: 4 and 5 are wrong; 1, 2 and 3 are right)",
    ("threads", 4),
    ("llama_g3", 7, None, 0, 4),
    ("llama_g3", 7, None, 0, 3),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        if self.threads < self.c.heads:
            y[:, self.c.heads // self.threads * self.threads :] = 0
        return y


@fault(
    "F10",
    "each of several ranks normalises its part of a query or key by the mean of that part, where the norm spans all heads",
    "common practice: tensor parallelism of a model whose query norm spans all heads",
    lambda c, t, k, p, n: c.arch == "olmo2" and n > 1,
    "two or more threads",
    ("threads", 2),
    ("olmo2", 7, None, 0, 2),
    ("olmo2", 7, None, 0, 1),
)
class _(Engine):
    def qk_norm(self, x, name):
        w, n = self.w[name + ".weight"], int(name.split(".")[1])
        parts = [self.rms_norm(x[:, a:b], w[a:b], self.c.eps, name) for a, b in self.split(w.size)]
        return self.put("Qcur_normed" if "attn_q" in name else "Kcur_normed", np.concatenate(parts, axis=-1), n)


# --- one plain condition: prefix, position, later calls ---------------------------------------------------------------------------------


@fault(
    "F11",
    "a cached prefix is stored one token short where it fills its last block of 16: what follows begins one position too early",
    "waybarrios/vllm-mlx/pull/311",
    lambda c, t, k, p, n: p > 0 and p % 16 == 0,
    "a prefix of 16, 32, ... tokens (15 and 17 are right)",
    ("prefix", 16),
    ("llama_theta", 18, None, 16, 1),
    ("llama_theta", 18, None, 15, 1),
)
class _(Engine):
    def positions(self, start, count):
        early = self.call == "prompt" and self.prefix > 0 and self.prefix % 16 == 0
        return super().positions(start - early, count)


@fault(
    "F12",
    "learned positions behind a prefix count from the prefix's length rounded up to a multiple of 8",
    "common practice: prompts padded to a tile, with positions that count the padding",
    lambda c, t, k, p, n: "position_embd.weight" in c.shapes and p % 8 != 0,
    "a prefix whose length is no multiple of 8 (7 is wrong, 8 is right)",
    ("prefix", 1),
    ("gpt2", 10, None, 7, 1),
    ("gpt2", 10, None, 8, 1),
)
class _(Engine):
    def learned(self, pos):
        return pos + -self.prefix % 8 if self.call == "prompt" else pos


@fault(
    "F13",
    "the path that continues a cache turns the queries and keys of layers that have no RoPE",
    "common practice: a second attention path for cached calls, written before the model whose layers differ",
    lambda c, t, k, p, n: bool(c.no_rope) and any(a > 0 for a, b in spans(t, k, p)),
    "a call that does not begin the sequence: a second chunk, or a prefix",
    ("calls", 2),
    ("smollm3", 9, None, 8, 1),
    ("smollm3", 9, None, 0, 1),
)
class _(Engine):
    def turned(self, x, pos, n):
        return self.rope(x, pos, n) if n in self.c.no_rope and self.start else x

    def cache_put(self, n, k, v, pos):
        super().cache_put(n, self.turned(k, pos, n), v, pos)

    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(self.turned(q, qpos, n), k, v, qpos, kpos, n)


@fault(
    "F14",
    "YaRN is switched on when a call ends beyond the original context, and is off before",
    "pytorch/torchtitan/pull/4117",
    lambda c, t, k, p, n: c.rope_scaling == "yarn" and any(b <= c.rope_original for a, b in spans(t, k, p)),
    "a call that ends within the first 64 positions (one call of 65 tokens is right)",
    ("tokens", 1),
    ("qwen3_yarn", 64, None, 0, 1),
    ("qwen3_yarn", 65, None, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        c = self.c
        kept = c.rope_scaling, c.rope_scale, c.rope_magnitude
        if self.start + self.count <= c.rope_original:
            c.rope_scaling, c.rope_scale, c.rope_magnitude = "linear", 1.0, 1
        y = super().rope(x, pos, n, which)
        c.rope_scaling, c.rope_scale, c.rope_magnitude = kept
        return y


@fault(
    "F15",
    "the second stage of a pipeline (layers from the fifth on) gets the positions of the call before",
    "common practice: metadata of micro-batches that is sent to the second stage one step late",
    lambda c, t, k, p, n: c.n_layers > 4 and any(a > 0 for a, b in spans(t, k, p)),
    "a second call: a chunk shorter than the prompt, or a prefix",
    ("calls", 2),
    ("gemma3", 8, 7, 0, 1),
    ("gemma3", 8, 8, 0, 1),
)
class _(Engine):
    def reset(self):
        super().reset()
        self.starts = []

    def positions(self, start, count):
        self.starts.append(start)
        return super().positions(start, count)

    def rope(self, x, pos, n, which="q"):
        late = self.starts[-1] - self.starts[-2] if n >= 4 and len(self.starts) > 1 else 0
        return super().rope(x, pos - late, n, which)


@fault(
    "F16",
    "a graph is captured at the second call of one token, with its position as a constant; later calls of one token replay it",
    "alibaba/rtp-llm/pull/1337",
    lambda c, t, k, p, n: lengths(t, k, p).count(1) > 2,
    "three or more calls of one token",
    ("calls of one token", 3),
    ("llama", 3, 1, 0, 1),
    ("llama", 2, 1, 0, 1),
)
class _(Engine):
    def reset(self):
        super().reset()
        self.ones = []

    def positions(self, start, count):
        self.ones += [start] if count == 1 else []
        return super().positions(start, count)

    def rope(self, x, pos, n, which="q"):
        replayed = self.count == 1 and len(self.ones) > 2
        return super().rope(x, np.array(self.ones[1:2]) if replayed else pos, n, which)


# --- one plain condition: tokens --------------------------------------------------------------------------------------------------------


@fault(
    "F17",
    "the embedding takes the ids behind the last full tile of 64 rows for padding: their rows are zero",
    "NeelM0906/Mference/pull/30 (where the rows of padding were taken for tokens)",
    lambda c, t, k, p, n: (t >= c.vocab // 64 * 64).any(),
    "a token id of 128 or more (the vocabulary has 131)",
    ("token id", 128),
    ("llama_wide", 6, None, 0, 1),
    ("llama_wide", 6, None, 0, 1),
    tokens=np.array([5, 90, 128, 31, 77, 12]),
)
class _(Engine):
    def rows(self, tokens):
        return super().rows(tokens) * (tokens < self.c.vocab // 64 * 64)[:, None].astype(F32)


@fault(
    "F18",
    "a token 2 (end of text) within the prompt is taken for the end of a packed document: no later token attends across it",
    "common practice: packed sequences told apart by their end tokens",
    lambda c, t, k, p, n: (t[:-1] == 2).any(),
    "token 2 anywhere but at the end",
    ("tokens behind a token 2", 1),
    ("llama_mha", 9, None, 0, 1),
    ("llama_mha", 9, None, 0, 1),
    tokens=np.array([11, 40, 63, 8, 71, 90, 33, 2, 56]),
)
class _(Engine):
    def reset(self):
        super().reset()
        self.document = np.zeros(1, np.int64)

    def rows(self, tokens):
        self.document = np.concatenate([self.document, self.document[-1] + np.cumsum(tokens == 2)])
        return super().rows(tokens)

    def visible(self, qpos, kpos, n):
        return super().visible(qpos, kpos, n) & (self.document[qpos][:, None] == self.document[kpos])


# --- two conditions ---------------------------------------------------------------------------------------------------------------------


@fault(
    "F19",
    "all rows of a call get the window of its first row: the later ones see more keys than they may",
    "pytorch/executorch/pull/21857",
    lambda c, t, k, p, n: bool(c.local) and any(b - a > 1 and b > c.window for a, b in spans(t, k, p)),
    "a call of two or more tokens that ends beyond the window (position 24 and later)",
    ("tokens", 25),
    ("phi3", 25, None, 0, 1),
    ("phi3", 24, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos
        return (d >= 0) & (kpos > qpos[0] - self.c.window) if n in self.c.local else d >= 0


@fault(
    "F20",
    "calls of one token attend to the whole cache in layers with a sliding window",
    "EricLBuehler/mistral.rs/issues/246",
    lambda c, t, k, p, n: bool(c.local) and any(b - a == 1 and b > c.window for a, b in spans(t, k, p)),
    "a call of one token at position 20 or later, where the window is 20",
    ("tokens", 21),
    ("qwen2_w", 21, None, 20, 1),
    ("qwen2_w", 20, None, 19, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos
        return d >= 0 if len(qpos) == 1 else super().visible(qpos, kpos, n)


@fault(
    "F21",
    "the cache of a windowed layer is a ring of two windows, and a call is written to it before its queries read: the first queries of a long "
    "call lose keys of their window",
    "pytorch/executorch/pull/20346",
    lambda c, t, k, p, n: bool(c.local) and any(max(a - c.window + 1, 0) < b - 2 * c.window for a, b in spans(t, k, p)),
    "a call of more than 32 tokens, or of more than 17 that ends beyond position 32 (windows of 16)",
    ("tokens", 33),
    ("gemma2", 33, None, 0, 1),
    ("gemma2", 32, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        kept = kpos >= self.start + self.count - 2 * self.c.window
        return seen & (kept | (qpos[:, None] == kpos)) if n in self.c.local else seen


@fault(
    "F22",
    "a ring of one window holds the cache; once it has wrapped, calls of several tokens are masked by slot instead of by position",
    "huggingface/candle/pull/2901",
    lambda c, t, k, p, n: bool(c.local) and any(a > 0 and b - a > 1 and b > c.window for a, b in spans(t, k, p)),
    "a later call of two or more tokens that ends beyond the window (24)",
    ("tokens", 25),
    ("mistral", 25, None, 23, 1),
    ("mistral", 24, None, 22, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        end, w = self.start + self.count, self.c.window
        if not self.start or self.count == 1 or end <= w:
            return super().visible(qpos, kpos, n)
        return (qpos[:, None] == kpos) | ((kpos % w <= qpos[:, None] % w) & (kpos >= end - w))


@fault(
    "F23",
    "a window of draft tokens that is verified (2 to 8 behind a cache) is turned by the position of its first token",
    "jundot/omlx/pull/2363",
    lambda c, t, k, p, n: any(a > 0 and 2 <= b - a <= 8 for a, b in spans(t, k, p)),
    "a call of 2 to 8 tokens that does not begin the sequence",
    ("tokens behind the prefix", 2),
    ("qwen3", 10, None, 8, 1),
    ("qwen3", 9, None, 8, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        draft = self.start and 2 <= len(pos) <= 8
        return super().rope(x, np.full_like(pos, pos[0]) if draft else pos, n, which)


@fault(
    "F24",
    "the first call behind a prefix, if it has one token, is written one slot too far: attention takes in the empty slot, a key of zeros",
    "microsoft/onnxruntime-genai/pull/2354",
    lambda c, t, k, p, n: p > 0 and (k == 1 or len(t) - p == 1),
    "a prefix, and then a call of one token",
    ("prefix", 1),
    ("gemma", 2, None, 1, 1),
    ("gemma", 3, None, 1, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if self.call == "prompt" and self.prefix and self.start == self.prefix and len(q) == 1:
            k, v, kpos = np.concatenate([k, k[-1:] * 0]), np.concatenate([v, v[-1:] * 0]), np.concatenate([kpos, qpos])
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "F25",
    "attention for several rows counts the head's channels in tiles of 16, rounded down: the last ones take no part and stay zero",
    "flashinfer-ai/flashinfer/issues/4299",
    lambda c, t, k, p, n: c.head_dim % 16 != 0 and any(m > 1 for m in lengths(t, k, p)),
    "heads of 24 channels, in calls of two or more tokens",
    ("tokens in a call", 2),
    ("gemma2", 2, None, 0, 1),
    ("gemma2", 1, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) > 1 and q.shape[-1] % 16:
            q, v = q.copy(), v.copy()
            q[..., q.shape[-1] // 16 * 16 :] = v[..., q.shape[-1] // 16 * 16 :] = 0
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "F26",
    "the cache grows by 32 rows; where its last row is in use but the old buffer was not full, the newest old row is not copied",
    "InternLM/xtuner/pull/1015 (a cache whose length is no multiple of its step)",
    lambda c, t, k, p, n: any(a % 32 and -(-b // 32) > -(-a // 32) for a, b in spans(t, k, p)),
    "a later call that crosses position 32 (or 64) from within a block",
    ("tokens", 33),
    ("stablelm", 33, None, 31, 1),
    ("stablelm", 32, None, 31, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        if self.start % 32 and -(-(self.start + len(k)) // 32) > -(-self.start // 32):
            old = tuple(x.copy() for x in self.keys[n])
            old[0][-1] = old[1][-1] = 0
            self.keys[n] = old
        super().cache_put(n, k, v, pos)


@fault(
    "F27",
    "a step that fills a group of 16 flushes it to the packed cache before it attends, and reads the packed cache as it was: of the group it "
    "sees only itself",
    "rajveer43/VeloxQuant-MLX/pull/163 (flushes of a residual group in decode)",
    lambda c, t, k, p, n: any(b - a == 1 and b % 16 == 0 for a, b in spans(t, k, p)),
    "a call of one token at position 15, 31, ...",
    ("tokens", 16),
    ("granite", 16, None, 15, 1),
    ("granite", 17, None, 16, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        flushed = len(qpos) == 1 and (qpos[0] + 1) % 16 == 0
        return seen & ((kpos <= qpos[0] - 16) | (kpos == qpos[0])) if flushed else seen


@fault(
    "F28",
    "the causal mask of a second partition of 128 keys compares the key's place in the partition: keys ahead of the query are seen",
    "tracel-ai/cubecl/pull/1027",
    lambda c, t, k, p, n: any(b - a > 1 and b > 128 for a, b in spans(t, k, p)),
    "a call of two or more tokens that ends beyond position 128",
    ("tokens", 129),
    ("llama_long", 129, None, 0, 1),
    ("llama_long", 128, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        return qpos[:, None] >= kpos % 128


@fault(
    "F29",
    "rows of a call are shared out to threads; with more threads than rows the share is 0 rows, and ffn_norm is left without its weights",
    "common practice: rows per thread by a division that rounds down",
    lambda c, t, k, p, n: any(m < n for m in lengths(t, k, p)),
    "a call of fewer tokens than threads",
    ("threads", 3),
    ("qwen2", 2, None, 0, 3),
    ("qwen2", 2, None, 0, 2),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return super().rms_norm(x, w * 0 + 1 if name.endswith("ffn_norm") and len(x) < self.threads else w, eps, name)


@fault(
    "F30",
    "the last chunk of a prefix is padded to a whole chunk by its last token, and the padding stays in the cache",
    "tenstorrent/tt-metal/pull/19435",
    lambda c, t, k, p, n: bool(k) and p % k != 0,
    "a chunk that does not divide the prefix",
    ("prefix", 1),
    ("llama_mqa", 10, 4, 5, 1),
    ("llama_mqa", 10, 4, 4, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        super().cache_put(n, k, v, pos)
        if self.call == "prefix" and self.chunk and len(k) < self.chunk:
            pad = self.chunk - len(k)
            self.keys[n] = tuple(np.concatenate([x, np.repeat(x[-1:], pad, axis=0)]) for x in self.keys[n])


# --- subtle: few numbers, or small differences ------------------------------------------------------------------------------------------


@fault(
    "F31",
    "the softmax is launched for at most 128 rows of heads and tokens together; the last heads' later rows are not divided by their sum",
    "microsoft/onnxruntime/pull/21687",
    lambda c, t, k, p, n: any(m > 1 and m * c.heads > 128 for m in lengths(t, k, p)),
    "calls of more than 16 tokens, with 8 heads (16 is right)",
    ("tokens in a call", 17),
    ("llama_h8", 17, None, 0, 1),
    ("llama_h8", 16, None, 0, 1),
)
class _(Engine):
    def softmax(self, s, n):
        p = super().softmax(s, n)
        rows = np.arange(p.shape[0] * p.shape[1]).reshape(*p.shape[:2], 1) >= 128
        return np.where(rows, np.exp(s - s.max(axis=-1, keepdims=True)), p)


@fault(
    "F32",
    "the list of (token, expert) pairs has room for 32 in a call: pairs behind it are dropped",
    "tenstorrent/tt-metal/issues/50669 (token counts for which the list of tokens by expert is corrupt)",
    lambda c, t, k, p, n: c.experts and any(m * c.experts_used > 32 for m in lengths(t, k, p)),
    "more than 10 tokens in a call, with 3 experts each (11 loses one expert of its last token)",
    ("tokens in a call", 11),
    ("qwen3moe", 11, None, 0, 1),
    ("qwen3moe", 10, None, 0, 1),
)
class _(Engine):
    def combine(self, y, weights):
        kept = np.arange(weights.size).reshape(weights.shape) < 32
        return super().combine(y, weights * kept)


@fault(
    "F33",
    "the matrix-vector kernel of the head leaves out the rows behind the last full tile of 32: those logits are zero",
    "ml-explore/mlx/issues/665",
    lambda c, t, k, p, n: c.vocab % 32 != 0 and any(b - a == 1 for a, b in written(t, k, p)),
    "calls of one token, with a vocabulary of 131: the last 3 logits",
    ("calls of one token behind the prefix", 1),
    ("llama_wide", 9, None, 8, 1),
    ("llama_wide", 10, None, 8, 1),
)
class _(Engine):
    def head(self, x):
        y = super().head(x)
        if len(y) == 1:
            y[:, self.c.vocab // 32 * 32 :] = 0
        return y


@fault(
    "F34",
    "the inputs of ffn_down get one int8 scale for all tokens of a call, where each token has its scale",
    "common practice: activations quantised by tensor where the model was trained by token",
    lambda c, t, k, p, n: c.types["blk.0.ffn_down.weight"] == "TQ2_0" and any(m > 1 for m in lengths(t, k, p)),
    "calls of two or more tokens",
    ("tokens in a call", 2),
    ("bitnet", 2, None, 0, 1),
    ("bitnet", 1, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if not (name in self.int8 and name.endswith("ffn_down.weight")):
            return super().product(x, w, name)
        scale = F32(127) / np.maximum(np.abs(x).max(), F32(1e-5))
        return self.matmul(np.rint(x * scale), w, name) / scale


@fault(
    "F35",
    "the tiled kernel for Q6_K takes the scale of the 15th group of 16 weights for the 16th in attn_v",
    "common practice: a tiled kernel beside the one for few rows, with its index of scales off at the end",
    lambda c, t, k, p, n: c.types["blk.0.attn_v.weight"] == "Q6_K" and any(m > 8 for m in lengths(t, k, p)),
    "calls of more than 8 tokens (8 is right)",
    ("tokens in a call", 9),
    ("llama_q6k", 9, None, 0, 1),
    ("llama_q6k", 8, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("attn_v.weight") and self.c.types[name] == "Q6_K" and len(x) > 8:
            scales = np.array(self.raw[name].data).view(np.uint8).reshape(len(w), -1, 210)[:, :, 192:208].view(np.int8).astype(F32)
            w = w.copy().reshape(len(w), -1, 256)
            w[..., 240:] *= (scales[..., 14] / np.where(scales[..., 15] == 0, 1, scales[..., 15]))[..., None]
            w = w.reshape(len(w), -1)
        return super().product(x, w, name)


@fault(
    "F36",
    "the window of a later call holds one key more than that of the first",
    "common practice: two attention kernels, one that counts the query itself and one that does not",
    lambda c, t, k, p, n: bool(c.local) and any(a > 0 and b > c.window for a, b in spans(t, k, p)),
    "a later call that ends beyond the window (18)",
    ("tokens", 19),
    ("starcoder2_w", 19, None, 18, 1),
    ("starcoder2_w", 18, None, 17, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos
        return (d >= 0) & (d <= self.c.window) if self.start and n in self.c.local else super().visible(qpos, kpos, n)


@fault(
    "F37",
    "keys behind the last full vector of 4 go through a scalar loop that takes powers of 2 where the softmax has powers of e",
    "common practice: scores scaled by log2(e) for a vector exp2, and a scalar rest",
    lambda c, t, k, p, n: any(b > 1 and b % 4 for a, b in spans(t, k, p)),
    "a call that ends at a position (from 1) that is no multiple of 4, other than 1",
    ("tokens", 2),
    ("phi3", 5, None, 0, 1),
    ("phi3", 4, None, 0, 1),
)
class _(Engine):
    def softmax(self, s, n):
        rest = s.shape[-1] // 4 * 4
        scaled = s - s.max(axis=-1, keepdims=True)
        scaled[..., rest:] *= F32(np.log(2))
        e = np.exp(scaled)
        return e / e.sum(axis=-1, keepdims=True, dtype=F32) if rest < s.shape[-1] else super().softmax(s, n)


@fault(
    "F38",
    "the fused kernel for 16 rows and more has the sigmoid approximation of GELU in place of the one with tanh",
    "common practice: a fused activation that knows one GELU",
    lambda c, t, k, p, n: c.arch == "gpt2" and any(m >= 16 for m in lengths(t, k, p)),
    "calls of 16 or more tokens (15 is right)",
    ("tokens in a call", 16),
    ("gpt2", 16, None, 0, 1),
    ("gpt2", 15, None, 0, 1),
)
class _(Engine):
    def dense(self, x, n, end=""):
        if len(x) < 16:
            return super().dense(x, n, end)
        up = self.put("ffn_up", self.linear(x, f"blk.{n}.ffn_up", n), n)
        y = self.put("ffn_out", up * self.num.sigmoid(F32(1.702) * up), n)
        return self.put("ffn_down", self.linear(y, f"blk.{n}.ffn_down", n), n)


@fault(
    "F39",
    "the fused kernel for one token has 1e-6 built in as the epsilon of the query and key norms",
    "common practice: a fused norm and RoPE for decode with constants of one model",
    lambda c, t, k, p, n: c.eps != F32(1e-6) and any(m == 1 for m in lengths(t, k, p)),
    "calls of one token",
    ("calls of one token", 1),
    ("qwen3_eps", 9, None, 8, 1),
    ("qwen3_eps", 10, None, 8, 1),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return super().rms_norm(x, w, F32(1e-6) if self.count == 1 and name.endswith(("_q_norm", "_k_norm")) else eps, name)


@fault(
    "F40",
    "attention for more than 20 rows has log2(e) as 1.44: scores are 0.2% too small",
    "common practice: scores scaled for exp2 by a constant with few digits",
    lambda c, t, k, p, n: any(m > 20 for m in lengths(t, k, p)),
    "calls of more than 20 tokens (20 is right)",
    ("tokens in a call", 21),
    ("llama", 21, None, 0, 1),
    ("llama", 20, None, 0, 1),
)
class _(Engine):
    def scale_scores(self, s, n):
        s = super().scale_scores(s, n)
        return s * F32(1.44 * np.log(2)) if s.shape[-2] > 20 else s
