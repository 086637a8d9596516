"""The processor that Numba compiles for, and the instructions of byte dot products on it.

Numba's own settings decide, not the processor's abilities: it may be told to leave AVX alone, and instructions that it does not compile for
abort the process. It must be imported before anything is compiled, because on ARM it adds a feature that LLVM does not look for.
"""

import ctypes
import sys
from pathlib import Path

import llvmlite.binding as llvm
from numba.core import codegen, config

_HOST_FEATURES = codegen.get_host_cpu_features()  # kept: LLVM detects them at each call, and compiling asks at each step


def architecture() -> str:
    """The architecture of this process, "x86_64" or "aarch64" among others.

    platform.machine() names the machine's architecture, but a Python for x86-64 also runs on ARM.
    """
    name = llvm.get_process_triple().partition("-")[0].lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def cpu_features() -> frozenset[str]:
    """The processor features that Numba compiles for. NUMBA_CPU_NAME alone does not change them: set NUMBA_CPU_FEATURES with it."""
    text = _HOST_FEATURES if config.CPU_FEATURES is None else config.CPU_FEATURES
    return frozenset(part[1:] for part in text.split(",") if part.startswith("+"))


def instruction_path() -> str:
    """The instructions of byte dot products on this processor.

    One of avx512-vnni, avx512, avx-vnni, avx2, ssse3, neon-dotprod, neon and generic.
    """
    features = cpu_features()
    if architecture() == "x86_64":
        if "avx512bw" in features:
            return "avx512-vnni" if "avx512vnni" in features else "avx512"
        for feature, path in (("avxvnni", "avx-vnni"), ("avx2", "avx2"), ("ssse3", "ssse3")):
            if feature in features:
                return path
    elif architecture() == "aarch64":
        return "neon-dotprod" if _DOT_PRODUCTS in features else "neon"
    return "generic"


def is_amd() -> bool:
    """Whether the processor is AMD's: no other has SSE4a."""
    return "sse4a" in cpu_features()


def is_zen_5() -> bool:
    """Whether the processor is AMD's Zen 5 or later: Zen 4 lacks AVX-VNNI."""
    return is_amd() and {"avxvnni", "avx512vnni"} <= cpu_features()


_DOT_PRODUCTS = "dotprod"  # LLVM's name of the optional extension of ARMv8


def lists_dot_products(cpuinfo: str) -> bool:
    """Whether every core of /proc/cpuinfo lists dot products."""
    cores = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.partition(":")[0].strip() == "Features"]
    return bool(cores) and all("asimddp" in features for features in cores)


def _has_sysctl(name: str) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return failed == 0 and value.value == 1


def _reports_dot_products() -> bool:
    """Whether Linux or macOS report dot products."""
    try:
        if sys.platform == "darwin":
            return _has_sysctl("hw.optional.arm.FEAT_DotProd")
        return sys.platform == "linux" and lists_dot_products(Path("/proc/cpuinfo").read_text())
    except (OSError, AttributeError):
        return False


def _add_reported() -> None:
    """Let Numba compile for dot products where the system reports them. LLVM does not list them among a host's features on ARM, and a
    processor whose name it does not know would be compiled for without them. Settings of the user's stand as they are.
    """
    if architecture() != "aarch64" or config.CPU_FEATURES is not None or config.CPU_NAME is not None:
        return
    if _DOT_PRODUCTS not in cpu_features() and _reports_dot_products():
        config.CPU_FEATURES = ",".join(filter(None, (_HOST_FEATURES, f"+{_DOT_PRODUCTS}")))


_add_reported()
