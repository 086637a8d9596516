"""Whole small models of every family, type of numbers, dialect and type of cache, for the self-test: every tensor that they compute."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import ALL_BLOCK_TYPES
from ..engine.backend import Backend
from ..engine.cache_types import KINDS
from ..engine.dialects import DIALECTS, EXACT, LLAMA_CPP, Dialect
from ..engine.forward_pass import forward_full, forward_incremental
from ..model.families import ARCHITECTURES
from .models import random_model
from .noise import Noise

TABLES = ("float32", "float16", "bfloat16", "ternary", *(kind.name for kind in ALL_BLOCK_TYPES))
"""What the matrices of a model can be in."""

_WAYS = (forward_full, forward_incremental)
_WIDE = {"family": "llama", "width": 256, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "n_layers": 1}


def _tensors(
    ops: Backend, ways: tuple[Callable, ...], dialects: tuple[Dialect, ...], count: int, kinds: dict[str, Any], **rest: Any
) -> tuple[NDArray, ...]:
    """All tensors of the passes of `count` tokens through a model, and the logits. kinds: of random_model; rest: of each way."""
    arrays: list[NDArray] = []
    shape = {"n_layers": 2, "vocab": 37} | kinds
    model = random_model(Noise(1), **shape)
    tokens = np.arange(count).reshape(1, count) * 5 % shape["vocab"]
    for way in ways:
        for dialect in dialects:
            record = lambda name, layer, array: arrays.append(array.copy())  # noqa: E731
            arrays.append(way(model, tokens, dialect=dialect, ops=ops, record=record, **rest))
    return tuple(arrays)


def model_cases(ops: Backend) -> dict[str, Callable[[], tuple[NDArray, ...]]]:
    """The cases by name. Each goes through the whole sequence at once and token by token."""
    tensors = partial(_tensors, ops)
    named: dict[str, Callable[[], tuple[NDArray, ...]]] = {}
    for family in ARCHITECTURES:
        named[f"model, {family}"] = partial(tensors, _WAYS, (EXACT, LLAMA_CPP), 9, {"family": family})
    for table in TABLES:
        kinds = _WIDE | {"weights": table, "table": "float32" if table == "ternary" else table}
        named[f"model, {table}"] = partial(tensors, _WAYS, (EXACT, LLAMA_CPP), 5, kinds)
    for dialect in (*DIALECTS.values(), *map(EXACT.with_cache, KINDS)):
        kinds = {"family": "llama", "table": "float16", "width": 40, "ffn": 48, "head_dim": 32, "n_layers": 1}
        named[f"model, {dialect.name}"] = partial(tensors, _WAYS, (dialect,), 70, kinds)
    return named
