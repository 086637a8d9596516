"""Digests of a file, of a folder, and of a model in parts."""

import hashlib

import pytest

from bitnet_np.files.digest import digest_of


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "x").write_bytes(b"abc" * 1000)
    assert digest_of(tmp_path / "x") == hashlib.sha256(b"abc" * 1000).hexdigest()
    with pytest.raises(OSError, match="nowhere"):
        digest_of(tmp_path / "nowhere")


def test_the_digest_of_a_model_in_parts_depends_on_all_of_them(tmp_path):
    parts = [tmp_path / f"m[1]-0000{n}-of-00002.gguf" for n in (1, 2)]
    for path in (*parts, tmp_path / "m1-00001-of-00002.gguf", tmp_path / "m[1]-00001-of-00003.gguf"):
        path.write_bytes(b"abc")
    before = digest_of(parts[0])
    assert before == digest_of(parts[1])
    (tmp_path / "m1-00001-of-00002.gguf").write_bytes(b"other")
    (tmp_path / "m[1]-00001-of-00003.gguf").write_bytes(b"other")
    assert digest_of(parts[0]) == before
    parts[1].write_bytes(b"abd")
    assert digest_of(parts[0]) != before
    with pytest.raises(FileNotFoundError):
        digest_of(tmp_path / "n-00001-of-00002.gguf")


def test_the_digest_of_a_folder_depends_on_every_name_and_every_byte(tmp_path):
    def folder(name, files):
        for path, content in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_bytes(content)
        return digest_of(tmp_path / name)

    first = folder("a", {"x": b"1", "sub/y": b"2"})
    assert first == folder("b", {"sub/y": b"2", "x": b"1"})
    others = [folder("c", {"x": b"1"}), folder("d", {"x": b"2", "sub/y": b"1"}), folder("e", {"x": b"1", "y": b"2"})]
    assert len({first, *others}) == 4
