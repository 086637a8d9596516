"""What llama.cpp's llama-eval-callback prints: each node's name, operation and shape, the first and last three numbers of each axis, a sum.

A node is a line `<function>: <name> = (<type>) <OPERATION>(<sources>) = {<lengths, the fastest axis first>}`. Numbers with four decimals
follow in brackets, rows upon rows, and `sum = <float32 sum of all numbers>`. Other lines, as in a log, are skipped. Most numbers are not
printed, so the result is no Trace; bitnet_np.judge.partial compares it.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ...base.errors import FileFormatError, shown
from ..points import SCORES, SLOTS, Key, key_of, ours_of
from .nodes import node_of

PRINTED = 5e-5
"""Largest error of a printed number: half a unit of its last decimal."""
PRINTED_SUM = 5e-7
"""The same of a printed sum."""
EDGE = 3
"""Numbers that are printed from each end of an axis."""

HEADER = re.compile(
    rb"^[^:\n]{0,80}: +(\S[^=\n]{0,200}?) = \((\w{1,20})\) +(\w{1,40})\(.*\) = \{(\d{1,12}), (\d{1,12}), (\d{1,12}), (\d{1,12})\}\s*$",
    re.MULTILINE,
)
_NUMBER = re.compile(rb"-?(?:\d+\.\d+|inf|nan)")
_SUM = re.compile(rb"sum = (-?(?:\d{1,60}\.\d{1,20}|inf|nan))\s*$")
_LONGEST = 1 << 16  # bytes of a line
_MOST_NODES = 1 << 20

_OURS = ours_of("llama_cpp")


@dataclass(frozen=True, eq=False)
class PartialTensor:
    """Some numbers of a point, and the sum of all."""

    key: Key
    shape: tuple[int, int]  # [T, width] in normal form; fewer rows than tokens are those of the last
    index: NDArray[np.int64]  # [n, 2]: row and column of each known number
    values: NDArray[np.float64]  # [n], off by PRINTED at most
    sum: float  # as float32 adds the numbers up one after another


@dataclass(frozen=True, eq=False)
class PartialTrace:
    """The points for which an engine printed some numbers, for one sequence."""

    tensors: tuple[PartialTensor, ...]  # in the order they were computed
    origin: str  # for messages
    ignored: tuple[str, ...] = ()  # nodes that are no point


def read(path: str | os.PathLike[str]) -> PartialTrace:
    """The points of the engine's first call, which is the prompt's. Raises FileFormatError for a file without sound nodes."""
    path = Path(path)
    tensors: dict[Key, PartialTensor] = {}
    ignored = []
    with open(path, "rb") as file:
        for name, kind, operation, lengths in _nodes(file, path):
            base, dash, layer = name.rpartition("-")
            if dash and (ours := _OURS.get(f"{base}.{operation}")) is not None:
                key = key_of(f"{ours}-{layer}")
            else:
                node = node_of(f"s0.{name}.{operation}")
                key = None if node is None or node[1].name in SCORES else node[1]
            where = f"{path}: node {shown(f'{name} {operation}')}"
            if key == Key("inp_embd", None) and key in tensors:
                break  # the next call
            if key is None or not kind.startswith(("f16", "f32", "bf16")):
                ignored.append(name)
            else:
                tensors.pop(key, None)  # a bias was added to it: the later one counts, at its place
                tensors[key] = _tensor(key, lengths, file, where)
    if not tensors:
        first = ", ".join(map(shown, ignored[:5])) or "nothing"
        raise FileFormatError(f"{path}: no node that is a point of a forward pass, expected some such as attn_norm-0; it has {first}")
    return PartialTrace(tuple(tensors.values()), f"{path} (eval-callback)", tuple(dict.fromkeys(ignored)))


def _nodes(file: IO[bytes], path: Path) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """Yields name, type, operation and lengths of each node; its numbers may be read from `file` then."""
    for count in range(_MOST_NODES + 1):
        match = None
        while match is None and (line := file.readline(_LONGEST)):
            match = HEADER.search(line)
        if match is None:
            return
        if count == _MOST_NODES:
            raise FileFormatError(f"{path}: more than {_MOST_NODES} nodes, expected fewer")
        name, kind, operation = (match[i].decode("ascii", "replace") for i in (1, 2, 3))
        yield name, kind, operation, tuple(int(match[i]) for i in range(4, 8))


def _tensor(key: Key, lengths: tuple[int, ...], file: IO[bytes], where: str) -> PartialTensor:
    """The numbers that follow a node's line."""
    rotated = key.name.endswith("_rope") or (key.name in SLOTS and lengths[2] > 1)  # or with an axis of a token's experts
    rows, columns = (lengths[2], lengths[:2]) if rotated else (lengths[1], lengths[:1])
    if prod(lengths) == 0 or prod(lengths) != rows * prod(columns):
        raise FileFormatError(f"{where} has the lengths {list(lengths)}, expected {'head width, heads' if rotated else 'width'} and tokens")
    ends = [[*range(min(EDGE, n)), *range(max(EDGE, n - EDGE), n)] if n > 2 * EDGE else [*range(n)] for n in lengths]
    index = [(c, b * lengths[0] + a) if rotated else (b, a) for _, c, b, a in product(*reversed(ends))]
    values: list[float] = []
    while line := file.readline(_LONGEST):
        if total := _SUM.search(line):
            break
        values += map(float, _NUMBER.findall(line))
        if len(values) > len(index):
            break
    if not line or total is None or len(values) != len(index):
        raise FileFormatError(
            f"{where} has {len(values)} numbers and {'a' if line and total else 'no'} sum, expected {len(index)} and a sum"
        )
    return PartialTensor(key, (rows, prod(columns)), np.array(index, np.int64), np.array(values), float(total[1]))
