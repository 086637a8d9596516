"""The files of a Hugging Face folder: an index names files of the folder only, and agrees with them."""

import json

import hf_models
import numpy as np
import pytest
from family_models import assert_refused
from hf_models import OFFLINE, changed

from bitnet_np.base.errors import FileFormatError
from bitnet_np.files.load import load


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors",
        "x.bin",
        "a\\b.safetensors",
        "x\n.safetensors",
        "\ud800.safetensors",
        "9" * 244 + ".safetensors",  # 256 bytes
        "\u00e9" * 130 + ".safetensors",
        7,
    ],
)
def test_an_index_names_files_of_the_folder_only(tmp_path, file):
    folder = changed(tmp_path, OFFLINE)
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    assert_refused(folder, FileFormatError, "tensor 'w' is in", "expected the name of a safetensors file of the folder")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"a": "1.safetensors", "b": "2.safetensors"}, "2.safetensors: tensor 'b' is missing"),
        ({"a": "2.safetensors"}, "tensor 'b' is in None by"),
        ({"a": "1.safetensors", "b": "3.safetensors"}, "3.safetensors: the file is missing, model.safetensors.index.json has"),
    ],
)
def test_an_index_and_its_files_agree(tmp_path, where, message):
    (tmp_path / "config.json").write_text("{}")
    hf_models.write_safetensors(tmp_path / "1.safetensors", {"a": np.zeros(1, np.float32)})
    names = {"a": np.zeros(1, np.float32)} if "b" not in where else {}
    hf_models.write_safetensors(tmp_path / "2.safetensors", names | ({"b": np.zeros(1, np.float32)} if "b" not in where else {}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_refused(tmp_path, FileFormatError, message)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', "\xff", "[" * 100000])
def test_config_json_must_be_an_object(tmp_path, text):
    folder = changed(tmp_path, OFFLINE)
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused(folder, FileFormatError, "config.json")


def test_a_folder_without_config_or_tensors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    assert_refused(tmp_path, FileFormatError, "model.safetensors: expected a file")
