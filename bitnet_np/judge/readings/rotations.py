"""Wrong rotations: the positions and frequencies that they have."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...model.records import Model
from .. import operations as op
from .search import best_number
from .wrong import FEW, ROWS, Array, Wrong, explained, in_runs, numbered, rough, runs


def rotation(wrong: Wrong) -> str | None:
    """The positions or frequencies that pairs were rotated by, where they are not the tokens' or the model's."""
    model, c, noise = wrong.model, wrong.config, wrong.noise
    text = _other_rule(wrong)
    if text is not None:
        return text
    first, second = op.pair_slices(c)
    before, after = (a.reshape(len(a), -1, c.head_dim)[:ROWS] for a in (wrong.inputs[0], wrong.theirs))
    before, after = (a[..., first] + 1j * a[..., second] for a in (before, after))  # [T, heads, J]
    before = c.rope_magnitude * before
    turn = (after * before.conj()).sum(axis=1)
    size = np.abs(before * after).sum(axis=1)
    if np.abs(turn).sum() < 0.999 * size.sum() or not np.isclose(np.abs(before).sum(), np.abs(after).sum(), rtol=1e-3):
        return _by_head(wrong, before, after)
    turn /= np.maximum(np.abs(turn), 1e-300)

    def explains(angle: Array) -> bool:
        return explained(before * np.exp(1j * angle)[:, None], after, wrong.noise)

    frequency = model.rope_frequency
    used = _positions(turn, size, frequency)
    if explains(np.multiply.outer(used, frequency)):
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


def _other_rule(wrong: Wrong) -> str | None:
    """The other rotation that it is: of a part of each head, or with a wrong sign."""
    c = wrong.config
    some = wrong.first(ROWS)
    x = some.inputs[0].reshape(len(some.inputs[0]), -1, c.head_dim)
    position = np.arange(len(x)) / c.rope_scaling
    for text, rotated in _rules(x, position, wrong):
        rotated[..., : 2 * c.rope_pairs] *= c.rope_magnitude
        if some.accounts(rotated.reshape(len(x), -1)):
            return text
    begin = int(some.places.any(axis=1).argmax())
    if begin > 1:  # position 0 is not turned

        def based(part: Wrong, factor: float) -> Array:
            rotated = spec.rope(x, position, c.rope_base * factor, c.rope, c.rope_width, magnitude=c.rope_magnitude)[
                begin : begin + len(part.theirs)
            ]
            return rotated.reshape(len(rotated), -1)

        factor = best_number(some.rows(np.arange(begin, len(x))), based)
        if factor is not None and not np.isclose(factor, 1, rtol=2e-3):
            return f"from position {begin} on the frequency base is about {c.rope_base * factor:.4g} instead of {c.rope_base:g}"
    return None


def _rules(x: Array, position: Array, wrong: Wrong) -> Iterator[tuple[str, Array]]:
    """Yields heads [T, H, K] rotated by other rules, in words."""
    c, own = wrong.config, 2 * wrong.config.rope_pairs
    angle = np.multiply.outer(position * c.rope_scaling, wrong.model.rope_frequency)
    for part in (n for n in dict.fromkeys((c.head_dim, 3 * c.head_dim // 4, c.head_dim // 2, c.head_dim // 4)) if n % 2 == 0):
        if part != own:
            yield f"the first {part} elements of each head are rotated, not {own}", spec.rope(x, position, c.rope_base, c.rope, part)
        if part < own and c.head_dim % part == 0:
            cut = x.reshape(len(x), -1, part)
            narrow = spec.angles(position, c.rope_base, part // 2)
            for turned, frequencies in ((narrow, "those of a head as wide"), (angle[:, : part // 2], "the first of the head's")):
                rotated = spec.rotate(cut, turned, c.rope).reshape(x.shape)
                yield f"each {part} elements of a head are rotated by themselves, with frequencies that are {frequencies}", rotated
    for text, times in (("2 pi", 2 * np.pi), ("pi / 180", np.pi / 180), ("180 / pi", 180 / np.pi)):
        yield f"angles are multiplied by {text}: one unit is taken for another", spec.rotate(x, times * angle, c.rope)
    layout = "adjacent pairs" if c.rope == "halves" else "halves of a head"
    turned = _laid_out(x, angle[:, None], c.rope, *op.pair_slices(c))
    yield f"cosines and sines are laid out for {layout}, but pairs are not", turned


def _laid_out(x: Array, angle: Array, rope: str, first: slice, second: slice) -> Array:
    """Heads [T, H, K] turned by cosines and sines [T, 1, J] that are laid out for the other kind of pairs."""
    pairs = np.arange(2 * angle.shape[-1])  # the pair that each element's angle is laid out for
    pairs = pairs // 2 if rope == "halves" else pairs % angle.shape[-1]
    of_a, of_b = np.split(pairs, 2) if rope == "halves" else (pairs[::2], pairs[1::2])
    a, b, turned = x[..., first], x[..., second], x.copy()
    turned[..., first] = a * np.cos(angle[..., of_a]) - b * np.sin(angle[..., of_a])
    turned[..., second] = b * np.cos(angle[..., of_b]) + a * np.sin(angle[..., of_b])
    return turned


def _by_head(wrong: Wrong, before: NDArray, after: NDArray) -> str | None:
    """The positions by which heads were rotated, where they differ from head to head. before, after: [T, heads, J]."""
    frequency, tokens = wrong.model.rope_frequency, np.arange(len(before))
    turn = after * before.conj()
    used = np.stack([_positions(turn[:, h], np.ones_like(frequency), frequency) for h in range(turn.shape[1])], axis=1)  # [T, heads]
    if not explained(before * np.exp(1j * np.multiply.outer(used, frequency)), after, wrong.noise):
        return None
    still = (used == 0).all(axis=0)
    if ((used == tokens[:, None]) | still).all():
        heads = np.flatnonzero(still)
        return f"{runs('head', heads)} {'are' if heads.size > 1 else 'is'} not rotated"
    if (used == np.arange(used.shape[1])).all():
        return "every token is rotated by the number of the head instead of its position"
    head = int((used != tokens[:, None]).any(axis=0).argmax())
    return f"positions differ from head to head: those of head {head} are {_sequence(used[:, head])} instead of 0 to {len(used) - 1}"


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
    base, factor = float(f"{np.exp(-slope * len(measured)):.4g}"), float(np.exp(start))
    same = np.isclose(base, c.rope_base, rtol=2e-3)
    shift = -np.log(factor) * len(measured) / np.log(c.rope_base)
    if same and abs(shift) > 0.5 and abs(shift - np.rint(shift)) < 1e-3:
        return f"pair i of a head is turned by the frequency of pair i {'-+'[int(shift > 0)]} {abs(np.rint(shift)):.0f}"
    if not np.isclose(factor, 1, rtol=1e-3):
        return f"frequencies are {factor:.4g} times what they should be" + ("" if same else f", and their base is about {base:.10g}")
    if same:
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
