"""What holds for every format: what is written comes back to the bit, in little memory, and no damaged file is believed."""

import struct

import numpy as np
import pytest
from fuzzing import cases, seeds
from trace_files import (
    LOGITS,
    READABLE,
    TOKENS,
    WHOLE,
    T,
    V,
    contents,
    load_all,
    npy_bytes,
    peak_memory,
    read_trace,
    safetensors_bytes,
    write_trace,
)

from bitnet_np.base.errors import Error, FileFormatError
from bitnet_np.traces.formats import FORMATS, detect, read_any
from bitnet_np.traces.points import Key

# --- round trips ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [name for name in READABLE if name != "llama-logits"])
def test_what_is_written_comes_back_to_the_bit(tmp_path, format):
    written = write_trace(tmp_path / "t", format)
    assert detect(tmp_path / "t", (T, V) if format == "raw" else None) == format
    trace = read_trace(tmp_path / "t", format)
    assert set(trace.points) == set(written)
    np.testing.assert_array_equal(trace.tokens, TOKENS)
    assert trace.tokens.dtype == np.int64
    assert str(tmp_path / "t") in trace.origin
    assert trace.ignored == ()
    for key, array in written.items():
        expected = array[-1:] if format == "aprt" and key == LOGITS else array
        read_back = trace.points[key]
        assert (read_back.dtype, read_back.shape) == (expected.dtype, expected.shape)
        assert read_back.tobytes() == expected.tobytes()
        assert (trace.points.entries[key].shape, trace.points.entries[key].dtype) == (read_back.shape, read_back.dtype)


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u2", "u1", ">f4", ">i8"])
@pytest.mark.parametrize("format", WHOLE)
def test_every_dtype_comes_back(tmp_path, format, dtype):
    array = np.arange(T * 4).reshape(T, 4).astype(dtype)[:, ::-1]
    write_trace(tmp_path / "t", format, {Key("l_out", 3): array, Key("l_out", 4): np.asfortranarray(array)})
    for point in load_all(read_trace(tmp_path / "t", format)).values():
        np.testing.assert_array_equal(point, array)
        assert point.dtype == np.dtype(dtype).newbyteorder("=")


@pytest.mark.parametrize("format", WHOLE)
def test_tokens_may_be_missing_and_must_agree(tmp_path, format):
    write_trace(tmp_path / "t", format, tokens=None)
    assert read_any(tmp_path / "t").tokens is None
    np.testing.assert_array_equal(read_any(tmp_path / "t", tokens=TOKENS).tokens, TOKENS)
    write_trace(tmp_path / "u", format)
    with pytest.raises(FileFormatError, match=r"holds the tokens \[3, 1, 4, 1, 5\], expected \[3, 1\]"):
        read_any(tmp_path / "u", tokens=TOKENS[:2])


@pytest.mark.parametrize("format", WHOLE)
def test_the_same_points_give_the_same_bytes(tmp_path, format):
    for name in "ab":
        write_trace(tmp_path / name, format)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


# --- memory ---------------------------------------------------------------------------------------------------------------------------


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

    assert peak_memory(write) < 8 << 20
    assert peak_memory(read_all) < 8 << 20


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

    assert peak_memory(attempt) < 1 << 20


# --- damaged files --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """The fuzzer's small files of every format."""
    folder = tmp_path_factory.mktemp("dumps")
    seeds.write_dumps(folder)
    return cases.read_seeds(sorted(folder.iterdir()))


@pytest.mark.parametrize("format", [*READABLE, "packed", "nodes"])
def test_a_truncated_file_is_refused_wherever_it_ends(dumps, tmp_path, format):
    (files,) = (seed.files for seed in dumps if seed.name == format)

    def use(**changed):
        cases.write(tmp_path / format, files | changed)
        cases.use_dump(tmp_path / format, 1)

    use()
    for name, raw in files.items():
        longer = [] if name.endswith(".npz") else [raw + b"\0"]  # zip finds its end from behind
        ends = {*range(0, len(raw), max(1, len(raw) // 30)), *range(min(40, len(raw))), len(raw) - 1}
        for wrong in [*longer, *(raw[:end] for end in sorted(ends))]:
            with pytest.raises(Error):
                use(**{name: wrong})


def test_a_damaged_file_is_read_or_refused(dumps, tmp_path):
    assert {cases.attempt(dumps, n, tmp_path) for n in range(1500)} == {"ran", "refused"}


# --- what is none of the formats, or does not go with one ----------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"", b"GGUF\x03\0\0\0", bytes(100)])
def test_an_unknown_file_is_refused_with_the_formats(tmp_path, raw):
    (tmp_path / "t").write_bytes(raw)
    with pytest.raises(FileFormatError, match=r"expected a dump in one of the formats npz, .*, bitnet-rs-lines, "):
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
