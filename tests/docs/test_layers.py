"""The layer map of CONTRIBUTING.md is the truth: every room stands on it, no import goes from a room to a later one, and none outgrows its
budget of lines of code."""

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter

import pages
import pytest
from imports import MODULES, PACKAGE, imported

MAP = pages.ROOT / "CONTRIBUTING.md"
BUDGETS = {room.strip("`"): int(lines.replace(",", "")) for room, _, lines in pages.table(MAP, "room")}
ROOMS = [*BUDGETS]
PARTS = {row[0].strip("`"): int(row[2].replace(",", "")) for row in pages.table(MAP, "part")}
ENTRIES = 22
"""Folders and files at most under bitnet_np/: the folder list is the map."""


def room(module):
    """The room of a module, as the map calls it: a package with a slash, a file without, the package itself by its name."""
    inside = module.split(".")[1:]
    if not inside:
        return module
    return inside[0] + "/" * (PACKAGE / inside[0]).is_dir()


def upward(module, source):
    """Imports of a module that go to a later room."""
    for other in dict.fromkeys(imported(module, source)):
        if room(other) != room(module) and ROOMS.index(room(other)) > ROOMS.index(room(module)):
            yield tuple(name.removeprefix(PACKAGE.name + ".") for name in (module, other))


READ = ("spec", "contract/", "engine/")
"""What a reader begins with: its lines are no longer than COLUMNS, and have no more than TOKENS on average."""
COLUMNS, TOKENS = 110, 11

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source):
    """The lines of code, by the number of tokens on each that are neither a comment nor of a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    rows = Counter(row for token in tokens if token.type not in NO_CODE for row in range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            rows -= Counter(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), rows.total()))
    return rows


@cache
def lines_of(path):
    return len(code_lines(path.read_text("utf-8")))


def lines(paths):
    return sum(map(lines_of, paths))


def files(folder):
    """The modules of a folder of the repository, or of several: `a + b`; `a - b` leaves the folder b out."""
    kept, _, without = folder.partition(" - ")
    paths = {path for name in kept.split(" + ") for path in (pages.ROOT / name).rglob("*.py")}
    assert paths, f"no module in {folder}"
    return paths - set((pages.ROOT / without).rglob("*.py") if without else ())


def test_the_map_has_every_room_once_and_no_other():
    assert sorted(ROOMS) == sorted({room(module) for module in MODULES})


def test_the_package_has_few_entries():
    entries = [path.name for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "__init__.pyi", "py.typed")]
    assert len(entries) <= ENTRIES, sorted(entries)


def test_no_import_goes_up():
    assert [pair for module, path in MODULES.items() for pair in upward(module, path.read_text("utf-8"))] == []


def test_the_judge_has_no_circles():
    """Between its folders, and its files outside of them; modules of one folder may import each other."""
    reads: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if module.startswith("bitnet_np.judge."):
            others = {other.split(".")[2] for other in imported(module, path.read_text("utf-8")) if other.startswith("bitnet_np.judge.")}
            reads.setdefault(module.split(".")[2], set()).update(others - {module.split(".")[2]})
    assert len(reads) > 20
    TopologicalSorter(reads).prepare()  # raises CycleError, which names one


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_keeps_its_budget(name):
    assert lines(path for module, path in MODULES.items() if room(module) == name) <= BUDGETS[name]


@pytest.mark.parametrize("name", READ)
def test_lines_of_what_is_read_first_are_short_and_light(name):
    sources = [path for module, path in MODULES.items() if room(module) == name]
    assert sources
    long = [f"{p.name}:{n}" for p in sources for n, line in enumerate(p.read_text("utf-8").splitlines(), 1) if len(line) > COLUMNS]
    assert long == []
    assert sum(code_lines(p.read_text("utf-8")).total() for p in sources) <= TOKENS * lines(sources)


@pytest.mark.parametrize("folder", PARTS)
def test_a_part_of_the_repository_keeps_its_budget(folder):
    assert lines(files(folder)) <= PARTS[folder]


@pytest.mark.parametrize("package", [name for name, path in MODULES.items() if path.name == "__init__.py" and name != PACKAGE.name])
def test_the_docstring_of_a_package_says_what_is_in_it(package):
    """A docstring that names files names each file and folder of its folder, and none that is neither there nor at the package's top."""
    path = MODULES[package]
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    named = set(re.findall(r"(?<![\w/])(\w+\.py)\b", docstring))
    in_folder, at_top = ({file.name for file in folder.glob("*.py")} - {"__init__.py"} for folder in (path.parent, PACKAGE))
    folders = {folder.parent.name + "/" for folder in path.parent.glob("*/__init__.py")}
    assert docstring
    assert not named or in_folder <= named <= in_folder | at_top
    assert not named or set(re.findall(r"(?<![\w/])(\w+/)(?!\w)", docstring)) == folders


def test_only_code_counts():
    text = '"""A module\n\nof three lines."""\n\nx = """two\nlines"""  # of code\n# none\n\ndef f():\n    "None."\n    return x\n'
    assert code_lines(text) == {5: 3, 6: 1, 9: 5, 11: 2}


def test_what_builds_llvm_ir_is_in_one_folder():
    source = re.compile(r"from llvmlite import ir|import intrinsic")
    assert {path.parent.name for path in PACKAGE.rglob("*.py") if source.search(path.read_text("utf-8"))} - {"cuda"} == {"fast"}


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("bitnet_np.base.errors", "from ..model.records import Model", [("base.errors", "model.records")]),
        ("bitnet_np.base.errors", "def f():\n    from ..files.load import load", [("base.errors", "files.load")]),
        ("bitnet_np.base.errors", "if TYPE_CHECKING:\n    import bitnet_np.engine.cache", [("base.errors", "engine.cache")]),
        ("bitnet_np.files.load", "from ..judge import dump", [("files.load", "judge.dump")]),
        ("bitnet_np.files", "from ..cli.main import main", [("files", "cli.main")]),
        ("bitnet_np.files.load", "from .. import __version__", [("files.load", "bitnet_np")]),
        ("bitnet_np.files.load", "from . import gguf_file\nfrom ..base.errors import Error\nimport numpy", []),
        ("bitnet_np.judge.dump", "from bitnet_np.cli.main import main", [("judge.dump", "cli.main")]),
    ],
)
def test_imports_that_go_up_are_found(module, source, found):
    assert list(upward(module, source)) == found
