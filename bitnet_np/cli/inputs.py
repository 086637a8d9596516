"""Inputs of the commands: the model file, as the arguments say to open and load it, and token ids."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..base.errors import OptionError
from ..engine.backend import Backend
from ..files.load import Source, model_from, open_model, without_ignored
from ..files.overrides import BEYOND, OVERRIDABLE
from ..gpu.device import device_of, place
from ..kernels import cpu
from ..model.matrix_facts import constant_matrices
from ..model.records import Model
from ..text.tokenizer import Tokenizer, tokenizer_from
from ..traces.token_files import array_of_ids, check_ids, parse_numbers, read_sequences, read_token_ids
from . import progress


@dataclass(frozen=True)
class Inputs:
    """A command's model file, open."""

    arguments: argparse.Namespace
    source: Source  # without the keys that are ignored
    overrides: dict[str, Any]  # what --override and --allow-beyond-context name; None for a key to ignore

    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer."""
        return tokenizer_from(self.source.metadata, self.source.path)

    def token_ids(self) -> NDArray:
        """The token ids of the command, [T] or [B, T]."""
        return token_ids(self.arguments, self.tokenizer)

    def sequences(self) -> list[NDArray]:
        """The same, a sequence at a time: they may have several lengths."""
        path: Path | None = self.arguments.tokens_file
        return [self.token_ids()] if path is None else [check_ids(str(path), row) for row in read_sequences(path)]

    def model(self) -> Model:
        """The model, loaded onto the command's device, with a progress bar.

        Prints overridden settings, and matrices whose weights are all equal.
        """
        arguments, overrides = self.arguments, {name: value for name, value in self.overrides.items() if value is not None}
        bar = progress.bar("checking weights")
        model = model_from(self.source, bar, allow_nan=arguments.allow_nan, i2s_layout=arguments.i2s_layout, overrides=overrides)
        before = self.source.config if overrides else model.config
        for name in overrides:
            print(f"bitnet-np: {name} is {getattr(model.config, name)}, the file says {getattr(before, name)}", file=sys.stderr)
        for warning in constant_matrices(model):
            print(f"bitnet-np: warning: {warning}", file=sys.stderr)
        ops: Backend = getattr(arguments, "ops", cpu)
        return model if ops.device == "cpu" else place(model, device_of(ops))


def opened(arguments: argparse.Namespace, path: Path | None = None) -> Inputs:
    """The model file of a command, or the one at `path`. Prints the keys that are ignored."""
    overrides = overrides_of(arguments)
    source = without_ignored(open_model(path or arguments.model, arguments.download), overrides)
    arguments.model = source.path
    for key in (name for name, value in overrides.items() if value is None):
        print(f"bitnet-np: {key} is ignored", file=sys.stderr)
    return Inputs(arguments, source, overrides)


def overrides_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that --override and --allow-beyond-context name; None for a key to ignore. Raises OptionError."""
    overrides: dict[str, Any] = dict(BEYOND) if arguments.allow_beyond_context else {}
    for text in arguments.override:
        name, _, value = text.partition("=")
        if name in overrides:
            raise OptionError(f"--override {text}: {name} is set already")
        try:
            overrides[name] = None if value == "none" and name not in OVERRIDABLE else OVERRIDABLE[name](value)
        except (KeyError, ValueError):
            choices = ", ".join(f"{known}={kind.__name__}" for known, kind in OVERRIDABLE.items())
            raise OptionError(f"--override is {text!r}, expected one of {choices}, or KEY=none") from None
    return overrides


def token_ids(arguments: argparse.Namespace, tokenizer: Callable[[], Tokenizer]) -> NDArray:
    """The token ids that the arguments name, [T] or [B, T]."""
    if arguments.tokens is not None:
        ids, source = array_of_ids(parse_numbers("--tokens", arguments.tokens, int)), "--tokens"
    elif arguments.tokens_file is not None:
        ids, source = read_token_ids(arguments.tokens_file), str(arguments.tokens_file)
    else:
        ids, source = array_of_ids(tokenizer().encode(arguments.text)), "the text"
    return check_ids(source, ids)
