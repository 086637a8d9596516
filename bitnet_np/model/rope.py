"""RoPE's frequencies: the radians per position by which each pair of a head turns, and the context that they allow."""

from decimal import Decimal, localcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ShapeError, UnsupportedError
from .records import Config, with_local_rope

LARGEST_ANGLE = 1.6e6
"""The largest angle, in radians, whose cosine and sine are exact (kernels/scalar.py)."""


def rope_frequencies(base: float, width: int, factors: NDArray[np.float32] | None = None, scaling: float = 1.0) -> NDArray[np.float64]:
    """The frequencies base^(-2i / width) for i < width / 2, in radians per position, divided by `factors` [width / 2] and by `scaling`.

    The powers are correctly rounded: those of a math library differ between machines. Raises ShapeError for too few or many factors.
    """
    with localcontext(prec=40):
        powers = [Decimal(base) ** (Decimal(-2 * i) / Decimal(width)) for i in range(width // 2)]
    frequencies = np.array([float(power) for power in powers])
    if factors is not None:
        if factors.shape != frequencies.shape:
            raise ShapeError(f"{factors.shape[0]} factors of RoPE's frequencies, expected {frequencies.size}")
        frequencies = frequencies / factors
    with np.errstate(over="ignore"):
        return frequencies / scaling


def model_frequencies(config: Config, factors: NDArray[np.float32] | None) -> NDArray[np.float64]:  # [J]
    """RoPE's frequencies of a model, all scaling included. Raises UnsupportedError if not every angle of the context is exact."""
    frequencies = rope_frequencies(config.rope_base, 2 * config.rope_pairs, factors, config.rope_scaling)
    angle = config.context * frequencies.max(initial=0)
    if not angle <= LARGEST_ANGLE:
        raise UnsupportedError(
            f"RoPE's angles reach {angle:.3g} radians in the context, expected at most {LARGEST_ANGLE:.3g}; "
            f"the base is {config.rope_base}, the context {config.context}, positions are divided by {config.rope_scaling}"
        )
    return frequencies


def rope_fields(config: Config, stated: NDArray[np.float32] | None) -> dict[str, Any]:
    """The fields of a Model that say how its layers rotate. stated: factors that its file has, where the Config does not scale frequencies.

    Raises as `model_frequencies` does.
    """
    scaling = scaling_factors(config)
    factors = stated if scaling is None else scaling
    local = model_frequencies(with_local_rope(config), None) if config.local_layers else None
    return {"rope_factors": factors, "rope_frequency": model_frequencies(config, factors), "local_rope_frequency": local}


def llama3_factors(frequencies: NDArray[np.float64], factor: float, low: float, high: float, original: int) -> NDArray[np.float64]:
    """The numbers [J] by which Llama 3.1's scaling divides `frequencies` [J].

    GGUF files have these numbers as rope_freqs.weight; config.json has the four parameters. Waves that fit the `original` context more
    than `high` times stay, those that fit it less than `low` times are stretched by `factor`, and in between the frequency goes from one
    to the other linearly ("The Llama 3 Herd of Models", arXiv 2407.21783, and its code).
    """
    fits = original * frequencies / (2 * np.pi)
    smooth = np.clip((fits - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def yarn_ramp(config: Config) -> NDArray[np.float64]:  # [J]
    """The share of each pair's own frequency in YaRN's: 1 for fast pairs, 0 for slow ones, falling linearly in between.

    "YaRN" (arXiv 2309.00071), with the borders of its code: the pairs that turn `fast` and `slow` times in the original context,
    rounded outwards. Logarithms are correctly rounded, because a border must not differ between machines.
    """
    yarn, pairs = config.yarn, config.rope_pairs
    assert yarn is not None
    with localcontext(prec=40):
        circle, base = 2 * Decimal("3.141592653589793238462643383279502884197"), Decimal(config.rope_base)
        borders = [pairs * (yarn.original / (Decimal(turns) * circle)).ln() / base.ln() for turns in (yarn.fast, yarn.slow)]
    low, high = (float(border) for border in borders)
    if yarn.truncate:
        low, high = float(np.floor(low)), float(np.ceil(high))
    low, high = max(low, 0.0), min(high, 2 * pairs - 1.0)
    return 1 - np.clip((np.arange(pairs) - low) / (high - low if high != low else 0.001), 0, 1)


def yarn_factors(config: Config) -> NDArray[np.float32]:  # [J]
    """The numbers by which YaRN divides RoPE's frequencies, rounded to float32 as a GGUF file would hold them."""
    ramp = yarn_ramp(config)
    assert config.yarn is not None
    return (1 / ((1 - ramp) / config.yarn.factor + ramp)).astype(np.float32)


def scaling_factors(config: Config) -> NDArray[np.float32] | None:  # [J]
    """The numbers that divide RoPE's frequencies by YaRN or LongRoPE, None for a model with neither.

    LongRoPE's list goes by the context that the model is loaded with, not by the length of a sequence: keys in a cache stay as they are.
    """
    if config.longrope is not None:
        return np.array(config.longrope.short if config.context <= config.longrope.original else config.longrope.long, np.float32)
    return None if config.yarn is None else yarn_factors(config)


def longrope_magnitude(factor: float, original: int) -> float:
    """The number by which LongRoPE multiplies cosines and sines: sqrt(1 + ln(factor) / ln(original)); 1 where nothing is stretched."""
    if factor <= 1:
        return 1.0
    with localcontext(prec=40):
        return float((1 + Decimal(factor).ln() / Decimal(original).ln()).sqrt())


def yarn_magnitude(factor: float, weight: float = 1.0, divisor: float = 0.0) -> float:
    """The number by which YaRN multiplies cosines and sines: 0.1 * weight * ln(factor) + 1 over the same of `divisor`.

    It is 1 where nothing is stretched. Raises UnsupportedError for numbers that make it no positive number.
    """
    if factor <= 1:
        return 1.0
    with localcontext(prec=40):
        above, below = (float(Decimal(number) * Decimal(factor).ln() / 10 + 1) for number in (weight, divisor))
    if not (0 < above < np.inf and 0 < below < np.inf):
        raise UnsupportedError(f"YaRN's magnitude is {above} / {below}, expected positive numbers")
    return above / below
