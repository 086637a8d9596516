"""`bitnet-np nll`: how well a model predicts a text."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError
from ..engine.machine import digest_of
from ..generation.nll import token_nll
from ..sweep.cluster import cluster_nll
from ..sweep.process import ModelFile
from ..testing.selftest import digest
from . import progress
from .arguments import add_computing_arguments, add_model_and_tokens, check_out, dialect_of, save_npy
from .cluster import add_cluster_arguments, connected
from .inputs import Inputs, opened
from .printing import print_json

SUMMARY = "Compute the mean negative log-likelihood and perplexity of a text."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model_and_tokens(parser)
    parser.add_argument(
        "--stride", type=int, metavar="N", help="for texts longer than the context: number of tokens between the starts of windows"
    )
    parser.add_argument(
        "--out", type=Path, metavar="F.npy", help="write the negative log-likelihood of each token but the first as float64"
    )
    add_computing_arguments(parser)
    add_cluster_arguments(parser, "each window of a long text")


def run(arguments: argparse.Namespace) -> int:
    """Print the mean and the perplexity, write the values to --out; returns the exit code."""
    check_out("--out", arguments.out, ".npy")
    inputs = opened(arguments)
    ids = inputs.token_ids()
    model = inputs.model()
    how = {"stride": arguments.stride, "dialect": dialect_of(arguments), "progress": progress.bar("reading")}
    if arguments.scheduler is None and arguments.workers is None:
        values = token_nll(model, ids, ops=arguments.ops, **how)
    else:
        values = _on_cluster(inputs, ids, how)
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


def _on_cluster(inputs: Inputs, ids: NDArray, how: dict[str, Any]) -> NDArray[np.float64]:
    """What `token_nll` gives, computed by the workers of a cluster."""
    arguments = inputs.arguments
    if arguments.device != "cpu" or arguments.metrics is not None:
        raise OptionError("--device and --metrics are for this process, expected neither with --scheduler or --workers")
    path = arguments.model.absolute()
    model = ModelFile(str(path), digest_of(path), arguments.allow_nan, arguments.i2s_layout, tuple(sorted(inputs.overrides.items())))
    with connected(arguments) as client:
        return cluster_nll(client, model, ids, **how)
