"""Whole dumps judged: the logits as such and every operation, by a model, or one dump by another."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..cli import progress
from ..dialects import EXACT, Dialect
from ..errors import TokenRangeError
from ..forward_pass import compute_logits
from ..model import Model
from ..network import Runtime
from ..tokens import check_tokens
from ..traces.points import Key, Trace
from ..validate import instance, integers
from .blame import close, invalid_tensor, judge_trace, statistics
from .compare import FLIPS_LIMIT, Judgement, Verdict, position_nmse, same_bits
from .reach import Variant, judge_logits, variant_logits
from .report import OperationVerdict, Report

LOGITS, LOG_PROBS = Key("result_output", None), Key("log_probs", None)


def check_trace(model: Model, ids: NDArray[np.int64], trace: Trace, dialect: Dialect = EXACT) -> tuple[Report, Judgement | None]:
    """Every operation of a dump, and its logits or log-probabilities as such, where it has some: the report is of both.

    ids: token ids [T] of the one sequence. What a dump holds is judged, and never an error. Raises what `forward_full` raises.
    """
    ids, trace = integers("ids", ids, 1, TokenRangeError), instance("trace", trace, Trace)
    Runtime(model, dialect).checked()
    check_tokens(model.config, ids[None])
    key = next((key for key in (LOGITS, LOG_PROBS) if key in trace.points), None)
    if key is None:
        return judge_trace(model, trace, ids, dialect, progress.bar("judging operations")), None
    alone = trace.positions is not None or trace.points.keys() <= {LOGITS, LOG_PROBS}
    logits, notes = _check_rows(model, ids, trace, key, dialect, alone)
    whole = key == LOGITS and not notes  # as the operation gives them
    if alone and (trace.positions is not None or not whole or logits.verdict <= Verdict.FLIPS or logits.explanation):
        return Report(logits.verdict, logits.reason, notes=notes), logits
    if alone and logits.verdict == Verdict.INVALID:
        return Report(Verdict.INVALID, f"logits: {logits.reason}", notes=notes), logits
    report = judge_trace(model, trace if whole else trace.without(key), ids, dialect, progress.bar("judging operations"))
    only_there = report.verdict == Verdict.INVALID and report.first_wrong is not None and report.first_wrong.key == key
    if logits.verdict > report.verdict or only_there:  # no operation before is at fault by itself
        report = replace(report, verdict=logits.verdict, reason=f"logits: {logits.reason}")
    return replace(report, notes=(*notes, *report.notes)), logits


def _check_rows(
    model: Model, ids: NDArray[np.int64], trace: Trace, key: Key, dialect: Dialect, alone: bool
) -> tuple[Judgement, tuple[str, ...]]:
    """The logits, or log-probabilities, of the positions a dump has, and what was taken for granted."""
    theirs = trace.points[key]
    rows = np.arange(len(ids)) if trace.positions is None else trace.positions
    assumed = trace.positions is None and len(theirs) == 1 < len(ids)
    chosen = rows[-1:] if assumed else rows
    looked_at = _first(chosen)
    wanted: Callable[[NDArray[np.float32]], NDArray[np.float32]] = (trace.log_probs or log_softmax) if key == LOG_PROBS else lambda x: x

    def run(variant: Variant) -> NDArray[np.float32]:
        end = int(looked_at.max()) + 1
        return wanted(variant_logits(variant, ids[None, :end])[0][looked_at])

    every = compute_logits(model, ids[None], dialect=dialect)[0]
    ours = wanted(every[chosen] if assumed or trace.positions is not None else every)
    found = judge_logits(ours, theirs, Variant("ours", model, dialect), run, alone, progress.bar("trying known mistakes"), chosen)
    if not assumed:
        return found, ()
    note = f"one row of {key.name} for {len(ids)} tokens: taken as that of the last position, {len(ids) - 1}"
    found = replace(found, compared=(len(ids) - 1,))
    if found.verdict in (Verdict.FLIPS, Verdict.WRONG):
        distance = position_nmse(wanted(every), np.broadcast_to(theirs, every.shape))
        nearest = int(distance.argmin())
        if distance[nearest] < distance[-1] / 4:
            reason = f"it is the row of position {nearest}, not of the last one, {len(ids) - 1}"
            found = replace(found, verdict=Verdict.WRONG, reason=reason, explanation=f"the row of position {nearest}")
    return found, (note,)


_MOST_POSITIONS = 64  # to try mistakes on: each is a forward pass


def _first(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first of some positions, of which the logits need few tokens."""
    few = positions[:_MOST_POSITIONS]
    late = np.flatnonzero(few >= max(_MOST_POSITIONS, int(few[0]) + 1))
    return few[: late[0]] if late.size else few


