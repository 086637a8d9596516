"""Loss and gradients of batches, to judge a training engine by: definition.py, with its arguments checked."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import NonFiniteError, OptionError, ShapeError, UnsupportedError
from ..base.tensor_types import TERNARY_TYPES
from ..base.validate import choice, instance, positive
from ..engine.tokens import check_context, check_tokens
from ..model import packing, widen
from ..model.checks import check_model, ternary_flaws
from ..model.families import FAMILIES, NORMS, layer_shapes
from ..model.records import MATRICES, Blocks, Config, Linear, Model, Ternary
from ..model.rope import scaling_factors
from . import definition

Parameter = NDArray[np.floating] | Ternary
Quantizer = Literal["ternary", "none"]
"""How matrices of floats are quantised."""
FACTORS = "rope_freqs.weight"


def loss_and_gradients(
    config: Config,
    parameters: Mapping[str, Parameter],
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    weights: Quantizer = "ternary",
    divisor: float | None = None,
) -> tuple[float, dict[str, definition.Array]]:
    """Next-token cross-entropy in nats, and its gradient for every parameter by the same names, in float64.

    parameters: arrays of floats by GGUF's names, as the family of config.architecture has them: token_embd.weight [V, D],
    blk.<n>.attn_q.weight [H*K, D], ..., output_norm.weight [D]; output.weight [V, D] where the head is not the embedding, and biases
    blk.<n>.attn_q.bias [H*K] where the family can have them. rope_freqs.weight [J] divides RoPE's frequencies and gets no gradient.
    tokens: integers [B, T]; lengths: [B], how many of the T are tokens of each sequence, at least 2. Each token but the last of its
    sequence predicts the next; the loss is the sum over all of them / divisor.

    weights: how the layers' matrices of floats are quantised. "ternary": to -1, 0, +1 times their absmean, and their inputs to int8
    codes; "none": neither is quantised. A matrix may also be a `Ternary` already: its gradient is the dequantised matrix's.
    divisor: by default the number of predicted tokens. With the divisor of a larger batch, losses and gradients of its parts add up.

    Memory: about 17 bytes for each parameter, and 16 * (10 D + 5 F + H T) for each token and layer: all activations are kept.

    Raises UnsupportedError for a family that is not BitNet's or Llama's, ShapeError for a parameter or tokens of a wrong shape,
    ContextLimitError, TokenRangeError, EmptyInputError, OptionError, and NonFiniteError for NaN or infinity in a parameter or the result.
    """
    _check_covered(instance("config", config, Config))
    if not isinstance(parameters, Mapping):
        raise OptionError(f"parameters is a {type(parameters).__name__}, expected a mapping of names to arrays")
    choice("weights", weights, get_args(Quantizer))
    values = _checked(config, parameters)
    ids, counts = check_tokens(config, tokens, lengths)
    if counts.min() < 2:
        raise ShapeError(f"sequence {int(counts.argmin())} has {counts.min()} token, expected at least 2: one to predict and one before it")
    check_context(config, counts)
    divisor = None if divisor is None else positive("divisor", divisor)

    def quantizers(name: str) -> definition.Quantizers:
        if isinstance(parameters[name], Ternary):
            return definition.DEQUANTIZED
        return definition.MASTERS if weights == "ternary" else definition.FLOATS

    scaling = scaling_factors(config)
    factors = values.pop(FACTORS, 1.0) if scaling is None else scaling
    sequences = [row[:count] for row, count in zip(ids, counts, strict=True)]
    with np.errstate(all="ignore"):
        loss, gradients = definition.loss_and_gradients(config, values, sequences, quantizers, divisor, factors)
    for name, gradient in gradients.items():
        if not (np.isfinite(loss) and np.isfinite(gradient).all()):
            raise NonFiniteError(f"the loss is {loss}, or the gradient of {name} has NaN or infinity in it: beyond float64's range")
    return loss, gradients


def parameter_shapes(config: Config, tied: bool = True) -> dict[str, tuple[int, ...]]:
    """The parameters of a model without biases, by GGUF's names, and their shapes. tied: the head is the embedding."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab, config.width)}
    for n in range(config.n_layers):
        shapes |= {f"blk.{n}.{name}.weight": shape for name, shape in layer_shapes(config).items()}
    shapes["output_norm.weight"] = (config.width,)
    return shapes if tied else shapes | {"output.weight": (config.vocab, config.width)}


