"""How deep a run of the tests looks: the usual one shows each promise, `pytest --thorough` more draws and more cases of it.

`@pytest.mark.usual(4)` lets the usual run take four of a test's cases, spread evenly over its table; `@pytest.mark.usual("a", "b")` those
with these ids. `@pytest.mark.usual(0)` leaves the whole test to thorough runs.
"""

from collections import defaultdict

import pytest
from hypothesis import settings

SHARE = 3  # a usual run draws a third of each property's examples
FEWEST = 12  # examples: fewer would miss one of four cases now and then, and the texts that it alone makes the judge say


def usual(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests of a usual run."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return [item for several in cases.values() for item in _some(several)]


def _some(cases: list[pytest.Item]) -> list[pytest.Item]:
    mark = cases[0].get_closest_marker("usual")
    which = mark.args if mark else (len(cases),)
    if isinstance(which[0], str):
        return [case for case in cases if case.callspec.id in which]
    count, last = min(which[0], len(cases)), len(cases) - 1
    return [cases[round(last * k / max(count - 1, 1))] for k in range(count)]


def draw(items: list[pytest.Item], times: float) -> None:
    """Lets each property draw so many times its examples."""
    for test in {item.obj for item in items if hasattr(item.obj, "hypothesis")}:
        own = test._hypothesis_internal_use_settings
        count = max(min(FEWEST, own.max_examples), round(times * own.max_examples))
        test._hypothesis_internal_use_settings = settings(own, max_examples=count)
