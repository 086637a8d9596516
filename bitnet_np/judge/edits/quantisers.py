"""Other quantisers of activations to int8. They change as little as roundings do, so they compute in float32 as engines do."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ..law.definition import CODED
from ..law.expression import Array, Node, tensors
from ..law.functions import Function
from ..law.graph import Operation

Quantizer = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""[T, M] -> codes [T, M], steps per unit [T, 1], in float32."""


def _quantizer(rounded: Function = np.rint, most: int = 127, least: int = -128, axis: int | None = 1, size: Function = np.abs) -> Quantizer:
    """Another quantiser: the largest `size` over an axis to `most` steps, rounded, cut to int8."""

    def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        largest = np.maximum(size(x).max(axis=axis, keepdims=True), np.float32(1e-5))
        scale = np.broadcast_to(np.float32(most) / largest, (len(x), 1))
        return np.clip(rounded(x * scale), least, 127), scale

    return quantize


def unquantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers themselves."""
    return x, np.ones((len(x), 1), np.float32)


_STEPS = "activations are scaled to {} steps instead of 127"
_UP = np.float32(1 + 2**-20)  # the largest number is 127, but x * (127 / x) may fall short of it
QUANTISERS: dict[str, tuple[str, Quantizer]] = {
    "per_tensor": ("one activation scale for the whole tensor instead of one for each token", _quantizer(axis=None)),
    "none": ("activations are not quantised to int8", unquantised),
    "truncated": ("codes are truncated instead of rounded", _quantizer(np.trunc)),
    "truncated_127": ("codes are truncated instead of rounded, but none of 127 to 126", _quantizer(lambda x: np.trunc(x * _UP))),
    "rounded_down": ("codes are rounded down", _quantizer(np.floor)),
    "half_added": (
        "codes are (int)(x + 0.5): a half is added and the rest cut, which rounds negative numbers towards zero",
        _quantizer(lambda x: np.trunc(x + np.float32(0.5))),
    ),
    "128_wraps": (f"{_STEPS.format(128)}, and +128 wraps around to -128", _quantizer(lambda x: (np.rint(x) + 128) % 256 - 128, 128)),
    "128": (_STEPS.format(128), _quantizer(most=128)),
    **{str(most): (_STEPS.format(most), _quantizer(most=most, least=-most)) for most in (126, 63, 7)},
    "signed_largest": ("activations are scaled by their largest number, not by their largest magnitude", _quantizer(size=lambda x: x)),
}
"""By the rest of an id: what is said of a quantiser, and the quantiser."""


def quantised(place: Operation, node: Node, readers: list[Node]) -> Iterator[tuple[str, Node, str]]:
    """Activations that are quantised to int8 by another rule."""
    if node.noun == CODED or (node.noun in ("the codes", "the activation scale") and not readers):
        for id, (words, quantize) in QUANTISERS.items():
            yield words, Node("opaque", tuple(tensors(node)[:1]), node.noun, partial(_part, node.noun, quantize)), f"quantiser.{id}"


def _part(noun: str, quantize: Quantizer, x: Array) -> Array:
    codes, scale = (y.astype(np.float64) for y in quantize(x.astype(np.float32)))
    return codes / scale if noun == CODED else codes if noun == "the codes" else scale
