"""Optional dependencies, imported when they are needed."""

from importlib import import_module
from types import ModuleType

from .errors import UnsupportedError


def extra(module: str, name: str = "text", what: str = "text") -> ModuleType:
    """The optional dependency `module` of the extra `name`, for the feature `what`. Raises UnsupportedError that says how to install it."""
    try:
        return import_module(module)
    except ImportError:
        raise UnsupportedError(f"{what} needs {module.partition('.')[0]}: pip install 'bitnet_np[{name}]'") from None
