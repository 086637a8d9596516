"""Where something is computed: policies are pure, what they say is followed where it can be, and counted."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same_bits, random_model

from bitnet_np import Metrics, contract
from bitnet_np.base.errors import MaskError, OptionError
from bitnet_np.engine import masks
from bitnet_np.gpu import dispatch
from bitnet_np.gpu.dispatch import (
    MASKS,
    WORKLOAD_COMPUTED,
    WORKLOAD_DOCUMENTED,
    Above,
    Call,
    Choice,
    Decision,
    attention_of,
    choose,
    make_mask,
)
from bitnet_np.kernels import cpu
from bitnet_np.kernels import masks as mask_kernels

sizes = st.integers(0, 5000)


@pytest.mark.parametrize(("q_len", "k_len", "device"), [(128, 128, "cpu"), (1, 16384, "cpu"), (1, 16385, "cuda"), (129, 128, "cuda")])
def test_bitnet_rs_sends_masks_of_more_than_16384_elements(q_len, k_len, device):
    assert MASKS(Call("mask", q_len, k_len)) == (device, f"q_len * k_len is {'above' if device == 'cuda' else 'at most'} 16384")


@given(seq_len=sizes, past=sizes, num_heads=st.integers(1, 64), head_dim=st.integers(1, 256), off=st.sampled_from([-1, 0, 1]))
def test_realizars_two_workloads(seq_len, past, num_heads, head_dim, off):
    """seq_len * hidden_dim * seq_len in its comment, num_heads * seq_len * head_dim * total_len in its code; one less is the limit."""
    hidden_dim, total_len = num_heads * head_dim, past + seq_len
    call = Call("attention", seq_len, total_len, num_heads, head_dim)
    for workload, size in (
        (WORKLOAD_DOCUMENTED, seq_len * hidden_dim * seq_len),
        (WORKLOAD_COMPUTED, num_heads * seq_len * head_dim * total_len),
    ):
        policy = Above(workload, size + off)
        assert policy(call).device == ("cuda" if off < 0 else "cpu")
        assert policy(call) == policy(call)
        assert " * ".join(workload) in policy(call).reason


def test_a_models_attention():
    config = random_model(0, width=24, heads=3, kv_heads=1, head_dim=10).config
    assert attention_of(config, 7, past=5) == Call("attention", 7, 12, 3, 10)
    assert attention_of(config, 7).hidden_dim == 30


def test_a_command_goes_where_the_decision_says(monkeypatch):
    """If there is a GPU; and what is asked for by name is not decided."""
    gpu, here = object(), Decision("cpu", "it is small")
    monkeypatch.setattr(dispatch, "open_cuda", lambda: gpu)
    assert choose("auto", here) == Choice(cpu, "it is small")
    assert choose("auto", Decision("cuda", "it is large")) == Choice(gpu, "it is large")
    assert choose() == Choice(gpu, "there is a GPU")
    assert choose("cuda", here) == Choice(gpu, "a GPU was asked for")
    assert choose("cpu", Decision("cuda", "it is large")) == Choice(cpu, "the CPU was asked for")
    assert choose("numpy", Decision("cuda", "it is large")) == Choice(contract, "plain NumPy was asked for")

    def none():
        raise OptionError("no CUDA: none here")

    monkeypatch.setattr(dispatch, "open_cuda", none)
    assert choose("auto", Decision("cuda", "it is large")) == Choice(cpu, "no CUDA: none here")
    assert choose("auto", here) == Choice(cpu, "it is small")


class Elsewhere(SimpleNamespace):
    """A device's part of the vocabulary, in NumPy; `made` and `sent` say what it was asked for."""

    device = "cuda"

    def __init__(self):
        super().__init__(made=0, sent=[])

    def empty(self, shape):
        return np.full(shape, np.nan, np.float32)

    def upload(self, array):
        self.sent.append(array.shape)
        return array

    def fill_mask(self, *arguments):
        self.made += 1
        mask_kernels.fill_mask(*arguments)


PATTERNS = [(masks.CAUSAL, {}), (masks.Pattern(window=3), {"past": 4}), (masks.Pattern(block=4, sinks=1), {"align": "top_left"})]


@pytest.mark.parametrize(("pattern", "options"), PATTERNS)
@pytest.mark.parametrize("limit", [0, 40, 10**9])
def test_a_mask_is_made_where_the_policy_says(pattern, options, limit):
    on, metrics, policy = Elsewhere(), Metrics(), Above(("q_len", "k_len"), limit)
    expected = masks.mask(5, 9, pattern, **options)
    assert_same_bits(make_mask(5, 9, pattern, **options, ops=on, policy=policy, metrics=metrics), expected)
    there = limit < 45
    assert (on.made, (5, 9) in on.sent) == (there, not there)
    device, words = ("cuda", "above") if there else ("cpu", "at most")
    reason = f"q_len * k_len is {words} {limit}"
    assert metrics.as_dict()["decisions"] == [{"operation": "mask", "device": device, "reason": reason, "times": 1}]


def test_masks_for_the_cpu_ask_no_policy():
    metrics = Metrics()

    def policy(call):
        raise AssertionError("asked")

    assert_same_bits(make_mask(300, 300, policy=policy, metrics=metrics), masks.causal(300, 300))
    assert_same_bits(make_mask(300, 300, ops=metrics.ops(), policy=policy, metrics=metrics), masks.causal(300, 300))
    assert metrics.as_dict()["decisions"] == []


def test_decisions_are_counted_by_reason():
    on, metrics = Elsewhere(), Metrics()
    for size in (10, 200, 11, 201, 202):
        make_mask(size, size, ops=on, metrics=metrics)
    told = {decision["device"]: decision["times"] for decision in metrics.as_dict()["decisions"]}
    assert told == {"cpu": 2, "cuda": 3}


@pytest.mark.parametrize(("q_len", "k_len"), [(4, 0), (5, 3), (-1, 4), (2.5, 4), ("3", 4)])
def test_a_mask_that_cannot_be_is_refused_wherever_it_would_be(q_len, k_len):
    for ops in (cpu, Elsewhere()):
        with pytest.raises(MaskError):
            make_mask(q_len, k_len, ops=ops)
