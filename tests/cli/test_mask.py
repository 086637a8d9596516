"""`bitnet-np mask`: small masks, row by row."""

import pytest


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        (["--past", "0"], "1000 1100"),
        (["--window", "2"], "0110 0011"),
        (["--window", "1", "--sinks", "1"], "1010 1001"),
        (["--block", "3"], "1110 0001"),
        (["--prefix", "4"], "1111 1111"),
        (["--align", "top_left"], "1000 1100"),
    ],
)
def test_every_pattern_has_its_option(run, options, rows):
    assert run("mask", 2, 4, "--bool", *options).replace(" ", "").split() == rows.split()


def test_json_says_what_is_seen(run):
    assert run("mask", 2, 3, "--window", 2, "--json") == {
        "shape": [2, 3],
        "pattern": {"window": 2, "prefix": 0, "block": 0, "sinks": 0},
        "seen": [[1, 1, 0], [0, 1, 1]],
        "fully_masked": [],
    }


def test_rows_that_see_nothing_are_named(run):
    """With fewer keys than queries, late queries may have none left in their window."""
    assert run("mask", 4, 2, "--align", "top_left", "--window", 1, "--bool").splitlines()[2:] == [
        "0 0",
        "0 0",
        "rows that see nothing, where attention gives zeros: 2, 3",
    ]
