"""The normal form of arrays in files, and checks of what files hold.

Every point of a trace has one normal form, whatever file it came from: float points [T, width], heads side by side; `<name>_codes`
[T, M]; `<name>_scale` [T]; attention scores `kq` and probabilities `kq_soft_max` [H, T, S], which mean something only for s <= t.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.errors import FileFormatError, shown
from ..model.records import Config
from .points import HEADS, POINT, SCORES, SLOTS, Key


class Form(NamedTuple):
    """How an array of a file is brought into normal form."""

    shape: tuple[int, ...]  # in normal form
    axes: tuple[int, ...]  # of the array in the file, without those of length 1 that say nothing
    heads_first: bool = False  # whether `axes` are [heads, tokens, head width]

    def of(self, array: NDArray) -> NDArray:
        """The array in normal form."""
        array = array.reshape(self.axes)
        return (array.swapaxes(0, 1) if self.heads_first else array).reshape(self.shape)


def heads_of(key: Key, config: Config | None) -> int | None:
    """The number of heads that a point of a model has side by side; None if it has none, or if there is no config to know it from."""
    if config is None or key.name not in HEADS:
        return None
    return config.kv_heads if POINT[key.name].axes == "T GK" else config.heads


def normal_form(key: Key, shape: tuple[int, ...], rows: int | None, where: str, heads: int | None = None) -> Form:
    """How a point of this shape in a file becomes normal: leading axes of length 1 go, heads are put side by side.

    Points that have heads may be [T, H * K], [T, H, K] or [H, T, K], each with an axis of one sequence in front. The axis of the tokens is
    the one of length `rows`, the number of tokens; where that is not known, or both or neither have this length, the other one has `heads`,
    the number of heads. If neither is known, the tokens come first.

    Raises FileFormatError if the point cannot have such a shape, or if there are as many tokens as heads, so that both could come first.
    """

    refuse = partial(_misfit, key, shape, where)
    if not shape or 0 in shape:
        raise refuse("numbers, at least one")
    if key.name.endswith("_scale"):
        axes = tuple(n for n in shape if n > 1) or (1,)
        if len(axes) != 1:
            raise refuse("[tokens]")
        return Form(axes, axes)
    axes = without_leading_ones(shape, 3)
    if key.name in SCORES:
        if len(axes) != 3:
            raise refuse("[heads, tokens, keys]")
        return Form(axes, axes)
    if len(axes) > 3:
        raise refuse("[tokens, width]")
    if len(axes) == 3:
        return _of_three_axes(key.name, axes, rows, heads, refuse)
    axes = (1, *axes)[-2:]
    return Form(axes, axes)


def _misfit(key: Key, shape: tuple[int, ...], where: str, expected: str) -> FileFormatError:
    return FileFormatError(f"{where}: {shown(str(key))} has shape {list(shape)}, expected {expected}")


def _of_three_axes(name: str, axes: tuple[int, ...], rows: int | None, heads: int | None, refuse: Callable[[str], FileFormatError]) -> Form:
    """The form of a point with an axis of sequences, of heads, or of each token's experts."""
    a, b, c = axes
    if name in SLOTS and (a == rows or (rows is None and a != 1)):
        return Form((a, b * c), axes)
    if a == 1 and (name not in HEADS or 1 != rows == b):  # a batch of one
        return Form((b, c), (b, c))
    if name not in HEADS:
        raise refuse("[tokens, width]: one sequence")
    if a == b == rows and a > 1:
        raise refuse(f"[{a}, heads * head width]: with {a} tokens and {a} heads either could be the first axis")
    heads_first = a != rows if rows in (a, b) else a == heads != b
    if heads_first and heads not in (None, a):
        raise refuse(f"[tokens, width] or {heads} heads: one sequence")
    return Form((b, a * c) if heads_first else (a, b * c), axes, heads_first)


def without_leading_ones(shape: tuple[int, ...], axes: int) -> tuple[int, ...]:
    """A shape without leading axes of length 1, as long as it has more than `axes` axes."""
    while len(shape) > axes and shape[0] == 1:
        shape = shape[1:]
    return shape


def checked_dtype(key: object, dtype: np.dtype, where: str) -> np.dtype:
    """`dtype`, checked to be integers or floats of 64 bits at most. Raises FileFormatError that names the point `key`."""
    if dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise FileFormatError(f"{where}: {shown(str(key))} has dtype {dtype}, expected integers or floats of 64 bits at most")
    return dtype


def checked_tokens(array: NDArray, where: str) -> NDArray[np.int64]:
    """Token ids of one sequence, [T] or [1, T], as [T]. Raises FileFormatError."""
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu" or array.dtype.itemsize > 8:
        raise FileFormatError(f"{where}: tokens are {array.dtype} {list(array.shape)}, expected integers [T], at least one")
    if int(array.min()) < 0 or int(array.max()) >= 2**31:
        raise FileFormatError(f"{where}: tokens have the values {array.min()} to {array.max()}, expected ids from 0 to 2**31 - 1")
    return array.astype(np.int64)


def agreed_tokens(in_file: NDArray | None, expected: NDArray | None, where: str) -> NDArray[np.int64] | None:
    """The token ids of a trace, [T]: those in its file, or those the caller expects; None if neither has any.

    Raises FileFormatError if both have some, and not the same.
    """
    held, ids = (None if tokens is None else checked_tokens(tokens, where) for tokens in (in_file, expected))
    if held is not None and ids is not None and not np.array_equal(held, ids):
        raise FileFormatError(f"{where}: holds the tokens {_start(held)}, expected {_start(ids)}")
    return ids if held is None else held


def _start(ids: NDArray[np.int64]) -> str:
    return f"[{', '.join(map(str, ids[:8]))}{', ...' * (len(ids) > 8)}]"
