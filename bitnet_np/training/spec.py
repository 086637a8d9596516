"""THE DEFINITION of training: the loss of a sequence and its exact gradients, in float64. Slow, and it shares nothing with what it judges.

The loss is next-token cross-entropy, -sum over t of ln p(token t + 1 | tokens 0..t) / divisor, of the BitNet and Llama blocks of spec.py.
Each operation gives its value and a function `back` from the loss's gradient with respect to that value to those with respect to its
inputs (a vector-Jacobian product); the model runs forward through the values and backward through the `back`s. Gradients of
parameters that are used twice, such as a tied embedding, add up.

THE CONVENTION. Rounding has no useful derivative: training pretends that it has one, and this is a choice, not mathematics. The published
recipe ("The Era of 1-bit LLMs: Training Tips, Code and FAQ", Microsoft 2024, after Bengio, Léonard and Courville, arXiv 1308.3432) keeps
master weights and uses `x + (quantize(x) - x).detach()` for activations and weights alike: the forward pass computes the quantised value,
and the gradient passes as if nothing had happened, scale, rounding and clamp included (`int8`, `ternary`; transformers' AutoBitLinear does
the same). So a matrix's gradient is dy^T quantize(x), and its input's is dy quantize(W). With `smooth` quantisers nothing is pretended: the
gradients are the loss's derivatives, and finite differences can check them.

Letters as in spec.py. `parameters` have the names of GGUF's tensors: token_embd.weight [V, D], blk.<n>.attn_q.weight [H*K, D] and so on,
output_norm.weight [D], and output.weight [V, D] where the head is not the embedding.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import spec

Array = NDArray[np.float64]
Back = Callable[[Array], Any]
Quantizer = Callable[[Array], tuple[Array, Back]]


# --- quantisers -----------------------------------------------------------------------------------------------------------------------


def smooth(x: Array) -> tuple[Array, Back]:
    """The identity: no quantiser."""
    return x, lambda dy: dy


def int8(x: Array) -> tuple[Array, Back]:  # [T, M]
    """Activations on 127 steps of each row's absmax. The recipe's gradient: the identity."""
    q, scale = spec.quantize(x)
    return q / scale, lambda dy: dy


def absmean(w: Array) -> float:
    """The scale of a matrix of master weights: mean |w|, but at least 1e-5."""
    return float(max(np.abs(w).mean(), 1e-5))


def ternary(w: Array) -> tuple[Array, Back]:  # [N, M]
    """Weights as -1, 0, +1 times their absmean. The recipe's gradient: the identity, the scale taken as constant."""
    scale = absmean(w)
    return np.clip(np.rint(w / scale), -1, 1) * scale, lambda dy: dy


# --- operations: value, back ----------------------------------------------------------------------------------------------------------


def embed(table: Array, tokens: ArrayLike) -> tuple[Array, Back]:  # [V, D], [T] -> [T, D]
    def back(dy: Array) -> Array:
        gradient = np.zeros_like(table)
        np.add.at(gradient, np.asarray(tokens), dy)  # a token that comes twice counts twice
        return gradient

    return spec.embed(table, tokens), back


def rms_norm(x: Array, gain: Array, eps: float) -> tuple[Array, Back]:  # [T, D], [D] -> [T, D]; back: [T, D], [D]
    factor = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)

    def back(dy: Array) -> tuple[Array, Array]:
        g = dy * gain
        return factor * g - x * factor**3 * np.mean(g * x, axis=-1, keepdims=True), np.sum(dy * x * factor, axis=0)

    return spec.rms_norm(x, gain, eps), back


def linear(x: Array, w: Array, activations: Quantizer, weights: Quantizer) -> tuple[Array, Back]:  # [T, M], [N, M] -> [T, N]
    quantised, x_back = activations(x)
    matrix, w_back = weights(w)
    return spec.matmul(quantised, matrix), lambda dy: (x_back(dy @ matrix), w_back(dy.T @ quantised))


