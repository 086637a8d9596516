"""Generation: prefill, then one token at a time."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from ..base.errors import NonFiniteError, OptionError
from ..base.validate import items_of, number
from ..engine.backend import Backend
from ..engine.dialects import EXACT, Dialect
from ..engine.network import Runtime
from ..kernels import cpu
from ..kernels.float_state import steady
from ..model.records import Model
from .batch import Batch, Continuation, Request
from .sampling import GREEDY, Sampling, uniforms


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
) -> Iterator[int]:
    """Yield up to `n` new tokens, each as soon as it is chosen; end before a token of `stop`.

    `numbers` are the uniform numbers to sample with, one for each token, for replaying; without them they come from `seed`.
    One forward pass for each block of the prompt (forward_pass.BLOCK), also when n is 0, and one for each token but the last.

    Raises, on the call itself: EmptyInputError "Prompt cannot be empty", ContextLimitError if prompt and n tokens do not fit the model's
    context, TokenRangeError or ShapeError for a prompt that is not ids of the vocabulary, OptionError for an invalid n, sampling,
    seed or stop token. During iteration: what `forward` raises, and OptionError when `numbers` run out.
    """
    Runtime(model, dialect, ops).checked()
    source = uniforms(seed) if numbers is None else _given(numbers)
    continued = Continuation.of(model, Request(0, prompt, n, sampling, stop=stop), source)
    batch = Batch(model, 1, continued.positions(), dialect=dialect, ops=ops)
    batch.queue(continued)

    def run() -> Iterator[int]:
        given = 0
        while not batch.done:
            completions = batch.step()
            yield from continued.tokens[given:]
            given = len(continued.tokens)
            if completions and completions[0].error:
                raise NonFiniteError(completions[0].error)

    return run()


def _given(numbers: Iterable[float]) -> Iterator[float]:
    """The caller's uniform numbers. Raises OptionError for what has none, and after the last one."""
    for value in items_of("numbers", numbers):
        yield number("uniform number", value)
    raise OptionError("the uniform numbers ran out before the tokens did")


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
) -> list[int]:
    """The prompt and up to `n` tokens after it; arguments and errors as in `stream`."""
    new = stream(model, prompt, n, sampling=sampling, numbers=numbers, seed=seed, stop=stop, dialect=dialect, ops=ops)
    return [*map(int, prompt), *new]
