"""THE DEFINITION of training: the loss of sequences and its exact gradients, in float64. It shares nothing with what it judges.

The loss is next-token cross-entropy, -sum over t of ln p(token t + 1 | tokens 0..t) / divisor, of the BitNet and Llama blocks of spec.py.
The rows of all sequences stand end to end, so each matrix is multiplied once, by BLAS; only attention goes by sequence.
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

from collections.abc import Callable, Mapping, Sequence
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


def rope(x: Array, position: Array, c: Any, factors: Any) -> tuple[Array, Back]:
    # [T, H, K], [T] -> [T, H, K]; a rotation's transpose is the rotation back
    turned = lambda y, p: spec.rope(y, p / c.rope_scaling, c.rope_base, c.rope, c.rope_width, factors, c.rope_magnitude)  # noqa: E731
    return turned(x, position), lambda dy: (turned(dy, -position),)


def attend(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, Back]:  # [T, H, K], [S, G, K], [S, G, K] -> [T, H, K]
    heads, width = q.shape[1:]
    keys, values = (spec.by_head(spec.by_query_head(kv, heads)) for kv in (k, v))
    p = spec.attention_weights(q, k, mask)

    def shared(d: Array) -> Array:  # [H, S, K] -> [S, G, K]; the sum over the query heads that read each key-value head
        return spec.by_head(d.reshape(k.shape[1], -1, len(k), width).sum(axis=1))

    def back(dy: Array) -> tuple[Array, Array, Array]:
        dy = spec.by_head(dy)
        dp = dy @ values.swapaxes(1, 2)
        ds = p * (dp - np.sum(p * dp, axis=-1, keepdims=True)) / np.sqrt(width)
        dk, dv = (shared(weights.swapaxes(1, 2) @ x) for weights, x in ((ds, spec.by_head(q)), (p, dy)))
        return spec.by_head(ds @ keys), dk, dv

    return spec.weighted_values(p, v), back


def attend_each(q: Array, k: Array, v: Array, ends: NDArray[np.int64], window: int | None) -> tuple[Array, Back]:
    # [R, H, K], [R, G, K] x 2: sequences end to end, which end at [B - 1] and at R -> [R, H, K]
    def within(q: Array, k: Array, v: Array) -> tuple[Array, Back]:
        return attend(q, k, v, spec.causal_mask(len(q), len(q), window=window))

    outputs, backs = zip(*map(within, *(np.split(x, ends) for x in (q, k, v))), strict=True)

    def back(dy: Array) -> tuple[Array, ...]:
        gradients = (back(part) for back, part in zip(backs, np.split(dy, ends), strict=True))
        return tuple(np.concatenate(numbers) for numbers in zip(*gradients, strict=True))

    return np.concatenate(outputs), back


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
    gradient: Any = None


class _Tape:
    """The operations that have run, in the order of the forward pass, over the parameters of a model."""

    def __init__(self, parameters: Mapping[str, Array], quantizers: Callable[[str], Quantizers], eps: float) -> None:
        self.parameters = {name: _Value(array) for name, array in parameters.items()}
        self._quantizers, self._eps = quantizers, eps
        self._steps: list[_Value] = []

    def run(self, operation: Callable[..., tuple[Array, Back]], *inputs: _Value, **how: Any) -> _Value:
        self._steps.append(_Value(*operation(*(value.tensor for value in inputs), **how), inputs))
        return self._steps[-1]

    def norm(self, name: str, x: _Value) -> _Value:  # x itself if a family has no such norm
        gain = self.parameters.get(f"{name}.weight")
        return x if gain is None else self.run(rms_norm, x, gain, eps=self._eps)

    def product(self, name: str, x: _Value) -> _Value:  # with a bias where there is one
        weight, bias = f"{name}.weight", self.parameters.get(f"{name}.bias")
        y = self.run(linear, x, self.parameters[weight], quantizers=self._quantizers(weight))
        return y if bias is None else self.run(add, y, bias)

    def backward(self) -> dict[str, Any]:
        """The gradients of the parameters, from that of the last value."""
        while self._steps:
            value = self._steps.pop()
            assert value.back is not None
            for source, gradient in zip(value.inputs, value.back(value.gradient), strict=True):
                source.gradient = gradient if source.gradient is None else source.gradient + gradient
        return {name: value.gradient for name, value in self.parameters.items()}


def loss_and_gradients(
    c: Any,
    parameters: Mapping[str, Array],
    sequences: Sequence[ArrayLike],
    quantizers: Callable[[str], Quantizers] = lambda name: MASTERS,
    divisor: float | None = None,
    factors: Any = 1.0,
) -> tuple[float, dict[str, Array]]:
    """The loss of token ids [T] of some sequences, and its gradients by the names of the parameters.

    c: any record with the fields of records.Config. quantizers: those of a layer's matrix, by its name. divisor: by default the T - 1
    predicted tokens of all. factors: of RoPE's frequencies, [J].
    """
    ids = [np.asarray(sequence) for sequence in sequences]
    lengths = [len(sequence) - 1 for sequence in ids]
    read = np.concatenate([sequence[:-1] for sequence in ids])
    targets = np.concatenate([sequence[1:] for sequence in ids])
    rows, ends, position = len(read), np.cumsum(lengths[:-1]), np.concatenate([np.arange(n) for n in lengths])
    tape = _Tape(parameters, quantizers, c.eps)
    run, norm, product = tape.run, tape.norm, tape.product
    embedding = tape.parameters["token_embd.weight"]
    h = run(embed, embedding, tokens=read)
    for n in range(c.n_layers):
        x = norm(f"blk.{n}.attn_norm", h)
        q, k, v = (run(reshape, product(f"blk.{n}.attn_{name}", x), shape=(rows, -1, c.head_dim)) for name in "qkv")
        q, k = (run(rope, x, position=position, c=c, factors=factors) for x in (q, k))
        x = run(reshape, run(attend_each, q, k, v, ends=ends, window=c.window_of(n)), shape=(rows, -1))
        h = run(add, h, product(f"blk.{n}.attn_output", norm(f"blk.{n}.attn_sub_norm", x)))
        x = norm(f"blk.{n}.ffn_norm", h)
        x = run(GATES[c.activation], product(f"blk.{n}.ffn_gate", x), product(f"blk.{n}.ffn_up", x))
        h = run(add, h, product(f"blk.{n}.ffn_down", norm(f"blk.{n}.ffn_sub_norm", x)))
    head = tape.parameters.get("output.weight", embedding)
    logits = run(linear, norm("output_norm", h), head)  # the head is never quantised
    loss, logits.gradient = cross_entropy(logits.tensor, targets, rows if divisor is None else divisor)
    return loss, tape.backward()
