"""Wrong activations of the feed-forward: which function of gate and up it is."""

from collections.abc import Callable

import numpy as np

from ... import spec
from ..mistakes.gates import RIGHT
from .search import best_number
from .wrong import Array, Wrong

AT = ("ffn_out",)

_LEAST = 64  # numbers
_MANY = 500  # numbers that show a function
_CLOSE = 0.1  # of its largest number: an approximation

Function = Callable[[Array], Array]

_PLAIN: dict[str, Function] = {
    "": lambda x: x,
    "SiLU": lambda x: x * _sigmoid(x),
    "SiLU with the sign lost in the sigmoid": lambda x: x * _sigmoid(-x),
    "relu": lambda x: np.maximum(x, 0),
    "relu^2": lambda x: np.maximum(x, 0) ** 2,
    "GELU": spec.gelu,  # its approximation by tanh is too close to be told from it
    "quick GELU": lambda x: x * _sigmoid(1.702 * x),
    "sigmoid": lambda x: _sigmoid(x),
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(0, x),
    "Mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "relu^3": lambda x: np.maximum(x, 0) ** 3,
    "hard SiLU": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "square": lambda x: x * x,
    "abs": np.abs,
    "exp": np.exp,
}
"""Activation functions, by name; the empty name leaves numbers as they are."""

_FITTED: dict[str, Callable[[Array, float], Array]] = {
    "{gate} * sigmoid({number:.4g} {gate})": lambda x, n: x * _sigmoid(n * x),
    "leaky_relu({gate}), with a slope of {number:.4g},": lambda x, n: np.where(x > 0, x, n * x),
    "leaky_relu({gate})^2, with a slope of {number:.4g},": lambda x, n: np.where(x > 0, x, n * x) ** 2,
    "relu({gate})^{number:.4g}": lambda x, n: np.maximum(x, 0) ** n,
    "softplus({number:.4g} {gate}) / {number:.4g}": lambda x, n: np.logaddexp(0, n * x) / n,
}
"""Functions with a number that is fitted, in words."""


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def activation(wrong: Wrong) -> str | None:
    """The function of gate and up, or of up alone, that it is."""
    if wrong.theirs.size < _LEAST:
        return None
    instead = f" instead of {RIGHT[wrong.config.activation]}"
    with np.errstate(all="ignore"):
        for gate_said, gate, up_said, up in _arrangements(wrong):
            for name, function in _PLAIN.items():
                computed = function(gate) * up
                if "token before" in gate_said + up_said and len(computed) > 2:
                    computed[0] = wrong.theirs[0]  # which has none before it
                if wrong.accounts(computed):
                    return (f"{name}({gate_said})" if name else gate_said) + (f" * {up_said}" if up_said else "") + instead
        (gate, up), right = _parts(wrong), _of_gate(wrong)
        if wrong.accounts(right(right(gate)) * up):
            return f"the activation is applied twice{instead}"
        if len(wrong.inputs) == 2 and wrong.accounts(right(gate) * right(up)):
            return f"the activation is applied to gate and up{instead}"
        return _limited(wrong) or _with_a_number(wrong, instead) or _zero_below(wrong)


def _of_gate(wrong: Wrong) -> Function:
    """The right activation of the gate, or of up where there is no gate."""
    right = spec.ACTIVATIONS[wrong.config.activation]
    return (lambda x: right(x, np.ones_like(x))) if len(wrong.inputs) == 2 else right


def _arrangements(wrong: Wrong) -> list[tuple[str, Array, str, Array]]:
    """What may have been taken for gate and up: each in words and numbers."""
    if len(wrong.inputs) == 1:
        return [("up", wrong.inputs[0], "", np.ones(1))]
    gate, up = wrong.inputs
    both = np.concatenate([gate, up], axis=1)
    half = gate.shape[1] // 2
    return [
        ("gate", gate, "up", up),
        ("up", up, "gate", gate),
        ("gate", gate, "(up + 1)", up + 1),
        ("gate", gate, "relu(up)", np.maximum(up, 0)),
        ("gate", gate, "", np.ones(1)),
        ("up", up, "", np.ones(1)),
        ("gate", gate, "gate", gate),
        ("up", up, "up", up),
        ("gate * up", gate * up, "", np.ones(1)),
        ("gate + up", gate + up, "", np.ones(1)),
        ("even elements of gate and up in a row", both[:, ::2], "the odd ones", both[:, 1::2]),
        ("odd elements of gate and up in a row", both[:, 1::2], "the even ones", both[:, ::2]),
        ("gate", gate, "up of the element before", np.roll(up, 1, axis=1)),
        ("gate", gate, "up of the element after", np.roll(up, -1, axis=1)),
        ("gate", gate, "up of the other half", np.roll(up, half, axis=1)),
        ("gate", gate, "up of the token before", np.roll(up, 1, axis=0)),
        ("gate of the token before", np.roll(gate, 1, axis=0), "up", up),
    ]


