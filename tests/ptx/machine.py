"""The device: blocks of threads that go through a kernel's instructions together.

All threads of a block that are at the same instruction take it at once; where they part, those that are behind go first. Blocks come one
after another, in an order drawn by lot: kernels may not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arithmetic import DTYPES, bytes_of, literal, rule
from .counts import Counts
from .memory import Bytes, Fault, Memory, Watch
from .source import Address, Instruction, Kernel, Label, Number, Operand, Register, Special

WARP = 32
_GENERIC = 1 << 40  # where shared memory is among generic addresses
_EVERYONE = slice(None)
_PATIENCE = 10_000_000  # instructions of a block: a loop without an end is found
At = Any  # which threads: a slice of all, or their numbers
Step = Callable[["Block", At], None]


class Device:
    """Memory, and kernels that run in it."""

    def __init__(self, seed: int = 0) -> None:
        self.memory = Memory()
        self.watch = Watch(self.memory)
        self.counts: Counts | None = None
        self._rng = np.random.default_rng(seed)

    def write(self, address: int, data: bytes) -> None:
        """As the host does."""
        self.memory.write(address, data)
        self.watch.forget(address, len(data))

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        parameters: list[bytes],
        dynamic_shared: int = 0,
        overlaps: bool = False,
    ) -> None:
        """Run all blocks to their ends. Raises Fault, with the instruction.

        One that `overlaps` begins before the launches before it have ended.
        """
        if block[1:] != (1, 1) or tuple(map(len, parameters)) != kernel.params or dynamic_shared:
            raise Fault(f"{kernel.name}: blocks of {block}, {len(parameters)} parameters: not as it was compiled")
        program = program_of(kernel)
        self.watch.launch = self.watch.tick = self.watch.tick + 1
        if not overlaps:
            self.watch.running = self.watch.launch
        for number in self._rng.permutation(grid[0] * grid[1] * grid[2]):
            place = int(number % grid[0]), int(number // grid[0] % grid[1]), int(number // grid[0] // grid[1])
            self.watch.block = self.watch.tick = self.watch.tick + 1
            with np.errstate(all="ignore"):
                Block(self, kernel, program, grid, place, block[0], parameters).run()


@dataclass(frozen=True)
class Program:
    """A kernel in steps: basic blocks of plain instructions, each with the one that ends it."""

    steps: tuple[tuple[Step, ...], ...]
    ends: tuple[Instruction | None, ...]
    starts: tuple[int, ...]  # of each basic block, the index of its first instruction
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
        steps.append(tuple(_step(instruction, registers) for instruction in listed[start:inside]))
        last.append(listed[inside] if inside < stop else None)
        for instruction in listed[start:stop]:
            for register in _registers(instruction):
                registers.setdefault(register, len(registers))
    blocks = {start: i for i, start in enumerate(starts)}
    targets = {label: blocks.get(at, len(starts)) for label, at in kernel.labels.items()}
    return Program(tuple(steps), tuple(last), tuple(starts), targets, registers)


def _registers(instruction: Instruction) -> set[Register]:
    found, open_ = set[Register](), list[Operand](instruction.operands)
    if instruction.guard:
        open_.append(instruction.guard[0])
    while open_:
        operand = open_.pop()
        if isinstance(operand, Register):
            found.add(operand)
        elif isinstance(operand, tuple):
            open_.extend(operand)
        elif isinstance(operand, Address):
            open_.append(operand.base)
    return found


@dataclass
class Copies:
    """What cp.async has been asked for: it arrives when it is waited for, and until then nobody may touch where it goes."""

    asked: list[tuple[NDArray, NDArray, NDArray, NDArray]] = field(default_factory=list)  # threads, to, from, bytes
    committed: list[list[tuple[NDArray, NDArray, NDArray, NDArray]]] = field(default_factory=list)


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
        self.shared.raw[:] = 0xFF  # NaN: what nobody wrote shows where it is used
        self.local = Bytes(kernel.local_bytes * threads)  # that of one thread after another's
        self.local.raw[:] = 0xFF
        self.expected = np.zeros(kernel.shared_bytes // 2 + 4, bool)  # halves of words that a copy is on its way to
        self.copies = Copies()
        self.waited = np.zeros(threads, bool)  # for the kernels before
        self.handed_over = False  # an atomic operation has told of other blocks
        self.taken = 0

    # --- control ---

    def run(self) -> None:
        """Until all threads have ended."""
        program, finish = self.program, len(self.program.steps)
        at = np.zeros(self.count, np.int64)  # the basic block that each thread is to take
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
        if self.copies.asked or any(self.copies.committed):
            raise Fault(f"{self.kernel.name}: copies that nobody waited for")
        if not self.waited.all():
            raise Fault(f"{self.kernel.name}: thread {int(np.argmin(self.waited))} never waited for the kernels before")

    def _end(self, end: Instruction, behind: int, here: At, at: NDArray[np.int64], waiting: NDArray[np.bool_]) -> None:
        opcode = end.opcode.removesuffix(".uni")
        at[here] = behind + 1
        if opcode == "bra":
            (label,) = end.operands
            assert isinstance(label, Label)
            goes = self._guarded(end, here)
            at[goes] = self.program.targets[label.name]
        elif opcode in ("ret", "exit"):
            at[self._guarded(end, here)] = len(self.program.steps)
        elif end.guard:
            raise Fault(f"{self.kernel.name}: {end.text}: a barrier with a guard")
        else:
            at[here] = behind  # until all are here
            waiting[here] = True

    def _meet(self, at: NDArray[np.int64], waiting: NDArray[np.bool_]) -> None:
        """All threads wait: let them go."""
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
                result, _, given = end.operands
                self.set(result, _EVERYONE, np.full(self.count, self.get(given, DTYPES["pred"], _EVERYONE).any()))
        at += 1
        waiting[:] = False
        self.shared_watch.tick += 1
        self.device.watch.tick += 1

    def _guarded(self, instruction: Instruction, here: At) -> At:
        """Those of these threads whose guard says so."""
        if instruction.guard is None:
            return here
        register, wanted = instruction.guard
        return self.threads[here][self.registers[self.program.registers[register]][here] == wanted]

    # --- operands ---

    def get(self, operand: Operand, dtype: np.dtype, at: At) -> Any:
        """What these threads have there: an array, or one number for all."""
        if isinstance(operand, Register):
            stored = self.registers[self.program.registers[operand]][at]
            if stored.dtype.itemsize > dtype.itemsize:  # the low part
                stored = stored.astype(f"u{dtype.itemsize}")
            return stored.view(dtype)
        if isinstance(operand, Number):
            return literal(operand.value, dtype)
        if isinstance(operand, Special):
            given = self.threads[at] if operand.name == "tid.x" else self.special.get(operand.name)
            if operand.name == "laneid":
                given = self.threads[at] % WARP
            return np.asarray(given).astype(dtype)
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


# --- instructions ---------------------------------------------------------------------------------------------------------------------


def _step(instruction: Instruction, registers: dict[Register, int]) -> Step:
    take = _of(instruction)

    def step(block: Block, at: At) -> None:
        if instruction.guard is not None:
            at = block._guarded(instruction, at)
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
        counts.sectors(text, threads, block.place(places[1], at), 16)
    elif parts[0] in ("ld", "st") and parts[1] != "param":
        size = DTYPES[parts[-1]].itemsize * max(len(_vector(operand)) for operand in instruction.operands)
        (counts.shared if parts[1] == "shared" else counts.sectors)(text, threads, block.place(places[0], at), size)


def _of(instruction: Instruction) -> Step:
    """What an instruction does."""
    opcode, operands = instruction.opcode, instruction.operands
    name, *parts = opcode.split(".")
    if name == "mov" and isinstance(operands[0], tuple):
        return _unpack(operands, DTYPES[parts[-1]])
    if found := rule(opcode):
        result, *sources = operands

        def work_out(block: Block, at: At) -> None:
            values = [block.get(source, dtype, at) for source, dtype in zip(sources, found.sources, strict=True)]
            block.set(result, at, np.asarray(found.function(*values), found.result))

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
    """cvta: the device's addresses are generic ones as they are, those of shared memory in a window of their own."""
    result, source = operands
    moved = {("shared",): _GENERIC, ("to", "shared"): -_GENERIC}.get(tuple(parts[:-1]), 0)

    def convert(block: Block, at: At) -> None:
        block.set(result, at, np.asarray(block.get(source, DTYPES["s64"], at) + moved))

    return convert


