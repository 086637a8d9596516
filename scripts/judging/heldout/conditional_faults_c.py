"""Forty more faults that act under a condition only (E01..E40), by a third author, who had read neither other set beyond its form.

FAULTS: id -> record as in conditional_faults_b.py, and
  kind        PLAIN (one condition), TWO (two conditions at once), or SUBTLE (small numbers, or few of them; some have two conditions too)
  also        the other condition of a fault that has two, or None: (quantity, the value it needs)
Comments name the public report that a fault was inspired by, where there is one; sizes are scaled down to the models.
`on` is a run at the edge, `off` the nearest one that is right, where the condition has a neighbour.
"""

from types import SimpleNamespace

import numpy as np
from conditional_faults import calls
from engine import F32, Engine

FAULTS = {}


def fault(id, kind, what, when, edge, smallest, on, off, also=None, tokens=None):
    def add(cls):
        FAULTS[id] = SimpleNamespace(id=id, model=on[0], what=what, when=when, edge=edge, on=on, off=off, tokens=tokens, engine=cls)
        FAULTS[id].kind, FAULTS[id].smallest, FAULTS[id].also = kind, smallest, also
        return cls

    return add


def lengths(tokens, chunk, prefix):
    return [b - a for a, b in calls(tokens, chunk, prefix)]


def own_lengths(tokens, chunk, prefix):  # of the calls after the prefix, whose rows are in the dump
    return [b - a for a, b in calls(tokens, chunk, prefix) if a >= prefix]


def ones(tokens, chunk, prefix):  # the positions of the calls of one token
    return [a for a, b in calls(tokens, chunk, prefix) if b - a == 1]


def scores(engine, q, k, qpos, kpos, n):  # [H, T, S], -inf where masked
    s = engine.cap(engine.scale_scores(q.swapaxes(0, 1) @ k[:, engine.kv_head(n)].transpose(1, 2, 0), n), n)
    return np.where(engine.visible(qpos, kpos, n), s, F32(-np.inf))


# --- one condition ----------------------------------------------------------------------------------------------------------------------


@fault(  # After ml-explore/mlx#1758 and ggml-org/llama.cpp#5370: the vector kernel beyond the rows that it was made for.
    "E01",
    "PLAIN",
    "the matrix-vector kernel has registers for 8 tokens but takes calls up to 15; of the down projection, the rows after the eighth "
    "are its copies",
    lambda c, t, k, p, n: any(9 <= m <= 15 for m in lengths(t, k, p)),
    "9 to 15 tokens in a call",
    ("tokens in a call", 9),
    ("llama", 9, None, 0, 1),
    ("llama", 8, None, 0, 1),
)
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if 9 <= len(x) <= 15 and name.endswith("ffn_down.weight"):
            y[8:] = y[7]
        return y


