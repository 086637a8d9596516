"""Logits alone: judged by how far roundings reach on this model (honest_engines.py), and by what known mistakes make of the whole engine.

A dump that is no farther from ours than roundings reach can still be wrong in a small way:

* A known mistake (mistakes/) that comes at least four times nearer to the dump than we do is the cause. Roundings alone cannot make
  one do so: of two runs that differ by roundings only each has errors of its own, so the centre between them, where a mistake that
  removes roundings may lie, is half as far from either as they are from each other.
* The scale of one kind of matrix may be off by any factor. The change that a factor makes is measured by central differences, which do
  not hold our own run's errors; the dump's error is projected on it, position by position. A mean that is many standard errors from 0
  and beyond 1 % of the scale is a wrong scale. That takes eight positions.

Everything runs at the kernels' speed, with one operation or weight replaced. At most 64 tokens of the dump are looked at, except for the
limit of a dump of last positions.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import ContextLimitError, NonFiniteError, listed
from ..model.records import MATRICES
from ..traces.points import Key
from .bounds import TINY
from .graph import LOGITS, Operation, operations
from .honest_engines import dialects, in_precision, other_choices, reach_of, roundings
from .logits import Judgement, Reach, judge, position_nmse
from .mistakes.anywhere import fitted
from .mistakes.catalogue import Trial, cached_and_rounded, in_engine, narrowed, trials
from .mistakes.mistake import Cause, Compute
from .mistakes.names import CACHE_ROUNDINGS
from .mistakes.search import OVERHEAD, Explanation, Nearest, Search, in_types
from .options import DEFAULT, Options
from .precision import FLASH, FLOAT32, Precision
from .readings.table import facts_of
from .readings.wrong import Wrong
from .variant import Floats, Variant, scaled, with_computed
from .verdict import Verdict

Run = Callable[[Variant], Floats]
_Named = TypeVar("_Named")

_CLOSER = 4  # times nearer than ours, in NMSE: two runs of equal errors have a factor 2 between them and their centre
_EXACT = 1e-6  # of the error without a mistake: what is left is float32's own, and nothing else can come nearer
_STEP = 1.1  # factor of a scale in central differences: large against flips, small against what saturates
_LEAST = 0.01  # part of a scale: float16 and bfloat16 scales are nearer
_MOST_WORK = 10**11  # multiply-adds of all runs with a mistake in single operations: larger models need denser dumps
_HIDDEN_WORK = 3 * 10**10  # the same of all runs with mistakes that are tried across operations only
_ALIKE = 0.999  # squared cosine of the changes that two scales make
_POSITIONS = 8  # fewest to know a standard error from
_FAR = 8  # times the RMS error that roundings leave: a logit that is farther is in question


def judge_logits(
    ours: Floats,
    theirs: ArrayLike,
    base: Variant,
    run: Run,
    options: Options = DEFAULT,
    search: bool = True,
    numbers: NDArray[np.int64] | None = None,
    ids: NDArray[np.int64] | None = None,
    alone: bool = True,
    slack: float = 1.0,
) -> Judgement:
    """Judge their logits by what roundings and known mistakes make of the model.

    ours, theirs: [..., V]. run: logits of a variant, [P, V], the first P positions of `ours` (laid end to end) or all; ours are
    `run(base)`. options: without a precision, the dialects and the narrow types that nobody declared are tried. search: try the known
    mistakes too. numbers: see logits.judge. ids: the token ids of the one sequence that `run` takes; None: mistakes of single operations
    are not tried. alone: whether no other tensor shows what is wrong; mistakes that are tried across operations only are not tried on
    logits else. slack: factor of the limits of what nothing explains, which then have llama.cpp's flash attention in them, too.
    Raises nothing for what the dump holds: see logits.judge.
    """
    precision, details = options.precision, options.details
    judged = judge(ours, theirs, None, numbers, details)
    if judged.verdict in (Verdict.SAME_BITS, Verdict.ROUNDING, Verdict.INVALID):
        return judged
    declared = precision or FLOAT32
    honest, others, mistakes = list(roundings(base, declared)), list(dialects(base)), list(in_engine(base)) if search else []
    names = [name for name in base.present(MATRICES) if name != "attn_k"] if search else []  # scales of queries and keys do the same
    logits = _Runs(run, options, len(honest) + len(others) + len(mistakes) + 2 * len(names))
    runs = logits.of(honest)
    right = list(runs.values())
    a, b = (np.asarray(x).reshape(-1, ours.shape[-1])[: len(right[0])] for x in (ours, theirs))
    other = other_choices(base, declared)
    choices = None if other is None else logits(other)
    reach = reach_of(a, right, base, declared, choices)
    judged = judge(ours, theirs, reach, numbers, details)

    runs |= logits.of(others)
    target = _Target(base, logits, a, b, reach, judged.verdict == Verdict.WRONG, options.effort, ids)
    distances = {text: _distances(x, a, b) for text, x in runs.items()}
    nearest = min(distances, key=lambda text: float(distances[text].mean()))
    closest = f"closest to {nearest}" if distances[nearest].mean() < target.away.mean() / _CLOSER else None
    best = np.minimum(target.away, distances[nearest])
    known = target.nearest(((variant, Cause(variant.text, variant.mistake), {}) for variant in mistakes), best)
    mistake = None if known is None else known.text
    if mistake is None and closest is None and len(a) >= _POSITIONS:
        mistake = target.wrong_scale(names)
    if judged.verdict == Verdict.WRONG and judge(a, b, reach).verdict != Verdict.WRONG:
        search = False  # later positions are wrong, which no run has
        target.untried.append(f"the first {len(a)} of these positions are right, and no mistake was tried on the others")
    undeclared = ""
    if mistake is None and judged.verdict == Verdict.WRONG and precision is None and search:
        judged, undeclared = target.undeclared(judged, others, runs)
    if mistake is None and judged.verdict == Verdict.WRONG and search and ids is not None:
        cause = target.cause(alone)
        # the rounding of a declared KV cache may make a router choose other experts, which no reach allows for
        if cause is not None and not cause.fault and (precision is None or (cause.id in CACHE_ROUNDINGS and cause.kind == precision.kv)):
            judged = replace(judged, verdict=Verdict.NARROW, reason=f"{cause}; {judged.reason}", explanation=cause.text)
        elif cause is not None:
            mistake = cause.text
    logits.progress(logits.total, logits.total)
    if mistake is not None:
        return replace(judged, verdict=Verdict.WRONG, reason=f"{mistake}; {judged.reason}", explanation=mistake)
    if slack > 1 and closest is None and judged.verdict == Verdict.WRONG and (x := logits(in_precision(base, FLASH))) is not None:
        wide = reach_of(a, [*right, x], base, declared, choices)
        again = judge(ours, theirs, replace(wide, nmse=slack * wide.nmse, positions=slack * wide.positions), numbers)
        if again.verdict < judged.verdict:
            return replace(again, reach=wide.nmse)
    reason = "; ".join(filter(None, (judged.reason, closest, undeclared, *target.untried)))
    return replace(judged, reason=reason, explanation=closest)


class _Runs:
    """Runs of variants of our engine, counted."""

    def __init__(self, run: Run, options: Options, total: int) -> None:
        self.run, self.total = run, total
        self.progress = options.bars("trying known mistakes")
        self.done = 0

    def __call__(self, variant: Variant) -> Floats | None:
        """Its logits; None if its numbers leave float32's range, as those of a mistake may."""
        self.done += 1
        self.progress(min(self.done, self.total), self.total)
        try:
            with np.errstate(all="ignore"):
                return self.run(variant)
        except (NonFiniteError, ContextLimitError):
            return None

    def of(self, variants: Iterable[Variant]) -> dict[str, Floats]:
        """The logits of some variants by their texts, without those that have none."""
        return {variant.text: x for variant in variants if (x := self(variant)) is not None}


