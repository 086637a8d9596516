"""CUDA's driver without a GPU: as much of its API as Numba and cuda.core use, with an interpreter of PTX for the device.

`install` must come before anything asks for a GPU. What cuda.h says of a function holds here; functions that are not here are not found,
and their callers say so by name. Streams run at once. Nothing is compiled further than to PTX, which is what is loaded and run.
"""

import ctypes
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from inspect import signature
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from cuda.bindings import driver
from cuda.bindings.driver import CUdevice_attribute, CUfunction_attribute, CUlimit, CUpointer_attribute, CUresult
from cuda.bindings.driver import CUstreamCaptureMode as Mode

from .machine import Device
from .source import parse

VERSION = 13000
NAME = b"an interpreter of PTX"
MEMORY = 80 << 30  # bytes; those there are depend on the host
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
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 1 << 16,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "L2_CACHE_SIZE": 50 << 20,
    "CLOCK_RATE": 1_980_000,  # kHz
    "MEMORY_CLOCK_RATE": 2_619_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 5120,  # bits
    "PCI_DOMAIN_ID": 0,
    "PCI_BUS_ID": 1,
    "PCI_DEVICE_ID": 0,
}
device = Device()
memory = device.memory
problems: list[str] = []
"""Tracebacks of what went wrong inside a call, the first one first: its caller sees no more than CUDA_ERROR_LAUNCH_FAILED."""

_functions: dict[str, tuple[int | None, Any]] = {}  # by name: the version of the API that it is of, if there are several; its address
_objects: dict[int, Any] = {}  # by handle
_handles = count(0x10000, 16)
_current = threading.local()  # the contexts of a thread
_texts: dict[bytes, c_char_p] = {}  # kept alive for those who have their addresses
T = TypeVar("T")


