"""The engine under test: a command or a function, run once for a model and a call. It may crash, hang, or write anything.

A command is a template whose words are split as a shell would, and no shell runs it. Each run has a folder, a time and a size that it may
take. It ends with all processes of its session: those that it started, unless they left it.
"""

import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError, shortened
from ..base.validate import choice, function
from ..model.records import Config, Model
from ..testing.models import write_gguf

MOST_BYTES = 1 << 28
"""Bytes that an engine may write in one run."""

_POLL = 0.01  # seconds between two looks at a process
_NAMES = ("model", "tokens", "out", "chunk", "threads", "prefix")
KINDS = (".npy", ".json", ".txt")
_REFUSAL = re.compile(
    r"not (?:yet )?support|only .{1,60}support|unsupport|not implement|unknown|unrecogni[sz]ed|invalid choice|refus|no such arch", re.I
)


@dataclass(frozen=True)
class Call:
    """What an engine is to compute."""

    tokens: tuple[NDArray[np.int64], ...]  # the ids of each sequence
    chunk: int  # tokens at a time; 0: all
    threads: int
    prefix: int


@dataclass(frozen=True)
class Ran:
    """What became of one run."""

    kind: str  # "ok", "crash", "refused", "hang", "size" or "INVALID"
    text: str = ""
    dump: Any = None  # where the kind is "ok": a path, or what a function returned


@dataclass
class Command:
    """An engine that is run as a command, such as `./run -m {model} -t {tokens}.txt -o {out}.npy`."""

    template: str
    limit: float = 20.0  # seconds for one run
    most: int = MOST_BYTES
    words: list[str] = field(default_factory=list)
    suffix: str = ""  # of the file of tokens, where the template names none

    def __post_init__(self) -> None:
        self.words = shlex.split(self.template, posix=os.name != "nt")
        named = set(re.findall(r"\{(\w+)\}", self.template))
        if unknown := named - set(_NAMES):
            raise OptionError(f"the engine's command has {{{min(unknown)}}}, expected {', '.join(f'{{{name}}}' for name in _NAMES)}")
        if missing := {"model", "tokens", "out"} - named:
            raise OptionError(f"the engine's command is {self.template!r}, expected {{{min(missing)}}} in it")
        given = re.search(r"\{tokens\}(\.\w+)", self.template)
        if given:
            self.suffix = choice("the name of the engine's file of tokens", given[1], KINDS)
        self.knobs = tuple(name for name in ("chunk", "threads", "prefix") if name in named)

    @property
    def batches(self) -> tuple[bool, bool]:
        """Whether several sequences can be told, and whether their lengths may differ."""
        return True, (self.suffix or ".npy") != ".npy"

    def variants(self) -> list["Command"]:
        """The engine with each kind of file of tokens that its template leaves open."""
        return [self] if self.suffix else [Command(self.template, self.limit, self.most, suffix=kind) for kind in KINDS]

    takes_path = True

    def run(self, model: Path | Model, config: Config, call: Call, folder: Path) -> Ran:
        """Run it in an empty folder."""
        named = "{tokens}." in self.template
        tokens = folder / ("tokens" + (self.suffix or ".npy"))
        write_tokens(tokens, call.tokens)
        most = max(len(ids) for ids in call.tokens) - call.prefix
        out = folder / ("out" if re.search(r"\{out\}\.\w", self.template) else "out.npy")
        values: dict[str, Any] = {
            "model": model, "tokens": folder / "tokens" if named else tokens, "out": out,
            "chunk": call.chunk or most, "threads": call.threads, "prefix": call.prefix,
        }  # fmt: skip
        words = [re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]), word) for word in self.words]
        code, text = run_limited(words, folder, self.limit, self.most)
        if isinstance(code, str):
            return Ran(code, text)
        if code:
            return failed(code, text)
        written = [path for path in folder.iterdir() if path.name.startswith("out")]
        if not written:
            return Ran("INVALID", "the engine ended with 0 and wrote no output")
        return Ran("ok", dump=out if out in written else written[0])


def failed(code: int, text: str) -> Ran:
    """What an exit code, or the signal below 0, says with the end of standard error."""
    last = shortened(next((line.strip() for line in reversed(text.splitlines()) if line.strip()), ""), 200)
    if code < 0:
        with suppress(ValueError):
            return Ran("crash", f"{signal.Signals(-code).name}{f': {last}' if last else ''}")
    kind = "refused" if code > 0 and _REFUSAL.search(text) else "crash"
    return Ran(kind, f"exit code {code}{f': {last}' if last else ''}")


