"""The kinds of edits: what may be done to any node of an expression. Each kind has one sentence; nodes bring the nouns."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...model.families import NORMS
from ...model.records import Linear, Ternary
from ...traces.points import FIELDS, POINTS, Key
from ..graph import HEAD_NORMS, TOKENS, Operation, layer_input, operations
from ..precision import NARROW_FLOATS
from . import caches, functions, weights
from .definition import expression, matrix_of, matrix_product, rms
from .expression import Array, Matrix, Node, constant, mapped, nodes, reads, replaced, tensor, with_nodes

Edits = Iterator[tuple[str, Node]]
"""Edits of an expression: each in words, and the whole expression with it."""

_BINARY = ("sum", "difference", "product", "quotient", "at least")
_OPPOSITE = {"sum": "difference", "difference": "sum", "product": "quotient", "quotient": "product"}
_SAYS = {
    "sum": "{} subtracted",
    "difference": "{} added instead of subtracted",
    "product": "{} divided by instead of multiplied",
    "quotient": "{} multiplied instead of divided by",
}
_VALUES = (
    *_BINARY,
    *("matmul", "scores", "weighted", "total", "opaque", "rows", "taken", "dot", "cut", "paired", "power", "outer", "softmax sum"),
)
"""Kinds of nodes whose value is a step of its own, not the form of another one's."""
_AXES = {point.name: point.axes for point in POINTS}


def _each(tree: Node, change: Callable[[Node], Edits]) -> Edits:
    """Yields the edits that a change makes of each node; where two have the same words, these say the step, too."""
    every = [(words, node, new) for node, _ in nodes(tree) for words, new in change(node)]
    count = Counter(words for words, _, _ in every)
    for words, node, new in every:
        yield words if count[words] == 1 else f"{words}, in {node.noun}", replaced(tree, node, new)


def _is(noun: str) -> str:
    """A noun with its verb."""
    head = noun.split(" of ")[0]
    return f"{noun} are" if head.endswith("s") and not head.endswith("bias") else f"{noun} is"


def _name(node: Node) -> str:
    """A node as what a step does with it: the option of a function, or its noun."""
    return node.what if node.kind in functions.OF_ONE else node.noun


# --- steps ------------------------------------------------------------------------------------------------------------------------------


def left_out(place: Operation, tree: Node) -> Edits:
    """A step that is not there, or an operand of one."""

    def change(node: Node) -> Edits:
        if node.kind in functions.OF_ONE or node.kind == "rounded":
            yield f"{_is(_name(node)) if node.kind != 'rounded' else f'the rounding of {node.noun} is'} left out", node.inputs[0]
        for i, operand in enumerate(node.inputs) if node.kind in _BINARY else ():
            rest = (*node.inputs[:i], *node.inputs[i + 1 :])
            if i or (node.kind in ("sum", "product") and any(map(reads, rest))):
                how = "not divided out" if node.kind == "quotient" else "left out"
                yield f"{_is(operand.noun)} {how}", rest[0] if len(rest) == 1 else node.over(*rest)

    yield from _each(tree, change)
    leaves = [node for node, _ in nodes(tree) if node.kind == "tensor"]
    if len(leaves) == 1 and leaves[0].what != TOKENS:
        yield "everything is left out", leaves[0]


def centred(place: Operation, tree: Node) -> Edits:
    """Numbers whose mean is subtracted from them."""
    for node in dict.fromkeys(node.inputs[0] for node, _ in nodes(tree) if node.kind == "reduction"):
        mean = Node("reduction", (node,), "the mean", "mean")
        yield f"the mean is subtracted from {node.noun}", replaced(tree, node, Node("difference", (node, mean), node.noun))


def reduced_in_part(place: Operation, tree: Node) -> Edits:
    """A sum of a row that leaves out a part of it."""
    width = next((node.value.size for node, _ in nodes(tree) if _is_vector(node)), 0)

    def change(node: Node) -> Edits:
        if node.kind == "reduction":
            (x,) = node.inputs
            for words, part in weights.parts(width):
                kept = Node("opaque", (x,), x.noun, partial(np.multiply, np.where(part, 0.0, 1.0)))
                yield f"{words} left out of {node.noun}", node.over(kept)

    return _each(tree, change)


