"""Every instruction set gives the same bits, and byte dot products become the instructions they are meant to become.

Numba compiles for a lesser processor when told its name and features, and a better one runs that. What this machine does not have can
still be compiled for, and read.
"""

import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from assembly import ARM, AVX2, AVX512, SSE4, X86, assembly, lowered
from block_samples import random_blocks, same_bytes
from models import SHAPE, random_model, random_tokens
from numba import njit, types
from numba.np.numpy_support import from_dtype

from bitnet_np.base.block_formats import FORMATS
from bitnet_np.base.tensor_types import BLOCK_TYPES, MXFP4, NVFP4, Q3_K, Q4_K, Q5_1, Q5_K, Q6_K, Q8_0, TQ1_0
from bitnet_np.engine import masks
from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.engine.forward_pass import forward_full, forward_incremental
from bitnet_np.kernels import cpu, float_products, processor, ternary_product, tiles
from bitnet_np.kernels.fast import byte_dots, emit, simd
from bitnet_np.kernels.fast.block_bytes import ROWS
from bitnet_np.kernels.ggml import blocks, products
from bitnet_np.kernels.ggml.products import Rows, Strip
from bitnet_np.kernels.ternary_product import Matrix, Product
from bitnet_np.model import packing
from bitnet_np.testing.part_cases import part_cases

FORWARD = ("logits", "halves", "weights", "products")

# name for Numba: its features, the path expected, whether registers are many, and what it computes. Compiling takes most of the time, so
# each path of byte dot products has one type with signed codes and one without. Those of floats run where they differ most from this
# processor's. Tables of codes and float16 are widened on the first as here, on the third as on the second, on the fourth as on the second
# and the last. The last two have no fused multiply-add: each lane is a call.
PROCESSORS = {
    "skylake-avx512": (AVX512, "avx512", True, ("ternary", "Q4_K", "Q8_0")),
    "haswell": (AVX2, "avx2", False, (*FORWARD, "ternary", "Q5_1", "Q6_K")),
    "alderlake": (AVX2 + ",+avxvnni", "avx-vnni", False, ("ternary", "Q5_1", "Q8_0")),
    "nehalem": (SSE4, "ssse3", False, ("ternary", "Q4_K", "Q6_K")),
    "generic": ("", "generic", False, (*FORWARD, "ternary", "Q4_K", "Q8_0", "masked")),
}


NARROW = {"width": 33, "ffn": 45, "heads": 2, "kv_heads": 1, "head_dim": 6}
DIFFERENT_TYPES = (Q5_1, Q8_0, Q3_K, Q5_K, Q6_K, TQ1_0, MXFP4)  # what block types are made of, each thing at least once


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()


def random_floats(shape):
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


