"""A sequence's tokens, and the bits of the logits they were chosen from, do not know how many others there are, which, or in what order."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, random_model, random_tokens, seeds, shapes

from bitnet_np.batch import Request, generate_batch
from bitnet_np.dialects import DIALECTS
from bitnet_np.forward_pass import forward_full
from bitnet_np.generate import stream
from bitnet_np.sampling import Sampling

samplings = st.sampled_from([Sampling(), Sampling(1.0), Sampling(0.7, top_k=4), Sampling(1.3, top_p=0.8)])
prompts = st.lists(st.tuples(st.integers(1, 8) | st.sampled_from([63, 64, 65]), st.integers(0, 6)), min_size=1, max_size=6)


def run(model, requests, slots, dialect, dtype=np.float32):
    """Tokens and logits of each request by id."""
    seen = {request.id: [] for request in requests}
    completions = generate_batch(
        model, requests, slots, dialect=dialect, dtype=dtype, observe=lambda request, logits: seen[request.id].append(logits.copy())
    )
    return {completion.request.id: (completion.tokens, seen[completion.request.id]) for completion in completions}


def assert_same(a, b):
    assert a[0] == b[0]
    assert len(a[1]) == len(b[1])
    for ours, theirs in zip(a[1], b[1], strict=True):
        assert_same_bits(ours, theirs)


@settings(max_examples=60)
@given(
    shape=shapes(),
    seed=seeds,
    sizes=prompts,
    sampling=samplings,
    dialect=st.sampled_from(list(DIALECTS.values())),
    dtype=st.sampled_from([np.float32, np.float16]),
    data=st.data(),
)
def test_company_changes_neither_tokens_nor_bits(shape, seed, sizes, sampling, dialect, dtype, data):
    model = random_model(seed, **shape)
    rng = np.random.default_rng(seed)
    stop = set(rng.integers(0, model.config.vocab, 1).tolist())
    requests = [
        Request(f"s{i}", random_tokens(rng, model, length).tolist(), n, sampling, seed=seed, stop=stop)
        for i, (length, n) in enumerate(sizes)
    ]
    alone = {request.id: run(model, [request], 1, dialect, dtype)[request.id] for request in requests}
    chosen = data.draw(st.permutations(requests))[: data.draw(st.integers(1, len(requests)))]
    together = run(model, chosen, data.draw(st.integers(1, len(requests) + 1)), dialect, dtype)
    assert together.keys() == {request.id for request in chosen}
    for name, result in together.items():
        assert_same(result, alone[name])


@settings(max_examples=30)
@given(shape=shapes(), seed=seeds, sizes=prompts, sampling=samplings, slots=st.integers(1, 7))
def test_each_sequence_is_what_generate_gives_and_its_logits_what_the_full_pass_gives(shape, seed, sizes, sampling, slots):
    model = random_model(seed, **shape)
    rng = np.random.default_rng(seed)
    requests = [Request(i, random_tokens(rng, model, length).tolist(), n, sampling, seed=seed) for i, (length, n) in enumerate(sizes)]
    for request, (tokens, logits) in zip(requests, run(model, requests, slots, DIALECTS["exact"]).values(), strict=True):
        assert tokens == list(stream(model, request.prompt, request.n, sampling=sampling, numbers=request.numbers()))
        whole = forward_full(model, [[*request.prompt, *tokens]])[0]
        for step, row in enumerate(logits):
            assert_same_bits(row, whole[len(request.prompt) - 1 + step])
