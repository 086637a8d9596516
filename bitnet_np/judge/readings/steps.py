"""The one step of an operation that is wrong, solved for: what it must have given, if all other steps are right.

Where y = a b, and a is right, b was y / a. So each operand is solved for, from the output back. A step with fewer numbers than the output,
such as the root mean square of a row or a weight that all tokens share, has many solutions: if they agree, it is that step.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...base.errors import listed
from ...traces.points import FIELDS, SLOTS, TOP_EXPERTS, Key
from ..evidence import LITTLE, SAME, SPARE, matched
from ..law import formats
from ..law.expression import Array, Matrix, Node
from ..words import Indices, digits, instead, least_to_largest, parts_of, places_of, runs, runs_and_verb
from .blocks import block_factors, wrong_codes_of
from .curves import described_function
from .inputs import few_inputs
from .known import known_factors
from .structure import GROUPS, Numbers, loose_structure, rank, structure
from .wrong import ROWS, Wrong

_MOSTLY = 0.8  # of rows or columns: where more are wrong, all are
WEIGHTS_OF_EXPERTS = "the weights of experts"
_LARGEST = 4096  # inputs, and outputs that are looked at: the equations of more take seconds
_FACTORS = {0.0: "not summed", 2.0: "summed twice", -1.0: "subtracted"}
_CONDITION = 1e4  # of a matrix: behind a worse one roundings hide its input
_LARGE, _MOST_PARTS = 1 << 20, 8  # weights of a product, and parts of its inputs, that are summed apart
_PARTS = (2, 4, 8)  # of the outputs, or of the positions, each of which a rank may compute by itself


class _Step(NamedTuple):
    """What a step must have given, and how much of an error in it comes out at the end, both of the output's shape or one like it."""

    node: Node
    needed: Array
    weight: Array
    is_sure: bool = False  # whether each number was solved for by several others
    is_plain: bool = True  # whether it is worth saying without a structure


def wrong_step(wrong: Wrong) -> str | None:
    """The step whose numbers explain the output, and how these differ from the right ones: in as few numbers as can be."""
    values, plain = wrong.steps, None
    with np.errstate(all="ignore"):
        for step in _steps(_Step(wrong.operation.tree, wrong.theirs, wrong.places.astype(np.float64)), values):
            right = values[step.node]
            text = _function(step, values) if step.node.kind == "activation" else None
            if step.node.kind == "matmul" and step.node.inputs[1].is_matrix:
                ways = (_sums, block_factors, _of_parts, few_inputs, wrong_codes_of)
                text = next(filter(None, (way(wrong, step.node, step.needed) for way in ways)), None)
            elif step.node.kind == "rows" and step.node.inputs[0].is_matrix:
                text = block_factors(wrong, step.node, step.needed)
            if text is not None:
                return text
            if step.node is wrong.operation.tree:
                continue
            how = None
            if step.node.is_number and np.ndim(step.needed) > 1:  # it may be another one for each position
                right = np.broadcast_to(right, (*step.needed.shape[:-1], 1))
            if not step.is_sure and np.shape(step.needed) == np.shape(right):  # whatever it is, it gives the output
                how = _structure(step.node, step.needed, np.asarray(right), wrong)
            elif np.shape(right) == (len(wrong.theirs), 1) and wrong.wrong_columns.size == 1 and step.needed.shape == wrong.theirs.shape:
                how = _structure(step.node, step.needed[:, wrong.wrong_columns], np.asarray(right), wrong)
                how = how and f"at {runs('element', wrong.wrong_columns)}: {how}"
            if how is not None:
                return f"{step.node.noun}: {how}; all other steps are right"
            solved = step.needed if step.is_sure else _solved(step, np.asarray(right))
            if solved is None:
                continue
            if wrong.accounts(np.where(wrong.places, wrong.with_step(step.node, solved), wrong.value)):
                how = _of_part(step.node, solved, right, values) or _structure(step.node, solved, np.asarray(right), wrong)
                if how is not None:
                    return f"{step.node.noun}: {how}; all other steps are right"
                if step.is_plain and plain is None and not step.node.is_number:
                    plain = f"{step.node.noun}: {_off(solved, right)}; all other steps are right"
    return plain


