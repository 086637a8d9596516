"""Wrong attention, head by head: the heads that are read, and values, weights and scores solved for."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...base.errors import listed
from ..evidence import LITTLE, NEAR, SAME, SAME_LOGARITHMS, SMOOTH, SPARE, explains, nearest_number, rough
from ..law.definition import score_scale
from ..law.expression import Array
from ..words import FEW, instead, least_to_largest, places_of, plain, runs
from .known import known_factors
from .structure import Numbers, loose_structure, pointwise, structure
from .wrong import ROWS, Wrong

Seen = NDArray[np.bool_]

_COARSE = 0.02  # of the largest number: what codes of 7 bits and more leave
_APART, _GAP = 1e-3, 1e-5  # of the largest number: what is between the two is neither there nor not
_CONDITION = 1e3  # of weights: behind worse ones roundings hide the values
WORK = 1 << 28  # multiply-adds of all heads that are tried
_CLEAR = 6  # times what roundings make of a number
_FEW_FOREIGN = 2  # values: later ones that are read are more, where there is no mask
_PARALLEL = 0.1  # of a value: what is left of one that is read
_KNOTS = 33  # between which a function is a line
_MOST, _UNREPEATED = 40, 6  # positions whose weights are solved for; the same, where later tokens repeat earlier ones


class Attention(NamedTuple):
    """The attention of the first tokens of a sequence in one layer."""

    wrong: Wrong  # of these tokens
    scores: Array  # [H, T, T], of all keys
    visible: Seen  # [T, T], True where a token sees a key
    weights: Array  # the right ones, [H, T, T]
    values: Array  # by the heads of queries, [T, H, K]
    queries: Array  # [T, H, K]
    keys: Array  # by the heads of queries, [T, H, K]

    @property
    def theirs(self) -> Array:
        """Their outputs, [T, H, K]."""
        return self.wrong.theirs.reshape(self.values.shape)

    @property
    def seen(self) -> Array:
        """The scores of keys that a token sees, minus infinity for others, [H, T, T]."""
        return np.where(self.visible, self.scores, -np.inf)

    @property
    def shared(self) -> int:
        """The number of query heads that read one key-value head."""
        c = self.wrong.model.config
        return c.heads // c.kv_heads

    def outputs(self, weights: Array) -> Array:
        """The sums of values by weights [H, T, T]: [T, H * K]."""
        return np.einsum("hts,shk->thk", weights, self.values).reshape(len(self.values), -1)

    def head(self, query: int, key: int, value: int) -> Array:
        """The output [T, K] of the queries of one head, and the keys and values of others."""
        c = self.wrong.model.config
        scores = spec.soft_cap(self.queries[:, query] @ self.keys[:, key].T * score_scale(c), c.score_cap)
        return spec.softmax(np.where(self.visible, scores, -np.inf)) @ self.values[:, value]


def attention(wrong: Wrong, most: int = ROWS) -> Attention:
    """The attention of the first tokens, `most` of them."""
    some = wrong.rows(np.arange(min(most, len(wrong.theirs))))
    masked, sums, products = some.step("mask"), some.step("weighted"), some.step("scores")
    assert masked is not None
    assert sums is not None
    assert products is not None
    of_sums, of_products = ([some.steps[node] for node in step.inputs] for step in (sums, products))
    return Attention(some, some.steps[masked.inputs[0]], np.isfinite(some.steps[masked][0]), *of_sums, *of_products)


# --- heads ------------------------------------------------------------------------------------------------------------------------------


def other_heads(wrong: Wrong) -> str | None:
    """The key-value heads that query heads read, or the queries that they have, asked head by head."""
    attended = attention(wrong)
    t, count, size = attended.values.shape
    right, value = np.arange(count), attended.wrong.value.reshape(attended.values.shape)
    off = np.flatnonzero(attended.wrong.places.reshape(attended.values.shape).any(axis=(0, 2)))
    if count * count * t * t * size > WORK or not off.size:
        return None
    shared = attended.shared  # the first query head of each key-value head stands for it
    kinds = (
        ("query heads read other key-value heads", shared, lambda h, other: (h, other, other)),
        ("query heads read the keys of other heads", shared, lambda h, other: (h, other, h)),
        ("query heads read the values of other heads", shared, lambda h, other: (h, h, other)),
        ("heads have the queries of others", 1, lambda h, other: (other, h, h)),
    )
    for words, per, of in kinds:
        found = right.copy()
        for h in off:
            fits = (o for o in right[::per] if wrong.explains(attended.head(*of(h, o)), attended.theirs[:, h], value[:, h]))
            found[h] = next(fits, -1)
            if found[h] < 0:
                break
        else:
            theirs, ours = (", ".join(map(str, x[: 4 * FEW] // per)) for x in (found, right))
            return f"{words}: {theirs} instead of {ours}"
    return None


# --- values -----------------------------------------------------------------------------------------------------------------------------


def wrong_values(wrong: Wrong) -> str | None:
    """What the values have in common with the right ones, or the positions of other ones, if the weights are right."""
    attended = attention(wrong)
    t, _, size = attended.values.shape
    weights, outputs = (
        attended.weights.reshape(-1, attended.shared * t, t),
        attended.theirs.swapaxes(0, 1).reshape(-1, attended.shared * t, size),
    )
    if len(wrong.theirs) > t:
        return None

    def sums_of(values: Array) -> Array:  # [T, G, K]
        return attended._replace(values=np.repeat(values, attended.shared, axis=1)).outputs(attended.weights)

    right = attended.values[:, :: attended.shared]
    theirs = (np.linalg.pinv(weights) @ outputs).swapaxes(0, 1) if np.linalg.cond(weights).max() <= _CONDITION else right  # [T, G, K]
    sums = sums_of(theirs)
    if not wrong.accounts(sums):
        design = weights[..., None] * right.swapaxes(0, 1)[:, None]  # [G, h T, T, K], for one number for each value of each head
        design = design.swapaxes(2, 3).reshape(len(weights), -1, t)
        theirs = right * (np.linalg.pinv(design) @ outputs.reshape(len(outputs), -1, 1)).swapaxes(0, 1)
        sums = sums_of(theirs)
        if not wrong.accounts(sums):
            return None
    off = np.flatnonzero((np.abs(theirs - right) > 1e-3 * np.abs(right).max()).any(axis=(1, 2)))
    noise = 0.0 if explains(sums, wrong.theirs, wrong.value, 0.0) else wrong.noise
    numbers = Numbers(theirs, right, ("position", "head", "element"), noise)
    text = structure(numbers)
    if text is None:
        text = structure(Numbers(theirs.reshape(t, -1), right.reshape(t, -1), ("position", "element"), noise))
    if text is None and 0 < 4 * off.size <= t and 2 * off.size <= wrong.wrong_rows.size:  # any row is right with some value of its own
        text = f"those of {runs('position', off)} are others"
    text = text or known_factors(numbers, wrong) or loose_structure(numbers)
    return text and f"values: {text}; weights are right"


def foreign_values(wrong: Wrong) -> str | None:
    """Values of elsewhere in attention's sums: the rank of what this sequence's values do not span is their number.

    Only the first tokens are looked at, fewer than a head is wide: any numbers are sums of as many values as that.
    """
    c = wrong.model.config
    attended = attention(wrong, c.head_dim - 2)
    t = len(attended.values)
    if t < 2 or not attended.wrong.places.any():
        return None
    outside, ranks, doubtful = _ranks_outside(attended)
    if ranks.max() == 0:
        return _loosely(attended)
    is_noise = 2 * doubtful.min() >= min(t, c.head_dim - t)  # few values of elsewhere have few ranks
    if (part := float(np.abs(outside).max())) < _COARSE and is_noise:
        more = "" if attended.wrong.is_nearly_right else "; that is not all: weights, or the scale of values, are wrong, too"
        why = "these, or their sums, are rounded, or others have small weights"
        return f"a part of {part:.1g} is no sum of the values that tokens see: {why}{more}"
    which, first = "values that are not of this sequence are summed too", int(wrong.wrong_rows[0])
    if t < len(wrong.theirs):  # these tokens may have read later ones
        fewer = attention(wrong, first + (c.head_dim - first) // 2)
        outside, ranks, doubtful = _ranks_outside(fewer)
        is_few = first > 0 and ranks.max() <= _FEW_FOREIGN and (ranks == doubtful).all()
        if not is_few or _has_later(attention(wrong).values, outside, len(fewer.values)):
            return f"outputs of the first {t} positions are no sums of their values"
        which, t = f"at positions from {first} on {which}", len(fewer.values)
    if (ranks < doubtful).any() or ranks.min() == 0 or ranks.max() >= min(t, c.head_dim - t):
        return None
    return f"{which}, {ranks.max()} of them: a cache slot that was not cleared, of padding, or another's"


def _ranks_outside(attended: Attention) -> tuple[Array, NDArray[np.intp], NDArray[np.intp]]:
    """The part of each head's outputs that is no sum of its values [H, T, K], in units of the largest one; and its rank by head, [H] each:
    of what is clear, and of what may be there."""
    sums = attended.theirs.swapaxes(0, 1)  # [H, T, K]
    outside = np.stack([_outside(values, x) for values, x in zip(attended.values.swapaxes(0, 1), sums, strict=True)])
    outside /= np.maximum(np.abs(sums).max(axis=(1, 2), keepdims=True), 1e-300)
    sizes, noise = np.linalg.svd(outside, compute_uv=False), 8 * rough(attended.wrong.noise)
    clear, possible = ((sizes > max(least, noise)).sum(axis=1) for least in (_APART, _GAP))
    return outside, clear, possible


def _has_later(values: Array, outside: Array, t: int) -> bool:
    """Whether what outputs of the first t tokens have outside of their values may be of a later value of the sequence, [T, H, K]."""
    for own, rest in zip(values.swapaxes(0, 1), outside, strict=True):
        later = _outside(own[:t], own[t:])
        _, size, directions = np.linalg.svd(rest, full_matrices=False)
        found = directions[size > _APART]
        left = np.linalg.norm(later - later @ found.T @ found, axis=1)
        if (left < _PARALLEL * np.linalg.norm(later, axis=1)).any():
            return True
    return False


def _outside(values: Array, sums: Array) -> Array:
    """The part of sums [.., K] that is outside the span of values [n, K]."""
    basis, size, _ = np.linalg.svd(values.T, full_matrices=False)
    basis = basis[:, size > 1e-9 * size[0]]
    return sums - sums @ basis @ basis.T


# --- weights and scores -----------------------------------------------------------------------------------------------------------------


class _Solved(NamedTuple):
    """The weights that outputs are sums of the right values by. Tokens with equal values, such as repeated ones, are one."""

    weights: Array  # [H, T, U]
    spread: Array  # [H, T, U], what roundings of outputs make of them
    right: Array  # [H, T, U]
    distinct: NDArray[np.intp]  # the first token of each value
    is_known: bool  # whether other weights would give other outputs
    ahead: Seen  # [T, U], True where a token reads what it must not see

    @classmethod
    def of(cls, attended: Attention) -> "_Solved":
        flat = attended.values.reshape(len(attended.values), -1)
        first = (np.abs(flat[:, None] - flat).max(axis=-1) <= 1e-5 * np.abs(flat).max()).argmax(axis=1)
        distinct = np.unique(first)
        members = (first[:, None] == distinct).astype(np.float64)  # [T, U]
        values, sums = (x.swapaxes(0, 1) for x in (attended.values[distinct], attended.theirs))
        right, seen = attended.weights @ members, attended.visible @ members > 0  # [T, U]
        for which in (seen, np.ones_like(seen)):  # what a token sees first: fewer unknowns
            weights, spread = np.zeros(right.shape), np.zeros(right.shape)
            for t, some in enumerate(which):
                inverse = np.linalg.pinv(values[:, some].swapaxes(1, 2), rcond=1e-6)  # [H, n, K]
                weights[:, t, some] = np.einsum("hnk,hk->hn", inverse, sums[:, t])
                spread[:, t, some] = rough(attended.wrong.noise) * np.sqrt(np.einsum("hnk,hk->hn", inverse**2, sums[:, t] ** 2))
            if attended.wrong.explains(np.einsum("htu,huk->htk", weights, values), sums, _by_head(attended.wrong.value, sums)):
                break
        is_known = all(np.linalg.matrix_rank(v, 1e-4 * np.abs(v).max()) == len(v) for v in values)
        ahead = (np.abs(weights) > NEAR + _CLEAR * spread).any(axis=0) & ~seen
        return cls(weights, spread, right, distinct, is_known, ahead)


def _by_head(x: Array, like: Array) -> Array:  # [T, H * K] -> [H, T, K]
    return x.reshape(len(x), len(like), -1).swapaxes(0, 1)


def wrong_weights(wrong: Wrong) -> str | None:
    """What the scores, or the softmax's sums, have in common with the right ones, if outputs are sums of the right values."""
    most = min(_MOST, wrong.model.config.head_dim - 2)
    attended = attention(wrong, most)
    solved = _Solved.of(attended)
    repeated = np.setdiff1d(np.arange(len(attended.values)), solved.distinct)
    if repeated.size and repeated[0] >= _UNREPEATED:  # the first tokens alone have values of their own
        attended = attention(wrong, int(repeated[0]))
        solved = _Solved.of(attended)
    is_told = solved.is_known and not solved.ahead.any() and len(solved.distinct) == len(attended.values)
    if not is_told or (np.abs(solved.weights - solved.right) < SAME + _CLEAR * solved.spread).all():
        return None
    if not attended.wrong.accounts(attended.outputs(solved.weights)):
        return None
    with np.errstate(all="ignore"):
        return _of_sums(attended, solved) or _of_exponentials(attended, solved) or _of_scores(attended, solved)


