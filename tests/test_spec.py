"""The definition against the same model written once more, number by number, and against cases one can check by hand."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
from models import random_model, random_tokens

from bitnet_np import spec
from bitnet_np.dense import dense_view

INF = np.inf


# --- once more, number by number: no arrays, no broadcasting, nothing shared ------------------------------------------------------------


def norm(x, gain, eps):
    root = math.sqrt(sum(a * a for a in x) / len(x) + eps)
    return [a / root * g for a, g in zip(x, gain, strict=True)]


def half_to_even(a):
    low = math.floor(a)
    if a - low != 0.5:
        return low if a - low < 0.5 else low + 1
    return low if low % 2 == 0 else low + 1


def linear(x, weights):
    steps = 127 / max(1e-5, max(abs(a) for a in x))
    codes = [half_to_even(a * steps) for a in x]
    out = []
    for row in weights.matrix:
        total = 0
        for weight, code in zip(row, codes, strict=True):
            if weight == 1:
                total += code
            elif weight == -1:
                total -= code
        out.append(total / steps * weights.scale)
    return out


def rotate(head, position, base):
    out, half = list(head), len(head) // 2
    for i in range(half):
        turn = complex(head[i], head[i + half]) * np.exp(1j * position * base ** (-2 * i / len(head)))
        out[i], out[i + half] = turn.real, turn.imag
    return out


def split(x, width):
    return [x[i : i + width] for i in range(0, len(x), width)]


def naive_forward(model, tokens):
    """One token after the other, with lists of the keys and values so far: the other way round from spec.py."""
    c, logits = model.config, []
    past = [([], []) for _ in model.layers]
    for position, token in enumerate(tokens):
        h = [float(a) for a in model.token_embd[token]]
        for w, (keys, values) in zip(model.layers, past, strict=True):
            x = norm(h, w.attn_norm, c.eps)
            queries = [rotate(head, position, c.rope_base) for head in split(linear(x, w.attn_q), c.head_dim)]
            keys.append([rotate(head, position, c.rope_base) for head in split(linear(x, w.attn_k), c.head_dim)])
            values.append(split(linear(x, w.attn_v), c.head_dim))
            attended = []
            for number, query in enumerate(queries):
                shared = number // (c.heads // c.kv_heads)
                scores = [sum(a * b for a, b in zip(query, key[shared], strict=True)) / math.sqrt(c.head_dim) for key in keys]
                weights = [math.exp(score - max(scores)) for score in scores]
                for i in range(c.head_dim):
                    attended.append(sum(p * value[shared][i] for p, value in zip(weights, values, strict=True)) / sum(weights))
            x = linear(norm(attended, w.attn_sub_norm, c.eps), w.attn_output)
            h = [a + b for a, b in zip(h, x, strict=True)]
            x = norm(h, w.ffn_norm, c.eps)
            gate, up = linear(x, w.ffn_gate), linear(x, w.ffn_up)
            hidden = [g * g * u if g > 0 else 0.0 for g, u in zip(gate, up, strict=True)]
            x = linear(norm(hidden, w.ffn_sub_norm, c.eps), w.ffn_down)
            h = [a + b for a, b in zip(h, x, strict=True)]
        x = norm(h, model.output_norm, c.eps)
        head = model.token_embd if model.output is None else model.output
        logits.append([sum(a * b for a, b in zip(x, row, strict=True)) for row in head])
    return np.array(logits)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 6},
        {"heads": 3, "kv_heads": 3, "head_dim": 2, "tied": False},
        {"heads": 3, "kv_heads": 1, "head_dim": 4, "eps": 1e-2, "rope_base": 500000.0},
    ],
)
def test_forward_is_the_model_written_out(shape):
    for seed in range(3):
        model = dense_view(random_model(seed, **{"vocab": 9, "width": 10, "ffn": 14, **shape}))
        tokens = random_tokens(np.random.default_rng(seed), model, 7)
        np.testing.assert_allclose(spec.forward(model, tokens), naive_forward(model, tokens), rtol=1e-10, atol=1e-10)


# --- cases by hand --------------------------------------------------------------------------------------------------------------------


def test_causal_mask_with_a_past():
    assert spec.causal_mask(2, 5, past=3).tolist() == [[0, 0, 0, 0, -INF], [0, 0, 0, 0, 0]]


def test_causal_mask_without_one():
    assert spec.causal_mask(3, 3).tolist() == [[0, -INF, -INF], [0, 0, -INF], [0, 0, 0]]
    assert spec.causal_mask(2, 4).tolist() == [[0, -INF, -INF, -INF], [0, 0, -INF, -INF]]
    assert spec.causal_mask(1, 1).tolist() == [[0]]
    assert spec.causal_mask(1, 4, past=3).tolist() == [[0, 0, 0, 0]]


def test_causal_mask_with_a_window():
    """A window of n keys holds the query's own."""
    mask = spec.causal_mask(4, 4, window=2)
    assert mask.tolist() == [[0, -INF, -INF, -INF], [0, 0, -INF, -INF], [-INF, 0, 0, -INF], [-INF, -INF, 0, 0]]
    assert spec.causal_mask(2, 5, past=3, window=3).tolist() == [[-INF, 0, 0, 0, -INF], [-INF, -INF, 0, 0, 0]]
    np.testing.assert_array_equal(spec.causal_mask(3, 3, window=1), np.where(np.eye(3), 0, -INF))
    np.testing.assert_array_equal(spec.causal_mask(4, 4, window=4), spec.causal_mask(4, 4))


