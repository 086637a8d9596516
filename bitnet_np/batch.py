"""Batches: many prompts over few slots of a KV cache, every sequence as if it were alone.

`Batch` is a scheduler. Each step admits waiting requests to free slots, runs one forward pass for all that are in progress (whole prompts
of the new ones, one token of the others, end to end in rows) and retires what has ended. Its random numbers are each sequence's own. So
tokens and logits do not depend on how many slots there are, on the order of the requests, or on what else is being generated.
"""

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .backend import Backend
from .cache import KVCache, new_cache
from .certified import CertifiedHead
from .dialects import EXACT, Dialect
from .errors import CapacityError, NonFiniteError, OptionError, ShapeError, shown
from .forward_pass import forward, forward_full, run_prefill
from .generate import certified_for, check_prompt
from .kernels import cpu
from .model import Model
from .network import Runtime
from .sampling import GREEDY, Sampling, choose, uniforms
from .tokens import Tokens, pad
from .validate import instance, integer, integers

Observe = Callable[["Request", NDArray[np.float32]], None]


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

    With a cache the sequences go on from what their slots hold (as in `forward`). start: the positions at which they go on, one for all or
    one for each. It changes nothing; it is refused where it is not what the cache says.

    Raises EmptyInputError for no sequences or an empty one, OptionError for a wrong start, and what `forward` raises.
    """
    tokens, lengths = pad(sequences)
    chosen = np.arange(len(lengths)) if slots is None else integers("slots", slots, 1)
    if start is not None and chosen.shape == lengths.shape:  # another shape is an error that `forward` knows
        held = np.zeros_like(lengths) if cache is None else cache.reserve(chosen, lengths)
        given = integers("start", np.atleast_1d(start), 1)
        if given.shape not in ((1,), held.shape):
            raise ShapeError(f"start has shape {given.shape}, expected one position, or {len(held)}: one for each sequence")
        for i in np.flatnonzero(given != held)[:1]:
            wanted = np.broadcast_to(given, held.shape)[i]
            raise OptionError(f"start of sequence {i} is {wanted}, but {held[i]} positions of it are there")
    if cache is None:
        logits = forward_full(model, tokens, lengths, dialect=dialect, ops=ops)
    else:
        logits = forward(model, tokens, cache, lengths, slots=chosen, dialect=dialect, ops=ops)
    return [rows[:length] for rows, length in zip(logits, lengths, strict=True)]


@dataclass(frozen=True)
class Request:
    """A prompt to continue by up to `n` tokens, ending before a token of `stop`. `id` names it, and with `seed` says its random numbers.

    Raises OptionError for an id that is no string or integer; what else cannot be, `Batch.submit` says.
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
    """What became of a request."""

    request: Request
    tokens: list[int]  # the new ones
    error: str | None = None  # why it ended early: its numbers left float32's range
    first: float | None = field(default=None, compare=False)  # seconds from admission to the first token
    seconds: float = field(default=0.0, compare=False)  # from admission to the end


@dataclass
class _Sequence:
    """A request on its way."""

    request: Request
    numbers: Iterator[float]
    pending: Sequence[int]  # tokens that are not in the cache yet
    n: int
    stop: frozenset[int]
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    admitted: float = 0.0
    first: float | None = None

    @classmethod
    def of(cls, model: Model, request: Request, head: CertifiedHead | None) -> "_Sequence":
        """A request that can be continued. Raises what `Batch.submit` does, but of ids and slots."""
        prompt = check_prompt(model, instance("request", request, Request).prompt, request.n, request.stop)
        certified_for(model, request.sampling, prompt.n, head or "exact")
        return cls(request, request.numbers(), prompt.tokens.ids[0].tolist(), prompt.n, prompt.stop)

    def positions(self) -> int:
        """How many positions of a slot it needs, from its beginning on."""
        return len(self.pending) + max(self.n - 1, 0)


def _ignore(request: Request, logits: NDArray[np.float32]) -> None:
    pass


