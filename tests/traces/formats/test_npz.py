"""NumPy's archives: read and written as NumPy does, without its trust in them."""

import io
import zipfile

import numpy as np
import pytest
from trace_files import load_all, peak_memory, write_trace

from bitnet_np.base.errors import FileFormatError
from bitnet_np.traces.formats import npy, read_any
from bitnet_np.traces.points import Key


def test_numpy_itself_reads_the_archive(tmp_path):
    written = write_trace(tmp_path / "t.npz", "npz")
    with np.load(tmp_path / "t.npz") as archive:
        assert set(archive.files) == {str(key) for key in written} | {"tokens"}
        np.testing.assert_array_equal(archive["attn_norm-1"], written[Key("attn_norm", 1)])


def test_an_archive_that_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "t.npz", **{"l_out-0": np.zeros((1 << 10, 1 << 11), np.float32)})  # 8 MiB
    assert (tmp_path / "t.npz").stat().st_size < 1 << 17
    assert read_any(tmp_path / "t.npz").points[Key("l_out", 0)].shape == (1 << 10, 1 << 11)
    monkeypatch.setattr(npy, "MAX_SMALL", 1 << 20)

    def attempt():
        with pytest.raises(FileFormatError, match=r"bytes that unpack to 8388\d+ in a file of"):
            read_any(tmp_path / "t.npz")

    assert peak_memory(attempt) < 1 << 20


def test_an_archive_of_many_members_that_unpack_to_far_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(npy, "MAX_SMALL", 1 << 20)
    np.savez_compressed(tmp_path / "t.npz", **{f"l_out-{n}": np.zeros(1 << 17, np.float32) for n in range(20)})
    with pytest.raises(FileFormatError, match=r"t\.npz: \d{5} bytes that unpack to 1048\d+, expected at most 64 times as many"):
        read_any(tmp_path / "t.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_wrong_numbers_in_an_archive_are_found_by_their_checksum(tmp_path, save):
    save(tmp_path / "t.npz", **{"l_out-0": np.random.default_rng(0).standard_normal((5, 9))})
    raw = bytearray((tmp_path / "t.npz").read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "t.npz").write_bytes(raw)
    with pytest.raises(FileFormatError, match="l_out-0"):
        load_all(read_any(tmp_path / "t.npz"))


def test_members_of_an_archive_are_there_once(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.ones((2, 2)))
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("l_out-0.npy", buffer.getvalue())
        archive.writestr("l_out-0", buffer.getvalue())
    with pytest.raises(FileFormatError, match="member 'l_out-0' is there twice"):
        npy.read_npz(tmp_path / "t.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_is_refused(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "t.npz", "w", method) as archive:
        archive.writestr("l_out-0.npy", b"x")
    with pytest.raises(FileFormatError, match="compressed by method"):
        npy.read_npz(tmp_path / "t.npz")


@pytest.mark.parametrize(
    "tokens", [np.array([1.5]), np.array([[1], [2]]), np.array([-1]), np.array([2**31]), np.zeros(0, int), np.array(["a"])]
)
def test_tokens_in_a_file_are_checked(tmp_path, tokens):
    np.savez(tmp_path / "t.npz", tokens=tokens, **{"l_out-0": np.ones((2, 2))})
    with pytest.raises(FileFormatError, match="tokens"):
        read_any(tmp_path / "t.npz")
