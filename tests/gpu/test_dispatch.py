"""Where something is computed: a command where it was asked for, a mask where its size says."""

from math import prod
from types import SimpleNamespace

import pytest
from models import assert_same_bits, random_model

from bitnet_np import contract
from bitnet_np.base.errors import MaskError, OptionError
from bitnet_np.engine import masks
from bitnet_np.gpu import dispatch
from bitnet_np.gpu.dispatch import choose, make_mask
from bitnet_np.kernels import cpu
from bitnet_np.model.records import Linear


def test_a_command_goes_to_the_gpu_if_there_is_one(monkeypatch):
    gpu = object()
    monkeypatch.setattr(dispatch, "open_cuda", lambda: gpu)
    assert choose() == (gpu, "there is a GPU")
    assert choose("cuda") == (gpu, "a GPU was asked for")
    assert choose("cpu") == (cpu, "the CPU was asked for")
    assert choose("numpy") == (contract, "plain NumPy was asked for")

    def none():
        raise OptionError("no CUDA: none here")

    monkeypatch.setattr(dispatch, "open_cuda", none)
    assert choose("auto") == (cpu, "no CUDA: none here")
    with pytest.raises(OptionError, match="none here"):
        choose("cuda")


def test_a_call_goes_to_the_gpu_where_its_workload_pays(monkeypatch):
    gpu, config = object(), random_model(0).config
    monkeypatch.setattr(dispatch, "open_cuda", lambda: gpu)
    one = dispatch.multiply_adds(config, 1)
    matrices = sum(prod(w.shape) for w in vars(random_model(0).layers[0]).values() if isinstance(w, Linear))
    assert one == config.n_layers * matrices + config.vocab * config.width
    few = dispatch.LEAST_WORK // one
    assert choose("auto", one * few)[0] is cpu
    assert choose("auto", one * few)[1].endswith("multiply-adds are less work than 5e+10, from which a GPU is taken")
    assert choose("auto", one * (few + 1)) == (gpu, "there is a GPU")
    assert choose("cuda", 1) == (gpu, "a GPU was asked for")


class Elsewhere(SimpleNamespace):
    """A device's part of the vocabulary, in NumPy; `made` and `sent` say what it was asked for."""

    device = "cuda"

    def __init__(self):
        super().__init__(made=0, sent=[])

    def upload(self, array):
        self.sent.append(array.shape)
        return array

    def mask(self, plan):
        self.made += 1
        return masks._build(plan)


PATTERNS = [(masks.CAUSAL, {}), (masks.Pattern(window=3), {"past": 4}), (masks.Pattern(block=4, sinks=1), {"align": "top_left"})]


@pytest.mark.parametrize(("pattern", "options"), PATTERNS)
@pytest.mark.parametrize("most", [0, 44, 45])
def test_a_mask_is_made_where_its_size_says(monkeypatch, pattern, options, most):
    monkeypatch.setattr(dispatch, "MOST_SENT", most)
    on, expected = Elsewhere(), masks.mask(5, 9, pattern, **options)
    assert_same_bits(make_mask(5, 9, pattern, **options, ops=on), expected)
    assert (on.made, (5, 9) in on.sent) == (most < 45, most == 45)


def test_masks_for_the_cpu_are_made_there():
    assert_same_bits(make_mask(300, 300), masks.causal(300, 300))


@pytest.mark.parametrize(("q_len", "k_len"), [(4, 0), (5, 3), (-1, 4), (2.5, 4), ("3", 4)])
def test_a_mask_that_cannot_be_is_refused_wherever_it_would_be(q_len, k_len):
    for ops in (cpu, Elsewhere()):
        with pytest.raises(MaskError):
            make_mask(q_len, k_len, ops=ops)
