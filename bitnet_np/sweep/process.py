"""What a process that computes rows has once: the facts of its machine with the result of its selftest, and its last model."""

import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import __version__
from ..base.errors import Error, FileFormatError, listed
from ..engine import machine
from ..files.load import load
from ..model import packing
from ..model.records import Model
from ..testing import selftest


@dataclass(frozen=True)
class ModelFile:
    """A model as tasks name it. It is sent by its path, and opened and mapped where it is needed."""

    path: str  # a GGUF file or a Hugging Face folder, the same on every machine
    sha256: str  # of the file that was meant
    allow_nan: bool = False
    i2s_layout: str = packing.I2S_DEFAULT
    overrides: tuple[tuple[str, Any], ...] = ()


@lru_cache(maxsize=1)
def model_of(file: ModelFile) -> Model:
    """The model, loaded when it is first asked for and until another one is. Raises FileFormatError for another file under this path."""
    digest = machine.digest_of(Path(file.path))
    if digest != file.sha256:
        raise FileFormatError(f"{file.path}: SHA-256 is {digest} on {platform.node()}, expected {file.sha256}, as where the sweep began")
    return load(file.path, allow_nan=file.allow_nan, i2s_layout=file.i2s_layout, overrides=dict(file.overrides))


class DifferentBitsError(Error):
    """A machine computes other bits than it must."""


def check_selftest() -> None:
    """Raises DifferentBitsError if this machine does not compute the known bits of every kernel."""
    machine = this_machine()
    if machine["differing"]:
        raise DifferentBitsError(f"selftest failed on {machine['host']}: {listed(machine['differing'])}")


@lru_cache(maxsize=1)
def this_machine() -> dict[str, Any]:
    """The facts that a row says of the machine it was computed on. "differing": the kernels whose known bits are not met there."""
    differing = [name for name, equal in selftest.run() if not equal]
    known = machine.describe()
    names = ("processor", "instruction path", "numba", "numpy", "python", "system")
    return {"host": platform.node(), "bitnet_np": __version__, **{name: known[name] for name in names}, "differing": differing}
