"""Files that appear when they are whole: written beside their place, under a name of their own, and renamed in the end."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def name_beside(path: Path) -> Path:
    """A name next to `path`, hidden, that nobody else writes to."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The name to write to. It becomes `path` at the end of the block; a block that fails leaves `path` as it was, and nothing beside it.

    A link stays, and what it names is replaced. What is there and is no file (a pipe, /dev/stdout) is written to as it is.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    part = name_beside(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