def twice(place: Operation, tree: Node) -> Edits:
    """A step that is done twice."""

    def change(node: Node) -> Edits:
        if node.kind in functions.OF_ONE:
            yield f"{_is(_name(node))} applied twice", node.over(node)
        for i, operand in enumerate(node.inputs) if node.kind in _BINARY else ():
            if i or node.kind == "sum":
                yield f"{_is(operand.noun)} applied twice", node.over(node, operand)

    yield from _each(tree, change)
    if len(leaves := [node for node, _ in nodes(tree) if node.kind == "tensor"]) == 1 and leaves[0].what != TOKENS:
        yield "it is done twice", replaced(tree, leaves[0], tree)


def inverted(place: Operation, tree: Node) -> Edits:
    """The opposite of a step."""

    def change(node: Node) -> Edits:
        if node.kind in _OPPOSITE:
            for i in range(1, len(node.inputs)):
                rest = (*node.inputs[:i], *node.inputs[i + 1 :])
                first = rest[0] if len(rest) == 1 else node.over(*rest)
                yield (
                    _SAYS[node.kind].format(_is(node.inputs[i].noun)),
                    replace(node, kind=_OPPOSITE[node.kind], inputs=(first, node.inputs[i])),
                )
        if node.kind == "sum" and len(node.inputs) == 2:
            yield f"{_is(node.inputs[0].noun)} subtracted", replace(node, kind="difference", inputs=node.inputs[::-1])

    yield from _each(tree, change)
    yield "the sign is flipped", Node("product", (tree, constant("-1", -1.0)))


def moved(place: Operation, tree: Node) -> Edits:
    """A step that comes before the one it follows, or first of all."""

    def change(outer: Node) -> Edits:
        if (outer.kind in _BINARY or outer.kind in functions.OF_ONE) and outer.inputs[0].inputs:
            inner = outer.inputs[0]
            if inner.kind in _BINARY or inner.kind in functions.OF_ONE:
                first = outer.over(inner.inputs[0], *outer.inputs[1:])
                yield f"{_said(outer)} comes before {_said(inner)}", inner.over(first, *inner.inputs[1:])

    yield from _each(tree, change)


def _said(node: Node) -> str:
    return _name(node) if node.kind in functions.OF_ONE else node.inputs[1].noun


def other_function(place: Operation, tree: Node) -> Edits:
    """Another function of the same table."""

    def change(node: Node) -> Edits:
        for name in functions.OF_ONE.get(node.kind, ()):
            if name != node.what:
                yield f"{name} instead of {node.what}", replace(node, what=name)
        for name in functions.REDUCTIONS if node.kind == "reduction" else ():
            if name != node.what:
                yield f"the {name} instead of the {node.what}", replace(node, what=name)

    return _each(tree, change)


# --- operands ---------------------------------------------------------------------------------------------------------------------------


def exchanged(place: Operation, tree: Node) -> Edits:
    """Two tensors in each other's place, or one of them in both."""
    leaves = [node for node, _ in nodes(tree) if node.kind == "tensor"]
    for i, a in enumerate(leaves):
        for b in leaves[i + 1 :]:
            if _AXES.get(a.what.name) == _AXES.get(b.what.name):
                yield f"{a.what.name} and {b.what.name} are exchanged", with_nodes(tree, {a: b, b: a})
                yield f"{a.what.name} is read instead of {b.what.name}", replaced(tree, b, a)
                yield f"{b.what.name} is read instead of {a.what.name}", replaced(tree, a, b)


def other_operand(place: Operation, tree: Node) -> Edits:
    """The value of another step in the place of an operand."""
    steps = [node for node, _ in nodes(tree) if node.kind not in ("constant", "positions")]

    def change(node: Node) -> Edits:
        earlier = [step for step in steps if step not in node.inputs and all(below is not node for below, _ in nodes(step))]
        for i, operand in enumerate(node.inputs) if node.kind in _BINARY else ():
            for step in earlier:
                if step.noun != operand.noun:
                    yield f"{step.noun} instead of {operand.noun}", node.over(*node.inputs[:i], step, *node.inputs[i + 1 :])

    return _each(tree, change)


