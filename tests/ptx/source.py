"""The text of PTX as kernels: their instructions in order, with names resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Register:
    name: str
    bits: int  # 1 for a predicate


@dataclass(frozen=True)
class Special:
    """A special register, as %tid.x."""

    name: str


@dataclass(frozen=True)
class Number:
    """A literal: an integer, or the bits of a float."""

    value: int


@dataclass(frozen=True)
class Address:
    base: Operand
    offset: int


@dataclass(frozen=True)
class Label:
    name: str


Operand = Register | Special | Number | Address | Label | tuple["Operand", ...]


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None  # the predicate, and its required value
    text: str


@dataclass(frozen=True, eq=False)
class Kernel:
    params: tuple[int, ...]  # bytes of each
    shared_bytes: int
    threads: int  # of a block, at most
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # label -> index of the instruction that follows


WIDTHS = {"pred": 1} | {f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64)}
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
_ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\(([^)]*)\)\s*(?:\.maxntid\s+(\d+))?[^{;]*\{")
_DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+%?([\w$]+)(?:<(\d+)>)?")
_STATEMENT = re.compile(r"\s*(?:([\w$]+):(?!:)|([{}])|([^;{}]*(?:\{[^}]*\}[^;{}]*)*);)", re.DOTALL)


@cache
def parse(text: str) -> Kernel:
    """The one kernel of a text. Raises ValueError, with the statement, for an unknown statement."""
    text = re.sub(r"//[^\n]*", "", text)
    shared, end = dict[str, int](), 0
    for alignment, name, size in _SHARED.findall(text):
        start = -(-end // int(alignment)) * int(alignment)
        shared[name], end = start, start + int(size)
    (entry,) = _ENTRY.finditer(text)
    params = re.findall(r"\.param\s+\.(\w+)\s+([\w$]+)", entry[1])
    known: dict[str, Operand] = {name: Number(start) for name, start in shared.items()}
    known |= {name: Number(at) for at, (_, name) in enumerate(params)}  # a parameter's address is its number
    scopes, instructions, labels = [known], list[Instruction](), dict[str, int]()
    for label, brace, statement in _statements(text, entry.end()):
        if label:
            labels[label] = len(instructions)
        elif brace == "{":
            scopes.append(dict(scopes[-1]))
        elif brace == "}":
            scopes.pop()
            if not scopes:
                break
        elif declared := _DECLARED.match(statement):
            scopes[-1] |= _registers(*declared.groups(), depth=len(scopes) - 1, unique=len(instructions))
        elif statement and not statement.startswith(".pragma"):
            instructions.append(_instruction(statement, scopes[-1]))
    sizes = tuple(WIDTHS[kind] // 8 for kind, _ in params)
    return Kernel(sizes, end, int(entry[2] or 1024), tuple(instructions), labels)


def _statements(text: str, position: int) -> Iterator[tuple[str, str, str]]:
    while match := _STATEMENT.match(text, position):
        position = match.end()
        label, brace, statement = match.groups("")
        yield label, brace, " ".join(statement.split())
    raise ValueError(f"PTX ends or is not understood at {text[position : position + 80]!r}")


def _registers(kind: str, name: str, count: str | None, depth: int, unique: int) -> dict[str, Operand]:
    """The registers of a declaration. Inner scopes have registers of their own under the same names."""
    inner = f"@{unique}" if depth else ""
    names = [name] if count is None else [f"{name}{i}" for i in range(int(count))]
    return {each: Register(each + inner, WIDTHS[kind]) for each in names}


def _instruction(text: str, known: dict[str, Operand]) -> Instruction:
    match = re.match(r"(?:@(!?)%([\w$]+)\s+)?([\w.:]+)\s*(.*)$", text)
    if match is None:
        raise ValueError(f"not understood: {text!r}")
    negated, predicate, opcode, rest = match.groups()
    guard = (known[predicate], not negated) if predicate else None
    return Instruction(opcode, tuple(_operand(part, known) for part in _parts(rest)), guard, text)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)]


def _operand(text: str, known: dict[str, Operand]) -> Operand:
    if text.startswith("{"):
        return tuple(_operand(part, known) for part in _parts(text[1:-1]))
    if text.startswith("["):
        base, _, offset = text[1:-1].partition("+")
        return Address(_operand(base.strip(), known), int(offset or 0))
    if re.fullmatch(r"%(n?tid|n?ctaid)\.[xyz]|%laneid", text):
        return Special(text[1:])
    if re.fullmatch(r"0[fd][0-9A-Fa-f]+", text):
        return Number(int(text[2:], 16))
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
        return Number(int(text.rstrip("U"), 0))
    return known.get(text.partition("|")[0].removeprefix("%")) or Label(text)  # a predicate after | is what no kernel reads
