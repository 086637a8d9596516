"""Resident memory, as Linux counts it."""

import mmap
from pathlib import Path

STATM = Path("/proc/self/statm")
SMAPS = Path("/proc/self/smaps")


def of_process():
    """Resident bytes of this process."""
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE


def of_file(path):
    """Resident bytes of all mappings of a file."""
    lines = SMAPS.read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.endswith(str(path))]
    return sum(1024 * int(next(line for line in lines[i:] if line.startswith("Rss:")).split()[1]) for i in starts)
