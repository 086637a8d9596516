"""Metrics: the counters say what ran, and measuring changes nothing."""

import numpy as np
import pytest
from models import assert_same_bits, random_model, random_tokens

from bitnet_np import KVCache, Metrics, Request, forward, forward_full, forward_incremental, generate, generate_batch
from bitnet_np.engine import masks
from bitnet_np.engine.backend import Wrapped
from bitnet_np.kernels import cpu, workspace

L = 3
MODEL = random_model(0, n_layers=L, width=64, ffn=96, vocab=40)
TOKENS = random_tokens(np.random.default_rng(0), MODEL, 2, 9)


def counts(metrics):
    return metrics.forwards, metrics.layers, metrics.kv_writes, metrics.kv_positions


def calls(metrics, name):
    return metrics.operations[name].calls if name in metrics.operations else 0


# --- what is counted ------------------------------------------------------------------------------------------------------------------


REQUESTS = [Request(i, [1 + i] * (1 + i), 4) for i in range(4)]
RUNS = {
    "nothing": (lambda ops: [], (0, 0, 0, 0)),
    "whole sequences": (lambda ops: forward_full(MODEL, TOKENS, ops=ops), (1, L, 0, 0)),
    **{
        f"chunks of {chunk}": (lambda ops, chunk=chunk: forward_incremental(MODEL, TOKENS, chunk=chunk, ops=ops), (n, L * n, L * n, L * 18))
        for chunk, n in ((1, 9), (2, 5), (4, 3), (9, 1))
    },
    "generation of none": (lambda ops: generate(MODEL, [1, 2, 3], 0, ops=ops), (1, L, L, L * 3)),
    "generation": (lambda ops: generate(MODEL, [1, 2, 3], 5, ops=ops), (5, 5 * L, 5 * L, L * 7)),
    "a batch": (lambda ops: [d.tokens for d in generate_batch(MODEL, REQUESTS, 4, ops=ops)], (4, 4 * L, 4 * L, L * (10 + 4 * 3))),
}


@pytest.mark.parametrize(("run", "expected"), RUNS.values(), ids=RUNS)
def test_passes_layers_and_writes_are_counted_and_change_nothing(run, expected):
    metrics = Metrics()
    np.testing.assert_array_equal(run(metrics.ops()), run(cpu))
    assert counts(metrics) == expected
    assert calls(metrics, "attend") == max(expected[1:3])
    assert (metrics.as_dict()["operations"] == {}) == (expected[0] == 0)


@pytest.mark.parametrize("table", ["Q8_0", "float16"])
def test_block_types_and_masks_are_counted(table):
    shape = {"family": "llama", "table": table, "width": 64, "ffn": 64, "heads": 2, "kv_heads": 1, "head_dim": 32}
    model, metrics = random_model(0, n_layers=L, **shape), Metrics()
    tokens = random_tokens(np.random.default_rng(0), model, 1, 5)
    mask = masks.causal(5, 5)
    assert_same_bits(forward_full(model, tokens, ops=metrics.ops(), mask=mask), forward_full(model, tokens))
    end = "_blocks" if table == "Q8_0" else ""
    assert [calls(metrics, name) for name in ("matmul" + end, "embed" + end, "attend_masked", "attend")] == [7 * L + 1, 1, L, 0]


# --- how much -------------------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_what_is_read_and_written():
    metrics, c = Metrics(), MODEL.config
    cache = KVCache(c, 2, 50)
    forward(MODEL, TOKENS, cache, ops=metrics.ops())
    rows = TOKENS.size
    one = MODEL.layers[0].ffn_up
    ops = metrics.ops()
    before = metrics.operations["ternary_matmul"].bytes
    q, scale = cpu.quantize(np.ones((rows, c.width), np.float32))
    ops.ternary_matmul(q, scale, one.weights.codes, one.weights.scale, c.ffn)
    assert metrics.operations["ternary_matmul"].bytes - before == rows * (c.width + 4 + 4 * c.ffn) + one.weights.codes.nbytes + 4
    assert metrics.operations["embed"].bytes == rows * (8 + 2 * 4 * c.width)  # rows of the table, not all of it
    attended = L * (rows * (2 * 4 * c.q_width + 16) + 2 * 4 * rows * c.kv_width)  # each key and value once, not the cache
    assert metrics.operations["attend"].bytes == attended