def rope(x: Array, base: float, pairs: str, width: int | None, factors: Any, scaling: float, magnitude: float = 1.0) -> tuple[Array, Back]:
    """A rotation's transpose is the rotation back: [T, H, K] -> [T, H, K]."""
    position = np.arange(len(x)) / scaling
    turn = lambda y, p: spec.rope(y, p, base, pairs, width, factors, magnitude)  # noqa: E731
    return turn(x, position), lambda dy: turn(dy, -position)


def attend(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, Back]:  # [T, H, K], [S, G, K], [S, G, K] -> [T, H, K]
    heads, width = q.shape[1:]
    keys, values = (spec.by_query_head(kv, heads) for kv in (k, v))
    p = spec.softmax(np.einsum("thk,shk->hts", q, keys) / np.sqrt(width) + mask)

    def shared(d: Array) -> Array:
        """Gradients of key-value heads: the sum over the query heads that read each."""
        return d.reshape(len(d), k.shape[1], -1, width).sum(axis=2)

    def back(dy: Array) -> tuple[Array, Array, Array]:
        dp = np.einsum("thk,shk->hts", dy, values)
        ds = p * (dp - np.sum(p * dp, axis=-1, keepdims=True)) / np.sqrt(width)
        dq, dk = np.einsum("hts,shk->thk", ds, keys), np.einsum("hts,thk->shk", ds, q)
        return dq, shared(dk), shared(np.einsum("hts,thk->shk", p, dy))

    return spec.attend(q, k, v, mask), back


def relu2_gate(gate: Array, up: Array) -> tuple[Array, Back]:  # [T, F], [T, F] -> [T, F]
    positive = np.maximum(gate, 0)
    return spec.relu2_gate(gate, up), lambda dy: (dy * up * 2 * positive, dy * positive**2)


def silu_gate(gate: Array, up: Array) -> tuple[Array, Back]:  # [T, F], [T, F] -> [T, F]
    sigmoid = 1 / (1 + np.exp(-gate))
    return spec.silu_gate(gate, up), lambda dy: (dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid)


def cross_entropy(logits: Array, targets: ArrayLike, divisor: float) -> tuple[float, Array]:  # [T, V], [T] -> loss, [T, V]
    """The sum of -ln p(target) / divisor, and its gradient."""
    row, target = np.arange(len(logits)), np.asarray(targets)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    gradient = np.exp(log_p)
    gradient[row, target] -= 1
    return float(-log_p[row, target].sum() / divisor), gradient / divisor


GATES = {"relu2": relu2_gate, "silu": silu_gate}


# --- the model ------------------------------------------------------------------------------------------------------------------------


