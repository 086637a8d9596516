"""The driver without a GPU: it refuses what CUDA's driver refuses, and reports everything that goes wrong in it."""

import threading
from ctypes import addressof, byref, c_int, c_uint64, c_void_p

import pytest

names = pytest.importorskip("cuda.bindings.driver", reason="numba-cuda is not installed (extra `cuda`)")

from ptx.driver import Driver, LaunchConfig  # noqa: E402

ADD = b"_ZN3sum3addB2v1E"
CODE = b"""
.version 8.0
.target sm_90
.visible .entry _ZN3sum3addB2v1E(.param .u64 _ZN3sum3addB2v1E_param_0)
.maxntid 32, 1, 1
{
    .reg .b32 %r<3>; .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [_ZN3sum3addB2v1E_param_0];
    ld.global.u32 %r1, [%rd1];
    add.s32 %r2, %r1, 1;
    st.global.u32 [%rd1], %r2;
    ret;
}"""


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

    def kernel(self) -> int:
        self.library = self.made("cuLibraryLoadData", CODE, None, None, 0, None, None, 0)
        return self.made("cuLibraryGetKernel", self.library, ADD)

    def launch(self, kernel: int, address: int, stream: int = 0, threads: int = 1) -> str:
        config = LaunchConfig((1, 1, 1), (threads, 1, 1), 0, stream, None, 0)
        value = c_uint64(address)
        return self("cuLaunchKernelEx", byref(config), kernel, (c_void_p * 1)(addressof(value)), None)

    def write(self, address: int, stream: int = 0) -> str:
        """Writes a zero."""
        return self("cuMemcpyHtoDAsync", address, addressof(c_int()), 4, stream)

    def word(self, address: int) -> int:
        out = c_int()
        assert self("cuMemcpyDtoHAsync", addressof(out), address, 4, 0) == "SUCCESS"
        return out.value


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def word(api) -> int:
    """The address of a zero."""
    address = api.made("cuMemAlloc", 4)
    assert api.word(address) == -1  # nobody wrote it
    assert api.write(address) == "SUCCESS"
    return address


def test_memory_that_is_not_there_is_refused_and_told(api, word, capsys):
    assert api("cuMemFree", word + 1) == "LAUNCH_FAILED"
    assert api.write(word - 1) == "LAUNCH_FAILED"
    assert api("cuMemFree", word) == "SUCCESS"
    assert api.write(word) == "LAUNCH_FAILED"
    assert [problem.partition(":")[0] for problem in api.driver.problems] == ["cuMemFree", "cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync"]
    assert capsys.readouterr().err.count("Traceback") == 3
    assert api("cuMemAlloc", byref(c_uint64()), 1 << 40) == "OUT_OF_MEMORY"


def test_threads_without_a_context_are_refused(api, word):
    results, kernel = list[str](), api.kernel()

    def calls() -> None:
        results.extend([api.write(word), api.launch(kernel, word)])

    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    assert results == ["INVALID_CONTEXT"] * 2


def test_code_that_is_unloaded_is_not_launched(api, word):
    kernel = api.kernel()
    assert api.launch(kernel, word) == "SUCCESS"
    assert api("cuLibraryUnload", api.library) == "SUCCESS"
    assert api.launch(kernel, word) == "INVALID_HANDLE"
