"""Threads take the pieces of a loop: each is done once, and nobody waits for a late thread but for the piece that it has."""

import importlib
import sys

import numba
import numpy as np
import pytest
from numba import prange

from bitnet_np.kernels import launching
from bitnet_np.kernels.cache.disk_cache import is_known
from bitnet_np.kernels.fast.emit import emitted
from bitnet_np.kernels.fast.taking import PIECES
from bitnet_np.kernels.launching import SMALL, launch, parallel

pytestmark = pytest.mark.skipif(not is_known(), reason="another version of Numba, which deals")


@parallel
def count(first, times):
    for i in prange(first, times.size):
        times[i] += 1


@parallel
def count_all(times):
    times[:] = times + 1  # Numba makes one loop of it, over two dimensions


@emitted()
def look_again(b):
    """Let the compiler read memory anew."""
    b.fence("seq_cst")


@parallel
def first_waits(done):
    for i in prange(done.size):
        if i == 0:
            for _ in range(100_000_000):
                look_again()
                if done.sum() == done.size - 1:
                    done[0] = 1
                    break
        else:
            done[i] = 1


@pytest.fixture
def threads():
    before = numba.get_num_threads()
    yield numba.set_num_threads
    numba.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_piece_is_done_once(threads, n):
    if n > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("fewer threads here")
    threads(n)
    for size in [*range(8), *(n * PIECES * k + more for k in (1, 2) for more in (-1, 0, 1)), 1000]:
        for first in (0, 3):
            times = np.zeros(size, np.int64)
            launch(count, SMALL + 1, first, times)
            assert times.tolist() == [int(i >= first) for i in range(size)]
    for shape in ((1, 100), (100, 1), (7, 50), (3, 0)):
        times = np.zeros(shape, np.int64)
        launch(count_all, SMALL + 1, times)
        assert (times == 1).all()


def test_what_a_late_thread_has_not_begun_is_done_by_others(threads):
    """Dealt, the first share would be one thread's: its first number would wait for the second, in vain."""
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("one thread here")
    threads(2)
    done = np.zeros(2 * PIECES, np.int64)
    launch(first_waits, SMALL + 1, done)
    assert done.all()


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is not taken here")
@pytest.mark.parametrize("users", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_openmp_is_loaded_with_the_users_settings_or_ours_which_leave_no_trace(monkeypatch, users):
    environment, seen = dict(users), []
    monkeypatch.setattr(importlib, "import_module", lambda name: seen.append((name, dict(environment))))
    launching.load_openmp(environment)
    assert environment == users
    assert seen == ([] if users else [("numba.np.ufunc.omppool", {"GOMP_SPINCOUNT": "10000"})])