class Batch:
    """A scheduler of `slots` sequences at a time, of up to `capacity` positions each (default: the model's context).

    `submit` requests at any time, call `step` until `done`. `observe(request, logits)` is called with the logits [V] that each token is
    chosen from. head: makes them instead of the model's output table (certified.py). dtype: of the KV cache; float16 changes logits, but
    still not with the company. A batch that `step` has left with an exception is of no further use.

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
        head: CertifiedHead | None = None,
    ):
        self._runtime = Runtime(model, dialect, ops).checked()
        self.observe, self.head = observe, head
        self.cache = new_cache(model.config, slots, capacity, ops, dtype)
        self._free = list(range(self.cache.batch))
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._ids: set[str | int] = set()
        self._whole = True  # no step was left in its middle

    @property
    def done(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and not self._running

    def submit(self, request: Request) -> None:
        """Let a request wait for a slot.

        Raises what `stream` raises for a prompt, n, seed or stop tokens that cannot be, or sampling that needs more logits than the head
        gives; OptionError for an id that is in use, CapacityError if prompt and n tokens do not fit a slot.
        """
        self._wait(_Sequence.of(self._runtime.model, request, self.head))

    def _wait(self, sequence: _Sequence) -> None:
        if sequence.request.id in self._ids:
            raise OptionError(f"the id {sequence.request.id!r} is in use, expected another one for each sequence")
        if sequence.positions() > self.cache.capacity:
            wanted = f"a prompt of {len(sequence.pending)} and {sequence.n} new tokens"
            raise CapacityError(f"{wanted} exceed the {self.cache.capacity} positions of a slot")
        self._waiting.append(sequence)
        self._ids.add(sequence.request.id)

    def step(self) -> list[Completion]:
        """Admit, run one forward pass, choose a token for each sequence, retire. Returns what has ended.

        Raises what `observe` raises, and OptionError from then on.
        """
        if not self._whole:
            raise OptionError("this batch was left with an exception, expected a new one")
        self._whole = False
        while self._free and self._waiting:
            sequence = self._waiting.popleft()
            sequence.slot, sequence.admitted = self._free.pop(0), time.perf_counter()
            self._running.append(sequence)
        ended = []
        for sequence, logits in zip(self._running, self._forward(self._running), strict=True):
            completion = self._advance(sequence, logits)
            if completion is not None:
                ended.append((sequence, completion))
        for sequence, _ in ended:
            self._running.remove(sequence)
            self._ids.remove(sequence.request.id)
            self._free.append(sequence.slot)
            self.cache.clear(sequence.slot)
        self._whole = True
        return [completion for _, completion in ended]

    def _forward(self, sequences: list[_Sequence]) -> list[NDArray[np.float32] | NonFiniteError]:
        """The logits [V] of each; one that leaves float32's range takes no other with it."""
        if not sequences:
            return []
        tokens = Tokens(*pad([sequence.pending for sequence in sequences]))
        slots = np.array([sequence.slot for sequence in sequences])
        try:
            logits = run_prefill(self._runtime, tokens, self.cache, slots, head=self.head)
        except NonFiniteError as error:
            if len(sequences) == 1:
                return [error]
            return [result for sequence in sequences for result in self._forward([sequence])]
        return list(logits)

    def _advance(self, sequence: _Sequence, logits: NDArray[np.float32] | NonFiniteError) -> Completion | None:
        """Choose the next token. Returns the completion when the sequence ends here."""
        request, tokens = sequence.request, sequence.tokens
        if isinstance(logits, NonFiniteError):
            return self._completion(sequence, str(logits))
        if sequence.n == 0:
            return self._completion(sequence)
        self.observe(request, logits)
        token = choose(logits, request.sampling, 0.0 if request.sampling.greedy else next(sequence.numbers))
        if token in sequence.stop:
            return self._completion(sequence)
        sequence.first = sequence.first or time.perf_counter()
        tokens.append(token)
        sequence.pending = [token]
        return self._completion(sequence) if len(tokens) == sequence.n else None

    def _completion(self, sequence: _Sequence, error: str | None = None) -> Completion:
        first = None if sequence.first is None else sequence.first - sequence.admitted
        return Completion(sequence.request, sequence.tokens, error, first, time.perf_counter() - sequence.admitted)


def generate_batch(
    model: Model,
    requests: Sequence[Request],
    slots: int,
    *,
    dtype: DTypeLike = np.float32,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
    observe: Observe = _ignore,
    head: CertifiedHead | None = None,
) -> Iterator[Completion]:
    """Completions of requests in the order given, `slots` at a time; each as soon as it and all before it are there.

    Raises, on the call itself, what `Batch.submit` raises, and OptionError for less than one slot.
    """
    Runtime(model, dialect, ops).checked()
    sequences = [_Sequence.of(model, request, head) for request in requests]
    needed = max((sequence.positions() for sequence in sequences), default=1)
    used = min(integer("slots", slots, 1), max(len(sequences), 1))
    batch = Batch(model, used, needed, dtype=dtype, dialect=dialect, ops=ops, observe=observe, head=head)
    for sequence in sequences:
        batch._wait(sequence)
    names = [sequence.request.id for sequence in sequences]

    def run() -> Iterator[Completion]:
        finished: dict[str | int, Completion] = {}
        for name in names:
            while name not in finished:
                finished |= {completion.request.id: completion for completion in batch.step()}
            yield finished.pop(name)

    return run()
