"""Mistakes in large products are tried at some outputs first: these are those of the whole result, and what is said stays the same."""

from dataclasses import replace

import numpy as np
import pytest
from dumps import recorded, trace
from models import random_model

from bitnet_np import EXACT
from bitnet_np.judge import parts
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.law.graph import LOGITS, TOKENS, operations
from bitnet_np.judge.law.precision import FLOAT32
from bitnet_np.judge.mistakes.catalogue import CATALOGUE, HIDDEN, at_operation
from bitnet_np.model import packing
from bitnet_np.traces.points import FIELDS

IDS = np.random.default_rng(0).permutation(300)[:12]
SHAPE = {"vocab": 300, "n_layers": 2, "width": 128, "ffn": 256, "heads": 8, "kv_heads": 4, "head_dim": 16, "tied": False}
MODELS = {
    "ternary": lambda: random_model(3, **SHAPE),
    "biases": lambda: random_model(2, family="qwen2", **SHAPE),
    "blocks": lambda: random_model(0, family="llama", weights="Q4_K", **SHAPE | {"width": 256, "head_dim": 32}),
    "capped logits": lambda: random_model(1, family="gemma2", **SHAPE),
}
PRODUCTS = (*FIELDS, LOGITS.name)


def edits_of(model, values):
    """Yields each edit of a product of the second layer and of the head, with its result."""
    for operation in operations(model, EXACT):
        if operation.key.name in PRODUCTS and operation.key.layer in (None, 1):
            for trial in at_operation(replace(operation, length=len(IDS)), (*CATALOGUE, *HIDDEN)):
                one = trial.with_number(2.5) if trial.grid else trial
                compute = one.computes[operation.key]
                try:
                    yield operation, one, compute, compute(values)
                except KeyError:  # a tensor of a step that this model has not
                    continue


def dump_of(model):
    points = recorded(model, IDS)
    return points, {key: x.reshape(len(IDS), -1).astype(np.float64) for key, x in points.items()} | {TOKENS: IDS}


@pytest.mark.usual("ternary", "capped logits")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # mistakes divide by zero
def test_some_outputs_are_those_of_the_whole_result(name):
    model = MODELS[name]()
    _, values = dump_of(model)
    columns, count = np.array([3, 0, 47, 62]), 0
    for operation, attempt, compute, whole in edits_of(model, values):
        if whole.shape != values[operation.key].shape or not np.isfinite(whole).all():
            continue
        np.testing.assert_allclose(compute.at(columns, values), whole[:, columns], 1e-6, 1e-9, err_msg=attempt.text)
        count += 1
    assert count > 1000


@pytest.mark.filterwarnings("ignore")
def test_the_same_is_said_as_without_a_screen(monkeypatch):
    model, rng, said = MODELS["ternary"](), np.random.default_rng(1), 0
    points, values = dump_of(model)
    planted = [item for item in edits_of(model, values) if item[3].shape == values[item[0].key].shape and np.isfinite(item[3]).all()]
    for i in rng.choice(len(planted), 6, replace=False):
        operation, attempt, _, wrong = planted[i]
        wrong = np.where(np.arange(len(IDS))[:, None] >= (i % 2) * 4, wrong, values[operation.key])  # in all tokens, or from one on
        dump = {key: points[key] for key in operation.inputs} | {operation.key: wrong.astype(np.float32)}
        texts = []
        for large in (1 << 40, 0):
            monkeypatch.setattr(parts, "_LARGE", large)
            report = judge_trace(model, trace(dump), IDS, precision=FLOAT32)
            texts.append(next(o.hypothesis for o in report.operations if o.key == operation.key))
        assert texts[0] == texts[1], attempt.text
        said += texts[0] is not None
    assert said > 3


def test_rows_of_a_ternary_matrix_are_unpacked_alone():
    matrix = np.random.default_rng(0).integers(-1, 2, (37, 150))
    rows = np.array([36, 0, 5, 5, 17])
    assert (packing.unpack_rows(packing.pack(matrix, 1.0), rows) == matrix[rows]).all()
