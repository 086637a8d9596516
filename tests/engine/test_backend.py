"""The vocabulary of a backend: the CPU has all of it, and a wrapped backend is another one but for the operations that it replaces."""

import numpy as np
import pytest
from models import assert_same_bits, random_model

from bitnet_np.base.errors import NonFiniteError
from bitnet_np.engine.backend import OPERATIONS, Wrapped
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.forward_pass import forward, forward_full
from bitnet_np.generation.batch import Batch, Request, generate_batch
from bitnet_np.generation.generate import generate, stepper
from bitnet_np.generation.sampling import Sampling
from bitnet_np.kernels import cpu


def test_the_cpu_has_every_operation():
    assert len(OPERATIONS) > 30
    assert all(callable(getattr(cpu, name)) for name in OPERATIONS)
    assert (cpu.device, cpu.exact_only) == ("cpu", False)


def test_what_is_not_replaced_is_the_backends_own():
    def add(a, b):
        return a - b

    wrapped = Wrapped(cpu, add=add)
    assert wrapped.add is add
    assert all(getattr(wrapped, name) is getattr(cpu, name) for name in OPERATIONS if name != "add")
    assert (wrapped.device, wrapped.exact_only, wrapped.splits_rows) == (cpu.device, cpu.exact_only, False)
    again = Wrapped(wrapped, scaled=add)
    assert again.add is again.scaled is add
    assert again.rope is cpu.rope


def test_what_is_replaced_is_what_a_forward_pass_computes_with():
    model, tokens = random_model(0), [[1, 2, 3]]
    doubled = Wrapped(cpu, relu2_gate=lambda gate, up: cpu.relu2_gate(gate, np.float32(2) * up))
    assert_same_bits(forward_full(model, tokens, ops=Wrapped(cpu)), forward_full(model, tokens))
    assert (forward_full(model, tokens, ops=doubled) != forward_full(model, tokens)).any()


def test_only_operations_can_be_replaced():
    with pytest.raises(AssertionError, match=r"no operations of a backend: {'sub'}"):
        Wrapped(cpu, sub=np.subtract)
    with pytest.raises(AttributeError, match="sub"):
        Wrapped(cpu).sub  # noqa: B018


# --- a backend's own decoder ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def decodes():
    """The CPU with a decoder, and the slots and tokens of its steps; it fails after the steps that `limit` says."""
    ops = Wrapped(cpu)
    ops.steps, ops.limit = [], 100

    def decoder(model, cache, slots):
        def step(tokens):
            ops.steps.append((slots.tolist(), tokens.tolist()))
            if len(ops.steps) > ops.limit:
                raise NonFiniteError("the logits of one of them")
            return forward(model, tokens[:, None], cache, slots=slots, last_only=True)

        return step

    ops.decoder = decoder
    return ops


def test_the_cpu_has_no_decoder_of_its_own_and_a_wrapped_backend_has_that_of_its_backend(decodes):
    model = random_model(0)
    cache, slots = KVCache(model.config, 1, 4), np.arange(1)
    assert cpu.decoder(model, cache, slots) is None
    assert Wrapped(cpu).decoder(model, cache, slots) is None
    assert Wrapped(decodes).decoder(model, cache, slots)(np.array([1])).shape == (1, model.config.vocab)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_generation_asks_the_backends_decoder(decodes, sampling):
    model = random_model(0)
    tokens = generate(model, [1, 2], 4, sampling=sampling)
    assert generate(model, [1, 2], 4, sampling=sampling, ops=decodes) == tokens
    assert decodes.steps == [([0], [token]) for token in tokens[2:5]]
    assert_same_bits(stepper(model, KVCache(model.config, 2), decodes)([1, 2]), stepper(model, KVCache(model.config, 2))([1, 2]))
    assert decodes.steps[3:] == [([0, 1], [1, 2])]


@pytest.mark.parametrize("limit", [100, 2])
def test_a_batch_asks_the_backends_decoder_for_steps_of_one_token_each(decodes, limit):
    """Another one where other sequences run. Where one leaves float32's range, the step is computed without it."""
    model, decodes.limit = random_model(0), limit
    requests = [Request("a", [1, 2], 5), Request("b", [3], 3), Request("c", [4, 0, 1], 4)]
    expected = list(generate_batch(model, requests, 2))
    batch, observed = Batch(model, 2, ops=decodes, observe=lambda request, logits: observed.append(request.id)), []
    for request in requests:
        batch.submit(request)
    tokens = {}
    while not batch.done:
        tokens |= {each.request.id: each.tokens for each in batch.step()}
    assert [tokens[each.request.id] for each in expected] == [each.tokens for each in expected]
    assert [slots for slots, _ in decodes.steps] == [[0, 1], [0, 1], [0, 1], [1], [1]]
    assert len(observed) == 5 + 3 + 4
