"""Token ids of a call: every path checks them, and their lengths, before it computes anything."""

from types import SimpleNamespace

import numpy as np
import pytest
from forward_paths import MODEL, PATHS, TOKENS, VOCAB
from models import assert_same_bits

from bitnet_np.base.errors import ContextLimitError, EmptyInputError, Error, ShapeError, TokenRangeError
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.engine.tokens import pad

WRONG_TOKENS = [
    (np.array(5), ShapeError, r"tokens has shape \(\), expected 2 axes"),
    ([1, 2, 3], ShapeError, r"tokens has shape \(3,\), expected 2 axes: a sequence is a row, as in \[\[1, 2, 3\]\]"),
    ("Once upon", ShapeError, "tokens is the text 'Once upon', expected token ids, as a tokenizer gives them"),
    ([[[1]]], ShapeError, r"tokens has shape \(1, 1, 1\), expected 2 axes"),
    ([[1, 2], [3]], ShapeError, "tokens is ragged, expected 2 axes; pad it and give the lengths"),
    ([[1.0, 2.0]], ShapeError, "tokens has dtype float64, expected integers"),
    ([[True, False]], ShapeError, "tokens has dtype bool, expected integers"),
    ([["1", "2"]], ShapeError, "tokens has dtype <U1, expected integers"),
    ([[None]], ShapeError, "tokens has dtype object, expected integers"),
    ([[1, -1]], TokenRangeError, "token -1 at position 1 of sequence 0 is not an id of the vocabulary, 0..49"),
    ([[0, 1], [2, VOCAB]], TokenRangeError, "token 50 at position 1 of sequence 1 is not an id of the vocabulary, 0..49"),
    (np.array([[-128]], np.int8), TokenRangeError, "token -128 at position 0"),
    (np.array([[2**63]], np.uint64), TokenRangeError, "tokens has the value 9223372036854775808"),
    (np.array([[2**63 - 1]], np.uint64), TokenRangeError, "token 9223372036854775807 at position 0"),
    ([[2**64]], TokenRangeError, "tokens has a value beyond 64 bits"),
    ([], EmptyInputError, "Empty batch provided"),
    (np.zeros((0, 3), np.int64), EmptyInputError, "Empty batch provided"),
    ([[]], EmptyInputError, "Tokens cannot be empty"),
    ([[], []], EmptyInputError, "Tokens cannot be empty"),
    ([[1] * 13], ContextLimitError, "sequence 0 would have 13 positions, the model's context is 12"),
]
WRONG_LENGTHS = [
    ([4, 0], EmptyInputError, "Tokens cannot be empty: sequence 1 of the batch has length 0"),
    ([-1, 4], EmptyInputError, "Tokens cannot be empty: sequence 0 of the batch has length -1"),
    ([4, 5], ShapeError, r"lengths\[1\] is 5, but tokens has shape \(2, 4\)"),
    ([4], ShapeError, r"lengths has shape \(1,\), expected \(2,\): one for each sequence"),
    ([4, 4, 4], ShapeError, r"lengths has shape \(3,\), expected \(2,\): one for each sequence"),
    (4, ShapeError, r"lengths has shape \(\), expected 1 axes"),
    ([[4, 4]], ShapeError, r"lengths has shape \(1, 2\), expected 1 axes"),
    ([4.0, 4.0], ShapeError, "lengths has dtype float64, expected integers"),
    ([[4], [4, 4]], ShapeError, "lengths is ragged"),
]


NOTHING = SimpleNamespace(device="cpu", exact_only=False, splits_rows=False)  # a backend without operations: nothing may be computed


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("tokens", "lengths", "error", "message"),
    [(tokens, None, *said) for tokens, *said in WRONG_TOKENS] + [(TOKENS, lengths, *said) for lengths, *said in WRONG_LENGTHS],
)
def test_wrong_tokens_and_lengths_are_refused_before_anything_is_computed(path, tokens, lengths, error, message):
    with pytest.raises(error, match=message) as raised:
        path(MODEL, tokens, lengths, ops=NOTHING)
    assert isinstance(raised.value, Error)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, ">i4"])
@pytest.mark.parametrize("path", PATHS)
def test_any_integers_are_tokens(path, dtype):
    expected = forward_full(MODEL, TOKENS)
    assert_same_bits(path(MODEL, TOKENS.astype(dtype)), expected)
    assert_same_bits(path(MODEL, np.asfortranarray(TOKENS.astype(dtype))), expected)
    assert_same_bits(path(MODEL, TOKENS.tolist(), [4, 4]), expected)


@pytest.mark.parametrize("path", PATHS)
def test_the_context_may_be_filled(path):
    assert path(MODEL, [[1] * 12]).shape == (1, 12, VOCAB)
    assert path(MODEL, [[1] * 13, [2] * 13], [12, 1]).shape == (2, 13, VOCAB)  # what is padding has no position


def test_pad():
    tokens, counts = pad([[5, 6, 7], [8], np.array([9, 1], np.uint16)])
    assert tokens.tolist() == [[5, 6, 7], [8, 0, 0], [9, 1, 0]]
    assert counts.tolist() == [3, 1, 2]
    assert tokens.dtype == counts.dtype == np.int64
    assert pad([[1, 2]])[0].tolist() == [[1, 2]]
    assert [array.shape for array in pad([])] == [(0, 0), (0,)]
    assert [array.shape for array in pad([[], []])] == [(2, 0), (2,)]
    for wrong in ([[1.5]], [[True]], [[[1]]]):
        with pytest.raises(ShapeError):
            pad(wrong)
