"""The judge of a whole trace: each operation recomputed from the other engine's own inputs, the first wrong one named, and why.

Where an operation's inputs are not in the dump they are recomputed from what is there, and the verdict covers all operations in between.
Derived bounds do not hold across several operations, because int8 codes flip. There the same operations are evaluated once more with every
tensor between them rounded to float16: how far that reaches, on their own numbers, is the measure (compare.limits).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dialects import EXACT, Dialect
from ..errors import NonFiniteError
from ..forward_pass import forward_full, run_whole
from ..model import Model
from ..network import Runtime
from ..tokens import Tokens, check_tokens
from ..traces.points import Key, Trace
from . import operations as op
from .clues import local, overwritten, permuted, rounded
from .compare import DIFFERENT, Reach, Verdict, judge, limits, same_bits, shape_hint
from .hypotheses import factors, generic, hypotheses, no_fault
from .reach import FLOOR, half, one_scale
from .report import OperationVerdict, Report

Array = NDArray[np.float64]

_FLOAT32 = float(np.finfo(np.float32).max)
_LARGEST = 2.0**127  # a power of two that float32 has
_TINY = 2.0**-126  # below float32's normal numbers engines may flush to zero
_MATCH = 1e-6  # NMSE at which a hypothesis is what happened: float32 noise, squared, with room for a flipped code
_MOST_WORK = 3 * 10**8  # multiply-adds of the operations that each hypothesis recomputes: larger models need denser dumps
_LITTLE_WORK = _MOST_WORK // 10  # where nothing is wrong but for what a small mistake may change
_BLOCK = 1 << 20  # numbers that are judged at a time
_ROUNDING_ACROSS = 1e-9  # NMSE across several operations in which no code flipped


def judge_trace(
    model: Model,
    trace: Trace,
    tokens: Sequence[int] | NDArray,
    dialect: Dialect = EXACT,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Judge another engine's tensors for these tokens (one sequence), in the dialect it is declared to follow."""
    ids, _ = check_tokens(model.config, np.asarray(tokens)[None], None)
    ids = ids[0]
    if trace.tokens is not None and not np.array_equal(trace.tokens, ids):
        return Report(Verdict.INVALID, f"{trace.origin} was made with other token ids: {list(trace.tokens[:8])}, expected {list(ids[:8])}")
    ops = list(op.operations(model, dialect))
    common = [o.key for o in ops if o.key in trace.points]
    if not common:
        there = ", ".join(map(str, list(trace.points)[:5])) or "nothing"
        return Report(Verdict.INVALID, f"{trace.origin} has no tensor of this model's forward pass; it has {there}")
    raw: dict[Key, NDArray] = {}
    problems: dict[Key, str] = {}
    same: set[Key] = set()
    sizes: dict[Key, int] = {}

    def look(name: str, layer: int | None, array: NDArray) -> None:
        """At ours, which are not kept: a trace of a large model has gigabytes."""
        key, ours = Key(name, layer), array.reshape(len(ids), -1)
        sizes[key] = ours.size
        if key in trace.points:
            theirs = trace.points[key]
            problems[key] = invalid_tensor(theirs, ours)
            if not problems[key]:
                raw[key] = theirs.reshape(ours.shape)
                if same_bits(raw[key], ours):
                    same.add(key)

    forward_full(model, ids[None], dialect=dialect, record=look)
    missing = tuple(o.key for o in ops if o.key not in trace.points)
    invalid = tuple(OperationVerdict(key, Verdict.INVALID, problems[key]) for key in common if problems[key])
    if invalid:
        first = invalid[0]
        return Report(Verdict.INVALID, f"{first.place}: {first.reason}", invalid, first, missing)

    judged = _Judge(model, dialect, ops, ids, raw, same, sizes, progress)
    found = []
    for i, operation in enumerate(ops):
        if operation.key in raw:
            found.append(judged.operation(operation))
        progress(i + 1, len(ops))
    worst = max(o.verdict for o in found)
    first_wrong = next((o for o in found if o.verdict == Verdict.WRONG), None)
    if first_wrong is None:
        reason = f"{len(found)} tensors, each within what its own inputs allow"
    else:
        reason = f"WRONG at {first_wrong.place}: {first_wrong.hypothesis or first_wrong.reason}"
        if len(first_wrong.across) > 1:
            several = len({k.layer for k in first_wrong.across if k.layer is not None}) > 1
            names = "l_out of every layer" if several else ", ".join(k.name for k in first_wrong.across[:-1])
            reason += f"; {len(first_wrong.across)} operations lie between it and what the dump has: to tell which, dump {names}"
    notes = [_untried(o) for o in found if not o.tried][:1]
    return Report(worst, reason, tuple(found), first_wrong, missing, tuple(notes))


