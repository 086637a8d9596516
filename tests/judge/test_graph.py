"""The operations of a forward pass, and what each reads."""

import numpy as np
import pytest
from dumps import family_dump

from bitnet_np import BITNET_CPP, EXACT, LLAMA_CPP
from bitnet_np.families import ARCHITECTURES
from bitnet_np.forward_pass import run_whole
from bitnet_np.judge import graph
from bitnet_np.judge.bounds import within
from bitnet_np.judge.verdict import Verdict
from bitnet_np.network import Runtime
from bitnet_np.tokens import check_tokens
from bitnet_np.traces.points import Key


@pytest.mark.parametrize("dialect", [EXACT, BITNET_CPP, LLAMA_CPP])
@pytest.mark.parametrize("inner_norms", [False, True])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_pass_goes_on_with_what_the_editor_returns(family, inner_norms, dialect):
    """Every tensor is replaced as it comes, and each operation's own result is still that of its inputs: those that replaced ours."""
    model, ids, points = family_dump(family, inner_norms=inner_norms)
    rng, made = np.random.default_rng(0), {}
    given = {key: (value * rng.uniform(0.5, 2, value.shape)).astype(np.float32) for key, value in points.items()}

    def note(name, n, array):
        made.setdefault(Key(name, n), array.reshape(len(ids), -1).copy())

    def feed(name, n, array):
        note(name, n, array)
        return given[Key(name, n)].reshape(array.shape)

    run_whole(Runtime(model, dialect, edit=feed), check_tokens(model.config, ids[None]), note)
    inputs = {key: value.astype(np.float64) for key, value in given.items()} | {graph.TOKENS: ids}
    for operation in graph.operations(model, dialect):
        expected = operation.evaluate(*(inputs[key] for key in operation.inputs))
        verdict, reason, _ = within(expected, made[operation.key].astype(np.float64))
        assert verdict <= Verdict.FLIPS, (operation.key, reason)
