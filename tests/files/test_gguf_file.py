"""The GGUF reader: equal to gguf.GGUFReader on sound files, and quick on a header of full size."""

import math
import os
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
from fuzzing import gguf_bytes
from fuzzing.edits import edited
from fuzzing.gguf_bytes import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT16,
    INT32,
    UINT8,
    UINT32,
    UINT64,
    Entry,
    number,
    numbers,
    string,
    text,
    texts,
)
from fuzzing.gguf_bytes import gguf as build
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_np.base.errors import Error, FileFormatError, UnsupportedError
from bitnet_np.base.tensor_types import BY_NUMBER, I2_S, OF_NUMBER_42, TensorType
from bitnet_np.files.gguf_file import GGUFFile, open_gguf

SAMPLE = build(
    [
        ("general.architecture", text("bitnet-b1.58")),
        ("general.alignment", number(UINT32, 64)),
        ("layers", number(UINT64, 2)),
        ("epsilon", number(FLOAT32, 1e-5)),
        ("flag", number(BOOL, 1)),
        ("tokens", texts(["a", "", "Ġthe", "🙂"])),
        ("scores", numbers(FLOAT32, [0.5, -1, 2])),
        ("flags", numbers(BOOL, [1, 0, 1])),
    ],
    [Entry("norm", [8]), Entry("q", [128, 3], I2_S.number), Entry("table", [4, 2, 3], 1), Entry("k", [256, 1, 1, 2], 12)],
    alignment=64,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For files that the tests write one after another."""
    return tmp_path_factory.mktemp("gguf")


def write(folder: Path, raw: bytes, name: str = "some.gguf") -> Path:
    path = folder / name
    path.unlink(missing_ok=True)  # a new inode: truncating one that an earlier test still maps would kill the process
    path.write_bytes(raw)
    return path


def read(folder: Path, raw: bytes) -> GGUFFile:
    return open_gguf(write(folder, raw))


def everything(file: GGUFFile) -> None:
    """Decode every value and touch every byte."""
    for value in file.metadata.values():
        np.asarray(value).tobytes()
    for tensor in file.tensors.values():
        assert tensor.data.size == tensor.type.nbytes(math.prod(tensor.shape))
        tensor.data.sum()


def plain(value: object) -> str:
    """Equal for equal values of equal types: tells True from 1 and 1 from 1.0, and lets NaN be NaN."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return repr(list(value) if isinstance(value, tuple) else value)


KIND = gguf.GGUFValueType
ELEMENTS = {KIND[f"UINT{bits}"]: st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64)}
ELEMENTS |= {KIND[f"INT{bits}"]: st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)}
ELEMENTS |= {KIND.FLOAT32: st.floats(width=32), KIND.FLOAT64: st.floats(), KIND.BOOL: st.booleans(), KIND.STRING: st.text()}
DTYPES = {kind: np.dtype(code) for kind, code in gguf.GGUFReader.gguf_scalar_to_np.items()}
VALUES = st.sampled_from(list(ELEMENTS)).flatmap(
    lambda kind: st.one_of(
        st.tuples(st.just(kind), st.none(), ELEMENTS[kind]),
        st.tuples(st.just(KIND.ARRAY), st.just(kind), st.lists(ELEMENTS[kind], min_size=1, max_size=8)),
    )
)
RESERVED = {"general.architecture", "general.alignment"}
KEYS = st.text(min_size=1, max_size=20).filter(lambda key: key not in RESERVED and not key.startswith("GGUF."))
NAMES = st.text(min_size=1, max_size=16)  # 64 bytes of UTF-8 at most
BOTH_KNOW = [kind for kind in gguf.GGML_QUANT_SIZES if kind in BY_NUMBER]
SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(
    values=st.dictionaries(KEYS, VALUES, max_size=6),
    tensors=st.dictionaries(NAMES, st.tuples(st.sampled_from(BOTH_KNOW), SHAPES), max_size=5),
    alignment=st.sampled_from([8, 16, 32, 64, 128, 256]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=150)
def test_reads_what_gguf_wrote_as_gguf_reads_it(folder: Path, values: dict, tensors: dict, alignment: int, seed: int) -> None:
    path = folder / "written.gguf"
    path.unlink(missing_ok=True)
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "bitnet-b1.58")
    writer.add_custom_alignment(alignment)
    for key, (kind, sub_type, value) in values.items():
        writer.add_key_value(key, value, kind, sub_type)
    for name, (kind, blocks) in tensors.items():
        raw = random.integers(0, 256, [*blocks[:-1], blocks[-1] * BY_NUMBER[kind].block_bytes], np.uint8)
        writer.add_tensor(name, raw, raw_dtype=kind)
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write_part()

    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert (ours.version, ours.alignment, ours.size, ours.path) == (3, theirs.alignment, path.stat().st_size, path)
    assert {key: plain(value) for key, value in ours.metadata.items()} == {key: plain(f.contents()) for key, f in fields.items()}
    assert list(ours.metadata) == list(fields)
    for key, (kind, sub_type, _) in values.items():
        if kind == KIND.ARRAY and sub_type != KIND.STRING:
            assert ours.metadata[key].dtype == DTYPES[sub_type]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for a, b in zip(ours.tensors.values(), theirs.tensors, strict=True):
        assert (a.name, a.type.number, a.shape) == (b.name, b.tensor_type, tuple(reversed(b.shape.tolist())))
        assert (a.offset, a.data.size, a.data.tobytes()) == (b.data_offset, b.n_bytes, b.data.tobytes())


