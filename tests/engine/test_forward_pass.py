"""The ways through the forward pass: how each does its work, and that an error leaves the cache as it was."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from forward_paths import MODEL, TOKENS, bytes_of, filled_cache
from models import assert_same_bits, random_model, random_tokens
from recorder import WITH_CODES, Recorder

from bitnet_np.base.errors import (
    CapacityError,
    ContextLimitError,
    EmptyInputError,
    MaskError,
    NonFiniteError,
    OptionError,
    ShapeError,
    SlotError,
)
from bitnet_np.engine import forward_pass, masks
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.engine.forward_pass import compute_logits, feed_forward, forward, forward_full, forward_incremental, forward_layer, prefill
from bitnet_np.engine.metrics import Metrics
from bitnet_np.kernels import cpu

# --- how the work is done -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_the_full_path_has_no_loop_over_tokens_and_no_cache(monkeypatch, dialect):
    """Kernels and records are as many for one token as for several sequences, and no KVCache is made.

    test_metrics.py has the same of chunks.
    """
    monkeypatch.setattr(forward_pass, "new_cache", None)
    monkeypatch.setattr(KVCache, "__init__", None)
    model, seen = random_model(0), []
    for batch, length in ((1, 1), (1, 17), (3, 130)):
        metrics, records = Metrics(), Recorder()
        forward_full(model, np.ones((batch, length), np.int64), dialect=dialect, ops=metrics.ops(), record=records)
        seen.append(({name: operation.calls for name, operation in metrics.operations.items()}, list(records)))
    assert seen[0] == seen[1] == seen[2]
    layers = model.config.n_layers
    assert seen[0][0]["ternary_matmuls"] == 2 * layers, "query, key and value together; gate and up together"
    assert seen[0][0]["ternary_matmul"] == 2 * layers


def test_the_two_paths_do_not_call_each_other(monkeypatch):
    """If they did, their equality would prove nothing."""
    expected = forward_full(MODEL, TOKENS)
    full, incremental, through = forward_pass.forward_full, forward_pass.forward_incremental, forward_pass.forward

    def fail(*args, **options):
        raise AssertionError("called")

    with monkeypatch.context() as patch:
        for name in ("forward", "forward_incremental", "compute_logits", "run_chunks", "run_cached", "run_prefill"):
            patch.setattr(forward_pass, name, fail)
        assert_same_bits(full(MODEL, TOKENS), expected)
    with monkeypatch.context() as patch:
        for name in ("forward_full", "compute_logits", "run_whole"):
            patch.setattr(forward_pass, name, fail)
        assert_same_bits(incremental(MODEL, TOKENS), expected)
        assert_same_bits(through(MODEL, TOKENS, KVCache(MODEL.config, 2)), expected)


def test_recording_changes_nothing_and_rows_are_tokens_end_to_end():
    seen = Recorder()
    tokens, counts = np.array([[1, 2, 3], [4, 5, 6]]), [3, 1]
    assert_same_bits(forward_full(MODEL, tokens, counts, record=seen), forward_full(MODEL, tokens, counts))
    assert {len(array) for array in seen.values()} == {4}
    assert_same_bits(seen["inp_embd", None], cpu.embed(MODEL.token_embd, np.array([1, 2, 3, 4])))
    last = Recorder()
    forward_full(MODEL, tokens, counts, last_only=True, record=last)
    assert_same_bits(last["result_output", None], seen["result_output", None][[2, 3]])


def test_options_are_checked():
    with pytest.raises(OptionError, match="mode is 'fast', expected one of parallel, incremental, auto"):
        compute_logits(MODEL, TOKENS, mode="fast")
    for n in (0, -3):
        with pytest.raises(OptionError, match=f"chunk is {n}, expected at least 1"):
            forward_incremental(MODEL, TOKENS, chunk=n)
        with pytest.raises(OptionError, match=f"block is {n}, expected at least 1"):
            prefill(MODEL, TOKENS, filled_cache(0, 0, 0), block=n)


# --- what does not fit a cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "options", "error", "message"),
    [
        ([[1]] * 4, {}, CapacityError, "Batch size 4 exceeds KVCache capacity 3. Make a KVCache with batch=4."),
        ([[1]] * 4, {"slots": [0, 1, 2, 3]}, CapacityError, "Batch size 4 exceeds KVCache capacity 3."),
        ([[1, 2]] * 3, {}, CapacityError, "KV cache: slot 2 holds 5 of 6 positions, 2 more do not fit"),
        ([[1, 2]], {"slots": [2]}, CapacityError, "KV cache: slot 2 holds 5 of 6 positions, 2 more do not fit"),
        ([[1] * 7], {}, CapacityError, "KV cache: slot 0 holds 0 of 6 positions, 7 more do not fit"),
        ([[1]], {"slots": [3]}, SlotError, "KV cache: slot is 3, expected 0 to 2"),
        ([[1]], {"slots": [-1]}, SlotError, "KV cache: slot is -1, expected 0 to 2"),
        ([[1], [2]], {"slots": [1, 1]}, SlotError, "KV cache: slots [1, 1] name one slot twice"),
        ([[1], [2]], {"slots": [1]}, ShapeError, "slots has shape (1,), expected (2,): one for each sequence"),
        ([[1], [2]], {"slots": 1}, ShapeError, "slots has shape (), expected 1 axes"),
        ([[1]], {"slots": [2**64]}, ShapeError, "slots has a value beyond 64 bits"),
        ([[1]], {"slots": [1.0]}, ShapeError, "slots has dtype float64, expected integers"),
        ([[]], {}, EmptyInputError, "Tokens cannot be empty"),
    ],
)
def test_what_does_not_fit_a_cache_is_refused_and_changes_nothing(tokens, options, error, message):
    cache = filled_cache(0, 3, 5)
    before = bytes_of(cache)
    for run in (forward, prefill):
        with pytest.raises(error) as raised:
            run(MODEL, tokens, cache, **options)
        assert message in str(raised.value)
        assert bytes_of(cache) == before


@pytest.mark.parametrize("change", [{"n_layers": 1}, {"kv_heads": 2}, {"head_dim": 4}])
def test_the_cache_of_another_model_is_refused(change):
    cache = KVCache(replace(MODEL.config, **change), 1, 6)
    with pytest.raises(ShapeError, match="it was made for another model"):
        forward(MODEL, [[1]], cache)
    assert not cache.lengths.any()


def test_the_context_limits_what_a_larger_cache_may_hold():
    cache = KVCache(MODEL.config, 2, 20)
    forward(MODEL, [[1] * 12, [2] * 12], cache, [12, 11])
    before = bytes_of(cache)
    with pytest.raises(ContextLimitError, match="sequence 0 would have 13 positions, the model's context is 12"):
        forward(MODEL, [[1], [1]], cache)
    assert bytes_of(cache) == before
    forward(MODEL, [[1]], cache, slots=[1])
    assert cache.lengths.tolist() == [12, 12]


# --- errors in the middle -------------------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """Not an Exception: like KeyboardInterrupt."""


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("error", [RuntimeError, Interrupt])
def test_an_exception_anywhere_leaves_the_cache_as_it_was(dialect, error):
    """`record` raises at each tensor in turn. Afterwards the same call gives what it gives to an untouched cache."""
    points = 1 + 2 * len(WITH_CODES) + 2
    tokens, counts, slots = [[1, 2, 3], [4, 0, 0]], [3, 1], [2, 0]
    untouched = filled_cache(2, 1, 3)
    expected = forward(MODEL, tokens, untouched, counts, slots=slots, dialect=dialect)
    cache = filled_cache(2, 1, 3)
    before = bytes_of(cache)
    for fatal in range(points):
        calls = Counter()

        def record(name, layer, array, fatal=fatal, calls=calls):
            if calls.total() == fatal:
                raise error(name)
            calls[name] += 1

        with pytest.raises(error):
            forward(MODEL, tokens, cache, counts, slots=slots, dialect=dialect, record=record)
        assert bytes_of(cache) == before
    assert_same_bits(forward(MODEL, tokens, cache, counts, slots=slots, dialect=dialect), expected)
    assert bytes_of(cache) == bytes_of(untouched)


# --- one layer ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bitnet-b1.58", "llama", "gptneox"])
def test_a_layer_by_itself_gives_the_bits_it_gives_in_the_pass(family):
    model = random_model(0, family=family, window=5 if family == "llama" else None)
    tokens, seen = random_tokens(np.random.default_rng(0), model, 2, 9), {}
    first = "inp_embd"
    mask = masks.mask(9, 9, masks.Pattern(prefix=4))
    for how in ({}, {"mask": mask}):
        forward_full(model, tokens, record=lambda name, layer, array: seen.update({(name, layer): array.copy()}), **how)
        hidden = seen[first, None].reshape(2, 9, -1)
        for n in range(model.config.n_layers):
            before = hidden.tobytes()
            out = forward_layer(model, n, hidden, **how)
            assert_same_bits(out, seen["l_out", n].reshape(out.shape))
            assert hidden.tobytes() == before
            for norm, source in ((True, seen.get(("ffn_inp", n), hidden)), (False, seen["ffn_norm", n])):
                branch = feed_forward(model, n, source.reshape(2, 9, -1), norm=norm)
                assert_same_bits(branch, seen["ffn_down", n].reshape(branch.shape))
            hidden = out


@pytest.mark.parametrize("family", ["bitnet-b1.58", "gemma3"])
def test_a_layer_continues_from_a_cache_of_its_own(family):
    """With the bits, the masks and the keys of the pass, whose layers share a cache."""
    model = random_model(0, family=family, n_layers=2)
    c, tokens = model.config, random_tokens(np.random.default_rng(0), model, 2, 9)
    mask = np.random.default_rng(1).random((2, 1, 3, 9)) < 0.7
    for how in ({}, {"mask": mask}):
        whole, caches = KVCache(c, 2, 9), [KVCache(replace(c, n_layers=1), 2, 9) for _ in range(c.n_layers)]
        for part, options in ((slice(6), {}), (slice(6, 9), how)):
            seen = {}
            forward(model, tokens[:, part], whole, record=lambda *point, seen=seen: seen.update({point[:2]: point[2].copy()}), **options)
            hidden = seen.get(("inp_scaled", None), seen["inp_embd", None]).reshape(2, -1, c.width)
            for n, cache in enumerate(caches):
                hidden = forward_layer(model, n, hidden, cache=cache, **options)
                assert_same_bits(hidden, seen["l_out", n].reshape(hidden.shape))
                assert_same_bits(cache.k[0], whole.k[n])
                assert cache.lengths.tolist() == whole.lengths.tolist()


def test_what_a_layer_refuses_of_a_cache_leaves_it_as_it_was():
    model = random_model(0, width=48, n_layers=2)
    hidden, one = np.ones((1, 2, 48), np.float32), replace(model.config, n_layers=1)
    cache, small = KVCache(one, 1, 5), KVCache(one, 1, 1)
    forward_layer(model, 1, hidden, cache=cache)
    before = bytes_of(cache)
    for changed, how, error, message in (
        (hidden * np.nan, {"cache": cache}, NonFiniteError, "layer 1 has NaN"),
        (hidden, {"cache": cache, "mask": np.ones((2, 4), np.bool_), "strict": True}, MaskError, "later"),
        (hidden, {"cache": small}, CapacityError, "2 more do not fit"),
        (hidden, {"cache": KVCache(model.config)}, ShapeError, "expected 1 layers with"),
        (hidden, {"cache": 3}, OptionError, "cache is"),
    ):
        with pytest.raises(error, match=message):
            forward_layer(model, 1, changed, **how)
    assert bytes_of(cache) == before


@pytest.mark.parametrize(
    ("layer", "hidden", "error", "message"),
    [
        (9, np.zeros((1, 2, 48), np.float32), OptionError, "layer is 9, expected 0 to 1"),
        (0, np.zeros((2, 48), np.float32), ShapeError, r"hidden is float32 \[2, 48\], expected float32 \[B, T, 48\]"),
        (0, np.zeros((1, 2, 48)), ShapeError, "hidden is float64"),
        (0, np.zeros((1, 0, 48), np.float32), ShapeError, "hidden is"),
        (0, np.full((1, 2, 48), np.nan, np.float32), NonFiniteError, "the output of layer 0 has NaN or infinity in it"),
    ],
)
def test_inputs_that_a_layer_refuses(layer, hidden, error, message):
    model = random_model(0, width=48, n_layers=2)
    for run in (forward_layer, feed_forward):
        with pytest.raises(error, match=message):
            run(model, layer, hidden)
