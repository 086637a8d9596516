"""Logits that a sampler has changed already."""

import numpy as np

from ..graph import TOKENS
from .product import accounts
from .wrong import Wrong


def repetition_penalty(wrong: Wrong) -> str | None:
    """The penalty, if the logits of tokens that stand in the sequence, and no others, are divided by it, or multiplied where negative."""
    value, theirs = wrong.value, wrong.theirs
    ids = np.asarray(wrong.tensors.get(TOKENS, []), np.int64)
    seen = np.zeros(value.shape, bool)
    seen[:, np.unique(ids)] = True
    if not ids.size or (wrong.places & ~seen).any():
        return None
    changed = wrong.places & (value * theirs > 0)
    if changed.sum() < 4:
        return None
    ratio = theirs[changed] / value[changed]
    penalty = float(np.median(np.where(value[changed] > 0, 1 / ratio, ratio)))
    penalised = np.where(wrong.places, np.where(value > 0, value / penalty, value * penalty), value)
    if abs(penalty - 1) < 1e-3 or not accounts(penalised, theirs, value, wrong.noise):
        return None
    return f"logits of the sequence's own tokens are changed by a repetition penalty of {penalty:.4g}"
