"""Attention scores and probabilities in a dump are judged like any other tensor."""

import numpy as np
import pytest
from dumps import recorded, trace, without_codes
from models import random_model

from bitnet_np import spec
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.points import SCORES, Key
from bitnet_np.traces.record import scores

T, LAYER = 11, 1
IDS = np.arange(T) * 7 % 50
KQ, SOFT_MAX = (Key(name, LAYER) for name in SCORES)
MODELS = {
    "llama": random_model(3, family="llama", n_layers=2, window=5, window_layers=(1,)),
    "gemma2": random_model(3, family="gemma2", n_layers=2),
}


def dump_of(family):
    """All tensors of a forward pass, with scores."""
    model = MODELS[family]
    points, c = without_codes(recorded(model, IDS)), model.config
    for n in range(c.n_layers):
        q, k = (points[Key(name, n)].reshape(T, -1, c.head_dim) for name in ("Qcur_rope", "Kcur_rope"))
        named = scores(q, k, window=c.window_of(n), scale=c.attention_scale, cap=c.score_cap)
        points |= {Key(name, n): values for name, values in named}
    return points


DUMPS = {family: dump_of(family) for family in MODELS}


def judged(family, points, **options):
    return judge_trace(MODELS[family], trace(points), IDS, **options)


def float32(family):
    """The scores of an engine that computes in float32, with hidden ones as its mask leaves them."""
    points, c = dict(DUMPS[family]), MODELS[family].config
    for n in range(c.n_layers):
        q, k = (points[Key(name, n)].reshape(T, -1, c.head_dim) for name in ("Qcur_rope", "Kcur_rope"))
        s = np.einsum("thk,shk->hts", q, spec.by_query_head(k, c.heads)) * np.float32(c.attention_scale or c.head_dim**-0.5)
        s = s if c.score_cap is None else np.float32(c.score_cap) * np.tanh(s / np.float32(c.score_cap))
        mask = spec.causal_mask(T, T, window=c.window_of(n)).astype(np.float32)
        e = np.exp(s + mask - (s + mask).max(axis=-1, keepdims=True))
        points |= {Key("kq", n): s + mask, Key("kq_soft_max", n): e / e.sum(axis=-1, keepdims=True)}
    return points


@pytest.mark.parametrize("family", MODELS)
def test_right_scores_are_the_same_bits_or_roundings(family):
    assert judged(family, DUMPS[family]).verdict == Verdict.SAME_BITS
    report = judged(family, float32(family))
    assert report.verdict == Verdict.ROUNDING
    assert {KQ, SOFT_MAX} <= {o.key for o in report.operations}


@pytest.mark.parametrize("size", [30, 1300])
def test_probabilities_below_float32_are_roundings(size):
    """Some are subnormal there, or 0; exactly they are neither."""
    points, normal = dict(DUMPS["llama"]), np.random.default_rng(0).standard_normal(DUMPS["llama"][KQ].shape)
    hidden = spec.causal_mask(T, T, window=5) < 0
    s = np.where(hidden, -np.inf, size * normal).astype(np.float32)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    points |= {KQ: s, SOFT_MAX: e / e.sum(axis=-1, keepdims=True)}
    verdicts = {o.key: o.verdict for o in judged("llama", points).operations}
    assert verdicts[SOFT_MAX] == Verdict.ROUNDING


def test_keys_behind_the_tokens_are_padding():
    points = DUMPS["llama"]
    padded = {key: np.pad(x, ((0, 0), (0, 0), (0, 5)), constant_values=9) if key.name in SCORES else x for key, x in points.items()}
    assert judged("llama", padded).verdict == Verdict.SAME_BITS


@pytest.mark.parametrize(
    ("key", "change", "says"),
    [
        (KQ, lambda x: 4 * x, "everything is 4 times what it should be"),
        (KQ, lambda x: x * np.float32(1 + 1e-4), "everything is 1.0001 times what it should be"),
        (KQ, lambda x: x[[1, 0, *range(2, len(x))]], " have the numbers of elements "),
        (SOFT_MAX, lambda x: 2 * x, "everything is 2 times what it should be"),
        (SOFT_MAX, lambda x: np.where(x == 0, x, x + np.float32(1e-4)), ""),
    ],
)
def test_wrong_scores_are_wrong_at_their_place(key, change, says):
    points = DUMPS["llama"] | {key: change(DUMPS["llama"][key]).astype(np.float32)}
    report = judged("llama", points)
    assert report.verdict == Verdict.WRONG
    assert report.first_wrong.key == key
    assert says in (report.first_wrong.hypothesis or "")


def test_probabilities_without_scores_are_judged_by_queries_and_keys():
    points = {key: x for key, x in DUMPS["llama"].items() if key.name != "kq"}
    assert judged("llama", points).verdict <= Verdict.ROUNDING
    points[SOFT_MAX] = points[SOFT_MAX] ** 2
    assert judged("llama", points).first_wrong.key == SOFT_MAX


def test_scores_that_are_no_scores_are_invalid():
    bad = DUMPS["llama"][KQ].copy()
    bad[0, 3, 2] = np.nan
    for wrong, says in ((bad, "nan at position 3"), (bad[:, :, :4], "its shape is"), (bad[:1], "its shape is")):
        report = judged("llama", DUMPS["llama"] | {KQ: wrong})
        assert report.verdict == Verdict.INVALID
        assert says in report.reason
