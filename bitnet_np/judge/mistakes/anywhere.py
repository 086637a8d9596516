"""Mistakes that any operation can make: its output against the expected one. Their numbers are fitted to the other engine's."""

from collections.abc import Iterator, Sequence

import numpy as np

from ...model.records import Linear, Model, Ternary
from ..graph import FIELDS, Operation
from .mistake import Array, Fit, Mistake, Numbers

Fitted = Iterator[tuple[Numbers, Array]]

TOO_LARGE = "everything is {ratio:.6g} times what it should be"


def ratios(model: Model, operation: Operation) -> Sequence[tuple[str, Numbers, float]]:
    """The factors by which an operation's result is wrong if one scale is taken for another, with a mistake's id and its numbers."""
    name, n = operation.key
    if name not in FIELDS or n is None:
        return ()

    def scale(layer: int, field: str) -> float | None:
        linear: Linear | None = getattr(model.layers[layer], field)
        return float(linear.weights.scale) if linear is not None and isinstance(linear.weights, Ternary) else None

    own = scale(n, FIELDS[name])
    if own is None or getattr(model.layers[n], FIELDS[name]).bias is not None:
        return ()
    scales: list[tuple[str, Numbers, float | None]] = [("scale.of_matrix", {"other": field}, scale(n, field)) for field in FIELDS.values()]
    for step, which in ((-1, "previous"), (1, "next")):
        if 0 <= n + step < len(model.layers):
            scales.append(("scale.of_layer", {"which": which}, scale(n + step, FIELDS[name])))
    return [
        ("activation_scale.128", {"steps": 127, "others": 128}, 127 / 128),
        ("activation_scale.128", {"steps": 128, "others": 127}, 128 / 127),
        *((id, numbers, other / own) for id, numbers, other in scales if other is not None),
    ]


def _named(id: str, text: str) -> Mistake:
    """A mistake that multiplies by one of Fit.ratios."""

    def fitted(fit: Fit) -> Fitted:
        for name, numbers, ratio in fit.ratios:
            if name == id:
                yield {**numbers, "ratio": ratio}, ratio * fit.value

    return Mistake(id, f"{text}: {TOO_LARGE}", fitted=fitted)


def _factor(fit: Fit) -> Fitted:
    ratio = float((fit.theirs * fit.value).sum() / max((fit.value * fit.value).sum(), 1e-300))
    yield {"ratio": ratio}, ratio * fit.value


def _moved(fit: Fit) -> Fitted:
    if len(fit.value) > 2:
        for shift, which in ((1, "previous"), (-1, "next")):
            rows = np.roll(fit.value, shift, axis=0)
            end = 0 if shift == 1 else -1
            rows[end] = fit.theirs[end]
            yield {"which": which}, rows


def _of_one_token(fit: Fit) -> Fitted:
    if len(fit.value) > 1:
        for which, row in (("last", fit.value[-1]), ("first", fit.value[0])):
            yield {"which": which}, np.broadcast_to(row, fit.value.shape)


def _bias(fit: Fit) -> Fitted:
    if len(fit.value) > 3:
        yield {}, fit.value + (fit.theirs - fit.value).mean(axis=0)


def _factor_by_token(fit: Fit) -> Fitted:
    if fit.value.shape[1] > 3:
        squares = (fit.value * fit.value).sum(axis=1, keepdims=True)
        yield {}, (fit.theirs * fit.value).sum(axis=1, keepdims=True) / np.maximum(squares, 1e-300) * fit.value


MISTAKES = (
    Mistake("any.sign", "the sign is flipped", fitted=lambda fit: -fit.value),
    _named("activation_scale.128", "codes in steps of 1/{steps} are taken for 1/{others}"),
    _named("scale.of_matrix", "the weight scale of {other} is used"),
    _named("scale.of_layer", "the weight scale of the {which} layer is used"),
    Mistake("any.factor", TOO_LARGE, fitted=_factor),
    Mistake("any.moved", "every row is that of the {which} token", fitted=_moved),
    Mistake("any.one_token", "every row is that of the {which} token", fitted=_of_one_token),
    Mistake("any.bias", "a constant is added to each column: a bias", fitted=_bias),
    Mistake("any.factor_by_token", "each position is wrong by a factor of its own: a scale", fitted=_factor_by_token),
)

VAGUE = ("any.bias", "any.factor_by_token", "read.permuted")
"""Causes that stand only where no reading says more."""

OF_ROWS = ("any.moved", "any.one_token", "any.bias", "any.factor_by_token")
"""Causes that compare rows with each other, or fit a number to each: some rows alone are no evidence for them."""
