"""Lossless speculation: cheap drafts of the next tokens, checked by the model in one forward pass.

A pass over a token and k drafts gives k + 1 rows of logits, each the same bits as a pass of its own, because results do not depend on how
tokens are cut into chunks. The next token is chosen from the first row. Where it equals the first draft, the second row is that of the
token after it, and so on; the rows behind the first draft that was not chosen are rolled back. So drafts change how many passes the tokens
take, never the tokens. The last token chosen has no row yet: it opens the next pass, and costs none of its own.

Sources: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), for the expected number of tokens
of a pass; Saxena, "Prompt Lookup Decoding" (2023).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import NonFiniteError, OptionError, TokenRangeError, UnsupportedError, shown
from ..base.validate import instance, integer, integers
from ..engine.backend import Backend
from ..engine.cache import new_cache
from ..engine.dialects import EXACT, Dialect
from ..engine.forward_pass import run_prefill
from ..engine.network import Runtime
from ..engine.tokens import Tokens
from ..kernels import cpu
from ..kernels.float_state import steady
from ..model.records import Config, Model
from .sampling import choose

Ids = NDArray[np.int64]

Drafter = Callable[[Ids, int], ArrayLike]
"""The tokens so far [T], read-only, and a number of tokens -> at most so many ids that may come next [K]; what is longer is cut."""

LONGEST, SHORTEST = 4, 2
"""The most and the fewest tokens of the n-grams that `prompt_lookup` compares."""

_PRIOR = 0.3  # probability that a draft is right, before any was checked
_RATE = 0.25  # weight of the newest draft in the probability
_ROW = 0.15  # cost of one more row of a pass, in passes of one row, until it is measured
_MEASURED = 5  # timings kept for each number of rows, of which the median counts
_FORGET = 64  # passes after which rows are measured again, because machines drift
_PROBE = 32  # passes without a draft after which one is tried


def prompt_lookup(tokens: Ids, most: int) -> Ids:
    """A drafter: what followed the last tokens [T] when they came up before, at most `most` tokens.

    The longest n-gram that they end in and that came up counts, of LONGEST to SHORTEST tokens, and of its occurrences the latest.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])  # the ends of n-grams that equal the last one
    latest = None
    for before in range(1, LONGEST):
        ends = ends[ends >= before]
        ends = ends[tokens[ends - before] == tokens[last - before]]
        if not ends.size:
            break
        if before >= SHORTEST - 1:
            latest = int(ends[-1])
    return tokens[:0] if latest is None else tokens[latest + 1 : latest + 1 + most]


class DraftModel:
    """A drafter that is a model, usually a smaller one with the same vocabulary: it drafts what it would choose greedily.

    It keeps the keys and values of `slots` sequences, and computes only what is new in each. Not for several threads at a time.
    """

    def __init__(self, model: Model, slots: int = 1, *, dialect: Dialect = EXACT, ops: Backend = cpu):
        """Raises what `stream` and KVCache raise for the model, the dialect and the slots."""
        self._runtime = Runtime(model, dialect, ops).checked()
        self._cache = new_cache(model.config, slots, None, ops)
        nothing = np.zeros(0, np.int64)
        self._held = [(slot, nothing) for slot in range(self._cache.batch)]  # tokens of each slot, the least recently used first

    @property
    def config(self) -> Config:
        """The configuration of the model."""
        return self._runtime.model.config

    @steady
    def __call__(self, tokens: Ids, most: int) -> list[int]:
        """Draft at most `most` tokens after these [T]: fewer where they exceed its context or float32's range."""
        most = min(most, self.config.context - len(tokens) + 1)
        if most < 1:
            return []
        best = max(range(len(self._held)), key=lambda i: _common(self._held[i][1], tokens))
        slot, held = self._held.pop(best)
        shared = min(_common(held, tokens), len(tokens) - 1)
        self._cache.truncate(slot, shared)
        drafts: list[int] = []
        pending = tokens[shared:]
        try:
            while len(drafts) < most:
                logits = run_prefill(self._runtime, Tokens.whole(pending[None]), self._cache, np.array([slot]))
                drafts.append(choose(logits[0]))
                pending = np.array(drafts[-1:])
        except NonFiniteError:
            pass  # what it has by now are its drafts
        self._held.append((slot, np.concatenate([tokens, drafts]).astype(np.int64)[: int(self._cache.lengths[slot])]))
        return drafts


def _common(a: Ids, b: Ids) -> int:
    """The number of tokens with which both begin."""
    size = min(len(a), len(b))
    differing = np.flatnonzero(a[:size] != b[:size])
    return int(differing[0]) if differing.size else size


@dataclass
class Counter:
    """Counts of the work that speculation did."""

    passes: int = 0  # forward passes after the prompts', one for each sequence in it
    drafted: int = 0  # tokens that were checked
    accepted: int = 0  # those of them that were chosen


@dataclass(frozen=True)
class Speculation:
    """How to draft tokens, and how many at most for one pass; `counter` adds up over all calls that are given this record.

    Raises OptionError for a drafter that cannot be called, and a number below 1.
    """

    draft: Drafter = prompt_lookup
    most: int = 7
    counter: Counter = field(default_factory=Counter, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.draft):
            raise OptionError(f"draft is {shown(self.draft)}, expected a function of token ids and a number")
        integer("most drafts", self.most, 1)


