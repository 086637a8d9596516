"""Tensors that an engine writes in 8 bits pass, whatever their format is, and mistakes in them do not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitnet_np import check
from bitnet_np.judge.law.levels import levels_of
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
    assert levels_of(value, slack, theirs) == (0 if is_coarse else count)
    place = np.unravel_index(int(np.abs(theirs).argmin()), theirs.shape)  # no end of the grid
    value[place] = theirs[place] + share * step
    assert levels_of(value, slack, theirs) == 0
