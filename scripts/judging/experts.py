"""A small engine of models with experts (Qwen2-MoE, Qwen3-MoE), and bugs put into it, as `faults.py` has them for BitNet."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np import Expert, Model
from bitnet_np.model import widen
from bitnet_np.model.records import Linear
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import SLOTS, TOP_EXPERTS, Key

from .engine import Engine, Floats, f32
from .faults import LAYER, Fault, in_engine, silu

NORMALIZED = random_model(4, family="qwen3moe", ffn=48)
SHARED = random_model(4, family="qwen2moe", ffn=48)
TOKENS_OF_EXPERTS = np.arange(17) * 5 % 50


class MixtureEngine(Engine):
    """`Engine` for float matrices, norms of each head, and experts."""

    def feed_forward(self, n: int, w: Any) -> tuple[str, ...]:
        c = self.model.config
        self.step("ffn_moe_logits", n, partial(self.product, "ffn_norm", n, w.ffn_gate_inp))
        self.step(TOP_EXPERTS, n, lambda: self.top(n, c.experts_used))
        self.step("ffn_moe_weights", n, lambda: self.weights(n, c.normalized_experts))
        self.step("ffn_moe_gate", n, lambda: self.slots(n, "ffn_gate"))
        self.step("ffn_moe_up", n, lambda: self.slots(n, "ffn_up"))
        self.step("ffn_moe_swiglu", n, lambda: silu(self.at("ffn_moe_gate", n)) * self.at("ffn_moe_up", n))
        self.step("ffn_moe_down", n, lambda: self.slots(n, "ffn_down"))
        self.step("ffn_moe_out", n, lambda: self.mixed(n, self.at("ffn_moe_weights", n)))
        self.t[Key(TOP_EXPERTS, n)] = self.at(TOP_EXPERTS, n).astype(np.int32)
        if w.ffn_gate_inp_shexp is None:
            return ("ffn_moe_out",)
        row = w.ffn_gate_inp_shexp[:, None]
        self.step("ffn_gate", n, partial(self.product, "ffn_norm", n, w.ffn_gate))
        self.step("ffn_up", n, partial(self.product, "ffn_norm", n, w.ffn_up))
        self.step("ffn_out", n, lambda: silu(self.at("ffn_gate", n)) * self.at("ffn_up", n))
        self.step("ffn_down", n, partial(self.product, "ffn_out", n, w.ffn_down))
        self.step("ffn_shexp_out", n, lambda: self.at("ffn_down", n) * sigmoid(self.at("ffn_norm", n) @ row))
        return "ffn_moe_out", "ffn_shexp_out"

    def product(self, source: str, n: int, linear: Linear) -> Floats:
        y = self.dot(self.at(source, n), _matrix(linear))
        return y if linear.bias is None else y + linear.bias

    def top(self, n: int, k: int) -> NDArray:
        return np.argsort(-self.at("ffn_moe_logits", n), axis=1, kind="stable")[:, :k]

    def weights(self, n: int, normalized: bool) -> Floats:
        p = np.exp(self.at("ffn_moe_logits", n) - self.at("ffn_moe_logits", n).max(axis=1, keepdims=True))
        taken = self.of_taken(n, p / p.sum(axis=1, keepdims=True))
        return taken / taken.sum(axis=1, keepdims=True) if normalized else taken

    def of_taken(self, n: int, numbers: Floats) -> Floats:
        """The numbers [T, k] of each token's experts, of those of all experts [T, E]."""
        return np.take_along_axis(numbers, self.at(TOP_EXPERTS, n).astype(int), axis=1)

    def slots(self, n: int, name: str, order: Callable[[int], int] = lambda e: e) -> Floats:
        """The products of each token's experts, side by side. order: number of an expert -> that of the one that is used."""
        chosen, source = self.at(TOP_EXPERTS, n).astype(int), self.at("ffn_norm" if name != "ffn_down" else "ffn_moe_swiglu", n)
        inputs = np.repeat(source[:, None], chosen.shape[1], axis=1) if name != "ffn_down" else source.reshape(*chosen.shape, -1)
        experts: tuple[Expert, ...] = self.model.layers[n].experts
        rows = [self.dot(inputs[t, [s]], _matrix(getattr(experts[order(int(chosen[t, s]))], name))) for t, s in np.ndindex(chosen.shape)]
        return np.concatenate(rows).reshape(len(chosen), -1)

    def mixed(self, n: int, weights: Floats) -> Floats:
        return (self.at("ffn_moe_down", n).reshape(*weights.shape, -1) * weights[:, :, None]).sum(axis=1)


def sigmoid(x: Floats) -> Floats:
    return f32(1) / (f32(1) + np.exp(-x))


def _matrix(linear: Linear) -> Floats:
    assert isinstance(linear.weights, np.ndarray)
    return widen.float32(linear.weights)


Step = Callable[[MixtureEngine, int], Floats]


def expert_faults() -> Iterator[tuple[Model, Fault]]:
    """All faults, each with the model in which it is made."""

    def fault(model: Model, name: str, mistake: str, **steps: Step) -> tuple[Model, Fault]:
        return model, in_engine(name, mistake, (LAYER,), MixtureEngine, **steps)

    def permuted(name: str) -> Step:
        return lambda e, n: e.slots(n, name, lambda expert: e.model.config.experts - 1 - expert)

    def averaged(e: MixtureEngine, n: int) -> Floats:
        return e.mixed(n, np.full_like(e.at("ffn_moe_weights", n), f32(1) / e.model.config.experts_used))

    def sigmoids(e: MixtureEngine, n: int) -> Floats:
        return sigmoid(e.of_taken(n, e.at("ffn_moe_logits", n)))

    def unsaid(model: Model, tokens: NDArray[np.int64]) -> tuple[dict[Key, Floats], NDArray[np.int64]]:
        dump, _ = one_more.make(model, tokens)
        return {key: x for key, x in dump.items() if key.name not in (*SLOTS, TOP_EXPERTS)}, tokens

    _, one_more = fault(NORMALIZED, "one expert too many", "", ffn_moe_topk=lambda e, n: e.top(n, e.model.config.experts_used + 1))
    opposite = {f"ffn_moe_{name}": permuted(f"ffn_{name}") for name in ("gate", "up", "down")}
    yield NORMALIZED, replace(one_more, blamed="")
    yield NORMALIZED, Fault("one expert too many, and no word of it", "ffn_moe_out", unsaid, mistake="experts.count")
    unnormalised = "softmax before top-k, not normalised"
    yield fault(NORMALIZED, unnormalised, "experts.not_normalised", ffn_moe_weights=lambda e, n: e.weights(n, False))
    yield fault(SHARED, "softmax after top-k", "experts.normalised", ffn_moe_weights=lambda e, n: e.weights(n, True))
    yield fault(SHARED, "sigmoids for the softmax of a router", "experts.not_softmax", ffn_moe_weights=sigmoids)
    yield fault(NORMALIZED, "experts in the opposite order", "experts.permuted", **opposite)
    yield fault(NORMALIZED, "results of experts averaged", "experts.not_softmax", ffn_moe_out=averaged)
    alone: Step = lambda e, n: e.at("ffn_inp", n) + e.at("ffn_moe_out", n)  # noqa: E731
    yield fault(SHARED, "shared expert missing", "experts.shared_missing", l_out=alone)
    yield fault(SHARED, "shared expert without its gate", "experts.shared_ungated", ffn_shexp_out=lambda e, n: e.at("ffn_down", n))
