"""The choice of a device. The bits are the same on every device.

A model's weights and its KV cache stay on one device, because sending them costs more than any operation on them. So `choose` decides once,
for a whole command, and every operation of a forward pass runs there. A mask array depends on nothing but its sizes: `make_mask` decides
for each.
"""

from typing import Any, Literal

from .. import contract
from ..base.errors import OptionError
from ..engine import masks
from ..engine.backend import Backend
from ..kernels import cpu
from .device import open_cuda

Device = Literal["cpu", "numpy", "cuda", "auto"]

MOST_SENT = 16384
"""Elements of the largest mask that is made by the CPU and sent to a GPU: BitNet-rs's rule."""


def choose(device: Device = "auto") -> tuple[Backend, str]:
    """The backend of a device, for a whole command, and why it is chosen; "numpy" is the contract itself, on the CPU.

    "auto" is a GPU, where there is one that can be used. That it is always faster is an assumption: no measurement supports a better rule
    yet.

    Raises what open_cuda does, for "cuda".
    """
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
