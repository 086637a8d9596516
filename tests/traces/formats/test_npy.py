"""NumPy's .npy, as one file of logits and as a folder of points: headers that are not of plain numbers are refused."""

import numpy as np
import pytest
from trace_files import LOGITS, TOKENS, T, V, load_all, npy_bytes

from bitnet_np.errors import FileFormatError
from bitnet_np.traces.formats import npy, read_any
from bitnet_np.traces.points import Key


@pytest.mark.parametrize(
    "raw",
    [
        npy_bytes({"descr": "|O", "fortran_order": False, "shape": (1,)}, bytes(8)),
        npy_bytes({"descr": "<U1", "fortran_order": False, "shape": (2, 2)}, bytes(16)),
        npy_bytes({"descr": "<c8", "fortran_order": False, "shape": (1, 1)}, bytes(8)),
        npy_bytes({"descr": [("a", "<f4")], "fortran_order": False, "shape": (1, 1)}, bytes(4)),
        npy_bytes({"descr": "<f4", "fortran_order": False, "shape": (-1, -1)}, bytes(4)),
        npy_bytes({"descr": "<f4", "fortran_order": False, "shape": (True, True)}, bytes(4)),
        npy_bytes({"descr": "<f4", "fortran_order": False, "shape": (1,) * 40}, bytes(4)),
        npy_bytes({"descr": "<f4", "fortran_order": False, "shape": (0, 4)}),
        npy_bytes({"descr": "<f4", "fortran_order": False, "shape": ()}, bytes(4)),
        npy_bytes({"descr": "<f4", "fortran_order": 1, "shape": (1, 1)}, bytes(4)),
        npy_bytes(b"(" * 5000),
        npy_bytes(b"__import__('os').getcwd()"),
        b"\x93NUMPY\x09\x00" + bytes(100),
        b"\x93NUMPY",
    ],
)
def test_npy_files_of_other_things_are_refused(tmp_path, raw):
    (tmp_path / "t.npy").write_bytes(raw)
    with pytest.raises(FileFormatError):
        load_all(read_any(tmp_path / "t.npy"))


@pytest.mark.parametrize(("shape", "expected"), [((T, V), (T, V)), ((1, T, V), (T, V)), ((V,), (1, V))])
def test_one_file_is_logits(tmp_path, shape, expected):
    np.save(tmp_path / "t.npy", np.arange(np.prod(shape), dtype=np.float16).reshape(shape))
    trace = npy.read_logits(tmp_path / "t.npy")
    assert list(trace.points) == [LOGITS]
    np.testing.assert_array_equal(trace.points[LOGITS], np.arange(np.prod(shape)).reshape(expected))


def test_a_folder_is_read_by_the_names_of_its_files(tmp_path):
    """Other names are listed, and other files are passed over."""
    for name in ("l_out-0", "model.norm", "tokens", "noise"):
        np.save(tmp_path / f"{name}.npy", TOKENS if name == "tokens" else np.ones((T, 4)))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "ffn_inp-0.npy").mkdir()
    trace = npy.read_folder(tmp_path)
    assert set(trace.points) == {Key("l_out", 0), Key("result_norm", None)}
    assert trace.ignored == ("noise",)
    np.testing.assert_array_equal(trace.tokens, TOKENS)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path):
    np.save(tmp_path / "t.npy", np.ones((T, V)))
    trace = npy.read_logits(tmp_path / "t.npy")
    (tmp_path / "t.npy").write_bytes((tmp_path / "t.npy").read_bytes()[:-8])
    with pytest.raises(FileFormatError, match=r"t\.npy: the file has changed since it was opened"):
        trace.points[LOGITS]
