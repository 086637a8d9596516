"""The register that controls floating-point arithmetic on a thread: MXCSR on x86-64, FPCR on ARM64."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..processor import architecture
from .emit import I8, I32, I64, Emitter, constant, emitted

DEFAULT: int | None = {"x86_64": 0x1F80, "aarch64": 0}.get(architecture())
"""Round to nearest, keep subnormal numbers, raise no signals; None where the register is not known here."""


def exchange(b: Emitter, state: ir.Value | int) -> ir.Value:
    """Set the register to an int64; returns what it was. Nothing that goes through memory is moved across this by the compiler."""
    state = constant(I64, state)
    b.fence("seq_cst", "singlethread")  # for the compiler alone: no instruction
    if architecture() == "x86_64":
        word = cgutils.alloca_once(b.builder, I32)
        place = b.bitcast(word, I8.as_pointer())
        b.named("llvm.x86.sse.stmxcsr", ir.VoidType(), place)
        before = b.zext(b.builder.load(word), I64)
        b.builder.store(b.trunc(state, I32), word)
        b.named("llvm.x86.sse.ldmxcsr", ir.VoidType(), place)
    else:
        before = b.named("llvm.aarch64.get.fpcr", I64)
        b.named("llvm.aarch64.set.fpcr", ir.VoidType(), state)
    b.fence("seq_cst", "singlethread")
    return before


exchanged = emitted(returns=types.int64)(exchange)  # for kernels
