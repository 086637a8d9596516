"""The definition where no recording decides: ties, limits, masks. tests/golden/ compares all of it with other engines, in float64 too."""

import ast
from pathlib import Path

import numpy as np

from bitnet_np import spec

INF = np.inf


def test_quantize():
    """Ties go to even; a row's scale is no larger than that of 1e-5."""
    codes, scale = spec.quantize(np.array([[127, 0.5, 1.5, -2.5, 3.4], [-2, 1, 0.5, 0, 0], [0, 0, 0, 0, 1e-6]]))
    assert codes.tolist() == [[127, 0, 2, -2, 3], [-127, 64, 32, 0, 0], [0, 0, 0, 0, 13]]
    assert scale.tolist() == [[1], [63.5], [127 / 1e-5]]


def test_a_row_of_zeros_has_a_norm_of_zeros():
    np.testing.assert_allclose(spec.rms_norm(np.zeros((1, 2)), np.ones(2), 1e-5), [[0, 0]])


def test_keys_that_a_mask_hides_are_left_out():
    q, k, v = np.zeros((1, 4, 2)), np.zeros((2, 2, 2)), np.array([[[0.0, 1.0], [10.0, 11.0]], [[2.0, 3.0], [12.0, 13.0]]])
    assert spec.attend(q, k, v, np.array([[0, -INF]]))[0].tolist() == [[0, 1], [0, 1], [10, 11], [10, 11]]


def test_the_two_gelus():
    """x times the normal distribution: Phi(1) = 0.841344746; the approximation is off by 1.5e-4 there."""
    x = np.array([[1.0, -1.0, 0.0, 10.0]])
    np.testing.assert_allclose(spec.gelu(x), [[0.841344746068543, -0.158655253931457, 0, 10]], rtol=1e-14)
    np.testing.assert_allclose(spec.gelu_tanh(x), [[0.841191990608, -0.158808009392, 0, 10]], rtol=1e-11)


def test_it_imports_numpy_and_no_part_of_what_it_judges():
    modules = set()
    for node in ast.walk(ast.parse(Path(spec.__file__).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    assert {module.split(".")[0] for module in modules} == {"collections", "functools", "math", "typing", "numpy"}
