"""Forty more faults that act under a condition only (D01..D40), by another author than conditional_faults.py's: of a call's length, the
number of tokens, chunks, prefixes, threads, layers, shapes, token ids and tensor types. (The engine knows no batches.)

FAULTS: id -> record as in conditional_faults.py, and
  smallest    the true edge as data: (quantity, the smallest value of it with which the run is wrong, other things being as in `on`)
`on` is a run at that edge, `off` the nearest one that is right, where the condition has a neighbour.
"""

from types import SimpleNamespace

import numpy as np
from conditional_faults import calls
from engine import F32, Engine

FAULTS = {}


def fault(id, what, when, edge, smallest, on, off, tokens=None):
    def add(cls):
        FAULTS[id] = SimpleNamespace(id=id, model=on[0], what=what, when=when, edge=edge, on=on, off=off, tokens=tokens, engine=cls)
        FAULTS[id].smallest = smallest
        return cls

    return add


def lengths(tokens, chunk, prefix):
    return [b - a for a, b in calls(tokens, chunk, prefix)]


# --- the length of a call ---------------------------------------------------------------------------------------------------------------


@fault(
    "D01",
    "the GEMM behind 'up' takes tiles of 16 rows; in calls of more than one tile, the rows of a last partial tile are read 16 rows "
    "too early",
    lambda c, t, k, p, n: any(m > 16 and m % 16 for m in lengths(t, k, p)),
    "more than 16 tokens in a call, and no multiple of 16 (17 is wrong; 16 and 32 are right)",
    ("tokens in a call", 17),
    ("llama", 17, None, 0, 1),
    ("llama", 16, None, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        rows = len(x) // 16 * 16
        if name.endswith("ffn_up.weight") and rows and rows < len(x):
            y[rows:] = y[rows - 16 : len(x) - 16]
        return y


@fault(
    "D02",
    "the kernel for calls of one token reads the newest value before it is written: zeros",
    lambda c, t, k, p, n: 1 in lengths(t, k, p),
    "calls of exactly one token",
    ("tokens in a call", 1),
    ("qwen2", 12, 1, 0, 1),
    ("qwen2", 12, 2, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) == 1:
            v = v.copy()
            v[-1] = 0
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "D03",
    "calls of two to four tokens take the path for drafts, which has no mask: each token sees all of its call",
    lambda c, t, k, p, n: any(2 <= m <= 4 for m in lengths(t, k, p)),
    "2, 3 or 4 tokens in a call",
    ("tokens in a call", 2),
    ("llama", 16, 2, 0, 1),
    ("llama", 16, 1, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return np.ones_like(seen) if 2 <= len(qpos) <= 4 else seen


@fault(
    "D04",
    "values are written four rows at a time; the rows left over are written for the first key-value head only, and stay zero for the "
    "others",
    lambda c, t, k, p, n: c.kv_heads > 1 and any(m % 4 for m in lengths(t, k, p)),
    "a call whose length is no multiple of 4",
    ("tokens in a call", 1),
    ("llama", 9, None, 0, 1),
    ("llama", 8, None, 0, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        v = v.copy()
        v[len(v) // 4 * 4 :, 1:] = 0
        super().cache_put(n, k, v, pos)


@fault(
    "D05",
    "tied heads compute logits 32 rows at a time, and the pointer of the second and later batches is that of the hidden state in "
    "front of the last norm",
    lambda c, t, k, p, n: c.tied and any(m > 32 for m in lengths(t, k, p)),
    "more than 32 tokens in a call, in models with tied embeddings; rows from the 33rd on",
    ("tokens in a call", 33),
    ("llama_tied", 33, None, 0, 1),
    ("llama_tied", 32, None, 0, 1),
)
class _(Engine):
    def norm(self, x, name, n):
        self.before = x if name == "output_norm" else None
        return super().norm(x, name, n)

    def head(self, x):
        return super().head(np.concatenate([x[:32], self.before[32:]]) if self.c.tied else x)


@fault(
    "D06",
    "calls longer than the window take a kernel whose window is one key shorter",
    lambda c, t, k, p, n: bool(c.window) and any(m > c.window for m in lengths(t, k, p)),
    "more tokens in a call than the window has keys (24 of mistral: 25 is wrong)",
    ("tokens in a call", 25),
    ("mistral", 25, None, 0, 1),
    ("mistral", 24, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if self.c.window and n in self.c.local and len(qpos) > self.c.window:
            seen &= qpos[:, None] - kpos[None, :] < self.c.window - 1
        return seen


@fault(
    "D07",
    "the vectorised rotation of calls of two tokens or more copies the part of a head that is not rotated from the first token of the call",
    lambda c, t, k, p, n: c.rope_width < c.head_dim and any(m > 1 for m in lengths(t, k, p)),
    "two tokens in a call, in models that rotate a part of each head",
    ("tokens in a call", 2),
    ("stablelm", 2, None, 0, 1),
    ("stablelm", 2, 1, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        y = super().rope(x, pos, n, which)
        y[..., self.c.rope_width :] = x[:1, :, self.c.rope_width :]
        return y


# --- the number of tokens ---------------------------------------------------------------------------------------------------------------


@fault(
    "D08",
    "attention takes keys in tiles of 32; from the third tile on the values are read one row too early",
    lambda c, t, k, p, n: len(t) > 64,
    "more than 64 tokens in the sequence: queries from position 64 on",
    ("tokens in the sequence", 65),
    ("llama", 65, None, 0, 1),
    ("llama", 64, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(q, k, np.concatenate([v[:64], v[63:-1]]) if len(v) > 64 else v, qpos, kpos, n)


@fault(
    "D09",
    "RoPE's table has 48 rows; later positions take its last row",
    lambda c, t, k, p, n: len(c.no_rope) < c.n_layers and len(t) > 48,
    "positions from 48 on (49 tokens)",
    ("tokens in the sequence", 49),
    ("qwen3", 49, None, 0, 1),
    ("qwen3", 48, None, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.minimum(pos, 47), n, which)


@fault(
    "D10",
    "positions are signed bytes when they reach RoPE: 128 becomes -128",
    lambda c, t, k, p, n: len(c.no_rope) < c.n_layers and len(t) > 128,
    "positions from 128 on (129 tokens)",
    ("tokens in the sequence", 129),
    ("granite", 129, None, 0, 1),
    ("granite", 128, None, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, (pos + 128) % 256 - 128, n, which)


@fault(
    "D11",
    "the ring of a window is two windows long, and its comparison is off by one once it has gone around: queries from position 2 * "
    "window on see one key less",
    lambda c, t, k, p, n: bool(c.window) and len(t) > 2 * c.window,
    "more tokens than two windows (48 of mistral: 49 is wrong)",
    ("tokens in the sequence", 49),
    ("mistral", 49, 16, 0, 1),
    ("mistral", 48, 16, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen, d = super().visible(qpos, kpos, n), qpos[:, None] - kpos[None, :]
        if self.c.window and n in self.c.local:
            seen &= (d < self.c.window - 1) | (qpos[:, None] < 2 * self.c.window)
        return seen


@fault(
    "D12",
    "one token at a time, keys from the 33rd on are a second split; the splits are combined by their sums, without regard to their maxima",
    lambda c, t, k, p, n: any(b - a == 1 and a >= 32 for a, b in calls(t, k, p)),
    "calls of one token at position 32 or later",
    ("keys in a call of one token", 33),
    ("llama", 33, 32, 0, 1),
    ("llama", 34, 32, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) > 1 or len(k) <= 32:
            return super().attend(q, k, v, qpos, kpos, n)
        heads = self.kv_head(n)
        s = self.scale_scores(np.einsum("thk,shk->ths", q, k[:, heads]), n)
        y = total = F32(0)
        for part in (slice(0, 32), slice(32, None)):
            e = np.exp(s[..., part] - s[..., part].max(axis=-1, keepdims=True))
            y = y + np.einsum("ths,shk->thk", e, v[part][:, heads])
            total = total + e.sum(axis=-1, keepdims=True)
        return (y / total).astype(F32)


# --- chunks -----------------------------------------------------------------------------------------------------------------------------


def last_rows_differ(t, k, p):  # of a call and the call two before
    ends = [t[b - 1] for _, b in calls(t, k, p)]
    return any(a != b for a, b in zip(ends, ends[2:]))


@fault(
    "D13",
    "two buffers of embeddings are used in turn, and the copy of the last row may come late: from the third call on it is that of two "
    "calls before",
    lambda c, t, k, p, n: last_rows_differ(t, k, p),
    "the third call, a prefix's included (if the last tokens of the two calls differ)",
    ("calls", 3),
    ("qwen2", 24, 8, 0, 1),
    ("qwen2", 16, 8, 0, 1),
)
class _(Engine):
    def reset(self):
        super().reset()
        self.last = []

    def rows(self, tokens):
        rows = super().rows(tokens).copy()
        self.last.append(rows[-1].copy())
        if len(self.last) > 2:
            rows[-1] = self.last[-3]
        return rows


@fault(
    "D14",
    "the mask of a later call is placed by the length of a whole chunk: in a call shorter than the chunk, queries miss as many of the "
    "newest keys as the call is short",
    lambda c, t, k, p, n: bool(k) and any(a > 0 and b - a < k for a, b in calls(t, k, p)),
    "a call that is not the first and is shorter than the chunk",
    ("tokens that a later call is shorter than the chunk", 1),
    ("llama", 15, 8, 0, 1),
    ("llama", 16, 8, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        short = self.chunk - len(qpos) if self.chunk and self.start > 0 else 0
        return super().visible(np.maximum(qpos - short, 0), kpos, n)


@fault(
    "D15",
    "a later call that begins on a page's border (32 tokens) takes the new page one step late: its first key goes nowhere and reads "
    "as zeros",
    lambda c, t, k, p, n: any(a > 0 and a % 32 == 0 for a, _ in calls(t, k, p)),
    "a call that begins at 32, 64, ... (chunks of 16 and 32 do, 20 do not before 160)",
    ("first position of a later call", 32),
    ("llama", 40, 32, 0, 1),
    ("llama", 40, 31, 0, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        if self.start > 0 and self.start % 32 == 0:
            k = k.copy()
            k[0] = 0
        super().cache_put(n, k, v, pos)


@fault(
    "D16",
    "a call that begins inside a page of 16 tokens and goes on into the next page writes the values behind the border one row too late",
    lambda c, t, k, p, n: any(a % 16 and (b - 1) // 16 > a // 16 for a, b in calls(t, k, p)),
    "a call that begins off a multiple of 16 and crosses one",
    ("tokens of the call behind the border", 1),
    ("qwen2", 17, 10, 0, 1),
    ("qwen2", 16, 10, 0, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        border = -self.start % 16
        if border and len(v) > border:
            v = np.concatenate([v[:border], v[border - 1 : -1]])
        super().cache_put(n, k, v, pos)


def capacity(count):
    return max(32, 1 << (count - 1).bit_length())


@fault(
    "D17",
    "the cache has room for 32 tokens and doubles when it is full; the copy leaves out the last row of the values in it",
    lambda c, t, k, p, n: any(a > 0 and capacity(b) > capacity(a) for a, b in calls(t, k, p)),
    "a later call that takes the cache past 32, 64, 128 tokens",
    ("tokens in the cache, of which some came earlier", 33),
    ("gemma", 33, 16, 0, 1),
    ("gemma", 32, 16, 0, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        if self.start > 0 and capacity(self.start + len(k)) > capacity(self.start):
            old = self.keys[n][1].copy()
            old[-1] = 0
            self.keys[n] = self.keys[n][0], old, self.keys[n][2]
        super().cache_put(n, k, v, pos)


# --- prefixes ---------------------------------------------------------------------------------------------------------------------------


@fault(
    "D18",
    "a reused prefix is rounded up to pages of 16 tokens: the rows behind it (zeros) count as keys",
    lambda c, t, k, p, n: p % 16 > 0,
    "a prefix whose length is no multiple of 16",
    ("tokens in the prefix", 1),
    ("llama", 24, None, 15, 1),
    ("llama", 24, None, 16, 1),
)
class _(Engine):
    def begin(self, call):
        super().begin(call)
        extra = -self.prefix % 16
        if call == "prompt" and extra:
            self.keys = {n: tuple(np.concatenate([x, np.zeros((extra, *x.shape[1:]), x.dtype)]) for x in kv) for n, kv in self.keys.items()}


@fault(
    "D19",
    "a prefix of more than 24 tokens is moved to a slower pool, and the key of its first token is lost on the way, in all layers but "
    "the first",
    lambda c, t, k, p, n: p > 24 and c.n_layers > 1,
    "a prefix of more than 24 tokens (25 is wrong)",
    ("tokens in the prefix", 25),
    ("smollm3", 32, None, 25, 1),
    ("smollm3", 32, None, 24, 1),
)
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix > 24:
            for n in range(1, self.c.n_layers):
                self.keys[n][0][0] = 0


@fault(
    "D20",
    "behind a prefix of odd length the first call is rotated one position too far (positions are packed in pairs)",
    lambda c, t, k, p, n: p % 2 == 1 and len(c.no_rope) < c.n_layers,
    "a prefix of an odd number of tokens; the first call behind it",
    ("tokens in the prefix", 1),
    ("qwen2", 20, None, 1, 1),
    ("qwen2", 20, None, 2, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        late = self.call == "prompt" and self.prefix % 2 and self.start == self.prefix
        return super().rope(x, pos + 1 if late else pos, n, which)


@fault(
    "D21",
    "with a reused prefix, learned positions of the second call behind it begin at 0 again",
    lambda c, t, k, p, n: "position_embd.weight" in c.types and p > 0 and bool(k) and len(t) - p > k,
    "a prefix, and a second chunk behind it, in models with learned positions",
    ("tokens behind a prefix", 9),
    ("gpt2", 12, 8, 3, 1),
    ("gpt2", 11, 8, 3, 1),
)
class _(Engine):
    def learned(self, pos):
        second = self.call == "prompt" and self.prefix and self.chunk and self.start == self.prefix + self.chunk
        return pos - self.start if second else pos


# --- threads ----------------------------------------------------------------------------------------------------------------------------


def rows_of_matrices(c):
    whole = (name for name, shape in c.shapes.items() if len(shape) > 1 and name != "position_embd.weight")
    return [c.shapes[name][-2] for name in whole if name != "token_embd.weight" or c.tied]


@fault(
    "D22",
    "each thread computes rows / threads outputs of a matrix, rounded down; the rest are left at zero",
    lambda c, t, k, p, n: any(rows % n for rows in rows_of_matrices(c)),
    "a number of threads that does not divide the rows of some matrix (3, 5, 6, 7 ... of 64)",
    ("threads", 3),
    ("llama", 8, None, 0, 3),
    ("llama", 8, None, 0, 4),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        y[:, len(w) // self.threads * self.threads :] = 0
        return y


@fault(
    "D23",
    "attention runs one thread for each key-value head; threads without a head of theirs start again at the first, and add their result",
    lambda c, t, k, p, n: n > c.kv_heads,
    "more threads than key-value heads",
    ("threads", 3),
    ("qwen3", 8, None, 0, 3),
    ("qwen3", 8, None, 0, 2),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y, c = super().attend(q, k, v, qpos, kpos, n), self.c
        times = np.bincount(np.arange(max(self.threads, c.kv_heads)) % c.kv_heads)
        return y * times[self.kv_head(n)][:, None].astype(F32) if self.threads > c.kv_heads else y


@fault(
    "D24",
    "each thread sums the squares of width / threads numbers of a row, rounded down: the numbers left over are missing from the mean",
    lambda c, t, k, p, n: c.width % n > 0,
    "a number of threads that does not divide the width",
    ("threads", 3),
    ("granite", 12, None, 0, 3),
    ("granite", 12, None, 0, 2),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        width = x.shape[-1]
        if x.ndim > 2 or width % self.threads == 0:
            return super().rms_norm(x, w, eps, name)
        some = x[..., : width // self.threads * self.threads]
        mean = (some * some).sum(axis=-1, keepdims=True, dtype=F32) / F32(width)
        return x * self.num.rsqrt(mean + F32(eps)) * w


@fault(
    "D25",
    "the schedule for four threads has a wrong border: the first output of the last thread's share of 'down' is that of its neighbour",
    lambda c, t, k, p, n: n == 4 and "blk.0.ffn_down.weight" in c.types,
    "exactly 4 threads",
    ("threads", 4),
    ("llama", 8, None, 0, 4),
    ("llama", 8, None, 0, 3),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if self.threads == 4 and name.endswith("ffn_down.weight"):
            y[:, 3 * len(w) // 4] = y[:, 3 * len(w) // 4 - 1]
        return y


@fault(
    "D26",
    "the gate is computed by tokens; with fewer tokens than threads, idle threads take the first token again and its product is doubled",
    lambda c, t, k, p, n: not c.experts and any(m < n for m in lengths(t, k, p)),
    "fewer tokens in a call than threads",
    ("threads more than tokens in a call", 1),
    ("phi3", 3, None, 0, 4),
    ("phi3", 4, None, 0, 4),
)
class _(Engine):
    def gated(self, gate, up, n=None):
        y = super().gated(gate, up, n)
        if self.count < self.threads:
            y[0] *= 2
        return y


# --- shapes -----------------------------------------------------------------------------------------------------------------------------


@fault(
    "D27",
    "the product of queries and keys takes 16 numbers at a time and drops what is left over",
    lambda c, t, k, p, n: c.head_dim % 16 > 0 and len(t) > 1,
    "heads whose width is no multiple of 16 (20 and 24 are wrong, 16 and 32 right), from two tokens on",
    ("width of a head", 1),
    ("llama_wide", 8, None, 0, 1),
    ("llama_mha", 8, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        whole = self.c.head_dim // 16 * 16
        return super().attend(q[..., :whole], k[..., :whole], v, qpos, kpos, n)


@fault(
    "D28",
    "token ids are seven bits wide in the gather of embeddings: 128 reads row 0",
    lambda c, t, k, p, n: bool(np.any(np.asarray(t) > 127)),
    "a token id of 128 or more",
    ("token id", 128),
    ("llama_wide", 6, None, 0, 1),
    ("llama", 6, None, 0, 1),
    tokens=np.array([5, 127, 128, 17, 90, 64]),
)
class _(Engine):
    def rows(self, tokens):
        return super().rows(tokens % 128)


@fault(
    "D29",
    "the product behind 'down' takes 128 inputs at a time, and a later tile overwrites the sum instead of adding to it",
    lambda c, t, k, p, n: "blk.0.ffn_down.weight" in c.types and c.ffn > 128,
    "a feed-forward width of more than 128",
    ("feed-forward width", 129),
    ("llama_wide", 8, None, 0, 1),
    ("llama_q8", 8, None, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        last = (w.shape[1] - 1) // 128 * 128 if name.endswith("ffn_down.weight") else 0
        return super().matmul(x[:, last:], w[:, last:], name)


@fault(
    "D30",
    "key-value heads are looked up by the bits of the query head, masked for the largest power of two: of 5 heads, head 4 reads head "
    "0's keys",
    lambda c, t, k, p, n: c.heads & (c.heads - 1) > 0,
    "a number of heads that is no power of two",
    ("heads", 3),
    ("llama_wide", 8, None, 0, 1),
    ("llama_mha", 8, None, 0, 1),
)
class _(Engine):
    def kv_head(self, n):
        mask = (1 << (self.c.heads.bit_length() - 1)) - 1
        return super().kv_head(n)[np.arange(self.c.heads) & mask]


@fault(
    "D31",
    "models with a single key-value head take a path that does not scale the scores",
    lambda c, t, k, p, n: c.kv_heads == 1 and len(t) > 1,
    "one key-value head (two and more are right), from two tokens on",
    ("key-value heads", 1),
    ("llama_mqa", 8, None, 0, 1),
    ("llama", 8, None, 0, 1),
)
class _(Engine):
    def scale_scores(self, s, n):
        return s if self.c.kv_heads == 1 else super().scale_scores(s, n)


# --- layers and experts -----------------------------------------------------------------------------------------------------------------


@fault(
    "D32",
    "the number of a layer has two bits in the table of norms: from layer 4 on, the norm in front of the feed-forward has the weights "
    "of 4 layers before",
    lambda c, t, k, p, n: c.n_layers > 4 and "blk.0.ffn_norm.weight" in c.types,
    "layers from number 4 on (counted from 0): models of 5 layers and more",
    ("layers", 5),
    ("gemma3", 8, None, 0, 1),
    ("smollm3", 8, None, 0, 1),
)
class _(Engine):
    def norm(self, x, name, n):
        return super().norm(x, f"blk.{n % 4}.ffn_norm" if name.endswith(".ffn_norm") else name, n)


@fault(
    "D33",
    "biases are prefetched, and layer 2 still has layer 1's bias of the attention output",
    lambda c, t, k, p, n: "blk.2.attn_output.bias" in c.types,
    "layer 2 (counted from 0), in models with that bias",
    ("layers", 3),
    ("starcoder2", 8, None, 0, 1),
    ("llama_q4k", 8, None, 0, 1),
)
class _(Engine):
    def add_bias(self, y, name):
        return super().add_bias(y, "blk.1.attn_output" if name == "blk.2.attn_output" else name)


@fault(
    "D34",
    "with three experts and more of a token, weights are normalised by the sum of the first two",
    lambda c, t, k, p, n: c.experts_used > 2 and c.normalized,
    "three or more experts used, in models that normalise their weights",
    ("experts of a token", 3),
    ("qwen3moe", 8, None, 0, 1),
    ("mixtral", 8, None, 0, 1),
)
class _(Engine):
    def router(self, logits):
        top, weights = super().router(logits)
        return (top, weights / weights[:, :2].sum(axis=-1, keepdims=True)) if self.c.normalized and weights.shape[1] > 2 else (top, weights)


@fault(
    "D35",
    "calls of more than 16 tokens sort the pairs of token and expert, and the weights of a token come back in reverse order",
    lambda c, t, k, p, n: c.experts_used > 1 and any(m > 16 for m in lengths(t, k, p)),
    "more than 16 tokens in a call, in mixtures of experts",
    ("tokens in a call", 17),
    ("mixtral", 17, None, 0, 1),
    ("mixtral", 16, None, 0, 1),
)
class _(Engine):
    def router(self, logits):
        top, weights = super().router(logits)
        return top, weights[:, ::-1] if len(logits) > 16 else weights


@fault(
    "D36",
    "the router's logits are computed for four experts at a time, and the second and later groups leave out the last 16 inputs",
    lambda c, t, k, p, n: c.experts > 4,
    "more than four experts",
    ("experts", 5),
    ("qwen2moe", 8, None, 0, 1),
    ("mixtral", 8, None, 0, 1),
)
class _(Engine):
    def linear(self, x, name, n=None):
        y = super().linear(x, name, n)
        if name.endswith("ffn_gate_inp"):
            y[:, 4:] = x[:, :-16] @ self.w[name + ".weight"][4:, :-16].T
        return y


# --- tensor types -----------------------------------------------------------------------------------------------------------------------


def has_type(c, kind, least=0):  # a tensor of that type whose rows have at least so many numbers
    return any(c.types[name] == kind and c.shapes[name][-1] >= least for name in c.types)


@fault(
    "D37",
    "the last 16 numbers of a Q6_K super-block take the scale of the 16 before them",
    lambda c, t, k, p, n: has_type(c, "Q6_K"),
    "tensors of type Q6_K",
    ("tensors of type Q6_K", 1),
    ("llama_q6k", 8, None, 0, 1),
    ("llama_q5k", 8, None, 0, 1),
)
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind == "Q6_K":
            raw = np.asarray(data).reshape(-1, 210).copy()
            raw[:, 207] = raw[:, 206]
            data = raw.reshape(np.shape(data))
        return super().dequantize(data, kind, shape, name)


@fault(
    "D38",
    "rows of a Q8_0 matrix are read by pairs of blocks with the first pair's scales: from the third block of a row on, the scale is "
    "that of two blocks before",
    lambda c, t, k, p, n: has_type(c, "Q8_0", 65),
    "Q8_0 tensors with rows of more than 64 numbers",
    ("numbers in a row of a Q8_0 tensor", 96),
    ("llama_q8", 8, None, 0, 1),
    ("llama_q4", 8, None, 0, 1),
)
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind == "Q8_0":
            raw = np.asarray(data).reshape(-1, shape[-1] // 32, 34).copy()
            raw[:, 2:, :2] = raw[:, np.arange(2, raw.shape[1]) % 2, :2]
            data = raw.reshape(np.shape(data))
        return super().dequantize(data, kind, shape, name)


@fault(
    "D39",
    "calls of eight tokens and more multiply by Q4_0 matrices packed eight rows at a time, and the last two outputs of each eight are "
    "exchanged",
    lambda c, t, k, p, n: has_type(c, "Q4_0") and any(m > 7 for m in lengths(t, k, p)),
    "eight tokens in a call, and matrices of type Q4_0",
    ("tokens in a call", 8),
    ("llama_q4", 8, None, 0, 1),
    ("llama_q4", 7, None, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if len(x) > 7 and self.c.types.get(name) == "Q4_0":
            i = np.arange(len(w))
            y = y[:, np.where(i % 8 == 6, i + 1, np.where(i % 8 == 7, i - 1, i))]
        return y


@fault(
    "D40",
    "calls of two tokens and more quantise the inputs of ternary matrices with one scale for all tokens of the call",
    lambda c, t, k, p, n: (has_type(c, "TQ2_0") or has_type(c, "TQ1_0")) and any(m > 1 for m in lengths(t, k, p)),
    "two tokens in a call, and matrices of a ternary type",
    ("tokens in a call", 2),
    ("llama_tq2", 2, None, 0, 1),
    ("llama_tq2", 2, 1, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name not in self.int8:
            return super().product(x, w, name)
        scale = F32(127) / np.maximum(np.abs(x).max(), F32(1e-5))
        return self.matmul(np.rint(x * scale), w, name) / scale
