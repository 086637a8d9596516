"""The cells of a KV cache that each token's attention reads, and how often: solved for, as scores and values are known.

An output is the mean of values by weights m e, where e are exponentials of the right scores, and m counts how often a cell is read: 1
where a token sees it, 0 where not. So m solves sum_s m_s e_s (v_s - output) = 0, one equation for each element of each head. These are
more than there are tokens in most dumps, and m is the one null vector. Masks, lost cells, cells written over and cells counted twice are
all numbers m. What cells hold of other heads, and how much outputs have of each part of a softmax, are solved for alike.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ...traces.points import Key
from ..evidence import NEAR, SAME, SAME_LOGARITHMS, WHOLE, rough
from ..law.definition import score_scale
from ..law.expression import Array, value_of
from ..law.graph import attended as attended_tensor
from ..words import FEW, Indices, moves_in_words, places_of, plain, runs, runs_and_verb
from .attention import Attention, Seen, attention
from .wrong import Wrong

Counts = NDArray[np.int64]

_UNIQUE, _CONDITION = 20, 1e6  # times the least singular value: a null vector that is not alone says nothing; and of what cells hold
_OUTPUTS = 2  # for each unknown


def cells(wrong: Wrong) -> str | None:
    """The cells that are read and must not be, or not read, or read several times, if these alone are wrong in attention."""
    attended = attention(wrong)
    t, heads = attended.values.shape[:2]
    places = attended.wrong.places.reshape(attended.values.shape)
    off, tokens = np.flatnonzero(places.any(axis=(0, 2))), np.flatnonzero(places.any(axis=(1, 2)))
    empty = np.zeros((heads, t, 1))  # behind the tokens' cells one with a key and a value of zeros
    weights = np.exp(np.append(attended.scores, empty, axis=2) - attended.scores.max(axis=-1, keepdims=True))  # [H, T, T + 1], of all cells
    values = np.append(attended.values, np.zeros((1, *attended.values.shape[1:])), axis=0)
    visible, theirs = np.append(attended.visible, np.zeros((t, 1), bool), axis=1), attended.theirs
    counts, known = visible.astype(np.int64), np.ones_like(visible)  # of tokens that are right too
    least = max(SAME, 64 * rough(wrong.noise))
    for i in tokens:
        for n in (t, t + 1):  # the empty cell is one unknown more
            solved = _solve(weights[off, i, :n], values[:n, off], theirs[i, off], visible[i, :n], least)
            if solved is not None:
                counts[i, :n], known[i, :n] = solved
                break
        else:
            return None
    by = np.where(np.isin(np.arange(heads), off)[:, None, None], counts, visible) * weights
    if not attended.wrong.accounts(attended.outputs((by / np.maximum(by.sum(axis=-1, keepdims=True), 1e-300))[:, :, :t])):
        return None
    texts, empties, counts, known = [], counts[:, t], counts[:, :t], known[:, :t]
    is_zero = (empties > 0) & ~counts.any(axis=1)
    if is_zero.any():
        texts.append(f"outputs of {runs('position', np.flatnonzero(is_zero))} are 0: no key is seen")
    empties = np.where(is_zero, 0, empties)
    if empties.all() and np.ptp(empties) == 0:
        texts.append(f"{empties[0]} is added to the softmax's sum of exponentials, as by empty slots whose keys and values are 0")
    elif empties.any():
        slots = "empty slots, whose keys and values are 0, are read by"
        texts.append(f"{slots} {runs('position', np.flatnonzero(empties))}, up to {empties.max()} of them")
    if (counts != attended.visible).any():
        text = _by_distance(counts, known, attended.visible, np.arange(t))
        if text is None and (text := _by_distance(counts, known, attended.visible, tokens)):
            text = f"at {runs('position', tokens)}: {text}"
        texts.append(text or _by_cell(counts, attended.visible))
    return ("" if off.size == heads else f"at {places_of(off, heads, 'head')}: ") + "; ".join(texts) if texts else None


def _solve(weights: Array, values: Array, output: Array, visible: Seen, least: float) -> tuple[Counts, Seen] | None:
    """How often a token reads each cell [n], and where that can be told; None if no whole numbers give its output.

    weights: [H, n]. values: [n, H, K]. output: [H, K]. Where it cannot be told, cells count as they should.
    """
    equations = (weights.T[:, :, None] * (values - output)).reshape(len(visible), -1).T  # [H K, n]
    known = (weights / weights[:, visible].sum(axis=1, keepdims=True)).max(axis=0) > least
    equations = equations[:, known]
    if not known.any() or len(equations) < known.sum():
        return None
    _, sizes, vectors = np.linalg.svd(equations, full_matrices=False)
    if sizes.size > 1 and sizes[-2] < _UNIQUE * sizes[-1]:
        return None
    solved = vectors[-1]
    read = solved[np.abs(solved) > NEAR * np.abs(solved).max()]
    units = (np.median(read), read[np.abs(read).argmin()])  # most cells are read once, or one is
    solved = min((solved / once for once in units), key=lambda x: float(np.abs(x - np.rint(x)).max()))
    whole = np.rint(solved)
    if np.abs(solved - whole).max() > WHOLE or whole.min() < 0:
        return None
    counts = visible.astype(np.int64)
    counts[known] = whole
    return counts, known


def _by_distance(counts: Counts, known: Seen, visible: Seen, tokens: Indices) -> str | None:
    """The distances that these tokens see, if they are more than one and a rule for all of them."""
    t = len(counts)
    if len(tokens) < 2:
        return None
    distance = tokens[:, None] - np.arange(t)
    often, sure, right = counts[tokens], known[tokens], visible[tokens]
    seen = []
    for d in range(-t + 1, t):
        read = often[(distance == d) & sure]
        if read.size and (read.max() > 1 or read.min() < read.max()):
            return None
        if read.any():
            seen.append(d)
    expected = [d for d in range(t) if right[distance == d].any()]
    if seen == expected or not seen:
        return None
    return f"the mask: a token sees {_distances(seen, t)}, not {_distances(expected, t)}"


def _distances(distances: list[int], tokens: int) -> str:
    """What a token sees, by how far it is behind the token, in words."""
    texts = ["itself"] if 0 in distances else []
    for which, numbers in (("before it", [d for d in distances if d > 0]), ("ahead of it", sorted(-d for d in distances if d < 0))):
        if numbers == list(range(1, tokens)):
            texts.append(f"all {which}")
        elif numbers == list(range(1, len(numbers) + 1)):
            texts.append(f"the {f'{len(numbers)} tokens' if numbers[1:] else 'one'} {which}")
        elif numbers:
            texts.append(f"those {runs('', np.array(numbers)).removeprefix('s').strip()} places {which}")
    return " and ".join(texts)


def _by_cell(counts: Counts, visible: Seen) -> str:
    """The cells that are read too often or not at all, and by which tokens; or what each run of tokens reads, if these are few."""
    off = np.flatnonzero((counts != visible).any(axis=1))
    ends = np.flatnonzero((np.diff(off) != 1) | (np.diff(counts[off], axis=0) != 0).any(axis=1)) + 1
    if counts.max() <= 1 and 2 * ends.size + 1 < off.size and ends.size < FEW:
        of = ((runs("position", some), some.size, np.flatnonzero(counts[some[0]])) for some in np.split(off, ends))
        return "; ".join(f"{who} read{'s' * (n == 1)} {runs('cell', read) if read.size else 'nothing'} alone" for who, n, read in of)
    texts = list(_cells_in_words(counts - visible, visible))
    if len(texts) > FEW and (text := _first_seen(counts, visible, np.arange(off[0], off[-1] + 1))):
        return text
    return "; ".join(texts[:FEW]) + (f"; and {len(texts) - FEW} more" if len(texts) > FEW else "")


def _first_seen(counts: Counts, visible: Seen, tokens: Indices) -> str | None:
    """How much too late begins what tokens see, if they see all keys from there to themselves, and it repeats; or the first of them."""
    first, right = (x[tokens].argmax(axis=1) for x in (counts > 0, visible))
    seen = visible[tokens] & (np.arange(len(counts)) >= first[:, None])
    if not np.array_equal(seen, counts[tokens]):
        return None
    late = (first - right).tolist()
    for period in range(1, len(late) // 2 + 1):
        if late[period:] == late[:-period]:
            fewer = f"{', '.join(map(str, late[:period]))} keys fewer{' in turn' * (period > 1)}"
            return f"{runs('position', tokens)} see {fewer} than they should: the first ones are left out, as by a window's mask"
    return None


def _cells_in_words(off: Counts, visible: Seen) -> Iterator[str]:
    """What is wrong with cells, and for which tokens. off: how much too often each token reads each cell, [T, T]."""
    lost, extra = off < 0, off > 0
    yield from _held_in_words(lost, extra)
    yield from _lost_in_words(lost, visible)
    ahead = extra & ~visible & (np.arange(len(off)) > np.arange(len(off))[:, None])
    shown = np.flatnonzero((ahead == np.triu(~visible, 1)).all(axis=0) & ahead.any(axis=0))
    if len(np.unique(ahead.T[ahead.any(axis=0)], axis=0)) > FEW:
        readers, distance = np.flatnonzero(ahead.any(axis=1)), max(s - t for t, s in np.argwhere(ahead))
        is_all = shown.size > 0 and np.array_equal(shown, np.flatnonzero(ahead.any(axis=0)))
        said = f"{runs('position', shown)} are read by all before them: the mask acts on other keys alone"
        yield said if is_all else f"{runs('position', readers)} read tokens ahead of them, up to {distance} ahead: the mask"
        extra &= ~ahead
    for marked, rule in (
        (lost, "not read by {}: the mask, or slots of the cache that are lost"),
        (extra & ~visible, "read by {}, which must not see {them}: the mask"),
        (extra & visible, "read {times} times by {}"),
    ):
        for s in np.flatnonzero(marked.any(axis=0)):
            readers = np.flatnonzero(marked[:, s])
            which = np.flatnonzero((marked == marked[:, [s]]).all(axis=0))
            if which[0] < s:
                continue  # it was said already
            times, them = int(off[np.ix_(readers, which)].max()) + 1, "them" if which.size > 1 else "it"
            yield f"{runs_and_verb('position', which, 'is')} {rule.format(runs('position', readers), times=times, them=them)}"


def _held_in_words(lost: Seen, extra: Seen) -> Iterator[str]:
    """The cells in whose place another one is read once more, and what they hold; takes them out of both."""
    held: list[tuple[list[int], list[int], list[str]]] = []  # runs of cells, the positions that they hold, and who reads them
    for s in np.flatnonzero(lost.any(axis=0)):
        instead = [r for r in range(len(lost)) if r != s and np.array_equal(extra[:, r], lost[:, s])]
        if instead:
            by = runs("position", np.flatnonzero(lost[:, s]))
            lost[:, s] = extra[:, instead[0]] = False
            if not held or held[-1][0][-1] != s - 1 or held[-1][1][-1] != instead[0] - 1:
                held.append(([], [], []))
            held[-1][0].append(int(s))
            held[-1][1].append(instead[0])
            held[-1][2].append(by)
    if len(held) > FEW:
        source = np.arange(len(lost))
        for cells, positions, _ in held:
            source[cells] = positions
        yield f"cells were written over, or their page is another's: {moves_in_words(source, 'position', 'the keys and values')}"
        return
    for cells, positions, by_whom in held:
        one = len(cells) == 1
        of, what = (runs("position", np.array(numbers)) for numbers in (cells, positions))
        where = f" where {by_whom[0]} read {'it' if one else 'them'}" if len(set(by_whom)) == 1 else ""
        why = "it was written over, or its page is another's" if one else "they were written over, or their page is another's"
        yield f"the cell{'' if one else 's'} of {of} hold{'s' if one else ''} {what}{where}: {why}"


def _lost_in_words(lost: Seen, visible: Seen) -> Iterator[str]:
    """The cells that no token reads, or none but themselves, or none from some token on; takes them out of what is lost."""
    t = len(lost)
    since = np.where(lost.any(axis=0), lost.argmax(axis=0), t)  # the first that misses a cell
    is_whole = (lost == (visible & (np.arange(t)[:, None] >= since))).all(axis=0) & (since < t)
    behind = since - np.arange(t)
    kinds = [(behind == 0, "are read by no token: the mask, or slots of the cache that are lost")]
    kinds += [(behind == 1, "are read by themselves alone, by no later ones: they were written over, or never kept")]
    kinds += [
        (since == n, f"are read by no token from position {n} on: they were lost, or written over") for n in np.unique(since[is_whole])
    ]
    for of_kind, rule in kinds:
        cells = np.flatnonzero(is_whole & of_kind & lost.any(axis=0))
        if cells.size > 1 and (lost[:, cells] != lost[:, cells[:1]]).any():  # or one reader's words say it
            yield f"{runs('position', cells)} {rule}"
            lost[:, cells] = False


def other_contents(wrong: Wrong) -> str | None:
    """What stands in the cells before the first wrong position, or in all of them: keys, values or both of another layer, or codes."""
    first, (_, *kv) = int(wrong.wrong_rows[0]), wrong.operation.inputs
    own, border = dict(zip(wrong.operation.inputs, wrong.inputs, strict=True)), first or len(wrong.theirs)
    others: list[tuple[str, dict[Key, Array]]] = []
    for n in (n for n in range(len(wrong.model.layers)) if n != wrong.key.layer and first):
        keys = attended_tensor(wrong.operation.model, "Kcur", n), Key("Vcur", n)
        held = {mine: wrong.tensors[other] for mine, other in zip(kv, keys, strict=True) if other in wrong.tensors}
        others.append((f"those of layer {n}: the cache of another layer is read", held))
    for key, other in ((key, other) for key in kv for other in wrong.tensors if other.layer == wrong.key.layer and other not in kv):
        if wrong.tensors[other].shape == own[key].shape:
            others.append((f"those of {other.place}", {key: wrong.tensors[other]}))
    for words, rule in _CODES.items():
        rows = ((key, own[key].astype(np.float32).reshape(len(own[key]), -1, wrong.model.config.head_dim)) for key in kv)
        others.append((words, {key: rule(x, np.abs(x).max(axis=2, keepdims=True)).reshape(len(x), -1) for key, x in rows}))
    for words, held in others:
        for what, some in (("keys and values", kv), ("keys", kv[:1]), ("values", kv[1:])):
            if all(key in held for key in some):
                wrong.go_on()
                read = {key: np.concatenate([held[key][:border], own[key][border:]]).astype(np.float64) for key in some}
                computed = value_of(wrong.operation.tree, (own | read).__getitem__, len(wrong.theirs))
                if wrong.accounts(np.concatenate([wrong.value[:first], computed[first:]])):
                    return f"{what}{f' of positions before {first}' if first else ''} are {words}"
    return None


_CODES: dict[str, Callable[[NDArray, NDArray], NDArray]] = {
    "int8 codes, without the scale of each token and head": lambda x, most: np.rint(x / np.maximum(most / 127, 1e-30)),
    "int8 codes that are cut, not rounded, by a scale of each token and head": lambda x, most: np.trunc(x / (most / 127)) * (most / 127),
    "int8 codes that are rounded down, by a scale of each token and head": lambda x, most: np.floor(x / (most / 127)) * (most / 127),
}
"""What a cache may hold of rows of heads, by their largest magnitudes, in words."""


# --- what cells hold --------------------------------------------------------------------------------------------------------------------


def held_cells(wrong: Wrong) -> str | None:
    """The keys and values of other heads, or none, that cells hold for all tokens behind them: solved for, head by head."""
    attended, texts = attention(wrong), []
    t, count, width = attended.values.shape
    off = np.flatnonzero(attended.wrong.places.reshape(t, count, width).any(axis=(0, 2)))
    if wrong.model.config.score_cap is not None or not off.size:  # or it is wrong behind the tokens that are looked at
        return None
    first = int(attended.wrong.wrong_rows[0])
    for head in np.unique(off // attended.shared):
        tried = (_held(attended, int(head), border) for border in dict.fromkeys((first, t // 2, t // 4)) if 0 < border < t)
        source = next((x for x in tried if x is not None), None)
        if source is None:
            return None
        texts += _in_words(source, int(head))
    return f"{'; '.join(texts)}{f', for tokens from position {first} on' * (first > 0)}" if texts else None


def _held(attended: Attention, head: int, border: int) -> Indices | None:
    """The key-value head [border] whose key and value each cell before a border holds for a key-value head, -1 for none: those of its
    position. None if that does not give the outputs of all tokens."""
    attended.wrong.go_on()
    group = np.arange(head * attended.shared, (head + 1) * attended.shared)
    keys, values = (x[:, :: attended.shared] for x in (attended.keys, attended.values))  # [T, G, K]
    t, groups, _ = keys.shape
    scores = np.einsum("thk,sgk->htgs", attended.queries[:, group], keys) * score_scale(attended.wrong.model.config)
    scores = np.where(attended.visible[:, None], scores, -np.inf)  # [h, T, G, T]
    largest = np.maximum(scores.max(axis=(2, 3)), 0)  # [h, T], of an empty cell too
    e, empty = np.exp(scores - largest[..., None, None]), np.exp(-largest)
    theirs = attended.theirs[:, group].swapaxes(0, 1)  # [h, T, K]
    each = e[:, border:, :, :border, None] * (values[:border].swapaxes(0, 1) - theirs[:, border:, None, None])  # [h, t, G, S, K]
    nothing = -empty[:, border:, None] * theirs[:, border:]  # [h, t, K]
    later = np.einsum("hts,htsk->htk", e[:, border:, head, border:], values[border:, head] - theirs[:, border:, None])
    design = np.concatenate([each.reshape(*each.shape[:2], -1, each.shape[-1]), nothing[:, :, None]], axis=2).swapaxes(2, 3)
    design = design.reshape(-1, groups * border + 1)
    if len(design) < _OUTPUTS * design.shape[1] or np.linalg.cond(design) > _CONDITION:
        return None
    counts = np.linalg.lstsq(design, -later.ravel(), rcond=None)[0][:-1].reshape(groups, border)
    if np.abs(counts - np.rint(counts)).max() > WHOLE or not np.isin(np.rint(counts).sum(axis=0), (0, 1)).all() or counts.min() < -WHOLE:
        return None
    counts = np.rint(counts)
    source = np.where(counts.any(axis=0), counts.argmax(axis=0), -1)
    if (source == head).all():
        return None
    is_empty = (source < 0) & attended.visible[:, :border]  # [T, S]
    at = np.arange(border)
    weights = np.concatenate([np.where(is_empty, empty[..., None], e[:, :, source, at]), e[:, :, head, border:]], axis=2)  # [h, T, T]
    held = np.concatenate([np.where(source[:, None] < 0, 0, values[at, source]), values[border:, head]])
    computed = weights @ held / weights.sum(axis=-1, keepdims=True)
    right = attended.wrong.value.reshape(attended.values.shape)[:, group].swapaxes(0, 1)
    rows = np.union1d(attended.wrong.wrong_rows, np.arange(border, t))  # earlier ones may have been right before
    return source if attended.wrong.explains(computed[:, rows], theirs[:, rows], right[:, rows]) else None


def _in_words(source: Indices, head: int) -> list[str]:
    """What the cells of a key-value head hold, in words."""
    texts = []
    for holder in np.unique(source[source != head]):
        cells = runs("position", np.flatnonzero(source == holder))
        what = f"hold those of head {holder}" if holder >= 0 else "hold keys and values of 0: never written"
        texts.append(f"the cells of {cells} of key-value head {head} {what}")
    return texts


# --- parts of the softmax ---------------------------------------------------------------------------------------------------------------


def joined_parts(wrong: Wrong) -> str | None:
    """The parts of the keys whose softmaxes are right, and are joined by wrong weights; and the law of these weights."""
    attended = attention(wrong)
    (_, t, _), width = attended.scores.shape, attended.values.shape[2]
    for size in range(t - 1, 1, -1):
        count = -(-t // size)
        if _OUTPUTS * count > width:
            return None
        part = (np.arange(t) // size)[:, None] == np.arange(count)  # [T, P]
        seen = np.where(attended.visible[:, None] & part.T, attended.scores[:, :, None], -np.inf)  # [H, T, P, T]
        largest = np.nan_to_num(seen.max(axis=-1, keepdims=True), neginf=0.0)
        e = np.exp(seen - largest)
        sums = e.sum(axis=-1, keepdims=True)  # 0 where a token sees nothing of a part
        outputs = np.einsum("htps,shk->htpk", e / np.maximum(sums, 1e-300), attended.values)
        theirs = attended.theirs.swapaxes(0, 1)[..., None]  # [H, T, K, 1]
        weights = np.linalg.pinv(outputs.swapaxes(2, 3)) @ theirs  # [H, T, P, 1]
        mixed = (outputs * weights).sum(axis=2).swapaxes(0, 1)  # [T, H, K]
        if attended.wrong.accounts(mixed.reshape(attended.wrong.theirs.shape)):
            right = np.exp(largest - largest.max(axis=2, keepdims=True)) * sums
            off = np.abs(weights - right / right.sum(axis=2, keepdims=True)).max()
            if off < WHOLE or np.abs(weights.sum(axis=2) - 1).max() > WHOLE:
                return None  # values, or the sums of weights, are wrong, whatever parts there are
            law = _law_of_weights(*(x[..., 0] for x in (weights, largest, sums)))
            return f"the softmax is computed in parts of {size} keys, and these are joined by wrong weights{law}"
    return None


def _law_of_weights(weights: Array, largest: Array, sums: Array) -> str:
    """What the weights [H, T, P] of parts have from their largest scores and their sums, in words, if that is all of them."""
    known = (sums > 0) & (weights > WHOLE)
    known &= known.sum(axis=-1, keepdims=True) > 1
    mean = lambda x: np.where(known, x, 0).sum(axis=-1, keepdims=True) / np.maximum(known.sum(axis=-1, keepdims=True), 1)  # noqa: E731
    of_sums = (largest, np.log(np.maximum(sums, 1e-300)), np.maximum.accumulate(largest, axis=-1))
    target, *features = ((x - mean(x))[known] for x in (np.log(weights, where=known, out=0 * weights), *of_sums))
    if target.size < _OUTPUTS**3:
        return ""
    design = np.stack(features, axis=1)
    for count in (2, 3):
        factors = np.linalg.lstsq(design[:, :count], target, rcond=None)[0]
        if ((design[:, :count] @ factors - target) ** 2).sum() <= SAME_LOGARITHMS**2 * max((target**2).sum(), (design**2).sum()):
            break
    else:
        return ""
    if count > 2 and np.abs(factors - (1, 1, -1)).max() < SAME_LOGARITHMS:
        return ": each is less the largest score so far, and not rescaled when that rises"
    names = ("the largest score of each part", "the logarithm of its sum of exponentials")
    texts = [
        f"{name} is {'left out' if abs(x) < SAME_LOGARITHMS else f'multiplied by {plain(float(x), SAME_LOGARITHMS)}'}"
        for name, x in zip(names, factors[:2], strict=True)
        if abs(x - 1) > SAME_LOGARITHMS
    ]
    return f": {', and '.join(texts)}" if texts else ""