def blocks_of(kind):
    return random_blocks(np.random.default_rng(kind.number), kind, 40, 512 // kind.block).data


def logits():
    """Of two models, 70 tokens of 2 sequences, in every dialect by both paths."""
    digests = []
    for shape in (SHAPE, NARROW):
        model = random_model(1, table="float16", **shape)
        tokens = random_tokens(np.random.default_rng(1), model, 2, 70)
        for dialect in DIALECTS.values():
            for path in (forward_full, forward_incremental):
                digests.append(digest(path(model, tokens, dialect=dialect)))
    return digests


def masked():
    model = random_model(1, table="float16", **NARROW)
    tokens = random_tokens(np.random.default_rng(1), model, 2, 70)
    return digest(forward_full(model, tokens, mask=masks.mask(70, 70, masks.Pattern(window=9, sinks=2))))


def ternary_products():
    """Of every number of rows and of outputs, which kernels divide differently; and the largest sums of both signs."""
    results = [*part_cases(cpu, {})["parts, ternary, 600 columns"]()]
    ones = packing.pack(np.ones((70, 512), int), 1.0)
    largest = [np.full((rows, 512), code, np.int8) for rows in (1, 17) for code in (-128, 127)]
    results += [cpu.ternary_matmul(codes, np.ones(len(codes), np.float32), ones.codes, ones.scale, 70) for codes in largest]
    return [digest(result) for result in results]


def byte_products(kind):
    """Of one row and of several, as llama.cpp defines them; and of the largest codes of both sides."""
    pairs = [(random_floats((rows, 512)), blocks_of(kind)) for rows in (1, 5)]
    pairs += [(np.ones((rows, 512), np.float32), same_bytes(kind, 128)) for rows in (1, 5)]
    return [digest(blocks.matmuls_as_llama_cpp(x, (data, kind))[0]) for x, data in pairs]


def halves():
    """Every float16 widened: random weights are hardly ever subnormal."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 16)
    widened = cpu.embed(every, np.arange(len(every)))
    widened[np.isnan(widened)] = np.nan
    return digest(widened)


PARTS = {
    "logits": logits,
    "masked": masked,
    "ternary": ternary_products,
    "halves": halves,
    "weights": lambda: {kind.name: digest(blocks.embed(blocks_of(kind), kind, np.arange(40))) for kind in DIFFERENT_TYPES},
    "products": lambda: [digest(blocks.matmul(random_floats((rows, 512)), blocks_of(Q5_K), Q5_K)) for rows in (1, 7)],
} | {kind.name: partial(byte_products, kind) for kind in (Q5_1, Q8_0, Q4_K, Q6_K)}


def fingerprint(names):
    """SHA-256 of what these parts compute, and how they were computed."""
    return {"path": processor.instruction_path(), "wide": emit.is_wide()} | {name: PARTS[name]() for name in names}


# Every kernel in the variant for the calling thread alone: compiling the one for several threads too takes half as long again. This
# process, whose bits are expected, runs both.
PROGRAM = (
    "import gc, json, sys; gc.set_threshold(100_000, 20, 20); "  # as in conftest.py
    "from bitnet_np.kernels import launching; launching.SMALL = 1 << 62; "
    "from test_instruction_sets import fingerprint; print(json.dumps(fingerprint(sys.argv[1:])))"
)
x86 = pytest.mark.skipif(processor.architecture() != "x86_64", reason="not an x86-64 processor")


@pytest.fixture(scope="module")
def processes():
    """One process for each processor this one can stand in for, all started at once: compiling takes most of the time."""
    here = {feature.strip() for feature in llvm.get_host_cpu_features().flatten().split(",")}
    tests, root = Path(__file__).parents[1], Path(packing.__file__).parents[2]
    path = os.pathsep.join([str(tests), str(tests / "support"), str(Path(__file__).parent), str(root)])
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *names],
            env={**os.environ, "PYTHONPATH": path, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, (features, _, _, names) in PROCESSORS.items()
        if {feature for feature in features.split(",") if feature} <= here
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def expected():
    return fingerprint(PARTS)


@x86
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_lesser_processor_gives_the_same_bits(processes, expected, name):
    if name not in processes:
        pytest.skip(f"this processor cannot stand in for {name}")
    out, _ = processes[name].communicate(timeout=600)  # four processes that compile for minutes where others want the processor too
    assert processes[name].returncode == 0
    _, path, wide, names = PROCESSORS[name]
    assert json.loads(out) == {part: expected[part] for part in names} | {"path": path, "wide": wide}


@x86
def test_without_settings_the_processors_own_features_decide():
    here = processor.cpu_features()
    assert here == {feature[1:] for feature in llvm.get_host_cpu_features().flatten().split(",") if feature.startswith("+")}
    paths = ("avx512vnni", "avx512-vnni"), ("avx512bw", "avx512"), ("avxvnni", "avx-vnni"), ("avx2", "avx2")
    best = next((path for feature, path in paths if feature in here), None)
    assert best is None or processor.instruction_path() == best


# --- read, not run --------------------------------------------------------------------------------------------------------------------


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
        matrix = types.NamedTuple([n, types.float32, n, n], Matrix)
        return [(ternary_product._some_tokens, (emit.Tile("i32", 4, 2), n, arrays, matrix, n, n, floats), 4 * 2)]
    rows = types.NamedTuple([array(types.int8, 2), array(types.int16, 3), *[array(types.float32, 2)] * 2], Rows)
    matrix = array(from_dtype(FORMATS[kind.name].layout), 2, readonly=True)
    strip = types.NamedTuple([codes, array(types.int32), array(types.int32), floats], Strip)
    one = emit.Tile("f32", 1, 1), emit.Tile("i32", 1, 1), matrix, rows, n, n, floats
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
