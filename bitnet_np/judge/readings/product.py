"""Some outputs of a wrong product, and whether computed numbers account for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ... import spec
from ...engine.dialects import Dialect
from ...model.records import Config, Linear, Table, Ternary
from .. import operations as op
from ..roundings import matrix_input, to_float16
from .wrong import ROWS, Array, Indices, Wrong, matched

_OUTPUTS = 64  # columns looked at
_CAPPED = 0.9  # of the cap: beyond it roundings of logits are many of what was capped
_MOST_LEFT = 0.01  # of the error, beside what `matched` allows: roundings of another reading than the right one are small too


@dataclass(frozen=True)
class Product:
    """Outputs without their biases and scales: theirs [T, n] should be inputs [T, M] times matrix^T [M, n]."""

    raw: Array  # the input [T, M]
    inputs: Array  # the numbers that are multiplied [T, M]: int8 codes divided by their steps where the matrix takes codes
    steps: Array  # [T, 1], int8 steps per unit of the input; 1 where it takes no codes
    matrix: Array  # [n, M]
    theirs: Array  # [T, n]
    table: Table | Ternary
    noise: float

    @classmethod
    def of(cls, wrong: Wrong, tokens: Indices | None = None, rows: Indices | None = None) -> Product | None:
        """Outputs of a wrong product, spread over all unless they are given. None where a cap leaves too little of logits."""
        linear = wrong.linear
        rows = _spread(linear.shape[0], _OUTPUTS) if rows is None else rows
        tokens = _spread(len(wrong.theirs), ROWS) if tokens is None else tokens
        raw = wrong.inputs[0][tokens]
        inputs, steps = multiplied(raw, linear, wrong.dialect, wrong.layer is None)
        matrix, scale = unscaled(linear, rows)
        bias = 0.0 if linear.bias is None else linear.bias[rows].astype(np.float64)
        finished = wrong.theirs[np.ix_(tokens, rows)]
        theirs = _unfinished(wrong.config, finished) if wrong.layer is None else finished
        if theirs is None:
            return None
        return cls(raw, inputs, steps, matrix, (theirs - bias) / scale, linear.weights, wrong.noise)

    @cached_property
    def right(self) -> Array:
        """What theirs should be, [T, n]."""
        return self.inputs @ self.matrix.T

    @property
    def error(self) -> Array:
        """[T, n]."""
        return self.theirs - self.right

    @property
    def width(self) -> int:
        """M."""
        return self.matrix.shape[1]

    def accounts(self, computed: Array) -> bool:
        """Whether computed numbers are theirs, and leave next to nothing of the error."""
        return accounts(computed, self.theirs, self.right, self.noise)

    @cached_property
    def few(self) -> Product:
        """The outputs that are most wrong: most other matrices are refused by these alone."""
        worst = np.argsort(-((self.error / token_sizes(self.theirs, self.right)) ** 2).sum(axis=0))[:8]
        return replace(self, matrix=self.matrix[worst], theirs=self.theirs[:, worst])


def multiplied(x: Array, linear: Linear, dialect: Dialect, is_head: bool = False) -> tuple[Array, Array]:
    """The numbers that a matrix multiplies [T, M], and their int8 steps per unit [T, 1], 1 where it takes no codes."""
    weights = linear.weights
    if op.reads_codes(linear, dialect):
        codes, steps = spec.quantize(x)
        return codes / steps, steps
    x = to_float16(x) if is_head and dialect.in_float16 else x
    if dialect.ggml_activations:
        table = weights.blocks if isinstance(weights, Ternary) else weights
        assert table is not None  # it takes codes else
        x = matrix_input(x, table)
    return x, np.ones((len(x), 1))


def unscaled(linear: Linear, rows: Indices) -> tuple[Array, float]:
    """Rows of a matrix [n, M], and the scale of their products."""
    weights, scale = linear.weights, 1.0 if linear.scale is None else float(linear.scale)
    return op.rows_of(weights, rows), scale * (float(weights.scale) if isinstance(weights, Ternary) else 1.0)


def of_product(read: Callable[[Wrong, Product], str | None]) -> Callable[[Wrong], str | None]:
    """A reading of a product some of whose outputs are wrong."""

    def reading(wrong: Wrong) -> str | None:
        product = wrong.product
        return None if product is None or not product.error.any() else read(wrong, product)

    return reading


def _unfinished(c: Config, logits: Array) -> Array | None:
    """Logits before they were scaled and capped; None where the cap leaves too little of them."""
    if c.logit_cap is not None:
        part = logits / c.logit_cap
        if np.abs(part).max() > _CAPPED:
            return None
        logits = c.logit_cap * np.arctanh(part)
    return logits * c.logit_scale


def accounts(computed: Array, theirs: Array, right: Array, noise: float) -> bool:
    """Whether computed numbers [T, n] are theirs, and leave next to nothing of their error. Tokens count alike, whatever their size."""
    size = token_sizes(theirs, right)
    left, error = ((theirs - computed) / size, (theirs - right) / size)
    return bool((left**2).sum() <= min(matched(noise) * ((theirs / size) ** 2).sum(), _MOST_LEFT * (error**2).sum()))


def token_sizes(*tensors: Array) -> Array:
    """The norm of each token's numbers, [T, 1], the larger of several; 1 where all are 0."""
    size = np.max([np.linalg.norm(x, axis=1, keepdims=True) for x in tensors], axis=0)
    return np.where(size == 0, 1, size)


def _spread(count: int, most: int) -> Indices:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.intp))
