"""The kinds of edits: what may be done to any node of an expression. Each kind has one sentence; nodes bring the nouns."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np

from ...model.families import NORMS
from ...model.records import Linear, Ternary, with_rope_of
from ...traces.points import FIELDS, HEADS, POINTS, TOP_EXPERTS, Key
from ..law import functions
from ..law.definition import NORM_WEIGHT, matrix_of, matrix_product, of_experts_edited, of_one_expert, rms, rotation
from ..law.expression import Array, Matrix, Node, changed, constant, mapped, nodes, product, replaced, tensor, tensors, with_nodes
from ..law.formats import TYPES, format_of
from ..law.formats import rounded as narrowed
from ..law.graph import EMBEDDING, HEAD_NORMS, NORM, OF_EXPERTS, TOKENS, Operation, layer_input, operations
from ..law.precision import NARROW_FLOATS
from . import caches, quantisers, weights


class Edit(NamedTuple):
    """An edit of an expression."""

    words: str  # with a brace for the number that is sought, if one is
    tree: Any  # the whole expression with it; if a number is sought what gives one for a number
    id: str = ""  # of the mistake that it is, or what is done to what, by which the catalogue names it; none where it has no name
    type: str = ""  # to which numbers are rounded
    grid: tuple[float, ...] = ()  # numbers between which its own lies


Edits = Iterator[tuple]
"""The fields of edits of an expression, or of a node, with what stands in its place."""
Kind = Callable[[Operation, Node], Edits]
"""An operation and its expression, or that with an edit already -> its edits."""
_BINARY = ("sum", "difference", "product", "quotient", "at least")
_VALUES = (
    *_BINARY,
    *("matmul", "scores", "weighted", "total", "opaque", "rows", "taken", "dot", "cut", "paired", "power", "outer", "softmax sum"),
)
"""Kinds of nodes whose value is a step of its own, not the form of another one's."""
_AXES = {point.name: point.axes for point in POINTS}


def _of_nodes(change: Callable[[Operation, Node, list[Node]], Edits]) -> Kind:
    """A kind of edits of single nodes, of a place, a node, and the nodes that read it. Where two have the same words, these say the step,
    too."""

    @wraps(change)
    def edits(place: Operation, tree: Node) -> Iterator[Edit]:
        every = [(node, Edit(*edit)) for node, readers in nodes(tree) for edit in change(place, node, readers)]
        count = Counter(edit.words for _, edit in every)
        for node, edit in every:
            new_tree = partial(_at_number, tree, node, edit.tree) if edit.grid else replaced(tree, node, edit.tree)
            words = edit.words if count[edit.words] == 1 else f"{edit.words}, in {node.noun}"
            yield edit._replace(words=words, tree=new_tree)

    return edits


def _in_experts(kind: Kind) -> Kind:
    """A kind of edits, made in the product of every expert too."""

    @wraps(kind)
    def edits(place: Operation, tree: Node) -> Edits:
        yield from kind(place, tree)
        if (one := of_one_expert(place, tree)) is not None:
            for words, _, *named in kind(place, one):
                again = lambda product, words=words: {own: new for own, new, *_ in kind(place, product)}[words]  # noqa: E731
                yield words, of_experts_edited(place, tree, again), *named

    return edits


def _at_number(tree: Node, node: Node, of: Callable[[Node], Node], number: float) -> Node:
    return replaced(tree, node, of(constant("the number", number)))


def _operands_of(node: Node) -> list[tuple[int, Node]]:
    """The operands of a step of two, numbered; none of others."""
    return [*enumerate(node.inputs)] * (node.kind in _BINARY)


def _is(noun: str) -> str:
    """A noun with its verb."""
    head = noun.split(" of ")[0]
    return f"{noun} are" if head.endswith("s") and not head.endswith("bias") else f"{noun} is"


def _role(noun: str) -> str:
    """A noun without the name of a tensor or of its matrix."""
    return "a matrix" if noun in _MATRICES else noun.partition(",")[0] if " " in noun else "a tensor"


def _done(node: Node) -> str:
    """What a step does: the option of a function, or the noun of the operand that it takes."""
    return node.what if node.kind in functions.OF_ONE else node.inputs[1].noun


# --- steps ------------------------------------------------------------------------------------------------------------------------------


_OPPOSITE = {
    "sum": ("difference", "{} subtracted"),
    "difference": ("sum", "{} added instead of subtracted"),
    "product": ("quotient", "{} used as a divisor instead of a factor"),
    "quotient": ("product", "{} used as a factor instead of a divisor"),
}


@_in_experts
@_of_nodes
def steps(place: Operation, node: Node, readers: list[Node]) -> Edits:
    """A step, or an operand of one, that is not there, done twice, or the opposite of what it should be."""
    if node.kind in functions.OF_ONE:
        noun = node.noun if node.kind == "curve" else node.what
        yield f"{_is(noun)} missing", node.inputs[0], f"missing {noun}"
        yield f"{_is(node.what)} applied twice", node.over(node)
    if node.kind == "rounded":
        yield f"the rounding of {node.noun} is left out", node.inputs[0]
    other, says = _OPPOSITE.get(node.kind, ("", ""))
    for i, operand in _operands_of(node):
        rest, role = (*node.inputs[:i], *node.inputs[i + 1 :]), _role(operand.noun)
        without = rest[0] if len(rest) == 1 else node.over(*rest)
        if i or (node.kind in ("sum", "product") and any(map(tensors, rest))):
            yield f"{_is(operand.noun)} {'not divided out' if node.kind == 'quotient' else 'missing'}", without, f"missing {role}"
        if i or node.kind == "sum":
            yield f"{_is(operand.noun)} applied twice", node.over(node, operand), f"twice {role}"
        if i and other:
            yield says.format(_is(operand.noun)), replace(node, kind=other, inputs=(without, operand)), f"opposite {role}"
    if node.kind == "sum" and len(node.inputs) == 2:
        first = node.inputs[0].noun
        yield f"{_is(first)} subtracted", replace(node, kind="difference", inputs=node.inputs[::-1]), f"opposite {_role(first)}"


