"""Strategies of cases for Hypothesis: they shrink to the plainest case, hold what is asked of them, and are like a given model."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import find, given, settings
from models import random_model

from bitnet_np.base.errors import OptionError, UnsupportedError
from bitnet_np.model.records import Linear
from bitnet_np.testing import strategies
from bitnet_np.testing.space import Case, case_like, tokens_of

LIKE = random_model(1, family="gemma2", weights="Q8_0", width=64, ffn=64, heads=4, kv_heads=2, head_dim=32, vocab=70)


def test_a_case_shrinks_to_the_plainest_that_is_asked_for():
    least = find(strategies.cases(), lambda case: case.length > 40 and case.kv_heads == 1, settings=settings(max_examples=2000))
    assert least == Case(length=48, kv_heads=1)


@settings(max_examples=20, deadline=None)
@given(strategies.cases(families=["qwen2", "phi3"], weights=["Q4_0"], length=[1, 33]))
def test_a_case_is_of_what_was_asked_for(case):
    assert (case.family in ("qwen2", "phi3"), case.weights, case.length in (1, 33)) == (True, "Q4_0", True)
    assert case.width % 32 == case.ffn % 32 == case.kv_heads * case.group * case.head_dim % 32 == 0


@settings(max_examples=10, deadline=None)
@given(strategies.models(like=LIKE))
def test_a_model_is_like_another(model):
    c = model.config
    assert (c.architecture, model.layers[0].attn_q.weights.type.name, model.output is None) == ("gemma2", "Q8_0", True)
    assert c.score_cap == LIKE.config.score_cap
    assert c.embedding_scale == c.width**0.5


def test_a_model_has_the_optional_tensors_of_the_one_it_is_like():
    llama = random_model(1, family="llama", weights="float32", table="float32")
    layer = llama.layers[0]
    some = replace(llama, layers=tuple(replace(w, attn_output=Linear(w.attn_output.weights)) for w in llama.layers))
    case, _ = case_like(some)
    made = strategies.model_of(case, some).layers[0]
    assert layer.attn_output.bias is not None
    assert (made.attn_output.bias is None, made.attn_q.bias is None) == (True, False)
    assert strategies.model_of(case, some).rope_factors is not None
    assert strategies.model_of(replace(case, extras=False)).layers[0].attn_q.bias is None


@settings(max_examples=10, deadline=None)
@given(strategies.calls(Case(kv_heads=3)))
def test_a_call_leaves_the_model(case):
    assert case.kv_heads == 3
    assert case.prefix < case.length


@pytest.mark.parametrize("wrong", [{"colour": [1]}, {"families": ["no such"]}, {"weights": ["Q9"]}, {"length": []}])
def test_what_is_no_field_is_refused(wrong):
    with pytest.raises(OptionError):
        strategies.cases(**wrong)


def test_without_hypothesis_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis.strategies", None)
    with pytest.raises(UnsupportedError, match=r"needs hypothesis: pip install 'bitnet_np\[hypothesis\]'"):
        strategies.cases()


def test_who_changes_the_tokens_of_a_case_changes_no_others():
    case = Case(length=9)
    before = tokens_of(case)[0].copy()
    tokens_of(case)[0][:] = 0
    assert (before > 0).all()
    np.testing.assert_array_equal(tokens_of(replace(case, length=5))[0], before[:5])
