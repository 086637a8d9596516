"""Against llama.cpp's recordings of tiny models of every family (tests/data/llamacpp_families): every tensor from its own inputs."""

from pathlib import Path

import pytest

from bitnet_np import spec
from bitnet_np.engine.dialects import EXACT, LLAMA_CPP
from bitnet_np.files.load import load
from bitnet_np.judge.graph import LOGITS, POOLED
from bitnet_np.judge.precision import FLOAT32
from bitnet_np.judge.trace import judge_trace
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.dense import dense_view
from bitnet_np.traces.formats import read_any

DATA = Path(__file__).parents[1] / "data" / "llamacpp_families"
TENSORS = {
    "qwen2": 31,
    "qwen3": 36,
    "qwen2moe": 49,
    "qwen3moe": 43,
    "mixtral": 41,
    "phi3_longrope": 29,
    "smollm3": 61,
    "granite": 34,
    "minicpm": 33,
    "olmo2": 33,
    "gemma": 33,
    "gemma2": 34,
    "gemma3": 112,
    "gptneox": 27,
    "gpt2": 26,
    "starcoder2": 29,
    "olmo3": 63,
    "phi2": 25,
    "stablelm": 31,
}
"""The recordings, and the number of tensors that are judged in each."""


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_from_its_own_inputs(name):
    """In llama.cpp's dialect each is right; without its roundings of activations some are not, and logits are near the definition's."""
    model = load(DATA / f"{name}.gguf", overrides={"context": 64})  # LongRoPE's must be declared
    dump = read_any(DATA / f"{name}.npz")
    report = judge_trace(model, dump, dump.tokens, LLAMA_CPP)
    assert report.verdict < Verdict.WRONG, report.reason
    assert len(report.operations) == TENSORS[name]
    assert (POOLED in dump.points) == (name in ("qwen3", "granite", "gemma"))
    assert judge_trace(model, dump, dump.tokens, EXACT, precision=FLOAT32).verdict is Verdict.WRONG
    defined = spec.forward(dense_view(model), dump.tokens)
    assert ((dump.points[LOGITS] - defined) ** 2).sum() < 5e-3 * (defined**2).sum()
