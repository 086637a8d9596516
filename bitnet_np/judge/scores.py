"""Attention scores and probabilities of a dump, [H, T, T], as rows of positions that the judge can take for any other tensor."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .. import spec
from ..model.records import Config
from ..traces.points import SCORES, Key


def by_position(c: Config, points: Mapping[Key, NDArray]) -> dict[Key, NDArray]:
    """The tensors with scores as [T, H * T], 0 where a query does not see the key: engines leave anything there."""
    return {key: rows_of(c, key, x) if key.name in SCORES and x.ndim == 3 else x for key, x in points.items()}


def rows_of(c: Config, key: Key, x: NDArray) -> NDArray:
    """One such tensor, [H, T, S]. Keys behind the T positions are padding of the cache; fewer of them are a shape that is refused."""
    length = x.shape[1]
    x = x[..., :length]
    if x.shape[2] == length:
        x = np.where(spec.causal_mask(length, length, window=c.window_of(key.layer or 0)) == 0, x, x.dtype.type(0))
    return x.transpose(1, 0, 2).reshape(length, -1)
