"""The vocabulary of a backend, and the CPU's words for it: arrays and scalars in, arrays out, nothing known of models.

The kernels are in the files imported here; the contract that they keep is in scalar.py. Arrays are C-contiguous; offsets given to simd.py's
functions count elements from an array's start, whatever its shape. Kernels have no bounds checks: everything that could break them (token
ids, slots, positions, shapes) is checked at the package's border. Every output row has one owner, so threads cannot change a bit.
"""

from typing import Any

from .attention import attend, attend_halves, query_tiles
from .checks import has_code_three, has_non_finite
from .floats import embed, matmul
from .launching import Floats
from .rows import (
    add,
    add_bias,
    exponential,
    gelu,
    gelu_tanh,
    layer_norm,
    relu2_gate,
    rms_norm,
    rope,
    rope_adjacent,
    rotations,
    scaled,
    silu_gate,
    spread,
    take,
)
from .ternary import quantize, ternary_matmul, ternary_matmuls


def mark(event: str, count: int = 1) -> None:
    """Told of each "forward", of each "layer", and of the positions of each "kv_write". Nothing is done about it: metrics.py counts."""


def resident(record: Any) -> Any:
    """A record with its arrays where the kernels of this backend read them."""
    return record


def to_host(array: Floats) -> Floats:
    """A result as a NumPy array."""
    return array


__all__ = [
    "add",
    "add_bias",
    "attend",
    "attend_halves",
    "embed",
    "exponential",
    "gelu",
    "gelu_tanh",
    "has_code_three",
    "has_non_finite",
    "layer_norm",
    "mark",
    "matmul",
    "quantize",
    "query_tiles",
    "relu2_gate",
    "resident",
    "rms_norm",
    "rope",
    "rope_adjacent",
    "rotations",
    "scaled",
    "silu_gate",
    "spread",
    "take",
    "ternary_matmul",
    "ternary_matmuls",
    "to_host",
]
