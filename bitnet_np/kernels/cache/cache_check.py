"""Checks of disk_cache.py's entries: each is whole, holds the code of its key, and has the machine code that the compiler makes here."""

import hashlib
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite.binding.object_file import ObjectFileRef
from numba.core.registry import cpu_target

from ...base.progress import Progress, silent
from . import cache_folder, disk_cache
from .disk_cache import BadEntryError


class Entry(NamedTuple):
    """One file of the cache, checked."""

    file: Path
    function: str  # module and name, as far as they can be read
    signature: str
    problem: str  # empty if the entry is good


def check(recompile: bool = False, progress: Progress = silent) -> Iterator[Entry]:
    """Check each entry of this installation.

    Its checksum must hold, and its name and its folder must be those of its key. An entry that this process could use must also belong to a
    kernel that exists, and hold code of the function and signature in its key. recompile: compiles its signature anew, in memory, which
    must give the same machine code; for all entries this takes as long as a first run. progress(done, total) is called before each entry
    and in the end.
    """
    files = cache_folder.entries()
    here = disk_cache.state_folder(disk_cache.state(cpu_target.target_context.codegen()))
    for done, file in enumerate(files):
        progress(done, len(files))
        try:
            _check_entry(file, here, recompile)
            problem = ""
        except FileNotFoundError:
            continue  # the cache was cleared meanwhile
        except (BadEntryError, OSError) as error:
            problem = str(error)
        except Exception as error:  # unpickling a forged file may raise anything else
            problem = f"it cannot be read: {error!r}"
        yield Entry(file, *_names(file), problem)
    if files:
        progress(len(files), len(files))


def _names(file: Path) -> tuple[str, str]:
    """Function and signature by the key in a file, which may be damaged elsewhere; without a key, the function by the file's name."""
    try:
        key = json.loads(file.read_bytes().split(b"\n", 2)[1])
        return f"{key['module']}.{key['function']}", key["signature"]
    except (OSError, ValueError, LookupError, TypeError):
        return file.name.rpartition("-")[0], "(unreadable)"


def _check_entry(file: Path, here: Path, recompile: bool) -> None:
    line, code = disk_cache.read(file)
    key = json.loads(line)
    expected = disk_cache.state_folder(key["state"]) / disk_cache.file_name(key)
    if file != expected:
        raise BadEntryError(f"its key is that of {expected.parent.name}/{expected.name}")
    if file.parent != here:
        return  # an entry of other sources, libraries or settings, or of another processor
    package = __package__.partition(".")[0]
    is_ours = key["module"].startswith(f"{package}.")
    if is_ours:
        importlib.import_module(key["module"])
    dispatcher = disk_cache.DISPATCHERS.get(disk_cache.identity_of(key))
    if dispatcher is None and is_ours:
        raise BadEntryError("there is no such kernel")
    if dispatcher is None:
        return  # an entry of another program, without which its code cannot be unpickled
    parts = disk_cache.unpickle(code, key)
    if recompile and machine_code(parts[0]) != machine_code(_compiled_anew(dispatcher, parts[3])):
        raise BadEntryError("its machine code is not what the compiler makes of this signature")


def _compiled_anew(dispatcher: Any, signature: Any) -> tuple[Any, ...]:
    """The machine code of this signature as Numba pickles it, compiled in memory."""
    fresh = type(dispatcher)(dispatcher.py_func, targetoptions=dict(dispatcher.targetoptions))
    fresh.compile(tuple(signature.args))
    return fresh.overloads[tuple(signature.args)].library.serialize_using_object_code()


# names that Numba numbers or makes of an address, and the padding that depends on their length
_NAMES = re.compile(rb"B\d+v\d+|(?:\d+__numba_parfor_gufunc_)?_*0x[0-9a-f]+|\0+")


def machine_code(pickled: tuple[Any, ...]) -> str:
    """A digest of the instructions and constants in `libdata` of a compile result, without the names in it that change from run to run."""
    _, _, (machine, _) = pickled
    total = hashlib.sha256()
    for section in ObjectFileRef.from_data(machine).sections():
        name = (section.name() or b"").decode()
        if section.is_text():
            total.update(section.data())
        elif re.search("rodata|rdata|const|literal", name) and not name.startswith(".rel"):
            total.update(_NAMES.sub(b"", section.data()))
    return total.hexdigest()
