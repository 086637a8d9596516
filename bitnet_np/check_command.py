"""`bitnet-np check MODEL ... --theirs DUMP` and `bitnet-np compare OURS THEIRS`: judgements of dumps in any format."""

import argparse
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import progress
from .blame import close, invalid_tensor, judge_trace, statistics
from .compare import Judgement, Verdict, judge
from .errors import OptionError
from .interop import read_any
from .model import Model
from .points import Key, Trace
from .report import TABLE_HEADER, OperationVerdict, Report, heat_map, plot, table_rows
from .transformer import Dialect, compute_logits

LOGITS, LOG_PROBS = Key("result_output", None), Key("log_probs", None)
LARGEST_TABLE = 12  # lines of tensors that are not fine, before the rest is only counted
Table = Callable[[Sequence[str], Collection[Sequence[object]]], str]

JUDGEMENT_HEADER = ("tokens", "max error", "mean error", "NMSE", "scale", "KL", "top-1", "top-5", "verdict")


def judgement_row(name: str, j: Judgement) -> tuple:
    """A line of the table of logits."""
    return (name, j.max_error, j.mean_error, j.nmse, j.scale, j.kl, j.top1, j.top5, j.verdict.name)


def check_trace(model: Model, ids: NDArray[np.int64], trace: Trace, dialect: Dialect) -> tuple[Report, Judgement | None]:
    """Every operation of a dump, and its logits or log-probabilities as such."""
    logits = None
    rows = np.arange(len(ids)) if trace.positions is None else trace.positions
    for key in (LOGITS, LOG_PROBS):
        if key not in trace.points:
            continue
        theirs = trace.points[key]
        chosen = rows if len(theirs) == len(rows) else rows[-1:] if len(theirs) == 1 else rows
        ours = compute_logits(model, ids[None], dialect=dialect)[0][chosen]
        logits = judge(ours if key == LOGITS else log_softmax(ours), theirs)
        break
    if logits is not None and (trace.positions is not None or (len(trace.points) == 1 and logits.verdict <= Verdict.FLIPS)):
        return Report(logits.verdict, logits.reason), logits
    if logits is not None and logits.verdict == Verdict.INVALID:
        return Report(Verdict.INVALID, f"logits: {logits.reason}"), logits
    return judge_trace(model, trace, ids, dialect, progress.bar("judging operations")), logits


def log_softmax(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-probabilities of logits [.., V], worked out in float64."""
    wide = x.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))).astype(np.float32)


def show_check(arguments: argparse.Namespace, report: Report, logits: Judgement | None, table: Table) -> int:
    """Print a report; returns the exit code."""
    if logits is not None and logits.verdict > report.verdict:  # no operation is at fault by itself, the sum of all is
        report = replace(report, verdict=logits.verdict, reason=f"logits: {logits.reason}")
    verdict = report.verdict
    if getattr(arguments, "plot", None) is not None:
        if not report.operations:
            raise OptionError("--plot needs a dump with intermediate tensors")
        plot(report, arguments.plot)
    if arguments.json:
        print(json.dumps(report.as_dict() | {"logits": logits.as_dict() if logits else None}, indent=2))
        return verdict.exit_code
    print(f"{verdict.text}\n{report.reason}\n")
    if logits is not None and logits.verdict != Verdict.INVALID:
        print(table(JUDGEMENT_HEADER, [judgement_row("logits", logits)]) + "\n")
    if len(report.operations) > 1:
        print(heat_map(report) + "\n")
        bad = [o for o in report.operations if o.verdict >= Verdict.WRONG]
        if bad:
            print(table(TABLE_HEADER, table_rows(bad[:LARGEST_TABLE])))
            if len(bad) > LARGEST_TABLE:
                print(f"and {len(bad) - LARGEST_TABLE} more")
    elif verdict == Verdict.WRONG and report.missing and not report.operations:
        print("dump intermediate tensors too, attn_norm to l_out of each layer, and the operation at fault can be named")
    return verdict.exit_code


# --- two dumps, no model --------------------------------------------------------------------------------------------------------------


def compare_traces(ours: Trace, theirs: Trace, partial: bool = False) -> Report:
    """Two dumps of the same tokens, ours taken as true.

    Without the model there are no derived bounds: a tensor is ROUNDING up to an NMSE of 1e-9 and FLIPS up to FLIPS_LIMIT at its worst
    position; int8 codes that differ are FLIPS at best. A tensor of ours that theirs lacks is INVALID unless `partial`.
    """
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
    if theirs.dtype == ours.dtype and theirs.tobytes() == ours.tobytes() and np.isfinite(ours.astype(np.float64)).all():
        return OperationVerdict(key, Verdict.SAME_BITS, max_error=0.0, nmse=0.0, scale=1.0, cosine=1.0, ulps=0.0)
    a, b = (x.reshape(len(x), -1).astype(np.float64) for x in (ours, theirs))
    if codes:
        verdict, reason, ratio = close(a, b)
        return statistics(key, max(verdict, Verdict.FLIPS), reason, (), ratio, a, b)
    problem = invalid_tensor(theirs.reshape(b.shape), a)
    if problem:
        return OperationVerdict(key, Verdict.INVALID, problem)
    verdict, reason, ratio = close(a, b)
    return statistics(key, verdict, reason, (), ratio, a, b)


def run_compare(arguments: argparse.Namespace, table: Table) -> int:
    """Run `bitnet-np compare`."""
    ours, theirs = (read_any(path, name) for path, name in ((arguments.ours, arguments.format), (arguments.theirs, arguments.format)))
    return show_check(arguments, compare_traces(ours, theirs, arguments.partial), None, table)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ours", type=Path)
    parser.add_argument("theirs", type=Path)
    parser.add_argument("--format", help="of both (default: found out)")
    parser.add_argument("--partial", action="store_true", help="tensors that only one has are no error")
    parser.add_argument("--plot", type=Path, metavar="F.png", help="the heat map as a picture (extra `plots`)")
