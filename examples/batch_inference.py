"""Many prompts over few slots: `python examples/batch_inference.py [MODEL]`, by default with the small model in the package.

Every sequence gets the tokens that it gets alone, whatever the batch. Batching saves time because the weights are read once for all
sequences of a step; `scripts/bench.py batch` measures the gain. A slot holds a prompt and its new tokens, so memory is
2 * L * slots * positions * KV width * 4 bytes. Prompts wait until a slot is free. `bitnet_np.Batch` also admits requests while others run.
"""

import sys
from pathlib import Path

from bitnet_np import KVCache, Metrics, Request, Sampling, forward_batch, generate, generate_batch, load
from bitnet_np.files import embedded


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    with embedded.model_path() as small:
        model = load(Path(arguments[0]) if arguments else small)

    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2]]
    for prompt, logits in zip(prompts, forward_batch(model, prompts), strict=True):  # ragged, in one pass
        print(f"{prompt}: logits {list(logits.shape)}, most likely next {logits[-1].argmax()}")

    warm = Sampling(temperature=0.8, top_k=40)
    requests = [Request(i, prompt, n=6, sampling=warm, seed=1) for i, prompt in enumerate(prompts)]
    metrics = Metrics()
    for done in generate_batch(model, requests, slots=2, ops=metrics.ops()):
        alone = generate(model, done.request.prompt, 6, sampling=warm, numbers=done.request.numbers())
        assert alone == [*done.request.prompt, *done.tokens], "a sequence depends on its company"
        print(f"{done.request.prompt} goes on {done.tokens}")
    print(f"{metrics.forwards} forward passes for {sum(request.n for request in requests)} tokens")

    cache = KVCache(model.config, batch=3, capacity=16)  # slots by hand: a prefix that two sequences share
    forward_batch(model, [[1, 2, 3]], cache, slots=[0])
    cache.fork(0, [1, 2])
    one, other = forward_batch(model, [[4], [5, 6]], cache, slots=[1, 2], start=3)
    print(f"forked: {one[-1].argmax()} and {other[-1].argmax()}, slots hold {cache.lengths.tolist()} positions, {cache.nbytes:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
