"""Mistakes around the layers: residuals, the embedding, the head, tables and layers that are left out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine.dialects import Dialect
from ...model import widen
from ...model.records import Model
from ...traces.points import Key
from .. import operations as op
from ..roundings import to_float16
from ..variant import Variant
from .mistake import Array, Compute, Engines, Mistake, Site, Values, alike

RESIDUALS = ("ffn_inp", "l_out")
HEAD = ("result_output",)
EMBEDDING = ("inp_embd",)
_FEW_LAYERS = 8  # any two of which may be exchanged; of more only neighbours


# --- residuals ------------------------------------------------------------------------------------------------------------------------


def _is_parallel(model: Model, dialect: Dialect) -> bool:
    return model.config.parallel_residual


def _is_sequential(model: Model, dialect: Dialect) -> bool:
    return not model.config.parallel_residual


def _of_two(function: Callable[[Array, Array], Array]) -> Callable[[Site], Compute | None]:
    """A mistake in the sum of a residual and one branch."""
    return lambda site: site.of(function) if len(site.operation.inputs) == 2 else None


def _with_layer_input(function: Callable[[Array, Array, Array], Array]) -> Callable[[Site], Compute | None]:
    """A mistake in the same sum, with the layer's input: function(the input, the residual, the branch)."""

    def compute(site: Site) -> Compute | None:
        two = len(site.operation.inputs) == 2
        return (lambda values: function(values[site.layer_input], *site.inputs(values))) if two else None

    return compute


def _normed_residual(site: Site) -> Compute | None:
    name = "attn_norm" if site.name == "ffn_inp" else "ffn_norm"
    if len(site.operation.inputs) != 2 or getattr(site.layer, name) is None:
        return None
    return lambda values: values[Key(name, site.index)] + values[site.operation.inputs[1]]


def _sum_of_branches(site: Site) -> Compute:
    return site.of(lambda residual, *branches: np.sum(branches, axis=0))


_BEHIND = ("l_out",)
_SKIPPED = "the layer's output is the layer's input: the layer is skipped"
_RESIDUALS = (
    Mistake("residual.missing", "the residual is missing", RESIDUALS, compute=_sum_of_branches),
    *alike(
        "residual",
        _BEHIND,
        ("no_attention", "attention's branch is missing", lambda site: site.of(lambda h, ffn, attention: h + ffn)),
        ("no_feed_forward", "the feed-forward's branch is missing", lambda site: site.of(lambda h, ffn, attention: h + attention)),
        when=_is_parallel,
    ),
    *alike(
        "residual",
        RESIDUALS,
        ("alone", "the branch is missing, only the residual comes through", _of_two(lambda a, b: a)),
        ("normed", "the residual is the normed input", _normed_residual),
        ("subtracted", "the residual is subtracted", _of_two(lambda a, b: b - a)),
        ("branch_subtracted", "the branch is subtracted", _of_two(lambda a, b: a - b)),
        ("twice", "the residual is added twice", _of_two(lambda a, b: 2 * a + b)),
        when=_is_sequential,
    ),
    *alike(
        "residual",
        _BEHIND,
        ("layer_input", "the residual is the layer's input", _with_layer_input(lambda h, a, b: h + b)),
        ("layer_input_too", "the layer's input is added once more", _with_layer_input(lambda h, a, b: h + (a + b))),
        when=_is_sequential,
    ),
    Mistake("layers.skipped", _SKIPPED, RESIDUALS, _is_sequential, _with_layer_input(lambda h, a, b: h)),
)


# --- head and embedding ---------------------------------------------------------------------------------------------------------------


def _table(site: Site) -> Array:
    return widen.float32(site.model.head).astype(np.float64)


def _logits(site: Site, x: Array, table: Array) -> Array:
    """Logits of another input [T, M], or by another table [V, M]."""
    bias = site.linear.bias
    return site.finished(x @ table.T + (0.0 if bias is None else bias.astype(np.float64)))


def _of_input(change: Callable[[Array], Array], site: Site) -> Compute:
    """The head, with its input changed."""
    table = _table(site)
    return site.of(lambda x: _logits(site, change(x), table))


def _by_table(site: Site, table: Array) -> Compute:
    """The head, by another table."""
    return site.of(lambda x: _logits(site, x, table))


def _norm_skipped(site: Site) -> Compute:
    table = _table(site)

    def compute(values: Values) -> Array:
        return _logits(site, values[Key("l_out", len(site.model.layers) - 1)], table)

    return compute


def _in_codes(x: Array) -> Array:
    q, scale = spec.quantize(x)
    return q / scale


def _float16_input(site: Site) -> Compute | None:
    return None if site.dialect.in_float16 else _of_input(to_float16, site)


def _float32_input(site: Site) -> Compute | None:
    return _by_table(site, _table(site)) if site.dialect.in_float16 and not site.dialect.ggml_activations else None


