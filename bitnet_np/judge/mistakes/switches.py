"""Factors and caps of a model that an engine does not apply."""

from dataclasses import replace
from typing import Any

from ..graph import LOGITS, SCALED, operations
from .mistake import Computes, Mistake, Site


def _missing(field: str, text: str, at: tuple[str, ...], without: Any) -> Mistake:
    """A model's setting that is left out. without: the value of the setting in models that have none."""

    def at_operation(site: Site) -> Computes:
        value = getattr(site.config, field)
        if value != without:
            plain = replace(site.model, config=replace(site.config, **{field: without}))
            scores = () if site.operation.key.layer is None else (site.index,)
            others = {o.key: o.evaluate for o in operations(plain, site.dialect, scores=scores)}
            evaluate = others.get(site.operation.key)  # None: a model without the setting has no such operation
            yield {"value": value}, site.of(lambda *inputs: inputs[0] if evaluate is None else evaluate(*inputs).value)

    return Mistake(f"switch.{field}", text, at, compute=at_operation, everywhere="")


MISTAKES = (
    _missing("logit_cap", "logits are not capped at {value:.4g}", (LOGITS.name,), None),
    _missing("logit_scale", "logits are not divided by {value:.4g}", (LOGITS.name,), 1.0),
    _missing("embedding_scale", "embeddings are not multiplied by {value:.4g}", (SCALED.name,), 1.0),
    _missing("residual_scale", "outputs of branches are not multiplied by {value:.4g} before they are added", ("ffn_inp", "l_out"), 1.0),
    _missing("score_cap", "scores are not capped at {value:.4g}", ("kq", "kqv_out"), None),
    _missing("attention_scale", "scores are multiplied by 1/sqrt(K) instead of {value:.4g}", ("kq", "kqv_out"), None),
)