TWO = [Entry("a", [3]), Entry("b", [1])]
LIMITS = {
    "nothing": (build(), 0, 0),
    "version 2": (build([("n", number(UINT32, 7))], [Entry("a", [2, 3])], version=2), 1, 1),
    "longest key": (build([("k" * 65535, number(UINT8, 1))]), 1, 0),
    "empty values": (build([("t", text("")), ("ts", texts([])), ("ns", numbers(INT16, [])), ("bs", numbers(BOOL, []))]), 4, 0),
    "longest name": (build([], [Entry("é" * 32, [1, 1, 1, 1])]), 0, 1),
    **{f"alignment {n}": (build([("general.alignment", number(UINT32, n))], TWO, alignment=n), 1, 2) for n in (8, 65536)},
    "any order, with gaps": (build([], [Entry("b", [8], offset=64), Entry("a", [8], offset=0)], tail=bytes(64)), 0, 2),
    "bytes after": (build([], [Entry("a", [8])], tail=b"more"), 0, 1),
}


@pytest.mark.parametrize(("raw", "keys", "tensors"), LIMITS.values(), ids=LIMITS)
def test_the_limits_themselves_are_allowed(folder: Path, raw: bytes, keys: int, tensors: int) -> None:
    file = read(folder, raw)
    everything(file)
    assert (len(file.metadata), len(file.tensors)) == (keys, tensors)


def test_arrays_are_read_only_views_of_one_mapping_and_nothing_can_be_changed(folder: Path) -> None:
    file = read(folder, SAMPLE)
    arrays = [tensor.data for tensor in file.tensors.values()]
    for array in [*arrays, file.metadata["scores"], file.metadata["flags"]]:
        assert not array.flags.owndata
        with pytest.raises(ValueError, match=r"(?i)writeable"):
            array.flags.writeable = True
    assert len({tensor.data.ctypes.data - tensor.offset for tensor in file.tensors.values()}) == 1
    with pytest.raises(TypeError):
        file.metadata["new"] = 1
    assert len(repr(file)) + len(repr(file.tensors["q"])) < 800


def test_the_operating_systems_errors_keep_their_types(folder: Path) -> None:
    with pytest.raises((IsADirectoryError, PermissionError), match=folder.name):  # Windows says the latter
        open_gguf(folder)
    locked = write(folder, SAMPLE, "locked.gguf")
    locked.chmod(0)
    if not os.access(locked, os.R_OK):  # root may read anything
        with pytest.raises(PermissionError, match="locked"):
            open_gguf(locked)


