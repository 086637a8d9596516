"""The judge of tensors: each is recomputed from the tensors of the dump that it follows from, and what is wrong is explained.

Where an operation's inputs are not in the dump they are recomputed from what is there, and the verdict covers all operations in between.
Derived bounds do not hold across several operations, because int8 codes flip. There the same operations are evaluated once more with every
tensor between them rounded to float16: how far that reaches, on their own numbers, is the measure (measures.limits).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import NonFiniteError
from ..engine.forward_pass import run_whole
from ..engine.network import Runtime
from ..engine.tokens import Tokens
from ..traces.points import FIELDS, SCORES, TOP_EXPERTS, Key
from .bounds import ROUNDING_ACROSS, bound_of, close, dot, noise, position_errors, relative_error, statistics, within
from .compared import Compared, Types
from .edits.caches import is_summed_in_float16
from .equivalence import ROTATED
from .evidence import LITTLE, matched
from .honest_engines import FLOOR, one_scale
from .hypothesis import Compute, Computes, Hypothesis, Values
from .law import noise as noise_law
from .law.channels import wrong_channels
from .law.codes import AGAIN, wrong_codes
from .law.expected import TINY, Expected, U
from .law.expression import Array, nodes, value_of
from .law.graph import LOGITS, TOKENS, Operation, operations
from .law.levels import LEVELS, stored_as
from .law.precision import DIGITS, FLASH, ROUNDOFF
from .law.products import has_blocks, linear_of
from .law.roundings import to_digits, to_eleven_bits
from .law.running_error import next_experts
from .measures import Reach, across, judge, limits
from .mistakes.catalogue import CACHE_ROUNDINGS, CATALOGUE, at_operation
from .mistakes.hypotheses import hypotheses
from .mistakes.search import OVERHEAD, Case, Explanation, Search
from .options import SEARCHING, Options
from .parts import SCREENED, Part, Screen, wrong_parts
from .readings.others import overwritten
from .readings.table import cause_of, facts_of, sums_of
from .readings.wrong import Wrong
from .report.report import OperationVerdict
from .verdict import Verdict

_SUMMED_IN_FLOAT16 = "values are summed in float16, as llama.cpp's flash attention does: declare it (--as llama.cpp-flash)"
_APPROXIMATED = ("activation", "root", "circle", "curve", "sigmoid", "exponential")  # functions that engines take from tables
_FLOAT32 = 16 * U  # the largest level of float32's own roundings, about
_MOST_WORK = 10**9  # multiply-adds of the operations that each mistake recomputes: larger models need denser dumps
_MOST_IN_VAIN = 3 * 10**9  # the same of all tensors together that no mistake explains: a layer like them explains no more
_OF_EFFECTS = 10**11  # the same of all factors that are tried in a span of operations
_LITTLE_WORK = 3 * 10**7  # the same where the verdict is FLIPS, which may hide a small mistake
_HIDDEN_WORK = 2 * 10**10  # of all hidden mistakes that are tried on the first wrong tensor, and at most on all others together: seconds


class TensorJudge:
    """One engine's tensors, beside everything they are judged by."""

    def __init__(
        self, runtime: Runtime, ids: NDArray[np.int64], dump: Compared, types: Types, options: Options, start: int, scored: Collection[int]
    ) -> None:
        """types: of the dump's tensors. start: the position of the first token. scored: the layers whose scores are in the dump."""
        self.model, self.dialect, self.ids, self.dump = runtime.model, runtime.dialect, ids, dump
        self.types, self.options, self.start = types, options, start
        self.theirs = _Theirs({TOKENS: ids, **dump.tensors})
        self.sites = {o.key: o for o in operations(self.model, self.dialect, start, scored)}
        # what comes before a tensor that cannot be judged may be its cause, and what comes behind has it in it
        sound = takewhile(lambda key: not dump.problems.get(key), self.sites)
        self.judged = [key for key in sound if key in dump.tensors]
        self.progress = options.bars("judging operations")
        self.search = Search(2 * options.effort * _HIDDEN_WORK, options.budget, options.bars(SEARCHING))
        self.in_vain = 0.0  # multiply-adds of operations whose known mistakes were tried and explain nothing
        self.residuals: dict[Key, noise_law.Residual] = {}  # the errors of all tensors, by their bounds
        self.formats: dict[str, Hypothesis | None] = {}  # what explains the noise of tensors of a name, if something does
        self.cached: dict[Key, Compute] = {}  # attention with the KV cache that a tensor has shown, assumed from there on

    def verdicts(self) -> list[OperationVerdict]:
        """The verdict on each tensor that can be judged: all by their bounds, and then those that are not right by what all errors show."""
        judged, total = [], len(self.judged)
        for i, key in enumerate(self.judged, 1):
            judged.append(self._verdict(self.sites[key]))
            self.progress(i, total)
        unexplained = [i for i, verdict in enumerate(judged) if verdict.verdict == Verdict.WRONG and verdict.hypothesis is None]
        kinds = {self.residuals[judged[i].key].kind for i in unexplained}
        for key, error in list(self.residuals.items()):
            if error.kind in kinds and error.kind != noise_law.SEVERAL and key not in self.dump.same and not self.types.strict:
                _, expected, inputs = self._by_bound(self.sites[key], self.theirs[key])
                self.residuals[key] = self._residual(self.sites[key], expected, inputs)
        with np.errstate(all="ignore"):  # mistakes may give numbers of any kind
            for i in unexplained:
                judged[i] = self._explained(judged[i])
        self.search.close()
        return judged

    def _explained(self, judged: OperationVerdict) -> OperationVerdict:
        """A wrong tensor with its cause, or what its error is like."""
        explain = self._wrong_several if len(judged.across) > 1 else self._wrong
        try:
            return explain(self.sites[judged.key])
        except KeyboardInterrupt:  # what is known is said
            if not self.options.keeps_known:
                raise
            self.search.stop()
            return explain(self.sites[judged.key])

    @property
    def noise(self) -> noise_law.Noise:
        """What the errors of all tensors have in common."""
        return noise_law.Noise(self.residuals)

    def _verdict(self, site: Operation) -> OperationVerdict:
        span = self._span(site)
        self.residuals[site.key] = noise_law.Residual(noise_law.SEVERAL if len(span) > 1 else noise_law.kind_of(site.key))
        # equal outputs of other inputs would be a coincidence or a fake
        if {site.key, *(k for o in span for k in o.inputs if k in self.dump.tensors)} <= self.dump.same:
            across = tuple(o.key for o in span)
            return OperationVerdict(
                site.key, Verdict.SAME_BITS, across=across, max_error=0.0, bound_ratio=0.0, nmse=0.0, scale=1.0, cosine=1.0, ulps=0.0
            )
        theirs = self.theirs[site.key]
        if len(span) > 1:
            return self._several(span, theirs)
        judged, expected, _ = self._by_bound(site, theirs)
        return judged if judged.verdict == Verdict.WRONG else replace(judged, **self._from_float64(site, expected.value, theirs))

    def _span(self, site: Operation) -> list[Operation]:
        """The operations between what the dump has and this tensor, this one last."""
        needed = {site.key}
        for site_before in reversed(self.sites.values()):
            if site_before.key in needed:
                needed |= {k for k in site_before.inputs if k not in self.theirs}
        return [self.sites[key] for key in self.sites if key in needed]

    # --- an operation whose inputs are in the dump ---

    def _by_bound(self, site: Operation, theirs: Array) -> tuple[OperationVerdict, Expected, list[Array]]:
        """The verdict on an operation, what it should give, and its inputs."""
        inputs, details = [self.theirs[k] for k in site.inputs], self.options.details
        expected = site.expected(self.types.storage(site), *inputs)
        verdict, reason, ratio = within(expected, theirs)
        if verdict == Verdict.WRONG and self.options.prefix and site.key.name == "kqv_out":
            verdict, reason, ratio = self._behind_prefix(site, inputs, expected.value, theirs) or (verdict, reason, ratio)
        if details is not None:
            details.numbers(site.key, expected.value, theirs, lambda rows: bound_of(expected, expected.value.shape, rows)[0])
        return statistics(site.key, verdict, reason, (site.key,), ratio, expected.value, theirs), expected, inputs

    def _behind_prefix(self, site: Operation, inputs: list[Array], value: Array, theirs: Array) -> tuple[Verdict, str, float] | None:
        """Verdict, reason and part of the limit where keys and values of the prefix are ours, and roundings explain what theirs did: codes
        of int8 flip in a prefix as elsewhere. None where they do not.
        """
        own, honest = self.options.prefix, self._honest_pass
        if honest is None:
            return None
        other = {k: np.append(honest[k][:own], x[own:], axis=0) for k, x in zip(site.inputs[1:], inputs[1:], strict=True)}
        other[site.inputs[0]] = inputs[0]
        errors = position_errors(value, value_of(site.tree, other.__getitem__, len(value)))[own:]
        found = close(value[own:], theirs[own:], Reach(max(FLOOR, float(errors.mean())), errors))
        return found if found[0] != Verdict.WRONG else None

    @cached_property
    def _honest_pass(self) -> Values | None:
        """The tensors of an engine that rounds its own, up to the last attention; None if their numbers leave float32's range."""
        last = max(i for i, key in enumerate(self.sites) if key.name == "kqv_out")
        sites = [*self.sites.values()][:last]
        return self._with_rounded(sites, sites)

    def follows(self, key: Key, other: Key) -> bool:
        """Whether the operation of another tensor reads this one of the dump, and is right on it."""
        site = self.sites[other]
        if key not in site.inputs or not all(x in self.theirs for x in site.inputs):
            return False
        expected = site.expected(self.types.storage(site), *(self.theirs[x] for x in site.inputs))
        return within(expected, self.theirs[other])[0] != Verdict.WRONG

    def _residual(self, site: Operation, expected: Expected, inputs: list[Array]) -> noise_law.Residual:
        """The error of an operation as noise."""
        theirs, unit, kv_heads = self.theirs[site.key], site.unit(*inputs), self.model.config.kv_heads
        found = noise_law.residual(site.key, expected.value, unit, theirs)
        is_attention = site.key.name == "kqv_out" and not self.start
        if found.odd and is_attention and noise_law.is_of_values(inputs[2], theirs - expected.value, kv_heads):
            found = noise_law.residual(site.key, expected.value, unit, theirs, spared=1)
        if not found.odd and found.kind == noise_law.STREAM:
            return found._replace(odd=noise_law.wrong_term(inputs, expected.value, theirs - expected.value))
        if found.odd or found.kind != noise_law.PRODUCTS:
            return found
        weights, error = linear_of(self.model, site.key).weights, theirs - expected.value
        odd = noise_law.left_out(inputs[0], weights, error) if site.key == LOGITS else ""  # which no other product need be like
        if not odd and found.level > AGAIN:
            odd = wrong_codes(inputs[0], weights, error) or wrong_channels(inputs[0], weights, error)
        return found._replace(odd=odd)

    def _wrong(self, site: Operation) -> OperationVerdict:
        """An operation that is not within its bound: its cause, or the noise that all operations of its kind have."""
        theirs = self.theirs[site.key]
        judged, expected, inputs = self._by_bound(site, theirs)
        if judged.verdict != Verdict.WRONG:  # since a cache was assumed
            return judged
        if self._is_flash_attention(site, inputs, theirs):
            self.types = replace(self.types, precision=FLASH)
            return replace(judged.explained(Hypothesis(_SUMMED_IN_FLOAT16, "read.ggml_flash")), verdict=Verdict.NARROW)
        if not self.types.strict and (text := stored_as(expected.value, bound_of(expected, theirs.shape)[0], theirs)):
            return self._caused(judged, Hypothesis(text, LEVELS, fault=False))
        return self._sought(
            judged, lambda room: self._case_of_one(site, self._with_noise(site, expected, inputs) if room else expected, inputs, theirs)
        )

    def _sought(self, judged: OperationVerdict, case_of: Callable[[bool], "TensorCase"], work: float = 0.0) -> OperationVerdict:
        """A wrong tensor with its cause: the noise that all operations of its kind have, a format, or a mistake.

        case_of: the case, with room for the noise of others or without. work: of its known mistakes, if they explain nothing.
        """
        key, search = judged.key, self.search
        if not self.types.strict and self.noise.explains(key):
            return self._noisy(judged, case_of)
        case = case_of(True)
        if not self.types.strict and self.residuals[key].may_be_format:  # too coarse to be believed without its name
            search.begin_unlimited()
            if (cause := search.format(case)) is not None:
                return self._caused(judged, cause)
        search.begin()
        cause = search.named(case, hypotheses(case.span, single=True, stop=search.has_ended))
        if cause is None:
            self.in_vain += work
            cause = search.unnamed(case)
        if cause is None and self.noise.level(key) > _FLOAT32 and (wrong := case_of(False).wrong) is not None:
            cause = cause_of(replace(wrong, noise=0.0))  # what looks like noise may be read off, too
        if cause is not None and case.is_uneven:
            cause = replace(cause, fault=True)
        return self._caused(judged, cause)

    def _noisy(self, judged: OperationVerdict, case_of: Callable[[bool], "TensorCase"]) -> OperationVerdict:
        """A tensor whose error is noise: its format, which is sought once for each name, or the mistake that all of it is.

        No budget bounds this search, because the verdict depends on it.
        """
        name, search = judged.key.name if len(judged.across) == 1 else noise_law.SEVERAL, self.search
        if name not in self.formats:
            search.begin_unlimited()
            one = case_of(False)
            cause = search.named(one, hypotheses(one.span, single=True)) or search.format(one) or search.nearly(one) or search.hidden(one)
            if cause is not None and cause.fault:
                return self._caused(judged, cause)
            self.formats[name] = cause
        return self._caused(judged, self.formats[name] or self._cause_of_noise(self.sites[judged.key]))

    def _cause_of_noise(self, site: Operation) -> Hypothesis:
        """The noise of an operation as a cause, which is no fault."""
        named = [node.what if node.kind == "activation" else node.noun for node, _ in nodes(site.tree) if node.kind in _APPROXIMATED]
        return Hypothesis(self.noise.words(site.key, named[0] if len(named) == 1 else ""), "noise", fault=False)

    def _with_noise(self, site: Operation, expected: Expected, inputs: list[Array]) -> Expected:
        """What an operation should give, with room for the noise of others."""
        level = 0.0 if self.types.strict else self.noise.level(site.key)
        return expected if level <= _FLOAT32 else expected.with_noise(level, site.unit(*inputs))

    def _case_of_one(self, site: Operation, expected: Expected, inputs: list[Array], theirs: Array) -> "TensorCase":
        value, is_wide = expected.value, self.types.storage(site).is_wide and self.noise.level(site.key) <= _FLOAT32
        rough = 0.0 if is_wide else noise(expected)
        most_away, bound = bound_of(expected, value.shape)[:2]
        loose = dot(bound, bound) / max(dot(value, value), TINY)
        places = np.abs(theirs - value) > most_away
        wrong = Wrong(site, inputs, value, theirs, places, rough, self.theirs, self.search.has_ended)
        return self._case([site], value, theirs, matched(rough), places, noise=loose, wrong=wrong)

    def _is_flash_attention(self, site: Operation, inputs: list[Array], theirs: Array) -> bool:
        """Whether an output of attention that nobody declared is right but for the roundings of ggml's flash attention."""
        storage = self.types.storage(site)
        is_wide = site.key.name == "kqv_out" and not self.types.strict and storage.is_wide
        if not is_wide or not is_summed_in_float16(site, inputs, theirs):
            return False
        return within(site.expected(storage._replace(precision=FLASH), *inputs), theirs)[0] != Verdict.WRONG

    def _from_float64(self, site: Operation, value: Array, theirs: Array) -> dict[str, Any]:
        """RMS errors of our kernel and of theirs, both on their inputs, in u of the RMS of float64's result."""
        tensors = self.dump.tensors
        inputs = [tensors[k] if k in tensors else self.theirs[k] for k in site.inputs]
        size = float(np.sqrt(dot(value, value) / value.size))
        shifted = self.start and site.key.name in ROTATED  # our kernel has the tokens' own positions
        no_kernel = site.key.name in SCORES
        if size == 0 or no_kernel or shifted or any(x.dtype not in (np.float32, np.float16, np.int64) for x in inputs):
            return {}  # inputs of more bits than ours can take would count against us
        ours = self._ours_on_theirs[site.key].reshape(value.shape)
        errors = {"ours_rms": ours - value, "theirs_rms": theirs - value}
        return {name: float(np.sqrt(dot(error, error) / value.size)) / (U * size) for name, error in errors.items()}

    @cached_property
    def _ours_on_theirs(self) -> dict[Key, NDArray]:
        """Our kernels' outputs from their inputs, for each tensor of the dump: a forward pass that continues with their tensors."""
        ours: dict[Key, NDArray] = {}

        def keep(name: str, layer: int | None, array: NDArray) -> None:
            if (key := Key(name, layer)) in self.dump.tensors:
                ours.setdefault(key, array.copy())

        def exchange(name: str, layer: int | None, array: NDArray) -> NDArray:
            keep(name, layer, array)
            theirs = self.dump.tensors.get(Key(name, layer))
            return array if theirs is None else theirs.reshape(array.shape).astype(array.dtype)

        with np.errstate(all="ignore"), suppress(NonFiniteError):  # the logits come last
            run_whole(Runtime(self.model, self.dialect, record=keep, edit=exchange), Tokens.whole(self.ids[None]))
        return ours

    # --- several operations at once, the last of which gives a tensor of the dump ---

    def _several(self, span: list[Operation], theirs: Array) -> OperationVerdict:
        """Several operations by the reach of roundings, and by the mistakes that are smaller."""
        judged, value, reach = self._by_reach(span, theirs)
        if reach is not None and not self.types.strict:
            self.residuals[judged.key] = self._residual_across(span, value, theirs, reach)
        most, work, effort = 0.0 if reach is None else reach.nmse, sum(self.cost(site.key) for site in span), self.options.effort
        if judged.verdict == Verdict.FLIPS and work <= effort * _LITTLE_WORK:
            self.search.begin_unlimited()
            small = self._case(span, value, theirs, most, np.zeros(value.shape, bool), least=most / 2)
            cause = self.search.named(small, hypotheses(small.span, single=most == 0))
            return replace(judged.explained(cause), verdict=Verdict.WRONG) if cause is not None and cause.fault else judged
        return judged

    def _residual_across(self, span: list[Operation], value: Array, theirs: Array, reach: Reach) -> noise_law.Residual:
        """The error of several operations as noise: how many times as far as float16 it reaches.

        Noise of attention alone, as of a coarse cache, has other positions than noise of all: the first ones average fewest values.
        """
        of_all = _noise_across(value, theirs, reach)
        attention = [site for site in span if site.key.name == "kqv_out"]
        alone = self._narrow(span, value, attention) if of_all.odd and attention else None
        if alone is not None and alone.any() and not _noise_across(value, theirs, Reach(float(alone.mean()), alone)).odd:
            of_all = of_all._replace(odd="")
        is_coarse = of_all.may_be_format and noise_law.COARSEST_SEEN < of_all.level <= noise_law.COARSEST_SPREAD
        return of_all._replace(is_spread=is_coarse and bool(noise_law.is_spread(theirs - value, self._effects(span, value))))

    def _effects(self, span: list[Operation], value: Array) -> Iterator[Array]:
        """Yields what a factor of each part of each tensor of a span does to its result. Nothing where that is too much work, where layers
        may have one cause, and where a file has blocks, which engines multiply as they are.
        """
        work = noise_law.PARTS * len(span) * sum(self.cost(site.key) for site in span)
        if has_blocks(self.model) or len({site.key.layer for site in span}) > 2 or work > self.options.effort * _OF_EFFECTS:
            return
        right, last = self.values(span), span[-1].key
        for key in (site.key for site in span[:-1] if site.key.name != TOP_EXPERTS):
            changed = [noise_law.with_part_changed(right[key], part) for part in range(noise_law.PARTS)]
            yield np.stack([self.values(span, {key: lambda values, x=x: x}, right)[last] - value for x in changed])

    def _wrong_several(self, site: Operation) -> OperationVerdict:
        """Several operations that are farther off than roundings reach: their cause, or the noise that all of them have."""
        span, theirs = self._span(site), self.theirs[site.key]
        judged, value, reach = self._by_reach(span, theirs)
        if judged.verdict != Verdict.WRONG:
            return judged
        most, work, effort = 0.0 if reach is None else reach.nmse, sum(self.cost(site.key) for site in span), self.options.effort
        if work > effort * _MOST_WORK or self.in_vain > effort * _MOST_IN_VAIN:
            if not self.types.strict and self.noise.explains(site.key):
                return self._caused(judged, self._cause_of_noise(site))
            return replace(judged, tried=False)
        places = np.broadcast_to(position_errors(value, theirs)[:, None] > max(most, ROUNDING_ACROSS), value.shape)
        more = max(most, most * (self.noise.level(site.key) / noise_law.FLOAT16_NOISE) ** 2)
        return self._sought(judged, lambda room: self._case(span, value, theirs, more if room else most, places), work)

    def _by_reach(self, span: list[Operation], theirs: Array) -> tuple[OperationVerdict, Array, Reach | None]:
        """The verdict on several operations at once, what their result should be, and how far roundings reach."""
        key, details = span[-1].key, self.options.details
        value = self._nearest_choice(span, self.values(span)[key], theirs)
        reach = self._reach(span, value) if position_errors(value, theirs).max() > ROUNDING_ACROSS else None
        verdict, reason, ratio = close(value, theirs, reach)
        if key == LOGITS and verdict == Verdict.FLIPS:  # single logits, factors and constants too
            logits = judge(value.astype(np.float32), theirs, reach)
            verdict, reason = max((verdict, reason), (logits.verdict, logits.reason))
        if details is not None:
            details.rows(key, value, theirs, ROUNDING_ACROSS if verdict == Verdict.ROUNDING else limits(reach, len(value))[0])
        judged = statistics(key, verdict, reason, tuple(site.key for site in span), ratio, value, theirs)
        return judged, value, reach

    def _reach(self, span: list[Operation], value: Array) -> Reach | None:
        """The reach of roundings in every tensor of a span; None if their numbers leave float32's range on the way."""
        if (narrow := self._narrow(span, value, span)) is None:
            return None
        reach = Reach(max(FLOOR, float(narrow.mean())), narrow, one_scale=one_scale(self.model, self.dialect))
        choices = self._other_choices(span, value, several=True)
        return reach if choices is value else replace(reach, choices=position_errors(value, choices))

    def _narrow(self, span: list[Operation], value: Array, sites: list[Operation]) -> Array | None:
        """The NMSE at each position of a span in which these operations round their outputs; None if numbers leave float32's range."""
        rounded = self._with_rounded(span, sites)
        return None if rounded is None else position_errors(value, rounded[span[-1].key])

    def _with_rounded(self, span: list[Operation], sites: list[Operation]) -> Values | None:
        """The tensors of a span in which these operations round their outputs; None if numbers leave float32's range."""
        with suppress(FloatingPointError), np.errstate(over="ignore", invalid="ignore"):
            return self.values(span, {o.key: partial(self._rounded, o) for o in sites})
        return None

    def _rounded(self, site: Operation, values: Values) -> Array:
        """An operation that rounds its output to float16; with narrow types every step, by as much as they may at random."""
        storage = self.types.storage(site)
        expected = site.expected(storage, *(values[k] for k in site.inputs))
        if site.key.name == TOP_EXPERTS:
            return expected.value
        if storage.is_wide:
            return to_eleven_bits(expected.value.astype(np.float32)).astype(np.float64)
        random = np.random.default_rng(list(str(site.key).encode())).uniform(-1, 1, expected.value.shape)
        return to_digits(expected.value + random * np.sqrt(expected.square), DIGITS[storage.output])

    def _nearest_choice(self, span: list[Operation], value: Array, theirs: Array) -> Array:
        """The result of a span; where its router leaves two experts open, with the one that is nearer to theirs.

        Behind one router, positions are apart. With several, the reach of other choices says how far they go.
        """
        choice = self._other_choices(span, value, several=False)
        nearer = position_errors(choice, theirs) < position_errors(value, theirs)
        return np.where(nearer[:, None], choice, value)

    def _other_choices(self, span: list[Operation], value: Array, several: bool) -> Array:
        """The result of a span if its router, or its several, take the next best expert for the last one where roundings leave both open;
        `value` if it has no such router."""
        routers = [site for site in span if site.key.name == TOP_EXPERTS]
        if not routers or (len(routers) > 1) != several or not self.model.config.has_choice:
            return value

        def compute(site: Operation, values: Values) -> Array:
            logits = values[site.inputs[0]]
            size = 16 * max(U, ROUNDOFF[self.types[site.inputs[0]]]) * (1 + np.abs(logits).max(axis=1))
            return next_experts(logits, self.model.config.experts_used, size).astype(np.float64)

        return self.values(span, {site.key: partial(compute, site) for site in routers})[span[-1].key]

    # --- what tensors are, computed from theirs ---

    def values(self, span: Sequence[Operation], changed: Computes | None = None, right: Values | None = None) -> dict[Key, Array]:
        """Their tensors, and those of a span computed from them, those of `changed` with a mistake.

        right: the result without changes, if it is known: operations that read nothing changed need not run again. Raises
        FloatingPointError if a change gives no finite numbers.
        """
        changed = changed or {}
        across = [site.key for site in span]
        later = span[next((i for i, k in enumerate(across) if k in changed), 0) if right else 0 :]
        again = {site.key for site in later}
        values = _Lazy({k: x for k, x in (right or {}).items() if k not in again}, self, across)
        for site in later:
            if site.key in changed:
                values[site.key] = changed[site.key](_Lazy(values, self, across))
                if values[site.key].size != self.dump.sizes[site.key] or not np.isfinite(values[site.key]).all():
                    raise FloatingPointError(f"{site.key} is not finite, or of another size")
            elif site.key in self.cached:
                values[site.key] = self.cached[site.key](values)
            else:
                is_as_before = right and all(values.get(k) is right.get(k) for k in site.inputs)
                values[site.key] = right[site.key] if right and is_as_before else self.value(site, values)
        return values

    def value(self, site: Operation, values: Values) -> Array:
        """What an operation gives, without a bound, which takes twice as long."""
        return value_of(site.tree, values.__getitem__, len(values[site.inputs[0]]))

    def cost(self, key: Key) -> int:
        """Multiply-adds of the operation of a tensor, at most."""
        return self.dump.sizes[key] * (self.model.config.width if key.layer is not None else self.model.config.vocab)

    # --- what went wrong ---

    def _case(self, span: list[Operation], value: Array, theirs: Array, most: float, places: NDArray, **more: Any) -> "TensorCase":
        """The case of a tensor that is wrong at these places. Of a large product some outputs are looked at first. more: fields of it."""
        key = span[-1].key
        is_product = len(span) == 1 and (key.name in FIELDS or key == LOGITS) and value.shape == theirs.shape
        return TensorCase(
            span=[replace(site, length=len(self.ids)) for site in span],  # what it keeps of them goes with the case
            value=value,
            theirs=theirs,
            now=relative_error(value, theirs),
            most=most,
            judge=self,
            right=self.values(span),
            screen=Screen.of(prod(linear_of(self.model, key).shape), value, theirs) if is_product else None,
            parts=list(wrong_parts(key, self.model.config, places, value, theirs, most)),
            **more,
        )

    def _caused(self, judged: OperationVerdict, cause: Hypothesis | None) -> OperationVerdict:
        """A wrong tensor with its cause: a rounding to fewer bits is no fault where nothing was declared, and assumed from there on."""
        error = self.residuals[judged.key]
        if cause is None and not self.types.strict and error.may_be_format and error.level > error.most:
            return replace(judged, reason=f"{judged.reason}; {noise_law.doubt(error.level)}")
        explained = judged.explained(cause)
        if cause is None or cause.fault or self.types.strict:
            return explained
        if cause.kind and cause.id in CACHE_ROUNDINGS:
            known = [mistake for mistake in CATALOGUE if mistake.id == cause.id]
            for key in (key for key in self.sites if key.name == "kqv_out"):
                caches = at_operation(self.sites[key], known)
                self.cached[key] = next(one.computes[key] for one in caches if one.kind == cause.kind)
            self.types = self.types.with_cache(cause.kind)
        return replace(explained, verdict=Verdict.NARROW)


