"""Wrong norms whose rows are divided by other numbers: theirs is the input, times the weight, times a factor of each row."""

import numpy as np

from ...model.families import NORMS
from ..graph import FIELDS, HEAD_NORMS
from .wrong import Array, Wrong

AT = (*NORMS, *HEAD_NORMS, *(f"{name}_in" for name in FIELDS), "result_norm")

_LEAST = 4  # positions
_NARROW = 8  # elements
_APPROXIMATE = 0.05  # the largest relative error of a root that is computed coarsely


def norm(wrong: Wrong) -> str | None:
    """What the rows of a norm were divided by, if that alone is wrong."""
    x, y, weight, eps = _read(wrong)
    rows, width = x.shape
    if rows < _LEAST or width < _NARROW:
        return None
    right, weighted = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps), x * weight
    factors = (y * weighted).sum(axis=1, keepdims=True) / np.maximum((weighted * weighted).sum(axis=1, keepdims=True), 1e-300)

    def accounts(by: Array) -> bool:
        return wrong.accounts((by * weighted).reshape(wrong.theirs.shape) + _bias(wrong))

    if not accounts(factors) or accounts(right):
        return None
    ratio = factors / right
    middle = float(np.median(ratio))
    if accounts(middle * right):
        return None  # one factor for everything
    if accounts(np.full_like(right, np.median(factors))):
        return "all positions are divided by the same number"
    if np.abs(ratio / middle - 1).max() < _APPROXIMATE and abs(middle - 1) < _APPROXIMATE:
        return f"the inverse root is an approximation: it is off by up to {np.abs(ratio - 1).max():.2g}"
    return "each position is divided by a number of its own that is not its root mean square"


def _read(wrong: Wrong) -> tuple[Array, Array, Array, float]:
    """The input and the output without the bias, in rows of those elements that are normalised together, the weight, and epsilon."""
    name, layer, eps = wrong.key.name, wrong.layer, wrong.config.eps
    x, y = wrong.inputs[0], wrong.theirs - _bias(wrong)
    x = x - x.mean(axis=1, keepdims=True) if _is_layer_norm(wrong) else x
    if layer is None:
        weight = wrong.model.output_norm
    elif name.endswith("_in"):
        linear = getattr(layer, FIELDS[name.removesuffix("_in")])
        weight, eps = linear.norm, linear.norm_eps or eps
    else:
        weight = getattr(layer, HEAD_NORMS.get(name, name))
    return x.reshape(-1, weight.size), y.reshape(-1, weight.size), weight.astype(np.float64), eps


def _is_layer_norm(wrong: Wrong) -> bool:
    return wrong.config.norm == "layer" and wrong.key.name in ("attn_norm", "ffn_norm", "result_norm")


def _bias(wrong: Wrong) -> Array:
    bias = None
    if _is_layer_norm(wrong):
        bias = wrong.model.output_norm_bias if wrong.layer is None else getattr(wrong.layer, f"{wrong.key.name}_bias")
    return np.zeros(1) if bias is None else bias.astype(np.float64)
