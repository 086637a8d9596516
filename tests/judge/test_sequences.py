"""Several sequences in one dump: each has the verdict that it has alone, in any layout of the dump."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from dumps import recorded
from hypothesis import given, settings
from hypothesis import strategies as st

import bitnet_np as bn
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import random_model
from bitnet_np.traces.formats.arrays import Batch, Labelled
from bitnet_np.traces.points import Entry

SMALL = random_model(3, family="llama", n_layers=1, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96)
IDS = np.random.default_rng(0).integers(0, SMALL.config.vocab, (3, 9))


@cache
def points(b, length):
    """The tensors of one sequence, by label."""
    return {str(key): array for key, array in recorded(SMALL, IDS[b, :length]).items()}


LABELS = [label for label in points(0, 9) if label not in ("result_output", "result_norm")]


def laid_out(layout, lengths, change):
    """The tensors of some sequences in a layout, each array as `change(b, label, array)` makes it. Padding is no number."""

    def padded(array):
        rows = [(0, max(lengths) - len(array)), *[(0, 0)] * (array.ndim - 1)]
        return np.pad(array, [r[::-1] for r in rows] if "left" in layout else rows, constant_values=np.nan)

    every = {label: [change(b, label, points(b, n)[label]) for b, n in enumerate(lengths)] for label in points(0, lengths[0])}
    if layout == "end to end":
        return {label: np.concatenate(x) for label, x in every.items()}
    stacked = {label: np.stack(list(map(padded, x))) for label, x in every.items()}
    return {label: x.reshape(-1, *x.shape[2:]) if "rows" in layout and x.ndim == 3 else x for label, x in stacked.items()}


@settings(max_examples=25, deadline=None)
@given(
    layout=st.sampled_from(["left", "right", "left, as rows", "right, as rows", "end to end"]),
    lengths=st.lists(st.integers(2, 9), min_size=3, max_size=3),
    label=st.sampled_from(LABELS),
    wrong=st.integers(0, 2),
    invalid=st.none() | st.integers(0, 2),
)
def test_each_sequence_has_its_own_verdict(layout, lengths, label, wrong, invalid):
    """A tensor of one sequence is wrong and all numbers of another are zero: neither hides the other, and the rest is right."""
    invalid = None if invalid == wrong else invalid

    def change(b, name, array):
        return array * np.float32(0 if b == invalid else 3 if (b, name) == (wrong, label) else 1)

    report = bn.check(SMALL, [row[:n].tolist() for row, n in zip(IDS, lengths, strict=True)], laid_out(layout, lengths, change), budget=0)
    expected = [Verdict.INVALID if b == invalid else Verdict.WRONG if b == wrong else Verdict.SAME_BITS for b in range(3)]
    assert [one.verdict for one in report.sequences] == expected
    assert (report.verdict, report.sequence) == (Verdict.WRONG, wrong)
    assert report.reason.startswith(f"sequence {wrong}: WRONG at {report.sequences[wrong].first_wrong.place}")
    assert str(report.sequences[wrong].first_wrong.key) == label
    for b, one in enumerate(report.sequences):
        alone = {name: change(b, name, array) for name, array in points(b, lengths[b]).items()}
        assert one == bn.check(SMALL, IDS[b, : lengths[b]], alone, budget=0)
    assert report.reason.endswith(f"; WRONG or INVALID too: sequence {invalid}") == (invalid is not None)


@pytest.mark.parametrize("layout", ["left", "right"])
def test_the_side_of_padding_is_found_although_every_sequence_is_wrong(layout):
    dump = laid_out(layout, (9, 4), lambda b, name, x: x * (1 + (name == "l_out-0")))
    report = bn.check(SMALL, [IDS[0].tolist(), IDS[1, :4].tolist()], dump)
    assert [str(one.first_wrong.key) for one in report.sequences] == ["l_out-0"] * 2
    assert report.notes[-1].startswith(f"padding is taken to be {'in front of' if layout == 'left' else 'behind'} the tokens")


@pytest.mark.parametrize("left", [False, True])
def test_padded_attention_is_cut_on_both_axes(left):
    """There are as many heads as tokens of the longest: the label tells them apart."""
    scores = np.arange(2 * 4 * 4 * 4).reshape(2, 4, 4, 4)
    entry = Entry(scores.shape, scores.dtype, lambda: scores)
    part = Batch(Labelled({"attentions.0": entry}, Path("f"), "kind"), (4, 3), left).sequence(1).arrays["attentions.0"]
    kept = slice(1, None) if left else slice(3)
    np.testing.assert_array_equal(part.load(), scores[1][:, kept, kept])
    assert part.shape == (4, 3, 3)


def test_a_place_is_a_position_of_a_sequence():
    """Not a row of all sequences together."""
    right = bn.forward_full(SMALL, IDS)
    flat, twice, nan = right.copy(), right.copy(), right.copy()
    flat[1, 0], twice[2, 5], nan[1, 3, 4] = 0.5, right[2, 4], np.nan
    for theirs, b, place, judged in (
        (flat, 1, "position 0 are all 0.5", "position 0 of sequence 1 are all 0.5"),
        (twice, 2, "positions 4 and 5 are the same", "positions 4 of sequence 2 and 5 of sequence 2 are the same"),
        (nan, 1, "logit at 3, 4 is nan", "logit at position 3 of sequence 1, number 4, is nan"),
    ):
        report = bn.check(SMALL, IDS, theirs)
        assert (report.verdict, report.reason.startswith(f"sequence {b}: "), place in report.reason) == (Verdict.INVALID, True, True)
        assert judged in bn.judge(right, theirs).reason
