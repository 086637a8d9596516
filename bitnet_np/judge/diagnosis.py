"""Diagnosis of one operation from its wrong numbers alone, where no known mistake makes all of them.

A mistake with a number in it (a base, positions, a width that a loop stops at) cannot be on a list: here it is read off the data. Each clue
is checked on all that it claims to explain before it is reported.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .. import spec, widen
from ..dialects import Dialect
from ..model import Linear, Model, Ternary
from ..traces.points import Key
from . import operations as op
from .graph import FIELDS, Operation
from .mistakes.mistake import Cause
from .roundings import DIGITS, to_digits, to_float16

Array = NDArray[np.float64]

_SURE = 1e-6  # NMSE left by a clue that explains: float32 noise, squared, with room for a flipped code
_NOISY = 8  # times the noise: a mistake's own roundings are not those of the right operation
_FEW = 4  # columns, or listed numbers
_ROWS = 64  # tokens looked at
_OUTPUTS = 64  # columns of a product looked at
_FOLLOWED = 8  # tokens whose sums are followed input by input


def permuted(theirs: Array, value: Array, noise: float = 0.0) -> bool:
    """Whether a row has the right numbers in another order."""
    rough = 4 * _rough(noise)
    size = float(np.abs(value).max())
    return bool(np.allclose(np.sort(theirs, axis=1), np.sort(value, axis=1), rtol=max(1e-4, rough), atol=max(1e-6, rough * size)))


def _cause(id: str, text: str | None) -> Cause | None:
    """The cause `read.<id>` with this text; None without a text."""
    return None if text is None else Cause(text, f"read.{id}")


def overwritten(key: Key, raw: Mapping[Key, NDArray], order: list[Key]) -> Cause | None:
    """The cause, if the tensor has the numbers of a later one of the dump: its buffer was written to again before it was dumped."""
    numbers = raw[key]
    for other in order[order.index(key) + 1 :]:
        if other in raw and raw[other].size == numbers.size and not other.name.endswith(("_codes", "_scale")):
            theirs = raw[other]
            if np.array_equal(numbers[:1].ravel(), theirs[:1].ravel()) and np.array_equal(numbers.ravel(), theirs.ravel()):
                place = other.name if other.layer is None else f"layer {other.layer} {other.name}"
                return _cause("overwritten", f"it has the numbers of {place}: its buffer was written to again before it was dumped")
    return None


def rounded(theirs: Array, value: Array) -> Cause | None:
    """The cause, if all numbers are of a narrow float type and right but for that. Zeros and whole numbers do not count."""
    informative = (theirs != 0) & (theirs != np.rint(theirs))
    if informative.sum() < 32:
        return None
    for kind, digits in DIGITS.items():
        if (to_digits(theirs, digits) == theirs).all():
            if ((theirs - value) ** 2).sum() <= (2.0 ** (1 - digits)) ** 2 * (value**2).sum():
                return _cause("rounded", f"its numbers are rounded to {kind}, and right but for that")
            return None
    return None


def local(
    model: Model,
    dialect: Dialect,
    operation: Operation,
    inputs: list[Array],
    value: Array,
    theirs: Array,
    wrong: NDArray[np.bool_],
    noise: float = 0.0,
) -> Cause | None:
    """The cause that the places of wrong numbers show, or what was done to the inputs.

    wrong: True for each wrong element, [T, width]. noise: NMSE that narrow types make by themselves, 0 in float32.
    """
    rows, columns = np.flatnonzero(wrong.any(axis=1)), np.flatnonzero(wrong.any(axis=0))
    if rows.size == 0:
        return None
    if wrong.sum() == 1:
        return _cause("one_number", f"one number alone is wrong: position {rows[0]}, element {columns[0]}")
    name, n = operation.key
    if columns.size < value.shape[1] and not theirs[:, columns].any():
        verb = "are" if columns.size > 1 else "is"
        return _cause("never_written", f"{_runs('element', columns)} of each position {verb} 0: never written")
    if name in FIELDS and n is not None:
        linear = getattr(model.layers[n], FIELDS[name])
        if columns.size <= _FEW:
            return _cause("misread", _misread(linear, dialect, inputs[0], theirs, columns))
        cut_short = _cause("cut_short", _cut_short(linear, dialect, inputs[0], theirs, noise))
        return cut_short or _cause("shared_scales", _shared_scales(linear, dialect, inputs[0], theirs, noise)) or _places(wrong)
    if name == "result_output":
        seen = to_float16(inputs[0]) if dialect.halves else inputs[0]
        return _cause("cut_short", _cut_short(Linear(model.head, model.output_bias), dialect, seen, theirs, noise)) or _places(wrong)
    if name in ("Qcur_rope", "Kcur_rope"):
        return _cause("rotation", _wrong_rotation(model, inputs[0], theirs, noise)) or _places(wrong)
    if name == "kqv_out":
        q, k, v = (to_float16(x) if dialect.halves else x for x in inputs)
        heads = _cause("heads", _other_heads(model, operation.key, q, k, v, theirs, noise))
        return heads or _cause("values", _foreign_values(model, operation.key, q, k, v, theirs, wrong, noise)) or _places(wrong)
    return _places(wrong)


def _places(wrong: NDArray[np.bool_]) -> Cause | None:
    rows, columns = np.flatnonzero(wrong.any(axis=1)), np.flatnonzero(wrong.any(axis=0))
    if columns.size <= _FEW < wrong.shape[1]:
        return _cause("places", f"only {_listed('element', columns)} of each position: the rest of the tensor is right")
    if rows.size <= max(1, len(wrong) // 4):
        return _cause("places", f"only {_listed('position', rows)}: the other {len(wrong) - rows.size} are right")
    return None


def _listed(what: str, numbers: NDArray) -> str:
    more = f" and {numbers.size - _FEW} more" if numbers.size > _FEW else ""
    return f"{what}{'s' * (numbers.size > 1)} {', '.join(map(str, numbers[:_FEW]))}{more}"


def _in_runs(numbers: NDArray) -> list[str]:
    """Whole numbers as runs of successive ones: 0 to 7, 12."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [f"{run[0]} to {run[-1]}" if run.size > 1 else f"{run[0]}" for run in runs]


