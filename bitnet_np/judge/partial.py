"""Tensors of which only some numbers and the sum are known, against our forward pass: the first one that is farther than roundings reach.

There are no inputs to recompute an operation from, so each tensor is compared with ours as logits alone are: how far roundings reach is
measured on the model and the tokens, by the runs of honest_engines.py.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..dialects import EXACT, Dialect
from ..errors import TokenRangeError
from ..forward_pass import run_whole
from ..model import Model
from ..network import Runtime
from ..tokens import check_tokens
from ..traces.formats.eval_callback import PRINTED, PRINTED_SUM, PartialTensor, PartialTrace
from ..traces.points import Key
from ..validate import instance, integers
from .bounds import ROUNDING_ACROSS, TINY
from .graph import operations
from .honest_engines import FLOOR, roundings
from .logits import Reach, limits
from .operations import U
from .precision import FLOAT32, Precision
from .report import OperationVerdict, Report
from .variant import Variant
from .verdict import Verdict

Array = NDArray[np.float64]

_SAMPLED = (64, 256)  # most rows and columns by which a tensor's roundings are measured
_SUMS = 6.0  # standard deviations that a sum of roundings may be off


@dataclass(frozen=True)
class _Ours:
    """What is compared of one of our tensors."""

    shape: tuple[int, int]  # of the rows that theirs has
    values: Array  # [n] at the places of their numbers
    sample: Array  # [.., ..] rows and columns all over it
    sum: float
    absolute: float  # sum of absolute values


def check_partial(
    model: Model, ids: NDArray[np.int64], trace: PartialTrace, dialect: Dialect = EXACT, precision: Precision = FLOAT32
) -> Report:
    """The report on every tensor of which some numbers are known; the first one that is wrong, or the one before it, is at fault.

    ids: token ids [T] of the one sequence. ROUNDING: the numbers are ours, as printed. FLIPS: they are as close as roundings reach. Raises
    what `forward_full` raises.
    """
    ids, trace = integers("ids", ids, 1, TokenRangeError), instance("trace", trace, PartialTrace)
    Runtime(model, dialect).checked()
    check_tokens(model.config, ids[None])
    base = Variant("ours", model, dialect)
    theirs = {tensor.key: tensor for tensor in trace.tensors}
    ours = _run(base, ids, theirs)
    runs = [_run(variant, ids, theirs) for variant in roundings(base, precision)]
    verdicts = [
        _judged(tensor, len(ids), ours[key], [run[key] for run in runs if key in run]) for key, tensor in theirs.items() if key in ours
    ]
    if not verdicts:
        return Report(
            Verdict.INVALID, f"{trace.origin} has no tensor of this model's forward pass; it has {', '.join(map(str, list(theirs)[:5]))}"
        )
    worst = max(v.verdict for v in verdicts)
    first = next((v for v in verdicts if v.verdict == worst), None) if worst >= Verdict.WRONG else None
    known, of = sum(len(t.values) for t in theirs.values()), sum(t.shape[0] * t.shape[1] for t in theirs.values())
    reason = f"{len(verdicts)} tensors, as far as they were printed" if first is None else f"{worst.name} at {first.place}: {first.reason}"
    missing = tuple(o.key for o in operations(model, dialect) if o.key not in theirs)
    seen = f"{known} of {of} numbers are known, and sums: an error between the printed numbers that leaves the sum is not seen"
    return Report(worst, reason, tuple(verdicts), first, missing, (f"compared with our engine in the dialect {dialect.name}", seen))


def _run(variant: Variant, ids: NDArray[np.int64], theirs: dict[Key, PartialTensor]) -> dict[Key, _Ours]:
    """What is compared of a run's tensors."""
    seen: dict[Key, _Ours] = {}

    def look(name: str, layer: int | None, array: NDArray) -> None:
        tensor = theirs.get(Key(name, layer))
        if tensor is None:
            return
        rows = array.reshape(len(array), -1)[-tensor.shape[0] :].astype(np.float64)
        inside = (tensor.index < rows.shape).all(axis=1)
        values = rows[tuple(tensor.index[inside].T)]
        steps = [max(1, -(-n // most)) for n, most in zip(rows.shape, _SAMPLED, strict=True)]
        sample = rows[:: steps[0], :: steps[1]].copy()
        seen[tensor.key] = _Ours((rows.shape[0], rows.shape[1]), values, sample, float(rows.sum()), float(np.abs(rows).sum()))

    run_whole(Runtime(variant.model, variant.dialect, variant.ops, variant.edit), check_tokens(variant.model.config, ids[None]), look)
    return seen


def _judged(theirs: PartialTensor, tokens: int, ours: _Ours, runs: list[_Ours]) -> OperationVerdict:
    """The verdict on one tensor. runs: the same tensor with the roundings of honest engines."""
    key = theirs.key
    if theirs.shape != ours.shape:
        return OperationVerdict(key, Verdict.INVALID, f"its shape is {list(theirs.shape)}, expected {list(ours.shape)}")
    if not np.isfinite([*theirs.values, theirs.sum]).all():
        return OperationVerdict(key, Verdict.INVALID, "it has numbers that are not finite")
    power = max(float((ours.sample**2).mean()), TINY)
    reach = max([FLOOR, *(float(((run.sample - ours.sample) ** 2).mean()) / power for run in runs)])
    most = limits(Reach(reach, np.array([reach])), 1)[1]
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
        verdict, reason = Verdict.WRONG, f"{place}; NMSE {nmse:.2g} of the known numbers, roundings reach {most:.2g}"
    elif sum_error > sum_limit:
        verdict, reason = Verdict.WRONG, f"the sum of its numbers is {theirs.sum:.6g}, expected {ours.sum:.6g} +- {sum_limit:.2g}"
    else:
        verdict, reason = Verdict.FLIPS if nmse > ROUNDING_ACROSS else Verdict.ROUNDING, ""
    ratio = max(float(np.sqrt(nmse / most)), sum_error / sum_limit)
    return OperationVerdict(key, verdict, reason, (key,), float(off.max()), ratio, nmse)
