"""Tensors that are known in part, against our forward pass: the first one that is farther than roundings reach.

llama.cpp prints some numbers and the sum of a tensor (PartialTensor). BitNet-rs's trace records have its shape, hash and root mean square,
RMS (Fingerprint). There are no inputs to recompute an operation from, so each tensor is compared with ours as logits alone are: how far
roundings reach is measured on the model and the tokens, by the runs of honest_engines.py.

Another hash says nothing, because every rounding changes it. Another RMS is evidence: two tensors' RMS differ by no more than the RMS of
their difference. The same RMS proves little: a permuted tensor has it too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import TokenRangeError
from ..base.validate import instance, integers
from ..engine.dialects import EXACT, Dialect
from ..engine.network import Runtime
from ..engine.tokens import check_tokens
from ..model.records import Model
from ..traces.formats.bitnet_rs import Fingerprint, hash_of
from ..traces.formats.eval_callback import PRINTED, PRINTED_SUM, PartialTensor, PartialTrace
from ..traces.points import SCORES, Key
from .bounds import ROUNDING_ACROSS, TINY
from .honest_engines import FLOOR, roundings
from .law.expected import Array, U
from .law.graph import operations
from .law.precision import FLOAT32, Precision
from .measures import Reach, limits
from .report.report import OperationVerdict, Report
from .variant import Floats, Variant
from .verdict import Verdict

_SAMPLED = (64, 256)  # most rows and columns by which a tensor's roundings are measured
_SUMS = 6.0  # standard deviations that a sum of roundings may be off


def _report(
    base: Variant,
    precision: Precision,
    ids: NDArray[np.int64],
    theirs: Mapping[Key, Any],
    take: Callable[[Any, Floats], Any],
    judge: Callable[[Any, Any, list[Any]], OperationVerdict],
    known: str,
) -> Report:
    """The report on what is known of some tensors, in their order; the first one that is wrong, or the one before it, is at fault.

    take: what is compared of ours, [T, width]. judge: also by the same of honest engines with other roundings. known: what is known.
    """
    ids = integers("ids", ids, 1, TokenRangeError)
    Runtime(base.model, base.dialect).checked()
    check_tokens(base.model.config, ids[None])

    def run(variant: Variant) -> dict[Key, Any]:
        seen: dict[Key, Any] = {}

        def look(name: str, layer: int | None, array: NDArray) -> None:
            if (key := Key(name, layer)) in theirs:
                seen[key] = take(theirs[key], array.reshape(len(array), -1))

        variant.run(ids[None], look)
        return seen

    ours, *runs = map(run, (base, *roundings(base, precision)))
    verdicts = tuple(judge(theirs[key], ours[key], [run[key] for run in runs if key in run]) for key in theirs if key in ours)
    if not verdicts:
        return Report(Verdict.INVALID, "")
    worst = max(v.verdict for v in verdicts)
    first = next((v for v in verdicts if v.verdict == worst), None) if worst >= Verdict.WRONG else None
    reason = f"{len(verdicts)} tensors, {known}" if first is None else f"{worst.name} at {first.place}: {first.reason}"
    missing = tuple(o.key for o in operations(base.model, base.dialect) if o.key not in theirs)
    return Report(worst, reason, verdicts, first, missing, (f"compared with our engine in the dialect {base.dialect.name}",))


def _most(power: float, errors: Iterable[float]) -> float:
    """The NMSE up to which a tensor is right. errors: mean square errors that roundings make of it; power: its mean square."""
    reach = max([FLOOR, *(error / power for error in errors)])
    return limits(Reach(reach, np.array([reach])), 1)[1]


# --- some numbers, and the sum --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Numbers:
    """What is compared of one of our tensors."""

    shape: tuple[int, ...]  # of the rows that theirs has
    first: int  # the position of the first of these
    values: Array  # [n] at the places of their numbers
    sample: Array  # [.., ..] rows and columns all over it
    sum: float
    absolute: float  # sum of absolute values

    @classmethod
    def of(cls, theirs: PartialTensor, array: Floats) -> "_Numbers":
        rows = array[-theirs.shape[0] :].astype(np.float64)
        inside = (theirs.index < rows.shape).all(axis=1)
        steps = [max(1, -(-n // most)) for n, most in zip(rows.shape, _SAMPLED, strict=True)]
        sample = rows[:: steps[0], :: steps[1]].copy()
        values = rows[tuple(theirs.index[inside].T)]
        return cls(rows.shape, len(array) - len(rows), values, sample, float(rows.sum()), float(np.abs(rows).sum()))


def check_partial(
    model: Model, ids: NDArray[np.int64], trace: PartialTrace, dialect: Dialect = EXACT, precision: Precision = FLOAT32
) -> Report:
    """The report on every tensor of which some numbers are known; the first one that is wrong, or the one before it, is at fault.

    ids: token ids [T] of the one sequence. ROUNDING: the numbers are ours, as printed. FLIPS: they are as close as roundings reach. Raises
    what `forward_full` raises.
    """
    theirs = {tensor.key: tensor for tensor in instance("trace", trace, PartialTrace).tensors}
    base = Variant("ours", model, dialect)
    report = _report(base, precision, ids, theirs, _Numbers.of, _judged_numbers, "as far as they were printed")
    if not report.operations:
        names = ", ".join(map(str, list(theirs)[:5]))
        return Report(Verdict.INVALID, f"{trace.origin} has no tensor of this model's forward pass; it has {names}")
    known, of = sum(len(t.values) for t in theirs.values()), sum(t.shape[0] * t.shape[1] for t in theirs.values())
    seen = f"the dump has {known} of {of} numbers, and sums: an error between the printed numbers that keeps the sum is not seen"
    return replace(report, notes=(*report.notes, seen))


def _judged_numbers(theirs: PartialTensor, ours: _Numbers, runs: list[_Numbers]) -> OperationVerdict:
    """The verdict on one tensor. runs: the same tensor with the roundings of honest engines."""
    key = theirs.key
    if theirs.shape != ours.shape:
        return OperationVerdict(key, Verdict.INVALID, f"its shape is {list(theirs.shape)}, expected {list(ours.shape)}")
    if not np.isfinite([*theirs.values, theirs.sum]).all():
        return OperationVerdict(key, Verdict.INVALID, "it has numbers that are not finite")
    power = max(float((ours.sample**2).mean()), TINY)
    most = _most(power, (float(((run.sample - ours.sample) ** 2).mean()) for run in runs))
    off = np.maximum(np.abs(theirs.values - ours.values) - PRINTED * (1 + 1e-6), 0)
    nmse, worst = float((off**2).mean()) / power, int(off.argmax())
    sum_error = abs(theirs.sum - ours.sum)
    sum_limit = PRINTED_SUM + _SUMS * np.sqrt(np.prod(ours.shape)) * (np.sqrt(most * power) + U * ours.absolute)
    sum_limit += sum(abs(run.sum - ours.sum) for run in runs)
    verdict, reason = Verdict.FLIPS if nmse > ROUNDING_ACROSS else Verdict.ROUNDING, ""
    if nmse > most:
        row, column = theirs.index[worst]
        place = f"{theirs.values[worst]:.4f} at position {ours.first + row}, element {column}, expected {ours.values[worst]:.4f}"
        verdict, reason = Verdict.WRONG, f"{place}; NMSE {nmse:.2g} of the printed numbers; rounding alone reaches {most:.2g}"
    elif sum_error > sum_limit:
        verdict, reason = Verdict.WRONG, f"the sum of its numbers is {theirs.sum:.6g}, expected {ours.sum:.6g} +- {sum_limit:.2g}"
    ratio = max(float(np.sqrt(nmse / most)), sum_error / sum_limit)
    return OperationVerdict(key, verdict, reason, (key,), float(off.max()), ratio, nmse)


# --- an RMS and a hash ----------------------------------------------------------------------------------------------------------------


def check_records(
    model: Model, ids: NDArray[np.int64], records: Sequence[Fingerprint], dialect: Dialect = EXACT, precision: Precision = FLOAT32
) -> Report:
    """The report on every tensor that has a record; the first one that is wrong, or the one before it, is at fault.

    ids: token ids [T] of the one sequence. SAME_BITS: the hashes are ours (needs the extra `interop`). ROUNDING, FLIPS: the RMS is as close
    as roundings reach. Raises what `forward_full` raises.
    """
    theirs: dict[Key, list[Fingerprint]] = {}
    for record in records:
        if record.key is not None and record.key.name not in SCORES:
            theirs.setdefault(record.key, []).append(record)
    base, float32 = Variant("ours", model, dialect), lambda known, array: array.astype(np.float32)
    report = _report(base, precision, ids, theirs, float32, _judged_records, "by their RMS")
    if not report.operations:
        return Report(Verdict.INVALID, f"no record names a tensor of this model's forward pass; the first has {records[0].name!r}")
    judged = sum(len(theirs[o.key]) for o in report.operations)
    others = [f"{len(records) - judged} of {len(records)} records are of other tensors"] if judged < len(records) else []
    return replace(report, notes=(*report.notes, "records hold no values: an error that keeps a tensor's RMS is not seen", *others))


def _judged_records(records: list[Fingerprint], ours: Floats, runs: list[Floats]) -> OperationVerdict:
    """The verdict on one tensor, by its records."""
    key = records[0].key
    assert key is not None
    power = max(_rms(ours) ** 2, TINY)
    most = _most(power, (_rms(run.astype(np.float64) - ours) ** 2 for run in runs))
    errors, same = [], True
    for record in records:
        rows = _rows(record, ours)
        if not rows:
            expected = f"{ours.shape[1]} numbers of one of {len(ours)} tokens, or all"
            return OperationVerdict(key, Verdict.INVALID, f"{record.name} has shape {list(record.shape)}, expected {expected}")
        if not np.isfinite(record.rms):
            return OperationVerdict(key, Verdict.INVALID, f"{record.name} has no RMS that is finite")
        rms = min(map(_rms, rows), key=lambda value: abs(value - record.rms))
        errors.append((abs(rms - record.rms), record, rms))
        same = same and find_spec("blake3") is not None and any(hash_of(values) == record.blake3 for values in rows)
    error, record, rms = max(errors, key=lambda item: item[0])
    nmse = float(np.mean([e**2 for e, *_ in errors])) / power
    verdict, reason = Verdict.SAME_BITS if same else Verdict.ROUNDING if nmse <= ROUNDING_ACROSS else Verdict.FLIPS, ""
    if nmse > most:
        reason = f"RMS {record.rms:.6g} in {record.name}, expected {rms:.6g}; rounding alone reaches {np.sqrt(most * power):.2g}"
        verdict = Verdict.WRONG
    return OperationVerdict(key, verdict, reason, (key,), error, float(np.sqrt(nmse / most)), nmse)


def _rows(record: Fingerprint, ours: Floats) -> list[Floats]:
    """The rows of ours that a record may be of: its token's, or all. BitNet-rs's own dumps call every token 0 and keep the last."""
    tokens, width = ours.shape
    if record.num_elements == tokens * width and tokens > 1:
        return [ours]
    position = record.seq or 0
    if record.num_elements != width or not 0 <= position < tokens:
        return []
    return [ours[position], ours[-1]] if position == 0 else [ours[position]]


def _rms(values: NDArray) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))
