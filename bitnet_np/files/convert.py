"""A loaded model -> a GGUF file that is the same model to the bit, or a refusal.

Ternary matrices stay ternary: as a float matrix the same numbers would take float32 activations instead of int8 ones. Floats may become
wider. They become narrower, and so does the scale of a ternary matrix, where no number changes or the caller allows rounding. One thing
has to change: GGUF's Llama rotates adjacent numbers of a head, transformers' Llama its halves, so rows of queries and keys are permuted.
That leaves every product as it was, but the sums of q . k are added in another order: logits then agree to float32 rounding, not to the
bit.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ..base.errors import NonFiniteError, UnsupportedError
from ..base.tensor_types import BF16, F16, F32, I2_S, TERNARY_TYPES, TQ1_0, TQ2_0, TensorType
from ..kernels.activations import bfloat16_bits
from ..kernels.float_state import steady
from ..model import packing, widen
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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a loaded model with the name and the tokenizer of its source. The new file is loaded once before it gets its name.

    matrix: one of TYPES, for the layers' matrices. head: one of HEADS, for the embedding and the head. None: as they are; ternary
    matrices that came in none of ggml's types become I2_S. rounding: whether a narrower float type may change numbers, and TQ1_0 and TQ2_0
    the scales of matrices.

    Raises UnsupportedError, naming the tensor, if the type that is asked for, or GGUF, cannot hold it without a change; NonFiniteError if
    a number is beyond the range of a narrower type.
    """
    own = source.metadata
    metadata = {key: value for key, value in own.items() if key.startswith("tokenizer.")} or {"tokenizer.ggml.model": "none"}
    metadata |= {key: value for key, value in own.items() if key.startswith("general.") and key not in _OWN}
    metadata["general.name"] = str(own.get("general.name", source.path.resolve().name))
    if matrix is None and type(own.get("general.file_type")) is int:  # else it is that of the matrices
        metadata["general.file_type"] = own["general.file_type"]
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
        return packing.from_i2s(codes, weights.scale, weights.shape)
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
        return Stored(kind, blocks.shape, lambda: _as_blocks(blocks.shape, kind, lambda rows: widen.take(blocks, rows)))
    if not isinstance(weights, Ternary):
        raise UnsupportedError(f"tensor {name} is not -1, 0, +1 times one scale: it cannot be {kind.name} without loss")
    n, m = weights.shape
    check_rows(name, weights, kind)
    if kind is I2_S:
        return Stored(I2_S, (n, m), lambda: packing.to_i2s(weights))
    scale = weights.scale
    with np.errstate(over="ignore"):
        half = np.float32(np.float16(scale))
    if not 0 < half < np.inf or (half != scale and not rounding):
        hint = "" if not 0 < half < np.inf else ": --allow-rounding lets it change"
        raise UnsupportedError(f"tensor {name} has the scale {scale}, and those of {kind.name} are float16 numbers above 0{hint}")

    def make() -> NDArray:
        codes = packing.unpack(weights)
        return _as_blocks((n, m), kind, lambda rows: codes[rows] * half)

    return Stored(kind, (n, m), make)


def _as_blocks(shape: tuple[int, int], kind: TensorType, rows: Callable[[slice], NDArray[np.float32]]) -> NDArray[np.uint8]:
    """The bytes of a matrix whose blocks are -1, 0, +1 times a float16, as TQ1_0 or TQ2_0. rows: some rows as float32."""
    ggml_type, step = gguf.GGMLQuantizationType(kind.number), max(1, _CHUNK // shape[1])
    return np.concatenate([gguf.quants.quantize(rows(slice(i, i + step)), ggml_type) for i in range(0, shape[0], step)])


def _floats(name: str, table: Table, kind: TensorType, rounding: bool) -> Stored:
    """A table as floats of another type. `make` raises UnsupportedError for a number that would change, unless `rounding` allows it."""
    n, m = table.shape
    dtype = FLOATS[kind]
    if not isinstance(table, Blocks) and table.dtype == dtype:
        return stored(name, table)

    def make() -> NDArray:
        out: NDArray[Any] = np.empty((n, m), dtype)
        step = max(1, _CHUNK // m)
        for i in range(0, n, step):
            wide = widen.take(table, slice(i, i + step))
            with np.errstate(over="ignore"):  # to the nearest number of the type, ties to even
                out[i : i + step] = narrow = bfloat16_bits(wide) if kind is BF16 else wide.astype(dtype)
            back = widen.float32(narrow)
            if not np.isfinite(back).all():
                example = wide[~np.isfinite(back)][0]
                raise NonFiniteError(f"tensor {name} has the number {example}, which is none of {kind.name}'s that a model may have")
            if not rounding and (back != wide).any():
                example = wide[back != wide][0]
                number = f"the number {example}, which is none of {kind.name}'s"
                raise UnsupportedError(f"tensor {name} has {number}: --allow-rounding lets it change")
        return out

    return Stored(kind, (n, m), make)