@pytest.mark.parametrize(("window", "positions"), [(None, 30), (10, 14), (1, 5), (100, 30)])
def test_attention_reads_what_the_window_shows(window, positions):
    """Five rows of queries end at position 29."""
    rng, metrics = np.random.default_rng(0), Metrics()
    q, k = rng.standard_normal((5, 2, 4), np.float32), rng.standard_normal((1, 64, 1, 4), np.float32)
    metrics.ops().attend(q, k, k, np.zeros(5, np.int64), np.arange(25, 30), window)
    assert metrics.operations["attend"].bytes == 2 * q.nbytes + 2 * 5 * 8 + 2 * positions * 4 * 4


def test_allocations_and_the_peak(monkeypatch):
    """The second pass takes its large arrays from the pool, where the first pass left them."""
    model = random_model(0, n_layers=L, width=256, ffn=512, vocab=40)
    tokens = random_tokens(np.random.default_rng(0), model, 1, 64)
    forward_full(model, tokens)  # what compiles a kernel keeps its arguments for a while
    monkeypatch.setattr(workspace._this_thread, "pool", workspace.Pool())
    first, second = Metrics(), Metrics()
    for metrics in (first, second):
        forward_full(model, tokens, ops=metrics.ops())
    a, b = (metrics.as_dict()["workspace"] for metrics in (first, second))
    assert b["hits"] > a["hits"] > 0
    assert a["allocations"] + a["hits"] == b["allocations"] + b["hits"]
    assert b["hit_rate"] == b["hits"] / (b["allocations"] + b["hits"])
    assert 64 * 512 * 4 <= b["peak_bytes"] == a["peak_bytes"] < 64 * 512 * 4 * 10
    assert workspace.pool().lent == 0


def test_seconds_are_those_of_the_calls(monkeypatch):
    clock = iter(np.arange(0, 100, 0.25))
    monkeypatch.setattr("bitnet_np.engine.metrics.time.perf_counter", lambda: next(clock))
    metrics = Metrics()
    ops, x = metrics.ops(), np.ones((2, 3), np.float32)
    ops.add(x, x)
    next(clock)
    next(clock)
    ops.add(x, x)
    operation = metrics.as_dict()["operations"]["add"]
    assert (operation["calls"], operation["seconds"], operation["bytes"]) == (2, 0.5, 2 * 3 * 24)
    assert metrics.table()[1][0][:4] == ("add", "cpu", 2, 500.0)


# --- where ----------------------------------------------------------------------------------------------------------------------------


def test_devices_and_reasons():
    """The backend here says that it is a GPU."""
    other = Wrapped(cpu)
    other.device = "cuda"
    metrics = Metrics()
    model = random_model(0, n_layers=L, family="llama", table="Q8_0", width=64, ffn=64, heads=2, kv_heads=1, head_dim=32)
    forward_full(model, [[1, 2, 3]], ops=metrics.ops(other, "there is one"))
    counted = metrics.as_dict()
    where = {name: (operation["device"], operation["reason"]) for name, operation in counted["operations"].items()}
    assert where["attend"] == ("cuda", "there is one")
    assert where["matmul_blocks"] == ("cuda", "there is one")
    calls, here = sum(operation.calls for operation in metrics.operations.values()), metrics.ops()
    here.add(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32))
    here.add(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32))
    assert {kind: counted["calls"] for kind, counted in metrics.as_dict()["devices"].items()} == {"cuda": calls, "cpu": 2}
    assert metrics.operations["add on cpu"].calls == 2
