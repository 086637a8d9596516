"""Kernels by themselves, at the model's shapes: matmul and attention."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np import packing, widen
from bitnet_np.kernels import cpu

from . import memory, models
from .report import Bar, Table, bar_label, figure, percent, spread
from .rounds import Case, CheckError, Results, Sample, simple, timed
from .setup import Setup
from .stats import summary

ROWS = (1, 8, 128)
ATTENTION_LENGTHS = (256, 1024, 4096)
CHECKED = 64  # output columns compared with NumPy


def ternary(codes: NDArray[np.int8], scale: NDArray[np.float32], matrix: Any) -> NDArray[np.float32]:
    """The product of one ternary matrix."""
    return cpu.ternary_matmul(codes, scale, matrix.codes, matrix.scale, matrix.shape[0])


def matmul(setup: Setup) -> Iterator[Case]:
    """Each kind of matrix in all layers in turn, so that a matrix is read from memory as in a model, and the head."""
    rng = np.random.default_rng(setup.seed)
    kinds: dict[tuple[int, int], tuple[str, list[Any]]] = {}  # one of each shape
    for name, matrix in models.matrices(setup.model.layers[0]):
        kinds.setdefault(matrix.shape, (name, [dict(models.matrices(layer))[name] for layer in setup.model.layers]))
    head = setup.model.head
    for rows in setup.rows or ROWS:
        for (width, depth), (name, layers) in kinds.items():
            codes, scale = cpu.quantize(rng.standard_normal((rows, depth), np.float32))

            def run(codes: NDArray = codes, scale: NDArray = scale, layers: list[Any] = layers) -> NDArray[np.float32]:
                for matrix in layers:
                    out = ternary(codes, scale, matrix)
                return out

            yield Case(
                "matmul",
                f"{name} {width} x {depth}, {rows} rows",
                simple(run),
                check=lambda run=run, codes=codes, scale=scale, layers=layers: checked(run(), codes, scale, layers[-1]),  # type: ignore[misc]
                tokens=rows,
                rows=rows,
                macs=rows * width * depth * len(layers),
                nbytes=sum(matrix.codes.nbytes for matrix in layers),
                work=rows * width * depth * len(layers),
            )
        if not isinstance(head, np.ndarray):
            continue  # block types have kernels of their own
        x = rng.standard_normal((rows, head.shape[1]), np.float32)
        yield Case(
            "matmul",
            f"head {head.shape[0]} x {head.shape[1]}, {rows} rows",
            simple(lambda x=x: cpu.matmul(x, head)),  # type: ignore[misc]
            check=lambda x=x: head_checked(cpu.matmul(x, head), x, head),  # type: ignore[misc]
            tokens=rows,
            float_macs=rows * head.size,
            nbytes=head.nbytes,
            work=rows * head.size,
        )


def checked(out: NDArray[np.float32], codes: NDArray[np.int8], scale: NDArray[np.float32], matrix: Any) -> NDArray[np.float32]:
    """The result, if some of its columns equal NumPy's integers exactly. Raises CheckError."""
    some = slice(0, min(CHECKED, matrix.shape[0]))
    exact = (codes.astype(np.int64) @ packing.unpack(matrix)[some].T.astype(np.int64)).astype(np.float32)
    expected = exact / scale[:, None] * matrix.scale
    if (out[:, some] != expected).any():
        raise CheckError(f"ternary_matmul {matrix.shape}: {np.abs(out[:, some] - expected).max()} away from NumPy's integers")
    return out


def head_checked(out: NDArray[np.float32], x: NDArray[np.float32], head: NDArray) -> NDArray[np.float32]:
    """The result, if some of its columns are float64's within the bound of float32 sums in any order. Raises CheckError."""
    table, wide = widen.float32(head[:CHECKED]).astype(np.float64), x.astype(np.float64)
    bound = x.shape[1] * 2.0**-24 * (np.abs(wide) @ np.abs(table).T)
    if (np.abs(out[:, :CHECKED] - wide @ table.T) > bound).any():
        raise CheckError(f"matmul {head.shape}: outside the bound of float32 sums")
    return out


