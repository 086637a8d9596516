"""The metadata of a GGUF file -> Config, and back.

A key of the architecture that is not known here could change the arithmetic, so it is refused by name. A Config that could not be read
back from a file's keys is also refused.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ..base.errors import FileFormatError, UnsupportedError, shown
from ..model.families import ARCHITECTURES, FAMILIES, implied, windowed_layers
from ..model.records import Config, Pooling, Yarn, window_fields
from ..model.rope import yarn_magnitude
from .gguf_file import GGUFFile
from .gguf_names import KEYS, LONGROPE, NEUTRAL, REQUIRED, YARN, keys_of
from .overrides import how_to_ignore, not_implemented
from .tensors import of_file


def read_config(file: GGUFFile) -> Config:
    """The Config of the model in the file. Raises FileFormatError, UnsupportedError or ShapeError, naming the file and the key."""
    name = file.require("general.architecture", str)
    if name not in FAMILIES:
        raise UnsupportedError(f"{file.path}: general.architecture is {name!r}, supported are {', '.join(ARCHITECTURES)}")
    family = FAMILIES[name]
    value = _read_keys(file, name)
    usual = ("context", "width", "n_layers", "heads", "kv_heads", "eps", "rope_base", "rope_width", "parallel_residual", *family.numbers)
    fields: dict[str, Any] = {"kv_heads": value["heads"], "rope_base": 10000.0, "local_rope_base": family.local_rope_base}
    fields |= {field: value[field] for field in usual if field in value}
    fields["head_dim"] = _head_dim(file, name, value)
    if fields.get("rope_width") == fields["head_dim"]:
        del fields["rope_width"]
    fields |= {"pooling": _pooling(file, name, value), "vocab": _vocabulary(file, name, value)}
    fields["ffn"] = value.get("expert_ffn", value["ffn"])
    with of_file(file.path):
        config = Config(name, **{**fields, **_scaling(file, name, value), **family.config})
        config = replace(config, **_window(file, name, value))  # lists of layers come after the check of their number
        return replace(config, **implied(config))


def _head_dim(file: GGUFFile, architecture: str, value: Mapping[str, Any]) -> int:
    """The width of a head, which values have too, and RoPE where the family rotates whole heads."""
    heads, width, head_dim = value["heads"], value["width"], value.get("head_dim")
    if head_dim is None:
        if heads < 1 or width % heads:
            stated = f"{width} = {architecture}.embedding_length is no multiple of {heads} = {architecture}.attention.head_count"
            raise FileFormatError(f"{file.path}: {stated}")
        head_dim = width // heads
    rotated = () if FAMILIES[architecture].partial_rope else ("rope_width",)
    for field in (*rotated, "value_dim"):
        if value.get(field) not in (None, head_dim):
            stated = f"{architecture}.{KEYS[field].name} is {value[field]}"
            raise UnsupportedError(f"{file.path}: {stated}, only the head width {head_dim} is supported")
    return head_dim


def _pooling(file: GGUFFile, architecture: str, value: Mapping[str, Any]) -> Pooling:
    """The kind of pooling whose number is stated."""
    number, kinds = value.get("pooling", 0), get_args(Pooling)
    if number not in range(len(kinds)):
        known = ", ".join(f"{i} ({kind})" for i, kind in enumerate(kinds))
        raise UnsupportedError(f"{file.path}: {architecture}.{KEYS['pooling'].name} is {number}, supported are {known}")
    return kinds[number]


def _vocabulary(file: GGUFFile, architecture: str, value: Mapping[str, Any]) -> int:
    """The number of tokens, by the rows of the embedding, which may be transposed."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FileFormatError(f"{file.path}: no tensor token_embd.weight of two dimensions")
    rows, columns = embedding.shape
    vocab = columns if rows == value["width"] != columns else rows
    if value.get("vocab", vocab) != vocab:
        raise FileFormatError(f"{file.path}: {architecture}.vocab_size is {value['vocab']}, token_embd.weight has {vocab} rows")
    return vocab


