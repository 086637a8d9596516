"""Two dumps without a model: near by mean square errors, and nothing passes because it could not be compared."""

import numpy as np
import pytest
from dumps import FAULTS, LOGITS, MODEL, TOKENS, only, recorded, trace

from bitnet_np import BITNET_CPP
from bitnet_np.base.errors import OptionError
from bitnet_np.judge.dump import compare_traces
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.points import Key


def test_two_dumps_are_compared():
    ours, dialect = trace(recorded(), TOKENS), trace(recorded(dialect=BITNET_CPP), TOKENS)
    assert compare_traces(ours, ours).verdict is Verdict.SAME_BITS
    assert compare_traces(ours, dialect).verdict is Verdict.FLIPS
    bad, _ = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    report = compare_traces(ours, trace(bad), partial=True)
    assert report.verdict is Verdict.WRONG
    assert report.first_wrong.key == Key("ffn_out", 1)


def test_what_cannot_be_compared_is_invalid():
    ours, nan = trace(recorded(), TOKENS), trace(recorded() | {LOGITS: np.full_like(recorded()[LOGITS], np.nan)})
    part, none, other = only(recorded(), LOGITS.name), trace({}, TOKENS), trace(recorded(), TOKENS[::-1])
    for a, b, partial in ((ours, part, False), (ours, none, True), (ours, other, False), (ours, nan, False), (nan, nan, False)):
        assert compare_traces(a, b, partial).verdict is Verdict.INVALID
    assert compare_traces(ours, part, partial=True).verdict is Verdict.SAME_BITS
    with pytest.raises(OptionError, match="partial is 'no'"):  # whether or not a tensor is missing
        compare_traces(ours, ours, partial="no")


def test_codes_that_differ_are_flips_at_best():
    """One code of a long row differs, so little that the same numbers as floats are ROUNDING."""
    codes = np.random.default_rng(0).integers(-127, 128, (2, 1 << 18)).astype(np.int8)
    other = codes.copy()
    other[1, 5] ^= 1
    for name, verdict in (("attn_norm_codes", Verdict.FLIPS), ("attn_norm", Verdict.ROUNDING)):
        ours, theirs = (trace({Key(name, 0): array if name.endswith("_codes") else array.astype(np.float32)}) for array in (codes, other))
        assert compare_traces(ours, theirs).verdict is verdict


def test_parameters_with_small_gradients_may_differ_as_much_as_others():
    """Rows of a gradient are no positions: a row far below the others is a sum of terms as large as theirs."""
    gradient = np.random.default_rng(0).standard_normal((4, 50))
    gradient[3] *= 1e-6
    noisy = gradient + 1e-5 * np.random.default_rng(1).standard_normal((4, 50))
    for name, verdict in (("grad_attn_q", Verdict.ROUNDING), ("attn_norm", Verdict.WRONG)):
        assert compare_traces(trace({Key(name, 0): gradient}), trace({Key(name, 0): noisy})).verdict is verdict
