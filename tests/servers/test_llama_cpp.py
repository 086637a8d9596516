"""llama.cpp's own server on the loopback, where its wheel is installed (`pip install xllamacpp`): with its defaults and random models."""

from dataclasses import replace

import numpy as np
import pytest

from bitnet_np import LLAMA_CPP, load
from bitnet_np.cli.main import main
from bitnet_np.files.gguf_writer import write_model
from bitnet_np.judge.top_logprobs import check_completions
from bitnet_np.judge.verdict import Verdict
from bitnet_np.servers.client import client_of
from bitnet_np.servers.endpoint import server_at
from bitnet_np.testing.models import random_model
from bitnet_np.text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN

xllamacpp = pytest.importorskip("xllamacpp")

SHAPE = {"vocab": 320, "width": 256, "ffn": 512, "heads": 8, "kv_heads": 4, "head_dim": 32, "context": 512, "eps": float(np.float32(1e-5))}
WORDS = ["\u2581", *map(chr, range(97, 123)), "\u2581a", "th", "\u2581th", "\u2581the"]
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
TOKENS += [f"\u2581w{i}" for i in range(SHAPE["vocab"] - len(TOKENS))]
TOKENIZER = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": np.array([UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(TOKENS) - 259), np.int32),
    "tokenizer.ggml.scores": -np.arange(len(TOKENS), dtype=np.float32),
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def written(path, family, weights="float32", change=lambda model: model, **shape):
    """The file of a random model, after a change. The head of llama.cpp's `bitnet` is the embedding."""
    model = random_model(1, family=family, weights=weights, table="float32", tied=family == "bitnet", n_layers=3, **{**SHAPE, **shape})
    write_model(path, change(model), TOKENIZER)
    return path


def served(path, **settings):
    """A running server, which ends with the object."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.port, params.warmup, params.cpuparams.n_threads = 512, 1, 0, False, 1
    for name, value in settings.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def prompt(n):
    return [1, *np.random.default_rng(0).integers(3, SHAPE["vocab"], n - 1).tolist()]


def judged(path, server, n=20):
    completions = server_at(client_of(server.listening_address, 60)).complete(prompt(n), 16, 20)
    return check_completions(load(path), completions, LLAMA_CPP)


@pytest.mark.parametrize("n", [3, 200])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_an_honest_server_is_no_alarm(tmp_path, family, n):
    path = written(tmp_path / "m.gguf", family)
    report = judged(path, served(path), n)
    assert report.verdict is Verdict.FLIPS, report.reason


@pytest.mark.parametrize("weights", ["float16", "bfloat16", "Q8_0", "Q4_K", "TQ2_0", "Q1_0", "Q2_0"])
def test_an_honest_server_of_other_weights_is_no_alarm(tmp_path, weights):
    path = written(tmp_path / "m.gguf", "llama", weights)
    report = judged(path, served(path))
    assert report.verdict is Verdict.FLIPS, report.reason


@pytest.mark.parametrize(("family", "kind"), [("llama", "TQ1_0"), ("llama", "TQ2_0"), ("bitnet", "TQ2_0")])
def test_a_ternary_file_that_was_converted_for_llama_cpp_is_read_by_it(tmp_path, family, kind):
    """It does not know I2_S. The scales of the new file are float16 numbers."""
    source, out = written(tmp_path / "i2s.gguf", family, "ternary"), tmp_path / "m.gguf"
    assert main(["convert", str(source), str(out), "--type", kind, "--allow-rounding"]) == 0
    report = judged(out, served(out))
    assert report.verdict is Verdict.FLIPS, report.reason


def test_another_base_of_rope_is_named(tmp_path):
    path = written(tmp_path / "m.gguf", "llama")
    report = judged(path, served(path, rope_freq_base=500000.0))
    assert report.verdict is Verdict.WRONG
    assert "the frequency base is 500000 instead of 10000" in report.reason


def permuted(model):
    """With the query heads in the opposite order."""

    def change(layer):
        weights = layer.attn_q.weights.reshape(8, 32, -1)[::-1].reshape(layer.attn_q.weights.shape)
        return replace(layer, attn_q=replace(layer.attn_q, weights=np.ascontiguousarray(weights), bias=None))

    return replace(model, layers=tuple(map(change, model.layers)))


def without_ffn_norm(model):
    return replace(model, layers=tuple(replace(layer, ffn_norm=np.ones_like(layer.ffn_norm)) for layer in model.layers))


@pytest.mark.parametrize("change", [permuted, without_ffn_norm])
def test_another_model_than_the_servers_is_wrong(tmp_path, change):
    path, other = written(tmp_path / "m.gguf", "llama"), written(tmp_path / "other.gguf", "llama", change=change)
    report = judged(path, served(other))
    assert report.verdict is Verdict.WRONG
    if change is without_ffn_norm:
        assert "the norm's weight is missing" in report.reason


def test_the_command_and_both_tokenizers(tmp_path, capsys):
    path = written(tmp_path / "m.gguf", "llama")
    server = served(path)
    assert main(["check", str(path), "--endpoint", server.listening_address, "--text", "the a thé <s> w3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PASS (FLIPS): ")
    assert "with BOS 1 in front as the model's file says; they were sent as the prompt" in out
