"""Tensors against what they must be: within a derived bound, or near by mean square errors where there is none."""

import numpy as np
import pytest

from bitnet_np import EXACT
from bitnet_np.judge.bounds import close, statistics, within
from bitnet_np.judge.law import graph
from bitnet_np.judge.law.expected import Expected, U
from bitnet_np.judge.measures import Reach
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key


@pytest.mark.parametrize(("base", "width"), [(5e5, 64), (7e4, 20), (1e4, 12)])
def test_float32_angles_are_honest(base, width):
    """With frequencies and angles in float32, as in transformers. Their error grows with the position, and its heads share it."""
    t = 400
    x = np.random.default_rng(0).standard_normal((t, 2 * width)).astype(np.float32)
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    angle = np.arange(t, dtype=np.float32)[:, None] * (np.float32(1) / np.float32(base) ** exponent)
    assert angle.dtype == np.float32
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = np.split(x.reshape(t, 2, width), 2, axis=-1)
    rotated = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(t, -1)
    model = random_model(0, rope_base=base, head_dim=width, heads=2, kv_heads=1, n_layers=1)
    operation = next(o for o in graph.operations(model, EXACT) if o.key == Key("Qcur_rope", 0))
    verdict, reason, _ = within(operation.evaluate(x.astype(np.float64)), rotated.astype(np.float64))
    assert verdict is Verdict.ROUNDING, reason


OUTSIDE = "1 at position 1, element 7, expected 1 +- 2.4e-07; wrong only at position 1 of 4, element 7 of 50"


@pytest.mark.parametrize(
    ("errors", "reach", "verdict", "reason"),
    [
        ((0.9, -0.9), 0.0, Verdict.ROUNDING, ""),
        ((0.9, 1.1), 0.0, Verdict.WRONG, OUTSIDE),
        ((0.9, 1.1), 1e-6, Verdict.FLIPS, "1 positions have roundings on the other side of a boundary"),
    ],
)
def test_an_element_is_within_its_bound(errors, reach, verdict, reason):
    """Four rounded terms: each element may be off by four roundings of half a unit, and by what flips reach.

    Ones, with errors at positions 0 and 1 in units of an element's bound.
    """
    value = np.ones((4, 50))
    theirs = value.copy()
    theirs[:2, 7] += np.array(errors) * 4 * U
    assert within(Expected(value, 4 * U, 4 * U**2, reach), theirs)[:2] == (verdict, reason)


def test_nearness_without_a_bound_is_by_mean_square_errors():
    value = np.random.default_rng(0).standard_normal((4, 50))
    for factor, verdict in ((1 + 1e-6, Verdict.ROUNDING), (1 + 1e-2, Verdict.FLIPS), (1.2, Verdict.WRONG)):
        assert close(value, factor * value)[0] is verdict
    one = value.copy()
    one[2] *= 1.2
    verdict, reason, ratio = close(value, one)
    assert (verdict, reason) == (Verdict.WRONG, "NMSE 0.04 at position 2, flipped codes and float16 reach 0.01")
    assert ratio == pytest.approx(2)  # the root of 0.04 / 0.01
    assert close(value, one, Reach(1e-2, np.full(4, 1e-2)))[0] is Verdict.FLIPS


def test_statistics_by_hand():
    value, theirs = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[3.0, 4.5], [0.0, -1.0]])
    judged = statistics(Key("l_out", 0), Verdict.WRONG, "a reason", (), 2.0, value, theirs)
    assert (judged.max_error, judged.worst, judged.bound_ratio) == (1.0, (1, 1), 2.0)
    assert judged.nmse == 1.25 / 25
    assert judged.scale == 27 / 25
    assert judged.cosine == pytest.approx(27 / (25 * 30.25) ** 0.5, rel=1e-15)
    assert judged.ulps == 1.0 / 2.0**-21  # a unit in the last place of 4
