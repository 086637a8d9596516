"""Forty more faults that act under a condition only (J01..J40), by an eighth author: conditions of the length of a call, of where it begins, of a
prefix, of threads, of shapes, of the tokens themselves and of the type of a matrix. About half are ported from public reports on inference
engines, named in `source` (GitHub, without the host); sizes of tiles, pages and buffers are scaled down to the models. Others are common practice.

FAULTS: id -> record as in conditional_faults_f.py.
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


def up(x, size):
    return -(-x // size)


def unpacked(engine, name, size, change):
    """A matrix as the engine unpacks it when `change` has been at its blocks of `size` bytes."""
    data = np.array(engine.raw[name].data).view(np.uint8)
    change(data.reshape(-1, size))
    return engine.dequantize(data, engine.c.types[name], engine.c.shapes[name], name).reshape(engine.c.shapes[name])


# --- the length of a call ---------------------------------------------------------------------------------------------------------------------


@fault(
    "J01",
    "the aligned kernel for whole tiles of 16 rows applies SiLU to up in place of gate",
    "ml-explore/mlx-lm/pull/767 (gate and up in the wrong order in one of several paths)",
    lambda c, t, k, p, n: any(m % 16 == 0 for m in lengths(t, k, p)),
    "a call whose number of tokens is a multiple of 16 (16 and 32 are wrong, 15 and 17 right)",
    ("tokens in a call", 16),
    ("llama_long", 16, None, 0, 1),
    ("llama_long", 17, None, 0, 1),
)
class _(Engine):
    def gated(self, gate, up, n=None):
        return super().gated(up, gate, n) if len(gate) % 16 == 0 else super().gated(gate, up, n)


@fault(
    "J02",
    "the small tile is taken for matrices of up to 32 outputs, however many tokens there are, and reaches 32 of them: keys of later tokens of the "
    "call are zero",
    "ggml-org/llama.cpp/issues/26921",
    lambda c, t, k, p, n: c.kv_heads * c.head_dim <= 32 and any(m > 32 for m in lengths(t, k, p)),
    "more than 32 tokens in a call (33 are wrong, 32 right), where the keys of a token have no more than 32 numbers",
    ("tokens in a call", 33),
    ("minicpm", 33, None, 0, 1),
    ("minicpm", 32, None, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name.endswith("attn_k.weight") and len(w) <= 32:
            y[32:] = 0
        return y


@fault(
    "J03",
    "the fused addition for 8 rows and more multiplies the stream by the residual factor in place of the branch",
    "common practice: a fused addition with one factor, taken over from an engine that scales the other operand",
    lambda c, t, k, p, n: c.residual_scale != 1 and any(m >= 8 for m in lengths(t, k, p)),
    "calls of 8 or more tokens (7 are right), in a model that scales its branches",
    ("tokens in a call", 8),
    ("granite", 8, None, 0, 1),
    ("granite", 7, None, 0, 1),
)
class _(Engine):
    def residual(self, h, y, n, which):
        return self.num.add(h * F32(self.c.residual_scale), y) if len(h) >= 8 else super().residual(h, y, n, which)


@fault(
    "J04",
    "layer norm for two to four rows goes to the kernel of RMS norm: the mean is not taken off",
    "common practice: one entry for both norms, of which the small kernel forgets the flag",
    lambda c, t, k, p, n: c.arch in LAYER_NORM and any(2 <= m <= 4 for m in lengths(t, k, p)),
    "calls of 2 to 4 tokens (1 and 5 are right), in a model with layer norms",
    ("tokens in a call", 2),
    ("phi2", 2, None, 0, 1),
    ("phi2", 5, None, 0, 1),
)
class _(Engine):
    def layer_norm(self, x, w, b):
        if not 2 <= len(x) <= 4:
            return super().layer_norm(x, w, b)
        y = x * self.num.rsqrt(self.num.mean(x * x) + self.c.eps) * w
        return y if b is None else y + b


@fault(
    "J05",
    "the fused kernel for one token adds the bias of ffn_up behind the activation",
    "common practice: a bias in the epilogue of a kernel that ends with the activation",
    lambda c, t, k, p, n: c.arch in ("starcoder2", "gpt2", "gptneox", "phi2") and 1 in lengths(t, k, p),
    "calls of one token, in a model whose feed-forward has biases and no gate",
    ("tokens in a call", 1),
    ("starcoder2", 5, 4, 0, 1),
    ("starcoder2", 6, 4, 0, 1),
)
class _(Engine):
    def dense(self, x, n, end=""):
        name = f"blk.{n}.ffn_up"
        if len(x) > 1 or name + ".bias" not in self.w:
            return super().dense(x, n, end)
        y = self.put("ffn_up", self.product(x, self.w[name + ".weight"], name + ".weight"), n)
        y = self.put("ffn_out", self.num.gelu(y) + self.w[name + ".bias"], n)
        return self.put("ffn_down", self.linear(y, f"blk.{n}.ffn_down", n), n)


@fault(
    "J06",
    "the fused product for queries, keys and values of more than 20 tokens adds the bias of the keys to the values as well, in layers but the "
    "first",
    "common practice: three biases in one buffer, with an offset of the second where that of the third belongs; a first layer that is not fused",
    lambda c, t, k, p, n: c.arch == "qwen2" and any(m > 20 for m in lengths(t, k, p)),
    "more than 20 tokens in a call (21 are wrong, 20 right), in a model with biases of keys and values",
    ("tokens in a call", 21),
    ("qwen2", 21, None, 0, 1),
    ("qwen2", 20, None, 0, 1),
)
class _(Engine):
    def add_bias(self, y, name):
        wrong = name.endswith("attn_v") and not name.startswith("blk.0.") and len(y) > 20
        return super().add_bias(y, name.replace("attn_v", "attn_k") if wrong else name)


@fault(
    "J07",
    "verified drafts (2 to 8 tokens behind a cache) are masked as the branches of a tree: each sees the cache and itself, not those before it",
    "common practice: a mask of a tree that is used for a plain list of drafts",
    lambda c, t, k, p, n: any(a > 0 and 2 <= b - a <= 8 for a, b in spans(t, k, p)),
    "calls of 2 to 8 tokens that are not the first one (9 are right)",
    ("tokens", 3),
    ("llama_theta", 12, None, 10, 1),
    ("llama_theta", 19, None, 10, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if self.start and 2 <= len(qpos) <= 8:
            seen = seen & ((kpos < self.start) | (kpos == qpos[:, None]))
        return seen


@fault(
    "J08",
    "calls of more than 32 rows take a norm that has no epsilon",
    "common practice: a second kernel of the norm, tested on rows of ordinary size where epsilon does not matter",
    lambda c, t, k, p, n: c.eps > 1e-3 and any(m > 32 for m in lengths(t, k, p)),
    "more than 32 tokens in a call (33 are wrong, 32 right), in a model with a large epsilon",
    ("tokens in a call", 33),
    ("llama_eps", 33, None, 0, 1),
    ("llama_eps", 32, None, 0, 1),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        return super().rms_norm(x, w, 0 if len(x) > 32 else eps, name)


@fault(
    "J09",
    "the last norm of more than 24 rows works on blocks of 8; in a last block that is not full, all rows are divided by the root of its first",
    "common practice: a factor for each row in a register that the masked tail does not load",
    lambda c, t, k, p, n: any(b - a > 24 and (b - a) % 8 >= 2 for a, b in written(t, k, p)),
    "more than 24 tokens in a call, of which two or more are left behind the last full 8 (26 are wrong, 24, 25 and 32 right)",
    ("tokens in a call", 26),
    ("qwen3", 26, None, 0, 1),
    ("qwen3", 25, None, 0, 1),
)
class _(Engine):
    def norm(self, x, name, n):
        m = len(x)
        if name != "output_norm" or m <= 24 or m % 8 < 2:
            return super().norm(x, name, n)
        mean = self.num.mean(x * x)
        mean[m // 8 * 8 :] = mean[m // 8 * 8]
        return self.num.gain(x * self.num.rsqrt(mean + self.c.eps), self.w[name + ".weight"])


# --- where a call begins, and how many there are -------------------------------------------------------------------------------------------------


@fault(
    "J10",
    "the two splits of the keys are sized by the tiles of 16 that were in the cache before the call: keys behind both are not visited",
    "Dao-AILab/flash-attention/issues/778",
    lambda c, t, k, p, n: any(a > 0 and b > 32 * up(up(a, 16), 2) for a, b in spans(t, k, p)),
    "a call, not the first one, that ends behind 32 keys where up to 32 were there before, or behind 64 where 33 to 64 were",
    ("tokens", 33),
    ("qwen3", 40, None, 8, 1),
    ("qwen3", 32, None, 8, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return seen & (kpos < 32 * up(up(self.start, 16), 2)) if self.start else seen


@fault(
    "J11",
    "the cache has room for 40 tokens, and an update that does not fit is moved forward until it does: a later call overwrites the newest keys "
    "before it",
    "jax-ml/jax: dynamic_update_slice clamps the place of an update",
    lambda c, t, k, p, n: any(a > 0 and b > 40 for a, b in spans(t, k, p)),
    "a call, not the first one, that ends beyond position 40",
    ("tokens", 41),
    ("stablelm", 41, None, 40, 1),
    ("stablelm", 40, None, 36, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        if self.keys[n] is not None:
            place = max(min(len(self.keys[n][2]), 40 - len(pos)), 0)
            self.keys[n] = tuple(x[:place] for x in self.keys[n])
        super().cache_put(n, k, v, pos)


@fault(
    "J12",
    "a graph is used again where the call has as many tokens as the one before, and its positions are not: RoPE gets those of the first such call",
    "ikawrakow/ik_llama.cpp/pull/2260 (a graph that is used again by too few of the things it depends on)",
    lambda c, t, k, p, n: any(x == y >= 2 for x, y in zip(lengths(t, k, p), lengths(t, k, p)[1:])),
    "two calls of the same number of tokens (two or more), one behind the other",
    ("calls", 2),
    ("qwen3_yarn", 6, 3, 0, 1),
    ("qwen3_yarn", 5, 3, 0, 1),
)
class _(Engine):
    def prepare(self, tokens):
        self.shape = None
        return super().prepare(tokens)

    def forward(self, tokens, start):
        if len(tokens) != self.shape or len(tokens) < 2:
            self.shape, self.stale = len(tokens), start
        super().forward(tokens, start)

    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.arange(self.stale, self.stale + len(x)), n, which)


@fault(
    "J13",
    "a first call of one token is taken for a step of generation behind a token that is not there: it is turned by position 1",
    "common practice: a position that is the length of the cache plus one where a call has one token",
    lambda c, t, k, p, n: spans(t, k, p)[0] == (0, 1),
    "a first call of one token (logits are wrong where a later call sees its key)",
    ("tokens", 1),
    ("olmo2", 4, None, 1, 1),
    ("olmo2", 4, None, 2, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos + 1 if self.start == 0 and len(x) == 1 else pos, n, which)


@fault(
    "J14",
    "the long factors are taken where a call ends at the original length or behind it; up to exactly that length, the short ones are right",
    "unslothai/unsloth/pull/10681, vllm-project/vllm/pull/27431",
    lambda c, t, k, p, n: c.rope_scaling == "longrope" and any(b >= c.rope_original for a, b in spans(t, k, p)),
    "a call that ends at position 64 or behind it (63 tokens are right), in a model with LongRoPE",
    ("tokens", 64),
    ("phi3_long", 64, None, 0, 1),
    ("phi3_long", 63, None, 0, 1),
)
class _(Engine):
    def rope_factors(self):
        if self.start + self.count >= self.c.rope_original:
            return self.w.get("rope_factors_long.weight")
        return super().rope_factors()


@fault(
    "J15",
    "a ring of one window whose write index is back at its beginning is taken for empty: the call sees nothing of what came before",
    "ollama/ollama/pull/14912 (a rotating cache around its wrap); a ring that is full and one that is empty have the same indices",
    lambda c, t, k, p, n: bool(c.local) and any(a > 0 and a % c.window == 0 for a, b in spans(t, k, p)),
    "a call that begins at a multiple of the window (16, 32 and 48; 15 and 17 are right)",
    ("tokens", 17),
    ("gemma2", 20, 16, 0, 1),
    ("gemma2", 20, 15, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if n in self.c.local and self.start and self.start % self.c.window == 0:
            k, v, kpos = (x[-len(q) :] for x in (k, v, kpos))
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "J16",
    "pages of 8 keys are freed once their first key has left the window of a call's first token; the keys in them that it still sees are zeros",
    "common practice: pages behind the window that are counted by the wrong one of their ends",
    lambda c, t, k, p, n: bool(c.local) and any(a >= c.window and (a - c.window) % 8 != 7 for a, b in spans(t, k, p)),
    "a call that begins at position 24 or behind it, where the window is 24, but 31, 39, 47, ...",
    ("tokens", 25),
    ("mistral", 25, None, 24, 1),
    ("mistral", 24, None, 23, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if n in self.c.local and self.start >= self.c.window:
            gone = (kpos // 8 * 8 <= self.start - self.c.window)[:, None, None]
            k, v = np.where(gone, F32(0), k), np.where(gone, F32(0), v)
        return super().attend(q, k, v, qpos, kpos, n)


# --- a prefix ----------------------------------------------------------------------------------------------------------------------------------


@fault(
    "J17",
    "a stored prefix comes back by whole pages of 8 tokens; those in its last page, if it is not full, are taken for present and are not",
    "common practice: a prefix store that keeps full pages only, and a length that counts all tokens",
    lambda c, t, k, p, n: p % 8 != 0,
    "a prefix that is no multiple of 8",
    ("prefix", 1),
    ("llama_mqa", 12, None, 9, 1),
    ("llama_mqa", 12, None, 8, 1),
)
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix:
            self.keys = {n: tuple(x[: self.prefix // 8 * 8] for x in old) for n, old in self.keys.items()}


@fault(
    "J18",
    "attention to a shared prefix is a kernel of its own without a window: queries behind it see all of the prefix",
    "vllm-project/vllm/issues/15710 (why cascade attention and windows do not go together)",
    lambda c, t, k, p, n: bool(c.local) and p > 0 and len(t) > c.window,
    "a prefix, and more tokens than the window (19 are wrong, 18 right)",
    ("tokens", 19),
    ("starcoder2_w", 19, None, 4, 1),
    ("starcoder2_w", 18, None, 4, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return seen | (kpos < self.prefix) if self.prefix and self.call == "prompt" and n in self.c.local else seen


@fault(
    "J19",
    "the first call behind a prefix gets its tokens as embeddings, to which no learned positions are added",
    "common practice: an entry for embeddings that leaves out what comes before the first layer",
    lambda c, t, k, p, n: c.arch == "gpt2" and p > 0,
    "a prefix, in a model with learned positions",
    ("prefix", 1),
    ("gpt2", 6, None, 2, 1),
    ("gpt2", 6, None, 0, 1),
)
class _(Engine):
    def embed(self, tokens, pos):
        if self.call != "prompt" or not self.prefix or self.start != self.prefix:
            return super().embed(tokens, pos)
        return self.put("inpL", self.put("inp_embd", self.rows(tokens)))


# --- one token -----------------------------------------------------------------------------------------------------------------------------------


@fault(
    "J20",
    "for one token and more than 32 keys, keys are split at 32, and the logarithms of the two sums are read in the order of group and head: some "
    "heads are merged by those of others",
    "vllm-project/flash-attention/pull/87",
    lambda c, t, k, p, n: 1 < c.kv_heads < c.heads and any(b - a == 1 and b > 32 for a, b in spans(t, k, p)),
    "calls of one token that see more than 32 keys (33 are wrong, 32 right), where several query heads share one of several key heads",
    ("tokens", 33),
    ("smollm3", 33, None, 32, 1),
    ("smollm3", 32, None, 31, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) > 1 or len(k) <= 32:
            return super().attend(q, k, v, qpos, kpos, n)
        heads, order = self.kv_head(n), np.arange(self.c.heads).reshape(self.c.kv_heads, -1).T.ravel()
        s = self.cap(self.scale_scores(np.einsum("hk,shk->hs", q[0], k[:, heads]), n), n)
        top = s.max()
        parts = [np.exp(s[:, a:b] - top) for a, b in ((0, 32), (32, len(k)))]
        sums = np.stack([e.sum(axis=1) for e in parts])  # [2, H]
        share = (sums / sums.sum(axis=0))[:, order]
        y = sum(np.einsum("hs,shk->hk", e * (r / total)[:, None], x) for e, total, r, x in zip(parts, sums, share, (v[:32, heads], v[32:, heads])))
        return y[None].astype(F32)


@fault(
    "J21",
    "in windowed layers, the keys of one token are split by 16; a split that lies in front of the window marks the split behind it as empty, not "
    "itself",
    "Dao-AILab/flash-attention/issues/2842 (an early exit that writes to another slot)",
    lambda c, t, k, p, n: bool(c.local) and any(b - a == 1 and a >= c.window + 15 for a, b in spans(t, k, p)),
    "calls of one token at position 39 or behind it, where the window is 24 (38 is right)",
    ("tokens", 40),
    ("mistral", 40, None, 39, 1),
    ("mistral", 39, None, 38, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        first = qpos[0] - self.c.window + 1
        return seen & (kpos // 16 != first // 16) if len(qpos) == 1 and n in self.c.local and first >= 16 else seen


@fault(
    "J22",
    "for one token, query heads are taken by twos, and both get the key head of the first: a pair that reaches into the next group is wrong",
    "FlashML-org/FreeToken/pull/177",
    lambda c, t, k, p, n: c.kv_heads > 1 and c.heads // c.kv_heads % 2 == 1 and c.heads > c.kv_heads and 1 in lengths(t, k, p),
    "calls of one token, where an odd number of query heads (3) shares a key head",
    ("tokens in a call", 1),
    ("llama_g3", 5, 4, 0, 1),
    ("llama_g3", 6, 4, 0, 1),
)
class _(Engine):
    def kv_head(self, n):
        heads = super().kv_head(n)
        return heads[np.arange(len(heads)) // 2 * 2] if self.count == 1 and len(heads) > self.c.kv_heads else heads


@fault(
    "J23",
    "paged attention for one token reads the second half of a page of 16 keys from the first page; values are right",
    "tenstorrent/tt-metal/issues/37927 (pages of 16 where a sequence has several)",
    lambda c, t, k, p, n: any(b - a == 1 and b > 24 for a, b in spans(t, k, p)),
    "calls of one token that see more than 24 keys (25 are wrong, 24 right)",
    ("tokens", 25),
    ("llama_tied", 25, None, 24, 1),
    ("llama_tied", 24, None, 23, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) == 1:
            at = np.arange(len(k))
            k = k[np.where(at % 16 >= 8, at % 16, at)]
        return super().attend(q, k, v, qpos, kpos, n)


@fault(
    "J24",
    "the kernel for one token was written for heads of 16 numbers and is called for wider ones: scores leave out the other numbers",
    "ROCm/aiter/pull/2273",
    lambda c, t, k, p, n: c.head_dim > 16 and any(b - a == 1 and a > 0 for a, b in spans(t, k, p)),
    "calls of one token, not the first of the sequence, in models with more than 16 numbers to a head",
    ("tokens", 2),
    ("qwen3_eps", 5, 4, 0, 1),
    ("qwen3_eps", 6, 4, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) == 1:
            q = np.concatenate([q[..., :16], np.zeros_like(q[..., 16:])], axis=-1)
        return super().attend(q, k, v, qpos, kpos, n)


# --- threads, which stand for ranks as well ---------------------------------------------------------------------------------------------------------


@fault(
    "J25",
    "ranks have the vocabulary's rows in shares that are rounded up, and the gathered logits are laid out in shares that are rounded down",
    "NVIDIA/Megatron-LM/issues/1754 (a vocabulary that the number of ranks does not divide)",
    lambda c, t, k, p, n: c.vocab % n != 0,
    "a number of threads that does not divide the 96 tokens of the vocabulary (5 are wrong, 2, 3 and 4 right)",
    ("threads", 5),
    ("starcoder2", 3, None, 0, 5),
    ("starcoder2", 3, None, 0, 4),
)
class _(Engine):
    def matmul(self, x, w, name):
        if name not in ("token_embd.weight", "output.weight") or self.threads == 1:
            return super().matmul(x, w, name)
        y, n = np.zeros((len(x), len(w)), F32), self.threads
        for i in range(n):
            part = x @ w[i * up(len(w), n) : (i + 1) * up(len(w), n)].T
            y[:, i * (len(w) // n) : i * (len(w) // n) + part.shape[1]] = part
        return y


@fault(
    "J26",
    "rows of Q4_0 are interleaved by 8; the beginning of a thread's share is rounded up to 8 and its end is not: rows in between are not computed",
    "ggml-org/llama.cpp/pull/16956 (shares of interleaved rows whose edges do not agree)",
    lambda c, t, k, p, n: c.types["blk.0.attn_output.weight"] == "Q4_0" and any((c.width * i // n) % 8 for i in range(n)),
    "a number of threads that cuts the 64 rows of attn_output within an 8 (3 and 5 are wrong, 2 and 4 right), and a matrix of Q4_0",
    ("threads", 3),
    ("llama_q4", 3, None, 0, 3),
    ("llama_q4", 3, None, 0, 4),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name.endswith("attn_output.weight") and self.c.types[name] == "Q4_0":
            for a, b in self.split(len(w)):
                y[:, a : min(up(a, 8) * 8, b)] = 0
        return y


@fault(
    "J27",
    "the mean of squares of attn_norm is gathered from the ranks as if it were a sum: it is as many times too large as there are ranks",
    "tenstorrent/tt-mlir/pull/8798",
    lambda c, t, k, p, n: n > 1,
    "more than one thread (which stands for a rank)",
    ("threads", 2),
    ("gemma", 3, None, 0, 2),
    ("gemma", 3, None, 0, 1),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        if not name.endswith("attn_norm"):
            return super().rms_norm(x, w, eps, name)
        return self.num.gain(x * self.num.rsqrt(self.num.mean(x * x) * F32(self.threads) + F32(eps)), w)


@fault(
    "J28",
    "a recursive product with several threads leaves the last row of an odd number to a fringe, which covers the first half of ffn_up's outputs",
    "ChenhanYu/hmlp/issues/7 (fringes of odd sizes with several threads)",
    lambda c, t, k, p, n: n > 1 and any(m % 2 and m >= 3 for m in lengths(t, k, p)),
    "an odd number of tokens in a call, at least 3, and more than one thread",
    ("threads", 2),
    ("llama_mha", 3, None, 0, 2),
    ("llama_mha", 4, None, 0, 2),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name.endswith("ffn_up.weight") and self.threads > 1 and len(x) % 2 and len(x) >= 3:
            y[-1, y.shape[1] // 2 :] = 0
        return y


@fault(
    "J29",
    "with several threads each turns one head of the keys; heads behind the number of threads stay as they are",
    "common practice: a grid of one head to a worker without a loop over the others",
    lambda c, t, k, p, n: 1 < n < c.kv_heads and len(t) > 1,
    "fewer threads than heads of the keys, but more than one (2 and 3 are wrong, 1, 4 and 5 right); position 0 is not turned",
    ("threads", 2),
    ("bitnet_mha", 4, None, 0, 3),
    ("bitnet_mha", 4, None, 0, 4),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        y = super().rope(x, pos, n, which)
        if which == "k" and self.threads > 1:
            y[:, self.threads :] = x[:, self.threads :]
        return y


# --- shapes, experts, tokens --------------------------------------------------------------------------------------------------------------------


@fault(
    "J30",
    "embeddings are copied in vectors of 16 numbers, from the last row of the call to the first; what a row's last vector has too much lands on "
    "the next row",
    "ROCm/aiter/pull/5290 (rows that are no multiple of the vector and write into the next one)",
    lambda c, t, k, p, n: c.width % 16 != 0 and any(m >= 2 for m in lengths(t, k, p)),
    "two or more tokens in a call, and a width that is no multiple of 16 (88)",
    ("tokens in a call", 2),
    ("llama_wide", 2, None, 0, 1),
    ("llama_wide", 3, 1, 0, 1),
)
class _(Engine):
    def rows(self, tokens):
        y, more = super().rows(tokens).copy(), -self.c.width % 16
        if more:
            y[1:, :more] = self.w["token_embd.weight"][(tokens[:-1] + 1) % self.c.vocab, :more]
        return y


@fault(
    "J31",
    "the embeddings of a call are gathered once for each run of equal tokens, and all but the first of a run stay zero",
    "common practice: a gather that leaves out repeated indices, without the copy that puts them back",
    lambda c, t, k, p, n: any(t[i] == t[i - 1] for a, b in spans(t, k, p) for i in range(a + 1, b)),
    "two equal tokens next to each other in a call",
    ("tokens in a call", 2),
    ("llama_bf16", 4, None, 0, 1),
    ("llama_bf16", 4, None, 0, 1),
    np.array([5, 9, 9, 7]),
)
class _(Engine):
    def rows(self, tokens):
        y = super().rows(tokens).copy()
        y[1:][tokens[1:] == tokens[:-1]] = 0
        return y


@fault(
    "J32",
    "the tokens of experts are padded to a multiple of 8 by copies of the call's first one, and what the padding gives is added to that token",
    "common practice: the padding of sorted token lists that is not masked where results are added",
    lambda c, t, k, p, n: bool(c.experts) and any(m % 8 for m in lengths(t, k, p)),
    "a number of tokens in a call that is no multiple of 8, in mixtures of experts (the call's first token)",
    ("tokens in a call", 1),
    ("qwen2moe", 9, None, 0, 1),
    ("qwen2moe", 8, None, 0, 1),
)
class _(Engine):
    def combine(self, y, weights):
        out = super().combine(y, weights)
        out[0] += F32(-len(y) % 8) * y[0, 0] * weights[0, 0]
        return out


@fault(
    "J33",
    "the gate of the shared expert is one number for all tokens of a call of 2 to 8: that of the first",
    "common practice: a gate of one output that is broadcast along the wrong axis by a kernel for small batches",
    lambda c, t, k, p, n: c.arch == "qwen2moe" and any(2 <= m <= 8 for m in lengths(t, k, p)),
    "calls of 2 to 8 tokens (1 and 9 are right), in a model whose shared expert has a gate",
    ("tokens in a call", 2),
    ("qwen2moe_s", 2, None, 0, 1),
    ("qwen2moe_s", 9, None, 0, 1),
)
class _(Engine):
    def shared_gate(self, y, x, n):
        return super().shared_gate(y, np.repeat(x[:1], len(x), axis=0) if 2 <= len(x) <= 8 else x, n)


# --- types of matrices --------------------------------------------------------------------------------------------------------------------------


@fault(
    "J34",
    "the kernel of Q2_K for exactly two rows leaves the odd outputs of the second row at zero, in attn_q",
    "huggingface/candle/pull/3898 (scattered zeros at two rows of Q2_K)",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q2_K" and 2 in lengths(t, k, p),
    "calls of two tokens (1 and 3 are right), and a matrix of Q2_K",
    ("tokens in a call", 2),
    ("llama_q2k", 2, None, 0, 1),
    ("llama_q2k", 3, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if name.endswith("attn_q.weight") and self.c.types[name] == "Q2_K" and len(x) == 2:
            y[1, 1::2] = 0
        return y


@fault(
    "J35",
    "the kernel of MXFP4 for 2 to 8 rows takes two blocks at a time with the exponent of the first, in ffn_gate",
    "common practice: exponents that are loaded as a pair of bytes, of which one is used",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "MXFP4" and any(2 <= m <= 8 for m in lengths(t, k, p)),
    "calls of 2 to 8 tokens (1 and 9 are right), and a matrix of MXFP4",
    ("tokens in a call", 2),
    ("llama_mxfp4", 2, None, 0, 1),
    ("llama_mxfp4", 9, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("ffn_gate.weight") and self.c.types[name] == "MXFP4" and 2 <= len(x) <= 8:

            def change(b):
                b[1::2, 0] = b[::2, 0]

            w = unpacked(self, name, 17, change)
        return super().product(x, w, name)


@fault(
    "J36",
    "the kernel of IQ4_NL for more than 16 rows has a loop for the last block of a row, which takes low and high nibbles the other way round, in "
    "ffn_down",
    "common practice: a loop for what is left over that was written for another order of nibbles",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "IQ4_NL" and any(m > 16 for m in lengths(t, k, p)),
    "calls of more than 16 tokens (17 are wrong, 16 right), and a matrix of IQ4_NL",
    ("tokens in a call", 17),
    ("llama_iq4nl", 17, None, 0, 1),
    ("llama_iq4nl", 16, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("ffn_down.weight") and self.c.types[name] == "IQ4_NL" and len(x) > 16:

            def change(b):
                last = b.reshape(len(w), -1, 18)[:, -1]
                last[:, 2:] = last[:, 2:] >> 4 | last[:, 2:] << 4

            w = unpacked(self, name, 18, change)
        return super().product(x, w, name)


@fault(
    "J37",
    "the kernel of Q4_1 for more than 8 rows adds the minima of whole pairs of blocks and forgets the last block's, in ffn_down of every layer but "
    "the first",
    "common practice: a correction that is added outside the loop, with the loop's last value for another layout",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q4_1" and any(m > 8 for m in lengths(t, k, p)),
    "calls of more than 8 tokens (9 are wrong, 8 right), and a matrix of Q4_1",
    ("tokens in a call", 9),
    ("llama_q41", 9, None, 0, 1),
    ("llama_q41", 8, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("ffn_down.weight") and not name.startswith("blk.0.") and self.c.types[name] == "Q4_1" and len(x) > 8:

            def change(b):
                b.reshape(len(w), -1, 20)[:, -1, 2:4] = 0

            w = unpacked(self, name, 20, change)
        return super().product(x, w, name)


@fault(
    "J38",
    "the kernel of TQ2_0 for 8 rows and more shifts by 4 in place of 6 for the last codes of a byte, in ffn_up of the last layer",
    "common practice: four shifts written out, two of them alike, in a kernel for matrices that do not begin at a multiple of 64 bytes",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "TQ2_0" and any(b - a >= 8 for a, b in written(t, k, p)),
    "calls of 8 or more tokens (7 are right), and a ternary matrix",
    ("tokens in a call", 8),
    ("llama_tq2", 8, None, 0, 1),
    ("llama_tq2", 7, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name == f"blk.{self.c.n_layers - 1}.ffn_up.weight" and self.c.types[name] == "TQ2_0" and len(x) >= 8:

            def change(b):
                b[:, :64] = b[:, :64] & 0x3F | (b[:, :64] & 0x30) << 2

            w = unpacked(self, name, 66, change)
        return super().product(x, w, name)


@fault(
    "J39",
    "the kernel of IQ3_S for one row takes the signs of a block's last 8 weights from the byte before, in attn_v",
    "common practice: an index of signs that ends one early in a loop over pairs",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "IQ3_S" and 1 in lengths(t, k, p),
    "calls of one token, and a matrix of IQ3_S",
    ("tokens in a call", 1),
    ("llama_iq3s", 1, None, 0, 1),
    ("llama_iq3s", 2, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name.endswith("attn_v.weight") and self.c.types[name] == "IQ3_S" and len(x) == 1:

            def change(b):
                b[:, 105] = b[:, 104]

            w = unpacked(self, name, 110, change)
        return super().product(x, w, name)


@fault(
    "J40",
    "the kernel of Q3_K for more than 16 rows takes the high bits of a block's last 32 weights from those of the 32 before, in ffn_gate "
    "of the first layer",
    "common practice: a mask that is shifted at the end of each round but the last",
    lambda c, t, k, p, n: c.types["blk.0.attn_q.weight"] == "Q3_K" and any(m > 16 for m in lengths(t, k, p)),
    "calls of more than 16 tokens (17 are wrong, 16 right), and a matrix of Q3_K",
    ("tokens in a call", 17),
    ("llama_q3k", 17, None, 0, 1),
    ("llama_q3k", 16, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        if name == "blk.0.ffn_gate.weight" and self.c.types[name] == "Q3_K" and len(x) > 16:

            def change(b):
                b[:, :32] = b[:, :32] & 0x7F | (b[:, :32] & 0x40) << 1

            w = unpacked(self, name, 110, change)
        return super().product(x, w, name)
