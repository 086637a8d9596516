"""Codes of blocks: an error that follows them is a wrong table, and no noise."""

import re

import numpy as np
import pytest

from bitnet_np import Verdict, check
from bitnet_np.base.block_formats import FORMATS
from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, GRID_TYPES, IQ1_M
from bitnet_np.judge.law.codes import codes_of, wrong_codes
from bitnet_np.judge.law.products import rows_of
from bitnet_np.judge.mistakes.search import Search
from bitnet_np.testing.models import random_model, random_table
from bitnet_np.traces.points import Trace
from scripts.judging.policies import Dense

TYPES = [kind for kind in ALL_BLOCK_TYPES if kind.name in FORMATS or kind in GRID_TYPES]


def digits(x, count):
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 2**count) / 2**count, exponent)


def int8_rows(x):
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    return np.round(x / scale) * scale


ROUNDINGS = {
    "weights in bfloat16": lambda x, w: (x, digits(w, 8)),
    "both in bfloat16": lambda x, w: (digits(x, 8), digits(w, 8)),
    "weights in e4m3": lambda x, w: (x, digits(w, 4)),
    "inputs in e4m3": lambda x, w: (digits(x, 4), w),
    "weights in int8, by row": lambda x, w: (x, int8_rows(w)),
    "inputs in int8, by row": lambda x, w: (int8_rows(x), w),
}


def product(kind, seed):
    rng = np.random.default_rng(seed)
    width = 2 * max(kind.block, 64)
    table = random_table(rng, kind.name, 96, width, 0.1)
    return rng.standard_normal((64, width)), table, rows_of(table, np.arange(96))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_a_rounding_does_not_follow_codes(kind):
    for seed in range(3):
        x, table, weights = product(kind, seed)
        for name, rounded in ROUNDINGS.items():
            inputs, narrow = rounded(x, weights)
            assert not wrong_codes(x, table, inputs @ narrow.T - x @ weights.T), name


@pytest.mark.parametrize(("kind", "part"), [("Q4_0", 0.5), ("Q5_1", 0.5), ("Q8_0", 0.7)])
def test_codes_that_are_clipped_are_told(kind, part):
    x, table, _ = product(next(one for one in TYPES if one.name == kind), 1)
    codes = codes_of(table, np.arange(96))
    top = codes.values[int(part * len(codes.values))]
    more = codes.units * (np.minimum(codes.values, top) - codes.values)[codes.which]
    assert wrong_codes(x, table, x @ more.T) == f"{kind}: codes above {top:.6g} count as {top:.6g}"


FEW = ["TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "PQ2_0"]
"""Types with so few codes that a wrong one is nearly a factor of all weights."""


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind.name not in FEW and kind is not IQ1_M], ids=lambda kind: kind.name)
def test_a_wrong_code_is_named(kind):
    x, table, weights = product(kind, 5)
    codes = codes_of(table, np.arange(96))
    often = np.argsort(-np.bincount(codes.which.ravel()))[:4]
    code = often[np.abs(codes.values[often]).argmax()]
    wrong = weights + np.where(codes.which == code, 0.7 * codes.units, 0)
    text = wrong_codes(x, table, x @ wrong.T - x @ weights.T)
    right, counted = map(float, re.search(r"table: (\S+) counts as (\S+)$", text).groups())
    assert right == pytest.approx(codes.values[code], rel=1e-5)
    assert counted == pytest.approx(right + 0.7, rel=1e-4)


class WrongTable(Dense):
    """An engine whose most frequent large code counts a quarter more."""

    def matrix(self, linear):
        table, weights = linear.weights, super().matrix(linear)
        codes = codes_of(table, np.arange(len(weights)))
        code = codes.values.searchsorted(np.quantile(codes.values[codes.which], 0.8))
        return weights + np.where(codes.which == code, 0.25 * codes.values[code] * codes.units, 0).astype(np.float32)


@pytest.mark.usual(1)
@pytest.mark.parametrize("kind", ["MXFP4", "IQ3_S", "Q5_0"])
def test_a_wrong_table_in_all_matrices_is_no_noise(kind, monkeypatch):
    """It has no place, and all products are off alike."""
    for kind_of_cause in ("named", "hidden", "nearly"):  # none of them explains it, and to try them all takes seconds
        monkeypatch.setattr(Search, kind_of_cause, lambda *_, **__: None)
    width = 256 if kind == "IQ3_S" else 64
    shape = {"heads": 2, "kv_heads": 2, "head_dim": width // 2, "width": width, "ffn": width, "vocab": 96}
    model = random_model(1, family="qwen2", weights=kind, n_layers=3, **shape)
    ids = np.random.default_rng(0).integers(0, 96, 40)
    report = check(model, ids, Trace(WrongTable(model, ids).run(), None, "dump"), budget=0.5)
    assert report.verdict == Verdict.WRONG
    assert re.search(f"{kind}: .* follows the codes of the weights, as in a wrong table: ", report.reason)
