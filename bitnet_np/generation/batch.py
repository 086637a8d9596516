"""Batches: many prompts over few slots of a KV cache, every sequence as if it were alone.

`Batch` does continuous batching. Each step admits waiting requests to free slots, runs one forward pass for all requests in progress (whole
prompts of the new ones, one token of the others, end to end in rows) and retires what has ended. Each sequence has separate random numbers.
Tokens and logits therefore do not depend on the number of slots, the order of the requests, or what else is being generated.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..base.errors import (
    CapacityError,
    ContextLimitError,
    EmptyInputError,
    NonFiniteError,
    OptionError,
    ShapeError,
    TokenRangeError,
    shown,
)
from ..base.validate import array_of, function, instance, integer, integers, items_of
from ..engine.backend import Backend
from ..engine.cache import KVCache, new_cache
from ..engine.dialects import EXACT, Dialect
from ..engine.forward_pass import forward, forward_full, run_prefill
from ..engine.network import Runtime
from ..engine.tokens import Tokens, check_tokens, pad, refuse_text
from ..kernels import cpu
from ..kernels.float_state import steady
from ..model.records import Model
from .sampling import GREEDY, Sampling, choose, uniforms

Observe = Callable[["Request", NDArray[np.float32]], None]
_Result = NDArray[np.float32] | NonFiniteError
"""Of a sequence's pass: logits [V], or the error where one is not finite."""


@steady
def forward_batch(
    model: Model,
    sequences: Sequence[Sequence[int]],
    cache: KVCache | None = None,
    *,
    slots: Sequence[int] | None = None,
    start: ArrayLike | None = None,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
) -> list[NDArray[np.float32]]:
    """Logits [T, V] of each of several sequences of any lengths, in one pass: the same bits that each gives alone.

    With a cache the sequences continue from what their slots hold (as in `forward`). start: the positions at which they continue, one for
    all or one for each. It changes nothing, and is refused where the slots hold another number of positions.

    Raises EmptyInputError for no sequences or an empty one, OptionError for a wrong start, and what `forward` raises.
    """
    tokens, lengths = pad(sequences)
    if cache is not None:
        instance("cache", cache, KVCache)
    chosen = np.arange(len(lengths)) if slots is None else integers("slots", slots, 1)
    if start is not None and chosen.shape == lengths.shape:  # `forward` refuses any other shape
        positions = np.zeros_like(lengths) if cache is None else cache.reserve(chosen, lengths)
        starts = integers("start", np.atleast_1d(array_of("start", start)), 1)
        if starts.shape not in ((1,), positions.shape):
            raise ShapeError(f"start has shape {starts.shape}, expected one position, or {len(positions)}: one for each sequence")
        if (wrong := starts != positions).any():
            i = wrong.argmax()
            stated = np.broadcast_to(starts, positions.shape)[i]
            raise OptionError(f"start of sequence {i} is {stated}, expected {positions[i]}: the positions its slot holds")
    if cache is None:
        logits = forward_full(model, tokens, lengths, dialect=dialect, ops=ops)
    else:
        logits = forward(model, tokens, cache, lengths, slots=chosen, dialect=dialect, ops=ops)
    return [rows[:length] for rows, length in zip(logits, lengths, strict=True)]


@dataclass(frozen=True)
class Request:
    """A prompt to continue by up to `n` tokens, ending before a token of `stop`. `id` and `seed` determine its random numbers.

    Raises OptionError for an id that is no string or integer; `Batch.submit` checks the rest.
    """

    id: str | int
    prompt: Sequence[int]
    n: int
    sampling: Sampling = GREEDY
    seed: int = 0
    stop: Collection[int] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.id, str | int) or isinstance(self.id, bool):
            raise OptionError(f"id is {shown(self.id)}, expected a string or an integer")

    def numbers(self) -> Iterator[float]:
        """The uniform numbers it samples with: `stream(..., numbers=request.numbers())` gives the same tokens, alone."""
        digest = hashlib.sha256(json.dumps(self.id).encode()).digest()
        return uniforms(self.seed, int.from_bytes(digest[:8], "little"))


@dataclass(frozen=True)
class Completion:
    """The result of a request."""

    request: Request
    tokens: list[int]  # the new ones
    error: str | None = None  # why it ended early: its numbers left float32's range


@dataclass(eq=False)
class Continuation:
    """A request in progress, checked."""

    request: Request
    numbers: Iterator[float]
    pending: Sequence[int]  # tokens that are not in the cache yet
    n: int
    stop: frozenset[int]
    slot: int = -1
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, model: Model, request: Request, numbers: Iterator[float] | None = None) -> "Continuation":
        """A request, checked; numbers: random numbers to sample with, in place of those from its seed.

        Raises what `Batch.submit` does, except for ids and slots.
        """
        refuse_text("prompt", instance("request", request, Request).prompt)
        ids = integers("prompt", request.prompt, 1, TokenRangeError)
        if ids.size == 0:
            raise EmptyInputError("Prompt cannot be empty")
        n, context = integer("number of tokens to generate", request.n, 0), model.config.context
        check_tokens(model.config, ids[None])
        if ids.size + n > context:
            raise ContextLimitError(f"a prompt of {ids.size} and {n} new tokens exceed the model's context of {context}")
        if not isinstance(request.stop, Collection):  # an iterator would be used up here, and stop nothing
            raise OptionError(f"stop is {shown(request.stop)}, expected a collection of token ids")
        stop = frozenset(integer("stop token", token, 0, model.config.vocab - 1) for token in items_of("stop", request.stop))
        instance("sampling", request.sampling, Sampling)
        return cls(request, request.numbers() if numbers is None else numbers, ids.tolist(), n, stop)

    def positions(self) -> int:
        """Number of positions that it needs in a slot, the prompt's included."""
        return len(self.pending) + max(self.n - 1, 0)


