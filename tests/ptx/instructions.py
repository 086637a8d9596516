"""The effect of instructions on a block, for those of its threads that take them: `at`, a slice of all, or their numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .arithmetic import DTYPES, Rule, bytes_of, rule
from .memory import ATOMIC, READ, WRITE, Fault, Memory, Watch
from .source import Address, Instruction, Number, Operand, Register

if TYPE_CHECKING:
    from .machine import Block

At = Any
Step = Callable[["Block", At], None]
WARP = 32


def step_of(instruction: Instruction) -> Step:
    """A function that takes an instruction for the threads that its guard lets through. Raises ValueError if it is not known."""
    take = _of(instruction)

    def step(block: Block, at: At) -> None:
        at = block.guarded(instruction, at)
        if isinstance(at, np.ndarray) and not len(at):
            return
        try:
            take(block, at)
        except Fault as fault:
            raise Fault(f"threads {block.threads[at][:4]}...: {instruction.text}: {fault}") from None

    return step


def _of(instruction: Instruction) -> Step:
    opcode, operands = instruction.opcode, instruction.operands
    if known := rule(opcode):
        return partial(_work_out, operands, known)
    for prefix, take in _SPECIAL.items():
        if opcode.startswith(prefix):
            return partial(take, operands, opcode.split(".")[1:])
    raise ValueError(f"not known: {instruction.text}")


def _work_out(operands: tuple[Operand, ...], known: Rule, block: Block, at: At) -> None:
    values = [block.get(source, dtype, at) for source, dtype in zip(operands[1:], known.sources, strict=True)]
    block.set(operands[0], at, np.asarray(known.function(*values), known.result))


def _to_global(operands: tuple[Operand, ...], parts: list[str], block: Block, at: At) -> None:
    """Addresses of global memory are generic addresses as they are."""
    block.set(operands[0], at, np.asarray(block.get(operands[1], DTYPES["s64"], at)))


# --- memory ---------------------------------------------------------------------------------------------------------------------------


def _vector(operand: Operand) -> tuple[Operand, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def _memory(block: Block, space: str) -> tuple[Memory, Watch]:
    """The memory of a space, and what watches over it."""
    return (block.memory, block.watch) if space == "global" else (block.shared, block.shared_watch)


def _load_param(operands: tuple[Operand, ...], parts: list[str], block: Block, at: At) -> None:
    result, address = operands
    assert isinstance(address, Address)
    assert isinstance(address.base, Number)
    value = np.frombuffer(block.parameters[address.base.value], DTYPES[parts[-1]], 1, address.offset)
    block.set(result, at, np.broadcast_to(value, block.threads[at].shape))


def _load(operands: tuple[Operand, ...], parts: list[str], block: Block, at: At) -> None:
    results, dtype = _vector(operands[0]), DTYPES[parts[-1]]
    (memory, watch), places = _memory(block, parts[0]), block.place(operands[1], at)
    values = memory.load(places, dtype.itemsize, len(results))
    watch.touch(places, dtype.itemsize * len(results), block.threads[at], READ)
    for result, value in zip(results, values, strict=True):
        block.set(result, at, value.view(dtype))


def _store(operands: tuple[Operand, ...], parts: list[str], block: Block, at: At) -> None:
    sources, dtype = _vector(operands[1]), DTYPES[parts[-1]]
    (memory, watch), places = _memory(block, parts[0]), block.place(operands[0], at)
    memory.store(places, dtype.itemsize, [np.asarray(block.get(source, dtype, at)).view(f"u{dtype.itemsize}") for source in sources])
    watch.touch(places, dtype.itemsize * len(sources), block.threads[at], WRITE)


def _atomic(operands: tuple[Operand, ...], parts: list[str], block: Block, at: At) -> None:
    """An atomic operation on shared memory, which does not race with others of its kind."""
    (space, operation, kind), (result, address, operand) = parts, operands
    if space != "shared":
        raise ValueError(f"an atomic operation on {space} memory")
    dtype, combine = DTYPES[kind], {"add": np.add, "max": np.maximum}[operation]
    places = block.place(address, at)
    values = np.broadcast_to(block.get(operand, dtype, at), places.shape)
    block.shared_watch.touch(places, dtype.itemsize, block.threads[at], ATOMIC)
    old = block.shared.change(places, block.rng.permutation(len(places)), combine, values)  # in any order
    if isinstance(result, Register):
        block.set(result, at, old)


# --- what the lanes of a warp do together ---------------------------------------------------------------------------------------------


def _lanes(block: Block, operand: Operand, dtype: np.dtype, at: At) -> NDArray:
    """The values of an operand [warps, lanes]. Raises Fault unless the threads are whole warps."""
    threads = block.threads[at].reshape(-1)
    if len(threads) % WARP or (threads != (threads[::WARP, None] // WARP * WARP + np.arange(WARP)).reshape(-1)).any():
        raise Fault("not all lanes of a warp come here together")
    return np.broadcast_to(block.get(operand, dtype, at), threads.shape).reshape(-1, WARP)


def _butterfly(operands: tuple[Operand, ...], parts: list[str], block: Block, at: At) -> None:
    result, source, *others = operands
    distance, clamp, mask = (np.unique(block.get(each, DTYPES["u32"], at)) for each in others)
    if clamp.tolist() != [31] or mask.tolist() != [0xFFFFFFFF]:
        raise ValueError(f"shfl of lanes {mask} up to {clamp}, expected all of them")
    values, other = _lanes(block, source, DTYPES["u32"], at), np.arange(WARP) ^ distance.item()
    block.set(result, at, np.ascontiguousarray(values[:, other]).reshape(-1))


def _multiply_matrices(operands: tuple[Operand, ...], parts: list[str], block: Block, at: At) -> None:
    """mma.m16n8k32, u8 x s8: lane 4 g + t has, of A, rows g and g + 8, columns 4 t.. and 16 + 4 t..; of B, the same rows, column g; of C
    and D, rows g and g + 8, columns 2 t and 2 t + 1."""
    if parts != ["sync", "aligned", "m16n8k32", "row", "col", "s32", "u8", "s8", "s32"]:
        raise ValueError(f"mma.{'.'.join(parts)}")
    results, a, b, c = map(_vector, operands)

    def quads(registers: tuple[Operand, ...], dtype: np.dtype) -> NDArray:
        """[warps, g, t, number of the register]"""
        return np.stack([_lanes(block, each, dtype, at).reshape(-1, 8, 4) for each in registers], axis=-1)

    rows = bytes_of(quads(a, DTYPES["u32"]), np.uint8)  # [warps, g, t, 4, 4]
    columns = bytes_of(quads(b, DTYPES["u32"]), np.int8)  # [warps, g, t, 2, 4]
    matrix = np.concatenate([rows[:, :, :, [i, i + 2]].transpose(0, 1, 3, 2, 4).reshape(-1, 8, 32) for i in (0, 1)], axis=1)
    other = columns.transpose(0, 1, 3, 2, 4).reshape(-1, 8, 32)  # [warps, n, k]
    products = np.einsum("wmk,wnk->wmn", matrix, other).astype(np.int32)  # [warps, 16, 8]
    split = products.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(-1, 8, 4, 4)  # [warps, g, t, register]
    total = split + quads(c, DTYPES["s32"])
    for i, result in enumerate(results):
        block.set(result, at, np.ascontiguousarray(total[..., i]).reshape(-1))


_SPECIAL: dict[str, Callable[[tuple[Operand, ...], list[str], Block, At], None]] = {
    "cvta.to.global": _to_global,
    "ld.param": _load_param,
    **dict.fromkeys(("ld.global", "ld.shared"), _load),
    **dict.fromkeys(("st.global", "st.shared"), _store),
    "atom": _atomic,
    "shfl.sync.bfly.b32": _butterfly,
    "mma": _multiply_matrices,
}
