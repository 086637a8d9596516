"""Pages of memory-mapped files."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray


def release_pages(data: mmap.mmap, offset: int, size: int) -> None:
    """Give the whole pages in these bytes back to the system. They stay valid: the next access reads them again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = (offset + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if whole > 0:
            data.madvise(mmap.MADV_DONTNEED, start, whole)


def release(array: NDArray) -> None:  # C-contiguous
    """Give back the pages of an array that lies in a file mapped read-only; do nothing to any other array."""
    owner: Any = array.base
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, mmap.mmap) and memoryview(owner).readonly:
        release_pages(owner, array.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data, array.nbytes)
