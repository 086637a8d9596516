"""A loaded model -> a GGUF file that is the same model to the bit, or a refusal.

Ternary matrices stay ternary: as a float matrix the same numbers would take float32 activations instead of int8 ones. Floats may become
wider. They, and the scale of a ternary matrix, become narrower only if no number changes or the caller allows rounding. One thing has to
change: GGUF's Llama rotates adjacent numbers of a head, transformers' Llama its halves, so rows of queries and keys are permuted. That
leaves every product as it was, but the sums of q . k are added in another order: logits then agree to float32 rounding, not to the bit.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from ..base.errors import NonFiniteError, UnsupportedError
from ..base.progress import Progress, silent
from ..base.tensor_types import BF16, F16, F32, I2_S, TERNARY_TYPES, TQ1_0, TQ2_0, TensorType
from ..kernels.float_state import steady
from ..model import packing, ternarize, widen
from ..model.families import FAMILIES
from ..model.records import Blocks, Config, Model, Table, Ternary, Weights
from .gguf_writer import Stored, check_rows, stored, write_model
from .load import Source, load
from .tensors import FLOATS

TYPES = {kind.name: kind for kind in (I2_S, TQ1_0, TQ2_0, F16, F32)}
"""The types that matrices of layers can be written as."""

HEADS = {kind.name: kind for kind in (F16, F32, BF16)}
"""The types that the embedding and the head can be written as."""

_CHUNK = 1 << 20  # numbers that are widened at a time
_OWN = ("general.architecture", "general.name", "general.file_type", "general.quantization_version", "general.alignment")
_ROTATED = ("attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias")


@steady
def convert(
    model: Model,
    out: Path,
    source: Source,
    *,
    matrix: TensorType | None = None,
    head: TensorType | None = None,
    rounding: bool = False,
    progress: Progress = silent,
) -> None:
    """Write a loaded model with the name and the tokenizer of its source. The new file is loaded once before it gets its name.

    matrix: one of TYPES, for the layers' matrices. head: one of HEADS, for the embedding and the head. None: as they are; ternary
    matrices that came in none of ggml's types become I2_S. rounding: whether a narrower float type may change numbers, and TQ1_0 and TQ2_0
    the scales of matrices.

    Raises UnsupportedError, naming the tensor, if the type that is asked for, or GGUF, cannot hold it without a change; NonFiniteError if
    a number is beyond the range of a narrower type.
    """
    stated = source.metadata
    metadata = {key: value for key, value in stated.items() if key.startswith("tokenizer.")} or {"tokenizer.ggml.model": "none"}
    metadata |= {key: value for key, value in stated.items() if key.startswith("general.") and key not in _OWN}
    metadata["general.name"] = str(stated.get("general.name", source.path.resolve().name))
    if matrix is None and type(stated.get("general.file_type")) is int:  # else it is the matrices' type
        metadata["general.file_type"] = stated["general.file_type"]
    permuted = is_permuted(model.config)
    encoded = partial(_encoded, model.config, matrix, head, rounding)

    def encode(name: str, weights: Weights) -> Stored:
        tensor = encoded(name, weights)
        if not (permuted and name.endswith(_ROTATED)):
            return tensor
        return tensor._replace(make=lambda: encoded(name, _permuted(weights, model.config)).make())

    try:
        write_model(
            out,
            replace(model, config=replace(model.config, rope="adjacent")) if permuted else model,
            metadata,
            encode=encode,
            progress=progress,
            check=lambda path: load(path, overrides={"context": model.config.context}),  # LongRoPE's is declared
        )
    except (UnsupportedError, NonFiniteError) as error:
        raise type(error)(f"{source.path}: {error}") from None


def is_permuted(c: Config) -> bool:
    """Whether converting permutes rows of queries and keys: halves of a head become adjacent numbers."""
    return c.rope == "halves" and FAMILIES[c.architecture].config["rope"] == "adjacent"


def _permuted(weights: Weights, c: Config) -> Weights:
    """Rows of each head, ordered by halves (i and i + J), in the order of adjacent pairs (2i and 2i + 1)."""
    order = np.arange(weights.shape[0]).reshape(-1, 2, c.head_dim // 2).swapaxes(1, 2).reshape(-1)
    if isinstance(weights, Ternary):
        codes = packing.i2s_codes(packing.unpack(weights)[order])
        return ternarize.from_i2s(codes, weights.scale, weights.shape)
    return replace(weights, data=weights.data[order]) if isinstance(weights, Blocks) else weights[order]


def _encoded(c: Config, matrix: TensorType | None, head: TensorType | None, rounding: bool, name: str, weights: Weights) -> Stored:
    """The tensor in the type that is asked for; arguments as in `convert`."""
    if name in ("token_embd.weight", "output.weight"):
        assert not isinstance(weights, Ternary)
        return stored(name, weights) if head is None else _floats(name, weights, head, rounding)
    if not name.startswith("blk.") or len(weights.shape) != 2 or name.endswith(".ffn_gate_inp.weight"):  # engines keep routers as they are
        return stored(name, weights)
    ternary = isinstance(weights, Ternary) or (isinstance(weights, Blocks) and weights.type in TERNARY_TYPES)
    if FAMILIES[c.architecture].ternary and not ternary:
        raise UnsupportedError(f"tensor {name} is not ternary, but all matrices of a GGUF file of architecture {c.architecture} are")
    kind = matrix or (I2_S if isinstance(weights, Ternary) and weights.blocks is None else None)
    if kind is None:
        return stored(name, weights)
    if kind in (I2_S, *TERNARY_TYPES):
        return _ternary(name, weights, kind, rounding)
    if ternary:
        raise UnsupportedError(f"tensor {name} is ternary and takes int8 activations: as {kind.name} it would be another model")
    assert not isinstance(weights, Ternary)
    return _floats(name, weights, kind, rounding)


def _ternary(name: str, weights: Weights, kind: TensorType, rounding: bool) -> Stored:
    """A ternary matrix as I2_S, TQ1_0 or TQ2_0. Raises UnsupportedError if that type cannot hold it, or only with a rounded scale."""
    blocks = weights.blocks if isinstance(weights, Ternary) else weights
    if isinstance(blocks, Blocks) and blocks.type is kind:
        return stored(name, blocks)
    if isinstance(blocks, Blocks) and blocks.type in TERNARY_TYPES and kind is not I2_S:  # each block keeps its scale
        return _written_as(kind, name, blocks.shape, lambda rows: widen.take(blocks, rows))
    if not isinstance(weights, Ternary):
        raise UnsupportedError(f"tensor {name} is not -1, 0, +1 times one scale: it cannot be {kind.name} without loss")
    check_rows(name, weights, kind)
    if kind is I2_S:
        return Stored(I2_S, weights.shape, lambda: packing.to_i2s(weights))
    with np.errstate(over="ignore"):
        half = np.float32(np.float16(weights.scale))
    if not 0 < half < np.inf or (half != weights.scale and not rounding):
        hint = "" if not 0 < half < np.inf else ": --allow-rounding lets it change"
        raise UnsupportedError(f"tensor {name} has the scale {weights.scale}, and those of {kind.name} are float16 numbers above 0{hint}")
    numbers = np.arange(weights.shape[0])
    return _written_as(kind, name, weights.shape, lambda rows: packing.unpack_rows(weights, numbers[rows]) * half)


def _floats(name: str, table: Table, kind: TensorType, rounding: bool) -> Stored:
    """A table as floats of another type."""
    if not isinstance(table, Blocks) and table.dtype == FLOATS[kind]:
        return stored(name, table)
    n, m = table.shape
    return _written_as(kind, name, (n, m), lambda rows: widen.take(table, rows), rounding)


def _written_as(
    kind: TensorType, name: str, shape: tuple[int, int], rows: Callable[[slice], NDArray[np.float32]], rounding: bool = False
) -> Stored:
    """A matrix in another type, as gguf-py writes it. rows: some of its rows as float32.

    `make` raises NonFiniteError for a number beyond the type's range, UnsupportedError for one that would change without `rounding`.
    """
    ggml_type, step = gguf.GGMLQuantizationType(kind.number), max(1, _CHUNK // shape[1])

    def piece(wide: NDArray[np.float32]) -> NDArray:
        with np.errstate(over="ignore"):  # to the nearest number of the type, ties to even
            narrow = gguf.quants.quantize(wide, ggml_type)
        back = gguf.quants.dequantize(narrow, ggml_type)
        if not np.isfinite(back).all():
            example = wide[~np.isfinite(back)][0]
            raise NonFiniteError(f"tensor {name} has the number {example}, which is none of {kind.name}'s that a model may have")
        if not rounding and (back != wide).any():
            number = f"the number {wide[back != wide][0]}, which is none of {kind.name}'s"
            raise UnsupportedError(f"tensor {name} has {number}: --allow-rounding lets it change")
        return narrow

    return Stored(kind, shape, lambda: np.concatenate([piece(rows(slice(i, i + step))) for i in range(0, shape[0], step)]))