def _untried(found: OperationVerdict) -> str:
    """What to record so that known mistakes can be tried."""
    layers = sorted({k.layer for k in found.across if k.layer is not None})
    names = ",".join(dict.fromkeys(k.name for k in found.across if len(layers) < 2 or k.name == "l_out"))
    which = f" --layers {layers[0]}" if len(layers) == 1 else ""
    more = "; then all names of the first layer that is wrong" if len(layers) > 1 else ""
    return (
        f"{found.place}: known mistakes were not tried, {len(found.across)} operations of a model this large are too much work. "
        f"Record what lies between, as `bitnet-np trace{which} --names {names}` does{more}"
    )


def invalid_tensor(theirs: NDArray, ours: NDArray) -> str:
    """Why a tensor of a dump says nothing, or an empty string. `ours` is [T, width]."""
    if theirs.dtype.kind != "f" and not (ours.dtype.kind == theirs.dtype.kind == "i"):
        return f"its dtype is {theirs.dtype}, expected {ours.dtype}"
    if theirs.size != ours.size or theirs.shape[:1] != ours.shape[:1]:
        return f"its shape is {list(theirs.shape)}, expected {list(ours.shape)}{shape_hint(theirs.shape, ours.shape)}"
    rows = theirs.reshape(ours.shape)
    bad = ~np.isfinite(rows)
    if bad.any():
        t, i = np.unravel_index(int(bad.argmax()), bad.shape)
        return f"it has {rows[t, i]} at position {t}, element {i}; {int(bad.sum())} are not finite"
    if rows.dtype == np.float64 and float(np.abs(rows).max()) > _FLOAT32:
        return f"its largest number is {float(np.abs(rows).max()):.3g}, beyond float32"
    flat = np.flatnonzero((np.ptp(rows, axis=-1) == 0) & (np.ptp(ours, axis=-1) > 0))
    if flat.size:
        return f"all its numbers at position {flat[0]} are {rows[flat[0], 0]}"
    if len(rows) > 1 and (rows == rows[0]).all() and np.abs(ours - ours[0].astype(np.float64)).max() > DIFFERENT * ours.std():
        return "its rows are all the same, ours are not"
    return ""