def _loosely(attended: Attention) -> str:
    """The fault of weights in general, where outputs are sums of the right values."""
    solved = _Solved.of(attended)
    if solved.is_known:
        if solved.ahead.any():
            i = int(solved.ahead.any(axis=1).argmax())
            where = f"position {i} reads {runs('position', solved.distinct[solved.ahead[i]])}"
            return f"values are summed that a token must not see: {where}; the mask, or a cache that holds another sequence's"
        if (away := float(np.abs(solved.weights - solved.right).max())) < _COARSE:
            return f"attention's weights are right to {away:.1g}: scores or probabilities are rounded, or the exponential is coarse"
    total, sure = solved.weights.sum(axis=-1), np.sqrt((solved.spread**2).sum(axis=-1))
    off = np.abs(total - 1) > _COARSE + _CLEAR * sure
    if off.any():
        return f"attention's weights add up to {least_to_largest(total[off], 3)} instead of 1"
    return "sums of the right values with wrong weights: scores or softmax are wrong"


def _of_sums(attended: Attention, solved: _Solved) -> str | None:
    """What the softmax divides by, where weights are the right ones but for a factor of each row."""
    precision = 1 / (solved.spread**2 + 1e-12)
    square = (solved.right**2 * precision).sum(axis=-1)
    factor, sure = (solved.weights * solved.right * precision).sum(axis=-1) / square, _CLEAR / np.sqrt(square)  # [H, T]
    expected = factor[..., None] * solved.right
    if (np.abs(solved.weights - expected) > _CLEAR * solved.spread + _COARSE / 2 * expected + 1e-6).any():
        return None
    e = np.exp(attended.scores)
    seen = np.where(attended.visible, e, 0).sum(axis=-1)  # [H, T]
    more = seen * (1 / factor - 1)  # [H, T], what stands in the sum beside the keys
    each = np.median(more, axis=1)
    right = seen / (seen + each[:, None])
    is_one = np.abs(factor - right) < 20 * SAME_LOGARITHMS * right * (1 - right) + sure
    if (each > 0).all() and is_one.all() and more.shape[1] > SPARE:
        logits = [f"{x:.4g}" for x in np.round(np.log(each), 5) + 0.0]
        return f"one key more is in the softmax's sum, without a value, as a sink: its scores are {listed(logits, FEW)} by head"
    if (np.ptp(factor, axis=1) < SAME_LOGARITHMS + 2 * sure.max()).all():
        return None  # which the result shows
    mantissa = np.frexp(seen / np.exp(attended.seen.max(axis=-1)))[0].ravel()
    inexact = factor.ravel()[np.argsort(mantissa)]
    is_function = np.square(np.diff(inexact)).mean() < SMOOTH * inexact.var()
    follows = "they follow the mantissa of the softmax's sum, as where its reciprocal is coarse"
    why = follows if is_function else "the softmax's sum is wrong"
    return f"attention's weights add up to {least_to_largest(factor, 3)} instead of 1, and are right but for that: {why}"