def _runs(what: str, numbers: NDArray) -> str:
    """The noun, and the first runs of the numbers: elements 0 to 7, 12."""
    runs = _in_runs(numbers)
    more = f" and {len(runs) - _FEW} runs more" if len(runs) > _FEW else ""
    return f"{what}{'s' * (numbers.size > 1)} {', '.join(runs[:_FEW])}{more}"


def _explained(computed: NDArray, theirs: NDArray, noise: float) -> bool:
    """Whether the numbers that a clue computes from the inputs are theirs."""
    return bool((np.abs(computed - theirs) ** 2).sum() <= matched(noise) * (np.abs(theirs) ** 2).sum())


def matched(noise: float) -> float:
    """The NMSE up to which numbers are explained, where narrow types make `noise` by themselves."""
    return max(_SURE, _NOISY * noise)


def _rough(noise: float) -> float:
    """The relative error of single numbers."""
    return max(1e-7, noise**0.5)


# --- matrices -------------------------------------------------------------------------------------------------------------------------


def _some_rows(linear: Linear, dialect: Dialect, x: Array) -> tuple[Array, Array, Array, float] | None:
    """The input of a product [T, M], first rows of its matrix [n, M], their biases [n], its scale; None where a dialect rounds inputs."""
    weights, scale = linear.weights, 1.0 if linear.scale is None else float(linear.scale)
    n = min(_OUTPUTS, linear.shape[0])
    bias = np.zeros(n) if linear.bias is None else linear.bias[:n].astype(np.float64)
    if op.reads_codes(linear, dialect):
        q, step = spec.quantize(x)
        x = q / step
    elif dialect.ggml_activations:
        return None
    if isinstance(weights, Ternary):
        return x, op.dense(weights)[:n].astype(np.float64), bias, scale * float(weights.scale)
    return x, widen.take(weights, np.arange(n)).astype(np.float64), bias, scale


