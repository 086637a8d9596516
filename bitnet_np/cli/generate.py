"""`bitnet-np generate`: continue a prompt, token by token."""

import argparse
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError, ShapeError
from ..files import embedded
from ..generation.generate import stream
from ..generation.sampling import Sampling
from ..text.tokenizer import Tokenizer
from ..traces.token_files import parse_numbers
from . import generate_many as batch_command
from . import progress
from .arguments import add_computing_arguments, add_model_and_tokens, dialect_of
from .inputs import Inputs, opened, token_ids
from .printing import print_json

SUMMARY = "Continue a prompt, token by token."
TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    batch_command.add_arguments(parser, add_model_and_tokens(parser, "the embedded demo model", "--prompt"))
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template as the user's message")
    parser.add_argument(
        "-n",
        type=int,
        metavar="N",
        help=f"most tokens to generate (default {TOKENS}, {embedded.DEMO_TOKENS} with the demo model, or what fits the context)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="sampling temperature; 0 (default) is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample among the K most likely tokens (default 0: all)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the fewest tokens whose probabilities add up to P (default 1: all)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed for sampling (default 0)")
    parser.add_argument(
        "--uniforms", metavar="0.1,0.7", help="numbers from 0 to 1 to sample with instead of the seed's, one for each token"
    )
    parser.add_argument("--stop", default=None, metavar="7,8", help="token ids that end the text (default: the model's end tokens)")
    add_computing_arguments(parser)


def _prompt(inputs: Inputs, tokenizer: Tokenizer | None) -> NDArray:
    """The token ids of the prompt, [T]."""
    arguments = inputs.arguments
    if arguments.chat:
        if tokenizer is None:
            raise OptionError("--chat needs --prompt")
        return np.asarray(tokenizer.chat([{"role": "user", "content": arguments.text}]))
    ids = token_ids(arguments, lambda: tokenizer or inputs.tokenizer())
    if ids.ndim != 1:
        raise ShapeError(f"token ids have shape {list(ids.shape)}, expected [T]: one prompt")
    return ids


def _stream(inputs: Inputs, ids: NDArray, most: int, stops: Collection[int]) -> Iterator[int]:
    """The new tokens, at most `most` where the arguments do not say how many."""
    arguments = inputs.arguments
    numbers = None if arguments.uniforms is None else parse_numbers("--uniforms", arguments.uniforms, float)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    model = inputs.model()
    return stream(
        model,
        ids.tolist(),
        max(1, min(most, model.config.context - len(ids))) if arguments.n is None else arguments.n,
        sampling=sampling,
        numbers=numbers,
        seed=arguments.seed,
        stop=stops,
        dialect=dialect_of(arguments),
        ops=arguments.ops,
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the continuation, token by token; returns the exit code."""
    with ExitStack() as stack:
        most = embedded.DEMO_TOKENS if arguments.model is None else TOKENS
        path = Path(arguments.model or stack.enter_context(embedded.demo_path()))
        if arguments.prompts_file is not None:
            arguments.n = most if arguments.n is None else arguments.n
            return batch_command.run_prompts(arguments, path)
        if arguments.batch is not None:
            raise OptionError("--batch needs --prompts-file")
        inputs = opened(arguments, path)
        tokenizer = inputs.tokenizer() if arguments.text is not None else None
        ids = _prompt(inputs, tokenizer)
        tokens = _stream(inputs, ids, most, batch_command.stops_of(arguments, tokenizer))
        decoder = tokenizer.decode_stream(after=ids.tolist()) if tokenizer else None
        new: list[int] = []
        pieces: list[str] = []
        start = progress.working_time()
        first = None
        try:
            for token in tokens:
                first = first or progress.working_time()
                new.append(token)
                pieces.append(decoder.feed(token) if decoder else f"{',' if len(new) > 1 else ''}{token}")
                if not arguments.json:
                    progress.hide()
                    print(pieces[-1], end="", flush=True)
        finally:  # also for an error, whose message begins a line
            end = progress.working_time()
            if pieces and not arguments.json:
                print(decoder.finish() if decoder else "", flush=True)
    prefill = len(ids) / ((first or end) - start)
    decode = (len(new) - 1) / (end - first) if first and len(new) > 1 else None
    if arguments.json:
        text = {"text": "".join(pieces) + decoder.finish()} if decoder else {}
        speed = {"prefill_tokens_per_second": prefill, "decode_tokens_per_second": decode}
        print_json({"prompt": ids.tolist(), "tokens": new} | text | speed)
    elif not pieces:
        print()
    rate = "" if decode is None else f", decode {decode:.1f} tokens/s ({len(new)} tokens)"
    print(f"prefill {prefill:.1f} tokens/s ({len(ids)} tokens){rate}", file=sys.stderr)
    return 0
