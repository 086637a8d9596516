"""Tensors that an engine writes in 8 bits pass, whatever their format is, and mistakes in them do not."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitnet_np import check
from bitnet_np.judge.law.levels import stored_as
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key, Trace
from scripts.judging.policies import Dense, affine, scaled

MODEL = random_model(1, family="qwen2", n_layers=2, width=64, heads=2, kv_heads=1, head_dim=32, ffn=96, vocab=96)
IDS = np.random.default_rng(0).integers(0, MODEL.config.vocab, 40)
STORED = ("attn_norm", "ffn_norm", "ffn_out", "kqv_out")
FORMATS = {
    "e4m3 by tensor": scaled("e4m3", None),
    "e5m2 by tensor": scaled("e5m2", None),
    "e4m3 by row": scaled("e4m3"),
    "int8 by tensor": scaled("int8", None),
    "int8 by row": scaled("int8"),
    "8 bits with a zero point": affine(8, None),
}


class Storing(Dense):
    """An engine that writes some tensors in a format, and with a factor in one element."""

    def __init__(self, stored, factor=1.0):
        super().__init__(MODEL, IDS)
        self.stored, self.factor = stored, np.ones(96, np.float32)
        self.factor[3] = factor

    def step(self, name, n, compute):
        def written():
            x = compute()
            return self.stored(x * self.factor[: x.shape[1]]) if name in STORED else x

        super().step(name, n, written)


def judged(stored, factor=1.0, **how):
    return check(MODEL, IDS, Trace(Storing(stored, factor).run(), None, "dump"), budget=0.0, **how)


@pytest.mark.parametrize("kind", FORMATS)
def test_tensors_in_8_bits_pass_and_no_factor_of_an_element_does(kind):
    report = judged(FORMATS[kind])
    assert report.verdict == Verdict.NARROW, report.reason
    norm = next(o for o in report.operations if o.key == Key("attn_norm", 0))
    assert norm.hypothesis.startswith("numbers are stored in 8 bits or fewer: each is the nearest of ")
    assert "exp=" not in "".join(report.notes)  # functions are right: nothing of theirs is to be declared
    assert judged(FORMATS[kind], strict=True).verdict == Verdict.WRONG
    assert judged(FORMATS[kind], 1.5).verdict == Verdict.WRONG


@given(st.integers(0, 2**32 - 1), st.integers(3, 200), st.floats(0.51, 0.9))
def test_each_number_is_the_nearest_one(seed, levels, share):
    random = np.random.default_rng(seed)
    value = random.uniform(-1, 1, (40, 64))
    step = 2 / (levels - 1)
    theirs = np.rint((value + 1) / step) * step - 1
    count, slack = np.unique(theirs).size, np.zeros(value.shape)
    is_coarse = ((theirs - value) ** 2).sum() > (value**2).sum() / 64
    text = f"numbers are stored in 8 bits or fewer: each is the nearest of {count}"
    assert stored_as(value, slack, theirs) == ("" if is_coarse else text)
    place = np.unravel_index(int(np.abs(theirs).argmin()), theirs.shape)  # no end of the grid
    value[place] = theirs[place] + share * step
    assert stored_as(value, slack, theirs) == ""


def in_blocks(x, size, digits):
    """Numbers of blocks that share an exponent, with so many binary digits."""
    blocks = x.reshape(-1, size).astype(np.float64)
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(blocks).max(axis=1, keepdims=True), 1e-30))) + 1 - digits)
    return (np.clip(np.rint(blocks / step), 1 - 2**digits, 2**digits - 1) * step).reshape(x.shape).astype(np.float32)


@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 16, 32, 64]), st.integers(4, 8))
def test_blocks_share_an_exponent(seed, size, digits):
    value = np.random.default_rng(seed).standard_normal((40, 64))
    theirs, slack = in_blocks(value, size, digits).astype(np.float64), np.zeros(value.shape)
    assert (
        stored_as(value, slack, theirs) == f"numbers are stored in blocks of {size} that share an exponent, with {digits} bits and a sign"
    )
    value[7, 9] += 2 * np.abs(value).max() * 2.0**-digits
    assert stored_as(value, slack, theirs) == ""


def test_tensors_in_blocks_pass_and_no_factor_of_an_element_does():
    stored = partial(in_blocks, size=16, digits=7)
    report = judged(stored)
    assert report.verdict == Verdict.NARROW, report.reason
    norm = next(o for o in report.operations if o.key == Key("attn_norm", 0))
    assert norm.hypothesis == "numbers are stored in blocks of 16 that share an exponent, with 7 bits and a sign"
    assert judged(stored, 1.5).verdict == Verdict.WRONG