class Refused(Exception):
    """A call that the driver refuses, with the name of a CUresult."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.code = int(getattr(CUresult, f"CUDA_ERROR_{name}"))


def refuse(wrong: bool, name: str = "INVALID_VALUE") -> None:
    if wrong:
        raise Refused(name)


def api(function: Callable[..., None], version: int | None = None) -> Callable[..., None]:
    """A function of the driver, its parameters annotated as ctypes knows them."""

    def called(*arguments: Any) -> int:
        try:
            function(*arguments)
        except Refused as refusal:
            return refusal.code
        except BaseException:
            problems.append(f"{function.__name__}: {traceback.format_exc()}")
            print(problems[-1], file=sys.stderr)
            return int(CUresult.CUDA_ERROR_LAUNCH_FAILED)
        return 0

    kinds = [parameter.annotation for parameter in signature(function).parameters.values()]
    _functions[function.__name__] = version, CFUNCTYPE(c_int, *kinds)(called)
    return function


def of_version(version: int) -> Callable:
    return lambda function: api(function, version)


def handle_of(thing: Any) -> int:
    handle = next(_handles)
    _objects[handle] = thing
    return handle


def found(handle: int | None, kind: type[T]) -> T:
    thing = _objects.get(handle or 0)
    if not isinstance(thing, kind):
        raise Refused("INVALID_HANDLE")
    return thing


def destroyed(handle: int | None, kind: type[T]) -> T:
    thing = found(handle, kind)
    del _objects[handle or 0]
    return thing


# --- the driver and its device --------------------------------------------------------------------------------------------------------


@api
def cuGetProcAddress(name: c_char_p, address: POINTER(c_void_p), version: c_int, flags: c_uint64, status: POINTER(c_int)) -> None:
    its_version, function = _functions.get(name.decode(), (None, None))
    missing = function is None or version > VERSION or its_version not in (None, version)
    address[0] = None if missing else ctypes.cast(function, c_void_p).value
    if status:
        status[0] = int(missing)  # CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
    refuse(missing, "NOT_FOUND")


@api
def cuInit(flags: c_uint) -> None:
    refuse(flags != 0)


@api
def cuDriverGetVersion(version: POINTER(c_int)) -> None:
    version[0] = VERSION


def _text(result: int, of: Callable[[CUresult], str], out: Any) -> None:
    out[0] = None
    refuse(result not in {int(known) for known in CUresult})
    text = of(CUresult(result)).encode()
    out[0] = _texts.setdefault(text, c_char_p(text))


@api
def cuGetErrorName(result: c_int, out: POINTER(c_char_p)) -> None:
    _text(result, lambda known: known.name, out)


@api
def cuGetErrorString(result: c_int, out: POINTER(c_char_p)) -> None:
    _text(result, lambda known: known.name.removeprefix("CUDA_").replace("_", " ").lower(), out)


@api
def cuDeviceGetCount(out: POINTER(c_int)) -> None:
    out[0] = 1


@api
def cuDeviceGet(out: POINTER(c_int), ordinal: c_int) -> None:
    refuse(ordinal != 0, "INVALID_DEVICE")
    out[0] = 0


@api
def cuDeviceGetName(name: POINTER(c_ubyte), length: c_int, number: c_int) -> None:
    ctypes.memmove(name, (NAME[: length - 1] + b"\0"), min(len(NAME) + 1, length))


@api
def cuDeviceGetUuid(out: POINTER(c_ubyte * 16), number: c_int) -> None:
    out[0] = (c_ubyte * 16)(*range(16))


@api
def cuDeviceTotalMem(out: POINTER(c_size_t), number: c_int) -> None:
    out[0] = MEMORY


@api
def cuDeviceGetAttribute(out: POINTER(c_int), attribute: c_int, number: c_int) -> None:
    out[0] = ATTRIBUTES[CUdevice_attribute(attribute).name.removeprefix("CU_DEVICE_ATTRIBUTE_")]


# --- contexts: the device has its primary one -----------------------------------------------------------------------------------------


class Context:
    pass


PRIMARY = handle_of(Context())


def _contexts() -> list[int]:
    return _current.__dict__.setdefault("stack", [])


def in_context() -> None:
    refuse(not _contexts(), "INVALID_CONTEXT")


@api
def cuDevicePrimaryCtxRetain(out: POINTER(c_void_p), number: c_int) -> None:
    out[0] = PRIMARY


@api
def cuDevicePrimaryCtxRelease(number: c_int) -> None:
    pass


@api
def cuCtxGetCurrent(out: POINTER(c_void_p)) -> None:
    out[0] = _contexts()[-1] if _contexts() else None


@api
def cuCtxSetCurrent(context: c_void_p) -> None:
    del _contexts()[-1:]
    if context:
        cuCtxPushCurrent(context)


@api
def cuCtxPushCurrent(context: c_void_p) -> None:
    found(context, Context)
    _contexts().append(context)


@api
def cuCtxPopCurrent(out: POINTER(c_void_p)) -> None:
    in_context()
    context = _contexts().pop()
    if out:
        out[0] = context


@of_version(2000)
def cuCtxGetDevice(out: POINTER(c_int)) -> None:
    in_context()
    out[0] = 0


@of_version(2000)
def cuCtxSynchronize() -> None:
    in_context()
    refuse(invalidated(lambda stream: True), "STREAM_CAPTURE_UNSUPPORTED")


# --- memory ---------------------------------------------------------------------------------------------------------------------------


@api
def cuMemGetInfo(free: POINTER(c_size_t), total: POINTER(c_size_t)) -> None:
    in_context()
    free[0], total[0] = MEMORY - memory.allocated(), MEMORY


@api
def cuMemAlloc(out: POINTER(c_uint64), size: c_size_t) -> None:
    in_context()
    unsafe_while_capturing()
    refuse(size == 0)
    try:
        out[0] = memory.allocate(size)
    except MemoryError:
        raise Refused("OUT_OF_MEMORY") from None


@api
def cuMemFree(address: c_uint64) -> None:
    unsafe_while_capturing()
    if address:
        memory.free(address)


@api
def cuMemGetAddressRange(start: POINTER(c_uint64), size: POINTER(c_size_t), address: c_uint64) -> None:
    start[0], size[0] = memory.allocation(address)


@api
def cuPointerGetAttribute(out: POINTER(c_uint64), attribute: c_int, address: c_uint64) -> None:
    memory.allocation(address)
    if attribute != CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        raise NotImplementedError(CUpointer_attribute(attribute).name)
    out[0] = address


@api
def cuMemcpyHtoDAsync(to: c_uint64, source: c_void_p, size: c_size_t, stream: c_void_p) -> None:
    submit(stream, lambda: device.write(to, ctypes.string_at(source, size)))


@api
def cuMemcpyDtoHAsync(to: c_void_p, source: c_uint64, size: c_size_t, stream: c_void_p) -> None:
    submit(stream, lambda: ctypes.memmove(to, memory.read(source, size), size))


@api
def cuMemcpyDtoDAsync(to: c_uint64, source: c_uint64, size: c_size_t, stream: c_void_p) -> None:
    submit(stream, lambda: device.write(to, memory.read(source, size)))


@api
def cuMemsetD8Async(to: c_uint64, byte: c_ubyte, size: c_size_t, stream: c_void_p) -> None:
    submit(stream, lambda: device.write(to, bytes([byte]) * size))


@api
def cuMemcpyHtoD(to: c_uint64, source: c_void_p, size: c_size_t) -> None:
    cuMemcpyHtoDAsync(to, source, size, None)


@api
def cuMemcpyDtoH(to: c_void_p, source: c_uint64, size: c_size_t) -> None:
    cuMemcpyDtoHAsync(to, source, size, None)


@api
def cuMemcpyDtoD(to: c_uint64, source: c_uint64, size: c_size_t) -> None:
    cuMemcpyDtoDAsync(to, source, size, None)


@api
def cuMemsetD8(to: c_uint64, byte: c_ubyte, size: c_size_t) -> None:
    cuMemsetD8Async(to, byte, size, None)


# --- streams and what they capture ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Node:
    run: Callable[[], object]
    is_kernel: bool


@dataclass(eq=False)
class Graph:
    nodes: dict[int, Node] = field(default_factory=dict)  # by handle
    edges: dict[tuple[int, int], bytes] = field(default_factory=dict)  # CUgraphEdgeData, between handles


@dataclass(eq=False)
class Capture:
    mode: int
    graph: Graph = field(default_factory=Graph)
    last: int | None = None  # node, on which the next one depends
    valid: bool = True
    thread: int = field(default_factory=threading.get_ident)


@dataclass(eq=False)
class Stream:
    blocking: bool  # waits for the legacy stream, and it for this one
    capture: Capture | None = None


LEGACY = Stream(True)
_objects |= {1: LEGACY, 2: Stream(True)}  # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD


def stream_of(handle: int | None) -> Stream:
    return found(handle or 1, Stream)


def captures() -> Iterable[tuple[Stream, Capture]]:
    return [(thing, thing.capture) for thing in _objects.values() if isinstance(thing, Stream) and thing.capture]


def invalidated(concerned: Callable[[Stream], bool]) -> bool:
    """Whether any of these streams captures; what they have captured is of no use any more."""
    hit = [capture for stream, capture in captures() if concerned(stream)]
    for capture in hit:
        capture.valid = False
    return bool(hit)


def unsafe_while_capturing() -> None:
    """What cuThreadExchangeStreamCaptureMode calls a potentially unsafe call."""
    for _, capture in captures():
        here = capture.thread == threading.get_ident()
        if capture.mode == Mode.CU_STREAM_CAPTURE_MODE_GLOBAL or (here and capture.mode != Mode.CU_STREAM_CAPTURE_MODE_RELAXED):
            capture.valid = False
            raise Refused("STREAM_CAPTURE_UNSUPPORTED")


def usable(handle: int | None) -> Stream:
    """A stream for something new. The legacy one is none while those that wait for it capture."""
    stream = stream_of(handle)
    refuse(stream is LEGACY and invalidated(lambda other: other.blocking), "STREAM_CAPTURE_IMPLICIT")
    return stream


def submit(handle: int | None, run: Callable[[], object], is_kernel: bool = False) -> None:
    """Run it, or note it in what the stream captures."""
    in_context()
    stream = usable(handle)
    if (capture := stream.capture) is None:
        run()
        return
    refuse(not capture.valid, "STREAM_CAPTURE_INVALIDATED")
    new = handle_of(Node(run, is_kernel))
    capture.graph.nodes[new] = _objects[new]
    if capture.last is not None:
        capture.graph.edges[capture.last, new] = DEFAULT
    capture.last = new


@api
def cuStreamCreate(out: POINTER(c_void_p), flags: c_uint) -> None:
    cuStreamCreateWithPriority(out, flags, 0)


@api
def cuStreamCreateWithPriority(out: POINTER(c_void_p), flags: c_uint, priority: c_int) -> None:
    in_context()
    refuse(flags not in (0, 1))
    out[0] = handle_of(Stream(blocking=flags == 0))


@api
def cuStreamDestroy(stream: c_void_p) -> None:
    destroyed(stream, Stream)


@api
def cuStreamSynchronize(stream: c_void_p) -> None:
    its = usable(stream)
    refuse(invalidated(lambda other: other is its), "STREAM_CAPTURE_UNSUPPORTED")


@api
def cuStreamQuery(stream: c_void_p) -> None:
    cuStreamSynchronize(stream)


@api
def cuStreamGetCtx(stream: c_void_p, out: POINTER(c_void_p)) -> None:
    stream_of(stream)
    out[0] = PRIMARY


@api
def cuStreamBeginCapture(stream: c_void_p, mode: c_int) -> None:
    its = stream_of(stream)
    refuse(its is LEGACY, "STREAM_CAPTURE_UNSUPPORTED")
    refuse(its.capture is not None, "ILLEGAL_STATE")
    its.capture = Capture(mode)


@api
def cuStreamIsCapturing(stream: c_void_p, out: POINTER(c_int)) -> None:
    its = stream_of(stream)
    refuse(its is LEGACY and any(other.blocking for other, _ in captures()), "STREAM_CAPTURE_IMPLICIT")
    out[0] = 0 if its.capture is None else 1 if its.capture.valid else 2


@api
def cuStreamEndCapture(stream: c_void_p, out: POINTER(c_void_p)) -> None:
    its, out[0] = stream_of(stream), None
    if (capture := its.capture) is None:
        raise Refused("ILLEGAL_STATE")
    elsewhere = capture.thread != threading.get_ident()
    refuse(elsewhere and capture.mode != Mode.CU_STREAM_CAPTURE_MODE_RELAXED, "STREAM_CAPTURE_WRONG_THREAD")
    its.capture = None
    refuse(not capture.valid, "STREAM_CAPTURE_INVALIDATED")
    out[0] = handle_of(capture.graph)


# --- events ---------------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Event:
    timed: bool
    seconds: float | None = None


@api
def cuEventCreate(out: POINTER(c_void_p), flags: c_uint) -> None:
    in_context()
    out[0] = handle_of(Event(not flags & 2))


@api
def cuEventDestroy(event: c_void_p) -> None:
    destroyed(event, Event)


@api
def cuEventRecord(event: c_void_p, stream: c_void_p) -> None:
    if usable(stream).capture:
        raise NotImplementedError("an event in a capture")
    found(event, Event).seconds = time.perf_counter()


@api
def cuEventQuery(event: c_void_p) -> None:
    found(event, Event)


@api
def cuEventSynchronize(event: c_void_p) -> None:
    found(event, Event)


@api
def cuEventElapsedTime(out: POINTER(c_float), start: c_void_p, end: c_void_p) -> None:
    events = [found(event, Event) for event in (start, end)]
    times = [event.seconds for event in events if event.timed and event.seconds is not None]
    refuse(len(times) < 2, "INVALID_HANDLE")
    out[0] = 1e3 * (times[1] - times[0])


@api
def cuStreamWaitEvent(stream: c_void_p, event: c_void_p, flags: c_uint) -> None:
    usable(stream)
    found(event, Event)


# --- graphs ---------------------------------------------------------------------------------------------------------------------------

DEFAULT, PROGRAMMATIC, LAUNCH_ORDER = bytes(8), 1, 2
Edge = c_ubyte * 8  # CUgraphEdgeData: from_port, to_port, type, reserved


@dataclass(eq=False)
class Launchable:
    nodes: list[Node]


@api
def cuGraphDestroy(graph: c_void_p) -> None:
    for node in destroyed(graph, Graph).nodes:
        del _objects[node]


@api
def cuGraphClone(out: POINTER(c_void_p), graph: c_void_p) -> None:
    its = found(graph, Graph)
    copies = {node: handle_of(its.nodes[node]) for node in its.nodes}
    edges = {(copies[before], copies[after]): data for (before, after), data in its.edges.items()}
    out[0] = handle_of(Graph({copies[node]: its.nodes[node] for node in its.nodes}, edges))


@api
def cuGraphGetNodes(graph: c_void_p, nodes: POINTER(c_void_p), number: POINTER(c_size_t)) -> None:
    its = list(found(graph, Graph).nodes)
    if nodes:
        for i in range(number[0]):
            nodes[i] = its[i] if i < len(its) else None
        number[0] = min(number[0], len(its))
    else:
        number[0] = len(its)


@of_version(12030)
def cuGraphGetEdges(
    graph: c_void_p, before: POINTER(c_void_p), after: POINTER(c_void_p), data: POINTER(Edge), number: POINTER(c_size_t)
) -> None:
    edges = list(found(graph, Graph).edges.items())
    if not before:
        refuse(bool(after) or bool(data))
        number[0] = len(edges)
        return
    edges = edges[: number[0]]
    refuse(not data and any(its != DEFAULT for _, its in edges), "LOSSY_QUERY")
    for i in range(number[0]):
        before[i], after[i] = edges[i][0] if i < len(edges) else (None, None)
        if data and i < len(edges):
            data[i] = Edge(*edges[i][1])
    number[0] = len(edges)


def _given(before: Any, after: Any, data: Any, number: int) -> list[tuple[tuple[int, int], bytes]]:
    return [((before[i], after[i]), bytes(data[i]) if data else DEFAULT) for i in range(number)]


@of_version(12030)
def cuGraphAddDependencies(
    graph: c_void_p, before: POINTER(c_void_p), after: POINTER(c_void_p), data: POINTER(Edge), number: c_size_t
) -> None:
    its = found(graph, Graph)
    for edge, its_data in _given(before, after, data, number):
        refuse(edge in its.edges or not set(edge) <= its.nodes.keys())
        refuse(not _is_allowed(its_data, all(its.nodes[node].is_kernel for node in edge)))
        its.edges[edge] = its_data


def _is_allowed(edge: bytes, between_kernels: bool) -> bool:
    from_port, to_port, kind, *reserved = edge
    if to_port or any(reserved):
        return False
    return (kind == 0 and from_port == 0) or (kind == PROGRAMMATIC and from_port in (PROGRAMMATIC, LAUNCH_ORDER) and between_kernels)


@of_version(12030)
def cuGraphRemoveDependencies(
    graph: c_void_p, before: POINTER(c_void_p), after: POINTER(c_void_p), data: POINTER(Edge), number: c_size_t
) -> None:
    its = found(graph, Graph)
    for edge, its_data in _given(before, after, data, number):
        refuse(its.edges.get(edge) != its_data)
        del its.edges[edge]


@api
def cuGraphInstantiateWithFlags(out: POINTER(c_void_p), graph: c_void_p, flags: c_uint64) -> None:
    its = found(graph, Graph)
    before: dict[int, set[int]] = {node: set() for node in its.nodes}
    for first, second in its.edges:
        before[second].add(first)
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError:
        raise Refused("INVALID_VALUE") from None
    out[0] = handle_of(Launchable([its.nodes[node] for node in order]))


@api
def cuGraphLaunch(launchable: c_void_p, stream: c_void_p) -> None:
    its = found(launchable, Launchable)
    if usable(stream).capture:
        raise NotImplementedError("a graph in a capture")
    for node in its.nodes:
        node.run()


@api
def cuGraphExecDestroy(launchable: c_void_p) -> None:
    destroyed(launchable, Launchable)


# --- code -----------------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Link:
    texts: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class Library:
    kernels: dict[str, int]  # handles


@dataclass(eq=False)
class Function:
    name: str
    code: Any  # the machine's
    library: int = 0
    dynamic_shared: int = 0


@of_version(6050)
def cuLinkCreate(number: c_uint, options: POINTER(c_int), values: POINTER(c_void_p), out: POINTER(c_void_p)) -> None:
    out[0] = handle_of(Link())


@of_version(6050)
def cuLinkAddData(
    link: c_void_p, kind: c_int, data: c_void_p, size: c_size_t, name: c_char_p, number: c_uint, options: POINTER(c_int), values: c_void_p
) -> None:
    if kind != 1 or found(link, Link).texts:  # CU_JIT_INPUT_PTX
        raise NotImplementedError("linking more than one text of PTX")
    found(link, Link).texts.append(ctypes.string_at(data, size).rstrip(b"\0") + b"\0")


@api
def cuLinkComplete(link: c_void_p, out: POINTER(c_void_p), size: POINTER(c_size_t)) -> None:
    (text,) = found(link, Link).texts
    out[0], size[0] = ctypes.cast(c_char_p(text), c_void_p), len(text)


@api
def cuLinkDestroy(link: c_void_p) -> None:
    destroyed(link, Link)


@api
def cuLibraryLoadData(
    out: POINTER(c_void_p),
    code: c_char_p,
    jit_options: c_void_p,
    jit_values: c_void_p,
    jit_number: c_uint,
    options: c_void_p,
    values: c_void_p,
    number: c_uint,
) -> None:
    unsafe_while_capturing()
    functions = {name: Function(name, kernel) for name, kernel in parse(code.decode()).items()}
    out[0] = library = handle_of(Library({name: handle_of(function) for name, function in functions.items()}))
    for function in functions.values():
        function.library = library


@api
def cuLibraryUnload(library: c_void_p) -> None:
    for kernel in destroyed(library, Library).kernels.values():
        del _objects[kernel]


@api
def cuLibraryGetKernel(out: POINTER(c_void_p), library: c_void_p, name: c_char_p) -> None:
    its = found(library, Library).kernels.get(name.decode())
    refuse(its is None, "NOT_FOUND")
    out[0] = its


@api
def cuKernelGetFunction(out: POINTER(c_void_p), kernel: c_void_p) -> None:
    found(kernel, Function)
    out[0] = kernel


@api
def cuKernelGetLibrary(out: POINTER(c_void_p), kernel: c_void_p) -> None:
    out[0] = found(kernel, Function).library


@api
def cuKernelGetAttribute(out: POINTER(c_int), attribute: c_int, kernel: c_void_p, number: c_int) -> None:
    code = found(kernel, Function).code
    known = {"MAX_THREADS_PER_BLOCK": code.threads, "SHARED_SIZE_BYTES": code.shared_bytes}
    known |= dict.fromkeys(("CONST_SIZE_BYTES", "LOCAL_SIZE_BYTES", "NUM_REGS"), 0)  # which nobody has counted
    out[0] = known[CUfunction_attribute(attribute).name.removeprefix("CU_FUNC_ATTRIBUTE_")]


@api
def cuKernelSetAttribute(attribute: c_int, value: c_int, kernel: c_void_p, number: c_int) -> None:
    if attribute != CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        raise NotImplementedError(CUfunction_attribute(attribute).name)
    refuse(not 0 <= value <= ATTRIBUTES["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"])
    found(kernel, Function).dynamic_shared = value


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attributes_number", c_uint),
    )


@api
def cuLaunchKernelEx(config: POINTER(LaunchConfig), kernel: c_void_p, parameters: POINTER(c_void_p), extra: POINTER(c_void_p)) -> None:
    its, function = config[0], found(kernel, Function)
    if its.attributes_number or extra:
        raise NotImplementedError("attributes of a launch")
    grid, block, shared = tuple(its.grid), tuple(its.block), its.shared
    most = [[ATTRIBUTES[f"MAX_{what}_DIM_{axis}"] for axis in "XYZ"] for what in ("GRID", "BLOCK")]
    refuse(not all(0 < n <= limit for n, limit in zip((*grid, *block), most[0] + most[1], strict=True)))
    refuse(prod(block) > ATTRIBUTES["MAX_THREADS_PER_BLOCK"])
    refuse(shared > max(function.dynamic_shared, ATTRIBUTES["MAX_SHARED_MEMORY_PER_BLOCK"]))
    values = [ctypes.string_at(parameters[i], size) for i, size in enumerate(function.code.params)]

    def run() -> None:
        if function.library not in _objects:
            raise RuntimeError(f"{function.name} was unloaded")
        device.launch(function.code, grid, block, values, shared)

    submit(its.stream, run, is_kernel=True)


# --- installing it --------------------------------------------------------------------------------------------------------------------


def install() -> None:
    """Make this the process's driver. Raises RuntimeError where there is another one."""
    from cuda.core import _linker as linker

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libcuda.so.1"
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path), str(Path(__file__).with_name("libcuda.c"))]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    ctypes.CDLL("libcuda.so.1")
    c_void_p.in_dll(library, "driver_lookup").value = ctypes.cast(_functions["cuGetProcAddress"][1], c_void_p).value
    linker._driver, linker._use_nvjitlink_backend = driver, False  # the linker of the driver, which keeps PTX as it is
