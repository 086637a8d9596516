"""Tables of numbers widened to float32, exactly: float16, bfloat16 and ggml's block types."""

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from ..base.tensor_types import FEW_BITS, Q1_0
from .records import Blocks, Table


def take(table: Table, rows: Any) -> NDArray[np.float32]:
    """Some rows of a table [N, M], as float32 [rows, M]."""
    if isinstance(table, Blocks):
        data = table.data[rows]
        return float32(Blocks(data, table.type, (len(data), table.shape[1])))
    return float32(table[rows])


def float32(table: Table) -> NDArray[np.float32]:
    """The whole table as float32. uint16 holds bfloat16's bits; blocks become the numbers they stand for."""
    if isinstance(table, Blocks):
        with np.errstate(invalid="ignore", over="ignore"):  # scales may be NaN or infinity: loading refuses those
            if table.type in FEW_BITS:
                return _of_few_bits(table)
            return dequantize(table.data, GGMLQuantizationType(table.type.number))
    if table.dtype == np.uint16:
        return (table.astype(np.uint32) << 16).view(np.float32)
    return table.astype(np.float32)


def _of_few_bits(table: Blocks) -> NDArray[np.float32]:
    """gguf-py has none of these types. A block is a float16, then codes: several in a byte, low ones first."""
    data = table.data.reshape(-1, table.type.block_bytes)
    scales = data[:, :2].copy().view("<f2").astype(np.float32)
    if table.type is Q1_0:
        numbers = 2 * (data[:, 2:, None] >> np.arange(8, dtype=np.uint8) & 1).astype(np.float32) - 1
    else:
        numbers = (data[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).astype(np.float32) - 1
    return (numbers.reshape(len(data), table.type.block) * scales).reshape(table.shape)
