"""The register that controls floating-point arithmetic on a thread: MXCSR on x86-64, FPCR on ARM64."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..processor import architecture
from .emit import I8, I32, I64, Emitter, constant, emitted

DEFAULT: int | None = {"x86_64": 0x1F80, "aarch64": 0}.get(architecture())
"""Round to nearest, keep subnormal numbers, raise no signals; None where the register is not known here."""


def exchange(builder: ir.IRBuilder, state: ir.Value | int | None = DEFAULT) -> ir.Value:
    """Set the register to an int64; returns what it was. Nothing that goes through memory is moved across this by the compiler."""

    def call(name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
        kind = ir.FunctionType(result, [value.type for value in values])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), list(values))

    state = constant(I64, state)
    builder.fence("seq_cst", "singlethread")  # for the compiler alone: no instruction
    if architecture() == "x86_64":
        word = cgutils.alloca_once(builder, I32)
        place = builder.bitcast(word, I8.as_pointer())
        call("llvm.x86.sse.stmxcsr", ir.VoidType(), place)
        before = builder.zext(builder.load(word), I64)
        builder.store(builder.trunc(state, I32), word)
        call("llvm.x86.sse.ldmxcsr", ir.VoidType(), place)
    else:
        before = call("llvm.aarch64.get.fpcr", I64)
        call("llvm.aarch64.set.fpcr", ir.VoidType(), state)
    builder.fence("seq_cst", "singlethread")
    return before


@emitted(returns=types.int64)
def exchanged(b: Emitter, state: ir.Value) -> ir.Value:
    """`exchange`, for kernels."""
    return exchange(b.builder, state)
