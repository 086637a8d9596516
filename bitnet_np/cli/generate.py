"""`bitnet-np generate`: continue a prompt, token by token.

Examples:
  bitnet-np generate --prompt "Once upon a time"
  bitnet-np generate model.gguf --tokens 1,2,3 -n 8 --temperature 0.8 --seed 3
"""

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
from . import generate_many, progress
from .arguments import A_MODEL, COMPUTING, DOWNLOAD, TOKENS, dialect_of
from .inputs import Inputs, opened, token_ids
from .printing import print_json

SUMMARY = "Continue a prompt, token by token."
MOST = 64


ARGUMENTS = f"""
MODEL?: {A_MODEL} (default: the embedded demo model)
{DOWNLOAD}
one of
{TOKENS.replace("--text ", "--prompt text@")}
--prompts-file F: file with a JSON object on each line: {{"id": ..., "prompt": text}} or {{"id": ..., "tokens": [...]}}

--batch N: number of prompts computed at a time (default {generate_many.DEFAULT_BATCH}); the result does not depend on it
--chat: put the prompt into the model's chat template as the user's message
-n N: most tokens to generate (default {MOST}, {embedded.DEMO_TOKENS} with the demo model, or what fits the context)
--temperature X = 0.0: sampling temperature; 0 (default) is greedy
--top-k K = 0: sample among the K most likely tokens (default 0: all)
--top-p P = 1.0: sample among the fewest tokens whose probabilities add up to P (default 1: all)
--seed N = 0: random seed for sampling (default 0)
--uniforms 0.1,0.7: numbers from 0 to 1 to sample with instead of the seed's, one for each token
--stop 7,8: token ids that end the text (default: the model's end tokens)
{COMPUTING}
"""


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
        most = embedded.DEMO_TOKENS if arguments.model is None else MOST
        path = Path(arguments.model or stack.enter_context(embedded.demo_path()))
        if arguments.prompts_file is not None:
            arguments.n = most if arguments.n is None else arguments.n
            return generate_many.run_prompts(arguments, path)
        if arguments.batch is not None:
            raise OptionError("--batch needs --prompts-file")
        inputs = opened(arguments, path)
        tokenizer = inputs.tokenizer() if arguments.text is not None else None
        ids = _prompt(inputs, tokenizer)
        tokens = _stream(inputs, ids, most, generate_many.stops_of(arguments, tokenizer))
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
