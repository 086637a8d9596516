"""Variants of our engine: each changes what it says, leaves the engine that it is made from alone, and computes as the kernels do."""

import numpy as np
import pytest
from models import assert_same_bits, random_model

from bitnet_np import BITNET_CPP, EXACT, forward_full
from bitnet_np.judge.variant import Variant, scaled, times, variant_logits
from bitnet_np.kernels import cpu

MODEL = random_model(0, family="bitnet", tied=False)
BASE = Variant("ours", MODEL, EXACT)
TOKENS = np.array([[1, 2, 3], [4, 5, 6]])


def test_a_variant_without_a_change_gives_our_logits():
    assert_same_bits(variant_logits(BASE, TOKENS), forward_full(MODEL, TOKENS))
    assert_same_bits(variant_logits(BASE, TOKENS, last_only=True), forward_full(MODEL, TOKENS, last_only=True))
    assert_same_bits(variant_logits(Variant("", MODEL, BITNET_CPP), TOKENS), forward_full(MODEL, TOKENS, dialect=BITNET_CPP))


CHANGES = {
    "operations": lambda base: base.with_operations(rope=lambda x, cos, sin: x),
    "config": lambda base: base.with_config(eps=0.1),
    "model": lambda base: base.with_model(output=None),
    "layers": lambda base: base.with_layers(lambda layer: MODEL.layers[0]),
    "field": lambda base: base.with_field("ffn_norm", lambda gain: np.float32(2) * gain),
    "scale": lambda base: scaled(base, "ffn_down", 1.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_in_the_variant_and_not_in_its_base(name):
    before = forward_full(MODEL, TOKENS)
    assert (variant_logits(CHANGES[name](BASE), TOKENS) != before).any()
    assert_same_bits(variant_logits(BASE, TOKENS), before)


def test_changes_add_up():
    both = CHANGES["config"](CHANGES["operations"](BASE))
    assert both.model.config.eps == 0.1
    assert both.ops.rope(1, 2, 3) == 1
    assert both.ops.attend is cpu.attend


def test_a_change_of_layers_or_fields_is_one_of_every_layer():
    assert all(layer is MODEL.layers[0] for layer in CHANGES["layers"](BASE).model.layers)
    for layer, old in zip(CHANGES["field"](BASE).model.layers, MODEL.layers, strict=True):
        np.testing.assert_array_equal(layer.ffn_norm, 2 * old.ffn_norm)
        assert layer.attn_norm is old.attn_norm


def test_an_edit_is_what_the_pass_goes_on_with():
    edit = Variant("", MODEL, EXACT, edit=lambda name, n, x: np.zeros_like(x) if name == "result_norm" else x)
    assert not variant_logits(edit, TOKENS).any()


def test_fields_that_a_family_lacks_are_not_present():
    assert BASE.present(("attn_q", "ffn_gate", "attn_q_norm", "attn_sub_norm")) == ["attn_q", "ffn_gate", "attn_sub_norm"]


def test_a_factor_multiplies_the_scale_of_a_product():
    for linear in (MODEL.layers[0].ffn_down, random_model(0).layers[0].ffn_down):
        before = 1.0 if linear.scale is None else float(linear.scale)
        assert times(linear, 1.5).scale == np.float32(1.5 * before)
        assert times(linear, 1.5).weights is linear.weights
    variant = scaled(BASE, "ffn_down", 1.5)
    assert variant.text == "ffn_down times 1.5"
    for layer, old in zip(variant.model.layers, MODEL.layers, strict=True):
        assert layer.ffn_down.scale == np.float32(1.5 * float(old.ffn_down.scale))
        assert layer.ffn_up is old.ffn_up
