"""The network: every operation is the definition's, and numbers that leave float32's range are an error.

Float32 cannot equal float64 from end to end: one int8 code on the other side of k + 0.5 moves logits by 1e-2. So the definition judges each
operation by the input the kernels themselves gave it: tests/judge/test_operations.py has these operations make up its whole models.
tests/kernels/ has each kernel by itself, tests/golden/test_hf.py whole ternary models up to the first code that differs.
"""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from forward_paths import TOKENS, through_cache
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import assert_same_bits, family_shapes, lengths, random_model, random_tokens, seeds
from recorder import Recorder

from bitnet_np.base.errors import NonFiniteError, UnsupportedError
from bitnet_np.engine import network
from bitnet_np.engine.backend import Wrapped
from bitnet_np.engine.dialects import BITNET_CPP, EXACT, LLAMA_CPP
from bitnet_np.engine.forward_pass import forward_full, forward_incremental
from bitnet_np.judge.bounds import within
from bitnet_np.judge.law import graph
from bitnet_np.judge.verdict import Verdict
from bitnet_np.kernels import cpu, workspace
from bitnet_np.model.records import frozen
from bitnet_np.traces.points import Key

# --- against the definition -----------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(shape=family_shapes(), seed=seeds, length=lengths, dialect=st.sampled_from([EXACT, LLAMA_CPP]))
@example(shape={"family": "llama", "experts": 5, "experts_used": 2}, seed=3, length=19, dialect=EXACT)
@example(shape={"family": "qwen2moe", "normalized_experts": True}, seed=3, length=19, dialect=EXACT)
def test_every_operation_of_every_family_is_what_its_inputs_make(shape, seed, length, dialect):
    """Each recorded tensor is an operation of judge/law/graph.py, in its order, and within its derived bound of what the definition makes
    of the tensors recorded before it.
    """
    model = random_model(seed, **shape)
    tokens, seen = random_tokens(np.random.default_rng(seed), model, length), Recorder()
    forward_full(model, tokens[None], dialect=dialect, record=seen)
    known = {Key(*key): array.reshape(length, -1).astype(np.float64) for key, array in seen.items()}
    known[graph.TOKENS] = tokens
    ops = list(graph.operations(model, dialect))
    assert [(o.key.name, o.key.layer) for o in ops if not o.key.name.endswith(("_codes", "_scale"))] == [
        key for key in seen if not key[0].endswith(("_codes", "_scale"))
    ]
    assert {o.key for o in ops} == set(known) - {graph.TOKENS}
    for operation in ops:
        verdict, reason, _ = within(operation.evaluate(*(known[key] for key in operation.inputs)), known[operation.key])
        assert verdict < Verdict.WRONG, f"{operation.key}: {reason}"


@pytest.mark.parametrize("family", ["bitnet-b1.58", "gptneox"])
def test_many_rows_go_through_a_layer_in_parts(family):
    """gptneox adds attention and feed-forward to one input. Observed tensors are whole, so an observed pass is computed in one part."""
    sizes = {"width": 32, "ffn": 384, "heads": 2, "kv_heads": 2, "head_dim": 16, "vocab": 20, "context": 1100}
    model = random_model(0, family=family, **sizes)
    tokens = random_tokens(np.random.default_rng(0), model, 1, 4 * network.PART_ROWS + 3)
    seen = []
    whole = forward_full(model, tokens, record=lambda name, layer, array: seen.append(len(array)) if name == "ffn_out" else None)
    assert seen == [tokens.size] * model.config.n_layers
    assert_same_bits(forward_full(model, tokens), whole)
    tracemalloc.start()
    peaks = []
    for rows in (tokens.size, network.PART_ROWS):
        workspace.release()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network, "PART_ROWS", rows)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            forward_full(model, tokens, last_only=True)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert peaks[1] < 0.6 * peaks[0]


