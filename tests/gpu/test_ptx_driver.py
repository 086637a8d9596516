"""The driver without a GPU reports everything that goes wrong in it, where callers see no more than a code."""

from ctypes import addressof, byref, c_int, c_uint64, c_void_p

import pytest

names = pytest.importorskip("cuda.bindings.driver", reason="numba-cuda is not installed (extra `cuda`)")

from ptx.driver import Driver  # noqa: E402


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
