"""Pages of mapped files."""

import mmap


def release_pages(data: mmap.mmap, offset: int, size: int) -> None:
    """Let the system have the whole pages in these bytes. They stay valid: they would be read anew."""
    if hasattr(mmap, "MADV_DONTNEED"):
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = (offset + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if whole > 0:
            data.madvise(mmap.MADV_DONTNEED, start, whole)
