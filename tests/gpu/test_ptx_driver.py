"""The driver without a GPU: it refuses what CUDA's driver refuses, and reports everything that goes wrong in it."""

import threading
from ctypes import Array, addressof, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p

import pytest

names = pytest.importorskip("cuda.bindings.driver", reason="numba-cuda is not installed (extra `cuda`)")

from ptx.driver import Driver, LaunchConfig  # noqa: E402
from ptx.streams import LAUNCH_ORDER, PROGRAMMATIC, Edge  # noqa: E402

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
EARLY = (PROGRAMMATIC, 0, PROGRAMMATIC)  # from_port, to_port, type
CODE = b"""
.version 8.0
.target sm_90
.visible .entry _ZN3sum3addB2v1E(.param .u64 _ZN3sum3addB2v1E_param_0)
.maxntid 32, 1, 1
{
    .reg .b32 %r<3>; .reg .b64 %rd<2>;
    griddepcontrol.wait;
    ld.param.u64 %rd1, [_ZN3sum3addB2v1E_param_0];
    ld.global.u32 %r1, [%rd1];
    add.s32 %r2, %r1, 1;
    st.global.u32 [%rd1], %r2;
    ret;
}
.visible .entry peek(.param .u64 peek_param_0)
{
    .reg .b32 %r<3>; .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [peek_param_0];
    ld.global.u32 %r1, [%rd1];
    griddepcontrol.wait;
    ret;
}"""
ADD = b"_ZN3sum3addB2v1E"


class Api:
    """A driver as C sees it. `Api()(name, ...)` returns the name of a CUresult; `made` returns the handle or address that a call makes."""

    def __init__(self) -> None:
        self.driver = Driver()
        assert self("cuCtxPushCurrent", self.made("cuDevicePrimaryCtxRetain", 0)) == "SUCCESS"

    def __call__(self, name: str, *arguments: object) -> str:
        return names.CUresult(self.driver.entries[name](*arguments)).name.removeprefix("CUDA_").removeprefix("ERROR_")

    def made(self, name: str, *arguments: object, last: bool = False) -> int:
        out = c_uint64() if name == "cuMemAlloc" else c_void_p()
        assert self(name, *([*arguments, byref(out)] if last else [byref(out), *arguments])) == "SUCCESS"
        return out.value

    def kernel(self, name: bytes = ADD) -> int:
        self.library = self.made("cuLibraryLoadData", CODE, None, None, 0, None, None, 0)
        return self.made("cuLibraryGetKernel", self.library, name)

    def launch(self, kernel: int, address: int, stream: int = 0, threads: int = 1) -> str:
        config = LaunchConfig((1, 1, 1), (threads, 1, 1), 0, stream, None, 0)
        value = c_uint64(address)
        return self("cuLaunchKernelEx", byref(config), kernel, (c_void_p * 1)(addressof(value)), None)

    def word(self, address: int) -> int:
        out = c_int()
        assert self("cuMemcpyDtoH", addressof(out), address, 4) == "SUCCESS"
        return out.value

    def edges(self, graph: int) -> tuple[Array, Array, Array, int]:
        number = c_size_t()
        assert self("cuGraphGetEdges", graph, None, None, None, byref(number)) == "SUCCESS"
        n = number.value
        arrays = (c_void_p * n)(), (c_void_p * n)(), (Edge * n)()
        assert self("cuGraphGetEdges", graph, *arrays, byref(number)) == "SUCCESS"
        return *arrays, n


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def stream(api) -> int:
    return api.made("cuStreamCreate", 0)


@pytest.fixture
def word(api) -> int:
    """The address of a zero."""
    address = api.made("cuMemAlloc", 4)
    assert api("cuMemsetD8", address, 0, 4) == "SUCCESS"
    return address


@pytest.fixture
def graph(api, stream, word) -> int:
    """Three kernels one after another."""
    kernel = api.kernel()
    assert api("cuStreamBeginCapture", stream, RELAXED) == "SUCCESS"
    for _ in range(3):
        assert api.launch(kernel, word, stream) == "SUCCESS"
    return api.made("cuStreamEndCapture", stream, last=True)


# --- functions ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "is_there"),
    [("cuInit", 2000, 1), ("cuNothing", 2000, 0), ("cuGraphGetEdges", 10000, 0), ("cuGraphGetEdges", 12030, 1), ("cuInit", 13020, 0)],
)
def test_what_is_not_there_is_not_found(api, name, version, is_there):
    out, status = c_void_p(1), c_int(9)
    assert api("cuGetProcAddress", name.encode(), byref(out), version, 0, byref(status)) == ("SUCCESS" if is_there else "NOT_FOUND")
    assert (out.value is not None, status.value) == (is_there, 1 - is_there)


