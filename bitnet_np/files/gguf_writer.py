"""A Model -> a GGUF file, through gguf-py's GGUFWriter.

Keys and tensors come in the order of the released BitNet file. A file appears under its name when it is complete, or not at all.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from ..base.errors import UnsupportedError
from ..base.progress import Progress, silent
from ..base.tensor_types import BF16, F16, F32, I2_S, Q1_0, Q2_0, TQ1_0, TQ2_0, TensorType
from ..base.whole_file import whole_file
from ..kernels.float_state import steady
from ..model import packing
from ..model.checks import check_model
from ..model.families import FAMILIES, FUSED
from ..model.records import FLOAT_TYPES, Blocks, Config, Expert, Layer, Linear, Model, Ternary, Weights
from .gguf_config import check_said, config_keys
from .gguf_names import FACTORS, INNER_NORM, LONGROPE, matrix_name, tensor_name

FILE_TYPES = {F32: 0, F16: 1, BF16: 32, TQ1_0: 36, TQ2_0: 37, I2_S: 40, Q1_0: 40, Q2_0: 41}
"""general.file_type, by the type of the file's matrices (llama.h; I2_S's 40 is bitnet.cpp's)."""

QUANTIZATION_VERSION = 2

RELEASED = (
    *("attn_norm", "ffn_down", "ffn_sub_norm", "ffn_gate", "ffn_up", "ffn_norm", "attn_sub_norm"),
    *("attn_k", "attn_output", "attn_q", "attn_v"),
)
"""The fields of records.Layer in the order of the released file's tensors. Fields that it lacks come last."""


class Stored(NamedTuple):
    """A tensor as it is written. `make` gives its bytes when they are wanted, so that one tensor at a time is in memory."""

    type: TensorType
    shape: tuple[int, ...]  # as NumPy orders it, rows first
    make: Callable[[], NDArray]


