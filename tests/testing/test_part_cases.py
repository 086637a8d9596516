"""The self-test computes products of every length that a kernel's borders could tell apart, on this processor and on any other."""

import inspect

import kernel_calls
import numpy as np
import pytest
from kernel_calls import name_of
from numba.core.registry import CPUDispatcher

from bitnet_np.kernels import attention, float_products, floats, ternary_product, ternary_tiles, tiles
from bitnet_np.kernels.cache.private_parts import gone
from bitnet_np.kernels.fast import amx, byte_dots
from bitnet_np.kernels.ggml import products
from bitnet_np.testing import selftest
from bitnet_np.testing.part_cases import COLUMNS, ROWS

pytestmark = pytest.mark.skipif(bool(gone()), reason="another version of Numba, whose calls cannot be watched")

TERNARY = {  # a kernel, and the rows and columns of its results' tiles
    "ternary_product.few_tokens": (tiles.TOKENS, tiles.STREAMS * 16),
    "ternary_product.many_tokens": (byte_dots.PATHS[ternary_product.instruction_path()].tile[1], ternary_product._GROUPS * 16),
    "ternary_tiles.ternary_matmul": (ternary_tiles._PAIR, ternary_tiles._PAIR),
}


@pytest.fixture(params=["as here", "vectors"])
def unit(request, monkeypatch):
    """Matrix tiles where the processor has them, and none."""
    if request.param == "vectors":
        monkeypatch.setattr(amx, "unit", lambda: None)


def shape_of(kernel, arguments):
    """The rows and outputs of a call, and its results."""
    named = dict(zip(inspect.signature(kernel.py_func.__globals__["body"].py_func).parameters, arguments, strict=True))
    rows = named["q"].shape[0] if "q" in named else len(np.atleast_2d(named["out"]))
    return rows, named["out"].size // rows, named["out"]


def run(call, beginning="parts"):
    """Whether each case of this beginning gives the known bits.

    call: of each kernel, after it has run: its name, and the number of rows, of outputs, and the results.
    """

    def watch(kernel, arguments):
        result = CPUDispatcher.__call__(kernel, *arguments)
        if name_of(kernel) in TERNARY or name_of(kernel).endswith(("matmul", "_products", "_products_of_row", "_attend")):
            call(name_of(kernel), *shape_of(kernel, arguments))
        return result

    with kernel_calls.watched(watch):
        return dict(selftest.run(beginning))


def borders():
    """Numbers of rows and of outputs on which kernels of some processor depend, as their modules have them."""
    rows = [path.tile[1] for path in byte_dots.PATHS.values()] + [ternary_product.LEAST] * (ternary_product.LEAST < ternary_product._NEVER)
    rows += [ternary_tiles.LEAST, ternary_tiles._PAIR, amx.ROWS, floats._FEW, float_products.PART, tiles.TOKENS, products._SHAPE[1]]
    rows += [attention._MOST, attention._LEAST, attention.CHUNK]
    outputs = [path.tile[0] * 16 for path in byte_dots.PATHS.values()] + [tiles.STREAMS * 16, ternary_tiles._PAIR, tiles.ROW_BLOCK]
    return rows, [*outputs, float_products.ROWS, tiles.MANY_ROWS, tiles.ROWS, products._GROUPS * 16, products._SHAPE[0] * 16]


def test_parts_go_beyond_every_border():
    """And inner products beyond what is unpacked, or multiplied, at a time."""
    rows, outputs = borders()
    assert max(rows) < ROWS - 1
    assert max(outputs) < COLUMNS - 1
    assert max(byte_dots.WORD_STEPS * 16, ternary_tiles._BLOCK * amx.WIDTH) < 600
    assert ternary_tiles._SHARED < ROWS * 6144
    assert max(tiles.DEPTH, products._SPAN) < 1100


def test_every_number_of_rows_and_outputs_is_computed_by_the_kernel_that_takes_it(unit):
    seen = {}
    assert all(run(lambda name, rows, outputs, out: seen.setdefault(name, set()).add((rows, outputs))).values())
    by_rows = {name: {rows for rows, _ in sizes} for name, sizes in seen.items()}
    for kernels in (TERNARY, ("floats._matmul", "float_products.matmul"), ("attention._attend",)):
        assert set().union(*(by_rows.get(name, ()) for name in kernels)) == set(range(1, ROWS + 1))
    for name, sizes in seen.items():
        if name != "attention._attend" and by_rows[name] & {1, 2}:
            assert {outputs for rows, outputs in sizes if rows <= 2} == set(range(1, COLUMNS + 1)), name


@pytest.mark.parametrize("axis", ["rows", "outputs"])
@pytest.mark.parametrize("name", TERNARY)
def test_a_product_that_is_wrong_in_its_tails_is_found(name, axis, unit):
    """Zero in what fills no whole tile."""
    spoiled = []

    def spoil(kernel, rows, outputs, out):
        if kernel == name:
            results, (height, width) = out.reshape(rows, outputs), TERNARY[name]
            spoiled.append(rows % height if axis == "rows" else outputs % width)  # none by tiles of one row
            results[(rows // height * height) :] *= axis != "rows"
            results[:, (outputs // width * width) :] *= axis != "outputs"

    fine = run(spoil, "parts, ternary")
    assert all(fine.values()) is not any(spoiled)
