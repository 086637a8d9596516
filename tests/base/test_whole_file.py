"""Files that appear when they are whole."""

import os
import threading

import pytest

from bitnet_np.base.whole_file import whole_file


def test_a_file_is_there_at_the_end_and_nothing_else(tmp_path):
    path = tmp_path / "f.bin"
    path.write_bytes(b"old")
    with whole_file(path) as part, whole_file(path) as other:  # two who write it do not meet
        part.write_bytes(b"new")
        other.write_bytes(b"other")
        assert part.parent == tmp_path
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("there", [True, False])
def test_what_fails_leaves_what_was(tmp_path, there):
    path = tmp_path / "f.bin"
    if there:
        path.write_bytes(b"old")

    def fails():
        with whole_file(path) as part:
            part.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert [(p, p.read_bytes()) for p in tmp_path.iterdir()] == ([(path, b"old")] if there else [])


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_a_link_stays_one(tmp_path):
    (tmp_path / "far").mkdir()
    link, path = tmp_path / "link", tmp_path / "far" / "f.bin"
    link.symlink_to(path)
    with whole_file(link) as part:
        part.write_bytes(b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with whole_file(pipe) as part:
        part.write_bytes(b"all")
    reader.join()
    assert read == [b"all"]
    assert pipe.is_fifo()


def test_an_error_that_names_no_file_names_the_one_that_is_written(tmp_path):
    """As those of a full disk, and NumPy's of a file that could not grow."""
    for given, says in (
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("1 requested and 0 written"), "1 requ"),
    ):
        with pytest.raises(OSError, match=says) as raised, whole_file(tmp_path / "a.npy"):
            raise given
        assert raised.value.filename == str(tmp_path / "a.npy")
    with pytest.raises(FileNotFoundError) as raised, whole_file(tmp_path / "a.npy"):
        (tmp_path / "b").read_bytes()
    assert raised.value.filename == str(tmp_path / "b")
    assert not list(tmp_path.iterdir())
