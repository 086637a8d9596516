"""Instructions that load and store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import DTYPES
from .memory import Bytes, Watch
from .source import Address, Number, Operand, Register

if TYPE_CHECKING:
    from .machine import Block

At = Any  # the threads: a slice of all, or their numbers
Step = Callable[["Block", At], None]


def vector(operand: Operand) -> tuple[Operand, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def load_param(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    result, address = operands
    assert isinstance(address, Address)
    assert isinstance(address.base, Number)
    number, dtype = address.base.value, DTYPES[parts[-1]]

    def load(block: Block, at: At) -> None:
        value = np.frombuffer(block.parameters[number], dtype, 1, address.offset)
        block.set(result, at, np.broadcast_to(value, block.threads[at].shape))

    return load


def _memory(block: Block, space: str) -> tuple[Bytes, Watch]:
    """The memory of a space, and what watches over it."""
    return (block.device.memory, block.device.watch) if space == "global" else (block.shared, block.shared_watch)


def load(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    results, space, dtype = vector(operands[0]), parts[0], DTYPES[parts[-1]]
    size = dtype.itemsize * len(results)

    def load(block: Block, at: At) -> None:
        (memory, watch), places = _memory(block, space), block.place(operands[1], at)
        values = memory.load(places, dtype.itemsize, len(results))
        watch.reads(places, size, block.threads[at])
        for result, value in zip(results, values, strict=True):
            block.set(result, at, value.view(dtype))

    return load


def store(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    sources, space, dtype = vector(operands[1]), parts[0], DTYPES[parts[-1]]
    size = dtype.itemsize * len(sources)

    def store(block: Block, at: At) -> None:
        (memory, watch), places = _memory(block, space), block.place(operands[0], at)
        values = [np.asarray(block.get(source, dtype, at)).view(f"u{dtype.itemsize}") for source in sources]
        memory.store(places, dtype.itemsize, values)
        watch.writes(places, size, block.threads[at])

    return store


def atomic(operands: tuple[Operand, ...], parts: list[str]) -> Step:
    """An atomic operation on shared memory, which does not race with others of its kind."""
    (space, operation, kind), (result, address, operand) = parts, operands
    if space != "shared":
        raise ValueError(f"an atomic operation on {space} memory")
    dtype, combine = DTYPES[kind], {"add": np.add, "max": np.maximum}[operation]

    def change(block: Block, at: At) -> None:
        places = block.place(address, at)
        values = np.broadcast_to(block.get(operand, dtype, at), places.shape)
        old = np.empty(places.shape, dtype)
        block.shared.check(places, dtype.itemsize)
        block.shared_watch.changes(places, dtype.itemsize)
        for i in block.device.rng.permutation(len(places)):  # in any order
            (before,) = block.shared.load(places[i : i + 1], dtype.itemsize, 1)
            old[i] = before.view(dtype)[0]
            block.shared.store(places[i : i + 1], dtype.itemsize, [combine(before.view(dtype), values[i : i + 1]).view(before.dtype)])
        if isinstance(result, Register):
            block.set(result, at, old)

    return change
