"""The .safetensors format: what Hugging Face's library writes is read, and a file that breaks a rule is refused."""

import numpy as np
import pytest
from trace_files import safetensors_bytes

from bitnet_np.base.errors import FileFormatError
from bitnet_np.files.safetensors_file import DTYPES, open_safetensors

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def test_what_the_library_writes_is_read(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 100, (3, n)).astype(dtype) for n, (name, dtype) in enumerate(DTYPES.items()) if name != "BF16"}
    numpy.save_file(arrays, tmp_path / "a.safetensors", {"format": "pt"})
    tensors = open_safetensors(tmp_path / "a.safetensors")
    assert tensors.keys() == arrays.keys()
    for name, tensor in tensors.items():
        assert (tensor.type.name, tensor.shape, tensor.data.tobytes()) == (name, arrays[name].shape, arrays[name].tobytes())


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "the header starts with b'', expected a JSON object"),
        (b"{", b"", "the header: not JSON"),
        (b'{"a": {}, "a": {}}', b"", "an object has a key twice"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ is {'a': 1}, expected an object of strings"),
        ({"a": A | {"data_offsets": [4, 12]}}, bytes(12), r"tensor 'a' begins at byte \d+, expected \d+: no holes"),
        ({"a": A, "b": A}, bytes(8), r"tensor 'b' begins at byte \d+, expected \d+: no holes"),
        ({"a": A}, bytes(9), "the tensors end at byte .*, expected the same"),
        ({"a": A | {"shape": [1] * 9}}, bytes(8), "expected at most 8 lengths"),
        ({"a": A | {"shape": [-1, -2]}}, bytes(8), r"has shape \[-1, -2\]"),
        ({"a": A | {"shape": [2**62, 2**62]}}, bytes(8), "expected .* bytes for F32"),
        ({"a": A | {"shape": [0, 2**62], "data_offsets": [0, 0]}}, b"", "expected lengths whose product is at most"),
        ({"a": A | {"data_offsets": [0.0, 8]}}, bytes(8), "expected at most 8 lengths and two offsets"),
        ({"a": A | {"shape": [3]}}, bytes(8), r"has data_offsets \[0, 8\], expected 12 bytes for F32 \[3\]"),
        ({"a": A | {"dtype": ["F32"]}}, bytes(8), "has dtype"),
        ({"a": A | {"dtype": "F8_E4M3"}}, bytes(8), "has dtype 'F8_E4M3', expected one of F64, F32"),
        ({"a": {"dtype": "F32"}}, bytes(8), "expected dtype, shape and data_offsets"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused(tmp_path, header, data, message):
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes(header, data))
    with pytest.raises(FileFormatError, match=rf"a\.safetensors: .*{message}"):
        open_safetensors(path)


@pytest.mark.parametrize("raw", [b"", b"\1\0\0", (2**63).to_bytes(8, "little"), (3).to_bytes(8, "little") + b"{}"])
def test_a_header_longer_than_the_file_is_refused(tmp_path, raw):
    (tmp_path / "a.safetensors").write_bytes(raw)
    with pytest.raises(FileFormatError, match=r"a\.safetensors: (the file is empty|a header of \d+ bytes, expected at most \d)"):
        open_safetensors(tmp_path / "a.safetensors")