def test_errors_have_names(api):
    out = c_char_p()
    assert api("cuGetErrorName", 906, byref(out)) == "SUCCESS"
    assert out.value == b"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
    assert api("cuGetErrorName", 12345, byref(out)) == "INVALID_VALUE"


# --- memory ---------------------------------------------------------------------------------------------------------------------------


def test_what_was_allocated_shows_that_nobody_wrote_it(api):
    assert api.word(api.made("cuMemAlloc", 4)) == -1


def test_memory_that_is_not_there_is_refused_and_told(api, word, capsys):
    out = c_uint64()
    for name, arguments in (("cuMemcpyDtoH", (addressof(out), word, 8)), ("cuMemsetD8", (word - 1, 0, 4)), ("cuMemFree", (word + 1,))):
        assert api(name, *arguments) == "LAUNCH_FAILED"
    assert api("cuMemFree", word) == "SUCCESS"
    assert api("cuMemcpyDtoH", addressof(out), word, 4) == "LAUNCH_FAILED"
    assert [problem.partition(":")[0] for problem in api.driver.problems] == ["cuMemcpyDtoH", "cuMemsetD8", "cuMemFree", "cuMemcpyDtoH"]
    assert capsys.readouterr().err.count("Traceback") == 4


def test_threads_without_a_context_are_refused(api, word):
    results, kernel = list[str](), api.kernel()

    def calls() -> None:
        results.append(api("cuMemcpyDtoH", addressof(c_int()), word, 4))
        results.append(api("cuLaunchKernel", kernel, *[1] * 6, 0, 0, None, None))

    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    assert results == ["INVALID_CONTEXT"] * 2


def test_more_memory_than_there_is(api):
    assert api("cuMemAlloc", byref(c_uint64()), 1 << 40) == "OUT_OF_MEMORY"
    assert not api.driver.problems


# --- launches -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["event", "stream", "nothing"])
def test_a_copy_to_pinned_memory_is_there_once_the_host_has_waited(api, stream, word, wait):
    to, event = api.made("cuMemHostAlloc", 4, 0), api.made("cuEventCreate", 2)
    here, before = c_int.from_address(to), c_int.from_address(to).value
    assert api.launch(api.kernel(), word, stream) == "SUCCESS"
    assert api("cuMemcpyDtoHAsync", to, word, 4, stream) == "SUCCESS"
    assert api("cuEventRecord", event, stream) == "SUCCESS"
    assert api.launch(api.kernel(), word, stream) == "SUCCESS"  # after the copy
    assert api("cuMemcpyDtoHAsync", to, word, 4, stream) == "SUCCESS"
    assert here.value == before
    if wait != "nothing":
        assert api(f"cu{wait.title()}Synchronize", event if wait == "event" else stream) == "SUCCESS"
    now = api.word(word)
    assert here.value == {"event": now - 1, "stream": now, "nothing": before}[wait]
    assert api("cuMemFreeHost", to) == "SUCCESS"
    assert api("cuMemFreeHost", to) == "INVALID_VALUE"


def test_a_launch(api, word):
    assert api.launch(api.kernel(), word) == "SUCCESS"
    assert api.word(word) == 1


def test_launches_that_cannot_be(api, word):
    kernel = api.kernel()
    for threads in (0, 33):  # of 32 that the code allows
        assert api.launch(kernel, word, threads=threads) == "INVALID_VALUE"
    assert api("cuLibraryGetKernel", byref(c_void_p()), api.library, b"other") == "NOT_FOUND"
    assert api("cuLibraryUnload", api.library) == "SUCCESS"
    assert api.launch(kernel, word) == "INVALID_HANDLE"
    assert not api.driver.problems


def test_what_goes_wrong_in_a_kernel_is_told(api, word):
    assert api.launch(api.kernel(), word + 4) == "LAUNCH_FAILED"
    assert "add, threads [0]...: ld.global.u32" in api.driver.problems[0]


# --- captures -------------------------------------------------------------------------------------------------------------------------


def test_what_is_captured_does_not_run(api, stream, word, graph):
    assert api.word(word) == 0
    launchable = api.made("cuGraphInstantiateWithFlags", graph, 0)
    for expected in (3, 6):
        assert api("cuGraphLaunch", launchable, stream) == "SUCCESS"
        assert api.word(word) == expected


