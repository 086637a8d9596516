"""The judge of a whole trace: each operation recomputed from the other engine's own inputs, the first wrong one named, and why.

Where an operation's inputs are not in the dump they are recomputed from what is there, and the verdict covers all operations in between.
Derived bounds do not hold across several operations, because int8 codes flip. There the same operations are evaluated once more with every
tensor between them rounded to float16: how far that reaches, on their own numbers, is the measure (logits.limits).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import NonFiniteError
from ..base.progress import Progress
from ..engine.dialects import EXACT, Dialect
from ..engine.forward_pass import run_whole
from ..engine.network import Runtime
from ..engine.tokens import Tokens, check_tokens
from ..model.records import Model, with_rope_of
from ..traces.points import FIELDS, SCORES, TOP_EXPERTS, Key, Trace
from ..traces.record import Recorder
from .bounds import (
    ROUNDING_ACROSS,
    bound_of,
    close,
    dot,
    invalid_experts,
    invalid_tensor,
    noise,
    position_errors,
    relative_error,
    statistics,
    within,
)
from .detail import Details
from .edits.expression import value_of
from .equivalence import KEYS, QUERIES, ROTATED, look_through
from .expected import TINY, Expected, Storage, U
from .ggml_attention import FLASH_CAUSE, is_summed_in_float16
from .graph import EMBEDDING, LOGITS, TOKENS, Operation, operations
from .honest_engines import FLOOR, one_scale
from .law import next_experts
from .logits import Reach, judge, limits, same_bits
from .mistakes.anywhere import fitted
from .mistakes.catalogue import Trial, as_rounded, cached_and_rounded, narrowed, trials
from .mistakes.mistake import Cause, Compute
from .mistakes.names import CACHE_ROUNDINGS
from .mistakes.search import OVERHEAD, Explanation, Nearest, Search, in_types, with_alike
from .options import DEFAULT, Options
from .parts import InParts, Part
from .place import matrix_of
from .precision import CACHES, DIGITS, FLASH, FLOAT32, ROUNDOFF, Precision, narrowest, storage_type
from .readings.elements import overwritten
from .readings.table import LOOSE, cause_of, facts_of
from .readings.wrong import Wrong, matched
from .report import OperationVerdict, Report
from .roundings import to_digits, to_eleven_bits
from .scores import by_position, rows_of
from .screen import Screen
from .verdict import Verdict

Array = NDArray[np.float64]

_MOST_WORK = 10**9  # multiply-adds of the operations that each mistake recomputes: larger models need denser dumps
_MOST_IN_VAIN = 3 * 10**9  # the same of all tensors together that no mistake explains: a layer like them explains no more
_LITTLE_WORK = 3 * 10**7  # the same where the verdict is FLIPS, which may hide a small mistake
_HIDDEN_WORK = 2 * 10**10  # of all hidden mistakes that are tried on the first wrong tensor, and at most on all others together: seconds


def judge_trace(
    model: Model,
    trace: Trace,
    tokens: Sequence[int] | NDArray,
    dialect: Dialect = EXACT,
    precision: Precision | None = None,
    details: Details | None = None,
) -> Report:
    """Judge another engine's tensors for these tokens (one sequence), in the dialect and precision (see Options) that are declared."""
    runtime = Runtime(model, dialect).checked()
    options = Options(precision, details=details)
    return judge_operations(runtime, check_tokens(model.config, np.asarray(tokens)[None]), trace, options)


