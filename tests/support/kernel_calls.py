"""Every call of a kernel by Python, which kernel it is, and wrong results in its place."""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numba.core.registry import CPUDispatcher
from numpy.typing import NDArray

from bitnet_np.kernels import ternary_product, ternary_tiles
from bitnet_np.kernels.cache import disk_cache
from bitnet_np.kernels.cache.whole_kernels import Function
from bitnet_np.kernels.fast import amx
from bitnet_np.kernels.launching import Kernel
from bitnet_np.kernels.rows import OfNumbers
from bitnet_np.testing import selftest

Signature = tuple[str, str]  # a kernel's name and the types of its arguments: what is compiled by itself

_MOST = 1 << 20 if amx.why_absent() else ternary_tiles.LEAST  # tokens of a ternary product that vectors may be given
MACHINE_HAS_NOT = {
    **({name: amx.why_absent() for name in ("ternary_tiles._arrange", "ternary_tiles.ternary_matmul")} if amx.why_absent() else {}),
    **({"ternary_product.many_tokens": "this processor has another way for as many tokens"} if ternary_product.LEAST >= _MOST else {}),
    "launching._crew": "it computes nothing, and no Python calls it: kernels do, where threads share them",
    "float_state._exchange": "it computes nothing, and runs where another library has changed the state of the floating-point unit",
}
"""Kernels that no case can run on this machine, and why."""

CHANGES_NOTHING = {
    ("float_products._arrange", "out", "tail"),  # what is between two strips
    ("ternary_tiles._arrange", "sums", "tail"),  # a tile reads sums of whole tiles of tokens, and stores results of those that are there
    # matrix tiles read rows of an odd number of cache lines: the last may be beyond the codes
    ("ggml.products._arrange", "rows.q", "tail"),
    # on matrix tiles this type has rows of its own, of which it reads no sums
    *(("ggml.products._arrange", name, "blocks NVFP4, many rows") for name in ("rows.sums", "rows.eights")),
}
"""Arrays that a kernel writes and that no case needs to find wrong, and why: anywhere (""), in one place, or if one case alone calls it."""


def name_of(kernel: Any) -> str:
    """Module and name, such as `rows._add`."""
    return f"{kernel.py_func.__module__.removeprefix('bitnet_np.kernels.')}.{kernel.py_func.__qualname__.removesuffix('.run')}"


def called_from_python() -> set[str]:
    """Every kernel that Python may call, read from the package.

    They are those that threads can share, and what functions with annotations name: functions that are compiled have none.
    """
    ours = {id(kernel): kernel for kernel in disk_cache.DISPATCHERS}
    found = set()
    for module in [module for name, module in sys.modules.items() if name.startswith("bitnet_np.kernels.") and ".cuda" not in name]:
        for value in list(vars(module).values()):
            value = value.kernel if isinstance(value, OfNumbers) else value
            if isinstance(value, Kernel):
                found.add(name_of(value.run))
        for function in ast.parse(Path(str(module.__file__)).read_text("utf-8")).body:
            if isinstance(function, ast.FunctionDef) and _is_python(vars(module)[function.name]):
                names = [vars(module).get(node.id) for node in ast.walk(function) if isinstance(node, ast.Name)]
                found |= {name_of(ours[id(value)]) for value in names if id(value) in ours}
    return found


def _is_python(function: Any) -> bool:
    inner = inspect.unwrap(function)
    return inspect.isfunction(inner) and bool(inner.__annotations__)


def arrays_of(kernel: Any, arguments: tuple) -> dict[str, NDArray]:
    """The arrays that a kernel may write, by the names of its parameters."""
    found, body = {}, kernel.py_func.__globals__.get("body", kernel)  # `run` of a Kernel takes a team and what its body takes
    for name, value in zip(inspect.signature(body.py_func).parameters, arguments, strict=True):
        fields = value._asdict() if hasattr(value, "_asdict") else {"": value}
        found |= {f"{name}.{field}".rstrip("."): part for field, part in fields.items() if isinstance(part, np.ndarray)}
    return {name: array for name, array in found.items() if array.flags.writeable and array.size}


