"""The layer map of CONTRIBUTING.md is the truth: every module has its room on it, and no import goes from a room to a later one."""

import ast

import pages
import pytest

PACKAGE = pages.ROOT / "bitnet_np"
MAP = pages.ROOT / "CONTRIBUTING.md"
ROOMS = [row[0].strip("`") for row in pages.table(MAP, "room")]


def modules():
    """Dotted name -> file of every module, the package itself first."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(pages.ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def room(module):
    """The room of a module, as the map calls it: a package with a slash, a file without, the package itself by its name."""
    inside = module.split(".")[1:]
    if not inside:
        return module
    return inside[0] + "/" * (PACKAGE / inside[0]).is_dir()


def imported(module, source):
    """The modules of the package that a module's source imports, anywhere in it: in functions and under TYPE_CHECKING, too."""
    is_package = MODULES[module].name == "__init__.py"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            base = parts[: len(parts) - node.level + 1] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == PACKAGE.name:
                while name not in MODULES:  # a name in a module
                    name = name.rpartition(".")[0]
                yield name


def upward(module, source):
    """Imports of a module that go to a later room."""
    for other in dict.fromkeys(imported(module, source)):
        if room(other) != room(module) and ROOMS.index(room(other)) > ROOMS.index(room(module)):
            yield tuple(name.removeprefix(PACKAGE.name + ".") for name in (module, other))


def test_the_map_has_every_room_once_and_no_other():
    assert sorted(ROOMS) == sorted({room(module) for module in MODULES})


def test_no_import_goes_up():
    assert [pair for module, path in MODULES.items() for pair in upward(module, path.read_text("utf-8"))] == []


def test_only_the_choice_of_a_device_and_the_commands_know_the_gpu():
    gpu = "bitnet_np.gpu", "bitnet_np.kernels.cuda"
    importers = {
        room(module)
        for module, path in MODULES.items()
        if not module.startswith(gpu) and any(name.startswith(gpu) for name in imported(module, path.read_text("utf-8")))
    }
    assert importers == {"dispatch", "cli/"}


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("bitnet_np.errors", "from .model import Model", [("errors", "model")]),
        ("bitnet_np.errors", "def f():\n    from .files.load import load", [("errors", "files.load")]),
        ("bitnet_np.errors", "if TYPE_CHECKING:\n    import bitnet_np.cache", [("errors", "cache")]),
        ("bitnet_np.files.load", "from ..judge import trace", [("files.load", "judge.trace")]),
        ("bitnet_np.files", "from ..cli.main import main", [("files", "cli.main")]),
        ("bitnet_np.files.load", "from .. import __version__", [("files.load", "bitnet_np")]),
        ("bitnet_np.files.load", "from . import gguf_file\nfrom ..errors import Error\nimport numpy", []),
        ("bitnet_np.judge.dump", "from bitnet_np.cli.main import main", [("judge.dump", "cli.main")]),
    ],
)
def test_imports_that_go_up_are_found(module, source, found):
    assert list(upward(module, source)) == found
