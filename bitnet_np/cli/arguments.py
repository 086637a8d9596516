"""What arguments that several commands share say."""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError
from ..base.whole_file import whole_file
from ..engine.dialects import Dialect
from ..judge.law.precision import Profile, dialect_to_compute


def dialect_of(arguments: argparse.Namespace) -> Dialect:
    """The dialect that --as and --precision name, to compute in. Raises OptionError."""
    return dialect_to_compute(arguments.dialect, arguments.precision)


def profile_of(arguments: argparse.Namespace, default: str | None = None) -> Profile:
    """The dialect and precision that are declared, or a default one's by name. Raises OptionError."""
    return Profile.declared(arguments.profile or default, arguments.precision)


def check_out(option: str, path: Path | None, suffix: str = "") -> None:
    """Check that a file can be written to `path`, before anything is computed. Raises OptionError that names the option.

    suffix: what the name may end in, because the content is of that format, if it ends in anything.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise OptionError(f"{option} is {path}, expected a file in a folder that is there")
    if path is not None and suffix and path.suffix not in ("", suffix):
        raise OptionError(f"{option} is {path}, expected a name that ends in {suffix}: that is what is written")


def new_folder(path: Path) -> Path:
    """The path of a folder to write, which is not there or empty. Raises OptionError."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OptionError(f"{path} is there, expected a new folder or an empty one")
    return path


def save_npy(path: Path, array: NDArray) -> None:
    """Write a .npy file, completely or not at all, whatever the name ends in."""
    with whole_file(path) as part, open(part, "wb") as file:
        np.save(file, array)
