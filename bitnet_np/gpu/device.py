"""A GPU as the place where a model is computed. Importing this imports no CUDA.

    on = open_cuda()
    model = place(load("model.gguf"), on)
    logits = forward_full(model, tokens, ops=on)

Weights go to the device once. Token ids go in and logits come out; tensors in between stay there, unless they are recorded.
"""

from __future__ import annotations

from dataclasses import fields, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import CapacityError, OptionError, UnsupportedError
from ..base.tensor_types import TERNARY_TYPES
from ..engine.backend import Backend
from ..model import widen
from ..model.checks import check_model
from ..model.records import Blocks, Layer, Linear, Model, Ternary

if TYPE_CHECKING:
    from .backend import Cuda

INSTALL = "pip install 'bitnet_np[cuda]'"
OLDEST = (8, 0)  # compute capability: tensor cores for int8 in the shape used here
NO_EXPERTS = "the model has experts, which the device has no kernels for: compute it on the CPU"
_HEADROOM = 1 << 28  # bytes in addition to the weights: for results, for code, and for the driver


def open_cuda() -> Cuda:
    """The first GPU as a backend; CUDA_VISIBLE_DEVICES says which is the first.

    Raises OptionError, with the reason: no package, driver or device, or too old a device.
    """
    if find_spec("numba_cuda") is None:
        raise OptionError(f"no CUDA: the package numba-cuda is not installed, expected the extra `cuda`: {INSTALL}")
    try:
        from numba import cuda
        from numba.cuda import config
    except (ImportError, AttributeError) as error:  # the versions may be too far apart
        versions = ", ".join(f"{name} {version(name)}" for name in ("numba-cuda", "numba", "numpy"))
        raise OptionError(f"no CUDA: {versions} do not load together, {error} (expected those of {INSTALL})") from error

    from .backend import Cuda

    if not cuda.is_available():  # which asks for a driver and a compiler at once
        if cuda.cuda_error() is None:
            raise OptionError(f"no CUDA: the driver is there and libnvvm is not, expected that of {INSTALL} or of a toolkit in CUDA_HOME")
        why = " ".join(str(cuda.cuda_error()).split())
        raise OptionError(f"no CUDA device: {why} (expected an NVIDIA GPU and its driver)")
    config.CUDA_LOW_OCCUPANCY_WARNINGS = False  # about small grids, which a token's are
    gpu = cuda.get_current_device()
    if gpu.compute_capability < OLDEST:
        has, wants = (".".join(map(str, version)) for version in (gpu.compute_capability, OLDEST))
        raise OptionError(f"the CUDA device has compute capability {has}, expected at least {wants}")
    free = lambda: int(cuda.current_context().get_memory_info().free)  # noqa: E731
    return Cuda(free)


def device_of(ops: Backend) -> Cuda:
    """The device of a backend, which may be wrapped to count what it does."""
    storage: Any = ops.storage()
    return storage.on


def bytes_needed(model: Model) -> int:
    """Bytes of the weights on a device: ggml's block types as float32."""
    values = [value for record in (model, *model.layers) for value in vars(record).values()]
    parts = chain(values, *((linear.weights, linear.bias, linear.norm) for linear in values if isinstance(linear, Linear)))
    arrays = (part.codes if isinstance(part, Ternary) else part for part in parts)
    return sum(4 * prod(x.shape) if isinstance(x, Blocks) else x.nbytes for x in arrays if isinstance(x, np.ndarray | Blocks))


def place(model: Model, on: Cuda) -> Model:
    """The same model with its weights on the device.

    Raises CapacityError before anything is sent if the device has too little memory, UnsupportedError for matrices it has no kernel for,
    ShapeError for arrays whose shape differs from the model's Config.
    """
    check_model(model)
    if model.config.experts:
        raise UnsupportedError(NO_EXPERTS)
    needed, free = bytes_needed(model), on.free_bytes()
    if needed + _HEADROOM > free:
        raise CapacityError(
            f"the weights take {needed:,} bytes on the device and {_HEADROOM:,} are kept free in addition, it has {free:,} free"
        )

    def linear(name: str, value: Linear) -> Linear:
        weights = value.weights
        if isinstance(weights, Blocks) and weights.type in TERNARY_TYPES:
            raise UnsupportedError(f"{name} is {weights.type.name} with a scale for each block, which the device has no kernel for")
        placed = replace(weights, codes=on.ternary(weights), blocks=None) if isinstance(weights, Ternary) else moved(name, weights)
        bias, norm = moved(name, value.bias), moved(name, value.norm)
        return replace(value, weights=placed, bias=bias, norm=norm)

    def moved(name: str, value: Any) -> Any:
        if isinstance(value, Linear):
            return linear(name, value)
        value = widen.float32(value) if isinstance(value, Blocks) else value
        return on.upload(value) if isinstance(value, np.ndarray) else value

    def layer(n: int, weights: Layer) -> Layer:
        return replace(weights, **{f.name: moved(f"layer {n}: {f.name}", getattr(weights, f.name)) for f in fields(weights)})

    on_host = ("config", "layers", "rope_frequency", "local_rope_frequency", "rope_factors")  # the CPU computes the angles of RoPE
    moved_fields = {f.name: moved(f.name, getattr(model, f.name)) for f in fields(model) if f.name not in on_host}
    return replace(model, layers=tuple(layer(n, weights) for n, weights in enumerate(model.layers)), **moved_fields)
