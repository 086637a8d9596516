"""LLVM IR in few words, and functions made of it that kernels call: Numba inlines them.

    @emitted(returns=first)
    def scaled(b, tile, numbers, start):
        return [b.fmul(register, b.load(numbers.at(start), V16F32)) for register in tile]

`b` is an Emitter. A tile comes as the list of its registers, an array or a pointer as a `Place`, a named tuple as one of these, and any
other argument as an LLVM value. Arithmetic also takes plain numbers, which stand for constants of the other operand's type in every lane.

A logical register has 512 bits (16 float32, 16 int32 or 64 bytes). LLVM splits it into the processor's own: one AVX-512 register, two of
AVX2, four of SSE or NEON. Offsets and strides are in elements of the array they belong to. Nothing is bounds-checked here.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from ..processor import architecture, cpu_features, instruction_path

LANES = 16  # float32 or int32 numbers in a logical register
STEP = 64  # bytes in a logical register: packed weights per ternary step

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
V16F32, V16I32, V64I8, V32I16 = ir.VectorType(F32, 16), ir.VectorType(I32, 16), ir.VectorType(I8, 64), ir.VectorType(I16, 32)
V16I8, V16I16, V16HALF, V16I1 = ir.VectorType(I8, 16), ir.VectorType(I16, 16), ir.VectorType(HALF, 16), ir.VectorType(ir.IntType(1), 16)


def has_fma() -> bool:
    """Whether the processor has fused multiply-add. Otherwise it is a library call for each number."""
    return "fma" in cpu_features() or architecture() == "aarch64"


def converts_half() -> bool:
    """Whether the processor widens float16 itself. Otherwise LLVM calls a runtime library, which may be missing."""
    return "f16c" in cpu_features() or architecture() == "aarch64"


def is_wide() -> bool:
    """Whether 32 registers of 512 bits hold the accumulators of a large tile."""
    return "avx512f" in cpu_features()


# --- what functions take --------------------------------------------------------------------------------------------------------------


class Tile(types.Type):
    """`rows` x `columns` registers of 16 lanes; `kind` is "f32" or "i32".

    Numba carries a tile through a loop as one value, and LLVM keeps it in registers. Its shape is part of its type: a function that takes a
    tile is compiled once for each shape, and steps unroll themselves over it.
    """

    def __init__(self, kind: str, rows: int, columns: int):
        self.rows, self.columns = rows, columns
        self.count = rows * columns
        self.vector = {"f32": V16F32, "i32": V16I32}[kind]
        super().__init__(f"Tile({kind}, {rows}x{columns})")


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, tile: Tile):
        super().__init__(manager, tile, ir.ArrayType(tile.vector, tile.count))


class Registers(list):
    """The registers of a tile: number row * columns + column."""

    def __init__(self, tile: Tile, registers: Sequence[ir.Value]):
        super().__init__(registers)
        self.rows, self.columns, self.vector = tile.rows, tile.columns, tile.vector


class Place:
    """The place of the numbers of an array, or of those at a pointer."""

    def __init__(self, b: "Emitter", kind: types.Array | types.CPointer, value: ir.Value):
        self.b, self.dtype = b, kind.dtype
        self.data = value if isinstance(kind, types.CPointer) else b.context.make_array(kind)(b.context, b.builder, value).data

    def at(self, offset: ir.Value | int) -> ir.Value:
        """A pointer to the element of this number."""
        return self.b.gep(self.data, [constant(I64, offset)])


class Strided(NamedTuple):
    """Rows of numbers, as a function takes them: an array or a pointer, the offset of the first row, and the distance to the next."""

    numbers: Any
    start: Any
    stride: Any


def constant(kind: ir.Type, value: Any) -> ir.Value:
    """An LLVM value as it is; a number or a list of numbers as a constant, None as zeros."""
    if isinstance(value, ir.Value):
        return value
    if isinstance(kind, ir.VectorType) and isinstance(value, int | float):
        value = [value] * kind.count
    return ir.Constant(kind, value)


class Emitter:
    """An LLVM builder with more operations, in Numba's context for the processor."""

    def __init__(self, context: Any, builder: ir.IRBuilder):
        self.context, self.builder = context, builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builder, name)

    @property
    def path(self) -> str:
        """The instructions of byte dot products: see processor.py."""
        return instruction_path()

    # memory

    def load(self, pointer: ir.Value, kind: ir.Type) -> ir.Value:
        """A number or vector of this kind, aligned or not."""
        loaded = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), typ=kind)
        loaded.align = 1
        return loaded

    def load_masked(self, pointer: ir.Value, vector: ir.VectorType, mask: ir.Value) -> ir.Value:
        """Lanes that the mask does not have are 0, and are not read."""
        name = f"llvm.masked.load.v16{vector.element.intrinsic_name}.p0"
        pointer = self.builder.bitcast(pointer, vector.as_pointer())
        return self.named(name, vector, pointer, constant(I32, 1), mask, constant(vector, None))

    def store(self, value: ir.Value, pointer: ir.Value, align: int = 1) -> None:
        self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer()), align=align)

    def store_masked(self, value: ir.Value, pointer: ir.Value, mask: ir.Value) -> None:
        """Lanes that the mask does not have are not written."""
        name = f"llvm.masked.store.v16{value.type.element.intrinsic_name}.p0"
        pointer = self.builder.bitcast(pointer, value.type.as_pointer())
        self.named(name, ir.VoidType(), value, pointer, constant(I32, 4), mask)

    def pointer(self, address: ir.Value, plus: int = 0) -> ir.Value:
        """A pointer to the bytes at an address, which is an integer."""
        return self.builder.inttoptr(self.add(address, plus), I8.as_pointer())

    def moved(self, pointer: ir.Value, count: ir.Value | int) -> ir.Value:
        """A pointer to bytes, moved on by a number of bytes."""
        return self.builder.gep(self.builder.bitcast(pointer, I8.as_pointer()), [constant(I64, count)])

    def prefetch(self, pointer: ir.Value, level: int = 2) -> None:
        """Ask for a cache line, to be read from the cache of this level."""
        self.named("llvm.prefetch.p0", ir.VoidType(), pointer, *(constant(I32, n) for n in (0, 4 - level, 1)))  # to read, level, data

    def place(self, start: ir.Value, stride: ir.Value, index: int, plus: int = 0) -> ir.Value:
        """start + index * stride + plus."""
        return self.add(self.add(start, self.mul(stride, index)), plus)

    def clamped(self, start: ir.Value, stride: ir.Value, index: int, valid: ir.Value) -> ir.Value:
        """Offset of row `index` of a tile. Rows past the last valid one repeat it, so that edge tiles need no special code."""
        last, row = self.sub(valid, 1), constant(valid.type, index)
        return self.add(start, self.mul(stride, self.select(self.icmp_signed("<", row, last), row, last) if index else row))

    def row(self, rows: Strided, index: int, plus: int = 0, valid: ir.Value = None) -> ir.Value:
        """A pointer to number `plus` of a row: of the last of `valid` ones where it is beyond them."""
        offset = self.place(rows.start, rows.stride, index) if valid is None else self.clamped(rows.start, rows.stride, index, valid)
        return rows.numbers.at(self.add(offset, plus))

    # registers

    def named(self, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
        """A call of one of LLVM's functions, such as an instruction of one processor."""
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), list(values))

    def by_pieces(self, name: str, pieces: int, result: ir.VectorType, *values: ir.Value) -> ir.Value:
        """An instruction on each of the pieces, the processor's registers, of some logical registers."""
        part = ir.VectorType(result.element, result.count // pieces)
        return self.joined([self.named(name, part, *own) for own in zip(*(self.slices(x, pieces) for x in values), strict=True)])

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.named("llvm.fma.f32" if a.type == F32 else f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)

    def splat(self, scalar: ir.Value, vector: ir.VectorType) -> ir.Value:
        undefined = ir.Constant(vector, ir.Undefined)
        one = self.builder.insert_element(undefined, scalar, constant(I32, 0))
        return self.builder.shuffle_vector(one, undefined, constant(ir.VectorType(I32, vector.count), None))

    def shuffled(self, vector: ir.Value, order: Sequence[int], other: ir.Value | None = None) -> ir.Value:
        """These lanes of a vector, or of one and then another."""
        if other is None and list(order) == list(range(vector.type.count)):
            return vector
        other = ir.Constant(vector.type, ir.Undefined) if other is None else other
        return self.builder.shuffle_vector(vector, other, constant(ir.VectorType(I32, len(order)), list(order)))

    def slices(self, value: ir.Value, pieces: int) -> list[ir.Value]:
        n = value.type.count // pieces
        return [self.shuffled(value, range(p * n, p * n + n)) for p in range(pieces)]

    def joined(self, parts: Sequence[ir.Value]) -> ir.Value:
        while len(parts) > 1:
            parts = [self.shuffled(a, range(2 * a.type.count), b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def mask(self, count: ir.Value) -> ir.Value:
        """The mask of the first `count` of 16 lanes."""
        return self.icmp_signed("<", constant(V16I32, list(range(LANES))), self.splat(self.trunc(count, I32), V16I32))


def _arithmetic(name: str) -> Callable:
    def operation(self: Emitter, a: ir.Value, b: Any, **options: Any) -> ir.Value:
        return getattr(self.builder, name)(a, constant(a.type, b), **options)

    return operation


for _name in ("add", "sub", "mul", "shl", "lshr", "ashr", "and_", "or_", "xor", "fadd", "fsub", "fmul", "fdiv"):
    setattr(Emitter, _name, _arithmetic(_name))


# --- functions ------------------------------------------------------------------------------------------------------------------------


def first(kind: types.Type, *others: types.Type) -> types.Type:
    """The result has the type of the first argument."""
    return kind


def emitted(returns: types.Type | Callable = types.none, takes: types.Type | None = None, literal: bool = False) -> Callable:
    """A decorator: a function of an Emitter and of what it takes becomes one that kernels call.

    returns: the type of the result, or a function that chooses it by the types of the arguments. takes: the type of every argument. Without
    it integers are 64 bits and floats 32. literal: integers and names are constants of the kernel, and come as Python's.
    """

    def decorate(function: Callable) -> Callable:
        def typed(typing_context, *kinds):
            arguments = [takes or _taken(kind, literal) for kind in kinds]
            if literal and any(kind in (types.intp, types.unicode_type) for kind in arguments):
                return None  # no constant
            return (returns if isinstance(returns, types.Type) else returns(*kinds))(*arguments), codegen

        def codegen(context, builder, signature, values):
            b = Emitter(context, builder)
            made = function(b, *(_operand(b, kind, value) for kind, value in zip(signature.args, values, strict=True)))
            if made is None:
                return context.get_dummy_value()
            return _packed(b, signature.return_type, made) if isinstance(made, list) else made

        parameters = list(inspect.signature(function).parameters.values())
        typed = update_wrapper(typed, function)
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return intrinsic(prefer_literal=literal)(typed)

    return decorate


def _taken(kind: types.Type, literal: bool) -> types.Type:
    if literal and isinstance(kind, types.Literal):
        return kind
    return types.intp if isinstance(kind, types.Integer) else types.float32 if isinstance(kind, types.Float) else kind


def _operand(b: Emitter, kind: types.Type, value: ir.Value) -> Any:
    if isinstance(kind, Tile):
        return Registers(kind, [b.extract_value(value, i) for i in range(kind.count)])
    if isinstance(kind, types.Array | types.CPointer):
        return Place(b, kind, value)
    if isinstance(kind, types.BaseNamedTuple):
        return kind.instance_class(*(_operand(b, types.unliteral(own), b.extract_value(value, i)) for i, own in enumerate(kind)))
    return kind.literal_value if isinstance(kind, types.Literal) else value


def _packed(b: Emitter, tile: Tile, registers: Sequence[ir.Value]) -> ir.Value:
    value = ir.Constant(ir.ArrayType(tile.vector, tile.count), ir.Undefined)
    for i, register in enumerate(registers):
        value = b.insert_value(value, register, i)
    return value
