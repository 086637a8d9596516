"""Digests of the files that a result was computed from."""

import glob
import hashlib
import re
from pathlib import Path


def digest_of(path: Path) -> str:
    """SHA-256 of a file. For a folder, or a model in several GGUF files:
    SHA-256 of the digests and names of all its files, in order."""
    if path.is_dir():
        return _digest_of_all(path, [p for p in path.rglob("*") if p.is_file()])
    if part := re.fullmatch(r"(.+)-\d{5}(-of-\d{5}\.gguf)", path.name, re.DOTALL):
        name, end = map(glob.escape, part.groups())
        return _digest_of_all(path.parent, [*path.parent.glob(f"{name}-{5 * '[0-9]'}{end}")] or [path])
    return _digest_of_file(path)


def _digest_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_all(folder: Path, files: list[Path]) -> str:
    lines = (f"{_digest_of_file(path)}  {path.relative_to(folder).as_posix()}\n" for path in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