@dataclass(kw_only=True)
class TensorCase(Case):
    """A wrong tensor, and what a span of operations makes of the dump's tensors before it."""

    most: float  # NMSE that roundings leave
    judge: TensorJudge
    right: Values  # what the operations give without a mistake
    screen: Screen | None
    wrong: Wrong | None = None  # for readings: the tensor of an operation whose inputs are in the dump
    least: float = 0.0  # NMSE by which a mistake must change the right numbers: a smaller change may flip codes as roundings do
    part: Part | None = None  # that alone is to be explained

    def made(self, hypothesis: Hypothesis) -> Array | None:
        """The tensor with a mistake; None if that is refused at some outputs, or gives no numbers of this shape."""
        last = self.span[-1].key
        if self.screen is not None and (self.screen.left(hypothesis.computes[last], self.right) or 0.0) > SCREENED:
            return None
        with suppress(FloatingPointError):
            array = self.judge.values(self.span, hypothesis.computes, self.right)[last]
            return array if array.shape == self.value.shape else None
        return None

    def explained(self, array: Array, hypothesis: Hypothesis) -> Explanation:
        """A mistake explains little unless a tenth is left. Of coarse types the numbers fall to other sides of their steps."""
        if hypothesis.fault and relative_error(array, self.value) < self.least:
            return Explanation(np.inf, False)
        left = self._left(array)
        coarse = hypothesis.kind in ("q8_0", "q4_0") and left < self.now / 20
        return Explanation(left, left <= min(self.most, self.now / 10) or coarse)

    def near(self, hypothesis: Hypothesis) -> float:
        left = None if self.screen is None else self.screen.left(hypothesis.computes[self.span[-1].key], self.right)
        return super().near(hypothesis) if left is None else left * self.now

    def leaves_noise(self, array: Array) -> bool:
        site = self.span[-1]
        return self.wrong is not None and noise_law.residual(site.key, array, site.unit(*self.wrong.inputs), self.theirs).is_believed

    def cost(self, changed: Collection[Key]) -> float:
        if self.screen is not None:
            return len(self.screen.columns) * self.judge.cost(self.span[-1].key) / self.value.shape[1] + OVERHEAD
        first = next(i for i, site in enumerate(self.span) if site.key in changed)
        return sum(self.judge.cost(site.key) + OVERHEAD for site in self.span[first:])

    @cached_property
    def independent(self) -> int:
        """One of each position and head of attention and of each position behind several operations; of one all but what has a factor.
        Heads that have one factor at a position count once: all weights of a position may be alike."""
        is_attention, error, value = self.span[-1].key.name == "kqv_out", self._cut(self.theirs - self.value), self._cut(self.value)
        size = self.judge.model.config.head_dim if is_attention else value.shape[1]
        error, value = error.reshape(len(error), -1, size), value.reshape(len(value), -1, size)
        along, square = (error * value).sum(axis=2), (value**2).sum(axis=2)
        is_factor = along**2 > 0.99 * (error**2).sum(axis=2) * square
        factor = np.where(is_factor, along / np.maximum(square, TINY), np.nan)
        is_alike = np.abs(factor - factor[:, :1]) <= LITTLE * np.abs(factor)
        is_alike[:, 0] = False
        count = np.count_nonzero(np.abs(error) > LITTLE * np.abs(error).max(), axis=2)
        most = np.where(is_alike, 0, np.where(is_factor | is_attention | (len(self.span) > 1), 1, size))
        return int(np.minimum(count, most).sum())

    @property
    def is_uneven(self) -> bool:
        """Whether an operation that sums nothing errs more than 8 bits make it, and not alike, as a rotation by rounded angles does."""
        if len(self.span) > 1 or noise_law.kind_of(self.span[-1].key) in noise_law.OF_SUMS or self.now <= noise_law.COARSEST_SEEN**2:
            return False
        errors = position_errors(self.value, self.theirs)
        return bool(errors.min() * noise_law.UNEVEN**2 < errors.mean())

    def facts(self) -> Hypothesis | None:
        if self.wrong is None:
            return None
        later, key, judge = None, self.wrong.key, self.judge
        if not self.wrong.is_nearly_right:
            later = overwritten(key, judge.dump.tensors, list(judge.sites), partial(judge.follows, key))
        return facts_of(self.wrong) if later is None else Hypothesis(later, "read.overwritten")

    def readings(self) -> Hypothesis | None:
        return None if self.wrong is None else cause_of(self.wrong)

    def sums(self) -> Hypothesis | None:
        return None if self.wrong is None else sums_of(self.wrong)

    def within(self, part: Part) -> "TensorCase":
        alone = replace(self, part=part, screen=None)
        return replace(alone, now=alone._left(self.value))

    def with_operations_before(self) -> "TensorCase | None":
        judge, last = self.judge, self.span[-1]
        span = [replace(judge.sites[key], length=last.length) for key in judge.sites if key in (*last.inputs, last.key)]
        right = judge.values(span)
        if relative_error(right[last.key], self.value) > self.most:  # the dump is wrong there
            return None
        return replace(self, span=span, right=right, wrong=None, screen=None, parts=(), refused=frozenset({last.key}))

    def _cut(self, x: Array) -> Array:
        return x if self.part is None else self.part.cut(x)

    def _left(self, array: Array) -> float:
        return relative_error(self._cut(array), self._cut(self.theirs))


