"""Weights of ggml's block types, read with one thing wrong: bits, byte, order, scale, minimum or zero point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce

import numpy as np
from numpy.typing import NDArray

from ...kernels.block_formats import FORMATS, RUN, Bits, Digit, Factor, Flags, Format, Integers
from ...model.records import Blocks
from .functions import Array
from .orders import orders

Codes = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_SHIFTS = (-4, -2, -1, 1, 2, 4)  # bytes


@dataclass(frozen=True)
class Parts:
    """Rows of blocks, taken apart: weight = scale * code + minimum."""

    form: Format
    raw: Bytes  # [n, blocks of a row, bytes]
    planes: tuple[Codes, ...]  # the bits of codes from low to high, [n, M] each
    bias: int
    scale: Array  # [n, M]
    minimum: Array  # [n, M], 0 where the type has none

    @classmethod
    def of(cls, blocks: Blocks, rows: NDArray[np.int64]) -> Parts:
        form = FORMATS[blocks.type.name]
        raw = blocks.data[rows].view(np.uint8).reshape(len(rows), -1, form.layout.itemsize)
        scale = _factor(raw, form, form.scale)
        minimum = np.zeros_like(scale) if form.minimum is None else _factor(raw, form, form.minimum)
        return cls(form, raw, _planes(raw, form), form.codes[0].bias, scale, minimum)

    @property
    def codes(self) -> Codes:
        """The integers that scales multiply, [n, M]."""
        return np.array(self.form.codes[0].table)[self.places] if self.form.codes[0].table else self.places - self.bias

    @property
    def places(self) -> Codes:
        """Codes as they lie in the block, or the places of integers in the type's table, [n, M]."""
        return reduce(np.bitwise_or, self.planes)

    def matrix(self, codes: Codes | None = None) -> Array:
        """The weights [n, M]."""
        return self.scale * (self.codes if codes is None else codes) + self.minimum

    def with_upper(self, upper: Codes) -> Array:
        """The weights with other upper bits of codes."""
        return replace(self, planes=(*self.planes[:-1], upper)).matrix()

    def factor(self, factor: Factor, keep: Codes | int = -1, raw: Bytes | None = None) -> Array:
        """A scale or minimum of each weight, [n, M]. keep: the bits of its integers that are kept, of all or of each [16]."""
        return _factor(self.raw if raw is None else raw, self.form, factor, keep)


Misreading = Callable[[Parts], Array]
"""Rows taken apart -> the weights [n, M] that they are taken for."""


def parts_of(blocks: Blocks, rows: NDArray[np.int64]) -> Parts:
    """Rows of a table, which is misread in many ways."""
    return _cached_parts(blocks, rows.tobytes())


@lru_cache(maxsize=16)
def _cached_parts(blocks: Blocks, rows: bytes) -> Parts:
    return Parts.of(blocks, np.frombuffer(rows, np.int64))


