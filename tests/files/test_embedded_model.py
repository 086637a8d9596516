"""The embedded demo model: what it says, to the letter, and that another engine computes the same model."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from bitnet_np import generate, load, spec
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files import embedded
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.judge.measures import judge
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.dense import dense_view
from bitnet_np.model.records import Config, Ternary
from bitnet_np.text.tokenizer import tokenizer_from

DATA = Path(__file__).parents[1] / "data" / "demo"
SIZES = {"vocab": 1536, "context": 256, "width": 256, "n_layers": 4, "ffn": 512, "heads": 8, "kv_heads": 4, "head_dim": 32}


@pytest.fixture(scope="module")
def demo():
    with embedded.demo_path() as path:
        yield path, load(path), tokenizer_from(open_gguf(path).metadata, path)


def test_it_says_the_same_everywhere(demo):
    _, model, tokenizer = demo
    for said in json.loads((DATA / "greedy.json").read_text("utf-8")):
        ids = tokenizer.encode(said["prompt"])
        tokens = generate(model, ids, embedded.DEMO_TOKENS, stop=tokenizer.stops)[len(ids) :]
        assert tokens == said["tokens"]
        assert tokenizer.decode(tokens) == said["text"]


def test_its_form(demo):
    path, model, tokenizer = demo
    assert path.stat().st_size <= 3_000_000
    assert model.config == Config("bitnet-b1.58", **SIZES, eps=2.0**-17, rope_base=10000.0)
    assert all(isinstance(layer.ffn_down.weights, Ternary) for layer in model.layers)
    assert model.token_embd.dtype == np.float16
    assert len(tokenizer.tokens) == SIZES["vocab"]


def test_transformers_computes_the_same_model(demo):
    """Recorded by scripts/recorders/crossval_hf.py --demo: strict float64 against the definition, float32 against the kernels."""
    _, model, tokenizer = demo
    recorded = np.load(DATA / "transformers.npz")
    tokens, strict = recorded["tokens"], recorded["logits_f64"]
    np.testing.assert_array_equal(tokens, tokenizer.encode(str(recorded["text"])))
    np.testing.assert_allclose(spec.forward(dense_view(model), tokens), strict, rtol=0, atol=1e-10 * np.abs(strict).max())
    assert judge(forward_full(model, tokens[None])[0], recorded["logits_f32"]).verdict <= Verdict.FLIPS
