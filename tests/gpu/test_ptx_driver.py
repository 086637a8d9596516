"""The driver without a GPU reports everything that goes wrong in it, where callers see no more than a code."""

from ctypes import addressof, byref, c_int, c_uint64, c_void_p

import pytest

names = pytest.importorskip("cuda.bindings.driver", reason="numba-cuda is not installed (extra `cuda`)")

from ptx.driver import Driver  # noqa: E402


def test_memory_that_is_not_there_is_refused_and_told(capsys):
    driver, context, address, zero = Driver(), c_void_p(), c_uint64(), c_int()

    def call(name, *arguments):
        return names.CUresult(driver.entries[name](*arguments)).name.removeprefix("CUDA_").removeprefix("ERROR_")

    def write(at):
        return call("cuMemcpyHtoDAsync", at, addressof(zero), 4, 0)

    assert call("cuDevicePrimaryCtxRetain", byref(context), 0) == call("cuCtxPushCurrent", context) == "SUCCESS"
    assert call("cuMemAlloc", byref(address), 4) == write(address.value) == "SUCCESS"
    word = address.value
    codes = [call("cuMemFree", word + 1), write(word - 1), call("cuMemFree", word), write(word)]
    assert codes == ["LAUNCH_FAILED", "LAUNCH_FAILED", "SUCCESS", "LAUNCH_FAILED"]
    assert [problem.partition(":")[0] for problem in driver.problems] == ["cuMemFree", "cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync"]
    assert capsys.readouterr().err.count("Traceback") == 3
    assert call("cuMemAlloc", byref(c_uint64()), 1 << 40) == "OUT_OF_MEMORY"
