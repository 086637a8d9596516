"""A Model -> a GGUF file, through gguf-py's GGUFWriter.

Keys and tensors come in the order of the released BitNet file. A file appears under its name when it is complete, or not at all.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from ..base.errors import UnsupportedError
from ..base.tensor_types import BF16, F16, F32, I2_S, Q1_0, Q2_0, TQ1_0, TQ2_0, TensorType
from ..base.whole_file import whole_file
from ..kernels.float_state import steady
from ..model import packing
from ..model.checks import check_model
from ..model.families import FAMILIES, FUSED, implied, windowed_layers
from ..model.records import Blocks, Config, Expert, Layer, Linear, Model, Pooling, Ternary, Weights
from ..model.rope import yarn_magnitude
from .gguf_names import EPSILON, FACTORS, INNER_NORM, KEYS, LONGROPE, matrix_name, tensor_name

FILE_TYPES = {F32: 0, F16: 1, BF16: 32, TQ1_0: 36, TQ2_0: 37, I2_S: 40, Q1_0: 40, Q2_0: 41}
"""general.file_type, by the type of the file's matrices (llama.h; I2_S's 40 is bitnet.cpp's)."""

QUANTIZATION_VERSION = 2

RELEASED = (
    *("attn_norm", "ffn_down", "ffn_sub_norm", "ffn_gate", "ffn_up", "ffn_norm", "attn_sub_norm"),
    *("attn_k", "attn_output", "attn_q", "attn_v"),
)
"""The fields of model.Layer in the order of the released file's tensors. Those that it has not come behind them."""


class Stored(NamedTuple):
    """A tensor as it is written. `make` gives its bytes when they are wanted, so that one tensor at a time is in memory."""

    type: TensorType
    shape: tuple[int, ...]  # as NumPy orders it, rows first
    make: Callable[[], NDArray]


def write_file(
    path: str | os.PathLike[str],
    architecture: str,
    write_metadata: Callable[[GGUFWriter], None],
    tensors: Sequence[tuple[str, TensorType, tuple[int, ...]]],
    data: Iterable[NDArray],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    check: Callable[[Path], object] = lambda path: None,
) -> None:
    """Write a GGUF file. `path` is the complete new file after it, or as it was before if anything fails.

    write_metadata: adds the keys, all but general.architecture. tensors: name, type and shape of each. data: their bytes, in the same
    order. progress: called after each tensor with those written and all. check: called with the path of the complete file before it gets
    its name; what it raises passes through.
    """
    with whole_file(path) as part, closing(GGUFWriter(part, architecture)) as writer:
        write_metadata(writer)
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


def write_keys(writer: GGUFWriter, c: Config, metadata: Mapping[str, Any]) -> None:
    """Write every key but general.architecture, which GGUFWriter writes: those that `c` implies, and `metadata`.

    Where both have a key, `c` wins. A value of None is left out. Raises UnsupportedError for a Config that no GGUF file can say.
    """
    family = FAMILIES[c.architecture]
    for field in ("rope_base", "rope_scaling", "local_rope_base"):
        _check_float32(field, getattr(c, field))
    if c.window is not None and not family.windows:
        raise UnsupportedError(f"window is {c.window}, and a GGUF file of architecture {c.architecture} has no place for it")
    for field, usual in {**_USUAL, **implied(c)}.items():
        if field not in family.numbers and getattr(c, field) != usual:
            place = f"a GGUF file of architecture {c.architecture} has no place for another than {usual}"
            raise UnsupportedError(f"{field} is {getattr(c, field)}, and {place}")
    rotates, scaled, wide = c.rope != "none", c.rope_scaling != 1, c.q_width != c.width
    windowed = tuple(range(c.n_layers)) if c.window_layers is None else c.window_layers
    usual_layers = c.window is None or windowed == windowed_layers(c.architecture, c.n_layers)

    def key(field: str) -> str:
        return f"{c.architecture}.{KEYS[field].name}"

    keys: dict[str, Any] = {
        "general.name": metadata.get("general.name"),
        **{key(field): getattr(c, field) for field in ("vocab", "context", "width", "n_layers", "ffn")},
        key("rope_width"): 2 * c.rope_pairs if rotates else None,
        **{key(field): getattr(c, field) for field in ("heads", "kv_heads")},
        key("head_dim"): c.head_dim if wide else None,
        key("value_dim"): c.head_dim if wide else None,
        "tokenizer.ggml.add_bos_token": metadata.get("tokenizer.ggml.add_bos_token"),
        f"{c.architecture}.{EPSILON[c.norm].name}": c.eps,
        key("rope_base"): c.rope_base if rotates else None,
        key("scaling_type"): "linear" if scaled else None,
        key("rope_scaling"): c.rope_scaling if scaled else None,
        **_yarn_keys(c, key),
        key("parallel_residual"): c.parallel_residual if family.chooses_residual else None,
        key("window"): c.window,
        key("window_layers"): None if usual_layers else np.isin(np.arange(c.n_layers), windowed),
        **{key(field): getattr(c, field) for field in family.numbers if c.experts or "expert" not in field},
        key("expert_ffn"): c.ffn if family.expert_width else None,
        key("pooling"): None if c.pooling == "none" else get_args(Pooling).index(c.pooling),
        "general.file_type": metadata.get("general.file_type"),
    }
    for name, value in {**keys, **{name: value for name, value in metadata.items() if name not in keys}}.items():
        if value is not None:
            _add(writer, name, value)
    writer.add_quantization_version(QUANTIZATION_VERSION)


