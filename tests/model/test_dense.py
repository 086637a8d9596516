"""The definition's view of a model: float64 tables and unpacked matrices, which the kernels refuse."""

import numpy as np
import pytest
from family_models import drawn
from gguf_models import CONFIG, TENSORS, bfloat16, floats

import bitnet_np as bn
from bitnet_np.base.errors import ShapeError
from bitnet_np.files.load import load
from bitnet_np.model import packing, widen
from bitnet_np.model.dense import dense_view
from bitnet_np.model.records import MATRICES
from bitnet_np.testing.models import random_model


def test_the_dense_form_is_what_the_file_says(write):
    model = dense_view(load(write(tensors={"token_embd.weight": bfloat16(table := floats(9, 128))})))
    assert model.token_embd.dtype == model.output_norm.dtype == np.float64
    np.testing.assert_array_equal(model.token_embd, widen.float32(bfloat16(table)))
    np.testing.assert_array_equal(model.layers[1].ffn_down.matrix, packing.unpack(TENSORS["blk.1.ffn_down.weight"]))
    assert model.layers[1].ffn_down.scale == float(TENSORS["blk.1.ffn_down.weight"].scale)
    assert model.config == CONFIG


MODEL = random_model(7, tied=False)


def test_dense_models_stay_what_the_definition_reads():
    assert dense_view(MODEL).token_embd.dtype == np.float64
    with pytest.raises(ShapeError, match="token_embd is float64"):
        bn.forward_full(dense_view(MODEL), [[1, 2, 3]])


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
