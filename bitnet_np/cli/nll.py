"""`bitnet-np nll`: how well a model predicts a text."""

import argparse
from pathlib import Path

import numpy as np

from ..nll import token_nll
from ..selftest import digest
from ..text.tokenizer import tokenizer_from
from . import progress
from .arguments import (
    add_computing_arguments,
    add_device_arguments,
    add_model_argument,
    add_token_arguments,
    check_out,
    dialect_of,
    loaded,
    opened,
    save_npy,
)
from .inputs import token_ids
from .printing import print_json

SUMMARY = "Mean negative log-likelihood and perplexity of a text."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model_argument(parser)
    add_token_arguments(parser)
    parser.add_argument(
        "--stride", type=int, metavar="N", help="for texts longer than the context: number of tokens between the starts of windows"
    )
    parser.add_argument(
        "--out", type=Path, metavar="F.npy", help="write the negative log-likelihood of each token but the first as float64"
    )
    add_computing_arguments(parser)
    add_device_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the mean and the perplexity, write the values to --out; returns the exit code."""
    check_out("--out", arguments.out)
    source = opened(arguments.model, arguments)
    ids = token_ids(arguments, lambda: tokenizer_from(source.metadata, source.path))
    model = loaded(source, arguments)
    bar = progress.bar("reading")
    values = token_nll(model, ids, stride=arguments.stride, dialect=dialect_of(arguments), ops=arguments.ops, progress=bar)
    if arguments.out is not None:
        save_npy(arguments.out, values)
    mean = float(values.mean())
    perplexity = float(np.exp(min(mean, 700.0)))
    if arguments.json:
        print_json({"tokens": len(ids), "mean_nll": mean, "perplexity": perplexity, "sha256": digest(values)})
        return 0
    print(f"mean negative log-likelihood  {mean:.6f} nats a token ({len(values)} predicted)")
    print(f"perplexity                    {perplexity:.4f}")
    return 0
