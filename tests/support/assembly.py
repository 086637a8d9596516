"""What kernels become in machine code of any processor, compiled and read, not run; and the features of lesser processors, which run.

Tests that run kernels as such a processor does take its features from here: those of one name and features find each other's compiled
kernels.
"""

from unittest import mock

import llvmlite.binding as llvm
import pytest
from numba import njit
from numba.core import codegen

from bitnet_np.kernels.fast import emit

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
SSE4 = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt"
AVX2 = SSE4 + ",+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"
AVX512 = AVX2 + ",+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"


class Lowered(BaseException):
    """Carries a function's LLVM module out of Numba before it is compiled for this processor."""


def lowered(function, signature, path, wide=False):
    def stop(library, module):
        if function.__name__ in library.name:
            raise Lowered(str(module))
        return add(library, module)

    add = codegen.CPUCodeLibrary.add_ir_module
    with (
        mock.patch.object(codegen.CPUCodeLibrary, "add_ir_module", stop),
        mock.patch.object(emit, "instruction_path", return_value=path),
        mock.patch.object(emit, "converts_half", return_value=True),
        mock.patch.object(emit, "is_wide", return_value=wide),
        pytest.raises(Lowered) as caught,
    ):
        njit(getattr(function, "py_func", function)).compile(signature)
    return str(caught.value)


def assembly(module, triple, processor, features):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, features=features, opt=2)
    module = llvm.parse_assembly(module)
    module.triple, module.data_layout = triple, str(machine.target_data)
    module.verify()
    return [line.split() for line in machine.emit_assembly(module).splitlines()]
