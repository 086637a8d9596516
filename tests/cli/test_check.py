"""`bitnet-np check`: verdicts and exit codes on the embedded recording, on logits, and on dumps."""

import html
import os
import re
import signal
import time
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from command_line import TINY, TOKENS, save_array, with_commas

import bitnet_np
from bitnet_np import BITNET_CPP
from bitnet_np.engine.forward_pass import compute_logits, forward_full
from bitnet_np.files import embedded
from bitnet_np.files.digest import digest_of
from bitnet_np.judge.measures import Judgement
from bitnet_np.judge.mistakes.search import Search
from bitnet_np.judge.report.report import Report, next_step
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing import selftest
from bitnet_np.traces.record import record_trace

# --- the embedded recording -----------------------------------------------------------------------------------------------------------


def test_check_judges_the_embedded_recording(run):
    out = run("check", "-v")
    rows = [line.split() for line in out.splitlines() if re.match(r"\d+ (prefill|decode) ", line)]
    assert [row[:2] for row in rows] == [[str(n), path] for n in embedded.LENGTHS for path in ("prefill", "decode")] * 2
    assert [row[-1] for row in rows] == ["FLIPS"] * 8 + ["ROUNDING"] * 6 + ["FLIPS"] * 2
    assert out.count("tokens      max error  mean error      NMSE  scale") == 2
    assert out.count("the bits known for every machine") == 2
    assert out.startswith("PASS: the kernels on this machine give the known results\n")
    assert run("check") == run("check", "--quiet") == out.partition("\n")[0] + "\n"
    result = run("check", "--json")
    assert result["fine"] is True
    assert result["known_bits"] == {"forward, exact": True, "forward, bitnet.cpp": True}
    assert list(result["dialects"]) == ["exact", "bitnet.cpp"]
    judgement = result["dialects"]["bitnet.cpp"]["17 decode"]
    assert (judgement["verdict"], judgement["positions"]) == ("ROUNDING", 17)


def test_check_fails_where_the_kernels_do(run, monkeypatch):
    monkeypatch.setattr(selftest, "known_bits", dict)
    out = run("check", code=1)
    assert "forward, exact: NOT the bits known for every machine" in out
    assert "FAIL: the kernels are broken on this machine" in out
    assert run("check", "--json", code=1)["fine"] is False


def test_check_fails_where_roundings_that_are_followed_do_not_agree(run, monkeypatch):
    """FLIPS is fine for a dump from elsewhere. The recording must come to the verdict that is known for it."""
    recording = embedded.recording()
    noise = np.random.default_rng(0)
    logits = {name: value for name, value in recording.items() if name.startswith("logits")}
    moved = recording | {name: value + noise.normal(0, 1e-3, value.shape) for name, value in logits.items()}
    monkeypatch.setattr(embedded, "recording", lambda: moved)
    monkeypatch.setattr(selftest, "run", lambda beginning: [("forward, exact", True)])
    out = run("check", code=1)
    assert out.count("  FLIPS\n") == 16
    assert out.startswith("FAIL: the kernels are broken on this machine, see bitnet-np selftest\n")


def test_check_compiles_no_kernel_that_a_forward_pass_does_not_use(run, monkeypatch):
    every = selftest.cases()
    monkeypatch.setattr(selftest, "cases", lambda: every | {"sampling": lambda: pytest.fail("a kernel of another use")})
    assert set(run("check", "--json")["known_bits"]) == {name for name in every if name.startswith("forward")}


# --- dumps of logits ------------------------------------------------------------------------------------------------------------------


def changed(array, index, value):
    """A copy with another value at the index."""
    array = array.copy()
    array[index] = value
    return array


JUDGED = [
    (lambda x: x, 0, "SAME_BITS"),
    (lambda x: x.astype(np.float64), 0, "ROUNDING"),
    (lambda x: x.astype(np.float16), 0, "FLIPS"),
    (lambda x: x * np.float32(1.01), 1, "WRONG"),
    (lambda x: changed(x, (3, 4), np.nan), 2, "INVALID"),
]


