"""The GPU's kernels, in Numba's simulator and as the PTX that they compile to, read and interpreted. Where there is a GPU: there too."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gpu_check
import numpy as np
import pytest

from bitnet_np import embedded
from bitnet_np.cli import main as cli
from bitnet_np.dispatch import choose
from bitnet_np.errors import OptionError
from bitnet_np.gpu.device import open_cuda
from bitnet_np.kernels import cpu, masks

CHECKS = Path(__file__).parents[1] / "cuda_checks.py"
GROUPS = Counter(
    decorator.args[0].value
    for node in ast.parse(CHECKS.read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef)
    for decorator in node.decorator_list
    if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "check"
)
needs_compiler = pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="no C compiler for a CUDA driver")
needs_package = pytest.mark.skipif(find_spec("numba_cuda") is None, reason="numba-cuda is not installed (extra `cuda`)")


def has_gpu() -> bool:
    try:
        open_cuda()
    except OptionError:
        return False
    return True


def run_checks(group: str, *how: str) -> None:
    """All checks of a group, in a process of their own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_NUM_THREADS": "1"}
    command = [sys.executable, str(CHECKS), group, *how]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(found) == GROUPS[group]
    assert not [f"{line['check']}: {line['problem']}" for line in found if line["problem"]]


@needs_package
@pytest.mark.parametrize("group", [group for group in GROUPS if group != "models"])
def test_kernels_in_the_simulator_give_the_bits_of_the_cpu(group):
    run_checks(group)


@needs_package
@needs_compiler
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_as_they_are_compiled_give_the_bits_of_the_cpu(group):
    """Instruction by instruction, by an interpreter of PTX that refuses races and waits that are missing."""
    run_checks(group, "--ptx")


@pytest.mark.gpu
@needs_package
@pytest.mark.skipif(not has_gpu(), reason="no GPU here")
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_on_the_gpu_give_the_bits_of_the_cpu(group):
    run_checks(group, "--gpu")


# --- twins ----------------------------------------------------------------------------------------------------------------------------

VOCABULARY = [
    *("embed", "rms_norm", "layer_norm", "quantize", "ternary_matmul", "matmul", "rotations", "rope", "rope_adjacent", "attend"),
    *("relu2_gate", "silu_gate", "gelu", "gelu_tanh", "add", "add_bias", "scaled", "take", "spread", "resident", "to_host"),
]


@needs_package
@pytest.mark.parametrize("name", [*VOCABULARY, "fill_mask", "attend_masked"])
def test_twins_have_the_same_parameters(name):
    from bitnet_np.gpu.backend import Cuda

    ours = inspect.signature(getattr(cpu if hasattr(cpu, name) else masks, name)).parameters.values()
    theirs = list(inspect.signature(getattr(Cuda, name)).parameters.values())[1:]
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


@needs_package
def test_the_forward_uses_no_operation_that_the_device_lacks():
    from bitnet_np import transformer
    from bitnet_np.gpu.backend import Cuda

    used = set(re.findall(r"\bops\.(\w+)", inspect.getsource(transformer)))
    assert used >= {"rms_norm", "attend", "take"}
    assert {name for name in used if not hasattr(Cuda, name)} <= {"attend_halves"}  # of dialects that the device refuses


# --- how lanes fold -------------------------------------------------------------------------------------------------------------------


def on_lanes(monkeypatch, instruction, numbers: np.ndarray) -> list[np.ndarray]:
    """What an instruction of ptx.py gives each of 32 lanes that have a local array each, [n, 32]: its own code, with NumPy for LLVM."""
    from numba.cuda import types

    from bitnet_np.kernels.cuda import ptx

    builder = SimpleNamespace(load=lambda address, typ: address, fadd=np.add)
    context = SimpleNamespace(make_tuple=lambda builder, kind, values: values)
    monkeypatch.setattr(ptx, "_address", lambda context, builder, kind, array, offset: array[offset.constant])
    monkeypatch.setattr(ptx, "_butterfly", lambda builder, x, distance: x[np.arange(32) ^ distance])
    monkeypatch.setattr(ptx, "_rounded", lambda builder, operation, a, b: np.float32(getattr(a, "constant", a)) + b)
    signature, codegen = instruction._defn(None, types.float32[::1])
    return codegen(context, builder, signature, [numbers])


