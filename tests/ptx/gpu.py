"""In place of a GPU: Numba compiles kernels to PTX as for one, and the interpreter runs them, in memory of its own.

`install` must come before anything asks for a GPU.
"""

from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import dispatcher, types
from numba.cuda.cudadrv import devices
from numba.cuda.cudadrv.driver import CudaAPIError
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
from numpy.typing import DTypeLike

from .machine import Block
from .memory import Fault, Memory, check_blocks
from .source import parse

_MOST_THREADS, _MOST_SHARED, _MOST_BLOCKS = 1024, 48 << 10, ((1 << 31) - 1, 65535, 65535)  # bytes; blocks along each axis of a grid


class Gpu:
    """The device that Numba sees."""

    name = "an interpreter of PTX"
    compute_capability = 9, 0

    def __init__(self) -> None:
        self.memory, self.rng = Memory(1 << 28), np.random.default_rng(0)

    def array(self, shape: tuple[int, ...], dtype: DTypeLike, stream: Any = None) -> FakeCUDAArray:
        """cuda.device_array."""
        dtype = np.dtype(dtype)
        try:
            memory = self.memory.allocate(prod(shape) * dtype.itemsize)
        except MemoryError as error:
            raise CudaAPIError(2, str(error)) from error
        return FakeCUDAArray(memory.view(dtype).reshape(shape))

    def words(self, kind: types.Type, value: Any) -> list[bytes]:
        """An argument as a kernel takes it."""
        if not isinstance(kind, types.Array):
            return [np.dtype(str(kind)).type(value).tobytes()]
        array = value._ary
        words = 0, 0, array.size, array.itemsize, self.memory.address_of(array), *array.shape, *array.strides
        return [np.int64(word).tobytes() for word in words]

    def launch(self, function: Any, grid: int | tuple[int, ...], threads: int, arguments: tuple[Any, ...]) -> None:
        """Run blocks one after another, in a random order: kernels may not depend on it. Raises Fault, with the instruction."""
        kinds = tuple(map(function.typeof_pyval, arguments))
        if kinds not in function.overloads:
            function.overloads[kinds] = dispatcher._Kernel(function.py_func, kinds, **function.targetoptions)
        kernel = function.overloads[kinds]
        code = parse(kernel.inspect_asm(self.compute_capability))
        grid = (*np.atleast_1d(grid).tolist(), 1, 1)[:3]
        assert all(1 <= n <= most for n, most in zip(grid, _MOST_BLOCKS, strict=True))
        assert threads <= min(_MOST_THREADS, code.threads)
        assert code.shared_bytes <= _MOST_SHARED
        parameters = [word for kind, value in zip(kernel.argument_types, arguments, strict=True) for word in self.words(kind, value)]
        assert tuple(map(len, parameters)) == code.params
        touched = []
        try:
            for number in self.rng.permutation(prod(grid)):
                block = Block(self.memory, code, grid, np.unravel_index(number, grid, "F"), threads, parameters, self.rng)
                with np.errstate(all="ignore"):
                    block.run()
                touched.append(block.watch.end_block(number))
            check_blocks(touched)
        except Fault as fault:
            raise Fault(f"{function.py_func.__name__}: {fault}") from None


class Stream:
    """A stream, which runs its work at once."""

    def synchronize(self) -> None:
        """Nothing is left to be done."""


@cache
def install() -> None:
    """Let the interpreter be the GPU of this process."""
    gpu = Gpu()
    context = SimpleNamespace(device=gpu, get_memory_info=lambda: SimpleNamespace(free=(80 << 30) - gpu.memory.taken))
    cuda.is_available, cuda.device_array, cuda.stream = (lambda: True), gpu.array, Stream
    cuda.current_context = devices.get_context = lambda: context
    cuda.get_current_device = dispatcher.get_current_device = lambda: gpu
    dispatcher.CUDADispatcher.__getitem__ = lambda kernel, how: lambda *arguments: gpu.launch(kernel, how[0], how[1], arguments)
