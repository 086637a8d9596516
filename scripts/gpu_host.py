"""Times what the host does for a GPU, without a GPU: forward passes on the driver of the tests, which accepts launches and runs none.

    python scripts/gpu_host.py [--layers N] [--json FILE]

The shape is that of BitNet b1.58 2B-4T. Kernels are compiled first, which is not counted. The driver's launches, graphs and copies to the
device do nothing; a copy from the device fills the host's memory with zeros. Entering such a function takes about a microsecond, which the
times include. What a real driver adds to a launch (2 to 4 microseconds by published numbers) they do not.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
os.environ["NUMBA_NUM_THREADS"] = "1"  # others would spin while they wait, which counts as processor time
DRIVER = import_module("ptx.driver").install()

import numpy as np  # noqa: E402
from benchmarks.gpu import BITNET_2B, TINY, random_placed  # noqa: E402
from benchmarks.report import Table, render  # noqa: E402

from bitnet_np import Batch, Request, forward, prefill  # noqa: E402
from bitnet_np.cache import new_cache  # noqa: E402
from bitnet_np.gpu.arrays import DeviceTable  # noqa: E402
from bitnet_np.gpu.decoder import GraphDecoder  # noqa: E402
from bitnet_np.gpu.device import open_cuda  # noqa: E402

ROUNDS = 7
CALLS: Counter[str] = Counter()
next_address = 1 << 32


def replaced(name: str, then: Callable[..., object] = lambda *arguments: None) -> None:
    """Makes a function of the driver do nothing but count its calls, and `then`. It must come before the function is first looked up."""
    before = DRIVER.entries[name]

    def called(*arguments: Any) -> int:
        CALLS[name] += 1
        then(*arguments)
        return 0

    DRIVER.entries[name] = type(before)(called)


def zero(to: int, source: int, size: int, *stream: object) -> None:
    """A copy from the device, whose memory was never written: logits must be finite."""
    ctypes.memset(to, 0, size)


def allocate(out: Any, size: int) -> None:
    """An address and no memory, which nothing reads or writes."""
    global next_address
    out[0] = next_address
    next_address += -(-size // 512) * 512


def replace_all() -> None:
    replaced("cuMemAlloc", allocate)
    for name in (
        "cuEventRecord",
        "cuEventSynchronize",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuGraphLaunch",
        "cuMemcpyHtoDAsync",
        "cuMemcpyHtoD",
        "cuMemsetD8Async",
        "cuMemFree",
    ):
        if name in DRIVER.entries:
            replaced(name)
    for name in ("cuMemcpyDtoHAsync", "cuMemcpyDtoH"):
        replaced(name, zero)


def milliseconds(run: Callable[[], object], calls: int = 1) -> tuple[float, int]:
    """Of one call: processor time, the median of some rounds, and the launches. The first call, which compiles, is not counted."""
    run()
    CALLS.clear()
    run()
    launches, times = sum(CALLS[name] for name in CALLS if "Launch" in name), []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(calls):
            run()
        times.append((time.process_time() - start) * 1e3 / calls)
    return median(times), launches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to check that this script works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures, for programs")
    options = parser.parse_args()
    replace_all()
    on = open_cuda()
    config = TINY if options.tiny else BITNET_2B
    one: Any = random_placed(replace(config, n_layers=1, vocab=16), on)
    words = on.empty((config.vocab, one.token_embd.words.shape[1]), np.uint32)
    table: Any = DeviceTable(words, one.token_embd.kind, (config.vocab, config.width))
    model = replace(one, config=config, token_embd=table, layers=one.layers * config.n_layers)
    tokens = np.random.default_rng(0).integers(0, config.vocab, min(2048, config.context))
    rows: dict[str, tuple[float, int]] = {}
    for length in (tokens.size, tokens.size // 16, 1):

        def pass_of(length: int = length) -> None:
            cache = new_cache(config, 1, tokens.size, on)
            forward(model, tokens[None, :length], cache, last_only=True, ops=on)

        rows[f"prefill of {length} tokens" if length > 1 else "one token, launch by launch"] = milliseconds(pass_of)
    for batch in (1, 16):
        cache = new_cache(config, batch, 2 * tokens.size, on)
        prefill(model, np.tile(tokens[:4], (batch, 1)), cache, ops=on)
        decoder, following = GraphDecoder(model, cache, on, np.arange(batch), greedy=True), tokens[:batch]
        rows[f"a step of {batch}, all logits"] = milliseconds(partial(decoder, following), 3)
        rows[f"a step of {batch}, the largest logit"] = milliseconds(partial(decoder.largest, following), 3)
        zeros = np.zeros(batch, np.int64)  # what the driver's copies bring
        rows[f"a step of {batch}, the largest logit, a step ahead"] = milliseconds(partial(decoder.largest, zeros, more=True), 3)
    several = Batch(model, 16, tokens.size, ops=on)
    for number in range(16):
        several.submit(Request(number, tokens[:4].tolist(), tokens.size // 2))
    for _ in range(3):  # until a graph decodes them
        several.step()
    rows["a step of a batch of 16 requests"] = milliseconds(several.step, 3)
    table = Table(f"the host's processor time, {config.n_layers} layers", ["", "ms", "launches", "us a launch"])
    for name, (took, launches) in rows.items():
        table.rows.append([name, f"{took:.3f}", str(launches), f"{took * 1e3 / launches:.1f}"])
    print(render(table))
    if options.json:
        figures = {name: {"milliseconds": took, "launches": calls} for name, (took, calls) in rows.items()}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
