"""Dumps of a call that goes on from an earlier one: the engine had the keys and values of the first tokens, and computed only the rest."""

from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError
from ..engine.forward_pass import run_whole
from ..engine.network import Runtime
from ..engine.tokens import Tokens
from ..traces.points import Entry, Key, Points, Trace


def behind(tokens: Tokens, prefix: int) -> Tokens:
    """The tokens behind a prefix of each sequence. Raises OptionError where a sequence has none."""
    if prefix >= (shortest := int(tokens.lengths.min())):
        raise OptionError(f"prefix is {prefix}, expected less than {shortest}, the tokens of the shortest sequence")
    return Tokens(tokens.ids[:, prefix:], tokens.lengths - prefix)


def with_prefix(runtime: Runtime, tokens: Tokens, trace: Trace, prefix: int) -> Trace:
    """The trace of one sequence, with our rows of its first `prefix` tokens in front of each tensor that has the rows of all others.

    So its operations are judged by the dump's rows alone: ours are right. Logits without other tensors are those of the later positions.
    """
    count, points = tokens.ids.shape[1] - prefix, trace.points
    if trace.tokens is not None and trace.tokens.size == count:
        trace = replace(trace, tokens=np.concatenate([tokens.ids[0, :prefix], trace.tokens]))
    shapes = {key: points.entries[key].shape if isinstance(points, Points) else points[key].shape for key in points}
    later = {key: shape for key, shape in shapes.items() if shape[:1] == (count,)}
    if prefix == 0 or not later:
        return trace
    if len(shapes) == 1:
        return replace(trace, positions=np.arange(prefix, prefix + count))
    first: dict[Key, NDArray] = {}

    def keep(name: str, layer: int | None, array: NDArray) -> None:
        key = Key(name, layer)
        if key in later and array.size == prefix * prod(later[key][1:]):
            first[key] = array.reshape(prefix, *later[key][1:]).copy()

    run_whole(runtime, Tokens.whole(tokens.ids[:, :prefix]), keep)

    def joined(key: Key) -> NDArray:
        theirs = points[key]
        return np.concatenate([first[key].astype(theirs.dtype), theirs]) if key in first else theirs

    rows = {key: (shape[0] + prefix * (key in first), *shape[1:]) for key, shape in shapes.items()}
    return replace(trace, points=Points({key: Entry(rows[key], points[key].dtype, partial(joined, key)) for key in points}))