def _cut_short(linear: Linear, dialect: Dialect, x: Array, theirs: Array, noise: float) -> str | None:
    """The inputs that a sum leaves out at its end or beginning, as a loop over whole vectors does that forgets the rest."""
    rows = _some_rows(linear, dialect, x)
    if rows is None:
        return None
    inputs, matrix, bias, scale = rows
    product = (theirs[:, : len(matrix)] - bias) / scale
    width = matrix.shape[1]
    late, early = np.zeros(width), np.zeros(width)  # squared errors of sums that stop behind each input, or begin behind it
    for token in np.argsort(-np.abs(product - inputs @ matrix.T).sum(axis=1))[:_FOLLOWED]:  # several: inputs of one may be 0
        sums = np.cumsum(inputs[token] * matrix, axis=1)  # [n, M]
        late += ((sums - product[token][:, None]) ** 2).sum(axis=0)
        early += ((sums[:, -1:] - sums - product[token][:, None]) ** 2).sum(axis=0)
    ends, begins = int(late.argmin()) + 1, int(early.argmin()) + 1
    for part, missing in ((slice(0, ends), (ends, width)), (slice(begins, None), (0, begins))):
        if missing[0] < missing[1] and _explained(inputs[:, part] @ matrix[:, part].T, product, noise):
            one = missing[1] - missing[0] == 1
            return f"{_runs('input', np.arange(*missing))} of {width} {'is' if one else 'are'} not summed"
    return None


def _shared_scales(linear: Linear, dialect: Dialect, x: Array, theirs: Array, noise: float) -> str | None:
    """Activation scales that are another token's, such as one for each chunk of a prompt."""
    rows = _some_rows(linear, dialect, x[:_ROWS])
    if rows is None or not op.reads_codes(linear, dialect):
        return None
    _, matrix, bias, scale = rows
    x, product = x[:_ROWS], (theirs[:_ROWS, : len(matrix)] - bias) / scale
    steps = spec.quantize(x)[1][:, 0]
    owner = np.empty(len(x), int)
    for t in range(len(x)):
        rescaled = np.clip(np.rint(x[t] * steps[:, None]), -128, 127) / steps[:, None] @ matrix.T  # [T, n]: by each token's scale
        away = ((rescaled - product[t]) ** 2).sum(axis=1)
        owner[t] = t if away[t] <= matched(noise) * (product[t] ** 2).sum() else int(away.argmin())
        if away[owner[t]] > matched(noise) * (product[t] ** 2).sum():
            return None
    if (owner == np.arange(len(x))).all():
        return None
    cuts = np.flatnonzero(np.diff(owner)) + 1
    runs = [run for run in np.split(np.arange(len(x)), cuts) if run.size > 1]
    if runs:
        shared = ", ".join(f"{run[0]} to {run[-1]}" for run in runs[:_FEW])
        return f"one activation scale serves several tokens, such as all of a chunk, instead of one for each: positions {shared}"
    t = int((owner != np.arange(len(x))).argmax())
    return f"activation scales are another token's: position {t} has that of position {owner[t]}"


def _misread(linear: Linear, dialect: Dialect, x: Array, theirs: Array, columns: NDArray) -> str:
    """The block of a row of weights that was read from elsewhere, if one was. Products of int8 codes show it: they are integers."""
    somewhere = f"only {_listed('element', columns)} of each position: rows of the weights are misread, the others are right"
    weights = linear.weights
    if not isinstance(weights, Ternary) or not op.reads_codes(linear, dialect):
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


# --- positions ------------------------------------------------------------------------------------------------------------------------


