"""The law for one operation on given inputs: its expected output, and how far an engine's roundings may take it from there.

An engine's dump is judged operation by operation (graph.py lists them): each is evaluated here in float64 from the engine's own inputs,
so an early error neither hides nor fakes a later one. What an operation computes is its expression (definition.py), which
tests/judge/test_operations.py ties to spec.py, the law for whole models; roundings.py adds where other engines round. Nothing here is
shared with the kernels.

HOW FAR. Every step of an expression rounds, and passes on the errors of what it reads, times its derivative: a running error analysis
(Higham, Accuracy and Stability of Numerical Algorithms, 3.3), with one rule for each kind of step. An error is the sum of the effects d of
single roundings, and the sum of their squares. An honest engine, which may add in any order, stays within

    |error| <= reach of flips + min(sum |d|, 6 sqrt(sum d^2))                   for each element
    mean of error^2 / sum d^2 <= 0.4                                            over a tensor
    |sum error * value / sum value^2| <= 6 u + 4 standard deviations            over a tensor: no common factor

The first is the worst case or, for many roundings, the probabilistic bound with lambda = 6 (Higham and Mary, SIAM J. Sci. Comput. 41,
2019). The second is the variance test of TOSA's conformance rules for dot products, which catches small errors that sit everywhere. The
third catches small wrong factors; an error that several elements share counts as often. u is 2^-24, half a unit in float32's last place.

A sum of n numbers rounds n times, each time by no more than the sum of their sizes. Sums of integers are exact, but engines that multiply
dequantised numbers round there too, so a ternary product counts as any other. Inputs are rounded as well, like those of a float64 engine in
a dump of float32. Engines in narrow types round every tensor that they write: inputs, steps and result, each by its type's own amount; all
of them keep in float32 what they compute of whole rows, of positions, and inside a softmax. Fused engines round less, and stay within the
same bound.

FLIPS. A code, or a float16, is ambiguous if the number before rounding is nearer to a rounding boundary than its error; the reach of flips
is the change that all ambiguous ones together can make. In narrow types flips are roundings like others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...model.records import Blocks, Ternary
from ...traces.points import Key
from . import functions, roundings
from .definition import CODED, FACTORS, HEAD
from .expected import TINY, Array, Error, Expected, Storage, U, added, kept, rounding, type_of
from .expression import Matrix, Node, folded, nodes, step_value
from .formats import half_steps
from .precision import ROUNDOFF
from .products import rounding_step, row_blocks

Values = list[Any]
Errors = list[Error]
Rule = Callable[["Law", Node, Any, Values, Errors], Error]
"""The law, a step, its value, those of its inputs and their errors -> its error."""

_FINE = ("reduction", "softmax sum", "largest of", "root", "positions", "power", "outer")
_FINE_IF_READ_ALONE = ("sum", "difference", "product", "quotient", "at least", "exponential")
_RUN = 36  # terms that a softmax adds up one after the other at most: they are positive, so that their errors do not cancel


def expected(tree: Node, inputs: Mapping[Key, Array], types: Storage) -> Expected:
    """What an expression gives of these tensors, and how far roundings of an engine with these types may take it from there."""
    law = Law(tree, inputs, types)
    value = folded(tree, law.values, law.step)
    return Expected(value, *law.errors[tree])


class Law:
    """The values and errors of the steps of an expression."""

    def __init__(self, tree: Node, inputs: Mapping[Key, Array], types: Storage):
        self.inputs, self.types = inputs, types
        self.narrow = {*types.inputs, types.output, types.precision.scale, types.precision.mul} != {
            "float32"
        }  # of weights and caches there are rules
        self.rows = len(next(iter(inputs.values())))
        self.kinds = dict(zip(inputs, types.inputs or ("float32",) * len(inputs), strict=True))
        self.values: dict[Node, Any] = {}
        self.errors: dict[Node, Error] = {}
        self.fine: set[Node] = set()  # steps that are float32 in all engines
        self.readers = Counter(child for node, _ in nodes(tree) for child in _read(node))

    def step(self, node: Node, read: Values) -> Any:
        """The value of a step of these values. Its error is noted, and what nothing else reads is forgotten: it may take gigabytes."""
        value = self._value(node, read)
        for child in _read(node):
            self.readers[child] -= 1
            if not self.readers[child]:
                self.values.pop(child), self.errors.pop(child)
        return value

    def _value(self, node: Node, read: Values) -> Any:
        if node.kind == "matmul" or (node.inputs and node.inputs[0].kind == "linears"):
            value, self.errors[node] = (_matmul if node.kind == "matmul" else _by_expert)(self, node, read)
            return value
        if self._is_fine(node):
            self.fine.add(node)
        value = step_value(self.inputs.__getitem__, self.rows, node, read)
        errors = [self._of_constant(child, node) if child.kind == "constant" else self.errors[child] for child in node.inputs]
        self.errors[node] = _RULES[node.kind](self, node, value, read, errors)
        return value

    def _is_fine(self, node: Node) -> bool:
        read = [child for child in node.inputs if child.kind != "constant"]
        if node.kind == "difference" and _is_shift(read[-1]):
            return True
        if not read and node.kind == "sum":  # of weights
            return False
        written = node.kind == "quotient" and node.inputs[1].kind != "constant"  # a scale or probabilities
        return node.kind in _FINE or (node.kind in _FINE_IF_READ_ALONE and self.fine.issuperset(read) and not written)

    def _of_constant(self, node: Node, reader: Node) -> Error:
        """The rounding of a weight to the type of the numbers, and of a single number: to float32, or to that type if engines do that."""
        value, is_number = node.value, np.ndim(node.value) == 0
        if node.is_matrix or (is_number and float(np.float32(value)) == value):
            return Error()
        kind = self.types.output if reader not in self.fine and (node.noun in FACTORS or not is_number) else "float32"
        return self.kept(value, kind) if is_number or kind != "float32" else Error()

    def kept(self, size: Any, kind: str = "", times: int = 1) -> Error:
        """The rounding of numbers of this size to a type: the result's, if none is given."""
        kind = kind or self.types.output
        return rounding(U * np.abs(size) if kind == "float32" else kept(kind, size), times)

    def written(self, node: Node, size: Any) -> Error:
        """The rounding of a step's numbers to a narrow type, if they are: float32's are counted with those inside the step."""
        return self.kept(size) if self.narrow and node not in self.fine else Error()

    def operand(self, error: Error, x: Array) -> Error:
        """The error of numbers [.., n] that are summed over, and rounded before."""
        mul = self.types.precision.mul
        return error if mul == "float32" else added(error, rounding(half_steps(x, mul)))

    def approximated(self, v: Array) -> Error:
        """The error that is declared of functions of single numbers: a part of them, or of 1 where tables of activations have steps."""
        part = self.types.precision.exp
        return rounding(part * np.abs(v)) if part else Error()

    def in_sums(self, error: Error, x: Array) -> float:
        """Float32's error of what a sum of products reads, in roundings of its numbers: these are counted with those of the sum."""
        return 0.0 if self.narrow or error.is_none else float(np.max(error.worst / np.maximum(U * np.abs(x), TINY)))