def _of_exponentials(attended: Attention, solved: _Solved) -> str | None:
    """What single exponentials have in common with the right ones, where what they are divided by is right."""
    seen = attended.seen
    e = np.exp(seen - seen.max(axis=-1, keepdims=True))
    is_sure = attended.visible & (solved.spread * _CLEAR < LITTLE * solved.right)
    theirs, right = (solved.weights * e.sum(axis=-1, keepdims=True))[is_sure], e[is_sure]
    text = pointwise(Numbers(theirs, right, ("number",), LITTLE**2))
    return text and f"exponentials of scores below the largest: {text}; their sums are right"


def _of_scores(attended: Attention, solved: _Solved) -> str | None:
    """What scores have in common with the right ones, by the logarithms of weights, whose rows they are known of but for a constant."""
    weights = solved.weights
    usable = attended.visible & (weights > LITTLE + 2 * _CLEAR * solved.spread) & (solved.right > LITTLE**2)
    precision = np.where(usable, 1 / np.maximum(solved.spread / np.abs(weights), 1e-6), 0)  # of each logarithm
    square = precision**2
    heads, t = weights.shape[:2]

    def centred(x: Array) -> Array:
        """Numbers [H, T, T] less the mean of each row, times their precision."""
        return (x - (x * square).sum(axis=-1, keepdims=True) / np.maximum(square.sum(axis=-1, keepdims=True), 1e-300)) * precision

    right, theirs = np.where(usable, attended.scores, 0), np.log(np.where(usable, weights, 1))
    error = theirs - right
    before = (centred(error) ** 2).sum()
    distance = np.arange(t)[:, None] - np.arange(t)

    def is_left(left: float, unknowns: int) -> bool:
        spare = int(usable.sum()) - unknowns - heads * t
        enough = usable.sum() > SPARE * unknowns + 8 and spare > unknowns
        return bool(enough and left <= max(SAME * before, min(4 * usable.sum(), 0.01 * before)))

    def fitted(features: Array, target: Array) -> Array | None:
        """The factors [F] of features [F, H, T, T] that give the target, if they leave next to nothing of the error."""
        design, y = np.stack([centred(x)[usable] for x in features], axis=1), centred(target)[usable]
        found: Array = np.linalg.lstsq(design, y, rcond=1e-9)[0].astype(np.float64)
        return found if is_left(float(((y - design @ found) ** 2).sum()), len(features)) else None

    each, near = np.eye(heads)[:, :, None, None], SAME_LOGARITHMS + rough(attended.wrong.noise)
    factors = fitted(each * right, theirs)
    if factors is not None:
        if np.ptp(factors) < 5 * near:
            return f"scores are {factors.mean():.4g} times what is right"
        off = np.flatnonzero(np.abs(factors - 1) > near)
        numbers = listed(list(dict.fromkeys(f"{x:.4g}" for x in factors[off])), FEW)
        return f"scores of {places_of(off, heads, 'head')} are multiplied by {numbers}"
    caps = np.geomspace(0.2, 5, 65) * float(np.abs(right).max())
    cap = nearest_number(lambda cap: float(((centred(spec.soft_cap(right, cap) - theirs)) ** 2).sum()), caps.tolist())
    if cap is not None and is_left(float(((centred(spec.soft_cap(right, cap) - theirs)) ** 2).sum()), 1):
        return f"scores are soft-capped at {plain(cap, near)}"
    so_far = fitted(np.where(usable, np.maximum.accumulate(attended.seen, axis=-1), 0)[None], error)
    if so_far is not None and abs(so_far[0] + 1) < 5 * near:
        return "exponentials are of scores less the largest one so far: sums are not rescaled when that rises"
    slopes = fitted(each * -np.abs(distance).astype(np.float64), error)
    if slopes is not None:
        return f"scores have a bias that grows with distance, as ALiBi: slopes of heads are {listed([f'{x:.4g}' for x in slopes], FEW)}"
    for noun, axis, each_of in (("position", 2, np.eye(t)[:, None, :, None]), ("key", 1, np.eye(t)[:, None, None, :])):
        rows = fitted(each_of * right, theirs)
        if rows is not None:
            off = np.flatnonzero((np.abs(rows - 1) > 5 * near) & (usable.sum(axis=(0, axis)) > heads))
            return f"scores of {runs(noun, off)} are multiplied by {least_to_largest(rows[off])}"
    keys = fitted(np.eye(t)[:, None, None, :] * np.ones(right.shape), error)
    if keys is not None:
        keys -= np.median(keys)
        off = np.flatnonzero(np.abs(keys) > 5 * near)
        return f"a number is added to the scores of {runs('key', off)}, {least_to_largest(keys[off])}"
    is_sure = usable & (solved.spread < SAME_LOGARITHMS * np.abs(weights))
    if (text := _of_keys(attended, np.where(is_sure, error, np.nan))) is not None:
        return text
    if usable.sum() > SPARE * (_KNOTS + heads * t):
        below = right - attended.seen.max(axis=-1, keepdims=True)
        knots = np.linspace(below[usable].min(), 0, _KNOTS)
        hats = np.maximum(1 - np.abs(below - knots[:, None, None, None]) / (knots[1] - knots[0]), 0)
        design, y = np.stack([centred(hat)[usable] for hat in hats], axis=1), centred(error)[usable]
        values = np.linalg.lstsq(design, y, rcond=1e-9)[0]
        if ((y - design @ values) ** 2).sum() <= SMOOTH * before:
            said = [
                f"{instead(np.exp(x + v - values[-1]), np.exp(x), 3)} at {x:.3g}" for x, v in list(zip(knots, values, strict=True))[::-8]
            ]
            return f"the exponentials are another function of scores below the largest: {listed(said[1:], FEW)}"
    if attended.wrong.model.config.score_cap is not None:
        return None
    products = np.einsum("thk,shk->khts", attended.queries, attended.keys) * score_scale(attended.wrong.model.config)
    elements = fitted(products, theirs)
    if elements is None:
        elements = fitted((products[:, None] * each).reshape(-1, *right.shape), theirs)  # of each head
        if elements is None:
            return None
        return f"each element of each head is multiplied by a number of its own in q . k, {least_to_largest(elements, 3)}"
    off = np.flatnonzero(np.abs(elements - 1) > _COARSE)
    which = places_of(off, len(elements), "element")
    if np.abs(elements[off]).max() < _COARSE:
        return f"{which} of each head are left out of q . k"
    return f"{which} of each head are multiplied by {least_to_largest(elements[off], 3)} in q . k"


