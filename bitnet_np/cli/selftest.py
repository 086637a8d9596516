"""`bitnet-np selftest`: every kernel against known bits, and every compiled kernel on disk, on this machine."""

import argparse
import platform
import re
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np

from .. import contract
from ..base.whole_file import whole_file
from ..kernels.cache import cache_check, cache_folder, disk_cache
from ..kernels.fast import amx
from ..kernels.processor import cpu_features, instruction_path
from ..testing import fixtures, selftest
from . import progress
from .arguments import THREADS
from .printing import answer, outcome, table

SUMMARY = "Compare every kernel and small models with their known bits, and check every compiled kernel on disk."


ARGUMENTS = f"""
{THREADS}
at most one of
--recompile: compile every signature in the cache anew, in memory, and compare the machine code; it takes as long as a first run. Without
 it each entry is read: its checksum must hold, and its code be for the function, signature, sources and machine in its key
--fixtures DIR: write inputs and results of the kernels to DIR, an .npz for each case, and do nothing else
--against contract|: compare the kernels and whole small models with the contract in plain NumPy instead of their known bits
--clear-cache: delete the compiled kernels of this installation, and do nothing else
"""


def run(arguments: argparse.Namespace) -> int:
    """Print the result of every kernel; returns the exit code."""
    if arguments.clear_cache:
        folder = cache_folder.folder()
        files, nbytes = cache_folder.clear()
        text = f"{folder}: {files} compiled kernels deleted, {nbytes / 1e6:.1f} MB"
        return answer(arguments, {"folder": str(folder), "files": files, "bytes": nbytes}, text)
    if arguments.fixtures is not None:
        return _write_fixtures(arguments)
    start, against = time.perf_counter(), arguments.against
    # first the cache as it is: whatever is damaged in it is replaced when the kernel runs
    bar = progress.bar("recompiling" if arguments.recompile else "reading")
    entries = [] if against else list(cache_check.check(arguments.recompile, bar))
    results = list(selftest.against(contract) if against else selftest.run())
    seconds, machine = time.perf_counter() - start, _machine()
    kept = str(cache_folder.folder()) if disk_cache.is_known() else None
    bad = [entry for entry in entries if entry.problem]
    fine = all(ok for _, ok in results) and not bad
    cache = {"folder": kept, "entries": len(entries), "bad": [{**entry._asdict(), "file": str(entry.file)} for entry in bad]}
    facts = machine | {"fine": fine, "kernels": dict(results), "seconds": seconds} | ({"against": against} if against else {"cache": cache})
    same, other = ("the same", "kernels and contract differ") if against else ("as known", "this machine computes something else")
    parts = [
        outcome(fine, f": {f'all {same}' if fine else other}, {seconds:.1f} s"),
        table(("machine", ""), [(key, " ".join(value) if isinstance(value, list) else str(value)) for key, value in machine.items()]),
        table(("kernel", "bits"), [(name, same if ok else "DIFFER") for name, ok in results]),
    ]
    if not against:
        place = f"in {kept}" if kept else "as this version of Numba is not known"
        parts.append(f"compiled kernels on disk: {len(entries)}, {len(bad)} of them bad, {place}")
        parts += [f"file       {e.file}\nfunction   {e.function}\nsignature  {e.signature}\nproblem    {e.problem}" for e in bad]
        parts += ["bitnet-np selftest --clear-cache deletes them all"] if bad else []
    return answer(arguments, facts, "\n\n".join(parts), 0 if fine else 1)


def _machine() -> dict[str, Any]:
    """What is known of this machine."""
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "threads": numba.get_num_threads(),
        "instruction_path": instruction_path(),
        "matrix_tiles": amx.why_absent() or "AMX",
        "features": sorted(cpu_features()),
    }


def _write_fixtures(arguments: argparse.Namespace) -> int:
    """Write an .npz for each case; returns the exit code."""
    folder: Path = arguments.fixtures
    folder.mkdir(parents=True, exist_ok=True)
    names = {}
    for name, arrays in fixtures.fixtures():
        names[name] = re.sub(r"\W+", "_", name) + ".npz"
        with whole_file(folder / names[name]) as part, open(part, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    return answer(arguments, {"folder": str(folder), "files": names}, f"{folder}: inputs and results of {len(names)} cases")
