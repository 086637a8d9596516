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
Ints = NDArray[np.intp]
Scalar = float | None


def embed(table: Array, tokens: ArrayLike) -> Array:  # [V, D], [T] -> [T, D]
    return table[np.asarray(tokens)]


def rms_norm(x: Array, gain: Array, eps: float) -> Array:  # [T, D], [D] -> [T, D]
    square = x * x
    mean_square = np.mean(square, axis=-1, keepdims=True)
    root = np.sqrt(mean_square + eps)
    return x / root * gain


def layer_norm(x: Array, gain: Array, bias: Any, eps: float) -> Array:  # [T, D], [D], [D] -> [T, D]
    mean = np.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    return rms_norm(centred, gain, eps) + bias


def quantize(x: Array) -> tuple[Array, Array]:  # [T, M] -> integers -127..127 [T, M], steps per unit [T, 1]
    magnitude = np.abs(x)
    largest = magnitude.max(axis=-1, keepdims=True)
    scale = 127 / np.maximum(1e-5, largest)
    return np.rint(x * scale), scale


def ternary_matmul(q: Array, scale: Array, matrix: NDArray, w_scale: float) -> Array:
    # [T, M], [T, 1], [N, M] -> [T, N]
    weights = matrix.T.astype(np.float64)
    total = q @ weights
    return total / scale * w_scale


def matmul(x: Array, matrix: Array) -> Array:  # [T, M], [N, M] -> [T, N]
    return x @ matrix.T


def angles(position: ArrayLike, base: float, pairs: int, factors: Any = 1.0) -> Array:
    # [T] -> radians [T, J]
    exponent = -np.arange(pairs) / pairs
    frequency = base**exponent / factors
    return np.multiply.outer(position, frequency)


def yarn_ramp(base: float, pairs: int, yarn: Any) -> Array:
    # [J]; `yarn` is any record with the fields of records.Yarn. 1 for pairs that turn more than `fast` times
    # in the original context, 0 for those of less than `slow`, falling linearly in between
    def pair(turns: float) -> float:  # that turns so often in the original context
        wavelength = yarn.original / (turns * 2 * math.pi)
        return pairs * math.log(wavelength) / math.log(base)

    low = pair(yarn.fast)
    high = pair(yarn.slow)
    if yarn.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * pairs - 1)
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
    a = x[..., first]
    b = x[..., second]
    angle = angle[:, None]
    cos = magnitude * np.cos(angle)
    sin = magnitude * np.sin(angle)
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
    distance = q - k
    is_past = distance >= 0
    seen = is_past & (distance < (window or np.inf))
    return np.where(seen, 0.0, -np.inf)


def by_query_head(kv: Array, heads: int) -> Array:
    # [S, G, K] -> [S, H, K]; query head h reads key-value head h // (H / G)
    group = heads // kv.shape[1]
    return np.repeat(kv, group, axis=1)


def softmax(scores: Array) -> Array:  # [..., S] -> [..., S]; a row that sees nothing gives zeros
    least = np.finfo(np.float64).min
    largest = scores.max(axis=-1, keepdims=True)
    largest = np.maximum(largest, least)  # -inf - -inf would be NaN
    p = np.exp(scores - largest)
    total = p.sum(axis=-1, keepdims=True)
    return p / np.maximum(total, 1)  # the total is at least 1 where a row sees something


def soft_cap(x: Array, cap: Scalar) -> Array:  # numbers of any shape, between -cap and cap
    if cap is None:
        return x
    return cap * np.tanh(x / cap)


def by_head(x: Array) -> Array:  # [T, H, K] -> [H, T, K], or back
    return x.swapaxes(0, 1)


def attention_weights(
    q: Array, k: Array, mask: Array, scale: Scalar = None, cap: Scalar = None
) -> Array:  # [T, H, K], [S, G, K], [T, S] -> [H, T, S]
    _, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    keys = by_head(by_query_head(k, heads))
    products = by_head(q) @ keys.swapaxes(1, 2)
    scores = soft_cap(products * scale, cap)
    return softmax(scores + mask)


def weighted_values(p: Array, v: Array) -> Array:  # [H, T, S], [S, G, K] -> [T, H, K]
    values = by_head(by_query_head(v, len(p)))
    return by_head(p @ values)


def attend(
    q: Array, k: Array, v: Array, mask: Array, scale: Scalar = None, cap: Scalar = None
) -> Array:  # [T, H, K], [S, G, K], [S, G, K], [T, S] -> [T, H, K]
    p = attention_weights(q, k, mask, scale, cap)
    return weighted_values(p, v)


