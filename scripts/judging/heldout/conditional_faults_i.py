"""Forty more faults that act under a condition only (RA01..RA40), by a tenth author: conditions of the length of a call, of where it begins or
ends, of how many calls there were, of a prefix, of threads, of shapes, of layers, of the tokens themselves and of the type of a matrix. About a
fifth are ported from public reports on inference engines, named in `source` (GitHub, without the host); sizes of tiles, pages and buffers are
scaled down to the models. Others are common practice.

FAULTS: id -> record as in conditional_faults_h.py.
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


def ones(t, k, p):
    """The positions of calls of one token."""
    return [a for a, b in spans(t, k, p) if b - a == 1]


def unpacked(engine, name, size, change):
    """A matrix as the engine unpacks it when `change` has been at its blocks of `size` bytes."""
    data = np.array(engine.raw[name].data).view(np.uint8)
    change(data.reshape(-1, size))
    return engine.dequantize(data, engine.c.types[name], engine.c.shapes[name], name).reshape(engine.c.shapes[name])


def attend_seen(engine, q, k, v, seen, n):
    """Attention to the keys that are `seen`, [T, S]; rows that see none are zeros."""
    heads, empty = engine.kv_head(n), ~seen.any(axis=1)
    q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))
    y = engine.num.attend(engine, q, k, v, seen | empty[:, None], n).swapaxes(0, 1)
    return np.where(empty[:, None, None], F32(0), y)


def typed(c, kind):
    return c.types["blk.0.attn_q.weight"] == kind


# --- the length of a call ---------------------------------------------------------------------------------------------------------------------


@fault(
    "RA01",
    "a call of one token more than a multiple of 16 is masked as if its first token were padding: the others do not see it [the report has the "
    "condition, 32 there, and not the cause]",
    "huggingface/transformers/issues/47651",
    lambda c, t, k, p, n: any(m > 1 and m % 16 == 1 for m in lengths(t, k, p)),
    "calls of 17, 33, 49, ... tokens (16 and 18 are right)",
    ("tokens in a call", 17),
    ("gemma3", 17, None, 0, 1),
    ("gemma3", 18, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if len(qpos) > 1 and len(qpos) % 16 == 1:
            seen = seen & ((kpos != qpos[0]) | (qpos == qpos[0])[:, None])
        return seen


@fault(
    "RA02",
    "the kernel that multiplies 16 tokens at a time leaves those behind the last 16 to a loop that begins with the call's first token again",
    "ikawrakow/ik_llama.cpp/pull/170",
    lambda c, t, k, p, n: c.experts > 0 and any(m > 16 and m % 16 for m in lengths(t, k, p)),
    "more than 16 tokens in a call, and no multiple of 16 (17 are wrong, 16 and 32 right), in mixtures of experts",
    ("tokens in a call", 17),
    ("mixtral", 17, None, 0, 1),
    ("mixtral", 16, None, 0, 1),
)
class _(Engine):
    def combine(self, y, weights):
        if len(y) > 16 and len(y) % 16:
            y = np.concatenate([y[: len(y) // 16 * 16], y[: len(y) % 16]])
        return super().combine(y, weights)


@fault(
    "RA03",
    "the tile that is left behind tiles of 32 tokens is written by fours, and one of three tokens or fewer not at all, in ffn_up",
    "common practice: a store of vectors along the tokens without a masked one for the rest",
    lambda c, t, k, p, n: any(m > 32 and 1 <= m % 32 <= 3 for m in lengths(t, k, p)),
    "calls of 33 to 35, 65 to 67, ... tokens (32 and 36 are right)",
    ("tokens in a call", 33),
    ("llama_bf16", 33, None, 0, 1),
    ("llama_bf16", 36, None, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        y, m = super().matmul(x, w, name), len(x)
        if name.endswith("ffn_up.weight") and m > 32 and 1 <= m % 32 <= 3:
            y[m // 32 * 32 :] = 0
        return y


@fault(
    "RA04",
    "sines and cosines of a call fill one tile of 32 rows, and later rows are read from behind it: zeros",
    "tenstorrent/tt-metal/pull/43790",
    lambda c, t, k, p, n: any(m > 32 for m in lengths(t, k, p)),
    "more than 32 tokens in a call (33 are wrong, 32 right)",
    ("tokens in a call", 33),
    ("qwen3_yarn", 33, None, 0, 1),
    ("qwen3_yarn", 32, None, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        y = super().rope(x, pos, n, which)
        y[32:] = 0
        return y


@fault(
    "RA05",
    "the softmax for rows of more than 32 scores adds exponentials up by fours, and leaves out those behind the last four",
    "common practice: a vectorised sum whose rest is taken care of for short rows alone",
    lambda c, t, k, p, n: any(b > 32 and b % 4 for a, b in spans(t, k, p)),
    "a call that ends behind position 32, and not at a multiple of 4 (33 are wrong, 32 and 36 right)",
    ("tokens", 33),
    ("llama_mqa", 33, None, 0, 1),
    ("llama_mqa", 36, None, 0, 1),
)
class _(Engine):
    def softmax(self, s, n):
        size = s.shape[-1]
        if size <= 32 or size % 4 == 0:
            return super().softmax(s, n)
        e = self.num.exp(s - s.max(axis=-1, keepdims=True))
        return e / self.num.total(e[..., : size // 4 * 4])


@fault(
    "RA06",
    "the norm takes two rows at a time, and the last one of an odd number is not multiplied by the weights, in front of attention in the last layer",
    "common practice: a loop over pairs of rows with a shorter copy of its body for what is left",
    lambda c, t, k, p, n: any(m >= 3 and m % 2 for m in lengths(t, k, p)),
    "an odd number of tokens in a call, at least 3 (1, 2 and 4 are right)",
    ("tokens in a call", 3),
    ("minicpm", 3, None, 0, 1),
    ("minicpm", 4, None, 0, 1),
)
class _(Engine):
    def norm(self, x, name, n):
        y = super().norm(x, name, n)
        if name == f"blk.{self.c.n_layers - 1}.attn_norm" and len(x) >= 3 and len(x) % 2:
            y[-1] = y[-1] / self.w[name + ".weight"]
        return y


@fault(
    "RA07",
    "logits are computed for 32 rows at a time, and the last row of a full batch gets those of the row before",
    "common practice: a loop with an index that is increased behind its last use",
    lambda c, t, k, p, n: any(b - a >= 32 for a, b in written(t, k, p)),
    "calls of 32 or more tokens (31 are right): the 32nd token's logits",
    ("tokens in a call", 32),
    ("gemma", 32, None, 0, 1),
    ("gemma", 31, None, 0, 1),
)
class _(Engine):
    def head(self, x):
        y = super().head(x)
        for i in range(31, len(y), 32):
            y[i] = y[i - 1]
        return y


@fault(
    "RA08",
    "the kernel without masks, for calls of whole tiles of 8 tokens, ends without the bias, in attn_output",
    "common practice: an epilogue that one of two instances of a kernel lacks",
    lambda c, t, k, p, n: c.arch == "gptneox" and any(m % 8 == 0 for m in lengths(t, k, p)),
    "a number of tokens in a call that is a multiple of 8 (7 and 9 are right), in a model with that bias",
    ("tokens in a call", 8),
    ("gptneox", 8, None, 0, 1),
    ("gptneox", 9, None, 0, 1),
)
class _(Engine):
    def add_bias(self, y, name):
        return y if name.endswith("attn_output") and len(y) % 8 == 0 else super().add_bias(y, name)


@fault(
    "RA09",
    "for 2 to 4 tokens, products of int8 inputs are all multiplied by the first token's scale, in ffn_gate",
    "common practice: a kernel for one row that was given a loop over rows, within which the scale is not read again",
    lambda c, t, k, p, n: any(2 <= m <= 4 for m in lengths(t, k, p)),
    "calls of 2 to 4 tokens (1 and 5 are right)",
    ("tokens in a call", 2),
    ("llama_q8", 2, None, 0, 1),
    ("llama_q8", 5, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if name.endswith("ffn_gate.weight") and 2 <= len(x) <= 4:
            most = np.abs(x).max(axis=1, keepdims=True)
            y = y * (most[:1] / most)
        return y


# --- positions, pages and calls -------------------------------------------------------------------------------------------------------------------


@fault(
    "RA10",
    "learned positions are held below 32: later tokens get that of the 32nd",
    "common practice: a bound that is a setting of another model",
    lambda c, t, k, p, n: c.arch == "gpt2" and len(t) > 32,
    "more than 32 tokens (33 are wrong, 32 right), in a model with learned positions",
    ("tokens", 33),
    ("gpt2", 33, None, 0, 1),
    ("gpt2", 32, None, 0, 1),
)
class _(Engine):
    def learned(self, pos):
        return np.minimum(pos, 31)


@fault(
    "RA11",
    "a stored prefix of whole pages of 8 tokens is found with all its tokens, the last is computed again, and is in the cache twice",
    "vllm-project/vllm/issues/52617",
    lambda c, t, k, p, n: p > 0 and p % 8 == 0,
    "a prefix that is a multiple of 8 (7 and 9 are right)",
    ("prefix", 8),
    ("stablelm", 12, None, 8, 1),
    ("stablelm", 12, None, 9, 1),
)
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix and self.prefix % 8 == 0:
            self.keys = {n: tuple(np.concatenate([x, x[-1:]]) for x in old) for n, old in self.keys.items()}


@fault(
    "RA12",
    "a ring of one window takes all keys of a call before its queries look at it: what the last ones have overwritten is missing for the first",
    "common practice: a ring of the window's size, where it takes the window and the call",
    lambda c, t, k, p, n: bool(c.local) and any(b - a >= 2 and b > c.window for a, b in spans(t, k, p)),
    "a call of two or more tokens that ends behind the window's size (24 tokens are right, 25 wrong)",
    ("tokens", 25),
    ("mistral", 25, None, 0, 1),
    ("mistral", 24, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        seen, end = self.visible(qpos, kpos, n), self.start + self.count
        if n in self.c.local and self.count >= 2:
            seen = seen & (kpos >= end - self.c.window)
        return attend_seen(self, q, k, v, seen, n)


@fault(
    "RA13",
    "the table of sines and cosines has 48 rows, and the index is taken modulo their number",
    "common practice: a table that is sized by a setting and a guard against reading behind it",
    lambda c, t, k, p, n: len(t) > 48,
    "more than 48 tokens (49 are wrong, 48 right)",
    ("tokens", 49),
    ("llama_theta", 49, None, 0, 1),
    ("llama_theta", 48, None, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.asarray(pos) % 48, n, which)


@fault(
    "RA14",
    "attention to the cache goes over whole pages of 8 keys, and the page in which a call begins is left to the part that has the call's own keys",
    "common practice: pages that are counted by a division without the rest",
    lambda c, t, k, p, n: any(a % 8 for a, b in spans(t, k, p)),
    "a call that begins at a position that is no multiple of 8",
    ("tokens", 2),
    ("qwen2", 12, None, 5, 1),
    ("qwen2", 12, None, 8, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        return super().visible(qpos, kpos, n) & ((kpos < self.start // 8 * 8) | (kpos >= self.start))


@fault(
    "RA15",
    "for one token the last page of 8 keys is read to its end, and what is empty there, zeros, counts as keys",
    "vllm-project/vllm/pull/47305",
    lambda c, t, k, p, n: any((a + 1) % 8 for a in ones(t, k, p)),
    "calls of one token that do not fill a page of 8 keys (positions 7, 15, 23, ... are right)",
    ("tokens in a call", 1),
    ("llama_lin", 12, None, 11, 1),
    ("llama_lin", 16, None, 15, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        empty = -len(k) % 8 if len(q) == 1 else 0
        seen = np.concatenate([self.visible(qpos, kpos, n), np.ones((len(q), empty), bool)], axis=1)
        k, v = (np.concatenate([x, np.zeros((empty, *x.shape[1:]), F32)]) for x in (k, v))
        return attend_seen(self, q, k, v, seen, n)


@fault(
    "RA16",
    "the keys of a call are in one of two buffers, which are used in turn: from the third call on, those of the first are lost",
    "common practice: two buffers for calls that overlap, of which one is used again too early",
    lambda c, t, k, p, n: len(spans(t, k, p)) >= 3,
    "three or more calls",
    ("calls", 3),
    ("olmo2", 9, 3, 0, 1),
    ("olmo2", 6, 3, 0, 1),
)
class _(Engine):
    def forward(self, tokens, start):
        if self.chunk_no == 0:
            self.first = start + len(tokens)
        super().forward(tokens, start)

    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return seen & (kpos >= self.first) if self.chunk_no >= 2 else seen


@fault(
    "RA17",
    "a stored prefix of more than 16 tokens comes back in two parts, and the values of the second are put in front of those of the first",
    "common practice: two lists of parts of which one is sorted",
    lambda c, t, k, p, n: p > 16,
    "a prefix of more than 16 tokens (17 are wrong, 16 right)",
    ("prefix", 17),
    ("qwen3moe", 20, None, 17, 1),
    ("qwen3moe", 20, None, 16, 1),
)
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix > 16:
            self.keys = {n: (k, np.concatenate([v[16:], v[:16]]), pos) for n, (k, v, pos) in self.keys.items()}


@fault(
    "RA18",
    "five pages of 8 tokens stay on the device; the first one is given to a later page before it has been written to the host, and is read as zeros",
    "common practice: a copy to the host that nobody waits for",
    lambda c, t, k, p, n: any(b > 40 for a, b in spans(t, k, p)),
    "a call that ends behind position 40 (41 are wrong, 40 right)",
    ("tokens", 41),
    ("smollm3", 41, None, 0, 1),
    ("smollm3", 40, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(k) > 40:
            gone = (kpos < 8)[:, None, None]
            k, v = np.where(gone, F32(0), k), np.where(gone, F32(0), v)
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "RA19",
    "in windowed layers one token sees the keys of the window that the cache has, less one for itself, which it sees as well: the oldest is missing",
    "common practice: a window that counts the token itself in one kernel and not in the other",
    lambda c, t, k, p, n: bool(c.local) and any(a >= c.window - 1 for a in ones(t, k, p)),
    "calls of one token at position 19 or behind it, where the window is 20 (18 is right)",
    ("tokens", 20),
    ("qwen2_w", 20, None, 19, 1),
    ("qwen2_w", 19, None, 18, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if len(qpos) == 1 and n in self.c.local:
            seen = seen & (qpos[:, None] - kpos[None, :] < self.c.window - 1)
        return seen


@fault(
    "RA20",
    "the kernel for more than 16 tokens does not know the cap of scores",
    "common practice: a second attention kernel to which a setting is not passed",
    lambda c, t, k, p, n: c.score_cap > 0 and any(m > 16 for m in lengths(t, k, p)),
    "more than 16 tokens in a call (17 are wrong, 16 right), in a model that caps scores",
    ("tokens in a call", 17),
    ("gemma2", 17, None, 0, 1),
    ("gemma2", 16, None, 0, 1),
)
class _(Engine):
    def cap(self, s, n):
        return s if self.count > 16 else super().cap(s, n)


# --- threads ------------------------------------------------------------------------------------------------------------------------------------


@fault(
    "RA21",
    "each thread normalises as many rows, rounded down: those that are left stay as they are, in front of attention",
    "common practice: a share that is a division without the rest",
    lambda c, t, k, p, n: any(m % n for m in lengths(t, k, p)),
    "a number of tokens in a call that the number of threads does not divide",
    ("threads", 2),
    ("qwen3", 3, None, 0, 2),
    ("qwen3", 4, None, 0, 2),
)
class _(Engine):
    def norm(self, x, name, n):
        y = super().norm(x, name, n)
        if name.endswith("attn_norm"):
            left = len(x) // self.threads * self.threads
            y[left:] = x[left:]
        return y


@fault(
    "RA22",
    "with more threads than heads of the keys, threads take query heads in place of groups, and every second one keeps the first key head",
    "common practice: an index of the group that is computed for one of two ways to share the work",
    lambda c, t, k, p, n: n > c.kv_heads > 1,
    "more threads than heads of the keys (3 are wrong, 2 right, where there are 2), if there are several",
    ("threads", 3),
    ("llama", 3, None, 0, 3),
    ("llama", 3, None, 0, 2),
)
class _(Engine):
    def kv_head(self, n):
        heads = super().kv_head(n).copy()
        if self.threads > self.c.kv_heads:
            heads[1::2] = 0
        return heads


@fault(
    "RA23",
    "down's inputs are shared by blocks of 32, as many for each thread: blocks that are left are not added",
    "common practice: a sum over threads' parts whose number of blocks is rounded down",
    lambda c, t, k, p, n: (c.ffn // 32) % n != 0,
    "a number of threads that does not divide the 3 blocks of 32 inputs (2, 4 and 5 are wrong, 1 and 3 right)",
    ("threads", 2),
    ("llama_eps", 3, None, 0, 2),
    ("llama_eps", 3, None, 0, 3),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("ffn_down.weight"):
            used = x.shape[-1] // 32 // self.threads * self.threads * 32
            x = np.where(np.arange(x.shape[-1]) < used, x, F32(0))
        return super().product(x, w, name)


@fault(
    "RA24",
    "a thread's share of the vocabulary is rounded down to 16 rows, and logits behind the last share stay zero",
    "common practice: shares in whole tiles, of which the last should reach to the end",
    lambda c, t, k, p, n: c.vocab // n // 16 * 16 * n != c.vocab,
    "a number of threads that does not cut the 96 tokens of the vocabulary into multiples of 16 (4 and 5 are wrong, 1, 2 and 3 right)",
    ("threads", 4),
    ("starcoder2", 3, None, 0, 4),
    ("starcoder2", 3, None, 0, 3),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name in ("token_embd.weight", "output.weight"):
            y[:, len(w) // self.threads // 16 * 16 * self.threads :] = 0
        return y


# --- shapes, experts, tokens --------------------------------------------------------------------------------------------------------------------


@fault(
    "RA25",
    "scores of one token are sums over 16 numbers at a time, and what a head has behind the last 16 is left out",
    "common practice: a kernel for heads of 64 and 128 that is called for 80, 96 and 72 as well",
    lambda c, t, k, p, n: c.head_dim % 16 != 0 and any(a > 0 for a in ones(t, k, p)),
    "calls of one token, not the first of the sequence, where heads (24 numbers) are no multiple of 16",
    ("tokens", 2),
    ("gemma2_eps", 5, None, 4, 1),
    ("gemma2_eps", 6, None, 4, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) == 1:
            q = np.where(np.arange(q.shape[-1]) < q.shape[-1] // 16 * 16, q, F32(0))
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "RA26",
    "the kernel for 16 tokens and more takes four heads at a time; a copy of it for the heads that are left has no causal mask",
    "common practice: a special case for odd numbers of heads that few models reach",
    lambda c, t, k, p, n: c.heads % 4 != 0 and any(m >= 16 for m in lengths(t, k, p)),
    "calls of 16 or more tokens (15 are right), where the number of heads (6) is no multiple of 4",
    ("tokens in a call", 16),
    ("llama_g3", 16, None, 0, 1),
    ("llama_g3", 15, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y, left = super().attend(q, k, v, qpos, kpos, n), self.c.heads // 4 * 4
        if len(q) >= 16:
            y[:, left:] = attend_seen(self, q, k, v, np.ones((len(q), len(k)), bool), n)[:, left:]
        return y


@fault(
    "RA27",
    "the way for one token keeps its number in a byte with a sign: from 128 on it counts from the end of the table",
    "common practice: a type that is wide enough for the tokens of a test",
    lambda c, t, k, p, n: any(t[a] >= 128 for a in ones(t, k, p)),
    "calls of one token whose number is 128 or more (127 is right)",
    ("tokens in a call", 1),
    ("llama_long", 4, None, 3, 1),
    ("llama_long", 4, None, 0, 1),
    np.array([5, 9, 7, 130]),
)
class _(Engine):
    def rows(self, tokens):
        return super().rows(np.where(tokens >= 128, tokens - 256, tokens) if len(tokens) == 1 else tokens)


@fault(
    "RA28",
    "rows of the table that a call has used are kept by their number modulo 64, and are not compared: a token can get the row of another",
    "common practice: a small cache without a tag",
    lambda c, t, k, p, n: any(len(set(t[a:b])) > len(set(t[a:b] % 64)) for a, b in spans(t, k, p)),
    "two tokens of a call whose numbers differ by 64",
    ("tokens in a call", 2),
    ("llama_tied", 3, None, 0, 1),
    ("llama_tied", 3, None, 0, 1),
    np.array([3, 9, 67]),
)
class _(Engine):
    def rows(self, tokens):
        kept = {}
        return super().rows(np.array([kept.setdefault(int(i) % 64, int(i)) for i in tokens]))


@fault(
    "RA29",
    "the fused router for one token does not make the weights of the chosen experts add up to 1",
    "common practice: a kernel that was written for a model without that step",
    lambda c, t, k, p, n: c.experts > 0 and c.normalized and bool(ones(t, k, p)),
    "calls of one token, in mixtures of experts whose weights add up to 1",
    ("tokens in a call", 1),
    ("mixtral", 5, None, 4, 1),
    ("mixtral", 6, None, 4, 1),
)
class _(Engine):
    def router(self, logits):
        top, weights = super().router(logits)
        return top, np.take_along_axis(self.num.softmax(logits), top, axis=-1) if len(logits) == 1 else weights


@fault(
    "RA30",
    "the list of tokens and their experts has room for 64 pairs, and pairs behind it are not computed",
    "common practice: a buffer that is sized by tokens where it should be by tokens and experts",
    lambda c, t, k, p, n: c.experts > 0 and any(m * c.experts_used > 64 for m in lengths(t, k, p)),
    "a call of more than 64 pairs of tokens and experts: more than 21 tokens with 3 experts each (22 are wrong, 21 right)",
    ("tokens in a call", 22),
    ("qwen3moe", 22, None, 0, 1),
    ("qwen3moe", 21, None, 0, 1),
)
class _(Engine):
    def combine(self, y, weights):
        return super().combine(y, np.where(np.arange(weights.size).reshape(weights.shape) < 64, weights, F32(0)))


# --- types of matrices --------------------------------------------------------------------------------------------------------------------------


@fault(
    "RA31",
    "the kernel of Q5_0 for one row takes the fifth bits of a block's second half from those of its first, in attn_k",
    "common practice: a shift by 16 that one of two copies of a line lacks",
    lambda c, t, k, p, n: typed(c, "Q5_0") and bool(ones(t, k, p)),
    "calls of one token, and a matrix of Q5_0",
    ("tokens in a call", 1),
    ("llama_q50", 5, None, 4, 1),
    ("llama_q50", 6, None, 4, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("attn_k.weight") and self.c.types[name] == "Q5_0" and len(x) == 1:

            def change(b):
                b[:, 4:6] = b[:, 2:4]

            w = unpacked(self, name, 22, change)
        return super().product(x, w, name)


@fault(
    "RA32",
    "the kernel of Q4_K for 2 to 8 rows reads 4 of 6 bits of the scales and minima of a block's second half, in ffn_up",
    "common practice: six bits that are spread over two bytes, of which the upper two are forgotten",
    lambda c, t, k, p, n: typed(c, "Q4_K") and any(2 <= m <= 8 for m in lengths(t, k, p)),
    "calls of 2 to 8 tokens (1 and 9 are right), and a matrix of Q4_K",
    ("tokens in a call", 2),
    ("llama_q4k", 2, None, 0, 1),
    ("llama_q4k", 9, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("ffn_up.weight") and self.c.types[name] == "Q4_K" and 2 <= len(x) <= 8:

            def change(b):
                b[:, 4:12] &= 0x3F

            w = unpacked(self, name, 144, change)
        return super().product(x, w, name)


@fault(
    "RA33",
    "the kernel of Q6_K for more than 32 rows shifts by 4 in place of 6 for the high bits of the last 32 of each 128 weights, in ffn_gate",
    "common practice: four lines that differ by a number, of which two are alike",
    lambda c, t, k, p, n: typed(c, "Q6_K") and any(m > 32 for m in lengths(t, k, p)),
    "calls of more than 32 tokens (33 are wrong, 32 right), and a matrix of Q6_K",
    ("tokens in a call", 33),
    ("llama_q6k", 33, None, 0, 1),
    ("llama_q6k", 32, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("ffn_gate.weight") and self.c.types[name] == "Q6_K" and len(x) > 32:

            def change(b):
                b[:, 128:192] = b[:, 128:192] & 0x3F | (b[:, 128:192] & 0x30) << 2

            w = unpacked(self, name, 210, change)
        return super().product(x, w, name)


@fault(
    "RA34",
    "the kernel of IQ4_XS that handles the last row of an odd number is a copy without the two high bits of each scale, in attn_output; it takes "
    "all rows of a call when there are 5 or fewer",
    "common practice: a kernel for the rest that is chosen for small calls, too",
    lambda c, t, k, p, n: typed(c, "IQ4_XS") and any(m <= 5 or m % 2 for m in lengths(t, k, p)),
    "calls of an odd number of tokens (the last one), or of 5 or fewer (6, 8, 10, ... are right), and a matrix of IQ4_XS",
    ("tokens in a call", 1),
    ("llama_iq4xs", 7, None, 0, 1),
    ("llama_iq4xs", 8, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        y, m = super().product(x, w, name), len(x)
        if name.endswith("attn_output.weight") and self.c.types[name] == "IQ4_XS" and (m <= 5 or m % 2):

            def change(b):
                b[:, 2:4] = 0

            first = 0 if m <= 5 else m - 1
            y[first:] = super().product(x[first:], unpacked(self, name, 136, change), name)
        return y


@fault(
    "RA35",
    "for more than 16 rows inputs of ternary matrices are scaled to int8 by the largest number of the call, and not by each token's own",
    "common practice: a reduction over a tile that is one row high in the other kernel",
    lambda c, t, k, p, n: typed(c, "TQ2_0") and any(m > 16 for m in lengths(t, k, p)),
    "calls of more than 16 tokens (17 are wrong, 16 right), and ternary matrices",
    ("tokens in a call", 17),
    ("bitnet", 17, None, 0, 1),
    ("bitnet", 16, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name not in self.int8 or len(x) <= 16:
            return super().product(x, w, name)
        scale = F32(127) / np.maximum(np.abs(x).max(), F32(1e-5))
        return self.matmul(np.rint(x * scale), w, name) / scale


# --- layers, and one token or several ---------------------------------------------------------------------------------------------------------------


@fault(
    "RA36",
    "in the last layer the feed-forward part is computed for the last token of a call alone, as for sampling, though all logits are asked for",
    "common practice: rows that are left out early, by a flag that a caller does not set",
    lambda c, t, k, p, n: any(b - a >= 2 for a, b in written(t, k, p)),
    "calls of two or more tokens behind the prefix (all but the last token)",
    ("tokens in a call", 2),
    ("llama_h8", 4, None, 0, 1),
    ("llama_h8", 4, None, 3, 1),
)
class _(Engine):
    def feed_forward(self, x, n):
        y = super().feed_forward(x, n)
        if n == self.c.n_layers - 1:
            y = np.concatenate([np.zeros_like(y[:-1]), y[-1:]])
        return y


@fault(
    "RA37",
    "a first call of more than 32 tokens is cut in pieces of 32 for the first layer's attention, and a piece does not see the one before",
    "common practice: a layer that works on embeddings in pieces while they come in",
    lambda c, t, k, p, n: lengths(t, k, p)[0] > 32,
    "a first call of more than 32 tokens (33 are wrong, 32 right)",
    ("tokens in a call", 33),
    ("granite", 33, None, 0, 1),
    ("granite", 33, None, 20, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return seen & (qpos[:, None] // 32 == kpos // 32) if n == 0 and self.start == 0 and len(qpos) > 32 else seen


@fault(
    "RA38",
    "the driver for one token adds branches to the stream without the model's factor, which the driver for prompts has",
    "chrishayuk/larql/pull/276",
    lambda c, t, k, p, n: c.residual_scale != 1 and bool(ones(t, k, p)),
    "calls of one token, in a model that scales its branches",
    ("tokens in a call", 1),
    ("granite", 5, None, 4, 1),
    ("granite", 6, None, 4, 1),
)
class _(Engine):
    def residual(self, h, y, n, which):
        return self.num.add(h, y) if len(h) == 1 else super().residual(h, y, n, which)


@fault(
    "RA39",
    "for one token the mask is made for a single key, and not for those of the cache: the token sees the first one of the sequence",
    "alibaba/MNN/pull/3403",
    lambda c, t, k, p, n: any(a > 0 for a in ones(t, k, p)),
    "calls of one token, not the first of the sequence",
    ("tokens", 2),
    ("llama_mha", 5, None, 4, 1),
    ("llama_mha", 6, None, 4, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return seen & (kpos == 0) if len(qpos) == 1 else seen


@fault(
    "RA40",
    "the fast way for one token gives logits without the model's cap",
    "unslothai/unsloth-zoo/pull/1029",
    lambda c, t, k, p, n: c.logit_cap > 0 and any(b - a == 1 for a, b in written(t, k, p)),
    "calls of one token behind the prefix, in a model that caps logits",
    ("tokens in a call", 1),
    ("gemma3_lin", 5, None, 4, 1),
    ("gemma3_lin", 6, None, 4, 1),
)
class _(Engine):
    def cap_logits(self, y):
        return y if len(y) == 1 else super().cap_logits(y)
