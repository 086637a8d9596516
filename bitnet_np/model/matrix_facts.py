"""What the matrices of a model hold: their kind, and which of them say nothing because all their weights are equal."""

from collections import Counter
from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import GRID_TYPES, TERNARY_TYPES
from . import packing, widen
from .records import FLOAT_TYPES, Blocks, Linear, Model, Ternary, Weights

_PACKED = {"U8", "I2_S", *(kind.name for kind in TERNARY_TYPES)}
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
        name = weights.type.name if isinstance(weights, Blocks) else FLOAT_TYPES[weights.dtype].name
        if isinstance(weights, Blocks) and weights.type in GRID_TYPES:
            return f"float ({name}, decoded in each pass by gguf-py, which is slow)"
        several = isinstance(weights, Blocks) and weights.type in TERNARY_TYPES
        return f"ternary, with several scales ({name})" if several else f"float ({name})"

    return dict(Counter(kind(linear.weights) for layer in model.layers for _, linear in layer.linears()))


def constant_matrices(model: Model) -> Iterator[str]:
    """A sentence for each matrix whose weights are all equal: no trained model has one, and it hides what an engine does with it.

    A matrix is read as far as the first weight that differs.
    """
    for name, linear in _matrices(model).items():
        value = _only_weight(linear.weights)
        if value is not None:
            yield f"{name}: every weight is {value:g}"


def matrix_errors(ours: Model, theirs: Model) -> dict[str, float]:
    """How far each matrix of the second model is from the first's, by name: the RMS of the differences over the RMS of ours.

    Both are of one family and shape. Infinity where ours is 0 and theirs is not. Queries' and keys' matrices are left out where one model
    rotates halves of heads and the other adjacent numbers: their rows are in another order.
    """
    errors, their_matrices = dict[str, float](), _matrices(theirs)
    for name, linear in _matrices(ours).items():
        if name not in their_matrices or (ours.config.rope != theirs.config.rope and name.endswith(("attn_q", "attn_k"))):
            continue
        pairs = zip(_parts(linear), _parts(their_matrices[name]), strict=True)
        away, all_of_ours = np.sum([(np.square(b - a).sum(), np.square(a).sum()) for a, b in pairs], axis=0)
        errors[name] = float(np.sqrt(away / all_of_ours)) if all_of_ours else np.inf if away else 0.0
    return errors


def _matrices(model: Model) -> dict[str, Linear]:
    """All matrices by name, those of embedding and head too."""
    named = {name: Linear(weights) for name in ("token_embd", "output") if (weights := getattr(model, name)) is not None}
    return named | {f"layer {n} {name}": linear for n, layer in enumerate(model.layers) for name, linear in layer.linears()}


def _parts(linear: Linear) -> Iterator[NDArray[np.float64]]:
    """The weights of a matrix with their scales, some rows at a time: first one, which often says enough."""
    weights, (n, m) = linear.weights, linear.weights.shape
    rows, scale = max(1, _CHUNK // m), np.float64(1 if linear.scale is None else linear.scale)
    for start, end in ((0, 1), *((start, min(start + rows, n)) for start in range(1, n, rows))):
        if isinstance(weights, Ternary):
            yield packing.unpack_rows(weights, np.arange(start, end)) * (scale * weights.scale)
        else:
            yield widen.take(weights, slice(start, end)) * scale


def _only_weight(weights: Weights) -> float | None:
    """The weight of a matrix that has no other; None if it has."""
    value = None
    for part in _parts(Linear(weights)):
        value = part.flat[0] if value is None else value
        if (part != value).any():
            return None
    return None if value is None else float(value) + 0.0  # -0 becomes 0
