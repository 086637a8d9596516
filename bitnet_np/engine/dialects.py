"""Dialects: where other engines round and the definition does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..base.validate import choice, flag, instance
from ..model.records import Model
from ..model.rope import yarn_ramp
from . import cache_types
from .backend import Array, Backend
from .tokens import Ints


@dataclass(frozen=True)
class Dialect:
    """The roundings of one engine.

    in_float16: keys, values, rotated queries, attention probabilities and the head's input are rounded to
    float16, as with a float16 KV cache and output matrix. stepped_angles: RoPE's angles are stepped from pair
    to pair in float32 instead of being computed one by one. bitnet.cpp's decode does both.
    ggml_activations: the input of a matrix is rounded as ggml's CPU backend does for the matrix's type, also
    where the definition quantises it to int8, and GELU comes from a table of float16. llama.cpp does that,
    with a float32 KV cache and without flash attention, and steps the angles. kv: the type of the KV cache
    (cache_types.py), to which keys and values are rounded before attention reads them, also in whole
    sequences; `with_cache` makes such a dialect.

    A backend computes all of these roundings, but for the angles.
    """

    name: str
    in_float16: bool
    stepped_angles: bool
    ggml_activations: bool = False
    kv: str = "float32"

    def __post_init__(self) -> None:
        instance("name", self.name, str)
        for name in ("in_float16", "stepped_angles", "ggml_activations"):
            flag(name, getattr(self, name))

    def with_cache(self, kind: str) -> Dialect:
        """The dialect with a KV cache of this type: float32, float16, bfloat16, int8, q8_0 or q4_0.
        Raises OptionError."""
        choice("kind", kind, cache_types.KINDS)
        return self if kind == self.kv else replace(self, name=f"{self.name}, kv={kind}", kv=kind)

    def rounded(self, x: Array, ops: Backend) -> Array:
        """Queries, keys, values or the head's input as this dialect keeps them."""
        return ops.round_as(x, "float16") if self.in_float16 else x

    def cached(self, x: Array, ops: Backend) -> Array:
        """Keys or values [R, G, K] as attention reads them."""
        x = self.rounded(x, ops)
        return x if self.kv == "float32" else ops.round_as(x, self.kv)

    def matrix_input(self, x: Array, table: Array, ops: Backend) -> Array:
        """The input of a matrix of floats as this dialect multiplies it: [R, M] -> [R, M]."""
        kind = _NARROW.get(table.dtype) if self.ggml_activations else None
        return x if kind is None else ops.round_as(x, kind)

    def angles(self, position: Ints, model: Model) -> NDArray[np.float64]:
        """RoPE's angles in radians: [R] -> [R, J]."""
        frequency = model.rope_frequency
        if not self.stepped_angles or not frequency.size:
            return np.multiply.outer(position, frequency)
        c = model.config
        divisors = np.ones(frequency.size, np.float32) if model.rope_factors is None else model.rope_factors
        second = min(1, frequency.size - 1)
        step = np.float32(frequency[second] * divisors[second] * c.rope_scaling)
        steps = np.full((position.size, frequency.size), step)
        steps[:, 0] = position
        angle = np.multiply.accumulate(steps, axis=1)
        if c.yarn is None:
            angle = angle / divisors * np.float32(1 / c.rope_scaling)
        else:
            ramp, shrunk = yarn_ramp(c).astype(np.float32), angle * np.float32(1 / c.yarn.factor)
            angle = shrunk * (1 - ramp) + angle * ramp
        return angle.astype(np.float64)


EXACT = Dialect("exact", in_float16=False, stepped_angles=False)
BITNET_CPP = Dialect("bitnet.cpp", in_float16=True, stepped_angles=True)
LLAMA_CPP = Dialect("llama.cpp", in_float16=False, stepped_angles=True, ggml_activations=True)
DIALECTS = {dialect.name: dialect for dialect in (EXACT, BITNET_CPP, LLAMA_CPP)}

_NARROW = {np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16"}
