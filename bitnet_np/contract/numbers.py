"""What every operation is made of: fused multiply-adds, sums in lanes, and functions of one number,
with their constants."""

from collections.abc import Sequence
from math import factorial

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Int8s = NDArray[np.int8]
f32 = np.float32

LANES, WIDE_LANES = 16, 128  # of a sum in float32, and of one in float64

# --- sums ---------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Floats:
    """a * b + c in float32, rounded once: what processors have an instruction for.

    The product of two float32 is exact in float64. The sum is rounded to odd there (to the neighbour whose
    last bit is 1, unless it is exact), after which rounding to float32 cannot meet a false tie.
    """
    x, y, z = np.broadcast_arrays(a, b, c)
    product = x.astype(np.float64) * y
    total = product + z
    back = total - product
    error = (product - (total - back)) + (z - back)
    even = total.view(np.int64) % 2 == 0
    inexact = np.isfinite(error) & (error != 0)
    neighbour = np.nextafter(total, np.copysign(np.inf, error))
    odd = np.where(inexact & even, neighbour, total)
    return odd.astype(f32)


def in_lanes(x: NDArray, n: int = LANES) -> NDArray:
    # [..., m] -> [ceil(m / n), ..., n]; lane = index mod n, zeros after the end
    rows = x.shape[:-1]
    missing = -x.shape[-1] % n
    zeros = np.zeros((*rows, missing), x.dtype)
    padded = np.concatenate([x, zeros], axis=-1)
    steps = padded.reshape(*rows, -1, n)
    return np.moveaxis(steps, -2, 0)


def halve(lanes: NDArray) -> NDArray:  # [..., 2^n] -> [...]
    """The sum of lanes by halving: i with i + 8, i + 4, i + 2, i + 1 for 16 of them."""
    while (half := lanes.shape[-1] // 2) > 0:
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


@np.errstate(all="ignore")
def dot(a: Floats, b: Floats) -> Floats:  # [..., m], [..., m] -> [...]
    """Dot products in 16 lanes, each a chain of fused multiply-adds from +0. None is -0."""
    lanes = np.zeros(LANES, f32)
    for x, y in zip(in_lanes(a), in_lanes(b), strict=True):
        lanes = fma(x, y, lanes)
    return halve(lanes) + f32(0)


@np.errstate(all="ignore")
def lane_sum(x: NDArray, n: int = LANES) -> NDArray:  # [..., m] -> [...]
    """The sum in n lanes. In float64, numbers and squares of float32 are exact,
    so a plain addition equals a fused one."""
    lanes = np.zeros(n, x.dtype)
    for numbers in in_lanes(x, n):
        lanes = lanes + numbers
    return halve(lanes)


# --- functions of one number --------------------------------------------------------------------------------


def f32s(*numbers: float) -> tuple[np.float32, ...]:
    return tuple(map(f32, numbers))


MAGIC = f32(1.5 * 2**23)  # x + MAGIC has no fraction bits left: adding it rounds |x| < 2^22 to an integer
LOG2_E = f32(1.4426950408889634)
LN2_HIGH, LN2_LOW = f32(0.693145751953125), f32(1.4286068203094172e-06)
EXP_LOWEST, EXP_HIGHEST = f32(-104), f32(89)  # beyond these the answer is 0 or infinity
EXP = f32s(0.49999994, 0.1666652, 0.041668393, 0.008368781, 0.0013814467)  # of r^2, r^3, ... r^6
TANH_SMALL, TANH_LARGEST = f32(0.17), f32(10)
ROOT_HALF = f32(0.7071067811865476)
ERF_LIMIT, ERFC_LIMIT = f32(0.9375), f32(6)
ERF = f32s(0.12837915, -0.37612468, 0.11281553, -0.026757043, 0.0049791383, -0.0005919451)
ERFC = (
    *f32s(-1.1289877, -0.63385445, -0.10826741, 0.025439339, -0.0044226237),
    *f32s(0.00052152446, -3.4619537e-05, 3.3738553e-07, 1.1519367e-07, -5.7343173e-09),
)


def polynomial(x: Floats, coefficients: Sequence[np.float32]) -> Floats:
    """c[0] + c[1] x + c[2] x^2 + ... by Horner's rule:
    a fused multiply-add for each coefficient but the last."""
    p = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        p = fma(p, x, c)
    return p


@np.errstate(all="ignore")
def exp(x: Floats) -> Floats:
    """e^x: x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts; a polynomial in r, times 2^n,
    rounded once. NaN stays NaN."""
    x = np.clip(x, EXP_LOWEST, EXP_HIGHEST)
    n = fma(x, LOG2_E, MAGIC) - MAGIC
    r = fma(n, -LN2_HIGH, x)
    r = fma(n, -LN2_LOW, r)
    ones = f32s(1, 1)
    p = polynomial(r, ones + EXP)
    power = n.astype(np.int64)
    exact = np.ldexp(p.astype(np.float64), power)
    return exact.astype(f32)


@np.errstate(all="ignore")
def tanh(x: Floats) -> Floats:
    """m / (m + 2) with m = e^2|x| - 1, which is exp's polynomial without its 1 near 0,
    where the difference would cancel."""
    a = np.minimum(np.abs(x), TANH_LARGEST)
    y = a + a
    near = fma(y * y, polynomial(y, EXP), y)
    far = exp(y) - f32(1)
    m = np.where(a < TANH_SMALL, near, far)
    t = m / (m + f32(2))
    return np.where(x < 0, -t, t)


@np.errstate(all="ignore")
def normal_cdf(x: Floats) -> Floats:
    """The normal distribution function, half of erfc(-x / sqrt 2): by erf near 0, by erfc elsewhere,
    so that nothing cancels.

    erf(t) = t + t p(t^2) up to ERF_LIMIT, erfc(t) = e^(t q(t)) up to ERFC_LIMIT, beyond which it is 0.
    """
    t = np.abs(x) * ROOT_HALF
    erf = fma(polynomial(t * t, ERF), t, t)
    near = f32(1) - erf
    far = exp(polynomial(t, ERFC) * t)
    far = np.where(t > ERFC_LIMIT, f32(0), far)
    tail = f32(0.5) * np.where(t <= ERF_LIMIT, near, far)
    return np.where(x < 0, tail, f32(1) - tail)


PI_2 = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)  # pi / 2 in three parts
SIN = tuple((-1) ** n / factorial(2 * n + 1) for n in range(1, 9))  # of r^3, r^5, ... r^17
COS = tuple((-1) ** n / factorial(2 * n) for n in range(1, 9))  # of r^2, r^4, ... r^16


def series(z: Doubles, coefficients: Sequence[float]) -> Doubles:
    """c[0] z + c[1] z^2 + ... by Horner's rule in float64: plain products and sums."""
    total = np.zeros_like(z)
    for c in reversed(coefficients):
        total = (total + c) * z
    return total


def cos_sin(angle: Doubles) -> tuple[Doubles, Doubles]:
    """Cosines and sines in float64, by Taylor's series after taking off n quarter turns."""
    n = np.floor(angle * (2 / np.pi) + 0.5)
    r = angle
    for part in PI_2:
        r = r - n * part
    z = r * r
    s = r + r * series(z, SIN)
    c = 1.0 + series(z, COS)
    quarter = n.astype(np.int64) & 3
    cosines = np.choose(quarter, (c, -s, -c, s))
    sines = np.choose(quarter, (s, c, -s, -c))
    return cosines, sines
