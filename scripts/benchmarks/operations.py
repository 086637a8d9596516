"""Operations by themselves: attention, products by a layer's largest matrix, and masks as arrays."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import numba
import numpy as np
from numpy.typing import NDArray

from bitnet_np import contract, masks
from bitnet_np.engine.backend import Backend
from bitnet_np.engine.dialects import Dialect
from bitnet_np.kernels import cpu
from bitnet_np.model.records import Blocks, Ternary, Weights

from . import models
from .forwards import multiply_adds
from .report import Table, figure, spread
from .rounds import Case, Results, Sample, Setup, ratios, simple, timed

LENGTHS = 256, 1024, 4096  # of attention
COUNTS = 1, 2, 4, 8, 16, 32, 64, 128  # tokens of a product
SIDES = 16, 32, 64, 128, 256, 512, 1024, 2048  # of masks
CHECKED = 2  # rows that are compared with the contract's


def attention(setup: Setup) -> Iterator[Case]:
    """Causal attention of a whole sequence, in one layer."""
    return (_attention_case(setup, n) for n in setup.fitting(LENGTHS))


def _attention_case(setup: Setup, n: int) -> Case:
    config, rng = setup.model.config, np.random.default_rng(setup.seed)
    q = rng.standard_normal((n, config.heads, config.head_dim), np.float32)
    k, v = rng.standard_normal((2, 1, n, config.kv_heads, config.head_dim), np.float32)

    def attend(ops: Backend = cpu, start: int = 0) -> NDArray[np.float32]:
        return ops.attend(q[start:], k, v, np.zeros(n - start, np.int64), np.arange(start, n))

    return Case(
        "attention",
        f"{n} tokens",
        simple(attend),
        check=lambda: attend()[-CHECKED:],
        expected=lambda: attend(contract, n - CHECKED),
        tokens=n,
        float_macs=q.size * (n + 1),
        work=n * n,
    )


def products(setup: Setup) -> Iterator[Case]:
    """The largest matrix of each layer, one after the other, so that memory is read as in a model."""
    matrices = [max(models.linears_of(layer), key=lambda linear: math.prod(linear.shape)).weights for layer in setup.model.layers]
    return (_product_case(setup, matrices, n) for n in sorted(set(setup.lengths or COUNTS)))


def product(x: NDArray[np.float32], weights: Weights, dialect: Dialect, ops: Backend = cpu) -> NDArray[np.float32]:
    """x times a matrix, [R, M] -> [R, N], as a layer multiplies it."""
    if isinstance(weights, Ternary):
        return ops.ternary_matmul(*ops.quantize(x), weights.codes, weights.scale, weights.shape[0])
    if not isinstance(weights, Blocks):
        return ops.matmul(x, weights)
    if dialect.ggml_activations:
        return ops.matmuls_blocks_as_llama_cpp(x, (weights.data, weights.type))[0]
    return ops.matmul_blocks(x, weights.data, weights.type)


def _product_case(setup: Setup, matrices: list[Weights], n: int) -> Case:
    x = np.random.default_rng(setup.seed).standard_normal((n, matrices[0].shape[1]), np.float32)
    amount = n * sum(math.prod(weights.shape) for weights in matrices)

    def multiply() -> NDArray[np.float32]:
        return [product(x, weights, setup.dialect) for weights in matrices][-1]

    return Case(
        "products",
        f"{n} tokens",
        simple(multiply),
        check=lambda: multiply()[-CHECKED:],
        expected=lambda: product(x[-CHECKED:], matrices[-1], setup.dialect, contract),
        tokens=n,
        rows=n,
        **multiply_adds(setup, amount),
        nbytes=sum(weights.nbytes for weights in matrices),
        work=amount,
    )


# --- masks ----------------------------------------------------------------------------------------------------------------------------


@numba.njit
def nested_loop(n: int) -> NDArray[np.float32]:
    """A causal mask as BitNet-rs makes it: zeros, and -infinity written one by one."""
    out = np.zeros(n * n, np.float32)
    for i in range(n):
        for j in range(i + 1, n):
            out[i * n + j] = -np.inf
    return out.reshape(n, n)


@numba.njit
def one_pass(n: int) -> NDArray[np.float32]:
    """The same where each element is written once."""
    out = np.empty((n, n), np.float32)
    for i in range(n):
        for j in range(n):
            out[i, j] = -np.inf if j > i else 0.0
    return out


_cache = masks.MaskCache()
WAYS: dict[str, Callable[[int], NDArray]] = {
    "made": lambda n: masks.mask(n, n),
    "cached": lambda n: _cache.get(n, n),
    "nested loop": nested_loop,
    "one pass": one_pass,
}


def mask_arrays(setup: Setup) -> Iterator[Case]:
    """Each way to make a mask at each size."""
    for n in sorted(set(setup.lengths or SIDES)):
        for name, way in WAYS.items():
            yield Case(
                "masks",
                f"{n} {name}",
                partial(_repeated, way, n),
                check=lambda way=way, n=n: way(n).view(np.int32),  # type: ignore[misc]
                expected=lambda n=n: np.where(np.tri(n, dtype=bool), np.float32(0), np.float32(-np.inf)).view(np.int32),  # type: ignore[misc]
                work=n,
                threads=setup.threads[:1],
            )


def _repeated(way: Callable[[int], object], n: int, threads: int) -> Sample:
    """Seconds of one call of many: one alone would measure how Python comes back to code that other cases drove out of the caches."""
    calls = max(5, 1_000_000 // (n * n + 5_000))

    def make() -> None:
        for _ in range(calls):
            way(n)

    way(n)
    return {"seconds": timed(make) / calls}


def hits(requests: list[tuple[int, int]]) -> str:
    """The share of requests (queries, keys) that a fresh cache answers."""
    cache = masks.MaskCache()
    for queries, keys in requests:
        cache.get(queries, keys)
    return f"{100 * cache.hits / len(requests):.0f} %"


def mask_tables(setup: Setup, results: Results) -> list[Table]:
    """Microseconds of a mask, and how many times as long the other ways take."""
    own, *others = WAYS
    table = Table("causal masks", ["positions", f"us {own}", *(f"x {name}" for name in others)])
    seconds = {case.name: results.values(case, n) for case in results.of("masks") for n in results.threads(case)}
    for n in (name.removesuffix(f" {own}") for name in seconds if name.endswith(own)):
        made = seconds[f"{n} {own}"]
        times = [spread(ratios(seconds[way], made), ".2f") if (way := f"{n} {name}") in seconds else "-" for name in others]
        table.rows.append([n, figure([1e6 * second for second in made], ".2f"), *times])
    repeated, decode = hits([(n, n) for n in (64, 128, 512, 64, 128, 512, 1024) * 30]), hits([(1, 64 + i) for i in range(256)])
    table.notes += [
        "x: seconds of another way / those of masks.mask, medians of the rounds' ratios; more than 1: masks.mask is faster",
        "cached: MaskCache. nested loop: BitNet-rs's, one pass: each element is written once, both compiled by Numba",
        f"MaskCache answers {repeated} of requests where a few lengths repeat, {decode} in decode",
    ]
    return [table]
