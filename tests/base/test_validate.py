"""Arguments of callers: accepted as Python's own integers, numbers and paths, or refused by name."""

import re
import tracemalloc

import numpy as np
import pytest

import bitnet_np as bn
from bitnet_np.base.errors import FileFormatError, OptionError, SlotError
from bitnet_np.base.validate import integer, number, text_of
from bitnet_np.traces.formats import read_any


def test_integers_of_any_kind_are_pythons():
    for value in (3, np.int8(3), np.uint64(3), np.array(3)):
        assert type(integer("n", value, 0, 9)) is int
    with pytest.raises(SlotError, match=r"^n is -1, expected at least 0$"):
        integer("n", -1, 0, error=SlotError)
    with pytest.raises(OptionError, match=r"^n is 10+\.\.\., expected 0 to 9$"):
        integer("n", 10**200, 0, 9)


def test_numbers_are_real_and_fit_a_float():
    assert [number("x", value) for value in (1, 0.5, np.float32(2), np.int8(3))] == [1.0, 0.5, 2.0, 3.0]
    for value in (None, "1", True, 1j, [1.0], np.ones(1)):
        with pytest.raises(OptionError, match=r"^x is .*, expected a number$"):
            number("x", value)
    with pytest.raises(OptionError, match="that float64 can hold"):
        number("x", 10**400)


@pytest.mark.parametrize("path", [None, 0, 3.5, b"x", ["x"], "a\0b"])
@pytest.mark.parametrize("function", [bn.load, bn.open_gguf, read_any])
def test_what_is_no_path_is_refused(function, path):
    with pytest.raises(OptionError, match=rf"^path is {re.escape(repr(path))}, expected the name of a file or folder$"):
        function(path)


def test_reading_a_text_takes_the_memory_of_the_text(tmp_path):
    """Not that of the longest text allowed, which a system with little memory refuses."""
    path = tmp_path / "t.txt"
    path.write_text("é" * 1000)
    tracemalloc.start()
    try:
        assert text_of(path, 1 << 28) == "é" * 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    assert text_of(path, 2000) == "é" * 1000
    with pytest.raises(FileFormatError, match=r"more than 1,999 bytes, which is the most that it may have$"):
        text_of(path, 1999)
