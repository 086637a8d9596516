"""Bounds of single operations."""

import numpy as np
import pytest

from bitnet_np import EXACT
from bitnet_np.judge import graph
from bitnet_np.judge.bounds import within
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing import random_model
from bitnet_np.traces.points import Key


@pytest.mark.parametrize(("base", "width"), [(5e5, 64), (7e4, 20), (1e4, 12)])
def test_float32_angles_are_honest(base, width):
    """As in transformers: frequencies and angles in float32, an error that all heads of a position share and that grows with it."""
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
