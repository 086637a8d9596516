"""The package's imports, read from its sources."""

import ast

import pages

PACKAGE = pages.ROOT / "bitnet_np"


def modules():
    """Dotted name -> file of every module, the package itself first."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(pages.ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


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


def reached(*rooms):
    """The modules of these rooms, or single ones, and all that they import, and so on."""
    found = {module for module in MODULES for room in rooms if f"{module}.".startswith(f"{PACKAGE.name}.{room}.")}
    new = list(found)
    while new:
        module = new.pop()
        others = set(imported(module, MODULES[module].read_text("utf-8"))) - found - {PACKAGE.name}
        found |= others
        new += others
    return found
