"""The models that come with the package."""

import pytest

from bitnet_np.files import embedded
from bitnet_np.files.load import load


@pytest.mark.parametrize(("path_of", "name"), [(embedded.model_path, "tiny.gguf"), (embedded.demo_path, "demo.gguf")])
def test_models_are_files_while_the_context_lasts(path_of, name):
    with path_of() as path:
        assert path.name == name
        assert load(path).config.architecture == "bitnet-b1.58"
