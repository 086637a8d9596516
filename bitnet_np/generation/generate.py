"""Generation: prefill, then one token at a time."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import ContextLimitError, EmptyInputError, OptionError, ShapeError, TokenRangeError, shown
from ..base.validate import instance, integer, integers, number
from ..engine.backend import Backend
from ..engine.cache import KVCache, new_cache
from ..engine.dialects import EXACT, Dialect
from ..engine.forward_pass import run_cached, run_prefill
from ..engine.network import Head, Runtime
from ..engine.tokens import Tokens, check_tokens
from ..kernels import cpu
from ..kernels.float_state import steadily, steady
from ..model.records import Model
from .certified import LARGEST_K, WIDEST, CertifiedHead, certify
from .sampling import GREEDY, Sampling, choose, uniforms
from .speculation import Proposals, Speculation, Speculator, check_speculation


class Prompt(NamedTuple):
    """A prompt and the limits of its continuation, checked."""

    tokens: Tokens  # [1, T]
    n: int  # new tokens at most
    stop: frozenset[int]  # tokens that end it


def check_prompt(model: Model, prompt: Sequence[int], n: int, stop: Collection[int]) -> Prompt:
    """Check a prompt, the number of tokens to continue it by, and those that end it. Raises what `stream` raises on the call itself."""
    ids = integers("prompt", prompt, 1, TokenRangeError)
    if ids.size == 0:
        raise EmptyInputError("Prompt cannot be empty")
    n = integer("number of tokens to generate", n, 0)
    tokens = check_tokens(model.config, ids[None])
    if ids.size + n > model.config.context:
        raise ContextLimitError(f"a prompt of {ids.size} and {n} new tokens exceed the model's context of {model.config.context}")
    return Prompt(tokens, n, frozenset(_stops(model, stop)))


def _stops(model: Model, stop: Collection[int]) -> Iterator[int]:
    if not isinstance(stop, Collection):  # an iterator would be used up here, and stop nothing
        raise OptionError(f"stop is {shown(stop)}, expected a collection of token ids")
    for value in stop:
        token = integer("stop token", value, -(2**63))
        if not 0 <= token < model.config.vocab:
            raise OptionError(f"stop token {token} is not an id of the vocabulary, 0..{model.config.vocab - 1}")
        yield token


HeadChoice = Literal["auto", "exact", "certified"]

_PAYS_FROM = 1 << 24, 48  # weights of the head, and tokens: making the copy takes as long as some 30 tokens save


def certified_for(model: Model, sampling: Sampling, n: int, head: CertifiedHead | HeadChoice = "auto") -> CertifiedHead | None:
    """The head that computes the logits `sampling` needs for `n` tokens; None if all logits are to be computed.

    Raises OptionError for "certified" or a head that cannot be used: more logits are needed than it gives, or the output has a bias or is
    no float table, or logits are scaled or capped.
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
    elif not model.config.plain_logits:
        why_not = "the model's logits are scaled or capped, so that rounding may make two of them equal"
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


@steady
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
    ops: Backend = cpu,
    head: CertifiedHead | HeadChoice = "auto",
    speculation: Speculation | None = None,
) -> Iterator[int]:
    """Yield up to `n` new tokens, each as soon as it is chosen; end before a token of `stop`.

    `numbers` are the uniform numbers to sample with, one for each token, for replaying; without them they come from `seed`.
    One forward pass for each block of the prompt (forward_pass.BLOCK), also when n is 0, and one for each token but the last. With
    `speculation` (speculation.py) a pass may give several of the same tokens.

    `head` changes how fast tokens come, never which: "exact" computes all logits, "certified" the largest ones only where the choice needs
    no others (certified.py), "auto" does so where it pays. A head of an earlier call saves making its copy of the table.

    Raises, on the call itself: EmptyInputError "Prompt cannot be empty", ContextLimitError if prompt and n tokens do not fit the model's
    context, TokenRangeError or ShapeError for a prompt that is not ids of the vocabulary, OptionError for an invalid n, seed, stop token,
    head or speculation, UnsupportedError for speculation on a device. During iteration: what `forward` raises, OptionError when `numbers`
    run out, TokenRangeError or ShapeError for drafts that are not ids of the vocabulary.
    """
    runtime = Runtime(model, dialect, ops).checked()
    return _continuation(runtime, check_prompt(model, prompt, n, stop), sampling, numbers, seed, head, speculation)


