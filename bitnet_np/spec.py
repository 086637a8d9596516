"""THE DEFINITION: BitNet b1.58 in float64, whole sequences, explicit masks. Slow, and it shares nothing with what it judges.

Sources: "The Era of 1-bit LLMs" (arXiv 2402.17764) for the ternary matmul on int8 activations, "BitNet b1.58 2B4T Technical
Report" (arXiv 2504.12285) for sub-norms and squared ReLU, RoFormer (arXiv 2104.09864) for the rotation, in the half-rotated
pairing of GPT-NeoX.

Letters: T tokens, S keys, D model width, M and N a matrix's input and output width, H query heads, G key-value heads, K head
width, F feed-forward width, V vocabulary. `model` is any record with the fields of model.Model in which a ternary matrix is
a record of `matrix` (-1, 0, +1) and `scale`: packing.dense makes one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def embed(table: Array, tokens: ArrayLike) -> Array:  # [V, D], [T] -> [T, D]
    return table[np.asarray(tokens)]


def rms_norm(x: Array, gain: Array, eps: float) -> Array:  # [T, D], [D] -> [T, D]
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def quantize(x: Array) -> tuple[Array, Array]:  # [T, M] -> integers -127..127 [T, M], steps per unit [T, 1]
    scale = 127 / np.maximum(1e-5, np.abs(x).max(axis=-1, keepdims=True))
    return np.rint(x * scale), scale


def ternary_matmul(q: Array, scale: Array, matrix: NDArray, w_scale: float) -> Array:  # [T, M], [T, 1], [N, M] -> [T, N]
    return q @ matrix.T.astype(np.float64) / scale * w_scale


def matmul(x: Array, matrix: Array) -> Array:  # [T, M], [N, M] -> [T, N]
    return x @ matrix.T


def rope(x: Array, position: ArrayLike, base: float) -> Array:  # [T, H, K], [T] -> [T, H, K]; rotates the pairs (i, i + K/2)
    half = x.shape[-1] // 2
    angle = np.multiply.outer(position, base ** (-np.arange(half) / half))[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


def causal_mask(q_len: int, k_len: int, past: int = 0, window: int | None = None) -> Array:  # -> [q_len, k_len] of 0 and -inf
    q, k = past + np.arange(q_len)[:, None], np.arange(k_len)
    return np.where((k <= q) & (k > q - (window or np.inf)), 0.0, -np.inf)


def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:  # [T, H, K], [S, G, K], [S, G, K], [T, S] -> [T, H, K]
    k, v = (np.repeat(kv, q.shape[1] // kv.shape[1], axis=1) for kv in (k, v))  # query head h reads key-value head h // (H / G)
    scores = np.einsum("thk,shk->hts", q, k) / np.sqrt(q.shape[2]) + mask
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hts,shk->thk", p / p.sum(axis=-1, keepdims=True), v)


def relu2_gate(gate: Array, up: Array) -> Array:  # [T, F], [T, F] -> [T, F]
    return np.maximum(gate, 0) ** 2 * up


def _ignore(name: str, layer: int | None, array: Array) -> None:
    pass


def forward(model: Any, tokens: ArrayLike, record: Callable[[str, int | None, Array], None] = _ignore) -> Array:  # [T] -> logits [T, V]
    c, t = model.config, len(np.asarray(tokens))
    position, mask = np.arange(t), causal_mask(t, t)

    def linear(x: Array, w: Any) -> Array:
        return ternary_matmul(*quantize(x), w.matrix, w.scale)

    h = embed(model.token_embd, tokens)
    record("inp_embd", None, h)
    for n, w in enumerate(model.layers):

        def note(name: str, array: Array, layer: int = n) -> Array:
            record(name, layer, array)
            return array

        x = note("attn_norm", rms_norm(h, w.attn_norm, c.eps))
        q = note("Qcur", linear(x, w.attn_q)).reshape(t, c.heads, c.head_dim)
        k = note("Kcur", linear(x, w.attn_k)).reshape(t, c.kv_heads, c.head_dim)
        v = note("Vcur", linear(x, w.attn_v)).reshape(t, c.kv_heads, c.head_dim)
        q = note("Qcur_rope", rope(q, position, c.rope_base))
        k = note("Kcur_rope", rope(k, position, c.rope_base))
        x = note("kqv_out", attend(q, k, v, mask).reshape(t, -1))
        x = note("attn_sub_norm", rms_norm(x, w.attn_sub_norm, c.eps))
        h = note("ffn_inp", h + note("attn_o_out", linear(x, w.attn_output)))
        x = note("ffn_norm", rms_norm(h, w.ffn_norm, c.eps))
        gate, up = note("ffn_gate", linear(x, w.ffn_gate)), note("ffn_up", linear(x, w.ffn_up))
        x = note("ffn_out", relu2_gate(gate, up))
        x = note("ffn_sub_norm", rms_norm(x, w.ffn_sub_norm, c.eps))
        h = note("l_out", h + note("ffn_down", linear(x, w.ffn_down)))
    x = rms_norm(h, model.output_norm, c.eps)
    record("result_norm", None, x)
    logits = matmul(x, model.token_embd if model.output is None else model.output)
    record("result_output", None, logits)
    return logits
