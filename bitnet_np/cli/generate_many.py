"""`bitnet-np generate --prompts-file F --batch N`: continue many prompts, some at a time."""

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from ..base.errors import EmptyInputError, OptionError, shown
from ..base.tables import printable
from ..base.validate import integer
from ..files.safetensors_file import strict_json
from ..files.tensors import of_file
from ..generation.batch import Completion, Continuation, Request, check_id, complete
from ..generation.sampling import Sampling
from ..text.tokenizer import Tokenizer
from ..traces.token_files import parse_numbers
from . import progress
from .arguments import dialect_of
from .compiling import working_time
from .inputs import opened

DEFAULT_BATCH = 4
_LONGEST_LINE = 1 << 25  # bytes: more than any context holds


def read_prompts(path: Path) -> Iterator[tuple[int, str | int, str | list[int]]]:
    """Yields line number, id, and text or token ids of each line that is not blank. Raises errors that name file and line."""
    first_lines: dict[str | int, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            with of_file(where):
                name, prompt = _entry(line, where)
                if name in first_lines:
                    raise OptionError(f"id {shown(name)} is also that of line {first_lines[name]}")
            first_lines[name] = number
            yield number, name, prompt


def _entry(line: bytes, where: str) -> tuple[str | int, str | list[int]]:
    """The id of a line, and its text or token ids. Raises OptionError or FileFormatError."""
    if len(line) > _LONGEST_LINE:
        raise OptionError(f"more than {_LONGEST_LINE:,} bytes, which a line has at most")
    entry = strict_json(line, where)
    if not isinstance(entry, dict) or set(entry) not in ({"id", "prompt"}, {"id", "tokens"}):
        keys = sorted(entry) if isinstance(entry, dict) else entry
        raise OptionError(f"{shown(keys)}, expected an object with 'id', and 'prompt' or 'tokens'")
    name: Any = entry["id"]
    prompt: Any = entry.get("prompt", entry.get("tokens"))
    check_id(name)
    if "prompt" in entry and not isinstance(prompt, str):
        raise OptionError(f"prompt is {shown(prompt)}, expected a string")
    if "tokens" in entry and not (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        raise OptionError(f"tokens is {shown(prompt)}, expected a list of integers")
    return name, prompt


def run_prompts(arguments: argparse.Namespace, model_path: Path) -> int:
    """Run the command; returns the exit code."""
    if arguments.uniforms is not None:
        raise OptionError("--uniforms is for one prompt; with --prompts-file the numbers of each sequence come from --seed and its id")
    batch = DEFAULT_BATCH if arguments.batch is None else integer("--batch", arguments.batch, 1)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    lines = list(read_prompts(arguments.prompts_file))
    if not lines:
        raise EmptyInputError(f"{arguments.prompts_file}: Empty batch provided")
    inputs = opened(arguments, model_path)
    tokenizer = None
    if arguments.chat or any(isinstance(prompt, str) for _, _, prompt in lines):
        tokenizer = inputs.tokenizer()
    stops = stops_of(arguments, tokenizer)
    model = inputs.model()
    sequences = []
    for number, name, prompt in lines:
        with of_file(f"{arguments.prompts_file}, line {number}"):
            request = Request(name, _encoded(prompt, tokenizer, arguments.chat), arguments.n, sampling, arguments.seed, stops)
            sequences.append(Continuation.of(model, request))
    completions = complete(model, sequences, batch, dialect=dialect_of(arguments), ops=arguments.ops)
    return _print(completions, len(sequences), batch, tokenizer, arguments.json)


def _print(completions: Iterable[Completion], count: int, batch: int, tokenizer: Tokenizer | None, as_json: bool) -> int:
    """Print each completion when it is there, and how long they took; returns the exit code."""
    start = working_time()
    advance = progress.bar("generating")
    done: list[Completion] = []
    for completion in completions:
        done.append(completion)
        progress.clear()
        print(_line(completion, tokenizer, as_json), flush=True)
        advance(len(done), count)
    seconds, total = working_time() - start, sum(len(completion.tokens) for completion in done)
    latency = sorted(completion.seconds for completion in done)
    print(
        f"{len(done)} sequences, {batch} at a time: {total} tokens in {seconds:.1f} s, {total / seconds:.1f} tokens/s; "
        f"a sequence took {median(latency):.2f} s (median), {latency[-1]:.2f} s (longest)",
        file=sys.stderr,
    )
    return 2 if any(completion.error for completion in done) else 0


def stops_of(arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> Collection[int]:
    """The tokens that end a text: those of --stop, or the model's own where there is text."""
    if arguments.stop is not None:
        return parse_numbers("--stop", arguments.stop, int)
    return tokenizer.stops if tokenizer else ()


def _encoded(prompt: str | list[int], tokenizer: Tokenizer | None, chat: bool) -> list[int]:
    if not isinstance(prompt, str):
        if chat:
            raise OptionError("--chat needs a prompt, not tokens")
        return prompt
    assert tokenizer is not None
    return tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)


def _line(completion: Completion, tokenizer: Tokenizer | None, as_json: bool) -> str:
    entry: dict[str, Any] = {"id": completion.request.id, "tokens": completion.tokens}
    if tokenizer:
        entry["text"] = tokenizer.decode(completion.tokens, after=completion.request.prompt)
    if completion.error:
        entry["error"] = completion.error
    if as_json:
        return json.dumps(entry)
    text = entry.get("text", ",".join(map(str, completion.tokens)))
    return printable(f"{entry['id']}") + "\t" + printable(text) + (f"\t{printable(completion.error)}" if completion.error else "")
