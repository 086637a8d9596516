"""The device: blocks of threads that run a kernel's instructions together.

All threads of a block that are at the same instruction take it at once; where they part, those that are behind go first. Blocks run one
after another, in a random order: kernels may not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .access import At, Step
from .arithmetic import DTYPES, literal
from .lanes import WARP
from .memory import Bytes, Fault, Memory, Watch
from .source import Address, Instruction, Kernel, Label, Number, Operand, Register, Special
from .steps import step_of

_EVERYONE = slice(None)
_PATIENCE = 10_000_000  # instructions of a block after which a loop counts as endless


class Device:
    """The device: its memory, and kernels that run in it."""

    def __init__(self, seed: int = 0) -> None:
        self.memory = Memory()
        self.watch = Watch(self.memory)
        self.rng = np.random.default_rng(seed)

    def write(self, address: int, data: bytes) -> None:
        """Writes as the host does."""
        self.memory.write(address, data)
        self.watch.forget(address, len(data))

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        parameters: list[bytes],
        dynamic_shared: int = 0,
    ) -> None:
        """Runs all blocks to their ends. Raises Fault, with the instruction."""
        if block[1:] != (1, 1) or tuple(map(len, parameters)) != kernel.params or dynamic_shared:
            raise Fault(f"{kernel.name}: blocks of {block}, {len(parameters)} parameters: not as it was compiled")
        program = program_of(kernel)
        self.watch.launch = self.watch.tick = self.watch.tick + 1
        for number in self.rng.permutation(grid[0] * grid[1] * grid[2]):
            place = int(number % grid[0]), int(number // grid[0] % grid[1]), int(number // grid[0] // grid[1])
            self.watch.block = self.watch.tick = self.watch.tick + 1
            with np.errstate(all="ignore"):
                Block(self, kernel, program, grid, place, block[0], parameters).run()


@dataclass(frozen=True)
class Program:
    """A kernel as basic blocks of plain instructions, each with the instruction that ends it."""

    steps: tuple[tuple[Step, ...], ...]
    ends: tuple[Instruction | None, ...]
    targets: dict[str, int]  # label -> basic block
    registers: dict[Register, int]


_ENDING = ("bra", "ret", "exit", "bar.sync", "bar.red.or.pred")


@cache
def program_of(kernel: Kernel) -> Program:
    listed = kernel.instructions
    ends = [i for i, instruction in enumerate(listed) if instruction.opcode.removesuffix(".uni") in _ENDING]
    starts = sorted({0, *kernel.labels.values(), *(i + 1 for i in ends)} - {len(listed)})
    registers: dict[Register, int] = {}
    steps, last = list[tuple[Step, ...]](), list[Instruction | None]()
    for start, stop in zip(starts, [*starts[1:], len(listed)], strict=True):
        inside = stop - 1 if stop - 1 in ends else stop
        steps.append(tuple(step_of(instruction) for instruction in listed[start:inside]))
        last.append(listed[inside] if inside < stop else None)
        for instruction in listed[start:stop]:
            for register in _registers(instruction):
                registers.setdefault(register, len(registers))
    blocks = {start: i for i, start in enumerate(starts)}
    targets = {label: blocks.get(at, len(starts)) for label, at in kernel.labels.items()}
    return Program(tuple(steps), tuple(last), targets, registers)


def _registers(instruction: Instruction) -> set[Register]:
    registers, waiting = set[Register](), list[Operand](instruction.operands)
    if instruction.guard:
        waiting.append(instruction.guard[0])
    while waiting:
        operand = waiting.pop()
        if isinstance(operand, Register):
            registers.add(operand)
        elif isinstance(operand, tuple):
            waiting.extend(operand)
        elif isinstance(operand, Address):
            waiting.append(operand.base)
    return registers


class Block:
    """One block while it runs."""

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        program: Program,
        grid: tuple[int, int, int],
        place: tuple[int, int, int],
        threads: int,
        parameters: list[bytes],
    ) -> None:
        self.device, self.kernel, self.program, self.count = device, kernel, program, threads
        self.threads = np.arange(threads)
        self.parameters = parameters
        self.special = {
            f"{kind}.{axis}": value for kind, of in (("nctaid", grid), ("ctaid", place)) for axis, value in zip("xyz", of, strict=True)
        }
        self.special |= {"ntid.x": threads, "ntid.y": 1, "ntid.z": 1, "tid.y": 0, "tid.z": 0}
        self.registers: list[NDArray] = [np.zeros(threads, bool if r.bits == 1 else f"u{r.bits // 8}") for r in program.registers]
        self.shared = Bytes(kernel.shared_bytes)
        self.shared_watch = Watch(self.shared)
        self.shared.raw[:] = 0xFF  # NaN, so that the use of an unwritten number shows
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
                    break
                self._meet(at, waiting)
                continue
            threads = np.flatnonzero(ready == behind)
            here: At = _EVERYONE if len(threads) == self.count else threads
            for step in program.steps[behind]:
                step(self, here)
            self.taken += len(program.steps[behind]) + 1
            if self.taken > _PATIENCE:
                raise Fault(f"{self.kernel.name}: no end after {self.taken} instructions")
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
            raise Fault(f"{self.kernel.name}: {end.text}: a barrier with a guard")
        else:
            at[here] = behind  # until all are here
            waiting[here] = True

    def _meet(self, at: NDArray[np.int64], waiting: NDArray[np.bool_]) -> None:
        """Lets all threads go on from their barrier. Raises Fault unless all of them wait there."""
        if not waiting.all():
            raise Fault(f"{self.kernel.name}: thread {int(np.argmin(waiting))} has ended, and others wait for it at a barrier")
        warps = np.split(at, range(WARP, self.count, WARP))
        if any((warp != warp[0]).any() for warp in warps):
            raise Fault(f"{self.kernel.name}: lanes of a warp wait at different barriers")
        for number in np.unique(at):
            end = self.program.ends[number]
            if end is not None and end.opcode == "bar.red.or.pred":
                if (at != number).any():
                    raise Fault(f"{self.kernel.name}: threads meet at different barriers, and are to give each other something")
                result, _, predicate = end.operands
                self.set(result, _EVERYONE, np.full(self.count, self.get(predicate, DTYPES["pred"], _EVERYONE).any()))
        at += 1
        waiting[:] = False
        self.shared_watch.tick += 1
        self.device.watch.tick += 1

    def guarded(self, instruction: Instruction, here: At) -> At:
        """The threads that the guard of an instruction lets through."""
        if instruction.guard is None:
            return here
        register, value = instruction.guard
        return self.threads[here][self.registers[self.program.registers[register]][here] == value]

    # --- operands ---

    def get(self, operand: Operand, dtype: np.dtype, at: At) -> Any:
        """The values of an operand for these threads: an array, or one number for all."""
        if isinstance(operand, Register):
            stored = self.registers[self.program.registers[operand]][at]
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
        raise Fault(f"{self.kernel.name}: {operand} has no value")

    def set(self, operand: Operand, at: At, value: NDArray) -> None:
        assert isinstance(operand, Register), operand
        stored = self.registers[self.program.registers[operand]]
        if value.dtype.itemsize == stored.dtype.itemsize:
            stored[at] = value.view(stored.dtype)
        elif value.dtype.itemsize < stored.dtype.itemsize:  # widened as its type says
            stored[at] = value.astype(f"{value.dtype.kind}{stored.dtype.itemsize}").view(stored.dtype)
        else:
            raise Fault(f"{self.kernel.name}: {value.dtype} into {operand}")

    def place(self, address: Operand, at: At) -> NDArray[np.int64]:
        """[threads]"""
        assert isinstance(address, Address)
        base = self.get(address.base, DTYPES["s64"], at) + address.offset
        return np.broadcast_to(base, self.threads[at].shape)
