"""The effect of instructions on a block: arithmetic here, memory in access.py, exchanges in a warp in lanes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import access, lanes, warpgroups
from .access import At, Step, vector
from .arithmetic import DTYPES, rule
from .counts import Counts
from .memory import Fault
from .source import Address, Instruction, Label, Number, Operand

if TYPE_CHECKING:
    from .machine import Block

_GENERIC = 1 << 40  # the generic address of shared memory


def step_of(instruction: Instruction) -> Step:
    """A function that takes an instruction for the threads that its guard lets through. Raises ValueError if it is not known."""
    take = _of(instruction)

    def step(block: Block, at: At) -> None:
        if instruction.guard is not None:
            at = block.guarded(instruction, at)
            if not len(at):
                return
        if block.device.counts is not None:
            _count(block.device.counts, block, instruction, at)
        try:
            take(block, at)
        except Fault as fault:
            raise Fault(f"{block.kernel.name}, threads {block.threads[at][:4]}...: {instruction.text}: {fault}") from None

    return step


def _count(counts: Counts, block: Block, instruction: Instruction, at: At) -> None:
    text, threads, parts = instruction.text, block.threads[at], instruction.opcode.split(".")
    counts.add(text, threads)
    places = [operand for operand in instruction.operands if isinstance(operand, Address)]
    if parts[0] == "cp" and places:
        size = instruction.operands[2]
        assert isinstance(size, Number)
        counts.sectors(text, threads, block.place(places[1], at), size.value)
    elif parts[0] in ("ld", "st") and parts[1] != "param":
        size = DTYPES[parts[-1]].itemsize * max(len(vector(operand)) for operand in instruction.operands)
        (counts.shared if parts[1] == "shared" else counts.sectors)(text, threads, block.place(places[0], at), size)


def _of(instruction: Instruction) -> Step:
    opcode, operands = instruction.opcode, instruction.operands
    name, *parts = opcode.split(".")
    if name == "mov" and isinstance(operands[0], tuple):
        return _unpack(operands, DTYPES[parts[-1]])
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


def _unpack(operands: tuple[Operand, ...], dtype: np.dtype) -> Step:
    """mov.b32 {low, high}, whole"""
    halves, whole = operands
    assert isinstance(halves, tuple)
    part = np.dtype(f"u{dtype.itemsize // len(halves)}")

    def unpack(block: Block, at: At) -> None:
        pieces = np.ascontiguousarray(np.broadcast_to(block.get(whole, dtype, at), block.threads[at].shape)).view(part)
        for i, half in enumerate(halves):
            if half != Label("_"):
                block.set(half, at, pieces[i :: len(halves)])

    return unpack


def _nothing(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    return lambda block, at: None


def _address_space(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    """cvta: addresses of global memory are generic addresses as they are; shared memory has a window of its own."""
    result, source = operands
    moved = {("shared",): _GENERIC, ("to", "shared"): -_GENERIC}.get(tuple(parts[:-1]), 0)

    def convert(block: Block, at: At) -> None:
        block.set(result, at, np.asarray(block.get(source, DTYPES["s64"], at) + moved))

    return convert


def _wait(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    def wait(block: Block, at: At) -> None:
        block.waited[at] = True

    return wait


def _fence(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    return lambda block, at: block.fences.fence(block.threads[at], block.device.watch.tick)


_SPECIAL: dict[str, Callable[[tuple[Operand, ...], list[str]], Step]] = {
    "cvta": _address_space,
    "ld.param": access.load_param,
    "ld.global": access.load_global,
    "st.global": access.store_global,
    "ld.shared": access.load_shared,
    "st.shared": access.store_shared,
    "ld.local": access.load_local,
    "st.local": access.store_local,
    "atom": access.atomic,
    "cp.async.cg.shared.global": access.copy,
    "cp.async.commit_group": access.commit,
    "cp.async.wait_group": access.arrive,
    "shfl.sync.bfly.b32": lanes.butterfly,
    "redux.sync": lanes.reduce,
    "mma": lanes.multiply_matrices,
    "griddepcontrol.wait": _wait,
    "griddepcontrol.launch_dependents": _nothing,
    "prefetch.global.L2": access.prefetch,
    "membar.gl": _fence,
    "cp.async.ca.shared.global": access.copy,
    "fence.proxy": warpgroups.show,
    "wgmma.fence": warpgroups.fence,
    "wgmma.mma_async": warpgroups.multiply,
    "wgmma.commit_group": warpgroups.commit,
    "wgmma.wait_group": warpgroups.arrive,
}
