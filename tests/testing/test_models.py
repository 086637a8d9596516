"""Random models: the same for the same seed, and with nothing in them that does not matter."""

import random

import numpy as np
import pytest
from family_models import drawn

from bitnet_np.base.errors import Error
from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES
from bitnet_np.model import packing, widen
from bitnet_np.model.dense import dense_view
from bitnet_np.model.families import ARCHITECTURES, FAMILIES, layer_shapes
from bitnet_np.model.records import Linear, Ternary
from bitnet_np.testing.models import SHAPE, random_model, random_table, vocabulary


def arrays(record):
    """All arrays of the definition's view, by field."""
    for name, value in vars(record).items():
        if isinstance(value, np.ndarray):
            yield name, value
        elif name == "layers":
            for layer in value:
                yield from arrays(layer)
        elif hasattr(value, "matrix"):
            yield name, value.matrix


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_seed_is_a_model(family):
    one, same, other = (dense_view(random_model(seed, family=family)) for seed in (5, 5, 6))
    for (name, a), (_, b), (_, c) in zip(arrays(one), arrays(same), arrays(other), strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any() or name.endswith("rope_frequency")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_it_has_all_that_its_family_may_have(family):
    model, traits = random_model(1, family=family, tied=False), FAMILIES[family]
    assert model.config == random_model(2, family=family).config
    assert {**SHAPE, **traits.config}.items() <= vars(model.config).items()
    assert (model.output_bias is not None) == traits.head_bias
    assert (model.position_embd is not None) == traits.positions
    assert (model.rope_factors is not None) == traits.rope_factors
    assert model.output is not None
    for layer in model.layers:
        linears = {name: value for name, value in vars(layer).items() if isinstance(value, Linear)}
        assert set(linears) == {name for name, shape in layer_shapes(model.config).items() if len(shape) == 2}
        assert len(layer.experts) == model.config.experts
        for name, linear in linears.items():
            assert (linear.bias is not None) == (name in traits.biases + traits.optional_biases)
            assert (linear.scale is not None) == traits.scales
            assert isinstance(linear.weights, Ternary) == traits.ternary


def test_no_row_is_zero_and_no_scale_is_twice():
    model = random_model(3, width=2, ffn=3, head_dim=2)  # a row of two is zero by chance one time in eleven
    ternary = [getattr(layer, name).weights for layer in model.layers for name in FAMILIES["bitnet-b1.58"].matrices]
    assert all(packing.unpack(weights).any(axis=1).all() for weights in ternary)
    assert len({float(weights.scale) for weights in ternary}) == len(ternary)


def test_gain_multiplies_scales_alone():
    plain, loud = random_model(4), random_model(4, gain=2.0)
    for a, b in zip(plain.layers, loud.layers, strict=True):
        assert b.attn_q.weights.scale == 2 * a.attn_q.weights.scale
        np.testing.assert_array_equal(a.attn_q.weights.codes, b.attn_q.weights.codes)
        np.testing.assert_array_equal(a.attn_norm, b.attn_norm)


def test_inner_norms_are_norms_of_inputs():
    for layer in drawn("llama", inner_norms=True).layers:
        for name in FAMILIES["llama"].matrices:
            linear = getattr(layer, name)
            assert linear.norm.shape == (linear.shape[1],)
            assert linear.norm_eps == 1e-6


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", *(kind.name for kind in ALL_BLOCK_TYPES)])
def test_tables_have_the_spread_that_is_asked_for(kind):
    wide = widen.float32(random_table(np.random.default_rng(0), kind, 40, 1024, 0.25))
    assert wide.shape == (40, 1024)
    assert 0.2 < wide.std() < 0.3
    assert abs(wide.mean()) < 0.02


def test_arguments_that_are_no_models_are_errors_of_ours():
    """Drawn at random; whichever raises nothing is a model."""
    rng, made = random.Random(1), 0
    sizes = [0, -1, 1, 2, 3, 5, 16, 33, 64, 1.5, "x", None, []]
    for _ in range(300):
        names = [*SHAPE, "experts", "experts_used", "shared_ffn", "nothing"]
        shape = {name: rng.choice(sizes) for name in rng.sample(names, rng.choice([0, 1, 2]))}
        family = rng.choice([*FAMILIES] * 3 + ["nothing", None, []])
        table, weights = (rng.choice(["float32"] * 6 + [first, "bfloat16", "Q8_0", "Q4_K", "nothing", 1, []]) for first in ("float16", ""))
        try:
            random_model(rng.choice([0, 1, 1, 1, -1, None]), family=family, table=table, weights=weights, **shape)
            made += 1
        except Error:
            pass
    assert made > 20


@pytest.mark.parametrize("size", [40, 300])
def test_every_token_of_a_small_vocabulary_is_whole_characters(size):
    """llama-server holds back a token that ends within a character, and has no log-probabilities of it."""
    tokens = vocabulary(size)["tokenizer.ggml.tokens"]
    texts = [bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.encode() for token in tokens]
    assert len({*tokens}) == size == len([text.decode() for text in texts])
