"""Checkpoints: enough of a run to go on to the same bits as if it had never stopped."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np.base.errors import FileFormatError, OptionError
from bitnet_np.base.whole_file import whole_file

from .settings import Settings


@dataclass
class State:
    """Parameters and moments by the name of their GGUF tensor, float32, and the number of steps taken."""

    parameters: dict[str, NDArray[np.float32]]
    first: dict[str, NDArray[np.float32]]
    second: dict[str, NDArray[np.float32]]
    step: int = 0


_GROUPS = ("parameters", "first", "second")


def save(path: Path, state: State, settings: Settings, tokenizer: dict[str, Any]) -> None:
    """Write a checkpoint. `path` is replaced only by a whole file."""
    metadata = json.dumps({"settings": asdict(settings), "step": state.step, "tokenizer": tokenizer})
    arrays = {f"{group}/{name}": array for group in _GROUPS for name, array in getattr(state, group).items()}
    with whole_file(path) as part, part.open("wb") as file:
        np.savez(file, told=np.array(metadata), **arrays)


def load(path: Path, settings: Settings) -> tuple[State, dict[str, Any]]:
    """The state and the tokenizer's keys.

    Raises OptionError if the checkpoint is of a run with other settings.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            metadata = json.loads(str(file["told"]))
            groups: dict[str, dict[str, NDArray[np.float32]]] = {group: {} for group in _GROUPS}
            for key in file.files[1:]:
                group, _, name = key.partition("/")
                groups[group][name] = file[key]
    except (ValueError, KeyError) as error:
        raise FileFormatError(f"{path}: no checkpoint: {error}") from None
    then = metadata["settings"]
    for name, value in asdict(settings).items():
        if then.get(name) != value:
            raise OptionError(f"{path}: {name} is {then.get(name)}, but this run has {value}")
    return State(**groups, step=metadata["step"]), metadata["tokenizer"]
