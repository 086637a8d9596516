"""Engines as commands: they are run within limits, whatever they do, and so is a hunt in them. Cases are kept, and run again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import bitnet_np as bn
from bitnet_np.base.errors import FileFormatError, OptionError, ServerError
from bitnet_np.engine.dialects import EXACT
from bitnet_np.hunt import again
from bitnet_np.hunt.api import check_engine
from bitnet_np.hunt.engine import Call, Command, Ran, engine_of, failed, running
from bitnet_np.hunt.keep import read_case
from bitnet_np.hunt.outcome import Judge, definition
from bitnet_np.hunt.run import call_of
from bitnet_np.judge.options import Options
from bitnet_np.model.records import Config
from bitnet_np.servers.client import client_of
from bitnet_np.testing import write_gguf
from bitnet_np.testing.space import Case, fitted, model_of

CALL = Call((np.arange(1, 5),), 0, 1, 0)
CONFIG = Config("llama", 8, 16, 4, 1, 4, 1, 1, 4, 1e-5, 10000.0, activation="silu")

LINES = {
    "fine": "import numpy, sys; numpy.save(sys.argv[2], numpy.zeros((4, 8), 'f'))",
    "crash": "import os; os.abort()",
    "exit": "import sys; print('index out of range', file=sys.stderr); sys.exit(3)",
    "refused": "import sys; sys.exit('error: unsupported architecture')",
    "hang": "import time; time.sleep(60)",
    "size": "import sys\nwith open(sys.argv[2], 'wb') as f:\n    while True: f.write(bytes(1 << 20))",
    "invalid": "pass",
}


def command(tmp_path, line, limit=20.0, most=1 << 24):
    program = tmp_path / "engine.py"
    program.write_text(line)
    return Command(f"{sys.executable} {program} {{tokens}} {{out}} {{model}}", limit, most)


@pytest.mark.parametrize("kind", LINES)
def test_every_end_of_a_run_is_told(kind, tmp_path):
    engine = command(tmp_path, LINES[kind], 1.0 if kind == "hang" else 20.0)
    folder = tmp_path / "run"
    folder.mkdir()
    begin = time.monotonic()
    ran = engine.run(tmp_path / "model.gguf", CONFIG, CALL, folder)
    expected = {"fine": "ok", "exit": "crash"}.get(kind, kind)
    assert ran.kind == expected, ran
    assert kind != "exit" or ran.text == "exit code 3: index out of range"
    assert kind != "hang" or time.monotonic() - begin < 30
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1 << 30


@pytest.mark.parametrize("text", ["ValueError: The hidden size (64) is not a multiple of the number of heads (6)", "not implemented"])
def test_a_program_that_says_what_it_does_not_take_refuses(text):
    assert [failed(code, text).kind for code in (1, -6)] == ["refused", "crash"]


@pytest.mark.skipif(os.name == "nt", reason="processes of a session")
def test_what_an_engine_started_ends_with_it(tmp_path):
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '77']); open(sys.argv[1], 'w').write(str(p.pid))"
    with running([sys.executable, "-c", child, str(tmp_path / "pid")], tmp_path, 20, 1 << 20) as run:
        while not (ran := run.end()):
            time.sleep(0.01)
    assert ran.kind == "ok"
    number = (tmp_path / "pid").read_text()
    time.sleep(0.1)
    status = Path(f"/proc/{number}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("run {model} {tokens}", r"expected \{out\} in it"),
        ("run '{model} {tokens} {out}", "expected words as a shell takes them: No closing quotation"),
        ("run {model} {tokens} {out} {layers}", r"has \{layers\}, expected \{model\}"),
        ("run {model} {port} {tokens}", r"has \{tokens\}, expected \{model\}, \{port\}"),
        ("run {port}", r"expected \{model\} in it"),
        ("run {model} {tokens}.csv {out}", "file of tokens is '.csv', expected one of .npy, .json, .txt"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template, message):
    with pytest.raises(OptionError, match=message):
        engine_of(template)


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(OptionError, match=r"'no-such-program' cannot be run: No such file"):
        bn.hunt("no-such-program {model} {tokens} {out}", runs=1)


# --- servers ----------------------------------------------------------------------------------------------------------------------------

SERVER = """
import sys, threading
sys.path.insert(0, {support!r})
import bitnet_np as bn
from fake_server import llama_server, serving
model = bn.load(sys.argv[1])
def logits_of(ids):
    y = bn.forward_full(model, [ids])[0].copy()
    y[16:] *= {factor}
    return y
