"""Memory for weights: whole cache lines, nobody else's, and gone with the arrays in it."""

import weakref

import numpy as np
import pytest

from bitnet_np.kernels import huge_pages


@pytest.mark.parametrize("sizes", [[1 << 20, 1 << 18, (1 << 20) + 1, 3 << 20], [1 << 27, 1 << 20], [40 << 20, 40 << 20, 1 << 20]])
def test_arrays_begin_with_a_cache_line_and_do_not_overlap(sizes):
    arrays = [huge_pages.empty(size) for size in sizes]
    for n, array in enumerate(arrays):
        array[:] = n
    assert [array.ctypes.data % 64 for array in arrays] == [0] * len(sizes)
    assert [array.size for array in arrays] == sizes
    assert all((array == n).all() for n, array in enumerate(arrays))


def test_matrices_share_memory_that_goes_with_the_last_of_them():
    first, second = huge_pages.empty(1 << 20), huge_pages.empty(1 << 20)
    assert first.base is second.base
    memory = weakref.ref(first.base)
    del first
    assert memory() is not None
    del second
    assert memory() is None
    assert huge_pages.empty(1 << 20).flags.writeable


def test_small_arrays_keep_no_large_memory():
    assert huge_pages.empty(1000).base is None
    assert huge_pages.empty(1000).dtype == np.uint8
