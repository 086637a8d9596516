"""What a usual run takes of the tests."""

from types import SimpleNamespace

import depth
import pytest


@pytest.mark.parametrize(("mark", "taken"), [(None, "01234"), ((3,), "024"), ((1,), "0"), ((9,), "01234"), ((0,), ""), (("3", "1"), "13")])
def test_a_usual_run_takes_the_cases_that_a_mark_counts_or_names(mark, taken):
    found = None if mark is None else pytest.mark.usual(*mark).mark
    cases = [SimpleNamespace(nodeid=f"t[{i}]", callspec=SimpleNamespace(id=i), get_closest_marker=lambda name: found) for i in "01234"]
    assert "".join(case.callspec.id for case in depth.usual(cases)) == taken
