"""Logits alone: judged by how far roundings reach on this model (honest_engines.py), and by what known mistakes make of the whole engine.

A dump that is no farther from ours than roundings reach can still be wrong in a small way:

* A known mistake (mistakes/) whose run is at least four times nearer to the dump than ours, in NMSE, is the cause. Roundings alone cannot
  bring a run so near: each run has errors of its own, so even one without any is only half as far from a correct dump as ours is.
* The scale of one kind of matrix may be off by any factor. Central differences measure the change that a factor makes, free of our own
  run's errors. The dump's error is projected on it, position by position. A mean that is many standard errors from 0 and beyond 1 % of the
  scale is a wrong scale. That takes eight positions.

Everything runs at the kernels' speed, with one operation or weight replaced. At most 64 tokens of the dump are looked at, except for the
limit of a dump of last positions.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import ContextLimitError, NonFiniteError, listed
from ..model.records import MATRICES, Model
from ..traces.points import TOP_EXPERTS, Key
from .bounds import TINY
from .first_looks import other_numbers
from .honest_engines import dialects, engines_of_type, in_precision, other_choices, reach_of, roundings
from .hypothesis import Compute, Hypothesis
from .law import noise as noise_law
from .law.expected import type_of
from .law.graph import TOKENS
from .law.noise import BFLOAT16_NOISE, COARSEST, FINE, LARGEST_SEEN, doubt
from .law.precision import FLASH, FLOAT32, NARROW_FLOATS, Precision
from .law.products import has_blocks
from .measures import Judgement, Reach, across, judge, limits, position_nmse, position_scale
from .mistakes.catalogue import CACHE_ROUNDINGS
from .mistakes.hypotheses import hypotheses, in_engine, sites
from .mistakes.search import OVERHEAD, Case, Explanation, Search
from .options import DEFAULT, SEARCHING, USUAL_BUDGET, Options
from .readings.table import facts_of
from .readings.wrong import Wrong
from .variant import Floats, OfSequence, Variant, scaled, with_each_computed
from .verdict import Verdict

Run = Callable[[Variant], Floats]
RunFirst = Callable[[Variant, int, int], Floats]
"""A variant of so many sequences, and how many tokens of each -> [B, T, V]."""

_CLOSER = 4  # times nearer than ours, in NMSE: two runs of equal errors have a factor 2 between them and their centre
_LITTLE = 0.01  # of the mean distance: a position that is nearer is right
_EXACT = 1e-6  # of the error without a mistake: what is left is float32's own, and nothing else can come nearer
_STEP = 1.1  # factor of a scale in central differences: large against flips, small against what saturates
_LEAST = 0.01  # part of a scale: float16 and bfloat16 scales are nearer
_MOST_WORK = 10**11  # multiply-adds of all runs with a mistake in single operations: larger models need denser dumps
_HIDDEN_WORK = 3 * 10**10  # the same of all runs with mistakes that are tried across operations only
_ALIKE = 0.999  # squared cosine of the changes that two scales make
_POSITIONS = 8  # fewest to know a standard error from
_OF_FACTOR = 0.2  # of the error, left by the best factor and constant of each position, if that is what is wrong
_OF_TYPES = 10**9  # multiply-adds of a run: the weights of a larger model are not rounded all together
_LOOKED_AT = 3  # positions
_ROWS = 8  # by which the size of an error is known
_TOGETHER = 16  # mistakes that are tried at once
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
    run_first: RunFirst | None = None,
    slack: float = 1.0,
) -> Judgement:
    """Judge their logits by what roundings and known mistakes make of the model.

    ours, theirs: [..., V]. run: logits of a variant, [P, V], the first P positions of `ours` (laid end to end) or all; ours are
    `run(base)`. options: without a precision, the dialects and the narrow types that nobody declared are tried. search: whether mistakes
    are tried. numbers: see measures.judge. ids: the token ids of the one sequence that `run` takes; without them whole engines, scales of
    matrices and likely mistakes are tried alone. run_first: logits of the first tokens, if ours and theirs begin with the first position:
    many mistakes are tried at once there, and most are refused. slack: factor of the limits of what nothing explains, which then have
    llama.cpp's flash attention in them, too.
    Raises nothing for what the dump holds: see measures.judge.
    """
    judged = judge(ours, theirs, None, numbers, options.details)
    if judged.verdict in (Verdict.SAME_BITS, Verdict.ROUNDING, Verdict.INVALID):
        return judged
    if ids is not None and (text := other_numbers(ours, np.asarray(theirs))) is not None:
        return _wrong(judged, text)
    target = _Target(ours, theirs, base, run, options, search, ids, run_first)
    judged = judge(ours, theirs, target.reach, numbers, options.details)
    kinds = _stated_types(base.model, options) if options.precision is None and judged.verdict == Verdict.WRONG else {}

    def in_type(kind: str, budget: float) -> Judgement:
        narrow = replace(options, precision=Precision(act=kind), budget=budget)
        found = judge_logits(ours, theirs, base, run, narrow, search, numbers, ids, run_first, slack)
        return replace(found, verdict=max(found.verdict, Verdict.NARROW), reason=f"in {kind}, {kinds[kind]}: {found.reason}")

    for kind in kinds:
        if (found := in_type(kind, 0)).verdict == Verdict.NARROW:
            return found
    likely = next((kind for kind, where in kinds.items() if where != _OF_WEIGHTS), None)  # engines widen weights
    if likely and (not search or not target.is_seen or target.undeclared is None):  # a mistake is sought in the likeliest type
        return in_type(likely, options.budget)
    try:
        judged = target.explained(judged)
    except KeyboardInterrupt:  # what is known is said
        if not options.keeps_known:
            raise
        target.said.append("the search for causes was interrupted")
    if judged.verdict == Verdict.WRONG and judged.explanation is not None:
        return judged
    closest = target.closest
    if slack > 1 and closest is None and judged.verdict == Verdict.WRONG and (x := target.logits(in_precision(base, FLASH))) is not None:
        wide = reach_of(target.a, [*target.right, x], base, target.declared, target.choices)
        again = judge(ours, theirs, replace(wide, nmse=slack * wide.nmse, positions=slack * wide.positions), numbers)
        if again.verdict < judged.verdict:
            return replace(again, reach=wide.nmse)
    if judged.verdict == Verdict.WRONG and not options.is_strict and (noise := target.noise()) is not None:  # what nothing else explains
        judged = replace(judged, verdict=Verdict.NARROW, reason=f"{noise}; {judged.reason}")
    elif judged.verdict == Verdict.WRONG and closest is None and not options.is_strict and (level := target.noise_level(COARSEST)):
        target.said.insert(0, doubt(level))
    return replace(judged, reason="; ".join(filter(None, (judged.reason, closest, *target.said))), explanation=closest)


_OF_WEIGHTS = "the type of the model's weights"


def _stated_types(model: Model, options: Options) -> dict[str, str]:
    """The narrow types that an engine computes in by its own words, or by the model's file, and who says so; the likeliest first."""
    stated = [
        (model.stated_dtype, "the type that the model's file states"),
        *((kind, "as the engine says of itself") for kind in options.stated),
    ]
    types: dict[str, str] = {}
    for kind, where in (*stated, (type_of(model.token_embd), _OF_WEIGHTS)):
        if kind in NARROW_FLOATS:
            types.setdefault(kind, where)
    return types


