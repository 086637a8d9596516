"""The process that renders one chat template: a job in JSON on standard input, its outcome in JSON on standard output.

It is run by its file name and imports nothing of this package, because that would take longer than most templates.
"""

import json
import signal
import sys
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
        outcome = {"text": _render(job["template"], job["names"], job["characters"])}
    except _RefusedMessages as refused:
        outcome = {"refused": str(refused)[:_MESSAGE]}
    except Exception as error:  # a template can raise anything: it can divide by zero
        outcome = {"error": type(error).__name__, "says": str(error)[:_MESSAGE]}
    json.dump(outcome, sys.stdout)


def _limit(seconds: float, size: int) -> None:
    """Set the clock that stops the template, and the limits at which the system ends this process; refused memory is an exception.

    Windows has neither: there the calling process ends this one.
    """

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds} s")

    try:
        import resource
    except ImportError:
        return
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of processor time: a busy machine stops no template
    for kind, most in ((resource.RLIMIT_CPU, int(seconds) + 2), (resource.RLIMIT_AS, size), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))


def _render(template: str, names: dict[str, Any], most: int) -> str:
    pieces, size = [], 0
    for piece in _environment().from_string(template).generate(names):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise OverflowError(f"it writes more than {most} characters")
    return "".join(pieces)


def _environment() -> Any:
    """The settings and names that transformers gives to chat templates, without a clock, and without arithmetic on strings."""
    from jinja2 import exceptions, sandbox

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "%"))  # a few characters of these can make a value of any size

        def call_binop(self, context: Any, symbol: str, left: Any, right: Any) -> Any:
            if symbol == "**" or not isinstance(left, int | float) or not isinstance(right, int | float):
                raise exceptions.SecurityError(f"{symbol} of {type(left).__name__} and {type(right).__name__} is not allowed")
            return super().call_binop(context, symbol, left, right)

    def raise_exception(message: object) -> NoReturn:
        raise _RefusedMessages(message)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals = {name: environment.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
    environment.globals["raise_exception"] = raise_exception
    return environment


if __name__ == "__main__":
    main()
