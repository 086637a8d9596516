"""Expressions: what an operation computes, as a tree in which any node can be exchanged for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...model.records import Weights
from ...traces.points import Key
from . import formats, functions
from .functions import Array

Leaf = Callable[[Key], Array]
"""The tensors of a forward pass, by their keys."""


@dataclass(frozen=True, eq=False)
class Node:
    """A step of an operation. Nodes are the same if they are one object, so an edit shares all that it leaves alone.

    kind: a function of functions.py, "tensor", "constant" or "positions" (of the tokens). noun: what its value is called. what: the
    option of the function, such as the name of an activation; of a tensor its key, of positions the first one. value: that of a constant;
    of another step a dialect's own function of its inputs.
    """

    kind: str
    inputs: tuple[Node, ...] = ()
    noun: str = ""
    what: Any = None
    value: Any = field(default=None, repr=False)

    def over(self, *inputs: Node) -> Node:
        """The same step of other inputs."""
        return Node(self.kind, inputs, self.noun, self.what, self.value)  # dataclasses.replace takes three times as long

    @property
    def is_number(self) -> bool:
        """Whether it is a single number of the model."""
        return self.kind == "constant" and np.ndim(self.value) == 0 and not self.is_matrix

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix of the model."""
        return isinstance(self.value, Matrix)


_MOST = 1 << 28  # numbers of a matrix that are read at once: 2 GB
_BLOCK = 1 << 22


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix [N, M] of the model in float64, of which all rows are read, or some. Large models have no room for all of them at once.

    rows: indices [n] -> [n, M].
    """

    shape: tuple[int, int]
    rows: Callable[[NDArray[np.integer]], Array] = field(repr=False)
    in_parts: bool = True  # whether some rows are read without the others
    weights: Weights | None = field(default=None, repr=False)  # whose rows these are, if they are not changed

    @cached_property
    def all(self) -> NDArray[np.intp]:
        """The indices of all rows."""
        return np.arange(self.shape[0])

    @cached_property
    def kept(self) -> Array | None:
        """All rows of a small matrix of the model, which each mistake that is tried behind it reads again."""
        return self.rows(self.all) if self.weights is not None and self.shape[0] * self.shape[1] <= 1 << 16 else None

    def whole(self) -> Array:
        """All rows. Raises ValueError if they take gigabytes."""
        if self.shape[0] * self.shape[1] > _MOST:
            raise ValueError(f"a matrix {list(self.shape)} is too large to be taken for another as a whole")
        return self.rows(self.all)

    def product(self, x: Array) -> Array:
        """x [T, M] times the matrix, [T, N], some rows at a time."""
        step = max(1, _BLOCK // self.shape[1]) if self.in_parts else self.shape[0]
        parts = (self.all[i : i + step] for i in range(0, self.shape[0], step))
        return np.concatenate([x @ self.rows(part).T for part in parts], axis=1) if self.kept is None else x @ self.kept.T

    def by_row(self, change: Callable[[Array], Array]) -> Matrix:
        """The matrix with every row changed by itself."""
        return replace(self, rows=lambda which: change(self.rows(which)), weights=None)

    def moved(self, source: NDArray[np.integer]) -> Matrix:
        """The matrix of these rows."""
        return replace(self, shape=(len(source), self.shape[1]), rows=lambda which: self.rows(source[which]), weights=None)

    def changed(self, change: Callable[[Array], Array]) -> Matrix:
        """The matrix of this shape that a function makes of all of it."""
        return Matrix(self.shape, lambda which: change(self.whole())[which], in_parts=False)


def tensor(key: Key) -> Node:
    """A tensor of the forward pass."""
    return Node("tensor", noun=key.name, what=key)


def constant(noun: str, value: float | NDArray | Matrix) -> Node:
    """A number, an array or a matrix of the model."""
    return Node("constant", noun=noun, value=value)


def changed(node: Node, change: Callable[..., Any]) -> Node:
    """A function of a step's value in its place."""
    return Node("opaque", (node,), node.noun, change)


def product(node: Node, number: float | NDArray, noun: str = "") -> Node:
    """The product of a step with a number, in its place."""
    return Node("product", (node, constant(noun or f"{number:g}", number)), node.noun)


