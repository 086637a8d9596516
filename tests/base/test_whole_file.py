"""Files that appear when they are whole."""

import os
import re
import threading

import pytest
from child import run_python

from bitnet_np.base.whole_file import name_beside, whole_file


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


LEAVES = """
import os, sys
from pathlib import Path
from bitnet_np.base.whole_file import name_beside
for name in ("f[1]", "other"):
    name_beside(Path(sys.argv[1], name)).write_bytes(b"half")
    folder = name_beside(Path(sys.argv[1], name))
    folder.mkdir()
    (folder / "half").touch()
print(os.getpid())
"""


@pytest.mark.skipif(os.name == "nt", reason="it cannot be asked there whether a process lives")
def test_what_a_process_left_that_lives_no_more_is_deleted_and_nothing_else(tmp_path):
    child = int(run_python(LEAVES, tmp_path))
    alive = tmp_path / re.sub(r"-\d+-", f"-{os.getppid()}-", name_beside(tmp_path / "f[1]").name)
    elsewhere = tmp_path / f".f[1].01234567-{child}-abcd.part"  # of another machine's process of that number
    for part in (alive, elsewhere):
        part.touch()
    with whole_file(tmp_path / "f[1]") as part:
        part.touch()
    found = sorted(path.name for path in tmp_path.iterdir())
    assert len([name for name in found if name.startswith(".other.")]) == 2
    assert [name for name in found if not name.startswith(".other.")] == sorted([alive.name, elsewhere.name, "f[1]"])


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
