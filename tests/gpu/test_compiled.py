"""What the kernels compile to: the instructions they are written for, the contract's rounding, registers, and the order in a graph."""

import ast
import re
from pathlib import Path

import pytest
from gpu_kernels import KERNELS
from gpu_marks import needs_package
from machine_code import DISASSEMBLER, assembled, fused_by, library_of

from bitnet_np.kernels import masks

FUSED_WITHOUT_HARM = {"silu_gate", "rms_norm_silu", "normed_codes_silu", "normed_product_silu_of_sum", "gelu_tanh", "gelu"}
FUSED_WITHOUT_HARM |= {"gelu_gate", "soft_cap", "attend_capped", "attend_chunk_capped"}
"""Kernels in which a fused product changes no bit: 1 + e^y and e^y - 1, whose last product is by a power of two, and 1 - p / 2. The
products are exact, or too small to matter beside 1."""

UNROLLED = 144
"""FFMA that more come into attention, because the assembler unrolls a loop with 48 of them four times."""

SPILLED = 8, 4, 4
"""What `ternary_skinny` for two groups of tokens and 14 warps spills: one register, which it writes and reads once."""

EXPECTED = {
    "normed_codes_relu2": ("ld.global.v4", "ld.shared.v4", "fma.rn.f64", "sqrt.rn.f32", "div.rn.f32", "redux.sync"),
    "normed_product_sum_of_row": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", "ld.global.v4", "ld.shared.v4", "redux.sync"),
    "ternary_gemv": ("dp4a.u32.s32", "ld.global.v4"),
    "ternary_skinny": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", "ld.global.v4"),
    "ternary_gemm": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", "ld.global.v4", "ld.shared.v4", "cp.async.cg.shared.global"),
    "ternary_groups": (
        "wgmma.mma_async.sync.aligned.m64n",
        "k32.s32.u8.s8",
        "fence.proxy.async.shared::cta",
        "ld.global.v4",
        "cp.async.ca.shared.global",
    ),
    "matmul": ("ld.global.v4", "fma.rn.f32", "shfl.sync.bfly"),
    "attend": ("ld.shared.v4", "ld.global.v4", "fma.rn.f32", "div.rn.f32", "shfl.sync.bfly"),
    "attend_masked": ("ld.shared.v4", "ld.global.v4", "cp.async.cg.shared.global", "fma.rn.f32", "shfl.sync.bfly"),
    "attend_chunk": ("ld.shared.v4", "fma.rn.f32", "shfl.sync.bfly", "prefetch.global.L2"),
    "attend_capped": ("ld.shared.v4", "fma.rn.f32", "div.rn.f32", "shfl.sync.bfly"),
    "attend_chunk_capped": ("ld.shared.v4", "fma.rn.f32", "div.rn.f32", "shfl.sync.bfly", "prefetch.global.L2"),
    "rms_norm_sum": ("fma.rn.f64", "add.rn.f32", "sqrt.rn.f32", "rcp.rn.f32"),
}


UNWANTED = (
    ".approx",
    ".ftz",
    "ld.local",
    "st.local",
    "ld.v4",
    "ld.u64",
    "ld.f32",
)  # the last three read memory whose space NVVM does not know


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_to_what_it_is_to_be(name):
    """For sm_90a, which numba-cuda compiles for where the device has it, and for sm_80 with NVVM told to fuse nothing."""
    library = library_of(*KERNELS[name])
    new = library.get_asm_str(cc=(9, 0, "a"))
    library._nvvm_options["fma"] = 0
    old = library.get_asm_str(cc=(8, 0))
    kernel = name.split()[0]
    has_the_instructions_it_is_written_for(kernel, old, new)
    if kernel not in FUSED_WITHOUT_HARM:
        fuses_what_the_contract_fuses(new, old)
    has_aligned_shared_memory(new)
    becomes_what_it_says(kernel, new)


def has_the_instructions_it_is_written_for(kernel: str, old: str, new: str) -> None:
    for arch, ptx in (("sm_80", old), ("sm_90a", new)):
        assert f".target {arch}" in ptx
        for instruction in ("griddepcontrol.launch_dependents", "griddepcontrol.wait"):  # or a graph's kernels may overtake each other
            assert ptx.count(instruction) == (arch == "sm_90a"), f"{arch}: {instruction}"
        for instruction in EXPECTED.get(kernel, ()):
            assert instruction in ptx, f"{arch}: no {instruction}"
        for unwanted in UNWANTED:
            assert unwanted not in ptx, f"{arch}: {unwanted}"


def fuses_what_the_contract_fuses(ptx: str, unfused: str) -> None:
    for precision in ("f32", "f64"):
        unfused_count, fused_count = (text.count(f"fma.rn.{precision}") for text in (unfused, ptx))
        assert unfused_count == fused_count, f"{fused_count - unfused_count} products fused with a sum"
    assert not _fusable(ptx), f"ptxas may fuse {_fusable(ptx)}"


