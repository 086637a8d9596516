"""AMX, the matrix tiles of some of Intel's processors, and a plain twin of its instructions.

A processor has eight tiles of at most 16 rows of 64 bytes each. One instruction multiplies two tiles of bytes and adds the products to a
tile of int32. These sums are exact, so they have the same bits in any other order. If the left tile has k bytes in a row, the right
one has k / 4 rows.

The first argument of each function is a `unit`, the address of memory that belongs to one thread. Its type chooses what is compiled: uint64
stands for the processor's tiles, int64 for the twin, which keeps its tiles in that memory. The twin runs everywhere, so loops, edges and
layouts are also tested on machines without tiles. The memory begins with the 64 bytes in which Intel's manual describes a configuration:
byte 0 is 1, bytes 16 + 2 t the bytes in a row of tile t, byte 48 + t its rows.

Numbers of tiles are literals; addresses and strides count bytes. They are integers because Numba would count references to arrays in every
step of a loop. A caller must therefore hold the arrays until the last address has been used. Nothing is bounds-checked here.
"""

import ctypes
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from ..cache.disk_cache import inlined
from ..processor import architecture, cpu_features
from .emit import I8, I64, Emitter, constant

ROWS = 16  # of a tile
WIDTH = 64  # bytes of a row
SIZE = ROWS * WIDTH
_CONFIGURATION = 64  # bytes

PROCESSOR = np.zeros(_CONFIGURATION, np.uint8)
"""As much memory as a unit of the processor's tiles has. Its element type stands for them."""

PLAIN = np.zeros(_CONFIGURATION + 8 * SIZE, np.int8)
"""The same for the twin."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux, x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)


@cache
def why_absent() -> str:
    """Why this process does without tiles, "" if it has them. The first call asks Linux for permission, which lasts until exec.

    Numba's features decide, as for every instruction. Linux grants the permission from 5.16 on, unless a filter forbids the system call or
    a thread's stack for signals has no room for tiles.
    """
    if architecture() != "x86_64" or not {"amx-tile", "amx-int8", "avx512bw"} <= cpu_features():
        return "amx-int8 is not among the features that Numba compiles for"
    if sys.platform != "linux":
        return f"not known how to ask {sys.platform} for permission"
    try:
        system_call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError) as error:
        return f"no way to ask Linux for permission: {error}"
    refused = system_call(*map(ctypes.c_long, (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)))
    return f"Linux refuses permission, error {ctypes.get_errno()}" if refused else ""


def unit() -> NDArray[Any] | None:
    """PROCESSOR, or None where there are no tiles. Tests put a function that returns PLAIN in its place."""
    return None if why_absent() else PROCESSOR


# --- the twin -------------------------------------------------------------------------------------------------------------------------


def _pointer(number: types.Type) -> Callable:
    @intrinsic
    def pointer(typing_context, address):
        kind = types.CPointer(number)
        return kind(address), lambda context, builder, signature, args: builder.inttoptr(args[0], context.get_value_type(kind))

    return pointer


_bytes, _integers = _pointer(types.int8), _pointer(types.int32)


@inlined
def _tile(unit, tile):
    return unit + _CONFIGURATION + tile * SIZE


@inlined
def _clear(address, size):
    memory = _bytes(address)
    for i in range(size):
        memory[i] = 0


@inlined
def _copy(unit, tile, source, source_stride, target, target_stride):
    """Copy a tile, or data that is to become one."""
    shapes, read, written = _bytes(unit), _bytes(source), _bytes(target)
    for row in range(shapes[48 + tile]):
        for i in range(shapes[16 + 2 * tile]):
            written[row * target_stride + i] = read[row * source_stride + i]


def _plain_configure(unit):
    _clear(_tile(unit, 0), 8 * SIZE)


def _plain_release(unit):
    _clear(unit + 48, 8)  # no rows: what uses the tiles afterwards does nothing


def _plain_zero(unit, tile):
    _clear(_tile(unit, tile), SIZE)


def _plain_load(unit, tile, address, stride):
    _copy(unit, tile, address, stride, _tile(unit, tile), WIDTH)


def _plain_store(unit, tile, address, stride):
    _copy(unit, tile, _tile(unit, tile), WIDTH, address, stride)


def _plain_dot(unit, sums, x, w):
    totals, left, right = _integers(_tile(unit, sums)), _bytes(_tile(unit, x)), _bytes(_tile(unit, w))
    for i in range(_bytes(unit)[48 + x]):
        for j in range(ROWS):
            for k in range(_bytes(unit)[16 + 2 * x]):
                totals[i * ROWS + j] += np.int32(left[i * WIDTH + k]) * np.int32(right[k // 4 * WIDTH + 4 * j + k % 4])


# --- instructions ---------------------------------------------------------------------------------------------------------------------


@intrinsic
def unit_in(typing_context, memory):
    """The unit in an array of the size and element type of PROCESSOR or PLAIN."""
    unit = {types.uint8: types.uint64, types.int8: types.int64}[memory.dtype]

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, I64)

    return unit(memory), codegen


def _operation(name: str, plain: Callable, tiles: str = "", memory: str = "") -> Callable:
    """An operation: a function of a unit, tiles with these names, and memory: an address and a stride. An instruction, or its twin."""
    names, count = ["unit", *tiles.split(), *memory.replace("unit", "").split()], len(tiles.split())

    def typed(typing_context, unit, *kinds):
        return types.none(unit, *kinds[:count], *[types.intp] * (len(kinds) - count)), codegen

    def codegen(context, builder, signature, args):
        if signature.args[0] == types.int64:
            return context.compile_internal(builder, plain, signature, args)
        b = Emitter(context, builder)
        numbers = [constant(I8, kind.literal_value) for kind in signature.args[1 : 1 + count]]
        operands = [args[names.index(operand)] for operand in memory.split()]
        b.named(f"llvm.x86.{name}", ir.VoidType(), *numbers, *map(b.pointer, operands[:1]), *operands[1:])
        return context.get_dummy_value()

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("typing_context", *names)]
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(prefer_literal=True)(typed)


tile_configure = _operation("ldtilecfg", _plain_configure, memory="unit")
"""Take the shapes of the tiles from the unit's memory, and zero all tiles."""
tile_release = _operation("tilerelease", _plain_release)
"""Free all tiles. A system thread that keeps them takes longer to switch."""
tile_zero = _operation("tilezero", _plain_zero, "tile")
tile_load = _operation("tileloadd64", _plain_load, "tile", "address stride")
"""Row i of the tile = its bytes from address + i * stride on."""
tile_store = _operation("tilestored64", _plain_store, "tile", "address stride")
"""The bytes from address + i * stride on = row i of the tile."""
tile_dot = _operation("tdpbssd", _plain_dot, "sums x w")
"""sums[i, j] += the sum over k and n of x[i, 4 k + n] * w[k, 4 j + n]: int8 [rows, 64] and [16, 64] -> int32 [rows, 16]."""


@inlined
def configure(memory, tokens, width):
    """The unit in `memory`, for products: tiles 0 to 3 are sums, 4 and 5 have `width` activations of the tokens, 6 and 7 weights."""
    memory[0] = 1
    for tile in range(8):
        memory[16 + 2 * tile] = width if tile in (4, 5) else WIDTH
        memory[48 + tile] = tokens if tile < 6 else width // 4
    unit = unit_in(memory)
    tile_configure(unit)
    return unit
