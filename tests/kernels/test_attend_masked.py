"""Attention by a mask in a forward pass: the bits of the structural rule where it says the same. The kernel itself: test_contract.py."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, padded, random_model, random_tokens, seeds, shapes, threads

from bitnet_np.base.errors import MaskError, UnsupportedError
from bitnet_np.engine import masks
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.dialects import BITNET_CPP, EXACT, LLAMA_CPP
from bitnet_np.engine.forward_pass import compute_logits, forward, forward_full, forward_incremental
from bitnet_np.engine.masks import Pattern
from bitnet_np.kernels import cpu

MODEL = random_model(0, width=32, ffn=36, heads=2, kv_heads=1, head_dim=6, vocab=20)
sizes = st.integers(1, 12) | st.sampled_from([63, 64, 65, 127, 129, 200])


@settings(max_examples=40)
@given(
    shape=shapes(),
    seed=seeds,
    counts=st.lists(sizes, min_size=1, max_size=3),
    form=st.sampled_from(["bool", "additive", "batch"]),
    n_threads=st.sampled_from([1, 3]),
)
def test_a_mask_that_is_the_models_rule_changes_no_bit(shape, seed, counts, form, n_threads):
    model = random_model(seed, **shape | {"window_layers": None})
    rng = np.random.default_rng(seed)
    tokens, lengths = padded(rng, [random_tokens(rng, model, n) for n in counts], extra=1)
    t, rule = tokens.shape[1], Pattern(model.config.window or 0)
    mask = masks.batch([t] * len(counts), pattern=rule) if form == "batch" else masks.mask(t, t, rule, form=form)
    for dialect in (EXACT, LLAMA_CPP):
        expected = forward_full(model, tokens, lengths, dialect=dialect)
        with threads(n_threads):
            assert_same_bits(forward_full(model, tokens, lengths, dialect=dialect, mask=mask, strict=True), expected)
    assert_same_bits(
        compute_logits(model, tokens, lengths, mask=mask, last_only=True), compute_logits(model, tokens, lengths, last_only=True)
    )


def test_a_mask_decides_what_a_position_sees():
    """What a mask hides may change, and no bit does; what it shows, matters: also if it comes later."""
    rng = np.random.default_rng(4)
    tokens = random_tokens(rng, MODEL, 1, 12)
    changed = tokens.copy()
    changed[0, 7] = (tokens[0, 7] + 1) % 20
    window = masks.mask(12, 12, Pattern(window=2))  # through two layers a position sees two back
    a, b = (forward_full(MODEL, ids, mask=window)[0] for ids in (tokens, changed))
    same = (a == b).all(axis=1)
    np.testing.assert_array_equal(same, [not 7 <= i <= 7 + MODEL.config.n_layers for i in range(12)])
    prefix = masks.mask(12, 12, Pattern(prefix=8))
    a, b = (forward_full(MODEL, ids, mask=prefix)[0] for ids in (tokens, changed))
    assert not (a == b).all(axis=1).any()


def test_padding_is_never_seen():
    tokens = np.array([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]])
    everything = np.zeros((5, 5), np.float32)
    out = forward_full(MODEL, tokens, [5, 2], mask=everything)
    assert_same_bits(out[0], forward_full(MODEL, tokens[:1], mask=everything)[0])
    assert_same_bits(out[1, :2], forward_full(MODEL, tokens[1:, :2], mask=everything[:2, :2])[0])
    assert not out[1, 2:].any()


@pytest.mark.parametrize(
    ("mask", "options", "error", "message"),
    [
        (np.zeros((3, 4)), {}, MaskError, r"mask has shape \(3, 4\), expected \(4, 4\) or \(2, 1, 4, 4\)"),
        (np.zeros((4, 4)), {"strict": True}, MaskError, "lets the query at position 0 see the key at position 1, which is later"),
        (np.zeros((4, 4)), {"dialect": BITNET_CPP}, UnsupportedError, "the dialect bitnet.cpp has no attention with a mask"),
    ],
)
def test_wrong_masks_are_refused_before_anything_is_computed(monkeypatch, mask, options, error, message):
    monkeypatch.setattr(cpu, "embed", lambda *_: pytest.fail("computed"))
    for path in (forward_full, compute_logits):
        with pytest.raises(error, match=message):
            path(MODEL, np.ones((2, 4), int), mask=mask, **options)


# --- with a KV cache ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(seed=seeds, counts=st.lists(st.integers(2, 9) | st.integers(60, 70), min_size=1, max_size=3), chunk=st.integers(1, 40))
def test_a_mask_without_future_gives_its_bits_token_by_token(seed, counts, chunk):
    """One mask or one for each sequence, ragged, with rows that see nothing."""
    rng = np.random.default_rng(seed)
    tokens, lengths = padded(rng, [random_tokens(rng, MODEL, n) for n in counts])
    batch, length = tokens.shape
    mask = masks.as_bool(masks.causal(length, length)) & (rng.random((rng.choice([1, batch]), 1, length, length)) < 0.7)
    mask[0, 0, rng.integers(length)] = False
    expected = forward_full(MODEL, tokens, lengths, mask=mask)
    assert_same_bits(forward_incremental(MODEL, tokens, lengths, mask=mask, chunk=chunk), expected)
    assert_same_bits(compute_logits(MODEL, tokens, lengths, mask=mask, mode="incremental", chunk=chunk), expected)


def test_a_mask_is_of_the_positions_that_sequences_are_at():
    """Sequences of different lengths in slots of any order: row i of the mask is the i-th new token, column j position j."""
    rng = np.random.default_rng(0)
    held, new, slots = [3, 70], [4, 2], [2, 0]
    sequences = [random_tokens(rng, MODEL, h + n) for h, n in zip(held, new, strict=True)]
    keys = max(held) + max(new)
    visible = rng.random((2, 1, max(new), keys)) < 0.6
    cache = KVCache(MODEL.config, 3, 100)
    for sequence, h, slot in zip(sequences, held, slots, strict=True):
        forward(MODEL, [sequence[:h]], cache, slots=[slot])
    tokens, lengths = padded(rng, [sequence[h:] for sequence, h in zip(sequences, held, strict=True)])
    out = forward(MODEL, tokens, cache, lengths, slots=slots, mask=visible)
    for b, (sequence, h, n) in enumerate(zip(sequences, held, new, strict=True)):
        whole = np.tril(np.ones((h + n, h + n), bool))
        whole[h:] = visible[b, 0, :n, : h + n]
        assert_same_bits(out[b, :n], forward_full(MODEL, [sequence], mask=whole)[0, h:])


@pytest.mark.parametrize(
    ("mask", "options", "error", "message"),
    [
        (np.ones((2, 4), bool), {}, MaskError, r"mask has shape \(2, 4\), expected \(2, 5\) or \(1, 1, 2, 5\)"),
        (np.ones((2, 5), bool), {"strict": True}, MaskError, "lets the query at position 3 see the key at position 4, which is later"),
        (np.ones((2, 5), bool), {"dialect": BITNET_CPP}, UnsupportedError, "the dialect bitnet.cpp has no attention with a mask"),
        (np.ones((2, 5), bool), {"dtype": np.float16}, UnsupportedError, "the KV cache is float16, which takes no mask"),
    ],
)
def test_masks_that_a_cache_refuses(mask, options, error, message):
    cache = KVCache(MODEL.config, 1, 20, options.pop("dtype", np.float32))
    forward(MODEL, [[1, 2, 3]], cache)
    before = cache.k.tobytes()
    with pytest.raises(error, match=message):
        forward(MODEL, [[4, 5]], cache, mask=mask, **options)
    assert (cache.k.tobytes(), cache.lengths[0]) == (before, 3)


def test_a_position_cannot_see_a_key_that_is_not_there_yet():
    with pytest.raises(MaskError, match="lets the query at position 0 see the key at position 1, which is later"):
        forward_incremental(MODEL, [[1, 2]], mask=np.ones((2, 2), bool))
