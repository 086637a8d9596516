"""THE DEFINITION of training: the loss of a sequence and its exact gradients, in float64. Slow, and it shares nothing with what it judges.

The loss is next-token cross-entropy, -sum over t of ln p(token t + 1 | tokens 0..t) / divisor, of the BitNet and Llama blocks of spec.py.
Each operation gives its value and a function `back` from the loss's gradient with respect to that value to those with respect to its
inputs (a vector-Jacobian product); the model runs forward through the values, in the order of spec.py, and then backward through the
`back`s. Gradients of what is used twice, such as a tied embedding, add up.

THE CONVENTION. Rounding has no useful derivative: training pretends that it has one, and this is a choice, not mathematics. The published
recipe ("The Era of 1-bit LLMs: Training Tips, Code and FAQ", Microsoft 2024, after Bengio, Léonard and Courville, arXiv 1308.3432) keeps
master weights and uses `x + (quantize(x) - x).detach()` for activations and weights alike: the forward pass computes the quantised value,
and the gradient passes as if nothing had happened, scale, rounding and clamp included (transformers' AutoBitLinear does the same). So a
matrix's gradient is dy^T quantize(x), and its input's is dy quantize(W). Without quantisers nothing is pretended: the gradients are the
loss's derivatives, and finite differences can check them.

Letters as in spec.py. `parameters` have the names of GGUF's tensors: token_embd.weight [V, D], blk.<n>.attn_q.weight [H*K, D] and so on,
output_norm.weight [D], and output.weight [V, D] where the head is not the embedding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import spec

Array = NDArray[np.float64]
Back = Callable[[Array], tuple[Array, ...]]
Quantizers = tuple[Callable[[Array], Array], Callable[[Array], Array]]
"""Of a layer's matrix: what its input becomes, and what the matrix becomes. The gradients of both are taken to be 1."""


def same(x: Array) -> Array:
    return x


def int8(x: Array) -> Array:  # [T, M] -> [T, M]; on 127 steps of each row's absmax
    q, scale = spec.quantize(x)
    return q / scale


def ternary(w: Array) -> Array:  # [N, M] -> [N, M]; -1, 0, +1 times the absmean, which is at least 1e-5
    scale = max(np.abs(w).mean(), 1e-5)
    return np.clip(np.rint(w / scale), -1, 1) * scale


MASTERS: Quantizers = (int8, ternary)  # weights in training
DEQUANTIZED: Quantizers = (int8, same)  # ternary weights of a file, times their scale
FLOATS: Quantizers = (same, same)


# --- operations: value, back ----------------------------------------------------------------------------------------------------------


def embed(table: Array, tokens: ArrayLike) -> tuple[Array, Back]:  # [V, D], [T] -> [T, D]
    def back(dy: Array) -> tuple[Array]:
        gradient = np.zeros_like(table)
        np.add.at(gradient, np.asarray(tokens), dy)  # a token that comes twice counts twice
        return (gradient,)

    return spec.embed(table, tokens), back


def rms_norm(x: Array, gain: Array, eps: float) -> tuple[Array, Back]:  # [T, D], [D] -> [T, D]
    factor = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)

    def back(dy: Array) -> tuple[Array, Array]:
        g = dy * gain
        return factor * g - x * factor**3 * np.mean(g * x, axis=-1, keepdims=True), np.sum(dy * x * factor, axis=0)

    return spec.rms_norm(x, gain, eps), back


def linear(x: Array, w: Array, quantizers: Quantizers = FLOATS) -> tuple[Array, Back]:  # [T, M], [N, M] -> [T, N]
    x, w = quantizers[0](x), quantizers[1](w)
    return spec.matmul(x, w), lambda dy: (dy @ w, dy.T @ x)


def rope(x: Array, c: Any, factors: Any) -> tuple[Array, Back]:  # [T, H, K] -> [T, H, K]; a rotation's transpose is the rotation back
    position = np.arange(len(x)) / c.rope_scaling
    turned = lambda y, p: spec.rope(y, p, c.rope_base, c.rope, c.rope_width, factors, c.rope_magnitude)  # noqa: E731
    return turned(x, position), lambda dy: (turned(dy, -position),)


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


