"""`bitnet-np nll`: the mean of the library's negative log-likelihoods, and the perplexity that it is."""

import hashlib

import numpy as np
import pytest
from command_line import TINY, TOKENS, save_array

from bitnet_np import BITNET_CPP
from bitnet_np.generation.nll import token_nll


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