def _yarn_keys(c: Config, key: Callable[[str], str]) -> dict[str, Any]:
    """The keys of YaRN or LongRoPE. Raises UnsupportedError where they would not give the same numbers back."""
    if c.longrope is not None:
        if not FAMILIES[c.architecture].longrope:
            raise UnsupportedError(f"RoPE is scaled by LongRoPE, and a GGUF file of architecture {c.architecture} has no place for that")
        magnitude = None if c.rope_magnitude == 1 else float(c.rope_magnitude)
        return {key("scaling_type"): "longrope", key("yarn_original"): c.longrope.original, key("yarn_factor"): magnitude}
    if c.yarn is None:
        if c.rope_magnitude != 1:
            raise UnsupportedError(f"rope_magnitude is {c.rope_magnitude} without YaRN, and a GGUF file has no place for it")
        return {}
    if not FAMILIES[c.architecture].scaling:
        raise UnsupportedError(f"RoPE is scaled by YaRN, and a GGUF file of architecture {c.architecture} has no place for that")
    yarn, usual = c.yarn, yarn_magnitude(c.yarn.factor)
    numbers = {"rope_scaling": yarn.factor, "yarn_fast": yarn.fast, "yarn_slow": yarn.slow}
    for name, number in numbers.items():
        _check_float32(f"YaRN's {KEYS[name].name}", number)
    if not yarn.truncate:
        raise UnsupportedError("YaRN's borders are not cut to whole pairs (truncate is false), and a GGUF file has no place for that")
    ratio = np.float32(c.rope_magnitude / usual)
    near = (ratio, np.nextafter(ratio, np.float32(0)), np.nextafter(ratio, np.float32(np.inf)))
    same = [float(x) for x in near if np.float32(usual * float(x)) == np.float32(c.rope_magnitude)]
    if not same:
        factor = f"no attn_factor of a GGUF file gives it with YaRN's factor {yarn.factor}"
        raise UnsupportedError(f"rope_magnitude is {c.rope_magnitude}, and {factor}")
    keys = {key("scaling_type"): "yarn", key("yarn_original"): yarn.original, key("yarn_factor"): None if same[0] == 1 else same[0]}
    return keys | {key(name): number for name, number in numbers.items()}


def _check_float32(name: str, number: float | None) -> None:
    if number is not None and float(np.float32(number)) != number:
        raise UnsupportedError(f"{name} is {number}, which is no float32, and a GGUF file has no other place for it")


_RARE = ("attention_scale", "score_cap", "embedding_scale", "residual_scale", "logit_scale", "logit_cap")
_USUAL = {name: getattr(Config, name) for name in (*_RARE, "rope_layers", "local_layers", "local_rope_base")}
"""The fields of a Config that only some architectures have a key for, and their values in all others."""


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
    kinds = {np.dtype(np.float32): F32, np.dtype(np.float16): F16, np.dtype(np.uint16): BF16}
    return Stored(kinds[blocks.dtype], blocks.shape, lambda: blocks)


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

    def given(named: Mapping[str, Weights | None]) -> Iterator[tuple[str, Stored]]:
        for name, weights in named.items():
            if weights is not None:
                yield name, encode(name, weights)

    def of_model(*names: str) -> Iterator[tuple[str, Stored]]:
        yield from given({tensor_name(field): getattr(model, field) for field in names})

    yield from of_model("token_embd", "position_embd")
    c = model.config
    if c.longrope is not None:
        yield from given({name: np.array(getattr(c.longrope, which), np.float32) for which, name in LONGROPE.items()})
    elif c.yarn is None:
        yield from given({FACTORS: model.rope_factors})
    for n, layer in enumerate(model.layers):
        named = _fused(n, present(layer), FAMILIES[c.architecture].fused if fused is None else fused, encode)
        first = [field for field in (*RELEASED, "attn_qkv") if field in named]
        for field in dict.fromkeys((*first, *named)):
            value = named[field]
            if isinstance(value, np.ndarray):
                yield from given({tensor_name(field, n): value})
                continue
            linears, inside = value if isinstance(value, list) else [value], f"layer {n} {field} has a norm inside the linear"
            for linear in linears:
                if linear.norm is not None and not FAMILIES[c.architecture].inner_norms:
                    raise UnsupportedError(f"{inside}, and GGUF has no place for that")
                if linear.norm is not None and linear.norm_eps not in (None, c.eps):
                    raise UnsupportedError(f"{inside} with epsilon {linear.norm_eps}, and GGUF has only {c.eps}")
            yield from _linears(matrix_name(c, field, n), linears, encode)
        yield from _stacks(n, layer.experts, encode)
    yield from of_model("output_norm", "output_norm_bias", "output", "output_bias")


