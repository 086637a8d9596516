"""A sweep in this process: rows, verdicts, what goes on after a stop, and tables."""

import csv
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import printed_json
import pytest
from command_line import TINY, sha256
from sweep_plans import PLAN, engine_run, written

from bitnet_np import BITNET_CPP, Error, forward_full, load
from bitnet_np.base.errors import OptionError
from bitnet_np.cli.main import main
from bitnet_np.generation.nll import token_nll
from bitnet_np.sweep import process
from bitnet_np.sweep.plan import read_plan
from bitnet_np.sweep.process import DifferentBitsError
from bitnet_np.sweep.run import sweep
from bitnet_np.testing import selftest

ENGINE = "import sys, numpy as np; np.save(sys.argv[2], np.load(sys.argv[1]) * np.float32(sys.argv[3]))"  # a sign explains itself at once


@pytest.fixture(autouse=True)
def short_selftest(monkeypatch):
    monkeypatch.setattr(selftest, "run", partial(selftest.run, "rms_norm"))
    process.this_machine.cache_clear()
    yield
    process.this_machine.cache_clear()


def test_rows_hold_what_the_library_computes(tmp_path):
    plan = read_plan(written(tmp_path, PLAN))
    summary = sweep(plan, tmp_path / "out")
    model = load(TINY)
    for task, row in zip(plan.tasks, summary.rows, strict=True):
        if task.operation == "logits":
            assert row["result"]["sha256"] == sha256(forward_full(model, task.ids[None])[0])
        else:
            assert row["result"]["mean_nll"] == token_nll(model, task.ids, dialect=BITNET_CPP).mean()
    assert (summary.exit_code, summary.outcomes, summary.repeated) == (0, {"OK": 13}, 0)
    assert len(summary.machines) == 1


def test_a_sweep_that_was_stopped_goes_on(tmp_path):
    plan, out, seen = read_plan(written(tmp_path, PLAN)), tmp_path / "out", []

    def stop(row):
        seen.append(row)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(plan, out, on_row=stop)
    with open(out / "rows.jsonl", "ab") as file:
        file.write(b'{"key": "half a row')
    sweep(plan, out, on_row=seen.append)
    assert [row["key"] for row in seen] == [task.key for task in plan.tasks]
    sweep(plan, out, on_row=seen.append)
    assert len(seen) == 13
    sweep(plan, tmp_path / "whole")
    assert (out / "results.csv").read_bytes() == (tmp_path / "whole" / "results.csv").read_bytes()


@pytest.mark.parametrize("line", [b"{}\n", b"[1]\n", b"nothing\n", b"\x80\x04K\x01.\n", b"[" * (1 << 20)])
def test_files_of_rows_are_not_trusted(tmp_path, line):
    plan, out = read_plan(written(tmp_path, PLAN)), tmp_path / "out"
    out.mkdir()
    (out / "rows.jsonl").write_bytes(line)
    with pytest.raises(Error, match=r"rows\.jsonl"):
        sweep(plan, out)


