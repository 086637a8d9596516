"""A server's log-probabilities, of the few most probable tokens of each position, judged by the model.

The limits are measured as for logits alone (logits_alone.py), on the numbers at hand: the same ids of the same positions, of our own engine
with other roundings. Log-probabilities are absolute, so what is common to all logits of a position cannot be seen, and need not be: it
changes no probability. An error of the tokens that are not listed shows only in so far as it moves the normaliser, or puts one among the
listed. Logits in a file are judged alike, without a normaliser.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..engine.dialects import EXACT, Dialect
from ..engine.forward_pass import compute_logits
from ..engine.tokens import check_tokens
from ..model.records import Model
from ..servers.completions import Completions, TopLogprobs
from .dump import log_softmax
from .logits_alone import judge_logits
from .measures import FLIPS_LIMIT, Judgement
from .options import DEFAULT, Options
from .report.report import Report
from .variant import Floats, Variant, variant_logits
from .verdict import Verdict

LEAST = -80.0
"""Log-probabilities below are left out: e^-87 is float32's smallest normal number, and servers send any number for less."""

FEWEST = 5
"""Log-probabilities that a position needs to be judged: two of two numbers that are near each other by chance are no measure."""

_MOST_POSITIONS = 64  # to try mistakes on: each mistake is a forward pass
_ENOUGH = 64  # fewest numbers, of at least 4 positions, to tell a mistake by
_FEW = 10  # by k: NMSE of k numbers varies more than that of a vocabulary, measured on 30 random models with k of 2 to 20
_SUM = 1e-3  # by which a sum of probabilities may exceed 1: float16 probabilities do by less
_TIE = 1e-4  # part of a log-probability by which a server's own greedy choice may be below its largest: two ways to compute one number
_OUTLIER = 4  # standard deviations of the largest error allowed, for the one largest of all ids that are not listed


def check_completions(
    model: Model, completions: Completions, dialect: Dialect = EXACT, options: Options = DEFAULT, search: bool = True
) -> Report:
    """The report on a server's completion, or on the logits of a file. options, search: see judge_logits.

    Nothing that the server sent raises an error but token ids outside of the vocabulary or beyond the context (TokenRangeError,
    ContextLimitError).
    """
    likely = [(row, ~(row.logprobs < (-np.inf if completions.logits else LEAST))) for row in completions.top]  # NaN stays
    normalised: Callable[[Floats], Floats] = np.asarray if completions.logits else log_softmax
    rows = [replace(row, ids=row.ids[kept], logprobs=row.logprobs[kept]) for row, kept in likely if kept.sum() >= FEWEST]
    check_tokens(model.config, completions.tokens[None])
    problem = _invalid(completions, rows, model.config.vocab)
    if problem:
        return Report.of_logits(Judgement(Verdict.INVALID, problem), completions.notes)
    positions, widest = np.array([row.position for row in rows]), max(len(row.ids) for row in rows)
    # as a rectangle [P, K]: where a position lists fewer, the rest is filled with our mean, which is no error in any run, and no spread
    ids, theirs = (np.stack([np.pad(getattr(row, name), (0, widest - len(row.ids))) for row in rows]) for name in ("ids", "logprobs"))
    present = np.arange(widest) < np.array([[len(row.ids)] for row in rows])
    end = int(positions[-1]) + 1
    ours = normalised(compute_logits(model, completions.tokens[None, :end], dialect=dialect)[0][positions])
    listed = np.take_along_axis(ours, ids, axis=1)
    mean = np.mean(listed, axis=1, where=present)

    def filled(values: NDArray) -> Floats:
        return np.where(present[: len(values)], values, mean[: len(values), None]).astype(np.float32)

    a, b, few = filled(listed), filled(theirs), positions[:_MOST_POSITIONS]

    def run(variant: Variant) -> Floats:
        logits = variant_logits(variant, completions.tokens[None, : int(few[-1]) + 1])[0][few]
        return filled(np.take_along_axis(normalised(logits), ids[: len(few)], axis=1))

    search = search and len(rows) >= 4 and int(present.sum()) >= _ENOUGH
    base = Variant("ours", model, dialect)
    judged = judge_logits(a, b, base, run, options, search, positions, slack=1 + _FEW / a.shape[1])
    if judged.verdict != Verdict.INVALID:
        judged = replace(judged, compared=tuple(int(position) for position in positions))
        affine = _affine(a, b, judged, completions.logits) if judged.verdict == Verdict.WRONG and judged.explanation is None else None
        if affine is not None:
            judged = replace(judged, reason=f"{affine}; {judged.reason}", explanation=affine)
        faults = [_not_greedy(completions, rows), _not_listed(completions, rows, ours, judged) if judged.verdict < Verdict.WRONG else None]
        if wrong := [fault for fault in faults if fault is not None]:
            judged = replace(judged, verdict=Verdict.WRONG, reason="; ".join([*wrong, judged.reason]))
    numbers = "logits" if completions.logits else "log-probabilities"
    what = f"{int(present.sum())} {numbers} of positions {positions[0]} to {positions[-1]}"
    note = f"{what} are judged, the most probable at each; all other tokens must not be more probable"
    return Report.of_logits(judged, (*completions.notes, note))


