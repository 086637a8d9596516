"""A caller's mask: its two forms, and the check before attention reads it.
masks.py explains the forms and makes masks."""

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..base.errors import MaskError
from ..base.validate import array_of, choice, dtype_of, flag, integer

Form = Literal["additive", "bool"]

LARGEST = 2**31 - 1  # size or position
LOWEST_BIAS = -1e9  # below this a finite number in an additive mask was meant to be -infinity


def as_additive(mask: NDArray, dtype: DTypeLike = np.float32) -> NDArray:
    """A mask in additive form and of this dtype: a bool mask is translated,
    an additive one keeps its values. Raises MaskError for one with a value beyond the dtype's range."""
    mask, kind = _of_numbers(mask), dtype_of_form("additive", dtype)
    additive = np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask
    try:
        with np.errstate(over="raise"):
            return additive.astype(kind, copy=False)
    except FloatingPointError:
        largest = np.abs(additive[np.isfinite(additive)]).max()
        raise MaskError(f"mask has {largest:.3g}, expected numbers within {kind}'s range") from None


def as_bool(mask: NDArray) -> NDArray[np.bool_]:
    """A mask in bool form: True where an additive mask is finite; a bool mask as it is."""
    mask = _of_numbers(mask)
    return mask if mask.dtype == np.bool_ else mask > -np.inf


def fully_masked(mask: NDArray) -> NDArray[np.bool_]:  # [..., q, k] -> [..., q]
    """True for each row that sees no key: attention gives zeros there."""
    return np.asarray(~as_bool(mask).any(axis=-1))


def check(
    mask: ArrayLike,
    q_len: int,
    k_len: int,
    *,
    batch: int = 1,
    form: Form | None = None,
    past: int | None = None,
    strict: bool = False,
) -> NDArray:
    """A caller's mask, checked: a read-only view [1 or B, 1, q_len, k_len] of it.

    mask: [q_len, k_len] or [1 or B, 1, q_len, k_len], bool or additive; with `form`, of that form only. An
    additive mask may hold finite numbers other than 0, which are biases. With `strict`, no query may see a
    key after its own position, which is `past` (default k_len - q_len) plus its row.

    Raises MaskError for another shape or dtype, NaN, +infinity, zeros and ones,
    or a finite number meant to be -infinity.
    """
    q_len, k_len = size("q_len", q_len), size("k_len", k_len)
    batch = integer("batch", batch, 1, error=MaskError)
    given = array_of("mask", mask, MaskError, "rows of one length")
    if given.ndim == 2:
        given = given[None, None]
    fitting = [(count, 1, q_len, k_len) for count in (1, batch)]
    if given.shape not in fitting:
        shape = given.shape[2:] if given.ndim == 4 and np.ndim(mask) == 2 else given.shape
        raise MaskError(f"mask has shape {shape}, expected {(q_len, k_len)} or {(batch, 1, q_len, k_len)}")
    if form is not None:
        wanted = choice("form", form, get_args(Form), MaskError)
        if (given.dtype == np.bool_) != (wanted == "bool"):
            expected = "bool" if wanted == "bool" else "an additive mask of floats"
            raise MaskError(f"mask has dtype {given.dtype}, expected {expected}")
    if given.dtype != np.bool_:
        _check_additive(given)
    if flag("strict", strict):
        check_causal(given, np.array([k_len - q_len if past is None else size("past", past)]))
    view = given.view()
    view.flags.writeable = False
    return view


def check_causal(mask: NDArray, past: NDArray[np.int64]) -> None:
    """Raises MaskError if a query of a mask [1 or B, 1, q, k] sees a key after its own position, which is
    past [1 or B] plus its row."""
    position = past[:, None] + np.arange(mask.shape[2])  # [1 or B, q]
    future = as_bool(mask)[:, 0] & (np.arange(mask.shape[3]) > position[:, :, None])
    if future.any():
        b, i, j = np.argwhere(future)[0]
        query = position[b if len(past) > 1 else 0, i]
        later = f"lets the query at position {query} see the key at position {j}, which is later"
        raise MaskError(f"mask[{b if len(mask) > 1 else 0}, 0, {i}, {j}] {later}")


def _check_additive(array: NDArray) -> None:
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise MaskError(f"mask has dtype {array.dtype}, expected bool, or float32, float64 or float16 to add")
    lowest = max(LOWEST_BIAS, float(np.finfo(array.dtype).min))
    number = "a number, or -inf where a key is hidden"
    hidden = "-inf: a finite number hides nothing from a row that sees nothing else"
    for wrong, expected in (
        (np.isnan(array), number),
        (array == np.inf, number),
        ((array <= lowest) & (array > -np.inf), hidden),
    ):
        if wrong.any():
            index = np.argwhere(wrong)[0]
            raise MaskError(f"mask{index.tolist()} is {array[tuple(index)]}, expected {expected}")
    if ((array == 0) | (array == 1)).all() and (array == 1).any():
        why = "added to scores, ones hide nothing; use bool"
        raise MaskError(f"mask is {array.dtype} of zeros and ones, expected 0 and -inf: {why}")


def _of_numbers(mask: ArrayLike) -> NDArray:
    """A mask as an array of bool or floats. Raises MaskError for another dtype."""
    given = array_of("mask", mask, MaskError)
    if given.dtype.kind not in "bf":
        raise MaskError(f"mask has dtype {given.dtype}, expected bool or floats")
    return given


def size(name: str, value: int, least: int = 0) -> int:
    """A size or a position, checked. Raises MaskError."""
    return integer(name, value, least, LARGEST, MaskError)


def dtype_of_form(form: Form, dtype: DTypeLike) -> np.dtype:
    """The dtype of a mask of this form, which is `dtype` for an additive one. Raises MaskError."""
    if choice("form", form, get_args(Form), MaskError) == "bool":
        return np.dtype(np.bool_)
    return dtype_of("dtype", dtype, (np.float32, np.float64, np.float16), MaskError)
