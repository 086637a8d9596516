"""The pooled output of embedding models: what the definition says, the same bits in any company, and mistakes in it by name."""

import numpy as np
import pytest
from dumps import trace
from models import assert_same_bits, random_model
from recorder import Recorder, record_all

from bitnet_np import spec
from bitnet_np.engine.forward_pass import forward_full, forward_incremental
from bitnet_np.engine.pooling import pool
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.dense import dense_view
from bitnet_np.traces.points import Key

TOKENS = np.array([[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 0, 0, 0, 0]])
LENGTHS = (7, 3)
POOLED = ("result_embd_pooled", None)
SAYS = {"mean": "the mean of all tokens", "cls": "the first token", "last": "the last token"}


@pytest.fixture(scope="module", params=SAYS)
def model(request):
    return random_model(1, pooling=request.param)


@pytest.fixture(scope="module")
def seen(model):
    return record_all(model, TOKENS[0])


def test_it_is_what_the_definition_says(model, seen):
    defined = Recorder()
    spec.forward(dense_view(model), TOKENS[0], record=defined)
    np.testing.assert_allclose(seen[POOLED], defined[POOLED], rtol=0, atol=1e-4 * np.abs(defined[POOLED]).max())
    rows = seen["result_norm", None].astype(np.float64)
    assert_same_bits(seen[POOLED], spec.pool(rows, model.config.pooling).astype(np.float32))


def test_a_batch_and_a_cache_give_the_same_bits(model, seen):
    """A row for each sequence, without its padding; and of the rows that come out of a cache, chunk by chunk."""
    batch, chunks = Recorder(), []
    logits = forward_full(model, TOKENS, LENGTHS, record=batch)
    assert_same_bits(batch[POOLED], np.concatenate([seen[POOLED], record_all(model, TOKENS[1, :3])[POOLED]]))
    assert_same_bits(forward_full(model, TOKENS, LENGTHS), logits)
    forward_incremental(model, TOKENS[:1], chunk=3, record=lambda name, n, x: name == "result_norm" and chunks.append(x.copy()))
    assert_same_bits(pool(np.concatenate(chunks), model.config.pooling), seen[POOLED])


def test_the_order_of_a_sum_is_that_of_positions():
    """Bits of float64 sums depend on it."""
    rows = np.array([[1.0], [2.0**60], [-(2.0**60)]], np.float32)
    assert pool(rows, "mean") == 0
    assert pool(rows[::-1], "mean") == np.float32(1 / 3)


def test_there_is_none_where_rows_are_missing(model):
    last = Recorder()
    forward_full(model, TOKENS[:1], last_only=True, record=last)
    assert POOLED not in last
    assert POOLED not in record_all(random_model(1), TOKENS[0])


def test_mistakes_are_named(model, seen):
    right, rows, before = model.config.pooling, seen["result_norm", None], seen["l_out", 1]
    wrong = {f"{SAYS[kind]} instead of {SAYS[right]}": pool(rows, kind) for kind in SAYS if kind != right}
    wrong["l_out of layer 1 is read instead of result_norm"] = pool(before, right)
    wrong["each position is divided by its length"] = seen[POOLED] / np.linalg.norm(seen[POOLED])
    points = {Key(*key): array.reshape(len(array), -1) for key, array in seen.items()}
    assert judge_trace(model, trace(points), TOKENS[0]).verdict is Verdict.SAME_BITS
    for text, array in wrong.items():
        report = judge_trace(model, trace(points | {Key(*POOLED): array}), TOKENS[0])
        assert report.reason == f"WRONG at result_embd_pooled: {text}"
    report = judge_trace(model, trace({Key(*POOLED): seen[POOLED]}), TOKENS[0])
    assert report.verdict is Verdict.SAME_BITS
    other = np.random.default_rng(0).standard_normal(seen[POOLED].shape).astype(np.float32)  # no reading may trip over a single row
    report = judge_trace(model, trace(points | {Key(*POOLED): other}), TOKENS[0])
    assert (report.verdict, report.first_wrong.hypothesis) == (Verdict.WRONG, None)
