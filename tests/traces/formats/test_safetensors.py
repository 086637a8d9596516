"""Safetensors: the library reads ours and we read the library's, and broken headers are refused."""

import struct

import numpy as np
import pytest
from trace_files import TOKENS, all_points, safetensors_bytes, write_trace

from bitnet_np.errors import FileFormatError
from bitnet_np.traces.formats import read_any
from bitnet_np.traces.points import Key


def test_the_library_reads_our_safetensors(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    written = write_trace(tmp_path / "t.safetensors", "safetensors")
    tensors = library.load_file(tmp_path / "t.safetensors")
    np.testing.assert_array_equal(tensors.pop("tokens"), TOKENS)
    assert {key: array.tobytes() for key, array in tensors.items()} == {str(key): array.tobytes() for key, array in written.items()}


def test_we_read_the_librarys_safetensors(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    tensors = {str(key): array for key, array in all_points().items()} | {"tokens": TOKENS, "lm_head.weight": np.ones(3)}
    library.save_file(tensors, tmp_path / "t.safetensors", {"made": "elsewhere"})
    trace = read_any(tmp_path / "t.safetensors")
    assert trace.ignored == ("lm_head.weight",)
    assert {str(key): array.tobytes() for key, array in trace.points.items()} == {
        str(key): array.tobytes() for key, array in all_points().items()
    }


def test_bfloat16_becomes_float32(tmp_path):
    values = np.array([[1.0, -2.5, np.nan]], np.float32)
    entry = {"dtype": "BF16", "shape": [1, 3], "data_offsets": [0, 6]}
    (tmp_path / "t").write_bytes(safetensors_bytes({"l_out-0": entry}, (values.view(np.uint32) >> 16).astype("<u2").tobytes()))
    np.testing.assert_array_equal(read_any(tmp_path / "t").points[Key("l_out", 0)], values)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "expected a JSON object"),
        (b'{"l_out-0": 1, "l_out-0": 2}', "an object has a key twice"),
        (b"{" * 100_000, "not JSON"),
        ({"l_out-0": 3}, "expected dtype, shape and data_offsets"),
        ({"l_out-0": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8], "more": 1}}, "expected dtype, shape and data_offsets"),
        ({"l_out-0": {"dtype": "F3", "shape": [1, 2], "data_offsets": [0, 8]}}, "has dtype 'F3', expected one of F64"),
        ({"l_out-0": {"dtype": ["F32"], "shape": [1, 2], "data_offsets": [0, 8]}}, "has dtype"),
        ({"l_out-0": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}, "has shape"),
        ({"l_out-0": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, "has shape"),
        ({"l_out-0": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}}, "expected .* bytes for F32"),
        ({"l_out-0": {"dtype": "F32", "shape": [1, 2], "data_offsets": [8, 0]}}, "expected 8 bytes"),
        ({"l_out-0": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0.0, 8]}}, "expected two"),
        ({"l_out-0": {"dtype": "F32", "shape": [1, 1], "data_offsets": [4, 8]}}, "begins at byte 4 of the data, expected 0"),
        ({"l_out-0": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}, "the tensors end at byte .*, the file at"),
        ({"l_out-0": {"dtype": "F32", "shape": [1, 3], "data_offsets": [0, 12]}}, "the tensors end at byte .*, the file at"),
        ({"__metadata__": {"a": 1}}, "expected an object of strings"),
        ({"other": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}, "no point of a forward pass in it.*it has 'other'"),
        (
            {name: {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]} for name in ("l_out-0", "l_out-1")},
            "begins at byte 0 of the data, expected 8",
        ),
        (
            {
                "model.norm": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]},
                "result_norm": {"dtype": "F32", "shape": [1, 1], "data_offsets": [4, 8]},
            },
            "result_norm is there twice",
        ),
    ],
)
def test_safetensors_that_break_a_rule_are_refused(tmp_path, header, message):
    (tmp_path / "t.safetensors").write_bytes(safetensors_bytes(header, bytes(8)))
    with pytest.raises(FileFormatError, match=message):
        read_any(tmp_path / "t.safetensors")


@pytest.mark.parametrize("size", [0, 9, 2**24 + 1, 2**63, 2**64 - 1])
def test_safetensors_headers_longer_than_the_file_are_refused(tmp_path, size):
    (tmp_path / "t.safetensors").write_bytes(struct.pack("<Q", size) + b"{}      ")
    with pytest.raises(FileFormatError):
        read_any(tmp_path / "t.safetensors")
