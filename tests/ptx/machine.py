"""Blocks of threads that run a kernel's instructions together.

All threads of a block that are at the same instruction take it at once; where they part, those that are behind go first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arithmetic import DTYPES, literal
from .instructions import WARP, At, Step, step_of
from .memory import Fault, Memory, Watch
from .source import Address, Instruction, Kernel, Label, Number, Operand, Register, Special

_EVERYONE = slice(None)
_PATIENCE = 10_000_000  # instructions of a block after which a loop counts as endless


@dataclass(frozen=True)
class Program:
    """A kernel as basic blocks of plain instructions, each with the instruction that ends it."""

    steps: tuple[tuple[Step, ...], ...]
    ends: tuple[Instruction | None, ...]
    targets: dict[str, int]  # label -> basic block


_ENDING = ("bra", "ret", "exit", "bar.sync", "bar.red.or.pred")


@cache
def program_of(kernel: Kernel) -> Program:
    listed = kernel.instructions
    ends = [i for i, instruction in enumerate(listed) if instruction.opcode.removesuffix(".uni") in _ENDING]
    starts = sorted({0, *kernel.labels.values(), *(i + 1 for i in ends)} - {len(listed)})
    steps, last = list[tuple[Step, ...]](), list[Instruction | None]()
    for start, stop in zip(starts, [*starts[1:], len(listed)], strict=True):
        inside = stop - 1 if stop - 1 in ends else stop
        steps.append(tuple(step_of(instruction) for instruction in listed[start:inside]))
        last.append(listed[inside] if inside < stop else None)
    blocks = {start: i for i, start in enumerate(starts)}
    targets = {label: blocks.get(at, len(starts)) for label, at in kernel.labels.items()}
    return Program(tuple(steps), tuple(last), targets)


class Registers(dict[Register, NDArray]):
    """The registers of a block, with a number for each thread."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.threads = threads

    def __missing__(self, register: Register) -> NDArray:
        return self.setdefault(register, np.zeros(self.threads, bool if register.bits == 1 else f"u{register.bits // 8}"))


class Block:
    """One block while it runs."""

    def __init__(
        self,
        memory: Memory,
        kernel: Kernel,
        grid: tuple[int, ...],
        place: tuple[int, ...],
        threads: int,
        parameters: list[bytes],
        rng: np.random.Generator,
    ) -> None:
        self.memory, self.program, self.count, self.rng = memory, program_of(kernel), threads, rng
        self.threads = np.arange(threads)
        self.parameters = parameters
        self.special = {
            f"{kind}.{axis}": value for kind, of in (("nctaid", grid), ("ctaid", place)) for axis, value in zip("xyz", of, strict=True)
        }
        self.special |= {"ntid.x": threads, "ntid.y": 1, "ntid.z": 1, "tid.y": 0, "tid.z": 0}
        self.registers = Registers(threads)
        self.shared = Memory(kernel.shared_bytes, 0)
        self.shared.allocate(kernel.shared_bytes)
        self.watch, self.shared_watch = Watch(), Watch()
        self.taken = 0

    # --- control ---

    def run(self) -> None:
        """Runs until all threads have ended."""
        program, finish = self.program, len(self.program.steps)
        at = np.zeros(self.count, np.int64)  # the next basic block of each thread
        waiting = np.zeros(self.count, bool)
        while True:
            ready = np.where(waiting, finish, at)
            behind = int(ready.min())
            if behind == finish:
                if not waiting.any():
                    self.shared_watch.barrier()
                    break
                self._meet(at, waiting)
                continue
            threads = np.flatnonzero(ready == behind)
            here: At = _EVERYONE if len(threads) == self.count else threads
            for step in program.steps[behind]:
                step(self, here)
            self.taken += len(program.steps[behind]) + 1
            if self.taken > _PATIENCE:
                raise Fault(f"no end after {self.taken} instructions")
            end = program.ends[behind]
            if end is None:
                at[here] = behind + 1
            else:
                self._end(end, behind, here, at, waiting)

    def _end(self, end: Instruction, behind: int, here: At, at: NDArray[np.int64], waiting: NDArray[np.bool_]) -> None:
        opcode = end.opcode.removesuffix(".uni")
        at[here] = behind + 1
        if opcode == "bra":
            (label,) = end.operands
            assert isinstance(label, Label)
            goes = self.guarded(end, here)
            at[goes] = self.program.targets[label.name]
        elif opcode in ("ret", "exit"):
            at[self.guarded(end, here)] = len(self.program.steps)
        elif end.guard:
            raise Fault(f"{end.text}: a barrier with a guard")
        else:
            at[here] = behind  # until all are here
            waiting[here] = True

    def _meet(self, at: NDArray[np.int64], waiting: NDArray[np.bool_]) -> None:
        """Lets all threads go on from their barrier. Raises Fault unless all of them wait there."""
        if not waiting.all() or (at != at[0]).any():
            raise Fault(f"threads {np.flatnonzero(~waiting | (at != at[0]))[:4]}... are not at the barrier where others wait")
        end = self.program.ends[at[0]]
        assert end is not None
        if end.opcode == "bar.red.or.pred":
            result, _, predicate = end.operands
            self.set(result, _EVERYONE, np.full(self.count, self.get(predicate, DTYPES["pred"], _EVERYONE).any()))
        at += 1
        waiting[:] = False
        self.watch.barrier()
        self.shared_watch.barrier()

    def guarded(self, instruction: Instruction, here: At) -> At:
        """The threads that the guard of an instruction lets through."""
        if instruction.guard is None:
            return here
        register, value = instruction.guard
        return self.threads[here][self.registers[register][here] == value]

    # --- operands ---

    def get(self, operand: Operand, dtype: np.dtype, at: At) -> Any:
        """The values of an operand for these threads: an array, or one number for all."""
        if isinstance(operand, Register):
            stored = self.registers[operand][at]
            if stored.dtype.itemsize > dtype.itemsize:  # the low part
                stored = stored.astype(f"u{dtype.itemsize}")
            return stored.view(dtype)
        if isinstance(operand, Number):
            return literal(operand.value, dtype)
        if isinstance(operand, Special):
            value = self.threads[at] if operand.name == "tid.x" else self.special.get(operand.name)
            if operand.name == "laneid":
                value = self.threads[at] % WARP
            return np.asarray(value).astype(dtype)
        raise Fault(f"{operand} has no value")

    def set(self, operand: Operand, at: At, value: NDArray) -> None:
        assert isinstance(operand, Register), operand
        stored = self.registers[operand]
        if value.dtype.itemsize == stored.dtype.itemsize:
            stored[at] = value.view(stored.dtype)
        elif value.dtype.itemsize < stored.dtype.itemsize:  # widened as its type says
            stored[at] = value.astype(f"{value.dtype.kind}{stored.dtype.itemsize}").view(stored.dtype)
        else:
            raise Fault(f"{value.dtype} into {operand}")

    def place(self, address: Operand, at: At) -> NDArray[np.int64]:
        """[threads]"""
        assert isinstance(address, Address)
        base = self.get(address.base, DTYPES["s64"], at) + address.offset
        return np.broadcast_to(base, self.threads[at].shape)
