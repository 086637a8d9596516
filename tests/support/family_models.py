"""Small random models of every architecture, of widths that every tensor type allows, and their files."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fuzzing.gguf_bytes import Document
from models import random_model

from bitnet_np.base.errors import Error
from bitnet_np.files.load import load
from bitnet_np.model.records import Ternary
from bitnet_np.testing.models import write_gguf

SHAPE = {"width": 256, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 23, "context": 40, "n_layers": 2}
SHAPE |= {"eps": float(np.float32(1e-5))}

MORE = {
    "gptneox": {"rope_width": 16, "parallel_residual": True},
    "phi3": {"rope_width": 48},
    "phi2": {"rope_width": 16},
    "stablelm": {"rope_width": 16},
}


def drawn(family, weights="", **changes):
    return random_model(3, family=family, weights=weights, **{**SHAPE, **MORE.get(family, {}), **changes})


def half_scales(model):
    """The model with scales that float16 can hold."""
    for layer in model.layers:
        for _, value in layer.linears():
            if isinstance(value.weights, Ternary):
                object.__setattr__(value.weights, "scale", np.float32(np.float16(value.weights.scale)))
    return model


def writer(folder: Path) -> Callable[..., Path]:
    """A function that writes the file of a model to the folder, with changed keys of its architecture; None leaves a key out."""

    def write(model, fused=None, **keys):
        path = folder / f"{len(list(folder.iterdir()))}.gguf"
        write_gguf(path, model, fused=fused)
        if keys:
            rewrite(path, model.config.architecture, keys)
        return path

    return write


def rewrite(path, architecture, keys):
    document = Document.read(path)
    document.put({key if key.startswith(("general.", "split.")) else f"{architecture}.{key}": value for key, value in keys.items()})
    path.unlink()  # a new file: it may be mapped
    path.write_bytes(document.bytes())


def assert_refused(path, error, *parts):
    """That loading it raises this error, whose message begins with the path and has these parts."""
    with pytest.raises(Error) as caught:
        load(path)
    assert type(caught.value) is error
    assert str(caught.value).startswith(str(path))
    assert all(part in str(caught.value) for part in parts), str(caught.value)
