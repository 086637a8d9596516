"""Settings that replace a file's: the one way to change the Config of a loaded Model, or to ignore a key that is not known."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.errors import Error, OptionError, shown
from ..base.validate import choice
from ..model.records import LONGEST_CONTEXT, Model
from ..model.rope import rope_fields

OVERRIDABLE: dict[str, type] = {
    "context": int,
    "eps": float,
    "rope_base": float,
    "rope_scaling": float,
    "window": int,
    "pooling": str,
}
"""The fields of Config that may be overridden: those that do not say what shapes tensors have."""

BEYOND = {"context": LONGEST_CONTEXT}
"""Overrides for `load`: let sequences be longer than the model was trained for. Each number is exact, but the text may make no sense."""


def not_implemented(key: str, value: Any) -> str:
    """The start of a message that refuses a key with this value."""
    return f"{key} = {shown(value)} is a setting this package does not implement"


def how_to_ignore(key: str) -> str:
    """The end of a message that refuses a key."""
    return f"--override {key}=none loads the model as if it were not there"


def check_has(path: Path, key: str, has: bool) -> None:
    """Raises OptionError if a key that is to be ignored is not in the file."""
    if not has:
        raise OptionError(f"{path} has no key {shown(key)} that could be ignored")


def overridden(model: Model, overrides: Mapping[str, Any]) -> Model:
    """The model with other numbers in its Config. Raises OptionError for a field, or a value of it, that cannot be."""
    overrides = {name: value for name, value in overrides.items() if value is not None}
    for name, value in overrides.items():
        choice("a name of overrides", name, OVERRIDABLE)
        if type(value) is not OVERRIDABLE[name]:
            raise OptionError(f"overrides has {name} = {shown(value)}, expected {OVERRIDABLE[name].__name__}")
    try:
        config = replace(model.config, **overrides)
        if model.position_embd is not None and config.context > model.position_embd.shape[0]:
            raise OptionError(f"the model has learned {model.position_embd.shape[0]} positions, not {config.context}")
        return replace(model, config=config, **rope_fields(config, model.rope_factors))
    except Error as error:
        raise OptionError(f"overrides {shown(dict(overrides))}: {error}") from None
