"""BitNet-rs's trace records against our forward pass: the shape, the hash and the root mean square (RMS) of tensors without their values.

Another hash says nothing, because every rounding changes it. Another RMS is evidence: two tensors' RMS differ by no more than the RMS of
their difference, and how large that is between honest engines is measured on the model and the tokens, by the runs of honest_engines.py.
The same RMS proves little: a permuted tensor has it too.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from ..dialects import EXACT, Dialect
from ..errors import TokenRangeError
from ..forward_pass import run_whole
from ..model import Model
from ..network import Runtime
from ..tokens import check_tokens
from ..traces.formats.bitnet_rs import Fingerprint, hash_of
from ..traces.points import SCORES, Key
from ..validate import integers
from .bounds import ROUNDING_ACROSS, TINY
from .graph import operations
from .honest_engines import FLOOR, roundings
from .logits import Reach, limits
from .precision import FLOAT32, Precision
from .report import OperationVerdict, Report
from .variant import Variant
from .verdict import Verdict

Tensors = dict[Key, NDArray[np.float32]]  # [T, width] each


def check_records(
    model: Model, ids: NDArray[np.int64], records: Sequence[Fingerprint], dialect: Dialect = EXACT, precision: Precision = FLOAT32
) -> Report:
    """The report on every tensor that has a record; the first one that is wrong, or the one before it, is at fault.

    ids: token ids [T] of the one sequence. SAME_BITS: the hashes are ours (needs the extra `interop`). ROUNDING, FLIPS: the RMS is as close
    as roundings reach. Raises what `forward_full` raises.
    """
    ids = integers("ids", ids, 1, TokenRangeError)
    Runtime(model, dialect).checked()
    check_tokens(model.config, ids[None])
    theirs: dict[Key, list[Fingerprint]] = {}
    for record in records:
        if record.key is not None and record.key.name not in SCORES:
            theirs.setdefault(record.key, []).append(record)
    base = Variant("ours", model, dialect)
    ours = _run(base, ids, theirs)
    runs = [_run(variant, ids, theirs) for variant in roundings(base, precision)]
    verdicts = tuple(_judged(key, theirs[key], ours[key], [run[key] for run in runs]) for key in ours)
    if not verdicts:
        return Report(Verdict.INVALID, f"no record is of a tensor of this model's forward pass, as {records[0].name!r}")
    worst = max(v.verdict for v in verdicts)
    first = next((v for v in verdicts if v.verdict == worst), None) if worst >= Verdict.WRONG else None
    reason = f"{len(verdicts)} tensors, by their RMS" if first is None else f"{worst.name} at {first.place}: {first.reason}"
    missing = tuple(o.key for o in operations(model, dialect) if o.key not in theirs)
    judged = sum(len(theirs[key]) for key in ours)
    notes = [
        f"compared with our engine in the dialect {dialect.name}",
        "records hold no values: an error that leaves a tensor's RMS is not seen",
        *([f"{len(records) - judged} of {len(records)} records are of other tensors"] if judged < len(records) else []),
    ]
    return Report(worst, reason, verdicts, first, missing, tuple(notes))


def _run(variant: Variant, ids: NDArray[np.int64], theirs: dict[Key, list[Fingerprint]]) -> Tensors:
    """A run's tensors that have records, in the order of the forward pass."""
    seen: Tensors = {}

    def look(name: str, layer: int | None, array: NDArray) -> None:
        if (key := Key(name, layer)) in theirs:
            seen[key] = array.reshape(len(ids), -1).astype(np.float32)

    run_whole(Runtime(variant.model, variant.dialect, variant.ops, variant.edit), check_tokens(variant.model.config, ids[None]), look)
    return seen


def _judged(key: Key, records: list[Fingerprint], ours: NDArray[np.float32], runs: list[NDArray[np.float32]]) -> OperationVerdict:
    """The verdict on one tensor, by its records."""
    power = max(_rms(ours) ** 2, TINY)
    reach = max([FLOOR, *(_rms(run.astype(np.float64) - ours) ** 2 / power for run in runs)])
    most = limits(Reach(reach, np.array([reach])), 1)[1]
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
        reason = f"RMS {record.rms:.6g} in {record.name}, expected {rms:.6g}; roundings reach {np.sqrt(most * power):.2g}"
        return OperationVerdict(key, Verdict.WRONG, reason, (key,), error, ratio, nmse)
    right = Verdict.SAME_BITS if same else Verdict.ROUNDING if nmse <= ROUNDING_ACROSS else Verdict.FLIPS
    return OperationVerdict(key, right, "", (key,), error, ratio, nmse)


def _rows(record: Fingerprint, ours: NDArray[np.float32]) -> list[NDArray[np.float32]]:
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


def _has_hash(record: Fingerprint, rows: list[NDArray[np.float32]]) -> bool:
    return find_spec("blake3") is not None and any(hash_of(values) == record.blake3 for values in rows)
