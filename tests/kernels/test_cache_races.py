"""Processes that fill one cache at once: real ones, on a forced schedule and as they come."""

import cache_races as racing
import numba
import pytest

from bitnet_np.kernels.cache import cache_check


@pytest.mark.parametrize(("case", "order"), [("embed", "ABBA"), ("embed, threads", "BAAB")])
def test_held_between_its_writes_a_process_mixes_nothing_up(case, order, tmp_path):
    """Both schedules that make Numba's own cache mix up the types."""
    assert racing.forced(case, order, str(tmp_path)) == {"right": True, "compiled": 0, "wrong": []}


def test_four_processes_at_once_leave_a_cache_without_fault(tmp_path, monkeypatch):
    assert racing.natural(0, 4, str(tmp_path)) == {"right": True, "compiled": 0, "wrong": []}
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    problems = [entry.problem for entry in cache_check.check(recompile=True)]
    assert problems
    assert not any(problems)
