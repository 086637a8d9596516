"""The two laws are one: spec.py's whole models, taken apart, are law/'s single operations on the same inputs."""

import ast
from pathlib import Path

import numpy as np
import pytest
from dumps import family_dump
from models import random_model

from bitnet_np import BITNET_CPP, EXACT, LLAMA_CPP, spec
from bitnet_np.engine.forward_pass import run_whole
from bitnet_np.engine.network import Runtime
from bitnet_np.engine.tokens import check_tokens
from bitnet_np.judge.bounds import within
from bitnet_np.judge.law import graph
from bitnet_np.judge.law.graph import TOKENS, operations
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.dense import dense_view
from bitnet_np.model.families import ARCHITECTURES
from bitnet_np.model.records import Yarn
from bitnet_np.traces.points import TOP_EXPERTS, Key

SHAPES = [{"family": family, "inner_norms": inner} for family in ARCHITECTURES for inner in (False, True)]
SHAPES += [
    {"family": "gptneox", "parallel_residual": True, "rope_width": 8},
    {"family": "llama", "weights": "ternary", "rope_scaling": 2.0},
    {"family": "phi3", "rope_width": 8, "yarn": Yarn(4.0, 16), "rope_magnitude": 1.2},
    {"family": "smollm3", "rope_layers": (1,)},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ", ".join(map(str, shape.values())))
def test_single_operations_are_those_of_the_definition(shape):
    """Every tensor that spec.forward records, from the tensors it records before: to the roundings of float64, and codes exactly."""
    model = random_model(5, **shape, window=5, window_layers=(1,), tied=False)
    ids = np.random.default_rng(0).integers(0, model.config.vocab, 9)
    points: dict[Key, np.ndarray] = {TOKENS: ids}
    spec.forward(dense_view(model), ids, lambda name, n, x: points.update({Key(name, n): np.array(x).reshape(9, -1)}))
    judged = set()
    for operation in operations(model, EXACT):
        key = operation.key
        if key.name.endswith(("_codes", "_scale")):
            (source,) = operation.inputs
            if source in points:
                codes, scale = spec.quantize(points[source])
                expected = codes if key.name.endswith("_codes") else scale
                np.testing.assert_array_equal(operation.evaluate(points[source]).value, expected)
            continue
        if key.name.endswith("_in"):  # a norm inside a matrix, which spec.forward does not record
            points[key] = operation.evaluate(*(points[k] for k in operation.inputs)).value
            continue
        expected = operation.evaluate(*(points[k] for k in operation.inputs))
        size = np.abs(points[key]).max()
        assert np.abs(expected.value - points[key]).max() <= 1e-12 * size, key
        judged.add(key)
    assert judged == points.keys() - {TOKENS} - {key for key in points if key.name.endswith("_in")}


@pytest.mark.usual(21)
@pytest.mark.parametrize("dialect", [EXACT, BITNET_CPP, LLAMA_CPP])
@pytest.mark.parametrize("inner_norms", [False, True])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_pass_goes_on_with_what_the_editor_returns(family, inner_norms, dialect):
    """Every tensor is replaced by another. Each operation gives what its inputs make, and those are the tensors that replaced ours."""
    model, ids, points = family_dump(family, inner_norms=inner_norms)
    rng, results = np.random.default_rng(0), {}
    replaced = {
        key: (value + 1) % model.config.experts
        if key.name == TOP_EXPERTS
        else (value * rng.uniform(0.5, 2, value.shape)).astype(np.float32)
        for key, value in points.items()
    }

    def note(name, n, array):
        results.setdefault(Key(name, n), array.reshape(len(ids), -1).copy())

    def feed(name, n, array):
        note(name, n, array)
        return replaced[Key(name, n)].reshape(array.shape)

    run_whole(Runtime(model, dialect, record=note, edit=feed), check_tokens(model.config, ids[None]))
    inputs = {key: value.astype(np.float64) for key, value in replaced.items()} | {graph.TOKENS: ids}
    for operation in graph.operations(model, dialect):
        expected = operation.evaluate(*(inputs[key] for key in operation.inputs))
        verdict, reason, _ = within(expected, results[operation.key].astype(np.float64))
        assert verdict <= Verdict.FLIPS, (operation.key, reason)


def test_the_laws_of_the_judge_import_no_arithmetic_of_production():
    """Records, formats and the definition: no kernels, no backend, no forward pass, no frequencies that production works out."""
    room = Path(graph.__file__).parent
    files = (*room.glob("*.py"), room.parent / "bounds.py")
    assert len(files) > 8
    banned = {"kernels", "backend", "forward_pass", "network", "rope", "ternarize", "masks", "cache"}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level >= 2:
                parts = {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
                assert not parts & banned, (file, node.module)