def test_a_header_of_full_size_opens_quickly_and_in_little_memory(folder: Path) -> None:
    """As many tokens and merges as BitNet 2B-4T has."""
    sizes = np.random.default_rng(0).integers(1, 14, 128256 + 280147)
    strings = ["x" * size for size in sizes]
    path = write(folder, build([("tokens", texts(strings[:128256])), ("merges", texts(strings[128256:]))]), "full.gguf")
    times = [time.process_time()]
    for _ in range(3):
        open_gguf(path)
        times.append(time.process_time())
    assert np.diff(times).min() < 0.5
    tracemalloc.start()
    metadata = open_gguf(path).metadata
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert memory < 40 << 20
    assert [*metadata["tokens"], *metadata["merges"]] == strings


@pytest.mark.parametrize("kind", OF_NUMBER_42, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tail", [b"", bytes(16)])  # the last tensor may be padded, too
def test_the_type_of_number_42_is_the_one_that_fills_the_room(tmp_path: Path, kind: TensorType, tail: bytes) -> None:
    shapes = {"a": [256, 9], "b": [512, 16], "c": [1024, 7]}
    entries = [Entry("first", [8])]
    for name, dims in shapes.items():
        entries += [Entry(name, dims, 42, data=bytes(kind.nbytes(math.prod(dims)))), Entry(name + "'", [3])]
    path = tmp_path / "model.gguf"
    path.write_bytes(build([], [*entries, Entry("last", [256, 20], 42, data=bytes(kind.nbytes(5120)))], tail=tail))
    tensors = open_gguf(path).tensors
    assert {tensors[name].type for name in (*shapes, "last")} == {kind}
    assert all(tensors[name].data.size == kind.nbytes(math.prod(dims)) for name, dims in shapes.items())
    assert tensors["a'"].type.name == "F32"


# --- files that are refused ----------------------------------------------------------------------------------------------------------


# One per rule. The message names the file, the key or tensor, the value and what was expected.
NUL = bytes(200)
BIG = 2**64 - 1


def metadata(*values: bytes, key: str = "some.key", tail: bytes = b"") -> bytes:
    return build([("first", number(UINT32, 1)), *((key, value) for value in values)], tail=tail)


def aligned(value: bytes) -> bytes:
    return metadata(value, key="general.alignment")


def tensors(*entries: Entry, alignment: int = 32) -> bytes:
    keys = [("general.alignment", number(UINT32, alignment))] if alignment != 32 else []
    return build(keys, [Entry("first", [8]), *entries], alignment=alignment)


REFUSED: dict[str, tuple[bytes, list[str]]] = {
    "empty file": (b"", ["empty"]),
    "other magic": (build(magic=b"GGML"), ["b'GGML'", "b'GGUF'"]),
    "no version": (b"GGUF\3\0", ["version needs 4 bytes at byte 4", "ends at byte 6"]),
    "tensor count by one": (build(tensor_count=4, tail=bytes(4 * 33 - 8 - 1)), ["4 tensors", "131 bytes"]),
    "key count by one": (build(key_count=3, tail=bytes(3 * 14 - 1)), ["3 keys", "41 bytes"]),
    "one key too few": (build([("k", number(UINT32, 1))], key_count=2, tail=bytes(11)), ["key 1 of 2", "0 bytes long"]),
    "empty key": (build([("", number(UINT32, 1))]), ["key 0 of 1 is 0 bytes long", "1 to 65535"]),
    "long key": (build([("k" * 65536, number(UINT32, 1))]), ["key 0 of 1 is 65536 bytes long", "1 to 65535"]),
    "key past the end": (build(key_count=1, tail=gguf_bytes.u64(300) + NUL), ["key 0 of 1 needs 300 bytes at byte 32", "ends at byte 232"]),
    "key not UTF-8": (build([(b"k\xff", number(UINT32, 1))]), ["key 0 of 1", r"b'k\xff'", "UTF-8"]),
    "key twice": (metadata(number(UINT32, 1), number(UINT32, 1)), ["'some.key'", "twice"]),
    "value type 13": (metadata(gguf_bytes.u32(13) + NUL), ["'some.key'", "type 13", "0 to 12"]),
    "bools 255": (metadata(numbers(BOOL, [0, 1, 255])), ["'some.key'", "byte 255", "0 or 1"]),
    "string not UTF-8": (metadata(text(b"\xc3")), ["key 'some.key': string 0 is not UTF-8 at byte 0", r"b'\xc3'"]),
    "string past the end": (metadata(text("four", 5)), ["'some.key'", "is 5 bytes long", "ends at byte 77"]),
    "array element type 13": (
        metadata(gguf_bytes.u32(ARRAY) + gguf_bytes.u32(13) + gguf_bytes.u64(1) + NUL),
        ["'some.key'", "type 13", "0 to 12"],
    ),
    "array past the end": (metadata(numbers(INT32, [1, 2, 3], 4)), ["'some.key' needs 16 bytes", "file ends"]),
    "endless strings": (metadata(texts(["a", "b"], BIG)), ["'some.key'", f"{BIG} strings", "18 bytes left"]),
    "one string too many, with room": (metadata(texts(["a" * 9, "b" * 9], 3)), ["'some.key'", "string 2 of 3"]),
    "second string past the end": (metadata(texts(["a"], 2), tail=string("bc", 3)), ["'some.key'", "string 1 of 2 is 3"]),
    "alignment 8 or more": (aligned(number(UINT32, 0)), ["'general.alignment' is 0", "power of two from 8 to 65536"]),
    **{f"alignment {n}": (aligned(number(UINT32, n)), [f"'general.alignment' is {n}"]) for n in (1, 4, 12, 24, 2**17)},
    "alignment int32": (aligned(number(INT32, 32)), ["'general.alignment' is 32 of type 5", "uint32"]),
    "alignment array": (aligned(numbers(UINT32, [32])), ["'general.alignment'", "of type 9"]),
    "no name": (tensors(Entry("", [8])), ["name of tensor 1 of 2 is 0 bytes long", "1 to 64"]),
    "long name in bytes": (tensors(Entry("é" * 33, [8])), ["name of tensor 1 of 2 is 66 bytes long"]),
    "name not UTF-8": (tensors(Entry(b"n\xfe", [8])), ["name of tensor 1 of 2", r"b'n\xfe'"]),
    "name twice": (tensors(Entry("first", [8])), ["tensor 'first'", "twice"]),
    "no dimensions": (tensors(Entry("t", [])), ["tensor 't' has 0 dimensions", "1 to 4"]),
    "five dimensions": (tensors(Entry("t", [8, 1, 1, 1, 1])), ["tensor 't' has 5 dimensions", "1 to 4"]),
    "dimension 0": (tensors(Entry("t", [8, 0])), ["tensor 't'", "[8, 0]", "at least 1"]),
    "2**63 elements": (tensors(Entry("t", [2**32, 2**31], data=b"")), ["tensor 't'", str(2**31), "2**63"]),
    "row no multiple of the block": (tensors(Entry("t", [192, 2], I2_S.number)), ["tensor 't'", "192", "I2_S", "128"]),
    "offset not aligned to 64": (tensors(Entry("t", [8], offset=96), alignment=64), ["tensor 't'", "offset 96", "multiple of 64"]),
    "data far away": (tensors(Entry("t", [8], offset=2**64 - 32)), ["tensor 't'", str(2**64 - 32 + 96), "file ends"]),
    "data of I2_S without its trailer": (tensors(Entry("t", [128], 36, data=bytes(63))), ["tensor 't'", "file ends"]),
    "one tensor twice": (tensors(Entry("t", [8], offset=0)), ["tensor 't'", "tensor 'first'", "byte 96", "byte 128 or later"]),
    "long key with a wrong value": (build([("\x1b\n" * 9000, number(BOOL, 2))]), [r"'\x1b\n\x1b", "...", "byte 2"]),
    "one entry too few": (build([], [Entry("t", [8])], tensor_count=2), ["name of tensor 1 of 2 is 0 bytes"]),
    "entry cut off": (
        build(tensor_count=1, tail=string("name") + gguf_bytes.u32(2) + gguf_bytes.u64(32) + gguf_bytes.u64(2) + b"\0"),
        ["type of tensor 'name'", "4 bytes"],
    ),
}
UNSUPPORTED: dict[str, tuple[bytes, list[str]]] = {
    **{f"version {n}": (build(version=n), [f"version {n}", "2 or 3"]) for n in (0, 1, 4)},
    "big-endian version 3": (build(version=3 << 24), ["0x03000000", "big-endian", "little-endian"]),
    "array of arrays": (
        metadata(gguf_bytes.u32(ARRAY) + gguf_bytes.u32(ARRAY) + gguf_bytes.u64(1) + gguf_bytes.u32(UINT8) + gguf_bytes.u64(1) + b"1"),
        ["'some.key'", "array of arrays", "9"],
    ),
    "a removed type": (tensors(Entry("t", [32], 4)), ["tensor 't'", "type 4"]),
    "bitnet.cpp's TL1": (tensors(Entry("t", [128], 38)), ["tensor 't'", "type 38", "TL1", "tile sizes"]),
    "bitnet.cpp's TL2": (
        tensors(Entry("t", [1024, 8], 42, data=bytes(1728))),
        ["tensor 't'", "type 42", "1728 bytes", "Q2_0 has 2304, PQ2_0 has 2176", "TL2", "tile sizes"],
    ),
    "bitnet.cpp's TL2 before others": (
        tensors(Entry("t", [1024, 8], 42, data=bytes(1728)), Entry("u", [1024, 8], 42)),
        ["tensor 't'", "type 42", "1728 bytes", "TL2", "tile sizes"],
    ),
    "bitnet.cpp's TL2 in its earlier versions": (
        tensors(Entry("t", [1024, 8], 39, data=bytes(1728)), Entry("u", [1024, 8], 39, data=bytes(1728))),
        ["tensor 't'", "type 39", "1728 bytes", "MXFP4 has 4352", "TL2", "tile sizes"],
    ),
    "two layouts of the type 42": (
        tensors(Entry("t", [1024, 8], 42, data=bytes(2176)), Entry("u", [1024, 8], 42)),
        ["tensor 't'", "type 42", "2176 bytes"],
    ),
    "rows that no layout of the type 42 has": (tensors(Entry("t", [96, 8], 42, data=bytes(216))), ["type 42", "216 bytes"]),
    "a million keys": (build(key_count=10**6, tail=bytes(14 * 10**6)), ["1000000 keys", "131072"]),
    "a million tensors": (build(tensor_count=10**6, tail=bytes(33 * 10**6)), ["1000000 tensors", "131072"]),
}


CASES = [(FileFormatError, *case) for case in REFUSED.values()] + [(UnsupportedError, *case) for case in UNSUPPORTED.values()]


@pytest.mark.parametrize(("error", "raw", "fragments"), CASES, ids=[*REFUSED, *UNSUPPORTED])
def test_a_file_that_breaks_a_rule_is_refused(folder: Path, error: type[Error], raw: bytes, fragments: list[str]) -> None:
    path = write(folder, raw)
    with pytest.raises(Error) as caught:
        open_gguf(path)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{path}: ")
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 400


def test_every_truncation_is_refused(folder: Path) -> None:
    for size in range(len(SAMPLE)):
        with pytest.raises(FileFormatError, match=r"some\.gguf"):
            read(folder, SAMPLE[:size])
    everything(read(folder, SAMPLE))


def test_a_mutated_file_is_read_or_refused(folder: Path) -> None:
    for n in range(600):
        with suppress(Error):  # any other exception fails the test
            everything(read(folder, edited(SAMPLE, Random(n))))
