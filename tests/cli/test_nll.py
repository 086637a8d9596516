"""`bitnet-np nll`: the mean of the library's negative log-likelihoods, and the perplexity that it is."""

import hashlib

import numpy as np
import pytest
from command_line import TINY, TOKENS, save_array, with_commas

from bitnet_np import BITNET_CPP
from bitnet_np.cli.nll import PERCENTILES
from bitnet_np.generation.nll import token_nll
from bitnet_np.traces.llama_base import divergence


@pytest.mark.parametrize(
    ("ids", "options", "how"),
    [
        (TOKENS, "--as bitnet.cpp", {"dialect": BITNET_CPP}),
        (TOKENS[:5], "--device numpy", {}),
        (np.random.default_rng(0).integers(0, 512, 600), "--stride 300", {"stride": 300}),  # the context is 512
    ],
)
def test_nll_is_the_librarys_in_json_and_in_a_file(run, model, tmp_path, ids, options, how):
    out = tmp_path / "nll.npy"
    result = run("nll", TINY, "--tokens-file", save_array(tmp_path / "ids.npy", ids), *options.split(), "--json", "--out", out)
    values = token_nll(model, ids, **how)
    np.testing.assert_array_equal(np.load(out), values)
    assert result == {
        "tokens": len(ids),
        "mean_nll": values.mean(),
        "perplexity": pytest.approx(np.exp(values.mean()), rel=1e-15),
        "perplexity_error": pytest.approx(np.exp(values.mean()) * values.std(ddof=1) / np.sqrt(len(values)), rel=1e-12),
        "sha256": hashlib.sha256(values.astype("<f8").tobytes()).hexdigest(),
    }


def test_a_model_is_compared_with_anothers_predictions(run, model, tokenizer, tmp_path):
    """With a BOS in front of each chunk. docs/commands.md has the numbers as they are printed."""
    base, out = tmp_path / "base.kld", tmp_path / "nll.npy"
    run("nll", TINY, "--tokens", with_commas(TOKENS), "--save-all-logits", base, "--ctx-size", 8)
    found = divergence(model, base, bos=tokenizer.bos)
    result = run("nll", TINY, "--kl-divergence-base", base, "--out", out, "--json")
    np.testing.assert_array_equal(np.load(out), found.nll)
    assert (result["predicted"], result["mean_nll"], result["base"]["mean_nll"]) == (6, found.nll.mean(), found.base_nll.mean())
    percentiles = np.percentile(found.kl, PERCENTILES).tolist()
    assert result["kl"] == {"mean": found.kl.mean(), "max": found.kl.max(), "percentiles": percentiles}
    assert result["same_top"] == found.same_top.mean()
