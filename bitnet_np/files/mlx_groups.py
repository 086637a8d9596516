"""Weights that mlx-lm quantised in groups: w = scale * q + bias, with a scale and a bias for each group of a row.

`<module>.weight` is [N, M * bits / 32] uint32: a row is a string of bits; number j has the bits from bits * j on, low ones first.
`<module>.scales` and `<module>.biases` are [N, M / group_size], in the type T of the model. A leading axis counts experts.

Source: `dequantize` and `quantized_matmul` of mlx.core 0.32. Products take w computed in float32, as Apple's GPUs and mlx's vector code do
except for the order of the sum; mlx's plain code computes w and the sum in T. The rows of an embedding are computed in T.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.errors import FileFormatError, UnsupportedError, shown
from ..kernels import cpu
from ..model import widen
from .safetensors_file import TYPES
from .tensors import CheckedTensors

GROUPED = ("weight", "scales", "biases")
"""The tensors of a quantised module."""

_SIZES, _BITS = (32, 64, 128), (2, 3, 4, 5, 6, 8)
_AT_A_TIME = 1 << 20  # numbers that are computed at a time: codes take 8 bytes each


class Form(NamedTuple):
    """The form of one module's weights."""

    group_size: int
    bits: int


Groups = Callable[[str], Form | None]
"""The form of the weights of a module of that name, which has scales; None: it is not quantised."""


def read_groups(where: str, values: Any) -> Groups:
    """The Groups in `quantization` of config.json. Raises FileFormatError, or UnsupportedError for other forms than affine groups."""
    if not isinstance(values, dict):
        raise FileFormatError(f"{where} is {shown(values)}, expected an object with group_size and bits")
    plain = {key: value for key, value in values.items() if not isinstance(value, dict | bool)}
    inner = {key: value for key, value in values.items() if key not in plain}
    form = _form(where, plain)
    modules = {key: _form(f"{where}.{key}", value) if value else None for key, value in inner.items() if value is not True}
    return lambda module: modules.get(module, form)


def _form(where: str, values: Mapping[str, Any]) -> Form:
    unknown = values.keys() - {"group_size", "bits", "mode"}
    if unknown or values.get("mode", "affine") != "affine":
        raise UnsupportedError(f"{where} is {shown(values)}, supported are group_size and bits, and the mode 'affine'")
    size, bits = values.get("group_size"), values.get("bits")
    if size not in _SIZES or bits not in _BITS or not type(size) is type(bits) is int:
        raise FileFormatError(f"{where} is {shown(values)}, expected a group_size of {_SIZES} and bits of {_BITS}")
    return Form(size, bits)


def take_numbers(tensors: CheckedTensors, module: str, shape: tuple[int, ...], form: Form, rounded: bool = False) -> NDArray[np.float32]:
    """The weights of a module as float32 [..., N, M], which are then taken. rounded: as T computes them, for an embedding.

    Raises FileFormatError, UnsupportedError or NonFiniteError, which name the file and the tensor.
    """
    *outer, width = shape
    if width % form.group_size:
        raise FileFormatError(f"{tensors.path}: {module} has rows of {width} numbers, expected a multiple of group_size {form.group_size}")
    packed = tensors.take(module + ".weight", (*outer, width * form.bits // 32))
    tensors.check_type(packed, (TYPES["U32"],), f", with {form.bits} bits for each number")
    pair = [tensors.take(f"{module}.{name}", (*outer, width // form.group_size)) for name in GROUPED[1:]]
    if pair[0].type is not pair[1].type:
        types = " and ".join(tensor.type.name for tensor in pair)
        raise FileFormatError(f"{tensors.path}: {module}.scales and .biases have types {types}, expected one")
    scales, biases = (widen.float32(tensors.floats(tensor)).reshape(-1, width // form.group_size, 1) for tensor in pair)
    kind = _NARROW.get(pair[0].type.name) if rounded else None
    strings = packed.data.reshape(len(scales), width // 8, form.bits)  # eight numbers take as many bytes as one takes bits
    numbers = np.empty((len(scales), width), np.float32)
    rows = max(1, _AT_A_TIME // width)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(numbers), rows):
            batch = slice(start, start + rows)
            products = _codes(strings[batch], form.bits).reshape(-1, *scales.shape[1:2], form.group_size) * scales[batch]
            sums = (products if kind is None else cpu.round_as(products, kind)) + biases[batch]
            numbers[batch] = (sums if kind is None else cpu.round_as(sums, kind)).reshape(-1, width)
    if not tensors.allow_nan and cpu.has_non_finite(numbers):
        raise tensors.non_finite(packed)
    packed.release()
    return numbers.reshape(shape)


_NARROW = {"F16": "float16", "BF16": "bfloat16"}


def _codes(strings: NDArray[np.uint8], bits: int) -> NDArray[np.float32]:  # [R, M / 8, bits] -> [R, M / 8, 8]
    padded = np.zeros((*strings.shape[:2], 8), np.uint8)
    padded[..., :bits] = strings
    words = padded.view("<u8")
    return (words >> np.arange(0, 8 * bits, bits, dtype=np.uint64) & np.uint64((1 << bits) - 1)).astype(np.float32)
