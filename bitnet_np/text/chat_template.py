"""Chat templates: programs in Jinja's language, written by whoever made the file, so they run in a sandbox. Needs the extra `text`."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import FileFormatError, OptionError, UnsupportedError, shown
from ..base.extras import extra
from . import template_process

_TEMPLATE_CHARACTERS = 1 << 18  # the longest published chat templates have some ten thousand
_CHAT_CHARACTERS = 1 << 22
_CHAT_SECONDS = 5.0
_START_SECONDS = 20.0  # that a process may take to start, on a machine that does much else
_CHAT_BYTES = 1 << 30  # of addresses: Python and Jinja take a tenth


def render(path: Path, template: str, names: Mapping[str, Any]) -> str:
    """Render a chat template, which is a program written by whoever made the file.

    It runs in Jinja's immutable sandbox, as in transformers, and in a separate process (0.1 s): a few characters of such a program can ask
    for any time and memory, even between two looks at a clock. Its output and its time are bounded, and its memory where the system
    can do that.

    Raises OptionError if the template refuses the messages, or JSON cannot hold them; FileFormatError if it does not work;
    UnsupportedError if it is too long, or the extra `text` is missing.
    """
    key = f"{path}: tokenizer.chat_template"
    if len(template) > _TEMPLATE_CHARACTERS:
        raise UnsupportedError(f"{key} has {len(template)} characters, expected at most {_TEMPLATE_CHARACTERS}")
    extra("jinja2.sandbox")
    limits = {"seconds": _CHAT_SECONDS, "characters": _CHAT_CHARACTERS, "bytes": _CHAT_BYTES}
    try:
        job = json.dumps({"path": sys.path, "template": template, "names": names, **limits})
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"messages are {shown(names.get('messages'))}, expected what JSON can hold: {error}") from None
    command = [sys.executable, "-I", "-S", template_process.__file__]
    try:
        done = subprocess.run(command, input=job.encode(), capture_output=True, timeout=_CHAT_SECONDS + _START_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise FileFormatError(f"{key} does not work: it takes longer than {_CHAT_SECONDS} s") from None
    if done.returncode:
        ended = f"its process ended with {done.returncode} {shown(done.stderr[-200:].decode(errors='replace'))}"
        raise FileFormatError(f"{key} does not work: {ended}, expected at most {_CHAT_SECONDS} s and {_CHAT_BYTES} bytes")
    outcome: dict[str, str] = json.loads(done.stdout)
    if "refused" in outcome:
        raise OptionError(f"{key} refuses these messages: {shown(outcome['refused'])}")
    if "error" in outcome:
        raise FileFormatError(f"{key} does not work: {outcome['error']}: {shown(outcome['says'])}")
    return outcome["text"]
