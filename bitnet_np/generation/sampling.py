"""Sampling: the choice of the next token from its logits. Nothing is random but the uniform numbers that are passed in."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from ..base.errors import NonFiniteError, OptionError, ShapeError
from ..base.validate import integer, number
from ..kernels import cpu

UNIT = 2.0**-40
"""Of a probability, relative to the likeliest token's."""
MOST_TOKENS = 1 << 22
"""So many probabilities at most: their sum fits 64 bits."""
_LIKELY = 1 << 28  # UNITs, a 4,096th of the largest probability: tokens that have as much are sorted first
_COLDEST, _HOTTEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampling:
    """The rule that chooses the next token from its logits.

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
        """Whether the largest logit is always chosen."""
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
    rising id, and the first one is taken whose cumulative probability exceeds `uniform` (in [0, 1)). Probabilities are float32, counted in
    units of 2^-40 of the largest, so that their sums are exact.

    -infinity excludes a token. Raises NonFiniteError for NaN or +infinity, or if nothing but -infinity is left, ShapeError for logits that
    are not [V] or too many to sample from (2^22), OptionError for a uniform number outside [0, 1) that would be used.
    """
    if logits.ndim != 1 or logits.size == 0:
        raise ShapeError(f"logits have shape {logits.shape}, expected [V]")
    best = int(logits.argmax())  # the first of equals; NaN counts as largest
    largest = np.float32(logits[best])
    if not np.isfinite(largest):
        raise NonFiniteError(f"the logit of token {best} is {largest}, nothing can be chosen")
    if sampling.greedy:
        return best
    if not 0 <= uniform < 1:
        raise OptionError(f"uniform number is {uniform}, expected at least 0 and less than 1")
    if logits.size > MOST_TOKENS:
        raise ShapeError(f"logits have shape {logits.shape}, expected at most {MOST_TOKENS:,} to sample from")
    candidates: NDArray[np.int64] | None = None  # in the order of ids
    if 0 < sampling.top_k < logits.size:
        kth = np.partition(logits, -sampling.top_k)[-sampling.top_k]
        larger, equal = np.flatnonzero(logits > kth), np.flatnonzero(logits == kth)
        candidates = np.sort(np.concatenate([larger, equal[: sampling.top_k - larger.size]]))
        logits = logits[candidates]
    logits = np.ascontiguousarray(logits, np.float32)
    with np.errstate(over="ignore"):  # in logits far below the largest, whose probability is 0
        probabilities = cpu.exponential((logits - largest) / np.float32(sampling.temperature))
    pick = drawn(logits, probabilities, sampling.top_p, uniform)
    return pick if candidates is None else int(candidates[pick])


def drawn(logits: NDArray[np.float32], probabilities: NDArray[np.float32], top_p: float, uniform: float) -> int:  # [V] x 2
    """The first token, in order, whose running sum of probabilities exceeds `uniform` of all, or of the fewest that hold `top_p` of all.

    Logits are no NaN. Probabilities are relative to the largest, which is 1; they are counted in UNITs, rounded down.
    """
    weights = (probabilities * np.float32(1 / UNIT)).astype(np.int64)
    total = weights.sum()
    target = _part(uniform, total) if top_p == 1 else min(np.int64(np.ceil(top_p * total)), total) - 1
    tokens = np.flatnonzero(logits >= logits[weights >= _LIKELY].min())  # none of the others comes before one of them
    if weights[tokens].sum() <= target:
        tokens = np.arange(logits.size)
    order = tokens[_falling(logits[tokens])]
    running = np.cumsum(weights[order])
    if top_p < 1:
        target = _part(uniform, running[np.searchsorted(running, target, "right")])
    return int(order[np.searchsorted(running, target, "right")])


def _part(share: float, total: np.int64) -> np.int64:
    """A share of a sum that is below it, though the product may round to it."""
    return min(np.int64(share * total), total - 1)


def _falling(logits: NDArray[np.float32]) -> NDArray[np.intp]:
    """The places of numbers by falling size, equals in their order: by the lower half of their bits, then the upper, which NumPy counts."""
    bits = (logits + np.float32(0)).view(np.int32)  # -0 as 0
    keys = np.where(bits < 0, bits, bits ^ 0x7FFFFFFF).view(np.uint32)
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    return order[np.argsort((keys >> 16).astype(np.uint16)[order], kind="stable")]
