"""What writes GGUF files with something wrong in them."""

from pathlib import Path

import family_models
import gguf_models
import pytest


@pytest.fixture
def write(tmp_path):
    """gguf_models' file, with other keys and tensors."""
    return gguf_models.writer(tmp_path)


@pytest.fixture
def written(tmp_path):
    """The file of any model, with other keys."""
    return family_models.writer(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")
