"""Compiled kernels on disk, in a form that is safe for any number of processes that read and write at once.

Each function has one file for each signature, and there is no index:

    FOLDER/compiled-STATE/FUNCTION-ENTRY.kernel      STATE and ENTRY are digests of the key's "state" and of the whole key
      a line that names the format
      the key, a line of JSON                        everything that the code depends on, readable
      SHA-256 of the rest, 32 bytes
      the code, as Numba pickles it

A file is unpickled only if its key equals the requested one, to the letter, and its checksum holds. Any other file (torn, foreign, renamed)
is a miss: the kernel is compiled and the file replaced. Files are written whole under another name and then renamed. A checksum stops
damage but not intent: a file that another user (except root) owns or may replace is not loaded, and a warning says so (cache_folder.py).

FOLDER is cache_folder.folder(). A state is a version of the sources, the libraries, the processor and Numba's settings. Numba's own cache
files (.nbi, .nbc) are never read.

A dispatcher's `_cache` is a private part of Numba, and whole_kernels.py needs others (private_parts.py). If this version of Numba does
not have them all, each process compiles kernels for itself.
"""

import hashlib
import json
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import compiler, serialize, sigutils

from ...base.errors import listed
from ...base.whole_file import whole_file
from . import cache_folder
from .private_parts import gone

