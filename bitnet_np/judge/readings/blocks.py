"""Weights of ggml's block types, read with one thing wrong: bits, byte, order, scale, minimum or zero point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...kernels.block_formats import FORMATS, RUN, Bits, Digit, Factor, Flags, Format, Integers
from ...model import Blocks, Ternary
from .product import Product, orders
from .wrong import FEW, Array, Wrong

Codes = NDArray[np.int64]

_OTHER_ORDER = "weights of a block are read in another order: "
_SHIFTS = (-4, -2, -1, 1, 2, 4)  # bytes


@dataclass(frozen=True)
class _Parts:
    """Rows of blocks, taken apart: weight = scale * code + minimum."""

    planes: tuple[Codes, ...]  # the bits of codes from low to high, [n, M] each
    bias: int
    scale: Array  # [n, M]
    minimum: Array  # [n, M], 0 where the type has none

    @property
    def codes(self) -> Codes:
        return sum(self.planes, start=np.zeros_like(self.planes[0])) - self.bias

    def matrix(self, codes: Codes | None = None) -> Array:
        """The weights [n, M]."""
        return self.scale * (self.codes if codes is None else codes) + self.minimum


def _bytes(blocks: Blocks, rows: NDArray[np.int64], layout: np.dtype) -> NDArray[np.uint8]:
    """[n, blocks of a row, bytes]."""
    return blocks.data[rows].view(np.uint8).reshape(len(rows), -1, layout.itemsize)


def _part(raw: NDArray[np.uint8], part: Bits | Flags | Digit) -> Codes:
    """One part of each integer, [n, blocks, 16 or 32]."""
    lane = np.arange(RUN)
    if isinstance(part, Flags):
        return (raw[..., part.at + lane // 8].astype(np.int64) >> lane % 8 & 1) << part.place
    taken = raw[..., part.at].astype(np.int64)
    if isinstance(part, Digit):
        return (taken * np.array(part.factor) & 255) * 3 >> 8
    return (taken >> np.array(part.shift) & np.array(part.mask)) << part.place


def _integers(raw: NDArray[np.uint8], integers: Integers) -> Codes:
    total = sum(_part(raw, part) for part in integers.parts)
    return np.where((total > 127) & integers.signed, total - 256, total) - integers.bias


def _factor(raw: NDArray[np.uint8], form: Format, factor: Factor, keep: Codes | int = -1) -> Array:
    """A scale or minimum of each weight, [n, M]. keep: the bits of its integers that are kept, of all or of each [16]."""
    start = form.start(factor)
    half = np.ascontiguousarray(raw[..., start : start + 2]).view(np.float16).astype(np.float64)  # [n, blocks, 1]
    runs = form.weights // RUN
    if factor.integers is not None:
        half = half * (_integers(raw, factor.integers) & keep)[..., list(factor.lanes)][..., :runs]
    each = np.repeat(np.broadcast_to(half, (*raw.shape[:2], runs)), RUN, axis=-1)
    return (-each if factor.negative else each).reshape(len(raw), -1)


def _planes(raw: NDArray[np.uint8], form: Format) -> tuple[Codes, ...]:
    """The bits of codes from low to high, [n, M] each; of signed codes the one plane of their numbers."""
    count = max(len(codes.parts) for codes in form.codes)
    planes = (np.concatenate([_part(raw, codes.parts[i]) for codes in form.codes], axis=-1).reshape(len(raw), -1) for i in range(count))
    return tuple(np.where(plane > 127, plane - 256, plane) if form.codes[0].signed else plane for plane in planes)


def _taken_apart(blocks: Blocks, rows: NDArray[np.int64]) -> _Parts:
    form = FORMATS[blocks.type.name]
    raw = _bytes(blocks, rows, form.layout)
    scale = _factor(raw, form, form.scale)
    minimum = np.zeros_like(scale) if form.minimum is None else _factor(raw, form, form.minimum)
    return _Parts(_planes(raw, form), form.codes[0].bias, scale, minimum)


def misreadings(blocks: Blocks, rows: NDArray[np.int64]) -> Iterator[tuple[str, Array]]:
    """Yields rows of a table read with one thing wrong, in words and as weights [n, M]."""
    form = FORMATS[blocks.type.name]
    raw, parts = _bytes(blocks, rows, form.layout), _taken_apart(blocks, rows)
    yield from _other_codes(form, raw, parts)
    yield from _other_factors(form, raw, parts)
    width = parts.scale.shape[1]
    for order, source in orders(width):
        if width % form.weights == 0:
            yield _OTHER_ORDER + order, parts.matrix(parts.codes[:, source])
        if len(parts.planes) > 1:
            yield f"upper bits of codes are those of other weights: {order}", _with_upper(parts, parts.planes[-1][:, source])


def _with_upper(parts: _Parts, upper: Codes) -> Array:
    return replace(parts, planes=(*parts.planes[:-1], upper)).matrix()


def _other_codes(form: Format, raw: NDArray[np.uint8], parts: _Parts) -> Iterator[tuple[str, Array]]:
    codes = parts.codes
    if form.codes[0].signed:
        yield "codes are read as unsigned bytes: their sign is lost", parts.matrix(codes & 255)
    bits = int(sum(plane.max(initial=0) for plane in parts.planes)).bit_length()
    if parts.bias:
        yield (
            f"codes are read as signed numbers of {bits} bits",
            parts.matrix((codes + parts.bias + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)),
        )
    if len(parts.planes) > 1:
        yield "upper bits of codes are lost", _with_upper(parts, 0 * parts.planes[-1])
    for shift in _SHIFTS:
        moved = np.roll(raw.reshape(len(raw), -1), -shift, axis=1).reshape(raw.shape)
        side = "late" if shift > 0 else "early"
        yield (
            f"codes are read {abs(shift)} byte{'s' * (abs(shift) > 1)} too {side}: an offset in the block",
            replace(parts, planes=_planes(moved, form)).matrix(),
        )


def _other_factors(form: Format, raw: NDArray[np.uint8], parts: _Parts) -> Iterator[tuple[str, Array]]:
    """Yields weights with scales and minimums of another block, of other fields, or with fewer bits."""
    for shift, which in ((-1, "next"), (1, "previous")):
        moved = np.roll(raw, shift, axis=1)
        yield f"blocks have the scale of the {which} block", replace(parts, scale=_factor(moved, form, form.scale)).matrix()
    first = np.broadcast_to(raw[:, :1], raw.shape)
    yield "all blocks of a row have the scale of its first block", replace(parts, scale=_factor(first, form, form.scale)).matrix()
    if form.scale.integers is not None and form.scale.integers.signed:
        yield "scales are read as unsigned bytes", replace(parts, scale=_factor(raw, form, form.scale, 255)).matrix()
    if form.minimum is None:
        return
    scale, minimum = form.scale, form.minimum
    exchanged = {
        f"{scale.half} and {minimum.half}, the factors of scales and minimums, are exchanged": (
            replace(scale, half=minimum.half),
            replace(minimum, half=scale.half),
        ),
        "scales and minimums are exchanged": (
            replace(scale, integers=minimum.integers, lanes=minimum.lanes),
            replace(minimum, integers=scale.integers, lanes=scale.lanes),
        ),
    }
    for text, (other_scale, other_minimum) in exchanged.items():
        yield text, replace(parts, scale=_factor(raw, form, other_scale), minimum=_factor(raw, form, other_minimum)).matrix()
    if scale.integers is not None:
        upper_half = np.where(np.arange(RUN) < RUN // 2, -1, 15)
        for keep, which in ((15, ""), (upper_half, "the second half of the ")):
            fewer = _factor(raw, form, scale, keep), _factor(raw, form, minimum, keep)
            yield f"upper bits of {which}scales and minimums are lost", replace(parts, scale=fewer[0], minimum=fewer[1]).matrix()
            yield f"upper bits of {which}scales are lost", replace(parts, scale=fewer[0]).matrix()
            yield f"upper bits of {which}minimums are lost", replace(parts, minimum=fewer[1]).matrix()


# --- readings -------------------------------------------------------------------------------------------------------------------------


def misread_blocks(wrong: Wrong) -> str | None:
    """What is wrong in reading blocks of weights, or the order in which weights of any type are read."""
    product = wrong.product
    if product is None or not product.error.any():
        return None
    if isinstance(product.table, Blocks):
        zero = _zero_point(product, _taken_apart(product.table, product.rows))
        if zero is not None:
            return zero
        few = product.few
        for text, matrix in misreadings(product.table, few.rows):
            if few.accounts(few.inputs @ matrix.T) and product.accounts(product.inputs @ _misread(product.table, product.rows, text).T):
                return text
    for text, source in orders(product.width):
        if product.is_by(partial(_reordered, source)):
            return f"weights of each row are read in another order: {text}"
    return None


def _reordered(source: NDArray[np.int64], product: Product) -> Array:
    return product.matrix[:, source]


def _misread(blocks: Blocks, rows: NDArray[np.int64], text: str) -> Array:
    """The rows as that misreading has them."""
    return next(matrix for name, matrix in misreadings(blocks, rows) if name == text)


def _zero_point(product: Product, parts: _Parts) -> str | None:
    """The number that is subtracted from all codes, or the factor of all minimums, where it is another."""
    x = product.inputs
    columns = [x @ (parts.scale * parts.codes).T, x @ parts.scale.T] + ([x @ parts.minimum.T] if parts.minimum.any() else [])
    design = np.stack([c.ravel() for c in columns], axis=1)
    if design.shape[0] < 4 * design.shape[1]:
        return None
    fit = np.linalg.lstsq(design, product.theirs.ravel(), rcond=1e-9)[0]
    if not product.accounts((design @ fit).reshape(product.theirs.shape)):
        return None
    factor, offset, minimums = (*fit, 1.0)[:3]
    scaled, moved, changed = abs(factor - 1) > 1e-3, abs(offset) > 1e-2, abs(minimums - 1) > 1e-3
    if moved and not scaled and not changed:
        subtracted = parts.bias - offset
        if abs(subtracted) < 1e-2:
            return f"{parts.bias} is not subtracted from codes: the zero point is missing"
        return f"{subtracted:.4g} is subtracted from codes instead of {parts.bias}: another zero point"
    if changed and not scaled and not moved:
        if abs(minimums) < 1e-3:
            return "minimums of blocks are left out"
        return (
            "minimums of blocks have the wrong sign"
            if abs(minimums + 1) < 1e-3
            else f"minimums of blocks are {minimums:.4g} times their right size"
        )
    return None


def block_factors(wrong: Wrong) -> str | None:
    """Blocks of weights whose scales, or whose zero points, are others: fitted to each row, where tokens are more than blocks."""
    product = wrong.product
    if product is None or not product.error.any() or isinstance(product.table, Ternary):
        return None
    known = product.independent
    for size in (256, 128, 64, 32, 16):
        count = product.width // size
        if product.width % size or count < 2:
            continue
        cut = product.inputs.reshape(len(product.inputs), count, size)
        for zero_points in (False, True):
            if count * (1 + zero_points) + 2 > known:
                continue
            fits, computed = [], np.empty_like(product.theirs)
            for row in range(len(product.rows)):
                design = np.einsum("tkb,kb->tk", cut, product.matrix[row].reshape(count, size))
                if zero_points:
                    design = np.concatenate([design, cut.sum(axis=2)], axis=1)
                fit = np.linalg.lstsq(design, product.theirs[:, row], rcond=1e-9)[0]
                computed[:, row] = design @ fit
                fits.append(fit)
            if product.accounts(computed):
                return _described(size, np.array(fits), count, product.rows)
    return None


def _described(size: int, fits: Array, count: int, rows: NDArray[np.int64]) -> str | None:
    away = np.abs(fits[:, :count] - 1).max(axis=1)
    worst = int(away.argmax())
    if fits.shape[1] > count and away[worst] < 1e-3:
        return f"a number is added to all weights of a block of {size}: minimums or zero points are misread"
    if np.ptp(fits[:, :count]) < 1e-3:
        return None  # one factor for everything: known mistakes
    factors = ", ".join(f"{f:.3g}" for f in np.round(fits[worst, :count][:FEW], 6) + 0.0) + (", ..." if count > FEW else "")
    zero_points = ", and other minimums or zero points" if fits.shape[1] > count else ""
    return f"blocks of {size} weights have other scales: {factors} times the right ones in row {rows[worst]}{zero_points}"
