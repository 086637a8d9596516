"""ggml's block types, read with one thing wrong: bits, signs, scales, minimums or zero points. Each misreading is another Format.

And wrong orders of the weights of a row.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...base.block_formats import RUN, Bits, Factor, Format, Integers
from ..law.codes import unscaled

Formats = Iterator[tuple[str, Format]]


def misread_formats(form: Format) -> Formats:
    """Yields the formats that blocks of one may be taken for, in words."""
    yield from _other_codes(form)
    yield from _zero_points(form)
    yield from _other_factors(form)


def _with_codes(form: Format, **fields: object) -> Format:
    return replace(form, codes=tuple(replace(codes, **fields) for codes in form.codes))  # type: ignore[arg-type]


def _other_codes(form: Format) -> Formats:
    if form.codes[0].signed:
        yield "codes are read as unsigned bytes: their sign is lost", _with_codes(form, signed=False)
    if form.codes[0].table:
        yield "codes are taken for integers, 8 less than they are, and not looked up", _with_codes(form, table=(), bias=8)
    elif form.codes[0].four_bits:
        signed = (*range(8), *range(-8, 0))
        yield "codes are read with a sign, in two's complement", _with_codes(form, table=signed, bias=0)
    if len(form.codes[0].parts) > 1:
        low = tuple(replace(codes, parts=codes.parts[:-1]) for codes in form.codes)
        yield "upper bits of codes are lost", replace(form, codes=low)


def _zero_points(form: Format) -> Formats:
    """Yields the formats with another zero point, and those whose minimums are left out or subtracted twice."""
    bias = form.codes[0].bias
    if bias:
        yield f"{bias} is not subtracted from codes: the zero point is missing", _with_codes(form, bias=0)
    for subtracted in dict.fromkeys((bias - 1, bias + 1, 8, 16, 32)) if not form.codes[0].signed else ():
        if subtracted not in (bias, 0):
            yield f"{subtracted} is subtracted from codes instead of {bias}: another zero point", _with_codes(form, bias=subtracted)
    if form.minimum is not None:
        yield "minimums of blocks are left out", replace(form, minimum=None)
        yield "minimums of blocks have the wrong sign", replace(form, minimum=replace(form.minimum, negative=not form.minimum.negative))


def _other_factors(form: Format) -> Formats:
    """Yields the formats whose scales and minimums are other fields."""
    scale, minimum = form.scale, form.minimum
    yield "codes are not multiplied by scales", unscaled(form)
    if scale.table:  # codes are doubled
        yield "the bytes of scales count as numbers themselves", replace(form, scale=replace(scale, table=tuple(np.arange(256) / 2)))
    if scale.integers is not None and scale.integers.signed:
        unsigned = replace(scale, integers=replace(scale.integers, signed=False))
        yield "scales inside a block are read without their sign", replace(form, scale=unsigned)
    if scale.integers is not None:
        alone = replace(form, scale=replace(scale, integers=None), minimum=minimum and replace(minimum, integers=None))
        yield "scales inside a block are not applied, only the block's own", alone
        for words, of in (("scales", (1, 0)), ("minimums", (0, 1)), ("scales and minimums", (1, 1))):
            if len(scale.integers.parts) > 1 and (minimum is not None or not of[1]):
                low = (_low_bits(factor) if factor and is_low else factor for factor, is_low in zip((scale, minimum), of, strict=True))
                yield f"upper bits of {words} are lost, where they lie apart", Format(form.layout, form.codes, *low)  # type: ignore[arg-type]
    if minimum is None:
        return
    exchanged = replace(form, scale=replace(scale, half=minimum.half), minimum=replace(minimum, half=scale.half))
    yield f"{scale.half} and {minimum.half}, the factors of scales and minimums, are exchanged", exchanged
    if scale.integers is not None and scale.integers is minimum.integers:  # Q4_K and Q5_K
        whole = Integers((Bits(4 + 4 * (np.arange(RUN) % 2) + np.arange(RUN) // 2, mask=63),))
        first_four = replace(form, scale=replace(scale, integers=whole), minimum=replace(minimum, integers=whole))
        yield "scales and minimums 4 to 7 are read as the first four are: 6 bits of a byte", first_four


def _low_bits(factor: Factor) -> Factor:
    """The factor without the upper bits of integers whose bits lie in two places."""
    assert factor.integers is not None
    parts = [part for part in factor.integers.parts if isinstance(part, Bits)]
    most = np.array([np.array(part.mask) << part.place for part in parts])  # [P, 16]
    upper = (most == most.max(axis=0)) & ((most > 0).sum(axis=0) > 1)
    low = tuple(Bits(part.at, part.shift, np.where(off, 0, part.mask), part.place) for part, off in zip(parts, upper, strict=True))
    return replace(factor, integers=replace(factor.integers, parts=low))


_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)  # of the pieces that are in disorder, and of runs inside them


def orders(width: int) -> Iterator[tuple[str, NDArray[np.int64], bool]]:
    """Yields wrong orders of the numbers of a row, in words with a brace for what they are; the place that each is read from; and whether
    they are tried where each takes a whole product.

    Bytes that hold several weights, and registers of several lanes, are filled in runs or in turns: one taken for the other interleaves
    runs. Byte order and the order of fields reverse them. A pointer that is not moved on reads the first ones, or the last, again.
    No order has two names: which of two equal ones leaves less is a matter of a processor's sums.
    """
    everything = np.arange(width)
    for size in dict.fromkeys((*_SIZES, width)):
        if width % size:
            continue
        pieces, own, is_likely = everything.reshape(-1, size), everything[:size], size in _SIZES
        parts = [n for n in _SIZES if n < size and size % n == 0]
        for run in parts:
            for together in (1, *(n for n in parts if n < run and run % n == 0)):
                turns = pieces.reshape(len(pieces), size // run, run // together, together).transpose(0, 2, 1, 3)
                yield _interleaved(size, run, together), turns.ravel(), is_likely
            for which, start in (("first", 0), ("last", size - run)):
                yield f"the {which} {run} of each {size} {{}} are read again and again", pieces[:, start + own % run].ravel(), is_likely
            if 2 * run == size:
                continue  # of two runs each is both the next and the previous, and all orders of them have a name
            for words, source in (
                (f"of each {size} {{}} every run of {run} is read twice", own // run // 2 * run + own % run),
                (f"of each {size} {{}} the next run of {run} is read", np.roll(own, -run)),
                (f"of each {size} {{}} the previous run of {run} is read", np.roll(own, run)),
            ):
                yield words, pieces[:, source].ravel(), False
        for run in (1, *parts):
            yield _reversed(size, run), pieces.reshape(len(pieces), -1, run)[:, ::-1].ravel(), is_likely


def _interleaved(size: int, run: int, together: int) -> str:
    runs = f"the two halves of each {size} {{}}" if 2 * run == size else f"the {size // run} runs of {run} in each {size} {{}}"
    return f"{runs} are interleaved" + (f", {together} at a time" if together > 1 else "")


def _reversed(size: int, run: int) -> str:
    if run == 1:
        return f"each {size} {{}} are in the opposite order"
    if 2 * run == size:
        return f"the two halves of each {size} {{}} are exchanged"
    return f"the {size // run} runs of {run} in each {size} {{}} are in the opposite order"
