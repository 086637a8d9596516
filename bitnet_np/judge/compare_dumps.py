"""Two dumps of the same tokens compared with each other, without a model."""

import numpy as np
from numpy.typing import NDArray

from ..base.errors import listed
from ..base.validate import instance
from ..kernels.float_state import steady
from ..traces.points import Key, Trace
from .bounds import ROUNDING_ACROSS, close, invalid_tensor, statistics
from .detail import Details
from .logits import FLIPS_LIMIT, same_bits
from .report import OperationVerdict, Report
from .verdict import Verdict


@steady
def compare_traces(ours: Trace, theirs: Trace, partial: bool = False, details: Details | None = None) -> Report:
    """The report on two dumps of the same tokens, ours taken as true.

    Without the model there are no derived bounds: a tensor is ROUNDING up to an NMSE of 1e-9 and FLIPS up to FLIPS_LIMIT at its worst
    position; int8 codes that differ are FLIPS at best. A tensor of ours that theirs lacks is INVALID unless `partial`.
    details: see judge_trace.
    """
    ours, theirs = instance("ours", ours, Trace), instance("theirs", theirs, Trace)
    if ours.tokens is not None and theirs.tokens is not None and not np.array_equal(ours.tokens, theirs.tokens):
        return Report(Verdict.INVALID, f"{theirs.origin} was made with other token ids than {ours.origin}")
    common = [key for key in ours.points if key in theirs.points]
    missing = tuple(key for key in ours.points if key not in theirs.points)
    if not common:
        return Report(Verdict.INVALID, f"{theirs.origin} and {ours.origin} have no tensor in common", missing=missing)
    if missing and not partial:
        return Report(Verdict.INVALID, f"{theirs.origin} lacks {listed(missing, 5)}; --partial compares what both have", missing=missing)
    verdicts = tuple(_compare_tensor(key, ours.points[key], theirs.points[key], details) for key in common)
    worst = max(o.verdict for o in verdicts)
    first = next((o for o in verdicts if o.verdict >= Verdict.WRONG), None)
    reason = f"{len(verdicts)} tensors compared" if first is None else f"{first.place}: {first.reason}"
    return Report(worst, reason, verdicts, first, missing)


def _compare_tensor(key: Key, ours: NDArray, theirs: NDArray, details: Details | None) -> OperationVerdict:
    codes = key.name.endswith("_codes")
    if theirs.shape != ours.shape:
        return OperationVerdict(key, Verdict.INVALID, f"its shape is {list(theirs.shape)}, expected {list(ours.shape)}")
    if same_bits(ours, theirs) and np.isfinite(ours.astype(np.float64)).all():
        return OperationVerdict(key, Verdict.SAME_BITS, max_error=0.0, nmse=0.0, scale=1.0, cosine=1.0, ulps=0.0)
    a, b = (x.reshape(len(x), -1).astype(np.float64) for x in (ours, theirs))
    problem = "" if codes else invalid_tensor(theirs.reshape(b.shape), a)
    if problem:
        return OperationVerdict(key, Verdict.INVALID, problem)
    # rows of a gradient are no positions: a small one is a sum of terms as large as the others', and as wrong
    least = float((a**2).sum() / len(a)) if key.name.startswith("grad_") else 0.0
    verdict, reason, ratio = close(a, b, least=least)
    if details is not None:
        details.rows(key, a, b, ROUNDING_ACROSS if verdict == Verdict.ROUNDING else FLIPS_LIMIT, least)
    return statistics(key, max(verdict, Verdict.FLIPS) if codes else verdict, reason, (), ratio, a, b)
