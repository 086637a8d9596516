"""NumPy's .npy: headers that are not of plain numbers are refused."""

import pytest
from trace_files import load_all, npy_bytes

from bitnet_np.errors import FileFormatError
from bitnet_np.traces.formats import read_any


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
