"""AdamW (arXiv 1711.05101) in float32, with clipped gradients: the same bits on every machine, with any number of threads.

Each number is updated by itself, in a fixed order of operations; the gradients' norm is summed in float64 in one order. There are no fused
multiply-adds: Numba makes none by default.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from bitnet_np.kernels.launching import launch, parallel, serial, shared

from .settings import Settings

Arrays = Mapping[str, NDArray[np.float32]]
_PART = 1 << 12  # numbers that a thread updates at a time
_LANES = 16


@serial
def _squares(x: NDArray, out: NDArray) -> None:  # [N], [16]
    """Sum of squares by index mod 16."""
    for i in range(x.size // _LANES):
        for j in range(_LANES):
            value = np.float64(x[i * _LANES + j])
            out[j] += value * value
    for i in range(x.size % _LANES):
        value = np.float64(x[x.size // _LANES * _LANES + i])
        out[i] += value * value


def norm(gradients: Arrays) -> float:
    """The root of the sum of all squares."""
    lanes = np.zeros(_LANES)
    for name in sorted(gradients):
        _squares(gradients[name].reshape(-1), lanes)
    return math.sqrt(math.fsum(lanes))


@parallel
def _update(team, w, g, m, v, numbers):  # [N] each; w, m and v in place
    factor, beta1, one_minus_beta1, beta2, one_minus_beta2, rate, root, epsilon, decay = numbers
    for part in shared(team, -(-w.size // _PART)):
        for i in range(part * _PART, min((part + 1) * _PART, w.size)):
            x = g[i] * factor
            first = beta1 * m[i] + one_minus_beta1 * x
            second = beta2 * v[i] + one_minus_beta2 * x * x
            m[i], v[i] = first, second
            w[i] = decay * w[i] - rate * first / (np.sqrt(second) * root + epsilon)


def update(parameters: Arrays, gradients: Arrays, first: Arrays, second: Arrays, step: int, settings: Settings) -> float:
    """One step, in place: parameters and both moments. Returns the gradients' norm before it is clipped."""
    length = norm(gradients)
    rate = settings.rate(step)
    corrected = rate / (1 - settings.beta1 ** (step + 1))
    root = 1 / math.sqrt(1 - settings.beta2 ** (step + 1))
    factor = min(1.0, settings.clip / max(length, 1e-30))
    for name, w in parameters.items():
        decay = 1 - rate * settings.weight_decay if w.ndim == 2 else 1.0
        numbers = (factor, settings.beta1, 1 - settings.beta1, settings.beta2, 1 - settings.beta2, corrected, root, settings.epsilon, decay)
        flat = (array.reshape(-1) for array in (w, gradients[name], first[name], second[name]))
        launch(_update, w.size, *flat, tuple(map(np.float32, numbers)))
    return length
