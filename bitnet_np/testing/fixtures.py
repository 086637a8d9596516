"""Inputs and results of the kernels as arrays, for the unit tests of other engines."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.backend import OPERATIONS, Wrapped
from ..kernels import cpu
from ..model import packing
from ..model.records import Ternary
from . import selftest

_LEFT_OUT = ("forward", "model", "token by token", "blocks", "parts")
"""Whole forward passes, which `trace` records, blocks, which gguf-py can widen, and parts of what other cases have whole."""


def fixtures() -> Iterator[tuple[str, dict[str, NDArray]]]:
    """The name of each case of the self-test that calls an operation, and the arrays of its calls, in order.

    Arrays are called "0.rms_norm.x", "0.rms_norm.gain", "0.rms_norm.eps", "0.rms_norm.result": number of the call, operation, and parameter
    (kernels/cpu.py), or result ("result0" and "result1" where there are two). A ternary matrix is int8 [N, M], "matrix", in place of its
    packed codes. bfloat16 is in uint16.
    """
    arrays: dict[str, NDArray] = {}
    calls = 0

    def recorded(name: str) -> Callable[..., Any]:
        function = getattr(cpu, name)

        def call(*arguments: Any) -> Any:
            nonlocal calls
            result = function(*arguments)
            given = inspect.signature(function).bind(*arguments).arguments
            if name == "ternary_matmul":
                weights = Ternary(given.pop("codes"), given["w_scale"], (given.pop("width"), given["q"].shape[1]))
                given["matrix"] = packing.unpack(weights)
            results = {f"result{i}": part for i, part in enumerate(result)} if isinstance(result, tuple) else {"result": result}
            arrays.update({f"{calls}.{name}.{key}": np.asarray(value) for key, value in (given | results).items() if value is not None})
            calls += 1
            return result

        return call

    for name, compute in selftest.cases(Wrapped(cpu, **{operation: recorded(operation) for operation in OPERATIONS})).items():
        arrays.clear()
        calls = 0
        if not name.startswith(_LEFT_OUT):
            compute()
        if arrays:
            yield name, dict(arrays)
