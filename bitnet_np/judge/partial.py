"""Tensors that are known in part, against our forward pass: the first one that is farther than roundings reach.

Of a tensor that llama.cpp printed some numbers and the sum are known (PartialTensor), of one in BitNet-rs's trace records its shape, its
hash and its root mean square, RMS (Fingerprint). There are no inputs to recompute an operation from, so each tensor is compared with ours
as logits alone are: how far roundings reach is measured on the model and the tokens, by the runs of honest_engines.py.

Another hash says nothing, because every rounding changes it. Another RMS is evidence: two tensors' RMS differ by no more than the RMS of
their difference. The same RMS proves little: a permuted tensor has it too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

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
from .expected import U
from .graph import operations
from .honest_engines import FLOOR, roundings
from .logits import Reach, limits
from .precision import FLOAT32, Precision
from .report import OperationVerdict, Report
from .variant import Variant
from .verdict import Verdict

Array = NDArray[np.float64]
Tensor = NDArray[np.float32]

_SAMPLED = (64, 256)  # most rows and columns by which a tensor's roundings are measured
_SUMS = 6.0  # standard deviations that a sum of roundings may be off

_Known = TypeVar("_Known")
_Taken = TypeVar("_Taken")


class _Ours:
    """Our forward pass of some tokens, and those of honest engines with other roundings."""

    def __init__(self, model: Model, ids: NDArray[np.int64], dialect: Dialect, precision: Precision) -> None:
        self.ids = integers("ids", ids, 1, TokenRangeError)
        Runtime(model, dialect).checked()
        check_tokens(model.config, self.ids[None])
        self.base, self.precision = Variant("ours", model, dialect), precision

    def verdicts(
        self,
        theirs: Mapping[Key, _Known],
        take: Callable[[_Known, Tensor], _Taken],
        judge: Callable[[_Known, _Taken, list[_Taken]], OperationVerdict],
    ) -> dict[Key, OperationVerdict]:
        """The verdicts on what is known of some tensors, in the order of the forward pass. take: what is compared of ours [T, width]."""
        ours, *runs = (self._run(variant, theirs, take) for variant in (self.base, *roundings(self.base, self.precision)))
        return {key: judge(theirs[key], taken, [run[key] for run in runs if key in run]) for key, taken in ours.items()}

    def _run(self, variant: Variant, theirs: Mapping[Key, _Known], take: Callable[[_Known, Tensor], _Taken]) -> dict[Key, _Taken]:
        seen: dict[Key, _Taken] = {}

        def look(name: str, layer: int | None, array: NDArray) -> None:
            if (key := Key(name, layer)) in theirs:
                seen[key] = take(theirs[key], array.reshape(len(array), -1))

        variant.run(self.ids[None], look)
        return seen

    def report(self, verdicts: tuple[OperationVerdict, ...], theirs: Mapping[Key, Any], right: str, *notes: str) -> Report:
        """The report on verdicts, the first of which that is wrong, or the one before it, is at fault. right: the reason if none is."""
        worst = max(v.verdict for v in verdicts)
        first = next((v for v in verdicts if v.verdict == worst), None) if worst >= Verdict.WRONG else None
        reason = right if first is None else f"{worst.name} at {first.place}: {first.reason}"
        missing = tuple(o.key for o in operations(self.base.model, self.base.dialect) if o.key not in theirs)
        compared = f"compared with our engine in the dialect {self.base.dialect.name}"
        return Report(worst, reason, verdicts, first, missing, (compared, *notes))


def _most(power: float, errors: Iterator[float]) -> float:
    """The NMSE up to which a tensor is right. errors: mean square errors that roundings make of it; power: its mean square."""
    reach = max([FLOOR, *(error / power for error in errors)])
    return limits(Reach(reach, np.array([reach])), 1)[1]


# --- some numbers, and the sum --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Numbers:
    """What is compared of one of our tensors."""

    shape: tuple[int, int]  # of the rows that theirs has
    values: Array  # [n] at the places of their numbers
    sample: Array  # [.., ..] rows and columns all over it
    sum: float
    absolute: float  # sum of absolute values

    @classmethod
    def of(cls, theirs: PartialTensor, array: Tensor) -> "_Numbers":
        rows = array[-theirs.shape[0] :].astype(np.float64)
        inside = (theirs.index < rows.shape).all(axis=1)
        steps = [max(1, -(-n // most)) for n, most in zip(rows.shape, _SAMPLED, strict=True)]
        sample = rows[:: steps[0], :: steps[1]].copy()
        values = rows[tuple(theirs.index[inside].T)]
        return cls((rows.shape[0], rows.shape[1]), values, sample, float(rows.sum()), float(np.abs(rows).sum()))


def check_partial(
    model: Model, ids: NDArray[np.int64], trace: PartialTrace, dialect: Dialect = EXACT, precision: Precision = FLOAT32
) -> Report:
    """The report on every tensor of which some numbers are known; the first one that is wrong, or the one before it, is at fault.

    ids: token ids [T] of the one sequence. ROUNDING: the numbers are ours, as printed. FLIPS: they are as close as roundings reach. Raises
    what `forward_full` raises.
    """
    trace, ours = instance("trace", trace, PartialTrace), _Ours(model, ids, dialect, precision)
    theirs = {tensor.key: tensor for tensor in trace.tensors}
    by_key = ours.verdicts(theirs, _Numbers.of, lambda *what: _judged_numbers(len(ours.ids), *what))
    verdicts = tuple(by_key[key] for key in theirs if key in by_key)
    if not verdicts:
        names = ", ".join(map(str, list(theirs)[:5]))
        return Report(Verdict.INVALID, f"{trace.origin} has no tensor of this model's forward pass; it has {names}")
    known, of = sum(len(t.values) for t in theirs.values()), sum(t.shape[0] * t.shape[1] for t in theirs.values())
    seen = f"the dump has {known} of {of} numbers, and sums: an error between the printed numbers that keeps the sum is not seen"
    return ours.report(verdicts, theirs, f"{len(verdicts)} tensors, as far as they were printed", seen)


def _judged_numbers(tokens: int, theirs: PartialTensor, ours: _Numbers, runs: list[_Numbers]) -> OperationVerdict:
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
    numbers = ours.shape[0] * ours.shape[1]
    sum_error = abs(theirs.sum - ours.sum)
    sum_limit = PRINTED_SUM + _SUMS * np.sqrt(numbers) * (np.sqrt(most * power) + U * ours.absolute)
    sum_limit += sum(abs(run.sum - ours.sum) for run in runs)
    if nmse > most:
        row, column = theirs.index[worst]
        place = (
            f"{theirs.values[worst]:.4f} at position {tokens - ours.shape[0] + row}, element {column}, expected {ours.values[worst]:.4f}"
        )
        verdict, reason = Verdict.WRONG, f"{place}; NMSE {nmse:.2g} of the printed numbers; rounding alone reaches {most:.2g}"
    elif sum_error > sum_limit:
        verdict, reason = Verdict.WRONG, f"the sum of its numbers is {theirs.sum:.6g}, expected {ours.sum:.6g} +- {sum_limit:.2g}"
    else:
        verdict, reason = Verdict.FLIPS if nmse > ROUNDING_ACROSS else Verdict.ROUNDING, ""
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
    ours = _Ours(model, ids, dialect, precision)
    theirs: dict[Key, list[Fingerprint]] = {}
    for record in records:
        if record.key is not None and record.key.name not in SCORES:
            theirs.setdefault(record.key, []).append(record)
    by_key = ours.verdicts(theirs, lambda known, array: array.astype(np.float32), _judged_records)
    if not by_key:
        return Report(Verdict.INVALID, f"no record names a tensor of this model's forward pass; the first has {records[0].name!r}")
    judged = sum(len(theirs[key]) for key in by_key)
    others = [f"{len(records) - judged} of {len(records)} records are of other tensors"] if judged < len(records) else []
    no_values = "records hold no values: an error that keeps a tensor's RMS is not seen"
    return ours.report(tuple(by_key.values()), theirs, f"{len(by_key)} tensors, by their RMS", no_values, *others)


def _judged_records(records: list[Fingerprint], ours: Tensor, runs: list[Tensor]) -> OperationVerdict:
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
        same = same and _has_hash(record, rows)
    error, record, rms = max(errors, key=lambda item: item[0])
    nmse = float(np.mean([e**2 for e, *_ in errors])) / power
    ratio = float(np.sqrt(nmse / most))
    if nmse > most:
        reason = f"RMS {record.rms:.6g} in {record.name}, expected {rms:.6g}; rounding alone reaches {np.sqrt(most * power):.2g}"
        return OperationVerdict(key, Verdict.WRONG, reason, (key,), error, ratio, nmse)
    right = Verdict.SAME_BITS if same else Verdict.ROUNDING if nmse <= ROUNDING_ACROSS else Verdict.FLIPS
    return OperationVerdict(key, right, "", (key,), error, ratio, nmse)


def _rows(record: Fingerprint, ours: Tensor) -> list[Tensor]:
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


def _has_hash(record: Fingerprint, rows: list[Tensor]) -> bool:
    return find_spec("blake3") is not None and any(hash_of(values) == record.blake3 for values in rows)
