"""A mistake in some rows or heads alone, as of an engine whose prefill and decode are two kernels, is named with its place."""

import numpy as np
import pytest
from dumps import with_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from wrong_tensors import IDS, LAYER, LLAMA, POINTS, QUERY, C, T, by_weights, heads, judged, layer_points, scores_of, softmax, turned

from bitnet_np import spec
from bitnet_np.judge.precision import FLOAT32
from bitnet_np.judge.readings.wrong import places_of, runs
from bitnet_np.judge.trace import judge_trace
from bitnet_np.traces.points import Key

RIGHT = layer_points("llama")


IN_TURN = np.arange(C.heads) % C.kv_heads
WHOLE = {
    "Qcur_rope": (lambda: turned(-QUERY), "the rotation turns the other way"),
    "kqv_out": (
        lambda: by_weights(softmax(scores_of(k=heads("Kcur_rope")[:, IN_TURN])), heads("Vcur")[:, IN_TURN]),
        "key-value heads are dealt out in turn (h % G) instead of in groups",
    ),
    "ffn_out": (lambda: spec.ACTIVATIONS[C.activation](RIGHT["ffn_up"], RIGHT["ffn_gate"]), "ffn_up and ffn_gate are exchanged"),
}
"""Mistakes of a whole tensor: the wrong tensor, and the cause in words."""


@settings(max_examples=8)  # each has the whole search behind it
@given(rows=st.sets(st.integers(2, T - 1), min_size=9, max_size=T - 4), name=st.sampled_from(sorted(WHOLE)))
def test_mistake_in_some_rows_is_named_with_them(rows, name):
    wrong, words = WHOLE[name]
    rows = np.array(sorted(rows))
    mixed = RIGHT[name].copy()
    mixed[rows] = wrong()[rows]
    assert judged("llama", name, mixed) in (
        f"at {places_of(rows, T, 'position')}: {words}",
        f"at {runs('position', rows)}: {words}",
    )


@settings(max_examples=8)
@given(head=st.integers(0, C.heads - 1), rows=st.sets(st.integers(2, T - 1), min_size=2, max_size=T - 4))
def test_mistake_in_a_head_of_some_rows_is_named_with_both(head, rows):
    rows = np.array(sorted(rows))
    mixed = heads("Qcur_rope")
    mixed[rows, head] = turned(-QUERY).reshape(mixed.shape)[rows, head]
    said = judged("llama", "Qcur_rope", mixed.reshape(T, -1))
    assert said == f"at {places_of(rows, T, 'position')} and head {head} of {C.heads}: the rotation turns the other way"


@pytest.mark.parametrize("rows", [[3], [0, 5, 9]])
def test_random_numbers_in_some_rows_have_no_cause(rows):
    mixed = RIGHT["kqv_out"].copy()
    mixed[rows] = np.random.default_rng(0).standard_normal((len(rows), mixed.shape[1])) * np.abs(mixed).mean()
    said = judged("llama", "kqv_out", mixed)
    assert not said.startswith("at "), said


def test_parts_of_each_head_written_over_others_are_named():
    mixed = heads("kqv_out")
    half = C.head_dim // 2
    mixed[12:, :, :half], mixed[12:, :, half:] = mixed[12:, :, half:].copy(), 0
    said = judged("llama", "kqv_out", mixed.reshape(T, -1))
    assert said.startswith(f"at positions 12 to {T - 1}: elements 0 to {half - 1},")
    assert "have the numbers of elements 12 to 23" in said
    assert said.endswith("are 0")


def test_largest_number_of_float16_is_named_where_numbers_are_clipped_to_it():
    value = RIGHT["ffn_out"]
    scale = 65504.0 / np.sort(np.abs(value).ravel())[-50]
    key = Key("ffn_out", LAYER)
    up = POINTS["llama"] | {Key("ffn_up", LAYER): (POINTS["llama"][Key("ffn_up", LAYER)] * scale).astype(np.float32)}
    clipped = np.clip(value * scale, -65504.0, 65504.0)
    report = judge_trace(LLAMA, with_tensor(up, key, clipped), IDS["llama"], precision=FLOAT32)
    found = {verdict.key: verdict for verdict in report.operations}[key]
    assert found.hypothesis == "the result is clipped beyond 65504"
