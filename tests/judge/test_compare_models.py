"""Two models side by side: the same errors as of their whole traces, by their definition, in memory that does not grow with the tokens."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from dumps import recorded
from models import random_model

from bitnet_np import BITNET_CPP, EXACT
from bitnet_np.base.errors import ContextLimitError, EmptyInputError, ShapeError, TokenRangeError
from bitnet_np.judge.compare_models import compare_models
from bitnet_np.traces.points import Key

SEQUENCES = [np.arange(37) % 23, [5, 1, 2]]  # more than one pass takes, and a second one
SHAPE = {"vocab": 23, "context": 64}


def with_changed(model, n, name, factor):
    """The model with a matrix of layer n, of float32, times a factor."""
    linear = getattr(model.layers[n], name)
    layer = replace(model.layers[n], **{name: replace(linear, weights=linear.weights * np.float32(factor))})
    return replace(model, layers=(*model.layers[:n], layer, *model.layers[n + 1 :]))


def traced(model, ids, dialect):
    return {key: x.astype(np.float64) for key, x in recorded(model, np.asarray(ids), dialect).items()}


@pytest.mark.parametrize(("family", "dialect"), [("bitnet-b1.58", BITNET_CPP), ("qwen2moe", EXACT), ("gptneox", EXACT)])
def test_errors_are_those_of_whole_traces(family, dialect):
    ours, theirs = (random_model(seed, family=family, **SHAPE) for seed in (1, 2))
    found = compare_models(ours, theirs, SEQUENCES, dialect=dialect)
    a, b = ([traced(model, ids, dialect) for ids in SEQUENCES] for model in (ours, theirs))
    compared = [key for key in a[0] if not key.name.endswith(("_codes", "_scale")) and key.name != "ffn_moe_topk"]
    assert {t.key for t in found.tensors} == set(compared)
    for t in found.tensors:
        x, y = (np.concatenate([points[t.key].ravel() for points in traces]) for traces in (a, b))
        assert t.error == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-12)
    p, q = (np.concatenate([points[Key("result_output", None)] for points in traces]) for traces in (a, b))
    log_p, log_q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    np.testing.assert_allclose(found.kl, (np.exp(log_p) * (log_p - log_q)).sum(axis=1), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(found.same_top, p.argmax(axis=1) == q.argmax(axis=1))


def test_a_changed_matrix_is_the_costliest():
    """Nothing differs before it, and what its product is times 1.25."""
    model = random_model(3, family="qwen3", weights="float32", n_layers=3, **SHAPE)
    found = compare_models(model, with_changed(model, 1, "ffn_down", 1.25), SEQUENCES)
    errors = {t.key: t.error for t in found.tensors}
    at = [*errors].index(Key("ffn_down", 1))
    assert [*errors.values()][:at] == [0.0] * at
    first = found.costliest[0]
    assert (first.key, first.error, first.growth) == (Key("ffn_down", 1), pytest.approx(0.25, rel=1e-6), pytest.approx(0.25, rel=1e-6))
    assert errors[Key("l_out", 1)] < 0.25
    twice = compare_models(model, with_changed(with_changed(model, 0, "ffn_gate", 1.5), 0, "ffn_up", 1.25), SEQUENCES)
    of = {t.key.name: t for t in twice.tensors if t.key.layer == 0}
    assert of["ffn_gate"].growth == of["ffn_gate"].error > of["ffn_up"].error > 0
    assert of["ffn_out"].growth == of["ffn_out"].error - of["ffn_gate"].error > 0
    assert of["l_out"].growth == 0  # the residual stream is larger than the branch


def test_a_model_is_the_same_as_itself_and_what_was_zero_is_infinitely_off():
    model = random_model(3, family="qwen3", weights="float32", **SHAPE)
    found = compare_models(model, model, SEQUENCES)
    assert {t.error for t in found.tensors} == {found.kl.max()} == {0.0}
    assert (found.same_top.mean(), found.costliest, found.settings) == (1.0, [], {})
    zero = with_changed(model, 0, "ffn_down", 0.0)
    assert compare_models(zero, model, SEQUENCES).costliest[0].error == np.inf


@pytest.mark.parametrize("partly", [None, 12])
def test_queries_and_keys_are_put_in_one_order(partly):
    """Of a folder, whose heads are rotated by halves, and its GGUF file, whose rows are permuted for adjacent pairs."""
    ours = random_model(3, family="llama", weights="float32", rope="halves", rope_width=partly, **SHAPE)
    pairs = ours.config.rope_pairs
    order = np.concatenate([np.arange(2 * pairs).reshape(2, pairs).T.ravel(), np.arange(2 * pairs, ours.config.head_dim)])

    def permuted(linear):
        rows = np.arange(linear.weights.shape[0]).reshape(-1, ours.config.head_dim)[:, order].ravel()
        return replace(linear, weights=linear.weights[rows], bias=None if linear.bias is None else linear.bias[rows])

    layers = tuple(replace(w, attn_q=permuted(w.attn_q), attn_k=permuted(w.attn_k)) for w in ours.layers)
    theirs = replace(ours, config=replace(ours.config, rope="adjacent"), layers=layers)
    for found in (compare_models(ours, theirs, SEQUENCES), compare_models(theirs, ours, SEQUENCES)):
        assert max(t.error for t in found.tensors) < 1e-5
        assert [*found.settings] == ["rope"]


def test_models_that_cannot_be_compared_are_refused():
    model = random_model(3, family="llama", **SHAPE)
    wrong = random_model(3, family="qwen3", **SHAPE | {"vocab": 24})
    with pytest.raises(ShapeError, match=r"a\.gguf and b\.gguf are models of .*: architecture is llama and qwen3, vocab is 23 and 24"):
        compare_models(model, wrong, SEQUENCES, names=("a.gguf", "b.gguf"))
    with pytest.raises(ShapeError, match="rope is adjacent and none"):
        compare_models(model, random_model(3, family="llama", rope="none", **SHAPE), SEQUENCES)
    shorter = replace(model, config=replace(model.config, context=8, eps=1e-6))
    assert compare_models(model, shorter, [[1, 2]]).settings == {"context": (64, 8), "eps": (1e-5, 1e-6)}
    for sequences, error in (
        ([], EmptyInputError),
        ([[]], EmptyInputError),
        ([[23]], TokenRangeError),
        ([[1], range(9)], ContextLimitError),
    ):
        with pytest.raises(error):
            compare_models(model, shorter, sequences)


def test_memory_does_not_grow_with_the_tokens():
    """But by the KV caches, the logits' measures and the ids."""
    model = random_model(3, family="llama", n_layers=8, vocab=500, context=1024)

    def peak(tokens):
        tracemalloc.start()
        compare_models(model, model, [np.zeros(tokens, np.int64)])
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(16)
    c = model.config
    caches = 2 * 2 * 4 * c.n_layers * c.kv_width * (1024 - 32)
    assert peak(1024) - peak(32) < 1.5 * caches  # one trace of 1024 tokens is ten times as large
