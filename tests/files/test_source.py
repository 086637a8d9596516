"""A GGUF file and a Hugging Face folder are the same kind of source: whoever has one need not ask which."""

import json
import math
from pathlib import Path

import pytest

import bitnet_np
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.load import load, model_from, open_model

TINY = Path(bitnet_np.__file__).parent / "data" / "tiny.gguf"
FOLDER = Path(__file__).parents[1] / "data" / "hf" / "bitnet_autooff_gqa_tied"
BOTH = pytest.mark.parametrize("path", [TINY, FOLDER], ids=["file", "folder"])


@BOTH
def test_the_config_is_that_of_the_model(path):
    source = open_model(path)
    weights = source.weights(allow_nan=False, i2s_layout="128/32")
    assert weights.config == source.config() == model_from(source).config == load(path).config
    assert source.path == path


@BOTH
def test_the_size_is_that_of_the_files_with_tensors(path):
    source = open_model(path)
    assert source.size == (path if path is TINY else path / "model.safetensors").stat().st_size
    assert sum(tensor.data.size for tensor in source.tensors.values()) <= source.size
    assert all(tensor.data.size == tensor.type.nbytes(math.prod(tensor.shape)) for tensor in source.tensors.values())


def test_keys_are_the_settings_of_the_file():
    file, folder = open_model(TINY), open_model(FOLDER)
    assert dict(folder.keys) == json.loads((FOLDER / "config.json").read_text())
    assert list(file.keys) == list(open_gguf(TINY).metadata)
    assert (file.kind, file.version) == ("GGUF v3", 3)
    assert (folder.kind, folder.version) == ("Hugging Face folder", None)


@BOTH
def test_each_weight_is_there_once(path):
    """What has been asked for is missing the second time, and what nobody has asked for is refused."""
    weights = open_model(path).weights(allow_nan=False, i2s_layout="128/32")
    width = weights.config.width
    assert weights.vector("output_norm", width).shape == (width,)
    with pytest.raises(bitnet_np.Error, match=r"tensor .*norm\.weight is missing"):
        weights.vector("output_norm", width)
    with pytest.raises(bitnet_np.Error, match=r"has no place in architecture bitnet-b1\.58"):
        weights.check_all_taken()
