"""`bitnet-np inspect`: what a model file holds, and whether it is supported."""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import Error, NonFiniteError, shown
from ..base.tables import printable, table
from ..engine.forward_pass import forward_full
from ..files.gguf_file import Value
from ..files.load import Source, model_from, open_model
from ..judge.report.text import show_layers
from ..model.families import FAMILIES
from ..model.matrix_facts import constant_matrices, kinds_of_matrices
from ..model.records import Config, Model
from ..traces.points import POOLED, meaning
from . import progress
from .printing import answer


def plain(value: Value | dict | list | None) -> str | int | float | None:
    """A metadata value in a form that JSON can hold: arrays by their length, NaN and infinity by their names."""
    if isinstance(value, dict | list | None):
        return None if value is None else json.dumps(value)
    if not isinstance(value, str | int | float):
        return f"[{len(value)} values]"
    return value if isinstance(value, str) or math.isfinite(value) else str(value)


def short(value: object) -> str:
    """A value as text; a number that is a float32 by the fewest digits that distinguish it from others."""
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            narrow = np.float32(value)
        return str(narrow if float(narrow) == value else value)
    return str(value)


def _points(model: Model) -> list[tuple[str, list[int | None], tuple[int | str, ...], str, str]]:
    """Name, layers, axes, dtype and meaning of each point that a forward pass records."""
    layers_by_point: dict[tuple[str, tuple[int | str, ...], str], list[int | None]] = {}

    def record(name: str, layer: int | None, array: NDArray) -> None:
        rows = 1 if name == POOLED else "T"
        axes = (rows,) if array.ndim == 1 else (rows, array.size // len(array))
        layers_by_point.setdefault((name, axes, str(array.dtype)), []).append(layer)

    with suppress(NonFiniteError):  # the logits come last, and their numbers do not matter here
        forward_full(model, [[0]], record=record)
    return [(name, layers, axes, dtype, meaning(name)) for (name, axes, dtype), layers in layers_by_point.items()]


def _config(config: Config) -> tuple[list[tuple[str, str]], ...]:
    """The settings that every model has, those that differ from what is usual in its family, and those that do not and say something."""
    usual = {field.name: field.default for field in fields(config) if field.default is not MISSING}
    usual |= FAMILIES[config.architecture].config
    rows: tuple[list[tuple[str, str]], ...] = ([], [], [])
    for name, value in vars(config).items():
        which = 0 if name not in usual else 1 if value != usual[name] else 2
        if which < 2 or value not in (None, (), False):
            rows[which].append((name, short(value) if isinstance(value, float | int | str) else shown(value) if value else "none"))
    return rows


def run(arguments: argparse.Namespace) -> int:
    """Print the facts; returns the exit code."""
    source = open_model(arguments.model, arguments.download)
    model = config = None
    problem = ""
    try:
        config = source.config
        model = model_from(source, progress.bar("checking weights"))
    except Error as error:
        problem = str(error)
    facts = _facts(source, config, model, problem)
    parts = _parts(source, config, facts)
    if arguments.tensors:
        tensors = [(t.name, t.type.name, " x ".join(map(str, t.shape)), t.data.size) for t in source.tensors.values()]
        facts["tensors"] = _by_column(("name", *_TENSOR[1:]), tensors)
        parts.append(table(_TENSOR, tensors))
    if arguments.points:
        points = _points(model) if model else []
        facts["points"] = _by_column(("name", *_POINT[1:]), points)
        if points:
            lines = [(name, show_layers(layers), " x ".join(map(str, axes)), *rest) for name, layers, axes, *rest in points]
            parts.append(table(_POINT, lines))
            parts.append("A dump names them so, those of a layer with its number, such as attn_norm-0. T is the number of tokens.")
    return answer(arguments, facts, "\n\n".join(parts))


_TYPE = ("tensors", "elements", "bytes")
_TENSOR = ("tensor", "type", "shape", "bytes")
_POINT = ("point", "layers", "shape", "dtype", "meaning")


def _facts(source: Source, config: Config | None, model: Model | None, problem: str) -> dict[str, Any]:
    """What JSON says of a model file."""
    types: dict[str, dict[str, int]] = {}
    for tensor in source.tensors.values():
        total = types.setdefault(tensor.type.name, dict.fromkeys(_TYPE, 0))
        for name, value in zip(_TYPE, (1, prod(tensor.shape), tensor.data.size), strict=True):
            total[name] += value
    return {
        "file": str(source.path),
        "bytes": source.size,
        "kind": source.kind,
        "version": source.version,
        "supported": not problem,
        "problem": problem or None,
        "config": asdict(config) if config else None,
        "kv_cache_bytes_per_token": 2 * 4 * config.n_layers * config.kv_width if config else None,
        "types": types,
        "matrices": kinds_of_matrices(model, types) if model else {},
        "warnings": list(constant_matrices(model)) if model else [],
        "keys": {key: plain(value) for key, value in source.keys.items()},
    }


def _parts(source: Source, config: Config | None, facts: dict[str, Any]) -> list[str]:
    """The same for people: a paragraph or a table each."""
    supported = f"no: {printable(facts['problem'])}" if facts["problem"] else "yes"
    parts = [f"{printable(str(source.path))}: {source.kind}, {source.size:,} bytes, {len(source.tensors)} tensors\nsupported: {supported}"]
    if facts["warnings"]:
        parts.append("\n".join(f"warning: {warning}" for warning in facts["warnings"]))
    if config:
        sizes, unusual, usual = _config(config)
        parts.append(table(("size", ""), [*sizes, ("KV cache, bytes per token", f"{facts['kv_cache_bytes_per_token']:,}")]))
        parts += [table((heading, ""), rows) for heading, rows in (("differs from the usual", unusual), ("as usual", usual)) if rows]
    parts.append(table(("type", *_TYPE), [(name, *total.values()) for name, total in facts["types"].items()]))
    if facts["matrices"]:
        parts.append(table(("matrices of layers", "number"), list(facts["matrices"].items())))
    return [*parts, table(("key", "value"), [(key, _value(value)) for key, value in source.keys.items()])]


def _value(value: Value) -> str | int | float | None:
    """A metadata value in a table."""
    if isinstance(value, float):
        return short(value)
    return shown(value) if isinstance(value, str | int) else plain(value)


def _by_column(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[dict[str, object]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]
