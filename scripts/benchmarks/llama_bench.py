"""Engines of llama.cpp's family that are built by hand, timed by the llama-bench of such a build: ik_llama.cpp and bitnet.cpp.

Each sample is a process of its own, which loads the file, runs once to warm up, and then reports nanoseconds of one run. Its tokens are its
own random ones and its logits are not seen, so nothing is known of its results; and it decodes from an empty cache.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from .peers import PeerError

NAMES = {"ik-llama": "ik_llama.cpp", "bitnet-cpp": "bitnet.cpp"}
_LIMIT = 600  # seconds, of one sample with its loading


class LlamaBench:
    """`LlamaBench("ik-llama", program, model)` raises PeerError where that program does not run."""

    def __init__(self, name: str, program: str, model: Path):
        self.name, self._program, self._model = name, program, model
        if not program:
            raise PeerError(f"{name}: {name}=PROGRAM names the llama-bench of a build of {NAMES[name]}")
        report = self._report("-p", "1", "-n", "0", "-t", "1")
        self.version = str(report.get("build_commit", "of an unknown commit"))

    @property
    def description(self) -> str:
        return f"{NAMES[self.name]} {self.version} by its llama-bench, on {self._model}"

    def run(self, request: dict) -> dict[str, float]:
        """The sample of one run of so many tokens; `request` is as workers/peer.py has it."""
        kinds = ("-n", "-p") if request["do"] == "decode" else ("-p", "-n")
        report = self._report(kinds[0], str(len(request["tokens"])), kinds[1], "0", "-t", str(request["threads"]))
        nanoseconds = report.get("samples_ns", [0])[0]
        if not nanoseconds > 0:
            raise PeerError(f"{self.name}: {self._program} reports no time: samples_ns is {report.get('samples_ns')}")
        return {"seconds": nanoseconds / 1e9}

    def _report(self, *options: str) -> dict[str, Any]:
        """What llama-bench prints of its one test."""
        command = [self._program, "-m", str(self._model), *options, "-r", "1", "-o", "json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerError(f"{self.name}: {self._program} does not run: {error}") from error
        try:
            (report,) = json.loads(done.stdout)
        except ValueError:
            tail = " | ".join(done.stderr.strip().splitlines()[-3:])
            raise PeerError(f"{self.name}: {self._program} ended with exit code {done.returncode} and no report: {tail}") from None
        return report