def other_tensor(place: Operation, tree: Node) -> Edits:
    """Another tensor of its shape in the place of one, or added to it: a layer's input, what a norm read, what the layer before gave."""
    for leaf, _ in nodes(tree):
        for key in _beside(place, leaf.what) if leaf.kind == "tensor" else ():
            other = tensor(key)
            yield f"{_near(key, place)} is read instead of {leaf.noun.rstrip(',')}", replaced(tree, leaf, other)
            yield f"{_near(key, place)} is added to {leaf.noun.rstrip(',')}", replaced(tree, leaf, Node("sum", (leaf, other), leaf.noun))


def _is_vector(node: Node) -> bool:
    """Whether it is a vector of the model, such as a bias."""
    return node.kind == "constant" and np.ndim(node.value) == 1


def _beside(place: Operation, other: Key) -> Iterator[Key]:
    """Yields the tensors of the same width that an engine has at hand: those around the layers, of its layer and of the one before."""
    c, layer = place.config, place.key.layer
    widths = {"T D": c.width, "T HK": c.heads * c.head_dim, "T GK": c.kv_heads * c.head_dim, "T F": c.ffn}
    width = widths.get(_AXES.get(other.name, ""))
    for operation in operations(place.model, place.dialect):
        key = operation.key
        if key == place.key or width is None:
            return
        is_near = layer is None or key.layer in (None, layer, layer - 1)
        if is_near and key != other and widths.get(_AXES.get(key.name, "")) == width:
            yield key


def _near(key: Key, place: Operation) -> str:
    if place.key.layer is not None and key == layer_input(place.model, place.key.layer):
        return "the layer's input"
    return key.name if key.layer in (None, place.key.layer) else f"{key.name} of layer {key.layer}"


def other_weight(place: Operation, tree: Node) -> Edits:
    """A weight of another layer, or of another step."""
    for node, _ in nodes(tree):
        for noun, value in _others(place, node) if node.kind == "constant" else ():
            yield f"{noun} instead of {node.noun}", replaced(tree, node, constant(node.noun, value))


def _linears(place: Operation) -> Iterator[tuple[str, Linear]]:
    """Yields the other matrices of a layer, and its own of other layers, in words."""
    own = place.key.name
    others = [(name, getattr(place.layer, field)) for name, field in FIELDS.items() if name != own]
    layers = enumerate(place.model.layers)
    others += [(f"layer {n}", getattr(layer, FIELDS[own])) for n, layer in layers if n != place.key.layer]
    yield from ((noun, linear) for noun, linear in others if linear is not None)


def _others(place: Operation, node: Node) -> Iterator[tuple[str, float | NDArray | Matrix]]:
    """Yields what else of the model has the shape of a constant, in words."""
    field = _field(place)
    layers = [(f"that of layer {n}", layer) for n, layer in enumerate(place.model.layers) if n != place.key.layer and place.layer]
    if node.noun == "the norm's weight":
        here = [(f"that of {name}", getattr(place.layer, name)) for name in (*NORMS, *HEAD_NORMS.values()) if place.layer and name != field]
        here += [("that of result_norm", place.model.output_norm)] if place.layer else []
        for noun, value in [*here, *((noun, getattr(layer, field, None)) for noun, layer in layers)]:
            if value is not None and value.shape == node.value.shape:
                yield noun, value.astype(np.float64)
    elif node.noun in ("the matrix", "the bias", "the weight scale"):
        for noun, linear in _linears(place):
            alike = linear.shape == place.linear.shape or node.noun == "the weight scale"
            if alike and (value := _part(linear, node.noun)) is not None:
                yield f"that of {noun}", value


def other_product(place: Operation, tree: Node) -> Edits:
    """The matrix, scale and bias of another product."""
    for noun, linear in _linears(place) if place.layer is not None and place.key.name in FIELDS else ():
        if linear.shape == place.linear.shape:
            yield f"the weights of {noun} are used", matrix_product(place, tensor(place.inputs[0]), linear)


