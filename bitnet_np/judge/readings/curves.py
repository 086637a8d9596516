"""Functions of one number that stand in the place of the right one: what their values, solved for at all inputs, are made of.

Laws have few numbers: a line beyond a border, straight lines that meet, the polynomial inside of a sigmoid. Each is checked at all inputs.
A function of none of these is shown by some of its values.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ...base.errors import listed
from ..evidence import FEWEST, LITTLE, SMOOTH, SPARE, explains
from ..law.expression import Array
from ..law.functions import Function
from ..words import instead, pieces

_MANY, _JUMPS = 500, 8  # numbers that show a function, and those beside which it may jump
_SPREAD, _SHARE = 128, 8  # inputs between which lines meet, and how many a line has at least
_SHOWN, _STRAIGHT = 0.1, 1e-5  # of the mean error, that numbers that are said have; of the largest number, that those on a line are off
_CURVES: tuple[tuple[str, Function, Function], ...] = (
    ("sigmoid({})", lambda z: np.tanh(z / 2), lambda u: 2 * np.arctanh(u)),
    ("(1 + z / (1 + |z|)) / 2 of z = {}", lambda z: z / (1 + np.abs(z)), lambda u: u / (1 - np.abs(u))),
    ("(1 + z / sqrt(1 + z^2)) / 2 of z = {}", lambda z: z / np.hypot(1, z), lambda u: u / np.sqrt(1 - u * u)),
    ("(1/2 + arctan(z) / pi) of z = {}", lambda z: 2 / np.pi * np.arctan(z), lambda u: np.tan(np.pi / 2 * u)),
)
"""What is said of a curve from 0 to 1; what it is above its middle, from -1 to 1; and the inverse of that."""
_ON_LINES, _INSIDE = 0.95, 0.02  # of all numbers; of a sigmoid's range, from its ends: nearer values do not show what it is of


@np.errstate(all="ignore")
def described_function(x: Array, y: Array, right: Array, of: str, is_factor: bool = False) -> str | None:
    """What y is where it is another function of x than `right`; None if it is no function. All flat.

    is_factor: whether the function multiplies its input by something, as an activation does.
    """
    if x.size < _MANY:
        return None
    order = np.argsort(x)
    x, y, right = x[order], y[order], right[order]
    if (text := _beyond(x, y, right)) is not None:
        return text
    error = y - right
    step = np.maximum(x[2:] - x[:-2], 1e-300)
    between = error[:-2] + (error[2:] - error[:-2]) * (x[1:-1] - x[:-2]) / step
    if not np.sort((error[1:-1] - between) ** 2)[:-_JUMPS].mean() <= SMOOTH * min((error**2).mean(), y.var()):
        return None
    factor, e = "what it multiplies its input by", 1 + np.exp(-x)
    of_factor = ((factor, x, y / x), (f"as a function of 1 + exp(-x), {factor}", e, y / x)) if is_factor else ()
    laws = [_of_lines(of, x, u, v) for of, u, v in (("it", x, y), *of_factor)] + [_of_sigmoid(x, y, right)] * is_factor
    if any(laws):
        return next(filter(None, laws))
    wrong = np.flatnonzero(np.abs(error) >= _SHOWN * np.sqrt((error**2).mean()))  # a function may be right at most numbers
    spread = np.linspace(x[wrong[0]], x[wrong[-1]], 6)[1:-1]
    points = dict.fromkeys(wrong[np.searchsorted(x[wrong], spread)].tolist())
    return f"it is another function of {of}: " + listed([f"{instead(y[i], right[i], 4)} at {x[i]:.4g}" for i in points])


def _beyond(x: Array, y: Array, right: Array) -> str | None:
    """What a function is below or above some number, if it is right elsewhere."""
    made, texts, most, away = right.copy(), [], _STRAIGHT * np.abs(y).max(), np.abs(y - right)
    for where, side in (("below", slice(None)), ("above", slice(None, None, -1))):
        for words, line, least in (("0", 0 * x, 1), ("its input", x, 1), (f"{y[side][0]:.6g}", 0 * x + y[side][0], SPARE)):
            count = int((np.abs(y - line)[side] <= most).argmin())
            if (away[side][:count] > most).sum() >= least:
                made[side][:count] = line[side][:count]
                texts.append(f"{words} {where} {x[side][count - 1]:.4g}")
                break
    is_all = (away > most).sum() >= FEWEST and (np.abs(made - y) <= most).all()
    return f"it is {' and '.join(texts)}, and right elsewhere" if is_all else None


def _of_lines(what: str, x: Array, u: Array, v: Array) -> str | None:
    """The few straight lines that v is as a function of u, which grows or falls with x."""
    few = np.unique(np.searchsorted(x, np.linspace(x[0], x[-1], _SPREAD)))
    near = _STRAIGHT * np.abs(v).max()
    a, b = u[few], v[few]
    bent = np.abs(b[1:-1] - b[:-2] - (b[2:] - b[:-2]) * (a[1:-1] - a[:-2]) / (a[2:] - a[:-2])) > near
    ends = [few[0], *(few[some[i] + 1] for some in pieces(np.flatnonzero(bent)) if some.size for i in (0, -1)), few[-1]]
    parts = [slice(begin, end + 1) for begin, end in zip(ends[::2], ends[1::2], strict=True) if end - begin > 2]
    if not 1 < len(parts) <= few.size // _SHARE:
        return None
    lines = [np.polyfit(u[part], v[part], 1) for part in parts]
    off = np.min([np.abs(np.polyval(line, u) - v) for line in lines], axis=0)
    if (off <= near).mean() < _ON_LINES:
        return None
    knots = [f"{(u[part.stop - 1] + u[after.start]) / 2:.2g}" for part, after in pairwise(parts)]
    return f"{what} is made of {len(parts)} straight lines, which end near {listed(knots)}"


def _of_sigmoid(x: Array, y: Array, right: Array) -> str | None:
    """What multiplies the input: the sigmoid of an odd polynomial, or of straight lines; or another curve like a sigmoid."""
    own, theirs = (next(_sigmoids(x, z), None) for z in (right, y))
    if own is not None and theirs is not None:
        return f"it is x * {theirs} instead of x * {own}"
    known = np.abs(y / x - 0.5) < 0.5 - _INSIDE
    inside = np.log(y / (x - y))[known]
    return _of_lines("the number whose sigmoid multiplies its input", x[known], x[known], inside) if known.sum() >= _MANY // 2 else None


def _sigmoids(x: Array, y: Array) -> Iterator[str]:
    """Yields the curve like a sigmoid, of an odd polynomial of the input x, that makes y = x * curve, in words."""
    above, powers = 2 * y / x - 1, np.stack([x, x**3], axis=1)
    known = np.abs(above) < 1 - 2 * _INSIDE
    for words, curve, inverse in _CURVES if known.sum() >= _MANY // 2 else ():
        numbers = np.linalg.lstsq(powers[known], inverse(above[known]), rcond=None)[0]
        numbers = np.where(np.abs(numbers) > LITTLE, numbers, 0)
        if explains(x * (1 + curve(powers @ numbers)) / 2, y, 0 * y, 0.0):
            yield words.format(" + ".join(f"{c:.5g} {power}" for c, power in zip(numbers, ("x", "x^3"), strict=True) if c))
