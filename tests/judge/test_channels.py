"""Channels of inputs: an error that follows them is a factor for each, and no noise."""

import re
from dataclasses import replace

import numpy as np
import pytest
from dumps import recorded, trace
from models import random_model

from bitnet_np import Verdict, check
from bitnet_np.judge.law.channels import wrong_channels
from bitnet_np.judge.law.roundings import to_digits


def int8(x, axis):
    scale = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.round(x / scale) * scale


def int4(x):
    scale = np.abs(x).max(axis=1, keepdims=True) / 7
    return np.round(x / scale) * scale


def smoothed(x, w, digits=None):
    """SmoothQuant: channels of inputs are divided by a factor that the weights get, then both are int8."""
    factor = np.sqrt(np.abs(x).max(axis=0) / np.abs(w).max(axis=0))  # of channels
    factor = factor if digits is None else to_digits(factor, digits)
    return int8(x / factor, 1), int8(w * factor, 1)


def fp4(x):
    scale = np.abs(x.reshape(len(x), -1, 16)).max(axis=2, keepdims=True) / 6
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    y = x.reshape(len(x), -1, 16) / scale
    return (np.sign(y) * grid[np.abs(np.abs(y)[..., None] - grid).argmin(axis=-1)] * scale).reshape(x.shape)


ROUNDINGS = {
    "weights in e4m3": lambda x, w: (x, to_digits(w, 4)),
    "inputs in e4m3": lambda x, w: (to_digits(x, 4), w),
    "weights in int8, by channel": lambda x, w: (x, int8(w, 0)),
    "inputs in int8, by channel": lambda x, w: (int8(x, 0), w),
    "inputs in int8, by token": lambda x, w: (int8(x, 1), w),
    "inputs in int4, by token": lambda x, w: (int4(x), w),
    "smoothed": smoothed,
    "smoothed by factors in bfloat16": lambda x, w: smoothed(x, w, 8),
    "FP4": lambda x, w: (fp4(x), fp4(w)),
    "inputs cut": lambda x, w: (np.trunc(x * 8) / 8, w),
}


def uneven(rng, tokens, rows, width):
    """Inputs whose channels differ in size, some by far, and weights."""
    return rng.standard_normal((tokens, width)) * rng.lognormal(0, 0.5, width), rng.standard_normal((rows, width)) / 8


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize(("tokens", "rows", "width"), [(40, 8, 64), (20, 96, 128), (64, 300, 256), (8, 600, 256), (1, 1200, 256)])
def test_a_rounding_does_not_follow_channels(tokens, rows, width, name):
    for seed in range(4):
        x, w = uneven(np.random.default_rng(seed), tokens, rows, width)
        inputs, narrow = ROUNDINGS[name](x, w)
        assert not wrong_channels(x, w, inputs @ narrow.T - x @ w.T)


@pytest.mark.parametrize("size", [0.02, 0.1, 0.5])
@pytest.mark.parametrize(("tokens", "rows", "width"), [(40, 8, 64), (20, 96, 128), (64, 300, 256)])
def test_factors_of_channels_are_said(tokens, rows, width, size):
    rng = np.random.default_rng(5)
    x, w = uneven(rng, tokens, rows, width)
    factor = rng.uniform(1 - size, 1 + size, width)
    error = (to_digits(x, 9) * factor) @ w.T - x @ w.T
    low = re.search(r"each has a factor, most of them (\S+) to", wrong_channels(x, w, error))
    assert float(low.group(1)) == pytest.approx(1 - 0.9 * size, abs=0.15 * size)


def test_inputs_that_are_much_alike_do_not_make_noise_follow_channels():
    """Attention's output for late tokens is nearly the same, and so is what rounds it."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x, w = uneven(rng, 40, 64, 64)
        x = rng.standard_normal(64) + 1e-4 * x
        assert not wrong_channels(x, w, to_digits(x, 4) @ w.T - x @ w.T)


def test_equal_inputs_count_once():
    """What rounds a single input is a factor for each channel."""
    x, w = uneven(np.random.default_rng(1), 7, 300, 64)
    repeated = np.tile(x, (6, 1))
    assert not wrong_channels(repeated, w, to_digits(repeated, 4) @ w.T - repeated @ w.T)


def test_too_few_numbers_say_nothing():
    x, w = uneven(np.random.default_rng(1), 10, 20, 64)
    assert not wrong_channels(x, w, (x * np.linspace(0.5, 1.5, 64)) @ w.T - x @ w.T)


READERS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")


@pytest.mark.parametrize("fields", [READERS, ("attn_q",), ("attn_output", "ffn_down", *READERS)], ids=["of norms", "of queries", "of all"])
def test_factors_of_channels_are_no_noise(fields):
    """The weights have the half of a smoothing that inputs should undo, and nothing does."""
    model = random_model(4, family="llama", weights="float32", n_layers=2)
    rng, ids = np.random.default_rng(2), np.arange(40) * 7 % model.config.vocab

    def smoothed(linear):
        factor = rng.uniform(0.92, 1.08, linear.weights.shape[1]).astype(np.float32)
        return replace(linear, weights=linear.weights * factor)

    layers = tuple(replace(layer, **{name: smoothed(getattr(layer, name)) for name in fields}) for layer in model.layers)
    assert check(model, ids, trace(recorded(replace(model, layers=layers), ids)), budget=0).verdict == Verdict.WRONG