def _field(place: Operation) -> str:
    name = place.key.name
    return FIELDS.get(name, HEAD_NORMS.get(name, name))


def _part(linear: Linear, noun: str) -> float | NDArray | Matrix | None:
    if noun == "the bias":
        return None if linear.bias is None else linear.bias.astype(np.float64)
    if noun == "the weight scale":
        own = getattr(linear.weights, "scale", None)
        return float(1.0 if own is None else own) * float(1.0 if linear.scale is None else linear.scale)
    return matrix_of(linear)


def normed(place: Operation, tree: Node) -> Edits:
    """A norm of the result, where none belongs."""
    yield "a norm without a weight is applied to it", rms(tree, np.ones(1), place.config.eps)
    square = Node("reduction", (tree,), "the sum of squares", "sum of squares")
    yield "each position is divided by its length", Node("quotient", (tree, Node("root", (square,), "the length", "root")), "the direction")


def swapped(place: Operation, tree: Node) -> Edits:
    """Two operations in the opposite order, seen behind either of them."""
    single = [o for o in operations(place.model, place.dialect) if len(o.inputs) == 1 and o.key.layer == place.key.layer]
    steps = {o.key: o for o in single if o.key.name not in FIELDS and not o.key.name.endswith(("_codes", "_scale"))}
    for second in steps.values():
        first = steps.get(second.inputs[0])
        if first is None or place.key not in (first.key, second.key):
            continue
        trees = [expression(operation) for operation in (first, second)]
        if trees[0] is not None and trees[1] is not None:
            early = _reading(trees[1], first.key, tensor(first.inputs[0]))
            yield f"{second.key.name} comes before {first.key.name}", _reading(trees[0], first.inputs[0], early)


def _reading(tree: Node, key: Key, source: Node) -> Node:
    """An expression that reads something else in a tensor's place."""
    return mapped(tree, lambda node: source if node.kind == "tensor" and node.what == key else node)


def overrun(place: Operation, tree: Node) -> Edits:
    """A product whose last tile runs over the end of its rows: it adds the first inputs of the next token and weights of the next row."""
    for node, _ in nodes(tree):
        if node.kind == "matmul" and node.inputs[1].is_matrix:
            x, matrix = node.inputs
            rows, width = matrix.value.shape
            behind = matrix.value.moved(np.minimum(np.arange(rows) + 1, rows - 1))
            for count in (n for n in _TILES if n < width):
                first = Node("opaque", (x,), x.noun, partial(_behind, count))
                more = Node("matmul", (first, constant(matrix.noun, behind)), "the products beyond")
                yield (
                    f"sums run {count} inputs over the end of rows, into the next ones",
                    replaced(tree, node, Node("sum", (node, more), node.noun)),
                )


_TILES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def _behind(count: int, x: Array) -> Array:
    """The first `count` numbers of each next row, and 0."""
    return np.where(np.arange(x.shape[1]) < count, np.append(x[1:], 0 * x[:1], axis=0), 0)


def by_one(place: Operation, tree: Node) -> Edits:
    """A weight that is one too large or too small, as where an engine adds 1 itself, or the file has done it."""
    for node, _ in nodes(tree):
        if _is_vector(node):
            for words, kind in (("1 is added to", "sum"), ("1 is subtracted from", "difference")):
                yield f"{words} {node.noun}", replaced(tree, node, Node(kind, (node, constant("1", 1.0)), node.noun))
        if node.kind == "tensor" and node.what.name == "ffn_up":
            yield f"1 is added to {node.noun}", replaced(tree, node, Node("sum", (node, constant("1", 1.0)), node.noun))


def tokens(place: Operation, tree: Node) -> Edits:
    """Other tokens than those of the text."""
    for node, _ in nodes(tree):
        for shift in (1, -1, 2, 3, -2, -3) if node.what == TOKENS else ():
            yield f"token ids are off by {shift}", replaced(tree, node, Node("opaque", (node,), node.noun, partial(np.add, shift)))


# --- order ------------------------------------------------------------------------------------------------------------------------------


