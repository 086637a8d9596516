"""Measures whether the judge finds bugs, and whether it leaves honest engines alone.

A small separate engine (judging/engine.py) gets realistic faults, one at a time (judging/faults.py), and its dump is judged; so are those
of models with experts (judging/experts.py), with local layers and with YaRN (judging/rotations.py), and of embedding models
(judging/pooling.py). A fault should be found, blamed on the
right operation of the right layer, and named by its id in the catalogue of mistakes. Then honest variants of the engine, which sum in other
orders or round to float16 as declared, are judged: every alarm there is false.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from judging.engine import KINDS, Engine, Floats, accumulate, embedded_model, precise
from judging.experts import TOKENS_OF_EXPERTS, expert_faults
from judging.faults import Fault, faults
from judging.pooling import pooling_faults
from judging.rotations import rotation_faults
from judging.workers import add_cluster_arguments, over_workers
from numpy.typing import NDArray
from tqdm import tqdm

from bitnet_np import BITNET_CPP, EXACT, Dialect, Model, forward
from bitnet_np.engine.cache import KVCache
from bitnet_np.files import embedded
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.edits.kinds import KINDS as KINDS_OF_EDITS
from bitnet_np.judge.law.precision import FLOAT32, Precision
from bitnet_np.judge.mistakes.catalogue import CATALOGUE, HIDDEN, at_operation
from bitnet_np.judge.mistakes.hypotheses import in_engine, sites
from bitnet_np.judge.readings.table import FACTS, READINGS
from bitnet_np.judge.report.report import Report
from bitnet_np.judge.variant import Variant
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.records import Yarn
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key, Trace

# --- honest runs ----------------------------------------------------------------------------------------------------------------------


def honest(model: Model, tokens: NDArray[np.int64]) -> Iterator[tuple[str, dict[Key, Floats], Dialect]]:
    """Correct dumps, each computed in another way, with the dialect that it declares."""
    for in_float16, dialect in ((False, EXACT), (True, BITNET_CPP)):
        ways: dict[str, Callable[[Floats, Floats], Floats]] = {
            "float32 BLAS": lambda x, w: x @ w.T,
            "rounded once": precise,
            "one term at a time": accumulate(1),
            "sums of 8": accumulate(8),
        }
        for name, dot in ways.items():
            yield f"{dialect.name}, {name}", Engine(model, tokens, dot=dot, in_float16=in_float16).run(), dialect
        for chunk in (1, 5):
            yield f"{dialect.name}, kernels in chunks of {chunk}", _kernels(model, tokens, chunk, dialect), dialect


def _kernels(model: Model, tokens: NDArray[np.int64], chunk: int, dialect: Dialect) -> dict[Key, Floats]:
    pieces: dict[Key, list[Floats]] = {}
    cache = KVCache(model.config, 1, len(tokens))
    for i in range(0, len(tokens), chunk):
        record = lambda name, layer, array: pieces.setdefault(Key(name, layer), []).append(array.reshape(len(array), -1).copy())  # noqa: E731
        forward(model, tokens[None, i : i + chunk], cache, dialect=dialect, record=record)
    return {key: np.concatenate(value) for key, value in pieces.items() if not key.name.endswith(("_codes", "_scale"))}


def others() -> Iterator[tuple[Model, Fault]]:
    """The faults of engines of other families, each with its model."""
    yield from expert_faults()
    yield from rotation_faults()
    yield from pooling_faults()


@lru_cache
def embedded_case() -> tuple[Model, NDArray[np.int64]]:
    """The embedded model and its tokens."""
    return embedded_model(), embedded.recording()["tokens_T17"].astype(np.int64)


@lru_cache
def every_fault() -> list[tuple[Model, NDArray[np.int64], Fault]]:
    """All faults, each with its model and tokens. A worker makes them itself and is sent numbers."""
    model, tokens = embedded_case()
    return [(model, tokens, fault) for fault in faults()] + [(own, TOKENS_OF_EXPERTS, fault) for own, fault in others()]


# --- report ---------------------------------------------------------------------------------------------------------------------------


def judged(
    model: Model,
    dump: dict[Key, Floats],
    tokens: NDArray[np.int64],
    dialect: Dialect,
    only: tuple[str, ...] = (),
    precision: Precision | None = FLOAT32,
) -> Report:
    points = {key: value for key, value in dump.items() if not only or key.name in only}
    return judge_trace(model, Trace(points=points, tokens=None, origin="dump"), tokens, dialect, precision=precision)


def row(fault: Fault, report: Report) -> dict[str, object]:
    is_found = report.verdict in (Verdict.WRONG, Verdict.INVALID)
    blamed = report.first_wrong
    if fault.blamed:
        right = (
            blamed is not None and report.verdict == Verdict.WRONG and (blamed.key.name, blamed.key.layer) == (fault.blamed, fault.layer)
        )
    else:
        right = report.verdict == Verdict.INVALID
    return {
        "fault": fault.name,
        "verdict": report.verdict.name,
        "blamed": blamed.place if blamed else "the dump",
        "mistake": blamed.mistake if blamed else None,
        "says": (blamed.hypothesis or blamed.reason) if blamed else report.reason,
        "explained": (blamed.mistake or "" if blamed else "") == fault.mistake,
        "found": is_found,
        "right": right,
    }


_SHAPE: dict[str, Any] = {"n_layers": 3, "width": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 64, "tied": False}
_EXAMPLES: list[dict[str, Any]] = [
    *({"family": name, "window": 4} for name in ("bitnet", "llama", "qwen3", "gemma2", "gemma3", "granite", "qwen3moe", "qwen2moe")),
    {"family": "gemma3", "rope_scaling": 4.0},
    {"family": "gpt2", "activation": "gelu", "kv_heads": 4},
    {"family": "gptneox", "rope_width": 8, "parallel_residual": True, "kv_heads": 4},
    {"family": "llama", "weights": "ternary", "inner_norms": True, "ffn": 128, "width": 128, "head_dim": 32, "rope_scaling": 2.0},
    {"family": "qwen3", "yarn": Yarn(4.0, 16), "rope_magnitude": 1.2, "pooling": "mean"},
]


def examples() -> dict[str, str]:
    """What is said of the first mistake of each id, in models that have what it takes."""
    said: dict[str, str] = {}
    for shape in _EXAMPLES:
        model = random_model(0, **_SHAPE | shape)
        for site in sites(model, EXACT, 16):
            for one in at_operation(site, [mistake for mistake in CATALOGUE if mistake.id not in said]):
                said.setdefault(one.id, one.text)
        for trial in in_engine(Variant("", model, EXACT)):
            said.setdefault(trial.id, trial.text)
    return said


def catalogue() -> Iterator[tuple[str, str, str]]:
    """Every known mistake: id, text, or an example of it where its text has numbers, and the kinds of dump on which it is tried."""
    said = examples()
    for mistake in (*CATALOGUE, *HIDDEN):
        where = {
            "a tensor": mistake.at,
            "logits alone": mistake.fault and (mistake.engine is not None or mistake.likely),
            "several operations": mistake in HIDDEN,
        }
        text = said[mistake.id] if mistake in CATALOGUE else sentence(KINDS_OF_EDITS[mistake.edit.partition(": ")[0]])
        yield mistake.id, text.replace("|", "\\|"), ", ".join(how for how, made in where.items() if made)
    for reading in (*FACTS, *READINGS):
        yield f"read.{reading.id}", sentence(reading.read), "a tensor"


def sentence(function: Callable) -> str:
    """The first sentence of what a function is said to do."""
    return " ".join((function.__doc__ or "").split(".")[0].split())


# --- by precision ---------------------------------------------------------------------------------------------------------------------

_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float16 KV cache": 2.0**-11, "q8_0 KV cache": 2.0**-8}
"""The largest relative error of a number in each kind of engine; with a narrow KV cache in attention's outputs alone."""


