"""Memory for results: used again when nobody holds it, never before, and whatever is left in it."""

import threading
import weakref

import numpy as np
import pytest

from bitnet_np.kernels import workspace


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(workspace._this_thread, "pool", workspace.Pool())
    return workspace.pool()


def test_memory_is_lent_again_when_nobody_holds_it(pool):
    first = workspace.empty((70, 100))
    address, view = first.ctypes.data, first[3:]
    assert (first.shape, first.dtype, address % 64) == ((70, 100), np.float32, 0)
    del first
    assert workspace.empty((70, 100)).ctypes.data != address  # a view still holds it
    del view
    held = workspace.empty((35, 100), np.float64), workspace.empty((70, 100))
    assert address in [array.ctypes.data for array in held]


def test_small_and_large_arrays_are_numpys_own(pool):
    assert workspace.empty((3, 5)).base is None
    assert workspace.empty((workspace._LARGEST + 1,), np.uint8).base is None
    assert not pool.returned


def test_an_array_gets_the_smallest_block_that_holds_it(pool):
    """Where none does, a new block takes the place of the largest that is free: no more are kept than were lent at once."""
    sizes = (3 << 15, 1 << 16, 1 << 17)
    arrays = [workspace.empty((size,), np.uint8) for size in sizes]
    middle, small, large = (array.ctypes.data for array in arrays)
    del arrays
    assert workspace.empty((40_000,), np.uint8).ctypes.data == small
    lent = [workspace.empty((size,), np.uint8) for size in (70_000, 40_000, 40_000)]
    assert [array.ctypes.data for array in lent] == [middle, small, large]
    del lent
    beyond = workspace.empty((1 << 18,), np.uint8)
    assert (pool.fresh, pool.kept, pool.lent) == (4, (3 << 15) + (1 << 16), 1 << 18)
    del beyond


def test_a_pool_is_bounded_and_what_is_beyond_it_is_numpys_own(pool, monkeypatch):
    monkeypatch.setattr(workspace, "LIMIT", 1 << 20)
    arrays = [workspace.empty((1 << 19,), np.uint8) for _ in range(5)]
    assert [array.base is None for array in arrays] == [False, False, True, True, True]
    assert (pool.fresh, pool.lent) == (5, 1 << 20)
    del arrays
    assert pool.kept == 1 << 20
    assert len(pool.returned) == 2
    lent = workspace.empty((1 << 19,), np.uint8)
    assert pool.kept == 1 << 19
    del lent


def test_what_is_kept_can_be_given_back(pool):
    kept, lent = workspace.empty((1 << 15,), np.uint8), workspace.empty((1 << 16,), np.uint8)
    del kept
    assert (pool.kept, pool.lent) == (1 << 15, 1 << 16)
    workspace.release()
    assert (pool.kept, pool.lent, len(pool.free) + len(pool.returned)) == (0, 1 << 16, 0)
    lent[:] = 1  # is its holder's still, and its memory is kept when it goes
    address = lent.ctypes.data
    del lent
    assert (pool.kept, pool.lent) == (1 << 16, 0)
    assert workspace.empty((1 << 16,), np.uint8).ctypes.data == address


def test_threads_have_their_own(pool):
    array = workspace.empty((1 << 15,), np.uint8)
    address = array.ctypes.data
    del array
    seen = []
    thread = threading.Thread(target=lambda: seen.append(workspace.empty((1 << 15,), np.uint8).ctypes.data))
    thread.start()
    thread.join()
    assert seen != [address]


# --- weights --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1 << 20, 1 << 18, (1 << 20) + 1, 3 << 20], [1 << 27, 1 << 20], [40 << 20, 40 << 20, 1 << 20]])
def test_arrays_begin_with_a_cache_line_and_do_not_overlap(sizes):
    arrays = [workspace.for_weights(size) for size in sizes]
    for n, array in enumerate(arrays):
        array[:] = n
    assert [array.ctypes.data % 64 for array in arrays] == [0] * len(sizes)
    assert [array.size for array in arrays] == sizes
    assert all((array == n).all() for n, array in enumerate(arrays))


def test_matrices_share_memory_that_goes_with_the_last_of_them():
    first, second = workspace.for_weights(1 << 20), workspace.for_weights(1 << 20)
    assert first.base is second.base
    memory = weakref.ref(first.base)
    del first
    assert memory() is not None
    del second
    assert memory() is None
    assert workspace.for_weights(1 << 20).flags.writeable


def test_small_arrays_keep_no_large_memory():
    assert workspace.for_weights(1000).base is None
    assert workspace.for_weights(1000).dtype == np.uint8