def _fusable(ptx: str) -> list[str]:
    """What ptxas would fuse: sums without a rounding of products without a rounding."""
    products = set(re.findall(r"\bmul\.f(?:32|64)\s+(%\w+)", ptx))
    sums = re.findall(r"\b(?:add|sub)\.f(?:32|64)\s+%\w+, (%?\w+), (%?\w+);", ptx)
    return [f"{a} + {b}" for a, b in sums if a in products or b in products]


@needs_package
def test_kernels_are_linked_as_what_they_compile_to():
    """Otherwise the linker would compile them once more, with rules of its own."""
    from bitnet_np.kernels.cuda.target import kernel, kernel_of

    def nothing() -> None: ...

    assert kernel(nothing).targetoptions["lto"] is False
    assert {"lto": False, "launch_bounds": 64}.items() <= kernel_of(nothing, 64).targetoptions.items()
    assert kernel_of(nothing, 64, 2).targetoptions["launch_bounds"] == (64, 2)


def test_what_ptxas_would_fuse_is_found():
    assert _fusable("mul.f32 \t%f1, %f2, %f3;\nadd.f32 \t%f4, %f1, %f5;") == ["%f1 + %f5"]
    assert not _fusable("mul.rn.f32 \t%f1, %f2, %f3;\nadd.f32 \t%f4, %f1, %f5;")


@needs_package
@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="nvidia-cuda-nvdisasm is not installed (extra `dev`, on Linux)")
@pytest.mark.parametrize(("rounding", "fused"), [("", 1), (".rn", 0)])
def test_what_the_assembler_fuses_is_counted(rounding, fused):
    """Also through a negation and a copy, which no search in the PTX sees."""
    ptx = f"""
    .version 8.0
    .target sm_90
    .address_size 64
    .visible .entry kernel(.param .u64 kernel_param_0)
    {{
        .reg .b64 %rd<3>; .reg .f32 %f<9>;
        ld.param.u64 %rd1, [kernel_param_0]; cvta.to.global.u64 %rd2, %rd1;
        ld.global.f32 %f1, [%rd2]; ld.global.f32 %f2, [%rd2+4]; ld.global.f32 %f3, [%rd2+8];
        mul{rounding}.f32 %f4, %f1, %f2; neg.f32 %f5, %f4; mov.f32 %f6, %f5; add{rounding}.f32 %f7, %f6, %f3;
        st.global.f32 [%rd2], %f7;
        ret;
    }}"""
    assert not _fusable(ptx)
    assert fused_by(ptx) == (0, 0)
    assert assembled(ptx).counts["FFMA"] == fused


def has_aligned_shared_memory(ptx: str) -> None:
    """Where 16 bytes are read or filled at once: a GPU stops at an address that is not aligned."""
    if re.search(r"(ld|st)\.shared\.v4|cp\.async\.cg\.shared", ptx):
        for alignment, size in re.findall(r"\.shared \.align (\d+) \.b8 \w+\[(\d+)\]", ptx):
            assert int(alignment) >= 16 or int(size) < 16


def becomes_what_it_says(kernel: str, ptx: str) -> None:
    """No register is spilled, a block has as many as its threads need, and the assembler fuses no product with a sum."""
    from bitnet_np.gpu.backend import LARGE_BLOCK

    code = assembled(ptx)
    assert code.spills == (0, 0, 0) or (kernel == "ternary_skinny" and code.spills == SPILLED)
    assert not code.is_serial
    bounds = re.search(r"\.maxntid (\d+)", ptx)
    threads = int(bounds[1]) if bounds else LARGE_BLOCK if kernel.startswith("rms_norm") else 512 if kernel == "ternary_gemv" else 256
    blocks = re.search(r"\.minnctapersm (\d+)", ptx)
    assert -(-code.registers // 8) * 8 * threads * int(blocks[1] if blocks else 1) <= 1 << 16, f"{code.registers} registers"
    if code.counts:
        single, double = fused_by(ptx)
        assert code.counts["FFMA"] <= single + (UNROLLED if kernel.startswith("attend") else 0)
        assert code.counts["DFMA"] <= double


def names(nodes: list) -> set[str]:
    return {getattr(node, "id", "") for node in nodes}


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_every_kernel_waits_for_those_before():
    """Otherwise it could overtake them in a graph, whose launches overlap."""
    kernels = 0
    for path in (Path(masks.__file__).parent / "cuda").glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        made = names([call.args[0] for call in calls(tree) if names([call.func]) & {"kernel", "kernel_of"}])
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ("kernel" in names(node.decorator_list) or (node.col_offset and node.name in made)):
                kernels += 1
                assert names([call.func for call in calls(node)]) & {"in_turn", "await_previous"}, f"{path.name}: {node.name}"
    assert kernels > 25
