"""`bitnet-np nll`: the mean of the library's negative log-likelihoods, and the perplexity that it is."""

import hashlib

import numpy as np
import pytest
from command_line import TINY, TOKENS, save_array, with_commas

from bitnet_np import BITNET_CPP
from bitnet_np.generation.nll import token_nll


def test_the_mean_and_the_perplexity_are_printed(run, model):
    mean = token_nll(model, TOKENS).mean()
    assert run("nll", TINY, "--tokens", with_commas(TOKENS)).splitlines() == [
        f"mean negative log-likelihood  {mean:.6f} nats a token (16 predicted)",
        f"perplexity                    {np.exp(mean):.4f}",
    ]


def test_nll_in_json_and_in_a_file(run, model, tmp_path):
    out = tmp_path / "nll.npy"
    result = run("nll", TINY, "--tokens", with_commas(TOKENS), "--as", "bitnet.cpp", "--json", "--out", out)
    values = token_nll(model, TOKENS, dialect=BITNET_CPP)
    np.testing.assert_array_equal(np.load(out), values)
    assert result == {
        "tokens": 17,
        "mean_nll": values.mean(),
        "perplexity": pytest.approx(np.exp(values.mean()), rel=1e-15),
        "sha256": hashlib.sha256(values.astype("<f8").tobytes()).hexdigest(),
    }


def test_nll_and_generate_in_plain_numpy(run):
    tokens = with_commas(TOKENS[:5])
    assert run("nll", TINY, "--tokens", tokens, "--device", "numpy") == run("nll", TINY, "--tokens", tokens)
    assert run("generate", TINY, "--tokens", tokens, "-n", 3, "--device", "numpy") == run("generate", TINY, "--tokens", tokens, "-n", 3)


def test_a_text_longer_than_the_context_is_read_in_windows(run, model, tmp_path):
    """The context is 512."""
    ids = np.random.default_rng(0).integers(0, 512, 600)
    file = save_array(tmp_path / "ids.npy", ids)
    result = run("nll", TINY, "--tokens-file", file, "--stride", 300, "--json")
    assert (result["tokens"], result["mean_nll"]) == (600, token_nll(model, ids, stride=300).mean())
