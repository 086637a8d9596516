"""The private parts of Numba that kernels on disk need, and whether they are there: without them, each process compiles for itself.

A line names a part by its module and its name there. After the name come the parameters of a function that we call or replace, or the
names that it `uses`: our replacement of a name has no effect if the function no longer uses it. No version is checked, so the upper bound
of Numba in pyproject.toml moves as soon as a newer version has them all.

tests/kernels/private_parts.txt has those that compiling needs at all. A test finds every use of a part that is in neither list.
"""

import inspect
from functools import lru_cache, reduce
from importlib import import_module
from typing import Any

COMPILER = """
numba.core.bytecode: FunctionIdentity.from_function uses _unique_ids
numba.core.codegen: CPUCodeLibrary.finalize uses _optimize_final_module _finalize_final_module
numba.core.codegen: Codegen.create_library uses _library_class
numba.core.codegen: JITCodeLibrary._finalize_dynamic_globals(self)
numba.core.codegen: JITCodeLibrary._finalize_final_module(self)
numba.core.codegen: JITCodeLibrary._finalized
numba.core.codegen: JITCodeLibrary._optimize_final_module(self)
numba.core.codegen: JITCodeLibrary.codegen
numba.core.codegen: JITCodeLibrary.get_pointer_to_function(self, name)
numba.core.codegen: JITCodeLibrary.has_dynamic_globals
numba.core.codegen: JITCPUCodegen.magic_tuple(self)
numba.core.codegen: JITCPUCodegen.set_env(self, env_name, env)
numba.core.compiler: Compiler
numba.core.compiler: CompileResult._find_referenced_environments(self)
numba.core.compiler: CompileResult._rebuild(target_context, libdata, fndesc, env, signature, objectmode, lifted, typeann, reload_init, \
referenced_envs)
numba.core.compiler: CompileResult._reduce(self)
numba.core.compiler: CompileResult.codegen
numba.core.compiler: CompileResult.lifted
numba.core.compiler: Flags.no_cfunc_wrapper
numba.core.compiler: Flags.no_cpython_wrapper
numba.core.compiler_lock: _CompilerLock.is_locked(self)
numba.core.compiler_lock: global_compiler_lock
numba.core.dispatcher: Dispatcher.compile uses _cache load_overload save_overload _compiler add_overload
numba.core.dispatcher: _FunctionCompiler(py_func, targetdescr, targetoptions, locals, pipeline_class)
numba.core.dispatcher: _FunctionCompiler._compile_core uses _customize_flags
numba.core.dispatcher: _FunctionCompiler._customize_flags(self, flags)
numba.core.dispatcher: _FunctionCompiler.compile(self, args, return_type)
numba.core.dispatcher: _FunctionCompiler.fold_argument_types(self, args, kws)
numba.core.errors: ForceLiteralArg.bind_fold_arguments(self, fold_arguments)
numba.core.funcdesc: FunctionDescriptor.modname
numba.core.funcdesc: FunctionDescriptor.qualname
numba.core.registry: CPUDispatcher(py_func, locals, targetoptions, pipeline_class)
numba.core.registry: CPUDispatcher.add_overload(self, cres)
numba.core.registry: CPUDispatcher.get_call_template(self, args, kws)
numba.core.registry: CPUDispatcher.get_overload(self, sig)
numba.core.registry: CPUDispatcher.targetdescr
numba.core.serialize: dumps(obj)
numba.core.sigutils: normalize_signature(sig)
numba.core.types: Dispatcher.get_call_type uses get_call_template
numba.core.types: Dispatcher.get_overload uses get_overload
numba.core.typing: make_concrete_template(name, key, signatures)
"""


@lru_cache
def gone(parts: str = COMPILER) -> list[str]:
    """Those of the parts that this version of Numba does not have, as they stand in the list."""
    return [part for part in parts.strip().splitlines() if not _is_there(part)]


def _is_there(part: str) -> bool:
    path, _, uses = part.partition(" uses ")
    path, _, parameters = path.rstrip(")").partition("(")
    module, _, name = path.partition(": ")
    try:
        found: Any = reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError):
        return False
    if uses:
        return set(uses.split()) <= set(found.__code__.co_names)
    return "(" not in part or ", ".join(inspect.signature(found).parameters) == parameters
