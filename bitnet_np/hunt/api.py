"""`bitnet_np.hunt`: an engine in, its failures out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.blas import one_thread
from ..base.errors import Error
from ..base.validate import flag, function, instance, integer, path_of, positive
from ..engine.tokens import check_tokens, pad
from ..files.load import load
from ..judge.report.report import Report
from ..judge.verdict import Verdict
from ..kernels.float_state import steady
from ..kernels.working_clock import working_clock
from ..model.records import Model
from ..testing.space import CONTEXT, Case, case_like, fitted
from .company import Compared
from .engine import Answers, Call, engine_of
from .keep import keep, kept_cases
from .outcome import Judge, Outcome
from .probes import Place, probe
from .run import Finding, Hunt, Runner, Runs, Spread, call_of, hunt_engine

_WIDEST = 512  # channels of a case that is made wider for probes
_LONG = 8  # tokens more that a case gets for probes
_SMALL = 1 << 13  # channels of all layers of a model that is itself made into probes


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
    single: bool = False,
    judge: Judge = Judge(),  # noqa: B008 - frozen
    spread: Spread | None = None,
    progress: Runs = lambda runs, findings, left: None,
) -> Hunt:
    """Hunt for failures of an engine: random models and calls around the edges that engines have, judged, shrunk and told apart.

    engine: a function of a Model, or of a file's path if its first parameter is named or annotated so, and of token ids: int64 [T], or a
    list of such arrays for a batch. It may take chunk (None: all at once), threads and prefix by name, and returns what `check` takes:
    logits [T, V] (behind a prefix [T - prefix, V] or all), for a batch [B, T, V] or a list of [T, V], or arrays by name. Or a command's
    template with {model}, {tokens} and {out}, and {chunk}, {threads} and {prefix} if it has them:
    `./run -m {model} -t {tokens}.txt -o {out}.npy`. Or a server's, with {model} and {port}, which is started for each run and asked as
    `check --endpoint` asks.

    like: a model, or a file, whose family, types and settings all drawn models have. time: seconds, without those in which kernels are
    compiled. runs: at most so many. workers: runs at a time. limit: seconds for one run of a command. out: a folder for the failing cases;
    those that it has are run first. single: whether all calls have one sequence. judge: what is known of the engine. spread: maps a
    function over cases, such as on a cluster, in place of threads; `workers` of them at a time. progress: called with the runs, the
    findings, and the seconds left.

    Raises bitnet_np.Error for arguments that cannot be used. What the engine does raises nothing.
    """
    function("progress", progress)
    function("spread", map if spread is None else spread)
    instance("judge", judge, Judge)
    if not isinstance(like, Model | None):
        like = load(path_of(like))
    folder = None if out is None else Path(path_of(out))
    if runs is not None:
        integer("runs", runs, 1)
    seed, single = integer("seed", seed, 0), flag("single", single)
    seconds, workers = positive("time", time), integer("workers", workers, 1, 1024)
    tried = engine_of(engine, positive("limit", limit))

    def complete(runner: Runner, finding: Finding) -> Finding:
        if (origin := runner.origin(finding.case)) != finding.case:
            finding = replace(finding, case=origin, outcome=runner.outcomes[origin])
        report, outcome = _report(runner, finding), finding.outcome
        if report is not None and report.verdict >= Verdict.WRONG and outcome.kind == "uneven":
            outcome = replace(outcome, kind="wrong", text=report.reason)
        finding = replace(finding, report=report, outcome=outcome)
        if outcome.group == "numbers" and (report is None or not report.operations):
            finding = replace(finding, place=_place(runner, finding))
        return finding if folder is None else keep(runner, finding, folder)

    with one_thread(), working_clock() as clock:  # compiling takes no time of a hunt: a first one draws as many cases as others
        runner = Runner(tried, like, judge, workers, seconds, spread, clock)
        kept = [] if folder is None else kept_cases(folder)
        return hunt_engine((runner, Compared(runner)), runs, seed, single, kept, progress, complete)


def _report(runner: Runner, finding: Finding) -> Report | None:
    """`check`'s report on the smallest case, where there are numbers."""
    outcome, case = finding.outcome, finding.case
    has_numbers = outcome.group == "numbers" and (outcome.rows or isinstance(outcome.dump, Answers))
    with suppress(Error):
        return runner.judge.explained(runner.model(case), call_of(case), outcome) if has_numbers else None
    return None


