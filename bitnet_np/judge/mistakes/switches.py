"""Settings of a model or a dialect that an engine has otherwise: factors and caps that it does not apply, roundings of another dialect."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ...engine.dialects import DIALECTS
from ..graph import LOGITS, SCALED
from ..variant import Variant
from .edited import named, numbered
from .mistake import Engines, Numbers, Site


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


def _by_width(site: Site) -> Iterator[tuple[Numbers, float]]:
    if site.config.attention_scale is not None:
        yield {"value": site.config.attention_scale}, site.config.head_dim**-0.5


_AT_ATTENTION = ("kq", "kqv_out")
_OWN_SCALE = "scores are multiplied by 1/sqrt(K) instead of {value:.4g}"
MISTAKES = (
    *named(
        "switch",
        (LOGITS.name, SCALED.name, "ffn_inp", "l_out"),
        ("logit_scale", "left_out: the logit scale is not divided out", ""),
        ("embedding_scale", "left_out: the embedding scale is left out", ""),
        ("residual_scale", "left_out: the residual scale is left out", ""),
        likely=True,
    ),
    *named("switch", (LOGITS.name,), ("logit_cap", "left_out: tanh is left out", "logits are not capped"), likely=True),
    *named("switch", _AT_ATTENTION, ("score_cap", "left_out: tanh is left out", "scores are not capped"), likely=True),
    *numbered("switch", _AT_ATTENTION, ("attention_scale", "the score scale", _OWN_SCALE, _by_width), likely=True),
)
