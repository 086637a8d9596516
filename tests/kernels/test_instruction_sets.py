"""Byte dot products become the instructions they are meant to become: compiled for every processor, and read.

test_processors.py runs them.
"""

import pytest
from assembly import ARM, X86, assembly, lowered
from numba import njit, types
from numba.np.numpy_support import from_dtype

from bitnet_np.base.block_formats import FORMATS
from bitnet_np.base.tensor_types import BLOCK_TYPES, NVFP4, Q4_K, Q8_0
from bitnet_np.kernels import float_products, ternary_product, tiles
from bitnet_np.kernels.fast import byte_dots, emit, simd
from bitnet_np.kernels.fast.block_bytes import ROWS
from bitnet_np.kernels.ggml import products
from bitnet_np.kernels.ggml.products import Lanes, Rows, Strip
from bitnet_np.kernels.ternary_product import Matrix, Product

TARGETS = {  # path: triple, processor, features, mnemonic, its register, how many pieces of a logical register
    "avx512-vnni": (X86, "icelake-server", "", "vpdpbusd", "%zmm", 1),
    "avx512": (X86, "skylake-avx512", "", "vpmaddubsw", "%zmm", 1),
    "avx-vnni": (X86, "alderlake", "", "vpdpbusd", "%ymm", 2),
    "avx2": (X86, "haswell", "", "vpmaddubsw", "%ymm", 2),
    "ssse3": (X86, "nehalem", "", "pmaddubsw", "%xmm", 4),
    "neon-dotprod": (ARM, "generic", "+dotprod", "sdot", "v", 4),  # "generic", as for a processor that LLVM does not know
    "neon": (ARM, "cortex-a72", "", "sadalp", "v", 4),
}


def array(dtype, axes=1, readonly=False):
    return types.Array(dtype, axes, "C", readonly=readonly)


@njit
def _steps(count, codes, q, x, stride, valid, out):
    tile = simd.tile_i32(2, 2)
    sums = byte_dots.open_sums(tile)
    for _ in range(count):
        sums = byte_dots.dot_sixteen(sums, codes, 4096, q, x, stride, valid)
        codes += 256
        x += 16
    simd.store_tile(byte_dots.close_sums(tile, sums), out, 0, 32)


@pytest.mark.parametrize("path", [path for path in TARGETS if path != "neon"])
def test_a_step_of_many_tokens_is_one_product_for_each_register(path):
    """Of 2 x 2 sums, four registers of codes each. Sums of words are added up after the loop, by as many instructions as they have
    registers; nothing else in the loop adds up, and nothing is put in order there."""
    triple, processor, features, instruction, _, pieces = TARGETS[path]
    n, q, out = types.intp, array(types.int8, 2), array(types.int32)
    lines = assembly(lowered(_steps, (n, n, q, n, n, n, out), path), triple, processor, features)
    names = [line[1] if line[0] == "{vex}" else line[0] for line in lines if line]
    assert names.count(instruction) == 16 * pieces
    added_up = [name for name in names if name in ("vpmaddwd", "pmaddwd")]
    assert len(added_up) == (4 * pieces if "maddubsw" in instruction else 0)
    first, last = names.index(instruction), len(names) - names[::-1].index(instruction)
    orders = ("zip", "uzp", "trn", "tbl", "ext", "vpshuf", "vpunpck", "vperm")
    assert [name for name in names[first:last] if name.startswith(orders)] == []


def multiplying(kind):
    """Kernels that multiply by ternary matrices or by blocks of this type, their arguments, and registers of products in a step.

    One of 2 tokens for ternary matrices has 4 planes of codes. One for one row has ROWS chunks of blocks; one for several has the 16
    weights of a run, four in each lane.
    """
    n, floats, codes = types.intp, array(types.float32), array(types.uint8)
    if kind is None:
        packed = array(types.uint8, readonly=True)
        arrays = types.NamedTuple([packed, n, array(types.int8, 2), floats, floats, types.boolean, array(types.int32), floats], Product)
        matrix, tile = types.NamedTuple([n, types.float32, n, n], Matrix), emit.Tile("i32", 1, 2)
        return [(ternary_product._some_tokens, (tile, tile, n, n, arrays, matrix, n, n, array(types.int32), floats), 4 * 2)]
    rows = types.NamedTuple([array(types.int8, 2), array(types.int16, 3), *[array(types.float32, 2)] * 2], Rows)
    matrix = array(from_dtype(FORMATS[kind.name].layout), 2, readonly=True)
    integers = array(types.int32)
    strip = types.NamedTuple([codes, integers, integers, floats], Strip)
    lanes = types.NamedTuple([integers, integers, floats, floats], Lanes)
    one = emit.Tile("f32", 1, 1), emit.Tile("i32", 1, 1), matrix, rows, n, n, floats, lanes
    several = emit.Tile("i32", 1, 2), emit.Tile("f32", 1, 2), matrix, rows, strip, n, n, n, n
    return [(products.rows_of_one_token, one, ROWS * (4 if kind is Q4_K else 1)), (products._tile, several, 4 * 2)]


