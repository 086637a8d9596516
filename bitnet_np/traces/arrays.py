"""Arrays of other libraries as NumPy's: torch, MLX, JAX, and whatever else NumPy or DLPack can read. None of these is imported here."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ShapeError


def as_numpy(name: str, value: Any) -> NDArray:
    """`value` as a NumPy array: an array of any library on any device, or nested lists of numbers. It is not copied where that can be.

    bfloat16, which NumPy has not, becomes float32 with the same numbers. Raises ShapeError that names `name` for anything else.
    """
    try:
        if hasattr(value, "detach"):  # a tensor of torch or tinygrad, perhaps with a gradient, perhaps on a GPU
            tensor = value.detach()
            tensor = tensor.cpu() if hasattr(tensor, "cpu") else tensor  # tinygrad's numpy() copies from any device
            try:
                array = tensor.numpy()
            except TypeError:  # bfloat16
                array = tensor.float().numpy()
        elif not isinstance(value, np.ndarray) and str(getattr(value, "dtype", "")).endswith("bfloat16"):
            library = sys.modules[type(value).__module__]
            array = np.asarray(value.astype(getattr(library, "float32", np.float32)))  # MLX takes its own types, JAX those of NumPy
        elif hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            array = np.from_dlpack(value)
        else:
            array = np.asarray(value)
    except Exception as error:  # each library has different errors
        raise ShapeError(f"{name} is of type {type(value).__name__}, which is no array of numbers: {error}") from None
    if array.dtype.kind == "S":
        raise ShapeError(f"{name} is of type {type(value).__name__}, expected numbers: numpy.frombuffer makes them of bytes and a dtype")
    if array.dtype.kind not in "fiu":
        raise ShapeError(f"{name} is of type {type(value).__name__} with dtype {array.dtype}, expected numbers")
    return array
