"""Rules for one number, by the arithmetic contract. contract/ states it in plain NumPy, with every rounding in its place.

The constants are the contract's. A ternary product is written as `(accumulated - row sum) / scale * weight scale`, because codes of weights
count 0, 1, 2.
"""

import numpy as np

from .fast.simd import bits_float, float_bits, fma, polynomial, times_power_of_two
from .launching import rule, serial

WIDE_LANES = 128  # lanes of a sum in float64
CHUNK = 64  # keys; 64 keys of 128 float32 are 32 KB, a first-level cache

_f = np.float32
MAGIC = _f(1.5 * 2**23)  # x + MAGIC has no fraction bits left: adding rounds |x| < 2^22 to an integer, half to even
_LOG2_E = _f(1.4426950408889634)
_LN2_HIGH = _f(0.693145751953125)  # 16 bits, so that its product with n is exact
_LN2_LOW = _f(1.4286068203094172e-06)
_EXP_LOWEST, _EXP_HIGHEST = _f(-104.0), _f(89.0)  # beyond these the answer is 0 or infinity
# the polynomial of least relative error (3e-9) of the form 1 + r + r^2 (c2 + c3 r + ... + c6 r^4)
_EXP = _f(0.49999994), _f(0.1666652), _f(0.041668393), _f(0.008368781), _f(0.0013814467)
_beyond_linear = polynomial(_EXP)


@rule
def round_half_even(x):
    """Nearest integer of |x| < 2^22, as float32; ties go to the even one."""
    return _f(_f(x + MAGIC) - MAGIC)


@rule
def exp(x):
    """e^x in float32, within 0.92 units in the last place, the same bits everywhere; exp(0) is exactly 1.

    x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts, after Cody and Waite), a polynomial in r, then times 2^n.
    """
    vanishes = x < _EXP_LOWEST  # and is not computed, because Intel's processors take 150 cycles for a product that underflows
    x = _f(0.0) if vanishes else _EXP_HIGHEST if x > _EXP_HIGHEST else x  # NaN stays NaN
    magic = fma(x, _LOG2_E, MAGIC)
    n = _f(magic - MAGIC)
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, x))
    power = times_power_of_two(fma(fma(_beyond_linear(r), r, _f(1.0)), r, _f(1.0)), magic)
    return _f(0.0) if vanishes else power


_GELU_LINEAR = _f(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_CUBIC = _f(0.07135481282553)  # times 0.044715


@rule
def gelu_tanh(x):
    """x (1 + tanh(y / 2)) / 2 with y / 2 = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-y): nothing cancels."""
    y = _f(x * fma(_f(x * x), _GELU_CUBIC, _GELU_LINEAR))
    return _f(x / _f(_f(1.0) + exp(-y)))


_TANH_SMALL, _TANH_LARGEST = _f(0.17), _f(10.0)  # the polynomial of exp holds up to ln 2 / 2; tanh(10) rounds to 1


@rule
def tanh(x):
    """tanh(x) = m / (m + 2) with m = e^2|x| - 1, which is exp's polynomial without its 1 near 0, where the difference would cancel.

    Within 2.7 units in the last place; NaN stays NaN.
    """
    a = _f(abs(x))
    a = _TANH_LARGEST if a > _TANH_LARGEST else a
    y = _f(a + a)
    m = fma(_f(y * y), _beyond_linear(y), y) if a < _TANH_SMALL else _f(exp(y) - _f(1.0))
    t = _f(m / _f(m + _f(2.0)))
    return -t if x < _f(0.0) else t


@rule
def soft_cap(x, cap):
    """cap * tanh(x / cap): numbers far below the cap stay nearly as they are, none gets beyond it."""
    return _f(cap * tanh(_f(x / cap)))


_ROOT_HALF = _f(0.7071067811865476)
_ERF_LIMIT, _ERFC_LIMIT = _f(0.9375), _f(6.0)
# polynomials of least relative error: erf(t) = t + t p(t^2) up to the first limit (2e-8), erfc(t) = e^(t q(t)) up to the second (2e-7)
_ERF = tuple(map(_f, (0.12837915, -0.37612468, 0.11281553, -0.026757043, 0.0049791383, -0.0005919451)))
_ERFC = (
    *map(_f, (-1.1289877, -0.63385445, -0.10826741, 0.025439339, -0.0044226237)),
    *map(_f, (0.00052152446, -3.4619537e-05, 3.3738553e-07, 1.1519367e-07, -5.7343173e-09)),
)
_erf_p, _erfc_q = polynomial(_ERF), polynomial(_ERFC)


@rule
def normal_cdf(x):
    """The normal distribution function, (1 + erf(x / sqrt 2)) / 2, in float32: to 5 (1 + x^2 / 2) roundings, relative, and 0 below -8.49.

    It uses erf near 0 and erfc elsewhere, so that nothing cancels.
    """
    t = _f(abs(x) * _ROOT_HALF)
    if t <= _ERF_LIMIT:
        beyond = _f(_f(1.0) - fma(_erf_p(_f(t * t)), t, t))
    elif t > _ERFC_LIMIT:
        beyond = _f(0.0)
    else:  # NaN comes here and stays NaN
        beyond = exp(_f(_erfc_q(t) * t))
    tail = _f(_f(0.5) * beyond)
    return tail if x < _f(0.0) else _f(_f(1.0) - tail)


@rule
def round_to_half(x):
    """x in 0..65504 rounded to the nearest float16, half to even, still as float32."""
    if x < _f(2.0**-14):  # subnormal: a multiple of 2^-24, the spacing of float32 just below 1
        return _f(_f(x + _f(0.75)) - _f(0.75))
    bits = float_bits(x)
    return bits_float(np.int32((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF))


@rule
def first_chunk(position, window):
    """The first chunk that holds a key which a query at `position` sees."""
    return max(0, position - window + 1) // CHUNK


# pi/2 in three parts; the first two have 33 bits, so that their products with n < 2^20 are exact in float64
_PI_2 = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
_SIN = (-1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800, 1 / 6227020800, -1 / 1307674368000, 1 / 355687428096000)
_COS = (-1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800, 1 / 479001600, -1 / 87178291200, 1 / 20922789888000)


@serial
def cos_sin(angle):
    """Cosine and sine of a float64 angle in 0..1.6e6 radians, to 1e-15, from plain products and sums (Taylor's series after reduction)."""
    n = np.floor(angle * (2 / np.pi) + 0.5)
    r = ((angle - n * _PI_2[0]) - n * _PI_2[1]) - n * _PI_2[2]
    z = r * r
    s, c = 0.0, 0.0
    for i in range(7, -1, -1):
        s = (s + _SIN[i]) * z
        c = (c + _COS[i]) * z
    s, c = r + r * s, 1.0 + c
    quadrant = int(n) & 3
    if quadrant == 0:
        return c, s
    if quadrant == 1:
        return -s, c
    if quadrant == 2:
        return -c, -s
    return s, -c
