"""The table of Hugging Face's model types: it has a module for all that an architecture has."""

import pytest

from bitnet_np.families import FAMILIES, GATE_UP, QKV
from bitnet_np.files.hf_model_types import MODEL_TYPES


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_part_of_a_layer_has_a_module(model_type):
    kind = MODEL_TYPES[model_type]
    for architecture in kind.architectures.values():
        family = FAMILIES[architecture]
        assert {*family.norms, *family.head_norms, *family.matrices} <= kind.modules.keys()
        assert bool(kind.positions) == family.positions


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_only_matrices_that_read_the_same_input_share_a_module(model_type):
    modules = MODEL_TYPES[model_type].modules
    shared = {name for name in modules if list(modules.values()).count(modules[name]) > 1}
    assert shared in (set(), set(QKV), {*QKV, *GATE_UP})


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_layers_are_numbered(model_type):
    assert MODEL_TYPES[model_type].layer.format(12).endswith(".12.")