def judge_operations(
    runtime: Runtime,
    tokens: Tokens,
    trace: Trace,
    options: Options = DEFAULT,
    compared: "Compared | None" = None,
) -> Report:
    """judge_trace for a checked runtime and checked tokens of one sequence.

    compared: what `compare` made of the trace, if it is known.
    """
    model, dialect, ids = runtime.model, runtime.dialect, tokens.ids[0]
    if trace.tokens is not None and not np.array_equal(trace.tokens, ids):
        return Report(Verdict.INVALID, f"{trace.origin} was made with other token ids: {list(trace.tokens[:8])}, expected {list(ids[:8])}")
    scored = {key.layer for key in trace.points if key.name in SCORES and key.layer is not None}
    graph = list(operations(model, dialect, scores=scored))
    common = [o.key for o in graph if o.key in trace.points]
    if not common:
        names = ", ".join(map(str, list(trace.points)[:5])) or "nothing"
        return Report(Verdict.INVALID, f"{trace.origin} has no tensor of this model's forward pass; it has {names}")
    dump = compared or compare(runtime, tokens, trace)[0]
    missing = tuple(o.key for o in graph if o.key not in trace.points)
    invalid = tuple(OperationVerdict(key, Verdict.INVALID, dump.problems[key]) for key in common if dump.problems[key])
    types, progress = _Types.of(options.precision, dump.tensors, dump.same), options.bars("judging operations")
    seen = look_through(model, dump.first, dump.tensors)
    graph = list(operations(model, dialect, seen.start, scored)) if seen.start else graph
    judge = _Judge(model, dialect, graph, ids, replace(dump, tensors=seen.tensors), types, progress, options, seen.start)
    verdicts = []
    for i, operation in enumerate(judge.judged, 1):
        verdicts.append(judge.operation(operation))
        progress(i, len(judge.judged))
    notes = [*judge.types.notes(), *seen.notes, *[_untried(o) for o in verdicts if not o.tried][:1], *judge.search.notes()]
    first_wrong = next((o for o in verdicts if o.verdict == Verdict.WRONG), None)
    if invalid:
        first = invalid[0]
        reason = f"{first.place}: {first.reason}"
        if first_wrong is None:
            return Report(Verdict.INVALID, reason, invalid, first, missing)
        notes.append(f"{reason}; nothing from there on is judged")
    worst = max(o.verdict for o in verdicts)
    return Report(
        worst, _reason(verdicts, first_wrong), (*verdicts, *invalid), first_wrong, missing, tuple(notes), None, judge.types.judged_as
    )


def _reason(verdicts: Sequence[OperationVerdict], first_wrong: OperationVerdict | None) -> str:
    """The first wrong operation in words, and the tensors to record where several operations lie in between; or where none is wrong, the
    first operation that rounds to fewer bits, if one does."""
    if first_wrong is not None:
        across = first_wrong.across
        reason = f"WRONG at {first_wrong.place}: {first_wrong.hypothesis or first_wrong.reason}"
        if len(across) > 1:
            several = len({k.layer for k in across if k.layer is not None}) > 1
            names = "l_out of every layer" if several else ", ".join(k.name for k in across[:-1])
            reason += f"; {len(across)} operations lie between it and the tensors of the dump: to tell which is wrong, dump {names}"
        return reason
    narrow = [o for o in verdicts if o.verdict == Verdict.NARROW]
    if not narrow:
        return f"{len(verdicts)} tensors, each within the bound for its own inputs"
    first, more = narrow[0], f" (and {len(narrow) - 1} more)" if len(narrow) > 1 else ""
    others = len(verdicts) - len(narrow)
    return f"{first.place}{more}: {first.hypothesis}" + (f"; the other {others} tensors are within their bounds" if others else "")


