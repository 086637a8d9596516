"""Types of KV caches: how each rounds. That whole sequences and caches give the same bits in each: properties/test_same_bits.py."""

import gguf
import numpy as np
import pytest
from models import assert_same_bits, random_model, random_tokens

from bitnet_np.base.errors import OptionError, UnsupportedError
from bitnet_np.engine.cache_types import KINDS
from bitnet_np.engine.dialects import BITNET_CPP, EXACT
from bitnet_np.engine.forward_pass import forward_full, forward_incremental
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.law.precision import FLOAT32, Precision
from bitnet_np.judge.verdict import Verdict
from bitnet_np.kernels import cpu
from bitnet_np.traces.points import Key, Trace

NARROW = KINDS[1:]
MODEL = random_model(1, heads=4, kv_heads=2, head_dim=32)
TOKENS = random_tokens(np.random.default_rng(1), MODEL, 1, 24)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_blocks_are_rounded_as_gguf_py_does(kind):
    x = np.random.default_rng(0).normal(size=(50, 3, 64)).astype(np.float32)
    x[0, 0, :32] = 0
    x[0, 1, 3] = -40
    ggml = gguf.GGMLQuantizationType[kind.upper()]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(x, ggml), ggml)
    np.testing.assert_array_equal(cpu.round_as(x, kind), theirs)


@pytest.mark.parametrize(("kind", "part"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8), ("int8", 0.5 / 127)])
def test_numbers_are_rounded_to_the_nearest(kind, part):
    """By at most half a step, some by nearly that; rounding again changes nothing."""
    x = np.random.default_rng(0).normal(size=(40, 3, 20)).astype(np.float32)
    y = cpu.round_as(x, kind)
    size = np.abs(x).max(axis=2, keepdims=True) if kind == "int8" else np.abs(x)
    errors = np.abs(y - x) / size
    assert 0.9 * part < errors.max() <= 1.00001 * part
    np.testing.assert_allclose(cpu.round_as(y, kind), y, rtol=1e-6)
    if kind == "int8":
        assert np.unique(np.abs(y[0, 0]) / y[0, 0].max()).size <= 128
    assert not cpu.round_as(np.zeros_like(x), kind).any()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("dialect", [EXACT, BITNET_CPP], ids=lambda dialect: dialect.name)
def test_a_cache_of_blocks_gives_the_bits_of_whole_sequences(kind, dialect):
    """The property tests have the other types: few models have heads of whole blocks."""
    whole = forward_full(MODEL, TOKENS, dialect=dialect.with_cache(kind))
    assert_same_bits(forward_incremental(MODEL, TOKENS, chunk=7, dialect=dialect.with_cache(kind)), whole)


@pytest.mark.parametrize("kind", NARROW)
def test_the_judge_takes_such_an_engine_for_honest(kind):
    """With its cache declared; and as what it is without."""
    recorded = {}
    forward_full(
        MODEL, TOKENS, dialect=EXACT.with_cache(kind), record=lambda name, n, x: recorded.setdefault(Key(name, n), x.copy().reshape(24, -1))
    )
    trace = Trace(recorded, None, "a dump")
    assert judge_trace(MODEL, trace, TOKENS[0], precision=Precision(kv=kind)).verdict <= Verdict.ROUNDING
    assert judge_trace(MODEL, trace, TOKENS[0], precision=FLOAT32).verdict == Verdict.WRONG


def test_a_type_that_does_not_fit_is_refused():
    with pytest.raises(OptionError, match="kind is 'q3', expected one of float32, "):
        EXACT.with_cache("q3")
    with pytest.raises(UnsupportedError, match=r"the head width is 20, expected a multiple of 32 for a KV cache of q4_0"):
        forward_full(random_model(0), TOKENS, dialect=EXACT.with_cache("q4_0"))
    forward_full(random_model(0), TOKENS, dialect=EXACT.with_cache("int8"))
