"""Traces in files: what is written comes back to the bit, other projects' files mean what they mean there, and no file is believed."""

import io
import json
import os
import shutil
import struct
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_np.errors import EmptyInputError, Error, FileFormatError, OptionError, ShapeError, UnsupportedError
from bitnet_np.judge import receipt
from bitnet_np.traces.formats import FORMATS, aprt, bitnet_rs, detect, llama_logits, nodes, npz, read_any, stages, writer
from bitnet_np.traces.points import LAYER_NAMES, MODEL_NAMES, RECORDED, SCORES, Key

DATA = Path(__file__).parents[1] / "data"
TOKENS = np.array([3, 1, 4, 1, 5])
T, V = len(TOKENS), 7
SUFFIX = {name: format.suffix for name, format in FORMATS.items()}
READABLE = [name for name, format in FORMATS.items() if format.writer and (format.read or name == "raw")]
WHOLE = [name for name in READABLE if FORMATS[name].writer.names is None]
LOGITS = Key("result_output", None)


def points(n_layers=2, seed=0):
    """A point of every kind, with NaN, infinities and negative zeros in them."""
    rng = np.random.default_rng(seed)
    found = {Key("inp_embd", None): rng.standard_normal((T, 6), np.float32)}
    for n in range(n_layers):
        for name in LAYER_NAMES:
            shape = (2, T, T) if name in SCORES else (T,) if name.endswith("_scale") else (T, 6 if name.startswith("attn") else 9)
            values = rng.integers(-127, 128, shape).astype(np.int8) if name.endswith("_codes") else rng.standard_normal(shape, np.float32)
            found[Key(name, n)] = values
    found[Key("l_out", 0)][1, :3] = [np.nan, -np.inf, -0.0]
    found[Key("result_norm", None)] = rng.standard_normal((T, 6), np.float32)
    found[LOGITS] = rng.standard_normal((T, V), np.float32)
    return found


def written(path, format, chosen=None, tokens=TOKENS):
    names = FORMATS[format].writer.names
    kept = {key: array for key, array in (chosen or points()).items() if names is None or key.name in names}
    with FORMATS[format].writer(path, tokens) as out:
        for key, array in kept.items():
            out.add(key, array)
    return kept


def read(path, format):
    return read_any(path, format, shape=(T, V) if format == "raw" else None, tokens=TOKENS)


def load_all(trace):
    return {key: np.array(array) for key, array in trace.points.items()}


# --- round trips ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [name for name in READABLE if name != "llama-logits"])
def test_what_is_written_comes_back_to_the_bit(tmp_path, format):
    kept = written(tmp_path / "t", format)
    trace = read(tmp_path / "t", format)
    assert set(trace.points) == set(kept)
    np.testing.assert_array_equal(trace.tokens, TOKENS)
    assert trace.tokens.dtype == np.int64
    assert str(tmp_path / "t") in trace.origin
    assert trace.ignored == ()
    for key, array in kept.items():
        expected = array[-1:] if format == "aprt" and key == LOGITS else array
        found = trace.points[key]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
        assert (trace.points.entries[key].shape, trace.points.entries[key].dtype) == (found.shape, found.dtype)


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u2", "u1", ">f4", ">i8"])
@pytest.mark.parametrize("format", WHOLE)
def test_every_dtype_comes_back(tmp_path, format, dtype):
    array = np.arange(T * 4).reshape(T, 4).astype(dtype)[:, ::-1]
    written(tmp_path / "t", format, {Key("l_out", 3): array, Key("l_out", 4): np.asfortranarray(array)})
    for point in load_all(read(tmp_path / "t", format)).values():
        np.testing.assert_array_equal(point, array)
        assert point.dtype == np.dtype(dtype).newbyteorder("=")


@pytest.mark.parametrize("format", READABLE)
def test_the_format_is_found_out(tmp_path, format):
    written(tmp_path / "t", format)
    assert detect(tmp_path / "t", (T, V) if format == "raw" else None) == format


@pytest.mark.parametrize("format", WHOLE)
def test_tokens_may_be_missing_and_must_agree(tmp_path, format):
    written(tmp_path / "t", format, tokens=None)
    assert read_any(tmp_path / "t").tokens is None
    np.testing.assert_array_equal(read_any(tmp_path / "t", tokens=TOKENS).tokens, TOKENS)
    written(tmp_path / "u", format)
    with pytest.raises(FileFormatError, match=r"holds the tokens \[3, 1, 4, 1, 5\], expected \[3, 1\]"):
        read_any(tmp_path / "u", tokens=TOKENS[:2])


@pytest.mark.parametrize("format", FORMATS)
def test_files_of_a_suffix_are_written_in_its_format(tmp_path, format):
    if FORMATS[format].writer and SUFFIX[format]:
        assert writer(tmp_path / f"t{SUFFIX[format]}") == (format, FORMATS[format].writer)


