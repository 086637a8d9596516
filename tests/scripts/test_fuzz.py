"""The fuzzer: what it begins with is sound, it finds what is planted, and each finding is repeated by its number."""

import re
import signal
import sys
import time

import fuzz_gguf
import numpy as np
import pytest
from fuzzing import cases, seeds

from bitnet_np.base.errors import UnsupportedError
from bitnet_np.files.load import open_model
from bitnet_np.traces.formats import FORMATS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return seeds.write_seeds(tmp_path_factory.mktemp("seeds"))


@pytest.fixture(scope="module")
def sound(folder):
    return cases.read_seeds(sorted(folder.iterdir()))


def test_what_is_changed_is_sound(sound, tmp_path):
    models = [seed for seed in sound if seed.document]
    assert len(models) > 80
    assert {"parts-0", "parts-1"} <= {seed.name for seed in models}
    for n, seed in enumerate(models):
        cases.write(tmp_path / seed.name, seed.with_first(seed.document.bytes()))  # taken apart and put together again
        cases.use_model(tmp_path / seed.name, n)  # by one of three dialects, and another in the next family
    folders = [seed for seed in sound if seed.kind == "folder"]
    assert len(folders) > 10
    for seed in folders:
        cases.write(tmp_path / seed.name, seed.files)
        for n in (0, 1, 2):
            cases.use_model(tmp_path / seed.name, n)
    dumps = {seed.name: seed.files for seed in sound if seed.kind == "dump"}
    assert set(dumps) == {"packed", "steps", "steps-in-names", "modules", *FORMATS} - {"torch", "bitnet-rs"}  # which are read, not written
    for name, files in dumps.items():
        cases.write(tmp_path / name, files)
        for n in (1, 2):  # of a format that is told, and of one to be found out
            if name == "bitnet-rs-lines":
                with pytest.raises(UnsupportedError, match="hold hashes and no values"):
                    cases.use_dump(tmp_path / name, n)
            else:
                cases.use_dump(tmp_path / name, n)


def test_cases_depend_on_their_number_alone_and_reach_the_kernels(sound, tmp_path):
    outcomes = [cases.attempt(sound, n, tmp_path) for n in range(150)]
    assert set(outcomes) == {"ran", "refused"}
    assert outcomes.count("ran") > 5
    for n in (3, 77):
        assert cases.case(sound, n) == cases.case(sound, n)
    assert cases.case(sound, 3)[1] != cases.case(sound, 4)[1]


def test_cases_run_in_processes_of_their_own(folder, capsys):
    assert fuzz_gguf.main(["--cases", "60", "--jobs", "2", "--seed", "7", str(folder / "llama-Q4_K.gguf")]) == 0
    out, err = capsys.readouterr()
    assert re.match(r"60 cases: \d+ ran, \d+ refused, 0 findings, ", out)
    assert err == ""  # no bar where nobody watches


def test_it_stops_when_told(folder, capsys):
    assert fuzz_gguf.main(["--seconds", "-1", "--jobs", "0", str(folder / "llama-Q4_K.gguf")]) == 0
    assert capsys.readouterr().out.startswith("0 cases")


def test_a_finding_is_reported_kept_and_repeated(folder, monkeypatch, capsys, tmp_path):
    def fragile(path):
        if path.read_bytes()[-1] % 4 == 0:
            raise KeyError("planted")
        return open_model(path)

    monkeypatch.setattr(cases, "open_model", fragile)
    file = str(folder / "llama-ternary.gguf")
    assert fuzz_gguf.main(["--cases", "40", "--jobs", "0", "--save", str(tmp_path), file]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "planted" in line)
    number, path = re.fullmatch(rf"KeyError: 'planted' <- fuzz_gguf\.py --seed (\d+) --cases 1 {file} \(kept in (.+)\)", line).groups()
    (kept,) = (tmp_path / number).rglob("t.gguf")
    assert str(kept).startswith(path)
    assert kept.read_bytes()[-1] % 4 == 0
    assert fuzz_gguf.main(["--seed", number, "--cases", "1", "--jobs", "0", file]) == 1
    assert "KeyError: 'planted'" in capsys.readouterr().out


@pytest.mark.parametrize(("more", "outcome"), [(-(10 << 20), "ran"), (10 << 20, "took [0-9,]{10} bytes")])
def test_memory_beyond_the_limit_is_a_finding(sound, monkeypatch, tmp_path, more, outcome):
    for name in ("use_model", "use_dump"):
        monkeypatch.setattr(cases, name, lambda folder, n: np.empty(cases.MEMORY + more, np.uint8))
    assert re.fullmatch(outcome, cases.attempt(sound, 0, tmp_path))


@pytest.mark.parametrize(("times", "outcome"), [(1, "ran"), (2, "ran"), (3, "took 0.2 s")])  # it may compile, or be slow to trace
def test_what_takes_long_every_time_is_a_finding(sound, monkeypatch, tmp_path, times, outcome):
    calls = []

    def slow(folder, n):
        calls.append(n)
        end = time.process_time() + (0.2 if len(calls) <= times else 0)
        while time.process_time() < end:
            pass

    for name in ("use_model", "use_dump"):
        monkeypatch.setattr(cases, name, slow)
    monkeypatch.setattr(cases, "SECONDS", 0.1)
    assert cases.attempt(sound, 0, tmp_path) == outcome
    assert len(calls) == (2 if times == 1 else 3)


# --- processes that end badly ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
for n in range(int(sys.argv[1]), 6):
    print(f'[{n}, ""]', flush=True)
    BAD
    print(f'[{n}, "ran"]', flush=True)
"""


def supervised(bad, tmp_path):
    said, script = [], SCRIPT.replace("BAD", bad)
    fuzz_gguf.supervise(lambda first: [sys.executable, "-c", script, str(first)], 0, 1, tmp_path / "log", lambda *what: said.append(what))
    return said


def test_a_crash_is_reported_and_the_rest_goes_on(tmp_path):
    said = dict(supervised("if n in (2, 3): os.abort()", tmp_path))
    assert sorted(said) == list(range(6))
    assert all(said[n].startswith(f"ended its process with {-signal.SIGABRT}") for n in (2, 3))
    assert [said[n] for n in (0, 1, 4, 5)] == ["ran"] * 4


def test_a_hang_is_ended_and_reported(tmp_path):
    bad = "import faulthandler; faulthandler.dump_traceback_later(0.3, exit=True); time.sleep(1000 if n == 4 else 0)"
    said = dict(supervised(bad, tmp_path))
    assert said[4].startswith("ended its process with 1: 'Timeout (0:00:00.3")
    assert [said[n] for n in (0, 1, 2, 3, 5)] == ["ran"] * 5


def test_a_process_that_cannot_start_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="ended with 1 outside of any case"):
        supervised("pass\nsys.exit('no')", tmp_path)
