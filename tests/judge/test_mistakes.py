"""The catalogue of mistakes: every entry can happen, and is called the same at one operation and in a whole engine."""

import re
from functools import cache

import numpy as np
import pytest
from models import random_model

from bitnet_np.dialects import DIALECTS, EXACT
from bitnet_np.families import ARCHITECTURES
from bitnet_np.judge.graph import operations
from bitnet_np.judge.mistakes.catalogue import CATALOGUE, ENGINES, at_operation, fitted, in_engine
from bitnet_np.judge.mistakes.mistake import Fit
from bitnet_np.judge.mistakes.quantiser import MISTAKES as QUANTISER
from bitnet_np.judge.variant import Variant

BY_ID = {mistake.id: mistake for mistake in CATALOGUE}
SHAPE = {"width": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "n_layers": 3, "tied": False, "window": 4}


@cache
def models():
    """One of every family, with and without what a family may have."""
    drawn = [random_model(0, family=family, **SHAPE) for family in ARCHITECTURES]
    drawn += [random_model(1, family="gptneox", rope_width=8, parallel_residual=True, **SHAPE | {"kv_heads": 4})]
    drawn += [random_model(2, family="gpt2", activation="gelu", **SHAPE | {"window": None})]
    drawn += [random_model(2, family="llama", weights="ternary", inner_norms=True, rope_scaling=2.0, **SHAPE)]
    return drawn


@cache
def tried():
    """The ids that are tried at some operation, and in some whole engine, with their texts."""
    at_one, in_whole = {}, {}
    for model in models():
        for dialect in DIALECTS.values():
            for operation in operations(model, dialect):
                for attempt in at_operation(model, dialect, operation):
                    at_one.setdefault(attempt.cause.id, set()).add(attempt.cause.text)
            for variant in in_engine(Variant("ours", model, dialect)):
                in_whole.setdefault(variant.mistake, set()).add(variant.text)
    return at_one, in_whole


def test_ids_are_told_apart():
    assert len(BY_ID) == len(CATALOGUE)
    assert all(re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", mistake.id) for mistake in CATALOGUE)


def test_every_entry_is_tried_somewhere():
    at_one, in_whole = tried()
    assert {m.id for m in CATALOGUE if m.compute} == set(at_one)
    assert {m.id for m in CATALOGUE if m.engine} == set(in_whole)
    assert {m.id for m in CATALOGUE} == {m.id for m in CATALOGUE if m.compute or m.engine or m.fitted}
    assert {m.id for group in (QUANTISER, *ENGINES) for m in group if m.engine} == set(in_whole)


def test_texts_have_their_numbers():
    for texts in tried():
        for some in texts.values():
            assert not any("{" in text for text in some)


def test_a_mistake_is_called_the_same_in_a_trace_and_in_logits_alone():
    """All but the place that is put in front, and the dialect behind."""
    at_one, in_whole = tried()
    for id in at_one.keys() & in_whole.keys():
        plain = {re.sub(r"^(at [^:]* of every layer|at result_norm|in [^:]*): ", "", text) for text in in_whole[id]}
        plain = {text.split(", in the dialect")[0] for text in plain}
        assert plain & at_one[id], id


@pytest.mark.parametrize("model", models(), ids=lambda model: model.config.architecture)
def test_no_mistake_is_tried_that_a_family_cannot_make(model):
    """`when` says so without an attempt: what it refuses would give nothing."""
    for operation in operations(model, EXACT):
        for attempt in at_operation(model, EXACT, operation):
            assert BY_ID[attempt.cause.id].when(model, EXACT)
    for variant in in_engine(Variant("ours", model, EXACT)):
        assert any(BY_ID[variant.mistake].when(model, dialect) for dialect in DIALECTS.values())


def test_fitted_mistakes_name_what_was_done():
    rng = np.random.default_rng(0)
    value = rng.standard_normal((5, 64))
    named = (("scale.of_matrix", {"other": "attn_k"}, 1.5),)
    done = {
        "any.sign": -value,
        "any.factor": 1.25 * value,
        "scale.of_matrix": 1.5 * value,
        "any.moved": np.roll(value, 1, axis=0),
        "any.rows_reversed": value[::-1],
        "any.one_token": np.broadcast_to(value[0], value.shape),
        "any.stale": value + 1,
        "any.columns_reversed": value[:, ::-1],
        "any.bias": value + rng.standard_normal(64),
        "any.factor_by_token": value * rng.uniform(1, 2, (5, 1)),
        "any.blocks_reversed": value.reshape(5, 4, 16)[:, ::-1].reshape(5, 64),
        "any.blocks_transposed": value.reshape(5, 4, 16).transpose(0, 2, 1).reshape(5, 64),
    }
    for id, theirs in done.items():
        left = {cause.id: np.abs(array - theirs).max() for cause, array in fitted(Fit(theirs, value, value + 1, named))}
        candidates = fitted(Fit(theirs, value, value + 1, named))
        assert min(np.abs(array - theirs).max() for cause, array in candidates if cause.id == id) < 1e-12, (id, left)
