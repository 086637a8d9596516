"""A team of threads runs one kernel, and its members take the items of its loop.

Every member runs the whole kernel; the loop's items are shared out. So a kernel is compiled once, whether one thread runs it or several.
Numba would compile a parallel loop as a function of its own, beside the kernel, and deal each thread its share in advance.

The caller's thread makes a job in its own memory: words of 64 bits, which are the status, then a counter for each member (a line of the
cache each), and then the arguments. A layer of threads calls the kernel for each member (`call_member`), in any order, from any thread.
A member computes in the default state of floating-point arithmetic (../float_state.py), and its thread gets its own back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.imputils import RefType, iternext_impl
from numba.extending import intrinsic, lower_builtin, models, register_model

from . import float_control
from .emit import I8, I32, I64, Emitter, constant, emitted

LINE = 64
"""Bytes from a counter to the next: no two are in a line of the cache, which one core writes at a time."""

PIECES = 32
"""Of a share. A thread waits for a piece at most, and a piece costs 0.1 microseconds beside its work."""

TEAM = types.UniTuple(types.int64, 3)
"""What a kernel is told of its team: the address of the counters, the number of members, and which of them it is."""

_POINTER = I8.as_pointer()
_MEMBER = ir.FunctionType(I32, [_POINTER, I64])  # a job, and which member -> status
_CREW = ir.FunctionType(I32, [_POINTER.as_pointer(), _POINTER.as_pointer(), I64, I64, I64])  # as Numba passes arguments
_FINE = (0, -2)  # Numba's statuses of functions that returned, and that returned None


class Items(types.SimpleIteratorType):
    """The numbers below some number that a member of a team takes: see `shared`."""

    def __init__(self) -> None:
        super().__init__("items of a team", types.int64)


ITEMS = Items()


@register_model(Items)
class _ItemsModel(models.StructModel):
    def __init__(self, manager: Any, kind: Items):
        place = types.CPointer(types.int64)
        members = [("team", TEAM), ("n", types.int64), ("size", types.int64), ("next", place), ("end", place), ("seen", place)]
        super().__init__(manager, kind, members)


@intrinsic
def shared(typing_context, team, n):
    """The loop of a kernel: those of the numbers below `n` that this member of the team takes.

    Each has a share of its own, and takes a piece of it after the other, in order, and then pieces of the others' shares. So one that
    comes late, because another process uses its core, finds less to do, and nobody waits for more than a piece.
    """

    def codegen(context, builder, signature, values):
        b, items = Emitter(context, builder), cgutils.create_struct_proxy(ITEMS)(context, builder)
        items.team, items.n = values
        members = b.extract_value(items.team, 1)
        pieces = b.mul(members, PIECES)
        items.size = b.select(b.icmp_signed("==", members, I64(1)), items.n, b.sdiv(b.add(items.n, b.sub(pieces, 1)), pieces))
        items.next, items.end, items.seen = (cgutils.alloca_once_value(builder, I64(0)) for _ in range(3))  # a piece, and exhausted shares
        return items._getvalue()

    return ITEMS(TEAM, types.int64), codegen


@lower_builtin("getiter", Items)
def _iterator(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
    return values[0]


@lower_builtin("iternext", Items)
@iternext_impl(RefType.UNTRACKED)
def _next_item(context: Any, builder: ir.IRBuilder, signature: Any, values: Any, result: Any) -> None:
    b, items = Emitter(context, builder), cgutils.create_struct_proxy(ITEMS)(context, builder, values[0])
    counters, members, own = (b.extract_value(items.team, i) for i in range(3))
    in_piece, in_share, in_team, has, take, new_piece, done = (b.append_basic_block() for _ in range(7))
    b.branch(in_piece)
    b.position_at_end(in_piece)
    item = builder.load(items.next)
    b.cbranch(b.icmp_signed("<", item, builder.load(items.end)), has, in_team)
    b.position_at_end(in_team)
    seen = builder.load(items.seen)
    result.set_valid(constant(ir.IntType(1), 0))
    b.cbranch(b.icmp_signed("<", seen, members), take, done)
    b.position_at_end(take)
    share = b.srem(b.add(own, seen), members)
    first, last = (b.sdiv(b.mul(number, items.n), members) for number in (share, b.add(share, 1)))
    counter = b.inttoptr(b.add(counters, b.mul(share, LINE)), I64.as_pointer())
    begin = b.add(first, b.atomic_rmw("add", counter, items.size, "monotonic"))
    b.cbranch(b.icmp_signed("<", begin, last), new_piece, in_share)
    b.position_at_end(new_piece)
    end = b.add(begin, items.size)
    builder.store(begin, items.next)
    builder.store(b.select(b.icmp_signed("<", end, last), end, last), items.end)
    b.branch(in_piece)
    b.position_at_end(in_share)
    builder.store(b.add(seen, 1), items.seen)
    b.branch(in_team)
    b.position_at_end(has)
    builder.store(b.add(item, 1), items.next)
    result.set_valid(constant(ir.IntType(1), 1))
    result.yield_(item)
    b.branch(done)
    b.position_at_end(done)


@emitted()
def call_member(b, member, job, own):
    """Call the function at an address for one member of a team. An error is noted in the job."""
    before = None if float_control.DEFAULT is None else float_control.exchange(b, float_control.DEFAULT)
    place = b.inttoptr(job, _POINTER)
    status = b.call(b.inttoptr(member, _MEMBER.as_pointer()), [place, own])
    if before is not None:
        float_control.exchange(b, before)
    with b.if_then(_is_error(b, status)):
        b.store(constant(I64, 1), b.bitcast(place, I64.as_pointer()))


def _is_error(b: Emitter, status: ir.Value) -> ir.Value:
    return b.and_(*(b.icmp_signed("!=", status, I32(code)) for code in _FINE))


@intrinsic
def run_team(typing_context, kernel, team, arguments):
    """Run a kernel of a team and of `arguments`, a tuple. Raises MemoryError if a member has no memory.

    `team` is the address of three words: the function that calls `call_member` for each member, how many there are, and, for a team of one,
    which needs no such function, whether other Python threads may run meanwhile.
    """
    signature = kernel.get_call_type(typing_context, (TEAM, *arguments), {})
    return types.none(kernel, types.int64, arguments), _RunTeam(kernel, signature)


@contextmanager
def _others_may_run(b: Emitter, may: ir.Value) -> Iterator[None]:
    """Context in which other Python threads may run, if `may` is not 0."""
    python, thread = b.context.get_python_api(b.builder), cgutils.alloca_once_value(b.builder, constant(_POINTER, None))
    they_may = b.icmp_signed("!=", may, I64(0))
    with b.if_then(they_may):
        b.builder.store(python.save_thread(), thread)
    yield
    with b.if_then(they_may):
        python.restore_thread(b.builder.load(thread))


class _RunTeam:
    """Makes the code of `run_team`."""

    def __init__(self, kernel: Any, signature: Any) -> None:
        self._kernel, self._signature = kernel, signature

    def __call__(self, context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        result = self._kernel.dispatcher.get_compile_result(self._signature)
        context.add_linking_libs([result.library])
        b, arguments = Emitter(context, builder), cgutils.unpack_tuple(builder, values[2])
        job_type = ir.LiteralStructType([I64, I64, I64, *(value.type for value in arguments)])
        team = b.inttoptr(values[1], I64.as_pointer())
        count = b.load(b.gep(team, [I64(1)]), I64)
        counters = b.alloca(I64, size=b.mul(count, LINE // 8))
        cgutils.memset(builder, counters, b.mul(count, LINE), 0)
        job = cgutils.alloca_once(builder, job_type)
        for i, value in enumerate([I64(0), b.ptrtoint(counters, I64), count, *arguments]):
            b.builder.store(value, b.gep(job, [I32(0), I32(i)]))
        member = self._member(context, builder.module, result, job_type)
        place, status = b.bitcast(job, _POINTER), cgutils.alloca_once_value(builder, I32(0))
        with builder.if_else(b.icmp_signed("==", count, I64(1))) as (alone, together):
            with alone, _others_may_run(b, b.load(b.gep(team, [I64(2)]), I64)):
                b.builder.store(b.call(member, [place, I64(0)]), status)
            with together:
                crew = b.inttoptr(b.load(team, I64), _CREW.as_pointer())
                ignored = [cgutils.alloca_once(builder, _POINTER) for _ in range(2)]
                words = [b.ptrtoint(value, I64) for value in (member, place)]
                b.builder.store(b.call(crew, [*ignored, *words, count]), status)
        noted = b.icmp_signed("!=", b.load(b.bitcast(job, I64.as_pointer()), I64), I64(0))
        with b.if_then(b.or_(_is_error(b, b.builder.load(status)), noted)):
            context.call_conv.return_user_exc(builder, MemoryError, ("a kernel has no memory for its work",))
        return context.get_dummy_value()

    def _member(self, context: Any, module: ir.Module, result: Any, job_type: ir.Type) -> ir.Function:
        """A function of the module: takes the arguments out of a job, and calls the kernel."""
        function = ir.Function(module, _MEMBER, f".member.{result.fndesc.mangled_name}")
        function.linkage = "internal"
        function.attributes.add("noinline")  # one copy for both of its callers
        b = Emitter(context, ir.IRBuilder(function.append_basic_block()))
        job = b.bitcast(function.args[0], job_type.as_pointer())
        counters, count, *arguments = (b.builder.load(b.gep(job, [I32(0), I32(i)])) for i in range(1, len(job_type.elements)))
        team = context.make_tuple(b.builder, TEAM, [counters, count, function.args[1]])
        callee = context.declare_function(module, result.fndesc)
        kind, kinds = result.fndesc.restype, result.fndesc.argtypes
        status, _ = context.call_conv.call_function(b.builder, callee, kind, kinds, [team, *arguments])
        b.ret(status.code)
        return function


if config.DISABLE_JIT:  # kernels are Python then
    shared, run_team = (lambda team, n: range(n)), (lambda kernel, team, arguments: kernel(team, *arguments))