def test_engines_and_dumps_are_judged(tmp_path):
    """An engine that is right, one that is wrong, one that fails, one that takes too long, and a dump that lies there."""
    logits = forward_full(load(TINY), [[1, 2, 3]])[0]
    np.save(tmp_path / "short.npy", logits)
    leaves = 'dump = "{dump}.npy"'
    runs = [engine_run(ENGINE, str(tmp_path / "short.npy"), "{dump}.npy", factor, more=leaves) for factor in ("1", "-1")]
    fails, sleeps = engine_run("raise SystemExit('no such kernel')"), engine_run("import time; time.sleep(60)", more="seconds = 0.3")
    check = '\n[[run]]\ndo = "check"\ntokens = ["short"]\ndump = "{tokens}.npy"\naccept = "SAME_BITS"\n'
    text = PLAN.partition("[[run]]")[0] + "".join([*runs, fails, sleeps, check])
    plan = read_plan(written(tmp_path, f'dumps = "kept"\n{text}'), True)
    summary = sweep(plan, tmp_path / "out")
    assert [row["outcome"] for row in summary.rows] == ["OK", "WRONG", "ERROR", "TIMEOUT", "OK"]
    assert summary.rows[0]["result"]["verdict"] == summary.rows[4]["result"]["verdict"] == "SAME_BITS"
    assert "exit code 1, expected 0: no such kernel" in summary.rows[2]["result"]["error"]
    assert "still running after 0.3 s" in summary.rows[3]["result"]["error"]
    assert summary.exit_code == 1
    np.testing.assert_array_equal(np.load(tmp_path / "kept" / plan.tasks[0].key / "dump.npy"), logits)
    again = []
    sweep(plan, tmp_path / "out", retry_failed=True, on_row=again.append)
    assert [row["outcome"] for row in again] == ["ERROR", "TIMEOUT"]


def test_the_command_prints_rows_and_its_page_escapes_them(tmp_path, capsys):
    (tmp_path / "<b>.gguf").symlink_to(TINY)
    text = '[models]\nm = "<b>.gguf"\n[tokens]\n"=1+1" = { ids = [1, 2] }\n[[run]]\ndo = "nll"\nat_most = 0.1\n'
    plan = written(tmp_path, text + engine_run("pass").replace('["short"]', '["=1+1"]'))
    command = ["sweep", str(plan), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "line 10: the plan runs commands" in capsys.readouterr().err
    assert main([*command, "--allow-commands", "--json"]) == 1
    out = capsys.readouterr().out
    printed_json.check("sweep", out)
    *rows, summary = map(json.loads, out.splitlines())
    assert [row["outcome"] for row in rows] == ["WRONG", "ERROR"]
    assert summary["outcomes"] == {"ERROR": 1, "WRONG": 1}
    assert main([*command, "--allow-commands"]) == 1
    assert "2 rows: 1 ERROR, 1 WRONG; 0 of them computed twice" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "&lt;b&gt;.gguf" in page
    assert "<b>" not in page
    with open(tmp_path / "out" / "results.csv", newline="") as file:
        assert [row["tokens"] for row in csv.DictReader(file)] == ["'=1+1"] * 2


def test_another_file_under_the_models_path_is_an_error(tmp_path):
    """As on a machine whose copy of the model is not the one that was meant."""
    whole = Path(TINY).read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole)
    plan = read_plan(written(tmp_path, '[models]\nm = "m.gguf"\n[tokens]\nt = { ids = [1, 2] }\n[[run]]\ndo = "logits"\n'))
    (tmp_path / "m.gguf").write_bytes(whole[:-1] + b"\0")
    (row,) = sweep(plan, tmp_path / "out").rows
    assert "expected " + plan.tasks[0].model.sha256 in row["result"]["error"]


def test_a_machine_that_fails_the_selftest_gets_no_work(tmp_path, monkeypatch):
    monkeypatch.setattr(selftest, "run", lambda: iter([("rms_norm", True), ("attend", False)]))
    with pytest.raises(DifferentBitsError, match=r"selftest failed on .*: attend"):
        sweep(read_plan(written(tmp_path, PLAN)), tmp_path / "out")
    assert main(["sweep", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out" / "rows.jsonl").exists()


def test_a_folder_belongs_to_one_sweep_until_its_process_ends(tmp_path):
    plan, out = read_plan(written(tmp_path, PLAN)), tmp_path / "out"
    out.mkdir()
    hold = f"from pathlib import Path; from bitnet_np.sweep.lock import held\nwith held(Path({str(out)!r})): print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(OptionError, match="another sweep writes its results there"):
            sweep(plan, out)
        assert sorted(path.name for path in out.iterdir()) == ["lock"]
        other.kill()
    assert len(sweep(plan, out).rows) == len(plan.tasks)