@pytest.mark.parametrize(("change", "code", "verdict"), JUDGED)
def test_check_judges_a_dump(run, model, tmp_path, change, code, verdict):
    theirs = save_array(tmp_path / "theirs.npy", change(compute_logits(model, TOKENS[None])[0]))
    arguments = ["check", TINY, "--tokens", with_commas(TOKENS), "--theirs", theirs, "--budget", "0"]
    result = run(*arguments, "--json", code=code)
    assert (result["verdict"], result["meaning"]) == (verdict, Verdict[verdict].text)
    assert set(result["logits"]) == {field.name for field in fields(Judgement)} | {"meaning"}
    assert result["logits"]["verdict"] == verdict
    out = run(*arguments, "-v", code=code)
    first = f"{'FAIL' if code else 'PASS'} ({verdict}): {result['meaning']}"
    step = f"next: {next_step(Report(Verdict.WRONG, ''))}\n" if code == 1 and not result["logits"]["explanation"] else ""
    assert out.startswith(f"{first}\n{result['reason']}\n{step}{theirs} against {TINY}, types read off the dump\n")
    assert bool(re.search(rf"\nlogits .* {verdict}\n", out)) == (verdict != "INVALID")
    short = run(*arguments, code=code)
    assert short.startswith(out.partition("\n\n")[0].strip())
    assert re.search(r"^(logits|tokens) ", short, re.MULTILINE) is None
    assert len(re.sub(r"\n\nnote: .*", "", short).splitlines()) <= 4
    said = result["reason"] if result["reason"].startswith(verdict) else f"{verdict}: {result['reason']}"
    assert run(*arguments, "-q", code=code) == f"{'FAIL' if code else 'PASS'}: {said}\n"


def test_check_takes_bare_numbers(run, refused, model, tmp_path):
    """The vocabulary of the model and the size of the file say whether the logits are those of all tokens or of the last."""
    ids = np.stack([TOKENS, TOKENS[::-1]])
    batch = save_array(tmp_path / "ids.npy", ids)
    logits = forward_full(model, ids)

    def judged(array, name, *options, code=0):
        array.tofile(tmp_path / name, "\n" * name.endswith(".txt"))
        result = run("check", TINY, "--theirs", tmp_path / name, "--json", *options, code=code)
        return result["verdict"], result["logits"]["positions"]

    one = ["--tokens", with_commas(TOKENS)]
    assert judged(logits[0], "x.f32", *one) == ("SAME_BITS", 17)
    assert judged(logits[0], "x.bin", *one, "--dump-format", "raw") == ("SAME_BITS", 17)
    assert judged(logits[0, -1], "x.f32", *one) == ("SAME_BITS", 1)
    assert judged(logits[0, -1], "x.f32", *one, "--last") == ("SAME_BITS", 1)
    assert judged(logits[0], "x.f32", *one, "--last", code=2) == ("INVALID", 0)
    assert judged(logits, "x.f32", "--tokens-file", batch) == ("SAME_BITS", 17)
    bitnet_cpp = forward_full(model, ids, dialect=BITNET_CPP)
    assert judged(bitnet_cpp, "x.f32", "--tokens-file", batch, "--as", "bitnet.cpp", "--threads", "2") == ("SAME_BITS", 17)
    assert judged(logits[:, -1], "x.f32", "--tokens-file", batch, "--last") == ("SAME_BITS", 1)
    assert judged(logits[0].astype(float), "x.txt", *one) == ("SAME_BITS", 17)
    assert judged(logits[0, -1].astype(float), "x.txt", *one, "--last") == ("SAME_BITS", 1)
    assert judged(logits.astype(float), "x.txt", "--tokens-file", batch) == ("SAME_BITS", 17)
    assert judged(np.where(np.eye(17, 512), np.nan, logits[0]), "x.txt", *one, code=2) == ("INVALID", 0)
    assert judged(logits[0, :3], "x.f32", *one, code=2) == ("INVALID", 0)
    logits[0, :3, :-1].tofile(tmp_path / "x.f32")
    message = "x.f32: 6132 bytes, expected 4096 for float32 [2, 512]"
    assert message in refused("check", TINY, *one, "--theirs", tmp_path / "x.f32")
    np.savez(tmp_path / "x.npz", result_output=logits[0])
    assert "expected logits alone" in refused("check", TINY, *one, "--theirs", tmp_path / "x.npz", "--last")


