"""Models in several GGUF files, cut as llama.cpp's gguf-split does."""

import re
from pathlib import Path

import pytest
from family_models import assert_refused, drawn
from fuzzing.gguf_bytes import Document
from models import assert_same_bits

from bitnet_np.base.errors import FileFormatError, UnsupportedError
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files.load import load, open_model
from bitnet_np.testing.models import write_gguf

TOKENS = [[0, 22, 3, 3, 7, 1]]
PARTS = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    write_gguf(path, drawn("qwen3", "float32", n_layers=1))
    return path


def cut(whole: Path, folder: Path, **changes):
    """The file's parts, with its keys in the first one. changes: <key>_<number of the part> -> another value of split.<key>; None: none."""
    document, paths = Document.read(whole), []
    for no in range(PARTS):
        paths.append(folder / f"m-{no + 1:05}-of-{PARTS:05}.gguf")
        again = document.entries[:1] if no == changes.get("again") else []
        part = Document(document.keys if no == 0 else [], document.entries[no::PARTS] + again)
        values = {"no": no, "count": PARTS, "tensors.count": len(document.entries)}
        part.put({f"split.{key}": changes.get(f"{key.partition('.')[0]}_{no}", value) for key, value in values.items()})
        paths[-1].write_bytes(part.bytes())
    return paths


def test_any_part_opens_the_model(whole, tmp_path):
    paths, expected = cut(whole, tmp_path), forward_full(load(whole), TOKENS)
    for path in paths:
        assert_same_bits(forward_full(load(path), TOKENS), expected)
        source = open_model(path)
        assert source.path == path
        assert source.size == sum(part.stat().st_size for part in paths)
        assert set(source.tensors) == set(open_model(whole).tensors)


@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_part_is_named(whole, tmp_path, missing):
    paths = cut(whole, tmp_path)
    paths[missing].unlink()
    assert_refused(paths[1], FileFormatError, f"part {missing + 1} of 3 is missing, expected the file {paths[missing]}")


def test_a_part_keeps_its_name(whole, tmp_path):
    other = cut(whole, tmp_path)[1].rename(tmp_path / "m-00003-of-00003.gguf")
    assert_refused(other, FileFormatError, "this is part 2 of 3 by split.no, expected a name that ends in -00002-of-00003.gguf")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"no_1": 2}, FileFormatError, "split.no is 2, expected 1"),
        ({"count_1": 4}, FileFormatError, "split.count is 4, expected 3"),
        ({"count_2": None}, FileFormatError, "'split.count' is missing"),
        ({"no_0": None}, FileFormatError, "'split.no' is missing"),
        ({"count_0": 2000}, UnsupportedError, "split.count is 2000, expected at most 1024 parts"),
        ({"tensors_0": 99}, FileFormatError, "split.tensors.count is 99, but its 3 parts have"),
        ({"again": 1}, FileFormatError, "is also in an earlier part"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(whole, tmp_path, changes, error, message):
    cut(whole, tmp_path, **changes)
    with pytest.raises(error, match=re.escape(str(tmp_path)) + ".*" + re.escape(message)):
        load(tmp_path / f"m-00001-of-{PARTS:05}.gguf")
