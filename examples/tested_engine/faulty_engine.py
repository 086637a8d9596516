"""A small engine with a bug, for the judge to find: running it writes its tensors to the folder dump/.

This is BitNet b1.58 in NumPy, run on the demo model in the package. In layer 3 alone, the gate of the feed-forward goes through SiLU
instead of squared ReLU. Each tensor is saved under the name that docs/verdicts.md gives it.

tests/test_engine.py tests it with pytest, right and with its bug.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitnet_np import Model, load, open_gguf
from bitnet_np.files import embedded
from bitnet_np.model.dense import DenseLinear, dense_view
from bitnet_np.text.tokenizer import tokenizer_from

TEXT = "Once upon a time there was a little rabbit"
FAULTY_LAYER = 3
OUT = Path("dump")

Floats = NDArray[np.floating]


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


def forward(file: Model, tokens: Sequence[int], faulty_layer: int | None = None) -> dict[str, Floats]:
    """Every tensor of the forward pass by its name, logits [T, V] last."""
    model = dense_view(file)
    c, tensors = model.config, {}

    def keep(name: str, x: Floats) -> Floats:
        x = x.astype(np.float32)
        tensors[name] = x.reshape(len(tokens), -1)
        return x

    x = keep("inp_embd", model.token_embd[tokens])
    for n, w in enumerate(model.layers):
        normed = keep(f"attn_norm-{n}", norm(x, w.attn_norm, c.eps))
        q = keep(f"Qcur-{n}", linear(normed, w.attn_q)).reshape(-1, c.heads, c.head_dim)
        k = keep(f"Kcur-{n}", linear(normed, w.attn_k)).reshape(-1, c.kv_heads, c.head_dim)
        v = keep(f"Vcur-{n}", linear(normed, w.attn_v)).reshape(-1, c.kv_heads, c.head_dim)
        q, k = keep(f"Qcur_rope-{n}", rope(q, c.rope_base)), keep(f"Kcur_rope-{n}", rope(k, c.rope_base))
        attended = keep(f"kqv_out-{n}", attend(q, k, v).reshape(len(tokens), -1))
        attended = keep(f"attn_sub_norm-{n}", norm(attended, w.attn_sub_norm, c.eps))
        x = keep(f"ffn_inp-{n}", x + keep(f"attn_o_out-{n}", linear(attended, w.attn_output)))
        normed = keep(f"ffn_norm-{n}", norm(x, w.ffn_norm, c.eps))
        gate, up = keep(f"ffn_gate-{n}", linear(normed, w.ffn_gate)), keep(f"ffn_up-{n}", linear(normed, w.ffn_up))
        activated = gate / (1 + np.exp(-gate)) if n == faulty_layer else np.maximum(gate, 0) ** 2
        inner = keep(f"ffn_sub_norm-{n}", norm(keep(f"ffn_out-{n}", activated * up), w.ffn_sub_norm, c.eps))
        x = keep(f"l_out-{n}", x + keep(f"ffn_down-{n}", linear(inner, w.ffn_down)))
    keep("result_output", keep("result_norm", norm(x, model.output_norm, c.eps)) @ model.token_embd.T)
    return tensors


def main() -> int:
    with embedded.demo_path() as path:
        model, tokenizer = load(path), tokenizer_from(open_gguf(path).metadata, path)
    tokens = tokenizer.encode(TEXT)
    OUT.mkdir(exist_ok=True)
    for name, x in forward(model, tokens, FAULTY_LAYER).items():
        np.save(OUT / f"{name}.npy", x)
    print(f"{OUT}: {len(list(OUT.iterdir()))} tensors of {len(tokens)} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