def _parts(wrong: Wrong) -> tuple[Array, Array]:
    """Gate and up; up and 1 where there is no gate."""
    return (wrong.inputs[0], wrong.inputs[1]) if len(wrong.inputs) == 2 else (wrong.inputs[0], np.ones(1))


_LIMITS: dict[str, Callable[[Function, Array, Array, float], Array]] = {
    "{gate} is clipped to -{number:.4g}..{number:.4g}": lambda f, g, u, n: f(np.clip(g, -n, n)) * u,
    "{gate} is clipped to at most {number:.4g}": lambda f, g, u, n: f(np.minimum(g, n)) * u,
    "up is clipped to -{number:.4g}..{number:.4g}": lambda f, g, u, n: f(g) * np.clip(u, -n, n),
    "{gate} is clipped to at most {number:.4g}, and up to -{number:.4g}..{number:.4g}": lambda f, g, u, n: (
        f(np.minimum(g, n)) * np.clip(u, -n, n)
    ),
    "gate and up are clipped to -{number:.4g}..{number:.4g}": lambda f, g, u, n: f(np.clip(g, -n, n)) * np.clip(u, -n, n),
    "{gate} is soft-capped at {number:.4g}": lambda f, g, u, n: f(n * np.tanh(g / n)) * u,
}
"""Limits of the inputs of the right function f, in words."""


def _limited(wrong: Wrong) -> str | None:
    """The number that gate or up was clipped at, or soft-capped."""
    right = _of_gate(wrong)
    for text, limited in _LIMITS.items():

        def compute(some: Wrong, number: float, limited: Callable[..., Array] = limited) -> Array:
            return limited(right, *_parts(some), number)

        number = best_number(wrong, compute)
        if number is not None:
            return text.format(gate=_gate(wrong), number=number)
    return None


def _with_a_number(wrong: Wrong, instead: str) -> str | None:
    for text, function in _FITTED.items():

        def compute(some: Wrong, number: float, function: Callable[[Array, float], Array] = function) -> Array:
            gate, up = _parts(some)
            return function(gate, number) * up

        number = best_number(wrong, compute)
        if number is not None:
            return text.format(gate=_gate(wrong), number=number) + (" * up" if len(wrong.inputs) == 2 else "") + instead
    return None


def _zero_below(wrong: Wrong) -> str | None:
    """The number below which the activation is 0, if it is right above."""
    gate = _parts(wrong)[0]
    zero = (wrong.theirs == 0) & (wrong.value != 0)
    if not zero.any() or not wrong.accounts(np.where(gate <= gate[zero].max(), 0, wrong.value)):
        return None
    return f"the activation is 0 where {_gate(wrong)} is below {gate[zero].max():.4g}"


def other_function(wrong: Wrong) -> str | None:
    """The function of the gate alone that it is, times up, by some of its numbers: an approximation, or none that is known."""
    if wrong.theirs.size < _LEAST:
        return None
    with np.errstate(all="ignore"):
        return _as_a_function(wrong)


def _as_a_function(wrong: Wrong) -> str | None:
    (gate, up), right = _parts(wrong), _of_gate(wrong)
    up = np.broadcast_to(up, gate.shape)
    usable = np.abs(up) > 0.1 * np.sqrt((up**2).mean())
    x, y = gate[usable], (wrong.theirs / np.where(usable, up, 1))[usable]
    order = np.argsort(x)
    x, y = x[order], y[order]
    if x.size < _MANY:
        return None
    error = y - right(x)
    between = error[:-2] + (error[2:] - error[:-2]) * (x[1:-1] - x[:-2]) / np.maximum(x[2:] - x[:-2], 1e-300)
    if ((error[1:-1] - between) ** 2).mean() > 0.05 * (error**2).mean():
        return None  # no function: its numbers are not near those of neighbours
    away = np.abs(error)
    if away.max() < _CLOSE * np.abs(y).max():
        return f"the activation is approximated: it is off by up to {away.max() / np.abs(y).max():.2g} of its largest number"
    points = [np.abs(x - at).argmin() for at in (-2, -1, 0.5, 1, 2)]
    numbers = ", ".join(f"{y[i]:.4g} at {x[i]:.3g}" for i in dict.fromkeys(points))
    times = ", times up" if len(wrong.inputs) == 2 else ""
    return f"it is another function of {_gate(wrong)}{times} instead of {RIGHT[wrong.config.activation]}: {numbers}"


def _gate(wrong: Wrong) -> str:
    return "gate" if len(wrong.inputs) == 2 else "up"
