"""Right numbers in other places: rows and columns of a tensor, rows of tables and matrices of the model, products of experts."""

from collections.abc import Callable, Mapping
from math import gcd

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...base.errors import listed
from ...model import widen
from ...model.records import MATRICES
from ...traces.points import TOP_EXPERTS, Key
from ..evidence import FEWEST, LITTLE, NEAR, SPARE, matched, nearest, rough, sources
from ..law import formats
from ..law.definition import NORM_WEIGHT, matrix_of, matrix_product
from ..law.expression import Array, tensor, tensors, value_of
from ..law.graph import OF_EXPERTS, TOKENS
from ..words import FEW, Indices, least_to_largest, moves_in_words, pieces, plain, runs, runs_and_verb
from .wrong import ROWS, Wrong

_ROWS_AT_ONCE = 1 << 14
_TOKENS = 16  # compared
_LARGE = 1 << 24  # numbers of products that are compared with wrong ones
_EXPERTS = {1: "the next expert", -1: "the expert before"}


def rows_of_others(wrong: Wrong) -> str | None:
    """The wrong positions that have the right numbers of another position, or of another tensor, where all others are right."""
    is_narrow = wrong.theirs.shape[1] < FEWEST or len(wrong.theirs) < 2
    return None if is_narrow else _of_others(wrong, np.arange(len(wrong.theirs)), 0)


def columns_of_others(wrong: Wrong) -> str | None:
    """The wrong heads or elements that have the right numbers of another one at every wrong position, are 0, or are left of another tensor,
    where all others are right."""
    rows, text = wrong.wrong_rows, None
    if rows.size >= SPARE:
        text = (_of_others(wrong, rows, wrong.head_dim) if wrong.head_dim > 1 else None) or _of_others(wrong, rows, 1)
    return f"at {runs('position', rows)}: {text}" if text and rows.size < len(wrong.theirs) else text