def test_quantize():
    codes, scale = spec.quantize(np.array([[127, 0.5, 1.5, -2.5, 3.4], [-2, 1, 0.5, 0, 0], [0, 0, 0, 0, 1e-6]]))
    assert codes.tolist() == [[127, 0, 2, -2, 3], [-127, 64, 32, 0, 0], [0, 0, 0, 0, 13]]
    assert scale.tolist() == [[1], [63.5], [127 / 1e-5]]


def test_rms_norm():
    np.testing.assert_allclose(spec.rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), 0.0), [[3 / 12.5**0.5, 8 / 12.5**0.5]])
    np.testing.assert_allclose(spec.rms_norm(np.zeros((1, 2)), np.ones(2), 1e-5), [[0, 0]])
    np.testing.assert_allclose(spec.rms_norm(np.ones((1, 2)), np.ones(2), 3.0), [[0.5, 0.5]])  # epsilon is inside the root


def test_ternary_matmul():
    matrix = np.array([[1, -1, 0], [0, 1, 1]], np.int8)
    assert spec.ternary_matmul(np.array([[5.0, 3.0, -4.0]]), np.array([[2.0]]), matrix, 10.0).tolist() == [[10, -5]]


def test_rope_turns_halves_by_the_position():
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]] * 2)
    out = spec.rope(x, [0, 1], base=16.0)  # 1 and 1/4 radian per position
    np.testing.assert_array_equal(out[0], x[0])
    turned = [(1 + 3j) * np.exp(1j), (2 + 4j) * np.exp(0.25j)]
    np.testing.assert_allclose(out[1, 0], [turned[0].real, turned[1].real, turned[0].imag, turned[1].imag])


def test_attend_shares_heads_in_groups():
    """Query heads 0 and 1 read key-value head 0, heads 2 and 3 head 1; equal scores give means, and a mask leaves keys out."""
    q, k = np.zeros((1, 4, 2)), np.zeros((2, 2, 2))
    v = np.array([[[0.0, 1.0], [10.0, 11.0]], [[2.0, 3.0], [12.0, 13.0]]])
    assert spec.attend(q, k, v, np.zeros((1, 2)))[0].tolist() == [[1, 2], [1, 2], [11, 12], [11, 12]]
    assert spec.attend(q, k, v, np.array([[0, -INF]]))[0].tolist() == [[0, 1], [0, 1], [10, 11], [10, 11]]


def test_attend_scales_scores_by_the_root_of_the_head_width():
    q, k = np.full((1, 1, 4), 1.0), np.stack([np.zeros((1, 4)), np.full((1, 4), np.log(3) / 2)])  # scores 0 and log 3
    v = np.array([[[1.0, 0, 0, 0]], [[0, 1.0, 0, 0]]])
    np.testing.assert_allclose(spec.attend(q, k, v, np.zeros((1, 2)))[0, 0], [0.25, 0.75, 0, 0])


def test_relu2_gate():
    assert spec.relu2_gate(np.array([[3.0, -3.0, 0.5]]), np.array([[2.0, 2.0, -4.0]])).tolist() == [[18, 0, -1]]


def test_layer_norm():
    out = spec.layer_norm(np.array([[1.0, 3.0]]), np.array([2.0, 2.0]), np.array([0.5, -0.5]), 3.0)
    np.testing.assert_allclose(out, [[-2 / 2 + 0.5, 2 / 2 - 0.5]])  # mean 2, variance 1, root 2


def test_silu_gate():
    np.testing.assert_allclose(spec.silu_gate(np.array([[np.log(3), 0.0]]), np.array([[2.0, 5.0]])), [[np.log(3) * 1.5, 0]])


def test_the_two_gelus():
    """x times the normal distribution: Phi(1) = 0.841344746; the approximation is off by 1.5e-4 there."""
    x = np.array([[1.0, -1.0, 0.0, 10.0]])
    np.testing.assert_allclose(spec.gelu(x), [[0.841344746068543, -0.158655253931457, 0, 10]], rtol=1e-14)
    np.testing.assert_allclose(spec.gelu_tanh(x), [[0.841191990608, -0.158808009392, 0, 10]], rtol=1e-11)


def test_rope_of_adjacent_pairs_of_a_part_of_the_head():
    x = np.array([[[1.0, 2.0, 3.0, 4.0, 5.0]]])
    out = spec.rope(x, [1], 16.0, "adjacent", 4)[0, 0]  # 1 and 1/4 radian per position
    turned = [(1 + 2j) * np.exp(1j), (3 + 4j) * np.exp(0.25j)]
    np.testing.assert_allclose(out, [turned[0].real, turned[0].imag, turned[1].real, turned[1].imag, 5])
    slower = spec.rope(x, [1], 16.0, "adjacent", 4, np.array([2.0, 1.0]))[0, 0]
    np.testing.assert_allclose(slower[0], ((1 + 2j) * np.exp(0.5j)).real)


# --- what it is made of ---------------------------------------------------------------------------------------------------------------


def test_it_imports_numpy_and_no_part_of_what_it_judges():
    modules = set()
    for node in ast.walk(ast.parse(Path(spec.__file__).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    assert {module.split(".")[0] for module in modules} == {"collections", "functools", "math", "typing", "numpy"}
