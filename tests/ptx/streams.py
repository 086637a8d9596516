"""Streams, which run work at once or capture it; events; and graphs of captured work.

Names, parameters and refusals are those of cuda.h.
"""

import threading
import time
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import count
from typing import Any, TypeVar

from cuda.bindings.driver import CUresult
from cuda.bindings.driver import CUstreamCaptureMode as Mode

T = TypeVar("T")
Out = POINTER(c_void_p)  # for one handle, or several
Edge = c_ubyte * 8  # CUgraphEdgeData: from_port, to_port, type, reserved
DEFAULT, PROGRAMMATIC, LAUNCH_ORDER = bytes(Edge()), 1, 2  # the edge of full completion; ports, of which the first is a type too


class Refused(Exception):
    """A call is refused, with the name of a CUresult."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.code = int(getattr(CUresult, f"CUDA_ERROR_{name}"))


def refuse(wrong: bool, name: str = "INVALID_VALUE") -> None:
    if wrong:
        raise Refused(name)


@dataclass(eq=False)
class Node:
    run: Callable[..., object]  # that of a kernel takes `overlaps=True`
    is_kernel: bool


@dataclass(eq=False)
class Graph:
    nodes: dict[int, Node] = field(default_factory=dict)  # by handle
    edges: dict[tuple[int, int], bytes] = field(default_factory=dict)


@dataclass(eq=False)
class Launchable:
    runs: list[Callable[[], object]]  # in an order that respects the edges


@dataclass(eq=False)
class Capture:
    mode: int
    graph: Graph = field(default_factory=Graph)
    last: int | None = None  # node, on which the next one depends
    valid: bool = True
    thread: int = field(default_factory=threading.get_ident)


@dataclass(eq=False)
class Stream:
    blocking: bool  # waits for the legacy stream, and that one for it
    capture: Capture | None = None
    copies: list[Callable[[], object]] = field(default_factory=list)  # to pinned memory, which are there once the host has waited


@dataclass(eq=False)
class Event:
    timed: bool
    seconds: float | None = None
    stream: Stream = field(default_factory=lambda: Stream(False))
    copies: list[Callable[[], object]] = field(default_factory=list)  # of the stream, before this event


def finish(stream: Stream, copies: list[Callable[[], object]]) -> None:
    """Makes those of the copies that the stream has not finished."""
    for copy in [copy for copy in stream.copies if copy in copies]:
        copy()
        stream.copies.remove(copy)


class Streams:
    """The objects with handles, and the functions of streams, events and graphs."""

    def __init__(self) -> None:
        self._handles = count(0x10000, 16)
        self.legacy = Stream(True)
        self._things: dict[int, Any] = {1: self.legacy, 2: Stream(True)}  # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD

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

    # --- streams ---

    def stream(self, handle: int | None) -> Stream:
        return self.resolve(handle or 1, Stream)

    def capturing(self) -> list[Stream]:
        return [thing for thing in self._things.values() if isinstance(thing, Stream) and thing.capture]

    def refuse_captured(self, concerned: Callable[[Stream], bool], name: str) -> None:
        """Refuses a call if any of these streams captures, and invalidates what they have captured."""
        captures = [stream.capture for stream in self.capturing() if concerned(stream)]
        for capture in captures:
            capture.valid = False
        refuse(bool(captures), name)

    def refuse_unsafe(self) -> None:
        """Refuses what cuThreadExchangeStreamCaptureMode calls a potentially unsafe call, where a capture forbids it."""

        def forbids(stream: Stream) -> bool:
            here, mode = stream.capture.thread == threading.get_ident(), stream.capture.mode
            return mode == Mode.CU_STREAM_CAPTURE_MODE_GLOBAL or (here and mode != Mode.CU_STREAM_CAPTURE_MODE_RELAXED)

        self.refuse_captured(forbids, "STREAM_CAPTURE_UNSUPPORTED")

    def usable(self, handle: int | None) -> Stream:
        """A stream that takes something new. The legacy stream does not while a stream that waits for it captures."""
        stream = self.stream(handle)
        if stream is self.legacy:
            self.refuse_captured(lambda other: other.blocking, "STREAM_CAPTURE_IMPLICIT")
        return stream

    def submit(self, handle: int | None, run: Callable[..., object], is_kernel: bool = False) -> None:
        """Runs it, or captures it if the stream captures."""
        capture = self.usable(handle).capture
        if capture is None:
            run()
            return
        refuse(not capture.valid, "STREAM_CAPTURE_INVALIDATED")
        node = Node(run, is_kernel)
        added = self.new(node)
        capture.graph.nodes[added] = node
        if capture.last is not None:
            capture.graph.edges[capture.last, added] = DEFAULT
        capture.last = added

    def cuStreamCreate(self, out: Out, flags: c_uint) -> None:
        out[0] = self.new(Stream(blocking=not flags & 1))

    def cuStreamDestroy(self, stream: c_void_p) -> None:
        self.remove(stream, Stream)

    def cuStreamSynchronize(self, stream: c_void_p) -> None:
        its = self.usable(stream)
        self.refuse_captured(lambda other: other is its, "STREAM_CAPTURE_UNSUPPORTED")
        finish(its, its.copies)

    def cuStreamBeginCapture(self, stream: c_void_p, mode: c_int) -> None:
        its = self.stream(stream)
        refuse(its is self.legacy, "STREAM_CAPTURE_UNSUPPORTED")
        refuse(its.capture is not None, "ILLEGAL_STATE")
        its.capture = Capture(mode)

    def cuStreamEndCapture(self, stream: c_void_p, out: Out) -> None:
        its, out[0] = self.stream(stream), None
        capture = its.capture
        if capture is None:
            raise Refused("ILLEGAL_STATE")
        elsewhere = capture.thread != threading.get_ident()
        refuse(elsewhere and capture.mode != Mode.CU_STREAM_CAPTURE_MODE_RELAXED, "STREAM_CAPTURE_WRONG_THREAD")
        its.capture = None
        refuse(not capture.valid, "STREAM_CAPTURE_INVALIDATED")
        out[0] = self.new(capture.graph)

    # --- events ---

    def cuEventCreate(self, out: Out, flags: c_uint) -> None:
        out[0] = self.new(Event(timed=not flags & 2))

    def cuEventDestroy(self, event: c_void_p) -> None:
        self.remove(event, Event)

    def cuEventRecord(self, event: c_void_p, stream: c_void_p) -> None:
        its = self.resolve(event, Event)
        if self.usable(stream).capture:
            raise NotImplementedError("an event in a capture")
        its.seconds, its.stream = time.perf_counter(), self.stream(stream)
        its.copies = list(its.stream.copies)

    def cuEventSynchronize(self, event: c_void_p) -> None:
        its = self.resolve(event, Event)
        finish(its.stream, its.copies)

    def cuEventElapsedTime(self, milliseconds: POINTER(c_float), start: c_void_p, end: c_void_p) -> None:
        events = [self.resolve(event, Event) for event in (start, end)]
        times = [event.seconds for event in events if event.timed and event.seconds is not None]
        refuse(len(times) < 2, "INVALID_HANDLE")
        milliseconds[0] = 1e3 * (times[1] - times[0])

    # --- graphs ---

    def cuGraphClone(self, out: Out, graph: c_void_p) -> None:
        its = self.resolve(graph, Graph)
        copies = {handle: self.new(node) for handle, node in its.nodes.items()}
        nodes = {copies[handle]: node for handle, node in its.nodes.items()}
        out[0] = self.new(Graph(nodes, {(copies[a], copies[b]): data for (a, b), data in its.edges.items()}))

    def cuGraphDestroy(self, graph: c_void_p) -> None:
        for node in self.remove(graph, Graph).nodes:
            self.remove(node, Node)

    def cuGraphGetEdges(self, graph: c_void_p, before: Out, after: Out, data: POINTER(Edge), number: POINTER(c_size_t)) -> None:
        edges = list(self.resolve(graph, Graph).edges.items())
        if not before:
            refuse(bool(after) or bool(data))
            number[0] = len(edges)
            return
        room, edges = number[0], edges[: number[0]]
        refuse(not data and any(its != DEFAULT for _, its in edges), "LOSSY_QUERY")
        for i in range(room):
            (before[i], after[i]), its = edges[i] if i < len(edges) else ((None, None), DEFAULT)
            if data:
                data[i] = Edge(*its)
        number[0] = len(edges)

    def cuGraphAddDependencies(self, graph: c_void_p, before: Out, after: Out, data: POINTER(Edge), number: c_size_t) -> None:
        its = self.resolve(graph, Graph)
        for edge, its_data in _listed(before, after, data, number):
            refuse(edge in its.edges or not set(edge) <= its.nodes.keys())
            refuse(not _is_allowed(its_data, all(its.nodes[node].is_kernel for node in edge)))
            its.edges[edge] = its_data

    def cuGraphRemoveDependencies(self, graph: c_void_p, before: Out, after: Out, data: POINTER(Edge), number: c_size_t) -> None:
        its = self.resolve(graph, Graph)
        for edge, its_data in _listed(before, after, data, number):
            refuse(its.edges.get(edge) != its_data)
            del its.edges[edge]

    def cuGraphInstantiateWithFlags(self, out: Out, graph: c_void_p, flags: c_uint64) -> None:
        its = self.resolve(graph, Graph)
        before: dict[int, set[int]] = {node: set() for node in its.nodes}
        for first, second in its.edges:
            before[second].add(first)
        try:
            order = list(TopologicalSorter(before).static_order())
        except CycleError:
            raise Refused("INVALID_VALUE") from None
        early = {after for (_, after), data in its.edges.items() if data != DEFAULT}
        runs = [partial(its.nodes[node].run, overlaps=True) if node in early else its.nodes[node].run for node in order]
        out[0] = self.new(Launchable(runs))

    def cuGraphLaunch(self, launchable: c_void_p, stream: c_void_p) -> None:
        its = self.resolve(launchable, Launchable)
        if self.usable(stream).capture:
            raise NotImplementedError("a graph in a capture")
        for run in its.runs:
            run()

    def cuGraphExecDestroy(self, launchable: c_void_p) -> None:
        self.remove(launchable, Launchable)


def _listed(before: Any, after: Any, data: Any, number: int) -> list[tuple[tuple[int, int], bytes]]:
    return [((before[i], after[i]), bytes(data[i]) if data else DEFAULT) for i in range(number)]


def _is_allowed(edge: bytes, between_kernels: bool) -> bool:
    from_port, to_port, kind, *reserved = edge
    if to_port or any(reserved):
        return False
    return (kind == 0 and from_port == 0) or (kind == PROGRAMMATIC and from_port in (PROGRAMMATIC, LAUNCH_ORDER) and between_kernels)