@pytest.mark.parametrize("format", WHOLE)
def test_the_same_points_give_the_same_bytes(tmp_path, format):
    for name in "ab":
        written(tmp_path / name, format)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_numpy_itself_reads_the_archive(tmp_path):
    kept = written(tmp_path / "t.npz", "npz")
    with np.load(tmp_path / "t.npz") as archive:
        assert set(archive.files) == {str(key) for key in kept} | {"tokens"}
        np.testing.assert_array_equal(archive["attn_norm-1"], kept[Key("attn_norm", 1)])


def test_archives_of_numpy_are_read(tmp_path):
    kept = {"attn_norm-0": np.ones((T, 4)), "Qcur-0": np.ones((T, 2, 4), np.float16), "model.norm": np.ones((1, T, 4), np.float32)}
    np.savez_compressed(tmp_path / "t.npz", tokens=TOKENS[None].astype(np.int32), other=np.ones(3), **kept)
    trace = read_any(tmp_path / "t.npz")
    assert {str(key): array.shape for key, array in trace.points.items()} == {
        "attn_norm-0": (T, 4),
        "Qcur-0": (T, 8),
        "result_norm": (T, 4),
    }
    assert trace.ignored == ("other",)
    np.testing.assert_array_equal(trace.tokens, TOKENS)


# --- safetensors against the library --------------------------------------------------------------------------------------------------


