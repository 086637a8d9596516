"""The GGUF reader: equal to gguf.GGUFReader on sound files, and quick on a header of full size."""

import math
import os
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from fuzzing.gguf_bytes import BOOL, INT16, UINT8, UINT32, Entry, number, numbers, text, texts
from fuzzing.gguf_bytes import gguf as build
from gguf_samples import SAMPLE, everything, read, write
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_np.base.tensor_types import BY_NUMBER, OF_NUMBER_42, TensorType
from bitnet_np.files.gguf_file import open_gguf


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
    with pytest.raises(TypeError):
        del file.tensors["q"]
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
