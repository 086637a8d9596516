"""The one wrong step of an operation, solved for: steps of rows, weights that all tokens share, functions, and sums of inputs."""

import numpy as np
import pytest
from dumps import MODEL, family_dump, with_tensor
from wrong_tensors import IDS, KEY, LAYER, LLAMA, QUERY, C, T, by_weights, judged, layer_points, scores_of, softmax, turned

from bitnet_np import EXACT, spec
from bitnet_np.judge.bounds import within
from bitnet_np.judge.graph import operation_of
from bitnet_np.judge.products import rows_of
from bitnet_np.judge.readings.wrong import runs
from bitnet_np.judge.trace import judge_trace
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.points import TOP_EXPERTS, Key

POINTS = layer_points("llama")
NORM = POINTS["attn_norm"]
GATE, UP = POINTS["ffn_gate"], POINTS["ffn_up"]
GAIN = LLAMA.layers[LAYER].attn_norm.astype(np.float64)
ROW = np.arange(T)[:, None]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: NORM * (1 + 0.01 * ROW), "the root mean square: {} instead of {} at position 1, {} instead of {} at position 2; wrong at"),
        (
            lambda: NORM * (1 + 3e-5 * np.cos(np.arange(96))),
            "the norm's weight: {} instead of {} at element 0, {} instead of {} at element 1",
        ),
        (lambda: NORM * np.where(ROW > 11, 0.5, 1), "at positions 12 to 16 of 17: everything is 0.5 times what is right"),
        (lambda: NORM / GAIN * np.roll(GAIN, 3), "the norm's weight: elements are shifted by 3: element 3 has the numbers of element 0"),
        (lambda: NORM * np.where(np.arange(96) < 40, np.linspace(1, 2, 96), 1), "the norm's weight: {} instead of {} at element 1"),
        (lambda: NORM * np.where(np.arange(96) % 32 < 9, 3, 1), "at elements 0 to 8 of each 32: everything is 3 times what is right"),
        (lambda: GATE * np.tanh(np.logaddexp(0, GATE)) * UP, "the activation is another function of its input: {} instead of {} at -"),
    ],
)
def test_a_step_that_explains_the_output_is_named(wrong, says):
    """Whatever made it: the numbers that the step must have given are the same at all elements that it reaches."""
    name = "ffn_out" if "activation" in says else "attn_norm"
    said, texts = judged("llama", name, wrong()), says.split("{}")
    assert said.startswith(texts[0])
    assert all(text in said for text in texts)


def summed(factors, columns=slice(None), rows=slice(None)):
    """A product whose inputs are summed so many times, at some outputs of some tokens."""
    wrong, linear = POINTS["ffn_up"].copy(), LLAMA.layers[LAYER].ffn_up
    products = (POINTS["ffn_norm"] * factors) @ rows_of(linear.weights, np.arange(120)).T
    wrong[rows, columns] = (products + linear.bias)[rows, columns]
    return wrong


INPUT = np.arange(96)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: summed(np.where(INPUT < 37, 0.0, 1.0)), "inputs 0 to 36 are not summed"),
        (lambda: summed(np.where(INPUT % 32 < 3, 2.0, 1.0)), "inputs 0 to 2 of each 32 are summed twice"),
        (
            lambda: summed(np.where(INPUT == 5, -1.0, np.where(INPUT > 90, 0.25, 1.0))),
            "input 5 is subtracted, inputs 91 to 95 are multiplied by 0.25",
        ),
        (lambda: summed(np.linspace(1.5, 2, 96)), "inputs 0 to 95 are multiplied by other numbers, 1.5 to 2"),
        (lambda: summed(np.where(INPUT == 7, 0.0, 1.0), slice(10, 50)), "at elements 10 to 49 of 120: input 7 is not summed"),
        (lambda: summed(np.where(INPUT == 7, 0.0, 1.0), rows=slice(4, 12)), "at positions 4 to 11 of 17: input 7 is not summed"),
    ],
)
def test_inputs_that_are_summed_otherwise_are_named(wrong, says):
    assert judged("llama", "ffn_up", wrong()) == says


def test_noise_is_no_step():
    noise = np.random.default_rng(0).standard_normal((T, 96))
    assert judged("llama", "attn_norm", NORM * (1 + 0.01 * noise)) == ""
    assert judged("llama", "ffn_down", POINTS["ffn_down"] + 0.01 * noise) == ""


def test_a_sigmoid_taken_from_tanh_is_honest():
    """As compilers do: 1 + tanh(x / 2) is as wrong as 1 is, where the sigmoid is small, too."""
    gate, up = np.float32(GATE) * np.float32(3), np.float32(UP)
    theirs = np.float32(0.5) * gate * (1 + np.tanh(gate / 2)) * up
    operation = operation_of(LLAMA, EXACT, Key("ffn_out", LAYER))
    assert within(operation.evaluate(gate.astype(np.float64), up.astype(np.float64)), theirs.astype(np.float64))[0] is Verdict.ROUNDING


# --- other places of the model's numbers ----------------------------------------------------------------------------------------------


def of_experts(change):
    """What is said of the up products of experts, after a change of those of single slots [T, k, N], given every expert's [E, T, N]."""
    model, ids, points = family_dump("qwen3moe")
    key, chosen = Key("ffn_moe_up", 1), points[Key(TOP_EXPERTS, 1)]
    every = [points[Key("ffn_norm", 1)].astype(np.float64) @ expert.ffn_up.weights.T for expert in model.layers[1].experts]
    wrong = points[key].reshape(*chosen.shape, -1).astype(np.float64)
    change(wrong, chosen, np.stack(every))
    report = judge_trace(model, with_tensor(points, key, wrong.reshape(len(ids), -1).astype(np.float32)), ids)
    return report.first_wrong.hypothesis


