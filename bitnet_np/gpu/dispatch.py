"""The choice of a device. The bits are the same on every device.

A model's weights and its KV cache stay on one device, because sending them costs more than any operation on them. `choose` therefore
decides for a whole command, or for a call by its workload, and every operation of a forward pass runs there. A mask array depends only on
its sizes: `make_mask` decides for each.
"""

from math import prod
from typing import Any, Literal

from .. import contract
from ..base.errors import OptionError
from ..engine import masks
from ..engine.backend import Backend
from ..kernels import cpu
from ..model.families import layer_shapes
from ..model.records import Config
from .device import open_cuda

Device = Literal["cpu", "numpy", "cuda", "auto"]

MOST_SENT = 16384
"""Elements of the largest mask that is made by the CPU and sent to a GPU: BitNet-rs's rule."""


LEAST_WORK = 5 * 10**10
"""Multiply-adds from which a GPU is chosen by workload: what a CPU does in the 0.14 s that the host takes to launch a pass of the 2B model.

An estimate, until scripts/gpu_check.py has measured on a GPU from what size on it pays.
"""


def multiply_adds(config: Config, tokens: int) -> int:
    """The multiply-adds of the matrices, including the head, in a pass over `tokens` tokens: the workload of a call."""
    matrices = sum(prod(shape) for shape in layer_shapes(config).values() if len(shape) == 2)
    return tokens * (config.n_layers * matrices + config.vocab * config.width)


def choose(device: Device = "auto", workload: int | None = None) -> tuple[Backend, str]:
    """The backend of a device, for a command or a call, and why it is chosen; "numpy" is the contract itself, on the CPU.

    "auto" is a GPU, where there is one that can be used, and where the workload, if it is given, is LEAST_WORK at least: see
    `multiply_adds`. A command decides once, without it; the model, and a cache if there is one, must be on the device that is chosen.

    Raises what open_cuda does, for "cuda".
    """
    if device == "auto" and workload is not None and workload < LEAST_WORK:
        return cpu, f"{workload:.3g} multiply-adds are less work than {LEAST_WORK:.3g}, from which a GPU is taken"
    if device == "cpu":
        return cpu, "the CPU was asked for"
    if device == "numpy":
        return contract, "plain NumPy was asked for"
    try:
        return open_cuda(), "there is a GPU" if device == "auto" else "a GPU was asked for"
    except OptionError as error:
        if device == "cuda":
            raise
        return cpu, str(error)


def make_mask(
    q_len: int,
    k_len: int,
    pattern: masks.Pattern = masks.CAUSAL,
    *,
    past: int | None = None,
    align: masks.Align = "bottom_right",
    ops: Backend = cpu,
) -> Any:
    """`masks.mask`, float32 and additive, in the memory of `ops`: [q_len, k_len].

    For a GPU a mask of more than MOST_SENT elements is filled there, a smaller one made here and sent.
    """
    plan = masks.plan(q_len, k_len, pattern, past=past, align=align)
    on: Any = ops  # the backend of a GPU has more than the vocabulary of all
    if ops.device != "cpu" and plan.q_len * plan.k_len > MOST_SENT:
        return on.mask(plan)
    return ops.upload(masks.mask(q_len, k_len, pattern, past=past, align=align))