with serving(llama_server(logits_of), int(sys.argv[2])):
    threading.Event().wait()
"""
SUPPORT = str(Path(__file__).parents[1] / "support")


def server(tmp_path, line, limit=60.0):
    program = tmp_path / "server.py"
    program.write_text(line)
    return engine_of(f"{sys.executable} {program} {{model}} {{port}}", limit)


def asked(engine, tmp_path, *lengths):
    """What a run gives, and the judge's outcome."""
    folder, path, model = tmp_path / "run", tmp_path / "model.gguf", model_of(Case(length=20))
    folder.mkdir()
    write_gguf(path, model)
    call = Call(tuple(np.arange(1, 1 + n) for n in lengths), 0, 1, 0)
    ran = engine.run(path, model.config, call, folder)
    return ran, Judge().outcome(ran, model, call, definition(model, call), False)


@pytest.mark.parametrize(("factor", "kind"), [(1, "ok"), (1.5, "wrong")])
def test_a_server_is_started_asked_and_ended(factor, kind, tmp_path):
    """Two sequences at the same time; the fault is behind the shorter one's end."""
    engine = server(tmp_path, SERVER.format(support=SUPPORT, factor=factor))
    with mock.patch("bitnet_np.hunt.engine.client_of", wraps=client_of) as asked_at:
        ran, outcome = asked(engine, tmp_path, 4, 20)
    assert (ran.kind, outcome.kind) == ("ok", kind), ran
    assert [len(answer.tokens) for answer in ran.dump] == [12, 28]
    assert outcome.bad == (((1, 19),) if factor > 1 else ())
    with pytest.raises(ServerError):
        client_of(asked_at.call_args[0][0], 1).get("/props")


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        ("import sys; sys.exit('error: no memory')", "crash", "exit code 1: error: no memory"),
        ("import sys; sys.exit('error: unknown architecture')", "refused", "exit code 1: error: unknown architecture"),
        ("import time; time.sleep(60)", "hang", "no answer within 1 s"),
        ("pass", "crash", "the server ended"),
    ],
)
def test_a_server_that_does_not_answer_is_told(line, kind, text, tmp_path):
    ran, outcome = asked(server(tmp_path, line, 1.0 if kind == "hang" else 60.0), tmp_path, 4)
    assert (ran.kind, ran.text) == (kind, text)
    assert outcome.kind == kind


EXAMPLE = (Path(__file__).parents[2] / "examples" / "hunted_engine.py").read_text()
READS_TEXT = EXAMPLE.replace("np.load(tokens)", "np.loadtxt(tokens, int, ndmin=1)")
LIKE = model_of(Case())


def template_of(program, text):
    program.write_text(text)
    return f"{sys.executable} {program} {{model}} {{tokens}} {{out}} {{chunk}}"