def _of_others(wrong: Wrong, rows: Indices, size: int) -> str | None:
    """What stands in the wrong positions (size 0), elements (1) or heads of this size of some rows, if that is right elsewhere and explains
    them."""

    def along(x: NDArray) -> NDArray:
        return x[rows].reshape(rows.size, -1, size).swapaxes(0, 1).reshape(x.shape[1] // size, -1) if size else x[rows]

    def back(x: NDArray) -> NDArray:
        return x.reshape(len(x), rows.size, size).swapaxes(0, 1).reshape(rows.size, -1) if size else x

    what, theirs, value = {0: "position", 1: "element"}.get(size, "head"), along(wrong.theirs), along(wrong.value)
    computed, source, texts = value.copy(), np.arange(len(value)), []
    off: NDArray[np.bool_] = np.any(along(wrong.places), axis=1)
    for key, other in wrong.beside():
        near = np.abs(theirs - along(other)) <= max(1e-5, 8 * rough(wrong.noise)) * np.abs(other).max()
        same = np.flatnonzero(near.all(axis=1) & off & theirs.any(axis=1))
        if same.size:
            off[same], computed[same] = False, along(other)[same]
            which = "it has" if same.size == len(value) else runs_and_verb(what, same, "has")
            texts.append(f"{which} the numbers of {key.place}")
    if len(value) == 1:
        return None
    if off.any():
        every = np.append(value, np.zeros((1, value.shape[1])), axis=0)
        found = sources(every, theirs[off], 2 * NEAR * float(np.abs(value).max()))
        if found is None:
            return None
        source[off], computed[off] = found, every[found]
    if not wrong.rows(rows).accounts(back(computed)):
        return None
    zero = np.flatnonzero(source == len(value))
    source[zero] = zero
    if (source != np.arange(len(value))).any():
        texts.insert(0, moves_in_words(source, what))
    if zero.size:
        texts.append(f"{runs_and_verb(what, zero, 'is')} 0")
    return ", and ".join(texts) or None


def added_rows(wrong: Wrong) -> str | None:
    """The tensor whose rows are added to the result, or to the input of a norm, as by a buffer that was not cleared."""
    rows, leaves = wrong.wrong_rows[:ROWS], tensors(wrong.operation.tree)
    error = wrong.theirs[rows] - wrong.value[rows]
    normed, gain = wrong.step("the normed numbers"), wrong.step(NORM_WEIGHT)
    for where in ("the result", "its input"):
        known = error[:, None]
        if where == "its input":
            if len(leaves) != 1 or normed is None or gain is None or np.shape(wrong.steps[gain]) != wrong.theirs.shape[1:]:
                return None
            known = np.stack([wrong.theirs[rows] / wrong.steps[gain], wrong.inputs[0][rows]], axis=1)  # what is added lies in their plane
        plane = np.linalg.qr(known.swapaxes(1, 2))[0]  # [n, D, 1 or 2]
        for key, other in wrong.tensors.items():
            if other.shape[1:] != wrong.theirs.shape[1:] or other.dtype.kind != "f" or key == wrong.key:
                continue
            size = np.linalg.norm(other, axis=1)  # [S]
            along = np.linalg.norm(np.einsum("sd,ndk->nsk", other, plane), axis=2)  # [n, S]
            away = np.sqrt(np.maximum(size**2 - along**2, 0)) / np.maximum(size, 1e-300)
            shifts, often = np.unique(away.argmin(axis=1) - rows, return_counts=True)
            source = rows + shifts[often.argmax()]
            if (
                source.min() < 0
                or source.max() >= len(other)
                or (key in wrong.following and (source == rows).any())  # which was not there yet
                or (where == "the result" and away[np.arange(len(rows)), source].max() > NEAR)
            ):
                continue
            more = np.zeros(wrong.theirs.shape)
            more[rows] = other[source]
            computed = wrong.value + more if where == "the result" else wrong.with_step(leaves[0], wrong.inputs[0] + more)
            if wrong.rows(rows).accounts(computed[rows]):
                of, at = runs("position", source), runs("position", rows)
                return f"{key.place} of {of} is added to {where} at {at}" + ": a buffer that was not cleared" * (of != at)
    return None


def overwritten(key: Key, raw: Mapping[Key, NDArray], order: list[Key], follows: Callable[[Key], bool]) -> str | None:
    """The tensor, if the tensor has the numbers of a later one of the dump: its buffer was written to again before it was dumped.

    follows: whether a later one is what its operation makes of these numbers, as a rotation by position 0 leaves them.
    """
    numbers = raw[key]
    for other in order[order.index(key) + 1 :]:
        if other in raw and raw[other].size == numbers.size and not other.name.endswith(("_codes", "_scale")):
            theirs = raw[other]
            is_same = np.array_equal(numbers[:1].ravel(), theirs[:1].ravel()) and np.array_equal(numbers.ravel(), theirs.ravel())
            if is_same and not follows(other):
                return f"it has the numbers of {other.place}: its buffer was written to again before it was dumped"
    return None


def other_rows(wrong: Wrong) -> str | None:
    """The rows, and the matrix of the layer, whose products stand in wrong outputs, if that explains all of these."""
    columns, operation, own = wrong.wrong_columns, wrong.operation, wrong.operation.linear
    tokens = np.unique(np.linspace(0, len(wrong.theirs) - 1, min(len(wrong.theirs), _TOKENS)).astype(int))
    x = wrong.inputs[0][tokens]
    if not x.any(axis=1).all() or np.linalg.matrix_rank(x, tol=1e-3 * np.linalg.norm(x, 2)) < SPARE:
        return None
    others = {name: getattr(operation.layer, name, None) for name in MATRICES}
    linears = {"": own} | {n: w for n, w in others.items() if w is not None and w is not own and w.shape[1] == own.shape[1]}
    names = np.repeat([*linears], [linear.shape[0] for linear in linears.values()])
    rows = np.concatenate([np.arange(linear.shape[0]) for linear in linears.values()])
    products = [value_of(matrix_product(operation, tensor(TOKENS), linear), lambda key: x, len(x)).T for linear in linears.values()]
    biases = [linear.bias for linear in linears.values()]
    size, every, theirs = np.linalg.norm(x, axis=1), np.concatenate(products), wrong.theirs[np.ix_(tokens, columns)].T
    for with_bias in (True, False):  # of the other row, or the output's own
        if not with_bias:
            every = np.concatenate([y if bias is None else y - bias[:, None] for y, bias in zip(products, biases, strict=True)])
            theirs = theirs if own.bias is None else theirs - own.bias[columns, None]
        found = sources(every / size, theirs / size, NEAR * float(np.abs(theirs / size).max()))
        if found is None or ((every[found] - theirs) ** 2).sum() > matched(wrong.noise) * (theirs**2).sum():
            continue
        row, name, every_row = rows[found], names[found], np.arange(own.shape[0])
        if ((row == columns) & (name == "")).any():
            return None
        of = listed([other for other in dict.fromkeys(name.tolist()) if other])
        if (row == columns).all():
            return f"the weights of {of} are used in the place of {runs('row', columns)}"
        every_row[columns] = row
        return f"weights of other rows are used{of and f', of {of}'}: {moves_in_words(every_row, 'row')}"
    return None


def tokens(wrong: Wrong) -> str | None:
    """The tokens whose rows of the embedding stand at wrong positions, if that explains all of these."""
    rows, table = wrong.wrong_rows, wrong.model.token_embd
    if rows.size > ROWS:
        return None
    theirs, found, least = wrong.theirs[rows], np.zeros(rows.size, np.intp), np.full(rows.size, np.inf)
    for begin in range(0, table.shape[0], _ROWS_AT_ONCE):
        some = widen.take(table, slice(begin, begin + _ROWS_AT_ONCE)).astype(np.float64)
        one = nearest(some, theirs)
        away = ((some[one] - theirs) ** 2).sum(axis=1)
        nearer = away < least
        found[nearer], least[nearer] = begin + one[nearer], away[nearer]
    if not wrong.rows(rows).accounts(widen.take(table, found).astype(np.float64)):
        return None
    every = zip(rows, found, wrong.inputs[0].astype(np.int64)[rows], strict=True)
    texts = [f"position {t} has the row of token {n} instead of {own}" for t, n, own in every if n != own]
    return f"rows of other tokens: {listed(texts, FEW)}" if texts else None


def choices(wrong: Wrong) -> str | None:
    """The rule by which a router has chosen experts: by rounded numbers, of which several are equal, or by the smallest ones."""
    logits, theirs = wrong.inputs[0], np.rint(wrong.theirs)
    numbers = {"probabilities": spec.softmax(logits), "logits": logits}
    rules = [(f"their {what} rounded to {kind}", formats.EACH[kind](x), True) for what, x in numbers.items() for kind in formats.EACH]
    for words, x, has_equal in (*rules, ("the smallest logits", -logits, False), ("the magnitude of logits", np.abs(logits), False)):
        for equal, order in (("first", slice(None)), ("last", slice(None, None, -1))):
            chosen = spec.top_experts(x[:, order], theirs.shape[1])
            if np.array_equal(chosen if equal == "first" else x.shape[1] - 1 - chosen, theirs):
                return f"experts are chosen by {words}" + f", of equal ones the {equal}" * has_equal
    ranks = (np.argsort(-logits, axis=1, kind="stable")[:, None] == theirs[..., None]).argmax(axis=2)  # [T, k]
    off = np.flatnonzero((ranks != np.arange(theirs.shape[1])).any(axis=1))
    if not off.size or (ranks[off] != ranks[off[0]]).any():
        return None
    which, where = ", ".join(str(rank + 1) for rank in ranks[off[0]]), runs("position", off)
    return f"experts {which} in the order of their logits are chosen instead of 1 to {theirs.shape[1]}, at {where}"


def other_choices(wrong: Wrong) -> str | None:
    """Experts that are chosen by no rule that is known."""
    theirs, logits = np.sort(np.rint(wrong.theirs)).astype(np.intp), wrong.inputs[0]
    off = np.flatnonzero((np.sort(np.rint(wrong.value)) != theirs).any(axis=1))
    if off.size >= SPARE:
        never = np.setdiff1d(np.arange(logits.shape[1]), theirs)
        without = np.where(np.isin(np.arange(logits.shape[1]), never), -np.inf, logits)
        if never.size and (np.sort(spec.top_experts(without, theirs.shape[1])) == theirs).all():
            return f"{runs_and_verb('expert', never, 'is')} never chosen: those of the largest logits among the others are"
        for what, x in (("probability", spec.softmax(logits)), ("logit", logits)):
            if (slope := _slope(x, theirs)) is not None:
                return f"the number of each expert times {slope} is added to its {what} before experts are chosen"
    return f"other experts than those of the largest logits are chosen, at {runs('position', off)}" if off.size else None


def _slope(x: Array, chosen: Indices) -> str | None:
    """The number that, times the number of each expert, makes the chosen ones [T, k] those of the largest x [T, E]: each pair of a chosen
    one and another one is a border of it."""
    is_chosen = (chosen[..., None] == np.arange(x.shape[1])).any(axis=1)
    more, apart = x[:, :, None] - x[:, None], np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])
    border = (-more / np.where(apart == 0, 1, apart))[pairs := is_chosen[:, :, None] & ~is_chosen[:, None]]
    is_least = np.broadcast_to(apart > 0, more.shape)[pairs]
    least, most = border[is_least].max(initial=-np.inf), border[~is_least].min(initial=np.inf)
    return plain((least + most) / 2, (most - least) / abs(most + least)) if least < most and least * most > 0 else None