def check_logits(model: Model, ids: NDArray, theirs: ArrayLike, dialect: Dialect, last_only: bool) -> Judgement:
    """Logits of whole sequences [T] or [B, T], and nothing else: theirs have an axis V more, or in place of T with last_only."""
    batch = ids if ids.ndim == 2 else ids[None]
    ours = compute_logits(model, batch, last_only=last_only, dialect=dialect)
    ours = ours if ids.ndim == 2 else ours[0]
    theirs = np.asarray(theirs)
    theirs = theirs[0] if theirs.shape == (1, *ours.shape) else theirs  # a batch of one
    part = batch[: max(1, _MOST_POSITIONS // batch.shape[1])]
    part = part if last_only else part[:, :_MOST_POSITIONS]

    def run(variant: Variant) -> NDArray[np.float32]:
        logits = variant_logits(variant, part, last_only)
        return logits.reshape(-1, logits.shape[-1])

    found = judge_logits(ours, theirs, Variant("ours", model, dialect), run, progress=progress.bar("trying known mistakes"))
    if found.verdict != Verdict.WRONG or found.explanation is not None or len(batch) == 1:
        return found
    mixed = _mixed_sequences(ours, theirs, found.reach or FLIPS_LIMIT)
    return found if mixed is None else replace(found, reason=f"{mixed}; {found.reason}", explanation=mixed)


def _mixed_sequences(ours: NDArray[np.float32], theirs: NDArray, reach: float) -> str | None:
    """Which sequences of a batch [B, ..., V] are wrong, if not all are, and whether they are others'. reach: NMSE of roundings."""

    def away(a: int, b: int) -> float:
        return float(position_nmse(ours[a], theirs[b]).mean())

    wrong = [b for b in range(len(ours)) if away(b, b) > 5 * reach]
    for b in wrong:
        other = next((a for a in range(len(ours)) if a != b and away(a, b) <= 5 * reach), None)
        if other is not None:
            return f"sequence {b} has the logits of sequence {other}"
    if not wrong or len(wrong) == len(ours):
        return None
    some = ", ".join(map(str, wrong[:4])) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
    which = f"sequence {some} of {len(ours)} is" if len(wrong) == 1 else f"sequences {some} of {len(ours)} are"
    return f"only {which} wrong: are sequences of a batch mixed?"


def log_softmax(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-probabilities of logits [.., V], worked out in float64."""
    wide = x.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))).astype(np.float32)


# --- two dumps, no model --------------------------------------------------------------------------------------------------------------


def compare_traces(ours: Trace, theirs: Trace, partial: bool = False) -> Report:
    """Two dumps of the same tokens, ours taken as true.

    Without the model there are no derived bounds: a tensor is ROUNDING up to an NMSE of 1e-9 and FLIPS up to FLIPS_LIMIT at its worst
    position; int8 codes that differ are FLIPS at best. A tensor of ours that theirs lacks is INVALID unless `partial`.
    """
    ours, theirs = instance("ours", ours, Trace), instance("theirs", theirs, Trace)
    if ours.tokens is not None and theirs.tokens is not None and not np.array_equal(ours.tokens, theirs.tokens):
        return Report(Verdict.INVALID, f"{theirs.origin} was made with other token ids than {ours.origin}")
    common = [key for key in ours.points if key in theirs.points]
    missing = tuple(key for key in ours.points if key not in theirs.points)
    if not common:
        return Report(Verdict.INVALID, f"{theirs.origin} and {ours.origin} have no tensor in common", missing=missing)
    if missing and not partial:
        names = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        return Report(Verdict.INVALID, f"{theirs.origin} lacks {names}; --partial compares what both have", missing=missing)
    found = tuple(_compare_tensor(key, ours.points[key], theirs.points[key]) for key in common)
    worst = max(o.verdict for o in found)
    first = next((o for o in found if o.verdict >= Verdict.WRONG), None)
    reason = f"{len(found)} tensors compared" if first is None else f"{first.place}: {first.reason}"
    return Report(worst, reason, found, first, missing)


def _compare_tensor(key: Key, ours: NDArray, theirs: NDArray) -> OperationVerdict:
    codes = key.name.endswith("_codes")
    if theirs.shape != ours.shape:
        return OperationVerdict(key, Verdict.INVALID, f"its shape is {list(theirs.shape)}, expected {list(ours.shape)}")
    if same_bits(ours, theirs) and np.isfinite(ours.astype(np.float64)).all():
        return OperationVerdict(key, Verdict.SAME_BITS, max_error=0.0, nmse=0.0, scale=1.0, cosine=1.0, ulps=0.0)
    a, b = (x.reshape(len(x), -1).astype(np.float64) for x in (ours, theirs))
    if codes:
        verdict, reason, ratio = close(a, b)
        return statistics(key, max(verdict, Verdict.FLIPS), reason, (), ratio, a, b)
    problem = invalid_tensor(theirs.reshape(b.shape), a)
    if problem:
        return OperationVerdict(key, Verdict.INVALID, problem)
    # rows of a parameter are no positions: a small one is a sum of terms as large as the others', and as wrong
    least = float((a**2).sum() / len(a)) if key.name.startswith("grad_") else 0.0
    verdict, reason, ratio = close(a, b, least=least)
    return statistics(key, verdict, reason, (), ratio, a, b)
