"""Mistakes in norms."""

from collections.abc import Iterator

import numpy as np

from ...model.families import NORMS
from ...traces.points import FIELDS
from ..graph import HEAD_NORMS
from .edited import named, numbered
from .mistake import Numbers, Site

AT = (*NORMS, "attn_post_norm", "ffn_post_norm", *HEAD_NORMS, *(f"{name}_in" for name in FIELDS), "result_norm")
EPSILONS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)


def _other_epsilons(site: Site) -> Iterator[tuple[Numbers, float]]:
    right = site.config.eps
    for value in EPSILONS:
        if not np.isclose(value, right, rtol=1e-3):
            yield {"value": value, "right": right}, value


_BIAS = "left_out: the norm's bias is left out"
_NO_MEAN = "left_out: the mean is left out"
_AS_RMS, _AS_LAYER_NORM = "the mean is not subtracted, as in RMSNorm", "the mean is subtracted, as in LayerNorm"
_UNCHANGED = "the norm is missing: its input comes out unchanged"
_LESS_ONE = "other_function: the sum of squares over the width less one instead of the mean square"
_ROTATED = "its input is rotated already: RoPE comes before the norm"
_EPSILON = "epsilon is {value:g} instead of {right:.3g}"
MISTAKES = (
    *numbered("norm", AT, ("epsilon", "epsilon", _EPSILON, _other_epsilons), likely=True, together=True),
    *named(
        "norm",
        AT,
        ("epsilon_outside", "moved: root comes before epsilon", "epsilon is outside the root"),
        ("mean_not_subtracted", _NO_MEAN, _AS_RMS),
        ("no_mean_no_bias", f"{_NO_MEAN} + {_BIAS}", f"{_AS_RMS}, and its bias is missing"),
        ("mean_subtracted", "centred: the mean is subtracted from {X}", _AS_LAYER_NORM),
        likely=True,
        together=True,
    ),
    *named(
        "norm",
        AT,
        ("weight_missing", "left_out: the norm's weight is left out", "the norm's weight is missing"),
        ("bias_missing", _BIAS, "the norm's bias is missing"),
        ("missing", "left_out: everything is left out", _UNCHANGED),
        likely=True,
    ),
    *named(
        "norm",
        AT,
        ("width_less_one", _LESS_ONE, "the sum of squares is divided by the width less one"),
        ("other_weight", "other_weight: that of {A} instead of the norm's weight", "the weight of {A} is used"),
    ),
    *named("norm", tuple(HEAD_NORMS), ("after_rope", "swapped: {A}_rope comes before {B}_normed", _ROTATED)),
    *named(
        "layers",
        ("result_norm",),
        ("last_skipped_in_norm", "other_tensor: l_out of layer {n} is read instead of l_out", "layers behind layer {n} are skipped"),
    ),
)
