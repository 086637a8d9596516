"""Wrong activations of the feed-forward: functions that are approximated, or that nobody knows."""

import numpy as np

from ..mistakes.gates import RIGHT
from .wrong import Wrong

AT = ("ffn_out",)

_MANY = 500  # numbers that show a function
_CLOSE = 0.1  # of its largest number: an approximation


def other_function(wrong: Wrong) -> str | None:
    """The function of the gate alone that it is, times up, by some of its numbers: an approximation, or none that is known."""
    gate, *ups = wrong.inputs
    up = ups[0] if ups else np.ones_like(gate)
    usable = np.abs(up) > 0.1 * np.sqrt((up**2).mean())
    order = np.argsort(gate[usable])
    x, y, right = (
        (numbers[usable] / divisor)[order] for numbers, divisor in ((gate, 1), (wrong.theirs, up[usable]), (wrong.value, up[usable]))
    )
    if x.size < _MANY:
        return None
    error = y - right
    between = error[:-2] + (error[2:] - error[:-2]) * (x[1:-1] - x[:-2]) / np.maximum(x[2:] - x[:-2], 1e-300)
    if ((error[1:-1] - between) ** 2).mean() > 0.05 * (error**2).mean():
        return None  # no function: its numbers are not near those of neighbours
    largest, away = np.abs(y).max(), np.abs(error).max()
    if away < _CLOSE * largest:
        return f"the activation is approximated: it is off by up to {away / largest:.2g} of its largest number"
    points = [np.abs(x - at).argmin() for at in (-2, -1, 0.5, 1, 2)]
    numbers = ", ".join(f"{y[i]:.4g} at {x[i]:.3g}" for i in dict.fromkeys(points))
    return f"it is another function of {'gate, times up' if ups else 'up'} instead of {RIGHT[wrong.config.activation]}: {numbers}"
