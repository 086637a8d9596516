"""What one run shows: whether it failed, how, and at which positions.

Numbers are compared with the definition in float64. Where they differ by more than float32 sums in another order explain, the judge of
logits measures how far roundings reach.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import spec
from ..base.errors import Error
from ..engine.dialects import EXACT, Dialect
from ..engine.network import Runtime
from ..engine.tokens import check_tokens, pad
from ..judge.check import content_of
from ..judge.law.graph import LOGITS
from ..judge.measures import ROUNDING_LIMIT, invalid, position_nmse
from ..judge.options import DEFAULT, Options
from ..judge.report.report import Report
from ..judge.sequences import judge_sequences
from ..judge.top_logprobs import check_completions
from ..judge.verdict import Verdict
from ..model.dense import dense_view
from ..model.records import Config, Model
from ..traces.formats.arrays import Batch, Labelled
from ..traces.points import Trace
from .engine import Answers, Call, Ran, stacked

GROSS = 0.05
"""NMSE of a position that no rounding reaches in a model of few layers: beyond it no reach is measured."""

Rows = tuple[int, NDArray]
"""The first position that some logits [P, V] are of, and the logits."""


@dataclass(frozen=True)
class Outcome(Ran):
    """What a run shows: its kind may also be "wrong", "bits", "uneven", "call" (company.py), or "untold" where nothing is known."""

    far: float = 0.0  # largest NMSE of a position
    bad: tuple[tuple[int, int], ...] = ()  # the sequences and positions that are wrong
    rows: tuple[Rows, ...] = ()
    errors: tuple[NDArray[np.float64], ...] = ()  # NMSE of each position of `rows`, from the definition
    seconds: float = 0.0  # that the engine took

    @property
    def failed(self) -> bool:
        return self.kind not in ("ok", "refused", "untold")

    @property
    def group(self) -> str:
        """Failures that may have one cause: wrong numbers may be NaN elsewhere. A crash is known by its message, without numbers in it."""
        if self.kind in ("wrong", "invalid", "uneven"):
            return "numbers"
        return self.kind + "".join(c for c in self.text if not c.isdigit())[:40] if self.kind == "crash" else self.kind


def definition(model: Model, call: Call) -> tuple[NDArray[np.float32], ...]:
    """The logits of each sequence, [T, V]."""
    dense = dense_view(model)
    return tuple(spec.forward(dense, ids).astype(np.float32) for ids in call.tokens)


def rows_of(dump: Any, call: Call, config: Config, ours: Sequence[NDArray]) -> tuple[Rows, ...]:
    """The logits of each sequence in a dump, behind the prefix where it has them apart. Raises Error where there are none."""
    tokens = check_tokens(config, *pad(list(call.tokens)))
    if call.prefix:
        with suppress(Error):
            content = content_of(dump, tokens, config, call.prefix)
            return _rows(content, [ids[call.prefix :] for ids in call.tokens], call.prefix, config, ours)
    return _rows(content_of(dump, tokens, config, 0), call.tokens, 0, config, ours)


def _rows(content: Trace | Labelled, later: Sequence[NDArray], prefix: int, config: Config, ours: Sequence[NDArray]) -> tuple[Rows, ...]:
    def logits(trace: Trace, n: int) -> Rows:
        if LOGITS not in trace.points:
            raise Error(f"{trace.origin} has no logits")
        x = np.asarray(trace.points[LOGITS])
        if len(x) == n + prefix:
            x = x[prefix:]
        return prefix + (n - len(x) if len(x) == 1 else 0), x

    if isinstance(content, Trace) or len(later) == 1:
        return (logits(content if isinstance(content, Trace) else content.trace(later[0], config), len(later[0])),)
    batch = Batch(content, tuple(map(len, later)))
    if problem := batch.misfit():
        raise Error(problem)

    def every(left: bool) -> tuple[Rows, ...]:
        sided = replace(batch, left=left)
        return tuple(logits(sided.sequence(b).trace(ids, config), len(ids)) for b, ids in enumerate(later))

    def away(rows: tuple[Rows, ...]) -> float:  # padding may be on either side
        with np.errstate(all="ignore"):
            pairs = [(mine[first:], x) for (first, x), mine in zip(rows, ours, strict=True)]
            return sum(float(np.nan_to_num(position_nmse(a, b), nan=1e9).mean()) for a, b in pairs if a.shape == b.shape)

    return min(map(every, (False, True)), key=away) if batch.padded() else every(False)


@dataclass(frozen=True)
class Judge:
    """Judges what an engine gives, in a dialect and with what is declared of it."""

    dialect: Dialect = EXACT
    options: Options = DEFAULT

    def outcome(self, ran: Ran, model: Model, call: Call, ours: tuple[NDArray, ...], even: bool) -> Outcome:
        """The outcome of a run. even: the engine's plainest run was exact but for float32's own rounding, and so should this one be."""
        if ran.kind != "ok":
            return Outcome(ran.kind, ran.text)
        if isinstance(ran.dump, Answers):
            return self.answered(ran.dump, model)
        try:
            rows = rows_of(ran.dump, call, model.config, ours)
        except Error as error:
            return Outcome("invalid", str(error), dump=ran.dump)
        bad, errors, rounding, problems = [], list[NDArray](), True, list[str]()
        for b, ((first, theirs), mine) in enumerate(zip(rows, ours, strict=True)):
            mine = mine[first:]
            if problem := invalid(mine, theirs):
                finite = np.isfinite(theirs).all(axis=1) if theirs.shape == mine.shape else np.zeros(len(mine), bool)
                bad += [(b, first + int(p), np.inf) for p in np.flatnonzero(~finite if not finite.all() else finite)]
                problems.append(problem)
                continue
            with np.errstate(all="ignore"):
                nmse = position_nmse(mine, theirs)
            off = np.abs(theirs.astype(np.float64) - mine).max(axis=1) > ROUNDING_LIMIT * mine.std(axis=1)
            rounding &= not off.any()
            errors.append(nmse)
            bad += [(b, first + int(p), float(nmse[p])) for p in np.flatnonzero(off)]
        if problems:
            return Outcome("invalid", problems[0], bad=tuple((b, p) for b, p, _ in bad), rows=rows, dump=ran.dump)
        far = float(max(nmse.max() for nmse in errors))
        ok = Outcome("ok", far=far, rows=rows, errors=tuple(errors), dump=ran.dump)
        if rounding:
            return ok
        places = tuple((b, p) for b, p, x in bad if x > 1e-4 * far)
        wrong = replace(ok, kind="wrong", bad=places, text=f"NMSE is {far:.2g} at worst")
        if far > GROSS and self.options.precision is None:
            return wrong
        if even:
            return replace(wrong, kind="uneven", text=f"NMSE is {far:.2g} at worst, and only float32's own rounding in other cases")
        report = self.report(model, call, ran.dump)
        return replace(wrong, text=report.reason) if report.verdict >= Verdict.WRONG else ok

    def answered(self, answers: Answers, model: Model) -> Outcome:
        """The outcome of a server's answers, one for each sequence."""
        reports = [check_completions(model, completions, self.dialect, self.options, search=False) for completions in answers]
        report = max(reports, key=lambda report: report.verdict)
        if report.verdict < Verdict.WRONG:
            return Outcome("ok", dump=answers)
        bad = tuple((b, answers[b].prompt - 1) for b, one in enumerate(reports) if one.verdict >= Verdict.WRONG)
        kind = "invalid" if report.verdict == Verdict.INVALID else "wrong"
        return Outcome(kind, report.reason, bad=bad, dump=answers)

    def report(self, model: Model, call: Call, dump: Any, search: bool = False) -> Report:
        """The report on a dump, without a search for causes by default; of a server's answers, on the worst."""
        if isinstance(dump, Answers):
            return max((check_completions(model, x, self.dialect, self.options) for x in dump), key=lambda report: report.verdict)
        tokens = check_tokens(model.config, *pad(list(call.tokens)))
        content = content_of(dump, tokens, model.config, call.prefix)
        options = replace(self.options, prefix=call.prefix)
        return judge_sequences(Runtime(model, self.dialect).checked(), tokens, content, options, search=search)

    def explained(self, model: Model, call: Call, outcome: Outcome) -> Report:
        """The report on a failing case: the one place that says for how long causes are searched.

        Of logits alone no cause is searched: trying all mistakes on them takes minutes. Tensors name theirs at once.
        """
        dump: Any = outcome.dump
        if dump is None or isinstance(dump, Path):  # a file that is gone: its logits, with zeros behind those of shorter sequences
            dump = stacked([x for _, x in outcome.rows]) if len(outcome.rows) > 1 else outcome.rows[0][1]
        return self.report(model, call, dump, search=isinstance(dump, Mapping) and len(dump) > 1)