@fault(  # After gittensor-ai-lab/sparkinfer#3: the last key visited is derived from the wrong end of the queries.
    "E02",
    "PLAIN",
    "attention visits tiles of 32 keys, up to the tile of the call's first query; later queries do not see the next tile",
    lambda c, t, k, p, n: any((b - 1) // 32 > a // 32 for a, b in calls(t, k, p)),
    "a call that crosses position 32, 64, ... (0 to 32 is right, 0 to 33 wrong)",
    ("tokens in a call", 33),
    ("llama", 33, None, 0, 1),
    ("llama", 32, None, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        return super().visible(qpos, kpos, n) & (kpos < (qpos[0] // 32 + 1) * 32)


@fault(  # After vllm-project/vllm-ascend#1266: a sine table shorter than the model's positions.
    "E03",
    "PLAIN",
    "the rotary table of the keys has 52 rows and is read as a ring; queries compute their angles",
    lambda c, t, k, p, n: len(t) > 52,
    "position 52 and later ones (53 tokens are wrong, 52 right)",
    ("tokens", 53),
    ("qwen2", 53, None, 0, 1),
    ("qwen2", 52, None, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos % 52 if which == "k" else pos, n, which)


@fault(  # After neuralmagic/nm-vllm#3: only full blocks may be shared.
    "E04",
    "PLAIN",
    "a reused prefix shares its last, partly filled block of 8 tokens without a copy; writes to it are dropped and it reads as zeros",
    lambda c, t, k, p, n: p % 8 > 0,
    "a prefix that is no multiple of 8",
    ("tokens of the prefix modulo 8", 1),
    ("llama", 24, None, 9, 1),
    ("llama", 24, None, 8, 1),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        if self.call == "prompt" and self.prefix % 8:
            k, v = k.copy(), v.copy()
            k[pos < self.prefix // 8 * 8 + 8], v[pos < self.prefix // 8 * 8 + 8] = 0, 0
        super().cache_put(n, k, v, pos)


@fault(  # After openvinotoolkit/mlas#10: a partition that odd numbers of threads do not divide.
    "E05",
    "PLAIN",
    "each thread takes heads // threads query heads; the heads left over get the result of the last one that was done",
    lambda c, t, k, p, n: c.heads % min(n, c.heads) > 0,
    "threads that do not divide the query heads (fewer threads than heads)",
    ("threads", 3),
    ("llama", 12, None, 0, 3),
    ("llama", 12, None, 0, 2),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        done = self.c.heads // min(self.threads, self.c.heads) * min(self.threads, self.c.heads)
        y[:, done:] = y[:, done - 1 : done]
        return y


@fault(  # After ml-explore/mlx#4250: a grid of tiles that is rounded the wrong way.
    "E06",
    "PLAIN",
    "the number of tiles of 64 rows of the output matrix is rounded to the nearest: a last tile that is less than half full is never run",
    lambda c, t, k, p, n: 0 < c.vocab % 64 < 32,
    "a vocabulary with 1 to 31 rows over a multiple of 64",
    ("vocabulary modulo 64", 1),
    ("llama_wide", 8, None, 0, 1),
    ("llama", 8, None, 0, 1),
)
class _(Engine):
    def head(self, x):
        y = super().head(x)
        if 0 < self.c.vocab % 64 < 32:
            y[:, self.c.vocab // 64 * 64 :] = 0
        return y


@fault(  # After sgl-project/sglang#27482: an off-by-one at the end of the vocabulary.
    "E07",
    "PLAIN",
    "the embedding clamps token ids to the vocabulary's size minus two",
    lambda c, t, k, p, n: bool((np.asarray(t) == c.vocab - 1).any()),
    "the vocabulary's last token id in the prompt",
    ("token id", 95),
    ("llama", 20, None, 0, 1),
    ("llama", 20, None, 0, 1),
    tokens=np.array([5, 17, 61, 94, 33, 2, 80, 95, 12, 47, 71, 28, 9, 66, 50, 3, 88, 21, 40, 76]),
)
class _(Engine):
    def rows(self, tokens):
        return super().rows(np.minimum(tokens, self.c.vocab - 2))


@fault(
    "E08",
    "PLAIN",
    "sorting the tokens by expert runs in blocks of 24; with a second block, the offsets lack the last expert's end, and it gives zeros",
    lambda c, t, k, p, n: c.experts > 0 and any(m > 24 for m in lengths(t, k, p)),
    "more than 24 tokens in a call of a model with experts (25 is wrong, 24 right)",
    ("tokens in a call", 25),
    ("mixtral", 25, None, 0, 1),
    ("mixtral", 24, None, 0, 1),
)
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if self.count > 24 and name.endswith("ffn_down_exps.weight") and np.may_share_memory(w, self.w[name][-1]):
            y[:] = 0
        return y


@fault(  # After flashinfer-ai/flashinfer#4299: head widths that the kernel was not made for.
    "E09",
    "PLAIN",
    "heads are padded to a power of two, and the scores are scaled by the padded width",
    lambda c, t, k, p, n: c.head_dim & (c.head_dim - 1) > 0 and len(t) > 1,
    "a head width that is no power of two, and more than one token (20 and 24 are wrong; 16 and 32 right)",
    ("head width over a power of two", 1),
    ("llama_wide", 12, None, 0, 1),
    ("llama", 12, None, 0, 1),
)
class _(Engine):
    def scale_scores(self, s, n):
        return super().scale_scores(s, n) * F32((self.c.head_dim / (1 << (self.c.head_dim - 1).bit_length())) ** 0.5)


@fault(  # After fla-org/flash-linear-attention#1029: query heads that are grouped by a rounded ratio.
    "E10",
    "PLAIN",
    "the key head of a query head is found by a shift by the group's logarithm, rounded down",
    lambda c, t, k, p, n: (c.heads // c.kv_heads) & (c.heads // c.kv_heads - 1) > 0,
    "groups of query heads that are no power of two",
    ("query heads for each key head", 3),
    ("llama_g3", 12, None, 0, 1),
    ("llama", 12, None, 0, 1),
)
class _(Engine):
    def kv_head(self, n):
        shift = (self.c.heads // self.c.kv_heads).bit_length() - 1
        return np.minimum(np.arange(self.c.heads) >> shift, self.c.kv_heads - 1)


@fault(
    "E11",
    "PLAIN",
    "four staging buffers carry the values of the calls to the cache; from the fifth call on, a buffer is sent again before it is filled",
    lambda c, t, k, p, n: len(calls(t, k, p)) >= 5,
    "five or more calls, those of the prefix included",
    ("calls", 5),
    ("llama", 20, 4, 0, 1),
    ("llama", 20, 5, 0, 1),
)
class _(Engine):
    def reset(self):
        super().reset()
        self.staging = {}

    def cache_put(self, n, k, v, pos):
        self.staging[n, self.chunk_no] = v
        old = self.staging.get((n, self.chunk_no - 4), v)[: len(v)]
        super().cache_put(n, k, np.concatenate([old, v[len(old) :]]), pos)


@fault(  # After Wenyueh/MinivLLM#87: a prefix cache that mistakes one block for another.
    "E12",
    "PLAIN",
    "a prefix cache keeps 16 tokens for each entry and looks later tokens up modulo 16",
    lambda c, t, k, p, n: p > 16,
    "a prefix of more than 16 tokens",
    ("tokens of the prefix", 17),
    ("qwen2", 24, None, 17, 1),
    ("qwen2", 24, None, 16, 1),
)
class _(Engine):
    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix > 16:
            at = np.arange(self.prefix) % 16
            self.keys = {n: (k[at], v[at], pos) for n, (k, v, pos) in self.keys.items()}


@fault(
    "E13",
    "PLAIN",
    "a call of two tokens is taken for one token of each of two sequences: the second token does not see the first of its call",
    lambda c, t, k, p, n: 2 in lengths(t, k, p),
    "calls of exactly two tokens",
    ("tokens in a call", 2),
    ("qwen3", 12, 2, 0, 1),
    ("qwen3", 12, 3, 0, 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        if len(qpos) == 2:
            seen[1] &= kpos != qpos[0]
        return seen


@fault(  # After microsoft/onnxruntime#28205: positions past the end of a table.
    "E14",
    "PLAIN",
    "the index into the learned positions is cut to 6 bits",
    lambda c, t, k, p, n: "position_embd.weight" in c.types and len(t) > 64,
    "position 64 and later ones (65 tokens are wrong, 64 right), with learned positions",
    ("tokens", 65),
    ("gpt2", 65, None, 0, 1),
    ("gpt2", 64, None, 0, 1),
)
class _(Engine):
    def learned(self, pos):
        return pos & 63


# --- two conditions ---------------------------------------------------------------------------------------------------------------------


@fault(  # After EricLBuehler/mistral.rs#246: a window that is right until the context reaches it.
    "E15",
    "TWO",
    "the kernel for one token lets a full window go one key too early: it counts the new key twice",
    lambda c, t, k, p, n: bool(c.local) and any(a >= c.window - 1 for a in ones(t, k, p)),
    "calls of one token at a position of window - 1 or later",
    ("position of a call", 23),
    ("mistral", 24, 1, 0, 1),
    ("mistral", 23, 1, 0, 1),
    also=("tokens in a call", 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        return seen & (qpos[:, None] - kpos < self.c.window - 1) if len(qpos) == 1 and n in self.c.local else seen


@fault(  # After ggml-org/llama.cpp#12161: positions that go wrong on the second step after a reuse.
    "E16",
    "TWO",
    "after a reused prefix, the keys of the second and later calls are rotated by positions that do not count the prefix",
    lambda c, t, k, p, n: p > 0 and len(own_lengths(t, k, p)) > 1,
    "two or more calls after a prefix",
    ("calls after the prefix", 2),
    ("llama", 24, 8, 8, 1),
    ("llama", 24, 16, 8, 1),
    also=("tokens of the prefix", 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        late = which == "k" and self.prefix and self.start > self.prefix
        return super().rope(x, pos - self.prefix if late else pos, n, which)


@fault(  # After markvanderloo/gower#16: wrong when there are about as many threads as records.
    "E17",
    "TWO",
    "with more threads than tokens, the norm's threads share one slot for their results: the last token takes the first one's factor",
    lambda c, t, k, p, n: any(1 < m < n for m in lengths(t, k, p)),
    "calls of more than one token and fewer tokens than threads",
    ("threads", 3),
    ("llama", 2, None, 0, 3),
    ("llama", 2, None, 0, 2),
    also=("tokens in a call", 2),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        r = self.num.rsqrt(self.num.mean(x * x) + F32(eps))
        if 1 < len(x) < self.threads:
            r[-1] = r[0]
        return self.num.gain(x * r, w)


@fault(  # After ml-explore/mlx#3444: the tail of the columns takes the wrong path for one type.
    "E18",
    "TWO",
    "the GEMM of Q4_0 for more than 16 tokens takes the scale of the block before for the last block of each row",
    lambda c, t, k, p, n: "Q4_0" in c.types.values() and any(m > 16 for m in lengths(t, k, p)),
    "tensors of type Q4_0, and more than 16 tokens in a call (17 is wrong, 16 right)",
    ("tokens in a call", 17),
    ("llama_q4", 17, None, 0, 1),
    ("llama_q4", 16, None, 0, 1),
    also=("tensors of type Q4_0", 1),
)
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind == "Q4_0":
            blocks = np.array(data).reshape(shape[0], -1, 18)
            blocks[:, -1, :2] = blocks[:, -2 % blocks.shape[1], :2]
            wrong = super().dequantize(blocks.reshape(data.shape), kind, shape, name).reshape(shape)
            self.__dict__.setdefault("wrong", {})[name] = wrong
        return super().dequantize(data, kind, shape, name)

    def product(self, x, w, name):
        return super().product(x, self.wrong[name] if name in self.wrong and len(x) > 16 else w, name)


@fault(
    "E19",
    "TWO",
    "for one token, each thread runs one expert; with a spare thread, the results are added in the order of finishing, with the weights "
    "of the order of starting",
    lambda c, t, k, p, n: c.experts > 0 and n > c.experts_used and 1 in lengths(t, k, p),
    "calls of one token, and more threads than experts in use",
    ("threads", 3),
    ("mixtral", 12, 1, 0, 3),
    ("mixtral", 12, 1, 0, 2),
    also=("tokens in a call", 1),
)
class _(Engine):
    def combine(self, y, weights):
        turned = self.count == 1 and self.threads > self.c.experts_used
        return super().combine(y, weights[:, ::-1] if turned else weights)


@fault(  # After vllm-project/flash-attention#176: the split over keys, and its combine step, run for short calls only.
    "E20",
    "TWO",
    "calls of up to 8 tokens split the keys at 32; the two parts are added without the factors that undo their own maxima",
    lambda c, t, k, p, n: any(b - a <= 8 and b > 32 for a, b in calls(t, k, p)),
    "more than 32 keys, and at most 8 tokens in a call",
    ("keys", 33),
    ("llama", 33, None, 32, 1),
    ("llama", 32, None, 31, 1),
    also=("tokens in a call", 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        if len(q) > 8 or len(k) <= 32:
            return super().attend(q, k, v, qpos, kpos, n)
        s, v = scores(self, q, k, qpos, kpos, n), v[:, self.kv_head(n)].swapaxes(0, 1)
        out = total = F32(0)
        for part in (slice(0, 32), slice(32, None)):
            top = s[..., part].max(axis=-1, keepdims=True)
            e = np.exp(s[..., part] - np.where(np.isfinite(top), top, F32(0)))
            out, total = out + e @ v[:, part], total + e.sum(axis=-1, keepdims=True)
        return (out / total).swapaxes(0, 1)


@fault(  # After pytorch/executorch#20346: a ring that a long call overwrites before its first queries have read it.
    "E21",
    "TWO",
    "the ring of a windowed layer has window + 8 slots; a call writes all of its keys before its queries read the older ones",
    lambda c, t, k, p, n: (
        bool(c.local) and any(max(0, a - c.window + 1) <= min(a, b - c.window - 8) - 1 for a, b in calls(t, k, p) if b > c.window + 8)
    ),
    "a call that ends past window + 8 and overwrites keys that its first tokens still see",
    ("tokens", 33),
    ("mistral", 33, None, 20, 1),
    ("mistral", 32, None, 20, 1),
    also=("tokens in a call", 10),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        seen = super().visible(qpos, kpos, n)
        lost = (kpos < qpos[0]) & (kpos <= qpos[-1] - self.c.window - 8)
        return seen & ~lost if n in self.c.local else seen


@fault(
    "E22",
    "TWO",
    "loading a prefix sets up rotation for all layers: later keys are rotated in layers without rotary positions, too",
    lambda c, t, k, p, n: p > 0 and c.arch == "smollm3" and bool(c.no_rope),
    "a prefix, in a model whose fourth layers have no rotary positions",
    ("tokens of the prefix", 1),
    ("smollm3", 12, None, 1, 1),
    ("smollm3", 12, None, 0, 1),
    also=("layers", 4),
)
class _(Engine):
    def cache_put(self, n, k, v, pos):
        late = n in self.c.no_rope and self.prefix and self.call == "prompt"
        super().cache_put(n, self.rope(k, pos, n, "k") if late else k, v, pos)


@fault(  # After ml-explore/mlx#1758: an output stride that is right for the first batch of rows only.
    "E23",
    "TWO",
    "with the embedding as output matrix, the hidden states go through in batches of 32 rows, each from the call's first row",
    lambda c, t, k, p, n: c.tied and any(m > 32 for m in own_lengths(t, k, p)),
    "more than 32 tokens in a call, in a model with tied embeddings (33 is wrong, 32 right)",
    ("tokens in a call", 33),
    ("llama_tied", 33, None, 0, 1),
    ("llama_tied", 32, None, 0, 1),
    also=("tied embeddings", 1),
)
class _(Engine):
    def head(self, x):
        return super().head(x[np.arange(len(x)) % 32] if self.c.tied else x)


@fault(
    "E24",
    "TWO",
    "each thread adds the bias of the keys to its own rows, but reads the bias from its beginning",
    lambda c, t, k, p, n: n > 1 and "blk.0.attn_k.bias" in c.types,
    "two or more threads, in a model whose keys have a bias",
    ("threads", 2),
    ("qwen2", 12, None, 0, 2),
    ("qwen2", 12, None, 0, 1),
    also=("bias of the keys", 1),
)
class _(Engine):
    def add_bias(self, y, name):
        if not name.endswith("attn_k") or name + ".bias" not in self.w:
            return super().add_bias(y, name)
        bias = self.w[name + ".bias"]
        return y + np.concatenate([bias[: b - a] for a, b in self.split(len(bias))])


@fault(
    "E25",
    "TWO",
    "the rotary kernel for one token takes its frequencies from the head width, although only a part of the head is rotated",
    lambda c, t, k, p, n: c.rope_width < c.head_dim and any(a > 0 for a in ones(t, k, p)),
    "calls of one token (but at position 0), in a model that rotates a part of the head",
    ("tokens in a call", 1),
    ("stablelm", 12, 1, 0, 1),
    ("stablelm", 12, 2, 0, 1),
    also=("head width minus rotary width", 1),
)
class _(Engine):
    def frequencies(self, n):
        f = super().frequencies(n)
        return f ** (self.c.rope_width / self.c.head_dim) if self.count == 1 else f


@fault(
    "E26",
    "TWO",
    "attention for head widths that are no multiple of 16 takes two queries at a time; a last single one gets the result before it",
    lambda c, t, k, p, n: c.head_dim % 16 > 0 and any(m > 1 and m % 2 for m in lengths(t, k, p)),
    "an odd number of tokens in a call (3 or more), and a head width that is no multiple of 16",
    ("tokens in a call", 3),
    ("gemma2", 3, None, 0, 1),
    ("gemma2", 2, None, 0, 1),
    also=("head width modulo 16", 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        if len(q) > 1 and len(q) % 2 and self.c.head_dim % 16:
            y[-1] = y[-2]
        return y


@fault(
    "E27",
    "TWO",
    "windowed attention takes tiles of 16 queries, and the first query of a tile sees one key more than the window",
    lambda c, t, k, p, n: bool(c.local) and any(q % 16 == 0 and q >= c.window for q in range(len(t))),
    "a position that is a multiple of 16 and at least the window (17 tokens are wrong, 16 right)",
    ("tokens", 17),
    ("gemma2", 17, None, 0, 1),
    ("gemma2", 16, None, 0, 1),
    also=("window", 1),
)
class _(Engine):
    def visible(self, qpos, kpos, n):
        border = (qpos[:, None] - kpos == self.c.window) & (qpos[:, None] % 16 == 0)
        return super().visible(qpos, kpos, n) | border if n in self.c.local else super().visible(qpos, kpos, n)


@fault(  # After sgl-project/sglang#33915: one of several paths runs without the cap.
    "E28",
    "TWO",
    "the output head for one token has no cap on the logits",
    lambda c, t, k, p, n: c.logit_cap > 0 and 1 in own_lengths(t, k, p),
    "calls of one token, in a model with capped logits",
    ("tokens in a call", 1),
    ("gemma2", 12, 1, 0, 1),
    ("gemma2", 12, 2, 0, 1),
    also=("cap on the logits", 1),
)
class _(Engine):
    def cap_logits(self, y):
        return y if len(y) == 1 else super().cap_logits(y)


# --- small numbers, or few of them ------------------------------------------------------------------------------------------------------


@fault(  # After tenstorrent/tt-metal#22333: padding that takes part in a sum.
    "E29",
    "SUBTLE",
    "attention for one token reads keys in pairs; with an odd number, the pad of the last pair, a zero score, is in the sum of the softmax",
    lambda c, t, k, p, n: any(a % 2 == 0 for a in ones(t, k, p)),
    "calls of one token with an odd number of keys",
    ("keys modulo 2", 1),
    ("llama", 41, None, 40, 1),
    ("llama", 42, None, 41, 1),
    also=("tokens in a call", 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        if len(q) > 1 or len(k) % 2 == 0:
            return y
        e = np.exp(scores(self, q, k, qpos, kpos, n)).sum(axis=-1).T[..., None]  # [T, H, 1]
        return y * e / (e + F32(1))


@fault(  # After huggingface/candle#3520: positions in bfloat16.
    "E30",
    "SUBTLE",
    "positions are turned into bfloat16 on their way to the rotary angles: odd ones over 256 are rounded",
    lambda c, t, k, p, n: len(t) > 257,
    "position 257 and later odd ones (258 tokens are wrong, 257 right)",
    ("tokens", 258),
    ("llama_long", 258, None, 0, 1),
    ("llama_long", 257, None, 0, 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, np.where(pos > 256, np.rint(pos / 2) * 2, pos), n, which)


@fault(  # After tile-ai/tilelang-ascend#890: the block at the end of a row takes another path.
    "E31",
    "SUBTLE",
    "SiLU runs on 16 numbers at a time; the rest of a row takes a rational function in place of the exponential",
    lambda c, t, k, p, n: c.ffn % 16 > 0 and c.arch == "llama",
    "a feed-forward width that is no multiple of 16",
    ("feed-forward width modulo 16", 1),
    ("llama_wide", 12, None, 0, 1),
    ("llama", 12, None, 0, 1),
)
class _(Engine):
    def gated(self, gate, up, n=None):
        y, end = super().gated(gate, up, n), self.c.ffn // 16 * 16
        g = gate[..., end:]
        y[..., end:] = g * (F32(0.5) + F32(0.5) * g / (F32(1) + np.abs(g))) * up[..., end:]
        return y


@fault(  # After ROCm/aiter#5044: a norm whose vector loop does not divide the width.
    "E32",
    "SUBTLE",
    "the norm's sum of squares leaves out the numbers after the last group of four",
    lambda c, t, k, p, n: c.width % 4 > 0,
    "a width that is no multiple of 4",
    ("width modulo 4", 1),
    ("mixtral_w", 12, None, 0, 1),
    ("mixtral", 12, None, 0, 1),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        size = x.shape[-1]
        squares = (x * x)[..., : size // 4 * 4].sum(axis=-1, keepdims=True, dtype=F32) / F32(size)
        return self.num.gain(x * self.num.rsqrt(squares + F32(eps)), w)


@fault(
    "E33",
    "SUBTLE",
    "unpacking Q5_0, the last number of a block loses its lowest bit",
    lambda c, t, k, p, n: "Q5_0" in c.types.values(),
    "tensors of type Q5_0",
    ("tensors of type Q5_0", 1),
    ("llama_q50", 8, None, 0, 1),
    ("llama_q51", 8, None, 0, 1),
)
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind == "Q5_0":
            data = np.array(data)
            data.reshape(-1, 22)[:, -1] &= 0xEF
        return super().dequantize(data, kind, shape, name)


@fault(
    "E34",
    "SUBTLE",
    "for a matrix of type IQ4_NL, calls of one token use a table of 16 values that has 0 where it should have 1",
    lambda c, t, k, p, n: "IQ4_NL" in c.types.values() and 1 in lengths(t, k, p),
    "calls of one token, with tensors of type IQ4_NL",
    ("tokens in a call", 1),
    ("llama_iq4nl", 8, 1, 0, 1),
    ("llama_iq4nl", 8, 2, 0, 1),
    also=("tensors of type IQ4_NL", 1),
)
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        x = super().dequantize(data, kind, shape, name)
        if kind == "IQ4_NL":
            blocks = np.array(data).reshape(-1, 18)
            codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
            self.__dict__.setdefault("wrong", {})[name] = np.where(codes == 8, F32(0), x.reshape(-1, 32)).reshape(shape)
        return x

    def product(self, x, w, name):
        return super().product(x, self.wrong[name] if name in self.wrong and len(x) == 1 else w, name)


@fault(  # After ml-explore/mlx#665: only the last output of a matrix with a size that the tile does not divide is off.
    "E35",
    "SUBTLE",
    "the output matrix runs two rows at a time; a last single row is multiplied without the columns after the last 16",
    lambda c, t, k, p, n: c.vocab % 2 > 0 and c.width % 16 > 0 and not c.tied,
    "an odd vocabulary, and a width that is no multiple of 16 (with an output matrix of its own)",
    ("vocabulary modulo 2", 1),
    ("llama_wide", 12, None, 0, 1),
    ("llama", 12, None, 0, 1),
    also=("width modulo 16", 1),
)
class _(Engine):
    def head(self, x):
        y = super().head(x)
        if self.c.vocab % 2 and not self.c.tied:
            y[:, -1] = x[:, : self.c.width // 16 * 16] @ self.w["output.weight"][-1, : self.c.width // 16 * 16]
        return y


@fault(
    "E36",
    "SUBTLE",
    "for one token, threads share the norm's sum of squares; each but the first and the last of them stops one number early",
    lambda c, t, k, p, n: n > 2 and 1 in lengths(t, k, p),
    "calls of one token with three or more threads",
    ("threads", 3),
    ("llama", 12, 1, 0, 3),
    ("llama", 12, 1, 0, 2),
    also=("tokens in a call", 1),
)
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        if len(x) > 1 or self.threads < 3:
            return super().rms_norm(x, w, eps, name)
        squares, size = x * x, x.shape[-1]
        squares[..., [b - 1 for _, b in self.split(size)[1:-1]]] = 0
        return self.num.gain(x * self.num.rsqrt(self.num.mean(squares) + F32(eps)), w)


@fault(
    "E37",
    "SUBTLE",
    "the router for more than 16 tokens guards its division by adding 2**-8 to the sum of the chosen experts' weights",
    lambda c, t, k, p, n: c.experts > 0 and c.normalized and any(m > 16 for m in lengths(t, k, p)),
    "more than 16 tokens in a call, in a model that normalises the weights of its experts (17 is wrong, 16 right)",
    ("tokens in a call", 17),
    ("qwen3moe", 17, None, 0, 1),
    ("qwen3moe", 16, None, 0, 1),
    also=("experts", 2),
)
class _(Engine):
    def router(self, logits):
        if self.count <= 16 or not self.c.normalized:
            return super().router(logits)
        top = np.argsort(-logits, axis=-1, kind="stable")[:, : self.c.experts_used]
        p = np.take_along_axis(self.num.softmax(logits), top, axis=-1)
        return top, p / (self.num.total(p) + F32(2**-8))


@fault(
    "E38",
    "SUBTLE",
    "for one token, the position is divided by the factor of linear scaling as an integer",
    lambda c, t, k, p, n: c.rope_scaling == "linear" and c.rope_scale > 1 and any(a % int(c.rope_scale) for a in ones(t, k, p)),
    "calls of one token at a position that is no multiple of the scaling factor",
    ("position of a call modulo the factor", 1),
    ("llama_lin", 2, None, 1, 1),
    ("llama_lin", 5, None, 4, 1),
    also=("tokens in a call", 1),
)
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos - pos % int(self.c.rope_scale) if self.count == 1 else pos, n, which)


@fault(
    "E39",
    "SUBTLE",
    "the weights of the norm of the queries lie in four slots; filling one for the fifth and later layers leaves its last number as it was",
    lambda c, t, k, p, n: c.n_layers > 4 and "blk.4.attn_q_norm.weight" in c.types,
    "more than four layers, in a model that normalises its queries",
    ("layers", 5),
    ("gemma3", 12, None, 0, 1),
    ("qwen3", 12, None, 0, 1),
    also=("norm of the queries", 1),
)
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(4, self.c.n_layers):
            if f"blk.{n}.attn_q_norm.weight" in self.w:
                self.w[f"blk.{n}.attn_q_norm.weight"][-1] = self.w[f"blk.{n - 4}.attn_q_norm.weight"][-1]


@fault(
    "E40",
    "SUBTLE",
    "the values are read in tiles of 40 keys, and a later tile starts one row late: its first key is in the softmax but brings no value",
    lambda c, t, k, p, n: len(t) > 40,
    "more than 40 keys (41 tokens are wrong, 40 right)",
    ("tokens", 41),
    ("llama", 41, None, 0, 1),
    ("llama", 40, None, 0, 1),
)
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        v = v.copy()
        v[40::40] = 0
        return super().attend(q, k, v, qpos, kpos, n)