@dataclass(frozen=True)
class _Types:
    """The type that each tensor is kept in: as declared, or as its numbers show."""

    precision: Precision
    read: dict[Key, str] | None  # those read off the dump; None: as declared
    act: str  # of tensors that are not in the dump

    @classmethod
    def of(cls, precision: Precision | None, tensors: Mapping[Key, NDArray], same: Collection[Key]) -> "_Types":
        if precision is not None:
            return cls(precision, None, precision.act)
        own = {EMBEDDING} & set(same)  # rows of a narrow table are narrow in every engine
        read = {k: storage_type(x) for k, x in tensors.items() if k not in own and not k.name.endswith(("_codes", "_scale", TOP_EXPERTS))}
        return cls(FLOAT32, read, narrowest(read.values()))

    def __getitem__(self, key: Key) -> str:
        if key == TOKENS:
            return "float32"
        if self.read is None:
            return self.act
        return self.read.get(key, "float32" if key == EMBEDDING else self.act)

    def storage(self, operation: Operation) -> Storage:
        return Storage(tuple(self[k] for k in operation.inputs), self[operation.key], self.precision)

    def with_cache(self, kind: str) -> "_Types":
        """The same types with keys and values of this type; attention's probabilities are as narrow in engines with float16 caches."""
        return replace(self, precision=replace(self.precision, kv=kind, probs="float16" if kind == "float16" else self.precision.probs))

    @property
    def strict(self) -> bool:
        """Whether no rounding is taken for intended that was not declared."""
        return self.read is None

    @property
    def judged_as(self) -> Precision | None:
        """The types that were declared, or read off the dump; None where all of these are float32."""
        if self.read is None:
            return self.precision
        precision = replace(self.precision, act=self.act)
        return None if precision == FLOAT32 else precision

    def notes(self) -> list[str]:
        """The precision that the dump is judged in, in words, where it is not float32."""
        if self.read is None:
            return [f"judged in the declared precision: {self.precision}"] if self.precision != FLOAT32 else []
        count = {kind: list(self.read.values()).count(kind) for kind in DIGITS}
        narrow = {kind: n for kind, n in count.items() if n and kind != "float32"}
        notes = [f"judged as {kind}, read off the dump: {n} of {len(self.read)} tensors" for kind, n in narrow.items()]
        if self.precision.kv != "float32":
            notes.append(f"a KV cache of {self.precision.kv} is assumed: the first attention shows it")
        return notes


@dataclass(frozen=True)
class Compared:
    """Another engine's tensors, compared with ours. Ours are not stored: a trace of a large model has gigabytes."""

    tensors: dict[Key, NDArray]  # [T, width] of those that are valid, as they are in the dump
    problems: dict[Key, str]  # why a tensor cannot be judged; empty where it is valid
    same: set[Key]  # those that have our bits
    sizes: dict[Key, int]  # of all our tensors
    first: dict[Key, NDArray]  # our queries and keys of the first layer

    def leave_out(self, key: Key) -> None:
        """Take a tensor for one that is not in the dump."""
        self.tensors.pop(key, None)
        self.problems.pop(key, None)
        self.same.discard(key)


def compare(runtime: Runtime, tokens: Tokens, trace: Trace) -> tuple[Compared, NDArray[np.float32]]:
    """The tensors of a trace beside ours, and our logits [1, T, V]."""
    c, points, dump = runtime.model.config, by_position(runtime.model.config, trace.points), Compared({}, {}, set(), {}, {})

    def look(key: Key, array: NDArray) -> None:
        ours = array.reshape(len(array), -1)
        dump.sizes[key] = ours.size
        if key.layer == 0 and key.name in (*QUERIES, *KEYS):
            dump.first[key] = ours.copy()
        if key not in points:
            return
        theirs = points[key]
        dump.problems[key] = invalid_tensor(theirs, ours) or (invalid_experts(theirs, c.experts) if key.name == TOP_EXPERTS else "")
        if not dump.problems[key]:
            dump.tensors[key] = theirs.reshape(ours.shape)
            if same_bits(dump.tensors[key], ours):
                dump.same.add(key)

    def record(name: str, layer: int | None, array: NDArray) -> None:
        look(Key(name, layer), array)
        if recorder is not None:
            recorder(name, layer, array)

    layers = {key.layer for key in points if key.name in SCORES and key.layer is not None and key.layer < c.n_layers}
    recorder = None
    if layers:
        recorder = Recorder(lambda key, x: look(key, rows_of(c, key, x)), c, layers=layers, names=SCORES, dialect=runtime.dialect)
    return dump, run_whole(runtime, tokens, record)


def _untried(verdict: OperationVerdict) -> str:
    """The tensors to record so that known mistakes can be tried, in words."""
    layers = sorted({k.layer for k in verdict.across if k.layer is not None})
    names = ",".join(dict.fromkeys(k.name for k in verdict.across if len(layers) < 2 or k.name == "l_out"))
    which = f" --layers {layers[0]}" if len(layers) == 1 else ""
    more = "; then all names of the first layer that is wrong" if len(layers) > 1 else ""
    return (
        f"{verdict.place}: known mistakes were not tried, {len(verdict.across)} operations of a model this large are too much work. "
        f"Record what lies between, as `bitnet-np trace{which} --names {names}` does{more}; or try them all the same, with --effort"
    )


