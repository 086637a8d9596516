"""An engine's arrays judged as they are in memory, or its dump in a file: `bitnet_np.check`, with the limits that the command measures."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..base.errors import OptionError, ShapeError, TokenRangeError, shown
from ..base.progress import Bars, no_bars
from ..base.validate import instance, integers
from ..engine.dialects import DIALECTS, EXACT, Dialect
from ..engine.network import Runtime
from ..engine.tokens import Tokens, check_tokens
from ..model.records import Config, Model
from ..traces.arrays import as_numpy
from ..traces.formats import read_any
from ..traces.formats.arrays import Header, collect
from ..traces.formats.labels import direct
from ..traces.points import Trace
from .detail import Details
from .dump import judge_batch, judge_dump
from .graph import LOGITS
from .precision import FLOAT32, Precision
from .report import Report

LABEL = str(LOGITS)


def check(
    model: Model,
    tokens: Any,
    dump: Any,
    dialect: Dialect | str = EXACT,
    precision: Precision | str | None = None,
    *,
    bars: Bars = no_bars,
    details: Details | None = None,
) -> Report:
    """Judge what another engine computed for these tokens, as `bitnet-np check` does: by limits that are measured on the model.

    tokens: ids [T], or [B, T] for several sequences of one length.
    dump: one of

    * arrays by name, {"logits": ..., "l_out-3": ..., ...}: the names that files use, for tensors [T, width] or [B, T, width];
    * an array of logits: [T, V] or [B, T, V], of the last position only [V] or [B, V];
    * a file or folder in any format of `read_any`, or a Trace.

    Arrays, those of tokens too, may be NumPy's, torch's, MLX's or JAX's, or nested lists. dialect: the engine whose roundings are
    followed, or its name. precision: the types that the engine keeps numbers in, as a Precision or as text, "act=bf16,kv=q8_0"; None reads
    them off the dump, "exact" reads nothing off. bars: what is told how far the work is. details: collects an HTML report's numbers.

    Of several sequences with intermediate tensors the report is on the worst sequence, and names it.

    Raises bitnet_np.Error for arguments that cannot be used: an unknown name, a shape of no tensor, tokens outside the vocabulary. Numbers
    never raise an error: NaN, or logits of another length, are INVALID.
    """
    model = instance("model", model, Model)
    tokens = check_tokens(model.config, _sequences(tokens))
    runtime, precision = Runtime(model, _dialect(dialect)), _precision(precision)
    if isinstance(dump, Trace | str | PathLike):
        if len(tokens.ids) > 1:
            raise ShapeError(f"tokens has shape {list(tokens.ids.shape)}, expected one sequence with a dump in a file")
        trace = dump if isinstance(dump, Trace) else read_any(dump, tokens=tokens.ids[0], config=model.config)
        return judge_dump(runtime.checked(), tokens, trace, bars, details, precision)
    arrays = _named(dump) if isinstance(dump, Mapping) else {LABEL: as_numpy("dump", dump)}
    if len(tokens.ids) == 1:
        return judge_dump(runtime.checked(), tokens, _trace(arrays, tokens.ids[0], model.config), bars, details, precision)
    if list(arrays) == [LABEL]:
        logits = arrays[LABEL]
        last_only = logits.ndim == 2 or (logits.ndim == 3 and logits.shape[1] == 1 < tokens.ids.shape[1])
        theirs = logits[:, 0] if last_only and logits.ndim == 3 else logits
        return judge_batch(runtime.checked(), tokens, theirs, False, last_only, bars, details, precision)
    return _each_sequence(runtime, tokens.ids, arrays, bars, details, precision)


def _sequences(tokens: Any) -> NDArray:
    """Token ids [T] or [B, T] as [B, T]."""
    array = as_numpy("tokens", tokens)
    ids = integers("tokens", array, 2 if array.ndim == 2 else 1, TokenRangeError)
    return ids if ids.ndim == 2 else ids[None]


def _dialect(dialect: Dialect | str) -> Dialect:
    if isinstance(dialect, Dialect):
        return dialect
    if not isinstance(dialect, str) or dialect not in DIALECTS:
        raise OptionError(f"dialect is {shown(dialect)}, expected a Dialect or one of {', '.join(DIALECTS)}")
    return DIALECTS[dialect]


def _precision(precision: Precision | str | None) -> Precision | None:
    if precision is None or isinstance(precision, Precision):
        return precision
    if not isinstance(precision, str):
        raise OptionError(f"precision is {shown(precision)}, expected a Precision, text such as act=bf16,kv=q8_0, or None")
    return FLOAT32 if precision == "exact" else Precision.parse(precision)


def _named(dump: Mapping[Any, Any]) -> dict[str, NDArray]:
    """The arrays of a dump by label; logits under our own name, whatever theirs is."""
    arrays: dict[str, NDArray] = {}
    for name, array in dump.items():
        if not isinstance(name, str):
            raise OptionError(f"dump has the key {shown(name)}, expected names such as attn_norm-0")
        label = LABEL if name == "logits" or direct(name) == LOGITS else name
        if label in arrays:
            raise OptionError(f"dump has the keys {shown(list(dump))}, expected logits once")
        arrays[label] = as_numpy(f"dump[{shown(name)}]", array)
    return arrays


def _trace(arrays: Mapping[str, NDArray], ids: NDArray, config: Config) -> Trace:
    """The trace of one sequence's arrays. `tokens` among them are compared with ids."""
    entries = {label: (Header(array.shape, array.dtype, False, 0), partial(_same, array)) for label, array in arrays.items()}
    return collect(entries, Path("dump"), "arrays in memory", None if "tokens" in arrays else ids, config)


def _same(array: NDArray) -> NDArray:
    return array


def _each_sequence(
    runtime: Runtime,
    ids: NDArray,
    arrays: Mapping[str, NDArray],
    bars: Bars,
    details: Details | None,
    precision: Precision | None,
) -> Report:
    """The report on the worst of several sequences, [B, ...] each."""
    for label, array in arrays.items():
        if array.ndim < 2 or len(array) != len(ids):
            raise ShapeError(f"dump[{shown(label)}] has shape {list(array.shape)}, expected {len(ids)} sequences: [B, T, width]")
    runtime.checked()
    every = [details and Details() for _ in ids]
    traces = (_trace({label: array[b] for label, array in arrays.items()}, row, runtime.model.config) for b, row in enumerate(ids))
    reports = [
        judge_dump(runtime, Tokens.whole(row[None]), trace, bars, some, precision)
        for row, trace, some in zip(ids, traces, every, strict=True)
    ]
    worst = max(range(len(ids)), key=lambda b: reports[b].verdict)
    if details is not None and (collected := every[worst]) is not None:
        details.take(collected)
    verdicts = ", ".join(report.verdict.name for report in reports)
    report = reports[worst]
    return replace(report, reason=f"sequence {worst} of {len(ids)}: {report.reason}", notes=(*report.notes, f"by sequence: {verdicts}"))
