"""llama.cpp in a process of its own, which is stopped while it is not its turn.

In a process, its threads and memory do not disturb ours, and it can live in another Python's environment. Requests and answers
are JSON, one per line; workers/peer.py is the other end.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "workers" / "peer.py"


class PeerError(Exception):
    """A peer is not installed, or failed."""


NAME = "llama-cpp"
SAME_SHAPE = "llama.cpp, architecture bitnet, TQ2_0 matrices, float16 head: same shape and weight count, SiLU: not the same model"
"""What runs there by default, so that nobody takes it for the same model."""


class Peer:
    """A running worker with llama-cpp-python. Raises PeerError if that Python does not have it."""

    name = NAME

    def __init__(self, python: str = sys.executable):
        self._model = SAME_SHAPE
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - it lives as long as the process
        try:
            self._process = subprocess.Popen(
                [python, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1
            )
        except OSError as error:
            raise PeerError(f"{python} does not run: {error.strerror}; --vs {NAME}=PYTHON names one that does") from error
        try:
            self.version = str(self._ask({"do": "import"})["version"])
        except PeerError as error:
            self.close()
            remedy = f"pip install llama-cpp-python, or --vs {NAME}=PYTHON with one that has it"
            raise PeerError(f"--vs {NAME}: {python} has no working llama_cpp ({error}); {remedy}") from error

    @property
    def description(self) -> str:
        return f"{self._model} (llama_cpp {self.version})"

    def open(self, description: str = "", /, **model: Any) -> None:
        """Let the peer load or make the model; its description says which, if it is another than the engine's usual one."""
        self._model = description or self._model
        self._ask({"do": "open", **model})

    def run(self, request: dict) -> dict[str, float]:
        """The sample of one run. Raises PeerError if the peer's logits are not finite, or all the same."""
        answer = self._ask(request)
        if not answer["sane"]:
            raise PeerError(f"{self.name}: the logits of {request['do']} are not finite, or all the same: nothing to compare with")
        return {"seconds": float(answer["seconds"])}

    def close(self) -> None:
        """End the process, also while it is stopped."""
        self._process.kill()
        with suppress(OSError), self._process:  # unwritten data for a process that has ended
            self._log.close()

    def _signal(self, name: str) -> None:
        if hasattr(signal, name):  # not on Windows: there the worker goes on waiting for its next request
            os.kill(self._process.pid, getattr(signal, name))

    def _ask(self, request: dict) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._signal("SIGCONT")
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        if not line:
            self._process.wait()
            self._log.seek(0)
            tail = " | ".join(self._log.read().strip().splitlines()[-3:])
            raise PeerError(f"{self.name}: the worker ended with exit code {self._process.returncode}: {tail}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        self._signal("SIGSTOP")
        return answer