@dataclass
class _Judge:
    """One engine's tensors, beside everything they are judged by."""

    model: Model
    dialect: Dialect
    graph: list[Operation]
    ids: NDArray[np.int64]
    dump: Compared
    types: _Types
    progress: Progress
    options: Options
    start: int = 0  # the position of the first token
    in_vain: int = 0  # multiply-adds of operations whose known mistakes were tried and explain nothing
    cache: Cause | None = None  # the KV cache that a tensor has shown, assumed from there on

    def __post_init__(self) -> None:
        self.theirs = _Theirs({TOKENS: self.ids, **self.dump.tensors})
        self.by_key = {o.key: o for o in self.graph}
        # what comes before a tensor that cannot be judged may be its cause, and what comes behind has it in it
        sound = takewhile(lambda o: not self.dump.problems.get(o.key), self.graph)
        self.judged = [o for o in sound if o.key in self.dump.tensors]
        self.search = Search(len(self.ids), 2 * self.options.effort * _HIDDEN_WORK)

    def operation(self, operation: Operation) -> OperationVerdict:
        """The verdict on one tensor of the dump."""
        key = operation.key
        across = self._across(operation)
        # equal outputs of other inputs would be a coincidence or a fake
        if {key, *(k for o in across for k in self.by_key[o].inputs if k in self.dump.tensors)} <= self.dump.same:
            return OperationVerdict(
                key, Verdict.SAME_BITS, across=across, max_error=0.0, bound_ratio=0.0, nmse=0.0, scale=1.0, cosine=1.0, ulps=0.0
            )
        return self._several(across, self.theirs[key]) if len(across) > 1 else self._one(operation, self.theirs[key])

    def _one(self, operation: Operation, theirs: Array) -> OperationVerdict:
        """An operation whose inputs are in the dump, with the cause of what is wrong."""
        judged, expected = self._by_bound(operation, theirs)
        if judged.verdict != Verdict.WRONG:
            return judged
        if self._is_flash_attention(operation, theirs):
            self.types = replace(self.types, precision=FLASH)
            return replace(judged.explained(FLASH_CAUSE), verdict=Verdict.NARROW)
        value = expected.value
        most_away, bound = bound_of(expected, value.shape)[:2]
        loose = dot(bound, bound) / max(dot(value, value), TINY)
        rough = 0.0 if self.types.storage(operation).is_wide else noise(expected)
        places = np.abs(theirs - value) > most_away
        case = self._case(judged.across, value, theirs, matched(rough), places)
        cause = self._explain(case, noise=loose)
        if cause is None:
            model, inputs = with_rope_of(self.model, operation.key.layer), [self.theirs[k] for k in operation.inputs]
            wrong = Wrong(model, self.dialect, operation.key, inputs, value, theirs, places, rough, self.theirs)
            later = None if wrong.is_nearly_right else overwritten(wrong.key, self.dump.tensors, list(self.by_key))
            plain = facts_of(wrong) if later is None else Cause(later, "read.overwritten")
            cause = plain or self._hidden(case) or self._in_part(case) or cause_of(wrong)
        if cause is None or cause.id in LOOSE:
            cause = self._nearly(case) or cause
        return self._caused(judged, cause)

    def _by_bound(self, operation: Operation, theirs: Array) -> tuple[OperationVerdict, Expected]:
        """The verdict on an operation whose inputs are in the dump, and what is expected of it."""
        expected = operation.expected(self.types.storage(operation), *(self.theirs[k] for k in operation.inputs))
        value = expected.value
        verdict, reason, ratio = within(expected, theirs)
        judged = statistics(operation.key, verdict, reason, (operation.key,), ratio, value, theirs)
        if self.options.details is not None:
            self.options.details.numbers(operation.key, value, theirs, lambda rows: bound_of(expected, value.shape, rows)[0])
        if verdict != Verdict.WRONG:
            judged = replace(judged, **self._from_float64(operation, value, theirs))
        return judged, expected

    def _is_flash_attention(self, operation: Operation, theirs: Array) -> bool:
        """Whether an output of attention that nobody declared is right but for the roundings of ggml's flash attention."""
        storage, layer = self.types.storage(operation), operation.key.layer
        if operation.key.name != "kqv_out" or layer is None or self.types.strict or not storage.is_wide:
            return False
        inputs = [self.theirs[k] for k in operation.inputs]
        return (
            is_summed_in_float16(self.model, layer, inputs, theirs)
            and within(operation.expected(storage._replace(precision=FLASH), *inputs), theirs)[0] != Verdict.WRONG
        )

    def _several(self, across: tuple[Key, ...], theirs: Array) -> OperationVerdict:
        """Several operations at once, the last of which gives a tensor of the dump, with the cause of what is wrong."""
        judged, value, most = self._by_reach(across, theirs)
        work = sum(self._cost(k) for k in across)
        if judged.verdict == Verdict.WRONG:
            if work > self.options.effort * _MOST_WORK or self.in_vain > self.options.effort * _MOST_IN_VAIN:
                return replace(judged, tried=False)
            places = np.broadcast_to(position_errors(value, theirs)[:, None] > max(most, ROUNDING_ACROSS), value.shape)
            case = self._case(across, value, theirs, most, places)
            cause = self._explain(case)
            if cause is None:
                self.in_vain += work
                cause = self._hidden(case) or self._in_part(case) or self._nearly(case)
            return self._caused(judged, cause)
        if judged.verdict == Verdict.FLIPS and work <= self.options.effort * _LITTLE_WORK:
            cause = self._explain(self._case(across, value, theirs, most, np.zeros(value.shape, bool)), least=most / 2)
            if cause is not None and cause.fault:
                return replace(judged.explained(cause), verdict=Verdict.WRONG)
        return judged

    def _by_reach(self, across: tuple[Key, ...], theirs: Array) -> tuple[OperationVerdict, Array, float]:
        """The verdict on several operations at once, what their result should be, and the NMSE that roundings leave."""
        key = across[-1]
        value = self._nearest_choice(across, self._values(across)[key], theirs)
        reach = self._reach(across, value) if position_errors(value, theirs).max() > ROUNDING_ACROSS else None
        verdict, reason, ratio = close(value, theirs, reach)
        if key == LOGITS and verdict == Verdict.FLIPS:  # single logits, factors and constants too
            logits = judge(value.astype(np.float32), theirs, reach)
            verdict, reason = max((verdict, reason), (logits.verdict, logits.reason))
        if self.options.details is not None:
            most_nmse = ROUNDING_ACROSS if verdict == Verdict.ROUNDING else limits(reach, len(value))[0]
            self.options.details.rows(key, value, theirs, most_nmse)
        return statistics(key, verdict, reason, across, ratio, value, theirs), value, 0.0 if reach is None else reach.nmse

    def _caused(self, judged: OperationVerdict, cause: Cause | None) -> OperationVerdict:
        """A wrong tensor with its cause: a rounding to fewer bits is no fault where nothing was declared, and assumed from there on."""
        explained = judged.explained(cause)
        if cause is None or cause.fault or self.types.strict:
            return explained
        if cause.kind in CACHES and cause.id in CACHE_ROUNDINGS:
            self.cache = cause
            self.types = self.types.with_cache(cause.kind)
        return replace(explained, verdict=Verdict.NARROW)

    def _reach(self, across: tuple[Key, ...], value: Array) -> Reach | None:
        """The reach of roundings in every tensor of `across`; None if their numbers leave float32's range on the way."""
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                narrow = position_errors(value, self._values(across, {k: self._rounded(k) for k in across})[across[-1]])
        except FloatingPointError:
            return None
        reach = Reach(max(FLOOR, float(narrow.mean())), narrow, one_scale=one_scale(self.model, self.dialect))
        other = self._other_choices(across, value, several=True)
        return reach if other is value else replace(reach, choices=position_errors(value, other))

    def _nearest_choice(self, across: tuple[Key, ...], value: Array, theirs: Array) -> Array:
        """The result of `across`; where its router leaves two experts open, with the one that is nearer to theirs.

        Behind one router, positions are apart. With several, the reach of other choices says how far they go.
        """
        other = self._other_choices(across, value, several=False)
        if other is value:
            return value
        nearer = position_errors(other, theirs) < position_errors(value, theirs)
        return np.where(nearer[:, None], other, value)

    def _other_choices(self, across: tuple[Key, ...], value: Array, several: bool) -> Array:
        """The result of `across` if its router, or its several, take the next best expert for the last one where roundings leave both open;
        `value` if it has no such router."""
        routers = [k for k in across if k.name == TOP_EXPERTS]
        if not routers or (len(routers) > 1) != several or not self.model.config.has_choice:
            return value

        def compute(key: Key, values: Mapping[Key, Array]) -> Array:
            (source,) = self.by_key[key].inputs
            logits = values[source]
            size = 16 * max(U, ROUNDOFF[self.types[source]]) * (1 + np.abs(logits).max(axis=1))
            return next_experts(logits, self.model.config.experts_used, size).astype(np.float64)

        return self._values(across, {key: partial(compute, key) for key in routers})[across[-1]]

    def _rounded(self, key: Key) -> Compute:
        """An operation that rounds its output to float16; with narrow types every step, by as much as they may at random."""
        operation = self.by_key[key]
        storage = self.types.storage(operation)

        def compute(values: Mapping[Key, Array]) -> Array:
            expected = operation.expected(storage, *(values[k] for k in operation.inputs))
            if key.name == TOP_EXPERTS:
                return expected.value
            if storage.is_wide:
                return to_eleven_bits(expected.value.astype(np.float32)).astype(np.float64)
            random = np.random.default_rng(list(str(key).encode())).uniform(-1, 1, expected.value.shape)
            return to_digits(expected.value + random * np.sqrt(expected.square), DIGITS[storage.output])

        return compute

    # --- who is closer to float64 ---

    def _from_float64(self, operation: Operation, value: Array, theirs: Array) -> dict[str, Any]:
        """RMS errors of our kernel and of theirs, both on their inputs, in u of the RMS of float64's result."""
        tensors = self.dump.tensors
        inputs = [tensors[k] if k in tensors else self.theirs[k] for k in operation.inputs]
        size = float(np.sqrt(dot(value, value) / value.size))
        shifted = self.start and operation.key.name in ROTATED  # our kernel has the tokens' own positions
        no_kernel = operation.key.name in SCORES
        if size == 0 or no_kernel or shifted or any(x.dtype not in (np.float32, np.float16, np.int64) for x in inputs):
            return {}  # inputs of more bits than ours can take would count against us
        ours = self._ours_on_theirs[operation.key].reshape(value.shape)
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
            run_whole(Runtime(self.model, self.dialect, edit=exchange), Tokens.whole(self.ids[None]), keep)
        return ours

    # --- what went wrong ---

    def _across(self, operation: Operation) -> tuple[Key, ...]:
        """The operations between what the dump has and this tensor, this one last."""
        needed = {operation.key}
        for other in reversed(self.graph):
            if other.key in needed:
                needed |= {k for k in other.inputs if k not in self.theirs}
        return tuple(o.key for o in self.graph if o.key in needed)

    def _values(
        self, across: tuple[Key, ...], changed: Mapping[Key, Compute] | None = None, right: Mapping[Key, Array] | None = None
    ) -> dict[Key, Array]:
        """Their tensors, and those of `across` computed from them, those of `changed` with a mistake.

        right: the result without changes, if it is known: operations before the first change need not run again. Raises
        FloatingPointError if a change gives no finite numbers.
        """
        first = next((i for i, k in enumerate(across) if changed and k in changed), 0) if right else 0
        later = across[first:]
        values = _Lazy({k: x for k, x in right.items() if k not in later} if right else {}, self, across)
        for key in later:
            operation = self.by_key[key]
            if changed and key in changed:
                values[key] = changed[key](_Lazy(values, self, across))
                if values[key].size != self.dump.sizes[key] or not np.isfinite(values[key]).all():
                    raise FloatingPointError(f"{key} is not finite, or of another size")
            elif self.cache is not None and key.name == "kqv_out":
                values[key] = as_rounded(operation, self.cache)(values)
            else:
                values[key] = self.value(operation, values)
        return values

    def value(self, operation: Operation, values: Mapping[Key, Array]) -> Array:
        """What an operation gives, without a bound, which takes twice as long."""
        if operation.tree is None or self.dialect != EXACT:
            return operation.evaluate(*(values[k] for k in operation.inputs)).value
        return value_of(operation.tree, values.__getitem__, len(values[operation.inputs[0]]))

    def _case(self, across: tuple[Key, ...], value: Array, theirs: Array, most: float, places: NDArray[np.bool_]) -> "_Case":
        """The search for the cause of a tensor that is wrong at these places. Of a large product some outputs are looked at first."""
        key = across[-1]
        is_product = len(across) == 1 and (key.name in FIELDS or key == LOGITS) and value.shape == theirs.shape
        screen = Screen.of(prod(matrix_of(self.model, key).shape), value, theirs) if is_product else None
        parts = InParts(key, self.model.config, places, value, theirs, most)
        return _Case(across, [self.by_key[k] for k in across], value, theirs, most, self._values(across), screen, parts)

    def _made(self, case: "_Case", computes: Mapping[Key, Compute]) -> Array | None:
        """The tensor with some operations computed otherwise; None if it is refused at some outputs, or gives no numbers of this shape."""
        if case.screen is not None and case.screen.refuses(computes[case.last], case.right):
            return None
        with suppress(FloatingPointError):
            array = self._values(case.across, computes, case.right)[case.last]
            return array if array.shape == case.value.shape else None
        return None

    def _explain(self, case: "_Case", least: float = 0.0, noise: float = 0.0) -> Cause | None:
        """The mistake that comes closest, if the NMSE it leaves is no more than roundings leave, and a tenth of that without it.

        least: NMSE by which it must change the right numbers. One that changes less may flip the very codes that roundings flip.
        noise: NMSE of roundings alone. A known mistake that leaves no more is not given up for a fitted factor, which takes away roundings
        too.
        """
        best = min(case.most, case.now / 10)  # a mistake that explains little explains nothing
        cause: Cause | None = None
        fits: list[tuple[float, Cause]] = []
        every = list(trials(case.span, single=least == 0))

        def candidates() -> Iterator[tuple[Cause, Array | None, Mapping[Key, Compute] | None]]:
            for done, trial in enumerate(every, 1):
                self.progress(done, len(every))
                yield trial.cause, self._made(case, trial.computes), trial.computes
            if cause is None or 4 * best > noise:
                yield from ((candidate, array, None) for candidate, array in fitted(case.theirs, case.value))

        with np.errstate(all="ignore"):
            for candidate, array, computes in candidates():
                if array is None or (candidate.fault and relative_error(array, case.value) < least):
                    continue
                left = case.compared(candidate, array, computes)
                coarse = candidate.kind in ("q8_0", "q4_0") and left < case.now / 20  # the numbers fall to other sides of its steps
                if left <= case.most and len(case.across) > 1:
                    fits.append((left, candidate))
                if left < best or (coarse and cause is None):
                    best, cause = left / 4, candidate  # of two that fit alike, the first one tried stands
        return None if cause is None else with_alike(cause, 4 * best, fits)

    def _hidden(self, case: "_Case") -> Cause | None:
        """The hidden mistake that explains a wrong tensor, if one does; in a part only one with a number, as the others were compared."""
        screen, now = case.screen, case.now

        def near(trial: Trial) -> float:
            left = None if screen is None else screen.left(trial.computes[case.last], case.right)
            return explain(trial).left if left is None else left * now

        def explain(trial: Trial) -> Explanation:
            array = self._made(case, trial.computes)
            left = np.inf if array is None else case.compared(trial.cause, array, trial.computes if trial.number is None else None)
            return Explanation(left, left <= min(case.most, now / 10))

        def cost(changed: Collection[Key]) -> float:
            if screen is not None:
                return len(screen.columns) * self._cost(case.last) / case.value.shape[1] + OVERHEAD
            first = next(i for i, k in enumerate(case.across) if k in changed)
            return sum(self._cost(k) + OVERHEAD for k in case.across[first:])

        with np.errstate(all="ignore"):
            return self.search.cause(case.span, True, explain, near, cost, now, numbered=case.part is not None)

    def _in_part(self, case: "_Case") -> Cause | None:
        """The mistake that explains all wrong numbers of a tensor whose others are right."""
        if (known := case.parts.known()) is not None:
            return known
        found = ((part, self._hidden(replace(case, part=part, screen=None))) for part in case.parts.parts)
        return next((part.named(cause) for part, cause in found if cause is not None), None)

    def _nearly(self, case: "_Case") -> Cause | None:
        """The mistake that leaves next to nothing of an error, but more than roundings do, with the rounding that explains the rest."""

        def left(computes: Mapping[Key, Compute]) -> float:
            array = self._made(case, computes)
            return np.inf if array is None else relative_error(array, case.theirs)

        with np.errstate(all="ignore"):
            cause = case.nearest.of(case.now, case.most, left, narrowed(case.span, case.nearest.computes))
            if cause is None:
                cause, words = in_types(cached_and_rounded(case.span), left, min(case.most, case.now / 10))
                self.search.types.update(words)
            return cause

    def _cost(self, key: Key) -> int:
        return self.dump.sizes[key] * (self.model.config.width if key.layer is not None else self.model.config.vocab)


