"""Float64 arithmetic whose bits are the same on every machine: arrays that the law computes with while a pack is written.

IEEE fixes sums, products, quotients and roots. Nothing fixes exponentials, powers and sines, or the order in which a library of matrices
adds up: those differ between processors, and between versions of a library, by a unit in the last place. Arrays of this type take
exponentials from `decimal`, which rounds correctly, sines from plain products and sums, and add up products one after the other.
"""

from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..contract.numbers import cos_sin

_ROOT_PI = Decimal("1.77245385090551602729816748334114518279754945612238712821380779")


def _of_number(
    compute: Callable[[Decimal], Decimal], digits: int, low: float, high: float, below: float, above: float
) -> Callable[[NDArray], NDArray]:
    """A function of each number of an array, computed to a number of digits and rounded to float64.

    below, above: its values outside of its range.
    """

    @lru_cache(maxsize=1 << 16)
    def one(x: float) -> float:
        if not low <= x <= high:
            return x if x != x else below if x < low else above
        with localcontext(prec=digits):
            return float(compute(Decimal(x)))

    return lambda x: np.array([one(number) for number in np.asarray(x, np.float64).ravel().tolist()], np.float64).reshape(np.shape(x))


def _erfc(x: Decimal) -> Decimal:
    """1 - erf(x): by its series near 0, by a continued fraction in the tail (Abramowitz and Stegun, 7.1.5 and 7.1.14)."""
    t = abs(x)
    if t < 5:
        term = total = t
        for n in range(1, 150):
            term *= -t * t / n
            total += term / (2 * n + 1)
        tail = 1 - 2 * total / _ROOT_PI
    else:
        below = t
        for n in range(80, 0, -1):
            below = t + Decimal(n) / 2 / below
        tail = (-t * t).exp() / below / _ROOT_PI
    return 2 - tail if x < 0 else tail


def _power(base: NDArray, exponent: NDArray) -> NDArray:
    """base^exponent: squares and cubes by products, else correctly rounded, of bases above 0."""
    if np.ndim(exponent) == 0 and exponent in (2, 3):
        return base * base if exponent == 2 else base * base * base
    with localcontext(prec=40):
        pairs = np.broadcast(base, exponent)
        return np.array([float(Decimal(float(b)) ** Decimal(float(e))) for b, e in pairs]).reshape(pairs.shape)


def _product(a: NDArray, b: NDArray) -> NDArray:
    """`a @ b`, whose terms are added one after the other."""
    if b.ndim == 1:
        return _product(a, b[:, None])[..., 0]
    total = a[..., :, :1] * b[..., :1, :]
    for k in range(1, a.shape[-1]):
        total = total + a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return total


_INF, _LARGEST = float("inf"), 1.7976931348623157e308
_FUNCTIONS: dict[str, Callable[..., NDArray]] = {
    "exp": _of_number(Decimal.exp, 25, -745.0, 709.0, 0.0, _INF),
    "expm1": _of_number(lambda x: x.exp() - 1, 60, -100.0, 709.0, -1.0, _INF),
    "tanh": _of_number(lambda x: 1 - 2 / ((2 * x).exp() + 1), 60, -40.0, 40.0, -1.0, 1.0),
    "log": _of_number(Decimal.ln, 25, 5e-324, _LARGEST, -_INF, _INF),
    "erfc (vectorized)": _of_number(_erfc, 60, -27.0, 27.0, 2.0, 0.0),
    "cos": lambda x: cos_sin(x)[0],
    "sin": lambda x: cos_sin(x)[1],
    "power": _power,
    "matmul": _product,
}
"""What is computed in another way than NumPy does, by the names of its functions."""
_FIXED = """add subtract multiply divide floor_divide remainder negative absolute sign sqrt square rint floor ceil trunc maximum minimum
clip less less_equal greater greater_equal equal not_equal isfinite isnan isinf signbit invert logical_and logical_or logical_not
bitwise_and bitwise_or copysign frexp ldexp spacing""".split()  # noqa: SIM905
"""What IEEE fixes, or is exact."""
_OF_MATRICES = ("dot", "einsum", "inner", "tensordot", "vdot")
"""NumPy functions whose order of summation is not specified."""


class Portable(np.ndarray):
    """Float64 numbers in whose functions every machine gives the same bits. A function that is not known to do so raises TypeError."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, out: Any = None, **options: Any) -> Any:
        plain = [np.asarray(x) if isinstance(x, Portable) else x for x in inputs]
        name = ufunc.__name__
        if method == "__call__" and name in _FUNCTIONS and out is None:
            return portable(_FUNCTIONS[name](*plain))
        if name not in _FIXED:
            raise TypeError(f"numpy.{name} may give other bits on another machine")
        if out is not None:
            getattr(ufunc, method)(*plain, out=tuple(np.asarray(x) for x in out), **options)
            return out[0]
        result = getattr(ufunc, method)(*plain, **options)
        return tuple(map(portable, result)) if isinstance(result, tuple) else portable(result)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func.__name__ in _OF_MATRICES:
            raise TypeError(f"numpy.{func.__name__} may give other bits on another machine")
        result = super().__array_function__(func, types, args, kwargs)
        return portable(result) if type(result) is np.ndarray else result


def portable(x: ArrayLike) -> Portable:
    """An array as one of these."""
    return np.asarray(x).view(Portable)
