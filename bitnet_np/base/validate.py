"""Checks of what callers pass in, made before anything trusts it: kernels have no bounds checks.

A value may be of any class, and its methods may raise anything: whatever a conversion raises is the caller's error.
"""

import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .errors import Error, FileFormatError, MissingFileError, OptionError, ShapeError, shown

T = TypeVar("T")

_PIECE = 1 << 20  # bytes of a text read at a time


def integer(name: str, value: Any, least: int, most: int | None = None, error: type[Error] = OptionError) -> int:
    """`value` as a Python integer from `least` to `most`: an integer of Python or NumPy, but no bool. Raises `error`."""
    if type(value) is int and value >= least and (most is None or value <= most):
        return value  # before anything is put into words: a small mask takes as long as its checks
    expected = f"at least {least}" if most is None else f"{least} to {most}"
    try:
        number = operator.index(value)
    except Exception:
        raise error(f"{name} is {shown(value)}, expected an integer, {expected}") from None
    if isinstance(value, bool | np.bool_):
        raise error(f"{name} is {value}, expected an integer, {expected}")
    if number < least or (most is not None and number > most):
        raise error(f"{name} is {shown(number)}, expected {expected}")
    return number


def number(name: str, value: Any) -> float:
    """`value` as a Python float: any real number, but no bool. Raises OptionError."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise OptionError(f"{name} is {shown(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise OptionError(f"{name} is {shown(value)}, expected a number that float64 can hold") from None


def positive(name: str, value: Any, error: type[Error] = OptionError) -> float:
    """`value` as a float above 0 that is finite. Raises `error`, and OptionError for a value that is no number."""
    if not 0 < number(name, value) < float("inf"):
        raise error(f"{name} is {value}, expected a positive number")
    return float(value)


def instance(name: str, value: Any, kind: type[T]) -> T:
    """`value`, if it is of the class `kind`. Raises OptionError."""
    if not isinstance(value, kind):
        raise OptionError(f"{name} is {shown(value)}, expected a {kind.__name__}")
    return value


def flag(name: str, value: Any) -> bool:
    """`value` as a bool: one of Python or NumPy. Raises OptionError."""
    if not isinstance(value, bool | np.bool_):
        raise OptionError(f"{name} is {shown(value)}, expected True or False")
    return bool(value)


def choice(name: str, value: Any, known: Collection[str], error: type[Error] = OptionError) -> str:
    """`value`, if it is one of the texts `known`. Raises `error`."""
    if not isinstance(value, str) or value not in known:
        raise error(f"{name} is {shown(value)}, expected one of {', '.join(known)}")
    return value


def function(name: str, value: Callable[..., Any]) -> Callable[..., Any]:
    """`value`, if it can be called. Raises OptionError."""
    if not callable(value):
        raise OptionError(f"{name} is {shown(value)}, expected a function")
    return value


def items_of(name: str, values: Iterable[T], error: type[Error] = OptionError) -> Iterator[T]:
    """The items of a collection that has an end, one at a time: the first that is refused ends a long one. Raises `error`."""
    try:
        yield from values
    except Exception:
        raise error(f"{name} is {shown(values)}, expected a sequence") from None


def array_of(name: str, values: ArrayLike, error: type[Error] = ShapeError, expected: str = "an array") -> NDArray[Any]:
    """`values` as an array of any shape and dtype. Raises `error` for what is ragged, or becomes none."""
    try:
        return np.asarray(values)
    except Exception as problem:
        ragged = isinstance(problem, ValueError) and "inhomogeneous" in str(problem)
        raise error(f"{name} is {'ragged' if ragged else shown(values)}, expected {expected}") from None


def dtype_of(name: str, dtype: DTypeLike, allowed: tuple[type[np.generic], ...], error: type[Error] = OptionError) -> np.dtype:
    """`dtype`, if it is one of `allowed` in the machine's byte order. Raises `error`."""
    try:
        checked, text = np.dtype(dtype), ""
    except Exception:
        checked, text = None, shown(dtype)
    if checked in allowed:
        return checked
    raise error(f"{name} is {text or checked}, expected {' or '.join(kind.__name__ for kind in allowed)}")


def path_of(path: str | PathLike[str]) -> Path:
    """The path of a file or folder, which need not exist. Raises OptionError for a value that is no path, or none that files can have."""
    try:
        text = os.fspath(path)
        if isinstance(text, str) and b"\0" not in os.fsencode(text):
            return Path(text)
    except Exception:  # of a class that is no path, or with characters that the system's encoding has not
        pass
    raise OptionError(f"path is {shown(path)}, expected the name of a file or folder")


def check_exists(path: Path) -> None:
    """Raises MissingFileError for a path where nothing is."""
    if not path.exists():
        raise MissingFileError(f"{path}: no such file or folder")


def check_file(path: Path) -> None:
    """As `check_exists`. Raises FileFormatError for neither file nor folder: opening a pipe may wait forever, and a device has no end."""
    if not path.is_file() and not path.is_dir():
        check_exists(path)
        raise FileFormatError(f"{path}: neither a file nor a folder, expected a file")


def text_of(path: Path, most: int) -> str:
    """The UTF-8 text of a file, or a pipe, of at most `most` bytes. Raises FileFormatError or MissingFileError."""
    check_exists(path)
    raw = bytearray()
    with open(path, "rb") as file:
        while len(raw) <= most and (piece := file.read(_PIECE)):  # Python takes memory for as many bytes as it is asked to read
            raw += piece
    if len(raw) > most:
        raise FileFormatError(f"{path}: more than {most:,} bytes, which is the most that it may have")
    try:
        return raw.decode("utf-8-sig")  # some editors begin a text with a mark of its byte order
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: not UTF-8 at byte {error.start}") from None


def integers(name: str, values: ArrayLike, axes: int, beyond: type[Error] = ShapeError) -> NDArray[np.int64]:
    """`values` as int64 with `axes` axes. Raises ShapeError, which names the argument, and `beyond` for integers beyond 64 bits."""
    given = array_of(name, values, ShapeError, f"{axes} axes; pad it and give the lengths")
    if given.ndim != axes:
        raise ShapeError(f"{name} has shape {given.shape}, expected {axes} axes")
    if given.dtype == object and all(isinstance(value, int) for value in given.flat):
        raise beyond(f"{name} has a value beyond 64 bits")
    if given.size and given.dtype.kind not in "iu":
        raise ShapeError(f"{name} has dtype {given.dtype}, expected integers")
    if given.dtype == np.uint64 and given.size and given.max() > np.iinfo(np.int64).max:
        raise beyond(f"{name} has the value {given.max()}, expected less than 2**63")
    return np.array(given.astype(np.int64))
