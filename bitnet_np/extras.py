"""Modules of the extra `text`, imported when they are needed."""

from importlib import import_module
from types import ModuleType

from .errors import UnsupportedError


def extra(module: str) -> ModuleType:
    """The module; UnsupportedError says how to install it."""
    try:
        return import_module(module)
    except ImportError:
        raise UnsupportedError(f"text needs {module.partition('.')[0]}: pip install 'bitnet_np[text]'") from None