def add(a: Array, b: Array) -> tuple[Array, Back]:  # [T, N], [T, N] -> [T, N]; or a bias: [T, N], [N] -> [T, N]
    return a + b, lambda dy: (dy, dy.sum(axis=0) if b.ndim < a.ndim else dy)


def reshape(x: Array, shape: tuple[int, ...]) -> tuple[Array, Back]:
    return x.reshape(shape), lambda dy: (dy.reshape(x.shape),)


def relu2_gate(gate: Array, up: Array) -> tuple[Array, Back]:  # [T, F], [T, F] -> [T, F]
    positive = np.maximum(gate, 0)
    return spec.relu2_gate(gate, up), lambda dy: (dy * up * 2 * positive, dy * positive**2)


def silu_gate(gate: Array, up: Array) -> tuple[Array, Back]:  # [T, F], [T, F] -> [T, F]
    sigmoid = spec.sigmoid(gate)
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


@dataclass(eq=False)
class _Value:
    """A tensor, the loss's gradient with respect to it, which adds up, and how that reaches what the tensor was computed from."""

    tensor: Array
    back: Back | None = None  # None: a parameter
    inputs: tuple["_Value", ...] = ()
    gradient: Any = 0.0


def loss_and_gradients(
    c: Any,
    parameters: Mapping[str, Array],
    tokens: ArrayLike,
    quantizers: Callable[[str], Quantizers] = lambda name: MASTERS,
    divisor: float | None = None,
    factors: Any = 1.0,
) -> tuple[float, dict[str, Array]]:
    """The loss of one sequence and its gradients by the names of the parameters: tokens [T] -> loss, gradients.

    c: any record with the fields of model.Config. quantizers: those of a layer's matrix, by its name. divisor: by default the T - 1
    predicted tokens; with that of a whole batch, the sequences' losses and gradients add up to its. factors: of RoPE's frequencies, [J].
    """
    ids, steps = np.asarray(tokens), list[_Value]()
    t, values = len(ids) - 1, {name: _Value(value) for name, value in parameters.items()}

    def run(operation: Callable[..., tuple[Array, Back]], *inputs: _Value, **how: Any) -> _Value:  # in the order of the forward pass
        steps.append(_Value(*operation(*(value.tensor for value in inputs), **how), inputs))
        return steps[-1]

    def norm(name: str, x: _Value) -> _Value:  # x itself where a family has no such norm
        gain = values.get(f"{name}.weight")
        return x if gain is None else run(rms_norm, x, gain, eps=c.eps)

    def product(name: str, x: _Value) -> _Value:  # with a bias where there is one
        weight, bias = f"{name}.weight", values.get(f"{name}.bias")
        y = run(linear, x, values[weight], quantizers=quantizers(weight))
        return y if bias is None else run(add, y, bias)

    h = run(embed, values["token_embd.weight"], tokens=ids[:-1])
    for n in range(c.n_layers):
        x = norm(f"blk.{n}.attn_norm", h)
        q, k, v = (run(reshape, product(f"blk.{n}.attn_{name}", x), shape=(t, -1, c.head_dim)) for name in "qkv")
        q, k = (run(rope, x, c=c, factors=factors) for x in (q, k))
        x = run(reshape, run(attend, q, k, v, mask=spec.causal_mask(t, t, window=c.window_of(n))), shape=(t, -1))
        h = run(add, h, product(f"blk.{n}.attn_output", norm(f"blk.{n}.attn_sub_norm", x)))
        x = norm(f"blk.{n}.ffn_norm", h)
        x = run(GATES[c.activation], product(f"blk.{n}.ffn_gate", x), product(f"blk.{n}.ffn_up", x))
        h = run(add, h, product(f"blk.{n}.ffn_down", norm(f"blk.{n}.ffn_sub_norm", x)))
    head = values.get("output.weight", values["token_embd.weight"])
    logits = run(linear, norm("output_norm", h), head)  # the head is never quantised
    loss, logits.gradient = cross_entropy(logits.tensor, ids[1:], t if divisor is None else divisor)
    for value in reversed(steps):
        assert value.back is not None
        for source, gradient in zip(value.inputs, value.back(value.gradient), strict=True):
            source.gradient = source.gradient + gradient
    return loss, {name: value.gradient for name, value in values.items()}
