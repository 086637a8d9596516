"""Record a model of transformers while it runs, and judge it: `python examples/record_transformers.py`. Needs torch and transformers.

Writes llama/, a small random Llama, and llama.npz, what transformers computed with it, to the current folder.
"""

import numpy as np

from bitnet_np import check, load
from bitnet_np.traces.hooks import record_transformers
from bitnet_np.traces.record import write_trace

TOKENS = np.array([7, 2, 31, 11, 2, 40])
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 128}


def main() -> int:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)).eval()
    model.save_pretrained("llama")
    with torch.no_grad(), record_transformers(model) as trace:
        out = model(torch.tensor(TOKENS[None, :4]), use_cache=True)  # prefill
        for i in range(4, len(TOKENS)):  # decode
            out = model(torch.tensor(TOKENS[None, i : i + 1]), past_key_values=out.past_key_values)
    report = check(load("llama"), TOKENS, trace)
    print(f"{report.verdict.name}: {report.reason}")
    write_trace(trace, "llama.npz", tokens=TOKENS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
