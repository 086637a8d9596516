"""Differences that change nothing are said and looked through; what is wrong behind them is found."""

import numpy as np
import pytest
from dumps import LOGITS, recorded, trace, without_codes

from bitnet_np import EXACT, spec
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

IDS = np.random.default_rng(0).permutation(50)[:12]
MODELS = {family: random_model(3, family=family) for family in ("bitnet-b1.58", "llama", "qwen3")}
POINTS = {family: without_codes(recorded(model, IDS)) for family, model in MODELS.items()}
SIZE = 20  # of a head


def reordered(points, order, names=("Qcur", "Kcur")):
    """The dump with the elements of each head of queries and keys in another order."""
    wanted = tuple(name + end for name in names for end in ("", "_normed", "_rope"))
    heads = {k: x.reshape(len(x), -1, SIZE)[..., order].reshape(x.shape) for k, x in points.items() if k.name in wanted}
    return points | heads


def shifted(family, by, names=("Qcur", "Kcur")):
    """The dump with queries and keys rotated by later positions."""
    model, points = MODELS[family], dict(POINTS[family])
    factors = 1.0 if model.rope_factors is None else model.rope_factors
    angle = spec.angles(np.arange(len(IDS)) + by, model.config.rope_base, model.config.rope_pairs, factors)
    for key in [k for k in points if k.name in names]:
        source = Key(key.name + "_normed", key.layer) if Key(key.name + "_normed", key.layer) in points else key
        x = points[source].reshape(len(IDS), -1, SIZE).astype(np.float64)
        rotated = spec.rotate(x, angle, model.config.rope).reshape(len(IDS), -1)
        points[Key(key.name + "_rope", key.layer)] = rotated.astype(np.float32)
    return points


def judged(family, points):
    return judge_trace(MODELS[family], trace(points), IDS, EXACT)


HALVES_FROM_NEIGHBOURS = np.arange(SIZE).reshape(2, -1).T.reshape(-1)  # element i of theirs is this one of ours


@pytest.mark.parametrize(
    ("family", "order"),
    [
        ("bitnet-b1.58", HALVES_FROM_NEIGHBOURS),
        ("qwen3", HALVES_FROM_NEIGHBOURS),
        ("llama", np.argsort(HALVES_FROM_NEIGHBOURS)),
        ("llama", np.roll(np.arange(SIZE), 3)),
    ],
)
def test_queries_and_keys_in_another_order_are_no_fault(family, order):
    report = judged(family, reordered(POINTS[family], order))
    assert report.verdict <= Verdict.ROUNDING
    assert report.notes[0].startswith("a head's elements are in another order in queries and keys alike")


def test_queries_alone_in_another_order_are_wrong():
    report = judged("llama", reordered(POINTS["llama"], np.argsort(HALVES_FROM_NEIGHBOURS), ("Qcur",)))
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, Key("Qcur", 0))


def test_another_order_that_the_rotation_does_not_keep_is_wrong():
    """Queries and keys are permuted alike before they are rotated, by pairs in the other order."""
    points = reordered(POINTS["llama"], np.argsort(HALVES_FROM_NEIGHBOURS))
    turned = shifted("llama", 0)  # in our order
    points |= {key: turned[key] for key in points if key.name.endswith("_rope")}
    report = judged("llama", points)
    assert (report.verdict, report.first_wrong.key, report.notes) == (Verdict.WRONG, Key("Qcur", 0), ())


def test_a_fault_behind_another_order_is_found():
    points = reordered(POINTS["llama"], np.argsort(HALVES_FROM_NEIGHBOURS))
    points |= {Key("Kcur_rope", layer): points[Key("Kcur", layer)] for layer in range(2)}
    report = judged("llama", points)
    assert (report.first_wrong.key, report.first_wrong.mistake) == (Key("Kcur_rope", 0), "rope.missing")


@pytest.mark.parametrize(("family", "by"), [("bitnet-b1.58", 1), ("llama", 7), ("qwen3", 200)])
def test_later_positions_are_no_fault(family, by):
    report = judged(family, shifted(family, by))
    assert report.verdict <= Verdict.FLIPS
    assert f"positions are {by} to {by + 11}: that changes no score" in report.notes[0]


def test_later_positions_of_one_side_are_wrong():
    report = judged("llama", shifted("llama", 5, ("Kcur",)))
    assert (report.verdict, report.first_wrong.key.name) == (Verdict.WRONG, "Kcur_rope")


def test_what_is_wrong_before_an_invalid_tensor_is_named():
    points = dict(POINTS["llama"])
    points[Key("ffn_up", 0)] = -points[Key("ffn_up", 0)]
    points[Key("l_out", 1)] = np.full_like(points[Key("l_out", 1)], np.nan)
    report = judged("llama", points)
    assert (report.verdict, report.first_wrong.key, report.first_wrong.mistake) == (Verdict.WRONG, Key("ffn_up", 0), "any.sign")
    assert report.notes[-1].startswith("layer 1 l_out: it has nan")
    assert LOGITS not in [o.key for o in report.operations]
