"""What a caller gives, found good before anything trusts it: kernels have no bounds checks."""

import operator
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .errors import Error, FileFormatError, OptionError, ShapeError, shown

T = TypeVar("T")


def integer(name: str, value: Any, least: int, most: int | None = None, error: type[Error] = OptionError) -> int:
    """A Python integer from `least` to `most`: of Python's or NumPy's, but no bool. Raises `error`."""
    wanted = f"at least {least}" if most is None else f"{least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        raise error(f"{name} is {shown(value)}, expected an integer, {wanted}") from None
    if isinstance(value, bool | np.bool_):
        raise error(f"{name} is {value}, expected an integer, {wanted}")
    if number < least or (most is not None and number > most):
        raise error(f"{name} is {shown(number)}, expected {wanted}")
    return number


def number(name: str, value: Any) -> float:
    """A Python float: of any real number, but no bool. Raises OptionError."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise OptionError(f"{name} is {shown(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise OptionError(f"{name} is {shown(value)}, expected a number that float64 can hold") from None


def instance(name: str, value: Any, kind: type[T]) -> T:
    """`value`, which must be of that class. Raises OptionError."""
    if not isinstance(value, kind):
        raise OptionError(f"{name} is {shown(value)}, expected a {kind.__name__}")
    return value


def dtype_of(name: str, dtype: DTypeLike, allowed: tuple[type[np.generic], ...], error: type[Error] = OptionError) -> np.dtype:
    """One of the dtypes `allowed`, the machine's byte order. Raises `error`."""
    names = " or ".join(kind.__name__ for kind in allowed)
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise error(f"{name} is {shown(dtype)}, expected {names}") from None
    if found not in allowed:
        raise error(f"{name} is {found}, expected {names}")
    return found


def path_of(path: str | PathLike[str]) -> Path:
    """The name of a file or folder, which need not be there. Raises OptionError for what can be none."""
    if not isinstance(path, str | PathLike) or "\0" in str(path):
        raise OptionError(f"path is {shown(path)}, expected the name of a file or folder")
    return Path(path)


def check_file(path: Path) -> None:
    """Raises FileFormatError for what is there and is no file: opening a pipe waits for who may never come, and a device has no end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise FileFormatError(f"{path}: neither a file nor a folder, expected a file")


def text_of(path: Path, most: int) -> str:
    """The UTF-8 in a file, or a pipe, of at most so many bytes. Raises FileFormatError."""
    with open(path, "rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise FileFormatError(f"{path}: more than {most:,} bytes, expected at most so many")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: not UTF-8 at byte {error.start}") from None


def integers(name: str, values: ArrayLike, axes: int, beyond: type[Error] = ShapeError) -> NDArray[np.int64]:
    """Integers of so many axes as int64. Raises ShapeError by that name, and `beyond` for what 64 bits do not hold."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ShapeError(f"{name} is ragged, expected {axes} axes; pad it and give the lengths") from None
    if array.ndim != axes:
        raise ShapeError(f"{name} has shape {array.shape}, expected {axes} axes")
    if array.dtype == object and all(isinstance(value, int) for value in array.flat):
        raise beyond(f"{name} has a value beyond 64 bits")
    if array.size and array.dtype.kind not in "iu":
        raise ShapeError(f"{name} has dtype {array.dtype}, expected integers")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise beyond(f"{name} has the value {array.max()}, expected less than 2**63")
    return array.astype(np.int64)
