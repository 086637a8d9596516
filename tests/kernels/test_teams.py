"""Members of a team take the pieces of a loop: each is done once, and nobody waits for a late one but for the piece that it has."""

import importlib
import sys
import threading

import numba
import numpy as np
import pytest

from bitnet_np.kernels import launching
from bitnet_np.kernels.fast.emit import emitted
from bitnet_np.kernels.fast.team import PIECES
from bitnet_np.kernels.launching import SMALL, launch, parallel, shared
from bitnet_np.kernels.sharing import Sharing


@parallel
def count(team, times):
    for i in shared(team, times.size):
        times[i] += 1


@emitted()
def look_again(b):
    """Let the compiler read memory anew."""
    b.fence("seq_cst")


@parallel
def first_waits(team, done):
    for i in shared(team, done.size):
        if i == 0:
            for _ in range(100_000_000):
                look_again()
                if done.sum() == done.size - 1:
                    done[0] = 1
                    break
        else:
            done[i] = 1


@pytest.fixture
def threads(monkeypatch):
    """Sets the number of threads, which share kernels however busy the machine is."""
    monkeypatch.setattr(launching, "_sharing", Sharing())
    return numba.set_num_threads


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_piece_is_done_once(threads, n):
    if n > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("fewer threads here")
    threads(n)
    for size in [*range(8), *(n * PIECES * k + more for k in (1, 2) for more in (-1, 0, 1)), 1000]:
        times = np.zeros(size, np.int64)
        launch(count, SMALL + 1, times)
        assert (times == 1).all()


def test_what_a_late_thread_has_not_begun_is_done_by_others(threads):
    """Dealt, the first share would be one thread's: its first number would wait for the second, in vain."""
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("one thread here")
    threads(2)
    done = np.zeros(2 * PIECES, np.int64)
    launch(first_waits, SMALL + 1, done)
    assert done.all()


@parallel
def wait(team, flag, seen):
    for _ in shared(team, 1):
        for _ in range(1_000_000_000):
            look_again()
            if flag[0]:
                seen[0] = 1
                break


def test_other_python_threads_run_meanwhile_where_there_is_much_to_do(threads):
    threads(1)
    flag, seen = np.zeros((2, 1), np.int64)
    launch(wait, SMALL + 1, flag + 1, seen.copy())  # compiled
    timer = threading.Timer(0.05, lambda: flag.__setitem__(0, 1))
    timer.start()
    launch(wait, SMALL + 1, flag, seen)
    assert seen[0]
    timer.join()


@parallel
def allocate(team, sizes, out):
    for i in shared(team, sizes.size):
        out[i] = np.empty(sizes[i], np.uint8).size


@pytest.mark.parametrize("work", [0, SMALL + 1])
@pytest.mark.parametrize("place", [0, 99])
def test_memory_that_cannot_be_had_is_an_error_whichever_member_asks(threads, work, place):
    threads(min(2, numba.config.NUMBA_NUM_THREADS))
    sizes, out = np.full(100, 10), np.zeros(100, np.int64)
    launch(allocate, work, sizes, out)
    sizes[place] = 1 << 60
    with pytest.raises(MemoryError, match="a kernel has no memory for its work"):
        launch(allocate, work, sizes, out)
    sizes[place] = 11
    launch(allocate, work, sizes, out)
    assert (out == sizes).all()


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is not taken here")
@pytest.mark.parametrize("users", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_openmp_is_loaded_with_the_users_settings_or_ours_which_leave_no_trace(monkeypatch, users):
    environment, seen = dict(users), []
    monkeypatch.setattr(importlib, "import_module", lambda name: seen.append((name, dict(environment))))
    launching.load_openmp(environment)
    assert environment == users
    assert seen == ([] if users else [("numba.np.ufunc.omppool", {"GOMP_SPINCOUNT": "10000"})])
