"""Mistakes in the pooled output of embedding models."""

from typing import get_args

import numpy as np

from ... import spec
from ...model.records import Pooling
from ...traces.points import POOLED, Key
from .mistake import Array, Compute, Computes, Site, alike

_ROWS = {"mean": "the mean of all tokens", "cls": "the first token", "last": "the last token"}


def _other_rows(site: Site) -> Computes:
    right = site.config.pooling
    for wrong in get_args(Pooling):
        if wrong not in ("none", right):
            yield {"wrong": _ROWS[wrong], "right": _ROWS[right]}, site.of(lambda x, wrong=wrong: spec.pool(x, wrong))


def _before_the_norm(site: Site) -> Compute:
    last = Key("l_out", site.config.n_layers - 1)
    return lambda values: spec.pool(values[last], site.config.pooling)


def _unit(site: Site) -> Compute:
    def compute(x: Array) -> Array:
        pooled = spec.pool(x, site.config.pooling)
        return pooled / np.sqrt((pooled**2).sum())

    return site.of(compute)


MISTAKES = alike(
    "pooling",
    (POOLED,),
    ("other_rows", "{wrong} instead of {right}", _other_rows),
    ("before_norm", "the rows in front of the final norm are pooled", _before_the_norm),
    ("unit", "it is divided by its length: normalised after pooling", _unit),
)
