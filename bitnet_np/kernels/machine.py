"""The processor and the software that a result was computed on."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np

from .fast import amx
from .processor import cpu_features, instruction_path


def processor() -> str:
    """The processor's name, as far as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        return f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def describe() -> dict[str, Any]:
    """The facts of the machine that belong to every figure and every report."""
    features = cpu_features()
    of_intel = "avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vnni", "avx512bf16", "amx-int8"
    of_arm = "neon", "dotprod", "i8mm", "sve"
    return {
        "processor": processor(),
        "kind": numba.config.CPU_NAME or llvm.get_host_cpu_name(),  # as LLVM names it, or as Numba is told to
        "cores": os.cpu_count(),
        "instruction path": instruction_path(),
        "matrix tiles": amx.why_absent() or "AMX",
        "features": [name for name in of_intel + of_arm if name in features],
        "threading layer": _threading_layer(),
        "bitnet_np": _version("bitnet_np"),
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def facts() -> dict[str, str]:
    """`describe` as text."""
    known = describe().items()
    return {name: ", ".join(value) if isinstance(value, list) else str(value) for name, value in known}


def _threading_layer() -> str:
    try:
        return numba.threading_layer()
    except ValueError:
        return "none: nothing ran on several threads"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed, run from its sources"
