"""Fixtures for other engines: every operation of the self-test, with inputs from which the definition gives the results."""

import bounds
import numpy as np
import pytest
from bounds import assert_within

from bitnet_np import spec
from bitnet_np.testing.fixtures import fixtures


@pytest.fixture(scope="module")
def written():
    return dict(fixtures())


def test_every_operation_of_the_self_test_is_there(written):
    operations = {key.split(".")[1] for arrays in written.values() for key in arrays}
    assert operations >= {"embed", "matmul", "rms_norm", "quantize", "ternary_matmul", "rotations", "rope", "attend", "attend_masked"}
    assert operations >= {"attend_float16", "rope_adjacent", "layer_norm", "silu_gate", "gelu", "gelu_tanh", "relu2_gate"}


def test_inputs_give_the_results_by_the_definition(written):
    norm = written["rms_norm"]
    x, gain, eps, result = (norm[f"0.rms_norm.{name}"] for name in ("x", "gain", "eps", "result"))
    assert_within(result, *bounds.rms_norm(x, gain, float(eps)))
    product = written["ternary_matmul, 7 rows"]
    assert sorted(key for key in product if key.startswith("0.")) == ["0.quantize.result0", "0.quantize.result1", "0.quantize.x"]
    for call in (1, 3):
        q, scale, matrix, w_scale, result = (
            product[f"{call}.ternary_matmul.{name}"] for name in ("q", "scale", "matrix", "w_scale", "result")
        )
        expected = spec.ternary_matmul(q.astype(np.float64), scale.astype(np.float64)[:, None], matrix, float(w_scale))
        assert_within(result, expected, bounds.gamma(3) * np.abs(expected))
    masked = written["attend_masked"]
    q, k, v, mask, result = (masked[f"0.attend_masked.{name}"] for name in ("q", "k", "v", "mask", "result"))
    assert_within(result, *bounds.attend_masked(q, k[0], v[0], mask[0]))