def experts(wrong: Wrong) -> str | None:
    """The experts whose numbers are wrong wherever they are taken; or whose products, of which token, stand in wrong slots."""
    key = Key(TOP_EXPERTS, wrong.key.layer)
    if key not in wrong.tensors:
        return None
    chosen = wrong.tensors[key].astype(np.intp)
    slots = np.flatnonzero(wrong.places.reshape(chosen.size, -1).any(axis=1))
    own, right = chosen.ravel()[slots], np.delete(chosen.ravel(), slots)
    guilty, is_whole = np.unique(own), not np.isin(right, own).any()
    text = _products(wrong, slots, chosen, is_whole) if wrong.key.name in OF_EXPERTS else None
    text = text or _factors(wrong, chosen)
    if text is None and is_whole and 4 * guilty.size <= wrong.model.config.experts:
        text = f"numbers of {runs('expert', guilty)} alone are wrong, wherever a token takes {'it' if guilty.size == 1 else 'them'}"
    return text


def _factors(wrong: Wrong, chosen: Indices) -> str | None:
    """The factors of experts, or of the rows of each, by which their numbers are multiplied, if these are all that is wrong."""
    theirs, right = (x.reshape(chosen.size, -1) for x in (wrong.theirs, wrong.value))
    member, layer, of = (
        chosen.ravel() == np.arange(wrong.model.config.experts)[:, None],
        wrong.operation.layer,
        OF_EXPERTS.get(wrong.key.name),
    )
    for what, axis, least in (("numbers", None, 1), ("rows", 1, SPARE)):
        known = member.sum(axis=1) >= least
        along, square = (member @ (x if axis else x.sum(axis=1, keepdims=True)) for x in (theirs * right, right**2))
        factor = np.divide(along, square, where=known[:, None], out=np.ones((known.size, right.shape[1] if axis else 1)))
        some = known[chosen.ravel()]
        if 2 * some.sum() < some.size or not wrong.explains((factor[chosen.ravel()] * right)[some], theirs[some], right[some]):
            continue
        off, why = np.flatnonzero((np.abs(factor - 1) > LITTLE).any(axis=1)), ""
        if of is not None and layer is not None:
            weights = {name: [matrix_of(getattr(one, name).weights).whole() for one in layer.experts] for name in OF_EXPERTS.values()}
            size = {name: np.array([np.abs(x).max(axis=axis) for x in some]).reshape(len(some), -1) for name, some in weights.items()}
            used, near = (factor * size[of])[known], LITTLE * size[of].max()  # the scales that experts have
            if (np.ptp(used, axis=0) < near).all():
                why = ", as where all experts have the same scales"
            elif of != "ffn_down" and (np.abs(used - np.maximum(size["ffn_gate"], size["ffn_up"])[known]) < near).all():
                why = ", as where gate and up share the scale of the larger one and its weights are not scaled anew"
        return f"{what} of {runs('expert', off)} are multiplied by {least_to_largest(factor[off])}{why}"
    return None


