"""What commands print: tables that line up, JSON that any reader takes, and nothing that garbles a terminal."""

import math

import numpy as np
import pytest

from bitnet_np.base.tables import printable, table
from bitnet_np.cli.inspect import plain
from bitnet_np.cli.printing import fitted, outcome


def test_what_is_not_there_is_a_dash_on_the_right():
    assert table(("name", "NMSE"), [("a", None)]) == "name  NMSE\na        -"


def test_lines_fit_a_terminal_and_stay_as_they_are_elsewhere():
    text = "note: " + "word " * 20 + "end\n\n  indented " + "x" * 50
    assert fitted(text, None) == text
    lines = fitted(text, 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert [line[:4] for line in lines] == ["note", "  wo", "  wo", "", "  in", "    "]
    assert "".join(fitted(text, 40).split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("environment", "colour"), [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_the_outcome_has_a_colour_on_a_terminal_alone(monkeypatch, environment, colour):
    """As no-color.org says: an empty NO_COLOR forbids nothing."""
    assert outcome(True, ": fine") == "PASS: fine"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert outcome(True, ": fine") == ("\033[1;32mPASS\033[0m: fine" if colour else "PASS: fine")
    assert outcome(False, "") == ("\033[1;31mFAIL\033[0m" if colour else "FAIL")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("Größe 你好", "Größe 你好"), ("a\nb\t\x07", r"a\nb\t\x07"), ("\u202e\x9b", r"\u202e\x9b"), ("\udc80", r"\udc80"), ("", "")],
)
def test_what_is_not_printable_is_escaped(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (3, 3),
        (True, True),
        ("text", "text"),
        (0.5, 0.5),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (np.arange(7), "[7 values]"),
        ((b"a", b"b"), "[2 values]"),
        ({"a": [1]}, '{"a": [1]}'),
        ([1, None], "[1, null]"),
    ],
)
def test_metadata_is_plain_in_json(value, expected):
    assert plain(value) == expected
