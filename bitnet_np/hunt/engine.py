"""The engine under test: a command, a server or a function, run once for a model and a call. It may crash, hang, or write anything.

A command is a template whose words are split as a shell would, and no shell runs it. Each run has a folder, a time and a size that it may
take. It ends with all processes of its session: those that it started, unless they left it.
"""

import inspect
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError, ServerError, UnsupportedError, shortened
from ..base.validate import choice, function
from ..model.records import Config, Model
from ..servers.client import client_of
from ..servers.completions import Completions
from ..servers.endpoint import server_at

MOST_BYTES = 1 << 28
"""Bytes that an engine may write in one run."""

_POLL = 0.01  # seconds between two looks at a process
KNOBS = ("chunk", "threads", "prefix")
"""What a call may change beside the tokens."""

_PREDICTED, _LISTED = 8, 20  # tokens that a server generates, and log-probabilities of each
KINDS = (".npy", ".json", ".txt")
_REFUSAL = re.compile(
    r"not (?:yet )?support|only .{1,60}support|unsupport|not implement|unknown|unrecogni[sz]ed|invalid choice|refus|no such arch"
    r"|(?:must|shall) be a multiple of|is not a multiple of",
    re.I,
)
_SAYS_WHY = re.compile(r"assert|error|exception|fatal|panic", re.I)  # a debugger's backtrace may come behind such a line


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

    kind: str  # "ok", "crash", "refused", "hang", "size" or "invalid"
    text: str = ""
    dump: Any = None  # where the kind is "ok": a path, a server's answers, or what a function returned


class Answers(tuple[Completions, ...]):
    """What a server answers, for each sequence."""

    __slots__ = ()


