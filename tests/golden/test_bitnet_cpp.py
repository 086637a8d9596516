"""bitnet.cpp as an outside witness: what spec.py and the kernels could be wrong about together, it would not be. See data/README.md.

It rounds to float16 where the definition does not, so there are three comparisons: its dialect with its logits, which agree to the last
units of float32; the definition with its logits, within what those roundings do; and node by node, each fed with bitnet.cpp's own input.
Whole sequences stand for every path: properties/test_same_bits.py has the bits of all.
"""

from pathlib import Path

import bounds
import numpy as np
import pytest
from bounds import assert_within
from models import assert_same_bits

from bitnet_np import load, spec
from bitnet_np.engine.dialects import BITNET_CPP, EXACT
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.kernels import cpu
from bitnet_np.model.dense import dense_view

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


@pytest.fixture(scope="module")
def trace():
    return dict(np.load(DATA / "bitnet_cpp_tiny_trace.npz"))


class Nodes:
    """bitnet.cpp's tensors of one layer, rows first; `node.x` is what goes into the layer."""

    def __init__(self, model, trace, layer):
        self.config, self.trace, self.layer = model.config, trace, layer
        self.x = trace["s0.inp_embd.GET_ROWS" if layer == 0 else f"s0.l_out-{layer - 1}.ADD"].reshape(T, -1)

    def __getitem__(self, name):
        name, operation = name.split(".")
        return np.ascontiguousarray(self.trace[f"s0.{name}-{self.layer}.{operation}"][0])

    def rows(self, name):
        return self[name].reshape(T, -1)

    def heads(self, name):
        return self[name].reshape(T, -1, self.config.head_dim)


@pytest.fixture(params=[0, 1, 2], ids=lambda n: f"layer {n}")
def node(request, model, trace):
    return Nodes(model, trace, request.param)


@pytest.fixture
def w(model, node):
    return model.layers[node.layer]


@pytest.fixture
def dense(model, node):
    return dense_view(model.layers[node.layer])


POSITION = np.arange(T)
LINEAR = {  # our name: what goes in, what comes out
    "attn_q": ("attn_norm.MUL", "Qcur.MUL_MAT"),
    "attn_k": ("attn_norm.MUL", "Kcur.MUL_MAT"),
    "attn_v": ("attn_norm.MUL", "Vcur.MUL_MAT"),
    "attn_output": ("attn_sub_norm.MUL", "attn_o_out.MUL_MAT"),
    "ffn_gate": ("ffn_norm.MUL", "ffn_gate.MUL_MAT"),
    "ffn_up": ("ffn_norm.MUL", "ffn_up.MUL_MAT"),
    "ffn_down": ("ffn_sub_norm.MUL", "ffn_down.MUL_MAT"),
}
NORM = {
    "attn_norm": (None, "attn_norm.MUL"),
    "attn_sub_norm": ("kqv_out.CONT", "attn_sub_norm.MUL"),
    "ffn_norm": ("ffn_inp.ADD", "ffn_norm.MUL"),
    "ffn_sub_norm": ("ffn_out.MUL", "ffn_sub_norm.MUL"),
}


def assert_near(actual, expected, limit):
    """`limit` is a part of each row's largest number, or of 1 where that is smaller."""
    assert actual.shape == expected.shape
    largest = np.abs(expected).reshape(len(expected), -1).max(axis=1)
    difference = np.abs(actual.astype(np.float64) - expected).reshape(len(expected), -1).max(axis=1)
    assert (difference <= limit * np.maximum(1, largest)).all(), (difference / np.maximum(1, largest)).max()


def halved(x):
    return x.astype(np.float16).astype(np.float32)


def test_embedding(model, golden, trace):
    expected = trace["s0.inp_embd.GET_ROWS"].reshape(T, -1)
    assert_same_bits(cpu.embed(model.token_embd, golden["tokens_T17"].astype(np.int64)), expected)
    np.testing.assert_array_equal(spec.embed(dense_view(model).token_embd, golden["tokens_T17"]), expected)


@pytest.mark.parametrize("name", NORM)
def test_norms(model, node, w, dense, name):
    before, after = NORM[name]
    x, expected = node.x if before is None else node.rows(before), node.rows(after)
    assert_near(cpu.rms_norm(x, getattr(w, name), model.config.eps), expected, 2e-7)
    assert_within(expected, *bounds.rms_norm(x, getattr(dense, name), model.config.eps))


