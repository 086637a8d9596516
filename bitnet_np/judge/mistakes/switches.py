"""Settings of a model or a dialect that an engine has otherwise: factors and caps that it does not apply, roundings of another dialect."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...engine.dialects import DIALECTS
from ..graph import LOGITS, SCALED
from ..variant import Variant
from .mistake import Engines, Mistake


def other_dialects(field: str, words: Mapping[bool, str] | None = None, kind: str = "") -> Callable[[Variant], Engines]:
    """Engines with the setting of another dialect. words: what is said of it, by its value. kind: the type that it rounds to."""

    def engine(base: Variant) -> Engines:
        for dialect in DIALECTS.values():
            value = getattr(dialect, field)
            if value != getattr(base.dialect, field):
                how = "" if words is None else words[value]
                numbers = {"name": dialect.name, "how": how, "kind": kind if value else ""}
                yield numbers, replace(base, dialect=replace(base.dialect, **{field: value}))

    return engine


def _missing(field: str, text: str, at: tuple[str, ...], without: Any) -> Mistake:
    """A model's setting that is left out. without: the value of the setting in models that have none."""

    def engine(base: Variant) -> Engines:
        value = getattr(base.model.config, field)
        if value != without:
            yield {"value": value}, base.with_config(**{field: without})

    return Mistake(f"switch.{field}", text, at, engine=engine)


MISTAKES = (
    _missing("logit_cap", "logits are not capped at {value:.4g}", (LOGITS.name,), None),
    _missing("logit_scale", "logits are not divided by {value:.4g}", (LOGITS.name,), 1.0),
    _missing("embedding_scale", "embeddings are not multiplied by {value:.4g}", (SCALED.name,), 1.0),
    _missing("residual_scale", "outputs of branches are not multiplied by {value:.4g} before they are added", ("ffn_inp", "l_out"), 1.0),
    _missing("score_cap", "scores are not capped at {value:.4g}", ("kq", "kqv_out"), None),
    _missing("attention_scale", "scores are multiplied by 1/sqrt(K) instead of {value:.4g}", ("kq", "kqv_out"), None),
)
