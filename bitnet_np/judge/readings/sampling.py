"""Logits that a sampler has changed, or that are no logits any more."""

import numpy as np

from ... import spec
from ..graph import TOKENS
from .wrong import Wrong

_BEFORE = "expected are logits before a sampler changes them"


def penalty(wrong: Wrong) -> str | None:
    """The penalty of logits of tokens that the sequence has."""
    ids = np.asarray(wrong.tensors[TOKENS]).ravel() if TOKENS in wrong.tensors else np.zeros(0, int)
    if len(ids) != len(wrong.value) or not wrong.places.any():
        return None
    counts = np.zeros(wrong.value.shape)
    for t in range(len(ids)):
        counts[t:, ids[t]] += 1
    whole = np.broadcast_to(counts[-1], counts.shape)
    theirs, value = wrong.theirs, wrong.value
    for count, which in ((counts, "occurred up to each position"), (whole, "occur in the sequence")):
        seen = count > 0
        if (wrong.places & ~seen).any():
            continue
        positive, negative = seen & (value > 0) & (theirs != 0), seen & (value < 0)
        ratios = np.concatenate([(value / np.where(theirs == 0, 1, theirs))[positive], (theirs / np.where(value == 0, 1, value))[negative]])
        rate = float(np.median(ratios)) if ratios.size else 1.0
        if rate > 0 and wrong.accounts(np.where(seen, np.where(value > 0, value / rate, value * rate), value)):
            return (
                f"a repetition penalty of {rate:.4g} is on the logits of tokens that {which}: logits before sampling's changes are expected"
            )
        for times, kind in ((seen, "presence"), (count, "frequency")):
            amount = float(((value - theirs) * times).sum() / max((times * times).sum(), 1))
            if wrong.accounts(value - amount * times):
                return f"a {kind} penalty of {amount:.4g} is on the logits of tokens that {which}: {_BEFORE}"
    return None


def probabilities(wrong: Wrong) -> str | None:
    """Whether they are the softmax of logits, or its logarithm."""
    if wrong.accounts(wrong.value - wrong.value.max(axis=1, keepdims=True)):
        return "the largest logit of each position is subtracted from all of them, as before a softmax"
    right = spec.softmax(wrong.value)
    if wrong.accounts(right):
        return "they are probabilities: the softmax of the logits"
    with np.errstate(divide="ignore"):
        logarithms = np.log(right)
    return "they are logarithms of probabilities: the log-softmax of the logits" if wrong.accounts(logarithms) else None


def cut(wrong: Wrong) -> str | None:
    """The number that stands for all but the largest logits, as a sampler's top-k or top-p leaves it."""
    if not wrong.places.any():
        return None
    number = float(np.median(wrong.theirs[wrong.places]))
    out = np.isclose(wrong.theirs, number, rtol=1e-6, atol=0)
    if (wrong.places & ~out).any():
        return None
    least = np.where(out, np.inf, wrong.value).min(axis=1)
    most = np.where(out & wrong.places, wrong.value, -np.inf).max(axis=1)
    if (most > least).any():
        return None
    kept = np.unique((~out).sum(axis=1))
    count = f"{kept[0]}" if kept.size == 1 else f"{kept[0]} to {kept[-1]}"
    filtered = f"{number:g} stands for the others, as top-{'k' if kept.size == 1 else 'p'} leaves it"
    return f"only the {count} largest logits of each position are there, {filtered}: {_BEFORE}"
