"""Processes that fill one cache at once: real ones, on a forced schedule and as they come."""

import pytest
import race_kernel_cache as racing


@pytest.mark.parametrize(("case", "order"), [("embed", "ABBA"), ("embed, threads", "BAAB")])
def test_held_between_its_writes_a_process_mixes_nothing_up(case, order, tmp_path):
    """Both schedules that make Numba's own cache mix up the types. The rest: scripts/race_kernel_cache.py --forced."""
    assert racing.forced(case, order, str(tmp_path)) == {"right": True, "compiled": 0, "wrong": []}


def test_four_processes_at_once_leave_a_cache_without_fault(tmp_path):
    """Many more: scripts/race_kernel_cache.py --rounds 50."""
    assert racing.natural(0, 4, str(tmp_path)) == {"right": True, "compiled": 0, "wrong": []}
    assert racing.bad_entries(str(tmp_path), recompile=True) == []
