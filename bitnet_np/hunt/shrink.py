"""The smallest case that fails as a given one does. The failure stays the same: `fails` says so of each candidate.

Runs of an engine cost tenths of a second, so fields are first set back to the plainest case in groups, and numbers are then divided.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..testing.space import FIELDS, Case, fitted

Fails = Callable[[Sequence[Case]], list[bool]]
"""Whether each of some cases fails in the same way. Raises TimeoutError where there is no time for it."""

_OF_CALLS = ("length", "prefix", "chunk", "batch", "threads")
NUMBERS = (*_OF_CALLS, "layers", "kv_heads", "group", "head_dim", "width", "ffn", "vocab", "window", "experts")
_STEPS = (2, 4, 8, 16, 32, 64, 128)


def smallest(case: Case, plain: Case, fails: Fails, keep: Callable[[Case], None], hint: int | None = None, width: int = 2) -> Case:
    """The smallest case. keep: told of each smaller one, so that it is known if time runs out. hint: a length that may do. width: cases to
    try at a time."""
    if hint is not None and plain.length <= hint < case.length and fails([shorter := fitted(replace(case, length=hint))])[0]:
        case = shorter
        keep(case)
    case = _plainer(case, plain, fails, keep, width)
    for name in NUMBERS:
        case = _lower(case, plain, name, fails, keep, width)
    return _plainer(case, plain, fails, keep, width)


def _differing(case: Case, plain: Case) -> list[str]:
    return [name for name in FIELDS if getattr(case, name) != getattr(plain, name)]


def _plainer(case: Case, plain: Case, fails: Fails, keep: Callable[[Case], None], width: int) -> Case:
    """Fields set back to the plainest case's, in groups that get smaller."""
    names = _differing(case, plain)
    size = max(1, (len(names) + 1) // 2)
    while names:
        groups = [names[i : i + size] for i in range(0, len(names), size)]
        changed = False
        for at in range(0, len(groups), width):
            some = groups[at : at + width]
            cases = [fitted(replace(case, **{name: getattr(plain, name) for name in group})) for group in some]
            cases = [candidate for candidate in cases if candidate != case and _simpler(candidate, case, plain)]
            for candidate, failed in zip(cases, fails(cases), strict=True):
                if failed:
                    case, changed = candidate, True
                    keep(case)
                    break
            if changed:
                break
        if not changed:
            if size == 1:
                break
            size = (size + 1) // 2
        names = _differing(case, plain)
        size = min(size, max(1, (len(names) + 1) // 2))
    return case


def _simpler(candidate: Case, case: Case, plain: Case) -> bool:
    return len(_differing(candidate, plain)) < len(_differing(case, plain))


def _lower(case: Case, plain: Case, name: str, fails: Fails, keep: Callable[[Case], None], width: int) -> Case:
    """A number made smaller: first to those that leave the same remainders, then by halves."""
    now, floor = getattr(case, name), max(getattr(plain, name), 0)
    if now <= floor + 1:
        return case

    def tried(values: Sequence[int]) -> int | None:
        """The smallest of them that fails."""
        nonlocal case
        for at in range(0, len(values), width):
            cases = [changed(case, name, value) for value in values[at : at + width]]
            cases = [c for c in cases if floor < getattr(c, name) < getattr(case, name)]
            for candidate, failed in zip(cases, fails(cases), strict=True):
                if failed:
                    case = candidate
                    keep(case)
                    return getattr(case, name)
        return None

    cousins = {floor + 1, *(floor + 1 + (now - floor - 1) % step for step in _STEPS)}
    tried(sorted(x for x in cousins if floor < x < now)[:6])
    low, high = floor, getattr(case, name)  # floor passes, or is plainer and was tried
    while high - low > 1:
        cuts = sorted({low + (high - low) * i // (width + 1) for i in range(1, width + 1)} - {low, high})
        cases = [changed(case, name, value) for value in cuts]
        usable = [c for c in cases if low < getattr(c, name) < high]
        if not usable:
            break
        results = fails(usable)
        for candidate, failed in zip(usable, results, strict=True):
            if failed:
                case, high = candidate, getattr(candidate, name)
                keep(case)
                break
            low = max(low, getattr(candidate, name))
    return case


def changed(case: Case, name: str, value: Any) -> Case:
    """The case with another value of one field, fitted."""
    return fitted(replace(case, **{name: value}))
