"""A list of calls of compiled kernels, run by one function.

Numba's dispatchers take Python's objects apart at each call. Here they are taken apart once. A call is a block of 64-bit words: the address
of a kernel, then its arguments as Numba passes them, a word each. A function made for the kernel's signature reads the block and calls.
"""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.types.containers import BaseTuple

from .emit import I32, I64, Emitter

_WORDS = I64.as_pointer()
_CALL, _CALLS = (ir.FunctionType(I32, [_WORDS, *others]) for others in ([], [I64]))
_NONE = -2  # Numba's status of a function that returned None


class UnknownArgumentError(TypeError):
    """A kernel takes an argument that is not passed on here."""


def words_of(value: Any, kind: types.Type) -> list[int]:
    """A value in words, as Numba takes one of this type apart. Raises UnknownArgumentError. The caller keeps arrays alive."""
    if isinstance(kind, types.Array):  # with none of Python's owners: kernels do not count references to their arguments
        return [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *(stride & (1 << 64) - 1 for stride in value.strides)]
    if isinstance(kind, BaseTuple):
        return [word for own, of in zip(value, kind, strict=True) for word in words_of(own, of)]
    if isinstance(kind, types.Float):
        return list(struct.unpack("<Q", struct.pack("<d", value) if kind.bitwidth == 64 else struct.pack("<fI", value, 0)))
    if isinstance(kind, types.Integer | types.Boolean):
        return [int(value) & (1 << 64) - 1]
    if kind is types.none:
        return [0]
    raise UnknownArgumentError(f"an argument of type {kind} is not taken apart")


class Calls:
    """A list of calls. It keeps no array: whoever adds a call keeps what it reads and writes."""

    def __init__(self) -> None:
        self._entries: dict[Any, _Entry] = {}  # by the traits of a call: Numba takes long to tell the types of arguments
        self._made: list[tuple[_Entry, list[int]]] = []

    def add(self, kernel: Any, arguments: Sequence[Any]) -> None:
        """Add a call that was just made, so that the kernel is compiled for it. Raises UnknownArgumentError."""
        traits = kernel, *map(_traits, arguments)
        if traits not in self._entries:
            self._entries[traits] = _Entry.of(kernel, arguments)
        entry = self._entries[traits]
        self._made.append((entry, entry.block(arguments)))

    def close(self) -> None:
        """Compile what makes these calls. No more are added."""
        callers = _callers([entry.native for entry in self._entries.values()])
        self._words = np.array([word for _, block in self._made for word in block], np.uint64)
        offsets = np.cumsum([0, *(len(block) for _, block in self._made)]) * self._words.itemsize
        places = (self._words.ctypes.data + offsets).tolist()
        self._table = np.array([(callers[entry.native], place) for (entry, _), place in zip(self._made, places, strict=False)], np.uint64)
        self._loop = _as_python(callers[_CALLS])
        self._made.clear()

    def __len__(self) -> int:
        """The number of calls, when they are closed."""
        return len(self._table)

    def run(self) -> None:
        """Make all calls in their order, on this thread. Raises MemoryError if a kernel has no memory, and makes no more."""
        if self._loop(self._table.ctypes.data, len(self._table)) not in (0, _NONE):
            raise MemoryError("a kernel has no memory for its work")


def address_of(function: CPUDispatcher, *kinds: types.Type) -> int:
    """Where the machine code of a function for arguments of these types begins, as Numba passes them. It is compiled if it has to be."""
    function.compile(kinds)
    compiled = function.overloads[kinds]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)


def _traits(value: Any) -> Any:
    """What Numba's type of a value follows from."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.ndim, value.flags.c_contiguous, value.flags.writeable
    return (type(value), *map(_traits, value)) if isinstance(value, tuple) else type(value)


class _Entry(NamedTuple):
    """A kernel that is compiled for some types."""

    kinds: tuple[types.Type, ...]
    address: int
    native: ir.FunctionType

    @classmethod
    def of(cls, kernel: Any, arguments: Sequence[Any]) -> Self:
        if not isinstance(kernel, CPUDispatcher):  # such as with NUMBA_DISABLE_JIT
            raise UnknownArgumentError(f"{kernel} is not compiled")
        kinds = tuple(map(kernel.typeof_pyval, arguments))
        if kinds not in kernel.overloads:
            raise UnknownArgumentError(f"{kernel} is compiled for constants among {kinds}")
        compiled = kernel.overloads[kinds]
        native = cpu_target.target_context.call_conv.get_function_type(compiled.fndesc.restype, compiled.fndesc.argtypes)
        entry = cls(kinds, address_of(kernel, *kinds), native)
        if len(native.args) != 1 + len(entry.block(arguments)):  # the result and the error, and no address
            raise UnknownArgumentError(f"{kernel} takes {len(native.args) - 2} words, its arguments have others")
        return entry

    def block(self, arguments: Sequence[Any]) -> list[int]:
        return [self.address, *(word for value, kind in zip(arguments, self.kinds, strict=True) for word in words_of(value, kind))]


# --- code -----------------------------------------------------------------------------------------------------------------------------

_addresses: dict[ir.FunctionType, int] = {}
_libraries: list[Any] = []  # the code at these addresses


@global_compiler_lock
def _callers(natives: Sequence[ir.FunctionType]) -> Mapping[ir.FunctionType, int]:
    """The addresses of functions that call kernels of these types, each with a block, and by _CALLS that of the loop over such calls."""
    missing = dict.fromkeys(kind for kind in (_CALLS, *natives) if kind not in _addresses)
    if missing:
        context = cpu_target.target_context
        library = context.codegen().create_library("calls")
        module = library.create_ir_module("calls")
        for i, kind in enumerate(missing):
            function = ir.Function(module, _CALLS if kind == _CALLS else _CALL, f"calls{i}")
            b = Emitter(context, ir.IRBuilder(function.append_basic_block()))
            if kind == _CALLS:
                _make_calls(b, *function.args)
            else:
                _make_call(b, kind, *function.args)
        library.add_ir_module(module)
        library.finalize()
        _libraries.append(library)
        _addresses.update({kind: library.get_pointer_to_function(f"calls{i}") for i, kind in enumerate(missing)})
    return _addresses


def _make_call(b: Emitter, native: ir.FunctionType, block: ir.Value) -> None:
    """Call a kernel of this type; returns its status. Words hold the least significant bytes first."""
    kernel = b.inttoptr(b.load(block, I64), native.as_pointer())
    result, error = (b.alloca(kind.pointee) for kind in native.args[:2])
    words = [b.load(b.gep(block, [I64(i)]), kind) for i, kind in enumerate(native.args[2:], 1)]
    b.ret(b.call(kernel, [result, error, *words]))


def _make_calls(b: Emitter, table: ir.Value, count: ir.Value) -> None:
    """Make calls, from a table of the addresses of their functions and of their blocks, until one has an error; returns its status."""
    with cgutils.for_range(b.builder, count) as loop:
        caller, block = (b.load(b.gep(table, [b.add(b.mul(loop.index, 2), i)]), I64) for i in (I64(0), I64(1)))
        status = b.call(b.inttoptr(caller, _CALL.as_pointer()), [b.inttoptr(block, _WORDS)])
        fine = b.or_(b.icmp_signed("==", status, I32(0)), b.icmp_signed("==", status, I32(_NONE)))
        with b.if_then(b.not_(fine)):
            b.ret(status)
    b.ret(I32(0))


_as_python = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)  # holds Python's lock, like a kernel that Python calls
