"""GGUF files that the reader refuses: one for each rule, those that llama.cpp's reader is tested with among them, and random damage."""

from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from fuzzing.edits import edited
from gguf_samples import SAMPLE, everything, read, write

from bitnet_np.base.errors import Error, FileFormatError, UnsupportedError
from bitnet_np.base.tensor_types import I2_S
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.testing.gguf_bytes import (
    ARRAY,
    BOOL,
    INT32,
    UINT8,
    UINT32,
    Entry,
    number,
    numbers,
    string,
    text,
    texts,
    u32,
    u64,
)
from bitnet_np.testing.gguf_bytes import gguf as build

# Refusals: one per rule. The message names the file, the key or tensor, the value and what was expected.

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
    "key past the end": (build(key_count=1, tail=u64(300) + NUL), ["key 0 of 1 needs 300 bytes at byte 32", "ends at byte 232"]),
    "key not UTF-8": (build([(b"k\xff", number(UINT32, 1))]), ["key 0 of 1", r"b'k\xff'", "UTF-8"]),
    "key twice": (metadata(number(UINT32, 1), number(UINT32, 1)), ["'some.key'", "twice"]),
    "value type 13": (metadata(u32(13) + NUL), ["'some.key'", "type 13", "0 to 12"]),
    "bools 255": (metadata(numbers(BOOL, [0, 1, 255])), ["'some.key'", "byte 255", "0 or 1"]),
    "string not UTF-8": (metadata(text(b"\xc3")), ["key 'some.key': string 0 is not UTF-8 at byte 0", r"b'\xc3'"]),
    "string past the end": (metadata(text("four", 5)), ["'some.key'", "is 5 bytes long", "ends at byte 77"]),
    "array element type 13": (metadata(u32(ARRAY) + u32(13) + u64(1) + NUL), ["'some.key'", "type 13", "0 to 12"]),
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
    "entry cut off": (build(tensor_count=1, tail=string("name") + u32(2) + u64(32) + u64(2) + b"\0"), ["type of tensor 'name'", "4 bytes"]),
}
UNSUPPORTED: dict[str, tuple[bytes, list[str]]] = {
    **{f"version {n}": (build(version=n), [f"version {n}", "2 or 3"]) for n in (0, 1, 4)},
    "big-endian version 3": (build(version=3 << 24), ["0x03000000", "big-endian", "little-endian"]),
    "array of arrays": (metadata(u32(ARRAY) + u32(ARRAY) + u64(1) + u32(UINT8) + u64(1) + b"1"), ["'some.key'", "array of arrays", "9"]),
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
