"""Whole forward passes: prefill, decode and batch."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import bitnet_np
from bitnet_np import KVCache, forward, forward_full, forward_incremental, stream
from bitnet_np.engine.backend import Backend, Wrapped
from bitnet_np.engine.dialects import EXACT
from bitnet_np.kernels import cpu

from . import models
from .report import Table, figure, percent, spread
from .rounds import OURS, Case, Results, Sample, Setup, ratios, simple, summary, timed, tokens

PROMPT = 8  # tokens before a timed decode
GRID_BATCHES, GRID_LENGTHS = (1, 2, 4, 8, 16), (1, 16, 128, 512)
LENGTHS_OF_8 = (32, 64, 128, 256, 512, 1024)  # of a batch of 8: BitNet-rs's benchmark


def multiply_adds(setup: Setup, amount: int) -> dict[str, Any]:
    """The fields of a Case that say which instructions do so many multiply-adds of its layers' products."""
    if models.ternary_weights(setup.model):
        return {"macs": amount}
    return {"float_macs": amount} if setup.dialect.name == EXACT.name else {"macs": amount, "ternary": False}


def of_tokens(setup: Setup, tokens: int) -> dict[str, Any]:
    """The same, of all layers."""
    return multiply_adds(setup, tokens * models.multiplied_weights(setup.model))


# --- prefill --------------------------------------------------------------------------------------------------------------------------


def prefill_case(setup: Setup, length: int) -> Case:
    """The case of a prompt through an empty cache, logits of its last position."""
    model, dialect = setup.model, setup.dialect
    prompt = tokens(setup.seed, model.config.vocab, 1, length)
    cache = KVCache(model.config, 1, length)

    def logits() -> NDArray[np.float32]:
        cache.clear()
        return bitnet_np.prefill(model, prompt, cache, dialect=dialect)

    def run(threads: int) -> Sample:
        cache.clear()  # writes zeros, which is no part of a prefill
        return {"seconds": timed(lambda: bitnet_np.prefill(model, prompt, cache, dialect=dialect))}

    return Case(
        "prefill",
        f"{length} tokens",
        run,
        check=logits,
        expected=lambda: forward_full(model, prompt, last_only=True, dialect=dialect),
        tokens=length,
        rows=length,
        **of_tokens(setup, length),
        request={"do": "prefill", "tokens": prompt[0].tolist()},
        work=length,
    )


def prefill(setup: Setup) -> Iterator[Case]:
    lengths = setup.fitting((128, 512))
    for length in lengths:
        yield prefill_case(setup, length)
    prompt = tokens(setup.seed, setup.model.config.vocab, 1, lengths[0])
    yield Case(
        "prefill",
        f"all logits of {lengths[0]}",
        simple(lambda: forward_full(setup.model, prompt, dialect=setup.dialect)),
        check=lambda: forward_full(setup.model, prompt, dialect=setup.dialect),
        tokens=lengths[0],
        rows=lengths[0],
        **of_tokens(setup, lengths[0]),
        work=2 * lengths[0],
    )


