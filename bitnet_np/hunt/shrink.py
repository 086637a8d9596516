"""The smallest case that fails as a given one does. The failure stays the same: `fails` says so of each candidate.

Runs of an engine cost tenths of a second, so fields are first set back to the plainest case in groups, and numbers are then divided.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..testing.space import FIELDS, Case, fitted

Fails = Callable[[Sequence[Case]], list[bool]]
"""Whether each of some cases fails in the same way. Raises TimeoutError where there is no time for it."""

NUMBERS = ("length", "prefix", "chunk", "batch", "threads", "layers", "kv_heads", "group", "head_dim", "width", "ffn", "vocab", "window",
           "experts", "experts_used")  # fmt: skip
_STEPS = (2, 4, 8, 16, 32, 64, 128)


def smallest(case: Case, plain: Case, fails: Fails, keep: Callable[[Case], None], hint: int | None = None, width: int = 2) -> Case:
    """The smallest case. keep: told of each smaller one, so that it is known if time runs out. hint: a length that may do. width: cases to
    try at a time."""

    def first(cases: Sequence[Case]) -> Case | None:
        """The first of them that fails."""
        for at in range(0, len(cases), width):
            some = cases[at : at + width]
            for candidate, failed in zip(some, fails(some), strict=True):
                if failed:
                    keep(candidate)
                    return candidate
        return None

    if hint is not None and plain.length <= hint < case.length:
        case = first([changed(case, "length", hint)]) or case
    before = None
    while case != before:  # a field may be plainer once another one is: what was tried costs nothing
        before, case = case, _plainer(case, plain, first)
        for name in NUMBERS:
            case = _lower(case, name, getattr(plain, name), first, width)
    return _lower(case, "length", 0, first, width) if case.length <= 2 * plain.length else case


First = Callable[[Sequence[Case]], Case | None]


def _plainer(case: Case, plain: Case, first: First) -> Case:
    """Fields set back to the plainest case's, in groups that get smaller."""
    size = len(FIELDS)
    while names := differing(case, plain):
        size = min(size, (len(names) + 1) // 2)
        groups = [names[i : i + size] for i in range(0, len(names), size)]
        cases = [fitted(replace(case, **{name: getattr(plain, name) for name in group})) for group in groups]
        if smaller := first([c for c in cases if len(differing(c, plain)) < len(names)]):
            case = smaller
        elif size == 1:
            break
        else:
            size = (size + 1) // 2
    return case


def differing(case: Case, plain: Case) -> list[str]:
    """The fields in which two cases differ."""
    return [name for name in FIELDS if getattr(case, name) != getattr(plain, name)]


def _lower(case: Case, name: str, low: int, first: First, width: int) -> Case:
    """A number made smaller: first to those that leave the same remainders, then by halves. low: passes, or is plainer and was tried."""

    def lower(values: set[int]) -> list[Case]:
        cases = dict.fromkeys(changed(case, name, value) for value in sorted(values) if value > low)
        return [c for c in cases if low < getattr(c, name) < getattr(case, name)]

    over = getattr(case, name) - low - 1
    case = first(lower({low + 1, *(low + 1 + over % step for step in _STEPS)})[:6]) or case
    while cuts := lower({low + (getattr(case, name) - low) * i // (width + 1) for i in range(1, width + 1)}):
        case = first(cuts) or case
        low = max((getattr(c, name) for c in cuts if getattr(c, name) < getattr(case, name)), default=low)
    return case


def changed(case: Case, name: str, value: Any) -> Case:
    """The case with another value of one field, fitted."""
    return fitted(replace(case, **{name: value}))