def test_every_sequence_of_a_dump_has_its_verdict(run, refused, model, tmp_path):
    """Sequences are lines of any length. INVALID in one does not hide WRONG in another, which decides the exit code."""
    tokens, theirs, page = tmp_path / "ids.txt", tmp_path / "dump.npz", tmp_path / "r.html"
    rows = [TOKENS, TOKENS[:5], TOKENS[3:]]
    tokens.write_text("\n".join(with_commas(row) for row in rows))
    traces = []
    for b, row in enumerate(rows):
        record_trace(model, row, tmp_path / "one.npz", names=["kqv_out", "attn_sub_norm", "l_out"])
        traces.append({name: array * np.float32(b > 0) for name, array in np.load(tmp_path / "one.npz").items() if name != "tokens"})
    traces[2]["attn_sub_norm-1"] *= 2
    np.savez(theirs, **{name: np.concatenate([trace[name] for trace in traces]) for name in traces[0]})
    arguments = ["check", TINY, "--tokens-file", tokens, "--theirs", theirs, "--budget", "1"]
    out = run(*arguments, "--html", page, code=1)
    said = "WRONG at layer 1 attn_sub_norm: everything is 2 times what it should be"
    assert f"\nsequence 2: {said}; WRONG or INVALID too: sequence 0\n" in out
    assert re.search(rf"\nof 3 sequences:\n  sequence 0: INVALID: .*\n  sequence 2: {said}\n", out)
    assert re.search(r"\n  sequence 1: (?!WRONG|INVALID).*\n", run(*arguments, "-v", code=1))
    assert all(f"sequence {b}" in page.read_text("utf-8") for b in range(3))
    result = run(*arguments, "--json", code=1)["sequences"]
    assert [one["verdict"] for one in result][::2] == ["INVALID", "WRONG"]
    assert "holds one sequence" in refused(*arguments, "--dump-format", "eval-callback")
    assert "holds one sequence" in refused(*arguments, "--dump-format", "nodes")


def test_the_report_is_written_as_html(run, refused, model, tmp_path):
    """With what it was computed from. The names of files are text there, whatever they are."""
    theirs, page = tmp_path / ("&lt;i.npz" if os.name == "nt" else "<i>&.npz"), tmp_path / "r.html"
    record_trace(model, TOKENS, theirs)
    run("check", TINY, "--tokens", with_commas(TOKENS), "--theirs", theirs, "--html", page)
    text = page.read_text("utf-8")
    assert all(digest_of(path) in text for path in (Path(TINY), theirs))
    assert all(said in text for said in ("SHA-256 of the model", html.escape(theirs.name), np.__version__, "exact"))
    assert "<i>" not in text
    assert text.count("<script") == 2
    before = theirs.read_bytes()
    error = refused("check", TINY, "--tokens", with_commas(TOKENS), "--theirs", theirs, "--html", theirs)
    assert f"--html is {theirs}, which is read" in error
    assert theirs.read_bytes() == before
    error = refused("check", TINY, "--tokens", "1", "--theirs", theirs, "--html", tmp_path / "no" / "r.html")
    assert "--html is" in error
    assert "expected a file in a folder that is there" in error


def test_logits_alone_are_written_as_html_and_drawn(run, model, tmp_path):
    pytest.importorskip("matplotlib")
    theirs = save_array(tmp_path / "theirs.npy", compute_logits(model, TOKENS[None])[0] * np.float32(1.05))
    written = ["--html", tmp_path / "r.html", "--plot", tmp_path / "r.png"]
    run("check", TINY, "--tokens", with_commas(TOKENS), "--theirs", theirs, *written, code=1)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "1.05 times what it should be" in (tmp_path / "r.html").read_text("utf-8")