def order(place: Operation, tree: Node) -> Edits:
    """Things along an axis in another order."""
    for node, _ in nodes(tree):
        for axis, noun in _axes_of(node, tree):
            for words, order in functions.ORDERS.items():
                other = Node("order", (node,), node.noun, (words, axis))
                if node.is_matrix and axis:
                    other = constant(node.noun, node.value.by_row(partial(_in_order, order)))
                elif node.is_matrix:
                    other = constant(node.noun, node.value.moved(order(node.value.all[:, None], 0)[:, 0]))
                yield f"{noun} are {words}", replaced(tree, node, other)


def _in_order(order: Callable[[Array, int], Array], rows: Array) -> Array:
    return order(rows, 1)


def _axes_of(node: Node, tree: Node) -> Iterator[tuple[int, str]]:
    """Yields the axes of a node along which things may be in another order, with what they are."""
    if node.kind in ("heads", "grouped"):
        yield (
            1,
            f"heads of {node.noun.removeprefix('the heads of ')}"
            if node.kind == "grouped"
            else f"heads of {node.noun}, before they are shared,",
        )
        if node.kind == "heads":
            yield 2, f"the elements of each head of {node.noun}"
    elif node.kind == "tensor" and node.what != TOKENS:
        yield 0, f"rows of {node.noun}"
        yield 1, f"elements of {node.noun}"
    elif _is_vector(node):
        yield 0, f"the elements of {node.noun}"
    elif node.kind == "constant" and node.noun in ("the matrix", "the head's matrix"):
        yield 0, f"rows of {node.noun}"
        yield 1, f"columns of {node.noun}"
    elif node.kind == "outer":
        yield 1, "the frequencies"
    elif node.kind in ("paired", "weighted"):
        yield 1, "the heads of the result"
        yield 2, "the elements of each head of the result"
    if node is tree:
        yield 0, "rows of the result"
        yield 1, "elements of the result"


