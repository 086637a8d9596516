"""Eight threads that compute all operations of the CPU backend and whole passes, over and over, with the same bits.

A program, which prints the number of calls.

    MALLOC_ARENA_MAX=1 python tests/support/soak.py SECONDS

With one arena, memory that one thread frees is what another gets next: a kernel that uses memory which it has freed soon gives wrong bits.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import numba
import numpy as np
from operation_draws import CASES, Draw

from bitnet_np.base.tensor_types import Q4_K, Q8_0
from bitnet_np.engine.dialects import EXACT, LLAMA_CPP
from bitnet_np.engine.forward_pass import forward_full, forward_incremental
from bitnet_np.kernels import cpu
from bitnet_np.kernels.fast import amx
from bitnet_np.testing.models import random_model

_SHAPE = {"width": 256, "ffn": 512, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 300, "n_layers": 1}


def works() -> list[Callable[[], object]]:
    """What the threads do: each operation, and passes of ternary matrices and of blocks."""
    rng = np.random.default_rng(0)
    named = {name: case(Draw(rng)) for name, case in CASES.items() if "blocks" not in name}
    done = [partial(getattr(cpu, name), *arguments) for name, arguments in named.items()]
    for weights, dialect in (("ternary", EXACT), (Q4_K.name, LLAMA_CPP), (Q8_0.name, LLAMA_CPP)):
        model = random_model(1, family="bitnet" if weights == "ternary" else "llama", table="float16", weights=weights, **_SHAPE)
        for way, tokens in ((forward_full, 250), (forward_full, 20), (forward_incremental, 5)):
            done.append(partial(way, model, rng.integers(0, 300, (1, tokens)), dialect=dialect))
    return done


def bits(result: object) -> object:
    return tuple(map(bits, result)) if isinstance(result, tuple | list) else result.tobytes()  # type: ignore[attr-defined]


def main(seconds: float) -> None:
    numba.set_num_threads(2)
    with mock.patch.multiple(amx, unit=lambda: None):  # matrix tiles would take what most processors do without
        everything = works()
        expected = [bits(work()) for work in everything]
        end = time.monotonic() + seconds

        def worker(number: int) -> int:
            """Calls made, in an order that differs from thread to thread."""
            order = np.random.default_rng(number).permutation(len(everything))
            numba.set_num_threads(2)
            calls = 0
            while time.monotonic() < end:
                i = order[calls % len(order)]
                assert bits(everything[i]()) == expected[i], everything[i]
                calls += 1
            return calls

        with ThreadPoolExecutor(8) as pool:
            print(sum(pool.map(worker, range(8))))


if __name__ == "__main__":
    main(float(sys.argv[1]))