def _read_keys(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The values of the architecture's keys that are there, by field of Config, each of its key's type."""
    family, prefix = FAMILIES[architecture], architecture + "."
    keys = keys_of(family)
    if family.window_period and type(file.metadata.get(prefix + KEYS["window_layers"].name)) is int:
        keys["window_period"] = keys.pop("window_layers")._replace(type=int)
    known = {prefix + key.name for key in keys.values()}
    for key, value in file.metadata.items():
        if key.startswith(prefix) and key not in known and not (family.scaling and _is_neutral(key.removeprefix(prefix), value)):
            raise UnsupportedError(f"{file.path}: {not_implemented(key, value)}; {how_to_ignore(key)}")
    required = (*REQUIRED, *family.required)
    present = (field for field, key in keys.items() if field in required or prefix + key.name in file.metadata)
    return {field: file.require(prefix + keys[field].name, keys[field].type) for field in present}


def _is_neutral(key: str, value: Any) -> bool:
    """Whether a key, without its architecture, changes nothing with this value."""
    return key in NEUTRAL and (NEUTRAL[key] is None or (np.ndim(value) == 0 and value == NEUTRAL[key]))


def _scaling(file: GGUFFile, architecture: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Config that say how RoPE is scaled.

    llama.cpp treats a missing type as linear, and a factor that is missing or 0 as none. YaRN's rules and defaults are also llama.cpp's.
    """
    kind = value.get("scaling_type") or "linear"
    longrope = has_longrope(file, architecture)
    if kind not in ("none", "linear", "yarn") and not (longrope and kind == "longrope"):
        also = f" and, with tensors {' and '.join(LONGROPE.values())}, longrope" if FAMILIES[architecture].longrope else ""
        raise UnsupportedError(f"{file.path}: {architecture}.rope.scaling.type is {shown(kind)}, supported are none, linear and yarn{also}")
    for name in [name for name in YARN if kind != "yarn" and not (longrope and name == "yarn_factor")]:
        key = f"{architecture}.{KEYS[name].name}"
        if name in value and not _is_neutral(KEYS[name].name, value[name]):
            raise UnsupportedError(f"{file.path}: {not_implemented(key, value[name])} without YaRN; {how_to_ignore(key)}")
    factor = value.get("rope_scaling", value.get("old_rope_scaling")) or 1.0
    if kind == "yarn":
        borders = value.get("yarn_fast", 32.0), value.get("yarn_slow", 1.0)
        magnitude = yarn_magnitude(factor, divisor=value.get("yarn_log", 0.0)) * value.get("yarn_factor", 1.0)
        return {"yarn": Yarn(factor, value.get("yarn_original", value["context"]), *borders), "rope_magnitude": magnitude}
    magnitude = value.get("yarn_factor", 1.0) if longrope else 1.0
    return {"rope_scaling": factor if kind == "linear" else 1.0, "rope_magnitude": magnitude}


def has_longrope(file: GGUFFile, architecture: str) -> bool:
    """Whether the file has LongRoPE's lists: llama.cpp takes them whatever the type of scaling is."""
    return FAMILIES[architecture].longrope and all(tensor in file.tensors for tensor in LONGROPE.values())


def _window(file: GGUFFile, architecture: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Config that say how many keys a query sees, and in which layers."""
    window, pattern, period = value.get("window") or None, value.get("window_layers"), value.get("window_period")
    where = f"{file.path}: {architecture}.{KEYS['window_layers'].name}"
    if period is not None and (period < 0 or period == 1):
        raise UnsupportedError(f"{where} is {period}, supported are numbers from 2 on, 0 for a window in all layers, and an array of bools")
    if pattern is None:
        return window_fields(window, windowed_layers(architecture, value["n_layers"], period), value["n_layers"])
    if pattern.dtype != np.bool_ or len(pattern) != value["n_layers"]:
        raise UnsupportedError(f"{where} is {shown(pattern)}, supported are {value['n_layers']} bools, one for each layer")
    if window is None and pattern.any():
        raise FileFormatError(f"{where} has layers with a window, but attention.sliding_window is missing")
    return window_fields(window, np.flatnonzero(pattern).tolist(), len(pattern))


# --- back -----------------------------------------------------------------------------------------------------------------------------


def config_keys(c: Config) -> dict[str, Any]:
    """The keys of a Config's architecture in the order of the released file; None where a file leaves one out."""
    usual = c.window is None or _windowed(c) == windowed_layers(c.architecture, c.n_layers)
    values = {
        **vars(c),
        "rope_width": 2 * c.rope_pairs,
        "window_layers": None if usual else np.isin(np.arange(c.n_layers), _windowed(c)),
        "expert_ffn": c.ffn,
        "pooling": get_args(Pooling).index(c.pooling) or None,
        **_scaling_values(c),
    }
    values |= {"head_dim": None} if c.q_width == c.width else {"value_dim": c.head_dim}
    values |= {} if c.experts else {"experts": None, "experts_used": None}
    return {f"{c.architecture}.{key.name}": values.get(field) for field, key in keys_of(FAMILIES[c.architecture]).items()}


def _windowed(c: Config) -> tuple[int, ...]:
    """The layers that have the window, if there is one."""
    return tuple(n for n in range(c.n_layers) if c.window_of(n) is not None)


def _scaling_values(c: Config) -> dict[str, Any]:
    """The values of the keys that say how RoPE is scaled, by their names in KEYS. YaRN's factor is the one that comes nearest."""
    values: dict[str, Any]
    if c.longrope is not None:
        kind, factor, values = "longrope", np.float32(c.rope_magnitude), {"yarn_original": c.longrope.original}
    elif c.yarn is not None:
        usual, yarn = yarn_magnitude(c.yarn.factor), c.yarn
        ratio = np.float32(c.rope_magnitude / usual)
        near = (ratio, *(np.nextafter(ratio, np.float32(limit)) for limit in (0, np.inf)))
        kind, factor = "yarn", min(near, key=lambda x: abs(np.float32(usual * float(x)) - np.float32(c.rope_magnitude)))
        values = {"yarn_original": yarn.original, "rope_scaling": yarn.factor, "yarn_fast": yarn.fast, "yarn_slow": yarn.slow}
    else:
        return {"rope_scaling": None} if c.rope_scaling == 1 else {"scaling_type": "linear"}
    return {"rope_scaling": None, "scaling_type": kind, "yarn_factor": None if factor == 1 else float(factor), **values}


_EXACT = ("rope_base", "local_rope_base", "rope_scaling")  # RoPE's frequencies follow from these; float32 is enough for other numbers


def check_said(c: Config, path: Path, tensors: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for a Config that a file of its keys and of `tensors`, by name and with a shape, would not give back."""
    values = {name: value for name, value in config_keys(c).items() if value is not None}
    held = {name: float(np.float32(value)) if isinstance(value, float) else value for name, value in values.items()}
    read = read_config(GGUFFile(path, 3, 32, {"general.architecture": c.architecture, **held}, tensors, 0))
    same: dict[str, Any] = window_fields(c.window, _windowed(c), c.n_layers)  # in the words in which a file is read
    same |= {"longrope": None} if FAMILIES[c.architecture].longrope else {}  # whose lists are tensors
    same |= {"rope_width": None} if c.rope_width == c.head_dim else {}
    same |= {"rope_base": read.rope_base} if c.rope == "none" else {}
    meant = replace(c, **same)
    for name in (field.name for field in fields(Config)):
        ours, theirs = getattr(meant, name), getattr(read, name)
        near = name not in _EXACT and isinstance(ours, float) and isinstance(theirs, float) and np.float32(ours) == np.float32(theirs)
        if ours != theirs and not near:
            raise UnsupportedError(f"{name} is {ours}, but a GGUF file of architecture {c.architecture} would say {theirs}")
