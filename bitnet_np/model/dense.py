"""A model as spec.py reads it: float64 tables and unpacked matrices."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import TERNARY_TYPES
from ..kernels.float_state import steady
from . import packing, widen
from .records import Blocks, Expert, Layer, Linear, Model, Ternary


class DenseLinear(NamedTuple):
    """A `Linear` as spec.py reads it: (norm(x) matrix^T) * scale + bias."""

    matrix: NDArray  # [N, M]
    scale: float
    int8: bool = True  # the input is quantised to int8, one scale for each token
    bias: NDArray[np.float64] | None = None  # [N]
    norm: NDArray[np.float64] | None = None  # [M]
    norm_eps: float | None = None


@steady
def dense_view(record: Model | Layer | Expert) -> Any:
    """The same record with float64 arrays, and a DenseLinear for each Linear.

    It takes four to sixteen times the memory of the model, so it is for small ones.
    """
    assert is_dataclass(record)
    return replace(record, **{field.name: _dense(getattr(record, field.name)) for field in fields(record)})


def _dense(value: Any) -> Any:
    if isinstance(value, Linear):
        return _dense_linear(value)
    if isinstance(value, Blocks) or (isinstance(value, np.ndarray) and value.dtype != np.float64):
        return widen.float32(value).astype(np.float64)
    if isinstance(value, tuple):
        return tuple(dense_view(record) for record in value)  # layers, or the experts of one
    return value


def _dense_linear(linear: Linear) -> DenseLinear:
    factor = 1.0 if linear.scale is None else float(linear.scale)
    bias, norm = _dense(linear.bias), _dense(linear.norm)
    weights = linear.weights
    if isinstance(weights, Ternary):
        return DenseLinear(packing.unpack(weights), float(weights.scale) * factor, True, bias, norm, linear.norm_eps)
    int8 = isinstance(weights, Blocks) and weights.type in TERNARY_TYPES
    return DenseLinear(_dense(weights), factor, int8, bias, norm, linear.norm_eps)
