"""The types that engines round numbers to, as one record: the grid of elements, how many share a scale, and how scales are kept.

Sources: IEEE 754; the OCP's 8-bit floating point (E4M3, E5M2) and microscaling formats (MXFP8, MXFP6, MXFP4); NVFP4 as cuDNN describes it;
ggml's blocks (ggml-quants.c).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...base.errors import OptionError
from .roundings import Array, cut_to_digits, to_bfloat16, to_digits, to_float16


class Grid(NamedTuple):
    """Elements: their significant bits, the smallest number that has them, below which the step stays the same, and the largest."""

    digits: int
    least: float
    most: float


GRIDS = {
    "float16": Grid(11, 2.0**-14, 65504.0),
    "bfloat16": Grid(8, 2.0**-126, 2.0**128 - 2.0**120),
    "tf32": Grid(11, 2.0**-126, 2.0**128 - 2.0**117),
    "e5m2": Grid(3, 2.0**-14, 57344.0),
    "e4m3": Grid(4, 2.0**-6, 448.0),
    "e3m2": Grid(3, 2.0**-2, 28.0),
    "e2m3": Grid(4, 1.0, 7.5),
    "e2m1": Grid(2, 1.0, 6.0),
    "int8": Grid(8, 128.0, 127.0),
    "int6": Grid(6, 32.0, 31.0),
    "int5": Grid(5, 16.0, 15.0),
    "int4": Grid(4, 8.0, 7.0),
    "q4": Grid(4, 8.0, 8.0),
}
"""Integers are numbers below the smallest one that has all bits."""
ROW, TENSOR = -1, 0
_BLOCKS = {"row": ROW, "tensor": TENSOR}
_SCALES = ("float32", "float16", "pow2", "e4m3")


@dataclass(frozen=True)
class Rounding:
    """A type that numbers are rounded to.

    block: the numbers that share a scale: so many, those of a ROW, all of the TENSOR; None: there is no scale. scale: how scales are kept;
    pow2 are those of MX formats, e4m3 are in units of the tensor's. halves: half steps that a number may be off.
    """

    grid: str
    block: int | None = None
    scale: str = "float32"
    halves: int = 1
    is_cut: bool = False

    def __str__(self) -> str:
        if self in _NAMES.values():
            return next(name for name, one in _NAMES.items() if one == self)
        block = {ROW: "row", TENSOR: "tensor"}.get(self.block or 0, str(self.block)) if self.block is not None else ""
        return ":".join([self.grid, *[block] * bool(block), *[self.scale] * (self.scale != "float32"), *["cut"] * self.is_cut])

    @property
    def noun(self) -> str:
        """Its name in words."""
        grid = self.grid.replace("tf", "TF") + ", by truncation" * self.is_cut
        if self in _NAMES.values():
            return str(self).upper()
        shared = {None: "", ROW: " with a scale for each row", TENSOR: " with one scale"}
        return grid + shared.get(self.block, f" with a scale for each {self.block}")

    @property
    def is_by_row(self) -> bool:
        """Whether a row is rounded without the others."""
        return self.block != TENSOR and self.scale != "e4m3"

    def __call__(self, x: Array) -> Array:
        """x [.., width] rounded; NaN where its rows are no blocks."""
        if self.block is None:
            return self._on_grid(x)
        blocks = self.blocks(x)
        if blocks is None:
            return np.full_like(x, np.nan)
        coded, kept = self._steps(blocks)
        return (self._on_grid(blocks / coded) * kept).reshape(x.shape)

    def half_steps(self, x: Array) -> Array:
        """The largest error of each number [.., width], in any order of the roundings of scales and codes."""
        digits, least, most = GRIDS[self.grid]
        size, part = np.abs(x), self.halves * 2.0 ** (self.is_cut - digits)
        if self.block is None:
            return part * (size + least)
        blocks = self.blocks(size)
        blocks = size if blocks is None else blocks
        step = self._steps(blocks)[0]
        half = part * (blocks * (least < most) + least * step)
        if self.scale == "pow2":  # some engines take the smaller scale, and cut what is larger then
            half = np.maximum(half, blocks - most * step / 2)
        return half.reshape(x.shape) + (2.0**-11 * size if self.scale == "float16" else 0.0)

    def blocks(self, x: Array) -> Array | None:
        """x with the numbers that share a scale along the last axis; None where its rows are no such blocks."""
        if self.block in (None, ROW, TENSOR):
            return x
        rows = x if x.shape[-1] % self.block == 0 else x.reshape(len(x), -1)
        return None if rows.shape[-1] % self.block else rows.reshape(*rows.shape[:-1], -1, self.block)

    def _steps(self, blocks: Array) -> tuple[Array, Array]:
        """The scale that numbers are divided by, and the one that codes are multiplied by."""
        largest = np.abs(blocks).max(axis=None if self.block == TENSOR else -1, keepdims=True)
        step = np.where(largest == 0, 1, largest) / GRIDS[self.grid].most
        if self.scale == "float16":
            return step, to_float16(step)
        if self.scale == "pow2":
            step = np.exp2(np.ceil(np.log2(step)))
        elif self.scale == "e4m3":
            unit = step.max() / GRIDS["e4m3"].most
            step = np.maximum(Rounding("e4m3")(step / unit), 2.0**-9) * unit
        return step, step

    def _on_grid(self, x: Array) -> Array:
        """x in elements, rounded to float32 before if it is as large as that."""
        if self.grid in _HALVES and not self.is_cut:
            return _HALVES[self.grid](x)
        digits, least, most = GRIDS[self.grid]
        step = least * 2.0 ** (1 - digits)
        fine, coarse = (np.trunc, cut_to_digits) if self.is_cut else (np.rint, to_digits)
        return np.clip(np.where(np.abs(x) < least, fine(x / step) * step, coarse(x, digits)), -most, most)


_HALVES = {"float16": to_float16, "bfloat16": to_bfloat16}
_NAMES = {
    "q8_0": Rounding("int8", 32, "float16"),
    "q6_K": Rounding("int6", 16, "float16", halves=2),  # whose scales are 8 bits of a larger one
    "q4_0": Rounding("q4", 32, "float16", halves=2),  # whose other end is a whole step short
    "mxfp8": Rounding("e4m3", 32, "pow2"),
    "mxfp6": Rounding("e2m3", 32, "pow2"),
    "mxfp4": Rounding("e2m1", 32, "pow2"),
    "nvfp4": Rounding("e2m1", 16, "e4m3"),
}
_SHORT = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@lru_cache
def format_of(name: str) -> Rounding:
    """The type of a name such as bf16, int8:row, e4m3:tensor, e2m1:32:pow2 or mxfp4. Raises OptionError."""
    plain = spelled(name)
    if plain in _NAMES:
        return _NAMES[plain]
    grid, *rest = plain.split(":")
    is_cut = rest[-1:] == ["cut"]
    block, scale = (*rest[: len(rest) - is_cut], "", "")[:2]
    known = grid in GRIDS and (block in _BLOCKS or (block.isdecimal() and int(block) > 1) or not block) and scale in (*_SCALES, "")
    if not known or len(rest) > 2 + is_cut:
        blocks = "BLOCK is row, tensor or a number, SCALE one of " + ", ".join(_SCALES)
        raise OptionError(f"the type is {name!r}, expected one of {', '.join((*GRIDS, *_NAMES))}, or GRID:BLOCK:SCALE, where {blocks}")
    own = _BLOCKS.get(block, int(block) if block.isdecimal() else None)
    if own is None and grid.startswith(("int", "q")):
        own = ROW
    return Rounding(grid, own, scale or "float32", is_cut=is_cut)


def spelled(name: str) -> str:
    """The name of a type as it is kept: f16 is float16, Q8_0 is q8_0."""
    low = name.lower()
    grid, colon, rest = low.partition(":")
    return next((one for one in _NAMES if one.lower() == low), _SHORT.get(grid, grid) + colon + rest)


def half_steps(x: Array, kind: str) -> Array:
    """The largest error of each number of [.., width] that is kept in this type."""
    return np.zeros_like(x) if kind == "float32" else format_of(kind).half_steps(x)


def rounded(x: Array, kind: str) -> Array:
    """Numbers [.., width] in this type, about as engines round to it."""
    found = format_of(kind)
    if found.halves == 1 and found.blocks(x) is not None:
        return found(x)
    step = 2 * found.half_steps(x)
    return np.rint(x / np.where(step == 0, 1, step)) * step


EACH = {one.noun: one for one in map(Rounding, ("bfloat16", "float16", "tf32"))}
EACH |= {one.noun: one for one in (Rounding("tf32", is_cut=True), Rounding("e4m3"), Rounding("e5m2"))}
"""Types to which each number is rounded by itself, by their names in words."""
TYPES = EACH | {
    one.noun: one
    for one in map(
        format_of, ("int8:row", "int8:tensor", "e4m3:row", "e4m3:tensor", "q8_0", "int4:row", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
    )
}
"""Types that engines keep numbers in, inside an operation or between two."""
NARROW: dict[str, Rounding] = {kind: format_of(kind) for kind in ("float16", "bfloat16", "q8_0", "e4m3", "e5m2")}
"""The types that engines keep activations, keys and values in."""
