"""A small engine of models with local layers (RoPE and windows of Gemma 3 and OLMo 3) and YaRN, and bugs put into it, as in `faults.py`."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np import Model
from bitnet_np.model.records import Yarn
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

from .engine import Floats, f32
from .experts import MixtureEngine
from .faults import LAYER, Fault

LOCAL: dict[str, Any] = {"window": 5, "window_layers": (LAYER,), "local_layers": (LAYER,), "local_rope_base": 100.0, "rope_scaling": 4.0}
TWO_BASES = random_model(4, family="qwen3moe", ffn=48, **LOCAL)
YARN: dict[str, Any] = {"yarn": Yarn(4.0, 512, fast=4.0), "rope_magnitude": 1.2}
STRETCHED = random_model(4, family="qwen3moe", ffn=48, **YARN)
PARTLY_STRETCHED = random_model(4, family="qwen3moe", ffn=48, **LOCAL | YARN | {"local_rope_base": None, "rope_scaling": 1.0})


class RotationEngine(MixtureEngine):
    """`MixtureEngine` for windows, layers with a base of their own, and YaRN."""

    number = 0  # of the layer that runs
    wrong: dict[str, Any] = {}  # noqa: RUF012, what the engine believes of the model, where it is wrong

    def believed(self, name: str) -> Any:
        return self.wrong.get(name, getattr(self.model.config, name))

    def layer(self, n: int) -> None:
        self.number = n
        super().layer(n)

    def attend(self, n: int, **options: Any) -> Floats:
        window = self.believed("window") if n in (self.believed("window_layers") or ()) else math.inf
        return super().attend(n, **{"allowed": lambda i, j: (j <= i) & (j > i - window)} | options)

    def rope(self, x: Floats, position: NDArray, base: float | None = None, pairs: str = "halves", sign: int = 1) -> Floats:
        local = self.number in self.believed("local_layers")
        scale = self.wrong.get("local_scale", 1.0) if local else self.believed("rope_scaling")
        width = self.model.config.head_dim
        base = base or (local and self.believed("local_rope_base")) or self.believed("rope_base")
        turned = super().rope(x, position / scale, base, pairs, sign)
        if local:
            return turned
        if self.believed("yarn") is not None:
            turned = self.stretched(x.reshape(len(x), -1, width), position).reshape(x.shape)
        return turned * f32(self.believed("rope_magnitude"))

    def stretched(self, x: Floats, position: NDArray) -> Floats:
        """Rotated by YaRN's frequencies, without its magnitude."""
        c, yarn = self.model.config, self.believed("yarn")
        half = c.head_dim // 2
        low, high = (half * math.log(yarn.original / (turns * 2 * math.pi)) / math.log(c.rope_base) for turns in (yarn.fast, yarn.slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), c.head_dim - 1)
        slow = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)
        frequency = c.rope_base ** (-np.arange(half) / half) * (1 - slow + slow / yarn.factor)
        cos, sin = (turn(np.multiply.outer(position, frequency)).astype(f32)[:, None] for turn in (np.cos, np.sin))
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=2)


def _run(wrong: dict[str, Any], model: Model, tokens: NDArray[np.int64]) -> tuple[dict[Key, Floats], NDArray[np.int64]]:
    """The dump of an engine that takes the model's numbers for others."""
    engine = RotationEngine(model, tokens)
    engine.wrong = wrong
    return engine.run(), tokens


def rotation_faults() -> Iterator[tuple[Model, Fault]]:
    """All faults, each with the model in which it is made."""

    def fault(model: Model, name: str, blamed: str, layer: int, mistake: str, **wrong: Any) -> tuple[Model, Fault]:
        return model, Fault(name, blamed, partial(_run, wrong), layer, mistake)

    yield fault(TWO_BASES, "one RoPE base for all layers", "Qcur_rope", LAYER, "rope.other_layers", local_layers=())
    yield fault(TWO_BASES, "positions scaled in local layers, too", "Qcur_rope", LAYER, "rope.scaled_local", local_scale=4.0)
    yield fault(TWO_BASES, "local layers one layer too early", "Qcur_rope", 0, "rope.other_layers", local_layers=(0,), window_layers=(0,))
    yield fault(TWO_BASES, "windows one layer too early", "kqv_out", 0, "attention.other_layers", window_layers=(0,))
    yield fault(STRETCHED, "YaRN's magnitude missing", "Qcur_rope", 0, "rope.magnitude", rope_magnitude=1.0)
    yield fault(STRETCHED, "YaRN's magnitude applied twice", "Qcur_rope", 0, "edit.steps", rope_magnitude=1.44)
    yield fault(STRETCHED, "YaRN's factors missing", "Qcur_rope", 0, "rope.factors", yarn=None)
    yield fault(PARTLY_STRETCHED, "YaRN in local layers, too", "Qcur_rope", LAYER, "rope.other_layers", local_layers=())
    yield fault(STRETCHED, "positions divided by YaRN's factor", "Qcur_rope", 0, "read.rotation", yarn=None, rope_scaling=4.0)