def _fused(n: int, named: dict[str, Any], names: Sequence[str], encode: Encode) -> dict[str, Any]:
    """The fields of layer n, with a list of linears under each of `names` in place of the fields that its tensor holds.

    Linears that one tensor cannot hold stay apart. Raises UnsupportedError where they cannot, because the tensor has the name of one.
    """
    for name in names:
        parts = {field: named[field] for field in FUSED[name]}
        tensors = [encode(tensor_name(name, n), linear.weights) for linear in parts.values()]
        fields = [field.rpartition("_")[2] for field in parts]
        both, others = " and ".join(fields), zip(tensors[1:], fields[1:], strict=True)
        types = "".join(f" and {tensor.type.name} in those of {field}" for tensor, field in others)
        scales = [linear.weights.scale for linear in parts.values() if isinstance(linear.weights, Ternary)]
        inside = any(linear.norm is not None or linear.scale is not None for linear in parts.values())
        reasons = {
            f"of {both} has no place for a scale or norm": inside,
            f"of {both} has no place for a bias of some of them": len({linear.bias is None for linear in parts.values()}) > 1,
            f"would be {tensors[0].type.name} in the {fields[0]}'s rows{types}": len({tensor.type for tensor in tensors}) > 1,
            f"has one scale, and those of {both} are {', '.join(map(str, scales))}": tensors[0].type is I2_S and len(set(scales)) > 1,
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if why is None:
            named = {field: value for field, value in named.items() if field not in parts} | {name: list(parts.values())}
        elif name in parts:
            raise UnsupportedError(f"tensor {tensor_name(name, n)} {why}")
    return named


def _linears(name: str, linears: Sequence[Linear], encode: Encode) -> Iterator[tuple[str, Stored]]:
    """Name and content of the tensors of linears whose rows are one after the other in them: weights, biases, scale and norm."""
    ends: dict[str, list[Any]] = {".weight": [linear.weights for linear in linears], ".bias": [linear.bias for linear in linears]}
    ends[".scale"] = [None if linear.scale is None else np.array([linear.scale]) for linear in linears]
    ends[INNER_NORM] = [linear.norm for linear in linears]
    for end, arrays in ends.items():
        if arrays[0] is not None:
            yield name + end, _rows([encode(name + end, array) for array in arrays])


def _rows(parts: Sequence[Stored]) -> Stored:
    """Tensors of one type and width as one, with the rows of each after those of the one before."""
    end = -packing.TRAILER if parts[0].type is I2_S else None
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return Stored(parts[0].type, shape, lambda: np.concatenate([*(part.make()[:end] for part in parts[:-1]), parts[-1].make()]))


def _stacks(n: int, experts: Sequence[Expert], encode: Encode) -> Iterator[tuple[str, Stored]]:
    """Name and content of the tensors of a layer's experts: one for all of them.

    Where that cannot be, because they have several types, or a scale each as in I2_S, it is one for each, as in older files.
    """
    for field in vars(experts[0]) if experts else ():
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
    progress: Callable[[int, int], None] = lambda done, total: None,
    check: Callable[[Path], object] = lambda path: None,
) -> None:
    """Write a model of one of families.FAMILIES as a GGUF file.

    metadata: the tokenizer.* and general.* keys, with values of Python's types or one-dimensional arrays; tokenizer.ggml.model at least.
    The type of the matrices decides general.file_type, if it is one of FILE_TYPES. encode, fused: as in `model_tensors`. progress,
    check: as in `write_file`.

    Raises UnsupportedError for a model that no GGUF file can say, ShapeError for arrays that are not what the model's Config says.
    """
    check_model(model)
    c, always = model.config, FAMILIES[model.config.architecture].config
    own = {field: getattr(c, field) for field in always}
    if own != always:
        raise UnsupportedError(f"a GGUF file of architecture {c.architecture} has {dict(always)}, but this model {own}")
    tensors = dict(model_tensors(model, encode, fused))
    down = next(tensor for name, tensor in tensors.items() if name.startswith("blk.0.ffn_down"))
    file_type = FILE_TYPES.get(down.type, metadata.get("general.file_type"))
    write_file(
        path,
        c.architecture,
        lambda writer: write_keys(writer, c, {**metadata, "general.file_type": file_type}),
        [(name, tensor.type, tensor.shape) for name, tensor in tensors.items()],
        (tensor.make() for tensor in tensors.values()),
        progress=progress,
        check=check,
    )
