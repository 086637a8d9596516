"""The options of `generate` for speculation, and what is printed of it."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.errors import OptionError
from ..files.load import model_from, open_model
from ..generation.speculation import DraftModel, Speculation
from ..model.records import Model
from . import progress
from .inputs import Inputs

_VOCABULARY = "tokenizer.ggml.tokens"
_PAYS_FROM = 1 << 26  # layers * width * width of the feed-forward network: some milliseconds a token


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --speculate, --no-speculate and --draft."""
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--speculate",
        action=argparse.BooleanOptionalAction,
        help="draft tokens that followed the same ones before, and check several in one pass: the same tokens, faster where text repeats "
        "(default: for one prompt on the CPU, unless the model is so small that drafting slows it down)",
    )
    ways.add_argument(
        "--draft", type=Path, metavar="MODEL", help="speculate with the tokens that this model drafts; its vocabulary must be the same"
    )


def pays(model: Model) -> bool:
    """Whether drafts are worth it for one prompt, whatever its text: they cost some 20 us a token, and no less on small models."""
    config = model.config
    return config.n_layers * config.width * config.ffn >= _PAYS_FROM


def speculation_of(inputs: Inputs, slots: int, by_default: bool) -> Speculation | None:
    """How to speculate, `by_default` where the arguments say nothing; slots: the sequences that a draft model works on at a time.

    Raises OptionError for a draft model whose file has another vocabulary than the model's, and what loading it raises.
    """
    arguments, source = inputs.arguments, inputs.source
    if arguments.draft is None:
        return Speculation() if (by_default if arguments.speculate is None else arguments.speculate) else None
    draft = open_model(arguments.draft)
    ours, theirs = (list(file.metadata.get(_VOCABULARY, ())) for file in (source, draft))
    if ours and theirs and ours != theirs:
        raise OptionError(
            f"--draft {arguments.draft}: its vocabulary of {len(theirs)} tokens is not the {len(ours)} tokens of {source.path}"
        )
    return Speculation(DraftModel(model_from(draft, progress.bar("checking weights")), slots))


def counts(speculation: Speculation | None) -> dict[str, Any]:
    """What speculation did, for JSON: passes, drafted and accepted tokens; nothing without it."""
    return {"speculation": asdict(speculation.counter)} if speculation else {}


def described(speculation: Speculation | None) -> str:
    """What speculation did, as the end of a line."""
    if speculation is None:
        return ""
    counter = speculation.counter
    return f"; {counter.accepted} of {counter.drafted} drafts accepted in {counter.passes} passes"
