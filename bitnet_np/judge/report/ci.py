"""Verdicts in the forms that continuous integration reads: JUnit's XML, TAP 14, GitHub's annotations, and tables in Markdown."""

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from ...base.tables import printable
from ..verdict import Verdict
from .report import Report, next_step


class Case(NamedTuple):
    """What is reported on its own: a dump, a sequence of it, a tensor, or a row of a sweep."""

    name: str
    failed: str  # "" if it passed, "failure" if it is wrong, "error" if it cannot be judged
    text: str


def cases_of(report: Report, name: str) -> list[Case]:
    """The dump as a whole by this name, with the next step, and then each of its sequences, or its tensors and its logits as such."""
    step = next_step(report)
    cases = [_case(name, report.verdict, report.headline + f"; next: {step}" * bool(step))]
    if report.sequences:
        return cases + [_case(f"sequence {b}", one.verdict, one.headline) for b, one in enumerate(report.sequences)]
    cases += [_case(o.place, o.verdict, f"{o.verdict}: {o.hypothesis or o.reason}".removesuffix(": ")) for o in report.operations]
    logits = report.logits
    return cases + ([_case("logits as such", logits.verdict, f"{logits.verdict}: {logits.reason}")] if logits is not None else [])


def _case(name: str, verdict: Verdict, text: str) -> Case:
    failed = "" if verdict.passed else "error" if verdict == Verdict.INVALID else "failure"
    return Case(printable(name), failed, printable(text))


def junit(suite: str, cases: Sequence[Case]) -> str:
    """JUnit's XML."""
    number, name = Counter(case.failed for case in cases), escape(printable(suite))
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    lines.append(f'<testsuite name="{name}" tests="{len(cases)}" failures="{number["failure"]}" errors="{number["error"]}">')
    for case in cases:
        text = escape(case.text)
        said = f'<{case.failed} message="{text}">{text}</{case.failed}>' if case.failed else f"<system-out>{text}</system-out>"
        lines.append(f'<testcase classname="{name}" name="{escape(case.name)}">{said}</testcase>')
    return "\n".join([*lines, "</testsuite>"])


def tap(suite: str, cases: Sequence[Case]) -> str:
    """The Test Anything Protocol, version 14."""
    lines = ["TAP version 14", f"1..{len(cases)}"]
    for n, case in enumerate(cases, 1):
        name = case.name.replace("\\", "\\\\").replace("#", "\\#")
        lines.append(f"{'not ' * bool(case.failed)}ok {n} - {name}")
        lines += [f"  ---\n  message: {json.dumps(case.text)}\n  ..."] * bool(case.failed)
    return "\n".join(lines)


def github(suite: str, cases: Sequence[Case]) -> str:
    """A command of GitHub Actions, which makes an annotation of the first case."""
    case = cases[0]
    title, text = (text.replace("%", "%25") for text in (suite, case.text))
    title = title.replace(":", "%3A").replace(",", "%2C")
    return f"::{'error' if case.failed else 'notice'} title={title}::{text}"


def markdown(suite: str, cases: Sequence[Case]) -> str:
    """A heading, the number of cases of each kind, and a table of those that did not pass."""
    bad = [case for case in cases if case.failed]
    number = Counter(case.failed or "passed" for case in cases)
    lines = [f"# {suite}", "", ", ".join(f"{number[kind]} {kind}" for kind in ("passed", "failure", "error") if number[kind]) or "nothing"]
    lines += ["", "| what | kind | why |", "|---|---|---|"] * bool(bad)
    lines += [f"| {_cell(case.name)} | {case.failed} | {_cell(case.text)} |" for case in bad]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that is no markup in a cell."""
    return escape(text, quote=False).replace("|", "\\|").replace("`", "\\`")
