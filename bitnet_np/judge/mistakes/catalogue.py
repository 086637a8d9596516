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
    "switch.logit_scale": "steps: the logit scale is not divided out",
    "switch.embedding_scale": "steps: the embedding scale is missing",
    "switch.residual_scale": "steps: the residual scale is missing",
    "switch.logit_cap": "steps: the logits' capping is missing",
    "switch.score_cap": "steps: the scores' capping is missing",
    "switch.attention_scale": "usual_numbers: scores are multiplied by {X}",
    "bias.missing": "steps: the bias is missing",
    "scale.missing": "steps: the weight scale is missing",
    "scale.inverted": "steps: the weight scale is divided by instead of multiplied",
    "norm.weight_missing": "steps: the norm's weight is missing",
    "norm.bias_missing": "steps: the norm's bias is missing",
    "norm.missing": "whole: the norm is missing: its input comes out unchanged",
    "rope.pairs": "turns: pairs are {X}",
    "rope.missing": "whole: the rotation is missing",
    "rope.backwards": "turns: the rotation turns the other way",
    "rope.unscaled": "steps: the position scale is not divided out",
    "rope.magnitude": "steps: RoPE's magnitude is missing",
    "rope.factors": "steps: the factors of the frequencies are not divided out",
    "rope.base": "usual_numbers: the frequency base is {X}",
    "rope.scaled_local": "positions: positions are scaled in local layers, too",
    "attention.unscaled": "steps: the score scale is missing",
    "attention.divided_by_width": "steps: the score scale is applied twice",
    "attention.no_window": "masks: the window is missing{X}",
    "attention.heads_in_turn": "groups: key-value heads are dealt out{X}",
    "activation.swapped": "exchanged: {u}up and {g}gate are exchanged",
    "experts.not_normalised": "steps: the sum of the token's experts is not divided out",
    "experts.not_softmax": "routers: {A}",
    "experts.unweighted": "steps: the weights of experts are missing",
    "experts.shared_ungated": "steps: the gate is missing",
    "table.positions": "steps: the rows of positions are missing",
    "table.output_bias": "steps: the head's bias is missing",
}
_NORMS = {
    "norm.epsilon": "usual_numbers: epsilon is {X}",
    "norm.epsilon_outside": "moved: epsilon is outside the root",
    "norm.mean_not_subtracted": "steps: the mean is missing",
    "norm.no_mean_no_bias": "whole: the mean is not subtracted, as in RMSNorm, and its bias is missing",
    "norm.mean_subtracted": "centred: the mean is subtracted, as in LayerNorm",
    "norm.width_less_one": "other_function: the sum of squares over the width less one instead of the mean square",
}
OF_ROWS = frozenset(_NORMS)
"""The ids of mistakes in what a row has once: none is in some of its elements, and an operation has it in all rows."""
OF_HEADS = frozenset(("attention.heads_in_turn", "attention.groups", "edit.groups"))
"""The ids of mistakes in a rule for all heads: none is in some of them."""
_ANYWHERE = {
    "scale.other": "other_weight: the weight scale of {A} is used",
    "codes.unshifted": "codes: codes 0, 1, 2 are read as 0, +1, +2 instead of -1, 0, +1",
    "codes.layout": "codes: I2_S is read in the layout {layout}",
    "weights.transposed": "order: the{X}matrix is read column by column, as if it were transposed",
    "weights.others": "other_weight: the weights of {A} are used",
    "input.unnormed": "other_tensor: {input} is read instead of {x}_norm",
    "norm.other_weight": "other_weight: the norm's weight of {A} is used",
    "norm.after_rope": "swapped: the rotation comes before the norm of heads",
    "rope.positions": "positions: positions are too {x} by 1",
    "rope.fed_twice": "positions: the last token is one position too far{X}",
    "attention.mask": "masks: {W}",
    "attention.groups": "groups: {W}",
    "attention.transposed": "order: heads and their elements are transposed",
    "attention.unrotated": "exchanged: queries and keys are not rotated",
    "attention.keys_values_swapped": "exchanged: Vcur and Kcur{x} are exchanged",
    "attention.last_only": "masks: only the last {n} tokens are seen, {X}",
    "layers.skipped": "whole: the layer is skipped{X}",
    "head.unnormed": "other_tensor: l_out of layer {n} is read instead of result_norm",
    "layers.last_skipped": "other_tensor: l_out of layer {n} is read instead of l_out",
    "embedding.scaled": "whole: embeddings are scaled by the root of the width",
}
_RESIDUALS = {
    "residual.missing": "steps: the residual, {h}, is missing",
    "residual.branch_missing": "steps: {branch} is missing",
    "residual.normed": "other_tensor: {x}_norm is read instead of the residual, {h}",
    "residual.subtracted": "steps: the residual, {h}, is subtracted",
    "residual.branch_subtracted": "steps: {branch} is subtracted",
    "residual.twice": "steps: the residual, {h}, is applied twice",
    "residual.layer_input": "other_tensor: the layer's input is read instead of the residual, {h}",
}
_OF_WEIGHTS = {
    "weights.narrow": "narrow_weights: weights are rounded to {kind}",
    "weights.narrow_blocks": "fewer_bits: weights are rounded to {kind}",
    "weights.narrow_rows": "fewer_bits: weights are rounded to {kind} with a scale for each row",
}
_ROUNDINGS = {
    "rope.narrow_angles": "rounded: the angles: rounded to {kind}",
    "rope.narrow_turns": "rounded: sines and cosines: rounded to {kind}",
    "activation.narrow": "rounded: the activation's input and value are rounded to {kind}, as in a table of it",
    "activation.narrow_value": "rounded: the activation: rounded to {kind}",
}
_CACHES = (
    *_named(
        {
            "cache.ggml": "stored: keys and values are rounded to {kind}, as in a KV cache of ggml{X}",
            "cache.ggml_scaled": "stored: keys and values, and queries that are scaled already, are rounded to {kind}, as {X}",
            "cache.narrow": "stored: keys and values are rounded, as a cache of {kind} does",
            "cache.float16_scaled": "stored: {kind} roundings, of queries that are scaled already{X}",
        },
        fault=False,
    ),
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
        f"quantised: {text}",
        partial(engines.quantising, quantize),
    )
    for id, (text, quantize) in QUANTISERS.items()
)
_DIVIDED = "the weights of a token's experts are divided by their sum, as by a softmax over their logits alone"
_ENGINES = (
    Mistake("rope.other_layers", "queries and keys are rotated as in {which} layers", ROPE, engine=engines.local_layers),
    Mistake("attention.window_layers", "the layers with the window are one layer {how} than in the model", engine=engines.window_layers),
    Mistake("experts.normalised", _DIVIDED, ("ffn_moe_weights",), engine=engines.normalized_experts),
    Mistake("experts.permuted", "experts are in another order: {order}", tuple(OF_EXPERTS), engine=engines.permuted_experts),
    Mistake("experts.count", "a token takes {taken} experts, not {right}", ("ffn_moe_out",), engine=engines.other_counts),
    Mistake("experts.shared_missing", "the shared expert is missing", ("l_out",), engine=engines.without_shared_expert),
    Mistake("head.tied", "the head is tied to the embedding, the file has one of its own", _HEAD, engine=engines.tied),
    Mistake("residual.other_kind", "the feed-forward reads {read} instead of {right}", engine=engines.other_branch),
    *(
        Mistake(f"tokens.{id}", edit, (EMBEDDING.name,), f"positions: {edit}", partial(engines.shifted, by))
        for id, edit, by in (("plus_1", "token ids are off by 1", 1), ("minus_1", "token ids are off by -1", -1))
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
    *_named({"activation.other": "other_function: {A} instead of {B}"}, ("ffn_out", "ffn_moe_swiglu"), likely=True),
    *_named({"scale.fused": "other_weight: the weight scale of {x}cur is used"}, ("Qcur", "Kcur", "Vcur"), likely=True, local=True),
    *_named({"scale.gated": "other_weight: the weight scale of ffn_{x} is used"}, ("ffn_gate", "ffn_up"), likely=True, local=True),
    *QUANTISING,
    *_named(_NORMS, NORMING, likely=True, shared=True),
    *_ENGINES,
    *_named(_ANYWHERE),
    *_named(_RESIDUALS, _SUMS),
    *_named({"head.int8": "rounded: result_norm: rounded to int8 with a scale for each row"}, _HEAD, fault=False),
    *_named(
        {"pooling.other_rows": "other_function: {A} instead of {B}", "pooling.unit": "whole: each position is divided{X}"}, (POOLED.name,)
    ),
    *_named({"input.narrow": "rounded: {x}: rounded to {kind}"}, tuple(FIELDS), fault=False),
    *_named(_OF_WEIGHTS, (*FIELDS, *_HEAD, *OF_EXPERTS, *NORMING), fault=False),
    *_named(_ROUNDINGS, fault=False),
    Mistake("weights.narrow_matrices", "matrices are rounded to {kind}", _EVERY, "rounded: the{X}matrix: rounded to {kind}", fault=False),
    *_CACHES,
)
"""All known mistakes. Of two that fit a tensor alike the first one stands."""
HIDDEN = tuple(
    Mistake(f"edit.{kind}", "", _EVERY, f"{kind}: ", fault=kind not in kinds.NARROW, shared=kind in kinds.SHARED, local=kind in kinds.LOCAL)
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
