"""The features that kernels are compiled for: ARM's products of bytes as the system reports them, and never more than Numba's settings."""

import os

import llvmlite.binding as llvm
import pytest
from child import run_python
from numba.core import config

from bitnet_np.kernels import processor

# the line "Features" of /proc/cpuinfo
RASPBERRY_PI_4 = "fp asimd evtstrm crc32 cpuid"
RASPBERRY_PI_5 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"


def cpuinfo(*cores: str) -> str:
    lines = "processor\t: {}\nBogoMIPS\t: 243.75\nFeatures\t: {}\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd0c\n\n"
    return "".join(lines.format(number, features) for number, features in enumerate(cores))


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([RASPBERRY_PI_5] * 4, True),
        ([RASPBERRY_PI_4] * 4, False),
        ([RASPBERRY_PI_4, RASPBERRY_PI_5], False),  # a thread may move from one core to another
        ([], False),
    ],
)
def test_dot_products_are_read_off_cpuinfo(cores, expected):
    assert processor.lists_dot_products(cpuinfo(*cores)) is expected


def test_the_flags_of_x86_are_no_features_of_arm():
    assert not processor.lists_dot_products("processor\t: 0\nflags\t\t: fpu sse2 avx2 asimddp i8mm\n")


@pytest.fixture
def arm(monkeypatch):
    """A Linux on ARM whose features LLVM lists without dot products, as it does."""
    monkeypatch.setattr(processor, "architecture", lambda: "aarch64")
    monkeypatch.setattr(processor, "_HOST_FEATURES", "+neon,+fp-armv8,-sve")
    monkeypatch.setattr(config, "CPU_NAME", None)
    monkeypatch.setattr(config, "CPU_FEATURES", None)


@pytest.mark.parametrize(
    ("reported", "name", "features", "path", "expected"),
    [
        (True, None, None, "neon-dotprod", "+neon,+fp-armv8,-sve,+dotprod"),
        (False, None, None, "neon", None),
        (True, "cortex-a72", None, "neon", None),
        (True, None, "+neon", "neon", "+neon"),
    ],
)
def test_numba_compiles_for_what_the_system_reports_unless_users_choose(arm, monkeypatch, reported, name, features, path, expected):
    monkeypatch.setattr(processor, "_reports_dot_products", lambda: reported)
    monkeypatch.setattr(config, "CPU_NAME", name)
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    processor._add_reported()
    assert expected == config.CPU_FEATURES
    assert processor.instruction_path() == path


@pytest.mark.parametrize(
    ("triple", "expected"),
    [
        ("x86_64-pc-windows-msvc", "x86_64"),  # also where the machine is an ARM64 one
        ("arm64-apple-darwin24.1.0", "aarch64"),
        ("aarch64-unknown-linux-gnu", "aarch64"),
        ("s390x-ibm-linux-gnu", "s390x"),
    ],
)
def test_the_architecture_is_the_processs(monkeypatch, triple, expected):
    monkeypatch.setattr(llvm, "get_process_triple", lambda: triple)
    assert processor.architecture() == expected


@pytest.mark.skipif(processor.architecture() != "x86_64", reason="AVX is x86-64's")
@pytest.mark.skipif("NUMBA_CPU_FEATURES" in os.environ, reason="Numba has been told of features, and asks no other setting")
def test_without_avx_in_numba_kernels_are_compiled_without_it():
    """LLVM aborts the process over an instruction that it was told not to use."""
    program = (
        "import numpy as np; from bitnet_np.model import packing; from bitnet_np.kernels import cpu, processor; "
        "weights = packing.pack(np.eye(16, 64, dtype=np.int8), 1); "
        "out = cpu.ternary_matmul(np.ones((1, 64), np.int8), np.ones(1, np.float32), weights.codes, weights.scale, 16); "
        "print(processor.instruction_path(), (out == 1).all())"
    )
    path, right = run_python(program, NUMBA_ENABLE_AVX="0").split()
    assert (path in ("ssse3", "generic"), right) == (True, "True")
