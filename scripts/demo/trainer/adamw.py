"""AdamW (arXiv 1711.05101) in float32, with clipped gradients: the same bits on every machine.

Each number is updated by itself, in a fixed order of operations; the gradients' norm is summed in float64 in one order.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .settings import Settings

Arrays = Mapping[str, NDArray[np.float32]]
_LANES = 16


def norm(gradients: Arrays) -> float:
    """The root of the sum of all squares, which are summed by index mod 16."""
    lanes = np.zeros(_LANES)
    for name in sorted(gradients):
        squares = np.square(gradients[name].reshape(-1), dtype=np.float64)
        rows = np.append(squares, np.zeros(-squares.size % _LANES)).reshape(-1, _LANES)
        lanes = np.add.accumulate(np.vstack([lanes, rows]))[-1]
    return math.sqrt(math.fsum(lanes))


def update(parameters: Arrays, gradients: Arrays, first: Arrays, second: Arrays, step: int, settings: Settings) -> float:
    """One step, in place: parameters and both moments. Returns the gradients' norm before it is clipped."""
    length = norm(gradients)
    rate = settings.rate(step)
    corrected = rate / (1 - settings.beta1 ** (step + 1))
    root = 1 / math.sqrt(1 - settings.beta2 ** (step + 1))
    factor = min(1.0, settings.clip / max(length, 1e-30))
    for name, w in parameters.items():
        x, m, v, decay = gradients[name] * np.float32(factor), first[name], second[name], rate * settings.weight_decay * (w.ndim == 2)
        m[...] = np.float32(settings.beta1) * m + np.float32(1 - settings.beta1) * x
        v[...] = np.float32(settings.beta2) * v + np.float32(1 - settings.beta2) * x * x
        moved = np.float32(corrected) * m / (np.sqrt(v) * np.float32(root) + np.float32(settings.epsilon))
        w[...] = np.float32(1 - decay) * w - moved
    return length