def nodes(tree: Node) -> list[tuple[Node, list[Node]]]:
    """All nodes of a tree with the nodes that read them, each once, a node before its inputs."""
    parents: dict[Node, list[Node]] = {tree: []}
    order: list[Node] = []

    def visit(node: Node) -> None:
        for child in node.inputs:
            if child not in parents:
                parents[child] = []
                visit(child)
            if node not in parents[child]:
                parents[child].append(node)
        order.append(node)

    visit(tree)
    return [(node, parents[node]) for node in reversed(order)]


def folded(node: Node, made: dict[Node, Any], make: Callable[[Node, list[Any]], Any]) -> Any:
    """What `make` gives for a node and for what it gave for its inputs; each node once, those that are made already not again.

    A closure that calls itself would keep all values until Python looks for cycles: gigabytes, in a long search.
    """
    if node not in made:
        made[node] = make(node, [made[child] if child in made else folded(child, made, make) for child in node.inputs])
    return made[node]


def _over(node: Node, inputs: list[Node]) -> Node:
    return node if tuple(inputs) == node.inputs else node.over(*inputs)


def mapped(tree: Node, change: Callable[[Node], Node]) -> Node:
    """The tree with change(node) in the place of every node, whose inputs are changed before."""
    return folded(tree, {}, lambda node, inputs: change(_over(node, inputs)))


def with_nodes(tree: Node, new: Mapping[Node, Node]) -> Node:
    """The tree with nodes exchanged wherever they stand. What stands for them may read them, or each other."""
    return folded(tree, dict(new), _over)


def replaced(tree: Node, old: Node, new: Node) -> Node:
    """The tree with a node exchanged wherever it stands."""
    return with_nodes(tree, {old: new})


def values_of(tree: Node, leaf: Leaf, rows: int, known: Mapping[Node, Any] | None = None) -> dict[Node, Any]:
    """The values of all steps of an expression of these tensors, for so many tokens. known: those of steps that need not run again."""
    values = dict(known or {})
    folded(tree, values, partial(step_value, leaf, rows))
    return values


def value_of(tree: Node, leaf: Leaf, rows: int, known: Mapping[Node, Any] | None = None) -> Array:
    """The value of an expression: see values_of."""
    return values_of(tree, leaf, rows, known)[tree]


def step_value(leaf: Leaf, rows: int, node: Node, inputs: list[Any]) -> Any:
    """The value of a step of these values, for so many tokens."""
    if node.kind == "tensor":
        return leaf(node.what)
    if node.kind == "constant":
        return node.value
    if node.value is not None:
        return node.value(*inputs)
    if node.kind == "positions":
        return (node.what or 0) + np.arange(rows, dtype=np.float64)
    if node.kind == "rows" and isinstance(inputs[0], Matrix):
        return inputs[0].rows(inputs[1].astype(np.intp) % inputs[0].shape[0])
    if node.kind == "matmul" and isinstance(inputs[1], Matrix):
        return inputs[1].product(inputs[0])
    inputs = [x.whole() if isinstance(x, Matrix) else x for x in inputs]
    return functions.FUNCTIONS[node.kind](*inputs, **({} if node.what is None else {"what": node.what}))


_BY_ELEMENT = ("sum", "difference", "product", "quotient", "curve", "clipped")


def at_columns(tree: Node, columns: NDArray[np.integer]) -> Node:
    """The expression of some elements of its result, [T, n]: of a product with a matrix only these rows of it are read."""
    if tree.kind in _BY_ELEMENT:
        return tree.over(*(at_columns(child, columns) for child in tree.inputs))
    if tree.kind == "rounded" and tree.what in formats.EACH:
        return tree.over(at_columns(tree.inputs[0], columns))
    if tree.kind == "matmul" and tree.inputs[1].is_matrix:
        x, matrix = tree.inputs
        return tree.over(x, constant(matrix.noun, matrix.value.moved(columns)))
    return Node("columns", (tree,), tree.noun, columns)


def tensors(tree: Node) -> list[Node]:
    """The tensors that an expression reads; without any it is a number of the model."""
    return [node for node, _ in nodes(tree) if node.kind == "tensor"]
