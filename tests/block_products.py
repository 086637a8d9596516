"""The definition of kernels/block_products.py in plain NumPy: the integers of a row by themselves, then one float step after another.

It shares no code with the kernels, only the tables of types, which tests/kernels/test_quants.py compares with gguf-py.
"""

import numpy as np
from contract import fma
from numpy.typing import NDArray

from bitnet_np.kernels.block_formats import FORMATS, Bits, Digit, Factor, Flags, Format, Integers
from bitnet_np.tensor_types import TensorType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
f32 = np.float32


def product(q: NDArray[np.int8], dx: Floats, sx: Floats | None, data: Bytes, kind: TensorType) -> Floats:
    # [R, M], [R, M/256 or M/32], [R, M/32] for types with a float minimum, [N, bytes of a row], type -> [R, N]
    """Rounded activations times the transposed matrix."""
    record, n, runs = FORMATS[kind.name], len(data), kind.block // 16
    flat, q = data.reshape(-1, kind.block_bytes), q.astype(np.int64)
    codes = np.concatenate([_integers(flat, part) for part in record.codes], axis=1)
    weights = codes * np.repeat(_of_runs(flat, record.scale, runs), 16, axis=1)
    unit = min(q.shape[1] // dx.shape[1], 16 if kind.name == "NVFP4" else 256)
    dot = np.einsum("nui,rui->rnu", weights.reshape(n, -1, unit), q.reshape(len(q), -1, unit))
    d = _floats(flat, record, record.scale, unit).reshape(n, -1)
    dx = np.repeat(dx, dot.shape[2] // dx.shape[1], axis=1)
    if record.minimum:
        least = _floats(flat, record, record.minimum, unit).reshape(n, -1)
        counts = _of_runs(flat, record.minimum, runs).reshape(n, -1, unit // 16)
        of_runs = q.reshape(len(q), -1, unit // 16, 16).sum(axis=3)
        subtracted = np.einsum("nuj,ruj->rnu", counts, of_runs)
    total = np.zeros((len(q), n), f32)
    with np.errstate(all="ignore"):
        for u in range(dot.shape[2]):
            total = fma(dot[:, :, u].astype(f32), d[:, u] * dx[:, u, None], total)
            if record.minimum and record.minimum.integers:
                total = fma(subtracted[:, :, u].astype(f32), -(least[:, u] * dx[:, u, None]), total)
            elif sx is not None:
                total = fma(least[:, u], sx[:, u, None], total)
    return total


def _integers(flat: Bytes, integers: Integers) -> NDArray[np.int64]:
    """The integers of each block."""
    places = np.bitwise_or.reduce([_part(flat, part) for part in integers.parts])
    if integers.signed:
        places = places.astype(np.uint8).view(np.int8).astype(np.int64)
    return np.array(integers.table)[places] if integers.table else places - integers.bias


def _part(flat: Bytes, part: Bits | Flags | Digit) -> NDArray[np.int64]:
    if isinstance(part, Flags):
        word = flat[:, part.at].astype(np.int64) | flat[:, part.at + 1].astype(np.int64) << 8
        return (word[:, None] >> np.arange(16) & 1) << part.place
    codes = flat[:, part.at].astype(np.int64)
    if isinstance(part, Digit):
        return (codes * part.factor & 255) * 3 >> 8
    return (codes >> np.array(part.shift) & part.mask) << part.place


def _of_runs(flat: Bytes, factor: Factor, runs: int) -> NDArray[np.int64]:
    """The small integer of each run of 16 weights, 1 where there is none."""
    if factor.integers is None:
        return np.ones((len(flat), runs), np.int64)
    return _integers(flat, factor.integers)[:, list(factor.lanes[:runs])]


def _floats(flat: Bytes, record: Format, factor: Factor, unit: int) -> Floats:  # -> [blocks, units of a block]
    start, count = record.start(factor), max(1, record.weights // unit)
    if factor.table:
        bytes_of_units = [start + factor.lanes[u * unit // 16] for u in range(count)]
        return np.array(factor.table, f32)[flat[:, bytes_of_units]]
    halves = np.ascontiguousarray(flat[:, start : start + 2]).view(np.float16)
    return np.repeat(halves.astype(f32), count, axis=1)
