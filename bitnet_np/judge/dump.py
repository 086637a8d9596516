"""Whole dumps judged by a model, the logits as such and every operation from the other engine's own inputs; or by another dump."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.errors import listed
from ..base.validate import flag as true_or_false
from ..base.validate import instance, positive
from ..engine.dialects import EXACT, Dialect
from ..engine.forward_pass import run_whole
from ..engine.network import Runtime
from ..engine.tokens import Tokens, check_tokens
from ..generation.nll import log_probabilities
from ..kernels.float_state import steady
from ..model.records import Model
from ..traces.points import SCORES, TOP_EXPERTS, Entry, Key, Points, Trace
from .bounds import ROUNDING_ACROSS, close, invalid_tensor, statistics
from .compared import Compared, Types, compare
from .declaring import flag
from .detail import Details
from .equivalence import look_through
from .first_looks import normalised, of_other_tokens, one_layer_lower, other_sums
from .law.graph import LOGITS, operations
from .law.precision import FLOAT32, Precision, storage_type, to_float_type
from .logits_alone import judge_logits
from .measures import FLIPS_LIMIT, Judgement, invalid, judge, position_nmse, same_bits
from .options import DEFAULT, Options
from .report.report import OperationVerdict, Report
from .tensors import TensorJudge
from .variant import Floats, Variant, variant_logits
from .verdict import Verdict

LOG_PROBS = Key("log_probs", None)
_MOST_POSITIONS = 64  # positions to try mistakes on: each mistake is a forward pass
_MOST_WORK = 10**10  # multiply-adds of a forward pass, up to which roundings are measured at all positions


def judge_dump(runtime: Runtime, tokens: Tokens, trace: Trace, options: Options = DEFAULT, search: bool = True) -> Report:
    """The report on every operation of a dump, and on its logits or log-probabilities as such, where it has some.

    runtime, tokens: checked; of one sequence. search: try known mistakes on logits as such. Nothing that a dump holds raises an error.
    """
    trace = _as_it_is(trace, tokens.ids.shape[1], runtime.model.config.vocab)
    report = _judge_dump(runtime, tokens, trace, options, search)
    part = f"; {len(trace.points)} of {len(trace.points) + len(trace.unread)} tensors were understood"
    reason = report.reason + part * (bool(trace.unread) and not report.verdict.exit_code)
    return replace(report, reason=reason, notes=(*trace.notes, *report.notes), not_understood=trace.unread)


def _as_it_is(trace: Trace, length: int, vocab: int) -> Trace:
    """The trace with flat logits as [T, V], and with log-probabilities and logits under their names; notes say so."""
    key = next((key for key in (LOGITS, LOG_PROBS) if key in trace.points), None)
    if key is None:
        return trace
    theirs, name, notes = trace.points[key], key, list(trace.notes)
    if theirs.shape == (1, length * vocab) != (length, vocab):
        theirs = theirs.reshape(length, vocab)
        notes.append(f"{key} is flat, {length * vocab} numbers: taken as {length} rows of {vocab}")
    kind = normalised(theirs) if theirs.shape[-1:] == (vocab,) else None
    if key == LOGITS and kind == "log-probabilities":
        name = LOG_PROBS
        notes.append(f"{key} are log-probabilities: the sum of their exponentials is 1 at each position. They are judged as such")
    elif key == LOG_PROBS and kind is None and trace.log_probs is None and theirs.size and theirs.max() > 1:
        name = LOGITS
        notes.append(f"{key} are logits: they have numbers above 0. They are judged as such")
    if name == key and len(notes) == len(trace.notes):
        return trace
    rest = trace.without(key)
    points: Any = rest.points
    points[name] = Entry(theirs.shape, theirs.dtype, lambda: theirs) if isinstance(points, Points) else theirs
    return replace(rest, notes=tuple(notes))


def _judge_dump(runtime: Runtime, tokens: Tokens, trace: Trace, options: Options, search: bool) -> Report:
    key = next((key for key in (LOGITS, LOG_PROBS) if key in trace.points), None)
    if key is None:
        return judge_operations(runtime, tokens, trace, options)
    declared, others = options.precision, trace.without(key)
    if not others.points:
        logits = _Logits.of(runtime, tokens, trace, run_whole(runtime, tokens)[0])
        kind = storage_type(logits.theirs)
        judged_as = declared or (None if kind == "float32" else Precision(act=kind))
        said = f"judged in the declared precision: {judged_as}" if declared else f"judged as {kind}, read off the dump"
        notes = () if judged_as is None or judged_as == FLOAT32 else (said,)
        return Report.of_logits(logits.judged(replace(options, precision=judged_as), search), (*logits.notes, *notes))
    compared, every = compare(runtime, tokens, trace)
    logits = _Logits.of(runtime, tokens, trace, every[0])
    # from the dump's result_norm
    is_operation = key == LOGITS and logits.has_all and invalid(every[0], logits.theirs) is None
    if not is_operation:
        compared.same.discard(key)
        for some in (compared.tensors, compared.problems):
            some.pop(key, None)
    report = judge_operations(runtime, tokens, trace if is_operation else others, options, compared)
    # what logits alone would show, more tensors must not hide: where what is wrong is in several operations judged together, or may be
    search = (
        search
        and report.verdict != Verdict.NARROW
        and any(len(o.across) > 1 for o in ([report.first_wrong] if report.first_wrong else report.operations))
    )
    is_wrong = report.verdict == Verdict.WRONG  # so roundings are not all that is, and causes were sought
    budget = options.budget / 2 if is_wrong else options.budget
    limited = replace(options, precision=declared or report.precision, strict=options.strict or is_wrong, budget=budget)
    of_logits = logits.judged(limited, search)
    is_right = report.verdict <= Verdict.NARROW and LOGITS in {o.key for o in report.operations}
    if is_right and of_logits.verdict == Verdict.WRONG and not (search and of_logits.explanation):  # a name is what several may hide
        reason = f"they follow from operations that are right: {of_logits.reason}"
        of_logits = replace(of_logits, verdict=max(report.verdict, Verdict.FLIPS), reason=reason)
    return replace(report, notes=(*logits.notes, *report.notes)).with_logits(of_logits)


# --- operations ---------------------------------------------------------------------------------------------------------------------------


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
    seen_at_once = one_layer_lower(dump.distances, dump.distances_below) or _of_other_tokens(runtime, ids, common, trace, dump)
    if seen_at_once is not None:
        return Report(Verdict.INVALID, seen_at_once)
    missing = tuple(key for key in every if key not in trace.points)
    invalid = tuple(OperationVerdict(key, Verdict.INVALID, dump.problems[key]) for key in common if dump.problems[key])
    seen = look_through(model, dump.first, dump.tensors)
    types = Types.of(options, dump.tensors, dump.same)
    judge = TensorJudge(runtime, ids, replace(dump, tensors=seen.tensors), types, options, seen.start, scored)
    verdicts = judge.verdicts()
    others = [key for key in trace.points if key not in every]
    notes = [
        *[f"flat, and taken as rows of tokens: {listed(dump.flat)}"] * bool(dump.flat),
        *[f"this model has no {listed(others)}: not judged"] * bool(others),
        *judge.types.notes(),
        *seen.notes,
        *[_untried(o) for o in verdicts if not o.tried][:1],
        *judge.search.notes(),
        *flag(judge, verdicts),
    ]
    first_wrong = next((o for o in verdicts if o.verdict == Verdict.WRONG), None)
    if invalid:
        first = invalid[0]
        reason = f"{first.place}: {first.reason}"
        if first_wrong is None:
            return Report(Verdict.INVALID, reason, invalid, first, missing)
        notes.append(f"{reason}; nothing from there on is judged")
    worst, judged_as = max(o.verdict for o in verdicts), judge.types.judged_as
    return Report(worst, _reason(verdicts, first_wrong), (*verdicts, *invalid), first_wrong, missing, tuple(notes), None, judged_as)


def _of_other_tokens(runtime: Runtime, ids: NDArray[np.int64], common: Sequence[Key], trace: Trace, dump: Compared) -> str | None:
    """How the token ids differ from those that the last tensor in common is right for."""
    floats = [key for key in common if not key.name.endswith(("_codes", "_scale", TOP_EXPERTS)) and key.name not in SCORES]
    if not floats or floats[-1] in dump.same:
        return None
    key, found = floats[-1], list[NDArray]()

    def keep(name: str, layer: int | None, array: NDArray) -> None:
        if key == Key(name, layer):
            found.append(array.reshape(len(array), -1).copy())

    def run(some: NDArray[np.int64]) -> NDArray:
        found.clear()
        logits = run_whole(replace(runtime, record=keep), Tokens.whole(some[None]))
        return logits[0] if key == LOGITS else found[0]

    return of_other_tokens(trace.points[key], ids, run)


def _reason(verdicts: Sequence[OperationVerdict], first_wrong: OperationVerdict | None) -> str:
    """The first wrong operation in words, and how many it may be; or if none is wrong, the first that rounds to fewer bits."""
    if first_wrong is not None:
        across = first_wrong.across
        reason = f"WRONG at {first_wrong.place}: {first_wrong.hypothesis or first_wrong.reason}"
        if len(across) > 1:
            reason += f"; {len(across)} operations lie between it and the tensors of the dump"
        return reason + other_layers(verdicts, first_wrong)
    narrow = [o for o in verdicts if o.verdict == Verdict.NARROW]
    if not narrow:
        return f"{len(verdicts)} tensors, each within the bound for its own inputs"
    first, more = narrow[0], f" (and {len(narrow) - 1} more)" if len(narrow) > 1 else ""
    others = len(verdicts) - len(narrow)
    return f"{first.place}{more}: {first.hypothesis}" + (f"; the other {others} tensors are within their bounds" if others else "")


def other_layers(verdicts: Sequence[OperationVerdict], first: OperationVerdict) -> str:
    """The layers where an operation has the same cause as in the first wrong one, and another one, if these are some layers only."""
    own = [o for o in verdicts if o.key.name == first.key.name]
    wrong = [o for o in own if o.verdict == Verdict.WRONG]
    same = [o for o in wrong if o.hypothesis and o.hypothesis == first.hypothesis]
    other = next((o for o in wrong if o.hypothesis and o not in same), None)
    if not first.hypothesis and other is not None:
        return f"; in layer {other.key.layer}: {other.hypothesis}"
    if not 1 < len(same) < len(own):
        return ""
    layers = listed([str(o.key.layer) for o in same[1:]])
    return f"; the same in layers {layers} of {len(own)}" + (f", and in layer {other.key.layer}: {other.hypothesis}" if other else "")


def _untried(verdict: OperationVerdict) -> str:
    """The tensors to record so that known mistakes can be tried, in words."""
    layers = sorted({k.layer for k in verdict.across if k.layer is not None})
    names = ",".join(dict.fromkeys(k.name for k in verdict.across if len(layers) < 2 or k.name == "l_out"))
    which = f" --layers {layers[0]}" if len(layers) == 1 else ""
    more = "; then all names of the first layer that is wrong" if len(layers) > 1 else ""
    return (
        f"{verdict.place}: known mistakes were not tried, {len(verdict.across)} operations of a model this large are too much work. "
        f"Record what lies between, as `bitnet-np trace{which} --names {names}` does{more}; or try them all the same, with --budget"
    )


# --- logits as such -----------------------------------------------------------------------------------------------------------------------


class _Logits(NamedTuple):
    """The logits, or log-probabilities, that a dump has of some positions, as such, beside ours of all positions."""

    runtime: Runtime
    ids: NDArray[np.int64]
    every: Floats  # ours, [T, V]
    theirs: NDArray  # [P, V]
    positions: NDArray[np.int64]  # [P]
    convert: Callable[[Floats], Floats]  # logits -> logits or log-probabilities, as theirs are
    has_all: bool  # whether there is a row for every position
    notes: tuple[str, ...]  # assumptions made

    @classmethod
    def of(cls, runtime: Runtime, tokens: Tokens, trace: Trace, every: Floats) -> "_Logits":
        key, length = LOGITS if LOGITS in trace.points else LOG_PROBS, len(every)
        theirs, positions = trace.points[key], trace.positions
        notes: tuple[str, ...] = ()
        if positions is None and len(theirs) == 1 < length:
            positions = np.array([length - 1])
            notes = (f"one row of {key.name} for {length} tokens: taken for the last position, {length - 1}",)
        convert = (trace.log_probs or log_softmax) if key == LOG_PROBS else lambda x: x
        has_all = positions is None
        return cls(runtime, tokens.ids[0], every, theirs, np.arange(length) if positions is None else positions, convert, has_all, notes)

    def judged(self, options: Options, search: bool) -> Judgement:
        """The verdict on them."""
        last, few = len(self.ids) - 1, self.positions[:_MOST_POSITIONS]
        late = np.flatnonzero(few >= max(_MOST_POSITIONS, int(few[0]) + 1))
        first = few[: late[0]] if late.size else few  # of the positions, whose logits need few tokens

        kind, ours = storage_type(self.theirs), self.convert(self.every[self.positions])
        is_normalised = self.convert is log_softmax and normalised(self.theirs) is not None and invalid(ours, self.theirs) is None

        def stored(x: Floats) -> Floats:
            x = to_float_type(self.convert(x), kind)
            return _apart_from_sums(ours[: x.shape[-2]], x) if is_normalised else x

        def run_first(variant: Variant, count: int, length: int) -> Floats:
            return stored(variant_logits(variant, np.tile(self.ids[:length], (count, 1))))

        if self.convert is log_softmax and invalid(ours, self.theirs) is None and (text := other_sums(self.theirs)) is not None:
            return replace(judge(ours, self.theirs, None, self.positions), verdict=Verdict.WRONG, reason=text, explanation=text)
        if self.has_all and self.theirs.ndim == 2:
            text = of_other_tokens(self.theirs, self.ids, lambda ids: self.convert(run_whole(self.runtime, Tokens.whole(ids[None]))[0]))
            if text is not None:
                return Judgement(Verdict.INVALID, text)
        nearest = self.nearest() if self.notes else last  # a row of another position tells no mistake
        base = Variant("ours", self.runtime.model, self.runtime.dialect)
        theirs = _apart_from_sums(ours, self.theirs) if is_normalised else self.theirs
        from_start = run_first if self.positions[0] == 0 and self.has_all else None

        def judged_at(looked_at: NDArray[np.int64], search: bool) -> Judgement:
            def run(variant: Variant) -> Floats:
                return stored(variant_logits(variant, self.ids[None, : int(looked_at.max()) + 1])[0][looked_at])

            return judge_logits(ours, theirs, base, run, options, search, self.positions, self.ids, from_start)

        judged = judged_at(first, search and nearest == last)
        is_unexplained = judged.verdict == Verdict.WRONG and judged.explanation is None
        if is_unexplained and len(first) < len(self.positions) and base.work(len(self.ids)) <= _MOST_WORK:
            # it may be right by all positions: roundings do not reach equally far at them
            judged = min(judged, judged_at(self.positions, search=False), key=lambda judged: judged.verdict)
        if not self.notes:
            return judged
        judged = replace(judged, compared=(last,))
        if nearest != last and judged.verdict in (Verdict.FLIPS, Verdict.WRONG):
            reason = f"it is the row of position {nearest}, not of the last one, {last}"
            return replace(judged, verdict=Verdict.WRONG, reason=reason, explanation=f"the row of position {nearest}")
        return judged

    def nearest(self) -> int:
        """The position whose logits, of ours, are far closer to their one row than those of the last position; else the last."""
        last = len(self.every) - 1
        if self.theirs.shape != self.every[-1:].shape:
            return last
        with np.errstate(all="ignore"):  # numbers that cannot be compared are refused later
            distance = position_nmse(self.convert(self.every), np.broadcast_to(self.theirs, self.every.shape))
        nearest = int(distance.argmin())
        return nearest if distance[nearest] < distance[-1] / 4 else last


def has_logits(runtime: Runtime, tokens: Tokens, trace: Trace, ours: Floats) -> bool:
    """Whether the logits of a trace are ours [T, V], or near them: those of other tokens are not."""
    logits = _Logits.of(runtime, tokens, trace, ours)
    if logits.theirs.shape != (len(logits.positions), ours.shape[1]) or logits.positions.max() >= len(ours):
        return False
    return bool(position_nmse(logits.convert(ours[logits.positions]), logits.theirs).mean() <= 5 * FLIPS_LIMIT)


def _apart_from_sums(ours: Floats, theirs: NDArray) -> Floats:
    """Log-probabilities [.., P, V] without the mean error of each position: as the sum of probabilities is 1, it follows from the other
    errors, and is off by more than they are."""
    shift = (theirs.astype(np.float64) - ours).mean(axis=-1, keepdims=True)
    return np.where(shift == 0, theirs, theirs - shift).astype(np.float32)


def log_softmax(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-probabilities of logits [.., V], computed in float64."""
    return log_probabilities(x).astype(np.float32)


