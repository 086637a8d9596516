"""The effect of instructions on a block: arithmetic here, memory in access.py, exchanges in a warp in lanes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import access, lanes
from .access import At, Step
from .arithmetic import DTYPES, rule
from .memory import Fault
from .source import Instruction, Operand

if TYPE_CHECKING:
    from .machine import Block


def step_of(instruction: Instruction) -> Step:
    """A function that takes an instruction for the threads that its guard lets through. Raises ValueError if it is not known."""
    take = _of(instruction)

    def step(block: Block, at: At) -> None:
        if instruction.guard is not None:
            at = block.guarded(instruction, at)
            if not len(at):
                return
        try:
            take(block, at)
        except Fault as fault:
            raise Fault(f"{block.kernel.name}, threads {block.threads[at][:4]}...: {instruction.text}: {fault}") from None

    return step


def _of(instruction: Instruction) -> Step:
    opcode, operands = instruction.opcode, instruction.operands
    parts = opcode.split(".")[1:]
    if known := rule(opcode):
        result, *sources = operands

        def work_out(block: Block, at: At) -> None:
            values = [block.get(source, dtype, at) for source, dtype in zip(sources, known.sources, strict=True)]
            block.set(result, at, np.asarray(known.function(*values), known.result))

        return work_out
    for prefix, made in _SPECIAL.items():
        if opcode.startswith(prefix):
            return made(operands, parts)
    raise ValueError(f"not known: {instruction.text}")


def _to_global(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    """cvta.to.global: addresses of global memory are generic addresses as they are."""
    result, source = operands
    return lambda block, at: block.set(result, at, np.asarray(block.get(source, DTYPES["s64"], at)))


_SPECIAL: dict[str, Callable[[tuple[Operand, ...], list[str]], Step]] = {
    "cvta.to.global": _to_global,
    "ld.param": access.load_param,
    **{f"ld.{space}": access.load for space in ("global", "shared")},
    **{f"st.{space}": access.store for space in ("global", "shared")},
    "atom": access.atomic,
    "shfl.sync.bfly.b32": lanes.butterfly,
    "mma": lanes.multiply_matrices,
}