def check_speculation(runtime: Runtime, speculation: Speculation | None) -> None:
    """Raises OptionError for another value or a draft model of another vocabulary, UnsupportedError for a device other than the CPU."""
    if speculation is None:
        return
    draft, vocab = instance("speculation", speculation, Speculation).draft, runtime.model.config.vocab
    if runtime.ops.device != "cpu":
        raise UnsupportedError(f"speculation is for the CPU, this model is computed on {runtime.ops.device}")
    if isinstance(draft, DraftModel) and draft.config.vocab != vocab:
        raise OptionError(f"the draft model has a vocabulary of {draft.config.vocab} tokens, expected {vocab} as the model has")


class Costs:
    """Seconds of a pass by its number of rows: the median of some timings, else an estimate from the nearest number that has some."""

    def __init__(self) -> None:
        self._timings: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._passes = 0

    def measured(self, rows: int, seconds: float) -> None:
        """Count a pass. The first one with so many rows is not timed: it may have compiled or touched memory."""
        self._passes += 1
        if self._passes % _FORGET == 0:
            self._timings, self._medians = {}, {}
        timings = self._timings.setdefault(rows, deque(maxlen=_MEASURED + 1))
        timings.append(seconds)
        if len(timings) > 1:
            kept = sorted([*timings][1:])
            self._medians[rows] = kept[len(kept) // 2]

    def of(self, rows: int) -> float:
        """Seconds of a pass over so many rows, or a number in proportion to them before any was timed."""
        if rows in self._medians:
            return self._medians[rows]
        nearest = min(self._medians, key=lambda known: abs(known - rows), default=0)
        return _prior(rows) * (self._medians[nearest] / _prior(nearest) if nearest else 1.0)


def _prior(rows: int) -> float:
    return 1 + _ROW * (rows - 1)


class Proposals:
    """The tokens of one sequence, the drafts of its last pass, and how often drafts were right."""

    def __init__(self, speculation: Speculation, vocab: int, prompt: Ids, n: int):
        self._speculation, self._vocab = speculation, vocab
        self._tokens = np.concatenate([prompt, np.zeros(n, np.int64)])
        self._length = len(prompt)
        self._drafts = prompt[:0]
        self._accepted = 0  # drafts of the last pass that were chosen
        self._right = _PRIOR  # probability that a draft is right if all before it were
        self._without = 0  # passes since the last with a draft

    @property
    def rejected(self) -> int:
        """Number of positions of the last pass to roll back."""
        return len(self._drafts) - self._accepted

    def append(self, token: int) -> int | None:
        """Add a token that was chosen. Returns the row of the last pass that has its logits; None for a token that opens the next pass."""
        self._tokens[self._length] = token
        self._length += 1
        if not self.rejected:
            return None
        right = token == self._drafts[self._accepted]
        self._right += _RATE * (right - self._right)
        if not right:
            return None
        self._speculation.counter.accepted += 1
        self._accepted += 1
        return self._accepted

    def next(self, costs: Costs, sequences: int = 1) -> Ids:
        """Drafts for the next pass [K], of as many tokens as is fastest; sequences: how many the pass has, each with a row and drafts.

        Raises TokenRangeError for a draft that is no id of the vocabulary, ShapeError for drafts that are no list of integers, and what the
        drafter raises.
        """
        room = min(self._speculation.most, len(self._tokens) - self._length - 1)
        most = self._fastest(costs, sequences, room)
        if most == 0 and self._without >= _PROBE:
            most = min(1, room)
        if most == 0:
            return self._tokens[:0]
        so_far = self._tokens[: self._length]
        so_far.flags.writeable = False
        drafts = integers("drafts", self._speculation.draft(so_far, most), 1, TokenRangeError)[:most]
        wrong = np.flatnonzero((drafts < 0) | (drafts >= self._vocab))
        if wrong.size:
            raise TokenRangeError(f"draft {drafts[wrong[0]]} is not an id of the vocabulary, 0..{self._vocab - 1}")
        return drafts

    def _fastest(self, costs: Costs, sequences: int, room: int) -> int:
        """The number of drafts with the most expected tokens a second: 1 + p + ... + p^k of them in a pass over k + 1 rows."""
        without = costs.of(sequences)
        if without <= (1 - self._right) * costs.of(2 * sequences):
            return 0  # even with drafts without end, if a pass with more of them costs no less
        best, fastest, expected, chance = 0, 1 / without, 1.0, 1.0
        for k in range(1, room + 1):
            chance *= self._right
            expected += chance
            speed = expected / costs.of(sequences * (k + 1))
            if speed > fastest:
                best, fastest = k, speed
        return best

    def passed(self, drafts: Ids) -> None:
        """A pass over the last token and these drafts was made."""
        self._drafts, self._accepted = drafts, 0
        self._without = 0 if len(drafts) else self._without + 1
        self._speculation.counter.passes += 1
        self._speculation.counter.drafted += len(drafts)