@_of_nodes
def centred(place: Operation, node: Node, readers: list[Node]) -> Edits:
    """Numbers whose mean is subtracted from them."""
    for reduction in [reader for reader in readers if reader.kind == "reduction"][:1]:
        is_norm = reduction.what == "mean square"
        said = ", as in LayerNorm" if is_norm else f" from {node.noun}"
        mean = Node("reduction", (node,), "the mean", "mean")
        yield f"the mean is subtracted{said}", Node("difference", (node, mean), node.noun), "norm.mean_subtracted" * is_norm


@_of_nodes
def moved(place: Operation, node: Node, readers: list[Node]) -> Edits:
    """A step that comes before the one it follows, or first of all."""
    kinds = (*_BINARY, *functions.OF_ONE)
    if node.kind in kinds and node.inputs[0].inputs and node.inputs[0].kind in kinds:
        inner = node.inputs[0]
        first = node.over(inner.inputs[0], *node.inputs[1:])
        words = f"{_done(inner)} is outside the root" if node.kind == "root" else f"{_done(node)} comes before {_done(inner)}"
        yield words, inner.over(first, *inner.inputs[1:]), f"{node.kind} before {_done(inner)}"
    earlier = [step for step, _ in nodes(node) if step.kind in kinds and tensors(step)] if node.kind == "mask" else []
    for step in earlier:  # scores of what is not seen are minus infinity before all of these
        early = replaced(node.inputs[0], step.inputs[0], node.over(step.inputs[0]))
        yield f"the mask comes before {step.noun if step.kind == 'curve' else _done(step)}", early


def displaced(place: Operation, tree: Node) -> Edits:
    """A number of the model that another step is multiplied with, or divided by, than should be."""
    for node, _ in nodes(tree):
        if node.kind in ("product", "quotient") and node.inputs[1].is_number and tensors(node):
            without = replaced(tree, node, node.inputs[0])
            for step in (step for step, _ in nodes(without) if step is not node.inputs[0] and tensors(step)):
                words = f"{_is(node.inputs[1].noun)} applied to {step.noun} instead of {node.inputs[0].noun}"
                yield words, replaced(without, step, node.over(step, node.inputs[1]))


@_of_nodes
def other_function(place: Operation, node: Node, readers: list[Node]) -> Edits:
    """Another function of the same table."""
    for name in (functions.OF_ONE | {"reduction": functions.REDUCTIONS}).get(node.kind, ()):
        if name != node.what:
            wrong, right = (_written(function, node.kind, place.config.gated) for function in (name, node.what))
            yield f"{wrong} instead of {right}", replace(node, what=name, value=None), f"{name} instead of {node.what}"


_OF_GATE = {
    "relu^2": "relu(gate)^2",
    "square": "gate^2",
    "quick GELU": "gate * sigmoid(1.702 gate)",
    "GELU's approximation by tanh": "GELU(gate)",
    "the exact GELU": "exact GELU(gate)",
    "nothing": "gate",
}


def _written(name: str, kind: str, gated: bool) -> str:
    """A function of a table as people write it; an activation of gate and up, or of up alone."""
    if kind == "activation" and gated:
        return f"{_OF_GATE.get(name, f'{name}(gate)')} * up"
    if kind == "total":
        return {"sum": "the sum of a token's experts", "mean": "their mean"}.get(name, f"the {name} of a token's experts alone")
    return f"the {name}" if kind == "reduction" else name


def routers(place: Operation, tree: Node) -> Edits:
    """Weights of a token's experts that are no softmax, and results without weights."""
    softmax = next((node for node, _ in nodes(tree) if node.noun == "the probabilities"), None)
    if place.key.name == "ffn_moe_weights" and softmax is not None:
        logits = tensors(softmax)[0]
        raw = "the weights are the logits of the router themselves: the softmax is missing"
        sigmoids = Node("sigmoid", (logits,), "the sigmoids", "sigmoid")
        yield "the weights are sigmoids of the logits, not their softmax", replaced(tree, softmax, sigmoids)
        yield raw, replaced(tree, softmax, logits)
        if tree.noun == "the weights":
            yield f"{raw}, and their sum is not divided out", replaced(tree.inputs[0], softmax, logits)
    if place.key.name == "ffn_moe_out":
        yield "the results of experts are averaged, without weights", Node("total", tree.inputs[0].inputs[:1], tree.noun, "mean")


def whole(place: Operation, tree: Node) -> Edits:
    """An operation as a whole: left out, done twice, with the other sign, or normed."""
    leaves = tensors(tree)
    if len(leaves) == 1 and leaves[0].what != TOKENS:
        words, *named = _MISSING.get(place.key.name, ("everything is left out",))
        yield words, leaves[0], *named
        yield f"it is done twice{', as where all angles are doubled' * (place.key.name in ROPE)}", replaced(tree, leaves[0], tree)
    if place.key.name == "l_out" and place.key.layer is not None:
        yield "the layer is skipped: its output is its input", tensor(layer_input(place.model, place.key.layer)), "layers.skipped"
    if tree.noun == "the sum with the bias" and place.key.name in _MISSING:
        plain = rms(leaves[0], tree.inputs[0].inputs[1].value, place.config.eps)
        yield "the mean is not subtracted, as in RMSNorm, and its bias is missing", plain, "norm.no_mean_no_bias"
    if place.key == EMBEDDING:
        yield "embeddings are scaled by the root of the width", product(tree, place.config.width**0.5), "embedding.scaled"
    yield "the sign is flipped", product(tree, -1.0)
    yield "a norm without a weight is applied to it", rms(tree, np.ones(1), place.config.eps)
    square = Node("reduction", (tree,), "the sum of squares", "sum of squares")
    unit = Node("quotient", (tree, Node("root", (square,), "the length", "root")), "the direction")
    yield "each position is divided by its length", unit, "pooling.unit"


