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
from . import progress
from .arguments import dialect_of
from .compiling import working_time
from .inputs import Inputs, opened, token_ids
from .printing import print_json

MOST = 64


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


def _stops(arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> Collection[int]:
    """The tokens that end a text: those of --stop, or the model's own where there is text."""
    if arguments.stop is not None:
        return parse_numbers("--stop", arguments.stop, int)
    return tokenizer.stops if tokenizer else ()


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
        most = embedded.DEMO_TOKENS if arguments.model is None else MOST
        path = Path(arguments.model or stack.enter_context(embedded.demo_path()))
        inputs = opened(arguments, path)
        tokenizer = inputs.tokenizer() if arguments.text is not None else None
        ids = _prompt(inputs, tokenizer)
        tokens = _stream(inputs, ids, most, _stops(arguments, tokenizer))
        return _print(arguments.json, ids, tokens, tokenizer)


def _print(as_json: bool, ids: NDArray, tokens: Iterator[int], tokenizer: Tokenizer | None) -> int:
    """Print what continues the prompt, and how fast it came; returns the exit code."""
    decoder = tokenizer.decode_stream(after=ids.tolist()) if tokenizer else None
    new: list[int] = []
    pieces: list[str] = []
    start = working_time()
    first = None
    try:
        for token in tokens:
            first = first or working_time()
            new.append(token)
            pieces.append(decoder.feed(token) if decoder else f"{',' if len(new) > 1 else ''}{token}")
            if not as_json:
                progress.hide()
                print(pieces[-1], end="", flush=True)
    finally:  # also for an error, whose message begins a line
        end = working_time()
        if pieces and not as_json:
            print(decoder.finish() if decoder else "", flush=True)
    prefill = len(ids) / ((first or end) - start)
    decode = (len(new) - 1) / (end - first) if first and len(new) > 1 else None
    if as_json:
        text = {"text": "".join(pieces) + decoder.finish()} if decoder else {}
        speed = {"prefill_tokens_per_second": prefill, "decode_tokens_per_second": decode}
        print_json({"prompt": ids.tolist(), "tokens": new} | text | speed)
    elif not pieces:
        print()
    rate = "" if decode is None else f", decode {decode:.1f} tokens/s ({len(new)} tokens)"
    print(f"prefill {prefill:.1f} tokens/s ({len(ids)} tokens){rate}", file=sys.stderr)
    return 0