@needs_package
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_four_lanes_fold_the_dot_products_that_they_share(monkeypatch, columns):
    from bitnet_np.kernels.cuda import ptx

    lanes = np.random.default_rng(1).standard_normal((8, 4, columns, 16)).astype(np.float32)  # of tiles, rows, columns
    numbers = np.empty((16 * columns, 32), np.float32)
    for lane in range(32):
        tile, quarter = lane % 8, lane // 8
        numbers[:, lane] = lanes[tile][np.arange(4) ^ quarter, :, 4 * quarter : 4 * quarter + 4].reshape(-1)
    found = on_lanes(monkeypatch, ptx.fold_quarters(columns), numbers)
    for lane in range(32):
        np.testing.assert_array_equal([column[lane] for column in found], by_halving(lanes[lane % 8, lane // 8]))


@needs_package
def test_a_quad_folds_a_chunk_of_weights(monkeypatch):
    from bitnet_np.kernels.cuda import ptx

    weights = np.random.default_rng(1).standard_normal((8, 4, 16)).astype(np.float32)  # of quads, parts
    numbers = np.empty((16, 32), np.float32)
    for lane in range(32):
        numbers[:, lane] = weights[lane // 4][:, 4 * (lane % 4) : 4 * (lane % 4) + 4].reshape(-1)
    in_order = ((weights[:, 0] + weights[:, 1]) + weights[:, 2]) + weights[:, 3]
    np.testing.assert_array_equal(on_lanes(monkeypatch, ptx.fold_quad, numbers), np.repeat(by_halving(in_order), 4))


def by_halving(lanes: np.ndarray) -> np.ndarray:
    """[..., 16] -> [...]"""
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


# --- what the kernels compile to ------------------------------------------------------------------------------------------------------

FUSED_WITHOUT_HARM = {"silu_gate", "rms_norm_silu", "normed_codes_silu", "normed_product_silu_of_sum", "gelu_tanh", "gelu"}
"""1 + e^y, whose last product is by a power of two, and 1 - p / 2: exact products, or too small to matter to 1. The bits are the same."""

EXPECTED = {
    "normed_codes_relu2": ("ld.global.v4", "ld.shared.v4", "fma.rn.f64", "sqrt.rn.f32", "div.rn.f32", "redux.sync"),
    "normed_product_sum_of_row": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", "ld.global.v4", "ld.shared.v4", "redux.sync"),
    "ternary_gemv": ("dp4a.u32.s32", "ld.global.v4"),
    "ternary_skinny": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", "ld.global.v4"),
    "ternary_gemm": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", "ld.global.v4", "ld.shared.v4", "cp.async.cg.shared.global"),
    "matmul": ("ld.global.v4", "fma.rn.f32", "shfl.sync.bfly"),
    "attend": ("ld.shared.v4", "ld.global.v4", "fma.rn.f32", "div.rn.f32", "shfl.sync.bfly"),
    "attend_masked": ("ld.shared.v4", "ld.global.v4", "cp.async.cg.shared.global", "fma.rn.f32", "shfl.sync.bfly"),
    "attend_chunk": ("ld.shared.v4", "fma.rn.f32", "shfl.sync.bfly", "prefetch.global.L2"),
    "rms_norm_sum": ("fma.rn.f64", "add.rn.f32", "sqrt.rn.f32", "rcp.rn.f32"),
}


SKINNY = ((1, 2560, 8, 2), (2, 2560, 2, 7), (2, 6912, 8, 2))  # of the 2B model's matrices, on 132 processors
NORMED = (
    ("row", 2560, 8, 2, "row"),
    ("row", 2560, 8, 2, "sum"),
    ("row", 2560, 2, 4, "relu2"),
    ("row", 6912, 8, 2, "sum"),  # the 2B model's matrices, on 132 processors
    ("row", 8640, 8, 2, "sum"),  # of the 3B model's, the widest
    ("sum", 2560, 2, 4, "silu"),
)


ROWS = (("row", 2560, 1024), ("sum", 2560, 256), ("relu2", 6912, 512), ("silu", 2560, 256), ("silu", 9216, 512))


def kernels() -> dict[str, tuple]:
    """Names of kernels as they are used for the 2B model, and the types they are compiled for."""
    from numba.cuda import types as t

    from bitnet_np.gpu.backend import TILES
    from bitnet_np.kernels.cuda import attention, attention_split, floats, norms, rows, ternary
    from bitnet_np.kernels.cuda.attention_shape import shape_for

    f, i, f1, f2, f3, f4 = t.float32, t.int64, t.float32[::1], t.float32[:, ::1], t.float32[:, :, ::1], t.float32[:, :, :, ::1]
    ids, words, signed = t.int64[::1], t.uint32[::1], t.int32[::1]
    matrices = (t.UniTuple(words, 3), t.UniTuple(i, 3), t.UniTuple(i, 3), t.UniTuple(f, 3), words, f1)
    by_tokens = (*matrices, i, i, f1)
    rotation, halves = (f2, f2, i, i, i), t.int16[::1]
    masked = (f1, i, i, i)

    def attended(kept: t.Array = f1) -> tuple:
        return (f3, *rotation, kept, kept, ids, ids, i, i, f)

    def split(kept: t.Array) -> tuple:
        return (f3, *rotation, f3, *attended(kept), i, f1, f3, f3, signed, f3)

    def shapes(queries: int) -> list:
        return [shape_for(width, queries) for width in (64, 128, 256)]

    listed = [
        (rows.quantize, (f2, i, words, f1)),
        *((rows.rms_norm(source), (f2, f2, f2, f1, f, f2)) for source in ("sum", "silu")),
        *((norms.rms_norm(*how), (f1, f1, f1, f1, f, f1)) for how in ROWS[:2]),
        *((norms.normed_codes(*how), (f1, f1, f1, f1, f, words, f1)) for how in ROWS),
        (rows.layer_norm, (f2, f1, f1, f, f2)),
        (rows.add, (f1, f1, f1)),
        (rows.add_bias, (f1, f1, f1)),
        (rows.scaled, (f1, f, f1)),
        (rows.relu2_gate, (f1, f1, f1)),
        (rows.silu_gate, (f1, f1, f1)),
        (rows.gelu, (f1, f1)),
        (rows.gelu_tanh, (f1, f1)),
        (rows.take, (f2, ids, f2)),
        (rows.fill, (f1, f)),
        (rows.spread, (f2, ids, ids, f3)),
        *((rows.keep(bits), (f3, f3, *rotation, ids, ids, kept, kept)) for bits, kept in ((False, f4), (True, t.int16[:, :, :, ::1]))),
        (rows.erase, (f4, i, i, i)),
        (rows.carry, (f4, i, f4, i, i, i)),
        (rows.rope, (f3, *rotation, f3)),
        (rows.take_rotations, (f2, f2, ids, f2, f2)),
        (rows.advance, (ids, i)),
        (rows.fill_mask, (i, ids, ids, ids, i, i, i, i, f, f, f3)),
        (floats.embed("float16"), (t.uint32[:, ::1], ids, f2)),
        (floats.matmul("float16", 1), (words, f1, i, i, i, i, f1)),
        (floats.matmul("bfloat16", 4), (words, f1, i, i, i, i, f1)),
        (floats.matmul("bfloat16", 16), (words, f1, i, i, i, i, f1)),
        (floats.matmul("float32", 8), (words, f1, i, i, i, i, f1)),
        *((norms.normed_product(*how), (f1, f1, f1, f1, f, *matrices[:4], f1, f1)) for how in NORMED),
        *((ternary.gemv(warps, depth), (*matrices, i, f1)) for warps, depth in ((8, 3), (16, 4))),
        *((ternary.skinny(*how), (*matrices, i, f1)) for how in SKINNY),
        *((ternary.gemm(*tile), by_tokens) for tile in TILES),
        *((attention.attend(shape), (*attended(), i, f3)) for shape in shapes(16)),
        *((attention.attend(shape_for(width, 32, many=True)), (*attended(), i, f3)) for width in (96, 128)),
        *((attention_split.attend_chunk(shape, True), split(f1)) for shape in shapes(4)),
        (attention_split.attend_chunk(shape_for(128, 8), True), split(f1)),
        (attention_split.attend_chunk(shape_for(128, 4), False), split(f1)),
        (attention.attend(shape_for(128, 16, True)), (*attended(halves), i, f3)),
        (attention_split.attend_chunk(shape_for(128, 4, True), True), split(halves)),
        (attention.attend_masked(shape_for(128, 16)), (*attended(), *masked, f3)),
    ]
    return {f"{kernel.py_func.__name__} {number}": (kernel.py_func, types) for number, (kernel, types) in enumerate(listed)}


KERNELS = kernels() if find_spec("numba_cuda") else {}
PTXAS = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
UNWANTED = (".approx", ".ftz", "ld.local", "st.local", "ld.v4", "ld.u64", "ld.f32")  # the last: of memory that might be any


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_to_what_it_is_to_be(name, tmp_path, monkeypatch):
    """For sm_80 and sm_90, and for sm_90 with NVVM told to fuse nothing."""
    from numba.cuda import compiler, dispatcher

    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
    library, _ = compiler._compile_pyfunc_with_fixup(*KERNELS[name], device=False, cc=(9, 0), abi="numba")
    old, new = (library.get_asm_str(cc=cc) for cc in ((8, 0), (9, 0)))
    library._nvvm_options["fma"] = 0
    library._ptx_cache.clear()
    kernel = name.split()[0]
    has_the_instructions_it_is_written_for(kernel, old, new)
    if kernel not in FUSED_WITHOUT_HARM:
        fuses_what_the_contract_fuses(new, library.get_asm_str(cc=(9, 0)))
    has_aligned_shared_memory(new)
    if PTXAS is not None:
        has_registers_for_its_blocks(kernel, new, tmp_path / "kernel.ptx")


def has_the_instructions_it_is_written_for(kernel: str, old: str, new: str) -> None:
    for arch, ptx in (("sm_80", old), ("sm_90", new)):
        assert f".target {arch}" in ptx
        for instruction in ("griddepcontrol.launch_dependents", "griddepcontrol.wait"):  # or a graph's kernels may overtake each other
            assert ptx.count(instruction) == (arch == "sm_90"), f"{arch}: {instruction}"
        for instruction in EXPECTED.get(kernel, ()):
            assert instruction in ptx, f"{arch}: no {instruction}"
        for unwanted in UNWANTED:
            assert unwanted not in ptx, f"{arch}: {unwanted}"


def fuses_what_the_contract_fuses(ptx: str, unfused: str) -> None:
    for precision in ("f32", "f64"):
        told, allowed = (text.count(f"fma.rn.{precision}") for text in (unfused, ptx))
        assert told == allowed, f"{allowed - told} products fused with a sum"
    assert not _fusable(ptx), f"ptxas may fuse {_fusable(ptx)}"


def _fusable(ptx: str) -> list[str]:
    """Sums that say no rounding, of products that say none either: what ptxas would fuse."""
    products = set(re.findall(r"\bmul\.f(?:32|64)\s+(%\w+)", ptx))
    sums = re.findall(r"\b(?:add|sub)\.f(?:32|64)\s+%\w+, (%?\w+), (%?\w+);", ptx)
    return [f"{a} + {b}" for a, b in sums if a in products or b in products]


@needs_package
def test_kernels_are_linked_as_what_they_compile_to():
    """Or the linker would compile them once more, with rules of its own."""
    from bitnet_np.kernels.cuda.target import kernel, kernel_of

    def nothing() -> None: ...

    assert kernel(nothing).targetoptions["lto"] is False
    assert {"lto": False, "launch_bounds": 64}.items() <= kernel_of(nothing, 64).targetoptions.items()


def test_what_ptxas_would_fuse_is_found():
    assert _fusable("mul.f32 \t%f1, %f2, %f3;\nadd.f32 \t%f4, %f1, %f5;") == ["%f1 + %f5"]
    assert not _fusable("mul.rn.f32 \t%f1, %f2, %f3;\nadd.f32 \t%f4, %f1, %f5;")


def has_aligned_shared_memory(ptx: str) -> None:
    """Where 16 bytes are read or filled at once. A GPU stops at an address that is not aligned; the simulator has none."""
    if re.search(r"(ld|st)\.shared\.v4|cp\.async\.cg\.shared", ptx):
        for alignment, size in re.findall(r"\.shared \.align (\d+) \.b8 \w+\[(\d+)\]", ptx):
            assert int(alignment) >= 16 or int(size) < 16


def has_registers_for_its_blocks(kernel: str, ptx: str, source: Path) -> None:
    """And spills none."""
    from bitnet_np.gpu.backend import LARGE_BLOCK

    source.write_text(re.sub(r"\.version .*", ".version 8.0", ptx))
    result = subprocess.run([PTXAS, "-arch=sm_90", "-v", "-o", os.devnull, source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-500:]
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in result.stderr
    bounds = re.search(r"\.maxntid (\d+)", ptx)
    threads = int(bounds[1]) if bounds else LARGE_BLOCK if kernel.startswith("rms_norm") else 512 if kernel == "ternary_gemv" else 256
    (registers,) = re.findall(r"Used (\d+) registers", result.stderr)
    assert -(-int(registers) // 8) * 8 * threads <= 1 << 16, f"{registers} registers"


def names(nodes: list) -> set[str]:
    return {getattr(node, "id", "") for node in nodes}


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_every_kernel_waits_for_those_before():
    """Or it could overtake them in a graph, whose launches overlap."""
    found = 0
    for path in (Path(masks.__file__).parent / "cuda").glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        made = names([call.args[0] for call in calls(tree) if names([call.func]) & {"kernel", "kernel_of"}])
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ("kernel" in names(node.decorator_list) or (node.col_offset and node.name in made)):
                found += 1
                assert names([call.func for call in calls(node)]) & {"in_turn", "await_previous"}, f"{path.name}: {node.name}"
    assert found > 25


# --- graphs ---------------------------------------------------------------------------------------------------------------------------


class Driver:
    """As much of CUDA's driver as a graph of three kernels needs; there is none here."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.edges, self.called = refuses, [("a", "b", None), ("b", "c", None)], list[str]()

    class CUgraphEdgeData:
        type = from_port = 0

    class CUgraphDependencyType:
        CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC = 1

    CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments):
            self.called.append(name)
            return (_Error(name == self.refuses), *(getattr(self, "_" + name, lambda *arguments: ())(*arguments)))

        return call

    def _cuGraphClone(self, graph):
        return (f"copy of {graph}",)

    def _cuGraphGetEdges(self, graph, count=0):
        before, after, data = zip(*self.edges, strict=True)
        return list(before[:count]), list(after[:count]), list(data[:count]), len(self.edges)

    def _cuGraphRemoveDependencies(self, graph, before, after, data, count):
        self.edges = [edge for edge in self.edges if edge[:2] not in list(zip(before, after, strict=True))]
        return ()

    def _cuGraphAddDependencies(self, graph, before, after, data, count):
        self.edges += zip(before, after, data, strict=True)
        return ()

    def _cuGraphInstantiate(self, graph, flags):
        return (f"launchable {graph}",)


class _Error(int):
    name = "CUDA_ERROR_NOT_SUPPORTED"


@needs_package
def test_kernels_of_a_graph_begin_before_those_before_them_have_ended():
    from bitnet_np.gpu import graph

    driver = Driver()
    assert graph._overlapping(driver, "graph") == "launchable copy of graph"
    assert [edge[:2] for edge in driver.edges] == [("a", "b"), ("b", "c")]
    assert all(edge.type == edge.from_port == 1 for *_, edge in driver.edges)
    assert driver.called[-1] == "cuGraphDestroy"  # of the copy: what is launchable is another


@needs_package
@pytest.mark.parametrize("refuses", ["cuGraphGetEdges", "cuGraphAddDependencies", "cuGraphInstantiate"])
def test_where_kernels_cannot_overlap_a_graph_is_as_it_was(refuses):
    from bitnet_np.gpu import graph

    driver = Driver(refuses)
    assert graph._overlapping(driver, "graph") is None
    assert driver.called[-1] == "cuGraphDestroy"


# --- what a GPU is to show ------------------------------------------------------------------------------------------------------------


def run_gpu_check(tmp_path: Path, *arguments: str) -> tuple[int, str, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"NUMBA_NUM_THREADS": "1"}
    out = tmp_path / "gpu.json"
    command = [sys.executable, gpu_check.__file__, "--json", str(out), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return result.returncode, result.stdout + result.stderr, json.loads(out.read_text()) if out.exists() else {}


@needs_package
@needs_compiler
def test_gpu_check_runs_all_its_parts_where_kernels_are_interpreted(tmp_path):
    code, told, written = run_gpu_check(tmp_path, "--interpret")
    assert (code, written["problems"]) == (0, []), told
    assert written["found"].keys() == {"describe", "peaks", "bits", "kernels", "decode", "ways", "prefill", "matrices", "masks"}
    assert all(entry["equal"] for entry in written["found"]["bits"].values())
    assert "INTERPRETED: no time below means anything" in told


@pytest.fixture
def script(monkeypatch):
    """gpu_check.py on a device that is not there, with two parts of which the first fails."""
    monkeypatch.setattr(gpu_check, "open_cuda", lambda: None)
    monkeypatch.setattr(gpu_check, "PARTS", {"wrong": lambda run: 1 / 0, "masks": lambda run: {"loop_seconds": 1}})
    return gpu_check


def test_a_part_of_gpu_check_that_fails_leaves_the_others_a_process_of_their_own(script, tmp_path, monkeypatch):
    replaced = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: replaced.extend(arguments) or sys.exit(7))
    out = tmp_path / "gpu.json"
    with pytest.raises(SystemExit, match="7"):
        script.main(["--json", str(out), "--parts", "wrong,masks", "--seconds", "100"])
    assert "ZeroDivisionError" in json.loads(out.read_text())["problems"][0]
    arguments = replaced[2:]
    assert arguments[arguments.index("--parts") + 1] == "masks"
    assert 90 < float(arguments[arguments.index("--seconds") + 1]) <= 100


@needs_package
def test_gpu_check_goes_on_with_what_it_has_and_tells_it_last(script, tmp_path, capsys):
    out = tmp_path / "gpu.json"
    out.write_text(json.dumps({"found": {"bits": {"a": {"equal": True}}}, "problems": ["wrong: it was"]}))
    assert script.main(["--json", str(out), "--parts", "masks", "--resume"]) == 1
    assert json.loads(out.read_text())["found"] == {"bits": {"a": {"equal": True}}, "masks": {"loop_seconds": 1}}
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == "PROBLEM: wrong: it was"
    assert any("no table" in line for line in told)  # the masks of this test have no times


@needs_package
def test_gpu_check_tells_what_it_has_when_a_part_does_not_end(script, capsys, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: None)
    script.give_up(script.Run(None, script.TINY, {"bits": {"a": {"equal": True}}}))
    told = capsys.readouterr().out
    assert "1 of 1" in told
    assert "PROBLEM: a part did not end" in told


@needs_package
@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
def test_gpu_check_without_a_gpu_runs_nothing_and_says_so(tmp_path):
    code, told, written = run_gpu_check(tmp_path)
    assert (code, written) == (3, {})
    assert "no CUDA device" in told
    assert "nothing was run" in told


# --- what is missing ------------------------------------------------------------------------------------------------------------------


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("bitnet_np.gpu.device.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"numba-cuda is not installed.*pip install 'bitnet_np\[cuda\]'"):
        open_cuda()


@needs_package
def test_versions_that_do_not_go_together_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba.cuda", None)
    with pytest.raises(OptionError, match=r"numba-cuda [\d.]+, numba [\d.]+, numpy [\d.]+ do not load together, import of numba\.cuda"):
        open_cuda()


@needs_package
@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
def test_without_a_gpu_the_error_says_so():
    with pytest.raises(OptionError, match="no CUDA device"):
        open_cuda()


@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
def test_the_device_is_chosen_once_and_the_reason_kept():
    assert choose("cpu") == (cpu, "the CPU was asked for")
    ops, reason = choose("auto")
    assert ops is cpu
    assert reason.startswith("no CUDA")
    with pytest.raises(OptionError, match="no CUDA"):
        choose("cuda")


@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
def test_the_command_line_without_a_gpu(capsys):
    with embedded.model_path() as path:
        assert cli.main(["logits", str(path), "--tokens", "1,2", "--device", "cuda"]) == 2
        assert "no CUDA" in capsys.readouterr().err
        assert cli.main(["logits", str(path), "--tokens", "1,2", "--device", "auto"]) == 0


def test_the_cpu_path_imports_no_cuda():
    code = "import sys, bitnet_np.cli; sys.exit(any(name.startswith('numba.cuda.cudadrv') for name in sys.modules))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
