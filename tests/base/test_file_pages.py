"""Pages of mapped files: whole ones are given back and read anew, but only where nobody could have written to them."""

import mmap

import numpy as np
import pytest
import resident

from bitnet_np.base import file_pages

PAGES = 64


@pytest.fixture
def path(tmp_path):
    """A file of random bytes, PAGES pages and a half long."""
    path = tmp_path / "table"
    path.write_bytes(np.random.default_rng(0).bytes(PAGES * mmap.PAGESIZE + mmap.PAGESIZE // 2))
    return path


@pytest.mark.skipif(not resident.SMAPS.exists(), reason="Linux tells what is resident")
def test_whole_pages_are_given_back_and_read_anew(path):
    """The array begins within the first page, which other arrays may share, so that page stays. So does the last, which is not full."""
    expected = path.read_bytes()
    with path.open("rb") as file:
        table = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    assert table.tobytes() == expected
    assert resident.of_file(path) >= PAGES * mmap.PAGESIZE
    file_pages.release(table[100:].reshape(-1, 4))
    assert resident.of_file(path) <= 2 * mmap.PAGESIZE
    assert table.tobytes() == expected


def test_pages_that_could_be_written_to_are_not_given_back(tmp_path):
    path = tmp_path / "table"
    path.write_bytes(bytes(1 << 16))
    changed = np.memmap(path, mode="c")
    changed[:] = 1
    changed.flags.writeable = False
    file_pages.release(changed)
    assert (changed == 1).all()


def test_arrays_of_no_file_stay_as_they_are():
    for array in (np.ones(1 << 16), np.frombuffer(bytes([1]) * (1 << 16), np.uint8), np.ones((300, 300))[10:]):
        file_pages.release(array)
        assert (array == 1).all()
