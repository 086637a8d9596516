"""Generation: prefill, then one token at a time, chosen by rules that leave nothing to chance but the numbers they are given."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from types import ModuleType
from typing import Literal, get_args

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from .certified import LARGEST_K, WIDEST, CertifiedHead, certify
from .errors import ContextLimitError, EmptyInputError, NonFiniteError, OptionError, ShapeError, TokenRangeError, shown
from .gpu.decoder import stepper
from .gpu.device import new_cache
from .kernels import cpu
from .model import Model
from .transformer import EXACT, Dialect, check_place, check_tokens, prefill
from .validate import instance, integer, integers, number

_COLDEST, _HOTTEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from its logits.

    Greedy when `temperature` is 0 or `top_k` is 1. Otherwise the logits are divided by the temperature, all but the `top_k`
    largest are dropped (0 keeps all), then all but the fewest that hold `top_p` of the probability, and one is drawn.

    Raises OptionError for a temperature that is neither 0 nor a normal number of float32, a negative top_k, or a top_p outside (0, 1].
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if number("temperature", self.temperature) != 0 and not _COLDEST <= self.temperature <= _HOTTEST:
            raise OptionError(f"temperature is {self.temperature}, expected 0 or a number of float32 from {_COLDEST} to {_HOTTEST}")
        integer("top_k", self.top_k, 0)  # 0 keeps every token
        if not 0 < number("top_p", self.top_p) <= 1:
            raise OptionError(f"top_p is {self.top_p}, expected more than 0 and at most 1")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is all that counts."""
        return self.temperature == 0 or self.top_k == 1


GREEDY = Sampling()


def uniforms(seed: int, sequence: int = 0) -> Iterator[float]:
    """An endless stream of numbers in [0, 1): the upper 53 bits of each output of Philox4x64 with the key (seed, sequence).

    Streams of other seeds or sequences are independent of it, so sequences that run together do not share numbers. Raises OptionError for
    a seed or sequence outside 0..2**64 - 1.
    """
    seed, sequence = integer("seed", seed, 0, 2**64 - 1), integer("sequence", sequence, 0, 2**64 - 1)
    bits = Philox(key=seed | sequence << 64)
    return ((int(bits.random_raw()) >> 11) * 2.0**-53 for _ in count())


def choose(logits: NDArray[np.float32], sampling: Sampling = GREEDY, uniform: float = 0.0) -> int:
    """The next token: logits [V] -> id.

    Greedy takes the largest logit, the lowest id among equals. Otherwise tokens are ordered by falling logit, equals by
    rising id, and the first one is taken whose cumulative probability exceeds `uniform` (in [0, 1)).

    -infinity excludes a token. Raises NonFiniteError for NaN or +infinity, or if nothing but -infinity is left, ShapeError for logits that
    are not [V], OptionError for a uniform number outside [0, 1) that would be used.
    """
    if logits.ndim != 1 or logits.size == 0:
        raise ShapeError(f"logits have shape {logits.shape}, expected [V]")
    best = int(logits.argmax())  # the first of equals; NaN counts as largest
    if not np.isfinite(logits[best]):
        raise NonFiniteError(f"the logit of token {best} is {logits[best]}, nothing can be chosen")
    if sampling.greedy:
        return best
    if not 0 <= uniform < 1:
        raise OptionError(f"uniform number is {uniform}, expected at least 0 and less than 1")
    candidates = np.arange(logits.size)
    if 0 < sampling.top_k < logits.size:
        kth = np.partition(logits, -sampling.top_k)[-sampling.top_k]
        candidates = np.flatnonzero(logits >= kth)
    order = candidates[np.argsort(-logits[candidates], kind="stable")][: sampling.top_k or None]
    with np.errstate(over="ignore"):  # of logits far below the largest, which count nothing
        weights = cpu.exponential((logits[order] - logits[best]) / np.float32(sampling.temperature))
    total = np.cumsum(weights, dtype=np.float64)
    kept = int(np.searchsorted(total, sampling.top_p * total[-1])) + 1  # at most all: the last total is found
    pick = int(np.searchsorted(total[:kept], uniform * total[kept - 1], side="right"))
    return int(order[min(pick, kept - 1)])  # the product may round to the total itself


def check_prompt(model: Model, prompt: Sequence[int], n: int, stop: Collection[int]) -> tuple[list[int], int, frozenset[int]]:
    """A prompt, how many tokens are to continue it, and which end it, as plain integers. Raises what `stream` raises on the call itself."""
    ids = integers("prompt", prompt, 1, TokenRangeError)
    if ids.size == 0:
        raise EmptyInputError("Prompt cannot be empty")
    n = integer("number of tokens to generate", n, 0)
    check_tokens(model.config, ids[None])
    if ids.size + n > model.config.context:
        raise ContextLimitError(f"a prompt of {ids.size} and {n} new tokens exceed the model's context of {model.config.context}")
    return ids.tolist(), n, frozenset(_stops(model, stop))


def _stops(model: Model, stop: Collection[int]) -> Iterator[int]:
    if not isinstance(stop, Collection):  # an iterator would be used up here, and stop nothing
        raise OptionError(f"stop is {shown(stop)}, expected a collection of token ids")
    for given in stop:
        token = integer("stop token", given, -(2**63))
        if not 0 <= token < model.config.vocab:
            raise OptionError(f"stop token {token} is not an id of the vocabulary, 0..{model.config.vocab - 1}")
        yield token