@pytest.mark.parametrize("path", TARGETS)
@pytest.mark.parametrize("kind", [None, Q4_K, Q8_0], ids=str)
def test_bytes_are_multiplied_by_the_instruction_of_the_path(path, kind):
    """As many instructions as a register has pieces."""
    triple, processor, features, mnemonic, register, pieces = TARGETS[path]
    for function, signature, count in multiplying(kind):
        lines = assembly(lowered(function, signature, path), triple, processor, features)
        products = [line for line in lines if {mnemonic, "saddlp"} & set(line[:2])]  # saddlp: sadalp where sums begin; or {vex} comes first
        assert len(products) == count * pieces
        assert all(register in " ".join(line) for line in products)


@pytest.mark.parametrize(
    ("triple", "processor", "features", "fused", "widen"),
    [
        (X86, "icelake-server", "", "vfmadd", "vcvtph2ps"),
        (X86, "haswell", "", "vfmadd", "vcvtph2ps"),
        (ARM, "generic", "", "fmla", "fcvtl"),
    ],
)
def test_float_dot_products_are_fused_and_call_nothing(triple, processor, features, fused, widen):
    """A call would be one for each lane. float16 is widened by an instruction where there is one."""
    n, half, floats = types.intp, array(types.int16, readonly=True), array(types.float32)
    signature = (emit.Tile("f32", 2, 2), half, n, n, n, floats, n, n, n, n, n, n)
    lines = assembly(lowered(tiles.dot_tile, signature, "generic"), triple, processor, features)
    names = [line[0] for line in lines if line]
    assert sum(name.startswith(fused) for name in names) >= 2 * 4
    assert sum(name.startswith(widen) for name in names) >= 2 * 2
    calls = [line for line in lines if line and line[0] in ("bl", "callq", "call")]
    assert not [line for line in calls if any(word in " ".join(line) for word in ("fma", "extendhf"))]


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("triple", "processor", "to_float", "pieces", "widen"),
    [(X86, "haswell", "vcvtdq2ps", 2, "vcvtph2ps"), (ARM, "generic", "scvtf", 4, "fcvtl")],
)
def test_block_types_are_unpacked_in_registers(kind, triple, processor, to_float, pieces, widen):
    """Whole registers of codes become floats, float16 scales are widened by an instruction, and no function is called but Numba's own."""
    lines = assembly(lowered(float_products.fill_blocks, unpacking(kind), "generic"), triple, processor, "")
    names = [line[0] for line in lines if line]
    assert names.count(to_float) >= kind.block // 16 * pieces
    assert widen in names or not FORMATS[kind.name].float16_fields
    called = [line[1] for line in lines if line and line[0] in ("bl", "callq")]
    assert [name for name in called if not name.startswith(("NRT_", "*%r"))] == []


def unpacking(kind):
    n = types.intp
    return array(from_dtype(FORMATS[kind.name].layout), 2, readonly=True), n, n, n, array(types.float32), n


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q2_K", "Q4_K", "TQ2_0", "IQ4_XS", "MXFP4"])
def test_avx512_looks_up_what_codes_of_at_most_four_bits_stand_for(name):
    kind = next(kind for kind in BLOCK_TYPES if kind.name == name)
    lines = assembly(lowered(float_products.fill_blocks, unpacking(kind), "generic", wide=True), X86, "icelake-server", "")
    names = [line[0] for line in lines if line]
    assert sum(mnemonic in ("vpermps", "vpermd") for mnemonic in names) >= kind.block // 16


@pytest.mark.parametrize(("path", "triple", "processor", "look_up"), [("avx2", X86, "haswell", "vpshufb"), ("neon", ARM, "generic", "tbl")])
def test_tables_of_codes_are_looked_up_by_an_instruction(path, triple, processor, look_up):
    lines = assembly(lowered(float_products.fill_blocks, unpacking(NVFP4), path), triple, processor, "")
    assert [line[0] for line in lines if line].count(look_up) >= NVFP4.block // 16
