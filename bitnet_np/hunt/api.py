"""`bitnet_np.hunt`: an engine in, its failures out."""

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from ..base.errors import Error
from ..base.validate import integer, path_of, positive
from ..engine.dialects import EXACT
from ..files.load import load
from ..judge.options import DEFAULT
from ..judge.verdict import Verdict
from ..kernels.float_state import steady
from ..model.records import Model
from ..testing.models import write_gguf
from ..testing.space import fitted
from .engine import Call, engine_of
from .keep import keep, kept_cases
from .outcome import Expected, Outcome, explained
from .probes import Place, probe
from .run import Finding, Hunt, Runner, Told, call_of, hunt_engine


@steady
def hunt(
    engine: Callable[..., Any] | str,
    like: Model | str | PathLike | None = None,
    *,
    time: float = 60.0,
    runs: int | None = None,
    workers: int = 1,
    seed: int = 0,
    limit: float = 20.0,
    out: str | PathLike | None = None,
    expected: Expected = Expected(EXACT, DEFAULT),  # noqa: B008 - frozen
    told: Told = lambda runs, findings, left: None,
) -> Hunt:
    """Hunt for failures of an engine: random models and calls around the edges that engines have, judged, shrunk and told apart.

    engine: a function of a Model, or of a file's path if its first parameter is named or annotated so, and of token ids: int64 [T], or a
    list of such arrays for a batch. It may take chunk (None: all at once), threads and prefix by name, and returns what `check` takes:
    logits [T, V] (behind a prefix [T - prefix, V] or all), for a batch [B, T, V], or arrays by name. Or a command's template with {model},
    {tokens} and {out}, and {chunk}, {threads} and {prefix} if it has them: `./run -m {model} -t {tokens}.txt -o {out}.npy`.

    like: a model, or a file, whose family, types and settings all drawn models have. time: seconds. runs: at most so many. workers: runs
    at a time. limit: seconds for one run of a command. out: a folder for the failing cases; those that it has are run first. expected: what
    the judge is told of the engine. told: called with the runs, the findings, and the seconds left.

    Raises bitnet_np.Error for arguments that cannot be used. What the engine does raises nothing.
    """
    runner_engine = engine_of(engine, positive("limit", limit))
    if not isinstance(like, Model | None):
        like = load(path_of(like))
    folder = None if out is None else Path(path_of(out))
    if runs is not None:
        integer("runs", runs, 1)

    def complete(runner: Runner, finding: Finding) -> Finding:
        report, outcome = _report(runner, finding, expected), finding.outcome
        if report is not None and report.verdict >= Verdict.WRONG and outcome.kind == "uneven":
            outcome = replace(outcome, kind="wrong", text=report.reason)
        finding = replace(finding, report=report, outcome=outcome)
        if finding.outcome.group == "numbers" and (finding.report is None or not finding.report.operations):
            finding = replace(finding, place=_place(runner, finding, expected))
        return finding if folder is None else keep(runner, finding, folder)

    return hunt_engine(
        runner_engine,
        like,
        seconds=positive("time", time),
        runs=runs,
        workers=integer("workers", workers, 1, 1024),
        seed=integer("seed", seed, 0),
        expected=expected,
        first=[] if folder is None else kept_cases(folder),
        told=told,
        explain=complete,
    )


def _report(runner: Runner, finding: Finding, expected: Expected) -> Any:
    """`check`'s report on the smallest case, where there are numbers."""
    rows = finding.outcome.rows
    if not rows or finding.outcome.group != "numbers":
        return None
    model, _ = runner.model(finding.case)
    try:
        return explained(model, call_of(finding.case), finding.outcome, expected)
    except Error:
        return None


def _place(runner: Runner, finding: Finding, expected: Expected) -> Place:
    """Where probes find the fault: at the smallest case, with as many ids as show the whole stream if it still fails so."""
    case, names = finding.case, {atom.fact for atom in finding.condition or ()}
    wide = fitted(replace(case, vocab=max(case.vocab, 4 * case.width), tied=False))
    if not names & {"vocab", "tied"} and runner.run(wide).failed:
        case = wide
    model, _ = runner.model(case)
    path = runner.folder / "probe.gguf"
    even = runner.even(case)

    def run(probed: Model, call: Call) -> Outcome:
        if runner.engine.takes_path:
            write_gguf(path, probed)
        return runner.run_model(probed, path, call, even)

    try:
        return probe(model, call_of(case), min((b for b, _ in runner.run(case).bad), default=0), run, expected)
    except Error as error:
        return Place(f"not probed: {error}")