def _place(runner: Runner, finding: Finding) -> Place:
    """Where probes find the fault: at the case that shows most of those that fail as the smallest one does."""
    case = next((wide for wide in _wider(finding.case) if runner.run(wide).failed), finding.case)
    return _probed(runner, runner.model(case), call_of(case), runner.run(case), runner.even(case))


def _wider(case: Case) -> Iterator[Case]:
    """A case with more ids and channels, and longer, so that more positions are wrong than one, which much would explain; less so; behind a
    longer prefix; or as long."""
    more = (case.length + _LONG, case.prefix)
    for length, prefix in (more, (max(case.length, _LONG), case.prefix), (more[0], case.prefix + _LONG), (case.length, case.prefix)):
        yield _wide(replace(case, length=length, prefix=prefix if case.prefix else 0))


def _wide(case: Case) -> Case:
    """A case with more ids and channels, which show more."""
    width = max(case.width, 2 * case.kv_heads * case.group * case.head_dim, 2 * case.ffn)
    width = width if width <= _WIDEST else case.width
    return fitted(replace(case, width=width, vocab=max(case.vocab, 4 * width)))


def _probed(runner: Runner, model: Model, call: Call, outcome: Outcome, even: bool = False) -> Place:
    row = min((b for b, _ in outcome.bad), default=0)
    try:
        return probe(model, call, row, lambda model, call: runner.run_model(model, call, even), runner.judge)
    except Error as error:
        return Place(f"not probed: {error}")


def check_engine(command: str, path: Path, model: Model, rows: Sequence[NDArray[np.int64]], judge: Judge, limit: float) -> Report:
    """Run an engine's command on a model's file and judge what it gives.

    Where it gives logits alone that are wrong, it is probed, and a note says where it is wrong. If that says no cause, one is looked for
    in the logits. Behind a prefix that is wrong as a call by itself, that call is judged.

    Raises as `check` does, and OptionError for a command that cannot be used.
    """
    call = Call(tuple(np.asarray(ids, np.int64) for ids in rows), 0, 1, judge.options.prefix)
    check_tokens(model.config, *pad(list(call.tokens)))
    for engine in engine_of(command, limit).variants():
        with TemporaryDirectory(prefix="bitnet-np-check-", ignore_cleanup_errors=True) as name:
            if (ran := engine.run(path, model.config, call, Path(name))).kind == "ok":
                report, searched = judge.report(model, call, ran.dump), partial(judge.report, model, call, ran.dump, search=True)
                if report.verdict == Verdict.WRONG and call.prefix:
                    first = replace(judge, options=replace(judge.options, prefix=0))
                    alone = check_engine(command, path, model, [ids[: call.prefix] for ids in rows], first, limit)
                    if alone.verdict == Verdict.WRONG:
                        note = f"the first {call.prefix} tokens are wrong as a call by themselves, and this is of that call"
                        return replace(alone, notes=(note, *alone.notes))
                if report.verdict != Verdict.WRONG or report.operations:
                    return searched()
                place = _place_in(Runner(engine, model, judge), model, call)
                report = report if place.cause else searched()
                return replace(report, notes=(*report.notes, f"probes: {place.cause or place.text}"))
    return Report(Verdict.INVALID, f"the engine gave nothing to judge: {ran.kind}: {ran.text}")


def _place_in(runner: Runner, model: Model, call: Call) -> Place:
    """Where probes of small models like this one find the fault; of itself where those are right, or say no cause."""
    plain, c = replace(case_like(model)[0], length=min(max(len(call.tokens[0]), Case.length), CONTEXT), prefix=call.prefix), model.config
    own: dict[str, Any] = {"group": c.heads // c.kv_heads, "head_dim": c.head_dim, "window": c.window or 0, "rope_width": c.rope_width or 0}
    case = _wide(fitted(replace(plain, **own, layers=min(c.n_layers, 3))))
    place = Place("small models like this one are right")
    if (outcome := runner.run(case)).failed:
        place = _probed(runner, runner.model(case), call_of(case), outcome)
    if place.cause is None and c.n_layers * max(c.width, c.ffn) <= _SMALL:
        itself = _probed(runner, model, call, runner.run_model(model, call, False))
        place = max(place, itself, key=lambda place: (place.wrong, place.cause is not None))
    return place
