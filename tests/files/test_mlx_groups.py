"""Weights that mlx-lm quantised in groups: what is damaged, and forms that are not read. golden/test_mlx.py has the numbers."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bitnet_np as bn
from bitnet_np.base.errors import Error, FileFormatError, NonFiniteError, UnsupportedError
from bitnet_np.engine.forward_pass import forward_full

DATA = Path(__file__).parents[1] / "data" / "mlx" / "qwen3_moe"
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.switch_mlp.down_proj"
TOKENS = np.load(DATA / "recorded.npz")["tokens"][None]


@pytest.fixture
def changed(tmp_path):
    """A copy of the folder. keys: of config.json, None for those to be left out; form: of `quantization`; tensors: their new arrays."""

    def make(form=None, tensors=None, **keys):
        folder = tmp_path / "model"
        shutil.copytree(DATA, folder, dirs_exist_ok=True)
        config = json.loads((DATA / "config.json").read_text())
        config |= {name: config["quantization"] | (form or {}) for name in ("quantization", "quantization_config")} | keys
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        arrays = load_file(folder / "model.safetensors")
        arrays |= {name: change(arrays.get(name)) for name, change in (tensors or {}).items()}
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}, folder / "model.safetensors")
        return folder

    return make


KEYS = [
    ({"bits": 7}, FileFormatError, "expected a group_size of (32, 64, 128) and bits of (2, 3, 4, 5, 6, 8)"),
    ({"bits": 4.0}, FileFormatError, "expected a group_size"),
    ({"bits": [4]}, FileFormatError, "expected a group_size"),
    ({"group_size": 16}, FileFormatError, "expected a group_size"),
    ({"group_size": 64}, FileFormatError, "embed_tokens.scales has shape [48, 2], expected [48, 1]"),
    ({"bits": 8}, FileFormatError, "embed_tokens.weight has shape [48, 8], expected [48, 16]"),
    ({"mode": "mxfp4"}, UnsupportedError, "supported are group_size and bits, and the mode 'affine'"),
    ({"mode": ["affine"]}, UnsupportedError, "supported are"),
    ({"global_scale": 1}, UnsupportedError, "supported are"),
    ({Q: {"group_size": 32, "bits": 3}}, FileFormatError, "q_proj.weight has shape [64, 8], expected [64, 6]"),
    ({Q: {"group_size": 32}}, FileFormatError, f"config.json: quantization.{Q} is"),
    ({Q: False}, FileFormatError, "q_proj.weight has shape [64, 8], expected [64, 64]"),
    ({Q: 4}, UnsupportedError, "supported are"),
]


@pytest.mark.parametrize(("quantization", "error", "said"), KEYS, ids=range(len(KEYS)))
def test_another_form_is_refused(changed, quantization, error, said):
    with pytest.raises(error, match=re.escape(said)):
        bn.load(changed(quantization))


def test_the_two_names_must_agree(changed):
    other = {"group_size": 32, "bits": 8}
    with pytest.raises(FileFormatError, match="expected the same"):
        bn.load(changed(quantization_config=other))
    for keys in ({"quantization_config": None}, {"quantization": None}):  # older folders have the first alone
        assert (forward_full(bn.load(changed(**keys)), TOKENS) == forward_full(bn.load(DATA), TOKENS)).all()
    with pytest.raises(FileFormatError, match=r"config\.json: quantization is 4, expected an object"):
        bn.load(changed(quantization_config=None, quantization=4))


def test_packed_weights_are_never_taken_for_plain_ones(changed):
    with pytest.raises(FileFormatError, match=re.escape("embed_tokens.weight has shape [48, 8], expected [48, 64]")):
        bn.load(changed(**dict.fromkeys(("quantization", "quantization_config"))))


TENSORS = [
    ({f"{Q}.scales": lambda x: None}, FileFormatError, "q_proj.weight has shape [64, 8], expected [64, 64]"),
    ({f"{Q}.biases": lambda x: None}, FileFormatError, "tensor model.layers.0.self_attn.q_proj.biases is missing"),
    ({f"{Q}.biases": lambda x: x.astype(np.float16)}, FileFormatError, "have types F32 and F16, expected one"),
    ({f"{Q}.biases": lambda x: x[:, :1]}, FileFormatError, "q_proj.biases has shape [64, 1], expected [64, 2]"),
    ({f"{Q}.scales": lambda x: x * np.float32(np.nan)}, NonFiniteError, "q_proj.scales has NaN or infinity"),
    ({f"{Q}.scales": lambda x: x * 0 + np.float32(1e38)}, NonFiniteError, "q_proj.weight has NaN or infinity"),
    ({f"{Q}.weight": lambda x: x.view(np.int32)}, UnsupportedError, "q_proj.weight has type I32, supported here: U32, with 4 bits"),
    ({f"{Q}.{name}": lambda x: x.astype(np.int32) for name in ("scales", "biases")}, UnsupportedError, "q_proj.scales has type I32"),
    ({f"{DOWN}.weight": lambda x: x[:3]}, FileFormatError, "down_proj.weight has shape [3, 64, 4], expected [4, 64, 4]"),
    ({"model.norm.scales": lambda x: np.ones(2, np.float32)}, Error, "model.norm"),
]


@pytest.mark.parametrize(("tensors", "error", "said"), TENSORS, ids=range(len(TENSORS)))
def test_damaged_tensors_are_refused_by_name(changed, tensors, error, said):
    with pytest.raises(error, match=re.escape(said)):
        bn.load(changed(tensors=tensors))


def test_a_module_that_is_not_quantised_is_read_as_it_is(changed):
    rows = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model = bn.load(changed(tensors={f"{Q}.weight": lambda x: rows, f"{Q}.scales": lambda x: None, f"{Q}.biases": lambda x: None}))
    np.testing.assert_array_equal(model.layers[0].attn_q.weights, rows)


def test_rows_are_computed_in_pieces(monkeypatch):
    whole = bn.load(DATA)
    monkeypatch.setattr("bitnet_np.files.mlx_groups._AT_A_TIME", 200)
    np.testing.assert_array_equal(bn.load(DATA).layers[0].attn_q.weights, whole.layers[0].attn_q.weights)
