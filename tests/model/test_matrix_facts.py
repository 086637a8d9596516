"""What matrices hold: their kinds, and which of them have one weight only."""

from dataclasses import replace

import numpy as np
import pytest
from models import random_model

from bitnet_np.base.tensor_types import Q8_0
from bitnet_np.model import matrix_facts, packing
from bitnet_np.model.records import Blocks
from bitnet_np.testing.models import random_table


def with_matrix(weights):
    """A model whose embedding, of that shape, is this table, or whose first attn_q this ternary matrix."""
    model = random_model(0)
    if not isinstance(weights, np.ndarray | Blocks):
        return replace(model, layers=(replace(model.layers[0], attn_q=replace(model.layers[0].attn_q, weights=weights)), *model.layers[1:]))
    return replace(model, token_embd=weights)


@pytest.mark.parametrize("value", [-1, 0, 1])
@pytest.mark.parametrize("shape", [(16, 32), (64, 48), (7, 5), (17, 16), (16, 17)])  # with and without padding
def test_a_ternary_matrix_of_one_weight(value, shape):
    matrix = np.full(shape, value, np.int8)
    expected = [f"layer 0 attn_q: every weight is {0.5 * value:g}"]
    assert list(matrix_facts.constant_matrices(with_matrix(packing.pack(matrix, 0.5)))) == expected
    for at in ((0, 0), (shape[0] - 1, shape[1] - 1)):
        other = matrix.copy()
        other[at] = (value + 2) % 3 - 1
        assert list(matrix_facts.constant_matrices(with_matrix(packing.pack(other, 0.5)))) == []
    assert list(matrix_facts.constant_matrices(with_matrix(packing.pack(other, 0)))) == ["layer 0 attn_q: every weight is 0"]


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "Q8_0", "Q2_K"])
def test_a_table_of_one_weight(kind, monkeypatch):
    monkeypatch.setattr(matrix_facts, "_CHUNK", 1000)
    table = random_table(np.random.default_rng(0), kind, 50, 256)
    assert list(matrix_facts.constant_matrices(with_matrix(table))) == []
    data = (table.data if isinstance(table, Blocks) else table).copy()
    data[:] = 0
    zeros = replace(table, data=data) if isinstance(table, Blocks) else data
    assert list(matrix_facts.constant_matrices(with_matrix(zeros))) == ["token_embd: every weight is 0"]
    data[-1] = (table.data if isinstance(table, Blocks) else table)[-1]
    assert list(matrix_facts.constant_matrices(with_matrix(zeros))) == []


def test_kinds_are_named_by_what_the_file_has():
    model = random_model(0)
    number = 7 * len(model.layers)
    assert matrix_facts.kinds_of_matrices(model, ["F32", "I2_S"]) == {"ternary, packed in the file": number}
    assert matrix_facts.kinds_of_matrices(model, ["BF16"]) == {"ternary, quantised at load from master weights": number}
    floats = random_model(0, family="llama", weights="Q8_0", width=64, ffn=64, heads=2, kv_heads=1, head_dim=32)
    assert matrix_facts.kinds_of_matrices(floats, [Q8_0.name]) == {"float (Q8_0)": 7 * len(floats.layers)}
    shape = {"width": 256, "ffn": 256, "head_dim": 64, "heads": 4, "kv_heads": 2}
    (kind,) = matrix_facts.kinds_of_matrices(random_model(0, family="llama", table="float16", weights="IQ3_S", **shape), ["IQ3_S"])
    assert kind == "float (IQ3_S, decoded in each pass by gguf-py, which is slow)"


@pytest.mark.parametrize("kind", ["ternary", "float32", "Q8_0"])
def test_the_error_of_each_matrix(kind, monkeypatch):
    monkeypatch.setattr(matrix_facts, "_CHUNK", 1000)
    model = random_model(0, family="llama", weights=kind, tied=False, width=64, ffn=64, heads=2, kv_heads=1, head_dim=32, n_layers=1)
    errors = matrix_facts.matrix_errors(model, model)
    assert set(errors) == {"token_embd", "output", *(f"layer 0 {name}" for name, _ in model.layers[0].linears())}
    assert set(errors.values()) == {0.0}
    up = model.layers[0].ffn_up
    scaled = replace(up, scale=np.float32(1.25 * (1 if up.scale is None else up.scale)))
    other = replace(model, layers=(replace(model.layers[0], ffn_up=scaled),), output=model.output * np.float32(0.5))
    errors = matrix_facts.matrix_errors(model, other)
    assert {name: error for name, error in errors.items() if error} == {"layer 0 ffn_up": pytest.approx(0.25), "output": pytest.approx(0.5)}
    turned = replace(model, config=replace(model.config, rope="halves" if model.config.rope == "adjacent" else "adjacent"))
    assert set(errors) - set(matrix_facts.matrix_errors(model, turned)) == {"layer 0 attn_q", "layer 0 attn_k"}
