"""The choice of a device: a policy decides where an operation runs, from its sizes, and says why. Policies are passed in as arguments.

A policy is a pure function from a `Call` to a `Decision`. A model's weights and its KV cache stay on one device, because sending them
costs more than any operation on them. So `choose` decides once, for a whole command, and every operation of a forward pass runs there.
A mask array depends on nothing but its sizes: `make_mask` decides for each.

The bits are the same on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from .. import contract
from ..base.errors import OptionError
from ..engine import masks
from ..engine.backend import Backend
from ..engine.metrics import Metrics
from ..kernels import cpu
from ..model.records import Config
from .device import open_cuda

Device = Literal["cpu", "numpy", "cuda", "auto"]


class Choice(NamedTuple):
    ops: Backend
    reason: str  # for metrics


@dataclass(frozen=True)
class Call:
    """An operation to place, by its sizes. Sizes that it does not have are 0."""

    operation: str
    q_len: int  # queries, or new tokens
    k_len: int  # keys: those before the first query, too
    heads: int = 0
    head_dim: int = 0

    @property
    def hidden_dim(self) -> int:
        return self.heads * self.head_dim


class Decision(NamedTuple):
    device: Literal["cpu", "cuda"]
    reason: str


Policy = Callable[[Call], Decision]


def attention_of(config: Config, tokens: int, past: int = 0) -> Call:
    """The Call of a layer's attention over new tokens of a sequence that holds `past` already."""
    return Call("attention", tokens, past + tokens, config.heads, config.head_dim)


@dataclass(frozen=True)
class Above:
    """A policy: the GPU for workloads above a limit. A workload is a product of a call's sizes, given by their names."""

    workload: tuple[str, ...]
    limit: int

    def __call__(self, call: Call) -> Decision:
        above = prod(getattr(call, size) for size in self.workload) > self.limit
        return Decision("cuda" if above else "cpu", f"{' * '.join(self.workload)} is {'above' if above else 'at most'} {self.limit}")


WORKLOAD_DOCUMENTED = ("q_len", "hidden_dim", "q_len")
"""The workload of realizar's batched attention, as its comment describes it, without cached keys. It has no limit for either workload."""
WORKLOAD_COMPUTED = ("heads", "q_len", "head_dim", "k_len")
"""The same, as its code computes it: the multiply-adds of all scores, hidden ones too. The code then takes the CPU in any case."""
MASKS = Above(("q_len", "k_len"), 16384)
"""BitNet-rs's rule for mask arrays."""


PREFER_GPU = Decision("cuda", "there is a GPU")
"""That a usable GPU is always faster is an assumption: no measurement supports a better rule yet."""


def choose(device: Device = "auto", decision: Decision = PREFER_GPU) -> Choice:
    """The backend of a device, for a whole command; "numpy" is the contract itself, on the CPU.

    "auto" follows a policy's decision, where there is a GPU that can be used.

    Raises what open_cuda does, for "cuda".
    """
    if device == "cpu":
        return Choice(cpu, "the CPU was asked for")
    if device == "numpy":
        return Choice(contract, "plain NumPy was asked for")
    if device == "cuda":
        return Choice(open_cuda(), "a GPU was asked for")
    if decision.device == "cpu":
        return Choice(cpu, decision.reason)
    try:
        return Choice(open_cuda(), decision.reason)
    except OptionError as error:
        return Choice(cpu, str(error))


def make_mask(
    q_len: int,
    k_len: int,
    pattern: masks.Pattern = masks.CAUSAL,
    *,
    past: int | None = None,
    align: masks.Align = "bottom_right",
    ops: Backend = cpu,
    policy: Policy = MASKS,
    metrics: Metrics | None = None,
) -> Any:
    """`masks.mask`, float32 and additive, in the memory of `ops`: [q_len, k_len].

    For a GPU it is filled there if the policy says so, else made here and sent. For the CPU it is made here, and no policy is called.
    The decision is counted in `metrics`.
    """
    if ops.device == "cpu":
        return masks.mask(q_len, k_len, pattern, past=past, align=align)
    plan = masks.plan(q_len, k_len, pattern, past=past, align=align)
    decision = policy(Call("mask", plan.q_len, plan.k_len))
    if metrics is not None:
        metrics.decided("mask", *decision)
    if decision.device == "cpu":
        return ops.upload(masks.mask(q_len, k_len, pattern, past=past, align=align))
    out = ops.empty((1, plan.q_len, plan.k_len))
    queries, before, keys = (ops.upload(np.array([n])) for n in (plan.q_len, plan.past, plan.k_len))
    ops.fill_mask(out, 0, queries, before, keys, *pattern.numbers)
    return out.reshape(plan.q_len, plan.k_len)
