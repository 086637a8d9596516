"""The scheduler: what it admits, runs and retires, and what it refuses. That company changes nothing: properties/test_batches.py."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from models import assert_same_bits, random_model, random_tokens

from bitnet_np.base.errors import CapacityError, ContextLimitError, EmptyInputError, OptionError, ShapeError, TokenRangeError
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.dialects import BITNET_CPP
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.generation.batch import Batch, Request, forward_batch, generate_batch
from bitnet_np.generation.generate import generate
from bitnet_np.generation.sampling import Sampling, uniforms

MODEL = random_model(0, width=32, ffn=36, heads=2, kv_heads=1, head_dim=6, vocab=20, context=64)
SAMPLED = Sampling(temperature=1.0)


def alone(request):
    new = generate(MODEL, request.prompt, request.n, sampling=request.sampling, numbers=request.numbers(), stop=request.stop)
    return new[len(request.prompt) :]


# --- several sequences in one pass ----------------------------------------------------------------------------------------------------


def test_forward_batch_goes_on_from_a_cache():
    rng = np.random.default_rng(2)
    sequences = [random_tokens(rng, MODEL, n).tolist() for n in (9, 4)]
    expected = [forward_full(MODEL, [sequence], dialect=BITNET_CPP)[0] for sequence in sequences]
    cache = KVCache(MODEL.config, 3, 10)
    how = {"cache": cache, "slots": [2, 0], "dialect": BITNET_CPP}
    first = forward_batch(MODEL, [sequences[0][:6], sequences[1][:1]], start=0, **how)
    rest = forward_batch(MODEL, [sequences[0][6:], sequences[1][1:]], start=[6, 1], **how)
    for a, b, whole in zip(first, rest, expected, strict=True):
        assert_same_bits(np.concatenate([a, b]), whole)
    assert cache.lengths.tolist() == [4, 0, 9]


@pytest.mark.parametrize(
    ("sequences", "options", "error", "message"),
    [
        ([], {}, EmptyInputError, "Empty batch provided"),
        ([[1]] * 3, {}, CapacityError, r"Batch size 3 exceeds KVCache capacity 2\. Make a KVCache with batch=3\."),
        ([[1], [2]], {"start": [0, 0, 0]}, ShapeError, r"start has shape \(3,\)"),
        ([[1], [2]], {"start": 0.5}, ShapeError, "start has dtype float64"),
        ([[1], [2]], {"start": 1}, OptionError, "start of sequence 0 is 1, expected 2: the positions its slot holds"),
        ([[1], [2]], {"start": [2, 0]}, OptionError, "start of sequence 1 is 0, expected 1: the positions its slot holds"),
        ([[1], [2]], {"start": 2, "slots": [0]}, ShapeError, r"slots has shape \(1,\)"),
    ],
)
def test_wrong_batches_are_refused_and_change_nothing(sequences, options, error, message):
    cache = KVCache(MODEL.config, 2, 10)
    forward_batch(MODEL, [[1, 2], [3]], cache)
    before = cache.k.tobytes(), cache.lengths.tolist()
    with pytest.raises(error, match=message):
        forward_batch(MODEL, sequences, cache, **options)
    assert (cache.k.tobytes(), cache.lengths.tolist()) == before
    with pytest.raises(OptionError, match="start of sequence 0 is 1, expected 0: the positions its slot holds"):
        forward_batch(MODEL, [[1]], start=1)


# --- the schedule ---------------------------------------------------------------------------------------------------------------------


def test_prompts_are_admitted_together_and_slots_used_again(passes):
    """Two slots, five requests: each pass has what fits, whole prompts and single tokens in one."""
    requests = [Request(f"r{i}", [1] * length, n) for i, (length, n) in enumerate([(4, 3), (2, 1), (5, 2), (1, 1), (3, 2)])]
    done = list(generate_batch(MODEL, requests, 2))
    assert [completion.request.id for completion in done] == ["r0", "r1", "r2", "r3", "r4"]
    assert passes == [(4, 2), (1, 5), (1, 1), (1, 3), (1,)]
    assert [completion.tokens for completion in done] == [alone(request) for request in requests]


def test_requests_may_come_at_any_time():
    requests = [Request(i, [1 + i], 3 + i, SAMPLED, seed=5) for i in range(4)]
    batch = Batch(MODEL, 2, 20)
    assert batch.done
    assert batch.step() == []
    done = []
    for request in requests:
        batch.submit(request)
        done += batch.step()
    while not batch.done:
        done += batch.step()
    assert {completion.request.id: completion.tokens for completion in done} == {request.id: alone(request) for request in requests}
    assert not batch.cache.lengths.any()
    assert not batch.cache.k.any()
    batch.submit(requests[0])  # its id is free again


def test_a_sequence_may_fill_its_slot_and_no_more():
    batch = Batch(MODEL, 1, 6)
    batch.submit(Request("fits", [1, 2, 3], 4))  # the last token is never fed back
    with pytest.raises(CapacityError, match="a prompt of 3 and 5 new tokens exceed the 6 positions of a slot"):
        batch.submit(Request("long", [1, 2, 3], 5))
    while not batch.done:
        batch.step()


def test_sequences_with_one_seed_have_numbers_of_their_own():
    first, second, text = (next(Request(name, [1], 1).numbers()) for name in (1, 2, "1"))
    assert len({first, second, text, next(uniforms(0)), next(Request(1, [1], 1, seed=1).numbers())}) == 5
    assert first == next(Request(1, [5], 9).numbers())
    key = int.from_bytes(hashlib.sha256(b'"a"').digest()[:8], "little")
    raw = int(np.random.Philox(key=np.array([5, key], np.uint64)).random_raw())
    assert next(Request("a", [1], 1, seed=5).numbers()) == (raw >> 11) / 2**53
    assert next(Request("a", [1], 1).numbers()) == 0.27574133618445174  # as it always was


def test_what_overflows_ends_alone():
    """One token of the vocabulary leaves float32's range: its sequence ends with the reason, the others are as without it."""
    table = MODEL.token_embd.copy()
    table[7] = 3e38
    loud = replace(MODEL, token_embd=table, output=MODEL.token_embd)
    requests = [Request("a", [1, 2], 5, stop=(7,)), Request("b", [3, 7], 5), Request("c", [4], 5, stop=(7,))]
    a, b, c = generate_batch(loud, requests, 3)
    assert (b.tokens, a.error, c.error) == ([], None, None)
    assert "NaN or infinity" in b.error
    assert [a.tokens, c.tokens] == [each.tokens for each in generate_batch(loud, [requests[0], requests[2]], 2)]


