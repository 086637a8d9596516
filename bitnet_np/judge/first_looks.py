"""First looks: what a dump is in place of what it should be, said at once, before any mistake is sought.

Each is a pure function of arrays that are there already, and says what it sees in words, or None. Constant rows, NaN and numbers beyond
float32 are refused by measures.py and bounds.py, and labels by traces/formats/loose_labels.py.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..traces.points import Key
from .detail import BLOCK
from .law.precision import storage_type

NEAR = 1e-2  # mean square error, of the spread: right rows of any type are nearer, and rows of other tokens far from it
_NORMALISED = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}  # by which a sum of probabilities of this type may differ from 1
_SHIFTED = 8  # times their standard deviation, by which all errors at a position are off
_LOWER = 16  # times nearer to the layer before


def normalised(theirs: NDArray) -> Literal["probabilities", "log-probabilities"] | None:
    """What logits [..., V] are that are normalised at each position."""
    if theirs.dtype.kind != "f" or theirs.size < 2:
        return None
    rows, most = theirs.reshape(-1, theirs.shape[-1]), _NORMALISED[storage_type(theirs)]
    of_logs = bool(rows[0].min() < 0)
    step = max(1, BLOCK // rows.shape[1])
    with np.errstate(all="ignore"):  # NaN is no sum
        for begin in range(0, len(rows), step):
            x = rows[begin : begin + step].astype(np.float64)
            in_range = x.max() <= most if of_logs else x.min() >= 0
            total = (np.exp(x) if of_logs else x).sum(axis=1)
            if not in_range or not (np.abs(total - 1) < most).all():
                return None
    return "log-probabilities" if of_logs else "probabilities"


def other_numbers(ours: NDArray, theirs: NDArray) -> str | None:
    """What logits [P, V] are that are probabilities, or right but for a constant at each position."""
    if normalised(theirs) == "probabilities":
        return (
            "they are probabilities, whose sum is 1 at each position: dump the logits before the softmax, or their logarithms as log_probs"
        )
    b = theirs.astype(np.float64)
    error = b - ours
    shift, spread = error.mean(axis=1), error.std(axis=1)
    if not (np.abs(shift) > _SHIFTED * spread).all() or not shift.all():
        return None
    if (b.max(axis=1) == 0).all():
        return "the largest logit of each position is subtracted: dump the logits before that"
    by = f"{abs(shift[0]):.4g} too {'large' if shift[0] > 0 else 'small'}"
    if np.ptp(shift) <= max(np.abs(shift).max() / 100, 2 * float(spread.max())):
        return f"every logit is {by}, and right otherwise"
    return f"all logits of a position are off by the same, those of position 0 {by}, and right otherwise"


def other_sums(theirs: NDArray) -> str | None:
    """What log-probabilities [P, V] are whose exponentials have another sum than 1, by more than bfloat16 leaves it."""
    x = theirs.astype(np.float64)
    largest = x.max(axis=1)
    total = largest + np.log(np.exp(x - largest[:, None]).sum(axis=1))
    worst = int(np.abs(total).argmax())
    if not abs(total[worst]) > np.log1p(max(_NORMALISED.values())):
        return None
    return f"their exponentials add up to {np.exp(total[worst]):.4g} at position {worst}, not to 1: they are no log-probabilities"


def other_shape(theirs: NDArray, ours: NDArray) -> str:
    """A likely reason why a tensor has not our shape [T, N], to be appended to a message; empty where none is seen."""
    (rows, width), length = theirs.shape if theirs.ndim == 2 else (0, 0), len(ours)
    if ours.ndim != 2 or theirs.ndim != 2 or min(theirs.shape) == 0:
        return ""
    if theirs.shape == ours.shape[::-1]:
        return ": it is transposed"
    if width != ours.shape[1]:
        return (
            f": if the last {width - ours.shape[1]} columns are padding, dump the others"
            if rows == length and width > ours.shape[1]
            else ""
        )
    few = min(rows, length)
    first, last = is_near(ours[:few], theirs[:few]), is_near(ours[-few:], theirs[-few:])
    if rows > length and (first or last):
        return f": the {'first' if first else 'last'} {length} are right, and the others of padding or more tokens: leave them out"
    if rows == length + 1:
        return ": one position more than there are tokens, as if a BOS token had been put in front"
    if rows > length:
        return ""
    if first:
        return f": they are the rows of the first {rows} tokens: did the engine stop there, or are the other token ids padding?"
    if last:
        return f": they are the rows of the last {rows} tokens, behind a prefix: say --prefix {length - rows}"
    less = " one position less than there are tokens, as if the engine had put no BOS in front;" if rows == length - 1 else ""
    return f":{less} if they continue a prefix, say --prefix {length - rows}"


def of_other_tokens(theirs: NDArray, ids: NDArray, run: Callable[[NDArray], NDArray]) -> str | None:
    """How token ids [T] differ from those that theirs [T', N], whose rows may be fewer or more, are right for.

    run: ids -> ours [T, N]. It is called only where there may be a difference: of a row more or less, or of ids that may be padding.
    """
    first, more = f"the first token id, {ids[0]}", len(theirs) - len(ids)
    if more == 1 and is_near(run(np.concatenate([ids[:1], ids])), theirs):
        return f"they are right with {first}, twice: a BOS is put in front that is there already"
    if more == -1 and is_near(run(ids[1:]), theirs):
        return f"they are right without {first}: the engine had no BOS in front"
    in_front, behind = (_alike(x) for x in (ids, ids[::-1]))
    if more or not 2 <= max(in_front, behind) < len(ids) or is_near(ours := run(ids), theirs):
        return None
    for k in (in_front, in_front - 1):  # the first token behind padding may have the same id
        if k > 0 and is_near(run(ids[k:]), theirs[k:]):
            return f"they are right without {first}, which is there {k} times: are the token ids padded in front?"
    for k in (behind, behind - 1):
        if k > 0 and is_near(ours[:-k], theirs[:-k]):
            return f"they are right without the last {k} token ids, each {ids[-1]}: are the token ids padded?"
    return None


def one_layer_lower(own: Mapping[Key, float], lower: Mapping[Key, float]) -> str | None:
    """Layers that are counted from 1, though no label says it.

    own, lower: the distance of each of theirs that has a layer from ours of that layer, and of the layer before, where there are such.
    """
    if not lower or not all(distance <= NEAR and _LOWER * distance < own.get(key, np.inf) for key, distance in lower.items()):
        return None
    return "every tensor is right one layer lower: layers are counted from 1 in the labels, or one is skipped"


def _alike(ids: NDArray) -> int:
    """The number of token ids at the beginning that are the same."""
    return int((ids == ids[0]).cumprod().sum())


def is_near(ours: NDArray, theirs: NDArray) -> bool:
    """Whether tensors [T, N] are the same but for roundings, at each row."""
    return distance_of(ours, theirs) <= NEAR


def distance_of(ours: NDArray, theirs: NDArray) -> float:
    """The mean square error of theirs at the worst row of [T, N], of the spread of ours; infinite for another size and NaN."""
    if ours.shape[:1] != theirs.shape[:1] or ours.size != theirs.size or ours.size == 0:
        return np.inf
    a = ours.astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.square(theirs.reshape(a.shape) - a).mean(axis=1) / np.maximum(a.var(axis=1), 1e-300)
    return float(np.nan_to_num(error, nan=np.inf).max())
