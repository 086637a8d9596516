"""Ctrl-C at any step, and forks at any time: nothing stays locked, half written or changed."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import numba
import pytest
from child import run_python
from numba.np.ufunc import parallel

from bitnet_np.kernels import launching, numba_threads

needs_timers = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no signals by a timer on Windows")
SOAK = (Path(__file__).parent / "support" / "interrupted.py").read_text("utf-8")


@needs_timers
def test_ctrl_c_at_any_step_tears_nothing(is_thorough):
    """Some hundred or thousand interrupts; `python tests/support/interrupted.py 100000` has more."""
    count = 3000 if is_thorough else 800
    found = json.loads(run_python(SOAK, count))
    assert found["faults"] == {}
    assert found["interrupts"] >= count
    assert found["tokens of the other thread"] > 0


def test_numba_is_asked_once_and_not_for_its_lock(monkeypatch):
    assert numba_threads.get_num_threads() == numba.get_num_threads()

    def launch_threads():
        raise AssertionError("takes the lock")

    with monkeypatch.context() as patch:
        patch.setattr(parallel, "_launch_threads", launch_threads)
        assert numba_threads.get_num_threads() == 1
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)  # until the next test
    assert numba_threads.get_num_threads() == numba.config.NUMBA_NUM_THREADS


@needs_timers
def test_ctrl_c_while_a_kernel_waits_for_another_threads(monkeypatch):
    """The other thread has its turn still, and then the next."""
    holds, ends, ran = threading.Event(), threading.Event(), []

    def hold():
        launching._by_team(1, lambda: holds.set() or ends.wait())
        launching._by_team(1, ran.append, "the other's")

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    other = threading.Thread(target=hold)
    try:
        other.start()
        holds.wait()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            launching._by_team(1, ran.append, "ours")
        assert ran == []
        assert not launching._turn.acquire(blocking=False)  # it is the other's
    finally:
        signal.signal(signal.SIGALRM, before)
        ends.set()
        other.join()
    launching._by_team(1, ran.append, "ours")
    assert ran == ["the other's", "ours"]


FORKS = """
import os, signal, sys, threading
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from bitnet_np import KVCache, forward, forward_full, prefill
from bitnet_np.testing import random_model

model = random_model(3, width=64, ffn=128, heads=4, kv_heads=2, head_dim=32, n_layers=2, context=1 << 16)
tokens = [1 + i % 7 for i in range(20)]
right = forward_full(model, [tokens])[0]
cache = KVCache(model.config, 3, 1 << 16)

def decode(slot, tokens):
    return np.concatenate([forward(model, [[token]], cache, slots=[slot])[0] for token in tokens])

def in_child(function):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # it would hang
        code = 1
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

# a thread in the middle of a pass
prefill(model, [tokens[:5]], cache, slots=[1])
inside, ends = threading.Event(), threading.Event()

def wait(name, layer, array):
    if name == "Qcur" and layer == 1:
        inside.set()
        ends.wait()

def goes_on():
    empty = not cache.k[:, 1, 5:].any() and not cache.v[:, 1, 5:].any()
    return empty and decode(0, tokens).tobytes() == right.tobytes() and decode(1, tokens[5:]).tobytes() == right[5:].tobytes()

pass_ = threading.Thread(target=lambda: forward(model, [tokens[5:9]], cache, slots=[1], record=wait))
pass_.start()
inside.wait()
assert cache.k[:1, 1, 5:9].all(), "nothing to undo"
codes = [in_child(goes_on)]
ends.set()
pass_.join()
assert cache.lengths.tolist() == [0, 9, 0] and decode(1, tokens[9:]).tobytes() == right[9:].tobytes()

# one that compiles
locked, released = threading.Event(), threading.Event()

def compile():
    with global_compiler_lock:
        locked.set()
        released.wait(1)

thread = threading.Thread(target=compile)
thread.start()
locked.wait()
codes.append(in_child(lambda: global_compiler_lock._lock.acquire(timeout=30)))
thread.join()

# and one at any step
ended = False

def work():
    while not ended:
        decode(2, tokens)

thread = threading.Thread(target=work)
thread.start()
sys.setswitchinterval(1e-5)

def is_sound():
    n = int(cache.lengths[2])
    past = cache.k[:, 2, n:].any() or cache.v[:, 2, n:].any()
    decode(2, tokens[:1])
    return not past and cache.lengths[2] == n + 1 and decode(0, tokens).tobytes() == right.tobytes()

codes += [in_child(is_sound) for _ in range(int(sys.argv[1]))]
ended = True
thread.join()
print(set(codes))
"""


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="forks of threads, as on Linux")
def test_a_child_that_is_forked_while_a_thread_decodes_goes_on():
    """The passes of the threads that it lacks are undone in it."""
    assert run_python(FORKS, 20) == "{0}\n"
