"""Labels that are not written as ours are: read where they can mean one point alone, said with the nearest name where they cannot."""

import numpy as np
import pytest

from bitnet_np import Verdict, check, forward_full
from bitnet_np.base.errors import FileFormatError
from bitnet_np.testing.models import random_model
from bitnet_np.traces.formats.loose_labels import nearest, read_labels

MODEL = random_model(13, family="llama", n_layers=2)
IDS = np.arange(9)
RIGHT: dict[str, np.ndarray] = {}
forward_full(MODEL, IDS[None], record=lambda name, n, x: RIGHT.update({name if n is None else f"{name}-{n}": x.reshape(9, -1).copy()}))


def written(pattern, by=0):
    """The right tensors with the labels of layers written otherwise. by: what is added to their numbers."""
    split = {label: label.split("-") for label in RIGHT}
    return {label if len(parts) == 1 else pattern.format(parts[0], int(parts[1]) + by): RIGHT[label] for label, parts in split.items()}


@pytest.mark.parametrize("pattern", ["{}_{}", "layer{1}.{0}", "blk_{1}_{0}", "{1:02}/{0}", "{}[{}]", "model.layers.{1}.{0}"])
@pytest.mark.parametrize("by", [0, 1])
def test_tensors_are_judged_whatever_the_writing_of_their_labels_and_their_first_layer(pattern, by):
    report = check(MODEL, IDS, written(pattern, by))
    assert (report.verdict, len(report.operations)) == (Verdict.SAME_BITS, len(RIGHT))
    assert sum("read in our writing" in note for note in report.notes) == 1
    assert sum("layers are counted from 1" in note for note in report.notes) == by


def test_what_is_not_understood_is_said_with_the_nearest_name():
    strange = {label.replace("attn_norm", "atn_nrom"): x for label, x in RIGHT.items()} | {
        "scratch": IDS[:, None],
        "attn_norm-7": IDS[:, None],
    }
    report = check(MODEL, IDS, strange, budget=0)
    assert report.verdict is Verdict.SAME_BITS
    assert report.reason.endswith(f"; {len(RIGHT) - 1} of {len(RIGHT) + 2} tensors were understood")
    assert report.not_understood == ("atn_nrom-0", "atn_nrom-1", "scratch")
    note = "3 labels are not understood: atn_nrom-0 (did you mean attn_norm-0?), atn_nrom-1 (did you mean attn_norm-1?), scratch"
    assert note in report.notes
    assert "this model has no attn_norm-7: not judged" in report.notes
    assert report.as_dict()["not_understood"] == list(report.not_understood)


@pytest.mark.parametrize(
    ("label", "meant"),
    [
        ("atn_nrom-1.step-3", "attn_norm-1.step-3"),
        ("l_out-1-7", "l_out-1.step-7"),
        ("l_outt-1_step7", "l_out-1.step-7"),
        ("q_proj_1", "layers.1.self_attn.q_proj"),
        ("final_layernrm", "final_layernorm"),
        ("x", None),
    ],
)
def test_the_nearest_name(label, meant):
    assert nearest(label) == meant


@pytest.mark.parametrize("writing", ["l_out-{}_step{}", "l_out-{}.step{}", "l_out-{}.token-{}", "step{1}_l_out-{0}", "step{1}/l_out-{0}"])
def test_steps_in_other_writings_are_steps(writing):
    steps = {writing.format(layer, n): RIGHT[f"l_out-{layer}"][n : n + 1] for layer in range(2) for n in range(len(IDS))}
    report = check(MODEL, IDS, steps, budget=0)
    assert (report.verdict, len(report.operations)) == (Verdict.SAME_BITS, 2)
    assert any("are read in our writing" in note for note in report.notes)


def test_a_dump_without_a_known_label_is_refused_with_the_nearest():
    with pytest.raises(FileFormatError, match=r"it has 'l_out-0-0' \(did you mean l_out-0\.step-0\?\), 'x'"):
        check(MODEL, IDS, {"l_out-0-0": RIGHT["l_out-0"][:1], "x": RIGHT["l_out-0"]})


def test_a_label_is_read_otherwise_only_where_no_other_means_that_point():
    labels = ["attn_norm_0", "attn_norm-0", "attn norm 0", "l_out-1", "layers.0.1.l_out"]
    read = read_labels(labels, MODEL.config, "here")
    assert read.labels == dict(zip(labels, labels, strict=True))
    assert read_labels(["step-2/attn_norm_0"], None, "here").labels["step-2/attn_norm_0"] == "step-2/attn_norm-0"


@pytest.mark.parametrize("labels", [["l_out-1"], ["l_out-0", "l_out-2"], ["l_out-1", "l_out-3"], ["hidden_states.1", "hidden_states.2"]])
def test_layers_are_counted_from_0_unless_all_labels_say_otherwise(labels):
    assert not read_labels(labels, MODEL.config, "here").notes
