"""Record the gradients that torch computes for transformers' BitNet in training: `record_hf_gradients.py FOLDER`.

It needs torch and transformers. Each model is small and random. Its linears are transformers' AutoBitLinear with master weights ("online"),
which quantise weights and activations in the forward pass and pass gradients straight through. transformers' source is run with float64
for every float32 in it. <name>.npz has `tokens` [T], the `loss` (mean next-token cross-entropy), the model's `config` as JSON, and by
GGUF's names the parameters, float32, as `parameters/<tensor>` and their gradients, float64, as `gradients/<tensor>`.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from crossval_hf import MODULES, Case, Transformers
from numpy.typing import NDArray

from bitnet_np.errors import UnsupportedError
from bitnet_np.model import Activation, Config
from bitnet_np.training.gradients import parameter_shapes

SHAPE: dict[str, Any] = {"width": 16, "ffn": 12, "heads": 4, "kv_heads": 2, "head_dim": 4, "vocab": 23, "context": 64, "n_layers": 2}
CASES: dict[str, tuple[str, Activation, bool]] = {  # architecture, activation, whether the head is the embedding
    "relu2_tied": ("bitnet-b1.58", "relu2", True),
    "silu_untied": ("bitnet", "silu", False),
}


def module_of(name: str) -> str:
    """A GGUF tensor's module in transformers."""
    ends = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = name.removesuffix(".weight").split(".")
    return ends[parts[0]] if len(parts) == 1 else f"model.layers.{parts[1]}.{MODULES[parts[2]]}"


def record(hf: Transformers, name: str, seed: int) -> dict[str, NDArray]:
    architecture, activation, tied = CASES[name]
    config = Config(architecture, eps=1e-5, rope_base=100.0, activation=activation, **SHAPE)
    rng = np.random.default_rng(seed)
    model = hf.empty_model(Case(seed, ("autobitlinear", "online"), tied, False, config, 16))
    modules = dict(model.named_modules())
    recording: dict[str, NDArray] = {"tokens": rng.integers(0, config.vocab, 16), "config": np.array(json.dumps(asdict(config)))}
    shapes = parameter_shapes(config, tied)
    for tensor, shape in shapes.items():
        drawn = rng.normal(1, 0.3, shape) if len(shape) == 1 else rng.normal(size=shape) / shape[1] ** 0.5
        recording[f"parameters/{tensor}"] = drawn.astype(np.float32)
        hf.set(modules[module_of(tensor)].weight, recording[f"parameters/{tensor}"])
    with hf.strict(model):
        tokens = hf.torch.from_numpy(recording["tokens"])
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        loss = hf.torch.nn.functional.cross_entropy(logits[:-1], tokens[1:])
        loss.backward()
    if loss.dtype != hf.torch.float64:
        raise UnsupportedError(f"{name}: transformers' loss is {loss.dtype}, expected float64")
    recording["loss"] = np.array(loss.item())
    for tensor in shapes:
        recording[f"gradients/{tensor}"] = modules[module_of(tensor)].weight.grad.numpy()
    return recording


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args(argv)
    try:
        hf = Transformers()
        options.folder.mkdir(parents=True, exist_ok=True)
        for name in CASES:
            recording = record(hf, name, options.seed)
            np.savez_compressed(options.folder / f"{name}.npz", **recording)  # type: ignore[arg-type]
            print(f"{name}: loss {recording['loss']:.6f}, {hf.versions}")
    except UnsupportedError as error:
        print(f"record_hf_gradients.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