def fit(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """a and b of seconds = a T + b T^2 with the least squares of relative errors, so that short prompts count as much; and R^2."""
    t, s = np.array(lengths, np.float64), np.array(seconds)
    columns = np.stack([t, t * t], axis=1)
    solution = np.linalg.lstsq(columns / s[:, None], np.ones(len(s)), rcond=None)[0]
    return *solution.tolist(), float(1 - ((s - columns @ solution) ** 2).sum() / ((s - s.mean()) ** 2).sum())


def prefill_tables(setup: Setup, results: Results) -> list[Table]:
    """The speeds, and from three lengths on how seconds grow with the length."""
    (table,) = speeds("prefill", results)
    prompts = [case for case in results.of("prefill") if case.name == f"{case.tokens} tokens"]
    for n in results.threads(prompts[0]) if len(prompts) > 2 else ():
        a, b, r2 = fit([case.tokens for case in prompts], [summary(results.values(case, n)).median for case in prompts])
        table.notes.append(f"{n} threads: seconds of T tokens are {a * 1e3:.3g} ms * T + {b * 1e6:.3g} us * T^2, R^2 {r2:.4f}")
    return [table]


# --- decode ---------------------------------------------------------------------------------------------------------------------------


def decode_case(bench: str, name: str, setup: Setup, batch: int, peer: bool = False, ops: Backend = cpu) -> Case:
    """The case of steps of one token for each of `batch` sequences, all logits of each step; the prompt is not timed."""
    model, n, dialect = setup.model, setup.steps, setup.dialect
    ids = tokens(setup.seed, model.config.vocab, batch, PROMPT + n)
    cache = KVCache(model.config, batch, PROMPT + n)

    def steps() -> Iterator[tuple[float, NDArray[np.float32]]]:
        cache.clear()
        forward(model, ids[:, :PROMPT], cache, last_only=True, dialect=dialect)
        for i in range(PROMPT, PROMPT + n):
            begin = time.perf_counter()
            logits = forward(model, ids[:, i : i + 1], cache, last_only=True, dialect=dialect, ops=ops)
            yield time.perf_counter() - begin, logits

    def run(threads: int) -> Sample:
        return {"seconds": sum(second for second, _ in steps())}

    return Case(
        bench,
        name,
        run,
        check=lambda: np.stack([logits for _, logits in steps()], axis=1),
        expected=lambda: forward_full(model, ids, dialect=dialect)[:, PROMPT:],
        tokens=n * batch,
        rows=batch,
        **of_tokens(setup, n * batch),
        nbytes=n * models.weight_bytes(model),
        request={"do": "decode", "prompt": ids[0, :PROMPT].tolist(), "tokens": ids[0, PROMPT:].tolist()} if peer else None,
        work=batch,
    )


def decode(setup: Setup) -> Iterator[Case]:
    model, n = setup.model, setup.steps
    yield decode_case("decode", f"{n} after {PROMPT}", setup, 1, peer=True)
    yield decode_case("decode", f"{n} after {PROMPT}, not recorded", setup, 1, ops=Wrapped(cpu))
    prompt = tokens(setup.seed, model.config.vocab, PROMPT).tolist()

    def greedy() -> tuple[float, list[int]]:
        words = stream(model, prompt, n + 1, dialect=setup.dialect)
        chosen = [next(words)]  # the prompt's pass
        begin = time.perf_counter()
        chosen += words
        return time.perf_counter() - begin, chosen

    def slowly() -> NDArray[np.int64]:
        cache, chosen, new = KVCache(model.config, 1, PROMPT + n + 1), [], prompt
        for _ in range(n + 1):
            chosen.append(int(forward(model, [new], cache, last_only=True, dialect=setup.dialect)[0].argmax()))
            new = chosen[-1:]
        return np.array(chosen)

    yield Case(
        "decode",
        f"greedy {n} after {PROMPT}",
        lambda threads: {"seconds": greedy()[0]},
        check=lambda: np.array(greedy()[1]),
        expected=slowly,
        tokens=n,
        **of_tokens(setup, n),
    )


def speeds(bench: str, results: Results, of: str = "the layers' ternary matrices, or of all their matrices if none is") -> list[Table]:
    """Tokens per second, achieved fractions of the peaks, and peers beside them. of: what the multiply-adds are of."""
    table = Table(bench, ["", "threads", "tok/s (min-max)", "GMAC/s", "of its peak"])
    reading = any(case.nbytes for case in results.of(bench))
    table.columns += ["GB/s", "of read peak"] if reading else []
    peers = list(dict.fromkeys(key.side for key in results.samples if key.bench == bench and key.side != OURS))
    for peer in peers:
        table.columns += [f"{peer} tok/s", f"x {peer}"]
    for case in results.of(bench):
        for n in results.threads(case):
            seconds = results.values(case, n)
            rate = [case.tokens / second for second in seconds]
            row = [case.name, str(n), spread(rate)]
            amount, peak = case.measured
            if amount:
                row += [figure([amount / second / 1e9 for second in seconds])]
                row += [percent(results.fractions(case, n, amount, peak))]
            else:
                row += ["-", "-"]
            if case.nbytes:
                row += [figure([case.nbytes / second / 1e9 for second in seconds])]
                row += [percent(results.fractions(case, n, case.nbytes, "read"))]
            elif reading:
                row += ["-", "-"]
            for peer in peers:
                theirs = results.values(case, n, side=peer) if case.request else []
                row += [spread([case.tokens / second for second in theirs]), spread(ratios(theirs, seconds), ".2f") if theirs else "-"]
            table.rows.append(row)
    table.notes.append(f"GMAC/s: multiply-adds of {of}. Their peak: that of the instructions")
    table.notes += ["GB/s: weights read"] if reading else []
    table.notes += [f"x {peer}: {peer}'s seconds / ours, median of the rounds' ratios; more than 1: we are faster" for peer in peers]
    return [table]


# --- batch ----------------------------------------------------------------------------------------------------------------------------


def batch(setup: Setup) -> Iterator[Case]:
    """Decode of many sequences, then the grid of prompts, smallest first: in one pass and token by token."""
    counts, model = setup.batches or GRID_BATCHES, setup.model
    for count in counts:
        yield decode_case("batch", f"decode, batch {count}", setup, count)
    cells = {(t, b) for b in counts for t in setup.fitting(GRID_LENGTHS)}
    if setup.lengths is setup.batches is None:
        cells |= {(t, 8) for t in setup.fitting(LENGTHS_OF_8)}
    for length, count in sorted(cells, key=lambda cell: (cell[0] * cell[1], cell[1])):
        ids = tokens(setup.seed, model.config.vocab, count, length)
        for name, path in (("prefill", forward_full), ("token by token", forward_incremental)):

            def logits(path: Any = path, ids: NDArray[np.int64] = ids) -> NDArray[np.float32]:
                return path(model, ids, last_only=True)

            yield Case(
                "batch",
                f"{name}, batch {count} x {length}",
                simple(logits),
                check=logits,
                expected=lambda ids=ids: np.concatenate([forward_full(model, row[None], last_only=True) for row in ids]),  # type: ignore[misc]
                tokens=ids.size,
                **of_tokens(setup, ids.size),
                work=ids.size,
            )


def batch_tables(setup: Setup, results: Results) -> list[Table]:
    """The speeds, and whole sequences against steps."""
    table = Table("whole sequences against steps", ["", "threads", "ms in one pass", "ms token by token", "x (min-max)"])
    by_name = {case.name: case for case in results.of("batch")}
    for name, case in by_name.items():
        steps = by_name.get(name.replace("prefill", "token by token"), case)
        for n in results.threads(case) if steps is not case else ():
            ours, theirs = results.values(case, n), results.values(steps, n)
            milliseconds = (figure([1e3 * second for second in seconds], ".2f") for seconds in (ours, theirs))
            table.rows.append([name.removeprefix("prefill, "), str(n), *milliseconds, spread(ratios(theirs, ours), ".2f")])
    table.notes.append("x: token by token / in one pass, medians of the rounds' ratios. Both give the logits of the last position")
    return [*speeds("batch", results), table]
