"""The effect of instructions on numbers: for each opcode, a function over arrays with an element for each thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, float64, vectorize
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

DTYPES = {f"{kind}{bits}": np.dtype(f"{numpy}{bits // 8}") for kind, numpy in zip("bus", "uui", strict=True) for bits in (8, 16, 32, 64)}
DTYPES |= {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool)}


@dataclass(frozen=True)
class Rule:
    """result = function(*sources), each viewed as its dtype."""

    sources: tuple[np.dtype, ...]
    result: np.dtype
    function: Callable[..., NDArray]


@intrinsic
def _fused(typing_context, a, b, c):
    def codegen(context, builder, signature, args):
        kind = context.get_value_type(signature.return_type)
        name = {types.float32: "llvm.fma.f32", types.float64: "llvm.fma.f64"}[signature.return_type]
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
        return builder.call(function, args)

    return a(a, a, a), codegen


fma = vectorize([float32(float32, float32, float32), float64(float64, float64, float64)])(lambda a, b, c: _fused(a, b, c))


def _shifted_left(x: NDArray, n: NDArray) -> NDArray:
    bits = x.dtype.itemsize * 8
    return np.where(n < bits, x << np.minimum(n, bits - 1).astype(x.dtype), x.dtype.type(0))


def _shifted_right(x: NDArray, n: NDArray) -> NDArray:
    """The shift to the right; a signed number is filled up with its sign."""
    bits = x.dtype.itemsize * 8
    shifted = x >> np.minimum(n, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(n < bits, shifted, x.dtype.type(0))


def _quotient(a: NDArray, b: NDArray) -> NDArray:
    """Rounded towards zero, as in C."""
    return (a - np.fmod(a, b)) // b


def _wider(a: NDArray, b: NDArray) -> NDArray:
    wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
    return a.astype(wide) * b.astype(wide)


def bytes_of(words: NDArray[np.uint32], kind: type) -> NDArray[np.int32]:
    """[...] -> [..., 4]"""
    return np.ascontiguousarray(words)[..., None].view(kind).astype(np.int32)


def _to_int(x: NDArray, result: np.dtype) -> NDArray:
    """Rounded towards zero and limited to the range of the result; NaN becomes 0."""
    wide, limits = np.trunc(x.astype(np.float64)), np.iinfo(result)
    inside = np.where(np.isnan(wide), 0, np.clip(wide, limits.min, limits.max))
    return inside.astype(result)


_WITH_TWO: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mul.lo": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "rem": np.fmod,
    "div": _quotient,
}
_OF_FLOATS: dict[str, Callable] = {"min": np.fmin, "max": np.fmax, "div": np.divide}
_WITH_ONE: dict[str, Callable] = {"neg": np.negative, "not": np.invert, "abs": np.abs, "mov": lambda x: x, "sqrt": np.sqrt}
_COMPARED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def _comparison(name: str, floats: bool) -> Callable:
    """A comparison of floats with a NaN is false; true if its name ends in `u`."""
    if not floats:
        return _COMPARED[name]
    compare = _COMPARED[name.removesuffix("u")]
    if name in _COMPARED:
        return lambda a, b: compare(a, b) & ~_unordered(a, b)
    return lambda a, b: compare(a, b) | _unordered(a, b)


def _unordered(a: NDArray, b: NDArray) -> NDArray[np.bool_]:
    return np.isnan(a) | np.isnan(b)


@cache
def rule(opcode: str) -> Rule | None:
    """The function of an opcode; None for opcodes that do more than compute with numbers."""
    name, *parts = opcode.split(".")
    kind = parts[-1] if parts else ""
    if kind not in DTYPES:
        return None
    dtype, pred, u32, modifiers = DTYPES[kind], DTYPES["pred"], DTYPES["u32"], [part for part in parts[:-1] if part != "rn"]
    floats = dtype.kind == "f"
    if name == "mul" and modifiers == ["wide"]:
        return Rule((dtype, dtype), np.dtype(f"{dtype.kind}{dtype.itemsize * 2}"), _wider)
    if name == "setp":
        return Rule((dtype, dtype), pred, _comparison(*modifiers, floats))
    if name == "cvt":
        *modifiers, to = modifiers
        result = DTYPES[to]
        if modifiers not in ([], ["rzi"]) or (floats and result.kind != "f" and modifiers != ["rzi"]):
            return None
        return Rule((dtype,), result, (lambda x: _to_int(x, result)) if modifiers else (lambda x: x.astype(result)))
    if modifiers not in ([], ["lo"]) or (floats and modifiers):
        return None
    name = ".".join([name, *modifiers])
    special: dict[str, tuple[tuple[np.dtype, ...], Callable]] = {
        "shl": ((dtype, u32), _shifted_left),
        "shr": ((dtype, u32), _shifted_right),
        "selp": ((dtype, dtype, pred), lambda a, b, p: np.where(p, a, b)),
        "fma": ((dtype, dtype, dtype), fma),
        "rcp": ((dtype,), lambda x: dtype.type(1) / x),
    }
    if name in special:
        return Rule(special[name][0], dtype, special[name][1])
    if function := (_OF_FLOATS.get(name) if floats else None) or _WITH_TWO.get(name):
        return Rule((dtype, dtype), dtype, function)
    return Rule((dtype,), dtype, _WITH_ONE[name]) if name in _WITH_ONE else None


@cache
def literal(value: int, dtype: np.dtype) -> Any:
    """The bits of a literal as a number of this type."""
    if dtype.kind == "b":
        return np.bool_(value != 0)
    bits = dtype.itemsize * 8
    return np.array(value & ((1 << bits) - 1), f"u{dtype.itemsize}").view(dtype)[()]