def top_experts(logits: Array, k: int) -> Ints:
    # [T, E] -> [T, k] by falling logits; of equal ones the lower number first
    falling = -logits
    order = np.argsort(falling, axis=-1, kind="stable")
    return order[:, :k]


def expert_weights(logits: Array, experts: Ints, normalized: bool) -> Array:
    # [T, E], [T, k] -> [T, k]
    p = softmax(logits)
    weights = np.take_along_axis(p, experts, axis=-1)
    if not normalized:
        return weights
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total


def mix(y: Array, weights: Array) -> Array:  # [T, k, D], [T, k] -> [T, D]
    return np.einsum("tkd,tk->td", y, weights)


@np.errstate(over="ignore")  # e^1000 is infinity here, and its reciprocal 0
def sigmoid(x: Array) -> Array:  # numbers of any shape
    return 1 / (1 + np.exp(-x))


def pool(x: Array, pooling: str) -> Array:
    # [T, D] -> [1, D]; the one vector of a sequence that an embedding model gives
    if pooling == "mean":
        return x.mean(axis=0, keepdims=True)
    if pooling == "cls":
        return x[:1]
    return x[-1:]


def relu2_gate(gate: Array, up: Array) -> Array:  # [T, F], [T, F] -> [T, F]
    return np.maximum(gate, 0) ** 2 * up


@np.errstate(over="ignore")  # as above
def silu_gate(gate: Array, up: Array) -> Array:  # [T, F], [T, F] -> [T, F]
    return gate / (1 + np.exp(-gate)) * up


def gelu(x: Array) -> Array:  # [T, F] -> [T, F]
    erfc = np.vectorize(math.erfc)
    t = -x / math.sqrt(2)
    return x / 2 * erfc(t)


def gelu_tanh(x: Array) -> Array:  # [T, F] -> [T, F]; the approximation
    cubic = x + 0.044715 * x**3
    y = math.sqrt(2 / math.pi) * cubic
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
        eps = w.norm_eps or c.eps
        x = rms_norm(x, w.norm, eps)
    if w.int8:
        q, scale = quantize(x)
        y = ternary_matmul(q, scale, w.matrix, w.scale)
    else:
        y = matmul(x, w.matrix) * w.scale
    if w.bias is None:
        return y
    return y + w.bias


def head_norm(x: Array, gain: Array, eps: float) -> Array:
    # [T, HK], [K] -> [T, H, K]; one norm of all heads if the gain is [HK]
    heads = x.reshape(len(x), -1, gain.size)
    return rms_norm(heads, gain, eps)


def rotated(model: Any, n: int, x: Array) -> Array:
    # [T, H, K] -> [T, H, K]; by RoPE of layer n, from position 0 on
    c = model.config
    position = np.arange(len(x))
    if n in c.local_layers:
        base = c.local_rope_base or c.rope_base
        return rope(x, position, base, c.rope, c.rope_width)
    scaled = position / c.rope_scaling
    factors = 1.0 if model.rope_factors is None else model.rope_factors
    return rope(x, scaled, c.rope_base, c.rope, c.rope_width, factors, c.rope_magnitude)


def attention(model: Any, n: int, h: Array, note: Note) -> Array:  # [T, D] -> [T, D]; the branch of layer n
    c = model.config
    w = model.layers[n]
    t = len(h)
    x = h
    if w.attn_norm is not None:
        x = note("attn_norm", norm(c, h, w.attn_norm, w.attn_norm_bias))
    q = note("Qcur", linear(c, x, w.attn_q))
    k = note("Kcur", linear(c, x, w.attn_k))
    v = note("Vcur", linear(c, x, w.attn_v))
    if w.attn_q_norm is not None:
        q = note("Qcur_normed", head_norm(q, w.attn_q_norm, c.eps))
    if w.attn_k_norm is not None:
        k = note("Kcur_normed", head_norm(k, w.attn_k_norm, c.eps))
    q = q.reshape(t, -1, c.head_dim)
    k = k.reshape(t, -1, c.head_dim)
    v = v.reshape(t, -1, c.head_dim)
    has_rope = c.rope_layers is None or n in c.rope_layers
    if c.rope != "none" and has_rope:
        q = note("Qcur_rope", rotated(model, n, q))
        k = note("Kcur_rope", rotated(model, n, k))
    has_window = c.window_layers is None or n in c.window_layers
    window = c.window if has_window else None
    mask = causal_mask(t, t, window=window)
    x = attend(q, k, v, mask, c.attention_scale, c.score_cap)
    x = note("kqv_out", x.reshape(t, -1))
    if w.attn_sub_norm is not None:
        x = note("attn_sub_norm", rms_norm(x, w.attn_sub_norm, c.eps))
    x = note("attn_o_out", linear(c, x, w.attn_output))
    if w.post_attention_norm is not None:
        x = note("attn_post_norm", norm(c, x, w.post_attention_norm))
    return x