def test_a_graph_does_not_keep_code_or_memory_alive(api, stream, word, graph):
    launchable = api.made("cuGraphInstantiateWithFlags", graph, 0)
    assert api("cuMemFree", word) == "SUCCESS"
    assert api("cuGraphLaunch", launchable, stream) == "LAUNCH_FAILED"
    assert api("cuLibraryUnload", api.library) == "SUCCESS"
    assert api("cuGraphLaunch", launchable, stream) == "LAUNCH_FAILED"
    assert ["unloaded" in problem for problem in api.driver.problems] == [False, True]


@pytest.mark.parametrize(
    ("mode", "call", "result"),
    [
        (RELAXED, ("cuStreamSynchronize", "stream"), "STREAM_CAPTURE_UNSUPPORTED"),
        (RELAXED, ("cuCtxSynchronize",), "STREAM_CAPTURE_UNSUPPORTED"),
        (RELAXED, ("cuMemsetD8", "word", 0, 4), "STREAM_CAPTURE_IMPLICIT"),
        (RELAXED, ("cuStreamSynchronize", 0), "STREAM_CAPTURE_IMPLICIT"),
        (GLOBAL, ("cuMemFree", "word"), "STREAM_CAPTURE_UNSUPPORTED"),
        (THREAD_LOCAL, ("cuMemFree", "word"), "STREAM_CAPTURE_UNSUPPORTED"),
    ],
)
def test_what_cannot_be_captured_is_refused_and_ends_the_capture(api, stream, word, mode, call, result):
    name, *arguments = ({"stream": stream, "word": word}.get(part, part) for part in call)
    out = c_void_p()
    assert api("cuStreamBeginCapture", stream, mode) == "SUCCESS"
    assert api(name, *arguments) == result
    assert api("cuMemsetD8Async", word, 0, 4, stream) == "STREAM_CAPTURE_INVALIDATED"
    assert api("cuStreamEndCapture", stream, byref(out)) == "STREAM_CAPTURE_INVALIDATED"
    assert out.value is None
    assert api(name, *arguments) == "SUCCESS"


def test_what_may_be_done_while_a_stream_captures(api, stream, word):
    other, apart = api.made("cuStreamCreate", 0), api.made("cuStreamCreate", 1)  # which does not wait for the legacy stream
    assert api("cuStreamBeginCapture", stream, RELAXED) == "SUCCESS"
    assert api("cuMemFree", api.made("cuMemAlloc", 4)) == "SUCCESS"
    assert api("cuMemsetD8Async", word, 0, 4, other) == "SUCCESS"
    assert api("cuStreamSynchronize", other) == "SUCCESS"
    api.made("cuStreamEndCapture", stream, last=True)
    assert api("cuStreamBeginCapture", apart, RELAXED) == "SUCCESS"
    assert api("cuMemsetD8", word, 0, 4) == "SUCCESS"
    api.made("cuStreamEndCapture", apart, last=True)


def test_captures_begin_and_end_once(api, stream):
    out, results = c_void_p(), list[str]()
    assert api("cuStreamBeginCapture", 0, RELAXED) == "STREAM_CAPTURE_UNSUPPORTED"
    assert api("cuStreamEndCapture", stream, byref(out)) == "ILLEGAL_STATE"
    assert api("cuStreamBeginCapture", stream, GLOBAL) == "SUCCESS"
    assert api("cuStreamBeginCapture", stream, GLOBAL) == "ILLEGAL_STATE"
    thread = threading.Thread(target=lambda: results.append(api("cuStreamEndCapture", stream, byref(out))))
    thread.start()
    thread.join()
    assert results == ["STREAM_CAPTURE_WRONG_THREAD"]
    assert api("cuStreamEndCapture", stream, byref(out)) == "SUCCESS"


# --- edges ----------------------------------------------------------------------------------------------------------------------------


def test_captured_launches_follow_each_other(api, graph):
    before, after, data, n = api.edges(graph)
    assert n == 2
    assert after[0] == before[1]
    assert not any(map(any, data))


