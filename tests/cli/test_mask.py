"""`bitnet-np mask`: small masks, row by row. docs/commands.md shows them as they are added."""

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
    result = run("mask", 2, 4, "--json", *options)
    assert (result["shape"], result["seen"]) == ([2, 4], [[*map(int, row)] for row in rows.split()])
    assert {name: n for name, n in result["pattern"].items() if n} == {
        name[2:]: int(n) for name, n in zip(options[::2], options[1::2], strict=True) if name not in ("--past", "--align")
    }


def test_rows_that_see_nothing_are_named(run):
    """With fewer keys than queries, late queries may have none left in their window."""
    words = ("mask", 4, 2, "--align", "top_left", "--window", 1)
    assert run(*words, "--bool").splitlines()[2:] == ["0 0", "0 0", "rows that see nothing, where attention gives zeros: 2, 3"]
    assert run(*words, "--json")["fully_masked"] == [2, 3]
