"""Wrong products: which weights and inputs they are of."""

import numpy as np

from ... import spec
from ...model import Ternary
from .. import operations as op
from .product import Product
from .wrong import FEW, ROWS, Wrong, explained, matched, numbered, runs

_FOLLOWED = 8  # tokens whose sums are followed input by input


def cut_short(wrong: Wrong) -> str | None:
    """The inputs that a sum leaves out at its end or beginning, as a loop over whole vectors does that forgets the rest."""
    product = wrong.product
    if product is None:
        return None
    inputs, matrix, theirs, width = product.inputs, product.matrix, product.theirs, product.width
    late, early = np.zeros(width), np.zeros(width)  # squared errors of sums that stop behind each input, or begin behind it
    for token in np.argsort(-np.abs(product.error).sum(axis=1))[:_FOLLOWED]:  # several: inputs of one may be 0
        sums = np.cumsum(inputs[token] * matrix, axis=1)  # [n, M]
        late += ((sums - theirs[token][:, None]) ** 2).sum(axis=0)
        early += ((sums[:, -1:] - sums - theirs[token][:, None]) ** 2).sum(axis=0)
    ends, begins = int(late.argmin()) + 1, int(early.argmin()) + 1
    for part, missing in ((slice(0, ends), (ends, width)), (slice(begins, None), (0, begins))):
        if missing[0] < missing[1] and explained(inputs[:, part] @ matrix[:, part].T, theirs, wrong.noise):
            one = missing[1] - missing[0] == 1
            return f"{runs('input', np.arange(*missing))} of {width} {'is' if one else 'are'} not summed"
    return None


def shared_scales(wrong: Wrong) -> str | None:
    """Activation scales that are another token's, such as one for each chunk of a prompt."""
    first = np.arange(min(len(wrong.theirs), ROWS))
    product = Product.of(wrong, first) if op.reads_codes(wrong.matrix, wrong.dialect) else None
    if product is None:
        return None
    x, steps, theirs = product.raw, product.steps[:, 0], product.theirs
    owner = np.empty(len(x), int)
    for t in range(len(x)):
        rescaled = np.clip(np.rint(x[t] * steps[:, None]), -128, 127) / steps[:, None] @ product.matrix.T  # [T, n]: by each token's scale
        away = ((rescaled - theirs[t]) ** 2).sum(axis=1)
        owner[t] = t if away[t] <= matched(wrong.noise) * (theirs[t] ** 2).sum() else int(away.argmin())
        if away[owner[t]] > matched(wrong.noise) * (theirs[t] ** 2).sum():
            return None
    if (owner == np.arange(len(x))).all():
        return None
    cuts = np.flatnonzero(np.diff(owner)) + 1
    chunks = [run for run in np.split(np.arange(len(x)), cuts) if run.size > 1]
    if chunks:
        shared = ", ".join(f"{run[0]} to {run[-1]}" for run in chunks[:FEW])
        return f"one activation scale serves several tokens, such as all of a chunk, instead of one for each: positions {shared}"
    t = int((owner != np.arange(len(x))).argmax())
    return f"activation scales are another token's: position {t} has that of position {owner[t]}"


def misread(wrong: Wrong) -> str | None:
    """The block of a row of weights that was read from elsewhere, if one was. Products of int8 codes show it: they are integers."""
    columns = np.flatnonzero(wrong.places.any(axis=0))
    marked = np.zeros(wrong.places.shape, bool)
    marked[:, columns] = True
    if columns.size > FEW or not wrong.is_right_outside(marked):
        return None
    linear, x, theirs = wrong.matrix, wrong.inputs[0], wrong.theirs
    somewhere = f"only {numbered('element', columns)} of each position: rows of the weights are misread, the others are right"
    weights = linear.weights
    if not isinstance(weights, Ternary) or not op.reads_codes(linear, wrong.dialect):
        return somewhere
    matrix = op.dense(weights).astype(np.float64)
    q, scale = spec.quantize(x)
    factor = float(weights.scale) * (1.0 if linear.scale is None else float(linear.scale)) / scale[:, 0]
    row = int(columns[0])
    product = theirs[:, row] - (0.0 if linear.bias is None else float(linear.bias[row]))
    for block in (128, 64, 32, 16):
        blocks = matrix.shape[1] // block
        cut = matrix[:, : blocks * block].reshape(len(matrix), blocks, block)
        parts = np.einsum("tbm,nbm->nbt", q[:, : blocks * block].reshape(len(q), blocks, block), cut[[row]])[0]  # [blocks, T]
        missing = product / factor - q @ matrix[row]  # what the misread block adds
        for b in range(blocks):
            others = [(r, b) for r in (row - 1, row + 1) if 0 <= r < len(matrix)] + [(row, c) for c in (b - 1, b + 1) if 0 <= c < blocks]
            for r, c in others:
                changed = q[:, b * block : (b + 1) * block] @ cut[r, c] - parts[b]
                if np.abs(changed - missing).max() <= 0.25:  # sums of integers
                    where = f"row {r}" if r != row else f"weights {c * block} to {(c + 1) * block - 1}"
                    return f"weights {b * block} to {(b + 1) * block - 1} of row {row} are read from {where}"
    return somewhere