_FIRST_LINE = b"bitnet_np: a compiled kernel, form 1"
_CHECKSUM_BYTES = 32
_ON_WINDOWS = os.name == "nt"  # where an open file cannot be replaced
# the settings that Numba's code generator reads, in addition to the target
_SETTINGS = [
    *("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "USING_SVML", "ENABLE_AVX", "BOUNDSCHECK", "PARFOR_MAX_TUPLE_SIZE"),
    *("LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS", "DEBUGINFO_DEFAULT", "EXTEND_VARIABLE_LIFETIMES", "ENABLE_PROFILING"),
    *("DEBUG_ARRAY_OPT_RUNTIME", "DEBUG_JIT", "DEBUG_NRT", "NRT_STATS"),
]

DISPATCHERS: list[Any] = []
"""Every dispatcher that `compiled` made."""


class BadEntryError(Exception):
    """A file is not the entry it should be. The message says what is wrong with it."""


def compiled(**options: Any) -> Callable[[Callable], Any]:
    """A decorator: `numba.njit` with these options, and compiled code that outlives the process."""

    def decorate(function: Callable) -> Any:
        if numba.config.DISABLE_JIT:
            return function
        if gone():
            _warn_of_numba()
            return numba.njit(**options)(function)
        from .whole_kernels import Function

        kernel = Function(function, targetoptions={"nopython": True, "boundscheck": None, **options})
        kernel._cache = DiskCache(kernel)
        DISPATCHERS.append(kernel)
        return kernel

    return decorate


# IEEE division: Python's would raise on a zero, and test for one at every step
serial = compiled(error_model="numpy")
inlined = compiled(error_model="numpy", forceinline=True)  # for functions of a full tile, an argument that would go through memory
rule = compiled(inline="always")  # Numba inlines it before it knows types, with the error model of the calling kernel


@lru_cache
def _warn_of_numba() -> None:
    warnings.warn(
        f"Numba {numba.__version__} has no {listed(gone(), 2)}, so kernels are compiled anew in every run, which takes some 20 seconds; "
        "install a version that bitnet_np asks for, or a newer bitnet_np",
        RuntimeWarning,
        stacklevel=2,
    )


# --- keys -----------------------------------------------------------------------------------------------------------------------------


def _stamp(sources: list[Path]) -> str:
    """A digest of source files; empty if there are none or one cannot be read."""
    try:
        return _digest([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in sources]) if sources else ""
    except OSError:
        return ""


def state(codegen: Any) -> dict[str, Any]:
    """Everything that the code of all kernels depends on, as JSON holds it. codegen: of Numba's target context."""
    return {
        "sources": SOURCES,
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "numpy": np.__version__,
        "python": f"{sys.version} -{'O' * sys.flags.optimize}",
        "target": [str(part) for part in codegen.magic_tuple()],
        "settings": {name: str(getattr(numba.config, name, None)) for name in _SETTINGS},
    }


def _signature_text(arguments: Any) -> str:
    return f"({', '.join(map(str, arguments))})"


def _digest(value: Any) -> str:
    return hashlib.sha256(_line(value)).hexdigest()


def _line(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


# of the kernels and of the tables that they are made of, taken before they are imported: a later edit is noticed when code is saved
_FILES = sorted(file for room in ("kernels", "base") for file in (cache_folder.HERE.parent / room).rglob("*.py"))
SOURCES = _stamp(_FILES)


# --- files ----------------------------------------------------------------------------------------------------------------------------


def state_folder(state: dict[str, Any]) -> Path:
    """The folder that holds the entries of a state."""
    return cache_folder.folder() / f"{cache_folder.PREFIX}{_digest(state)[:16]}"


def file_name(key: dict[str, Any]) -> str:
    """The name of an entry's file, which follows from its key."""
    return f"{_stem(key)}-{_digest(key)[:24]}{cache_folder.SUFFIX}"


def _stem(key: dict[str, Any]) -> str:
    return re.sub("[^0-9A-Za-z_.]", "_", key["function"])


def read(path: Path) -> tuple[bytes, bytes]:
    """The key, as a line of JSON, and the pickled code of an entry. Raises BadEntryError, UntrustedError and OSError."""
    cache_folder.check_trusted(path.parent)
    with open(path, "rb") as file:
        cache_folder.check_trusted_file(path, file.fileno())
        first, _, rest = file.read().partition(b"\n")
    key, _, rest = rest.partition(b"\n")
    checksum, code = rest[:_CHECKSUM_BYTES], rest[_CHECKSUM_BYTES:]
    if first != _FIRST_LINE:
        raise BadEntryError(f"it begins with {first[:40]!r}, expected {_FIRST_LINE!r}")
    if hashlib.sha256(key + code).digest() != checksum:
        raise BadEntryError("it is damaged: its SHA-256 is not the recorded one")
    return key, code


def unpickle(code: bytes, key: dict[str, Any]) -> tuple[Any, ...]:
    """The parts of a compile result, in the order of `_PICKLED` without the first. Raises BadEntryError if they are not the key's."""
    parts = pickle.loads(code)
    _, fndesc, _, signature, *_ = parts
    inside = {"module": fndesc.modname, "function": fndesc.qualname, "signature": _signature_text(signature.args)}
    for name, value in inside.items():
        if value != key[name]:
            raise BadEntryError(f"the {name} of its code is {value}, expected {key[name]}")
    return parts


def _write(path: Path, key: bytes, code: bytes) -> None:
    if is_new := not path.parent.is_dir():
        cache_folder.make(path.parent)
    cache_folder.check_trusted(path.parent)
    if is_new:
        cache_folder.delete_old()
    with whole_file(path) as part:
        part.touch(0o644)
        part.write_bytes(b"\n".join([_FIRST_LINE, key, hashlib.sha256(key + code).digest() + code]))


_warned = False


def _warn_once(reason: object) -> None:
    """Warn that compiled code cannot be saved, and why, once for each process."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"compiled kernels cannot be kept in {cache_folder.folder()} ({reason}). Every process compiles them again, which takes "
            "some 10 seconds. Set NUMBA_CACHE_DIR to a folder that this user alone can write to.",
            RuntimeWarning,
            stacklevel=2,
        )


# --- the cache that Numba calls -------------------------------------------------------------------------------------------------------


class DiskCache:
    """The compiled code of one function, for Numba's dispatcher, which holds the compiler's lock when it asks."""

    def __init__(self, dispatcher: Any):
        function = dispatcher.py_func
        if function.__closure__:
            raise TypeError(f"{function.__qualname__} is a closure: its code does not follow from its source alone")
        file = Path(function.__code__.co_filename)
        self._own_source = [] if file.is_relative_to(cache_folder.HERE) else [file]  # the file of a kernel outside this package
        self.identity = {
            "module": function.__module__,
            "function": function.__qualname__,
            "line": function.__code__.co_firstlineno,
            "bytecode": hashlib.sha256(function.__code__.co_code).hexdigest(),
            "source": _stamp(self._own_source),
            "options": {name: str(value) for name, value in dispatcher.targetoptions.items()},
        }

    @property
    def cache_path(self) -> str:
        return str(cache_folder.folder())

    def key(self, sig: Any, codegen: Any) -> dict[str, Any]:
        """Everything that the code of a signature depends on. sig: in any form that Numba's `compile` takes."""
        arguments, result = sigutils.normalize_signature(sig)
        return {**self.identity, "signature": _signature_text(arguments), "returns": str(result or ""), "state": state(codegen)}

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compile result of a signature, or None."""
        target_context.refresh()
        key = self.key(sig, target_context.codegen())
        path = state_folder(key["state"]) / file_name(key)
        try:
            line, code = read(path)
            if line != _line(key):
                return None
            parts = unpickle(code, key)
            if parts[3].args != sigutils.normalize_signature(sig)[0]:  # different types whose names are equal
                return None
            result = compiler.CompileResult._rebuild(target_context, *parts)
        except cache_folder.UntrustedError as error:
            _warn_once(error)
            return None
        except Exception:  # whatever is wrong with the file, the kernel is compiled instead
            return None
        cache_folder.set_time_of_use(path.parent)
        return result

    def save_overload(self, sig: Any, result: Any) -> None:
        """Save the compile result of a signature."""
        if result.lifted or result.library.has_dynamic_globals:  # these contain addresses of this process
            return
        if _stamp(_FILES) != SOURCES or _stamp(self._own_source) != self.identity["source"]:
            return  # edited in between: it is unknown which text was compiled
        key = self.key(sig, result.codegen)
        path = state_folder(key["state"]) / file_name(key)
        try:
            if not SOURCES:
                raise FileNotFoundError("the sources of the kernels cannot be read")
            _write(path, _line(key), serialize.dumps(result._reduce()))
        except OSError as error:
            if not (_ON_WINDOWS and isinstance(error, PermissionError) and path.exists()):  # another process reads that very file
                _warn_once(error)
