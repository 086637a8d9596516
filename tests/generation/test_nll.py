"""Negative log-likelihood: against its definition, and the same bits whichever way the logits come."""

import numpy as np
import pytest

from bitnet_np import forward_full
from bitnet_np.base.errors import ContextLimitError, OptionError, ShapeError, TokenRangeError
from bitnet_np.generation.nll import nll_of, token_nll
from bitnet_np.testing.models import random_model

MODEL = random_model(3, context=40)
TOKENS = np.random.default_rng(3).integers(0, MODEL.config.vocab, 100)


def by_definition(tokens):
    logits = forward_full(MODEL, tokens[None])[0].astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return -np.log(p[np.arange(len(tokens) - 1), tokens[1:]])


@pytest.mark.parametrize("length", [2, 3, 39, 40])
def test_definition(length):
    np.testing.assert_allclose(token_nll(MODEL, TOKENS[:length]), by_definition(TOKENS[:length]), rtol=1e-12, atol=1e-15)  # a log near 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_no_bit_and_progress_ends_at_the_end(chunk):
    seen = []
    values = token_nll(MODEL, TOKENS, chunk=chunk, progress=lambda done, total: seen.append((done, total)))
    np.testing.assert_array_equal(values, token_nll(MODEL, TOKENS, chunk=40))
    assert seen[-1] == (99, 99)


@pytest.mark.parametrize("stride", [1, 13, 20, 39])
def test_windows(stride):
    """Each token is judged with the tokens of the first window that has it before it."""
    found = token_nll(MODEL, TOKENS, stride=stride)
    expected = np.full(99, np.nan)
    begin = 0
    while np.isnan(expected).any():
        window = TOKENS[begin : begin + 40]
        for i, value in enumerate(by_definition(window)):
            if np.isnan(expected[begin + i]):
                expected[begin + i] = value
        begin += stride
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("tokens", "options", "error"),
    [
        ([1], {}, ShapeError),
        ([[1, 2]], {}, ShapeError),
        ([1, 50], {}, TokenRangeError),
        *((TOKENS, options, OptionError) for options in ({"stride": 0}, {"stride": 40}, {"chunk": 0})),
        (TOKENS, {"model": random_model(3, context=1)}, ContextLimitError),  # one token predicts nothing
    ],
)
def test_refusals(tokens, options, error):
    with pytest.raises(error):
        token_nll(**{"model": MODEL, "tokens": tokens, **options})


def test_a_certain_token_takes_no_nats():
    assert nll_of(np.array([[0, -2000]], np.float32), np.array([0])).tobytes() == bytes(8)  # 0, not -0
