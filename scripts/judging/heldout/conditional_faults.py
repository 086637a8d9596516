"""Forty faults that act under a condition only, as in kernels of real engines: tails, tiles, second chunks, ring buffers, reuse, threads.

FAULTS: id -> record with
  model       a model of models/ in which it acts (and `on`, a run in which it does; `off`, one in which it does not)
  what        the true cause, as the engine's author would say it
  when        predicate (config, tokens, chunk, prefix, threads) -> bool: whether the fault changes the run. config is Engine.c.
              chunk is None or a number: the prefix and the rest are each cut into chunks of that many tokens (None: one call each)
  edge        the true edge in words
  engine      the subclass of Engine that has the fault
on, off: (model, number of tokens, chunk, prefix, threads); `tokens` of a record replaces the usual tokens of `on`.
"""

from types import SimpleNamespace

import numpy as np
from engine import F32, Engine

FAULTS = {}


def calls(tokens, chunk, prefix):
    """The calls of the engine: (first, end) of each, prefix first."""
    total, out = len(tokens), []
    for a, b in ((0, prefix), (prefix, total)):
        step = chunk or max(b - a, 1)
        out += [(i, min(i + step, b)) for i in range(a, b, step)]
    return out


def fault(id, what, when, edge, on, off, tokens=None):
    def add(cls):
        FAULTS[id] = SimpleNamespace(id=id, model=on[0], what=what, when=when, edge=edge, on=on, off=off, tokens=tokens, engine=cls)
        return cls

    return add


