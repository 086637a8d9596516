"""Mistakes that the search tries beside the edits of single operations: of whole layers."""

from functools import partial

from ...traces.points import Key
from ..graph import NORM, operations
from .mistake import Array, Compute, Computes, Mistake, Site, Values


def _through(site: Site, n: int, source: Key, values: Values) -> Array:
    """The output of layer n with a tensor as its input."""
    own: dict[Key, Array] = {}
    for operation in operations(site.model, site.dialect):
        if operation.key.layer == n and not operation.key.name.endswith(("_codes", "_scale")):
            inputs = [own[k] if k in own else values[source] for k in operation.inputs]
            own[operation.key] = operation.evaluate(*inputs).value
    return own[Key("l_out", n)]


def _whole_layer(site: Site) -> Computes:
    for n in range(len(site.model.layers)):
        if n != site.index:
            yield {"n": n}, partial(_through, site, n, site.layer_input)


def _runs_twice(site: Site) -> Compute:
    return partial(_through, site, site.index, site.key)


def _last_twice(site: Site) -> Compute:
    last = Key("l_out", len(site.model.layers) - 1)
    return lambda values: site.operation.evaluate(_through(site, len(site.model.layers) - 1, last, values)).value


_OTHER_LAYER = "the layer is computed with the weights of layer {n}: layers are exchanged, or one runs twice"
MISTAKES: tuple[Mistake, ...] = (
    Mistake("layers.other", _OTHER_LAYER, ("l_out",), compute=_whole_layer),
    Mistake("layers.twice", "the layer runs twice", ("l_out",), compute=_runs_twice),
    Mistake("layers.last_twice", "the last layer runs twice", (NORM.name,), compute=_last_twice),
)
"""All of them, the cheap ones first: trying them ends where work does."""
