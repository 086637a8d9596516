"""Settings to have instead of a file's: the one way to change the Config of a loaded Model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import Error, OptionError, shown
from ..model import LONGEST_CONTEXT, Model
from ..rope import model_frequencies

OVERRIDABLE: dict[str, type] = {"context": int, "eps": float, "rope_base": float, "rope_scaling": float, "window": int}
"""The fields of Config that may be overridden: those that do not say what shapes tensors have."""

BEYOND = {"context": LONGEST_CONTEXT}
"""Overrides for `load`: let sequences be longer than the model was trained for. Each number is exact, but the text may make no sense."""


def overridden(model: Model, overrides: Mapping[str, Any]) -> Model:
    """The model with other numbers in its Config. Raises OptionError for a field, or a value of it, that cannot be."""
    if not isinstance(overrides, Mapping):
        raise OptionError(f"overrides is {shown(overrides)}, expected a mapping of some of {', '.join(OVERRIDABLE)}")
    for name, value in overrides.items():
        if name not in OVERRIDABLE:
            raise OptionError(f"overrides has {shown(name)}, expected some of {', '.join(OVERRIDABLE)}")
        if type(value) is not OVERRIDABLE[name]:
            raise OptionError(f"overrides has {name} = {shown(value)}, expected {OVERRIDABLE[name].__name__}")
    try:
        config = replace(model.config, **overrides)
        if model.position_embd is not None and config.context > model.position_embd.shape[0]:
            raise OptionError(f"the model has learned {model.position_embd.shape[0]} positions, not {config.context}")
        frequency = model_frequencies(config, model.rope_factors)
    except Error as error:
        raise OptionError(f"overrides {dict(overrides)}: {error}") from None
    return replace(model, config=config, rope_frequency=frequency)