@fault(
    "C01",
    "the matrix kernel multiplies 16 columns at a time and drops the columns left over",
    lambda c, t, k, p, n: any(m % 16 for m in (c.width, c.heads * c.head_dim, c.ffn)),
    "a matrix whose inputs are no multiple of 16",
    ("llama_wide", 24, None, 0, 1),
    ("llama", 24, None, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        m = w.shape[1] // 16 * 16
        return super().matmul(x[..., :m], w[:, :m], name)


@fault(
    "C02",
    "calls of more than 32 tokens take the GEMM path, which leaves out the bias of the down projection and of the attention output",
    lambda c, t, k, p, n: "blk.0.attn_output.bias" in c.types and any(b - a > 32 for a, b in calls(t, k, p)),
    "more than 32 tokens in one call (33 is wrong, 32 right), in models with those biases",
    ("starcoder2", 40, None, 0, 1),
    ("starcoder2", 40, 32, 0, 1),
)
class _(Engine):
    def add_bias(self, y, name):
        if self.count > 32 and name.endswith(("attn_output", "ffn_down")):
            return y
        return super().add_bias(y, name)


@fault(
    "C03",
    "the causal mask counts queries from the start of the chunk, keys from the start of the cache: query i of a later chunk sees keys 0..i",
    lambda c, t, k, p, n: len(calls(t, k, p)) > 1,
    "every call after the first (second chunk, or any reused prefix)",
    ("qwen2", 40, 16, 0, 1),
    ("qwen2", 40, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        return super().visible(qpos - self.start, kpos, n)


@fault(
    "C04",
    "after a reused prefix positions go on from the last cached position instead of the next: the first new token gets position prefix - 1",
    lambda c, t, k, p, n: p > 0 and len(t) > p,
    "any reused prefix",
    ("qwen3", 40, None, 13, 1),
    ("qwen3", 40, 13, 0, 1),
)
class _(Engine):
    def positions(self, start, count):
        return super().positions(start - 1 if self.prefix and self.call == "prompt" else start, count)

    def visible(self, qpos, kpos, n):
        return super().visible(self.start + np.arange(len(qpos)), np.arange(len(kpos)), n)


@fault(
    "C05",
    "a reused prefix that fills its blocks of 16 exactly is taken to be one token short: the key and value of its last token are not seen",
    lambda c, t, k, p, n: p > 0 and p % 16 == 0 and len(t) > p,
    "a reused prefix of a multiple of 16 tokens",
    ("llama", 40, None, 16, 1),
    ("llama", 40, None, 17, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if self.call == "prompt" and self.prefix and self.prefix % 16 == 0:
            seen[:, self.prefix - 1] = False
        return seen


@fault(
    "C06",
    "rows of a matrix are shared out as rows // threads each; the remainder is computed by no thread and stays zero",
    lambda c, t, k, p, n: n > 1 and any(s[-2] % n for name, s in c.shapes.items() if len(s) > 1 and (not name.startswith("token_embd") or c.tied)),
    "more than one thread, and a matrix whose rows are no multiple of the number of threads",
    ("llama", 24, None, 0, 3),
    ("llama", 24, None, 0, 4),
)
class _(Engine):
    def matmul(self, x, w, name):
        each = len(w) // self.threads
        y = np.zeros((*x.shape[:-1], len(w)), F32)
        for i in range(self.threads):
            y[..., i * each : (i + 1) * each] = self.num.mm(x, w[i * each : (i + 1) * each])
        return y


@fault(
    "C07",
    "attention's threads take key-value heads by their number; a query head whose thread is beyond the last key-value head reads the values of head 0",
    lambda c, t, k, p, n: n > c.kv_heads and c.kv_heads > 1 and any(h % n >= c.kv_heads and h // (c.heads // c.kv_heads) for h in range(c.heads)),
    "more threads than key-value heads (3 threads or more at 2 heads), in models with more than one",
    ("qwen2", 24, None, 0, 4),
    ("qwen2", 24, None, 0, 2),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        heads = self.kv_head(n)
        owner = np.arange(self.c.heads) % self.threads
        wrong = np.where(owner >= self.c.kv_heads, 0, heads)
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, wrong]))
        return self.num.attend(self, q, k, v, self.visible(qpos, kpos, n), n).swapaxes(0, 1)


@fault(
    "C08",
    "the ring buffer of a window's layers has `window` slots and is written before attention: a chunk overwrites keys that its first queries still need",
    lambda c, t, k, p, n: bool(c.window and c.local) and any(b > c.window and b - a > 1 for a, b in calls(t, k, p)),
    "a call of two tokens or more that ends beyond the window (token-by-token is right)",
    ("gemma2", 40, 8, 0, 1),
    ("gemma2", 40, 1, 0, 1),
)
class _(Engine):
    def cache_get(self, n):
        kept = super().cache_get(n)
        return tuple(x[-self.c.window :] for x in kept) if self.c.window and n in self.c.local else kept

    def softmax(self, s, n):  # a query all of whose keys are gone gives zeros
        s = np.where(np.isfinite(s).any(axis=-1, keepdims=True), s, F32(0))
        return super().softmax(s, n)


@fault(
    "C09",
    "the decode kernel of a window's layers tests distance <= window, one key too many; the prefill kernel is right",
    lambda c, t, k, p, n: bool(c.window and c.local) and any(b - a == 1 and a >= c.window for a, b in calls(t, k, p)),
    "a call of a single token at a position of at least the window",
    ("mistral", 40, 13, 0, 1),
    ("mistral", 40, 10, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if self.count == 1 and self.c.window and n in self.c.local:
            d = qpos[:, None] - kpos[None, :]
            seen = (d >= 0) & (d <= self.c.window)
        return seen


@fault(
    "C10",
    "logits are computed in tiles of 32 rows; the last, partial tile starts at vocabulary - 32 in the matrix but is written as if it began at its own place",
    lambda c, t, k, p, n: c.vocab % 32 != 0,
    "a vocabulary that is no multiple of 32: its last vocabulary % 32 logits are those of other tokens",
    ("llama_wide", 24, None, 0, 1),
    ("llama", 24, None, 0, 1),
)
class _(Engine):
    def head(self, x):
        y = super().head(x)
        rest = self.c.vocab % 32
        if rest:
            first = self.c.vocab - 32
            y[:, -rest:] = y[:, first : first + rest].copy()
        return y


@fault(
    "C11",
    "the special kernel for one key-value head gets queries that were scaled already, and scales the scores again",
    lambda c, t, k, p, n: c.kv_heads == 1 and c.heads > 1,
    "models with one key-value head and several query heads",
    ("llama_mqa", 24, None, 0, 1),
    ("llama", 24, None, 0, 1),
)
class _(Engine):
    def scale_scores(self, s, n):
        s = super().scale_scores(s, n)
        return super().scale_scores(s, n) if self.c.kv_heads == 1 and self.c.heads > 1 else s


@fault(
    "C12",
    "heads are padded to a power of two, and scores are scaled by the padded width's root instead of the head's",
    lambda c, t, k, p, n: c.head_dim & (c.head_dim - 1) != 0 and c.attn_scale == c.head_dim**-0.5,
    "a head width that is no power of two (24 is scaled as 32)",
    ("gemma3", 24, None, 0, 1),
    ("llama", 24, None, 0, 1),
)
class _(Engine):
    def scale_scores(self, s, n):
        padded = 1 << (self.c.head_dim - 1).bit_length()
        return s * F32(padded**-0.5) if self.c.attn_scale == self.c.head_dim**-0.5 else super().scale_scores(s, n)


@fault(
    "C13",
    "scores are dot products of 8 numbers at a time; what is left of a head behind the last 8 is not added",
    lambda c, t, k, p, n: c.head_dim % 8 != 0,
    "a head width that is no multiple of 8",
    ("llama_wide", 24, None, 0, 1),
    ("gemma2", 14, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        m = self.c.head_dim // 8 * 8
        return super().attend(q[..., :m], k[..., :m], v, qpos, kpos, n)


@fault(
    "C14",
    "queries are processed in pairs; in a call with an odd number of them the last one is read from the row before it",
    lambda c, t, k, p, n: any(b - a > 1 and (b - a) % 2 for a, b in calls(t, k, p)),
    "a call with an odd number of tokens, at least 3: its last token is wrong",
    ("gemma", 31, None, 0, 1),
    ("gemma", 30, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) > 1 and len(q) % 2:
            q = np.concatenate([q[:-1], q[-2:-1]])
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "C15",
    "attention over tiles of 64 keys: the weighted values of earlier tiles are not rescaled when a later tile raises the maximum, only the sum is",
    lambda c, t, k, p, n: len(t) > 64,
    "more than 64 keys: tokens from position 64 on (those for which a later tile has a larger score)",
    ("llama", 80, None, 0, 1),
    ("llama", 60, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        heads, seen = self.kv_head(n), self.visible(qpos, kpos, n)
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))
        s = np.where(seen, self.cap(self.scale_scores(self.num.qk(q, k), n), n), F32(-np.inf))
        top = np.full((*s.shape[:2], 1), -np.inf, F32)
        total, out = np.zeros_like(top), np.zeros((*s.shape[:2], v.shape[2]), F32)
        for i in range(0, s.shape[2], 64):
            part = s[..., i : i + 64]
            new = np.maximum(top, part.max(axis=-1, keepdims=True))
            p = self.num.exp(part - new)
            total = total * self.num.exp(top - new) + self.num.total(p)
            out = out + self.num.pv(p, v[:, i : i + 64])  # out * exp(top - new) is missing
            top = new
        return (out / total).swapaxes(0, 1)


@fault(
    "C16",
    "the decode kernel fills its keys up to a multiple of 32 with zeros and does not mask them: they take part in the softmax with the score 0",
    lambda c, t, k, p, n: any(b - a == 1 and b % 32 for a, b in calls(t, k, p)),
    "a call of a single token when the keys are no multiple of 32",
    ("llama", 40, 13, 0, 1),
    ("llama", 40, 20, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        pad = -len(k) % 32 if len(q) == 1 else 0
        if pad:
            zeros = np.zeros((pad, *k.shape[1:]), F32)
            k, v, kpos = np.concatenate([k, zeros]), np.concatenate([v, zeros]), np.concatenate([kpos, np.full(pad, qpos[0])])
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "C17",
    "the kernel that finds the largest router logits sorts a power of two of experts; experts beyond the largest power of two are never chosen",
    lambda c, t, k, p, n: c.experts > 0 and c.experts & (c.experts - 1) != 0,
    "a number of experts that is no power of two (experts 4 and 5 of 6 are never chosen)",
    ("qwen2moe", 30, None, 0, 1),
    ("qwen3moe", 30, None, 0, 1),
)
class _(Engine):
    def router(self, logits):
        e = 1 << (self.c.experts.bit_length() - 1)
        p = self.num.softmax(logits)
        top = np.argsort(-logits[:, :e], axis=-1, kind="stable")[:, : self.c.experts_used]
        p = np.take_along_axis(p, top, axis=-1)
        return top, p / self.num.total(p) if self.c.normalized else p


@fault(
    "C18",
    "outputs of experts are added up in pairs; with an odd number of experts for each token the last one's is left out",
    lambda c, t, k, p, n: c.experts > 0 and c.experts_used % 2 == 1,
    "an odd number of experts used",
    ("qwen3moe", 24, None, 0, 1),
    ("mixtral", 24, None, 0, 1),
)
class _(Engine):
    def combine(self, y, weights):
        k = self.c.experts_used // 2 * 2
        return super().combine(y[:, :k], weights[:, :k])


@fault(
    "C19",
    "the router of the single-token path does not divide the chosen experts' weights by their sum",
    lambda c, t, k, p, n: c.experts > 0 and c.normalized and any(b - a == 1 for a, b in calls(t, k, p)),
    "a call of a single token, in models that normalise the weights",
    ("mixtral", 25, 12, 0, 1),
    ("mixtral", 24, 12, 0, 1),
)
class _(Engine):
    def router(self, logits):
        top, p = super().router(logits)
        return (top, np.take_along_axis(self.num.softmax(logits), top, axis=-1)) if len(logits) == 1 else (top, p)


@fault(
    "C20",
    "calls with fewer tokens than experts take a small-batch kernel, which uses the first token's experts for all tokens of the call",
    lambda c, t, k, p, n: c.experts > 0 and any(1 < b - a < c.experts for a, b in calls(t, k, p)),
    "a call of at least 2 tokens and fewer than the number of experts",
    ("qwen3moe", 30, 6, 0, 1),
    ("qwen3moe", 32, 8, 0, 1),
)
class _(Engine):
    def router(self, logits):
        top, p = super().router(logits)
        if len(top) < self.c.experts:
            top = np.repeat(top[:1], len(top), axis=0)
            p = np.take_along_axis(self.num.softmax(logits), top, axis=-1)
            p = p / self.num.total(p) if self.c.normalized else p
        return top, p


@fault(
    "C21",
    "layers are set up in pairs; in a model with an odd number of layers the last one is given the feed-forward norm of the layer before",
    lambda c, t, k, p, n: c.n_layers > 1 and c.n_layers % 2 == 1 and "blk.0.ffn_norm.weight" in c.types,
    "an odd number of layers, at least 3: the last layer",
    ("qwen2", 24, None, 0, 1),
    ("smollm3", 24, None, 0, 1),
)
class _(Engine):
    def norm(self, x, name, n):
        last = self.c.n_layers - 1
        if n == last > 0 and self.c.n_layers % 2 and name.endswith(".ffn_norm"):
            name = f"blk.{last - 1}.ffn_norm"
        return super().norm(x, name, n)


@fault(
    "C22",
    "the Q4_0 kernel takes 4 blocks of a row at a time; the tail loop for the blocks left over subtracts 7 from the codes instead of 8",
    lambda c, t, k, p, n: any(kind == "Q4_0" and c.shapes[name][-1] // 32 % 4 for name, kind in c.types.items()),
    "Q4_0 matrices whose rows are no multiple of 4 blocks (128 weights): the blocks behind the last 4",
    ("llama_q4", 24, None, 0, 1),
    ("llama_q41", 24, None, 0, 1),
)
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        x = super().dequantize(data, kind, shape, name)
        blocks = shape[-1] // 32
        if kind == "Q4_0" and blocks % 4:
            raw = np.ascontiguousarray(data).view(np.uint8).reshape(shape[0], blocks, 18)
            d = raw[..., :2].copy().view(np.float16).astype(F32)
            x = x.reshape(shape[0], blocks, 32)
            tail = blocks // 4 * 4
            x[:, tail:] += d[:, tail:]
        return x


@fault(
    "C23",
    "the Q6_K kernel of the head (not that of the layers) uses one scale for two neighbouring sub-blocks of 16: odd ones get the scale before theirs",
    lambda c, t, k, p, n: c.types.get("output.weight", c.types["token_embd.weight"]) == "Q6_K",
    "a head (output.weight, or the tied embedding) of type Q6_K",
    ("llama_q6k", 24, None, 0, 1),
    ("llama_q4k", 24, None, 0, 1),
)
class _(Engine):
    def finish_load(self):
        super().finish_load()
        name = "token_embd.weight" if self.c.tied else "output.weight"
        self.head_matrix = self.w[name]
        if self.c.types[name] == "Q6_K":
            raw = np.ascontiguousarray(self.raw[name].data).view(np.uint8).reshape(-1, 210)
            scale = raw[:, 192:208].view(np.int8).astype(F32)
            wrong = np.repeat(scale[:, 0::2], 2, axis=1)
            x = self.w[name].reshape(len(raw), 16, 16)
            safe = np.where(scale == 0, 1, scale)
            self.head_matrix = (x / safe[..., None] * wrong[..., None]).reshape(self.w[name].shape).astype(F32)

    def head(self, x):
        name = "token_embd" if self.c.tied else "output"
        y = self.add_bias(self.product(x, self.head_matrix, name + ".weight"), "output")
        return self.cap_logits(self.scale_logits(y))


@fault(
    "C24",
    "the lookup in a Q8_0 embedding keeps the row number in 6 bits: token ids of 64 and more read the row id - 64",
    lambda c, t, k, p, n: c.types["token_embd.weight"] == "Q8_0" and any(x >= 64 for x in t),
    "a Q8_0 embedding and a token id of at least 64",
    ("llama_q8", 24, None, 0, 1),
    ("llama", 24, None, 0, 1),
)
class _(Engine):
    def rows(self, tokens):
        return super().rows(tokens & 63 if self.c.types["token_embd.weight"] == "Q8_0" else tokens)


@fault(
    "C25",
    "token id 0 is taken for padding, and masked as a key for all other tokens",
    lambda c, t, k, p, n: any(x == 0 for x in t[:-1]),
    "token id 0 in the prompt, in front of its last token",
    ("qwen2", 24, None, 0, 1),
    ("qwen2", 24, None, 0, 1),
    tokens=[5, 9, 0, 17, 3, 44, 0, 61, 2, 8, 33, 21, 7, 0, 12, 50, 4, 19, 28, 31, 6, 40, 11, 1],
)
class _(Engine):
    def prepare(self, tokens):
        self.padding = tokens == 0
        return tokens

    def visible(self, qpos, kpos, n):
        pad = self.padding[kpos][None, :] & (qpos[:, None] != kpos[None, :])
        return super().visible(qpos, kpos, n) & ~pad


def repeated_blocks(tokens, size=8):
    """By block number: the first block with the same tokens."""
    first, out = {}, {}
    for i in range(len(tokens) // size):
        block = tuple(int(x) for x in tokens[i * size : (i + 1) * size])
        out[i] = first.setdefault(block, i)
    return out


@fault(
    "C26",
    "cache blocks of 8 tokens are shared by a hash of their own tokens, without those in front: a block with the tokens of an earlier one reads its keys and values",
    lambda c, t, k, p, n: any(i != j for i, j in repeated_blocks(t).items()),
    "two aligned blocks of 8 equal tokens in the prompt",
    ("llama", 32, None, 0, 1),
    ("llama", 32, None, 0, 1),
    tokens=[3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 93, 23, 84, 62, 64, 3, 14, 15, 9, 2, 6, 5, 35, 33, 83, 27, 50, 28, 84, 19, 71],
)
class _(Engine):
    def prepare(self, tokens):
        self.shared = repeated_blocks(tokens)
        return tokens

    def cache_get(self, n):
        k, v, pos = super().cache_get(n)
        k, v = k.copy(), v.copy()
        for i, j in self.shared.items():
            if i != j and (i + 1) * 8 <= len(k):
                k[i * 8 : (i + 1) * 8], v[i * 8 : (i + 1) * 8] = k[j * 8 : (j + 1) * 8], v[j * 8 : (j + 1) * 8]
        return k, v, pos


@fault(
    "C27",
    "sines and cosines are tabulated for 64 positions; later positions read the last row of the table",
    lambda c, t, k, p, n: len(t) > 64 and len(c.no_rope) < c.n_layers,
    "prompts longer than 64 tokens: positions from 64 on are all turned as position 63",
    ("qwen3", 80, None, 0, 1),
    ("qwen3", 64, None, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.minimum(pos, 63), n, which)


@fault(
    "C28",
    "dynamic NTK scaling is switched on by the length so far although the file does not ask for it: from 48 tokens on, RoPE's base grows with the length",
    lambda c, t, k, p, n: any(b > 48 for a, b in calls(t, k, p)) and len(c.no_rope) < c.n_layers,
    "a call that ends beyond position 48 (cached keys of earlier calls keep the old base)",
    ("qwen2", 60, None, 0, 1),
    ("qwen2", 48, None, 0, 1),
)
class _(Engine):
    def frequencies(self, n):
        length, c = self.start + self.count, self.c
        if length <= 48:
            return super().frequencies(n)
        base = c.rope_base
        c.rope_base = base * (2.0 * length / 48 - 1) ** (c.rope_width / (c.rope_width - 2))
        try:
            return super().frequencies(n)
        finally:
            c.rope_base = base


@fault(
    "C29",
    "two cache buffers take turns; from the third call on the keys that the previous call wrote are still in the other buffer and are not seen",
    lambda c, t, k, p, n: len(calls(t, k, p)) > 2,
    "the third call and later ones",
    ("llama", 40, 12, 0, 1),
    ("llama", 40, 20, 0, 1),
)
class _(Engine):
    def reset(self):
        super().reset()
        self.starts = []

    def forward(self, tokens, start):
        self.starts.append(start)
        super().forward(tokens, start)

    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if len(self.starts) > 2:
            seen[:, self.starts[-2] : self.starts[-1]] = False
        return seen


@fault(
    "C30",
    "each call starts on a new page of 8 slots, and positions are slot numbers: behind a call that does not fill its page positions jump to the next multiple of 8",
    lambda c, t, k, p, n: any(a % 8 for a, b in calls(t, k, p)) and len(c.no_rope) < c.n_layers,
    "a call that does not start at a multiple of 8",
    ("phi3", 40, 12, 0, 1),
    ("phi3", 40, 16, 0, 1),
)
class _(Engine):
    def reset(self):
        super().reset()
        self.slot = 0

    def positions(self, start, count):
        self.first = -(-self.slot // 8) * 8
        self.slot = self.first + count
        self.order = start + np.arange(count)
        return self.first + np.arange(count)

    def visible(self, qpos, kpos, n):
        return super().visible(self.order, np.arange(len(kpos)), n)


@fault(
    "C31",
    "the single-token attention kernel has no soft cap of scores",
    lambda c, t, k, p, n: bool(c.score_cap) and any(b - a == 1 and a > 0 for a, b in calls(t, k, p)),
    "a call of a single token (not the first of all), in models with capped scores",
    ("gemma2", 25, 12, 0, 1),
    ("gemma2", 24, 12, 0, 1),
)
class _(Engine):
    def cap(self, s, n):
        return s if s.shape[1] == 1 else super().cap(s, n)


@fault(
    "C32",
    "a first call is taken for purely causal and goes to a kernel without the window",
    lambda c, t, k, p, n: bool(c.window and c.local) and calls(t, k, p)[0][1] > c.window,
    "a first call of more tokens than the window",
    ("gemma2", 40, None, 0, 1),
    ("gemma2", 40, 16, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        return qpos[:, None] >= kpos[None, :] if self.start == 0 else super().visible(qpos, kpos, n)


@fault(
    "C33",
    "biases are added by 64 lanes once: outputs from the 64th on get none",
    lambda c, t, k, p, n: any(name.endswith(".bias") and "norm" not in name and s[-1] > 64 for name, s in c.shapes.items()),
    "a bias of more than 64 numbers: those from index 64 on",
    ("phi2", 24, None, 0, 1),
    ("qwen3", 24, None, 0, 1),
)
class _(Engine):
    def add_bias(self, y, name):
        z = super().add_bias(y, name)
        return np.concatenate([z[..., :64], y[..., 64:]], axis=-1) if y.shape[-1] > 64 else z


@fault(
    "C34",
    "the down projection is summed over threads by a tree that halves the number of partial sums: an odd one out is lost",
    lambda c, t, k, p, n: n & (n - 1) != 0,
    "a number of threads that is no power of two: part of the inputs of ffn_down is missing",
    ("qwen2", 24, None, 0, 3),
    ("qwen2", 24, None, 0, 4),
)
class _(Engine):
    def matmul(self, x, w, name):
        if "ffn_down" not in name or self.threads == 1:
            return super().matmul(x, w, name)
        cuts = [w.shape[1] * i // self.threads for i in range(self.threads + 1)]
        parts = [self.num.mm(x[..., a:b], w[:, a:b]) for a, b in zip(cuts, cuts[1:])]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [parts[i] + parts[i + half] for i in range(half)]
        return parts[0]


@fault(
    "C35",
    "the embedding is scaled in place in the table that is also the head: rows of tokens that have occurred in the call give logits scaled again",
    lambda c, t, k, p, n: c.tied and c.embed_scale != 1,
    "a tied embedding with a scale: logits of tokens that the prompt holds",
    ("gemma", 24, None, 0, 1),
    ("llama_tied", 24, None, 0, 1),
)
class _(Engine):
    def embed(self, tokens, pos):
        h = super().embed(tokens, pos)
        if self.c.tied and self.c.embed_scale != 1:
            self.dirty = self.w["token_embd.weight"].copy()
            self.dirty[tokens] *= F32(self.c.embed_scale)
        return h

    def head(self, x):
        clean = self.w["token_embd.weight"]
        self.w["token_embd.weight"] = getattr(self, "dirty", clean)
        try:
            return super().head(x)
        finally:
            self.w["token_embd.weight"] = clean


@fault(
    "C36",
    "the RoPE kernel computes positions from the row within a tile of 48: rows from 48 on of a call are turned as rows 0, 1, ...",
    lambda c, t, k, p, n: any(b - a > 48 for a, b in calls(t, k, p)) and len(c.no_rope) < c.n_layers,
    "a call of more than 48 tokens: its tokens from the 49th on",
    ("stablelm", 70, None, 0, 1),
    ("stablelm", 70, 48, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos[0] + np.arange(len(pos)) % 48, n, which)


@fault(
    "C37",
    "the gate's activation is launched for ffn // 64 blocks: what is left of the feed-forward width is multiplied without activation",
    lambda c, t, k, p, n: c.ffn % 64 != 0 and not c.experts and c.arch not in ("gptneox", "gpt2", "starcoder2", "phi2"),
    "a gated feed-forward width that is no multiple of 64: its last ffn % 64 numbers",
    ("qwen3", 24, None, 0, 1),
    ("llama_q8", 24, None, 0, 1),
)
class _(Engine):
    def gated(self, gate, up, n=None):
        y, m = super().gated(gate, up, n), self.c.ffn // 64 * 64
        return np.concatenate([y[..., :m], (gate * up)[..., m:]], axis=-1) if not self.c.experts else y


@fault(
    "C38",
    "partial RoPE turns whole vectors of 8 numbers only: of a rotated width of 12 the first 8 are turned, paired at distance 4",
    lambda c, t, k, p, n: c.rope_width % 8 != 0,
    "a rotated width that is no multiple of 8",
    ("phi3", 24, None, 0, 1),
    ("gptneox", 24, None, 0, 1),
)
class _(Engine):
    def rotate(self, x, sin, cos):
        j = self.c.rope_width // 8 * 4
        return super().rotate(x, sin[..., :j], cos[..., :j])


@fault(
    "C39",
    "when a prefix is reused, layers with a window get back only the last half window of its keys",
    lambda c, t, k, p, n: bool(c.window and c.local) and p > c.window // 2 and len(t) > p,
    "a reused prefix longer than half the window (9 tokens at a window of 16)",
    ("gemma2", 30, None, 12, 1),
    ("gemma2", 30, None, 8, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if self.call == "prompt" and self.prefix and self.c.window and n in self.c.local:
            seen[:, : max(self.prefix - self.c.window // 2, 0)] = False
        return seen


@fault(
    "C40",
    "a last chunk of one token is taken for generation, and gets the position of the prompt's length instead of the last one",
    lambda c, t, k, p, n: bool(k and k > 1) and len(t) - p > 1 and (len(t) - p) % k == 1 and len(c.no_rope) < c.n_layers,
    "a prompt that leaves a remainder of exactly one token for the last chunk: that token",
    ("qwen3", 41, 20, 0, 1),
    ("qwen3", 42, 20, 0, 1),
)
class _(Engine):
    def positions(self, start, count):
        pos = super().positions(start, count)
        last = self.call == "prompt" and count == 1 and start == self.prompt - 1 > self.prefix and self.chunk != 1
        return pos + 1 if last else pos
