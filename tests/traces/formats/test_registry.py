"""The table of formats: what is none of them, or does not go with one, is refused."""

import pytest
from trace_files import T, V, write_trace

from bitnet_np.base.errors import Error, FileFormatError
from bitnet_np.traces.formats import read_any


@pytest.mark.parametrize("raw", [b"", b"GGUF\x03\0\0\0", bytes(100)])
def test_an_unknown_file_is_refused_with_the_formats(tmp_path, raw):
    (tmp_path / "t").write_bytes(raw)
    with pytest.raises(FileFormatError, match=r"expected one of the formats: npz: .*llama-logits: .*bitnet-rs-lines: "):
        read_any(tmp_path / "t")


def test_an_unknown_folder_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match="a folder with"):
        read_any(tmp_path)


def test_options_that_make_no_sense_are_refused(tmp_path):
    write_trace(tmp_path / "t", "npz")
    write_trace(tmp_path / "r", "raw")
    for path, how, message in [
        ("t", {"format": "onnx"}, "format is 'onnx', expected one of npz"),
        ("t", {"format": "npz", "shape": (2, 2)}, "holds shapes"),
        ("r", {"format": "raw"}, "bare float32 numbers, which need a shape"),
        ("r", {"shape": (T, V + 1)}, "140 bytes, expected 160 for float32"),
        ("r", {"shape": (-1, V + 1)}, "140 bytes, expected 128 for float32"),
        ("r", {"shape": (-1,)}, "expected positive lengths"),
        ("r", {"shape": (0, V)}, "expected positive lengths"),
    ]:
        with pytest.raises(Error, match=message):
            read_any(tmp_path / path, **how)
