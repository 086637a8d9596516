"""NumPy's .npy and bare numbers, as one file of logits and as a folder of points: headers that are not of plain numbers are refused."""

import numpy as np
import pytest
from trace_files import LOGITS, NO_LOGITS, NO_NPY, TOKENS, T, V, all_points, load_all, write_trace

from bitnet_np.base.errors import FileFormatError, OptionError
from bitnet_np.traces.formats import FORMATS, npy, read_any
from bitnet_np.traces.points import Key


@pytest.mark.parametrize("raw_bytes", [*NO_NPY.values(), *NO_LOGITS.values()], ids=[*NO_NPY, *NO_LOGITS])
def test_npy_files_of_other_things_are_refused(tmp_path, raw_bytes):
    (tmp_path / "t.npy").write_bytes(raw_bytes)
    with pytest.raises(FileFormatError):
        load_all(read_any(tmp_path / "t.npy", "logits"))


@pytest.mark.parametrize(("shape", "rows"), [((T, V), T), ((1, T, V), T), ((T * V,), 1), ((1, T * V), 1)])
def test_one_file_is_logits_whatever_their_shape(tmp_path, shape, rows):
    """A .npy says its shape, and the caller that of bare numbers, whose file has nothing else in it."""
    logits = all_points()[LOGITS]
    np.save(tmp_path / "t.npy", logits.astype(np.float16).reshape(shape))
    write_trace(tmp_path / "t.f32", "raw", {LOGITS: logits.astype(">f8")})
    assert (tmp_path / "t.f32").read_bytes() == logits.astype("<f4").tobytes()
    narrow, bare = npy.read_logits(tmp_path / "t.npy").trace(), npy.read_bare(tmp_path / "t.f32", shape).trace()
    for trace, expected in ((narrow, logits.astype(np.float16)), (bare, logits)):
        assert (list(trace.points), trace.tokens) == ([LOGITS], None)
        np.testing.assert_array_equal(trace.points[LOGITS], expected.reshape(rows, -1))
    np.testing.assert_array_equal(npy.read_bare(tmp_path / "t.f32", (T, V)).trace(TOKENS).tokens, TOKENS)


def test_bare_numbers_are_logits_only(tmp_path):
    with pytest.raises(OptionError, match="this format has no l_out-0, only result_output"), FORMATS["raw"].writer(tmp_path / "t") as out:
        out.add(Key("l_out", 0), np.ones((T, V), np.float32))
    assert not list(tmp_path.iterdir())


def test_a_folder_is_read_by_the_names_of_its_files(tmp_path):
    """Other names are listed, and other files are passed over."""
    for name in ("l_out-0", "model.norm", "tokens", "noise"):
        np.save(tmp_path / f"{name}.npy", TOKENS[None].astype(np.int32) if name == "tokens" else np.ones((T, 4)))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "ffn_inp-0.npy").mkdir()
    trace = npy.read_folder(tmp_path).trace()
    assert set(trace.points) == {Key("l_out", 0), Key("result_norm", None)}
    assert trace.ignored == ("noise",)
    np.testing.assert_array_equal(trace.tokens, TOKENS)
    assert trace.tokens.dtype == np.int64


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path):
    np.save(tmp_path / "t.npy", np.ones((T, V)))
    trace = npy.read_logits(tmp_path / "t.npy").trace()
    (tmp_path / "t.npy").write_bytes((tmp_path / "t.npy").read_bytes()[:-8])
    with pytest.raises(FileFormatError, match=r"t\.npy: the file has changed since it was opened"):
        trace.points[LOGITS]
