"""Mistakes around the layers: residuals, the embedding, the head, tables and layers that are left out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import spec, widen
from ...dialects import Dialect
from ...model import Model
from ...traces.points import Key
from .. import operations as op
from ..roundings import to_float16
from ..variant import Variant
from .mistake import Array, Compute, Mistake, Numbers, Site

RESIDUALS = ("ffn_inp", "l_out")
HEAD = ("result_output",)
EMBEDDING = ("inp_embd",)
_FEW_LAYERS = 8  # any two of which may be exchanged; of more only neighbours


# --- residuals ------------------------------------------------------------------------------------------------------------------------


def _is_parallel(model: Model, dialect: Dialect) -> bool:
    return model.config.parallel_residual


def _is_sequential(model: Model, dialect: Dialect) -> bool:
    return not model.config.parallel_residual


def _of_two(function: Callable[[Array, Array], Array]) -> Callable[[Site], Iterator[tuple[Numbers, Compute]]]:
    """A mistake in the sum of a residual and one branch."""

    def compute(site: Site) -> Iterator[tuple[Numbers, Compute]]:
        if len(site.operation.inputs) == 2:
            yield {}, site.of(function)

    return compute


def _normed_residual(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    name = "attn_norm" if site.name == "ffn_inp" else "ffn_norm"
    if len(site.operation.inputs) == 2 and getattr(site.layer, name) is not None:
        normed = Key(name, site.index)
        yield {}, lambda values: values[normed] + values[site.operation.inputs[1]]


def _layer_input_residual(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if len(site.operation.inputs) == 2:
        yield {}, lambda values: values[site.layer_input] + values[site.operation.inputs[1]]


def _layer_input_again(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if len(site.operation.inputs) == 2:
        yield {}, lambda values: values[site.layer_input] + sum(site.inputs(values))


def _skipped(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if len(site.operation.inputs) == 2:
        yield {}, lambda values: values[site.layer_input]


_RESIDUALS = (
    Mistake(
        "residual.missing",
        "the residual is missing",
        RESIDUALS,
        compute=lambda site: site.of(lambda residual, *branches: np.sum(branches, axis=0)),
    ),
    Mistake(
        "residual.no_attention",
        "attention's branch is missing",
        ("l_out",),
        _is_parallel,
        lambda site: site.of(lambda h, ffn, attention: h + ffn),
    ),
    Mistake(
        "residual.no_feed_forward",
        "the feed-forward's branch is missing",
        ("l_out",),
        _is_parallel,
        lambda site: site.of(lambda h, ffn, attention: h + attention),
    ),
    Mistake("residual.alone", "the branch is missing, only the residual comes through", RESIDUALS, _is_sequential, _of_two(lambda a, b: a)),
    Mistake("residual.normed", "the residual is the normed input", RESIDUALS, _is_sequential, _normed_residual),
    Mistake("residual.subtracted", "the residual is subtracted", RESIDUALS, _is_sequential, _of_two(lambda a, b: b - a)),
    Mistake("residual.branch_subtracted", "the branch is subtracted", RESIDUALS, _is_sequential, _of_two(lambda a, b: a - b)),
    Mistake("residual.twice", "the residual is added twice", RESIDUALS, _is_sequential, _of_two(lambda a, b: 2 * a + b)),
    Mistake("residual.layer_input", "the residual is the layer's input", ("l_out",), _is_sequential, _layer_input_residual),
    Mistake("residual.layer_input_too", "the layer's input is added once more", ("l_out",), _is_sequential, _layer_input_again),
    Mistake("layers.skipped", "the layer's output is the layer's input: the layer is skipped", RESIDUALS, _is_sequential, _skipped),
)


# --- head and embedding ---------------------------------------------------------------------------------------------------------------


def _table(site: Site) -> Array:
    return widen.float32(site.model.head).astype(np.float64)


def _logits(site: Site, x: Array, table: Array) -> Array:
    """Logits of another input [T, M], or by another table [V, M]."""
    bias = site.linear.bias
    return site.finished(x @ table.T + (0.0 if bias is None else bias.astype(np.float64)))


def _norm_skipped(site: Site) -> Compute:
    last, table = Key("l_out", len(site.model.layers) - 1), _table(site)
    return lambda values: _logits(site, values[last], table)


def _int8_input(site: Site) -> Compute:
    table = _table(site)

    def compute(x: Array) -> Array:
        q, scale = spec.quantize(x)
        return _logits(site, q / scale, table)

    return site.of(compute)


def _float16_input(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if not site.dialect.halves:
        table = _table(site)
        yield {}, site.of(lambda x: _logits(site, to_float16(x), table))


def _float32_input(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if site.dialect.halves and not site.dialect.ggml_activations:
        table = _table(site)
        yield {}, site.of(lambda x: _logits(site, x, table))


def _column_by_column(site: Site) -> Compute:
    table = _table(site)
    return site.of(lambda x: _logits(site, x, table.reshape(table.shape[::-1]).T))


def _untied(model: Model, dialect: Dialect) -> bool:
    return model.output is not None


def _tied(site: Site) -> Compute:
    embedding = widen.float32(site.model.token_embd).astype(np.float64)
    return site.of(lambda x: _logits(site, x, embedding))


def _engine_tied(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    if base.model.output is not None:
        yield {}, base.with_model(output=None)


def _head_as_embedding(site: Site) -> Compute:
    table = _table(site)
    return site.of(lambda tokens: table[tokens.astype(np.intp)])


def _engine_head_as_embedding(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    if base.model.output is not None:
        yield {}, base.with_model(token_embd=base.model.output)


def _shifted(by: int, site: Site) -> Compute:
    return site.of(lambda tokens: op.embed(site.model, (tokens.astype(np.int64) + by) % site.config.vocab).value)


def _scaled_embedding(site: Site) -> Compute:
    return site.of(lambda tokens: op.embed(site.model, tokens.astype(np.int64)).value * site.config.width**0.5)


_ENDS = (
    Mistake("head.unnormed", "the final norm is skipped", HEAD, compute=_norm_skipped),
    Mistake("head.int8", "the head's input is quantised to int8", HEAD, compute=_int8_input),
    Mistake(
        "dialect.head_float16",
        "the head's input is rounded to float16: declare the dialect bitnet.cpp (--as bitnet.cpp)",
        HEAD,
        compute=_float16_input,
        fault=False,
    ),
    Mistake(
        "dialect.head_not_float16",
        "the head's input is not rounded to float16: declare the dialect exact",
        HEAD,
        compute=_float32_input,
        fault=False,
    ),
    Mistake(
        "head.column_by_column",
        "the head's matrix is read column by column, not row by row: [D, V] for [V, D]",
        HEAD,
        compute=_column_by_column,
    ),
    Mistake("embedding.scaled", "embeddings are scaled by the root of the width", EMBEDDING, compute=_scaled_embedding),
)


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def _engine_no_table(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
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


def _engine_skipped(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    count = len(base.model.layers)
    if count > 1:
        yield {"which": "last"}, _with_layers(base, range(count - 1))
        yield {"which": "first"}, _with_layers(base, range(1, count))


def _engine_orders(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
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


def _engine_other_residual(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    config = base.model.config
    if config.norm == "layer":
        read = ("the layer's input", "what attention's branch was added to")
        read = read[::-1] if config.parallel_residual else read
        yield {"read": read[0], "right": read[1]}, base.with_config(parallel_residual=not config.parallel_residual)


def _fed(feed: Callable[[NDArray[np.int64], int], NDArray[np.int64]]) -> Callable[[Variant], Variant]:
    """Engines that are fed other token ids: ids [B, T] and the vocabulary's size -> [B, T'], whose last T rows are theirs."""
    return lambda base: replace(base, feed=lambda ids: feed(ids, base.model.config.vocab))


PROMPTS = (
    Mistake(
        "tokens.plus_1",
        "token ids are too large by one",
        EMBEDDING,
        compute=partial(_shifted, 1),
        engine=_fed(lambda ids, vocab: (ids + 1) % vocab),
    ),
    Mistake(
        "tokens.minus_1",
        "token ids are too small by one",
        EMBEDDING,
        compute=partial(_shifted, -1),
        engine=_fed(lambda ids, vocab: (ids - 1) % vocab),
    ),
    Mistake(
        "tokens.first_twice",
        "the first token is fed twice, as a BOS that is there already",
        engine=_fed(lambda ids, vocab: np.hstack([ids[:, :1], ids])),
    ),
    Mistake(
        "tokens.prompt_twice",
        "the cache holds the same prompt already: it was not cleared after a first run",
        engine=_fed(lambda ids, vocab: np.hstack([ids, ids])),
    ),
)
TABLES = (
    Mistake("table.missing", "{name} is missing", engine=_engine_no_table),
    Mistake("head.tied", "the head is tied to the embedding, the file has one of its own", HEAD, _untied, _tied, _engine_tied),
    Mistake(
        "embedding.tied",
        "the embedding is read from the head's matrix, the file has one of its own",
        EMBEDDING,
        _untied,
        _head_as_embedding,
        _engine_head_as_embedding,
    ),
)
LAYERS = (
    Mistake("layers.left_out", "the {which} layer is skipped", engine=_engine_skipped),
    Mistake("residual.other_kind", "the feed-forward reads {read} instead of {right}", engine=_engine_other_residual),
)
ORDERS = (Mistake("layers.order", "layers run in another order: {how}", engine=_engine_orders),)
OPERATIONS = (*_RESIDUALS, *_ENDS)
