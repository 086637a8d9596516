"""Trained parameters as a model file: the ternary matrices packed as I2_S, and the embedding in float16."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np.files import gguf_writer
from bitnet_np.model.records import Config, Layer, Linear, Model
from bitnet_np.model.rope import rope_frequencies
from bitnet_np.training.gradients import quantize

NAME = "bitnet_np demo"
# Part of the bytes of the shipped file, so it keeps the path of the program that made it.
DESCRIPTION = "small stories and sums, trained from scratch on generated text by scripts/train_demo.py"


def model(config: Config, parameters: Mapping[str, NDArray[np.float32]]) -> Model:
    """The model that inference runs: matrices ternary, the embedding (and so the head) rounded to float16, as released files have it."""

    def layer(n: int) -> Layer:
        prefix = f"blk.{n}."
        ours = {name.removeprefix(prefix).removesuffix(".weight"): x for name, x in parameters.items() if name.startswith(prefix)}
        fields: dict[str, Any] = {name: Linear(quantize(x)) if x.ndim == 2 else x for name, x in ours.items()}
        return Layer(**fields)

    return Model(
        config=config,
        token_embd=parameters["token_embd.weight"].astype(np.float16),
        layers=tuple(layer(n) for n in range(config.n_layers)),
        output_norm=parameters["output_norm.weight"],
        rope_frequency=rope_frequencies(config.rope_base, 2 * config.rope_pairs),
    )


def write(path: Path, config: Config, parameters: Mapping[str, NDArray[np.float32]], tokenizer: Mapping[str, Any]) -> None:
    """Write the model file. `path` appears only when it is complete."""
    general = {"general.name": NAME, "general.description": DESCRIPTION, "general.license": "mit"}
    gguf_writer.write_model(path, model(config, parameters), {**tokenizer, **general})