class _Parameters:
    """Parameters by name, and their gradients, which add up as the `back`s run."""

    def __init__(self, values: Mapping[str, Array], eps: float, activations: Quantizer, weights: Quantizer) -> None:
        self.values, self.eps, self.activations, self.weights = values, eps, activations, weights
        self.gradients = {name: np.zeros_like(value) for name, value in values.items()}

    def norm(self, name: str, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        """The norm with the gain <name>.weight; the identity where a family has no such norm."""
        gain = f"{name}.weight"
        if gain not in self.values:
            return x, lambda dy: dy
        y, back = rms_norm(x, self.values[gain], self.eps)
        return y, lambda dy: self._accumulate(gain, *back(dy))

    def linear(self, name: str, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        """The product with the matrix <name>.weight, and the bias <name>.bias where there is one."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        y, back = linear(x, self.values[weight], self.activations, self.weights)
        if bias not in self.values:
            return y, lambda dy: self._accumulate(weight, *back(dy))

        def biased_back(dy: Array) -> Array:
            self.gradients[bias] += dy.sum(axis=0)
            return self._accumulate(weight, *back(dy))

        return y + self.values[bias], biased_back

    def _accumulate(self, name: str, dx: Array, gradient: Array) -> Array:
        """Add to a parameter's gradient; returns the input's."""
        self.gradients[name] += gradient
        return dx


def loss_and_gradients(
    config: Any,
    parameters: Mapping[str, Array],
    tokens: ArrayLike,
    *,
    activations: Quantizer = int8,
    weights: Quantizer = ternary,
    divisor: float | None = None,
    factors: Any = 1.0,
) -> tuple[float, dict[str, Array]]:
    """The loss of one sequence and its gradients by the names of the parameters: tokens [T] -> loss, gradients.

    config: any record with the fields of model.Config. divisor: by default the T - 1 tokens that are predicted; with that of a whole
    batch, losses and gradients of its sequences add up to the batch's. factors: of RoPE's frequencies, [J].
    """
    ids = np.asarray(tokens)
    inputs, targets = ids[:-1], ids[1:]
    head = "output.weight" if "output.weight" in parameters else "token_embd.weight"
    p = _Parameters(parameters, config.eps, activations, weights)
    h, embed_back = embed(parameters["token_embd.weight"], inputs)
    backs = []  # of the layers: the gradient at a layer's output -> at its input
    for n in range(config.n_layers):
        h, layer_back = _layer(config, p, n, h, factors)
        backs.append(layer_back)
    x, norm_back = p.norm("output_norm", h)
    logits, head_back = linear(x, parameters[head], smooth, smooth)  # the head is never quantised
    loss, dlogits = cross_entropy(logits, targets, len(inputs) if divisor is None else divisor)

    dx, gradient = head_back(dlogits)
    p.gradients[head] += gradient
    dh = norm_back(dx)
    for layer_back in reversed(backs):
        dh = layer_back(dh)
    p.gradients["token_embd.weight"] += embed_back(dh)
    return loss, p.gradients


def _layer(c: Any, p: _Parameters, n: int, h: Array, factors: Any) -> tuple[Array, Callable[[Array], Array]]:  # [T, D] -> [T, D]
    t, block = len(h), f"blk.{n}."

    def turn(x: Array) -> tuple[Array, Back]:
        return rope(x, c.rope_base, c.rope, c.rope_width, factors, c.rope_scaling, c.rope_magnitude)

    x, attn_norm_back = p.norm(block + "attn_norm", h)
    q, q_back = p.linear(block + "attn_q", x)
    k, k_back = p.linear(block + "attn_k", x)
    v, v_back = p.linear(block + "attn_v", x)
    q, q_turn_back = turn(q.reshape(t, c.heads, c.head_dim))
    k, k_turn_back = turn(k.reshape(t, c.kv_heads, c.head_dim))
    x, attend_back = attend(q, k, v.reshape(t, c.kv_heads, c.head_dim), spec.causal_mask(t, t, window=c.window_of(n)))
    x, attn_sub_norm_back = p.norm(block + "attn_sub_norm", x.reshape(t, -1))
    x, output_back = p.linear(block + "attn_output", x)
    h = h + x
    x, ffn_norm_back = p.norm(block + "ffn_norm", h)
    gate, gate_back = p.linear(block + "ffn_gate", x)
    up, up_back = p.linear(block + "ffn_up", x)
    x, activation_back = GATES[c.activation](gate, up)
    x, ffn_sub_norm_back = p.norm(block + "ffn_sub_norm", x)
    x, down_back = p.linear(block + "ffn_down", x)

    def back(dh: Array) -> Array:
        dgate, dup = activation_back(ffn_sub_norm_back(down_back(dh)))
        dh = dh + ffn_norm_back(gate_back(dgate) + up_back(dup))
        dx = attn_sub_norm_back(output_back(dh))
        dq, dk, dv = attend_back(dx.reshape(t, c.heads, c.head_dim))
        dq, dk = q_turn_back(dq), k_turn_back(dk)
        dq, dk, dv = (d.reshape(t, -1) for d in (dq, dk, dv))
        return dh + attn_norm_back(q_back(dq) + k_back(dk) + v_back(dv))

    return h + x, back
