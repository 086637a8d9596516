"""Whole dumps judged by a model: the logits as such, and every operation."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engine.forward_pass import run_whole
from ..engine.network import Runtime
from ..engine.tokens import Tokens
from ..generation.nll import log_probabilities
from ..traces.points import Key, Trace
from .engine import judge_logits
from .graph import LOGITS
from .logits import FLIPS_LIMIT, Judgement, invalid, position_nmse
from .options import DEFAULT, Options
from .precision import FLOAT32, Precision, storage_type
from .report import Report
from .trace import compare, judge_operations
from .variant import Floats, Variant, variant_logits
from .verdict import Verdict

LOG_PROBS = Key("log_probs", None)
_MOST_POSITIONS = 64  # positions to try mistakes on: each mistake is a forward pass


def judge_dump(
    runtime: Runtime,
    tokens: Tokens,
    trace: Trace,
    options: Options = DEFAULT,
    search: bool = True,
) -> Report:
    """The report on every operation of a dump, and on its logits or log-probabilities as such, where it has some.

    runtime, tokens: checked; of one sequence. search: try known mistakes on logits as such. Nothing that a dump holds raises an error.
    """
    key = next((key for key in (LOGITS, LOG_PROBS) if key in trace.points), None)
    if key is None:
        return judge_operations(runtime, tokens, trace, options)
    precision = options.precision
    rows, others = _Rows.of(trace, key, tokens.ids.shape[1]), trace.without(key)
    if not others.points:
        logits = _Logits(runtime, tokens.ids[0], run_whole(runtime, tokens)[0], rows, options)
        judged_as = precision or _read_off(rows.theirs)
        return Report.of_logits(logits.judged(judged_as, search), (*rows.notes, *_note(precision, judged_as)))
    compared, every = compare(runtime, tokens, trace)
    logits = _Logits(runtime, tokens.ids[0], every[0], rows, options)
    is_operation = key == LOGITS and rows.whole and invalid(every[0], rows.theirs) is None  # from the dump's result_norm
    if not is_operation:
        compared.leave_out(key)
    judged = trace if is_operation else others
    operations = judge_operations(runtime, tokens, judged, options, compared)
    search = search and _is_across(operations)  # what logits alone would show, more tensors must not hide
    singly = any(len(o.across) > 1 for o in operations.operations)  # else they were tried at the wrong operation
    of_logits = logits.judged(precision or operations.precision, search, singly, alone=operations.first_wrong is None)
    if operations.verdict == Verdict.NARROW and of_logits.verdict == Verdict.WRONG and not search:
        of_logits = replace(of_logits, verdict=Verdict.NARROW, reason=f"they follow from narrower operations: {of_logits.reason}")
    return replace(operations, notes=(*rows.notes, *operations.notes)).with_logits(of_logits)


def _is_across(operations: Report) -> bool:
    """Whether what is wrong is hidden in several operations judged together, or may be."""
    some = operations.operations if operations.first_wrong is None else (operations.first_wrong,)
    return any(len(o.across) > 1 for o in some)


def _read_off(logits: NDArray) -> Precision | None:
    """The precision of the type that logits were kept in; None for float32."""
    kind = storage_type(logits)
    return None if kind == "float32" else Precision(act=kind)


def _note(declared: Precision | None, judged: Precision | None) -> tuple[str, ...]:
    """The precision that logits are judged in, in words, where it is not float32."""
    if judged is None or judged == FLOAT32:
        return ()
    return (f"judged in the declared precision: {judged}" if declared else f"judged as {judged.act}, read off the dump",)


class _Rows(NamedTuple):
    """The logits, or log-probabilities, that a dump has of some positions."""

    theirs: NDArray  # [P, V]
    positions: NDArray[np.int64]  # [P]
    convert: Callable[[Floats], Floats]  # logits -> logits or log-probabilities, as theirs are
    whole: bool  # whether there is a row for every position
    notes: tuple[str, ...]  # assumptions made

    @classmethod
    def of(cls, trace: Trace, key: Key, length: int) -> "_Rows":
        theirs = trace.points[key]
        convert = (trace.log_probs or log_softmax) if key == LOG_PROBS else lambda x: x
        if trace.positions is not None:
            return cls(theirs, trace.positions, convert, False, ())
        if len(theirs) == 1 < length:
            note = f"one row of {key.name} for {length} tokens: taken for the last position, {length - 1}"
            return cls(theirs, np.array([length - 1]), convert, False, (note,))
        return cls(theirs, np.arange(length), convert, True, ())


class _Logits(NamedTuple):
    """Rows of a dump as such, beside our logits of all positions."""

    runtime: Runtime
    ids: NDArray[np.int64]
    every: Floats  # [T, V]
    rows: _Rows
    options: Options

    def judged(self, precision: Precision | None, search: bool = True, singly: bool = True, alone: bool = True) -> Judgement:
        """The verdict on them. search: try known mistakes too. singly: also those of single operations. alone: no other tensor of the dump
        shows what is wrong."""
        every, rows, last = self.every, self.rows, len(self.ids) - 1
        looked_at = _first(rows.positions)

        def run(variant: Variant) -> Floats:
            end = int(looked_at.max()) + 1
            return rows.convert(variant_logits(variant, self.ids[None, :end])[0][looked_at])

        nearest = _nearest_row(every, rows) if rows.notes else last  # a row of another position tells no mistake
        ours = rows.convert(every if rows.whole else every[rows.positions])
        base, search = Variant("ours", self.runtime.model, self.runtime.dialect), search and nearest == last
        ids, options = self.ids if singly else None, replace(self.options, precision=precision)
        judged = judge_logits(ours, rows.theirs, base, run, options, search, rows.positions, ids, alone)
        if not rows.notes:
            return judged
        judged = replace(judged, compared=(last,))
        if nearest != last and judged.verdict in (Verdict.FLIPS, Verdict.WRONG):
            reason = f"it is the row of position {nearest}, not of the last one, {last}"
            return replace(judged, verdict=Verdict.WRONG, reason=reason, explanation=f"the row of position {nearest}")
        return judged


def _nearest_row(every: Floats, rows: _Rows) -> int:
    """The position whose logits, of ours [T, V], are far closer to their one row than those of the last position; else the last."""
    if rows.theirs.shape != every[-1:].shape:
        return len(every) - 1
    with np.errstate(all="ignore"):  # numbers that cannot be compared are refused later
        distance = position_nmse(rows.convert(every), np.broadcast_to(rows.theirs, every.shape))
    nearest = int(distance.argmin())
    return nearest if distance[nearest] < distance[-1] / 4 else len(every) - 1


def _first(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first of these positions, whose logits need few tokens."""
    few = positions[:_MOST_POSITIONS]
    late = np.flatnonzero(few >= max(_MOST_POSITIONS, int(few[0]) + 1))
    return few[: late[0]] if late.size else few


def has_logits(trace: Trace, ours: Floats) -> bool:
    """Whether the logits of a trace are ours [T, V], or near them: those of other tokens are not."""
    rows = _Rows.of(trace, LOGITS if LOGITS in trace.points else LOG_PROBS, len(ours))
    if rows.theirs.shape != (len(rows.positions), ours.shape[1]) or rows.positions.max() >= len(ours):
        return False
    return bool(position_nmse(rows.convert(ours[rows.positions]), rows.theirs).mean() <= 5 * FLIPS_LIMIT)


def log_softmax(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-probabilities of logits [.., V], computed in float64."""
    return log_probabilities(x).astype(np.float32)
