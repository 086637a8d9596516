"""Bare float32 logits: the shape comes from the caller, and the size of the file must be that of it."""

import numpy as np
import pytest
from trace_files import LOGITS, TOKENS, T, V, all_points, write_trace

from bitnet_np.errors import FileFormatError, OptionError
from bitnet_np.traces.formats import raw
from bitnet_np.traces.points import Key


def test_the_file_is_nothing_but_little_endian_numbers(tmp_path):
    logits = all_points()[LOGITS]
    write_trace(tmp_path / "t.f32", "raw", {LOGITS: logits.astype(">f8")})
    assert (tmp_path / "t.f32").read_bytes() == logits.astype("<f4").tobytes()


@pytest.mark.parametrize(("shape", "rows"), [((T, V), T), ((1, T, V), T), ((T * V,), 1), ((1, T * V), 1)])
def test_the_shape_says_how_many_rows_there_are(tmp_path, shape, rows):
    logits = write_trace(tmp_path / "t.f32", "raw")[LOGITS]
    trace = raw.read(tmp_path / "t.f32", shape)
    assert (list(trace.points), trace.tokens) == ([LOGITS], None)
    np.testing.assert_array_equal(trace.points[LOGITS], logits.reshape(rows, -1))
    np.testing.assert_array_equal(raw.read(tmp_path / "t.f32", shape, TOKENS).tokens, TOKENS)


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ((T, V + 1), FileFormatError, "140 bytes, expected 160 for float32"),
        ((T, V, 2**60), FileFormatError, "140 bytes, expected"),
        ((2, T, V), FileFormatError, "140 bytes, expected 280"),
        ((), OptionError, "expected positive lengths"),
        ((0, V), OptionError, "expected positive lengths"),
    ],
)
def test_shapes_of_other_sizes_are_refused(tmp_path, shape, error, message):
    write_trace(tmp_path / "t.f32", "raw")
    with pytest.raises(error, match=message):
        raw.read(tmp_path / "t.f32", shape)


def test_bare_numbers_are_logits_only(tmp_path):
    with pytest.raises(OptionError, match="this format has no l_out-0, only result_output"), raw.RawWriter(tmp_path / "t.f32") as out:
        out.add(Key("l_out", 0), np.ones((T, V), np.float32))
    assert not list(tmp_path.iterdir())
