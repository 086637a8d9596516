"""The model and the options of every bench."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitnet_np import Config, Model
from bitnet_np.dialects import EXACT, Dialect


@dataclass(frozen=True)
class Setup:
    """The model and the options of one call of bench.py."""

    path: Path
    model: Model
    threads: tuple[int, ...]
    lengths: tuple[int, ...] | None  # None: the bench's own
    batches: tuple[int, ...] | None
    rows: tuple[int, ...] | None
    steps: int  # tokens to decode
    small: Callable[[], tuple[str, Model]]  # name and model for benches that take too long with a large one, made when called
    seed: int = 0
    dialect: Dialect = EXACT  # of prefill and decode

    def fitting(self, lengths: tuple[int, ...] | None, default: tuple[int, ...], config: Config | None = None) -> list[int]:
        """Lengths that the model's context holds, without repetition and in order."""
        context = (config or self.model.config).context
        return sorted({min(length, context) for length in lengths or default})


def tokens(seed: int, vocab: int, *shape: int) -> NDArray[np.int64]:
    """Random ids, the same for every side."""
    return np.random.default_rng(seed).integers(0, vocab, shape)