_PRECISIONS = (Precision(kv="q8_0"), Precision(act="bfloat16"), Precision(kv="q4_0"))
"""Precisions that logits alone do not show, finest first."""
_NEARER = 0.8  # of their distance from ours, to the logits in a precision that is named


@dataclass(eq=False)
class _Target:
    """Their logits beside ours, and runs that may come nearer to them. Its fields are arguments of judge_logits."""

    ours: Floats
    theirs: ArrayLike
    base: Variant
    run: Run
    options: Options
    search: bool
    ids: NDArray[np.int64] | None
    run_first: RunFirst | None

    def __post_init__(self) -> None:
        base, ours = self.base, self.ours
        self.declared = self.options.precision or FLOAT32
        self.engines = list(in_engine(base)) if self.search else []
        # scales of queries and keys do the same
        self.names = [name for name in base.present(MATRICES) if name != "attn_k"] if self.search else []
        honest, others = list(roundings(base, self.declared)), list(dialects(base))
        self.progress, self.done = self.options.bars("trying known mistakes"), 0
        self.total = len(honest) + len(others)  # runs
        of_honest = self.logits_of(honest)
        self.right = list(of_honest.values())
        self.a, self.b = (np.asarray(x).reshape(-1, ours.shape[-1])[: len(self.right[0])] for x in (ours, self.theirs))  # [P, V]
        other = other_choices(base, self.declared)
        self.choices = None if other is None else self.logits(other)
        self.reach: Reach = reach_of(self.a, self.right, base, self.declared, self.choices)
        self.others = [(variant, x) for variant in others if (x := self.logits(variant)) is not None]
        self.away = position_nmse(self.a, self.b)  # [P]
        known = of_honest | {variant.text: x for variant, x in self.others}
        distances = {text: _distances(x, self.a, self.b) for text, x in known.items()}
        text, distance = min(distances.items(), key=lambda item: float(item[1].mean()))
        self.closest = f"closest to {text}" if distance.mean() < self.away.mean() / _CLOSER else None
        self.best = np.minimum(self.away, distance)  # [P]: of the nearest run without a mistake
        self.strong = False  # whether theirs are farther from ours than roundings reach
        self.said: list[str] = []  # what took too much work, or would explain it, in words

    def logits(self, variant: Variant) -> Floats | None:
        """The logits of a variant; None if its numbers leave float32's range, as those of a mistake may."""
        self.done += 1
        if self.done <= self.total:
            self.progress(self.done, self.total)
        try:
            with np.errstate(all="ignore"):
                return self.run(variant)
        except (NonFiniteError, ContextLimitError):
            return None

    def logits_of(self, variants: Iterable[Variant]) -> dict[str, Floats]:
        """The logits of some variants by their texts, without those that have none."""
        return {variant.text: x for variant in variants if (x := self.logits(variant)) is not None}

    def explained(self, judged: Judgement) -> Judgement:
        """Their judgement, with the first explanation that is found."""
        self.strong = judged.verdict == Verdict.WRONG
        span = sites(self.base.model, self.base.dialect, 0 if self.ids is None else len(self.ids))
        span = span[-2:] if self.is_multiple() else span
        now = float(self.away.mean())
        case = LogitsCase(
            span=span, value=self.a, theirs=self.b, now=now, exact=_EXACT * now, single=False, fit=False, target=self, best=self.best
        )
        precision, strict = self.options.precision, self.options.is_strict
        narrow = self.undeclared if self.strong and self.is_seen and precision is None and self.search else None
        search = Search(2 * self.options.effort * _HIDDEN_WORK, self.options.budget, self.options.bars(SEARCHING))
        if self.strong and narrow is None and (strict or self.noise() is None):
            search.begin(share=1.0)
        else:
            search.begin_unlimited()
            self.total = self.done + len(self.engines) + 2 * len(self.names)
        mistake = search.named(case, self.engines)
        is_sought = mistake is None and not search.has_ended() and not self.closest and len(self.distinct) >= _POSITIONS
        text = mistake.text if mistake is not None else self.wrong_scale() if is_sought else None
        self.progress(self.total, self.total)
        if text is not None or not self.strong:
            return judged if text is None else _wrong(judged, text)
        if narrow is not None and self.goes_on:
            return replace(judged, verdict=Verdict.NARROW, reason=narrow)
        if not self.is_seen:
            self.said.append(f"the first {len(self.a)} of these positions are right, and no mistake was tried on the others")
            return judged
        search.begin(share=1.0)
        cause = self.of_operations(search, replace(case, best=self.away, fit=True))
        if cause is None:
            return judged
        # the rounding of a declared KV cache may make a router choose other experts, which no reach allows for
        if not cause.fault and self.goes_on and (not strict or (cause.id in CACHE_ROUNDINGS and cause.kind == self.declared.kv)):
            return replace(judged, verdict=Verdict.NARROW, reason=f"{cause}; {judged.reason}")
        return _wrong(judged, cause.text)

    def is_multiple(self) -> bool:
        """Whether theirs are ours times one number: the last norm, which is of any factor before it, or the head has it."""
        a, b = self.a.astype(np.float64), self.b.astype(np.float64)
        left = b - a * ((a * b).sum() / max(np.square(a).sum(), 1e-300))
        return bool(np.square(left).sum() <= _EXACT * np.square(b - a).sum())

    def of_operations(self, search: Search, case: "LogitsCase") -> Hypothesis | None:
        """The mistake of operations that makes theirs of ours but for roundings."""
        if self.ids is None or not self.search:
            return None
        most = int(min(self.options.effort * _MOST_WORK / self.work, sys.maxsize - 1))
        candidates = list(islice(hypotheses(case.span, single=True, stop=search.has_ended), most + 1))  # those in one operation come last
        if len(candidates) > most:
            more = max(10 * self.options.budget, 4 * USUAL_BUDGET)
            self.said.append(f"not all known mistakes in one layer alone were tried on logits: --budget {more:g} tries more")
        level, is_noise = (0.0, False) if self.options.is_strict else (self.noise_level(COARSEST), self.noise() is not None)
        case = replace(case, level=level if is_noise else 0.0)
        cause = search.format(case) if level and not is_noise else None  # too coarse to be believed without its name
        cause = cause or search.named(case, candidates[:most]) or (search.format(case) if is_noise else search.unnamed(case))
        search.close()
        self.said.extend(search.notes())
        return cause

    def noise(self) -> str | None:
        """The noise that operations have, in words, if it is all that is wrong."""
        level = self.noise_level(FINE if self.ids is None else noise_law.COARSEST_SPREAD)  # of a server few mistakes are tried
        if level > noise_law.COARSEST_BIASED:
            is_believed = level <= noise_law.COARSEST_SEEN if self.is_spread is None else self.is_spread
            level = level if is_believed else 0.0
        return f"no farther than operations with about 2^{np.log2(level):.1f} of noise reach" if level else None

    def noise_level(self, most: float) -> float:
        """The level of noise that operations have, if it is at most so large, and all that is wrong may be noise; or 0."""
        return self._level if self._level <= most else 0.0

    @cached_property
    def _level(self) -> float:
        """The level of noise that operations have, if theirs may be noise: it is at all positions alike, and no factor; or 0."""
        if not self.is_seen or not self.goes_on or self.away.mean() > LARGEST_SEEN:
            return 0.0
        level, noisy = across(self.away, self.reach)
        a, b = (x - x.mean(axis=1, keepdims=True) for x in (self.a, self.b.astype(np.float32)))
        rescaled = position_nmse(a * position_scale(a, b)[:, None].astype(np.float32), b)
        is_factor = rescaled.mean() < _OF_FACTOR * self.away.mean()
        everywhere = noisy.is_alike(self.away) and (level <= BFLOAT16_NOISE or noisy.is_in(self.away))
        if is_factor or not everywhere or judge(self.a, self.b, noisy).verdict == Verdict.WRONG:
            return 0.0
        return level

    @cached_property
    def is_spread(self) -> bool | None:
        """Whether their error has no direction: no tensor of one layer or of all layers makes much of it by a factor. None: not known."""
        return noise_law.is_spread(_centred(self.b) - _centred(self.a), self._effects(), in_logits=True)

    def _effects(self) -> Iterator[NDArray[np.float64]]:
        """Yields what a factor of each part of each tensor, of one layer and of all, does to the logits. Nothing where that is too much
        work, where a file has blocks, which engines multiply as they are, and where the first positions are missing.
        """
        keys = [o.key for o in sites(self.base.model, self.base.dialect)[:-1] if o.key.name != TOP_EXPERTS]
        work = noise_law.PARTS * len(keys) * self.work
        if self.run_first is None or self.ids is None or has_blocks(self.base.model) or work > self.options.effort * _MOST_WORK:
            return
        ids, ours, of_all = self.ids[: len(self.a)], _centred(self.a), dict[str, NDArray[np.float64]]()
        for key in keys:
            changes = [{key: partial(_with_part_changed, key, part)} for part in range(noise_law.PARTS)]
            logits = self.run_first(with_each_computed(self.base, changes, ids, set()), len(changes), len(ids))
            effect = _centred(logits) - ours
            of_all[key.name] = of_all.get(key.name, 0.0) + effect
            yield effect
        yield from of_all.values()

    def made_by(self, x: NDArray) -> bool:
        """Whether logits are theirs but for roundings."""
        return judge(x.astype(np.float32, copy=False), self.b, self.reach).verdict <= Verdict.FLIPS

    @cached_property
    def is_seen(self) -> bool:
        """Whether theirs are farther than roundings reach at the positions that are looked at."""
        return judge(self.a, self.b, self.reach).verdict == Verdict.WRONG

    @cached_property
    def goes_on(self) -> bool:
        """Whether theirs are no farther behind the positions that are looked at than there: what explains these may explain all."""
        errors = position_nmse(self.ours.reshape(-1, self.ours.shape[-1]), np.asarray(self.theirs).reshape(-1, self.ours.shape[-1]))
        here = replace(
            self.reach, nmse=max(float(self.away.mean()), self.reach.nmse), positions=np.maximum(self.away, self.reach.positions)
        )
        worst, mean = limits(here, len(errors))
        return bool((errors <= worst).all() and errors.mean() <= mean)

    @cached_property
    def first_look(self) -> "_FirstLook | None":
        """The first positions that are as wrong as all; None where they are no less work than all."""
        wrong = np.flatnonzero(self.away >= self.away.mean() / 2)[:_LOOKED_AT]
        if self.run_first is None or self.ids is None or 2 * (wrong[-1] + 1) > len(self.a) or self.work > _MOST_WORK // 100:
            return None
        right: dict[Key, NDArray] = {TOKENS: self.ids[: len(self.a)]}
        self.base.run(right[TOKENS][None], lambda name, n, x: right.update({Key(name, n): x.reshape(len(x), -1).copy()}))
        return _FirstLook(self.base, self.run_first, right, self.a, self.b, self.away, wrong)

    @property
    def work(self) -> int:
        """Multiply-adds of a run."""
        return self.base.work(len(self.a))

    @cached_property
    def undeclared(self) -> str | None:
        """Why another dialect's roundings reach so far, alone or behind a cache of ggml's; a precision that would is said."""
        for dialect, logits in self.others:
            honest = [logits, *self.logits_of(roundings(dialect)).values()]
            if judge(self.a, self.b, reach_of(self.a, honest, self.base)).verdict <= Verdict.FLIPS:
                return f"no farther than rounding reaches in {dialect.text}"
            attention = [site for site in sites(dialect.model, dialect.dialect) if site.key.name == "kqv_out" and self.ids is not None]
            for hypothesis in hypotheses(attention, single=False):
                if hypothesis.id.startswith("cache.ggml"):
                    x = self.logits(hypothesis.variant(dialect, self.ids))
                    if x is not None and self.explains(x, self.away):
                        return f"{hypothesis}; in {dialect.text}"
        for precision in _PRECISIONS:
            of_type = engines_of_type(self.base, precision.act) if precision.act != "float32" and self.work <= _OF_TYPES else ()
            runs = [run for variant in (in_precision(self.base, precision), *of_type) if (run := self.logits(variant)) is not None]
            if not any(_distances(x, self.a, self.b).mean() <= _NEARER * self.away.mean() for x in runs):
                continue  # a coarse type reaches far, but only an engine that has it errs in its direction
            if judge(self.a, self.b, reach_of(self.a, runs, self.base, precision)).verdict <= Verdict.FLIPS:
                if precision.act != "float32":
                    return f"no farther than the precision {precision} reaches, and in its direction"
                self.said.append(f"the precision {precision} would explain it: declare it if your engine has it")
                break
        return None

    @cached_property
    def distinct(self) -> NDArray[np.intp]:
        """The positions whose logits differ from those of earlier ones by more than roundings reach: equal tokens in a row make one error
        many times."""
        a = _centred(self.a)
        products = a @ a.T
        size = np.diag(products)[:, None]
        near = size + size.T - 2 * products <= self.reach.nmse * size
        return np.flatnonzero(~np.tril(near, -1).any(axis=1))

    def explains(self, x: NDArray, best: NDArray[np.float64]) -> bool:
        """Whether logits are theirs but for roundings, and _CLOSER times nearer than `best`."""
        return _explains(_distances(x, self.a, self.b), best) and self.made_by(x)

    def wrong_scale(self) -> str | None:
        """The kind of matrix whose scale is off, if one is. Kinds whose scale a norm cancels change too little to be seen.

        Where theirs are far, our engine is run with that scale, and believed if it comes _CLOSER times nearer: a large error of another
        cause may point along.
        """
        error, rows = self.b.astype(np.float64) - self.a, self.distinct
        best, most, slope = "", 1.0, 0.0
        changes: dict[str, NDArray[np.float64]] = {}
        for name in self.names:
            low, high = (self.logits(scaled(self.base, name, factor)) for factor in (1 / _STEP, _STEP))
            if low is None or high is None or position_nmse(low, high).mean() / 4 < 2 * self.reach.nmse:
                continue
            changes[name] = change = (high.astype(np.float64) - low) / (2 * np.log(_STEP))  # by the logarithm of the scale
            along, square = (error * change).sum(axis=1)[rows], (change**2).sum(axis=1)[rows]
            along_all = float(along.sum() / max(square.sum(), 1e-300))
            spread = np.sqrt(((along - along_all * square) ** 2).sum()) / max(square.sum(), 1e-300)
            sure = abs(along_all) / max(_LEAST, (6 + 40 / len(rows)) * spread)
            if sure > most:
                best, most, slope = name, sure, float(np.clip(along_all, -50, 50))
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


