"""Precision profiles: what is declared, and what is read off numbers."""

from itertools import count

import numpy as np
import pytest

from bitnet_np.base.errors import OptionError
from bitnet_np.judge.law.precision import FLOAT32, Precision, storage_type
from bitnet_np.judge.law.roundings import to_bfloat16, to_float16

X = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)


def test_a_profile_is_read_from_text():
    assert Precision.parse("act=bf16, kv=Q8_0".replace("Q8", "q8")) == Precision(act="bfloat16", kv="q8_0")
    assert Precision.parse("kv=f16", Precision(act="bfloat16")) == Precision(act="bfloat16", kv="float16")
    assert Precision.parse("act=f32") == FLOAT32
    assert str(Precision(act="bfloat16", head="q6_K")) == "act=bfloat16, head=q6_K"
    assert str(FLOAT32) == "float32"
    inside = Precision(mul="e4m3:row", exp=1e-4, noise=2.0**-6)
    assert str(inside) == "mul=e4m3:row, exp=0.0001, noise=2^-6"
    assert Precision.parse(str(inside)) == Precision.parse("mul=E4M3:row,exp=1e-4,noise=2^-6") == inside


@pytest.mark.parametrize(
    "text",
    ["", "act", "act=", "act=bf17", "act=q8_0", "cache=f16", "act=f16,act=f16", "act=f16,,kv=f16", "head=q5_0", "mul=int8:0", "exp=a"],
)
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(OptionError, match=r"precision|expected"):
        Precision.parse(text)


BF16, F16 = to_bfloat16(X), to_float16(X)
ONE_OFF = np.where(np.arange(X.size).reshape(X.shape) == 150, X, BF16.astype(np.float32))


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        *((values.astype(dtype), kind) for dtype in (np.float32, np.float64) for values, kind in ((X, "float32"), (BF16, "bfloat16"))),
        *((F16.astype(dtype), "float16") for dtype in (np.float16, np.float32, np.float64)),
        (ONE_OFF, "float32"),  # one number off the grid is enough
        (np.arange(200.0).reshape(2, 100), "float32"),  # whole numbers and few numbers show nothing
        (np.zeros((4, 100), np.float32), "float32"),
        (BF16[:, :6], "float32"),
        (np.arange(200), "float32"),
        (np.where(X > 0, X, np.inf), "float32"),
        (np.where(X > 2, np.nan, BF16), "float32"),
        (np.where(X > 2, 2.0**20, F16), "float32"),  # beyond float16
        (np.where(X > 2, 2.0**20, BF16), "bfloat16"),
    ],
    ids=count(),
)
def test_the_grid_shows_the_type(x, kind):
    assert storage_type(x) == kind
