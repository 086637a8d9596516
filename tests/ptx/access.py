"""Instructions that load, store and copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .arithmetic import DTYPES
from .memory import Bytes, Fault
from .source import Address, Number, Operand, Register

if TYPE_CHECKING:
    from .machine import Block

At = Any  # the threads: a slice of all, or their numbers
Step = Callable[["Block", At], None]


def vector(operand: Operand) -> tuple[Operand, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def _give(block: Block, results: tuple[Operand, ...], dtype: np.dtype, at: At, values: list[NDArray]) -> None:
    """Puts loaded values into their registers."""
    for result, value in zip(results, values, strict=True):
        block.set(result, at, value.view(dtype))


def _bits(block: Block, sources: tuple[Operand, ...], dtype: np.dtype, at: At) -> list[NDArray]:
    """The values that a store writes."""
    return [np.asarray(block.get(source, dtype, at)).view(f"u{dtype.itemsize}") for source in sources]


def _undisturbed(block: Block, places: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The halves of words at these places of shared memory. Raises Fault if a place does not exist or a copy is on its way to it."""
    block.shared.check(places, size)
    halves = block.shared_watch.halves(places, size)
    if block.expected[halves].any():
        raise Fault("touched while a copy is on its way there")
    return halves


def load_param(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    result, address = operands
    assert isinstance(address, Address)
    assert isinstance(address.base, Number)
    number, dtype = address.base.value, DTYPES[parts[-1]]

    def load(block: Block, at: At) -> None:
        value = np.frombuffer(block.parameters[number], dtype, 1, address.offset)
        block.set(result, at, np.broadcast_to(value, block.threads[at].shape))

    return load


def load_global(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    results, dtype = vector(operands[0]), DTYPES[parts[-1]]
    size = dtype.itemsize * len(results)

    def load(block: Block, at: At) -> None:
        places, watch, threads = block.place(operands[1], at), block.device.watch, block.threads[at]
        values = block.device.memory.load(places, dtype.itemsize, len(results))
        early = ~block.waited[at]
        if early.any() and watch.may_be_written(places[early], size):
            raise Fault("read before the kernels that write it have been waited for")
        watch.reads(places, size, threads, block.fences.knows[threads])
        _give(block, results, dtype, at, values)

    return load


def prefetch(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    """A prefetch: it only refuses addresses that are not allocated."""
    return lambda block, at: block.device.memory.check(block.place(operands[0], at), 1)


def store_global(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    sources, dtype = vector(operands[1]), DTYPES[parts[-1]]

    def store(block: Block, at: At) -> None:
        places, threads = block.place(operands[0], at), block.threads[at]
        if not block.waited[at].all():
            raise Fault("written before the kernels that read it have been waited for")
        values = _bits(block, sources, dtype, at)
        before = block.device.memory.load(places, dtype.itemsize, len(values))
        # several blocks may write the same
        unchanged = np.logical_and.reduce([old == new for old, new in zip(before, values, strict=True)])
        block.device.memory.store(places, dtype.itemsize, values)
        block.device.watch.writes(places, dtype.itemsize * len(values), threads, block.fences.took_part | unchanged)
        block.fences.written(threads, block.device.watch.tick)

    return store


def load_shared(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    results, dtype = vector(operands[0]), DTYPES[parts[-1]]

    def load(block: Block, at: At) -> None:
        places = block.place(operands[1], at)
        values = block.shared.load(places, dtype.itemsize, len(results))
        _undisturbed(block, places, dtype.itemsize * len(results))
        block.shared_watch.reads(places, dtype.itemsize * len(results), block.threads[at])
        _give(block, results, dtype, at, values)

    return load


def store_shared(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    sources, dtype = vector(operands[1]), DTYPES[parts[-1]]

    def store(block: Block, at: At) -> None:
        places = block.place(operands[0], at)
        values = _bits(block, sources, dtype, at)
        _undisturbed(block, places, dtype.itemsize * len(values))
        block.shared.store(places, dtype.itemsize, values)
        block.shared_watch.writes(places, dtype.itemsize * len(values), block.threads[at])

    return store


def _local_places(block: Block, address: Operand, at: At, size: int) -> NDArray[np.int64]:
    places, room = block.place(address, at), block.kernel.local_bytes
    if len(places) and (places.min() < 0 or places.max() + size > room):
        raise Fault(f"beyond the {room} local bytes of a thread")
    return places + block.threads[at] * room


def load_local(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    results, dtype = vector(operands[0]), DTYPES[parts[-1]]

    def load(block: Block, at: At) -> None:
        places = _local_places(block, operands[1], at, dtype.itemsize * len(results))
        _give(block, results, dtype, at, block.local.load(places, dtype.itemsize, len(results)))

    return load


def store_local(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    sources, dtype = vector(operands[1]), DTYPES[parts[-1]]

    def store(block: Block, at: At) -> None:
        values = _bits(block, sources, dtype, at)
        block.local.store(_local_places(block, operands[0], at, dtype.itemsize * len(values)), dtype.itemsize, values)

    return store


def atomic(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    (space, operation, kind), (result, address, operand) = parts, operands
    dtype, combine = DTYPES[kind], {"add": np.add, "max": np.maximum}[operation]

    def change(block: Block, at: At) -> None:
        memory: Bytes = block.shared if space == "shared" else block.device.memory
        places = block.place(address, at)
        values = np.broadcast_to(block.get(operand, dtype, at), places.shape)
        old = np.empty(places.shape, dtype)
        if space == "shared":
            if block.shared_watch.written_in_this_tick(_undisturbed(block, places, dtype.itemsize)):
                raise Fault("an atomic operation where something was written with no barrier between")
        elif not block.waited[at].all():
            raise Fault("changed before the kernels that read it have been waited for")
        else:
            block.fences.atomic(block.threads[at], block.device.watch.tick)
        for i in block.device.rng.permutation(len(places)):  # in any order
            (before,) = memory.load(places[i : i + 1], dtype.itemsize, 1)
            old[i] = before.view(dtype)[0]
            memory.store(places[i : i + 1], dtype.itemsize, [combine(before.view(dtype), values[i : i + 1]).view(before.dtype)])
        if isinstance(result, Register):
            block.set(result, at, old)

    return change


# --- asynchronous copies ---


def copy(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    to, source, width, *counts = operands
    if width not in ((Number(16),) if parts[1] == "cg" else (Number(4), Number(8), Number(16))):
        raise ValueError(f"cp.async.{parts[1]} of {width}")
    size = width.value

    def ask(block: Block, at: At) -> None:
        threads, target, start = block.threads[at], block.place(to, at), block.place(source, at)
        count = np.broadcast_to(block.get(counts[0], DTYPES["u32"], at) if counts else size, threads.shape)
        if (target & size - 1).any() or (start & size - 1).any() or (count > size).any():
            raise Fault("a copy that is not aligned")
        if not block.waited[at].all() and block.device.watch.may_be_written(start, size):
            raise Fault("copied before the kernels that write it have been waited for")
        halves = _undisturbed(block, target, size)
        block.shared_watch.writes(target, size, threads)
        block.expected[halves] = True
        block.copies.issued.append((size, threads, target, start, count))

    return ask


def commit(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    def close(block: Block, at: At) -> None:
        if len(block.threads[at]) != block.count:
            raise Fault("not all threads of the block commit their copies together")  # as these kernels do
        block.copies.committed.append(block.copies.issued)
        block.copies.issued = []

    return close


def arrive(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    (pending,) = operands
    assert isinstance(pending, Number)

    def wait(block: Block, at: At) -> None:
        if len(block.threads[at]) != block.count:
            raise Fault("not all threads of the block wait for their copies together")  # as these kernels do
        while len(block.copies.committed) > pending.value:
            for size, threads, target, start, count in block.copies.committed.pop(0):
                whole = count > 0  # zeros arrive for bytes that are not copied
                words = np.zeros((size // 4, len(threads)), np.uint32)
                words[:, whole] = block.device.memory.load(start[whole], 4, size // 4)
                block.device.watch.reads(start[whole], size, threads[whole], block.fences.knows[threads[whole]])
                if (count[whole] != size).any():
                    raise Fault("a copy of a part")
                block.shared.store(target, 4, list(words))
                block.expected[block.shared_watch.halves(target, size)] = False
                block.shared_watch.writes(target, size, threads)

    return wait