@settings(max_examples=60)
@given(
    shape=family_shapes(),
    seed=seeds,
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    size=st.integers(1, 9),
)
@example(shape={"family": "gptneox"}, seed=0, lengths=[13], size=2)
@example(shape={"family": "phi2"}, seed=0, lengths=[13], size=5)
@example(shape={"family": "bitnet-b1.58", "window": 3}, seed=0, lengths=[13, 2], size=4)
def test_parts_of_any_size_change_no_bit(shape, seed, lengths, size):
    """Whole sequences, a cache that holds some positions, and a mask; all logits and the last. What is observed is computed in one part."""
    model = random_model(seed, **shape)
    tokens = random_tokens(np.random.default_rng(seed), model, len(lengths), max(lengths))
    batch, longest = tokens.shape
    mask = np.random.default_rng(seed).random((batch, 1, longest, longest)) < 0.7
    for options in ({}, {"mask": mask}):
        whole = forward_full(model, tokens, lengths, record=Recorder(), **options)
        last = forward_full(model, tokens, lengths, record=Recorder(), last_only=True, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network, "PART_ROWS", size)
            assert_same_bits(forward_full(model, tokens, lengths, **options), whole)
            assert_same_bits(forward_full(model, tokens, lengths, last_only=True, **options), last)
            assert_same_bits(forward_incremental(model, tokens, lengths, chunk=5), forward_full(model, tokens, lengths))


# --- numbers that leave float32's range -----------------------------------------------------------------------------------------------


def loud(factor=1.0, row=..., **how):
    """A model of which a part of the embedding is multiplied by a factor. Its head is another table."""
    model = random_model(0, tied=False, **how)
    table = model.token_embd.copy()
    table[row] *= np.float32(factor)
    return frozen(replace(model, token_embd=table))


OVERFLOWING = {
    "weights": loud(gain=1e25),
    "weights at the end of the range": loud(gain=1e38),
    "head": frozen(replace(random_model(0), output=np.full((50, 100), 3e38, np.float32))),
    # finite, but their squares are not: a norm could turn them, and all logits, into zeros
    **{f"embedding of {factor}": loud(factor) for factor in (1e20, 1e25, 1e37)},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("path", [forward_full, through_cache, forward_incremental])
@pytest.mark.parametrize("model", OVERFLOWING.values(), ids=OVERFLOWING)
def test_what_overflows_is_an_error_and_not_a_warning_too(model, path, last_only):
    where = r"the logits of sequence 0, position \d have NaN or infinity in them: the model leaves float32's range"
    for dialect in (EXACT, BITNET_CPP):
        with pytest.raises(NonFiniteError, match=where):
            path(model, TOKENS, last_only=last_only, dialect=dialect)


def test_an_overflow_is_reported_where_it_is():
    """Also where tokens of one tile are fine. Token 7 is infinite."""
    model, fine = loud(np.inf, row=7), [1, 2, 3, 4]
    for path in (forward_full, forward_incremental):
        for sequence, position in (([5, 6, 7, 8], 2), ([7, 6, 5, 8], 0)):
            with pytest.raises(NonFiniteError, match=f"sequence 1, position {position} "):
                path(model, [fine, sequence])
    with pytest.raises(NonFiniteError, match="sequence 1, position 3 "):
        forward_full(model, [fine, [5, 6, 8, 7]], last_only=True)


def test_a_gate_runs_beside_the_residual_stream_alone(monkeypatch):
    """What its matrices read is gone by then, and the stream has one array: branches are added in place."""
    model, lent, gated = random_model(3, width=512, ffn=512, context=64), [], cpu.relu2_gate

    def gate(*arrays):
        lent.append(workspace.pool().lent - before)
        return gated(*arrays)

    monkeypatch.setattr(cpu, "relu2_gate", gate)
    workspace.release()  # blocks of earlier tests, which may be larger than needed
    before = workspace.pool().lent
    forward_full(model, np.zeros((1, 64), int))
    assert lent == [3 * 64 * 512 * 4] * model.config.n_layers  # the stream, gate and up


def test_a_backend_of_exact_operations_alone_takes_no_other_dialect():
    """As a GPU has them."""
    ops, model = Wrapped(cpu), random_model(1)
    ops.exact_only = True
    assert_same_bits(forward_full(model, TOKENS, ops=ops), forward_full(model, TOKENS))
    for dialect in (BITNET_CPP, LLAMA_CPP):
        with pytest.raises(UnsupportedError, match=rf"the dialect is {dialect.name}, expected exact on this device"):
            forward_full(model, TOKENS, dialect=dialect, ops=ops)