def structure_of_all(wrong: Wrong) -> str | None:
    """What makes all wrong numbers of the right ones by few numbers, whatever the operation is."""
    known = (known_factors(numbers, wrong) for numbers in _numbers(wrong))
    return next(filter(None, (*map(structure, _numbers(wrong)), *known)), None)


def own_numbers(wrong: Wrong) -> str | None:
    """The number that each position, head or element is multiplied by, or has added; or a function that has no name."""
    return next(filter(None, map(loose_structure, _numbers(wrong))), None)


def _numbers(wrong: Wrong) -> Iterator[Numbers]:
    """Yields the numbers of a tensor, cut into heads or slots of experts, and whole."""
    slots = wrong.key.name in SLOTS and wrong.key.name != "ffn_moe_weights"
    size = wrong.theirs.shape[1] // wrong.model.config.experts_used if slots else wrong.head_dim
    if size > 1:
        shape, axes = (len(wrong.theirs), -1, size), ("position", "slot" if slots else "head", "element")
        yield Numbers(wrong.theirs.reshape(shape), wrong.value.reshape(shape), axes, wrong.noise)
    yield Numbers(wrong.theirs, wrong.value, ("position", "element"), wrong.noise)


def _structure(node: Node, solved: Array, right: Array, wrong: Wrong) -> str | None:
    """What the numbers of a step have in common with the right ones."""
    axes = {1: ("element",), 2: ("position", "element"), 3: ("position", "head", "element")}.get(right.ndim)
    if axes is None or solved.shape != right.shape:
        return None
    if node.noun == WEIGHTS_OF_EXPERTS:
        axes = ("position", "slot", "element")
    kept = [i for i, size in enumerate(right.shape) if size > 1]
    shape = [right.shape[i] for i in kept]
    chosen, labels = wrong.tensors.get(Key(TOP_EXPERTS, wrong.key.layer)), {}
    if node.noun == WEIGHTS_OF_EXPERTS and chosen is not None and chosen.size == right.size:
        number, place = chosen.astype(np.intp).reshape(shape), chosen.argsort().argsort().reshape(shape)
        labels = {"expert": number, "place by expert number": place}
    numbers = Numbers(solved.reshape(shape), right.reshape(shape), tuple(axes[i] for i in kept), wrong.noise, labels)
    return (None if node.is_number else structure(numbers)) or known_factors(numbers, wrong)


def low_rank(wrong: Wrong) -> str | None:
    """The rank of what is wrong, if it is small."""
    wrong.go_on()
    rows, columns = wrong.wrong_rows, wrong.wrong_columns
    found = rank((wrong.theirs - wrong.value)[np.ix_(rows, columns)], wrong.noise)
    return found and f"what is wrong is of rank {found}{', as few inputs or a low-rank adapter make it' * (wrong.key.name in FIELDS)}"  # type: ignore[return-value]


