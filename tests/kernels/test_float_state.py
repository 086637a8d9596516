"""Public functions compute in the default state of floating-point arithmetic, on every thread, and leave each thread as it was."""

import hashlib
import platform
import sys
from concurrent.futures import ThreadPoolExecutor

import models
import numpy as np
import pytest
from child import run_python

import bitnet_np as bn
from bitnet_np.base.errors import UnsupportedError
from bitnet_np.kernels import cpu, float_state
from bitnet_np.kernels.fast.float_control import DEFAULT
from bitnet_np.testing.models import random_model

X86 = platform.machine() in ("x86_64", "AMD64")
STATES = (
    {"flush to zero": 0x9FC0, "subnormal operands are 0": 0x1FC0, "up": 0x5F80, "down": 0x3F80, "towards zero": 0x7F80}
    if X86
    else {"flush to zero": 1 << 24, "up": 1 << 22, "down": 2 << 22, "towards zero": 3 << 22}
)
CONTROL = ~0x3F if X86 else -1  # without the flags of what happened
MODEL = random_model(3, width=128, ffn=256, vocab=300, context=300)
TOKENS = np.arange(250)[None]
TINY = (np.float32(2.0) ** np.arange(-149, -117)).reshape(1, 32)
"""Subnormal numbers, and products that become such."""
HIDDEN = np.full((1, 3, 128), 0.1, np.float32)
LOGITS = [np.linspace(0, x, 300, dtype=np.float32)[None] for x in (1, 1.1)]


CALLS = {
    "silu_gate": lambda: cpu.silu_gate(TINY, TINY),
    "random_model": lambda: bn.forward_full(random_model(3), [[1, 2]]),
    "load": lambda: bn.load(bn.__path__[0] + "/data/tiny.gguf").layers[0].attn_norm,
    "forward_full": lambda: bn.forward_full(MODEL, TOKENS),
    "contract": lambda: bn.forward_full(MODEL, TOKENS[:, :3], ops=bn.contract),
    "forward": lambda: bn.forward(MODEL, TOKENS[:, :9], bn.KVCache(MODEL.config, 1, 9)),
    "prefill": lambda: bn.prefill(MODEL, TOKENS[:, :9], bn.KVCache(MODEL.config, 1, 9)),
    "forward_incremental": lambda: bn.forward_incremental(MODEL, TOKENS[:, :3]),
    "compute_logits": lambda: bn.compute_logits(MODEL, TOKENS[:, :3]),
    "forward_layer": lambda: bn.forward_layer(MODEL, 0, HIDDEN),
    "feed_forward": lambda: bn.feed_forward(MODEL, 0, HIDDEN),
    "forward_batch": lambda: np.concatenate(bn.forward_batch(MODEL, [[1, 2], [3]])),
    "generate": lambda: np.array(bn.generate(MODEL, [1], 8, sampling=bn.Sampling(0.9))),
    "generate_batch": lambda: np.array([done.tokens for done in bn.generate_batch(MODEL, [bn.Request("a", [1], 4)], 1)]),
    "judge": lambda: np.array(repr(bn.judge(*LOGITS).as_dict())),
}


@pytest.fixture(params=STATES, ids=STATES)
def state(request):
    """A state, by number; afterwards this thread has its own again."""
    before = float_state.exchange(DEFAULT)
    yield STATES[request.param]
    float_state.exchange(before)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_computes_in_the_default_state_and_gives_the_callers_back(name):
    with models.threads(2):
        expected = np.asarray(CALLS[name]()).tobytes()
        before = float_state.exchange(DEFAULT)
        try:
            for state in STATES.values():
                float_state.exchange(state)
                found = np.asarray(CALLS[name]()).tobytes()
                assert float_state.exchange(DEFAULT) & CONTROL == state & CONTROL
                assert found == expected, hex(state)
        finally:
            float_state.exchange(before)


def test_between_tokens_and_after_errors_the_state_is_the_callers(state):
    expected = bn.generate(MODEL, [1], 4)[1:]
    float_state.exchange(state)
    for token, right in zip(bn.stream(MODEL, [1], 4), expected, strict=True):
        now = float_state.exchange(state)
        assert (token, now & CONTROL) == (right, state & CONTROL)
    with pytest.raises(bn.Error):
        bn.forward_full(MODEL, [[-1]])
    assert float_state.exchange(DEFAULT) & CONTROL == state & CONTROL


def test_every_thread_has_its_own(state):
    """Threads that share a kernel, and threads of the caller's in several states."""
    expected = bn.forward_full(MODEL, TOKENS).tobytes()

    def run(own):
        before = float_state.exchange(own)
        try:
            return bn.forward_full(MODEL, TOKENS).tobytes(), float_state.exchange(own) & CONTROL
        finally:
            float_state.exchange(before)

    with models.threads(2), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, [state, DEFAULT])) == [(expected, state & CONTROL), (expected, DEFAULT & CONTROL)]


def test_a_state_that_cannot_be_set_is_refused(state, monkeypatch):
    float_state.exchange(state)
    monkeypatch.setattr(float_state, "DEFAULT", None)
    try:
        with pytest.raises(UnsupportedError, match="the default cannot be set on"):
            bn.forward_full(MODEL, [[1]])
    finally:
        float_state._exchange(DEFAULT)


PROGRAM = """
import ctypes, hashlib, sys
import numba, numpy as np

def set_state():
    '''Flush to zero and round up, as C does it: MXCSR lies 28 bytes into the environment.'''
    libm, environment = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 8)()
    libm.fegetenv(environment)
    environment[7] = 0xDFC0
    libm.fesetenv(environment)

@numba.njit(parallel=True)
def halved(least, out):  # on threads that were started in that state
    for i in numba.prange(out.size):
        out[i] = least * 0.5

def are_flushed():
    out = np.ones(2000)
    halved(2.0**-1022, out)
    return not out.any()

numba.set_num_threads(2)
least = (np.arange(1 << 16, dtype=np.int32) * 500 + 7).view(np.float32).reshape(64, -1)
up = least + np.float32(1)
if "before" in sys.argv:
    set_state()
    assert are_flushed()
import bitnet_np as bn
if "after" in sys.argv:
    set_state()
    assert are_flushed()
from bitnet_np.testing import random_model
from bitnet_np.kernels import cpu
model = random_model(3, width=128, ffn=256, vocab=300, context=300)
print(hashlib.sha256(bn.forward_full(model, np.arange(250)[None])).hexdigest())
print(hashlib.sha256(cpu.silu_gate(least, up)).hexdigest())
assert are_flushed()
"""


@pytest.mark.skipif(not X86 or sys.platform != "linux", reason="sets the register as Linux lays it out on x86-64")
def test_a_state_set_before_or_after_the_import_and_threads_started_in_it():
    least = (np.arange(1 << 16, dtype=np.int32) * 500 + 7).view(np.float32).reshape(64, -1)
    expected = [bn.forward_full(MODEL, TOKENS), cpu.silu_gate(least, least + np.float32(1))]
    lines = "".join(hashlib.sha256(array).hexdigest() + "\n" for array in expected)
    assert [run_python(PROGRAM, way) for way in ("before", "after")] == [lines] * 2
