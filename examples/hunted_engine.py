"""A small engine with a bug, for the hunt to find: python hunted_engine.py MODEL TOKENS OUT CHUNK writes logits [T, V].

A Llama in NumPy that takes its prompt in chunks. It forgets the tokens of earlier chunks where the chunk is no multiple of 8.
"""

import sys

import gguf
import numpy as np


def norm(x, gain, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gain


def rope(x, position, base):  # [T, H, K], [T] -> [T, H, K]; adjacent pairs
    pairs = x.shape[-1] // 2
    angle = np.multiply.outer(position, base ** (-np.arange(pairs) / pairs))[:, None]
    a, b = x[..., ::2], x[..., 1::2]
    return np.stack([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1).reshape(x.shape)


class Engine:
    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        field = lambda name: reader.fields[name].contents()  # noqa: E731
        if field("general.architecture") != "llama" or any("rope_freqs" in t.name or ".bias" in t.name for t in reader.tensors):
            sys.exit("only plain llama files are supported")
        if "llama.expert_count" in reader.fields or "llama.attention.sliding_window" in reader.fields:
            sys.exit("experts and windows are not supported")
        if any(t.tensor_type not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16) for t in reader.tensors):
            sys.exit("this tensor type is not supported")
        self.w = {t.name: np.asarray(t.data, np.float32) for t in reader.tensors}
        names = ("block_count", "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base")
        self.layers, self.heads, self.kv_heads, self.eps, self.base = (field(f"llama.{name}") for name in names)
        self.cache = [[] for _ in range(self.layers)]

    def chunk(self, ids, start, forget):
        w, position = self.w, start + np.arange(len(ids))
        x = w["token_embd.weight"][ids]
        for n in range(self.layers):
            of = lambda name, n=n: w[f"blk.{n}.{name}.weight"]  # noqa: E731
            h = norm(x, of("attn_norm"), self.eps)
            q, k, v = (
                (h @ of(f"attn_{name}").T).reshape(len(ids), heads, -1)
                for name, heads in zip("qkv", (self.heads, *[self.kv_heads] * 2), strict=True)
            )
            past = [] if forget else self.cache[n]
            self.cache[n] = [*past, (rope(k, position, self.base), v, position)]
            keys, values, seen = (np.concatenate(part) for part in zip(*self.cache[n], strict=True))
            keys, values = (np.repeat(part, self.heads // self.kv_heads, axis=1) for part in (keys, values))
            scores = np.einsum("thk,shk->hts", rope(q, position, self.base), keys) / np.sqrt(q.shape[-1])
            scores = np.where(seen[None, None] <= position[None, :, None], scores, -np.inf)
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            attended = np.einsum("hts,shk->thk", p / p.sum(axis=-1, keepdims=True), values)
            x = x + attended.reshape(len(ids), -1) @ of("attn_output").T
            h = norm(x, of("ffn_norm"), self.eps)
            gate = h @ of("ffn_gate").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ of("ffn_up").T)) @ of("ffn_down").T
        return norm(x, w["output_norm.weight"], self.eps) @ w.get("output.weight", w["token_embd.weight"]).T


def main():
    path, tokens, out, size = sys.argv[1:]
    ids, size = np.load(tokens), int(size)
    if ids.ndim > 1:
        sys.exit("batches are not supported")
    engine = Engine(path)
    logits = [engine.chunk(ids[i : i + size], i, forget=size % 8 > 0) for i in range(0, len(ids), size)]
    np.save(out, np.concatenate(logits).astype(np.float32))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
