"""Speculation: fewer passes, drafters, and what they may not draft. Tokens and logits with any drafts: properties/test_batches.py."""

from unittest import mock

import numpy as np
import pytest
from models import random_model

from bitnet_np.base.errors import NonFiniteError, OptionError, ShapeError, TokenRangeError, UnsupportedError
from bitnet_np.engine import forward_pass
from bitnet_np.generation import batch as batch_module
from bitnet_np.generation import speculation
from bitnet_np.generation.batch import Batch, Request, generate_batch
from bitnet_np.generation.generate import generate, stream
from bitnet_np.generation.speculation import Costs, DraftModel, Proposals, Speculation, prompt_lookup


@pytest.fixture(scope="module")
def model():
    return random_model(1, context=80, tied=False)


@pytest.fixture
def always(monkeypatch):
    """Every pass has as many drafts as the drafter gives."""
    monkeypatch.setattr(Proposals, "_fastest", lambda self, costs, sequences, room: room)


@pytest.mark.parametrize(
    ("drafts", "error", "message"),
    [
        ([3, 50], TokenRangeError, r"draft 50 is not an id of the vocabulary, 0\.\.49"),
        ([-1], TokenRangeError, "draft -1 is not"),
        ([2**70], TokenRangeError, "beyond 64 bits"),
        ([1.5], ShapeError, "drafts has dtype float64, expected integers"),
        ([[1]], ShapeError, "expected 1 axes"),
    ],
)
def test_drafts_that_are_no_tokens_are_refused(model, always, drafts, error, message):
    speculation = Speculation(lambda tokens, most: drafts)
    with pytest.raises(error, match=message):
        generate(model, [1, 2], 5, speculation=speculation)
    with pytest.raises(error, match=message):
        list(generate_batch(model, [Request(0, [1, 2], 5)], 1, speculation=speculation))


def test_a_drafter_cannot_change_the_tokens(model, always):
    def draft(tokens, most):
        tokens[:] = 0

    with pytest.raises(ValueError, match="read-only"):
        generate(model, [1, 2], 5, speculation=Speculation(draft))


def test_a_prompt_that_the_caller_changes_afterwards_is_not_read_again(model, always):
    prompt, seen = [1, 2], []
    batch = Batch(model, 1, speculation=Speculation(lambda tokens, most: seen.append(tokens[:2].tolist()) or []))
    batch.submit(Request(0, prompt, 5))
    prompt[:] = 3, 4
    while not batch.done:
        batch.step()
    assert seen == [[1, 2]] * 3  # the last pass has room for no draft


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        (lambda: Speculation(draft=7), "draft is 7, expected a function"),
        (lambda: Speculation(most=0), "most drafts is 0, expected at least 1"),
        (lambda: True, "speculation is True, expected a Speculation"),
        (lambda: Speculation(DraftModel(random_model(2, vocab=51))), "the draft model has a vocabulary of 51 tokens, expected 50"),
    ],
)
def test_wrong_speculation_is_refused_on_the_call_itself(model, speculation, message):
    with pytest.raises(OptionError, match=message):
        stream(model, [1], 3, speculation=speculation())
    with pytest.raises(OptionError, match=message):
        generate_batch(model, [], 1, speculation=speculation())


def test_a_device_does_not_speculate(model):
    runtime = mock.Mock(model=model, ops=mock.Mock(device="cuda"))
    with pytest.raises(UnsupportedError, match="speculation is for the CPU, this model is computed on cuda"):
        speculation.check_speculation(runtime, Speculation())


@pytest.mark.parametrize(("drafts", "passes"), [(5, 4), (1, 12), (0, 23)])
def test_right_drafts_save_passes_and_no_row_of_logits_is_computed_twice(model, always, drafts, passes):
    expected = generate(model, [9], 24)
    ours = Speculation(lambda tokens, most: expected[len(tokens) :][: min(most, drafts)], 5)
    with mock.patch.object(forward_pass, "run_output", wraps=forward_pass.run_output) as output:
        assert generate(model, [9], 24, speculation=ours) == expected
    assert sum(len(call.args[1]) for call in output.call_args_list) == 24
    counter = ours.counter
    assert (counter.passes, counter.drafted, counter.accepted) == (passes, 23 - passes, 23 - passes)