def _invalid(completions: Completions, rows: list[TopLogprobs], vocab: int) -> str:
    """Why nothing can be compared, or an empty string."""
    what = "logit" if completions.logits else "log-probability"
    if not rows:
        return f"there is no position with {FEWEST} numbers, of log-probabilities above {LEAST:g}"
    for before, row in zip([None, *rows], rows, strict=False):
        where = f"at position {row.position}"
        bad = np.flatnonzero(~np.isfinite(row.logprobs))
        if bad.size:
            return f"{where} their {what} of token {row.ids[bad[0]]} is {row.logprobs[bad[0]]}"
        if int(row.ids.max()) >= vocab:
            return f"{where} they have token {row.ids.max()}, which is not an id of the vocabulary, 0..{vocab - 1}: is it another model?"
        if row.logprobs[0] > _SUM and not completions.logits:
            return f"{where} their log-probability of token {row.ids[0]} is {row.logprobs[0]:.4g}, expected at most 0: are these logits?"
        if not completions.logits and (total := float(np.exp(row.logprobs).sum())) > 1 + _SUM:
            return f"{where} their probabilities sum to {total:.4g}, expected at most 1: what logarithm is this?"
        if row.logprobs[0] == row.logprobs[-1]:
            return f"{where} the {len(row.ids)} largest are all {row.logprobs[0]:.4g}"
        same = before is not None and np.array_equal(before.ids, row.ids) and np.array_equal(before.logprobs, row.logprobs)
        if same and completions.tokens[row.position] != completions.tokens[row.position - 1]:
            return f"positions {row.position - 1} and {row.position} have the same numbers"
    return ""


def _not_greedy(completions: Completions, rows: list[TopLogprobs]) -> str | None:
    """The first token that the server chose against its own numbers."""
    for row in rows:
        follows = row.position + 1
        if completions.prompt <= follows < len(completions.tokens):
            chosen, best = int(completions.tokens[follows]), float(row.logprobs[0])
            own = row.logprobs[row.ids == chosen]
            if not own.size or own[0] < best - _TIE * max(1.0, abs(best)):
                return (
                    f"after position {row.position} the server chose token {chosen}, but by its own numbers token {row.ids[0]} is the "
                    "most probable: temperature 0 was not obeyed, or a penalty or bias is on"
                )
    return None


def _not_listed(completions: Completions, rows: list[TopLogprobs], ours: Floats, judged: Judgement) -> str | None:
    """The first token that is not listed though it is more probable than one that is, by more than roundings explain."""
    nmse, what = FLIPS_LIMIT if judged.reach is None else 5 * judged.reach, "logit" if completions.logits else "log-probability"
    for row, true in zip(rows, ours, strict=True):
        others = true.copy()
        others[row.ids] = -np.inf
        missing, least = int(others.argmax()), row.logprobs[min(completions.k, len(row.ids)) - 1]
        if others[missing] - least > _OUTLIER * float(np.sqrt(nmse)) * float(true[row.ids].std()):
            return (
                f"at position {row.position} token {missing} is not listed, though its {what} is {others[missing]:.4g} and "
                f"one of {least:.4g} is listed"
            )
    return None


def _affine(a: Floats, b: Floats, judged: Judgement, logits: bool) -> str | None:
    """What to call errors that a factor and a constant at each position explain; None if they do not, or are fitted to too few numbers."""
    if a.shape[1] < 8:
        return None
    x, y = a.astype(np.float64), b.astype(np.float64)
    error = ((y - x) ** 2).mean()
    x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    variance = np.maximum((x**2).mean(axis=1), 1e-300)
    factor = (x * y).mean(axis=1) / variance
    left = ((y - factor[:, None] * x) ** 2).mean(axis=1)
    if (left > 5 * (judged.reach or FLIPS_LIMIT) * variance).any() or left.mean() > error / 100 or factor.min() <= 0:
        return None
    if np.abs(factor - 1).max() > 0.02:
        middle = float(np.median(factor))
        alike = factor.max() / factor.min() < 1.1
        return f"logits are {middle:.4g} times ours, as with a temperature of {1 / middle:.3g}" if alike else None
    if logits:
        return "correct apart from a constant at each position"
    sums = [np.exp(values.astype(np.float64)).sum(axis=1) for values in (a, b)]
    over = "only the listed tokens" if np.abs(sums[1] - 1).max() < _SUM < 1 - sums[0].min() else "other numbers than all logits"
    return f"correct apart from a constant at each position: the probabilities are normalised over {over}"
