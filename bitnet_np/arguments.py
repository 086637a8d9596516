"""Command-line arguments that several commands share, and what they mean."""

import argparse
import sys
from typing import Any

from . import packing, progress
from .device import on_cpu, place
from .errors import OptionError
from .gguf_file import GGUFFile
from .hf_folder import Folder
from .kernels import cpu
from .load import BEYOND, OVERRIDABLE, model_from, read_config
from .model import Model


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-nan", action="store_true", help="load a model with NaN or infinity in its weights all the same")
    parser.add_argument(
        "--i2s-layout",
        choices=packing.I2S_LAYOUTS,
        default=packing.I2S_DEFAULT,
        help="how I2_S matrices lie in the file, which no file says: the released one (default), bitnet.cpp's for ARM from the end of "
        "2025, or its four rows in a byte. Read in another one, half of all weights are wrong",
    )


def add_override_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="NAME=N",
        help=f"a setting to have instead of the file's, told on standard error: {', '.join(OVERRIDABLE)}; repeatable",
    )
    parser.add_argument("--allow-beyond-context", action="store_true", help="sequences may be longer than the model was trained for")


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = dict(BEYOND) if arguments.allow_beyond_context else {}
    for text in arguments.override:
        name, _, value = text.partition("=")
        if name in found:
            raise OptionError(f"--override {text}: {name} is set already")
        try:
            found[name] = OVERRIDABLE[name](value)
        except (KeyError, ValueError):
            choices = ", ".join(f"{known}={kind.__name__}" for known, kind in OVERRIDABLE.items())
            raise OptionError(f"--override is {text!r}, expected one of {choices}") from None
    return found


def loaded(file: GGUFFile | Folder, arguments: argparse.Namespace) -> Model:
    """The model of an open file, as the arguments ask for it and where, with a progress bar. What is overridden is told."""
    overrides = _overrides(arguments)
    bar = progress.bar("checking weights")
    model = model_from(file, bar, allow_nan=arguments.allow_nan, i2s_layout=arguments.i2s_layout, overrides=overrides)
    before = read_config(file) if overrides else model.config
    for name in overrides:
        print(f"bitnet-np: {name} is {getattr(model.config, name)}, the file says {getattr(before, name)}", file=sys.stderr)
    ops = getattr(arguments, "ops", cpu)
    return model if on_cpu(ops) else place(model, ops)
