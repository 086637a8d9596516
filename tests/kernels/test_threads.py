"""Python threads may call at once, whichever of Numba's threading layers is there; one of them aborts if it is entered twice."""

import sys

import pytest
from child import run_python

PROGRAM = """
import hashlib, threading
import numba, numpy as np
from bitnet_np import forward_full, generate
from bitnet_np.testing import random_model

model = random_model(3, width=96, ffn=160)
tokens = np.random.default_rng(3).integers(0, model.config.vocab, (2, 40))
expected = forward_full(model, tokens).tobytes(), generate(model, [1, 2, 3], 12)
found = []
start = threading.Barrier(4)

def work():
    start.wait()
    for _ in range(5):
        found.append((forward_full(model, tokens).tobytes(), generate(model, [1, 2, 3], 12)) == expected)

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(numba.threading_layer(), len(found), all(found))
"""


@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_python_threads_may_call_at_once(layer):
    try:
        found = run_python(PROGRAM, NUMBA_THREADING_LAYER=layer)
    except AssertionError as error:
        if "No threading layer could be loaded" in str(error):
            pytest.skip(f"no {layer} here")
        raise
    assert found.split() == [layer, "20", "True"]


BESIDE = """
import threading
import numba, numpy as np
from bitnet_np import forward_full
from bitnet_np.kernels import launching
from bitnet_np.testing import random_model

@numba.njit(parallel=True, nogil=True)
def total(x):
    out = np.zeros(64)
    for i in numba.prange(64):
        out[i] = x[i::64].sum()
    return out.sum()

launching.SMALL = 0  # small kernels are shared, too
numba.set_num_threads(2)
model, x, ended = random_model(3, width=96, ffn=160), np.ones(1 << 16), threading.Event()
tokens = np.arange(40)[None]
expected = forward_full(model, tokens).tobytes()
sums = set()

def other():
    while not ended.is_set():
        sums.add(total(x))

total(x)
thread = threading.Thread(target=other)
thread.start()
same = all(forward_full(model, tokens).tobytes() == expected for _ in range(100))
ended.set()
thread.join()
print(same, sums)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the layer by default, OpenMP on Linux")
def test_a_parallel_kernel_of_the_users_may_run_meanwhile_on_the_layer_by_default():
    assert run_python(BESIDE, NUMBA_THREADING_LAYER="default") == "True {65536.0}\n"
