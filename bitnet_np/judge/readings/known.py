"""Numbers that were solved for, found again among those of the model and of the tensors at hand: their powers, and multiples of these."""

from collections.abc import Iterator

import numpy as np

from ...traces.points import HEADS
from ..evidence import FEWEST, NEAR, sources
from ..law.expression import Array
from ..law.functions import REDUCTIONS
from ..words import digits
from .structure import POWERS, Fit, Numbers, fitted, powered
from .wrong import Wrong

_OF_ROWS = ("mean square", "largest magnitude", "largest number", "mean", "sum")


@np.errstate(all="ignore")
def known_factors(n: Numbers, wrong: Wrong) -> str | None:
    """The factor, or what is added, of each thing along an axis, if it is known; of a step with one number for each position what it is."""
    fits = [*fitted(n)]
    if n.right.ndim == 1:
        fits = [Fit(n.theirs / n.right, True, n.axes[0], True), Fit(n.theirs - n.right, False, n.axes[0], True)]
        if (found := _recognised(n.theirs, wrong, n.same)) is not None and n.explained(found[1]):
            return f"it is {found[0]}"
    for fit in fits:
        found = _recognised(fit.numbers, wrong, n.same)
        if found is not None and n.explained(fit.made(n.right, found[1])):
            return f"each {fit.what} is multiplied by {found[0]}" if fit.is_factor else f"{found[0]} is added to each {fit.what}"
    return None


def _arrays(wrong: Wrong) -> Iterator[tuple[str, Array]]:
    """Yields what there is for each position, each slot of an expert, or each element: tensors, what rows have once, and vectors."""
    for key, x in wrong.tensors.items():
        if key.layer == wrong.key.layer and x.dtype.kind == "f" and 4 * x.size <= wrong.theirs.size:
            yield key.name, x.astype(np.float64)
    for key, x in zip(wrong.operation.inputs, wrong.inputs, strict=True):
        yield from ((f"the {what} of {key.name}", REDUCTIONS[what](x)) for what in _OF_ROWS)
        if key.name in HEADS:
            each = x.reshape(len(x), -1, wrong.model.config.head_dim)
            yield f"the largest magnitude of each head of {key.name}", REDUCTIONS["largest magnitude"](each)
    for field, x in vars(wrong.operation.layer or wrong.model).items():
        if isinstance(x, np.ndarray) and x.ndim == 1:
            yield f"the weight {field}", x.astype(np.float64)


def _recognised(numbers: Array, wrong: Wrong, near: float) -> tuple[str, Array] | None:
    """What some numbers are, in words, and as that gives them; None if they are found nowhere. near: relative."""
    flat = numbers.ravel()
    if flat.size < FEWEST or np.ptp(flat) <= 10 * near * np.abs(flat).max():
        return None
    for name, known in _arrays(wrong):
        for power, words in POWERS.items() if known.size == flat.size else ():
            x = powered(known.ravel(), power)
            ratio = float((flat * x).sum() / max((x * x).sum(), 1e-300))
            if not (np.abs(flat - ratio * x) <= near * np.abs(flat).max()).all():
                continue
            said = {f"{digits(ratio)} times ": ratio, "": 1.0, "epsilon times ": wrong.model.config.eps}
            times = min(reversed(said), key=lambda times: abs(said[times] - ratio) > near * abs(ratio))
            return times + words.format(name), said[times] * x.reshape(numbers.shape)
        if not name.startswith("the weight") and (other := _others(flat, known.ravel(), near)) is not None:
            return f"{name} of another place over that of its own, as by the scale of another", other.reshape(numbers.shape)
    return None


def _others(flat: Array, known: Array, near: float) -> Array | None:
    """The numbers [n], if each is the quotient of one of some known ones and its own; of each known one there may be several numbers."""
    own = np.repeat(known, max(flat.size // max(known.size, 1), 1))
    if known.size < FEWEST or own.size != flat.size or np.ptp(known) <= NEAR * np.abs(known).max() or not np.isfinite(known).all():
        return None
    source = sources(known[:, None], (flat * own)[:, None], near * float(np.abs(known).max()))
    return None if source is None else known[source] / own