@contextmanager
def watched(call: Callable[[Any, tuple], Any]) -> Iterator[None]:
    """Let `call(kernel, arguments)` take the place of each call of a kernel by Python."""
    with mock.patch.object(Function, "__call__", lambda self, *arguments: call(self, arguments), create=True):
        yield


def signature_of(kernel: Any, arguments: tuple) -> Signature:
    return name_of(kernel), str(tuple(map(kernel.typeof_pyval, arguments)))


class Seen(NamedTuple):
    """What the cases of the self-test have called."""

    digests: dict[str, str]  # of each case
    callers: dict[Signature, list[str]]  # the cases that call it
    written: dict[str, set[str]]  # the parameters that a kernel has ever written


def seen(cases: dict[str, selftest.Case]) -> Seen:
    """Run cases, on the calling thread alone."""
    found = Seen({}, {}, {})

    def call(kernel: Any, arguments: tuple) -> Any:
        arrays = arrays_of(kernel, arguments)
        before = {name: array.tobytes() for name, array in arrays.items()}
        result = CPUDispatcher.__call__(kernel, *arguments)
        changed = {name for name, array in arrays.items() if array.tobytes() != before[name]}
        found.written.setdefault(name_of(kernel), set()).update(changed | ({"result"} if result is not None else set()))
        cases = found.callers.setdefault(signature_of(kernel, arguments), [])
        if case not in cases:
            cases.append(case)
        return result

    with watched(call), selftest.on_one_thread(True):
        for case, compute in cases.items():
            found.digests[case] = selftest.digest(*compute())
    return found


def _off_by_one(array: NDArray) -> NDArray:
    """The next number, before infinity the last one."""
    if array.dtype.kind != "f":
        return array ^ array.dtype.type(1)
    return np.nextafter(array, np.where(array == np.inf, 0, np.inf).astype(array.dtype))


def _wrong(array: NDArray, place: str) -> None:
    """Make numbers of an array wrong: one of each row ("lane"), the last of each row ("tail"), or the last row."""
    rows = np.atleast_2d(array)  # a view, whatever the strides
    index: Any = {"lane": np.s_[..., rows.shape[-1] // 2 % 16], "tail": np.s_[..., -1], "row": (-1,) * (rows.ndim - 1)}[place]
    rows[index] = _off_by_one(rows[index])


PLACES = ("lane", "tail", "row")


def finds(cases: dict[str, selftest.Case], found: Seen, wrong: Signature, parameter: str, place: str) -> str:
    """The first case whose digest another result of one kernel changes, "" if there is none. An error is a change, too."""

    def call(kernel: Any, arguments: tuple) -> Any:
        result = CPUDispatcher.__call__(kernel, *arguments)
        if name_of(kernel) != wrong[0] or signature_of(kernel, arguments) != wrong:
            return result
        if parameter == "result":
            return result + 1
        _wrong(arrays_of(kernel, arguments)[parameter], place)
        return result

    for case in found.callers[wrong]:
        try:
            with watched(call), selftest.on_one_thread(True):
                if selftest.digest(*cases[case]()) != found.digests[case]:
                    return case
        except Exception as error:
            return f"{case} ({type(error).__name__})"
    return ""


def mutants(found: Seen) -> Iterator[tuple[Signature, str, str]]:
    """Each kernel and signature, parameter that it writes, and place to make wrong."""
    for signature, cases in found.callers.items():
        name = signature[0]
        for parameter in sorted(found.written[name]):
            for place in PLACES if parameter != "result" else PLACES[:1]:
                if CHANGES_NOTHING.isdisjoint((name, parameter, where) for where in ("", place, " ".join(cases))):
                    yield signature, parameter, place