@dataclass
class _Case:
    """A wrong tensor, and what the search for its cause keeps of it."""

    across: tuple[Key, ...]  # the operations that are judged together; the tensor's own is the last
    span: list[Operation]  # the same
    value: Array  # what it should be, [T, width]
    theirs: Array
    most: float  # NMSE that roundings leave
    right: Mapping[Key, Array]  # what the operations give without a mistake
    screen: Screen | None
    parts: InParts
    nearest: Nearest = field(default_factory=Nearest)
    part: Part | None = None  # that alone is to be explained

    @property
    def last(self) -> Key:
        return self.across[-1]

    @cached_property
    def now(self) -> float:
        """NMSE without a mistake."""
        return self.left(self.value)

    def left(self, array: Array) -> float:
        """NMSE of an array in the tensor's place."""
        if self.part is None:
            return relative_error(array, self.theirs)
        return relative_error(self.part.cut(array), self.part.cut(self.theirs))

    def compared(self, cause: Cause, array: Array, computes: Mapping[Key, Compute] | None) -> float:
        """What a mistake leaves of the error. computes: the operations that make it, None if it has a number or is fitted."""
        left = self.left(array)
        if computes is not None:
            self.nearest.offer(left, cause, computes)
            self.parts.compare(cause, array)
        return left


class _Theirs(dict[Key, NDArray]):
    """Their tensors, and the tokens. They are read in float64: one at a time, as all together are twice the dump."""

    def __getitem__(self, key: Key) -> Array:
        x = super().__getitem__(key)
        return x if key == TOKENS else x.astype(np.float64)


class _Lazy(dict):
    """Tensors known so far, and theirs except those of `across`, when they are asked for.

    A mistake may ask for one that is neither in the dump nor on the way: it is computed then.
    """

    def __init__(self, values: Mapping[Key, Array], judge: _Judge, across: Collection[Key]):
        super().__init__(values)
        self._judge, self._across = judge, across

    def __missing__(self, key: Key) -> Array:
        if key in self._judge.theirs and key not in self._across:
            self[key] = self._judge.theirs[key]
        else:
            self[key] = self._judge.value(self._judge.by_key[key], self)
        return self[key]
