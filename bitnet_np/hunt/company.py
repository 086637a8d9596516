"""Numbers that depend on the call: each run against the same tokens alone, by one prefill on one thread.

Both are the engine's, so its precision need not be known. How far its own roundings reach is taken from the error of the runs alone: in
other calls it may round elsewhere, but hardly more. Where a rounding may move a code of the model itself, it reaches farther.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.dialects import Dialect
from ..judge.law.products import has_blocks, reads_codes
from ..judge.measures import FLIPS_LIMIT, ROUNDING_LIMIT, Reach, across, limits, position_nmse
from ..model.records import Model
from ..testing.space import Case, tokens_of, with_fields
from .engine import Call
from .outcome import Outcome
from .run import Runner

_ALONE = {"batch": 1, "ragged": False, "chunk": 0, "prefix": 0, "threads": 1}
_SEEDS = 3  # models and tokens in which a difference has to show, so that none is by chance


class Compared(Runner):
    """Runs of another runner, each beside what the same tokens give alone."""

    def __init__(self, runs: Runner) -> None:
        self.runs, self.outcomes = runs, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["runs"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Compared, (self.runs,)

    def run(self, case: Case, engine: Any = None) -> Outcome:
        """Whether a case gives other numbers than its tokens alone, in each of some models."""
        if case not in self.outcomes:
            first, *more = (with_fields(case, {"seed": case.seed + n}) for n in range(_SEEDS))
            outcome = self.once(first)
            by_chance = outcome.failed and not all(self.once(other).failed for other in more)
            self.outcomes[case] = replace(outcome, kind="untold") if by_chance else outcome
        return self.outcomes[case]

    def once(self, case: Case) -> Outcome:
        """The same in one model."""
        if (plain := with_fields(case, _ALONE)) == case:
            return Outcome("ok")
        if case.experts > case.experts_used:  # another one of nearly equal experts is much
            return Outcome("untold")
        others = calls_alone(case)[1:]
        alone = [self.runs.run(plain), *(self.run_model(self.model(case), call, self.even(case)) for call in others)]
        return difference(self.runs.run(case), alone, self.model(case), self.judge.dialect)


def calls_alone(case: Case) -> list[Call]:
    """Each sequence of a case in one prefill, on one thread."""
    return [Call((ids,), 0, 1, 0) for ids in tokens_of(case)]


def difference(outcome: Outcome, alone: Sequence[Outcome], model: Model, dialect: Dialect) -> Outcome:
    """The outcome "call" where a run has other numbers than its sequences alone, by more than their own roundings explain; else "ok". It is
    "untold" where there are no numbers, or the run is wrong by the definition and those alone are not."""
    if any(not x.errors for x in (outcome, *alone)) or outcome.failed > all(x.failed for x in alone):
        return Outcome("untold")
    least = FLIPS_LIMIT * (reads_codes(model.layers[0].attn_q, dialect) or (dialect.ggml_activations and has_blocks(model)))
    bad, text, most = list[tuple[int, int]](), "", 1.0
    for b, ((first, theirs), one) in enumerate(zip(outcome.rows, alone, strict=True)):
        ours, at = one.rows[0][1][-len(theirs) :], first + np.arange(len(theirs))
        far, (limit, mean) = position_nmse(ours, theirs), _explained(one.errors[0], len(theirs))
        excess = np.maximum(far / np.maximum(limit, least), far.mean() / max(mean, least) * (far >= far.mean()))
        excess *= np.abs(theirs.astype(np.float64) - ours).max(axis=1) > ROUNDING_LIMIT * ours.std(axis=1)
        bad += [(b, int(p)) for p in at[excess > 1]]
        if excess.max() > most:
            most, p = float(excess.max()), int(excess.argmax())
            text = f"NMSE to the same tokens alone is {far[p]:.2g} at position {at[p]}, {most:.2g} times what roundings explain"
    return replace(outcome, kind="call" if bad else "ok", text=text, bad=tuple(bad))


def _explained(errors: NDArray, n: int) -> tuple[NDArray, float]:
    """The NMSE between two runs that roundings explain at each of the last n positions, and on average. errors: NMSE of one, [P]; the other
    one's may be as large."""
    both = np.maximum(2 * errors, np.finfo(float).tiny)
    _, reach = across(both, Reach(float(both.mean()), both))
    return limits(replace(reach, positions=both[-n:]), n)
