"""What a matrix may be taken for: inputs that sums leave out, rows of others, codes, blocks and bits that are misread.

Each function gives changes in words, as functions of the matrix [N, M], and by their ids and types where they have names.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ...base.block_formats import FORMATS, Format
from ...contract.blocks import weights_as
from ...model import packing, ternarize
from ...model.records import Blocks, Ternary
from ..law.codes import Planes
from ..law.expression import Matrix
from ..law.formats import format_of, rounded
from ..law.functions import Array, Function
from ..law.roundings import cut_to_digits, to_digits
from .blocks import misread_formats, orders

Changes = Iterator[tuple]

_MOST_WEIGHTS = 1 << 20  # of a matrix that is tried in tiles
_TAILS = (1, 2, 4, 8, 16, 32, 64)


def inputs(matrix: Matrix) -> Changes:
    """Inputs that sums leave out, or take twice."""
    for words, part in parts(matrix.shape[1]):
        for factor, said in ((0.0, "not summed"), (2.0, "summed twice")):
            yield f"{words} {said}", _by_row(partial(np.multiply, np.where(part, factor, 1.0)))


def _by_row(change: Function) -> Callable[[Matrix], Matrix]:
    return lambda matrix: matrix.by_row(change)


def parts(width: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yields parts of the inputs in words, and where they are [M]."""
    place = np.arange(width)
    for count in (n for n in _TAILS if n < width):
        yield ("the last input is" if count == 1 else f"the last {count} inputs are"), place >= width - count
        yield ("the first input is" if count == 1 else f"the first {count} inputs are"), place < count
    for which, part in (("second", place >= width // 2), ("first", place < width // 2)):
        yield f"the {which} half of the inputs is", part
    for first, which in ((1, "odd"), (0, "even")):
        yield f"every second input, those of {which} numbers, is", place % 2 == first
    for size in (16, 32, 64, 128):
        for block in range(min(width // size, 8)):
            yield f"inputs {block * size} to {block * size + size - 1} are", place // size == block


def codes(matrix: Matrix) -> Changes:
    """Ternary codes 0, 1, 2 that are taken for other numbers than -1, 0, +1, or read in another layout of I2_S."""
    weights = matrix.weights
    if isinstance(weights, Ternary):
        for layout in packing.I2S_LAYOUTS:
            if layout != packing.I2S_DEFAULT and weights.shape[0] % 4 == weights.shape[1] % packing.BLOCK == 0:
                read = partial(_in_layout, layout, weights)
                yield f"I2_S is read in the layout {layout}", partial(Matrix.changed, change=read), "codes.layout"
        for meaning in map(np.array, (*product((-1.0, 0.0, 1.0), repeat=3), (0.0, 1.0, 2.0), (-2.0, -1.0, 0.0))):
            words = ", ".join(f"{n:+g}" if n else "0" for n in meaning)
            change = _by_row(partial(lambda to, x: to[x.astype(np.int64) + 1], meaning))
            yield f"codes 0, 1, 2 are read as {words} instead of -1, 0, +1", change, words


def _in_layout(layout: str, weights: Ternary, matrix: Array) -> Array:
    data = packing.I2S_LAYOUTS[layout](packing.to_i2s(weights), weights.shape)
    return packing.unpack(ternarize.from_i2s(data, weights.scale, weights.shape)).astype(np.float64)


def misread(matrix: Matrix) -> Changes:
    """Blocks of weights of which codes, scales or minimums are misread."""
    table = matrix.weights
    if isinstance(table, Blocks) and table.type.name in FORMATS:
        for how, form in misread_formats(FORMATS[table.type.name]):
            yield f"{table.type.name}: {how}", partial(_read, form, table)
        for order, source, is_likely in orders(table.shape[1]):
            if is_likely:
                yield f"{table.type.name}: codes are read in another order: {order.format('codes')}", partial(_in_order, source, table)


def reordered(matrix: Matrix) -> Changes:
    """Weights that are read in another order, as an engine has one reader for all tables of a type."""
    for order, source, is_likely in orders(matrix.shape[1]):
        if is_likely:
            words = f"weights of each row are read in another order: {order.format('weights')}"
            yield words, _by_row(partial(np.take, indices=source, axis=1))


def packed(matrix: Matrix) -> Changes:
    """Matrices that lie in tiles and are read row by row, or the other way round."""
    rows, width = matrix.shape
    tiles = _TAILS[1:] if rows * width <= _MOST_WEIGHTS else ()
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
        (f"{n} inputs", (rows, width // n, n), (1, 0, 2)) for n in tiles if width % n == 0
    ]
    shapes += [(f"{n} rows", (rows // n, n, width), (0, 2, 1)) for n in tiles if rows % n == 0]
    both = ((n, m) for n in tiles for m in tiles if n <= m and rows % n == width % m == 0)
    shapes += [(f"{n} rows and {m} inputs", (rows // n, n, width // m, m), (0, 2, 1, 3)) for n, m in both]
    for words, shape, order in shapes:
        for is_back, how in enumerate(("packed in tiles of {}, and read row by row", "read in tiles of {}, and lies row by row")):
            yield f"the matrix is {how.format(words)}", partial(Matrix.changed, change=partial(_repacked, shape, order, is_back))


def _repacked(shape: tuple[int, ...], order: tuple[int, ...], is_back: int, x: Array) -> Array:
    """A matrix that lies as this shape with its axes in an order, read row by row; or the other way round."""
    y = x.reshape([shape[i] for i in order]).transpose(np.argsort(order)) if is_back else x.reshape(shape).transpose(order)
    return y.reshape(x.shape)


def _read(form: Format, table: Blocks, matrix: Matrix) -> Matrix:
    return Matrix(table.shape, lambda rows: weights_as(table.data[rows].view(np.uint8), form).astype(np.float64))


def _in_order(source: NDArray[np.intp], table: Blocks, matrix: Matrix) -> Matrix:
    return Matrix(table.shape, lambda rows: Planes.of(table, rows).read(codes=source))


def fewer_bits(matrix: Matrix) -> Changes:
    """Weights that are converted to fewer bits."""
    if not isinstance(matrix.weights, Ternary):
        for digits in range(11, 1, -1):
            yield f"weights are rounded to {digits} significant bits", _by_row(partial(to_digits, digits=digits))
            yield f"weights are cut to {digits} significant bits, not rounded", _by_row(partial(cut_to_digits, digits=digits))
        for kind in types_of_rows(matrix.shape[1]):
            noun = format_of(kind).noun
            named = () if ":" in kind else ("weights.narrow_rows", kind) if kind in _ROWS else ("weights.narrow_blocks", noun)
            yield f"weights are rounded to {noun}", _by_row(partial(rounded, kind=kind)), *named


_ROWS = ("int8", "int4")
"""Types with a scale for each row, or for so many numbers of it."""


def types_of_rows(width: int) -> list[str]:
    """Narrow types of rows of this width."""
    blocks = [f"{grid}:{size}" for grid in _ROWS for size in (16, 32, 64, 128, 256) if width % size == 0]
    return [*_ROWS, "q8_0", "q4_0", "q6_K", "mxfp8", "mxfp6", "mxfp4", *blocks]