def _part(raw: Bytes, part: Bits | Flags | Digit) -> Codes:
    """One part of each integer, [n, blocks, 16 or 32]."""
    lane = np.arange(RUN)
    if isinstance(part, Flags):
        return (raw[..., part.at + lane // 8].astype(np.int64) >> lane % 8 & 1) << part.place
    taken = raw[..., part.at].astype(np.int64)
    if isinstance(part, Digit):
        return (taken * np.array(part.factor) & 255) * 3 >> 8
    return (taken >> np.array(part.shift) & np.array(part.mask)) << part.place


def _integers(raw: Bytes, integers: Integers) -> Codes:
    total = sum(_part(raw, part) for part in integers.parts)
    return np.where((total > 127) & integers.signed, total - 256, total) - integers.bias


def _factor(raw: Bytes, form: Format, factor: Factor, keep: Codes | int = -1) -> Array:
    start = form.start(factor)
    runs = form.weights // RUN
    if factor.table:
        each = np.array(factor.table)[raw[..., start + np.array(factor.lanes[:runs])]]
        return np.repeat(each, RUN, axis=-1).reshape(len(raw), -1)
    half = np.ascontiguousarray(raw[..., start : start + 2]).view(np.float16).astype(np.float64)  # [n, blocks, 1]
    if factor.integers is not None:
        half = half * (_integers(raw, factor.integers) & keep)[..., list(factor.lanes)][..., :runs]
    each = np.repeat(np.broadcast_to(half, (*raw.shape[:2], runs)), RUN, axis=-1)
    return (-each if factor.negative else each).reshape(len(raw), -1)


def _planes(raw: Bytes, form: Format) -> tuple[Codes, ...]:
    """The bits of codes from low to high, [n, M] each; of signed codes the one plane of their numbers."""
    count = max(len(codes.parts) for codes in form.codes)
    planes = (np.concatenate([_part(raw, codes.parts[i]) for codes in form.codes], axis=-1).reshape(len(raw), -1) for i in range(count))
    return tuple(np.where(plane > 127, plane - 256, plane) if form.codes[0].signed else plane for plane in planes)


def other_numbers(form: Format, width: int) -> Iterator[tuple[str, Misreading]]:
    """Yields the ways that give other codes, scales, minimums or zero points."""
    yield from _other_codes(form)
    yield from _other_factors(form)
    yield from _zero_points(form)


def other_orders(form: Format, width: int) -> Iterator[tuple[str, Misreading]]:
    """Yields the ways that give codes, or their upper bits, to other weights."""
    for order, source in orders(width):
        if width % form.weights == 0:
            yield f"weights of a block are read in another order: {order}", partial(_reordered, source)
        if len(form.codes[0].parts) > 1:
            yield f"upper bits of codes are those of other weights: {order}", partial(_reordered_planes, source, slice(None))
            yield f"lower bits of codes are those of other weights: {order}", partial(_reordered_planes, slice(None), source)


def _reordered(source: NDArray[np.int64], parts: Parts) -> Array:
    return parts.matrix(parts.codes[:, source])


def _reordered_planes(upper: NDArray[np.int64] | slice, lower: NDArray[np.int64] | slice, parts: Parts) -> Array:
    *low, high = parts.planes
    return replace(parts, planes=(*(plane[:, lower] for plane in low), high[:, upper])).matrix()


def _other_codes(form: Format) -> Iterator[tuple[str, Misreading]]:
    if form.codes[0].signed:
        yield "codes are read as unsigned bytes: their sign is lost", lambda parts: parts.matrix(parts.codes & 255)
        yield "the sign bit of codes is cut off", lambda parts: parts.matrix(parts.codes & 127)
    if form.codes[0].table:
        yield "codes are taken for integers, 8 less than they are, and not looked up", lambda parts: parts.matrix(parts.places - 8)
    if form.codes[0].bias:
        bits = _bits(form)
        yield f"codes are read as signed numbers of {bits} bits", partial(_signed, bits)
    if len(form.codes[0].parts) > 1:
        yield "upper bits of codes are lost", lambda parts: parts.with_upper(0 * parts.planes[-1])
        yield "upper bits of codes are shifted one place too far", lambda parts: parts.with_upper(2 * parts.planes[-1])
    in_parts = all(isinstance(codes.parts[0], Bits) and max(codes.parts[0].mask) < 255 for codes in form.codes)
    if in_parts and not form.codes[0].table:
        yield "codes are not cut out of their bytes: the bits above them stay", partial(_with_lowest, lambda taken, b: taken >> b.shift)
        yield (
            "codes are not shifted down in their bytes",
            partial(_with_lowest, lambda taken, b: taken & np.left_shift(b.mask, b.shift)),
        )
        yield "bytes are shifted as signed numbers: the sign fills the bits above codes", partial(_with_lowest, _sign_filled)
    for shift in _SHIFTS:
        side = "late" if shift > 0 else "early"
        yield f"codes are read {abs(shift)} byte{'s' * (abs(shift) > 1)} too {side}: an offset in the block", partial(_moved, shift)


def _bits(form: Format) -> int:
    """The number of bits of a code."""
    full = np.full((1, 1, form.layout.itemsize), 255, np.uint8)
    return int(sum(int(plane.max()) for plane in _planes(full, form))).bit_length()


def _signed(bits: int, parts: Parts) -> Array:
    half = 1 << bits - 1
    return parts.matrix((parts.codes + parts.bias + half) % (2 * half) - half)


def _with_lowest(cut: Callable[[Codes, Bits], Codes], parts: Parts) -> Array:
    """The weights whose lowest bits are cut out of their bytes [n, blocks, 16 or 32] in another way."""
    lowest = [codes.parts[0] for codes in parts.form.codes]
    runs = [cut(parts.raw[..., part.at].astype(np.int64), part) for part in lowest if isinstance(part, Bits)]
    return replace(parts, planes=(np.concatenate(runs, axis=-1).reshape(len(parts.raw), -1), *parts.planes[1:])).matrix()


def _sign_filled(taken: Codes, bits: Bits) -> Codes:
    shifted = taken.astype(np.int8).astype(np.int64) >> bits.shift
    return np.where(np.left_shift(bits.mask, bits.shift) >= 128, shifted, shifted & bits.mask)


def _moved(shift: int, parts: Parts) -> Array:
    raw = parts.raw
    moved = np.roll(raw.reshape(len(raw), -1), -shift, axis=1).reshape(raw.shape)
    return replace(parts, planes=_planes(moved, parts.form)).matrix()


def _other_factors(form: Format) -> Iterator[tuple[str, Misreading]]:
    """Yields readings with scales and minimums of another block, of other fields, or with fewer bits."""
    for shift, which in ((-1, "next"), (1, "previous")):
        yield f"blocks have the scale of the {which} block", partial(_scale_of, partial(np.roll, shift=shift, axis=1))
    yield "all blocks of a row have the scale of its first block", partial(_scale_of, lambda raw: np.broadcast_to(raw[:, :1], raw.shape))
    scale, minimum = form.scale, form.minimum
    if scale.integers is not None and scale.integers.signed:
        yield "scales are read as unsigned bytes", partial(_with_factors, keep_scale=255)
        yield "the signs of scales are lost", lambda parts: replace(parts, scale=np.abs(parts.scale)).matrix()
    if scale.integers is not None:
        changes = [("scales inside a block are not applied, only the block's own", partial(replace, integers=None))]
        changes += [(text, partial(_of_other_runs, source)) for text, source in _other_runs(len(set(scale.lanes)))]
        for text, change in changes:
            yield text, partial(_with_factors, scale=change(scale), minimum=None if minimum is None else change(minimum))
    if minimum is None:
        return
    yield (
        f"{scale.half} and {minimum.half}, the factors of scales and minimums, are exchanged",
        partial(_with_factors, scale=replace(scale, half=minimum.half), minimum=replace(minimum, half=scale.half)),
    )
    yield (
        "scales and minimums are exchanged",
        partial(
            _with_factors,
            scale=replace(scale, integers=minimum.integers, lanes=minimum.lanes),
            minimum=replace(minimum, integers=scale.integers, lanes=scale.lanes),
        ),
    )
    if scale.integers is not None and scale.integers is minimum.integers:  # Q4_K and Q5_K
        whole = Integers((Bits(4 + 4 * (np.arange(RUN) % 2) + np.arange(RUN) // 2, mask=63),))
        yield (
            "scales and minimums 4 to 7 are read as the first four are: 6 bits of a byte",
            partial(_with_factors, scale=replace(scale, integers=whole), minimum=replace(minimum, integers=whole)),
        )
    if scale.integers is not None:
        upper_half = np.where(np.arange(RUN) < RUN // 2, -1, 15)
        for keep, which in ((15, ""), (upper_half, "the second half of the ")):
            yield f"upper bits of {which}scales and minimums are lost", partial(_with_factors, keep_scale=keep, keep_minimum=keep)
            yield f"upper bits of {which}scales are lost", partial(_with_factors, keep_scale=keep)
            yield f"upper bits of {which}minimums are lost", partial(_with_factors, keep_minimum=keep)


def _other_runs(count: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yields wrong numbers of the runs of weights whose scales are used, [count], in words."""
    own = np.arange(count)
    yield "two runs of weights share the scale of the first", own // 2 * 2
    for source in (own // 2, (own + 1) // 2, own % (count // 2), own[::-1], (own + 1) % count, (own - 1) % count, own ^ 1):
        yield f"runs of weights have the scales of the runs {', '.join(map(str, source[:6]))} and so on", source


def _of_other_runs(source: NDArray[np.int64], factor: Factor) -> Factor:
    """The factor with the integers of other runs."""
    lanes = list(dict.fromkeys(factor.lanes))
    return replace(factor, lanes=tuple(lanes[source[lanes.index(lane)]] for lane in factor.lanes))


def _scale_of(blocks: Callable[[Bytes], Bytes], parts: Parts) -> Array:
    """The weights with the scales of other blocks."""
    return replace(parts, scale=parts.factor(parts.form.scale, raw=blocks(parts.raw))).matrix()


def _with_factors(
    parts: Parts,
    scale: Factor | None = None,
    minimum: Factor | None = None,
    keep_scale: Codes | int = -1,
    keep_minimum: Codes | int = -1,
) -> Array:
    """The weights with scales and minimums of other fields, or with fewer bits of them."""
    scales = parts.factor(scale or parts.form.scale, keep_scale)
    own = minimum or parts.form.minimum
    return replace(parts, scale=scales, minimum=parts.minimum if own is None else parts.factor(own, keep_minimum)).matrix()


def _moved_codes(by: int, parts: Parts) -> Array:
    return parts.matrix(parts.codes + by)


def _zero_points(form: Format) -> Iterator[tuple[str, Misreading]]:
    """Yields the ways to read codes with another zero point, and minimums left out or subtracted twice."""
    bias = form.codes[0].bias
    if bias:
        yield f"{bias} is not subtracted from codes: the zero point is missing", partial(_moved_codes, bias)
    for subtracted in dict.fromkeys((bias - 1, bias + 1, 8, 16, 32)) if not form.codes[0].signed else ():
        if subtracted not in (bias, 0):
            text = f"{subtracted} is subtracted from codes instead of {bias}: another zero point"
            yield text, partial(_moved_codes, bias - subtracted)
    if form.minimum is not None:
        yield "minimums of blocks are left out", lambda parts: replace(parts, minimum=0 * parts.minimum).matrix()
        yield "minimums of blocks have the wrong sign", lambda parts: replace(parts, minimum=-parts.minimum).matrix()
