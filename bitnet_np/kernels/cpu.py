"""The operations of a backend, on the CPU: arrays and scalars in, arrays out. They know nothing of models.

The kernels are in the files imported here. Kernels over single numbers are made of the rules at the end, here and for a GPU. contract/ says
what each must give. Arrays are C-contiguous; offsets given to the functions of fast/ count elements from an array's start, whatever its
shape. Kernels have no bounds checks: everything that could break them (token ids, slots, positions, shapes) is checked at the package's
border. Every output row has one owner, so threads cannot change a bit.
"""
# ruff: noqa: F401 (what is imported here are the backend's operations)

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from . import scalar
from .attention import attend, attend_float16, attend_masked
from .cache.private_parts import gone
from .checks import has_code_three, has_non_finite
from .experts import expert_weights, mix, mix_in, sigmoid_gate, top_experts
from .floats import embed, matmul
from .ggml.blocks import embed as embed_blocks
from .ggml.blocks import matmul as matmul_blocks
from .ggml.blocks import matmuls_as_llama_cpp as matmuls_blocks_as_llama_cpp
from .launching import Floats, choose, looked_at, rule
from .roundings import round_as
from .rows import each, each_column, each_pair, each_with, exponential, layer_norm, rms_norm, rope, rope_adjacent, rotations, take
from .storage import HOST, HostStorage
from .ternary import quantize, quantize_normed, ternary_matmul, ternary_matmuls
from .workspace import empty

Record = TypeVar("Record")
_f = np.float32

device = "cpu"
exact_only = False
splits_rows = True
repeats = not gone()  # recordings need private parts of Numba


def storage() -> HostStorage:
    return HOST


def mark(event: str, count: int = 1) -> None:
    """Hook for each "forward", each "layer", and the positions of each "kv_write". It does nothing here; engine/metrics.py counts."""


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


# --- numbers one by one ---------------------------------------------------------------------------------------------------------------


@each_pair(1)
@rule
def add(a, b):  # [R, D], [R, D] -> [R, D]
    return a + b


@each_column(1)
@rule
def add_bias(x, bias):  # [R, N], [N] -> [R, N]
    return x + bias


@each_with(1)
@rule
def scaled(x, factor):  # [R, N], float32 -> [R, N]
    return x * factor


@each_pair(1)
@rule
def relu2_gate(gate, up):  # [R, F], [R, F] -> [R, F]
    """max(gate, 0)^2 * up; NaN stays NaN."""
    positive = _f(0.0) if gate < _f(0.0) else gate
    return positive * positive * up


@each_pair(16)
@rule
def silu_gate(gate, up):  # [R, F], [R, F] -> [R, F]
    """gate / (1 + e^-gate) * up."""
    return gate / (_f(1.0) + scalar.exp(-gate)) * up


@each_pair(16)
@rule
def gelu_gate(gate, up):  # [R, F], [R, F] -> [R, F]
    """The tanh approximation of GELU of the gate, times up."""
    return scalar.gelu_tanh(gate) * up


@each(32)
@rule
def gelu(x):  # [R, F] -> [R, F]
    """The exact GELU: x times the normal distribution's value at x."""
    return x * scalar.normal_cdf(x)


gelu_tanh = each(16)(scalar.gelu_tanh)
soft_cap = each_with(16)(scalar.soft_cap)  # attention uses the same rule
