"""A small engine with a bug, for the judge to find: `python examples/faulty_engine.py` writes its tensors to the folder dump/.

This is BitNet b1.58 in NumPy, run on the demo model in the package. In layer 3 alone, the gate of the feed-forward goes through SiLU
instead of squared ReLU. Each tensor is saved under the name that docs/judging.md gives it.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitnet_np import embedded, load, open_gguf
from bitnet_np.dense import DenseLinear, dense_view
from bitnet_np.text.tokenizer import tokenizer_from

TEXT = "Once upon a time there was a little rabbit"
FAULTY_LAYER = 3
OUT = Path("dump")

Floats = NDArray[np.floating]


def dump(name: str, x: Floats) -> Floats:
    np.save(OUT / f"{name}.npy", x.astype(np.float32))
    return x.astype(np.float32)


def norm(x: Floats, gain: Floats, eps: float) -> Floats:  # [T, D], [D] -> [T, D]
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gain


def linear(x: Floats, w: DenseLinear) -> Floats:  # [T, M], [N, M] of -1, 0, 1 -> [T, N]
    step = 127 / np.abs(x).max(axis=-1, keepdims=True)
    return np.rint(x * step) @ w.matrix.T / step * w.scale


def rope(x: Floats, base: float) -> Floats:  # [T, H, K] -> [T, H, K]
    pairs = x.shape[-1] // 2
    angle = np.multiply.outer(np.arange(len(x)), base ** (-np.arange(pairs) / pairs))[:, None]
    a, b = x[..., :pairs], x[..., pairs:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


def attend(q: Floats, k: Floats, v: Floats) -> Floats:  # [T, H, K], [T, G, K], [T, G, K] -> [T, H, K]
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("thk,shk->hts", q, k) / np.sqrt(q.shape[2]) + np.triu(np.full((len(q), len(q)), -np.inf), 1)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hts,shk->thk", p / p.sum(axis=-1, keepdims=True), v)


def main() -> int:
    with embedded.demo_path() as path:
        model, tokenizer = dense_view(load(path)), tokenizer_from(open_gguf(path).metadata, path)
    c, tokens = model.config, tokenizer.encode(TEXT)
    OUT.mkdir(exist_ok=True)

    x = dump("inp_embd", model.token_embd[tokens])
    for n, w in enumerate(model.layers):
        normed = dump(f"attn_norm-{n}", norm(x, w.attn_norm, c.eps))
        q = dump(f"Qcur-{n}", linear(normed, w.attn_q)).reshape(-1, c.heads, c.head_dim)
        k = dump(f"Kcur-{n}", linear(normed, w.attn_k)).reshape(-1, c.kv_heads, c.head_dim)
        v = dump(f"Vcur-{n}", linear(normed, w.attn_v)).reshape(-1, c.kv_heads, c.head_dim)
        q, k = dump(f"Qcur_rope-{n}", rope(q, c.rope_base)), dump(f"Kcur_rope-{n}", rope(k, c.rope_base))
        attended = dump(f"kqv_out-{n}", attend(q, k, v).reshape(len(tokens), -1))
        attended = dump(f"attn_sub_norm-{n}", norm(attended, w.attn_sub_norm, c.eps))
        x = dump(f"ffn_inp-{n}", x + dump(f"attn_o_out-{n}", linear(attended, w.attn_output)))
        normed = dump(f"ffn_norm-{n}", norm(x, w.ffn_norm, c.eps))
        gate, up = dump(f"ffn_gate-{n}", linear(normed, w.ffn_gate)), dump(f"ffn_up-{n}", linear(normed, w.ffn_up))
        activated = gate / (1 + np.exp(-gate)) if n == FAULTY_LAYER else np.maximum(gate, 0) ** 2
        inner = dump(f"ffn_sub_norm-{n}", norm(dump(f"ffn_out-{n}", activated * up), w.ffn_sub_norm, c.eps))
        x = dump(f"l_out-{n}", x + dump(f"ffn_down-{n}", linear(inner, w.ffn_down)))
    dump("result_output", dump("result_norm", norm(x, model.output_norm, c.eps)) @ model.token_embd.T)
    print(f"{OUT}: {len(list(OUT.iterdir()))} tensors of {len(tokens)} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
