"""No address outlives its array: kernels take addresses of parameters alone (bitnet_np/kernels/fast/simd.py), which callers hold."""

import ast
from pathlib import Path

import pytest

from bitnet_np import kernels

ROOT = Path(kernels.__file__).parent
COMPILED = {"serial", "inlined", "parallel"}  # functions of their own; Numba puts a `rule` into its caller before it counts references
GIVE_ADDRESSES = {"pointer_to", "address_of", "unit_in", "configure"}
READ_DATA = {"fast/emit.py", "fast/simd.py", "fast/amx.py"}  # build the code that takes an array's data: nothing else may
HELD_BY_PYTHON = {"launching.py", "recording.py", "workspace.py"}  # addresses of arrays that an object or a module keeps


def name_of(node):
    """The name of a variable, or of that which an attribute or an element belongs to."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def misuses(text, file):
    """Lines of a module that take an address in another way."""
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    allowed = set()
    for function in functions:
        if COMPILED & {name_of(decorator) for decorator in function.decorator_list}:
            assigned = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            parameters = {argument.arg for argument in function.args.args} - assigned
            allowed |= {node for node in calls(function) if name_of(node.args[0]) in parameters}
            yield from (node.lineno for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr == "ctypes")
    yield from (node.lineno for node in calls(tree) if node not in allowed)
    for attribute, files in (("ctypes", HELD_BY_PYTHON), ("make_array", READ_DATA)):
        if file not in files:
            yield from (node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == attribute)


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and name_of(node.func) in GIVE_ADDRESSES]


def test_kernels_take_addresses_of_parameters_alone():
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if "cuda" not in path.parts]
    assert {"ternary_product.py", "ggml/products.py", *READ_DATA, *HELD_BY_PYTHON} < set(files)
    assert {file: lines for file in files if (lines := sorted(misuses((ROOT / file).read_text("utf-8"), file)))} == {}


@pytest.mark.parametrize(
    "body",
    [
        "room = np.empty(9)\n    return address_of(room)",
        "return address_of(x.view(np.int32))",
        "x = x[1:]\n    return pointer_to(x)",
        "for x in y:\n        pointer_to(x)",
        "(x, z) = y\n    return pointer_to(x)",
        "return np.int64(x.ctypes.data)",
        "unit = configure(x.copy(), 1, 2)",
    ],
)
def test_other_ways_are_seen(body):
    assert list(misuses(f"@serial\ndef f(x, y):\n    {body}\n", "other.py"))


def test_a_rule_holds_no_array():
    text = "@{}\ndef f(x):\n    return pointer_to(x.data)\n"
    assert list(misuses(text.format("rule"), "other.py")) == [3]
    assert list(misuses(text.format("inlined"), "other.py")) == []
