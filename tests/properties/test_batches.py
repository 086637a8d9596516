"""A sequence's tokens are chosen from the logits that it has alone, whatever the others are and their order."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, random_model, random_tokens, seeds, shapes

from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.generation.batch import Request, generate_batch
from bitnet_np.generation.generate import stream
from bitnet_np.generation.sampling import Sampling, choose

samplings = st.sampled_from([Sampling(), Sampling(1.0), Sampling(0.7, top_k=4), Sampling(1.3, top_p=0.8)])
prompts = st.lists(st.tuples(st.integers(1, 8) | st.sampled_from([63, 64, 65]), st.integers(0, 6)), min_size=1, max_size=6)


@settings(max_examples=80)
@given(
    shape=shapes(),
    seed=seeds,
    sizes=prompts,
    sampling=samplings,
    dialect=st.sampled_from(list(DIALECTS.values())),
    half=st.booleans(),
    slots=st.integers(1, 7),
    data=st.data(),
)
def test_each_sequence_is_what_it_is_alone(shape, seed, sizes, sampling, dialect, half, slots, data):
    """The tokens are those of `stream`, the logits those of the full pass. Some of the requests come, in any order."""
    model, rng, seen = random_model(seed, **shape), np.random.default_rng(seed), {}
    stop = set(rng.integers(0, model.config.vocab, 1).tolist())
    requests = [
        Request(f"s{i}", random_tokens(rng, model, length).tolist(), n, sampling, seed=seed, stop=stop)
        for i, (length, n) in enumerate(sizes)
    ]
    chosen = data.draw(st.permutations(requests))[: data.draw(st.integers(1, len(requests)))]
    whole = dialect.with_cache("float16") if half else dialect
    how = {"sampling": sampling, "stop": stop, "dialect": whole}
    alone = {r.id: list(stream(model, r.prompt, r.n, numbers=r.numbers(), **how)) for r in chosen}
    completions = generate_batch(
        model,
        chosen,
        slots,
        dialect=dialect,
        dtype=np.float16 if half else np.float32,
        observe=lambda request, logits: seen.setdefault(request.id, []).append(logits.copy()),
    )
    assert {completion.request.id: completion.tokens for completion in completions} == alone
    for request in chosen:
        logits = seen.get(request.id, [])
        assert len(logits) - len(alone[request.id]) in (0, 1)  # a stop token was chosen, too
        rows = forward_full(model, [[*request.prompt, *alone[request.id]]], dialect=whole)[0, len(request.prompt) - 1 :]
        numbers = request.numbers()
        for row, expected, token in zip(logits, rows, [*alone[request.id], *stop], strict=False):
            assert_same_bits(row, expected)
            assert choose(row, sampling, 0.0 if sampling.greedy else next(numbers)) == token
