"""The types that engines keep keys and values in.
Every backend has its own roundings to them (Backend.round_as)."""

from ..base.errors import UnsupportedError
from ..base.validate import choice

KINDS = ("float32", "float16", "bfloat16", "int8", "q8_0", "q4_0")
"""int8 has one step for each row of a head; q8_0 and q4_0 are ggml's, with one for each BLOCK numbers."""

BLOCK = 32


def check(kind: str, head_dim: int) -> None:
    """Raises OptionError for no type of KINDS, UnsupportedError for one whose blocks do not fit into a row of
    a head."""
    choice("kv", kind, KINDS)
    if kind in ("q8_0", "q4_0") and head_dim % BLOCK:
        expected = f"expected a multiple of {BLOCK} for a KV cache of {kind}"
        raise UnsupportedError(f"the head width is {head_dim}, {expected}")