def test_edges_that_end_early(api, stream, word, graph):
    copy = api.made("cuGraphClone", graph)
    before, after, _, n = api.edges(copy)
    assert not set(before) & set(api.edges(graph)[0])
    assert api("cuGraphRemoveDependencies", copy, before, after, None, n) == "SUCCESS"
    early = (Edge * n)(Edge(*EARLY), Edge(LAUNCH_ORDER, 0, PROGRAMMATIC))
    assert api("cuGraphAddDependencies", copy, before, after, early, n) == "SUCCESS"
    assert api("cuGraphGetEdges", copy, before, after, None, byref(c_size_t(n))) == "LOSSY_QUERY"
    assert api("cuGraphRemoveDependencies", copy, before, after, None, n) == "INVALID_VALUE"  # these edges are others
    assert bytes(api.edges(copy)[2]) == bytes(early)
    assert not any(bytes(api.edges(graph)[2]))
    assert api("cuGraphDestroy", graph) == "SUCCESS"
    assert api("cuGraphLaunch", api.made("cuGraphInstantiateWithFlags", copy, 0), stream) == "SUCCESS"
    assert api.word(word) == 3


@pytest.mark.parametrize(("edge", "result"), [((0, 0, 0), "SUCCESS"), (EARLY, "LAUNCH_FAILED")])
def test_kernels_that_begin_early_wait_before_they_read(api, stream, word, edge, result):
    assert api("cuStreamBeginCapture", stream, RELAXED) == "SUCCESS"
    for name in (ADD, b"peek"):
        assert api.launch(api.kernel(name), word, stream) == "SUCCESS"
    graph = api.made("cuStreamEndCapture", stream, last=True)
    before, after, _, n = api.edges(graph)
    assert api("cuGraphRemoveDependencies", graph, before, after, None, n) == "SUCCESS"
    assert api("cuGraphAddDependencies", graph, before, after, (Edge * n)(Edge(*edge)), n) == "SUCCESS"
    assert api("cuGraphLaunch", api.made("cuGraphInstantiateWithFlags", graph, 0), stream) == result
    assert all("read before the kernels that write it" in problem for problem in api.driver.problems)


@pytest.mark.parametrize("edge", [(PROGRAMMATIC, 0, 0), (0, 0, PROGRAMMATIC), (3, 0, PROGRAMMATIC), (0, 1, 0), (0, 0, 2), (*EARLY, 1)])
def test_edges_that_cannot_be(api, graph, edge):
    before, after, _, n = api.edges(graph)
    assert api("cuGraphRemoveDependencies", graph, before, after, None, n) == "SUCCESS"
    assert api("cuGraphAddDependencies", graph, before, after, (Edge * n)(Edge(*edge)), n) == "INVALID_VALUE"


def test_only_kernels_end_early(api, stream, word):
    assert api("cuStreamBeginCapture", stream, RELAXED) == "SUCCESS"
    for _ in range(2):
        assert api("cuMemsetD8Async", word, 0, 4, stream) == "SUCCESS"
    graph = api.made("cuStreamEndCapture", stream, last=True)
    before, after, _, n = api.edges(graph)
    assert api("cuGraphRemoveDependencies", graph, before, after, None, n) == "SUCCESS"
    assert api("cuGraphAddDependencies", graph, before, after, (Edge * n)(Edge(*EARLY)), n) == "INVALID_VALUE"


def test_edges_are_there_once_and_go_nowhere_in_circles(api, graph):
    before, after, _, n = api.edges(graph)
    assert api("cuGraphAddDependencies", graph, before, after, None, n) == "INVALID_VALUE"
    assert api("cuGraphAddDependencies", graph, (c_void_p * 1)(after[n - 1]), (c_void_p * 1)(before[0]), None, 1) == "SUCCESS"
    assert api("cuGraphInstantiateWithFlags", byref(c_void_p()), graph, 0) == "INVALID_VALUE"


def test_a_graph_runs_in_the_order_of_its_edges(api, stream, word):
    """The other way round than it was captured."""
    assert api("cuStreamBeginCapture", stream, RELAXED) == "SUCCESS"
    for byte in range(4):
        assert api("cuMemsetD8Async", word, byte, 4, stream) == "SUCCESS"
    graph = api.made("cuStreamEndCapture", stream, last=True)
    before, after, _, n = api.edges(graph)
    assert all(x == y for x, y in zip(after[: n - 1], before[1:], strict=True))
    assert api("cuGraphRemoveDependencies", graph, before, after, None, n) == "SUCCESS"
    assert api("cuGraphAddDependencies", graph, after, before, None, n) == "SUCCESS"
    assert api("cuGraphLaunch", api.made("cuGraphInstantiateWithFlags", graph, 0), stream) == "SUCCESS"
    assert api.word(word) == 0
