"""THE DEFINITION: the models in float64, whole sequences, explicit masks. Slow,
and it shares nothing with what it judges.

Sources: "The Era of 1-bit LLMs" (arXiv 2402.17764) for the ternary matmul on int8 activations, "BitNet b1.58
2B4T Technical Report" (arXiv 2504.12285) for sub-norms and squared ReLU, RoFormer (arXiv 2104.09864) for the
rotation, "Extending Context Window of Large Language Models via Position Interpolation" (arXiv 2306.15595)
for scaled positions, "YaRN" (arXiv 2309.00071), "LLaMA" (arXiv 2302.13971), "GLU Variants Improve
Transformer" (arXiv 2002.05202) for the SiLU gate, "Layer Normalization" (arXiv 1607.06450), "Gaussian Error
Linear Units" (arXiv 1606.08415), "GPT-NeoX-20B" (arXiv 2204.06745) for parallel residuals and partial
rotation, Phi for a norm that both branches share, "Qwen3 Technical Report" (arXiv 2505.09388) for norms of
queries and keys, "Mistral 7B" (arXiv 2310.06825) for windows of keys, "Language Models are Unsupervised
Multitask Learners" (GPT-2) for learned positions, "2 OLMo 2 Furious" (arXiv 2501.00656) for norms after a
branch, "Gemma" (arXiv 2403.08295) for the GELU gate, "Gemma 2" (arXiv 2408.00118) for soft caps, "Gemma 3"
(arXiv 2503.19786) and OLMo 3 for layers with a separate RoPE, "MiniCPM" (arXiv 2404.06395) and Granite 3 for
scaled embeddings, branches and logits, "Mixtral of Experts" (arXiv 2401.04088) and Qwen2-MoE for experts.

Letters: T tokens, S keys, D model width, M and N a matrix's input and output width, H query heads, G
key-value heads, K head width, J rotated pairs of a head, F feed-forward width, E experts, k of a token, V
vocabulary. `model` is any record with the fields of records.Model in which a linear is a record of `matrix`,
`scale`, `int8`, `bias`, `norm`, `norm_eps`: dense.dense_view makes one.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def embed(table: Array, tokens: ArrayLike) -> Array:  # [V, D], [T] -> [T, D]
    return table[np.asarray(tokens)]


def rms_norm(x: Array, gain: Array, eps: float) -> Array:  # [T, D], [D] -> [T, D]
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + eps) * gain


def layer_norm(x: Array, gain: Array, bias: Any, eps: float) -> Array:  # [T, D], [D], [D] -> [T, D]
    mean = np.mean(x, axis=-1, keepdims=True)
    return rms_norm(x - mean, gain, eps) + bias


def quantize(x: Array) -> tuple[Array, Array]:  # [T, M] -> integers -127..127 [T, M], steps per unit [T, 1]
    largest = np.abs(x).max(axis=-1, keepdims=True)
    scale = 127 / np.maximum(1e-5, largest)
    return np.rint(x * scale), scale


def ternary_matmul(q: Array, scale: Array, matrix: NDArray, w_scale: float) -> Array:
    # [T, M], [T, 1], [N, M] -> [T, N]
    total = q @ matrix.T.astype(np.float64)
    return total / scale * w_scale


def matmul(x: Array, matrix: Array) -> Array:  # [T, M], [N, M] -> [T, N]
    return x @ matrix.T


def angles(position: ArrayLike, base: float, pairs: int, factors: Any = 1.0) -> Array:
    # [T] -> radians [T, J]
    frequency = base ** (-np.arange(pairs) / pairs)
    return np.multiply.outer(position, frequency / factors)


def yarn_ramp(base: float, pairs: int, yarn: Any) -> Array:
    # [J]; `yarn` is any record with the fields of records.Yarn. 1 for pairs that turn more than `fast` times
    # in the original context, 0 for those of less than `slow`, falling linearly in between
    def pair(turns: float) -> float:  # that turns so often in the original context
        wavelength = yarn.original / (turns * 2 * math.pi)
        return pairs * math.log(wavelength) / math.log(base)

    low, high = pair(yarn.fast), pair(yarn.slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = (high - low) or 0.001
    fallen = (np.arange(pairs) - low) / width
    return 1 - np.clip(fallen, 0, 1)


def yarn_factors(base: float, pairs: int, yarn: Any) -> Array:  # [J]; frequencies are divided by them
    ramp = yarn_ramp(base, pairs, yarn)
    return 1 / ((1 - ramp) / yarn.factor + ramp)


def rotate(x: Array, angle: Array, pairs: str = "halves", magnitude: float = 1.0) -> Array:
    # [T, H, K], [T, J] -> [T, H, K]; rotates the pairs (i, i + J) of the first 2J numbers of a head, or the
    # adjacent (2i, 2i + 1), and multiplies them by the magnitude
    half = angle.shape[1]
    i = np.arange(half)
    first, second = i, i + half
    if pairs == "adjacent":
        first, second = 2 * i, 2 * i + 1
    a, b = x[..., first], x[..., second]
    cos = magnitude * np.cos(angle)[:, None]
    sin = magnitude * np.sin(angle)[:, None]
    out = x.copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def rope(
    x: Array,
    position: ArrayLike,
    base: float,
    pairs: str = "halves",
    width: int | None = None,
    factors: Any = 1.0,
    magnitude: float = 1.0,
) -> Array:  # [T, H, K], [T] -> [T, H, K]; rotates the first `width` = 2J numbers of a head
    rotated = width or x.shape[-1]
    angle = angles(position, base, rotated // 2, factors)
    return rotate(x, angle, pairs, magnitude)


def causal_mask(q_len: int, k_len: int, past: int = 0, window: int | None = None) -> Array:
    # [q_len, k_len] of 0 and -inf
    q = past + np.arange(q_len)[:, None]
    k = np.arange(k_len)
    seen = (k <= q) & (k > q - (window or np.inf))
    return np.where(seen, 0.0, -np.inf)


def by_query_head(kv: Array, heads: int) -> Array:
    # [S, G, K] -> [S, H, K]; query head h reads key-value head h // (H / G)
    return np.repeat(kv, heads // kv.shape[1], axis=1)


def softmax(scores: Array) -> Array:  # [..., S] -> [..., S]; a row that sees nothing gives zeros
    largest = scores.max(axis=-1, keepdims=True)
    largest = np.maximum(largest, np.finfo(np.float64).min)  # -inf - -inf would be NaN
    p = np.exp(scores - largest)
    total = p.sum(axis=-1, keepdims=True)
    return p / np.maximum(total, 1)  # the total is at least 1 where a row sees something


def soft_cap(x: Array, cap: float | None) -> Array:  # numbers of any shape, between -cap and cap
    return x if cap is None else cap * np.tanh(x / cap)


def by_head(x: Array) -> Array:  # [T, H, K] -> [H, T, K], or back
    return x.swapaxes(0, 1)


def attention_weights(
    q: Array, k: Array, mask: Array, scale: float | None = None, cap: float | None = None
) -> Array:  # [T, H, K], [S, G, K], [T, S] -> [H, T, S]
    _, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    keys = by_head(by_query_head(k, heads))
    scores = by_head(q) @ keys.swapaxes(1, 2) * scale
    return softmax(soft_cap(scores, cap) + mask)


def weighted_values(p: Array, v: Array) -> Array:  # [H, T, S], [S, G, K] -> [T, H, K]
    values = by_head(by_query_head(v, len(p)))
    return by_head(p @ values)


def attend(
    q: Array, k: Array, v: Array, mask: Array, scale: float | None = None, cap: float | None = None
) -> Array:  # [T, H, K], [S, G, K], [S, G, K], [T, S] -> [T, H, K]
    p = attention_weights(q, k, mask, scale, cap)
    return weighted_values(p, v)


def top_experts(logits: Array, k: int) -> NDArray[np.intp]:
    # [T, E] -> [T, k] by falling logits; of equal ones the lower number first
    order = np.argsort(-logits, axis=-1, kind="stable")
    return order[:, :k]


def expert_weights(logits: Array, experts: NDArray[np.intp], normalized: bool) -> Array:
    # [T, E], [T, k] -> [T, k]
    weights = np.take_along_axis(softmax(logits), experts, axis=-1)
    if normalized:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights


def mix(y: Array, weights: Array) -> Array:  # [T, k, D], [T, k] -> [T, D]
    return np.einsum("tkd,tk->td", y, weights)


@np.errstate(over="ignore")  # e^1000 is infinity here, and its reciprocal 0
def sigmoid(x: Array) -> Array:  # numbers of any shape
    return 1 / (1 + np.exp(-x))


def pool(x: Array, pooling: str) -> Array:
    # [T, D] -> [1, D]; the one vector of a sequence that an embedding model gives
    if pooling == "mean":
        return x.mean(axis=0, keepdims=True)
    return x[:1] if pooling == "cls" else x[-1:]


def relu2_gate(gate: Array, up: Array) -> Array:  # [T, F], [T, F] -> [T, F]
    return np.maximum(gate, 0) ** 2 * up


@np.errstate(over="ignore")  # as above
def silu_gate(gate: Array, up: Array) -> Array:  # [T, F], [T, F] -> [T, F]
    return gate / (1 + np.exp(-gate)) * up


def gelu(x: Array) -> Array:  # [T, F] -> [T, F]
    erfc = np.vectorize(math.erfc)
    return x / 2 * erfc(-x / math.sqrt(2))


def gelu_tanh(x: Array) -> Array:  # [T, F] -> [T, F]; the approximation
    y = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x / 2 * (1 + np.tanh(y))


def gelu_gate(gate: Array, up: Array) -> Array:  # [T, F], [T, F] -> [T, F]
    return gelu_tanh(gate) * up


ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "relu2": relu2_gate,
    "silu": silu_gate,
    "gelu_gate": gelu_gate,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
}


Note = Callable[[str, NDArray], NDArray]
"""Records a tensor of one layer by its name, and returns it."""


def norm(c: Any, x: Array, gain: Array, bias: Any = None) -> Array:
    # [T, D], [D] -> [T, D]; of the family's kind
    if c.norm == "rms":
        return rms_norm(x, gain, c.eps)
    bias = 0.0 if bias is None else bias
    return layer_norm(x, gain, bias, c.eps)


def linear(c: Any, x: Array, w: Any) -> Array:  # [T, M] -> [T, N]
    if w.norm is not None:
        x = rms_norm(x, w.norm, w.norm_eps or c.eps)
    if w.int8:
        q, scale = quantize(x)
        y = ternary_matmul(q, scale, w.matrix, w.scale)
    else:
        y = matmul(x, w.matrix) * w.scale
    return y if w.bias is None else y + w.bias


def rotated(model: Any, n: int, x: Array) -> Array:
    # [T, H, K] -> [T, H, K]; by RoPE of layer n, from position 0 on
    c, position = model.config, np.arange(len(x))
    if n in c.local_layers:
        base = c.local_rope_base or c.rope_base
        return rope(x, position, base, c.rope, c.rope_width)
    factors = 1.0 if model.rope_factors is None else model.rope_factors
    position = position / c.rope_scaling
    return rope(x, position, c.rope_base, c.rope, c.rope_width, factors, c.rope_magnitude)


def attention(model: Any, n: int, h: Array, note: Note) -> Array:  # [T, D] -> [T, D]; the branch of layer n
    c, w, t = model.config, model.layers[n], len(h)
    x = h
    if w.attn_norm is not None:
        x = note("attn_norm", norm(c, h, w.attn_norm, w.attn_norm_bias))
    q = note("Qcur", linear(c, x, w.attn_q))
    k = note("Kcur", linear(c, x, w.attn_k))
    v = note("Vcur", linear(c, x, w.attn_v))
    if w.attn_q_norm is not None:
        q = q.reshape(t, -1, w.attn_q_norm.size)
        q = note("Qcur_normed", rms_norm(q, w.attn_q_norm, c.eps))
    if w.attn_k_norm is not None:
        k = k.reshape(t, -1, w.attn_k_norm.size)
        k = note("Kcur_normed", rms_norm(k, w.attn_k_norm, c.eps))
    q = q.reshape(t, -1, c.head_dim)
    k = k.reshape(t, -1, c.head_dim)
    v = v.reshape(t, -1, c.head_dim)
    if c.rope != "none" and (c.rope_layers is None or n in c.rope_layers):
        q = note("Qcur_rope", rotated(model, n, q))
        k = note("Kcur_rope", rotated(model, n, k))
    has_window = c.window_layers is None or n in c.window_layers
    mask = causal_mask(t, t, window=c.window if has_window else None)
    x = attend(q, k, v, mask, c.attention_scale, c.score_cap)
    x = note("kqv_out", x.reshape(t, -1))
    if w.attn_sub_norm is not None:
        x = note("attn_sub_norm", rms_norm(x, w.attn_sub_norm, c.eps))
    x = note("attn_o_out", linear(c, x, w.attn_output))
    if w.post_attention_norm is not None:
        x = note("attn_post_norm", norm(c, x, w.post_attention_norm))
    return x


def mixture(c: Any, w: Any, x: Array, note: Note) -> Array:  # [T, D] -> [T, D]; of each token's experts
    scores = note("ffn_moe_logits", linear(c, x, w.ffn_gate_inp))
    experts = note("ffn_moe_topk", top_experts(scores, c.experts_used))
    weights = expert_weights(scores, experts, c.normalized_experts)
    weights = note("ffn_moe_weights", weights)

    def each(x: Array, name: str) -> Array:  # [T, k, M] -> [T, k, N]; by the matrix of each slot's expert
        rows = []
        for of_token, chosen in zip(x, experts, strict=True):
            matrices = [getattr(w.experts[e], name) for e in chosen]
            slots = zip(of_token, matrices, strict=True)
            rows.append([linear(c, y[None], matrix)[0] for y, matrix in slots])
        return np.array(rows)

    x = np.repeat(x[:, None], c.experts_used, axis=1)
    gate = note("ffn_moe_gate", each(x, "ffn_gate"))
    up = note("ffn_moe_up", each(x, "ffn_up"))
    x = note("ffn_moe_swiglu", ACTIVATIONS[c.activation](gate, up))
    y = note("ffn_moe_down", each(x, "ffn_down"))
    return note("ffn_moe_out", mix(y, weights))


def dense(c: Any, w: Any, x: Array, note: Note) -> Array:  # [T, D] -> [T, D]; what every token takes
    inner = []
    if w.ffn_gate is not None:
        inner.append(note("ffn_gate", linear(c, x, w.ffn_gate)))
    inner.append(note("ffn_up", linear(c, x, w.ffn_up)))
    y = note("ffn_out", ACTIVATIONS[c.activation](*inner))
    if w.ffn_sub_norm is not None:
        y = note("ffn_sub_norm", rms_norm(y, w.ffn_sub_norm, c.eps))
    y = note("ffn_down", linear(c, y, w.ffn_down))
    if w.ffn_gate_inp_shexp is None:
        return y
    gate = sigmoid(x @ w.ffn_gate_inp_shexp[:, None])
    return note("ffn_shexp_out", y * gate)


def feed_forward(model: Any, n: int, h: Array, note: Note) -> Array:
    # [T, D] -> [T, D]; the branch of layer n
    c, w = model.config, model.layers[n]
    x = h
    if w.ffn_norm is not None:
        x = note("ffn_norm", norm(c, h, w.ffn_norm, w.ffn_norm_bias))
    if c.shared_norm and w.attn_norm is not None:
        x = norm(c, h, w.attn_norm, w.attn_norm_bias)  # attention's input again
    y: Any = mixture(c, w, x, note) if w.experts else 0.0
    if w.ffn_up is not None:
        y = y + dense(c, w, x, note)
    if w.post_ffw_norm is not None:
        y = note("ffn_post_norm", norm(c, y, w.post_ffw_norm))
    return y


def forward(model: Any, tokens: ArrayLike, record: Callable[..., None] = lambda *point: None) -> Array:
    # [T] -> logits [T, V]
    c = model.config

    def note(name: str, x: NDArray, n: int | None = None) -> NDArray:  # n: the layer, None around the layers
        record(name, n, x)
        return x

    h = note("inp_embd", embed(model.token_embd, tokens))
    if model.position_embd is not None:
        h = note("inpL", h + model.position_embd[: len(h)])
    if c.embedding_scale != 1:
        h = note("inp_scaled", h * c.embedding_scale)
    for n in range(c.n_layers):
        in_layer = partial(note, n=n)
        attended = attention(model, n, h, in_layer) * c.residual_scale
        if not c.parallel_residual:
            h = in_layer("ffn_inp", h + attended)
        h = h + feed_forward(model, n, h, in_layer) * c.residual_scale
        if c.parallel_residual:
            h = h + attended
        h = in_layer("l_out", h)
    x = note("result_norm", norm(c, h, model.output_norm, model.output_norm_bias))
    if c.pooling != "none":
        note("result_embd_pooled", pool(x, c.pooling))
    head = model.token_embd if model.output is None else model.output
    logits = matmul(x, head)
    if model.output_bias is not None:
        logits = logits + model.output_bias
    logits = soft_cap(logits / c.logit_scale, c.logit_cap)
    return note("result_output", logits)
