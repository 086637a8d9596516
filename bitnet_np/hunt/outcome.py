"""What one run shows: whether it failed, how, and at which positions.

Numbers are compared with the definition in float64. Where they differ by more than float32 sums in another order explain, the judge of
logits measures how far roundings reach.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import spec
from ..base.errors import Error
from ..engine.dialects import Dialect
from ..engine.network import Runtime
from ..engine.tokens import check_tokens, pad
from ..judge.check import content_of
from ..judge.law.graph import LOGITS
from ..judge.measures import ROUNDING_LIMIT, invalid, position_nmse
from ..judge.options import Options
from ..judge.report.report import Report
from ..judge.sequences import judge_sequences
from ..judge.verdict import Verdict
from ..model.dense import dense_view
from ..model.records import Config, Model
from ..traces.formats.arrays import Batch, Labelled
from ..traces.points import Trace
from .engine import Call, Ran

GROSS = 0.05
"""NMSE of a position that no rounding reaches in a model of few layers: beyond it no reach is measured."""

Rows = tuple[int, NDArray]
"""The first position that some logits [P, V] are of, and the logits."""


@dataclass(frozen=True)
class Expected:
    """What the judge is told of the engine."""

    dialect: Dialect
    options: Options


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    kind: str  # "ok"; "wrong", "invalid", "crash", "hang", "size", "bits", "uneven"; "refused"
    text: str = ""
    far: float = 0.0  # largest NMSE of a position
    bad: tuple[tuple[int, int], ...] = ()  # the sequences and positions that are wrong
    rows: tuple[Rows, ...] = ()
    dump: Any = None

    @property
    def failed(self) -> bool:
        return self.kind not in ("ok", "refused")

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
    for prefix in dict.fromkeys((call.prefix, 0)):
        try:
            content = content_of(dump, tokens, config, prefix)
            return _rows(content, [ids[prefix:] for ids in call.tokens], prefix, config, ours)
        except Error:
            if not prefix:
                raise
    raise AssertionError


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


def judged(ran: Ran, model: Model, call: Call, ours: tuple[NDArray, ...], expected: Expected, even: bool) -> Outcome:
    """The outcome of a run. even: the engine's plainest run was exact but for float32's own rounding, and so should this one be."""
    if ran.kind != "ok":
        return Outcome(ran.kind, ran.text)
    try:
        rows = rows_of(ran.dump, call, model.config, ours)
    except Error as error:
        return Outcome("invalid", str(error), dump=ran.dump)
    bad, far, rounding, problems = [], 0.0, True, []
    for b, ((first, theirs), mine) in enumerate(zip(rows, ours, strict=True)):
        mine = mine[first:]
        if problem := invalid(mine, theirs):
            finite = np.isfinite(theirs).all(axis=1) if theirs.shape == mine.shape else np.zeros(len(mine), bool)
            bad += [(b, first + int(p), np.inf) for p in np.flatnonzero(~finite if not finite.all() else finite)]
            problems.append(problem)
            continue
        with np.errstate(all="ignore"):
            nmse = position_nmse(mine, theirs)
        most = np.abs(theirs.astype(np.float64) - mine).max(axis=1)
        rounding &= not (most > ROUNDING_LIMIT * mine.std(axis=1)).any()
        far = max(far, float(nmse.max()))
        bad += [(b, first + int(p), float(nmse[p])) for p in np.flatnonzero(most > ROUNDING_LIMIT * mine.std(axis=1))]
    if problems:
        return Outcome("invalid", problems[0], bad=tuple((b, p) for b, p, _ in bad), rows=rows, dump=ran.dump)
    ok = Outcome("ok", far=far, rows=rows, dump=ran.dump)
    if rounding:
        return ok
    places = tuple((b, p) for b, p, x in bad if x > 1e-4 * far)
    wrong = replace(ok, kind="wrong", bad=places, text=f"NMSE is {far:.2g} at worst")
    if far > GROSS and expected.options.precision is None:
        return wrong
    if even:
        return replace(wrong, kind="uneven", text=f"NMSE is {far:.2g} at worst, and only float32's own rounding in other cases")
    report = verdict(model, call, ran.dump, expected)
    return replace(wrong, text=report.reason) if report.verdict >= Verdict.WRONG else ok


def verdict(model: Model, call: Call, dump: Any, expected: Expected, search: bool = False) -> Report:
    """The judge's report, without a search for causes by default."""
    tokens = check_tokens(model.config, *pad(list(call.tokens)))
    content = content_of(dump, tokens, model.config, call.prefix)
    options = replace(expected.options, prefix=call.prefix)
    return judge_sequences(Runtime(model, expected.dialect).checked(), tokens, content, options, search=search)


def explained(model: Model, call: Call, outcome: Outcome, expected: Expected) -> Report:
    """The judge's report on a failing case: the one place that says for how long causes are searched.

    Of logits alone no cause is searched: trying all mistakes on them takes minutes. Tensors name theirs at once.
    """
    dump: Any = outcome.dump
    if dump is None or isinstance(dump, Path):  # a file that is gone: its logits
        dump = _padded([x for _, x in outcome.rows])
    whole = isinstance(dump, Mapping) and len(dump) > 1
    return verdict(model, call, dump, expected, search=whole)


def _padded(rows: Sequence[NDArray]) -> NDArray:
    """Logits of one sequence [P, V], or of several [B, P, V] with zeros behind the shorter ones."""
    if len(rows) == 1:
        return np.asarray(rows[0])
    every = np.zeros((len(rows), max(map(len, rows)), rows[0].shape[1]), np.float32)
    for row, x in zip(every, rows, strict=True):
        row[: len(x)] = x
    return every
