"""examples/engines: the engine in C is right, and with its bug the hunt says where it is wrong."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from checkers import needs_compiler

import bitnet_np as bn
from bitnet_np.testing.space import Case, fitted, model_of

ENGINES = Path(__file__).parents[2] / "examples" / "engines"
LIKE = model_of(fitted(Case()))


@pytest.mark.parametrize("flags", [[], ["-DTAIL"]])
def test_an_engine_in_c(flags, tmp_path, monkeypatch):
    needs_compiler(tmp_path, "cc")
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC"]
    subprocess.run(["cc", *strict, *flags, ENGINES / "engine.c", "-o", tmp_path / "engine.so", "-lm"], check=True)
    monkeypatch.setenv("ENGINE", str(tmp_path))
    monkeypatch.syspath_prepend(ENGINES)
    monkeypatch.delitem(sys.modules, "c_engine", raising=False)
    found = bn.hunt(importlib.import_module("c_engine").engine, LIKE, runs=75, time=600, single=True)
    assert "window 8" in found.refused
    if not flags:
        assert (found.findings, found.exit_code) == ([], 0)
        return
    finding = found.findings[0]
    assert finding.outcome.group == "numbers"
    assert any(n % 16 for n in (finding.case.width, finding.case.ffn, finding.case.head_dim))
    assert {atom.step for atom in finding.condition} & {16}, finding.where


def test_adaptors_are_small():
    assert {path.name for path in ENGINES.glob("*_engine.py") if len(path.read_text("utf-8").splitlines()) > 40} == set()