def parameters_of(model: Model) -> dict[str, Parameter]:
    """A model's parameters for `loss_and_gradients` with weights="none": ternary matrices as they are, the others widened to float32.

    Raises UnsupportedError for a family or tensors that have no gradient here: factors, inner norms, the head's bias.
    """
    check_model(model)
    _check_covered(model.config)
    if model.output_bias is not None:
        raise UnsupportedError("output.bias has no gradient here")
    tables: dict[str, Any] = {"token_embd": model.token_embd}
    for n, layer in enumerate(model.layers):
        tables |= {f"blk.{n}.{field}": getattr(layer, field) for field in layer_shapes(model.config)}
    tables |= {"output_norm": model.output_norm, "output": model.output}
    parameters: dict[str, Parameter] = {}
    behind: dict[str, Parameter] = {}
    for name, value in tables.items():
        if isinstance(value, Linear):
            if value.scale is not None or value.norm is not None:
                raise UnsupportedError(f"{name} has a {'factor' if value.norm is None else 'norm inside'}, which has no gradient here")
            if value.bias is not None:
                behind[f"{name}.bias"] = value.bias
            value = value.weights
            if isinstance(value, Blocks) and value.type in TERNARY_TYPES:
                raise UnsupportedError(f"{name} is {value.type.name} of several scales, which has no gradient here")
        if value is not None:
            parameters[f"{name}.weight"] = value if isinstance(value, Ternary) else widen.float32(value)
    if model.rope_factors is not None and scaling_factors(model.config) is None:
        behind[FACTORS] = model.rope_factors
    return parameters | behind


# --- checks ---------------------------------------------------------------------------------------------------------------------------

_FREE = {"rope", "rope_width", "rope_scaling", "rope_magnitude", "yarn", "longrope", "activation", "window", "window_layers", "pooling"}
"""The fields of Config that definition.py reads, or that change no logits. Sizes apart, all others must have their defaults."""


def _check_covered(c: Config) -> None:
    """Raises UnsupportedError for a model that does what definition.py does not."""
    family = FAMILIES.get(c.architecture)
    if family is None or family.norms not in (NORMS, ("attn_norm", "ffn_norm")) or family.head_norms:
        raise UnsupportedError(f"architecture is {c.architecture!r}, gradients are there for BitNet's and Llama's")
    beyond = {"activation": c.activation not in definition.GATES, "rope": c.rope == "none"}
    beyond |= {f.name: getattr(c, f.name) != f.default for f in fields(c) if f.default is not MISSING and f.name not in _FREE}
    if names := [name for name, is_beyond in beyond.items() if is_beyond]:
        raise UnsupportedError(f"{names[0]} is {getattr(c, names[0])!r}, which has no gradient here")


def _checked(c: Config, parameters: Mapping[str, Parameter]) -> dict[str, definition.Array]:
    """The parameters in float64, ternary matrices dequantised. Raises ShapeError or NonFiniteError."""
    shapes = _shapes(c, parameters)
    return {name: _in_float64(name, value, shapes[name]) for name, value in parameters.items()}


def _shapes(c: Config, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter that a model with parameters of these names may have. Raises ShapeError for other names."""
    family, of_layer, layers = FAMILIES[c.architecture], layer_shapes(c), range(c.n_layers)
    shapes = parameter_shapes(c, "output.weight" not in names)
    shapes |= {f"blk.{n}.{field}.bias": of_layer[field][:1] for n in layers for field in family.biases}
    if missing := [name for name in shapes if name not in names]:
        raise ShapeError(f"parameter {missing[0]} is missing, expected floats {list(shapes[missing[0]])}")
    shapes |= {f"blk.{n}.{field}.bias": of_layer[field][:1] for n in layers for field in family.optional_biases}
    if family.rope_factors and scaling_factors(c) is None:
        shapes[FACTORS] = (c.rope_pairs,)
    if unknown := [name for name in names if name not in shapes]:
        raise ShapeError(f"parameter {unknown[0]!r} has no place in a {c.architecture} of {c.n_layers} layers")
    return shapes


def _in_float64(name: str, value: Parameter, shape: tuple[int, ...]) -> definition.Array:
    """A parameter of this shape in float64."""
    if isinstance(value, Ternary) and name.removesuffix(".weight").rpartition(".")[2] in MATRICES:
        for flaw in ternary_flaws(name, value, (shape[0], shape[1])):
            raise ShapeError(f"parameter {flaw}")
        value = packing.unpack(value) * float(value.scale)
    if not (isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.shape == shape):
        kind = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ShapeError(f"parameter {name} is {kind}, expected floats {list(shape)}")
    if not np.isfinite(value).all():
        raise NonFiniteError(f"parameter {name} has NaN or infinity in it")
    return value.astype(np.float64)