def matmul_tables(setup: Setup, results: Results) -> list[Table]:
    table = Table("matmul, all layers in turn", ["", "threads", "ms", "GMAC/s", "of peak", "GB/s", "of read peak"], unit="GMAC/s")
    for case in results.of("matmul"):
        for n in results.threads(case):
            seconds = results.values(case, n)
            amount, peak = case.measured
            rate = [amount / second / 1e9 for second in seconds]
            table.rows.append(
                [
                    case.name,
                    str(n),
                    figure([1e3 * second for second in seconds], ".2f"),
                    spread(rate),
                    percent(results.fractions(case, n, amount, peak)),
                    figure([case.nbytes / second / 1e9 for second in seconds]),
                    percent(results.fractions(case, n, case.nbytes, "read")),
                ]
            )
            table.bars.append(Bar(bar_label(case.name, n), summary(rate)))
    table.notes.append("of peak: AMX's or int8's for ternary matrices, float32's for the head. GB/s: weights read once per call")
    return [table]


# --- attention ------------------------------------------------------------------------------------------------------------------------


def attention(setup: Setup) -> Iterator[Case]:
    """Causal attention of a whole sequence, one layer, at the model's heads."""
    c = setup.model.config
    for length in sorted(set(setup.lengths or ATTENTION_LENGTHS)):
        rng = np.random.default_rng(setup.seed)
        q = rng.standard_normal((length, c.heads, c.head_dim), np.float32)
        k, v = (rng.standard_normal((1, length, c.kv_heads, c.head_dim), np.float32) for _ in range(2))
        slot, position = np.zeros(length, np.int64), np.arange(length)

        def call(q: NDArray = q, k: NDArray = k, v: NDArray = v, slot: NDArray = slot, position: NDArray = position) -> NDArray[np.float32]:
            return cpu.attend(q, k, v, slot, position)

        def run(threads: int, call: Callable[[], object] = call) -> Sample:
            seconds = timed(call)
            growth = memory.resident_growth(call)
            return {"seconds": seconds} | ({} if growth is None else {"resident": growth})

        yield Case(
            "attention",
            f"{length} tokens",
            run,
            check=lambda call=call, q=q, k=k, v=v: attention_checked(call(), q, k, v),  # type: ignore[misc]
            tokens=length,
            float_macs=c.heads * c.head_dim * length * (length + 1),
            work=length * length,
        )


def attention_checked(out: NDArray[np.float32], q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray:
    """The result, if its last row is float64's. Raises CheckError."""
    heads, width = q.shape[1:]
    group = heads // k.shape[2]
    for head in range(heads):
        keys, values = (array[0, :, head // group].astype(np.float64) for array in (k, v))
        scores = keys @ q[-1, head].astype(np.float64) / np.sqrt(width)
        p = np.exp(scores - scores.max())
        worst = np.abs(out[-1, head] - p @ values / p.sum()).max()
        if not worst < 1e-5:  # float32 sums of numbers around 1, averaged: a wrong key or head is 1e-2 and more
            raise CheckError(f"attend: head {head} of the last of {len(q)} tokens is {worst} away from float64's")
    return out


def attention_tables(setup: Setup, results: Results) -> list[Table]:
    table = Table(
        "attention, one layer, causal",
        ["", "threads", "ms", "GMAC/s", "of float32 peak", "resident growth MB", "per token KB", "[T, T] of all heads MB"],
        unit="GMAC/s",
    )
    for case in results.of("attention"):
        for n in results.threads(case):
            seconds = results.values(case, n)
            growth = [size / 1e6 for size in results.values(case, n, "resident")]
            rate = [case.float_macs / second / 1e9 for second in seconds]
            table.rows.append(
                [
                    case.name,
                    str(n),
                    figure([1e3 * second for second in seconds], ".2f"),
                    spread(rate),
                    percent(results.fractions(case, n, case.float_macs, "fma")),
                    figure(growth, ".2f"),
                    figure([value * 1e3 / case.tokens for value in growth]),
                    f"{setup.model.config.heads * case.tokens**2 * 4 / 1e6:.1f}",
                ]
            )
            table.bars.append(Bar(bar_label(case.name, n), summary(rate)))
    table.notes.append(
        "resident growth: of the process during a call, its result included; memory is linear where it is the same per token"
    )
    return [table]
