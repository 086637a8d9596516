"""Hypothesis strategies of small models and calls, drawn around the edges that inference engines have (extra `hypothesis`).

    from hypothesis import given
    from bitnet_np.testing import strategies

    @given(strategies.cases(families=["llama", "qwen2"]))
    def test_my_engine(case):
        model, tokens = strategies.model_of(case), strategies.tokens_of(case)
        ...

A case is numbers (space.Case), so it is quick to draw, and shrinks to the plainest: each field to its first value in space.EDGES.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ..base.errors import OptionError
from ..base.extras import extra
from ..base.validate import choice
from ..model.records import Model
from .space import CALL, EDGES, Case, case_like, fitted, model_of, tokens_of

__all__ = ["calls", "cases", "model_of", "models", "tokens_of"]


def _st() -> Any:
    return extra("hypothesis.strategies", "hypothesis", "bitnet_np.testing.strategies")


def cases(
    families: Collection[str] | None = None,
    weights: Collection[str] | None = None,
    like: Model | None = None,
    **values: Sequence[Any],
) -> Any:
    """A strategy of space.Case: a model and a call.

    families, weights: those to draw from, None: all. like: a model whose family, types and settings all cases have. values: of other fields
    of Case, in place of those in EDGES, the plainest first: `length=[1, 64, 65]`. Raises OptionError for a field or a family that is none,
    UnsupportedError without Hypothesis.
    """
    st, edges, kept = _st(), dict(EDGES), {}
    if like is not None:
        plain, edges = case_like(like)
        kept = {"family": plain.family}
    for name, given in {"family": families, "weights": weights, **values}.items():
        if given is not None:
            if name not in edges or not given:
                raise OptionError(f"{name} is {list(given)!r}, expected values of one of {', '.join(edges)}")
            if name in ("family", "weights"):
                for value in given:
                    choice(name, value, EDGES[name] if name == "family" else (*EDGES[name], "ternary"))
            edges[name] = tuple(given)
    drawn = st.fixed_dictionaries({name: st.sampled_from(options) for name, options in edges.items()})
    return drawn.map(lambda fields: fitted(Case(**fields | kept)))


def models(
    families: Collection[str] | None = None, weights: Collection[str] | None = None, like: Model | None = None, **values: Any
) -> Any:
    """A strategy of Models, as `cases` draws them, with the plainest call."""
    still = {name: [getattr(Case(), name)] for name in CALL}
    return cases(families, weights, like, **still | values).map(lambda case: model_of(case, like))


def calls(case: Case, **values: Sequence[Any]) -> Any:
    """A strategy of cases with the model of this one: one prefill, chunks, steps (a chunk of 1), batches, a reused prefix."""
    st = _st()
    drawn = st.fixed_dictionaries({name: st.sampled_from(values.get(name, EDGES[name])) for name in CALL})
    return drawn.map(lambda fields: fitted(replace(case, **fields)))