def _column_by_column(site: Site) -> Compute:
    table = _table(site)
    return _by_table(site, table.reshape(table.shape[::-1]).T)


def _untied(model: Model, dialect: Dialect) -> bool:
    return model.output is not None


def _tied(site: Site) -> Compute:
    return _by_table(site, widen.float32(site.model.token_embd).astype(np.float64))


def _engine_tied(base: Variant) -> Variant | None:
    return None if base.model.output is None else base.with_model(output=None)


def _head_as_embedding(site: Site) -> Compute:
    table = _table(site)
    return site.of(lambda tokens: table[tokens.astype(np.intp)])


def _engine_head_as_embedding(base: Variant) -> Variant | None:
    return None if base.model.output is None else base.with_model(token_embd=base.model.output)


def embedded(site: Site, change: Callable[..., NDArray[np.int64]]) -> Compute:
    """The embedding of other tokens."""
    return site.of(lambda tokens: op.embed(site.model, change(tokens.astype(np.int64)) % site.config.vocab).value)


def _scaled_embedding(site: Site) -> Compute:
    return site.of(lambda tokens: op.embed(site.model, tokens.astype(np.int64)).value * site.config.width**0.5)


_FLOAT16 = "the head's input is rounded to float16: declare the dialect bitnet.cpp (--as bitnet.cpp)"
_FLOAT32 = "the head's input is not rounded to float16: declare the dialect exact"
_COLUMNS = "the head's matrix is read column by column, not row by row: [D, V] for [V, D]"
_ENDS = (
    Mistake("head.unnormed", "the final norm is skipped", HEAD, compute=_norm_skipped),
    Mistake("head.int8", "the head's input is quantised to int8", HEAD, compute=partial(_of_input, _in_codes)),
    Mistake("dialect.head_float16", _FLOAT16, HEAD, compute=_float16_input, fault=False),
    Mistake("dialect.head_not_float16", _FLOAT32, HEAD, compute=_float32_input, fault=False),
    Mistake("head.column_by_column", _COLUMNS, HEAD, compute=_column_by_column),
    Mistake("embedding.scaled", "embeddings are scaled by the root of the width", EMBEDDING, compute=_scaled_embedding),
)


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def _engine_no_table(base: Variant) -> Engines:
    for name in ("output_bias", "position_embd"):
        if getattr(base.model, name) is not None:
            yield {"name": name}, base.with_model(**{name: None})


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
    if config.norm == "layer":
        read = ("the layer's input", "what attention's branch was added to")
        read = read[::-1] if config.parallel_residual else read
        yield {"read": read[0], "right": read[1]}, base.with_config(parallel_residual=not config.parallel_residual)


def _fed(feed: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> Callable[[Variant], Variant]:
    """Engines that are fed other token ids: ids [B, T] -> [B, T'], whose last T rows are theirs."""
    return lambda base: replace(base, feed=feed)


def _shifted(id: str, size: str, by: int) -> Mistake:
    """Token ids that are all off by a number."""

    def engine(base: Variant) -> Variant:
        return _fed(lambda ids: (ids + by) % base.model.config.vocab)(base)

    text = f"token ids are too {size} by one"
    return Mistake(f"tokens.{id}", text, EMBEDDING, compute=lambda site: embedded(site, lambda ids: ids + by), engine=engine)


_FIRST_TWICE = "the first token is fed twice, as a BOS that is there already"
_PROMPT_TWICE = "the cache holds the same prompt already: it was not cleared after a first run"
PROMPTS = (
    _shifted("plus_1", "large", 1),
    _shifted("minus_1", "small", -1),
    Mistake("tokens.first_twice", _FIRST_TWICE, engine=_fed(lambda ids: np.hstack([ids[:, :1], ids]))),
    Mistake("tokens.prompt_twice", _PROMPT_TWICE, engine=_fed(lambda ids: np.hstack([ids, ids]))),
)
_NOT_THE_FILES = "the file has one of its own"
_AS_HEAD = f"the embedding is read from the head's matrix, {_NOT_THE_FILES}"
TABLES = (
    Mistake("table.missing", "{name} is missing", engine=_engine_no_table),
    Mistake("head.tied", f"the head is tied to the embedding, {_NOT_THE_FILES}", HEAD, _untied, _tied, _engine_tied),
    Mistake("embedding.tied", _AS_HEAD, EMBEDDING, _untied, _head_as_embedding, _engine_head_as_embedding),
)
LAYERS = (
    Mistake("layers.left_out", "the {which} layer is skipped", engine=_engine_skipped),
    Mistake("residual.other_kind", "the feed-forward reads {read} instead of {right}", engine=_engine_other_residual),
)
ORDERS = (Mistake("layers.order", "layers run in another order: {how}", engine=_engine_orders),)
OPERATIONS = (*_RESIDUALS, *_ENDS)