def write_tokens(path: Path, sequences: Sequence[NDArray[np.int64]]) -> None:
    """Token ids as a file: one sequence as [T], several as [B, T] or, in text, of any lengths."""
    rows = [ids.tolist() for ids in sequences]
    if path.suffix == ".npy":
        np.save(path, np.array(rows[0] if len(rows) == 1 else rows, np.int64))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows[0] if len(rows) == 1 else rows))
    else:
        path.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))


# --- processes ------------------------------------------------------------------------------------------------------------------------


def run_limited(words: Sequence[str], folder: Path, limit: float, most: int) -> tuple[int | str, str]:
    """Run a program in a session of processes of its own. Returns its exit code, or "hang" or "size", and the end of its standard error.

    Raises OptionError for a program that is not there.
    """
    said = folder / "stderr"
    begin = time.monotonic()
    with open(said, "wb") as errors, started(words, errors) as process:
        while not ended(process):
            if time.monotonic() - begin > limit:
                return "hang", f"no answer within {limit:g} s"
            if size_of(folder) > most:
                return "size", f"more than {most:,} bytes were written"
            time.sleep(_POLL)
    if size_of(folder) > most:
        return "size", f"more than {most:,} bytes were written"
    with open(said, "rb") as file:
        file.seek(max(0, said.stat().st_size - 4096))
        return process.returncode, file.read().decode("utf-8", "replace")


class started:
    """Context of a process, which ends with it, and with it all processes of its session."""

    def __init__(self, words: Sequence[str], errors: Any) -> None:
        how: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            how = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        try:
            self.process = subprocess.Popen(list(words), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, **how)
        except OSError as error:
            raise OptionError(f"the engine's command {words[0]!r} cannot be run: {error.strerror}") from None

    def __enter__(self) -> subprocess.Popen:
        return self.process

    def __exit__(self, *_: object) -> None:
        if sys.platform == "win32":
            if self.process.poll() is None:
                subprocess.run(["taskkill", "/T", "/F", "/PID", str(self.process.pid)], capture_output=True, check=False)
        else:
            with suppress(ProcessLookupError, PermissionError):  # before it is waited for: until then its number is nobody else's
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def ended(process: subprocess.Popen) -> bool:
    """Whether a process has ended. It stays there, so that its number is not given to another one."""
    if sys.platform == "win32":
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder and below. Links are not followed."""
    total = 0
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                total += size_of(Path(entry)) if entry.is_dir(follow_symlinks=False) else entry.stat(follow_symlinks=False).st_size
    return total


# --- functions ------------------------------------------------------------------------------------------------------------------------


@dataclass
class Function:
    """An engine that is a function of a Model, or of a file's path, and token ids, [T] or a list of several [T].

    It may take chunk (None: all tokens at once), threads and prefix by name. It returns what `bitnet_np.check` takes.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        try:
            parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        names = [p.name for p in parameters]
        self.takes_path = bool(parameters) and (
            "path" in names[0] or "Path" in str(parameters[0].annotation) or "str" in str(parameters[0].annotation)
        )
        self.knobs = tuple(name for name in ("chunk", "threads", "prefix") if name in names)

    batches = (True, True)

    def variants(self) -> list["Function"]:
        return [self]

    def run(self, model: Path | Model, config: Config, call: Call, folder: Path) -> Ran:
        """Call it. An exception is a crash, or a refusal where it says so."""
        values = {"chunk": call.chunk or None, "threads": call.threads, "prefix": call.prefix}
        if self.takes_path and isinstance(model, Model):
            write_gguf(folder / "model.gguf", model)
            model = folder / "model.gguf"
        tokens = call.tokens[0].copy() if len(call.tokens) == 1 else [ids.copy() for ids in call.tokens]
        try:
            result = self.function(model, tokens, **{name: values[name] for name in self.knobs})
        except Exception as error:
            text = f"{type(error).__name__}: {shortened(str(error), 200)}"
            return Ran("refused" if isinstance(error, NotImplementedError) or _REFUSAL.search(text) else "crash", text)
        return Ran("ok", dump=result)


Engine = Command | Function


def engine_of(engine: Any, limit: float = 20.0) -> Engine:
    """An engine of a command's template, or of a function. Raises OptionError."""
    if isinstance(engine, Command | Function):
        return engine
    if isinstance(engine, str):
        return Command(engine, limit)
    return Function(function("the engine", engine))