def exceeds(fault: Fault, kind: str, wrong: dict[Key, Floats], right: dict[Key, Floats]) -> bool:
    """Whether a fault changes its tensor by more than the roundings of such an engine: twice their size, or 8 times in one number."""
    key = Key(fault.blamed, fault.layer)
    if not fault.blamed or key not in wrong:
        return True
    size = _ROUNDOFF.get(kind, 0.0) if "cache" not in kind or fault.blamed == "kqv_out" else 0.0
    change, before = (x.astype(np.float64) for x in (wrong[key] - right[key], right[key]))
    rms = [float(np.sqrt((x**2).mean())) for x in (change, before)]
    return rms[0] > 2 * size * rms[1] or float(np.abs(change).max()) > 8 * size * float(np.abs(before).max())


def faults_in(kind: str) -> list[dict[str, object]]:
    """Every fault in this kind of engine, judged without a word about its types."""
    model, tokens = embedded_case()
    right, rows = Engine(model, tokens, **KINDS[kind]).run(), []
    for fault in faults():
        if fault.mistake != "dialect.float16":  # which is no fault where nothing is declared
            dump, ids = fault.make(model, tokens, **KINDS[kind])
            result = row(fault, judged(model, dump, ids, EXACT, precision=None))
            rows.append({"kind": kind, "exceeds": exceeds(fault, kind, dump, right)} | result)
    return rows


def print_by_precision(rows: list[dict[str, object]], alarms: list[str], runs: int) -> None:
    print("| engine | faults beyond its precision | found | blamed | explained | found of the others |\n|---|---|---|---|---|---|")
    for kind in KINDS:
        own = [r for r in rows if r["kind"] == kind]
        beyond = [r for r in own if r["exceeds"]]
        counts = [sum(bool(r[name]) for r in beyond) for name in ("found", "right", "explained")]
        others = f"{sum(bool(r['found']) for r in own) - counts[0]} of {len(own) - len(beyond)}"
        print(f"| {kind} | {len(beyond)} | {' | '.join(map(str, counts))} | {others} |")
    for r in rows:
        if r["exceeds"] and not (r["found"] and r["right"] and r["explained"]):
            print(f"\n{r['kind']}: {r['fault']}: {r['verdict']} at {r['blamed']}: {r['says']}", end="")
    print(f"\n{runs} honest runs: {len(alarms)} false alarms", *alarms, sep="\n")


