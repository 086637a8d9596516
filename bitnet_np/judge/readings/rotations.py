"""Wrong rotations: the positions and frequencies that they have."""

import numpy as np
from numpy.typing import NDArray

from ...model.records import Model
from .. import operations as op
from .wrong import FEW, ROWS, Array, Wrong, explained, in_runs, numbered, rough, runs


def rotation(wrong: Wrong) -> str | None:
    """The positions or frequencies that pairs were rotated by, where they are not the tokens' or the model's."""
    model, c, noise = wrong.model, wrong.config, wrong.noise
    first, second = op.pair_slices(c)
    before, after = (a.reshape(len(a), -1, c.head_dim)[:ROWS] for a in (wrong.inputs[0], wrong.theirs))
    before, after = (a[..., first] + 1j * a[..., second] for a in (before, after))  # [T, heads, J]
    before = c.rope_magnitude * before
    turn = (after * before.conj()).sum(axis=1)
    size = np.abs(before * after).sum(axis=1)
    if np.abs(turn).sum() < 0.999 * size.sum() or not np.isclose(np.abs(before).sum(), np.abs(after).sum(), rtol=1e-3):
        return None
    turn /= np.maximum(np.abs(turn), 1e-300)

    def explains(angle: Array) -> bool:
        return explained(before * np.exp(1j * angle)[:, None], after, wrong.noise)

    frequency = model.rope_frequency
    used = _positions(turn, size, frequency)
    if (used != np.arange(len(used))).any() and explains(np.multiply.outer(used, frequency)):
        period = int((used == 0)[1:].argmax()) + 1
        if (used == np.arange(len(before)) % period).all():
            return f"positions restart every {period} tokens"
        return f"positions are {_sequence(used)} instead of 0 to {len(before) - 1}"
    fitted = _frequencies(turn)
    if fitted is None or not explains(np.multiply.outer(np.arange(len(turn)), fitted)):
        return None
    still = fitted < 1e-3 * frequency
    if still.any() and not still.all():
        return f"{runs('pair', np.flatnonzero(still))} of each head {'are' if still.sum() > 1 else 'is'} not rotated"
    return _base(model, fitted, rough(noise)) or _listed_frequencies(fitted, frequency)


def _positions(turn: NDArray, size: Array, frequency: Array) -> NDArray[np.int64]:
    """The position of each token whose rotation is nearest to the one it was given, from -1 to twice as many as there are."""
    candidates = np.arange(-1, 2 * len(turn) + 2)
    near = np.exp(1j * np.multiply.outer(candidates, frequency))  # [P, J]
    return candidates[((turn * size) @ near.conj().T).real.argmax(axis=1)]


def _sequence(numbers: NDArray[np.int64]) -> str:
    """Positions, some of them repeated: 0 to 7, 0 to 7, 0, 0."""
    spans = in_runs(numbers)
    return ", ".join(spans[: 2 * FEW]) + (", ..." if len(spans) > 2 * FEW else "")


def _frequencies(turn: NDArray) -> Array | None:
    """Radians per position of each pair: the angle of position 1, made more precise by each later one."""
    if len(turn) < 2:
        return None
    frequency = np.angle(turn[1])
    for t in range(2, len(turn)):
        angle = np.angle(turn[t])
        frequency = (angle + 2 * np.pi * np.rint((t * frequency - angle) / (2 * np.pi))) / t
    return frequency


def _base(model: Model, measured: Array, known: float) -> str | None:
    """The base whose powers the frequencies are, if they are a geometric series but for the model's own factors."""
    c = model.config
    if len(measured) < 3 or (measured <= 0).any():
        return None
    model_base = c.rope_base ** (-np.arange(len(measured)) / len(measured))
    series = np.log(measured / model.rope_frequency * model_base)  # the model's factors and scaling divided out
    weight = np.minimum(measured / (10 * known), 1e3)  # angles are known to about `known`, so logarithms of small ones are not
    slope, start = np.polyfit(np.arange(len(measured)), series, 1, w=weight)
    if np.abs(weight * (slope * np.arange(len(measured)) + start - series)).max() > 3:
        return None
    base = float(f"{np.exp(-slope * len(measured)):.4g}")
    if np.isclose(base, c.rope_base, rtol=2e-3) or abs(start) > 1e-3:
        return None
    exponent = np.log(base) / np.log(c.rope_base)
    return f"the frequency base is about {base:.10g} instead of {c.rope_base:g}, or the exponent is {exponent:.4g} times what it should be"


def _listed_frequencies(measured: Array, frequency: Array) -> str:
    ratio = measured / frequency
    source = np.abs(np.log(np.maximum(measured, 1e-300))[:, None] - np.log(frequency)).argmin(axis=1)
    moved = np.flatnonzero(source != np.arange(source.size))
    if moved.size and np.allclose(measured, frequency[source], rtol=1e-3):
        return f"{runs('pair', moved)} of a head have the frequencies of pairs {', '.join(map(str, source[moved][: 2 * FEW]))}"
    changed = np.flatnonzero(np.abs(ratio - 1) > 1e-3)
    if changed.size > 2 and (np.diff(ratio) <= 1e-3).all() and abs(ratio[0] - 1) < 1e-3:
        how = f"1 to pair {changed[0] - 1}, falling to {ratio[-1]:.4g} at pair {len(ratio) - 1}"
        return f"low frequencies are scaled, as Llama 3 or yarn does: factors are {how}"
    off = np.flatnonzero(np.abs(ratio - 1) > 1e-3 + 1e-6 / np.abs(frequency))
    if not off.size:
        return "frequencies are nearly, but not quite, what they should be"
    return f"frequencies are wrong: that of {numbered('pair', off)} is {ratio[off[0]]:.4g} times what it should be, for the first of them"
