"""A pass that goes on with other tensors than its own, against single operations of the tensors that they read."""

import numpy as np
import pytest
from dumps import family_dump

from bitnet_np import BITNET_CPP, EXACT, LLAMA_CPP
from bitnet_np.engine.forward_pass import run_whole
from bitnet_np.engine.network import Runtime
from bitnet_np.engine.tokens import check_tokens
from bitnet_np.judge import graph
from bitnet_np.judge.bounds import within
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.families import ARCHITECTURES
from bitnet_np.traces.points import TOP_EXPERTS, Key


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

    run_whole(Runtime(model, dialect, edit=feed), check_tokens(model.config, ids[None]), note)
    inputs = {key: value.astype(np.float64) for key, value in replaced.items()} | {graph.TOKENS: ids}
    for operation in graph.operations(model, dialect):
        expected = operation.evaluate(*(inputs[key] for key in operation.inputs))
        verdict, reason, _ = within(expected, results[operation.key].astype(np.float64))
        assert verdict <= Verdict.FLIPS, (operation.key, reason)