class _Judge:
    """One engine's tensors, beside everything they are judged by."""

    def __init__(
        self,
        model: Model,
        dialect: Dialect,
        ops: list[op.Operation],
        ids: NDArray[np.int64],
        raw: Mapping[Key, NDArray],
        same: Collection[Key],
        sizes: Mapping[Key, int],
        progress: Callable[[int, int], None],
    ):
        """raw: their tensors, as they are in the dump; same: which of them have our bits; sizes: of ours."""
        self.progress = progress
        self.model, self.dialect, self.ops, self.ids, self.raw, self.same, self.sizes = model, dialect, ops, ids, raw, same, sizes
        self.theirs = _Theirs(ids, raw)
        self.by_key = {o.key: o for o in ops}

    def operation(self, operation: op.Operation) -> OperationVerdict:
        key = operation.key
        theirs = self.theirs[key]
        across = self._across(operation)
        if key in self.same and self._same_inputs(across):
            return OperationVerdict(
                key, Verdict.SAME_BITS, across=across, max_error=0.0, bound_ratio=0.0, nmse=0.0, scale=1.0, cosine=1.0, ulps=0.0
            )
        if len(across) > 1:
            return self._several(across, theirs)
        expected = operation.evaluate(*(self.theirs[k] for k in operation.inputs))
        verdict, reason, ratio = within(expected, theirs)
        found = statistics(key, verdict, reason, across, ratio, expected.value, theirs)
        if verdict != Verdict.WRONG:
            return replace(found, **self._from_float64(operation, expected.value, theirs))
        value = expected.value
        bound = bound_of(expected, value.shape)[1]
        noise = _dot(bound, bound) / max(_dot(value, value), _TINY)
        return replace(
            found, hypothesis=self._explain(across, value, theirs, _MATCH, noise=noise) or self._local(operation, expected, theirs)
        )

    def _several(self, across: tuple[Key, ...], theirs: Array) -> OperationVerdict:
        """Several operations at once."""
        key = across[-1]
        value = self._values(across)[key]
        reach = self._reach(across, value) if position_errors(value, theirs).max() > _ROUNDING_ACROSS else None
        verdict, reason, ratio = close(value, theirs, reach)
        if key.name == "result_output" and verdict == Verdict.FLIPS:  # single logits, factors and constants too
            logits = judge(value.astype(np.float32), theirs, reach)
            verdict, reason = max((verdict, reason), (logits.verdict, logits.reason))
        found = statistics(key, verdict, reason, across, ratio, value, theirs)
        most = 0.0 if reach is None else reach.nmse
        work = sum(self._cost(k) for k in across)
        if verdict == Verdict.WRONG:
            if work > _MOST_WORK:
                return replace(found, tried=False)
            return replace(found, hypothesis=self._explain(across, value, theirs, most))
        if verdict == Verdict.FLIPS and work <= _LITTLE_WORK:
            mistake = self._explain(across, value, theirs, most, most / 2)
            if mistake is not None and not no_fault(mistake):
                return replace(found, verdict=Verdict.WRONG, hypothesis=mistake)
        return found

    def _reach(self, across: tuple[Key, ...], value: Array) -> Reach | None:
        """How far float16 in every tensor of `across` reaches; None if their numbers leave float32's range on the way."""
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                rounded = position_errors(value, self._values(across, {k: self._rounded(k) for k in across})[across[-1]])
        except FloatingPointError:
            return None
        return Reach(max(FLOOR, float(rounded.mean())), rounded, one_scale=one_scale(self.model, self.dialect))

    def _rounded(self, key: Key) -> Callable[[Mapping[Key, Array]], Array]:
        """An operation that rounds what it gives to float16."""
        operation = self.by_key[key]
        return lambda values: half(operation.evaluate(*(values[k] for k in operation.inputs)).value.astype(np.float32)).astype(np.float64)

    def _from_float64(self, operation: op.Operation, value: Array, theirs: Array) -> dict[str, Any]:
        """RMS errors of our kernel and of theirs, both on their inputs, in u of the RMS of what float64 gives."""
        inputs = [self.raw[k] if k in self.raw else self.theirs[k] for k in operation.inputs]
        size = float(np.sqrt(_dot(value, value) / value.size))
        if size == 0 or any(x.dtype not in (np.float32, np.float16, np.int64) for x in inputs):
            return {}  # inputs of more bits than ours can take would count against us
        found = {}
        for name, array in (("ours_rms", self._ours_on_theirs[operation.key].reshape(value.shape)), ("theirs_rms", theirs)):
            error = array - value
            found[name] = float(np.sqrt(_dot(error, error) / value.size)) / (op.U * size)
        return found

    @cached_property
    def _ours_on_theirs(self) -> dict[Key, NDArray]:
        """What our kernels make of each tensor's inputs, where those are in the dump: a forward pass that goes on with theirs."""
        found: dict[Key, NDArray] = {}

        def note(name: str, layer: int | None, array: NDArray) -> None:
            if (key := Key(name, layer)) in self.raw:
                found.setdefault(key, array.copy())

        def feed(name: str, layer: int | None, array: NDArray) -> NDArray:
            note(name, layer, array)
            theirs = self.raw.get(Key(name, layer))
            return array if theirs is None else theirs.reshape(array.shape).astype(np.float32)

        with np.errstate(all="ignore"), suppress(NonFiniteError):  # the logits come last
            run_whole(Runtime(self.model, self.dialect, edit=feed), Tokens.whole(self.ids[None]), note)
        return found

    def _local(self, operation: op.Operation, expected: op.Expected, theirs: Array) -> str | None:
        """What the places of wrong numbers say, where no known mistake makes all of them."""
        told = overwritten(operation.key, self.raw, [o.key for o in self.ops]) or rounded(theirs, expected.value)
        if told is not None:
            return told
        wrong = np.abs(theirs - expected.value) > bound_of(expected, theirs.shape)[0]
        inputs = [self.theirs[k] for k in operation.inputs]
        return local(self.model, self.dialect, operation, inputs, expected.value, theirs, wrong)

    def _same_inputs(self, across: tuple[Key, ...]) -> bool:
        """Whether everything it was computed from has our bits too: equal outputs of other inputs would be a coincidence or a fake."""
        used = {k for key in across for k in self.by_key[key].inputs if k in self.raw}
        return all(k in self.same for k in used)

    def _across(self, operation: op.Operation) -> tuple[Key, ...]:
        """The operations between what the dump has and this tensor, this one last."""
        wanted = {operation.key}
        for other in reversed(self.ops):
            if other.key in wanted:
                wanted |= {k for k in other.inputs if k not in self.theirs}
        return tuple(o.key for o in self.ops if o.key in wanted)

    def _values(
        self,
        across: tuple[Key, ...],
        overrides: Mapping[Key, Callable[[Mapping[Key, Array]], Array]] | None = None,
        right: Mapping[Key, Array] | None = None,
    ) -> dict[Key, Array]:
        """Their tensors, and those of `across` computed from them, some of them in another way.

        right: what it gives without overrides, if that is known: operations before the first of them need not run again. Raises
        FloatingPointError if an override gives no finite numbers.
        """
        values = _Lazy({}, self, across)
        first = next((i for i, k in enumerate(across) if overrides and k in overrides), 0) if right else 0
        values |= {k: right[k] for k in across[:first]} if right else {}
        for key in across[first:]:
            operation = self.by_key[key]
            if overrides and key in overrides:
                values[key] = overrides[key](_Lazy(values, self, across))
                if not np.isfinite(values[key]).all():
                    raise FloatingPointError(f"{key} is not finite")
            else:
                values[key] = operation.evaluate(*(values[k] for k in operation.inputs)).value
        return values

    def _explain(
        self, across: tuple[Key, ...], value: Array, theirs: Array, most: float, least: float = 0.0, noise: float = 0.0
    ) -> str | None:
        """The mistake that comes closest, if the NMSE it leaves is at most `most`, and little of what there was.

        least: NMSE that it must make of what is right. One that changes less may flip the very codes that roundings flip.
        noise: NMSE of roundings alone. A known mistake that leaves no more is not given up for a factor or a constant that is fitted, which
        takes away roundings too.
        """
        now = _nmse(value, theirs)
        best = min(most, now / 10)  # a mistake that explains little explains nothing
        found: str | None = None
        with np.errstate(all="ignore"):

            def fitted() -> Iterator[tuple[str, Array]]:
                if found is None or 4 * best > noise:
                    known = factors(self.model, self.by_key[across[-1]]) if len(across) == 1 else {}
                    yield from generic(theirs, value, self._previous(across[-1]), known)

            for text, candidate in chain(self._mistaken(across), fitted()):
                if candidate.shape != theirs.shape or not np.isfinite(candidate).all() or _nmse(candidate, value) < least:
                    continue
                if (left := _nmse(candidate, theirs)) < best:
                    best, found = left / 4, text  # of two that fit alike, the first one tried stands
        if found is None and now > _MATCH and permuted(theirs, value):
            return "the right numbers in another order: columns are permuted"
        return found

    def _mistaken(self, across: tuple[Key, ...]) -> Iterator[tuple[str, Array]]:
        """What the last tensor of `across` is with each known mistake on the way to it."""
        key = across[-1]
        names = {k.name for k in across}
        everywhere = len(across) > len(names)  # several layers: the mistake is in all of them
        places = [k for k in across if not everywhere or k.layer in (None, 0)]
        mistakes = {k: {h.text: h.compute for h in hypotheses(self.model, self.dialect, self.by_key[k])} for k in across}
        right = self._values(across)
        total, done = sum(len(mistakes[k]) for k in places), 0
        for where in places:
            prefix = "" if where == key else f"at {where.name}{' of every layer' if everywhere and where.layer == 0 else ''}: "
            for text in mistakes[where]:
                self.progress(done := done + 1, total)
                made = [k for k in across if k.name == where.name and text in mistakes[k]] if everywhere else [where]
                try:
                    candidate = self._values(across, {k: mistakes[k][text] for k in made}, right)[key]
                except FloatingPointError:
                    continue
                yield prefix + text, candidate

    def _cost(self, key: Key) -> int:
        return self.sizes[key] * (self.model.config.width if key.layer is not None else self.model.config.vocab)

    def _previous(self, key: Key) -> Array | None:
        return None if not key.layer else self.theirs.get(Key(key.name, key.layer - 1))


