"""Chat templates: programs in Jinja's language, written by whoever made the file, so they run in a sandbox. Needs the extra `text`."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from .errors import FileFormatError, OptionError, UnsupportedError, shown
from .extras import extra

_TEMPLATE_CHARACTERS = 1 << 18  # the longest published chat templates have some ten thousand
_CHAT_CHARACTERS = 1 << 22
_CHAT_SECONDS = 5.0


class _RefusedMessages(Exception):
    """What a template's raise_exception raises."""


def render(path: Path, template: str, names: Mapping[str, Any]) -> str:
    """Render a chat template, which is a program written by whoever made the file.

    It runs in Jinja's immutable sandbox, as in transformers, and cannot reach files, modules or the messages' objects. The length of
    what it writes is bounded, and so is its time: checked at each turn of a loop and each call of a macro. Not bounded is the memory of
    one value: a template that doubles a string over and over can still ask for all there is.

    Raises OptionError where the template refuses the messages, FileFormatError where it does not work, UnsupportedError for one that is too
    long, or without the extra `text`.
    """
    key = f"{path}: tokenizer.chat_template"
    if len(template) > _TEMPLATE_CHARACTERS:
        raise UnsupportedError(f"{key} has {len(template)} characters, expected at most {_TEMPLATE_CHARACTERS}")
    environment = _environment(time.monotonic() + _CHAT_SECONDS)
    pieces, size = [], 0
    try:
        for piece in environment.from_string(_with_ticks(environment.parse(template))).generate(names):
            pieces.append(piece)
            size += len(piece)
            if size > _CHAT_CHARACTERS:
                raise OverflowError(f"it writes more than {_CHAT_CHARACTERS} characters")
    except _RefusedMessages as refused:
        raise OptionError(f"{key} refuses these messages: {shown(str(refused))}") from None
    except Exception as error:  # a template can raise anything: it can divide by zero
        raise FileFormatError(f"{key} does not work: {type(error).__name__}: {shown(str(error))}") from None
    return "".join(pieces)


def _environment(deadline: float) -> Any:
    """The settings and names that transformers gives to chat templates, without a clock, and without arithmetic on strings."""
    sandbox, exceptions = extra("jinja2.sandbox"), extra("jinja2.exceptions")

    class Environment(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[name-defined]
        intercepted_binops = frozenset(("*", "**", "%"))  # a few characters of these can make a value of any size

        def call_binop(self, context: Any, symbol: str, left: Any, right: Any) -> Any:
            if symbol == "**" or not isinstance(left, int | float) or not isinstance(right, int | float):
                raise exceptions.SecurityError(f"{symbol} of {type(left).__name__} and {type(right).__name__} is not allowed")
            return super().call_binop(context, symbol, left, right)

        def tick(self) -> None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"it takes longer than {_CHAT_SECONDS} s")

    def raise_exception(message: object) -> NoReturn:
        raise _RefusedMessages(message)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals = {name: environment.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
    environment.globals["raise_exception"] = raise_exception
    return environment


def _with_ticks(tree: Any) -> Any:
    """The parsed template with a look at the clock wherever something can repeat."""
    nodes = extra("jinja2.nodes")
    for repeated in tree.find_all((nodes.For, nodes.Macro, nodes.Block)):
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)  # a name that no template can say or change
        repeated.body.insert(0, nodes.ExprStmt(tick).set_lineno(repeated.lineno))
    return tree