ROPE = ("Qcur_rope", "Kcur_rope")
NORMING = (*NORMS, "attn_post_norm", "ffn_post_norm", *HEAD_NORMS, *(f"{name}_in" for name in FIELDS), NORM.name)
"""The tensors of all norms."""
_MISSING = dict.fromkeys(NORMING, ("the norm is missing: its input comes out unchanged", "norm.missing"))
_MISSING |= dict.fromkeys(ROPE, ("the rotation is missing", "rope.missing"))


# --- operands ---------------------------------------------------------------------------------------------------------------------------


def exchanged(place: Operation, tree: Node) -> Edits:
    """Two tensors in each other's place, or one of them in both."""
    leaves = tensors(tree)
    for i, a in enumerate(leaves):
        for b in leaves[i + 1 :]:
            if _AXES.get(a.what.name) == _AXES.get(b.what.name):
                yield f"{a.what.name} and {b.what.name} are exchanged", with_nodes(tree, {a: b, b: a}), _SWAPPED.get(place.key.name, "")
                yield f"{a.what.name} is read instead of {b.what.name}", replaced(tree, b, a)
                yield f"{b.what.name} is read instead of {a.what.name}", replaced(tree, a, b)
    if len(leaves) == 2 and place.key.name in ("ffn_out", "ffn_moe_swiglu"):
        both = tuple(sorted(leaves, key=lambda leaf: leaf.noun))  # gate, and up
        for words, split in _SPLITS.items():
            parts = {leaf: Node("opaque", both, leaf.noun, partial(split, i)) for i, leaf in enumerate(both)}
            yield f"gate and up are {words}", with_nodes(tree, parts)
    own = {node: node.what.name for node in leaves if node.what.name.startswith(("Qcur", "Kcur"))}
    if place.key.name == "kqv_out" and len(own) == 2 and not place.config.rotates(place.key.layer):  # type: ignore[arg-type]
        turned = {node: rotation(replace(place, key=Key(f"{name[0]}cur_rope", place.key.layer)), node) for node, name in own.items()}
        yield "queries and keys are rotated, as in other layers", with_nodes(tree, turned)
    if {*ROPE} <= {node.what.name for node in leaves}:
        yield from (("values are rotated, as keys are", replaced(tree, v, rotation(place, v))) for v in leaves if v.what.name == "Vcur")


_SWAPPED = {"kqv_out": "attention.keys_values_swapped", **dict.fromkeys(("ffn_out", "ffn_moe_swiglu"), "activation.swapped")}
_SPLITS: dict[str, Callable[[int, Array, Array], Array]] = {
    "read in turn, and lie one behind the other": lambda i, a, b: np.concatenate([a, b], axis=1)[:, i::2],
    "read one behind the other, and lie in turn": lambda i, a, b: np.split(np.stack([a, b], axis=2).reshape(len(a), -1), 2, axis=1)[i],
}
"""Wrong ways to take the result of one matrix for gate and up."""


def other_operand(place: Operation, tree: Node) -> Edits:
    """The value of another step in the place of an operand."""
    steps = [node for node, _ in nodes(tree) if node.kind not in ("constant", "positions")]

    def change(place: Operation, node: Node, readers: list[Node]) -> Edits:
        earlier = [step for step in steps if step not in node.inputs and all(below is not node for below, _ in nodes(step))]
        for i, operand in _operands_of(node):
            for step in earlier:
                if step.noun != operand.noun and operand.kind != "largest of":  # which would only make all weights alike
                    yield f"{step.noun} instead of {operand.noun}", node.over(*node.inputs[:i], step, *node.inputs[i + 1 :])

    return _of_nodes(change)(place, tree)


@_of_nodes
def other_tensor(place: Operation, node: Node, readers: list[Node]) -> Edits:
    """Another tensor of its shape in the place of one, or added to it: a layer's input, what a norm read, what the layer before gave."""
    if node.kind != "tensor":
        return
    for key in _beside(place, node.what):
        noun, other = node.noun.rstrip(","), changed(tensor(key), _unless_zero)
        yield f"{_near(key, place)} is read instead of {noun}", other, _read_instead(key, node, place)
        yield f"{_near(key, place)} is added to {noun}", Node("sum", (node, tensor(key)), node.noun)


def _unless_zero(x: Array) -> Array:
    """A tensor that has numbers: one that is all 0 stands for whatever was not written."""
    return x if x.any() else np.full_like(x, np.nan)


def _is_vector(node: Node) -> bool:
    """Whether it is a vector of the model, such as a bias."""
    return node.kind == "constant" and np.ndim(node.value) == 1


def _beside(place: Operation, other: Key) -> Iterator[Key]:
    """Yields the tensors of the same width that an engine has at hand, as they do not follow from it: those around the layers, of its layer
    and of the one before."""
    c, layer = place.config, place.key.layer
    widths = {"T D": c.width, "T HK": c.heads * c.head_dim, "T GK": c.kv_heads * c.head_dim, "T F": c.ffn}
    width, following = widths.get(_AXES.get(other.name, "")), {place.key}
    for operation in operations(place.model, place.dialect) if width else ():
        key = operation.key
        if following.intersection((key, *operation.inputs)):
            following.add(key)
        elif (layer is None or key.layer in (None, layer, layer - 1)) and key != other and widths.get(_AXES.get(key.name, "")) == width:
            yield key


