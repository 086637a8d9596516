"""The texts that the judge can say of a mistake, and those that tests made it say: no text is without a fault that brings it about."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SAID = set[str]()  # filled by tests/judge/conftest.py
READINGS = ("readings/*.py", "words.py")
MISTAKES = ("mistakes/*.py", *(f"edits/{name}.py" for name in ("blocks", "caches", "quantisers", "weights")))


def never_said(said: Iterable[str]) -> list[str]:
    """The texts of readings and of known mistakes that are in nothing that was said: file, line and text."""
    everything = "\n".join(said)
    return [place for place, text in patterns(*READINGS, *MISTAKES).items() if not text.search(everything)]


def patterns(*files: str) -> dict[str, re.Pattern[str]]:
    """The texts of two words or more in sources of the judge: file, line and text -> what finds it where it is said."""
    return {
        f"{path.name}:{line}: {'...'.join(parts)}": re.compile(".*?".join(map(re.escape, parts)))
        for path in sorted(path for file in files for path in (TESTS.parent / "bitnet_np" / "judge").glob(file))
        for line, parts in _texts(ast.parse(path.read_text("utf-8")))
    }


def _texts(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Yields the strings of a module that are neither docstrings nor annotations: the line, and what stands between the braces."""
    from bitnet_np.judge.edits.kinds import KINDS
    from bitnet_np.judge.law.functions import FUNCTIONS

    nodes = list(ast.walk(tree))
    apart = [node.value for node in nodes if isinstance(node, ast.Expr)]
    apart += [node.returns for node in nodes if isinstance(node, ast.FunctionDef) and node.returns]
    apart += [part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values]
    for node in nodes:
        if node in apart:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if text in FUNCTIONS or any(part.partition(": ")[0] in KINDS for part in text.split(" + ")):
            continue  # a kind of step, or the name of an edit, which a table gives another text
        parts = re.split(r"\{[^}]*\}", text)
        if any(" " in part.strip() and re.search(r"\w", part) for part in parts):
            yield node.lineno, parts


def all_tests_ran(session: pytest.Session) -> bool:
    """Whether all tests of the judge ran, whatever failed: a failure does not hide a text that no test brings about."""
    config = session.config
    some = any(config.getoption(name, None) for name in ("keyword", "markexpr", "deselect", "lf", "collectonly"))
    paths = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    whole = any(path in (TESTS, TESTS / "judge", TESTS.parent) for path in paths)
    return whole and not some and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
