"""What one row of a sweep does. A task says all that its result depends on, and runs in any process that has the package."""

import hashlib
import json
import math
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..engine.dialects import DIALECTS, Dialect
from ..engine.forward_pass import compute_logits, forward_full
from ..generation.nll import token_nll
from ..judge.check import check
from ..judge.precision import Precision, Profile
from ..judge.verdict import Verdict
from ..kernels.float_state import steady
from ..testing.selftest import digest
from .command import TimeLimitError, run_command
from .process import ModelFile, check_selftest, model_of, this_machine

OK, WRONG, INVALID, ERROR, TIMEOUT, KILLED = "OK", "WRONG", "INVALID", "ERROR", "TIMEOUT", "KILLED"
"""Outcomes. ERROR: an error was raised. TIMEOUT: a command ran too long. KILLED: the process died."""


@dataclass(frozen=True, eq=False)
class Task:
    """A row to be computed."""

    operation: str  # a name of OPERATIONS
    model: ModelFile
    tokens: str  # a name for people
    ids: NDArray[np.int64]  # [T]
    dialect: str = ""  # of DIALECTS; for check and engine of PROFILES, or "" for types read off the dump
    precision: str = ""
    accept: str = Verdict.NARROW.name  # check, engine: the worst verdict that is fine
    at_most: float | None = None  # nll: the largest mean that is fine
    dump: str = ""  # check: the dump to judge. engine: what the command leaves, with {dump} for its folder's file
    dump_sha256: str = ""
    command: tuple[str, ...] = ()
    program_sha256: str = ""
    seconds: float = 600.0  # the time limit of the command
    dumps: str = ""  # the folder where dumps of commands stay; "": they are deleted

    @property
    def key(self) -> str:
        """SHA-256 of all that the result depends on."""
        facts = asdict(self) | {"ids": digest(self.ids.astype("<i8")), "version": __version__}
        facts["model"] = {name: value for name, value in facts["model"].items() if name != "path"}
        for name in ("tokens", "dumps") + (("dump",) if self.dump_sha256 else ()):  # names, not contents
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
        except TimeLimitError as error:
            outcome, result = TIMEOUT, {"error": str(error)}
        except Exception as error:  # one row's error, of whatever kind, is not the end of the others
            outcome, result = ERROR, {"error": f"{type(error).__name__}: {error}"}
        return Outcome(outcome, result, this_machine(), time.perf_counter() - start)


def tensor_digests(task: Task) -> list[tuple[str, str]]:
    """The name and the digest of each tensor of the forward pass of a task, in their order; of its first context for long texts."""
    model, digests = model_of(task.model), []

    def record(name: str, layer: int | None, array: NDArray) -> None:
        digests.append((name if layer is None else f"{name}-{layer}", digest(array)))

    with _ONE_AT_A_TIME:
        logits = forward_full(model, task.ids[None, : model.config.context], dialect=_profile(task).dialect, record=record)
    return [*digests, ("logits", digest(logits))]


def dialect_of(name: str, precision: str) -> Dialect:
    """The dialect to compute in: of DIALECTS, with the KV cache of a precision such as kv=q8_0. Raises OptionError."""
    dialect = DIALECTS[name or "exact"]
    return dialect.with_cache(Precision.parse(precision).kv) if precision else dialect


def _profile(task: Task) -> Profile:
    if task.operation in ("logits", "nll"):
        return Profile(dialect_of(task.dialect, task.precision), None)
    return Profile.of(task.dialect, task.precision or None)


def _logits(task: Task) -> tuple[str, dict[str, Any]]:
    logits = compute_logits(model_of(task.model), task.ids[None], dialect=_profile(task).dialect)[0]
    return OK, {"sha256": digest(logits)}


def _nll(task: Task) -> tuple[str, dict[str, Any]]:
    values = token_nll(model_of(task.model), task.ids, dialect=_profile(task).dialect)
    mean = float(values.mean())
    fine = task.at_most is None or mean <= task.at_most
    return OK if fine else WRONG, {"sha256": digest(values), "mean_nll": mean if math.isfinite(mean) else None}


def _check(task: Task, dump: str = "") -> tuple[str, dict[str, Any]]:
    profile = _profile(task)
    report = check(model_of(task.model), task.ids, dump or task.dump, profile.dialect, profile.precision)
    outcome = INVALID if report.verdict == Verdict.INVALID else OK if report.verdict <= Verdict[task.accept] else WRONG
    return outcome, {"verdict": report.verdict.name, "reason": report.reason}


def _engine(task: Task) -> tuple[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="bitnet_np-") as temporary:
        folder = Path(task.dumps, task.key) if task.dumps else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        tokens_file = folder / "tokens.npy"
        np.save(tokens_file, task.ids)
        names = {
            "{model}": task.model.path,
            "{tokens}": ",".join(map(str, task.ids.tolist())),
            "{tokens_file}": str(tokens_file),
            "{dump}": str(folder / "dump"),
        }
        run_command([replaced(part, names) for part in task.command], folder, task.seconds)
        return _check(task, replaced(task.dump, names))


def replaced(text: str, names: dict[str, str]) -> str:
    """A text with each {name} of `names` replaced, once. Nothing else in it has a meaning."""
    return re.sub(r"\{\w*\}", lambda match: names.get(match[0], match[0]), text)


OPERATIONS: dict[str, Callable[[Task], tuple[str, dict[str, Any]]]] = {"logits": _logits, "nll": _nll, "check": _check, "engine": _engine}
