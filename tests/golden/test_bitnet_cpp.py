"""bitnet.cpp as an outside witness: what spec.py and the kernels could be wrong about together, it would not be. See data/README.md.

It rounds to float16 where the definition does not, so there are three comparisons: its dialect with its logits, which agree to the last
units of float32; the definition with its logits, within what those roundings do; and node by node, each judged by bitnet.cpp's own input.
Whole sequences stand for every path: properties/test_same_bits.py has the bits of all.
"""

from pathlib import Path

import numpy as np
import pytest
from models import assert_same_bits

from bitnet_np import load, spec
from bitnet_np.engine.dialects import BITNET_CPP, EXACT
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.law.precision import FLOAT32
from bitnet_np.judge.verdict import Verdict
from bitnet_np.kernels import cpu
from bitnet_np.model.dense import dense_view
from bitnet_np.traces.formats import read_any
from bitnet_np.traces.points import Key

DATA = Path(__file__).parents[1] / "data"
T = 17


@pytest.fixture(scope="module")
def model():
    return load(Path(__file__).parents[2] / "bitnet_np" / "data" / "tiny.gguf")


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(DATA / "bitnet_cpp_tiny.npz"))


# --- logits ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("against", ["decode", "prefill"])
@pytest.mark.parametrize(("length", "limit"), [(1, 1e-6), (2, 1e-6), (17, 2e-6)])
def test_its_dialect_gives_its_logits(model, golden, against, length, limit):
    """To one or two units in the last place of logits up to 13.7."""
    logits = forward_full(model, golden[f"tokens_T{length}"][None], dialect=BITNET_CPP)[0]
    np.testing.assert_allclose(logits, golden[f"logits_{against}_T{length}"], rtol=0, atol=limit)


def test_its_dialect_gives_its_logits_of_64_tokens_but_for_a_code_now_and_then(model, golden):
    """One of 300,000 int8 codes is on the other side of k + 0.5 here and there: logits of four tokens show it, by at most 1.3e-3."""
    logits = forward_full(model, golden["tokens_T64"][None], dialect=BITNET_CPP)[0]
    difference = np.abs(logits - golden["logits_decode_T64"]).max(axis=1)
    assert difference.max() <= 2e-3
    assert (difference <= 2e-6).sum() >= 60


@pytest.mark.parametrize("length", [1, 2, 17, 64])
def test_the_definition_is_as_far_from_it_as_float16_roundings_make_it(model, golden, length):
    logits, expected = forward_full(model, golden[f"tokens_T{length}"][None], dialect=EXACT)[0], golden[f"logits_decode_T{length}"]
    difference = np.abs(logits - expected)
    assert difference.max() <= 0.45
    assert difference.mean() <= 0.07
    first, second = np.sort(expected, axis=1)[:, [-1, -2]].T
    clear = first - second > 2 * difference.max(axis=1)
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(logits.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])


def test_the_definition_itself_is_that_far_too(model, golden):
    expected = golden["logits_decode_T17"]
    difference = np.abs(spec.forward(dense_view(model), golden["tokens_T17"]) - expected)
    assert difference.max() <= 0.45
    assert difference.mean() <= 0.07


# --- node by node ---------------------------------------------------------------------------------------------------------------------


NODES = DATA / "bitnet_cpp_tiny_trace.npz"
ROUNDED = {"Qcur_rope", "Kcur_rope", "kq", "kq_soft_max", "kqv_out"}
"""Where cosines and exponentials are: bitnet.cpp has those of the C library. All others have its bits, up to the last layer's sub-norm."""


def test_every_tensor_from_its_own_inputs(model, golden):
    """In its dialect each is right, most of them to the bit, scales included; without its roundings some are not."""
    tokens = golden["tokens_T17"]
    dump = read_any(NODES, tokens=tokens)
    report = judge_trace(model, dump, tokens, BITNET_CPP)
    assert report.verdict is Verdict.ROUNDING
    assert {o.key for o in report.operations} == set(dump.points)
    before = [o for o in report.operations if o.key.layer in (0, 1) or o.key.name == "inp_embd"]
    assert {o.key.name for o in before if o.verdict is Verdict.ROUNDING} == ROUNDED
    last = {o.key.name for o in report.operations if o.key.layer == 2 and o.verdict is Verdict.ROUNDING}
    assert last == ROUNDED | {"ffn_sub_norm", "ffn_down", "l_out"}
    assert judge_trace(model, dump, tokens, EXACT, precision=FLOAT32).verdict is Verdict.WRONG
    np.testing.assert_array_equal(dump.points[Key("result_output", None)], golden["logits_prefill_T17"])


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_attention_to_the_bit(layer):
    """Scores, probabilities and sums are named apart in bitnet.cpp; here they are one kernel, of queries, keys and values in float16."""
    with np.load(NODES) as nodes:
        names = ("Qcur-{}.ROPE", "Kcur-{}.ROPE", "Vcur-{}.MUL_MAT", "kqv_out-{}.CONT")
        q, k, v, expected = (nodes["s0." + name.format(layer)].reshape(T, -1, 64) for name in names)
    q, k, v = (np.float32(np.float16(x)) for x in (q, k, v))
    assert_same_bits(cpu.attend_float16(q, k[None], v[None], np.zeros(T, np.int64), np.arange(T)), expected)
