"""`bitnet-np nll`: how well a model predicts a text."""

import argparse

import numpy as np

from ..generation.nll import token_nll
from ..testing.selftest import digest
from . import progress
from .arguments import check_out, dialect_of, save_npy
from .inputs import opened
from .printing import answer


def run(arguments: argparse.Namespace) -> int:
    """Print the mean and the perplexity, write the values to --out; returns the exit code."""
    check_out("--out", arguments.out, ".npy")
    inputs = opened(arguments)
    ids, bar = inputs.token_ids(), progress.bar("reading")
    values = token_nll(inputs.model(), ids, stride=arguments.stride, dialect=dialect_of(arguments), ops=arguments.ops, progress=bar)
    if arguments.out is not None:
        save_npy(arguments.out, values)
    mean = float(values.mean())
    perplexity = float(np.exp(min(mean, 700.0)))
    error = perplexity * float(values.std() / np.sqrt(max(len(values) - 1, 1)))  # as llama-perplexity computes it; 0 for one value
    facts = {"tokens": len(ids), "mean_nll": mean, "perplexity": perplexity, "perplexity_error": error, "sha256": digest(values)}
    text = f"mean negative log-likelihood  {mean:.6f} nats a token ({len(values)} predicted)\n"
    return answer(arguments, facts, text + f"perplexity                    {perplexity:.4f} +/- {error:.4f}")
