"""CUDA's driver without a GPU: the part of its API that Numba and cuda.core use, with an interpreter of PTX as its device.

`install` must come before anything asks for a GPU. Names, parameters and refusals are those of cuda.h. A function that is missing here is
not found, and its caller says so by name. Code is compiled to PTX and no further: PTX is what runs.
"""

import ctypes
import inspect
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from cuda.bindings import driver as names

from .machine import Device
from .source import Kernel, parse
from .streams import Out, Refused, Stream, Streams, finish, refuse

VERSION = 13000
NAME = b"an interpreter of PTX"
MEMORY = 80 << 30  # bytes of the device
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "WARP_SIZE": 32,
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_BLOCK_DIM_X": 1024,
    "MAX_BLOCK_DIM_Y": 1024,
    "MAX_BLOCK_DIM_Z": 64,
    "MAX_GRID_DIM_X": (1 << 31) - 1,
    "MAX_GRID_DIM_Y": 65535,
    "MAX_GRID_DIM_Z": 65535,
    "MAX_SHARED_MEMORY_PER_BLOCK": 48 << 10,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 228 << 10,
    "MAX_REGISTERS_PER_BLOCK": 1 << 16,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "CLOCK_RATE": 1_980_000,  # kHz
}
VERSIONS = {  # the versions of functions that have several
    "cuCtxGetDevice": 2000,
    "cuCtxSynchronize": 2000,
    "cuGraphAddDependencies": 12030,
    "cuGraphGetEdges": 12030,
    "cuGraphRemoveDependencies": 12030,
    "cuLinkAddData": 6050,
    "cuLinkCreate": 6050,
}


class Context:
    """The primary context, the only one."""


@dataclass(eq=False)
class Link:
    texts: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class Library:
    kernels: dict[bytes, int]  # their handles


@dataclass(eq=False)
class Function:
    kernel: Kernel
    is_loaded: bool = True


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("number", c_uint),
    )