@dataclass(frozen=True)
class _FirstLook:
    """Positions at which many mistakes are tried at once, each in a sequence of so few tokens."""

    base: Variant
    run: RunFirst
    right: Mapping[Key, NDArray]  # our tensors, of all tokens
    ours: NDArray  # [P, V]
    theirs: NDArray
    away: NDArray[np.float64]  # [P]
    wrong: NDArray[np.intp]  # the positions

    def promising(self, candidates: Sequence[Hypothesis]) -> list[Hypothesis]:
        """Those of some mistakes that leave at most half of the error at these positions, or have to be tried at all others."""
        looked_at = [hypothesis for hypothesis in candidates if hypothesis.computes and not hypothesis.grid and hypothesis.engine is None]
        if not looked_at:
            return list(candidates)
        end, failed = int(self.wrong[-1]) + 1, set[int]()
        variant = with_each_computed(self.base, [hypothesis.computes for hypothesis in looked_at], self.right[TOKENS][:end], failed)
        with np.errstate(all="ignore"):
            logits = self.run(variant, len(looked_at), end)
        away = [_distances(x, self.ours[:end], self.theirs[:end])[self.wrong].mean() for x in logits]
        far = [i in failed or not x < self.away[self.wrong].mean() / 2 for i, x in enumerate(away)]
        refused = {id(one) for one, is_far in zip(looked_at, far, strict=True) if is_far and not self.looks_ahead(one, end)}
        return [hypothesis for hypothesis in candidates if id(hypothesis) not in refused]

    def looks_ahead(self, hypothesis: Hypothesis, end: int) -> bool:
        """Whether a mistake makes other numbers of the first tokens where more follow."""
        compute = next(iter(hypothesis.computes.values()))
        first, whole = (self.made(compute, slice(0, n)) for n in (end, len(self.ours)))
        if first is None or whole is None:
            return first is not whole
        return len(whole) < end or not np.allclose(first, whole[:end], rtol=1e-5, atol=1e-6 * np.abs(whole).max())

    def made(self, compute: Compute, rows: slice) -> NDArray | None:
        """A tensor of the first tokens with a mistake; None if it has no finite numbers."""
        try:
            y = compute(OfSequence(self.right, rows))
        except KeyError:
            return None
        return y if np.isfinite(y).all() else None


