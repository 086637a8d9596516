"""The records of a model: a Config that no model has is refused."""

from dataclasses import replace

import numpy as np
import pytest

from bitnet_np.base.errors import ShapeError, UnsupportedError
from bitnet_np.model.records import Config, LongRope
from bitnet_np.testing.models import random_model


@pytest.mark.parametrize("layers", ["abc", 1.5, -1, [0], (2,), (-1,), ("a",), np.array([0])], ids=repr)
def test_windows_are_of_layers_that_are_there(layers):
    with pytest.raises(ShapeError, match="window_layers are "):
        replace(random_model(7).config, window=3, window_layers=layers)


LONGROPE = LongRope(16, (1.0,) * 10, (2.0,) * 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"norm": "batch"}, "norm is 'batch'"),
        ({"rope": "thirds"}, "rope is 'thirds'"),
        ({"rope_width": 3}, "3 numbers of each head"),
        ({"rope": "none", "rope_width": 2}, "2 numbers of each head"),
        ({"rope_scaling": 0.0}, "rope_scaling is 0.0"),
        ({"longrope": LongRope(16, (1.0,) * 9, (1.0,) * 10)}, "LongRoPE's short list has 9 factors, expected 10"),
        ({"longrope": LONGROPE, "rope_scaling": 2.0}, "LongRoPE in a model with rope 'halves' that is also scaled in another way"),
        ({"longrope": LONGROPE, "local_rope_base": 1.0}, "local_rope_base is 1.0 in a model with YaRN or LongRoPE"),
        ({"shared_norm": True}, "shared_norm is True without parallel_residual"),
        ({"local_layers": (0,), "rope": "none"}, r"local_layers are \(0,\) with rope 'none', expected RoPE"),
        ({"local_layers": (1,), "local_rope_base": 100.0}, r"local_layers are \(1,\), expected numbers of 1 layers"),
    ],
)
def test_configs_that_no_model_has(changes, message):
    with pytest.raises((ShapeError, UnsupportedError), match=message):
        Config("llama", 9, 64, 40, 1, 64, 2, 1, 20, 1e-5, 10000.0, **changes)


def test_an_odd_head_needs_no_pairs_where_nothing_is_rotated():
    assert Config("gpt2", 9, 64, 40, 1, 64, 2, 2, 21, 1e-5, 10000.0, rope="none").rope_pairs == 0


@pytest.mark.parametrize("family", ["bitnet", "llama", "qwen2", "gpt2"])
def test_reprs_name_types_and_shapes_and_hold_no_numbers(family):
    model = random_model(3, family=family)
    assert repr(model).startswith(f"Model({model.config.architecture}: {model.config.n_layers} layers, width {model.config.width}, ")
    layer = model.layers[0]
    for record in (model, layer, layer.attn_q, layer.attn_q.weights):
        if not isinstance(record, np.ndarray):
            assert len(repr(record)) < 300
            assert "array" not in repr(record)
    assert str(list(layer.attn_q.shape)) in repr(layer.attn_q)
