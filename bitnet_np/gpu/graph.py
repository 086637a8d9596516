"""Many launches as one: a CUDA graph, captured from a stream while Python goes through the launches once.

A launch from Python takes some 30 microseconds of the host with the work around it, and a token of the 2B model takes 155 launches, 5 for
each layer; at the speed of memory the whole token takes 270 microseconds. A launch in a graph costs the time from the end of the kernel
before it to its own first useful number: 1.5 to 3 microseconds by published numbers. Here launches overlap (programmatic dependent launch,
compute capability 9.0): the blocks of a kernel start while the kernel before still runs, ask for their weights, and only then wait for its
results. None of these times was measured on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from numba import cuda

from .arrays import checked


@dataclass(frozen=True, eq=False)
class Graph:
    launch: Callable[[], None]
    overlapped: bool
    """Whether a kernel begins before the one before it has ended."""


def captured(stream: Any, run: Callable[[], None], overlap: bool = True) -> Graph:
    """A graph of the launches of `run` on the stream, for the same memory. Every kernel in it must call `await_previous`.

    `run` must have been called before: capturing can neither compile nor allocate. Launches overlap where the device and the driver can.
    Raises RuntimeError with the driver's error.
    """
    from cuda.bindings import driver

    handle = driver.CUstream(int(stream.handle))
    with cuda.defer_cleanup():
        checked(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            run()
        finally:
            graph = checked(driver.cuStreamEndCapture(handle))
    launchable = _overlapping(driver, graph) if overlap else None
    overlapped = launchable is not None
    launchable = launchable or checked(driver.cuGraphInstantiate(graph, 0))
    checked(driver.cuGraphDestroy(graph))

    def launch() -> None:
        checked(driver.cuGraphLaunch(launchable, handle))

    finalize(launch, driver.cuGraphExecDestroy, launchable)
    return Graph(launch, overlapped)


def _overlapping(driver: Any, graph: Any) -> Any:
    """A copy of the graph, instantiated, in which a kernel lets the next one begin early; None if the driver cannot make it."""
    copy = checked(driver.cuGraphClone(graph))
    try:
        *_, count = checked(driver.cuGraphGetEdges(copy))
        before, after, _, _ = checked(driver.cuGraphGetEdges(copy, count))
        early = driver.CUgraphEdgeData()
        early.type = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        early.from_port = int(driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC)
        checked(driver.cuGraphRemoveDependencies(copy, before, after, None, count))
        checked(driver.cuGraphAddDependencies(copy, before, after, [early] * count, count))
        return checked(driver.cuGraphInstantiate(copy, 0))
    except RuntimeError:
        return None
    finally:
        driver.cuGraphDestroy(copy)
