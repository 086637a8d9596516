"""`bitnet-np inspect`: what a model file holds, and whether it is supported."""

import argparse
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import Error, NonFiniteError, shown
from ..base.tables import printable, table
from ..engine.forward_pass import forward_full
from ..files.load import model_from, open_model
from ..judge.report.text import show_layers
from ..model.families import FAMILIES
from ..model.matrix_facts import constant_matrices, kinds_of_matrices
from ..model.records import Config, Model
from ..traces.points import POOLED, meaning
from . import progress
from .printing import answer, plain, short


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
    model = config = problem = None
    try:
        config = source.config
        model = model_from(source, progress.bar("checking weights"))
    except Error as error:
        problem = str(error)
    keys = source.keys
    types: dict[str, list[int]] = {}
    for tensor in source.tensors.values():
        entry = types.setdefault(tensor.type.name, [0, 0, 0])
        for i, value in enumerate((1, int(np.prod(tensor.shape, dtype=object)), tensor.data.size)):
            entry[i] += value
    matrices = kinds_of_matrices(model, types) if model else {}
    warnings = list(constant_matrices(model)) if model else []
    cache = 2 * 4 * config.n_layers * config.kv_width if config else None
    facts: dict[str, Any] = {
        "file": str(source.path),
        "bytes": source.size,
        "kind": source.kind,
        "version": source.version,
        "supported": not problem,
        "problem": problem,
        "config": asdict(config) if config else None,
        "kv_cache_bytes_per_token": cache,
        "types": {name: dict(zip(("tensors", "elements", "bytes"), entry, strict=True)) for name, entry in types.items()},
        "matrices": matrices,
        "warnings": warnings,
        "keys": {key: plain(value) for key, value in keys.items()},
    }
    tensors = [(t.name, t.type.name, " x ".join(map(str, t.shape)), t.data.size) for t in source.tensors.values()]
    points = _points(model) if arguments.points and model else []
    parts = [f"{printable(str(source.path))}: {source.kind}, {source.size:,} bytes, {len(source.tensors)} tensors"]
    parts[0] += f"\nsupported: {f'no: {printable(problem)}' if problem else 'yes'}"
    if warnings:
        parts.append("\n".join(f"warning: {warning}" for warning in warnings))
    if config:
        sizes, unusual, usual = _config(config)
        parts.append(table(("size", ""), [*sizes, ("KV cache, bytes per token", f"{cache:,}")]))
        parts += [table((heading, ""), rows) for heading, rows in (("differs from the usual", unusual), ("as usual", usual)) if rows]
    parts.append(table(("type", "tensors", "elements", "bytes"), [(name, *entry) for name, entry in types.items()]))
    if matrices:
        parts.append(table(("matrices of layers", "number"), list(matrices.items())))
    values = [(key, short(v) if isinstance(v, float) else shown(v) if isinstance(v, str | int) else plain(v)) for key, v in keys.items()]
    parts.append(table(("key", "value"), values))
    if arguments.tensors:
        facts["tensors"] = [dict(zip(("name", "type", "shape", "bytes"), row, strict=True)) for row in tensors]
        parts.append(table(("tensor", "type", "shape", "bytes"), tensors))
    if arguments.points:
        facts["points"] = [dict(zip(("name", "layers", "shape", "dtype", "meaning"), row, strict=True)) for row in points]
    if points:
        lines = [(name, show_layers(layers), " x ".join(map(str, axes)), dtype, text) for name, layers, axes, dtype, text in points]
        parts.append(table(("point", "layers", "shape", "dtype", "meaning"), lines))
        parts.append("A dump names them so, those of a layer with its number, such as attn_norm-0. T is the number of tokens.")
    return answer(arguments, facts, "\n\n".join(parts))