def test_a_case_is_kept_and_run_again(tmp_path):
    """The command takes .txt, which the hunt has to find out. The test in the folder fails, and passes when the engine is right."""
    program = tmp_path / "engine.py"
    template = template_of(program, READS_TEXT)
    result = bn.hunt(template, LIKE, runs=12, time=600, out=tmp_path / "cases", workers=2)
    finding = result.findings[0]
    folder = finding.folder
    kept = "model.gguf tokens.txt out.npy case.json report.html test_case.py"
    assert {path.name for path in folder.iterdir()} - {"out-1.npy"} == {*kept.split()}
    assert finding.case.chunk > 0
    assert len((folder / "test_case.py").read_text().splitlines()) <= 14
    assert again(folder).failed
    program.write_text(READS_TEXT.replace("forget=size % 8 > 0", "forget=False"))
    assert again(folder).kind == "ok"
    done = subprocess.run(
        [sys.executable, "-m", "bitnet_np", "hunt", "--case", folder, "--json"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, {"kind": "ok", "text": ""})


@pytest.mark.parametrize("content", ["[]", "{}", '{"case": {"family": 3}}', "{"])
def test_a_damaged_case_is_refused(content, tmp_path):
    (tmp_path / "case.json").write_text(content)
    with pytest.raises(FileFormatError, match=r"case\.json"):
        read_case(tmp_path)


def test_check_runs_an_engine_and_probes_it(tmp_path):
    program, path = tmp_path / "engine.py", tmp_path / "model.gguf"
    write_gguf(path, LIKE)
    template = template_of(
        program, READS_TEXT.replace("np.concatenate(logits)", "(np.concatenate(logits) * (1.1 if len(ids) == 8 else 1))")
    )
    judge = Judge(EXACT, Options(budget=0))
    assert check_engine(template, path, bn.load(path), [np.arange(1, 8)], judge, 60).verdict == bn.Verdict.ROUNDING
    report = check_engine(template, path, bn.load(path), [np.arange(1, 9)], judge, 60)
    assert report.verdict == bn.Verdict.WRONG
    assert report.notes[-1] == "probes: the embedding, the residual stream, the last norm or the head"
    report = check_engine(f"{sys.executable} -c 1 {{model}} {{tokens}} {{out}}", path, bn.load(path), [np.arange(1, 9)], judge, 60)
    nothing = "the engine gave nothing to judge: invalid: the engine ended with 0 and wrote no output"
    assert (report.verdict, report.reason) == (bn.Verdict.INVALID, nothing)
    write_gguf(path, model_of(fitted(Case(group=2))))  # the small models that are probed have heads that share, as it has
    template = template_of(program, READS_TEXT.replace("np.repeat(part, ", "(lambda x, n, axis: np.tile(x, (1, n, 1)))(part, "))
    report = check_engine(template, path, bn.load(path), [np.arange(1, 9)], judge, 60)
    assert "the sum of values" in report.notes[-1]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("prefix", [0, 4])
def test_a_wrong_tensor_is_a_finding_behind_a_prefix_as_well(layer, prefix):
    """Logits are off by more than rounding, and by less than flipped codes reach: the tensors say whether that is a mistake."""
    case = fitted(Case(family="bitnet-b1.58", layers=2, length=9, prefix=prefix))
    model, call, dump = model_of(case), call_of(case), {}
    record = lambda name, n, x: dump.__setitem__(name if n is None else f"{name}-{n}", np.array(x)[prefix:])  # noqa: E731
    logits = np.array(bn.forward_full(model, call.tokens, record=record)[0])[prefix:]
    dump["result_output"] = logits + np.float32(1e-3) * np.random.default_rng(1).standard_normal(logits.shape, np.float32) * logits.std()
    dump[f"kqv_out-{layer}"] *= np.float32(1.01)
    kept = {name: x for name, x in dump.items() if name.startswith(("attn_norm", "Vcur", "kqv_out", "result_output"))}
    judge = Judge(EXACT, Options(budget=0))
    assert judge.outcome(Ran("ok", dump=kept), model, call, definition(model, call), False).kind == "wrong"
    kept[f"kqv_out-{layer}"] = kept[f"kqv_out-{layer}"] / np.float32(1.01)
    assert judge.outcome(Ran("ok", dump=kept), model, call, definition(model, call), False).kind == "ok"
