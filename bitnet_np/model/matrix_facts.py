"""What the matrices of a model hold: their kind, and which of them say nothing because all their weights are equal."""

from collections import Counter
from collections.abc import Collection, Iterator

import numpy as np

from ..base.tensor_types import GRID_TYPES, TERNARY_TYPES
from . import packing, widen
from .records import Blocks, Model, Ternary, Weights

_PACKED = {"U8", "I2_S", *(kind.name for kind in TERNARY_TYPES)}
_FLOATS = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint16): "BF16"}
_CHUNK = 1 << 20  # numbers that are looked at at a time


def kinds_of_matrices(model: Model, file_types: Collection[str]) -> dict[str, int]:
    """The kinds of the layers' matrices in words, each with the number of its matrices.

    file_types: the names of the types that tensors of the model's file have. Ternary matrices of a file that has no type for them were
    master weights.
    """
    stated = "packed in the file" if _PACKED & set(file_types) else "quantised at load from master weights"

    def kind(weights: Weights) -> str:
        if isinstance(weights, Ternary):
            return f"ternary, {stated}"
        name = weights.type.name if isinstance(weights, Blocks) else _FLOATS[weights.dtype]
        if isinstance(weights, Blocks) and weights.type in GRID_TYPES:
            return f"float ({name}, decoded in each pass by gguf-py, which is slow)"
        several = isinstance(weights, Blocks) and weights.type in TERNARY_TYPES
        return f"ternary, with several scales ({name})" if several else f"float ({name})"

    return dict(Counter(kind(linear.weights) for layer in model.layers for _, linear in layer.linears()))


def constant_matrices(model: Model) -> Iterator[str]:
    """A sentence for each matrix whose weights are all equal: no trained model has one, and it hides what an engine does with it.

    A matrix is read as far as the first weight that differs.
    """
    named: dict[str, Weights | None] = {"token_embd": model.token_embd, "output": model.output}
    for n, layer in enumerate(model.layers):
        named |= {f"layer {n} {name}": linear.weights for name, linear in layer.linears()}
    for name, weights in named.items():
        value = None if weights is None else _only_weight(weights)
        if value is not None:
            yield f"{name}: every weight is {value:g}"


def _only_weight(weights: Weights) -> float | None:
    """The weight of a matrix that has no other; None if it has."""
    n, m = weights.shape
    rows = max(1, _CHUNK // m)
    value = None
    for start, end in ((0, 1), *((start, min(start + rows, n)) for start in range(1, n, rows))):
        if isinstance(weights, Ternary):
            part = packing.unpack_rows(weights, np.arange(start, end)) * weights.scale
        else:
            part = widen.take(weights, slice(start, end))
        value = part.flat[0] if value is None else value
        if (part != value).any():
            return None
    return None if value is None else float(value) + 0.0  # -0 becomes 0
