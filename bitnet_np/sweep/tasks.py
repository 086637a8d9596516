"""What one row of a sweep does. A task says all that its result depends on, and runs in any process that has the package."""

import hashlib
import json
import math
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..base.errors import Error, FileFormatError, listed
from ..engine.dialects import EXACT
from ..engine.forward_pass import compute_logits
from ..files.digest import digest_of
from ..files.load import load
from ..generation.nll import token_nll
from ..judge.check import check
from ..judge.law.precision import Profile, dialect_to_compute
from ..judge.verdict import Verdict
from ..kernels import machine
from ..kernels.float_state import steady
from ..model import packing
from ..model.records import Model
from ..testing import selftest
from ..testing.selftest import digest

OK, WRONG, INVALID, ERROR, KILLED = "OK", "WRONG", "INVALID", "ERROR", "KILLED"
"""Outcomes. The first three are a verdict or a value. ERROR: an error was raised. KILLED: the process died."""

Row = dict[str, Any]
"""What became of a task, for JSON."""

_Result = tuple[str, dict[str, Any]]  # an outcome, and what is equal on every machine


@dataclass(frozen=True)
class ModelFile:
    """A model as tasks name it. It is sent by its path, and opened and mapped where it is needed."""

    path: str  # a GGUF file or a Hugging Face folder, the same on every machine
    sha256: str  # of the file that was meant
    i2s_layout: str = packing.I2S_DEFAULT


@dataclass(frozen=True, eq=False)
class Task:
    """A row to be computed."""

    operation: str  # a name of OPERATIONS
    model: ModelFile
    tokens: str  # a name for people
    ids: NDArray[np.int64]  # [T]
    dialect: str = ""  # of DIALECTS; for check of PROFILES, or "" for types read off the dump
    precision: str = ""
    accept: str = Verdict.NARROW.name  # check: the worst verdict that is fine
    at_most: float | None = None  # nll: the largest mean that is fine
    dump: str = ""  # check: the dump to judge
    dump_sha256: str = ""

    @property
    def key(self) -> str:
        """SHA-256 of all that the result depends on."""
        facts = asdict(self) | {"ids": digest(self.ids.astype("<i8")), "version": __version__}
        facts["model"] = {name: value for name, value in facts["model"].items() if name != "path"}
        for name in ("tokens", "dump"):  # names, not contents
            del facts[name]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def profile(self) -> Profile:
        """What it computes in, or what is declared of the engine that it judges. Raises OptionError."""
        if self.operation == "check":
            return Profile.declared(self.dialect, self.precision or None)
        return Profile(dialect_to_compute(self.dialect or EXACT.name, self.precision or None), None)

    def row(self, outcome: str, result: dict[str, Any], machine: dict[str, Any] | None = None, seconds: float = 0.0) -> Row:
        """The row of the task."""
        named = {"key": self.key, "operation": self.operation, "model": self.model.path, "tokens": self.tokens}
        named |= {"dialect": self.dialect, "precision": self.precision, "outcome": outcome}
        return named | {"result": result, "seconds": round(seconds, 6), "machine": machine or {}}


# --- what a process has once ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def model_of(file: ModelFile) -> Model:
    """The model, loaded when it is first asked for and until another one is. Raises FileFormatError for another file under this path."""
    sha256 = digest_of(Path(file.path))
    if sha256 != file.sha256:
        raise FileFormatError(f"{file.path}: SHA-256 is {sha256} on {platform.node()}, expected {file.sha256}, as where the sweep began")
    return load(file.path, i2s_layout=file.i2s_layout)


class DifferentBitsError(Error):
    """A machine computes other bits than it must."""


@lru_cache(maxsize=1)
def this_machine() -> dict[str, Any]:
    """The facts that a row says of the machine it was computed on.

    Raises DifferentBitsError if it does not compute the known bits of every kernel.
    """
    differing = [name for name, equal in selftest.run() if not equal]
    if differing:
        raise DifferentBitsError(f"selftest failed on {platform.node()}: {listed(differing)}")
    known = machine.describe()
    names = ("processor", "instruction path", "numba", "numpy", "python", "system")
    return {"host": platform.node(), "bitnet_np": __version__, **{name: known[name] for name in names}, "differing": differing}


# --- the operations -------------------------------------------------------------------------------------------------------------------

_ONE_AT_A_TIME = threading.Lock()  # a row has all threads of the process, and one model is loaded once


@steady
def perform(task: Task) -> Row:
    """Run a task in this process. Whatever goes wrong in it is an outcome.

    Raises DifferentBitsError where the process does not pass the selftest, before its first task.
    """
    with _ONE_AT_A_TIME:
        host, start = this_machine(), time.perf_counter()
        try:
            outcome, result = OPERATIONS[task.operation](task)
        except Exception as error:  # one row's error, of whatever kind, is not the end of the others
            outcome, result = ERROR, {"error": f"{type(error).__name__}: {error}"}
        return task.row(outcome, result, host, time.perf_counter() - start)


def _logits(task: Task) -> _Result:
    logits = compute_logits(model_of(task.model), task.ids[None], dialect=task.profile().dialect)[0]
    return OK, {"sha256": digest(logits)}


def _nll(task: Task) -> _Result:
    values = token_nll(model_of(task.model), task.ids, dialect=task.profile().dialect)
    mean = float(values.mean())
    fine = task.at_most is None or mean <= task.at_most
    return OK if fine else WRONG, {"sha256": digest(values), "mean_nll": mean if math.isfinite(mean) else None}


def _check(task: Task) -> _Result:
    profile = task.profile()
    report = check(model_of(task.model), task.ids, task.dump, profile.dialect, profile.precision)
    outcome = INVALID if report.verdict == Verdict.INVALID else OK if report.verdict <= Verdict[task.accept] else WRONG
    return outcome, {"verdict": report.verdict.name, "reason": report.reason}


OPERATIONS: dict[str, Callable[[Task], _Result]] = {"logits": _logits, "nll": _nll, "check": _check}