# --- what is refused ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (lambda: Request(0, [], 1), EmptyInputError, "Prompt cannot be empty"),
        (lambda: Request(0, [20], 1), TokenRangeError, "token 20"),
        (lambda: Request(0, [1], 10**12), ContextLimitError, "1000000000000 new tokens exceed the model's context of 64"),
        (lambda: Request(0, [1], 1, seed=-1), OptionError, "seed is -1"),
        (lambda: Request("taken", [1], 1), OptionError, "the id 'taken' is in use"),
        (lambda: Request(1.5, [1], 1), OptionError, "id is 1.5, expected a string or an integer"),
        (lambda: Request(True, [1], 1), OptionError, "id is True"),
    ],
)
def test_wrong_requests_are_refused_and_the_rest_goes_on(request_, error, message):
    batch = Batch(MODEL, 1)
    batch.submit(Request("taken", [1], 2))
    with pytest.raises(error, match=message):
        batch.submit(request_())
    assert [completion.request.id for _ in range(2) for completion in batch.step()] == ["taken"]
    assert batch.done


def test_a_batch_has_slots():
    with pytest.raises(OptionError, match="batch is 0"):
        Batch(MODEL, 0)
    assert list(generate_batch(MODEL, [], 3)) == []


def test_a_batch_that_was_left_in_the_middle_of_a_step_is_not_gone_on_with():
    """Going on gave tokens that a sequence alone does not have."""

    def observe(request, logits):
        raise RuntimeError("mine")

    batch = Batch(MODEL, 2, 8, observe=observe)
    batch.submit(Request("a", [1, 2], 2))
    with pytest.raises(RuntimeError, match="mine"):
        batch.step()
    with pytest.raises(OptionError, match="an exception interrupted this batch, expected a new one"):
        batch.step()