@dataclass(kw_only=True)
class LogitsCase(Case):
    """Their logits, and what our engine makes of the tokens with a mistake."""

    target: _Target
    best: NDArray[np.float64]  # [P], the distance of the nearest run without a mistake

    def made(self, hypothesis: Hypothesis) -> Floats | None:
        try:
            return self.target.logits(hypothesis.variant(self.target.base, self.target.ids))
        except KeyError:  # it asks for a tensor of a later layer
            return None

    def explained(self, array: NDArray, hypothesis: Hypothesis) -> Explanation:
        """What is left. An operation that is off by no more than roundings may flip the codes that they flip: theirs are farther, then."""
        t, away = self.target, _distances(array, self.value, self.theirs)
        if hypothesis.computes and not t.strong and position_nmse(self.value, array).mean() <= t.reach.nmse:
            return Explanation(np.inf, False)
        return Explanation(float(away.mean()), _explains(away, self.best) and t.made_by(array))

    def promising(self, candidates: Iterable[Hypothesis], stop: Callable[[], bool]) -> Iterator[Hypothesis]:
        look, rest = self.target.first_look if self.target.strong else None, iter(candidates)
        if look is None:  # or where flipped codes may be most of what is left at some positions
            yield from rest
            return
        while (batch := list(islice(rest, _TOGETHER))) and not stop():
            yield from look.promising(batch)

    def of_one(self, key: Key, compute: Compute) -> tuple[NDArray, NDArray] | None:
        look, rows = self.target.first_look, slice(0, _ROWS)
        made = None if look is None else look.made(compute, rows)
        return None if look is None or made is None else (made, look.right[key][rows])

    def cost(self, changed: Collection[Key]) -> float:
        return self.target.work + OVERHEAD * len(self.span) // 2

    def facts(self) -> Hypothesis | None:
        """What theirs show by themselves, such as our logits in other places, where the others are ours but for roundings."""
        a, b = self.value.astype(np.float64), self.theirs.astype(np.float64)
        nmse = self.target.reach.nmse
        places = np.abs(b - a) > _FAR * nmse**0.5 * a.std(axis=1, keepdims=True)
        return facts_of(Wrong(self.span[-1], [], a, b, places, nmse, {}), of_columns=True)