def expert_linears(c: Any, w: Any, experts: Ints, name: str, x: Array) -> Array:
    # [T, k], field, [Tk, M] -> [T, k, N]; row by row, each by the matrix of its expert
    slots = x.reshape(experts.size, 1, -1)
    rows = []
    for number, y in zip(experts.flat, slots, strict=True):
        expert = w.experts[number]
        matrix = getattr(expert, name)
        rows.append(linear(c, y, matrix))
    shape = *experts.shape, -1
    return np.reshape(rows, shape)


def mixture(c: Any, w: Any, x: Array, note: Note) -> Array:  # [T, D] -> [T, D]; of each token's experts
    scores = note("ffn_moe_logits", linear(c, x, w.ffn_gate_inp))
    experts = note("ffn_moe_topk", top_experts(scores, c.experts_used))
    weights = expert_weights(scores, experts, c.normalized_experts)
    weights = note("ffn_moe_weights", weights)
    activate = ACTIVATIONS[c.activation]
    by_slot = partial(expert_linears, c, w, experts)
    x = np.repeat(x, c.experts_used, axis=0)
    gate = note("ffn_moe_gate", by_slot("ffn_gate", x))
    up = note("ffn_moe_up", by_slot("ffn_up", x))
    x = note("ffn_moe_swiglu", activate(gate, up))
    y = note("ffn_moe_down", by_slot("ffn_down", x))
    return note("ffn_moe_out", mix(y, weights))


def dense(c: Any, w: Any, x: Array, note: Note) -> Array:  # [T, D] -> [T, D]; what every token takes
    activate = ACTIVATIONS[c.activation]
    if w.ffn_gate is None:
        up = note("ffn_up", linear(c, x, w.ffn_up))
        y = note("ffn_out", activate(up))
    else:
        gate = note("ffn_gate", linear(c, x, w.ffn_gate))
        up = note("ffn_up", linear(c, x, w.ffn_up))
        y = note("ffn_out", activate(gate, up))
    if w.ffn_sub_norm is not None:
        y = note("ffn_sub_norm", rms_norm(y, w.ffn_sub_norm, c.eps))
    y = note("ffn_down", linear(c, y, w.ffn_down))
    if w.ffn_gate_inp_shexp is None:
        return y
    score = x @ w.ffn_gate_inp_shexp[:, None]
    gate = sigmoid(score)
    return note("ffn_shexp_out", y * gate)


def feed_forward(model: Any, n: int, h: Array, note: Note) -> Array:
    # [T, D] -> [T, D]; the branch of layer n
    c = model.config
    w = model.layers[n]
    x = h
    if w.ffn_norm is not None:
        x = note("ffn_norm", norm(c, h, w.ffn_norm, w.ffn_norm_bias))
    if c.shared_norm and w.attn_norm is not None:
        x = norm(c, h, w.attn_norm, w.attn_norm_bias)  # attention's input again
    y: Any = 0.0
    if w.experts:
        y = mixture(c, w, x, note)
    if w.ffn_up is not None:
        y = y + dense(c, w, x, note)
    if w.post_ffw_norm is not None:
        y = note("ffn_post_norm", norm(c, y, w.post_ffw_norm))
    return y


def ignore(name: str, n: int | None, x: NDArray) -> None:
    """Record nothing."""


def forward(model: Any, tokens: ArrayLike, record: Callable[..., None] = ignore) -> Array:
    # [T] -> logits [T, V]
    c = model.config

    def note(name: str, x: NDArray, n: int | None = None) -> NDArray:  # n: the layer, None around the layers
        record(name, n, x)
        return x

    h = note("inp_embd", embed(model.token_embd, tokens))
    if model.position_embd is not None:
        positions = model.position_embd[: len(h)]
        h = note("inpL", h + positions)
    if c.embedding_scale != 1:
        h = note("inp_scaled", h * c.embedding_scale)
    for n in range(c.n_layers):
        in_layer = partial(note, n=n)
        attended = attention(model, n, h, in_layer) * c.residual_scale
        if not c.parallel_residual:
            h = in_layer("ffn_inp", h + attended)
        fed = feed_forward(model, n, h, in_layer) * c.residual_scale
        h = h + fed
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
    scaled = logits / c.logit_scale
    logits = soft_cap(scaled, c.logit_cap)
    return note("result_output", logits)