def fault_row(number: int, only: tuple[str, ...]) -> dict[str, object]:
    """What the judge says of a fault, one of `every_fault`."""
    model, tokens, fault = every_fault()[number]
    dump, ids = fault.make(model, tokens)
    return row(fault, judged(model, dump, ids, EXACT, only))


_WAYS = (lambda x, w: x @ w.T, precise, accumulate(8))


def honest_verdicts(seed: int, only: tuple[str, ...], narrow: bool) -> list[str]:
    """An alarm, or "", for each honest run on one random model. narrow: of engines of every kind, whose types are not declared."""
    shape: dict[str, Any] = {"head_dim": 32} if narrow else {}
    model = random_model(seed, table=("float32", "float16", "bfloat16")[seed % 3], tied=seed % 2 == 0, **shape)
    ids = np.random.default_rng(seed).integers(0, model.config.vocab, 3 + (1 if narrow else 2) * seed)
    of_kinds = ((kind, n, Engine(model, ids, dot=dot, **fields)) for kind, fields in KINDS.items() for n, dot in enumerate(_WAYS))
    runs = ((f"{kind}, way {n}", engine.run(), EXACT) for kind, n, engine in of_kinds) if narrow else honest(model, ids)
    precision, most = (None, Verdict.NARROW) if narrow else (FLOAT32, Verdict.FLIPS)
    reports = ((name, judged(model, dump, ids, dialect, only, precision)) for name, dump, dialect in runs)
    return [f"seed {seed}, {name}: {report.reason}" if report.verdict > most else "" for name, report in reports]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="print the whole table (default: the summary and the failures)")
    parser.add_argument("--honest", type=int, default=200, metavar="N", help="run at least this many honest runs (default 200)")
    parser.add_argument("--only", default="", metavar="l_out,...", help="judge dumps of these tensors only")
    parser.add_argument("--catalogue", action="store_true", help="print the table of all known mistakes instead, and judge nothing")
    parser.add_argument("--precision", action="store_true", help="put the faults into engines of narrow types too, none of them declared")
    parser.add_argument("--json", action="store_true")
    add_cluster_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.catalogue:
        print("| mistake | it says | seen in |\n|---|---|---|")
        for columns in catalogue():
            print(f"| {' | '.join(columns)} |")
        return 0
    with over_workers(arguments) as spread:
        return report_faults(arguments, spread)


def report_faults(arguments: argparse.Namespace, spread: Callable) -> int:
    """Judge all cases and print the tables; returns the exit code."""

    def every(run: Callable, cases: Sequence[Any], title: str) -> Iterable[Any]:
        return tqdm(spread(run, cases), desc=title, total=len(cases), disable=not sys.stderr.isatty())

    only = tuple(filter(None, arguments.only.split(",")))
    narrow, runs_of_seed = arguments.precision, len(KINDS) * len(_WAYS) if arguments.precision else 12
    if narrow:
        rows = [row for rows in every(faults_in, list(KINDS), "kinds of engines") for row in rows]
    else:
        rows = list(every(partial(fault_row, only=only), range(len(every_fault())), "faults"))
    seeds = range(-(-max(400, arguments.honest) // runs_of_seed) if narrow else 1 + arguments.honest // runs_of_seed)
    verdicts = [one for some in every(partial(honest_verdicts, only=only, narrow=narrow), seeds, "honest models") for one in some]
    alarms, runs = list(filter(None, verdicts)), len(verdicts)
    if arguments.json:
        print(json.dumps({"faults": rows, "honest_runs": runs, "false_alarms": alarms}, indent=2))
    elif arguments.precision:
        print_by_precision(rows, alarms, runs)
    else:
        print_faults(rows, alarms, runs, arguments.report)
    return 0 if all(r["found"] for r in rows if r.get("exceeds", True)) and not alarms else 1


def print_faults(rows: list[dict[str, object]], alarms: list[str], runs: int, whole: bool) -> None:
    shown = rows if whole else [r for r in rows if not (r["found"] and r["right"])]
    if shown:
        print("| fault | verdict | blamed | it says |\n|---|---|---|---|")
    for r in shown:
        mark = "" if r["right"] else " (WRONG PLACE)" if r["found"] else " (MISSED)"
        print(f"| {r['fault']} | {r['verdict']} | {r['blamed']}{mark} | {r['says']} |")
    found, right, explained = (sum(bool(r[name]) for r in rows) for name in ("found", "right", "explained"))
    print(f"\n{len(rows)} faults: {found} found, {right} blamed at the right operation and layer, {explained} explained")
    print(f"{runs} honest runs: {len(alarms)} false alarms", *alarms, sep="\n")


if __name__ == "__main__":
    import mutations  # workers find functions by their module's name, which is not __main__ there

    raise SystemExit(mutations.main())
