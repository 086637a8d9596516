"""The table of known mistakes: edits of the definition that have names, engines, and all other edits by their kind.

The list comes from defects that engines have had: their issue trackers, and what their authors ask an oracle to find. Traces, logits alone,
the table in docs/mistakes.md and scripts/mutations.py read it from here.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ...traces.points import FIELDS, LAYER_NAMES, MAY_BE_QUANTIZED, TOP_EXPERTS
from ..edits import kinds
from ..edits.kinds import NORMING, ROPE
from ..edits.quantisers import QUANTISERS
from ..hypothesis import Hypothesis
from ..law.graph import EMBEDDING, HEAD_NORMS, LOGITS, NORM, OF_EXPERTS, POOLED, POSITIONS, SCALED, Operation
from . import engines
from .mistake import Mistake

_OF_LAYERS = tuple(name for name in LAYER_NAMES if name != TOP_EXPERTS)  # whose numbers no edit gives
_EVERY = (EMBEDDING.name, POSITIONS.name, SCALED.name, *_OF_LAYERS, *(f"{name}_in" for name in FIELDS), NORM.name, LOGITS.name)
_HEAD, _ATTENTION, _SUMS = (LOGITS.name,), ("kqv_out",), ("ffn_inp", "l_out")
SHARED = {"every norm": NORMING, "RoPE": ROPE}
"""Functions that operations of several names share."""
_INPUTS = ("Qcur", "Kcur", "Vcur"), ("ffn_gate", "ffn_up")
_NORMS_OF_BRANCHES = ("attn_norm", "ffn_norm"), ("attn_post_norm", "ffn_post_norm")
ROLES = (*_INPUTS, sum(_INPUTS, ()), ("Qcur", "Kcur"), ("attn_o_out", "ffn_down"), tuple(HEAD_NORMS), *_NORMS_OF_BRANCHES)
"""Products that one function may compute: those of one input, which a fused matrix gives, all that are split by their outputs between
ranks, and those that are split by their inputs. Norms of queries' and keys' heads, before both branches, and behind both."""


def _named(rows: dict[str, str], at: tuple[str, ...] = (*_EVERY, POOLED.name), **common: Any) -> Iterator[Mistake]:
    """Edits with names: id -> edit. common: see Mistake."""
    for id, edit in rows.items():
        yield Mistake(id, "", at, edit, **common)


def _dialect(name: str, at: tuple[str, ...], field: str, text: str, **how: tuple[str, str]) -> Mistake:
    """A setting of another dialect. how: see engines.other_dialects."""
    return Mistake(f"dialect.{name}", text, at, engine=partial(engines.other_dialects, field, how), fault=False)


_LIKELY = {
    "switch.logit_scale": "steps: missing the logit scale",
    "switch.embedding_scale": "steps: missing the embedding scale",
    "switch.residual_scale": "steps: missing the residual scale",
    "switch.logit_cap": "steps: missing the logits' capping",
    "switch.score_cap": "steps: missing the scores' capping",
    "switch.attention_scale": "usual_numbers",
    "bias.missing": "steps: missing the bias",
    "scale.missing": "steps: missing the weight scale",
    "scale.inverted": "steps: opposite the weight scale",
    "norm.weight_missing": "steps: missing the norm's weight",
    "norm.bias_missing": "steps: missing the norm's bias",
    "norm.missing": "whole",
    "rope.pairs": "turns",
    "rope.missing": "whole",
    "rope.backwards": "turns",
    "rope.unscaled": "steps: missing the position scale",
    "rope.magnitude": "steps: missing RoPE's magnitude",
    "rope.factors": "steps: missing the factors of the frequencies",
    "rope.base": "usual_numbers: the frequency base",
    "rope.scaled_local": "positions",
    "rope.other_layers": "another",
    "attention.unscaled": "steps: missing the score scale",
    "attention.divided_by_width": "steps: twice the score scale",
    "attention.no_window": "masks",
    "attention.other_layers": "another",
    "attention.heads_in_turn": "groups",
    "activation.swapped": "exchanged",
    "experts.not_normalised": "steps: missing the sum of the token's experts",
    "experts.not_softmax": "routers: *",
    "experts.unweighted": "steps: missing the weights of experts",
    "experts.shared_ungated": "steps: missing the gate",
    "table.positions": "steps: missing the rows of positions",
    "table.output_bias": "steps: missing the head's bias",
}
_NORMS = {
    "norm.epsilon": "usual_numbers: epsilon",
    "norm.epsilon_outside": "moved: root before epsilon",
    "norm.mean_not_subtracted": "steps: missing the mean",
    "norm.no_mean_no_bias": "whole",
    "norm.mean_subtracted": "centred",
    "norm.width_less_one": "other_function: sum of squares over the width less one instead of mean square",
}
OF_ROWS = frozenset(_NORMS)
"""The ids of mistakes in what a row has once: none is in some of its elements, and an operation has it in all rows."""
OF_HEADS = frozenset(("attention.heads_in_turn", "attention.groups", "edit.groups"))
"""The ids of mistakes in a rule for all heads: none is in some of them."""
_ANYWHERE = {
    "scale.other": "other_weight: the weight scale",
    "codes.unshifted": "codes: 0, +1, +2",
    "codes.layout": "codes",
    "weights.transposed": "order",
    "weights.others": "another",
    "norm.others": "another",
    "input.unnormed": "other_tensor",
    "norm.other_weight": "other_weight: the norm's weight",
    "norm.after_rope": "swapped",
    "rope.positions": "positions",
    "rope.fed_twice": "positions",
    "attention.mask": "masks",
    "attention.groups": "groups: *",
    "attention.transposed": "order",
    "attention.keys_values_swapped": "exchanged",
    "attention.last_only": "masks",
    "layers.skipped": "whole",
    "head.unnormed": "other_tensor",
    "layers.last_skipped": "other_tensor",
    "embedding.scaled": "whole",
}
_RESIDUALS = {
    "residual.missing": "steps: missing the residual",
    "residual.branch_missing": "steps: missing a tensor",
    "residual.normed": "other_tensor",
    "residual.subtracted": "steps: opposite the residual",
    "residual.branch_subtracted": "steps: opposite a tensor",
    "residual.twice": "steps: twice the residual",
    "residual.layer_input": "other_tensor",
}
_OF_WEIGHTS = {"weights.narrow": "narrow_weights: *", "weights.narrow_blocks": "fewer_bits", "weights.narrow_rows": "fewer_bits"}
_ROUNDINGS = {
    "rope.narrow_angles": "rounded: the angles",
    "rope.narrow_turns": "rounded: sines and cosines",
    "activation.narrow": "rounded",
    "activation.narrow_value": "rounded: the activation",
}
_CACHES = (
    *_named(dict.fromkeys(("cache.ggml", "cache.ggml_scaled", "cache.narrow", "cache.float16_scaled"), "stored"), fault=False),
    _dialect(
        "float16",
        _ATTENTION,
        "in_float16",
        "float16 roundings{how}",
        how=(" are not there: declare the dialect exact", ": declare the dialect bitnet.cpp (--as bitnet.cpp)"),
        kind=("", "float16"),
    ),
)
CACHE_ROUNDINGS = frozenset(mistake.id for mistake in _CACHES)
"""The ids of those that are the KV cache's type."""
_HEADS_INPUT = {
    "how": ("not rounded to float16: declare the dialect exact", "rounded to float16: declare the dialect bitnet.cpp (--as bitnet.cpp)")
}
_ANGLES = {"how": ("are not stepped in float32", "are stepped in float32, as ggml does")}
_DIALECTS = (
    _dialect("activations", tuple(FIELDS), "ggml_activations", "activations are rounded as in another dialect: declare {name}"),
    _dialect("angles", ROPE, "stepped_angles", "angles {how}: declare the dialect {name} (--as {name})", **_ANGLES),
    _dialect("head", _HEAD, "in_float16", "the head's input is {how}", **_HEADS_INPUT),
)
QUANTISING = tuple(
    Mistake(
        f"quantiser.{id}",
        text,
        (*FIELDS, *(name + part for part in ("_codes", "_scale") for name in MAY_BE_QUANTIZED)),
        "quantised",
        partial(engines.quantising, quantize),
    )
    for id, (text, quantize) in QUANTISERS.items()
)
_DIVIDED = "the weights of a token's experts are divided by their sum, as by a softmax over their logits alone"
_ENGINES = (
    Mistake("experts.normalised", _DIVIDED, ("ffn_moe_weights",), engine=engines.normalized_experts),
    Mistake("experts.permuted", "experts are in another order: {order}", tuple(OF_EXPERTS), engine=engines.permuted_experts),
    Mistake("experts.count", "a token takes {taken} experts, not {right}", ("ffn_moe_out",), engine=engines.other_counts),
    Mistake("experts.shared_missing", "the shared expert is missing", ("l_out",), engine=engines.without_shared_expert),
    Mistake("head.tied", "the head is tied to the embedding, the file has one of its own", _HEAD, engine=engines.tied),
    Mistake("residual.other_kind", "the feed-forward reads {read} instead of {right}", engine=engines.other_branch),
    *(
        Mistake(f"tokens.{id}", f"token ids are off by {by}", (EMBEDDING.name,), f"positions: ids {by}", partial(engines.shifted, by))
        for id, by in (("plus_1", 1), ("minus_1", -1))
    ),
    Mistake(
        "tokens.first_twice",
        "the first token is fed twice, as a BOS that is there already",
        engine=partial(engines.fed, lambda ids: np.hstack([ids[:, :1], ids])),
    ),
    Mistake(
        "tokens.prompt_twice",
        "the cache holds the same prompt already: it was not cleared after a first run",
        engine=partial(engines.fed, lambda ids: np.hstack([ids, ids])),
    ),
)
CATALOGUE = (
    *_DIALECTS,
    *_named(_LIKELY, likely=True),
    *_named({"activation.other": "other_function: *"}, ("ffn_out", "ffn_moe_swiglu"), likely=True),
    *_named({"scale.fused": "other_weight: beside"}, ("Qcur", "Kcur", "Vcur"), likely=True, local=True),
    *_named({"scale.gated": "other_weight: beside"}, ("ffn_gate", "ffn_up"), likely=True, local=True),
    *QUANTISING,
    *_named(_NORMS, NORMING, likely=True, shared=True),
    *_ENGINES,
    *_named(_ANYWHERE),
    *_named(_RESIDUALS, _SUMS),
    *_named({"head.int8": "rounded: a tensor in int8 with a scale for each row"}, _HEAD, fault=False),
    *_named({"pooling.other_rows": "other_function: *", "pooling.unit": "whole"}, (POOLED.name,)),
    *_named({"input.narrow": "rounded: a tensor"}, tuple(FIELDS), fault=False),
    *_named(_OF_WEIGHTS, (*FIELDS, *_HEAD, *OF_EXPERTS, *NORMING), fault=False),
    *_named(_ROUNDINGS, fault=False),
    Mistake("weights.narrow_matrices", "matrices are rounded to {kind}", _EVERY, "rounded: a matrix", fault=False),
    *_CACHES,
)
"""All known mistakes. Of two that fit a tensor alike the first one stands."""
HIDDEN = tuple(
    Mistake(
        f"edit.{kind}", "", _EVERY, f"{kind}: *", fault=kind not in kinds.NARROW, shared=kind in kinds.SHARED, local=kind in kinds.LOCAL
    )
    for kind in kinds.KINDS
    if kind not in ("routers", "quantised")  # whose edits all have names
)
"""Each kind of edits in its own words: searched for where none of the catalogue explains a tensor, at its operation or through several."""

ROWS = {mistake.id: mistake for mistake in (*CATALOGUE, *HIDDEN)}
"""All of these by their ids."""


def at_operation(site: Operation, mistakes: Iterable[Mistake] = CATALOGUE) -> Iterator[Hypothesis]:
    """Yields every one of some mistakes that an operation can make."""
    for mistake in mistakes:
        if site.key.name in mistake.at:
            yield from mistake.at_operation(site)
