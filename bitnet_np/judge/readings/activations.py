"""Wrong activations of the feed-forward: functions that are approximated, or that nobody knows."""

from collections.abc import Callable

import numpy as np

from ... import spec
from ..mistakes.gates import RIGHT
from .wrong import Array, Wrong

AT = ("ffn_out",)

_LEAST = 64  # numbers
_MANY = 500  # numbers that show a function
_CLOSE = 0.1  # of its largest number: an approximation

Function = Callable[[Array], Array]


def _of_gate(wrong: Wrong) -> Function:
    """The right activation of the gate, or of up where there is no gate."""
    right = spec.ACTIVATIONS[wrong.config.activation]
    return (lambda x: right(x, np.ones_like(x))) if len(wrong.inputs) == 2 else right


def _parts(wrong: Wrong) -> tuple[Array, Array]:
    """Gate and up; up and 1 where there is no gate."""
    return (wrong.inputs[0], wrong.inputs[1]) if len(wrong.inputs) == 2 else (wrong.inputs[0], np.ones(1))


def other_function(wrong: Wrong) -> str | None:
    """The function of the gate alone that it is, times up, by some of its numbers: an approximation, or none that is known."""
    if wrong.theirs.size < _LEAST:
        return None
    with np.errstate(all="ignore"):
        return _as_a_function(wrong)


def _as_a_function(wrong: Wrong) -> str | None:
    (gate, up), right = _parts(wrong), _of_gate(wrong)
    up = np.broadcast_to(up, gate.shape)
    usable = np.abs(up) > 0.1 * np.sqrt((up**2).mean())
    x, y = gate[usable], (wrong.theirs / np.where(usable, up, 1))[usable]
    order = np.argsort(x)
    x, y = x[order], y[order]
    if x.size < _MANY:
        return None
    error = y - right(x)
    between = error[:-2] + (error[2:] - error[:-2]) * (x[1:-1] - x[:-2]) / np.maximum(x[2:] - x[:-2], 1e-300)
    if ((error[1:-1] - between) ** 2).mean() > 0.05 * (error**2).mean():
        return None  # no function: its numbers are not near those of neighbours
    away = np.abs(error)
    if away.max() < _CLOSE * np.abs(y).max():
        return f"the activation is approximated: it is off by up to {away.max() / np.abs(y).max():.2g} of its largest number"
    points = [np.abs(x - at).argmin() for at in (-2, -1, 0.5, 1, 2)]
    numbers = ", ".join(f"{y[i]:.4g} at {x[i]:.3g}" for i in dict.fromkeys(points))
    times = ", times up" if len(wrong.inputs) == 2 else ""
    return f"it is another function of {_gate(wrong)}{times} instead of {RIGHT[wrong.config.activation]}: {numbers}"


def _gate(wrong: Wrong) -> str:
    return "gate" if len(wrong.inputs) == 2 else "up"
