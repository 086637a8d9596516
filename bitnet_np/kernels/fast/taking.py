"""Threads take the work of a parallel loop; Numba would deal it.

Numba cuts a loop into a share for each thread, and one whose core another process uses, too, would keep all others waiting. Here each
thread takes a piece of its own share after the other, in order, and then pieces of the others' shares. So one that comes late finds less
to do, and no kernel knows of this. Any layer of threads may call the shares, in any order and from any thread.

Taking is one atomic addition to the first number of a share, which is two numbers in memory for each dimension of the loop: where it
begins, and the last that belongs to it. A loop over several dimensions, which no kernel has, is cut along the first.

A thread computes in the default state of floating-point arithmetic (../float_state.py), and gets its own back.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.np.ufunc import parallel

from . import float_control
from .emit import I8, I64, Emitter, constant

PIECES = 32
"""Of a share. A thread waits for a piece at most, and a piece costs 0.1 microseconds beside its work."""

_POINTER, _NUMBERS, _NONE = I8.as_pointer(), I64.as_pointer(), ir.VoidType()
_FUNCTION = ir.FunctionType(_NONE, [_POINTER.as_pointer(), _NUMBERS, _NUMBERS, _POINTER])
"""Arguments, of which the first is the shares; how many shares, and shapes; bytes from a share to the next, and strides; data."""


def _number(b: Emitter, numbers: ir.Value, index: ir.Value | int) -> ir.Value:
    return b.gep(numbers, [constant(I64, index)])


def _take_all(b: Emitter, values: Sequence[ir.Value], job: ir.Value, work: ir.Function) -> None:
    """What a thread does that a layer calls for a share: `work` on a piece after the other, until there is none left."""
    arguments, count, steps, _ = values
    shares, shares_count, size = (b.load(_number(b, job, i), I64) for i in range(3))
    place, step = b.bitcast(arguments, _NUMBERS), b.load(steps, I64)
    own, dimensions = b.sdiv(b.sub(b.load(place, I64), shares), step), b.sdiv(step, constant(I64, 16))
    piece = b.alloca(I64, size=b.mul(dimensions, 2))
    b.store(b.ptrtoint(piece, I64), place)
    b.store(constant(I64, 1), count)
    with cgutils.for_range(b.builder, shares_count) as loop:
        share = b.inttoptr(b.add(shares, b.mul(b.srem(b.add(own, loop.index), shares_count), step)), _NUMBERS)
        cgutils.raw_memcpy(b.builder, piece, share, step, 1)
        last = b.load(_number(b, share, dimensions), I64)
        taking, working, empty = (b.append_basic_block() for _ in range(3))
        b.branch(taking)
        b.position_at_end(taking)
        first = b.atomic_rmw("add", share, size, "monotonic")
        b.cbranch(b.icmp_signed("<=", first, last), working, empty)
        b.position_at_end(working)
        b.store(first, piece)
        end = b.sub(b.add(first, size), 1)
        b.store(b.select(b.icmp_signed("<", end, last), end, last), _number(b, piece, dimensions))
        b.call(work, [*values[:3], constant(_POINTER, None)])
        b.branch(taking)
        b.position_at_end(empty)


def _share_out(b: Emitter, values: Sequence[ir.Value], taking: ir.Function, shapes: int, arguments: int) -> None:
    """The launch of a loop: the layer's threads call `taking`. Meanwhile other Python threads may run."""
    shares, count, steps = (b.load(value, I64) for value in values[:3])
    first = b.inttoptr(shares, _NUMBERS)
    end = b.load(_number(b, first, b.sdiv(steps, constant(I64, 16))), I64)
    size = b.sdiv(b.sub(end, b.load(first, I64)), constant(I64, PIECES))  # one less than all, so the last of 33 is no piece of its own
    job = cgutils.alloca_once(b.builder, I64, size=3)
    for i, value in enumerate((shares, count, b.add(size, 1))):
        b.store(value, _number(b, job, i))
    python = b.context.get_python_api(b.builder)
    lock = python.gil_ensure()
    thread = python.save_thread()
    pointers = [b.bitcast(value, _POINTER) for value in (taking, *values[:3], job)]
    b.named("numba_parallel_for", _NONE, *pointers, constant(I64, shapes), constant(I64, arguments), b.named("get_num_threads", I64))
    python.restore_thread(thread)
    python.gil_release(lock)


def launcher(library: Any, context: Any, info: Any, signature: Any, shapes: int) -> Any:
    """In place of `build_gufunc_kernel` of numba.np.ufunc.parallel: the function that runs a loop whose pieces are `info`'s."""
    made = context.codegen().create_library("taking")
    module = made.create_ir_module("taking")
    work = cgutils.get_or_insert_function(module, _FUNCTION, info.name)
    taking, outer = (ir.Function(module, _FUNCTION, f".{name}.{id(info.env)}_{info.name}") for name in ("taking", "kernel"))
    inner, b = (Emitter(context, ir.IRBuilder(function.append_basic_block())) for function in (taking, outer))
    before = None if float_control.DEFAULT is None else float_control.exchange(inner, float_control.DEFAULT)
    _take_all(inner, taking.args, inner.bitcast(taking.args[3], _NUMBERS), work)
    if before is not None:
        float_control.exchange(inner, before)
    inner.ret_void()
    _share_out(b, outer.args, taking, shapes, len(signature.args))
    b.ret_void()
    made.add_ir_module(module)
    for own in (info.library, library):
        made.add_linking_library(own)
    return parallel._wrapper_info(library=made, name=outer.name, env=info.env)
