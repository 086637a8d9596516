"""The process that renders one chat template: a job in JSON on standard input, its outcome in JSON on standard output.

It is run by its file name and imports nothing of this package, because that would take longer than most templates.
"""

import json
import sys
import time
from typing import Any, NoReturn

_MESSAGE = 1000  # characters of an error that are handed on


class _RefusedMessages(Exception):
    """Raised by a template's raise_exception."""


def main() -> None:
    """Limit this process, render, print the outcome."""
    job = json.load(sys.stdin)
    sys.path[:] = job["path"]  # where the calling process found Jinja
    _limit(job["seconds"], job["bytes"])
    try:
        outcome = {"text": _render(job["template"], job["names"], job["seconds"], job["characters"])}
    except _RefusedMessages as refused:
        outcome = {"refused": str(refused)[:_MESSAGE]}
    except Exception as error:  # a template can raise anything: it can divide by zero
        outcome = {"error": type(error).__name__, "says": str(error)[:_MESSAGE]}
    json.dump(outcome, sys.stdout)


def _limit(seconds: float, size: int) -> None:
    """Set the limits at which the system stops this process. The clock stops it sooner, and says why; refused memory is an exception."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for kind, most in ((resource.RLIMIT_CPU, int(seconds) + 2), (resource.RLIMIT_AS, size), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))


def _render(template: str, names: dict[str, Any], seconds: float, most: int) -> str:
    environment = _environment(seconds)
    pieces, size = [], 0
    for piece in environment.from_string(_with_ticks(environment.parse(template))).generate(names):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise OverflowError(f"it writes more than {most} characters")
    return "".join(pieces)


def _environment(seconds: float) -> Any:
    """The settings and names that transformers gives to chat templates, without a clock, and without arithmetic on strings."""
    from jinja2 import exceptions, sandbox

    deadline = time.monotonic() + seconds

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "%"))  # a few characters of these can make a value of any size

        def call_binop(self, context: Any, symbol: str, left: Any, right: Any) -> Any:
            if symbol == "**" or not isinstance(left, int | float) or not isinstance(right, int | float):
                raise exceptions.SecurityError(f"{symbol} of {type(left).__name__} and {type(right).__name__} is not allowed")
            return super().call_binop(context, symbol, left, right)

        def tick(self) -> None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"it takes longer than {seconds} s")

    def raise_exception(message: object) -> NoReturn:
        raise _RefusedMessages(message)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals = {name: environment.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
    environment.globals["raise_exception"] = raise_exception
    return environment


def _with_ticks(tree: Any) -> Any:
    """The parsed template with a look at the clock wherever something can repeat."""
    from jinja2 import nodes

    for repeated in tree.find_all((nodes.For, nodes.Macro, nodes.Block)):
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)  # a name that no template can say or change
        repeated.body.insert(0, nodes.ExprStmt(tick).set_lineno(repeated.lineno))
    return tree


if __name__ == "__main__":
    main()
