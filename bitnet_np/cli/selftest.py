"""`bitnet-np selftest`: every kernel against known bits, on this machine."""

import argparse
import platform
import time

import numba
import numpy as np

from .. import selftest
from ..kernels import simd
from .arguments import add_threads_argument
from .printing import print_json, table

SUMMARY = "Compare every kernel with its known bits on this machine."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this command takes."""
    add_threads_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what every kernel came to; returns the exit code."""
    start = time.perf_counter()
    results = list(selftest.run())
    seconds = time.perf_counter() - start
    machine = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "threads": numba.get_num_threads(),
        "instruction_path": simd.instruction_path(),
        "features": sorted(simd.cpu_features()),
    }
    fine = all(ok for _, ok in results)
    if arguments.json:
        print_json(machine | {"fine": fine, "kernels": dict(results), "seconds": seconds})
        return 0 if fine else 1
    facts = [(key, " ".join(value) if isinstance(value, list) else str(value)) for key, value in machine.items()]
    print(table(("machine", ""), facts) + "\n")
    print(table(("kernel", "bits"), [(name, "as known" if ok else "DIFFER") for name, ok in results]))
    print(f"\n{'all as known' if fine else 'NOT FINE'}, {seconds:.1f} s")
    return 0 if fine else 1
