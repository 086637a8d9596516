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
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from cuda.bindings import driver as names

from .machine import Device
from .source import Kernel, parse

T = TypeVar("T")
Out = POINTER(c_void_p)  # for one handle, or several
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
VERSIONS = {"cuCtxGetDevice": 2000, "cuCtxSynchronize": 2000, "cuLinkAddData": 6050, "cuLinkCreate": 6050}
"""The versions of functions that have several."""


class Refused(Exception):
    """A call is refused, with the name of a CUresult."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.code = int(getattr(names.CUresult, f"CUDA_ERROR_{name}"))


def refuse(wrong: bool, name: str = "INVALID_VALUE") -> None:
    if wrong:
        raise Refused(name)


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


class Stream:
    """A stream, which runs its work at once."""


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


class Driver:
    """The functions of the API, by their names. `problems` holds the tracebacks of their exceptions, which callers do not see."""

    def __init__(self) -> None:
        self._handles = count(0x10000, 16)
        self._things: dict[int, Any] = {1: Stream()}  # CU_STREAM_LEGACY
        self.device = Device()
        self.memory = self.device.memory
        self.primary = self.new(Context())
        self.problems = list[str]()
        self._of_thread = threading.local()
        self._texts: dict[int, c_char_p] = {}  # kept alive for callers that have their addresses
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

    # --- objects with handles ---

    def new(self, thing: Any) -> int:
        """A handle for a new object."""
        handle = next(self._handles)
        self._things[handle] = thing
        return handle

    def resolve(self, handle: int | None, kind: type[T]) -> T:
        thing = self._things.get(handle or 0)
        if not isinstance(thing, kind):
            raise Refused("INVALID_HANDLE")
        return thing

    def remove(self, handle: int | None, kind: type[T]) -> T:
        self.resolve(handle, kind)
        return self._things.pop(handle)

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
        refuse(not self.contexts, "INVALID_CONTEXT")

    # --- streams ---

    def submit(self, handle: int | None, run: Callable[[], None]) -> None:
        """Runs it."""
        refuse(not self.contexts, "INVALID_CONTEXT")
        self.resolve(handle or 1, Stream)
        run()

    def cuStreamCreate(self, out: Out, flags: c_uint) -> None:
        out[0] = self.new(Stream())

    def cuStreamDestroy(self, stream: c_void_p) -> None:
        self.remove(stream, Stream)

    def cuStreamSynchronize(self, stream: c_void_p) -> None:
        self.resolve(stream or 1, Stream)

    # --- memory ---

    def cuMemGetInfo(self, free: POINTER(c_size_t), total: POINTER(c_size_t)) -> None:
        free[0], total[0] = MEMORY - self.memory.allocated(), MEMORY

    def cuMemAlloc(self, out: POINTER(c_uint64), size: c_size_t) -> None:
        refuse(not self.contexts, "INVALID_CONTEXT")
        refuse(size == 0)
        try:
            out[0] = self.memory.allocate(size)
        except MemoryError:
            raise Refused("OUT_OF_MEMORY") from None

    def cuMemFree(self, address: c_uint64) -> None:
        if address:
            self.memory.free(address)

    def cuMemcpyHtoDAsync(self, to: c_uint64, source: c_void_p, size: c_size_t, stream: c_void_p) -> None:
        self.submit(stream, lambda: self.device.write(to, ctypes.string_at(source, size)))

    def cuMemcpyDtoHAsync(self, to: c_void_p, source: c_uint64, size: c_size_t, stream: c_void_p) -> None:
        self.submit(stream, lambda: ctypes.memmove(to, self.memory.read(source, size), size) and None)

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

        def run() -> None:
            if not function.is_loaded:
                raise RuntimeError(f"{function.kernel.name} is launched, whose library is unloaded")
            self.device.launch(function.kernel, grid, block, values, shared)

        self.submit(its.stream, run)


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