def _vector(operand: Operand) -> tuple[Operand, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def _load_param(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    result, address = operands
    assert isinstance(address, Address)
    assert isinstance(address.base, Number)
    number, dtype = address.base.value, DTYPES[parts[-1]]

    def load(block: Block, at: At) -> None:
        value = np.frombuffer(block.parameters[number], dtype, 1, address.offset)
        block.set(result, at, np.broadcast_to(value, block.threads[at].shape))

    return load


def _load_global(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    results, dtype = _vector(operands[0]), DTYPES[parts[-1]]
    size = dtype.itemsize * len(results)

    def load(block: Block, at: At) -> None:
        places, watch, threads = block.place(operands[1], at), block.device.watch, block.threads[at]
        values = block.device.memory.load(places, dtype.itemsize, len(results))
        early = ~block.waited[at]
        if early.any() and watch.may_be_written(places[early], size):
            raise Fault("read before the kernels that write it have been waited for")
        watch.reads(places, size, threads, block.handed_over)
        for result, value in zip(results, values, strict=True):
            block.set(result, at, value.view(dtype))

    return load


def _prefetch(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    """Nothing comes of it, but nobody should ask for what is not there."""
    return lambda block, at: block.device.memory.check(block.place(operands[0], at), 1)


def _store_global(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    sources, dtype = _vector(operands[1]), DTYPES[parts[-1]]

    def store(block: Block, at: At) -> None:
        places, threads = block.place(operands[0], at), block.threads[at]
        if not block.waited[at].all():
            raise Fault("written before the kernels that read it have been waited for")
        values = [np.asarray(block.get(source, dtype, at)).view(f"u{dtype.itemsize}") for source in sources]
        before = block.device.memory.load(places, dtype.itemsize, len(values))
        unchanged = np.logical_and.reduce(
            [old == new for old, new in zip(before, values, strict=True)]
        )  # several blocks may write the same
        block.device.memory.store(places, dtype.itemsize, values)
        block.device.watch.writes(places, dtype.itemsize * len(values), threads, block.handed_over | unchanged)

    return store


def _load_shared(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    results, dtype = _vector(operands[0]), DTYPES[parts[-1]]

    def load(block: Block, at: At) -> None:
        places = block.place(operands[1], at)
        values = block.shared.load(places, dtype.itemsize, len(results))
        halves = block.shared_watch.halves(places, dtype.itemsize * len(results))
        if block.expected[halves].any():
            raise Fault("read while a copy is on its way there")
        block.shared_watch.reads(places, dtype.itemsize * len(results), block.threads[at])
        for result, value in zip(results, values, strict=True):
            block.set(result, at, value.view(dtype))

    return load


def _store_shared(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    sources, dtype = _vector(operands[1]), DTYPES[parts[-1]]

    def store(block: Block, at: At) -> None:
        places = block.place(operands[0], at)
        values = [np.asarray(block.get(source, dtype, at)).view(f"u{dtype.itemsize}") for source in sources]
        block.shared.store(places, dtype.itemsize, values)
        _fill(block, places, dtype.itemsize * len(values), block.threads[at])

    return store


def _fill(block: Block, places: NDArray[np.int64], size: int, threads: NDArray[np.int64]) -> None:
    halves = block.shared_watch.halves(places, size)
    if block.expected[halves].any():
        raise Fault("written while a copy is on its way there")
    block.shared_watch.writes(places, size, threads)


def _local_places(block: Block, address: Operand, at: At, size: int) -> NDArray[np.int64]:
    places, room = block.place(address, at), block.kernel.local_bytes
    if len(places) and (places.min() < 0 or places.max() + size > room):
        raise Fault(f"beyond the {room} local bytes of a thread")
    return places + block.threads[at] * room


def _load_local(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    results, dtype = _vector(operands[0]), DTYPES[parts[-1]]

    def load(block: Block, at: At) -> None:
        places = _local_places(block, operands[1], at, dtype.itemsize * len(results))
        for result, value in zip(results, block.local.load(places, dtype.itemsize, len(results)), strict=True):
            block.set(result, at, value.view(dtype))

    return load


def _store_local(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    sources, dtype = _vector(operands[1]), DTYPES[parts[-1]]

    def store(block: Block, at: At) -> None:
        values = [np.asarray(block.get(source, dtype, at)).view(f"u{dtype.itemsize}") for source in sources]
        block.local.store(_local_places(block, operands[0], at, dtype.itemsize * len(values)), dtype.itemsize, values)

    return store


def _atomic(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    (space, operation, kind), (result, address, given) = parts, operands
    dtype, combine = DTYPES[kind], {"add": np.add, "max": np.maximum}[operation]

    def change(block: Block, at: At) -> None:
        memory: Bytes = block.shared if space == "shared" else block.device.memory
        places = block.place(address, at)
        values = np.broadcast_to(block.get(given, dtype, at), places.shape)
        old = np.empty(places.shape, dtype)
        if space == "shared":
            halves = block.shared_watch.halves(places, dtype.itemsize)
            marks = block.shared_watch._written[halves]
            if (marks // Watch.THREADS == block.shared_watch.tick).any():
                raise Fault("an atomic operation where something was written with no barrier between")
            if block.expected[halves].any():
                raise Fault("an atomic operation while a copy is on its way there")
        elif not block.waited[at].all():
            raise Fault("changed before the kernels that read it have been waited for")
        else:
            block.handed_over = True
        for i in block.device._rng.permutation(len(places)):  # in any order
            (before,) = memory.load(places[i : i + 1], dtype.itemsize, 1)
            old[i] = before.view(dtype)[0]
            memory.store(places[i : i + 1], dtype.itemsize, [combine(before.view(dtype), values[i : i + 1]).view(before.dtype)])
        if isinstance(result, Register):
            block.set(result, at, old)

    return change


# --- copies that go on while threads do ---


def _copy(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    to, source, size, *given = operands
    if size != Number(16):
        raise ValueError(f"cp.async of {size}")

    def ask(block: Block, at: At) -> None:
        threads, there, start = block.threads[at], block.place(to, at), block.place(source, at)
        count = np.broadcast_to(block.get(given[0], DTYPES["u32"], at) if given else 16, threads.shape)
        if (there & 15).any() or (start & 15).any() or (count > 16).any():
            raise Fault("a copy that is not aligned")
        if not block.waited[at].all() and block.device.watch.may_be_written(start, 16):
            raise Fault("copied before the kernels that write it have been waited for")
        block.shared.check(there, 16)
        halves = block.shared_watch.halves(there, 16)
        if block.expected[halves].any():
            raise Fault("a copy where another is on its way to")
        block.shared_watch.writes(there, 16, threads)
        block.expected[halves] = True
        block.copies.asked.append((threads, there, start, count))

    return ask


def _commit(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    def commit(block: Block, at: At) -> None:
        if len(block.threads[at]) != block.count:
            raise Fault("not all threads of the block commit their copies together")  # as these kernels do
        block.copies.committed.append(block.copies.asked)
        block.copies.asked = []

    return commit


def _arrive(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    (pending,) = operands
    assert isinstance(pending, Number)

    def arrive(block: Block, at: At) -> None:
        if len(block.threads[at]) != block.count:
            raise Fault("not all threads of the block wait for their copies together")  # as these kernels do
        while len(block.copies.committed) > pending.value:
            for threads, there, start, count in block.copies.committed.pop(0):
                whole = count > 0  # of what is not copied, zeros come
                rows = np.zeros((len(threads), 2), np.uint64)
                rows[whole] = np.stack(block.device.memory.load(start[whole], 8, 2), axis=1)
                block.device.watch.reads(start[whole], 16, threads[whole], block.handed_over)
                if (count[whole] != 16).any():
                    raise Fault("a copy of a part")
                block.shared.store(there, 8, [rows[:, 0], rows[:, 1]])
                halves = block.shared_watch.halves(there, 16)
                block.expected[halves] = False
                block.shared_watch.writes(there, 16, threads)

    return arrive


# --- lanes of a warp ---


def _warps(block: Block, at: At) -> int:
    """Warps that these threads are. Raises Fault unless they are whole ones."""
    threads = block.threads[at].reshape(-1)
    if (
        len(threads) % WARP
        or (threads.reshape(-1, WARP) != threads[::WARP, None] + np.arange(WARP)).any()
        or (threads[::WARP] % WARP).any()
    ):
        raise Fault("not all lanes of a warp come here together")
    return len(threads) // WARP


def _lanes(block: Block, operand: Operand, dtype: np.dtype, at: At) -> NDArray:
    """[warps, lanes]"""
    values = np.broadcast_to(block.get(operand, dtype, at), block.threads[at].shape)
    return values.reshape(_warps(block, at), WARP)


def _check_mask(mask: Operand) -> None:
    if not isinstance(mask, Number) or mask.value & 0xFFFFFFFF != 0xFFFFFFFF:
        raise ValueError(f"lanes {mask}, expected all of them")


def _butterfly(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    result, source, distance, clamp, mask = operands
    _check_mask(mask)
    if clamp != Number(31):
        raise ValueError(f"shfl with {clamp}")

    def exchange(block: Block, at: At) -> None:
        values = _lanes(block, source, DTYPES["u32"], at)
        other = np.arange(WARP) ^ np.int64(block.get(distance, DTYPES["u32"], at))
        block.set(result, at, np.ascontiguousarray(values[:, other]).reshape(-1))

    return exchange


def _reduce(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    result, source, mask = operands
    _check_mask(mask)
    operation = {"add": lambda x: x.sum(1, dtype=np.int32), "max": lambda x: x.max(1)}[parts[1]]

    def reduce(block: Block, at: At) -> None:
        block.set(result, at, np.repeat(operation(_lanes(block, source, DTYPES["s32"], at)), WARP))

    return reduce


def _multiply_matrices(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    """mma.m16n8k32, u8 x s8: lane 4 g + t has, of A, rows g and g + 8, columns 4 t.. and 16 + 4 t..; of B, the same rows, column g; of C
    and D, rows g and g + 8, columns 2 t and 2 t + 1."""
    if parts != ["sync", "aligned", "m16n8k32", "row", "col", "s32", "u8", "s8", "s32"]:
        raise ValueError(f"mma.{'.'.join(parts)}")
    results, a, b, c = operands
    assert all(isinstance(each, tuple) for each in operands)

    def multiply(block: Block, at: At) -> None:
        warps = _warps(block, at)

        def quads(vector: Operand, dtype: np.dtype) -> NDArray:
            """[warps, g, t, number of the register]"""
            return np.stack([_lanes(block, each, dtype, at).reshape(warps, 8, 4) for each in _vector(vector)], axis=-1)

        rows = bytes_of(quads(a, DTYPES["u32"]), np.uint8)  # [warps, g, t, 4, 4]
        columns = bytes_of(quads(b, DTYPES["u32"]), np.int8)  # [warps, g, t, 2, 4]
        matrix = np.concatenate([rows[:, :, :, [i, i + 2]].transpose(0, 1, 3, 2, 4).reshape(warps, 8, 32) for i in (0, 1)], axis=1)
        other = columns.transpose(0, 1, 3, 2, 4).reshape(warps, 8, 32)  # [warps, n, k]
        products = np.einsum("wmk,wnk->wmn", matrix, other).astype(np.int32)  # [warps, 16, 8]
        split = products.reshape(warps, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(warps, 8, 4, 4)  # [warps, g, t, register]
        total = split + quads(c, DTYPES["s32"])
        for i, result in enumerate(_vector(results)):
            block.set(result, at, np.ascontiguousarray(total[..., i]).reshape(-1))

    return multiply


# --- order ---


def _wait(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    def wait(block: Block, at: At) -> None:
        block.waited[at] = True

    return wait


_SPECIAL: dict[str, Callable[[tuple[Operand, ...], list[str]], Step]] = {
    "cvta": _address_space,
    "ld.param": _load_param,
    "ld.global": _load_global,
    "st.global": _store_global,
    "ld.shared": _load_shared,
    "st.shared": _store_shared,
    "ld.local": _load_local,
    "st.local": _store_local,
    "atom": _atomic,
    "cp.async.cg.shared.global": _copy,
    "cp.async.commit_group": _commit,
    "cp.async.wait_group": _arrive,
    "shfl.sync.bfly.b32": _butterfly,
    "redux.sync": _reduce,
    "mma": _multiply_matrices,
    "griddepcontrol.wait": _wait,
    "griddepcontrol.launch_dependents": _nothing,
    "prefetch.global.L2": _prefetch,
    "membar.gl": _nothing,
}
