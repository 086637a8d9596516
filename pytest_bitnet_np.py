"""The pytest plugin of bitnet_np: the fixture `oracle`, and the option --oracle-report for the reports behind its assertions.

pytest loads this module in every run of an environment that bitnet_np is installed in. So it lies outside the package, whose import
compiles and loads kernels, and imports it only when a test asks for the fixture.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from bitnet_np import Model, Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --oracle-report."""
    parser.getgroup("bitnet_np").addoption(
        "--oracle-report",
        type=Path,
        metavar="DIR",
        help="write a report of every assertion of the fixture `oracle` to this folder, as JSON and as HTML",
    )


@pytest.fixture
def oracle(request: pytest.FixtureRequest) -> Oracle:
    """bitnet_np's judge of an inference engine: `oracle.assert_engine(model, tokens, dump)`."""
    return Oracle(request.node.nodeid, request.config.getoption("--oracle-report"), request.getfixturevalue("_oracle_models"))


@pytest.fixture(scope="session")
def _oracle_models() -> dict[Path, Model]:
    """The models that were loaded from files."""
    return {}


class Oracle:
    """What the fixture `oracle` gives to a test."""

    def __init__(self, test: str, folder: Path | None, models: dict[Path, Model]) -> None:
        self._test, self._folder, self._models, self._written = test, folder, models, 0

    def model(self, path: str | Path) -> Model:
        """The model of a GGUF file or a Hugging Face folder, loaded once a session. Fails the test in one line if there is none."""
        from bitnet_np import Error, load

        key = Path(path).resolve()
        if key not in self._models:
            try:
                self._models[key] = load(path)  # not what links lead to: parts of a model in a cache are found by their names
            except Error as error:
                pytest.fail(f"no model: {error}", pytrace=False)
        return self._models[key]

    def assert_engine(self, model: Model | str | Path, tokens: Any, dump: Any, **options: Any) -> Report:
        """Fail the test unless the dump of an engine is right, and say which operation is wrong and why.

        model: a Model, or a path. tokens, dump and options: those of `bitnet_np.check`, as in dialect="bitnet.cpp". Returns the report of
        a right dump.
        """
        from bitnet_np import check
        from bitnet_np.judge.detail import Details

        loaded = self.model(model) if isinstance(model, str | Path) else model
        details = None if self._folder is None else Details()
        report = check(loaded, tokens, dump, details=details, **options)
        files = "" if self._folder is None else self._write(report, self._folder, details)
        if not report:
            caller = sys._getframe(1)
            pytest.fail(f"{_message(report)}{files}\n{caller.f_code.co_filename}:{caller.f_lineno}", pytrace=False)
        return report

    def hunt(self, engine: Any, like: Model | str | Path | None = None, **options: Any) -> Any:
        """Fail the test if a hunt makes the engine fail, and say where; returns the hunt otherwise.

        engine, like and options: those of `bitnet_np.hunt`, as in time=20.
        """
        from bitnet_np import hunt
        from bitnet_np.testing.space import in_words

        loaded = self.model(like) if isinstance(like, str | Path) else like
        result = hunt(engine, loaded, **options)
        if result.exit_code:
            lines = [f"{finding.where}\nsmallest: {in_words(finding.case)}" for finding in result.findings] + result.notes
            caller = sys._getframe(1)
            pytest.fail("\n".join([*lines, f"{caller.f_code.co_filename}:{caller.f_lineno}"]), pytrace=False)
        return result

    def _write(self, report: Report, folder: Path, details: Any) -> str:
        """Write the report to DIR/<test>.json and .html, a number behind the second of a test; returns a line that says where it is."""
        from bitnet_np.kernels import machine

        self._written += 1
        words = re.sub(r"[^\w.-]+", "-", self._test.replace("::", "-")).strip("-.")[-80:]
        digest = hashlib.sha256(self._test.encode()).hexdigest()[:8]  # two tests may have the same words
        path = folder / f"{words}-{digest}{f'-{self._written}' if self._written > 1 else ''}"
        folder.mkdir(parents=True, exist_ok=True)
        page, plain = path.with_name(path.name + ".html"), path.with_name(path.name + ".json")
        page.write_text(report.html(details, {"test": self._test, **machine.facts()}), "utf-8", "backslashreplace")
        plain.write_text(json.dumps({"test": self._test, **report.as_dict()}, indent=1) + "\n", "utf-8")
        return f"\nreport: {page}"


def _message(report: Report) -> str:
    """The first wrong operation and its cause, and what else is wrong, in a few lines."""
    bad = [o for o in report.operations if not o.verdict.passed]
    first = report.first_wrong
    lines = [report.headline]
    if first is not None and first.hypothesis and first.reason:
        lines.append(f"{first.place}: {first.reason}")
    if len(bad) > 1:
        places = ", ".join(o.place for o in bad[1:5])
        lines.append(f"also {places}" + (f" and {len(bad) - 5} more" if len(bad) > 5 else ""))
    if report.logits is not None and not report.logits.verdict.passed and report.logits.reason not in report.reason:
        lines.append(f"logits: {report.logits.reason}")
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])
