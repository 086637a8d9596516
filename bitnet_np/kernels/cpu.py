"""The operations of a backend, on the CPU: arrays and scalars in, arrays out. They know nothing of models.

The kernels are in the files imported here; the contract that they keep is contract/. Arrays are C-contiguous; offsets given to the
functions of fast/ count elements from an array's start, whatever its shape. Kernels have no bounds checks: everything that could break them
(token ids, slots, positions, shapes) is checked at the package's border. Every output row has one owner, so threads cannot change a bit.
"""
# ruff: noqa: F401 (what is imported here are the backend's operations)

from typing import TypeVar

from numpy.typing import NDArray

from .attention import attend, attend_float16, attend_masked
from .blocks import embed as embed_blocks
from .blocks import matmul as matmul_blocks
from .blocks import matmuls_as_llama_cpp as matmuls_blocks_as_llama_cpp
from .cache.disk_cache import is_known
from .checks import has_code_three, has_non_finite
from .experts import expert_weights, mix, sigmoid_gate, top_experts
from .floats import embed, matmul
from .launching import Floats, looked_at
from .masks import fill_mask
from .rows import (
    add,
    add_bias,
    exponential,
    gelu,
    gelu_gate,
    gelu_tanh,
    layer_norm,
    relu2_gate,
    rms_norm,
    rope,
    rope_adjacent,
    rotations,
    scaled,
    silu_gate,
    soft_cap,
    spread,
    take,
)
from .storage import HOST, HostStorage
from .ternary import quantize, ternary_matmul, ternary_matmuls
from .workspace import empty

Record = TypeVar("Record")

device = "cpu"
exact_only = False
splits_rows = True
repeats = is_known()  # recordings need private parts of Numba


def storage() -> HostStorage:
    return HOST


def mark(event: str, count: int = 1) -> None:
    """Hook for each "forward", each "layer", and the positions of each "kv_write". It does nothing here; metrics.py counts."""


def wait() -> None:
    """Does nothing: a kernel returns when it is done."""


def upload(array: NDArray) -> NDArray:
    """The array itself: it already lies where the kernels read it."""
    return array


def resident(record: Record) -> Record:
    """The record itself: its arrays already lie where the kernels read them."""
    return record


def to_host(array: Floats) -> Floats:
    """A result as a NumPy array."""
    looked_at()
    return array
