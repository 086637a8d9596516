"""Compiling a kernel and the functions that it calls as one.

Numba makes a library of each function. It optimises each library separately, makes machine code of it, and links it into the library of
every caller, where all of it is optimised again. Our kernels call functions that call others, five deep. Here, only the library of the
function that Python calls is optimised and becomes machine code. The others are its parts: they are linked into it unoptimised. Compiling
takes less than half the time, and the code is as fast.

This needs private parts of Numba, so disk_cache.py imports it only if they are there (private_parts.py).
"""

import gc
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from numba.core import bytecode, codegen, compiler, errors, typing
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
from numba.core.registry import CPUDispatcher

# Numba names a function by its types and a count of what the process has compiled, and numbers record types in the order in which the
# process meets them. A name is thus unique in one process alone, and the linker takes one function for another if two processes have given
# them one name and a third reads both from disk. Random numbers in place of the count make names unique everywhere.
bytecode.FunctionIdentity._unique_ids = iter(partial(secrets.randbits, 63), None)

_compiled_whole = ""  # the qualified name of the function being compiled, which is its library's; for holders of the compiler's lock


class _Part(codegen.JITCodeLibrary):
    """A library that is linked into others and never runs alone."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Any:
        return _NoEnvironments()


class _NoEnvironments:
    """In place of a code generator: a part has no place in memory for its environment. The whole kernel has one."""

    def set_env(self, name: str, environment: Any) -> None:
        pass


class _Compiler(_FunctionCompiler):
    """As Numba's, but what it compiles is a whole kernel, with an entry for calls from Python, or a part, with none."""

    is_part = False

    def compile(self, args: Any, return_type: Any) -> Any:
        if self.is_part:
            return super().compile(args, return_type)
        with _compiling(self.py_func.__qualname__, self.targetdescr.target_context.codegen()):
            return super().compile(args, return_type)

    def _customize_flags(self, flags: Any) -> Any:
        flags.no_cpython_wrapper = self.is_part
        flags.no_cfunc_wrapper = True
        return flags


class Function(CPUDispatcher):
    """A function that Numba compiles separately for calls from Python, and as a part of the functions that call it."""

    def __init__(self, py_func: Any, locals: Any = None, targetoptions: Any = None):
        super().__init__(py_func, locals, targetoptions or {})
        arguments = (py_func, self.targetdescr, self.targetoptions, self.locals, compiler.Compiler)
        self._compiler, self._part_compiler = _Compiler(*arguments), _Compiler(*arguments)
        self._part_compiler.is_part = True
        self._parts: dict[Any, Any] = {}  # types of arguments -> compile result

    def compile(self, sig: Any) -> Any:
        """As Numba's, where no signal's handler interrupts it: no kernel could be compiled after a compilation that was left half done."""
        interruptible = threading.current_thread() is threading.main_thread() and not global_compiler_lock.is_locked()
        return _on_a_thread(super().compile, sig) if interruptible else super().compile(sig)

    def add_overload(self, result: Any) -> None:
        for environment in result._find_referenced_environments():  # including those of its parts
            self.targetctx.codegen().set_env(environment.env_name, environment)
        super().add_overload(result)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """The types of a call by a function that is being compiled."""
        if not _compiled_whole:  # it is not one of ours
            return super().get_call_template(args, kws)
        pysig, args = self._compiler.fold_argument_types(args, kws)
        if args not in self._parts:
            try:
                self._parts[args] = self._part_compiler.compile(args, None)
            except errors.ForceLiteralArg as error:
                raise error.bind_fold_arguments(lambda args, kws: self._compiler.fold_argument_types(args, kws)[1]) from None
        name, signatures = self.py_func.__name__, [result.signature for result in self._parts.values()]
        return typing.make_concrete_template(f"CallTemplate({name})", key=name, signatures=signatures), pysig, args, {}

    def get_overload(self, sig: Any) -> Any:
        """What stands for the compiled function in the code that calls it."""
        if not _compiled_whole:
            return super().get_overload(sig)
        return self._parts[tuple(sig)].entry_point

    def get_compile_result(self, sig: Any) -> Any:
        """The part that the code being compiled calls (fast/team.py)."""
        return self._parts[sig.args] if _compiled_whole else super().get_compile_result(sig)


def _on_a_thread(function: Callable[[Any], Any], argument: Any) -> Any:
    """function(argument), computed by a thread made for it, which ends it even if an interrupt ends the wait for it."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(argument))
        except BaseException as error:  # the caller's
            future.set_exception(error)

    try:
        threading.Thread(target=run).start()
    except RuntimeError:  # the system has no more threads, or the interpreter ends
        run()
    return future.result()


@contextmanager
def _compiling(name: str, generator: Any) -> Iterator[None]:
    """Let every library that is made be a part, but the one of this name. The caller holds the compiler's lock.

    The garbage collector is off: the compiler's many small objects would make it run constantly and take a tenth of the time.
    """
    global _compiled_whole
    usual, collects = generator._library_class, gc.isenabled()
    _compiled_whole, generator._library_class = name, lambda codegen, own: (usual if own == name else _Part)(codegen, own)
    gc.disable()
    try:
        yield
    finally:
        _compiled_whole = ""
        del generator._library_class
        if collects:
            gc.enable()
