"""bitnet_np: a reference implementation of BitNet b1.58 and Llama-family inference. A model file and token ids in, logits to trust out."""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_MODULES: dict[str, str] = {name: module for module, name in re.findall(r"(?m)^from (\.\S*) import (\w+) as", _STUB)}
"""The module of each public name. A name is imported when it is first asked for: kernels and the judge take a second to import."""
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .kernels.float_state import default_state

    with default_state():  # constants are rounded when their modules are imported
        module = import_module(_MODULES[name], __name__)
        value = vars(module).get(name) or import_module(f"{_MODULES[name].rstrip('.')}.{name}", __name__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """This package: `hunt` and `judge` in it are functions, also once the packages of these names are imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("hunt", "judge") or not isinstance(value, ModuleType):  # the import system sets a package as such an attribute
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
