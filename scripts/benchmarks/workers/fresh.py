"""The fresh process of processes.py: `fresh.py MODEL THREADS [every | memory TOKENS SEED]` prints a JSON object.

It has seconds, bytes and a digest of the first logits; `every` runs every path once. With `memory` it has, by the call's name, by how many
bytes each call of memory.py makes the process grow.
"""

import hashlib
import json
import resource
import sys
import time
from pathlib import Path

BEGIN = time.perf_counter()

import numba  # noqa: E402
from numba.core import event  # noqa: E402

from bitnet_np import KVCache, Model, forward, forward_full, load  # noqa: E402

IMPORTED = time.perf_counter()


class Compilations(event.TimingListener):
    """Seconds of compilation, nested ones counted once, and how many functions."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = 0

    def on_start(self, event: object) -> None:
        super().on_start(event)
        self.functions += 1


def peak_bytes() -> int:
    """Peak resident memory. Linux's ru_maxrss may be the parent's, from before this program started: /proc has our own."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def every_path(model: Model) -> None:
    """Run each path once, so that everything is compiled."""
    prompt = [[0] * min(20, model.config.context - 1)]
    cache = KVCache(model.config, 1, len(prompt[0]) + 1)
    forward_full(model, prompt)
    forward(model, prompt, cache, last_only=True)
    forward(model, [[0]], cache, last_only=True)


def growth(path: str, n: int, seed: int) -> dict[str, int | None]:
    """The growth of this process in each call, after a call of each that loads kernels and touches the weights."""
    sys.path.append(str(Path(__file__).parents[2]))
    from benchmarks import memory

    model = load(path)
    for call in memory.calls(model, n, seed).values():
        call()
    return {name: memory.resident_growth(call) for name, call in memory.calls(model, n, seed).items()}


def main() -> None:
    path, threads, *what = sys.argv[1:]
    numba.set_num_threads(int(threads))
    if what[:1] == ["memory"]:
        print(json.dumps(growth(path, *map(int, what[1:]))))
        return
    compilations = Compilations()
    with event.install_listener("numba:compile", compilations):
        begin = time.perf_counter()
        model = load(path)
        loaded = time.perf_counter()
        first = forward_full(model, [[0]])
        done = time.perf_counter()
        if what == ["every"]:
            every_path(model)
            done = time.perf_counter()
    parts = {"import": IMPORTED - BEGIN, "load": loaded - begin, "first": done - loaded, "seconds": done - begin}
    compiled = {"compile": compilations.duration if compilations.done else 0.0, "functions": compilations.functions}
    print(json.dumps({**parts, **compiled, "peak_bytes": peak_bytes(), "sha256": hashlib.sha256(first.tobytes()).hexdigest()}))


if __name__ == "__main__":
    main()
