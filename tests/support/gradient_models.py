"""Configs and master weights for the tests of gradients, with the results of the definition and of torch."""

import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from bitnet_np.model import families
from bitnet_np.model.families import layer_shapes
from bitnet_np.model.records import Config
from bitnet_np.training import spec as spec_grad
from bitnet_np.training.gradients import parameter_shapes

SHAPE = {"vocab": 11, "width": 12, "n_layers": 2, "ffn": 10, "heads": 4, "kv_heads": 2, "head_dim": 4, "context": 300}
FAMILIES = ("bitnet-b1.58", "bitnet", "llama", "qwen2")
WINDOW = st.sampled_from([None, 1, 3, 70])
WIDTHS = st.integers(1, 20) | st.sampled_from([63, 64, 65, 130])
SMOOTH = {"activations": spec_grad.smooth, "weights": spec_grad.smooth}
RECORDINGS = ("relu2_tied", "silu_untied")


def recording(name):
    """A model in torch, its loss and its gradients: config, parameters, tokens, loss, gradients."""
    arrays = np.load(Path(__file__).parents[1] / "data" / "hf_gradients" / f"{name}.npz")

    def named(kind):
        return {key.removeprefix(kind): arrays[key] for key in arrays if key.startswith(kind)}

    config = Config(**json.loads(str(arrays["config"])))
    return config, named("parameters/"), arrays["tokens"], float(arrays["loss"]), named("gradients/")


def config_of(family, **shape):
    """A small config of a family."""
    settings = {"eps": 1e-5, "rope_base": 100.0, **SHAPE, **families.FAMILIES[family].config}
    return Config(family, **{**settings, **shape})


def random_parameters(rng, config, tied, dtype=np.float32):
    """Norms around 1 and rows of about unit length, so that every part matters; biases where the family may have them."""

    def draw(shape):
        return rng.normal(1, 0.3, shape) if len(shape) == 1 else rng.normal(size=shape) / shape[1] ** 0.5

    parameters = {name: draw(shape).astype(dtype) for name, shape in parameter_shapes(config, tied).items()}
    family = families.FAMILIES[config.architecture]
    for n in range(config.n_layers):
        for field in family.biases + family.optional_biases:
            parameters[f"blk.{n}.{field}.bias"] = rng.normal(0, 0.3, layer_shapes(config)[field][0]).astype(dtype)
    parameters["token_embd.weight"] *= 3
    return parameters


def normal(rng, *shape):
    """Rows of very different magnitudes, so that a number of a wrong row shows."""
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-4, 5, (shape[0], *[1] * (len(shape) - 1))))).astype(np.float32)


def wide(parameters):
    """The parameters in float64."""
    return {name: value.astype(np.float64) for name, value in parameters.items()}


def summed(config, parameters, sequences, **how):
    """The definition's loss and gradients of a batch."""
    divisor = sum(len(sequence) - 1 for sequence in sequences)
    parts = [spec_grad.loss_and_gradients(config, wide(parameters), sequence, divisor=divisor, **how) for sequence in sequences]
    return sum(loss for loss, _ in parts), {name: sum(gradients[name] for _, gradients in parts) for name in parameters}