def _words(template: str, allowed: Sequence[str], needed: Collection[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words of a template, and its knobs. Raises OptionError."""
    named = set(re.findall(r"\{(\w+)\}", template))
    if unknown := named - {*allowed}:
        raise OptionError(f"the engine's command has {{{min(unknown)}}}, expected {', '.join(f'{{{name}}}' for name in allowed)}")
    if missing := {*needed} - named:
        raise OptionError(f"the engine's command is {template!r}, expected {{{min(missing)}}} in it")
    try:
        return shlex.split(template, posix=os.name != "nt"), tuple(name for name in KNOBS if name in named)
    except ValueError as error:  # a quotation without its end
        raise OptionError(f"the engine's command is {template!r}, expected words as a shell takes them: {error}") from None


def _filled(words: Sequence[str], call: Call, **values: Any) -> list[str]:
    """The words of a command for a call."""
    values |= {"chunk": call.chunk or max(map(len, call.tokens)), "threads": call.threads, "prefix": call.prefix}
    return [re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]), word) for word in words]


@dataclass
class Command:
    """An engine that is run as a command, such as `./run -m {model} -t {tokens}.txt -o {out}.npy`."""

    template: str
    limit: float = 20.0
    most: int = MOST_BYTES
    suffix: str = ""  # of the file of tokens, where the template names none
    takes_path = True  # a model as a file

    def __post_init__(self) -> None:
        self.words, self.knobs = _words(self.template, ("model", "tokens", "out", *KNOBS), ("model", "tokens", "out"))
        if given := re.search(r"\{tokens\}(\.\w+)", self.template):
            self.suffix = choice("the name of the engine's file of tokens", given[1], KINDS)
        self.batches = True, (self.suffix or ".npy") != ".npy"  # whether several sequences can be told, and of several lengths

    def variants(self) -> list["Command"]:
        """The engine in each way in which it may be asked, where its template leaves that open."""
        return [self] if self.suffix else [replace(self, suffix=kind) for kind in KINDS]

    def run(self, model: Path | Model, config: Config, call: Call, folder: Path) -> Ran:
        """Run it in an empty folder."""
        named = "{tokens}." in self.template
        tokens = folder / ("tokens" + (self.suffix or ".npy"))
        write_tokens(tokens, call.tokens)
        out = folder / ("out" if re.search(r"\{out\}\.\w", self.template) else "out.npy")
        words = _filled(self.words, call, model=model, tokens=folder / "tokens" if named else tokens, out=out)
        with running(words, folder, self.limit, self.most) as run:
            while not (ran := run.end()):
                time.sleep(_POLL)
        if ran.kind != "ok":
            return ran
        written = [path for path in folder.iterdir() if path.name.startswith("out")]
        if not written:
            return Ran("invalid", "the engine ended with 0 and wrote no output")
        return Ran("ok", dump=out if out in written else written[0])


class Server(Command):
    """An engine that is a server, such as `llama-server -m {model} --port {port}`. It is started for each run, and ended.

    Sequences of a batch are asked for at the same time.
    """

    def __post_init__(self) -> None:
        self.words, self.knobs = _words(self.template, ("model", "port", "chunk", "threads"), ("model", "port"))
        self.batches, self.suffix = (True, True), ".json"

    def run(self, model: Path | Model, config: Config, call: Call, folder: Path) -> Ran:
        """Start it, wait until it speaks, ask, end it."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        client = client_of(f"http://127.0.0.1:{port}", self.limit)
        with running(_filled(self.words, call, model=model, port=port), folder, self.limit, self.most) as run:
            while True:
                if ran := run.end():
                    return replace(ran, kind="crash", text="the server ended") if ran.kind == "ok" else ran
                with suppress(ServerError, UnsupportedError):
                    server = server_at(client)
                    break
                time.sleep(_POLL)

            def ask(ids: NDArray[np.int64]) -> Completions:
                predict = min(_PREDICTED, config.context - len(ids))
                return server.complete(ids.tolist(), predict, min(_LISTED, config.vocab))

            try:
                with ThreadPoolExecutor(len(call.tokens)) as pool:
                    return Ran("ok", dump=Answers(pool.map(ask, call.tokens)))
            except ServerError as error:
                time.sleep(0.1)  # a process that crashes is there for a moment
                ran = run.end()
                if ran is not None and ran.kind != "ok":
                    return ran
                hangs = "no whole answer within" in str(error)
                return Ran("hang" if hangs else "refused" if _REFUSAL.search(str(error)) else "crash", shortened(str(error), 200))


def failed(code: int, text: str) -> Ran:
    """What an exit code, or the signal below 0, says with the end of standard error."""
    lines = [line.strip() for line in reversed(text.splitlines()) if line.strip()]
    last = shortened(next((line for line in lines if _SAYS_WHY.search(line)), next(iter(lines), "")), 200)
    how = signal.Signals(-code).name if -code in [*signal.Signals] else f"exit code {code}"
    return Ran("refused" if code > 0 and _REFUSAL.search(text) else "crash", f"{how}{f': {last}' if last else ''}")


def write_tokens(path: Path, sequences: Sequence[NDArray[np.int64]]) -> None:
    """Token ids as a file: one sequence as [T], several as [B, T] or, in text, of any lengths."""
    rows = [ids.tolist() for ids in sequences]
    whole = rows if len(rows) > 1 else rows[0]
    if path.suffix == ".npy":
        np.save(path, np.array(whole, np.int64))
    else:
        path.write_text(json.dumps(whole) if path.suffix == ".json" else "".join(" ".join(map(str, row)) + "\n" for row in rows))


# --- processes ------------------------------------------------------------------------------------------------------------------------


class running:
    """Context of a program in a session of processes of its own, which end with it. Raises OptionError for one that is not there."""

    def __init__(self, words: Sequence[str], folder: Path, limit: float, most: int) -> None:
        self.folder, self.limit, self.most, self.said, self.begin = folder, limit, most, folder / "stderr", time.monotonic()
        how: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            how = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        with open(self.said, "wb") as errors:
            try:
                self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, **how)
            except OSError as error:
                raise OptionError(f"the engine's command {words[0]!r} cannot be run: {error.strerror}") from None

    def __enter__(self) -> "running":
        return self

    def end(self) -> Ran | None:
        """How it ended, or why it has to; None while it runs."""
        over = ended(self.process)
        if size_of(self.folder) > self.most:
            return Ran("size", f"more than {self.most:,} bytes were written")
        if over:
            self.stop()
            with open(self.said, "rb") as file:
                file.seek(max(0, self.said.stat().st_size - 4096))
                text = file.read().decode("utf-8", "replace")
            return failed(self.process.returncode, text) if self.process.returncode else Ran("ok")
        return Ran("hang", f"no answer within {self.limit:g} s") if time.monotonic() - self.begin > self.limit else None

    def stop(self, *_: object) -> None:
        """End all processes of its session."""
        if self.process.returncode is not None:
            return
        if sys.platform == "win32":
            if self.process.poll() is None:
                subprocess.run(["taskkill", "/T", "/F", "/PID", str(self.process.pid)], capture_output=True, check=False)
        else:
            with suppress(ProcessLookupError, PermissionError):  # before it is waited for: until then its number is nobody else's
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    __exit__ = stop


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


def stacked(rows: Sequence[Any]) -> Any:
    """Logits [T, V] of several sequences as [B, T, V], with zeros behind those of shorter ones; anything else as it is."""
    arrays = [x if isinstance(x, np.ndarray) else None for x in rows]
    if not arrays or any(x is None or x.ndim != 2 or x.shape[1] != rows[0].shape[1] for x in arrays):
        return rows
    longest = max(map(len, rows))
    return np.stack([np.pad(x, ((0, longest - len(x)), (0, 0))) for x in rows])


# --- functions ------------------------------------------------------------------------------------------------------------------------


@dataclass
class Function:
    """An engine that is a function of a Model, or of a file's path, and token ids, [T] or a list of several [T].

    It may take chunk (None: all tokens at once), threads and prefix by name. It returns what `bitnet_np.check` takes, or for
    several sequences a list of their logits.
    """

    function: Callable[..., Any]
    batches = True, True

    def __post_init__(self) -> None:
        parameters: list[inspect.Parameter] = []
        with suppress(TypeError, ValueError):
            parameters += inspect.signature(self.function).parameters.values()
        names = [p.name for p in parameters]
        self.takes_path = any("path" in p.name or "Path" in str(p.annotation) or "str" in str(p.annotation) for p in parameters[:1])
        self.knobs = tuple(name for name in KNOBS if name in names)

    def variants(self) -> list["Function"]:
        """There is one way in which it may be asked."""
        return [self]

    def run(self, model: Path | Model, config: Config, call: Call, folder: Path) -> Ran:
        """Call it. An exception is a crash, or a refusal where it says so."""
        values = {"chunk": call.chunk or None, "threads": call.threads, "prefix": call.prefix}
        tokens = call.tokens[0].copy() if len(call.tokens) == 1 else [ids.copy() for ids in call.tokens]
        try:
            result = self.function(model, tokens, **{name: values[name] for name in self.knobs})
        except Exception as error:
            text = f"{type(error).__name__}: {shortened(str(error), 200)}"
            return Ran("refused" if isinstance(error, NotImplementedError) or _REFUSAL.search(text) else "crash", text)
        return Ran("ok", dump=stacked(result) if isinstance(result, list) else result)


Engine = Command | Function


def engine_of(engine: Any, limit: float = 20.0) -> Engine:
    """An engine of a command's template, or of a function. Raises OptionError."""
    if isinstance(engine, Command | Function):
        return engine
    if isinstance(engine, str):
        return Server(engine, limit) if "{port}" in engine else Command(engine, limit)
    return Function(function("the engine", engine))