@pytest.mark.parametrize("name", LINEAR)
def test_ternary_matmuls(node, w, dense, name):
    """Bit for bit, scales included: integers are exact in both, and float32 follows in the same order."""
    x, expected = (node.rows(each) for each in LINEAR[name])
    weights = getattr(w, name).weights
    assert_same_bits(cpu.ternary_matmul(*cpu.quantize(x), weights.codes, weights.scale, weights.shape[0]), expected)
    assert_within(expected, *bounds.linear(x, getattr(dense, name).matrix, getattr(dense, name).scale))


@pytest.mark.parametrize("name", ["Qcur", "Kcur"])
def test_rope(model, node, name):
    x, expected = node.heads(name + ".MUL_MAT"), node.heads(name + ".ROPE")
    base = model.config.rope_base
    assert_near(cpu.rope(x, *cpu.rotations(BITNET_CPP.angles(POSITION, model))), expected, 3e-7)
    assert_near(cpu.rope(x, *cpu.rotations(EXACT.angles(POSITION, model))), expected, 2e-6)
    assert_near(spec.rope(x.astype(np.float64), POSITION, base), expected, 2e-6)


def test_attention(model, node):
    """Scores, probabilities and sums are named apart in bitnet.cpp; here they are one kernel, whose result is the same, bit for bit."""
    q, k = halved(node.heads("Qcur.ROPE")), halved(node.heads("Kcur.ROPE"))
    v = halved(node.heads("Vcur.MUL_MAT"))
    scores, probabilities = node["kq.MUL_MAT"], node["kq_soft_max_ext.SOFT_MAX"]  # [H, T, 32 keys], of which 17 are there
    shared_k, shared_v = (np.repeat(x, 2, axis=1).astype(np.float64) for x in (k, v))

    assert_near(np.einsum("thk,shk->hts", q, shared_k), scores[..., :T], 5e-7)
    masked = scores[..., :T] / 8.0 + spec.causal_mask(T, T)
    exact = np.exp(masked - masked.max(axis=-1, keepdims=True))
    exact /= exact.sum(axis=-1, keepdims=True)
    assert_near(exact, probabilities[..., :T], 1e-7)
    assert not probabilities[..., T:].any()
    weights = halved(probabilities[..., :T]).astype(np.float64)
    assert_near(np.einsum("hts,shk->htk", weights, shared_v), node["kqv.MUL_MAT"], 1e-7)

    expected, slot = node.heads("kqv_out.CONT"), np.zeros(T, np.int64)
    np.testing.assert_array_equal(expected.swapaxes(0, 1), node["kqv.MUL_MAT"])
    assert_same_bits(cpu.attend_float16(q, k[None], v[None], slot, POSITION), expected)
    half = 2.0**-11 * spec.attend(*bounds.wide(q, k, np.abs(v)), spec.causal_mask(T, T))  # a probability's rounding to float16
    assert_within(expected, spec.attend(*bounds.wide(q, k, v), spec.causal_mask(T, T)), 1.01 * half + 1e-6)
    assert_within(cpu.attend(q, k[None], v[None], slot, POSITION), expected, 1.01 * half + 1e-6)


def test_gate_and_residuals(node):
    gate, up, expected = node.rows("ffn_gate.MUL_MAT"), node.rows("ffn_up.MUL_MAT"), node.rows("ffn_out.MUL")
    assert_same_bits(cpu.relu2_gate(gate, up), expected)
    assert_within(expected, *bounds.relu2_gate(gate, up))
    np.testing.assert_array_equal(np.maximum(gate, 0), node.rows("ffn_relu.UNARY"))
    assert_same_bits(node.x + node.rows("attn_o_out.MUL_MAT"), node.rows("ffn_inp.ADD"))
    assert_same_bits(node.rows("ffn_inp.ADD") + node.rows("ffn_down.MUL_MAT"), node.rows("l_out.ADD"))


def test_head(model, trace):
    x, normed, logits = (trace[f"s0.{name}"].reshape(T, -1) for name in ("l_out-2.ADD", "result_norm.MUL", "result_output.MUL_MAT"))
    dense = dense_view(model)
    assert_near(cpu.rms_norm(x, model.output_norm, model.config.eps), normed, 2e-7)
    assert_within(normed, *bounds.rms_norm(x, dense.output_norm, model.config.eps))
    assert_near(cpu.matmul(halved(normed), model.token_embd), logits, 3e-7)
    assert_within(logits, *bounds.matmul(halved(normed), dense.token_embd))


def test_the_trace_is_of_the_logits(golden, trace):
    np.testing.assert_array_equal(trace["s0.result_output.MUL_MAT"].reshape(T, -1), golden["logits_prefill_T17"])
