"""Processes that fill one cache at once: real ones, on a forced schedule and as they come."""

import pytest
import race_kernel_cache as racing


@pytest.mark.parametrize("order", ["ABBA", "BAAB"])
@pytest.mark.parametrize("case", racing.KERNELS)
def test_held_between_its_writes_a_process_mixes_nothing_up(case, order, tmp_path):
    """The schedule that makes Numba's own cache keep one type's code under the other's name."""
    assert racing.forced(case, order, str(tmp_path)) == {"right": True, "compiled": 0, "wrong": []}


@pytest.mark.parametrize("seed", range(2))
def test_four_processes_at_once_leave_a_cache_without_fault(seed, tmp_path):
    """Many more: scripts/race_kernel_cache.py --rounds 50."""
    assert racing.natural(seed, 4, str(tmp_path)) == {"right": True, "compiled": 0, "wrong": []}
    assert racing.bad_entries(str(tmp_path), recompile=True) == []