def scales_of_others(wrong: Wrong) -> str | None:
    """The tokens whose activation scales wrong ones are quantised by: their own are not used."""
    rows, columns = wrong.wrong_rows[:ROWS], wrong.wrong_columns
    some, sample = wrong.rows(rows), columns[:: -(-columns.size // ROWS)]  # enough to tell the scale by
    step = some.step("the activation scale")
    if step is None:
        return None
    scales, theirs = spec.quantize(wrong.inputs[0][:ROWS])[1], some.theirs[:, sample]
    away = [((some.with_step(step, np.tile(scale, (len(rows), 1)), sample) - theirs) ** 2).sum(axis=1) for scale in scales]
    source = np.argmin(away, axis=0)
    off = source != rows
    if not off.any() or not some.accounts(some.with_step(step, scales[source])):
        return None
    texts = [f"{runs('position', rows[off & (source == t)])} by that of position {t}" for t in dict.fromkeys(source[off].tolist())]
    return f"activations are quantised by the scale of another token: {listed(texts)}"


def _steps(last: _Step, values: dict[Node, Any]) -> Iterator[_Step]:
    """Yields a step and those before it, the later ones first, as far as they can be solved for."""
    waiting = [last]
    while waiting:
        step = waiting.pop(0)
        yield step
        waiting += _before(step, values)


def _before(step: _Step, values: dict[Node, Any]) -> Iterator[_Step]:
    """Yields what each operand of a step must have been, if the others are right."""
    node, y, w = step[:3]
    x = [values[child] for child in node.inputs]
    if node.kind == "sum":
        yield from (_Step(child, y - (values[node] - a), w) for child, a in zip(node.inputs, x, strict=True))
    elif node.kind == "difference":
        yield from (_Step(node.inputs[0], y + x[1], w), _Step(node.inputs[1], x[0] - y, w))
    elif node.kind == "total" and node.what == "sum" and node.inputs[0].kind == "product":
        results, factors = (values[child] for child in node.inputs[0].inputs)
        if 2 * results.shape[1] <= results.shape[2]:  # few unknowns for many sums
            solved = np.stack([np.linalg.lstsq(r.T, row, rcond=1e-9)[0] for r, row in zip(results, y, strict=True)])
            yield _Step(node.inputs[0].inputs[1], solved.reshape(factors.shape), np.ones(factors.shape), True)
    elif node.kind == "matmul" and node.inputs[1].is_matrix:
        yield from _inputs(step, x[0], x[1])
    elif node.kind == "product":
        yield from (_Step(node.inputs[0], y / x[1], w * np.abs(x[1])), _Step(node.inputs[1], y / x[0], w * np.abs(x[0])))
    elif node.kind == "quotient":
        yield from (_Step(node.inputs[0], y * x[1], w / np.abs(x[1])), _Step(node.inputs[1], x[0] / y, w * y * y / np.abs(x[0])))
    elif node.kind == "root" and node.what == "root":
        yield _Step(node.inputs[0], y * y, w / np.abs(2 * y))
    elif node.kind in ("joined", "heads"):
        yield _Step(node.inputs[0], y.reshape(x[0].shape), w.reshape(x[0].shape))
    elif node.kind == "rounded" and node.what in formats.EACH:
        yield _Step(node.inputs[0], y, w)


def _inputs(step: _Step, x: Array, matrix: Matrix) -> Iterator[_Step]:
    """Yields the input of a product, where it has an output for each of its numbers: what it must have been, if the matrix is right."""
    outputs, width = matrix.shape
    if width > outputs or width > _LARGEST // 4 or not np.isfinite(step.needed).all():
        return
    weights = matrix.whole()
    if np.linalg.cond(weights) < _CONDITION:
        solved = np.linalg.lstsq(weights, step.needed.T, rcond=None)[0].T.astype(np.float64)
        is_right = (np.abs(solved - x) <= SAME * np.abs(x).max()) | ~(step.weight > 0).any(axis=1, keepdims=True)
        solved[is_right] = x[is_right]
        yield _Step(step.node.inputs[0], solved, np.ones(x.shape), True, False)


def _solved(step: _Step, right: Array) -> Array | None:
    """The numbers that a step must have given, of its own shape: the best for all wrong outputs that they reach, which fit if they agree.

    A number that one wrong output alone is made from stays as it is: some number fits any output. None if all do.
    """
    shape = (1,) * (step.needed.ndim - right.ndim) + right.shape
    if right.size < 2 or len(shape) != step.needed.ndim:
        return None
    axes = tuple(i for i, (own, size) in enumerate(zip(shape, step.needed.shape, strict=True)) if own < size)
    square = np.where(np.isfinite(step.needed) & np.isfinite(step.weight), step.weight, 0) ** 2
    solved = (square * np.where(square > 0, step.needed, 0)).sum(axis=axes) / square.sum(axis=axes)
    several = (square > 0).sum(axis=axes) > 1
    solved = np.where(several, solved, right.reshape(solved.shape))
    return solved.reshape(right.shape) if several.any() and np.isfinite(solved).all() else None


def _of_part(node: Node, solved: Array, right: Array, values: dict[Node, Any]) -> str | None:
    """The run of a row's numbers whose squares a mean leaves out or has twice, if that gives its numbers [.., 1]."""
    off = np.flatnonzero(np.abs(solved / right - 1) > SAME)
    if node.what != "mean square" or off.size < SPARE:
        return None
    x, mean = values[node.inputs[0]], solved.ravel()[off, None]
    square, width = np.square(x.reshape(-1, x.shape[-1])[off]), x.shape[-1]
    sums, index = np.append(0 * mean, square.cumsum(axis=1), axis=1), np.arange(width + 1)  # [n, M + 1]: of the numbers before each
    missing, all_of = sums[:, -1:] - mean * width, np.full(width + 1, width)
    last = np.searchsorted(sums[0], sums[0] + abs(missing[0, 0])).clip(0, width)  # sums grow: each first number has one last number
    for first, end, is_counted in ((index, last, True), (index, last - 1, True), (0 * index, index, False), (index, all_of, False)):
        counted = width if is_counted else np.maximum(width - (end - first), 1)
        sign = np.sign(missing[0, 0]) if is_counted else 1
        left = np.abs((sums[:, -1:] - sign * (sums[:, end] - sums[:, first])) / counted / mean - 1).max(axis=0)
        run = np.arange(first[left.argmin()], end[left.argmin()])
        if left.min() <= SAME and 0 < run.size < width:
            how = "left out" if sign > 0 else "counted twice"
            return f"{runs_and_verb('element', run, 'is')} {how}{', and not counted' * (not is_counted)}"
    return None


def _off(solved: Array, right: Array) -> str:
    """How the numbers of a step differ from the right ones, by some of them."""
    what = "element" if right.ndim == 1 else "position"
    theirs, ours = (x.reshape(len(x), -1) for x in (solved, right))
    off = np.flatnonzero((np.abs(theirs - ours) > SAME * np.abs(ours).max()).any(axis=1))
    off = off if off.size else np.arange(len(ours))  # a small error of all of them
    where = "" if off.size == len(ours) else f" at {places_of(off, len(ours), what)}"
    ratio = theirs[off] / ours[off]
    if np.ptp(ratio) <= min(SAME * np.abs(ratio).max(), np.abs(ratio - 1).max() / 10):
        return f"{digits(ratio[0, 0])} times what is right{where}"
    worst = np.abs(theirs - ours).argmax(axis=1)  # of the heads of a row
    examples = [f"{instead(theirs[i, worst[i]], ours[i, worst[i]])} at {what} {i}" for i in off[:2]]
    return f"{listed(examples)}{where and f'; wrong{where}'}"


def _sums(wrong: Wrong, node: Node, needed: Array) -> str | None:
    """The inputs that a product sums otherwise, at the outputs that are wrong; or in each part of the outputs, as ranks compute them."""
    x, matrix = (wrong.steps[child] for child in node.inputs)
    every = wrong.wrong_rows, wrong.wrong_columns

    def summed(rows: Indices, columns: Indices) -> str | None:
        columns = columns[:: -(-columns.size // _LARGEST)]  # enough to know the inputs by
        return _summed(x[rows], matrix.rows(columns), needed[np.ix_(rows, columns)], wrong.noise)

    text, where = summed(*every), parts_of(wrong.places, _MOSTLY)
    if text is not None:
        return text if not where else f"at {' and '.join(where)}: {text}"
    for axis, what, size in ((1, "element", matrix.shape[0]), (0, "position", len(x))):
        for count in _PARTS:
            parts = [part for part in np.array_split(np.arange(size), count) if np.isin(part, every[axis]).any()]
            own = (every[axis][np.isin(every[axis], part)] for part in parts)
            texts = [summed(*(some if i == axis else every[i] for i in (0, 1))) for some in own]
            if len(parts) > 1 and None not in texts:
                return "; ".join(f"at {runs(what, part)}: {text}" for part, text in zip(parts, texts, strict=True))
    return None


def _of_parts(wrong: Wrong, node: Node, needed: Array) -> str | None:
    """What a product's sums over some of its inputs have in common with the right ones, if those over the other inputs are right."""
    x, matrix = (wrong.steps[child] for child in node.inputs)
    width = matrix.shape[1]
    if matrix.shape[0] * width > _LARGE:
        return None
    weights = matrix.whole()
    for size in (width // count for count in range(2, _MOST_PARTS + 1) if width % count == 0):
        for part in np.arange(width).reshape(-1, size):
            sums = x[:, part] @ weights[:, part].T
            text = structure(Numbers(needed - (wrong.steps[node] - sums), sums, ("position", "element"), wrong.noise))
            if text is not None:
                return f"sums over {runs('input', part)} alone are wrong: {text}"
    return None


def _summed(x: Array, weights: Array, y: Array, noise: float) -> str | None:
    """What the sums of inputs x [T, M] by weights [N, M] do otherwise, if that gives y [T, N]: how often each input is summed.

    y = sum_j c_j x_j w_j, where c is 1 for an input that is summed once, and 0 for one that is left out. There is one equation for each
    output of each token, so these determine c where they are more than inputs. Tails, blocks and halves that are left out, overlaps that
    are summed twice and scales of blocks that are not applied are all numbers c.
    """
    if x.shape[1] > _LARGEST or 2 * x.shape[1] > y.size:
        return None
    error = y - x @ weights.T
    normal, along = (x.T @ x) * (weights.T @ weights), ((x.T @ error) * weights.T).sum(axis=1)
    size = np.diagonal(normal)
    ridge = max(1e-10 * float(size.max()), 1e-200)  # inputs that are always 0 stay as they are
    away = np.linalg.solve(normal + ridge * np.eye(len(size)), along)
    left = error - (x * away) @ weights.T
    if (left**2).sum() > min(LITTLE * (error**2).sum(), matched(noise) * (y**2).sum()):
        return None
    factor = np.where(size > 1e-6 * size.max(), 1 + away, 1)
    near = LITTLE + 10 * noise**0.5
    off = np.flatnonzero(np.abs(factor - 1) > near)
    factors = np.unique(np.round(factor[off] / near) * near)
    if not off.size:
        return None

    def of(some: NDArray) -> str:
        return places_of(some, len(factor), "input", amount=False)

    if factors.size > GROUPS:
        return f"{of(off)} are multiplied by other numbers, {least_to_largest(factor[off])}"
    said = []
    for number in factors:
        some = off[np.abs(factor[off] - number) <= near]
        mean = float(np.mean(factor[some]))
        words = next((words for f, words in _FACTORS.items() if abs(mean - f) <= near), f"multiplied by {mean:.4g}")
        said.append(f"{of(some)} {'are' if some.size > 1 else 'is'} {words}")
    return listed(said)


def _function(step: _Step, values: dict[Node, Any]) -> str | None:
    """The values that an activation has, if these are of some other smooth function of its input."""
    x, y, weight, right = (np.ravel(a) for a in (values[step.node.inputs[0]], step.needed, step.weight, values[step.node]))
    y, known = np.where(weight > 0, y, right), np.isfinite(y) & ((weight == 0) | (weight > np.median(weight[weight > 0]) / 2))
    if (text := described_function(x[known], y[known], right[known], "its input", True)) is None:
        return None
    large = known & (x > x[known].max() / 4)
    over = float((y / x)[large].max(initial=0)) if (right <= np.maximum(x, 0) * (1 + SAME)).all() else 0.0
    beyond = f": what it multiplies its input by goes on to {over:.4g}, and should end at 1, as where a curve is not cut off"
    return f"the activation: {text}{beyond * (over > 1 + LITTLE)}"