def _products(wrong: Wrong, slots: Indices, chosen: Indices, is_whole: bool) -> str | None:
    """What is said of products in these slots that are another expert's or matrix's, of another token's input, of other rows, or 0; or of
    the run of elements that is wrong in each. is_whole: whether the experts are wrong wherever they are taken."""
    layer, field = wrong.operation.layer, OF_EXPERTS[wrong.key.name]
    assert layer is not None
    every = [(name, e, getattr(expert, name)) for name in OF_EXPERTS.values() for e, expert in enumerate(layer.experts)]
    shape, x = getattr(layer.experts[0], field).shape, wrong.inputs[0]
    linears = sorted((one for one in every if one[2].shape == shape), key=lambda one: one[0] != field)  # the expert's number is the place
    if x.shape[1] != shape[1]:  # each slot has an input of its own
        return None
    width, tokens, own = shape[0], slots // chosen.shape[1], chosen.ravel()[slots]
    made = np.stack([value_of(matrix_product(wrong.operation, tensor(TOKENS), one[2]), lambda key: x, len(x)) for one in linears])
    names = [f"{'' if name == field else f'{name} of '}expert {e}" for name, e, _ in linears]
    computed, theirs = wrong.value.reshape(-1, width).copy(), wrong.theirs.reshape(-1, width)
    alike, texts = np.unique(x, axis=0, return_inverse=True)[1].ravel(), list[str]()  # tokens that come twice have the same products
    runs_off = pieces(np.flatnonzero(wrong.places.reshape(-1, width).any(axis=0)))
    if len(runs_off) > FEW or min(piece.size for piece in runs_off) < min(FEWEST, width):  # few numbers are some product's by chance
        return None
    for piece in runs_off:
        is_off = wrong.places.reshape(-1, width)[slots][:, piece].any(axis=1)
        begins = np.arange(0, width - piece.size + 1, gcd(int(piece[0]), piece.size, width))
        begins = begins if begins.size * made[:, :, :_TOKENS].size <= _LARGE else piece[:1]
        at = begins[:, None] + np.arange(piece.size)
        some, of_all = slots[is_off], made[:, :, at[:, :_TOKENS]]
        flat = np.append(of_all.reshape(-1, of_all.shape[-1]), np.zeros((1, of_all.shape[-1])), axis=0)
        found = nearest(flat, theirs[some][:, piece[:_TOKENS]])
        if (is_zero := found == len(flat) - 1).all():
            return None
        source, token, begin = np.unravel_index(np.where(is_zero, 0, found), of_all.shape[:3])
        computed[np.ix_(some, piece)] = np.where(is_zero[:, None], 0, made[source[:, None], token[:, None], at[begin]])
        is_same = alike[token] == alike[tokens[is_off]]
        moves = list(zip(own[is_off].tolist(), source.tolist(), tokens[is_off].tolist(), token.tolist(), is_same.tolist(), strict=True))
        if piece.size == width and not is_zero.any():
            by_expert = {e: i for e, i, *_ in moves}
            if is_whole and is_same.all() and all(by_expert[e] == i for e, i, *_ in moves):
                text = [f"expert {e} has those of {names[i]}" for e, i in sorted(by_expert.items()) if e != i]
                texts.append(f"weights of other experts are used: {listed(text, FEW)}")
                continue
            text = [
                f"position {t} has that of {names[i]} instead of {e}" if same else f"position {t} has that of position {of}"
                for e, i, t, of, same in moves
                if i != e or not same
            ]
            texts.append(f"products of others: {listed(list(dict.fromkeys(text)), FEW)}")
            continue
        apart = {(linears[i][0], linears[i][1] - e) for (e, i, *_), zero in zip(moves, is_zero, strict=True) if not zero}
        of = [name for name in dict.fromkeys(name for name, _ in apart) if name != field]
        of += sorted({_EXPERTS.get(step, "other experts") for _, step in apart if step})
        of += [runs("element", at[i]) for i in np.unique(begin[~is_zero]) if begins[i] != piece[0]]
        of += ["other positions"] * (not is_same[~is_zero].all())
        texts.append(f"{runs('element', piece)} of each expert's products are those of {listed(of)}{', or 0' * bool(is_zero.any())}")
    return "; ".join(texts) if texts and wrong.accounts(computed.reshape(wrong.value.shape)) else None
