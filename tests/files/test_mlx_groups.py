"""Weights that mlx-lm quantised in groups: what is damaged, and forms that are not read. golden/test_mlx.py has the numbers."""

import hf_models
import numpy as np
import pytest
from family_models import assert_refused
from hf_models import changed, rewritten

import bitnet_np as bn
from bitnet_np.base.errors import FileFormatError, NonFiniteError, UnsupportedError
from bitnet_np.engine.forward_pass import forward_full

NAME = "mlx/qwen3_moe"
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.switch_mlp.down_proj"
DATA = hf_models.DATA / NAME
TOKENS = np.load(DATA / "recorded.npz")["tokens"][None]


MLX = ("quantization", "quantization_config")


def edited(tmp_path, changes):
    """The folder with other arrays in place of tensors, by name; None for those to be left out."""

    def edit(tensors):
        for name, change in changes.items():
            if (array := change(tensors.pop(name, None))) is not None:
                tensors[name] = np.ascontiguousarray(array)

    return rewritten(tmp_path, edit, NAME)


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
def test_another_form_is_refused(tmp_path, quantization, error, said):
    assert_refused(changed(tmp_path, NAME, **dict.fromkeys(MLX, quantization)), error, said)


def test_the_two_names_must_agree(tmp_path):
    assert_refused(changed(tmp_path / "a", NAME, quantization_config={"bits": 8}), FileFormatError, "expected the same")
    for key in MLX:  # older folders have the first alone
        one = bn.load(changed(tmp_path / key, NAME, **{key: None}))
        assert (forward_full(one, TOKENS) == forward_full(bn.load(DATA), TOKENS)).all()
    neither = changed(tmp_path / "b", NAME, **dict.fromkeys(MLX))
    assert_refused(neither, FileFormatError, "embed_tokens.weight has shape [48, 8], expected [48, 64]")
    assert_refused(changed(tmp_path / "b", NAME, quantization=4), FileFormatError, "quantization is 4, expected an object")


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
    ({"model.norm.scales": lambda x: np.ones(2, np.float32)}, FileFormatError, "model.norm"),
]


@pytest.mark.parametrize(("tensors", "error", "said"), TENSORS, ids=range(len(TENSORS)))
def test_damaged_tensors_are_refused_by_name(tmp_path, tensors, error, said):
    assert_refused(edited(tmp_path, tensors), error, said)


def test_a_module_that_is_not_quantised_is_read_as_it_is(tmp_path):
    rows = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model = bn.load(edited(tmp_path, {f"{Q}.weight": lambda x: rows, f"{Q}.scales": lambda x: None, f"{Q}.biases": lambda x: None}))
    np.testing.assert_array_equal(model.layers[0].attn_q.weights, rows)


def test_rows_are_computed_in_pieces(monkeypatch):
    whole = bn.load(DATA)
    monkeypatch.setattr("bitnet_np.files.mlx_groups._AT_A_TIME", 200)
    np.testing.assert_array_equal(bn.load(DATA).layers[0].attn_q.weights, whole.layers[0].attn_q.weights)
