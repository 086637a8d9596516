"""A sweep in this process: rows, verdicts, what goes on after a stop, and tables."""

import csv
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import printed_json
import pytest
from command_line import TINY, sha256
from sweep_plans import PLAN, written

from bitnet_np import BITNET_CPP, Error, forward_full, load
from bitnet_np.base.errors import OptionError
from bitnet_np.cli.main import main
from bitnet_np.generation.nll import token_nll
from bitnet_np.kernels import processor
from bitnet_np.sweep import tasks
from bitnet_np.sweep.plan import read_plan
from bitnet_np.sweep.run import sweep
from bitnet_np.sweep.tasks import DifferentBitsError
from bitnet_np.testing import selftest


@pytest.fixture(autouse=True)
def short_selftest(monkeypatch):
    monkeypatch.setattr(selftest, "run", partial(selftest.run, "rms_norm"))
    tasks.this_machine.cache_clear()
    yield
    tasks.this_machine.cache_clear()


def test_rows_hold_what_the_library_computes(tmp_path):
    plan = read_plan(written(tmp_path, PLAN))
    rows = sweep(plan, tmp_path / "out")
    model = load(TINY)
    for task, row in zip(plan, rows, strict=True):
        if task.operation == "logits":
            assert row["result"]["sha256"] == sha256(forward_full(model, task.ids[None])[0])
        else:
            assert row["result"]["mean_nll"] == token_nll(model, task.ids, dialect=BITNET_CPP).mean()
        assert row["outcome"] == "OK"
        assert row["machine"]["instruction path"] == processor.instruction_path()


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
    assert [row["key"] for row in seen] == [task.key for task in plan]
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


def test_dumps_are_judged(tmp_path):
    """One that is right, one that is wrong, one that cannot be compared, and one that is lost when its row is computed."""
    logits = forward_full(load(TINY), [[1, 2, 3]])[0]
    dumps = {"right": logits, "wrong": -logits, "short": logits[:2], "lost": logits * 2}  # a sign explains itself at once
    runs = []
    for name, dump in dumps.items():
        np.save(tmp_path / f"{name}-tiny-short.npy", dump)
        runs.append(f'\n[[run]]\ndo = "check"\ntokens = ["short"]\ndump = "{name}-{{model}}-{{tokens}}.npy"\naccept = "SAME_BITS"\n')
    (tmp_path / "tiny.gguf").symlink_to(TINY)
    text = PLAN.partition("[[run]]")[0].replace(json.dumps(TINY), '"tiny.gguf"') + "".join(runs)
    plan = read_plan(written(tmp_path, text))
    (tmp_path / "lost-tiny-short.npy").unlink()
    rows = sweep(plan, tmp_path / "out")
    assert [row["outcome"] for row in rows] == ["OK", "WRONG", "INVALID", "ERROR"]
    assert rows[0]["result"]["verdict"] == "SAME_BITS"
    assert "no such file or folder" in rows[3]["result"]["error"]
    summary = (tmp_path / "out" / "summary.md").read_text("utf-8").splitlines()
    assert summary[:3] == ["# bitnet-np sweep", "", "1 passed, 1 failure, 2 error"]
    assert [line.split(" | ")[1:] for line in summary[6:]][2][0] == "error"
    assert rows[1]["result"]["reason"].partition(";")[0] in summary[6]
    suite = ElementTree.fromstring((tmp_path / "out" / "junit.xml").read_text("utf-8"))
    assert [case[0].tag for case in suite] == ["system-out", "failure", "error", "error"]
    assert "no such file or folder" in suite[3][0].get("message")
    again = []
    sweep(plan, tmp_path / "out", on_row=again.append)
    assert [row["outcome"] for row in again] == ["ERROR"]


def test_the_command_prints_rows_and_its_table_holds_no_formulas(tmp_path, capsys):
    text = f'[models]\nm = {json.dumps(TINY)}\n[tokens]\n"=1+1" = {{ ids = [1, 2] }}\n[[run]]\ndo = "nll"\nat_most = 0.1\n'
    command = ["sweep", str(written(tmp_path, text)), "--out", str(tmp_path / "out")]
    assert main([*command, "--json"]) == 1
    out = capsys.readouterr().out
    printed_json.check("sweep", out)
    *rows, summary = map(json.loads, out.splitlines())
    assert [row["outcome"] for row in rows] == ["WRONG"]
    assert summary["outcomes"] == {"WRONG": 1}
    assert main(command) == 1
    assert "1 rows: 1 WRONG" in capsys.readouterr().out
    with open(tmp_path / "out" / "results.csv", newline="") as file:
        assert [row["tokens"] for row in csv.DictReader(file)] == ["'=1+1"]


def test_another_file_under_the_models_path_is_an_error(tmp_path):
    """As on a machine whose copy of the model is not the one that was meant."""
    whole = Path(TINY).read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole)
    plan = read_plan(written(tmp_path, '[models]\nm = "m.gguf"\n[tokens]\nt = { ids = [1, 2] }\n[[run]]\ndo = "logits"\n'))
    (tmp_path / "m.gguf").write_bytes(whole[:-1] + b"\0")
    (row,) = sweep(plan, tmp_path / "out")
    assert "expected " + plan[0].model.sha256 in row["result"]["error"]


def test_a_machine_that_fails_the_selftest_gets_no_work(tmp_path, monkeypatch):
    monkeypatch.setattr(selftest, "run", lambda: iter([("rms_norm", True), ("attend", False)]))
    with pytest.raises(DifferentBitsError, match=r"selftest failed on .*: attend"):
        sweep(read_plan(written(tmp_path, PLAN)), tmp_path / "out")
    assert main(["sweep", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out" / "rows.jsonl").exists()


def test_a_folder_belongs_to_one_sweep_until_its_process_ends(tmp_path):
    plan, out = read_plan(written(tmp_path, PLAN)), tmp_path / "out"
    out.mkdir()
    hold = f"from pathlib import Path; from bitnet_np.sweep.run import held\nwith held(Path({str(out)!r})): print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(OptionError, match="another sweep writes its results there"):
            sweep(plan, out)
        assert sorted(path.name for path in out.iterdir()) == ["lock"]
        other.kill()
    assert len(sweep(plan, out)) == len(plan)
