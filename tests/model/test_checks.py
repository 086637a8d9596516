"""A model whose arrays are not what its Config says is refused: kernels would read past their ends."""

from dataclasses import fields, replace

import numpy as np
import pytest

import bitnet_np as bn
from bitnet_np.base.errors import ShapeError
from bitnet_np.base.tensor_types import I2_S, Q8_0
from bitnet_np.files.gguf_writer import present
from bitnet_np.model.records import Blocks, Layer, Linear, Model
from bitnet_np.testing.models import random_model
from bitnet_np.training.gradients import loss_and_gradients, parameters_of

MODEL = random_model(7, tied=False)
TOKENS = [[1, 2, 3]]


def wrong(array):
    """Arrays that are not quite it, by what is wrong with them."""
    yield "short", array[:-1].copy()
    yield "empty", array[:0]
    yield "float64", array.astype(np.complex64 if array.dtype == np.float64 else np.float64)
    yield "byte order", array.astype(array.dtype.newbyteorder()) if array.dtype.itemsize > 1 else array.astype(np.uint16)
    yield "strided", np.repeat(array, 2, axis=-1)[..., ::2]
    yield "unaligned", np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)
    yield "one axis more", array[None]
    yield "list", array.tolist()
    yield "text", "abc"


def refused(model, name):
    for run in (lambda: bn.forward_full(model, TOKENS), lambda: bn.forward(model, TOKENS, bn.KVCache(MODEL.config, 1, 4))):
        with pytest.raises(ShapeError, match=rf"^the model's (layer \d+: )?{name}"):
            run()


def with_layer(**changes):
    return replace(MODEL, layers=(*MODEL.layers[:-1], replace(MODEL.layers[-1], **changes)))


@pytest.mark.parametrize("name", [f.name for f in fields(Model) if isinstance(getattr(MODEL, f.name), np.ndarray)])
def test_arrays_of_a_model_are_what_the_config_says(name):
    array = getattr(MODEL, name)
    for what, other in wrong(array):
        if what == "unaligned" and array.dtype.itemsize == 1:
            continue
        refused(replace(MODEL, **{name: other}), name)
    if name != "output":  # without it the head is tied
        refused(replace(MODEL, **{name: None}), name)


@pytest.mark.parametrize("name", [f.name for f in fields(Layer) if f.name in present(MODEL.layers[0])])
def test_arrays_of_a_layer_are_what_the_config_says(name):
    value = getattr(MODEL.layers[-1], name)
    if isinstance(value, np.ndarray):
        for _, other in wrong(value):
            refused(with_layer(**{name: other}), name)
        return
    ternary = value.weights
    n, m = ternary.shape
    for what, other in wrong(ternary.codes):
        if what != "unaligned":
            refused(with_layer(**{name: replace(value, weights=replace(ternary, codes=other))}), name)
    for shape in ((n, 2 * m), (2 * n, m), (m, n + 1), (-1, 5), (n, m, 1), None, ("a", 1)):
        refused(with_layer(**{name: replace(value, weights=replace(ternary, shape=shape))}), name)
    for weights in (np.ones((n + 1, m), np.float32), np.ones((n, m)), "abc", None, replace(ternary, scale="a")):
        refused(with_layer(**{name: replace(value, weights=weights)}), name)
    for part in ("bias", "norm"):
        refused(with_layer(**{name: replace(value, **{part: np.ones(3, np.float32)})}), rf"{name}\.{part}")
    for scale in (np.ones(2), 1.5, np.float64(1), "a"):  # another dtype would go on to the kernels
        refused(with_layer(**{name: replace(value, scale=scale)}), rf"{name}\.scale is .*, expected float32")
    refused(with_layer(**{name: replace(value, weights=replace(ternary, scale=1.5))}), rf"{name}\.scale is float, expected float32")
    refused(with_layer(**{name: None}), name)


def test_blocks_are_whole_and_of_a_type_that_is_known():
    n, m = MODEL.layers[0].attn_q.shape
    m = MODEL.config.width
    data = np.zeros((n, Q8_0.nbytes(m) if m % 32 == 0 else 34), np.uint8)
    for blocks in (Blocks(data[:, :-1].copy(), Q8_0, (n, m)), Blocks(data[:-1], Q8_0, (n, m)), Blocks(data, I2_S, (n, m))):
        refused(with_layer(attn_q=Linear(blocks)), "attn_q")


def test_layers_are_as_many_as_the_config_says_and_gated_as_it_says():
    for layers in (MODEL.layers[:-1], MODEL.layers * 2, (), None, list(MODEL.layers), (*MODEL.layers[:-1], "x")):
        refused(replace(MODEL, layers=layers), "layers are")
    refused(with_layer(ffn_gate=None), "ffn_gate is NoneType, but the activation is relu2")


def test_a_model_is_looked_at_once(monkeypatch):
    model = replace(MODEL)
    bn.forward_full(model, TOKENS)
    monkeypatch.setattr("bitnet_np.model.checks._flaws", lambda model: iter(["never asked again"]))
    bn.forward_full(model, TOKENS)
    with pytest.raises(ShapeError, match="never asked again"):
        bn.forward_full(replace(MODEL), TOKENS)


def test_ternary_parameters_are_looked_at_too():
    parameters = parameters_of(MODEL)
    name = "blk.0.ffn_up.weight"
    ternary = parameters[name]
    for other in (replace(ternary, codes=ternary.codes[:-64]), replace(ternary, codes=ternary.codes.astype(np.int16))):
        with pytest.raises(ShapeError, match=rf"^parameter {name}\.codes is "):
            loss_and_gradients(MODEL.config, {**parameters, name: other}, TOKENS)
