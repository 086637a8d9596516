"""The code of every kernel that the checks before have compiled: what NVIDIA's assembler may not do to it. What NVVM does shows in bits.

The assembler comes with the extra `cuda`, its disassembler with `dev`.
"""

import gc
import re
import subprocess
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from cuda.bindings import nvjitlink
from numba.cuda.dispatcher import CUDADispatcher

from cuda_checks.common import check

DISASSEMBLER = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvdisasm")
EXPECTED = {
    "product": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32",),
    "matmul": ("fma.rn.f32", "shfl.sync.bfly"),
    "attend_chunk": ("fma.rn.f32", "shfl.sync.bfly"),
    "rms_norm": ("fma.rn.f64", "sqrt.rn.f32"),
}
UNWANTED = (".approx", ".ftz", "ld.local", "st.local", "ld.u64", "ld.f32")  # the last two read memory whose space NVVM does not know
_FUSABLE = re.compile(r"\bmul\.f(?:32|64)\b")  # without a rounding of its own, which .rn would be
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9]+)")


def kernels() -> list[tuple[str, Any]]:
    """Name and compiled code of every kernel of this process."""
    dispatchers = [each for each in gc.get_objects() if type(each) is CUDADispatcher and not each.targetoptions.get("device")]
    return [(each.py_func.__name__, kernel._codelibrary) for each in dispatchers for kernel in each.overloads.values()]


def assembled(ptx: str) -> tuple[int, Counter[str]]:
    """Bytes of a kernel's stack frame and of spilled registers, and how often each instruction stands in the machine code for sm_90.

    Without the disassembler, and without a multiplication that may be fused, there are no counts.
    """
    options, source = ["-arch=sm_90", "-verbose"], ptx.encode()
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, source, len(source), "kernel")
        nvjitlink.complete(handle)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
        binary = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, binary)
    finally:
        nvjitlink.destroy(handle)
    (spills,) = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log.decode())
    if not (DISASSEMBLER.exists() and _FUSABLE.search(ptx)):
        return sum(map(int, spills)), Counter()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return sum(map(int, spills)), Counter(_INSTRUCTION.findall(text))


def most_fused(ptx: str) -> tuple[int, int]:
    """The FFMA and the DFMA that the assembler makes of a kernel's PTX if it fuses nothing.

    It makes one of each fma. A division in float32 takes five in line, and all of them share a subroutine of twelve for numbers that are
    out of the range of these; a division in float64 takes seven, and one in float32 for its range. A square root with its reciprocal takes
    fourteen, and ten in float64. (Counted in what nvJitLink 13.5 makes of kernels with one, two and more of each.)
    """
    count = {name: len(re.findall(rf"\b{name}\b", ptx)) for name in ("fma.rn.f32", "fma.rn.f64", "div.rn.f32", "div.rn.f64", "sqrt.rn.f32")}
    rooted = bool(count["sqrt.rn.f32"])
    single = count["fma.rn.f32"] + 5 * count["div.rn.f32"] + 12 * bool(count["div.rn.f32"]) + count["div.rn.f64"] + 14 * rooted
    return single, count["fma.rn.f64"] + 7 * count["div.rn.f64"] + 10 * bool(count["div.rn.f64"])


def problems_of(name: str, library: Any) -> list[str]:
    ptx = library.get_asm_str(cc=(9, 0))
    found = [f"no {text}" for text in EXPECTED.get(name, ()) if text not in ptx] + [text for text in UNWANTED if text in ptx]
    spilled, counts = assembled(ptx)
    single, double = most_fused(ptx)
    if spilled or counts["FFMA"] > single or counts["DFMA"] > double:
        found.append(f"{spilled} bytes spilled; {counts['FFMA']} FFMA of {single} and {counts['DFMA']} DFMA of {double}")
    return [f"{name}: {text}" for text in found]


@check
def compiled_code() -> None:
    listed = kernels()
    assert {"rms_norm", "matmul", "product", "attend_chunk", "fold_chunks", "keep"} <= {name for name, _ in listed}
    problems = [problem for name, library in listed for problem in problems_of(name, library)]
    assert not problems, "\n".join(problems)
