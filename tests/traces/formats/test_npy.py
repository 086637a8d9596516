"""NumPy's .npy, .npz and bare numbers: read and written as NumPy does, without its trust in them."""

import io
import zipfile

import numpy as np
import pytest
from trace_files import LOGITS, NO_LOGITS, NO_NPY, TOKENS, T, V, all_points, load_all, peak_memory, write_trace

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
