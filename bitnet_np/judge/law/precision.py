"""Precision profiles: where an engine keeps numbers in fewer bits than float32, as declared or as read off its dump.

A profile is data. running_error.py turns it into bounds for one operation, honest_engines.py into runs of our own engine.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import OptionError, meant
from ...base.validate import choice, instance, number
from ...engine import cache_types
from ...engine.dialects import BITNET_CPP, DIALECTS, EXACT, LLAMA_CPP, Dialect
from .formats import GRIDS, NARROW, format_of, spelled
from .roundings import to_digits

NARROW_FLOATS = ("bfloat16", "float16")
"""The types of fewer bits than float32's, the narrowest first."""
DIGITS = {"float32": 24} | {kind: GRIDS[kind].digits for kind in reversed(NARROW_FLOATS)}
"""Significant bits of each float type."""
ROUNDOFF = {"float32": 0.0} | {kind: 2.0 ** -DIGITS[kind] for kind in NARROW_FLOATS}
"""The largest relative error of rounding to each float type, beyond float32's own."""

FLOATS = tuple(DIGITS)
CACHES = cache_types.KINDS
"""Types of a KV cache. int8: one scale for each row of a head; q8_0 and q4_0: ggml's blocks of 32."""
_OF_ANY_TYPE = ("kv", "head", "mul")
_NUMBERS = ("exp", "noise")


