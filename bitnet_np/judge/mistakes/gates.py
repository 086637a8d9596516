"""Mistakes in the feed-forward's activation."""

from ...engine.dialects import Dialect
from ...model.records import Model
from ..edits.functions import ACTIVATIONS
from .edited import named
from .mistake import Computes, Mistake, Site

AT = ("ffn_out", "ffn_moe_swiglu")
_OF_GATE = {
    "relu^2": "relu(gate)^2",
    "square": "gate^2",
    "quick GELU": "gate * sigmoid(1.702 gate)",
    "GELU by tanh": "GELU(gate)",
    "GELU": "exact GELU(gate)",
}
_ALONE = {"relu^2": "relu squared", "GELU by tanh": "GELU's approximation by tanh", "GELU": "the exact GELU"}
_NAMES = {"relu2": "relu^2", "silu": "SiLU", "gelu_gate": "GELU by tanh", "gelu": "GELU", "gelu_tanh": "GELU by tanh"}


def _written(function: str, gated: bool) -> str:
    """A function of the table of activations as people write it: of gate and up, or of up alone."""
    return f"{_OF_GATE.get(function, f'{function}(gate)')} * up" if gated else _ALONE.get(function, function)


RIGHT = {activation: _written(name, activation in ("relu2", "silu", "gelu_gate")) for activation, name in _NAMES.items()}
"""The function that each Config.activation stands for, in words."""


def _gated(model: Model, dialect: Dialect) -> bool:
    return model.config.gated


def _ungated(model: Model, dialect: Dialect) -> bool:
    return not model.config.gated


def _other(site: Site) -> Computes:
    for words, tree in site.edits("other_function"):
        wrong, right = (_written(name, site.config.gated) for name in words.split(" instead of "))
        yield {"wrong": wrong, "right": right}, site.edited(tree)


def _none(site: Site) -> Computes:
    for words, tree in site.edits("left_out"):
        if (name := words.removesuffix(" is left out")) in ACTIVATIONS:
            yield {"right": _written(name, True)}, site.edited(tree)


_SWAP = "exchanged: {u}up and {g}gate are exchanged"
_SWAPPED = "gate and up are swapped"
_OF_PRODUCT = "moved: {up} comes before {right}"
_VALUE = "rounded: the activation: rounded to {kind}"
_INPUT = "rounded: ffn_{x}gate: rounded to {kind}"
_TABLE = "rounded to {kind}, as in a table of it"
MISTAKES = (
    Mistake("activation.other", "{wrong} instead of {right}", AT, compute=_other, everywhere=""),
    Mistake("activation.none", "the gate is not activated: gate * up instead of {right}", AT, _gated, _none),
    *named(
        "activation",
        AT,
        ("no_gate", "left_out: the activation is left out", "the gate is missing, up comes out alone"),
        ("no_up", "left_out: ffn_{x}up is left out", "up is not multiplied in"),
        ("swapped", _SWAP, _SWAPPED, ""),
        ("swapped_other", f"{_SWAP} + other_function: {{wrong}} instead of {{right}}", f"{_SWAPPED}, and {{wrong}} is for {{right}}"),
        ("of_product", _OF_PRODUCT, "{right} of (gate * up) instead of {right} of the gate, times up"),
        ("other_of_product", f"{_OF_PRODUCT} + other_function: {{wrong}} instead of {{right}}", "{wrong} of (gate * up)"),
        when=_gated,
    ),
    *named(
        "activation",
        AT,
        ("narrow_value", _VALUE, f"the activation's value is {_TABLE}"),
        ("narrow", f"{_INPUT} + {_VALUE}", f"the activation's input and value are {_TABLE}"),
        ("narrow_input", _INPUT, f"the activation's input is {_TABLE}"),
        fault=False,
    ),
    *named(
        "activation",
        AT,
        ("narrow_both", "rounded: ffn_up: rounded to {kind}", f"the activation's input is {_TABLE}"),
        when=_ungated,
        fault=False,
    ),
)
