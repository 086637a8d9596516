"""The protocols of a place to load a model from: Source, an open file or folder, and ModelWeights, its tensors by the names of our fields.

gguf_source.py and hf_source.py implement both. load.py builds a Model through them, and no command asks which kind it has.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..model.records import Config, Expert, Linear, Table
from .tensors import Tensor

Shapes = Mapping[str, tuple[int, ...]]
"""(N, M) of matrices, by their fields in model.Layer."""


@contextmanager
def of_file(path: Path) -> Iterator[None]:
    """Puts the file's path in front of an error that does not name it: those of Config and rope do not."""
    try:
        yield
    except ValueError as error:
        raise type(error)(str(error) if str(path) in str(error) else f"{path}: {error}") from None


class Source(Protocol):
    """An open GGUF file or Hugging Face folder: its headers are checked, its tensors are not read."""

    path: Path
    kind: str  # for people to read, such as "GGUF v3"
    version: int | None  # of the file format, if it has one
    size: int  # bytes of all files with tensors
    keys: Mapping[str, Any]  # the settings as they stand in the file: a GGUF file's metadata, or config.json
    tensors: Mapping[str, Tensor]  # by the file's own names

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The tokenizer and the name, as keys of GGUF. Raises FileFormatError or UnsupportedError."""

    def without(self, key: str) -> "Source":
        """The same model as if its file had not this key. Raises OptionError if it has not."""

    def config(self) -> Config:
        """The Config of the model, without its tensors. Raises FileFormatError, UnsupportedError or ShapeError."""

    def weights(self, allow_nan: bool, i2s_layout: str) -> "ModelWeights":
        """The weights, to be read. `allow_nan` and `i2s_layout` are as in `load`. Raises as `config` does."""


class ModelWeights(Protocol):
    """The weights of a Source, by the names of fields of model.Model and model.Layer.

    Each field is asked for at most once. All methods raise FileFormatError, UnsupportedError or NonFiniteError, naming file and tensor.
    """

    config: Config

    def has(self, field: str) -> bool:
        """Whether the model has this part, of those that are optional: "output" or "output_bias"."""

    def vector(self, field: str, size: int, layer: int | None = None) -> NDArray[np.float32]:
        """A gain or bias [size] of the model, or of the layer of this number; "<norm>_bias" is that norm's bias."""

    def table(self, field: str, shape: tuple[int, int]) -> Table:
        """The embedding, the learned positions or the head, where it lies in the file."""

    def linear(self, field: str, shape: tuple[int, ...], layer: int) -> Linear:
        """A matrix (N, M) of a layer, with its bias, scale and norm where it has them."""

    def experts(self, shapes: Mapping[str, tuple[int, int]], layer: int) -> tuple[Expert, ...]:
        """The experts of a layer, Config.experts of them, with matrices of these shapes (N, M) by field of model.Expert."""

    def siblings(self, shapes: Shapes, layer: int) -> dict[str, Linear]:
        """The linears that read the same input, records.QKV or GATE_UP, by their fields: in some files they are rows of one tensor."""

    def rope_factors(self) -> NDArray[np.float32] | None:
        """The numbers [J] that divide RoPE's frequencies beside Config.rope_scaling."""

    def check_all_taken(self) -> None:
        """Raises UnsupportedError for a tensor that nobody has asked for."""