@dataclass(frozen=True)
class Precision:
    """The types that an engine keeps numbers in. The defaults are float32 everywhere.

    act: the tensors between operations, the steps inside one, and the weights. kv: keys and values in the cache. probs: attention's
    probabilities. acc: the sums of matrix products. attn_acc: attention's sums of values. scale: the scales of int8 activations. head: the
    output matrix, where the engine converted it. mul: the operands of products, attention's too. exp: the largest part of itself that a
    function of one number is off by, such as an exponential, SiLU, a root, a sine. noise: the level of products' and attention's errors,
    as noise.py has it. kv, head and mul are any type of formats.py.
    """

    act: str = "float32"
    kv: str = "float32"
    probs: str = "float32"
    acc: str = "float32"
    attn_acc: str = "float32"
    scale: str = "float32"
    head: str = "float32"
    mul: str = "float32"
    exp: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in _NUMBERS:
                if not 0 <= number(f"precision: {name}", value) <= 1:
                    raise OptionError(f"precision: {name} is {value}, expected a part, 0 to 1")
            elif name not in _OF_ANY_TYPE:
                choice(f"precision: {name}", value, FLOATS)
            elif instance(f"precision: {name}", value, str) != "float32":
                try:
                    format_of(value)
                except OptionError as error:
                    raise OptionError(f"precision: {name}: {error}") from None

    def __str__(self) -> str:
        parts = [f"{f.name}={shown(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(parts) or "float32"

    @classmethod
    def parse(cls, text: str, base: Precision | None = None) -> Precision:
        """The profile of a text such as act=bf16,kv=q8_0; its other fields are those of `base`. Raises OptionError."""
        instance("precision", text, str)
        if base is not None:
            instance("base", base, cls)
        values: dict[str, Any] = {}
        names = [field.name for field in fields(cls)]
        for part in text.split(","):
            name, equals, value = (x.strip() for x in part.partition("="))
            if not equals or name not in names or name in values:
                kind = spelled(name)
                near = [f"{field}={name}" for field, kinds in (("kv", CACHES), ("act", FLOATS)) if kind in kinds and not equals]
                hint = f", did you mean {' or '.join(near)}?" if near else meant(name, names)
                expected = f"expected {'=TYPE, '.join(names)}=TYPE, each once{hint}"
                raise OptionError(f"--precision is {text!r}: {part.strip()!r} is wrong, {expected}")
            values[name] = _number(f"--precision is {text!r}: {name}", value) if name in _NUMBERS else spelled(value)
        return replace(base or FLOAT32, **values)


def _number(what: str, text: str) -> float:
    """The number of a text such as 2^-6 or 1e-4. Raises OptionError."""
    base, power, exponent = text.partition("^")
    try:
        return float(base) ** float(exponent) if power else float(text)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise OptionError(f"{what} is {text!r}, expected a number such as 2^-6 or 1e-4") from None


def shown(value: str | float) -> str:
    """A type, or a number as it is written in a profile: a power of two as one."""
    if isinstance(value, str):
        return value
    return f"2^{np.log2(value):.0f}" if value > 0 and np.frexp(value)[0] == 0.5 else f"{value:g}"


FLOAT32 = Precision()


@dataclass(frozen=True)
class Profile:
    """A kind of engine: its dialect, and its precision; None where that is read off the dump."""

    dialect: Dialect
    precision: Precision | None

    @classmethod
    def declared(cls, name: str | None, precision: str | None) -> Profile:
        """That of a name, or the definition's, with the types of a text such as act=bf16,kv=q8_0. Raises OptionError."""
        profile = PROFILES[name] if name else cls(EXACT, None)
        return profile if precision is None else cls(profile.dialect, Precision.parse(precision, profile.precision))


def dialect_to_compute(name: str, precision: str | None) -> Dialect:
    """The dialect of a name, with the KV cache of a text such as kv=q8_0. Raises OptionError."""
    if precision is None:
        return DIALECTS[name]
    parsed = Precision.parse(precision)
    if parsed != Precision(kv=parsed.kv):
        raise OptionError(f"--precision is {precision!r}, expected kv=TYPE alone: other types are known to check only")
    return DIALECTS[name].with_cache(parsed.kv)


FLASH = Precision(kv="float16", probs="float16", attn_acc="float16")
"""Flash attention in ggml's CPU backend, llama.cpp's default there: it sums values in float16 where the cache is float16."""

PROFILES = {
    "exact": Profile(EXACT, FLOAT32),
    "bitnet.cpp": Profile(BITNET_CPP, None),
    "llama.cpp": Profile(LLAMA_CPP, None),
    "llama.cpp-f16kv": Profile(LLAMA_CPP, Precision(kv="float16", probs="float16")),
    "llama.cpp-flash": Profile(LLAMA_CPP, FLASH),
    "llama.cpp-q8kv": Profile(LLAMA_CPP, replace(FLASH, kv="q8_0")),
    **{f"{engine}-bf16": Profile(EXACT, Precision(act="bfloat16")) for engine in ("transformers", "mlx", "vllm")},
    **{f"{engine}-f16": Profile(EXACT, Precision(act="float16")) for engine in ("transformers", "mlx", "vllm")},
}
"""Kinds of engines by name."""


# --- types read off numbers -----------------------------------------------------------------------------------------------------------

_INFORMATIVE = 32  # numbers, neither 0 nor whole: fewer may lie on a grid by chance
_BLOCK = 1 << 16


def to_float_type(x: NDArray, kind: str) -> NDArray[np.float32]:
    """Float32 numbers rounded to a float type; to float16 with float32's range."""
    return x if kind == "float32" else to_digits(x.astype(np.float64), DIGITS[kind]).astype(np.float32)


def storage_type(x: NDArray) -> str:
    """The narrowest float type that holds all numbers of a tensor: "bfloat16", "float16" or "float32".

    Random float32 numbers lie on bfloat16's grid with a probability of 2^-16 each, and on float16's with 2^-13, so a tensor with enough
    numbers on a grid was stored so.
    """
    if x.dtype.kind != "f":
        return "float32"
    possible, flat, informative = list(NARROW_FLOATS), x.reshape(-1), 0
    for i in range(0, flat.size, _BLOCK):
        part = flat[i : i + _BLOCK]
        with np.errstate(over="ignore", invalid="ignore"):
            possible = [kind for kind in possible if (NARROW[kind](part) == part).all()]
            informative += int(((part != np.rint(part)) & np.isfinite(part)).sum()) if informative < _INFORMATIVE else 0
        if not possible:
            return "float32"
    return possible[0] if informative >= _INFORMATIVE else "float32"