@pytest.mark.parametrize("batch", [False, True])
def test_a_draft_that_leaves_the_range_of_numbers_is_as_none(model, always, batch):
    """A pass over a wrong draft may overflow where the right tokens do not: it is made again without drafts."""
    expected = generate(model, [1, 2], 8)
    run_cached = forward_pass.run_cached

    def overflowing(runtime, tokens, cache, slots, *rest, **options):
        if 7 in tokens.ids[:, 1:]:
            with cache.appending(slots, tokens.lengths):
                raise NonFiniteError("overflow")
        return run_cached(runtime, tokens, cache, slots, *rest, **options)

    ours = Speculation(lambda tokens, most: [7] * most)
    with mock.patch.object(batch_module, "run_cached", overflowing):
        if batch:
            requests = [Request(i, [1, 2], 8) for i in range(2)]
            assert [[1, 2, *done.tokens] for done in generate_batch(model, requests, 2, speculation=ours)] == [expected] * 2
        else:
            assert generate(model, [1, 2], 8, speculation=ours) == expected
    assert ours.counter.drafted == 0


# --- drafters -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([1, 2, 3, 1, 2], 2, [3, 1]),
        ([1, 2, 3, 9, 2, 4, 1, 2], 2, [3, 9]),  # one token alone is not looked up
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # the latest
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 1, [3]),  # the longest
        ([0, 1, 2, 3, 9, 8, 1, 2, 3, 7, 0, 1, 2, 3], 9, [9, 8, 1, 2, 3, 7, 0, 1, 2]),
        ([4, 4, 4], 3, [4]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
    ],
)
def test_prompt_lookup(tokens, most, expected):
    assert prompt_lookup(np.array(tokens), most).tolist() == expected


def test_a_draft_model_drafts_what_it_would_say(model, always):
    expected = generate(model, [3, 1, 4], 30)
    other = generate(model, [5, 9], 20)
    for slots in (1, 2):
        draft = DraftModel(model, slots)
        for length in (3, 7, 8, 20, 12):
            assert draft(np.array(expected[:length]), 5) == expected[length : length + 5]
            assert draft(np.array(other[:length]), 2) == other[length : length + 2]
    ours = Speculation(draft, 4)
    assert generate(model, [3, 1, 4], 30, speculation=ours) == expected
    assert (ours.counter.passes, ours.counter.drafted) == (6, 23)
    assert DraftModel(random_model(1, context=10, tied=False))(np.array(expected[:9]), 5) == expected[9:11]
    assert DraftModel(random_model(1, context=10, tied=False))(np.array(expected[:11]), 5) == []


def test_a_draft_model_that_leaves_the_range_of_numbers_drafts_less(model):
    draft, results = DraftModel(model), iter([np.eye(50, dtype=np.float32)[[3]]])

    def failing(*arguments):
        try:
            return next(results)
        except StopIteration:
            raise NonFiniteError("overflow") from None

    with mock.patch.object(speculation, "run_prefill", failing):
        assert draft(np.array([1, 2]), 4) == [3]
    assert draft(np.array([1, 2]), 4) == generate(model, [1, 2], 4)[2:]


# --- the number of drafts -------------------------------------------------------------------------------------------------------------


def test_drafts_get_longer_while_they_are_right_and_end_when_they_are_not():
    tokens = Proposals(Speculation(lambda tokens, most: [1] * most), 50, np.array([1]), 1000)
    costs = Costs()

    def turn(right):
        drafts = tokens.next(costs)
        tokens.passed(drafts)
        for token in [*drafts.tolist(), 2] if right else [2]:
            tokens.append(token)
        return len(drafts)

    longer = [turn(True) for _ in range(8)]
    assert longer == sorted(longer)
    assert longer[-1] == Speculation().most
    shorter = [turn(False) for _ in range(60)]
    assert shorter[-1 - speculation._PROBE :].count(1) in (0, 1)  # one in a while, to notice when they are right again
    assert 1 in shorter[12:]
    assert set(shorter[12:]) == {0, 1}


def test_drafts_are_as_long_as_is_fastest_by_measured_costs():
    costs = Costs()
    for rows, seconds in ((1, 1.0), (2, 1.0), (4, 1.0), (8, 9.0)):
        costs.measured(rows, 100.0)  # the first does not count
        assert costs.of(rows) != 100.0
        for noise in (0.0, 0.01, 5.0):
            costs.measured(rows, seconds + noise)
        assert costs.of(rows) == seconds + 0.01
    assert 1.01 < costs.of(5) < 1.3
    tokens = Proposals(Speculation(lambda tokens, most: [1] * most), 50, np.array([1]), 100)
    assert len(tokens.next(costs)) == 3
    assert len(tokens.next(costs, 4)) == 0
