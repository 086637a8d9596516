"""Processes that race for one fresh cache of compiled kernels; this file is also their program.

Each process runs kernels on two or three types of numbers and compares the results with NumPy's. Afterwards a new process does the same
with the kernels of the cache, and must compile none.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba.core import event
from numpy.typing import NDArray

from bitnet_np.engine import masks
from bitnet_np.kernels import cpu, launching

ROOT = Path(__file__).parents[2]
INTEGERS = np.arange(-64, 64, dtype=np.float32).reshape(8, 16)  # float16 and bfloat16 hold them, and sums of their products are exact
KERNELS = {"embed": "_embed_alone", "embed, threads": "_embed"}
"""Case -> the kernel that it compiles for each type of numbers, before whose files a process can be held."""


def table(dtype: str) -> NDArray:
    return (INTEGERS.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else INTEGERS.astype(dtype)


def is_right(case: str, dtype: str) -> bool:
    """Run one kernel on one type, and compare with NumPy."""
    if case == "fill_mask":
        mask = masks.batch([5], dtype=np.float16 if dtype == "float16" else np.float32)
        return bool(np.array_equal(mask[0, 0] == 0, np.tri(5)))
    launching.SMALL = 0 if case == "embed, threads" else 1 << 15
    return bool(np.array_equal(cpu.embed(table(dtype), np.array([3, 0, 7])), INTEGERS[[3, 0, 7]]))


# --- one process ----------------------------------------------------------------------------------------------------------------------


class Compilations(event.Listener):
    def __init__(self) -> None:
        self.count = 0

    def on_start(self, event: Any) -> None:
        self.count += 1

    def on_end(self, event: Any) -> None:
        pass


def hold(kernel: str) -> None:
    """Make the process print "held" and wait for a line before it renames a file of this kernel into place."""
    replace = os.replace

    def held(source: str, target: str) -> None:
        if f"{kernel}-" in os.path.basename(target).replace(".", "-"):
            print("held", flush=True)
            sys.stdin.readline()
        replace(source, target)

    os.replace = held  # type: ignore[assignment]


def work(cases: Sequence[tuple[str, str]], kernel: str) -> None:
    """The work of a process. It prints "held" at each hold, and in the end the cases that were wrong and the number of compilations."""
    print("ready", flush=True)
    sys.stdin.readline()
    if kernel:
        hold(kernel)
    seen = Compilations()
    with event.install_listener("numba:compile", seen):
        right = [is_right(case, dtype) for case, dtype in cases]
    print(json.dumps({"right": all(right), "compiled": seen.count, "wrong": [c for c, ok in zip(cases, right, strict=True) if not ok]}))


class Process:
    """A process that runs `work`, seen from its parent."""

    def __init__(self, cache: str, cases: Sequence[tuple[str, str]], kernel: str = "") -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": cache, "NUMBA_NUM_THREADS": "2"}
        command = [sys.executable, __file__, json.dumps([list(cases), kernel])]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.line = self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self) -> None:
        """Let it go on, without waiting for its next line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def listen(self) -> None:
        self.line = self._read()

    def go_on(self) -> None:
        """Let it go on to the next file it writes, or to its end."""
        if self.line == "held":
            self.start()
            self.listen()

    def result(self) -> dict[str, Any]:
        while self.line in ("ready", "held"):
            self.start()
            self.listen()
        code = self.process.wait()
        return json.loads(self.line) if code == 0 else {"right": False, "compiled": 0, "wrong": f"exit code {code}"}


# --- races ----------------------------------------------------------------------------------------------------------------------------


def forced(case: str, order: str, cache: str) -> dict[str, Any]:
    """Process A runs a case on float16, B on bfloat16, one write at a time in this order. Returns the result of a new process with both.

    order: the process that may go on, step by step: each writes one or two files for a kernel.
    """
    pair = [Process(cache, [(case, dtype)], KERNELS[case]) for dtype in ("float16", "bfloat16")]
    for process in pair:
        process.start()
    for process in pair:
        process.listen()  # both have looked into the empty cache
    for name in order:
        pair["AB".index(name)].go_on()
    for process in pair:
        if not (result := process.result())["right"]:
            return result
    return Process(cache, [(case, "float16"), (case, "bfloat16")]).result()


def natural(seed: int, processes: int, cache: str) -> dict[str, Any]:
    """Several processes at once run the same cases, each in an order of its own. Returns the result of a new process with all of them."""
    cases = [("embed", dtype) for dtype in ("float16", "bfloat16", "float32")] + [("fill_mask", "float16"), ("fill_mask", "bfloat16")]
    orders = [random.Random(f"{seed} {n}").sample(cases, len(cases)) for n in range(processes)]
    racing = [Process(cache, order) for order in orders]
    for process in racing:
        process.start()
    for process in racing:
        process.listen()
        if not (result := process.result())["right"]:
            return result
    return Process(cache, cases).result()


if __name__ == "__main__":
    work(*json.loads(sys.argv[1]))
