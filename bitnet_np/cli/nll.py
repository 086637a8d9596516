"""`bitnet-np nll`: how well a model predicts a text."""

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError
from ..generation.nll import token_nll
from ..testing.selftest import digest
from ..traces.llama_base import Divergence, divergence, save_base
from . import progress
from .arguments import check_out, dialect_of, save_npy
from .inputs import Inputs, opened
from .printing import answer

PERCENTILES = (1, 10, 50, 90, 99, 99.9)
"""Of the KL divergences of tokens, as llama-perplexity prints them."""


def run(arguments: argparse.Namespace) -> int:
    """Print the mean and the perplexity, write the values to --out; returns the exit code."""
    check_out("--out", arguments.out, ".npy")
    _check_chunked(arguments)
    inputs = opened(arguments)
    ids = inputs.token_ids() if arguments.kl_divergence_base is None else None
    model, path = inputs.model(), arguments.kl_divergence_base or arguments.save_all_logits
    how: dict[str, Any] = {"dialect": dialect_of(arguments), "ops": arguments.ops, "progress": progress.bar("reading")}
    compared = None
    if ids is None:
        compared = divergence(model, path, bos=_bos(inputs), **how)
        values = compared.nll
    elif path is not None:
        values = save_base(model, ids, path, context=arguments.ctx_size, bos=_bos(inputs), **how)
    else:
        values = token_nll(model, ids, stride=arguments.stride, **how)
    if arguments.out is not None:
        save_npy(arguments.out, values)
    facts = _facts(values) | ({} if ids is None else {"tokens": len(ids)}) | (_compared(compared) if compared else {})
    text = f"mean negative log-likelihood  {facts['mean_nll']:.6f} nats a token ({len(values)} predicted)\n"
    text += f"perplexity                    {_with_error(facts)}"
    if compared:
        kl, top = facts["kl"], facts["same_top"]
        text += f"\nperplexity of the base        {_with_error(facts['base'])}\n"
        text += f"KL divergence from the base   mean {kl['mean']:.6f} +/- {_error(compared.kl):.6f}, largest {kl['max']:.6f} nats\n"
        text += (
            f"its percentiles               {', '.join(f'{q} %: {x:.6f}' for q, x in zip(PERCENTILES, kl['percentiles'], strict=True))}\n"
        )
        text += f"same token on top             {top:.2%} +/- {_error(compared.same_top):.2%}"
    return answer(arguments, facts | {"sha256": digest(values)}, text)


def _check_chunked(arguments: argparse.Namespace) -> None:
    """Raises OptionError for options that do not go with the chunks of llama.cpp's file, or need it."""
    ways = ("--kl-divergence-base", "--save-all-logits", "--stride")
    given = [name for name in ways if getattr(arguments, name[2:].replace("-", "_")) is not None]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} exclude each other")
    if arguments.ctx_size is not None and arguments.save_all_logits is None:
        raise OptionError(f"--ctx-size is {arguments.ctx_size}, expected it with --save-all-logits alone")


def _bos(inputs: Inputs) -> int | None:
    """The token that llama.cpp puts in place of the first of a chunk; None where the model's file wants none, or has no vocabulary."""
    if "tokenizer.ggml.model" not in inputs.source.metadata:
        return None
    tokenizer = inputs.tokenizer()
    return tokenizer.bos if tokenizer.add_bos else None


def _facts(values: NDArray[np.float64]) -> dict[str, Any]:
    """The mean of negative log-likelihoods, the perplexity that it is, and its standard error."""
    mean = float(values.mean())
    perplexity = float(np.exp(min(mean, 700.0)))
    return {"mean_nll": mean, "perplexity": perplexity, "perplexity_error": perplexity * _error(values)}


def _error(values: NDArray) -> float:
    """The standard error of a mean, as llama-perplexity computes it; 0 for one value."""
    return float(values.std() / np.sqrt(max(len(values) - 1, 1)))


def _with_error(facts: dict[str, Any]) -> str:
    return f"{facts['perplexity']:.4f} +/- {facts['perplexity_error']:.4f}"


def kl_facts(kl: NDArray[np.float64]) -> dict[str, Any]:
    """The mean, the largest and the PERCENTILES of KL divergences."""
    return {"mean": float(kl.mean()), "max": float(kl.max()), "percentiles": np.percentile(kl, PERCENTILES).tolist()}


def _compared(compared: Divergence) -> dict[str, Any]:
    """What is said of a comparison with a base."""
    kl = kl_facts(compared.kl)
    return {"predicted": len(compared.kl), "base": _facts(compared.base_nll), "kl": kl, "same_top": float(compared.same_top.mean())}