def _noise_across(value: Array, theirs: Array, reach: Reach) -> noise_law.Residual:
    errors = position_errors(value, theirs)
    level, noisy = across(errors, reach)
    verdict, odd, _ = close(value, theirs, noisy)
    odd = odd if verdict == Verdict.WRONG else noise_law.odd_across(errors, noisy.positions, level)
    return noise_law.Residual(noise_law.SEVERAL, level, odd)


class _Theirs(dict[Key, NDArray]):
    """Their tensors, and the tokens. They are read in float64: one at a time, as all together are twice the dump."""

    def __getitem__(self, key: Key) -> Array:
        x = super().__getitem__(key)
        return x if key == TOKENS else x.astype(np.float64)


class _Lazy(dict):
    """Tensors known so far, and theirs except those of a span, when they are asked for.

    A mistake may ask for one that is neither in the dump nor on the way: it is computed then.
    """

    def __init__(self, values: Values, judge: TensorJudge, across: Collection[Key]):
        super().__init__(values)
        self._judge, self._across = judge, across

    def __missing__(self, key: Key) -> Array:
        judge, is_theirs = self._judge, key in self._judge.theirs and key not in self._across
        self[key] = judge.theirs[key] if is_theirs else judge.value(judge.sites[key], self)
        return self[key]
