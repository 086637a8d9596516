"""The engine under test: a small inference engine of its own in NumPy float32 (it does not import bitnet_np).

It reads a GGUF file by the package `gguf`, runs prompts in chunks with a KV cache, and writes its tensors as .npz under llama.cpp's names.
A rounding policy (policies.py) replaces `Num`, the numerics; a fault (conditional_faults.py, public_faults.py) is a subclass of `Engine`.
"""

import argparse
import importlib
import json
import math
import os
import sys
from types import SimpleNamespace

import gguf
import numpy as np
from gguf import quants

F32 = np.float32
HERE = os.path.dirname(os.path.abspath(__file__))
LAYER_NORM = {"gptneox", "gpt2", "starcoder2", "stablelm", "phi2"}
ADJACENT = {"llama", "granite", "minicpm", "smollm3"}  # RoPE turns (2i, 2i + 1); the others (i, i + half)
GELU = {"gptneox", "gpt2", "starcoder2", "phi2"}  # without a gate
GEMMA = {"gemma", "gemma2", "gemma3"}


class Num:
    """The honest numerics: everything in float32. Policies override these methods; each may only round."""

    threads = 1

    def weight(self, w, name):  # a matrix [N, M] when it is loaded
        return w

    def vector(self, x, name):  # a bias or the weights of a norm when they are loaded
        return x

    def lin_in(self, x, name):  # the input of a matrix
        return x

    def mm(self, x, w):  # [T, M], [N, M] -> [T, N]
        return x @ w.T

    def store(self, x, name):  # a tensor that is written to memory
        return x

    def cache(self, x, kind):  # [T, G, K] as it goes into the cache; kind: k or v
        return x

    def qk(self, q, k):  # [H, T, K], [H, S, K] -> [H, T, S]
        return q @ k.swapaxes(1, 2)

    def pv(self, p, v):  # [H, T, S], [H, S, K] -> [H, T, K]
        return p @ v

    def exp(self, x):
        return np.exp(x)

    def tanh(self, x):
        return np.tanh(x)

    def rsqrt(self, x):
        return F32(1) / np.sqrt(x)

    def sin_cos(self, a):  # float64 angles
        return np.sin(a).astype(F32), np.cos(a).astype(F32)

    def mean(self, x):  # over the last axis
        return x.mean(axis=-1, keepdims=True, dtype=F32)

    def total(self, x):
        return x.sum(axis=-1, keepdims=True, dtype=F32)

    def softmax(self, s):  # -inf where masked
        e = self.exp(s - s.max(axis=-1, keepdims=True))
        return e / self.total(e)

    def attend(self, engine, q, k, v, visible, n):  # [H, T, K], [H, S, K], [H, S, K], [T, S] -> [H, T, K]
        s = engine.cap(engine.scale_scores(self.qk(q, k), n), n)
        p = engine.softmax(np.where(visible, s, F32(-np.inf)), n)
        return self.pv(p, v)

    def sigmoid(self, x):
        with np.errstate(over="ignore"):
            return F32(1) / (F32(1) + self.exp(-x))

    def silu(self, x):
        return x * self.sigmoid(x)

    def gelu(self, x):
        return F32(0.5) * x * (F32(1) + self.tanh(F32(math.sqrt(2 / math.pi)) * (x + F32(0.044715) * x * x * x)))

    def add(self, a, b):
        return a + b

    def gain(self, y, w):  # a normalised row times the norm's weights
        return y * w