def _ignore(request: Request, logits: NDArray[np.float32]) -> None:
    pass


class Batch:
    """Generates `slots` sequences at a time, of up to `capacity` positions each (default: the model's context).

    `submit` requests at any time, call `step` until `done`. `observe(request, logits)` is called with the logits [V] that each token is
    chosen from. dtype: of the KV cache; float16 changes logits, but never with the other sequences. After an exception in `step` a batch is
    of no further use.

    Raises what KVCache does for slots, capacity and dtype.
    """

    def __init__(
        self,
        model: Model,
        slots: int,
        capacity: int | None = None,
        *,
        dtype: DTypeLike = np.float32,
        dialect: Dialect = EXACT,
        ops: Backend = cpu,
        observe: Observe = _ignore,
    ):
        self._runtime = Runtime(model, dialect, ops).checked()
        self.observe = function("observe", observe)
        self.cache = new_cache(model.config, slots, capacity, ops, dtype)
        self._free = list(range(self.cache.batch))
        self._waiting: deque[Continuation] = deque()
        self._running: list[Continuation] = []
        self._ids: set[str | int] = set()
        self._intact = True  # no step was interrupted by an exception

    @property
    def done(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and not self._running

    @steady
    def submit(self, request: Request) -> None:
        """Queue a request for a slot.

        Raises what `stream` raises for an invalid prompt, n, sampling, seed or stop tokens, OptionError for an id that is in use,
        CapacityError if prompt and n tokens do not fit a slot.
        """
        self.queue(Continuation.of(self._runtime.model, request))

    def queue(self, sequence: Continuation) -> None:
        """`submit` for a checked request."""
        if sequence.request.id in self._ids:
            raise OptionError(f"the id {sequence.request.id!r} is in use, expected another one for each sequence")
        if sequence.positions() > self.cache.capacity:
            size = f"a prompt of {len(sequence.pending)} and {sequence.n} new tokens"
            raise CapacityError(f"{size} exceed the {self.cache.capacity} positions of a slot")
        self._waiting.append(sequence)
        self._ids.add(sequence.request.id)

    @steady
    def step(self) -> list[Completion]:
        """Admit requests, run one forward pass, choose a token for each sequence, retire. Returns the completions of this step.

        Raises what `observe` raises, and OptionError from then on.
        """
        if not self._intact:
            raise OptionError("an exception interrupted this batch, expected a new one")
        self._intact = False
        while self._free and self._waiting:
            sequence = self._waiting.popleft()
            sequence.slot = self._free.pop(0)
            self._running.append(sequence)
        completions = []
        for sequence, result in zip(tuple(self._running), self._forward(self._running), strict=True):
            completion = self._advance(sequence, result)
            if completion is not None:
                completions.append(completion)
                self._retire(sequence)
        self._intact = True
        return completions

    def _retire(self, sequence: Continuation) -> None:
        """Free the slot of a request that has ended."""
        self._running.remove(sequence)
        self._ids.remove(sequence.request.id)
        self._free.append(sequence.slot)
        self.cache.clear(sequence.slot)

    def _forward(self, sequences: Sequence[Continuation]) -> list[_Result]:
        """The logits of each sequence's next token, or the error of one: the others do not suffer from it."""
        if not sequences:
            return []
        tokens = Tokens(*pad([sequence.pending for sequence in sequences]))
        try:
            return list(run_prefill(self._runtime, tokens, self.cache, np.array([sequence.slot for sequence in sequences])))
        except NonFiniteError as error:
            return [error] if len(sequences) == 1 else [self._forward([sequence])[0] for sequence in sequences]

    def _advance(self, sequence: Continuation, result: _Result) -> Completion | None:
        """Choose the next token. Returns the completion when the sequence ends here."""
        request = sequence.request
        if isinstance(result, NonFiniteError):
            return Completion(request, sequence.tokens, str(result))
        if sequence.n == 0:
            return Completion(request, sequence.tokens)
        self.observe(request, result)
        token = choose(result, request.sampling, 0.0 if request.sampling.greedy else next(sequence.numbers))
        if token in sequence.stop:
            return Completion(request, sequence.tokens)
        sequence.tokens.append(token)
        sequence.pending = [token]
        return Completion(request, sequence.tokens) if len(sequence.tokens) == sequence.n else None


def generate_batch(
    model: Model,
    requests: Sequence[Request],
    slots: int,
    *,
    dtype: DTypeLike = np.float32,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
    observe: Observe = _ignore,
) -> Iterator[Completion]:
    """Completions of requests in the order given, `slots` at a time; each as soon as it and all before it are complete.

    Raises, on the call itself, what `Batch.submit` raises, and OptionError for less than one slot.
    """
    Runtime(model, dialect, ops).checked()
    sequences = [Continuation.of(model, request) for request in items_of("requests", requests)]
    needed = max((sequence.positions() for sequence in sequences), default=1)
    used = min(integer("slots", slots, 1), max(len(sequences), 1))
    batch = Batch(model, used, needed, dtype=dtype, dialect=dialect, ops=ops, observe=observe)
    for sequence in sequences:
        batch.queue(sequence)
    names = [sequence.request.id for sequence in sequences]

    def run() -> Iterator[Completion]:
        finished: dict[str | int, Completion] = {}
        for name in names:
            while name not in finished:
                finished |= {completion.request.id: completion for completion in batch.step()}
            yield finished.pop(name)

    return run()
