"""Mistakes in products that are tried where neither the product nor its input is in a dump: inputs, rows, scales and misread weights.

Where a dump has the product, readings see them in it (readings/).
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...kernels.block_formats import FORMATS, Format
from ...model.records import Blocks, Linear, Ternary
from .. import operations as op
from ..graph import EMBEDDING, FIELDS, LOGITS
from ..precision import DIGITS, NARROW_FLOATS
from ..roundings import matrix_input, to_digits, to_float16
from . import blocks, norms
from .conversions import in_fewer_bits
from .matrices import AT, after, by_matrix, right
from .mistake import Array, Compute, Computes, Mistake, Numbers, Site, alike
from .orders import orders
from .quantiser import in_groups, plain_ternary, quantised_by, quantises

PRODUCTS = (*AT, LOGITS.name)
TABLES = (EMBEDDING.name, *PRODUCTS)
Ways = Callable[[Format, int], Iterator[tuple[str, blocks.Misreading]]]
Change = Callable[..., Array]
"""The right matrix [N, M] -> the one that is multiplied by."""

_TAILS = (1, 2, 4, 8, 16, 32, 64)


def by_changed(site: Site, change: Change) -> Compute:
    """The product with a matrix that is made of the right one."""
    return _by(site, lambda: change(_dense(site.linear)))


def _by(site: Site, matrix: Callable[..., Array], bias: Change = lambda bias: bias) -> Compute:
    """The product with another matrix, which is made when it is needed, and a changed bias."""
    linear, weights, dialect = site.linear, site.linear.weights, site.dialect
    scale = 1.0 if linear.scale is None else float(linear.scale)
    if isinstance(weights, Ternary):
        scale *= float(weights.scale)

    def compute(x: Array) -> Array:
        x = to_float16(x) if site.layer is None and dialect.in_float16 else x
        if op.reads_codes(linear, dialect):
            codes, steps = spec.quantize(x)
            x = codes / steps
        elif dialect.ggml_activations and not isinstance(weights, Ternary):
            x = matrix_input(x, weights)
        return site.finished(x @ matrix().T * scale + (0.0 if linear.bias is None else bias(linear.bias.astype(np.float64))))

    return site.of(compute)


def _dense(linear: Linear) -> Array:
    """The matrix [N, M] without its scale."""
    weights = linear.weights
    return op.dense(weights).astype(np.float64) if isinstance(weights, Ternary) else np.concatenate([x for _, x in op.row_blocks(weights)])


# --- inputs ---------------------------------------------------------------------------------------------------------------------------


def _parts(width: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
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
        for every in (2, 3, 4, 8):
            if every * size <= width:
                nth = {2: "second", 3: "third"}.get(every, f"{every}th")
                yield f"every {nth} block of {size} inputs is", place // size % every == every - 1
        for block in range(min(width // size, 8)):
            yield f"inputs {block * size} to {block * size + size - 1} are", place // size == block


def _weighted(factor: float, site: Site) -> Computes:
    for words, part in _parts(site.linear.shape[1]):
        yield {"part": words}, by_changed(site, partial(np.multiply, np.where(part, factor, 1.0)))


# --- rows -----------------------------------------------------------------------------------------------------------------------------


def _sources(site: Site) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yields the row that each output [N] is computed with, in words."""
    n = site.linear.shape[0]
    row = np.arange(n)
    for shift in (1, 2, 4, 8, 16):
        for sign, which in ((1, "before"), (-1, "behind")):
            yield f"rows are shifted by {shift}: the row {shift} {which} stands in the place of each", (row - sign * shift) % n
    for count in _TAILS:
        if 2 * count <= n:
            yield f"the last {count} outputs repeat the {count} before", np.where(row >= n - count, row - count, row)
    yield "rows of the weights are in the opposite order", row[::-1]
    if n % 2 == 0:
        yield "the two halves of the rows are exchanged", np.roll(row, n // 2)
    if site.name in ("Qcur", "Kcur", "Vcur"):
        yield from _heads(row, site.config.head_dim)


def _heads(row: NDArray[np.int64], width: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    count = min(row.size // width, 16)
    for a in range(count):
        for b in range(count):
            if a != b:
                yield f"the rows of head {a} are those of head {b}", np.where(row // width == a, row + (b - a) * width, row)
            if a < b:
                to = np.arange(row.size // width)
                to[[a, b]] = b, a
                yield f"the rows of heads {a} and {b} are exchanged", to[row // width] * width + row % width


def _other_rows(site: Site) -> Computes:
    for words, source in _sources(site):
        yield {"how": words}, by_changed(site, lambda matrix, source=source: matrix[source])


def _shifted_columns(site: Site) -> Computes:
    for shift, which in ((1, "the input before"), (-1, "the next input")):
        yield {"which": which}, by_changed(site, lambda matrix, shift=shift: np.roll(matrix, -shift, axis=1))


def _zero_rows(site: Site) -> Computes:
    for count in _TAILS:
        if count < site.linear.shape[0]:
            yield {"count": count}, by_changed(site, partial(_without_last, count))


def _without_last(count: int, matrix: Array) -> Array:
    return np.where(np.arange(len(matrix))[:, None] >= len(matrix) - count, 0.0, matrix)


# --- scales, biases and other layers --------------------------------------------------------------------------------------------------


def _scale(site: Site) -> float | None:
    linear: Linear = site.linear
    own = linear.weights.scale if isinstance(linear.weights, Ternary) else linear.scale
    return None if own is None else float(own)


def _times(site: Site, factor: float) -> Compute:
    bias = 0.0 if site.linear.bias is None else site.linear.bias
    return after(site, lambda y: (y - bias) * factor + bias)


def _scale_twice(site: Site) -> Compute | None:
    scale = _scale(site)
    return None if scale is None else _times(site, scale)


def _other_scales(site: Site) -> Computes:
    own = _scale(site)
    if own is None:
        return
    for n, layer in enumerate(site.model.layers):
        for field in FIELDS.values():
            linear: Linear | None = getattr(layer, field)
            if linear is not None and isinstance(linear.weights, Ternary) and (n == site.index) != (field == FIELDS[site.name]):
                yield {"other": field if n == site.index else f"layer {n}"}, _times(site, float(linear.weights.scale) / own)


def _other_layers(site: Site) -> Computes:
    for n, layer in enumerate(site.model.layers):
        if abs(n - site.index) > 1:
            yield {"n": n}, by_matrix(site, getattr(layer, FIELDS[site.name]))


def _bias_at(site: Site) -> Computes:
    bias = site.linear.bias
    if bias is None:
        return
    for which, rows in (("positions but the first", slice(1, None)), ("positions but the last", slice(None, -1))):
        yield {"which": which}, after(site, partial(_without_bias, bias, rows))
    yield {"which": "rows, and stands in the opposite order instead"}, after(site, lambda y: y + (bias[::-1] - bias))


def _without_bias(bias: NDArray, rows: slice, y: Array) -> Array:
    left = y.copy()
    left[rows] -= bias
    return left


# --- misread weights ------------------------------------------------------------------------------------------------------------------


def _misread(site: Site, ways: Ways) -> Computes:
    """Tables of block types read with one thing wrong, as an engine has one reader for all tables of a type."""
    embeds = site.name == EMBEDDING.name
    table = site.model.token_embd if embeds else site.linear.weights
    if not isinstance(table, Blocks) or table.type.name not in FORMATS:
        return
    for numbers, misreading in _ways(table, ways):
        if embeds:
            yield numbers, site.of(lambda tokens, misreading=misreading: misreading(blocks.Parts.of(table, tokens.astype(np.int64))))
        else:
            yield numbers, _by(site, lambda misreading=misreading: misreading(blocks.whole_table(table)))


def _ways(table: Blocks, ways: Ways) -> Iterator[tuple[Numbers, blocks.Misreading]]:
    for how, misreading in ways(FORMATS[table.type.name], table.shape[1]):
        yield {"type": table.type.name, "how": how}, misreading


def _codes(site: Site) -> Computes:
    """Ternary codes 0, 1, 2 that are taken for other numbers than -1, 0, +1."""
    if isinstance(site.linear.weights, Ternary):
        for meaning in (*permutations((-1, 0, 1)), (0, 0, 1), (-1, 0, 0), (1, 0, 1), (-2, -1, 0), (0, 1, -1)):
            if meaning != (-1, 0, 1):
                numbers = np.array(meaning, np.float64)
                words = ", ".join(f"{n:+d}" if n else "0" for n in meaning)
                yield {"meaning": words}, by_changed(site, lambda matrix, numbers=numbers: numbers[matrix.astype(np.int64) + 1])


def _orders(site: Site) -> Computes:
    if not isinstance(site.linear.weights, Blocks):
        for order, source in orders(site.linear.shape[1]):
            yield {"order": order}, by_changed(site, lambda matrix, source=source: matrix[:, source])


def _embedded(site: Site, narrow: Change) -> Compute:
    """The rows of a converted table."""
    return site.of(lambda tokens: narrow(op.embed(site.model, tokens.astype(np.int64)).value))


def _fewer_bits(site: Site) -> Computes:
    embeds = site.name == EMBEDDING.name
    if embeds or not isinstance(site.linear.weights, Ternary):
        for text, narrow in in_fewer_bits((site.model.token_embd if embeds else site.linear).shape[1]):
            yield {"how": text}, _embedded(site, narrow) if embeds else by_changed(site, narrow)


def _narrow_model(site: Site) -> Computes:
    if site.name in norms.AT:
        yield from norms.narrow(site)
        return
    for kind in NARROW_FLOATS:
        rounded = partial(to_digits, digits=DIGITS[kind])
        if site.name == EMBEDDING.name:
            yield {"kind": kind}, _embedded(site, rounded)
        else:
            matrix = partial(_dense, site.linear)
            yield {"kind": kind}, _by(site, lambda matrix=matrix, rounded=rounded: rounded(matrix()), rounded)


def _input_in_blocks(site: Site) -> Computes:
    for text, narrow in in_fewer_bits(site.linear.shape[1]):
        if "bits," in text or "q8_0" in text or "one scale" in text:
            yield {"how": text}, site.of(lambda x, narrow=narrow: right(site, narrow(x)))


# --- quantisers -----------------------------------------------------------------------------------------------------------------------


def _quantised(site: Site) -> Ternary | None:
    """The matrix of an operation, if it takes int8 codes, and nothing else belongs to it."""
    return plain_ternary(site) if op.reads_codes(site.linear, site.dialect) else None


def _by_scale(steps: Callable[[Array], Array]) -> Callable[[Site], Compute | None]:
    """A quantiser whose steps per unit [T, 1] are others."""

    def compute(site: Site) -> Compute | None:
        weights = _quantised(site)
        return None if weights is None else quantised_by(site, weights, lambda x: _cut(x, steps(x)))

    return compute


def _cut(x: Array, scale: Array) -> tuple[Array, Array]:
    return np.clip(np.rint(x * scale), -128, 127), scale


def _largest(x: Array) -> Array:
    return np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-5)


def _in_groups_of(size: int, x: Array) -> tuple[Array, Array]:
    return in_groups(x, size), np.ones((len(x), 1))


def _in_groups(site: Site) -> Computes:
    weights = _quantised(site)
    if weights is None:
        return
    for size in (16, 32, 64, 128, 256):
        if site.linear.shape[1] % size == 0 and site.linear.shape[1] > size:
            yield {"size": size}, quantised_by(site, weights, partial(_in_groups_of, size))


def _of_mean(measure: Callable[[Array], Array], site: Site) -> Callable[[float], Compute] | None:
    """A quantiser whose 127 steps are a number of times a mean."""
    weights = _quantised(site)
    if weights is None:
        return None
    return lambda number: quantised_by(site, weights, lambda x: _cut(x, 127 / np.maximum(number * measure(x), 1e-5)))


def _of_mean_of(id: str, name: str, measure: Callable[[Array], Array]) -> Mistake:
    text = f"activations are scaled by the {name} instead of the largest: 127 steps are {{number:.4g}} times that"
    grid = tuple(np.geomspace(0.5, 16, 10))
    return Mistake(f"quantiser.{id}", text, AT, quantises, search=partial(_of_mean, measure), grid=grid)


def _first_scale(x: Array) -> Array:
    return np.broadcast_to(127 / _largest(x)[:1], (len(x), 1))


def _scale_before(x: Array) -> Array:
    return 127 / np.concatenate([_largest(x)[:1], _largest(x)[:-1]])


_ALL = (*TABLES, *norms.AT)
MISTAKES = (
    *alike(
        "sums",
        PRODUCTS,
        ("left_out", "{part} not summed", partial(_weighted, 0.0)),
        ("twice", "{part} summed twice", partial(_weighted, 2.0)),
    ),
    *alike(
        "weights",
        PRODUCTS,
        ("shifted", "each weight is multiplied by {which}: columns are shifted by one", _shifted_columns),
        ("other_rows", "weights of other rows are used: {how}", _other_rows),
        ("rows_lost", "the last {count} outputs are 0", _zero_rows),
    ),
    Mistake("weights.of_layer", "the weights of layer {n} are used", AT, compute=_other_layers),
    *alike(
        "scale",
        AT,
        ("twice", "the weight scale is applied twice", _scale_twice),
        ("of_another", "the weight scale of {other} is used", _other_scales),
    ),
    Mistake("bias.some_positions", "the bias is missing at all {which}", AT, compute=_bias_at),
    Mistake("codes.meaning", "codes 0, 1, 2 are read as {meaning} instead of -1, 0, +1", AT, compute=_codes),
    *alike(
        "quantiser",
        AT,
        ("first_scale", "the activation scale of the first token is used for all tokens, and codes are cut", _by_scale(_first_scale)),
        ("last_scale", "activation scales are those of the token before", _by_scale(_scale_before)),
        ("in_groups", "activations have one scale for each {size} inputs instead of one for each token", _in_groups),
        when=quantises,
    ),
    Mistake("weights.narrow_model", "all weights are rounded to {kind}", _ALL, compute=_narrow_model, fault=False, together=True),
    Mistake("weights.fewer_bits", "weights are {how}", TABLES, compute=_fewer_bits),
    Mistake("input.fewer_bits", "the input is {how}", AT, compute=_input_in_blocks, fault=False, together=True),
    Mistake("blocks.misread", "{type}: {how}", TABLES, compute=partial(_misread, ways=blocks.other_numbers)),
    Mistake("blocks.order", "{type}: {how}", TABLES, compute=partial(_misread, ways=blocks.other_orders), together=True),
    Mistake("weights.order", "weights of each row are read in another order: {order}", PRODUCTS, compute=_orders, together=True),
    _of_mean_of("of_mean", "mean of their magnitudes", lambda x: np.abs(x).mean(axis=1, keepdims=True)),
    _of_mean_of("of_root", "root of their mean square", lambda x: np.sqrt((x * x).mean(axis=1, keepdims=True))),
)
