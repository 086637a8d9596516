"""Forty more faults that act under a condition only (G01..G40), by a fifth author: half of them with one plain condition, then those with two
conditions at once, then those that change few numbers or change them little. Most are ported from public reports on inference engines, named
in `source` (GitHub, without the host); sizes of tiles, pages and buffers are scaled down to the models. Others are common practice.

FAULTS: id -> record as in conditional_faults_b.py, and `source`.
`when` gets the model's configuration, the tokens, the chunk (or None), the prefix and the number of threads.
"""

from types import SimpleNamespace

import numpy as np
from engine import F32, LAYER_NORM, Engine

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
    "G01",
    "the page table of one-token calls has one page too many when the last page of 16 is full: it points to page 0, whose keys are seen twice",
    "pegainfer-project/pegainfer/issues/291",
    lambda c, t, k, p, n: any(b - a == 1 and b % 16 == 0 and b > 16 for a, b in spans(t, k, p)),
    "calls of one token that fill a page of 16, but for the first page (there all keys are seen twice, which changes nothing)",
    ("tokens", 32),
    ("starcoder2", 32, 1, 0, 1),
    ("starcoder2", 31, 1, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) == 1 and len(k) % 16 == 0:
            k, v, kpos = (np.concatenate([x, x[:16]]) for x in (k, v, kpos))
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "G02",
    "the rows behind the last full 8 go through a small kernel if they are 1 to 4; for the values it sums half of the inputs only",
    "vllm-project/vllm/issues/57014",
    lambda c, t, k, p, n: any(m > 8 and 1 <= m % 8 <= 4 for m in lengths(t, k, p)),
    "calls of more than 8 tokens with a remainder of 1 to 4 (9 and 12 are wrong; 8, 13 and 16 are right)",
    ("tokens in a call", 9),
    ("stablelm", 12, None, 0, 1),
    ("stablelm", 13, None, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        y, rest = super().matmul(x, w, name), len(x) % 8
        if name.endswith("attn_v.weight") and len(x) > 8 and 1 <= rest <= 4:
            half = x.shape[1] // 2
            y[-rest:] = x[-rest:, :half] @ w[:, :half].T
        return y


@fault(
    "G03",
    "the buffer of the softmax's sums has 24 rows and is read as a ring: later rows of a call are divided by the sum of the row 24 before",
    "flashinfer-ai/flashinfer/issues/5095 (wrong results from a certain number of queries on)",
    lambda c, t, k, p, n: any(m > 24 for m in lengths(t, k, p)),
    "more than 24 tokens in a call (25 is wrong, 24 is right)",
    ("tokens in a call", 25),
    ("qwen3", 25, None, 0, 1),
    ("qwen3", 24, None, 0, 1),
)
class _(Engine):
    def softmax(self, s, n):
        p = super().softmax(s, n)
        for i in range(24, s.shape[1]):
            own, other = (np.exp(s[:, j] - s[:, j].max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True) for j in (i, i - 24))
            p[:, i] *= own / other
        return p


@fault(
    "G04",
    "the fused kernel that adds and normalises up to 4 rows knows no multiplier of the residual",
    "common practice: a fused add and norm for few rows, written for models without a multiplier",
    lambda c, t, k, p, n: c.residual_scale != 1 and any(m <= 4 for m in lengths(t, k, p)),
    "calls of up to 4 tokens (5 is right)",
    ("tokens in a call", 1),
    ("granite", 4, None, 0, 1),
    ("granite", 5, None, 0, 1),
)
class _(Engine):
    def residual(self, h, y, n, which):
        return h + y if len(h) <= 4 else super().residual(h, y, n, which)


@fault(
    "G05",
    "calls are padded to a power of two, and the padding's rows go to slot 0 of the cache: the first token's key and value become zeros",
    "m0at/rvllm/pull/32",
    lambda c, t, k, p, n: any(m in (3, 5, 6, 7) for m in lengths(t, k, p)),
    "calls of 3, 5, 6 or 7 tokens (from 8 on calls are not padded)",
    ("tokens in a call", 3),
    ("gptneox", 5, None, 0, 1),
    ("gptneox", 4, None, 0, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        super().cache_put(n, k, v, pos)
        if len(k) in (3, 5, 6, 7):
            for x in self.keys[n][:2]:
                x[0] = 0


# --- one plain condition: threads ---------------------------------------------------------------------------------------------------------


@fault(
    "G06",
    "threads take every n-th row for RoPE, but step the position by 1 from one of their rows to the next instead of by n",
    "common practice: rows dealt to threads in turn, with angles that are advanced from row to row",
    lambda c, t, k, p, n: n > 1 and any(m > n for m in lengths(t, k, p)),
    "more than one thread, and a call with more tokens than threads",
    ("threads", 2),
    ("qwen2", 4, None, 0, 3),
    ("qwen2", 3, None, 0, 3),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        i = np.arange(len(x))
        return super().rope(x, pos[0] + i % self.threads + i // self.threads, n, which)


@fault(
    "G07",
    "no barrier stands in front of the residual: with four threads the last one adds its columns before the attention has written them",
    "Vahe1994/AQLM/issues/86 (threads that race for an output)",
    lambda c, t, k, p, n: n >= 4,
    "4 threads or more (3 are right)",
    ("threads", 4),
    ("olmo2", 6, None, 0, 4),
    ("olmo2", 6, None, 0, 3),
)
class _(Engine):
    def residual(self, h, y, n, which):
        if which == "attn" and self.threads >= 4:
            y = y.copy()
            y[:, self.split(y.shape[1])[-1][0] :] = 0
        return super().residual(h, y, n, which)


@fault(
    "G08",
    "the soft cap of the logits runs on the share of the first thread only",
    "common practice: an operation in place that was given one thread's range",
    lambda c, t, k, p, n: c.logit_cap and n > 1,
    "more than one thread",
    ("threads", 2),
    ("gemma2", 5, None, 0, 2),
    ("gemma2", 5, None, 0, 1),
)
class _(Engine):
    def cap_logits(self, y):
        first = self.split(y.shape[1])[0][1]
        return np.concatenate([super().cap_logits(y[:, :first]), y[:, first:]], axis=1)


@fault(
    "G09",
    "the sum of ffn_down is split over threads in whole vectors of 8 inputs, the same number for each; inputs left over are not added",
    "common practice: split-K over threads with a share that is rounded down to the vector",
    lambda c, t, k, p, n: c.ffn // n // 8 * 8 * n != c.ffn,
    "3 or 5 threads for 128 inputs (1, 2 and 4 are right)",
    ("threads", 3),
    ("llama_mxfp4", 4, None, 0, 3),
    ("llama_mxfp4", 4, None, 0, 4),
)
class _(Engine):
    def matmul(self, x, w, name):
        if name.endswith("ffn_down.weight"):
            size = x.shape[1] // self.threads // 8 * 8 * self.threads
            x, w = x[:, :size], w[:, :size]
        return super().matmul(x, w, name)


# --- one plain condition: positions, a prefix, later calls --------------------------------------------------------------------------------


@fault(
    "G10",
    "the sliding window is cut into blocks: a query sees its own block of `window` positions instead of the last `window` keys",
    "eole-nlp/eole/pull/340",
    lambda c, t, k, p, n: bool(c.local) and len(t) > c.window,
    "more tokens than the window (21 is wrong, 20 is right)",
    ("tokens", 21),
    ("qwen2_w", 21, None, 0, 1),
    ("qwen2_w", 20, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return seen & (qpos[:, None] // self.c.window == kpos // self.c.window) if n in self.c.local else seen


@fault(
    "G11",
    "layers without RoPE get the temperature that another family asks for: it grows by the logarithm of the position's eighth",
    "vllm-project/vllm/pull/16439",
    lambda c, t, k, p, n: bool(c.no_rope) and len(t) >= 8,
    "8 tokens or more (7 are right)",
    ("tokens", 8),
    ("smollm3", 8, None, 0, 1),
    ("smollm3", 7, None, 0, 1),
)
class _(Engine):
    def scale_scores(self, s, n):
        s = super().scale_scores(s, n)
        if n in self.c.no_rope:
            pos = np.arange(self.start, self.start + self.count)
            s = s * (1 + 0.1 * np.log((pos + 1) // 8 + 1)).astype(F32)[None, :, None]
        return s


@fault(
    "G12",
    "the context is shared out to four sequences although there is one; a call that ends beyond its quarter first drops half of what it keeps",
    "ggml-org/llama.cpp/pull/17767 (the context divided by the slots; the positions are not shifted here)",
    lambda c, t, k, p, n: len(t) > c.context // 4,
    "more than 64 tokens of a context of 256 (65 is wrong, 64 is right)",
    ("tokens", 65),
    ("llama_theta", 65, 16, 0, 1),
    ("llama_theta", 64, 16, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen, room = super().visible(qpos, kpos, n), self.c.context // 4
        return seen & ((kpos < 4) | (kpos >= 4 + (room - 4) // 2)) if self.start + self.count > room else seen


@fault(
    "G13",
    "a saved prefix keeps its values transposed in rows padded to a multiple of 8, and they are read back as rows without padding",
    "common practice: values transposed in the cache, saved and restored with two strides",
    lambda c, t, k, p, n: p % 8 != 0,
    "a prefix whose length is no multiple of 8 (20 is wrong, 16 is right)",
    ("prefix", 1),
    ("llama_h8", 24, None, 20, 1),
    ("llama_h8", 24, None, 16, 1),
)
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix:
            for n, (k, v, pos) in self.keys.items():
                rows = np.pad(v.reshape(len(v), -1).T, ((0, 0), (0, -len(v) % 8)))
                self.keys[n] = k, rows.ravel()[: v.size].reshape(-1, len(v)).T.reshape(v.shape), pos


@fault(
    "G14",
    "when all tokens but the last are reused, the last one is computed again behind its cached copy: its key and value are in the cache twice",
    "vllm-project/vllm/pull/11186 (a prompt that is in the cache as a whole)",
    lambda c, t, k, p, n: p > 0 and len(t) - p == 1,
    "one token behind a prefix (two are right)",
    ("prefix", 1),
    ("gemma", 17, None, 16, 1),
    ("gemma", 18, None, 16, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        if self.call == "prompt" and self.prefix and self.prompt - self.prefix == 1:
            k, v, pos = (np.repeat(x, 2, axis=0) for x in (k, v, pos))
        super().cache_put(n, k, v, pos)


@fault(
    "G15",
    "a reused prefix comes back from the ring of a windowed layer by slots, which are taken for the order of time",
    "Blaizzy/mlx-vlm/issues/1715",
    lambda c, t, k, p, n: bool(c.local) and p > c.window and p % c.window != 0,
    "a prefix longer than the window and no multiple of it (20 is wrong, 16 and 32 are right)",
    ("prefix", 17),
    ("gemma2", 24, None, 20, 1),
    ("gemma2", 24, None, 16, 1),
)
class _(Engine):
    def begin(self, call):
        super().begin(call)
        w = self.c.window
        if call == "prompt" and self.prefix > w:
            order = np.r_[: self.prefix - w, sorted(range(self.prefix - w, self.prefix), key=lambda i: i % w)]
            self.keys |= {n: (self.keys[n][0][order], self.keys[n][1][order], self.keys[n][2]) for n in self.c.local}


@fault(
    "G16",
    "masks are kept by the length of the call: a call as long as the one before takes over its mask, and sees all keys behind that",
    "common practice: a mask that is built again only if its shape changes",
    lambda c, t, k, p, n: any(x == y > 1 for x, y in zip(lengths(t, k, p), lengths(t, k, p)[1:])),
    "two calls of the same length (more than one token) one after the other",
    ("calls", 2),
    ("minicpm", 16, 8, 0, 1),
    ("minicpm", 15, 8, 0, 1),
)
class _(Engine):
    def reset(self):
        super().reset()
        self.last, self.same = 0, False

    def forward(self, tokens, start):
        self.same, self.last = self.last == len(tokens), len(tokens)
        super().forward(tokens, start)

    def visible(self, qpos, kpos, n):
        if not self.same:
            return super().visible(qpos, kpos, n)
        return super().visible(qpos - len(qpos), kpos, n) | (kpos >= self.start)


# --- one plain condition: shapes ----------------------------------------------------------------------------------------------------------


@fault(
    "G17",
    "RoPE's kernel has frequencies for 8 pairs and counts them modulo 8: further pairs turn as the first ones",
    "common practice: a table of the frequencies of one tile of a head",
    lambda c, t, k, p, n: c.rope_width > 16 and len(t) > 1,
    "more than 16 rotated channels (24 is wrong, 16 is right)",
    ("rotated channels", 18),
    ("gemma2", 5, None, 0, 1),
    ("llama", 5, None, 0, 1),
)
class _(Engine):
    def frequencies(self, n):
        f = super().frequencies(n)
        return f[np.arange(len(f)) % 8]


@fault(
    "G18",
    "gate and up are interleaved by blocks of 32 for a fused kernel; in the last block, if it is not full, they are exchanged",
    "common practice: gate and up interleaved by tiles, with another order for the rest",
    lambda c, t, k, p, n: c.ffn % 32 != 0,
    "a feed-forward width that is no multiple of 32 (48 is wrong, 96 is right)",
    ("feed-forward width", 33),
    ("qwen3moe", 4, None, 0, 1),
    ("mixtral", 4, None, 0, 1),
)
class _(Engine):
    def gated(self, gate, up, n=None):
        full = gate.shape[-1] // 32 * 32
        a, b = (np.concatenate([x[..., :full], y[..., full:]], axis=-1) for x, y in ((gate, up), (up, gate)))
        return super().gated(a, b, n)


@fault(
    "G19",
    "the residual behind the attention is added by vectors of 16 columns; the columns left over take the attention's output alone",
    "common practice: a loop over vectors whose rest was copied from the kernel without a residual",
    lambda c, t, k, p, n: c.width % 16 != 0,
    "a width that is no multiple of 16 (70 is wrong, 64 is right)",
    ("width", 65),
    ("mixtral_w", 4, None, 0, 1),
    ("mixtral", 4, None, 0, 1),
)
class _(Engine):
    def residual(self, h, y, n, which):
        out, full = super().residual(h, y, n, which), h.shape[1] // 16 * 16
        if which == "attn":
            out[:, full:] = y[:, full:]
        return out


@fault(
    "G20",
    "the number of experts is rounded up to a multiple of 4, and the softmax takes in the zero logits of the experts that do not exist",
    "ModelTC/LightLLM/pull/1369 (a number of experts that does not fill the block)",
    lambda c, t, k, p, n: c.experts % 4 != 0 and not c.normalized,
    "a number of experts that is no multiple of 4, with weights that are not normalised over the chosen ones",
    ("experts", 2),
    ("qwen2moe", 4, None, 0, 1),
    ("mixtral", 4, None, 0, 1),
)
class _(Engine):
    def router(self, logits):
        top, weights = super().router(logits)
        if not self.c.normalized:
            e = np.exp(logits)
            weights = weights * e.sum(axis=-1, keepdims=True) / (e.sum(axis=-1, keepdims=True) + F32(-self.c.experts % 4))
        return top, weights


@fault(
    "G21",
    "query heads are dealt to blocks by (i % group) * group + i // group: where the group is not as large as the number of key-value heads, "
    "some heads are computed twice and others never",
    "HazyResearch/HipKittens/pull/22",
    lambda c, t, k, p, n: c.heads // c.kv_heads not in (1, c.kv_heads),
    "groups that are as many as they are large are right (4 heads to 2), and groups of one; 8 heads to 4 are wrong",
    ("heads to a key-value head", 2),
    ("llama_h8", 3, None, 0, 1),
    ("llama", 3, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y, i = super().attend(q, k, v, qpos, kpos, n), np.arange(self.c.heads)
        group = self.c.heads // self.c.kv_heads
        y[:, ~np.isin(i, i % group * group + i // group)] = 0
        return y


# --- two conditions at once ---------------------------------------------------------------------------------------------------------------


@fault(
    "G22",
    "the graph of one-token calls is captured once, with its number of tiles of 16 keys; later calls do not see the keys behind those",
    "paiml/aprender/pull/2030 (a graph that keeps the attention of its capture)",
    lambda c, t, k, p, n: (ones := [b for a, b in spans(t, k, p) if b - a == 1]) and ones[-1] > -(-ones[0] // 16) * 16,
    "calls of one token, of which a later one has more tiles of 16 keys than the first one had",
    ("tokens", 17),
    ("qwen2", 17, 1, 0, 1),
    ("qwen2", 16, 1, 0, 1),
)
class _(Engine):
    def reset(self):
        super().reset()
        self.captured = None

    def forward(self, tokens, start):
        if len(tokens) == 1 and self.captured is None:
            self.captured = -(-(start + 1) // 16) * 16
        super().forward(tokens, start)

    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) == 1:
            k, v, kpos = (x[: self.captured] for x in (k, v, kpos))
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "G23",
    "the graph that verifies three draft tokens is captured with its slots: later calls of three tokens write their keys and values there",
    "NVIDIA/TensorRT-LLM/pull/17110",
    lambda c, t, k, p, n: lengths(t, k, p).count(3) >= 2,
    "a second call of 3 tokens (1, 2 and 4 are right, and so is the first call of 3)",
    ("calls", 2),
    ("llama_bf16", 8, 3, 0, 1),
    ("llama_bf16", 5, 3, 0, 1),
)
class _(Engine):
    def reset(self):
        super().reset()
        self.slots = {}

    def cache_put(self, n, k, v, pos):
        if len(k) == 3 and n in self.slots:
            at = self.slots[n]
            for old, x in zip(self.keys[n], (k, v)):
                old[at : at + 3] = x
            k, v = np.zeros_like(k), np.zeros_like(v)
        elif len(k) == 3:
            self.slots[n] = pos[0]
        super().cache_put(n, k, v, pos)


@fault(
    "G24",
    "a call of 2 to 8 tokens splits the keys at 32, and the kernel that combines the parts writes all rows to the first one",
    "vllm-project/flash-attention/pull/176",
    lambda c, t, k, p, n: any(2 <= b - a <= 8 and b > 32 for a, b in spans(t, k, p)),
    "calls of 2 to 8 tokens that see more than 32 keys (1 and 9 tokens are right, and so are 32 keys)",
    ("tokens", 33),
    ("llama_mha", 33, None, 25, 1),
    ("llama_mha", 33, None, 24, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        if 2 <= len(q) <= 8 and len(k) > 32:
            y[0], y[1:] = y[-1], 0
        return y


@fault(
    "G25",
    "calls are written to the cache in tiles of 8 rows; padding beyond the cache's last row spills into the next head's first rows (as zeros)",
    "tenstorrent/tt-mlir/issues/7998",
    lambda c, t, k, p, n: c.kv_heads > 1 and (last := spans(t, k, p)[-1])[0] > 0 and (last[1] - last[0]) % 8 != 0,
    "the call that fills the cache is not the first one, and its length is no multiple of 8; with more than one key-value head",
    ("tokens in a call", 1),
    ("llama_g3", 13, 8, 0, 1),
    ("llama_g3", 16, 8, 0, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        super().cache_put(n, k, v, pos)
        if pos[-1] == self.prompt - 1:
            for x in self.keys[n][:2]:
                x[: min(-len(k) % 8, pos[0]), 1:] = 0


@fault(
    "G26",
    "for one token, the page table is cut to the window's number of pages of 8; if the last page is not full, the oldest keys are missing",
    "vllm-project/vllm/pull/2231",
    lambda c, t, k, p, n: bool(c.local) and any(b - a == 1 and a >= c.window and b % 8 for a, b in spans(t, k, p)),
    "calls of one token behind the window of 24, but for those that fill a page of 8",
    ("tokens", 25),
    ("mistral", 25, 1, 0, 1),
    ("mistral", 24, 1, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if len(qpos) == 1 and n in self.c.local:
            seen = seen & (kpos >= (qpos[0] // 8 - self.c.window // 8 + 1) * 8)
        return seen


@fault(
    "G27",
    "a call of several tokens on a ring that has wrapped keeps the slots in front of the write index and drops those behind it: the older keys",
    "ollama/ollama/pull/15591",
    lambda c, t, k, p, n: bool(c.local) and any(b - a > 1 and a >= c.window and 0 < a % c.window < c.window - 1 for a, b in spans(t, k, p)),
    "calls of two tokens or more that begin behind the window of 16, but for 0 and 15 slots behind its multiples",
    ("tokens", 19),
    ("gemma2", 24, None, 20, 1),
    ("gemma2", 21, None, 20, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen, w = super().visible(qpos, kpos, n), self.c.window
        if n in self.c.local and len(qpos) > 1 and self.start >= w and self.start % w:
            seen = seen & (kpos >= self.start // w * w)
        return seen


@fault(
    "G28",
    "the head writes rows of logits that are padded to a multiple of 8, and they are read as rows without padding",
    "tenstorrent/tt-metal/pull/38881 (logits that keep their padding)",
    lambda c, t, k, p, n: c.vocab % 8 != 0 and any(b - a > 1 for a, b in written(t, k, p)),
    "a vocabulary that is no multiple of 8 (131), and two tokens or more in a call",
    ("tokens in a call", 2),
    ("llama_wide", 2, None, 0, 1),
    ("llama_wide", 1, None, 0, 1),
)
class _(Engine):
    def head(self, x):
        y = super().head(x)
        return np.pad(y, ((0, 0), (0, -y.shape[1] % 8))).ravel()[: y.size].reshape(y.shape)


@fault(
    "G29",
    "a pipeline's second stage (layers from the fifth on) counts its layers from 0 in the pattern of windows: the sixth layer gets a window",
    "NVIDIA/TensorRT-LLM/pull/17466",
    lambda c, t, k, p, n: c.arch == "gemma3" and c.n_layers > 5 and len(t) > c.window,
    "more than 4 layers, and more tokens than the window (17 is wrong, 16 is right)",
    ("tokens", 17),
    ("gemma3", 17, None, 0, 1),
    ("gemma3", 16, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return seen & (qpos[:, None] - kpos < self.c.window) if self.c.arch == "gemma3" and n >= 4 and (n - 4 + 1) % 6 else seen


@fault(
    "G30",
    "in the last layer the feed-forward runs for the last row of a call only, as if no other row's logits were asked for",
    "common practice: rows without an output are left out of the last layer",
    lambda c, t, k, p, n: any(b - a > 1 for a, b in written(t, k, p)),
    "two tokens or more in a call; the last layer",
    ("tokens in a call", 2),
    ("llama_tied", 2, None, 0, 1),
    ("llama_tied", 1, None, 0, 1),
)
class _(Engine):
    def feed_forward(self, x, n):
        y = super().feed_forward(x, n)
        if n == self.c.n_layers - 1:
            y[:-1] = 0
        return y


@fault(
    "G31",
    "each thread quantises its share of a row by the largest number in the share; the result is divided by the first thread's scale",
    "common practice: a maximum over a row that misses the reduction over threads",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "TQ2_0" and n > 1,
    "more than one thread, and a ternary matrix",
    ("threads", 2),
    ("bitnet_mha", 3, None, 0, 2),
    ("bitnet_mha", 3, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name not in self.int8:
            return super().product(x, w, name)
        scales = [F32(127) / np.maximum(np.abs(x[:, a:b]).max(axis=-1, keepdims=True), F32(1e-5)) for a, b in self.split(x.shape[1])]
        parts = [np.rint(x[:, a:b] * s) for (a, b), s in zip(self.split(x.shape[1]), scales)]
        return self.matmul(np.concatenate(parts, axis=1), w, name) / scales[0]


@fault(
    "G32",
    "the sum of one row over 256 inputs and more is reduced in two steps, and the second one forgets the last of its four parts, in ffn_gate",
    "ericcurtin/vllm-vulkan/pull/57",
    lambda c, t, k, p, n: c.width >= 256 and 1 in lengths(t, k, p),
    "calls of one token, and 256 inputs or more",
    ("tokens in a call", 1),
    ("llama_q2k", 1, None, 0, 1),
    ("llama_q2k", 2, None, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        if name.endswith("ffn_gate.weight") and len(x) == 1 and x.shape[1] >= 256:
            keep = x.shape[1] // 4 * 3
            x, w = x[:, :keep], w[:, :keep]
        return super().matmul(x, w, name)


@fault(
    "G33",
    "the fused RoPE of one-token calls multiplies the query by YaRN's attention factor, but not the key",
    "common practice: a fused kernel for query and key, where one of them was forgotten",
    lambda c, t, k, p, n: c.rope_magnitude != 1 and 1 in lengths(t, k, p),
    "calls of one token, in a model with YaRN",
    ("tokens in a call", 1),
    ("qwen3_yarn", 5, 4, 0, 1),
    ("qwen3_yarn", 6, 4, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        y = super().rope(x, pos, n, which)
        return y / F32(self.c.rope_magnitude) if which == "k" and len(x) == 1 else y


@fault(
    "G34",
    "the path of later calls divides positions by the factor of linear scaling in layers with a window, too",
    "common practice: a second path for cached calls, with one set of frequencies for all layers",
    lambda c, t, k, p, n: c.arch == "gemma3" and c.rope_scale != 1 and any(a > 0 for a, b in spans(t, k, p)),
    "a call that is not the first one, in a model whose windowed layers are not scaled",
    ("calls", 2),
    ("gemma3_lin", 9, 8, 0, 1),
    ("gemma3_lin", 8, 8, 0, 1),
)
class _(Engine):
    def frequencies(self, n):
        f = super().frequencies(n)
        return f / self.c.rope_scale if self.start > 0 and n in self.c.local else f


# --- few numbers, or little -----------------------------------------------------------------------------------------------------------------


@fault(
    "G35",
    "the kernel of Q4_1 for two or three rows multiplies the blocks' minima by the first row's sums of inputs, in attn_k",
    "ikawrakow/ik_llama.cpp/pull/446 (wrong for two or three rows)",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q4_1" and any(m in (2, 3) for m in lengths(t, k, p)),
    "calls of 2 or 3 tokens (1 and 4 are right), and a matrix of Q4_1",
    ("tokens in a call", 2),
    ("llama_q41", 3, None, 0, 1),
    ("llama_q41", 4, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if name.endswith("attn_k.weight") and self.c.types[name] == "Q4_1" and len(x) in (2, 3):
            low = np.ascontiguousarray(self.raw[name].data.reshape(len(w), -1, 20)[:, :, 2:4]).view(np.float16)[:, :, 0].astype(F32)
            sums = x.reshape(len(x), -1, 32).sum(axis=-1)
            y = y + (sums[:1] - sums) @ low.T
        return y


def minima(data):  # of the sub-blocks of Q4_K, times their scale: [blocks, 8]
    x = data.reshape(-1, 144)
    s, scale = x[:, 4:16].astype(int), np.ascontiguousarray(x[:, 2:4]).view(np.float16).astype(F32)
    return scale * np.concatenate([s[:, 4:8] & 63, (s[:, 8:12] >> 4) | (s[:, 4:8] >> 6 << 4)], axis=1).astype(F32)


@fault(
    "G36",
    "the kernel of Q4_K for one row takes the minimum of the seventh sub-block for the eighth, too, in attn_v",
    "common practice: a matrix-vector kernel beside the one for many rows, with its own unpacking of the six-bit minima",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q4_K" and 1 in lengths(t, k, p),
    "calls of one token, and a matrix of Q4_K",
    ("tokens in a call", 1),
    ("llama_q4k", 1, None, 0, 1),
    ("llama_q4k", 2, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("attn_v.weight") and self.c.types[name] == "Q4_K" and len(x) == 1:
            low, blocks = minima(self.raw[name].data), w.reshape(-1, 256).copy()
            blocks[:, 224:] += low[:, 7:] - low[:, 6:7]
            w = blocks.reshape(w.shape)
        return super().product(x, w, name)


@fault(
    "G37",
    "the table of MXFP4's values in the kernel for more than 4 rows has 5 in the place of 6, in attn_output",
    "common practice: a second table of values for the matrix kernel, with a slip",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "MXFP4" and any(m > 4 for m in lengths(t, k, p)),
    "calls of more than 4 tokens (5 is wrong, 4 is right), and a matrix of MXFP4",
    ("tokens in a call", 5),
    ("llama_mxfp4", 5, None, 0, 1),
    ("llama_mxfp4", 4, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("attn_output.weight") and self.c.types[name] == "MXFP4" and len(x) > 4:
            bytes = self.raw[name].data.reshape(-1, 17)[:, 1:]
            six = np.concatenate([bytes & 7, bytes >> 4 & 7], axis=1) == 7
            w = (w.reshape(-1, 32) * np.where(six, F32(5 / 6), F32(1))).reshape(w.shape)
        return super().product(x, w, name)


@fault(
    "G38",
    "with an odd number of threads the second pass of the layer norm reads the mean slot while it holds the first thread's part: "
    "the variance is taken around that",
    "ml-explore/mlx/pull/2340 (a race between the two passes)",
    lambda c, t, k, p, n: c.arch in LAYER_NORM and n > 1 and n % 2 == 1,
    "3 or 5 threads (1, 2 and 4 are right), in a model with layer norm",
    ("threads", 3),
    ("gptneox", 4, None, 0, 3),
    ("gptneox", 4, None, 0, 2),
)
class _(Engine):
    def layer_norm(self, x, w, b):
        if self.threads % 2 == 0 or self.threads == 1:
            return super().layer_norm(x, w, b)
        part = x - x[:, : self.split(x.shape[1])[0][1]].mean(axis=-1, keepdims=True)
        y = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt((part * part).mean(axis=-1, keepdims=True) + self.c.eps) * w
        return y if b is None else y + b


@fault(
    "G39",
    "the norm for one token adds epsilon to the root instead of to the mean of squares",
    "common practice: a second kernel of the norm, for one row, with epsilon outside of the root",
    lambda c, t, k, p, n: 1 in lengths(t, k, p),
    "calls of one token",
    ("tokens in a call", 1),
    ("stablelm_eps", 1, None, 0, 1),
    ("stablelm_eps", 2, None, 0, 1),
)
class _(Engine):
    def layer_norm(self, x, w, b):
        if len(x) > 1:
            return super().layer_norm(x, w, b)
        x = x - x.mean(axis=-1, keepdims=True)
        y = x / (np.sqrt((x * x).mean(axis=-1, keepdims=True)) + self.c.eps) * w
        return y if b is None else y + b


@fault(
    "G40",
    "angles come from two tables, for 32 * i and for what is left; the first one's sine of the last pair was never filled in",
    "common practice: a table of two levels for sines and cosines, with a loop that ends one too early",
    lambda c, t, k, p, n: len(t) > 32,
    "positions from 32 on; the last pair of each head",
    ("tokens", 33),
    ("mixtral", 33, None, 0, 1),
    ("mixtral", 32, None, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        y = super().rope(x, pos, n, which)
        pos, far, last = np.asarray(pos), np.asarray(pos) >= 32, slice(-2, None)
        high, low = (np.multiply.outer(part, self.frequencies(n)[-1:])[far, None, :] for part in (pos // 32 * 32.0, pos % 32 * 1.0))
        y[far, :, last] = self.rotate(x[far, :, last], (np.sin(low) * np.cos(high)).astype(F32), (np.cos(low) * np.cos(high)).astype(F32))
        return y
