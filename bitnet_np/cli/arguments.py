"""Command-line arguments that several commands share, and what they mean."""

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from .. import packing
from ..dispatch import Device
from ..errors import OptionError
from ..files.load import model_from
from ..files.overrides import BEYOND, OVERRIDABLE
from ..files.source import Source
from ..gpu.device import on_cpu, place
from ..kernels import cpu
from ..model import Model
from ..transformer import DIALECTS
from ..whole_file import whole_file
from . import progress


def add_model_argument(parser: argparse.ArgumentParser, metavar: str = "MODEL", default: str = "") -> None:
    """The model that most commands begin with. default: what they take if none is named; empty: one must be named."""
    text = "a GGUF file, or a Hugging Face folder" + (f" (default: {default})" if default else "")
    parser.add_argument("model", type=Path, nargs="?" if default else None, metavar=metavar, help=text)


def add_token_arguments(parser: argparse.ArgumentParser, text: str = "--text", required: bool = True) -> argparse._MutuallyExclusiveGroup:
    """The ways to give token ids, of which one is taken (inputs.token_ids); text: what the option for a text is called."""
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument("--tokens", metavar="1,2,3", help="token ids")
    group.add_argument("--tokens-file", type=Path, metavar="F", help=".npy, .json or .txt (a line a sequence): [T] or [B, T] token ids")
    group.add_argument(text, dest="text", metavar="S", help="text for the file's tokenizer (extra `text`)")
    return group


def add_computing_arguments(parser: argparse.ArgumentParser) -> None:
    """How to compute, and which model of the file."""
    add_threads_argument(parser)
    parser.add_argument("--as", dest="dialect", choices=DIALECTS, default="exact", help="whose roundings to follow")
    add_load_arguments(parser)
    add_override_arguments(parser)


def add_threads_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="threads to compute with; the result is the same")


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to compute, and what to say of it."""
    parser.add_argument(
        "--device",
        choices=get_args(Device),
        default="cpu",
        help="compute on the CPU (default) or on a GPU (extra `cuda`): the same bits",
    )
    parser.add_argument("--metrics", type=Path, metavar="F.json", help="count and time every operation; a table on standard error, too")


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
    overrides: dict[str, Any] = dict(BEYOND) if arguments.allow_beyond_context else {}
    for text in arguments.override:
        name, _, value = text.partition("=")
        if name in overrides:
            raise OptionError(f"--override {text}: {name} is set already")
        try:
            overrides[name] = OVERRIDABLE[name](value)
        except (KeyError, ValueError):
            choices = ", ".join(f"{known}={kind.__name__}" for known, kind in OVERRIDABLE.items())
            raise OptionError(f"--override is {text!r}, expected one of {choices}") from None
    return overrides


def loaded(source: Source, arguments: argparse.Namespace) -> Model:
    """The model of an open source, as the arguments ask for it and on their device. Shows a progress bar, and prints what is overridden."""
    overrides = _overrides(arguments)
    bar = progress.bar("checking weights")
    model = model_from(source, bar, allow_nan=arguments.allow_nan, i2s_layout=arguments.i2s_layout, overrides=overrides)
    before = source.config() if overrides else model.config
    for name in overrides:
        print(f"bitnet-np: {name} is {getattr(model.config, name)}, the file says {getattr(before, name)}", file=sys.stderr)
    ops = getattr(arguments, "ops", cpu)
    return model if on_cpu(ops) else place(model, ops)


def check_out(option: str, path: Path | None) -> None:
    """Before anything is computed: whether `path` can be that of a file to write. Raises OptionError that names the option."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise OptionError(f"{option} is {path}, expected a file in a folder that is there")


def save_npy(path: Path, array: NDArray) -> None:
    """Write .npy, whole or not at all, whatever the name ends in."""
    with whole_file(path) as part, open(part, "wb") as file:
        np.save(file, array)
