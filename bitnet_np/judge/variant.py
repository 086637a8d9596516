"""Variants of our own engine: the forward pass with something changed, at the kernels' speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..engine.backend import Backend, Wrapped
from ..engine.dialects import Dialect
from ..engine.forward_pass import run_whole
from ..engine.network import Edit, Record, Runtime, ignore
from ..engine.tokens import Tokens
from ..kernels import cpu
from ..model.records import MATRICES, Linear, Model
from ..traces.points import Key
from .law.graph import EMBEDDING, LOGITS, TOKENS

Floats = NDArray[np.float32]

Computed = Callable[[Mapping[Key, NDArray[np.float64]]], NDArray[np.float64]]
"""The tensors before it -> a tensor, [T, width] each."""


@dataclass(frozen=True)
class Variant:
    """One engine: the model, the dialect, the operations and the tensors that it computes with."""

    text: str  # what is changed
    model: Model = field(repr=False)
    dialect: Dialect
    ops: Backend = field(default=cpu, repr=False)
    edit: Edit | None = field(default=None, repr=False)
    feed: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = (
        None  # token ids [B, T] -> [B, T or more] that are fed; logits of the last T
    )

    def with_operations(self, **operations: Callable[..., Any]) -> Variant:
        """The variant with other kernels, by the names of backend.Backend."""
        return replace(self, ops=Wrapped(self.ops, **operations))

    def with_config(self, **fields: Any) -> Variant:
        """The variant with other numbers in the Config."""
        return self.with_model(config=replace(self.model.config, **fields))

    def with_model(self, **fields: Any) -> Variant:
        """The variant with other fields of the Model."""
        return replace(self, model=replace(self.model, **fields))

    def with_field(self, name: str, change: Callable[[Any], Any]) -> Variant:
        """The variant with one field of every layer changed in the same way."""
        return self.with_model(layers=tuple(replace(layer, **{name: change(getattr(layer, name))}) for layer in self.model.layers))

    def run(self, ids: NDArray[np.int64], record: Record = ignore) -> Floats:
        """Logits of whole sequences of checked ids [B, T]."""
        return run_whole(Runtime(self.model, self.dialect, self.ops, record, self.edit), Tokens.whole(ids))

    def linears(self) -> Iterator[Linear]:
        """Yields every linear of every layer."""
        for layer in self.model.layers:
            yield from (getattr(layer, name) for name in self.present(MATRICES))

    def work(self, rows: int) -> int:
        """Multiply-adds of some rows."""
        return rows * sum(prod(x.shape) for x in (self.model.head, *self.linears()))

    def present(self, names: Sequence[str]) -> list[str]:
        """Those of these fields of records.Layer that this model's layers have."""
        return [name for name in names if getattr(self.model.layers[0], name) is not None]


def variant_logits(variant: Variant, tokens: ArrayLike) -> Floats:
    """Logits of whole sequences of checked ids, [B, T] -> [B, T, V]: see forward_full."""
    ids = np.asarray(tokens, np.int64)
    if variant.feed is None:
        return variant.run(ids)
    return variant.run(variant.feed(ids))[:, -ids.shape[1] :]


def with_computed(base: Variant, text: str, computes: Mapping[Key, Computed], ids: NDArray[np.int64] | None = None) -> Variant:
    """The variant that computes some tensors otherwise, from the tensors before them in float64, [T, width] each.

    ids: the token ids [T] of the one sequence that it is run on, or more of them; None where no embedding is computed otherwise.
    """
    values: dict[Key, NDArray] = {}

    def edit(name: str, layer: int | None, x: NDArray) -> NDArray:
        key = Key(name, layer)
        if key == EMBEDDING:
            values.clear()
            values[TOKENS] = np.empty(0) if ids is None else ids[: len(x)]
        compute = computes.get(key)
        if compute is not None:
            values[key] = x.reshape(len(x), -1).astype(np.float64)  # right: it may be changed afterwards
            y = np.ascontiguousarray(compute(values), x.dtype)
            x = y.reshape(x.shape) if y.size == x.size else np.full_like(x, np.nan)
        values[key] = x.reshape(len(x), -1).astype(np.float64)
        if key == LOGITS:
            values.clear()  # many variants are kept
        return x

    return replace(base, text=text, edit=edit)


class OfSequence(dict):
    """Tensors of one of several sequences in float64, [T, width] each, out of those of all, when they are asked for."""

    def __init__(self, every: Mapping[Key, NDArray], rows: slice):
        super().__init__()
        self._every, self._rows = every, rows

    def __missing__(self, key: Key) -> NDArray[np.float64]:
        x = self._every[key][self._rows]
        return x if key == TOKENS else x.astype(np.float64)


def with_each_computed(base: Variant, every: Sequence[Mapping[Key, Computed]], ids: NDArray[np.int64], refused: set[int]) -> Variant:
    """The variant of as many sequences of the same token ids [T], each of which computes some tensors otherwise, as by `with_computed`.

    refused: gets the numbers of those sequences whose tensors cannot be computed, or have no finite numbers of this shape.
    """
    values: dict[Key, NDArray] = {TOKENS: np.tile(ids, len(every))}
    parts = [slice(len(ids) * i, len(ids) * (i + 1)) for i in range(len(every))]

    def edit(name: str, layer: int | None, x: NDArray) -> NDArray:
        key = Key(name, layer)
        values[key] = x.reshape(len(x), -1).copy()
        for i, computes in enumerate(every):
            if key in computes and i not in refused:
                try:
                    y = computes[key](OfSequence(values, parts[i]))
                except KeyError:  # it asks for a tensor of a later layer
                    y = np.empty(0)
                if y.size == values[key][parts[i]].size and np.isfinite(y).all():
                    values[key][parts[i]] = y.reshape(len(ids), -1)
                else:
                    refused.add(i)
        if key == LOGITS:
            refused.update(i for i, rows in enumerate(parts) if not np.isfinite(values[key][rows]).all())
            values[key] = np.nan_to_num(values[key], posinf=0.0, neginf=0.0)
        return values[key].reshape(x.shape).copy()

    return replace(base, edit=edit)


def scaled(base: Variant, name: str, factor: float) -> Variant:
    """The variant with the scale of one kind of matrix times a factor, in every layer."""

    def times(linear: Linear) -> Linear:
        return replace(linear, scale=np.float32(factor * (1.0 if linear.scale is None else float(linear.scale))))

    return replace(base.with_field(name, times), text=f"{name} times {factor}")
