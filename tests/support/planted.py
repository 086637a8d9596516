"""Functions of the package made wrong, one at a time: each call of one gives other numbers than it should."""

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np


def functions(module: str) -> dict[CodeType, FunctionType]:
    """The functions of a module and of its classes, without decorators, by their code."""
    names = vars(sys.modules[module]) if module in sys.modules else {}
    own = [value for value in names.values() if getattr(value, "__module__", None) == module]
    methods = [value for one in own if isinstance(one, type) for value in vars(one).values()]
    found = map(_undecorated, (*own, *methods))
    plain = (one for one in found if isinstance(one, FunctionType) and not one.__closure__)  # a constructor that calls super has one
    return {one.__code__: one for one in plain if one.__code__.co_filename == names["__file__"]}


def _undecorated(value: Any) -> Any:
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, cached_property):
        value = value.func
    return inspect.unwrap(getattr(value, "__func__", value))


def called(function: Callable[[], Any], watched: Collection[CodeType]) -> dict[CodeType, bool]:
    """Those of the watched codes that a function runs, and whether one of their calls gives a number, or a function of numbers."""
    found: dict[CodeType, bool] = {}

    def profile(frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event == "return" and code in watched and not found.get(code):
            numbers: list[Any] = []
            wrong(value, numbers)
            found[code] = bool(numbers) or inspect.isgenerator(value)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


def gives_nothing(function: FunctionType) -> bool:
    """Whether it is annotated to have no result."""
    return function.__name__ == "__init__" or function.__annotations__.get("return", "") in (None, "None")


@contextmanager
def planted(function: FunctionType) -> Iterator[None]:
    """Context in which a function's results are wrong by 1 %, or in the last bit of integers; one without a result does nothing.

    Wherever it was imported to: its code is replaced.
    """
    code, defaults, by_name = function.__code__, function.__defaults__, function.__kwdefaults__
    right = FunctionType(code, function.__globals__, function.__name__, defaults, function.__closure__)
    right.__kwdefaults__ = by_name

    def faulty(arguments: tuple, options: dict) -> Any:
        if gives_nothing(function):
            return None
        result = right(*arguments, **options)
        return map(wrong, result) if inspect.isgenerator(result) else wrong(result)

    function.__globals__["__faulty__"] = faulty
    function.__defaults__ = function.__kwdefaults__ = None
    function.__code__ = (lambda *arguments, **options: __faulty__(arguments, options)).__code__  # noqa: F821
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, by_name
        del function.__globals__["__faulty__"]


def wrong(x: Any, numbers: list[Any] | None = None, percent: int = 1) -> Any:
    """Other numbers of the same type; x itself where it has none. Adds them to `numbers`. Parts are wrong by one percent more each."""
    if isinstance(x, tuple | list):
        parts = [wrong(part, numbers, percent + i) for i, part in enumerate(x)]
        return type(x)._make(parts) if hasattr(x, "_make") else type(x)(parts)
    if isinstance(x, dict):
        return dict(zip(x, wrong([*x.values()], numbers, percent), strict=True))
    if type(x).__module__.startswith("bitnet_np.") and hasattr(x, "__dict__"):
        other, fields = copy.copy(x), vars(x)
        chosen = [name for name, value in fields.items() if isinstance(value, float | np.ndarray)] or [*fields]
        for name, value in zip(chosen, wrong([fields[name] for name in chosen], numbers, percent), strict=True):
            object.__setattr__(other, name, value)
        return other
    other = _wrong_number(x, percent)
    if other is not x and numbers is not None:
        numbers.append(other)
    return other


def _wrong_number(x: Any, percent: int) -> Any:
    factor = 1 + percent / 100
    if isinstance(x, FunctionType):
        return (lambda *_, **__: None) if gives_nothing(x) else lambda *arguments, **options: wrong(x(*arguments, **options))
    if isinstance(x, bool | np.bool_):
        return not x
    if isinstance(x, int | np.integer):
        return type(x)(x ^ 1)  # which mostly stays in its range, as those of arrays do
    if isinstance(x, float | np.floating):
        return type(x)(factor * x if x else 0.01)
    if not isinstance(x, np.ndarray) or not x.size:
        return x
    if x.dtype == np.bool_:
        return ~x
    return x ^ x.dtype.type(1) if x.dtype.kind in "iu" else np.where(x == 0, 0.01, factor * x).astype(x.dtype)
