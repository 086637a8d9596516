"""Fixtures for other engines: every operation of the self-test, with inputs from which the definition gives the results."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

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
    """Which tells arrays that are others' or in another order; how near kernels are is for tests/test_contract.py."""

    def call(case, number, operation):
        begin = f"{number}.{operation}."
        arrays = {key.removeprefix(begin): array for key, array in written[case].items() if key.startswith(begin)}
        return {key: array.astype(np.float64) if array.dtype.kind in "fi" else array for key, array in arrays.items()}

    norm = call("rms_norm", 0, "rms_norm")
    assert_allclose(norm["result"], spec.rms_norm(norm["x"], norm["gain"], norm["eps"]), 1e-6)
    assert call("ternary_matmul, 7 rows", 0, "quantize").keys() == {"x", "result0", "result1"}
    for number in (1, 3):
        product = call("ternary_matmul, 7 rows", number, "ternary_matmul")
        expected = spec.ternary_matmul(product["q"], product["scale"][:, None], product["matrix"], float(product["w_scale"]))
        assert_allclose(product["result"], expected, 1e-6)
    masked = call("attend_masked", 0, "attend_masked")
    assert_allclose(masked["result"], spec.attend(masked["q"], masked["k"][0], masked["v"][0], masked["mask"][0]), 0, 1e-5)
