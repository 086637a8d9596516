"""Mistakes around the layers: residuals, the embedding, the head, tables and layers that are left out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...traces.points import Key
from ..graph import NORM, POOLED, POSITIONS, evaluated, operations
from ..variant import Variant
from .edited import named
from .mistake import Array, Compute, Computes, Engines, Mistake, Site, Values
from .switches import other_dialects

RESIDUALS = ("ffn_inp", "l_out")
HEAD = ("result_output",)
EMBEDDING = ("inp_embd",)
_FEW_LAYERS = 8  # any two of which may be exchanged; of more only neighbours


# --- residuals ------------------------------------------------------------------------------------------------------------------------


_NORMED = "other_tensor: {x}_norm is read instead of the residual, {h}"
_SKIPPED = "the layer's output is the layer's input: the layer is skipped"
_LAYERS_INPUT = "other_tensor: the layer's input is read instead of the residual, {h}"
_RESIDUALS = (
    *named(
        "residual",
        RESIDUALS,
        ("missing", "left_out: the residual, {h}, is left out", "the residual is missing"),
        ("branch_missing", "left_out: {branch} is left out", "the branch {branch} is missing"),
        ("normed", _NORMED, "the residual is the normed input, {x}_norm"),
        ("subtracted", "inverted: the residual, {h}, is subtracted", "the residual is subtracted"),
        ("branch_subtracted", "inverted: {branch} is subtracted", "the branch {branch} is subtracted"),
        ("twice", "twice: the residual, {h}, is applied twice", "the residual is added twice"),
        ("layer_input", _LAYERS_INPUT, "the residual is the layer's input"),
        ("layer_input_too", "added: the layer's input is added", "the layer's input is added once more"),
    ),
    Mistake("layers.skipped", _SKIPPED, ("l_out",), compute=lambda site: lambda values: values[site.layer_input]),
)


# --- head and embedding ---------------------------------------------------------------------------------------------------------------


def _tied(base: Variant) -> Variant | None:
    return None if base.model.output is None else base.with_model(output=None)


def _head_as_embedding(base: Variant) -> Variant | None:
    return None if base.model.output is None else base.with_model(token_embd=base.model.output)


_FLOAT16 = {
    True: "rounded to float16: declare the dialect bitnet.cpp (--as bitnet.cpp)",
    False: "not rounded to float16: declare the dialect exact",
}
_COLUMNS = "the head's matrix is read column by column, not row by row: [D, V] for [V, D]"
_UNNORMED = "other_tensor: l_out of layer {n} is read instead of result_norm"
_ENDS = (
    *named(
        "head",
        HEAD,
        ("unnormed", _UNNORMED, "the final norm is skipped: l_out of layer {n} is read"),
        ("int8", "rounded: result_norm: rounded to int8 with a scale for each row", "the head's input is quantised to int8"),
        ("column_by_column", "transposed: the head's matrix is read column by column, as if it were transposed", _COLUMNS),
    ),
    Mistake("dialect.head", "the head's input is {how}", HEAD, engine=other_dialects("in_float16", _FLOAT16), fault=False),
    *named(
        "pooling",
        (POOLED.name,),
        ("other_rows", "other_function: {A}", ""),
        ("before_norm", _UNNORMED, "rows in front of the final norm are pooled: l_out of layer {n}"),
        ("unit", "normed: each position is divided by its length", "it is divided by its length: normalised after pooling"),
    ),
    Mistake(
        "embedding.scaled",
        "embeddings are scaled by the root of the width",
        EMBEDDING,
        compute=lambda site: lambda values: values[site.key] * site.config.width**0.5,
    ),
)


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def _with_layers(base: Variant, order: Sequence[int]) -> Variant:
    """The engine that runs these layers, one after another."""
    config = base.model.config
    of_layers: dict[str, Any] = {
        name: tuple(i for i, n in enumerate(order) if n in layers)
        for name in ("window_layers", "rope_layers", "local_layers")
        if (layers := getattr(config, name)) is not None
    }
    config = replace(config, n_layers=len(order), **of_layers)
    return base.with_model(config=config, layers=tuple(base.model.layers[n] for n in order))


def _engine_skipped(base: Variant) -> Engines:
    count = len(base.model.layers)
    if count > 1:
        yield {"which": "last"}, _with_layers(base, range(count - 1))
        yield {"which": "first"}, _with_layers(base, range(1, count))


def _engine_orders(base: Variant) -> Engines:
    count = len(base.model.layers)
    every = list(range(count))
    for n in range(count):
        which = "the last layer" if n == count - 1 else f"layer {n}"
        yield {"how": f"{which} runs twice"}, _with_layers(base, [*every[: n + 1], *every[n:]])
        if 0 < n < count - 1:
            yield {"how": f"layer {n} is skipped"}, _with_layers(base, [*every[:n], *every[n + 1 :]])
        for other in range(n + 1, count if count <= _FEW_LAYERS else min(n + 2, count)):
            order = every.copy()
            order[n], order[other] = other, n
            yield {"how": f"layer {n} and layer {other} are exchanged"}, _with_layers(base, order)
    yield {"how": "layers run in the opposite order"}, _with_layers(base, every[::-1])


def _engine_other_residual(base: Variant) -> Engines:
    config = base.model.config
    if config.norm == "layer" and not config.shared_norm:
        read = ("the layer's input", "what attention's branch was added to")
        read = read[::-1] if config.parallel_residual else read
        yield {"read": read[0], "right": read[1]}, base.with_config(parallel_residual=not config.parallel_residual)


def _fed(feed: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> Callable[[Variant], Variant]:
    """Engines that are fed other token ids: ids [B, T] -> [B, T'], whose last T rows are theirs."""
    return lambda base: replace(base, feed=feed)


def _shifted(by: int) -> Callable[[Variant], Variant]:
    return lambda base: replace(base, feed=lambda ids: (ids + by) % base.model.config.vocab)


_FIRST_TWICE = "the first token is fed twice, as a BOS that is there already"
_PROMPT_TWICE = "the cache holds the same prompt already: it was not cleared after a first run"
_NOT_THE_FILES = "the file has one of its own"
_AS_HEAD = f"the embedding is read from the head's matrix, {_NOT_THE_FILES}"
MISTAKES = (
    *named(
        "table",
        (POSITIONS.name, *HEAD),
        ("positions", "left_out: the rows of positions are left out", "position_embd is missing"),
        ("output_bias", "left_out: the head's bias is left out", "output_bias is missing"),
        likely=True,
    ),
    Mistake("head.tied", f"the head is tied to the embedding, {_NOT_THE_FILES}", HEAD, engine=_tied),
    Mistake("embedding.tied", _AS_HEAD, EMBEDDING, engine=_head_as_embedding),
    *_RESIDUALS,
    *_ENDS,
    Mistake("layers.left_out", "the {which} layer is skipped", engine=_engine_skipped),
    Mistake("residual.other_kind", "the feed-forward reads {read} instead of {right}", engine=_engine_other_residual),
    *named("tokens", EMBEDDING, ("plus_1", "tokens: token ids are off by 1", "token ids are too large by one"), engine=_shifted(1)),
    *named("tokens", EMBEDDING, ("minus_1", "tokens: token ids are off by -1", "token ids are too small by one"), engine=_shifted(-1)),
    Mistake("tokens.first_twice", _FIRST_TWICE, engine=_fed(lambda ids: np.hstack([ids[:, :1], ids]))),
    Mistake("tokens.prompt_twice", _PROMPT_TWICE, engine=_fed(lambda ids: np.hstack([ids, ids]))),
)


# --- a layer in the place of another -----------------------------------------------------------------------------------------------------


def _through(site: Site, n: int, source: Key, values: Values) -> Array:
    """The output of layer n with a tensor as its input."""
    every = (o for o in operations(site.model, site.dialect) if o.key.layer == n and not o.key.name.endswith(("_codes", "_scale")))
    return evaluated(every, lambda key: values[source])[Key("l_out", n)]


def _whole_layer(site: Site) -> Computes:
    for n in range(len(site.model.layers)):
        if n != site.index:
            yield {"n": n}, partial(_through, site, n, site.layer_input)


def _runs_twice(site: Site) -> Compute:
    return partial(_through, site, site.index, site.key)


def _last_twice(site: Site) -> Compute:
    last = Key("l_out", len(site.model.layers) - 1)
    return lambda values: site.evaluate(_through(site, len(site.model.layers) - 1, last, values)).value


_OTHER_LAYER = "the layer is computed with the weights of layer {n}: layers are exchanged, or one runs twice"
OTHERS: tuple[Mistake, ...] = (
    Mistake("layers.other", _OTHER_LAYER, ("l_out",), compute=_whole_layer),
    Mistake("layers.twice", "the layer runs twice", ("l_out",), compute=_runs_twice),
    Mistake("layers.last_twice", "the last layer runs twice", (NORM.name,), compute=_last_twice),
    Mistake("layers.order", "layers run in another order: {how}", engine=_engine_orders),
)
"""Those that the search tries beside the edits of single operations, the cheap ones first: trying them ends where work does."""
