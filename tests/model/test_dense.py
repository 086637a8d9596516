"""The definition's view of a model: unpacked matrices, and all that belongs to them."""

import numpy as np
import pytest
from family_models import drawn

from bitnet_np.model import packing, widen
from bitnet_np.model.dense import dense_view
from bitnet_np.model.records import MATRICES


@pytest.mark.parametrize("weights", ["ternary", "float16", "TQ2_0"])
def test_all_that_belongs_to_a_linear_is_in_it(weights):
    """Both scales of a ternary matrix are one number here."""
    model = drawn("bitnet", weights, inner_norms=True)
    object.__setattr__(model.layers[0].attn_q, "bias", np.arange(256, dtype=np.float32))
    for layer, dense in zip(model.layers, dense_view(model).layers, strict=True):
        for name in MATRICES:
            linear, found = getattr(layer, name), getattr(dense, name)
            own = float(linear.weights.scale) if weights == "ternary" else 1.0
            assert found.scale == float(linear.scale) * own
            assert found.int8 == (weights != "float16")
            matrix = packing.unpack(linear.weights) if weights == "ternary" else widen.float32(linear.weights)
            for array, expected in ((found.matrix, matrix), (found.norm, linear.norm)):
                np.testing.assert_array_equal(array, expected)
            assert found.norm_eps == linear.norm_eps
            assert (found.bias is None) == (linear.bias is None)
    np.testing.assert_array_equal(dense_view(model).layers[0].attn_q.bias, np.arange(256))
