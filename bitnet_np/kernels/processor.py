"""The processor that Numba compiles for, and the instructions of byte dot products on it.

Numba's own settings decide, not the processor's abilities: it may be told to leave AVX alone, and instructions that it does not compile for
abort the process. It must be imported before anything is compiled, because on ARM it adds a feature that LLVM does not look for.
"""

import ctypes
import sys
from pathlib import Path
from typing import NamedTuple

import llvmlite.binding as llvm
from numba.core import codegen, config


def architecture() -> str:
    """The architecture of this process, "x86_64" or "aarch64" among others.

    platform.machine() is that of the machine: a Python for x86-64 runs on ARM too.
    """
    name = llvm.get_process_triple().partition("-")[0].lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def cpu_features() -> frozenset[str]:
    """The processor features that Numba compiles for. NUMBA_CPU_NAME alone does not change them: set NUMBA_CPU_FEATURES with it."""
    text = codegen.get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return frozenset(part[1:] for part in text.split(",") if part.startswith("+"))


def instruction_path() -> str:
    """The instructions of byte dot products on this processor.

    One of avx512-vnni, avx512, avx-vnni, avx2, ssse3, neon-i8mm, neon-dotprod, neon and generic.
    """
    features = cpu_features()
    if architecture() == "x86_64":
        if "avx512bw" in features:
            return "avx512-vnni" if "avx512vnni" in features else "avx512"
        for feature, path in (("avxvnni", "avx-vnni"), ("avx2", "avx2"), ("ssse3", "ssse3")):
            if feature in features:
                return path
    elif architecture() == "aarch64":
        if "dotprod" in features:
            return "neon-i8mm" if "i8mm" in features else "neon-dotprod"
        return "neon"
    return "generic"


class _Optional(NamedTuple):
    """An optional extension of ARMv8 that multiplies bytes, by its names."""

    llvm: str
    linux: str  # in /proc/cpuinfo
    macos: str  # of sysctl


_OPTIONAL = (
    _Optional("dotprod", "asimddp", "hw.optional.arm.FEAT_DotProd"),  # dot products
    _Optional("i8mm", "i8mm", "hw.optional.arm.FEAT_I8MM"),  # products of 2 x 8 by 8 x 2
)


def listed_by(cpuinfo: str) -> set[str]:
    """LLVM's names of the optional extensions that every core of /proc/cpuinfo lists."""
    cores = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.partition(":")[0].strip() == "Features"]
    return {extension.llvm for extension in _OPTIONAL if cores and all(extension.linux in features for features in cores)}


def _has_sysctl(name: str) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return failed == 0 and value.value == 1


def _reported() -> set[str]:
    """LLVM's names of the optional extensions that Linux or macOS report."""
    try:
        if sys.platform == "darwin":
            return {extension.llvm for extension in _OPTIONAL if _has_sysctl(extension.macos)}
        return listed_by(Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else set()
    except (OSError, AttributeError):
        return set()


def _add_reported() -> None:
    """Let Numba compile for the optional extensions that the system reports. LLVM does not list them among a host's features on ARM, and
    a processor whose name it does not know would be compiled for without them. Settings of the user's stand as they are.
    """
    if architecture() != "aarch64" or config.CPU_FEATURES is not None or config.CPU_NAME is not None:
        return
    features = [feature for feature in codegen.get_host_cpu_features().split(",") if feature]
    if missing := [f"+{name}" for name in sorted(_reported()) if f"+{name}" not in features]:
        config.CPU_FEATURES = ",".join(features + missing)


_add_reported()
