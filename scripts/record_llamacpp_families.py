"""Record every tensor that llama.cpp computes for a tiny random model of each family: `record_llamacpp_families.py FOLDER`.

It needs llama-cpp-python, at least 0.3.36. <name>.gguf is the model, as `convert` writes it; <name>.npz has `tokens` [T] and the tensors
of the graph that are points of ours, by label.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from judging.llama_cpp import LlamaCpp, points

from bitnet_np import Error
from bitnet_np.files.convert import convert
from bitnet_np.files.load import load, open_model
from bitnet_np.model import LongRope, Yarn
from bitnet_np.rope import yarn_magnitude
from bitnet_np.testing import random_model, write_gguf

SHAPE: dict[str, Any] = {"width": 32, "ffn": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "vocab": 32, "context": 64, "n_layers": 2}
TOKENS = np.array([3, 17, 3, 30, 8], np.int64)
YARN: dict[str, Any] = {"yarn": Yarn(4.0, 16, fast=8.0), "rope_magnitude": yarn_magnitude(4.0)}
LONGROPE: dict[str, Any] = {"longrope": LongRope(16, (2.0,) * 8, tuple(1.0 + i for i in range(8))), "rope_magnitude": 1.25}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", YARN),
    "qwen3": ("qwen3", {"pooling": "last"}),
    "qwen2moe": ("qwen2moe", {"experts": 3}),
    "qwen3moe": ("qwen3moe", {"experts": 3}),
    "mixtral": ("llama", {"experts": 3, "experts_used": 2}),
    "phi3": ("phi3", LONGROPE),
    "smollm3": ("smollm3", {"n_layers": 4}),
    "granite": ("granite", {"pooling": "cls"}),
    "minicpm": ("minicpm", {"rope_scaling": 2.0}),
    "olmo2": ("olmo2", {}),
    "gemma": ("gemma", {"pooling": "mean", "tied": True}),
    "gemma2": ("gemma2", {"window": 3, "tied": True}),
    "gemma3": ("gemma3", {"window": 3, "n_layers": 6, "window_layers": tuple(range(5)), "rope_scaling": 4.0}),
    "gptneox": ("gptneox", {"kv_heads": 2, "rope_width": 8, "parallel_residual": True}),
    "gpt2": ("gpt2", {"kv_heads": 2, "tied": True}),
}
"""The recordings: the family of each, and what its model has beside SHAPE."""


def record(theirs: LlamaCpp, name: str, folder: Path) -> None:
    """Write <name>.gguf and <name>.npz."""
    family, options = FAMILIES[name]
    shape = SHAPE | {"tied": False, "table": "float16" if options.get("tied") else "Q8_0"} | options
    model = random_model(list(FAMILIES).index(name), family=family, weights="Q8_0", **shape)
    if family == "gptneox":
        model = replace(model, output_bias=None)  # llama.cpp reads none there
    path, declared = folder / f"{name}.gguf", {"context": model.config.context}  # LongRoPE's must be
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source.gguf"
        write_gguf(source, model, fused=False)
        convert(load(source, overrides=declared), path, open_model(source))
    config = load(path, overrides=declared).config
    logits, nodes = theirs.run(path, TOKENS, pooled=config.pooling != "none")
    tensors = {str(key): array for key, array in points(config, nodes, len(TOKENS)).items()} | {"result_output": logits}
    np.savez_compressed(folder / f"{name}.npz", tokens=TOKENS, **tensors)  # type: ignore[arg-type]
    print(f"{name}: {len(tensors)} tensors")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args(argv)
    try:
        theirs = LlamaCpp()
        for name in FAMILIES:
            record(theirs, name, options.folder)
    except Error as error:
        print(f"record_llamacpp_families.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