def _of_keys(attended: Attention, error: Array) -> str | None:
    """The keys of few positions that are others, solved for by the queries of tokens behind them. error: of scores, but for a constant of
    each row, [H, T, T]; NaN where it is not known."""
    c, t = attended.wrong.model.config, len(attended.values)
    is_enough = np.isfinite(error).sum(axis=2, keepdims=True) > SPARE  # for most of a row to be right
    error = np.where(is_enough, error - np.nanmedian(np.where(is_enough, error, 0), axis=2, keepdims=True), np.nan)
    away = np.nanmax(np.abs(error), axis=(0, 1), initial=0)
    off = np.flatnonzero(away > 5 * SAME_LOGARITHMS)
    if c.score_cap is not None or not 0 < SPARE * off.size <= t:
        return None
    keys = attended.keys.copy()
    for s in off:
        for group in np.arange(c.heads).reshape(c.kv_heads, -1):
            of_group = error[group][:, :, s]
            known = np.isfinite(of_group)
            queries = attended.queries.swapaxes(0, 1)[group][known] * score_scale(c)
            if len(queries) < queries.shape[1] + SPARE:
                return None
            keys[s, group] += np.linalg.lstsq(queries, of_group[known], rcond=1e-9)[0]
    scores = np.einsum("thk,shk->hts", attended.queries, keys) * score_scale(c)
    if not attended.wrong.accounts(attended.outputs(spec.softmax(np.where(attended.visible, scores, -np.inf)))):
        return None
    at, (theirs, right) = runs("position", off), (x[:, :: attended.shared] for x in (keys, attended.keys))
    text = structure(Numbers(theirs, right, ("position", "head", "element"), attended.wrong.noise))
    return f"keys: {text or f'those of {at} are others'}; values, and all other keys, are right"
