"""The private parts of Numba: this version has all of them, each that is gone is named, and no other is used."""

import ast
import re
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest
from child import run_python

import bitnet_np
from bitnet_np.kernels.cache import whole_kernels
from bitnet_np.kernels.cache.private_parts import COMPILER, gone

PARTS = [*COMPILER.split("\n")[1:-1], *Path(__file__).with_name("private_parts.txt").read_text("utf-8").splitlines()]
PUBLIC = {"numba", "numba.extending"}  # documented for users and extensions; numba.cuda is of a package with its own bound


@pytest.mark.parametrize("part", PARTS)
def test_this_version_has_it_and_one_without_is_found_out(part, monkeypatch):
    assert gone.__wrapped__(part) == []
    module, name = re.match(r"([\w.]+): ([\w.]+)", part).groups()
    *outer, last = name.split(".")
    owner = reduce(getattr, outer, import_module(module))
    owner = next(kind for kind in [*getattr(owner, "__mro__", ()), owner] if last in vars(kind))
    if " uses " in part or "(" in part:
        with monkeypatch.context() as patch:
            patch.setattr(owner, last, lambda other: other)
            assert gone.__wrapped__(part) == [part]
    monkeypatch.delattr(owner, last)
    assert gone.__wrapped__(part) == [part]


def modules():
    """The syntax of each module of the package that has to do with Numba for the CPU."""
    for path in Path(bitnet_np.__file__).parent.rglob("*.py"):
        if "numba" in (text := path.read_text("utf-8")) and "cuda" not in path.parts and "gpu" not in path.parts:
            yield ast.parse(text)


def used():
    """Private names that modules import from Numba, take of a module that they import, and methods of its contexts that they call."""
    for tree in modules():
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module.startswith("numba") and node.module not in PUBLIC:
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        submodules = {name: path for name, path in names.items() if path in PRIVATE_MODULES}
        yield from (path.rpartition(".")[::2] for name, path in names.items() if name not in submodules)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                of = getattr(node.value, "id", getattr(node.value, "attr", ""))
                if of in submodules:
                    yield submodules[of], node.attr
                elif of == "context" and node.attr not in ("call_conv", "typing_context"):
                    yield "numba.core.base", f"BaseContext.{node.attr}"


PRIVATE_MODULES = {line.partition(":")[0] for line in PARTS} | {"numba.core.config"}


def test_what_is_used_is_in_the_list():
    listed = {tuple(re.match(r"([\w.]+): ([\w.]+)", part).groups()) for part in PARTS}
    listed |= {(module, name.partition(".")[0]) for module, name in listed}  # a part of a class names it
    found = {use for use in used() if use[0] != "numba.core.config"}  # as numba.config, which is public
    assert len(found) > 30
    assert found - listed == set()


def test_methods_that_ours_take_the_place_of_are_in_the_list():
    listed = {name for part in PARTS for name in re.findall(r"\.(\w+)[(\s]|\.(\w+)$|^(\w+)", part) for name in name}
    for ours in (whole_kernels._Part, whole_kernels._Compiler, whole_kernels.Function):
        for name in {name for name in vars(ours) if not name.startswith("__")} - {"_abc_impl"}:  # each Python adds names to classes
            assert name in listed or not any(hasattr(base, name) for base in ours.__bases__), name


WITHOUT = """
import warnings
from numba.core.compiler import CompileResult
del CompileResult._reduce
import numpy as np
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from bitnet_np.kernels.rows import exponential
    print(exponential(np.ones(1, np.float32))[0])
print(sum("has no numba.core.compiler: CompileResult._reduce(self), so kernels" in str(warning.message) for warning in seen))
"""


def test_without_one_each_process_compiles_and_says_so_once(tmp_path):
    value, warned = run_python(WITHOUT, NUMBA_CACHE_DIR=str(tmp_path / "cache")).split()
    assert (value[:5], warned) == ("2.718", "1")
    assert not (tmp_path / "cache").exists()
