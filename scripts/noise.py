"""Measures whether engines that round inside operations are left alone, and whether bugs in them are found.

Policies of judging/policies.py are judged by all tensors, by outputs of layers and logits, and by logits alone: alarms are false. Each
known mistake is put into one operation of engines in TF32, bfloat16, int8 rows and MXFP8, on top of their noise, and should be found,
blamed on that operation, and named. Mistakes that change less than twice the noise are counted apart.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from judging.policies import TUNED, UNSEEN, Dense
from numpy.typing import NDArray

from bitnet_np import EXACT, check
from bitnet_np.judge.hypothesis import Hypothesis
from bitnet_np.judge.law.expression import value_of
from bitnet_np.judge.law.graph import TOKENS
from bitnet_np.judge.mistakes.catalogue import CATALOGUE, at_operation
from bitnet_np.judge.mistakes.hypotheses import sites
from bitnet_np.judge.report.report import Report
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key, Trace

MODEL = random_model(1, family="qwen2", n_layers=3, width=64, heads=2, kv_heads=1, head_dim=32, ffn=96, vocab=96)
IDS = np.random.default_rng(0).integers(0, MODEL.config.vocab, 20)
FORMS: dict[str, tuple[str, ...]] = {"all tensors": (), "layers and logits": ("l_out", "result_output"), "logits alone": ("result_output",)}
BASES = ("TF32", "bfloat16 operands", "int8 rows", "MXFP8")
_BEYOND = 2  # times the noise, in RMS
Points = dict[Key, NDArray]


def judged(points: Points, names: tuple[str, ...] = (), **how: Any) -> Report:
    return check(MODEL, IDS, Trace({key: x for key, x in points.items() if not names or key.name in names}, None, "dump"), **how)


def print_alarms(names: list[str], **how: Any) -> int:
    """A line for each false alarm, and their count."""
    every, alarms, runs = TUNED | UNSEEN, dict.fromkeys(FORMS, 0), 0
    for name in names or every:
        points, runs = Dense(MODEL, IDS, **every[name]).run(), runs + 1
        for form, tensors in FORMS.items():
            report = judged(points, tensors, **how)
            alarms[form] += report.verdict > Verdict.NARROW
            if report.verdict > Verdict.NARROW:
                print(f"ALARM: {name}, {form}: {report.reason}", flush=True)
    print(f"{runs} policies; alarms: {', '.join(f'{form} {count}' for form, count in alarms.items())}")
    return sum(alarms.values())


def planted(base: str) -> Iterator[tuple[Hypothesis, Key, float, Points]]:
    """Yields each known mistake at one operation, how many times as much as noise it changes, and the dump of an engine that makes it."""
    policy: dict[str, Any] = dict(TUNED[base])
    right, planted_ids = Dense(MODEL, IDS, **policy).run(), set[str]()
    values: dict[Key, Any] = {TOKENS: IDS, **{key: x.astype(np.float64) for key, x in right.items()}}
    for site in sites(MODEL, EXACT, len(IDS)):
        if site.key.layer not in (None, 1):
            continue
        exact = value_of(site.tree, values.__getitem__, len(IDS))
        noise = values[site.key] - exact
        for trial in at_operation(site, CATALOGUE):
            compute = trial.computes[site.key]
            if not trial.fault or trial.id in planted_ids or trial.grid:
                continue
            try:
                wrong = compute(values)
            except KeyError:  # a tensor of a later layer
                continue
            if wrong.shape != exact.shape or not np.isfinite(wrong).all() or np.allclose(wrong, exact, rtol=1e-6, atol=1e-9):
                continue
            planted_ids.add(trial.id)
            times = float(np.sqrt(((wrong - exact) ** 2).mean() / max(float((noise**2).mean()), 1e-300)))
            made = np.asarray(wrong + noise, np.float32)
            steps = {site.key.name: partial(lambda made, engine, n: made, made)}
            yield trial, site.key, times, Dense(MODEL, IDS, steps, None if site.key.layer is None else (1,), **policy).run()


def print_faults(bases: list[str], **how: Any) -> int:
    """A table of the mistakes that are found, blamed and named in each engine, and a line for each that is not."""
    lines, missed = [], 0
    for base in bases or BASES:
        counts, less = [0, 0, 0, 0], [0, 0]
        for cause, key, times, points in planted(base):
            report = judged(points, **how)
            first, found = report.first_wrong, report.verdict == Verdict.WRONG
            blamed = found and first is not None and first.key == key
            if times < _BEYOND:
                less = [less[0] + 1, less[1] + found]
                continue
            named = blamed and first is not None and first.mistake == cause.id
            counts = [n + more for n, more in zip(counts, (1, found, blamed, named), strict=True)]
            missed += not blamed
            if not named:
                said = report.reason[:140]
                print(f"{base}: {cause.id} at {key}, {times:.1f} times the noise: {report.verdict.name} {said}", flush=True)
        lines.append(f"| {base} | {' | '.join(map(str, counts))} | {less[1]} of {less[0]} |")
    print(
        "| engine | mistakes beyond its noise | found | blamed | named | found of the others |\n|---|---|---|---|---|---|", *lines, sep="\n"
    )
    return missed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="*", metavar="NAME", help="judge right engines, all of them or these")
    parser.add_argument("--faults", nargs="*", metavar="ENGINE", help=f"judge mistakes in {', '.join(BASES)}, or in other policies")
    parser.add_argument("--budget", type=float, default=20.0, metavar="SECONDS", help="of each search for causes (default 20)")
    options = parser.parse_args(argv)
    wrong = 0 if options.policies is None else print_alarms(options.policies, budget=options.budget)
    return int(wrong + (0 if options.faults is None else print_faults(options.faults, budget=options.budget)) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