_PRECISIONS = tuple(Precision(**kinds) for kinds in ({"kv": "q8_0"}, {"act": "bfloat16"}, {"kv": "q4_0"}))
"""Precisions that logits alone do not show, finest first."""
_NEARER = 0.8  # of their distance from ours, to the logits in a precision that is named


@dataclass(frozen=True)
class _Target:
    """Their logits beside ours, and runs that may come nearer to them."""

    base: Variant
    logits: _Runs
    a: NDArray  # ours [P, V]
    b: NDArray  # theirs [P, V]
    reach: Reach
    strong: bool  # theirs are farther from ours than roundings reach
    effort: float  # times the work that mistakes may take
    ids: NDArray[np.int64] | None  # of the one sequence; None: mistakes of single operations are not tried
    closest: Nearest = field(default_factory=Nearest, repr=False)
    untried: list[str] = field(default_factory=list, repr=False)  # what took too much work, in words
    engines: dict[str, Variant] = field(default_factory=dict, repr=False)  # those with a mistake in the whole, by what is said of it

    @cached_property
    def away(self) -> NDArray[np.float64]:
        """Their distance from ours, [P]."""
        return position_nmse(self.a, self.b)

    def made_by(self, x: NDArray) -> bool:
        """Whether logits are theirs but for roundings."""
        return judge(x, self.b, self.reach).verdict <= Verdict.FLIPS

    def explained_by(self, x: Floats | None, best: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """The distance [P] of logits that are theirs but for roundings, and _CLOSER times nearer than `best`; else None."""
        if x is None:
            return None
        away = _distances(x, self.a, self.b)
        return away if _explains(away, best) and self.made_by(x) else None

    def nearest(self, candidates: Iterable[tuple[Variant, Cause, Mapping[Key, Compute]]], best: NDArray[np.float64]) -> Cause | None:
        """The mistake in the nearest of some variants that explain them. best: the distance [P] of the nearest run without a mistake.

        candidates: with the operations that a variant computes otherwise, none where all of it is another engine. An operation that is off
        by no more than roundings reach may flip the very codes that they flip: theirs have to be farther, then.
        """
        found = None
        for variant, cause, computes in candidates:
            x = self.logits(variant)
            if x is not None and variant.edit is not None and not self.strong and position_nmse(self.a, x).mean() <= self.reach.nmse:
                continue
            away = self.explained_by(x, best)
            self.offer(x, variant, cause, computes)
            if away is not None:
                found, best = cause, away
                if best.mean() < _EXACT * self.away.mean():
                    break
        return found

    def offer(self, x: Floats | None, variant: Variant, cause: Cause, computes: Mapping[Key, Compute]) -> None:
        """Keep what comes closest."""
        if x is not None:
            self.closest.offer(float(_distances(x, self.a, self.b).mean()), cause, computes)
            if variant.edit is None:
                self.engines[cause.text] = variant

    def cause(self, alone: bool) -> Cause | None:
        """The mistake of operations that makes theirs of ours but for roundings. alone: try those that are tried across operations only."""
        return self.fitted() or self.placed() or self.in_operations() or (self.hidden() if alone else None) or self.nearly()

    def computed(self, computes: Mapping[Key, Compute], text: str = "", engine: Variant | None = None) -> Variant:
        """Our engine, or one with a mistake, that computes some operations otherwise."""
        return with_computed(engine or self.base, text, computes, self.ids)

    def nearly(self) -> Cause | None:
        """The mistake that leaves little of the distance, with the rounding to fewer bits that explains the rest; or two such types."""
        engine = self.base if self.closest.cause is None else self.engines.get(self.closest.cause.text, self.base)

        def left(computes: Mapping[Key, Compute]) -> float:
            away = self.explained_by(self.logits(self.computed(computes, engine=engine)), self.away)
            return np.inf if away is None else float(away.mean())

        now, span = float(self.away.mean()), _span(engine)
        found = self.closest.of(now, now, left, narrowed(span, self.closest.computes))
        if found is not None or engine is not self.base:
            return found
        return in_types(cached_and_rounded(span), left, now)[0]

    def fitted(self) -> Cause | None:
        """The mistake in the last operation, with numbers fitted to theirs, that makes them of ours but for roundings."""
        for cause, array in fitted(self.b.astype(np.float64), self.a.astype(np.float64)):
            if not np.isfinite(array).all() or position_nmse(array, self.b).mean() > self.away.mean() / _CLOSER:
                continue
            if self.made_by(array.astype(np.float32)):
                return cause
        return None

    def placed(self) -> Cause | None:
        """What theirs show by themselves, such as our logits in other places, where the others are ours but for roundings."""
        a, b = self.a.astype(np.float64), self.b.astype(np.float64)
        places = np.abs(b - a) > _FAR * self.reach.nmse**0.5 * a.std(axis=1, keepdims=True)
        return facts_of(Wrong(self.base.model, self.base.dialect, LOGITS, [], a, b, places, self.reach.nmse, {}), of_columns=True)

    def in_operations(self) -> Cause | None:
        """The mistake of some operations, or of a single one, that makes theirs of ours but for roundings."""
        span, work, most = _span(self.base), self.work, self.effort * _MOST_WORK
        every = list(trials(span, single=True))
        if len(every) * work > most:
            least = 1.1 * len(every) * work / _MOST_WORK
            self.untried.append(f"mistakes in one layer alone were not tried on logits: --effort {least:.2g} tries them")
            every = list(trials(span, single=False))
        if len(every) * work > most:
            return None
        self.logits.total += len(every)
        tried = ((self.computed(trial.computes, trial.cause.text), trial.cause, trial.computes) for trial in every)
        return self.nearest(tried, self.away)

    def hidden(self) -> Cause | None:
        """The mistake that is tried across operations only, if one makes theirs of ours."""
        span = _span(self.base)
        work = self.work + OVERHEAD * len(span) // 2

        def explain(trial: Trial) -> Explanation:
            self.logits.total += 1
            variant = self.computed(trial.computes, trial.cause.text)
            try:
                x = self.logits(variant)
            except KeyError:  # it asks for a tensor of a later layer
                x = None
            if x is None:
                return Explanation(np.inf, False)
            if trial.number is None:
                self.offer(x, variant, trial.cause, trial.computes)
            return Explanation(float(_distances(x, self.a, self.b).mean()), self.explained_by(x, self.away) is not None)

        search = Search(len(self.a) if self.ids is None else len(self.ids), 2 * self.effort * _HIDDEN_WORK)
        cause = search.cause(span, False, explain, lambda trial: explain(trial).left, lambda changed: work, float(self.away.mean()))
        self.untried.extend(search.notes())
        return cause

    @property
    def work(self) -> int:
        """Multiply-adds of a run."""
        return len(self.a) * sum(prod(x.shape) for x in (self.base.model.head, *self.base.linears()))

    def undeclared(self, judged: Judgement, others: list[Variant], runs: Mapping[str, Floats]) -> tuple[Judgement, str]:
        """A wrong judgement, looked through: NARROW if another dialect's roundings reach so far, alone or behind a cache of ggml's, or with
        a precision that would, in words."""
        a, b, logits = self.a, self.b, self.logits
        for dialect in (variant for variant in others if variant.text in runs):
            honest = [runs[dialect.text], *logits.of(roundings(dialect)).values()]
            if judge(a, b, reach_of(a, honest, self.base)).verdict <= Verdict.FLIPS:
                return replace(judged, verdict=Verdict.NARROW, reason=f"no farther than rounding reaches in {dialect.text}"), ""
            attention = [operation for operation in _span(dialect) if operation.key.name == "kqv_out"]
            for trial in trials(attention, single=False) if self.ids is not None else ():
                if trial.cause.id.startswith("cache.ggml"):
                    x = logits(self.computed(trial.computes, trial.cause.text, dialect))
                    if self.explained_by(x, self.away) is not None:
                        return replace(judged, verdict=Verdict.NARROW, reason=f"{trial.cause}; in {dialect.text}"), ""
        for precision in _PRECISIONS:
            x = logits(in_precision(self.base, precision))
            if x is None or _distances(x, a, b).mean() > _NEARER * self.away.mean():
                continue  # a coarse type reaches far, but only an engine that has it errs in its direction
            if judge(a, b, reach_of(a, [x], self.base, precision)).verdict <= Verdict.FLIPS:
                return judged, f"the precision {precision} would explain it: declare it if your engine has it"
        return judged, ""

    def wrong_scale(self, names: Iterable[str]) -> str | None:
        """The kind of matrix whose scale is off, if one is. Kinds whose scale a norm cancels change too little to be seen.

        Where theirs are far, our engine is run with that scale, and believed if it comes _CLOSER times nearer: a large error of another
        cause may point along.
        """
        error = self.b.astype(np.float64) - self.a
        best, most, slope = "", 1.0, 0.0
        changes: dict[str, NDArray[np.float64]] = {}
        for name in names:
            low, high = (self.logits(scaled(self.base, name, factor)) for factor in (1 / _STEP, _STEP))
            if low is None or high is None or position_nmse(low, high).mean() / 4 < 2 * self.reach.nmse:
                continue
            changes[name] = change = (high.astype(np.float64) - low) / (2 * np.log(_STEP))  # by the logarithm of the scale
            along, square = (error * change).sum(axis=1), (change**2).sum(axis=1)
            own = float(along.sum() / max(square.sum(), 1e-300))
            spread = np.sqrt(((along - own * square) ** 2).sum()) / max(square.sum(), 1e-300)
            sure = abs(own) / max(_LEAST, (6 + 40 / len(self.a)) * spread)
            if sure > most:
                best, most, slope = name, sure, float(np.clip(own, -50, 50))
        if not best:
            return None
        change = changes[best]
        if self.strong:
            x = self.logits(scaled(self.base, best, np.exp(slope)))
            if x is None or not _explains(_distances(x, self.a, self.b), self.away):
                return None
            slope += float(((self.b - x.astype(np.float64)) * change).sum() / max((change**2).sum(), 1e-300))  # what is left, once more
        alike = [o for o, x in changes.items() if o != best and (x * change).sum() ** 2 > _ALIKE * (x**2).sum() * (change**2).sum()]
        more = f" (that of {listed(alike)} would look the same)" if alike else ""
        return f"the scale of {best} is off, by a factor of about {np.exp(slope):.3g}{more}"


def _span(base: Variant) -> list[Operation]:
    return [o for o in operations(base.model, base.dialect) if not o.key.name.endswith(("_codes", "_scale"))]


def _distances(x: Floats, a: NDArray, b: NDArray) -> NDArray[np.float64]:
    """Squared distances of theirs from a variant, in units of our spread, [P]."""
    spread = np.maximum(x.var(axis=1, dtype=np.float64), TINY)  # logits that are all alike are far from any
    return position_nmse(x, b) * spread / a.var(axis=1, dtype=np.float64)


def _explains(away: NDArray[np.float64], others: NDArray[np.float64]) -> bool:
    """Whether a mistake is _CLOSER times nearer to theirs than runs without one: on average, and at most positions."""
    nearer = (away < others / _CLOSER).mean()
    return bool(away.mean() < others.mean() / _CLOSER and nearer >= 0.75)