# --- without a model ----------------------------------------------------------------------------------------------------------------------


@steady
def compare_traces(
    ours: Trace, theirs: Trace, partial: bool = False, details: Details | None = None, tolerance: float | None = None
) -> Report:
    """The report on two dumps of the same tokens, ours taken as true.

    Without the model there are no derived bounds: a tensor is ROUNDING up to an NMSE of 1e-9 and FLIPS up to FLIPS_LIMIT at its worst
    position; int8 codes that differ are FLIPS at best. A tensor of ours that theirs lacks is INVALID unless `partial`, or unless few
    engines write it: codes, their scales, and attention's scores.
    details: see judge_trace. tolerance: in place of those limits, the largest difference, as a part of a tensor's largest number.
    """
    tolerance, partial = None if tolerance is None else positive("tolerance", tolerance), true_or_false("partial", partial)
    ours, theirs = instance("ours", ours, Trace), instance("theirs", theirs, Trace)
    if details is not None:
        instance("details", details, Details)
    if ours.tokens is not None and theirs.tokens is not None and not np.array_equal(ours.tokens, theirs.tokens):
        return Report(Verdict.INVALID, f"{theirs.origin} was made with other token ids than {ours.origin}")
    common = [key for key in ours.points if key in theirs.points]
    missing = tuple(key for key in ours.points if key not in theirs.points)
    if not common:
        return Report(Verdict.INVALID, f"{theirs.origin} and {ours.origin} have no tensor in common", missing=missing)
    needed = [key for key in missing if not key.name.endswith(("_codes", "_scale")) and key.name not in SCORES]
    if needed and not partial:
        return Report(Verdict.INVALID, f"{theirs.origin} lacks {listed(needed, 5)}; --partial compares what both have", missing=missing)
    verdicts = tuple(_compare_tensor(key, ours.points[key], theirs.points[key], details, tolerance) for key in common)
    worst = max(o.verdict for o in verdicts)
    first = next((o for o in verdicts if o.verdict >= Verdict.WRONG), None)
    differs = next((o for o in verdicts if o.verdict != Verdict.SAME_BITS), None)
    if first is not None:
        reason = f"{first.place}: {first.reason}"
    else:
        reason = f"{len(verdicts)} tensors compared" + (f"; the first that differs is {differs.place}" if differs is not None else "")
    return Report(worst, reason, verdicts, first, missing, (*ours.notes, *theirs.notes))


def _compare_tensor(key: Key, ours: NDArray, theirs: NDArray, details: Details | None, tolerance: float | None) -> OperationVerdict:
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
    if tolerance is not None:
        part = float(np.abs(b - a).max() / max(np.abs(a).max(), np.finfo(np.float64).tiny))
        verdict, ratio = Verdict.ROUNDING if part <= tolerance else Verdict.WRONG, part / tolerance
        reason = f"the largest difference is {part:.3g} of the largest number, expected at most {tolerance:g}"
    if details is not None:
        details.rows(key, a, b, ROUNDING_ACROSS if verdict == Verdict.ROUNDING else FLIPS_LIMIT, least)
    return statistics(key, max(verdict, Verdict.FLIPS) if codes and tolerance is None else verdict, reason, (), ratio, a, b)
