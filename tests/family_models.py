"""Random models of every architecture, small and of widths that every tensor type can have."""

import numpy as np
from models import random_model

from bitnet_np.model import Ternary

SHAPE = {"width": 256, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 23, "context": 40, "n_layers": 2}
SHAPE |= {"eps": float(np.float32(1e-5))}


def drawn(family, weights="", **changes):
    more = {"rope_width": 16, "parallel_residual": True} if family == "gptneox" else {}
    return random_model(3, family=family, weights=weights, **{**SHAPE, **more, **changes})


def half_scales(model):
    """With scales that float16 has, too."""
    for layer in model.layers:
        for value in vars(layer).values():
            if isinstance(getattr(value, "weights", None), Ternary):
                object.__setattr__(value.weights, "scale", np.float32(np.float16(value.weights.scale)))
    return model
