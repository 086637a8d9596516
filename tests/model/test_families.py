"""Families: files of every architecture are the models that were written, fused or split, and their traces are judged."""

import numpy as np
import pytest
from family_models import assert_refused, drawn
from models import assert_same_bits

from bitnet_np import Verdict, check
from bitnet_np.base.errors import UnsupportedError
from bitnet_np.engine.dialects import EXACT, LLAMA_CPP
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files.load import load
from bitnet_np.model import packing
from bitnet_np.model.families import ARCHITECTURES, FAMILIES
from bitnet_np.model.records import Linear
from bitnet_np.traces.points import SCORES
from bitnet_np.traces.record import record_trace

TOKENS = [[0, 22, 3, 3, 7, 1]]
TYPES = ["ternary", "float32", "float16", "bfloat16", "Q8_0", "Q4_K", "TQ2_0"]


def one_scale(model):
    """With ternary matrices of one scale in each layer's q, k and v, as a fused tensor has it."""
    for layer in model.layers:
        for name in ("attn_k", "attn_v"):
            old = getattr(layer, name)
            weights = packing.pack(packing.unpack(old.weights), layer.attn_q.weights.scale)
            object.__setattr__(layer, name, Linear(weights, old.bias, layer.attn_q.scale, old.norm, old.norm_eps))
    return model


@pytest.mark.usual(25)
@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("weights", TYPES)
def test_a_file_is_the_model_that_was_written_fused_or_split(written, family, weights):
    if FAMILIES[family].ternary and weights not in ("ternary", "TQ2_0"):
        assert_refused(written(drawn(family, weights)), UnsupportedError, "supported here: I2_S, TQ1_0, TQ2_0")
        return
    model = drawn(family, weights)
    model = one_scale(model) if weights == "ternary" else model
    if FAMILIES[family].scales:
        for layer in model.layers:  # a fused tensor has no scale of its own
            for name in ("attn_q", "attn_k", "attn_v"):
                old = getattr(layer, name)
                object.__setattr__(layer, name, Linear(old.weights, old.bias))
    split, fused = load(written(model, fused=False)), load(written(model, fused=True))
    assert split.config == fused.config == model.config
    for dialect in (EXACT, LLAMA_CPP):
        expected = forward_full(model, TOKENS, dialect=dialect)
        assert_same_bits(forward_full(split, TOKENS, dialect=dialect), expected)
        assert_same_bits(forward_full(fused, TOKENS, dialect=dialect), expected)


def test_a_scale_multiplies_the_product_before_the_bias():
    model = drawn("llama", "float32", n_layers=1)
    old = model.layers[0].attn_q
    object.__setattr__(model.layers[0], "attn_q", Linear(old.weights, old.bias, np.float32(2)))
    seen = {}
    forward_full(model, TOKENS, record=lambda name, n, array: seen.update({name: array.copy()}))
    expected = seen["attn_norm"].astype(np.float64) @ old.weights.T.astype(np.float64) * 2 + old.bias
    np.testing.assert_allclose(seen["Qcur"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_trace_has_the_names_that_the_judge_looks_for(tmp_path, family):
    """With scores, whose queries and keys are rotated in some families and layers only."""
    model = drawn(family)
    record_trace(model, TOKENS[0], tmp_path / "trace.npz", scores=True)
    report = check(model, TOKENS[0], tmp_path / "trace.npz")
    assert report.verdict is Verdict.SAME_BITS
    assert {(name, n) for name in SCORES for n in range(2)} <= {(o.key.name, o.key.layer) for o in report.operations}
