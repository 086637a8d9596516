"""A team of threads runs one kernel, and its members take the items of its loop.

Every member runs the whole kernel; the loop's items are shared out. A kernel is therefore compiled once, whether one thread runs it or
several.
Numba would compile a parallel loop as a separate function in addition to the kernel, and assign each thread its share in advance.

The caller's thread makes a job: words of 64 bits, and then the arguments. The first words are the status, the address of the team's own
words, and the function that takes the arguments out and calls the kernel. The words of a team are the function that calls `call_member` for
each member, their number, and, for a team of one, which needs no such function, whether other Python threads may run; from the
next line of the cache on, a counter for each member. A layer of threads calls the kernel for each member, in any order, from any thread. A
member computes in the default state of floating-point arithmetic (../float_state.py), and its thread gets its own back.

A job owns nothing, so a copy of it can be run again (../recording.py) as long as the arrays live.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.imputils import RefType, iternext_impl
from numba.core.registry import CPUDispatcher
from numba.extending import intrinsic, lower_builtin, models, register_model

from . import float_control
from .emit import I8, I32, I64, Emitter, constant, emitted

LINE = 64
"""Bytes from a counter to the next: no two are in a line of the cache, which one core writes at a time."""

PIECES = 32
"""Pieces of a share. A thread waits for one piece at most, and a piece costs 0.1 microseconds in addition to its work."""

JOB = 4096
"""Bytes of a place for a job, which no kernel's arguments exceed."""

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
        super().__init__(manager, kind, [("team", TEAM), ("n", types.int64), ("size", types.int64), ("state", types.CPointer(types.int64))])


@intrinsic
def shared(typing_context, team, n):
    """The loop of a kernel: those of the numbers below `n` that this member of the team takes.

    Each member has a share. It takes one piece of its share after the other, in order, and then pieces of the others' shares. A member that
    comes late, because another process uses its core, finds less to do, and nobody waits for more than a piece.
    """

    def codegen(context, builder, signature, values):
        b, items = Emitter(context, builder), cgutils.create_struct_proxy(ITEMS)(context, builder)
        items.team, items.n = values
        members = b.extract_value(items.team, 1)
        pieces = b.mul(members, PIECES)
        items.size = b.select(b.icmp_signed("==", members, I64(1)), items.n, b.sdiv(b.add(items.n, b.sub(pieces, 1)), pieces))
        items.state = b.bitcast(cgutils.alloca_once_value(builder, constant(ir.ArrayType(I64, 3), None)), I64.as_pointer())
        return items._getvalue()

    return ITEMS(TEAM, types.int64), codegen


@emitted(returns=types.int64)
def _add(b, address, number):
    """Add to the number at an address, and return its old value, atomically."""
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), number, "monotonic")


def _next(team, n, size, state):
    """The next number that a member takes of those below n, -1 if none is left. state: it, the end of its piece, exhausted shares."""
    counters, members, own = team
    while state[0] >= state[1] and state[2] < members:
        share = (own + state[2]) % members
        last = (share + 1) * n // members
        state[0] = share * n // members + _add(counters + share * LINE, size)
        state[1] = min(state[0] + size, last)
        state[2] += state[0] >= last
    item = state[0]
    state[0] += 1
    return item if item < state[1] else -1


