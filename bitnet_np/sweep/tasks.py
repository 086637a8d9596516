"""What one row of a sweep does. A task says all that its result depends on, and runs in any process that has the package."""

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..engine.dialects import EXACT
from ..engine.forward_pass import compute_logits
from ..generation.nll import token_nll
from ..judge.check import check
from ..judge.precision import Profile, dialect_to_compute
from ..judge.verdict import Verdict
from ..kernels.float_state import steady
from ..testing.selftest import digest
from .process import ModelFile, check_selftest, model_of, this_machine

OK, WRONG, INVALID, ERROR, KILLED = "OK", "WRONG", "INVALID", "ERROR", "KILLED"
"""Outcomes. ERROR: an error was raised. KILLED: the process died."""


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

    @property
    def place(self) -> str:
        """The row in words."""
        return f"{self.operation} of {self.model.path}, {self.tokens}"


@dataclass(frozen=True)
class Outcome:
    """What became of a task."""

    outcome: str
    result: dict[str, Any]  # equal on every machine, for JSON
    machine: dict[str, Any] = field(default_factory=dict)  # process.this_machine
    seconds: float = 0.0


_ONE_AT_A_TIME = threading.Lock()  # a row has all threads of the process, and one model is loaded once


@steady
def perform(task: Task) -> Outcome:
    """Run a task in this process. Whatever goes wrong in it is an outcome.

    Raises DifferentBitsError where the process does not pass the selftest, before its first task.
    """
    with _ONE_AT_A_TIME:
        check_selftest()
        start = time.perf_counter()
        try:
            outcome, result = OPERATIONS[task.operation](task)
        except Exception as error:  # one row's error, of whatever kind, is not the end of the others
            outcome, result = ERROR, {"error": f"{type(error).__name__}: {error}"}
        return Outcome(outcome, result, this_machine(), time.perf_counter() - start)


def profile_of(operation: str, dialect: str, precision: str) -> Profile:
    """What a task computes in, or what is declared of the engine that it judges. Raises OptionError."""
    if operation != "check":
        return Profile(dialect_to_compute(dialect or EXACT.name, precision or None), None)
    return Profile.declared(dialect, precision or None)


def _profile(task: Task) -> Profile:
    return profile_of(task.operation, task.dialect, task.precision)


def _logits(task: Task) -> tuple[str, dict[str, Any]]:
    logits = compute_logits(model_of(task.model), task.ids[None], dialect=_profile(task).dialect)[0]
    return OK, {"sha256": digest(logits)}


def _nll(task: Task) -> tuple[str, dict[str, Any]]:
    values = token_nll(model_of(task.model), task.ids, dialect=_profile(task).dialect)
    mean = float(values.mean())
    fine = task.at_most is None or mean <= task.at_most
    return OK if fine else WRONG, {"sha256": digest(values), "mean_nll": mean if math.isfinite(mean) else None}


def _check(task: Task) -> tuple[str, dict[str, Any]]:
    profile = _profile(task)
    report = check(model_of(task.model), task.ids, task.dump, profile.dialect, profile.precision)
    outcome = INVALID if report.verdict == Verdict.INVALID else OK if report.verdict <= Verdict[task.accept] else WRONG
    return outcome, {"verdict": report.verdict.name, "reason": report.reason}


OPERATIONS: dict[str, Callable[[Task], tuple[str, dict[str, Any]]]] = {"logits": _logits, "nll": _nll, "check": _check}
