"""Logits as text: the forms that engines print, and an error that names the line of what is no such form."""

import json

import numpy as np
import pytest
from trace_files import LOGITS, T, V, peak_memory

from bitnet_np.base.errors import FileFormatError, OptionError
from bitnet_np.traces.formats import detect, read_any

ROWS = np.random.default_rng(0).standard_normal((T, V), np.float32)
DIGITS = [[f"{x:.9g}" for x in row] for row in ROWS.tolist()]
BY_LINE = {
    "blanks": "\n".join(map(" ".join, DIGITS)),
    "CSV": "\r\n".join(map(",".join, DIGITS)) + "\r\n\r\n",
    "Rust": "".join(f"[{', '.join(row)}]\n" for row in DIGITS),
}
BY_SHAPE = {
    "a number a line": "\n".join(map("\n".join, DIGITS)),
    "JSON": json.dumps(ROWS.tolist()),
    "indented": json.dumps(ROWS.tolist(), indent=1),
}


@pytest.mark.parametrize("form", [*BY_LINE, *BY_SHAPE])
def test_every_form_gives_the_bits(tmp_path, form):
    path = tmp_path / "t"
    path.write_text((BY_LINE | BY_SHAPE)[form])
    shapes = [(T, V), (-1, V), *([None] if form in BY_LINE else [])]
    assert [detect(path, shape) for shape in shapes] == ["text"] * len(shapes)
    for shape in shapes:
        read = read_any(path, shape=shape).points[LOGITS]
        assert (read.dtype, read.tobytes()) == (np.float32, ROWS.tobytes())


def test_what_is_not_finite_is_for_the_judge_to_say(tmp_path):
    (tmp_path / "t").write_text("1 NaN -inf\n-nan 1e99 2\n")
    np.testing.assert_array_equal(read_any(tmp_path / "t").points[LOGITS], [[1, np.nan, -np.inf], [np.nan, np.inf, 2]])


WRONG = [
    ("1 2\n3 four\n", None, "line 2 has 'four', expected numbers"),
    ("1 2\n3 1_0\n", None, "line 2 has '1?0', expected numbers"),
    ("1 2\n3 \xff\n", None, "line 2 has"),
    ("1 2\n\n3\n", None, "line 3 has 1 numbers, expected 2, as in the first line"),
    ("1 2 3\n4 5\n", (2, 3), "line 2 has 2 numbers, expected 3 or 1"),
    ("1 2 3\n4\n", (-1, 3), "4 numbers, expected 3 for [1, 3]"),
    ("1 2 3\n", (2, 2**60), "line 1 has 3 numbers, expected 1152921504606846976 or 1"),
    (" \n[]\n", None, "no number in it"),
    ("1" * 70_000, None, "line 1 has a word of more than 1024 characters"),
]


@pytest.mark.parametrize(("text", "shape", "said"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named_with_its_line(tmp_path, text, shape, said):
    (tmp_path / "t.txt").write_text(text, "latin-1")
    with pytest.raises(FileFormatError) as caught:
        read_any(tmp_path / "t.txt", "text", shape)
    assert said in str(caught.value)


def test_numbers_one_a_line_need_a_shape(tmp_path):
    (tmp_path / "t").write_text("1\n2\n")
    with pytest.raises(OptionError, match="one number a line, which needs a shape"):
        read_any(tmp_path / "t")


def test_a_long_line_is_read_in_pieces(tmp_path):
    """A list of its words would take twenty times its bytes."""
    (tmp_path / "t").write_text("1 " * (1 << 20))
    assert peak_memory(lambda: read_any(tmp_path / "t").points[LOGITS].sum()) < 12 << 20
    assert read_any(tmp_path / "t").points[LOGITS].shape == (1, 1 << 20)
