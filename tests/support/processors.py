"""Processors that this one can stand in for: Numba compiles for a lesser processor when told its name and features. And a program:

    python tests/support/processors.py TYPES BEGINNINGS [whole]

What kernels compute on the processor that Numba was told of, as JSON: wrong known bits, operations that have other bits than the contract,
costs, and digests of passes. Compiling takes most of the time, so matrices are of the types named, passes are those whose names have one of
the beginnings, and of the self-test's and the contract's operations those of ternary matrices run (and the self-test's of blocks), or all.
"""

import gc
import json
import re
import sys
from dataclasses import dataclass
from itertools import product

import costs
import guarded
import llvmlite.binding as llvm
import numpy as np
import passes
from assembly import AVX2, AVX512, SSE4
from block_samples import same_bytes
from operation_draws import CASES, Draw, same

from bitnet_np import contract
from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, BLOCK_TYPES
from bitnet_np.kernels import cpu, processor, ternary_product
from bitnet_np.kernels.fast import emit
from bitnet_np.kernels.ggml import blocks
from bitnet_np.model import packing
from bitnet_np.testing import selftest

SERVER = AVX512 + ",+avx512vnni,+avx512vbmi,+avx512vbmi2,+avx512bitalg,+avx512ifma,+avx512vpopcntdq,+gfni,+vaes,+vpclmulqdq"
AMD = "+sse4a"  # tells AMD's processors from others: no kernel has an instruction of it


@dataclass(frozen=True)
class Processor:
    name: str  # LLVM's
    features: str
    path: str  # of byte dot products
    is_wide: bool  # whether registers are many
    least: int  # tokens from which on ternary codes are unpacked once for all
    types: tuple[str, ...]  # of blocks: one with signed codes, and one without, where their products are not those of another one
    passes: tuple[str, ...] = ()  # beginnings of their names
    is_whole: bool = False  # whether kernels of floats also run

    @property
    def environment(self) -> dict[str, str]:
        return {"NUMBA_CPU_NAME": self.name, "NUMBA_CPU_FEATURES": self.features}

    def runs_here(self) -> bool:
        here = {feature for feature, there in llvm.get_host_cpu_features().items() if there}
        return {feature[1:] for feature in self.features.split(",") if feature not in ("", AMD)} <= here

    def is_like_this_one(self) -> bool:
        """Whether every kernel takes the same way on the processor at hand, where all tests run."""
        return (self.path, self.is_wide, self.least) == (processor.instruction_path(), emit.is_wide(), ternary_product.LEAST)


# Kernels of floats differ by the width and the number of registers, and without fused multiply-add: two processors run them all. The rest
# differ in products of bytes, of which the self-test's parts have every number of rows and outputs, and AMD's from Intel's by the kernel
# that ternary products choose. Passes take longer to compile: one processor of each width runs them.
TERNARY, FLOATS = ("family bitnet-b1.58", "ternary"), ("float", "dialect", "cache")  # beginnings of passes
PROCESSORS = {
    "Intel server, VNNI": Processor("icelake-server", SERVER, "avx512-vnni", True, 16, ("Q4_K", "Q8_0"), (*TERNARY, "Q4_K", "Q8_0")),
    "AMD server, VNNI": Processor("znver4", f"{SERVER},{AMD}", "avx512-vnni", True, 1 << 31, (), TERNARY),
    "AVX-512 alone": Processor("skylake-avx512", AVX512, "avx512", True, 5, ("Q8_0",)),
    "AVX2": Processor("haswell", AVX2, "avx2", False, 3, ("Q4_K",)),
    "AVX2, every kernel": Processor(
        "haswell", AVX2, "avx2", False, 3, ("Q4_K", "Q5_1"), (*TERNARY, *FLOATS, "Q4_K", "Q5_1"), is_whole=True
    ),
    "AVX-VNNI": Processor("alderlake", AVX2 + ",+avxvnni", "avx-vnni", False, 3, ("Q8_0",)),
    "SSE": Processor("nehalem", SSE4, "ssse3", False, 3, ("Q4_K", "Q6_K"), is_whole=True),
    "x86-64 alone": Processor("generic", "", "generic", False, 3, ("Q8_0",)),
}


def extremes(types: list[str]) -> dict[str, str]:
    """Digests of what passes hardly ever meet: every float16, among them the subnormal ones; and the largest sums of both signs, with
    an infinite scale, too, which `quantize` never gives."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 16)
    widened = cpu.embed(every, np.arange(len(every)))
    widened[np.isnan(widened)] = np.nan
    ones, x = packing.pack(np.ones((70, 512), int), 1.0), {rows: np.ones((rows, 512), np.float32) for rows in (1, 5, 17)}
    results = {"float16": [widened]}
    results["ternary"] = [
        cpu.ternary_matmul(np.full(x[rows].shape, code, np.int8), x[rows][:, 0] * scale, ones.codes, ones.scale, 70)
        for rows in (1, 17)
        for code in (-128, 127)
        for scale in (np.float32(1), np.float32(np.inf))
    ]
    for kind in BLOCK_TYPES:
        if kind.name in types:
            data = same_bytes(kind, 128)
            results[kind.name] = [blocks.matmuls_as_llama_cpp(x[rows], (data, kind))[0] for rows in (1, 5)]
    return {name: selftest.digest(*arrays) for name, arrays in results.items()}


def unlike_the_contract(names: list[str]) -> list[str]:
    """Those of some operations whose bits are not the contract's: of a few random numbers, and of edges."""
    found = []
    for name, seed in product(names, range(4)):
        with np.errstate(all="ignore"):
            arguments = CASES[name](Draw(np.random.default_rng(seed), edges=seed % 2 == 1))
            if not same(getattr(cpu, name)(*arguments), getattr(contract, name)(*arguments)):
                found.append(f"{name}, draw {seed}")
    return found


def computed(types: list[str], beginnings: list[str], is_whole: bool) -> dict:
    """What differs, and what was computed by the cases of the self-test, by guarded kernels, and by passes."""
    others = {kind.name for kind in ALL_BLOCK_TYPES} - {*types}
    known = selftest.known_bits()
    wrong = [
        name
        for name, compute in selftest.cases().items()
        if not others & {*re.split(r"\W+", name)}
        and not name.startswith("model")  # passes are whole models
        and (is_whole or name.startswith(("ternary", "blocks", *(f"parts, {kind}" for kind in ("ternary", *types)))))
        if any(digest != known[name] for digest in selftest.digests(name, compute))
    ]
    if is_whole:
        guarded.run(2, [kind for kind in BLOCK_TYPES if kind.name in types])
    return {
        "path": processor.instruction_path(),
        "is_wide": emit.is_wide(),
        "least": ternary_product.LEAST,
        "wrong": wrong,
        "contract": unlike_the_contract([name for name in CASES if "blocks" not in name and (is_whole or "ternary" in name)]),
        "costs": costs.differences(costs.read()[-1]["costs"], costs.costs()) if "Q4_K" in beginnings else [],
        "extremes": extremes(types),
        "passes": passes.run(2, tuple(beginnings)),
    }


if __name__ == "__main__":
    gc.set_threshold(100_000, 20, 20)  # as in conftest.py
    print(json.dumps(computed(sys.argv[1].split(), [name for name in sys.argv[2].split(",") if name], "whole" in sys.argv[3:])))
