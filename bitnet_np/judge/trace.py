"""The judge of a whole trace: each operation recomputed from the other engine's own inputs, the first wrong one named, and why."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..engine.dialects import EXACT, Dialect
from ..engine.network import Runtime
from ..engine.tokens import Tokens, check_tokens
from ..model.records import Model
from ..traces.points import SCORES, Trace
from .compared import Compared, compare
from .detail import Details
from .equivalence import look_through
from .graph import operations
from .options import DEFAULT, Options
from .precision import Precision
from .report import OperationVerdict, Report
from .storage import Types
from .tensors import TensorJudge
from .verdict import Verdict


def judge_trace(
    model: Model,
    trace: Trace,
    tokens: Sequence[int] | NDArray,
    dialect: Dialect = EXACT,
    precision: Precision | None = None,
    details: Details | None = None,
) -> Report:
    """Judge another engine's tensors for these tokens (one sequence), in the dialect and precision (see Options) that are declared."""
    runtime = Runtime(model, dialect).checked()
    options = Options(precision, details=details)
    return judge_operations(runtime, check_tokens(model.config, np.asarray(tokens)[None]), trace, options)


def judge_operations(
    runtime: Runtime, tokens: Tokens, trace: Trace, options: Options = DEFAULT, compared: Compared | None = None
) -> Report:
    """judge_trace for a checked runtime and checked tokens of one sequence. compared: what `compare` made of the trace, if it is known."""
    model, dialect, ids = runtime.model, runtime.dialect, tokens.ids[0]
    if trace.tokens is not None and not np.array_equal(trace.tokens, ids):
        return Report(Verdict.INVALID, f"{trace.origin} was made with other token ids: {list(trace.tokens[:8])}, expected {list(ids[:8])}")
    scored = {key.layer for key in trace.points if key.name in SCORES and key.layer is not None}
    every = [o.key for o in operations(model, dialect, scores=scored)]
    common = [key for key in every if key in trace.points]
    if not common:
        names = ", ".join(map(str, list(trace.points)[:5])) or "nothing"
        return Report(Verdict.INVALID, f"{trace.origin} has no tensor of this model's forward pass; it has {names}")
    dump = compared or compare(runtime, tokens, trace)[0]
    missing = tuple(key for key in every if key not in trace.points)
    invalid = tuple(OperationVerdict(key, Verdict.INVALID, dump.problems[key]) for key in common if dump.problems[key])
    seen = look_through(model, dump.first, dump.tensors)
    types = Types.of(options.precision, dump.tensors, dump.same)
    judge = TensorJudge(runtime, ids, replace(dump, tensors=seen.tensors), types, options, seen.start, scored)
    verdicts = judge.verdicts()
    notes = [*judge.types.notes(), *seen.notes, *[_untried(o) for o in verdicts if not o.tried][:1], *judge.search.notes()]
    first_wrong = next((o for o in verdicts if o.verdict == Verdict.WRONG), None)
    if invalid:
        first = invalid[0]
        reason = f"{first.place}: {first.reason}"
        if first_wrong is None:
            return Report(Verdict.INVALID, reason, invalid, first, missing)
        notes.append(f"{reason}; nothing from there on is judged")
    worst, judged_as = max(o.verdict for o in verdicts), judge.types.judged_as
    return Report(worst, _reason(verdicts, first_wrong), (*verdicts, *invalid), first_wrong, missing, tuple(notes), None, judged_as)


def _reason(verdicts: Sequence[OperationVerdict], first_wrong: OperationVerdict | None) -> str:
    """The first wrong operation in words, and the tensors to record where several operations lie in between; or where none is wrong, the
    first operation that rounds to fewer bits, if one does."""
    if first_wrong is not None:
        across = first_wrong.across
        reason = f"WRONG at {first_wrong.place}: {first_wrong.hypothesis or first_wrong.reason}"
        if len(across) > 1:
            several = len({k.layer for k in across if k.layer is not None}) > 1
            names = "l_out of every layer" if several else ", ".join(k.name for k in across[:-1])
            reason += f"; {len(across)} operations lie between it and the tensors of the dump: to tell which is wrong, dump {names}"
        return reason
    narrow = [o for o in verdicts if o.verdict == Verdict.NARROW]
    if not narrow:
        return f"{len(verdicts)} tensors, each within the bound for its own inputs"
    first, more = narrow[0], f" (and {len(narrow) - 1} more)" if len(narrow) > 1 else ""
    others = len(verdicts) - len(narrow)
    return f"{first.place}{more}: {first.hypothesis}" + (f"; the other {others} tensors are within their bounds" if others else "")


def _untried(verdict: OperationVerdict) -> str:
    """The tensors to record so that known mistakes can be tried, in words."""
    layers = sorted({k.layer for k in verdict.across if k.layer is not None})
    names = ",".join(dict.fromkeys(k.name for k in verdict.across if len(layers) < 2 or k.name == "l_out"))
    which = f" --layers {layers[0]}" if len(layers) == 1 else ""
    more = "; then all names of the first layer that is wrong" if len(layers) > 1 else ""
    return (
        f"{verdict.place}: known mistakes were not tried, {len(verdict.across)} operations of a model this large are too much work. "
        f"Record what lies between, as `bitnet-np trace{which} --names {names}` does{more}; or try them all the same, with --effort"
    )
