"""Mistakes around the layers: residuals, the embedding, the head, tables and layers that are left out."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..graph import POOLED, POSITIONS
from ..variant import Variant
from .edited import named
from .mistake import Engines, Mistake
from .switches import other_dialects

RESIDUALS = ("ffn_inp", "l_out")
HEAD = ("result_output",)
EMBEDDING = ("inp_embd",)


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
    ),
    Mistake("layers.skipped", _SKIPPED, ("l_out",), compute=lambda site: lambda values: values[site.layer_input]),
)


# --- head and embedding ---------------------------------------------------------------------------------------------------------------


def _tied(base: Variant) -> Variant | None:
    return None if base.model.output is None else base.with_model(output=None)


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
MISTAKES = (
    *named(
        "table",
        (POSITIONS.name, *HEAD),
        ("positions", "left_out: the rows of positions are left out", "position_embd is missing"),
        ("output_bias", "left_out: the head's bias is left out", "output_bias is missing"),
        likely=True,
    ),
    Mistake("head.tied", "the head is tied to the embedding, the file has one of its own", HEAD, engine=_tied),
    *_RESIDUALS,
    *_ENDS,
    Mistake("residual.other_kind", "the feed-forward reads {read} instead of {right}", engine=_engine_other_residual),
    *named("tokens", EMBEDDING, ("plus_1", "tokens: token ids are off by 1", "token ids are too large by one"), engine=_shifted(1)),
    *named("tokens", EMBEDDING, ("minus_1", "tokens: token ids are off by -1", "token ids are too small by one"), engine=_shifted(-1)),
    Mistake("tokens.first_twice", _FIRST_TWICE, engine=_fed(lambda ids: np.hstack([ids[:, :1], ids]))),
    Mistake("tokens.prompt_twice", _PROMPT_TWICE, engine=_fed(lambda ids: np.hstack([ids, ids]))),
)
