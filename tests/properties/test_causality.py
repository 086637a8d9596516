"""What comes before a token reaches it, and nothing that comes after it does. (No sequence reaches another: test_same_bits.py.)"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, dialects, family_shapes, lengths, random_model, random_tokens, seeds

from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.engine.forward_pass import forward_full


def with_another_token(rng, model, tokens, at):
    changed = tokens.copy()
    changed[at] = (changed[at] + rng.integers(1, model.config.vocab)) % model.config.vocab
    return changed


@settings(max_examples=80)
@given(shape=family_shapes(), seed=seeds, length=lengths, dialect=dialects(), data=st.data())
def test_a_token_changes_its_own_logits_and_none_before_it(shape, seed, length, dialect, data):
    rng = np.random.default_rng(seed)
    model = random_model(seed, **shape)
    tokens = random_tokens(rng, model, length)
    t = data.draw(st.integers(0, length - 1), label="changed position")
    before = forward_full(model, tokens[None], dialect=dialect)[0]
    after = forward_full(model, with_another_token(rng, model, tokens, t)[None], dialect=dialect)[0]
    assert_same_bits(after[:t], before[:t])
    assert (after[t] != before[t]).any()


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("length", [20, 63, 64, 65, 130])
def test_every_token_reaches_the_last_one(length, dialect):
    """The other half of causality: the past is not only allowed to matter, it does, also across the chunks of attention."""
    rng = np.random.default_rng(length)
    model = random_model(length, n_layers=1)
    tokens = random_tokens(rng, model, length)
    variants = np.stack([tokens, *(with_another_token(rng, model, tokens, t) for t in range(length))])
    last = forward_full(model, variants, last_only=True, dialect=dialect)
    assert (last[1:] != last[0]).any(axis=1).all()