def transposed(place: Operation, tree: Node) -> Edits:
    """A matrix, or heads, read along the other axis."""
    for node, _ in nodes(tree):
        if node.kind == "constant" and node.noun in _TABLES:
            other = node.value.changed(lambda matrix: matrix.reshape(matrix.shape[::-1]).T)
            yield f"{node.noun} is read column by column, as if it were transposed", replaced(tree, node, constant(node.noun, other))
        if node.kind == "joined":
            yield "heads and their elements are transposed", replaced(tree, node, replace(node, kind="heads last"))
        if node.kind == "tensor" and node.what.name in ("kqv_out", "attn_sub_norm"):
            for count in {place.config.kv_heads, place.config.heads // place.config.kv_heads}:
                regrouped = Node("opaque", (node,), node.noun, partial(_regrouped, count, place.config.head_dim))
                yield f"heads of {node.noun} are in another order: {count} in turn, not one after another", replaced(tree, node, regrouped)


def _regrouped(count: int, width: int, x: Array) -> Array:
    """Heads [T, count * m * width] as m times `count` of them."""
    return x.reshape(len(x), count, -1, width).swapaxes(1, 2).reshape(x.shape)


_MATRICES = ("the matrix", "the head's matrix")
_TABLES = (*_MATRICES, "the embedding's table")


def _of_matrices(changes: Callable[[Operation], weights.Changes], nouns: tuple[str, ...] = _MATRICES) -> Callable[[Operation, Node], Edits]:
    """A kind of edits: what a matrix may be taken for."""

    @wraps(changes)
    def edited(place: Operation, tree: Node) -> Edits:
        for node, _ in nodes(tree):
            for words, change in changes(place) if node.kind == "constant" and node.noun in nouns else ():
                yield words, replaced(tree, node, constant(node.noun, change(node.value)))

    return edited


_of_tables = partial(_of_matrices, nouns=_TABLES)


# --- attention and rotation -------------------------------------------------------------------------------------------------------------


def groups(place: Operation, tree: Node) -> Edits:
    """Key-value heads that all query heads read by another rule."""
    if all(node.kind != "grouped" for node, _ in nodes(tree)):
        return
    heads, count = np.arange(place.config.heads), place.config.kv_heads
    own = heads // (place.config.heads // count)
    rules = (
        ("are dealt out in turn (h % G) instead of in groups", heads % count),
        ("are in the opposite order", count - 1 - own),
        ("are those of the next key-value head", (own + 1) % count),
        ("are all the first one", 0 * own),
    )
    for words, source in rules:
        yield f"key-value heads {words}", mapped(tree, partial(_grouped, source))


def _grouped(source: NDArray, node: Node) -> Node:
    """Keys and values by the key-value head of each query head."""
    if node.kind != "grouped":
        return node
    return Node("opaque", node.inputs, node.noun, lambda kv: kv[:, source])


def masks(place: Operation, tree: Node) -> Edits:
    """Other tokens that a token sees."""
    for node, _ in nodes(tree):
        if node.kind != "mask":
            continue
        for words in functions.MASKS:
            for n in place.borders if "{" in words else (0,):
                yield words.format(n=n), replaced(tree, node, replace(node, what=(node.what[0], words, n)))


def turns(place: Operation, tree: Node) -> Edits:
    """Another use of sines and cosines, and the other layout of pairs."""
    of_turns = [node for node, _ in nodes(tree) if node.kind == "turn"]
    if not of_turns:
        return
    cos, sin = sorted(of_turns, key=lambda node: node.what)
    backwards = Node("product", (sin, constant("-1", -1.0)), sin.noun)
    yield "the sine has the wrong sign: the rotation turns the other way", replaced(tree, sin, backwards)
    yield "sines and cosines are exchanged", with_nodes(tree, {cos: sin, sin: cos})
    layout = next(node.what for node, _ in nodes(tree) if node.kind == "paired")
    other, words = (
        ("adjacent", f"pairs are interleaved {_ADJACENT} instead of halves {_HALVES}")
        if layout == "halves"
        else ("halves", f"pairs are halves {_HALVES} instead of adjacent {_ADJACENT}")
    )
    yield words, mapped(tree, partial(_laid_out, other))
    if 2 * place.config.rope_pairs < place.config.head_dim:
        yield (
            "pairs are halves (i, i + K/2) of the whole head, also where it is rotated in part",
            mapped(tree, partial(_laid_out, "across")),
        )


def _laid_out(layout: str, node: Node) -> Node:
    """A step of a rotation with pairs in this layout."""
    if node.kind == "paired":
        return replace(node, what=layout)
    return replace(node, what=(layout, *node.what[1:])) if node.kind == "of pairs" else node


_HALVES, _ADJACENT = "(i, i + K/2)", "(2i, 2i+1)"


class _Positions(NamedTuple):
    """A rule of positions with a number, in words."""

    words: str
    rule: Callable[[np.ndarray, int], np.ndarray]


def _later(by: int, t: np.ndarray, n: int) -> np.ndarray:
    return t + by * (t >= n)


_POSITIONS = (
    _Positions("positions are too large by {n}", lambda t, n: t + n),
    _Positions("positions are too small by {n}", lambda t, n: t - n),
    _Positions("positions restart every {n} tokens", lambda t, n: t % n),
    _Positions("positions restart at position {n}", lambda t, n: np.where(t >= n, t - n, t)),
)
_LATER = tuple(
    _Positions(f"positions from {{n}} on are too {which} by {by}", partial(_later, sign * by))
    for by in (1, 2, 4, 8)
    for sign, which in ((1, "large"), (-1, "small"))
)


def positions(place: Operation, tree: Node) -> Edits:
    """Other positions of the tokens."""

    def change(node: Node) -> Edits:
        if node.kind != "positions":
            return
        yield "the last token is one position too far", Node("opaque", (node,), node.noun, lambda t: t + (t == len(t) - 1))
        yield "positions are all the last one", Node("order", (node,), node.noun, ("all the last one", 0))
        each = [(rule, range(1, max(place.length, 2))) for rule in _POSITIONS] + [(rule, place.borders) for rule in _LATER]
        for (words, rule), numbers in each:
            for n in numbers:
                yield words.format(n=n), Node("opaque", (node,), node.noun, lambda t, rule=rule, n=n: rule(t, n))

    return _each(tree, change)


# --- numbers and types ------------------------------------------------------------------------------------------------------------------


OPERANDS = "operands of products"


def rounded(place: Operation, tree: Node) -> Edits:
    """Numbers that are kept in fewer bits: both operands of products, or the numbers between two steps."""
    products = [node for node, _ in nodes(tree) if node.kind in _PRODUCTS]
    for kind in functions.TYPES:
        narrow = partial(_rounded, kind=kind)

        def of_operands(node: Node, narrow: Callable[[Node], Node] = narrow) -> Node:
            return node.over(*map(narrow, node.inputs)) if node.kind in _PRODUCTS else node

        def of_tables(node: Node, narrow: Callable[[Node], Node] = narrow) -> Node:
            return narrow(node) if node.kind in _TABLED and not reads(node) else node

        if products:
            yield f"{OPERANDS} are rounded to {kind}", mapped(tree, of_operands)
        if any(node.kind == "circle" for node, _ in nodes(tree)):
            yield f"frequencies, angles, sines and cosines are rounded to {kind}", mapped(tree, of_tables)
        for node, parents in nodes(tree):
            if node.kind not in _NOT_ROUNDED and not node.is_number and node.what != TOKENS:
                yield f"{node.noun if parents else 'the result'}: rounded to {kind}", replaced(tree, node, narrow(node))


def _rounded(node: Node, kind: str) -> Node:
    if node.is_matrix and not kind.endswith("one scale"):
        return constant(node.noun, node.value.by_row(functions.TYPES[kind]))
    return Node("rounded", (node,), node.noun, kind)


def narrow_inputs(place: Operation, tree: Node) -> Edits:
    """The input of a product in fewer bits, as one function gives it to all of them."""
    for node, _ in nodes(tree) if place.key.name in FIELDS else ():
        for words, narrow in weights.in_fewer_bits(place.linear.shape[1]) if node.kind == "tensor" else ():
            if any(said in words for said in ("bits,", "q8_0", "one scale")):
                yield f"the input is {words}", replaced(tree, node, Node("opaque", (node,), node.noun, narrow))


def narrow_weights(place: Operation, tree: Node) -> Edits:
    """All weights of a model in a narrow type."""

    def narrow(node: Node, kind: str) -> Node:
        if node.kind == "linears" and all(not isinstance(linear.weights, Ternary) for linear in node.what):
            return Node("opaque", (node,), node.noun, partial(_narrow, kind))
        return _rounded(node, kind) if node.kind == "constant" and not node.is_number else node

    for kind in NARROW_FLOATS:
        if any(node.kind in ("constant", "linears") and not node.is_number for node, _ in nodes(tree)):
            yield f"all weights are rounded to {kind}", mapped(tree, partial(narrow, kind=kind))


def _narrow(kind: str, linears: list[Linear]) -> list[Linear]:
    return [replace(linear, weights=functions.TYPES[kind](matrix_of(linear).whole()).astype(np.float32)) for linear in linears]


_PRODUCTS = ("matmul", "scores", "weighted")
_TABLED = ("power", "quotient", "outer", "circle")
_NOT_ROUNDED = ("linears", "heads", "joined", "mask", "rounded", "positions", "grouped")
_RELATIVE = (*np.geomspace(0.01, 0.9, 6), *np.geomspace(1.1, 100, 6))
_CODES = (7.0, 8.0, 15.0, 31.0, 63.0, 64.0, 126.0, 127.0, 127.5, 128.0, 254.0, 255.0, 256.0, 511.0, 32767.0)


def _candidates(noun: str, right: float) -> tuple[float, ...]:
    """Numbers between which another one lies. Behind a rounding the error is no smooth function of it, so those are the likely ones."""
    if noun == "the largest code":
        return _CODES
    wide = (1e-8, 1e-6, 1e-4, 1e-2, *_RELATIVE, 1e4, 1e6) if noun in ("epsilon", "the frequency base") else _RELATIVE
    return tuple(right * x for x in wide)


class Family(NamedTuple):
    """Edits with a number that is sought: in words with a brace for it, numbers between which it lies, and the expression with one."""

    words: str
    grid: tuple[float, ...]
    of: Callable[[float], Node]


Numbered = Iterator[tuple[str, tuple[float, ...], Node, Callable[[Node], Node]]]
"""Words, numbers, a node, and what stands in its place with a number."""


def _step(kind: str, node: Node, number: Node, what: object = None) -> Node:
    return Node(kind, (node, number), node.noun, what)


def numbers(place: Operation, tree: Node) -> Numbered:
    """Another number in the place of one of the model's."""
    for node, _ in nodes(tree):
        if node.is_number:
            right = float(node.value)
            words = f"{node.noun} is {{number:.6g}} instead of {right:.6g}"
            yield words, _candidates(node.noun, right), node, lambda number: number


def factors(place: Operation, tree: Node) -> Numbered:
    """A value between two steps that is multiplied by a number."""
    for node, parents in nodes(tree):
        is_bias = _is_vector(node) and node.noun.endswith("bias")
        if node.kind in (*_VALUES, "reduction") or (node.kind == "tensor" and node.what != TOKENS) or is_bias:
            noun = node.noun if parents else "everything"
            yield f"{_is(noun)} {{number:.6g}} times what is right", _RELATIVE, node, partial(_step, "product", node)


def shifts(place: Operation, tree: Node) -> Numbered:
    """A number that is added to a value between two steps."""
    for node, parents in nodes(tree):
        if node.kind in _VALUES and node.kind != "outer":
            noun = node.noun if parents else "every number"
            yield f"{{number:.6g}} is added to {noun}", _SHIFTS, node, partial(_step, "sum", node)


def limits(place: Operation, tree: Node) -> Numbered:
    """A value between two steps that is clipped."""
    for node, parents in nodes(tree):
        if node.kind in _VALUES or (node.kind == "tensor" and node.what != TOKENS):
            noun = node.noun if parents else "the result"
            for kind, words in (("clipped", "beyond"), ("clipped above", "above")):
                yield f"{_is(noun)} clipped {words} {{number:.6g}}", _LIMITS, node, partial(_step, kind, node)


_SHIFTS = (*np.geomspace(-10, -0.01, 5), *np.geomspace(0.01, 10, 5))
_LIMITS = (*np.geomspace(0.01, 100, 10), 448.0, 57344.0, 65504.0)
"""Limits, with the largest numbers of fp8 and float16 among them."""
_IN_ORDER = (
    *(tokens, left_out, other_function, inverted, twice, centred, moved, exchanged, by_one, overrun, turns, other_operand, reduced_in_part),
    *(masks, caches.cached, groups, positions, transposed, order),
    *(other_weight, other_product, *map(_of_matrices, (weights.inputs, weights.codes)), narrow_weights),
    *(_of_tables(weights.fewer_bits), narrow_inputs, _of_tables(weights.misread), _of_tables(weights.reordered)),
    *(other_tensor, swapped, normed, caches.stored, rounded),
)
KINDS: dict[str, Callable[[Operation, Node], Edits]] = {kind.__name__: kind for kind in _IN_ORDER}
"""Kinds of edits, the likelier first."""
NARROW = ("stored", "rounded", "narrow_weights", "narrow_inputs")
"""Kinds that engines do on purpose."""
TOGETHER = ("narrow_weights", "narrow_inputs", "reordered")
"""Kinds that are tried in all operations at once, which share a function."""
FAMILIES: dict[str, Callable[[Operation, Node], Numbered]] = {kind.__name__: kind for kind in (numbers, factors, shifts, limits)}
"""Kinds of edits with a number."""


def described(kind: str) -> str:
    """A kind of edits, in one sentence."""
    function = {**KINDS, **FAMILIES}[kind]
    return (function.__doc__ or "").strip().removesuffix(".")


def families(kind: str, place: Operation, tree: Node) -> Iterator[Family]:
    """Yields the edits of an expression with a number, of one kind."""
    for words, grid, node, of in FAMILIES[kind](place, tree):
        yield Family(words, grid, partial(_with_number, tree, node, of))


def _with_number(tree: Node, node: Node, of: Callable[[Node], Node], number: float) -> Node:
    return replaced(tree, node, of(constant("the number", number)))
