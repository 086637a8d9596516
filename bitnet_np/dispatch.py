"""Which device computes. It is chosen once, for a whole command, because the weights must be there: no operation moves afterwards."""

from typing import Any, Literal, NamedTuple

from .device import open_cuda
from .errors import OptionError
from .kernels import cpu

Device = Literal["cpu", "cuda", "auto"]


class Choice(NamedTuple):
    ops: Any  # the backend
    reason: str  # for metrics


def choose(device: Device = "auto") -> Choice:
    """The backend of that name; "auto" is the GPU where there is one that can be used. Raises what open_cuda does, for "cuda".

    That the GPU is the faster one wherever it can be used is an assumption: nothing was measured yet that a better rule could stand on.
    """
    if device == "cpu":
        return Choice(cpu, "the CPU was asked for")
    try:
        ops = open_cuda()
    except OptionError as error:
        if device == "cuda":
            raise
        return Choice(cpu, str(error))
    return Choice(ops, "a GPU was asked for" if device == "cuda" else "there is a GPU")
