"""Many launches as one: a CUDA graph, captured from a stream while Python goes through the launches once.

A launch from Python takes some 10 microseconds, and a token of the 2B model 275 of them, 9 for each layer; at the speed of memory the
token takes 270. A graph's launches cost the device about 1.5 each, by what is published: nothing of this was measured here.
"""

from collections.abc import Callable
from typing import Any
from weakref import finalize

from numba import cuda

from .target import SIMULATED


def _checked(result: tuple) -> Any:
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA graph: {error.name}")
    return values[0] if values else None


def captured(stream: Any, run: Callable[[], None]) -> Callable[[], None]:
    """A function that does again what `run` launches on the stream, on the same memory.

    `run` must have been called before: capturing can neither compile nor allocate. The simulator has no graphs: there it is `run` itself.
    """
    if SIMULATED:
        return run
    from cuda.bindings import driver

    handle = driver.CUstream(int(stream.handle))
    with cuda.defer_cleanup():
        _checked(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            run()
        finally:
            graph = _checked(driver.cuStreamEndCapture(handle))
    launchable = _checked(driver.cuGraphInstantiate(graph, 0))
    _checked(driver.cuGraphDestroy(graph))

    def launch() -> None:
        _checked(driver.cuGraphLaunch(launchable, handle))

    finalize(launch, driver.cuGraphExecDestroy, launchable)
    return launch
