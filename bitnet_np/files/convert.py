"""Any model that can be loaded, as a GGUF file that is the same model to the bit, or a refusal.

Ternary matrices stay ternary: as a float matrix the same numbers would take float32 activations instead of int8 ones. Floats may become
wider, or narrower where no number changes (or the caller allows rounding). One thing has to change: GGUF's Llama rotates adjacent numbers
of a head, transformers' Llama its halves, so rows of queries and keys are permuted. That leaves every product as it was, but the sums of
q . k are added in another order: logits then agree to float32 rounding, not to the bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from .. import packing, widen
from ..errors import NonFiniteError, UnsupportedError
from ..families import FAMILIES
from ..kernels.blocks import bfloat16_bits
from ..model import Blocks, Config, Model, Table, Ternary, Weights
from ..tensor_types import BF16, F16, F32, I2_S, TERNARY_TYPES, TQ1_0, TQ2_0, TensorType
from .gguf_writer import Stored, stored, write_model
from .load import load
from .source import Source
from .tensors import FLOATS

TYPES = {kind.name: kind for kind in (I2_S, TQ1_0, TQ2_0, F16, F32)}
"""What matrices of layers can be written as."""
HEADS = {kind.name: kind for kind in (F16, F32, BF16)}
"""And the embedding and the head."""
_CHUNK = 1 << 20  # numbers that are widened at a time
_OWN = ("general.architecture", "general.name", "general.file_type", "general.quantization_version", "general.alignment")
_ROTATED = ("attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias")


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
    """Write a loaded model, with the name and the tokenizer that its source has. What is written has been loaded once.

    matrix: one of TYPES, for the layers' matrices; head: one of HEADS, for the embedding and the head; None: as they are, ternary matrices
    that came in no type of ggml's as I2_S. rounding: whether a narrower float type may change numbers.

    Raises UnsupportedError naming the tensor where the type that is asked for, or GGUF, cannot hold it without a change, NonFiniteError
    where a narrower type has no finite number for one.
    """
    metadata = source.metadata
    tokenizer = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")} or {"tokenizer.ggml.model": "none"}
    general = {key: value for key, value in metadata.items() if key.startswith("general.") and key not in _OWN}
    name = metadata.get("general.name", source.path.resolve().name)
    permuted = is_permuted(model.config)

    def encode(name: str, weights: Weights) -> Stored:
        found = _encoded(model.config, name, weights, matrix, head, rounding)
        if not (permuted and name.endswith(_ROTATED)):
            return found

        def turned() -> NDArray:
            return _encoded(model.config, name, _permuted(weights, model.config), matrix, head, rounding).make()

        return found._replace(make=turned)

    try:
        write_model(
            out,
            replace(model, config=replace(model.config, rope="adjacent")) if permuted else model,
            tokenizer,
            encode=encode,
            name=str(name),
            file_type=_file_type(metadata) if matrix is None else None,
            general=general,
            progress=progress,
            check=load,
        )
    except (UnsupportedError, NonFiniteError) as error:
        raise type(error)(f"{source.path}: {error}") from None


def _file_type(metadata: Mapping[str, Any]) -> int | None:
    value = metadata.get("general.file_type")
    return value if type(value) is int else None


def is_permuted(c: Config) -> bool:
    """Whether rows of queries and keys change places: halves of a head become adjacent numbers."""
    return c.rope == "halves" and FAMILIES[c.architecture].config["rope"] == "adjacent"


def _permuted(weights: Weights, c: Config) -> Weights:
    """Rows of a head from halves, i and i + J, to adjacent ones, 2i and 2i + 1."""
    order = np.arange(weights.shape[0]).reshape(-1, 2, c.head_dim // 2).swapaxes(1, 2).reshape(-1)
    if isinstance(weights, Ternary):
        codes = packing.i2s_codes(packing.unpack(weights)[order])
        return packing.from_i2s(codes, weights.scale, weights.shape)
    return replace(weights, data=weights.data[order]) if isinstance(weights, Blocks) else weights[order]


def _encoded(c: Config, name: str, weights: Weights, matrix: TensorType | None, head: TensorType | None, rounding: bool) -> Stored:
    """A tensor in the type that is asked for."""
    if name in ("token_embd.weight", "output.weight"):
        assert not isinstance(weights, Ternary)
        return stored(name, weights) if head is None else _floats(name, weights, head, rounding)
    if not name.startswith("blk.") or len(weights.shape) != 2:
        return stored(name, weights)
    ternary = isinstance(weights, Ternary) or (isinstance(weights, Blocks) and weights.type in TERNARY_TYPES)
    if FAMILIES[c.architecture].ternary and not ternary:
        raise UnsupportedError(f"tensor {name} is not ternary, but all matrices of a GGUF file of architecture {c.architecture} are")
    wanted = matrix or (I2_S if isinstance(weights, Ternary) and weights.blocks is None else None)
    if wanted is None:
        return stored(name, weights)
    if wanted in (I2_S, *TERNARY_TYPES):
        return _ternary(name, weights, wanted)
    if ternary:
        raise UnsupportedError(f"tensor {name} is ternary and takes int8 activations: as {wanted.name} it would be another model")
    assert not isinstance(weights, Ternary)
    return _floats(name, weights, wanted, rounding)


def _ternary(name: str, weights: Weights, wanted: TensorType) -> Stored:
    blocks = weights.blocks if isinstance(weights, Ternary) else weights
    if isinstance(blocks, Blocks) and blocks.type is wanted:
        return stored(name, blocks)
    if not isinstance(weights, Ternary):
        raise UnsupportedError(f"tensor {name} is not -1, 0, +1 times one scale: it cannot be {wanted.name} without loss")
    n, m = weights.shape
    if m % wanted.block:
        raise UnsupportedError(f"tensor {name} has rows of {m} weights, and those of {wanted.name} are multiples of {wanted.block}")
    if wanted is I2_S:
        return Stored(I2_S, (n, m), lambda: packing.to_i2s(weights))
    scale = weights.scale
    with np.errstate(over="ignore"):
        half = np.float32(np.float16(scale))
    if half != scale or not scale > 0:
        raise UnsupportedError(f"tensor {name} has the scale {scale}, and those of {wanted.name} are float16 numbers above 0")

    def make() -> NDArray:
        codes = packing.unpack(weights)
        kind, step = gguf.GGMLQuantizationType(wanted.number), max(1, _CHUNK // m)
        return np.concatenate([gguf.quants.quantize(codes[i : i + step] * scale, kind) for i in range(0, n, step)])

    return Stored(wanted, (n, m), make)


def _floats(name: str, table: Table, wanted: TensorType, rounding: bool) -> Stored:
    n, m = table.shape
    dtype = FLOATS[wanted]
    if not isinstance(table, Blocks) and table.dtype == dtype:
        return stored(name, table)

    def make() -> NDArray:
        out: NDArray[Any] = np.empty((n, m), dtype)
        step = max(1, _CHUNK // m)
        for i in range(0, n, step):
            wide = widen.take(table, slice(i, i + step))
            out[i : i + step] = narrow = _narrowed(wide, wanted)
            back = widen.float32(narrow)
            if not np.isfinite(back).all():
                example = wide[~np.isfinite(back)][0]
                raise NonFiniteError(f"tensor {name} has the number {example}, which is none of {wanted.name}'s that a model may have")
            if not rounding and (back != wide).any():
                example = wide[back != wide][0]
                raise UnsupportedError(
                    f"tensor {name} has the number {example}, which is none of {wanted.name}'s: --allow-rounding lets it change"
                )
        return out

    return Stored(wanted, (n, m), make)


def _narrowed(wide: NDArray[np.float32], wanted: TensorType) -> NDArray:
    """To the nearest number, ties to even."""
    if wanted is BF16:
        return bfloat16_bits(wide)
    with np.errstate(over="ignore"):
        return wide.astype(np.float16 if wanted is F16 else np.float32)
