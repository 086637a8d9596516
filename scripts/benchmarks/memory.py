"""What one call needs beside the weights: bytes that Python and NumPy allocate, and growth of a fresh process's resident memory.

The pool of memory for results (kernels/workspace.py) is emptied before each measurement, because memory that a warm-up left there would not
be counted again. A figure smaller than the call's own result is impossible and stops the bench.
"""

import ctypes
import functools
import platform
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

from bitnet_np import KVCache, Model, forward, forward_full, forward_incremental
from bitnet_np.kernels import workspace

from .processes import fresh
from .report import Table, figure
from .rounds import OURS, Case, CheckError, Key, Results, Sample, Setup, summary, timed, tokens

_PAGES_KEPT = 1_000_000  # bytes of a result that may lie in memory which the allocator did not give back


def release() -> None:
    """Give back what was freed but kept: the pool of results, and the allocator's free memory."""
    workspace.release()
    if platform.system() == "Linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _status(name: str) -> int | None:
    """A number of bytes that Linux tells of this process; None elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def resident_growth(run: Callable[[], object]) -> int | None:
    """The largest growth of the process, in bytes, while `run` runs; None where the system does not report it (Linux does)."""
    release()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
    except OSError:
        return None
    before = _status("VmRSS")
    run()
    after = _status("VmHWM")
    return None if before is None or after is None else max(0, after - before)


def traced(run: Callable[[], object]) -> Sample:
    """Peak bytes that Python and NumPy allocate in one call, and bytes it leaves behind."""
    release()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run()
        peak = tracemalloc.get_traced_memory()[1]
        workspace.release()
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    return {"peak": peak - before, "left": left - before}


def calls(model: Model, n: int, seed: int) -> dict[str, Callable[[], object]]:
    """Each path over n tokens, with all logits and with the last ones only; and a decode step."""
    ids = tokens(seed, model.config.vocab, 1, n)
    cache = KVCache(model.config, 1, n)

    def prefill() -> None:
        cache.clear()
        forward(model, ids, cache, last_only=True)

    def step() -> None:
        if cache.lengths[0] in (0, cache.capacity):
            cache.truncate(0, 0)
        forward(model, ids[:, :1], cache, last_only=True)

    return {
        "forward_full, all logits": lambda: forward_full(model, ids),
        "forward_full, last": lambda: forward_full(model, ids, last_only=True),
        "incremental, all logits": lambda: forward_incremental(model, ids),
        "incremental, last": lambda: forward_incremental(model, ids, last_only=True),
        "prefill into a cache": prefill,
        "decode step": step,
    }


def checked(name: str, sample: Sample, result: int) -> Sample:
    """The sample. Raises CheckError for a peak that does not even hold the call's result, of `result` bytes."""
    for key, least in (("peak", result), ("resident", result - _PAGES_KEPT)):
        if key in sample and sample[key] < least:
            raise CheckError(f"memory {name}: {key} is {sample[key]:,} bytes, but the result alone has {result:,}")
    return sample


def cases(setup: Setup) -> Iterator[Case]:
    """A case for each call."""
    model, n = setup.model, setup.fitting((64,))[0]
    grown = functools.cache(lambda threads: fresh(setup, threads, "memory", str(n), str(setup.seed)))
    for name, call in calls(model, n, setup.seed).items():
        vocab = model.config.vocab * 4
        logits = vocab * n if name.endswith("all logits") else vocab

        def run(threads: int, name: str = name, call: Callable[[], object] = call, logits: int = logits) -> Sample:
            growth = grown(threads)[name]
            sample = {"seconds": timed(call), **traced(call), **({} if growth is None else {"resident": growth})}
            return checked(name, sample, logits)

        tokens_of = 1 if name == "decode step" else n
        yield Case("memory", name, run, tokens=tokens_of, nbytes=logits, rounds=3, work=tokens_of, threads=setup.threads[-1:])


def tables(setup: Setup, results: Results) -> list[Table]:
    table = Table(
        f"memory of one call, {setup.model.config.vocab} tokens in the vocabulary, weights not counted",
        ["", "tokens", "peak MB", "beyond logits MB", "bytes per token and width", "left KB", "resident MB"],
    )
    for case in results.of("memory"):
        samples = [sample for n in results.threads(case) for sample in results.samples[Key("memory", case.name, OURS, n)]]
        median = {key: summary([sample[key] for sample in samples]).median for key in samples[0]}
        beyond = median["peak"] - case.nbytes
        sizes = [f"{median['peak'] / 1e6:.2f}", f"{beyond / 1e6:.2f}", f"{beyond / case.tokens / setup.model.config.width:.1f}"]
        resident = figure([median["resident"] / 1e6] if "resident" in median else [])
        table.rows.append([case.name, str(case.tokens), *sizes, f"{median['left'] / 1e3:.1f}", resident])
    table.notes += [
        "peak: what Python and NumPy allocate, the result included. resident: growth of a fresh process, kernels' buffers included",
        "bytes per token and width: c in peak <= logits + c * tokens * width",
    ]
    return [table]