@lower_builtin("getiter", Items)
def _iterator(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
    return values[0]


@lower_builtin("iternext", Items)
@iternext_impl(RefType.UNTRACKED)
def _next_item(context: Any, builder: ir.IRBuilder, signature: Any, values: Any, result: Any) -> None:
    items = cgutils.create_struct_proxy(ITEMS)(context, builder, values[0])
    kinds = TEAM, types.int64, types.int64, types.CPointer(types.int64)
    item = context.compile_internal(builder, _next, types.int64(*kinds), (items.team, items.n, items.size, items.state))
    result.set_valid(builder.icmp_signed(">=", item, I64(0)))
    result.yield_(item)


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

    `team` is the address of the team's words, and the address of a place that receives the job's size in bytes and a copy of it, or 0.
    """
    called = kernel.get_call_type(typing_context, (TEAM, *arguments), {})

    def codegen(context, builder, signature, values):
        result = kernel.dispatcher.get_compile_result(called)
        context.add_linking_libs([result.library])
        b, kinds = Emitter(context, builder), signature.args[2]
        taken = [_without_owners(b, kind, value) for kind, value in zip(kinds, cgutils.unpack_tuple(builder, values[2]), strict=True)]
        job_type = ir.LiteralStructType([I64, I64, I64, *(value.type for value in taken)])
        size = context.get_abi_sizeof(job_type)
        assert size <= JOB - 8
        job, member = cgutils.alloca_once(builder, job_type), _member(context, builder.module, result, job_type)
        team, place = (b.extract_value(values[1], i) for i in (0, 1))
        for i, value in enumerate([I64(0), team, b.ptrtoint(member, I64), *taken]):
            builder.store(value, b.gep(job, [I32(0), I32(i)]))
        with b.if_then(b.icmp_signed("!=", place, I64(0))):
            b.store(I64(size), b.pointer(place))
            cgutils.raw_memcpy(builder, b.pointer(place, 8), job, I64(size), 1)
        _run(context, builder, b.ptrtoint(job, I64))
        return context.get_dummy_value()

    return types.none(kernel, types.UniTuple(types.int64, 2), arguments), codegen


@intrinsic
def run_job(typing_context, job):
    """Run a kernel again, by the copy of a job at an address. Raises as `run_team`."""

    def codegen(context, builder, signature, values):
        _run(context, builder, values[0])
        return context.get_dummy_value()

    return types.none(types.int64), codegen


@emitted(returns=types.int64)
def number_at(b, address):
    """The int32 number at an address."""
    return b.sext(b.load(b.pointer(address), I32), I64)


def _without_owners(b: Emitter, kind: types.Type, value: ir.Value) -> ir.Value:
    """An argument with none of Python's owners of arrays: kernels count no references to their arguments."""
    if isinstance(kind, types.Array):
        for i in range(2):
            value = b.insert_value(value, constant(value.type.elements[i], None), i)
    elif isinstance(kind, types.BaseTuple):
        for i, own in enumerate(kind):
            value = b.insert_value(value, _without_owners(b, own, b.extract_value(value, i)), i)
    return value


def _member(context: Any, module: ir.Module, result: Any, job_type: ir.Type) -> ir.Function:
    """A function of the module: takes the arguments out of a job, and calls the kernel."""
    function = ir.Function(module, _MEMBER, f".member.{result.fndesc.mangled_name}")
    function.linkage = "internal"
    function.attributes.add("noinline")  # no second copy: others call this one
    b = Emitter(context, ir.IRBuilder(function.append_basic_block()))
    job = b.bitcast(function.args[0], job_type.as_pointer())
    team, _, *arguments = (b.builder.load(b.gep(job, [I32(0), I32(i)])) for i in range(1, len(job_type.elements)))
    members = [b.add(team, LINE), b.load(b.pointer(team, 8), I64), function.args[1]]
    callee, kinds = context.declare_function(module, result.fndesc), result.fndesc.argtypes
    its = [context.make_tuple(b.builder, TEAM, members), *arguments]
    status, _ = context.call_conv.call_function(b.builder, callee, result.fndesc.restype, kinds, its)
    b.ret(status.code)
    return function


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


def _run(context: Any, builder: ir.IRBuilder, address: ir.Value) -> None:
    """Run the job at an address."""
    b, status = Emitter(context, builder), cgutils.alloca_once_value(builder, I32(0))
    job = b.pointer(address)
    team, member = (b.load(b.moved(job, 8 * i), I64) for i in (1, 2))
    crew, count, may = (b.load(b.pointer(team, 8 * i), I64) for i in range(3))
    b.store(I64(0), job)
    cgutils.memset(builder, b.pointer(team, LINE), b.mul(count, LINE), 0)
    with builder.if_else(b.icmp_signed("==", count, I64(1))) as (alone, together):
        with alone, _others_may_run(b, may):
            builder.store(b.call(b.inttoptr(member, _MEMBER.as_pointer()), [job, I64(0)]), status)
        with together:
            ignored = [cgutils.alloca_once(builder, _POINTER) for _ in range(2)]
            builder.store(b.call(b.inttoptr(crew, _CREW.as_pointer()), [*ignored, member, address, count]), status)
    noted = b.icmp_signed("!=", b.load(job, I64), I64(0))
    with b.if_then(b.or_(_is_error(b, builder.load(status)), noted)):
        context.call_conv.return_user_exc(builder, MemoryError, ("a kernel has no memory for its work",))


def code_address(function: CPUDispatcher, *kinds: types.Type) -> int:
    """The address of a function's machine code for arguments of these types, as Numba passes them. It is compiled if needed."""
    function.compile(kinds)
    compiled = function.overloads[kinds]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)


if config.DISABLE_JIT:  # kernels are Python then
    shared, run_team = (lambda team, n: range(n)), (lambda kernel, team, arguments: kernel(team, *arguments))
