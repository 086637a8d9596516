"""Numba's own cache in a folder of each process, for versions of Numba that disk_cache.py does not know.

Two processes that write to one such cache can mix up each other's code. So each process has a folder of its own, for as long as it runs. It
begins as a copy of its parent's folder: a child process does not compile again what was compiled before it started.
"""

import atexit
import os
import shutil
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba

VARIABLE = "BITNET_NP_PRIVATE_CACHE"
"""The environment variable that tells child processes their parent's folder."""

_dispatchers: list[Any] = []
_folder = ""


def enable(dispatcher: Any) -> None:
    """Let Numba cache the code of this dispatcher as long as this process runs."""
    if not _dispatchers:
        parent = os.environ.get(VARIABLE, "")
        if not parent:
            warnings.warn(
                f"bitnet_np does not know the cache of Numba {numba.__version__}, so kernels are compiled anew in every run, which takes "
                "some 20 seconds; a newer bitnet_np may know it",
                RuntimeWarning,
                stacklevel=2,
            )
        _open(parent)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_open_anew)
    _dispatchers.append(dispatcher)
    _enable(dispatcher)


def _open(parent: str = "") -> None:
    global _folder
    try:
        _folder = tempfile.mkdtemp(prefix="bitnet_np-kernels-")
    except OSError:  # nothing can be written, so nothing is cached
        _folder = ""
        return
    if parent:
        with suppress(OSError):  # the parent may have ended, or be replacing a file
            shutil.copytree(parent, _folder, dirs_exist_ok=True)
    os.environ[VARIABLE] = _folder
    atexit.register(_delete, _folder, os.getpid())


def _open_anew() -> None:
    """A forked process has its parent's kernels in memory, and writes others to a folder of its own."""
    _open()
    for dispatcher in _dispatchers:
        _enable(dispatcher)


def _enable(dispatcher: Any) -> None:
    if not _folder:
        return
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _folder
    try:
        dispatcher.enable_caching()
    finally:
        numba.config.CACHE_DIR = before  # Numba has read it; other packages keep their own folder


def _delete(folder: str, process: int) -> None:
    if os.getpid() == process:  # a forked process inherits this call, too
        shutil.rmtree(Path(folder), ignore_errors=True)