class _Theirs(Mapping[Key, Array]):
    """Their tensors, and the tokens, in float64: one at a time, as all together are twice the dump."""

    def __init__(self, ids: NDArray[np.int64], raw: Mapping[Key, NDArray]):
        self._arrays = {op.TOKENS: ids, **raw}

    def __getitem__(self, key: Key) -> Array:
        return self._arrays[key] if key == op.TOKENS else self._arrays[key].astype(np.float64)

    def __contains__(self, key: object) -> bool:
        return key in self._arrays

    def __iter__(self) -> Iterator[Key]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class _Lazy(dict):
    """Tensors known so far, and theirs but for those of `across`, when they are asked for.

    A hypothesis may ask for one that is neither in the dump nor on the way: it is worked out then.
    """

    def __init__(self, values: Mapping[Key, Array], judge: _Judge, across: tuple[Key, ...]):
        super().__init__(values)
        self._judge, self._across = judge, across

    def __missing__(self, key: Key) -> Array:
        if key in self._judge.theirs and key not in self._across:
            self[key] = self._judge.theirs[key]
        else:
            operation = self._judge.by_key[key]
            self[key] = operation.evaluate(*(self[k] for k in operation.inputs)).value
        return self[key]


def bound_of(expected: op.Expected, shape: tuple[int, ...], rows: slice = slice(None)) -> tuple[Array, ...]:
    """How far each element of some rows may be off, flips included and not; and value, unit, steps and reach, all of one shape."""
    value, unit, steps, reach = (np.broadcast_to(np.asarray(x, np.float64), shape)[rows] for x in expected[:4])
    bound = op.U * unit * np.minimum(steps, 6 * np.sqrt(steps)) + _TINY
    return bound + reach, bound, value, unit, steps, reach