def _near(key: Key, place: Operation) -> str:
    if place.key.layer is not None and key == layer_input(place.model, place.key.layer):
        return "the layer's input"
    return key.name if key.layer in (None, place.key.layer) else f"{key.name} of layer {key.layer}"


def _read_instead(key: Key, node: Node, place: Operation) -> str:
    """The id of the mistake to read a tensor instead of another one."""
    own, is_input = node.what.name, place.key.layer is not None and key == layer_input(place.model, place.key.layer)
    is_here = not is_input and key.layer in (None, place.key.layer)
    if node.noun != own:  # the residual
        return "residual.layer_input" if is_input else "residual.normed" * (is_here and key.name.endswith("_norm"))
    if is_here:
        return "input.unnormed" * own.endswith("_norm")
    return {"result_norm": "head.unnormed", "l_out": "layers.last_skipped"}.get(own, "") * (key.name == "l_out" and not is_input)


@_of_nodes
def other_weight(place: Operation, node: Node, readers: list[Node]) -> Edits:
    """A weight of another layer, or of another step; or the matrix, the scale or the bias of another product."""
    name, is_scale, others = place.key.name, node.noun == "the weight scale", list[tuple[str, Any]]()
    shape = np.shape(node.inputs[0].value if node.noun == NORM_WEIGHT and node.inputs else node.value)
    if node.noun == NORM_WEIGHT and place.layer is not None:
        field = HEAD_NORMS.get(name, name)
        others = [(other, getattr(place.layer, other)) for other in (*NORMS, *HEAD_NORMS.values()) if other != field]
        others += [("result_norm", place.model.output_norm)]
        others += [(f"layer {n}", getattr(layer, field, None)) for n, layer in enumerate(place.model.layers) if n != place.key.layer]
    elif node.noun in ("the matrix", "the bias", "the weight scale"):
        trees = [(other, matrix_product(place, tensor(place.inputs[0]), linear)) for other, linear in _linears(place)]
        others = [(other, step.value) for other, tree in trees for step, _ in nodes(tree) if step.noun == node.noun]
    for other, value in others:
        if value is not None and np.shape(value) == shape:
            id = "beside" if is_scale and other in _BESIDE.get(name, ()) else node.noun
            yield f"{node.noun} of {other} is used", constant(node.noun, value), id


def another(place: Operation, tree: Node) -> Edits:
    """An operation as another one of its form is computed: with all that the model has for that one."""
    words, form, own = _form(place)
    seen, start = {own}, next((node.what for node, _ in nodes(tree) if node.kind == "positions"), 0)
    for o in operations(place.model, place.dialect, start or 0) if words else ():
        is_own_name = o.key.name == place.key.name and o.key.name not in OF_EXPERTS  # experts of all layers take too long
        if is_own_name or o.key.layer in (None, place.key.layer):
            _, other_form, other = _form(o)
            if other_form == form and other not in seen:
                seen.add(other)
                which = {True: "local", False: "global"}.get(other, f"layer {o.key.layer}" if is_own_name else o.key.name)
                yield words.format(which), changed(o.make(o, *map(tensor, place.inputs)), _unless_zero), form[0]


def _form(o: Operation) -> tuple[str, tuple[str, Any], Any]:
    """What is said where another operation is in the place of one, with a brace for that; an id, with the form of those that may be; and
    what tells these from each other. Empty words where none may."""
    name, layer = o.key.name, o.key.layer
    if name in OF_EXPERTS or (name in FIELDS and layer is not None):
        return "the weights of {} are used", ("weights.others", name == "ffn_moe_down" if name in OF_EXPERTS else o.linear.shape), o.key
    if name in NORMING and o.tree.noun == "the sum with the bias":
        return "the weight and the bias of {} are used", ("norm.others", ""), o.key
    if name in ROPE:
        return "queries and keys are rotated as in {} layers", ("rope.other_layers", name), layer in o.config.local_layers
    if name == "kqv_out":
        return "the window of {} is used", ("attention.other_layers", ""), (o.config.window_of(layer),)  # type: ignore[arg-type]
    return "", ("", ""), None


_OF_ATTENTION, _OF_FEED_FORWARD = ("Qcur", "Kcur", "Vcur"), ("ffn_gate", "ffn_up", "ffn_down")
_BESIDE = dict.fromkeys(_OF_ATTENTION, _OF_ATTENTION) | dict.fromkeys(_OF_FEED_FORWARD[:2], _OF_FEED_FORWARD)
"""The products whose scales one may be given, in the place of its own."""


def _linears(place: Operation) -> Iterator[tuple[str, Linear]]:
    """Yields the other matrices of a layer, and its own of other layers, in words."""
    own = place.key.name
    others = [(name, getattr(place.layer, field)) for name, field in FIELDS.items() if name != own]
    layers = enumerate(place.model.layers)
    others += [(f"layer {n}", getattr(layer, FIELDS[own])) for n, layer in layers if n != place.key.layer]
    yield from ((noun, linear) for noun, linear in others if linear is not None)


_OF_HEADS = dict.fromkeys(ROPE, "the rotation") | dict.fromkeys(HEAD_NORMS, "the norm of heads")
"""What the same operations of queries and of keys are called, so that one mistake may be in both."""


def swapped(place: Operation, tree: Node) -> Edits:
    """Two operations in the opposite order, seen behind either of them."""
    single = [o for o in operations(place.model, place.dialect) if len(o.inputs) == 1 and o.key.layer == place.key.layer]
    steps = {o.key: o for o in single if o.key.name not in FIELDS and not o.key.name.endswith(("_codes", "_scale", TOP_EXPERTS))}
    for second in steps.values():
        first = steps.get(second.inputs[0])
        if first is None or place.key not in (first.key, second.key):
            continue
        early = second.make(second, tensor(first.inputs[0]))
        said, before = (_OF_HEADS.get(o.key.name, o.key.name) for o in (second, first))
        id = "norm.after_rope" * (first.key.name in HEAD_NORMS and second.key.name in ROPE)
        yield f"{said} comes before {before}", first.make(first, early), id


