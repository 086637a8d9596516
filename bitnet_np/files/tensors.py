"""The tensors of an open file or folder. Each is taken once; one that is missing, misshapen or not finite is refused by its name."""

import mmap
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..base.errors import FileFormatError, NonFiniteError, UnsupportedError
from ..base.tensor_types import BF16, F16, F32, F64, TensorType
from ..kernels import cpu
from ..model import widen
from ..model.records import Config

FLOATS: dict[TensorType, np.dtype] = {F32: np.dtype("<f4"), F16: np.dtype("<f2"), BF16: np.dtype("<u2"), F64: np.dtype("<f8")}
"""The types of plain floats, and how NumPy sees them: bfloat16 as its bits."""

Shapes = Mapping[str, tuple[int, ...]]
"""(N, M) of matrices, by their fields in records.Layer."""


def rows_of(shapes: Shapes) -> dict[str, slice]:
    """The rows that each matrix has in a tensor of all, one matrix after the other."""
    ends = list(accumulate(shape[0] for shape in shapes.values()))
    return {field: slice(end - shape[0], end) for (field, shape), end in zip(shapes.items(), ends, strict=True)}


@dataclass(frozen=True, eq=False)
class Tensor:
    """One entry of a file's tensor table."""

    name: str
    type: TensorType
    shape: tuple[int, ...]  # row-major, outermost first
    data: NDArray[np.uint8] = field(repr=False)  # [type.nbytes(prod(shape))], a read-only view of the file
    offset: int  # of data, from the start of the file
    mapping: mmap.mmap = field(repr=False)  # the file

    def release(self) -> None:
        """Release the whole pages of data that will not be read again. The data stays valid: the system would read it again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = -(-self.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            whole = (self.offset + self.data.size - start) // mmap.PAGESIZE * mmap.PAGESIZE
            if whole > 0:
                self.mapping.madvise(mmap.MADV_DONTNEED, start, whole)


def mapped(path: Path, kind: str) -> mmap.mmap:
    """A whole file, for reading. Raises FileFormatError for an empty one, which was to be one of that kind."""
    with open(path, "rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # mmap refuses a file of no bytes
            raise FileFormatError(f"{path}: the file is empty, expected {kind}") from None


@contextmanager
def of_file(path: Path | str) -> Iterator[None]:
    """Puts the file's path, or a place in it, in front of an error that does not name it: those of records know no file."""
    try:
        yield
    except ValueError as error:
        raise type(error)(str(error) if str(path) in str(error) else f"{path}: {error}") from None


class CheckedTensors:
    """The tensors of one file or folder that nobody has taken yet, and the Config of the model that takes them."""

    norm_offset, stated_dtype = 0.0, ""  # see Model

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], allow_nan: bool, config: Config) -> None:
        self.path, self.allow_nan, self.config = path, allow_nan, config
        self._untaken = dict(tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._untaken

    def take(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
        """The tensor of that name, which must have one of `shapes`. Raises FileFormatError."""
        tensor = self._untaken.pop(name, None)
        if tensor is None:
            raise FileFormatError(f"{self.path}: tensor {name} is missing")
        if tensor.shape not in shapes:
            raise FileFormatError(f"{self.path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shapes[0])}")
        return tensor

    def take_floats(self, name: str, *shapes: tuple[int, ...]) -> NDArray:
        """`floats` of the tensor of that name."""
        return self.floats(self.take(name, *shapes))

    def upright(self, tensor: Tensor, shape: tuple[int, int]) -> NDArray:
        """`floats` of a matrix that may lie in the file as its transpose, which BitNet-rs takes too: [N, M], copied if it is turned."""
        floats = self.floats(tensor)
        return floats if tensor.shape == shape else np.ascontiguousarray(floats.T)

    def take_vector(self, name: str, size: int, *, row: bool = False) -> NDArray[np.float32]:
        """A float vector as float32 [size]; row: it is a matrix [1, size] in the file."""
        return widen.float32(self.take_floats(name, (1, size) if row else (size,)).reshape(size))

    def floats(self, tensor: Tensor) -> NDArray:
        """A float tensor where it lies in the file, in its own dtype: bfloat16 as uint16 bits, float64 narrowed to float32.

        Raises UnsupportedError for another type or a float64 that float32 cannot hold, NonFiniteError for NaN or infinity.
        """
        self.check_type(tensor, FLOATS)
        array = np.require(tensor.data.view(FLOATS[tensor.type]).reshape(tensor.shape), requirements="A")  # copied if misaligned
        if tensor.type is F64:
            wide = array
            with np.errstate(over="ignore", under="ignore"):
                array = wide.astype(np.float32)
            if (lost := wide[(array != wide) & ~np.isnan(wide)]).size:
                number = f"of type F64 has the number {float(lost[0])!r}"
                raise UnsupportedError(f"{self.path}: tensor {tensor.name} {number}, which float32 cannot hold")
        if not self.allow_nan and cpu.has_non_finite(array):
            raise self.non_finite(tensor)
        return array

    def non_finite(self, tensor: Tensor) -> NonFiniteError:
        """The error for a tensor that has NaN or infinity where those are not allowed."""
        return NonFiniteError(f"{self.path}: tensor {tensor.name} has NaN or infinity in it")

    def check_type(self, tensor: Tensor, types: Collection[TensorType], remark: str = "") -> None:
        """Raises UnsupportedError for a tensor of none of `types`; `remark` ends the message."""
        if tensor.type not in types:
            expected = ", ".join(kind.name for kind in types) + remark
            raise UnsupportedError(f"{self.path}: tensor {tensor.name} has type {tensor.type.name}, supported here: {expected}")

    def check_all_taken(self) -> None:
        """Raises UnsupportedError for a tensor that a model of the architecture has no use for: it could change the arithmetic."""
        for name in self._untaken:
            raise UnsupportedError(f"{self.path}: tensor {name} has no place in architecture {self.config.architecture}")
