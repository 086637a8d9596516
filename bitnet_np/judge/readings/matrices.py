"""Wrong products: which weights and inputs they are of."""

import numpy as np

from ... import spec, widen
from ...model import Ternary
from .. import operations as op
from ..roundings import to_float16
from .wrong import FEW, ROWS, Array, Wrong, explained, matched, numbered, runs

_OUTPUTS = 64  # columns looked at
_FOLLOWED = 8  # tokens whose sums are followed input by input


def _some_rows(wrong: Wrong, x: Array) -> tuple[Array, Array, Array, float] | None:
    """The input of a product [T, M], first rows of its matrix [n, M], their biases [n], its scale; None where a dialect rounds inputs."""
    linear, dialect = wrong.matrix, wrong.dialect
    weights, scale = linear.weights, 1.0 if linear.scale is None else float(linear.scale)
    n = min(_OUTPUTS, linear.shape[0])
    bias = np.zeros(n) if linear.bias is None else linear.bias[:n].astype(np.float64)
    if op.reads_codes(linear, dialect):
        q, step = spec.quantize(x)
        x = q / step
    elif wrong.layer is None:  # the head
        x = to_float16(x) if dialect.halves else x
    elif dialect.ggml_activations:
        return None
    if isinstance(weights, Ternary):
        return x, op.dense(weights)[:n].astype(np.float64), bias, scale * float(weights.scale)
    return x, widen.take(weights, np.arange(n)).astype(np.float64), bias, scale


def cut_short(wrong: Wrong) -> str | None:
    """The inputs that a sum leaves out at its end or beginning, as a loop over whole vectors does that forgets the rest."""
    rows = _some_rows(wrong, wrong.inputs[0])
    if rows is None:
        return None
    inputs, matrix, bias, scale = rows
    product = (wrong.theirs[:, : len(matrix)] - bias) / scale
    width = matrix.shape[1]
    late, early = np.zeros(width), np.zeros(width)  # squared errors of sums that stop behind each input, or begin behind it
    for token in np.argsort(-np.abs(product - inputs @ matrix.T).sum(axis=1))[:_FOLLOWED]:  # several: inputs of one may be 0
        sums = np.cumsum(inputs[token] * matrix, axis=1)  # [n, M]
        late += ((sums - product[token][:, None]) ** 2).sum(axis=0)
        early += ((sums[:, -1:] - sums - product[token][:, None]) ** 2).sum(axis=0)
    ends, begins = int(late.argmin()) + 1, int(early.argmin()) + 1
    for part, missing in ((slice(0, ends), (ends, width)), (slice(begins, None), (0, begins))):
        if missing[0] < missing[1] and explained(inputs[:, part] @ matrix[:, part].T, product, wrong.noise):
            one = missing[1] - missing[0] == 1
            return f"{runs('input', np.arange(*missing))} of {width} {'is' if one else 'are'} not summed"
    return None


def shared_scales(wrong: Wrong) -> str | None:
    """Activation scales that are another token's, such as one for each chunk of a prompt."""
    x, theirs = wrong.inputs[0][:ROWS], wrong.theirs[:ROWS]
    rows = _some_rows(wrong, x)
    if rows is None or not op.reads_codes(wrong.matrix, wrong.dialect):
        return None
    _, matrix, bias, scale = rows
    product = (theirs[:, : len(matrix)] - bias) / scale
    steps = spec.quantize(x)[1][:, 0]
    owner = np.empty(len(x), int)
    for t in range(len(x)):
        rescaled = np.clip(np.rint(x[t] * steps[:, None]), -128, 127) / steps[:, None] @ matrix.T  # [T, n]: by each token's scale
        away = ((rescaled - product[t]) ** 2).sum(axis=1)
        owner[t] = t if away[t] <= matched(wrong.noise) * (product[t] ** 2).sum() else int(away.argmin())
        if away[owner[t]] > matched(wrong.noise) * (product[t] ** 2).sum():
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
    if columns.size > FEW:
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