def test_the_expert_whose_products_are_wrong_is_named():
    def scaled(wrong, chosen, every):
        wrong[chosen == chosen[0, 0]] *= np.random.default_rng(0).uniform(0.5, 2, wrong.shape[2])

    _, _, points = family_dump("qwen3moe")
    expert = points[Key(TOP_EXPERTS, 1)][0, 0]
    assert of_experts(scaled) == f"numbers of expert {expert} alone are wrong, wherever a token takes it"


def test_experts_that_are_not_in_the_dump_are_not_asked_for():
    model, ids, points = family_dump("qwen3moe")
    key = Key("ffn_moe_swiglu", 1)
    wrong = points[key] * np.random.default_rng(0).uniform(0.5, 2, points[key].shape).astype(np.float32)
    kept = {k: x for k, x in points.items() if k.name != TOP_EXPERTS}
    assert judge_trace(model, with_tensor(kept, key, wrong), ids).first_wrong.hypothesis is None


def test_products_of_other_experts_are_named():
    def exchanged(wrong, chosen, every):
        for t in range(4):
            wrong[t, 0] = every[(chosen[t, 0] + t + 1) % len(every), t]

    model, _, points = family_dump("qwen3moe")
    mine = points[Key(TOP_EXPERTS, 1)][0, 0]
    other = (mine + 1) % len(model.layers[1].experts)
    assert of_experts(exchanged).startswith(f"products of others: position 0 has that of expert {other} instead of {mine}, ")


def test_products_of_other_tokens_inputs_are_named():
    def shifted(wrong, chosen, every):
        for t, other in ((1, 5), (2, 0), (3, 7)):
            wrong[t, 1] = every[chosen[t, 1], other]

    said = "products of others: position 1 has that of position 5, position 2 has that of position 0, position 3 has that of position 7"
    assert of_experts(shifted).startswith(said)


def test_numbers_left_of_another_tensor_are_named():
    wrong, before = POINTS["ffn_down"].copy(), POINTS["ffn_norm"]
    wrong[:, 40:60], wrong[:, :20] = POINTS["ffn_down"][:, :20], before[:, :20]
    said = "elements 40 to 59 have the numbers of elements 0 to 19, and elements 0 to 19 have the numbers of layer 1 ffn_norm"
    assert judged("llama", "ffn_down", wrong) == said


def test_rows_of_other_tokens_are_named():
    wrong, ids = POINTS["inp_embd"].copy(), IDS["llama"]
    wrong[[3, 8]] = LLAMA.token_embd[[ids[3] ^ 64, 0]]
    said = f"rows of other tokens: position 3 has the row of token {ids[3] ^ 64} instead of {ids[3]}, position 8 has the row of token 0"
    assert judged("llama", "inp_embd", wrong).startswith(said)


def test_rotations_by_positions_of_other_steps_are_named():
    frozen = np.where((ROW > 8) & (ROW % 4 > 0), ROW // 4 * 4, ROW)
    said = "tokens are rotated by other positions: positions 9 to 11 as position 8, positions 13 to 15 as position 12"
    assert judged("llama", "Qcur_rope", turned(frozen)) == said


def test_sums_that_run_on_are_named():
    wrong = POINTS["attn_o_out"].copy()
    wrong[5:, 32:64] = wrong[5:, 32:64].cumsum(axis=0)
    assert judged("llama", "attn_o_out", wrong) == "elements 32 to 63: sums run on from position 5, and are not cleared between positions"


def test_numbers_that_are_never_written_in_a_part_are_named():
    wrong = POINTS["ffn_up"].copy()
    wrong[6:, 100:] = 0
    assert judged("llama", "ffn_up", wrong) == "elements 100 to 119 of positions 6 to 16 are 0: never written"
    wrong[5, :40] = 0
    assert judged("llama", "ffn_up", wrong) == "all wrong numbers are 0, at positions 5 to 16: never written"


def test_the_scale_of_another_token_is_named():
    linear, x = MODEL.layers[LAYER].attn_q, layer_points("bitnet")["attn_norm"]
    scales = spec.quantize(x)[1]
    least, source = np.argsort(scales.ravel())[:2]  # the first would be that of the whole tensor
    rows = np.array([t for t in range(len(x)) if t not in (least, source)])[:8]
    wrong, matrix = layer_points("bitnet")["Qcur"].copy(), rows_of(linear.weights, np.arange(linear.shape[0]))
    scale = np.broadcast_to(scales[source], (8, 1))
    wrong[rows] = spec.ternary_matmul(np.rint(x[rows] * scale), scale, matrix, float(linear.weights.scale))
    said = f"activations are quantised by the scale of another token: {runs('position', rows)} by that of position {source}"
    assert judged("bitnet", "Qcur", wrong) == said


def test_empty_slots_that_are_read_are_named():
    """Scores of keys of zeros are 0, so that they take their part of the probabilities, and give nothing."""
    e = np.where(QUERY >= KEY, np.exp(scores_of()), 0)
    more = np.where(np.arange(T) > 11, 3, 0)[:, None]
    out = by_weights(e / (e.sum(axis=2, keepdims=True) + more))
    assert judged("llama", "kqv_out", out) == "empty slots, whose keys and values are 0, are read by positions 12 to 16, up to 3 of them"


def test_a_number_that_is_wrong_in_a_part_is_found():
    wrong = POINTS["kqv_out"].copy()
    scores = 0.7 * scores_of()
    wrong[9:] = by_weights(softmax(scores))[9:]
    right = C.head_dim**-0.5
    assert judged("llama", "kqv_out", wrong) == f"at positions 9 to 16 of 17: the score scale is {0.7 * right:.6g} instead of {right:.6g}"
