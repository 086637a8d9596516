"""A tensor's place: its model, dialect, name and layer, with the matrix that makes it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engine.dialects import Dialect
from ..model.records import Config, Layer, Linear, Model
from ..traces.points import FIELDS, Key


def matrix_of(model: Model, key: Key) -> Linear:
    """The matrix whose product a tensor is, the head's too."""
    if key.layer is None:
        return Linear(model.head, model.output_bias)
    return getattr(model.layers[key.layer], FIELDS[key.name])


@dataclass(frozen=True)
class Place:
    """One tensor of a model in a dialect."""

    model: Model = field(repr=False)
    dialect: Dialect
    key: Key
    length: int = field(default=0, kw_only=True)  # of the sequence, where mistakes at single positions are tried

    @property
    def borders(self) -> Sequence[int]:
        """Positions at which a later chunk may begin, lengths of windows and prefixes; a few where the length is not known."""
        if not self.length:
            return [2, 4, 8, 16, 32, 64]
        return [b for b in (*range(1, 33), 40, 48, 64, 96, 128, 256, 512) if b < self.length]

    @property
    def config(self) -> Config:
        return self.model.config

    @property
    def layer(self) -> Layer | None:
        """Its layer; None outside the layers."""
        return None if self.key.layer is None else self.model.layers[self.key.layer]

    @property
    def linear(self) -> Linear:
        """Its matrix, the head's too."""
        return matrix_of(self.model, self.key)