class Driver(Streams):
    """The functions of the API, by their names. `problems` holds the tracebacks of their exceptions, which callers do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device()
        self.memory = self.device.memory
        self.primary = self.new(Context())
        self.problems = list[str]()
        self._of_thread = threading.local()
        self._texts: dict[int, c_char_p] = {}  # kept alive for callers that have their addresses
        self._pinned: dict[int, ctypes.Array] = {}  # memory of the host, by address
        functions = {name: function for name, function in inspect.getmembers(self, callable) if name.startswith("cu")}
        self.entries = {name: self._entry(function) for name, function in functions.items()}

    def _entry(self, function: Callable[..., None]) -> Any:
        def called(*arguments: Any) -> int:
            try:
                function(*arguments)
            except Refused as refusal:
                return refusal.code
            except BaseException:
                self.problems.append(f"{function.__name__}: {traceback.format_exc()}")
                print(self.problems[-1], file=sys.stderr)
                return int(names.CUresult.CUDA_ERROR_LAUNCH_FAILED)
            return 0

        return CFUNCTYPE(c_int, *(parameter.annotation for parameter in inspect.signature(function).parameters.values()))(called)

    # --- the driver and its device ---

    def cuGetProcAddress(self, name: c_char_p, out: Out, version: c_int, flags: c_uint64, status: POINTER(c_int)) -> None:
        known = name.decode()
        is_there = known in self.entries and version <= VERSION and VERSIONS.get(known, version) == version
        out[0] = ctypes.cast(self.entries[known], c_void_p) if is_there else None
        if status:
            status[0] = 0 if is_there else 1  # CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
        refuse(not is_there, "NOT_FOUND")

    def cuInit(self, flags: c_uint) -> None:
        refuse(flags != 0)

    def cuDriverGetVersion(self, out: POINTER(c_int)) -> None:
        out[0] = VERSION

    def cuGetErrorName(self, error: c_int, out: POINTER(c_char_p)) -> None:
        out[0] = None
        refuse(error not in {int(known) for known in names.CUresult})
        out[0] = self._texts.setdefault(error, c_char_p(names.CUresult(error).name.encode()))

    def cuGetErrorString(self, error: c_int, out: POINTER(c_char_p)) -> None:
        self.cuGetErrorName(error, out)

    def cuDeviceGetCount(self, out: POINTER(c_int)) -> None:
        out[0] = 1

    def cuDeviceGetName(self, out: POINTER(c_ubyte), length: c_int, device: c_int) -> None:
        ctypes.memmove(out, NAME + b"\0", min(len(NAME) + 1, length))

    def cuDeviceGetUuid(self, out: POINTER(c_ubyte * 16), device: c_int) -> None:
        out[0] = (c_ubyte * 16)()

    def cuDeviceGetAttribute(self, out: POINTER(c_int), attribute: c_int, device: c_int) -> None:
        out[0] = ATTRIBUTES[names.CUdevice_attribute(attribute).name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    # --- contexts ---

    @property
    def contexts(self) -> list[int]:
        """The contexts of this thread, the current one last."""
        return self._of_thread.__dict__.setdefault("contexts", [])

    def cuDevicePrimaryCtxRetain(self, out: Out, device: c_int) -> None:
        out[0] = self.primary

    def cuCtxGetCurrent(self, out: Out) -> None:
        out[0] = self.contexts[-1] if self.contexts else None

    def cuCtxSetCurrent(self, context: c_void_p) -> None:
        del self.contexts[-1:]
        if context:
            self.cuCtxPushCurrent(context)

    def cuCtxPushCurrent(self, context: c_void_p) -> None:
        self.resolve(context, Context)
        self.contexts.append(context)

    def cuCtxPopCurrent(self, out: Out) -> None:
        refuse(not self.contexts, "INVALID_CONTEXT")
        out[0] = self.contexts.pop()

    def cuCtxGetDevice(self, out: POINTER(c_int)) -> None:
        refuse(not self.contexts, "INVALID_CONTEXT")
        out[0] = 0

    def cuCtxSynchronize(self) -> None:
        self.refuse_captured(lambda stream: True, "STREAM_CAPTURE_UNSUPPORTED")

    # --- memory ---

    def cuMemGetInfo(self, free: POINTER(c_size_t), total: POINTER(c_size_t)) -> None:
        free[0], total[0] = MEMORY - self.memory.allocated(), MEMORY

    def cuMemAlloc(self, out: POINTER(c_uint64), size: c_size_t) -> None:
        self.refuse_unsafe()
        refuse(not self.contexts, "INVALID_CONTEXT")
        refuse(size == 0)
        try:
            out[0] = self.memory.allocate(size)
        except MemoryError:
            raise Refused("OUT_OF_MEMORY") from None

    def cuMemFree(self, address: c_uint64) -> None:
        self.refuse_unsafe()
        if address:
            self.memory.free(address)

    def cuMemcpyHtoDAsync(self, to: c_uint64, source: c_void_p, size: c_size_t, stream: c_void_p) -> None:
        refuse(not self.contexts, "INVALID_CONTEXT")
        self.submit(stream, lambda: self.device.write(to, ctypes.string_at(source, size)))

    def cuMemcpyDtoHAsync(self, to: c_void_p, source: c_uint64, size: c_size_t, stream: c_void_p) -> None:
        refuse(not self.contexts, "INVALID_CONTEXT")
        self.submit(stream, lambda: self._to_host(self.stream(stream), to, self.memory.read(source, size)))

    def _to_host(self, stream: Stream, to: int, data: bytes) -> None:
        """A copy to pinned memory is made when the host waits for it; other memory of the host has it, and all before it, at once."""
        stream.copies.append(lambda: ctypes.memmove(to, data, len(data)))
        if not any(address <= to < address + len(memory) for address, memory in self._pinned.items()):
            finish(stream, stream.copies)

    def cuMemHostAlloc(self, out: Out, size: c_size_t, flags: c_uint) -> None:
        self.refuse_unsafe()
        refuse(not self.contexts, "INVALID_CONTEXT")
        refuse(size == 0)
        memory = (c_ubyte * size)(*b"\xa5" * size)
        out[0] = ctypes.addressof(memory)
        self._pinned[out[0]] = memory

    def cuMemFreeHost(self, address: c_void_p) -> None:
        self.refuse_unsafe()
        refuse(address not in self._pinned)
        del self._pinned[address]

    def cuMemcpyDtoDAsync(self, to: c_uint64, source: c_uint64, size: c_size_t, stream: c_void_p) -> None:
        refuse(not self.contexts, "INVALID_CONTEXT")
        self.submit(stream, lambda: self.device.write(to, self.memory.read(source, size)))

    def cuMemsetD8Async(self, to: c_uint64, byte: c_ubyte, size: c_size_t, stream: c_void_p) -> None:
        refuse(not self.contexts, "INVALID_CONTEXT")
        self.submit(stream, lambda: self.device.write(to, bytes([byte]) * size))

    def cuMemcpyHtoD(self, to: c_uint64, source: c_void_p, size: c_size_t) -> None:
        self.cuMemcpyHtoDAsync(to, source, size, None)

    def cuMemcpyDtoH(self, to: c_void_p, source: c_uint64, size: c_size_t) -> None:
        self.cuMemcpyDtoHAsync(to, source, size, None)

    def cuMemsetD8(self, to: c_uint64, byte: c_ubyte, size: c_size_t) -> None:
        self.cuMemsetD8Async(to, byte, size, None)

    # --- code ---

    def cuLinkCreate(self, number: c_uint, options: c_void_p, values: c_void_p, out: Out) -> None:
        out[0] = self.new(Link())

    def cuLinkAddData(
        self,
        link: c_void_p,
        kind: c_int,
        data: c_void_p,
        size: c_size_t,
        name: c_char_p,
        number: c_uint,
        options: c_void_p,
        values: c_void_p,
    ) -> None:
        if kind != names.CUjitInputType.CU_JIT_INPUT_PTX:
            raise NotImplementedError(names.CUjitInputType(kind).name)
        self.resolve(link, Link).texts.append(ctypes.string_at(data, size).rstrip(b"\0"))

    def cuLinkComplete(self, link: c_void_p, out: Out, size: POINTER(c_size_t)) -> None:
        (text,) = self.resolve(link, Link).texts  # linking several is not supported
        self._texts[link] = c_char_p(text)
        out[0], size[0] = ctypes.cast(self._texts[link], c_void_p), len(text) + 1

    def cuLibraryLoadData(
        self,
        out: Out,
        code: c_char_p,
        jit_options: c_void_p,
        jit_values: c_void_p,
        jit_number: c_uint,
        options: c_void_p,
        values: c_void_p,
        number: c_uint,
    ) -> None:
        self.refuse_unsafe()
        kernels = parse(code.decode())
        refuse(any(kernel.shared_bytes > ATTRIBUTES["MAX_SHARED_MEMORY_PER_BLOCK"] for kernel in kernels.values()), "INVALID_PTX")
        out[0] = self.new(Library({name.encode(): self.new(Function(kernel)) for name, kernel in kernels.items()}))

    def cuLibraryUnload(self, library: c_void_p) -> None:
        for kernel in self.remove(library, Library).kernels.values():
            self.remove(kernel, Function).is_loaded = False

    def cuLibraryGetKernel(self, out: Out, library: c_void_p, name: c_char_p) -> None:
        kernels = self.resolve(library, Library).kernels
        refuse(name not in kernels, "NOT_FOUND")
        out[0] = kernels[name]

    def cuKernelGetAttribute(self, out: POINTER(c_int), attribute: c_int, kernel: c_void_p, device: c_int) -> None:
        its = self.resolve(kernel, Function).kernel
        known = {"MAX_THREADS_PER_BLOCK": its.threads, "SHARED_SIZE_BYTES": its.shared_bytes}
        known |= dict.fromkeys(("CONST_SIZE_BYTES", "LOCAL_SIZE_BYTES", "NUM_REGS"), 0)  # known from machine code alone
        out[0] = known[names.CUfunction_attribute(attribute).name.removeprefix("CU_FUNC_ATTRIBUTE_")]

    def cuLaunchKernel(
        self,
        kernel: c_void_p,
        x: c_uint,
        y: c_uint,
        z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: c_void_p,
        parameters: Out,
        extra: Out,
    ) -> None:
        refuse(not self.contexts, "INVALID_CONTEXT")
        config = LaunchConfig((x, y, z), (block_x, block_y, block_z), shared, stream, None, 0)
        self.cuLaunchKernelEx(ctypes.pointer(config), kernel, parameters, extra)

    def cuLaunchKernelEx(self, config: POINTER(LaunchConfig), kernel: c_void_p, parameters: Out, extra: Out) -> None:
        its, function = config[0], self.resolve(kernel, Function)
        if its.number or extra:
            raise NotImplementedError("attributes of a launch")
        grid, block = tuple(its.grid), tuple(its.block)
        for kind, sizes in (("GRID", grid), ("BLOCK", block)):
            refuse(any(not 1 <= n <= ATTRIBUTES[f"MAX_{kind}_DIM_{axis}"] for axis, n in zip("XYZ", sizes, strict=True)))
        refuse(prod(block) > function.kernel.threads)
        refuse(function.kernel.shared_bytes + its.shared > ATTRIBUTES["MAX_SHARED_MEMORY_PER_BLOCK"])
        values, shared = [ctypes.string_at(parameters[i], size) for i, size in enumerate(function.kernel.params)], its.shared

        def run(overlaps: bool = False) -> None:
            if not function.is_loaded:
                raise RuntimeError(f"{function.kernel.name} is launched, whose library is unloaded")
            self.device.launch(function.kernel, grid, block, values, shared, overlaps)

        self.submit(its.stream, run, is_kernel=True)


@cache
def install() -> Driver:
    """Makes a Driver the CUDA driver of this process. Later calls return the same one."""
    from cuda.core import _linker

    driver = Driver()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libcuda.so.1"
        source = Path(__file__).with_name("libcuda.c")
        subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, source], check=True)
        library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    c_void_p.in_dll(library, "driver_lookup").value = ctypes.cast(driver.entries["cuGetProcAddress"], c_void_p).value
    driver.entries["cuLinkDestroy"] = library.cuLinkDestroy
    _linker._driver, _linker._use_nvjitlink_backend = names, False  # it would compile PTX to machine code
    return driver
