"""Trained parameters as a model file: the ternary matrices packed as I2_S, and the embedding in float16."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np.files import gguf_writer
from bitnet_np.model.records import Config
from bitnet_np.training.gradients import model_of

# Part of the bytes of the shipped file, so it keeps the path of the program that made it.
DESCRIPTION = "small stories and sums, trained from scratch on generated text by scripts/train_demo.py"
GENERAL = {"general.name": "bitnet_np demo", "general.description": DESCRIPTION, "general.license": "mit"}


def write(path: Path, config: Config, parameters: Mapping[str, NDArray[np.float32]], tokenizer: Mapping[str, Any]) -> None:
    """Write the model file, with the embedding, and so the head, as released files have it. `path` appears only when it is complete."""
    rounded = parameters["token_embd.weight"].astype(np.float16)
    gguf_writer.write_model(path, replace(model_of(config, parameters), token_embd=rounded), {**tokenizer, **GENERAL})