def _wrong(judged: Judgement, mistake: str) -> Judgement:
    return replace(judged, verdict=Verdict.WRONG, reason=f"{mistake}; {judged.reason}", explanation=mistake)


def _centred(x: Floats) -> NDArray[np.float64]:
    """Logits [..., V] less their mean, which says nothing."""
    return x - x.mean(axis=-1, keepdims=True, dtype=np.float64)


def _with_part_changed(key: Key, part: int, values: Mapping[Key, NDArray]) -> NDArray:
    return noise_law.with_part_changed(values[key], part)


def _distances(x: Floats, a: NDArray, b: NDArray) -> NDArray[np.float64]:
    """Squared distances of theirs from a variant, in units of our spread, [P]."""
    spread = np.maximum(x.var(axis=1, dtype=np.float64), TINY)  # logits that are all alike are far from any
    return position_nmse(x, b) * spread / a.var(axis=1, dtype=np.float64)


def _explains(away: NDArray[np.float64], others: NDArray[np.float64]) -> bool:
    """Whether a mistake is _CLOSER times nearer to theirs than runs without one: on average, and at most positions that are wrong; and
    leaves most of the others as they are, such as those in front of the end of a window."""
    little = _LITTLE * others.mean()
    nearer, is_wrong = away < others / _CLOSER, others > little
    is_well = np.where(is_wrong, nearer, away <= little)
    return bool(away.mean() < others.mean() / _CLOSER and min(is_well.mean(), nearer[is_wrong].mean()) >= 0.75)
