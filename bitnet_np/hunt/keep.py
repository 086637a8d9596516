"""A failing case in a folder: the model, the tokens, what the engine gave, a report, and a test that runs it again."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..base.blas import one_thread
from ..base.errors import FileFormatError, shown
from ..files.load import load
from ..files.safetensors_file import json_of
from ..judge.report.report import Report
from ..judge.verdict import Verdict
from ..kernels.machine import facts as machine_facts
from ..testing.models import write_gguf
from ..testing.space import FIELDS, Case, in_words
from .company import calls_alone, difference
from .engine import Command, Engine, Function, engine_of, write_tokens
from .outcome import Judge, Outcome
from .run import Finding, Runner, call_of

_TEST = '''"""{what}

{words}
"""

from pathlib import Path

from bitnet_np.hunt import again{imported}


def test_the_case_is_right():
    outcome = again(Path(__file__).parent{engine})
    assert not outcome.failed, outcome.text
'''


def keep(runner: Runner, finding: Finding, folder: Path) -> Finding:
    """Write a finding to a folder, which gets a name of its own within `folder`; returns it with that name."""
    number = 1 + sum(1 for path in folder.glob("case-*")) if folder.is_dir() else 1
    own = folder / f"case-{number}"
    own.mkdir(parents=True)
    case, engine = finding.case, runner.engine
    write_gguf(own / "model.gguf", runner.model(case))
    suffix = (engine.suffix or ".npy") if isinstance(engine, Command) else ".json"
    write_tokens(own / f"tokens{suffix}", call_of(case).tokens)
    for b, (_, rows) in enumerate(finding.outcome.rows):
        np.save(own / f"out{f'-{b}' if b else ''}.npy", rows)
    facts = {
        "engine": None if isinstance(engine, Function) else engine.template,
        "case": vars(case),
        "where": finding.where,
        "outcome": finding.outcome.kind,
        "text": finding.outcome.text,
        "exact": runner.even(case),
    }
    (own / "case.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    report = Report(Verdict.INVALID, f"{finding.what}: {finding.outcome.text}") if finding.report is None else finding.report
    about = {"hunted": finding.where, "case": in_words(case), **machine_facts()}
    (own / "report.html").write_text(report.html(None, about), "utf-8", "backslashreplace")
    imported, argument = "", ""
    if isinstance(engine, Function):
        name, module = getattr(engine.function, "__qualname__", "engine"), getattr(engine.function, "__module__", "__main__")
        imported, argument = f"\nfrom {module} import {name.partition('.')[0]}", f", {name}"
    text = _TEST.format(what=_plain(finding.where), words=_plain(in_words(case)), imported=imported, engine=argument)
    (own / "test_case.py").write_text(text, "utf-8")
    return replace(finding, folder=own)


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''")


def kept_cases(folder: Path) -> list[Case]:
    """The cases of earlier hunts in a folder. Raises FileFormatError for one that is damaged."""
    return [read_case(path.parent)[0] for path in sorted(folder.glob("case-*/case.json"))]


def read_case(folder: Path) -> tuple[Case, dict[str, Any]]:
    """The case of a folder, and what is written beside it. Raises FileFormatError."""
    path = folder / "case.json"
    content = json_of(path, 1 << 20)
    values = content.get("case") if isinstance(content, dict) else None
    kinds = {field.name: type(getattr(Case(), field.name)) for field in fields(Case)}
    if not isinstance(values, dict) or values.keys() != set(FIELDS) or any(type(values[name]) is not kinds[name] for name in FIELDS):
        raise FileFormatError(f"{path}: {shown(values)} is no case, expected what a hunt writes")
    return Case(**values), content


def again(folder: Path, engine: Engine | Any = None, judge: Judge = Judge()) -> Outcome:  # noqa: B008 - frozen
    """Run the case of a folder again. engine: another one than the folder's command, or the function. Raises FileFormatError."""
    case, content = read_case(folder)
    engine = engine_of(content.get("engine") if engine is None else engine)
    if isinstance(engine, Command) and not engine.suffix:
        engine = replace(engine, suffix=next((path.suffix for path in folder.glob("tokens.*")), ".npy"))
    calls = [call_of(case), *(calls_alone(case) if content.get("outcome") == "call" else ())]
    with one_thread():
        runner, model, exact = Runner(engine, None, judge), load(folder / "model.gguf"), content.get("exact") is True
        outcome, *alone = [runner.run_model(model, call, exact) for call in calls]
        return difference(outcome, alone, model, judge.dialect) if alone else outcome
