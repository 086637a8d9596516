"""Mistakes that are tried across operations only: engines with one tensor changed, of which the outputs of layers are known."""

from functools import cache

import numpy as np
import pytest
from dumps import only, recorded
from models import random_model

from bitnet_np import spec
from bitnet_np.judge import tensors as judging
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.evidence import nearest_number
from bitnet_np.judge.mistakes import search
from bitnet_np.judge.mistakes.catalogue import HIDDEN
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model import widen
from bitnet_np.traces.points import Key

NAMED = (
    "edit.inputs", "edit.misread", "edit.masks", "edit.order", "edit.numbers",
)  # fmt: skip
IDS = np.array([5, 17, 3, 40, 8, 22, 9])
SHAPE = {"n_layers": 2, "width": 64, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 48, "tied": False}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Few mistakes are tried, as all take seconds."""
    tried = tuple(mistake for mistake in HIDDEN if mistake.id in NAMED)
    monkeypatch.setattr(search, "HIDDEN", tried)


@cache
def model(weights="Q8_0"):
    return random_model(0, family="qwen3", weights=weights, **SHAPE)


def dumped(change, layers=(0, 1), weights="Q8_0", ids=IDS):
    """The outputs of layers, and logits, of an engine whose tensors are change(name, tensor, tensors of the layer) in some layers."""
    here = {}

    def edit(name, layer, x):
        changed = change(name, x.reshape(len(x), -1).astype(np.float64), here) if layer is None or layer in layers else None
        x = x if changed is None else np.ascontiguousarray(changed, np.float32).reshape(x.shape)
        here[name] = x.reshape(len(x), -1).astype(np.float64)
        return x

    return only(recorded(model(weights), ids, edit=edit), "l_out", "result_output")


def said(change, **more):
    """What is said of the first wrong tensor."""
    report = judge_trace(model(more.get("weights", "Q8_0")), dumped(change, **more), IDS)
    assert report.verdict is Verdict.WRONG
    return report.first_wrong.hypothesis


def _prefix(name, x, here):
    if name == "kqv_out":
        i, j = np.arange(len(x))[:, None], np.arange(len(x))
        q, k, v = (here[n].reshape(len(x), -1, 16) for n in ("Qcur_rope", "Kcur_rope", "Vcur"))
        mask = np.where((j <= i) | (j < 3), 0.0, -np.inf)
        return spec.attend(q, spec.by_query_head(k, 4), spec.by_query_head(v, 4), mask).reshape(len(x), -1)
    return None


def _without_last_inputs(name, x, here):
    if name == "ffn_gate":
        matrix = widen.float32(model().layers[0].ffn_gate.weights)
        return here["ffn_norm"][:, :56] @ matrix[:, :56].T
    return None


def _unsigned(name, x, here):
    if name == "ffn_up":
        table = model().layers[0].ffn_up.weights
        raw = table.data.view(np.uint8).reshape(64, -1, 34)
        scale = np.ascontiguousarray(raw[..., :2]).view(np.float16).astype(np.float64)
        return here["ffn_norm"] @ (scale * raw[..., 2:]).reshape(64, 64).T
    return None


PLANTED = {
    "rows shifted": (
        lambda name, x, here: np.roll(x, 1, axis=1) if name == "Vcur" else None,
        "at kqv_out: elements of Vcur are shifted by one, the one before in the place of each",
    ),
    "tail": (_without_last_inputs, "at ffn_gate: the last 8 inputs are not summed"),
    "unsigned": (_unsigned, "at ffn_up: Q8_0: codes are read as unsigned bytes"),
    "prefix": (_prefix, "at kqv_out: the first 3 tokens are seen by all"),
    "temperature": (
        lambda name, x, here: x * 0.7 if name == "Qcur_rope" else None,
        "at kqv_out: the score scale is 0.175 instead of 0.25",
    ),
}


@pytest.mark.usual("rows shifted", "prefix")
@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_inside_the_first_layer_is_named_from_its_output(name):
    change, says = PLANTED[name]
    assert said(change, layers=(0,)).startswith(says)


@pytest.mark.usual(0)
def test_a_mistake_in_all_layers_with_a_window_is_named_from_their_end():
    """And in no other layer: the function that these share is at fault."""
    windowed = random_model(0, family="gemma2", window=5, **SHAPE | {"n_layers": 3, "tied": True})
    before = []  # the input of a layer

    def edit(name, layer, x):
        if name == "attn_norm" and windowed.config.window_of(layer):
            x = before[0].copy()
        if name in ("inp_scaled", "l_out"):
            before[:] = [x.copy()]
        return x

    ids = np.tile(IDS, 3)
    points = only(recorded(windowed, ids, edit=edit), "inp_embd", "result_output")
    report = judge_trace(windowed, points, ids)
    assert report.first_wrong.hypothesis == "at attn_norm of layers 0, 2: the norm is missing: its input comes out unchanged"


def test_what_explained_a_layer_is_tried_first_in_the_next(monkeypatch):
    change = PLANTED["rows shifted"][0]
    tried = []
    values = judging.TensorJudge.values
    monkeypatch.setattr(judging.TensorJudge, "values", lambda self, span, *more: tried.append(span[-1].key) or values(self, span, *more))
    monkeypatch.setattr(search.Search, "named", lambda self, *rest: None)  # which tries the whole catalogue each time
    report = judge_trace(model(), dumped(change), IDS)
    assert [o.hypothesis for o in report.operations if o.verdict is Verdict.WRONG] == [report.first_wrong.hypothesis] * 2
    assert tried.count(Key("l_out", 1)) < tried.count(Key("l_out", 0)) / 10


def test_what_is_not_tried_is_said(monkeypatch):
    monkeypatch.setattr(judging, "_HIDDEN_WORK", 0)
    report = judge_trace(model(), dumped(PLANTED["prefix"][0]), IDS)
    assert report.first_wrong.hypothesis is None
    assert any("known mistakes were not tried across operations" in note for note in report.notes)


def test_a_mistake_is_named_whatever_is_wrong_before(monkeypatch):
    """Random numbers in the first layer, which nothing explains, leave the last layer its share of the search."""
    change, says = PLANTED["rows shifted"]
    noise = np.random.default_rng(0).standard_normal((len(IDS), 64))

    def both(name, x, here):
        if "l_out" in here:  # from the second layer on
            return change(name, x, here)
        return noise if name == "l_out" else None

    monkeypatch.setattr(judging, "_HIDDEN_WORK", 5 * 10**9)  # less than all that is tried on one tensor
    for fault, layers, before in ((change, (1,), []), (both, (0, 1), [None])):
        report = judge_trace(model(), dumped(fault, layers), IDS)
        *others, named = [o.hypothesis for o in report.operations if o.verdict is Verdict.WRONG]
        assert others == before
        assert named.startswith(says)


def test_the_nearest_number_is_found_between_those_of_a_grid():
    assert nearest_number(lambda x: (np.log(x) - np.log(0.7)) ** 2, (0.01, 0.1, 1.0, 10.0), 40) == pytest.approx(0.7, rel=1e-6)
    assert nearest_number(lambda x: 1.0, (0.01, 0.1, 1.0, 10.0), 40, worth=0.5) is None