def test_a_report_on_a_terminal_fits_it_and_is_coloured(run, model, tmp_path, monkeypatch):
    """What is printed elsewhere has neither. A bar of a search that ended early is gone."""
    theirs = tmp_path / "theirs.npz"
    record_trace(model, TOKENS, theirs)
    arrays = dict(np.load(theirs))
    np.savez(theirs, **arrays | {"kqv_out-1": 2 * arrays["kqv_out-1"]})
    arguments = ["check", TINY, "--tokens", with_commas(TOKENS), "--theirs", theirs]
    plain = run(*arguments, code=1)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    out = run(*arguments, code=1)
    assert out.startswith("\033[1;31mFAIL\033[0m (WRONG): ")
    assert "\n\033[1;31mFAIL\033[0m: WRONG at layer 1 kqv_out" in out
    shown = re.sub(r"\033\[[\d;]*m", "", out)
    assert max(map(len, shown.splitlines())) <= 40 < max(map(len, plain.splitlines()))
    assert "\033[1;31mX\033[0m" in out
    assert "\033" not in plain


def test_the_first_and_the_last_lines_say_what_is_wrong_and_the_map_has_no_layer_that_is_right(run, model, tmp_path):
    theirs = tmp_path / "theirs.npz"
    record_trace(model, TOKENS, theirs)
    arrays = dict(np.load(theirs))
    np.savez(theirs, **arrays | {"kqv_out-1": arrays["kqv_out-1"] + np.random.default_rng(0).normal(size=arrays["kqv_out-1"].shape)})
    arguments = ["check", TINY, "--tokens", with_commas(TOKENS), "--theirs", theirs, "--budget", "0"]
    lines, every = run(*arguments, code=1).splitlines(), run(*arguments, "-v", code=1).splitlines()
    assert lines[1].startswith("WRONG at layer 1 kqv_out: ")
    assert lines[2] == "next: dump kq-1 and kq_soft_max-1 too, which tell scores, softmax and values apart"
    assert lines[-2:] == every[-2:] == [f"FAIL: {lines[1]}", lines[2]]
    assert [line[:8] for line in lines if line.startswith("layer ")] == ["layer  1"]
    assert "layers 0, 2: all = or ." in lines
    assert [line[:8] for line in every if re.match("layer +[0-9] [=.]", line)] == ["layer  0", "layer  1", "layer  2"]
    assert any(line.startswith("tensor ") for line in every)
    assert not any(line.startswith("tensor ") for line in lines)


def test_what_continuous_integration_reads(run, model, tmp_path):
    """JUnit's XML by a parser, TAP and the annotation line by line, and what JSON says of the call."""
    theirs = tmp_path / "theirs.npz"
    record_trace(model, TOKENS, theirs, names=["ffn_out", "ffn_norm", "attn_norm", "l_out"])
    arrays = dict(np.load(theirs))
    arguments = ["check", TINY, "--tokens", with_commas(TOKENS), "--theirs", theirs, "--budget", "0"]
    result = run(*arguments, "--json")
    assert (result["passed"], result["version"], result["schema_version"]) == (True, bitnet_np.__version__, 1)
    assert (result["tokens"], result["dialect"]) == ([TOKENS.tolist()], "exact")
    assert result["files"]["dump"] == {"path": str(theirs), "sha256": digest_of(theirs)}
    assert result["files"]["model"]["sha256"] == digest_of(Path(TINY))
    assert run(*arguments, "--format", "github").splitlines()[-1].startswith("::notice title=bitnet-np::SAME_BITS: ")
    np.savez(theirs, **arrays | {"ffn_out-1": arrays["ffn_out-1"] * np.nan, "l_out-0": arrays["l_out-0"] * 2})
    result = run(*arguments, "--json", code=1)
    bad = [o["verdict"] for o in result["operations"] if o["verdict"] in ("WRONG", "INVALID")]
    suite = ElementTree.fromstring(run(*arguments, "--format", "junit", code=1))
    cases = {case.get("name"): case for case in suite}
    assert (int(suite.get("tests")), len(cases)) == (len(result["operations"]) + 1,) * 2
    failed, ill = (cases[f"layer {n} {name}"][0] for n, name in ((0, "l_out"), (1, "ffn_out")))
    assert (failed.tag, ill.tag) == ("failure", "error")
    assert int(suite.get("failures")) == bad.count("WRONG") + 1
    assert failed.get("message").startswith("WRONG: ")
    lines = run(*arguments, "--format", "tap", code=1).splitlines()
    assert lines[:2] == ["TAP version 14", f"1..{len(cases)}"]
    assert [re.match("(not )?ok ([0-9]+) - ", line)[2] for line in lines[2:] if line[0] != " "] == [str(n + 1) for n in range(len(cases))]
    assert sum(line.startswith("not ok") for line in lines) == len(bad) + 1
    last = run(*arguments, "--format", "github", code=1).splitlines()[-1]
    assert last.startswith("::error title=bitnet-np::WRONG at layer 0 l_out: ")