@_in_experts
@_of_nodes
def overrun(place: Operation, node: Node, readers: list[Node]) -> Edits:
    """A product whose last tile runs over the end of its rows: it adds the first inputs of the next token and weights of the next row."""
    if node.kind == "matmul" and node.inputs[1].is_matrix:
        x, matrix = node.inputs
        rows, width = matrix.value.shape
        behind = constant(matrix.noun, matrix.value.moved(np.minimum(np.arange(rows) + 1, rows - 1)))
        for count in (n for n in _TILES if n < width):
            first = changed(x, lambda x, n=count: np.where(np.arange(x.shape[1]) < n, np.append(x[1:], 0 * x[:1], axis=0), 0))
            more = Node("matmul", (first, behind), "the products beyond")
            inside = changed(more, lambda y: np.where(np.arange(y.shape[1]) < y.shape[1] - 1, y, 0))
            said = f"sums run {count} inputs over the end of rows, into the next ones"
            yield said, Node("sum", (node, more), node.noun)
            yield f"{said}, and zeros behind the last", Node("sum", (node, inside), node.noun)


_TILES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


# --- order ------------------------------------------------------------------------------------------------------------------------------


@_of_nodes
def order(place: Operation, node: Node, readers: list[Node]) -> Edits:
    """Things along an axis in another order; a matrix, or heads, read along the other axis."""
    if node.kind == "constant" and node.noun in _TABLES:
        other = node.value.changed(lambda matrix: matrix.reshape(matrix.shape[::-1]).T)
        id = "weights.transposed" * (node.noun in _MATRICES)
        yield f"{node.noun} is read column by column, as if it were transposed", constant(node.noun, other), id
    if node.kind == "joined":
        yield "heads and their elements are transposed", replace(node, kind="heads last"), "attention.transposed"
    if node.kind == "tensor" and node.what.name in ("kqv_out", "attn_sub_norm"):
        for count in {place.config.kv_heads, place.config.heads // place.config.kv_heads}:
            shape = (-1, count, place.config.heads // count, place.config.head_dim)
            regrouped = changed(node, lambda x, shape=shape: x.reshape(shape).swapaxes(1, 2).reshape(x.shape))
            yield f"heads of {node.noun} are in another order: {count} in turn, not one after another", regrouped
    if _is_vector(node) and node.value.size == place.length:
        yield f"{node.noun} goes along positions instead of elements", constant(node.noun, node.value[:, None])
    for axis, noun in _axes_of(node, not readers):
        for words, order in functions.ORDERS.items():
            other = Node("order", (node,), node.noun, (words, axis))
            if node.is_matrix and axis:
                other = constant(node.noun, node.value.by_row(partial(order, axis=1)))
            elif node.is_matrix:
                other = constant(node.noun, node.value.moved(order(node.value.all[:, None], 0)[:, 0]))
            yield f"{noun} are {words}", other


def starts(place: Operation, tree: Node) -> Edits:
    """Tensors whose rows, or heads, are read from other places than they begin at: by another stride, or from aligned ones."""
    leaves = [leaf for leaf in tensors(tree) if leaf.what.name in _AXES and leaf.what.name != TOP_EXPERTS]
    for some in (*([leaf] for leaf in leaves), *[leaves[1:]] * (len(leaves) > 2)):
        names = " and ".join(leaf.what.name for leaf in some)
        size, is_of_heads = place.config.head_dim, all(leaf.what.name in HEADS for leaf in some)
        for what in ("row", "head") if is_of_heads else ("row",):
            for words, start in functions.starts(what, _OFFSETS):
                read = partial(functions.read_from, start=start, size=size if what == "head" else None)
                yield f"{names}: {words}", with_nodes(tree, {leaf: changed(leaf, read) for leaf in some})
        for n in (n for n in _OFFSETS if is_of_heads and n > 0):
            padded = {leaf: changed(leaf, partial(functions.read_padded, size=size, more=n)) for leaf in some}
            yield f"{names}: heads are read as if {n} numbers lay behind each, and zeros behind the row", with_nodes(tree, padded)


_OFFSETS = (1, -1, 2, -2, 4, -4, 8, -8, 16, 32)


def _axes_of(node: Node, is_result: bool) -> Iterator[tuple[int, str]]:
    """Yields the axes of a node along which things may be in another order, with what they are."""
    what = "matrix" if node.noun in _MATRICES else node.kind
    if _is_vector(node) and node.noun != "the factors of the frequencies":  # whose wrong laws a rotation shows
        what = "vector"
    for axis, things in (*_THINGS.get(what if node.what != TOKENS else "", ()), *_RESULT * is_result):
        yield axis, things.format(noun=node.noun)


_RESULT = ((0, "rows of the result"), (1, "elements of the result"))
_HEADS = ((1, "the heads of the result"), (2, "the elements of each head of the result"))
_THINGS: dict[str, tuple[tuple[int, str], ...]] = {
    "grouped": ((1, "{noun}"),),
    "heads": ((1, "heads of {noun}, before they are shared,"), (2, "the elements of each head of {noun}")),
    "tensor": ((0, "rows of {noun}"), (1, "elements of {noun}")),
    "vector": ((0, "the elements of {noun}"),),
    "matrix": ((0, "rows of {noun}"), (1, "columns of {noun}")),
    "outer": ((1, "the frequencies"),),
    "paired": _HEADS,
    "weighted": _HEADS,
}
_MATRICES = ("the matrix", "the head's matrix")
_TABLES = (*_MATRICES, "the embedding's table")


def _of_matrices(changes: Callable[[Matrix], weights.Changes], nouns: tuple[str, ...] = _MATRICES) -> Callable[[Operation, Node], Edits]:
    """A kind of edits: what a matrix may be taken for."""

    @wraps(changes)
    def change(place: Operation, node: Node, readers: list[Node]) -> Edits:
        if node.kind == "constant" and node.noun in nouns:
            yield from ((words, constant(node.noun, of(node.value)), *named) for words, of, *named in changes(node.value))

    return _of_nodes(change)


_of_tables = partial(_of_matrices, nouns=_TABLES)


# --- attention and rotation -------------------------------------------------------------------------------------------------------------


def groups(place: Operation, tree: Node) -> Edits:
    """Key-value heads that all query heads read by another rule."""
    grouped = [node for node, _ in nodes(tree) if node.kind == "grouped"]
    if not grouped:
        return
    heads, count = np.arange(place.config.heads), place.config.kv_heads
    own = heads // (place.config.heads // count)
    rules = (
        ("are dealt out in turn (h % G) instead of in groups", heads % count, "attention.heads_in_turn"),
        ("are in the opposite order", count - 1 - own),
        ("are those of the next key-value head", (own + 1) % count),
        ("are all the first one", 0 * own),
    )
    for words, source, *named in rules:
        by_head = {node: Node("opaque", node.inputs, node.noun, partial(np.take, indices=source, axis=1)) for node in grouped}
        yield f"key-value heads {words}", with_nodes(tree, by_head), *named


@_of_nodes
def masks(place: Operation, node: Node, readers: list[Node]) -> Edits:
    """Other tokens that a token sees."""
    masked = next((below for below, _ in nodes(node) if below.kind == "mask"), None) if node.noun == "the probabilities" else None
    if masked is not None:
        unmasked, cut = with_nodes(node, {masked: masked.inputs[0]}), partial(functions.FUNCTIONS["mask"], what=masked.what)
        late = changed(unmasked, lambda p: np.where(np.isfinite(cut(p)), p, 0))
        yield "the mask comes after the softmax: weights of what is seen do not add up to 1", late
    if node.kind == "scores":  # as queries of zeros, equal keys and much else make them: attention's output does not tell which
        yield "all seen tokens have the same weight: their scores are alike", changed(node, np.zeros_like)
    if node.kind != "mask":
        return
    for rule, (words, _) in functions.MASKS.items():
        least = 2 if rule == "border" else 1  # the first token alone is no chunk
        for n in [n for n in place.borders if n >= least] if "{" in words else (0,):
            id = f"attention.{rule}" if rule in ("no_window", "last_only") else "attention.mask" * (n == 0)
            yield words.format(n=n), replace(node, what=(node.what[0], rule, n)), id


def turns(place: Operation, tree: Node) -> Edits:
    """Another use of sines and cosines, and the other layout of pairs."""
    of_turns = [node for node, _ in nodes(tree) if node.kind == "turn"]
    if not of_turns:
        return
    cos, sin = sorted(of_turns, key=lambda node: node.what)
    yield "the rotation turns the other way", replaced(tree, sin, product(sin, -1.0)), "rope.backwards"
    yield "sines and cosines are exchanged", with_nodes(tree, {cos: sin, sin: cos})
    halves, adjacent = "halves (i, i + K/2)", "adjacent (2i, 2i+1)"
    other = ("adjacent", f"interleaved {adjacent.removeprefix('adjacent ')} instead of {halves}")
    if place.config.rope != "halves":
        other = ("halves", f"{halves} instead of {adjacent}")
    yield f"pairs are {other[1]}", mapped(tree, partial(_laid_out, other[0])), "rope.pairs"
    if 2 * place.config.rope_pairs < place.config.head_dim:
        words = "pairs are halves (i, i + K/2) of the whole head, also where it is rotated in part"
        yield words, mapped(tree, partial(_laid_out, "across")), "rope.pairs"


def _laid_out(layout: str, node: Node) -> Node:
    """A step of a rotation with pairs in this layout."""
    if node.kind == "paired":
        return replace(node, what=layout)
    return replace(node, what=(layout, *node.what[1:])) if node.kind == "of pairs" else node


Rule = Callable[[np.ndarray, int], np.ndarray]
_SHIFTED: dict[str, Rule] = {"positions are too large by {n}": lambda t, n: t + n, "positions are too small by {n}": lambda t, n: t - n}
_POSITIONS: dict[str, Rule] = {
    **_SHIFTED,
    "positions restart every {n} tokens": lambda t, n: t % n,
    "positions restart at position {n}": lambda t, n: np.where(t >= n, t - n, t),
}
"""Rules of positions with a number up to the length."""
_LATER: dict[str, Rule] = {
    f"positions from {{n}} on are too {'large' if by > 0 else 'small'} by {abs(by)}": lambda t, n, by=by: t + by * (t >= n)  # type: ignore[misc]
    for by in (1, -1, 2, -2, 4, -4, 8, -8)
}
"""The same of a border."""


@_of_nodes
def positions(place: Operation, node: Node, readers: list[Node]) -> Edits:
    """Other tokens than those of the text, or other positions of them."""
    if node.what == TOKENS:
        for by in (1, -1, 2, 3, -2, -3):
            yield f"token ids are off by {by}", changed(node, partial(np.add, by)), f"ids {by}"
    if node.kind != "positions":
        return
    yield "the last token is one position too far: it was fed twice", changed(node, lambda t: t + (t == len(t) - 1)), "rope.fed_twice"
    yield "positions are all the last one", Node("order", (node,), node.noun, ("all the last one", 0))
    scaling = place.config.rope_scaling
    if place.key.name.endswith("_rope") and scaling != with_rope_of(place.model, place.key.layer).config.rope_scaling:
        yield "positions are scaled in local layers, too", changed(node, lambda t: t / scaling), "rope.scaled_local"
    for rules, numbers in ((_POSITIONS, range(1, max(place.length, 2))), (_LATER, place.borders)):
        for words, rule in rules.items():
            for n in numbers:
                id = "rope.positions" * (n == 1 and words in _SHIFTED)
                yield words.format(n=n), changed(node, lambda t, rule=rule, n=n: rule(t, n)), id


# --- numbers and types ------------------------------------------------------------------------------------------------------------------


@_of_nodes
def usual_numbers(place: Operation, node: Node, readers: list[Node]) -> Edits:
    """A number that engines are known to have in the place of one of the model's; a weight with 1 added, by the engine or in the file."""
    if _is_vector(node) or (node.kind == "tensor" and node.what.name == "ffn_up"):
        yield f"1 is added to {node.noun}", _step("sum", node, constant("1", 1.0))
    if _is_vector(node):
        yield f"1 is subtracted from {node.noun}", _step("difference", node, constant("1", 1.0))
    if node.noun == "the score scale" and place.config.attention_scale is not None:
        own = place.config.head_dim**-0.5
        words = f"scores are multiplied by 1/sqrt(K) instead of {place.config.attention_scale:.4g}"
        yield words, constant(node.noun, own), "switch.attention_scale"
    for value in _USUAL.get(node.noun, ()):
        if not np.isclose(value, float(node.value), rtol=1e-3):
            yield f"{node.noun} is {value:g} instead of {float(node.value):g}", constant(node.noun, value), node.noun


_USUAL = {"epsilon": (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3), "the frequency base": (1e4, 5e5, 1e6)}


def rounded(place: Operation, tree: Node) -> Edits:
    """Numbers that are kept in fewer bits: both operands of products, or the numbers between two steps."""
    every = [
        (node, readers) for node, readers in nodes(tree) if node.kind not in _NOT_ROUNDED and not node.is_number and node.what != TOKENS
    ]
    for kind in TYPES:
        for id, (words, change) in _ROUNDED.items():
            new = mapped(tree, partial(change, partial(_rounded, kind=kind)))
            if new is not tree:
                yield words.format(kind=kind), new, id * (kind in _PLAIN or id in OPERANDS), kind
        for node, readers in every:
            noun = node.noun if readers else "the result"
            named = (_role(noun), kind) if kind in _PLAIN else (f"{_role(noun)} in {kind}",)
            yield f"{noun}: rounded to {kind}", replaced(tree, node, _rounded(node, kind)), *named


_PLAIN = [kind for kind, one in TYPES.items() if one.grid != "tf32" and " " not in kind]
"""Types whose roundings have names."""


def _operands(narrow: Callable[[Node], Node], node: Node) -> Node:
    return node.over(*map(narrow, node.inputs)) if node.kind in _PRODUCTS else node


def _flash(narrow: Callable[[Node], Node], node: Node) -> Node:
    """As flash attention has it: exponentials are rounded where they are multiplied by values, and not where they are summed."""
    if node.kind != "weighted" or node.inputs[0].kind != "quotient":
        return _operands(narrow, node) if node.kind == "scores" else node
    p, values = node.inputs
    return node.over(p.over(narrow(p.inputs[0]), p.inputs[1]), narrow(values))


def _edge(narrow: Callable[[Node], Node], node: Node) -> Node:
    is_edge = node.kind == "quotient" and node.inputs[0].kind == "exponential"
    return node.over(narrow(node.inputs[0]), node.inputs[1]) if is_edge else node


def _angles(kinds: tuple[str, ...], narrow: Callable[[Node], Node], node: Node) -> Node:
    return narrow(node) if node.kind in kinds and not tensors(node) else node


def _table(narrow: Callable[[Node], Node], node: Node) -> Node:
    return narrow(node.over(narrow(node.inputs[0]))) if node.kind == "activation" else node


_TABLED = ("power", "quotient", "outer", "circle")
OPERANDS = ("operands", "flash")
"""The ids of roundings of what products read."""
_ROUNDED: dict[str, tuple[str, Callable[[Callable[[Node], Node], Node], Node]]] = {
    "operands": ("operands of products are rounded to {kind}", _operands),
    "flash": ("operands of products, exponentials instead of probabilities, are rounded to {kind}", _flash),
    "edge": ("the exponentials, where they are not summed: rounded to {kind}", _edge),
    "all angles": ("frequencies, angles, sines and cosines are rounded to {kind}", partial(_angles, _TABLED)),
    "frequencies": ("frequencies and angles are rounded to {kind}", partial(_angles, _TABLED[:-1])),
    "turns": ("angles, sines and cosines are rounded to {kind}", partial(_angles, _TABLED[-2:])),
    "activation.narrow": ("the activation's input and value are rounded to {kind}, as in a table of it", _table),
}


def _rounded(node: Node, kind: str) -> Node:
    if node.is_matrix and TYPES[kind].is_by_row:
        return constant(node.noun, node.value.by_row(TYPES[kind]))
    return Node("rounded", (node,), node.noun, kind)


def narrow_inputs(place: Operation, tree: Node) -> Edits:
    """The input of a product in fewer bits, as one function gives it to all of them."""
    if place.key.name not in FIELDS:
        return
    every = weights.types_of_rows(place.linear.shape[1])
    for node, kind in ((node, kind) for node in tensors(tree) for kind in every if kind.startswith("int") or kind == "q8_0"):
        yield f"the input is rounded to {format_of(kind).noun}", replaced(tree, node, changed(node, partial(narrowed, kind=kind)))


def narrow_weights(place: Operation, tree: Node) -> Edits:
    """All weights of a model in a narrow type."""

    def narrow(node: Node, kind: str) -> Node:
        if node.kind == "linears" and all(not isinstance(linear.weights, Ternary) for linear in node.what):
            to_type = TYPES[kind]
            return changed(node, lambda linears: [replace(x, weights=np.float32(to_type(matrix_of(x.weights).whole()))) for x in linears])
        return _rounded(node, kind) if node.kind == "constant" and not node.is_number else node

    for kind in NARROW_FLOATS:
        new = mapped(tree, partial(narrow, kind=kind))
        if new is not tree:
            yield f"weights are rounded to {kind}", new, "", kind


_PRODUCTS = ("matmul", "scores", "weighted")
_NOT_ROUNDED = ("linears", "heads", "joined", "mask", "rounded", "positions", "grouped")


# --- numbers that are sought --------------------------------------------------------------------------------------------------------------

_RELATIVE = (*np.geomspace(0.01, 0.9, 6), *np.geomspace(1.1, 100, 6))
_SHIFTS = (*np.geomspace(-10, -0.01, 5), 0.0, *np.geomspace(0.01, 10, 5))
_LIMITS = (*np.geomspace(0.01, 100, 10), 448.0, 57344.0, 65504.0)
"""Limits, with the largest numbers of fp8 and float16 among them."""
_CODES = (7.0, 8.0, 15.0, 31.0, 63.0, 64.0, 126.0, 127.0, 127.5, 128.0, 254.0, 255.0, 256.0, 511.0, 32767.0)
"""Largest codes. Behind a rounding the error is no smooth function of the number, so these are the likely ones."""


def _step(kind: str, node: Node, number: Node) -> Node:
    return Node(kind, (node, number), node.noun)


@_of_nodes
def numbers(place: Operation, node: Node, readers: list[Node]) -> Iterator[Edit]:
    """Another number in the place of one of the model's."""
    if node.is_number:
        right, wide = float(node.value), node.noun in ("epsilon", "the frequency base")
        factors = (1e-8, 1e-6, 1e-4, 1e-2, *_RELATIVE, 1e4, 1e6) if wide else _RELATIVE
        grid = _CODES if node.noun == "the largest code" else tuple(right * x for x in factors)
        yield Edit(f"{node.noun} is {{number}} instead of {right:.6g}", lambda number: number, grid=grid)
    leaves = tensors(node)
    if node.noun == "the product with up" and len(leaves) == 2:
        gate, up = sorted(leaves, key=lambda leaf: leaf.noun)

        def clamped(limit: Node) -> Node:
            return with_nodes(node, {gate: _step("clipped above", gate, limit), up: _step("clipped", up, limit)})

        yield Edit(f"{gate.noun} above {{number}} is clipped to it, and {up.noun} beyond it", clamped, grid=_LIMITS)
    if node.kind == "mask":
        yield Edit("masked scores are {number} instead of minus infinity", partial(_step, "finite", node), grid=_SHIFTS)

        def added(number: Node) -> Node:
            return Node("opaque", (node, node.inputs[0], number), node.noun, lambda x, every, n: np.where(np.isfinite(x), x, every + n))

        yield Edit("the mask adds {number} to scores instead of minus infinity", added, grid=_SHIFTS)
    if node.kind == "exponential":
        yield Edit(f"{node.noun} are {{number}} at least", partial(_step, "at least", node), grid=tuple(np.geomspace(1e-6, 1, 7)))


@_of_nodes
def values(place: Operation, node: Node, readers: list[Node]) -> Iterator[Edit]:
    """A value between two steps that is multiplied by a number, that a number is added to, or that is clipped."""
    is_value = node.kind in _VALUES or (node.kind == "tensor" and node.what != TOKENS)
    if is_value or node.kind == "reduction" or (_is_vector(node) and node.noun.endswith("bias")):
        noun = node.noun if readers else "everything"
        yield Edit(f"{_is(noun)} {{number}} times what is right", partial(_step, "product", node), grid=_RELATIVE)
    if node.kind in _VALUES and node.kind != "outer":
        yield Edit(f"{{number}} is added to {node.noun if readers else 'every number'}", partial(_step, "sum", node), grid=_SHIFTS)
    if is_value:
        clipped = f"{_is(node.noun if readers else 'the result')} clipped"
        yield Edit(f"{clipped} beyond {{number}}", partial(_step, "clipped", node), grid=_LIMITS)
        yield Edit(f"{clipped} above {{number}}", partial(_step, "clipped above", node), grid=(-10.0, -1.0, -0.1, *_LIMITS))


_IN_ORDER: tuple[Kind, ...] = (
    *(steps, other_function, whole, routers, centred, moved, displaced, exchanged, usual_numbers, overrun, turns, other_operand),
    *(masks, caches.cached, groups, positions, order, starts),
    *(
        other_weight,
        another,
        *(_in_experts(_of_matrices(one)) for one in (weights.inputs, weights.codes)),
        _of_nodes(quantisers.quantised),
        narrow_weights,
    ),
    *(_of_tables(weights.fewer_bits), narrow_inputs, _of_tables(weights.misread), _of_tables(weights.reordered)),
    *(other_tensor, swapped, caches.stored, rounded, numbers, values, _of_tables(weights.packed)),
)
KINDS: dict[str, Kind] = {kind.__name__: kind for kind in _IN_ORDER}
"""Kinds of edits, the likelier first."""
NARROW = ("stored", "rounded", "narrow_weights", "narrow_inputs")
"""Kinds that engines do on purpose."""
SHARED = ("narrow_weights", "narrow_inputs", "reordered")
"""Kinds that are tried in all operations at once, which share a function."""
LOCAL = ("values",)
"""Kinds that are in one tensor, whose number is not sought in several at once."""
