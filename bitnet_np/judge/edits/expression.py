"""Expressions: what an operation computes, as a tree in which any node can be exchanged for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...traces.points import Key
from . import functions

Array = NDArray[np.float64]
Leaf = Callable[[Key], Array]
"""The tensors of a forward pass, by their keys."""


@dataclass(frozen=True, eq=False)
class Node:
    """A step of an operation. Nodes are the same if they are one object, so an edit shares all that it leaves alone.

    kind: a function of functions.py, "tensor", "constant", "positions" (of the tokens), or "later": the node that `value` gives. noun: what
    its value is called. what: the option of the function, such as the name of an activation; of a tensor its key. value: that of a
    constant, or what gives it.
    """

    kind: str
    inputs: tuple[Node, ...] = ()
    noun: str = ""
    what: Any = None
    value: Any = field(default=None, repr=False)

    def over(self, *inputs: Node) -> Node:
        """The same step of other inputs."""
        return Node(self.kind, inputs, self.noun, self.what, self.value)

    @property
    def is_number(self) -> bool:
        """Whether it is a single number of the model."""
        return self.kind == "constant" and np.ndim(self.value) == 0 and not callable(self.value)


def tensor(key: Key) -> Node:
    """A tensor of the forward pass."""
    return Node("tensor", noun=key.name, what=key)


def constant(noun: str, value: Any) -> Node:
    """A number or an array of the model; an array may be given as a function, which is called when it is needed."""
    return Node("constant", noun=noun, value=value)


def nodes(tree: Node) -> list[tuple[Node, list[Node]]]:
    """All nodes of a tree with the nodes that read them, each once, a node before its inputs."""
    tree = _made(tree)
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


def _made(node: Node) -> Node:
    """A node that is made when it is needed."""
    return _made(node.value()) if node.kind == "later" else node


def mapped(tree: Node, change: Callable[[Node], Node]) -> Node:
    """The tree with change(node) in the place of every node, whose inputs are changed before."""
    made: dict[Node, Node] = {}

    def visit(node: Node) -> Node:
        if node not in made:
            own = _made(node)
            inputs = tuple(map(visit, own.inputs))
            made[node] = change(own if inputs == own.inputs else own.over(*inputs))
        return made[node]

    return visit(tree)


def replaced(tree: Node, old: Node, new: Node) -> Node:
    """The tree with a node exchanged wherever it stands. It is made when it is needed, as most edits are named only."""
    return Node("later", noun=tree.noun, value=cache(lambda: mapped(tree, lambda node: new if node is old else node)))


def value_of(tree: Node, leaf: Leaf, rows: int) -> Array:
    """The value of an expression of these tensors, for so many tokens."""
    known: dict[Node, Any] = {}

    def visit(node: Node) -> Any:
        if node not in known:
            own = _made(node)
            known[node] = _value(own, leaf, rows, [visit(child) for child in own.inputs])
        return known[node]

    return visit(tree)


def _value(node: Node, leaf: Leaf, rows: int, inputs: list[Any]) -> Any:
    if node.kind == "tensor":
        return leaf(node.what)
    if node.kind == "constant":
        return node.value() if callable(node.value) else node.value
    if node.kind == "positions":
        return np.arange(rows, dtype=np.float64)
    return functions.FUNCTIONS[node.kind](*inputs, **({} if node.what is None else {"what": node.what}))


def reads(tree: Node) -> bool:
    """Whether an expression reads a tensor: others are numbers of the model."""
    return any(node.kind == "tensor" for node, _ in nodes(tree))