def _continuation(
    runtime: Runtime,
    prompt: Prompt,
    sampling: Sampling,
    numbers: Iterable[float] | None,
    seed: int,
    head: CertifiedHead | HeadChoice,
    speculation: Speculation | None,
) -> Iterator[int]:
    """The new tokens of `stream`, for a checked prompt; other invalid arguments raise on the call itself."""
    n, length = prompt.n, prompt.tokens.ids.shape[1]
    certified = certified_for(runtime.model, sampling, n, head)
    check_speculation(runtime, speculation)
    if numbers is not None and not isinstance(numbers, Iterable):
        raise OptionError(f"numbers are {shown(numbers)}, expected an iterable of uniform numbers")
    source = iter(uniforms(seed) if numbers is None else numbers)
    cache = new_cache(runtime.model.config, 1, length + max(n - 1, 0), runtime.ops)

    def next_uniform() -> float:
        if sampling.greedy:
            return 0.0
        try:
            return number("uniform number", next(source))
        except StopIteration:
            raise OptionError("the uniform numbers ran out before the tokens did") from None

    def chooser() -> Callable[[int], int]:
        """A function that appends a token to the cache and chooses the one after it."""
        if speculation is not None:
            proposals = Proposals(speculation, runtime.model.config.vocab, prompt.tokens.ids[0], n)
            step: Callable[[NDArray[np.int64]], NDArray[np.float32]] = Speculator(runtime, cache, certified, proposals)
        else:
            step = _stepper(runtime, cache, certified)
        return lambda token: choose(step(np.array([token]))[0], sampling, next_uniform())

    def run() -> Iterator[int]:
        logits = run_prefill(runtime, prompt.tokens, cache, np.zeros(1, np.int64), head=certified)
        if n == 0:
            return
        token, following = choose(logits[0], sampling, next_uniform()), None
        for left in range(n, 0, -1):
            if token in prompt.stop:
                return
            yield token
            if left > 1:
                following = following or chooser()
                token = following(token)

    return steadily(run())


Step = Callable[[ArrayLike], NDArray[np.float32]]
"""The next tokens [B] of the sequences of a cache -> their logits [B, V]."""


def stepper(model: Model, cache: KVCache, ops: Backend = cpu, *, dialect: Dialect = EXACT, head: Head | None = None) -> Step:
    """A function that appends one token to each slot of a cache, as fast as the backend can.

    It raises ShapeError or TokenRangeError for tokens that are not [B] ids of the vocabulary, and what `forward` raises.
    """
    step = _stepper(Runtime(model, dialect, ops).checked(), cache, head)

    @steady
    def checked(tokens: ArrayLike) -> NDArray[np.float32]:
        ids = np.asarray(tokens)
        if ids.shape != (cache.batch,):
            raise ShapeError(f"tokens has shape {ids.shape}, expected ({cache.batch},): one for each sequence")
        return step(check_tokens(model.config, ids[:, None]).ids[:, 0])

    return checked


def _stepper(runtime: Runtime, cache: KVCache, head: Head | None) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
    """`stepper` for checked arguments."""
    slots = np.arange(cache.batch)
    decoder = runtime.ops.decoder(runtime.model, cache, slots)
    if decoder is not None:
        return decoder
    return lambda tokens: run_cached(runtime, Tokens.whole(tokens[:, None]), cache, slots, last_only=True, head=head)


@steady
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
    ops: Backend = cpu,
    head: CertifiedHead | HeadChoice = "auto",
    speculation: Speculation | None = None,
) -> list[int]:
    """The prompt and up to `n` tokens after it; arguments and errors as in `stream`."""
    runtime = Runtime(model, dialect, ops).checked()
    checked = check_prompt(model, prompt, n, stop)
    return [*checked.tokens.ids[0].tolist(), *_continuation(runtime, checked, sampling, numbers, seed, head, speculation)]
