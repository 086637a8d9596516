"""Functions that are compiled as one: only the one that Python calls becomes machine code, and Python can call each."""

import gc
import signal
import threading

import numba
import numpy as np
import pytest
from numba.core import errors
from numba.core.compiler_lock import global_compiler_lock
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


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows has no signals for a thread")
def test_an_interrupt_leaves_nothing_half_compiled(monkeypatch):
    """It ends the wait for a compilation, which goes on. Half of one leaves Numba in a state in which later ones fail."""
    interrupted = threading.Event()

    def finalize(part):
        if not interrupted.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            interrupted.wait()
        usual(part)

    usual, kernel = _Part._finalize_final_module, anew(outer)
    monkeypatch.setattr(_Part, "_finalize_final_module", finalize)
    for part in (inner, middle):
        monkeypatch.setattr(part, "_parts", {})
    with pytest.raises(KeyboardInterrupt):
        kernel(4.0, 9.0)
    assert not kernel.overloads
    interrupted.set()
    with global_compiler_lock:
        assert kernel.overloads
    assert kernel(4.0, 9.0) == 5


def test_a_compilation_ends_where_no_thread_can_be_made(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert anew(outer)(4.0, 9.0) == 5


def test_who_holds_the_compilers_lock_compiles_for_itself():
    with global_compiler_lock:
        assert anew(outer)(4.0, 9.0) == 5
