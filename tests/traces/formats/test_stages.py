"""The table of names that other projects have for our points, in both directions."""

import pytest

from bitnet_np.traces.formats import labels, stages
from bitnet_np.traces.points import MODEL_NAMES, RECORDED, SCORES, Key


def test_the_table_has_every_point_but_codes_and_scales_and_no_name_twice():
    expected = {*RECORDED, *SCORES} - {name for name in RECORDED if name.endswith(("_codes", "_scale"))}
    assert {stage.ours for stage in stages.STAGES} == expected
    for column in range(5):
        names = [stage[column] for stage in stages.STAGES if stage[column]]
        assert len(names) == len(set(names))


def test_names_go_there_and_back():
    for stage in stages.STAGES:
        if stage.ggml is None:
            assert stage.ours.endswith("_in")  # the norm inside a matrix, which ggml does not have
            continue
        layer = None if stage.ours in MODEL_NAMES else 3
        key = Key(stage.ours, layer)
        name, operation = stage.ggml.split(".")
        assert stages.from_ggml(f"s2.{name}{'' if layer is None else '-3'}.{operation}") == (2, key)
        assert labels.direct(str(key)) == key
        module = stage.transformers and stage.transformers.format(layer)
        assert module is None or stages.from_transformers(module) == labels.direct(module) == key
        assert stage.aprt is None or stages.from_aprt(stage.aprt) == stage.ours
        assert stage.bitnet_rs is None or stages.from_bitnet_rs(stage.bitnet_rs) == stage.ours


@pytest.mark.parametrize(
    "label", ["attn_norm-0.MUL", "s0.attn_norm.MUL", "s0.l_out-0.MUL", "s0.result_norm-1.MUL", "s0.kqv-0.MUL_MAT", "s0.", "s-1.l_out-0.ADD"]
)
def test_other_nodes_are_none_of_ours(label):
    assert stages.from_ggml(label) is None


@pytest.mark.parametrize("module", ["model.layers.0.self_attn", "model.layers.-1", "model.layers.01", "layers.0", "model.norm.0", ""])
def test_other_modules_are_none_of_ours(module):
    assert stages.from_transformers(module) is None
