"""`bitnet-np selftest`: every kernel against known bits on this machine."""

import argparse
import platform
import time
from typing import Any

import numba
import numpy as np

from .. import contract
from ..base.errors import listed
from ..base.tables import table
from ..kernels.cache import cache_folder
from ..kernels.cache.private_parts import gone
from ..kernels.fast import amx
from ..kernels.processor import cpu_features, instruction_path
from ..testing import selftest
from .printing import answer, outcome


def run(arguments: argparse.Namespace) -> int:
    """Print the result of every kernel; returns the exit code."""
    if arguments.clear_cache:
        folder = cache_folder.folder()
        files, nbytes = cache_folder.clear()
        text = f"{folder}: {files} compiled kernels deleted, {nbytes / 1e6:.1f} MB"
        return answer(arguments, {"folder": str(folder), "files": files, "bytes": nbytes}, text)
    start, against = time.perf_counter(), arguments.against
    results = list(selftest.against(contract) if against else selftest.run())
    seconds, machine = time.perf_counter() - start, _machine()
    fine = all(ok for _, ok in results)
    facts = machine | {"fine": fine, "kernels": dict(results), "seconds": seconds} | ({"against": against} if against else {})
    same, differs = ("the same", "kernels and contract differ") if against else ("as known", "this machine computes something else")
    parts = [
        outcome(fine, f": {f'all {same}' if fine else differs}, {seconds:.1f} s"),
        table(("machine", ""), [(key, " ".join(value) if isinstance(value, list) else str(value)) for key, value in machine.items()]),
        table(("kernel", "bits"), [(name, same if ok else "DIFFER") for name, ok in results]),
    ]
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
        "compiled_kernels": str(cache_folder.folder()) if not gone() else f"not kept: this version of Numba has no {listed(gone(), 2)}",
    }