@pytest.mark.parametrize(("form", "begin"), [("junit", "<?xml"), ("tap", "TAP version 14\n1..1\nok 1 - "), ("github", "PASS: ")])
def test_the_embedded_recording_is_reported_in_every_form(run, form, begin):
    assert run("check", "--format", form).startswith(begin)


# --- arguments ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("picture", "message"), [("no/x.png", "expected a file in a folder that is there"), ("x.foo", "x.foo: expected a name")]
)
def test_where_no_picture_can_be_drawn(refused, tmp_path, picture, message):
    pytest.importorskip("matplotlib")
    assert message in refused("compare", "nowhere.npz", "nowhere.npz", "--plot", picture)
    theirs = save_array(tmp_path / "theirs.npy", np.zeros((1, 512), np.float32))
    assert message in refused("check", TINY, "--tokens", "1", "--theirs", theirs, "--plot", picture)


def test_nothing_is_printed_before_an_error(refused, tmp_path):
    pytest.importorskip("matplotlib")
    theirs = save_array(tmp_path / "theirs.npy", np.zeros((1, 512), np.float32))
    error = refused("check", TINY, "--tokens", "1", "--theirs", theirs, "--plot", tmp_path / "x.png")
    assert error == f"bitnet-np: {tmp_path / 'x.png'}: nothing to draw, INVALID: their logits of position 0 are all 0.0\n"


def test_bitnet_rss_records_are_judged_by_their_rms(run, model, tmp_path):
    pytest.importorskip("blake3")
    path = tmp_path / "engine.jsonl"
    record_trace(model, TOKENS, path)
    arguments = ["check", TINY, "--tokens", with_commas(TOKENS), "--theirs", path]
    assert run(*arguments, "--json")["verdict"] == "SAME_BITS"


def test_roundings_beyond_those_declared_pass_unless_strict(run, refused, model, tmp_path):
    """The float16 of bitnet.cpp, in a dump of an engine of which another rounding is declared. No time for a search is enough."""
    theirs = tmp_path / "dump.npz"
    record_trace(model, TOKENS, theirs, dialect=BITNET_CPP)
    arguments = ["check", TINY, "--tokens", with_commas(TOKENS), "--theirs", theirs, "--precision", "scale=f16"]
    assert run(*arguments, "--budget", "0").startswith("PASS (NARROW)")
    assert run(*arguments, "--budget", "0", "--strict", code=1).startswith("FAIL (WRONG)")
    assert "budget is -1.0, expected seconds, 0 or more" in refused(*arguments, "--budget=-1")


def test_an_interrupt_prints_what_is_known_and_ends_with_its_own_code(ended, tmp_path, model, monkeypatch):
    """The verdict is there before a cause is sought."""
    theirs = save_array(tmp_path / "theirs.npy", compute_logits(model, TOKENS[None])[0][:, ::-1].copy())

    def interrupted(self, case, every):
        signal.raise_signal(signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr(Search, "named", interrupted)
    code, out, error = ended("check", TINY, "--tokens", with_commas(TOKENS), "--theirs", str(theirs))
    assert code == 130
    assert out.startswith("FAIL (WRONG): ")
    assert "the search for causes was interrupted" in out
    assert error.endswith("interrupted\n")
