"""Tables of numbers widened to float32, exactly: float16, bfloat16 and ggml's block types."""

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from .model import Blocks, Table


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
            return dequantize(table.data, GGMLQuantizationType(table.type.number))
    if table.dtype == np.uint16:
        return (table.astype(np.uint32) << 16).view(np.float32)
    return table.astype(np.float32)
