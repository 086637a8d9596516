"""`bitnet-np completion SHELL`: what completes commands, options, their values and the names of files in a shell."""

import argparse

from ..base.extras import extra
from .printing import answer


def run(arguments: argparse.Namespace) -> int:
    """Print the script; returns the exit code. Raises UnsupportedError without the extra `completion`."""
    script = extra("shtab", "completion", "a script for a shell").complete(arguments.parser, arguments.shell)
    return answer(arguments, {"shell": arguments.shell, "script": script}, script)
