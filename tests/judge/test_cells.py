"""Which cells of the KV cache attention reads is solved for: any mask, any lost, repeated or overwritten cell is named."""

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from wrong_tensors import KEY, QUERY, C, T, by_weights, read, scores_of

VISIBLE = np.tri(T, dtype=bool)


def attended(counts, heads=slice(None)):
    """Attention where each token reads each cell so often, [T, T]; in some heads alone."""
    scores = scores_of()
    by_head = np.broadcast_to(VISIBLE, scores.shape).astype(float)
    by_head[heads] = counts
    weights = by_head * np.exp(scores)
    return by_weights(weights / weights.sum(axis=-1, keepdims=True))


def said(counts, heads=slice(None)):
    return read("llama", "kqv_out", attended(counts, heads))


places = st.tuples(st.integers(3, T - 2), st.integers(1, T - 1)).filter(
    lambda place: place[1] not in (place[0] - 1, place[0]) and place != (T - 2, T - 1)
)
"""A token and a cell: no last token, first cell, the token's own or the one before, nor the last two, which windows and chunks have."""


@given(places)
def test_cell_that_is_lost_or_repeated_or_must_not_be_seen_is_named(place):
    token, cell = place
    counts = VISIBLE.astype(float)
    if cell > token:
        counts[token, cell] = 1
        assert f"position {cell} is read by position {token}, which must not see it" in said(counts)
        return
    counts[token, cell] = 3
    assert f"position {cell} is read 3 times by position {token}" in said(counts)
    counts[token, cell] = 0
    assert f"position {cell} is not read by position {token}" in said(counts)


@given(st.integers(3, T - 4), st.integers(1, 2), st.integers(0, C.heads - 1))
def test_cell_written_over_is_named_in_its_head(cell, step, head):
    counts = VISIBLE.astype(float)
    later = cell + step + 1
    counts[later:, cell], counts[later:, cell + step] = 0, 2
    text = said(counts, [head])
    readers = f"positions {later} to {T - 1}" if later < T - 1 else f"position {later}"
    assert text.startswith(f"at head {head} of {C.heads}: the cell of position {cell} holds position {cell + step} where {readers} read it")


@given(st.integers(2, 5), st.integers(3, 8))
def test_mask_that_is_a_rule_of_distance_is_named_by_it(window, ahead):
    """No token sees what is in between: not what a named rule gives."""
    distance = np.arange(T)[:, None] - np.arange(T)
    counts = ((distance >= 0) & (distance != window)) | (distance == -ahead)
    before = f"1{f' to {window - 1}' if window > 2 else ''}, {window + 1} to {T - 1}"
    assert said(counts).startswith(f"the mask: a token sees itself and those {before} places before it and those {ahead} places ahead")


def test_many_cells_are_counted():
    counts = VISIBLE & ((np.random.default_rng(0).random((T, T)) < 0.6) | np.eye(T, dtype=bool))
    assert re.search(r"; and \d+ more$", said(counts))


def test_cells_before_a_chunk_are_a_cache_that_it_does_not_see():
    late = np.arange(T) >= 10
    text = "positions 0 to 9 are not read by positions 10 to 16: the mask, or slots of the cache that are lost"
    assert said(VISIBLE & ~(late[:, None] & ~late)) == text


def test_cells_that_are_written_over_by_the_next_ones_are_told_together():
    late = np.arange(T) >= 9
    text = "positions 9 to 15 are read by themselves alone, by no later ones: they were written over, or never kept"
    assert said(VISIBLE & ~((np.arange(T)[:, None] > np.arange(T)) & late)) == text


def test_keys_that_the_mask_does_not_act_on_are_told_together():
    text = "positions 9 to 16 are read by all before them: the mask acts on other keys alone"
    assert said(VISIBLE | (np.arange(T) >= 9)) == text


def test_cells_that_no_token_reads_are_told_together():
    lost = (KEY >= 3) & (KEY < 6)
    assert said(VISIBLE & ~lost) == "positions 3 to 5 are read by no token: the mask, or slots of the cache that are lost"


def test_outputs_of_tokens_that_see_nothing_are_zero():
    counts = VISIBLE & (KEY >= 5)
    wrong = np.where(QUERY < 5, 0, attended(np.where(QUERY < 5, VISIBLE, counts).astype(float)))
    text = "outputs of positions 0 to 4 are 0: no key is seen; positions 0 to 4 are read by no token"
    assert read("llama", "kqv_out", wrong).startswith(text)


def test_windows_that_begin_too_late_are_told_by_what_repeats():
    late = np.append(np.zeros(5), np.resize([5, 4, 3, 2, 1], T - 5))[:, None]
    first = f"positions 5 to {T - 1} see 5, 4, 3, 2, 1 keys fewer in turn than they should"
    assert said(VISIBLE & (late <= KEY)) == f"{first}: the first ones are left out, as by a window's mask"


def test_cells_that_hold_the_position_before_are_told_together():
    counts = VISIBLE.astype(float)
    for cell in range(3, T - 1, 3):
        counts[cell + 1 :, cell], counts[cell + 1 :, cell - 1] = 0, 2
    text = (
        "cells were written over, or their page is another's: every third position from position 3 have the keys and values of the position"
    )
    assert said(counts).startswith(text)
