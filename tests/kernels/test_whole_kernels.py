"""Functions that are compiled as one: only the one that Python calls becomes machine code, and Python can call each."""

import gc

import numba
import numpy as np
import pytest
from numba.core import errors
from numba.core.registry import cpu_target

from bitnet_np.kernels.cache.whole_kernels import _Part
from bitnet_np.kernels.launching import inlined, serial


@serial
def inner(x, limit):
    if x > limit:
        raise ValueError
    return np.sqrt(x) + 1


@inlined
def middle(x, limit):
    return inner(x, limit) * 2


@serial
def outer(x, limit):
    return middle(x, limit) - 1


@serial
def only_a_part(x):
    raise ValueError("no", x)


@serial
def refuse(x):
    only_a_part(x)


@serial
def wrong(x):
    return inner(x, "no number")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A fresh cache, so that each test compiles what it calls."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))


def anew(kernel):
    """The kernel as a process that starts now has it, with parts as they are."""
    return serial(kernel.py_func)


def test_only_what_python_calls_becomes_machine_code():
    kernel, before = anew(outer), len(inner.overloads)
    assert kernel(4.0, 9.0) == 5
    (result,) = kernel.overloads.values()
    assert result.library.get_pointer_to_function(result.fndesc.llvm_cpython_wrapper_name) != 0
    assert len(inner.overloads) == before
    (part,) = (part for part in inner._parts.values() if part.signature.args == result.signature.args)
    assert type(part.library) is _Part


def test_a_part_can_be_called_by_itself_before_and_after():
    assert anew(inner)(4.0, 9.0) == 3
    assert outer(4.0, 9.0) == 5
    assert inner(4.0, 9.0) == 3
    assert inner(np.float32(4), 9.0) == 3


def test_a_part_raises_what_it_raises():
    """The number is put into the exception by way of an environment, which only the whole kernel has in memory."""
    first, second = anew(refuse), anew(refuse)
    for kernel in (first, second):
        with pytest.raises(ValueError, match=r"'no', 16\.0"):
            kernel(16.0)
    assert second.stats.cache_hits.total() == 1


def test_kernels_of_others_can_call_ours():
    @numba.njit
    def theirs(x):
        return outer(x, 100.0) + inner(x, 100.0)

    assert theirs(9.0) == 7 + 4
    assert anew(outer)(9.0, 100.0) == 7


def test_a_failure_leaves_the_compiler_as_it_was():
    generator = cpu_target.target_context.codegen()
    with pytest.raises(errors.TypingError):
        wrong(1.0)
    assert "_library_class" not in vars(generator)
    assert gc.isenabled()
    gc.disable()
    try:
        anew(outer)(4, 9)
        assert not gc.isenabled()
    finally:
        gc.enable()
