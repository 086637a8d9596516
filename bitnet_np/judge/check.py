"""An engine's arrays judged as they are in memory, or its dump in a file: `bitnet_np.check`, with the limits that the command measures."""

from collections.abc import Iterator, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError, TokenRangeError, shown
from ..base.progress import Bars, no_bars
from ..base.validate import choice, flag, function, instance, integer, integers, path_of
from ..engine.dialects import DIALECTS, EXACT, Dialect
from ..engine.network import Runtime
from ..engine.tokens import Tokens, check_tokens, pad
from ..kernels.float_state import steady
from ..model.checks import check_model
from ..model.records import Config, Model
from ..traces.arrays import as_numpy
from ..traces.formats import COMPLETIONS, detect
from ..traces.formats.arrays import Labelled
from ..traces.labels import direct
from ..traces.points import Entry, Key, Trace
from ..traces.token_files import unpadded
from .detail import Details
from .law.graph import LOGITS
from .law.precision import FLOAT32, Precision
from .options import USUAL_BUDGET, Options
from .report.report import Report
from .sequences import judge_sequences, read_dump
from .top_logprobs import check_completions

LABEL = str(LOGITS)


@steady
def check(
    model: Model,
    tokens: Any,
    dump: Any,
    dialect: Dialect | str = EXACT,
    precision: Precision | str | None = None,
    *,
    bars: Bars = no_bars,
    details: Details | None = None,
    prefix: int = 0,
    budget: float = USUAL_BUDGET,
    strict: bool = False,
) -> Report:
    """Judge what another engine computed for these tokens, as `bitnet-np check` does: by limits that are measured on the model.

    tokens: ids [T], or [B, T] for several sequences, or a list of sequences of several lengths; or what a tokenizer gives, padded ids with
      what tells them from padding: {"input_ids": [B, T], "attention_mask": [B, T]}, or "lengths" [B].
    dump: one of

    * arrays by name, {"logits": ..., "l_out-3": ..., ...}: the names that files use, for tensors [T, width] or [B, T, width], or
      the rows of all sequences end to end; where lengths differ [B, T, width] has padding, behind all sequences or in front of all.
      Pairs ("l_out", 3), as `record` is called with, are names, too. So is what a model of transformers returned: its cache is left out;
    * an array of logits: [T, V] or [B, T, V], of the last position only [V] or [B, V];
    * a file or folder in any format of `read_any`, the saved answer of a server for the tokens as its prompt, or a Trace.

    Arrays, those of tokens too, may be NumPy's, torch's, MLX's or JAX's, or nested lists. dialect: the engine whose roundings are
    followed, or its name. precision: the types that the engine keeps numbers in, as a Precision or as text, "act=bf16,kv=q8_0"; None reads
    them off the dump, "exact" reads nothing off. bars: what is told how far the work is. details: collects an HTML report's numbers.
    prefix: the tokens of each sequence that the dump has no rows of, because the engine reused their keys and values; what it computed from
    them is judged. budget: seconds of computing that the search for causes may take, 0 for the verdict alone: notes say what was left out.
    strict: whether roundings that are not declared are wrong.

    Of several sequences the report is on the worst one, and names it: WRONG is worse than INVALID there. `report.sequences` has the report
    on each.

    Raises bitnet_np.Error for arguments that cannot be used: an unknown name, a shape of no tensor, tokens outside the vocabulary. Numbers
    never raise an error: NaN, or logits of another length, are INVALID.
    """
    check_model(model)
    function("bars", bars)
    if details is not None:
        instance("details", details, Details)
    runtime = Runtime(model, _dialect(dialect)).checked()  # a model's config is read from here on
    sequences = _sequences(model.config, tokens)
    if isinstance(precision, str):
        precision = FLOAT32 if precision == "exact" else Precision.parse(precision)
    elif not isinstance(precision, Precision | None):
        raise OptionError(f"precision is {shown(precision)}, expected a Precision, text such as act=bf16,kv=q8_0, or None")
    options = Options(precision, integer("prefix", prefix, 0), bars, details, budget, flag("strict", strict))
    if isinstance(dump, str | PathLike) and (name := detect(path := path_of(dump))) in COMPLETIONS:
        if len(sequences.ids) > 1:
            raise OptionError(f"{path}: format {name} holds one sequence, and there are {len(sequences.ids)} sequences of tokens")
        return check_completions(model, COMPLETIONS[name](path, sequences.ids[0]), runtime.dialect, options)
    content = content_of(dump, sequences, model.config, options.prefix)
    return judge_sequences(runtime, sequences, content, options)


def content_of(dump: Any, sequences: Tokens, config: Config, prefix: int = 0) -> Trace | Labelled:
    """What a dump holds that `check` takes: arrays, a file or folder, or a Trace. Raises as `check` does."""
    if isinstance(dump, Trace):
        return dump
    if isinstance(dump, str | PathLike):
        return read_dump(path_of(dump), sequences, config, prefix=prefix)
    arrays = _named(dump) if isinstance(dump, Mapping) else {LABEL: as_numpy("dump", dump)}
    entries = {label: Entry(array.shape, array.dtype, partial(np.asarray, array)) for label, array in arrays.items()}
    return Labelled(entries, Path("dump"), "arrays in memory")


def _sequences(config: Config, tokens: Any) -> Tokens:
    """Token ids [T] or [B, T], or sequences of several lengths, checked."""
    if isinstance(tokens, Mapping):
        tokens = unpadded("tokens", tokens)
    if isinstance(tokens, list | tuple) and len({_length(row) for row in tokens}) > 1:
        return check_tokens(config, *pad([as_numpy("tokens", row) for row in tokens]))
    array = as_numpy("tokens", tokens)
    ids = integers("tokens", array, 2 if array.ndim == 2 else 1, TokenRangeError)
    return check_tokens(config, ids if ids.ndim == 2 else ids[None])


def _length(row: Any) -> int | None:
    """Of a sequence, and None of a token, or of what is neither."""
    try:
        return len(row)
    except Exception:
        return None


def _dialect(dialect: Dialect | str) -> Dialect:
    if isinstance(dialect, Dialect):
        return dialect
    return DIALECTS[choice("dialect", dialect, DIALECTS)]


_NO_TENSORS = ("past_key_values", "cache_params", "loss", "aux_loss")
"""What a model's output has beside tensors of the forward pass."""


def _named(dump: Mapping[Any, Any]) -> dict[str, NDArray]:
    """The arrays of a dump by label; logits under our own name, whatever theirs is. A model's cache and loss are left out."""
    arrays: dict[str, NDArray] = {}
    for name, array in _items(dump):
        label = LABEL if name == "logits" or direct(name) == LOGITS else name
        if label in arrays:
            raise OptionError(f"dump has the keys {shown(list(dump))}, expected logits once")
        arrays[label] = as_numpy(f"dump[{shown(name)}]", array)
    return arrays


def _items(dump: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a mapping by label: of a tuple of arrays, such as hidden_states, each by its number."""
    for key, value in dump.items():
        name = str(Key(*key)) if _is_key(key) else key
        if not isinstance(name, str):
            raise OptionError(f"dump has the key {shown(key)}, expected names such as attn_norm-0, or pairs such as ('attn_norm', 0)")
        if value is None or name in _NO_TENSORS:
            continue
        if isinstance(value, tuple) and value and all(hasattr(item, "shape") for item in value):
            yield from ((f"{name}.{i}", item) for i, item in enumerate(value))
        else:
            yield name, value


def _is_key(key: Any) -> bool:
    """Whether a key is a name and a layer, as recorders (`record`) are given them."""
    return isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], int | np.integer | None)
