"""`bitnet-np completion SHELL`: what completes commands, options, their values and the names of files in a shell.

Examples:
  bitnet-np completion bash > ~/.local/share/bash-completion/completions/bitnet-np
  bitnet-np completion fish > ~/.config/fish/completions/bitnet-np.fish
"""

import argparse

from ..base.extras import extra
from .printing import answer

SUMMARY = "Print a script that completes this command line in a shell."
ARGUMENTS = "shell@bash|zsh|fish: the shell"


def run(arguments: argparse.Namespace) -> int:
    """Print the script; returns the exit code. Raises UnsupportedError without the extra `completion`."""
    script = extra("shtab", "completion", "a script for a shell").complete(arguments.parser, arguments.shell)
    return answer(arguments, {"shell": arguments.shell, "script": script}, script)
