"""Mistakes in the feed-forward's activation."""

from .edited import named
from .mistake import Computes, Mistake, Site

AT = ("ffn_out", "ffn_moe_swiglu")
_OF_GATE = {
    "relu^2": "relu(gate)^2",
    "square": "gate^2",
    "quick GELU": "gate * sigmoid(1.702 gate)",
    "GELU's approximation by tanh": "GELU(gate)",
    "the exact GELU": "exact GELU(gate)",
    "nothing": "gate",
}


def _written(function: str, gated: bool) -> str:
    """A function of the table of activations as people write it: of gate and up, or of up alone."""
    return f"{_OF_GATE.get(function, f'{function}(gate)')} * up" if gated else function


def _other(site: Site) -> Computes:
    for words, tree in site.edits("other_function"):
        wrong, right = (_written(name, site.config.gated) for name in words.split(" instead of "))
        yield {"wrong": wrong, "right": right}, site.edited(tree)


_SWAP = "exchanged: {u}up and {g}gate are exchanged"
_SWAPPED = "gate and up are swapped"
_VALUE = "rounded: the activation: rounded to {kind}"
_INPUT = "rounded: ffn_{x}: rounded to {kind}"
_TABLE = "rounded to {kind}, as in a table of it"
MISTAKES = (
    Mistake("activation.other", "{wrong} instead of {right}", AT, compute=_other, likely=True),
    *named("activation", AT, ("swapped", _SWAP, _SWAPPED), likely=True),
    *named(
        "activation",
        AT,
        ("no_gate", "left_out: the activation is left out", "the gate is missing, up comes out alone"),
        ("no_up", "left_out: ffn_{x}up is left out", "up is not multiplied in"),
    ),
    *named(
        "activation",
        AT,
        ("narrow_value", _VALUE, f"the activation's value is {_TABLE}"),
        ("narrow", f"rounded: ffn_{{x}}gate: rounded to {{kind}} + {_VALUE}", f"the activation's input and value are {_TABLE}"),
        ("narrow_input", _INPUT, f"the activation's input, ffn_{{x}}, is {_TABLE}"),
        fault=False,
    ),
)
