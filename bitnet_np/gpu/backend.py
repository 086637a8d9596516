"""The operations of kernels/cpu.py on a GPU: the same names and parameters, and the same bits. Arrays are the device's.

Methods check nothing, like the CPU's kernels: callers have checked the arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError
from numpy.typing import DTypeLike, NDArray

from ..base.errors import CapacityError, Error, ShapeError, UnsupportedError
from ..engine.backend import Array
from ..engine.masks import Plan
from ..kernels import cpu
from ..kernels.attention import chunks_touched, scale_and_cap
from ..kernels.cuda import attention, floats, ternary
from ..kernels.cuda import rows as row_kernels
from ..kernels.scalar import CHUNK
from ..model.records import Ternary
from .device import NO_EXPERTS
from .storage import DeviceStorage

BLOCK = 256  # threads of a block of a kernel over single numbers
_ALL = 1 << 30  # a window that holds all positions: no memory has room for more
NOT_PLACED = "a table is in the computer's memory, expected one on the device: upload the model (device.place)"
_PARTS = 1 << 28  # bytes that the chunks of attention may take; more rows are computed one part after another


@dataclass(frozen=True, eq=False)
class Codes:
    """int8 activations [R, M], as quantize leaves them for ternary products."""

    words: Array  # uint32 [R, words of a row], four codes each
    row_sums: Array  # int32 [R]
    width: int  # M


def _refused(error: type[Error], message: str) -> Any:
    """An operation that the device has no kernel for."""

    def operation(self: Any, *arguments: Any) -> Any:
        raise error(message)

    return operation


def _by_number(kernel: Any) -> Any:
    """The operation of a kernel that takes single numbers, with arrays or float32 numbers as further arguments."""

    def operation(self: "Cuda", x: Array, *others: Any) -> Array:
        out = self.empty(x.shape)
        flat = (array if np.isscalar(array) else array.reshape(-1) for array in (x, *others, out))
        return self.each(kernel, out.size, *flat).reshape(out.shape)

    return operation


class Cuda:
    """The backend of one GPU. free_bytes: a function that gives the bytes of memory that the device has left."""

    device = "cuda"
    exact_only = True
    splits_rows = False
    repeats = False
    most_positions = 65535 * CHUNK  # attention has a block for each chunk, along an axis of the grid that ends there

    embed_blocks = matmul_blocks = matmuls_blocks_as_llama_cpp = _refused(ShapeError, NOT_PLACED)
    top_experts = expert_weights = mix = sigmoid_gate = _refused(UnsupportedError, NO_EXPERTS)
    attend_float16 = _refused(UnsupportedError, "the device has no attention with probabilities in float16, expected the dialect exact")
    round_as = _refused(UnsupportedError, "the device rounds to no narrower types, expected the dialect exact")

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self.free_bytes = free_bytes
        self.stream = cuda.stream()
        self._no_mask = self.zeros((1, 1, 1))

    if TYPE_CHECKING:  # the class gets its operations on single numbers below

        def __getattr__(self, name: str) -> Any: ...

    # --- memory ---

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """A new array with arbitrary numbers. Raises CapacityError, with the bytes requested, if the device has no memory left."""
        try:
            return cuda.device_array(shape, dtype, stream=self.stream)
        except CudaAPIError as error:
            size = prod(shape) * np.dtype(dtype).itemsize
            raise CapacityError(f"the device has no {size:,} bytes left: {error}") from error

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        out = self.empty(shape, dtype)
        self.each(row_kernels.fill, out.size, out.reshape(-1), np.dtype(dtype).type(0))
        return out

    def mark(self, event: str, count: int = 1) -> None:
        """Does nothing, as on the CPU."""

    def wait(self) -> None:
        self.stream.synchronize()

    def storage(self) -> DeviceStorage:
        return DeviceStorage(self)

    def upload(self, array: NDArray) -> Array:
        """A copy on the device, float16 as its bits (int16). Integers keep the `largest` of them, for attention."""
        array = array.view(np.int16) if array.dtype == np.float16 else array
        out = self.empty(array.shape, array.dtype)
        if array.size:
            out.copy_to_device(np.ascontiguousarray(array), stream=self.stream)
        if array.dtype == np.int64 and array.size:
            out.largest = int(array.max())
        return out

    def ternary(self, weights: Ternary) -> Array:
        """The words of a packed matrix [N, M]."""
        return self.upload(weights.codes.view(np.uint32))

    def resident(self, record: Any) -> Any:
        """A record of arrays on the device: integers as int64."""
        arrays = {field.name: np.asarray(getattr(record, field.name)) for field in fields(record)}
        integers = {name: array.astype(np.int64) for name, array in arrays.items() if array.dtype.kind in "iu"}
        return replace(record, **{name: self.upload(array) for name, array in (arrays | integers).items()})

    def to_host(self, array: Array | Codes) -> NDArray:
        """A copy of a result as a NumPy array."""
        if isinstance(array, Codes):
            return np.ascontiguousarray(self.to_host(array.words).view(np.int8)[:, : array.width])
        out = np.empty(array.shape, array.dtype)
        if out.size:
            array.copy_to_host(out, stream=self.stream)
        self.wait()
        return out

    # --- launching ---

    def _run(self, kernel: Any, grid: int | tuple[int, ...], threads: int, *arguments: Any) -> Array:
        """Launches a kernel. Returns its last argument, the result."""
        kernel[grid, threads, self.stream](*arguments)
        return arguments[-1]

    def each(self, kernel: Any, n: int, *arguments: Any) -> Array:
        """Launches a kernel with a thread for each of n numbers, if there are any. Returns its last argument."""
        return self._run(kernel, -(-n // BLOCK), BLOCK, *arguments) if n else arguments[-1]

    # --- embedding and float matmul ---

    def embed(self, table: Array, tokens: Array) -> Array:
        _check_table(table)
        shape = tokens.size, table.shape[1]
        return self.each(floats.embed, prod(shape), table, tokens, self.empty(shape))

    def matmul(self, x: Array, weights: Array) -> Array:
        _check_table(weights)
        n, present, tokens = weights.shape[0], len(x), 1 if len(x) == 1 else 8
        grid = -(-n // floats.ROWS), -(-present // tokens)
        return self._run(floats.matmul(tokens), grid, floats.THREADS, weights, x, self.empty((present, n)))

    # --- norms and ternary matmul ---

    def rms_norm(self, x: Array, gain: Array, eps: float) -> Array:
        return self._run(row_kernels.rms_norm, len(x), row_kernels.THREADS, x, gain, np.float32(eps), self.empty(x.shape))

    def layer_norm(self, x: Array, gain: Array, bias: Array | None, eps: float) -> Array:
        centred = self._run(row_kernels.centre, len(x), row_kernels.THREADS, x, self.empty(x.shape))
        return self.add_bias(self.rms_norm(centred, gain, eps), self.zeros(gain.shape) if bias is None else bias)

    def quantize(self, x: Array) -> tuple[Any, Any]:
        n, width = x.shape
        words = -(-width // ternary.COLUMNS) * ternary.COLUMNS // 4
        codes, scale = Codes(self.empty((n, words), np.uint32), self.empty((n,), np.int32), width), self.empty((n,))
        self._run(row_kernels.quantize, n, row_kernels.THREADS, x, codes.words, codes.row_sums, scale)
        return codes, scale

    def ternary_matmul(self, q: Codes, scale: Array, codes: Array, w_scale: np.float32, width: int) -> Array:
        if not isinstance(q, Codes) or codes.dtype != np.uint32:
            raise ShapeError(f"ternary codes have dtype {codes.dtype}, expected the device's, uint32: upload the model")
        grid = -(-width // ternary.ROWS), -(-scale.size // ternary.TOKENS)
        arguments = codes, np.float32(w_scale), q.words, q.row_sums, scale, self.empty((scale.size, width))
        return self._run(ternary.product, grid, ternary.THREADS, *arguments)

    def ternary_matmuls(self, q: Any, scale: Array, *matrices: tuple[Array, np.float32, int]) -> list[Array]:
        return [self.ternary_matmul(q, scale, *matrix) for matrix in matrices]

    # --- positions and attention ---

    def rotations(self, angle: NDArray[np.float64]) -> tuple[Array, Array]:
        """Cosines and sines, computed by the CPU: some bytes for each token, once for all layers."""
        cos, sin = cpu.rotations(angle)
        return self.upload(cos), self.upload(sin)

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        return self.each(row_kernels.rope, x.size, x, cos, sin, cos.shape[1], 1, self.empty(x.shape))

    def rope_adjacent(self, x: Array, cos: Array, sin: Array) -> Array:
        return self.each(row_kernels.rope, x.size, x, cos, sin, 1, 2, self.empty(x.shape))

    def attend(
        self, q: Array, k: Array, v: Array, slot: Array, position: Array, window: int | None = None, scale: Any = None, cap: Any = None
    ) -> Array:
        scoring = scale_and_cap(q.shape[2], scale, cap)
        return self._attend((q, k, v, slot, position), None, position.largest + 1, min(window or _ALL, _ALL), scoring)

    def attend_masked(
        self, q: Array, k: Array, v: Array, slot: Array, position: Array, mask: Array, scale: Any = None, cap: Any = None
    ) -> Array:
        return self._attend((q, k, v, slot, position), mask, mask.shape[2], _ALL, scale_and_cap(q.shape[2], scale, cap))

    def _attend(self, rows: tuple[Array, ...], mask: Array | None, keys: int, window: int, scoring: tuple[np.float32, ...]) -> Array:
        """Attention of some rows at a time, so that their chunks fit _PARTS bytes. keys: of the longest row at least."""
        q, *_, position = rows
        (n, heads, width), chunks, masked = q.shape, min(-(-keys // CHUNK), chunks_touched(window)), mask is not None
        count = min(n, max(1, _PARTS // (heads * chunks * (width + 2) * 4)))
        values, largest, weight = (self.empty((count, heads, chunks, *last)) for last in ((width,), (), ()))
        out, mask = self.empty(q.shape), self._no_mask if mask is None else mask
        for first in range(0, n, count):
            present, parts = min(count, n - first), (first, values, largest, weight)
            self._run(attention.attend_chunk(masked), (present, heads, chunks), attention.THREADS, *rows, mask, *scoring, window, *parts)
            self._run(attention.fold_chunks, (present, heads), attention.THREADS, position, window, keys if masked else 0, *parts, out)
        return out

    # --- rows ---

    def take(self, x: Array, rows: Array) -> Array:
        out = self.empty((rows.size, *x.shape[1:]))
        self.each(row_kernels.take, out.size, _matrix(x), rows, _matrix(out))
        return out

    # --- masks ---

    def mask(self, plan: Plan) -> Array:
        """`masks.mask` of a plan, additive and in float32: no operation of a forward pass, so other backends have none."""
        out = self.empty((plan.q_len, plan.k_len))
        return self.each(row_kernels.fill_mask, out.size, plan.past, *plan.pattern, out)


for _name, _kernel in row_kernels.OF_NUMBERS.items():
    setattr(Cuda, _name, _by_number(_kernel))


def _check_table(table: Any) -> None:
    if isinstance(table, np.ndarray):
        raise ShapeError(NOT_PLACED)


def _matrix(x: Array) -> Array:
    """[R, ...] -> [R, D]."""
    return x.reshape(len(x), prod(x.shape[1:]))
