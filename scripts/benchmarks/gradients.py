"""Loss and gradients of a batch, beside a forward pass of the same tokens: the file's model, and a Llama of floats of its shape."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.released import TINY
from bitnet_np import Model, forward_full
from bitnet_np.base import blas
from bitnet_np.testing.models import random_model
from bitnet_np.training.gradients import loss_and_gradients, parameters_of

from .report import Table, spread
from .rounds import Case, Results, Sample, Setup, ratios, timed, tokens

BATCH, LENGTH = 4, 128
KINDS = "the file", "floats"
FORWARD, GRADIENTS = "forward", "gradients"


def _with_threads(threads: int, run: Callable[[], object]) -> Sample:
    """A run in which NumPy's products take as many threads as the kernels."""
    library = blas.openblas()
    before = library.in_use() if library else 0
    try:
        if library:
            library.set(threads)
        return {"seconds": timed(run)}
    finally:
        if library:
            library.set(before)


def cases(setup: Setup) -> Iterator[Case]:
    sizes = {name: getattr(setup.model.config, name) for name in TINY}
    for kind, model in zip(KINDS, (setup.model, random_model(setup.seed, family="llama", weights="float32", **sizes)), strict=True):
        for length in setup.fitting((LENGTH,)):
            yield from _cases(setup, kind, model, length)


def _cases(setup: Setup, kind: str, model: Model, length: int) -> Iterator[Case]:
    ids, parameters, what = tokens(setup.seed, model.config.vocab, BATCH, length), parameters_of(model), f"{kind}, {BATCH} x {length}"

    def forward() -> NDArray[np.float32]:
        return forward_full(model, ids)

    def gradients() -> object:
        return loss_and_gradients(model.config, parameters, ids, weights="none")

    yield Case("gradients", f"{FORWARD}, {what}", lambda threads: _with_threads(threads, forward), check=forward)
    yield Case("gradients", f"{GRADIENTS}, {what}", lambda threads: _with_threads(threads, gradients), work=10)


def tables(setup: Setup, results: Results) -> list[Table]:
    """Milliseconds, and round by round how many times those of the forward pass."""
    table = Table("gradients", ["", "threads", "ms (min-max)", "x forward"])
    by_name = {case.name: case for case in results.of("gradients")}
    for case in by_name.values():
        forward = by_name[case.name.replace(GRADIENTS, FORWARD)]
        for n in results.threads(case):
            seconds = results.values(case, n)
            times = ratios(seconds, results.values(forward, n))
            table.rows.append([case.name, str(n), spread([1e3 * each for each in seconds]), spread(times)])
    return [table]
