"""Precision profiles: what is declared, and what is read off numbers."""

import numpy as np
import pytest

from bitnet_np.base.errors import OptionError
from bitnet_np.judge.precision import FLOAT32, PROFILES, Precision, storage_type
from bitnet_np.judge.roundings import to_bfloat16, to_float16

X = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)


def test_a_profile_is_read_from_text():
    assert Precision.parse("act=bf16, kv=Q8_0".replace("Q8", "q8")) == Precision(act="bfloat16", kv="q8_0")
    assert Precision.parse("kv=f16", Precision(act="bfloat16")) == Precision(act="bfloat16", kv="float16")
    assert Precision.parse("act=f32") == FLOAT32
    assert str(Precision(act="bfloat16", head="q6_K")) == "act=bfloat16, head=q6_K"
    assert str(FLOAT32) == "float32"


@pytest.mark.parametrize(
    "text", ["", "act", "act=", "act=bf17", "act=q8_0", "cache=f16", "act=f16,act=f16", "act=f16,,kv=f16", "head=q4_0"]
)
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(OptionError, match=r"precision|expected"):
        Precision.parse(text)


def test_every_profile_has_a_dialect_and_exact_is_strict():
    assert PROFILES["exact"].precision == FLOAT32
    assert PROFILES["transformers-bf16"].precision == Precision(act="bfloat16")
    assert PROFILES["llama.cpp"].precision is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_grid_shows_the_type(dtype):
    assert storage_type(X.astype(dtype)) == "float32"
    assert storage_type(to_bfloat16(X).astype(dtype)) == "bfloat16"
    assert storage_type(to_float16(X).astype(dtype)) == "float16"
    assert storage_type(X.astype(np.float16)) == "float16"


def test_one_number_off_the_grid_is_enough():
    x = to_bfloat16(X).astype(np.float32)
    x[4, 39] = X[4, 39]
    assert storage_type(x) == "float32"


def test_whole_numbers_and_few_numbers_show_nothing():
    assert storage_type(np.arange(200.0).reshape(2, 100)) == "float32"
    assert storage_type(np.zeros((4, 100), np.float32)) == "float32"
    assert storage_type(to_bfloat16(X[:, :6])) == "float32"
    assert storage_type(np.arange(200)) == "float32"


def test_what_is_not_finite_or_beyond_float16_is_no_float16():
    assert storage_type(np.where(X > 0, X, np.inf)) == "float32"
    assert storage_type(np.where(X > 2, 2.0**20, to_float16(X))) == "float32"
    assert storage_type(np.where(X > 2, 2.0**20, to_bfloat16(X))) == "bfloat16"
    assert storage_type(np.where(X > 2, np.nan, to_bfloat16(X))) == "float32"