def _wrong_rotation(model: Model, x: Array, theirs: Array, noise: float) -> str | None:
    """The positions or frequencies that pairs were rotated by, where they are not the tokens' or the model's."""
    c = model.config
    first, second = op.pair_slices(c)
    before, after = (a.reshape(len(a), -1, c.head_dim)[:_ROWS] for a in (x, theirs))
    before, after = (a[..., first] + 1j * a[..., second] for a in (before, after))  # [T, heads, J]
    turn = (after * before.conj()).sum(axis=1)
    size = np.abs(before * after).sum(axis=1)
    if np.abs(turn).sum() < 0.999 * size.sum() or not np.isclose(np.abs(before).sum(), np.abs(after).sum(), rtol=1e-3):
        return None  # heads are turned by different angles, or not turned but changed
    turn /= np.maximum(np.abs(turn), 1e-300)

    def explains(angle: Array) -> bool:
        return _explained(before * np.exp(1j * angle)[:, None], after, noise)

    frequency = model.rope_frequency
    used = _positions(turn, size, frequency)
    if explains(np.multiply.outer(used, frequency)):
        return f"positions are {_sequence(used)} instead of 0 to {len(x) - 1}"
    fitted = _frequencies(turn)
    if fitted is None or not explains(np.multiply.outer(np.arange(len(turn)), fitted)):
        return None
    still = fitted < 1e-3 * frequency
    if still.any() and not still.all():
        return f"{_runs('pair', np.flatnonzero(still))} of each head are not rotated"
    return _base(model, fitted, _rough(noise)) or _listed_frequencies(fitted, frequency)


def _positions(turn: NDArray, size: Array, frequency: Array) -> NDArray[np.int64]:
    """The position of each token whose rotation is nearest to the one it was given, from -1 to twice as many as there are."""
    candidates = np.arange(-1, 2 * len(turn) + 2)
    near = np.exp(1j * np.multiply.outer(candidates, frequency))  # [P, J]
    return candidates[((turn * size) @ near.conj().T).real.argmax(axis=1)]


def _sequence(numbers: NDArray[np.int64]) -> str:
    """Positions, some of them repeated: 0 to 7, 0 to 7, 0, 0."""
    runs = _in_runs(numbers)
    return ", ".join(runs[: 2 * _FEW]) + (", ..." if len(runs) > 2 * _FEW else "")


def _frequencies(turn: NDArray) -> Array | None:
    """Radians per position of each pair: the angle of position 1, made more precise by each later one."""
    if len(turn) < 2:
        return None
    frequency = np.angle(turn[1])
    for t in range(2, len(turn)):
        angle = np.angle(turn[t])
        frequency = (angle + 2 * np.pi * np.rint((t * frequency - angle) / (2 * np.pi))) / t
    return frequency


def _base(model: Model, measured: Array, rough: float) -> str | None:
    """The base whose powers the frequencies are, if they are a geometric series but for the model's own factors."""
    c = model.config
    if len(measured) < 3 or (measured <= 0).any():
        return None
    model_base = c.rope_base ** (-np.arange(len(measured)) / len(measured))
    series = np.log(measured / model.rope_frequency * model_base)  # the model's factors and scaling divided out
    weight = np.minimum(measured / (10 * rough), 1e3)  # angles are known to about `rough`, so logarithms of small ones are not
    slope, start = np.polyfit(np.arange(len(measured)), series, 1, w=weight)
    if np.abs(weight * (slope * np.arange(len(measured)) + start - series)).max() > 3:
        return None
    base, factor = float(f"{np.exp(-slope * len(measured)):.4g}"), float(np.exp(start))
    same = np.isclose(base, c.rope_base, rtol=2e-3)
    shift = -np.log(factor) * len(measured) / np.log(c.rope_base)
    if same and abs(shift) > 0.5 and abs(shift - np.rint(shift)) < 1e-3:
        return f"pair i of a head is turned by the frequency of pair i {'-+'[int(shift > 0)]} {abs(np.rint(shift)):.0f}"
    if not np.isclose(factor, 1, rtol=1e-3):
        return f"frequencies are {factor:.4g} times what they should be" + ("" if same else f", and their base is about {base:.10g}")
    exponent = np.log(base) / np.log(c.rope_base)
    return f"the frequency base is about {base:.10g} instead of {c.rope_base:g}, or the exponent is {exponent:.4g} times what it should be"


