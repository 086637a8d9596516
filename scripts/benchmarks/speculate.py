"""Decode with and without speculation, of texts that repeat and texts that do not.

The demo model tells a story by itself. Other texts are replayed: their tokens follow each other whatever the model would choose, so that a
random model of any shape can be measured. A word, a number, a blank or a sign of a text is one token.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_np import KVCache, Model, Speculation, embedded, forward, load, prefill, stream
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.generate import stepper
from bitnet_np.network import Runtime
from bitnet_np.speculation import Proposals, Speculator
from bitnet_np.text.tokenizer import tokenizer_from

from . import models
from .report import Bar, Table, bar_label, spread
from .rounds import Case, Results, Sample
from .setup import Setup
from .stats import ratios, summary

ROOT = Path(__file__).parents[2]
JSON, CODE, PROSE = ROOT / "scripts/costs.json", ROOT / "bitnet_np/files/hf_config.py", ROOT / "docs/contract.md"
PROMPT = 128  # tokens before a replayed text
LEAST = 64  # tokens of a replayed text, for drafts to find their length
WAYS = ("one at a time", "speculation")
STORY = "Once upon a time"


class Text(NamedTuple):
    """A text to replay."""

    name: str
    prompt: list[int]
    tokens: list[int]


def words(path: Path, count: int) -> list[int]:
    """The first tokens of a file: numbers in the order in which its words first occur."""
    ids: dict[str, int] = {}
    pieces = re.findall(r"[A-Za-z]+|\d| +|\n+|[^\w\s]|_", path.read_text("utf-8"))
    return [ids.setdefault(piece, len(ids)) for piece in pieces[:count]]


def texts(model: Model, steps: int) -> list[Text]:
    """What is replayed, of ids that the model has."""
    steps = max(steps, LEAST)
    size = min(PROMPT, (model.config.context - steps) // 2)
    json = words(JSON, size)
    result = [Text("JSON again", json, (json * steps)[:steps])]
    for name, path in (("code", CODE), ("prose", PROSE)):
        ids = words(path, size + steps)
        result.append(Text(name, ids[:size], ids[size:]))
    pairs = [id for n in range(size + steps) for id in (1, 2, 3 + n % 200)]  # always the same pair, and then something else
    result.append(Text("misleading", pairs[:size], pairs[size : size + steps]))
    return [Text(name, *([id % model.config.vocab for id in ids] for ids in rest)) for name, *rest in result]


def cases(setup: Setup) -> Iterator[Case]:
    """Pairs of cases, which give the same bits."""
    yield from story_cases()
    for text in texts(setup.model, setup.steps):
        for way in WAYS:
            yield replay_case(setup.model, text, way)


def story_cases() -> Iterator[Case]:
    """The demo model's story, by `stream`."""
    with embedded.demo_path() as path:
        model, file = load(path), open_gguf(path)
    prompt = tokenizer_from(file.metadata, file.path).encode(STORY)

    def tell(way: str) -> tuple[float, list[int], Speculation]:
        speculation = Speculation()
        tokens = stream(model, prompt, embedded.DEMO_TOKENS, speculation=speculation if way == WAYS[1] else None)
        chosen = [next(tokens)]  # the prompt's pass
        begin = time.perf_counter()
        chosen += tokens
        return time.perf_counter() - begin, chosen, speculation

    for way in WAYS:

        def run(threads: int, way: str = way) -> Sample:
            seconds, _, speculation = tell(way)
            return counted(seconds, speculation)

        yield Case(
            "speculate",
            f"demo story, {way}",
            run,
            check=lambda way=way: np.array(tell(way)[1]),  # type: ignore[misc]
            expected=lambda: np.array(tell(WAYS[0])[1]),
            tokens=embedded.DEMO_TOKENS - 1,
            work=0.1,
        )


def replay_case(model: Model, text: Text, way: str) -> Case:
    """The case of a text after its prompt, whose pass is not timed; all logits of each token."""
    cache = KVCache(model.config, 1, len(text.prompt) + len(text.tokens))

    def replay(see: Callable[[NDArray[np.float32]], None]) -> Sample:
        if cache.lengths[0] < len(text.prompt):
            prefill(model, [text.prompt], cache)
        cache.truncate(0, len(text.prompt))
        speculation = Speculation()
        proposals = Proposals(speculation, model.config.vocab, np.array(text.prompt), len(text.tokens))
        step = stepper(model, cache) if way == WAYS[0] else Speculator(Runtime(model), cache, None, proposals)
        begin = time.perf_counter()
        for token in text.tokens:
            see(step(np.array([token])))
        return counted(time.perf_counter() - begin, speculation)

    def logits() -> NDArray[np.float32]:
        rows: list[NDArray[np.float32]] = []
        replay(lambda row: rows.append(row[0].copy()))
        return np.stack(rows)

    return Case(
        "speculate",
        f"{text.name}, {way}",
        lambda threads: replay(lambda row: None),
        check=logits,
        expected=lambda: in_one_pass(model, text),
        tokens=len(text.tokens),
        macs=len(text.tokens) * models.ternary_weights(model),
    )


def in_one_pass(model: Model, text: Text) -> NDArray[np.float32]:
    """The logits of a text after its prompt, by one pass over the text."""
    cache = KVCache(model.config, 1, len(text.prompt) + len(text.tokens))
    prefill(model, [text.prompt], cache)
    return forward(model, [text.tokens], cache)[0]


def counted(seconds: float, speculation: Speculation) -> Sample:
    counter = speculation.counter
    return {"seconds": seconds, "passes": counter.passes, "drafted": counter.drafted, "accepted": counter.accepted}


def tables(setup: Setup, results: Results) -> list[Table]:
    """Tokens per second in both ways, and the ratios of the rounds."""
    columns = ["text", "threads", *(f"{way}, tok/s" for way in WAYS), "ratio (min-max)", "drafted", "accepted", "passes"]
    table = Table("speculate: prompt lookup against one token at a time", columns, unit="times as fast as one at a time")
    measured = {case.name: case for case in results.of("speculate")}
    for name, plain in measured.items():
        text, _, way = name.rpartition(", ")
        drafted = measured.get(f"{text}, {WAYS[1]}")
        if way != WAYS[0] or drafted is None:
            continue
        for n in results.threads(plain):
            rates = [[case.tokens / second for second in results.values(case, n)] for case in (plain, drafted)]
            gain = ratios(results.values(plain, n), results.values(drafted, n))
            numbers = (_middle(results.values(drafted, n, key)) for key in ("drafted", "accepted", "passes"))
            table.rows.append([text, str(n), *map(spread, rates), spread(gain, ".2f"), *numbers])
            table.bars.append(Bar(bar_label(text, n), summary(gain)))
    table.notes.append(f"{', '.join(sorted({path.name for path in (JSON, CODE, PROSE)}))}: replayed; the demo model's story is its own")
    return [table]


def _middle(values: Sequence[float]) -> str:
    return f"{summary(values).median:.0f}"