def _read(node: Node) -> tuple[Node, ...]:
    """The steps that the rule of a step looks at."""
    if node.kind == "weighted":
        return (*node.inputs, *_softmax(node).inputs)
    return (*node.inputs, *node.inputs[0].inputs) if node.kind == "matmul" else node.inputs


def _is_shift(node: Node) -> bool:
    """Whether this is the largest of a softmax's numbers: its own error cancels."""
    return node.kind == "largest of" or node.what == "largest number"


# --- steps of single numbers ----------------------------------------------------------------------------------------------------------


def _sum(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    inside = law.kept(sum(map(np.abs, x)), times=len(x) - 2) if len(x) > 2 else Error()
    own = law.kept(np.where(np.isfinite(v), v, 0), "float32" if node in law.fine else "")  # a softmax's may be minus infinity
    return added(*e, inside, own)


def _quotient(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    own, divisor, types = law.kept(v, "float32" if node in law.fine else ""), node.inputs[1].kind, law.types
    if divisor == "softmax sum" and types.precision.probs != "float32":
        own = law.kept(v, types.precision.probs)
    if divisor == "at least" and types.precision.scale != "float32":
        own = added(own, rounding(ROUNDOFF[types.precision.scale] * np.abs(v)))
    return added(e[0].times(1 / x[1]), e[1].times(v / x[1]), own)


def _at_least(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    return e[0].times(x[0] >= x[1])


def _power(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    """The exponent is rounded, too, where float32 does not hold it."""
    exact = x[1].astype(np.float32) == x[1]
    return added(rounding(U * v, 2), rounding(U * np.where(exact, 0, np.abs(v * np.log(v)))))


def _circle(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    return added(e[0].times(v[::-1]), rounding(U * np.ones_like(v)), law.kept(v), law.approximated(np.ones_like(v)))


def _curve(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    """A function of one number: its slope times the error, and the roundings of its own that compilers and libraries make."""
    function, size, y = functions.OF_ONE[node.kind][node.what], np.minimum(np.abs(x[0]), _LARGE), np.abs(v)
    slope = np.abs(function(x[0] + _STEP) - function(x[0] - _STEP)) / (2 * _STEP)
    if node.what == "exp":
        bound = np.clip(e[0].bound, 1e-12, 60)
        slope = slope * np.expm1(bound) / bound  # beyond the first order
    steps, inside = _INSIDE.get(node.what, (1, lambda size, y: y))
    from_table = Error() if node.value is None else _of_table(x[0], v)
    return added(
        e[0].times(slope),
        rounding(U * inside(size, y), steps),
        law.written(node, size if "GELU" in node.what else y),
        law.approximated(np.maximum(y, 1) if node.kind in ("activation", "curve") else y),
        from_table,
    )


_LARGE = 1e300  # instead of infinity
_STEP = 2.0**-20  # for derivatives
_INSIDE: dict[str, tuple[int, Callable[[Array, Array], Array]]] = {
    "SiLU": (4, lambda size, y: y * (1 + size) + size / 2),
    "sigmoid": (4, lambda size, y: y * (1 + (1 - y) * size)),
    "exp": (4, lambda size, y: y * (0.5 + size)),
    "the exact GELU": (6, lambda size, y: size),
    "GELU's approximation by tanh": (6, lambda size, y: size),
    "tanh": (4, lambda size, y: y),
}
"""The roundings inside a function, and how large they are, given the sizes of its number and of its value. An exponential's argument is
rounded in its product with log2(e), that constant, and the reduction of its range. Engines compute 1 + erf and 1 + tanh, which is as wrong
as 1 is, where it is small, too; XLA takes a sigmoid from tanh."""


def _of_table(x: Array, v: Array) -> Error:
    """ggml's float16 table of GELU may give the neighbour of the right entry, and an ambiguous input the neighbouring entry."""
    rounded, inside = roundings.to_float16(np.where(np.abs(x) < 10, x, 0)), np.abs(x) < 10
    doubt = np.abs(np.abs(x - rounded) - _spacing(rounded) / 2) <= 4 * U * np.abs(x)
    return Error(reach=np.where(inside, _spacing(v) + doubt * 2 * _spacing(rounded), 0))


def _spacing(x: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.spacing(np.abs(x).astype(np.float16)).astype(np.float64)


# --- roundings that the definition has ------------------------------------------------------------------------------------------------


def _rounding(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    """Codes: those that are ambiguous may be one off."""
    doubt = (np.abs(np.abs(x[0] - np.floor(x[0])) - 0.5) <= e[0].bound + 1e-12).astype(np.float64)
    return rounding(doubt) if law.narrow else Error(reach=doubt)


def _rounded(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    """float16, in some dialects. A tensor of the dump is rounded as it is."""
    exact = node.inputs[0].kind == "tensor"
    return _in_steps(law, x[0], v, _spacing(v), Error() if exact and not law.narrow else e[0], e[0].bound)


def _in_steps(law: Law, x: Array, v: Array, step: Array, e: Error, near: Array) -> Error:
    """Numbers that are rounded to steps of this size: those that are near to a boundary may be one step off."""
    if law.narrow:
        return added(e, rounding(step * (np.asarray(e.worst) > 0)))
    return Error(reach=(np.abs(np.abs(x - v) - step / 2) <= near) * step) if np.ndim(e.worst) else Error()


def _opaque(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    """Another order of elements; or the numbers in blocks that ggml multiplies, and the sums of blocks for matrices with minimums."""
    if node.what in (functions.by_head, functions.by_query, functions.visible_by_query):
        return e[0].over(x[0].shape, node.what)
    if node.what is roundings.rounded_sums:
        return Error(reach=roundings.ambiguous_sums(x[0]))
    return _in_steps(law, x[0], v, rounding_step(x[0], node.what.keywords["table"]), e[0], 8 * U * np.abs(x[0]))


# --- linear steps ---------------------------------------------------------------------------------------------------------------------


def _moved(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    """Numbers that go to other places; keys and values come from the cache."""
    move = partial(functions.FUNCTIONS[node.kind], **({} if node.what is None else {"what": node.what}))
    kv = law.types.precision.kv if node.kind == "grouped" else "float32"
    cached = Error() if kv == "float32" else rounding(half_steps(x[0], kv))
    return added(e[0], cached).over(x[0].shape, lambda a: move(a, *x[1:]))


def _paired(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    fields = (tuple(np.broadcast_to(error[i], y.shape) for error, y in zip(e, x, strict=True)) for i in range(3))
    worst, square, reach = (functions.FUNCTIONS["paired"](*field, what=node.what) for field in fields)
    return Error(worst, square, reach, max(error.shared for error in e))


def _mask(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    sees = np.isfinite(v)
    return added(e[0], law.written(node, np.where(sees, v, 0))).times(sees)


def _reduction(law: Law, node: Node, v: Any, read: Values, errors: Errors) -> Error:
    x, e, n = read[0], errors[0], read[0].shape[-1]
    total = partial(np.sum, axis=-1, keepdims=True)
    if _is_shift(node):
        return Error()
    if node.what == "largest magnitude":
        at = np.abs(x).argmax(axis=-1)[..., None]
        return e.over(x.shape, lambda a: np.take_along_axis(a, at, axis=-1))
    if node.what == "mean square":
        return added(e.times(2 * x / n).over(x.shape, total), rounding(U * v, n + 1))
    if node.what == "mean":
        return added(e.times(1 / n).over(x.shape, total), rounding(U * total(np.abs(x)) / n, n + 1))
    return added(e.over(x.shape, total), rounding(U * v, min(n, _RUN)))


def _of_rows(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    """The sum of what a token's experts give, or the pooled row: the mean of all."""
    if node.kind == "pooled" and "mean" not in node.what:
        return _moved(law, node, v, x, e)
    change = partial(functions.FUNCTIONS[node.kind], what=node.what)
    n, share = (x[0].shape[1], 1) if node.kind == "total" else (len(x[0]), len(x[0]))
    through, size = e[0].over(x[0].shape, change, lambda a: change(a) / share), change(np.abs(x[0]))
    return added(through, rounding(U * size, n), law.written(node, size), law.written(node, v))


def _products(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    """Products, or sums of them. Where keys are cached in another type, the dot product takes queries of that, of 8 bits where it has 4."""
    (a, b), kv, step = x, law.types.precision.kv, functions.FUNCTIONS[node.kind]
    of_a, of_b, steps = *e, 1.0
    if node.kind not in ("product", "outer"):
        steps = np.shape(a)[-1] + sum(law.in_sums(error, y) for error, y in zip(e, x, strict=True))
        of_a, of_b = (error if law.narrow else error._replace(worst=0.0, square=0.0) for error in e)
    if node.kind == "scores" and kv != "float32":
        of_a = added(of_a, rounding(half_steps(a, "q8_0" if kv == "q4_0" else kv)))
        of_b = e[1]
    if node.kind == "scores":
        of_a, of_b = law.operand(of_a, a), law.operand(of_b, b)
    of_a = of_a.over(np.shape(a), lambda z: step(z, np.abs(b)), lambda z: step(z, b**2))
    of_b = of_b.over(np.shape(b), lambda z: step(np.abs(a), z), lambda z: step(a**2, z))
    return added(of_a, of_b, rounding(U * step(np.abs(a), np.abs(b)), steps), law.written(node, v))


def _weighted(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    """Probabilities times values. A probability p whose exponential is wrong by d, relatively, makes the output o wrong by p d (v - o)."""
    (p, values), types, softmax, moved = x, law.types.precision, _softmax(node), functions.FUNCTIONS["weighted"]
    size = np.abs(values)
    off = law.errors[softmax.inputs[0]].times(1 / law.values[softmax.inputs[1]])
    total, squares = (x.sum(axis=-1).T[..., None] for x in off[:2])
    square = moved(off.square, values**2) - 2 * v * moved(off.square, values) + v**2 * squares
    of_scores = Error(moved(off.worst, size) + np.abs(v) * total, np.maximum(square, 0), shared=float(v.shape[-1]))
    seen, unit = (p > 0).sum(axis=-1).T[..., None], moved(p, size)
    steps = np.minimum(seen, _RUN)
    if law.narrow or types.probs != "float32":
        fine = law.kept(1.0, "" if types.probs == "float32" else types.probs).worst
        of_p = Error(fine * unit, fine**2 * moved(p**2, values**2), shared=float(v.shape[-1]))
    else:
        of_p = rounding(U * unit, shared=float(v.shape[-1]))
    of_p = of_p._replace(reach=e[0].over(p.shape, lambda a: moved(a, size)).reach)
    of_values = e[1]
    if types.mul != "float32":  # values have scales along tokens, or along elements
        seen_p = law.operand(Error(), p).times(p > 0)
        of_p = added(of_p, seen_p.over(p.shape, lambda a: moved(a, size), lambda a: moved(a, size**2)))
        by_token = half_steps(values.swapaxes(0, -1), types.mul).swapaxes(0, -1)
        of_values = added(of_values, rounding(np.maximum(half_steps(values, types.mul), by_token)))
    of_values = of_values.over(values.shape, lambda a: moved(p, a), lambda a: moved(p**2, a))
    sums = added(rounding(U * unit, steps), rounding(U * np.abs(v), steps), rounding(ROUNDOFF[types.attn_acc] * unit, seen))
    return added(of_scores, of_p, of_values, sums, law.written(node, v))


def _softmax(node: Node) -> Node:
    """The probabilities that values are multiplied with, before they are rounded."""
    return node.inputs[0].inputs[0] if node.inputs[0].kind == "rounded" else node.inputs[0]


# --- products with matrices -----------------------------------------------------------------------------------------------------------


def _matmul(law: Law, node: Node, read: Values) -> tuple[Array, Error]:
    """The product of [T, M] with a matrix [N, M], some rows of it at a time: large heads would take gigabytes."""
    (x, matrix), source = read, node.inputs[0]
    errors = law.operand(law.errors[source], x)
    if not isinstance(matrix, Matrix):
        value = x @ matrix.T
        return value, _products(law, node, value, read, [errors, Error()])
    codes, step = (law.values[child] for child in source.inputs) if source.noun == CODED else (x, 1.0)
    if isinstance(matrix.weights, Ternary):
        codes = codes.astype(np.float32)  # exact, and twice as fast
    shape = (len(x), matrix.shape[0])
    value, unit = np.empty(shape), np.empty(shape)
    worst, square, reach = (np.zeros(shape) if np.ndim(field) and (law.narrow or i == 2) else 0.0 for i, field in enumerate(errors[:3]))
    assert matrix.weights is not None
    for rows, some in row_blocks(matrix.weights):
        size = np.abs(some)
        value[:, rows] = codes @ some.T
        for i, (out, field) in enumerate(zip((worst, square, reach), errors, strict=False)):
            if isinstance(out, np.ndarray):
                out[:, rows] = np.broadcast_to(field, x.shape, subok=True) @ (size**2 if i == 1 else size).T
        if source.kind == "opaque" and isinstance(matrix.weights, Blocks):
            size = size + size.max(axis=1, keepdims=True)  # codes and what is subtracted from them are summed apart
        unit[:, rows] = np.abs(codes) @ size.T
    value /= step
    unit *= U / step
    count = x.shape[1]
    # the scale of a row's codes is in all its outputs, and so is a flip
    through = Error(worst, square, reach, float(shape[1]) if source.noun == CODED else max(1.0, errors.shared * shape[1] / count))
    acc = ROUNDOFF[law.types.precision.acc]
    count += law.in_sums(errors, x)
    sums = rounding(unit, count) if acc == 0 else added(rounding(unit, count), rounding(acc / U * unit, x.shape[1]))
    return value, added(through, sums, _of_weights(law, node, x, value), law.written(node, value))


def _of_weights(law: Law, node: Node, x: Array, value: Array) -> Error:
    """The roundings of a matrix to the type of the numbers, and to that of a head that the engine has converted."""
    weights, types = node.inputs[1].value.weights, law.types
    own = "float32" if isinstance(weights, Ternary) or type_of(weights) == types.output else types.output
    head = types.precision.head if node.inputs[1].noun == HEAD else "float32"
    kinds = [kind for kind in dict.fromkeys((own, types.precision.mul, head)) if kind != "float32"]  # in one order: sums are of floats
    if not kinds:
        return Error()
    worst, square = np.zeros(value.shape), np.zeros(value.shape)
    alone = common = 0.0  # the squared effect on a factor of everything: if tokens had their own weights, and as they share them
    assert weights is not None
    for rows, some in row_blocks(weights):
        for steps in (half_steps(some, kind) for kind in kinds):
            worst[:, rows] += np.abs(x) @ steps.T
            squares = x**2 @ (steps**2).T
            square[:, rows] += squares
            alone += float((squares * value[:, rows] ** 2).sum())
            common += float(((value[:, rows].T @ x) ** 2 * steps**2).sum())
    return Error(worst, square, 0.0, common / alone if alone else 1.0)


def _by_expert(law: Law, node: Node, read: Values) -> tuple[Array, Error]:
    """Each slot's product with the matrix of its expert."""
    types = law.types._replace(inputs=law.types.inputs[:1])
    value, worst, square, reach, shared = node.what(*read, compute=lambda tree, inputs: expected(tree, inputs, types))
    return value, Error(worst, square, reach, float(shared.max()))


# --- experts --------------------------------------------------------------------------------------------------------------------------

_NO_CHANCE = 80.0  # e^-80 is near the smallest normal float32


def _experts(law: Law, node: Node, v: Any, x: Values, e: Errors) -> Error:
    """The numbers of each token's experts, slot by slot. Those are discrete, as codes are.

    Engines compare probabilities, so an expert whose logit is within a few roundings of another's, or whose probability is hardly above
    0, may have that one's slot.
    """
    (logits,), types = x, law.types
    behind = np.minimum(logits.max(axis=1, keepdims=True) - logits, _NO_CHANCE)
    own = np.take_along_axis(behind, v.astype(np.intp), axis=1)[:, :, None]

    def reach(error: float) -> Array:
        """How far numbers may be off by errors of logits, relative to 1 and to the distance from the largest."""
        near = np.abs(own - behind[:, None, :]) <= error * (1 + own)
        return np.where(near, np.abs(np.arange(logits.shape[1]) - v[:, :, None]), 0).max(axis=2)

    narrow: Array | float = 0.0
    if not types.is_wide:
        narrow = reach(4 * max(ROUNDOFF[types.inputs[0]], ROUNDOFF[types.output]) * (1 + float(np.abs(logits).max())) + 8 * U)
    return Error(narrow, narrow**2, reach(8 * U))


def next_experts(logits: NDArray, k: int, error: Array | float) -> NDArray[np.intp]:
    """The numbers of each token's experts, the last of which is the next best one where that is no farther away than `error`."""
    experts = spec.top_experts(logits, k + 1)
    last, following = (np.take_along_axis(logits, experts[:, [slot]], axis=1)[:, 0] for slot in (k - 1, k))
    near = last - following <= error
    experts[near, k - 1] = experts[near, k]
    return np.ascontiguousarray(experts[:, :k])


_RULES: dict[str, Rule] = {
    "tensor": lambda law, node, v, x, e: law.kept(v, law.kinds[node.what]),
    "rows": lambda law, node, v, x, e: law.written(node, v),
    "sum": _sum,
    "difference": _sum,
    "quotient": _quotient,
    "at least": _at_least,
    "cut": lambda law, node, v, x, e: e[0],
    "power": _power,
    "circle": _circle,
    "rounding": _rounding,
    "rounded": _rounded,
    "opaque": _opaque,
    "paired": _paired,
    "mask": _mask,
    "weighted": _weighted,
    "experts": _experts,
    **dict.fromkeys(("product", "outer", "dot", "scores"), _products),
    **dict.fromkeys(("total", "pooled"), _of_rows),
    **dict.fromkeys(("reduction", "softmax sum", "largest of"), _reduction),
    **dict.fromkeys(("activation", "sigmoid", "curve", "exponential", "root"), _curve),
    **dict.fromkeys(("heads", "joined", "turn", "of pairs", "grouped", "slots", "column", "taken"), _moved),
    **dict.fromkeys(("constant", "positions", "linears"), lambda law, node, v, x, e: Error()),
}
"""The rule of each kind of steps but of products with matrices."""