class Engine:
    def __init__(self, path, num=None, threads=1):
        self.num, self.threads = num or Num(), threads
        self.num.threads = threads
        reader = gguf.GGUFReader(path)
        self.meta = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        self.raw = {t.name: t for t in reader.tensors}
        self.c = self.read_config()
        self.w = {name: self.load(t) for name, t in self.raw.items()}
        self.int8 = {t.name for t in reader.tensors if t.tensor_type.name in ("TQ1_0", "TQ2_0")}
        self.finish_load()
        self.reset()

    # --- loading ---------------------------------------------------------------------------------------------------------------------

    def kv(self, key, default=None):
        return self.meta.get(f"{self.meta['general.architecture']}.{key}", default)

    def read_config(self):
        kv, arch = self.kv, self.meta["general.architecture"]
        c = SimpleNamespace(arch=arch, width=kv("embedding_length"), n_layers=kv("block_count"), heads=kv("attention.head_count"))
        c.context = kv("context_length")
        c.kv_heads = kv("attention.head_count_kv", c.heads)
        c.head_dim = kv("attention.key_length", c.width // c.heads)
        c.experts, c.experts_used = kv("expert_count", 0), kv("expert_used_count", 0)
        c.ffn = kv("expert_feed_forward_length", kv("feed_forward_length"))
        c.eps = F32(kv("attention.layer_norm_epsilon" if arch in LAYER_NORM else "attention.layer_norm_rms_epsilon"))
        c.vocab = int(self.raw["token_embd.weight"].shape[1])
        c.tied = "output.weight" not in self.raw
        c.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self.raw.items()}
        c.types = {name: t.tensor_type.name for name, t in self.raw.items()}
        c.rope_base, c.rope_width = kv("rope.freq_base", 10000.0), kv("rope.dimension_count", c.head_dim)
        c.rope_scaling, c.rope_scale = kv("rope.scaling.type", "linear"), kv("rope.scaling.factor", 1.0) or 1.0
        c.rope_original = kv("rope.scaling.original_context_length", c.context)
        c.yarn_fast, c.yarn_slow = kv("rope.scaling.yarn_beta_fast", 32.0), kv("rope.scaling.yarn_beta_slow", 1.0)
        c.rope_magnitude = kv("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(c.rope_scale) if c.rope_scaling == "yarn" else 1)
        c.local_base = kv("rope.freq_base_swa", 10000.0) if arch == "gemma3" else None
        c.no_rope = [n for n in range(c.n_layers) if arch == "gpt2" or (arch == "smollm3" and (n + 1) % 4 == 0)]
        c.window = kv("attention.sliding_window", 0) or 0
        pattern = kv("attention.sliding_window_pattern")
        if isinstance(pattern, (list, np.ndarray)):
            c.local = [n for n in range(c.n_layers) if pattern[n]]
        elif arch == "gemma2":
            c.local = [n for n in range(c.n_layers) if n % 2 == 0]
        elif arch == "gemma3":
            c.local = [n for n in range(c.n_layers) if (n + 1) % (pattern or 6)]
        else:
            c.local = list(range(c.n_layers)) if c.window else []
        c.embed_scale = kv("embedding_scale", 1.0) if arch not in GEMMA else math.sqrt(c.width)
        c.residual_scale, c.logit_scale = kv("residual_scale", 1.0), kv("logit_scale", 1.0) or 1.0
        c.attn_scale = kv("attention.scale", 0) or c.head_dim**-0.5
        c.score_cap, c.logit_cap = kv("attn_logit_softcapping", 0) or 0, kv("final_logit_softcapping", 0) or 0
        c.parallel = arch == "phi2" or (arch == "gptneox" and bool(kv("use_parallel_residual", True)))
        c.normalized = arch != "qwen2moe"
        return c

    def load(self, t):
        shape = [int(n) for n in reversed(t.shape)]
        x = self.dequantize(t.data, t.tensor_type.name, shape, t.name).reshape(shape)
        if len(shape) < 2:
            return self.num.vector(x, t.name)
        return x if "gate_inp" in t.name else self.num.weight(x, t.name)

    def dequantize(self, data, kind, shape, name):
        return np.array(quants.dequantize(data, gguf.GGMLQuantizationType[kind]), dtype=F32)

    def finish_load(self):
        for n in range(self.c.n_layers):
            for kind in (".weight", ".bias"):
                b = f"blk.{n}."
                if b + "attn_qkv" + kind in self.w:
                    parts = self.split_qkv(self.w.pop(b + "attn_qkv" + kind))
                    self.w |= {f"{b}attn_{x}{kind}": part for x, part in zip("qkv", parts)}
                if b + "ffn_up" + kind in self.w and self.c.arch == "phi3":
                    self.w[b + "ffn_gate" + kind], self.w[b + "ffn_up" + kind] = self.split_gate_up(self.w[b + "ffn_up" + kind])

    def split_qkv(self, w):
        c = self.c
        return np.split(w, [c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim])

    def split_gate_up(self, w):
        return np.split(w, 2)

    # --- state -----------------------------------------------------------------------------------------------------------------------

    def reset(self):
        self.keys = {n: None for n in range(self.c.n_layers)}
        self.out, self.chunk_no = {}, 0

    def put(self, name, x, n=None):
        x = self.num.store(x, name) if x.dtype == F32 else x
        self.out.setdefault(name if n is None else f"{name}-{n}", []).append(np.array(x).reshape(len(x), -1))
        return x

    def cache_put(self, n, k, v, pos):
        k, v = self.num.cache(k, "k"), self.num.cache(v, "v")
        old = self.keys[n]
        self.keys[n] = (k, v, pos) if old is None else tuple(np.concatenate(x) for x in zip(old, (k, v, pos)))

    def cache_get(self, n):
        return self.keys[n]

    # --- operations ------------------------------------------------------------------------------------------------------------------

    def norm(self, x, name, n):
        w, b = self.w[name + ".weight"], self.w.get(name + ".bias")
        if self.c.arch in LAYER_NORM:
            return self.layer_norm(x, w, b)
        return self.rms_norm(x, w, self.c.eps, name)

    def rms_norm(self, x, w, eps, name):
        return self.num.gain(x * self.num.rsqrt(self.num.mean(x * x) + F32(eps)), w)

    def layer_norm(self, x, w, b):
        x = x - self.num.mean(x)
        y = self.num.gain(x * self.num.rsqrt(self.num.mean(x * x) + self.c.eps), w)
        return y if b is None else y + b

    def linear(self, x, name, n=None):
        y = self.product(x, self.w[name + ".weight"], name + ".weight")
        return self.add_bias(y, name)

    def add_bias(self, y, name):
        b = self.w.get(name + ".bias")
        return y if b is None else y + b

    def product(self, x, w, name):
        if name in self.int8:  # ternary: int8 activations with a scale for each token
            scale = F32(127) / np.maximum(np.abs(x).max(axis=-1, keepdims=True), F32(1e-5))
            return self.matmul(np.rint(x * scale), w, name) / scale
        return self.matmul(self.num.lin_in(x, name), w, name)

    def split(self, size):  # of a matrix's rows to threads
        edges = [size * i // self.threads for i in range(self.threads + 1)]
        return list(zip(edges, edges[1:]))

    def matmul(self, x, w, name):
        return np.concatenate([self.num.mm(x, w[a:b]) for a, b in self.split(len(w))], axis=-1)

    def embed(self, tokens, pos):
        h = self.put("inp_embd", self.rows(tokens))
        if "position_embd.weight" in self.w:
            h = self.put("inpL", h + self.w["position_embd.weight"][self.learned(pos)])
        if self.c.embed_scale != 1:
            h = self.put("inp_scaled", self.scale_embedding(h))
        return h

    def rows(self, tokens):
        return self.w["token_embd.weight"][tokens]

    def learned(self, pos):
        return pos

    def scale_embedding(self, h):
        return h * F32(self.c.embed_scale)

    def positions(self, start, count):
        return np.arange(start, start + count)

    def frequencies(self, n):  # [J]
        c, j = self.c, self.c.rope_width // 2
        base = c.local_base if c.local_base and n in c.local else c.rope_base
        f = float(base) ** (-np.arange(j) * 2.0 / c.rope_width)
        factors = self.rope_factors()
        if factors is not None:
            f = f / factors
        if c.rope_scaling == "yarn":
            own = self.yarn_ramp(j)
            return f * own + f / c.rope_scale * (1 - own)
        return f if c.local_base and n in c.local else f / c.rope_scale

    def rope_factors(self):  # [J] or None
        if "rope_factors_long.weight" in self.w:
            return self.w["rope_factors_short.weight" if self.c.context <= self.c.rope_original else "rope_factors_long.weight"]
        return self.w.get("rope_freqs.weight")

    def yarn_ramp(self, j):  # [J]: 1 for pairs that keep their own frequency
        c = self.c
        low, high = (j * math.log(c.rope_original / (2 * math.pi * b)) / math.log(c.rope_base) for b in (c.yarn_fast, c.yarn_slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * j - 1)
        return 1 - np.clip((np.arange(j) - low) / max(high - low, 0.001), 0, 1)

    def rope(self, x, pos, n, which="q"):  # [T, H, K]
        angle = np.multiply.outer(np.asarray(pos, np.float64), self.frequencies(n))[:, None, :]
        sin, cos = self.num.sin_cos(angle)
        m = F32(self.c.rope_magnitude)
        return self.rotate(x, *((sin, cos) if m == 1 else (sin * m, cos * m)))

    def rotate(self, x, sin, cos):
        j = sin.shape[-1]
        out = x.copy()
        first, second = (slice(0, 2 * j, 2), slice(1, 2 * j, 2)) if self.c.arch in ADJACENT else (slice(0, j), slice(j, 2 * j))
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
        return out

    def qk_norm(self, x, name):
        w = self.w.get(name + ".weight")
        if w is None:
            return x
        y = self.rms_norm(x.reshape(len(x), -1, w.size), w, self.c.eps, name).reshape(x.shape)
        return self.put("Qcur_normed" if "attn_q" in name else "Kcur_normed", y, int(name.split(".")[1]))

    def visible(self, qpos, kpos, n):  # [T, S]
        d = qpos[:, None] - kpos[None, :]
        seen = d >= 0
        return seen & (d < self.c.window) if self.c.window and n in self.c.local else seen

    def kv_head(self, n):  # the key-value head of each query head
        return np.arange(self.c.heads) // (self.c.heads // self.c.kv_heads)

    def scale_scores(self, s, n):
        return s * F32(self.c.attn_scale)

    def cap(self, s, n):
        return F32(self.c.score_cap) * self.num.tanh(s / F32(self.c.score_cap)) if self.c.score_cap else s

    def softmax(self, s, n):
        return self.num.softmax(s)

    def attend(self, q, k, v, qpos, kpos, n):  # [T, H, K], [S, G, K] -> [T, H, K]
        heads = self.kv_head(n)
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))
        return self.num.attend(self, q, k, v, self.visible(qpos, kpos, n), n).swapaxes(0, 1)

    def qkv(self, x, n):
        b = f"blk.{n}.attn_"
        return tuple(self.put(name + "cur", self.linear(x, b + name.lower(), n), n) for name in "QKV")

    def attention(self, x, n, pos):  # [T, D] -> [T, D]
        c, b, t = self.c, f"blk.{n}.", len(x)
        q, k, v = self.qkv(x, n)
        q, k, v = (y.reshape(t, -1, c.head_dim) for y in (self.qk_norm(q, b + "attn_q_norm"), self.qk_norm(k, b + "attn_k_norm"), v))
        if n not in c.no_rope:
            q, k = self.put("Qcur_rope", self.rope(q, pos, n, "q"), n), self.put("Kcur_rope", self.rope(k, pos, n, "k"), n)
        self.cache_put(n, k, v, pos)
        y = self.put("kqv_out", self.attend(q, *self.cache_get(n)[:2], pos, self.cache_get(n)[2], n).reshape(t, -1), n)
        return self.put("attn_o_out", self.linear(self.sub_norm(y, "attn_sub_norm", n), b + "attn_output", n), n)

    def sub_norm(self, y, name, n):
        full = f"blk.{n}.{name}"
        return self.put(name, self.norm(y, full, n), n) if full + ".weight" in self.w else y

    def gated(self, gate, up, n=None):
        if self.c.arch in GEMMA:
            return self.num.gelu(gate) * up
        if self.c.arch == "bitnet-b1.58":
            gate = np.maximum(gate, F32(0))
            return gate * gate * up
        return self.num.silu(gate) * up

    def router(self, logits):  # [T, E] -> [T, k], [T, k]
        top = np.argsort(-logits, axis=-1, kind="stable")[:, : self.c.experts_used]
        p = np.take_along_axis(self.num.softmax(logits), top, axis=-1)
        return top, p / self.num.total(p) if self.c.normalized else p

    def experts(self, x, n):
        c, b, k = self.c, f"blk.{n}.ffn_", self.c.experts_used
        logits = self.put("ffn_moe_logits", self.linear(x, b + "gate_inp", n), n)
        top, weights = self.router(logits)
        top, weights = self.put("ffn_moe_topk", top, n), self.put("ffn_moe_weights", weights, n)

        def each(inputs, name):  # [T, k, M] -> [T, k, N]
            w, full = self.w[f"{b}{name}_exps.weight"], f"{b}{name}_exps.weight"
            y = np.zeros((*top.shape, w.shape[1]), F32)
            for e in range(c.experts):
                t, j = np.nonzero(top == e)
                if len(t):
                    y[t, j] = self.product(inputs[t, j], w[e], full)
            return y

        x = np.repeat(x[:, None], k, axis=1)
        gate, up = self.put("ffn_moe_gate", each(x, "gate"), n), self.put("ffn_moe_up", each(x, "up"), n)
        y = self.put("ffn_moe_swiglu", self.gated(gate, up, n), n)
        y = self.put("ffn_moe_down", each(y, "down"), n)
        return self.put("ffn_moe_out", self.combine(y, weights), n)

    def combine(self, y, weights):
        return np.sum(y * weights[..., None], axis=1, dtype=F32)

    def shared_gate(self, y, x, n):
        return y * self.num.sigmoid(x @ self.w[f"blk.{n}.ffn_gate_inp_shexp.weight"].reshape(-1, 1))

    def dense(self, x, n, end=""):
        b = f"blk.{n}.ffn_"
        if f"{b}gate{end}.weight" in self.w:
            gate = self.put("ffn_gate", self.linear(x, f"{b}gate{end}", n), n)
            y = self.gated(gate, self.put("ffn_up", self.linear(x, f"{b}up{end}", n), n), n)
        else:
            y = self.num.gelu(self.put("ffn_up", self.linear(x, f"{b}up{end}", n), n))
        return self.put("ffn_down", self.linear(self.sub_norm(self.put("ffn_out", y, n), "ffn_sub_norm", n), f"{b}down{end}", n), n)

    def feed_forward(self, x, n):
        y = self.experts(x, n) if self.c.experts else self.dense(x, n)
        if f"blk.{n}.ffn_up_shexp.weight" in self.w:
            y = self.num.add(y, self.put("ffn_shexp_out", self.shared_gate(self.dense(x, n, "_shexp"), x, n), n))
        return y

    def residual(self, h, y, n, which):
        return self.num.add(h, y * F32(self.c.residual_scale) if self.c.residual_scale != 1 else y)

    def layer(self, h, n, pos):
        b, w = f"blk.{n}.", self.w
        x = self.put("attn_norm", self.norm(h, b + "attn_norm", n), n) if b + "attn_norm.weight" in w else h
        a = self.attention(x, n, pos)
        if b + "post_attention_norm.weight" in w:
            a = self.put("attn_post_norm", self.norm(a, b + "post_attention_norm", n), n)
        ffn_inp = h if self.c.parallel else self.put("ffn_inp", self.residual(h, a, n, "attn"), n)
        if b + "ffn_norm.weight" in w:
            x = self.put("ffn_norm", self.norm(ffn_inp, b + "ffn_norm", n), n)
        elif not self.c.parallel:
            x = ffn_inp
        f = self.feed_forward(x, n)
        if b + "post_ffw_norm.weight" in w:
            f = self.put("ffn_post_norm", self.norm(f, b + "post_ffw_norm", n), n)
        h = self.residual(ffn_inp, f, n, "ffn")
        return self.put("l_out", self.residual(h, a, n, "attn") if self.c.parallel else h, n)

    def head(self, x):
        name = "token_embd" if self.c.tied else "output"
        y = self.add_bias(self.product(x, self.w[name + ".weight"], name + ".weight"), "output")
        return self.cap_logits(self.scale_logits(y))

    def scale_logits(self, y):
        return y / F32(self.c.logit_scale) if self.c.logit_scale != 1 else y

    def cap_logits(self, y):
        return F32(self.c.logit_cap) * self.num.tanh(y / F32(self.c.logit_cap)) if self.c.logit_cap else y

    def forward(self, tokens, start):
        self.start, self.count = start, len(tokens)
        pos = self.positions(start, len(tokens))
        h = self.embed(tokens, pos)
        for n in range(self.c.n_layers):
            h = self.layer(h, n, pos)
        self.put("result_output", self.head(self.put("result_norm", self.norm(h, "output_norm", None))))
        self.chunk_no += 1

    def prepare(self, tokens):
        return tokens

    def run(self, tokens, chunk=None, prefix=0):
        tokens = self.prepare(np.asarray(tokens, dtype=np.int64))
        self.prompt, self.prefix, self.chunk = len(tokens), prefix, chunk
        self.reset()
        if prefix:  # an earlier call; its rows are not in the dump
            self.begin("prefix")
            self.feed(tokens[:prefix], 0, chunk)
            self.out = {}
        self.begin("prompt")
        self.feed(tokens[prefix:], prefix, chunk)
        return {name: np.concatenate(parts) for name, parts in self.out.items()}

    def begin(self, call):
        self.call = call

    def feed(self, tokens, start, chunk):
        step = chunk or max(len(tokens), 1)
        for i in range(0, len(tokens), step):
            self.forward(tokens[i : i + step], start + i)


def sets(*kinds):
    """The names of the files that hold policies, public_faults or conditional_faults."""
    return sorted(name[:-3] for name in os.listdir(HERE) if name.startswith(kinds) and name.endswith(".py"))


def faults():
    """The faults of all files, by id: records with `engine`, a subclass of Engine."""
    sys.path.insert(0, HERE)
    sys.modules.setdefault("engine", sys.modules[__name__])
    return {id: case for name in sets("public_faults", "conditional_faults") for id, case in importlib.import_module(name).FAULTS.items()}


def policy_of(policy):
    if policy is None or isinstance(policy, Num):
        return policy
    sys.path.insert(0, HERE)
    sys.modules.setdefault("engine", sys.modules[__name__])
    return {id: case for name in sets("policies") for id, case in importlib.import_module(name).POLICIES.items()}[policy].make()


def run(model_path, tokens, policy=None, fault=None, chunk=None, prefix=0, threads=1):
    """Runs the model: a dict of arrays by name. policy, fault: ids, or None."""
    engine = Engine if fault is None else faults()[fault].engine
    return engine(model_path, policy_of(policy), threads).run(tokens, chunk, prefix)


def read_tokens(path):
    if path.endswith(".npy"):
        return np.load(path).reshape(-1)
    with open(path) as f:
        text = f.read()
    return np.array(json.loads(text) if path.endswith(".json") else text.replace(",", " ").split(), dtype=np.int64).reshape(-1)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "tokens", "out"):
        p.add_argument("--" + name, required=True)
    p.add_argument("--what", choices=("whole", "layers", "logits"), default="whole")
    p.add_argument("--chunk", type=int)
    p.add_argument("--prefix", type=int, default=0)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--policy")
    p.add_argument("--fault")
    a = p.parse_args()
    out = run(a.model, read_tokens(a.tokens), a.policy, a.fault, a.chunk, a.prefix, a.threads)
    keep = {"whole": "", "layers": "l_out-", "logits": "result_output"}[a.what]
    np.savez(a.out, **{k: v for k, v in out.items() if k.startswith(keep) or k == "result_output"})


if __name__ == "__main__":
    main()