def _listed_frequencies(measured: Array, frequency: Array) -> str:
    ratio = measured / frequency
    off = np.flatnonzero(np.abs(ratio - 1) > 1e-3 + 1e-6 / np.abs(frequency))
    if not off.size:
        return "frequencies are nearly, but not quite, what they should be"
    return f"frequencies are wrong: that of {_listed('pair', off)} is {ratio[off[0]]:.4g} times what it should be, for the first of them"


# --- attention ------------------------------------------------------------------------------------------------------------------------


def _other_heads(model: Model, key: Key, q: Array, k: Array, v: Array, theirs: Array, noise: float) -> str | None:
    """The first query head that reads another key-value head than its own, if that explains the numbers."""
    c = model.config
    t = min(len(q), _ROWS)
    q, out = (x[:t].reshape(t, c.heads, c.head_dim) for x in (q, theirs))
    k, v = (x[:t].reshape(t, c.kv_heads, c.head_dim) for x in (k, v))
    mask = spec.causal_mask(t, t, window=c.window_of(key.layer or 0))
    heads_read = []
    for h in range(c.heads):
        how = c.attention_scale, c.score_cap
        outputs = [spec.attend(q[:, [h]], k[:, [g]], v[:, [g]], mask, *how)[:, 0] for g in range(c.kv_heads)]
        heads_read.append(next((g for g in range(c.kv_heads) if _explained(outputs[g], out[:, h], noise)), -1))
    off = np.flatnonzero(np.array(heads_read) != np.arange(c.heads) // (c.heads // c.kv_heads))
    if not off.size or min(heads_read) < 0:
        return None
    h = int(off[0])
    first = f"query head {h} reads key-value head {heads_read[h]} instead of {h // (c.heads // c.kv_heads)}"
    return first + (f", and {off.size - 1} more read wrong ones" if off.size > 1 else "")


def _foreign_values(
    model: Model, key: Key, q: Array, k: Array, v: Array, theirs: Array, wrong: NDArray[np.bool_], noise: float
) -> str | None:
    """Values of elsewhere in attention's sums: the rank of what this sequence's values do not span is their number.

    Only the first tokens are looked at, fewer than a head is wide: any numbers are sums of as many values as that.
    """
    c = model.config
    t = min(len(v), c.head_dim - 2)
    if t < 2 or not wrong[:t].any():
        return None
    cut = v[:t].reshape(t, c.kv_heads, c.head_dim)
    out = theirs[:t].reshape(t, c.heads, c.head_dim)
    ranks, hidden, most_outside = [], False, 0.0
    for head in range(c.heads):
        values, sums = cut[:, head // (c.heads // c.kv_heads)], out[:, head]
        largest = np.abs(sums).max()
        least = max(1e-3, 8 * _rough(noise)) * largest
        outside = _outside(values, sums)
        most_outside = max(most_outside, float(np.abs(outside).max() / max(largest, 1e-300)))
        ranks.append(int((np.linalg.svd(outside, compute_uv=False) > least).sum()))
        hidden |= any(np.abs(_outside(values[: i + 1], sums[i])).max() > least for i in range(t))
    most = max(ranks)
    if most == 0:
        return _wrong_weights(model, key, q[:t], k[:t], cut, out, hidden)
    if most_outside < _COARSE:
        return f"values, or sums of them, are rounded: a part of {most_outside:.1g} is no sum of this sequence's values"
    if t < len(v):  # these tokens may have read later ones
        return "values are summed that a token must not see, or that are not of this sequence: the mask, or a cache slot of another"
    if min(ranks) == 0 or most >= min(t, c.head_dim - t):
        return None
    return f"values that are not of this sequence are summed too, {most} of them: a cache slot that was not cleared, or another's"


_COARSE = 0.02  # of the largest number: what codes of 7 bits and more leave


def _outside(values: Array, sums: Array) -> Array:
    """The part of sums [.., K] that is outside the span of values [n, K]."""
    basis, size, _ = np.linalg.svd(values.T, full_matrices=False)
    basis = basis[:, size > 1e-9 * size[0]]
    return sums - sums @ basis @ basis.T


def _wrong_weights(model: Model, key: Key, q: Array, k: Array, v: Array, out: Array, hidden: bool) -> str:
    """The fault of the weights, where outputs [t, H, K] are sums of the right values [t, G, K]."""
    c = model.config
    t, shared = len(v), c.heads // c.kv_heads
    scores, _ = op.scores(model, q, k)  # [H, t, t]
    mask = spec.causal_mask(t, t, window=c.window_of(key.layer or 0))
    right = np.exp(scores + mask - (scores + mask).max(axis=-1, keepdims=True))
    right /= right.sum(axis=-1, keepdims=True)
    flat = v.reshape(t, -1)
    first = (np.abs(flat[:, None] - flat).max(axis=-1) <= 1e-5 * np.abs(flat).max()).argmax(axis=1)  # repeated tokens have equal values
    distinct = np.unique(first)
    members = (first[:, None] == distinct).astype(np.float64)  # [t, u]
    v, right, visible = v[distinct], right @ members, (mask == 0) @ members
    scores = np.where(mask == 0, scores, 0) @ members  # where one of equal values is visible: its own
    weights = np.stack([np.linalg.lstsq(v[:, h // shared].T, out[:, h].T, rcond=1e-6)[0].T for h in range(c.heads)])  # [H, t, u]
    known = all(np.linalg.matrix_rank(v[:, g], 1e-4 * np.abs(v[:, g]).max()) == len(v) for g in range(c.kv_heads))
    if known:
        finding = _reads(weights, right, visible > 0, distinct)
        if finding is not None:
            return finding
    elif hidden:
        return "values are summed that a token must not see: the mask, or a cache that holds another sequence's"
    if known and (away := float(np.abs(weights - right).max())) < _COARSE:
        return f"attention's weights are right to {away:.1g}: scores or probabilities are rounded, or the exponential is coarse"
    sums = weights.sum(axis=-1)
    off = np.abs(sums - 1) > _COARSE
    if off.any():
        low, high = sums[off].min(), sums[off].max()
        why = "empty slots or a sink are counted" if high < 1 else "they are not divided by their sum, or outputs are not cleared before"
        return f"attention's weights add up to {low:.3g} to {high:.3g} instead of 1: {why}"
    if known:
        finding = _temperature(weights, scores, visible == 1)
        if finding is not None:
            return finding
    return "sums of the right values with wrong weights: scores or softmax are wrong"


def _reads(weights: Array, right: Array, visible: NDArray[np.bool_], positions: NDArray[np.int64]) -> str | None:
    """The first token that reads what it must not see, or does not read what it must.

    weights, right: [H, t, u]; visible: [t, u], True where token t sees value u; positions: [u], of the values.
    """
    some = np.abs(weights).max(axis=0) > 1e-3
    for i in range(len(visible)):
        ahead = np.flatnonzero(some[i] & ~visible[i])
        if ahead.size:
            where = f"position {i} reads {_runs('position', positions[ahead])}"
            return f"values are summed that a token must not see: {where}; the mask, or a cache that holds another sequence's"
        lost = np.flatnonzero((np.abs(weights[:, i]).max(axis=0) < 1e-2 * right[:, i].max(axis=0)) & (right[:, i].max(axis=0) > 1e-2))
        if lost.size:
            where = f"position {i} does not read {_runs('position', positions[lost])}"
            return f"values are not summed that a token must see: {where}; the mask, or slots of a cache that are lost"
    return None


def _temperature(weights: Array, scores: Array, visible: NDArray[np.bool_]) -> str | None:
    """The common factor of all scores, if one explains these weights."""
    usable = visible & (weights > 1e-3)
    logs = np.log(np.where(usable, weights, 1.0))
    count = np.maximum(usable.sum(axis=-1, keepdims=True), 1)
    x, y = (np.where(usable, a - np.where(usable, a, 0).sum(axis=-1, keepdims=True) / count, 0) for a in (scores, logs))
    factor = float((x * y).sum() / max((x * x).sum(), 1e-300))
    if ((y - factor * x) ** 2).sum() > 1e-4 * (y * y).sum() or abs(factor - 1) < 1e-3:
        return None
    return f"scores are {factor:.5g} times what they should be"
