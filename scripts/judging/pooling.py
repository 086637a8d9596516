"""A small engine of embedding models, and bugs put into its pooled output, as `faults.py` has them."""

from collections.abc import Callable, Iterator

import numpy as np

from bitnet_np import Model
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import POOLED, Key

from .engine import Engine, Floats, f32
from .experts import MixtureEngine
from .faults import Fault, in_engine

EMBEDDING = random_model(4, family="qwen3moe", ffn=48, pooling="mean")


class PooledEngine(MixtureEngine):
    """`MixtureEngine` for a model that pools by the mean."""

    def run(self) -> dict[Key, Floats]:
        points = super().run()
        self.step(POOLED, None, lambda: self.at("result_norm", None).mean(axis=0, keepdims=True, dtype=f32))
        return points


def pooling_faults() -> Iterator[tuple[Model, Fault]]:
    """All faults, each with the model in which it is made."""

    def fault(name: str, mistake: str, pooled: Callable[[Engine], Floats]) -> tuple[Model, Fault]:
        return EMBEDDING, in_engine(name, mistake, None, PooledEngine, **{POOLED: lambda engine, n: pooled(engine)})

    def rows(engine: Engine) -> Floats:
        return engine.at("result_norm", None)

    def mean(x: Floats) -> Floats:
        return x.mean(axis=0, keepdims=True)

    def unit(x: Floats) -> Floats:
        return x / np.linalg.norm(x)

    yield fault("last token pooled instead of the mean", "pooling.other_rows", lambda engine: rows(engine)[-1:])
    yield fault("first token pooled instead of the mean", "pooling.other_rows", lambda engine: rows(engine)[:1])
    yield fault("pooled before the final norm", "head.unnormed", lambda engine: mean(engine.stream(len(engine.model.layers))))
    yield fault("pooled output normalised", "pooling.unit", lambda engine: unit(mean(rows(engine))))
    yield fault("pooled output a sum", "any.factor", lambda engine: rows(engine).sum(axis=0, keepdims=True))