HeadChoice = Literal["auto", "exact", "certified"]

_PAYS_FROM = 1 << 24, 48  # weights of the head, and tokens: making the copy takes as long as some 30 tokens save


def certified_for(model: Model, sampling: Sampling, n: int, head: CertifiedHead | HeadChoice = "auto") -> CertifiedHead | None:
    """The head that gives the logits `sampling` needs for `n` tokens; None if all of them are to be computed.

    Raises OptionError for "certified" or a head where it cannot be used: if more logits are needed than it gives, or the output has a bias
    or is no float table.
    """
    table, k = model.head, 1 if instance("sampling", sampling, Sampling).greedy else sampling.top_k
    if not isinstance(head, CertifiedHead) and not (isinstance(head, str) and head in get_args(HeadChoice)):
        raise OptionError(f"head is {shown(head)}, expected a CertifiedHead or one of {', '.join(get_args(HeadChoice))}")
    if head == "exact" or (head == "auto" and (table.shape[0] * table.shape[1] < _PAYS_FROM[0] or n < _PAYS_FROM[1])):
        return None
    if not 1 <= k <= LARGEST_K:
        why_not = f"sampling needs {k or 'all'} logits, not just the {LARGEST_K} largest"
    elif model.output_bias is not None or not isinstance(table, np.ndarray):
        why_not = "the model's output is no plain float table"
    elif table.shape[1] > WIDEST:
        why_not = f"the output has rows of {table.shape[1]} numbers, more than {WIDEST}"
    elif not isinstance(head, CertifiedHead):
        return certify(table, min(k, len(table)))
    elif head.table is not table:
        why_not = "the head given is another model's"
    elif head.k < min(k, len(table)):
        why_not = f"sampling needs the {k} largest logits, the head gives {head.k}"
    else:
        return head
    if head == "auto":
        return None
    raise OptionError(f"no certified head: {why_not}")


def stream(
    model: Model,
    prompt: Sequence[int],
    n: int,
    *,
    sampling: Sampling = GREEDY,
    numbers: Iterable[float] | None = None,
    seed: int = 0,
    stop: Collection[int] = (),
    dialect: Dialect = EXACT,
    ops: ModuleType = cpu,
    head: CertifiedHead | HeadChoice = "auto",
) -> Iterator[int]:
    """Yield up to `n` new tokens, each as soon as it is chosen; end before a token of `stop`.

    `numbers` are the uniform numbers to sample with, one for each token, for replaying; without them they come from `seed`.
    One forward pass for each block of the prompt (transformer.BLOCK), also when n is 0, and one for each token but the last.

    `head` changes how fast tokens come, never which: "exact" computes all logits, "certified" the largest ones only where the choice needs
    no others (certified.py), "auto" does so where it pays. A head of an earlier call saves making its copy of the table.

    Raises, on the call itself: EmptyInputError "Prompt cannot be empty", ContextLimitError if prompt and n tokens do not fit the model's
    context, TokenRangeError or ShapeError for a prompt that is no ids of the vocabulary, OptionError for n, seed, stop tokens or a head
    that cannot be. While it goes on: what `forward` raises, and OptionError when `numbers` run out.
    """
    check_place(model, dialect, ops)
    ids, n, ends = check_prompt(model, prompt, n, stop)
    certified = certified_for(model, sampling, n, head)
    if numbers is not None and not isinstance(numbers, Iterable):
        raise OptionError(f"numbers are {shown(numbers)}, expected an iterable of uniform numbers")
    source = iter(uniforms(seed) if numbers is None else numbers)
    cache = new_cache(model.config, 1, len(ids) + max(n - 1, 0), ops)

    def next_uniform() -> float:
        if sampling.greedy:
            return 0.0
        try:
            return number("uniform number", next(source))
        except StopIteration:
            raise OptionError("the uniform numbers ran out before the tokens did") from None

    def run() -> Iterator[int]:
        logits = prefill(model, [ids], cache, dialect=dialect, ops=ops, head=certified)
        step = None
        for left in range(n, 0, -1):
            token = choose(logits[0], sampling, next_uniform())
            if token in ends:
                return
            yield token
            if left > 1:
                step = step or stepper(model, cache, ops, dialect=dialect, head=certified)
                logits = step([token])

    return run()


def generate(
    model: Model,
    prompt: Sequence[int],
    n: int,
    *,
    sampling: Sampling = GREEDY,
    numbers: Iterable[float] | None = None,
    seed: int = 0,
    stop: Collection[int] = (),
    dialect: Dialect = EXACT,
    ops: ModuleType = cpu,
    head: CertifiedHead | HeadChoice = "auto",
) -> list[int]:
    """The prompt and up to `n` tokens after it; arguments and errors as in `stream`."""
    ids = integers("prompt", prompt, 1, TokenRangeError).tolist()
    return [*ids, *stream(model, ids, n, sampling=sampling, numbers=numbers, seed=seed, stop=stop, dialect=dialect, ops=ops, head=head)]
