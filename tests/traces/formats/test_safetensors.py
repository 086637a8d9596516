"""Safetensors: the library reads ours and we read the library's. Other broken headers: files/test_safetensors_file.py."""

import numpy as np
import pytest
from trace_files import TOKENS, safetensors_bytes, write_trace

from bitnet_np.traces.formats import read_any
from bitnet_np.traces.points import Key


def test_the_library_reads_ours_and_we_read_the_librarys(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    expected = {str(key): array.tobytes() for key, array in write_trace(ours, "safetensors").items()}
    tensors = library.load_file(ours)
    library.save_file(tensors | {"lm_head.weight": np.ones(3)}, theirs, {"made": "elsewhere"})
    np.testing.assert_array_equal(tensors.pop("tokens"), TOKENS)
    trace = read_any(theirs)
    assert trace.ignored == ("lm_head.weight",)
    assert {key: array.tobytes() for key, array in tensors.items()} == expected
    assert {str(key): array.tobytes() for key, array in trace.points.items()} == expected


def test_bfloat16_becomes_float32(tmp_path):
    values = np.array([[1.0, -2.5, np.nan]], np.float32)
    entry = {"dtype": "BF16", "shape": [1, 3], "data_offsets": [0, 6]}
    (tmp_path / "t").write_bytes(safetensors_bytes({"l_out-0": entry}, (values.view(np.uint32) >> 16).astype("<u2").tobytes()))
    np.testing.assert_array_equal(read_any(tmp_path / "t").points[Key("l_out", 0)], values)
