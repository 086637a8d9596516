"""What comes with the package: two models, and the recording of one of them."""

import numpy as np
import pytest

from bitnet_np import embedded
from bitnet_np.files.load import load


@pytest.mark.parametrize(("path_of", "name"), [(embedded.model_path, "tiny.gguf"), (embedded.demo_path, "demo.gguf")])
def test_models_are_files_while_the_context_lasts(path_of, name):
    with path_of() as path:
        assert path.name == name
        assert load(path).config.architecture == "bitnet-b1.58"


def test_the_recording_has_tokens_and_two_logits_of_each_length():
    with embedded.model_path() as path:
        vocab = load(path).config.vocab
    recording = embedded.recording()
    kinds = ("tokens", "logits_prefill", "logits_decode")
    assert set(recording) == {f"{kind}_T{n}" for kind in kinds for n in embedded.LENGTHS}
    for n in embedded.LENGTHS:
        tokens = recording[f"tokens_T{n}"]
        assert tokens.shape == (n,)
        assert 0 <= tokens.min() <= tokens.max() < vocab
        for path_name in ("prefill", "decode"):
            logits = recording[f"logits_{path_name}_T{n}"]
            assert (logits.dtype, logits.shape) == (np.float32, (n, vocab))
            assert np.isfinite(logits).all()
