"""Train the embedded demo model from scratch: `python scripts/demo/train.py --out FOLDER`.

A small bitnet-b1.58 model learns stories and sums from a seeded generator (writer/), with AdamW (trainer/) and the gradients of
bitnet_np.training.gradients. The same settings give the same bits on every machine and with any number of threads. An interrupted run
that is started again goes on from its last checkpoint and ends in the same bits.
FOLDER gets checkpoint.npz, log.jsonl (the loss of each step, and the held-out loss at checkpoints) and model.gguf.

`--evaluate [MODEL]` measures a model (default: the embedded one): perplexity on held-out text, and the share of right answers.
`--record FOLDER` writes greedy.json, what the embedded model says after PROMPTS.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from trainer import adamw, bpe, checkpoint, export
from trainer.checkpoint import State
from trainer.evaluate import report
from trainer.settings import DEMO, Settings
from writer.corpus import document, sequence

from bitnet_np import generate, load
from bitnet_np.base.errors import Error
from bitnet_np.cli import progress
from bitnet_np.files import embedded
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.model.records import Model
from bitnet_np.testing.selftest import digest, noise
from bitnet_np.text.tokenizer import Tokenizer, tokenizer_from
from bitnet_np.training.gradients import loss_and_gradients, parameter_shapes

PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a little rabbit",
    "One day, Anna and Tom",
    "Q: Tom had 3 apples and found 4 more. How many apples does Tom have now?\nA:",
    "Leo went to the barn. Mia ran to the beach. Tom walked to the park.\nQ: Where is Mia?\nA:",
    "Q: What does a cow say?\nA:",
    "Q: 13 - 5 = ?\nA:",
)
EVERY = 250  # steps between checkpoints, at which the held-out loss is measured
HELD_OUT = 32  # sequences of held-out text that measure it


def initial(settings: Settings) -> State:
    """The state before the first step: matrices uniform around 0, all gains 1, moments 0."""
    parameters = {}
    for i, (name, shape) in enumerate(parameter_shapes(settings.config).items()):
        spread = np.float32(3**0.5 * settings.deviation)
        parameters[name] = spread * noise(settings.seed << 16 | i, *shape) if len(shape) == 2 else np.ones(shape, np.float32)
    first, second = ({name: np.zeros_like(x) for name, x in parameters.items()} for _ in range(2))
    return State(parameters, first, second)


def learned_tokenizer(settings: Settings) -> dict[str, Any]:
    """The tokenizer, learned from the first documents of the training text, as keys and values of a GGUF file."""
    texts = (document("train", settings.seed, i).text for i in range(settings.tokenizer_documents))
    return bpe.train(texts, settings.vocabulary)


def batch(settings: Settings, tokenizer: Tokenizer, split: str, first: int, n: int) -> NDArray[np.int64]:
    """Sequences first, first + 1, ... of a split, [n, T]."""
    assert tokenizer.eos is not None
    encode = partial(tokenizer.encode, add_bos=False)
    return np.stack([sequence(split, settings.seed, first + i, encode, tokenizer.eos, settings.context) for i in range(n)])


def keep_lines(log: Path, steps: int) -> None:
    """Drop the lines that a run wrote after its last checkpoint."""
    lines = log.read_text("utf-8").splitlines(keepends=True) if log.exists() else []
    log.write_text("".join(lines[:steps]), "utf-8")


def train(
    settings: Settings,
    folder: Path,
    *,
    stop: int | None = None,
    every: int = EVERY,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> State:
    """Train, or go on training, up to step `stop` (default: the end), with a checkpoint every `every` steps and at the stop."""
    folder.mkdir(parents=True, exist_ok=True)
    saved, log = folder / "checkpoint.npz", folder / "log.jsonl"
    state, keys = checkpoint.load(saved, settings) if saved.exists() else (initial(settings), learned_tokenizer(settings))
    keep_lines(log, state.step)
    tokenizer = tokenizer_from(keys, saved)
    config, last = settings.config, settings.steps if stop is None else min(stop, settings.steps)
    held_out = batch(settings, tokenizer, "held-out", 0, HELD_OUT)
    with log.open("a", encoding="utf-8") as lines:
        while state.step < last:
            start = time.perf_counter()
            tokens = batch(settings, tokenizer, "train", state.step * settings.batch, settings.batch)
            loss, gradients = loss_and_gradients(config, state.parameters, tokens)
            length = adamw.update(state.parameters, gradients, state.first, state.second, state.step, settings)
            line = {"step": state.step + 1, "loss": loss, "norm": length, "rate": settings.rate(state.step)}
            state.step += 1
            line["seconds"] = round(time.perf_counter() - start, 4)
            if state.step % every == 0 or state.step == last:
                line["held_out"] = loss_and_gradients(config, state.parameters, held_out)[0]
            lines.write(json.dumps(line) + "\n")
            lines.flush()
            if "held_out" in line:
                checkpoint.save(saved, state, settings, keys)
            show(state.step, settings.steps)
    export.write(folder / "model.gguf", config, state.parameters, keys)
    return state


def load_model(path: Path) -> tuple[Model, Tokenizer]:
    return load(path), tokenizer_from(open_gguf(path).metadata, path)


def record(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """Write greedy.json: what the model says after PROMPTS."""
    lines = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        tokens = generate(model, ids, embedded.DEMO_TOKENS, stop=tokenizer.stops)[len(ids) :]
        lines.append(json.dumps({"prompt": prompt, "tokens": tokens, "text": tokenizer.decode(tokens)}))
    (folder / "greedy.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FOLDER", help="train in this folder, or go on from its checkpoint")
    what.add_argument("--evaluate", nargs="?", type=Path, const=False, metavar="MODEL", help="measure a model (default: the embedded one)")
    what.add_argument("--record", type=Path, metavar="FOLDER", help="record there what the embedded model says")
    parser.add_argument("--steps", type=int, default=DEMO.steps, help=f"training steps (default {DEMO.steps})")
    parser.add_argument("--documents", type=int, default=300, help="documents of each split to evaluate with (default 300)")
    parser.add_argument(
        "--threads", type=int, default=numba.config.NUMBA_NUM_THREADS, help="threads to train with; the result does not depend on it"
    )
    options = parser.parse_args(argv)
    numba.set_num_threads(options.threads)
    try:
        with progress.compiling():
            if options.out is not None:
                state = train(replace(DEMO, steps=options.steps), options.out, show=progress.bar("training"))
                file = options.out / "model.gguf"
                print(f"{file}: {file.stat().st_size} bytes after {state.step} steps")
                print(f"sha256 of the parameters {digest(*state.parameters.values())}")
                return 0
            with embedded.demo_path() as path:
                model, tokenizer = load_model(options.evaluate or path)
                if options.record is not None:
                    record(model, tokenizer, options.record)
                else:
                    print(report(model, tokenizer, DEMO.seed, options.documents, progress.bar))
            return 0
    except (Error, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