def write_file(
    path: str | os.PathLike[str],
    c: Config,
    metadata: Mapping[str, Any],
    tensors: Sequence[tuple[str, TensorType, tuple[int, ...]]],
    data: Iterable[NDArray],
    *,
    progress: Progress = silent,
    check: Callable[[Path], object] = lambda path: None,
) -> None:
    """Write a GGUF file. `path` is the complete new file after it, or as it was before if anything fails.

    metadata: keys in addition to those of `c`, which wins if both have a key; a value of None is left out. tensors: name, type and shape of
    each. data: their bytes, in the same order. progress: called after each tensor with those written and all. check: called with the path
    of the complete file before it gets its name; what it raises passes through.
    """
    of_config = config_keys(c)
    keys: dict[str, Any] = {"general.name": None}  # in the order of the released file, but for those that GGUFWriter adds
    for name, value in of_config.items():
        keys |= {"tokenizer.ggml.add_bos_token": None} if name.endswith("epsilon") else {}
        keys[name] = value
    keys |= {"general.file_type": None} | {name: value for name, value in metadata.items() if name not in of_config}
    with whole_file(path) as part, closing(GGUFWriter(part, c.architecture)) as writer:
        for name, value in keys.items():
            if value is not None:
                _add(writer, name, value)
        writer.add_quantization_version(QUANTIZATION_VERSION)
        for name, kind, shape in tensors:
            # GGUFWriter does not know I2_S, but it writes any number as the type, and any shape as given unless the dtype is uint8
            writer.add_tensor_info(name, shape, np.dtype(np.float32), kind.nbytes(int(np.prod(shape, dtype=object))), kind.number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, array in enumerate(data, 1):
            writer.write_tensor_data(array)
            progress(done, len(tensors))
        writer.close()
        check(part)


# --- keys -----------------------------------------------------------------------------------------------------------------------------


_INTEGERS = {
    GGUFValueType.UINT32: range(1 << 32),
    GGUFValueType.INT32: range(-1 << 31, 1 << 31),
    GGUFValueType.UINT64: range(1 << 64),
    GGUFValueType.INT64: range(-1 << 63, 1 << 63),
}
"""The types that integers are written with, and the integers that each holds. The first that holds a value is taken."""


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Write a key with a value of Python's or NumPy's type. An empty array is left out: GGUFWriter cannot tell its type."""
    if isinstance(value, bool | str):
        (writer.add_bool if isinstance(value, bool) else writer.add_string)(key, value)
    elif isinstance(value, int):
        writer.add_key_value(key, value, next(kind for kind, integers in _INTEGERS.items() if value in integers))
    elif isinstance(value, float):
        large = np.isfinite(value) and abs(value) > float(np.finfo(np.float32).max)
        writer.add_key_value(key, value, GGUFValueType.FLOAT64 if large else GGUFValueType.FLOAT32)
    elif isinstance(value, np.ndarray) and len(value):
        writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, GGUFValueType[value.dtype.name.upper()])
    elif len(value):
        writer.add_array(key, list(value))


# --- a model --------------------------------------------------------------------------------------------------------------------------


def present(layer: Layer) -> dict[str, Any]:
    """The fields of a layer that are not None, by name, but for its experts."""
    return {name: value for name, value in vars(layer).items() if value is not None and name != "experts"}


def stored(name: str, weights: Weights) -> Stored:
    """The tensor as it is: float arrays and blocks unchanged, a ternary matrix as the blocks it came in, or as I2_S.

    Raises UnsupportedError for a matrix whose rows I2_S cannot hold.
    """
    if isinstance(weights, Ternary) and weights.blocks is None:
        check_rows(name, weights, I2_S)
        return Stored(I2_S, weights.shape, lambda: packing.to_i2s(weights))
    blocks = weights.blocks if isinstance(weights, Ternary) else weights
    if isinstance(blocks, Blocks):
        return Stored(blocks.type, blocks.shape, lambda: blocks.data)
    assert blocks is not None
    return Stored(FLOAT_TYPES[blocks.dtype], blocks.shape, lambda: blocks)


def check_rows(name: str, weights: Weights, kind: TensorType) -> None:
    """Raises UnsupportedError for a matrix whose rows are no multiple of the type's block."""
    if weights.shape[1] % kind.block:
        rows = f"rows of {weights.shape[1]} weights"
        raise UnsupportedError(f"tensor {name} has {rows}, and those of {kind.name} are multiples of {kind.block}")


Encode = Callable[[str, Weights], Stored]
"""How a tensor of that name is written."""


def model_tensors(model: Model, encode: Encode = stored, fused: Sequence[str] | None = None) -> Iterator[tuple[str, Stored]]:
    """Name and content of every tensor, in the order of the released file.

    fused: the names of families.FUSED that are written, where one tensor can hold all their rows; None: those of the family.
    Raises UnsupportedError for a linear that no GGUF file can say.
    """
    c = model.config
    yield from _tensors({tensor_name(field): [getattr(model, field)] for field in ("token_embd", "position_embd")}, encode)
    if c.longrope is not None:
        yield from _tensors({name: [np.array(getattr(c.longrope, which), np.float32)] for which, name in LONGROPE.items()}, encode)
    elif c.yarn is None:
        yield from _tensors({FACTORS: [model.rope_factors]}, encode)
    for n, layer in enumerate(model.layers):
        named = _fused(n, present(layer), FAMILIES[c.architecture].fused if fused is None else fused, encode)
        first = [field for field in (*RELEASED, "attn_qkv") if field in named]
        for field in dict.fromkeys((*first, *named)):
            linears = named[field]
            if isinstance(linears, np.ndarray):
                yield from _tensors({tensor_name(field, n): [linears]}, encode)
            else:
                yield from _tensors(_parts(c, n, field, linears if isinstance(linears, list) else [linears]), encode)
        if layer.experts:
            yield from _stacks(n, layer.experts, encode)
    last = ("output_norm", "output_norm_bias", "output", "output_bias")
    yield from _tensors({tensor_name(field): [getattr(model, field)] for field in last}, encode)


def _tensors(named: Mapping[str, Sequence[Weights | None]], encode: Encode) -> Iterator[tuple[str, Stored]]:
    """Name and content of tensors that have the rows of these parts one after the other, where they are there."""
    for name, parts in named.items():
        if parts[0] is not None:
            yield name, _rows([encode(name, part) for part in parts if part is not None])


def _parts(c: Config, n: int, field: str, linears: Sequence[Linear]) -> dict[str, list[Any]]:
    """The parts of the tensors of linears whose rows are one after the other in them: weights, biases, scale and norm."""
    name, (first, *_) = matrix_name(c, field, n), linears
    if first.norm is not None and not FAMILIES[c.architecture].inner_norms:
        raise UnsupportedError(f"layer {n} {field} has a norm inside the linear, and GGUF has no place for that")
    if first.norm is not None and first.norm_eps not in (None, c.eps):
        raise UnsupportedError(f"layer {n} {field} has a norm inside the linear with epsilon {first.norm_eps}, and GGUF has only {c.eps}")
    return {
        f"{name}.weight": [linear.weights for linear in linears],
        f"{name}.bias": [linear.bias for linear in linears],
        f"{name}.scale": [None if first.scale is None else np.array([first.scale])],
        name + INNER_NORM: [first.norm],
    }


def _fused(n: int, named: dict[str, Any], names: Sequence[str], encode: Encode) -> dict[str, Any]:
    """The fields of layer n, with a list of linears under each of `names` in place of the fields that its tensor holds.

    Linears that one tensor cannot hold stay apart. Raises UnsupportedError where they cannot, because the tensor has the name of one.
    """
    for name in names:
        parts: dict[str, Linear] = {field: named[field] for field in FUSED[name]}
        forms = set()  # of the rows, which must be one
        for linear in parts.values():
            kind = encode(tensor_name(name, n), linear.weights).type
            forms.add((kind, linear.bias is None, linear.weights.scale if isinstance(linear.weights, Ternary) and kind is I2_S else None))
        if len(forms) == 1 and all(linear.norm is None and linear.scale is None for linear in parts.values()):
            named = {field: value for field, value in named.items() if field not in parts} | {name: list(parts.values())}
        elif name in parts:
            expected = "expected one type, one scale, a bias in all or in none, and only the weights, without a norm or a scale"
            raise UnsupportedError(f"tensor {tensor_name(name, n)} cannot hold {' and '.join(parts)}: {expected}")
    return named


def _rows(parts: Sequence[Stored]) -> Stored:
    """Tensors of one type and width as one, with the rows of each after those of the one before."""
    if len(parts) == 1:
        return parts[0]
    end = -packing.TRAILER if parts[0].type is I2_S else None
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return Stored(parts[0].type, shape, lambda: np.concatenate([*(part.make()[:end] for part in parts[:-1]), parts[-1].make()]))


def _stacks(n: int, experts: Sequence[Expert], encode: Encode) -> Iterator[tuple[str, Stored]]:
    """Name and content of the tensors of a layer's experts: one for all of them.

    If that is impossible, because they have several types, or a scale each as in I2_S, there is one tensor for each, as in older files.
    """
    for field in vars(experts[0]):
        linears = [getattr(expert, field) for expert in experts]
        for i, linear in enumerate(linears):
            if linear.bias is not None or linear.scale is not None or linear.norm is not None:
                raise UnsupportedError(f"layer {n} {field} of expert {i} has a bias, a scale or a norm, and GGUF has no place for that")
        one_each = {f"blk.{n}.{field}.{i}.weight": linear.weights for i, linear in enumerate(linears)}
        parts = {name: encode(name, weights) for name, weights in one_each.items()}
        first = next(iter(parts.values()))
        if first.type is I2_S or any(part.type is not first.type for part in parts.values()):
            yield from parts.items()
        else:
            yield f"blk.{n}.{field}_exps.weight", _rows(list(parts.values()))._replace(shape=(len(parts), *first.shape))


@steady
def write_model(
    path: str | os.PathLike[str],
    model: Model,
    metadata: Mapping[str, Any],
    *,
    encode: Encode = stored,
    fused: Sequence[str] | None = None,
    progress: Progress = silent,
    check: Callable[[Path], object] = lambda path: None,
) -> None:
    """Write a model of one of families.FAMILIES as a GGUF file.

    metadata: the tokenizer.* and general.* keys, with values of Python's types or one-dimensional arrays; tokenizer.ggml.model at least.
    The type of the matrices decides general.file_type, if it is one of FILE_TYPES. encode, fused: as in `model_tensors`. progress,
    check: as in `write_file`.

    Raises UnsupportedError for a model that no GGUF file can say, ShapeError for arrays that are not what the model's Config says.
    """
    check_model(model)
    c, tensors = model.config, dict(model_tensors(model, encode, fused))
    check_said(c, Path(path), tensors)
    down = next(tensor for name, tensor in tensors.items() if name.startswith("blk.0.ffn_down"))
    file_type = FILE_TYPES.get(down.type, metadata.get("general.file_type"))
    write_file(
        path,
        c,
        {**metadata, "general.file_type": file_type},
        [(name, tensor.type, tensor.shape) for name, tensor in tensors.items()],
        (tensor.make() for tensor in tensors.values()),
        progress=progress,
        check=check,
    )
