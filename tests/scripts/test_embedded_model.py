"""The embedded demo model: what it says, to the letter, and that another engine computes the same model."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
import train
from trainer import export
from trainer.settings import DEMO

from bitnet_np import spec
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files import embedded
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.judge.logits import judge
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.dense import dense_view
from bitnet_np.model.records import Ternary

DATA = Path(__file__).parents[1] / "data" / "demo"


@pytest.fixture(scope="module")
def demo():
    with embedded.demo_path() as path:
        yield path, *train.load_model(path)


def test_it_says_the_same_everywhere(tmp_path):
    assert train.main(["--record", str(tmp_path), "--threads", "1"]) == 0
    assert (tmp_path / "greedy.json").read_text("utf-8") == (DATA / "greedy.json").read_text("utf-8")


def test_its_form(demo):
    path, model, tokenizer = demo
    assert path.stat().st_size <= 3_000_000
    assert model.config == DEMO.config
    assert all(isinstance(layer.ffn_down.weights, Ternary) for layer in model.layers)
    assert model.token_embd.dtype == np.float16
    assert len(tokenizer.tokens) == DEMO.vocabulary
    assert open_gguf(path).metadata["general.description"] == export.DESCRIPTION  # or training would end in another file


def test_the_report_is_of_the_embedded_model(capsys):
    assert train.main(["--evaluate", "--documents", "3", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("perplexity of held-out text ")
    assert "| questions | combinations never seen | combinations seen, new texts |\n| --- | --- | --- |\n" in out


@pytest.fixture(scope="module")
def recorded():
    return np.load(DATA / "transformers.npz")


def test_transformers_computes_the_same_model(demo, recorded):
    """Recorded by scripts/recorders/crossval_hf.py --demo: strict float64 against the definition, float32 against the kernels."""
    _, model, tokenizer = demo
    tokens = recorded["tokens"]
    np.testing.assert_array_equal(tokens, tokenizer.encode(str(recorded["text"])))
    strict = recorded["logits_f64"]
    np.testing.assert_allclose(spec.forward(dense_view(model), tokens), strict, rtol=0, atol=1e-10 * np.abs(strict).max())
    assert judge(forward_full(model, tokens[None])[0], recorded["logits_f32"]).verdict <= Verdict.FLIPS
