"""Several sequences: each is judged by itself, and one report holds the reports of all."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..base.blas import one_thread
from ..base.errors import OptionError, ShapeError
from ..engine.forward_pass import run_whole
from ..engine.network import Runtime
from ..engine.tokens import Tokens
from ..model.records import Config
from ..traces.formats import FORMATS, detect, read_any, read_arrays
from ..traces.formats.arrays import Batch, Labelled
from ..traces.points import Entry, Key, Points, Trace
from .detail import Details
from .dump import LOG_PROBS, has_logits, judge_dump
from .law.graph import LOGITS
from .law.precision import storage_type, to_float_type
from .options import DEFAULT, Options
from .report.report import Report
from .verdict import Verdict

_SMALL = 10**8  # multiply-adds, some milliseconds: threads of products that small wait longer than they multiply


def read_dump(path: Path, tokens: Tokens, config: Config, format: str | None = None, prefix: int = 0) -> Trace | Labelled:
    """What a file or folder holds of these sequences, behind a prefix. Raises what `read_any` does, and OptionError."""
    format = format or detect(path)
    shape = (-1, config.vocab) if format in FORMATS and FORMATS[format].needs == "shape" else None
    if len(tokens.ids) == 1:
        return read_any(path, format, shape, behind(tokens, prefix).ids[0], config)
    return read_arrays(path, format, shape)


def judge_sequences(
    runtime: Runtime, tokens: Tokens, dump: Trace | Labelled, options: Options = DEFAULT, last: bool = False, search: bool = True
) -> Report:
    """The report on a dump of the sequences in `tokens`, for a checked runtime.

    last: the dump holds logits of the last position of each, and nothing else. search: try known mistakes. options.details collects the
    numbers of the sequence that the report is on. Raises ShapeError for a Trace, which holds one sequence, of several.
    """
    sequences, prefix = [Tokens.whole(ids[None, :n]) for ids, n in zip(*tokens, strict=True)], options.prefix
    later = behind(tokens, prefix)
    if isinstance(dump, Trace) and len(sequences) > 1:
        raise ShapeError(f"the dump is a Trace, which holds one sequence, and there are {len(sequences)} sequences of tokens")
    notes: tuple[str, ...] = ()
    if isinstance(dump, Trace):
        traces = [with_prefix(runtime, sequences[0], dump, prefix)]
    elif len(sequences) == 1:
        traces = [_trace(runtime, sequences[0], dump, prefix)]
    else:
        batch = Batch(dump, tuple(map(int, later.lengths)))
        if problem := batch.misfit():
            return Report(Verdict.INVALID, problem)
        if batch.padded():
            batch = replace(batch, left=_is_left(runtime, sequences, batch, prefix))
            notes = (f"padding is taken to be {'in front of' if batch.left else 'behind'} the tokens of a sequence, and is not judged",)
        traces = [_trace(runtime, one, batch.sequence(b), prefix) for b, one in enumerate(sequences)]
    if last:
        traces = [replace(trace, positions=np.array([one.ids.size - 1])) for one, trace in zip(sequences, traces, strict=True)]
    options = replace(options, budget=options.budget / len(sequences))
    every = [options.details and Details() for _ in sequences]
    c = runtime.model.config
    work = max(one.ids.size for one in sequences) * c.width * max(c.ffn, c.vocab)  # multiply-adds of the largest product
    with one_thread() if work <= _SMALL else nullcontext():
        mixed = _mixed(runtime, sequences, traces)
        reports = [
            judge_dump(runtime, one, trace, replace(options, details=some), search and b not in mixed)
            for b, (one, trace, some) in enumerate(zip(sequences, traces, every, strict=True))
        ]
    if prefix:
        note = f"the rows of the first {prefix} tokens are our own: the dump has none of them"
        reports = [replace(report, notes=(note, *report.notes)) for report in reports]
    for b, a in mixed.items():
        report, logits, cause = reports[b], reports[b].logits, f"it has the logits of sequence {a}"
        if logits is not None and logits.verdict == Verdict.WRONG:
            logits = replace(logits, reason=f"{cause}; {logits.reason}", explanation=cause)
            reports[b] = replace(report, reason=f"{cause}; {report.reason}", logits=logits)
    report = reports[0] if len(reports) == 1 else Report.of_sequences(reports, notes)
    if options.details is not None and (collected := every[report.sequence or 0]) is not None:
        vars(options.details).update(vars(collected))
    return report


def _trace(runtime: Runtime, tokens: Tokens, part: Labelled, prefix: int) -> Trace:
    """The trace of one sequence. Tokens that the dump holds are judged, too."""
    trace = part.trace(None if "tokens" in part.arrays else tokens.ids[0, prefix:], runtime.model.config)
    return with_prefix(runtime, tokens, trace, prefix)


def _is_left(runtime: Runtime, sequences: Sequence[Tokens], batch: Batch, prefix: int) -> bool:
    """Whether padding is in front of a sequence: whether more tensors of the shortest are nearer to ours when their last rows are taken."""
    b = min(range(len(sequences)), key=lambda b: sequences[b].ids.size)
    first, last = (_trace(runtime, sequences[b], replace(batch, left=left).sequence(b), prefix).points for left in (False, True))
    votes: list[bool] = []

    def look(name: str, layer: int | None, array: NDArray) -> None:
        key = Key(name, layer)
        if key in first and first[key].size == array.size:
            with np.errstate(all="ignore"):  # padding may be anything
                away, other = (np.square(points[key].reshape(array.shape) - array, dtype=np.float64).sum() for points in (first, last))
            if away != other:
                votes.append(bool(other < away or np.isnan(away)))

    run_whole(replace(runtime, record=look), sequences[b])
    return sum(votes) > len(votes) / 2


def _mixed(runtime: Runtime, sequences: Sequence[Tokens], traces: Sequence[Trace]) -> dict[int, int]:
    """The sequences that have the logits of another one -> that one."""
    some = [b for b, trace in enumerate(traces) if {LOGITS, LOG_PROBS} & trace.points.keys()]
    if len(sequences) == 1 or not some:
        return {}
    ours = [(tokens, run_whole(runtime, tokens)[0]) for tokens in sequences]
    with np.errstate(all="ignore"):  # numbers that cannot be compared are refused later
        wrong = [b for b in some if not has_logits(runtime, ours[b][0], traces[b], ours[b][1])]
        return {b: a for b in wrong for a, (tokens, logits) in enumerate(ours) if has_logits(runtime, tokens, traces[b], logits)}


# --- calls that go on from an earlier one: the engine had the keys and values of the first tokens, and computed only the rest -----------


def behind(tokens: Tokens, prefix: int) -> Tokens:
    """The tokens behind a prefix of each sequence. Raises OptionError where a sequence has none."""
    if prefix >= (shortest := int(tokens.lengths.min())):
        raise OptionError(f"prefix is {prefix}, expected less than {shortest}, the tokens of the shortest sequence")
    return Tokens(tokens.ids[:, prefix:], tokens.lengths - prefix)


def with_prefix(runtime: Runtime, tokens: Tokens, trace: Trace, prefix: int) -> Trace:
    """The trace of one sequence, with our rows of its first `prefix` tokens in front of each tensor that has the rows of all others.

    So its operations are judged by the dump's rows alone: ours are right, in the float type that theirs show. Logits without other
    tensors are those of the later positions.
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

    def stored(name: str, layer: int | None, array: NDArray) -> NDArray:
        kind = storage_type(points[key]) if (key := Key(name, layer)) in later else "float32"
        return to_float_type(array, kind)

    run_whole(replace(runtime, record=keep, edit=stored), Tokens.whole(tokens.ids[:, :prefix]))

    def joined(key: Key) -> NDArray:
        theirs = points[key]
        return np.concatenate([first[key].astype(theirs.dtype), theirs]) if key in first else theirs

    rows = {key: (shape[0] + prefix * (key in first), *shape[1:]) for key, shape in shapes.items()}
    return replace(trace, points=Points({key: Entry(rows[key], points[key].dtype, partial(joined, key)) for key in points}))
