"""Probes: logits of models in which all but one operation is known or off say where an engine is wrong."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from bitnet_np import spec
from bitnet_np.hunt.engine import Ran
from bitnet_np.hunt.outcome import Judge, definition
from bitnet_np.hunt.probes import probe, probes, stream
from bitnet_np.hunt.run import call_of
from bitnet_np.model.dense import dense_view
from bitnet_np.testing.space import Case, fitted, model_of

JUDGE = Judge()
FAULTS = {
    "none": ("softmax", spec.softmax),
    "rotation": ("angles", lambda position, base, *more, angles=spec.angles: angles(position, 1.5 * base, *more)),
    "mask": ("causal_mask", lambda q, k, past=0, window=None, mask=spec.causal_mask: mask(q, k, past, 3)),
    "axes": ("attention_weights", lambda q, *more, f=spec.attention_weights: f(q.swapaxes(0, 1) if len(q) == q.shape[1] else q, *more)),
    "gate": ("ACTIVATIONS", dict.fromkeys(spec.ACTIVATIONS, lambda gate, up=1.0: np.maximum(gate, 0) * up)),
    "short": ("ACTIVATIONS", {name: lambda *x, f=f: f(*x) * (np.arange(len(x[0])) < 3)[:, None] for name, f in spec.ACTIVATIONS.items()}),
    "unturned": ("rotate", lambda x, *more, f=spec.rotate, **how: f(x, *more, **how) * (np.arange(len(x)) < 3)[:, None, None]),
    "head": ("forward", lambda model, ids, forward=spec.forward: forward(model, ids) * 1.1),
}


def probed(fault, layer=None, **fields):
    case = fitted(replace(Case(), **{"layers": 2, "vocab": 512, "length": 9} | fields))
    model, name_of, faulty = model_of(case), *FAULTS[fault]

    def run(model, call):
        ours = definition(model, call)
        with mock.patch.object(spec, name_of, faulty):
            theirs = spec.forward(dense_view(model), call.tokens[0]).astype(np.float32)
        return JUDGE.outcome(Ran("ok", dump=theirs), model, call, ours, True)

    return probe(model, call_of(case), 0, run, JUDGE)


@pytest.mark.usual(6)
@pytest.mark.parametrize(
    ("family", "weights"), [("llama", "float32"), ("qwen3", "Q8_0"), ("bitnet-b1.58", "ternary"), ("granite", "float16")]
)
@pytest.mark.parametrize("fault", ["none", "rotation", "mask", "gate"])
def test_the_place_is_found_and_often_the_cause(fault, family, weights):
    place = probed(fault, family=family, weights=weights)
    text, cause = {
        "none": ("no probe is wrong", None),
        "rotation": ("queries, keys, rotation, scores or softmax of layer 0", "RoPE: the frequency base is 15000"),
        "mask": ("the mask", "only the last 3 tokens are seen"),
        "gate": ("the feed-forward of layer 0", "ffn_out: relu(gate) * up instead of"),
    }[fault]
    assert text in place.text
    assert (place.cause is None) == (cause is None)
    assert cause is None or (cause in place.cause and place.cause.startswith("layer 0, "))


@pytest.mark.parametrize(("fault", "length", "text"), [("axes", 2, "queries, keys, rotation"), ("short", 9, "ffn_norm, gate, up")])
def test_what_chance_may_explain_has_no_cause(fault, length, text):
    """Of two tokens one weight of a head is wrong, which a border of scores would give, as would much else. Of nine the last six have zeros
    where gate times up should be, as all of attention's output has in this probe."""
    place = probed(fault, length=length, layers=1, width=128)
    assert (place.text.startswith(text), place.cause) == (True, None)


def test_scores_that_are_alike_are_told_as_such():
    """Queries and keys of later tokens are all 0. Equal keys, or a matrix that is off in this probe, would give the same weights."""
    cause = probed("unturned", family="qwen3", layers=1).cause
    assert cause == "layer 0, positions 3 to 8 of 9: at kqv_out: all seen tokens have the same weight: their scores are alike"


def test_a_fault_of_the_head_is_in_the_first_probe():
    assert probed("head").text == "the embedding, the residual stream, the last norm or the head"


@pytest.mark.usual(6)
@pytest.mark.parametrize(
    "fields",
    [{"family": name} for name in ("gpt2", "phi2", "stablelm", "starcoder2", "gemma2", "gemma3", "olmo2", "minicpm")]
    + [{"family": name, "experts": 4} for name in ("llama", "qwen2moe", "qwen3moe")]
    + [{"weights": kind} for kind in ("bfloat16", "Q4_K", "MXFP4", "TQ2_0")]
    + [{"family": name, "tied": True} for name in ("gemma", "gpt2")],
)
def test_all_families_and_types_can_be_probed(fields):
    """A right engine is right in all probes, a wrong mask is found in the values; experts and shared ones are probed apart."""
    assert probed("none", **fields).text.startswith("no probe is wrong")
    assert "the mask" in probed("mask", **fields).text
    assert ("experts" in probed("gate", **fields).text) == ("experts" in fields)


def test_what_cannot_be_probed_is_said():
    model = model_of(fitted(Case(vocab=33)))
    assert probe(model, call_of(Case()), 0, None, JUDGE).text == "not probed: a head of 33 rows does not show 64 channels"


def test_a_right_engine_shows_the_stream():
    """Read back from float32 logits to some 1e-5; where the first channel is not known it is another one."""
    case = fitted(Case(vocab=256, length=6))
    *_, whole = probes(model_of(case))
    seen = {}
    logits = spec.forward(dense_view(whole.model), call_of(case).tokens[0], lambda name, n, x: seen.__setitem__(name, x))
    got = stream(whole.model, logits.astype(np.float32), seen["inp_embd"][:, :2])
    np.testing.assert_allclose(got, seen["l_out"], rtol=0, atol=1e-4)
    assert (seen["l_out"][:, 0] == 2).all()