def test_the_library_reads_our_safetensors(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    kept = written(tmp_path / "t.safetensors", "safetensors")
    found = library.load_file(tmp_path / "t.safetensors")
    np.testing.assert_array_equal(found.pop("tokens"), TOKENS)
    assert {key: array.tobytes() for key, array in found.items()} == {str(key): array.tobytes() for key, array in kept.items()}


def test_we_read_the_librarys_safetensors(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    kept = {str(key): array for key, array in points().items()} | {"tokens": TOKENS, "lm_head.weight": np.ones(3)}
    library.save_file(kept, tmp_path / "t.safetensors", {"made": "elsewhere"})
    trace = read_any(tmp_path / "t.safetensors")
    assert trace.ignored == ("lm_head.weight",)
    assert {str(key): array.tobytes() for key, array in trace.points.items()} == {
        str(key): array.tobytes() for key, array in points().items()
    }


def safetensors_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


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


# --- memory ---------------------------------------------------------------------------------------------------------------------------


def peak(action):
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("format", WHOLE)
def test_a_trace_is_never_in_memory_as_a_whole(tmp_path, format):
    one = np.random.default_rng(0).standard_normal((64, 4096), np.float32)  # 1 MiB

    def write():
        with FORMATS[format].writer(tmp_path / "t") as out:
            for n in range(64):
                out.add(Key("l_out", n), one + n)

    def read_all():
        for key, array in read_any(tmp_path / "t").points.items():
            assert array[0, 0] == one[0, 0] + key.layer

    assert peak(write) < 8 << 20
    assert peak(read_all) < 8 << 20


def npy_bytes(header, data=b""):
    text = (header if isinstance(header, bytes) else repr(header).encode()) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


CLAIMS = {
    "logits": npy_bytes({"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 1 << 20)}, bytes(64)),
    "safetensors": safetensors_bytes({"l_out-0": {"dtype": "F64", "shape": [1 << 40, 8], "data_offsets": [0, 1 << 46]}}, bytes(64)),
    "llama-logits": b"_logits_" + struct.pack("<iii", 2**31 - 1, 2**31 - 1, 2**31 - 1) + bytes(64),
    "aprt": b"APRT" + struct.pack("<II", 0, 2**32 - 1) + bytes(64),
}


@pytest.mark.parametrize("format", CLAIMS)
def test_a_file_cannot_claim_more_than_it_holds(tmp_path, format):
    path = tmp_path / ("lm_head.bin" if format == "aprt" else "t")
    path.write_bytes(CLAIMS[format])

    def attempt():
        with pytest.raises(FileFormatError, match="byte"):
            read_any(path, tokens=TOKENS)

    assert peak(attempt) < 1 << 20


def test_an_archive_that_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "t.npz", **{"l_out-0": np.zeros((1 << 10, 1 << 11), np.float32)})  # 8 MiB
    assert (tmp_path / "t.npz").stat().st_size < 1 << 17
    assert read_any(tmp_path / "t.npz").points[Key("l_out", 0)].shape == (1 << 10, 1 << 11)
    monkeypatch.setattr(npz, "MAX_SMALL", 1 << 20)

    def attempt():
        with pytest.raises(FileFormatError, match=r"bytes that unpack to 8388\d+ in a file of"):
            read_any(tmp_path / "t.npz")

    assert peak(attempt) < 1 << 20


# --- whole or not at all --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [name for name, format in FORMATS.items() if format.writer])
def test_an_exception_leaves_nothing(tmp_path, format):
    if format.startswith("bitnet-rs"):
        pytest.importorskip("blake3")

    class Stop(Exception):
        pass

    def interrupted():
        with FORMATS[format].writer(tmp_path / "t", TOKENS) as out:
            out.add(LOGITS, points()[LOGITS])
            raise Stop

    with pytest.raises(Stop):
        interrupted()
    assert not list(tmp_path.iterdir())
    with pytest.raises(EmptyInputError, match="nothing was written"), FORMATS[format].writer(tmp_path / "t", TOKENS):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", WHOLE)
def test_points_are_written_once_and_have_to_be_points(tmp_path, format):
    one = np.ones((T, 2), np.float32)
    for wrong in (one.astype(complex), one.astype(object), one > 0, np.ones((2, 3, 4)), np.ones((0, 3))):
        with pytest.raises(FileFormatError), FORMATS[format].writer(tmp_path / "t", TOKENS) as out:
            out.add(Key("l_out", 0), wrong)
    with FORMATS[format].writer(tmp_path / "u", TOKENS) as out:
        out.add(Key("l_out", 0), one)
        with pytest.raises(OptionError, match="l_out-0 was written already"):
            out.add(Key("l_out", 0), one)
    assert [path.name for path in tmp_path.iterdir()] == ["u"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_is_neither_file_nor_folder_stays(tmp_path):
    os.mkfifo(tmp_path / "t.npz")
    with pytest.raises(OptionError, match="is there already, expected a file or"):
        written(tmp_path / "t.npz", "npz")
    assert (tmp_path / "t.npz").is_fifo()


def test_files_are_replaced_and_folders_are_not(tmp_path):
    for _ in range(2):
        written(tmp_path / "t.npz", "npz")
    written(tmp_path / "t", "npy")
    for format in ("npy", "npz"):
        with pytest.raises(OptionError, match="is there already"):
            written(tmp_path / "t", format)
    with pytest.raises(OptionError, match="is there already"):
        written(tmp_path / "t.npz", "npy")
    (tmp_path / "empty").mkdir()
    written(tmp_path / "empty", "npy")
    with pytest.raises(OptionError, match="there is no folder"):
        written(tmp_path / "no" / "t.npz", "npz")
    with pytest.raises(OptionError, match="has no name"):
        written("/", "npy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "t", "t.npz"]


# --- damaged files --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Files of every format that is read, each the bytes of a file or of a folder's files by name, small."""
    folder, found = tmp_path_factory.mktemp("samples"), {}
    small = {Key(name, 0): points()[Key(name, 0)] for name in ("attn_norm", "attn_norm_codes", "attn_norm_scale", "kq", "l_out")}
    small[LOGITS] = points()[LOGITS]
    for format in READABLE:
        written(folder / format, format, small)
        found[format] = contents(folder / format)
    np.savez_compressed(folder / "packed", tokens=TOKENS, **{str(key): array for key, array in small.items()})
    found["packed"] = contents(folder / "packed.npz")
    graph = {"s0.attn_norm-0.MUL": (1, 1, T, 4), "s0.Qcur-0.ROPE": (1, T, 2, 2), "s0.kq-0.MUL_MAT": (1, 2, T, 32), "s0.norm.RMS_NORM": (4,)}
    np.savez(folder / "nodes", **{name: np.ones(shape, np.float32) for name, shape in graph.items()})
    found["nodes"] = contents(folder / "nodes.npz")
    return found


def contents(path):
    return {"": path.read_bytes()} if path.is_file() else {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def attempt(folder, files, format):
    """Write the files and read everything in them."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, raw in files.items():
        path = folder / "t" / name if name else folder / "t"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    name = {"packed": "npz"}.get(format, format)
    return load_all(read_any(folder / "t", name, shape=(T, V) if name == "raw" else None, tokens=TOKENS))


DAMAGED = [*READABLE, "packed", "nodes"]


@pytest.mark.parametrize("format", DAMAGED)
def test_a_truncated_file_is_refused_wherever_it_ends(samples, tmp_path, format):
    assert attempt(tmp_path / "f", samples[format], format)
    for name, raw in samples[format].items():
        for end in sorted({*range(0, len(raw), max(1, len(raw) // 30)), *range(min(40, len(raw))), len(raw) - 1}):
            with pytest.raises(Error):
                attempt(tmp_path / "f", samples[format] | {name: raw[:end]}, format)
        if format not in ("npz", "packed", "nodes"):  # zip finds its end from behind
            with pytest.raises(Error):
                attempt(tmp_path / "f", samples[format] | {name: raw + b"\0"}, format)


EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "set", "cut", "insert"]), st.floats(0, 1), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4
)


@pytest.mark.parametrize("format", DAMAGED)
def test_a_mutated_file_is_read_or_refused(samples, tmp_path_factory, format):
    folder = tmp_path_factory.mktemp("mutated")

    @settings(max_examples=80)
    @given(EDITS, st.integers(0, 20), st.booleans())
    def check(edits, which, near_the_start):
        name = sorted(samples[format])[which % len(samples[format])]
        raw = bytearray(samples[format][name])
        for what, where, new in edits:
            at = int(where * (min(len(raw), 200) if near_the_start else len(raw)))
            if what == "flip":
                raw[at : at + 1] = bytes(b ^ new[0] for b in raw[at : at + 1])
            elif what == "set":
                raw[at : at + len(new)] = new
            elif what == "cut":
                del raw[at : at + new[0]]
            else:
                raw[at:at] = new
        with suppress(Error):  # any other exception fails the test
            attempt(folder / "f", samples[format] | {name: bytes(raw)}, format)

    check()


@pytest.mark.parametrize("format", ["npz", "packed"])
def test_wrong_numbers_in_an_archive_are_found_by_their_checksum(samples, tmp_path, format):
    archive = zipfile.ZipFile(io.BytesIO(samples[format][""]))
    info = archive.getinfo("l_out-0.npy")
    raw = bytearray(samples[format][""])
    raw[info.header_offset + 30 + len(info.filename) + info.compress_size // 2 + 20] ^= 1
    with pytest.raises(FileFormatError, match="l_out-0"):
        attempt(tmp_path / "f", {"": bytes(raw)}, format)


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


def test_members_of_an_archive_are_there_once(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.ones((2, 2)))
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("l_out-0.npy", buffer.getvalue())
        archive.writestr("l_out-0", buffer.getvalue())
    with pytest.raises(FileFormatError, match="member 'l_out-0' is there twice"):
        npz.read(tmp_path / "t.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_is_refused(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "t.npz", "w", method) as archive:
        archive.writestr("l_out-0.npy", b"x")
    with pytest.raises(FileFormatError, match="compressed by method"):
        npz.read(tmp_path / "t.npz")


@pytest.mark.parametrize(
    "tokens", [np.array([1.5]), np.array([[1], [2]]), np.array([-1]), np.array([2**31]), np.zeros(0, int), np.array(["a"])]
)
def test_tokens_in_a_file_are_checked(tmp_path, tokens):
    np.savez(tmp_path / "t.npz", tokens=tokens, **{"l_out-0": np.ones((2, 2))})
    with pytest.raises(FileFormatError, match="tokens"):
        read_any(tmp_path / "t.npz")


# --- which format ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"", b"GGUF\x03\0\0\0", bytes(100)])
def test_an_unknown_file_is_refused_with_the_formats(tmp_path, raw):
    (tmp_path / "t").write_bytes(raw)
    with pytest.raises(FileFormatError, match=r"expected one of the formats: npz: .*llama-logits: .*bitnet-rs-lines: "):
        read_any(tmp_path / "t")


def test_an_unknown_folder_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match="a folder with"):
        read_any(tmp_path)


def test_files_that_are_not_there_are_the_systems_errors(tmp_path):
    for format in [None, *(name for name, format in FORMATS.items() if format.read)]:
        with pytest.raises(FileNotFoundError):
            read_any(tmp_path / "t", format, tokens=TOKENS)


def test_options_that_make_no_sense_are_refused(tmp_path):
    written(tmp_path / "t", "npz")
    written(tmp_path / "r", "raw")
    for path, how, message in [
        ("t", {"format": "onnx"}, "format is 'onnx', expected one of npz"),
        ("t", {"format": "npz", "shape": (2, 2)}, "holds shapes"),
        ("r", {"format": "raw"}, "bare float32 numbers, which need a shape"),
        ("r", {"shape": (T, V + 1)}, "140 bytes, expected 160 for float32"),
        ("r", {"shape": (-1, V)}, "expected positive lengths"),
        ("r", {"shape": ()}, "expected positive lengths"),
    ]:
        with pytest.raises(Error, match=message):
            read_any(tmp_path / path, **how)


# --- the table of names ---------------------------------------------------------------------------------------------------------------


def test_the_table_has_every_point_but_codes_and_scales_and_no_name_twice():
    expected = {*RECORDED, *SCORES} - {name for name in RECORDED if name.endswith(("_codes", "_scale"))}
    assert {stage.ours for stage in stages.STAGES} == expected
    for column in range(5):
        names = [stage[column] for stage in stages.STAGES if stage[column]]
        assert len(names) == len(set(names))


def test_names_go_there_and_back():
    for stage in stages.STAGES:
        if stage.ggml is None:
            assert stage.ours.endswith("_in")  # inside a linear, where ggml has nothing
            continue
        layer = None if stage.ours in MODEL_NAMES else 3
        key = Key(stage.ours, layer)
        name, operation = stage.ggml.split(".")
        assert stages.from_ggml(f"s2.{name}{'' if layer is None else '-3'}.{operation}") == (2, key)
        assert stages.find(str(key)) == key
        module = stages.to_transformers(key)
        assert module is None or stages.from_transformers(module) == stages.find(module) == key
        assert stage.aprt is None or stages.from_aprt(stage.aprt) == stage.ours
        assert stage.bitnet_rs is None or stages.from_bitnet_rs(stage.bitnet_rs) == stage.ours
    assert stages.to_transformers(Key("ffn_gate", 2)) == "model.layers.2.mlp.gate_proj"
    assert stages.to_transformers(Key("attn_norm_codes", 2)) is None


@pytest.mark.parametrize(
    "label", ["attn_norm-0.MUL", "s0.attn_norm.MUL", "s0.l_out-0.MUL", "s0.result_norm-1.MUL", "s0.kqv-0.MUL_MAT", "s0.", "s-1.l_out-0.ADD"]
)
def test_other_nodes_are_none_of_ours(label):
    assert stages.from_ggml(label) is None


@pytest.mark.parametrize("module", ["model.layers.0.self_attn", "model.layers.-1", "model.layers.01", "layers.0", "model.norm.0", ""])
def test_other_modules_are_none_of_ours(module):
    assert stages.from_transformers(module) is None


# --- graph nodes ----------------------------------------------------------------------------------------------------------------------


def test_the_recorded_graph_becomes_our_points():
    path = DATA / "bitnet_cpp_tiny_trace.npz"
    trace, raw = nodes.read(path), np.load(path)
    assert len(trace.points) == 60
    assert trace.tokens is None
    assert set(trace.ignored) == {name for name in raw.files if any(word in name for word in ("reshaped", "relu", "kqv-", "s0.norm"))}
    np.testing.assert_array_equal(trace.points[Key("Qcur_rope", 1)], raw["s0.Qcur-1.ROPE"].reshape(17, 256))
    np.testing.assert_array_equal(trace.points[Key("Kcur", 2)], raw["s0.Kcur-2.MUL_MAT"].reshape(17, 128))
    np.testing.assert_array_equal(trace.points[Key("kq", 0)], raw["s0.kq-0.MUL_MAT"][0, :, :, :17] / 8)  # heads of 64
    np.testing.assert_array_equal(trace.points[Key("kq_soft_max", 0)], raw["s0.kq_soft_max_ext-0.SOFT_MAX"][0, :, :, :17])


def test_calls_are_told_apart(tmp_path):
    arrays = {f"s{call}.l_out-0.ADD": np.full((1, 1, rows, 4), call, np.float32) for call, rows in ((1, 1), (0, 3))}
    np.savez(tmp_path / "t.npz", **arrays)
    for call, rows in ((0, 3), (1, 1)):
        trace = nodes.read(tmp_path / "t.npz", call=call)
        assert trace.points[Key("l_out", 0)].shape == (rows, 4)
        assert trace.ignored == (f"s{1 - call}.l_out-0.ADD",)
    with pytest.raises(FileFormatError, match="no point of a forward pass"):
        nodes.read(tmp_path / "t.npz", call=2)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Qcur-0.ROPE", (2, 3, 4, 5)),
        ("l_out-0.ADD", (2, 3, 4)),
        ("l_out-0.ADD", (1, 1, 0, 4)),
        ("kq-0.MUL_MAT", (1, 2, 5, 3)),
        ("kq-0.MUL_MAT", (5,)),
    ],
)
def test_nodes_of_other_shapes_are_refused(tmp_path, name, shape):
    arrays = {"s0.Qcur-0.ROPE": np.ones((1, 5, 2, 4), np.float32)} | {f"s0.{name}": np.ones(shape, np.float32)}
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(FileFormatError, match="has shape"):
        nodes.read(tmp_path / "t.npz")


# --- APRT -----------------------------------------------------------------------------------------------------------------------------


def test_stage_files_are_those_that_apr_reads(tmp_path):
    kept = written(tmp_path / "t", "aprt")
    files = {str(path.relative_to(tmp_path / "t")) for path in (tmp_path / "t").rglob("*.bin")}
    assert {"layer-0/embedding.bin", "layer-1/attn_out.bin", "layer-0/ffn_swigl.bin", "final_norm.bin", "lm_head.bin"} < files
    assert len(files) == len(kept) == 3 + 2 * 14
    raw = (tmp_path / "t" / "layer-1" / "post_ffn_residual.bin").read_bytes()
    assert raw == b"APRT" + struct.pack("<II", 1, T * 9) + kept[Key("l_out", 1)].tobytes()
    raw = (tmp_path / "t" / "lm_head.bin").read_bytes()
    assert raw == b"APRT" + struct.pack("<II", 0xFFFFFFFF, V) + kept[LOGITS][-1].tobytes()


def test_stages_that_are_none_of_ours_are_listed(tmp_path):
    written(tmp_path / "t", "aprt")
    shutil.copy(tmp_path / "t" / "layer-0" / "ffn_gate.bin", tmp_path / "t" / "layer-0" / "ffn_silu.bin")
    assert aprt.read(tmp_path / "t", TOKENS).ignored == (str(Path("layer-0", "ffn_silu.bin")),)


@pytest.mark.parametrize(
    ("file", "raw", "message"),
    [
        ("layer-0/ffn_up.bin", b"APRT" + struct.pack("<II", 1, T) + bytes(4 * T), "header says layer 1"),
        ("ffn_up.bin", b"APRT" + struct.pack("<II", 0, T) + bytes(4 * T), "header says layer 0"),
        ("layer-0/ffn_up.bin", b"APRX" + struct.pack("<II", 0, T) + bytes(4 * T), "starts with b'APRX'"),
        ("layer-0/ffn_up.bin", b"APRT" + struct.pack("<II", 0, T + 1) + bytes(4 * T + 4), "expected a multiple of 5"),
        ("layer-0/ffn_up.bin", b"APRT" + struct.pack("<II", 0, 0), "expected a multiple of 5"),
        ("layer-0/attn_scores.bin", b"APRT" + struct.pack("<II", 0, 10) + bytes(40), "expected a multiple of 25"),
        ("layer-0/ffn_up.bin", b"APRT\0", "bytes, expected"),
    ],
)
def test_stage_files_that_break_a_rule_are_refused(tmp_path, file, raw, message):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(raw)
    with pytest.raises(FileFormatError, match=message):
        aprt.read(tmp_path, TOKENS)
    with pytest.raises(OptionError, match="give the tokens"):
        aprt.read(tmp_path)


# --- llama.cpp's logits ---------------------------------------------------------------------------------------------------------------


def llama_file(tokens, logits):
    """The layout once more, from its description, one number at a time."""
    chunks, context, vocab = logits.shape
    raw = b"_logits_" + struct.pack("<3i", context, vocab, chunks) + struct.pack(f"<{chunks * context}i", *tokens.ravel())
    for chunk in logits:
        for row in chunk[context // 2 : context - 1].astype(np.float64):
            low, high = max(row.min(), row.max() - 16), row.max()
            step = (high - low) / 65535
            codes = [0 if x <= low else round((x - low) / step) for x in row]
            raw += struct.pack("<2f", step, low - np.log(np.exp(row).sum())) + struct.pack(f"<{vocab}H", *codes) + b"\0\0" * (vocab % 2)
    return raw


@pytest.mark.parametrize("vocab", [1, 8, 33])
@pytest.mark.parametrize("context", [3, 4, 9])
def test_log_probabilities_are_those_of_the_logits(tmp_path, vocab, context):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (3, context, vocab)).astype(np.float32)
    logits[0, context // 2, 0] = -40  # below the range
    tokens = rng.integers(0, vocab, (3, context))
    llama_logits.write(tmp_path / "ours.kld", tokens, logits)
    (tmp_path / "theirs.kld").write_bytes(llama_file(tokens, logits))
    for path in (tmp_path / "ours.kld", tmp_path / "theirs.kld"):
        for chunk in range(3):
            trace = llama_logits.read(path, chunk)
            np.testing.assert_array_equal(trace.tokens, tokens[chunk])
            np.testing.assert_array_equal(trace.positions, np.arange(context // 2, context - 1))
            x = logits[chunk, trace.positions].astype(np.float64)
            expected = np.maximum(x, x.max(axis=1, keepdims=True) - 16) - np.log(np.exp(x).sum(axis=1, keepdims=True))
            found = trace.points[Key("log_probs", None)]
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, rtol=0, atol=8 / 65535 + 3e-6)
    a, b = ((tmp_path / f"{name}.kld").read_bytes() for name in ("ours", "theirs"))
    assert len(a) == len(b)
    assert a[: 20 + 12 * context] == b[: 20 + 12 * context]


def test_logits_that_are_all_equal_have_no_step(tmp_path):
    llama_logits.write(tmp_path / "t.kld", [[0, 1, 2]], [np.zeros((3, 4), np.float32)])
    np.testing.assert_allclose(read_any(tmp_path / "t.kld").points[Key("log_probs", None)], np.full((1, 4), -np.log(4)), rtol=1e-6)


def test_logits_the_file_cannot_hold_are_refused(tmp_path):
    good = np.ones((4, 3), np.float32)
    for tokens, logits, error in [
        ([[0, 1, 2, 1]], [good * np.nan], ShapeError),
        ([[0, 1, 2, 1]], [good[:3]], ShapeError),
        ([[0, 1]], [good[:2]], ShapeError),
        ([[0, 1, 2, 1]] * 2, [good], ShapeError),
        ([[0, 1, 2, 1]] * 2, [good, good[:, :2]], ShapeError),
        ([0, 1, 2, 1], [good], ShapeError),
        ([[0, 1, 2, -1]], [good], Error),
    ]:
        with pytest.raises(error):
            llama_logits.write(tmp_path / "t.kld", tokens, logits)
    with pytest.raises(OptionError, match="holds token ids"):
        written(tmp_path / "t.kld", "llama-logits", tokens=None)
    assert not list(tmp_path.iterdir())


def test_chunks_and_tokens_that_are_not_there_are_refused(tmp_path):
    llama_logits.write(tmp_path / "t.kld", [[0, 1, 2, 1]], [np.eye(4, 3, dtype=np.float32)])
    for chunk in (-1, 1):
        with pytest.raises(OptionError, match=f"chunk is {chunk}, the file has chunks 0 to 0"):
            llama_logits.read(tmp_path / "t.kld", chunk)
    raw = bytearray((tmp_path / "t.kld").read_bytes())
    raw[20] = 3
    (tmp_path / "t.kld").write_bytes(raw)
    with pytest.raises(FileFormatError, match="token 3 in chunk 0, expected less than n_vocab 3"):
        llama_logits.read(tmp_path / "t.kld")


# --- BitNet-rs ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def blake3():
    return pytest.importorskip("blake3").blake3


def test_records_are_those_of_bitnet_rs(tmp_path, blake3):
    kept = written(tmp_path / "t", "bitnet-rs")
    names = {path.name for path in (tmp_path / "t").iterdir()}
    assert {"t0_embeddings.trace", "t4_logits.trace", "t2_all_layers_out.trace", "t1_blk1_q_proj.trace", "t0_blk0_ffn_down.trace"} < names
    assert len(names) == T * len(kept)
    q = kept[Key("Qcur", 1)]
    text = (tmp_path / "t" / "t1_blk1_q_proj.trace").read_text()
    assert text.startswith('{\n  "name": "t1/blk1/q_proj",\n  "shape": [')
    assert json.loads(text) == {
        "name": "t1/blk1/q_proj",
        "shape": [1, 1, 9],
        "dtype": "F32",
        "blake3": blake3(q[1].tobytes()).hexdigest(),
        "rms": pytest.approx(np.sqrt(np.mean(q[1].astype(np.float64) ** 2)), rel=1e-15),
        "num_elements": 9,
        "seq": 1,
        "layer": 1,
        "stage": "q_proj",
    }
    found = {(record.seq, record.layer, record.stage): record for record in bitnet_rs.read(tmp_path / "t")}
    assert len(found) == len(names)
    assert found[4, -1, "logits"].key == LOGITS
    assert found[4, -2, "all_layers_out"].key == Key("result_norm", None)
    assert found[3, 0, "attn_norm_codes"].blake3 == blake3(kept[Key("attn_norm_codes", 0)][3].astype("<f4").tobytes()).hexdigest()
    probabilities = found[2, 0, "attn_scores_softmax"]
    assert (probabilities.key, probabilities.shape) == (Key("kq_soft_max", 0), (1, 2, 1, 3))
    assert probabilities.blake3 == blake3(kept[Key("kq_soft_max", 0)][:, 2, :3].tobytes()).hexdigest()
    assert np.isnan(found[1, 0, "l_out"].rms)
    assert json.loads((tmp_path / "t" / "t1_blk0_l_out.trace").read_text())["rms"] is None


@pytest.mark.usefixtures("blake3")
def test_lines_hold_the_same_records(tmp_path):
    written(tmp_path / "t", "bitnet-rs")
    written(tmp_path / "t.jsonl", "bitnet-rs-lines")
    lines, files = ({repr(record) for record in bitnet_rs.read(tmp_path / name)} for name in ("t.jsonl", "t"))
    assert lines == files
    for line in (tmp_path / "t.jsonl").read_text().splitlines():
        assert json.loads(line)["num_elements"] > 0
    for name in ("t", "t.jsonl"):
        with pytest.raises(UnsupportedError, match="hashes and no values"):
            read_any(tmp_path / name)


@pytest.mark.parametrize("format", ["bitnet-rs", "bitnet-rs-lines"])
def test_without_blake3_the_extra_is_named(tmp_path, monkeypatch, format):
    monkeypatch.setitem(__import__("sys").modules, "blake3", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'bitnet_np\[interop\]'"):
        written(tmp_path / "t", format)
    assert not list(tmp_path.iterdir())


RECORD = {"name": "blk0/attn_norm", "shape": [1, 2560], "dtype": "BF16", "blake3": "0" * 64, "rms": 0.9982, "num_elements": 2560}


def test_records_may_be_short_and_may_say_more(tmp_path):
    (tmp_path / "a.trace").write_text(json.dumps(RECORD | {"first_values": [0.1, None]}))
    (record,) = bitnet_rs.read(tmp_path)
    assert (record.seq, record.layer, record.stage, record.key) == (None, None, None, None)
    assert json.loads(bitnet_rs.as_json(record)) == RECORD


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": [1, 2561]},
        {"shape": [-1, -2560]},
        {"shape": [2560.0]},
        {"shape": 2560},
        {"num_elements": True, "shape": [1]},
        {"blake3": "0" * 63},
        {"blake3": "G" * 64},
        {"rms": "1"},
        {"rms": 10**400},
        {"layer": 2**40},
        {"seq": 1.5},
        {"stage": 3},
        {"name": None},
    ],
)
def test_records_that_break_a_rule_are_refused(tmp_path, wrong):
    (tmp_path / "a.trace").write_text(json.dumps(RECORD | wrong))
    with pytest.raises(FileFormatError, match=r"a\.trace: .*expected"):
        bitnet_rs.read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '{"name": 1, "name": 2}', "1" * 10_000, "\ufeff{}", "{}\n{}"])
def test_files_that_are_no_records_are_refused(tmp_path, text):
    (tmp_path / "a.trace").write_text(text, "utf-8")
    with pytest.raises(FileFormatError):
        bitnet_rs.read(tmp_path)


def test_a_folder_without_records_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(FileFormatError, match="no records in it"):
        bitnet_rs.read(tmp_path)


@given(st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=6)), min_size=1, max_size=4))
def test_a_mutated_record_is_read_or_refused(tmp_path_factory, edits):
    raw = bytearray(json.dumps(RECORD | {"seq": 3, "layer": -1, "stage": "logits"}).encode())
    for at, new in edits:
        raw[at : at + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "mutated.jsonl"
    path.write_bytes(raw)
    with suppress(Error):
        bitnet_rs.read(path)


# --- the receipt ----------------------------------------------------------------------------------------------------------------------


def test_a_receipt_has_bitnet_rs_fields(tmp_path):
    ours = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    theirs = ours.copy()
    theirs[1] += np.float32(0.001)
    theirs[2] *= -1
    rows = receipt.positions(ours, theirs)
    value = receipt.receipt(rows, model="m.gguf", backend="bitnet", prompt="p", model_sha256="ab", determinism_seed=None)
    receipt.write(tmp_path / "r.json", value)
    assert json.loads((tmp_path / "r.json").read_text()) == value
    assert list(value) == [
        "version",
        "timestamp",
        "model",
        "backend",
        "prompt",
        "positions",
        "thresholds",
        "rows",
        "summary",
        "model_sha256",
    ]
    assert list(rows[0]) == ["pos", "mse", "max_abs", "kl", "topk_agree", "top5_rust", "top5_cpp"]
    assert rows[0] | {"kl": 0} == rows[0] | {"mse": 0, "max_abs": 0, "kl": 0, "topk_agree": 1}
    assert rows[0]["top5_cpp"] == np.argsort(-ours[0])[:5].tolist()
    assert rows[1]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows[1]["max_abs"] == pytest.approx(0.001, rel=1e-3)
    assert value["summary"] == {
        "all_passed": False,
        "first_divergence": 2,
        "mean_mse": pytest.approx(np.mean((ours.astype(float) - theirs) ** 2)),
        "mean_kl": pytest.approx(np.mean([row["kl"] for row in rows])),
    }
    assert receipt.receipt(rows[:2], model="m", backend="b", prompt="p")["summary"]["all_passed"]


def test_the_divergence_of_a_receipt_is_of_theirs_from_ours():
    ours, theirs = (np.log(np.array([p])) for p in ([0.5, 0.5], [0.9, 0.1]))
    (row,) = receipt.positions(ours + 3, theirs)
    assert row["kl"] == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1))
    assert (row["top5_rust"], row["top5_cpp"], row["topk_agree"]) == ([0, 1], [0, 1], 1)


def test_a_receipt_of_nan_does_not_pass(tmp_path):
    ours = np.ones((1, 4), np.float32)
    rows = receipt.positions(ours, ours * np.nan)
    value = receipt.receipt(rows, model="m", backend="b", prompt="p")
    assert value["summary"] == {"all_passed": False, "first_divergence": 0, "mean_mse": None}
    receipt.write(tmp_path / "r.json", value)


def test_a_receipt_of_nothing_is_refused():
    with pytest.raises(EmptyInputError):
        receipt.receipt([], model="m", backend="b", prompt="p")
    for a, b in [((2, 3), (2, 4)), ((0, 3), (0, 3)), ((3,), (3,))]:
        with pytest.raises(ShapeError):
            receipt.positions(np.ones(a), np.ones(b))
