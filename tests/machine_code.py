"""What NVIDIA's assembler makes of a kernel's PTX for sm_90a. It comes with the extra `cuda`, the disassembler with `dev`.

python tests/machine_code.py        a table of all kernels: registers, and instructions of some kinds
"""

import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9]+)")
DISASSEMBLER = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvdisasm")


@dataclass(frozen=True)
class Code:
    """A kernel's machine code.

    spills: bytes of the stack frame, of spilled registers' stores and of their loads
    counts: how often each instruction stands in the code, by its name without modifiers
    is_serial: whether products of warpgroups wait for each other, because the assembler could not tell that they need not
    """

    registers: int
    spills: tuple[int, int, int]
    counts: Counter[str]
    is_serial: bool


def library_of(function: object, signature: object, threads: int | None = None) -> Any:
    """numba-cuda's library of a kernel compiled for sm_90a, as on an H100 or H200, whose `get_asm_str` is its PTX.

    threads: of a block at most, if that limits its registers.
    """
    from numba.cuda import compiler, dispatcher

    before, dispatcher.get_current_device = dispatcher.get_current_device, lambda: SimpleNamespace(compute_capability=(9, 0))
    try:
        return compiler._compile_pyfunc_with_fixup(function, signature, device=False, cc=(9, 0), abi="numba", launch_bounds=threads)[0]
    finally:
        dispatcher.get_current_device = before


def assembled(ptx: str) -> Code:
    """The machine code of a kernel's PTX. Without the disassembler there are no counts."""
    from cuda.bindings import nvjitlink

    options, source = ["-arch=sm_90a", "-verbose"], ptx.encode()
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
    (registers,) = re.findall(r"Used (\d+) registers", log.decode())
    counts = _counted(binary) if DISASSEMBLER.exists() else Counter[str]()
    return Code(int(registers), tuple(map(int, spills)), counts, "serialized" in log.decode())


def _counted(binary: bytes) -> Counter[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return Counter(_INSTRUCTION.findall(text))


def fused_by(ptx: str) -> tuple[int, int]:
    """The FFMA and the DFMA that NVIDIA's assembler makes of a kernel's PTX if it fuses nothing and unrolls no loop.

    It makes one of each fma. A division in float32 takes five in line, and all of them share a subroutine of twelve for numbers that are
    out of the range of these; a division in float64 takes seven, and one in float32 for its range. A square root with its reciprocal takes
    fourteen, and ten in float64. (Counted in what nvJitLink 13.5 makes of kernels with one, two and more of each.)
    """
    count = {name: len(re.findall(rf"\b{name}\b", ptx)) for name in ("fma.rn.f32", "fma.rn.f64", "div.rn.f32", "div.rn.f64", "sqrt.rn.f32")}
    rooted = bool(count["sqrt.rn.f32"])
    single = count["fma.rn.f32"] + 5 * count["div.rn.f32"] + 12 * bool(count["div.rn.f32"]) + count["div.rn.f64"] + 14 * rooted
    return single, count["fma.rn.f64"] + 7 * count["div.rn.f64"] + 10 * bool(count["div.rn.f64"])


def main() -> None:
    from gpu_kernels import KERNELS

    columns = ("FFMA", "DFMA", "IMMA", "IGMMA", "IDP", "LDG", "STG", "LDS", "BAR")
    print(f"{'kernel':<34}{'registers':>10}{'spills':>8}{'all':>8}" + "".join(f"{name:>7}" for name in columns))
    for name, kernel in KERNELS.items():
        code = assembled(library_of(*kernel).get_asm_str(cc=(9, 0, "a")))
        line = f"{name:<34}{code.registers:>10}{sum(code.spills):>8}{code.counts.total():>8}"
        print(line + "".join(f"{code.counts[column]:>7}" for column in columns), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
