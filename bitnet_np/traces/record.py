"""Recording the intermediate tensors of one sequence into a file, each as soon as it is computed; and traces written to files."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import spec
from ..base.errors import OptionError, meant, shown
from ..base.validate import flag, integer, items_of
from ..engine.backend import Backend
from ..engine.dialects import EXACT, Dialect
from ..engine.forward_pass import run_whole
from ..engine.network import Runtime
from ..engine.tokens import check_tokens
from ..kernels import cpu
from ..kernels.float_state import steady
from ..model.records import Model
from .arrays import as_numpy
from .formats import writer as writer_for
from .points import LAYER_NAMES, POOLED, RECORDED, SCORES, Key, Trace

Floats = NDArray[np.float32]
NAMES = (*RECORDED, *SCORES)
"""The points that a recorder can record."""


class Recorder:
    """An observer (`record`) of a forward pass over one sequence: passes each chosen point, in normal form, to `add` at once.

    layers: the layers to record, None for all; points outside layers are recorded either way. names: the points to record, None for all
    but the scores. scores: record `kq` and `kq_soft_max` too. It stores nothing but the queries of a layer until its keys come.
    """

    def __init__(
        self,
        add: Callable[[Key, NDArray], None],
        runtime: Runtime,
        *,
        layers: Iterable[int] | None = None,
        names: Iterable[str] | None = None,
        scores: bool = False,
    ) -> None:
        self._add, self._runtime, config = add, runtime, runtime.model.config
        chosen = _items("layers", layers, range(config.n_layers))
        self.layers = frozenset(integer("layer", layer, 0, config.n_layers - 1) for layer in chosen)
        self.names = _checked_names([*_items("names", names, RECORDED), *(SCORES if flag("scores", scores) else ())])
        if not self.layers and self.names <= set(LAYER_NAMES):
            raise OptionError("no point is left to record: no layer is chosen, and none of the names is the whole model's")
        if not self.names:
            raise OptionError(f"no point is left to record: no name is chosen, expected some of {', '.join(NAMES)}")
        self._queries: Floats | None = None

    def __call__(self, name: str, layer: int | None, array: NDArray) -> None:
        if layer is not None and layer not in self.layers:
            return
        if name in self.names:
            self._add(Key(name, layer), array if array.ndim < 3 else array.reshape(len(array), -1))
        if self.names.isdisjoint(SCORES):
            return
        c, dialect, ops = self._runtime.model.config, self._runtime.dialect, self._runtime.ops
        suffix = "_rope" if layer is not None and c.rotates(layer) else ""
        heads = len(array), -1, c.head_dim
        if name == "Qcur" + suffix:
            self._queries = dialect.rounded(array, ops).reshape(heads)
        elif name == "Kcur" + suffix and self._queries is not None:
            keys = dialect.cached(array.reshape(heads), ops)
            for scored, values in scores(self._queries, keys, self.names, c.window_of(layer or 0), c.attention_scale, c.score_cap):
                self._add(Key(scored, layer), values)
            self._queries = None


def _items(what: str, values: Iterable[Any] | None, default: Iterable[Any]) -> Iterable[Any]:
    """The values that are given, or the default. Raises OptionError for what is no iterable, or a text."""
    if isinstance(values, str) or not isinstance(values, Iterable | None):
        raise OptionError(f"{what} is {shown(values)}, expected an iterable of them")
    return default if values is None else items_of(what, values)


def _checked_names(names: Iterable[Any]) -> frozenset[str]:
    """Names of points. Raises OptionError for one that is none."""
    chosen = list(names)
    for name in chosen:
        if not isinstance(name, str) or name not in NAMES:
            near = meant(name, NAMES) if isinstance(name, str) else ""
            raise OptionError(f"no point is named {shown(name)}" + (near or f", expected some of {', '.join(NAMES)}"))
    return frozenset(chosen)


def scores(
    q: Floats,
    k: Floats,
    names: Iterable[str] = SCORES,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Iterator[tuple[str, Floats]]:
    """Yields attention scores and their softmax over the visible keys, by name: [T, H, K], [T, G, K] -> [H, T, T].

    scale, cap: as in spec.attend.

    Each is computed in float64, head by head, and rounded to float32 once. Both are 0 where a query does not see a key.
    """
    length, heads, width = q.shape
    mask = spec.causal_mask(length, length, window=window)
    for name in (name for name in SCORES if name in names):
        out = np.empty((heads, length, length), np.float32)
        for head in range(heads):
            keys = k[:, head // (heads // k.shape[1])].astype(np.float64)
            products = q[:, head].astype(np.float64) @ keys.T
            values = spec.soft_cap(products / np.sqrt(width) if scale is None else products * scale, cap)
            out[head] = np.where(mask == 0, spec.softmax(values + mask) if name == "kq_soft_max" else values, 0)
        yield name, out


@steady
def record_trace(
    model: Model,
    tokens: ArrayLike,
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    layers: Iterable[int] | None = None,
    names: Iterable[str] | None = None,
    scores: bool = False,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
) -> dict[Key, tuple[tuple[int, ...], int]]:
    """Run `forward_full` on one sequence, tokens [T] or [1, T], and write its points to `out`; returns each point's shape and bytes.

    format: a name of formats.FORMATS, by default chosen by the ending of `out`. layers, names, scores: see Recorder; if a format cannot
    hold all points, the default is those it can. Takes the memory of the forward pass and of one point.

    Raises what `forward_full` raises, and OptionError for a point, layer or format that does not exist. Then no file is left.
    """
    runtime, ids = Runtime(model, dialect, ops).checked(), as_numpy("tokens", tokens)
    checked = check_tokens(model.config, ids[None] if ids.ndim == 1 and ids.size else ids)
    if len(checked.ids) != 1:
        raise OptionError(f"tokens are {len(checked.ids)} sequences, a trace is of one")
    chosen, output = writer_for(out, format)
    if names is None and output.names is not None:
        names = output.names - (set() if scores else set(SCORES))
    with output(out, checked.ids[0]) as writer:
        recorder = Recorder(writer.add, runtime, layers=layers, names=names, scores=scores)
        if output.names is not None and recorder.names - output.names:
            missing = ", ".join(sorted(recorder.names - output.names))
            raise OptionError(f"{out}: format {chosen} has no {missing}, only {', '.join(sorted(output.names))}")
        run_whole(replace(runtime, record=recorder), checked, last_only=recorder.names.isdisjoint(("result_norm", POOLED, "result_output")))
    return writer.written


@steady
def write_trace(
    trace: Trace, out: str | os.PathLike[str], *, tokens: ArrayLike | None = None, format: str | None = None
) -> dict[Key, tuple[tuple[int, ...], int]]:
    """Write the points of a trace to `out`, one after another; returns each point's shape and bytes.

    tokens: [T], by default the trace's. format: a name of formats.FORMATS, by default chosen by the ending of `out`. Raises
    OptionError for a format that does not exist or cannot hold a point. Then no file is left.
    """
    _, output = writer_for(out, format)
    with output(out, trace.tokens if tokens is None else tokens) as writer:
        for key, array in trace.points.items():
            writer.add(key, array)
    return writer.written