def within(expected: op.Expected, theirs: Array) -> tuple[Verdict, str, float]:
    """The three tests of operations.py."""
    ratio, there, flipped = 0.0, "", 0
    count, squares, along, size, spread = 0, 0.0, 0.0, 0.0, 0.0
    step = max(1, _BLOCK // theirs.shape[1])  # rows at a time: logits are large, and a dozen arrays of their shape larger
    for begin in range(0, len(theirs), step):
        most, bound, value, unit, steps, reach = bound_of(expected, theirs.shape, slice(begin, begin + step))
        off = theirs[begin : begin + step] - value
        error = np.abs(off)
        share = error / most
        if share.max() > ratio:
            t, i = np.unravel_index(int(share.argmax()), share.shape)
            ratio = float(share[t, i])
            there = f"{theirs[begin + t, i]:.6g} at position {begin + t}, element {i}, expected {value[t, i]:.6g} +- {most[t, i]:.2g}"
        flipped += int((error > bound).any(axis=1).sum())
        firm = (reach == 0) & (unit > 0) & (steps > 0)
        off, value, unit, steps = off[firm], value[firm], unit[firm], steps[firm]
        count += off.size
        with np.errstate(over="ignore"):  # of numbers near float32's largest, for which no factor is told
            squares += float(((off / (op.U * unit)) ** 2 / steps).sum())
            along += float((off * value).sum())
            size += float((value**2).sum())
            spread += float((steps / 3 * (unit * value) ** 2).sum())
    if ratio > 1:
        most, _, value, *_ = bound_of(expected, theirs.shape)
        return Verdict.WRONG, there + _where(np.abs(theirs - value) > most), ratio
    if count:
        variance = squares / count
        if variance > 0.4 * (1 + 4 * np.sqrt(2 / count)):
            return Verdict.WRONG, f"errors are small but everywhere: variance {variance:.2g} of the bound's, expected at most 0.4", ratio
        if size > 0:
            slope = along / size
            if abs(slope) > expected.common * op.U + 4 * op.U * np.sqrt(spread) / size:
                return Verdict.WRONG, f"everything is {1 + slope:.9g} times what it should be", ratio
    if flipped:
        return Verdict.FLIPS, f"{flipped} positions have roundings on the other side of a boundary", ratio
    return Verdict.ROUNDING, "", ratio


def _where(wrong: NDArray[np.bool_]) -> str:
    """Where errors sit, if not everywhere: a few columns are weight rows misread, late positions a cache."""
    parts = []
    for axis, name in ((1, "position"), (0, "element")):
        hit = np.flatnonzero(wrong.any(axis=axis))
        if 0 < hit.size <= wrong.shape[1 - axis] // 2:
            listed = ", ".join(map(str, hit[:4])) + (f" and {hit.size - 4} more" if hit.size > 4 else "")
            parts.append(f"{name}{'s' * (hit.size > 1)} {listed}")
    return f"; wrong only at {', '.join(parts)}" if parts else ""


def position_errors(value: Array, theirs: Array, least: float = 0.0) -> Array:
    """NMSE of each position, [T, width] -> [T]. Sums of squares are taken to be `least` at least."""
    return ((theirs - value) ** 2).sum(axis=1) / np.maximum((value**2).sum(axis=1), max(least, _TINY))


def close(value: Array, theirs: Array, reach: Reach | None = None, least: float = 0.0) -> tuple[Verdict, str, float]:
    """Where no bound is known, as across several operations: by mean square errors, and by how far roundings reach (compare.limits)."""
    nmse = position_errors(value, theirs, least)
    if nmse.max() <= _ROUNDING_ACROSS:
        return Verdict.ROUNDING, "", float(np.sqrt(nmse.max() / _ROUNDING_ACROSS))
    most, most_mean = limits(reach, len(nmse))
    worst = int((nmse / most).argmax())
    ratio = float(np.sqrt(max(nmse[worst] / most[worst], nmse.mean() / most_mean)))
    if nmse[worst] > most[worst]:
        return Verdict.WRONG, f"NMSE {nmse[worst]:.2g} at position {worst}, flipped codes and float16 reach {most[worst]:.2g}", ratio
    if nmse.mean() > most_mean:
        return Verdict.WRONG, f"NMSE {nmse.mean():.2g} on average over positions, flipped codes and float16 reach {most_mean:.2g}", ratio
    return Verdict.FLIPS, "", ratio


def _nmse(value: Array, theirs: Array) -> float:
    return float(((theirs - value) ** 2).sum() / max((theirs**2).sum(), _TINY))


def _dot(a: Array, b: Array) -> float:
    """The sum of products, without an array of them."""
    return float(np.einsum("ij,ij->", a, b))


def statistics(
    key: Key, verdict: Verdict, reason: str, across: tuple[Key, ...], ratio: float, value: Array, theirs: Array
) -> OperationVerdict:
    error = np.abs(theirs - value)
    dot, square = _dot(value, theirs), _dot(value, value)
    norms = float(np.sqrt(square * _dot(theirs, theirs)))
    return OperationVerdict(
        key,
        verdict,
        reason,
        across,
        max_error=float(error.max()),
        bound_ratio=ratio,
        nmse=_dot(error, error) / square if square else None,
        scale=dot / square if square else None,
        cosine=dot / norms if norms else None,
        ulps=float(error.max() / np.spacing(np.float32(min(np.abs(value).max(), _LARGEST)))),
        worst=tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape)),
    )
