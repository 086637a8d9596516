"""`bitnet-np completion SHELL`: what completes commands, options, their values and the names of files in a shell."""

import argparse
import json

from ..base.extras import extra


def run(arguments: argparse.Namespace) -> int:
    """Print the script; returns the exit code. Raises UnsupportedError without the extra `completion`."""
    script = extra("shtab", "completion", "a script for a shell").complete(arguments.parser, arguments.shell)
    print(json.dumps({"shell": arguments.shell, "script": script}, indent=2) if arguments.json else script)
    return 0
